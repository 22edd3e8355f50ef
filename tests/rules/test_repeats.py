"""Blocks that repeat, in small graphs: where they begin and end, which are equal, and which only almost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, symbolic_trace

import dovetail
from dovetail import InvalidArgument
from dovetail.errors import RuleError
from dovetail.outlining.bodies import signature
from dovetail.rules.limits import Limits
from dovetail.rules.repeats import Repeats, repeats
from tests.rules.repeat_helpers import (
    applied,
    bodies,
    member_names,
    proposed,
    relisted,
    requests,
    same_run,
    to_the_end,
)


def block(x: Tensor, scale: float = 1.0) -> Tensor:
    """A residual block of six operations."""
    h = torch.sin(x) * scale
    return x + torch.tanh(torch.exp(h) - h)


def input_() -> Tensor:
    return torch.linspace(-1, 1, 12).reshape(3, 4)


def found(function: Callable[..., Any], **options: Any) -> list[list[str]]:
    """The operations of each candidate, after proof that outlining them all changes nothing and shares a body."""
    gm = symbolic_trace(function)
    scene, candidates, _ = proposed(repeats(**options), gm)
    if candidates:
        out = dovetail.outline(gm, requests(scene, candidates))
        dovetail.check(out)
        assert bodies(out) < len(candidates)
        assert same_run(gm, out, input_())
        assert dovetail.text(dovetail.inline(out)) == dovetail.text(gm)
    return member_names(scene, candidates)


def reasons(function: Callable[..., Any], **options: Any) -> list[str]:
    return [refusal.reason for refusal in proposed(repeats(**options), symbolic_trace(function))[2]]


def test_three_residual_blocks_are_one_body() -> None:
    def f(x: Tensor) -> Tensor:
        x = torch.relu(x)
        for _ in range(3):
            x = block(x)
        return torch.neg(x)

    names = found(f)
    assert names == [
        ["sin", "mul", "exp", "sub", "tanh", "add"],
        ["sin_1", "mul_1", "exp_1", "sub_1", "tanh_1", "add_1"],
        ["sin_2", "mul_2", "exp_2", "sub_2", "tanh_2", "add_2"],
    ]
    out = applied(repeats(), symbolic_trace(f))
    assert [n.name for n in out.graph.nodes if n.op.startswith("call")][1:] == [
        *("block_0", "add", "block_1", "add_1", "block_2", "add_2", "neg")
    ]


def test_signatures_are_what_sharing_needs() -> None:
    gm = symbolic_trace(lambda x: block(block(block(x))))
    scene, candidates, _ = proposed(repeats(), gm)
    seen: set[Any] = set()
    for candidate in candidates:
        inside = [scene.nodes[i] for i in candidate.members]
        operands = dict.fromkeys(n for node in inside for n in node.all_input_nodes if n not in inside)
        seen.add(signature(gm, list(operands), inside, inside[-1:]))
    assert len(candidates) == 3
    assert len(seen) == 1


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("after", range(4))
def test_operations_around_that_look_like_a_part_of_a_block(before: int, after: int) -> None:
    steps = [torch.sin, torch.exp, torch.tanh, torch.neg]

    def f(x: Tensor) -> Tensor:
        for step in [*steps[4 - before :], *steps * 3, *steps[:after]]:
            x = step(x)
        return x

    names = found(f)
    # Every border is as good as another in a chain: what counts is that as many blocks as fit are found.
    assert len(names) == (12 + before + after) // 4
    assert {len(block) for block in names} == {4}
    flat = [name for block in names for name in block]
    assert len(set(flat)) == len(flat)


def test_a_block_that_repeats_in_itself() -> None:
    def once(x: Tensor) -> Tensor:
        return torch.tanh(torch.exp(torch.sin(x)))

    def f(x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.neg(once(once(x)))  # A A B, again and again
        return x

    names = found(f)
    assert [len(block) for block in names] == [7] * 4
    assert names[0] == ["sin", "exp", "tanh", "sin_1", "exp_1", "tanh_1", "neg"]


def test_rows_are_cut_where_fewest_values_cross() -> None:
    def f(x: Tensor) -> Tensor:
        # The suffix looks like the beginning of a block: blocks could as well begin at exp or tanh.
        for _ in range(3):
            x = block(x)
        h = torch.sin(x)
        return torch.exp(h * 1.0)

    assert [names[0] for names in found(f)] == ["sin", "sin_1", "sin_2"]
    assert [names[-1] for names in found(f)] == ["add", "add_1", "add_2"]


def test_values_that_all_blocks_share_are_operands() -> None:
    def f(x: Tensor) -> Tensor:
        mask, phase = torch.relu(x), torch.cos(torch.neg(x))
        for _ in range(4):
            x = x + torch.tanh(torch.exp(x * mask) - phase)
        return x

    names = found(f)
    assert len(names) == 4
    assert not {"relu", "cos", "neg"} & {name for block in names for name in block}


def test_values_first_needed_in_the_first_block() -> None:
    def f(x: Tensor) -> Tensor:
        shared: Tensor | None = None
        for _ in range(2):
            h = torch.exp(torch.sin(x))
            if shared is None:
                shared = torch.cos(torch.relu(x))
            x = x + torch.tanh(h * shared)
        return x

    assert found(f) == [
        ["sin", "exp", "mul", "tanh", "add"],
        ["sin_1", "exp_1", "mul_1", "tanh_1", "add_1"],
    ]


def test_several_streams_run_through_the_blocks() -> None:
    def f(x: Tensor) -> Tensor:
        c = torch.relu(x)
        for _ in range(4):
            gate = torch.sigmoid(x)
            c = c * gate + torch.tanh(x)
            x = torch.sin(c) * gate
        return x + c

    names = found(f)
    assert [len(block) for block in names] == [6] * 4


def test_outputs_of_every_block() -> None:
    def f(x: Tensor) -> list[Tensor]:
        kept: list[Tensor] = []
        for _ in range(3):
            h = torch.exp(torch.sin(x))
            x = x + torch.tanh(h * 2)
            kept.append(h)
        return [x, *kept]

    assert [len(block) for block in found(f)] == [5] * 3


def test_branches_that_interleave_in_the_listing() -> None:
    def f(x: Tensor) -> Tensor:
        left, right = torch.relu(x), torch.neg(x)
        for _ in range(3):
            a, b = torch.sin(left), torch.cos(right)
            a, b = torch.exp(a), torch.abs(b)
            a, b = torch.tanh(a), torch.sigmoid(b)
            left, right = left + a, right * b
        return left - right

    names = found(f)
    assert sorted(len(block) for block in names) in ([4] * 6, [8] * 3)
    assert len({name for block in names for name in block}) == 24


def test_equal_blocks_in_different_places() -> None:
    def head(x: Tensor) -> Tensor:
        return torch.tanh(torch.exp(torch.sin(x)) * x)

    def f(x: Tensor) -> Tensor:
        left = head(torch.cos(torch.relu(x)))
        right = head(torch.sigmoid(torch.neg(torch.abs(x))))
        return left - right

    assert found(f) == [["sin", "exp", "mul", "tanh"], ["sin_1", "exp_1", "mul_1", "tanh_1"]]


def test_equal_towers_are_one_block_each() -> None:
    def tower(x: Tensor) -> Tensor:
        for _ in range(3):
            x = block(x)
        return torch.cos(x)

    def f(x: Tensor) -> Tensor:
        return tower(torch.relu(x)) - tower(torch.neg(x))

    assert [len(names) for names in found(f)] == [19, 19]


def test_operations_that_return_several_values_stay_whole() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(3):
            a, b = torch.split(x, [2, 2], dim=-1)
            x = x + torch.cat([torch.sin(b), torch.exp(a)], dim=-1)
        return x

    names = found(f)
    assert [len(block) for block in names] == [7] * 3
    assert all(sum(name.startswith("getitem") for name in block) == 2 for block in names)


def test_nothing_repeats() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.sin(torch.exp(x)) + torch.tanh(torch.neg(x)) * torch.relu(x) - torch.cos(x)

    assert found(f) == []
    assert reasons(f) == []


def test_repetition_of_little_is_refused() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(9):
            x = torch.relu(torch.sin(x))
        return x

    assert found(f) == []
    (said,) = reasons(f)
    assert "9 equal blocks of 2 operations" in said
    assert "min_size=4" in said
    assert len(found(f, min_size=2)) == 9


def test_views_do_not_make_a_block() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.sin(x.unsqueeze(0).unsqueeze(0).squeeze(0).squeeze(0))
        return x

    assert found(f) == []


def test_fewer_repetitions_than_asked_for() -> None:
    def f(x: Tensor) -> Tensor:
        return block(block(x))

    assert len(found(f)) == 2
    assert found(f, min_repeats=3) == []
    assert any("min_repeats=3" in reason for reason in reasons(f, min_repeats=3))


def test_a_block_with_another_literal_is_refused() -> None:
    def f(x: Tensor) -> Tensor:
        for scale in (1.0, 1.0, 0.5, 1.0):
            x = block(x, scale)
        return x

    assert len(found(f)) == 3
    said = next(r for r in proposed(repeats(), symbolic_trace(f))[2] if "almost equal" in r.reason)
    assert "'mul_2' has argument 1=0.5" in said.reason or "'mul_2' has other=0.5" in said.reason
    assert said.matched == 5
    assert said.wanted == 6


def test_twins_that_differ_in_one_thing_are_refused() -> None:
    def head(x: Tensor, exponent: int) -> Tensor:
        return torch.tanh(torch.exp(torch.pow(torch.sin(torch.cos(x)), exponent)))

    def f(x: Tensor) -> Tensor:
        return head(torch.relu(x), 2) - head(torch.neg(x), 3)

    assert found(f) == []
    (said,) = reasons(f)
    assert "almost a repetition" in said
    assert "exponent=3" in said or "argument 1=3" in said


def test_a_block_that_reads_other_operands_is_refused() -> None:
    def f(x: Tensor) -> Tensor:
        for swapped in (False, False, True):
            h = torch.sin(x)
            e = torch.exp(h)
            x = x + torch.tanh(h - e if swapped else e - h)
        return x

    assert len(found(f)) == 2
    assert any("in another way" in reason for reason in reasons(f))


def test_the_first_layer_without_its_norm() -> None:
    def f(x: Tensor) -> Tensor:
        for layer in range(4):
            h = torch.sin(x) if layer == 0 else torch.cos(x)
            x = x + torch.tanh(torch.exp(h * 2))
        return x

    assert len(found(f)) == 3
    said = next(reason for reason in reasons(f) if "almost equal to 3 blocks" in reason)
    assert "'sin' is torch.sin where 'cos' is torch.cos" in said


def test_other_shapes_are_other_blocks() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(2):
            x = block(x)
        x = torch.cat([x, x], dim=-1)
        for _ in range(2):
            x = block(x)
        return x

    gm = dovetail.capture(f, (input_(),))
    out = applied(repeats(), gm)
    assert len(dovetail.regions(out)) == 4
    assert bodies(out) == 2


def test_what_may_not_be_taken_is_not_in_a_block() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(4):
            x = block(x)
        return x

    gm = symbolic_trace(f)
    scene, candidates, refused = proposed(repeats(), gm, barred={})
    assert len(candidates) == 4
    barred = scene.index.names["exp_1"]
    _, candidates, refused = proposed(repeats(), gm, barred={barred: "asked never to"})
    assert len(candidates) == 3
    assert not any(barred in c.members for c in candidates)
    assert any("asked never to" in r.reason and r.at == barred for r in refused)


def test_limits_lead_to_smaller_blocks() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.relu(torch.neg(block(block(x))))
        return x

    gm = symbolic_trace(f)
    assert {len(c.members) for c in proposed(repeats(), gm)[1]} == {14}
    small = proposed(repeats(), gm, limits=Limits(nodes=8))[1]
    assert len(small) == 6
    assert all(len(c.members) <= 8 for c in small)


def test_regions_of_its_own_kind_are_left_alone() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(8):
            x = block(x)
        return x

    rule = repeats()
    out = applied(rule, symbolic_trace(f))
    assert len(dovetail.regions(out)) == 8
    assert applied(rule, out) is out
    # Regions of other kinds are operations like any other.
    other = applied(repeats("layer", name="layers", min_size=2), out)
    assert other is out or all(r.kind in ("block", "layer") for r in dovetail.regions(other))


def heads(x: Tensor) -> Tensor:
    """A layer with three equal branches of its own."""
    h = torch.cos(x)
    parts = [torch.tanh(torch.exp(torch.sin(h) * 2)) for _ in range(3)]
    return x + torch.relu(parts[0] - parts[1] * parts[2])


def test_outermost_blocks_by_default_and_nested_ones_if_asked() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(4):
            x = heads(x)
        return x

    gm = symbolic_trace(f)
    assert [len(names) for names in found(f)] == [17] * 4
    _, candidates, _ = proposed(repeats(nested=True), gm)
    assert Counter((len(c.members), c.priority) for c in candidates) == {(4, 0): 12, (17, -1): 4}
    out = to_the_end(repeats(nested=True), gm)
    assert len(dovetail.regions(out)) == 4
    assert len(dovetail.regions(out, nested=True)) == 4 + 12
    assert bodies(out) == 1
    assert same_run(gm, out, input_())
    assert dovetail.text(dovetail.inline(out)) == dovetail.text(gm)


@pytest.mark.parametrize("seed", range(4))
def test_neither_names_nor_the_listing_matter(seed: int) -> None:
    def f(x: Tensor) -> Tensor:
        mask = torch.relu(x)
        for _ in range(4):
            x = heads(x) * mask
        return x + torch.cos(mask)

    gm = symbolic_trace(f)
    scene, candidates, _ = proposed(repeats(), gm)
    other, again, _ = proposed(repeats(), relisted(gm, seed))
    theirs = {frozenset(other.nodes[i].meta["original"] for i in c.members) for c in again}
    assert theirs == {frozenset(names) for names in member_names(scene, candidates)}
    out = dovetail.outline(other.gm, requests(other, again))
    assert same_run(gm, out, input_())


def test_random_draws_keep_their_order() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = x + F.dropout(torch.tanh(torch.exp(torch.sin(x))), 0.5, True)
            return x

    gm = symbolic_trace(Model())
    out = applied(repeats(), gm)
    assert len(dovetail.regions(out)) == 3
    assert bodies(out) == 1
    assert same_run(gm, out, input_())


def test_writes_stay_in_order() -> None:
    def f(x: Tensor) -> Tensor:
        total = torch.zeros(3, 4)
        for _ in range(3):
            x = x + torch.tanh(torch.exp(torch.sin(x)) + total)
            total.add_(x)
        return x * total

    gm = symbolic_trace(f)
    out = applied(repeats(), gm)
    assert len(dovetail.regions(out)) == 3
    assert same_run(gm, out, input_())


def test_updates_of_state_stay_outside() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for norm in self.norms:
                x = x + torch.tanh(torch.exp(norm(torch.sin(x))))
            return x

    gm = dovetail.capture(Model().train(), (input_(),))
    out = applied(repeats(), gm)
    assert len(dovetail.regions(out)) == 3
    assert bodies(out) == 1
    assert not any(region.effects for region in dovetail.regions(out))
    assert same_run(gm, out, input_())


def test_leaf_modules_with_their_own_weights_are_no_repetition() -> None:
    model = nn.Sequential(
        *(m for _ in range(4) for m in (nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.ReLU()))
    )
    _, candidates, _ = proposed(repeats(), symbolic_trace(model))
    assert not candidates
    captured = dovetail.capture(model, (input_(),))
    assert len(dovetail.regions(applied(repeats(), captured))) == 4


def long_graph(layers: int) -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    shared = graph.call_function(torch.relu, (x,))
    for _ in range(layers):
        h = graph.call_function(torch.sin, (x,))
        a = graph.call_function(torch.mul, (h, shared))
        b = graph.call_function(torch.exp, (h,))
        for target in (torch.tanh, torch.neg, torch.cos):
            a = graph.call_function(target, (a,))
        b = graph.call_function(torch.sub, (a, b))
        b = graph.call_function(torch.abs, (b,))
        b = graph.call_function(torch.sigmoid, (b,))
        x = graph.call_function(torch.add, (x, b))
    graph.output(x)
    return GraphModule(nn.Module(), graph)


def seconds(gm: GraphModule) -> float:
    start = time.process_time()
    _, candidates, _ = proposed(repeats(), gm)
    assert {len(c.members) for c in candidates} == {10}
    assert len(candidates) == (len(gm.graph.nodes) - 3) // 10
    return time.process_time() - start


def test_twenty_thousand_operations_take_no_more_than_their_share() -> None:
    short, long = long_graph(250), long_graph(2000)
    seconds(short)
    assert seconds(long) < 8 * 3 * max(seconds(short), 0.02)


def test_rules_are_values() -> None:
    rule = repeats(nested=True, priority=2)
    assert isinstance(rule, Repeats)
    assert rule == repeats(nested=True, priority=2)
    assert (rule.name, rule.kind, rule.priority, rule.nests) == ("repeats", "block", 2, True)


@pytest.mark.parametrize(
    "options",
    [{"min_size": 1}, {"min_repeats": 1}, {"min_size": 2.5}, {"min_repeats": True}, {"priority": "x"}],
)
def test_bad_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(RuleError, match=next(iter(options))):
        repeats(**options)


def test_a_bad_kind() -> None:
    with pytest.raises(InvalidArgument, match="kind"):
        repeats("not a kind")


def test_why_two_operations_are_not_in_one_block() -> None:
    gm = symbolic_trace(lambda x: torch.cos(block(block(x))))
    rule = repeats()
    scene = proposed(rule, gm)[0]
    names = scene.index.names
    assert "'cos' is called in this way only once" in rule.why_not(scene, names["cos"], names["sin"])[0]
    assert rule.why_not(scene, names["sin"], names["exp"]) == []
