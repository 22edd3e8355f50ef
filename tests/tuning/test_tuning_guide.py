"""The page on tuning: its examples run and print what is shown."""

import pytest

from dovetail import zoo
from dovetail.tuning.plan import Plan
from tests.guides import ROOT, check_examples


@pytest.mark.timeout(300)
def test_the_page_on_tuning_prints_what_is_shown() -> None:
    pytest.importorskip("openvino")
    check_examples(ROOT / "docs" / "tuning.md", 4)


def test_the_plan_that_is_shown_still_fits_its_model() -> None:
    entry = zoo.get("llama")
    model, args = entry.build("small").eval(), entry.example_inputs("small", batch=1).args
    plan = Plan.load(ROOT / "examples" / "llama.plan.json")
    plan.check(model, args, environment=False)
    text = plan.explain()
    assert "runner-up" in text
    assert "rejected" in text
