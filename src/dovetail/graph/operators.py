"""What an operator does, read from its schema and tags."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

from dovetail import torch_compat


@dataclass(frozen=True, slots=True)
class Flag:
    """A condition on literal arguments: holds unless one of `names` is given and false, zero or None."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Traits:
    """What calling a target may do. `parameters` are the names of its arguments in order."""

    name: str
    parameters: tuple[str, ...] = ()
    defaults: Mapping[str, Any] | None = None
    writes: tuple[str, ...] = ()
    writes_if: Flag | None = None
    aliases: tuple[str, ...] | None = ()  # arguments the result may share storage with; None: any of them
    looks: bool = True  # reads the data of its arguments; False for a view, which only names it anew
    reshapes_in_place: bool = False
    random: bool = False
    random_if: Flag | None = None
    world: str = ""
    barrier: bool = False
    opaque: bool = False  # may do anything: writes its arguments, draws, acts on the world
    higher_order: bool = False
    pointwise: bool = False
    several: bool = False  # returns a tuple or list
    gathers: bool = False  # given lists, returns one that holds the same tensors
    composite: bool = (
        False  # made of other operators: without a schema alias its result may still be an argument
    )
    plain: bool = False  # nothing but a value of its own, whatever the arguments

    def argument(self, node: Node, name: str) -> Any:
        """The argument of this name at a call, its default if not given."""
        if name in node.kwargs:
            return node.kwargs[name]
        if name in self.parameters:
            index = self.parameters.index(name)
            if index < len(node.args):
                return node.args[index]
        return (self.defaults or {}).get(name)

    def holds(self, flag: Flag | None, node: Node) -> bool:
        """Whether a flag holds at a call; an argument that is computed may have any value."""
        if flag is None:
            return True
        for name in flag.names:
            if name not in self.parameters and name not in node.kwargs:
                continue
            value = self.argument(node, name)
            if not isinstance(value, Node) and not value:
                # native_dropout(train=None) means train
                if value is None and name == "train":
                    continue
                return False
        return True


_COLLECTIVES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "symm_mem", "_dtensor"}
)
_ASSERTS = frozenset(
    {
        "_assert_async",
        "_assert_scalar",
        "_assert_tensor_metadata",
        "_functional_assert_async",
        "_functional_assert_scalar",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
        "_functional_sym_constrain_range",
        "_functional_sym_constrain_range_for_size",
        "_async_error",
    }
)
# Schemas that do not declare the running statistics they update.
_UPDATES_STATISTICS = frozenset(
    {
        "batch_norm",
        "native_batch_norm",
        "instance_norm",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "_batch_norm_impl_index",
    }
)
_UNDECLARED_VIEWS = frozenset({"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk"})
_UNTAGGED_RANDOM = frozenset({"_no_grad_normal_", "_no_grad_uniform_"})


def unknown(name: str) -> Traits:
    """A call of which nothing is known: it may do anything."""
    return Traits(name=name, world="an unknown Python call", opaque=True, aliases=None)


def of_overload(op: OpOverload) -> Traits:
    """What an operator may do, by its schema, its tags and what it is registered as."""
    told = _of_schema(op)
    # Registered at any time, unlike the schema, so asked each time.
    if not told.world and op.namespace not in ("aten", "prim", "prims") and _is_effectful(op):
        return replace(told, world="registered as effectful", plain=False)
    return told


@functools.cache
def _of_schema(op: OpOverload) -> Traits:
    schema = op._schema
    namespace, _, rest = op.name().partition("::")
    name = rest.partition(".")[0]
    parameters = tuple(a.name for a in schema.arguments)
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    writes = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    returned = {s for r in schema.returns if r.alias_info is not None for s in r.alias_info.before_set}
    # An argument that becomes part of a list of views, as split's does, is annotated with what comes after.
    aliases: tuple[str, ...] | None = tuple(
        a.name
        for a in schema.arguments
        if a.alias_info is not None and (a.alias_info.before_set & returned or "*" in a.alias_info.after_set)
    )
    writes_if = None
    if namespace == "aten" and name in _UPDATES_STATISTICS:
        writes, writes_if = ("running_mean", "running_var"), Flag(("training", "use_input_stats"))
    if name in _UNDECLARED_VIEWS:
        aliases = ("self",)
    if name == "set_" and "source" in parameters:
        aliases = ("self", "source")
    if namespace in _COLLECTIVES and name == "wait_tensor":
        # Before it the memory is not there to be read: what reads it stays behind.
        writes = aliases = parameters[:1]
    tags = set(op.tags)
    composite = op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    if torch_compat.ALIASING_TAG.value in tags and not aliases:
        # Tagged since its result may be its very input; values made by a decomposition may say otherwise.
        aliases = tuple(a.name for a in schema.arguments if "Tensor" in str(a.type))
    random = torch.Tag.nondeterministic_seeded in tags or name in _UNTAGGED_RANDOM
    random_if = Flag(tuple(p for p in ("train", "training", "dropout_p", "dropout") if p in parameters))
    world = _world(namespace, name, has_results=bool(schema.returns), writes=bool(writes))
    several = len(schema.returns) > 1 or any(str(r.type).startswith("List[") for r in schema.returns)
    makes_tensors = any("Tensor" in str(r.type) for r in schema.returns)
    return Traits(
        name=str(op),
        parameters=parameters,
        defaults=defaults,
        writes=writes,
        writes_if=writes_if,
        aliases=aliases if makes_tensors else (),
        # Autograd lets nobody use views that come in a list after a write to their base: they stay where they are.
        looks=not aliases or composite or bool(writes) or several,
        reshapes_in_place=torch.Tag.inplace_view in tags,
        random=random,
        random_if=random_if if random_if.names else None,
        world=world,
        pointwise=torch.Tag.pointwise in tags,
        several=several,
        composite=composite and makes_tensors,
        plain=not (writes or random or world or aliases or (composite and makes_tensors)),
    )


def _world(namespace: str, name: str, *, has_results: bool, writes: bool) -> str:
    if namespace in _COLLECTIVES:
        return "a collective"
    if name in _ASSERTS:
        return "an assertion"
    if name == "_print":
        return "a print"
    if not has_results and not writes:
        return "an effect: it returns nothing"
    return ""


def _is_effectful(op: OpOverload) -> bool:
    effect_of = torch_compat.EFFECT_OF_OPERATOR.value
    return effect_of is not None and effect_of(op) is not None


@functools.cache
def of_packet(packet: OpOverloadPacket) -> Traits:
    """What any overload may do; one that writes `out` only counts where `out` is given."""
    overloads = [getattr(packet, o) for o in packet.overloads()]
    # TorchScript's own overloads for plain numbers and lists are listed too, but no dispatcher knows them.
    each = [of_overload(o) for o in overloads if torch._C._dispatch_has_kernel(o.name())]
    if not each:
        return unknown(str(packet))
    each = [t for t in each if "out" not in t.writes] or each
    first = each[0]
    parameters = max((t.parameters for t in each), key=len)
    aliases = {"out"}
    for t in each:
        aliases.update(t.aliases or ())
    traits = {
        f: any(getattr(t, f) for t in each) for f in ("looks", "reshapes_in_place", "random", "composite")
    }
    writes = tuple(dict.fromkeys(w for t in each for w in t.writes))
    return Traits(
        name=str(packet),
        parameters=parameters,
        defaults={k: v for t in reversed(each) for k, v in (t.defaults or {}).items()},
        writes=(*writes, "out"),
        writes_if=first.writes_if,
        aliases=tuple(sorted(aliases)),
        random_if=first.random_if,
        world=first.world,
        pointwise=all(t.pointwise for t in each),
        several=all(t.several for t in each),
        plain=False,
        **traits,
    )
