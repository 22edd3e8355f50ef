"""What looks like a match and is none: each near the line, beside what is on the right side of it."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, GraphModule, symbolic_trace

import dovetail
from dovetail.rules.patterns.alternatives import Const, optional
from dovetail.rules.patterns.pattern_rule import rule
from dovetail.rules.rule import Decline
from tests.rules.helpers import declined, matches, outlined, proposals
from tests.rules.match_semantics import wrong

VECTOR = torch.randn(4)


def one(function: Any) -> Any:
    return dovetail.capture(function, (VECTOR,))


def test_a_reduction_behind_a_view_must_add_up_the_same_elements() -> None:
    @rule(kind="k", through="views")
    def summed(x):
        return (x * 2).sum(0)

    x = torch.randn(2, 3, 4)
    same = dovetail.capture(lambda x: (x * 2).reshape(1, 2, 3, 4).sum(1), (x,))
    assert len(matches(summed, same)) == 1
    other = dovetail.capture(lambda x: (x * 2).reshape(3, 2, 1, 4).sum(1), (x,))
    assert declined(summed, other) == ["its dtype or shape is not what the pattern would compute"]


def test_a_sum_behind_a_view_must_pair_the_same_elements() -> None:
    @rule(kind="k", through="views")
    def shifted(x, y):
        return (x * 2) + y

    x = torch.randn(2, 6)
    rows = dovetail.capture(lambda x, y: (x * 2).reshape(2, 1, 6) + y, (x, torch.randn(6)))
    assert len(matches(shifted, rows)) == 1
    columns = dovetail.capture(lambda x, y: (x * 2).reshape(3, 2, 2) + y, (x, torch.randn(2, 1)))
    assert declined(shifted, columns)
    direct = dovetail.capture(lambda x, y: y + (x * 2), (x, torch.randn(2, 1)))
    assert len(matches(shifted, direct)) == 1


def test_a_product_behind_a_view_must_meet_the_same_matrices() -> None:
    @rule(kind="k", through="views")
    def product(a, b):
        return (a * 2) @ b

    a = torch.randn(4, 4, 3)
    shared = dovetail.capture(lambda a, b: (a * 2).reshape(2, 8, 3) @ b, (a, torch.randn(3, 5)))
    assert len(matches(product, shared)) == 1
    batched = dovetail.capture(lambda a, b: (a * 2).reshape(2, 4, 2, 3) @ b, (a, torch.randn(4, 3, 5)))
    assert declined(product, batched)


def test_two_and_two_point_zero_are_one_literal_among_floats_only() -> None:
    large = 2.0**53

    @rule(kind="k", examples=[(torch.ones(3),)])
    def is_large(x):
        return (x == large).float()

    whole = torch.tensor([2**53 + 1])
    assert len(matches(is_large, one(lambda x: (x == 2**53).float()))) == 1
    gm = dovetail.capture(lambda x: (x == 2**53).float(), (whole,))
    assert any("other is" in reason for reason in declined(is_large, gm))
    same = dovetail.capture(lambda x: (x == large).float(), (whole,))
    assert len(matches(is_large, same)) == 1
    assert wrong(is_large, same, [whole]) == []


def test_zeros_have_signs() -> None:
    @rule(kind="k")
    def nothing(x):
        return x.exp() * torch.tensor([0.0])

    assert len(matches(nothing, one(lambda x: x.exp() * torch.tensor([0.0])))) == 1
    assert declined(nothing, one(lambda x: x.exp() * torch.tensor([-0.0])))

    @rule(kind="k")
    def turned(x):
        return x.exp() * complex(0.0, 0.0)

    assert len(matches(turned, one(lambda x: x.exp() * complex(0.0, 0.0)))) == 1
    assert declined(turned, one(lambda x: x.exp() * complex(0.0, -0.0)))


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("writes", [True, False])
def test_what_may_change_is_no_constant(persistent: bool, writes: bool) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.tensor([3.0]), persistent=persistent)

        def forward(self, x):
            y = x.exp() * self.scale
            if writes:
                self.scale.add_(1)
            return y

    @rule(kind="k")
    def tripled(x):
        return x.exp() * torch.tensor([3.0])

    gm = dovetail.capture(Scaled(), (VECTOR,))
    assert bool(matches(tripled, gm)) == (not persistent and not writes)


def test_an_alternative_that_hands_on_an_argument_is_no_match() -> None:
    @rule(kind="k")
    def perhaps(x):
        return optional(x, F.relu)

    @perhaps.guard
    def never(m):
        return Decline("not wanted")

    assert "not wanted" in declined(perhaps, one(lambda x: F.relu(x) * 2))


def test_a_literal_without_a_form_is_a_reason_and_not_the_end_of_the_rule() -> None:
    @rule(kind="k")
    def scaled(x, factor=Const()):
        return x.exp() * factor

    gm = one(lambda x: (x.exp() * float("nan"), x.tanh().exp() * float("inf"), x.cos().exp() * 2.0))
    candidates, refusals, _ = proposals(scaled, gm)
    assert [c.attrs for c in candidates] == [{"factor": 2.0}]
    assert {r.reason for r in refusals} == {
        f"the literal 'factor' is {value}, and attributes cannot hold that" for value in ("nan", "inf")
    }


def test_a_literal_may_be_one_of_a_list_or_all_of_it() -> None:
    @rule(kind="k")
    def left(x, width=Const()):
        return F.pad(x.exp(), (width, 1))

    @rule(kind="k")
    def around(x, width=Const()):
        return F.pad(x.exp(), (width, width))

    (candidate,), _, _ = proposals(left, one(lambda x: F.pad(x.exp(), (3, 1))))
    assert candidate.attrs == {"width": 3}
    assert declined(left, one(lambda x: F.pad(x.exp(), (3, 2))))
    (candidate,), _, _ = proposals(around, one(lambda x: F.pad(x.exp(), (3, 3))))
    assert candidate.attrs == {"width": 3}
    assert declined(around, one(lambda x: F.pad(x.exp(), (3, 2))))


def test_a_pattern_that_depends_on_a_size_nobody_knows_is_not_proven() -> None:
    @rule(kind="k")
    def by_rows(x):
        return x.exp() * 2 if x.shape[0] > 4 else x.exp() * 3

    def captured(lowest: int):
        rows = torch.export.Dim("rows", min=lowest, max=64)
        return dovetail.capture(lambda x: x.exp() * 2, (torch.randn(8, 3),), dynamic_shapes=({0: rows},))

    assert len(matches(by_rows, captured(5))) == 1
    (reason,) = declined(by_rows, captured(2))
    assert "depends on unknown sizes" in reason


def test_a_write_between_two_operations_keeps_them_apart() -> None:
    @rule(kind="k")
    def relu_plus(x):
        return F.relu(x) + x

    def between(x):
        z = x * 3
        y = torch.relu(z)
        z.mul_(2)
        return y + z

    def through_a_view(x):
        z = x * 3
        y = torch.relu(z)
        z[0].mul_(2)
        return y + z

    def after(x):
        z = x * 3
        w = torch.relu(z) + z
        z.mul_(2)
        return w, z

    for function in (between, through_a_view):
        assert declined(relu_plus, dovetail.capture(symbolic_trace(function), (torch.randn(3),)))
    gm = dovetail.capture(symbolic_trace(after), (torch.randn(3),))
    assert len(matches(relu_plus, gm)) == 1


def test_a_function_that_could_write_and_does_not_is_a_pure_one() -> None:
    @rule(kind="k")
    def dropped(x, p=Const(0.3)):
        return F.dropout(x, p) * 2

    gm = dovetail.capture(symbolic_trace(lambda x: F.dropout(x, 0.1) * 2), (VECTOR,))
    (candidate,), _, _ = proposals(dropped, gm)
    assert candidate.attrs == {"p": 0.1}
    outlined(dropped, gm, VECTOR)
    still = dovetail.capture(symbolic_trace(lambda x: F.dropout(x, 0.1, False) * 2), (VECTOR,))
    assert matches(dropped, still) == []


@pytest.mark.parametrize("attrs", [lambda m: 3, lambda m: {"a": object()}, lambda m: m["nothing"]])
def test_attributes_that_are_none_name_the_rule(attrs: Any) -> None:
    odd = rule(kind="k", name="odd", attrs=attrs)(lambda x: x.exp() * 2)
    with pytest.raises(dovetail.RuleError, match="rule 'odd'"):
        list(proposals(odd, one(lambda x: x.exp() * 2)))


@pytest.mark.parametrize("turned", [False, True])
def test_operands_are_taken_the_way_round_that_leaves_nothing_between(turned: bool) -> None:
    @dovetail.rule(kind="sum", escapes="output")
    def summed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + y

    def model(x: torch.Tensor) -> torch.Tensor:
        first = torch.relu(x)
        second = torch.relu(torch.tanh(first))
        return first + second if turned else second + first

    gm = dovetail.fuse(dovetail.capture(model, (torch.randn(4),)), summed)
    assert [r.nodes for r in dovetail.regions(gm)] == [("relu_1", "add")]


@pytest.mark.parametrize("writes", [False, True])
def test_a_tuple_operator_is_matched_with_the_element_that_is_read_whatever_was_written_before(
    writes: bool,
) -> None:
    aten = torch.ops.aten
    graph = Graph()
    value = graph.placeholder("x")
    value.meta["val"] = torch.randn(2, 3)
    if writes:
        value = graph.call_function(aten.mul_.Tensor, (value, 2.0))
        value.meta["val"] = torch.randn(2, 3)
    norm = graph.call_function(aten.native_layer_norm.default, (value, [3], None, None, 1e-5))
    norm.meta["val"] = aten.native_layer_norm.default(torch.randn(2, 3), [3], None, None, 1e-5)
    parts = [graph.call_function(operator.getitem, (norm, i)) for i in (2, 0, 1)]
    for part in parts:
        part.meta["val"] = norm.meta["val"][part.args[1]]
    graph.output((parts[1],))
    gm = GraphModule(nn.Module(), graph)
    fused = dovetail.fuse(gm, dovetail.rules.library.ALL)
    (region,) = dovetail.regions(fused)
    assert region.kind == "layer_norm"
    assert region.attrs["out_dtype"] == "promoted"
    assert [region.nodes[i] for i in (0, 2)] == [norm.name, parts[1].name]
    x = torch.randn(2, 3)
    assert torch.equal(fused(x.clone())[0], gm(x.clone())[0])
