"""Blocks of a graph: equal ones are one, each runs alone on what it got, and its operands are described."""

import itertools
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

import dovetail
from dovetail.ir.dependencies import Index
from dovetail.passes.pass_manager import Pipeline
from dovetail.tuning.block import (
    Block,
    blocks_of,
    divide_into_blocks,
    operand_description,
    record_inputs,
    take_out,
)
from dovetail.tuning.check_plan import capture_for_plan
from dovetail.tuning.decisions import PassChoice
from dovetail.tuning.plan_passes import make_pass
from tests.tuning.plans import Layers, X
from tests.tuning.synthetic import Siblings
from tests.zoo_graphs import zoo_graph, zoo_inputs


class Views(Layers):
    """Every layer reads the value before the first one transposed, which is the operand of the first one too."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin() + 1
        transposed = x.t()
        for layer in self.layers:
            x = torch.relu(layer(x)) * 2 + transposed.cos()
        return x.exp().tanh() + transposed


class Tuples(nn.Module):
    """Its operations return tuples, of which one element is not used."""

    def forward(self, x: Tensor) -> Tensor:
        first, _, third = x.sin().split(2, 1)[:3]
        return (first + third).sort(1).values.exp()


class Values(Interpreter):
    """Runs a graph and keeps the value of every node by name."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        value = self.values[n.name] = super().run_node(n)
        return value


def recorded(
    gm: GraphModule, *args: Any, grad: bool = False, **kwargs: Any
) -> tuple[GraphModule, Mapping[str, Block]]:
    distinct, new = blocks_of(gm)
    assert new == list(distinct)
    record_inputs(gm, distinct, args, kwargs, grad=grad)
    return gm, distinct


def repeated(blocks: Mapping[str, Block]) -> Block:
    (block,) = [block for block in blocks.values() if block.calls > 1]
    return block


def returned(program: GraphModule) -> list[str]:
    return [node.name for node in program.graph.output_node().all_input_nodes]


@pytest.mark.parametrize("depth", [2, 3, 7])
def test_equal_layers_are_one_block(depth: int) -> None:
    _, blocks = recorded(dovetail.capture(Layers(depth).eval(), (X,)), X)
    assert [block.calls for block in blocks.values()] == [1, depth, 1]
    assert [block.key for block in blocks.values()] == list(blocks)
    layer = repeated(blocks)
    assert [layer.operation(k) for k in range(len(layer.units))] == [
        "aten.linear.default",
        "aten.relu.default",
        "aten.mul.Tensor",
        "aten.cos.default",
        "aten.add.Tensor",
    ]
    assert layer.edges == [(0, 1), (1, 2), (2, 4), (3, 4)]


def test_layers_of_other_sizes_are_not() -> None:
    class Tapered(nn.Module):
        def __init__(self, *widths: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x)) * 2 + 1
            return x

    equal = blocks_of(dovetail.capture(Tapered(8, 8, 8, 8).eval(), (X,)))[0]
    assert [block.calls for block in equal.values()] == [3]
    tapered = blocks_of(dovetail.capture(Tapered(8, 6, 4, 2).eval(), (X,)))[0]
    assert {block.calls for block in tapered.values()} == {1}


class Scaled(Layers):
    """Takes what models of transformers take: arguments by name, more that are swallowed, and a nested one."""

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, scale: float = 2.0, pair: Any = None, **kwargs: Any
    ) -> Tensor:
        y = super().forward(x) * scale
        return y if mask is None else y * mask + pair["second"] - pair["first"]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X,), {}),
        ((), {"x": X}),
        ((X,), {"scale": 3.0}),
        ((), {"pair": {"second": X + 2, "first": X + 1}, "mask": X > 0, "x": X}),
        ((X, X > 0), {"pair": {"first": X + 1, "second": X + 2}, "scale": 0.5}),
    ],
)
def test_inputs_are_recorded_for_calls_by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    model = Scaled().eval()
    _, blocks = recorded(capture_for_plan(model, args, kwargs), *args, **kwargs)
    layer = repeated(blocks)
    (value,) = [v for v in layer.inputs if isinstance(v, Tensor) and v.shape == X.shape]
    torch.testing.assert_close(value, X.sin() + 1)
    assert all(
        block.inputs or not block.program.graph.find_nodes(op="placeholder") for block in blocks.values()
    )


def test_keys_do_not_depend_on_weights_or_names() -> None:
    class Renamed(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.others = self.layers
            del self.layers

        def forward(self, x: Tensor) -> Tensor:
            y = x.sin() + 1
            for other in self.others:
                y = torch.relu(other(y)) * 2 + y.cos()
            return y.exp().tanh()

    first = blocks_of(dovetail.capture(Layers().eval(), (X,)))[0]
    second = blocks_of(dovetail.capture(Renamed().eval(), (X,)))[0]
    assert list(first) == list(second)
    assert list(blocks_of(dovetail.capture(Layers().eval(), (X[:2],)))[0]) != list(first)


@pytest.mark.parametrize("name", ["llama", "bert", "moe", "lstm"])
def test_a_block_alone_computes_what_its_operations_do_in_the_graph(name: str) -> None:
    inputs = zoo_inputs(name)
    gm, blocks = recorded(zoo_graph(name), *inputs.args, **inputs.kwargs)
    check_values(gm, blocks, *inputs.args, *inputs.kwargs.values())
    assert max(block.calls for block in blocks.values()) > 1
    covered = sum(block.calls * len(block.units) for block in blocks.values())
    assert covered >= sum(1 for n in gm.graph.nodes if n.op == "call_function" and "getitem" not in n.name)


def check_values(gm: GraphModule, blocks: Mapping[str, Block], *args: Any) -> None:
    """The results of blocks on their recorded inputs have the bits that they have in a run of the graph."""
    run = Values(gm)
    with torch.no_grad():
        run.run(*args, enable_io_processing=False)
        for block in blocks.values():
            operands = [n.name for n in block.program.graph.find_nodes(op="placeholder")]
            for operand, value in zip(operands, block.inputs, strict=True):
                assert torch.equal(value, run.values[operand])
            results = block.program(*block.inputs)
            for result, value in zip(results, returned(block.program), strict=True):
                assert torch.equal(result, run.values[value])


def test_inputs_are_those_of_the_first_call() -> None:
    gm, blocks = recorded(dovetail.capture(Layers().eval(), (X,)), X)
    (value,) = repeated(blocks).inputs
    assert torch.equal(value, X.sin() + 1)
    check_values(gm, blocks, X)
    program = repeated(blocks).program
    weights = [str(n.target) for n in program.graph.find_nodes(op="get_attr")]
    assert weights == ["layers.0.weight", "layers.0.bias"]
    assert program.get_parameter("layers.0.weight") is gm.get_parameter("layers.0.weight")


def test_recorded_inputs_keep_strides_and_aliasing() -> None:
    x = torch.randn(8, 8)
    gm, blocks = recorded(dovetail.capture(Views().eval(), (x,)), x)
    check_values(gm, blocks, x)
    value, transposed = repeated(blocks).inputs
    assert (value.stride(), transposed.stride()) == ((8, 1), (1, 8))
    assert value.data_ptr() == transposed.data_ptr()
    assert torch.equal(value.t(), transposed)


def test_recorded_inputs_are_copies_of_the_arguments() -> None:
    x = X.clone()
    _, blocks = recorded(dovetail.capture(Layers().eval(), (x,)), x)
    (value,) = next(iter(blocks.values())).inputs
    x.zero_()
    assert torch.equal(value, X)


@pytest.mark.parametrize(
    "argument",
    [
        pytest.param(torch.randn(8, 4).t(), id="transposed"),
        pytest.param(torch.randn(4, 12)[:, :8], id="slice"),
        pytest.param(torch.randn(4, 1).expand(4, 8), id="expanded"),
    ],
)
def test_the_strides_of_an_input_that_shares_memory_with_no_other_are_kept(argument: Tensor) -> None:
    _, blocks = recorded(dovetail.capture(Layers().eval(), (argument,)), argument)
    (value,) = next(iter(blocks.values())).inputs
    assert torch.equal(value, argument)
    assert value.stride() == argument.stride()


def test_gradients_are_required_of_what_is_recorded_for_training() -> None:
    x = X.clone().requires_grad_()
    _, blocks = recorded(dovetail.capture(Layers().train(), (x,)), x, grad=True)
    assert [block.inputs[0].requires_grad for block in blocks.values()] == [True] * 3
    assert all(block.program.training for block in blocks.values())
    assert operand_description(repeated(blocks).program, repeated(blocks).inputs) == (
        "float32[3, 8] grad, float32[8, 8] weight, float32[8] weight"
    )
    frozen = Layers().train()
    for layer in frozen.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.bias.requires_grad_(False)
    _, blocks = recorded(dovetail.capture(frozen, (x,)), x, grad=True)
    assert operand_description(repeated(blocks).program, repeated(blocks).inputs) == (
        "float32[3, 8] grad, float32[8, 8] weight, float32[8] frozen weight"
    )
    _, blocks = recorded(dovetail.capture(Layers().eval(), (X,)), X)
    assert not any(block.inputs[0].requires_grad for block in blocks.values())


def test_known_blocks_are_not_taken_out_or_recorded_again() -> None:
    gm, known = recorded(dovetail.capture(Layers(3).eval(), (X,)), X)
    deeper = dovetail.capture(Layers(5).eval(), (X,))
    blocks, new = blocks_of(deeper, known)
    assert new == []
    assert [block.calls for block in blocks.values()] == [1, 5, 1]
    assert [block.calls for block in known.values()] == [1, 3, 1]
    record_inputs(deeper, blocks, (X + 1,), {}, grad=False)
    for key, block in blocks.items():
        assert block.program is known[key].program
        assert block.inputs is known[key].inputs
    assert blocks_of(gm)[1] == list(known)


def test_an_operation_with_its_projections_is_one_unit() -> None:
    gm, blocks = recorded(dovetail.capture(Tuples().eval(), (X,)), X)
    (block,) = blocks.values()
    check_values(gm, blocks, X)
    names = [[block.context.nodes[i].name for i in unit] for unit in block.units]
    assert [unit[0] for unit in names] == ["sin", "split", "add", "sort", "exp"]
    assert [len(unit) for unit in names] == [1, 3, 1, 2, 1]
    assert block.edges == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert block.unit_of == {i: k for k, unit in enumerate(block.units) for i in unit}


def test_a_region_of_an_earlier_pass_is_a_block_of_one_operation() -> None:
    x = torch.randn(4, 8)
    fuse = make_pass(PassChoice("Fuse", {"rules": "library"}))
    gm, blocks = recorded(Pipeline([fuse])(dovetail.capture(Siblings().eval(), (x,))), x)
    (fused,) = [b for b in blocks.values() if any(n.op == "call_module" for n in b.program.graph.nodes)]
    assert len(fused.units) == 1
    assert len(fused.units[0]) == 2
    (result,) = fused.program(*fused.inputs)
    model = Siblings()
    model.load_state_dict(gm.state_dict(), strict=False)
    assert torch.equal(result, model(x)[0])
    assert {call.kind for calls in divide_into_blocks(gm).values() for call in calls} == {
        "rest",
        "linear_activation",
    }


def test_a_block_is_pickled_without_its_analyses() -> None:
    _, blocks = recorded(dovetail.capture(Layers().eval(), (X,)), X)
    block = repeated(blocks)
    units, context = block.units, block.context
    loaded = pickle.loads(pickle.dumps(block))
    assert "context" not in vars(loaded)
    assert loaded.context is not context
    assert (loaded.key, loaded.label, loaded.calls, loaded.units) == (block.key, block.label, 3, units)
    assert torch.equal(loaded.program(*loaded.inputs)[0], block.program(*block.inputs)[0])


def test_some_operations_are_taken_out_with_what_others_read() -> None:
    gm = dovetail.capture(Layers(1).eval(), (X,))
    index = Index(gm)
    by_name = {node.name: node for node in gm.graph.nodes}
    part = take_out(index, "key", [by_name[name] for name in ("linear", "relu", "cos")])
    assert [n.name for n in part.program.graph.find_nodes(op="placeholder")] == ["add"]
    # `linear` is read inside only.
    assert returned(part.program) == ["relu", "cos"]
    value = torch.randn(3, 8)
    model = Layers(1)
    model.load_state_dict(gm.state_dict())
    relu, cos = part.program(value)
    assert torch.equal(relu, torch.relu(model.layers[0](value)))
    assert torch.equal(cos, value.cos())
    assert part.label == "the model, part of 3 operations"


def test_a_label_has_the_module_that_the_operations_share() -> None:
    labels = [block.label for block in blocks_of(zoo_graph("llama"))[0].values()]
    assert labels[0].startswith("the model, rest of ")
    assert labels[1].startswith("layers.0, block of ")


def program_of(*operands: Any, weights: int = 0) -> GraphModule:
    """A program that reads inputs of some values, the last of them weights."""
    graph = torch.fx.Graph()
    root = nn.Module()
    count = len(operands) - weights
    nodes = [graph.placeholder(f"x{i}") for i in range(count)]
    for i, weight in enumerate(operands[count:]):
        root.register_buffer(f"w{i}", weight)
        nodes.append(graph.get_attr(f"w{i}"))
    graph.output(tuple(nodes))
    return GraphModule(root, graph)


def describe(*operands: Any, weights: int = 0) -> str:
    inputs = operands[: len(operands) - weights]
    return operand_description(program_of(*operands, weights=weights), inputs)


BASE = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("operands", "text"),
    [
        ((BASE,), "float32[4, 6]"),
        ((BASE.bfloat16(), torch.zeros(())), "bfloat16[4, 6], float32[]"),
        ((BASE.t(),), "float32[6, 4]/[1, 6]"),
        ((torch.zeros(4, 1).expand(4, 6),), "float32[4, 6]/[1, 0]"),
        ((BASE, BASE.t()), "float32[4, 6], float32[6, 4]/[1, 6]=0"),
        ((BASE, BASE.clone()), "float32[4, 6], float32[4, 6]"),
        (
            (torch.ones(2), BASE, BASE[:2], BASE),
            "float32[2], float32[4, 6], float32[2, 6]=1, float32[4, 6]=1",
        ),
        ((3, 0.5, True, None, "sum"), "3, 0.5, True, None, 'sum'"),
        (([1, 2], BASE), "list, float32[4, 6]"),
        ((BASE.to_sparse(), BASE), "float32[4, 6], float32[4, 6]"),
    ],
)
def test_operands_are_described_by_type_strides_and_aliasing(operands: tuple[Any, ...], text: str) -> None:
    assert describe(*operands) == text


def test_weights_are_described_in_the_order_of_the_program() -> None:
    assert describe(BASE, torch.zeros(6), weights=1) == "float32[4, 6], float32[6] weight"
    # A weight that shares memory with an input is another case for a compiler than one that does not.
    assert describe(BASE, BASE.t(), weights=1) == "float32[4, 6], float32[6, 4]/[1, 6]=0 weight"
    assert describe(BASE.clone().requires_grad_(), weights=0) == "float32[4, 6] grad"
