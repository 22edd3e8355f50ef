"""ONNX files as their users read them: names of results and sizes, what is missing, and translations of one's own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._pytree import tree_leaves

import dovetail
from dovetail import InvalidArgument
from dovetail.errors import SaveError
from dovetail.formats.onnx.to_onnx import to_onnx

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

X = torch.randn(3, 4)


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Answer:
    logits: Tensor
    loss: Tensor | None = None
    states: list[Tensor] | None = None


torch.export.register_dataclass(Answer)


def session(path: Path) -> Any:
    return ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def ran(path: Path, *given: Tensor) -> list[Tensor]:
    runs = session(path)
    names = [i.name for i in runs.get_inputs()]
    results = runs.run(None, dict(zip(names, (g.numpy() for g in given), strict=True)))
    return [torch.from_numpy(r) for r in results]


def written(function: Any, path: Path, *args: Any, fuse: bool = True, **options: Any) -> Path:
    gm = dovetail.capture(function, args, dynamic_shapes=options.pop("dynamic_shapes", None))
    return to_onnx(dovetail.fuse(gm) if fuse else gm, path / "model.onnx", **options)


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda x: x + 1, ["output"]),
        (lambda x: (x + 1, x * 2), ["output_0", "output_1"]),
        (lambda x: [x + 1], ["output_0"]),
        (
            lambda x: {"logits": x + 1, "past": [(x * 2, x * 3), (x * 4, x * 5)]},
            ["logits", "past.0.0", "past.0.1", "past.1.0", "past.1.1"],
        ),
        (lambda x: Pair(x + 1, x * 2), ["left", "right"]),
        (lambda x: OrderedDict(b=x + 1, a=Pair(x * 2, x * 3)), ["b", "a.left", "a.right"]),
        (lambda x: (x + 1, {"k": x * 2}), ["output_0", "output_1.k"]),
        (lambda x: Answer(x + 1, states=[x * 2, x * 3]), ["logits", "states.0", "states.1"]),
        (lambda x: [Answer(x + 1)], ["output_0.logits"]),
        # What is None is left out, and the others keep their names.
        (lambda x: (None, x + 1), ["output_1"]),
        (lambda x: {"loss": None, "logits": x * 2}, ["logits"]),
        # An empty name is that of an input which is left out.
        (lambda x: {"": x + 1, "a": {"": x * 2}}, ["output", "a."]),
        # A result that is an input, one that comes twice, and one that is called as an input is.
        (lambda x: {"x": x, "add": x + 1}, ["x_1", "add"]),
        (lambda x: dict.fromkeys(("a", "b"), x + 1), ["a", "b"]),
    ],
)
def test_results_are_named_by_what_the_model_returns(function: Any, names: list[str], tmp_path: Path) -> None:
    path = written(function, tmp_path, X)
    onnx.checker.check_model(onnx.load(path), full_check=True)
    assert [o.name for o in session(path).get_outputs()] == names
    returned = [x for x in tree_leaves(function(X)) if x is not None]
    for result, expected in zip(ran(path, X), returned, strict=True):
        torch.testing.assert_close(result, expected)


def test_names_of_weights_and_operations_give_way_to_those_of_results(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"weight": x * self.weight, "mul": torch.relu(x), "relu": x - 1}

    path = written(Model(), tmp_path, X, fuse=False)
    assert [o.name for o in session(path).get_outputs()] == ["weight", "mul", "relu"]
    model = onnx.load(path)
    names = [v for n in model.graph.node for v in n.output] + [i.name for i in model.graph.initializer]
    assert len(names) == len(set(names))


def test_sizes_keep_the_names_of_their_dims(tmp_path: Path) -> None:
    batch, length = Dim("batch", min=2, max=64), Dim("length", min=2, max=64)

    def joined(x: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat([x, *pair], 1)

    args = (X, (X, X))
    path = written(
        joined,
        tmp_path,
        *args,
        dynamic_shapes={"x": {0: batch, 1: length}, "pair": ({0: batch, 1: length}, {0: batch, 1: length})},
    )
    runs = session(path)
    assert [i.shape for i in runs.get_inputs()] == [["batch", "length"]] * 3
    assert runs.get_outputs()[0].shape == ["batch", "3*length"]
    other = torch.randn(5, 7)
    (result,) = ran(path, other, other, other)
    assert torch.equal(result, joined(other, (other, other)))
    gm = dovetail.capture(torch.relu, (X,), dynamic_shapes=({0: batch, 1: length},))
    dovetail.save(dovetail.fuse(gm), tmp_path / "saved.pt2")
    again = dovetail.load(tmp_path / "saved.pt2")
    assert session(to_onnx(again, tmp_path / "again.onnx")).get_inputs()[0].shape == ["batch", "length"]
    # Sizes without a name of their own keep the symbol.
    auto = written(lambda x: x + 1, tmp_path, X, dynamic_shapes=({0: Dim.AUTO},))
    assert "batch" not in str(session(auto).get_inputs()[0].shape)


@torch.library.custom_op("dovetail_onnx_names::shifted", mutates_args=())
def shifted(x: Tensor, by: float) -> Tensor:
    return x + by


@torch.library.custom_op("dovetail_onnx_names::halves", mutates_args=())
def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, -1)
    return first.clone(), second.clone()


@shifted.register_fake
def _(x: Tensor, by: float) -> Tensor:
    return torch.empty_like(x)


@halves.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    half = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    return half, torch.empty_like(half)


SHIFTED, HALVES = (
    torch.ops.dovetail_onnx_names.shifted.default,
    torch.ops.dovetail_onnx_names.halves.default,
)


def both(x: Tensor) -> Tensor:
    left, right = halves(shifted(x, 2.0))
    return torch.relu(left * right) + shifted(left, 1.5)


class Both(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return both(x)


def test_everything_that_is_missing_is_reported_at_once(tmp_path: Path) -> None:
    gm = dovetail.capture(Both(), (X,))
    with pytest.raises(SaveError) as caught:
        to_onnx(gm, tmp_path / "model.onnx")
    message = str(caught.value)
    assert "dovetail_onnx_names.shifted.default: 2 times, first node 'shifted'" in message
    assert "dovetail_onnx_names.halves.default: 1 time, first node 'halves'" in message
    assert "operators={" in message
    assert "test_onnx_names.py" in message
    assert caught.value.node == "shifted"
    assert not (tmp_path / "model.onnx").exists()


def test_what_is_missing_in_regions_counts_once_for_each_call(tmp_path: Path) -> None:
    gm = dovetail.capture(lambda x: shifted(torch.relu(shifted(torch.relu(x), 2.0)), 2.0), (X,))
    for members in (["relu", "shifted"], ["relu_1", "shifted_1"]):
        gm = dovetail.outline(gm, members, kind="shifting")
    assert len({id(r.body) for r in dovetail.regions(gm)}) == 1
    with pytest.raises(SaveError, match=r"shifted.default \(2 times\)"):
        to_onnx(gm, tmp_path / "model.onnx")


TRANSLATIONS = {
    SHIFTED: lambda op, x, by: op.Add(x, by),
    HALVES: lambda op, x: op.Split(x, axis=-1, num_outputs=2, outputs=2),
}


@pytest.mark.parametrize("outlined", [False, True])
def test_translations_of_ones_own(outlined: bool, tmp_path: Path) -> None:
    gm = dovetail.capture(both, (X,))
    gm = dovetail.outline(gm, ["shifted", "halves"], kind="npu.cut") if outlined else gm
    path = to_onnx(gm, tmp_path / "model.onnx", operators=TRANSLATIONS)
    torch.testing.assert_close(ran(path, X), [both(X)])
    packet = to_onnx(
        gm, tmp_path / "other.onnx", operators={k.overloadpacket: f for k, f in TRANSLATIONS.items()}
    )
    torch.testing.assert_close(ran(packet, X), [both(X)])


@pytest.mark.parametrize(
    ("translation", "expected"),
    [
        (lambda op, x, by: op.Add(x, op.Constant(value=torch.full((4,), 2.0))), X + 2),
        (lambda op, x, by: op.Add(x, op.Reshape(torch.full((1, 1), 2.0), [])), X + 2),
    ],
    ids=["a tensor as an attribute", "an empty list"],
)
def test_what_a_translation_may_give(translation: Any, expected: Tensor, tmp_path: Path) -> None:
    path = written(lambda x: shifted(x, 2.0), tmp_path, X, operators={SHIFTED: translation})
    torch.testing.assert_close(ran(path, X), [expected])


def test_a_graph_that_returns_no_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="returns no tensor"):
        written(lambda x: {"loss": None}, tmp_path, X)


def test_a_translation_may_have_another_domain_and_stand_for_an_operator_that_has_one(tmp_path: Path) -> None:
    def fast(op: Any, x: str) -> str:
        assert op.node.meta["val"].dtype is torch.float32
        return op.FastRelu(x, domain="my.npu", bits=8)

    gm = dovetail.capture(lambda x: torch.relu(x) + 1, (X,))
    path = to_onnx(gm, tmp_path / "model.onnx", operators={torch.ops.aten.relu: fast})
    model = onnx.load(path)
    assert [(n.domain, n.op_type) for n in model.graph.node if n.domain] == [("my.npu", "FastRelu")]
    assert {i.domain: i.version for i in model.opset_import}["my.npu"] == 1


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": (lambda op, x, by: None, "returned None; return the name"),
    "a made-up name": (lambda op, x, by: "there", "returned 'there'"),
    "several": (lambda op, x, by: (op.Add(x, by), x), "returned ("),
    "an unknown operator": (lambda op, x, by: op.Addd(x, by), "uses 'Addd', which opset 20"),
    "too few inputs": (lambda op, x, by: op.Add(x), "uses 'Add' wrongly"),
    "an unknown attribute": (lambda op, x, by: op.Add(x, by, alpha=2), "uses 'Add' wrongly"),
    "an unknown input": (lambda op, x, by: op.Add("y", by), "reads 'y', which is not a value"),
    "an object": (lambda op, x, by: op.Add(x, object()), "reads a object"),
    "an exception": (lambda op, x, by: 1 / 0, "default raised ZeroDivisionError: division"),
    "too few arguments": (lambda op, x: op.Relu(x), "raised TypeError"),
    "another dtype": (lambda op, x, by: op.Cast(x, to=7), "the model is not valid"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_translation_is_refused(name: str, tmp_path: Path) -> None:
    translation, reason = WRONG[name]
    gm = dovetail.capture(lambda x: shifted(x, 2.0), (X,))
    with pytest.raises(SaveError) as caught:
        to_onnx(gm, tmp_path / "model.onnx", operators={SHIFTED: translation})
    assert reason in str(caught.value)
    assert "dovetail_onnx_names.shifted.default" in str(caught.value)
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize(
    ("operators", "reason"),
    [
        ([SHIFTED], "must be a dict"),
        ({"aten.relu": F.relu}, "keys are operators"),
        ({SHIFTED: "Add"}, "a translation is a function"),
    ],
)
def test_what_is_no_table_of_translations_is_refused(operators: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        to_onnx(dovetail.capture(torch.relu, (X,)), tmp_path / "model.onnx", operators=operators)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.diff(),
        lambda x: x.diff(n=2, dim=0),
        lambda x: torch.diff(x, dim=1, prepend=x[:, :1], append=x),
        lambda x: (x > 0).diff(dim=-1),
        lambda x: x.diff(n=0) + 1,
        lambda x: torch.min(x, x.flip(0)) + torch.max(x, x * 2),
        lambda x: torch._weight_norm(x, x[:, :1].abs(), 0),
        lambda x: x[torch.arange(3)[:, None], torch.arange(x.shape[1])[None]],
    ],
)
def test_operators_that_models_need(function: Any, tmp_path: Path) -> None:
    path = written(function, tmp_path, X, fuse=False)
    torch.testing.assert_close(ran(path, X)[0], function(X))


def test_a_draw_that_nobody_reads_is_left_out(tmp_path: Path) -> None:
    def skipping(x: Tensor) -> Tensor:
        torch.rand([])
        return torch.relu(x)

    path = written(skipping, tmp_path, X, fuse=False)
    assert [n.op_type for n in onnx.load(path).graph.node] == ["Relu"]
    gm = dovetail.capture(lambda x: x + torch.rand_like(x), (X,))
    with pytest.raises(SaveError, match="rand_like"):
        to_onnx(gm, tmp_path / "other.onnx")


def test_a_llama_without_a_cache(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=30,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    batch, length = Dim("batch", min=2, max=8), Dim("length", min=4, max=32)
    ids = torch.randint(0, 30, (2, 6))
    gm = dovetail.capture(
        model,
        (),
        {"input_ids": ids, "use_cache": False},
        dynamic_shapes={"input_ids": {0: batch, 1: length}, "use_cache": None},
    )
    path = to_onnx(gm, tmp_path / "llama.onnx")
    other = torch.randint(0, 30, (3, 9))
    assert [o.name for o in session(path).get_outputs()] == ["logits"]
    assert session(path).get_inputs()[0].shape == ["batch", "length"]
    (logits,) = ran(path, other)
    torch.testing.assert_close(logits, model(input_ids=other, use_cache=False).logits, rtol=1e-4, atol=1e-5)


def test_a_cache_is_named_by_layer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=30, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    gm = dovetail.capture(model, (), {"input_ids": torch.randint(0, 30, (2, 6)), "use_cache": True})
    path = to_onnx(gm, tmp_path / "gpt2.onnx")
    assert [o.name for o in session(path).get_outputs()] == [
        "logits",
        "past_key_values.0.key",
        "past_key_values.1.key",
        "past_key_values.0.value",
        "past_key_values.1.value",
    ]
