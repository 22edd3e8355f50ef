"""Hooks that are registered for all modules are run by a compiled model, whenever they come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

import dovetail

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def after_linear(module: nn.Module, args: Any, result: Any) -> Any:
    return result + 1 if isinstance(module, nn.Linear) else None


def before_linear(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2,) if isinstance(module, nn.Linear) else None


def after_backward(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    return tuple(g * 3 for g in grad_input) if isinstance(module, nn.ReLU) else None


def before_backward(module: nn.Module, grad_output: Any) -> Any:
    return tuple(g * 5 for g in grad_output) if isinstance(module, nn.ReLU) else None


HOOKS: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (torch_modules.register_module_forward_hook, after_linear),
    (torch_modules.register_module_forward_pre_hook, before_linear),
    (torch_modules.register_module_full_backward_hook, after_backward),
    (torch_modules.register_module_full_backward_pre_hook, before_backward),
]


def results(model: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    x = X.clone().requires_grad_()
    y = model(x)
    y.sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("before", [False, True], ids=["later", "before"])
@pytest.mark.parametrize(("register", "hook"), HOOKS, ids=[hook.__name__ for _, hook in HOOKS])
def test_they_are_run_while_they_are_there(
    register: Callable[..., Any], hook: Callable[..., Any], before: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    reference = results(model)
    handle = register(hook) if before else None
    try:
        compiled = dovetail.compile(model, (X,), backends=["eager"])
        if handle is None:
            assert same(results(compiled), reference)
            handle = register(hook)
        expected = results(model)
        assert not same(expected, reference)
        assert same(results(compiled), expected)
    finally:
        if handle is not None:
            handle.remove()
    assert same(results(compiled), reference)
