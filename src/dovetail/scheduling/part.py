"""Parts of a scheduled model: found by path, and worked on step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, overload

from torch import nn
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, ScheduleError, UnknownPart, checked_call
from dovetail.lowering.backend_protocol import requested, resolve
from dovetail.outlining.region import Region
from dovetail.outlining.region_call import make_identity
from dovetail.scheduling import replace as replacement_steps
from dovetail.scheduling.decompose import can_be_taken_apart
from dovetail.scheduling.edits import (
    AnnotateEdit,
    Checkpoint,
    DecomposeEdit,
    Edit,
    FuseEdit,
    LowerEdit,
    require_repeatable,
)
from dovetail.scheduling.finders import ByNode, Matches, PartMatch, PartRegion, finder_of, joined, matching
from dovetail.scheduling.history import backend_spelled
from dovetail.scheduling.resolve import (
    AddressGroup,
    grouped,
    is_path,
    keys_of,
    listed,
    resolved_paths,
    spelled_targets,
)
from dovetail.scheduling.session import ScheduleSession


def fuse(work: ScheduleSession, matches: Any, together: bool, backend: Any, **options: Any) -> Any:
    """Regions of matches, in the order of the matches."""
    items, is_list = listed(matches, "fuse")
    if not all(isinstance(item, PartMatch) for item in items):
        wrong = next(item for item in items if not isinstance(item, PartMatch))
        raise InvalidArgument(f"fuse takes matches that `find` returned, not {wrong!r}.")
    if options.get("kind") is not None or options.get("attrs") is not None:
        make_identity(options.get("kind") or "part", options.get("version") or 1, options.get("attrs"))
    if backend is not None:
        resolve(backend)
    told = {k: v for k, v in options.items() if v is not None}
    told |= {"backend": backend_spelled(backend)} if backend is not None else {}
    told |= {"together": True} if together else {}

    def run() -> tuple[list[PartRegion], list[dict[str, Any]]]:
        groups = grouped(work, items, "fuse")
        if together and len(groups) > 1:
            raise ScheduleError(
                f"what is fused together must be in one graph; these are in "
                f"{', '.join(g.root or 'the model' for g in groups)}. Find them from a part that holds all of them"
            )
        at = spelled_targets(groups, keys_of(work, groups))
        made: dict[int, PartRegion] = {}
        for group in groups:
            edit = FuseEdit(
                group.root, group.form, group.addresses, together=together, backend=backend, **options
            )
            names = work.edit(edit)
            paths = [address.path for address in group.addresses]
            found = work.regions_named(group.root, group.form, dict(zip(names, paths, strict=False)))
            made.update(dict(zip(group.numbers, found, strict=False)))
        return [made[i] for i in sorted(made)], at

    made, _ = work.step(lambda result: {"do": "fuse", "at": result[1], "list": is_list, **told}, run)
    return made if is_list and not together else made[0]


def _on_groups(
    work: ScheduleSession, do: str, items: list[Any], edit: Callable[[AddressGroup], Edit], **told: Any
) -> None:
    """One edit for each graph that the targets of a step are in."""

    def run() -> list[dict[str, Any]]:
        groups = grouped(work, items, do)
        at = spelled_targets(groups, keys_of(work, groups))
        for group in groups:
            work.edit(edit(group))
        return at

    work.step(lambda at: {"do": do, "at": at, **told}, run)


def decompose(work: ScheduleSession, target: Any) -> None:
    """Take regions, matches, or all that can be in some modules apart."""
    if is_path(target):
        paths = resolved_paths(work, target)
        items: list[Any] = list(work.find(paths, ByNode(can_be_taken_apart)))
        if not items:
            closed = [name for path in paths for name in work.regions_holding(path)]
            more = f"; take its regions apart first: {', '.join(closed[:4])}" if closed else ""
            named = ", ".join(path or "the model" for path in paths)
            raise ScheduleError(f"no operation of {named} can be taken apart into simpler ones{more}")
    else:
        items, _ = listed(target, "decompose")
    _on_groups(work, "decompose", items, lambda g: DecomposeEdit(g.root, g.form, g.addresses))


def _regions(target: Any, what: str) -> list[Any]:
    items, _ = listed(target, what)
    wrong = [item for item in items if not isinstance(item, Region)]
    if wrong:
        also = "" if what == "lower" else " or the paths of modules"
        raise InvalidArgument(f"{what} takes regions{also}; fuse {wrong[0]!r} first.")
    return items


def annotate(work: ScheduleSession, target: Any, attrs: Mapping[str, Any]) -> None:
    """Attributes on regions, notes on modules."""
    make_identity("annotation", 1, attrs)
    if not attrs:
        raise InvalidArgument("annotate needs attributes: annotate(region, tile=64).")
    given = dict(attrs)
    if is_path(target):
        paths = resolved_paths(work, target)

        def note() -> None:
            notes = {path: {**work.state.notes.get(path, {}), **given} for path in paths}
            work.state = replace(work.state, notes={**work.state.notes, **notes})

        work.step(lambda _: {"do": "annotate", "paths": paths, "attrs": given}, note)
        return
    items = _regions(target, "annotate")
    _on_groups(
        work, "annotate", items, lambda g: AnnotateEdit(g.root, g.form, g.addresses, attrs=given), attrs=given
    )


def checkpoint(work: ScheduleSession, target: Any) -> None:
    """Regions or modules whose inner values are computed again in backward."""
    if is_path(target):
        paths = resolved_paths(work, target)

        def mark() -> None:
            for path in paths:
                if work.state.root_of(path) is not None:
                    raise ScheduleError(f"'{path}' is traced; make a region of it and checkpoint that")
                require_repeatable(path, work.module_at(path), ())
            calls = work.record(paths) if work.example is not None else {}
            for path, called in calls.items():
                require_repeatable(path, work.module_at(path), called)
            work.state = replace(work.state, checkpoints=work.state.checkpoints | set(paths))

        work.step(lambda _: {"do": "checkpoint", "paths": paths}, mark)
        return
    items = _regions(target, "checkpoint")
    _on_groups(
        work, "checkpoint", items, lambda g: LowerEdit(g.root, g.form, g.addresses, backend=Checkpoint())
    )


def lower(work: ScheduleSession, target: Any, backend: Any) -> None:
    """Regions given to a backend."""
    resolve(backend)
    items = _regions(target, "lower")
    _on_groups(
        work,
        "lower",
        items,
        lambda g: LowerEdit(g.root, g.form, g.addresses, backend=backend),
        backend=backend_spelled(backend),
    )


class Part:
    """Some modules of a scheduled model, as a list: `part["mlp.*"]` are modules within them, `part[0]` is the first.

    Finding traces them; what is not touched stays the model's own.
    """

    def __init__(self, work: ScheduleSession, paths: tuple[str, ...]) -> None:
        self._work, self.paths = work, paths

    @property
    def modules(self) -> list[nn.Module]:
        """The modules as they are now: where one was replaced, what it was replaced by."""
        return [self._work.module_at(path) for path in self.paths]

    @property
    def graph(self) -> GraphModule:
        """The graph of a single part, traced if it was not; the first if it is called in several ways."""
        return self.graphs[0]

    @property
    def graphs(self) -> list[GraphModule]:
        """The graphs of these parts, one for each way they are called."""
        return self._work.graphs_of(self.paths)

    @property
    def regions(self) -> list[PartRegion]:
        """The regions made so far, in execution order."""
        return self._work.regions_of(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[Part]:
        return (Part(self._work, (path,)) for path in self.paths)

    @overload
    def __getitem__(self, key: str | int) -> Part: ...
    @overload
    def __getitem__(self, key: slice) -> Part: ...

    def __getitem__(self, key: str | int | slice) -> Part:
        if isinstance(key, str):
            return Part(self._work, self._within(key))
        if isinstance(key, slice):
            return Part(self._work, self.paths[key])
        if not isinstance(key, int) or isinstance(key, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"a part is asked for by path or number, not by {key!r}.")
        if not -len(self.paths) <= key < len(self.paths):
            raise IndexError(f"there are {len(self.paths)} parts, and number {key} is asked for")
        return Part(self._work, (self.paths[key],))

    def _within(self, pattern: str) -> tuple[str, ...]:
        """What a glob names within these parts; an error if that is nothing in any of them."""
        found: dict[str, None] = {}
        nothing: UnknownPart | None = None
        with self._work.exchanged() as now:
            for path in self.paths:
                try:
                    inner = matching(now.get_submodule(path), pattern)
                except UnknownPart as error:
                    nothing = nothing or error
                else:
                    found.update(dict.fromkeys(joined(path, name) for name in inner))
        if nothing is not None and not found:
            raise nothing
        return tuple(found)

    def __repr__(self) -> str:
        return f"Part({', '.join(path or 'the model' for path in self.paths)})"

    @checked_call()
    def find(self, what: Any = None, *, where: Callable[[Node], Any] | None = None) -> Matches:
        """Where something stands in these parts: matches in execution order, none overlapping another.

        `what` is a pattern function, a rule or a rule set, a class of modules, a regular expression on module paths, an operator,
        or a predicate on nodes (a function of one argument called `node` or annotated as one; `where` takes any).
        Nothing found is an empty list whose `why` tells what came near.
        """
        if (what is None) == (where is None):
            raise InvalidArgument("find takes one of a description and `where`.")
        if where is not None and not callable(where):
            raise InvalidArgument(f"where is a predicate on nodes, not a {type(where).__name__}.")
        finder = ByNode(where) if where is not None else finder_of(what)
        return self._work.find(self.paths, finder)

    @checked_call()
    def fuse(
        self,
        matches: Any,
        *,
        kind: str | None = None,
        version: int | None = None,
        attrs: Mapping[str, Any] | None = None,
        escapes: Any = None,
        backends: Any = (),
        together: bool = False,
    ) -> Any:
        """Make a region of each match, which computes exactly the same; with `together`, one of them all.

        `backends` is one, by name or as an object, or a list, of which the first that takes it runs it from now on; that
        none does is an error. None is the default; without any it is there for a compiler or a module that comes later. One match gives a region, a
        list of them a list.
        """
        return fuse(
            self._work,
            matches,
            together,
            requested(backends),
            kind=kind,
            version=version,
            attrs=attrs,
            escapes=escapes,
        )

    @checked_call()
    def replace(
        self,
        new: Any,
        target: Any = None,
        *,
        params: Mapping[str, Any] | None = None,
        concrete_args: Mapping[str, Any] | None = None,
        check: bool = False,
        name: str | None = None,
    ) -> None:
        """Call a module or function where a match, a region, several siblings, or the module at a path stands.

        A list of matches is replaced by one call, whose results are theirs in order. It is called with the operands of
        the pattern, by name where its parameters are called like the pattern's arguments (captured literals too), else
        in the pattern's order; where there is no pattern, with all that are no weights. `params` says which operands
        stand for parameters of `new`, which keep their names in the model; `concrete_args` gives further arguments.
        What it returns must be of the same number, shapes and dtypes, which is tried on the recorded inputs first; with
        `check` the values are compared too. A new module is trained, moved and saved with the model, as a child of the
        part it was put into. Without a target the parts themselves are replaced.
        """
        wanted = self.paths if target is None else target
        replacement_steps.replace_target(
            self._work, new, wanted, params=params, concrete_args=concrete_args, check=check, name=name
        )

    @checked_call()
    def replace_all(
        self,
        what: Any,
        factory: Callable[[Any], Any],
        *,
        params: Mapping[str, Any] | None = None,
        concrete_args: Mapping[str, Any] | None = None,
        check: bool = False,
    ) -> list[str]:
        """Replace every module of a class, or every match, by what `factory` makes of it, and return where they are.

        `factory` gets the module, or the match; `what` is a class, matches, or anything that `find` takes. Modules
        inside of what was just made are left alone. `params` are given by name: of parameters of the module that is
        replaced, or of operands of the match.
        """
        return replacement_steps.replace_all(
            self._work, self.paths, what, factory, params=params, concrete_args=concrete_args, check=check
        )

    def decompose(self, target: Any = None) -> None:
        """Take regions, matches, or the operations of these modules apart: a region into what it was made of, an
        operation into simpler ones (a linear layer into product and bias, attention into its products)."""
        decompose(self._work, self.paths if target is None else target)

    def annotate(self, target: Any = None, **attrs: Any) -> None:
        """Add attributes to regions, or notes to modules."""
        annotate(self._work, self.paths if target is None else target, attrs)

    def checkpoint(self, target: Any = None) -> None:
        """Compute the inner values of regions or modules again in backward instead of keeping them."""
        checkpoint(self._work, self.paths if target is None else target)

    @checked_call()
    def lower(self, target: Any, backends: Any) -> None:
        """Give regions that were made to a backend, or to the first of a list that takes them; None is the default."""
        chosen = requested(backends)
        if chosen is None:
            raise InvalidArgument("no backend was given; `undo` takes a lowering back.")
        lower(self._work, target, chosen)
