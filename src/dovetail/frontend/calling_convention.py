"""Calling convention: a captured graph is called as its model is, and only as it was captured.

`arrange` lines up the parameters of the model's signature with the flat inputs of the graph. `Convention` binds the
arguments of a call to these inputs, checks the guards, and builds what the model returns from the flat results;
`ModelCodeGen` generates a `forward` with the model's signature around that. After them follow tree specs, in a form that
pickles on any torch, and caches of transformers among the arguments, which are updated in place.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import math
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Proxy
from torch.fx.graph import CodeGen
from torch.utils._pytree import TreeSpec

from dovetail.errors import CallMismatch
from dovetail.frontend.input_guards import InputGuards

NAME = "_dovetail_call"
GIVEN = "_dovetail_given"
_TAKEN = frozenset({"self", "torch", "device", "inf", "nan", "NoneType", "fx_pytree", "pytree", "math", NAME})
_CACHES = "transformers.cache_utils"
_LITERALS = (bool, int, float, str, type(None))


class _Missing:
    """The default of an argument whose real default has no literal."""

    def __repr__(self) -> str:
        return "..."

    def __reduce__(self) -> str:
        return "MISSING"


MISSING = _Missing()


@dataclass(frozen=True)
class Slot:
    """One parameter of the model's signature; whether it was passed at capture, and whether by name."""

    name: str
    kind: Any
    has_default: bool
    default: Any
    captured: bool
    by_name: bool = False

    def parameter(self) -> inspect.Parameter:
        default = self.default if self.has_default else inspect.Parameter.empty
        return inspect.Parameter(self.name, self.kind, default=default)


@dataclass(frozen=True)
class Arrangement:
    """How the flattened parameters of a signature correspond to a graph's inputs."""

    slots: tuple[Slot, ...]
    spec: TreeSpec
    order: tuple[int, ...]
    paths: tuple[str, ...]


def arrange(in_spec: TreeSpec, signature: inspect.Signature) -> Arrangement:
    """Match torch's `(args, kwargs)` spec with the model's signature; raise TypeError if they disagree."""
    args_spec, kwargs_spec = children(in_spec)
    specs = [*children(args_spec), *children(kwargs_spec)]
    keys: list[str] = list(context_of(kwargs_spec) or ())
    starts: list[int] = []
    total = 0
    for spec in specs:
        starts.append(total)
        total += spec.num_leaves
    positional = len(specs) - len(keys)
    bound = signature.bind(*range(positional), **{k: positional + i for i, k in enumerate(keys)})

    slots: list[Slot] = []
    chosen: list[TreeSpec] = []
    leaf_of: list[int] = []
    paths: list[str] = []

    def take(index: int, path: str) -> TreeSpec:
        leaf_of.extend(range(starts[index], starts[index] + specs[index].num_leaves))
        paths.extend(path + inner for inner in _leaf_paths(specs[index]))
        return specs[index]

    for name, parameter in signature.parameters.items():
        captured = name in bound.arguments
        default = parameter.default
        value: Any = bound.arguments.get(name)
        by_name = _is_named(value, positional)
        known = None if default is inspect.Parameter.empty else default
        slots.append(
            Slot(name, parameter.kind, default is not inspect.Parameter.empty, known, captured, by_name)
        )
        if not captured:
            continue
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            chosen.append(tuple_of([take(i, f"{name}[{j}]") for j, i in enumerate(value)]))
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            chosen.append(dict_of(list(value), [take(i, f"{name}[{k!r}]") for k, i in value.items()]))
        else:
            chosen.append(take(value, name))
    order = [0] * total
    named = [""] * total
    for leaf, (placeholder, path) in enumerate(zip(leaf_of, paths, strict=True)):
        order[placeholder] = leaf
        named[placeholder] = path
    return Arrangement(tuple(slots), tuple_of(chosen), tuple(order), tuple(named))


def _is_named(value: Any, positional: int) -> bool:
    """Return whether a parameter was passed by name, from the number bound to it: those passed by name come last."""
    return isinstance(value, dict) or (isinstance(value, int) and value >= positional)


def _leaf_paths(spec: TreeSpec) -> list[str]:
    if spec.type is None:
        return [""]
    inner = children(spec)
    keys: list[Any] = list(context_of(spec)) if spec.type is dict else list(range(len(inner)))
    return [f"[{key!r}]{rest}" for key, child in zip(keys, inner, strict=True) for rest in _leaf_paths(child)]


@dataclass(frozen=True)
class Carried:
    """A cache argument that the model updates in place: which parameter, and where in the results its state is.

    `start` and `count` are the leaves of the results that make up the cache.
    """

    slot: int
    start: int
    count: int


class Convention:
    """How a captured graph is called; immutable.

    `bind` returns the graph's inputs for the arguments of a call or raises CallMismatch; `results` returns what the model
    returns for the graph's flat results.
    """

    missing = MISSING

    def __init__(
        self,
        slots: tuple[Slot, ...],
        in_spec: TreeSpec,
        order: tuple[int, ...],
        out_spec: TreeSpec,
        input_guards: InputGuards,
        training: bool | None,
        carried: tuple[Carried, ...] = (),
        appended: int = 0,
    ) -> None:
        self.slots = slots
        self.in_spec = in_spec
        self.order = order
        self.out_spec = out_spec
        self.input_guards = input_guards
        self.training = training
        self.carried = carried
        self.appended = appended
        self._captured = tuple(i for i, slot in enumerate(slots) if slot.captured)
        self._defaulted = tuple(i for i, slot in enumerate(slots) if not slot.captured)
        self._takes_all = not self._defaulted
        self._flat = all(child.type is None for child in children(in_spec))
        self._in_order = order == tuple(range(len(order)))
        self._single = not carried and out_spec.is_leaf()

    def __deepcopy__(self, memo: dict[int, Any]) -> Convention:
        return self

    def __copy__(self) -> Convention:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        state = (
            self.slots,
            pack(self.in_spec),
            self.order,
            pack(self.out_spec),
            self.input_guards,
            self.training,
            self.carried,
            self.appended,
        )
        return _restore, state

    def called(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward` so that arguments which do not fit its signature raise CallMismatch."""

        @functools.wraps(forward)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                return forward(*args, **kwargs)
            except TypeError as error:
                raised_inside = error.__traceback__ is not None and error.__traceback__.tb_next is not None
                if raised_inside:
                    raise
                raise CallMismatch(f"{error}. The graph is called as {self._signature()}.") from None

        return checked

    def _signature(self) -> inspect.Signature:
        return inspect.Signature([slot.parameter() for slot in self.slots])

    def guard(self, module: nn.Module) -> Callable[..., Any]:
        """Return a function with the model's signature that checks a call as the `forward` of a graph does.

        It raises CallMismatch for a call that `module`, the graph, was not captured for, and runs nothing.
        """
        namespace: dict[str, Any] = {NAME: self}
        exec(self.definition([], "", "check"), namespace)
        return types.MethodType(namespace["check"], module)

    def bind(self, module: nn.Module, values: tuple[Any, ...]) -> Sequence[Any]:
        """Return the graph's inputs, from one value for each parameter of the model's signature."""
        tracing = torch.compiler.is_compiling()
        if not tracing and self.training is not None and module.training is not self.training:
            raise CallMismatch(_other_mode(self.training))
        for i in self._defaulted:
            # Most defaults are left out, and a model may have many.
            if values[i] is not self.slots[i].default:
                self._check_default(self.slots[i], values[i])
        given = values if self._takes_all else tuple([values[i] for i in self._captured])
        leaves = given if self._flat else self._flatten(given)
        flat = leaves if self._in_order else [leaves[i] for i in self.order]
        if not tracing and _SYMBOLIC.isdisjoint(map(type, flat)):
            self.input_guards.check(module, flat)
        return flat

    def results(self, flat: Any, given: tuple[Any, ...] | None = None) -> Any:
        """Return what the model returns, from the graph's flat results.

        Caches among `given`, the arguments of the call, are updated in place and returned, as in the model.
        """
        out = list(flat) if isinstance(flat, (list, tuple)) else [flat]
        if self._single and len(out) == 1:
            return out[0]
        if not self.carried or given is None:
            results = pytree.tree_unflatten(out, self.out_spec)
            return results[0] if self.appended else results
        outer, inner = self._split
        updated: dict[int, Any] = {}
        for carried in sorted(self.carried, key=lambda c: c.start, reverse=True):
            state = slice(carried.start, carried.start + carried.count)
            if carried.slot not in updated:
                new = pytree.tree_unflatten(out[state], inner[carried.start])
                updated[carried.slot] = _update_cache(given[carried.slot], new)
            out[state] = [updated[carried.slot]]
        results = pytree.tree_unflatten(out, outer)
        return results[0] if self.appended else results

    @functools.cached_property
    def _split(self) -> tuple[TreeSpec, dict[int, TreeSpec]]:
        return _split_at(self.out_spec, frozenset(carried.start for carried in self.carried))

    def inputs(self, *args: Any) -> Sequence[Any]:
        """Return the graph's inputs from positional arguments, nested or already flat, as FX tools pass them."""
        leaves = pytree.arg_tree_leaves(*args)
        if len(leaves) == len(self.order):
            return leaves
        return self.flat_inputs(args, {})

    def flat_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Return the graph's inputs for a call of the model, without checking that it was captured for such calls."""
        values = self.spread(args, kwargs)
        given = tuple(values[i] for i in self._captured)
        flat = given if self._flat else self._flatten(given)
        return [flat[i] for i in self.order]

    def _flatten(self, given: tuple[Any, ...]) -> Sequence[Any]:
        leaves, spec = pytree.tree_flatten(given)
        if spec == self.in_spec:
            return leaves
        try:
            return self.in_spec.flatten_up_to(given)
        except (ValueError, TypeError, KeyError):
            names = [self.slots[i].name for i in self._captured]
            raise CallMismatch(
                f"the arguments are nested differently from how the graph was captured: it takes "
                f"{describe_spec(names, self.in_spec)}, and was given {describe_spec(names, spec)}. "
                f"Capture the model again with arguments nested like these."
            ) from None

    def _check_default(self, slot: Slot, value: Any) -> None:
        if value is MISSING or value is slot.default:
            return
        if slot.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            if not value:
                return
        elif isinstance(value, _LITERALS) and type(value) is type(slot.default) and value == slot.default:
            return
        raise CallMismatch(
            f"argument '{slot.name}' was left out when the graph was captured, so its default is part of the "
            f"graph. Leave it out, or capture the model again with it."
        )

    def definition(self, free_vars: list[str], annotation: str, function: str) -> str:
        """Return the head of the generated function: its signature and the binding of its inputs."""
        names = [text.split(":")[0].split("=")[0].split("#")[0].strip() for text in free_vars]
        names = [name for name in names if name != "self"]
        typed = [text.split("#")[0].strip() for text in free_vars if ":" in text]
        lines = [f"@{NAME}.called", f"def {function}({self._parameters()}){annotation}:"]
        lines += [f"    {text}" for text in typed]
        values = self._values()
        if self.carried:
            lines.append(f"    {GIVEN} = {values}")
            values = GIVEN
        call = f"{NAME}.bind(self, {values})"
        lines.append(f"    {', '.join(names)}, = {call}" if names else f"    {call}")
        return "\n".join(lines)

    def _values(self) -> str:
        if not self._named:
            return f"{NAME}.spread(args, kwargs)"
        return "(" + "".join(f"{slot.name}, " for slot in self.slots) + ")"

    @property
    def _named(self) -> bool:
        """Return whether the generated function can have the model's own parameter names."""
        return all(
            slot.name.isidentifier() and not keyword.iskeyword(slot.name) and slot.name not in _TAKEN
            for slot in self.slots
        )

    def spread(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return one value per parameter, if the generated function cannot name its parameters."""
        signature = self._signature()
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise CallMismatch(f"{error}. The graph is called as {signature}.") from None
        bound.apply_defaults()
        return tuple(bound.arguments[slot.name] for slot in self.slots)

    def _parameters(self) -> str:
        if not self._named:
            return "self, *args, **kwargs"
        any_kind, positional = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY
        own = inspect.Parameter(
            "self", positional if any(slot.kind == positional for slot in self.slots) else any_kind
        )
        others = [
            slot.parameter().replace(default=_MissingSource())
            if slot.has_default and not _has_literal(slot.default)
            else slot.parameter()
            for slot in self.slots
        ]
        return str(inspect.Signature([own, *others]))[1:-1]


_SYMBOLIC: frozenset[type] = frozenset({FakeTensor, Proxy})


class _MissingSource:
    """The source text of `MISSING` in generated code."""

    def __repr__(self) -> str:
        return f"{NAME}.missing"


def _has_literal(value: object) -> bool:
    """Return whether a value has a literal; infinite floats and NaN do not."""
    return isinstance(value, _LITERALS) and (not isinstance(value, float) or math.isfinite(value))


def _other_mode(captured: bool) -> str:
    was, now = ("train", "eval") if captured else ("eval", "train")
    return (
        f"the graph was captured in {was} mode and is called in {now} mode; dropout, batch norm and the like "
        f"are already decided in it. Call .{was}() on it, or capture the model again in {now} mode."
    )


def _restore(*state: Any) -> Convention:
    slots, in_spec, order, out_spec, *rest = state
    return Convention(slots, unpack(in_spec), order, unpack(out_spec), *rest)


class ModelCodeGen(CodeGen):
    """Generates a `forward` with the model's own signature around a graph with flat inputs and results."""

    def __init__(self, convention: Convention) -> None:
        super().__init__()
        self.convention = convention

    def gen_fn_def(
        self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False
    ) -> str:
        function = getattr(self, "_func_name", "forward")
        return self.convention.definition(free_vars, maybe_return_annotation, function)

    def generate_output(
        self,
        output_args: Any,
        *,
        descs: Sequence[str] | None = None,
        repr_fn: Callable[[object], str] | None = None,
    ) -> str:
        given = f", {GIVEN}" if self.convention.carried else ""
        return f"return {NAME}.results({(repr_fn or repr)(output_args)}{given})"

    def process_inputs(self, *args: Any) -> Any:
        return self.convention.inputs(*args)

    def process_outputs(self, outputs: Any) -> Any:
        return self.convention.results(outputs)

    def additional_globals(self) -> list[tuple[str, Any]]:
        return [(NAME, self.convention)]


def convention_of(module: torch.fx.GraphModule) -> Convention | None:
    """Return the calling convention of a captured graph, or None."""
    codegen = module.graph._codegen
    return codegen.convention if isinstance(codegen, ModelCodeGen) else None


def children(spec: TreeSpec) -> list[TreeSpec]:
    """Return the specs directly inside `spec`."""
    getter = getattr(spec, "children", None)
    return list(cast(Any, getter() if callable(getter) else cast(Any, spec).children_specs))


def context_of(spec: TreeSpec) -> Any:
    """Return the context of a spec: the keys of a dict, for example."""
    return cast(Any, spec).context


def pack(spec: TreeSpec) -> Any:
    """Return a tree spec as tuples, which pickle without torch's own spec classes."""
    if spec.type is None:
        return None
    return (spec.type, context_of(spec), tuple(pack(child) for child in children(spec)))


def unpack(packed: Any) -> TreeSpec:
    """Return the tree spec that was packed."""
    if packed is None:
        return leaf_spec()
    kind, context, inner = packed
    return TreeSpec(kind, context, [unpack(child) for child in inner])


def leaf_spec() -> TreeSpec:
    return pytree.tree_structure(0)


def tuple_of(specs: Sequence[TreeSpec]) -> TreeSpec:
    return TreeSpec(tuple, None, list(specs))


def dict_of(keys: Sequence[str], specs: Sequence[TreeSpec]) -> TreeSpec:
    return TreeSpec(dict, list(keys), list(specs))


def describe_spec(names: Sequence[str], spec: TreeSpec) -> str:
    """Return the nesting of the arguments as text: a name for each, a star for each leaf."""
    parts = [f"{name}={_shown(child)}" for name, child in zip(names, children(spec), strict=False)]
    return f"({', '.join(parts)})"


def _shown(spec: TreeSpec) -> str:
    if spec.type is None:
        return "*"
    inner = [_shown(child) for child in children(spec)]
    if spec.type is dict:
        return "{" + ", ".join(f"{k!r}: {v}" for k, v in zip(context_of(spec), inner, strict=True)) + "}"
    if spec.type in (list, tuple):
        opening, closing = ("[", "]") if spec.type is list else ("(", ")")
        return opening + ", ".join(inner) + closing
    return f"{spec.type.__name__}({', '.join(inner)})"


def find_caches(spec: TreeSpec) -> list[tuple[int, int]]:
    """Return the first leaf and the number of leaves of every cache in a spec, in order."""
    caches: list[tuple[int, int]] = []
    stack: list[tuple[TreeSpec, int]] = [(spec, 0)]
    while stack:
        at, start = stack.pop()
        if _is_cache_spec(at):
            caches.append((start, at.num_leaves))
            continue
        for child in children(at):
            stack.append((child, start))
            start += child.num_leaves
    return sorted(caches)


def is_cache(value: object) -> bool:
    base = getattr(sys.modules.get(_CACHES), "Cache", None)
    return base is not None and isinstance(value, base)


def loaded_types(*names: str) -> list[type]:
    """Return the classes of these names in transformers' cache module, if that is loaded, and their subclasses."""
    module = sys.modules.get(_CACHES)
    known = [kind for name in names if isinstance(kind := getattr(module, name, None), type)]
    for kind in known:
        known.extend(sub for sub in kind.__subclasses__() if sub not in known)
    return known


def cache_layer_types() -> tuple[type, ...]:
    return tuple(loaded_types("CacheLayerMixin", "LinearAttentionCacheLayerMixin"))


def _is_cache_spec(spec: TreeSpec) -> bool:
    return isinstance(spec.type, type) and spec.type in loaded_types("Cache")


def _split_at(spec: TreeSpec, starts: frozenset[int]) -> tuple[TreeSpec, dict[int, TreeSpec]]:
    """Return the spec with the caches whose leaves begin at `starts` as one leaf each, and the specs of these caches."""
    leaf = pytree.tree_structure(0)
    inner: dict[int, TreeSpec] = {}

    def walk(at: TreeSpec, first: int) -> TreeSpec:
        if first in starts and _is_cache_spec(at):
            inner[first] = at
            return leaf
        if at.type is None:
            return at
        parts: list[TreeSpec] = []
        for child in children(at):
            parts.append(walk(child, first))
            first += child.num_leaves
        return TreeSpec(at.type, context_of(at), parts)

    return walk(spec, 0), inner


def _update_cache(cache: Any, updated: Any) -> Any:
    """Copy the state of an updated cache into that of the caller, layer by layer, and return the latter."""
    for name in [name for name in vars(cache) if name not in vars(updated)]:
        del vars(cache)[name]
    for name, value in vars(updated).items():
        vars(cache)[name] = _merged(vars(cache).get(name), value)
    return cache


def _merged(old: Any, new: Any) -> Any:
    if type(old) is not type(new):
        return new
    if isinstance(old, list):
        items, others = cast("list[Any]", old), cast("list[Any]", new)
        both = [_merged(a, b) for a, b in zip(items, others, strict=False)]
        items[:] = [*both, *others[len(items) :]]
        return items
    if isinstance(old, dict):
        table, changed = cast("dict[Any, Any]", old), cast("dict[Any, Any]", new)
        merged = {key: _merged(table.get(key), value) for key, value in changed.items()}
        table.clear()
        table.update(merged)
        return table
    if is_cache(old) or isinstance(old, cache_layer_types()):
        return _update_cache(old, new)
    return new
