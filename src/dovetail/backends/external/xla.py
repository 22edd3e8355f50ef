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

from dovetail.backends.external.external_base import CompiledSession, ExternalBackend, joined, parted
from dovetail.errors import checked_init
from dovetail.formats.onnx.writer import Layout
from dovetail.formats.reexport import reexported
from dovetail.formats.stablehlo import StableHloSupport, module_of, portable
from dovetail.ir.process_state import released_by_fork
from dovetail.lowering.backend_protocol import load_package, package_version


# Not by way of torchax: its latest version cannot be imported with torch 2.13, and makes jax arrays, not StableHLO.
@checked_init()
class Xla(StableHloSupport, ExternalBackend):
    """Compiles regions of fixed sizes with XLA for the CPU, with as many threads as torch has.

    Operands and results are passed without copies. Indices are checked, as they are in eager code. XLA takes denormal
    numbers for zero, whatever its flags, so that `x > 0` is false of one.
    """

    name = "xla"
    packages: ClassVar[tuple[str, ...]] = ("torch_mlir", "jaxlib", "jax")

    @functools.cached_property
    def version(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"2 {package_version('torch-mlir')} {package_version('jaxlib')}"

    def missing(self) -> str | None:
        return super().missing() or _why_no_runtime()

    def program(self, body: GraphModule, operands: Sequence[Layout], results: Sequence[Layout]) -> XlaProgram:
        told = reexported(body, operands, results, self.spelling)
        return XlaProgram(portable(module_of({"main": told.graph})), told.guarded)

    def session(
        self, program: XlaProgram, constants: Mapping[int, Tensor], results: Sequence[Layout]
    ) -> CompiledSession:
        return _XlaSession(program, constants, results)

    def packed(self, program: XlaProgram) -> bytes:
        threads = torch.get_num_threads()
        guarded = b"g" if program.guarded else b"-"
        code = program.executable().serialize()
        return joined(guarded, program.module, threads.to_bytes(4, "little"), code)

    def unpacked(self, data: bytes) -> XlaProgram:
        guarded, module, threads, code = parted(data)
        return XlaProgram(module, guarded == b"g", {int.from_bytes(threads, "little"): code})


@dataclass(eq=False)
class XlaProgram:
    """A module, whether its last result is the flag of its indices, and code of it by number of threads."""

    module: bytes
    guarded: bool
    kept: dict[int, bytes] = field(default_factory=dict[int, bytes])
    _made: dict[int, Any] = field(default_factory=dict[int, Any])
    _lock: threading.Lock = field(default_factory=lambda: released_by_fork(threading.Lock()))

    def executable(self) -> Any:
        """The code for the number of threads that torch has now."""
        threads = torch.get_num_threads()
        found = self._made.get(threads)
        if found is None:
            with self._lock:
                found = self._made.get(threads)
                if found is None:
                    found = self._made[threads] = self._compiled(threads)
        return found

    def _compiled(self, threads: int) -> Any:
        client, runtime = _client(threads), _runtime()
        kept = self.kept.get(threads)
        if kept is not None:
            return client.deserialize_executable(kept, client.devices(), None)
        return client.compile_and_load(self.module, client.devices(), runtime.options())


class _XlaSession(CompiledSession):
    def __init__(
        self, program: XlaProgram, constants: Mapping[int, Tensor], results: Sequence[Layout]
    ) -> None:
        self._execute = program.executable().execute
        self._results, self._guarded = list(results), program.guarded
        self._device = _client(torch.get_num_threads()).devices()[0]
        runtime = _runtime()
        self._given: Callable[..., Any] = runtime.given
        self._taken: Callable[..., Any] = runtime.taken
        # The memory is torch's own, and must live as long as XLA reads it.
        self._held = dict(constants)
        self._bound = {
            i: self._given(value.__dlpack__(), self._device, None) for i, value in constants.items()
        }
        # XLA copies what does not begin where it expects a buffer to.
        self.shared = frozenset(
            i for i, value in constants.items() if self._bound[i].unsafe_buffer_pointer() == value.data_ptr()
        )

    def __call__(self, *rows: Tensor) -> tuple[Tensor, ...]:
        waiting = [self._given(row.__dlpack__(), self._device, None) for row in rows]
        if self._bound:
            fresh = iter(waiting)
            count = len(self._bound) + len(waiting)
            bound = self._bound
            waiting = [bound[i] if i in bound else next(fresh) for i in range(count)]
        made = [torch.from_dlpack(self._taken(value)) for value in self._execute(waiting)]
        if self._guarded and not bool(made.pop()):
            raise IndexError("an index is out of range")
        return tuple(layout.result(value) for layout, value in zip(self._results, made, strict=True))


@dataclass(frozen=True)
class _Runtime:
    """The parts of jaxlib that are used."""

    client: Callable[..., Any]
    options: Callable[[], Any]
    given: Callable[..., Any]
    taken: Callable[..., Any]


@functools.cache
def _runtime() -> _Runtime:
    # jaxlib tells of itself on stderr unless this is set; jax sets it too.
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
    # A client of its own has torch's number of threads, and takes DLPack's capsules as they are; jax's own client has
    # neither. That part of jaxlib is not promised to stay.
    try:
        _runtime()
    except (ImportError, AttributeError) as error:
        return (
            f"jaxlib {package_version('jaxlib')} is not as '{Xla.name}' knows it ({error}); install jax 0.10"
        )
    return None


_STARTING = released_by_fork(threading.Lock())


def _client(threads: int) -> Any:
    with _STARTING:
        return _started(threads)


@functools.cache
def _started(threads: int) -> Any:
    """XLA with a number of threads, which it is told by the environment when it starts."""
    name = "PJRT_NPROC"
    before = os.environ.get(name)
    os.environ[name] = str(threads)
    try:
        # Calls return when they are done: torch reads what they made at once.
        return _runtime().client(asynchronous=False)
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
