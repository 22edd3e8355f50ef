"""Sample inputs: fake tensors to compile for, and random tensors within the domains that the operators require."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node

from dovetail.ir.nodes import example_size
from dovetail.ir.schema import named_arguments, op_name, viewed_operand
from dovetail.ir.tensor_spec import NumberSpec, Specialization, TensorSpec


@dataclass(frozen=True, slots=True)
class Domain:
    """An interval of numbers outside of which an operator gives NaN or, if it is `strict`, is undefined."""

    low: float = -math.inf
    high: float = math.inf
    strict: bool = False

    def __and__(self, other: Domain) -> Domain:
        return Domain(max(self.low, other.low), min(self.high, other.high), self.strict or other.strict)

    @property
    def is_empty(self) -> bool:
        return self.low > self.high


_NON_NEGATIVE, _SINE = Domain(0.0), Domain(-1.0, 1.0)
_VARIANCE, _PROBABILITY = Domain(0.0, strict=True), Domain(0.0, 1.0, strict=True)
_ARGUMENT_DOMAINS: Mapping[str, Mapping[str, Domain]] = {
    **{name: {"self": _NON_NEGATIVE} for name in ("sqrt", "rsqrt", "log", "log2", "log10", "special_entr")},
    **{name: {"self": _VARIANCE} for name in ("poisson", "multinomial")},
    **{name: {"self": _SINE} for name in ("acos", "asin", "atanh", "erfinv", "special_erfinv")},
    **{name: {"self": Domain(0.0, 1.0)} for name in ("logit", "special_logit")},
    "bernoulli": {"self": _PROBABILITY},
    "binary_cross_entropy": {"self": _PROBABILITY, "target": _PROBABILITY},
    **{name: {"other": _NON_NEGATIVE} for name in ("xlogy", "special_xlogy")},
    **{name: {"other": Domain(-1.0)} for name in ("xlog1py", "special_xlog1py")},
    "log1p": {"self": Domain(-1.0)},
    "acosh": {"self": Domain(1.0)},
}
"""Domains that depend on the operator alone, by the names of its arguments."""
_DIVISIONS = frozenset(("div", "divide", "floor_divide", "remainder", "fmod"))
_DIM_INDEXING = frozenset(
    ("index_select", "gather", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy")
)
_CLASS_LOSSES = frozenset(("nll_loss", "nll_loss_forward", "nll_loss_nd", "cross_entropy_loss"))
_COPIES = frozenset(("_to_copy", "clone", "contiguous", "to", "lift_fresh_copy", "expand_copy"))
Restrictions = list[tuple[Node, Domain]]


def domains_of(graph: Graph) -> dict[int, Domain]:
    """Return the domains of a flat graph's operands by position, without operands that may be any number.

    A backward dataflow walk from each restricting operator through views, casts, shifts and scalings to a placeholder.
    """
    position = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    domains: dict[int, Domain] = {}
    for node in graph.nodes:
        for value, domain in _restrictions(node):
            at, narrowed = _operand(value, domain)
            number = position.get(at)
            if number is None or narrowed.is_empty:
                continue
            joint = domains.get(number, Domain()) & narrowed
            if not joint.is_empty:
                domains[number] = joint
    return {i: d for i, d in domains.items() if d != Domain()}


def _restrictions(node: Node) -> Restrictions:
    """Return the values that an operator reads with the domains it requires of them."""
    if not isinstance(node.target, OpOverload):
        return []
    name = op_name(node.target)
    arguments = named_arguments(node)
    restricted = [(arguments.get(a), d) for a, d in _ARGUMENT_DOMAINS.get(name, {}).items()]
    if "batch_norm" in name:
        restricted.append((arguments.get("running_var"), _VARIANCE))
    if name in ("pow", "float_power") and not _is_whole_exponent(arguments.get("exponent")):
        restricted.append((arguments.get("self"), _NON_NEGATIVE))
    if name in _DIVISIONS and _is_integral(arguments.get("other")):
        restricted.append((arguments.get("other"), Domain(1, strict=True)))
    restricted += _INDICES[name](arguments) if name in _INDICES else []
    return [(value, domain) for value, domain in restricted if isinstance(value, Node)]


def _along_dim(arguments: Mapping[str, Any]) -> list[tuple[Any, Domain]]:
    sizes = _sizes(arguments.get("self"))
    return [(arguments.get("index"), _below(sizes[arguments["dim"]]))] if sizes else []


def _embedding(arguments: Mapping[str, Any]) -> list[tuple[Any, Domain]]:
    return [(arguments.get("indices"), _below(size)) for size in _sizes(arguments.get("weight"))[:1]]


def _advanced(arguments: Mapping[str, Any]) -> list[tuple[Any, Domain]]:
    # A boolean index stands for as many dimensions as it has, and restricts nothing.
    indices = cast("Sequence[Any]", arguments.get("indices") or ())
    if any(isinstance(i, Node) and not _is_integral(i) for i in indices):
        return []
    return [(i, _below(size)) for i, size in zip(indices, _sizes(arguments.get("self")), strict=False)]


def _classes(arguments: Mapping[str, Any]) -> list[tuple[Any, Domain]]:
    sizes, target = _sizes(arguments.get("self")), arguments.get("target")
    return [(target, _below(sizes[min(1, len(sizes) - 1)]))] if sizes and _is_integral(target) else []


def _take(arguments: Mapping[str, Any]) -> list[tuple[Any, Domain]]:
    return [(arguments.get("index"), _below(math.prod(_sizes(arguments.get("self")))))]


_INDICES: Mapping[str, Callable[[Mapping[str, Any]], list[tuple[Any, Domain]]]] = {
    **dict.fromkeys(_DIM_INDEXING, _along_dim),
    **dict.fromkeys(_CLASS_LOSSES, _classes),
    **dict.fromkeys(("index", "index_put", "_unsafe_index"), _advanced),
    "embedding": _embedding,
    "take": _take,
}


def _operand(node: Node, domain: Domain) -> tuple[Node, Domain]:
    """Return the value that a value is a view, cast, shift or multiple of, and the domain of that."""
    while node.op == "call_function" and isinstance(node.target, OpOverload):
        name, arguments = op_name(node.target), named_arguments(node)
        source, other = arguments.get("self"), arguments.get("other", 0)
        viewed = viewed_operand(node)
        if viewed is not None:
            node = viewed
        elif name in _COPIES and isinstance(source, Node):
            node = source
        elif name in ("add", "sub") and isinstance(source, Node) and _is_literal(other):
            shift = (-other if name == "sub" else other) * arguments.get("alpha", 1)
            # A small number is added to a variance to keep it off zero, and not because it may be below.
            low = domain.low - shift if _is_integral(source) else domain.low - min(shift, 0)
            node, domain = source, Domain(low, domain.high - shift, domain.strict)
        elif name == "mul" and isinstance(source, Node) and _is_literal(other) and other > 0:
            node, domain = source, Domain(domain.low / other, domain.high / other, domain.strict)
        else:
            break
    return node, domain


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else None


def _sizes(node: Any) -> list[Any]:
    value = _value(node)
    return list(value.shape) if isinstance(value, Tensor) else []


def _below(size: Any) -> Domain:
    # A size that may vary is two or more.
    return Domain(0, size - 1 if isinstance(size, int) else 1, strict=True)


def _is_integral(node: Any) -> bool:
    value = _value(node)
    return (
        isinstance(value, Tensor)
        and value.dtype != torch.bool
        and not (value.dtype.is_floating_point or value.dtype.is_complex)
    )


def _is_literal(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole_exponent(value: Any) -> bool:
    return _is_integral(value) if isinstance(value, Node) else float(value).is_integer()


_ANY = Domain()
_MAX_DRAWN = 262_139
"""Most numbers drawn for one tensor; larger ones repeat them. A prime, so that no two rows of usual lengths are equal:
weights of a real model would take longer to draw, on one core, than the code under test takes to compile."""


def fake_inputs(specialization: Specialization, values: Sequence[Any]) -> list[Any]:
    """Return fake operands of a specialization: new ones if all sizes are static, else `values` with their symbols."""
    if specialization.is_static:
        with FakeTensorMode():
            return [_empty(spec) for spec in specialization.operands]
    return [
        value.detach().requires_grad_(spec.requires_grad)
        if isinstance(spec, TensorSpec) and isinstance(value, FakeTensor)
        else value
        for spec, value in zip(specialization.operands, values, strict=True)
    ]


def _empty(spec: Any) -> Any:
    if isinstance(spec, NumberSpec):
        return spec.value
    empty = torch.empty_strided(spec.sizes, spec.strides, dtype=spec.dtype, device=spec.device)
    return empty.requires_grad_(spec.requires_grad)


def random_inputs(
    examples: Sequence[Any], seed: int = 0, domains: Mapping[int, Domain] | None = None
) -> list[Any]:
    """Return random tensors like the examples: normal floats, the integers 0 and 1, booleans; symbols by their hint.

    Operands with a domain have numbers within it, as a variance or an index into a table must.
    """
    inputs: list[Any] = []
    for i, example in enumerate(examples):
        if not isinstance(example, Tensor):
            inputs.append(example_size(example))
            continue
        inputs.append(_random_tensor(example, seed + i, (domains or {}).get(i, _ANY)))
    return inputs


def _random_tensor(like: Tensor, seed: int, domain: Domain) -> Tensor:
    sizes, strides = [example_size(n) for n in like.shape], [example_size(n) for n in like.stride()]
    generator = torch.Generator().manual_seed(seed)
    # The whole span is filled: elements may overlap, as in an expanded tensor.
    length = storage_span(sizes, strides)
    drawn = [min(length, _MAX_DRAWN)]
    if like.dtype.is_floating_point or like.dtype.is_complex:
        wide = torch.complex64 if like.dtype.is_complex else torch.float32
        values = _within(torch.randn(drawn, generator=generator, dtype=wide), domain).to(like.dtype)
    elif like.dtype is torch.bool:
        values = torch.rand(drawn, generator=generator) < 0.5
    else:
        # Zero and one are indices of anything that has two rows, and positions in any sequence.
        low = math.ceil(max(domain.low, 0 if domain.high >= 0 else domain.high))
        high = math.floor(min(domain.high, low + 1))
        values = torch.randint(low, max(low, high) + 1, drawn, generator=generator).to(like.dtype)
    values = values.to(like.device)
    if length > _MAX_DRAWN:
        values = values.repeat(-(-length // _MAX_DRAWN))
    return values.as_strided(sizes, strides).requires_grad_(like.requires_grad)


def _within(values: Tensor, domain: Domain) -> Tensor:
    """Map normal numbers into a domain, off its ends, where a function may be infinite."""
    if values.dtype.is_complex or domain == _ANY:
        return values
    if math.isinf(domain.high):
        return domain.low + values.abs()
    if math.isinf(domain.low):
        return domain.high - values.abs()
    return domain.low + (domain.high - domain.low) * (0.02 + 0.96 * torch.special.ndtr(values))


def storage_span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements of memory between the first and the last element of a tensor, both included."""
    if any(n == 0 for n in sizes):
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))


def clone_span(value: Tensor) -> Tensor:
    """Return a copy of the memory that a tensor spans, as a vector; `as_strided` restores the tensor."""
    length = storage_span(value.shape, value.stride())
    return value.detach().as_strided((length,), (1,), value.storage_offset()).clone()


def as_non_leaf(value: Any, written: bool) -> Any:
    """Return an operand that autograd lets be written: a copy of a leaf, or a view of one that is not written."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    if not written:
        return value.view_as(value)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(
        value
    )
