"""Saves a graph with its regions to an archive that torch.export opens as well."""

from __future__ import annotations

import json
import keyword
import os
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import IO, Any, cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen

from dovetail.errors import InvalidArgument, SaveError, checked_call
from dovetail.formats.archive import container, decode, encode
from dovetail.formats.archive.encode import PATH, Encoder, Unwritable
from dovetail.formats.atomic_write import resolve_target
from dovetail.formats.exported_program import exported
from dovetail.frontend.calling_convention import ModelCodeGen
from dovetail.fusion.ledger import ledger_of
from dovetail.ir.canonicalize import CanonicalReport
from dovetail.ir.graph_module import HOOK_KINDS, Body, GraphOwner, attribute, only_graph, pause_gc
from dovetail.ir.meta_keys import CANONICAL, DERIVED, LEDGER, LOWERING, OPERATORS, OUTLINING, REGION
from dovetail.ir.printer import format_argument
from dovetail.ir.weight_guard import Derivation
from dovetail.outlining.inline import inline
from dovetail.outlining.region import RegionCall, call_of, state_of
from dovetail.passes.fold_constants import Concatenated
from dovetail.passes.fold_conv_batch_norm import Folded

# A file is for any weights and code, so that what its model ran is no part of it.
_OWN = frozenset({CANONICAL, DERIVED, LEDGER, LOWERING, OPERATORS, OUTLINING})


class GraphEncoder:
    """Encodes a graph as JSON. `tensors` are all that it holds, each once, in the order of their numbers."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.encoder = Encoder()
        self.tensors: list[Tensor] = []
        self.rows: list[list[Any]] = []
        self._tensors: dict[int, int] = {}
        self._storages: dict[Any, int] = {}
        self._modules: list[Any] = []
        self._numbers: dict[int, int] = {}

    def encode(self) -> dict[str, Any]:
        """Return the graph as JSON; raise SaveError with the name of what cannot be saved."""
        for hooks in HOOK_KINDS:
            if getattr(self.gm, hooks, None):
                raise SaveError(
                    "the graph has hooks, which are Python code: remove them, and add them after loading."
                )
        root = self._module(self.gm, "")
        codegen = self.gm.graph._codegen
        convention = None
        if isinstance(codegen, ModelCodeGen):
            try:
                convention = encode.encode_convention(codegen.convention, self.encoder)
                decode.check_convention(convention)
            except Unwritable as reason:
                raise SaveError(f"it is called with {reason}.") from reason
        elif type(codegen) is not CodeGen:
            raise SaveError(
                f"it has a custom code generator ({type(codegen).__name__}): `capture` the program it comes from."
            )
        return {
            "root": root,
            "convention": convention,
            "ledger": ledger_of(self.gm).to_json() if LEDGER in self.gm.meta else None,
            "modules": self._modules,
            "tensors": self.rows,
            **self.encoder.tables(),
        }

    def _module(self, module: nn.Module, path: str) -> int:
        known = self._numbers.get(id(module))
        if known is not None:
            return known
        number = self._numbers[id(module)] = len(self._modules)
        row: dict[str, Any] = {}
        self._modules.append(row)
        row["training"] = module.training
        children = {
            name: None if child is None else self._module(child, _joined(path, name))
            for name, child in module._modules.items()
        }
        row["modules"] = list(children.items())
        row["parameters"] = [
            [n, None if v is None else self._tensor(v, _joined(path, n))]
            for n, v in module._parameters.items()
        ]
        volatile = module._non_persistent_buffers_set
        row["buffers"] = [
            [n, None if v is None else self._tensor(v, _joined(path, n)), n not in volatile]
            for n, v in module._buffers.items()
        ]
        row["constants"] = self._constants(module, path)
        if isinstance(module, GraphModule):
            row["graph"] = self._graph(module, path)
        for name in (*children, *module._parameters, *module._buffers):
            if not PATH.fullmatch(name):
                raise SaveError(f"'{_joined(path, name)}' has a name that cannot be saved.")
        return number

    def _constants(self, module: nn.Module, path: str) -> list[Any]:
        """Return tensors that are attributes of a module, without those that a body borrows."""
        borrowed = module.borrowed if isinstance(module, Body) else ()
        return [
            [name, self._tensor(value, _joined(path, name))]
            for name, value in module.__dict__.items()
            if isinstance(value, Tensor) and name not in borrowed
        ]

    def _tensor(self, value: Tensor, path: str) -> int:
        known = self._tensors.get(id(value))
        if known is None:
            known = self._tensors[id(value)] = len(self.tensors)
            self.tensors.append(value)
            self.rows.append(self._tensor_row(value, path))
        return known

    def _tensor_row(self, value: Tensor, path: str) -> list[Any]:
        if (
            type(value) not in (Tensor, nn.Parameter, nn.Buffer)
            or value.layout is not torch.strided
            or value.is_quantized
            or value.is_conj()
            or value.is_neg()
        ):
            raise SaveError(
                f"'{path}' is a {type(value).__name__}; only dense tensors without a subclass can be saved."
            )
        if value.device.type == "meta":
            raise SaveError(f"'{path}' is on the meta device and has no data to save.")
        # Empty tensors have no address to identify their storage.
        storage = value.untyped_storage()
        place = (str(value.device), storage.data_ptr()) if storage.nbytes() else ("", id(value))
        return [
            self._storages.setdefault(place, len(self._storages)),
            str(value.dtype).removeprefix("torch."),
            list(value.shape),
            list(value.stride()),
            value.storage_offset(),
            str(value.device),
            value.requires_grad,
            isinstance(value, nn.Parameter),
        ]

    def storage_owners(self) -> list[Tensor]:
        """Return the first tensor of each storage, in the order of their numbers."""
        owners: dict[int, Tensor] = {}
        for row, value in zip(self.rows, self.tensors, strict=True):
            owners.setdefault(row[0], value)
        return list(owners.values())

    def _graph(self, gm: GraphModule, path: str) -> dict[str, Any]:
        nodes: dict[Node, int] = {}
        rows: list[Any] = []
        for node in gm.graph.nodes:
            rows.append(self._node(gm, node, nodes))
            nodes[node] = len(nodes)
        borrowed: list[Any] = []
        if isinstance(gm, Body):
            borrowed = [self._borrowed(gm, name, target) for name, target in gm.borrowed.items()]
        state = state_of(gm)
        ranks = state.ranks
        return {
            "body": isinstance(gm, Body),
            "name": type(gm).__name__,
            "impure": isinstance(gm, Body) and gm.is_marked_impure,
            "borrowed": borrowed,
            "nodes": rows,
            "canonical": _canonical(gm.meta),
            "outlining": None
            if OUTLINING not in gm.meta
            else [dict(state.counters), None if ranks is None else dict(ranks), state.epoch],
            "meta": self.encoder.meta({k: v for k, v in gm.meta.items() if k not in _OWN}),
            "derived": [self._derived(derivation) for derivation in gm.meta.get(DERIVED, ())],
        }

    def _derived(self, derivation: Derivation) -> list[Any]:
        """Return buffers, the weights they are computed from, and the computation."""
        how = derivation.compute
        row = ("folded", how.eps, how.groups) if isinstance(how, Folded) else None
        if isinstance(how, Concatenated):
            row = ("joined", how.dim, how.parts)
        try:
            if row is None:
                raise Unwritable(f"a {type(how).__name__}")
            written = self.encoder.value(row)
        except Unwritable as reason:
            raise SaveError(
                f"'{derivation.results[0]}' is computed from weights by {reason}, which cannot be saved."
            ) from reason
        return [[*derivation.results], [*derivation.sources], [*derivation.sentinels], written]

    def _borrowed(self, body: Body, name: str, target: str) -> list[Any]:
        value = body.__dict__[name]
        if isinstance(value, Tensor):
            return [name, target, "tensor", self._tensor(value, target)]
        if isinstance(value, GraphModule):
            return [name, target, "module", self._module(value, target)]
        raise SaveError(f"'{target}' is a {type(value).__name__}, {_CODE}")

    def _node(self, gm: GraphModule, node: Node, nodes: Mapping[Node, int]) -> list[Any]:
        target: Any = node.target
        if node.op == "call_function":
            name = encode.function_name(target)
            target = {"fn": name} if name is not None else None
            if target is None:
                try:
                    target = self.encoder.value(node.target)
                except Unwritable:
                    raise SaveError(f"it calls {format_argument(node.target)}, {_CODE}", node.name) from None
            attribute_name = node.args[1] if node.target is getattr and len(node.args) > 1 else None
            if attribute_name is not None and attribute_name not in encode.ATTRIBUTES:
                raise SaveError(f"it reads the attribute {attribute_name!r}, {_CODE}", node.name)
        elif node.op in ("call_module", "get_attr"):
            self._require_known(gm, node)
        elif node.op == "call_method" and not encode.is_method(str(target)):
            raise SaveError(f"it calls the method {target!r}, {_CODE}", node.name)
        if not node.name.isidentifier() or keyword.iskeyword(node.name):
            raise SaveError("its name is not an identifier and cannot be saved.", node.name)
        try:
            args, kwargs = self.encoder.value(node.args, nodes), self.encoder.value(dict(node.kwargs), nodes)
        except Unwritable as reason:
            raise SaveError(f"one of its arguments is {reason}, {_CODE}", node.name) from reason
        return [
            node.op,
            target,
            args,
            kwargs,
            node.name,
            self.encoder.type(node.type),
            self._meta(node.meta, node),
        ]

    def _require_known(self, gm: GraphModule, node: Node) -> None:
        """Raise SaveError unless the node calls a graph, or reads a tensor or a graph: all else is Python code."""
        value = attribute(gm, cast("str", node.target))
        if node.op == "call_module" and not isinstance(value, GraphModule):
            raise SaveError(
                f"it calls '{node.target}', a {type(value).__name__}, {_CODE} `dovetail.capture(model, ...)` turns "
                f"modules into operations.",
                node.name,
            )
        if value is not None and not isinstance(value, Tensor | GraphModule):
            raise SaveError(f"it reads '{node.target}', a {type(value).__name__}, {_CODE}", node.name)

    def _meta(self, meta: Mapping[str, Any], node: Node | None = None) -> int:
        call = call_of(meta)
        return self.encoder.meta(meta, None if call is None else {REGION: self._call(call)})

    def _call(self, call: RegionCall) -> dict[str, Any]:
        """Return the record of a region, without its backend."""
        identity = call.identity
        return {
            "identity": [identity.kind, identity.version, identity.attrs],
            "members": [
                [m.name, self._meta(m.meta), m.rank, m.target, m.clone, self.encoder.type(m.type)]
                for m in call.members
            ],
            "rank": call.rank,
            "epoch": call.epoch,
            "escapes": [[name, *escape] for name, escape in call.escapes],
            "rule": call.rule,
            "round": call.round,
            "depth": call.depth,
            "arguments": [list(pair) for pair in call.arguments],
            "results": list(call.results),
        }


_CODE = "which is Python code, and a saved graph holds none."


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _canonical(meta: Mapping[str, Any]) -> Any:
    """Return the counts of a report, False for a canonical graph without a report, None for others."""
    if CANONICAL not in meta:
        return None
    report = meta[CANONICAL]
    return [list(row) for row in report.counts] if isinstance(report, CanonicalReport) else False


MARK = "dovetail"
"""The key in `node.meta["custom"]` of the regions that an operation is in, outermost first."""


@checked_call()
def save(gm: GraphModule | GraphOwner, path: str | os.PathLike[str] | IO[bytes]) -> None:
    """Write a graph to a file from which `dovetail.load` makes it again: regions, shared bodies, weights, ledger.

    The file is an archive of torch.export too: `torch.export.load(path)` opens it with the regions inlined and recorded
    in `node.meta["custom"]["dovetail"]`. Backends are not saved: a loaded graph runs as it is until it is lowered again.
    A graph that holds Python code (calls of modules, hooks, user functions) is refused with a SaveError. An existing
    file is replaced atomically and keeps its permissions; a link stays a link.
    """
    gm = only_graph(gm)
    if not isinstance(path, str | os.PathLike) and not callable(getattr(path, "write", None)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"path {path!r} is neither a path nor a file to write to.")
    target = resolve_target(path) if isinstance(path, str | os.PathLike) else path
    with pause_gc():
        graph_encoder = GraphEncoder(gm)
        description = graph_encoder.encode()
        program = exported(inline(gm), region_marks(gm))
        description["storages"] = _places(program, graph_encoder)
        owners = graph_encoder.storage_owners()
        description["checksums"] = [container.checksum_of(value.untyped_storage()) for value in owners]
        if graph_encoder.encoder.dropped:
            dropped = "; ".join(f"{key} ({why})" for key, why in graph_encoder.encoder.dropped.items())
            warnings.warn(f"node meta that cannot be saved was left out: {dropped}", stacklevel=2)
        versions = {"dovetail": version("dovetail"), "torch": torch.__version__}
        container.write_archive(program, description, versions, target)


def region_marks(gm: GraphModule) -> dict[str, dict[str, Any]]:
    """Return the regions of each operation, by the name that it has once all regions are inlined."""
    by_name: dict[str, dict[str, Any]] = {}
    for node in gm.graph.nodes:
        call = call_of(node.meta)
        if call is not None:
            for name, mark in _marks(call, node.name, []):
                # A projection out of a nested region has the name of the operation inside it.
                if len(by_name.get(name, {MARK: ()})[MARK]) < len(mark[MARK]):
                    by_name[name] = mark
    return by_name


def _marks(call: RegionCall, name: str, above: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    identity = call.identity
    own = {
        "region": name,
        "kind": identity.kind,
        "version": identity.version,
        "attrs": json.loads(identity.attrs),
    }
    inside = [*above, own]
    for member in call.members:
        inner = call_of(member.meta)
        if inner is not None:
            yield from _marks(inner, f"{name}/{member.name}", inside)
        elif member.is_original:
            yield member.name, {MARK: inside}


def _places(program: ExportedProgram, graph_encoder: GraphEncoder) -> list[str | None]:
    """Return for each storage of the graph's tensors its name in the archive, None for empty ones."""
    known: dict[Any, str] = {}
    for kind, held in (("weights", program.state_dict), ("constants", program.constants)):
        for name, value in held.items():
            if isinstance(value, Tensor) and value.untyped_storage().nbytes():
                known.setdefault(_place(value), f"{kind}:{name}")
    names: list[str | None] = []
    for number, value in enumerate(graph_encoder.storage_owners()):
        if not value.untyped_storage().nbytes():
            names.append(None)
            continue
        if value.device.type != "cpu" and not _fills_storage(value):
            raise SaveError(
                f"a tensor of shape {tuple(value.shape)} on {value.device} is a view of a part of its storage. Replace it by a clone."
            )
        if _place(value) not in known:
            name = f"{MARK}_{number}"
            program.constants[name] = value.detach()
            known[_place(value)] = f"constants:{name}"
        names.append(known[_place(value)])
    return names


def _place(value: Tensor) -> tuple[str, int]:
    return str(value.device), value.untyped_storage().data_ptr()


def _fills_storage(value: Tensor) -> bool:
    return value.untyped_storage().nbytes() == value.numel() * value.element_size()
