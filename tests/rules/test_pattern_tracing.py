"""How patterns are traced: the quick way gives what the long way gives, and no more is traced than must be."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dovetail
from dovetail.ir.canonicalize import canonicalize
from dovetail.rules.patterns import template, variants
from dovetail.rules.patterns.alternatives import Const, either, optional
from dovetail.rules.patterns.pattern_rule import PatternRule, rule
from dovetail.rules.patterns.trace import (
    FakeEnvironment,
    NotRecordable,
    capture_decompositions,
    record,
    trace,
)
from dovetail.rules.rule import RuleContext
from tests.rules.helpers import matches


def attention(q, k, v):
    weights = torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1, dtype=torch.float32).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v), weights @ v


def norms(x, weight, bias):
    y = F.layer_norm(x, weight.shape, weight, bias)
    mean = x.mean(-1, keepdim=True)
    return y, (x - mean) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6), 1 - x


def shapes(x, y, z):
    a, b = x.chunk(2, dim=-1)
    rows = torch.cat([a, b], -1).permute(1, 0, 2).reshape(-1, 8)
    return rows.t() @ rows, x[..., 0], torch.arange(8) + y, z.new_zeros(8) + z, F.dropout(x, 0.1)


@pytest.mark.parametrize("function", [attention, norms, shapes], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_quick_way_gives_the_graph_of_the_long_way(function: Any, dtype: torch.dtype) -> None:
    sizes = ((2, 3, 8),) * 3 if function is attention else ((2, 3, 8), (8,), (8,))

    def graph(quick: bool) -> list[Any]:
        env = FakeEnvironment()
        values = [env.fake_copy(torch.empty(s, dtype=dtype)) for s in sizes]
        if quick:
            recorded, _ = record(function, values, capture_decompositions())
            program = canonicalize(recorded)[0]
        else:
            program = trace(function, values)
        number = {n: i for i, n in enumerate(program.graph.nodes)}
        rows: list[Any] = []
        for node in program.graph.nodes:
            value = node.meta.get("val")
            fact = (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) else None
            arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
            rows.append((node.op, str(node.target) if node.op == "call_function" else "", arguments, fact))
        return rows

    assert graph(quick=True) == graph(quick=False)


def test_what_is_more_than_operators_goes_the_long_way() -> None:
    values = [torch.empty(3, device="meta")]
    for function in (
        lambda x: (x * torch.tensor([1.0, 2.0, 3.0]),),
        lambda x: (x.mul_(2),),
        lambda x: (x * 2 if x.sum() > 0 else x,),
    ):
        with pytest.raises(NotRecordable):
            record(function, values, capture_decompositions())


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the rules for which a template is made, once each time."""
    traced: list[str] = []
    real = template.make_template

    def counting(function: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        traced.append(name)
        return real(function, name, *args, **kwargs)

    monkeypatch.setattr(variants, "make_template", counting)
    return traced


def blocks(x, *weights):
    for weight in weights:
        x = F.relu(F.linear(x, weight)) + x
    return x


def test_equal_operands_are_proven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = counted(monkeypatch)

    @rule(kind="k")
    def block(x, weight):
        return F.relu(F.linear(x, weight)) + x

    gm = dovetail.capture(blocks, (torch.randn(3, 4), *(torch.randn(4, 4) for _ in range(6))))
    traced.clear()
    assert len(matches(block, gm)) == 6
    assert len(traced) == 1


def test_a_pattern_blind_to_precision_is_not_traced_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = counted(monkeypatch)

    @rule(kind="k")
    def block(x, weight):
        return either(F.relu(F.linear(x, weight)), torch.tanh(F.linear(x, weight))) + x

    @rule(kind="k")
    def wide(x, weight):
        return F.relu(F.linear(x, weight).float()).to(x.dtype) + x

    inputs = tuple(torch.randn(4, 4).bfloat16() for _ in range(3))
    gm = dovetail.capture(blocks, inputs)
    traced.clear()
    assert len(matches(block, gm)) == 2
    assert len(traced) == 1
    assert matches(wide, gm) == []
    assert len(traced) > 2


def casts(first: torch.dtype, second: torch.dtype) -> tuple[PatternRule, list[list[str]]]:
    @rule(kind="k")
    def norm(x, weight, eps=Const()):
        wide = either(lambda: x.float(), lambda: x)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return either(
            lambda: weight * scaled.to(x.dtype), lambda: (weight * optional(scaled, F.relu)).to(x.dtype)
        )

    def model(x, weight):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return weight * y.to(x.dtype), (weight * F.relu(y)).to(x.dtype)

    x, weight = torch.randn(2, 4).to(first), torch.randn(4).to(second)
    return norm, [
        [n.name for n in m.nodes] for m in norm.matches(RuleContext(dovetail.capture(model, (x, weight))))
    ]


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("second", [torch.float32, torch.bfloat16])
def test_casts_are_matched_where_they_are_and_only_there(first: torch.dtype, second: torch.dtype) -> None:
    _, members = casts(first, second)
    widest = [max((m for m in members if last in m), key=len, default=[]) for last in ("mul_1", "mul_2")]
    cast_count = [sum(name.startswith("_to_copy") for name in m) for m in widest]
    if first is torch.float32:
        assert cast_count == [0, 0]
    else:
        assert cast_count == [2, 2]


def test_a_pattern_is_traced_however_long_its_first_calls_take() -> None:
    slow_calls = iter([1.2])

    def late(x, weight, bias):
        until = time.thread_time() + next(slow_calls, 0.0)
        while time.thread_time() < until:
            pass
        return F.relu(F.linear(x, weight, bias))

    gm = dovetail.capture(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), (torch.ones(2, 4),))
    assert [r.kind for r in dovetail.regions(dovetail.fuse(gm, rule(kind="late")(late)))] == ["late"]


def test_a_pattern_that_runs_on_no_shapes_is_refused_after_a_bounded_search() -> None:
    def never(a, b, c, d):
        y = F.scaled_dot_product_attention(a, b, c) + F.layer_norm(d, d.shape[-1:])
        raise ValueError(f"not {y.shape}")

    start = time.thread_time()
    with pytest.raises(dovetail.RuleError, match=r"'never'.*within the bound of the search.*examples="):
        rule(kind="never")(never)
    assert time.thread_time() - start < 30.0
