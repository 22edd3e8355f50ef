"""XLA on the CPU: regions as StableHLO, compiled and run by jaxlib."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from dovetail.backends.external.external_base import (
    CompiledSession,
    ExternalBackend,
    checked_results,
    join_parts,
    split_parts,
    with_bound,
)
from dovetail.errors import checked_init
from dovetail.formats.reexport import reexport_body
from dovetail.formats.stablehlo_ops import StableHloSupport, import_graphs, portable
from dovetail.ir.process_state import reset_at_fork
from dovetail.ir.tensor_spec import Layout
from dovetail.lowering.backend_protocol import load_package, package_version


# Not with torchax: its latest version cannot be imported with torch 2.13, and makes jax arrays, not StableHLO.
@checked_init()
class Xla(StableHloSupport, ExternalBackend):
    """Compiles regions of fixed sizes with XLA for the CPU, with as many threads as torch has.

    Operands and results are passed without copies. Indices are checked as in eager code. XLA flushes denormal
    numbers to zero, whatever its flags, so that `x > 0` is false for one.
    """

    name = "xla"
    packages: ClassVar[tuple[str, ...]] = ("torch_mlir", "jaxlib", "jax")

    @functools.cached_property
    def version(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"2 {package_version('torch-mlir')} {package_version('jaxlib')}"

    def missing(self) -> str | None:
        return super().missing() or _why_no_runtime()

    def program(self, body: GraphModule, operands: Sequence[Layout], results: Sequence[Layout]) -> XlaProgram:
        exported = reexport_body(body, operands, results, self.decomposition)
        return XlaProgram(portable(import_graphs({"main": exported.graph})), exported.guarded)

    def session(
        self, program: XlaProgram, constants: Mapping[int, Tensor], results: Sequence[Layout]
    ) -> CompiledSession:
        return _XlaSession(program, constants, results)

    def serialize(self, program: XlaProgram) -> bytes:
        threads = torch.get_num_threads()
        guarded = b"g" if program.guarded else b"-"
        code = program.executable().serialize()
        return join_parts(guarded, program.module, threads.to_bytes(4, "little"), code)

    def deserialize(self, data: bytes) -> XlaProgram:
        guarded, module, threads, code = split_parts(data)
        return XlaProgram(module, guarded == b"g", {int.from_bytes(threads, "little"): code})


@dataclass(eq=False)
class XlaProgram:
    """A module, whether its last result is the flag of its indices, and its code by number of threads."""

    module: bytes
    guarded: bool
    serialized: dict[int, bytes] = field(default_factory=dict[int, bytes])
    _executables: dict[int, Any] = field(default_factory=dict[int, Any])
    _lock: threading.Lock = field(default_factory=lambda: reset_at_fork(threading.Lock()))

    def executable(self) -> Any:
        """Return the code for torch's current number of threads."""
        threads = torch.get_num_threads()
        with self._lock:
            if threads not in self._executables:
                self._executables[threads] = self._compiled(threads)
            return self._executables[threads]

    def _compiled(self, threads: int) -> Any:
        client, runtime = _client(threads), _runtime()
        data = self.serialized.get(threads)
        if data is not None:
            return client.deserialize_executable(data, client.devices(), None)
        return client.compile_and_load(self.module, client.devices(), runtime.options())


class _XlaSession(CompiledSession):
    def __init__(
        self, program: XlaProgram, constants: Mapping[int, Tensor], results: Sequence[Layout]
    ) -> None:
        self._execute = program.executable().execute
        self._results, self._guarded = list(results), program.guarded
        self._device = _client(torch.get_num_threads()).devices()[0]
        runtime = _runtime()
        self._from_dlpack: Callable[..., Any] = runtime.from_dlpack
        self._to_dlpack: Callable[..., Any] = runtime.to_dlpack
        # XLA reads torch's memory, which must stay alive.
        self._held = dict(constants)
        self._bound = {
            i: self._from_dlpack(value.__dlpack__(), self._device, None) for i, value in constants.items()
        }
        # XLA copies a tensor that is not aligned as it expects.
        self.shared = frozenset(
            i for i, value in constants.items() if self._bound[i].unsafe_buffer_pointer() == value.data_ptr()
        )

    def __call__(self, *rows: Tensor) -> tuple[Tensor, ...]:
        inputs = [self._from_dlpack(row.__dlpack__(), self._device, None) for row in rows]
        outputs = self._execute(with_bound(self._bound, inputs))
        values = [torch.from_dlpack(self._to_dlpack(value)) for value in outputs]
        return checked_results(values, self._results, self._guarded)


@dataclass(frozen=True)
class _Runtime:
    """The parts of jaxlib that are used."""

    client: Callable[..., Any]
    options: Callable[[], Any]
    from_dlpack: Callable[..., Any]
    to_dlpack: Callable[..., Any]


@functools.cache
def _runtime() -> _Runtime:
    # jaxlib logs to stderr unless this is set; jax sets it too.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    xla_client, inner = load_package("jaxlib.xla_client"), load_package("jaxlib._jax")
    for method in ("compile_and_load", "deserialize_executable", "devices"):
        getattr(xla_client.Client, method)
    return _Runtime(
        xla_client.make_cpu_client,
        xla_client.CompileOptions,
        inner.dlpack_managed_tensor_to_buffer,
        inner.buffer_to_dlpack_managed_tensor,
    )


@functools.cache
def _why_no_runtime() -> str | None:
    # A separate client has torch's number of threads and accepts DLPack capsules; jax's own client does neither. That
    # part of jaxlib is not a stable interface.
    try:
        _runtime()
    except (ImportError, AttributeError) as error:
        return f"jaxlib {package_version('jaxlib')} does not have the interface that '{Xla.name}' needs ({error}); install jax 0.10"
    return None


_CLIENT_LOCK = reset_at_fork(threading.Lock())


def _client(threads: int) -> Any:
    with _CLIENT_LOCK:
        return _start_client(threads)


@functools.cache
def _start_client(threads: int) -> Any:
    """Start XLA with a number of threads, which it reads from the environment."""
    name = "PJRT_NPROC"
    before = os.environ.get(name)
    os.environ[name] = str(threads)
    try:
        # Calls are synchronous: torch reads the results at once.
        return _runtime().client(asynchronous=False)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
