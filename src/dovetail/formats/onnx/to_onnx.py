"""A fused graph as an ONNX file: every region a local function, called where the region is."""

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
from dovetail.lowering.failures import UnknownOp, UnsupportedOp, in_a_line
from dovetail.outlining.region import RegionCall, call_of, results

CustomFunction = Callable[..., Any]
"""Called with an `OnnxOperators` and the arguments of an operator; returns the name of the result, or a tuple of them."""
_LARGEST_CHECKED = 2**31 - 2**26


class OnnxOperators:
    """Appends ONNX nodes: `op.Relu(x)` is the name of a ReLU of the value named x.

    Inputs are names of values, numbers, lists of numbers, tensors, or None for one that is left out. Keywords are
    attributes (numbers, texts, tensors, and lists of them), save `domain` ("" for ONNX's own operators) and `outputs`, how many results there are. `node` is the
    operation that is written, with `node.meta["val"]` for its dtype and sizes.
    """

    def __init__(self, writer: OnnxWriter, node: Node, what: str) -> None:
        self._writer, self.node, self._what = writer, node, what

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
                raise self._wrong(f"reads {value!r}, which is no value of the graph")
            return value
        if isinstance(value, Tensor):
            return self._writer.op("Constant", value=tensor_proto(value), label="constant")
        numbers: list[Any] = list(cast("list[Any]", value)) if isinstance(value, (list, tuple)) else [value]
        for kind, dtype in ((bool, torch.bool), (int, torch.int64), ((int, float), torch.float32)):
            # An empty list is of sizes or axes.
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
            raise self._wrong(f"uses '{kind}' wrongly: {in_a_line(error)}") from error

    def _wrong(self, what: str) -> SaveError:
        return SaveError(f"the form given for {self._what} {what}.", self.node.name)


class CustomTranslation:
    """The form that a user gave for an operator."""

    def __init__(self, target: str, function: CustomFunction) -> None:
        self.target, self.function = target, function
        self.used = False

    def write(self, writer: OnnxWriter, node: Node) -> Any:
        """Append the nodes of the form; SaveError where it is wrong."""
        self.used = True
        args, kwargs = map_arg(bind_arguments(node), writer.of)
        try:
            result = self.function(OnnxOperators(writer, node, self.target), *args, **kwargs)
        except SaveError:
            raise
        except Exception as error:  # whatever a user's function raises
            raise SaveError(
                f"the form given for {self.target} raised {in_a_line(error).removesuffix('.')}.",
                node.name,
            ) from error
        value = node.meta.get("val")
        several = isinstance(value, (tuple, list))
        names: list[Any] = list(result) if isinstance(result, (tuple, list)) else [result]
        expected = len(cast("tuple[Any, ...]", value)) if several else 1
        wrong = not all(isinstance(n, str) and writer.has(n) for n in names) or len(names) != expected
        if wrong or several != isinstance(result, (tuple, list)):
            form = f"a tuple of {expected} names" if several else "the name"
            raise SaveError(
                f"the form given for {self.target} returned {result!r}; return {form} of what its last "
                f"ONNX operators gave.",
                node.name,
            )
        return tuple(names) if several else names[0]

    def check(self, model: Any) -> None:
        """Refuse a model whose types do not fit together, if this form is part of it."""
        if not self.used or model.ByteSize() > _LARGEST_CHECKED:
            return
        import onnx

        try:
            onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError) as error:
            raise SaveError(
                f"with the form given for {self.target} the model is not valid: {in_a_line(error)}."
            ) from error


DOMAIN = "dovetail"
"""The domain of functions whose kind names no vendor."""
IDENTITY = REGION
"""The key in the metadata of a call that has all of the region's identity, as JSON: that of the call here."""
GRAPH = "dovetail.graph"
"""The key in the metadata of a model with the version of what is written here."""
FORMAT = 1

# protobuf takes no more than 2 GiB in one piece.
_LARGEST = 2**31 - 2**26


@checked_call()
def to_onnx(
    gm: GraphModule | GraphOwner,
    path: str | Path,
    *,
    operators: Mapping[OpOverload | OpOverloadPacket, CustomFunction] | None = None,
) -> Path:
    """Write a graph as an ONNX model whose regions are local functions.

    A region's kind is the domain and the name of its function ("npu.pool" is `pool` of domain `npu`; without a vendor the
    domain is `dovetail`), its attributes are attributes of the call. There is one function for each distinct body; where
    several have one kind, the names of all but the first end in a number. Weights are initialisers under the names of the state dict,
    beyond 2 GiB in a file of their own beside the model. Inputs and results are those of the graph, flat, in its order.
    Results are named by their place in what the model returns: keys, fields and positions with dots between them, a
    position alone as `output_0`, a lone tensor as `output`; None is left out. Sizes given as `torch.export.Dim` keep their names.
    `operators` has forms of one's own: functions that are called with a writer of ONNX nodes (`op.Relu(x)`) and the
    arguments of the operator, tensors as the names of values, and return the name of the result, or a tuple of names.
    Raises SaveError, with every operator that has no form, where ONNX cannot hold the graph; then nothing is written.
    """
    gm = only_graph(gm)
    forms = _checked_forms(operators)
    if not isinstance(path, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"path {path!r} is neither a str nor a path.")
    try:
        import onnx
    except ImportError as error:
        raise SaveError("onnx is not installed; pip install 'dovetail[onnx]'") from error
    target = resolve_target(path)
    model = _Model(gm, forms).made()
    apart = model.ByteSize() > _LARGEST
    if apart and os.path.islink(path):
        raise SaveError(f"'{path}' is a link, and weights beyond 2 GiB lie beside the file: give '{target}'.")
    with atomic_replace(target) as written:
        if apart:
            beside = f"{target.name}.data"
            onnx.save_model(model, str(written), save_as_external_data=True, location=beside)
        else:
            written.write_bytes(model.SerializeToString(deterministic=True))
    return Path(path)


def _checked_forms(operators: Any) -> dict[Any, CustomTranslation]:
    if operators is None:
        return {}
    if not isinstance(operators, Mapping):
        raise InvalidArgument(
            f"operators must be a dict from operators to functions, not a {type(operators).__name__}."
        )
    forms: dict[Any, CustomTranslation] = {}
    for target, function in cast("Mapping[Any, Any]", operators).items():
        if not isinstance(target, (OpOverload, OpOverloadPacket)):
            raise InvalidArgument(
                f"operators has the key {target!r}; keys are operators, as torch.ops.aten.relu.default."
            )
        if not callable(function):
            raise InvalidArgument(
                f"operators[{target}] is a {type(function).__name__}; a form is a function of a writer and "
                f"the operator's arguments."
            )
        forms[target] = CustomTranslation(str(target), function)
    return forms


class _Failures:
    """What has no form in ONNX, counted, each with the first node that it is."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, Node] = {}
        self.missing = False

    def add(self, failure: UnsupportedOp, node: Node) -> None:
        self.counts[str(failure)] += 1
        self.first.setdefault(str(failure), node)
        self.missing = self.missing or isinstance(failure, UnknownOp)

    def check(self) -> None:
        """Raise SaveError with all of them, if there is any."""
        if not self.counts:
            return
        hint = ""
        if self.missing:
            hint = " Give forms of your own: to_onnx(gm, path, operators={torch.ops.ns.name.overload: form})."
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

    def __init__(self, forms: Mapping[Any, CustomTranslation]) -> None:
        self.forms, self.failures = forms, _Failures()
        self._failed: dict[tuple[str, int], Counter[str]] = {}
        self.made: list[Any] = []
        self.domains: dict[str, int] = {}
        self._known: dict[tuple[str, int], Any] = {}
        self._taken: dict[tuple[str, str], int] = {}

    def of(self, body: Body, call: RegionCall) -> tuple[str, str]:
        """Domain and name of the function that a call of a body is."""
        from onnx import helper

        kind = call.identity.kind
        attributes = sorted(json.loads(call.identity.attrs))
        known = self._known.get((kind, id(body)))
        if known is not None:
            # A call may carry what its function declares; this one may carry more than those before it.
            known.attribute.extend(a for a in attributes if a not in known.attribute)
            self.failures.counts.update(self._failed[kind, id(body)])
            return known.domain, known.name
        vendor, _, name = kind.rpartition(".")
        domain = vendor or DOMAIN
        # ONNX has overloads for this, but ONNX Runtime takes one for the other where functions call functions.
        while (domain, name) in self._taken:
            self._taken[domain, name] += 1
            name = f"{name}_{self._taken[domain, name]}"
        self._taken[domain, name] = 0
        before = Counter(self.failures.counts)
        writer = _GraphWriter(self, body, call)
        inputs = []
        for node in body.graph.nodes:
            if node.op == "placeholder":
                writer.names[node] = writer.name(node.name)
                inputs.append(writer.names[node])
        for node in body.graph.nodes:
            if node.op not in ("placeholder", "output"):
                writer.write_checked(node)
        outputs = writer.outputs(results(body))
        self._failed[kind, id(body)] = self.failures.counts - before
        used = {"": OPSET, **{n.domain: 1 for n in writer.nodes if n.domain}}
        self.domains.update((d, 1) for d in (domain, *used) if d)
        made = self._known[kind, id(body)] = helper.make_function(
            domain,
            name,
            inputs,
            [output for output, _ in outputs],
            writer.nodes,
            [helper.make_opsetid(d, v) for d, v in used.items()],
            attributes=attributes,
            doc_string=f"{kind}, version {call.identity.version}",
        )
        self.made.append(made)
        return domain, name


class _GraphWriter(OnnxWriter):
    """Writes the nodes of a graph that may call regions."""

    def __init__(self, functions: _Functions, owner: GraphModule, within: RegionCall | None = None) -> None:
        super().__init__()
        self.functions, self.owner = functions, owner
        inside = [n for n in owner.graph.nodes if n.op not in ("placeholder", "output")]
        # One body serves many calls; what it calls is told by the first of them.
        self.calls: dict[Node, RegionCall | None] = (
            {n: call_of(n.meta) for n in inside}
            if within is None
            else {n: call_of(m.meta) for n, m in zip(inside, within.members, strict=True)}
        )

    def write_checked(self, node: Node) -> None:
        """Append what a node computes; what cannot be written is noted, and has a name all the same."""
        try:
            call = self.calls.get(node)
            form = self._custom_form(node)
            if call is not None:
                self._call(node, call)
            elif form is not None:
                self.names[node] = form.write(self, node)
            elif node.op == "get_attr":
                self.names[node] = self._held(node)
            elif _is_unused_draw(node):
                self.names[node] = node.name
            elif node.meta.get("val") is None and not node.users:
                raise UnsupportedOp(f"{node.target} acts on something; ONNX has values only")
            else:
                self.write(node)
        except UnsupportedOp as failure:
            self.functions.failures.add(failure, node)
            value = node.meta.get("val")
            several = isinstance(value, (tuple, list))
            count = len(cast("tuple[Any, ...]", value)) if several else 0
            self.names[node] = tuple(node.name for _ in range(count)) if several else node.name

    def _custom_form(self, node: Node) -> CustomTranslation | None:
        forms, target = self.functions.forms, node.target
        if not isinstance(target, OpOverload):
            return None
        return forms.get(target) or forms.get(target.overloadpacket)

    def _held(self, node: Node) -> str:
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
        made = [self.name(f"{node.name}_{i}" if count > 1 else node.name) for i in range(count)]
        written = helper.make_node(
            name,
            [self.of(a) for a in cast("Iterable[Any]", node.args)],
            made,
            name=node.name,
            domain=domain,
            **{key: _attribute(value) for key, value in attrs.items()},
        )
        entry = written.metadata_props.add()
        entry.key, entry.value = IDENTITY, json.dumps(_told(node, call, attrs), sort_keys=True)
        self.nodes.append(written)
        self.names[node] = tuple(made)

    def outputs(self, nodes: Iterable[Any]) -> list[tuple[str, Node]]:
        """The names of results, each one of its own and none that of an input."""
        taken: set[str] = set()
        found: list[tuple[str, Node]] = []
        for node in nodes:
            if not isinstance(node, Node):
                raise SaveError(f"the graph returns {node!r}, and ONNX has tensors only.")
            name = self.of(node)
            if name in taken or node.op in ("placeholder", "get_attr"):
                name = self.op("Identity", name, label=f"{node.name}_result")
            taken.add(name)
            found.append((name, node))
        return found


class _Model:
    def __init__(self, gm: GraphModule, forms: Mapping[Any, CustomTranslation]) -> None:
        self.gm = gm
        self.functions = _Functions(forms)
        self.dim_names = _dim_names(gm)
        self.writer = _GraphWriter(self.functions, gm)
        self.initialisers: list[Any] = []
        self.kept: dict[Any, str] = {}

    def made(self) -> Any:
        from onnx import helper

        writer = self.writer
        inputs: list[Any] = []
        listed = list(self.gm.graph.nodes)
        for node in listed:
            if node.op == "placeholder":
                writer.names[node] = writer.name(node.name)
                if node.users or isinstance(node.meta.get("val"), Tensor):
                    inputs.append(self._described(writer.names[node], node))
        returned = pytree.tree_leaves(listed[-1].args)
        labelled = zip(self._labels(len(returned)), returned, strict=True)
        # None is no tensor, and what is returned in its place has its own name.
        kept = [(writer.name(label), value) for label, value in labelled if value is not None]
        if not kept:
            raise SaveError("the graph returns no tensor, and an ONNX model has to.")
        labels, flat = [label for label, _ in kept], [value for _, value in kept]
        for node in listed:
            if node.op == "get_attr" and isinstance(attribute(self.gm, cast("str", node.target)), Tensor):
                writer.names[node] = self._initialiser(node)
        for node in listed:
            if node.op not in ("placeholder", "output") and node not in writer.names:
                writer.write_checked(node)
        self.functions.failures.check()
        results = writer.outputs(flat)
        _rename(writer.nodes, {name: label for (name, _), label in zip(results, labels, strict=True)})
        outputs = [self._described(label, node) for (_, node), label in zip(results, labels, strict=True)]
        domains = {"": OPSET, **self.functions.domains, **{n.domain: 1 for n in writer.nodes if n.domain}}
        model = helper.make_model(
            helper.make_graph(writer.nodes, "graph", inputs, outputs, self.initialisers),
            functions=self.functions.made,
            opset_imports=[helper.make_opsetid(d, v) for d, v in domains.items()],
            ir_version=IR_VERSION,
            producer_name="dovetail",
        )
        helper.set_model_props(model, {GRAPH: str(FORMAT)})
        for form in self.functions.forms.values():
            form.check(model)
        return model

    def _labels(self, count: int) -> list[str]:
        """Names for the results, by their places in what the model returns."""
        convention = convention_of(self.gm)
        if convention is None or convention.out_spec.num_leaves != count:
            paths: list[tuple[Any, ...]] = [(i,) for i in range(count)] if count != 1 else [()]
        else:
            paths = leaf_steps(convention.out_spec)
        return [_label(path) for path in paths]

    def _described(self, name: str, node: Node) -> Any:
        try:
            info = value_info(name, node.meta.get("val"))
            for dim in info.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = re.sub(r"\w+", lambda m: self.dim_names.get(m[0], m[0]), dim.dim_param)
            return info
        except UnsupportedOp as failure:
            raise SaveError(f"{failure}; this graph cannot be written as ONNX.", node.name) from failure

    def _initialiser(self, node: Node) -> str:
        """The name of a weight; one that has two names is written once."""
        value = cast("Tensor", attribute(self.gm, cast("str", node.target))).detach()
        place = (value.data_ptr(), value.dtype, tuple(value.shape), tuple(value.stride()))
        if place not in self.kept or not value.numel():
            try:
                element_type(value.dtype)
            except UnsupportedOp as failure:
                raise SaveError(f"{failure}; this graph cannot be written as ONNX.", node.name) from failure
            made = tensor_proto(value)
            made.name = self.kept[place] = self.writer.name(cast("str", node.target))
            self.initialisers.append(made)
        return self.kept[place]


def _dim_names(gm: GraphModule) -> dict[str, str]:
    """The names of sizes given as `torch.export.Dim`, by the symbols that stand for them."""
    given: Mapping[str, str] = gm.meta.get(DIM_NAMES, {})
    names: dict[str, str] = {}
    for node in gm.graph.find_nodes(op="placeholder") if given else ():
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            name = given.get(f"{node.name}:{dim}")
            if name is not None and isinstance(size, SymInt) and size.node.expr.is_symbol:
                names.setdefault(str(size.node.expr), name)
    return names


def _is_unused_draw(node: Node) -> bool:
    """Whether a node only moves the random generator on, which ONNX does not have."""
    target = node.target
    if node.users or not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    return target.namespace == "aten" and torch.Tag.nondeterministic_seeded in target.tags


def _label(path: tuple[Any, ...]) -> str:
    """A place in a structure as a name: keys, fields and positions with dots between them."""
    named = bool(path) and not isinstance(path[0], int)
    first = str(path[0]) if named else f"output_{path[0]}" if path else "output"
    return ".".join([first or "output", *(str(step) for step in path[1:])])


def _rename(nodes: Iterable[Any], names: Mapping[str, str]) -> None:
    for node in nodes:
        for values in (node.input, node.output):
            for i, value in enumerate(values):
                if value in names:
                    values[i] = names[value]


def _told(node: Node, call: RegionCall, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """A region's identity, exactly; and of what a pattern found, which operands and results are which of the pattern's."""
    identity = call.identity
    told = {"name": node.name, "kind": identity.kind, "version": identity.version, "attrs": attrs}
    if call.arguments or call.results:
        told |= {"arguments": dict(call.arguments), "results": list(call.results)}
    return told


def _attribute(value: Any) -> Any:
    """An attribute as ONNX has it: what it has no type for is written as JSON."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (int, float, str)):
        return value
    if isinstance(value, list) and value:
        kinds = {type(v) for v in cast("list[Any]", value)}
        if kinds in ({int}, {float}, {str}):
            return cast("Any", value)
    return json.dumps(value)
