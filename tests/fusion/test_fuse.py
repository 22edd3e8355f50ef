"""Rules that fail, arguments that are wrong, rounds that never end; and real models."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import dovetail
from dovetail import zoo
from dovetail.errors import InvalidArgument, RuleError
from dovetail.fusion.cost import Gain, Traffic
from dovetail.fusion.fuse import fuse
from dovetail.fusion.ledger import explain
from dovetail.rules.rule import Candidate, Limits, Proposal, Refusal, Rule, RuleContext
from tests.fusion.helpers import Fixed, fused, held, reasons, refused
from tests.outlining.helpers import trace

# A rule that fails is warned of; these tests are about what the ledger has of it.
pytestmark = pytest.mark.filterwarnings("ignore:rule '.*' failed:RuntimeWarning")

X = torch.linspace(-1, 1, 6).reshape(2, 3)
PAIR = Fixed("pair", "tanh sigmoid")


def chain(x: Tensor) -> Tensor:
    return x.relu().exp().tanh().sigmoid()


class Proposes(Rule):
    """Proposes what it is given."""

    def __init__(self, *proposals: Any, name: str = "says") -> None:
        self.name = self.kind = name
        self.proposals = proposals

    def propose(self, context: RuleContext) -> Iterator[Proposal]:
        yield from self.proposals


class Breaks(Rule):
    name = kind = "breaks"

    def propose(self, context: RuleContext) -> Iterator[Proposal]:
        yield Candidate(self.name, self.kind, (1, 2))
        raise LookupError("no such table")


def test_a_rule_that_raises_does_not_take_the_others_down() -> None:
    gm = fused(trace(chain), [Breaks(), PAIR], X)
    # Half of what it meant to say is not to be trusted.
    assert held(gm) == {"pair_0": {"tanh", "sigmoid"}}
    (failure,) = explain(gm).errors
    assert (failure.rule, failure.round, failure.error) == ("breaks", 1, "LookupError: no such table")
    assert 'raise LookupError("no such table")' in failure.traceback
    assert "rule 'breaks' failed in round 1: LookupError: no such table" in str(explain(gm))


def test_strict_raises_it_with_its_cause() -> None:
    words = refused(trace(chain), RuleError, [PAIR, Breaks()], on_error="raise")
    assert words == "rule 'breaks': raised LookupError while proposing: no such table."
    with pytest.raises(RuleError) as caught:
        fuse(trace(chain), [Breaks()], on_error="raise")
    assert isinstance(caught.value.__cause__, LookupError)


@pytest.mark.parametrize(
    ("proposal", "words"),
    [
        (Candidate("says", "k", (99,)), "99 is not a position of this graph, which has 6 nodes"),
        (Candidate("says", "k", (-1,)), "-1 is not a position"),
        (Candidate("says", "k", ("relu",)), "'relu' is not a position"),  # type: ignore[arg-type]
        (Candidate("says", "k", ()), "a candidate without operations"),
        (Candidate("says", "k", 3), "members are a int"),  # type: ignore[arg-type]
        (Candidate("says", "k", (0, 1)), "proposes 'x', and a graph's placeholder is not an operation"),
        (Candidate("says", "k", (5,)), "a graph's output is not an operation"),
        (Candidate("says", "no kind", (1,)), "kind 'no kind' is not a dotted name"),
        (Candidate("says", "k", (1,), {"a": float("nan")}), "nan has no JSON form"),
        (Candidate("says", "k", (1,), version="1"), "version '1' of 'k' is not an int"),  # type: ignore[arg-type]
        (Candidate("says", "k", (1,), escapes="sometimes"), "escapes 'sometimes' is not one of auto"),
        (Candidate("says", "k", (1,), escapes={1: "no"}), "escapes 'no' is not one of auto"),
        (Refusal("says", (99,), "why"), "99 is not a position"),
        ("relu", "proposes a str, which is neither a Candidate nor a Refusal"),
    ],
)
def test_what_no_rule_may_propose(proposal: Any, words: str) -> None:
    assert words in refused(trace(chain), RuleError, [Proposes(proposal), PAIR], on_error="raise")
    gm = fused(trace(chain), [Proposes(proposal), PAIR], X)
    assert held(gm) == {"pair_0": {"tanh", "sigmoid"}}
    assert words in explain(gm).errors[0].error
    assert explain(gm).errors[0].error.startswith("rule 'says': ")


def test_a_rule_that_returns_nothing() -> None:
    class Silent(Rule):
        name = kind = "silent"

        def propose(self, context: RuleContext) -> Any:
            return None

    assert "propose returned a NoneType" in refused(trace(chain), RuleError, Silent(), on_error="raise")


def test_candidates_of_nothing_that_computes_are_refused_not_wrong() -> None:
    gm = dovetail.capture(torch.nn.Linear(3, 3), (X,))
    at = [i for i, n in enumerate(gm.graph.nodes) if n.op == "get_attr"]
    new = fuse(gm, Proposes(Candidate("says", "k", (at[0],))))
    assert "has nothing to compute" in reasons(new)[0]


def test_bad_arguments_are_refused_before_anything_is_looked_at() -> None:
    gm = trace(chain)
    with pytest.raises(InvalidArgument, match=r"expected a torch\.fx\.GraphModule"):
        fuse(torch.nn.ReLU(), PAIR)  # type: ignore[arg-type]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rounds": -1}, "rounds=-1 is neither None nor an int of 0 or more"),
        ({"rounds": True}, "rounds=True"),
        ({"fuel": -1}, "fuel=-1"),
        ({"limits": 3}, "limits is a int; give a Limits"),
        ({"cost": 3}, "cost 3 is not a cost model"),
        ({"cost": Traffic}, "is not a cost model"),
        ({"priorities": 3}, "priorities is a int"),
        ({"priorities": {"piar": 1}}, "no rule or kind 'piar'. Did you mean 'pair'?"),
        ({"priorities": {"pair": "high"}}, "'high' for 'pair' is not an int"),
    ]
    for options, words in cases:
        assert words in refused(gm, InvalidArgument, PAIR, **options)
    assert "expected a rule" in refused(gm, InvalidArgument, "pair")
    two = [Fixed("same", "relu"), Fixed("same", "exp")]
    assert "two rules of one set have this name" in refused(gm, RuleError, two)
    nameless = Proposes(name="x")
    nameless.kind = None  # type: ignore[assignment]
    assert "its kind is not a str" in refused(gm, RuleError, nameless)
    with pytest.raises(InvalidArgument, match="not a positive int"):
        Limits(nodes=-1)
    for wrong in ({"launch_bytes": -1}, {"flops_per_byte": 0}, {"launch_bytes": 1.5}):
        with pytest.raises(InvalidArgument):
            Traffic(**wrong)  # type: ignore[arg-type]


def test_no_rounds_and_no_rules_change_nothing() -> None:
    gm = trace(chain)
    for new in (fuse(gm, PAIR, rounds=0), fuse(gm, [])):
        assert new is not gm
        assert dovetail.text(new) == dovetail.text(gm)
        assert not explain(new).accepted


class Wraps(Rule):
    """Wraps whatever region there is, for ever."""

    name, nests = "wraps", True

    def __init__(self, *kinds: str) -> None:
        self.kind, self.kinds = kinds[0], kinds

    def propose(self, context: RuleContext) -> Iterator[Proposal]:
        for i in context.calls:
            yield Candidate(self.name, f"{self.kind}{context.round}", (i,))


def test_rules_that_never_come_to_an_end_are_stopped() -> None:
    gm = fuse(trace(chain), [PAIR, Wraps("around")])
    assert "round after round without taking anything more in" in explain(gm).errors[0].error
    assert explain(gm).rounds < 8
    assert len(dovetail.regions(gm)) == 1
    words = refused(trace(chain), RuleError, [PAIR, Wraps("around")], on_error="raise")
    assert words.startswith("rule 'wraps': makes new regions")
    # With a number of rounds that was asked for, that many are made.
    assert explain(fuse(trace(chain), [PAIR, Wraps("around")], rounds=9)).rounds == 9


def test_a_region_is_not_wrapped_in_its_own_kind() -> None:
    class Again(Rule):
        name = kind = "pair"
        nests = True

        def propose(self, context: RuleContext) -> Iterator[Proposal]:
            yield from (Candidate(self.name, self.kind, (i,)) for i in context.calls)

    gm = fuse(trace(chain), PAIR)
    assert dovetail.text(fuse(gm, Again())) == dovetail.text(gm)
    assert reasons(fuse(gm, Again())) == ["it is a region of kind 'pair' already"]
    rule = Again()
    rule.nests = False
    assert "the rule does not nest them" in reasons(fuse(gm, rule))[0]


def test_another_cost_model_decides_otherwise() -> None:
    class Shy:
        """Nothing pays but the region of two."""

        def gain(self, figures: Any, draft: Any) -> Gain:
            return Gain(score=1 if len(draft.members) == 2 else 0)

        def freed(self, figures: Any, position: int) -> Gain:
            return Gain()

    rules = [Fixed("three", "relu exp tanh"), PAIR]
    assert set(held(fused(trace(chain), rules, X))) == {"three_0"}
    assert set(held(fused(trace(chain), rules, X, cost=Shy()))) == {"pair_0"}


def test_progress_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dovetail.fusion.fuse"):
        fuse(trace(chain), PAIR)
    assert caplog.messages == [
        "round 1: 6 nodes, 1 candidates, 1 regions made, 0 refused, 0 rules failed",
        "round 2: 6 nodes, 0 candidates, 0 regions made, 0 refused, 0 rules failed",
    ]


class Stretches(Rule):
    """Stretches of the structural order, some of which are legal regions and some not."""

    name = kind = "stretch"

    def propose(self, context: RuleContext) -> Iterator[Proposal]:
        operations = [
            i for i, n in enumerate(context.nodes) if n.op == "call_function" and i not in context.calls
        ]
        operations.sort(key=context.order.__getitem__)
        for k in range(0, len(operations) - 4, 3):
            yield Candidate(self.name, self.kind, tuple(operations[k : k + 4]), divisible=k % 2 == 0)


@pytest.mark.parametrize("name", zoo.names())
def test_models_of_the_zoo(name: str) -> None:
    entry = zoo.get(name)
    model, inputs = entry.build(), entry.example_inputs()
    gm = dovetail.capture(model, inputs.args, inputs.kwargs)
    before = dovetail.text(gm)
    new = fuse(gm, Stretches(), rounds=2, on_error="raise")
    dovetail.check(new)
    assert dovetail.text(gm) == before
    assert len(dovetail.regions(new)) > 2
    torch.manual_seed(0)
    want = gm(*inputs.args, **inputs.kwargs)
    torch.manual_seed(0)
    got = new(*inputs.args, **inputs.kwargs)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert dovetail.text(dovetail.inline(new)) == before
