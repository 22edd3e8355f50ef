"""What random spellings are drawn with: choices that leave a tag, and the ways a function becomes a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch._functorch.aot_autograd import aot_module, make_boxed_func
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from .references import Spelling

T = TypeVar("T")
DTYPES = {torch.bfloat16: "bf16", torch.float64: "f64"}


class Held(nn.Module):
    """A function whose last arguments are parameters of a module."""

    def __init__(self, function: Callable[..., Any], weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList([nn.Parameter(w, requires_grad=False) for w in weights])

    def forward(self, *args: Any) -> Any:
        return self.function(*args, *self.weights)


class Drawing:
    """Draws one spelling: every choice that has a name is among its variations."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.tags: set[str] = set()
        self.dtype = torch.float32
        self._inner: list[Tensor] = []

    def chance(self, probability: float, tag: str | None = None) -> bool:
        """Whether something that is this likely happens, which is a variation if it has a tag."""
        happens = self.rng.random() < probability
        if happens and tag:
            self.tags.add(tag)
        return happens

    def one(self, options: Mapping[str, T]) -> T:
        """One of several by name, which is a variation."""
        name = self.rng.choice(list(options))
        self.tags.add(name)
        return options[name]

    def mostly(self, usual: Mapping[str, T], hostile: Mapping[str, T], share: float = 0.1) -> T:
        """One of the usual ones, or of those that only look like them."""
        return self.one(hostile if self.chance(share) else usual)

    def any(self, options: Sequence[T]) -> T:
        """One of several that are no variations."""
        return self.rng.choice(list(options))

    def float(self, low: float = 0.1, high: float = 2.0) -> float:
        return round(self.rng.uniform(low, high), 3)

    def precision(self) -> torch.dtype:
        """The dtype of the operands from here on; mostly float32."""
        self.dtype = self.any([torch.float32] * 8 + list(DTYPES))
        if self.dtype in DTYPES:
            self.tags.add(DTYPES[self.dtype])
        return self.dtype

    def tensor(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*sizes).to(dtype or self.dtype)

    def flags(self, *sizes: int) -> Tensor:
        """Booleans."""
        return torch.rand(sizes) > 0.4

    def broadcast(self, *sizes: int) -> tuple[int, ...]:
        """Sizes that broadcast to these, of lower rank or with ones in it at times."""
        kept = list(sizes)
        if self.chance(0.2):
            kept[self.rng.randrange(len(kept))] = 1
            self.tags.add("broadcast")
        if self.chance(0.15) and len(kept) > 1:
            del kept[0]
            self.tags.add("lower_rank")
        return tuple(kept)

    def batches(self, inputs: Sequence[Tensor]) -> dict[int, tuple[int, ...]]:
        """The first dim of each input that has as many as the first of them, as dims that may be symbols."""
        first = inputs[0]
        if first.dim() < 3 or first.shape[0] < 2:
            return {}
        return {
            i: (0,) for i, x in enumerate(inputs) if x.dim() == first.dim() and x.shape[0] == first.shape[0]
        }

    def inner(self, value: Tensor) -> Tensor:
        """An inner value, which may escape."""
        self._inner.append(value)
        return value

    def spelling(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        *,
        weights: int = 0,
        symbolic: Mapping[int, Sequence[int]] | None = None,
        graphs: float = 0.15,
        escapes: float = 0.15,
        dialects: Sequence[str] = ("make_fx", "decomposed"),
    ) -> Spelling:
        """The program: the function as it is, of a module with its last `weights` arguments, or traced to operators.

        `symbolic` are the dims of inputs that may be symbols. `graphs` is the share that is traced.
        """
        escape = self.rng.random() if self.chance(escapes, "escape") else None

        def run(*args: Any) -> Any:
            self._inner.clear()
            result = function(*args)
            if escape is None or not self._inner:
                return result
            return result, self._inner[int(escape * len(self._inner))]

        program, given = self._placed(run, tuple(inputs), weights)
        dynamic = None
        if isinstance(program, Held) or not self.chance(graphs):
            dynamic = self._symbols(symbolic or {}, given)
        else:
            dialect = self.any(dialects)
            self.tags.add(dialect)
            program = _traced(program, given, dialect)
        return Spelling(program, given, frozenset(self.tags), dynamic)

    def _placed(
        self, function: Callable[..., Any], inputs: tuple[Any, ...], weights: int
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The weights as inputs, as parameters, or as constants that the function closes over."""
        place = self.any(["inputs", "parameters", "constants"]) if weights else "inputs"
        if place == "inputs":
            return function, inputs
        self.tags.add(place)
        kept, held = inputs[:-weights], inputs[-weights:]
        if place == "parameters":
            return Held(function, held), kept
        return (lambda *args: function(*args, *held)), kept

    def _symbols(self, dims: Mapping[int, Sequence[int]], inputs: tuple[Any, ...]) -> Any:
        if not dims or not self.chance(0.25):
            return None
        self.tags.add("symbolic")
        auto = torch.export.Dim.AUTO
        return ((*(dict.fromkeys(dims.get(i, ()), auto) or None for i in range(len(inputs))),),)


def _traced(function: Callable[..., Any], inputs: tuple[Any, ...], dialect: str) -> Any:
    if dialect == "make_fx":
        return make_fx(function)(*inputs)
    return make_fx(function, decomposition_table=core_aten_decompositions())(*inputs)


def backward_graph(
    loss: Callable[..., Tensor], operands: tuple[Tensor, ...], outputs: tuple[int, ...]
) -> tuple[GraphModule, tuple[Any, ...]]:
    """The backward graph that AOTAutograd makes of a loss, and what it is called with."""
    graphs: list[tuple[GraphModule, tuple[Any, ...]]] = []

    def keep(graph: GraphModule, inputs: Any) -> Any:
        graphs.append((graph, tuple(inputs)))
        return make_boxed_func(graph.forward)

    class Loss(nn.Module):
        def forward(self, *values: Tensor) -> Tensor:
            return loss(*values)

    compiled: Any = aot_module(Loss(), fw_compiler=keep, bw_compiler=keep)
    leaves = [x.clone().requires_grad_(i in outputs) for i, x in enumerate(operands)]
    compiled(*leaves).backward()
    return graphs[-1]
