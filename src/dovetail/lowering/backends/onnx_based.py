"""Backends that are given ONNX: what they take, the model of a region, and the model of one call with its weights."""

from __future__ import annotations

import importlib.util
import json
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.fx import Node

from dovetail.graph.module import Body
from dovetail.lowering.backend import Answer, Backend, Compiled
from dovetail.lowering.backends.common import operand_devices, why_not_plain
from dovetail.lowering.flattening import flat
from dovetail.lowering.onnx.layouts import Layout, layout_of
from dovetail.lowering.onnx.program import model_of
from dovetail.lowering.onnx.types import ELEMENTS, NoForm
from dovetail.lowering.onnx.writer import Dialect, Writer
from dovetail.lowering.site import CallSite
from dovetail.outlining.region import Region
from dovetail.rules.capability import capability
from dovetail.rules.rule import Decline

_CHANGES = 4
"""How often the weights of a call may change before they are no longer built into its code."""


class OnnxBackend(Backend):
    """A backend that compiles ONNX models.

    `compile` makes a model of a region whose operands are all inputs. For each call of it, `prepare` makes code with
    the weights built in, which is what is fast; where they change again and again, they stay inputs.
    """

    packages: ClassVar[tuple[str, ...]] = ()
    dialect = Dialect()
    floats: ClassVar[frozenset[torch.dtype]] = frozenset({torch.float32})

    @cached_property
    def rules(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return capability(self.takes, self.name, join_siblings=True)

    @abstractmethod
    def session(self, model: bytes, constants: Mapping[int, Tensor], results: Sequence[Layout]) -> Session:
        """Code for an ONNX model, with some of its inputs built in."""

    def missing(self) -> str | None:
        """What to install; None if it is there."""
        gone = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if not gone:
            return None
        return f"{' and '.join(gone)} not installed; pip install 'dovetail[{self.name}]'"

    def takes(self, node: Node) -> bool | Decline:
        """Whether it can run an operation."""
        missing = self.missing()
        reason = missing or self.why_not(node)
        return True if reason is None else Decline(reason)

    def why_not(self, node: Node) -> str | None:
        """Why there is nothing here that does what a node does; None if there is."""
        reason = self._why_not_value(node.meta.get("val"))
        if reason is not None:
            return reason
        writer = Writer(self.dialect)
        for given in node.all_input_nodes:
            value = given.meta.get("val")
            reason = self._why_not_value(value)
            if reason is not None:
                return reason
            count = len(cast("Sequence[Any]", value)) if isinstance(value, (tuple, list)) else 0
            writer.names[given] = tuple(f"{given.name}_{i}" for i in range(count)) if count else given.name
        try:
            writer.write(node)
        except NoForm as failure:
            return str(failure)
        return None

    def _why_not_value(self, value: Any) -> str | None:
        for one in cast("Sequence[Any]", value) if isinstance(value, (tuple, list)) else (value,):
            if not isinstance(one, Tensor):
                continue
            word = str(one.dtype).removeprefix("torch.")
            if one.dtype not in ELEMENTS or (one.dtype.is_floating_point and one.dtype not in self.floats):
                return f"'{self.name}' has no kernels in {word} for all that float32 has"
            if one.device.type != "cpu":
                return f"it is on {one.device}, and '{self.name}' runs on the CPU here"
        return None

    def supports(self, region: Region) -> Answer:
        reason = self.missing() or why_not_plain(region) or self._why_not_body(region)
        return True if reason is None else Decline(reason)

    def _why_not_body(self, region: Region) -> str | None:
        away = next((d for d in operand_devices(region) if d.type != "cpu"), None)
        if away is not None:
            return f"its operands are on {away}, and '{self.name}' runs on the CPU here"
        graph = flat(cast("Body", region.body)).graph
        results = cast("Sequence[Node]", graph.output_node().args[0])
        for node in graph.nodes:
            if node.op == "get_attr":
                return f"it holds '{node.target}', which is no tensor"
            if node.op == "call_function":
                reason = self.why_not(node)
                if reason is not None:
                    return f"{reason} ('{node.name}')"
        for node in results:
            value = node.meta.get("val")
            if not isinstance(value, Tensor):
                return f"its result '{node.name}' is no tensor"
            if 0 in (s for s, n in zip(value.stride(), value.shape, strict=True) if n != 1):
                return f"the elements of its result '{node.name}' lie over each other"
        return None

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        body = flat(cast("Body", region.body))
        operands = [layout_of(e) if isinstance(e, Tensor) else None for e in examples]
        results = [layout_of(n.meta["val"]) for n in cast("Sequence[Node]", body.graph.output_node().args[0])]
        model = model_of(body.graph, self.dialect, operands=operands, results=results)
        return Model(self, model.SerializeToString(), tuple(operands), tuple(results))

    def prepare(self, site: CallSite) -> Compiled:
        model = cast("Model", site.compiled)
        counts = site.notes.setdefault(f"{self.name} weights", {})
        counts[site.name] = counts.get(site.name, 0) + 1
        constants = {i: site.operands[i] for i in site.constants if isinstance(site.operands[i], Tensor)}
        if not constants or counts[site.name] > _CHANGES:
            return model
        return model.bound(constants)

    def save(self, compiled: Any) -> bytes:
        return cast("Model", compiled).saved()

    def load(self, data: bytes, region: Region) -> Compiled:
        return Model.loaded(self, data)


def input_names(model: bytes) -> list[str]:
    """The names of the inputs of an ONNX model, which stand for the operands in their order."""
    import onnx

    return [i.name for i in onnx.ModelProto.FromString(model).graph.input]


class Session:
    """Code that a runtime made: takes the operands that are not built in, as the runtime has them."""

    @abstractmethod
    def __call__(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """The results, in memory that is theirs."""


class Model:
    """An ONNX model and the code that was made of it, one for each number of threads that torch was set to."""

    def __init__(
        self,
        backend: OnnxBackend,
        data: bytes,
        operands: tuple[Layout | None, ...],
        results: tuple[Layout, ...],
        constants: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.backend, self.data, self.operands, self.results = backend, data, operands, results
        self.constants = dict(constants or {})
        self._given = [i for i in range(len(operands)) if i not in self.constants]
        self._sessions: dict[int, Session] = {}
        self._lock = threading.Lock()

    def bound(self, constants: Mapping[int, Tensor]) -> Model:
        """The same with some operands built in."""
        made = Model(self.backend, self.data, self.operands, self.results, constants)
        made.session()
        return made

    def session(self) -> Session:
        """The code for the number of threads that torch has now."""
        threads = torch.get_num_threads()
        found = self._sessions.get(threads)
        if found is None:
            with self._lock:
                found = self._sessions.get(threads)
                if found is None:
                    rows = {i: self._rows(i, value.detach()) for i, value in self.constants.items()}
                    found = self._sessions[threads] = self.backend.session(self.data, rows, self.results)
        return found

    def _rows(self, i: int, value: Any) -> Tensor:
        layout = self.operands[i]
        return torch.tensor(value) if layout is None else layout.rows(value)

    def __call__(self, *operands: Any) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return self.session()(*[self._rows(i, operands[i]) for i in self._given])

    def saved(self) -> bytes:
        """The model and the layouts of its operands and results."""
        head = {"operands": [*map(_told, self.operands)], "results": [*map(_told, self.results)]}
        text = json.dumps(head).encode()
        return len(text).to_bytes(8, "little") + text + self.data

    @staticmethod
    def loaded(backend: OnnxBackend, data: bytes) -> Model:
        """What `saved` wrote."""
        end = 8 + int.from_bytes(data[:8], "little")
        head = json.loads(data[8:end])
        operands, results = (tuple(map(_layout, head[k])) for k in ("operands", "results"))
        return Model(backend, data[end:], operands, cast("tuple[Layout, ...]", results))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Model, (self.backend, self.data, self.operands, self.results, self.constants)


def _told(layout: Layout | None) -> Any:
    if layout is None:
        return None
    return [str(layout.dtype).removeprefix("torch."), layout.order, layout.sizes, layout.strides]


def _layout(told: Any) -> Layout | None:
    if told is None:
        return None
    dtype, *rest = told
    return Layout(getattr(torch, dtype), *(None if r is None else tuple(r) for r in rest))
