"""The page on tuning: its examples run and print what is shown."""

import pytest

from tests.guides import ROOT, check_examples


@pytest.mark.timeout(300)
def test_the_page_on_tuning_prints_what_is_shown() -> None:
    pytest.importorskip("openvino")
    check_examples(ROOT / "docs" / "tuning.md", 4)
