"""What must hold of every captured model: it is refused in words of ours, or does all that the model does."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.fx import GraphModule

import dovetail
from dovetail.ir.weight_guard import is_dense

from .observe import Snapshot, difference, loose_difference, observe
from .program import Case, NotAProgram, make_inputs
from .properties import Outcome, Violated
from .units import given, maker


def verify_capture(case: Case) -> Outcome:
    """Raise Violated unless the captured graph of a model does in two calls what the model does, or is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _verified(case)


def _verified(case: Case) -> Outcome:
    outcome = Outcome(stages=1)
    inputs = make_inputs(case.program)
    make = maker(case)
    twin, model = make(), make()

    def caller(target: Any) -> Any:
        def call(*values: Any) -> Any:
            args, kwargs = given(case, list(values))
            return target(*args, **kwargs)

        return call

    expected = observe(caller(twin), Snapshot(twin), inputs, runs=2, gradients=True)
    if expected[-1].error:
        raise NotAProgram(expected[-1].error)
    state = Snapshot(model)
    args, kwargs = given(case, make_inputs(case.program))
    try:
        graph = dovetail.capture(model, args, kwargs)
    except dovetail.DovetailError as error:
        outcome.refused.append(type(error).__name__)
        again = observe(caller(model), state, inputs, runs=2, gradients=True)
        which, words = difference(expected, again, gradients=True, aliasing=False)
        if which:
            raise Violated(f"a refused capture changed the model: {which}", words) from error
        return outcome
    except Exception as error:
        raise Violated(f"crash in capture ({type(error).__name__})", str(error)) from error
    got = observe(caller(graph), state, inputs, runs=2, gradients=True)
    which, words = difference(expected, got, gradients=True, aliasing=False)
    if which and _writes_inputs_with_gaps(graph):
        # What reads the new value reads it dense, and a reduction adds that up in another order.
        which, words = loose_difference(expected, got, gradients=True, rtol=1e-6, atol=1e-7)
    if which:
        raise Violated(f"capture: {which}", words)
    outcome.regions = 1
    return outcome


def _writes_inputs_with_gaps(graph: GraphModule) -> bool:
    writes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    targets = [node.args[0] for node in writes]
    targets = [n.args[0] if n.target is torch.ops.aten.detach.default else n for n in targets]
    return any(n.op == "placeholder" and not is_dense(n.meta["val"]) for n in targets)
