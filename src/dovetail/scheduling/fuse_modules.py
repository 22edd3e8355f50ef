"""`fuse_modules`: named modules fused along the dataflow, with the interface of torch's function of this name."""

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
from dovetail.ir.module_paths import is_within
from dovetail.ir.process_state import reset_at_fork
from dovetail.ir.profiler_ranges import is_traced
from dovetail.lowering.backend_protocol import BackendChain, checked_backends
from dovetail.lowering.lower import settle_parts
from dovetail.runtime.capture_cache import CaptureCache
from dovetail.runtime.presets import CompiledGraph
from dovetail.scheduling.call_recording import ModelInputs, RecordedCall, example_inputs, record_calls
from dovetail.scheduling.edits import OPTIONAL, PartGraph, outline_named
from dovetail.scheduling.finders import common_prefix, join_path, match_paths
from dovetail.scheduling.fold_chains import Chain, ModuleGroup, find_chains, fold_norms
from dovetail.scheduling.install import (
    HookFreeCache,
    InstalledForward,
    ReplayedSteps,
    is_scheduled,
    refuse_hooks,
    unwrapped,
)


class FusedForward(InstalledForward):
    """The forward of a module around fused ones: captures with batch norms in place, and with batch norms folded.

    Folded ones run calls without gradients of the folded parameters. Another tracer sees the module's own forward.
    """

    def __init__(self, module: nn.Module, path: str, groups: tuple[ModuleGroup, ...]) -> None:
        super().__init__(module)
        self.path, self.groups = path, groups
        self._module_paths = [min(paths).split(".") for group in groups for paths in group.paths]
        self._caches: tuple[CaptureCache, CaptureCache] | None = None
        self._trained = False
        # One for both caches: they capture one module.
        self._lock = reset_at_fork(threading.RLock())

    @property
    def programs(self) -> tuple[GraphModule, ...]:
        return tuple(form.program for forms in self._caches or () for form in forms.captures)

    @property
    def unfolded(self) -> CaptureCache:
        """Captures with every norm in place."""
        return self._both()[0]

    @property
    def folded(self) -> CaptureCache:
        """Captures with norms folded."""
        return self._both()[1]

    def _both(self) -> tuple[CaptureCache, CaptureCache]:
        # On first use: a module that is being unpickled is still empty.
        if self._caches is None:
            twin = unwrapped(self.module)
            # Backends compile for the sizes they see.
            dynamic = all(group.backend is None for group in self.groups)
            with self._lock:
                unfolded, folded = (
                    HookFreeCache(twin, ReplayedSteps(steps), self.path, dynamic=dynamic, lock=self._lock)
                    for steps in (self._with_norms, self._without_norms)
                )
                self._caches = self._caches or (unfolded, folded)
        return self._caches

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or self._is_traced():
            own = self.own
            return own(*args, **kwargs) if own else type(self.module).forward(self.module, *args, **kwargs)
        forms = self.folded if self._may_fold() else self.unfolded
        if forms is self.folded and self._trained:
            self._trained = False
            for form in forms.captures:
                if isinstance(form.program, Program) and form.program.runtime_weights is not None:
                    form.program.runtime_weights.check(form.program)
        try:
            return forms.call(args, kwargs)
        except CaptureError as error:
            if isinstance(error.__cause__, ScheduleError):
                raise error.__cause__ from None
            raise
        finally:
            # For a norm without `num_batches_tracked` no version counter shows that statistics were written.
            self._trained = self._trained or any(m.training for m in self._norms())

    def _is_traced(self) -> bool:
        """Return whether a tracer is active in this thread."""
        if not torch.compiler.is_compiling() and not is_traced():
            return False
        return not any(forms.captured_elsewhere() for forms in self._caches or ())

    def prepare(self, calls: Iterable[RecordedCall]) -> None:
        """Capture calls like these; raise ScheduleError where the modules of a group are not a chain."""
        refuse_hooks(self.path, self.module)
        captured = [self.unfolded.capture(call.example.args, call.example.kwargs) for call in calls]
        self.unfolded.adopt([(modes, CompiledGraph(self._with_norms(gm))) for modes, gm in captured])
        if self._has_fixed_norms():
            self.folded.adopt([(modes, CompiledGraph(self._without_norms(gm))) for modes, gm in captured])

    def _may_fold(self) -> bool:
        if not self._has_fixed_norms():
            return False
        return not (
            torch.is_grad_enabled() and any(p.requires_grad for m in self._modules() for p in m.parameters())
        )

    def _modules(self) -> list[nn.Module]:
        modules: list[nn.Module] = []
        for path in self._module_paths:
            # Done in each call, where `get_submodule` would be too slow.
            at: nn.Module | None = self.module
            for name in path:
                at = at._modules.get(name) if at is not None else None
            modules += [] if at is None else [at]
        return modules

    def _norms(self) -> list[nn.Module]:
        return [m for m in self._modules() if "running_mean" in m._buffers]

    def _has_fixed_norms(self) -> bool:
        return any(not m.training for m in self._norms())

    def _chains(self, gm: GraphModule) -> list[Chain]:
        return find_chains(gm, self.groups, f"'{self.path}'" if self.path else "the model")

    def _with_norms(self, gm: GraphModule) -> GraphModule:
        return _with_regions(gm, self._chains(gm))

    def _without_norms(self, gm: GraphModule) -> GraphModule:
        return _with_regions(*fold_norms(gm, self._chains(gm)))

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedForward:
        # The copy has other parameters: it captures anew.
        return FusedForward(copy.deepcopy(self.module, memo), self.path, self.groups)

    def __reduce__(self) -> tuple[Any, ...]:
        return FusedForward, (self.module, self.path, self.groups)


def _with_regions(gm: GraphModule, chains: list[Chain]) -> GraphModule:
    """Return the graph with a region for each chain, lowered where a backend was requested."""
    outlined, names = outline_named(gm, [chain.request() for chain in chains])
    backends = {n: c.group.backend for n, c in zip(names, chains, strict=True) if c.group.backend is not None}
    return PartGraph(outlined).with_lowered(backends, OPTIONAL).gm if backends else outlined


@checked_call()
def fuse_modules(
    model: nn.Module,
    modules_to_fuse: Sequence[str] | Sequence[Sequence[str]],
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    inplace: bool = False,
    backends: BackendChain = (),
) -> nn.Module:
    """Return the model with named modules fused: a convolution or linear layer, a batch norm and an activation each.

    `modules_to_fuse` is a list of lists of module names, or one list. Each list names modules that follow one another
    in the dataflow, in any order: wherever they do, their calls become one region of the smallest module around them,
    whose forward is replaced; the modules, their names and `state_dict` stay. Other calls of them (a shared ReLU) are
    left alone, and a value in between that is used elsewhere too is returned by the region. Modules that do not follow
    one another are a ScheduleError: at once with example inputs in `args` and `kwargs`, else in the first call.

    In train mode everything is computed as before. In eval mode a batch norm is folded into the weights before it,
    which are computed again after training or loading (writes through `.data`, or by `F.batch_norm` into statistics,
    are not noticed); it stays in calls that record gradients of its parameters, where the value before it is used
    elsewhere, or where it has no running statistics. Unless `inplace`, the model is copied first. `backends`, one or a
    list, run the regions; None is the default.
    """
    example = _checked_example(model, args, kwargs, inplace)
    backend = checked_backends(backends)
    named = _name_lists(modules_to_fuse)
    for names in named:
        _require_names(model, names)
    if not inplace:
        model = copy.deepcopy(model)
    forwards = {path: fused_forward_of(module) for path, module in model.named_modules()}
    installed = {path: forward for path, forward in forwards.items() if forward is not None}
    requests = [_FusionRequest(names, backend) for names in named]
    for path, forward in installed.items():
        requests += [
            _FusionRequest(tuple(join_path(path, min(p)) for p in g.paths), g.backend) for g in forward.groups
        ]
    _require_distinct(model, requests)
    new, calls = _assign_roots(model, requests, installed, example)
    fused = [_fused_forward(model, root, assigned) for root, assigned in new.items()]
    for forward in fused:
        if example is not None:
            forward.prepare(calls[forward.path])
    for path, forward in installed.items():
        if any(is_within(path, root) for root in new):
            forward.remove()
    for forward in fused:
        forward.install()
    if backend is not None and not model.training:
        settle_parts(model, [backend])
    return model


@dataclass(frozen=True, eq=False)
class _FusionRequest:
    """Names of modules to fuse, and the backend of their regions."""

    names: tuple[str, ...]
    backend: Any


def _checked_example(model: Any, args: Any, kwargs: Any, inplace: Any) -> ModelInputs | None:
    """Return the example inputs; raise InvalidArgument unless the arguments are valid."""
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"fuse_modules takes a module, not a {type(model).__name__}.")
    refuse_scripted(model)
    if any(is_lazy(t) for t in (*model.parameters(), *model.buffers())):
        raise InvalidArgument("the model has lazy modules; call it once, so that their sizes are known.")
    if isinstance(args, bool):
        raise InvalidArgument("the third argument is example inputs; write inplace=True to fuse in place.")
    example = example_inputs(args, kwargs)
    if not isinstance(inplace, bool):
        raise InvalidArgument(f"inplace must be True or False, not {inplace!r}.")
    if any(is_scheduled(m) and fused_forward_of(m) is None for m in model.modules()):
        raise InvalidArgument("the model is built by a schedule; fuse with that one, or `release` it first.")
    return example


def _name_lists(modules_to_fuse: Any) -> list[tuple[str, ...]]:
    """Return the names as a list of tuples."""
    items = (
        []
        if isinstance(modules_to_fuse, str) or not isinstance(modules_to_fuse, Iterable)
        else list(modules_to_fuse)
    )
    if items and all(isinstance(name, str) for name in items):
        items = [items]
    lists = [tuple(n) for n in items if isinstance(n, (list, tuple))]
    if not lists or len(lists) != len(items) or not all(isinstance(n, str) for names in lists for n in names):
        raise InvalidArgument(
            f'fuse_modules takes lists of module names: [["conv", "bn", "relu"], ...], not {modules_to_fuse!r}.'
        )
    return lists


def _require_names(model: nn.Module, names: tuple[str, ...]) -> None:
    label = f"[{', '.join(names)}]"
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        if name not in modules:
            match_paths(model, name)  # raises with similar names, unless it is a glob
        if name not in modules or not name:
            raise InvalidArgument(f"{label}: '{name}' is not the name of a module within the model.")
    if len(names) < 2:
        raise ScheduleError(f"{label} names {'one' if names else 'no'} module; fusing takes two or three")
    if len({id(modules[name]) for name in names}) < len(names):
        raise ScheduleError(f"{label} names the same module twice")
    for outer in names:
        inner = next((n for n in names if n != outer and is_within(n, outer)), None)
        if inner is not None:
            raise ScheduleError(
                f"{label}: '{inner}' is within '{outer}'; name one of them, or the modules within both"
            )
    channels = {n: _channels(modules[n]) for n in names if _channels(modules[n]) is not None}
    if len(set(channels.values())) > 1:
        counts = " and ".join(f"'{name}' is of {count}" for name, count in channels.items())
        raise ScheduleError(f"{label} cannot follow one another: {counts} channels")


def _channels(module: nn.Module) -> int | None:
    for name in ("out_channels", "out_features", "num_features"):
        count = module.__dict__.get(name)
        if isinstance(count, int):
            return count
    return None


def _require_distinct(model: nn.Module, requests: list[_FusionRequest]) -> None:
    first: dict[frozenset[int], _FusionRequest] = {}
    for request in requests:
        modules = frozenset(id(model.get_submodule(name)) for name in request.names)
        if first.setdefault(modules, request) is not request:
            raise ScheduleError(f"[{', '.join(request.names)}] is to be fused twice")


def fused_forward_of(module: nn.Module) -> FusedForward | None:
    """Return what an earlier call installed on a module."""
    installed = getattr(module.__dict__.get("forward"), "__self__", None)
    return installed if isinstance(installed, FusedForward) else None


def _assign_roots(
    model: nn.Module,
    requests: list[_FusionRequest],
    installed: Mapping[str, FusedForward],
    example: ModelInputs | None,
) -> tuple[dict[str, list[_FusionRequest]], dict[str, list[RecordedCall]]]:
    """Return the modules that must run other groups than before, with the groups and the calls of each."""
    roots = {request: _callable_parent(model, _common_parent(request.names)) for request in requests}
    new = _changed_roots(roots, installed)
    if example is None:
        return new, {}
    try:
        return new, record_calls(model, new, example)
    except ScheduleError:
        for request, root in roots.items():
            while root and not _is_called(model, root, example):
                root = _callable_parent(model, root.rpartition(".")[0])
            roots[request] = root
    new = _changed_roots(roots, installed)
    return new, record_calls(model, new, example)


def _changed_roots(
    roots: Mapping[_FusionRequest, str], installed: Mapping[str, FusedForward]
) -> dict[str, list[_FusionRequest]]:
    """Return the outermost of the root modules whose groups have changed."""
    paths = dict.fromkeys(roots.values())
    outer = [path for path in paths if not any(o != path and is_within(path, o) for o in paths)]
    assigned = {path: [request for request, root in roots.items() if is_within(root, path)] for path in outer}
    return {
        p: requests
        for p, requests in assigned.items()
        if p not in installed or len(installed[p].groups) != len(requests)
    }


def _common_parent(names: tuple[str, ...]) -> str:
    """Return the innermost path that contains all names."""
    return ".".join(common_prefix([name.split(".")[:-1] for name in names]))


def _callable_parent(model: nn.Module, path: str) -> str:
    """Return the path of the innermost module with a forward, from `path` outwards: a ModuleList has none."""
    while path and type(model.get_submodule(path)).forward is nn.Module.forward:
        path = path.rpartition(".")[0]
    return path


def _is_called(model: nn.Module, path: str, example: ModelInputs) -> bool:
    try:
        record_calls(model, [path], example)
    except ScheduleError:
        return False
    return True


def _fused_forward(model: nn.Module, root: str, requests: list[_FusionRequest]) -> FusedForward:
    module = model.get_submodule(root)
    refuse_hooks(root, module)
    paths: dict[int, set[str]] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        paths.setdefault(id(inner), set()).add(path)
    groups = [
        ModuleGroup(
            request.names,
            tuple(frozenset(paths[id(model.get_submodule(name))]) for name in request.names),
            request.backend,
        )
        for request in requests
    ]
    return FusedForward(module, root, tuple(groups))
