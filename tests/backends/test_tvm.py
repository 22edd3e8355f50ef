"""TVM: what every such backend must do, and what is its own."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import dovetail
from dovetail.backends.external.tvm import Tvm, to_relax
from dovetail.lowering.backend_protocol import Compiled, by_name, identity
from dovetail.lowering.failures import UnsupportedOp
from dovetail.lowering.lower import lower
from dovetail.outlining.region import Region
from tests.backends.external import ExternalBackendTests
from tests.backends.external_models import whole

pytest.importorskip("tvm")


class Isolated(Tvm):
    isolation = "process"


class Dies(Isolated):
    name = "dies"

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        os.abort()


class TestTvm(ExternalBackendTests):
    name = "tvm"
    isolated = Isolated
    dies = Dies


def test_what_is_no_number_stays_so() -> None:
    def extremes(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = x.reshape(1, 2, 4, 4)
        return (
            torch.relu(x),
            torch.maximum(x, y),
            torch.minimum(x, y),
            x.clamp(-1, 1),
            F.max_pool2d(wide, 2),
            F.max_pool2d(wide, 3, stride=2, padding=1),
            x.max().reshape(1),
        )

    x, y = torch.randn(4, 8), torch.randn(4, 8)
    x[0, 0] = y[1, 1] = float("nan")
    x[2, 3] = float("inf")
    gm = whole(extremes, x, y)
    with torch.no_grad():
        lowered = lower(gm, by_name("tvm"), cache=False, on_error="raise")
        for got, expected in zip(lowered(x, y), extremes(x, y), strict=True):
            assert torch.equal(got.isnan(), expected.isnan())
            assert torch.equal(got.nan_to_num(), expected.nan_to_num())


def test_what_the_converter_gets_wrong_is_declined() -> None:
    answer = by_name("tvm").supports(dovetail.regions(whole(lambda x: torch.log1p(x) * 2, torch.rand(4)))[0])
    assert isinstance(answer, dovetail.Decline)
    assert "log1p" in answer.reason


def test_the_target_is_part_of_what_it_is() -> None:
    assert identity(Tvm("llvm")) != identity(Tvm())
    x = torch.randn(3, 4)
    gm = whole(lambda x: torch.relu(x) * 2, x)
    assert torch.equal(
        lower(gm, Tvm("llvm"), cache=False, on_error="raise", grad=False)(x), torch.relu(x) * 2
    )


def compiled_result(function: Any, *args: torch.Tensor) -> Any:
    """What the code of one region gives; None where the region is declined."""
    gm = whole(function, *args)
    (region,) = dovetail.regions(gm)
    if by_name("tvm").supports(region) is not True:
        return None
    with torch.no_grad():
        return lower(gm, by_name("tvm"), cache=False, on_error="raise", grad=False, smallest=1)(*args)


WILD = torch.tensor(
    [float("nan"), float("inf"), -float("inf"), 0.0, -0.3, 0.7, -2.5, 3.0, 95.0, -150.0, 150.0]
)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.add(x, x.flip(0), alpha=-2.5),
        lambda x: torch.sub(x, 2, alpha=3),
        lambda x: torch.rsub(x, 2, alpha=3),
        lambda x: F.celu(x, 2.0),
        lambda x: torch.ops.aten.elu.default(x, 1.5, 2.0, 3.0),
        lambda x: x.clamp(2, -2),
        lambda x: torch.clamp(x, torch.inf, -torch.inf),
        lambda x: x.pow(0.5),
        lambda x: x.pow(-0.5),
        lambda x: torch.lerp(x, x.flip(0), 0.8),
        lambda x: torch.logaddexp(x, x.flip(0)),
        lambda x: torch.logaddexp(x, x),
        lambda x: torch.topk(torch.stack([x[4], x[0], x[5]]), 2).values,
    ],
    ids=[
        "add",
        "sub",
        "rsub",
        "celu",
        "elu",
        "clamp",
        "clamp-inf",
        "root",
        "rroot",
        "lerp",
        "log",
        "log-same",
        "topk",
    ],
)
def test_arguments_matter(function: Any) -> None:
    torch.testing.assert_close(compiled_result(function, WILD.clone()), function(WILD), equal_nan=True)


def test_arguments_matter_to_whole_numbers() -> None:
    x, y = torch.arange(-5, 6), torch.arange(11, dtype=torch.int32)
    assert torch.equal(compiled_result(lambda x, y: torch.add(x, y, alpha=3), x, y), torch.add(x, y, alpha=3))
    assert torch.equal(compiled_result(lambda x: torch.rsub(x, 2, alpha=3), x), torch.rsub(x, 2, alpha=3))
    assert torch.equal(compiled_result(lambda x: x.clamp(2, -2), x), x.clamp(2, -2))


def test_attention_has_the_scale_and_the_heads_that_it_is_given() -> None:
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 6, 8)
    for options in ({"scale": 0.5}, {"scale": 2.0, "is_causal": True}):
        attend = lambda q, k, o=options: F.scaled_dot_product_attention(q, k, k * 2, **o)  # noqa: E731
        torch.testing.assert_close(compiled_result(attend, q, q[:, :, :2].clone()), attend(q, q[:, :, :2]))
    grouped = lambda q, k: F.scaled_dot_product_attention(q, k, k * 2, enable_gqa=True)  # noqa: E731
    torch.testing.assert_close(compiled_result(grouped, q, k), grouped(q, k))


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: x * 0, WILD),
        (lambda x: F.leaky_relu(x, 0.0), WILD),
        (lambda x: torch.add(x, x.flip(0), alpha=0), WILD),
        (lambda x: x == x, WILD),
        (lambda x: x.clamp(torch.nan, 1.0), WILD),
        (lambda x: x < 0.5, torch.arange(3)),
        (lambda x: torch.topk(x, 2)[0], torch.arange(3, dtype=torch.int16)),
        (lambda x: x.scatter(0, torch.ones_like(x[:1, :1], dtype=torch.int64), 2.5), torch.ones(3, 2)),
    ],
    ids=["zero", "slope", "alpha", "itself", "bound", "fraction", "topk", "scatter"],
)
def test_arguments_that_it_gets_wrong_are_declined(function: Any, x: torch.Tensor) -> None:
    assert compiled_result(function, x.clone()) is None


def test_operators_that_write_are_not_converted() -> None:
    gm = make_fx(lambda a: (a.clone().add_(1),), tracing_mode="fake")(torch.randn(2, 3))
    with pytest.raises(UnsupportedOp, match=r"aten\.add_\.Tensor' is not functional"):
        to_relax(gm.graph)
