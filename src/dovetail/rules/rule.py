"""The rule interface: a rule reads a graph through a `RuleContext` and yields proposals; it never edits the graph."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Protocol, TypeAlias, TypeVar, cast

from torch import Tensor
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, RuleError, checked_init, did_you_mean
from dovetail.ir.dependencies import Index
from dovetail.ir.graph_module import require_graph
from dovetail.ir.structural_hash import structural_order
from dovetail.outlining.escapes import POLICIES
from dovetail.outlining.region import RegionCall, call_of


@checked_init()
@dataclass(frozen=True)
class Limits:
    """Upper bounds on the size of a region; None means unlimited.

    `nodes` counts its operations, `operands` the values it reads from outside, `outputs` the values it returns,
    `bytes` the memory of operands and outputs together.
    """

    nodes: int | None = None
    operands: int | None = None
    outputs: int | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidArgument(f"limit {limit.name}={value!r} is not a positive int.")

    @property
    def unlimited(self) -> bool:
        """Whether every bound is None."""
        return all(getattr(self, field.name) is None for field in fields(self))


UNLIMITED = Limits()
Result = TypeVar("Result")


class RuleContext:
    """The graph as rules see it. Positions are those of `index`; analyses are computed lazily and cached.

    `barred` maps the positions that no rule may take to the reason.
    """

    def __init__(
        self,
        gm: GraphModule,
        *,
        index: Index | None = None,
        limits: Limits = UNLIMITED,
        barred: Mapping[int, str] | None = None,
        round: int = 1,
    ) -> None:
        self.gm = require_graph(gm)
        self.index = index if index is not None else Index(gm)
        self.limits = limits
        self.barred: Mapping[int, str] = barred or {}
        self.round = round
        self._analyses: dict[Any, Any] = {}

    def analysis(self, compute: Callable[[RuleContext], Result]) -> Result:
        """Return `compute(self)`, computed once per context."""
        if compute not in self._analyses:
            self._analyses[compute] = compute(self)
        return self._analyses[compute]

    def fact(self, make: Callable[[RuleContext], Result]) -> Result:
        """Deprecated name of `analysis`."""
        warnings.warn("RuleContext.fact is now RuleContext.analysis", DeprecationWarning, stacklevel=2)
        return self.analysis(make)

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the graph, by position."""
        return self.index.nodes

    @cached_property
    def order(self) -> list[int]:
        """The rank of each position in an order independent of names and of the node list, for breaking ties."""
        return structural_order(self.index)

    @cached_property
    def calls(self) -> dict[int, RegionCall]:
        """The region calls of the graph, by position."""
        calls = ((i, call_of(node.meta)) for i, node in enumerate(self.nodes) if node.op == "call_module")
        return {i: call for i, call in calls if call is not None}

    def kind_of(self, position: int) -> str | None:
        """Return the kind of the region called at a position, None for any other operation."""
        call = self.calls.get(position)
        return call.identity.kind if call is not None else None

    def value(self, position: int) -> Any:
        """Return the value recorded for a position: a fake tensor, a number, a tuple; None if unknown."""
        return self.nodes[position].meta.get("val")

    def module_path(self, position: int) -> str:
        """Return the path of the innermost module that an operation came from, "" if unknown."""
        stack = self.nodes[position].meta.get("nn_module_stack")
        if not stack:
            return ""
        return str(cast("tuple[Any, ...]", list(cast("dict[str, Any]", stack).values())[-1])[0])


class HasNode(Protocol):
    """What belongs to one node, such as a value that a pattern has bound."""

    @property
    def node(self) -> Node: ...


@dataclass(frozen=True)
class Decline:
    """A refusal with its reason and the node or value it concerns."""

    reason: str
    at: Node | HasNode | str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument("a Decline needs a non-empty text as its reason.")

    @property
    def place(self) -> str | None:
        """The name of the node concerned, if any."""
        node = getattr(self.at, "node", self.at)
        return node.name if isinstance(node, Node) else node if isinstance(node, str) else None


@dataclass(frozen=True, slots=True)
class Candidate:
    """Operations that a rule proposes as one region, as positions in the `RuleContext` it was proposed for.

    A `divisible` candidate is still useful in parts: if another candidate wins some of its operations, the rest is
    considered again. One that `must_save` is refused if it would save neither bytes nor launches. `escapes` is a policy, or one per position. `priority` defaults to the rule's. `arguments` maps
    the pattern's names of operands to positions, `results` are its results in order, None for one not computed.
    """

    rule: str
    kind: str
    members: tuple[int, ...]
    attrs: Mapping[str, Any] | None = None
    version: int = 1
    escapes: str | Mapping[int, str] = "auto"
    priority: int | None = None
    divisible: bool = False
    arguments: Mapping[str, int] | None = None
    results: tuple[int | None, ...] = ()
    must_save: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Operations that a rule considered and refused, with the reason.

    For a near-miss of a pattern, `matched` of `wanted` operations were matched.
    """

    rule: str
    members: tuple[int, ...]
    reason: str
    at: int | None = None
    matched: int = 0
    wanted: int = 0


Proposal = Candidate | Refusal


class Rule(ABC):
    """Proposes sets of operations that form regions of one kind.

    `name` is unique within a rule set. Among overlapping candidates the one of higher `priority` wins, whatever it
    saves. A rule does not take regions of its own kind unless `nests` is set. `reference` is the function of
    arguments and attributes that defines the kind, if there is one.
    """

    name: str
    kind: str
    priority: int = 0
    nests: bool = False
    reference: Any = None

    @abstractmethod
    def propose(self, context: RuleContext) -> Iterable[Proposal]:
        """Yield candidates and refusals for the graph of `context`, which must not be modified."""

    def why_not(self, context: RuleContext, first: int, second: int) -> list[str]:
        """Return the reasons why this rule would not put two positions into one region, as far as known."""
        return []


@dataclass(frozen=True)
class RuleSet:
    """An immutable, ordered collection of rules with distinct names; sets can be added, compared and iterated."""

    rules: tuple[Rule, ...] = field(default=())

    def __init__(self, *rules: Rules) -> None:
        object.__setattr__(self, "rules", tuple(_flatten(rules)))
        by_name: dict[str, Rule] = {}
        for rule in self.rules:
            other = by_name.setdefault(rule.name, rule)
            if other is not rule:
                raise RuleError(
                    rule.name, "two rules of one set have this name; give one of them another `name`"
                )
        object.__setattr__(self, "rules", tuple(by_name.values()))

    def __add__(self, other: Rule | RuleSet | Iterable[Any]) -> RuleSet:
        return RuleSet(self, other)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    def __len__(self) -> int:
        return len(self.rules)

    def __getitem__(self, name: str) -> Rule:
        for rule in self.rules:
            if rule.name == name:
                return rule
        names = [r.name for r in self.rules]
        available = f"There are {', '.join(names)}" if names else "The set is empty"
        hint = did_you_mean(str(name), names, otherwise=available).removesuffix("?")
        raise RuleError(str(name), f"no rule of this name. {hint}")

    def __repr__(self) -> str:
        return f"RuleSet({', '.join(rule.name for rule in self.rules)})"


Rules: TypeAlias = Rule | RuleSet | Iterable[Rule | RuleSet | Iterable[Rule | RuleSet]]
"""A rule, a rule set, or a list of them, which may hold lists."""


def as_rules(rules: Rules) -> RuleSet:
    """Return a rule, a rule set or any nesting of lists of them as one set."""
    return rules if isinstance(rules, RuleSet) else RuleSet(rules)


def require_int(rule: str, argument: str, value: object, *, least: int | None = None) -> None:
    """Raise RuleError unless an option of a rule is an int, of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise RuleError(rule, f"{argument} {value!r} is not an int{bound}")


def require_policy(rule: str, escapes: object) -> None:
    """Raise RuleError unless `escapes` is one of the policies for values also used outside a region."""
    if escapes not in POLICIES:
        raise RuleError(rule, f"escapes {escapes!r} is not one of {', '.join(POLICIES)}")


def _flatten(rules: Any) -> Iterator[Rule]:
    stack: list[Any] = [rules]
    while stack:
        item = stack.pop()
        if isinstance(item, Rule):
            yield item
        elif isinstance(item, RuleSet):
            stack.extend(reversed(item.rules))
        elif isinstance(item, (tuple, list)):
            stack.extend(reversed(cast("list[Any]", item)))
        elif isinstance(item, Iterable) and not isinstance(item, (str, bytes, Mapping, Tensor)):
            stack.extend(reversed(list(cast("Iterable[Any]", item))))
        else:
            raise InvalidArgument(
                f"expected a rule, a RuleSet or a list of them, got {type(item).__name__}; "
                f"`@dovetail.rule(kind=...)` makes a rule of a function."
            )
