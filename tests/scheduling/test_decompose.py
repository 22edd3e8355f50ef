"""Regions back into operations, operations into simpler ones."""

# pyright: reportUnknownLambdaType=false

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail import zoo
from dovetail.errors import ScheduleError
from dovetail.outlining.inline import inline_named
from dovetail.scheduling.decompose import decompose_nodes, has_formula
from dovetail.scheduling.schedule import schedule
from tests.scheduling.models import mlp, net, trained

_aten = torch.ops.aten


class Own(dovetail.Backend):
    """Runs the body."""

    name, version, trains = "own", "1", True

    def supports(self, region: dovetail.Region) -> Literal[True]:
        return True

    def compile(self, region: dovetail.Region, examples: Any) -> Any:
        return region.body


def operators(gm: torch.fx.GraphModule) -> list[str]:
    return [
        str(n.target).split(".")[1] for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload)
    ]


def apart(function: Callable[..., Any], *inputs: Tensor) -> torch.fx.GraphModule:
    """A function's graph with all that can be taken apart taken apart: values, strides and gradients compared."""
    gm = dovetail.capture(function, inputs)
    before = dovetail.text(gm)
    result = decompose_nodes(gm, [n.name for n in gm.graph.nodes if has_formula(n)])
    assert dovetail.text(gm) == before
    dovetail.check(result)
    assert not any(has_formula(n) and n.target is not _aten.softmax.int for n in result.graph.nodes)
    ours, theirs = ran(result, inputs), ran(gm, inputs)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return result


def ran(gm: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[Any]:
    given = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    torch.manual_seed(5)
    result = gm(*given)
    leaves = [x for x in given if x.requires_grad]
    gradients = torch.autograd.grad(result.square().sum(), leaves)
    return [result.detach(), result.stride(), *gradients, torch.rand(1)]


def heads(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


_HIDDEN = torch.tensor([[True, True, False], [True, False, True], [False, False, False]])


@pytest.mark.parametrize(
    ("options", "kv_heads", "has"),
    [
        ({}, 4, ["transpose", "matmul", "mul", "softmax", "matmul"]),
        ({"is_causal": True}, 4, ["tril", "masked_fill"]),
        ({"attn_mask": _HIDDEN}, 4, ["masked_fill", "_safe_softmax"]),
        ({"attn_mask": torch.randn(3, 3)}, 4, ["add", "_safe_softmax"]),
        ({"enable_gqa": True, "scale": 0.3}, 2, ["repeat_interleave"]),
        ({"dropout_p": 0.4}, 4, ["native_dropout"]),
    ],
    ids=["plain", "causal", "bool mask", "float mask", "grouped", "dropout"],
)
def test_attention_is_written_by_hand(options: dict[str, Any], kv_heads: int, has: list[str]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(q, k, v, **options)
        return mixed.transpose(1, 2).reshape(2, 3, 32)

    inputs = (heads(2, 4, 3, 8), heads(2, kv_heads, 3, 8), heads(2, kv_heads, 3, 8))
    result = operators(apart(attend, *inputs))
    assert not set(has) - set(result)
    assert "scaled_dot_product_attention" not in result


def test_dropout_within_one_kernel_of_a_device_is_refused() -> None:
    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.4)

    gm = dovetail.capture(attend, (torch.empty(1, 1, 3, 8, device="meta"),))
    with pytest.raises(
        ScheduleError, match="with random numbers that separate operators on meta do not draw"
    ):
        decompose_nodes(gm, ["scaled_dot_product_attention"])


@pytest.mark.parametrize(
    ("module", "sizes"),
    [
        (nn.Linear(4, 3), (2, 5, 4)),
        (nn.Linear(4, 3, bias=False), (4,)),
        (nn.LayerNorm([3, 4]), (2, 3, 4)),
        (nn.LayerNorm(4, bias=False), (2, 4)),
        (nn.RMSNorm(4), (2, 4)),
        (nn.GroupNorm(2, 4), (2, 4, 3, 3)),
        (nn.BatchNorm2d(4).eval(), (2, 4, 3, 3)),
        (nn.BatchNorm1d(4, affine=False).eval(), (2, 4)),
        (nn.Softmax(0), (3, 4)),
        (nn.LogSoftmax(1), (3, 4)),
        (nn.GELU(), (3, 4)),
        (nn.GELU("tanh"), (3, 4)),
        (nn.SiLU(), (3, 4)),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_modules_of_torch_are_written_by_hand(module: nn.Module, sizes: tuple[int, ...]) -> None:
    x = heads(*sizes)
    apart(module, x)
    if len(sizes) == 4:
        apart(module, x.to(memory_format=torch.channels_last))


def test_losses_are_written_by_hand() -> None:
    classes = torch.tensor([0, 2, -100, 1])
    apart(lambda x: F.cross_entropy(x, classes), heads(4, 3))
    apart(lambda x, y: F.mse_loss(x, y, reduction="sum"), heads(4, 3), heads(4, 4)[:, :3])
    gm = dovetail.capture(lambda x: F.cross_entropy(x, classes, label_smoothing=0.1), (heads(4, 3),))
    with pytest.raises(ScheduleError, match="smoothed"):
        decompose_nodes(gm, ["cross_entropy_loss"])


def test_half_precisions_are_worked_out_wide() -> None:
    x = heads(3, 64).bfloat16()
    module = nn.Sequential(nn.LayerNorm(64), nn.GELU(), nn.Softmax(1)).bfloat16()
    gm = dovetail.capture(module, (x,))
    result = decompose_nodes(gm, [n.name for n in gm.graph.nodes if has_formula(n)])
    assert "_to_copy" in operators(result)
    torch.testing.assert_close(result(x), module(x), rtol=0.02, atol=1e-3)


def test_meta_and_place_are_kept_and_names_are_fresh() -> None:
    model, x = net()
    gm = dovetail.capture(model, (x,))
    names = [n.name for n in gm.graph.nodes if has_formula(n)]
    stacks = {n.name: n.meta["nn_module_stack"] for n in gm.graph.nodes if n.name in names}
    result = decompose_nodes(gm, names)
    dovetail.check(result)
    old = {n.name for n in gm.graph.nodes}
    fresh = [n for n in result.graph.nodes if n.name not in old]
    assert fresh
    assert all(n.meta["nn_module_stack"] in stacks.values() and n.meta["val"] is not None for n in fresh)
    # Statistics are written where they were, and drawn numbers keep their order.
    assert operators(result).count("copy_") == operators(gm).count("copy_")
    again, y = net()
    loss, state = trained(again, y)
    scheduled = schedule(model, (x,))
    scheduled.decompose("blocks.*")
    assert not any(has_formula(n) for part in scheduled["blocks.*"].graphs for n in part.graph.nodes)
    ours, built = trained(scheduled.build(), x)
    torch.testing.assert_close(ours, loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(built, state, rtol=1e-4, atol=1e-5)


def test_sizes_that_are_symbols_stay_symbols() -> None:
    layer = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Softmax(1))
    batch = torch.export.Dim("batch", min=2, max=64)
    gm = dovetail.capture(layer, (heads(3, 8),), dynamic_shapes=({0: batch},))
    result = decompose_nodes(gm, [n.name for n in gm.graph.nodes if has_formula(n)])
    dovetail.check(result)
    x = heads(7, 8)
    torch.testing.assert_close(result(x), layer(x))


def test_what_torch_can_take_apart_is_done_when_asked_for() -> None:
    gm = dovetail.capture(lambda x: F.hardswish(x), (heads(3, 4),))
    assert not any(has_formula(n) for n in gm.graph.nodes)
    result = decompose_nodes(gm, ["hardswish"])
    assert "hardswish" not in operators(result)
    assert len(operators(result)) > 2
    torch.testing.assert_close(result(heads(3, 4)), F.hardswish(heads(3, 4)))


@pytest.mark.parametrize(
    ("function", "name", "reason"),
    [
        (lambda x: x + 1, "add", "aten.add.Tensor has no decomposition"),
        (lambda x: x.reshape(-1), "reshape", "has no simpler form"),
        (lambda x: F.dropout(x), "native_dropout", "has no decomposition"),
        (lambda x: x + 1, "linear", "the graph has no such operation"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused(
    function: Callable[[Tensor], Tensor], name: str, reason: str
) -> None:
    gm = dovetail.capture(function, (heads(3, 4),))
    before = dovetail.text(gm)
    with pytest.raises(ScheduleError, match=f"'{name}' cannot be decomposed: .*{reason}"):
        decompose_nodes(gm, [name])
    assert dovetail.text(gm) == before


def test_equal_operations_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import dovetail.scheduling.decompose as module

    traced: list[Any] = []
    trace = module.trace
    monkeypatch.setattr(module, "trace", lambda *a, **k: (traced.append(a), trace(*a, **k))[1])  # pyright: ignore
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)), nn.Linear(4, 2))
    gm = dovetail.capture(model, (heads(3, 4),))
    result = decompose_nodes(gm, [n.name for n in gm.graph.nodes if has_formula(n)])
    assert operators(result).count("matmul") == 21
    assert len(traced) == 2


def test_a_region_is_inlined_and_its_parts_are_matched_and_fused_again() -> None:
    model, x = net(training=False)
    s = schedule(model, (x,))
    expected = model(x)
    regions = s["blocks.*"].fuse(s["blocks.*"].find(mlp), kind="mlp")
    before = [dovetail.text(gm) for gm in s["blocks.*"].graphs]
    s.decompose(regions[:2])
    assert [r.path for r in s["blocks.*"].regions] == ["blocks.2"]
    again = s["blocks.*"].fuse(s["blocks.*"].find(mlp), kind="mlp")
    assert [r.path for r in again] == ["blocks.0", "blocks.1"]
    s.undo(2)
    assert [dovetail.text(gm) for gm in s["blocks.*"].graphs] == before
    assert torch.equal(s.build()(x), expected)


def test_many_regions_are_opened_in_one_sweep_each_one_level_deep() -> None:
    gm = dovetail.capture(lambda x: ((x + 1) * 2).relu().exp().sin().cos(), (heads(3),))
    gm = dovetail.outline(gm, ["add", "mul"], kind="inner")
    gm = dovetail.outline(gm, ["inner_0", "relu"], kind="outer")
    gm = dovetail.outline(gm, ["exp", "sin"], kind="other")
    opened = inline_named(gm, ["outer_0", "other_0"], depth=1)
    assert [r.name for r in dovetail.regions(opened)] == ["inner_0"]
    assert torch.equal(opened(heads(3)), gm(heads(3)))
    with pytest.raises(dovetail.DovetailError, match="no region named 'none_0'"):
        inline_named(gm, ["outer_0", "none_0"])


def test_regions_and_operations_are_taken_apart_in_one_step() -> None:
    model, x = net(training=False)
    expected = model(x)
    s = schedule(model, (x,))
    block = s["blocks.0"]
    region = block.fuse(block.find(mlp), kind="mlp")[0]
    norm = block.find(nn.LayerNorm)[0]
    block.fuse(block.find(nn.BatchNorm1d), kind="stats", backends=Own())
    s.decompose([region, norm])
    assert "layer_norm" not in operators(block.graph)
    assert "gelu" in operators(block.graph)
    assert [r.backend for r in block.regions] == ["own"]
    assert [step["do"] for step in s.history] == ["schedule", "fuse", "fuse", "decompose"]
    torch.testing.assert_close(s.build()(x), expected)


def test_a_linear_module_by_path_and_by_class() -> None:
    model, x = net(training=False)
    expected = model(x)
    s = schedule(model, (x,))
    s["head"].decompose()
    assert operators(s["head"].graph) == ["t", "matmul", "add"]
    s.decompose(s["blocks.0"].find(nn.Linear))
    assert operators(s["blocks.0"].graph).count("matmul") == 2
    torch.testing.assert_close(s.build()(x), expected)
    # Another batch size is captured anew, and taken apart again.
    s.release()
    y = torch.randn(6, 8)
    torch.testing.assert_close(s.build()(y), s.release()(y))


def test_a_module_with_nothing_to_take_apart_is_refused() -> None:
    model, x = net(training=False)
    s = schedule(model, (x,))
    before = s.text()
    with pytest.raises(ScheduleError, match=r"no operation of blocks\.0\.drop can be decomposed"):
        s["blocks.0.drop"].decompose()
    assert s.text() == before
    block = s["blocks.0"]
    region = block.fuse(block.find(mlp), kind="mlp")[0]
    before = s.text()
    with pytest.raises(ScheduleError, match=f"simpler ones; decompose its regions first: {region.name}"):
        s["blocks.0.up"].decompose()
    assert s.text() == before
    s.decompose(region)
    match = block.find(_aten.gelu)[0]
    s.decompose(match)
    with pytest.raises(ScheduleError, match="not there any more: a later step changed it"):
        s.decompose(match)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_zoo_is_taken_apart_and_its_kinds_are_matched_again(name: str) -> None:
    entry = zoo.get(name)
    model, inputs = entry.build().eval(), entry.example_inputs()
    expected = model(*inputs.args, **inputs.kwargs)
    s = schedule(model, inputs.args, inputs.kwargs)
    s["layers.*"].decompose()
    for gm in s["layers.*"].graphs:
        dovetail.check(gm)
        assert not {"linear", "scaled_dot_product_attention", "layer_norm", "silu", "gelu"} & set(
            operators(gm)
        )
    for rule in dovetail.rules.DEFAULT:
        if rule.name in ("attention_by_hand", "attention_causal", "layer_norm", "rms_norm"):
            matches = s["layers.*"].find(rule)
            if matches:
                s.fuse(matches)
    kinds = {r.kind for r in s["layers.*"].regions}
    assert "attention" in kinds
    assert kinds & {"rms_norm", "layer_norm"}
    torch.testing.assert_close(s.build()(*inputs.args, **inputs.kwargs), expected, rtol=1e-4, atol=1e-5)
