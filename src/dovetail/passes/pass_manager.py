"""Passes and pipelines: steps from graph to graph, run in order, checked, traced and dumped."""

from __future__ import annotations

import dataclasses
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, InvalidGraph, PassError, checked_init
from dovetail.ir.graph_module import pause_gc, require_graph
from dovetail.ir.op_traits import qualified_name
from dovetail.ir.printer import text
from dovetail.ir.verifier import check as check_graph
from dovetail.outlining.region import call_of
from dovetail.passes.graph_equality import Snapshot, same_graph


@dataclass(frozen=True)
class Finding:
    """What a pass does at one place in a graph, or the reason why it leaves it unchanged.

    `nodes` are the names of the operations concerned. `reason` is empty if the pass changes them.
    """

    nodes: tuple[str, ...]
    what: str
    reason: str = ""

    @property
    def taken(self) -> bool:
        """Whether the pass changes this place."""
        return not self.reason

    def __str__(self) -> str:
        return f"{', '.join(self.nodes)}: {self.what if self.taken else f'left alone: {self.reason}'}"


@dataclass(frozen=True)
class Pass(ABC):
    """A step from graph to graph, as a value: its fields are its options, so it prints and compares by them.

    Write one as a frozen dataclass with a `run`. A pass never edits its input graph; it may return that graph itself
    if there is nothing to do. Calling a pass checks both.
    """

    @property
    def name(self) -> str:
        """The name in records and errors."""
        return type(self).__name__

    @abstractmethod
    def run(self, gm: GraphModule) -> GraphModule:
        """Return the new graph; `gm` is not changed. Called through `__call__`."""

    def explain(self, gm: GraphModule) -> tuple[Finding, ...]:
        """Return what the pass would change in `gm` and what it would leave unchanged, with reasons; empty by default."""
        return ()

    def __call__(self, gm: GraphModule) -> GraphModule:
        return apply(self, gm)[0]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(_options(self))})"


def apply(step: Pass, gm: GraphModule) -> tuple[GraphModule, float]:
    """Run one pass; return its graph and the seconds it took. Raise PassError if it breaks the contract of `Pass`."""
    require_graph(gm)
    with pause_gc():
        before = Snapshot(gm)
    start = time.perf_counter()
    new: object = step.run(gm)
    seconds = time.perf_counter() - start
    if not isinstance(new, GraphModule):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PassError(
            step.name, f"returned {type(new).__name__} instead of a GraphModule; let `run` return one"
        )
    with pause_gc():
        edited = before.edited()
    if edited is not None:
        raise PassError(
            step.name,
            f"edited the graph it was given ({edited}); work on a copy, as `copy.copy` of a captured graph makes it",
        )
    return new, seconds


def require_fuel(fuel: object) -> None:
    """Raise InvalidArgument unless `fuel` is None or a number of changes, 0 or more."""
    if fuel is not None and (not isinstance(fuel, int) or isinstance(fuel, bool) or fuel < 0):
        raise InvalidArgument(f"fuel {fuel!r}: give None for no limit, or the number of changes, 0 and more.")


def _options(step: Pass) -> list[str]:
    """Return the fields that differ from their defaults, as keyword arguments."""
    return [
        f"{field.name}={shown(value)}"
        for field in sorted(dataclasses.fields(step), key=lambda field: field.kw_only is True)
        if field.repr and not _is_default(field, value := getattr(step, field.name))
    ]


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default is not dataclasses.MISSING:
        return value is field.default or (type(value) is type(field.default) and value == field.default)
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return False


def shown(value: object) -> str:
    """Return an option as text; functions by name, without their address."""
    if isinstance(value, (tuple, list)):
        items = [shown(v) for v in cast("list[object]", value)]
        if isinstance(value, list):
            return f"[{', '.join(items)}]"
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    shown_value = repr(value)
    is_function = " at 0x" in shown_value and isinstance(value, Callable)
    return qualified_name(value) if is_function else shown_value


@dataclass(frozen=True)
class Step:
    """The record of one pass that ran. `place` is its place in the pipeline, counted from 1, with its rounds."""

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
    """The result of a pipeline and the record of its steps. `str()` is a table with a row for each pass."""

    graph: GraphModule = field(repr=False)
    steps: tuple[Step, ...]

    @property
    def changed(self) -> bool:
        """Whether any pass changed anything."""
        return any(step.changed for step in self.steps)

    @property
    def seconds(self) -> float:
        """The time of all passes, without checks and dumps."""
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


# After so many rounds without a fixed point, the passes are assumed to undo each other.
_MOST_ROUNDS = 100

# The names of the files that `dump` writes.
_DUMP_FILE = re.compile(r"\d{3,}_[\w-]+\.txt")


@dataclass(frozen=True)
class Place:
    """The place of a pass: its number, those of the pipelines around it, and the rounds it is in."""

    numbers: tuple[int, ...] = ()
    rounds: tuple[int, ...] = ()

    def at(self, number: int) -> Place:
        return replace(self, numbers=(*self.numbers, number))

    def in_round(self, number: int) -> Place:
        return replace(self, rounds=(*self.rounds, number))

    def __str__(self) -> str:
        numbers = ".".join(map(str, self.numbers))
        return f"{numbers} round {'.'.join(map(str, self.rounds))}" if self.rounds else numbers


Leaf = Callable[[Pass, GraphModule, Place], GraphModule]


class Watcher:
    """Callbacks for every pass that runs; the base class does nothing."""

    def started(self, step: Pass, place: Place) -> None:
        """Called before a pass runs."""

    def finished(self, step: Pass, row: Step, before: GraphModule, after: GraphModule) -> None:
        """Called after a pass has run."""


@dataclass(frozen=True)
class Composite(Pass):
    """A pass composed of passes, each of which is recorded by itself."""

    @abstractmethod
    def walk(self, gm: GraphModule, leaf: Leaf, place: Place) -> GraphModule:
        """Run the parts in order through `leaf`."""

    def run(self, gm: GraphModule) -> GraphModule:
        """Return the graph after all of its passes."""
        return trace(self, gm).graph

    def __call__(
        self, gm: GraphModule, *, check: bool = False, dump: str | Path | None = None
    ) -> GraphModule:
        return trace(self, gm, check=check, dump=dump).graph

    def trace(
        self,
        gm: GraphModule,
        *,
        check: bool = False,
        dump: str | Path | None = None,
        explain: bool = False,
    ) -> Run:
        """Run it and record each pass: time, nodes and regions before and after, and whether it changed anything.

        With `check` the graph is checked first and after every pass. With `dump` the text of each step is written to
        a folder, numbered, replacing the files of an earlier run. With `explain` the findings of each pass are
        recorded, too.
        """
        return trace(self, gm, check=check, dump=dump, explain=explain)


@checked_init()
@dataclass(frozen=True, repr=False, init=False)
class Pipeline(Composite):
    """Passes one after the other; itself a pass, so pipelines nest.

    Pipelines are equal if their passes are; `passes` is a tuple, from which another pipeline can be built.
    """

    passes: tuple[Pass, ...] = ()

    def __init__(self, passes: Iterable[Pass] = ()) -> None:
        object.__setattr__(self, "passes", as_passes(passes, "Pipeline"))

    def walk(self, gm: GraphModule, leaf: Leaf, place: Place) -> GraphModule:
        """Run the passes in order through `leaf`."""
        return _in_order(self.passes, gm, leaf, place)

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    def __repr__(self) -> str:
        return f"Pipeline([{', '.join(map(repr, self.passes))}])"


@checked_init()
@dataclass(frozen=True, repr=False, init=False)
class Repeat(Composite):
    """Passes repeated until a round does not change the graph.

    `most` limits the rounds; without it, a graph that still changes after a hundred rounds raises a PassError. With
    `until_unchanged=False` there are exactly `most` rounds.
    """

    passes: tuple[Pass, ...] = ()
    until_unchanged: bool = True
    most: int | None = None

    def __init__(
        self, *passes: Pass | Iterable[Pass], until_unchanged: bool = True, most: int | None = None
    ) -> None:
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"Repeat: most={most!r}: give the number of rounds, 1 and more, or None.")
        if not until_unchanged and most is None:
            raise InvalidArgument("Repeat: until_unchanged=False needs `most`, the number of rounds.")
        flat: list[Any] = []
        for item in passes:
            is_group = isinstance(item, Iterable) and not isinstance(item, (str, Pass))
            flat += cast("Iterable[Pass]", item) if is_group else [item]
        object.__setattr__(self, "passes", as_passes(flat, "Repeat"))
        object.__setattr__(self, "until_unchanged", until_unchanged)
        object.__setattr__(self, "most", most)

    def walk(self, gm: GraphModule, leaf: Leaf, place: Place) -> GraphModule:
        """Run rounds of the passes through `leaf`."""
        for number in range(1, (self.most or _MOST_ROUNDS) + 1):
            before = gm
            gm = _in_order(self.passes, gm, leaf, place.in_round(number))
            if self.until_unchanged and same_graph(before, gm):
                return gm
        if self.most is None:
            raise PassError(
                self.name,
                f"still changes the graph after {_MOST_ROUNDS} rounds; its passes undo each other, or give `most`",
            )
        return gm

    def __repr__(self) -> str:
        options = [] if self.until_unchanged else ["until_unchanged=False"]
        options += [] if self.most is None else [f"most={self.most}"]
        return f"Repeat({', '.join([*map(repr, self.passes), *options])})"


def as_passes(passes: Iterable[Pass], owner: str) -> tuple[Pass, ...]:
    """Return the passes as a tuple; raise InvalidArgument naming the first item that is not a pass."""
    if isinstance(passes, Pass) or not isinstance(passes, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"{owner} takes a list of passes, got {type(passes).__name__}.")
    steps = tuple(passes)
    for i, step in enumerate(steps):
        if not isinstance(step, Pass):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(
                f"{owner}: number {i + 1} is {step!r}, which is not a Pass; `Cleanup()` makes one, `Cleanup` is a class."
            )
    return steps


def _in_order(passes: tuple[Pass, ...], gm: GraphModule, leaf: Leaf, place: Place) -> GraphModule:
    for i, step in enumerate(passes):
        at = place.at(i + 1)
        gm = step.walk(gm, leaf, at) if isinstance(step, Composite) else leaf(step, gm, at)
    return gm


def trace(
    pipeline: Composite,
    gm: GraphModule,
    *,
    check: bool = False,
    dump: str | Path | None = None,
    explain: bool = False,
    watcher: Watcher | None = None,
) -> Run:
    """Run a pipeline and record each pass; the watcher is called with every step and the graph before and after it."""
    require_graph(gm)
    runner = _Runner(check, _as_folder(dump), explain, watcher or Watcher())
    runner.begin(gm)
    graph = pipeline.walk(gm, runner, Place())
    return Run(graph, tuple(runner.steps))


class _Runner:
    """Runs leaves one by one, checks and records them."""

    def __init__(self, check: bool, dump: Path | None, explain: bool, watcher: Watcher) -> None:
        self.check, self.dump, self.explain, self.watcher = check, dump, explain, watcher
        self.steps: list[Step] = []

    def begin(self, gm: GraphModule) -> None:
        if self.check:
            check_graph(gm)
        if self.dump is not None:
            self._write("input", gm)

    def __call__(self, step: Pass, gm: GraphModule, place: Place) -> GraphModule:
        self.watcher.started(step, place)
        try:
            findings = step.explain(gm) if self.explain else ()
            new, seconds = apply(step, gm)
            if self.check:
                _check_after(step, new)
        except Exception as error:
            error.add_note(f"in pass {place} of the pipeline: {step!r}")
            raise
        row = Step(
            number=len(self.steps) + 1,
            place=str(place),
            name=step.name,
            options=repr(step),
            seconds=seconds,
            nodes=(len(gm.graph.nodes), len(new.graph.nodes)),
            regions=(_regions(gm), _regions(new)),
            changed=not same_graph(gm, new),
            findings=findings,
        )
        self.steps.append(row)
        if self.dump is not None:
            self._write(step.name, new)
        self.watcher.finished(step, row, gm, new)
        return new

    def _write(self, name: str, gm: GraphModule) -> None:
        stem = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
        (cast("Path", self.dump) / f"{len(self.steps):03}_{stem}.txt").write_text(text(gm))


def _as_folder(dump: object) -> Path | None:
    """Return the folder to write to, created if necessary, without the files of an earlier run."""
    if dump is None:
        return None
    if not isinstance(dump, (str, Path)):
        raise InvalidArgument(f"dump is a {type(dump).__name__}; give the path of a folder.")
    folder = Path(dump)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            if _DUMP_FILE.fullmatch(old.name) and old.is_file() and old.read_bytes().startswith(b"graph:"):
                old.unlink()
    except OSError as error:
        raise InvalidArgument(f"dump: '{folder}' cannot be a folder to write to: {error}.") from error
    return folder


def _check_after(step: Pass, gm: GraphModule) -> None:
    try:
        check_graph(gm)
    except InvalidGraph as error:
        words = str(error).removesuffix(".")
        raise PassError(step.name, f"left a graph that does not hold together: {words}") from error


def _regions(gm: GraphModule) -> int:
    return sum(call_of(node.meta) is not None for node in gm.graph.nodes)
