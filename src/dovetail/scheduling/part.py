"""Parts of a scheduled model, selected by path, and the steps on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, ScheduleError, UnknownPart, checked_call
from dovetail.lowering.backend_protocol import BackendChain, checked_backends
from dovetail.outlining.region import Region, make_identity
from dovetail.scheduling.decompose import has_formula
from dovetail.scheduling.edits import (
    AnnotateEdit,
    Checkpoint,
    DecomposeEdit,
    Edit,
    FuseEdit,
    LowerEdit,
    require_recomputable,
)
from dovetail.scheduling.finders import (
    ByNode,
    Findable,
    Matches,
    PartMatch,
    PartRegion,
    finder_of,
    join_path,
    match_paths,
)
from dovetail.scheduling.history import backend_entry
from dovetail.scheduling.replace import ReplaceOptions, replace_all, replace_target
from dovetail.scheduling.resolve import (
    Target,
    group_by_graph,
    is_path_target,
    resolve_paths,
    target_entries,
    target_list,
)
from dovetail.scheduling.session import ScheduleSession


def _edit_groups(
    session: ScheduleSession, do: str, items: list[Any], edit: Callable[..., Edit], **details: Any
) -> None:
    """Apply one edit to each graph that the targets of a step are in; `details` are in the history too."""

    def run() -> list[dict[str, Any]]:
        groups = group_by_graph(session, items, do)
        at = target_entries(session, groups)
        for group in groups:
            session.edit(edit(group.root, group.form, group.addresses))
        return at

    session.step(lambda at: {"do": do, "at": at, **details}, run)


def _regions(target: Any, what: str) -> list[Any]:
    items, _ = target_list(target, what)
    wrong = [item for item in items if not isinstance(item, Region)]
    if wrong:
        also = "" if what == "lower" else " or the paths of modules"
        raise InvalidArgument(f"{what} takes regions{also}; fuse {wrong[0]!r} first.")
    return items


def annotate(session: ScheduleSession, target: Any, attrs: Mapping[str, Any]) -> None:
    """Add attributes to regions or notes to modules."""
    make_identity("annotation", 1, attrs)
    if not attrs:
        raise InvalidArgument("annotate needs attributes: annotate(region, tile=64).")
    attributes = dict(attrs)
    if is_path_target(target):
        paths = resolve_paths(session, target)

        def note() -> None:
            notes = {path: {**session.state.notes.get(path, {}), **attributes} for path in paths}
            session.state = replace(session.state, notes={**session.state.notes, **notes})

        session.step(lambda _: {"do": "annotate", "paths": paths, "attrs": attributes}, note)
        return
    edit = partial(AnnotateEdit, attrs=attributes)
    _edit_groups(session, "annotate", _regions(target, "annotate"), edit, attrs=attributes)


class Part:
    """Some modules of a scheduled model, as a list: `part["mlp.*"]` are modules within them, `part[0]` is the first.

    Finding traces them; what is not touched stays the model's own.
    """

    def __init__(self, session: ScheduleSession, paths: tuple[str, ...]) -> None:
        self._session, self.paths = session, paths

    @property
    def modules(self) -> list[nn.Module]:
        """The modules, or what they were replaced by."""
        return [self._session.module_at(path) for path in self.paths]

    @property
    def graph(self) -> GraphModule:
        """The graph of a single part, traced on demand; the first if it has more than one call signature."""
        return self.graphs[0]

    @property
    def graphs(self) -> list[GraphModule]:
        """The graphs of these parts, one for each call signature."""
        return self._session.graphs_of(self.paths)

    @property
    def regions(self) -> list[PartRegion]:
        """The regions so far, in execution order."""
        return self._session.regions_of(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[Part]:
        return (Part(self._session, (path,)) for path in self.paths)

    def __getitem__(self, key: str | int | slice) -> Part:
        if isinstance(key, str):
            return Part(self._session, self._within(key))
        if isinstance(key, slice):
            return Part(self._session, self.paths[key])
        if not isinstance(key, int) or isinstance(key, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"a part is asked for by path or number, not by {key!r}.")
        if not -len(self.paths) <= key < len(self.paths):
            raise IndexError(f"there are {len(self.paths)} parts, and number {key} is asked for")
        return Part(self._session, (self.paths[key],))

    def _within(self, pattern: str) -> tuple[str, ...]:
        """Return the paths that a glob matches within these parts; raise if it matches in none of them."""
        paths: dict[str, None] = {}
        nothing: UnknownPart | None = None
        with self._session.with_replacements() as now:
            for path in self.paths:
                try:
                    inner = match_paths(now.get_submodule(path), pattern)
                except UnknownPart as error:
                    nothing = nothing or error
                else:
                    paths.update(dict.fromkeys(join_path(path, name) for name in inner))
        if nothing is not None and not paths:
            raise nothing
        return tuple(paths)

    def __repr__(self) -> str:
        return f"Part({', '.join(path or 'the model' for path in self.paths)})"

    @checked_call()
    def find(self, what: Findable | None = None, *, where: Callable[[Node], object] | None = None) -> Matches:
        """Return the matches of something in these parts: disjoint, in execution order.

        `what` is a pattern function, a rule or a rule set, a class of modules, a regular expression on module paths, an operator,
        or a predicate on nodes (a function of one argument called `node` or annotated as one; `where` takes any).
        An empty list has the nearest misses as `why`.
        """
        if (what is None) == (where is None):
            raise InvalidArgument("find takes one of a description and `where`.")
        if where is not None and not callable(where):
            raise InvalidArgument(f"where is a predicate on nodes, not a {type(where).__name__}.")
        finder = ByNode(where) if where is not None else finder_of(what)
        return self._session.find(self.paths, finder)

    @checked_call()
    def fuse(
        self,
        matches: Target,
        *,
        kind: str | None = None,
        version: int | None = None,
        attrs: Mapping[str, Any] | None = None,
        escapes: str | Mapping[str, str] | None = None,
        backends: BackendChain = (),
        together: bool = False,
    ) -> Any:
        """Make a region of each match, which computes exactly the same; with `together`, one of all of them.

        `backends` is a backend, by name or as an object, or a list, of which the first that accepts a region runs it; it
        is an error if none does. None is the default backend; without any, the regions are there for a later compiler or
        replacement. One match returns a region, a list of matches a list.
        """
        session, backend = self._session, checked_backends(backends)
        items, is_list = target_list(matches, "fuse")
        wrong = [item for item in items if not isinstance(item, PartMatch)]
        if wrong:
            raise InvalidArgument(f"fuse takes matches that `find` returned, not {wrong[0]!r}.")
        if kind is not None or attrs is not None:
            make_identity(kind or "part", version or 1, attrs)
        options: dict[str, Any] = {"kind": kind, "version": version, "attrs": attrs, "escapes": escapes}
        details = {k: v for k, v in options.items() if v is not None}
        details |= {"backend": backend_entry(backend)} if backend is not None else {}
        details |= {"together": True} if together else {}

        def run() -> tuple[list[PartRegion], list[dict[str, Any]]]:
            groups = group_by_graph(session, items, "fuse")
            if together and len(groups) > 1:
                raise ScheduleError(
                    f"what is fused together must be in one graph; these are in "
                    f"{', '.join(g.root or 'the model' for g in groups)}. Find them from a part that holds all of them"
                )
            at = target_entries(session, groups)
            fused: dict[int, PartRegion] = {}
            for group in groups:
                place = (group.root, group.form)
                names = session.edit(
                    FuseEdit(*place, group.addresses, together=together, backend=backend, **options)
                )
                paths = [address.path for address in group.addresses]
                created = session.regions_named(*place, dict(zip(names, paths, strict=False)))
                fused.update(zip(group.indices, created, strict=False))
            return [fused[i] for i in sorted(fused)], at

        fused, _ = session.step(
            lambda result: {"do": "fuse", "at": result[1], "list": is_list, **details}, run
        )
        return fused if is_list and not together else fused[0]

    @checked_call()
    def replace(
        self,
        new: nn.Module | Callable[..., Any],
        target: Target | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        concrete_args: Mapping[str, Any] | None = None,
        check: bool = False,
        name: str | None = None,
    ) -> None:
        """Call a module or function in place of a match, a region, a list of matches, or the module at a path.

        A list of matches is replaced by one call, whose results are theirs in order. It is called with the operands of
        the pattern, by name where its parameters are called like the pattern's arguments (captured literals too), else
        in the pattern's order; without a pattern, with all operands except weights. `params` maps parameters of `new`
        to operands, which keep their names in the model; `concrete_args` are further arguments. The results must agree
        in number, shapes and dtypes, which is checked on the recorded inputs first; with `check` the values are compared
        too. A new module is trained, moved and saved with the model, as a child of the part it was put into. Without a
        target the parts themselves are replaced.
        """
        options = ReplaceOptions(params, concrete_args, check)
        replace_target(self._session, new, self.paths if target is None else target, options, name)

    @checked_call()
    def replace_all(
        self,
        what: Findable,
        factory: Callable[[Any], Any],
        *,
        params: Mapping[str, Any] | None = None,
        concrete_args: Mapping[str, Any] | None = None,
        check: bool = False,
    ) -> list[str]:
        """Replace every module of a class, or every match, by what `factory` returns for it; return their paths.

        `factory` gets the module, or the match; `what` is a class, matches, or anything that `find` takes. Modules
        inside a new one are left alone. `params` are names of parameters of the module that is replaced, or of operands
        of the match.
        """
        options = ReplaceOptions(params, concrete_args, check)
        return replace_all(self._session, self.paths, what, factory, options)

    def decompose(self, target: Target | None = None) -> None:
        """Decompose regions, matches, or the operations of these modules.

        A region becomes its operations, an operation simpler ones (a linear layer product and bias, attention its
        products).
        """
        session, target = self._session, self.paths if target is None else target
        if is_path_target(target):
            paths = resolve_paths(session, target)
            items: list[Any] = list(session.find(paths, ByNode(has_formula)))
            if not items:
                closed = [name for path in paths for name in session.regions_holding(path)]
                more = f"; decompose its regions first: {', '.join(closed[:4])}" if closed else ""
                named = ", ".join(path or "the model" for path in paths)
                raise ScheduleError(f"no operation of {named} can be decomposed into simpler ones{more}")
        else:
            items, _ = target_list(target, "decompose")
        _edit_groups(session, "decompose", items, DecomposeEdit)

    def annotate(self, target: Target | None = None, **attrs: Any) -> None:
        """Add attributes to regions, or notes to modules."""
        annotate(self._session, self.paths if target is None else target, attrs)

    def checkpoint(self, target: Target | None = None) -> None:
        """Recompute the inner values of regions or modules in backward instead of saving them."""
        session, target = self._session, self.paths if target is None else target
        if not is_path_target(target):
            edit = partial(LowerEdit, backend=Checkpoint())
            _edit_groups(session, "checkpoint", _regions(target, "checkpoint"), edit)
            return
        paths = resolve_paths(session, target)

        def mark() -> None:
            for path in paths:
                if session.state.root_of(path) is not None:
                    raise ScheduleError(f"'{path}' is traced; make a region of it and checkpoint that")
                require_recomputable(path, session.module_at(path), ())
            calls = session.record(paths) if session.example is not None else {}
            for path, called in calls.items():
                require_recomputable(path, session.module_at(path), called)
            session.state = replace(session.state, checkpoints=session.state.checkpoints | set(paths))

        session.step(lambda _: {"do": "checkpoint", "paths": paths}, mark)

    @checked_call()
    def lower(self, target: Target, backends: BackendChain) -> None:
        """Lower regions to a backend, or to the first of a list that accepts them; None is the default."""
        backend = checked_backends(backends)
        if backend is None:
            raise InvalidArgument("no backend was given; `undo` takes a lowering back.")
        edit, items = partial(LowerEdit, backend=backend), _regions(target, "lower")
        _edit_groups(self._session, "lower", items, edit, backend=backend_entry(backend))
