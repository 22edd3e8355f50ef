"""What cannot be captured is refused with the user's line and advice, and the model is left as it was."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dovetail.errors import CaptureError, InvalidArgument
from dovetail.frontend.capture import capture


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0
        self.log: list[int] = []


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -grads[0]


class Branches(Base):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return x * 2


class Prints(Base):
    def forward(self, x: Tensor) -> Tensor:
        print("shape", x.shape)
        return x


class Counts(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


class Logs(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.log.append(1)
        return x


class Remembers(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return x


class Infers(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            y = self.linear(x)
        return y * 2


class Reverses(Base):
    def forward(self, x: Tensor) -> Tensor:
        return Reverse.apply(self.linear(x))


class Checkpoints(Base):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.linear, self.linear(x), use_reentrant=True)


class Hooks(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.register_hook(lambda grad: grad * 2)
        return y


class Clamps(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(0, 1)
        return self.linear(x)


class Numpy(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.from_numpy(x.numpy())


STRANGER = nn.Parameter(torch.ones(4))


class Borrows(Base):
    def forward(self, x: Tensor) -> Tensor:
        return x * STRANGER


REFUSED = [
    (Branches, "if x.sum() > 0:", "torch.cond"),
    (Checkpoints, "return checkpoint(", "use_reentrant=False"),
    (Prints, 'print("shape", x.shape)', "Print outside"),
    (Counts, "self.calls += 1", "buffer"),
    (Logs, "self.log.append(1)", "buffer"),
    (Remembers, "self.last = x * 2", "register_buffer"),
    (Infers, "with torch.inference_mode():", "no_grad"),
    (Reverses, "Reverse.apply", "custom_op"),
    (Hooks, "y.register_hook", "custom_op"),
    (Clamps, "self.linear.weight.clamp_", "requires_grad_"),
    (Numpy, "x.numpy()", "rewrite"),
    (Borrows, "x * STRANGER", "attribute of the module"),
]


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize(("kind", "line", "advice"), REFUSED, ids=[row[0].__name__ for row in REFUSED])
def test_refused_with_the_line_and_advice(
    kind: type[Base], line: str, advice: str, strict: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    if strict and kind in (Clamps, Numpy):
        pytest.skip("reported by the strict exporter in words of its own")
    model = kind()
    with pytest.raises(CaptureError) as caught:
        capture(model, (torch.randn(3, 4),), strict=strict)
    message = str(caught.value)
    assert f"{__file__}:" in message
    assert line in message
    assert advice in message
    assert vars(model).keys() == vars(Base()).keys()
    assert (model.calls, model.log) == (0, [])
    assert capfd.readouterr() == ("", "")


def test_the_cause_is_chained() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Branches(), (torch.randn(3, 4),))
    assert caught.value.__cause__ is not None


def test_an_exception_that_the_caller_handles_is_not_blamed() -> None:
    try:
        capture(Prints(), (torch.randn(3, 4),))
    except CaptureError:
        with pytest.raises(CaptureError) as caught:
            capture(Branches(), (torch.randn(3, 4),))
    assert "if x.sum() > 0:" in str(caught.value)


def test_patched_functions_are_put_back() -> None:
    before = (print, torch.autograd.Function.__dict__["apply"], Tensor.register_hook)
    with pytest.raises(CaptureError):
        capture(Prints(), (torch.randn(3, 4),))
    assert before == (print, torch.autograd.Function.__dict__["apply"], Tensor.register_hook)
    assert not Prints()._forward_hooks


def test_custom_backward_is_fine_where_nothing_needs_gradients() -> None:
    model = Reverses().requires_grad_(False)
    x = torch.randn(3, 4)
    assert torch.equal(capture(model, (x,))(x), model(x))


def test_an_argument_changed_by_python_is_refused() -> None:
    def forward(x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x)
        return x

    with pytest.raises(CaptureError, match="Return the new values"):
        capture(forward, (torch.ones(2), [torch.ones(2)]))


def write_first(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    return x * y


def test_example_inputs_that_share_memory_are_refused_when_written() -> None:
    x = torch.ones(3)
    with pytest.raises(CaptureError, match="share memory"):
        capture(write_first, (x, x))


def test_a_parameter_out_of_reach_is_refused() -> None:
    hidden = [nn.Parameter(torch.ones(4))]
    with pytest.raises(CaptureError, match="does not own"):
        capture(lambda x: x * hidden[0], (torch.ones(3, 4),))


def test_names_that_a_graph_module_needs_are_refused() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.graph = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.graph(x)

    with pytest.raises(CaptureError, match="'graph'"):
        capture(Named(), (torch.ones(3, 4),))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: capture(nn.Linear(4, 4), torch.ones(3, 4)), InvalidArgument, "Write \\(x,\\)"),
        (lambda: capture(nn.Linear(4, 4), (), [1]), InvalidArgument, "dict"),
        (lambda: capture(3), InvalidArgument, "not a int"),
        (lambda: capture(nn.Linear(4, 4), ()), CaptureError, "missing a required argument: 'input'"),
        (lambda: capture(nn.Linear(4, 4), (torch.ones(3, 5),)), CaptureError, "linear|reduction"),
    ],
)
def test_wrong_arguments(call: Callable[[], Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_sizes_that_do_not_hold_are_refused_with_the_suggestion() -> None:
    batch = torch.export.Dim("batch", max=64)

    def forward(x: Tensor) -> Tensor:
        torch._check(x.shape[0] < 50)
        return x * 2

    with pytest.raises(CaptureError, match="49"):
        capture(forward, (torch.ones(4, 2),), dynamic_shapes={"x": {0: batch}})


def test_warnings_of_the_users_own_code_come_through() -> None:
    def forward(x: Tensor) -> Tensor:
        warnings.warn("mine", UserWarning, stacklevel=1)
        return x

    with pytest.warns(UserWarning, match="mine"):
        capture(functools.partial(forward), (torch.ones(2),))


def test_a_refused_capture_leaves_no_mode_behind() -> None:
    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("a")

    with pytest.raises(CaptureError):
        capture(Raises(), (torch.ones(3),))
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._len_torch_dispatch_stack() == 0
