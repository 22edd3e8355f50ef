"""Loads a graph that `save` wrote. Nothing in a file is executed or unpickled."""

from __future__ import annotations

import functools
import inspect
import json
import keyword
import math
import os
from collections.abc import Collection, Sequence
from typing import IO, Any, cast

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from dovetail.errors import DovetailError, InvalidArgument, InvalidFile, checked_call
from dovetail.formats.archive import decode, encode
from dovetail.formats.archive.container import Archive, storage_from
from dovetail.formats.archive.decode import (
    Decoder,
    MissingRequirement,
    Unreadable,
    as_dict,
    as_dims,
    as_dtype,
    as_index,
    as_list,
    as_size,
    expect,
)
from dovetail.formats.archive.encode import PATH, Trust
from dovetail.frontend import cache_pytrees
from dovetail.frontend.calling_convention import ModelCodeGen
from dovetail.fusion.ledger import Ledger, write_ledger
from dovetail.ir.canonicalize import CanonicalReport
from dovetail.ir.graph_module import Body, Program, attribute, make_body, pause_gc, rebuild
from dovetail.ir.meta_keys import CANONICAL, REGION
from dovetail.ir.verifier import check
from dovetail.ir.weight_guard import Compute, Derivation
from dovetail.outlining.region import (
    Escape,
    Identity,
    Member,
    OutlineState,
    RegionCall,
    call_of,
    make_identity,
    with_state,
)
from dovetail.passes.fold_constants import Concatenated, record_derivations
from dovetail.passes.fold_conv_batch_norm import Folded

# Names are written into code and into the paths of nested graphs.
_LONGEST_NAME = 1_000
_DEEPEST = 100

# Bodies that call each other twice, level by level, make a small file that unfolds exponentially: bounded are the modules
# on all paths, the operations with every call inlined, and the operations in records of regions.
_MOST_UNFOLDED = 2**21
_OPS = frozenset({"placeholder", "get_attr", "call_function", "call_method", "call_module", "output"})
_ARGUMENTS: dict[str, tuple[int, int | None]] = {
    "placeholder": (0, 1),
    "get_attr": (0, 0),
    "call_method": (1, None),
    "output": (1, 1),
}
_OWNED = frozenset({REGION})


class GraphDecoder:
    """Rebuilds a graph from its description; `tensors` are those it holds, in the order of their numbers."""

    def __init__(self, description: dict[str, Any], tensors: Sequence[Tensor], trust: encode.Trust) -> None:
        self.description, self.tensors = description, tensors
        self.decoder = Decoder(description, trust)
        self.rows = as_list(description["modules"])
        self._modules: dict[int, nn.Module] = {}
        self._started: set[int] = set()
        self._calls: dict[int, RegionCall | None] = {}
        self._paths: dict[nn.Module, int] = {}
        self._sizes: dict[int, int] = {}

    def decode(self) -> Program:
        """Return the graph; raise Unreadable if the description is inconsistent."""
        convention = self.description["convention"]
        root = self._module(self.description["root"])
        if not isinstance(root, Program):
            raise Unreadable("its root is not a graph")
        if convention is not None:
            decoded = decode.decode_convention(as_dict(convention), self.decoder)
            inputs = sum(n.op == "placeholder" for n in root.graph.nodes)
            if inputs != len(decoded.order) or inputs != len(decoded.input_guards.inputs):
                raise Unreadable("the inputs of the graph do not match its calling convention")
            returned: Any = root.graph.output_node().args[0]
            if decoded.out_spec.num_leaves != (len(returned) if isinstance(returned, tuple | list) else 1):
                raise Unreadable("the results of the graph do not match its calling convention")
            root.graph.set_codegen(ModelCodeGen(decoded))
        ledger = self.description["ledger"]
        if ledger is not None:
            write_ledger(root, Ledger.from_json(expect(str, ledger)))
        return root

    def _module(self, number: Any) -> nn.Module:
        at = as_index(number, self.rows)
        if at in self._modules:
            return self._modules[at]
        if at in self._started or len(self._started) - len(self._modules) > _DEEPEST:
            raise Unreadable("a module is inside itself, or modules are nested too deep")
        self._started.add(at)
        row = as_dict(self.rows[at])
        module = _owner(row)
        module.training = expect(bool, row["training"])
        for name, child in as_list(row["modules"]):
            module._modules[_attribute(name, module)] = None if child is None else self._module(child)
        for name, tensor in as_list(row["parameters"]):
            value = self._tensor(tensor)
            if value is not None and not isinstance(value, nn.Parameter):
                raise Unreadable(f"the tensor of the parameter '{name}' is not a parameter")
            module._parameters[_attribute(name, module)] = value
        for name, tensor, persistent in as_list(row["buffers"]):
            module._buffers[_attribute(name, module)] = self._tensor(tensor)
            if not expect(bool, persistent):
                module._non_persistent_buffers_set.add(name)
        for name, tensor in as_list(row["constants"]):
            if hasattr(GraphModule, name):
                raise Unreadable(f"a constant named '{name}'")
            module.__dict__[_attribute(name, module)] = self._tensor(tensor)
        result = self._graph(as_dict(row["graph"]), module) if "graph" in row else module
        inside = [child for child in result._modules.values() if child is not None]
        self._paths[result] = 1 + sum(self._paths[child] for child in inside)
        _require_bounded(self._paths[result])
        self._modules[at] = result
        return result

    def _tensor(self, number: Any) -> Tensor | None:
        return None if number is None else self.tensors[as_index(number, self.tensors)]

    def _graph(self, row: dict[str, Any], owner: nn.Module) -> Program:
        graph = self._nodes(as_list(row["nodes"]))
        if expect(bool, row["body"]):
            returned: Any = graph.output_node().args[0]
            if not isinstance(returned, tuple | list) or not all(isinstance(n, Node) for n in returned):
                raise Unreadable("the body of a region does not return a tuple of its values")
            program = make_body(graph, type(owner).__name__)
            program.training = owner.training
            program._modules.update(owner._modules)
            self._borrow(program, row)
        else:
            program = rebuild(owner, graph)
        self._require_stored_targets(program)
        meta, _ = self.decoder.meta(row["meta"], frozenset())
        canonical, outlining = row["canonical"], row["outlining"]
        if canonical is not None:
            counts = (
                ()
                if canonical is False
                else tuple((expect(str, n), expect(int, c)) for n, c in as_list(canonical))
            )
            meta[CANONICAL] = None if canonical is False else CanonicalReport(counts)
        program.meta = meta
        if outlining is not None:
            counters, ranks, epoch = as_list(outlining)
            known = None if ranks is None else _numbers(ranks)
            program.meta = with_state(meta, OutlineState(_numbers(counters), known, expect(int, epoch)))
        # Not in files of earlier versions.
        record_derivations(
            program, [self._derived(program, derived) for derived in as_list(row.get("derived", []))]
        )
        return program

    def _require_stored_targets(self, program: Program) -> None:
        """Check that nodes name what the file put into a module, and no other Python attribute."""
        size = 0
        for node in program.graph.nodes:
            size += 1
            if node.op not in ("get_attr", "call_module"):
                continue
            value = _stored_attribute(program, str(node.target))
            kinds = GraphModule if node.op == "call_module" else Tensor | GraphModule | None
            if value is not attribute(program, str(node.target)) or not isinstance(value, kinds):
                raise Unreadable(
                    f"'{node.name}' names '{node.target}', where its module holds nothing of that kind"
                )
            if node.op == "call_module":
                size += self._sizes.get(id(value), 0)
                _require_members(call_of(node.meta), cast("GraphModule", value))
        _require_bounded(size)
        self._sizes[id(program)] = size

    def _derived(self, owner: Program, row: Any) -> Derivation:
        """Decode how buffers are computed from weights, by one of the two computations of the passes."""
        results, sources, sentinels, written = as_list(row)
        names = [expect(str, name) for name in as_list(results)]
        for name in names:
            if name not in owner._buffers:
                raise Unreadable(f"'{name}' is computed from weights and is not a buffer")
        paths = [None if path is None else expect(str, path) for path in as_list(sources)]
        counters = [expect(str, path) for path in as_list(sentinels)]
        for path in (*paths, *counters):
            if path is not None and not isinstance(_stored_attribute(owner, path), Tensor):
                raise Unreadable(f"'{path}' is not a tensor")
        how = self._computed(expect(tuple, self.decoder.value(written)), paths)
        return Derivation(names, paths, how, counters)

    def _computed(self, row: tuple[Any, ...], paths: Sequence[str | None]) -> Compute:
        kind, *rest = row or (None,)
        if kind == "folded" and len(paths) == 6 and len(rest) == 2:
            return Folded(expect(float, rest[0]), None if rest[1] is None else expect(int, rest[1]))
        if kind != "joined" or len(rest) != 2:
            raise Unreadable(f"a buffer is computed by {str(kind)[:60]!r}")
        parts = expect(tuple, rest[1])
        for part in parts:
            for step in () if isinstance(part, int) else expect(tuple, part):
                name, args, kwargs = expect(tuple, step) if len(step) == 3 else (None, None, None)
                self.decoder.target("op", name)
                expect(tuple, args)
                if not all(
                    isinstance(k, tuple) and len(k) == 2 and isinstance(k[0], str)
                    for k in expect(tuple, kwargs)
                ):
                    raise Unreadable("a step of a buffer's computation has invalid arguments")
        return Concatenated(expect(int, rest[0]), parts)

    def _borrow(self, body: Body, row: dict[str, Any]) -> None:
        body.mark_impure(expect(bool, row["impure"]))
        for name, at, kind, number in as_list(row["borrowed"]):
            if not expect(str, name).isidentifier() or hasattr(GraphModule, name) or name in body.__dict__:
                raise Unreadable(f"a body borrows something as '{name}'")
            value = self._tensor(number) if kind == "tensor" else self._module(number)
            body.borrow(name, value, _path(at))

    def _nodes(self, written: list[Any]) -> Graph:
        graph = Graph()
        nodes: list[Node] = []
        for row in written:
            op, target, args, kwargs, name, kind, meta = as_list(row)
            called = self._target(op, target)
            arguments, keywords = self.decoder.value(args, nodes), self.decoder.value(kwargs, nodes)
            _require_call(op, called, arguments, keywords, name)
            node = graph.create_node(op, called, arguments, keywords, name, self.decoder.type(kind))
            if node.name != name:
                # torch renames a node that is called like a builtin, although the saved graph may have that name.
                node.name = name
            node.meta = self._meta(meta, 0)
            if REGION in node.meta and op != "call_module":
                raise Unreadable(f"'{name}' has the record of a region and calls no module")
            nodes.append(node)
        names = {node.name for node in nodes}
        inputs = [str(node.target).lstrip("*") for node in nodes if node.op == "placeholder"]
        if (
            len(names) != len(nodes)
            or len(set(inputs)) != len(inputs)
            or not nodes
            or nodes[-1].op != "output"
        ):
            raise Unreadable("a graph has a duplicate name, or does not end with its output")
        return graph

    def _target(self, op: Any, target: Any) -> Any:
        if not isinstance(op, str) or op not in _OPS:
            raise Unreadable("a node has an unknown opcode")
        if op == "call_function":
            ((tag, name),) = as_dict(target).items()
            if tag not in ("op", "pk", "ho", "fn"):
                raise Unreadable(f"a node calls a {tag[:20]!r}")
            return self.decoder.target(tag, name)
        if op == "placeholder":
            return _identifier(expect(str, target).removeprefix("*").removeprefix("*")) and target
        if op == "call_method":
            if not encode.is_method(expect(str, target)):
                raise Unreadable(f"a node calls the method {target[:60]!r}")
            return target
        return _path(target)

    def _meta(self, number: Any, depth: int) -> dict[str, Any]:
        meta, owned = self.decoder.meta(number, _OWNED)
        if REGION in owned:
            # Nodes with the same meta have the same record, which is decoded once.
            if number not in self._calls:
                self._calls[number] = None
                self._calls[number] = self._call(as_dict(owned[REGION]), depth)
            call = self._calls[number]
            if call is None:
                raise Unreadable("a region is inside itself")
            meta[REGION] = call
        return meta

    def _call(self, row: dict[str, Any], depth: int) -> RegionCall:
        if depth > _DEEPEST:
            raise Unreadable("regions are nested too deep")
        kind, version, attrs = as_list(row["identity"])
        identity = Identity(expect(str, kind), expect(int, version), expect(str, attrs))
        if make_identity(kind, version, json.loads(expect(str, attrs))) != identity:
            raise Unreadable(f"the attributes of a region of kind '{kind}' are invalid")
        rule, number = row["rule"], row["round"]
        members = tuple(self._member(member, depth) for member in as_list(row["members"]))
        _require_bounded(sum(self._unfolded(member) for member in members))
        return RegionCall(
            identity,
            members,
            expect(int, row["rank"]),
            expect(int, row["epoch"]),
            tuple(
                (expect(str, n), Escape(expect(str, p), expect(str, why)))
                for n, p, why in as_list(row["escapes"])
            ),
            None if rule is None else expect(str, rule),
            None if number is None else expect(int, number),
            None,
            expect(int, row["depth"]),
            tuple((expect(str, n), expect(int, i)) for n, i in as_list(row["arguments"])),
            tuple(None if i is None else expect(int, i) for i in as_list(row["results"])),
        )

    def _member(self, row: Any, depth: int) -> Member:
        name, number, rank, at, clone, kind = as_list(row)
        return Member(
            _identifier(name),
            self._meta(number, depth + 1),
            expect(int, rank),
            None if at is None else _path(at),
            expect(bool, clone),
            self.decoder.type(kind),
        )

    def _unfolded(self, member: Member) -> int:
        """Return the number of operations of a member, with those of a region inside it."""
        inner = call_of(member.meta)
        if inner is None:
            return 1
        if id(inner) not in self._sizes:
            self._sizes[id(inner)] = 1 + sum(self._unfolded(m) for m in inner.members)
        return self._sizes[id(inner)]


def _require_bounded(size: int) -> None:
    if size > _MOST_UNFOLDED:
        raise Unreadable(f"its graphs call each other until they are of {size} operations, which is too much")


def _require_members(call: RegionCall | None, body: GraphModule) -> None:
    """Check that the record of a region matches the operations of its body, nested ones included."""
    stack, visited = [(call, body)], set[tuple[int, int]]()
    while stack:
        record, graph = stack.pop()
        if record is None or (id(record), id(graph)) in visited:
            continue
        visited.add((id(record), id(graph)))
        inside = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
        if len(inside) != len(record.members):
            raise Unreadable("the record of a region has more or fewer operations than its body")
        for member, node in zip(record.members, inside, strict=True):
            inner = call_of(member.meta)
            names = node.op in ("get_attr", "call_module")
            if (member.target is not None and not names) or (inner is not None and node.op != "call_module"):
                raise Unreadable(f"the record of a region does not match '{node.name}'")
            if inner is not None:
                stack.append((inner, cast("GraphModule", attribute(graph, str(node.target)))))


def _stored_attribute(program: Program, path: str) -> Any:
    """Return the module or tensor at a path of a program."""
    *parents, name = path.split(".")
    at: Any = program
    for atom in parents:
        at = at._modules.get(atom) if isinstance(at, nn.Module) else None
    if not isinstance(at, nn.Module):
        raise Unreadable(f"there is no parent module of '{path}'")
    for attributes in (at._modules, at._parameters, at._buffers):
        if name in attributes:
            return attributes[name]
    value = at.__dict__.get(name)
    if not isinstance(value, Tensor | GraphModule):
        raise Unreadable(f"nothing is at '{path}'")
    return value


def _owner(row: dict[str, Any]) -> nn.Module:
    """Return an empty module; that of a graph has a class of the saved name."""
    if "graph" not in row:
        return nn.Module()
    name = expect(str, as_dict(row["graph"])["name"])
    if not name.isprintable() or len(name) > _LONGEST_NAME:
        raise Unreadable("the name of a graph is too long or not printable")
    return cast("nn.Module", type(name, (nn.Module,), {})())


def _require_call(op: str, called: Any, args: Any, kwargs: Any, name: Any) -> None:
    """Check that name and arguments of a node can be written into generated code."""
    _identifier(name)
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise Unreadable(f"the arguments of '{name}' are invalid")
    for key in cast("dict[Any, Any]", kwargs):
        _identifier(key)
    arguments = cast("tuple[Any, ...]", args)
    if called is getattr:
        attribute_name = arguments[1] if len(arguments) == 2 and not kwargs else None
        if not isinstance(attribute_name, str) or attribute_name not in encode.ATTRIBUTES:
            raise Unreadable(f"'{name}' reads an attribute that graphs may not read")
    if getattr(called, "__module__", None) == "_operator":
        # torch writes these as Python operators without checking the number of arguments.
        _signature(called).bind(*arguments, **cast("dict[str, Any]", kwargs))
    fewest, most = _ARGUMENTS.get(op, (0, None))
    if len(arguments) < fewest or (most is not None and (len(arguments) > most or kwargs)):
        raise Unreadable(f"'{name}' has arguments that a {op} does not take")
    if op == "call_method" and not isinstance(arguments[0], Node):
        raise Unreadable(f"'{name}' calls a method of a value that is not a node")
    if op == "placeholder" and any(isinstance(a, Node) for a in arguments):
        raise Unreadable(f"the default of '{name}' is another node")


@functools.cache
def _signature(called: Any) -> inspect.Signature:
    return inspect.signature(called)


def _identifier(name: Any) -> str:
    if not expect(str, name).isidentifier() or keyword.iskeyword(name) or len(name) > _LONGEST_NAME:
        raise Unreadable(f"{name[:60]!r} is not a name of a node")
    return cast("str", name)


def _path(name: Any) -> str:
    if not PATH.fullmatch(expect(str, name)) or len(name) > _LONGEST_NAME:
        raise Unreadable(f"{name[:60]!r} is not a path in a module")
    return cast("str", name)


def _attribute(name: Any, owner: nn.Module) -> str:
    """Return a name if a module can have an attribute of that name."""
    if "." in _path(name) or hasattr(nn.Module, name) or name in owner.__dict__:
        raise Unreadable(f"a module has an attribute named '{name}'")
    return cast("str", name)


def _numbers(value: Any) -> dict[str, int]:
    return {expect(str, k): expect(int, v) for k, v in as_dict(value).items()}


def decode_tensor(row: Any, storage: torch.UntypedStorage) -> Tensor:
    """Return the tensor of a row of the description, in a storage that was read before."""
    _, dtype, sizes, strides, offset, _, grad, parameter = as_list(row)
    kind = as_dtype(dtype)
    shape, steps = [as_size(n) for n in as_dims(sizes)], [as_size(n) for n in as_dims(strides)]
    start = as_size(offset)
    if len(shape) != len(steps):
        raise Unreadable("a tensor has more or fewer strides than sizes")
    needed = 0 if 0 in shape else start + 1 + sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
    if needed * kind.itemsize > storage.nbytes():
        raise Unreadable("a tensor is larger than its storage")
    if math.prod(n or 1 for n in shape) * kind.itemsize >= 2**63:
        raise Unreadable("a tensor has too many elements")
    value = torch.empty(0, dtype=kind, device=storage.device).set_(storage, start, shape, steps)
    if expect(bool, parameter):
        return nn.Parameter(value, requires_grad=expect(bool, grad))
    return value.requires_grad_(expect(bool, grad))


@checked_call()
def load(path: str | os.PathLike[str] | IO[bytes], *, trust: bool | Collection[str] = False) -> Program:
    """Return the graph that `dovetail.save` wrote: the same text, regions, values, state and calling convention.

    Its regions run as they are until it is lowered. Raises InvalidFile for a file that is damaged, of a newer version or
    not written by `dovetail.save`, or whose description or tensors were changed (by checksums, which detect accidents
    and are not a signature). Records that only torch.export uses are not read.

    Untrusted files can be opened: they hold operators by name and numbers, no code, and the cost of loading is bounded
    by their size. A graph may call torch's own operators that compute with tensors, except those that open files or
    bypass memory checks, and no operators of other libraries: `trust` names those that it may call in addition (the
    operator "acme::mix", or the namespace "acme"), or is True for any.
    """
    if not isinstance(path, str | os.PathLike) and not callable(getattr(path, "read", None)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"path {path!r} is neither a path nor a file to read from.")
    trusted = Trust(trust)
    cache_pytrees.register_caches()
    archive = Archive(path)
    try:
        with pause_gc():
            description = archive.description()
            program = GraphDecoder(description, _tensors(archive, description), trusted).decode()
            check(program)
            return program
    except InvalidFile:
        raise
    except MissingRequirement as reason:
        raise InvalidFile(archive.path, f"{reason}") from reason
    # Untrusted input can make torch and sympy raise anything, MemoryError included.
    except Exception as error:
        reason = (
            error if isinstance(error, Unreadable | DovetailError) else f"{type(error).__name__}: {error}"
        )
        raise InvalidFile(archive.path, f"is inconsistent: {str(reason)[:2000]}.") from error
    finally:
        archive.close()


def _tensors(archive: Archive, description: dict[str, Any]) -> list[Tensor]:
    """Return the tensors of a graph, with shared storages."""
    places = archive.places()
    storage: dict[int, Any] = {}
    tensors: list[Tensor] = []
    storages = as_list(description["storages"])
    # Not in files of earlier versions.
    checksums = as_list(description.get("checksums", [None] * len(storages)))
    for row in as_list(description["tensors"]):
        number = as_index(as_list(row)[0], storages)
        if number not in storage:
            place, device = storages[number], torch.device(expect(str, row[5]))
            if device.type == "meta":
                raise Unreadable("a tensor of the graph is on the meta device")
            if place is not None and expect(str, place) not in places:
                raise Unreadable(f"it has no data for '{place}', or only pickled data, which is not read")
            try:
                data = (
                    b""
                    if place is None
                    else archive.read(places[place], checksums[as_index(number, checksums)])
                )
                storage[number] = storage_from(data, device)
            except (RuntimeError, AssertionError) as error:
                raise MissingRequirement(
                    f"holds tensors on '{device}', which is not available: {error}"
                ) from error
        tensors.append(decode_tensor(row, storage[number]))
    return tensors
