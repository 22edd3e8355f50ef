"""The graph that a description tells of. What it says is checked before anything is built of it."""

from __future__ import annotations

import json
import keyword
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from dovetail.fusion.ledger import Ledger, write_ledger
from dovetail.graph.canonical import CanonicalReport
from dovetail.graph.capturing.calling import ModelCodeGen
from dovetail.graph.derived import Derivation
from dovetail.graph.keys import CANONICAL, REGION
from dovetail.graph.module import Body, Program, make_body, rebuild
from dovetail.interop import conventions, functions
from dovetail.interop.decoding import Decoder, Unreadable, index, rows, table, take, target
from dovetail.interop.encoding import PATH
from dovetail.outlining.record import (
    Call,
    Escape,
    Identity,
    Member,
    State,
    make_identity,
    with_state,
    write_call,
)
from dovetail.passes.constants import Concatenated, record_derivations
from dovetail.passes.fold_conv_batch_norm import Folded

_OPS = frozenset({"placeholder", "get_attr", "call_function", "call_method", "call_module", "output"})
_OWNED = frozenset({REGION})


class Restorer:
    """Builds the graph again; `tensors` are what it holds, in the order of their numbers."""

    def __init__(self, described: dict[str, Any], tensors: Sequence[Tensor]) -> None:
        self.described, self.tensors = described, tensors
        self.decoder = Decoder(described)
        self.rows = rows(described["modules"])
        self._made: dict[int, nn.Module] = {}
        self._making: set[int] = set()

    def restore(self) -> Program:
        """The graph. Raises Unreadable where the description makes no sense."""
        convention = self.described["convention"]
        root = self._module(self.described["root"])
        if not isinstance(root, Program):
            raise Unreadable("what it holds is no graph")
        if convention is not None:
            read = conventions.read(table(convention), self.decoder)
            inputs = sum(n.op == "placeholder" for n in root.graph.nodes)
            if inputs != len(read.order) or inputs != len(read.expectations.inputs):
                raise Unreadable("the graph takes other inputs than its callers are told to give")
            root.graph.set_codegen(ModelCodeGen(read))
        ledger = self.described["ledger"]
        if ledger is not None:
            write_ledger(root, Ledger.from_json(take(str, ledger)))
        return root

    def _module(self, number: Any) -> nn.Module:
        at = index(number, self.rows)
        if at in self._made:
            return self._made[at]
        if at in self._making:
            raise Unreadable("a module is inside itself")
        self._making.add(at)
        row = table(self.rows[at])
        plain = _owner(row)
        plain.training = take(bool, row["training"])
        for name, child in rows(row["modules"]):
            plain._modules[_path(name)] = None if child is None else self._module(child)
        for name, tensor in rows(row["parameters"]):
            plain._parameters[_path(name)] = cast("Any", self._tensor(tensor))
        for name, tensor, persistent in rows(row["buffers"]):
            plain._buffers[_path(name)] = self._tensor(tensor)
            if not take(bool, persistent):
                plain._non_persistent_buffers_set.add(name)
        for name, tensor in rows(row["constants"]):
            if hasattr(GraphModule, _path(name)) or name in plain.__dict__:
                raise Unreadable(f"a constant named '{name}'")
            plain.__dict__[name] = self._tensor(tensor)
        made = self._graph(table(row["graph"]), plain) if "graph" in row else plain
        self._made[at] = made
        return made

    def _tensor(self, number: Any) -> Tensor | None:
        return None if number is None else self.tensors[index(number, self.tensors)]

    def _graph(self, row: dict[str, Any], owner: nn.Module) -> Program:
        graph = self._nodes(rows(row["nodes"]))
        if take(bool, row["body"]):
            made = make_body(graph, type(owner).__name__)
            made.training = owner.training
            made._modules.update(owner._modules)
            self._borrow(made, row)
        else:
            made = rebuild(owner, graph)
        meta, _ = self.decoder.meta(row["meta"], frozenset())
        canonical, outlining = row["canonical"], row["outlining"]
        if canonical is not None:
            counts = (
                () if canonical is False else tuple((take(str, n), take(int, c)) for n, c in rows(canonical))
            )
            meta[CANONICAL] = None if canonical is False else CanonicalReport(counts)
        made.meta = meta
        if outlining is not None:
            counters, ranks, epoch = rows(outlining)
            known = None if ranks is None else _numbers(ranks)
            made.meta = with_state(meta, State(_numbers(counters), known, take(int, epoch)))
        # Files of earlier versions have none.
        record_derivations(made, [self._derived(made, derived) for derived in rows(row.get("derived", []))])
        return made

    def _derived(self, owner: Program, row: Any) -> Derivation:
        results, sources, sentinels, written = rows(row)
        for name in rows(results):
            if name not in owner._buffers:
                raise Unreadable(f"'{name}' is computed from weights and is no buffer")
        paths = [None if path is None else take(str, path) for path in rows(sources)]
        kind, *rest = take(tuple, self.decoder.value(written))
        if kind == "folded" and len(paths) == 6 and len(rest) == 2:
            how: Any = Folded(take(float, rest[0]), None if rest[1] is None else take(int, rest[1]))
        elif kind == "joined" and len(rest) == 2:
            parts = take(tuple, rest[1])
            for steps in parts:
                for name, _, _ in steps if isinstance(steps, tuple) else ():
                    target("op", take(str, name))
            how = Concatenated(take(int, rest[0]), parts)
        else:
            raise Unreadable(f"a buffer is computed by {str(kind)[:60]!r}")
        return Derivation(results, paths, how, [take(str, path) for path in rows(sentinels)])

    def _borrow(self, body: Body, row: dict[str, Any]) -> None:
        body.mark_impure(take(bool, row["impure"]))
        for name, at, kind, number in rows(row["borrowed"]):
            if not take(str, name).isidentifier() or hasattr(GraphModule, name) or name in body.__dict__:
                raise Unreadable(f"a body that holds something as '{name}'")
            value = self._tensor(number) if kind == "tensor" else self._module(number)
            body.borrow(name, value, _path(at))

    def _nodes(self, written: list[Any]) -> Graph:
        graph = Graph()
        made: list[Node] = []
        for row in written:
            op, aim, args, kwargs, name, kind, meta = rows(row)
            called = _target(op, aim)
            arguments, keywords = self.decoder.value(args, made), self.decoder.value(kwargs, made)
            _require_call(op, called, arguments, keywords, name)
            node = graph.create_node(op, called, arguments, keywords, name, self.decoder.type(kind))
            if node.name != name:
                # torch gives another name to what is called like a builtin, where a model may have the first.
                node.name = name
            self._meta(node, meta)
            made.append(node)
        names = {node.name for node in made}
        if len(names) != len(made) or not made or made[-1].op != "output":
            raise Unreadable("a graph has a name twice, or no output at its end")
        return graph

    def _meta(self, node: Node, number: Any) -> None:
        node.meta, owned = self.decoder.meta(number, _OWNED)
        if REGION in owned:
            write_call(node, self._call(table(owned[REGION]), 0))

    def _call(self, row: dict[str, Any], depth: int) -> Call:
        if depth > 100:
            raise Unreadable("regions are nested without end")
        kind, version, attrs = rows(row["identity"])
        identity = Identity(take(str, kind), take(int, version), take(str, attrs))
        if make_identity(kind, version, json.loads(take(str, attrs))) != identity:
            raise Unreadable(f"the attributes of a region of kind '{kind}'")
        rule, number = row["rule"], row["round"]
        return Call(
            identity,
            tuple(self._member(member, depth) for member in rows(row["members"])),
            take(int, row["rank"]),
            take(int, row["epoch"]),
            tuple((take(str, n), Escape(take(str, p), take(str, why))) for n, p, why in rows(row["escapes"])),
            None if rule is None else take(str, rule),
            None if number is None else take(int, number),
            None,
            take(int, row["depth"]),
            tuple((take(str, n), take(int, i)) for n, i in rows(row["arguments"])),
            tuple(None if i is None else take(int, i) for i in rows(row["results"])),
        )

    def _member(self, row: Any, depth: int) -> Member:
        name, number, rank, at, clone, kind = rows(row)
        meta, owned = self.decoder.meta(number, _OWNED)
        if REGION in owned:
            meta[REGION] = self._call(table(owned[REGION]), depth + 1)
        return Member(
            _identifier(name),
            meta,
            take(int, rank),
            None if at is None else _path(at),
            take(bool, clone),
            self.decoder.type(kind),
        )


def _owner(row: dict[str, Any]) -> nn.Module:
    """An empty module; a graph is named like the class of the module it is made of."""
    if "graph" not in row:
        return nn.Module()
    name = take(str, table(row["graph"])["name"])
    if "\0" in name:
        raise Unreadable("a graph whose name has no letters")
    return cast("nn.Module", type(name, (nn.Module,), {})())


def _target(op: Any, aim: Any) -> Any:
    if op not in _OPS:
        raise Unreadable(f"{op!r} is no operation of a graph")
    if op == "call_function":
        ((tag, name),) = table(aim).items()
        if tag not in ("op", "pk", "ho", "fn"):
            raise Unreadable(f"a node calls {name!r}")
        return target(tag, name)
    if op == "placeholder":
        return _identifier(take(str, aim).lstrip("*")) and aim
    if op == "call_method":
        if not functions.is_method(take(str, aim)):
            raise Unreadable(f"a node calls the method {aim!r}")
        return aim
    return _path(aim)


def _require_call(op: str, called: Any, args: Any, kwargs: Any, name: Any) -> None:
    """A name, and arguments that generated code may have in it."""
    _identifier(name)
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise Unreadable(f"the arguments of '{name}'")
    for key in cast("dict[Any, Any]", kwargs):
        _identifier(key)
    arguments = cast("tuple[Any, ...]", args)
    if called is getattr and (len(arguments) < 2 or arguments[1] not in functions.ATTRIBUTES):
        raise Unreadable(f"'{name}' asks for an attribute that graphs do not ask for")
    if op == "output" and len(arguments) != 1:
        raise Unreadable("an output of several values")


def _identifier(name: Any) -> str:
    if not take(str, name).isidentifier() or keyword.iskeyword(name):
        raise Unreadable(f"{name!r} is no name of a node")
    return cast("str", name)


def _path(name: Any) -> str:
    if not PATH.fullmatch(take(str, name)):
        raise Unreadable(f"{name!r} is no place in a module")
    return cast("str", name)


def _numbers(value: Any) -> dict[str, int]:
    return {take(str, k): take(int, v) for k, v in table(value).items()}


def tensor_from(row: Any, storage: torch.UntypedStorage) -> Tensor:
    """The tensor that a row of the description tells of, in the memory that was read for it."""
    _, dtype, sizes, strides, offset, _, grad, parameter = rows(row)
    kind = getattr(torch, take(str, dtype), None)
    shape = [_size(n) for n in rows(sizes)]
    steps = [_size(n) for n in rows(strides)]
    start = _size(offset)
    if not isinstance(kind, torch.dtype) or len(shape) != len(steps):
        raise Unreadable("a tensor without dtype or strides")
    needed = 0 if 0 in shape else start + 1 + sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
    if needed * kind.itemsize > storage.nbytes():
        raise Unreadable("a tensor is larger than what the file has of it")
    value = torch.empty(0, dtype=kind, device=storage.device).set_(storage, start, shape, steps)
    if take(bool, parameter):
        return nn.Parameter(value, requires_grad=take(bool, grad))
    return value.requires_grad_(take(bool, grad))


def _size(value: Any) -> int:
    number = take(int, value)
    if number < 0:
        raise Unreadable(f"a size of {number}")
    return number
