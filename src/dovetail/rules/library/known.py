"""How rules for well-known kinds are made: traced on first use, and only for a graph that has what they cannot do without."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import Any, cast

from torch.fx import Node

from dovetail.graph.normalform import op_name
from dovetail.rules.matching.choices import Const
from dovetail.rules.matching.match import Match
from dovetail.rules.matching.shadow import shadow_of
from dovetail.rules.pattern import PatternRule
from dovetail.rules.rule import Candidate, Decline, Proposal
from dovetail.rules.scene import Scene

_MOST_BETWEEN = 8
# Fewer operations in common are chance.
_LEAST = 3
# What every graph is full of: to have only these in common is to have nothing in common.
_COMMON = frozenset({"add", "sub", "mul", "div", "neg", "slice", "cat"})


class Known(PatternRule):
    """A pattern rule for a well-known kind.

    `needs` names operators without which there is no match, so that most graphs cost nothing: words separated by
    blanks, each one operator or several with `|` between them; `when` is asked beyond that. A near-miss of one or two
    operations is not told, nor one that got to none of these operators, save such as every graph is full of. Where `says` is given, the region's `attrs` are
    what it returns and nothing else: literals that only tell one spelling from another stay out.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        kind: str,
        needs: str,
        says: Callable[[Match], Mapping[str, Any]] | None = None,
        when: Callable[[Scene], bool] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(function, kind=kind, checked=False, **options)
        self.needs = tuple(frozenset(word.split("|")) for word in needs.split())
        self.says, self.when = says, when

    def propose(self, scene: Scene) -> Iterable[Proposal]:
        """What was found, looked for once in a scene: other rules may ask for it too."""
        return scene.fact(self._look)

    def _look(self, scene: Scene) -> tuple[Proposal, ...]:
        names = scene.fact(_operator_names)
        if names is not None and not all(word & names for word in self.needs):
            return ()
        if self.when is not None and not self.when(scene):
            return ()
        return tuple(p for p in super().propose(scene) if self._is_worth_telling(scene, p))

    def _is_worth_telling(self, scene: Scene, found: Proposal) -> bool:
        if isinstance(found, Candidate) or found.matched >= found.wanted:
            return True
        if found.matched < _LEAST:
            return False
        telling = [word for word in self.needs if not word <= _COMMON]
        reached = {n for i in found.members for n in scene.fact(_names_at)[i]}
        return not telling or any(word & reached for word in telling)

    def attributes(self, match: Match) -> dict[str, Any] | Decline:
        return dict(self.says(match)) if self.says is not None else super().attributes(match)


def known(
    *,
    kind: str,
    needs: str,
    says: Callable[[Match], Mapping[str, Any]] | None = None,
    when: Callable[[Scene], bool] | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], Known]:
    """Make a rule for a well-known kind of a function; see `Known` and `dovetail.rules.pattern.rule`."""

    def decorate(function: Callable[..., Any]) -> Known:
        return Known(function, kind=kind, needs=needs, says=says, when=when, **options)

    return decorate


def has(match: Match, *names: str) -> bool:
    """Whether an operator of one of these names is among the operations matched."""
    return any(op_name(node.target) in names for node in match.nodes)


def ahead_of(nodes: Collection[Node], wanted: Set[str], between: Set[str]) -> Node | None:
    """The nearest operator of a wanted name that reads what nodes make, with only a few of those in between."""
    inside = set(nodes)
    reached = [user for node in nodes for user in node.users if user not in inside]
    for _ in range(_MOST_BETWEEN):
        found = next((n for n in reached if op_name(n.target) in wanted), None)
        if found is not None:
            return found
        reached = [user for n in reached if op_name(n.target) in between for user in n.users]
    return None


def taking(
    name: str, literals: Mapping[str, Any], make: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a pattern be written with one argument in place of several literals, as what `make` returns for these.

    `literals` has an example for each; to the rule each is an argument with the default `Const(example)`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def pattern(*args: Any, **arguments: Any) -> Any:
            made = make(**{each: arguments.pop(each, None) for each in literals})
            return function(*args, **{name: made}, **arguments)

        own = inspect.signature(function)
        kept = [p for p in own.parameters.values() if p.name != name]
        added = [
            inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=Const(example))
            for each, example in literals.items()
        ]
        cast("Any", pattern).__signature__ = own.replace(parameters=[*kept, *added])
        return pattern

    return decorate


def _names_at(scene: Scene) -> Mapping[int, Set[str]]:
    """The operators that each position comes to as patterns see it."""
    found: dict[int, set[str]] = {i: set() for i in range(len(scene.nodes))}
    for node, places in scene.fact(shadow_of).origins.items():
        for i in places:
            found[i].add(op_name(node.target))
    return found


def _operator_names(scene: Scene) -> frozenset[str] | None:
    """The operators of a graph as patterns see it, None where it cannot be seen."""
    shadow = scene.fact(shadow_of)
    if shadow.why_none:
        return None
    return frozenset(op_name(target) for target in shadow.by_target)
