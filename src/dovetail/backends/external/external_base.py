"""Backends that hand regions to a compiler of another project: what they take, and code bound to weights."""

from __future__ import annotations

import importlib
import importlib.util
import json
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from dovetail.formats.onnx.writer import Dialect, Layout, OnnxWriter, layout_of, model_of
from dovetail.formats.op_support import OperationSupport
from dovetail.ir.graph_module import Body
from dovetail.ir.process_state import keep_for_ever, on_fork, released_by_fork
from dovetail.lowering.backend_protocol import (
    Answer,
    Backend,
    Compiled,
    why_not_fixed,
    why_not_plain,
)
from dovetail.lowering.dispatch import CallSite
from dovetail.lowering.failures import UnsupportedOp
from dovetail.outlining.inline import flat
from dovetail.outlining.region import Region
from dovetail.rules.partition import capability
from dovetail.rules.rule import Decline

_CHANGES = 4
"""How often the weights of a call may change before they are no longer bound to its code."""


class ExternalBackend(OperationSupport, Backend):
    """A backend whose compiler takes a region as a program all of whose operands are inputs.

    For each call `prepare` binds the weights to the code once, so that calls pass on only what changes; where they
    change again and again, they stay inputs. With `open_sizes` it also takes sizes that may vary. A compiler that
    `flushes_denormals`, which takes the smallest numbers for zero, is given no such literals.
    """

    packages: ClassVar[tuple[str, ...]] = ()

    @cached_property
    def rules(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return capability(self.takes, self.name, join_siblings=True)

    @abstractmethod
    def program(self, body: GraphModule, operands: Sequence[Any], results: Sequence[Layout]) -> Any:
        """What the compiler is given for a body; raises NoForm. Operands and results are in the order of memory."""

    @abstractmethod
    def session(
        self, program: Any, constants: Mapping[int, Tensor], results: Sequence[Layout]
    ) -> CompiledSession:
        """Code of a program for the number of threads that torch has now, with some operands bound."""

    @abstractmethod
    def packed(self, program: Any) -> bytes:
        """A program, with what was compiled of it, as bytes."""

    @abstractmethod
    def unpacked(self, data: bytes) -> Any:
        """The program of these bytes."""

    def missing(self) -> str | None:
        """What to install, or why this process cannot use it; None if it can."""
        gone = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if not gone:
            return _STARTED.refused(self.name)
        return f"{' and '.join(gone)} not installed; pip install 'dovetail[{self.name}]'"

    def takes(self, node: Node) -> bool | Decline:
        """Whether it can run an operation."""
        _STARTED.add(self.name)
        reason = self.missing() or self.why_not(node)
        return True if reason is None else Decline(reason)

    def supports(self, region: Region) -> Answer:
        _STARTED.add(self.name)
        reason = self.missing() or why_not_plain(region)
        if reason is None and not self.open_sizes:
            reason = why_not_fixed(region)
        reason = reason or self._why_not_body(region)
        return True if reason is None else Decline(reason)

    def _why_not_body(self, region: Region) -> str | None:
        body = flat(cast("Body", region.body))
        for node in body.graph.nodes:
            if node.op == "get_attr":
                return f"it holds '{node.target}', which is no operand"
            reason = self.why_not(node) if node.op == "call_function" else None
            if node.op == "placeholder":
                reason = self.why_not_value(node.meta["val"])
            if reason is not None:
                return f"{reason} ('{node.name}')"
        for node in results_of(body):
            value = node.meta.get("val")
            if not isinstance(value, Tensor):
                return f"its result '{node.name}' is no tensor"
            if 0 in (s for s, n in zip(value.stride(), value.shape, strict=True) if n != 1):
                return f"the elements of its result '{node.name}' lie over each other"
        operands = [_laid(n.meta["val"]) for n in body.graph.find_nodes(op="placeholder")]
        try:
            self._made(region, body, operands)
        except UnsupportedOp as failure:
            return str(failure)
        return None

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        body = flat(cast("Body", region.body))
        operands = [_laid(example) for example in examples]
        if operands != [_laid(n.meta["val"]) for n in body.graph.find_nodes(op="placeholder")]:
            _follow(body, examples)
            # What was asked of one size need not hold of another.
            for node in body.graph.nodes:
                reason = self.why_not(node) if node.op == "call_function" else None
                if reason is not None:
                    raise UnsupportedOp(f"{reason} ('{node.name}')")
        program, results = self._made(region, body, operands)
        made = Model(self, program, tuple(operands), tuple(results))
        made.session()
        return made

    def _made(
        self, region: Region, body: GraphModule, operands: Sequence[Layout | None]
    ) -> tuple[Any, list[Layout]]:
        """The program of a region, and how its results lie. What `supports` has made is not made again."""
        results = [layout_of(node.meta["val"]) for node in results_of(body)]
        key = (tuple(operands), tuple(results))
        kept = self._programs.get(region.body)
        if kept is None or kept[0] != key:
            kept = self._programs[region.body] = (key, self.program(body, operands, results))
        return kept[1], results

    @cached_property
    def _programs(self) -> WeakKeyDictionary[GraphModule, tuple[Any, Any]]:
        return WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_programs", "rules")}

    def prepare(self, site: CallSite) -> Compiled:
        counts = site.notes.setdefault(f"{self.name} weights", {})
        counts[site.name] = counts.get(site.name, 0) + 1
        constants = {i: site.operands[i] for i in site.constants if isinstance(site.operands[i], Tensor)}
        if not constants or counts[site.name] > _CHANGES:
            return site.compiled
        return cast("Model", site.compiled).bound(constants)

    def save(self, compiled: Any) -> bytes:
        model = cast("Model", compiled)
        head = {"operands": [*map(_told, model.operands)], "results": [*map(_told, model.results)]}
        return joined(json.dumps(head).encode(), self.packed(model.program))

    def load(self, data: bytes, region: Region) -> Compiled:
        head, rest = parted(data)
        told = json.loads(head)
        operands, results = (tuple(map(_layout, told[k])) for k in ("operands", "results"))
        made = Model(self, self.unpacked(rest), operands, results)
        made.session()
        return made


class _Started:
    """Which compilers were started in this process, or in one that it was forked from."""

    def __init__(self) -> None:
        self.here: set[str] = set()
        self.before: set[str] = set()
        on_fork(self)

    def add(self, name: str) -> None:
        if name not in self.before:
            self.here.add(name)

    def after_fork(self) -> None:
        """What was started is the parent's: its threads are not here."""
        self.before |= self.here
        self.here = set()

    def refused(self, name: str) -> str | None:
        """Why a compiler cannot be used here; None if it can."""
        if name not in self.before:
            return None
        return (
            f"'{name}' was started before this process was forked, and its threads are not here; start processes with "
            f"the method 'spawn'"
        )


_STARTED = _Started()


class CompiledSession:
    """Code with some operands bound; it takes the others as its compiler has them.

    `shared` are the numbers of the bound operands whose memory it reads in every call, and of which it has no copy.
    """

    shared: frozenset[int] = frozenset()

    @abstractmethod
    def __call__(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """The results, in memory that is theirs."""


class Model:
    """A program and code of it, for each number of threads that torch was set to, with some operands bound."""

    def __init__(
        self,
        backend: ExternalBackend,
        program: Any,
        operands: tuple[Layout | None, ...],
        results: tuple[Layout, ...],
        constants: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.backend, self.program, self.operands, self.results = backend, program, operands, results
        self.constants = dict(constants or {})
        self._given = [i for i in range(len(operands)) if i not in self.constants]
        self._sessions: dict[int, CompiledSession] = {}
        self._lock = released_by_fork(threading.Lock())
        on_fork(self)

    def bound(self, constants: Mapping[int, Tensor]) -> Model:
        """The same with some operands bound."""
        made = Model(self.backend, self.program, self.operands, self.results, constants)
        made.session()
        return made

    @property
    def reads_in_place(self) -> frozenset[int]:
        """The numbers of the bound operands that are read where they are."""
        shared = self.session().shared
        return frozenset(
            i for i in shared if self._rows(i, self.constants[i]).data_ptr() == self.constants[i].data_ptr()
        )

    def session(self) -> CompiledSession:
        """The code for the number of threads that torch has now."""
        threads = torch.get_num_threads()
        found = self._sessions.get(threads)
        if found is None:
            with self._lock:
                found = self._sessions.get(threads)
                if found is None:
                    rows = {i: self._rows(i, value) for i, value in self.constants.items()}
                    found = self._sessions[threads] = self.backend.session(self.program, rows, self.results)
        return found

    def after_fork(self) -> None:
        """Keep what the parent started, unused."""
        keep_for_ever(self._sessions)
        self._sessions = {}

    def __call__(self, *operands: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return self.session()(*[self._rows(i, operands[i]) for i in self._given])

    def _rows(self, i: int, value: Any) -> Tensor:
        layout = self.operands[i]
        return torch.tensor(value) if layout is None else layout.rows(value.detach())

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _unpickled, (self.backend, self.backend.save(self), self.constants)


def _unpickled(backend: ExternalBackend, data: bytes, constants: Mapping[int, Tensor]) -> Model:
    made = cast("Model", backend.load(data, cast("Region", None)))
    return made.bound(constants) if constants else made


def results_of(body: GraphModule) -> Sequence[Node]:
    """The nodes that a flat body returns."""
    return cast("Sequence[Node]", body.graph.output_node().args[0])


def joined(*parts: bytes) -> bytes:
    """Several pieces as one, which `parted` takes apart."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def parted(data: bytes) -> list[bytes]:
    """The pieces that were joined."""
    found: list[bytes] = []
    while data:
        end = 8 + int.from_bytes(data[:8], "little")
        found.append(data[8:end])
        data = data[end:]
    return found


def _follow(body: GraphModule, examples: Sequence[Any]) -> None:
    """Let a body know its values for operands that lie otherwise than those it was captured with."""
    modes = [e.fake_mode for e in examples if isinstance(e, FakeTensor)]
    if modes:
        with enable_python_dispatcher():
            FakeTensorProp(body, modes[0]).propagate_dont_convert_inputs(*examples)


def _laid(value: Any) -> Layout | None:
    """How an operand lies in memory; None for a number."""
    return layout_of(value) if isinstance(value, Tensor) else None


def _told(layout: Layout | None) -> Any:
    if layout is None:
        return None
    return [str(layout.dtype).removeprefix("torch."), layout.order, layout.sizes, layout.strides]


def _layout(told: Any) -> Any:
    if told is None:
        return None
    dtype, *rest = told
    return Layout(getattr(torch, dtype), *(None if r is None else tuple(r) for r in rest))


class OnnxBackend(ExternalBackend):
    """A backend whose programs are ONNX models; sizes may vary where the forms of operators allow it."""

    open_sizes: ClassVar[bool] = True
    dialect: ClassVar[Dialect] = Dialect(runs=True)

    def why_not_operation(self, node: Node) -> str | None:
        writer = OnnxWriter(self.dialect)
        for given in node.all_input_nodes:
            value = given.meta.get("val")
            count = len(cast("Sequence[Any]", value)) if isinstance(value, (tuple, list)) else 0
            writer.names[given] = tuple(f"{given.name}_{i}" for i in range(count)) if count else given.name
        try:
            writer.write(node)
        except UnsupportedOp as failure:
            return str(failure)
        return None

    def program(self, body: GraphModule, operands: Sequence[Any], results: Sequence[Layout]) -> Any:
        return model_of(body.graph, self.dialect, operands=operands, results=results).SerializeToString()

    def packed(self, program: Any) -> bytes:
        return program

    def unpacked(self, data: bytes) -> Any:
        return data


def input_names(model: bytes) -> list[str]:
    """The names of the inputs of an ONNX model, which stand for the operands in their order."""
    import onnx

    return [i.name for i in onnx.ModelProto.FromString(model).graph.input]


def require_in_range(flag: Any) -> None:
    """Raise what eager code would where a model says that an index was out of range."""
    if not flag:
        raise IndexError("an index is out of range")
