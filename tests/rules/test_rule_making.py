"""Making rules: guards, rule sets, and what is refused before any graph is looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dovetail
from dovetail.errors import InvalidArgument, RuleError
from dovetail.rules.patterns.alternatives import Const, either, optional
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.patterns.pattern_rule import rule
from dovetail.rules.rule import Candidate, Decline, RuleSet
from tests.rules.helpers import declined, matches, proposals


def swiglu_rule(**options: Any):
    @rule(kind="swiglu", **options)
    def swiglu(x, gate, up):
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    return swiglu


def model(x, gate, up):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


INPUTS = (torch.randn(2, 4), torch.randn(6, 4), torch.randn(6, 4))


def test_a_guard_sees_the_bound_values_and_declines_with_a_reason() -> None:
    swiglu = swiglu_rule()
    seen: list[Match] = []

    @swiglu.guard
    def not_wide(m: Match) -> Decline | None:
        seen.append(m)
        if m["gate"].shape[0] > 4:
            return Decline("too wide", at=m["gate"])
        return None

    gm = dovetail.capture(model, INPUTS)
    candidates, (refusal,), context = proposals(swiglu, gm)
    assert candidates == []
    assert refusal.reason == "too wide"
    assert refusal.at is not None
    assert context.nodes[refusal.at].name == "gate"
    (match,) = seen
    gate = match["gate"]
    assert (gate.dtype, gate.ndim, gate.device.type, gate.name) == (torch.float32, 2, "cpu", "gate")
    assert gate.is_input
    assert not gate.is_constant
    assert len(gate.users) == 1
    assert [n.name for n in match.nodes] == ["linear", "silu", "linear_1", "mul"]
    assert [n.name for n in match.outputs] == ["mul"]
    with pytest.raises(KeyError, match="not an argument of the pattern"):
        match["down"]


def test_a_guard_knows_parameters_from_inputs() -> None:
    swiglu = swiglu_rule()

    @swiglu.guard
    def weights_only(m: Match) -> Decline | None:
        return None if m["gate"].is_constant and m["up"].is_parameter else Decline("weights are inputs")

    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(4, 6, bias=False)

        def forward(self, x):
            return F.silu(self.gate(x)) * self.up(x)

    assert declined(swiglu, dovetail.capture(model, INPUTS)) == ["weights are inputs"]
    assert len(matches(swiglu, dovetail.capture(Gated(), INPUTS[:1]))) == 1


def test_a_guard_that_raises_or_answers_nonsense_is_an_error_that_names_the_rule() -> None:
    gm = dovetail.capture(model, INPUTS)
    swiglu = swiglu_rule()
    swiglu.guard(lambda m: 1 / 0)
    with pytest.raises(RuleError, match=r"rule 'swiglu'.*guard.*ZeroDivisionError"):
        list(swiglu.propose(dovetail.RuleContext(gm)))
    other = swiglu_rule()
    other.guard(lambda m: True)  # type: ignore[arg-type,return-value]
    with pytest.raises(RuleError, match="returned True; return None to accept or Decline"):
        list(other.propose(dovetail.RuleContext(gm)))


def test_attributes_can_be_computed_from_the_match() -> None:
    swiglu = swiglu_rule(attrs=lambda m: {"width": int(m["gate"].shape[0])})
    (candidate,), _, _ = proposals(swiglu, dovetail.capture(model, INPUTS))
    assert candidate.attrs == {"width": 6}


def test_what_is_excluded_is_refused_with_the_users_reason() -> None:
    gm = dovetail.capture(model, INPUTS)
    position = next(i for i, n in enumerate(gm.graph.nodes) if n.name == "silu")
    assert declined(swiglu_rule(), gm, barred={position: "excluded by never='silu'"}) == [
        "excluded by never='silu'"
    ]


def test_a_pattern_is_still_the_function_it_is() -> None:
    swiglu = swiglu_rule()
    assert torch.equal(swiglu(*INPUTS), model(*INPUTS))
    assert swiglu.name == "swiglu"

    @rule(kind="k")
    def with_choice(x):
        return optional(either(lambda: x * x, lambda: x.pow(2)), lambda y: y + 1)

    assert torch.equal(with_choice(INPUTS[0]), INPUTS[0] * INPUTS[0] + 1)


def bad(function: Any, match: str, error: type[Exception] = RuleError, **options: Any) -> None:
    with pytest.raises(error, match=match) as caught:
        rule(kind=options.pop("kind", "k"), **options)(function)
    assert isinstance(caught.value, dovetail.DovetailError)


def test_what_cannot_be_a_pattern_is_refused_when_the_rule_is_created() -> None:
    def untraceable(x):
        return x.numpy().sum()

    def data_dependent(x):
        return x * 2 if x.sum() > 0 else x

    def nothing(x):
        x + 1

    def not_a_tensor(x):
        return x.shape

    def ignores(x, y):
        return x + 1

    def parts(x, y):
        return x + 1, y * 2

    def unchanged(x):
        return x

    bad(untraceable, "rule 'untraceable'.*cannot be traced")
    bad(data_dependent, "rule 'data_dependent'.*cannot be traced")
    bad(nothing, "rule 'nothing'.*returns nothing")
    bad(not_a_tensor, "rule 'not_a_tensor'.*other than tensors")
    bad(ignores, "rule 'ignores'.*ignores the argument 'y'")
    bad(parts, "rule 'parts'.*share no value")
    bad(unchanged, "rule 'unchanged'.*returns an argument")
    bad(lambda: torch.ones(2), "takes no operand")
    bad(lambda *xs: xs[0] + 1, "name every argument")
    bad(lambda x: x + 1, "'k k' is not a dotted name", InvalidArgument, kind="k k")
    bad(lambda x: x + 1, "escapes 'sometimes'", escapes="sometimes")
    bad(lambda x: x + 1, "priority 'high'", priority="high")
    bad(lambda x: x + 1, "through", through=("walls",))
    bad(3, "a pattern is a function", InvalidArgument)


def test_a_captured_literal_is_opaque() -> None:
    def computes(x, k=Const()):
        return x + 2 * k

    def branches(x, k=Const()):
        return x + k if k > 0 else x

    def unused(x, k=Const()):
        return x + 1

    def hidden(x, k=Const()):
        import math

        return x * math.sqrt(k)

    bad(computes, "rule 'computes'.*not computed with")
    bad(branches, "rule 'branches'.*not computed with")
    bad(unused, "rule 'unused'.*'k'")
    bad(hidden, "rule 'hidden'.*'k'")


def test_kind_is_a_keyword_and_needed() -> None:
    with pytest.raises(InvalidArgument, match="needs a kind"):
        rule(lambda x: x + 1)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match="kind is a keyword"):
        rule("swiglu")  # type: ignore[call-overload]


def test_examples_help_where_trying_does_not() -> None:
    def picky(x):
        return x.reshape(7, 5) * 2

    bad(picky, "examples=")
    picky_rule = rule(kind="picky", examples=[(torch.randn(35),)])(picky)
    gm = dovetail.capture(lambda x: x.reshape(7, 5) * 2, (torch.randn(5, 7),))
    assert len(matches(picky_rule, gm)) == 1
    bad(picky, "does not run on the example", examples=[(torch.randn(36),)])
    bad(picky, "2 values for 1 operands", examples=[(torch.randn(35), torch.randn(35))])


def test_rule_sets_are_values() -> None:
    first, second = swiglu_rule(), swiglu_rule(name="other")
    rules = RuleSet(first) + second
    assert [r.name for r in rules] == ["swiglu", "other"]
    assert rules == RuleSet([first, [second]])
    assert hash(rules) == hash(RuleSet(first, second))
    assert len(rules + first) == 2, "the same rule twice is one"
    assert rules["other"] is second
    with pytest.raises(RuleError, match="rule 'swiglu': two rules"):
        RuleSet(first, swiglu_rule())
    with pytest.raises(InvalidArgument, match="expected a rule"):
        RuleSet(3)  # type: ignore[arg-type]
    with pytest.raises(RuleError, match="no rule of this name"):
        rules["none"]
    with pytest.raises(InvalidArgument, match="reason"):
        Decline("")


def test_literals_that_are_lists_are_captured_whole() -> None:
    @rule(kind="conv")
    def conv(x, weight, stride=Const(), padding=Const()):
        return F.relu(F.conv2d(x, weight, None, stride, padding))

    gm = dovetail.capture(
        lambda x, w: F.relu(F.conv2d(x, w, None, (1, 2), (0, 3))),
        (torch.randn(1, 2, 9, 9), torch.randn(2, 2, 1, 7)),
    )
    (candidate,), _, _ = proposals(conv, gm)
    assert isinstance(candidate, Candidate)
    assert candidate.attrs == {"stride": [1, 2], "padding": [0, 3]}


@pytest.mark.parametrize("example", [False, True])
def test_a_switch_is_captured_whichever_way_its_example_stands(example: bool) -> None:
    @rule(kind="pool")
    def pool(x, include_pad=Const(example)):
        return F.avg_pool2d(x, [3, 3], [2, 2], [1, 1], False, include_pad)

    for given in (False, True):
        gm = dovetail.capture(
            lambda x, given=given: F.avg_pool2d(x, 3, 2, 1, count_include_pad=given),
            (torch.randn(1, 2, 9, 9),),
        )
        (candidate,), _, _ = proposals(pool, gm)
        assert isinstance(candidate, Candidate)
        assert candidate.attrs == {"include_pad": given}


def test_alternatives_that_differ_in_a_literal_are_each_proven() -> None:
    @rule(kind="scaled")
    def scaled(x, y):
        return x * either(2, 3) + y

    inputs = (torch.randn(3), torch.randn(3))
    assert len(matches(scaled, dovetail.capture(lambda x, y: x * 2 + y, inputs))) == 1
    assert len(matches(scaled, dovetail.capture(lambda x, y: x * 3 + y, inputs))) == 1
    assert declined(scaled, dovetail.capture(lambda x, y: x * 4 + y, inputs))


def test_looking_through_views_and_casts_is_asked_for() -> None:
    def pattern(x, weight):
        return F.relu(x @ weight) * 2

    def with_view(x, weight):
        return F.relu((x @ weight).reshape(2, 3, 4)) * 2

    def with_cast(x, weight):
        return F.relu((x @ weight).double()) * 2

    def turned(x, weight):
        return F.relu((x @ weight).permute(1, 0)) * 2

    strict = rule(pattern, kind="k")
    views = rule(kind="k", through="views")(pattern)
    casts = rule(kind="k", through=("views", "casts"))(pattern)
    inputs = (torch.randn(6, 4), torch.randn(4, 4))
    counts = {
        f.__name__: [len(matches(r, dovetail.capture(f, inputs))) for r in (strict, views, casts)]
        for f in (pattern, with_view, with_cast, turned)
    }
    assert counts == {
        "pattern": [1, 1, 1],
        "with_view": [0, 1, 1],
        "with_cast": [0, 0, 1],
        "turned": [0, 0, 0],
    }


def test_looking_through_a_view_that_changes_the_meaning_is_refused() -> None:
    @rule(kind="k", through="views")
    def probabilities(x):
        return torch.softmax(x * 2, -1)

    same = dovetail.capture(lambda x: torch.softmax((x * 2).reshape(2, 3, 4), -1), (torch.randn(6, 4),))
    assert len(matches(probabilities, same)) == 1
    other = dovetail.capture(lambda x: torch.softmax((x * 2).reshape(4, 6), -1), (torch.randn(6, 4),))
    assert declined(probabilities, other)


def test_the_old_name_of_an_analysis_still_works_and_warns() -> None:
    context = dovetail.RuleContext(dovetail.capture(torch.relu, (torch.ones(2),)))
    with pytest.warns(DeprecationWarning, match="analysis"):
        assert context.fact(len_of_graph) == context.analysis(len_of_graph) == len(context.nodes)


def len_of_graph(context: dovetail.RuleContext) -> int:
    return len(context.nodes)
