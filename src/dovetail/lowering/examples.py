"""Operands for compiling: fake tensors with the sizes, strides and gradient flags of the calls to come."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dovetail.lowering.domains import Domain
from dovetail.lowering.situation import NumberSpec, Situation, TensorSpec

_ANY = Domain()
_DRAWN = 262_139
"""Most numbers drawn for one tensor; larger ones repeat them. A prime, so that no two rows of usual lengths are equal:
weights of a real model would take longer to draw, on one core, than the code that is tried takes to compile."""


def fake_examples(situation: Situation, values: Sequence[Any]) -> list[Any]:
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
