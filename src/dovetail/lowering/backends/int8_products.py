"""The products of a body that an integer operator can compute, with what it takes along."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from dovetail.graph.normalform import by_name, is_aten, normalised, op_name
from dovetail.graph.operators import of_overload
from dovetail.lowering.faults import Failure

_PRODUCTS = frozenset({"linear", "addmm", "mm", "matmul"})
_CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d", "convolution"})
_NORMS = frozenset(
    {"_native_batch_norm_legit_no_training", "batch_norm", "native_batch_norm"}
    | {"_native_batch_norm_legit_functional", "_native_batch_norm_legit"}
)
_TURNS = frozenset({"t", "numpy_T", "transpose", "permute"})
# Elementwise, and not tagged so.
_SIMPLE = frozenset({"softplus", "elu", "gelu", "silu", "mish", "hardswish", "relu6", "hardtanh", "clone"})


@dataclass(frozen=True, eq=False)
class Window:
    """How a convolution goes over its images, a number for each dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True, eq=False)
class Product:
    """One product with weights, and what the integer operator does besides.

    `node` is the product in the body and `last` the node whose value the operator gives. `turned` says that a weight
    stands with its rows as columns. `norm` has scale, shift, mean and variance of a batch norm to be folded in.
    """

    node: Node
    last: Node
    x: Node
    weight: Node
    turned: bool
    bias: Node | None
    window: Window | None = None
    norm: tuple[Node | None, ...] = ()
    eps: float = 0.0
    residual: Node | None = None
    post: str = "none"
    algorithm: str = ""
    taken: tuple[Node, ...] = ()

    @property
    def inputs(self) -> int:
        """The dimension of its values along which the inputs are."""
        return -1 if self.window is None else 1


def products_of(graph: Graph) -> list[Product]:
    """The products of a flat body in order. Raises Failure with why it is not for integers."""
    found = [_product(node) for node in graph.nodes if _is_product(node)]
    taken = {n for product in found for n in product.taken}
    for node in graph.nodes:
        if node.op == "placeholder":
            _check_operand(node)
        elif node.op != "output" and node not in taken and not _is_simple(node):
            raise Failure(f"'{node.name}' ({op_name(node.target) or node.op}) is no step beside a product")
    if not found:
        raise Failure("it has no product with weights")
    return found


def _is_product(node: Node) -> bool:
    return is_aten(node.target) and op_name(node.target) in _PRODUCTS | _CONVOLUTIONS


def _check_operand(node: Node) -> None:
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.device.type != "cpu":
        raise Failure(f"its operand '{node.name}' is on {value.device.type}, and int8 runs on the CPU")
    if isinstance(value, Tensor) and value.dtype is not torch.float32:
        raise Failure(f"its operand '{node.name}' is {value.dtype}, and int8 stands in for float32")


def _is_simple(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    told = of_overload(node.target)
    return told.pointwise or bool(told.aliases) or op_name(node.target) in _SIMPLE


def _product(node: Node) -> Product:
    given = normalised(node, by_name(node))
    name = op_name(node.target)
    if name in _CONVOLUTIONS:
        found = _convolution(node, given)
        return _with_activation(_with_norm(found))
    if name == "addmm":
        if given.get("alpha", 1) != 1 or given.get("beta", 1) != 1:
            raise Failure(f"'{node.name}' weighs its terms")
        x, weight, bias = given["mat1"], given["mat2"], given["self"]
    elif name == "linear":
        x, weight, bias = given["input"], given["weight"], given.get("bias")
    else:
        x, weight, bias = given["self"], given["mat2" if name == "mm" else "other"], None
    weight, turned = _weight(node, weight, name != "linear")
    if _dims(weight) != 2 or (bias is not None and _dims(bias) != 1):
        raise Failure(f"'{node.name}' is no product with a matrix of weights and a vector")
    if _dims(x) < 2:
        raise Failure(f"'{node.name}' is a product of one vector")
    found = Product(node, node, x, weight, turned, _operand(node, bias), taken=(node,))
    return _with_activation(_with_residual(found))


def _convolution(node: Node, given: dict[str, Any]) -> Product:
    if given.get("transposed"):
        raise Failure(f"'{node.name}' is a transposed convolution")
    weight, _ = _weight(node, given["weight"], False, turns=False)
    rank = _dims(weight) - 2
    if _dims(given["input"]) != rank + 2:
        raise Failure(f"'{node.name}' has no batch dimension")
    stride, dilation = _each(given["stride"], rank), _each(given["dilation"], rank)
    padding = _padding(node, given["padding"], weight, dilation)
    window = Window(stride, padding, dilation, int(given["groups"]))
    bias = _operand(node, given.get("bias"))
    return Product(node, node, given["input"], weight, False, bias, window, taken=(node,))


def _padding(node: Node, given: Any, weight: Node, dilation: tuple[int, ...]) -> tuple[int, ...]:
    rank = len(dilation)
    if not isinstance(given, str):
        return _each(given, rank)
    if given == "valid":
        return (0,) * rank
    kernel = [int(n) for n in weight.meta["val"].shape[2:]]
    whole = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if any(n % 2 for n in whole):
        raise Failure(f"'{node.name}' pads one side more than the other")
    return tuple(n // 2 for n in whole)


def _each(numbers: Any, rank: int) -> tuple[int, ...]:
    listed = [int(n) for n in numbers] if isinstance(numbers, (list, tuple)) else [int(numbers)]
    return tuple(listed * rank if len(listed) == 1 else listed)


def _weight(node: Node, weight: Any, turned: bool, *, turns: bool = True) -> tuple[Node, bool]:
    """The operand that is the weight, through transpositions of it."""
    while turns and isinstance(weight, Node) and is_aten(weight.target) and op_name(weight.target) in _TURNS:
        if _dims(weight) != 2:
            break
        given = normalised(weight, by_name(weight))
        swaps = (
            list(given["dims"]) != [0, 1] if "dims" in given else given.get("dim0") != given.get("dim1", 1)
        )
        weight, turned = given["self"], turned != swaps
    if not isinstance(weight, Node) or weight.op != "placeholder":
        raise Failure(f"'{node.name}' multiplies two values, and none of them is a weight")
    return weight, turned


def _operand(node: Node, value: Any) -> Node | None:
    if value is None:
        return None
    if not isinstance(value, Node) or value.op != "placeholder":
        raise Failure(f"the bias of '{node.name}' is computed")
    return value


def _dims(node: Any) -> int:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dim() if isinstance(value, Tensor) else -1


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _extended(found: Product, last: Node, *through: Node, **more: Any) -> Product:
    return replace(found, last=last, taken=(*found.taken, *through, last), **more)


def _with_norm(found: Product) -> Product:
    """With the batch norm behind a convolution, where it goes by statistics that are kept."""
    norm = _only_user(found.last)
    if norm is None or not is_aten(norm.target) or op_name(norm.target) not in _NORMS:
        return found
    given = normalised(norm, by_name(norm))
    numbers = tuple(given.get(k) for k in ("weight", "bias", "running_mean", "running_var"))
    fixed = all(n is None or (isinstance(n, Node) and n.op == "placeholder") for n in numbers)
    if given.get("training") or not fixed or numbers[2] is None or numbers[3] is None:
        raise Failure(f"'{norm.name}' goes by the statistics of the batch; capture the model in eval mode")
    whole = op_name(norm.target) == "batch_norm"
    last = norm if whole else _first_part(norm)
    return _extended(found, last, *([] if whole else [norm]), norm=numbers, eps=float(given["eps"]))


def _first_part(norm: Node) -> Node:
    parts = list(norm.users)
    if len(parts) != 1 or parts[0].target is not operator.getitem or parts[0].args[1] != 0:
        raise Failure(f"more than the normalised value is used of '{norm.name}'")
    return parts[0]


def _with_residual(found: Product) -> Product:
    """With the sum behind a linear layer, where it is with a value of the same shape."""
    add = _only_user(found.last)
    if add is None or not is_aten(add.target) or str(add.target) != "aten.add.Tensor":
        return found
    given = normalised(add, by_name(add))
    terms = [given["self"], given["other"]]
    others = [t for t in terms if t is not found.last]
    made = found.last.meta.get("val")
    other = others[0].meta.get("val") if len(others) == 1 and isinstance(others[0], Node) else None
    if given.get("alpha", 1) != 1 or not isinstance(other, Tensor) or not isinstance(made, Tensor):
        return found
    if other.dtype != made.dtype or list(map(str, other.shape)) != list(map(str, made.shape)):
        return found
    return _extended(found, add, residual=others[0])


def _with_activation(found: Product) -> Product:
    step = _only_user(found.last)
    name = op_name(step.target) if step is not None and is_aten(step.target) else ""
    # Over three dimensions the operator takes nothing along.
    if name == "relu" and step is not None and (found.window is None or len(found.window.stride) < 3):
        return _extended(found, step, post="relu")
    if name == "gelu" and step is not None and found.residual is None and found.window is None:
        return _extended(found, step, post="gelu", algorithm=str(by_name(step).get("approximate", "none")))
    return found
