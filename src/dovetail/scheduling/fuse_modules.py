"""Modules fused by name, as torch's function of this name takes them, but along the dataflow."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from dovetail.errors import CaptureError, InvalidArgument, ScheduleError, checked_call
from dovetail.frontend.model_copy import refuse_scripted
from dovetail.ir.graph_module import Program
from dovetail.ir.process_state import released_by_fork
from dovetail.lowering.backend_protocol import requested
from dovetail.lowering.dispatch import is_watched
from dovetail.lowering.lower import settle_parts
from dovetail.runtime.capture_cache import CaptureCache, Modes
from dovetail.scheduling.call_recording import ModelInputs, RecordedCall, record
from dovetail.scheduling.edits import PartGraph, outlined
from dovetail.scheduling.finders import is_within, joined, matching
from dovetail.scheduling.fold_chains import Chain, ModuleGroup, chains, folded
from dovetail.scheduling.install import is_scheduled
from dovetail.scheduling.installed_forward import Installed, ReplayedSteps, plain, refuse_hooks


class _PartCaptures(CaptureCache):
    """Captures of a module at a path; with `any_size` they hold for other sizes too, unless the model asks for them."""

    def __init__(
        self, module: nn.Module, path: str, recipe: ReplayedSteps, lock: threading.RLock, *, any_size: bool
    ) -> None:
        super().__init__(module, recipe, dynamic=any_size, cuda_graphs=False, lock=lock)
        self._path = path

    def captured(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None, cause: str = ""
    ) -> tuple[Modes, GraphModule]:
        try:
            refuse_hooks(self._path, self.model)
        except ScheduleError as error:
            raise CaptureError(str(error)) from error
        return super().captured(args, kwargs, cause)


class Fusing(Installed):
    """Calls of a module around fused ones: its graphs with batch norms kept, and with batch norms folded.

    Folded ones run calls that give no gradients to what they are made of. Another tracer sees the module's own forward.
    """

    def __init__(self, module: nn.Module, path: str, groups: tuple[ModuleGroup, ...]) -> None:
        super().__init__(module)
        self.path, self.groups = path, groups
        self._ways = [min(paths).split(".") for group in groups for paths in group.paths]
        self._forms: tuple[CaptureCache, CaptureCache] | None = None
        self._trained = False
        # One for both kinds of captures: they are of one module.
        self._lock = released_by_fork(threading.RLock())

    @property
    def programs(self) -> tuple[GraphModule, ...]:
        return tuple(form.program for forms in self._forms or () for form in forms.made)

    @property
    def kept(self) -> CaptureCache:
        """Captures with every norm where it was."""
        return self._made()[0]

    @property
    def folded(self) -> CaptureCache:
        """Captures with norms folded."""
        return self._made()[1]

    def _made(self) -> tuple[CaptureCache, CaptureCache]:
        # Not before it is asked for: a module that is being unpickled has nothing in it yet.
        if self._forms is None:
            twin, steps = (
                plain(self.module),
                (ReplayedSteps(self._with_norms), ReplayedSteps(self._without_norms)),
            )
            # Backends make code for the sizes they see.
            any_size = all(group.backend is None for group in self.groups)
            with self._lock:
                kept, without = (
                    _PartCaptures(twin, self.path, s, self._lock, any_size=any_size) for s in steps
                )
                self._forms = self._forms or (kept, without)
        return self._forms

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or self._is_traced():
            own = self.own
            return own(*args, **kwargs) if own else type(self.module).forward(self.module, *args, **kwargs)
        forms = self.folded if self._may_fold() else self.kept
        if forms is self.folded and self._trained:
            self._trained = False
            for form in forms.made:
                if isinstance(form.program, Program) and form.program.runtime_weights is not None:
                    form.program.runtime_weights.check(form.program)
        try:
            return forms.call(args, kwargs)
        except CaptureError as error:
            if isinstance(error.__cause__, ScheduleError):
                raise error.__cause__ from None
            raise
        finally:
            # Of a norm without a count of its batches no version counter shows that statistics were written.
            self._trained = self._trained or any(m.training for m in self._norms())

    def _is_traced(self) -> bool:
        """Whether somebody looks at the operations of this call, and not only at those of another thread's."""
        if not torch.compiler.is_compiling() and not is_watched():
            return False
        return not any(forms.captured_elsewhere() for forms in self._forms or ())

    def prepare(self, calls: Iterable[RecordedCall]) -> None:
        """Make graphs for calls like these; ScheduleError where the modules do not follow one another in one."""
        refuse_hooks(self.path, self.module)
        captured = [self.kept.captured(call.example.args, call.example.kwargs) for call in calls]
        self.kept.adopt([(modes, self._with_norms(gm)) for modes, gm in captured])
        if self._has_fixed_norms():
            self.folded.adopt([(modes, self._without_norms(gm)) for modes, gm in captured])

    def _may_fold(self) -> bool:
        if not self._has_fixed_norms():
            return False
        return not (
            torch.is_grad_enabled() and any(p.requires_grad for m in self._named() for p in m.parameters())
        )

    def _named(self) -> list[nn.Module]:
        found: list[nn.Module] = []
        for way in self._ways:
            # What each call asks for must be quicker than `get_submodule`.
            at: nn.Module | None = self.module
            for name in way:
                at = at._modules.get(name) if at is not None else None
            found += [] if at is None else [at]
        return found

    def _norms(self) -> list[nn.Module]:
        return [m for m in self._named() if "running_mean" in m._buffers]

    def _has_fixed_norms(self) -> bool:
        return any(not m.training for m in self._norms())

    def _chains(self, gm: GraphModule) -> list[Chain]:
        return chains(gm, self.groups, f"'{self.path}'" if self.path else "the model")

    def _with_norms(self, gm: GraphModule) -> GraphModule:
        return _with_regions(gm, self._chains(gm))

    def _without_norms(self, gm: GraphModule) -> GraphModule:
        return _with_regions(*folded(gm, self._chains(gm)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Fusing:
        # The copy's parameters are others: it captures anew.
        return Fusing(copy.deepcopy(self.module, memo), self.path, self.groups)

    def __reduce__(self) -> tuple[Any, ...]:
        return Fusing, (self.module, self.path, self.groups)


def _with_regions(gm: GraphModule, found: list[Chain]) -> GraphModule:
    """The graph with a region for each chain, lowered where a backend was asked for."""
    made, names = outlined(gm, [chain.request() for chain in found])
    wanted = {n: c.group.backend for n, c in zip(names, found, strict=True) if c.group.backend is not None}
    return PartGraph(made).lowered(wanted, strict=False).gm if wanted else made


@checked_call()
def fuse_modules(
    model: nn.Module,
    modules_to_fuse: Sequence[str] | Sequence[Sequence[str]],
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    inplace: bool = False,
    backends: Any = (),
) -> nn.Module:
    """The model with named modules fused: a convolution or linear layer, a batch norm and an activation each.

    `modules_to_fuse` is a list of lists of module names, or one list. Each list names modules that follow one another
    in the dataflow, in any order: wherever they do, their calls become one region of the smallest module around them,
    whose forward is replaced; the modules, their names and `state_dict` stay. Other calls of them (a shared ReLU) are
    left alone, and a value in between that is used elsewhere too is given out. What does not follow one another is a
    ScheduleError: at once with example inputs in `args` and `kwargs`, else when the model is first called.

    In train mode everything is computed as before. In eval mode a batch norm is folded into the weights before it,
    which are computed again after training or loading (writes through `.data`, or by `F.batch_norm` into statistics,
    are not seen); it is kept in calls that give its parameters gradients, where the value before it is used elsewhere,
    or where it keeps no statistics. Unless `inplace`, the model is copied first. `backends`, one or a list, run
    the regions; None is the default.
    """
    _require_arguments(model, args, kwargs, inplace)
    backend = requested(backends)
    named = _listed(modules_to_fuse)
    for names in named:
        _require_names(model, names)
    if not inplace:
        model = copy.deepcopy(model)
    example = None if args is None and kwargs is None else ModelInputs(tuple(args or ()), dict(kwargs or {}))
    there = _there(model)
    wanted = [_Wanted(names, backend) for names in named]
    for path, fusing in there.items():
        wanted += [_Wanted(tuple(joined(path, min(p)) for p in g.paths), g.backend) for g in fusing.groups]
    _require_distinct(model, wanted)
    new, calls = _placed(model, wanted, there, example)
    made = [_fusing(model, root, here) for root, here in new.items()]
    for fusing in made:
        if example is not None:
            fusing.prepare(calls[fusing.path])
    for path, fusing in there.items():
        if any(is_within(path, root) for root in new):
            fusing.remove()
    for fusing in made:
        fusing.install()
    if backend is not None and not model.training:
        settle_parts(model, [backend])
    return model


@dataclass(frozen=True, eq=False)
class _Wanted:
    """A list of names, and what is to run its regions."""

    names: tuple[str, ...]
    backend: Any


def _require_arguments(model: Any, args: Any, kwargs: Any, inplace: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"fuse_modules takes a module, not a {type(model).__name__}.")
    refuse_scripted(model)
    if any(is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        raise InvalidArgument("the model has lazy modules; call it once, so that their sizes are known.")
    if isinstance(args, bool):
        raise InvalidArgument("the third argument is example inputs; write inplace=True to fuse in place.")
    if args is not None and not isinstance(args, (tuple, list)):
        raise InvalidArgument(f"args must be a tuple of example inputs, not a {type(args).__name__}.")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidArgument(f"kwargs must be a dict of example inputs, not a {type(kwargs).__name__}.")
    if not isinstance(inplace, bool):
        raise InvalidArgument(f"inplace must be True or False, not {inplace!r}.")
    if any(is_scheduled(m) and fusing_of(m) is None for m in model.modules()):
        raise InvalidArgument("the model is built by a schedule; fuse with that one, or `release` it first.")


def _listed(modules_to_fuse: Any) -> list[tuple[str, ...]]:
    """The names as a list of lists."""
    given = (
        []
        if isinstance(modules_to_fuse, str) or not isinstance(modules_to_fuse, Iterable)
        else list(modules_to_fuse)
    )
    if given and all(isinstance(name, str) for name in given):
        given = [given]
    lists = [tuple(n) for n in given if isinstance(n, (list, tuple))]
    if not lists or len(lists) != len(given) or not all(isinstance(n, str) for names in lists for n in names):
        raise InvalidArgument(
            f'fuse_modules takes lists of module names: [["conv", "bn", "relu"], ...], not {modules_to_fuse!r}.'
        )
    return lists


def _require_names(model: nn.Module, names: tuple[str, ...]) -> None:
    told = f"[{', '.join(names)}]"
    known = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        if name not in known:
            matching(model, name)  # tells what names are near, unless it is a glob
        if name not in known or not name:
            raise InvalidArgument(f"{told}: '{name}' is not the name of a module within the model.")
    if len(names) < 2:
        raise ScheduleError(f"{told} names {'one' if names else 'no'} module; fusing takes two or three")
    if len({id(known[name]) for name in names}) < len(names):
        raise ScheduleError(f"{told} names the same module twice")
    for outer in names:
        inner = next((n for n in names if n != outer and is_within(n, outer)), None)
        if inner is not None:
            raise ScheduleError(f"{told}: '{inner}' is a part of '{outer}'; name either, or what is in both")
    channels = {n: _channels(known[n]) for n in names if _channels(known[n]) is not None}
    if len(set(channels.values())) > 1:
        counts = " and ".join(f"'{name}' is of {count}" for name, count in channels.items())
        raise ScheduleError(f"{told} cannot follow one another: {counts} channels")


def _channels(module: nn.Module) -> int | None:
    for name in ("out_channels", "out_features", "num_features"):
        found = module.__dict__.get(name)
        if isinstance(found, int):
            return found
    return None


def _require_distinct(model: nn.Module, wanted: list[_Wanted]) -> None:
    seen: dict[frozenset[int], _Wanted] = {}
    for one in wanted:
        modules = frozenset(id(model.get_submodule(name)) for name in one.names)
        if seen.setdefault(modules, one) is not one:
            raise ScheduleError(f"[{', '.join(one.names)}] is to be fused twice")


def fusing_of(module: nn.Module) -> Fusing | None:
    """What an earlier call installed on a module."""
    found = getattr(module.__dict__.get("forward"), "__self__", None)
    return found if isinstance(found, Fusing) else None


def _there(model: nn.Module) -> dict[str, Fusing]:
    return {path: found for path, m in model.named_modules() if (found := fusing_of(m)) is not None}


def _placed(
    model: nn.Module, wanted: list[_Wanted], there: Mapping[str, Fusing], example: ModelInputs | None
) -> tuple[dict[str, list[_Wanted]], dict[str, list[RecordedCall]]]:
    """Which modules are to run which groups and do not yet, and how these modules are called."""
    roots = {one: _callable(model, _common(one.names)) for one in wanted}
    new = _changed(roots, there)
    if example is None:
        return new, {}
    try:
        return new, record(model, new, example)
    except ScheduleError:
        for one, root in roots.items():
            while root and not _is_called(model, root, example):
                root = _callable(model, root.rpartition(".")[0])
            roots[one] = root
    new = _changed(roots, there)
    return new, record(model, new, example)


def _changed(roots: Mapping[_Wanted, str], there: Mapping[str, Fusing]) -> dict[str, list[_Wanted]]:
    """The outermost of these modules that have groups they had not."""
    paths = dict.fromkeys(roots.values())
    outer = [path for path in paths if not any(o != path and is_within(path, o) for o in paths)]
    found = {path: [one for one, root in roots.items() if is_within(root, path)] for path in outer}
    return {p: here for p, here in found.items() if p not in there or len(there[p].groups) != len(here)}


def _common(names: tuple[str, ...]) -> str:
    """The innermost path that all names lie below."""
    parents = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for parts in zip(*parents, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _callable(model: nn.Module, path: str) -> str:
    """The path, or that of the innermost module around it that has a forward: a list of modules has none."""
    while path and type(model.get_submodule(path)).forward is nn.Module.forward:
        path = path.rpartition(".")[0]
    return path


def _is_called(model: nn.Module, path: str, example: ModelInputs) -> bool:
    try:
        record(model, [path], example)
    except ScheduleError:
        return False
    return True


def _fusing(model: nn.Module, root: str, wanted: list[_Wanted]) -> Fusing:
    module = model.get_submodule(root)
    refuse_hooks(root, module)
    paths: dict[int, set[str]] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        paths.setdefault(id(inner), set()).add(path)
    groups = [
        ModuleGroup(
            one.names,
            tuple(frozenset(paths[id(model.get_submodule(name))]) for name in one.names),
            one.backend,
        )
        for one in wanted
    ]
    return Fusing(module, root, tuple(groups))
