"""Backends whose compiler is another project: which regions they support, and code with weights bound to it."""

from __future__ import annotations

import importlib
import importlib.util
import json
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from dovetail.formats.onnx.region_model import TRANSLATIONS, region_model
from dovetail.formats.onnx.writer import Dialect, OnnxWriter
from dovetail.formats.op_support import OperationSupport
from dovetail.ir.graph_module import Body
from dovetail.ir.nodes import storage_key
from dovetail.ir.process_state import make_immortal, register_after_fork, reset_at_fork
from dovetail.ir.tensor_spec import Layout, layout_of
from dovetail.lowering.backend_protocol import Answer, Backend, CallSite, Compiled
from dovetail.lowering.failures import UnsupportedOp
from dovetail.lowering.region_support import why_effectful, why_not_static
from dovetail.outlining.inline import flat
from dovetail.outlining.region import Region
from dovetail.rules.partition import capability
from dovetail.rules.rule import Decline

_MAX_REBINDINGS = 4
"""How often the weights of a call may change before they are passed as inputs."""


class ExternalBackend(OperationSupport, Backend):
    """A backend whose compiler takes a region as a program with all operands as inputs.

    `prepare` binds the weights of each call to its code once, so that calls pass only what changes; weights that change
    again and again stay inputs. With `dynamic_sizes` sizes may be symbolic. A compiler that `flushes_denormals` is given
    no denormal literals.
    """

    packages: ClassVar[tuple[str, ...]] = ()

    @cached_property
    def rules(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return capability(self.takes, self.name, join_siblings=True)

    @abstractmethod
    def program(self, body: GraphModule, operands: Sequence[Any], results: Sequence[Layout]) -> Any:
        """Return the compiler's input for a body, operands and results in the order of memory; raise UnsupportedOp."""

    @abstractmethod
    def session(
        self, program: Any, constants: Mapping[int, Tensor], results: Sequence[Layout]
    ) -> CompiledSession:
        """Return code of a program for torch's current number of threads, with some operands bound."""

    @abstractmethod
    def serialize(self, program: Any) -> bytes:
        """Return a program and its compiled code as bytes."""

    @abstractmethod
    def deserialize(self, data: bytes) -> Any:
        """Return the program that `serialize` wrote."""

    def missing(self) -> str | None:
        """Return what to install, or why this process cannot use the compiler, or None."""
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if not absent:
            return _STARTED.why_unusable(self.name)
        return f"{' and '.join(absent)} not installed; pip install 'dovetail[{self.name}]'"

    def takes(self, node: Node) -> bool | Decline:
        """Return True, or a Decline with the reason, for one operation."""
        _STARTED.add(self.name)
        reason = self.missing() or self.why_not(node)
        return True if reason is None else Decline(reason)

    def supports(self, region: Region) -> Answer:
        _STARTED.add(self.name)
        reason = self.missing() or why_effectful(region)
        if reason is None and not self.dynamic_sizes:
            reason = why_not_static(region)
        reason = reason or self._why_not_body(region)
        return True if reason is None else Decline(reason)

    def _why_not_body(self, region: Region) -> str | None:
        body = flat(cast("Body", region.body))
        for node in body.graph.nodes:
            if node.op == "get_attr":
                return f"it holds '{node.target}', which is not an operand"
            reason = self.why_not(node) if node.op == "call_function" else None
            if node.op == "placeholder":
                reason = self.why_not_value(node.meta["val"])
            if reason is not None:
                return f"{reason} ('{node.name}')"
        for node in results_of(body):
            value = node.meta.get("val")
            if not isinstance(value, Tensor):
                return f"its result '{node.name}' is not a tensor"
            is_expanded = 0 in (s for s, n in zip(value.stride(), value.shape, strict=True) if n != 1)
            if is_expanded and layout_of(value).strides is None:
                return f"its result '{node.name}' is expanded to sizes that may vary"
        operands = [_operand_layout(n.meta["val"]) for n in body.graph.find_nodes(op="placeholder")]
        return_bases(body)
        try:
            self._program_of(region, body, operands)
        except UnsupportedOp as failure:
            return str(failure)
        return None

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        body = flat(cast("Body", region.body))
        operands = [_operand_layout(example) for example in examples]
        if operands != [_operand_layout(n.meta["val"]) for n in body.graph.find_nodes(op="placeholder")]:
            _propagate_fakes(body, examples)
            # Support for one layout need not hold for another.
            for node in body.graph.nodes:
                reason = self.why_not(node) if node.op == "call_function" else None
                if reason is not None:
                    raise UnsupportedOp(f"{reason} ('{node.name}')")
        views = return_bases(body)
        program, results = self._program_of(region, body, operands)
        return CompiledModel(self, program, tuple(operands), tuple(results), views)

    def _program_of(
        self, region: Region, body: GraphModule, operands: Sequence[Layout | None]
    ) -> tuple[Any, list[Layout]]:
        """Return the program of a region, cached from `supports`, and the layouts of its results."""
        results = [layout_of(node.meta["val"]) for node in results_of(body)]
        key = (tuple(operands), tuple(results))
        cached = self._programs.get(region.body)
        if cached is None or cached[0] != key:
            cached = self._programs[region.body] = (key, self.program(body, operands, results))
        return cached[1], results

    @cached_property
    def _programs(self) -> WeakKeyDictionary[GraphModule, tuple[Any, Any]]:
        return WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_programs", "rules")}

    def prepare(self, site: CallSite) -> Compiled:
        counts = site.notes.setdefault(f"{self.name} weights", {})
        counts[site.name] = counts.get(site.name, 0) + 1
        constants = {i: site.operands[i] for i in site.constants if isinstance(site.operands[i], Tensor)}
        if not constants or counts[site.name] > _MAX_REBINDINGS:
            return site.compiled
        return cast("CompiledModel", site.compiled).bound(constants)

    def save(self, compiled: Any) -> bytes:
        model = cast("CompiledModel", compiled)
        head = {
            "operands": [*map(_layout_to_json, model.operands)],
            "results": [*map(_layout_to_json, model.results)],
            "views": [*map(astuple, model.views)],
        }
        return join_parts(json.dumps(head).encode(), self.serialize(model.program))

    def load(self, data: bytes, region: Region) -> Compiled:
        head, rest = split_parts(data)
        layouts = json.loads(head)
        operands, results = (tuple(map(_layout_from_json, layouts[k])) for k in ("operands", "results"))
        views = tuple(_view_from_json(*row) for row in layouts["views"])
        # Code that was stored has run before, and most has its weights bound first: a session of their own.
        return CompiledModel(self, self.deserialize(rest), operands, results, views, is_tried=True)


class _Started:
    """Which compilers were started in this process, or in a process that it was forked from."""

    def __init__(self) -> None:
        self.here: set[str] = set()
        self.before: set[str] = set()
        register_after_fork(self)

    def add(self, name: str) -> None:
        if name not in self.before:
            self.here.add(name)

    def after_fork(self) -> None:
        """Record that the compilers were started in the parent, whose threads the child does not have."""
        self.before |= self.here
        self.here = set()

    def why_unusable(self, name: str) -> str | None:
        """Return why a compiler cannot be used in this process, or None."""
        if name not in self.before:
            return None
        return (
            f"'{name}' was started before this process was forked, which does not have its threads; start processes "
            f"with the method 'spawn'"
        )


_STARTED = _Started()


class CompiledSession:
    """Code with some operands bound; it takes the others as its compiler sees them.

    `shared` are the indices of the bound operands whose memory it reads in every call instead of a copy.
    """

    shared: frozenset[int] = frozenset()

    @abstractmethod
    def __call__(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Return the results, in memory of their own."""


class CompiledModel:
    """A program with some operands bound, and its code for each number of threads that torch was set to."""

    def __init__(
        self,
        backend: ExternalBackend,
        program: Any,
        operands: tuple[Layout | None, ...],
        results: tuple[Layout, ...],
        views: tuple[ResultView, ...] | None = None,
        constants: Mapping[int, Tensor] | None = None,
        *,
        is_tried: bool = False,
    ) -> None:
        self.backend, self.program, self.operands, self.results = backend, program, operands, results
        views = tuple(map(ResultView, range(len(results)))) if views is None else views
        self.views, self.constants = views, dict(constants or {})
        # Most regions have none.
        self._returns_views = any(view.sizes is not None for view in views) or len(views) != len(results)
        self._unbound = [(i, layout) for i, layout in enumerate(operands) if i not in self.constants]
        self._sessions: dict[int, CompiledSession] = {}
        self._lock = reset_at_fork(threading.Lock())
        register_after_fork(self)
        if not is_tried:
            self.session()

    def bound(self, constants: Mapping[int, Tensor]) -> CompiledModel:
        """Return a copy with some operands bound."""
        return CompiledModel(self.backend, self.program, self.operands, self.results, self.views, constants)

    @property
    def reads_in_place(self) -> frozenset[int]:
        """The indices of the bound operands that are read in place."""
        shared = self.session().shared
        return frozenset(
            i
            for i in shared
            if _runtime_operand(self.operands[i], self.constants[i]).data_ptr()
            == self.constants[i].data_ptr()
        )

    def session(self) -> CompiledSession:
        """Return the code for torch's current number of threads."""
        threads = torch.get_num_threads()
        session = self._sessions.get(threads)
        if session is None:
            with self._lock:
                session = self._sessions.get(threads)
                if session is None:
                    rows = {i: _runtime_operand(self.operands[i], v) for i, v in self.constants.items()}
                    session = self._sessions[threads] = self.backend.session(self.program, rows, self.results)
        return session

    def after_fork(self) -> None:
        """Keep the sessions of the parent alive, unused: they must not be destroyed here."""
        make_immortal(self._sessions)
        self._sessions = {}

    def __call__(self, *operands: Any) -> tuple[Tensor, ...]:
        values = self.session()(*[_runtime_operand(layout, operands[i]) for i, layout in self._unbound])
        return tuple([view.of(values) for view in self.views]) if self._returns_views else values

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _unpickled, (self.backend, self.backend.save(self), self.constants)


def _unpickled(backend: ExternalBackend, data: bytes, constants: Mapping[int, Tensor]) -> CompiledModel:
    model = cast("CompiledModel", backend.load(data, cast("Region", None)))
    return model.bound(constants) if constants else model


def results_of(body: GraphModule) -> Sequence[Node]:
    """Return the output nodes of a flat body."""
    return cast("Sequence[Node]", body.graph.output_node().args[0])


@dataclass(frozen=True)
class ResultView:
    """A result of a region as a view of a value that its code returns; without sizes, the value itself."""

    index: int
    sizes: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()
    offset: int = 0

    def of(self, values: Sequence[Tensor]) -> Tensor:
        """Return the result."""
        value = values[self.index]
        return value if self.sizes is None else value.as_strided(self.sizes, self.strides, self.offset)


def return_bases(body: GraphModule) -> tuple[ResultView, ...]:
    """Make a flat body return the values that its results are views of, where those are not dense; return the views.

    Otherwise such a result, as of `split` or `expand`, is copied to memory of its strides in every call.
    """
    owners: dict[int, Node] = {}
    for node in body.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            owners.setdefault(storage_key(value), node)
    returned: list[Node] = []
    indices: dict[Node, int] = {}
    views: list[ResultView] = []
    for node in results_of(body):
        base, view = _view_of_base(node, owners)
        # A result that comes twice is two values, each with memory of its own.
        if view.sizes is None or base not in indices:
            indices[base] = len(returned)
            returned.append(base)
        views.append(replace(view, index=indices[base]))
    if returned != list(results_of(body)):
        body.graph.output_node().args = (tuple(returned),)
        body.graph.eliminate_dead_code()
    return tuple(views)


def _view_of_base(result: Node, owners: Mapping[int, Node]) -> tuple[Node, ResultView]:
    """Return the value that a result is a view of, if that is dense and the result is not; else the result."""
    value, itself = result.meta["val"], (result, ResultView(0))
    layout, base = layout_of(value), owners[storage_key(value)]
    if layout.order is not None or layout.sizes is None or base.op != "call_function":
        return itself
    whole = base.meta["val"]
    of_base, offset = layout_of(whole), value.storage_offset() - whole.storage_offset()
    if of_base.order is None or of_base.sizes is None or whole.dtype is not value.dtype:
        return itself
    assert layout.strides is not None
    last = offset + sum((n - 1) * stride for n, stride in zip(layout.sizes, layout.strides, strict=True))
    if not isinstance(offset, int) or offset < 0 or last >= whole.numel():
        return itself
    return base, ResultView(0, layout.sizes, layout.strides, offset)


def _view_from_json(index: int, sizes: Any, strides: Any, offset: int) -> ResultView:
    return ResultView(index, None if sizes is None else tuple(sizes), tuple(strides), offset)


def join_parts(*parts: bytes) -> bytes:
    """Concatenate byte strings such that `split_parts` can separate them."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def split_parts(data: bytes) -> list[bytes]:
    """Return the byte strings that `join_parts` concatenated."""
    parts: list[bytes] = []
    while data:
        end = 8 + int.from_bytes(data[:8], "little")
        parts.append(data[8:end])
        data = data[end:]
    return parts


def _propagate_fakes(body: GraphModule, examples: Sequence[Any]) -> None:
    """Recompute the fake values of a body for operands of other layouts than those it was captured with."""
    modes = [e.fake_mode for e in examples if isinstance(e, FakeTensor)]
    if modes:
        with enable_python_dispatcher():
            FakeTensorProp(body, modes[0]).propagate_dont_convert_inputs(*examples)


def _runtime_operand(layout: Layout | None, value: Any) -> Tensor:
    return torch.tensor(value) if layout is None else layout.to_runtime(value.detach())


def _operand_layout(value: Any) -> Layout | None:
    """Return the layout of an operand; None for a number."""
    return layout_of(value) if isinstance(value, Tensor) else None


def _layout_to_json(layout: Layout | None) -> Any:
    if layout is None:
        return None
    return [str(layout.dtype).removeprefix("torch."), layout.order, layout.sizes, layout.strides]


def _layout_from_json(row: Any) -> Any:
    if row is None:
        return None
    dtype, *rest = row
    return Layout(getattr(torch, dtype), *(None if r is None else tuple(r) for r in rest))


class OnnxBackend(ExternalBackend):
    """A backend whose programs are ONNX models; sizes may be symbolic where the translations allow it."""

    dynamic_sizes: ClassVar[bool] = True
    dialect: ClassVar[Dialect] = Dialect(runs=True)

    def why_not_operation(self, node: Node) -> str | None:
        writer = OnnxWriter(TRANSLATIONS, self.dialect)
        for operand in node.all_input_nodes:
            value = operand.meta.get("val")
            count = len(cast("Sequence[Any]", value)) if isinstance(value, (tuple, list)) else 0
            names = tuple(f"{operand.name}_{i}" for i in range(count))
            writer.names[operand] = names or operand.name
        try:
            writer.write(node)
        except UnsupportedOp as failure:
            return str(failure)
        return None

    def program(self, body: GraphModule, operands: Sequence[Any], results: Sequence[Layout]) -> Any:
        return region_model(body.graph, self.dialect, operands=operands, results=results).SerializeToString()

    def serialize(self, program: bytes) -> bytes:
        return program

    def deserialize(self, data: bytes) -> bytes:
        return data


def checked_results(values: list[Tensor], layouts: Sequence[Layout], guarded: bool) -> tuple[Tensor, ...]:
    """Return what a runtime computed as torch's tensors; `guarded` values end with the flag of their indices."""
    if guarded:
        require_in_range(values.pop())
    return tuple(layout.from_runtime(value) for layout, value in zip(layouts, values, strict=True))


def with_bound(bound: Mapping[int, Any], operands: Sequence[Any]) -> list[Any]:
    """Return all operands in order: those that are bound by index, and the others."""
    others = iter(operands)
    return [bound[i] if i in bound else next(others) for i in range(len(bound) + len(operands))]


class PlacedResults:
    """Memory for the results of a call of an ONNX model whose sizes are known, and for the flag of its indices."""

    def __init__(self, layouts: Sequence[Layout], guarded: bool) -> None:
        self._layouts = layouts
        self._places = [layout.allocate() for layout in layouts]
        self.buffers = [buffer for _, buffer in self._places]
        self._flag = torch.empty((), dtype=torch.bool) if guarded else None
        if self._flag is not None:
            self.buffers.append(self._flag)

    def results(self) -> tuple[Tensor, ...]:
        """Return the results after the call; raise IndexError if an index was out of range."""
        if self._flag is not None:
            require_in_range(self._flag)
        return tuple(
            tensor if layout.order is not None else layout.from_runtime(tensor)
            for layout, (tensor, _) in zip(self._layouts, self._places, strict=True)
        )


def require_in_range(flag: Any) -> None:
    """Raise IndexError, as eager code would, if the flag of a model reports an index out of range."""
    if not flag:
        raise IndexError("an index is out of range")
