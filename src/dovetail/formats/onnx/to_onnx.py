"""Writes a graph as an ONNX file in which every region is a local function."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from dovetail.errors import InvalidArgument, SaveError, checked_call
from dovetail.formats.atomic_write import atomic_replace, resolve_target
from dovetail.formats.onnx.region_model import TRANSLATIONS
from dovetail.formats.onnx.writer import (
    IR_VERSION,
    OPSET,
    OnnxWriter,
    bind_arguments,
    element_type,
    tensor_proto,
    value_info,
)
from dovetail.frontend.cache_pytrees import leaf_steps
from dovetail.frontend.calling_convention import convention_of
from dovetail.ir.graph_module import Body, GraphOwner, attribute, only_graph
from dovetail.ir.meta_keys import DIM_NAMES, REGION
from dovetail.ir.source_location import of_node
from dovetail.lowering.failures import UnknownOp, UnsupportedOp, one_line
from dovetail.outlining.region import RegionCall, calls_in, results, unique_name

CustomFunction = Callable[..., Any]
"""Called with an `OnnxOperators` and the arguments of an operator; returns the name of the result, or a tuple."""


class OnnxOperators:
    """Appends ONNX nodes: `op.Relu(x)` returns the name of a ReLU of the value named x.

    Inputs are names of values, numbers, lists of numbers, tensors, or None for an omitted one. Keywords are attributes
    (numbers, strings, tensors, and lists of them), except `domain` ("" for ONNX's own operators) and `outputs`, the
    number of results. `node` is the FX node that is translated, with `node.meta["val"]` for its dtype and sizes.
    """

    def __init__(self, writer: OnnxWriter, node: Node, target: str) -> None:
        self._writer, self.node, self._target = writer, node, target

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        if kind.startswith("_"):
            raise AttributeError(kind)

        def append(*inputs: Any, domain: str = "", outputs: int = 1, **attributes: Any) -> Any:
            if not domain:
                self._check_known(kind)
            names = [self._value(value) for value in inputs]
            held = {k: tensor_proto(v) if isinstance(v, Tensor) else v for k, v in attributes.items()}
            result = self._writer.op(kind, *names, results=outputs, domain=domain, **held)
            if not domain:
                self._check_node(kind, self._writer.nodes[-1])
            return result

        return append

    def _value(self, value: Any) -> str:
        if value is None:
            return ""
        if isinstance(value, str):
            if not self._writer.has(value):
                raise self._wrong(f"reads {value!r}, which is not a value of the graph")
            return value
        if isinstance(value, Tensor):
            return self._writer.op("Constant", value=tensor_proto(value), label="constant")
        numbers: list[Any] = list(cast("list[Any]", value)) if isinstance(value, (list, tuple)) else [value]
        for kind, dtype in ((bool, torch.bool), (int, torch.int64), ((int, float), torch.float32)):
            # An empty list holds sizes or axes.
            if all(isinstance(n, kind) for n in numbers) and (numbers or kind is int):
                return self._writer.constant(value, dtype)
        raise self._wrong(f"reads a {type(value).__name__}; inputs are names of values, numbers and tensors")

    def _check_known(self, kind: str) -> None:
        from onnx import defs

        try:
            defs.get_schema(kind, OPSET, "")
        except defs.SchemaError as error:
            raise self._wrong(
                f"uses '{kind}', which opset {OPSET} of ONNX does not have; give domain= for one of another"
            ) from error

    def _check_node(self, kind: str, written: Any) -> None:
        from onnx import checker

        context = checker.C.CheckerContext()
        context.ir_version, context.opset_imports = IR_VERSION, {"": OPSET}
        try:
            checker.check_node(written, context)
        except checker.ValidationError as error:
            raise self._wrong(f"uses '{kind}' wrongly: {one_line(error)}") from error

    def _wrong(self, what: str) -> SaveError:
        return SaveError(f"the translation of {self._target} {what}.", self.node.name)


class CustomTranslation:
    """A user's translation of an operator."""

    def __init__(self, target: str, function: CustomFunction) -> None:
        self.target, self.function = target, function
        self.used = False

    def write(self, writer: OnnxWriter, node: Node) -> Any:
        """Append the nodes of the translation; raise SaveError if it is wrong."""
        self.used = True
        args, kwargs = map_arg(bind_arguments(node), writer.of)
        try:
            result = self.function(OnnxOperators(writer, node, self.target), *args, **kwargs)
        except SaveError:
            raise
        except Exception as error:  # whatever a user's function raises
            raise SaveError(
                f"the translation of {self.target} raised {one_line(error).removesuffix('.')}.", node.name
            ) from error
        value = node.meta.get("val")
        is_tuple = isinstance(value, (tuple, list))
        names: list[Any] = list(result) if isinstance(result, (tuple, list)) else [result]
        count = len(cast("tuple[Any, ...]", value)) if is_tuple else 1
        wrong = not all(isinstance(n, str) and writer.has(n) for n in names) or len(names) != count
        if wrong or is_tuple != isinstance(result, (tuple, list)):
            expected = f"a tuple of {count} names" if is_tuple else "the name"
            raise SaveError(
                f"the translation of {self.target} returned {result!r}; return {expected} of the results of its "
                f"last ONNX operators.",
                node.name,
            )
        return tuple(names) if is_tuple else names[0]

    def check(self, model: Any) -> None:
        """Raise SaveError if this translation is part of the model and the types of the model are inconsistent."""
        if not self.used or model.ByteSize() > _LARGEST:
            return
        import onnx

        try:
            onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
            raise SaveError(
                f"with the translation of {self.target} the model is not valid: {one_line(error)}."
            ) from error


DOMAIN = "dovetail"
"""The domain of functions whose kind names no vendor."""
IDENTITY = REGION
"""The key in the metadata of a call with the region's identity as JSON; the same as in `node.meta`."""
GRAPH = "dovetail.graph"
"""The key in the metadata of a model with the version of this format."""
FORMAT = 1

# protobuf serializes at most 2 GiB.
_LARGEST = 2**31 - 2**26


@checked_call()
def to_onnx(
    gm: GraphModule | GraphOwner,
    path: str | Path,
    *,
    operators: Mapping[OpOverload | OpOverloadPacket, CustomFunction] | None = None,
) -> Path:
    """Write a graph as an ONNX model whose regions are local functions.

    A region's kind is the domain and the name of its function ("npu.pool" is `pool` of domain `npu`; without a vendor
    the domain is `dovetail`), its attributes are attributes of the call. There is one function for each distinct body;
    if bodies share a kind, the names of all but the first end in a number. Weights are initialisers under the names of
    the state dict, beyond 2 GiB in a file of their own beside the model. Inputs and results are those of the graph,
    flat, in its order. Results are named by their path in what the model returns: keys, fields and positions separated
    by dots, a position alone as `output_0`, a lone tensor as `output`; None is left out. Sizes given as
    `torch.export.Dim` keep their names. `operators` has custom translations: functions that are called with a writer of
    ONNX nodes (`op.Relu(x)`) and the arguments of the operator, tensors as the names of values, and return the name of
    the result, or a tuple of names. Raises SaveError with every unsupported operator; then nothing is written.
    """
    gm = only_graph(gm)
    translations = _checked_translations(operators)
    if not isinstance(path, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"path {path!r} is neither a str nor a path.")
    try:
        import onnx
    except ImportError as error:
        raise SaveError("onnx is not installed; pip install 'dovetail[onnx]'") from error
    target = resolve_target(path)
    model = _ModelWriter(gm, translations).model()
    external = model.ByteSize() > _LARGEST
    if external and os.path.islink(path):
        raise SaveError(f"'{path}' is a link, and weights beyond 2 GiB go beside the file: give '{target}'.")
    with atomic_replace(target) as written:
        if external:
            location = f"{target.name}.data"
            onnx.save_model(model, str(written), save_as_external_data=True, location=location)
        else:
            written.write_bytes(model.SerializeToString(deterministic=True))
    return Path(path)


def _checked_translations(operators: Any) -> dict[Any, CustomTranslation]:
    if operators is None:
        return {}
    if not isinstance(operators, Mapping):
        raise InvalidArgument(
            f"operators must be a dict from operators to functions, not a {type(operators).__name__}."
        )
    translations: dict[Any, CustomTranslation] = {}
    for target, function in cast("Mapping[Any, Any]", operators).items():
        if not isinstance(target, (OpOverload, OpOverloadPacket)):
            raise InvalidArgument(
                f"operators has the key {target!r}; keys are operators, as torch.ops.aten.relu.default."
            )
        if not callable(function):
            raise InvalidArgument(
                f"operators[{target}] is a {type(function).__name__}; a translation is a function of a "
                f"writer and the operator's arguments."
            )
        translations[target] = CustomTranslation(str(target), function)
    return translations


class _Failures:
    """Reasons why nodes cannot be written as ONNX, counted, each with its first node."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, Node] = {}
        self.missing = False

    def add(self, failure: UnsupportedOp, node: Node) -> None:
        self.counts[str(failure)] += 1
        self.first.setdefault(str(failure), node)
        self.missing = self.missing or isinstance(failure, UnknownOp)

    def check(self) -> None:
        """Raise SaveError with all reasons, if there is any."""
        if not self.counts:
            return
        hint = ""
        if self.missing:
            hint = " Give a translation: to_onnx(gm, path, operators={torch.ops.ns.name.overload: function})."
        first = next(iter(self.first.values())).name
        if len(self.counts) == 1:
            (reason, count), *_ = self.counts.items()
            times = f" ({count} times)" if count > 1 else ""
            place = _place(self.first[reason])
            raise SaveError(f"{reason}{times}; this graph cannot be written as ONNX.{hint}{place}", first)
        lines = [
            f"\n  {reason}: {count} time{'s' * (count > 1)}, first node '{self.first[reason].name}'"
            f"{_place(self.first[reason])}"
            for reason, count in self.counts.items()
        ]
        raise SaveError(f"this graph cannot be written as ONNX.{hint}{''.join(lines)}", first)


def _place(node: Node) -> str:
    line = of_node(node)
    return f"\n    at {line}" if line is not None else ""


class _Functions:
    """The functions of a model, one for each kind and body."""

    def __init__(self, translations: Mapping[Any, CustomTranslation]) -> None:
        self.translations, self.failures = translations, _Failures()
        self._failed: dict[tuple[str, int], Counter[str]] = {}
        self.domains: dict[str, int] = {}
        self.protos: dict[tuple[str, int], Any] = {}
        self._names: dict[str, dict[str, int]] = {}

    def of(self, body: Body, call: RegionCall) -> tuple[str, str]:
        """Return domain and name of the function of a body, written on its first call."""
        from onnx import helper

        kind = call.identity.kind
        key = (kind, id(body))
        attributes = sorted(json.loads(call.identity.attrs))
        proto = self.protos.get(key)
        if proto is not None:
            # A call may have only attributes that its function declares; this one may have others than the first.
            proto.attribute.extend(a for a in attributes if a not in proto.attribute)
            self.failures.counts.update(self._failed[key])
            return proto.domain, proto.name
        vendor, _, name = kind.rpartition(".")
        domain = vendor or DOMAIN
        # ONNX has overloads for this, but ONNX Runtime confuses them where functions call functions.
        name = unique_name(name, self._names.setdefault(domain, {}))
        before = Counter(self.failures.counts)
        writer = _GraphWriter(self, body, call)
        inputs = []
        for node in body.graph.nodes:
            if node.op == "placeholder":
                writer.names[node] = writer.name(node.name)
                inputs.append(writer.names[node])
        for node in writer.calls:
            writer.write_checked(node)
        outputs = writer.outputs(results(body))
        self._failed[key] = self.failures.counts - before
        used = {"": OPSET, **{n.domain: 1 for n in writer.nodes if n.domain}}
        self.domains.update((d, 1) for d in (domain, *used) if d)
        self.protos[key] = helper.make_function(
            domain,
            name,
            inputs,
            [output for output, _ in outputs],
            writer.nodes,
            [helper.make_opsetid(d, v) for d, v in used.items()],
            attributes=attributes,
            doc_string=f"{kind}, version {call.identity.version}",
        )
        return domain, name


class _GraphWriter(OnnxWriter):
    """Writes the nodes of a graph that may call regions."""

    def __init__(self, functions: _Functions, owner: GraphModule, caller: RegionCall | None = None) -> None:
        super().__init__(TRANSLATIONS)
        self.functions, self.owner = functions, owner
        self.calls = calls_in(owner, caller)

    def write_checked(self, node: Node) -> None:
        """Append the translation of a node; record a failure and give the node a name all the same."""
        try:
            call = self.calls.get(node)
            custom = self._custom_translation(node)
            if call is not None:
                self._call(node, call)
            elif custom is not None:
                self.names[node] = custom.write(self, node)
            elif node.op == "get_attr":
                self.names[node] = self._constant_attribute(node)
            elif _is_unused_draw(node):
                self.names[node] = node.name
            elif node.meta.get("val") is None and not node.users:
                raise UnsupportedOp(f"{node.target} has a side effect; ONNX has values only")
            else:
                self.write(node)
        except UnsupportedOp as failure:
            self.functions.failures.add(failure, node)
            value = node.meta.get("val")
            is_tuple = isinstance(value, (tuple, list))
            self.names[node] = (node.name,) * len(cast("tuple[Any, ...]", value)) if is_tuple else node.name

    def _custom_translation(self, node: Node) -> CustomTranslation | None:
        custom, target = self.functions.translations, node.target
        if not isinstance(target, OpOverload):
            return None
        return custom.get(target) or custom.get(target.overloadpacket)

    def _constant_attribute(self, node: Node) -> str:
        value = attribute(self.owner, cast("str", node.target))
        if not isinstance(value, Tensor):
            raise UnsupportedOp(f"it holds a {type(value).__name__}")
        return self.op("Constant", value=tensor_proto(value), label=node.name)

    def _call(self, node: Node, call: RegionCall) -> None:
        from onnx import helper

        body = cast("Body", attribute(self.owner, cast("str", node.target)))
        domain, name = self.functions.of(body, call)
        attrs = json.loads(call.identity.attrs)
        count = len(results(body))
        outputs = [self.name(f"{node.name}_{i}" if count > 1 else node.name) for i in range(count)]
        call_node = helper.make_node(
            name,
            [self.of(a) for a in cast("Iterable[Any]", node.args)],
            outputs,
            name=node.name,
            domain=domain,
            **{key: _attribute(value) for key, value in attrs.items()},
        )
        entry = call_node.metadata_props.add()
        entry.key, entry.value = IDENTITY, json.dumps(_identity(node, call, attrs), sort_keys=True)
        self.nodes.append(call_node)
        self.names[node] = tuple(outputs)

    def outputs(self, nodes: Iterable[Any]) -> list[tuple[str, Node]]:
        """Return the names of results, all different, and different from those of inputs."""
        names: set[str] = set()
        outputs: list[tuple[str, Node]] = []
        for node in nodes:
            if not isinstance(node, Node):
                raise SaveError(f"the graph returns {node!r}, and ONNX has tensors only.")
            name = self.of(node)
            if name in names or node.op in ("placeholder", "get_attr"):
                name = self.op("Identity", name, label=f"{node.name}_result")
            names.add(name)
            outputs.append((name, node))
        return outputs


class _ModelWriter:
    def __init__(self, gm: GraphModule, translations: Mapping[Any, CustomTranslation]) -> None:
        self.gm = gm
        self.functions = _Functions(translations)
        self.dim_names = _dim_names(gm)
        self.writer = _GraphWriter(self.functions, gm)
        self.initialisers: list[Any] = []
        self._weights: dict[Any, str] = {}

    def model(self) -> Any:
        from onnx import helper

        writer = self.writer
        inputs: list[Any] = []
        for node in self.gm.graph.find_nodes(op="placeholder"):
            writer.names[node] = writer.name(node.name)
            if node.users or isinstance(node.meta.get("val"), Tensor):
                inputs.append(self._value_info(writer.names[node], node))
        returned = pytree.tree_leaves(self.gm.graph.output_node().args)
        labelled = zip(self._labels(len(returned)), returned, strict=True)
        present = [(writer.name(label), value) for label, value in labelled if value is not None]
        if not present:
            raise SaveError("the graph returns no tensor, and an ONNX model has to.")
        labels = [label for label, _ in present]
        for node in writer.calls:
            if node.op == "get_attr" and isinstance(attribute(self.gm, cast("str", node.target)), Tensor):
                writer.names[node] = self._initialiser(node)
        for node in writer.calls:
            if node not in writer.names:
                writer.write_checked(node)
        self.functions.failures.check()
        results = writer.outputs(value for _, value in present)
        _rename(writer.nodes, {name: label for (name, _), label in zip(results, labels, strict=True)})
        outputs = [self._value_info(label, node) for (_, node), label in zip(results, labels, strict=True)]
        domains = {"": OPSET, **self.functions.domains, **{n.domain: 1 for n in writer.nodes if n.domain}}
        model = helper.make_model(
            helper.make_graph(writer.nodes, "graph", inputs, outputs, self.initialisers),
            functions=list(self.functions.protos.values()),
            opset_imports=[helper.make_opsetid(d, v) for d, v in domains.items()],
            ir_version=IR_VERSION,
            producer_name="dovetail",
        )
        helper.set_model_props(model, {GRAPH: str(FORMAT)})
        for translation in self.functions.translations.values():
            translation.check(model)
        return model

    def _labels(self, count: int) -> list[str]:
        """Return names for the results, by their paths in what the model returns."""
        convention = convention_of(self.gm)
        if convention is None or convention.out_spec.num_leaves != count:
            paths: list[tuple[Any, ...]] = [(i,) for i in range(count)] if count != 1 else [()]
        else:
            paths = leaf_steps(convention.out_spec)
        return [_label(path) for path in paths]

    def _value_info(self, name: str, node: Node) -> Any:
        try:
            info = value_info(name, node.meta.get("val"))
            for dim in info.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = re.sub(r"\w+", lambda m: self.dim_names.get(m[0], m[0]), dim.dim_param)
            return info
        except UnsupportedOp as failure:
            raise SaveError(f"{failure}; this graph cannot be written as ONNX.", node.name) from failure

    def _initialiser(self, node: Node) -> str:
        """Return the name of a weight; one that has two names is written once."""
        value = cast("Tensor", attribute(self.gm, cast("str", node.target))).detach()
        place = (value.data_ptr(), value.dtype, tuple(value.shape), tuple(value.stride()))
        if place not in self._weights or not value.numel():
            try:
                element_type(value.dtype)
            except UnsupportedOp as failure:
                raise SaveError(f"{failure}; this graph cannot be written as ONNX.", node.name) from failure
            proto = tensor_proto(value)
            proto.name = self._weights[place] = self.writer.name(cast("str", node.target))
            self.initialisers.append(proto)
        return self._weights[place]


def _dim_names(gm: GraphModule) -> dict[str, str]:
    """Return the names of sizes given as `torch.export.Dim`, by their symbols."""
    by_place: Mapping[str, str] = gm.meta.get(DIM_NAMES, {})
    names: dict[str, str] = {}
    for node in gm.graph.find_nodes(op="placeholder") if by_place else ():
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            name = by_place.get(f"{node.name}:{dim}")
            if name is not None and isinstance(size, SymInt) and size.node.expr.is_symbol:
                names.setdefault(str(size.node.expr), name)
    return names


def _is_unused_draw(node: Node) -> bool:
    """Whether a node only advances the random generator, which ONNX does not have."""
    target = node.target
    if node.users or not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    return target.namespace == "aten" and torch.Tag.nondeterministic_seeded in target.tags


def _label(path: tuple[Any, ...]) -> str:
    """Return a path in a structure as a name: keys, fields and positions separated by dots."""
    named = bool(path) and not isinstance(path[0], int)
    first = str(path[0]) if named else f"output_{path[0]}" if path else "output"
    return ".".join([first or "output", *(str(step) for step in path[1:])])


def _rename(nodes: Iterable[Any], names: Mapping[str, str]) -> None:
    for node in nodes:
        for values in (node.input, node.output):
            for i, value in enumerate(values):
                if value in names:
                    values[i] = names[value]


def _identity(node: Node, call: RegionCall, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a region's identity and, for a match of a pattern, the roles of its operands and results."""
    identity = call.identity
    row = {"name": node.name, "kind": identity.kind, "version": identity.version, "attrs": attrs}
    if call.arguments or call.results:
        row |= {"arguments": dict(call.arguments), "results": list(call.results)}
    return row


def _attribute(value: Any) -> Any:
    """Return an attribute as ONNX has it; a value without an ONNX type is written as JSON."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (int, float, str)):
        return value
    if isinstance(value, list) and value:
        kinds = {type(v) for v in cast("list[Any]", value)}
        if kinds in ({int}, {float}, {str}):
            return cast("Any", value)
    return json.dumps(value)
