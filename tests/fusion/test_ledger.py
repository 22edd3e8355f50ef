"""The ledger: what it says, how it travels, and that it stays small."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import dovetail
from dovetail.errors import InvalidArgument, UnknownNode
from dovetail.fusion.fuse import fuse
from dovetail.fusion.ledger import MOST, Ledger, explain
from dovetail.rules.rule import Candidate, Proposal, Refusal, Rule, RuleContext
from tests.fusion.helpers import Fixed
from tests.outlining.helpers import drawn, node, trace
from tests.zoo_graphs import zoo_graph

# A rule that fails is warned of; these tests are about what the ledger has of it.
pytestmark = pytest.mark.filterwarnings("ignore:rule '.*' failed:RuntimeWarning")

X = torch.linspace(-1, 1, 6).reshape(2, 3)


def chain(x: Tensor) -> Tensor:
    return x.relu().exp().tanh().sigmoid()


def example() -> GraphModule:
    gm = trace(chain)
    for n in gm.graph.nodes:
        n.meta["val"] = X
    rules = [
        Fixed("wide", "relu exp tanh"),
        Fixed("pair", "tanh sigmoid", refusals=[("relu exp", "no reason")]),
    ]
    return fuse(gm, rules)


def test_what_was_accepted_and_what_it_saves() -> None:
    ledger = explain(example())
    (entry,) = ledger.accepted
    assert (entry.region, entry.kind, entry.rule, entry.round) == ("wide_0", "wide", "wide", 1)
    assert entry.nodes == ("relu", "exp", "tanh")
    # Two values are neither stored nor loaded.
    assert (entry.launches_saved, entry.bytes_saved, entry.bytes_recomputed) == (2, 4 * X.nbytes, 0)
    assert (ledger.launches_saved, ledger.bytes_saved, ledger.rounds) == (2, 4 * X.nbytes, 1)


def test_what_was_declined_and_how_far_it_got() -> None:
    lost, near = explain(example()).declined
    assert (near.rule, near.nodes, near.reason) == ("pair", ("relu", "exp"), "no reason")
    assert (near.place, near.matched, near.wanted) == ("exp", 2, 3)
    assert lost.reason == "'tanh' went to region 'wide_0' (rule 'wide')"
    assert (lost.nodes, lost.place) == (("tanh", "sigmoid"), "tanh")


def test_near_misses_on_operations_in_regions_are_folded() -> None:
    refusals = [("relu exp", "inside"), ("tanh sigmoid", "half inside"), ("sin", "outside")]
    rules = [Fixed("wide", "relu exp tanh"), Fixed("pair", refusals=refusals)]
    gm = fuse(trace(lambda x: chain(x).sin()), rules)
    declined = [d for d in explain(gm).declined(rule="pair") if d.round == 1]
    assert [(d.reason, d.folded) for d in declined] == [
        ("half inside", False),
        ("outside", False),
        ("inside", True),
    ]
    assert "inside" not in str(explain(gm)).replace("half inside", "")


def test_near_misses_on_operations_that_later_rounds_fuse_are_folded() -> None:
    rules = [
        Fixed("first", "relu exp"),
        Fixed("late", "first_0 tanh"),
        Fixed("miss", refusals=[("tanh", "no")]),
    ]
    ledger = explain(fuse(trace(chain), rules))
    assert ledger.rounds == 2
    assert [d.folded for d in ledger.declined(rule="miss")] == [True]


def test_a_graph_that_was_never_fused_has_an_empty_one() -> None:
    ledger = explain(trace(chain))
    assert ledger == Ledger()
    assert str(ledger) == "nothing was fused, and nothing was declined"
    with pytest.raises(InvalidArgument, match=r"expected a torch\.fx\.GraphModule"):
        explain(torch.nn.ReLU())  # type: ignore[arg-type]


def test_refusals_that_say_nothing_new_are_folded() -> None:
    gm = trace(lambda x: chain(x).sin().cos())
    family = {"kind": "wave", "min_size": 1}
    by = [
        Fixed("wide", "relu exp tanh"),
        Fixed("part", "exp tanh"),
        Fixed("wave", refusals=[("sigmoid sin cos", "near"), ("sin cos", "less near")], **family),
        Fixed("swell", refusals=[("sigmoid sin", "no nearer")], **family),
        Fixed("other", refusals=[("sin cos", "of another kind")]),
        Fixed("again", kind="wide", refusals=[("relu exp", "the kind is there already")]),
    ]
    ledger = explain(fuse(gm, by))
    counts = {(d.rule, d.reason): d.folded for d in ledger.declined}
    assert counts == {
        ("part", "'exp', 'tanh' went to region 'wide_0' (rule 'wide')"): True,
        ("wave", "near"): False,
        ("wave", "less near"): True,
        ("swell", "no nearer"): True,
        ("other", "of another kind"): False,
        ("again", "the kind is there already"): True,
    }
    assert [d.folded for d in ledger.declined] == sorted(d.folded for d in ledger.declined)
    assert {(r.rule, r.reason): r.count for r in ledger.refused} == {
        ("wave", "near"): 1,
        ("other", "of another kind"): 1,
    }
    assert ledger.folded == 4
    assert Ledger.from_json(ledger.to_json()) == ledger


def test_a_candidate_that_loses_to_another_of_the_same_operations_is_not_folded() -> None:
    ledger = explain(fuse(trace(chain), [Fixed("a", "relu exp"), Fixed("b", "relu exp")]))
    assert [(d.rule, d.folded) for d in ledger.declined] == [("b", False)]


def test_names_that_are_unknown_have_what_there_is_beside_them() -> None:
    ledger = explain(fuse(zoo_graph("llama")))
    with pytest.raises(InvalidArgument, match=r"no kind 'zzzz'\. There are '.*' and \d+ more\."):
        ledger.declined(kind="zzzz")
    with pytest.raises(
        InvalidArgument, match=r"no module matches '\*zzzz\*'.*`\*` is one part of a path, `\*\*` any"
    ):
        ledger.declined(module="*zzzz*")
    assert ledger.declined(module="**.mlp") == ledger.declined(module="layers.*.mlp")


def test_json_and_back() -> None:
    ledger = explain(example())
    text = ledger.to_json()
    assert json.loads(text)["rounds"] == 1
    assert Ledger.from_json(text) == ledger
    assert type(Ledger.from_json(text).declined) is type(ledger.declined)
    for wrong in ("{}", "nonsense", '{"version": 99}', "[]"):
        with pytest.raises(InvalidArgument):
            Ledger.from_json(wrong)


def test_the_text_of_an_older_version_is_read() -> None:
    data = json.loads(explain(example()).to_json())
    data["version"] = 1
    del data["measured"]
    for row in data["declined"]:
        del row["kind"]
    old = Ledger.from_json(json.dumps(data))
    assert old.accepted == explain(example()).accepted
    assert [entry.kind for entry in old.declined] == ["", ""]
    assert Ledger.from_json(old.to_json()) == old


@pytest.mark.parametrize(
    "carry",
    [
        copy.copy,
        copy.deepcopy,
        lambda gm: pickle.loads(pickle.dumps(gm)),
        lambda gm: dovetail.outline(gm, ["sigmoid"], kind="s"),
        lambda gm: dovetail.inline(gm),
    ],
)
def test_it_comes_along_wherever_the_graph_goes(carry: Any) -> None:
    gm = example()
    # What was inlined again stays in the history: it tells what was decided, not what is there.
    assert explain(carry(gm)) == explain(gm)


def test_the_text_of_a_graph_does_not_show_it() -> None:
    gm = example()
    bare = copy.copy(gm)
    bare.meta = {k: v for k, v in gm.meta.items() if k != "dovetail.ledger"}
    assert dovetail.text(bare) == dovetail.text(gm)
    assert explain(bare) == Ledger()


def test_later_fusing_adds_to_it() -> None:
    first = fuse(trace(chain), Fixed("a", "relu exp"))
    second = fuse(first, Fixed("b", "tanh sigmoid"))
    assert [(e.rule, e.round) for e in explain(second).accepted] == [("a", 1), ("b", 2)]
    assert [e.rule for e in explain(first).accepted] == ["a"]
    assert explain(fuse(second, Fixed("b", "tanh sigmoid"))).rounds == 2


class Many(Rule):
    """Makes a region of every pair of a long chain, and has a refusal for every operation."""

    name = kind = "many"

    def propose(self, context: RuleContext) -> Iterator[Proposal]:
        sines = [i for i, n in enumerate(context.nodes) if n.op == "call_function" and n.target is torch.sin]
        for k in range(0, len(sines) - 1, 2):
            yield Candidate(self.name, self.kind, (sines[k], sines[k + 1]))
        for i in sines:
            yield Refusal(self.name, (i,), f"'{context.nodes[i].name}' costs {i} bytes", i)


def test_it_stays_small_on_large_graphs() -> None:
    def draw(graph: Any) -> Any:
        at = graph.placeholder("x")
        for _ in range(3000):
            at = graph.call_function(torch.sin, (at,))
        return at

    ledger = explain(fuse(drawn(draw), Many()))
    assert len(ledger.accepted) == MOST
    assert len(ledger.declined) <= MOST
    assert ledger.saved[0].regions == 1500
    assert ledger.launches_saved == 1500
    assert [(r.rule, r.reason, r.count) for r in ledger.refused] == [("many", "'…' costs N bytes", 3000)]
    assert len(ledger.to_json()) < 300_000
    assert len(str(ledger).splitlines()) < 12


# why_not


def diamond(x: Tensor) -> Tensor:
    a = x.relu()
    return a.exp() + a.tanh().sin()


def why(gm: GraphModule, first: Any, second: Any) -> tuple[str, ...]:
    return tuple(explain(gm).why_not(first, second))


def test_two_that_are_together_already() -> None:
    gm = example()
    assert why(gm, "relu", "tanh") == (
        "they are together already, in region 'wide_0' (kind 'wide', made by rule 'wide' in round 1).",
    )
    assert why(gm, "relu", "relu") == ("'relu' is one operation.",)


def test_all_reasons_are_reported_not_just_the_first() -> None:
    gm = example()
    reasons = why(gm, "tanh", "sigmoid")
    assert reasons[0] == (
        "'tanh' is in region 'wide_0' (kind 'wide', made by rule 'wide' in round 1), and 'sigmoid' is in none."
    )
    assert reasons[1:] == (
        "rule 'pair' declined both in round 1: 'tanh' went to region 'wide_0' (rule 'wide').",
    )
    near = why(gm, "exp", "sigmoid")
    assert near[1:] == (
        "rule 'pair' declined 'sigmoid' in round 1: 'tanh' went to region 'wide_0' (rule 'wide').",
        "rule 'pair' declined 'exp' in round 1, 2 of 3 operations matched: no reason.",
    )
    assert str(explain(gm).why_not("tanh", "sigmoid")).startswith("- 'tanh' is in region")


def test_two_regions_a_path_and_a_node_for_a_name() -> None:
    gm = fuse(trace(diamond), [Fixed("a", "relu"), Fixed("b", "add")])
    assert why(gm, node(gm, "tanh"), node(gm, "sin"))[0].startswith("nothing prevents it")
    both = why(gm, "relu", "add")
    assert both[0] == (
        "they are in two regions: 'relu' in region 'a_0' (kind 'a', made by rule 'a' in round 1), "
        "'add' in region 'b_0' (kind 'b', made by rule 'b' in round 1)."
    )
    assert both[1] == (
        "a region of the two alone would depend on itself: relu -> exp -> b_0. "
        "It would have to be made with the 3 operations between them."
    )


def test_what_is_in_between_is_named_before_anything_was_fused() -> None:
    gm = trace(diamond)
    assert why(gm, "tanh", "add") == (
        "a region of the two alone would depend on itself: tanh -> sin -> add. "
        "It would have to be made with 'sin'.",
    )
    assert why(gm, "relu", "exp") == ("nothing prevents it; no rule has proposed them together.",)
    assert why(gm, "exp", "tanh") == (
        "neither reads the other's result; both read 'relu': only a rule for siblings joins such.",
    )
    assert why(gm, "exp", "sin") == ("neither depends on the other, and they read nothing in common.",)


def test_effects_and_never_are_among_the_reasons() -> None:
    def draw(graph: Any) -> Any:
        x = graph.placeholder("x")
        drawn_ = [graph.call_function(torch.bernoulli, (x,), name=n) for n in ("a", "b", "c")]
        return tuple(drawn_)

    gm = fuse(drawn(draw), Fixed("p", "a b"), never="c")
    reasons = why(gm, "a", "c")
    assert "'c' may not be taken: excluded by never='c'." in reasons
    unconstrained = why(drawn(draw), "a", "c")
    assert unconstrained == (
        "a region of the two alone would depend on itself: a -> b -> c. It would have to be made with 'b'.",
        "the order of effects keeps them apart: 'a' must stay before 'b' (both draw from the random stream).",
        "the order of effects keeps them apart: 'b' must stay before 'c' (both draw from the random stream).",
    )


def test_limits_and_what_is_in_between_are_among_the_reasons() -> None:
    gm = fuse(trace(chain), Fixed("pair", "relu exp"), limits=dovetail.Limits(nodes=2), never="tanh")
    assert why(gm, "relu", "sigmoid")[1:] == (
        "a region of the two alone would depend on itself: exp -> tanh -> sigmoid. "
        "It would have to be made with 'tanh'.",
        "'tanh' between them may not be taken: excluded by never='tanh'.",
    )
    gm = fuse(trace(chain), Fixed("pair", "relu exp"), limits=dovetail.Limits(nodes=2))
    assert why(gm, "relu", "tanh")[1:] == (
        "they cannot be one region: it computes 3 operations, and the limit is 2.",
    )
    assert explain(gm).limits == dovetail.Limits(nodes=2)
    # Limits are those of the last fusing, and travel along.
    assert why(pickle.loads(pickle.dumps(gm)), "relu", "tanh")[1:] == why(gm, "relu", "tanh")[1:]
    assert len(why(fuse(gm, Fixed("none")), "relu", "tanh")) == 1


def test_devices_are_among_the_reasons() -> None:
    gm = trace(chain)
    for n, device in zip(gm.graph.nodes, ("cpu", "cpu", "cpu", "meta", "meta", "meta"), strict=True):
        n.meta["val"] = X.to(device)
    assert why(gm, "exp", "tanh") == ("they are on different devices: 'exp' on cpu and 'tanh' on meta.",)
    assert why(gm, "relu", "exp")[0].startswith("nothing prevents it")


def test_rules_speak_of_operations_inside_regions_as_if_these_were_open() -> None:
    gm = dovetail.capture(lambda x, w: torch.relu(x @ w).sum(-1).exp(), (X, torch.randn(3, 3)))
    new = fuse(gm, dovetail.rules.groups())
    assert why(new, "relu", "sum_1")[1] == (
        "rule 'groups' declined both in round 1: 'relu' is fused after 'matmul', a matrix product, and 'sum_1' is not elementwise work of its "
        "shape."
    )
    assert why(new, "sum_1", "exp")[0] == (
        "rule 'groups' declined both in round 1: 'sum_1' is a reduction: nothing is fused after it."
    )


class Picky(Fixed):
    def why_not(self, context: RuleContext, first: int, second: int) -> list[str]:
        if context.nodes[first].name == "exp":
            raise LookupError("no table")
        return [f"'{context.nodes[second].name}' is not to its taste"]


def test_rules_have_their_say_in_this_process() -> None:
    gm = fuse(trace(chain), Picky("picky"))
    assert why(gm, "relu", "exp") == ("rule 'picky': 'exp' is not to its taste.",)
    assert why(gm, "exp", "tanh") == ("rule 'picky': why_not raised LookupError: no table.",)
    assert why(copy.deepcopy(gm), "relu", "exp") == ("rule 'picky': 'exp' is not to its taste.",)
    assert why(dovetail.outline(gm, ["tanh"], kind="t"), "relu", "exp")
    # Rules do not travel in a pickle; what was recorded does.
    far = pickle.loads(pickle.dumps(gm))
    assert why(far, "relu", "exp") == ("nothing prevents it; no rule has proposed them together.",)


def test_names_inside_regions_and_names_that_are_not_there() -> None:
    gm = fuse(trace(chain), [Fixed("inner", "relu exp"), Fixed("outer", "tanh sigmoid")])
    gm = dovetail.outline(gm, ["inner_0"], kind="around")
    assert "region 'around_0/inner_0' (kind 'inner'" in why(gm, "relu", "sigmoid")[0]
    assert why(gm, "around_0/inner_0", "relu") == (
        "they are together already, in region 'around_0/inner_0' (kind 'inner', made by rule 'inner' in round 1).",
    )
    assert why(gm, "around_0", "exp")[0].startswith("they are together already, in region 'around_0'")
    assert why(gm, "around_0", "tanh")[0].endswith("and 'around_0' is one itself.")
    with pytest.raises(UnknownNode, match="Did you mean 'sigmoid'"):
        explain(gm).why_not("relu", "sigmod")
    with pytest.raises(UnknownNode, match="a graph's placeholder is not an operation"):
        explain(gm).why_not("relu", "x")
    with pytest.raises(InvalidArgument, match="nodes or names"):
        explain(gm).why_not("relu", 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="this ledger has no graph"):
        Ledger.from_json(explain(gm).to_json()).why_not("relu", "exp")
