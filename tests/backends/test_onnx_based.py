"""Where ONNX's readers do otherwise than torch: indices out of range, whole numbers, memory that lies otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail

pytest.importorskip("onnxruntime")
pytest.importorskip("openvino")

BOTH = pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])


class Of(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def compiled(backend: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    model = function if isinstance(function, nn.Module) else Of(function)
    given = {"backends": [backend], "cache": False, "on_error": "raise", "smallest": 1}
    return dovetail.compile(model.eval(), args, **given | options)


def runs(fast: Any) -> set[str | None]:
    """Who runs the regions of the last capture."""
    return {region.backend for region in dovetail.regions(fast.graphs[-1])}


def same(backend: str, function: Callable[..., Any], *args: Any, taken: bool | None = True) -> None:
    """The backend gives what torch gives, by its own code unless `taken` is False; None is for either."""
    fast = compiled(backend, function, *args)
    torch.testing.assert_close(fast(*args), function(*args), rtol=1e-5, atol=1e-5, equal_nan=True)
    if taken is not None:
        assert (backend in runs(fast)) is taken


X = torch.arange(24.0).reshape(4, 6)


@BOTH
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[torch.tensor([0, 2]), torch.tensor([1, 4])],
        lambda x: x[torch.tensor([[0, -1], [1, -4]]), torch.tensor([1, -6])],
        lambda x: x.view(2, 2, 6)[torch.tensor([0, 1]), torch.tensor([1, -1])],
        lambda x: x[:, torch.tensor([5, -6])],
    ],
)
def test_positions_in_many_dimensions_and_from_the_end(backend: str, function: Any) -> None:
    same(backend, function, X)


AT = torch.tensor([0, 3])
INDEXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": lambda x, i: F.embedding(i, x) * 2,
    "index_select": lambda x, i: x.index_select(0, i) * 2,
    "gather": lambda x, i: x.gather(0, i[:, None]) * 2,
    "scatter": lambda x, i: x.scatter(0, i[:, None], 1.0) * 2,
    "index": lambda x, i: x[i] * 2,
    "two indices": lambda x, i: x[i, i] * 2,
    "one_hot": lambda x, i: F.one_hot(i, 4) * 2,
}


@BOTH
@pytest.mark.parametrize("wrong", [-1, -5, 4, 6, 2**32, 2**40])
@pytest.mark.parametrize("name", INDEXED)
def test_an_index_out_of_range_raises_what_torch_raises(backend: str, name: str, wrong: int) -> None:
    function = INDEXED[name]
    fast = compiled(backend, function, X, AT, on_error="fallback")
    assert torch.equal(fast(X, AT), function(X, AT))
    bad = torch.tensor([wrong, 0])
    try:
        expected = function(X, bad)
    except (IndexError, RuntimeError) as error:
        with pytest.raises(type(error)):
            fast(X, bad)
    else:
        assert torch.equal(fast(X, bad), expected)
    # It was the caller's mistake, and the code stays.
    before = runs(fast)
    assert torch.equal(fast(X, AT), function(X, AT))
    assert runs(fast) == before


@pytest.mark.parametrize("name", ["embedding", "index_select", "scatter", "index", "two indices"])
def test_both_take_indices(name: str) -> None:
    for backend in ("onnxruntime", "openvino"):
        assert runs(compiled(backend, INDEXED[name], X, AT)) == {backend}


def test_a_gather_of_a_part_is_left_to_those_who_can() -> None:
    same("onnxruntime", INDEXED["gather"], X, AT)
    same("openvino", lambda x, i: x.gather(0, i[:, None].expand(2, 6)) * 2, X, AT)
    fast = compiled("openvino", lambda x, i: x.gather(0, i), X, AT[:, None], on_error="fallback")
    assert torch.equal(fast(X, AT[:, None]), X.gather(0, AT[:, None]))
    assert runs(fast) == {None}


def test_indices_are_looked_at_where_sizes_vary() -> None:
    rows = torch.export.Dim("rows", min=2, max=64)
    for backend in ("onnxruntime", "openvino"):
        fast = compiled(
            backend, INDEXED["index"], X, AT, dynamic_shapes=(({0: rows}, None),), on_error="fallback"
        )
        longer = torch.randn(9, 6)
        for i in (torch.tensor([8, -9]), AT):
            assert torch.equal(fast(longer, i), longer[i] * 2)
        with pytest.raises(IndexError):
            fast(longer, torch.tensor([9, 0]))
        assert backend in runs(fast)


SMALL = {
    torch.uint8: torch.tensor([200, 100, 7, 255], dtype=torch.uint8),
    torch.int8: torch.tensor([127, -128, 100, -7], dtype=torch.int8),
    torch.int32: torch.tensor([16777217, 33554433, 2**31 - 1, -7], dtype=torch.int32),
    torch.int64: torch.tensor([2**53 + 1, 2**62, -7, 3]),
}
WHOLE: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda a: a + a,
    "sub": lambda a: a - 100,
    "mul": lambda a: a * a,
    "rsub": lambda a: torch.rsub(a, 5),
    "square": lambda a: a**2,
    "power": lambda a: a**5,
    "product": lambda a: a.prod(),
    "equal": lambda a: a == 16777216 % 128,
    "greater": lambda a: a > 100,
    "rest": lambda a: a % 100,
    "largest": lambda a: a.amax(),
    "negative": lambda a: -a,
    "absolute": lambda a: a.abs(),
    "sum": lambda a: a.sum(),
    "fraction": lambda a: a.float() * 0.5,
    "moved": lambda a: torch.cat([a.view(2, 2).t(), a.view(2, 2)]),
}


@BOTH
@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_come_out_as_torch_has_them(backend: str, name: str, dtype: torch.dtype) -> None:
    function, given = WHOLE[name], SMALL[dtype]
    fast = compiled(backend, function, given, on_error="fallback")
    torch.testing.assert_close(fast(given), function(given), rtol=0, atol=0)


def test_moving_small_numbers_and_making_fractions_of_them_is_taken() -> None:
    for name in ("fraction", "moved"):
        for dtype in (torch.uint8, torch.int32):
            same("openvino", WHOLE[name], SMALL[dtype])


def test_a_number_that_the_dtype_has_not_is_reported() -> None:
    given = SMALL[torch.uint8]
    fast = compiled("onnxruntime", lambda a: a < 300, given, on_error="fallback")
    assert torch.equal(fast(given), given < 300)
    with pytest.raises(dovetail.SaveError, match="300 is not a uint8"):
        dovetail.to_onnx(dovetail.capture(Of(lambda a: a < 300), (given,)), "never.onnx")


LARGE = torch.tensor([1e10, -1e10, 7.5, -7.5, 1e-3, 5.0, -0.0])


@BOTH
@pytest.mark.parametrize("by", [3.0, -3.0, 0.7])
def test_what_is_left_over_of_large_numbers(backend: str, by: float) -> None:
    same(backend, lambda x: torch.remainder(x, by), LARGE, taken=backend == "onnxruntime")
    same(backend, lambda x: torch.div(x, by, rounding_mode="floor"), LARGE, taken=None)


def test_a_division_by_a_rounded_quotient_is_not_taken() -> None:
    same("openvino", lambda x: torch.remainder(x, 3.0), LARGE, taken=False)
    same("openvino", lambda x: torch.div(x, 3.0, rounding_mode="floor"), LARGE, taken=False)


@BOTH
def test_infinity_rounded_down(backend: str) -> None:
    x = torch.tensor([float("inf"), -float("inf"), 7.0, -7.0, 0.0])
    for by in (3.0, -3.0, float("inf"), 0.0):
        same(backend, lambda x, by=by: torch.div(x, by, rounding_mode="floor"), x, taken=None)


@BOTH
def test_attention_under_a_mask_is_taken(backend: str) -> None:
    q = torch.randn(1, 2, 4, 8)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    same(backend, lambda q, m: F.scaled_dot_product_attention(q, q, q, m) * 2, q, mask)


def image(channels_last: bool) -> Tensor:
    pixels = torch.randn(2, 3, 8, 8)
    return pixels.to(memory_format=torch.channels_last) if channels_last else pixels


@BOTH
@pytest.mark.parametrize("first", [False, True])
def test_images_that_lie_otherwise_are_taken_too(backend: str, first: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)).eval()
    with torch.no_grad():
        fast = compiled(backend, model, image(first))
        for given in (image(first), image(not first)):
            expected = model(given)
            result = fast(given)
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
            assert result.stride() == expected.stride()
            assert runs(fast) == {backend}


@BOTH
@pytest.mark.parametrize(
    "other", [torch.randn(6, 4).t(), torch.randn(4, 12)[:, ::2], torch.randn(1, 6).expand(4, 6)]
)
def test_rows_that_lie_otherwise_are_taken_too(backend: str, other: Tensor) -> None:
    fast = compiled(backend, lambda x: x * 2 + 1, X)
    for given in (X, other):
        assert torch.equal(fast(given), given * 2 + 1)
        assert fast(given).stride() == (given * 2 + 1).stride()
    assert runs(fast) == {backend}


def turned(x: Tensor) -> Tensor:
    return x.transpose(0, 1) * 2 + 1


@BOTH
@pytest.mark.parametrize("opened", [False, True])
def test_a_turned_input_turned_back_is_still_read(backend: str, opened: bool) -> None:
    sizes = {0: torch.export.Dim("n", min=2, max=64), 1: torch.export.Dim("m", min=2, max=64)}
    x = torch.randn(5, 3).t()
    fast = compiled(backend, turned, x, dynamic_shapes=((sizes,),) if opened else None)
    for given in (x, torch.randn(5, 3).t()):
        assert torch.equal(fast(given), turned(given))
    assert runs(fast) == {backend}


@BOTH
@pytest.mark.parametrize("shape", [(2, 8, 3, 3), (8, 3, 3)])
def test_pixels_and_channels_are_shuffled(backend: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    same(backend, lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2) + F.pixel_shuffle(x, 2).mean(), x)
    same(backend, lambda x: x.roll(1, 1).roll((2, -1), (0, -1)).roll(5) * 2, x)
    if len(shape) == 4:
        same(backend, lambda x: F.channel_shuffle(x, 4) * 2, x)
