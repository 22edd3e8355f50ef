"""The plan that the page on tuning shows."""

from dovetail import zoo
from dovetail.tuning.plan import Plan
from tests.guides import ROOT


def test_the_plan_that_is_shown_still_fits_its_model() -> None:
    entry = zoo.get("llama")
    model, args = entry.build("small").eval(), entry.example_inputs("small", batch=1).args
    plan = Plan.load(ROOT / "examples" / "llama.plan.json")
    plan.check(model, args, environment=False)
    text = plan.explain()
    assert "runner-up" in text
    assert "rejected" in text
