"""The decisions of a ledger as rows: each candidate in order, what it costs before and after, and why it was refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from dovetail.fusion.cost import Figures, Traffic
from dovetail.fusion.ledger import Ledger, record_of, rules_of
from dovetail.fusion.ledger_entries import Accepted, Declined
from dovetail.fusion.operation_locations import make_context, operation_locations
from dovetail.fusion.why_not import why_not_together
from dovetail.ir.dependencies import Index
from dovetail.ir.nodes import is_projection
from dovetail.outlining.escapes import RegionDraft
from dovetail.outlining.region import local_name, make_identity, regions
from dovetail.reporting.level_templates import Templates
from dovetail.reporting.near_misses import NearMissDocument

_MOST_NAMES = 16
_MOST_PAIRS = 120
_MOST_REASONS = 6
_MOST_LETTERS = 400


class CandidateRows:
    """The decisions about one graph. `opened` is the graph with all regions inlined."""

    def __init__(
        self, opened: GraphModule, ledger: Ledger, templates: Templates, placed: Mapping[str, int]
    ) -> None:
        self.ledger, self.templates, self.placed = ledger, templates, placed
        self._local = {local_name(name): template for name, template in placed.items()}
        self.index = Index(opened)
        self.figures = Figures(self.index)
        names = self.index.names
        nodes: dict[str, Node] = {name: self.index.nodes[i] for name, i in names.items()}
        self.near = NearMissDocument(rules_of(ledger), nodes, names)
        self._kinds = {rule.name: rule.kind for rule in rules_of(ledger)}

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each recorded candidate, by round and by the place of its first operation."""
        rows = [(*self._place(a.round, a.nodes), self._accepted(a)) for a in self.ledger.accepted]
        rows += [(*self._place(d.round, d.nodes), self._declined(d)) for d in self.ledger.declined]
        rows.sort(key=lambda row: row[:2])
        return [row for *_, row in rows]

    @property
    def left_out(self) -> int:
        """The number of refusals that the ledger counts without keeping them."""
        kept = sum(not entry.folded for entry in self.ledger.declined)
        return max(0, sum(tally.count for tally in self.ledger.refused) - kept)

    def _place(self, round_: int, nodes: Sequence[str]) -> tuple[int, int]:
        names = self.index.names
        return round_, min((names[name] for name in nodes if name in names), default=len(names))

    def _accepted(self, entry: Accepted) -> dict[str, Any]:
        row = self._row(True, entry.rule, entry.kind, entry.round, entry.region, entry.nodes, entry.size)
        template = self._local.get(local_name(entry.region))
        if template is not None:
            totals = self.templates.totals[template]
            row["before"] = [totals.bytes_before, totals.launches_before]
            saved = entry.bytes_saved - entry.bytes_recomputed
            row["after"] = [totals.bytes_before - saved, totals.launches_before - entry.launches_saved]
        return row

    def _declined(self, entry: Declined) -> dict[str, Any]:
        kind = entry.kind or self._kinds.get(entry.rule, "")
        row = self._row(False, entry.rule, kind, entry.round, entry.reason, entry.nodes, entry.size)
        if entry.wanted:
            row["matched"], row["wanted"] = entry.matched, entry.wanted
        if entry.place is not None:
            row["place"] = entry.place
        if entry.folded:
            row["folded"] = True
        number = self.near.number(entry)
        if number is not None:
            row["near"] = number
        row |= self._would_cost(entry)
        return row

    @staticmethod
    def _row(
        accepted: bool, rule: str, kind: str, round_: int, reason: str, nodes: Sequence[str], size: int
    ) -> dict[str, Any]:
        return {
            "ok": accepted,
            "rule": rule,
            "kind": kind,
            "round": round_,
            "reason": reason[:_MOST_LETTERS],
            "nodes": list(nodes[:_MOST_NAMES]),
            "size": max(size, len(nodes)),
        }

    def _would_cost(self, entry: Declined) -> dict[str, Any]:
        """Return the estimate for a region of a refused candidate, if all its operations are known."""
        names = self.index.names
        members = {names[name] for name in entry.nodes if name in names}
        members = {i for i in members if self.index.nodes[i].op not in ("placeholder", "get_attr", "output")}
        if not members or len(entry.nodes) < entry.size or len(members) < len(entry.nodes):
            return {}
        members |= {
            self.index.position[u] for i in members for u in self.index.nodes[i].users if is_projection(u)
        }
        outputs = [
            i
            for i in sorted(members)
            if any(self.index.position[u] not in members for u in self.index.nodes[i].users)
        ]
        identity = make_identity("candidate", 1, None)
        draft = RegionDraft(identity, "candidate", members, {}, "output", outputs=outputs)
        model = Traffic()
        apart, together = model.apart(self.figures, draft), model.together(self.figures, draft)
        return {"before": [apart.bytes, apart.launches], "after": [together.bytes, together.launches]}

    def apart(self, gm: GraphModule) -> list[dict[str, Any]]:
        """Return why neighbors are not in one region: one pair of each two equal places, up to a bound."""
        owner = _outermost_regions(gm)
        pairs: dict[tuple[int, int], tuple[str, str]] = {}
        for i, reads in enumerate(self.index.data):
            reader = self.index.nodes[i]
            for j in reads:
                read = self.index.nodes[j]
                if is_projection(read):
                    read = read.all_input_nodes[0]
                template = self.placed.get(read.name), self.placed.get(reader.name)
                if template[0] is None or template[1] is None or (template[0], template[1]) in pairs:
                    continue
                inside = owner.get(read.name)
                free = self.figures.free(self.index.position[read]) or self.figures.free(i)
                if not free and (inside is None or inside != owner.get(reader.name)):
                    pairs[template[0], template[1]] = (read.name, reader.name)
            if len(pairs) >= _MOST_PAIRS:
                break
        if not pairs:
            return []
        record = record_of(self.ledger)
        context = make_context(gm, record)
        places = operation_locations(context)
        rows: list[dict[str, Any]] = []
        for first, second in pairs.values():
            if first in places and second in places:
                reasons = why_not_together(context, places[first], places[second], record)[:_MOST_REASONS]
                rows.append({"a": first, "b": second, "reasons": [r[:_MOST_LETTERS] for r in reasons]})
        return rows


def _outermost_regions(gm: GraphModule) -> dict[str, str]:
    """Return the outermost region of each operation that is in one, by name."""
    return {name: region.name for region in regions(gm) for name in region.nodes}
