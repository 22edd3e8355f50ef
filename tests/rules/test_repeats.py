"""Blocks that repeat, in small graphs: where they begin and end, which are equal, and which only almost."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, symbolic_trace

import dovetail
from dovetail.outlining.bodies import signature
from dovetail.rules.repeated_blocks.repeats_rule import repeats
from tests.rules.repeat_helpers import (
    an_input,
    applied,
    blocks,
    bodies,
    layer,
    member_names,
    proposed,
    relisted,
    requests,
    same_run,
    to_the_end,
)


def test_three_residual_blocks_are_one_body() -> None:
    def f(x: Tensor) -> Tensor:
        x = torch.relu(x)
        for _ in range(3):
            x = layer(x)
        return torch.neg(x)

    names = blocks(f)
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
    gm = symbolic_trace(lambda x: layer(layer(layer(x))))
    context, candidates, _ = proposed(repeats(), gm)
    seen: set[Any] = set()
    for candidate in candidates:
        inside = [context.nodes[i] for i in candidate.members]
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

    names = blocks(f)
    # Every border is as good as another in a chain: what counts is that as many blocks as fit are found.
    assert len(names) == (12 + before + after) // 4
    assert {len(one) for one in names} == {4}
    flat = [name for one in names for name in one]
    assert len(set(flat)) == len(flat)


def test_a_block_that_repeats_in_itself() -> None:
    def once(x: Tensor) -> Tensor:
        return torch.tanh(torch.exp(torch.sin(x)))

    def f(x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.neg(once(once(x)))  # A A B, again and again
        return x

    names = blocks(f)
    assert [len(one) for one in names] == [7] * 4
    assert names[0] == ["sin", "exp", "tanh", "sin_1", "exp_1", "tanh_1", "neg"]


def test_rows_are_cut_where_fewest_values_cross() -> None:
    def f(x: Tensor) -> Tensor:
        # The suffix looks like the beginning of a block: blocks could as well begin at exp or tanh.
        for _ in range(3):
            x = layer(x)
        h = torch.sin(x)
        return torch.exp(h * 1.0)

    assert [names[0] for names in blocks(f)] == ["sin", "sin_1", "sin_2"]
    assert [names[-1] for names in blocks(f)] == ["add", "add_1", "add_2"]


def test_values_that_all_blocks_share_are_operands() -> None:
    def f(x: Tensor) -> Tensor:
        mask, phase = torch.relu(x), torch.cos(torch.neg(x))
        for _ in range(4):
            x = x + torch.tanh(torch.exp(x * mask) - phase)
        return x

    names = blocks(f)
    assert len(names) == 4
    assert not {"relu", "cos", "neg"} & {name for one in names for name in one}


def test_values_first_needed_in_the_first_block() -> None:
    def f(x: Tensor) -> Tensor:
        shared: Tensor | None = None
        for _ in range(2):
            h = torch.exp(torch.sin(x))
            if shared is None:
                shared = torch.cos(torch.relu(x))
            x = x + torch.tanh(h * shared)
        return x

    assert blocks(f) == [
        ["sin", "exp", "mul", "tanh", "add"],
        ["sin_1", "exp_1", "mul_1", "tanh_1", "add_1"],
    ]


def test_many_streams_run_through_the_blocks() -> None:
    def f(x: Tensor) -> Tensor:
        c = torch.relu(x)
        for _ in range(4):
            gate = torch.sigmoid(x)
            c = c * gate + torch.tanh(x)
            x = torch.sin(c) * gate
        return x + c

    names = blocks(f)
    assert [len(one) for one in names] == [6] * 4


def test_outputs_of_every_block() -> None:
    def f(x: Tensor) -> list[Tensor]:
        kept: list[Tensor] = []
        for _ in range(3):
            h = torch.exp(torch.sin(x))
            x = x + torch.tanh(h * 2)
            kept.append(h)
        return [x, *kept]

    assert [len(one) for one in blocks(f)] == [5] * 3


def test_branches_that_interleave_in_the_listing() -> None:
    def f(x: Tensor) -> Tensor:
        left, right = torch.relu(x), torch.neg(x)
        for _ in range(3):
            a, b = torch.sin(left), torch.cos(right)
            a, b = torch.exp(a), torch.abs(b)
            a, b = torch.tanh(a), torch.sigmoid(b)
            left, right = left + a, right * b
        return left - right

    names = blocks(f)
    assert sorted(len(one) for one in names) in ([4] * 6, [8] * 3)
    assert len({name for one in names for name in one}) == 24


def test_equal_blocks_in_different_places() -> None:
    def head(x: Tensor) -> Tensor:
        return torch.tanh(torch.exp(torch.sin(x)) * x)

    def f(x: Tensor) -> Tensor:
        left = head(torch.cos(torch.relu(x)))
        right = head(torch.sigmoid(torch.neg(torch.abs(x))))
        return left - right

    assert blocks(f) == [["sin", "exp", "mul", "tanh"], ["sin_1", "exp_1", "mul_1", "tanh_1"]]


def test_equal_towers_are_one_block_each() -> None:
    def tower(x: Tensor) -> Tensor:
        x = torch.sigmoid(torch.abs(torch.log(layer(layer(x)) * x)))
        return torch.cos(torch.floor(x))

    def f(x: Tensor) -> Tensor:
        return tower(torch.relu(x)) - tower(torch.neg(x))

    assert [len(names) for names in blocks(f)] == [18, 18]


def test_towers_that_are_rows_of_layers_are_layers() -> None:
    def f(x: Tensor) -> Tensor:
        for scale in (1.0, 0.5, 1.0):  # four layers, another one, four layers
            for _ in range(4 if scale == 1 else 1):
                x = layer(x, scale)
        return x

    assert [len(names) for names in blocks(f)] == [6] * 8


def test_operations_that_return_many_values_stay_whole() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(3):
            a, b = torch.split(x, [2, 2], dim=-1)
            x = x + torch.cat([torch.sin(b), torch.exp(a)], dim=-1)
        return x

    names = blocks(f)
    assert [len(one) for one in names] == [7] * 3
    assert all(sum(name.startswith("getitem") for name in one) == 2 for one in names)


def test_regions_of_its_own_kind_are_left_alone() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(8):
            x = layer(x)
        return x

    rule = repeats()
    out = applied(rule, symbolic_trace(f))
    assert len(dovetail.regions(out)) == 8
    assert applied(rule, out) is out
    # To another kind of block they are operations, and each of them alone is no block.
    assert applied(repeats("stage", name="stages", min_size=2), out) is out


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
    assert [len(names) for names in blocks(f)] == [17] * 4
    _, candidates, _ = proposed(repeats(nested=True), gm)
    assert Counter((len(c.members), c.priority) for c in candidates) == {(4, 0): 12, (17, -1): 4}
    out = to_the_end(repeats(nested=True), gm)
    assert len(dovetail.regions(out)) == 4
    assert len(dovetail.regions(out, nested=True)) == 4 + 12
    assert bodies(out) == 1
    assert same_run(gm, out, an_input())
    assert dovetail.text(dovetail.inline(out)) == dovetail.text(gm)


@pytest.mark.parametrize("seed", range(4))
def test_neither_names_nor_the_listing_matter(seed: int) -> None:
    def f(x: Tensor) -> Tensor:
        mask = torch.relu(x)
        for _ in range(4):
            x = heads(x) * mask
        return x + torch.cos(mask)

    gm = symbolic_trace(f)
    context, candidates, _ = proposed(repeats(), gm)
    other, again, _ = proposed(repeats(), relisted(gm, seed))
    theirs = {frozenset(other.nodes[i].meta["original"] for i in c.members) for c in again}
    assert theirs == {frozenset(names) for names in member_names(context, candidates)}
    out = dovetail.outline(other.gm, requests(other, again))
    assert same_run(gm, out, an_input())


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
    assert same_run(gm, out, an_input())


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
    assert same_run(gm, out, an_input())


def test_updates_of_state_stay_outside() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.BatchNorm1d(4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for norm in self.norms:
                x = x + torch.tanh(torch.exp(norm(torch.sin(x))))
            return x

    gm = dovetail.capture(Model().train(), (an_input(),))
    out = applied(repeats(), gm)
    assert len(dovetail.regions(out)) == 3
    assert bodies(out) == 1
    assert not any(region.effects for region in dovetail.regions(out))
    assert same_run(gm, out, an_input())


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
    start = time.thread_time()
    _, candidates, _ = proposed(repeats(), gm)
    assert {len(c.members) for c in candidates} == {10}
    assert len(candidates) == (len(gm.graph.nodes) - 3) // 10
    return time.thread_time() - start


def test_twenty_thousand_operations_take_no_more_than_their_share() -> None:
    short, long = long_graph(250), long_graph(2000)
    seconds(short)
    assert seconds(long) < 8 * 3 * max(seconds(short), 0.02)
