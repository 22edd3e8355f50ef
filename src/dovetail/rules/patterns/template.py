"""Templates: a pattern traced to a graph, with its operands and the places of captured literals."""

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
from dovetail.ir.quotient_graph import UnionFind
from dovetail.rules.patterns.alternatives import Chooser, Site, choosing, either_op, opaque
from dovetail.rules.patterns.example_shapes import Parameters, PatternExample
from dovetail.rules.patterns.trace import (
    CAPTURED,
    FakeEnvironment,
    NotRecordable,
    trace,
    trace_on_meta,
)

Path = tuple[Any, ...]
Where = tuple[Node, Path] | None
"""A place among a template's arguments: a node, and the path into its arguments."""


@dataclass(frozen=True, eq=False)
class Template:
    """One form of a pattern as a canonical graph.

    `operands` are its inputs by argument name, `outputs` the values it returns, `literals` the places of each captured
    literal, `required` how often each operator occurs whatever the alternatives. `same_form` are examples of other
    alternatives that differ only in literals. `skippable` are casts that only some precisions have; a
    `dtype_independent` template has none. `fake_env` has the sizes of an exact template; a loose one has None.
    """

    program: Program
    example: PatternExample
    operands: Mapping[str, Node]
    outputs: tuple[Node, ...]
    literals: Mapping[str, tuple[tuple[Node, Path], ...]]
    required: Counter[Any] = field(repr=False)
    fake_env: FakeEnvironment | None = None
    same_form: tuple[PatternExample, ...] = ()
    skippable: frozenset[Node] = frozenset()
    dtype_independent: bool = False

    @property
    def root(self) -> Node:
        return self.outputs[0]

    @cached_property
    def operations(self) -> frozenset[Node]:
        """The nodes that compute tensors, choices included."""
        return frozenset(n for n in self.program.graph.nodes if is_operation(n))

    @cached_property
    def commutative(self) -> frozenset[Node]:
        return frozenset(n for n in self.operations if is_commutative(n))

    @cached_property
    def root_targets(self) -> tuple[Any, ...]:
        """The operators that may compute its first result."""
        targets: dict[Any, None] = {}
        stack = [self.root]
        while stack:
            node = stack.pop()
            if is_choice(node):
                stack.extend(reversed(alternatives_of(node)))
            elif is_operation(node):
                targets[node.target] = None
                if node in self.skippable:
                    stack.append(cast_operand(node))
        return tuple(targets)

    def example_value(self, name: str) -> Any:
        """Return the operand that the template was traced on."""
        return self.operands[name].meta["val"]

    @cached_property
    def size(self) -> int:
        """The number of its operations, counting the first alternative of each choice."""
        return len(self.calls({}))

    def calls(self, sites: Mapping[Site, int]) -> list[Node]:
        """Return its operations with the alternatives in `sites`, the first one elsewhere."""
        return reachable(self.outputs, lambda node: sites.get(site_of(node), 0))


class NotProvable(Exception):
    """The reason why a pattern traced on a graph's operands cannot match."""


def make_template(
    function: Callable[..., Any],
    name: str,
    parameters: Parameters,
    example: PatternExample,
    *,
    values: Mapping[str, Any] | None = None,
    dialect: str = CAPTURED,
    fake_env: FakeEnvironment | None = None,
    chooser: Chooser | None = None,
) -> Template:
    """Trace one form of a pattern, on operands with the example's shapes or else on `values` of a `fake_env`.

    Without a `fake_env`, alternatives are joined.
    """
    chooser = chooser or Chooser(example.picks, joint=fake_env is None)
    present = [n for n in parameters.operands if n not in example.absent]
    added_guards: list[str] = []

    def run(*operands: Any) -> Any:
        arguments: dict[str, Any] = dict(parameters.fixed)
        arguments.update({k: opaque(v) for k, v in example.literals.items()})
        arguments.update(dict.fromkeys(example.absent))
        arguments.update(zip(present, operands, strict=True))
        chooser.restart()
        with choosing(chooser):
            results = _flat_results(function(**arguments), name)
        if fake_env is not None:
            added_guards.extend(fake_env.added_guards())
        return results

    traced: tuple[Program, bool] | None = None
    if values is not None:
        traced = trace(run, [values[n] for n in present], dialect, quick=True), False
    elif dialect == CAPTURED:
        traced = _form_on_meta(run, example, present, chooser)
    if traced is None:
        with FakeEnvironment().mode:
            examples = _example_operands(example, present)
        traced = trace(run, examples, dialect), False
    program, dtype_independent = traced
    if added_guards:
        raise NotProvable(f"what the pattern computes depends on unknown sizes: {added_guards[0]}")
    inputs = [n for n in program.graph.nodes if n.op == "placeholder"]
    outputs = cast("tuple[Any, ...]", program.graph.output_node().args[0])
    operands = dict(zip(present, inputs, strict=True))
    for output in outputs:
        if not isinstance(output, Node) or output.op != "call_function":
            if fake_env is not None:
                raise NotProvable("the alternative taken returns an argument or a constant as it is")
            raise RuleError(
                name, "its pattern returns an argument or a constant as it is; return what it computes"
            )
    results = cast("tuple[Node, ...]", outputs)
    skippable = frozenset(n for n in program.graph.nodes if chooser.mixed and is_float_cast(n))
    required = Counter(n.target for n in reachable(results, lambda _: None) if n not in skippable)
    return Template(
        program,
        replace(example, picks=chooser.chosen) if chooser.joint else example,
        operands,
        results,
        {},
        required,
        fake_env,
        skippable=skippable,
        dtype_independent=dtype_independent,
    )


def is_choice(node: Node) -> bool:
    """Whether a node of a template represents joined alternatives."""
    return node.op == "call_function" and node.target is either_op()


def is_float_cast(node: Node) -> bool:
    """Whether a node of a template only changes the precision of floating-point values."""
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
    """Return the operations that outputs need, through the alternative that `pick` returns; None: through none."""
    operations: dict[Node, None] = {}
    visited: set[Node] = set()
    stack = list(reversed(outputs))
    while stack:
        node = stack.pop()
        if node in visited:
            continue
        visited.add(node)
        if is_choice(node):
            picked = pick(node)
            if picked is not None:
                stack.append(alternatives_of(node)[picked])
        elif is_operation(node):
            operations[node] = None
            stack.extend(reversed(node.all_input_nodes))
    return list(operations)


def is_operation(node: Node) -> bool:
    """Whether a node of a template computes tensors; nodes that compute sizes are compared by value."""
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
    """Yield every literal and node in an argument, with the path to it."""
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
    """Yield the literals among a node's arguments, with their paths."""
    for path, value in leaves((node.args, node.kwargs)):
        if not isinstance(value, Node):
            yield path, value


def literal_differences(
    first: Template, second: Template, was: Any, now: Any
) -> list[tuple[Node, Path]] | None:
    """Return the places of a literal that has value `was` in the first trace and `now` in the second.

    None if anything else differs: the pattern does more with it than pass it on.
    """
    ours, theirs = list(first.program.graph.nodes), list(second.program.graph.nodes)
    if [n.target for n in ours if n.op == "call_function"] != [
        n.target for n in theirs if n.op == "call_function"
    ]:
        return None
    before = was if isinstance(was, list) else [was]
    after = now if isinstance(now, list) else [now]
    places: list[tuple[Node, Path]] = []
    for a, b in zip(ours, theirs, strict=True):
        left, right = dict(literals_of(a)), dict(literals_of(b))
        for path in left.keys() | right.keys():
            if left.get(path) != right.get(path):
                if left.get(path) not in before or right.get(path) not in after:
                    return None
                places.append((a, path))
    return places


def _argument_at(node: Node, path: Path) -> Any:
    value: Any = (node.args, node.kwargs)
    for step in path:
        value = value[step]
    return value


def merge_list_places(places: list[tuple[Node, Path]], *, only_full: bool) -> list[tuple[Node, Path]]:
    """Return places with those inside a list replaced by the list, so that the list is captured whole.

    With `only_full`, only lists of which all items are places: otherwise the literal is one of the items.
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
    """Return the places of a literal that is unlikely to occur otherwise."""
    return [
        (node, path)
        for node in template.program.graph.nodes
        for path, literal in literals_of(node)
        if type(literal) is type(value) and literal == value
    ]


def component_count(template: Template) -> int:
    """Return the number of connected components of a pattern, operands included."""
    position = {node: i for i, node in enumerate(template.program.graph.nodes)}
    sets = UnionFind(len(position))
    calls = [n for n in position if is_operation(n)]
    for node in calls:
        for used in node.all_input_nodes:
            sets.union(position[used], position[node])
    return len({sets.find(position[n]) for n in calls})


def _form_on_meta(
    run: Callable[..., Any], example: PatternExample, present: list[str], chooser: Chooser
) -> tuple[Program, bool] | None:
    """Trace a form on the meta device; None where `trace` has to do it, or to report what is wrong."""
    try:
        return trace_on_meta(run, _example_operands(example, present, device="meta"))
    except DovetailError:
        raise
    except NotRecordable:
        return None
    except Exception:
        if chooser.mixed:
            raise  # a mixture of precisions that the pattern need not support
        return None


def _example_operands(
    example: PatternExample, names: Iterable[str], device: str | None = None
) -> list[Tensor]:
    return [torch.empty(s, dtype=d, device=device) for s, d in map(example.shapes.__getitem__, names)]
