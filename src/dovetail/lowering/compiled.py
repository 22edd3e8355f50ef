"""A model whose calls run lowered graphs: called, trained, saved and moved as the model is."""

from __future__ import annotations

import copy
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.fx import GraphModule

from dovetail.errors import CallMismatch, CaptureError, InvalidArgument
from dovetail.graph.capture import capture
from dovetail.lowering.lowering import lowering_of
from dovetail.lowering.makeup import Makeup
from dovetail.lowering.recipe import Recipe
from dovetail.lowering.replay import NO_GPU, Replay, why_not_recorded
from dovetail.lowering.site import is_watched
from dovetail.lowering.situation import autocast_off, autocasting

CudaGraphs = Literal["auto"] | bool

# What a module keeps of its parameters, buffers, children and hooks: shared, so that both are one model.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_SHARED = (
    *_HOOKS,
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass(frozen=True, eq=False)
class Form:
    """One capture of the model: modes, numbers and autocast as they were then, and the lowered graph."""

    modes: tuple[Any, ...]
    program: GraphModule
    run: Callable[..., Any]


class CompiledModule(nn.Module):
    """The model with its graph fused and lowered; what `dovetail.compile` returns.

    It shares parameters, buffers and submodules with the model, so that `state_dict`, optimizers and `.to` see one.
    Inputs that no capture so far was made for, another train or eval mode, autocast, and another number or string as
    an attribute of a module capture again, `most` times; then the model itself runs. So it does while another tracer
    looks on, and for a call that cannot be captured after others could. What attributes of other kinds hold (lists,
    configuration objects) is taken as it was.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        dynamic_shapes: Any = None,
        most: int = 8,
        cuda_graphs: CudaGraphs = "auto",
    ) -> None:
        super().__init__()
        self.__dict__["_model"] = model
        self.__dict__.update(
            _recipe=recipe, _dynamic_shapes=dynamic_shapes, _most=most, _cuda_graphs=cuda_graphs
        )
        self._adopt()

    def _adopt(self) -> None:
        model = self._original
        self.__dict__.update({name: model.__dict__[name] for name in _SHARED if name in model.__dict__})
        self.__dict__.pop("training", None)
        self.__dict__.update(_forms=[], _last=None, _warned=False, _busy=None, _lock=threading.RLock())
        self.__dict__.update(_makeup=Makeup(model), _refused=0)

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
    def graphs(self) -> tuple[GraphModule, ...]:
        """The lowered graphs made so far, one for each kind of call; `dovetail.regions` and `explain` take them."""
        return tuple(form.program for form in self.__dict__["_forms"])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ or "_model" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._original, name)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model; calls in it run a capture of that mode."""
        self._original.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._original._apply(fn, recurse)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if (torch.compiler.is_compiling() or is_watched()) and not self._captured_elsewhere():
            return self._original(*args, **kwargs)
        modes = self._modes()
        if modes is None:
            return self._original(*args, **kwargs)
        last: Form | None = self.__dict__["_last"]
        if last is not None and last.modes == modes:
            try:
                return last.run(*args, **kwargs)
            except CallMismatch:  # raised before anything ran
                pass
        return self._called(modes, args, kwargs)

    def _captured_elsewhere(self) -> bool:
        """Whether it is another thread's capture that is being noticed; it is over then.

        While a model is exported its parameters are fake ones, and torch says to every thread that it is compiling.
        """
        busy = self.__dict__["_busy"]
        if busy is None or busy == threading.get_ident():
            return False
        with self.__dict__["_lock"]:
            return True

    def _modes(self) -> tuple[Any, ...] | None:
        """What tells captures of the model as it is from each other; None while its parameters are none.

        Captures of a model of other parts are forgotten.
        """
        state = self.__dict__
        makeup: Makeup = state["_makeup"]
        found = makeup.settings()
        if found is None:
            with state["_lock"]:
                # Another thread's capture may have been under way.
                makeup = state["_makeup"]
                found = makeup.settings()
                if found is None:
                    if makeup.has_stand_ins():
                        return None
                    state["_forms"].clear()
                    state["_last"] = None
                    makeup = state["_makeup"] = Makeup(self._original)
                    found = makeup.settings()
                    assert found is not None
        return (found, autocasting())

    def _called(self, modes: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = self.__dict__
        tried = 0
        while True:
            forms: list[Form] = list(state["_forms"])
            for form in forms[tried:]:
                if form.modes != modes:
                    continue
                try:
                    made = form.run(*args, **kwargs)
                except CallMismatch:
                    continue
                state["_last"] = form
                return made
            tried = len(forms)
            with state["_lock"]:
                if len(state["_forms"]) != tried:  # another thread may have met the same call first
                    continue
                try:
                    form = self.specialise(args, kwargs)
                except CaptureError as error:
                    if not tried or state["_recipe"].options.strict:
                        raise
                    form, refused = None, error
                else:
                    refused = None
            break
        if form is not None:
            try:
                return form.run(*args, **kwargs)
            except CallMismatch:  # it does not take what it was captured with
                pass
        self._captured_elsewhere()
        # Where the call cannot be made at all, the model's own error tells.
        made = self._original(*args, **kwargs)
        if refused is not None:
            state["_refused"] += 1
            warnings.warn(
                f"a call runs the model as it is, for it cannot be captured: {refused}", stacklevel=4
            )
        return made

    def specialise(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
    ) -> Form | None:
        """Capture and lower for calls like this one; None once there are as many as there may be."""
        state = self.__dict__
        with state["_lock"]:
            if len(state["_forms"]) + state["_refused"] >= state["_most"]:
                if not state["_warned"]:
                    state["_warned"] = True
                    warnings.warn(
                        f"the model was called in more than {state['_most']} ways; further ones run as they are. "
                        f"Give dynamic_shapes, or more `specialisations`.",
                        stacklevel=4,
                    )
                return None
            self._modes()  # forgets captures of what the model was
            state["_busy"] = threading.get_ident()
            try:
                with _fresh_casts():
                    graph = capture(
                        _without_hooks(self._original),
                        args,
                        dict(kwargs or {}),
                        dynamic_shapes=state["_dynamic_shapes"],
                    )
            finally:
                state["_busy"] = None
            # Afterwards: a model may note something on itself the first time it runs.
            modes = self._modes() or ((), ())
            with autocast_off():
                program = cast("Recipe", state["_recipe"])(graph)
                run = self._run(program, (args, kwargs))
            form = state["_last"] = Form(modes, program, _with_casts_made(run, modes))
            state["_forms"].append(form)
            return form

    def _run(self, program: GraphModule, example: Any) -> Callable[..., Any]:
        """What a call of a form runs: its graph, recorded on a GPU where nothing prevents it."""
        wanted = self.__dict__["_cuda_graphs"]
        if wanted is False:
            return program.forward
        reason = why_not_recorded(program, pytree.tree_leaves(example))
        if reason is None:
            return Replay(program.forward, program)
        if wanted is True:
            raise InvalidArgument(f"cuda_graphs=True, but {reason}.")
        lowering = lowering_of(program)
        if lowering is not None and reason != NO_GPU:
            lowering.note("", "cuda_graphs", "declined", reason)
        return program.forward

    @property
    def _options(self) -> tuple[Any, Any, Any, Any]:
        state = self.__dict__
        return state["_recipe"], state["_dynamic_shapes"], state["_most"], state["_cuda_graphs"]

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        model = copy.deepcopy(self._original, memo)
        made = _restored(model, *self._options, [])
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        forms = [(form.modes, form.program) for form in self.__dict__["_forms"]]
        return _restored, (self._original, *self._options, forms)

    def __repr__(self) -> str:
        return f"CompiledModule({self._original!r})"

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._original)})


@contextmanager
def _fresh_casts() -> Generator[None]:
    """Let autocast keep no casts of weights: those made of fake ones must not be met later."""
    was = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)


def _with_casts_made(run: Callable[..., Any], modes: tuple[Any, ...]) -> Callable[..., Any]:
    """What a form runs: where it was captured under autocast the casts are in its graph, and none are to be added."""
    if not modes[1]:
        return run

    def cast_already(*args: Any, **kwargs: Any) -> Any:
        with autocast_off():
            return run(*args, **kwargs)

    return cast_already


def _without_hooks(model: nn.Module) -> nn.Module:
    """The same model, with none of its own forward hooks: those run around each call, not inside the graph."""
    made = type(model).__new__(type(model))
    made.__dict__.update(model.__dict__)
    made.__dict__.update({name: OrderedDict() for name in _HOOKS if name in model.__dict__})
    return made


def _restored(
    model: nn.Module, recipe: Recipe, dynamic: Any, most: int, cuda_graphs: CudaGraphs, forms: Any
) -> CompiledModule:
    made = CompiledModule(model, recipe, dynamic_shapes=dynamic, most=most, cuda_graphs=cuda_graphs)
    made.__dict__["_forms"] = [
        Form(modes, program, _with_casts_made(program.forward, modes)) for modes, program in forms
    ]
    return made
