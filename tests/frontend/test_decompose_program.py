"""Programs decomposed in one walk come out as torch's own decomposition makes them, or not at all."""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.node import map_arg

import dovetail
from dovetail import zoo
from dovetail.errors import CaptureError
from dovetail.frontend import decompose_program, export
from dovetail.frontend.decompose_ops import Unsure
from dovetail.frontend.export_aliases import storage_of
from tests.fuzz.hunt import draw
from tests.fuzz.program import NotAProgram, make_inputs
from tests.zoo_graphs import zoo_graph, zoo_inputs

# Given by the tracer to itself; `torch_fn` is a running number where the exporter left none.
_ITS_OWN = frozenset({"from_node", "seq_nr", "desc", "is_functional_regenerated"})
# Missing from what the tracer adds after the last operator of the program.
_PROVENANCE = ("original_aten", "torch_fn", "nn_module_stack", "stack_trace")
_COPY = torch.ops.aten.copy.default


class Both:
    """Decomposes every program that is captured in both ways and compares them; counts those that were."""

    def __init__(self) -> None:
        self.compared = 0
        self.reasons: list[str] = []
        self.original = decompose_program.decomposed

    def __call__(self, program: Any, signature: Any) -> Any:
        try:
            mine = self.original(program, signature)
        except Unsure as reason:
            self.reasons.append(str(reason))
            raise
        theirs = export.retraced(program, signature)
        have, want = facts(mine), facts(theirs)
        assert [fact["name"] for fact in have] == [fact["name"] for fact in want]
        for one, other in zip(have, want, strict=True):
            ignored = (
                _PROVENANCE if "stack_trace" not in other else () if "torch_fn" in one else ("torch_fn",)
            )
            one, other = ({k: v for k, v in f.items() if k not in ignored} for f in (one, other))
            assert one == other
        assert kinds(mine) == kinds(theirs)
        assert set(mine.constants) == set(theirs.constants)
        self.compared += 1
        return mine


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Both:
    spy = Both()
    monkeypatch.setattr(decompose_program, "decomposed", spy)
    return spy


def facts(program: Any) -> list[dict[str, Any]]:
    """All there is to a graph, node by node; inputs that the caller gives by position, storages by first use."""
    storages: dict[int, int] = {}
    specs = iter(program.graph_signature.input_specs)
    names: dict[Any, str] = {}
    rows: list[dict[str, Any]] = []
    for node in program.graph.nodes:
        meta = {k: v for k, v in node.meta.items() if k not in _ITS_OWN}
        names[node] = node.name
        if node.op == "placeholder" and next(specs).kind.name == "USER_INPUT":
            names[node] = f"input {len(names)}"
        elif node.op == "placeholder" or "detach.default" in str(meta.get("torch_fn")):
            meta.pop("torch_fn", None)
        if not meta.get("nn_module_stack"):
            meta.pop("nn_module_stack", None)
        meta = {k: flat(k, v, storages) for k, v in meta.items()}
        if node.target is _COPY:
            # The offset of the operand or zero, as the cache of fake kernels has it.
            meta["val"] = (*meta["val"][:3], *meta["val"][4:])
        rows.append(
            {
                "name": names[node],
                "op": node.op,
                "target": None if node.op == "placeholder" else node.target,
                "args": repr(map_arg(node.args, lambda n: names[n])),
                "kwargs": repr(sorted(map_arg(node.kwargs, lambda n: names[n]).items())),
                "users": [user.name for user in node.users],
                **meta,
            }
        )
    return rows


def flat(key: str, value: Any, storages: dict[int, int]) -> Any:
    """A value of meta that can be compared."""
    if key == "tensor_meta":
        return repr(value._replace(requires_grad=False))
    if isinstance(value, Tensor):
        storage = storages.setdefault(storage_of(value), len(storages))
        form = (value.shape, value.stride(), value.storage_offset(), value.dtype, value.device)
        return (type(value), *form, value.requires_grad, storage)
    if key == "val" and isinstance(value, (list, tuple)):
        return [type(value), *(flat(key, part, storages) for part in value)]
    return repr(value)


def kinds(program: Any) -> Any:
    signature = program.graph_signature
    inputs = [(spec.kind, spec.target, spec.persistent) for spec in signature.input_specs]
    positions = {name: i for i, name in enumerate(signature.user_inputs)}
    return inputs, [(s.kind, positions.get(s.target, s.target)) for s in signature.output_specs]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", zoo.MODELS)
def test_zoo_models(name: str, mode: str, both: Both) -> None:
    torch.manual_seed(0)
    model = zoo.MODELS[name].build(size="tiny").train(mode == "train")
    inputs = zoo.MODELS[name].example_inputs("tiny")
    graph = dovetail.capture(model, inputs.args, inputs.kwargs)
    assert both.compared == 1
    dovetail.check(graph)


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_captured_text_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, inputs = zoo_graph(name, training=True), zoo_inputs(name)

    def never(program: Any, signature: Any) -> Any:
        raise Unsure("not today")

    monkeypatch.setattr(decompose_program, "decomposed", never)
    theirs = dovetail.capture(zoo.MODELS[name].build(size="tiny"), inputs.args, inputs.kwargs)
    assert dovetail.text(mine) == dovetail.text(theirs)
    assert str(mine.graph) == str(theirs.graph)


def test_symbolic_sizes_are_traced_anew(both: Both) -> None:
    model = zoo.MODELS["llama"].build(size="tiny")
    inputs = zoo.MODELS["llama"].example_inputs("tiny")
    sizes = {"input_ids": {0: Dim.AUTO, 1: Dim.AUTO}}
    dovetail.capture(model, inputs.args, inputs.kwargs, dynamic_shapes=sizes)
    assert both.reasons == ["sizes are symbolic"]


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_small_transformers(mode: str, both: Both) -> None:
    pytest.importorskip("transformers")
    from tests.frontend.test_capture_transformers import bert, llama, tokens

    ids, training = tokens(8), mode == "train"
    dovetail.capture(bert().train(training), (ids,), {"attention_mask": torch.ones_like(ids)})
    dovetail.capture(llama().train(training).requires_grad_(training), (ids,), {"use_cache": training})
    assert both.compared == 2


class Model(nn.Module):
    """Runs functions of itself and of one input, each of which says one thing."""

    def __init__(self, *functions: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.functions = functions
        self.register_buffer("row", torch.ones(4))
        self.register_buffer("lost", torch.ones(4), persistent=False)
        self.attribute = torch.arange(4.0)
        self.weight = nn.Parameter(torch.eye(4))
        self.alone = nn.Module()  # a module that has no parameter, before one that has
        self.alone.register_buffer("row", torch.ones(4))
        self.norm = nn.BatchNorm1d(4).eval()

    def forward(self, x: Tensor) -> Any:
        return tuple(function(self, x) for function in self.functions)


def no_grad(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        flat = x.reshape(-1)
        square = flat.view(4, 4) @ self.weight
    return flat, square, square.t().reshape(2, 8)


def renewed(self: Any, x: Tensor) -> Any:
    """Views of a copy that only taking `reshape` apart makes."""
    copy = x.t().reshape(2, 8)
    return copy, copy.view(-1), copy[0], copy.t(), copy.chunk(3, 1)[1].expand(2, 2, 3).reshape(-1)


def views_written(self: Any, x: Tensor) -> Any:
    y = x.sin()
    y[1:].add_(self.row.sum())
    flat = y.view(-1)
    flat[0].copy_(x.mean())
    y[:, ::2].mul_(2)
    column = y[:, 1]
    column.sub_(1)
    return y, flat * 2, column + 1, y[:, ::2].contiguous(), y.t().reshape(-1)


def filled(self: Any, x: Tensor) -> Any:
    y = torch.zeros(4, 6)
    y[:, 1:5] = x
    y[0] = self.row.sum()
    y.permute(1, 0).unsqueeze(0).add_(1)
    y.transpose(0, 1).select(0, 2).zero_()
    y.masked_fill_(y > 1, 0.5)
    y.index_put_((torch.tensor([0, 1]),), y[2].clone())
    return y, y.expand(2, 4, 6), y.flatten()


def state_written(self: Any, x: Tensor) -> Any:
    self.norm.train()
    y = torch.relu_(self.norm(x))
    self.norm.eval()
    self.row[1:3] += 1
    self.lost.copy_(x.detach().mean(0))
    with torch.no_grad():
        self.alone.row.lerp_(x.mean(0), 0.1)
    return y + self.row, self.alone.row * 2, self.lost * 3


def composites_written(self: Any, x: Tensor) -> Any:
    y = x.clone()
    F.relu6(F.dropout(y, 0.5, True, True), True)
    y.square_().multiply_(2).clip_(0, 1).subtract_(1).divide_(2).negative_().absolute_().arctan_()
    parts = [y + 1, y + 2]
    torch._foreach_mul_(parts, 2.0)
    values = y.topk(2)[0]
    values.add_(1)
    constant = torch.tensor([1.0, 2.0, 3.0, 4.0])
    constant.add_(x[0].detach())
    return y, parts, values, constant


GROUPS: dict[str, list[Callable[[Any, Tensor], Any]]] = {
    "views that are written": [views_written],
    "memory that is filled": [filled],
    "state that is written": [state_written],
    "inputs that are written": [lambda m, x: (x.detach().add_(1), x[1] * 2)],
    "composites in place": [composites_written],
    "views": [
        lambda m, x: (x, x.view(-1), x.reshape(4, 4)),
        lambda m, x: (x.reshape(-1, 2), x.t().reshape(-1), x.t().contiguous()),
        lambda m, x: (x.contiguous(), x[None].flatten(1), x.unflatten(0, (2, 2))),
        lambda m, x: (x.ravel(), x.narrow(0, 1, 2)),
        lambda m, x: (x.mT, x.T, x.movedim(0, 1)),
        lambda m, x: (x.swapaxes(0, 1), torch.atleast_3d(x), torch.linalg.diagonal(x)),
        lambda m, x: (x.split([1, 3]), x.split(3)[1], x.chunk(4)[2], x.unbind(1)[0], x.tensor_split(3)),
        lambda m, x: (x[:, 1:3][..., None][::2], m.row.expand_as(x)),
        lambda m, x: (torch.broadcast_to(m.row, (2, 4)), x.view_as(x)),
        lambda m, x: (x.view(1, 4, 2, 2).to(memory_format=torch.channels_last).contiguous(), m.weight),
        renewed,
        lambda m, x: renewed(m, x.sin()),
    ],
    "precisions": [
        lambda m, x: (x.to(torch.float64), x.to(torch.float32), x.to(m.row)),
        lambda m, x: (x.to("cpu"), x.float(), x.half()),
        lambda m, x: (x.to(torch.float32, copy=True), x.type_as(m.row.long())),
        lambda m, x: (F.softmax(x, -1, dtype=torch.float64),),
    ],
    "layers": [
        lambda m, x: (m.norm(x), F.batch_norm(x, None, None, training=True), F.layer_norm(x, (4,))),
        lambda m, x: (F.dropout(x, 0.5, True), F.dropout(x, 0.5, False), F.dropout(x, 0.0, True)),
        lambda m, x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
        lambda m, x: (F.linear(x, m.weight), torch.einsum("ij,jk->ik", x, m.weight), F.group_norm(x, 2)),
        lambda m, x: F.conv2d(x[None, None], m.weight[None, None], padding="same"),
    ],
    "constants": [
        lambda m, x: (x + m.attribute, x * torch.tensor([1.0, 2.0, 3.0, 4.0]), x[torch.tensor([0, 2])]),
        lambda m, x: (m.alone.row + m.lost, torch.tensor(2.0), torch.zeros(4)),
        lambda m, x: (torch.arange(4), x.new_full((2,), 1.0)),
        lambda m, x: (torch.arange(3, dtype=torch.float32), None, 3, 2.5, True),
    ],
    "gradients": [
        no_grad,
        lambda m, x: (x.detach(), (x + 1).detach().view(-1)),
        lambda m, x: (m.weight.detach().t(), torch.ops.aten.alias(x) + 1),
    ],
    "dead code": [
        lambda m, x: (x.sin().cos(), x.reshape(2, 8), x.topk(2), x + 1)[3],
        lambda m, x: (torch.rand(3), F.dropout(x, 0.5, True), x + torch.rand_like(x))[2],
        lambda m, x: (x.topk(2)[1], x.max(0), x.sort(stable=True)[0], x.argmax(0)),
    ],
}


@pytest.mark.parametrize("trained", [False, True], ids=["plain", "trained"])
@pytest.mark.parametrize("group", GROUPS)
def test_small_programs(group: str, trained: bool, both: Both) -> None:
    if trained and group == "inputs that are written":
        pytest.skip("refused: the history of a leaf does not know of the write")
    dovetail.capture(Model(*GROUPS[group]), (torch.randn(4, 4, requires_grad=trained),))
    assert both.reasons == []
    assert both.compared == 1


def autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ self.weight


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "an autocast block": (autocast, "is a get_attr"),
    "a size that depends on values": (lambda m, x: x.nonzero(), "sizes are symbolic"),
    "a lazy conjugate": (
        lambda m, x: torch.view_as_complex(x.view(4, 2, 2)).conj() * 2,
        "a tensor is conjugated or negated only when it is read",
    ),
    "an operator with a decomposition": (lambda m, x: F.softshrink(x), "has a decomposition of its own"),
    "a view of another dtype": (
        lambda m, x: (y := x.sin(), y.view(torch.int32)[1].zero_())[0],
        "is a view of another dtype of memory that is written",
    ),
    "an alias that no schema declares": (
        lambda m, x: (y := x.sin(), torch.broadcast_tensors(y, m.row)[0].zero_())[0],
        "is in memory of another value",
    ),
    "an unknown composite": (lambda m, x: x.real + 1, "is taken apart in a way that is not known here"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_certain_is_traced_anew(what: str, both: Both) -> None:
    function, reason = REFUSED[what]
    graph = dovetail.capture(Model(function), (torch.ones(4, 4),))
    assert len(both.reasons) == 1
    assert reason in both.reasons[0]
    assert both.compared == 0
    dovetail.check(graph)


def test_programs_of_the_strict_exporter_are_traced_anew(both: Both) -> None:
    model = Model(lambda m, x: x + m.row + m.lost)
    model.register_buffer(
        "lost", model.get_buffer("row")
    )  # one tensor, two names: torch uses another than the exporter
    dovetail.capture(model, (torch.ones(4, 4),), strict=True)
    assert both.reasons == ["the program was exported in strict mode"]


def test_what_torch_lacks_is_traced_anew(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    exported = torch.export.export(Model(lambda m, x: x + 1), (torch.ones(4, 4),))
    monkeypatch.delattr("torch._export.utils._is_preservable_cia_op")
    with pytest.raises(Unsure, match="has no function for which operators it keeps"):
        both(exported, exported.graph_signature)


def test_an_active_mode_is_not_hidden_from(both: Both) -> None:
    exported = torch.export.export(Model(lambda m, x: x + 1), (torch.ones(4, 4),))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dovetail.capture(exported)
    assert both.reasons == ["autocast would be applied once more"]


def test_arguments_of_programs_built_by_hand(both: Both) -> None:
    """Arguments by name where they could be by position, and defaults that are written out."""
    exported = torch.export.export(Model(lambda m, x: torch.add(x, x).sum(1).mul(2)), (torch.ones(4, 4),))
    for node in exported.graph.nodes:
        if node.target is torch.ops.aten.add.Tensor:
            node.args, node.kwargs = (node.args[0],), {"alpha": 1, "other": node.args[1]}
        elif node.target is torch.ops.aten.sum.dim_IntList:
            node.args, node.kwargs = (node.args[0],), {"keepdim": False, "dim": [1]}
    exported.graph_module.recompile()
    dovetail.capture(exported)
    assert both.compared == 1


class Calling(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def test_random_programs(both: Both) -> None:
    uncaptured = 0
    for seed in range(16):
        try:
            case, program = draw(Random(seed), "pure")
            dovetail.capture(Calling(program), tuple(make_inputs(case.program)))
        except (NotAProgram, CaptureError):
            uncaptured += 1
    assert uncaptured < 6
    assert both.compared > 8


@pytest.mark.long
def test_every_operator(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    if "expecttest" not in sys.modules:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setitem(sys.modules, "expecttest", stub)
    from torch.testing._internal import common_methods_invocations as database

    # It seeds in front of every random operator, which no graph may hold.
    monkeypatch.setattr(database, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs))
    uncaptured = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the database has samples at the edge of what an operator takes
        for op in (op for op in database.op_db if torch.float32 in op.dtypes):
            try:
                _capture_sample(op.op, next(iter(op.sample_inputs("cpu", torch.float32))))
            except CaptureError:
                uncaptured += 1
    assert both.compared > 500
    assert uncaptured < 40


def _capture_sample(function: Any, sample: Any) -> None:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))

    def call(*tensors: Tensor) -> Any:
        left = iter(tensors)
        given, args, kwargs = pytree.tree_unflatten(
            [next(left) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        )
        results = pytree.tree_leaves(function(given, *args, **kwargs))
        return tuple(result for result in results if isinstance(result, Tensor))

    dovetail.capture(Calling(call), tuple(leaf for leaf in leaves if isinstance(leaf, Tensor)))
