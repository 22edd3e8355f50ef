"""What is recorded of a pipeline's run: a row for each pass."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import GraphModule

from dovetail.passes.base import Finding


@dataclass(frozen=True)
class Step:
    """One pass as it ran. `place` is where it stands in the pipeline, counted from 1, with the rounds it is in."""

    number: int
    place: str
    name: str
    options: str
    seconds: float
    nodes: tuple[int, int]
    regions: tuple[int, int]
    changed: bool
    findings: tuple[Finding, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return "  ".join(_row(self)).rstrip()


@dataclass(frozen=True, eq=False)
class Run:
    """What came of a pipeline, and how. `str()` is a table with a row for each pass."""

    graph: GraphModule = field(repr=False)
    steps: tuple[Step, ...]

    @property
    def changed(self) -> bool:
        """Whether any pass changed anything."""
        return any(step.changed for step in self.steps)

    @property
    def seconds(self) -> float:
        """What the passes took together, checks and dumps aside."""
        return sum(step.seconds for step in self.steps)

    def __str__(self) -> str:
        head = ("place", "pass", "nodes", "regions", "time")
        rows = [head, *(_row(step) for step in self.steps)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(r, widths, strict=True)) for r in rows]
        return "\n".join(line.rstrip() for line in lines)


def _row(step: Step) -> tuple[str, str, str, str, str]:
    note = "" if step.changed else ", unchanged"
    return (
        step.place,
        step.options,
        _from_to(step.nodes),
        _from_to(step.regions),
        f"{step.seconds * 1e3:.1f} ms{note}",
    )


def _from_to(counts: tuple[int, int]) -> str:
    before, after = counts
    return str(before) if before == after else f"{before} -> {after}"
