"""`dovetail.compile`: a model is captured, fused and lowered, and called as before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from dovetail.errors import InvalidArgument, checked_call
from dovetail.frontend.export import require_dynamic_shapes
from dovetail.frontend.model_copy import refuse_scripted
from dovetail.ir.weight_guard import CHECK_INTERVAL
from dovetail.lowering.backend_protocol import DEFAULT, Backend, BackendChain, Backends, resolve
from dovetail.lowering.options import Granularity, Options
from dovetail.passes.pass_manager import Pass
from dovetail.rules.rule import Rules
from dovetail.runtime.bundle import OpenBundle
from dovetail.runtime.capture_cache import CudaGraphs
from dovetail.runtime.compiled_module import CompiledModule
from dovetail.runtime.group_call import RANK_TIMEOUT, GroupCall, require_rank_timeout
from dovetail.runtime.group_compile import GroupCompile
from dovetail.runtime.presets import (
    CompilePreset,
    GraphPlan,
    PlanPath,
    as_pipeline,
    as_plan,
    default_pipeline,
)

_BUNDLED = ("verify", "granularity", "smallest", "timeout", "weight_check_interval")
"""The options of lowering that a bundle has."""


@checked_call(mode="`backends` with their options", fullgraph="on_error='raise'", strict="on_error='raise'")
def compile(
    model: nn.Module,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    backends: Backends | None = None,
    rules: Rules | None = None,
    pipeline: Pass | Sequence[Pass] | None = None,
    plan: Mapping[str, BackendChain] | GraphPlan | PlanPath | None = None,
    dynamic: bool | None = None,
    dynamic_shapes: Mapping[str, Any] | Sequence[Any] | None = None,
    on_error: Literal["fallback", "raise"] = "fallback",
    verify: bool = False,
    granularity: Granularity = "outer",
    smallest: int = 2,
    recompile_limit: int | None = None,
    timeout: float | None = None,
    cache: bool | str | Path = True,
    cuda_graphs: CudaGraphs = "auto",
    weight_check_interval: int | None = CHECK_INTERVAL,
    check_capture: bool = True,
    bundle: str | os.PathLike[str] | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    rank_timeout: float = RANK_TIMEOUT,
) -> CompiledModule:
    """Return the model captured, fused and lowered: called as it is, with the same parameters.

    With example inputs the work is done now for calls like them, otherwise in the first call. Sizes that differ in a
    later call are symbolic in the next capture (`dynamic=True`: all, at once; False: none; sizes marked by
    `torch._dynamo.mark_dynamic`, and those that `dynamic_shapes` names as for `torch.export`, at once). Any other
    difference, such as the train or eval mode, is captured when it comes, at most `recompile_limit` times (None: that
    of `dovetail.config`); then, and where a model cannot be captured, the model runs as it is, unless `on_error` is
    "raise". Each such event is a warning of the logger `dovetail`, and listed by `explain`. Methods of the model that
    call it, such as `generate`, run compiled code. `rules` are fused before repeated blocks are made one body each;
    `pipeline` replaces all passes. A `plan`, a `dovetail.Plan` or the path of one, decides passes, regions and backends
    as they were measured, without measuring anything; what it does not know follows the defaults and `backends`. With `cuda_graphs` "auto", calls without gradients on a GPU are recorded and
    replayed as one where nothing prevents it; the ledger has the reason where something does. With `check_capture`
    each graph is compared with the model on the inputs it was captured with; if they differ the model's own
    forward runs, with a warning, or CaptureMismatch is raised with `on_error="raise"`. A `bundle`, the path of what
    `dovetail.bundle` wrote, has graphs and code of the model: nothing is traced or compiled for calls that it covers,
    others are compiled as those were. It is executed, so open only those that you trust; BundleMismatch has what
    differs where it was written for another machine or model. With a `process_group`, one of `torch.distributed`, all
    ranks of which call this, rank 0 decides and compiles, and the others take its plan, graph and code through the
    group's store, without any collective; pickles of the other ranks are executed. A rank waits for rank 0 at most
    `rank_timeout` seconds; then it compiles by rank 0's plan, or by its own arguments, which all ranks then follow.
    The rest is for `lower`.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"compile takes a module, not a {type(model).__name__}.")
    if isinstance(model, CompiledModule):
        raise InvalidArgument("the model is compiled already; compile the model it was made from.")
    if args is None and kwargs is not None:
        args = ()
    if kwargs is not None and not isinstance(kwargs, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"kwargs must be a dict of example inputs, not a {type(kwargs).__name__}.")
    # Before what only some ranks may refuse, so that all of them number their calls alike.
    call = None
    if process_group is not None:
        call = GroupCall(process_group, "compile", model, args, kwargs, seconds=rank_timeout)
    _checked_dynamic(dynamic, dynamic_shapes)
    refuse_scripted(model)
    graph_plan, by_body = as_plan(plan)
    options = Options.pick({**locals(), "plan": by_body})
    # The limit is on captures; each may still be called with gradients and without.
    per_capture = replace(options, recompile_limit=None)
    require_rank_timeout(rank_timeout)
    opened = None
    if bundle is None:
        preset, chain = make_preset(
            per_capture, backends=backends, rules=rules, pipeline=pipeline, plan=graph_plan
        )
    else:
        decided = {"backends": backends, "rules": rules, "pipeline": pipeline, "plan": plan}
        given = [name for name, value in decided.items() if value is not None]
        given += [name for name in _BUNDLED if getattr(options, name) != getattr(Options(), name)]
        given += [] if process_group is None else ["process_group"]
        if given:
            raise InvalidArgument(
                f"give a bundle or {given[0]}: a bundle has what was decided for its model."
            )
        opened = OpenBundle(bundle, cache, on_error)
        preset, chain = opened.preset, ()
    is_named = dynamic is not None or dynamic_shapes is not None
    if not isinstance(cuda_graphs, (str, bool)) or cuda_graphs not in ("auto", True, False):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"cuda_graphs {cuda_graphs!r}; give 'auto', True or False.")
    if not isinstance(check_capture, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"check_capture {check_capture!r}; give True or False.")
    arguments: dict[str, Any] = {
        "preset": preset,
        "dynamic_shapes": dynamic_shapes if is_named or graph_plan is None else graph_plan.dynamic_shapes,
        "dynamic": dynamic,
        "recompile_limit": recompile_limit,
        "cuda_graphs": cuda_graphs,
        "check_capture": check_capture,
    }
    if args is not None:
        _warm(chain)
    if call is None:
        compiled = CompiledModule(model, **arguments, cache=cache, bundle=opened)
        if args is not None:
            compiled.specialize(args, kwargs)
        return compiled
    group = GroupCompile(call, cache, on_error)
    compiled = CompiledModule(model, **group.agree(arguments), cache=cache)
    group.specialize(compiled, args, kwargs)
    return compiled


def _checked_dynamic(dynamic: Any, dynamic_shapes: Any) -> None:
    if dynamic is not None and not isinstance(dynamic, bool):
        raise InvalidArgument(
            f"dynamic {dynamic!r}; give True, False, or None for sizes that change between calls."
        )
    require_dynamic_shapes(dynamic_shapes)
    if dynamic is not None and dynamic_shapes is not None:
        raise InvalidArgument("give `dynamic` or `dynamic_shapes`: the latter names the dynamic sizes.")


def make_preset(
    options: Options,
    *,
    backends: Any = None,
    rules: Any = None,
    pipeline: Any = None,
    plan: GraphPlan | None = None,
) -> tuple[CompilePreset, tuple[Backend, ...]]:
    """Return what `compile` does to every graph, and all backends in it."""
    if rules is not None and pipeline is not None:
        raise InvalidArgument("give `rules` or a `pipeline`: rules of a pipeline are in its `Fuse` passes.")
    if plan is not None and (rules is not None or pipeline is not None):
        other = "rules" if rules is not None else "a pipeline"
        raise InvalidArgument(
            f"give a plan or {other}: a plan has the passes and the regions that were measured."
        )
    chain, preference = _backends(backends)
    passes = default_pipeline(chain, rules) if pipeline is None else as_pipeline(pipeline)
    return CompilePreset(passes, preference, options, plan), chain


def _backends(backends: Any) -> tuple[tuple[Backend, ...], Any]:
    """Return all backends, and the preference for `lower`."""
    if backends is None:
        backends = DEFAULT
    if isinstance(backends, Mapping):
        by_key = {key: resolve(value) for key, value in backends.items()}
        return tuple(b for chain in by_key.values() for b in chain), by_key
    if isinstance(backends, (list, tuple)) and not backends:
        return (), []
    chain = resolve(backends)
    return chain, chain


def _warm(backends: tuple[Backend, ...]) -> None:
    """Let backends start what they always need before the model is captured; failures show when compiling."""
    for backend in backends:
        with contextlib.suppress(Exception):
            backend.warm()
