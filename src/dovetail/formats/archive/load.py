"""Loading what `save` wrote. Nothing in a file is run or unpickled."""

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

# A body that two others hold, and those two others, makes a graph of a few lines that unfolds without end: bounded are
# the modules on all paths, the operations of the graph with every call inlined, and those that records of regions name.
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
    """Builds the graph again; `tensors` are what it holds, in the order of their numbers."""

    def __init__(self, described: dict[str, Any], tensors: Sequence[Tensor], trust: encode.Trust) -> None:
        self.described, self.tensors = described, tensors
        self.decoder = Decoder(described, trust)
        self.rows = as_list(described["modules"])
        self._made: dict[int, nn.Module] = {}
        self._making: set[int] = set()
        self._calls: dict[int, RegionCall | None] = {}
        self._paths: dict[nn.Module, int] = {}
        self._sizes: dict[int, int] = {}

    def restore(self) -> Program:
        """The graph. Raises Unreadable where the description makes no sense."""
        convention = self.described["convention"]
        root = self._module(self.described["root"])
        if not isinstance(root, Program):
            raise Unreadable("what it holds is no graph")
        if convention is not None:
            read = decode.decode_convention(as_dict(convention), self.decoder)
            inputs = sum(n.op == "placeholder" for n in root.graph.nodes)
            if inputs != len(read.order) or inputs != len(read.expectations.inputs):
                raise Unreadable("the graph takes other inputs than its callers are told to give")
            returned: Any = root.graph.output_node().args[0]
            if read.out_spec.num_leaves != (len(returned) if isinstance(returned, tuple | list) else 1):
                raise Unreadable("the graph returns other results than its callers are told to get")
            root.graph.set_codegen(ModelCodeGen(read))
        ledger = self.described["ledger"]
        if ledger is not None:
            write_ledger(root, Ledger.from_json(expect(str, ledger)))
        return root

    def _module(self, number: Any) -> nn.Module:
        at = as_index(number, self.rows)
        if at in self._made:
            return self._made[at]
        if at in self._making or len(self._making) - len(self._made) > _DEEPEST:
            raise Unreadable("a module is inside itself, or modules are nested too deep")
        self._making.add(at)
        row = as_dict(self.rows[at])
        plain = _owner(row)
        plain.training = expect(bool, row["training"])
        for name, child in as_list(row["modules"]):
            plain._modules[_attribute(name, plain)] = None if child is None else self._module(child)
        for name, tensor in as_list(row["parameters"]):
            held = self._tensor(tensor)
            if held is not None and not isinstance(held, nn.Parameter):
                raise Unreadable(f"the parameter '{name}' is a tensor that is none")
            plain._parameters[_attribute(name, plain)] = held
        for name, tensor, persistent in as_list(row["buffers"]):
            plain._buffers[_attribute(name, plain)] = self._tensor(tensor)
            if not expect(bool, persistent):
                plain._non_persistent_buffers_set.add(name)
        for name, tensor in as_list(row["constants"]):
            if hasattr(GraphModule, name):
                raise Unreadable(f"a constant named '{name}'")
            plain.__dict__[_attribute(name, plain)] = self._tensor(tensor)
        made = self._graph(as_dict(row["graph"]), plain) if "graph" in row else plain
        inside = [child for child in made._modules.values() if child is not None]
        self._paths[made] = 1 + sum(self._paths[child] for child in inside)
        _require_bounded(self._paths[made])
        self._made[at] = made
        return made

    def _tensor(self, number: Any) -> Tensor | None:
        return None if number is None else self.tensors[as_index(number, self.tensors)]

    def _graph(self, row: dict[str, Any], owner: nn.Module) -> Program:
        graph = self._nodes(as_list(row["nodes"]))
        if expect(bool, row["body"]):
            returned: Any = graph.output_node().args[0]
            if not isinstance(returned, tuple | list) or not all(isinstance(n, Node) for n in returned):
                raise Unreadable("the body of a region returns something else than values of its graph")
            made = make_body(graph, type(owner).__name__)
            made.training = owner.training
            made._modules.update(owner._modules)
            self._borrow(made, row)
        else:
            made = rebuild(owner, graph)
        self._require_held(made)
        meta, _ = self.decoder.meta(row["meta"], frozenset())
        canonical, outlining = row["canonical"], row["outlining"]
        if canonical is not None:
            counts = (
                ()
                if canonical is False
                else tuple((expect(str, n), expect(int, c)) for n, c in as_list(canonical))
            )
            meta[CANONICAL] = None if canonical is False else CanonicalReport(counts)
        made.meta = meta
        if outlining is not None:
            counters, ranks, epoch = as_list(outlining)
            known = None if ranks is None else _numbers(ranks)
            made.meta = with_state(meta, OutlineState(_numbers(counters), known, expect(int, epoch)))
        # Files of earlier versions have none.
        record_derivations(
            made, [self._derived(made, derived) for derived in as_list(row.get("derived", []))]
        )
        return made

    def _require_held(self, program: Program) -> None:
        """Nodes may name what the file put into a module, and nothing that Python has there beside it."""
        size = 0
        for node in program.graph.nodes:
            size += 1
            if node.op not in ("get_attr", "call_module"):
                continue
            value = _held(program, str(node.target))
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
        """Buffers that are computed from weights, by one of the two ways that passes have, of tensors of the file."""
        results, sources, sentinels, written = as_list(row)
        names = [expect(str, name) for name in as_list(results)]
        for name in names:
            if name not in owner._buffers:
                raise Unreadable(f"'{name}' is computed from weights and is no buffer")
        paths = [None if path is None else expect(str, path) for path in as_list(sources)]
        counters = [expect(str, path) for path in as_list(sentinels)]
        for path in (*paths, *counters):
            if path is not None and not isinstance(_held(owner, path), Tensor):
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
                    raise Unreadable("a step of a buffer's computation has no arguments")
        return Concatenated(expect(int, rest[0]), parts)

    def _borrow(self, body: Body, row: dict[str, Any]) -> None:
        body.mark_impure(expect(bool, row["impure"]))
        for name, at, kind, number in as_list(row["borrowed"]):
            if not expect(str, name).isidentifier() or hasattr(GraphModule, name) or name in body.__dict__:
                raise Unreadable(f"a body that holds something as '{name}'")
            value = self._tensor(number) if kind == "tensor" else self._module(number)
            body.borrow(name, value, _path(at))

    def _nodes(self, written: list[Any]) -> Graph:
        graph = Graph()
        made: list[Node] = []
        for row in written:
            op, aim, args, kwargs, name, kind, meta = as_list(row)
            called = self._target(op, aim)
            arguments, keywords = self.decoder.value(args, made), self.decoder.value(kwargs, made)
            _require_call(op, called, arguments, keywords, name)
            node = graph.create_node(op, called, arguments, keywords, name, self.decoder.type(kind))
            if node.name != name:
                # torch gives another name to what is called like a builtin, where a model may have the first.
                node.name = name
            node.meta = self._meta(meta, 0)
            if REGION in node.meta and op != "call_module":
                raise Unreadable(f"'{name}' has the record of a region and calls none")
            made.append(node)
        names = {node.name for node in made}
        inputs = [str(node.target).lstrip("*") for node in made if node.op == "placeholder"]
        if len(names) != len(made) or len(set(inputs)) != len(inputs) or not made or made[-1].op != "output":
            raise Unreadable("a graph has a name twice, or no output at its end")
        return graph

    def _target(self, op: Any, aim: Any) -> Any:
        if not isinstance(op, str) or op not in _OPS:
            raise Unreadable("a node whose operation is none of a graph")
        if op == "call_function":
            ((tag, name),) = as_dict(aim).items()
            if tag not in ("op", "pk", "ho", "fn"):
                raise Unreadable(f"a node calls a {tag[:20]!r}")
            return self.decoder.target(tag, name)
        if op == "placeholder":
            return _identifier(expect(str, aim).removeprefix("*").removeprefix("*")) and aim
        if op == "call_method":
            if not encode.is_method(expect(str, aim)):
                raise Unreadable(f"a node calls the method {aim[:60]!r}")
            return aim
        return _path(aim)

    def _meta(self, number: Any, depth: int) -> dict[str, Any]:
        meta, owned = self.decoder.meta(number, _OWNED)
        if REGION in owned:
            # Nodes whose meta is the same have the same record: what is written once is read once.
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
            raise Unreadable("regions are nested without end")
        kind, version, attrs = as_list(row["identity"])
        identity = Identity(expect(str, kind), expect(int, version), expect(str, attrs))
        if make_identity(kind, version, json.loads(expect(str, attrs))) != identity:
            raise Unreadable(f"the attributes of a region of kind '{kind}'")
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
        """How many operations a member stands for, those of a region inside it included."""
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
    """What the record of a region tells of its operations must fit the operations of its body, nested ones included."""
    stack, seen = [(call, body)], set[tuple[int, int]]()
    while stack:
        record, graph = stack.pop()
        if record is None or (id(record), id(graph)) in seen:
            continue
        seen.add((id(record), id(graph)))
        inside = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
        if len(inside) != len(record.members):
            raise Unreadable("the record of a region has other operations than its body")
        for member, node in zip(record.members, inside, strict=True):
            inner = call_of(member.meta)
            names = node.op in ("get_attr", "call_module")
            if (member.target is not None and not names) or (inner is not None and node.op != "call_module"):
                raise Unreadable(f"the record of a region tells of '{node.name}' what it is not")
            if inner is not None:
                stack.append((inner, cast("GraphModule", attribute(graph, str(node.target)))))


def _held(program: Program, path: str) -> Any:
    """What a module or one inside it was given by a name."""
    *way, name = path.split(".")
    at: Any = program
    for atom in way:
        at = at._modules.get(atom) if isinstance(at, nn.Module) else None
    if not isinstance(at, nn.Module):
        raise Unreadable(f"there is no module on the way to '{path}'")
    for held in (at._modules, at._parameters, at._buffers):
        if name in held:
            return held[name]
    value = at.__dict__.get(name)
    if not isinstance(value, Tensor | GraphModule):
        raise Unreadable(f"nothing is at '{path}'")
    return value


def _owner(row: dict[str, Any]) -> nn.Module:
    """An empty module; a graph is named like the class of the module it is made of."""
    if "graph" not in row:
        return nn.Module()
    name = expect(str, as_dict(row["graph"])["name"])
    if not name.isprintable() or len(name) > _LONGEST_NAME:
        raise Unreadable("a graph whose name cannot be shown")
    return cast("nn.Module", type(name, (nn.Module,), {})())


def _require_call(op: str, called: Any, args: Any, kwargs: Any, name: Any) -> None:
    """A name, and arguments that generated code may have in it."""
    _identifier(name)
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise Unreadable(f"the arguments of '{name}'")
    for key in cast("dict[Any, Any]", kwargs):
        _identifier(key)
    arguments = cast("tuple[Any, ...]", args)
    if called is getattr:
        asked = arguments[1] if len(arguments) == 2 and not kwargs else None
        if not isinstance(asked, str) or asked not in encode.ATTRIBUTES:
            raise Unreadable(f"'{name}' asks for an attribute that graphs do not ask for")
    if getattr(called, "__module__", None) == "_operator":
        # torch writes these as operators of Python, without looking how many arguments there are.
        _signature(called).bind(*arguments, **cast("dict[str, Any]", kwargs))
    fewest, most = _ARGUMENTS.get(op, (0, None))
    if len(arguments) < fewest or (most is not None and (len(arguments) > most or kwargs)):
        raise Unreadable(f"'{name}' has arguments that a {op} does not have")
    if op == "call_method" and not isinstance(arguments[0], Node):
        raise Unreadable(f"'{name}' calls a method of something that is no node")
    if op == "placeholder" and any(isinstance(a, Node) for a in arguments):
        raise Unreadable(f"the default of '{name}' is another node")


@functools.cache
def _signature(called: Any) -> inspect.Signature:
    return inspect.signature(called)


def _identifier(name: Any) -> str:
    if not expect(str, name).isidentifier() or keyword.iskeyword(name) or len(name) > _LONGEST_NAME:
        raise Unreadable(f"{name[:60]!r} is no name of a node")
    return cast("str", name)


def _path(name: Any) -> str:
    if not PATH.fullmatch(expect(str, name)) or len(name) > _LONGEST_NAME:
        raise Unreadable(f"{name[:60]!r} is no place in a module")
    return cast("str", name)


def _attribute(name: Any, owner: nn.Module) -> str:
    """A name under which a module can hold something."""
    if "." in _path(name) or hasattr(nn.Module, name) or name in owner.__dict__:
        raise Unreadable(f"a module holds something as '{name}'")
    return cast("str", name)


def _numbers(value: Any) -> dict[str, int]:
    return {expect(str, k): expect(int, v) for k, v in as_dict(value).items()}


def decode_tensor(row: Any, storage: torch.UntypedStorage) -> Tensor:
    """The tensor that a row of the description tells of, in the memory that was read for it."""
    _, dtype, sizes, strides, offset, _, grad, parameter = as_list(row)
    kind = as_dtype(dtype)
    shape, steps = [as_size(n) for n in as_dims(sizes)], [as_size(n) for n in as_dims(strides)]
    start = as_size(offset)
    if len(shape) != len(steps):
        raise Unreadable("a tensor without strides")
    needed = 0 if 0 in shape else start + 1 + sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
    if needed * kind.itemsize > storage.nbytes():
        raise Unreadable("a tensor is larger than what the file has of it")
    if math.prod(n or 1 for n in shape) * kind.itemsize >= 2**63:
        raise Unreadable("a tensor has more elements than can be counted")
    value = torch.empty(0, dtype=kind, device=storage.device).set_(storage, start, shape, steps)
    if expect(bool, parameter):
        return nn.Parameter(value, requires_grad=expect(bool, grad))
    return value.requires_grad_(expect(bool, grad))


@checked_call()
def load(path: str | os.PathLike[str] | IO[bytes], *, trust: bool | Collection[str] = False) -> Program:
    """The graph that `dovetail.save` wrote: the same text, regions, values and state, called and checked as before.

    Its regions run as they are until it is lowered. A file that is damaged, from a newer version or not one of ours
    raises InvalidFile; so does one in which the description of the graph or numbers of its tensors are others than were
    saved (by checksums: they tell accidents, and are no signature). Records for torch.export alone are not looked at.

    Files from anyone can be opened: they hold operators by name and numbers, no code, and what they may cost is bounded
    by their size. A graph may call torch's own operators that compute with tensors, not those that open files or go
    around the checks of memory, nor operators of other libraries: `trust` names those that it may call beside (the
    operator "acme::mix", or the namespace "acme"), or is True for any.
    """
    if not isinstance(path, str | os.PathLike) and not callable(getattr(path, "read", None)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"path {path!r} is neither a path nor a file to read from.")
    trusted = Trust(trust)
    cache_pytrees.register_caches()
    archive = Archive(path)
    try:
        with pause_gc():
            described = archive.description()
            program = GraphDecoder(described, _tensors(archive, described), trusted).restore()
            check(program)
            return program
    except InvalidFile:
        raise
    except MissingRequirement as reason:
        raise InvalidFile(archive.path, f"{reason}") from reason
    # What nobody vouches for can make torch and sympy raise anything, MemoryError included.
    except Exception as error:
        reason = (
            error if isinstance(error, Unreadable | DovetailError) else f"{type(error).__name__}: {error}"
        )
        raise InvalidFile(archive.path, f"does not hold together: {str(reason)[:2000]}.") from error
    finally:
        archive.close()


def _tensors(archive: Archive, described: dict[str, Any]) -> list[Tensor]:
    """The tensors of a graph, those that shared memory sharing it again."""
    places = archive.places()
    memory: dict[int, Any] = {}
    made: list[Tensor] = []
    storages = as_list(described["storages"])
    # Older files have none.
    checksums = as_list(described.get("checksums", [None] * len(storages)))
    for row in as_list(described["tensors"]):
        number = as_index(as_list(row)[0], storages)
        if number not in memory:
            place, device = storages[number], torch.device(expect(str, row[5]))
            if device.type == "meta":
                raise Unreadable("a tensor of the graph is on the meta device")
            if place is not None and expect(str, place) not in places:
                raise Unreadable(f"it has no numbers for '{place}', or only pickled ones, which are not read")
            try:
                data = (
                    b""
                    if place is None
                    else archive.read(places[place], checksums[as_index(number, checksums)])
                )
                memory[number] = storage_from(data, device)
            except (RuntimeError, AssertionError) as error:
                raise MissingRequirement(
                    f"holds tensors on '{device}', which is not there: {error}"
                ) from error
        made.append(decode_tensor(row, memory[number]))
    return made
