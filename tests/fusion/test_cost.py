"""What regions save: bytes moved, launches, flops and memory, from shapes and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dovetail
from dovetail import zoo
from dovetail.fusion.candidates import PlannedRegion, Planner, Proposed
from dovetail.fusion.cost import Cost, Figures, Gain, Traffic
from dovetail.fusion.coverage import coverage
from dovetail.ir.dependencies import Index
from dovetail.ir.tensor_spec import reshapes_to_view
from dovetail.outlining.escapes import RegionDraft, resolve_escapes
from dovetail.outlining.outline import Request, make_drafts
from dovetail.rules.rule import Candidate, RuleContext
from tests.zoo_graphs import zoo_graph

X = torch.randn(4, 8)
N = X.nbytes


class Call(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def drafted(
    function: Any, names: str, *args: Tensor, escapes: str = "auto", **options: Any
) -> tuple[Figures, RegionDraft]:
    gm = dovetail.capture(Call(function), args, **options)
    index = Index(gm)
    (draft,) = make_drafts(index, [Request(names.split(), "k", escapes=escapes)])
    resolve_escapes(index, draft)
    return Figures(index), draft


def gain(function: Any, names: str, *args: Tensor, **options: Any) -> Gain:
    figures, draft = drafted(function, names, *args, **options)
    model = Traffic(launch_bytes=1000)
    apart, together = model.apart(figures, draft), model.together(figures, draft)
    estimate = model.gain(figures, draft)
    # The quick figures agree with the full ones.
    assert estimate.bytes_saved - estimate.bytes_recomputed == apart.bytes - together.bytes
    assert estimate.launches_saved == apart.launches - together.launches
    return estimate


def test_a_value_inside_is_neither_stored_nor_loaded() -> None:
    assert gain(lambda x: x.relu().exp(), "relu exp", X) == Gain(2 * N, 1, 0, 2 * N + 1000)


def test_an_operand_is_loaded_once_and_a_result_stored_once() -> None:
    estimate = gain(lambda x: (x.exp(), x.tanh()), "exp tanh", X)
    assert (estimate.bytes_saved, estimate.launches_saved) == (N, 1)


def test_a_value_that_is_returned_too_is_stored_but_not_loaded() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        a = x.relu()
        return a.exp(), a

    assert gain(both, "relu exp", X, escapes="output").bytes_saved == N


def test_what_is_done_a_second_time_is_counted() -> None:
    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a = x + y
        return a.exp(), a

    estimate = gain(both, "add exp", X, X + 1, escapes="duplicate")
    assert (estimate.bytes_saved, estimate.bytes_recomputed, estimate.launches_saved) == (N, 2 * N, 0)
    assert estimate.score == -N


def test_flops_done_a_second_time_count_beyond_the_elements() -> None:
    weight = torch.randn(16, 8)

    def both(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        a = F.linear(x, w)
        return a.exp(), a

    figures, draft = drafted(both, "linear exp", X, weight, escapes="duplicate")
    estimate = Traffic(launch_bytes=0, flops_per_byte=1).gain(figures, draft)
    out = 4 * 16
    assert estimate.score == estimate.bytes_saved - estimate.bytes_recomputed - (2 * out * 8 - out)


def test_views_parts_and_sizes_are_no_launches_and_move_nothing() -> None:
    def views(x: Tensor) -> Tensor:
        return x.t().unsqueeze(0).exp()

    estimate = gain(views, "t unsqueeze exp", X)
    assert (estimate.bytes_saved, estimate.launches_saved) == (0, 0)

    def parts(x: Tensor) -> Tensor:
        a, b = x.split(4, dim=1)
        return a.exp() + b

    estimate = gain(parts, "split exp add", X)
    # `exp` is half of x: neither stored nor loaded.
    assert (estimate.bytes_saved, estimate.launches_saved) == (N, 1)


def test_a_narrow_view_of_something_large_loads_only_what_it_shows() -> None:
    estimate = gain(lambda x: x[:1].exp().tanh(), "slice_1 exp tanh", X)
    assert estimate.bytes_saved == 2 * N // 4


def test_symbolic_sizes_count_by_their_hint() -> None:
    rows = torch.export.Dim("rows", min=2, max=64)
    estimate = gain(lambda x: x.relu().exp(), "relu exp", X, dynamic_shapes=[({0: rows},)])
    assert estimate.bytes_saved == 2 * N


def test_sizes_that_are_not_known_count_as_nothing() -> None:
    gm = torch.fx.symbolic_trace(lambda x: x.relu().exp())
    index = Index(gm)
    (draft,) = make_drafts(index, [Request(["relu", "exp"], "k")])
    resolve_escapes(index, draft)
    figures = Figures(index)
    assert Traffic(launch_bytes=7).gain(figures, draft) == Gain(0, 1, 0, 7)
    assert not figures.known(index.names["relu"])
    assert figures.flops(index.names["relu"]) == 0


def test_memory_held_one_by_one_and_together() -> None:
    figures, draft = drafted(lambda x: x.relu().exp().tanh(), "relu exp tanh", X)
    model = Traffic()
    elements = X.numel()
    # The operand, and two values at a time; together the operand and the result.
    assert model.apart(figures, draft) == Cost(6 * N, 3 * elements, 3, 3 * N)
    assert model.together(figures, draft) == Cost(2 * N, 3 * elements, 1, 2 * N)


@pytest.mark.parametrize(
    ("function", "args", "name", "flops"),
    [
        (lambda x, y: x @ y, (torch.randn(4, 8), torch.randn(8, 5)), "matmul", 2 * 4 * 8 * 5),
        (torch.bmm, (torch.randn(3, 4, 8), torch.randn(3, 8, 5)), "bmm", 2 * 3 * 4 * 8 * 5),
        (F.linear, (torch.randn(4, 8), torch.randn(5, 8)), "linear", 2 * 4 * 8 * 5),
        (
            F.conv2d,
            (torch.randn(2, 3, 8, 8), torch.randn(5, 3, 3, 3)),
            "conv2d",
            2 * 2 * 5 * 6 * 6 * 3 * 3 * 3,
        ),
        (
            F.scaled_dot_product_attention,
            tuple(torch.randn(1, 2, 6, 4) for _ in range(3)),
            "scaled_dot_product_attention",
            4 * 2 * 6 * 6 * 4,
        ),
        (torch.exp, (X,), "exp", X.numel()),
    ],
)
def test_flops(function: Any, args: tuple[Tensor, ...], name: str, flops: int) -> None:
    gm = dovetail.capture(Call(function), args)
    index = Index(gm)
    assert Figures(index).flops(index.names[name]) == flops


def test_a_reshape_that_is_a_view_launches_nothing() -> None:
    gm = dovetail.capture(Call(lambda x: torch.tanh(torch.exp(x).reshape(-1)) * 2), (torch.randn(4, 8),))
    entry = dovetail.explain(dovetail.fuse(gm, dovetail.rules.groups())).accepted[0]
    assert "reshape" in entry.nodes
    assert (entry.launches_saved, entry.bytes_saved) == (2, 4 * 32 * 4)


def lookups(e: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.embedding(a, e) + F.embedding(b, e))


TABLE, ROWS = torch.randn(1000, 8), torch.arange(5)
ROW_BYTES = 5 * 8 * 4


def test_lookups_load_the_rows_they_return() -> None:
    estimate = gain(lookups, "embedding embedding_1 add relu", TABLE, ROWS, ROWS + 7)
    assert estimate.bytes_saved == 6 * ROW_BYTES  # both rows and the sum, each stored and loaded


def test_two_selections_of_one_table_load_at_most_the_table() -> None:
    def twice(e: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return e.index_select(0, a) + e.index_select(0, b)

    figures, draft = drafted(twice, "index_select index_select_1 add", TABLE[:6], ROWS, ROWS + 1)
    together = Traffic().together(figures, draft)
    assert together.bytes == 6 * 8 * 4 + 2 * ROWS.nbytes + ROW_BYTES


def test_a_region_loads_of_a_table_what_its_operations_do() -> None:
    gm = dovetail.capture(Call(lookups), (TABLE, ROWS, ROWS + 7))
    inner = dovetail.outline(gm, ["embedding", "embedding_1", "add"], kind="inner")
    index = Index(inner)
    (draft,) = make_drafts(index, [Request(["inner_0", "relu"], "k")])
    resolve_escapes(index, draft)
    assert (
        Traffic().apart(Figures(index), draft).bytes
        == 2 * ROW_BYTES + 2 * ROWS.nbytes + ROW_BYTES + 2 * ROW_BYTES
    )


def test_what_is_freed_of_a_lookup_are_its_rows() -> None:
    gm = dovetail.capture(Call(lookups), (TABLE, ROWS, ROWS + 7))
    index = Index(gm)
    freed = Traffic().freed(Figures(index), index.names["embedding"])
    assert freed.bytes_saved == 2 * ROW_BYTES + ROWS.nbytes


def test_an_operand_that_is_repeated_is_loaded_once() -> None:
    estimate = gain(lambda x, y: x[:1].expand(4, 8) + y, "slice_1 expand add", X, X + 1)
    assert (estimate.bytes_saved, estimate.launches_saved) == (0, 0)


def test_what_only_a_clone_loads_is_not_what_members_load() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        a = x[1:].relu()
        return a + x[:1].exp(), a

    estimate = gain(both, "relu exp add", X, escapes="duplicate")
    assert estimate.bytes_recomputed == 3 * N // 4
    assert estimate.bytes_saved == 2 * N // 4 + 3 * N // 4


@pytest.mark.parametrize("name", zoo.names())
def test_no_region_moves_more_than_its_operations(name: str) -> None:
    gm = zoo_graph(name)
    context = RuleContext(gm)
    model, planner = Traffic(), Planner(context, Traffic())
    candidates = [p for rule in dovetail.rules.DEFAULT for p in rule.propose(context)]
    plans = [
        planner.plan(Proposed(c, dovetail.rules.DEFAULT[c.rule], 0), c.members)
        for c in candidates
        if isinstance(c, Candidate)
    ]
    drafts = [plan.draft for plan in plans if isinstance(plan, PlannedRegion)]
    for draft in drafts:
        before, after = model.apart(planner.figures, draft), model.together(planner.figures, draft)
        estimate = model.gain(planner.figures, draft)
        assert 0 <= after.bytes - estimate.bytes_recomputed <= before.bytes
    assert drafts
    ledger = dovetail.explain(dovetail.fuse(gm))
    saved = [entry.bytes_saved for entry in ledger.accepted]
    assert min(saved) >= 0
    assert sum(saved) <= coverage(gm).total.bytes


PACKED = torch.randn(2, 4, 48)


@pytest.mark.parametrize(
    ("function", "is_view"),
    [
        (lambda x: x.chunk(3, -1)[1].reshape(2, 4, 2, 8), True),
        (lambda x: x.chunk(3, -1)[1].unflatten(-1, (2, 8)), True),
        (lambda x: x.transpose(0, 1).reshape(4, 1, 2, 6, 8), True),
        (lambda x: x[:, ::2].flatten(1, 2), False),
        (lambda x: x.chunk(3, -1)[1].reshape(8, 16), True),
        (lambda x: x.chunk(3, -1)[1].reshape(2, 64), False),
        (lambda x: x.transpose(0, 1).reshape(-1), False),
        (lambda x: x[:1].expand(3, 4, 48).reshape(3, 192), True),
        (lambda x: x[:1].expand(3, 4, 48).reshape(-1), False),
        (lambda x: x[:0].transpose(0, 1).reshape(-1), True),
    ],
)
def test_a_reshape_is_a_view_where_the_strides_allow_it(function: Any, is_view: bool) -> None:
    gm = dovetail.capture(Call(function), (PACKED,))
    index = Index(gm)
    result = function(PACKED)
    assert is_view == (result.untyped_storage().data_ptr() == PACKED.untyped_storage().data_ptr())
    at = index.names[index.nodes[-1].all_input_nodes[0].name]
    assert Figures(index).free(at) == is_view


@given(st.data())
def test_views_by_strides_are_those_of_torch(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    steps = data.draw(st.lists(st.integers(0, 12), min_size=len(sizes), max_size=len(sizes)))
    reach = sum((size - 1) * step for size, step in zip(sizes, steps, strict=True)) + 1
    value = torch.zeros(reach).as_strided(sizes, steps)
    factors = data.draw(st.permutations([f for size in sizes for f in ((2, 2) if size == 4 else (size,))]))
    try:
        value.view(factors)
        is_view = True
    except RuntimeError:
        is_view = False
    assert reshapes_to_view(value, factors) == is_view


def test_symbolic_sizes_make_a_view_where_it_is_certain() -> None:
    rows = torch.export.Dim("rows", min=2, max=64)

    def packed(x: Tensor) -> tuple[Tensor, Tensor]:
        k = x.chunk(3, -1)[1]
        return k.reshape(k.shape[0], 4, 2, 8).exp(), k.transpose(0, 1).reshape(4 * k.shape[0], 16).exp()

    gm = dovetail.capture(Call(packed), (PACKED,), dynamic_shapes=[({0: rows},)])
    figures = Figures(Index(gm))
    free = [figures.free(i) for i, n in enumerate(figures.index.nodes) if "reshape" in str(n.target)]
    assert free == [True, False]
