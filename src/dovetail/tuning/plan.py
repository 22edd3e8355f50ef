"""`Plan`: the result of a search as a file that is committed, reviewed and applied without measuring.

Decisions are keyed by structural hashes: those for a whole graph by the graph's, boundaries by that of the block before
it is fused, backends by that of the body. So a plan of one model also serves another one with the same blocks. Each
decision is stored by the scope it was measured in, a mode and an environment; merged plans have the scopes of both.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, cast, get_args

from torch import nn
from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, InvalidFile, checked_call, did_you_mean
from dovetail.formats.atomic_write import atomic_replace, resolve_target
from dovetail.ir.html_repr import html_box, html_text
from dovetail.passes.pass_manager import Pass
from dovetail.runtime.presets import Mode, PlannedGraph
from dovetail.tuning.decisions import (
    BlockDecision,
    BodyDecision,
    Decision,
    GraphDecision,
    Malformed,
    decode,
    encode,
    short,
)
from dovetail.tuning.environment import Environment

FORMAT = "dovetail-plan"
VERSION = 1
SINGULAR = {"graphs": "graph", "blocks": "block", "bodies": "body"}
"""The sections of a plan, each with the word for what has a decision in it."""
AnyDecision = TypeVar("AnyDecision", bound=Decision)


@dataclass(frozen=True)
class Scope:
    """Where a decision was measured: in which mode, and by its key in which environment."""

    mode: Mode
    environment: str

    def __str__(self) -> str:
        return f"{self.mode}@{self.environment}"


@dataclass(frozen=True)
class Applicable(Generic[AnyDecision]):
    """A decision of a plan that holds here, and how the environment it was measured in differs from this one."""

    decision: AnyDecision
    differences: tuple[str, ...] = ()


ByScope = Mapping[str, Mapping[Scope, AnyDecision]]
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, repr=False)
class Plan:
    """Decisions by measurement: how graphs run, which regions their blocks have, which backend runs each body.

    `sizes` are the ranges of a size that calls are captured in, by a description of their inputs and a digest of the
    model (`model_pattern`), or the former alone for any model. Bodies are keyed by the body's hash and a digest of the operands (`body_entry`), or by the hash alone for operands of any kind.
    """

    environments: Mapping[str, Environment] = field(default_factory=dict[str, Environment])
    graphs: ByScope[GraphDecision] = field(default_factory=dict[str, dict[Scope, GraphDecision]])
    blocks: ByScope[BlockDecision] = field(default_factory=dict[str, dict[Scope, BlockDecision]])
    bodies: ByScope[BodyDecision] = field(default_factory=dict[str, dict[Scope, BodyDecision]])
    sizes: Mapping[str, Mapping[Scope, Ranges]] = field(default_factory=dict[str, dict[Scope, Ranges]])
    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __post_init__(self) -> None:
        for name, decisions in (*self._sections(), ("sizes", self.sizes)):
            for key, by_scope in decisions.items():
                for scope in by_scope:
                    if scope.environment not in self.environments:
                        raise InvalidArgument(
                            f"{name}: the decision for {short(key)} was measured in the environment "
                            f"'{scope.environment}', which the plan does not describe."
                        )

    def lookup(
        self, decisions: ByScope[AnyDecision], key: str, mode: Mode, environment: Environment
    ) -> Applicable[AnyDecision] | None:
        """Return the decision for a key that holds in an environment: measured in it, or else on the same device.

        Times of another device say nothing about this one, so that its decisions are not used.
        """
        by_scope = decisions.get(key, {})
        scope = self._nearest_scope(by_scope, mode, environment)
        if scope is None:
            return None
        return Applicable(by_scope[scope], environment.differences(self.environments[scope.environment]))

    def _nearest_scope(self, scopes: Iterable[Scope], mode: Mode, environment: Environment) -> Scope | None:
        """Return the scope of a mode and device whose environment differs least from one; None without any."""

        def distance(scope: Scope) -> tuple[int, str]:
            return len(environment.differences(self.environments[scope.environment])), scope.environment

        devices = {key: measured.device for key, measured in self.environments.items()}
        same = [s for s in scopes if s.mode == mode and devices[s.environment] == environment.device]
        return min(same, key=distance, default=None)

    def planned(
        self, gm: GraphModule, *, mode: Mode, backends: Any, passes: Pass, strict: bool
    ) -> PlannedGraph:
        """Return the decisions for a captured graph, for `dovetail.compile`, which calls this with its defaults.

        What the plan does not know follows the default `passes` and `backends`. With `strict`, a decision that does
        not apply raises PlanMismatch.
        """
        from dovetail.tuning.apply_plan import planned_graph

        return planned_graph(self, gm, mode, backends, passes, strict)

    def dynamic_shapes(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the `dynamic_shapes` that a call is captured with, if its size is in a range of the plan; else None."""
        if not self.sizes:
            return None
        from dovetail.tuning.apply_plan import environment_of_call
        from dovetail.tuning.size_ranges import dynamic_shapes_for, patterns_for

        model = getattr(forward, "__self__", None)
        mode: Mode = "training" if getattr(model, "training", False) else "inference"
        environment = environment_of_call(model, args, kwargs)
        sizes = {
            pattern: by_scope[scope]
            for pattern, by_scope in self.sizes.items()
            if (scope := self._nearest_scope(by_scope, mode, environment)) is not None
        }
        return dynamic_shapes_for(patterns_for(sizes, model), forward, args, kwargs)

    @property
    def has_size_ranges(self) -> bool:
        """Whether calls are captured in ranges of sizes."""
        return bool(self.sizes)

    @checked_call()
    def check(
        self,
        model: nn.Module,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        environment: bool = True,
    ) -> None:
        """Raise PlanMismatch unless every part of a model, called like this, has a decision of the plan that applies.

        The model is captured as `dovetail.compile` does, in its present mode; nothing is compiled. A plan for
        inference is checked for calls without gradients, as it was measured. The error lists what changed: graphs,
        blocks and bodies that the plan does not know, regions and backends that are refused, and how the environment
        differs from that of the measurements. With `environment=False`, for machines that others measured for, only
        the structure is checked, against the decisions of each environment that the plan has for this graph.
        """
        from dovetail.tuning.check_plan import check_plan

        check_plan(self, model, args, kwargs, environment)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, replacing it in one step."""
        _require_path(path)
        with atomic_replace(resolve_target(path)) as file:
            file.write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return the plan in a file; raise InvalidFile if it is not one, not whole, or of a newer version."""
        _require_path(path)
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise InvalidFile(os.fspath(path), f"cannot be read as a plan: {reason}.") from error
        try:
            return cls._decoded(text)
        except Malformed as error:
            raise InvalidFile(os.fspath(path), str(error)) from error

    def to_json(self) -> str:
        """Return the plan as JSON: keys in order, one decision after the other, the same for equal plans."""
        sections: dict[str, Any] = {
            name: {
                key: {str(scope): encode(by_scope[scope]) for scope in sorted(by_scope, key=str)}
                for key, by_scope in sorted(decisions.items())
            }
            for name, decisions in self._sections()
        }
        environments = {key: self.environments[key].to_json() for key in sorted(self.environments)}
        if self.sizes:
            sections["sizes"] = {
                key: {str(s): [list(r) for r in by_scope[s]] for s in sorted(by_scope, key=str)}
                for key, by_scope in sorted(self.sizes.items())
            }
        whole = {"format": FORMAT, "version": VERSION, "environments": environments, **sections}
        return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the plan that `to_json` wrote; raise InvalidArgument with the place of what is wrong."""
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"a {type(text).__name__} is not the text of a plan.")
        try:
            return cls._decoded(text)
        except Malformed as error:
            raise InvalidArgument(f"the text {error}") from error

    @classmethod
    def _decoded(cls, text: str) -> Self:
        """Return the plan in a text. Messages of Malformed follow the name of what the text is from."""
        values = _parsed(text)
        sections = {"graphs": GraphDecision, "blocks": BlockDecision, "bodies": BodyDecision}
        try:
            _require_keys(values, ("format", "version", "environments", *sections, "sizes"))
            environments = _environments(_object(values, "environments"))
            decisions: dict[str, Any] = {
                name: _section(_object(values, name), name, kind, environments)
                for name, kind in sections.items()
            }
            sizes = _sizes(_object(values, "sizes"), environments)
        except Malformed as error:
            raise Malformed(f"is not a valid plan: {error}") from error
        return cls(environments, **decisions, sizes=sizes)

    def __or__(self, other: Plan) -> Plan:
        """Return the decisions of both; where both have one for the same key and scope, that of `other`.

        Of ranges of sizes that overlap in a scope, those of `other` are used.
        """
        if not isinstance(other, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        merged: dict[str, Any] = {}
        for (name, mine), (_, theirs) in zip(self._sections(), other._sections(), strict=True):
            merged[name] = {key: {**mine.get(key, {}), **theirs.get(key, {})} for key in {**mine, **theirs}}
        sizes = {
            key: _merged_ranges(self.sizes.get(key, {}), other.sizes.get(key, {}))
            for key in {**self.sizes, **other.sizes}
        }
        return Plan({**self.environments, **other.environments}, **merged, sizes=sizes)

    def diff(self, other: Plan) -> str:
        """Return what `other` decides differently, a line for each decision; empty if nothing."""
        if not isinstance(other, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"a plan differs from another plan, not from a {type(other).__name__}.")
        lines: list[str] = []
        environments = _named_environments({**self.environments, **other.environments})
        for (name, mine), (_, theirs) in zip(self._sections(), other._sections(), strict=True):
            for key in sorted({**mine, **theirs}):
                for scope in sorted({**mine.get(key, {}), **theirs.get(key, {})}, key=str):
                    before, after = mine.get(key, {}).get(scope), theirs.get(key, {}).get(scope)
                    line = _difference(before, after)
                    if line:
                        at = f"{scope.mode}{environments[scope.environment]}"
                        lines.append(f"{SINGULAR[name]} {key[:12]} {at}: {line}")
        for key in sorted({**self.sizes, **other.sizes}):
            mine, theirs = self.sizes.get(key, {}), other.sizes.get(key, {})
            for scope in sorted({**mine, **theirs}, key=str):
                before, after = (_format_ranges(ranges.get(scope, ())) for ranges in (mine, theirs))
                if before != after:
                    at = f"{scope.mode}{environments[scope.environment]}"
                    lines.append(f"sizes of {key} {at}: {before or 'none'} -> {after or 'none'}")
        return "\n".join(lines)

    def explain(self) -> str:
        """Return the decisions as text: what was chosen, how long it takes, what came second, what was rejected."""
        lines: list[str] = []
        environments = _named_environments(self.environments)
        for key, environment in sorted(self.environments.items()):
            lines.append(f"measured on {environment.device}, torch {environment.torch} ({key})")
        for key, by_scope in sorted(self.sizes.items()):
            for scope, ranges in sorted(by_scope.items(), key=lambda item: str(item[0])):
                at = f"{scope.mode}{environments[scope.environment]}"
                lines.append(f"sizes of {key} ({at}): {_format_ranges(ranges)}")
        for name, decisions in self._sections():
            for key, by_scope in sorted(decisions.items(), key=lambda item: _label(item[1])):
                for scope, decision in sorted(by_scope.items(), key=lambda item: str(item[0])):
                    at = f"{scope.mode}{environments[scope.environment]}"
                    lines += _explained(SINGULAR[name], key, at, decision)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return html_box(repr(self), html_text(self.explain()))

    def __repr__(self) -> str:
        counts = [(SINGULAR[name], name, len(decisions)) for name, decisions in self._sections()]
        counts.append(("environment", "environments", len(self.environments)))
        return f"Plan({', '.join(f'{n} {one if n == 1 else many}' for one, many, n in counts)})"

    def _sections(self) -> Iterator[tuple[str, ByScope[Any]]]:
        yield "graphs", self.graphs
        yield "blocks", self.blocks
        yield "bodies", self.bodies

    def with_decisions(
        self,
        mode: Mode,
        environment: Environment,
        *,
        sizes: Mapping[str, Ranges] | None = None,
        **decisions: Mapping[str, Decision],
    ) -> Plan:
        """Return the plan with further `graphs`, `blocks`, `bodies` and `sizes`, measured in one mode and environment."""
        unknown = sorted(set(decisions) - {name for name, _ in self._sections()})
        if unknown:
            raise InvalidArgument(f"a plan has no {unknown[0]!r}; give graphs, blocks or bodies.")
        if mode not in get_args(Mode):
            raise InvalidArgument(f"mode {mode!r}; give 'inference' or 'training'.")
        scope = Scope(mode, environment.key)
        added: dict[str, Any] = {
            name: {key: {scope: decision} for key, decision in by_key.items()}
            for name, by_key in decisions.items()
        }
        added["sizes"] = {pattern: {scope: ranges} for pattern, ranges in (sizes or {}).items()}
        return self | replace(Plan({environment.key: environment}), **added)


def _require_path(path: Any) -> None:
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidArgument(f"path {path!r} is neither a str nor a Path.")


def _parsed(text: str) -> dict[str, Any]:
    """Return the values of a plan's JSON of a version that can be read."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"is not a plan, or was cut short: it is not JSON ({error}).") from error
    if not isinstance(parsed, dict) or cast("dict[str, Any]", parsed).get("format") != FORMAT:
        raise Malformed(f"is not a plan: its 'format' is not '{FORMAT}'.")
    values = cast("dict[str, Any]", parsed)
    version = values.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise Malformed(f"is not a valid plan: version: {version!r} is not a number of 1 or more.")
    if version > VERSION:
        raise Malformed(
            f"has version {version} of the format, and this dovetail reads up to version {VERSION}. Use a newer "
            f"dovetail, or tune again with this one."
        )
    return values


def _require_keys(values: Mapping[str, Any], known: Collection[str]) -> None:
    unknown = next((key for key in values if key not in known), None)
    if unknown is not None:
        hint = did_you_mean(unknown, known, otherwise=f"There are {', '.join(known)}.")
        raise Malformed(f"it has an unknown section {unknown!r}. {hint}")


def _environments(values: Mapping[str, Any]) -> dict[str, Environment]:
    environments: dict[str, Environment] = {}
    for key, value in values.items():
        try:
            environment = environments[key] = Environment.from_json(value)
        except InvalidArgument as error:
            raise Malformed(f"environments.{key}: {error}") from error
        if environment.key != key:
            raise Malformed(
                f"environments.{key}: the key of what it describes is {environment.key}; it was edited."
            )
    return environments


def _object(values: Mapping[str, Any], name: str, where: str = "") -> dict[str, Any]:
    value = values.get(name, {})
    if not isinstance(value, dict):
        raise Malformed(f"{where}{name}: {short(value)} is not an object.")
    return cast("dict[str, Any]", value)


def _section(
    by_key: Mapping[str, Any], name: str, kind: type[AnyDecision], environments: Mapping[str, Environment]
) -> dict[str, dict[Scope, AnyDecision]]:
    section: dict[str, dict[Scope, AnyDecision]] = {}
    for key in by_key:
        where = f"{name}.{key}"
        by_scope = _object(by_key, key, f"{name}.")
        if not by_scope:
            raise Malformed(f"{where}: it has no decision.")
        section[key] = {
            _scope(scope, environments, where): decode(kind, value, f"{where}.{scope}")
            for scope, value in by_scope.items()
        }
    return section


def _scope(text: str, environments: Mapping[str, Environment], where: str) -> Scope:
    mode, _, environment = text.partition("@")
    if mode not in ("inference", "training"):
        raise Malformed(f"{where}: '{text}' does not begin with 'inference@' or 'training@'.")
    if environment not in environments:
        raise Malformed(f"{where}: the environment '{environment}' is not among `environments`.")
    return Scope(mode, environment)


def _sizes(
    by_pattern: Mapping[str, Any], environments: Mapping[str, Environment]
) -> dict[str, dict[Scope, Ranges]]:
    return {
        pattern: {
            _scope(scope, environments, f"sizes.{pattern}"): _ranges(value, f"sizes.{pattern}.{scope}")
            for scope, value in _object(by_pattern, pattern, "sizes.").items()
        }
        for pattern in by_pattern
    }


def _merged_ranges(mine: Mapping[Scope, Ranges], theirs: Mapping[Scope, Ranges]) -> dict[Scope, Ranges]:
    """Return the ranges of both by scope, without those of `mine` that overlap one of `theirs`."""
    merged = {**mine, **theirs}
    for scope in mine.keys() & theirs.keys():
        kept = [r for r in mine[scope] if all(r[1] < low or high < r[0] for low, high in theirs[scope])]
        merged[scope] = tuple(sorted({*kept, *theirs[scope]}))
    return merged


def _ranges(value: Any, where: str) -> Ranges:
    """Return ranges of a size; raise Malformed unless each is a pair of ints in order."""
    pairs = decode(tuple[tuple[int, ...], ...], value, where)
    for pair in pairs:
        if len(pair) != 2 or not 0 <= pair[0] <= pair[1]:
            raise Malformed(f"{where}: {pair} is not a range.")
    return tuple((pair[0], pair[1]) for pair in pairs)


def _format_ranges(ranges: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"{low} to {high}" if low < high else str(low) for low, high in ranges)


def body_entry(key: str, operands: str) -> str:
    """Return the key of a body's decision for operands of a description."""
    return f"{key}/{hashlib.blake2b(operands.encode(), digest_size=4).hexdigest()}"


def body_key(entry: str) -> str:
    """Return the hash of the body that a decision is for, whatever its operands are."""
    return entry.partition("/")[0]


def _named_environments(environments: Mapping[str, Environment]) -> dict[str, str]:
    """Return what distinguishes environments in a line about one of them, empty if there is only one."""
    if len(environments) < 2:
        return dict.fromkeys(environments, "")
    return {key: f" on {at.device}, torch {at.torch} ({key[:6]})" for key, at in environments.items()}


def _label(by_scope: Mapping[Scope, Decision]) -> str:
    return next(iter(by_scope.values())).label


def _difference(before: Decision | None, after: Decision | None) -> str:
    if before is None and after is not None:
        return f"added: {after.label}: {after.choice}"
    if after is None and before is not None:
        return f"removed: {before.label}: {before.choice}"
    if before is None or after is None or before.without_times() == after.without_times():
        return ""
    was, now = (f"{d.choice}, {d.seconds}" if d.seconds else d.choice for d in (before, after))
    return f"{after.label}: {was} -> {now}"


def _explained(section: str, key: str, at: str, decision: Decision) -> Iterator[str]:
    time = f", {decision.seconds}" if decision.seconds else ""
    yield f"{section} {key[:12]} ({at}) {decision.label}: {decision.choice}{time}"
    if decision.evidence:
        yield f"  {decision.evidence}"
    if decision.runner_up is not None:
        second = decision.runner_up
        yield f"  runner-up: {second.choice}{f', {second.seconds}' if second.seconds else ''}{_why(second.reason)}"
    for alternative in decision.rejected:
        yield f"  rejected: {alternative.choice}{_why(alternative.reason)}"


def _why(reason: str) -> str:
    return f": {reason}" if reason else ""
