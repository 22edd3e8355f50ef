"""What every test starts from."""

import os
import tempfile
from collections import Counter

import pytest
import torch

# Tests run side by side, one process per core: more threads in each would only get in each other's way.
torch.set_num_threads(1)
# One cache for all tests of a checkout, and never the user's own: the first kernel of a process is what costs.
os.environ.setdefault(
    "DOVETAIL_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"dovetail-tests-{os.getuid()}", "cache")
)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name what is not installed, and how many tests were skipped for it."""
    reasons = Counter(
        reason.removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        for _, _, reason in [report.longrepr]
        if "not installed" in reason
    )
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} tests were skipped: {reason}")
