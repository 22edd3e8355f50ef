"""Calls whose effects can be seen from outside, for generated programs.

Reproducer scripts carry this file's text as it is, so it imports nothing but torch and the standard library.
"""

import operator

import torch
import torch.nn.functional as F
from torch import nn

LOG: list[tuple[object, ...]] = []


def record(what: str, tag: int, x: torch.Tensor) -> None:
    """Note that something ran, when, and on which numbers."""
    try:
        numbers = str(x.detach().tolist())
    except RuntimeError:  # no numbers while only shapes are looked at
        numbers = "?"
    LOG.append((what, tag, numbers))


@torch.library.custom_op("dovetail_fuzz::note", mutates_args=())
def note(x: torch.Tensor, tag: int) -> None:
    """An effect that returns nothing and is declared nowhere: only its position tells."""
    record("note", tag, x)


@torch.library.custom_op("dovetail_fuzz::bump", mutates_args={"x"})
def bump(x: torch.Tensor, by: float) -> None:
    x.add_(by)


@torch.library.custom_op("dovetail_fuzz::swap", mutates_args={"x", "y"})
def swap(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Writes two arguments and returns a value of its own."""
    old = x.clone()
    x.copy_(y)
    y.copy_(old)
    return old


@torch.library.custom_op("dovetail_fuzz::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


note.register_fake(lambda x, tag: None)
bump.register_fake(lambda x, by: None)
swap.register_fake(lambda x, y: torch.empty_like(x))
twice.register_fake(lambda x: torch.empty_like(x))


def shout(x: torch.Tensor, tag: int) -> torch.Tensor:
    """A Python function that FX cannot look into; it acts on the world and returns a value."""
    record("shout", tag, x)
    return x + 1


def overwrite(x: torch.Tensor, value: float) -> torch.Tensor:
    """A Python function that writes its argument and returns it."""
    return x.fill_(value)


def gather(parts: dict[str, torch.Tensor], *, also: list[torch.Tensor]) -> torch.Tensor:
    """Takes tensors inside a dict and a list."""
    total = parts["a"] * 1
    for x in [*list(parts.values())[1:], *also]:
        total = total + x
    return total


def quietly(function):  # type: ignore[no-untyped-def]
    """The function, run without gradients."""

    def run(*args, **kwargs):  # type: ignore[no-untyped-def]
        with torch.no_grad():
            return function(*args, **kwargs)

    return run


class Tally(nn.Module):
    """Counts its calls in a buffer, by writing it or by putting another in its place."""

    count: torch.Tensor

    def __init__(self, rebinds: bool = False) -> None:
        super().__init__()
        self.rebinds = rebinds
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rebinds:
            self.count = self.count + 1
        else:
            self.count.add_(1)
        return x * self.count


class Counter(nn.Module):
    """A leaf nobody can know: counts its calls in a buffer and says so."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        record("counter", 0, x)
        return x * self.count


def adder() -> torch.fx.GraphModule:
    """A graph as a child module: adds a buffer of its own into its argument in place."""
    root = nn.Module()
    root.register_buffer("step", torch.full((), 0.5))
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    step = graph.get_attr("step")
    written = graph.call_function(torch.ops.aten.add_.Tensor, (x, step))
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (written, y)))
    return torch.fx.GraphModule(root, graph)


def branch(by: float) -> torch.fx.GraphModule:
    """One arm of a `cond`."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, by)),))
    return torch.fx.GraphModule(nn.Module(), graph)


__all__ = [
    "F",
    "LOG",
    "Counter",
    "Tally",
    "adder",
    "branch",
    "gather",
    "nn",
    "operator",
    "overwrite",
    "quietly",
    "shout",
]
