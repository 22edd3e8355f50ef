"""Operands for compiling: fake tensors with the sizes, strides and gradient flags of the calls to come."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node

from dovetail.ir.schema import viewed_operand
from dovetail.ir.tensor_spec import NumberSpec, Specialization, TensorSpec


@dataclass(frozen=True, slots=True)
class Domain:
    """An interval of numbers. Outside of it an operator gives NaN, or, where it is `strict`, is not defined."""

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
_OF_ARGUMENT: Mapping[str, Mapping[str, Domain]] = {
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
_ALONG_DIM = frozenset(
    ("index_select", "gather", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy")
)
_CLASSES = frozenset(("nll_loss", "nll_loss_forward", "nll_loss_nd", "cross_entropy_loss"))
_SAME_VALUES = frozenset(("_to_copy", "clone", "contiguous", "to", "lift_fresh_copy", "expand_copy"))
Restrictions = list[tuple[Node, Domain]]


def domains_of(graph: Graph) -> dict[int, Domain]:
    """The domains of a flat graph's operands, by their numbers; operands that may be any number are left out."""
    position = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    found: dict[int, Domain] = {}
    for node in graph.nodes:
        for value, domain in _restrictions(node):
            at, narrowed = _operand(value, domain)
            number = position.get(at)
            if number is None or narrowed.is_empty:
                continue
            joint = found.get(number, Domain()) & narrowed
            if not joint.is_empty:
                found[number] = joint
    return {i: d for i, d in found.items() if d != Domain()}


def _restrictions(node: Node) -> Restrictions:
    """What an operator needs of the values that it reads."""
    if not isinstance(node.target, OpOverload):
        return []
    name = _name(node)
    given = _arguments(node)
    found = [(given.get(a), d) for a, d in _OF_ARGUMENT.get(name, {}).items()]
    if "batch_norm" in name:
        found.append((given.get("running_var"), _VARIANCE))
    if name in ("pow", "float_power") and not _is_whole_exponent(given.get("exponent")):
        found.append((given.get("self"), _NON_NEGATIVE))
    if name in _DIVISIONS and _is_integral(given.get("other")):
        found.append((given.get("other"), Domain(1, strict=True)))
    found += _INDICES[name](given) if name in _INDICES else []
    return [(value, domain) for value, domain in found if isinstance(value, Node)]


def _along_dim(given: Mapping[str, Any]) -> list[tuple[Any, Domain]]:
    sizes = _sizes(given.get("self"))
    return [(given.get("index"), _below(sizes[given["dim"]]))] if sizes else []


def _embedding(given: Mapping[str, Any]) -> list[tuple[Any, Domain]]:
    return [(given.get("indices"), _below(size)) for size in _sizes(given.get("weight"))[:1]]


def _advanced(given: Mapping[str, Any]) -> list[tuple[Any, Domain]]:
    # An index of truth values stands for as many dimensions as it has, and restricts nothing.
    indices = cast("Sequence[Any]", given.get("indices") or ())
    if any(isinstance(i, Node) and not _is_integral(i) for i in indices):
        return []
    return [(i, _below(size)) for i, size in zip(indices, _sizes(given.get("self")), strict=False)]


def _classes(given: Mapping[str, Any]) -> list[tuple[Any, Domain]]:
    sizes, target = _sizes(given.get("self")), given.get("target")
    return [(target, _below(sizes[min(1, len(sizes) - 1)]))] if sizes and _is_integral(target) else []


def _take(given: Mapping[str, Any]) -> list[tuple[Any, Domain]]:
    return [(given.get("index"), _below(math.prod(_sizes(given.get("self")))))]


_INDICES: Mapping[str, Callable[[Mapping[str, Any]], list[tuple[Any, Domain]]]] = {
    **dict.fromkeys(_ALONG_DIM, _along_dim),
    **dict.fromkeys(_CLASSES, _classes),
    **dict.fromkeys(("index", "index_put", "_unsafe_index"), _advanced),
    "embedding": _embedding,
    "take": _take,
}


def _operand(node: Node, domain: Domain) -> tuple[Node, Domain]:
    """What a value is a view, cast, shift or multiple of, and the domain of that."""
    while node.op == "call_function" and isinstance(node.target, OpOverload):
        name, given = _name(node), _arguments(node)
        source, other = given.get("self"), given.get("other", 0)
        viewed = viewed_operand(node)
        if viewed is not None:
            node = viewed
        elif name in _SAME_VALUES and isinstance(source, Node):
            node = source
        elif name in ("add", "sub") and isinstance(source, Node) and _is_literal(other):
            shift = (-other if name == "sub" else other) * given.get("alpha", 1)
            # A small number is added to a variance to keep it off zero, and not because it may be below.
            low = domain.low - shift if _is_integral(source) else domain.low - min(shift, 0)
            node, domain = source, Domain(low, domain.high - shift, domain.strict)
        elif name == "mul" and isinstance(source, Node) and _is_literal(other) and other > 0:
            node, domain = source, Domain(domain.low / other, domain.high / other, domain.strict)
        else:
            break
    return node, domain


def _name(node: Node) -> str:
    return cast("OpOverload", node.target)._schema.name.partition("::")[2]


def _arguments(node: Node) -> dict[str, Any]:
    arguments = cast("OpOverload", node.target)._schema.arguments
    return {a.name: v for a, v in zip(arguments, node.args, strict=False)} | dict(node.kwargs)


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
_DRAWN = 262_139
"""Most numbers drawn for one tensor; larger ones repeat them. A prime, so that no two rows of usual lengths are equal:
weights of a real model would take longer to draw, on one core, than the code that is tried takes to compile."""


def fake_examples(situation: Specialization, values: Sequence[Any]) -> list[Any]:
    """Fakes for a situation: new ones where every size is a number, else those of the graph with its symbols."""
    if situation.is_static:
        with FakeTensorMode():
            return [_made(spec) for spec in situation.operands]
    return [
        value.detach().requires_grad_(spec.requires_grad)
        if isinstance(spec, TensorSpec) and isinstance(value, FakeTensor)
        else value
        for spec, value in zip(situation.operands, values, strict=True)
    ]


def _made(spec: Any) -> Any:
    if isinstance(spec, NumberSpec):
        return spec.value
    made = torch.empty_strided(spec.sizes, spec.strides, dtype=spec.dtype, device=spec.device)
    return made.requires_grad_(spec.requires_grad)


def real_examples(
    examples: Sequence[Any], seed: int = 0, domains: Mapping[int, Domain] | None = None
) -> list[Any]:
    """Sample tensors like fake ones: normal numbers, small whole ones, fair coins; symbols by their hint.

    Operands with a domain have numbers of that: of a variance below zero, or an index beyond its table, nothing is made.
    """
    made: list[Any] = []
    for i, example in enumerate(examples):
        if not isinstance(example, Tensor):
            made.append(hint_of(example))
            continue
        sizes = [hint_of(n) for n in example.shape]
        strides = [hint_of(n) for n in example.stride()]
        generator = torch.Generator().manual_seed(seed + i)
        made.append(_filled(example, sizes, strides, generator, (domains or {}).get(i, _ANY)))
    return made


def _filled(
    like: Tensor, sizes: list[int], strides: list[int], generator: torch.Generator, domain: Domain
) -> Tensor:
    # All the memory that is spanned is filled: elements may lie over each other, as in an expanded tensor.
    length = span(sizes, strides)
    drawn = [min(length, _DRAWN)]
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
    if length > _DRAWN:
        values = values.repeat(-(-length // _DRAWN))
    return values.as_strided(sizes, strides).requires_grad_(like.requires_grad)


def _within(values: Tensor, domain: Domain) -> Tensor:
    """Normal numbers, brought into a domain and off its ends, where a function may be infinite."""
    if values.dtype.is_complex or domain == _ANY:
        return values
    if math.isinf(domain.high):
        return domain.low + values.abs()
    if math.isinf(domain.low):
        return domain.high - values.abs()
    return domain.low + (domain.high - domain.low) * (0.02 + 0.96 * torch.special.ndtr(values))


def span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements of memory a tensor reaches over."""
    if any(n == 0 for n in sizes):
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))


def memory(value: Tensor) -> Tensor:
    """A copy of the memory that a tensor reaches over, as a vector; `as_strided` gives the tensor again."""
    length = span(value.shape, value.stride())
    return value.detach().as_strided((length,), (1,), value.storage_offset()).clone()


def passed(value: Any, written: bool) -> Any:
    """An operand as it is passed on: where it requires gradients no leaf, for autograd lets none be written.

    Nor does it let a view of a leaf; but what is only read need not be copied.
    """
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    if not written:
        return value.view_as(value)
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(
        value
    )


def hint_of(value: Any) -> Any:
    """A size as a number: a symbol's hint."""
    if isinstance(value, torch.SymInt):
        hint = value.node.hint
        return int(hint) if hint is not None else 2
    return value


@contextmanager
def random_state_kept() -> Generator[None]:
    """Run something that may draw random numbers and leave the generators as they were."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield
