"""Finders: searches of one graph by rule, node, module or region, which a history can store."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, TypeAlias, cast

from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

from dovetail.errors import DovetailError, InvalidArgument, UnknownPart, nearest
from dovetail.ir.module_paths import ModuleFrame, class_name, frames_of, is_within, matches_path
from dovetail.ir.nodes import is_projection
from dovetail.ir.text_tables import quoted
from dovetail.outlining.outline import Request
from dovetail.outlining.region import Region, call_of
from dovetail.rules.patterns.match_state import Match, Value
from dovetail.rules.patterns.pattern_rule import PatternRule
from dovetail.rules.rule import Candidate, Refusal, Rule, RuleContext, RuleSet


@dataclass(frozen=True, eq=False)
class PartMatch(Match):
    """A match in a part of a schedule; `path` is the part, `module_path` the module within the model.

    It stays valid until a step changes its operations.
    """

    path: str = ""
    root: str = ""
    form: int = 0
    kind: str = ""
    finder: Finder | None = field(default=None, repr=False)
    request: Request | None = field(default=None, repr=False)
    together: tuple[PartMatch, ...] = field(default=(), repr=False)
    origin: object = field(default=None, repr=False)

    @property
    def names(self) -> frozenset[str]:
        """The names of its operations."""
        return frozenset(node.name for node in self.nodes)

    def __repr__(self) -> str:
        where = self.module_path or self.path or "the model"
        operations = ", ".join(node.name for node in self.nodes)
        return f"Match({self.rule} in {where}: {operations})"


class Matches(list[PartMatch]):
    """Disjoint matches in execution order; `why` gives the nearest misses of an empty list."""

    def __init__(self, matches: list[PartMatch], why: str = "") -> None:
        super().__init__(matches)
        self.why = why

    def __repr__(self) -> str:
        return super().__repr__() if self or not self.why else f"[]  # {self.why}"


@dataclass(frozen=True, eq=False)
class PartRegion(Region):
    """A region of a part of a schedule."""

    path: str = ""
    root: str = ""
    form: int = 0
    origin: object = field(default=None, repr=False)


def select_disjoint(matches: list[PartMatch], position: dict[Node, int]) -> list[PartMatch]:
    """Return disjoint matches by where they end; of two that overlap the larger, else the first."""
    covered: set[Node] = set()
    selected: list[PartMatch] = []
    for match in sorted(matches, key=lambda m: (-len(m.nodes), _span(m, position))):
        if covered.isdisjoint(match.nodes):
            covered.update(match.nodes)
            selected.append(match)
    return sorted(selected, key=lambda m: _span(m, position))


def _span(match: PartMatch, position: dict[Node, int]) -> tuple[int, int]:
    places = [position[node] for node in match.nodes]
    return max(places), min(places)


def nearest_refusals(refusals: list[Any]) -> str:
    """Return the reasons of the refusals of a rule that matched most."""
    if not refusals:
        return "nothing came near"
    best = sorted(refusals, key=lambda r: -(r.matched / r.wanted if r.wanted else 0.5))[:3]
    reasons = [
        f"{r.reason} ({r.matched} of {r.wanted} operations matched)" if r.wanted else r.reason for r in best
    ]
    return "; ".join(dict.fromkeys(reasons))


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_MAX_SUGGESTIONS = 5


def match_paths(model: nn.Module, pattern: str) -> tuple[str, ...]:
    """Return the paths that a glob matches, in the order of `named_modules`; raise UnknownPart without any.

    `*` stands for one part of a path or a piece of it, `**` for any number of parts, `""` for the model itself.
    """
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    if pattern == "":
        return ("",)
    matched = tuple(path for path in paths if path and matches_path(pattern, path))
    if not matched:
        raise UnknownPart(pattern, _suggestions(pattern, paths))
    return matched


def require_path(model: nn.Module, path: str) -> None:
    """Raise UnknownPart if a model has no module at a path."""
    try:
        model.get_submodule(path)
    except AttributeError:
        paths = [name for name, _ in model.named_modules(remove_duplicate=False)]
        raise UnknownPart(path, _suggestions(path, paths)) from None


def _suggestions(pattern: str, paths: list[str]) -> list[str]:
    """Return similar paths, those of numbered layers as one."""
    folded = sorted({_NUMBER.sub("*", path) for path in paths if path})
    generic = _NUMBER.sub("*", pattern)
    last = pattern.rpartition(".")[2]
    near = dict.fromkeys(nearest(generic, folded, most=_MAX_SUGGESTIONS))
    near.update(dict.fromkeys(path for path in folded if path.rpartition(".")[2] == last))
    return list(near)[:_MAX_SUGGESTIONS] or folded[:_MAX_SUGGESTIONS]


def join_path(*parts: str) -> str:
    """Join paths with dots; empty ones are left out."""
    return ".".join(part for part in parts if part)


def enclosing_paths(path: str) -> list[str]:
    """Return a path and the paths of all modules around it, the model last."""
    paths = [path] if path else []
    while "." in path:
        path = path.rpartition(".")[0]
        paths.append(path)
    return [*paths, ""]


def outermost_paths(paths: Iterable[str]) -> list[str]:
    """Return paths without those within others of them, each once."""
    unique = dict.fromkeys(paths)
    return [
        path
        for path in unique
        if not any(outer in unique for outer in enclosing_paths(path) if outer != path)
    ]


def relative_path(path: str, outer: str) -> str:
    """Return a path relative to one it is within."""
    return path if outer == "" else path[len(outer) + 1 :]


def common_prefix(paths: list[list[str]]) -> list[str]:
    """Return the items that all lists begin with."""
    alike = takewhile(lambda items: len(set(items)) == 1, zip(*paths, strict=False))
    return [items[0] for items in alike]


_NON_WORD = re.compile(r"\W+")


class Finder(ABC):
    """A search of a graph; `kind` is the default kind of a region outlined from a match."""

    name: str
    kind: str

    @abstractmethod
    def search(self, context: RuleContext) -> tuple[list[PartMatch], list[Refusal]]:
        """Return every match in a graph, and the near misses."""

    @abstractmethod
    def serialized(self) -> dict[str, Any]:
        """Return the finder as an entry of a history, with callables among the values."""

    @property
    def identity(self) -> Any:
        """A key that is equal only for finders with the same matches."""
        return (type(self), *self.serialized().values())

    def scoped_to(self, scope: str) -> Finder:
        """Return the finder for the part at `scope` of a graph, to which its paths are relative."""
        return self

    def find(self, context: RuleContext, scope: str) -> tuple[list[PartMatch], str]:
        """Return disjoint matches within the module at `scope` in execution order, or else the nearest misses."""
        cache = context.analysis(_search_cache)
        finder = self.scoped_to(scope)
        if finder.identity not in cache:
            cache[finder.identity] = finder.search(context)
        matches, refusals = cache[finder.identity]
        inside = [m for m in matches if all(is_from(n, scope) for n in m.nodes if not is_projection(n))]
        if inside:
            return select_disjoint(inside, context.index.position), ""
        near = [
            r for r in refusals if not r.members or any(is_from(context.nodes[i], scope) for i in r.members)
        ]
        return [], nearest_refusals(near)


def _search_cache(context: RuleContext) -> dict[Any, tuple[list[PartMatch], list[Refusal]]]:
    return {}


def is_from(node: Node, scope: str) -> bool:
    """Return whether an operation came from the module at `scope`."""
    return scope == "" or any(is_within(f.path, scope) for f in frames_of(node.meta))


@dataclass(frozen=True, eq=False)
class ByRule(Finder):
    """The proposals of rules."""

    rules: tuple[Rule, ...]

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return ", ".join(rule.name for rule in self.rules)

    @property
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.rules[0], "kind", None) or _NON_WORD.sub("_", self.rules[0].name)

    def serialized(self) -> dict[str, Any]:
        return {"rule": self.rules[0]} if len(self.rules) == 1 else {"rules": list(self.rules)}

    @property
    def identity(self) -> Any:
        return (ByRule, *(_rule_identity(rule) for rule in self.rules))

    def search(self, context: RuleContext) -> tuple[list[PartMatch], list[Refusal]]:
        matches: list[PartMatch] = []
        refusals: list[Refusal] = []
        for rule in self.rules:
            for proposal in rule.propose(context):
                if isinstance(proposal, Refusal):
                    refusals.append(proposal)
                else:
                    matches.append(self._match(context, proposal))
        return matches, refusals

    def _match(self, context: RuleContext, candidate: Candidate) -> PartMatch:
        nodes = context.nodes
        operands = {
            name: Value(nodes[i], context.value(i), context.gm)
            for name, i in (candidate.arguments or {}).items()
        }
        members = tuple(nodes[i] for i in sorted(candidate.members))
        results = tuple(None if i is None else nodes[i] for i in candidate.results)
        outputs = tuple(n for n in results if n is not None and not set(n.users) <= set(members))
        outputs = outputs or _outputs(members)
        escapes = candidate.escapes
        request = Request(
            members,
            candidate.kind,
            candidate.version,
            candidate.attrs,
            escapes if isinstance(escapes, str) else {nodes[i]: p for i, p in escapes.items()},
            rule=candidate.rule,
            arguments={name: value.node for name, value in operands.items()},
            results=results,
        )
        match = replace(_make_match(self, context, members, outputs, request), rule=candidate.rule)
        literals = dict(candidate.attrs or {})
        return replace(match, operands=operands or match.operands, literals=literals, kind=candidate.kind)


def _rule_identity(rule: Rule) -> Any:
    """Return the identity of a rule, which patterns of the same function share."""
    if isinstance(rule, PatternRule):
        return (PatternRule, rule.function, rule.guards, rule.through, rule.kind)
    return (id(rule), rule)


def _make_match(
    finder: Finder,
    context: RuleContext,
    members: tuple[Node, ...],
    outputs: tuple[Node, ...],
    request: Request,
) -> PartMatch:
    inside = set(members)
    reads = dict.fromkeys(n for m in members for n in m.all_input_nodes if n not in inside)
    at = context.index.position
    operands = {n.name: Value(n, context.value(at[n]), context.gm) for n in reads}
    return PartMatch(
        rule=finder.name,
        operands=operands,
        literals={},
        nodes=members,
        outputs=outputs,
        module_path=_common_path(members),
        kind=request.kind,
        finder=finder,
        request=request,
    )


def _outputs(members: tuple[Node, ...]) -> tuple[Node, ...]:
    inside = set(members)
    return tuple(n for n in members if any(user not in inside for user in n.users))


def _common_path(members: tuple[Node, ...]) -> str:
    """Return the path of the innermost module that all operations came from."""
    stacks = [[f.path for f in frames_of(n.meta)] for n in members if not is_projection(n)]
    return (common_prefix(stacks) or [""])[-1]


@dataclass(frozen=True, eq=False)
class ByNode(Finder):
    """Single operations that a predicate accepts, or that call an operator."""

    what: Callable[[Node], Any] | OpOverload | OpOverloadPacket

    @cached_property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.what, "__name__", str(self.what))

    @property
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        packet = self.what.overloadpacket if isinstance(self.what, OpOverload) else self.what
        return _NON_WORD.sub("_", getattr(packet, "__name__", self.name)).strip("_") or "part"

    def serialized(self) -> dict[str, Any]:
        is_operator = isinstance(self.what, (OpOverload, OpOverloadPacket))
        return {"operator": str(self.what)} if is_operator else {"predicate": self.what}

    def search(self, context: RuleContext) -> tuple[list[PartMatch], list[Refusal]]:
        matches: list[PartMatch] = []
        for node in context.nodes:
            if (
                node.op in ("placeholder", "get_attr", "output")
                or is_projection(node)
                or not self._accepts(node)
            ):
                continue
            members = (node, *(user for user in node.users if is_projection(user)))
            matches.append(
                _make_match(self, context, members, _outputs(members) or (node,), Request(members, self.kind))
            )
        names = sorted(
            {str(n.target) for n in context.nodes if n.op == "call_function" and not is_projection(n)}
        )
        reason = f"no operation is accepted by {self.name}; there are {quoted(names, 8)}"
        return matches, [] if matches else [Refusal(self.name, (), reason)]

    def _accepts(self, node: Node) -> bool:
        if isinstance(self.what, OpOverload):
            return node.target == self.what
        if isinstance(self.what, OpOverloadPacket):
            return getattr(node.target, "overloadpacket", None) == self.what
        try:
            return bool(self.what(node))
        except DovetailError:
            raise
        except Exception as error:
            raise InvalidArgument(
                f"the predicate {self.name} raised {type(error).__name__}: {error}."
            ) from error


@dataclass(frozen=True, eq=False)
class ByModule(Finder):
    """The operations of each call of a module of a class, or at a path that a regular expression matches.

    Paths are those from the module at `scope`, whatever larger part the graph is of.
    """

    what: type[nn.Module] | re.Pattern[str]
    scope: str = ""

    def scoped_to(self, scope: str) -> Finder:
        return self if isinstance(self.what, type) or scope == self.scope else replace(self, scope=scope)

    @property
    def identity(self) -> Any:
        return (ByModule, self.what, self.scope)

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.what.__name__ if isinstance(self.what, type) else self.what.pattern

    @property
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return _NON_WORD.sub("_", self.name).strip("_") if isinstance(self.what, type) else "part"

    def serialized(self) -> dict[str, Any]:
        return {"module": self.what} if isinstance(self.what, type) else {"path": self.what.pattern}

    def search(self, context: RuleContext) -> tuple[list[PartMatch], list[Refusal]]:
        calls: dict[str, list[Node]] = {}
        frames: dict[str, ModuleFrame] = {}
        for node in context.nodes:
            if node.op in ("placeholder", "get_attr", "output") or is_projection(node):
                continue
            for at in frames_of(node.meta):
                if self._fits(at):
                    frames[at.key] = at
                    calls.setdefault(at.key, []).append(node)
                    break
        matches = [self._match(context, frames[key], nodes) for key, nodes in calls.items()]
        return matches, [] if matches else [Refusal(self.name, (), self._nothing(context))]

    def _fits(self, at: ModuleFrame) -> bool:
        if isinstance(self.what, type):
            return at.owner == class_name(self.what)
        if at.path == self.scope or not is_within(at.path, self.scope):
            return False
        return self.what.search(relative_path(at.path, self.scope)) is not None

    def _match(self, context: RuleContext, at: ModuleFrame, nodes: list[Node]) -> PartMatch:
        members = tuple(m for n in nodes for m in (n, *(u for u in n.users if is_projection(u))))
        outputs = _outputs(members)
        request = Request(members, self.kind, escapes="output")
        return replace(_make_match(self, context, members, outputs, request), module_path=at.path)

    def _nothing(self, context: RuleContext) -> str:
        classes = {
            f.class_name: relative_path(f.path, self.scope)
            for n in context.nodes
            for f in frames_of(n.meta)
            if is_within(f.path, self.scope)
        }
        names = sorted(classes) if isinstance(self.what, type) else sorted(set(classes.values()) - {""})
        what = "of class" if isinstance(self.what, type) else "at a path with"
        return f"no operation came from a module {what} {self.name}; there are {quoted(names, 8) or 'none'}"


@dataclass(frozen=True, eq=False)
class ByRegion(Finder):
    """The regions of a kind."""

    kind: str  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"regions of kind {self.kind}"

    def serialized(self) -> dict[str, Any]:
        return {"region": self.kind}

    def search(self, context: RuleContext) -> tuple[list[PartMatch], list[Refusal]]:
        matches: list[PartMatch] = []
        kinds: set[str] = set()
        for node in context.nodes:
            call = call_of(node.meta)
            if call is None:
                continue
            kinds.add(call.identity.kind)
            if call.identity.kind == self.kind:
                members = (node, *(u for u in node.users if is_projection(u)))
                request = Request(members, self.kind)
                match = _make_match(self, context, members, members[1:], request)
                operands = {name: cast("Node", node.args[number]) for name, number in call.arguments}
                named = {
                    name: Value(n, context.value(context.index.position[n]), context.gm)
                    for name, n in operands.items()
                }
                matches.append(replace(match, operands=named or match.operands))
        reason = f"no region is of kind '{self.kind}'; there are {', '.join(sorted(kinds)) or 'none'}"
        return matches, [] if matches else [Refusal(self.name, (), reason)]


Findable: TypeAlias = (
    Finder
    | Rule
    | RuleSet
    | OpOverload[..., Any]
    | OpOverloadPacket[..., Any]
    | type[nn.Module]
    | str
    | re.Pattern[str]
    | Callable[..., Any]
)
"""What `find` takes: a pattern or rule, a module class, a regular expression on paths, a predicate or an operator."""


def finder_of(what: Any) -> Finder:
    """Return the finder for an argument of `find`."""
    if isinstance(what, Finder):
        return what
    if isinstance(what, Rule):
        return ByRule((what,))
    if isinstance(what, RuleSet) and len(what):
        return ByRule(what.rules)
    if isinstance(what, (OpOverload, OpOverloadPacket)):
        return ByNode(what)
    if isinstance(what, type) and issubclass(what, nn.Module):
        return ByModule(what)
    if isinstance(what, (str, re.Pattern)):
        return ByModule(_compile_regex(what))
    if isinstance(what, nn.Module):
        raise InvalidArgument(
            f"find takes a class of modules or a path, not a {type(what).__name__} itself: find({type(what).__name__})."
        )
    if callable(what):
        return (
            ByNode(what) if _is_predicate(what) else ByRule((PatternRule(what, kind=_function_kind(what)),))
        )
    raise InvalidArgument(
        f"find takes a pattern function or rule, a module class, a regular expression on module paths, a predicate "
        f"on nodes or an operator, not {what!r}."
    )


def _compile_regex(text: Any) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise InvalidArgument(f"{text!r} is not a regular expression on module paths: {error}.") from error


def _is_predicate(function: Callable[..., Any]) -> bool:
    """Return whether a function takes one node: its argument is called `node`, or annotated as one."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"find cannot read the signature of {getattr(function, '__name__', repr(function))}; write a function that calls "
            f"it, or give the operator of torch.ops."
        ) from None
    if len(parameters) != 1:
        return False
    only = parameters[0]
    return only.name == "node" or only.annotation in (Node, "Node", "fx.Node", "torch.fx.Node")


def _function_kind(function: Callable[..., Any]) -> str:
    kind = _NON_WORD.sub("_", getattr(function, "__name__", "pattern")).strip("_")
    return kind if kind and not kind[0].isdigit() else "pattern"
