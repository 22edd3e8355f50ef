"""OpenVINO: what every such backend must do, and what is its own."""

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dovetail
from dovetail import InvalidArgument
from dovetail.backends.external.openvino import OpenVino
from dovetail.lowering.backend_protocol import Compiled
from dovetail.lowering.lower import lower
from dovetail.outlining.region import Region
from tests.backends.external import ExternalBackendTests
from tests.backends.external_models import whole

pytest.importorskip("openvino")


class Isolated(OpenVino):
    isolation = "process"


class Dies(Isolated):
    name = "dies"

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        os.abort()


class TestOpenVino(ExternalBackendTests):
    name = "openvino"
    isolated = Isolated
    dies = Dies
    fixed_sizes = False

    def test_whole_numbers_are_moved_and_not_computed(self) -> None:
        reason = self.declined(whole(lambda x: x * 3 + 1, torch.tensor([2**40, 7])))
        assert "it computes integers, which OpenVINO does not compute as torch does" in reason
        moved = whole(lambda x: x.view(2, 1).t(), torch.tensor([3, 7]))
        assert self.answer(moved) is True
        lowered = lower(moved, self.backend, cache=False)
        for numbers in ([3, 7], [2**40, -(2**40)], [5, 6]):
            assert lowered(torch.tensor(numbers)).tolist() == [numbers]

        def picked(table: Tensor, rows: Tensor) -> Tensor:
            return F.embedding(rows, table).relu()

        table, rows = torch.randn(5, 4), torch.tensor([0, 4])
        gm = whole(picked, table, rows)
        assert self.answer(gm) is True
        assert torch.equal(lower(gm, self.backend, cache=False)(table, rows), picked(table, rows))

    def test_operands_that_nothing_reads(self) -> None:
        def shaped(x: Tensor, y: Tensor) -> Tensor:
            return torch.zeros_like(x) + y.relu()

        x, y = torch.randn(2, 3), torch.randn(3)
        lowered = lower(whole(shaped, x, y), self.backend, cache=False, on_error="raise")
        assert torch.equal(lowered(x, y), shaped(x, y))

    def test_less_precision_where_it_is_asked_for(self) -> None:
        with pytest.raises(InvalidArgument, match="'f32', 'bf16' or 'f16'"):
            OpenVino(precision="int3")
        backend = OpenVino(precision="bf16")
        assert backend.bound == 0.02
        assert backend.options["precision"] == "bf16"
        model, x = torch.nn.Linear(64, 64).eval(), torch.randn(8, 64)
        fast = dovetail.compile(model, (x,), backends=[backend], cache=False, verify=True)
        assert (fast(x) - model(x)).norm() / model(x).norm() < 0.02


def test_sizes_of_integer_inputs_do_not_stop_the_rule_that_asks_what_is_supported() -> None:
    def looked_up(ids: Tensor, table: Tensor) -> Tensor:
        return torch.tanh(F.embedding(ids, table)).reshape(ids.shape[0] * ids.shape[1], -1) * 2

    sizes = {"ids": {1: torch.export.Dim("length", min=2, max=64)}, "table": None}
    gm = dovetail.capture(
        looked_up, (torch.zeros(2, 8, dtype=torch.int64), torch.randn(5, 4)), dynamic_shapes=sizes
    )
    backend = OpenVino()
    rule = dovetail.rules.capability(backend.takes, kind="openvino")
    assert not dovetail.explain(dovetail.fuse(gm, rule)).errors
