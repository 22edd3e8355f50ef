"""Finding a template in a graph: from its first result backwards, then on to results beside it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from dovetail.graph.commuting import commutes
from dovetail.graph.spellings import target_name
from dovetail.rules.choices import Site
from dovetail.rules.template import (
    Path,
    Template,
    Where,
    alternatives_of,
    is_choice,
    is_operation,
    is_tensors,
    site_of,
)
from dovetail.rules.through import Through

_MOST_TRIES = 2_000
# Which library may be used; they say nothing of what is computed.
_SETTINGS = frozenset({"cudnn_enable", "cudnn_enabled"})
Pair = tuple[Any, Any, Where]
"""A part of the template, the part of the graph it is to be, and the argument of the template that it is."""


@dataclass
class Found:
    """Nodes of the graph by nodes of the template; operands by name; captured literals; what was looked through."""

    nodes: dict[Node, Node] = field(default_factory=dict[Node, Node])
    operands: dict[Node, Node] = field(default_factory=dict[Node, Node])
    literals: dict[str, Any] = field(default_factory=dict[str, Any])
    taken: set[Node] = field(default_factory=set[Node])
    through: list[Node] = field(default_factory=list[Node])
    joined: dict[Node, Node] = field(default_factory=dict[Node, Node])
    sites: dict[Site, int] = field(default_factory=dict[Site, int])

    def copy(self) -> Found:
        return Found(
            dict(self.nodes),
            dict(self.operands),
            dict(self.literals),
            set(self.taken),
            list(self.through),
            dict(self.joined),
            dict(self.sites),
        )


@dataclass(frozen=True)
class _Taken:
    """On an agenda: this alternative is the one that is tried."""

    site: Site
    number: int


@dataclass(frozen=True)
class Miss:
    """How far an attempt got, and what stopped it."""

    found: tuple[Node, ...]
    reason: str
    at: Node | None
    wanted: int


class Matcher:
    """Looks for one template.

    A loose one compares operators and wiring, and takes literals as they come: what it finds is only a proposal. A
    strict one, whose template was traced on the very operands, compares every literal, size and dtype too.
    """

    def __init__(
        self,
        template: Template,
        *,
        strict: bool,
        constant: Callable[[Node], Tensor | None],
        pattern_constant: Callable[[Node], Tensor | None],
        order: Callable[[Node], int],
        through: Through | None = None,
        same_number: Callable[[Any, Any], bool] = operator.eq,
    ) -> None:
        self.template, self.strict = template, strict
        self.constant, self.pattern_constant = constant, pattern_constant
        self.order, self.through, self.same_number = order, through, same_number
        self.literal_at: dict[tuple[Node, Path], str] = {
            place: name for name, places in template.literals.items() for place in places
        }
        self.argument = {node: name for name, node in template.operands.items()}
        self.miss: Miss | None = None
        self._tries = 0

    def find(self, root: Node, operands: Mapping[Node, Node] | None = None) -> Iterator[Found]:
        """Every way in which the template's first result can be this node, some operands perhaps given."""
        self.miss, self._tries = None, 0
        start = Found(operands=dict(operands or {}))
        yield from self._solve([(self.template.root, root, None)], start)

    def _solve(self, agenda: list[Pair], found: Found) -> Iterator[Found]:
        """Settle what is on the agenda; wherever there is a choice, each way is tried in turn."""
        self._tries += 1
        if self._tries > _MOST_TRIES:
            return
        while agenda:
            ours, theirs, where = agenda.pop()
            ways = self._settle(ours, theirs, where, found)
            if ways is None:
                return
            if len(ways) == 1:
                agenda.extend(ways[0])
                continue
            for way in ways:
                yield from self._solve([*agenda, *way], found.copy())
            return
        rest = self._beside(found)
        if rest is None:
            if self._operands_outside(found):
                yield found
            return
        ours, choices = rest
        if not choices:
            self._missed(found, f"nothing beside it is the '{target_name(ours)}' that is wanted", None)
        for theirs in choices:
            yield from self._solve([(ours, theirs, None)], found.copy())

    def _settle(self, ours: Any, theirs: Any, where: Where, found: Found) -> list[list[Pair]] | None:
        """What follows if a part of the template is a part of the graph: one or more agendas, None if it cannot be."""
        if isinstance(ours, _Taken):
            found.sites[ours.site] = ours.number
            return [[]]
        if not isinstance(ours, Node):
            return self._settle_literal(ours, theirs, where, found)
        if ours.op == "placeholder":
            return [[]] if self._bind(ours, theirs, found) else None
        if ours.op == "get_attr":
            return [[]] if self._same_constant(ours, theirs, found) else None
        if not is_operation(ours):
            return (
                [[]]
                if not self.strict or self._same_size(ours, theirs)
                else self._refuse(found, ours, theirs)
            )
        if not isinstance(theirs, Node):
            return self._refuse(found, ours, theirs)
        if is_choice(ours):
            return self._choose(ours, theirs, found)
        known = found.nodes.get(ours)
        if known is not None:
            return [[]] if known is theirs else self._refuse(found, ours, theirs)
        if theirs in found.taken or ours.target is not theirs.target or theirs.op != "call_function":
            return self._look_through(ours, theirs, found)
        if self.strict and not self._same_value(ours, theirs):
            self._missed(found, "its dtype or shape is not what the pattern would compute", theirs)
            return None
        found.nodes[ours] = theirs
        found.taken.add(theirs)
        return self._arguments(ours, theirs, found)

    def _choose(self, ours: Node, theirs: Node, found: Found) -> list[list[Pair]] | None:
        known = found.joined.setdefault(ours, theirs)
        if known is not theirs:
            return self._refuse(found, ours, theirs)
        site = site_of(ours)
        taken = found.sites.get(site)
        ways = list(enumerate(alternatives_of(ours)))
        if taken is not None:
            ways = [ways[taken]]
        return [[(alternative, theirs, None), (_Taken(site, k), None, None)] for k, alternative in ways]

    def _arguments(self, ours: Node, theirs: Node, found: Found) -> list[list[Pair]] | None:
        pairs: list[Pair] = []
        if not self._pair((ours.args, ours.kwargs), (theirs.args, theirs.kwargs), (), ours, found, pairs):
            self._missed(found, f"its arguments are not those of the pattern's '{target_name(ours)}'", theirs)
            return None
        pairs.reverse()
        if len(ours.args) > 1 and commutes(ours) and commutes(theirs):
            swapped: list[Pair] = []
            args = (theirs.args[1], theirs.args[0], *theirs.args[2:])
            if self._pair((ours.args, ours.kwargs), (args, theirs.kwargs), (), ours, found, swapped):
                swapped.reverse()
                if not _same_pairs(swapped, pairs):
                    return [pairs, swapped]
        return [pairs]

    def _pair(self, ours: Any, theirs: Any, path: Path, node: Node, found: Found, pairs: list[Pair]) -> bool:
        """Put what two arguments have in the same places side by side."""
        name = self.literal_at.get((node, path))
        if name is not None:
            return self._capture(name, theirs, found)
        if isinstance(ours, Node):
            pairs.append((ours, theirs, (node, path)))
            return True
        if isinstance(ours, (tuple, list)) and isinstance(theirs, (tuple, list)):
            left, right = cast("list[Any]", ours), cast("list[Any]", theirs)
            if len(left) != len(right):
                return not self.strict and not any(isinstance(v, Node) and is_operation(v) for v in left)
            return all(
                self._pair(a, b, (*path, i), node, found, pairs)
                for i, (a, b) in enumerate(zip(left, right, strict=True))
            )
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            mine, other = cast("Mapping[str, Any]", ours), cast("Mapping[str, Any]", theirs)
            return mine.keys() == other.keys() and all(
                self._pair(mine[k], other[k], (*path, k), node, found, pairs) for k in mine
            )
        pairs.append((ours, theirs, (node, path)))
        return True

    def _settle_literal(self, ours: Any, theirs: Any, where: Where, found: Found) -> list[list[Pair]] | None:
        if isinstance(theirs, Node) and is_tensors(theirs.meta.get("val")):
            self._missed(found, f"the pattern has {ours!r} where the graph has a tensor", theirs)
            return None
        if ours is None and theirs is not None and not self.strict:
            # An operand that is not there is part of the form; any other literal is not.
            return None if isinstance(theirs, Node) else [[]]
        if not self.strict:
            return [[]]
        if isinstance(theirs, Node):
            theirs = theirs.meta.get("val")
        if (
            _argument(where) in _SETTINGS
            or self._same_literal(ours, theirs)
            or self._same_dim(ours, theirs, where, found)
        ):
            return [[]]
        at = found.nodes.get(where[0]) if where is not None else None
        self._missed(found, f"{_named(where)} {theirs!r} where the pattern has {ours!r}", at)
        return None

    def _bind(self, ours: Node, theirs: Any, found: Found) -> bool:
        if not isinstance(theirs, Node):
            self._missed(
                found, f"the pattern's operand '{self.argument[ours]}' is the literal {theirs!r}", None
            )
            return False
        known = found.operands.setdefault(ours, theirs)
        if known is not theirs:
            self._missed(
                found, f"the pattern's operand '{self.argument[ours]}' is '{known.name}' elsewhere", theirs
            )
        return known is theirs

    def _capture(self, name: str, theirs: Any, found: Found) -> bool:
        if isinstance(theirs, Node):
            self._missed(found, f"the literal '{name}' is computed in the graph", theirs)
            return False
        value = list(cast("list[Any]", theirs)) if isinstance(theirs, (list, tuple)) else theirs
        if name not in found.literals:
            found.literals[name] = value
            return True
        return _same(found.literals[name], value)

    def _same_constant(self, ours: Node, theirs: Any, found: Found) -> bool:
        wanted = self.pattern_constant(ours)
        has = self.constant(theirs) if isinstance(theirs, Node) else None
        same = wanted is not None and has is not None and _same_tensor(wanted, has)
        if not same:
            self._missed(
                found, "a constant is not the pattern's", theirs if isinstance(theirs, Node) else None
            )
        return same

    def _look_through(self, ours: Node, theirs: Node, found: Found) -> list[list[Pair]] | None:
        source = self.through.source(theirs) if self.through is not None else None
        if source is None or theirs in found.taken:
            return self._refuse(found, ours, theirs)
        found.through.append(theirs)
        found.taken.add(theirs)
        return [[(ours, source, None)]]

    def _beside(self, found: Found) -> tuple[Node, list[Node]] | None:
        """An operation not yet found that reads something found, and the nodes of the graph it may be."""
        missing = [n for n in self.template.calls(found.sites) if n not in found.nodes]
        if not missing:
            return None
        for ours in missing:
            for used in ours.all_input_nodes:
                source = found.nodes.get(used) or found.operands.get(used)
                if source is not None:
                    users = [u for u in source.users if u.target is ours.target and u not in found.taken]
                    return ours, sorted(users, key=self.order)
        return missing[0], []

    def _operands_outside(self, found: Found) -> bool:
        for ours, theirs in found.operands.items():
            if theirs in found.taken:
                self._missed(
                    found,
                    f"the pattern's operand '{self.argument[ours]}' is computed inside the match",
                    theirs,
                )
                return False
        return True

    def _same_dim(self, ours: Any, theirs: Any, where: Where, found: Found) -> bool:
        """Whether two dims are the same counted from the end, where views were looked through."""
        if self.through is None or where is None or type(ours) is not int or type(theirs) is not int:
            return False
        node = found.nodes.get(where[0])
        return node is not None and self.through.same_dim(where, node, ours, theirs)

    def _same_value(self, ours: Node, theirs: Node) -> bool:
        left, right = ours.meta.get("val"), theirs.meta.get("val")
        return self._same_fact(left, right) or (
            self.through is not None and self.through.same_value(ours, theirs, self.same_number)
        )

    def _same_fact(self, ours: Any, theirs: Any) -> bool:
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            return (
                ours.dtype == theirs.dtype
                and ours.device == theirs.device
                and ours.dim() == theirs.dim()
                and all(self.same_number(a, b) for a, b in zip(ours.shape, theirs.shape, strict=True))
            )
        if isinstance(ours, (tuple, list)) and isinstance(theirs, (tuple, list)):
            left, right = cast("list[Any]", ours), cast("list[Any]", theirs)
            return len(left) == len(right) and all(
                self._same_fact(a, b) for a, b in zip(left, right, strict=True)
            )
        return theirs is None or isinstance(ours, Tensor) == isinstance(theirs, Tensor)

    def _same_size(self, ours: Node, theirs: Any) -> bool:
        value = theirs.meta.get("val") if isinstance(theirs, Node) else theirs
        return self.same_number(ours.meta.get("val"), value)

    def _same_literal(self, ours: Any, theirs: Any) -> bool:
        if isinstance(ours, (int, torch.SymInt)) and isinstance(theirs, torch.SymInt):
            return self.same_number(ours, theirs)
        return _same(ours, theirs)

    def _refuse(self, found: Found, ours: Node, theirs: Any) -> None:
        has = f"'{target_name(theirs)}'" if isinstance(theirs, Node) else repr(theirs)
        if isinstance(theirs, Node) and theirs.op == "placeholder":
            has = "an input"
        reason = f"it has {has} where the pattern has '{target_name(ours)}'"
        if isinstance(theirs, Node) and theirs in found.taken:
            reason = f"'{theirs.name}' would stand for two operations of the pattern"
        self._missed(found, reason, theirs if isinstance(theirs, Node) else None)

    def _missed(self, found: Found, reason: str, at: Node | None) -> None:
        if self.miss is None or len(found.nodes) > len(self.miss.found):
            wanted = max(len(self.template.calls(found.sites)), len(found.nodes))
            self.miss = Miss(tuple(found.nodes.values()), reason, at, wanted)


def _same_pairs(left: list[Pair], right: list[Pair]) -> bool:
    return all(a[0] is b[0] and a[1] is b[1] for a, b in zip(left, right, strict=True))


def _argument(where: Where) -> str:
    """The argument that a place in a node's arguments is, by the operator's own name for it."""
    if where is None:
        return ""
    node, path = where
    if path[0] == 1:
        return str(path[1])
    schema = getattr(node.target, "_schema", None)
    return str(schema.arguments[path[1]].name) if schema is not None else f"argument {path[1]}"


def _named(where: Where) -> str:
    if where is None:
        return "it has"
    return f"its {_argument(where)} has" if len(where[1]) > 2 else f"its {_argument(where)} is"


def _same(a: Any, b: Any) -> bool:
    """Whether two literals mean the same number or the same setting; 2 and 2.0 do, 1 and True do not."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        if math.isnan(a) or math.isnan(b):
            return math.isnan(a) and math.isnan(b)
        return a == b and math.copysign(1, a) == math.copysign(1, b)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        left, right = cast("list[Any]", a), cast("list[Any]", b)
        return len(left) == len(right) and all(_same(x, y) for x, y in zip(left, right, strict=True))
    return bool(a == b)


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(torch.equal(a.detach().cpu(), b.detach().cpu()))
