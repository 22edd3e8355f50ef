"""Decisions in words: what the ledger notes of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dovetail.fusion.ledger import Accepted, Declined, short
from dovetail.fusion.plan import Plan, Refused
from dovetail.rules.rule import Refusal
from dovetail.rules.scene import Scene


def accepted_entry(scene: Scene, plan: Plan, region: str) -> Accepted:
    """The entry for a plan that became a region of this name."""
    candidate, gain, bonus = plan.proposed.candidate, plan.gain, plan.bonus
    names = _names(scene, plan.draft.inside)
    return Accepted(
        region,
        candidate.kind,
        candidate.rule,
        scene.round,
        short(names),
        len(names),
        gain.bytes_saved + bonus.bytes_saved,
        gain.launches_saved + bonus.launches_saved,
        gain.bytes_recomputed,
    )


def near_miss(scene: Scene, refusal: Refusal) -> Declined:
    """The entry for what a rule itself refused."""
    return Declined(
        refusal.rule,
        short(_names(scene, refusal.members)),
        refusal.reason.rstrip("."),
        _name(scene, refusal.at),
        refusal.matched,
        refusal.wanted,
        scene.round,
        len(refusal.members),
    )


def declined_entry(scene: Scene, refused: Refused, regions: Mapping[Plan, str]) -> Declined:
    """The entry for a candidate that was not taken. `regions` are the names of those that were."""
    return Declined(
        refused.proposed.candidate.rule,
        short(_names(scene, refused.members)),
        _reason(refused, regions),
        _name(scene, refused.at),
        round=scene.round,
        size=len(refused.members),
    )


def _reason(refused: Refused, regions: Mapping[Plan, str]) -> str:
    if not refused.others:
        return refused.reason.rstrip(".")
    others = [
        f"region '{regions[p]}' (rule '{p.proposed.candidate.rule}')"
        if p in regions
        else f"another candidate (kind '{p.draft.identity.kind}', rule '{p.proposed.candidate.rule}')"
        for p in sorted(refused.others, key=lambda p: p.places)
    ]
    more = f" and {len(others) - 3} more" if len(others) > 3 else ""
    return f"{refused.reason} {', '.join(others[:3])}{more}"


def said(entry: Declined) -> str:
    """A refusal in one line."""
    near = f" ({entry.matched} of {entry.wanted} matched)" if entry.wanted else ""
    return f"rule '{entry.rule}' on {quoted(entry.nodes)}: {entry.reason}{near}"


def quoted(names: Iterable[str]) -> str:
    """The first few of some names."""
    listed = [f"'{name}'" for name in names]
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def _names(scene: Scene, positions: Iterable[int]) -> tuple[str, ...]:
    return tuple(scene.nodes[i].name for i in positions)


def _name(scene: Scene, position: int | None) -> str | None:
    return None if position is None else scene.nodes[position].name
