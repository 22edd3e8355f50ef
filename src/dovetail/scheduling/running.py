"""A module whose forward runs graphs: what is installed on a part when a schedule is built."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from dovetail.errors import CallMismatch, CaptureError, DovetailError
from dovetail.lowering.forms import Forms, Modes
from dovetail.lowering.site import is_watched


def plain(module: nn.Module) -> nn.Module:
    """A module that is the given one in everything, attributes set on either included, but runs its own forward.

    What a schedule installs as `forward` on the instance does not show on it.
    """
    cls = type(module)
    own = own_forward(module)

    def forward(self: Any) -> Callable[..., Any]:
        return own if own is not None else cls.forward.__get__(self)

    # Only a data descriptor comes before what an instance has.
    made = type(cls.__name__, (cls,), {"forward": property(forward, _refuse), "__module__": cls.__module__})
    made.__qualname__ = cls.__qualname__
    twin = object.__new__(made)
    object.__setattr__(twin, "__dict__", module.__dict__)
    return twin


def _refuse(self: Any, value: Any) -> None:
    raise AttributeError("forward of a part that is being traced cannot be set")


def own_forward(module: nn.Module) -> Any:
    """What a module's user set as its forward; None where it has that of its class."""
    found = module.__dict__.get("forward")
    while isinstance(at := getattr(found, "__self__", None), Installed):
        found = at.own
    return found


@dataclass(frozen=True)
class Steps:
    """What is done to a new capture of a part: all of its steps again."""

    redo: Callable[[GraphModule], GraphModule]
    strict: bool = False

    def __call__(self, gm: GraphModule) -> GraphModule:
        try:
            return self.redo(gm)
        except CaptureError:
            raise
        except DovetailError as error:
            raise CaptureError(f"steps of the schedule cannot be done for this call: {error}") from error


class Installed(ABC):
    """Something that stands in for a module's forward; `own` is what the module's user had there."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own = own_forward(module)

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What is called as the module's forward; hooks of the module run around it."""

    def install(self) -> None:
        self.module.__dict__["forward"] = self.run

    def remove(self) -> None:
        if self.own is None:
            self.module.__dict__.pop("forward", None)
        else:
            self.module.__dict__["forward"] = self.own


def _modes_of(module: nn.Module) -> list[bool]:
    """The modes of a module and of those in it; a graph has those it was captured with."""
    return [m.training for m in module.modules() if not isinstance(m, GraphModule) or m is module]


class Running(Installed):
    """Calls of one part: its graphs, one for each call signature, and for other calls new ones made alike.

    Where its steps cannot be done for a call, the module's own forward runs, with a warning.
    """

    def __init__(self, module: nn.Module, steps: Steps) -> None:
        super().__init__(module)
        self.steps = steps
        self._forms: Forms | None = None

    @property
    def forms(self) -> Forms:
        """Made when first asked for: a module that is being unpickled has nothing in it yet."""
        if self._forms is None:
            self._forms = Forms(plain(self.module), self.steps, cuda_graphs=False)
        return self._forms

    def adopt(self, programs: list[tuple[Modes | None, GraphModule]]) -> None:
        """Run graphs that were made already, each with the modes it is for; None is the module as it is now."""
        now = self.forms.modes()
        self.forms.adopt([(now or ((), ()) if modes is None else modes, gm) for modes, gm in programs])

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or is_watched():
            return self._traced(*args, **kwargs)
        return self.forms.call(args, kwargs)

    def _traced(self, *args: Any, **kwargs: Any) -> Any:
        """A call that another tracer looks at: a graph that fits, whose operations it sees."""
        for form in self.forms.made:
            if _modes_of(form.program) == _modes_of(self.module):
                try:
                    return form.program.forward(*args, **kwargs)
                except CallMismatch:
                    continue
        return self.forms.model.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Running:
        # The copy's parameters are others: it captures anew, and calls what was copied with it.
        return Running(copy.deepcopy(self.module, memo), copy.deepcopy(self.steps, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return Running, (self.module, self.steps)
