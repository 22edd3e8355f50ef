"""Constants that a pass computes once and the graph owns from then on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dovetail.graph.derived import Compute, Derivation
from dovetail.graph.keys import DERIVED
from dovetail.graph.module import Program, attribute
from dovetail.graph.pickling import overload_named
from dovetail.graph.weight_guard import sentinel_of


class Names:
    """Names that neither a node nor an attribute of a graph has."""

    def __init__(self, gm: GraphModule) -> None:
        self._taken = {node.name for node in gm.graph.nodes}
        self._taken.update(gm._modules, gm._parameters, gm._buffers, vars(gm), dir(type(gm)))
        self._next: dict[str, int] = {}

    def new(self, stem: str) -> str:
        number = self._next.get(stem, 0)
        while (name := f"{stem}_{number}") in self._taken:
            number += 1
        self._next[stem] = number + 1
        self._taken.add(name)
        return name


class Constants:
    """Constants on their way into a graph: buffers that move with it, and that no `state_dict` has."""

    def __init__(self, gm: GraphModule, names: Names) -> None:
        self._gm, self._names = gm, names
        self._made: dict[str, Tensor] = {}
        self._derivations: list[Derivation] = []

    def add(self, stem: str, compute: Callable[[], Tensor]) -> str:
        """Compute a constant now, on the numbers as they are, and return the attribute it will have."""
        return self.add_all([stem], lambda: (compute(),))[0]

    def add_all(self, stems: Sequence[str], compute: Callable[[], Sequence[Tensor]]) -> list[str]:
        """The same for several that are computed together."""
        # Inference tensors could not be saved for a backward later.
        with unset_fake_temporarily(), torch.inference_mode(False), torch.no_grad():
            values = [value.detach() for value in compute()]
        names = [self._names.new(stem) for stem in stems]
        self._made.update(zip(names, values, strict=True))
        return names

    def derive(self, stems: Sequence[str], sources: Sequence[str | None], compute: Compute) -> list[str]:
        """Constants that are a function of weights of the graph, and are computed again where these are written."""
        held = {source: attribute(self._gm, source) for source in sources if source is not None}
        counters = dict.fromkeys(filter(None, map(sentinel_of, held)))
        held |= {c: value for c in counters if isinstance(value := attribute(self._gm, c), Tensor)}
        names = [self._names.new(stem) for stem in stems]
        made = Derivation(names, sources, compute, [c for c in counters if c in held])
        self._made.update(zip(names, made.evaluate(held), strict=True))
        self._derivations.append(made)
        return names

    def installed(self, program: Program) -> Program:
        """The program with the constants registered on it."""
        for name, value in self._made.items():
            program.register_buffer(name, value, persistent=False)
        record_derivations(program, self._derivations)
        return program


def record_derivations(program: Program, derivations: Sequence[Derivation]) -> None:
    """Let a program keep some of its buffers up to date with what they are computed from."""
    if derivations:
        program.meta = {**program.meta, DERIVED: (*program.meta.get(DERIVED, ()), *derivations)}


@dataclass(frozen=True)
class Concatenated:
    """Weights side by side, each viewed or cast as it was in the graph, and zeros of some width in between."""

    dim: int
    parts: tuple[Part, ...]

    def __call__(self, sources: Sequence[Tensor | None]) -> Sequence[Tensor]:
        values = iter(source for source in sources if source is not None)
        known = [part if isinstance(part, int) else _dressed(next(values), part) for part in self.parts]
        like = next(value for value in known if isinstance(value, Tensor))
        return [torch.cat([like.new_zeros(v) if isinstance(v, int) else v for v in known], self.dim)]


Steps = tuple[tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]
"""Operators by name or functions, each with its arguments; `...` is where the value goes."""
Part = int | Steps


def chain_of(node: Node) -> tuple[str, Steps]:
    """The attribute behind a node, and the views and casts between them."""
    steps: list[Any] = []
    while node.op != "get_attr":
        args, kwargs = (map_arg(g, lambda _: cast("Any", ...)) for g in (node.args, dict(node.kwargs)))
        # Operators cannot be pickled.
        target = node.target.name() if isinstance(node.target, OpOverload) else node.target
        steps.append((target, tuple(cast("Any", args)), tuple(cast("Any", kwargs).items())))
        node = node.all_input_nodes[0]
    return cast("str", node.target), tuple(reversed(steps))


def _dressed(value: Tensor, steps: Steps) -> Tensor:
    for target, args, kwargs in steps:
        call = overload_named(target) if isinstance(target, str) else target
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        args, keywords = pytree.tree_unflatten([value if leaf is ... else leaf for leaf in leaves], spec)
        value = call(*args, **keywords)
    return value
