"""Asking the rules: what they propose, checked, and what became of those that failed."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from dovetail.errors import DovetailError, InvalidArgument, RuleError
from dovetail.fusion.plan import Proposed
from dovetail.outlining.record import make_identity
from dovetail.outlining.requests import POLICIES
from dovetail.rules.rule import Candidate, Refusal, Rule, RuleSet
from dovetail.rules.scene import Scene


@dataclass(frozen=True)
class Failure:
    """A rule that raised, or proposed what no rule may. Nothing it proposed in that round counts."""

    rule: str
    error: str
    traceback: str
    round: int


@dataclass
class Proposals:
    """What all rules said of one scene."""

    candidates: list[Proposed] = field(default_factory=list[Proposed])
    refusals: list[Refusal] = field(default_factory=list[Refusal])
    failures: list[Failure] = field(default_factory=list[Failure])


def collect(
    scene: Scene,
    rules: RuleSet,
    *,
    skip: Collection[str] = (),
    priorities: Mapping[str, int] | None = None,
    strict: bool = False,
) -> Proposals:
    """Ask every rule, those of `skip` excepted. A rule that fails does not take the others down.

    With `strict`, the first failure is raised as a RuleError.
    """
    found = Proposals()
    for rule in rules:
        if rule.name in skip:
            continue
        try:
            candidates, refusals = _ask(scene, rule)
        except Exception as error:
            if strict:
                raise _blame(rule, error) from error
            text = "".join(traceback.format_exception(error))
            words = str(error) if isinstance(error, DovetailError) else f"{type(error).__name__}: {error}"
            found.failures.append(Failure(rule.name, words, text, scene.round))
            continue
        for candidate in candidates:
            found.candidates.append(Proposed(candidate, rule, _priority(rule, candidate, priorities)))
        found.refusals.extend(refusals)
    return found


def _blame(rule: Rule, error: Exception) -> RuleError:
    if isinstance(error, RuleError):
        return error
    return RuleError(rule.name, f"raised {type(error).__name__} while proposing: {error}")


def _priority(rule: Rule, candidate: Candidate, priorities: Mapping[str, int] | None) -> int:
    """A candidate's priority: its own or else its rule's, shifted to what the user gave for the rule or the kind."""
    own = rule.priority if candidate.priority is None else candidate.priority
    for key in (rule.name, candidate.kind):
        if priorities is not None and key in priorities:
            return priorities[key] + own - rule.priority
    return own


def _ask(scene: Scene, rule: Rule) -> tuple[list[Candidate], list[Refusal]]:
    candidates: list[Candidate] = []
    refusals: list[Refusal] = []
    identities: set[tuple[str, int]] = set()
    proposed: Any = rule.propose(scene)
    if proposed is None or not hasattr(proposed, "__iter__"):
        raise RuleError(
            rule.name,
            f"propose returned a {type(proposed).__name__}; it is to yield Candidate and Refusal",
        )
    for proposal in proposed:
        if isinstance(proposal, Candidate):
            _require_candidate(scene, rule, proposal, identities)
            candidates.append(proposal)
        elif isinstance(proposal, Refusal):
            _require_positions(scene, rule, proposal.members)
            if proposal.at is not None:
                _require_positions(scene, rule, (proposal.at,))
            refusals.append(proposal)
        else:
            raise RuleError(
                rule.name, f"proposes a {type(proposal).__name__}, which is neither a Candidate nor a Refusal"
            )
    return candidates, refusals


def _require_positions(scene: Scene, rule: Rule, members: Any) -> None:
    count = len(scene.index)
    if not isinstance(members, (tuple, list, set, frozenset)):
        raise RuleError(rule.name, f"members are a {type(members).__name__}; give a tuple of positions")
    for i in cast("tuple[Any, ...]", members):
        if type(i) is not int or not 0 <= i < count:
            raise RuleError(rule.name, f"{i!r} is not a position of this graph, which has {count} nodes")


def _require_candidate(
    scene: Scene, rule: Rule, candidate: Candidate, identities: set[tuple[str, int]]
) -> None:
    _require_positions(scene, rule, candidate.members)
    if not candidate.members:
        raise RuleError(rule.name, "proposes a candidate without operations")
    nodes = scene.nodes
    for i in candidate.members:
        if nodes[i].op in ("placeholder", "output"):
            raise RuleError(
                rule.name, f"proposes '{nodes[i].name}', and a graph's {nodes[i].op} is not an operation"
            )
    try:
        if candidate.attrs is not None or (candidate.kind, candidate.version) not in identities:
            make_identity(candidate.kind, candidate.version, candidate.attrs)
            identities.add((candidate.kind, candidate.version))
    except InvalidArgument as error:
        raise RuleError(rule.name, str(error).removesuffix(".")) from error
    escapes: Any = candidate.escapes
    if isinstance(escapes, Mapping):
        given = cast("Mapping[Any, Any]", escapes)
        _require_positions(scene, rule, tuple(given))
        policies = list(given.values())
    else:
        policies = [escapes]
    for policy in policies:
        if policy not in POLICIES:
            raise RuleError(rule.name, f"escapes {policy!r} is none of {', '.join(POLICIES)}")
    priority: Any = candidate.priority
    if priority is not None and (not isinstance(priority, int) or isinstance(priority, bool)):
        raise RuleError(rule.name, f"priority {priority!r} is neither None nor an int")
