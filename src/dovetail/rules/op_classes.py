"""What kind of work each operation does, as far as fusing is concerned."""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node

from dovetail import torch_compat
from dovetail.ir.effects import PURE, Effects
from dovetail.ir.graph_module import Body, attribute
from dovetail.ir.nodes import is_projection
from dovetail.rules.rule import RuleContext


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Made of operators whose flops torch counts, or fused forms of them.
ANCHORS = _names(
    """
    linear matmul mm bmm addmm addbmm baddbmm addmv mv dot vdot inner tensordot einsum bilinear chain_matmul
    linalg_multi_dot _int_mm _grouped_mm _scaled_grouped_mm _addmm_activation conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d conv_tbc scaled_dot_product_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math
    _scaled_dot_product_fused_attention_overrideable
    """
)

# One result for many elements, or every element from all of its row: norms, softmax, pooling, losses.
REDUCTIONS = _names(
    """
    sum nansum mean nanmean prod amax amin aminmax max min all any argmax argmin std var std_mean var_mean logsumexp
    count_nonzero norm linalg_vector_norm frobenius_norm nuclear_norm trace
    softmax _softmax _safe_softmax log_softmax _log_softmax softmin layer_norm native_layer_norm rms_norm
    _fused_rms_norm group_norm native_group_norm instance_norm normalize local_response_norm cosine_similarity
    max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d lp_pool1d lp_pool2d
    mse_loss l1_loss smooth_l1_loss huber_loss nll_loss nll_loss_forward nll_loss2d_forward cross_entropy_loss
    binary_cross_entropy binary_cross_entropy_with_logits kl_div
    """
)
BROADCASTS = _names("expand expand_as broadcast_to broadcast_in_dim outer")

# Every element of the result is one element of an operand.
INJECTIVES = _names(
    """
    cat stack hstack vstack dstack column_stack concat getitem index index_select gather take take_along_dim embedding
    _unsafe_index _unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk chunk flip fliplr flipud roll rot90 repeat
    tile repeat_interleave pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d pixel_shuffle pixel_unshuffle channel_shuffle upsample_nearest1d
    upsample_nearest2d upsample_nearest3d triu tril diag diag_embed im2col glu reshape reshape_as view_as flatten unflatten ravel
    movedim moveaxis swapaxes swapdims squeeze unsqueeze transpose permute view narrow select slice split unbind
    numpy_T mT mH select_scatter slice_scatter arange linspace one_hot
    """
)
CASTS = _names(
    "to _to_copy type type_as float double half bfloat16 int long short char byte bool cpu cuda "
    "convert_element_type"
)

# Pointwise without the tag; inference-time batch norm is one too, and so is a dropout.
ELEMENTWISES = CASTS | _names(
    """
    detach alias clone contiguous identity lift lift_fresh lift_fresh_copy copy fill floor_divide prelu _prelu_kernel
    hardswish leaky_relu log_sigmoid log_sigmoid_forward softsign tanhshrink complex polar real imag conj _conj
    dropout native_dropout alpha_dropout bernoulli batch_norm native_batch_norm _native_batch_norm_legit_no_training
    full_like zeros_like ones_like empty_like new_zeros new_ones new_full new_empty scalar_tensor tensor
    truediv eq ne lt le gt ge pos neg abs not_ pow arccos arccosh arcsin arcsinh arctan arctan2 arctanh fix
    """
)

# Draws for each element by itself.
RANDOM_ELEMENTWISE = _names("dropout native_dropout alpha_dropout bernoulli")
_OURS = ("aten", "prims")

# Python's words for what ATen calls otherwise.
_RENAMED = {
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "and_": "bitwise_and",
    "or_": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "inv": "bitwise_not",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "multiply": "mul",
    "subtract": "sub",
    "negative": "neg",
    "absolute": "abs",
    "concat": "cat",
    "concatenate": "cat",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
    "_threshold": "threshold",
    "logsigmoid": "log_sigmoid",
    "cross_entropy": "cross_entropy_loss",
}
_MODULES = {
    "LeakyReLU": "leaky_relu",
    "LogSigmoid": "log_sigmoid",
    "RMSNorm": "rms_norm",
    "Dropout1d": "feature_dropout",
    "Dropout2d": "feature_dropout",
    "Dropout3d": "feature_dropout",
    "Softmax2d": "softmax",
    "CrossEntropyLoss": "cross_entropy_loss",
    "NLLLoss": "nll_loss",
}


def operation_name(node: Node, root: nn.Module) -> str:
    """The ATen name of what a node calls, "" for a sub-graph, a module of the user's or a higher-order operator.

    An operator of another library is called by its qualified name, `mylib::op`.
    """
    target: Any = node.target
    if node.op == "call_function":
        return function_name(target)
    if node.op == "call_method":
        return _plain(target)
    if node.op == "call_module":
        module = attribute(root, cast("str", target))
        return module_name(module) if isinstance(module, nn.Module) else ""
    return ""


def function_name(target: Any) -> str:
    """The same for a call target alone."""
    if isinstance(target, OpOverload):
        return _plain(target.overloadpacket.__name__) if target.namespace in _OURS else target.name()
    if isinstance(target, OpOverloadPacket):
        name = target._qualified_op_name
        return _plain(target.__name__) if name.partition("::")[0] in _OURS else name
    if isinstance(target, HigherOrderOperator):
        return ""
    module = getattr(target, "__module__", None) or ""
    known = module.partition(".")[0] in ("torch", "operator", "_operator", "math", "builtins", "")
    return _plain(getattr(target, "__name__", "")) if known else ""


def module_name(module: nn.Module) -> str:
    """What a leaf module of torch.nn computes, "" for any other module."""
    kind = type(module)
    if isinstance(module, GraphModule) or not kind.__module__.startswith("torch.nn.modules."):
        return ""
    return _of_class(kind.__name__)


@functools.cache
def _of_class(name: str) -> str:
    if name in _MODULES:
        return _MODULES[name]
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    # BatchNorm2d is batch_norm, while Conv2d is conv2d.
    for spelled in (name.lower(), snake, re.sub(r"\d+d$", "", snake)):
        if packet(spelled) is not None:
            return spelled
    return snake


@functools.cache
def _plain(name: str) -> str:
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        if packet(name) is None and name.startswith("r"):
            name = name[1:]
    return _RENAMED.get(name, name)


def plain_name(name: str) -> str:
    """What ATen calls an operation that Python or torch has another name for."""
    return _plain(name)


@functools.cache
def operators_of(namespace: str) -> frozenset[str]:
    """The registered operators of a namespace, with and without their overloads; empty where it has none."""
    names: set[str] = set()
    for qualified in torch._C._dispatch_get_all_op_names():
        space, _, rest = qualified.partition("::")
        if space == namespace:
            base, _, overload = rest.partition(".")
            names.update((base, f"{base}.{overload or 'default'}"))
    return frozenset(names)


@functools.cache
def known_names() -> frozenset[str]:
    """Every plain name that an operation can have: of ATen, and of functions, methods and modules of torch."""
    spaces: tuple[Any, ...] = (torch, nn.functional, torch.Tensor, operator, math)
    names = {name for space in spaces for name in dir(space)}
    modules = {_of_class(name) for name in dir(nn) if name[0].isupper()}
    return frozenset({*names, *operators_of("aten"), *operators_of("prims"), *modules, *_MODULES.values()})


def packet(name: str) -> OpOverloadPacket | None:
    """ATen's operator of a name."""
    found = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    return found if isinstance(found, OpOverloadPacket) else None


class OpClass(IntEnum):
    """Kinds of work, from what fuses with most to what fuses with nothing.

    Normalisations and poolings count as reductions: producers may fuse in, nothing fuses behind them. An anchor is a
    product, a convolution or an attention: elementwise operations may follow it, and nothing fuses in front of it.
    """

    ELEMENTWISE = 0
    BROADCAST = 1
    INJECTIVE = 2
    REDUCTION = 3
    ANCHOR = 4
    OPAQUE = 5

    @property
    def words(self) -> str:
        """The class with its article: "an anchor"."""
        name = self.name.lower()
        if self in (OpClass.REDUCTION, OpClass.ANCHOR):
            return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
        return name


def classify(context: RuleContext, closed: Sequence[bool] | None = None) -> list[OpClass]:
    """The class of each position. What is no operation is opaque; a part of a tuple is what made the tuple.

    Effects other than drawing at random elementwise make an operation opaque. Where values are not known, shapes
    are taken to agree. With `closed`, the bodies of regions that are are not looked into: those are opaque.
    """
    reader = context.analysis(_classify)
    if not reader.calls:
        return reader.found
    found = list(reader.found)
    for i, body in reader.calls.items():
        if closed is None or not closed[i]:
            found[i] = class_of_body(body)
            for user in context.nodes[i].users:
                if is_projection(user):
                    found[context.index.position[user]] = found[i]
    return found


def _classify(context: RuleContext) -> _Classes:
    effects = context.index.dependencies.effects
    reader = _Classes(context.gm, context.index.position)
    for i, node in enumerate(context.nodes):
        reader.add(node, effects.get(i, PURE))
    return reader


class _Classes:
    """Classes of the nodes of one graph, in its order. What depends on the target alone is asked once.

    `calls` has the sub-graphs that are called, by position; they count as opaque here.
    """

    def __init__(self, root: nn.Module, position: Mapping[Node, int]) -> None:
        self.root, self.position = root, position
        self.found: list[OpClass] = []
        self.calls: dict[int, GraphModule] = {}
        self._targets: dict[tuple[str, Any], tuple[OpClass, str]] = {}
        self._sizes: dict[int, tuple[Any, ...] | None] = {}

    def add(self, node: Node, told: Effects) -> None:
        self.found.append(self._of(node, told))

    def _of(self, node: Node, told: Effects) -> OpClass:
        if node.op in ("placeholder", "get_attr", "output"):
            return OpClass.OPAQUE
        if told is not PURE and (told.writes or told.state_written or told.host_effect or told.barrier):
            return OpClass.OPAQUE
        if node.target is operator.getitem and is_projection(node):
            return self.found[self.position[cast("Node", node.args[0])]]
        if node.op == "call_module":
            called = attribute(self.root, cast("str", node.target))
            if isinstance(called, GraphModule):
                self.calls[len(self.found)] = called
                return OpClass.OPAQUE
        key = (node.op, node.target)
        known = self._targets.get(key)
        if known is None:
            known = self._targets[key] = self._of_target(node)
        found, name = known
        if found is OpClass.OPAQUE or (told.random and name not in RANDOM_ELEMENTWISE):
            return OpClass.OPAQUE
        return found if found is OpClass.ANCHOR else self._at(node, found, name)

    def _of_target(self, node: Node) -> tuple[OpClass, str]:
        """The class by what is called, and the name of that."""
        name = operation_name(node, self.root)
        if isinstance(node.target, OpOverload):
            return _of_overload(node.target), name
        return (_of_name(name) if name else OpClass.OPAQUE), name

    def _at(self, node: Node, found: OpClass, name: str) -> OpClass:
        """The class at one call, by its arguments and the shapes."""
        value = node.meta.get("val")
        if value is not None and not isinstance(value, (torch.Tensor, tuple, list)):
            return OpClass.OPAQUE  # a size or a number: there is nothing to fuse
        if found is OpClass.REDUCTION and name in ("max", "min") and _of_two(node):
            found = OpClass.ELEMENTWISE
        if name in ("getitem", "index", "_unsafe_index") and _depends_on_data(node):
            return OpClass.OPAQUE
        if name in CASTS and _moves(node):
            return OpClass.OPAQUE
        if found is not OpClass.ELEMENTWISE:
            return found
        own = self._known_sizes(node)
        for operand in node.all_input_nodes if own is not None else ():
            theirs = self._known_sizes(operand)
            if theirs is not None and theirs != own:
                return OpClass.BROADCAST
        return found

    def _known_sizes(self, node: Node) -> tuple[Any, ...] | None:
        value = node.meta.get("val")
        key = id(value)
        if key not in self._sizes:
            self._sizes[key] = sizes(value)
        return self._sizes[key]


def sizes(value: Any) -> tuple[Any, ...] | None:
    """The sizes of a tensor, or of the first of several, to be compared without settling any symbol."""
    if isinstance(value, (tuple, list)):
        several = cast("list[Any]", value)
        value = next((v for v in several if isinstance(v, torch.Tensor)), None)
    if not isinstance(value, torch.Tensor):
        return None
    shape = cast("Iterable[Any]", value.shape)
    return tuple([s if type(s) is int else s.node.expr for s in shape])


def _of_two(node: Node) -> bool:
    """Whether `max` or `min` is of two tensors, which is elementwise; an overload's tags tell by themselves."""
    overloaded = isinstance(node.target, OpOverload)
    return not overloaded and len(node.args) > 1 and isinstance(node.args[1], Node)


def _depends_on_data(node: Node) -> bool:
    """Whether an index takes a size out of a shape, or picks as many elements as a mask says."""
    source = node.args[0] if node.args else None
    if isinstance(source, Node) and (source.target is getattr or source.target in ("size", "stride")):
        return True
    values = [n.meta.get("val") for n in node.all_input_nodes[1:]]
    return any(isinstance(v, torch.Tensor) and v.dtype in (torch.bool, torch.uint8) for v in values)


def _moves(node: Node) -> bool:
    """Whether a cast moves to another device."""
    value = node.meta.get("val")
    operands = [n.meta.get("val") for n in node.all_input_nodes[:1]]
    both = [v for v in (value, *operands) if isinstance(v, torch.Tensor)]
    return len({v.device for v in both}) > 1


@functools.cache
def _of_overload(op: OpOverload) -> OpClass:
    namespace, _, name = op.name().partition("::")
    name = name.partition(".")[0]
    if torch.Tag.pointwise in op.tags:
        return OpClass.ELEMENTWISE
    if torch_compat.REDUCTION_TAG.value in op.tags:
        return OpClass.REDUCTION
    parameters = [a.name for a in op._schema.arguments]
    if name in ("max", "min") and "other" in parameters:
        return OpClass.ELEMENTWISE
    if torch.Tag.dynamic_output_shape in op.tags and name not in ("index", "_unsafe_index"):
        return OpClass.OPAQUE
    return _of_name(name) if namespace in ("aten", "prims") else _of_schema([op])


@functools.cache
def _of_name(name: str) -> OpClass:
    """The class of an operator by its ATen name, from the tables and the tags and schemas of its overloads."""
    for names, known in (
        (ANCHORS, OpClass.ANCHOR),
        (REDUCTIONS, OpClass.REDUCTION),
        (BROADCASTS, OpClass.BROADCAST),
        (INJECTIVES, OpClass.INJECTIVE),
        (ELEMENTWISES, OpClass.ELEMENTWISE),
    ):
        if name in names:
            return known
    found = packet(name)
    if found is None:
        return OpClass.OPAQUE
    if found in _counted():
        return OpClass.ANCHOR
    overloads = [getattr(found, o) for o in found.overloads()]
    # TorchScript's own overloads for plain numbers and lists are listed too, but no dispatcher knows them.
    real = [o for o in overloads if torch._C._dispatch_has_kernel(o.name()) and not o._schema.is_mutable]
    # Not every overload of a pointwise operator is tagged.
    if any(torch.Tag.pointwise in o.tags for o in real):
        return OpClass.ELEMENTWISE
    return _of_schema(real)


@functools.cache
def _counted() -> frozenset[OpOverloadPacket]:
    """The operators whose flops torch counts: products, convolutions and attentions."""
    from torch.utils.flop_counter import flop_registry

    return frozenset(op for op in flop_registry if isinstance(op, OpOverloadPacket))


def _of_schema(overloads: Iterable[OpOverload]) -> OpClass:
    """Views are injective, and what makes a tensor of no tensor is elementwise."""
    schemas = [op._schema for op in overloads]
    if not schemas:
        return OpClass.OPAQUE
    if any(r.alias_info is not None for s in schemas for r in s.returns):
        return OpClass.INJECTIVE
    made = all(len(s.returns) == 1 and str(s.returns[0].type) == "Tensor" for s in schemas)
    read = any("Tensor" in str(a.type) for s in schemas for a in s.arguments)
    return OpClass.ELEMENTWISE if made and not read else OpClass.OPAQUE


_BODIES: WeakKeyDictionary[GraphModule, OpClass] = WeakKeyDictionary()


def class_of_body(body: GraphModule) -> OpClass:
    """The class of a sub-graph called as one: of what it computes, and of how its results hang on its anchor.

    A sub-graph with two anchors, with an anchor and a reduction, or with other than elementwise work behind its
    anchor is opaque. Remembered for bodies of regions, which never change.
    """
    known = _BODIES.get(body)
    if known is None:
        known = _of_graph(RuleContext(body))
        if isinstance(body, Body):
            _BODIES[body] = known
    return known


def _of_graph(context: RuleContext) -> OpClass:
    classes = classify(context)
    inside = [i for i, n in enumerate(context.nodes) if n.op not in ("placeholder", "get_attr", "output")]
    worst = max((classes[i] for i in inside), default=OpClass.OPAQUE)
    if worst is not OpClass.ANCHOR:
        return worst
    anchors = [i for i in inside if classes[i] is OpClass.ANCHOR and not is_projection(context.nodes[i])]
    if len(anchors) > 1 or any(classes[i] is OpClass.REDUCTION for i in inside):
        return OpClass.OPAQUE
    behind = {anchors[0]}
    for i in inside:
        if not behind.isdisjoint(context.index.data[i]):
            if classes[i] > OpClass.BROADCAST and not is_projection(context.nodes[i]):
                return OpClass.OPAQUE
            behind.add(i)
    returned = context.index.data[len(context.nodes) - 1]
    return OpClass.ANCHOR if all(i in behind for i in returned) else OpClass.OPAQUE
