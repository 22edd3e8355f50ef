"""Bundles: a compiled model in one file, so that another process starts without tracing, fusing or compiling it.

A bundle has the lowered graph of every capture without the weights, what each trace depended on, the code of every
body, and how further captures are to be compiled. It is a zip file of objects named by their SHA-256, and a manifest
that has the machine it is for. Opening it checks the digests, compares the machine, and puts the code into the disk
cache, where lowering looks for it; a capture is used if all that its trace depended on is the same for this model.

**Trust.** A bundle has machine code and pickles, both of which are executed. Open only those that you would run as a
program.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import pickle
import platform
import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn
from torch.fx import GraphModule

from dovetail.errors import (
    BundleMismatch,
    CaptureMismatch,
    DovetailError,
    InvalidArgument,
    InvalidFile,
    SaveError,
    checked_call,
)
from dovetail.formats.atomic_write import atomic_replace, resolve_target
from dovetail.frontend.capture import compare_with_model
from dovetail.frontend.trace_dependencies import TraceRecord, differences
from dovetail.frontend.value_state import Undescribable
from dovetail.ir.tensor_spec import Specialization
from dovetail.lowering.backend_protocol import Backend, identity, package_version
from dovetail.lowering.cache import (
    device_identities,
    devices_of,
    open_cache,
    portable_key,
    precision,
    processor,
)
from dovetail.lowering.compile_region import stored_form
from dovetail.lowering.lower import compile_all
from dovetail.lowering.lowered_state import LoweredState, lowered_state_of
from dovetail.outlining.region import local_name, regions
from dovetail.runtime.capture_cache import CaptureCache
from dovetail.runtime.capture_entry import BundledCapture, CaptureOrigin
from dovetail.runtime.compiled_module import CompiledModule
from dovetail.runtime.own_forward import covers
from dovetail.runtime.presets import ALL_CALLS, CompiledGraph, CompilePreset, Execution, GradientGuard
from dovetail.runtime.stored_captures import dump_graph, load_graph, tracing_context

_LOG = logging.getLogger("dovetail")
_FORMAT = 1
_MANIFEST, _OBJECTS = "manifest.json", "objects/"
_LARGEST_MANIFEST = 64 * 2**20
_FIELDS = {"devices": list, "machine": dict, "backends": dict, "captures": list, "preset": str, "code": dict}
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Capture:
    """One capture of a bundle: `specializations` are those that regions have code for, by their local names.

    `captured` is the graph before passes and lowering, which is compared with the model. `context` is that of the trace.
    """

    record: TraceRecord
    context: list[Any]
    captured: bytes
    graph: bytes
    execution: Execution
    cuda_graphs: bool | None
    specializations: list[tuple[str, Specialization]]
    gradients: GradientGuard = ALL_CALLS


@dataclass
class _Writer:
    """The objects of a bundle, each once, by their digests."""

    objects: dict[str, bytes] = field(default_factory=dict[str, bytes])

    def add(self, data: bytes) -> str:
        digest = hashlib.sha256(data).hexdigest()
        self.objects[digest] = data
        return digest

    def write(self, manifest: Mapping[str, Any], path: Path) -> None:
        with (
            atomic_replace(path) as written,
            zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file,
        ):
            file.writestr(_MANIFEST, json.dumps(manifest, indent=1))
            for digest, data in self.objects.items():
                file.writestr(_OBJECTS + digest, data)


@checked_call()
def bundle(compiled: CompiledModule, path: str | os.PathLike[str]) -> Path:
    """Write a compiled model to a file that `compile(model, ..., bundle=path)` starts from, and return its path.

    It has the graphs of all calls so far and their code, not the weights. A body whose backend cannot save its code is
    compiled again by the process that opens the bundle, which is logged. SaveError is raised for a model whose trace
    depends on something that cannot be compared with another process, such as the environment or an opaque global.
    Opening a bundle executes it: open only those that you would run as a program.
    """
    if not isinstance(compiled, CompiledModule):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"bundle takes what `compile` returned, not a {type(compiled).__name__}.")
    target = resolve_target(path)
    captures, model = (
        cast("CaptureCache", cast("Any", compiled)._captures),
        cast("nn.Module", cast("Any", compiled)._original),
    )
    if not captures.captures:
        raise InvalidArgument(
            "the compiled model has no graphs yet: call it, or give example inputs to `dovetail.compile`."
        )
    if captures.stored.store is None:
        raise InvalidArgument(
            "a bundle needs the record of what the model's trace read, which is kept with the disk cache: compile with "
            "cache=True, or a folder that can be written and that others cannot write to."
        )
    writer, code = _Writer(), dict[str, str]()
    stored: list[str] = []
    backends: dict[str, str] = {}
    devices: set[str] = set()
    for entry in captures.captures:
        origin = entry.origin
        if origin.record is None:
            raise SaveError(f"the capture cannot be checked by another process: {origin.reason}.")
        captured = origin.captured()
        if captured is None:
            raise SaveError("the captured graph is not in the disk cache any more; compile the model again.")
        state = lowered_state_of(entry.program)
        specializations = (
            [] if state is None else list(_code_of(state, code, backends, writer, captures.stored.store))
        )
        devices |= {device.type for device in devices_of(entry.program)}
        try:
            graph = dump_graph(entry.program, model)
            decided = entry.execution, entry.cuda_graphs
            capture = _Capture(
                origin.record, origin.context, captured, graph, *decided, specializations, entry.gradients
            )
            stored.append(writer.add(pickle.dumps(capture)))
        except Exception as error:
            raise SaveError(f"the graph cannot be written: {type(error).__name__}: {error}") from error
    try:
        preset = writer.add(pickle.dumps(captures.preset))
    except Exception as error:
        raise SaveError(
            f"rules, passes or backends that the model was compiled with cannot be pickled: {type(error).__name__}: {error}"
        ) from error
    kind = type(model)
    manifest = {
        "format": _FORMAT,
        "model": f"{kind.__module__}.{kind.__qualname__}",
        "devices": sorted(devices),
        "machine": machine(devices),
        "backends": backends,
        "captures": stored,
        "preset": preset,
        "code": code,
    }
    writer.write(manifest, target)
    size = target.stat().st_size / 2**20
    _LOG.info(
        "bundle '%s': %d captures, the code of %d bodies, %.1f MiB", target, len(stored), len(code), size
    )
    return target


def _code_of(
    state: LoweredState, code: dict[str, str], backends: dict[str, str], writer: _Writer, store: Any
) -> Iterator[tuple[str, Specialization]]:
    """Add the code of all regions to the objects; yield the specializations that each region has code for."""
    for name, dispatcher in state.dispatchers().items():
        for specialization, entry in list(dispatcher.entries.items()):
            if entry.compiled is None:
                continue
            backend = entry.compiled.backend
            backends[backend.name] = identity(backend)
            yield name, specialization
            key = portable_key(dispatcher.unit, backend, specialization)
            if key in code:
                continue
            data = _saved(backend, entry.compiled.run, store.read(store.local_key(key)))
            if data is None:
                _LOG.warning(
                    "the code of '%s' for region '%s' cannot be saved, and will be compiled again",
                    backend.name,
                    name,
                )
            else:
                code[key] = writer.add(data)


def _saved(backend: Backend, run: Any, stored: bytes | None) -> bytes | None:
    if stored is not None or not backend.can_save:
        return stored
    try:
        return stored_form(backend.save(run), is_tried=False)
    except Exception as error:
        _LOG.info("'%s' cannot save its code: %s", backend.name, error)
        return None


def machine(devices: Iterable[str]) -> dict[str, Any]:
    """Return what must be the same where a bundle for some types of devices is opened, by name."""
    has_gpu = torch.cuda.is_available()
    present = [torch.device(kind) for kind in devices if kind != "cuda" or has_gpu]
    settings = {f"torch setting {name}": str(value) for name, value in precision().items()}
    return {
        "dovetail": package_version("dovetail"),
        "torch": torch.__version__,
        "python": f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]}",
        "platform": f"{sys.platform} {platform.machine()}",
        "processor": " ".join(processor()),
        "devices": ", ".join(device_identities(present)),
        "threads": torch.get_num_threads(),
        **settings,
    }


class OpenBundle:
    """A bundle whose digests and machine were checked."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        cache: bool | str | Path,
        on_error: Literal["fallback", "raise"] = "fallback",
    ) -> None:
        if not isinstance(path, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"bundle {path!r}; give the path of what `dovetail.bundle` wrote.")
        self.path = path
        store = open_cache(cache)
        if store is None:
            raise InvalidArgument(
                "the code of a bundle is put into the disk cache: give cache=True, or a folder that can be written and that "
                "others cannot write to."
            )
        self._store = store
        self._options: dict[str, Any] = {"cache": cache, "on_error": on_error}
        try:
            with zipfile.ZipFile(path) as file:
                self.manifest = self._read_manifest(file)
                self._require_machine()
                self._code = {key: self._bytes(file, digest) for key, digest in self.manifest["code"].items()}
                preset = self._object(file, self.manifest["preset"], CompilePreset)
                self._captures = [
                    self._object(file, digest, _Capture) for digest in self.manifest["captures"]
                ]
        except DovetailError:
            raise
        except OSError as error:
            raise InvalidFile(path, f"cannot be read: {error.strerror or error}.") from error
        except (ImportError, AttributeError) as error:
            raise InvalidFile(
                path,
                f"needs code that is not here: {error}. Rules, passes and backends that a model was compiled with have to be "
                f"importable under the same names.",
            ) from error
        except Exception as error:
            raise InvalidFile(
                path, f"is not a bundle, or damaged: {type(error).__name__}: {error}."
            ) from error
        self.preset = replace(preset, options=replace(preset.options, **self._options))

    def _read_manifest(self, file: zipfile.ZipFile) -> dict[str, Any]:
        if file.getinfo(_MANIFEST).file_size > _LARGEST_MANIFEST:
            raise InvalidFile(self.path, "has a manifest that is too large.")
        try:
            manifest = json.loads(file.read(_MANIFEST))
        except ValueError as error:
            raise InvalidFile(self.path, f"has a manifest that is not JSON: {error}.") from error
        fields = cast("dict[str, Any]", manifest) if isinstance(manifest, dict) else {}
        number = fields.get("format")
        if type(number) is int and number > _FORMAT:
            raise InvalidFile(
                self.path, f"has version {number} of the format, and this dovetail reads {_FORMAT}."
            )
        if number != _FORMAT or any(type(fields.get(name)) is not kind for name, kind in _FIELDS.items()):
            raise InvalidFile(self.path, "is not a bundle.")
        return fields

    def _object(self, file: zipfile.ZipFile, digest: str, kind: type[_T]) -> _T:
        value = pickle.loads(self._bytes(file, digest))
        if not isinstance(value, kind):
            raise InvalidFile(self.path, f"has a {type(value).__name__} in place of a {kind.__name__}.")
        return value

    def _bytes(self, file: zipfile.ZipFile, digest: str) -> bytes:
        data = file.read(_OBJECTS + digest)
        if hashlib.sha256(data).hexdigest() != digest:
            raise InvalidFile(self.path, f"is damaged: the object {digest[:12]} has another digest.")
        return data

    def _require_machine(self) -> None:
        """Raise BundleMismatch if this machine, or a setting of torch, is not as where the bundle was written."""
        here = machine(self.manifest["devices"])
        there: dict[str, Any] = self.manifest["machine"]
        other = [
            f"{name} is {here.get(name)!r}, and was {there.get(name)!r} where it was written"
            for name in {**there, **here}
            if here.get(name) != there.get(name)
        ]
        if other:
            raise BundleMismatch(self.path, other)

    def matching(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reasons: list[str],
        *,
        check_capture: bool,
    ) -> Iterator[BundledCapture]:
        """Yield the graphs of the captures, not yielded before, whose traces depended on nothing that differs now.

        With `check_capture`, only those that cover the call, compared with the model. Their code is loaded. What differs for
        others is appended to `reasons`.
        """
        for capture in list(self._captures):
            other = _differences(capture, model, (args, kwargs))
            if not other and check_capture:
                graph = load_graph(capture.captured, model)
                if not covers(graph, args, kwargs):
                    continue
                other = _mismatch(graph, model, args, kwargs)
            if other:
                reasons += other
                continue
            self._captures.remove(capture)
            program = load_graph(capture.graph, model)
            state = lowered_state_of(program)
            if state is not None:
                state.options = replace(state.options, **self._options)
                self._require_backends(state)
                self._load_code(program, state, capture.specializations)
            decided = capture.execution, capture.cuda_graphs
            compiled = CompiledGraph(program, *decided, gradients=capture.gradients)
            origin = CaptureOrigin(
                capture.record, "", capture.context, functools.partial(getattr, capture, "captured")
            )
            yield BundledCapture(compiled, origin)

    def _require_backends(self, state: LoweredState) -> None:
        here = {backend.name: identity(backend) for chain in state.assigned.values() for backend in chain}
        other = [
            f"backend {name!r} is {here[name]!r}, and was {was!r}"
            for name, was in self.manifest["backends"].items()
            if here.get(name, was) != was
        ]
        if other:
            raise BundleMismatch(self.path, other)

    def _load_code(
        self, program: GraphModule, state: LoweredState, specializations: list[tuple[str, Specialization]]
    ) -> None:
        by_name = {local_name(region.name): region for region in regions(program, nested=True)}
        jobs = [
            (state.dispatcher(by_name[name], state.assigned[name]), specialization)
            for name, specialization in specializations
        ]
        # Only code of these regions, by keys that are computed here: others could be of any model.
        for dispatcher, specialization in jobs:
            for backend in dispatcher.backends:
                key = portable_key(dispatcher.unit, backend, specialization)
                at = self._store.local_key(key)
                if key in self._code and self._store.read(at) is None:
                    self._store.write(at, self._code[key])
        compile_all(jobs, progress=False)


# Inputs themselves: the input guards of the graph compare them with each call.
_GUARDED_INPUT = re.compile(r"inputs(\[[^\]]*\])*(\._dynamo_\w+)?")
_CLASS_OF_INPUT = re.compile(r"(inputs(?:\[[^\]]*\])*)\.__class__")


def _differences(capture: _Capture, model: nn.Module, inputs: Any) -> list[str]:
    """Return what a trace depended on that differs now, apart from inputs, which the graph's own guards compare."""
    if capture.context != tracing_context():
        return ["autocast, or a setting of torch that decides how a model is traced, differs"]
    try:
        now = capture.record.current(model, inputs)
    except Undescribable as error:
        return [str(error)]

    then = capture.record.facts

    def is_guarded(path: str) -> bool:
        owner = _CLASS_OF_INPUT.fullmatch(path)
        if owner is not None:  # of a tensor that only one of the calls has
            return (owner[1] in then) != (owner[1] in now)
        return _GUARDED_INPUT.fullmatch(path) is not None

    def unguarded(facts: Mapping[str, str]) -> dict[str, str]:
        return {path: fact for path, fact in facts.items() if not is_guarded(path)}

    return differences(unguarded(then), unguarded(now))


def _mismatch(
    graph: GraphModule, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    try:
        compare_with_model(model, graph, args, kwargs)
    except CaptureMismatch as mismatch:
        return [str(mismatch)]
    return []
