"""Sibling products as one wider product."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, checked_init
from dovetail.graph.index import Index
from dovetail.graph.module import require_graph, without_collector
from dovetail.passes.base import Finding, Pass, require_fuel
from dovetail.passes.parallel.guards import Guard, pays
from dovetail.passes.parallel.planning import Plan, make_plan
from dovetail.passes.parallel.writing import write_plan


@checked_init()
@dataclass(frozen=True, repr=False)
class MergeParallel(Pass):
    """Run sibling linears or convolutions as one wider product.

    Needs: a graph with values, and products that read the same value and agree in everything but their width; their
    weights are parameters, buffers, constants or inputs. Operations of a region are not touched. Run `Cleanup` first
    where the shared value may be computed twice.

    Leaves: one product of the joined weights, and each result as a slice of it. What follows every branch alike and
    works column by column (activations, batch norm in eval mode, a scale for each column) is done before slicing. A
    slice is copied where it must be memory of its own: returned, written, read by a region. Values are equal within
    float tolerance, not bit for bit: a wider product may sum in another order.

    Weights are joined by a `cat` in the graph, so parameters, `state_dict` and training stay as they are, and the
    joining is paid at each call. Frozen weights are not joined with trained ones. A branch that no loss reaches gets
    gradients of zero where it had none. With `materialise` weights are joined once, into buffers that no `state_dict`
    has: the way to go for inference, where reading the weights is what costs. They are joined again before the next
    call when a weight was written, and within `weight_check_interval` calls where no version counter shows it;
    gradients do not reach the parameters.

    `guard` is shown the branches (`Branch`) and returns None or a `Decline`; None for no guard. The default, `pays`,
    declines what is clearly no gain. `fuel` stops after so many merges.
    """

    min_branches: int = 2
    guard: Guard | None = pays
    materialise: bool = False
    fuel: int | None = None

    def __post_init__(self) -> None:
        least = self.min_branches
        if not isinstance(least, int) or isinstance(least, bool) or least < 2:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"min_branches {least!r}: give the least number of siblings, 2 and more.")
        if self.guard is not None and not callable(self.guard):
            raise InvalidArgument(f"guard {self.guard!r} is not a function of the branches.")
        require_fuel(self.fuel)

    def run(self, gm: GraphModule) -> GraphModule:
        """The graph with sibling products merged; the very graph it was given if there are none."""
        with without_collector():
            index = Index(require_graph(gm))
            index.require_order()
            plan = self._plan(index)
            return write_plan(index, plan, materialise=self.materialise) if plan.joints else gm

    def explain(self, gm: GraphModule) -> tuple[Finding, ...]:
        """Which products would be merged, and why others that read the same value would not."""
        return tuple(self._plan(Index(require_graph(gm))).findings)

    def _plan(self, index: Index) -> Plan:
        return make_plan(
            index,
            min_branches=self.min_branches,
            guard=self.guard,
            fuel=self.fuel,
            materialise=self.materialise,
        )
