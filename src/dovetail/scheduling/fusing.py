"""A module whose forward runs some of the modules in it as one: what `fuse_modules` installs."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from dovetail.errors import CaptureError, ScheduleError
from dovetail.graph.forking import released_by_fork
from dovetail.graph.module import Program
from dovetail.lowering.forms import Forms, Modes
from dovetail.lowering.site import is_watched
from dovetail.scheduling.chains import Chain, Group, chains
from dovetail.scheduling.edits import PartGraph, outlined
from dovetail.scheduling.folding import folded
from dovetail.scheduling.hooks import refuse_hooks
from dovetail.scheduling.recording import Call
from dovetail.scheduling.running import Installed, Steps, plain


class _Captures(Forms):
    """Captures of a module at a path; with `any_size` they hold for other sizes too, unless the model asks for them."""

    def __init__(
        self, module: nn.Module, path: str, recipe: Steps, lock: threading.RLock, *, any_size: bool
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

    def __init__(self, module: nn.Module, path: str, groups: tuple[Group, ...]) -> None:
        super().__init__(module)
        self.path, self.groups = path, groups
        self._ways = [min(paths).split(".") for group in groups for paths in group.paths]
        self._forms: tuple[Forms, Forms] | None = None
        self._trained = False
        # One for both kinds of captures: they are of one module.
        self._lock = released_by_fork(threading.RLock())

    @property
    def programs(self) -> tuple[GraphModule, ...]:
        return tuple(form.program for forms in self._forms or () for form in forms.made)

    @property
    def kept(self) -> Forms:
        """Captures with every norm where it was."""
        return self._made()[0]

    @property
    def folded(self) -> Forms:
        """Captures with norms folded."""
        return self._made()[1]

    def _made(self) -> tuple[Forms, Forms]:
        # Not before it is asked for: a module that is being unpickled has nothing in it yet.
        if self._forms is None:
            twin, steps = plain(self.module), (Steps(self._with_norms), Steps(self._without_norms))
            # Backends make code for the sizes they see.
            any_size = all(group.backend is None for group in self.groups)
            with self._lock:
                kept, without = (_Captures(twin, self.path, s, self._lock, any_size=any_size) for s in steps)
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

    def prepare(self, calls: Iterable[Call]) -> None:
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
