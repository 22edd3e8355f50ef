"""Regions: the record on a region's call, the graph's record of names and order, and the `Region` that users get.

`body_key` hashes what a body computes, and `graph_key` what a whole graph does whatever its weights, so that equal
computations have equal keys in any process.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from dovetail.errors import InvalidArgument, InvalidGraph, checked_call
from dovetail.ir.effects import declared_targets, summarize_body
from dovetail.ir.graph_module import Body, GraphOwner, attribute, graphs_of
from dovetail.ir.html_repr import HtmlRegion
from dovetail.ir.meta_keys import CLONE, LOWERING, OUTLINING, REGION
from dovetail.ir.nodes import is_projection, symbol_ranges, value_signature
from dovetail.ir.op_traits import qualified_name, target_name

_KIND = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


class Escape(NamedTuple):
    """The policy applied to a value that is also used outside, and why."""

    policy: str
    reason: str


class Member(NamedTuple):
    """An operation as it was before it moved into a region; a clone has the name of its original."""

    name: str
    meta: dict[str, Any]
    rank: int
    target: str | None  # the target of a get_attr or call_module in the graph around the region
    clone: bool
    type: Any = None

    @property
    def original(self) -> str:
        """The name of the operation that this is a clone of, through any number of clones, or else its own."""
        return self.meta.get(CLONE, self.name)

    @property
    def standing(self) -> tuple[bool, bool]:
        """Order of preference: an original first, then a clone with a name of its own."""
        return self.clone, CLONE in self.meta

    @property
    def is_original(self) -> bool:
        return not any(self.standing)


@dataclass(frozen=True, slots=True)
class Identity:
    """Kind, version and attributes of a region. `attrs` is canonical JSON, so equal attributes are equal text."""

    kind: str
    version: int
    attrs: str

    @property
    def headline(self) -> str:
        version = f" v{self.version}" if self.version != 1 else ""
        attrs = f" {self.attrs}" if self.attrs != "{}" else ""
        return f"{self.kind}{version}{attrs}"


@dataclass(frozen=True, slots=True)
class RegionCall:
    """The record on a region's call: its identity, and what `inline` needs to restore the original operations.

    `members` are in the order of the body's operations. Ranks are comparable within one `epoch`. `arguments` maps
    each argument of a pattern to its operand, `results` each result of the body to its result of the pattern.
    """

    identity: Identity
    members: tuple[Member, ...]
    rank: int
    epoch: int
    escapes: tuple[tuple[str, Escape], ...] = ()
    rule: str | None = None
    round: int | None = None
    backend: str | None = None
    depth: int = 1
    arguments: tuple[tuple[str, int], ...] = ()
    results: tuple[int | None, ...] = ()

    def with_backends(self, backends: Mapping[str, str | None]) -> RegionCall:
        """Return this record with the backends of nested regions set by region name."""
        members = tuple(
            m._replace(
                meta={**m.meta, REGION: replace(inner, backend=backends.get(m.name)).with_backends(backends)}
            )
            if (inner := call_of(m.meta)) is not None
            else m
            for m in self.members
        )
        return replace(self, members=members)

    def map_meta(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> RegionCall:
        """Return this record with the meta of its members changed, at every depth."""
        members: list[Member] = []
        for member in self.members:
            inner = call_of(member.meta)
            meta = change({k: v for k, v in member.meta.items() if k != REGION})
            meta |= {} if inner is None else {REGION: inner.map_meta(change)}
            members.append(member._replace(meta=meta))
        return replace(self, members=tuple(members))

    @property
    def headline(self) -> str:
        return self.identity.headline

    @property
    def size(self) -> int:
        """The number of original operations in it, nested ones included."""
        return sum(inner.size if (inner := call_of(m.meta)) else 1 for m in self.members)


def walk(call: RegionCall) -> Iterator[Member]:
    """Yield the members of a call and of every region nested in it."""
    stack = [call]
    while stack:
        for member in stack.pop().members:
            yield member
            inner = call_of(member.meta)
            if inner is not None:
                stack.append(inner)


def local_name(name: str) -> str:
    """Return the name that a region has in the body it is called in, without the regions around it."""
    return name.rpartition("/")[2]


def path_prefixes(path: str) -> Iterator[str]:
    """Yield a path of region names, `outer_0/inner_1`, and the paths of the regions around it."""
    yield path
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def call_of(meta: Mapping[str, Any]) -> RegionCall | None:
    """Return the record in a node's meta, or None if the node does not call a region."""
    call = meta.get(REGION)
    return call if isinstance(call, RegionCall) else None


def write_call(node: Node, call: RegionCall) -> None:
    node.meta[REGION] = call


def clone_of(node: Node) -> str | None:
    """Return the name of the original of a clone that `inline` could not merge with it, else None."""
    return node.meta.get(CLONE)


def mark_clone(node: Node, original: str | None) -> None:
    if original is not None:
        node.meta[CLONE] = original
    else:
        node.meta.pop(CLONE, None)


@dataclass(frozen=True, slots=True)
class OutlineState:
    """The outlining state of a graph: the next number per kind, and each node's place in the original order.

    `ranks` is in node order, so that an edit by another tool can be detected.
    """

    counters: Mapping[str, int] = field(default_factory=dict[str, int])
    ranks: Mapping[str, int] | None = None
    epoch: int = 0


def state_of(gm: GraphModule) -> OutlineState:
    state = gm.meta.get(OUTLINING)
    return state if isinstance(state, OutlineState) else OutlineState()


def with_state(meta: Mapping[str, Any], state: OutlineState) -> dict[str, Any]:
    return {**meta, OUTLINING: state}


def make_identity(kind: object, version: object, attrs: object) -> Identity:
    """Return a checked identity; raise InvalidArgument naming the part that is wrong."""
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise InvalidArgument(
            f"kind {kind!r} is not a dotted name such as 'rms_norm' or 'npu.avg_pool': letters, digits and '_'."
        )
    if not isinstance(version, int) or isinstance(version, bool):
        raise InvalidArgument(f"version {version!r} of '{kind}' is not an int.")
    if attrs is not None and not isinstance(attrs, Mapping):
        raise InvalidArgument(f"attrs of '{kind}' are a {type(attrs).__name__}; give a mapping from str.")
    try:
        value_json = _json_value(cast("Mapping[Any, Any]", attrs or {}), f"attrs of '{kind}'")
    except RecursionError:
        raise InvalidArgument(f"attrs of '{kind}' contain themselves, or nest too deep for JSON.") from None
    return Identity(kind, version, json.dumps(value_json, sort_keys=True))


def _json_value(value: Any, where: str) -> Any:
    """Return the value with tuples as lists; raise InvalidArgument if JSON cannot represent it exactly."""
    if isinstance(value, int) and abs(value) >= 2**64:
        raise InvalidArgument(f"{where}: an int of {value.bit_length()} bits is too large.")
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidArgument(f"{where}: {value!r} has no JSON form.")
        return value
    if isinstance(value, (list, tuple)):
        return [_json_value(v, f"{where}[{i}]") for i, v in enumerate(cast("list[Any]", value))]
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        for key, _ in items:
            if not isinstance(key, str):
                raise InvalidArgument(f"{where}: key {key!r} is not a str.")
        return {k: _json_value(v, f"{where}[{k!r}]") for k, v in items}
    raise InvalidArgument(
        f"{where}: a {type(value).__name__} has no JSON form; give numbers, text, lists or mappings."
    )


def literal(value: Any, ref: Callable[[Node], Any], opaque: Callable[[Any], Any] | None = None) -> Any:
    """Return a node argument as a hashable value that distinguishes what Python compares equal: 1, 1.0, True, -0.0.

    Objects of other types are compared by value, or, where that could equate distinct objects, by `opaque`.
    """
    if isinstance(value, Node):
        return ref(value)
    kind = type(value)
    if kind is int or value is None:
        return value
    if kind is float:
        return ("float", repr(value))
    if isinstance(value, (tuple, list)):
        return (
            "tuple" if isinstance(value, tuple) else "list",
            *(literal(v, ref, opaque) for v in cast("Sequence[Any]", value)),
        )
    if isinstance(value, dict):
        return ("dict", *((k, literal(v, ref, opaque)) for k, v in cast("dict[Any, Any]", value).items()))
    if isinstance(value, slice):
        return ("slice", *(literal(v, ref, opaque) for v in (value.start, value.stop, value.step)))
    if kind in (bool, str, complex):
        return (kind.__name__, repr(value))
    if opaque is not None:
        return opaque(value)
    try:
        hash(value)
    except TypeError:
        return ("object", kind.__name__, repr(value))
    return value


class Refs(dict[Node, str]):
    """The reference to each node in a signature: `%n`, operands first."""

    def __call__(self, node: Node) -> str:
        return self[node]

    def add(self, node: Node) -> None:
        self[node] = f"%{len(self)}"


def results(body: GraphModule) -> list[Node]:
    """Return the values a body returns: its output is always a flat tuple."""
    return list(cast("Iterable[Node]", body.graph.output_node().args[0]))


_KEYS: WeakKeyDictionary[GraphModule, dict[bool, str]] = WeakKeyDictionary()


def body_key(body: GraphModule) -> str:
    """Return a structural hash of a body, a Merkle hash over nested bodies.

    It covers structure, literals, dtypes, sizes, strides, devices and the contents of constants, with symbols
    numbered by order of appearance; names have no part in it. Linear in the operations and the bytes of constants.
    """
    return _key(body, by_contents=True)


def graph_key(gm: GraphModule) -> str:
    """Return a structural hash of a whole graph, equal for equal architectures whatever their weights.

    It differs from `body_key` in its operands: inputs, parameters, buffers and constants are numbered by their first
    use and hashed by dtype, sizes, strides and device. So a graph of torch.compile, whose inputs include the weights,
    has the key of the captured one. Linear in the operations.
    """
    return _key(gm, by_contents=False)


def _key(body: GraphModule, by_contents: bool) -> str:
    key = _KEYS.get(body, {}).get(by_contents)
    if key is None:
        key = hashlib.sha256("\n".join(_lines(body, by_contents)).encode()).hexdigest()
        if isinstance(body, Body):
            _KEYS.setdefault(body, {})[by_contents] = key
    return key


def _lines(body: GraphModule, by_contents: bool) -> list[str]:
    refs = Refs()
    symbols: dict[str, str] = {}
    ranges: dict[str, str] = {}
    lines: list[str] = []

    def add_operand(node: Node) -> None:
        value = attribute(body, cast("str", node.target)) if node.op == "get_attr" else node.meta.get("val")
        lines.append(f"in {value_signature(value, symbols)}")
        ranges.update(symbol_ranges(value))
        refs.add(node)

    for node in body.graph.nodes:
        if not by_contents:
            if _is_operand(body, node):
                continue
            for operand in node.all_input_nodes:
                if operand not in refs:
                    add_operand(operand)
        if node.op == "placeholder":
            add_operand(node)
            continue
        if node.op == "output":
            lines.append(f"out {_results(body, refs)}")
        else:
            args, kwargs = literal(node.args, refs), literal(node.kwargs, refs)
            call = call_of(node.meta)
            identity = f" {call.headline}" if call is not None else ""
            target = _target(body, node, by_contents)
            lines.append(f"{node.op} {target}{identity} {_literal_text(args)} {_literal_text(kwargs)}")
        refs.add(node)
    lines.extend(f"{short} in {ranges.get(name)}" for name, short in symbols.items())
    return lines


def _is_operand(gm: GraphModule, node: Node) -> bool:
    """Return whether a node is an input or a tensor that the graph holds."""
    if node.op != "get_attr":
        return node.op == "placeholder"
    return isinstance(attribute(gm, cast("str", node.target)), torch.Tensor)


def _results(body: GraphModule, refs: Refs) -> Any:
    """Return what a graph returns; one that is not a region's body may return any structure."""
    returned = body.graph.output_node().args[0]
    flat = isinstance(returned, (tuple, list)) and all(isinstance(n, Node) for n in returned)
    return [refs[n] for n in results(body)] if flat else _literal_text(literal(returned, refs))


def _literal_text(value: Any) -> str:
    """Return a literal as text that does not depend on memory addresses."""
    if isinstance(value, tuple):
        return f"({', '.join(_literal_text(v) for v in cast('tuple[Any, ...]', value))})"
    if callable(value) and not isinstance(value, (torch.dtype, type)):
        return qualified_name(value)
    return repr(value)


def _target(body: GraphModule, node: Any, by_contents: bool) -> str:
    if node.op not in ("get_attr", "call_module"):
        return target_name(node)
    value = attribute(body, cast("str", node.target))
    if isinstance(value, GraphModule):
        return _key(value, by_contents)
    if isinstance(value, torch.Tensor):
        return f"{value_signature(value)} {_content(value)}"
    if isinstance(value, nn.Module):
        tensors = value.state_dict().items()
        state = [(name, value_signature(t), _content(t) if by_contents else "") for name, t in tensors]
        return f"{type(value).__module__}.{type(value).__qualname__} {value.extra_repr()} {value.training} {state}"
    return repr(value)


def _content(value: torch.Tensor) -> str:
    """Return a hash of the bytes of a tensor, or "" where they cannot be read."""
    if value.layout is not torch.strided or value.device.type == "meta" or isinstance(value, FakeTensor):
        return ""
    dense = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = ctypes.string_at(dense.data_ptr(), dense.numel() * dense.element_size()) if dense.numel() else b""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, eq=False)
class Region(HtmlRegion):
    """One call of a region: its identity, its body, and the operations it consists of.

    `name` is a label (`outer_0/inner_1` when nested); identity is `kind`, `version` and `attrs`. `inputs` are the
    operands and `outputs` the results of the call, as nodes of the graph that has the call. `arguments` maps each
    argument of the pattern to its operand, and `results` each result of the body to its result of the pattern, None
    for an inner value that is used outside; both are empty if the region is not the match of a pattern. `backend` is
    the name of the backend that runs it now, in calls like the last one; None if it is not lowered.
    """

    name: str
    kind: str
    version: int
    attrs: dict[str, Any]
    body: GraphModule = field(repr=False)
    node: Node = field(repr=False)
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    nodes: tuple[str, ...]
    escapes: dict[str, Escape] = field(repr=False)
    effects: tuple[str, ...]
    rule: str | None = None
    round: int | None = None
    backend: str | None = None
    arguments: dict[str, int] = field(default_factory=dict[str, int], repr=False)
    results: tuple[int | None, ...] = field(default=(), repr=False)

    @property
    def key(self) -> str:
        """The structural hash of the body, equal for equal computations in any process."""
        return body_key(self.body)

    def reproducer(self, path: str | Path, *, seed: int = 0) -> Path:
        """Write the region alone, with random inputs of its shapes, as a script that runs by itself."""
        if not isinstance(path, (str, Path)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"path {path!r} is neither a str nor a Path.")
        return _WRITERS["reproducer"]()(self, Path(path), seed=seed)

    def export(self, folder: str | Path, *, seed: int = 0) -> Path:
        """Write the region alone into a new folder: its body, random operands, their results, and its description.

        It lets a kernel be written without the model: `check.py` in the folder compares, and
        `dovetail.replace_region` installs the result. An existing folder must be empty.
        """
        if not isinstance(folder, (str, Path)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"folder {folder!r} is neither a str nor a Path.")
        return _WRITERS["export"]()(self, Path(folder), seed=seed)


class LoweringEvent(Protocol):
    """What a backend did with the body of a region: the outcome, the time it took, and why it failed."""

    region: str
    key: str
    backend: str
    outcome: str
    seconds: float
    reason: str


class LoweringView(Protocol):
    """What is read here and in the ledger of a graph's lowering; `lowering.lowered_state.LoweredState` implements it."""

    assigned: dict[str, Any]  # by the local names of regions

    @property
    def events(self) -> Sequence[LoweringEvent]: ...

    def calls(self, program: GraphModule, /) -> Mapping[str, int]:
        """Return the number of regions with each body, by the key of its events."""
        ...

    def backend_of(self, name: str, otherwise: str | None, /) -> str | None:
        """Return the backend that runs a region now, `otherwise` if that is not decided yet."""
        ...


def lowering_view(gm: GraphModule) -> LoweringView | None:
    """Return the lowering that a graph carries, or None if it is not lowered."""
    return gm.meta.get(LOWERING)


class RegionWriter(Protocol):
    """Writes one region to a path, with sample operands drawn from a seed."""

    def __call__(self, region: Region, path: Path, /, *, seed: int) -> Path: ...


_WRITERS: dict[str, Callable[[], RegionWriter]] = {}


def install_writers(**writers: Callable[[], RegionWriter]) -> None:
    """Set the writers of the methods `export` and `reproducer`: functions that import the writer when called."""
    _WRITERS.update(writers)


@checked_call()
def regions(gm: GraphModule | GraphOwner, *, kind: str | None = None, nested: bool = False) -> list[Region]:
    """Return the regions a graph calls, in execution order; with `nested`, those inside each right after it.

    For a compiled model, those of all its graphs.
    """
    if kind is not None and not isinstance(kind, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"kind {kind!r} is not a name.")
    return [r for graph in graphs_of(gm) for r in _regions(graph, nested) if kind is None or r.kind == kind]


def _regions(gm: GraphModule, nested: bool) -> Iterator[Region]:
    declared, lowering = declared_targets(gm), lowering_view(gm)

    def walk_calls(owner: GraphModule, node: Node, call: RegionCall, name: str) -> Iterator[Region]:
        body = attribute(owner, cast("str", node.target))
        if not isinstance(body, GraphModule):
            raise InvalidGraph(f"the region calls '{node.target}', which is not a graph", node.name)
        # The record on the call dates from lowering; code that fails in a call is replaced later.
        backend = lowering.backend_of(name, call.backend) if lowering is not None else call.backend
        yield _snapshot(node, call, body, name, backend, _effects(body, declared))
        if not nested:
            return
        inside = [n for n in body.graph.nodes if n.op not in ("placeholder", "output")]
        if len(inside) != len(call.members):
            raise InvalidGraph("the body does not fit its call: one of them was edited since", node.name)
        for inner_node, member in zip(inside, call.members, strict=True):
            inner = call_of(member.meta)
            if inner is not None:
                yield from walk_calls(body, inner_node, inner, f"{name}/{member.name}")

    for node in gm.graph.nodes:
        call = call_of(node.meta)
        if call is not None:
            yield from walk_calls(gm, node, call, node.name)


def _snapshot(
    node: Node, call: RegionCall, body: GraphModule, name: str, backend: str | None, effects: tuple[str, ...]
) -> Region:
    results = [u for u in node.users if is_projection(u)]
    return Region(
        name=name,
        kind=call.identity.kind,
        version=call.identity.version,
        attrs=json.loads(call.identity.attrs),
        body=body,
        node=node,
        inputs=tuple(cast("Node", a) for a in node.args),
        outputs=tuple(sorted(results, key=lambda n: cast("int", n.args[1]))),
        nodes=_originals(call),
        escapes=dict(call.escapes),
        effects=effects,
        rule=call.rule,
        round=call.round,
        backend=backend,
        arguments=dict(call.arguments),
        results=call.results,
    )


def _originals(call: RegionCall) -> tuple[str, ...]:
    names: list[str] = []
    stack = list(reversed(call.members))
    while stack:
        member = stack.pop()
        inner = call_of(member.meta)
        if inner is None:
            names.append(member.original)
        else:
            stack.extend(reversed(inner.members))
    # A result of a nested region has the name of the operation that computes it.
    return tuple(dict.fromkeys(names))


def _effects(body: GraphModule, declared: Mapping[str, str]) -> tuple[str, ...]:
    effects = summarize_body(body, declared)
    words = ["writes"] if effects.writes or effects.state_written else []
    words += ["random"] if effects.random else []
    if effects.host_effect:
        words.append(effects.host_effect)
    return tuple(words)


def calls_in(owner: GraphModule, caller: RegionCall | None = None) -> dict[Node, RegionCall | None]:
    """Return the operations of a graph in order, each with the region that it calls, if any.

    A body is shared by many calls: the regions inside it are recorded in its `caller`, not in its own nodes.
    """
    nodes = [n for n in owner.graph.nodes if n.op not in ("placeholder", "output")]
    metas = [n.meta for n in nodes] if caller is None else [m.meta for m in caller.members]
    return {node: call_of(meta) for node, meta in zip(nodes, metas, strict=True)}


def unique_name(stem: str, used: dict[str, int]) -> str:
    """Return `stem`, or `stem` with the first free number, and record it in `used`."""
    name = stem
    while name in used:
        used[stem] += 1
        name = f"{stem}_{used[stem]}"
    used[name] = 0
    return name
