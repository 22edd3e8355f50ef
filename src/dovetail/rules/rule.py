"""What a rule is: something that looks at a graph and proposes, and never edits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, TypeVar, cast

from torch import Tensor
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, RuleError, checked_init, did_you_mean
from dovetail.ir.dependencies import Index
from dovetail.ir.structural_hash import structural_order
from dovetail.outlining.region_call import RegionCall, call_of


@checked_init()
@dataclass(frozen=True)
class Limits:
    """The most that a region may have; None is no limit.

    `nodes` counts the operations it computes, `operands` what it reads from outside, `outputs` what it returns,
    `bytes` what operands and outputs take together.
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
        """Whether there is no limit at all."""
        return all(getattr(self, field.name) is None for field in fields(self))


UNLIMITED = Limits()
Fact = TypeVar("Fact")


class RuleContext:
    """What rules look at. Positions are those of `index`; facts are worked out when first asked for.

    `barred` has the positions that no rule may take, each with the reason.
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
        self.gm = gm
        self.index = index if index is not None else Index(gm)
        self.limits = limits
        self.barred: Mapping[int, str] = barred or {}
        self.round = round
        self._facts: dict[Any, Any] = {}

    def fact(self, make: Callable[[RuleContext], Fact]) -> Fact:
        """What `make` says of this scene, worked out once."""
        if make not in self._facts:
            self._facts[make] = make(self)
        return self._facts[make]

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the graph by position."""
        return self.index.nodes

    @cached_property
    def order(self) -> list[int]:
        """A place for each position that neither names nor the listing can change, for breaking ties."""
        return structural_order(self.index)

    @cached_property
    def calls(self) -> dict[int, RegionCall]:
        """The record of each position that calls a region."""
        found: dict[int, RegionCall] = {}
        for i, node in enumerate(self.nodes):
            if node.op == "call_module":
                call = call_of(node.meta)
                if call is not None:
                    found[i] = call
        return found

    def kind_of(self, position: int) -> str | None:
        """The kind of the region called at a position, None for any other operation."""
        call = self.calls.get(position)
        return call.identity.kind if call is not None else None

    def value(self, position: int) -> Any:
        """What is known of a position's value: a fake tensor, a number, a tuple; None if nothing is."""
        return self.nodes[position].meta.get("val")

    def module_path(self, position: int) -> str:
        """The path of the innermost module that an operation came from, "" if that is not known."""
        stack = self.nodes[position].meta.get("nn_module_stack")
        if not stack:
            return ""
        return str(cast("tuple[Any, ...]", list(cast("dict[str, Any]", stack).values())[-1])[0])


@dataclass(frozen=True)
class Decline:
    """A refusal with its reason, and the node or value that it is about."""

    reason: str
    at: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument("a Decline needs a reason in words.")

    @property
    def place(self) -> str | None:
        """The name of the node it is about."""
        node = getattr(self.at, "node", self.at)
        return node.name if isinstance(node, Node) else node if isinstance(node, str) else None


@dataclass(frozen=True, slots=True)
class Candidate:
    """Operations that a rule would make one region of, as positions in the scene it was proposed for.

    A `divisible` one is as good in parts: where another candidate wins some of its operations, what is left of it
    is weighed again. `escapes` is a policy, or one per position. `priority` is the rule's unless it is given here.
    `arguments` are what a pattern calls the operands, `results` its results in order, None for one not computed.
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


@dataclass(frozen=True, slots=True)
class Refusal:
    """Operations that a rule looked at and will not take, and why.

    A near-miss of a pattern says how far it got: `matched` of `wanted` operations.
    """

    rule: str
    members: tuple[int, ...]
    reason: str
    at: int | None = None
    matched: int = 0
    wanted: int = 0


Proposal = Candidate | Refusal


class Rule(ABC):
    """Looks at a graph and proposes what belongs together.

    `name` tells rules of one set apart. Among overlapping candidates those of higher `priority` win, whatever
    they save. A rule leaves regions of its own kind alone unless `nests` is set. `reference` is the function of
    arguments and attributes that defines the kind, where it has one.
    """

    name: str
    kind: str
    priority: int = 0
    nests: bool = False
    reference: Any = None

    @abstractmethod
    def propose(self, scene: RuleContext) -> Iterable[Proposal]:
        """Candidates and refusals for the graph as the scene shows it; the graph is not to be touched."""

    def why_not(self, scene: RuleContext, first: int, second: int) -> list[str]:
        """Why this rule would not put two positions into one region, as far as it can tell beforehand."""
        return []


@dataclass(frozen=True)
class RuleSet:
    """Rules as a value: sets are added, compared and iterated over; names in one set are distinct."""

    rules: tuple[Rule, ...] = field(default=())

    def __init__(self, *rules: Rule | RuleSet | Iterable[Any]) -> None:
        object.__setattr__(self, "rules", tuple(_flat(rules)))
        seen: dict[str, Rule] = {}
        for rule in self.rules:
            other = seen.setdefault(rule.name, rule)
            if other is not rule:
                raise RuleError(
                    rule.name, "two rules of one set have this name; give one of them another `name`"
                )
        object.__setattr__(self, "rules", tuple(seen.values()))

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
        there = f"There are {', '.join(names)}" if names else "The set is empty"
        hint = did_you_mean(str(name), names, otherwise=there).removesuffix("?")
        raise RuleError(str(name), f"no rule of this name. {hint}")

    def __repr__(self) -> str:
        return f"RuleSet({', '.join(rule.name for rule in self.rules)})"


def as_rules(rules: Any) -> RuleSet:
    """A rule, a rule set or any nesting of lists of them as one set."""
    return rules if isinstance(rules, RuleSet) else RuleSet(rules)


def _flat(rules: Any) -> Iterator[Rule]:
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
