"""A model whose calls run lowered graphs: called, trained, saved and moved like the model."""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from torch import nn
from torch.fx import GraphModule

from dovetail.errors import CaptureError, InvalidArgument, checked_call
from dovetail.ir.graph_module import HOOK_TABLES, Body, GraphOwner, Program
from dovetail.lowering.failures import Diagnostic
from dovetail.runtime.capture_cache import CaptureCache, CompilePipeline, CudaGraphs
from dovetail.runtime.capture_entry import CaptureSource
from dovetail.runtime.module_guard import ForwardOverride, MethodOverride, own_forward, with_signature
from dovetail.runtime.presets import GraphPlan

# The dicts of parameters, buffers, children and hooks: shared, so that both are one model.
_SHARED = (
    *HOOK_TABLES,
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class _Forward:
    """The `forward` of compiled models, with the signature of the model's own."""

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self._function
        return types.MethodType(instance.__dict__.get("_forward", self._function), instance)


def _forward(self: CompiledModule, *args: Any, **kwargs: Any) -> Any:
    return self._captures.call(args, kwargs)


_forward.__name__ = "forward"


class CompiledModule(GraphOwner, nn.Module, ForwardOverride):
    """The model with its graph fused and lowered; what `dovetail.compile` returns.

    It shares parameters, buffers and submodules with the model, so that `state_dict`, optimizers and `.to` see one.
    Inputs that no capture so far covers, another train or eval mode, autocast, another number or string as an
    attribute of a module, and another class, `forward` or other function of a module or its class capture again, up to
    the recompile limit; then the model's own forward runs. It also runs while another tracer is active, and for a call
    that cannot be captured. Methods of the model that call it run compiled code; so does the model once this module's
    `forward` is assigned to it. Changes inside other attributes (lists, configuration objects) are not noticed.
    """

    def __init__(
        self,
        model: nn.Module,
        preset: CompilePipeline,
        *,
        dynamic_shapes: Any = None,
        dynamic: bool | None = None,
        recompile_limit: int | None = None,
        cuda_graphs: CudaGraphs = "auto",
        check_capture: bool = False,
        cache: bool | str | Path = False,
        bundle: CaptureSource | None = None,
    ) -> None:
        super().__init__()
        self.__dict__.update({name: model.__dict__[name] for name in _SHARED if name in model.__dict__})
        self.__dict__.pop("training", None)
        captures = CaptureCache(
            model,
            preset,
            dynamic_shapes=dynamic_shapes,
            dynamic=dynamic,
            recompile_limit=recompile_limit,
            cuda_graphs=cuda_graphs,
            check_capture=check_capture,
            fallback_at_first=True,
            cache=cache,
            bundle=bundle,
        )
        self.__dict__.update(_model=model, _cache=captures, _override=MethodOverride(model, self._run))
        self.__dict__["_forward"] = with_signature(_forward, own_forward(model))

    @property
    def training(self) -> bool:
        """The mode of the model."""
        return self._original.training if "_model" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if "_model" in self.__dict__:
            self._original.training = mode

    @property
    def _original(self) -> nn.Module:
        return self.__dict__["_model"]

    @property
    def _captures(self) -> CaptureCache:
        if "_deferred" in self.__dict__:
            self._finish()
        return self.__dict__["_cache"]

    def _finish(self) -> None:
        """Run the initialization that was deferred while the model itself was being copied or unpickled."""
        options = self.__dict__.pop("_deferred", None)
        if options is not None:
            CompiledModule.__init__(self, self._original, **options)

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]:
        """Recompilations, fallbacks and limits reached so far, each with its cause."""
        return tuple(self._captures.diagnostics.events)

    @property
    def model_name(self) -> str:
        """The name of the model's class."""
        return type(self._original).__name__

    @property
    def plan(self) -> GraphPlan | None:
        """The plan that the model was compiled with, if any."""
        return getattr(self._captures.preset, "plan", None)

    @property
    def _wrapper(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name == "forward"}

    @property
    def graphs(self) -> tuple[GraphModule, ...]:
        """The lowered graphs so far, one for each capture; `dovetail.regions` and `explain` accept them."""
        return tuple(entry.program for entry in self._captures.captures)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__["_model"]
            self._finish()
            value = getattr(model, name)
            if isinstance(value, types.MethodType) and value.__self__ is model:
                return self.__dict__["_override"].bind(value)
            return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            # It may wrap this module's own, and as the model's would call itself without end.
            self.__dict__[name] = value
        elif name == "__class__" or name in self.__dict__ or "_model" not in self.__dict__:
            # FSDP adds methods to the class of what it shards.
            super().__setattr__(name, value)
        else:
            setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        if name == "forward" and name in self.__dict__:
            del self.__dict__[name]
        else:
            delattr(self._original, name)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model; calls in it run a capture of that mode."""
        self._original.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._original._apply(fn, recurse)
        return self

    forward = _Forward(_forward)  # pyright: ignore[reportAssignmentType]

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the model by one of its methods; a `forward` assigned to this module is used."""
        return self.forward(*args, **kwargs)

    def specialize(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        """Capture and lower for calls like this one, unless the recompile limit is reached."""
        cache = self._captures
        try:
            if cache.bundle is None or cache.adopt_bundle(args, kwargs or {}) is None:
                cache.specialize(args, kwargs)
        except CaptureError as error:
            if cache.preset.strict:
                raise
            cache.report_fallback(error)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        model = copy.deepcopy(self._original, memo)
        copied = _restored(model, self._captures.options, [])
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self._wrapper, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        captures = self._captures.portable()
        return _restored, (self._original, self._captures.options, captures), self._wrapper or None

    def __repr__(self) -> str:
        return f"CompiledModule({self._original!r})"

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._original)})


@checked_call()
def refresh(compiled: nn.Module) -> int:
    """Compare all weights that compiled code has copies of with what they were, and return how many differ.

    Takes what `compile` and `lower` return, graphs that passes return, models that a schedule or `fuse_modules` has
    changed, and modules that have any of these as submodules. From the next call on the code uses the current weights,
    however they were written. Without this, writes that change no version counter are noticed within
    `weight_check_interval` calls.
    """
    if not isinstance(compiled, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"refresh takes a module or graph, not a {type(compiled).__name__}.")
    programs: list[GraphModule] | None = None
    for module in compiled.modules():
        # A schedule installs the runner of its graphs as the forward of a module.
        installed = getattr(module.__dict__.get("forward"), "__self__", None)
        graphs = getattr(installed, "programs", None)
        if isinstance(module, CompiledModule):
            graphs = module.graphs
        elif isinstance(module, Program) and not isinstance(module, Body):
            graphs = (module,)
        if graphs is not None:
            programs = [*(programs or []), *graphs]
    if programs is None:
        raise InvalidArgument(
            f"the {type(compiled).__name__} was neither compiled nor lowered by dovetail, and neither were its submodules. "
            f"Give what `dovetail.compile` or `dovetail.lower` returned."
        )
    written: set[int] = set()
    for program in programs:
        weights = program.runtime_weights if isinstance(program, Program) else None
        written |= set() if weights is None else weights.check(program)
    return len(written)


def _restored(model: nn.Module, options: dict[str, Any], captures: Any) -> CompiledModule:
    if "_modules" not in model.__dict__:
        # The model's `forward` is this module's, and the model itself is not restored yet.
        compiled = CompiledModule.__new__(CompiledModule)
        own = types.MethodType(type(model).forward, model)
        compiled.__dict__.update(_model=model, _deferred=options, _forward=with_signature(_forward, own))
        return compiled
    compiled = CompiledModule(model, **options)
    compiled.__dict__["_cache"].adopt(captures)
    return compiled
