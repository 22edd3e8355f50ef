"""A region for every call of a module, told by its path or its class."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import nn
from torch.fx import Node

from dovetail.errors import RuleError, checked_call, nearest
from dovetail.ir.nodes import is_projection
from dovetail.outlining.region_call import make_identity
from dovetail.outlining.request import POLICIES
from dovetail.rules.rule import Candidate, Proposal, Refusal, Rule, RuleContext

_GETATTR = re.compile(r"getattr\(([^(),]+), ['\"]([^'\"]+)['\"]\)")
_ROOT = re.compile(r"^[LG]\[[^\]]*\]")
_CELL = re.compile(r"^.*\.cell_contents")
_ITEM = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")
_REPEATED = re.compile(r"@\d+$")


@dataclass(frozen=True, slots=True)
class Frame:
    """One call of a module: `key` tells calls apart, `path` and `owner` say which module of which class."""

    key: str
    path: str
    owner: str

    @property
    def bare(self) -> str:
        """The name of the class without its module."""
        return self.owner.rpartition(".")[2]


def stack_of(node: Node) -> Mapping[str, Any]:
    """The raw stack of an operation, outermost call first; empty where the tracer left none."""
    return cast("Mapping[str, Any]", node.meta.get("nn_module_stack") or {})


def frame(key: str, entry: Any) -> Frame:
    """An entry of a stack in one form: captured, exported, Dynamo's and symbolically traced graphs differ."""
    path, owner = cast("tuple[Any, Any]", entry)[:2] if isinstance(entry, (tuple, list)) else ("", entry)
    return Frame(str(key), plain_path(str(path)), class_name(owner))


def class_name(owner: Any) -> str:
    """The qualified name of a class, which exporters write as text."""
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else str(owner)


@functools.lru_cache(maxsize=65536)
def plain_path(text: str) -> str:
    """A module's path as `named_modules` spells it: `layers.0.mlp`.

    Dynamo writes the expression that reached it: `L['self'].layers.0`, `getattr(L['self'].layers, '0')`.
    """
    while (shorter := _GETATTR.sub(r"\1.\2", text)) != text:
        text = shorter
    text = _CELL.sub("", _ROOT.sub("", text))
    text = _ITEM.sub(r".\1", text)
    parts = [_REPEATED.sub("", part) for part in text.split(".")]
    return ".".join(part for part in parts if part and part != "_modules")


_LISTED = 5


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

    A path is compared part by part, `*` standing for one and `**` for any number of parts. A class is given
    itself or by its bare or qualified name; its subclasses do not count. Of nested matches the outermost is
    proposed; with `nests`, the inner ones become regions first and the outer ones take them in round by round.
    """
    label = name if name is not None else kind
    if not isinstance(what, (str, type, Iterable)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RuleError(label, f"{what!r} is neither a path nor a class of modules")
    given = [what] if isinstance(what, (str, type)) else list(what)
    if not given:
        raise RuleError(label, "no path and no class was given")
    targets: list[str] = []
    for item in given:
        if not isinstance(item, (str, type)) or item == "":  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RuleError(label, f"{item!r} is neither a path nor a class of modules")
        targets.append(class_name(item))
    make_identity(kind, version, attrs)
    if not isinstance(priority, int) or isinstance(priority, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RuleError(label, f"priority {priority!r} is not an int")
    if not isinstance(min_size, int) or isinstance(min_size, bool) or min_size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RuleError(label, f"min_size {min_size!r} is not a positive int")
    if escapes not in POLICIES:
        raise RuleError(label, f"escapes {escapes!r} is none of {', '.join(POLICIES)}")
    return Modules(label, kind, tuple(targets), priority, nests, min_size, version, attrs, escapes)


@dataclass(frozen=True)
class Modules(Rule):
    """What `modules` makes."""

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
        look = _Look(self, context)
        missing = [t for t in self.targets if t not in look.matched]
        if missing:
            yield Refusal(self.name, (), look.nothing(missing))
        for call in look.calls.values():
            if not call.wanted(self.min_size):
                continue
            barred = next((i for i in call.members if i in context.barred), None)
            if barred is not None:
                taken = f"'{context.nodes[barred].name}' of it may not be taken ({context.barred[barred]})"
                yield Refusal(self.name, tuple(call.members), f"module {call.frame.path}: {taken}", barred)
                continue
            yield Candidate(
                self.name,
                self.kind,
                tuple(call.members),
                self.attrs,
                self.version,
                self.escapes,
                # What is nested comes first; where it is no legal region the module around it stands in.
                self.priority - call.height,
            )

    def why_not(self, context: RuleContext, first: int, second: int) -> list[str]:
        found = [self._matched_keys(context, i) for i in (first, second)]
        for i, keys in zip((first, second), found, strict=True):
            if not keys:
                return [f"'{context.nodes[i].name}' is in no module that matches {', '.join(self.targets)}"]
        if not found[0].keys() & found[1].keys():
            paths = [next(iter(keys.values())).path for keys in found]
            return [f"they are in two calls of modules: {paths[0]} and {paths[1]}"]
        return []

    def _matched_keys(self, context: RuleContext, position: int) -> dict[str, Frame]:
        frames = [frame(k, v) for k, v in stack_of(context.nodes[position]).items()]
        return {f.key: f for f in frames if any(fits(target, f) for target in self.targets)}


def fits(target: str, at: Frame) -> bool:
    """Whether a call is one of the modules that a class name or a path pattern names."""
    return target in (at.owner, at.bare) or bool(at.path and matches_path(target, at.path))


def matches_path(pattern: str, path: str) -> bool:
    """Whether a dotted path fits a pattern of parts, in which `**` is any number of parts."""
    parts = path.split(".")
    # The numbers of parts of the path that the pattern so far can stand for.
    reached = {0}
    for piece in pattern.split("."):
        if piece == "**":
            reached = set(range(min(reached), len(parts) + 1))
        else:
            reached = {n + 1 for n in reached if n < len(parts) and fnmatchcase(parts[n], piece)}
        if not reached:
            return False
    return len(parts) in reached


@dataclass
class _ModuleCall:
    """A call of a matching module: what came from it, and how many pending calls are nested in it."""

    frame: Frame
    members: list[int] = field(default_factory=list[int])
    height: int = 0
    done: bool = False
    fresh: int = 0
    regions: int = 0

    def wanted(self, min_size: int) -> bool:
        if self.done or self.fresh + self.regions < min_size:
            return False
        return self.fresh > 0 or self.regions > 1


class _Look:
    """Every matching call in a context, in the order of first appearance."""

    def __init__(self, rule: Modules, context: RuleContext) -> None:
        self.rule, self.context = rule, context
        self.calls: dict[str, _ModuleCall] = {}
        self.matched: set[str] = set()
        self.frames: dict[str, Frame] = {}
        self._wanted: dict[str, bool] = {}
        self._collect()

    def _collect(self) -> None:
        context, rule = self.context, self.rule
        ways: list[tuple[int, list[str]]] = []
        for i, node in enumerate(context.nodes):
            if node.op in ("placeholder", "get_attr", "output") or is_projection(node):
                continue
            keys = [k for k, entry in stack_of(node).items() if self._is_wanted(k, entry)]
            if not keys:
                continue
            keys = keys if rule.nests else keys[:1]
            ways.append((i, keys))
            for key in keys:
                self.calls.setdefault(key, _ModuleCall(self.frames[key]))
            if context.kind_of(i) == rule.kind:
                self.calls[keys[-1]].done = True
        for i, keys in ways:
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

    def _is_wanted(self, key: str, entry: Any) -> bool:
        if key not in self._wanted:
            at = self.frames[key] = frame(key, entry)
            found = [target for target in self.rule.targets if fits(target, at)]
            self.matched.update(found)
            self._wanted[key] = bool(found)
        return self._wanted[key]

    def nothing(self, missing: list[str]) -> str:
        """Why some targets matched nothing, and what there is that comes near."""
        what = " or ".join(f"'{target}'" for target in missing)
        if not self.frames:
            return f"no module matches {what}: the graph does not say which modules its operations came from"
        paths = {re.sub(r"(?<![^.])\d+(?![^.])", "*", f.path) for f in self.frames.values() if f.path}
        known = sorted(paths | {f.bare for f in self.frames.values()})
        near: dict[str, None] = {}
        for target in missing:
            last = target.rpartition(".")[2]
            near.update(dict.fromkeys(nearest(target, known, most=_LISTED)))
            near.update(dict.fromkeys(p for p in known if p.rpartition(".")[2] == last))
        listed = sorted(near)[:_LISTED] or known[:_LISTED]
        there = "near it are" if near else "there are"
        return f"no module matches {what}; {there} {', '.join(listed)}"
