"""Sizes that change between calls of a compiled model: symbolic from the second one on, and reported once."""

import logging
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail

Pair = namedtuple("Pair", ["left", "right"])


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Scaled(nn.Module):
    def forward(self, x: Tensor, factor: int, *more: Tensor, **named: Tensor) -> Tensor:
        return x * factor + sum(t.sum() for t in (*more, *named.values()))


def rows(n: int) -> Tensor:
    return torch.randn(n, 8)


def recompilations(fast: Any) -> list[str]:
    return [d.message for d in fast.diagnostics if d.kind == "recompiled"]


@pytest.mark.parametrize(
    ("dynamic", "sizes", "graphs"),
    [
        (None, (4, 6, 7, 9), 2),
        (None, (4, 4, 4), 1),
        (None, (6, 1, 4, 9), 3),  # 1 has a graph of its own
        (True, (4, 6, 7), 1),
        (False, (4, 6, 7), 3),
    ],
)
def test_captures(dynamic: bool | None, sizes: tuple[int, ...], graphs: int) -> None:
    model = Affine()
    fast = dovetail.compile(model, backends="eager", dynamic=dynamic)
    for n in sizes:
        x = rows(n)
        assert torch.equal(fast(x), model(x))
    assert len(fast.graphs) == graphs


def test_the_dimension_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    fast = dovetail.compile(Affine(), backends="eager")
    with caplog.at_level(logging.WARNING, "dovetail"):
        for n in (4, 6, 7, 9):
            fast(rows(n))
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "dimension 0 of 'x' from 4 to 6" in message
    assert "mark_dynamic" in message
    assert dovetail.explain(fast).diagnostics == (f"recompiled: {message}",)
    assert "from 4 to 6" in str(dovetail.explain(fast))


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_0_and_1_are_reported_as_specialized(dynamic: bool | None) -> None:
    fast = dovetail.compile(Affine(), backends="eager", dynamic=dynamic)
    for n in (4, 1, 0):
        fast(rows(n))
    assert ["dynamic" in message for message in recompilations(fast)] == [False, False]
    assert "dimension 0 of 'x' is 1, and sizes 0 and 1 are always specialized" in recompilations(fast)[0]


def test_a_size_that_cannot_be_captured_is_not_reported_as_recompiled() -> None:
    fast = dovetail.compile(Affine(), backends="eager")
    fast(rows(4))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        fast(torch.randn(4, 9))
    assert not recompilations(fast)


@pytest.mark.parametrize("mark", ["mark_unbacked", "maybe_mark_dynamic"])
def test_other_marks(mark: str) -> None:
    model = Affine()
    fast = dovetail.compile(model, backends="eager")
    first = rows(4)
    getattr(torch._dynamo.decorators, mark)(first, 0)
    for x in (first, rows(6), rows(7)):
        assert torch.equal(fast(x), model(x))
    assert len(fast.graphs) == 1


def test_gradients_of_a_dynamic_capture() -> None:
    model, fast_model = Affine(), Affine()
    fast_model.load_state_dict(model.state_dict())
    fast = dovetail.compile(fast_model, backends="eager")
    for n in (3, 5, 7):
        x = rows(n)
        model.zero_grad()
        fast_model.zero_grad()
        model(x).sum().backward()
        fast(x).sum().backward()
        for mine, theirs in zip(fast_model.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
    assert len(fast.graphs) == 2


def test_marked_dimensions_are_dynamic_at_once_and_stay_marked() -> None:
    fast = dovetail.compile(Affine(), backends="eager")
    for n in (4, 6):
        x = rows(n)
        torch._dynamo.mark_dynamic(x, 0)
        fast(x)
        assert x._dynamo_dynamic_indices == {0}  # type: ignore[attr-defined]
    assert len(fast.graphs) == 1
    assert not fast.diagnostics


def test_a_mark_that_does_not_hold_is_reported() -> None:
    model, x = Affine(), rows(4)
    torch._dynamo.mark_dynamic(x, 1)
    with pytest.warns(UserWarning, match="marked"):
        assert torch.equal(dovetail.compile(model, backends="eager")(x), model(x))
    with pytest.raises(dovetail.CaptureError, match="marked"):
        dovetail.compile(model, backends="eager", on_error="raise")(x)


def test_integers_and_arguments_without_names() -> None:
    model = Scaled()
    fast = dovetail.compile(model, backends="eager")
    for n, factor in ((3, 5), (4, 6), (7, 9), (8, 2)):
        more, x = rows(n), rows(4)
        assert torch.equal(fast(x, factor, more, y=more), model(x, factor, more, y=more))
    assert len(fast.graphs) == 2
    recompilation = recompilations(fast)[0]
    assert "'factor' from 5 to 6" in recompilation
    assert "dimension 0 of 'more[0]' from 3 to 4" in recompilation
    assert "1 more" not in recompilation
    assert "dimension 0 of 'y' from 3 to 4" in recompilation


class Nested(nn.Module):
    def forward(self, given: Any) -> Tensor:
        pair, table, (last,) = given["pair"], given["table"], given["rest"]
        return pair.left.sum() + pair.right.sum() + table["a"].sum() + last.sum()


def test_nested_arguments() -> None:
    model = Nested()
    fast = dovetail.compile(model, backends="eager")
    for n in (3, 5, 6):
        given = {
            "pair": Pair(rows(2), rows(n)),
            "table": OrderedDict(a=rows(n + 1)),
            "rest": [rows(n)],
        }
        assert torch.equal(fast(given), model(given))
    assert len(fast.graphs) == 2


class Counting(nn.Module):
    """Works for every size, and its capture for none but one: a loop in Python."""

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(8)
        for row in x:
            out = out + row
        return out


def test_sizes_that_a_model_specializes_are_captured_one_by_one() -> None:
    model = Counting()
    fast = dovetail.compile(model, backends="eager")
    for n in (3, 4, 5):
        x = rows(n)
        assert torch.equal(fast(x), model(x))
    assert len(fast.graphs) == 3


def test_recompilations_for_other_reasons_are_reported() -> None:
    model = Affine()
    fast = dovetail.compile(model, backends="eager")
    fast(rows(4))
    fast.train(False)(rows(4))
    fast(rows(4).double().float())
    assert recompilations(fast) == [
        "the model is captured and compiled again: the model is in eval mode, and was in train mode"
    ]


def test_the_limit_can_be_set_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dovetail.config, "recompile_limit", 1)
    fast = dovetail.compile(Affine(), backends="eager")
    fast(rows(4))
    with pytest.warns(UserWarning, match="recompile limit of 1"):
        fast(rows(5))
    given = dovetail.compile(Affine(), backends="eager", recompile_limit=2)
    given(rows(4))
    given(rows(5))
    monkeypatch.setattr(dovetail.config, "recompile_limit", 0)
    with pytest.raises(dovetail.InvalidArgument, match="recompile_limit"):
        dovetail.compile(Affine(), backends="eager")(rows(4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dynamic": "yes"}, "dynamic 'yes'"),
        ({"dynamic": True, "dynamic_shapes": {"x": None}}, "`dynamic` or `dynamic_shapes`"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(dovetail.InvalidArgument, match=message):
        dovetail.compile(Affine(), **options)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x - 1


def test_a_model_that_cannot_be_captured_runs_as_it_is() -> None:
    model, x = Branching(), torch.ones(3)
    fast = dovetail.compile(model, backends="eager")
    with pytest.warns(UserWarning, match=r'torch\.compile\(model, backend="dovetail"\)'):
        assert torch.equal(fast(x), model(x))
    assert torch.equal(fast(-x), model(-x))
    assert [d.kind for d in fast.diagnostics] == ["fallback"]
    assert "fallback" in str(dovetail.explain(fast))
    with pytest.warns(UserWarning, match="cannot be captured"):
        early = dovetail.compile(model, (x,), backends="eager")
    assert torch.equal(early(x), model(x))
    with pytest.raises(dovetail.CaptureError):
        dovetail.compile(model, (x,), backends="eager", on_error="raise")
