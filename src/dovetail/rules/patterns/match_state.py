"""What an attempt to match has found, and how far it got."""

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
"""A part of the template, the part of the graph it is to be, and the argument of the template that it is."""


@dataclass
class MatchState:
    """Nodes of the graph by nodes of the template; operands by name; captured literals; what was looked through.

    `skipped` are casts of the template that the graph does without.
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
        return MatchState(
            dict(self.nodes),
            dict(self.operands),
            dict(self.literals),
            set(self.taken),
            list(self.through),
            dict(self.joined),
            dict(self.sites),
            set(self.skipped),
        )


@dataclass(frozen=True)
class ChosenAlternative:
    """On an agenda: this alternative is the one that is tried."""

    site: Site
    number: int


@dataclass(frozen=True)
class CastChoice:
    """On an agenda: this cast of the template is one of the graph's, or is not there."""

    node: Node
    kept: bool


@dataclass(frozen=True)
class NearMiss:
    """How far an attempt got, and what stopped it."""

    found: tuple[Node, ...]
    reason: str
    at: Node | None
    sites: Mapping[Site, int]


def same_pairs(left: list[Pair], right: list[Pair]) -> bool:
    return all(a[0] is b[0] and a[1] is b[1] for a, b in zip(left, right, strict=True))


@dataclass(frozen=True, eq=False)
class Value:
    """A value bound to an argument of a pattern: what is known of it, and the node of the graph that makes it."""

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
        """Its dtype; TypeError if it is no tensor, as for the next three."""
        return self._tensor.dtype

    @property
    def shape(self) -> torch.Size:
        """Its sizes; some may be symbols."""
        return self._tensor.shape

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
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
        """Whether the graph's caller gives it."""
        return self.node.op == "placeholder"

    @property
    def is_constant(self) -> bool:
        """Whether it is a parameter, a buffer or a constant of the model, so that it is known before the graph runs."""
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
    """One place where a pattern was found.

    `m["x"]` is the `Value` bound to an operand, None for an optional one that is absent, or the literal captured.
    `nodes` are the operations that would move into the region. `alternatives` tells what was taken at each `either`.
    `aten` has the operations as canonical ATen in the order of the graph, each with the node it stands for: the
    graph's own may be functions, methods and modules.
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
        raise KeyError(f"'{name}' is no argument of the pattern '{self.rule}'; it has {known}")

    def __contains__(self, name: str) -> bool:
        return name in self.operands or name in self.literals


SameNumber = Callable[[Any, Any], bool]
"""Whether a number of the pattern's trace is that of the graph."""


def argument_name(where: Where) -> str:
    """The argument that a place in a node's arguments is, by the operator's own name for it."""
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
    """Whether two literals mean the same number or the same setting; 2 and 2.0 do, 1 and True do not."""
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
    """Whether an operation has a tensor without a fraction, so that 2 and 2.0 are not the same to it."""
    values = [n.meta.get("val") for n in node.all_input_nodes or (node,)]
    return any(isinstance(v, Tensor) and not (v.is_floating_point() or v.is_complex()) for v in values)


def describe_mismatch(ours: Node, theirs: Any) -> str:
    """In words: what stands where the pattern has an operation."""
    has = f"'{target_name(theirs)}'" if isinstance(theirs, Node) else repr(theirs)
    if isinstance(theirs, Node) and theirs.op == "placeholder":
        has = "an input"
    return f"it has {has} where the pattern has '{target_name(ours)}'"


def same_tensor(a: Tensor, b: Tensor) -> bool:
    """Whether two constants are the same bit for bit, on one device."""
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device or a.layout is not b.layout:
        return False
    if a.layout is not torch.strided or a.is_quantized:
        return a is b
    left, right = (packed_bytes(t.detach().resolve_conj().resolve_neg().cpu()) for t in (a, b))
    return bool(torch.equal(left, right))


def same_shape(a: Tensor, b: Tensor, same_number: SameNumber) -> bool:
    return a.dim() == b.dim() and all(same_number(m, n) for m, n in zip(a.shape, b.shape, strict=True))


def same_metadata(ours: Any, theirs: Any, same_number: SameNumber) -> bool:
    """Whether what is known of a value is what the pattern would compute; unknown counts as the same."""
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
