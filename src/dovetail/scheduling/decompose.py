"""Decomposition of operations of a graph into simpler ones, by formulas as written by hand or torch's decompositions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dovetail.errors import DovetailError, ScheduleError
from dovetail.ir.graph_module import Program, pause_gc
from dovetail.ir.nodes import is_projection, storage_keys, value_signature
from dovetail.ir.schema import is_aten, named_arguments, op_name, same_geometry
from dovetail.ir.shape_prop import call_with_values, fake_inference, fake_mode
from dovetail.outlining.region import call_of, walk
from dovetail.passes.fold_constants import GraphRewriter
from dovetail.rules.patterns.trace import FakeEnvironment, trace

Formula = Callable[..., Any]
_aten = torch.ops.aten
_LOCATION_KEYS = ("stack_trace", "nn_module_stack", "custom")


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Matrix product with the transposed weight, plus bias."""
    product = torch.matmul(input, weight.t())
    return product if bias is None else product + bias


def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """`beta * self + alpha * mat1 @ mat2`."""
    return _sum(self, torch.mm(mat1, mat2), beta, alpha)


def baddbmm(self: Tensor, batch1: Tensor, batch2: Tensor, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """`beta * self + alpha * batch1 @ batch2`."""
    return _sum(self, torch.bmm(batch1, batch2), beta, alpha)


def _sum(added: Tensor, product: Tensor, beta: Any, alpha: Any) -> Tensor:
    scaled = product if alpha == 1 else product * alpha
    if beta == 0:
        return scaled
    return (added if beta == 1 else added * beta) + scaled


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scores, mask, softmax, dropout, and the weighted sum."""
    if dropout_p > 0 and query.device.type != "cpu":
        raise ScheduleError(
            f"its kernel drops {dropout_p} of the weights, with random numbers that separate operators on "
            f"{query.device.type} do not draw. Decompose it in eval mode"
        )
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query, key.transpose(-2, -1)) * factor
    if is_causal:
        rows, columns = query.shape[-2], key.shape[-2]
        visible = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(torch.logical_not(visible), -math.inf)
    elif attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(torch.logical_not(attn_mask), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    # A row that is masked completely is zeros, where softmax would return NaN.
    masked = attn_mask is not None
    weights = _aten._safe_softmax.default(scores, -1) if masked else torch.softmax(scores, -1)
    if dropout_p > 0:
        weights = torch.dropout(weights, dropout_p, True)
    return torch.matmul(weights, value)


def _widen(x: Tensor) -> Tensor:
    """Return half precision values in float32, in which torch's kernels compute."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Subtract the mean, divide by the standard deviation, apply weight and bias."""
    dims = _trailing_dims(normalized_shape)
    x = _widen(input)
    centred = x - x.mean(dims, keepdim=True)
    normal = centred * torch.rsqrt(centred.pow(2).mean(dims, keepdim=True) + eps)
    return _affine(normal, weight, bias).to(input.dtype)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Divide by the root mean square, apply the weight."""
    x = _widen(input)
    least = torch.finfo(input.dtype).eps if eps is None else eps
    normal = x * torch.rsqrt(x.pow(2).mean(_trailing_dims(normalized_shape), keepdim=True) + least)
    return _affine(normal, weight, None).to(input.dtype)


def _trailing_dims(shape: Sequence[int]) -> list[int]:
    return list(range(-len(shape), 0))


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = x if weight is None else x * _widen(weight)
    return scaled if bias is None else scaled + _widen(bias)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Normalize each group of channels, apply weight and bias by channel."""
    x = _widen(input).reshape(input.shape[0], num_groups, -1)
    centred = x - x.mean(-1, keepdim=True)
    normal = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    return _affine_by_channel(normal.reshape(input.shape), weight, bias, input.dtype)


def _affine_by_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    scale, shift = (None if v is None else _channels(v, x) for v in (weight, bias))
    return _affine(x, scale, shift).to(dtype)


def _channels(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape([1, -1] + [1] * (like.dim() - 2))


def batch_norm_in_eval(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Normalize by the running statistics; the saved statistics of the batch are empty."""
    mean, variance = _channels(running_mean, input), _channels(running_var, input)
    normal = (_widen(input) - mean) * torch.rsqrt(variance + eps)
    result = _affine_by_channel(normal, weight, bias, input.dtype)
    return result, running_mean.new_empty(0), running_mean.new_empty(0)


def batch_norm_in_training(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Normalize by the statistics of the batch, and update the running statistics."""
    if not training:
        eval_form = batch_norm_in_eval(input, weight, bias, running_mean, running_var, momentum, eps)
        return (*eval_form, running_mean.clone(), running_var.clone())
    dims = [0, *range(2, input.dim())]
    x = _widen(input)
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    variance = centred.pow(2).mean(dims, keepdim=True)
    inverse = torch.rsqrt(variance + eps)
    result = _affine_by_channel(centred * inverse, weight, bias, input.dtype)
    count = input.numel() // input.shape[1]
    unbiased = variance.detach().reshape(-1) * (count / (count - 1))
    return (
        result,
        mean.reshape(-1),
        inverse.reshape(-1),
        running_mean * (1 - momentum) + mean.detach().reshape(-1).to(running_mean.dtype) * momentum,
        running_var * (1 - momentum) + unbiased.to(running_var.dtype) * momentum,
    )


def softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Exponentials over their sum, the maximum subtracted first."""
    source = self if dtype is None else self.to(dtype)
    x = _widen(source)
    powers = torch.exp(x - x.amax(dim, keepdim=True))
    return (powers / powers.sum(dim, keepdim=True)).to(source.dtype)


def log_softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Subtract the logarithm of the sum of exponentials, the maximum subtracted first."""
    source = self if dtype is None else self.to(dtype)
    x = _widen(source)
    shifted = x - x.amax(dim, keepdim=True)
    return (shifted - torch.log(torch.exp(shifted).sum(dim, keepdim=True))).to(source.dtype)


def gelu(self: Tensor, approximate: str = "none") -> Tensor:
    """x times the normal cumulative distribution function, exact or by its tanh approximation."""
    x = _widen(self)
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))
        return (0.5 * x * (1 + torch.tanh(inner))).to(self.dtype)
    return (0.5 * x * (1 + torch.erf(x * math.sqrt(0.5)))).to(self.dtype)


def silu(self: Tensor) -> Tensor:
    """`x * sigmoid(x)`."""
    x = _widen(self)
    return (x * torch.sigmoid(x)).to(self.dtype)


def cross_entropy(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Negative log-likelihood of a log-softmax."""
    if target.is_floating_point() or label_smoothing:
        raise ScheduleError(
            "its targets are class probabilities, or smoothed; only class indices can be decomposed"
        )
    logs = log_softmax(self, 1 if self.dim() > 1 else 0)
    return _aten.nll_loss_nd.default(logs, target, weight, reduction, ignore_index)


def mse_loss(self: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """Squared differences, and their mean or sum."""
    squares = (self - target).pow(2)
    return squares if reduction == 0 else squares.mean() if reduction == 1 else squares.sum()


FORMULAS: dict[OpOverload, Formula] = {
    _aten.linear.default: linear,
    _aten.addmm.default: addmm,
    _aten.baddbmm.default: baddbmm,
    _aten.scaled_dot_product_attention.default: attention,
    _aten.layer_norm.default: layer_norm,
    _aten.rms_norm.default: rms_norm,
    _aten.group_norm.default: group_norm,
    _aten._native_batch_norm_legit_no_training.default: batch_norm_in_eval,
    _aten._native_batch_norm_legit_functional.default: batch_norm_in_training,
    _aten.softmax.int: softmax,
    _aten.log_softmax.int: log_softmax,
    _aten.gelu.default: gelu,
    _aten.silu.default: silu,
    _aten.cross_entropy_loss.default: cross_entropy,
    _aten.mse_loss.default: mse_loss,
}
"""The operators that `decompose` takes by default."""


def has_formula(node: Node) -> bool:
    """Return whether an operation has a formula of ours."""
    return node.op == "call_function" and node.target in FORMULAS


def decompose_nodes(gm: GraphModule, names: Iterable[str]) -> GraphModule:
    """Return the graph with some operations decomposed in place; raise ScheduleError for one that cannot be.

    Values are equal within float tolerance and keep dtype, sizes and strides. Operators without a formula of ours are
    decomposed as torch does it.
    """
    targets = set(names)
    nodes = {node.name: node for node in gm.graph.nodes}
    for name in sorted(targets - nodes.keys()):
        raise ScheduleError(f"'{name}' cannot be decomposed: {_why_missing(gm, name)}")
    rewriter = _DecomposeRewriter(gm)
    with pause_gc():
        forms = {node: rewriter.decomposition(node) for node in gm.graph.nodes if node.name in targets}
        with fake_inference(fake_mode(gm.graph.nodes)):
            return rewriter.write(forms)


def _why_missing(gm: GraphModule, name: str) -> str:
    for node in gm.graph.nodes:
        call = call_of(node.meta)
        if call is not None and any(member.name == name for member in walk(call)):
            return f"it is in region '{node.name}'; decompose that first"
    return "the graph has no such operation"


def _error(node: Node, reason: str) -> ScheduleError:
    return ScheduleError(f"'{node.name}' cannot be decomposed: {reason}")


@cache
def _torch_decompositions() -> dict[Any, Formula]:
    return cast("dict[Any, Formula]", core_aten_decompositions())


def _formula(node: Node) -> tuple[Formula, bool]:
    """Return the decomposition of an operator, and whether it takes arguments by the names of the schema."""
    target = node.target
    if not isinstance(target, OpOverload):
        raise _error(node, f"{target} is not an operator of torch")
    if target is _aten.detach.default:
        raise _error(node, f"{target} has no simpler form")
    if target in FORMULAS:
        return FORMULAS[target], True
    if target in _torch_decompositions():
        return _torch_decompositions()[target], False
    if torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"):
        return target.decompose, False
    raise _error(node, f"{target} has no decomposition")


class _DecomposeRewriter(GraphRewriter):
    """Rewrites a graph with some operations decomposed; the decomposition of equal calls is traced once."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.traced: dict[Any, Program] = {}

    def decomposition(self, node: Node) -> Program:
        """Return the decomposition of an operation as a graph of its operands."""
        formula, is_named = _formula(node)
        operands = list(node.all_input_nodes)
        if not all("val" in operand.meta for operand in operands) or "val" not in node.meta:
            raise _error(node, "the values of the graph are not known")
        key = _call_key(node, operands)
        if key not in self.traced:
            self.traced[key] = _trace_formula(node, operands, formula, is_named)
        return self.traced[key]

    def write(self, forms: dict[Node, Program]) -> Program:
        for node in self.gm.graph.nodes:
            if node in forms:
                self.env[node] = self._splice(node, forms[node])
            elif is_projection(node) and isinstance(parts := self.env[cast("Node", node.args[0])], tuple):
                self.env[node] = cast("tuple[Any, ...]", parts)[cast("int", node.args[1])]
            else:
                self.copy(node)
        return self.program()

    def _splice(self, node: Node, form: Program) -> Any:
        """Splice a decomposition in place of a node; return its new result, or a tuple of results."""
        inner: dict[Node, Any] = {}
        operands = iter([self.env[operand] for operand in node.all_input_nodes])
        for step in form.graph.nodes:
            if step.op == "placeholder":
                inner[step] = next(operands)
            elif step.op == "output":
                results = [inner[n] for n in cast("Sequence[Node]", step.args[0])]
                expected = node.meta["val"]
                if isinstance(expected, Tensor):
                    return self._like_original(node, results[0], expected)
                restored = {
                    i: self._like_original(node, result, expected[i])
                    for i, result in zip(_used_results(node), results, strict=True)
                }
                return tuple(restored.get(i) for i in range(len(expected)))
            else:
                args, kwargs = map_arg((step.args, step.kwargs), inner.__getitem__)
                inner[step] = self._call(node, step.target, args, kwargs)
        raise AssertionError("a graph without an output")

    def _like_original(self, node: Node, result: Node, expected: Tensor) -> Node:
        """Return a result with the strides of the original, in memory of its own if the original had that."""
        value = result.meta["val"]
        if value.dtype != expected.dtype or tuple(value.shape) != tuple(expected.shape):
            has, needs = (f"{v.dtype}{list(v.shape)}" for v in (value, expected))
            raise _error(node, f"the decomposition returns {has}, not {needs}")
        read = {key for operand in node.all_input_nodes for key in storage_keys(operand.meta["val"])}
        was_fresh = storage_keys(expected).isdisjoint(read)
        if not same_geometry(value, expected):
            result = self._with_strides(node, result, expected)
        if was_fresh and not storage_keys(result.meta["val"]).isdisjoint(read):
            result = self._call(node, _aten.clone.default, (result,), {})
        return result

    def _with_strides(self, node: Node, result: Node, expected: Tensor) -> Node:
        """Return a copy with the strides of the original, which later operations rely on."""
        dims, contiguous = range(expected.dim()), {"memory_format": torch.contiguous_format}
        order = sorted(dims, key=lambda d: (expected.stride(d), expected.shape[d]), reverse=True)
        inverse = [order.index(d) for d in dims]
        if order == inverse == list(dims):
            return self._call(node, _aten.clone.default, (result,), contiguous)
        permuted = self._call(node, _aten.permute.default, (result, order), {})
        dense = self._call(node, _aten.clone.default, (permuted,), contiguous)
        return self._call(node, _aten.permute.default, (dense, inverse), {})

    def _call(self, node: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        name = self.names.new(op_name(target) or getattr(target, "__name__", "part"))
        new = self.graph.create_node("call_function", target, args, kwargs, name)
        new.meta = {key: node.meta[key] for key in _LOCATION_KEYS if key in node.meta}
        new.meta["val"] = call_with_values(new, lambda operand: operand.meta["val"])
        return new


def _used_results(node: Node) -> tuple[int, ...]:
    """Return the indices of the results of an operation that are used."""
    value = node.meta["val"]
    if not isinstance(value, (tuple, list)):
        return (0,)
    if all(is_projection(user) for user in node.users):
        return tuple(sorted({cast("int", user.args[1]) for user in node.users}))
    return tuple(range(len(cast("Sequence[Any]", value))))


def _call_key(node: Node, operands: Sequence[Node]) -> Any:
    """Return the key of calls with the same decomposition."""
    number = {operand: f"operand {i}" for i, operand in enumerate(operands)}
    args = map_arg((node.args, node.kwargs), lambda n: cast("Any", number[n]))
    return (
        node.target,
        repr(args),
        _used_results(node),
        tuple(str(value_signature(n.meta["val"])) for n in operands),
    )


def _trace_formula(node: Node, operands: Sequence[Node], formula: Formula, is_named: bool) -> Program:
    env = FakeEnvironment()
    values = [env.fake_copy(operand.meta["val"]) for operand in operands]
    try:
        # Tensors that a formula creates must be fake like the operands; quick tracing takes care of that.
        with env.mode if env.symbols else nullcontext():
            form = trace(_as_function(node, operands, formula, is_named), values, quick=not env.symbols)
    except DovetailError as error:
        raise _error(node, str(error)) from error
    except Exception as error:
        raise _error(node, f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    steps = [step for step in form.graph.nodes if step.op not in ("placeholder", "output")]
    strange = [s for s in steps if s.op != "call_function" or not (is_aten(s.target) or is_projection(s))]
    strange = [s for s in strange if "sym_size" not in str(s.target) and not _is_size_arithmetic(s)]
    if strange:
        raise _error(node, f"the decomposition of {node.target} has {strange[0].target} in it")
    if any(step.target is node.target for step in steps):
        raise _error(node, f"{node.target} has no simpler form")
    return form


def _is_size_arithmetic(step: Node) -> bool:
    return (
        step.op == "call_function"
        and not isinstance(step.meta.get("val"), Tensor)
        and not is_aten(step.target)
    )


def _as_function(
    node: Node, operands: Sequence[Node], formula: Formula, is_named: bool
) -> Callable[..., Any]:
    def function(*values: Any) -> tuple[Any, ...]:
        bound = dict(zip(operands, values, strict=True))
        if is_named:
            named = map_arg(named_arguments(node), bound.__getitem__)
            result = formula(**named)
        else:
            args, kwargs = cast("Any", map_arg((node.args, node.kwargs), bound.__getitem__))
            result = formula(*args, **kwargs)
        results = cast("Sequence[Any]", result) if isinstance(result, (tuple, list)) else (result,)
        return tuple(results[i] for i in _used_results(node))

    return function
