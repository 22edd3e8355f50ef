"""What every backend of another project's compiler must do with numbers and sizes at the edge of what there is."""

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule

import dovetail
from dovetail import Decline
from dovetail.lowering.backend_protocol import Answer, by_name
from dovetail.lowering.lower import lower
from tests.backends.external_models import whole


class ExternalNumericsTests:
    """Tests of one backend: tensors without elements, sizes that become zero, denormal numbers."""

    name: ClassVar[str]
    fixed_sizes: ClassVar[bool] = True

    @pytest.fixture(autouse=True)
    def _without_gradients(self) -> Any:
        with torch.no_grad():
            yield

    @property
    def backend(self) -> Any:
        return by_name(self.name)

    def answer(self, gm: GraphModule) -> Answer:
        (region,) = dovetail.regions(gm)
        return self.backend.supports(region)

    def declined(self, gm: GraphModule) -> str:
        answer = self.answer(gm)
        assert isinstance(answer, Decline), answer
        return answer.reason

    @pytest.mark.filterwarnings("ignore:std.*degrees of freedom")
    def test_tensors_without_elements_are_left_to_torch(self) -> None:
        reductions: list[Any] = [
            lambda x: x.mean(1),
            lambda x: x.mean(),
            lambda x: x.sum(1),
            lambda x: x.prod(1),
            lambda x: x.std(1, correction=0),
            lambda x: x.logsumexp(1),
            lambda x: F.softmax(x, 1),
            lambda x: torch.linalg.vector_norm(x, 2, 1),
            lambda x: (x > 0).all(1).float(),
            lambda x: x.transpose(1, 2) @ x,
            lambda x: F.layer_norm(x, (4,)),
            lambda x: F.avg_pool1d(x.transpose(0, 1), 2),
            lambda x: torch.cat([x, torch.ones(3, 2, 4)], 1),
        ]
        x = torch.empty(3, 0, 4)
        for reduced in reductions:
            gm = whole(lambda x, f=reduced: f(x) + 1, x)
            assert "has no elements" in self.declined(gm)
            torch.testing.assert_close(lower(gm, self.name, cache=False)(x), reduced(x) + 1, equal_nan=True)

    def test_a_size_that_varies_may_become_zero(self) -> None:
        dims = {"x": {0: torch.export.Dim("rows", min=0, max=64)}}
        gm = whole(lambda x: x.mean(0) + x.sum(0), torch.randn(4, 8), dynamic_shapes=dims)
        lowered = lower(gm, self.backend, cache=False)
        for rows in (5, 0, 1, 0, 3):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(lowered(x), x.mean(0) + x.sum(0), equal_nan=True)
        if not self.fixed_sizes:
            assert {r.backend for r in dovetail.regions(lowered)} == {self.name}

    def test_denormal_literals(self) -> None:
        tiny = torch.tensor([1e-39, 0.0, -1e-39, 1e-37, 1.0])
        for function in (lambda x: (x > 1e-40).float() * 2, lambda x: torch.relu(x) + 1e-40):
            gm = whole(function, tiny)
            if self.backend.flushes_denormals:
                assert "1e-40 is denormal in float32" in self.declined(gm)
            else:
                assert self.answer(gm) is True
            assert torch.equal(lower(gm, self.name, cache=False)(tiny), function(tiny))
        # Zero, the smallest normal number and what torch itself rounds to zero are ordinary.
        for literal in (0.0, 2e-38, 1e-60):
            assert self.answer(whole(lambda x, c=literal: torch.where(x > c, x, -x) * 2, tiny)) is True

    def test_denormals_of_the_caller_stay_as_they_are(self) -> None:
        x = torch.randn(8, 8)
        lower(whole(lambda x: torch.relu(x @ x) + 1, x), self.backend, cache=False, on_error="raise")(x)
        assert float(torch.tensor(1e-39) * torch.ones(())) > 0
