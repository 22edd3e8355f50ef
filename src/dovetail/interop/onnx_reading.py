"""A graph from an ONNX file: its local functions are regions again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from dovetail.errors import CaptureError, InvalidArgument, InvalidFile, checked_call
from dovetail.fusion.fuse import fuse
from dovetail.graph.capture import capture
from dovetail.interop.boundaries import OPERAND, RESULT, Boundaries, unmarked
from dovetail.interop.boundaries import marked as seen
from dovetail.interop.onnx_operators import NoCounterpart, operators
from dovetail.interop.onnx_versions import current
from dovetail.interop.onnx_writing import DOMAIN, GRAPH, TOLD
from dovetail.interop.onnx_writing import FORMAT as WRITTEN
from dovetail.lowering.faults import in_a_line
from dovetail.lowering.onnx.types import DTYPES
from dovetail.rules.rule import Candidate, Proposal, Rule
from dovetail.rules.scene import Scene

_LARGEST_LIST = 64
"""Whole numbers in vectors up to this length are sizes and positions; longer ones are data."""


@checked_call()
def from_onnx(path: str | Path, *, sizes: Mapping[str, int] | None = None) -> GraphModule:
    """The graph that an ONNX model is, its local functions as regions.

    It takes the inputs of the model in their order and returns its results as a tuple. `sizes` gives numbers for sizes
    that are open in the model, 2 unless told; other calls than with these need another graph. Functions that
    `to_onnx` wrote have the kind, version and attributes they had; any other is of the kind `domain.name`, with the
    attributes of its call. Opsets before 13 are converted where onnx can. Raises InvalidFile where it is no ONNX model,
    of an opset after 26, or has an operator that ATen has not.
    """
    if not isinstance(path, (str, Path)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"path {path!r} is neither a str nor a Path.")
    _check_sizes(sizes)
    model = current(_parsed(path), path)
    reading = _Reading(model)
    try:
        program = _Program(model, reading)
        _check_open(program.described, sizes or {})
        examples = tuple(_example(i, sizes or {}, path) for i in program.described)
        gm, values = unmarked(capture(program.eval(), examples))
    except NoCounterpart as failure:
        raise InvalidFile(path, f"cannot be read: {failure}.") from failure
    except CaptureError as error:
        if reading.failure is None:
            raise
        raise InvalidFile(path, f"cannot be read: {reading.failure}.") from error
    marked = reading.marked
    for depth in range(max((m.depth for m in marked.values()), default=0), 0, -1):
        # Inner ones first: they are operations of those around them.
        gm = fuse(gm, _Marked(marked, depth, values), rounds=1)
    return gm


def _check_sizes(sizes: Any) -> None:
    given = {} if sizes is None else sizes
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"sizes {sizes!r}; give a mapping from the names of open sizes to numbers.")
    for name, size in cast("Mapping[Any, Any]", given).items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise InvalidArgument(f"sizes: {name!r} is {size!r}, which is no size.")


def _check_open(described: Iterable[Any], sizes: Mapping[str, int]) -> None:
    dims = [d for i in described for d in i.type.tensor_type.shape.dim]
    known = dict.fromkeys(d.dim_param for d in dims if not d.HasField("dim_value") and d.dim_param)
    for name in sizes:
        if name not in known:
            there = ", ".join(f"'{n}'" for n in known)
            has = f"Those that have a name are {there}." if known else "None of them has a name."
            raise InvalidArgument(f"sizes: no size that is open in the file is called {name!r}. {has}")


def _parsed(path: str | Path) -> Any:
    try:
        import onnx
    except ImportError as error:
        raise InvalidArgument("onnx is not installed; pip install 'dovetail[onnx]'") from error
    try:
        model = onnx.load(str(path))
    except OSError:
        raise  # a file that is not there, or not to be read, is told by Python
    except Exception as error:
        raise InvalidFile(path, f"is no ONNX model, or not a whole one: {error}") from error
    if not model.graph.output:
        raise InvalidFile(path, "is no ONNX model: it has no graph with results.")
    written = {p.key: p.value for p in model.metadata_props}.get(GRAPH)
    if written is not None and int(written) > WRITTEN:
        raise InvalidFile(path, "was written by a newer dovetail; update to read it.")
    return model


def _example(described: Any, sizes: Mapping[str, int], path: Any) -> Tensor:
    found = described.type.tensor_type
    if found.elem_type not in DTYPES:
        raise InvalidFile(path, f"has an input '{described.name}' of a type that torch has not.")
    shape = [d.dim_value if d.HasField("dim_value") else sizes.get(d.dim_param, 2) for d in found.shape.dim]
    return torch.zeros(shape, dtype=DTYPES[found.elem_type])


@dataclass(frozen=True)
class _Mark:
    """What a function call is: a region of some kind, at some depth of calls, perhaps found by a pattern.

    `arguments` has the number of the operand that each argument of the pattern is, `results` which result of the pattern
    each result is.
    """

    kind: str
    version: int
    attrs: Mapping[str, Any]
    depth: int
    arguments: Mapping[str, int]
    results: Sequence[int | None]


class _Reading:
    """A model that is being read: its functions, and the calls of them that were met, by path."""

    def __init__(self, model: Any) -> None:
        self.functions: dict[tuple[str, str], Any] = {(f.domain, f.name): f for f in model.functions}
        self.marked: dict[str, _Mark] = {}
        self.failure: str | None = None

    def made(self, node: Any, operator: Any, given: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        """The results of an operator. Why there are none is kept: an exporter tells it in words of its own."""
        try:
            made = operator(*given, **attributes)
            made = cast("tuple[Any, ...]", made) if isinstance(made, tuple) else (made,)
            if any(node.output[len(made) :]):
                raise NoCounterpart(
                    f"{len(node.output)} results are asked for, of which {len(made)} can be had"
                )
        except Exception as failure:
            reason = failure if isinstance(failure, NoCounterpart) else in_a_line(failure)
            self.failure = self.failure or f"{node.op_type} ('{node.name or node.output[0]}'): {reason}"
            raise
        return made


class _Function(nn.Module):
    """A list of ONNX nodes, run with torch; functions called in it are modules of it."""

    def __init__(
        self,
        nodes: Iterable[Any],
        inputs: Sequence[str],
        outputs: Sequence[str],
        reading: _Reading,
        path: str,
        depth: int,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.reading = list(inputs), list(outputs), reading
        self.steps: list[tuple[Any, Any, dict[str, Any]]] = []
        self.paths: dict[str, str] = {}
        nodes = list(nodes)
        # Fractions that a shape is computed from must be numbers; elsewhere a vector of them is a weight.
        self.scales = {n.input[2] for n in nodes if n.op_type == "Resize" and len(n.input) > 2}
        for node in nodes:
            function = reading.functions.get((node.domain, node.op_type))
            attributes = {a.name: _attribute(a) for a in node.attribute}
            if function is None:
                if node.op_type == "Constant" and node.output[0] in self.scales:
                    attributes = {
                        k: v.tolist() if isinstance(v, Tensor) else v for k, v in attributes.items()
                    }
                if node.op_type == "Split" and len([i for i in node.input if i]) < 2:
                    # Before opset 18 it is told by the results alone.
                    attributes.setdefault("num_outputs", len(node.output))
                self.steps.append((node, _operator(node), attributes))
                continue
            name = f"call_{len(self.steps)}"
            inner = f"{path}.{name}" if path else name
            self.paths[name] = inner
            reading.marked[inner] = _mark(node, attributes, depth + 1)
            body = _Function(function.node, function.input, function.output, reading, inner, depth + 1)
            self.add_module(name, body)
            self.steps.append((node, name, {}))

    def forward(self, *given: Any) -> tuple[Any, ...]:
        return self.run(dict(zip(self.inputs, given, strict=True)))

    def run(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """The results, given the inputs and weights by name."""
        for node, what, attributes in self.steps:
            given = [values[name] if name else None for name in node.input]
            if isinstance(what, str):
                path = self.paths[what]
                called = cast("nn.Module", self._modules[what])
                made = seen(path, RESULT, called(*seen(path, OPERAND, given)))
            else:
                made = self.reading.made(node, what, given, attributes)
            values.update((name, value) for name, value in zip(node.output, made, strict=False) if name)
        return tuple(values[name] for name in self.outputs)


class _Program(_Function):
    """A whole model; its initialisers are parameters and buffers, under their names where those can be names."""

    def __init__(self, model: Any, reading: _Reading) -> None:
        graph = model.graph
        held = {i.name for i in graph.initializer}
        self.described = [i for i in graph.input if i.name not in held]
        inputs, outputs = [i.name for i in self.described], [o.name for o in graph.output]
        super().__init__(graph.node, inputs, outputs, reading, "", 0)
        self.weights = {i.name: self._hold(i) for i in graph.initializer}

    def _hold(self, initialiser: Any) -> Any:
        """Keep data under the name it has in the model; where it can be found, or the number or list that it is."""
        value = _tensor(initialiser)
        known = value.tolist() if initialiser.name in self.scales else _known(value)
        if not isinstance(known, Tensor):
            return known
        owner: nn.Module = self
        *folders, name = initialiser.name.split(".")
        for folder in folders:
            if not isinstance(getattr(owner, folder, None), nn.Module):
                owner.add_module(folder, nn.Module())
            owner = cast("nn.Module", getattr(owner, folder))
        if value.is_floating_point():
            owner.register_parameter(name, nn.Parameter(value, requires_grad=False))
        else:
            owner.register_buffer(name, value)
        return (owner, name)

    def forward(self, *given: Any) -> tuple[Any, ...]:
        held = {k: getattr(*w) if isinstance(w, tuple) else w for k, w in self.weights.items()}
        return self.run({**held, **dict(zip(self.inputs, given, strict=True))})


def _operator(node: Any) -> Any:
    if node.op_type == "Constant" and not node.domain:
        return _constant
    found = operators().get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if found is None:
        label = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        raise NoCounterpart(f"ATen has no counterpart of the operator {label} ('{node.name}')")
    return found


def _constant(**attributes: Any) -> Any:
    (value,) = attributes.values()
    return _known(value) if isinstance(value, Tensor) else value


def _known(value: Tensor) -> Any:
    """A number or a short vector of whole numbers as Python has it; other data stay a tensor."""
    if value.dim() == 0:
        return value.item()
    short = value.dim() == 1 and value.numel() <= _LARGEST_LIST
    return value.tolist() if short and value.dtype in (torch.int64, torch.int32) else value


def _tensor(proto: Any) -> Tensor:
    from onnx import numpy_helper

    if proto.data_type not in DTYPES:
        raise NoCounterpart(f"torch has no dtype for the data of '{proto.name}'")
    dtype = DTYPES[proto.data_type]
    if proto.raw_data and math.prod(proto.dims):
        raw = torch.frombuffer(bytearray(proto.raw_data), dtype=torch.uint8)
        return raw.view(dtype).reshape(list(proto.dims)).clone()
    return torch.from_numpy(numpy_helper.to_array(proto).copy()).to(dtype)


def _attribute(attribute: Any) -> Any:
    from onnx import helper

    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    if hasattr(value, "data_type"):
        return _tensor(value)
    if isinstance(value, Iterable) and not isinstance(value, (str, dict)):
        return [v.decode() if isinstance(v, bytes) else v for v in cast("Iterable[Any]", value)]
    if not isinstance(value, (int, float, str)):
        raise NoCounterpart(f"an attribute '{attribute.name}' that is a {type(value).__name__}")
    return value


def _mark(node: Any, attributes: Mapping[str, Any], depth: int) -> _Mark:
    told = {p.key: p.value for p in node.metadata_props}.get(TOLD)
    if told is not None:
        identity = json.loads(told)
        arguments, results = identity.get("arguments", {}), identity.get("results", ())
        return _Mark(identity["kind"], identity["version"], identity["attrs"], depth, arguments, results)
    plain = {k: v for k, v in attributes.items() if not isinstance(v, Tensor)}
    kind = node.op_type if node.domain in ("", DOMAIN) else f"{node.domain}.{node.op_type}"
    return _Mark(kind, 1, plain, depth, {}, ())


class _Marked(Rule):
    """Proposes what was called as one function, by the modules that the operations come from."""

    name = "onnx_functions"
    kind = "function"
    nests = True

    def __init__(self, marked: Mapping[str, _Mark], depth: int, values: Boundaries) -> None:
        self.marked, self.depth, self.values = marked, depth, values

    def propose(self, scene: Scene) -> Iterable[Proposal]:
        found: dict[str, list[int]] = {}
        for i, node in enumerate(scene.nodes):
            for _, (path, *_rest) in cast(
                "Mapping[str, Any]", node.meta.get("nn_module_stack") or {}
            ).items():
                mark = self.marked.get(path)
                if mark is not None and mark.depth == self.depth:
                    found.setdefault(path, []).append(i)
        for path, members in found.items():
            mark = self.marked[path]
            numbers = {k: i for i, k in enumerate(mark.results) if k is not None}
            given = {n: self._at(scene, path, OPERAND, i) for n, i in mark.arguments.items()}
            results: list[int | None] = [None] * (max(numbers, default=-1) + 1)
            for k, i in numbers.items():
                results[k] = self._at(scene, path, RESULT, i)
            yield Candidate(
                self.name,
                mark.kind,
                tuple(members),
                mark.attrs,
                mark.version,
                escapes="output",
                arguments={n: i for n, i in given.items() if i is not None} or None,
                results=tuple(results) if any(results[k] is not None for k in numbers) else (),
            )

    def _at(self, scene: Scene, path: str, what: str, number: int) -> int | None:
        """The position of an operand or a result of a call."""
        return scene.index.names.get(self.values.get((path, what, number), ""))
