"""Fusion classes of operators (elementwise, broadcast, injective, reduction, anchor, opaque), as in TVM and Relay.

A class is derived from the ATen name, the tags and the schema of what is called, and refined by arguments and shapes.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def _renames(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


# Decompose into operators whose flops torch counts, or are fused forms of them.
ANCHORS = _names(
    """
    linear matmul mm bmm addmm addbmm baddbmm addmv mv dot vdot inner tensordot einsum bilinear chain_matmul
    linalg_multi_dot _int_mm _grouped_mm _scaled_grouped_mm _addmm_activation conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d conv_tbc scaled_dot_product_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math
    _scaled_dot_product_fused_attention_overrideable
    """
)

# One result of many elements, or each element from its whole row: norms, softmax, pooling, losses.
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

# Pointwise without the tag; batch norm (at inference time) and dropout count too.
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
_ATEN_NAMESPACES = ("aten", "prims")

# Names in Python and torch that differ from ATen's.
_ATEN_NAMES = _renames(
    """
    truediv=div true_divide=div divide=div floordiv=floor_divide mod=remainder and_=bitwise_and
    or_=bitwise_or xor=bitwise_xor invert=bitwise_not inv=bitwise_not lshift=bitwise_left_shift
    rshift=bitwise_right_shift multiply=mul subtract=sub negative=neg absolute=abs concat=cat
    concatenate=cat greater=gt greater_equal=ge less=lt less_equal=le not_equal=ne _threshold=threshold
    logsigmoid=log_sigmoid cross_entropy=cross_entropy_loss
    """
)
_MODULE_OPS = _renames(
    """
    LeakyReLU=leaky_relu LogSigmoid=log_sigmoid RMSNorm=rms_norm Dropout1d=feature_dropout
    Dropout2d=feature_dropout Dropout3d=feature_dropout Softmax2d=softmax
    CrossEntropyLoss=cross_entropy_loss NLLLoss=nll_loss
    """
)


def operation_name(node: Node, root: nn.Module) -> str:
    """Return the ATen name of what a node calls, "" for a subgraph, a user's module or a higher-order operator.

    An operator of another library has its qualified name, `mylib::op`.
    """
    target: Any = node.target
    if node.op == "call_function":
        return function_name(target)
    if node.op == "call_method":
        return aten_name(target)
    if node.op == "call_module":
        module = attribute(root, cast("str", target))
        return module_name(module) if isinstance(module, nn.Module) else ""
    return ""


def function_name(target: Any) -> str:
    """Return the ATen name of a function or operator, "" where it has none."""
    if isinstance(target, OpOverload):
        return (
            aten_name(target.overloadpacket.__name__)
            if target.namespace in _ATEN_NAMESPACES
            else target.name()
        )
    if isinstance(target, OpOverloadPacket):
        name = target._qualified_op_name
        return aten_name(target.__name__) if name.partition("::")[0] in _ATEN_NAMESPACES else name
    if isinstance(target, HigherOrderOperator):
        return ""
    module = getattr(target, "__module__", None) or ""
    known = module.partition(".")[0] in ("torch", "operator", "_operator", "math", "builtins", "")
    return aten_name(getattr(target, "__name__", "")) if known else ""


def module_name(module: nn.Module) -> str:
    """Return the ATen name of what a leaf module of torch.nn computes, "" for any other module."""
    kind = type(module)
    if isinstance(module, GraphModule) or not kind.__module__.startswith("torch.nn.modules."):
        return ""
    return _module_class_op(kind.__name__)


@functools.cache
def _module_class_op(name: str) -> str:
    if name in _MODULE_OPS:
        return _MODULE_OPS[name]
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    # BatchNorm2d is batch_norm, while Conv2d is conv2d.
    for candidate in (name.lower(), snake, re.sub(r"\d+d$", "", snake)):
        if aten_packet(candidate) is not None:
            return candidate
    return snake


@functools.cache
def aten_name(name: str) -> str:
    """Return what ATen calls an operation of Python or torch: `div` for `__truediv__`."""
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        if aten_packet(name) is None and name.startswith("r"):
            name = name[1:]
    return _ATEN_NAMES.get(name, name)


@functools.cache
def registered_ops(namespace: str) -> frozenset[str]:
    """Return the registered operators of a namespace, with and without their overloads."""
    names: set[str] = set()
    for qualified in torch._C._dispatch_get_all_op_names():
        space, _, rest = qualified.partition("::")
        if space == namespace:
            base, _, overload = rest.partition(".")
            names.update((base, f"{base}.{overload or 'default'}"))
    return frozenset(names)


@functools.cache
def all_op_names() -> frozenset[str]:
    """Return every unqualified name of an operation: of ATen, and of torch's functions, methods and modules."""
    spaces: tuple[Any, ...] = (torch, nn.functional, torch.Tensor, operator, math)
    names = {name for space in spaces for name in dir(space)}
    modules = {_module_class_op(name) for name in dir(nn) if name[0].isupper()}
    return frozenset(
        {*names, *registered_ops("aten"), *registered_ops("prims"), *modules, *_MODULE_OPS.values()}
    )


def aten_packet(name: str) -> OpOverloadPacket | None:
    """Return ATen's operator of a name, None if it has none."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    return packet if isinstance(packet, OpOverloadPacket) else None


class OpClass(IntEnum):
    """Fusion classes, from what fuses with most to what fuses with nothing.

    Normalizations and poolings count as reductions: producers fuse into them, consumers do not. An anchor is a matrix
    product, a convolution or an attention: elementwise operations may follow it, and no producer fuses into it.
    """

    ELEMENTWISE = 0
    BROADCAST = 1
    INJECTIVE = 2
    REDUCTION = 3
    ANCHOR = 4
    OPAQUE = 5

    @property
    def description(self) -> str:
        """The class for messages, in words that need no glossary."""
        return _DESCRIPTIONS[self]


_DESCRIPTIONS = {
    OpClass.ELEMENTWISE: "elementwise",
    OpClass.BROADCAST: "a broadcast",
    OpClass.INJECTIVE: "a rearrangement of elements",
    OpClass.REDUCTION: "a reduction",
    OpClass.ANCHOR: "a matrix product, convolution or attention",
    OpClass.OPAQUE: "of no kind that is fused",
}


def describe_class(context: RuleContext, position: int, op_class: OpClass) -> str:
    """Return the class of an operation for messages: an anchor by what it computes, a region that is opaque by its kind."""
    node, call = context.nodes[position], context.calls.get(position)
    if call is not None and op_class is OpClass.OPAQUE:
        return f"a region of kind '{call.identity.kind}' already"
    name = operation_name(node, context.gm) if op_class is OpClass.ANCHOR and call is None else ""
    if not name:
        return op_class.description
    if "conv" in name:
        return "a convolution"
    return "an attention" if "attention" in name else "a matrix product"


def classify(context: RuleContext, excluded: Sequence[bool] | None = None) -> list[OpClass]:
    """Return the class of each position. Inputs and outputs are opaque; a projection has the class of its tuple.

    Effects other than elementwise random draws make an operation opaque. Unknown shapes are assumed to agree. A region
    has the class of its body, and is opaque where `excluded`.
    """
    classifier = context.analysis(_classify)
    if not classifier.calls:
        return classifier.classes
    classes = list(classifier.classes)
    for i, body in classifier.calls.items():
        if excluded is None or not excluded[i]:
            classes[i] = classify_body(body)
            for user in context.nodes[i].users:
                if is_projection(user):
                    classes[context.index.position[user]] = classes[i]
    return classes


def _classify(context: RuleContext) -> _Classifier:
    effects = context.index.dependencies.effects
    classifier = _Classifier(context.gm, context.index.position)
    for i, node in enumerate(context.nodes):
        classifier.classes.append(classifier.classify(node, effects.get(i, PURE)))
    return classifier


class _Classifier:
    """The classes of one graph's nodes, in its order; what depends on the target alone is cached.

    `calls` are the subgraphs called, by position; they count as opaque here.
    """

    def __init__(self, root: nn.Module, position: Mapping[Node, int]) -> None:
        self.root, self.position = root, position
        self.classes: list[OpClass] = []
        self.calls: dict[int, GraphModule] = {}
        self._targets: dict[tuple[str, Any], tuple[OpClass, str]] = {}
        self._sizes: dict[int, tuple[Any, ...] | None] = {}

    def classify(self, node: Node, effects: Effects) -> OpClass:
        """Return the class of the node that follows those in `classes`."""
        if node.op in ("placeholder", "get_attr", "output"):
            return OpClass.OPAQUE
        if effects is not PURE and (
            effects.writes or effects.state_written or effects.host_effect or effects.barrier
        ):
            return OpClass.OPAQUE
        if node.target is operator.getitem and is_projection(node):
            return self.classes[self.position[cast("Node", node.args[0])]]
        if node.op == "call_module":
            called = attribute(self.root, cast("str", node.target))
            if isinstance(called, GraphModule):
                self.calls[len(self.classes)] = called
                return OpClass.OPAQUE
        key = (node.op, node.target)
        if key not in self._targets:
            self._targets[key] = self._classify_target(node)
        op_class, name = self._targets[key]
        if op_class is OpClass.OPAQUE or (effects.random and name not in RANDOM_ELEMENTWISE):
            return OpClass.OPAQUE
        return op_class if op_class is OpClass.ANCHOR else self._refine(node, op_class, name)

    def _classify_target(self, node: Node) -> tuple[OpClass, str]:
        """Return the class of what is called, and its ATen name."""
        name = operation_name(node, self.root)
        if isinstance(node.target, OpOverload):
            return _classify_overload(node.target), name
        return (_classify_name(name) if name else OpClass.OPAQUE), name

    def _refine(self, node: Node, op_class: OpClass, name: str) -> OpClass:
        """Return the class of one call, given that of its target, by its arguments and shapes."""
        value = node.meta.get("val")
        if value is not None and not isinstance(value, (torch.Tensor, tuple, list)):
            return OpClass.OPAQUE  # a size or a number: there is nothing to fuse
        if op_class is OpClass.REDUCTION and name in ("max", "min") and _is_binary(node):
            op_class = OpClass.ELEMENTWISE
        if name in ("getitem", "index", "_unsafe_index") and _depends_on_data(node):
            return OpClass.OPAQUE
        if name in CASTS and _changes_device(node):
            return OpClass.OPAQUE
        if op_class is not OpClass.ELEMENTWISE:
            return op_class
        own = self.known_sizes(node)
        for operand in node.all_input_nodes if own is not None else ():
            theirs = self.known_sizes(operand)
            if theirs is not None and theirs != own:
                return OpClass.BROADCAST
        return op_class

    def known_sizes(self, node: Node) -> tuple[Any, ...] | None:
        """Return the sizes of a node's value, None if unknown."""
        value = node.meta.get("val")
        key = id(value)
        if key not in self._sizes:
            self._sizes[key] = _sizes(value)
        return self._sizes[key]


def known_sizes(context: RuleContext) -> Callable[[Node], tuple[Any, ...] | None]:
    """Return a cached function of a graph's nodes: the sizes of a value, in a form that compares without guards."""
    return context.analysis(_classify).known_sizes


def _sizes(value: Any) -> tuple[Any, ...] | None:
    """Return the sizes of a tensor, or of the first in a tuple, in a form that compares without adding guards."""
    if isinstance(value, (tuple, list)):
        value = next((v for v in cast("list[Any]", value) if isinstance(v, torch.Tensor)), None)
    if not isinstance(value, torch.Tensor):
        return None
    shape = cast("Iterable[Any]", value.shape)
    return tuple([s if type(s) is int else s.node.expr for s in shape])


def _is_binary(node: Node) -> bool:
    """Whether `max` or `min` compares two tensors, which is elementwise; overloads are classified by their tags."""
    overloaded = isinstance(node.target, OpOverload)
    return not overloaded and len(node.args) > 1 and isinstance(node.args[1], Node)


def _depends_on_data(node: Node) -> bool:
    """Whether an index reads a size from a shape, or selects by a mask, whose result has a data-dependent shape."""
    source = node.args[0] if node.args else None
    if isinstance(source, Node) and (source.target is getattr or source.target in ("size", "stride")):
        return True
    values = [n.meta.get("val") for n in node.all_input_nodes[1:]]
    return any(isinstance(v, torch.Tensor) and v.dtype in (torch.bool, torch.uint8) for v in values)


def _changes_device(node: Node) -> bool:
    """Whether a cast moves to another device."""
    value = node.meta.get("val")
    operands = [n.meta.get("val") for n in node.all_input_nodes[:1]]
    both = [v for v in (value, *operands) if isinstance(v, torch.Tensor)]
    return len({v.device for v in both}) > 1


@functools.cache
def _classify_overload(op: OpOverload) -> OpClass:
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
    return _classify_name(name) if namespace in ("aten", "prims") else _classify_schema([op])


@functools.cache
def _classify_name(name: str) -> OpClass:
    """Return the class of an ATen name, from the tables and the tags and schemas of its overloads."""
    for names, known in (
        (ANCHORS, OpClass.ANCHOR),
        (REDUCTIONS, OpClass.REDUCTION),
        (BROADCASTS, OpClass.BROADCAST),
        (INJECTIVES, OpClass.INJECTIVE),
        (ELEMENTWISES, OpClass.ELEMENTWISE),
    ):
        if name in names:
            return known
    packet = aten_packet(name)
    if packet is None:
        return OpClass.OPAQUE
    if packet in _flop_counted():
        return OpClass.ANCHOR
    overloads = [getattr(packet, o) for o in packet.overloads()]
    # TorchScript's overloads for Python numbers and lists have no kernel in the dispatcher.
    real = [o for o in overloads if torch._C._dispatch_has_kernel(o.name()) and not o._schema.is_mutable]
    # Not every overload of a pointwise operator is tagged.
    if any(torch.Tag.pointwise in o.tags for o in real):
        return OpClass.ELEMENTWISE
    return _classify_schema(real)


@functools.cache
def _flop_counted() -> frozenset[OpOverloadPacket]:
    """The operators whose flops torch counts: products, convolutions and attentions."""
    from torch.utils.flop_counter import flop_registry

    return frozenset(op for op in flop_registry if isinstance(op, OpOverloadPacket))


def _classify_schema(overloads: Iterable[OpOverload]) -> OpClass:
    """Return the class by schema: views are injective, factories elementwise, all else opaque."""
    schemas = [op._schema for op in overloads]
    if not schemas:
        return OpClass.OPAQUE
    if any(r.alias_info is not None for s in schemas for r in s.returns):
        return OpClass.INJECTIVE
    returns_tensor = all(len(s.returns) == 1 and str(s.returns[0].type) == "Tensor" for s in schemas)
    reads_tensor = any("Tensor" in str(a.type) for s in schemas for a in s.arguments)
    return OpClass.ELEMENTWISE if returns_tensor and not reads_tensor else OpClass.OPAQUE


_BODY_CLASSES: WeakKeyDictionary[GraphModule, OpClass] = WeakKeyDictionary()


def classify_body(body: GraphModule) -> OpClass:
    """Return the class of a subgraph called as one operation: the highest class in it.

    A subgraph with two anchors, with an anchor and a reduction, with other than elementwise work after its anchor, or
    with a result that does not depend on it, is opaque. Cached for bodies of regions, which never change.
    """
    known = _BODY_CLASSES.get(body)
    if known is None:
        known = _classify_graph(RuleContext(body))
        if isinstance(body, Body):
            _BODY_CLASSES[body] = known
    return known


def _classify_graph(context: RuleContext) -> OpClass:
    classes = classify(context)
    inside = [i for i, n in enumerate(context.nodes) if n.op not in ("placeholder", "get_attr", "output")]
    highest = max((classes[i] for i in inside), default=OpClass.OPAQUE)
    if highest is not OpClass.ANCHOR:
        return highest
    anchors = [i for i in inside if classes[i] is OpClass.ANCHOR and not is_projection(context.nodes[i])]
    if len(anchors) > 1 or any(classes[i] is OpClass.REDUCTION for i in inside):
        return OpClass.OPAQUE
    after_anchor = {anchors[0]}
    for i in inside:
        if not after_anchor.isdisjoint(context.index.data[i]):
            if classes[i] > OpClass.BROADCAST and not is_projection(context.nodes[i]):
                return OpClass.OPAQUE
            after_anchor.add(i)
    returned = context.index.data[len(context.nodes) - 1]
    return OpClass.ANCHOR if all(i in after_anchor for i in returned) else OpClass.OPAQUE
