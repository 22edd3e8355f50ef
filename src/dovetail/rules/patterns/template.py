"""A pattern, traced: the graph to be found, its operands, and where captured literals stand in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from dovetail.errors import DovetailError, RuleError
from dovetail.ir.graph_module import Program
from dovetail.ir.op_traits import is_commutative
from dovetail.ir.union_find import UnionFind
from dovetail.rules.patterns.alternatives import Chooser, Site, choosing, either_op, opaque
from dovetail.rules.patterns.example_shapes import Parameters, PatternExample
from dovetail.rules.patterns.trace import (
    CAPTURED,
    FakeEnvironment,
    MetaTrace,
    NotRecordable,
    trace,
    trace_on_meta,
)

Path = tuple[Any, ...]
Where = tuple[Node, Path] | None
"""A place among a template's arguments: a node, and the way to it in the node's arguments."""


@dataclass(frozen=True, eq=False)
class Template:
    """One form of a pattern as a canonical graph.

    `operands` are its inputs by argument name; `outputs` the values it returns; `literals` tells for each captured
    literal the places where it stands: a node and a path into its arguments. `alike` are examples of other alternatives
    that only differ in literals. `skippable` are casts that are not there in every precision; a `blind` one has none and is the same in any. `stage` has the numbers of the world
    it was traced in; a template that only shows the form has none.
    """

    program: Program
    example: PatternExample
    operands: Mapping[str, Node]
    outputs: tuple[Node, ...]
    literals: Mapping[str, tuple[tuple[Node, Path], ...]]
    needed: Counter[Any] = field(repr=False)
    stage: FakeEnvironment | None = None
    alike: tuple[PatternExample, ...] = ()
    skippable: frozenset[Node] = frozenset()
    blind: bool = False

    @property
    def root(self) -> Node:
        return self.outputs[0]

    @cached_property
    def operations(self) -> frozenset[Node]:
        """The nodes that compute tensors, choices included."""
        return frozenset(n for n in self.program.graph.nodes if is_operation(n))

    @cached_property
    def commuting(self) -> frozenset[Node]:
        return frozenset(n for n in self.operations if is_commutative(n))

    @cached_property
    def root_targets(self) -> tuple[Any, ...]:
        """The operators that its first result may come from."""
        found: dict[Any, None] = {}
        stack = [self.root]
        while stack:
            node = stack.pop()
            if is_choice(node):
                stack.extend(reversed(alternatives_of(node)))
            elif is_operation(node):
                found[node.target] = None
                if node in self.skippable:
                    stack.append(cast_operand(node))
        return tuple(found)

    def example_value(self, name: str) -> Any:
        """The operand that the form was traced on."""
        return self.operands[name].meta["val"]

    @cached_property
    def size(self) -> int:
        """How many operations it has, the first of each choice's alternatives counted."""
        return len(self.calls({}))

    def calls(self, sites: Mapping[Site, int]) -> list[Node]:
        """The operations it has if at each site the given alternative is taken, or else the first."""
        return reachable(self.outputs, lambda node: sites.get(site_of(node), 0))


class NotProvable(Exception):
    """Why a pattern cannot be what stands in a graph, whatever that is."""


def make_template(
    function: Callable[..., Any],
    name: str,
    parameters: Parameters,
    example: PatternExample,
    *,
    values: Mapping[str, Any] | None = None,
    dialect: str = CAPTURED,
    stage: FakeEnvironment | None = None,
    chooser: Chooser | None = None,
) -> Template:
    """Trace one form of a pattern, on operands as the example has them or else on the values of a stage.

    Without a stage, alternatives are joined.
    """
    taken = chooser or Chooser(example.picks, joint=stage is None)
    given = [n for n in parameters.operands if n not in example.absent]
    settled: list[str] = []

    def run(*operands: Any) -> Any:
        arguments: dict[str, Any] = dict(parameters.fixed)
        arguments.update({k: opaque(v) for k, v in example.literals.items()})
        arguments.update(dict.fromkeys(example.absent))
        arguments.update(zip(given, operands, strict=True))
        taken.restart()
        with choosing(taken):
            results = _flat_results(function(**arguments), name)
        if stage is not None:
            settled.extend(stage.settled())
        return results

    drawn = _form_on_meta(run, example, given, taken) if values is None and dialect == CAPTURED else None
    if drawn is not None:
        program = drawn.program
    else:
        operands_at = values if values is not None else _fake_operands(example)
        program = trace(run, [operands_at[n] for n in given], dialect, quick=values is not None)
    if settled:
        raise NotProvable(f"what the pattern computes depends on sizes that are not known: {settled[0]}")
    inputs = [n for n in program.graph.nodes if n.op == "placeholder"]
    outputs = cast("tuple[Any, ...]", program.graph.output_node().args[0])
    operands = dict(zip(given, inputs, strict=True))
    for output in outputs:
        if not isinstance(output, Node) or output.op != "call_function":
            if stage is not None:
                raise NotProvable("the alternative taken hands on an argument or a constant as it is")
            raise RuleError(
                name, "its pattern returns an argument or a constant as it is; return what it computes"
            )
    results = cast("tuple[Node, ...]", outputs)
    calls = (n for n in program.graph.nodes if taken.mixed and is_float_cast(n))
    skippable = frozenset(calls)
    # What every combination of alternatives has: a graph without it need not be searched.
    needed = Counter(n.target for n in reachable(results, lambda _: None) if n not in skippable)
    shown = replace(example, picks=taken.settled) if taken.joint else example
    return Template(
        program,
        shown,
        operands,
        results,
        {},
        needed,
        stage,
        skippable=skippable,
        blind=drawn is not None and drawn.blind,
    )


def is_choice(node: Node) -> bool:
    """Whether a node of a template stands for any of several values."""
    return node.op == "call_function" and node.target is either_op()


def is_float_cast(node: Node) -> bool:
    """Whether a node of a template does nothing but change the precision of floats."""
    if node.target is not torch.ops.aten._to_copy.default:
        return False
    before, after = cast_operand(node).meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.device != after.device:
        return False
    return before.is_floating_point() and after.is_floating_point()


def cast_operand(cast_: Node) -> Node:
    return cast("Node", cast_.args[0])


def alternatives_of(choice: Node) -> list[Node]:
    return list(cast("list[Node]", choice.args[0]))


def site_of(choice: Node) -> Site:
    return tuple(cast("list[int]", choice.args[1]))


def reachable(outputs: tuple[Node, ...], pick: Callable[[Node], int | None]) -> list[Node]:
    """The operations that outputs need, through the picked alternative of each choice; None: not through choices."""
    found: dict[Node, None] = {}
    seen: set[Node] = set()
    stack = list(reversed(outputs))
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_choice(node):
            picked = pick(node)
            if picked is not None:
                stack.append(alternatives_of(node)[picked])
        elif is_operation(node):
            found[node] = None
            stack.extend(reversed(node.all_input_nodes))
    return list(found)


def is_operation(node: Node) -> bool:
    """Whether a node of a template computes tensors; what computes sizes is compared by value."""
    return node.op == "call_function" and has_tensors(node.meta.get("val"))


def has_tensors(value: Any) -> bool:
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


def literal_differences(
    first: Template, second: Template, was: Any, now: Any
) -> list[tuple[Node, Path]] | None:
    """Where a literal stands that was one value in the first trace and is another in the second.

    None if anything else differs: the pattern does more with it than hand it on.
    """
    ours, theirs = list(first.program.graph.nodes), list(second.program.graph.nodes)
    if [n.target for n in ours if n.op == "call_function"] != [
        n.target for n in theirs if n.op == "call_function"
    ]:
        return None
    before = was if isinstance(was, list) else [was]
    after = now if isinstance(now, list) else [now]
    found: list[tuple[Node, Path]] = []
    for a, b in zip(ours, theirs, strict=True):
        left, right = dict(literals_of(a)), dict(literals_of(b))
        for path in left.keys() | right.keys():
            if left.get(path) != right.get(path):
                if left.get(path) not in before or right.get(path) not in after:
                    return None
                found.append((a, path))
    return found


def _argument_at(node: Node, path: Path) -> Any:
    value: Any = (node.args, node.kwargs)
    for step in path:
        value = value[step]
    return value


def merge_list_places(places: list[tuple[Node, Path]], *, only_full: bool) -> list[tuple[Node, Path]]:
    """Places with those inside a list replaced by the list: what was given for it is captured whole.

    With `only_full`, a list that has something else in it too is not: the literal is one of its items.
    """
    inside: dict[tuple[Node, Path], int] = {}
    for node, path in places:
        if len(path) > 2 and isinstance(_argument_at(node, path[:-1]), (list, tuple)):
            inside[node, path[:-1]] = inside.get((node, path[:-1]), 0) + 1
    whole = {at for at, count in inside.items() if not only_full or count == len(_argument_at(*at))}
    return list(
        dict.fromkeys((node, path[:-1] if (node, path[:-1]) in whole else path) for node, path in places)
    )


def literal_places(template: Template, value: float | str) -> list[tuple[Node, Path]]:
    """Where a literal that occurs nowhere else stands."""
    return [
        (node, path)
        for node in template.program.graph.nodes
        for path, literal in literals_of(node)
        if type(literal) is type(value) and literal == value
    ]


def component_count(template: Template) -> int:
    """How many parts of a pattern share no value, not even an operand."""
    position = {node: i for i, node in enumerate(template.program.graph.nodes)}
    sets = UnionFind(len(position))
    calls = [n for n in position if is_operation(n)]
    for node in calls:
        for used in node.all_input_nodes:
            sets.union(position[used], position[node])
    return len({sets.find(position[n]) for n in calls})


def _form_on_meta(
    run: Callable[..., Any], example: PatternExample, given: list[str], chooser: Chooser
) -> MetaTrace | None:
    """The form as the meta device shows it; None where only a stage will do, or can tell what is wrong."""
    try:
        return trace_on_meta(run, list(_meta_operands(example, given)))
    except DovetailError:
        raise
    except NotRecordable:
        return None
    except Exception:
        if chooser.mixed:
            raise  # a mixture of precisions that was only a guess
        return None


def _meta_operands(example: PatternExample, names: Iterable[str]) -> Iterator[Tensor]:
    for name in names:
        shape, dtype = example.shapes[name]
        yield torch.empty(shape, dtype=dtype, device="meta")


def _fake_operands(example: PatternExample) -> dict[str, Tensor]:
    with FakeEnvironment().mode:
        return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in example.shapes.items()}
