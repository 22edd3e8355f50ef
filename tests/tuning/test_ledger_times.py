"""What a plan measured is in the ledger of the graph that it is applied to."""

from dataclasses import replace

import dovetail
from dovetail.tuning.decisions import Alternative, BlockDecision, RegionChoice, Spread
from tests.tuning.plans import Layers, X, block_of, captured, halves, plan_for


def test_times_of_the_plan_are_in_the_ledger() -> None:
    model = Layers(3).eval()
    block = block_of(captured(model))
    decision = replace(
        halves(block),
        seconds=Spread(2e-3, 1e-3, 3e-3, 5),
        runner_up=Alternative("one region", Spread(4e-3, 4e-3, 4e-3, 5)),
    )
    unused = replace(decision, label="of another block")
    plan = plan_for(model, X, divided={block.key: decision, "another": unused})
    ledger = dovetail.explain(dovetail.compile(model, (X,), plan=plan, backends="eager"))
    (measured,) = ledger.measured
    assert (measured.scope, measured.label, measured.seconds) == ("block", "layer", 2e-3)
    assert (measured.runner_up, measured.runner_up_seconds) == ("one region", 4e-3)
    assert "  block layer: head (2), tail (3) 2 ms; next best one region 4 ms" in str(ledger)
    assert dovetail.Ledger.from_json(ledger.to_json()).measured == ledger.measured


def test_a_decision_that_is_not_applied_has_no_time_in_the_ledger() -> None:
    model = Layers(3).eval()
    block = block_of(captured(model))
    decision = BlockDecision("layer", Spread(1e-3, 1e-3, 1e-3, 5), regions=(RegionChoice("head", (99,)),))
    plan = plan_for(model, X, divided={block.key: decision})
    assert dovetail.explain(dovetail.compile(model, (X,), plan=plan, backends="eager")).measured == ()
