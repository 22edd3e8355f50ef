"""Int8 kernels: finds the products of a body with the operations that oneDNN fuses with them, and runs them."""

from __future__ import annotations

import functools
import operator
import platform
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from dovetail import torch_compat
from dovetail.backends.int8.int8_calibration import ObservedRange, QuantRange, mean_of, range_of
from dovetail.ir.op_traits import overload_traits
from dovetail.ir.schema import is_aten, named_arguments, normalized_arguments, op_name
from dovetail.lowering.failures import LoweringFailure
from dovetail.passes.fold_conv_batch_norm import folded_weights

_PRODUCTS = frozenset({"linear", "addmm", "mm", "matmul"})
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d", "convolution"})
_NORMS = frozenset(
    {"_native_batch_norm_legit_no_training", "batch_norm", "native_batch_norm"}
    | {"_native_batch_norm_legit_functional", "_native_batch_norm_legit"}
)
_TRANSPOSES = frozenset({"t", "numpy_T", "transpose", "permute"})

# Elementwise, and not tagged so.
_SIMPLE = frozenset({"softplus", "elu", "gelu", "silu", "mish", "hardswish", "relu6", "hardtanh", "clone"})


@dataclass(frozen=True, eq=False)
class ConvWindow:
    """Stride, padding and dilation of a convolution for each dimension, and its groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True, eq=False)
class Int8Product:
    """One product with weights, and the operations that the integer operator fuses with it.

    `node` is the product in the body and `last` the node whose value the operator computes. `transposed` marks a weight
    with inputs first. `norm` has scale, shift, mean and variance of a batch norm to be folded in. `fused` are the nodes
    that the operator replaces.
    """

    node: Node
    last: Node
    x: Node
    weight: Node
    transposed: bool
    bias: Node | None
    window: ConvWindow | None = None
    norm: tuple[Node | None, ...] = ()
    eps: float = 0.0
    residual: Node | None = None
    post: str = "none"
    algorithm: str = ""
    fused: tuple[Node, ...] = ()

    @property
    def inputs(self) -> int:
        """The dimension of the features of its input."""
        return -1 if self.window is None else 1


def products_of(graph: Graph) -> list[Int8Product]:
    """Return the products of a flat body in order; raise LoweringFailure if it cannot run in int8."""
    products = [_product(node) for node in graph.nodes if _is_product(node)]
    fused = {n for product in products for n in product.fused}
    for node in graph.nodes:
        if node.op == "placeholder":
            _check_operand(node)
        elif node.op != "output" and node not in fused and not _is_simple(node):
            raise LoweringFailure(
                f"'{node.name}' ({op_name(node.target) or node.op}) is not an elementwise operation or view beside a product"
            )
    if not products:
        raise LoweringFailure("it has no product with weights")
    return products


def _is_product(node: Node) -> bool:
    return is_aten(node.target) and op_name(node.target) in _PRODUCTS | _CONVOLUTIONS


def _check_operand(node: Node) -> None:
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.device.type != "cpu":
        raise LoweringFailure(
            f"its operand '{node.name}' is on {value.device.type}, and int8 runs on the CPU"
        )
    if isinstance(value, Tensor) and value.dtype is not torch.float32:
        raise LoweringFailure(f"its operand '{node.name}' is {value.dtype}, and int8 replaces float32")


def _is_simple(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    traits = overload_traits(node.target)
    return traits.pointwise or bool(traits.aliases) or op_name(node.target) in _SIMPLE


def _product(node: Node) -> Int8Product:
    given = normalized_arguments(node)
    name = op_name(node.target)
    if name in _CONVOLUTIONS:
        return _with_activation(_with_norm(_convolution(node, given)))
    if name == "addmm":
        if given.get("alpha", 1) != 1 or given.get("beta", 1) != 1:
            raise LoweringFailure(f"'{node.name}' scales its terms")
        x, weight, bias = given["mat1"], given["mat2"], given["self"]
    elif name == "linear":
        x, weight, bias = given["input"], given["weight"], given.get("bias")
    else:
        x, weight, bias = given["self"], given["mat2" if name == "mm" else "other"], None
    weight, transposed = _weight(node, weight, name != "linear")
    if _dims(weight) != 2 or (bias is not None and _dims(bias) != 1):
        raise LoweringFailure(f"'{node.name}' is not a product with a matrix of weights and a vector")
    if _dims(x) < 2:
        raise LoweringFailure(f"'{node.name}' is a product of one vector")
    product = Int8Product(node, node, x, weight, transposed, _operand(node, bias), fused=(node,))
    return _with_activation(_with_residual(product))


def _convolution(node: Node, given: dict[str, Any]) -> Int8Product:
    if given.get("transposed"):
        raise LoweringFailure(f"'{node.name}' is a transposed convolution")
    weight, _ = _weight(node, given["weight"], False, view_through=False)
    rank = _dims(weight) - 2
    if _dims(given["input"]) != rank + 2:
        raise LoweringFailure(f"'{node.name}' has no batch dimension")
    stride, dilation = _per_dim(given["stride"], rank), _per_dim(given["dilation"], rank)
    padding = _padding(node, given["padding"], weight, dilation)
    window = ConvWindow(stride, padding, dilation, int(given["groups"]))
    bias = _operand(node, given.get("bias"))
    return Int8Product(node, node, given["input"], weight, False, bias, window, fused=(node,))


def _padding(node: Node, given: Any, weight: Node, dilation: tuple[int, ...]) -> tuple[int, ...]:
    rank = len(dilation)
    if not isinstance(given, str):
        return _per_dim(given, rank)
    if given == "valid":
        return (0,) * rank
    kernel = [int(n) for n in weight.meta["val"].shape[2:]]
    whole = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if any(n % 2 for n in whole):
        raise LoweringFailure(f"'{node.name}' pads one side more than the other")
    return tuple(n // 2 for n in whole)


def _per_dim(numbers: Any, rank: int) -> tuple[int, ...]:
    values = [int(n) for n in numbers] if isinstance(numbers, (list, tuple)) else [int(numbers)]
    return tuple(values * rank if len(values) == 1 else values)


def _weight(node: Node, weight: Any, transposed: bool, *, view_through: bool = True) -> tuple[Node, bool]:
    """Return the operand that is the weight, looking through transposes, and whether it is transposed."""
    while (
        view_through
        and isinstance(weight, Node)
        and is_aten(weight.target)
        and op_name(weight.target) in _TRANSPOSES
    ):
        if _dims(weight) != 2:
            break
        given = normalized_arguments(weight)
        swaps = (
            list(given["dims"]) != [0, 1] if "dims" in given else given.get("dim0") != given.get("dim1", 1)
        )
        weight, transposed = given["self"], transposed != swaps
    if not isinstance(weight, Node) or weight.op != "placeholder":
        raise LoweringFailure(f"'{node.name}' multiplies two values of which none is a weight")
    return weight, transposed


def _operand(node: Node, value: Any) -> Node | None:
    if value is None:
        return None
    if not isinstance(value, Node) or value.op != "placeholder":
        raise LoweringFailure(f"the bias of '{node.name}' is computed")
    return value


def _dims(node: Any) -> int:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dim() if isinstance(value, Tensor) else -1


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _extended(product: Int8Product, last: Node, *through: Node, **more: Any) -> Int8Product:
    return replace(product, last=last, fused=(*product.fused, *through, last), **more)


def _with_norm(product: Int8Product) -> Int8Product:
    """Fuse the batch norm behind a convolution, if it uses running statistics."""
    norm = _only_user(product.last)
    if norm is None or not is_aten(norm.target) or op_name(norm.target) not in _NORMS:
        return product
    given = normalized_arguments(norm)
    numbers = tuple(given.get(k) for k in ("weight", "bias", "running_mean", "running_var"))
    fixed = all(n is None or (isinstance(n, Node) and n.op == "placeholder") for n in numbers)
    if given.get("training") or not fixed or numbers[2] is None or numbers[3] is None:
        raise LoweringFailure(
            f"'{norm.name}' uses the statistics of the batch; capture the model in eval mode"
        )
    whole = op_name(norm.target) == "batch_norm"
    last = norm if whole else _first_part(norm)
    return _extended(product, last, *([] if whole else [norm]), norm=numbers, eps=float(given["eps"]))


def _first_part(norm: Node) -> Node:
    parts = list(norm.users)
    if len(parts) != 1 or parts[0].target is not operator.getitem or parts[0].args[1] != 0:
        raise LoweringFailure(f"another result than the normalised value is used of '{norm.name}'")
    return parts[0]


def _with_residual(product: Int8Product) -> Int8Product:
    """Fuse the sum behind a linear layer, if the other term has the same shape."""
    add = _only_user(product.last)
    if add is None or not is_aten(add.target) or str(add.target) != "aten.add.Tensor":
        return product
    given = normalized_arguments(add)
    terms = [given["self"], given["other"]]
    others = [t for t in terms if t is not product.last]
    value = product.last.meta.get("val")
    other = others[0].meta.get("val") if len(others) == 1 and isinstance(others[0], Node) else None
    if given.get("alpha", 1) != 1 or not isinstance(other, Tensor) or not isinstance(value, Tensor):
        return product
    if other.dtype != value.dtype or list(map(str, other.shape)) != list(map(str, value.shape)):
        return product
    return _extended(product, add, residual=others[0])


def _with_activation(product: Int8Product) -> Int8Product:
    step = _only_user(product.last)
    name = op_name(step.target) if step is not None and is_aten(step.target) else ""
    # In three dimensions the operator fuses nothing.
    if name == "relu" and step is not None and (product.window is None or len(product.window.stride) < 3):
        return _extended(product, step, post="relu")
    if name == "gelu" and step is not None and product.residual is None and product.window is None:
        return _extended(
            product, step, post="gelu", algorithm=str(named_arguments(step).get("approximate", "none"))
        )
    return product


_LARGEST = 127

# Added to a number, it leaves the nearest integer in the low bits of the sum: the mantissa of float32 has 23 bits.
_SHIFT = 1.5 * 2**23
_NEEDED = ("qlinear_prepack", "qlinear_pointwise", "qconv_prepack", "qconv_pointwise")


@functools.cache
def why_not_here() -> str | None:
    """Return why this machine cannot run int8, or None."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"int8 needs an x86 processor, and this one is {platform.machine()}"
    missing = [name for name in _NEEDED if not hasattr(torch.ops.onednn, name)]
    if missing or not torch.backends.mkldnn.is_available():
        return f"this build of torch has no onednn::{(missing or list(_NEEDED))[0]}"
    has_vnni = torch_compat.VNNI.value
    if has_vnni is None or not has_vnni():
        # Without it oneDNN adds pairs of products in 16 bits, which overflow.
        return "this processor has no AVX512-VNNI, without which sums of bytes overflow"
    return None


def quantised_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight as int8 and the scale of each output, its first dimension."""
    flat = weight.flatten(1)
    steps = flat.abs().amax(1) / _LARGEST
    steps = torch.where(steps > 0, steps, torch.ones_like(steps))
    whole = (flat / steps[:, None]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    return whole.reshape(weight.shape), steps


class Quantizer:
    """Quantizes values to bytes, in the memory format of the operator."""

    def __init__(self, steps: QuantRange, layout: torch.memory_format) -> None:
        self.shift = torch.tensor(_SHIFT + steps.zero_point)
        self.factor, self.layout = 1.0 / steps.scale, layout

    def __call__(self, x: Tensor) -> Tensor:
        # Three passes over memory; scale, shift, round, clamp and convert would be five.
        placed = torch.add(self.shift, x, alpha=self.factor).clamp_(_SHIFT, _SHIFT + 255)
        return placed.view(torch.int32).to(torch.uint8, memory_format=self.layout)


class Int8Kernel:
    """One product with packed weights, for inputs in an observed range.

    The rounding error of the weights times the mean input is added to the bias, which corrects the error on average.
    Called with the input, the residual if there is one, and the weights, which it ignores.
    """

    def __init__(
        self, product: Int8Product, observed: ObservedRange, layout: torch.memory_format, weights: Any
    ) -> None:
        weight, bias = _folded(product, weights)
        whole, scales = quantised_weight(weight)
        missing = _mean_error(weight - whole * scales.reshape(-1, *[1] * (weight.dim() - 1)), observed.mean)
        bias = missing if bias is None else bias + missing
        steps, self.layout = observed.range, layout
        zeros = torch.zeros(len(scales), dtype=torch.int32)
        window = product.window
        if window is None:
            packed = torch.ops.onednn.qlinear_prepack(whole.contiguous(), None)
            self.quantize = Quantizer(steps, torch.contiguous_format)
            geometry: tuple[Any, ...] = ()
        else:
            geometry = tuple(map(list, (window.stride, window.padding, window.dilation)))
            geometry = (*geometry, window.groups)
            packed = torch.ops.onednn.qconv_prepack(
                whole.contiguous(), scales, steps.scale, steps.zero_point, *geometry, list(observed.sizes)
            )
            self.quantize = Quantizer(steps, channels_last(len(window.stride)))
        self.run = _binary if product.residual is not None else _linear if window is None else _conv
        self.quantization = (steps.scale, steps.zero_point, packed, scales, zeros)
        self.rest = (bias, *geometry, 1.0, 0, torch.float32)
        self.post = (product.post, [], product.algorithm)

    def __call__(self, x: Tensor, residual: Tensor | None, *_: Any) -> Tensor:
        return self.run(self, self.quantize(x), residual)


def _linear(kernel: Int8Kernel, x: Tensor, _: Any) -> Tensor:
    return torch.ops.onednn.qlinear_pointwise.default(x, *kernel.quantization, *kernel.rest, *kernel.post)


def _binary(kernel: Int8Kernel, x: Tensor, residual: Any) -> Tensor:
    # It reads the memory of the residual contiguously, ignoring its strides.
    return torch.ops.onednn.qlinear_pointwise.binary(
        x, *kernel.quantization, residual.contiguous(), *kernel.rest, 1.0, 0, "add", 1.0, *kernel.post
    )


def _conv(kernel: Int8Kernel, x: Tensor, _: Any) -> Tensor:
    result = torch.ops.onednn.qconv_pointwise.default(x, *kernel.quantization, *kernel.rest, *kernel.post)
    return result.contiguous(memory_format=kernel.layout)


class DynamicInt8Kernel:
    """A product that takes its range from the inputs of each call and packs its weights again.

    Slow: used to verify code before there is any call to calibrate with.
    """

    def __init__(self, product: Int8Product, layout: torch.memory_format) -> None:
        self.product, self.layout = product, layout

    def __call__(self, x: Tensor, residual: Tensor | None, *weights: Any) -> Tensor:
        low, high = (float(v) for v in torch.aminmax(x)) if x.numel() else (0.0, 0.0)
        if not abs(low) + abs(high) < float("inf"):
            raise LoweringFailure("values that are not finite have no range")
        observed = ObservedRange(range_of(low, high), mean_of(x, self.product.inputs), tuple(x.shape))
        return Int8Kernel(self.product, observed, self.layout, weights)(x, residual)


def channels_last(rank: int) -> torch.memory_format:
    """Return the memory format of the operator for images of this rank."""
    return {2: torch.channels_last, 3: torch.channels_last_3d}.get(rank, torch.contiguous_format)


def _mean_error(weight: Tensor, mean: Tensor) -> Tensor:
    """Return the output of a weight for the mean input, assumed at the borders of images too."""
    inputs = weight.shape[1]
    groups = len(mean) // inputs
    each = weight.reshape(groups, -1, inputs, weight[0, 0].numel()).sum(3)
    return torch.bmm(each, mean.reshape(groups, inputs, 1)).reshape(-1)


def _folded(product: Int8Product, weights: Any) -> tuple[Tensor, Tensor | None]:
    """Return the weight with outputs first, and the bias, with the batch norm folded into both."""
    detached: list[Any] = [None if w is None else w.detach() for w in weights]
    weight, bias, *norm = detached
    if product.transposed:
        weight = weight.t()
    if not norm:
        return weight, bias
    scale, shift, mean, variance = norm
    return folded_weights(weight, bias, scale, shift, mean, variance, product.eps)
