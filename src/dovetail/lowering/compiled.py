"""A model whose calls run lowered graphs: called, trained, saved and moved as the model is."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

from torch import nn
from torch.fx import GraphModule

from dovetail.lowering.forms import HOOKS, CudaGraphs, Forms, Recipe

# What a module keeps of its parameters, buffers, children and hooks: shared, so that both are one model.
_SHARED = (
    *HOOKS,
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


class CompiledModule(nn.Module):
    """The model with its graph fused and lowered; what `dovetail.compile` returns.

    It shares parameters, buffers and submodules with the model, so that `state_dict`, optimizers and `.to` see one.
    Inputs that no capture so far was made for, another train or eval mode, autocast, and another number or string as
    an attribute of a module capture again, `most` times; then the model's own forward runs. So it does while another
    tracer looks on, and for a call that cannot be captured after others could. What attributes of other kinds hold
    (lists, configuration objects) is taken as it was.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        dynamic_shapes: Any = None,
        most: int = 8,
        cuda_graphs: CudaGraphs = "auto",
        check_capture: bool = False,
    ) -> None:
        super().__init__()
        self.__dict__.update({name: model.__dict__[name] for name in _SHARED if name in model.__dict__})
        self.__dict__.pop("training", None)
        forms = Forms(
            model,
            recipe,
            dynamic_shapes=dynamic_shapes,
            most=most,
            cuda_graphs=cuda_graphs,
            check_capture=check_capture,
        )
        self.__dict__.update(_model=model, _forms=forms)

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
    def _captures(self) -> Forms:
        return self.__dict__["_forms"]

    @property
    def graphs(self) -> tuple[GraphModule, ...]:
        """The lowered graphs made so far, one for each kind of call; `dovetail.regions` and `explain` take them."""
        return tuple(form.program for form in self._captures.made)

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
        return self._captures.call(args, kwargs)

    def specialise(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        """Capture and lower for calls like this one, unless there are as many captures as there may be."""
        self._captures.specialise(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledModule:
        model = copy.deepcopy(self._original, memo)
        made = _restored(model, *self._captures.options, [], self._captures.check_capture)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        forms = [(form.modes, form.program) for form in self._captures.made]
        return _restored, (self._original, *self._captures.options, forms, self._captures.check_capture)

    def __repr__(self) -> str:
        return f"CompiledModule({self._original!r})"

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._original)})


def _restored(
    model: nn.Module,
    recipe: Recipe,
    dynamic: Any,
    most: int,
    cuda_graphs: CudaGraphs,
    forms: Any,
    check_capture: bool = False,
) -> CompiledModule:
    made = CompiledModule(
        model,
        recipe,
        dynamic_shapes=dynamic,
        most=most,
        cuda_graphs=cuda_graphs,
        check_capture=check_capture,
    )
    made.__dict__["_forms"].adopt(forms)
    return made
