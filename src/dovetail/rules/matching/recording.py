"""A quick way to trace: operators are noted as they are called, with none of what a general tracer keeps track of."""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._device import DeviceContext

from dovetail.graph.module import Program, rebuild

Apart = Mapping[OpOverload, Callable[..., Any]]
# They turn data into numbers, or constants into tensors.
_BEYOND = frozenset(
    {
        torch.ops.aten.lift_fresh.default,
        torch.ops.aten.is_nonzero.default,
        torch.ops.aten._local_scalar_dense.default,
        torch.ops.aten.item.default,
    }
)


# They tell a function what precision it works in.
_TELLING: frozenset[Any] = frozenset(
    {
        cast("Any", Tensor.dtype).__get__,
        cast("Any", Tensor.itemsize).__get__,
        cast("Any", Tensor.nbytes).__get__,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.is_signed,
        Tensor.element_size,
        Tensor.type,
        torch.is_floating_point,
        torch.is_complex,
        torch.is_signed,
        torch.result_type,
        torch.can_cast,
    }
)
_CASTS = frozenset({"to", "_to_copy", "type_as", "convert_element_type"})


class NotPlain(Exception):
    """A function does more than call operators on what it is given; it is to be traced the long way."""


class _OnMeta(DeviceContext):
    """Makes tensors on the meta device by default, and notes when a precision is asked for."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))
        self.asked = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.asked = self.asked or func in _TELLING
        return super().__torch_function__(func, types, args, kwargs)


class _Recorder(ProxyTorchDispatchMode):
    """Notes every operator before torch takes it apart, as `make_fx(pre_dispatch=True)` does.

    Only its place among torch's modes is inherited: torch lets no other kind of mode see operators that early.
    """

    def __init__(self, apart: Apart, *, on_meta: bool) -> None:
        super().__init__(cast("Any", None), "real", pre_dispatch=True)
        self.apart, self.on_meta = apart, on_meta
        self.graph = Graph()
        self.made: dict[int, tuple[Node, Any]] = {}
        self.plain = True
        self.casts = False

    def input(self, name: str, value: Tensor) -> None:
        self._note(value, self.graph.placeholder(name))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **named)
        if not isinstance(func, OpOverload):
            self.give_up(f"it calls {func}")
        self.casts = self.casts or func.overloadpacket.__name__ in _CASTS
        decomposed = self.apart.get(func)
        if decomposed is not None:
            with self:
                return decomposed(*args, **named)
        if func in _BEYOND or func._schema.is_mutable:
            self.give_up(f"it calls {func}")
        inputs = self._nodes(args)
        keywords = {name: self._nodes(value) for name, value in named.items()}
        # On the meta device torch's own kernels will do, and they are much quicker than those in Python.
        with no_python_dispatcher() if self.on_meta else contextlib.nullcontext():
            out = func(*args, **named)
        node = self.graph.create_node("call_function", func, inputs, keywords)
        if isinstance(out, Tensor):
            self._note(out, node)
        else:
            self._note_parts(out, node)
        return out

    def _note(self, value: Tensor, node: Node) -> None:
        # A tensor just made must have one owner, or torch hands on a copy that nobody knows.
        node.meta["val"] = value if node.all_input_nodes or node.op == "placeholder" else value.detach()
        self.made[id(value)] = (node, weakref.ref(value))

    def _note_parts(self, out: Any, node: Node) -> None:
        if not isinstance(out, (tuple, list)) or not all(
            isinstance(part, (Tensor, int, float)) for part in cast("list[Any]", out)
        ):
            self.give_up(f"{node.target} returns a {type(out).__name__}")
        node.meta["val"] = out
        for i, part in enumerate(cast("list[Any]", out)):
            if isinstance(part, Tensor):
                self._note(part, self.graph.create_node("call_function", operator.getitem, (node, i)))

    def _nodes(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node(value)
        if isinstance(value, (tuple, list)):
            items = [self._nodes(item) for item in cast("list[Any]", value)]
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, (torch.SymFloat, torch.SymBool)):
            self.give_up("it computes with numbers that are not known")
        return value

    def node(self, value: Any) -> Node:
        """The node that made a tensor."""
        node, made = self.made.get(id(value), (None, None))
        # A tensor that was freed leaves its id to another.
        if node is None or made is None or made() is not value:
            self.give_up("it uses a tensor that it was not given")
        return cast("Node", node)

    def give_up(self, why: str) -> None:
        # The function may swallow the exception; what it did afterwards is worth nothing.
        self.plain = False
        raise NotPlain(why)


def record(function: Callable[..., Any], values: Sequence[Any], apart: Apart) -> tuple[Program, bool]:
    """The graph of a function of tensors without data, and whether it would be the same in any other precision.

    Each node has its value; sizes that are symbols stand among the arguments as they are. Values are all fake or all on the meta device. The operators in `apart` are taken apart
    as it says. `NotPlain` is raised if the function does more than call operators.
    """
    on_meta = all(type(value) is Tensor and value.is_meta for value in values)
    if not on_meta and not all(isinstance(value, FakeTensor) for value in values):
        raise NotPlain("an operand is no plain tensor")
    recorder = _Recorder(apart, on_meta=on_meta)
    for i, value in enumerate(values):
        recorder.input(f"arg{i}_1", value)
    # What the function makes is to be of the same kind as what it is given.
    world = _OnMeta() if on_meta else values[0].fake_mode
    with world, enable_python_dispatcher(), recorder:
        results = function(*values)
    if not recorder.plain:
        raise NotPlain("it swallowed an exception")
    recorder.graph.output(tuple(recorder.node(result) for result in results))
    program = rebuild(nn.Module(), recorder.graph)
    return program, isinstance(world, _OnMeta) and not world.asked and not recorder.casts
