"""Ways of finding: each looks at one graph, and can be written down for a history."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

from dovetail.errors import DovetailError, InvalidArgument
from dovetail.outlining.record import call_of
from dovetail.outlining.requests import Request, is_projection
from dovetail.rules.matching.match import Value
from dovetail.rules.modulestack import Frame, class_name, frame, stack_of
from dovetail.rules.pattern import PatternRule
from dovetail.rules.rule import Candidate, Refusal, Rule
from dovetail.rules.scene import Scene
from dovetail.scheduling.found import Found, in_order, why_none
from dovetail.scheduling.paths import below, is_within

_KIND = re.compile(r"\W+")


class Finder(ABC):
    """One way of finding. `kind` is what a region made of a match is called unless the caller says."""

    name: str
    kind: str

    @abstractmethod
    def look(self, scene: Scene) -> tuple[list[Found], list[Refusal]]:
        """Every match in a graph, and what came near."""

    @abstractmethod
    def spelled(self) -> dict[str, Any]:
        """The finder as history stores it: callables among the values."""

    @property
    def identity(self) -> Any:
        """What tells finders apart that may find other things."""
        return (type(self), *self.spelled().values())

    def seen_from(self, scope: str) -> Finder:
        """The finder for a part at `scope` of a graph; others than it if what it looks for is told from there."""
        return self

    def find(self, scene: Scene, scope: str) -> tuple[list[Found], str]:
        """Matches with all operations in the module at `scope`, none overlapping, in execution order; why if none."""
        known = scene.fact(_remembered)
        finder = self.seen_from(scope)
        if finder.identity not in known:
            known[finder.identity] = finder.look(scene)
        found, refusals = known[finder.identity]
        inside = [m for m in found if all(_is_inside(n, scope) for n in m.nodes if not is_projection(n))]
        if inside:
            return in_order(inside, scene.index.position), ""
        near = [
            r for r in refusals if not r.members or any(_is_inside(scene.nodes[i], scope) for i in r.members)
        ]
        return [], why_none(near)


def _remembered(scene: Scene) -> dict[Any, tuple[list[Found], list[Refusal]]]:
    return {}


def frames_of(node: Node) -> list[Frame]:
    """The module calls that an operation came from, outermost first."""
    return [frame(key, entry) for key, entry in stack_of(node).items()]


def path_of(node: Node) -> str:
    """The innermost module that an operation came from."""
    frames = frames_of(node)
    return frames[-1].path if frames else ""


def _is_inside(node: Node, scope: str) -> bool:
    return scope == "" or any(is_within(f.path, scope) for f in frames_of(node))


@dataclass(frozen=True, eq=False)
class ByRule(Finder):
    """Wherever a rule, or one of several, proposes a region: a pattern, or any other rule."""

    rules: tuple[Rule, ...]

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ", ".join(rule.name for rule in self.rules)

    @property
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.rules[0], "kind", None) or _KIND.sub("_", self.rules[0].name)

    def spelled(self) -> dict[str, Any]:
        return {"rule": self.rules[0]} if len(self.rules) == 1 else {"rules": list(self.rules)}

    @property
    def identity(self) -> Any:
        return (ByRule, *(_identity(rule) for rule in self.rules))

    def look(self, scene: Scene) -> tuple[list[Found], list[Refusal]]:
        found: list[Found] = []
        refusals: list[Refusal] = []
        for rule in self.rules:
            for proposal in rule.propose(scene):
                if isinstance(proposal, Refusal):
                    refusals.append(proposal)
                else:
                    found.append(self._match(scene, proposal))
        return found, refusals

    def _match(self, scene: Scene, candidate: Candidate) -> Found:
        nodes = scene.nodes
        operands = {
            name: Value(nodes[i], scene.value(i), scene.gm) for name, i in (candidate.arguments or {}).items()
        }
        members = tuple(nodes[i] for i in sorted(candidate.members))
        results = tuple(None if i is None else nodes[i] for i in candidate.results)
        outputs = tuple(n for n in results if n is not None and not set(n.users) <= set(members))
        outputs = outputs or _outputs(members)
        escapes = candidate.escapes
        request = Request(
            members,
            candidate.kind,
            candidate.version,
            candidate.attrs,
            escapes if isinstance(escapes, str) else {nodes[i]: p for i, p in escapes.items()},
            rule=candidate.rule,
            arguments={name: value.node for name, value in operands.items()},
            results=results,
        )
        found = replace(_found(self, scene, members, outputs, request), rule=candidate.rule)
        literals = dict(candidate.attrs or {})
        return replace(found, operands=operands or found.operands, literals=literals, kind=candidate.kind)


def _identity(rule: Rule) -> Any:
    """What tells rules apart; a pattern that is made of the same function again is the same."""
    if isinstance(rule, PatternRule):
        return (PatternRule, rule.function, rule.guards, rule.through, rule.kind)
    return (id(rule), rule)


def _found(
    finder: Finder, scene: Scene, members: tuple[Node, ...], outputs: tuple[Node, ...], request: Request
) -> Found:
    inside = set(members)
    reads = dict.fromkeys(n for m in members for n in m.all_input_nodes if n not in inside)
    at = scene.index.position
    operands = {n.name: Value(n, scene.value(at[n]), scene.gm) for n in reads}
    return Found(
        rule=finder.name,
        operands=operands,
        literals={},
        nodes=members,
        outputs=outputs,
        module_path=_common_path(members),
        kind=request.kind,
        finder=finder,
        request=request,
    )


def _outputs(members: tuple[Node, ...]) -> tuple[Node, ...]:
    inside = set(members)
    return tuple(n for n in members if any(user not in inside for user in n.users))


def _common_path(members: tuple[Node, ...]) -> str:
    """The innermost module that all of the operations came from."""
    stacks = [[f.path for f in frames_of(n)] for n in members if not is_projection(n)]
    common = ""
    for paths in zip(*stacks, strict=False):
        if len(set(paths)) != 1:
            break
        common = paths[0]
    return common


@dataclass(frozen=True, eq=False)
class ByNode(Finder):
    """Each operation that a predicate accepts, or that calls an operator, by itself."""

    what: Callable[[Node], Any] | OpOverload | OpOverloadPacket

    @cached_property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.what, "__name__", str(self.what))

    @property
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        packet = self.what.overloadpacket if isinstance(self.what, OpOverload) else self.what
        return _KIND.sub("_", getattr(packet, "__name__", self.name)).strip("_") or "part"

    def spelled(self) -> dict[str, Any]:
        is_operator = isinstance(self.what, (OpOverload, OpOverloadPacket))
        return {"operator": str(self.what)} if is_operator else {"predicate": self.what}

    def look(self, scene: Scene) -> tuple[list[Found], list[Refusal]]:
        found: list[Found] = []
        for node in scene.nodes:
            if (
                node.op in ("placeholder", "get_attr", "output")
                or is_projection(node)
                or not self._accepts(node)
            ):
                continue
            members = (node, *(user for user in node.users if is_projection(user)))
            found.append(
                _found(self, scene, members, _outputs(members) or (node,), Request(members, self.kind))
            )
        names = sorted(
            {str(n.target) for n in scene.nodes if n.op == "call_function" and not is_projection(n)}
        )
        reason = f"no operation is accepted by {self.name}; there are {', '.join(names[:8])}"
        return found, [] if found else [Refusal(self.name, (), reason)]

    def _accepts(self, node: Node) -> bool:
        if isinstance(self.what, OpOverload):
            return node.target == self.what
        if isinstance(self.what, OpOverloadPacket):
            return getattr(node.target, "overloadpacket", None) == self.what
        try:
            return bool(self.what(node))
        except DovetailError:
            raise
        except Exception as error:
            raise InvalidArgument(
                f"the predicate {self.name} raised {type(error).__name__}: {error}."
            ) from error


@dataclass(frozen=True, eq=False)
class ByModule(Finder):
    """The operations of each call of a module of a class, or at a path that a regular expression finds.

    Paths are those from the module at `scope`, whatever larger part the graph is of.
    """

    what: type[nn.Module] | re.Pattern[str]
    scope: str = ""

    def seen_from(self, scope: str) -> Finder:
        return self if isinstance(self.what, type) or scope == self.scope else replace(self, scope=scope)

    @property
    def identity(self) -> Any:
        return (ByModule, self.what, self.scope)

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.what.__name__ if isinstance(self.what, type) else self.what.pattern

    @property
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _KIND.sub("_", self.name).strip("_") if isinstance(self.what, type) else "part"

    def spelled(self) -> dict[str, Any]:
        return {"module": self.what} if isinstance(self.what, type) else {"path": self.what.pattern}

    def look(self, scene: Scene) -> tuple[list[Found], list[Refusal]]:
        calls: dict[str, list[Node]] = {}
        frames: dict[str, Frame] = {}
        for node in scene.nodes:
            if node.op in ("placeholder", "get_attr", "output") or is_projection(node):
                continue
            for at in frames_of(node):
                if self._fits(at):
                    frames[at.key] = at
                    calls.setdefault(at.key, []).append(node)
                    break
        found = [self._match(scene, frames[key], nodes) for key, nodes in calls.items()]
        return found, [] if found else [Refusal(self.name, (), self._nothing(scene))]

    def _fits(self, at: Frame) -> bool:
        if isinstance(self.what, type):
            return at.owner == class_name(self.what)
        if at.path == self.scope or not is_within(at.path, self.scope):
            return False
        return self.what.search(below(at.path, self.scope)) is not None

    def _match(self, scene: Scene, at: Frame, nodes: list[Node]) -> Found:
        members = tuple(m for n in nodes for m in (n, *(u for u in n.users if is_projection(u))))
        outputs = _outputs(members)
        request = Request(members, self.kind, escapes="output")
        return replace(_found(self, scene, members, outputs, request), module_path=at.path)

    def _nothing(self, scene: Scene) -> str:
        seen = {
            f.bare: below(f.path, self.scope)
            for n in scene.nodes
            for f in frames_of(n)
            if is_within(f.path, self.scope)
        }
        listed = sorted(seen) if isinstance(self.what, type) else sorted(set(seen.values()) - {""})
        what = "of class" if isinstance(self.what, type) else "at a path with"
        return (
            f"no operation came from a module {what} {self.name}; there are {', '.join(listed[:8]) or 'none'}"
        )


@dataclass(frozen=True, eq=False)
class ByRegion(Finder):
    """The regions of a kind."""

    kind: str  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"regions of kind {self.kind}"

    def spelled(self) -> dict[str, Any]:
        return {"region": self.kind}

    def look(self, scene: Scene) -> tuple[list[Found], list[Refusal]]:
        found: list[Found] = []
        kinds: set[str] = set()
        for node in scene.nodes:
            call = call_of(node.meta)
            if call is None:
                continue
            kinds.add(call.identity.kind)
            if call.identity.kind == self.kind:
                members = (node, *(u for u in node.users if is_projection(u)))
                request = Request(members, self.kind)
                match = _found(self, scene, members, members[1:], request)
                named = {
                    name: Value(n, scene.value(scene.index.position[n]), scene.gm) for name, n in _named(node)
                }
                found.append(replace(match, operands=named or match.operands))
        reason = f"no region is of kind '{self.kind}'; there are {', '.join(sorted(kinds)) or 'none'}"
        return found, [] if found else [Refusal(self.name, (), reason)]


def _named(node: Node) -> Iterator[tuple[str, Node]]:
    call = call_of(node.meta)
    for name, number in call.arguments if call is not None else ():
        yield name, cast("Node", node.args[number])
