"""torch's Inductor, one body at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

import torch

from dovetail.graph.module import Body
from dovetail.lowering.backend import Answer, Backend, Compiled
from dovetail.lowering.flattening import flat
from dovetail.outlining.region import Region
from dovetail.rules.rule import Decline


class Inductor(Backend):
    """Compiles a region with `torch._inductor.standalone_compile`; options are Inductor's own."""

    name = "inductor"
    trains = True

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = dict(options or {})
        self.version = f"1 {torch.__version__}"

    @property
    def options(self) -> Mapping[str, Any]:
        return self._options

    def supports(self, region: Region) -> Answer:
        if any(word not in ("writes", "random") for word in region.effects):
            return Decline(f"it has effects ({', '.join(region.effects)}) that must stay where they are")
        return True

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        import torch._inductor as inductor

        graph = flat(cast("Body", region.body))
        dynamic = any(
            isinstance(n, torch.SymInt) for e in examples if isinstance(e, torch.Tensor) for n in e.shape
        )
        with _backward_at_once():
            return inductor.standalone_compile(
                graph,
                list(examples),
                dynamic_shapes="from_graph" if dynamic else "from_example_inputs",
                options=dict(self._options),
            )


@contextlib.contextmanager
def _backward_at_once() -> Generator[None]:
    """Compile forward and backward together, and keep what backward reads, so that it can run twice."""
    import torch._functorch.config as config

    wanted = {"force_non_lazy_backward_lowering": True, "donated_buffer": False}
    with config.patch({k: v for k, v in wanted.items() if hasattr(config, k)}):  # pyright: ignore
        yield
