"""What operations cost, and what share of a graph is inside regions."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail import InvalidArgument, zoo
from dovetail.fusion.coverage import Coverage, Extent, GraphCosts, KindCoverage, coverage, operation_cost
from tests.fusion.helpers import Fixed
from tests.fusion.test_cost import Call
from tests.fusion.test_speed import Named, chain
from tests.zoo_graphs import zoo_graph

X = torch.randn(4, 8)
N = X.nbytes


def cost(function: object, name: str, *args: Tensor) -> tuple[int, int, int]:
    gm = dovetail.capture(Call(function), args)
    own = operation_cost(next(n for n in gm.graph.nodes if n.name == name))
    return own.bytes_read, own.bytes_written, own.flops


def test_an_elementwise_operation_has_a_flop_for_each_element() -> None:
    assert cost(lambda x: x + x.exp(), "add", X) == (2 * N, N, 32)


def test_a_value_that_is_read_twice_is_loaded_once() -> None:
    assert cost(lambda x: x * x, "mul", X) == (N, N, 32)


def test_a_reduction_has_a_flop_for_each_element_that_it_reads() -> None:
    assert cost(lambda x: x.sum(1), "sum_1", X) == (N, 16, 32)


def test_a_product_has_two_flops_for_each_multiplication() -> None:
    weight = torch.randn(16, 8)
    assert cost(F.linear, "linear", X, weight) == (N + weight.nbytes, 4 * 16 * 4, 2 * 4 * 8 * 16)


def test_a_transposed_convolution_multiplies_each_of_its_inputs_by_the_weight() -> None:
    x, weight = torch.randn(1, 2, 5, 5), torch.randn(2, 3, 2, 2)
    assert cost(F.conv_transpose2d, "conv_transpose2d", x, weight)[2] == 2 * x.numel() * 3 * 2 * 2


def test_a_contraction_by_indices_is_a_product() -> None:
    def contracted(x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("bij,bjk->bik", x, y)

    assert cost(contracted, "einsum", torch.randn(2, 3, 4), torch.randn(2, 4, 5))[2] == 2 * 2 * 3 * 4 * 5


def test_a_grouped_product_multiplies_each_row_by_the_matrix_of_its_group() -> None:
    ends = torch.tensor([2, 8], dtype=torch.int32)
    rows, columns = torch.randn(8, 16).bfloat16(), torch.randn(16, 8).bfloat16()
    weights = torch.randn(2, 16, 8).bfloat16()

    def grouped(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(a, b, offs=ends)

    assert cost(grouped, "_grouped_mm", rows, weights, ends)[2] == 2 * 8 * 16 * 8
    # The columns of each group are summed over: all of them once.
    assert cost(grouped, "_grouped_mm", columns, rows, ends)[2] == 2 * 16 * 8 * 16


def test_a_reshape_costs_nothing_unless_it_copies() -> None:
    assert cost(lambda x: x.reshape(8, 4).exp(), "reshape", X) == (0, 0, 0)
    assert cost(lambda x: x.t().reshape(4, 8).exp(), "reshape", X) == (N, N, 32)


def test_a_view_costs_nothing() -> None:
    gm = dovetail.capture(Call(lambda x: x.t().exp()), (X,))
    costs = GraphCosts(gm)
    view = next(n for n in gm.graph.nodes if n.op == "call_function")
    assert costs.cost(view).is_free
    assert costs.cost(view).bytes == costs.cost(view).flops == 0


def test_what_a_broadcast_repeats_is_loaded_once() -> None:
    assert cost(lambda x: x[:1].expand(1000, 8).exp(), "exp", X) == (8 * 4, 1000 * 8 * 4, 8000)


def test_a_lookup_reads_the_rows_it_returns() -> None:
    table, at = torch.randn(1000, 8), torch.tensor([3, 5])
    assert cost(F.embedding, "embedding", at, table) == (at.nbytes + 2 * 8 * 4, 2 * 8 * 4, 16)


def test_symbolic_sizes_count_by_their_example() -> None:
    gm = dovetail.capture(Call(torch.exp), (X,), dynamic_shapes={"args": ({0: torch.export.Dim.DYNAMIC},)})
    assert coverage(gm).total == Extent(1, 1, 2 * N, 32)


def test_without_recorded_values_there_are_operations_but_no_figures() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x.exp().tanh())
    assert coverage(gm).total == Extent(2, 2, 0, 0)


def test_a_node_of_another_graph_is_refused() -> None:
    one, other = (dovetail.capture(Call(torch.exp), (X,)) for _ in range(2))
    with pytest.raises(InvalidArgument, match="not a node of this graph"):
        GraphCosts(one).cost(next(iter(other.graph.nodes)))


def test_shares_are_of_the_operations_inside_regions() -> None:
    gm = dovetail.capture(Call(lambda x: x.exp().tanh().sum(1)), (X,))
    part = coverage(dovetail.outline(gm, ["exp", "tanh"], kind="pair"))
    assert part.total == Extent(3, 3, 5 * N + 16, 96)
    assert part.inside == Extent(2, 2, 4 * N, 64)
    assert part.kinds == (KindCoverage("pair", 1, part.inside),)
    assert [operation.node.name for operation in part.outside] == ["sum_1"]
    assert (part.operations_share, part.flops_share) == (2 / 3, 64 / 96)
    assert part.bytes_share == 4 * N / (5 * N + 16)


def test_a_call_costs_what_its_operations_cost() -> None:
    gm = dovetail.capture(Call(lambda x: x.exp().tanh().sum(1)), (X,))
    call = dovetail.regions(dovetail.outline(gm, ["exp", "tanh"], kind="pair"))[0].node
    assert (operation_cost(call).bytes, operation_cost(call).flops) == (4 * N, 64)


def test_regions_within_regions_count_once() -> None:
    gm = dovetail.capture(Call(lambda x: x.exp().tanh().relu()), (X,))
    inner = dovetail.outline(gm, ["exp", "tanh"], kind="inner")
    both = coverage(dovetail.outline(inner, ["inner_0", "relu"], kind="outer"))
    assert both.inside == both.total == Extent(3, 3, 6 * N, 96)
    assert [(k.kind, k.regions, k.extent.operations) for k in both.kinds] == [("outer", 1, 3)]
    assert [(k.kind, k.regions, k.extent.operations) for k in both.nested] == [("inner", 1, 2)]


@pytest.mark.parametrize(
    ("copies", "inside"), [(1, 1), (2, 3)], ids=["original outside", "original in another region"]
)
def test_copies_of_one_operation_count_once(copies: int, inside: int) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        a = x.relu()
        return a.exp(), a.tanh()

    gm = dovetail.capture(Call(function), (X,))
    fused = gm
    for name in ("exp", "tanh")[:copies]:
        fused = dovetail.outline(fused, ["relu", name], kind="k", escapes="duplicate")
    assert coverage(fused).total == coverage(gm).total
    assert coverage(fused).inside.operations == inside


def test_a_copy_counts_where_the_original_is_gone() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        a = x.exp()
        return (a + 1).tanh(), (a * 2).relu()

    gm = dovetail.capture(Call(function), (X,))
    both = Fixed("k", "exp add tanh", "exp mul relu", escapes="duplicate")
    fused = dovetail.fuse(gm, both, cost=dovetail.Traffic(launch_bytes=1 << 30))
    assert [r.nodes for r in dovetail.regions(fused)] == [("exp", "add", "tanh"), ("exp", "mul", "relu")]
    assert coverage(fused).total == coverage(fused).inside == coverage(gm).total


def test_an_empty_graph_has_no_shares() -> None:
    nothing = coverage(dovetail.capture(nn.Identity(), (X,)))
    assert nothing == Coverage()
    assert nothing.flops_share == 0


@pytest.mark.parametrize("name", zoo.names())
def test_fusing_changes_no_total(name: str) -> None:
    gm = zoo_graph(name)
    fused = coverage(dovetail.fuse(gm))
    assert fused.total == coverage(gm).total
    assert 0 < fused.operations_share <= 1
    assert fused.inside.operations + len(fused.outside) == fused.total.operations


def test_a_compiled_model_has_the_sum_of_its_graphs() -> None:
    fast = dovetail.compile(Call(lambda x: (x.exp() + 1).tanh()), (X,), backends=["eager"])
    once = coverage(fast)
    assert once.regions > 0
    with torch.no_grad():
        fast(torch.randn(3, 5, dtype=torch.float64))
    assert coverage(fast).total.operations == 2 * once.total.operations


def test_time_is_linear_in_the_graph() -> None:
    def seconds(count: int) -> float:
        gm, sets = chain(count)
        fused = dovetail.fuse(gm, Named(sets[: count // 8]), rounds=1)
        times: list[float] = []
        for _ in range(3):
            start = time.thread_time()
            coverage(fused)
            times.append(time.thread_time() - start)
        return min(times)

    assert seconds(16_000) < 16 * seconds(2_000)


def test_a_value_that_arrives_broadcast_costs_the_same_inside_a_region() -> None:
    def broadcast(x: Tensor, y: Tensor) -> Tensor:
        return x.unsqueeze(0).expand(16, 4, 8) + y

    gm = dovetail.capture(Call(broadcast), (X, torch.randn(16, 4, 8)))
    fused = dovetail.outline(gm, ["add"], kind="sum")
    assert coverage(fused).total == coverage(gm).total
