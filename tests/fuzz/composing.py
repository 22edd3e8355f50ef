"""Composing random spellings: operands and where they come from, what else is returned, the dialect."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch.export import Dim
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Tracer
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.proxy import TraceError

from .references import Spelling

Keep = Callable[[Tensor], Tensor]
"""Notes an inner value, which the program may return too, and returns it."""

_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f64": torch.float64}
COMMON = frozenset({"f32", "bf16", "f64", "aot", "symbolic", "input", "parameter", "constant", "fx"})
"""Variations that matches of nearly every rule must have."""


class Sketch:
    """One spelling while it is composed: its random choices, and its operands in the order of the steps' arguments."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.tags: set[str] = set()
        self.operands: list[Tensor] = []
        self._weights: set[int] = set()
        self.dtype = self.pick(_DTYPES, (8, 1, 1))
        self.rows = self.sizes(rng.choice((1, 1, 2, 2, 2, 3)))

    def sizes(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.choice((1, 2, 3)) for _ in range(count))

    def chance(self, probability: float, tag: str = "") -> bool:
        happens = self.rng.random() < probability
        if happens and tag:
            self.tags.add(tag)
        return happens

    def pick(self, options: Mapping[str, Any], odds: Sequence[float] | None = None) -> Any:
        """One of several values, noting its name as a variation; names that start with `!` are hostile."""
        weights = odds or [0.25 if name.startswith("!") else 1.0 for name in options]
        (name,) = self.rng.choices(list(options), weights)
        self.tags.add(name)
        return options[name]

    def stream(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """An operand that the caller gives."""
        value = torch.randn(sizes).to(dtype or self.dtype)
        return self.given(value)

    def given(self, value: Tensor) -> Tensor:
        self.operands.append(value)
        return value

    def weight(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        """An operand that is an input, a parameter of a module or a constant."""
        self._weights.add(len(self.operands))
        return self.stream(*sizes, dtype=dtype)

    def spelling(self, steps: Callable[..., Tensor], *, alias: float = 0.06, escape: float = 0.1) -> Spelling:
        """The program that runs `steps(keep, *operands)`."""
        operands = list(self.operands)
        pairs = [
            (i, j)
            for j, b in enumerate(operands)
            for i, a in enumerate(operands[:j])
            if (a.shape, a.dtype) == (b.shape, b.dtype)
        ]
        at = list(range(len(operands)))
        if pairs and self.chance(alias, "aliased"):
            i, j = self.rng.choice(pairs)
            at[j] = i
        dialect = self.pick({"plain": "", "aot": "aot", "fx": "fx", "symbolic": "symbolic"}, (10, 4, 2, 1))
        homes = ("input", "constant") if dialect in ("aot", "fx") else ("input", "constant", "parameter")
        home = self.pick({name: name for name in homes})
        held = {i for i in set(at) if i in self._weights and home != "input"}
        inputs = tuple(operands[i] for i in sorted(set(at) - held))
        returned = self.rng.randrange(8) if self.chance(escape, "escape") else None
        own = nn.ParameterDict()
        if home == "parameter":
            own = nn.ParameterDict({str(i): nn.Parameter(operands[i], requires_grad=False) for i in held})

        def program(*values: Tensor) -> Any:
            given = dict(zip(sorted(set(at) - held), values, strict=True))
            given.update({i: own[str(i)] if home == "parameter" else operands[i] for i in held})
            kept: list[Tensor] = []

            def keep(value: Tensor) -> Tensor:
                kept.append(value)
                return value

            result = steps(keep, *(given[i] for i in at))
            return result if returned is None or not kept else (result, kept[returned % len(kept)])

        tags_kept = frozenset(self.tags - {"fx"}) if dialect == "fx" else frozenset(self.tags)
        if dialect == "aot":
            table = _core_table() if self.rng.random() < 0.3 else {}
            mode = self.rng.choices(("real", "fake", "symbolic"), (6, 2, 1))[0]
            pure = program if mode == "symbolic" else functionalize(program)
            traced = make_fx(pure, table, mode, _allow_non_fake_inputs=True)
            return Spelling(traced(*inputs), inputs, tags_kept)
        graph = _of_functions(program, len(inputs)) if dialect == "fx" else None
        if graph is not None:
            return Spelling(graph, inputs, tags_kept | {"fx"})
        model = _Held(program, own) if home == "parameter" else program
        dynamic = None
        if dialect == "symbolic":
            dynamic = (tuple({d: Dim.AUTO for d in range(max(1, t.dim() - 1)) if t.dim()} for t in inputs),)
        return Spelling(model, inputs, tags_kept, dynamic)


@functools.cache
def _core_table() -> dict[Any, Any]:
    return dict(core_aten_decompositions())


def _of_functions(program: Callable[..., Any], count: int) -> GraphModule | None:
    """The program as FX traces it, as functions and methods of torch; None where it looks at a value."""
    tracer, root = Tracer(), nn.Module()
    tracer.root, tracer.graph, tracer.tensor_attrs = root, Graph(), {}
    given = [tracer.proxy(tracer.graph.placeholder(f"x{i}")) for i in range(count)]
    try:
        tracer.create_node("output", "output", (tracer.create_arg(program(*given)),), {})
    except (TraceError, TypeError, RuntimeError):
        return None
    return GraphModule(root, tracer.graph)


class _Held(nn.Module):
    def __init__(self, program: Callable[..., Any], own: nn.ParameterDict) -> None:
        super().__init__()
        self.program, self.own = program, own

    def forward(self, *values: Tensor) -> Any:
        return self.program(*values)
