"""Decisions in words: what the ledger notes of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dovetail.fusion.ledger import Accepted, Declined, short
from dovetail.fusion.plan import Plan, Refused
from dovetail.rules.rule import Refusal
from dovetail.rules.scene import Scene

# How many near-misses at one operation a further one is compared with.
_MOST_NEAR = 16


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
        folded=any(_holds(plan, refused) for plan in refused.others if plan in regions),
    )


def _holds(plan: Plan, refused: Refused) -> bool:
    """Whether a region has all of a candidate, and more or as the same kind."""
    inside = plan.draft.members | plan.draft.clones
    if not inside.issuperset(refused.members):
        return False
    return len(inside) > len(refused.members) or plan.draft.identity.kind == refused.proposed.candidate.kind


def folded(
    entries: Iterable[Declined], kinds: Mapping[str, str], accepted: Iterable[Accepted]
) -> list[Declined]:
    """Near-misses, those folded that say nothing new. `kinds` has the kind of each rule by name.

    Where one of a kind got further, those on the same operations or on some of them are folded; where a region of
    the kind was made, all on its operations are.
    """
    known: dict[tuple[str, str], list[set[str]]] = {}

    def note(kind: str, nodes: Iterable[str]) -> None:
        inside = set(nodes)
        for name in inside:
            known.setdefault((kind, name), []).append(inside)

    def is_known(kind: str, nodes: tuple[str, ...]) -> bool:
        return bool(nodes) and any(s.issuperset(nodes) for s in known.get((kind, nodes[0]), ())[:_MOST_NEAR])

    for region in accepted:
        note(region.kind, region.nodes)
    listed = list(entries)
    nearest = sorted(range(len(listed)), key=lambda k: (-listed[k].matched, listed[k].wanted, k))
    for k in nearest:
        entry = listed[k]
        if not entry.wanted:
            continue
        kind = kinds.get(entry.rule, entry.rule)
        if is_known(kind, entry.nodes):
            listed[k] = replace(entry, folded=True)
        else:
            note(kind, entry.nodes)
    return listed


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
