"""A pattern, traced: the graph to be found, its operands, and where captured literals stand in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from dovetail.errors import RuleError
from dovetail.graph.module import Program
from dovetail.rules.choices import Chooser, choosing, opaque
from dovetail.rules.probing import Example, Parameters
from dovetail.rules.tracing import CAPTURED, Stage, trace

Path = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Template:
    """One form of a pattern as a canonical graph.

    `operands` are its inputs by argument name; `outputs` the values it returns; `literals` tells for each captured
    literal the places where it stands: a node and a path into its arguments. `stage` has the numbers of the world
    it was traced in; a template that only shows the form has none.
    """

    program: Program
    example: Example
    operands: Mapping[str, Node]
    outputs: tuple[Node, ...]
    literals: Mapping[str, tuple[tuple[Node, Path], ...]]
    calls: tuple[Node, ...]
    ops: Mapping[Any, int] = field(repr=False)
    stage: Stage | None = None

    @property
    def root(self) -> Node:
        return self.outputs[0]


def make_template(
    function: Callable[..., Any],
    name: str,
    parameters: Parameters,
    example: Example,
    values: Mapping[str, Any],
    *,
    dialect: str = CAPTURED,
    stage: Stage | None = None,
) -> Template:
    """Trace one form of a pattern on the given operand values."""
    given = [n for n in parameters.operands if n not in example.absent]

    def run(*operands: Any) -> Any:
        arguments: dict[str, Any] = dict(parameters.fixed)
        arguments.update({k: opaque(v) for k, v in example.literals.items()})
        arguments.update(dict.fromkeys(example.absent))
        arguments.update(zip(given, operands, strict=True))
        with choosing(Chooser(example.picks)):
            return _flat_results(function(**arguments), name)

    program = trace(run, [values[n] for n in given], dialect)
    inputs = [n for n in program.graph.nodes if n.op == "placeholder"]
    outputs = cast("tuple[Any, ...]", program.graph.output_node().args[0])
    operands = dict(zip(given, inputs, strict=True))
    for output in outputs:
        if not isinstance(output, Node) or output.op != "call_function":
            raise RuleError(
                name, "its pattern returns an argument or a constant as it is; return what it computes"
            )
    calls = tuple(n for n in program.graph.nodes if is_operation(n))
    ops = Counter(n.target for n in calls)
    return Template(program, example, operands, cast("tuple[Node, ...]", outputs), {}, calls, ops, stage)


def is_operation(node: Node) -> bool:
    """Whether a node of a template computes tensors; what computes sizes is compared by value."""
    return node.op == "call_function" and is_tensors(node.meta.get("val"))


def is_tensors(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, (tuple, list)) and any(isinstance(v, Tensor) for v in cast("list[Any]", value))
    )


def _flat_results(result: Any, name: str) -> tuple[Any, ...]:
    if result is None or result == () or result == []:
        raise RuleError(name, "its pattern returns nothing; return the value or values it computes")
    results = cast("tuple[Any, ...]", tuple(result) if isinstance(result, (tuple, list)) else (result,))
    if not all(isinstance(r, Tensor) for r in results):
        raise RuleError(name, "its pattern returns something other than tensors, or a tuple of them")
    return results


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every literal and node in an argument, with the way to it."""
    if isinstance(value, (tuple, list)):
        for i, item in enumerate(cast("list[Any]", value)):
            yield from leaves(item, (*path, i))
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[str, Any]", value).items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, slice):
        yield from leaves((value.start, value.stop, value.step), path)
    else:
        yield path, value


def literals_of(node: Node) -> Iterator[tuple[Path, Any]]:
    """The literals among a node's arguments."""
    for path, value in leaves((node.args, node.kwargs)):
        if not isinstance(value, Node):
            yield path, value


def differences(first: Template, second: Template) -> list[tuple[Node, Path]] | None:
    """Where the literals of two traces differ; None if more than literals does."""
    ours, theirs = list(first.program.graph.nodes), list(second.program.graph.nodes)
    if [n.target for n in ours if n.op == "call_function"] != [
        n.target for n in theirs if n.op == "call_function"
    ]:
        return None
    found: list[tuple[Node, Path]] = []
    for a, b in zip(ours, theirs, strict=True):
        left, right = dict(literals_of(a)), dict(literals_of(b))
        for path in left.keys() | right.keys():
            if left.get(path) != right.get(path):
                found.append((a, path))
    return found


def places_of(template: Template, value: float) -> list[tuple[Node, Path]]:
    """Where a float that occurs nowhere else stands."""
    return [
        (node, path)
        for node in template.program.graph.nodes
        for path, literal in literals_of(node)
        if type(literal) is float and literal == value
    ]


def components(template: Template) -> int:
    """How many parts of a pattern share no value, not even an operand."""
    parent: dict[Node, Node] = {n: n for n in template.program.graph.nodes}

    def find(node: Node) -> Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for node in template.calls:
        for used in node.all_input_nodes:
            parent[find(used)] = find(node)
    return len({find(n) for n in template.calls})


def example_values(example: Example) -> dict[str, Any]:
    """Fake operands as an example has them."""
    stage = Stage()
    with stage.mode:
        return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in example.shapes.items()}
