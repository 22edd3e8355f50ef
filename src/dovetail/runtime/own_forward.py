"""Calls that the model's own forward runs, or torch.compile of it, although the model was captured.

A plan chooses these where they were measured to be faster than any lowered graph. The input guard of the captured graph
still decides which calls they are for: another call raises CallMismatch before anything runs, and the next capture is
tried. Autocast is the caller's: casts are part of the captured graph, but not of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import SymInt, Tensor, nn
from torch.fx import GraphModule

from dovetail.errors import CallMismatch, LoweringError
from dovetail.frontend.calling_convention import convention_of
from dovetail.frontend.check_capture import copy_inputs, preserve_module_state

RunModel = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]


class GuardedForward:
    """Runs a model by its own forward, for calls that a captured graph of it covers."""

    def __init__(self, program: GraphModule, run_model: RunModel) -> None:
        convention = convention_of(program)
        # A graph that another tool traced has no input guard.
        self._check = None if convention is None else convention.guard(program)
        self._run_model = run_model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._check is not None:
            self._check(*args, **kwargs)
        return self._run_model(args, kwargs)


class TorchCompiledForward(GuardedForward):
    """Runs torch.compile of a model's own forward, for calls that a captured graph of it covers.

    It is compiled in the first call, which `warm` does with sample inputs. If that fails, the failure is passed to
    `report`, and the model's own forward runs from then on; with `strict` it is raised.
    """

    def __init__(
        self,
        program: GraphModule,
        run_model: RunModel,
        forward: Callable[..., Any],
        report: Callable[[str], None],
        strict: bool,
    ) -> None:
        super().__init__(program, run_model)
        # Each capture has code of its own, so that what it has static need not become dynamic with the next one.
        self._compiled: Any = torch.compile(forward, dynamic=None if _has_symbols(program) else False)
        self._report, self._strict = report, strict
        from torch._dynamo.exc import TorchDynamoException

        self._errors = TorchDynamoException

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._check is not None:
            self._check(*args, **kwargs)
        if self._compiled is None:
            return self._run_model(args, kwargs)
        try:
            return self._compiled(*args, **kwargs)
        except self._errors as error:
            # Dynamo raises before the frame that it cannot compile runs.
            self._fall_back(error)
            return self._run_model(args, kwargs)

    def warm(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Compile by a call with copies of these inputs; the state of the model is as it was afterwards."""
        try:
            inputs, keywords = copy_inputs(args, kwargs)
            with preserve_module_state(model):
                self._compiled(*inputs, **keywords)
        except Exception as error:
            self._fall_back(error)

    def _fall_back(self, error: Exception) -> None:
        # The first line of Dynamo's errors has the name of the backend, the second one the cause.
        reason = f"{type(error).__name__}: {' '.join(str(error).split(chr(10))[:2])}"
        if self._strict:
            raise LoweringError("", "torch.compile", reason) from error
        self._compiled = None
        self._report(
            f"torch.compile, which the plan has for the model, failed, and the model's own forward runs: {reason}"
        )


def _has_symbols(program: GraphModule) -> bool:
    values = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")]
    return any(
        isinstance(value, SymInt)
        or (isinstance(value, Tensor) and any(isinstance(size, SymInt) for size in value.shape))
        for value in values
    )


def covers(program: GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a graph was captured for calls like this one."""
    convention = convention_of(program)
    try:
        if convention is not None:
            convention.guard(program)(*args, **kwargs)
    except CallMismatch:
        return False
    return True
