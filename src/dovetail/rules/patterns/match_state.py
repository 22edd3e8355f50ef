"""The state of one attempt to match, the public `Match` and `Value`, and comparisons of literals and metadata."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Node

from dovetail.ir.graph_module import attribute
from dovetail.ir.op_traits import target_name
from dovetail.ir.weight_guard import packed_bytes
from dovetail.rules.patterns.alternatives import Site
from dovetail.rules.patterns.template import Where

Pair = tuple[Any, Any, Where]
"""A node or literal of the template, its counterpart in the graph, and its place among the template's arguments."""


@dataclass
class MatchState:
    """A partial match: nodes and operands of the graph by those of the template, and captured literals.

    `taken` are the nodes of the graph in use, `through` the transparent ones among them, `joined` the node matched by each
    `either`, `sites` the alternative chosen there, `skipped` the casts of the template that the graph does not have.
    """

    nodes: dict[Node, Node] = field(default_factory=dict[Node, Node])
    operands: dict[Node, Node] = field(default_factory=dict[Node, Node])
    literals: dict[str, Any] = field(default_factory=dict[str, Any])
    taken: set[Node] = field(default_factory=set[Node])
    through: list[Node] = field(default_factory=list[Node])
    joined: dict[Node, Node] = field(default_factory=dict[Node, Node])
    sites: dict[Site, int] = field(default_factory=dict[Site, int])
    skipped: set[Node] = field(default_factory=set[Node])

    def copy(self) -> MatchState:
        return MatchState(*[collection.copy() for collection in vars(self).values()])


@dataclass(frozen=True)
class ChosenAlternative:
    """An agenda entry: try this alternative of an `either`."""

    site: Site
    number: int


@dataclass(frozen=True)
class CastChoice:
    """An agenda entry: try a cast of the template as present in the graph, or as absent."""

    node: Node
    present: bool


@dataclass(frozen=True)
class NearMiss:
    """The furthest failed attempt: the nodes it matched and the reason it failed."""

    matched: tuple[Node, ...]
    reason: str
    at: Node | None
    sites: Mapping[Site, int]


def same_pairs(left: list[Pair], right: list[Pair]) -> bool:
    return all(a[0] is b[0] and a[1] is b[1] for a, b in zip(left, right, strict=True))


@dataclass(frozen=True, eq=False)
class Value:
    """A value bound to an argument of a pattern: its metadata and the node of the graph that computes it."""

    node: Node
    value: Any = field(repr=False)
    owner: nn.Module = field(repr=False)
    aten: Node | None = field(default=None, repr=False)
    """The node in canonical ATen that it is bound to, None where no pattern was matched."""

    @property
    def name(self) -> str:
        """The name of its node."""
        return self.node.name

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype; TypeError if it is not a tensor, as for the next three."""
        return self._tensor.dtype

    @property
    def shape(self) -> torch.Size:
        """Its sizes, which may be symbolic."""
        return self._tensor.shape

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return self._tensor.dim()

    @property
    def device(self) -> torch.device:
        """The device it is on."""
        return self._tensor.device

    @property
    def users(self) -> tuple[Node, ...]:
        """The operations that read it, in the match or not."""
        return tuple(self.node.users)

    @property
    def is_input(self) -> bool:
        """Whether it is an input of the graph."""
        return self.node.op == "placeholder"

    @property
    def is_constant(self) -> bool:
        """Whether it is a parameter, a buffer or a constant of the model, known before the graph runs."""
        return self.node.op in ("get_attr", "call_module")

    @property
    def is_parameter(self) -> bool:
        """Whether it is a parameter of the model."""
        return self.node.op == "get_attr" and isinstance(
            attribute(self.owner, str(self.node.target)), nn.Parameter
        )

    @property
    def _tensor(self) -> Tensor:
        if not isinstance(self.value, Tensor):
            raise TypeError(f"'{self.name}' is {self.value!r}, not a tensor")
        return self.value


@dataclass(frozen=True, eq=False)
class Match:
    """One occurrence of a pattern in a graph.

    `m["x"]` is the `Value` bound to an operand, None for an optional one that is absent, or the literal captured.
    `nodes` are the operations that would move into the region, `alternatives` the choice at each `either`. `aten` maps
    the operations as canonical ATen, in the order of the graph, to the graph's own nodes, which may be functions,
    methods and modules.
    """

    rule: str
    operands: Mapping[str, Value | None]
    literals: Mapping[str, Any]
    nodes: tuple[Node, ...]
    outputs: tuple[Node, ...]
    module_path: str = ""
    alternatives: Mapping[tuple[int, ...], int] = field(
        default_factory=dict[tuple[int, ...], int], repr=False
    )
    aten: Mapping[Node, Node] = field(default_factory=dict[Node, Node], repr=False)

    def __getitem__(self, name: str) -> Any:
        if name in self.operands:
            return self.operands[name]
        if name in self.literals:
            return self.literals[name]
        known = ", ".join([*self.operands, *self.literals])
        raise KeyError(f"'{name}' is not an argument of the pattern '{self.rule}'; it has {known}")

    def __contains__(self, name: str) -> bool:
        return name in self.operands or name in self.literals


SameNumber = Callable[[Any, Any], bool]
"""Compares a size of the pattern's trace with one of the graph."""


def argument_name(where: Where) -> str:
    """Return the operator's name for the argument at a place."""
    if where is None:
        return ""
    node, path = where
    if path[0] == 1:
        return str(path[1])
    schema = getattr(node.target, "_schema", None)
    return str(schema.arguments[path[1]].name) if schema is not None else f"argument {path[1]}"


def describe_argument(where: Where) -> str:
    if where is None:
        return "it has"
    return f"its {argument_name(where)} has" if len(where[1]) > 2 else f"its {argument_name(where)} is"


def same_literal(a: Any, b: Any) -> bool:
    """Whether two literals are the same number or setting: 2 and 2.0 are, 1 and True are not."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        if math.isnan(a) or math.isnan(b):
            return math.isnan(a) and math.isnan(b)
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    if isinstance(a, complex) and isinstance(b, complex):
        return same_literal(a.real, b.real) and same_literal(a.imag, b.imag)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        left, right = cast("list[Any]", a), cast("list[Any]", b)
        return len(left) == len(right) and all(same_literal(x, y) for x, y in zip(left, right, strict=True))
    return type(a) is type(b) and bool(a == b)


def reads_integers(node: Node) -> bool:
    """Whether an operation reads an integer or bool tensor, so that 2 and 2.0 differ in the dtype of its result."""
    values = [n.meta.get("val") for n in node.all_input_nodes or (node,)]
    return any(isinstance(v, Tensor) and not (v.is_floating_point() or v.is_complex()) for v in values)


def describe_mismatch(ours: Node, theirs: Any) -> str:
    """Describe what the graph has where the pattern has an operation."""
    has = f"'{target_name(theirs)}'" if isinstance(theirs, Node) else repr(theirs)
    if isinstance(theirs, Node) and theirs.op == "placeholder":
        has = "an input"
    return f"it has {has} where the pattern has '{target_name(ours)}'"


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two constants are bitwise equal and on one device."""
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device or a.layout is not b.layout:
        return False
    if a.layout is not torch.strided or a.is_quantized:
        return a is b
    left, right = (packed_bytes(t.detach().resolve_conj().resolve_neg().cpu()) for t in (a, b))
    return bool(torch.equal(left, right))


def same_shape(a: Tensor, b: Tensor, same_number: SameNumber) -> bool:
    return a.dim() == b.dim() and all(same_number(m, n) for m, n in zip(a.shape, b.shape, strict=True))


def same_metadata(ours: Any, theirs: Any, same_number: SameNumber) -> bool:
    """Whether a value's metadata is that of the pattern's trace; unknown metadata counts as the same."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        if ours.dtype != theirs.dtype or ours.device != theirs.device:
            return False
        return same_shape(ours, theirs, same_number)
    if isinstance(ours, (tuple, list)) and isinstance(theirs, (tuple, list)):
        left, right = cast("list[Any]", ours), cast("list[Any]", theirs)
        return len(left) == len(right) and all(
            same_metadata(a, b, same_number) for a, b in zip(left, right, strict=True)
        )
    return theirs is None or isinstance(ours, Tensor) == isinstance(theirs, Tensor)
