"""Verifying a schedule on a GPU, whose random numbers are its own."""

import pytest
import torch
from torch import Tensor

import tests.scheduling.models as models
from dovetail.errors import VerificationError
from dovetail.scheduling.schedule import schedule

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def drawing(x: Tensor) -> Tensor:
    torch.rand(1, device=x.device)
    return torch.nn.functional.gelu(x)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_random_numbers_of_the_device_are_compared(training: bool) -> None:
    model, x = models.net(training=training)
    s = schedule(model.cuda(), (x.cuda(),))
    s.fuse(s["blocks.0"].find(models.mlp))
    drawn = torch.cuda.get_rng_state()
    assert s.verify(train=True).buffers == 9
    s.replace(drawing, s["blocks.1"].find(models.activation)[0])
    with pytest.raises(VerificationError) as raised:
        s.verify()
    assert (raised.value.what, raised.value.step) == ("the random state of cuda:0", 2)
    assert torch.equal(torch.cuda.get_rng_state(), drawn)
