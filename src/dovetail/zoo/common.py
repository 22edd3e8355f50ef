"""What the models of the zoo share: inputs, seeding, sizes, and the norm several of them use."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

WEIGHT_SEED = 1234

C = TypeVar("C", bound="DataclassInstance")


@dataclass(frozen=True)
class Inputs:
    """One call of a model: `model(*args, **kwargs)`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Build(Protocol):
    """Makes a model of a named size, in train mode, with the same weights every time."""

    def __call__(self, size: str = "tiny", **overrides: Any) -> nn.Module: ...


class ExampleInputs(Protocol):
    """Makes inputs that fit the model of the same size."""

    def __call__(self, size: str = "tiny", *, batch: int = 2, seed: int = 0) -> Inputs: ...


class RMSNorm(nn.Module):
    """Root-mean-square norm that works in float32 and returns the dtype it was given."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(variance + self.eps)
        return self.weight * wide.to(x.dtype)


def pick(sizes: Mapping[str, C], size: str) -> C:
    """Return the configuration of a size."""
    if size not in sizes:
        raise ValueError(f"unknown size '{size}'; the sizes are {', '.join(sizes)}")
    return sizes[size]


def build_model(
    model: Callable[[C], nn.Module], sizes: Mapping[str, C], size: str, overrides: Mapping[str, Any]
) -> nn.Module:
    """Make a model with fixed weights, leaving the global random state as it was."""
    config = pick(sizes, size)
    known = [field.name for field in fields(config)]
    for name in overrides:
        if name not in known:
            raise TypeError(f"unknown override '{name}'; the fields are {', '.join(known)}")
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would also reseed accelerators, which a fork without devices does not restore.
        torch.default_generator.manual_seed(WEIGHT_SEED)
        built = model(replace(config, **overrides))
        _unsettle(built)
    return built


def require_multiple(total_name: str, total: int, part_name: str, part: int) -> None:
    """Refuse a configuration whose `total` cannot be split into parts of equal size."""
    if total % part:
        raise ValueError(f"{total_name}={total} is not a multiple of {part_name}={part}; change one of them")


def generator(seed: int) -> torch.Generator:
    """Return a random source of its own, so that making inputs leaves the global one alone."""
    return torch.Generator().manual_seed(seed)


def _unsettle(model: nn.Module) -> None:
    # Norm weights of one, biases of zero and untouched running statistics
    # would let a rewrite drop them and still give equal results.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.get_buffer("running_mean"), std=0.1)
                nn.init.uniform_(module.get_buffer("running_var"), 0.5, 1.5)
