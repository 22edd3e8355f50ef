"""A pattern that cannot be traced is refused soon, with the error that came furthest and its line."""

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dovetail import Const, RuleError, either, rule


def misspelled_keyword(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    return F.softmax(a @ b @ c @ d @ e @ f, dimension=-1)  # type: ignore[call-arg]


def wrong_arity(x: Any, w: Any, k: Any = Const(), m: Any = Const()) -> Any:
    return F.gelu(F.linear(x, w) * k + m, 1, 2, 3)  # type: ignore[arg-type]


def missing_argument(x: Any, w: Any) -> Any:
    return F.linear(x @ w)  # type: ignore[call-arg]


def raises(x: Any, w: Any) -> Any:
    y = F.linear(x, w)
    raise RuntimeError(f"broken {y.dim()}")


def impossible_shape(q: Any, k: Any, v: Any, m: Any, wq: Any, wk: Any, wv: Any) -> Any:
    heads = [F.linear(x, w).view(2, 4, 8, -1) for x, w in ((q, wq), (k, wk), (v, wv))]
    return F.scaled_dot_product_attention(*heads, m).view(7, 7)


def costly_calls(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    once = F.scaled_dot_product_attention(a, b, c)
    return F.scaled_dot_product_attention(once, d, e).view(7, 11, 13) + f


def optional_operands(a: Any, b: Any = None, c: Any = None, d: Any = None, e: Any = None) -> Any:
    for other in (b, c, d, e):
        a = a if other is None else a @ other
    return a.view(7, 7, 7)


def alternatives(a: Any, b: Any, c: Any, d: Any) -> Any:
    y, z = either(a @ b, a * b, a + b), either(c @ d, c * d, c + d)
    return either(y @ z, y * z, y + z).view(3, 3, 3)


def data_dependent(x: Any, w: Any) -> Any:
    return x if (x > 0).any() else x @ w


@pytest.mark.parametrize(
    ("pattern", "reason", "line"),
    [
        (misspelled_keyword, "unexpected keyword argument 'dimension'", "F.softmax(a @ b @ c"),
        (wrong_arity, "gelu.* takes 1 positional argument but 4", "F.gelu(F.linear(x, w)"),
        (missing_argument, "linear", "F.linear(x @ w)"),
        (raises, "broken", "raise RuntimeError"),
        (impossible_shape, r"'\[7, 7\]' is invalid", ".view(7, 7)"),
        (costly_calls, r"'\[7, 11, 13\]' is invalid", ".view(7, 11, 13)"),
        (optional_operands, r"'\[7, 7, 7\]' is invalid", "a.view(7, 7, 7)"),
        (alternatives, r"'\[3, 3, 3\]' is invalid", ".view(3, 3, 3)"),
        (data_dependent, "only known at run time", "(x > 0).any()"),
    ],
)
def test_a_wrong_pattern_is_refused_soon_with_its_line(
    pattern: Callable[..., Any], reason: str, line: str
) -> None:
    # A full collection takes seconds in a process that has run many tests, whatever the pattern.
    gc.disable()
    try:
        start = time.thread_time()
        with pytest.raises(RuleError, match=reason) as refused:
            rule(pattern, kind="k")
        spent = time.thread_time() - start
    finally:
        gc.enable()
    assert spent < 2
    assert "test_wrong_patterns.py:" in str(refused.value)
    assert line in str(refused.value)


def test_a_pattern_that_needs_one_rank_or_a_call_by_presence_is_still_traced() -> None:
    def table(i: Any, w: Any, p: Any, g: Any, b: Any) -> Any:
        positions = F.embedding(torch.arange(i.shape[1]), p)
        return F.layer_norm(F.embedding(i, w) + positions, (w.shape[1],), g, b)

    def images(x: Any, w: Any) -> Any:
        assert x.dim() == 4, "images only"
        return F.relu(F.conv2d(x, w))

    def by_presence(x: Any, w: Any, b: Any = None) -> Any:
        def affine(x: Any, w: Any, b: Any) -> Any:
            return x @ w + b

        return torch.relu(affine(*[v for v in (x, w, b) if v is not None]))

    for pattern in (table, images, by_presence):
        rule(pattern, kind="k")
