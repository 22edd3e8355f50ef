"""What is no repetition, and why; what the rule may be given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace

import dovetail
from dovetail import InvalidArgument
from dovetail.errors import RuleError
from dovetail.rules.repeated_blocks.repeats_rule import Repeats, repeats
from dovetail.rules.rule import Limits
from tests.rules.repeat_helpers import (
    an_input,
    applied,
    blocks,
    bodies,
    layer,
    proposed,
    reasons,
)


def test_nothing_repeats() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.sin(torch.exp(x)) + torch.tanh(torch.neg(x)) * torch.relu(x) - torch.cos(x)

    assert blocks(f) == []
    assert reasons(f) == []


def test_repetition_of_little_is_refused() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(9):
            x = torch.relu(torch.sin(x))
        return x

    assert blocks(f) == []
    (reason,) = reasons(f)
    assert "9 equal blocks of 2 operations" in reason
    assert "min_size=4" in reason
    assert len(blocks(f, min_size=2)) == 9


def test_views_do_not_make_a_block() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.sin(x.unsqueeze(0).unsqueeze(0).squeeze(0).squeeze(0))
        return x

    assert blocks(f) == []


def test_fewer_repetitions_than_asked_for() -> None:
    def f(x: Tensor) -> Tensor:
        return layer(layer(x))

    assert len(blocks(f)) == 2
    assert blocks(f, min_repeats=3) == []
    assert any("min_repeats=3" in reason for reason in reasons(f, min_repeats=3))


def test_a_block_with_another_literal_is_refused() -> None:
    def f(x: Tensor) -> Tensor:
        for scale in (1.0, 1.0, 0.5, 1.0):
            x = layer(x, scale)
        return x

    assert len(blocks(f)) == 3
    refusal = next(r for r in proposed(repeats(), symbolic_trace(f))[2] if "almost equal" in r.reason)
    assert "'mul_2' has argument 1=0.5" in refusal.reason or "'mul_2' has other=0.5" in refusal.reason
    assert (refusal.matched, refusal.wanted) == (4, 6)  # what leads to it from the end of the block


def test_twins_that_differ_in_one_thing_are_refused() -> None:
    def head(x: Tensor, exponent: int) -> Tensor:
        return torch.tanh(torch.exp(torch.pow(torch.sin(torch.cos(x)), exponent)))

    def f(x: Tensor) -> Tensor:
        return head(torch.relu(x), 2) - head(torch.neg(x), 3)

    assert blocks(f) == []
    (reason,) = reasons(f)
    assert "almost a repetition" in reason
    assert "exponent=3" in reason or "argument 1=3" in reason


def test_a_block_that_reads_other_operands_is_refused() -> None:
    def f(x: Tensor) -> Tensor:
        for swapped in (False, False, True):
            h = torch.sin(x)
            e = torch.exp(h)
            x = x + torch.tanh(h - e if swapped else e - h)
        return x

    assert len(blocks(f)) == 2
    assert any("'sub_2' reads 'sin_2' (torch.sin) where 'sub' reads 'exp'" in reason for reason in reasons(f))


def test_the_first_layer_without_its_norm() -> None:
    def f(x: Tensor) -> Tensor:
        for number in range(4):
            h = torch.sin(x) if number == 0 else torch.cos(x)
            x = x + torch.tanh(torch.exp(h * 2))
        return x

    assert len(blocks(f)) == 3
    miss = next(reason for reason in reasons(f) if "almost equal to 3 blocks" in reason)
    assert "'mul' reads 'sin' (torch.sin) where 'mul_1' reads 'cos' (torch.cos)" in miss


def test_other_shapes_are_other_blocks() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(2):
            x = layer(x)
        x = torch.cat([x, x], dim=-1)
        for _ in range(2):
            x = layer(x)
        return x

    gm = dovetail.capture(f, (an_input(),))
    out = applied(repeats(), gm)
    assert len(dovetail.regions(out)) == 4
    assert bodies(out) == 2


def test_what_may_not_be_taken_is_not_in_a_block() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(4):
            x = layer(x)
        return x

    gm = symbolic_trace(f)
    context, candidates, refused = proposed(repeats(), gm, barred={})
    assert len(candidates) == 4
    excluded = context.index.names["exp_1"]
    _, candidates, refused = proposed(repeats(), gm, barred={excluded: "asked never to"})
    assert len(candidates) == 3
    assert not any(excluded in c.members for c in candidates)
    assert any("asked never to" in r.reason and r.at == excluded for r in refused)


def test_limits_lead_to_smaller_blocks() -> None:
    def f(x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.relu(torch.neg(layer(layer(x))))
        return x

    gm = symbolic_trace(f)
    assert {len(c.members) for c in proposed(repeats(), gm)[1]} == {14}
    small = proposed(repeats(), gm, limits=Limits(nodes=8))[1]
    assert len(small) == 6
    assert all(len(c.members) <= 8 for c in small)


def test_leaf_modules_with_their_own_weights_are_no_repetition() -> None:
    model = nn.Sequential(
        *(m for _ in range(4) for m in (nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4), nn.ReLU()))
    )
    _, candidates, _ = proposed(repeats(), symbolic_trace(model))
    assert not candidates
    captured = dovetail.capture(model, (an_input(),))
    assert len(dovetail.regions(applied(repeats(), captured))) == 4


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
    gm = symbolic_trace(lambda x: torch.cos(layer(layer(x))))
    rule = repeats()
    context = proposed(rule, gm)[0]
    names = context.index.names
    assert "'cos' is called in this way only once" in rule.why_not(context, names["cos"], names["sin"])[0]
    assert rule.why_not(context, names["sin"], names["exp"]) == []
