"""A vendor's compiler claims what it knows by kind, and another takes what is left."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import dovetail
from dovetail import zoo
from dovetail.backends.external.onnxruntime import OnnxRuntime
from examples.vendor_backend import KERNELS, RULES, Npu
from tests.formats.vendor import CLOSE, KERNEL, KINDS, UNKNOWN, attends, claimed, known, unguarded
from tests.formats.vendor_fixtures import captured, network, picture, without_gradients  # noqa: F401
from tests.guides import ROOT


class Interpreted(dovetail.Backend):
    """Takes any region and runs its body node by node, counting."""

    name = "plain"
    rules = dovetail.rules.capability(
        lambda node: node.op == "call_function", kind="rest", min_size=1, join_siblings=True
    )
    smallest = 1

    def __init__(self) -> None:
        self.ran = 0

    def supports(self, region: dovetail.Region) -> Any:
        if region.kind != "rest":
            return dovetail.Decline(f"'{region.kind}' is not mine")
        return True

    def compile(self, region: dovetail.Region, examples: Any) -> Callable[..., Any]:
        interpreter = torch.fx.Interpreter(region.body)

        def run(*operands: Any) -> Any:
            self.ran += 1
            return interpreter.run(*operands)

        return run


@pytest.fixture(params=[OnnxRuntime, Interpreted])
def other(request: pytest.FixtureRequest) -> Any:
    if request.param is OnnxRuntime:
        pytest.importorskip("onnxruntime")
    return request.param()


def who(gm: GraphModule) -> dict[tuple[str, ...], str | None]:
    return {region.nodes: region.backend for region in dovetail.regions(gm, nested=True)}


def test_exactly_what_it_knows_is_claimed(gm: GraphModule, model: nn.Module, x: Tensor) -> None:
    fused = dovetail.fuse(gm, RULES)
    expected = known(gm)
    assert Counter(kind for kind, _ in expected) == {
        "npu.conv_act": 1,
        "npu.avg_pool": 1,
        "npu.attention": 2,
        "npu.sigmoid": 2,
    }
    assert claimed(fused) == expected
    assert len(dovetail.regions(fused, nested=True)) == len(expected)
    # All else is where it was, and nothing was computed otherwise.
    assert dovetail.text(dovetail.inline(fused)) == dovetail.text(gm)
    assert torch.equal(fused(x), model(x))


def test_two_compilers_share_a_model_and_no_region(
    gm: GraphModule, model: nn.Module, x: Tensor, other: Any
) -> None:
    npu = Npu()
    both = dovetail.fuse(dovetail.fuse(gm, npu.rules), other.rules)
    assert torch.equal(both(x), model(x))
    assert claimed(both) == known(gm)
    outlined = dovetail.regions(both, nested=True)
    assert not [region.name for region in outlined if "/" in region.name]
    held = [name for region in outlined for name in region.nodes]
    assert len(held) == len(set(held))
    operations = {n.name for n in gm.graph.nodes if n.op == "call_function"}
    assert set(held) == operations

    lowered = dovetail.lower(both, [npu, other])
    for region in dovetail.regions(lowered):
        assert region.backend == ("npu" if region.kind in KERNELS else other.name), region.name
    npu.calls.clear()
    torch.testing.assert_close(lowered(x), model(x), **CLOSE)
    assert npu.calls == Counter(kind for kind, _ in known(gm))


def test_the_record_has_who_took_what_and_why_others_did_not(gm: GraphModule, other: Any) -> None:
    fused = dovetail.fuse(gm, RULES)
    lowered = dovetail.lower(dovetail.fuse(fused, other.rules), [Npu(), other])
    ledger = dovetail.explain(lowered)
    assert {(a.kind, a.nodes) for a in ledger.accepted if a.kind in KERNELS} == set(known(gm))
    (left,) = [d for d in ledger.declined if d.rule.startswith("npu.")]
    assert left.nodes == ("conv2d_1", "relu_1")
    assert left.reason == "convolutions have neither dilation nor groups"
    assert any(left.reason in reason for reason in dovetail.explain(fused).why_not("conv2d_1", "relu_1"))
    of_kind = {region.name: region.kind for region in dovetail.regions(lowered)}
    compiled_by = {e.region: e.backend for e in ledger.lowered if e.outcome in ("compiled", "disk")}
    for name, backend in compiled_by.items():
        assert backend == ("npu" if of_kind[name] in KERNELS else other.name)
    assert set(compiled_by.values()) == {"npu", other.name}
    refused = {(e.region, e.backend): e.reason for e in ledger.lowered if e.outcome == "supports"}
    for name, kind in of_kind.items():
        if kind not in KERNELS:
            assert refused[name, "npu"] == f"'npu' has no kernel for kind '{kind}'"


def test_one_step_or_two_make_no_difference(gm: GraphModule, x: Tensor, other: Any) -> None:
    npu = Npu()
    fused = dovetail.fuse(gm, RULES)
    at_once = dovetail.lower(dovetail.fuse(fused, other.rules), [npu, other])

    first = dovetail.lower(fused, [npu])
    between = dovetail.fuse(first, other.rules)
    assert {r.backend for r in dovetail.regions(between) if r.kind in KERNELS} == {"npu"}
    npu.calls.clear()
    between(x)
    assert sum(npu.calls.values()) == len(known(gm))
    then = dovetail.lower(between, [npu, other])

    by_kind = dovetail.lower(between, {**dict.fromkeys(KINDS, npu), "*": other})
    for lowered in (then, by_kind):
        assert who(lowered) == who(at_once)
        assert torch.equal(lowered(x), at_once(x))


def test_compile_does_all_of_it(model: nn.Module, x: Tensor, gm: GraphModule, other: Any) -> None:
    npu = Npu()
    fast = dovetail.compile(model, (x,), backends=[npu, other])
    npu.calls.clear()
    torch.testing.assert_close(fast(x), model(x), **CLOSE)
    assert npu.calls == Counter(kind for kind, _ in known(gm))


def test_taking_one_back_leaves_the_other(gm: GraphModule, model: nn.Module, x: Tensor, other: Any) -> None:
    npu = Npu()
    both = dovetail.fuse(dovetail.fuse(gm, RULES), other.rules)
    lowered = dovetail.lower(both, [npu, other])
    mine = {nodes for _, nodes in known(gm)}

    without = dovetail.lower(lowered, {**dict.fromkeys(KINDS, ()), "*": other})
    assert who(without) == {nodes: None if nodes in mine else other.name for nodes in who(lowered)}
    npu.calls.clear()
    torch.testing.assert_close(without(x), model(x), **CLOSE)
    assert not npu.calls

    inlined = lowered
    for kind in KINDS:
        inlined = dovetail.inline(inlined, kind=kind)
    assert who(inlined) == {nodes: name for nodes, name in who(lowered).items() if nodes not in mine}
    torch.testing.assert_close(inlined(x), model(x), **CLOSE)
    assert not npu.calls

    alone = dovetail.lower(lowered, [npu])
    assert who(alone) == {nodes: "npu" if nodes in mine else None for nodes in who(lowered)}
    torch.testing.assert_close(alone(x), model(x), **CLOSE)
    assert npu.calls

    nobody = dovetail.lower(lowered, [])
    assert set(who(nobody).values()) == {None}
    assert torch.equal(nobody(x), model(x))


@pytest.mark.parametrize("variant", UNKNOWN)
def test_a_variant_it_does_not_know_runs_as_it_was(variant: str) -> None:
    function, nodes, reason = UNKNOWN[variant]
    x = torch.randn(2, 4, 9, 9)
    fused = dovetail.fuse(dovetail.capture(function, (x,)), RULES)
    assert not dovetail.regions(fused)
    assert (nodes, reason) in [(d.nodes, d.reason) for d in dovetail.explain(fused).declined]
    npu = Npu()
    with pytest.warns(UserWarning, match="no regions to lower"):
        lowered = dovetail.lower(fused, [npu])
    assert torch.equal(lowered(x), function(x))
    assert not npu.calls
    # Nobody has claimed it, so that others can.
    taken = dovetail.fuse(fused, Interpreted().rules)
    assert set(nodes) <= {name for region in dovetail.regions(taken) for name in region.nodes}


TAKEN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "padding that counts": (lambda x: F.avg_pool2d(x, 3, 2, 1), "npu.avg_pool"),
    "windows over each other": (lambda x: F.avg_pool2d(x, (3, 2), (1, 2)), "npu.avg_pool"),
    "stride": (lambda x: F.gelu(F.conv2d(x, KERNEL, stride=(2, 1), padding=(0, 1))), "npu.conv_act"),
    "sigmoid behind": (lambda x: torch.sigmoid(F.conv2d(x, KERNEL)), "npu.conv_act"),
    "causal": (lambda x: attends(x, is_causal=True), "npu.attention"),
    "scale": (lambda x: attends(x, scale=0.3), "npu.attention"),
    "by hand": (
        lambda x: torch.softmax(x @ x.transpose(-1, -2) / 3, -1) @ x,
        "npu.attention",
    ),
    "sigmoid": (torch.sigmoid, "npu.sigmoid"),
}


@pytest.mark.parametrize("variant", TAKEN)
def test_a_variant_it_knows_is_computed_right(variant: str) -> None:
    function, kind = TAKEN[variant]
    x, npu = torch.randn(2, 4, 9, 9), Npu()
    fused = dovetail.fuse(dovetail.capture(function, (x,)), RULES)
    assert [region.kind for region in dovetail.regions(fused)] == [kind]
    lowered = dovetail.lower(fused, [npu], verify=True, on_error="raise")
    npu.calls.clear()
    torch.testing.assert_close(lowered(x), function(x), **CLOSE)
    assert npu.calls == {kind: 1}


def test_a_region_of_its_kind_that_it_does_not_know_is_declined() -> None:
    function, _, reason = UNKNOWN["padding that does not count"]
    x, npu = torch.randn(2, 4, 9, 9), Npu()
    lowered = dovetail.lower(dovetail.fuse(dovetail.capture(function, (x,)), unguarded), [npu])
    (region,) = dovetail.regions(lowered)
    assert (region.kind, region.backend) == ("npu.avg_pool", None)
    (entry,) = dovetail.explain(lowered).lowered
    assert (entry.backend, entry.outcome, entry.reason) == ("npu", "supports", reason)
    assert torch.equal(lowered(x), function(x))
    assert not npu.calls


def test_another_precision_is_declined_region_by_region(model: nn.Module, x: Tensor) -> None:
    wide, npu = model.double(), Npu()
    fused = dovetail.fuse(dovetail.capture(wide, (x.double(),)), RULES)
    lowered = dovetail.lower(fused, [npu])
    assert set(who(lowered).values()) == {None}
    reasons = {e.reason.rpartition(" is ")[2] for e in dovetail.explain(lowered).lowered}
    assert reasons == {"torch.float64"}
    assert torch.equal(lowered(x.double()), wide(x.double()))
    assert not npu.calls


@pytest.mark.parametrize("name", ["vit", "resnet", "inception", "bert", "llama", "mlp"])
def test_models_of_the_zoo_are_claimed_exactly(name: str) -> None:
    entry = zoo.get(name)
    model, inputs = entry.build().eval(), entry.example_inputs()
    gm = dovetail.FoldConvBatchNorm()(dovetail.capture(model, inputs.args, inputs.kwargs))
    npu = Npu()
    fused = dovetail.fuse(gm, RULES)
    expected = known(gm)
    assert claimed(fused) == expected
    lowered = dovetail.lower(dovetail.fuse(fused, Interpreted().rules), [npu, Interpreted()])
    npu.calls.clear()
    result = lowered(*inputs.args, **inputs.kwargs)
    assert npu.calls == Counter(kind for kind, _ in expected)
    torch.testing.assert_close(result, model(*inputs.args, **inputs.kwargs), **CLOSE)


def test_the_example_runs() -> None:
    pytest.importorskip("onnxruntime")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "vendor_backend.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same bits: True" in done.stdout
    assert "left alone: conv2d_1, relu_1: convolutions have neither dilation nor groups" in done.stdout
