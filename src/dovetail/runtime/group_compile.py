"""`compile` by the ranks of a process group: rank 0 decides, the others take its decisions, graph and code.

What ranks share, each by one decision of the call (`group_call`):

1. The arguments: pipeline, backends, options, plan. Rank 0 proposes its own before it compiles, so that a rank that
   waits for the rest in vain still compiles by rank 0's plan.
2. The bundle of what rank 0 has compiled for the example inputs. A rank for which it does not hold compiles by 1.
3. For each graph that a rank lowers by itself, now or in a later call, the backend of each body. The first rank that
   has lowered it proposes; one that comes later with other choices lowers again by those. Nothing waits here, for ranks
   inside of calls may wait for each other in collectives.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.fx import GraphModule

from dovetail.errors import BundleMismatch, DovetailError
from dovetail.lowering.backend_protocol import Backend, identity, resolve
from dovetail.lowering.failures import Diagnostic, one_line
from dovetail.lowering.lowered_state import lowered_state_of
from dovetail.outlining.region import graph_key, local_name, regions
from dovetail.runtime.bundle import OpenBundle, bundle
from dovetail.runtime.capture_cache import CaptureCache
from dovetail.runtime.capture_entry import BundledCapture
from dovetail.runtime.compiled_module import CompiledModule
from dovetail.runtime.group_call import GroupCall, SharedValue
from dovetail.runtime.module_guard import own_forward
from dovetail.runtime.presets import CompiledGraph, CompilePreset, GraphPlan

_FILE = "rank-0.bundle"
_MOST_PROBLEMS = 3


@dataclass(frozen=True)
class GroupPreset:
    """A preset whose choice of backends is that of all ranks; copies in other processes decide by themselves."""

    preset: CompilePreset
    call: GroupCall

    @property
    def strict(self) -> bool:
        """Whether a call that cannot be captured is an error."""
        return self.preset.strict

    @property
    def plan(self) -> GraphPlan | None:
        """The plan of the preset, if any."""
        return self.preset.plan

    def __call__(self, gm: GraphModule) -> CompiledGraph:
        """Return the lowered graph with the backends that the ranks share for it."""
        name = f"graph/{self._key(gm)}"
        shared, is_own = self.call.read(name), False
        compiled = self.preset(gm) if shared is None else self._by_choices(gm, shared)
        chosen = _choices(compiled)
        if shared is None:
            data = json.dumps(chosen).encode()
            shared = self.call.decide(name, data)
            is_own = shared.data is data
            if json.loads(shared.data) != chosen:
                compiled = self._by_choices(gm, shared)
                chosen = _choices(compiled)
        events = list(compiled.diagnostics)
        if self.call.failure:
            reason = f"the backends of a graph are those of this rank alone: {self.call.failure}"
            events.append(Diagnostic("unshared", reason))
        elif not is_own:
            events.append(_comparison(json.loads(shared.data), chosen, shared.rank))
        return replace(compiled, diagnostics=tuple(events))

    def _key(self, gm: GraphModule) -> str:
        trains = gm.training if self.preset.options.grad is None else self.preset.options.grad
        facts = [graph_key(gm), str(trains), str(torch.is_grad_enabled())]
        return hashlib.sha256("\n".join(facts).encode()).hexdigest()

    def _by_choices(self, gm: GraphModule, shared: SharedValue) -> CompiledGraph:
        """Return the graph lowered with the backends of another rank, so far as they are known here."""
        known = {identity(each): each for each in self._backends()}
        forced: dict[str, list[Backend]] = {}
        for key, name in json.loads(shared.data).items():
            if not name:
                forced[key] = []
            elif name in known:
                forced[key] = [known[name]]
        options = self.preset.options
        preset = replace(self.preset, options=replace(options, plan={**(options.plan or {}), **forced}))
        return preset(gm)

    def _backends(self) -> Iterator[Backend]:
        named = self.preset.backends
        chains = [*named.values()] if isinstance(named, Mapping) else [named]
        for chain in [*chains, *(self.preset.options.plan or {}).values()]:
            yield from resolve(chain)

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_group, (self.preset,)


def _without_group(preset: CompilePreset) -> CompilePreset:
    return preset


def _choices(compiled: CompiledGraph) -> dict[str, str]:
    """Return the identity of the backend that runs each body, by the body's key; "" for its operations as they are."""
    state = lowered_state_of(compiled.program)
    choices: dict[str, str] = {}
    dispatchers = {} if state is None else state.dispatchers()
    for region in regions(compiled.program, nested=True):
        name = local_name(region.name)
        chain = () if state is None else state.assigned.get(name, ())
        entry = dispatchers[name].current_entry() if name in dispatchers else None
        backend = next(iter(chain), None)
        if entry is not None:
            backend = None if entry.compiled is None else entry.compiled.backend
        if backend is not None:
            choices[region.key] = identity(backend)
        else:
            choices.setdefault(region.key, "")
    return choices


def _comparison(shared: Mapping[str, str], chosen: Mapping[str, str], rank: int) -> Diagnostic:
    """Return whether a graph runs by the choices of another rank, with the first difference."""
    if shared == chosen:
        return Diagnostic("shared", f"the backends of a graph are those of rank {rank}")
    if shared.keys() != chosen.keys():
        reason = f"its regions are other ones than those of rank {rank}"
    else:
        key = next(key for key in shared if shared[key] != chosen[key])
        names = [choice or "the operations as they are" for choice in (chosen[key], shared[key])]
        reason = f"the body {key[:12]} is run by {names[0]}, and on rank {rank} by {names[1]}"
    return Diagnostic("unshared", f"a graph does not run as on the other ranks: {reason}")


class GroupCompile:
    """The side of one rank in a call of `compile` that the ranks of a group make."""

    def __init__(
        self, call: GroupCall, cache: bool | str | Path, on_error: Literal["fallback", "raise"]
    ) -> None:
        self.call, self._cache = call, cache
        self._on_error: Literal["fallback", "raise"] = on_error
        self._events: list[Diagnostic] = []
        # Whether rank 0 has decided in time, so that its code can be awaited.
        self._follows = False

    def agree(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `CompiledModule` that all ranks share: those of rank 0, unless it comes late.

        Where the disk cache is, and what an error leads to, is each rank's own affair.
        """
        call, shared, note, data = self.call, None, "", None
        if call.rank != 0:
            shared, note = call.wait("arguments")
        if shared is None:
            data = b""
            try:
                data = pickle.dumps(own)
            except Exception as error:
                note += f"{'; ' if note else ''}they cannot be pickled: {one_line(error)}"
            shared = call.decide("arguments", data, note)
        self._follows = shared.rank == 0 and not call.failure
        arguments = self._arguments(own, shared, is_own=shared.data is data)
        return {**arguments, "preset": GroupPreset(arguments["preset"], call)}

    def _arguments(self, own: dict[str, Any], shared: SharedValue, *, is_own: bool) -> dict[str, Any]:
        rank = shared.rank
        if self.call.failure:
            self._report_unshared(f"{self.call.failure}. It follows its own arguments")
            return own
        if rank != 0:
            self._report_unshared(f"{shared.note}. All ranks follow the arguments of rank {rank}")
        if is_own:
            return own
        try:
            if not shared.data:
                self._report_unshared(
                    f"it follows its own arguments, not those of rank {rank}: {shared.note}"
                )
                return own
            arguments = pickle.loads(shared.data)
        except Exception as error:
            reason = f"cannot be read here: {one_line(error)}"
            self._report_unshared(f"it follows its own arguments, for those of rank {rank} {reason}")
            return own
        preset = cast("CompilePreset", arguments["preset"])
        options = replace(preset.options, cache=self._cache, on_error=self._on_error)
        return {**arguments, "preset": replace(preset, options=options)}

    def _report_unshared(self, reason: str) -> None:
        self._events.append(Diagnostic("unshared", f"rank {self.call.rank} does not follow rank 0: {reason}"))

    def specialize(
        self, compiled: CompiledModule, args: tuple[Any, ...] | None, kwargs: Mapping[str, Any] | None
    ) -> None:
        """Compile for example inputs by what rank 0 has compiled; by itself where that does not hold here."""
        captures = cast("CaptureCache", cast("Any", compiled)._captures)
        try:
            if args is not None and self.call.rank == 0 and self.call.read("code") is None:
                self._compile_and_send(compiled, args, kwargs)
            elif args is not None and not self._receive(captures, args, kwargs or {}):
                compiled.specialize(args, kwargs)
        finally:
            for event in self._events:
                captures.diagnostics.report(event.kind, event.message)

    def _compile_and_send(
        self, compiled: CompiledModule, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> None:
        """Compile, and let the other ranks have the bundle, or why there is none."""
        try:
            compiled.specialize(args, kwargs)
        except BaseException as error:
            self.call.decide("code", b"", f"it raised {one_line(error)}")
            raise
        if not self._follows or self.call.size == 1:
            return
        data, note = b"", ""
        try:
            with tempfile.TemporaryDirectory() as folder:
                data = bundle(compiled, Path(folder) / _FILE).read_bytes()
        except (DovetailError, OSError) as error:
            note = f"it cannot be sent: {one_line(error).removesuffix('.')}"
        self.call.decide("code", data, note)

    def _receive(self, captures: CaptureCache, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Take over what rank 0 has compiled; return whether that covers the example inputs."""
        if not self._follows:
            return False
        shared, reason = self.call.wait("code")
        if shared is not None:
            reason = self._open(shared.data, captures, args, kwargs) if shared.data else shared.note
            if self.call.rank != 0:
                self.call.release("code")
        if reason:
            message = (
                f"rank {self.call.rank} compiles by the plan of rank 0, whose code is not used: {reason}"
            )
            self._events.append(Diagnostic("unshared", message))
            return False
        self._events.append(Diagnostic("shared", "graph, code and plan are those of rank 0"))
        return True

    def _open(
        self, data: bytes, captures: CaptureCache, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> str:
        """Take over the captures of a bundle that hold for the model here; return why none does."""
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / _FILE
                path.write_bytes(data)
                received = _ReceivedBundle(OpenBundle(path, self._cache, self._on_error))
        except BundleMismatch as mismatch:
            return _joined(mismatch.problems)
        except (DovetailError, OSError) as error:
            return one_line(error).removesuffix(".")
        captures.bundle = received
        covering = captures.adopt_bundle(args, kwargs)
        captures.bundle = None
        if covering is not None:
            # Sizes that change are then dynamic here in the same call as on rank 0, which has captured this one.
            captures.automatic.observe(own_forward(captures.model), args, kwargs)
            return ""
        return _joined(received.problems) or "its graph does not cover the example inputs here"


def _joined(problems: Sequence[str]) -> str:
    more = f"; and {len(problems) - _MOST_PROBLEMS} more" if len(problems) > _MOST_PROBLEMS else ""
    return "; ".join(problems[:_MOST_PROBLEMS]) + more


class _ReceivedBundle:
    """The captures of a bundle from another rank; `problems` has why others than those yielded do not hold here."""

    def __init__(self, opened: OpenBundle) -> None:
        self.path, self._opened = opened.path, opened
        self.problems: list[str] = []

    def matching(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reasons: list[str],
        *,
        check_capture: bool,
    ) -> Iterator[BundledCapture]:
        """Yield those that hold for the model as it is now; `reasons` stays empty, for the model need not fit."""
        try:
            yield from self._opened.matching(model, args, kwargs, self.problems, check_capture=check_capture)
        except BundleMismatch as mismatch:
            self.problems += mismatch.problems
