"""Writes to weights that the weights themselves do not count."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

_steps = [0]


def fused_steps() -> int:
    """How many steps optimizers made by fused kernels since this was first asked.

    They write parameters without raising their versions: whoever goes by versions must go by this number too.
    """
    _watch()
    return _steps[0]


@functools.cache
def _watch() -> None:
    """Look at every step from now on; not before somebody holds to what steps may change."""
    register_optimizer_step_post_hook(_count)


def _count(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(group.get("fused") for group in optimizer.param_groups):
        _steps[0] += 1
