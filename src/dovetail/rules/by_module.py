"""The `modules` rule: a region for every call of a module, selected by path or class from `nn_module_stack`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dovetail.errors import RuleError, checked_call, nearest
from dovetail.ir.module_paths import ModuleFrame, class_name, make_frame, matches_path, module_stack
from dovetail.ir.nodes import is_projection
from dovetail.outlining.region import make_identity
from dovetail.rules.rule import Candidate, Proposal, Refusal, Rule, RuleContext, require_int, require_policy

_MAX_SHOWN = 5


@checked_call()
def modules(
    what: str | type[nn.Module] | Iterable[str | type[nn.Module]],
    *,
    kind: str,
    name: str | None = None,
    priority: int = 0,
    nests: bool = False,
    min_size: int = 1,
    version: int = 1,
    attrs: Mapping[str, Any] | None = None,
    escapes: str = "output",
) -> Rule:
    """Propose the operations of each call of each matching module, from `nn_module_stack`.

    A path is compared part by part; `*` matches one part and `**` any number of parts. A class is given itself or by
    its name, qualified or not; its subclasses do not match. Of nested matches the outermost is proposed; with `nests`,
    the inner ones become regions first and the outer ones take them in round by round.
    """
    label = name if name is not None else kind
    if not isinstance(what, (str, type, Iterable)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RuleError(label, f"{what!r} is neither a path nor a class of modules")
    items = [what] if isinstance(what, (str, type)) else list(what)
    if not items:
        raise RuleError(label, "neither a path nor a class was given")
    targets: list[str] = []
    for item in items:
        if not isinstance(item, (str, type)) or item == "":  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuleError(label, f"{item!r} is neither a path nor a class of modules")
        targets.append(class_name(item))
    make_identity(kind, version, attrs)
    require_int(label, "priority", priority)
    require_int(label, "min_size", min_size, least=1)
    require_policy(label, escapes)
    return Modules(label, kind, tuple(targets), priority, nests, min_size, version, attrs, escapes)


@dataclass(frozen=True)
class Modules(Rule):
    """The rule that `modules` returns."""

    name: str
    kind: str
    targets: tuple[str, ...]
    priority: int = 0
    nests: bool = False
    min_size: int = 1
    version: int = 1
    attrs: Mapping[str, Any] | None = None
    escapes: str = "output"

    def propose(self, context: RuleContext) -> Iterator[Proposal]:
        module_calls = _ModuleCalls(self, context)
        missing = [t for t in self.targets if t not in module_calls.matched]
        if missing:
            yield Refusal(self.name, (), module_calls.why_unmatched(missing))
        for call in module_calls.calls.values():
            if not call.is_candidate(self.min_size):
                continue
            excluded = next((i for i in call.members if i in context.barred), None)
            if excluded is not None:
                why = f"'{context.nodes[excluded].name}' of it may not be taken ({context.barred[excluded]})"
                yield Refusal(self.name, tuple(call.members), f"module {call.frame.path}: {why}", excluded)
                continue
            yield Candidate(
                self.name,
                self.kind,
                tuple(call.members),
                self.attrs,
                self.version,
                self.escapes,
                # Nested calls come first; where one is not a legal region, the module around it is proposed.
                self.priority - call.height,
            )

    def why_not(self, context: RuleContext, first: int, second: int) -> list[str]:
        matched = [self._matched_keys(context, i) for i in (first, second)]
        for i, keys in zip((first, second), matched, strict=True):
            if not keys:
                return [f"'{context.nodes[i].name}' is in no module that matches {', '.join(self.targets)}"]
        if not matched[0].keys() & matched[1].keys():
            paths = [next(iter(keys.values())).path for keys in matched]
            return [f"they are in two calls of modules: {paths[0]} and {paths[1]}"]
        return []

    def _matched_keys(self, context: RuleContext, position: int) -> dict[str, ModuleFrame]:
        frames = [make_frame(k, v) for k, v in module_stack(context.nodes[position].meta).items()]
        return {f.key: f for f in frames if any(matches_target(target, f) for target in self.targets)}


def matches_target(target: str, frame: ModuleFrame) -> bool:
    """Whether a call is of a module that a class name or a path pattern selects."""
    return target in (frame.owner, frame.class_name) or bool(frame.path and matches_path(target, frame.path))


@dataclass
class _ModuleCall:
    """A call of a matching module: its operations, and how many levels of pending calls are nested in it."""

    frame: ModuleFrame
    members: list[int] = field(default_factory=list[int])
    height: int = 0
    done: bool = False
    fresh: int = 0
    regions: int = 0

    def is_candidate(self, min_size: int) -> bool:
        if self.done or self.fresh + self.regions < min_size:
            return False
        return self.fresh > 0 or self.regions > 1


class _ModuleCalls:
    """Every matching call in a graph, in the order of first appearance."""

    def __init__(self, rule: Modules, context: RuleContext) -> None:
        self.rule, self.context = rule, context
        self.calls: dict[str, _ModuleCall] = {}
        self.matched: set[str] = set()
        self.frames: dict[str, ModuleFrame] = {}
        self._matches: dict[str, bool] = {}
        self._collect()

    def _collect(self) -> None:
        context, rule = self.context, self.rule
        stacks: list[tuple[int, list[str]]] = []
        for i, node in enumerate(context.nodes):
            if node.op in ("placeholder", "get_attr", "output") or is_projection(node):
                continue
            keys = [k for k, entry in module_stack(node.meta).items() if self._is_match(k, entry)]
            if not keys:
                continue
            keys = keys if rule.nests else keys[:1]
            stacks.append((i, keys))
            for key in keys:
                self.calls.setdefault(key, _ModuleCall(self.frames[key]))
            if context.kind_of(i) == rule.kind:
                self.calls[keys[-1]].done = True
        for i, keys in stacks:
            self._add(i, keys)

    def _add(self, position: int, keys: list[str]) -> None:
        context = self.context
        node = context.nodes[position]
        members = [position, *(context.index.position[user] for user in node.users if is_projection(user))]
        is_region = context.kind_of(position) == self.rule.kind
        left_over, below = False, 0
        for key in reversed(keys):
            call = self.calls[key]
            call.members.extend(members)
            call.height = max(call.height, below)
            left_over = left_over or (call.done and not is_region)
            if is_region:
                call.regions += 1
            elif not left_over:
                call.fresh += 1
            below += not call.done

    def _is_match(self, key: str, entry: Any) -> bool:
        if key not in self._matches:
            frame = self.frames[key] = make_frame(key, entry)
            targets = [target for target in self.rule.targets if matches_target(target, frame)]
            self.matched.update(targets)
            self._matches[key] = bool(targets)
        return self._matches[key]

    def why_unmatched(self, missing: list[str]) -> str:
        """Return the reason why some targets match no module, with similar paths and classes."""
        what = " or ".join(f"'{target}'" for target in missing)
        if not self.frames:
            return (
                f"no module matches {what}: the graph does not record which modules its operations came from"
            )
        paths = {re.sub(r"(?<![^.])\d+(?![^.])", "*", f.path) for f in self.frames.values() if f.path}
        known = sorted(paths | {f.class_name for f in self.frames.values()})
        near: dict[str, None] = {}
        for target in missing:
            last = target.rpartition(".")[2]
            near.update(dict.fromkeys(nearest(target, known, most=_MAX_SHOWN)))
            near.update(dict.fromkeys(p for p in known if p.rpartition(".")[2] == last))
        shown = sorted(near)[:_MAX_SHOWN] or known[:_MAX_SHOWN]
        return f"no module matches {what}; {'near it are' if near else 'there are'} {', '.join(shown)}"
