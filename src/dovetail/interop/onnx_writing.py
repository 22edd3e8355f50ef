"""A fused graph as an ONNX file: every region a local function, called where the region is."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from dovetail.errors import InvalidArgument, SaveError, checked_call
from dovetail.graph.keys import REGION
from dovetail.graph.module import Body, GraphOwner, attribute, only_graph
from dovetail.interop.placing import replaced, target_of
from dovetail.lowering.onnx.program import IR_VERSION, described
from dovetail.lowering.onnx.types import NoForm, element
from dovetail.lowering.onnx.writer import OPSET, Writer, packed
from dovetail.outlining.bodies import results
from dovetail.outlining.record import Call, call_of

DOMAIN = "dovetail"
"""The domain of functions whose kind names no vendor."""
TOLD = REGION
"""The key in the metadata of a call that has all of the region's identity, as JSON: that of the call here."""
GRAPH = "dovetail.graph"
"""The key in the metadata of a model with the version of what is written here."""
FORMAT = 1

# protobuf takes no more than 2 GiB in one piece.
_LARGEST = 2**31 - 2**26


@checked_call()
def to_onnx(gm: GraphModule | GraphOwner, path: str | Path) -> Path:
    """Write a graph as an ONNX model whose regions are local functions.

    A region's kind is the domain and the name of its function ("npu.pool" is `pool` of domain `npu`; without a vendor the
    domain is `dovetail`), its attributes are attributes of the call. There is one function for each distinct body; where
    several have one kind, the names of all but the first end in a number. Weights are initialisers under the names of the state dict,
    beyond 2 GiB in a file of their own beside the model. Inputs and results are those of the graph, flat, in its order.
    Raises SaveError where ONNX has no form of something; then nothing is written.
    """
    gm = only_graph(gm)
    if not isinstance(path, (str, os.PathLike)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"path {path!r} is neither a str nor a path.")
    try:
        import onnx
    except ImportError as error:
        raise SaveError("onnx is not installed; pip install 'dovetail[onnx]'") from error
    target = target_of(path)
    model = _Model(gm).made()
    apart = model.ByteSize() > _LARGEST
    if apart and os.path.islink(path):
        raise SaveError(f"'{path}' is a link, and weights beyond 2 GiB lie beside the file: give '{target}'.")
    with replaced(target) as written:
        if apart:
            beside = f"{target.name}.data"
            onnx.save_model(model, str(written), save_as_external_data=True, location=beside)
        else:
            written.write_bytes(model.SerializeToString(deterministic=True))
    return Path(path)


class _Functions:
    """The functions of a model, one for each kind and body."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.domains: dict[str, int] = {}
        self._known: dict[tuple[str, int], Any] = {}
        self._taken: dict[tuple[str, str], int] = {}

    def of(self, body: Body, call: Call) -> tuple[str, str]:
        """Domain and name of the function that a call of a body is."""
        from onnx import helper

        kind = call.identity.kind
        attributes = sorted(json.loads(call.identity.attrs))
        known = self._known.get((kind, id(body)))
        if known is not None:
            # A call may carry what its function declares; this one may carry more than those before it.
            known.attribute.extend(a for a in attributes if a not in known.attribute)
            return known.domain, known.name
        vendor, _, name = kind.rpartition(".")
        domain = vendor or DOMAIN
        # ONNX has overloads for this, but ONNX Runtime takes one for the other where functions call functions.
        while (domain, name) in self._taken:
            self._taken[domain, name] += 1
            name = f"{name}_{self._taken[domain, name]}"
        self._taken[domain, name] = 0
        writer = _Writer(self, body, call)
        inputs = []
        for node in body.graph.nodes:
            if node.op == "placeholder":
                writer.names[node] = writer.name(node.name)
                inputs.append(writer.names[node])
        for node in body.graph.nodes:
            if node.op not in ("placeholder", "output"):
                writer.write_checked(node)
        outputs = writer.outputs(results(body))
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


class _Writer(Writer):
    """Writes the nodes of a graph that may call regions."""

    def __init__(self, functions: _Functions, owner: GraphModule, within: Call | None = None) -> None:
        super().__init__()
        self.functions, self.owner = functions, owner
        inside = [n for n in owner.graph.nodes if n.op not in ("placeholder", "output")]
        # One body serves many calls; what it calls is told by the first of them.
        self.calls: dict[Node, Call | None] = (
            {n: call_of(n.meta) for n in inside}
            if within is None
            else {n: call_of(m.meta) for n, m in zip(inside, within.members, strict=True)}
        )

    def write_checked(self, node: Node) -> None:
        """Append what a node computes; SaveError says what cannot be written."""
        try:
            call = self.calls.get(node)
            if call is not None:
                self._call(node, call)
            elif node.op == "get_attr":
                self.names[node] = self._held(node)
            elif node.meta.get("val") is None and not node.users:
                raise NoForm(f"{node.target} acts on something; ONNX has values only")
            else:
                self.write(node)
        except NoForm as failure:
            raise SaveError(f"{failure}; this graph cannot be written as ONNX.", node.name) from failure

    def _held(self, node: Node) -> str:
        value = attribute(self.owner, cast("str", node.target))
        if not isinstance(value, Tensor):
            raise NoForm(f"it holds a {type(value).__name__}")
        return self.op("Constant", value=packed(value), label=node.name)

    def _call(self, node: Node, call: Call) -> None:
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
        entry.key, entry.value = TOLD, json.dumps(_told(node, call, attrs), sort_keys=True)
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
    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.functions = _Functions()
        self.writer = _Writer(self.functions, gm)
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
        for node in listed:
            if node.op == "get_attr" and isinstance(attribute(self.gm, cast("str", node.target)), Tensor):
                writer.names[node] = self._initialiser(node)
        for node in listed:
            if node.op not in ("placeholder", "output") and node not in writer.names:
                writer.write_checked(node)
        flat = pytree.tree_leaves(listed[-1].args)
        outputs = [self._described(name, node) for name, node in writer.outputs(flat)]
        domains = {"": OPSET, **self.functions.domains}
        model = helper.make_model(
            helper.make_graph(writer.nodes, "graph", inputs, outputs, self.initialisers),
            functions=self.functions.made,
            opset_imports=[helper.make_opsetid(d, v) for d, v in domains.items()],
            ir_version=IR_VERSION,
            producer_name="dovetail",
        )
        helper.set_model_props(model, {GRAPH: str(FORMAT)})
        return model

    def _described(self, name: str, node: Node) -> Any:
        try:
            return described(name, node.meta.get("val"))
        except NoForm as failure:
            raise SaveError(f"{failure}; this graph cannot be written as ONNX.", node.name) from failure

    def _initialiser(self, node: Node) -> str:
        """The name of a weight; one that has two names is written once."""
        value = cast("Tensor", attribute(self.gm, cast("str", node.target))).detach()
        place = (value.data_ptr(), value.dtype, tuple(value.shape), tuple(value.stride()))
        if place not in self.kept or not value.numel():
            try:
                element(value.dtype)
            except NoForm as failure:
                raise SaveError(f"{failure}; this graph cannot be written as ONNX.", node.name) from failure
            made = packed(value)
            made.name = self.kept[place] = self.writer.name(cast("str", node.target))
            self.initialisers.append(made)
        return self.kept[place]


def _told(node: Node, call: Call, attrs: Mapping[str, Any]) -> dict[str, Any]:
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
