"""The entries of a ledger: regions, refusals, what backends did and what was measured, and how they are read from JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, did_you_mean
from dovetail.ir.module_paths import frames_of
from dovetail.ir.text_tables import quoted
from dovetail.outlining.region import call_of, walk
from dovetail.rules.by_module import matches_target
from dovetail.rules.rule import Rule


@dataclass(frozen=True)
class Accepted:
    """A region that was outlined, its rule and round, and what it saves.

    `nodes` are the names of its operations, the first of them if there are many; `size` is their number.
    """

    region: str
    kind: str
    rule: str
    round: int
    nodes: tuple[str, ...]
    size: int
    bytes_saved: int
    launches_saved: int
    bytes_recomputed: int = 0


@dataclass(frozen=True)
class Declined:
    """Operations that did not become a region and why; a near-miss of a pattern has the number of matched operations.

    `kind` is what the region would have been. One that is `folded` adds no information: it is part of a region, or a
    near-miss whose operations are all in regions, or of a kind of which another near-miss there matched more.
    """

    rule: str
    nodes: tuple[str, ...]
    reason: str
    place: str | None = None
    matched: int = 0
    wanted: int = 0
    round: int = 1
    size: int = 0
    folded: bool = False
    kind: str = ""

    def __str__(self) -> str:
        return refusal_text(self)


@dataclass(frozen=True)
class Saved:
    """The sum of what all regions of one kind and rule save."""

    rule: str
    kind: str
    regions: int = 0
    bytes_saved: int = 0
    launches_saved: int = 0
    bytes_recomputed: int = 0

    def plus(self, other: Saved | None) -> Saved:
        """Return the sum of both."""
        if other is None:
            return self
        return replace(
            self,
            regions=self.regions + other.regions,
            bytes_saved=self.bytes_saved + other.bytes_saved,
            launches_saved=self.launches_saved + other.launches_saved,
            bytes_recomputed=self.bytes_recomputed + other.bytes_recomputed,
        )


@dataclass(frozen=True)
class Tally:
    """How often a rule was declined for one reason, names and numbers left out."""

    rule: str
    reason: str
    count: int = 0


@dataclass(frozen=True)
class Lowered:
    """What a backend did with the body of a region: `outcome` is "compiled", "disk", or the step that failed.

    "untried" marks code that is used without a check on sample operands, with the reason. `calls` is the number of
    regions of the graph with this body.
    """

    region: str
    backend: str
    outcome: str
    calls: int = 1
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Measured:
    """What a plan measured of a decision: the time of what it chose and of the runner-up, in seconds.

    `scope` is what was decided about: "graph", "block" or "body". A time that was not measured is None.
    """

    scope: str
    label: str
    choice: str
    seconds: float | None = None
    runner_up: str = ""
    runner_up_seconds: float | None = None


@dataclass(frozen=True)
class EntryScope:
    """What a ledger knows to select its entries by: the graphs, and names of rules and kinds."""

    graphs: tuple[GraphModule, ...] = ()
    rules: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()

    def names_within(self, module: str) -> set[str]:
        """Return the names of operations that come from a module, given by path, glob or class."""
        if not self.graphs:
            raise InvalidArgument(
                "this ledger has no graph to look up modules in; use that of `explain(gm)`."
            )
        within: set[str] = set()
        matches: dict[tuple[str, str], bool] = {}
        for graph in self.graphs:
            for name, meta in operation_metas(graph):
                for frame in frames_of(meta):
                    module_call = (frame.path, frame.owner)
                    if module_call not in matches:
                        matches[module_call] = matches_target(module, frame)
                    if matches[module_call]:
                        within.add(name)
        if not any(matches.values()):
            known = {path for path, _ in matches if path} | {owner.rpartition(".")[2] for _, owner in matches}
            otherwise = (
                f"There are {quoted(sorted(known), 4)}; `*` is one part of a path, `**` any number."
                if known
                else "The graph does not record which modules its operations came from."
            )
            advice = did_you_mean(module, sorted(known), otherwise=otherwise)
            raise InvalidArgument(f"no module matches {module!r}. {advice}".rstrip())
        return within


def operation_metas(gm: GraphModule) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Yield name and meta of every operation of a graph, those inside regions included."""
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        yield node.name, node.meta
        call = call_of(node.meta)
        if call is not None:
            yield from ((member.name, member.meta) for member in walk(call))


class DeclinedEntries(tuple[Declined, ...]):
    """The refusals of a ledger, printed one per line. A call selects some: `ledger.declined(rule="swiglu")`."""

    scope: EntryScope

    def __new__(cls, entries: Iterable[Declined] = (), scope: EntryScope | None = None) -> DeclinedEntries:
        new = super().__new__(cls, entries)
        new.scope = scope or EntryScope()
        return new

    def __call__(
        self, *, rule: str | Rule | None = None, module: str | None = None, kind: str | None = None
    ) -> DeclinedEntries:
        """Return the refusals of a rule, of operations in a module, of a kind of region, or of all of these.

        A module is given by path, by a glob such as "layers.*.mlp", or by class. A name that does not exist is an error.
        """
        chosen: Iterable[Declined] = self
        if rule is not None:
            name = rule.name if isinstance(rule, Rule) else rule
            _require("rule", name, self.scope.rules | {entry.rule for entry in self})
            chosen = [entry for entry in chosen if entry.rule == name]
        if kind is not None:
            _require("kind", kind, self.scope.kinds | {entry.kind for entry in self})
            chosen = [entry for entry in chosen if entry.kind == kind]
        if module is not None:
            if not isinstance(module, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidArgument(f"module {module!r} is not a path.")
            within = self.scope.names_within(module)
            chosen = [entry for entry in chosen if not within.isdisjoint((*entry.nodes, entry.place))]
        return DeclinedEntries(chosen, self.scope)

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "nothing was declined"

    def __reduce__(self) -> tuple[Any, ...]:
        return (DeclinedEntries, (tuple(self),))


def _require(what: str, name: object, known: Iterable[str]) -> None:
    names = sorted(name for name in known if name)
    if not isinstance(name, str) or name not in names:
        otherwise = f"There are {quoted(names, 8)}." if names else ""
        raise InvalidArgument(
            f"no {what} {name!r}. {did_you_mean(str(name), names, otherwise=otherwise)}".rstrip()
        )


def matched_text(matched: int, wanted: int) -> str:
    """Return how many operations of a pattern matched, in words."""
    if matched >= wanted:
        return f"all {wanted} operations matched" if wanted > 1 else "its one operation matched"
    return f"{matched} of {wanted} operations matched"


def refusal_text(entry: Declined) -> str:
    """Return a refusal as one line."""
    near = f" ({entry.matched} of {entry.wanted} matched)" if entry.wanted else ""
    return f"rule '{entry.rule}' on {quoted(entry.nodes)}: {entry.reason}{near}"


_FIELD_TYPES: Mapping[str, Any] = {
    "str": str,
    "int": int,
    "bool": bool,
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "str | None": (str, type(None)),
    "tuple[str, ...]": tuple,
}


def read_entry(cls: type[Any], row: Mapping[str, Any]) -> Any:
    """Return an entry, its fields checked against their declared types."""
    entry = cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})
    for declared in fields(cls):
        value = getattr(entry, declared.name)
        names: Any = value if isinstance(value, tuple) else ()
        if not isinstance(value, _FIELD_TYPES[str(declared.type)]) or not all(
            isinstance(n, str) for n in names
        ):
            raise TypeError(f"{declared.name} of {cls.__name__} is a {type(value).__name__}")
    return entry


def read_texts(rows: Any) -> tuple[str, ...]:
    if not all(isinstance(row, str) for row in rows):
        raise TypeError("a rule or a diagnostic that is not a text")
    return tuple(rows)


def read_never(rows: Any) -> dict[str, str]:
    never = dict(rows)
    if not all(isinstance(text, str) for row in never.items() for text in row):
        raise TypeError("an excluded operation has no reason")
    return never
