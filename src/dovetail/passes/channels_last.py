"""Layout assignment for 2-D convolutions: channels-last operands, and conversions where a layout area begins and ends.

A convolution reads memory in the order NHWC faster than in NCHW on tensor cores and with oneDNN. Converting each one by
itself costs two copies, so the layout is propagated: a forward sweep assigns channels last to the results of the
convolutions and of the operators after them for which the layout does not matter, by running these on fake tensors. A
value is converted where an operator on the other side of the boundary reads it, once for all its readers. One sweep
plans, another writes the graph; both are linear in its size.

Reference: Liu et al., "Optimizing CNN Model Inference on CPUs" (NeoCPU), USENIX ATC 2019, section 3.2; Inductor's layout
optimization (torch/_inductor/graph.py) decides the same for a whole graph.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import SymInt, Tensor, nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from dovetail.errors import InvalidArgument, checked_init
from dovetail.ir.dependencies import Index
from dovetail.ir.effects import PURE
from dovetail.ir.graph_module import Program, attribute, copy_node, pause_gc, rebuild, require_graph
from dovetail.ir.nodes import is_projection, nbytes, storage_keys
from dovetail.ir.op_traits import traits_of
from dovetail.ir.schema import named_arguments, op_name, same_geometry, same_size, static_size
from dovetail.ir.shape_prop import call_with_values, fake_inference, fake_mode, same_layout
from dovetail.passes.fold_constants import Concatenated, Constants, UniqueNames
from dovetail.passes.pass_manager import Finding, Pass, require_fuel

_aten = torch.ops.aten
_CONVOLUTIONS = frozenset(
    {
        _aten.conv1d.default,
        _aten.conv2d.default,
        _aten.conv3d.default,
        _aten.conv1d.padding,
        _aten.conv2d.padding,
        _aten.conv3d.padding,
        _aten.conv_transpose1d.default,
        _aten.conv_transpose2d.input,
        _aten.conv_transpose3d.input,
        _aten.convolution.default,
    }
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NORMS = _names(
    """
    batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training
    """
)
# Their kernels return channels last for images in channels last, as fake tensors predict it on the CPU and on CUDA.
_PROPAGATING = _NORMS | _names(
    """
    hardswish leaky_relu prelu _prelu_kernel cat
    max_pool2d max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d
    upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d
    constant_pad_nd pad reflection_pad2d replication_pad2d
    """
)
# Their results have the same strides whatever those of their operands are, except for copies that preserve strides.
_ABSORBING = _names("_to_copy clone mean sum amax amin linear layer_norm native_layer_norm")
_VIEWS = _names(
    """
    chunk expand flatten narrow permute reshape select slice split split_with_sizes squeeze transpose unbind unsqueeze view
    """
)


@checked_init()
@dataclass(frozen=True, repr=False)
class ChannelsLast(Pass):
    """Run 2-D convolutions on operands in the channels-last memory format.

    Needs: a graph with values, and convolutions on batches of contiguous images. Operations of a region are not changed.
    Leaves: the same operators. A copy in channels last stands where an area of convolutions begins. Elementwise
    operators, batch norm, pooling, upsampling, padding and concatenation between convolutions keep the format. A copy
    with the original strides stands before an operator that needs these: other views, random draws, custom operators,
    regions, writes, and results of the graph. Shapes, dtypes and strides of results, and the random stream, are as
    before. Values are equal within float tolerance, not bit for bit: another memory format may use another kernel.

    Weights are converted once, into buffers that are not in the `state_dict`; the parameters stay. The buffers are
    recomputed before the next call after a weight was written, and within `weight_check_interval` calls if no version
    counter shows it. Gradients do not reach the parameters: for inference only, and graphs captured in train mode are
    left unchanged. With `materialise=False` weights are converted by a copy in the graph at each call, which trains.

    Run `FoldConvBatchNorm` before it or after it; after it only where the weights are buffers. `fuel` is the largest
    number of convolutions to convert.
    """

    materialise: bool = True
    fuel: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.materialise, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"materialise {self.materialise!r}: give True or False.")
        require_fuel(self.fuel)

    def run(self, gm: GraphModule) -> GraphModule:
        """Return the graph with convolutions in channels last; the input graph itself if none can be converted."""
        with pause_gc():
            index = Index(require_graph(gm))
            index.require_order()
            with fake_inference(fake_mode(index.nodes)):
                plan = self._plan(index)
                return _LayoutRewriter(index, plan).write() if plan.converted else gm

    def explain(self, gm: GraphModule) -> tuple[Finding, ...]:
        """Return which convolutions would run in channels last, and why others would not."""
        index = Index(require_graph(gm))
        with fake_inference(fake_mode(index.nodes)):
            return tuple(self._plan(index).findings)

    def _plan(self, index: Index) -> LayoutPlan:
        return _LayoutPlanner(index, self.materialise, self.fuel).plan()


@dataclass
class LayoutPlan:
    """Which values are in channels last, and who reads them so.

    `converted` has the new values of operations whose results change their strides, `views` those of views that are
    available in both layouts. `reads` are the operands that an operation reads in channels last instead of with their
    original strides. `weights` are the attributes that are converted once.
    """

    converted: dict[Node, Any] = field(default_factory=dict[Node, Any])
    views: dict[Node, Any] = field(default_factory=dict[Node, Any])
    reads: dict[Node, frozenset[Node]] = field(default_factory=dict[Node, frozenset[Node]])
    weights: set[Node] = field(default_factory=set[Node])
    findings: list[Finding] = field(default_factory=list[Finding])


class _LayoutPlanner:
    """One forward sweep that assigns a layout to every value."""

    def __init__(self, index: Index, materialise: bool, fuel: int | None) -> None:
        self.index, self.materialise, self.fuel = index, materialise, fuel
        self.result = LayoutPlan()
        self.copies: dict[Node, Tensor] = {}
        self.taken = 0

    def plan(self) -> LayoutPlan:
        for position, node in enumerate(self.index.nodes):
            if node.op == "call_function" and node.target in _CONVOLUTIONS:
                reason = self._convolution(node)
                what = "" if reason else "it runs in channels last"
                self.result.findings.append(Finding((node.name,), what, reason))
            elif self._is_agnostic(position, node):
                if node.target is operator.getitem:
                    self._projection(node)
                elif op_name(node.target) in _VIEWS:
                    self._view(node)
                else:
                    self._operation(node)
        return self.result

    def _value(self, node: Node) -> Any:
        """Return the value of a node in channels last, converted if it has original strides."""
        known = self._available(node)
        if known is None:
            if node not in self.copies:
                self.copies[node] = node.meta["val"].clone(memory_format=torch.channels_last)
            known = self.copies[node]
        return known

    def _available(self, node: Node) -> Any:
        """Return the value that a node has in channels last without a copy; None if it has none."""
        plan = self.result
        if node in plan.converted:
            return plan.converted[node]
        if node in plan.views:
            return plan.views[node]
        value = node.meta.get("val")
        return value if isinstance(value, Tensor) and is_channels_last(value) else None

    def _call(self, node: Node, reads: frozenset[Node]) -> Any:
        return call_with_values(node, lambda n: self._value(n) if n in reads else n.meta.get("val"))

    # Convolutions

    def _convolution(self, node: Node) -> str:
        """Plan a convolution in channels last; return the reason if it is left unchanged."""
        arguments = named_arguments(node)
        image, weight = arguments.get("input"), arguments.get("weight")
        if not isinstance(image, Node) or not isinstance(weight, Node):
            return "its operands are not values of the graph"
        reason = self._why_not(node, image, weight)
        if reason:
            return reason
        kernel: Tensor = weight.meta["val"]
        reads = {image} if _is_ambiguous(kernel) else {image, weight}
        try:
            result = self._call(node, frozenset(reads))
        except Exception as error:  # an operator may reject these operands
            return f"it does not work on its operands in channels last: {_first_line(error)}"
        if not is_channels_last(result):
            return f"its kernel for {kernel.dtype} on '{kernel.device.type}' does not return channels last"
        if self.fuel is not None and self.taken >= self.fuel:
            return f"the fuel of {self.fuel} is spent"
        self.taken += 1
        self.result.converted[node] = result
        self.result.reads[node] = frozenset(reads)
        if weight in reads and self._available(weight) is None and self._is_constant(weight):
            self.result.weights.add(weight)
        return ""

    def _why_not(self, node: Node, image: Node, weight: Node) -> str:
        values = [n.meta.get("val") for n in (image, weight, node)]
        if not all(isinstance(value, Tensor) for value in values):
            return "the shapes are not known: give the graph values with `capture`"
        x, kernel, result = cast("list[Tensor]", values)
        if kernel.dim() != 4:
            return f"it is a {kernel.dim() - 2}-D convolution"
        if x.dim() != 4:
            return "it has no batch dimension"
        if self.index.dependencies.switches_modes:
            return "a mode is switched in this graph, such as no_grad or autocast"
        if self.materialise and self.index.gm.training:
            return "the graph is in train mode: capture the model in eval mode, or give materialise=False"
        written = self.index.dependencies.written
        for operand in (image, weight, node):
            if self.index.position[operand] in written:
                return f"'{operand.name}' is written in this graph"
        if is_channels_last(result):
            return "it runs in channels last already"
        if not _is_contiguous(result):
            return "its result is not contiguous"
        if self._available(image) is None and _is_ambiguous(x) and _is_ambiguous(result):
            return "its images are single pixels or have a single channel: their memory is the same in both formats"
        return ""

    def _is_constant(self, weight: Node) -> bool:
        if not self.materialise or weight.op != "get_attr":
            return False
        held = attribute(self.index.gm, cast("str", weight.target))
        return type(held) in (Tensor, nn.Parameter, nn.Buffer)

    # Operations after convolutions

    def _is_agnostic(self, position: int, node: Node) -> bool:
        """Whether an operation reads a value in channels last, and computes the same whatever the strides."""
        plan = self.result
        if not any(n in plan.converted or n in plan.views for n in node.all_input_nodes):
            return False
        if not self._is_recomputable(position, node):
            return False
        if node.target is operator.getitem:
            return is_projection(node)
        if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
            return False
        name = op_name(node.target)
        # `view.dtype` reinterprets memory.
        is_view = name in _VIEWS and node.target._overloadname != "dtype"
        return is_view or name in _PROPAGATING or name in _ABSORBING or traits_of(node).pointwise

    def _is_recomputable(self, position: int, node: Node) -> bool:
        if node.op != "call_function" or node.meta.get("val") is None or "unbacked_bindings" in node.meta:
            return False
        dependencies = self.index.dependencies
        return position not in dependencies.written and dependencies.effects.get(position, PURE).pure

    def _projection(self, node: Node) -> None:
        source = node.all_input_nodes[0]
        item = self._available(source)[node.args[1]]
        if source in self.result.views:
            self.result.views[node] = item
            return
        self.result.reads[node] = frozenset((source,))
        if not same_layout(item, node.meta["val"]):
            self.result.converted[node] = item

    def _view(self, node: Node) -> None:
        """Plan a view of a value in channels last: it can be taken of either layout, and is where it is read."""
        source = node.all_input_nodes[0]
        try:
            result = self._call(node, frozenset((source,)))
        except Exception:  # such as a view that these strides do not allow
            return
        if storage_keys(result) != storage_keys(self._value(source)):
            return
        # Sizes that are merged and split leave the strides of dims of size one to the kernel.
        if op_name(node.target) in ("flatten", "reshape", "view") and (
            not same_layout(result, node.meta["val"]) or 1 in map(static_size, result.shape)
        ):
            return
        self.result.views[node] = result

    def _operation(self, node: Node) -> None:
        """Plan an operation on values in channels last, if its result is in channels last or as it was."""
        reads = self._operands(node)
        if reads is None:
            return
        try:
            result = self._call(node, reads)
        except Exception:  # an operator may reject these strides
            return
        absorbs = op_name(node.target) in _ABSORBING
        if not absorbs and traits_of(node).pointwise:
            absorbs = True
            if all(_is_ambiguous(n.meta.get("val")) for n in node.all_input_nodes):
                # Kernels prefer contiguous results here, and fake tensors do not.
                result = torch.empty_like(result, memory_format=torch.contiguous_format)
        if absorbs and same_layout(result, node.meta["val"]):
            self.result.reads[node] = reads
        elif self._is_restorable(node, result):
            self.result.reads[node] = reads
            self.result.converted[node] = result

    def _operands(self, node: Node) -> frozenset[Node] | None:
        """Return the operands to read in channels last; None to read all with their original strides.

        Values in channels last decide if they are at least half of the bytes, so that fewer bytes are copied.
        """
        tensors = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
        available = {n for n in tensors if self._available(n) is not None}
        images = [n for n in tensors if n.meta["val"].dim() == 4 and not _is_ambiguous(n.meta["val"])]
        missing = [n for n in images if n not in available]
        if not images and not self._is_predictable(node, available):
            return None
        if any(self.index.position[n] in self.index.dependencies.written for n in missing):
            return None
        present = sum(nbytes(n.meta["val"]) or 0 for n in images if n in available)
        if sum(nbytes(n.meta["val"]) or 0 for n in missing) > present:
            return None
        return frozenset((*available, *missing))

    def _is_predictable(self, node: Node, available: set[Node]) -> bool:
        """Whether fake tensors predict the strides of a result of operands that have the same memory in both formats."""
        if all(same_geometry(self._available(n), n.meta["val"]) for n in available):
            return True
        if op_name(node.target) in _NORMS or not all(self._available(n).is_contiguous() for n in available):
            return False  # devices differ in them, and so do kernels for slices
        if not traits_of(node).pointwise:
            return True
        return all(_same_sizes(n.meta.get("val"), node.meta["val"]) for n in node.all_input_nodes)

    def _is_restorable(self, node: Node, result: Any) -> bool:
        """Whether a result, or the first of a tuple, is in channels last and was contiguous; the rest is as it was."""
        value = node.meta["val"]
        if isinstance(result, Tensor):
            return is_channels_last(result) and _is_contiguous(value)
        at = self.index.position
        if not isinstance(result, tuple) or not all(
            is_projection(user) and self._is_recomputable(at[user], user) for user in node.users
        ):
            return False
        parts = list(zip(cast("tuple[Any, ...]", result), value, strict=True))
        changed = [is_channels_last(new) and _is_contiguous(old) for new, old in parts]
        return changed[0] and all(c or same_layout(*part) for c, part in zip(changed, parts, strict=True))


class _LayoutRewriter:
    """One forward sweep that writes the graph of a plan."""

    def __init__(self, index: Index, plan: LayoutPlan) -> None:
        self.index, self.plan = index, plan
        self.graph = Graph(tracer_cls=index.gm.graph._tracer_cls)
        self.original: dict[Node, Node] = {}
        self.channels_last: dict[Node, Node] = {}
        self.names = UniqueNames(index.gm)
        self.constants = Constants(index.gm, self.names)
        self.needs_original, self.needs_view = self._demand()

    def write(self) -> Program:
        plan = self.plan
        for node in self.index.nodes:
            reads = plan.reads.get(node, frozenset())
            if node in plan.views:
                self._view(node)
            elif node in plan.converted:
                self.channels_last[node] = self._copy(node, reads, plan.converted[node])
            elif node not in plan.weights or node in self.needs_original:
                self.original[node] = self._copy(node, reads)
        self.graph.set_codegen(self.index.gm.graph._codegen)
        return self.constants.installed(rebuild(self.index.gm, self.graph))

    def _demand(self) -> tuple[set[Node], set[Node]]:
        """Return the nodes that are read with original strides, and the views that are read in channels last."""
        plan = self.plan
        original: set[Node] = set()
        views: set[Node] = set()
        for node in reversed(self.index.nodes):
            if node in plan.views:
                if node in views:
                    views.update(node.all_input_nodes)
                if node not in original and node.users:
                    continue
            reads = plan.reads.get(node, frozenset())
            views.update(reads)
            original.update(n for n in node.all_input_nodes if n not in reads)
        return original, views

    def _copy(self, node: Node, reads: frozenset[Node] = frozenset(), value: Any = None) -> Node:
        def image(operand: Node) -> Node:
            return self._channels_last(operand) if operand in reads else self._original(operand)

        new = copy_node(self.graph, node, image)
        if value is not None:
            new.meta["val"] = value
            new.meta.pop("tensor_meta", None)
        return new

    def _view(self, node: Node) -> None:
        has_original = node in self.needs_original or node not in self.needs_view
        if has_original:
            self.original[node] = self._copy(node)
        if node in self.needs_view:
            source = node.all_input_nodes[0]
            new = self._copy(node, frozenset((source,)), self.plan.views[node])
            if has_original:
                new.name = self.names.new(f"channels_last_{node.name}")
            self.channels_last[node] = new

    def _original(self, node: Node) -> Node:
        if node not in self.original:
            copy = self._convert(node, self.channels_last[node], torch.contiguous_format, node.meta["val"])
            self.original[node] = copy
        return self.original[node]

    def _channels_last(self, node: Node) -> Node:
        if node in self.channels_last:
            return self.channels_last[node]
        if node in self.plan.weights:
            new = self._weight(node)
        elif is_channels_last(node.meta["val"]):
            return self.original[node]
        else:
            value = node.meta["val"].clone(memory_format=torch.channels_last)
            new = self._convert(node, self.original[node], torch.channels_last, value)
        self.channels_last[node] = new
        return new

    def _convert(self, node: Node, image: Node, memory_format: torch.memory_format, value: Tensor) -> Node:
        stem = "channels_last" if memory_format is torch.channels_last else "contiguous"
        options: dict[str, Any] = {"memory_format": memory_format}
        new = self.graph.create_node(
            "call_function", _aten.clone.default, (image,), options, self.names.new(stem)
        )
        new.meta = {k: v for k, v in node.meta.items() if k in ("stack_trace", "nn_module_stack")}
        new.meta["val"] = value
        return new

    def _weight(self, node: Node) -> Node:
        # By name: operators cannot be pickled.
        step = (_aten.clone.default.name(), (...,), (("memory_format", torch.channels_last),))
        (target,) = self.constants.derive(
            ["channels_last_weight"], [cast("str", node.target)], Concatenated(0, ((step,),))
        )
        new = self.graph.create_node("get_attr", target, name=target)
        new.meta["val"] = torch.empty_like(node.meta["val"], memory_format=torch.channels_last)
        return new


def is_channels_last(value: Any) -> bool:
    """Whether a tensor has exactly the strides of a new one in channels last, those of dims of size one included."""
    return isinstance(value, Tensor) and value.dim() == 4 and _has_format(value, torch.channels_last)


def _is_contiguous(value: Any) -> bool:
    return isinstance(value, Tensor) and _has_format(value, torch.contiguous_format)


def _has_format(value: Tensor, memory_format: torch.memory_format) -> bool:
    if value.layout is not torch.strided:
        return False
    expected = torch.empty_like(value, memory_format=memory_format)
    same = all(_same_stride(a, b) for a, b in zip(value.stride(), expected.stride(), strict=True))
    return same and same_size(value.storage_offset(), 0)


def _same_stride(a: Any, b: Any) -> bool:
    """Whether two strides are equal for all sizes but zero: torch writes some as products of `Max(1, size)`."""
    if same_size(a, b):
        return True
    if not isinstance(a, SymInt) or not isinstance(b, SymInt):
        return False
    difference = _without_max(a.node.expr) - _without_max(b.node.expr)
    return bool(difference.expand() == 0)


def _without_max(expression: Any) -> Any:
    """Return an expression of sizes with each `Max(1, size)` replaced by the size."""

    def is_max(part: Any) -> bool:
        return type(part).__name__ == "Max" and len(part.args) == 2 and part.args[0] == 1

    def size(part: Any) -> Any:
        return part.args[1]

    return expression.replace(is_max, size)


def _is_ambiguous(value: Any) -> bool:
    """Whether images have their elements in the same order in both formats: one channel, one pixel, or no elements."""
    if not isinstance(value, Tensor) or value.dim() != 4:
        return False
    sizes = [static_size(size) for size in value.shape]
    return sizes[1] == 1 or sizes[2] == sizes[3] == 1 or 0 in sizes


def _same_sizes(a: Any, b: Tensor) -> bool:
    if not isinstance(a, Tensor) or a.dim() != b.dim():
        return False
    return all(same_size(m, n) for m, n in zip(a.shape, b.shape, strict=True))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
