"""Rules with fixed candidates for tests, and the comparison that every fusing must pass."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from torch.fx import GraphModule

import dovetail
from dovetail.fusion.fuse import fuse
from dovetail.fusion.ledger import explain
from dovetail.rules.rule import Candidate, Proposal, Refusal, Rule, RuleContext
from tests.outlining.helpers import equal, run

Names = str | Iterable[str]


class Fixed(Rule):
    """Proposes the same sets of operations by name, each for as long as all of them stand in the graph."""

    def __init__(
        self,
        name: str,
        *sets: Names,
        kind: str | None = None,
        priority: int = 0,
        nests: bool = False,
        divisible: bool = False,
        escapes: str | Mapping[str, str] = "auto",
        refusals: Sequence[tuple[Names, str]] = (),
        min_size: int = 2,
    ) -> None:
        self.name, self.kind, self.priority, self.nests = name, kind or name, priority, nests
        self.sets = [_split(s) for s in sets]
        self.divisible, self.escapes, self.min_size = divisible, escapes, min_size
        self.refusals = [(_split(s), reason) for s, reason in refusals]

    def propose(self, context: RuleContext) -> Iterator[Proposal]:
        at = {n.name: i for i, n in enumerate(context.nodes) if n.target is not operator.getitem}
        for names in self.sets:
            members = tuple(at[n] for n in names if n in at)
            whole = len(members) == len(names)
            if (whole or (self.divisible and len(members) >= self.min_size)) and not any(
                i in context.barred for i in members
            ):
                escapes = (
                    self.escapes
                    if isinstance(self.escapes, str)
                    else {at[n]: policy for n, policy in self.escapes.items()}
                )
                yield Candidate(self.name, self.kind, members, escapes=escapes, divisible=self.divisible)
        for names, reason in self.refusals:
            members = tuple(at[n] for n in names if n in at)
            if members:
                yield Refusal(self.name, members, reason, members[-1], len(members), len(members) + 1)


def _split(names: Names) -> tuple[str, ...]:
    return tuple(names.split()) if isinstance(names, str) else tuple(names)


def held(gm: GraphModule) -> dict[str, set[str]]:
    """The operations of each region, by its name."""
    return {region.name: set(region.nodes) for region in dovetail.regions(gm)}


def sets(gm: GraphModule) -> list[tuple[str, ...]]:
    """The operations of the regions alone, sorted."""
    return sorted(tuple(sorted(region.nodes)) for region in dovetail.regions(gm))


def fused(gm: GraphModule, rules: Any, *inputs: Any, **options: Any) -> GraphModule:
    """Fuse, and prove that nothing else changed: values, the input graph, the way back, and a second time."""
    before, nodes, meta = dovetail.text(gm), list(gm.graph.nodes), dict(gm.meta)
    new = fuse(gm, rules, **options)
    assert new is not gm
    assert dovetail.text(gm) == before
    assert list(gm.graph.nodes) == nodes
    assert gm.meta == meta
    dovetail.check(new)
    assert equal(run(new, *inputs), run(gm, *inputs))
    if not dovetail.regions(gm):
        assert dovetail.text(dovetail.inline(new)) == before
    if options.get("fuel") is None and options.get("rounds") is None:
        again = fuse(new, rules, **options)
        assert dovetail.text(again) == dovetail.text(new)
        assert explain(again).accepted == explain(new).accepted
    return new


def refused(gm: GraphModule, error: type[Exception], rules: Any, **options: Any) -> str:
    """Fuse in vain: the message, after proving that the graph is as it was."""
    before, nodes, meta = dovetail.text(gm), list(gm.graph.nodes), dict(gm.meta)
    with pytest.raises(error) as caught:
        fuse(gm, rules, **options)
    assert isinstance(caught.value, dovetail.DovetailError)
    assert dovetail.text(gm) == before
    assert list(gm.graph.nodes) == nodes
    assert gm.meta == meta
    return str(caught.value)


def reasons(gm: GraphModule, rule: str | None = None) -> list[str]:
    """Why candidates were declined."""
    return [d.reason for d in explain(gm).declined if rule in (None, d.rule)]
