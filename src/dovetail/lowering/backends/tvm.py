"""TVM on the CPU: regions as Relax functions, compiled with LLVM."""

from __future__ import annotations

import functools
import queue
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from dovetail.errors import checked_init
from dovetail.graph.forking import released_by_fork
from dovetail.lowering.backends.foreign import Session, installed, joined, loaded, parted
from dovetail.lowering.backends.judging import Judge, Judged, why_risky
from dovetail.lowering.backends.retelling import retold
from dovetail.lowering.backends.tried import TVM, argument, why_untried
from dovetail.lowering.backends.tvm_converting import INEXACT, converted
from dovetail.lowering.backends.tvm_mending import MENDS
from dovetail.lowering.onnx.layouts import Layout


@checked_init()
class Tvm(Judged):
    """Compiles regions of fixed sizes with TVM for the CPU, in float32.

    Nothing is tuned: loops are as TVM writes them by itself, in one thread unless they are sorted or scanned. `target`
    is a target of TVM's, the processor that this runs on if it is not given.
    """

    name = "tvm"
    packages: ClassVar[tuple[str, ...]] = ("tvm",)

    def __init__(self, target: str | None = None) -> None:
        self.target = target

    @property
    def options(self) -> Mapping[str, Any]:
        return {} if self.target is None else {"target": self.target}

    @functools.cached_property
    def version(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return f"2 {installed('apache-tvm')}"

    def judge(self) -> Judge:
        return _judge()

    def program(self, body: GraphModule, operands: Sequence[Layout], results: Sequence[Layout]) -> Program:
        told = retold(body, operands, results, self.spelling)
        return Program(self.target, told.guarded, converted(told.graph))

    def session(
        self, program: Program, constants: Mapping[int, Tensor], results: Sequence[Layout]
    ) -> Session:
        return _Running(program, constants, results)

    def packed(self, program: Program) -> bytes:
        with tempfile.TemporaryDirectory(prefix="dovetail-tvm-") as folder:
            path = Path(folder) / "region.so"
            # It is linked by the compiler of the system; without one this raises, and nothing is kept.
            program.executable().export_library(str(path))
            return joined(b"g" if program.guarded else b"-", path.read_bytes())

    def unpacked(self, data: bytes) -> Program:
        guarded, library = parted(data)
        return Program(self.target, guarded == b"g", library=library)


@dataclass(eq=False)
class Program:
    """A Relax module or the library that was made of one, and whether its last result is the flag of its indices."""

    target: str | None
    guarded: bool
    module: Any = None
    library: bytes = b""
    _made: Any = None
    _lock: threading.Lock = field(default_factory=lambda: released_by_fork(threading.Lock()))

    def executable(self) -> Any:
        """The code."""
        with self._lock:
            if self._made is None:
                self._made = self._loaded() if self.library else self._compiled()
            return self._made

    def _compiled(self) -> Any:
        tvm = loaded("tvm")
        here = tvm.target.Target
        target = here.from_device(tvm.cpu()) if self.target is None else here(self.target)
        return tvm.compile(self.module, target=target)

    def _loaded(self) -> Any:
        # What is loaded stays when its file is gone.
        with tempfile.NamedTemporaryFile(prefix="dovetail-tvm-", suffix=".so") as file:
            file.write(self.library)
            file.flush()
            return loaded("tvm").runtime.load_module(file.name)


class _Running(Session):
    def __init__(self, program: Program, constants: Mapping[int, Tensor], results: Sequence[Layout]) -> None:
        tvm = loaded("tvm")
        relax = loaded("tvm.relax")
        self._program, self._results = program, list(results)
        self._machine: Callable[[], Any] = lambda: relax.VirtualMachine(program.executable(), tvm.cpu())
        self._given: Callable[[Tensor], Any] = tvm.runtime.from_dlpack
        # The memory is torch's own, and must live as long as TVM reads it.
        self._held = {i: _aligned(value) for i, value in constants.items()}
        self._bound = {i: self._given(value) for i, value in self._held.items()}
        self.shared = frozenset(i for i, value in constants.items() if self._held[i] is value)
        # A machine is for one call at a time, and threads may call at once.
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._idle.put(self._machine())

    def __call__(self, *rows: Tensor) -> tuple[Tensor, ...]:
        _set_threads(torch.get_num_threads())
        rows = tuple(map(_aligned, rows))
        fresh, bound = iter(map(self._given, rows)), self._bound
        operands = [bound[i] if i in bound else next(fresh) for i in range(len(bound) + len(rows))]
        try:
            machine = self._idle.get_nowait()
        except queue.Empty:
            machine = self._machine()
        try:
            made = [torch.from_dlpack(value) for value in machine["main"](*operands)]
        finally:
            self._idle.put(machine)
        if self._program.guarded and not bool(made.pop()):
            raise IndexError("an index is out of range")
        return tuple(
            layout.result(value) for layout, value in zip(self._results, self._fresh(made, rows), strict=True)
        )

    def _fresh(self, made: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
        """Results in memory of their own: a reshape of an operand, or of another result, is told in place."""
        seen = {t.data_ptr() for t in (*rows, *self._held.values())}
        own: list[Tensor] = []
        for value in made:
            value = value.clone() if value.data_ptr() in seen else value
            seen.add(value.data_ptr())
            own.append(value)
        return own


_ALIGNMENT = 64


def _aligned(value: Tensor) -> Tensor:
    """A tensor that begins where TVM's code expects one to; torch's own memory does, a part of it may not."""
    return value.clone() if value.data_ptr() % _ALIGNMENT else value


_STATE = threading.local()


def _set_threads(count: int) -> None:
    """Tell TVM how many threads it has; each thread that calls it has threads of its own."""
    if getattr(_STATE, "count", 0) != count:
        configure = loaded("tvm").get_global_func("runtime.config_threadpool", allow_missing=True)
        if configure is not None:
            configure(0, count)
        _STATE.count = count


@functools.cache
def _judge() -> Judge:
    return Judge(converted, _table, _sifted, mends=MENDS)


def _table() -> Mapping[Any, Callable[..., Any]]:
    return torch.export.default_decompositions()


def _sifted(node: Node) -> str | None:
    return why_untried(TVM, node) or _why_wrong(node) or why_risky(node)


def _why_wrong(node: Node) -> str | None:
    """Why an operation would not give in TVM what it gives in torch, where that is a matter of its operands."""
    name, first = str(node.target), node.args[0] if node.args else None
    value = first.meta.get("val") if isinstance(first, Node) else None
    if name.startswith("aten.ne.") and isinstance(value, Tensor) and value.dtype.is_floating_point:
        return "TVM says of what is no number that it equals itself"
    if name.endswith(".Scalar") and isinstance(value, Tensor) and not value.dtype.is_floating_point:
        other = argument(node, "other")
        if isinstance(other, float) and not other.is_integer():
            return "TVM cuts off what a number has behind its point where it meets whole numbers"
    if name == "aten.topk.default" and isinstance(value, Tensor) and value.dtype is torch.int16:
        return "TVM does not sort int16"
    if any(argument(node, factor) == 0 for factor in _FACTORS.get(node.target, ())) and _is_floating(node):
        return "TVM takes zero times a number for zero, also if that is infinite or no number"
    if name.startswith("aten.clamp") and any(bound != bound for bound in node.args[1:]):
        return "TVM does not clamp to what is no number"
    if name.startswith("aten.scatter.") and isinstance(value, Tensor):
        index, dim = argument(node, "index").meta["val"], argument(node, "dim") % value.dim()
        if any(index.shape[d] != n for d, n in enumerate(value.shape) if d != dim):
            return "TVM scatters to other places where there are fewer indices than places"
    return INEXACT.get(name)


_ATEN = torch.ops.aten
_FACTORS: Mapping[Any, tuple[str, ...]] = {
    _ATEN.mul.Tensor: ("other",),
    _ATEN.add.Tensor: ("alpha",),
    _ATEN.sub.Tensor: ("alpha",),
    _ATEN.rsub.Scalar: ("alpha",),
    _ATEN.rsub.Tensor: ("alpha",),
    _ATEN.addcmul.default: ("value",),
    _ATEN.addcdiv.default: ("value",),
    _ATEN.leaky_relu.default: ("negative_slope",),
    _ATEN.scaled_dot_product_attention.default: ("scale",),
}
"""Arguments with which operators multiply."""


def _is_floating(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype.is_floating_point
