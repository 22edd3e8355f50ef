"""Constants that a pass computes once and the graph owns from then on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from dovetail.graph.module import Program, attribute


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

    def installed(self, program: Program) -> Program:
        """The program with the constants registered on it."""
        for name, value in self._made.items():
            program.register_buffer(name, value, persistent=False)
        return program


def computed(gm: GraphModule, node: Node) -> Tensor:
    """The numbers behind an attribute of a graph, or behind a view or cast of one."""
    chain = [node]
    while chain[-1].op != "get_attr":
        chain.append(chain[-1].all_input_nodes[0])
    value: Any = attribute(gm, cast("str", chain[-1].target))
    for step in reversed(chain[:-1]):
        held = value
        args = map_arg(step.args, lambda _, held=held: held)
        kwargs = map_arg(step.kwargs, lambda _, held=held: held)
        value = cast("Any", step.target)(*cast("tuple[Any, ...]", args), **cast("dict[str, Any]", kwargs))
    return cast("Tensor", value)
