"""TVM: what every such backend must do, and what is its own."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dovetail
from dovetail.lowering.backend import Compiled, by_name, identity
from dovetail.lowering.backends.tvm import Tvm
from dovetail.lowering.lower import lower
from dovetail.outlining.region import Region
from tests.lowering.foreign import ForeignKit
from tests.lowering.foreign_models import whole

pytest.importorskip("tvm")


class Isolated(Tvm):
    isolation = "process"


class Dies(Isolated):
    name = "dies"

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        os.abort()


class TestTvm(ForeignKit):
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
        for got, wanted in zip(lowered(x, y), extremes(x, y), strict=True):
            assert torch.equal(got.isnan(), wanted.isnan())
            assert torch.equal(got.nan_to_num(), wanted.nan_to_num())


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
