"""What every test starts from."""

import pytest
import torch

# Tests run side by side, one process per core: more threads in each would only get in each other's way.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
