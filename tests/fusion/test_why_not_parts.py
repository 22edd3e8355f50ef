"""`why_not` about one operation, modules, source lines and rules."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import dovetail
from dovetail import InvalidArgument, UnknownNode
from dovetail.fusion.fuse import fuse
from dovetail.fusion.ledger import Ledger, explain
from tests.fusion.helpers import Fixed
from tests.fusion.test_ledger import chain
from tests.fusion.test_ledger_report import Block, layered
from tests.outlining.helpers import trace


@dovetail.rule(kind="scaled")
def scaled(x: Any) -> Any:
    return torch.tanh(F.gelu(x) * 2)


def asked(gm: GraphModule, *items: Any, **options: Any) -> tuple[str, ...]:
    return tuple(explain(gm).why_not(*items, **options))


@pytest.fixture(scope="module")
def layers() -> GraphModule:
    return fuse(layered(3))


def test_one_operation_in_a_region(layers: GraphModule) -> None:
    (answer,) = asked(layers, "gelu")
    assert answer.startswith("'gelu' is in region 'linear_activation_0' (kind 'linear_activation'")
    assert asked(layers, "linear_activation_0")[0].startswith("'linear_activation_0' is itself region")


def test_one_operation_in_no_region(layers: GraphModule) -> None:
    answers = asked(layers, "linear_1")
    assert answers[0] == (
        "'linear_1' is in no region: rule 'groups': 'linear_1' is a matrix product, and 'reshape' after it is not "
        "elementwise work of its shape."
    )
    assert not [answer for answer in answers[1:] if "after it is not elementwise" in answer]
    view = fuse(dovetail.capture(lambda x: x.transpose(0, 1), (torch.randn(2, 8),)))
    assert asked(view, "transpose") == (
        "'transpose' is in no region: a view or a size: nothing is launched for it.",
    )


def test_what_the_user_excluded_and_what_nobody_asked_for() -> None:
    gm = fuse(trace(chain), Fixed("pair", "relu exp"), never="tanh")
    assert asked(gm, "tanh") == ("'tanh' is in no region: excluded by never='tanh'.",)
    assert asked(gm, "sigmoid") == ("'sigmoid' is in no region: no rule asked for it.",)


def test_a_module_that_is_in_regions_and_out_of_them(layers: GraphModule) -> None:
    answers = asked(layers, "layers.1")
    assert answers[0] == (
        "module 'layers.1' has 7 operations: 2 in region 'linear_activation_1' (kind 'linear_activation', made by rule "
        "'linear_gelu' in round 1); 1 in no region, 'linear_3'; 4 in region 'group_1' (kind 'group', made by rule "
        "'groups' in round 1)."
    )
    assert answers[1] == (
        'nothing prevents one region of all of them; no rule asked for it: `dovetail.rules.modules("layers.1", '
        "kind=...)` does."
    )
    assert any(answer.startswith("in no region, 'linear_3'") for answer in answers)


def test_a_module_that_is_one_region(layers: GraphModule) -> None:
    gm = fuse(layered(2), dovetail.rules.modules("layers.*", kind="layer"))
    assert asked(gm, "layers.0") == (
        "module 'layers.0', 7 operations, is together already, in region 'layer_0' (kind 'layer', made by rule 'layer' "
        "in round 1).",
    )
    together = (
        "they are together already, in region 'layer_0' (kind 'layer', made by rule 'layer' in round 1)."
    )
    assert asked(gm, "layers.0.up", "layers.0.down") == (together,)
    both = fuse(layered(2), dovetail.rules.capability(lambda node: True, kind="whole"))
    assert "which has 7 other operations too" in asked(both, "layers.0")[0]


def test_modules_with_something_between_them(layers: GraphModule) -> None:
    answers = asked(layers, "layers.0", "layers.2")
    assert answers[0].startswith("module 'layers.0' and module 'layers.2' have 14 operations: ")
    assert (
        "4 in 2 regions of kind 'linear_activation', 'linear_activation_0', 'linear_activation_2'"
        in answers[0]
    )
    assert (
        "they alone cannot be one region: 'linear_2', 'gelu_1', 'linear_3', 'reshape_2' and 3 more depend on"
        in (" ".join(answers))
    )


def test_a_glob_is_all_modules_that_match(layers: GraphModule) -> None:
    assert asked(layers, "layers.*.down")[0].startswith(
        "module 'layers.*.down' has 3 operations: 3 in no region"
    )


def test_a_source_line(layers: GraphModule) -> None:
    lines, start = inspect.getsourcelines(Block.forward)
    number = start + next(i for i, line in enumerate(lines) if "gelu" in line)
    answers = asked(layers, f"test_ledger_report.py:{number}")
    assert answers[0].startswith(f"line test_ledger_report.py:{number} has 21 operations: ")
    with pytest.raises(UnknownNode, match=rf"no operation comes from this line.*nearest lines.*{number}"):
        asked(layers, f"test_ledger_report.py:{number + 1}")
    with pytest.raises(UnknownNode, match="No operation of this graph comes from that file"):
        asked(layers, "another.py:3")


def test_a_line_and_an_operation_may_be_asked_together(layers: GraphModule) -> None:
    assert asked(layers, "linear_1", "layers.1")[0].startswith(
        "'linear_1' and module 'layers.1' have 8 operations"
    )


def test_names_that_exist_nowhere(layers: GraphModule) -> None:
    with pytest.raises(
        UnknownNode, match=r"no such operation, module or source line: 'layers.1.upp'.*'layers.1.up'"
    ):
        asked(layers, "layers.1.upp")
    with pytest.raises(InvalidArgument, match="takes operations, modules or source lines"):
        asked(layers)
    with pytest.raises(InvalidArgument, match="operations or a rule, not both"):
        asked(layers, "gelu", rule="groups")
    with pytest.raises(InvalidArgument, match="has no graph"):
        Ledger.from_json(explain(layers).to_json()).why_not("gelu")


def test_a_rule_that_has_regions(layers: GraphModule) -> None:
    assert asked(layers, rule="linear_gelu")[0] == "rule 'linear_gelu' made 3 regions."


def test_a_rule_that_came_near() -> None:
    gm = fuse(dovetail.capture(lambda x: torch.tanh(F.silu(x) * 2), (torch.randn(2, 8),)), scaled)
    assert asked(gm, rule="scaled") == (
        "rule 'scaled' got to 2 of 3 operations at 'mul', 'tanh' and stopped at 'silu': it has 'aten.silu.default' where "
        "the pattern has 'aten.gelu.default'.",
    )


def test_a_rule_of_which_nothing_was_recorded_is_evaluated_once_more() -> None:
    gm = fuse(dovetail.capture(lambda x: torch.tanh(x.exp()), (torch.randn(2, 8),)), scaled)
    assert not explain(gm).declined
    (answer,) = asked(gm, rule=scaled)
    assert answer.startswith("rule 'scaled' got to 1 of 3 operations at 'tanh' and stopped at 'exp'")
    assert answer.endswith("it has 'aten.exp.default' where the pattern has 'aten.mul.Tensor'.")


def test_a_rule_whose_operators_the_graph_has_not() -> None:
    gm = fuse(trace(chain), Fixed("pair", "relu exp"))
    captured = dovetail.capture(lambda x: x.exp(), (torch.randn(2),))
    (answer,) = asked(captured, rule=scaled)
    assert answer.startswith("rule 'scaled' matched nothing: the graph has too few operators for it: ")
    assert "'aten.tanh.default'" in answer
    with pytest.raises(InvalidArgument, match=r"no rule 'swigul'\. Did you mean 'swiglu'"):
        asked(gm, rule="swigul")


def test_a_rule_that_would_match_but_was_not_applied() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.tanh(F.gelu(x) * 2)

    gm = fuse(dovetail.capture(model, (torch.randn(2, 8),)), Fixed("pair", "mul tanh"))
    assert asked(gm, rule=scaled) == (
        "rule 'scaled' matches 'gelu', 'mul', 'tanh': it was not among the rules that were applied, or other regions took "
        "these operations first.",
    )


def test_refusals_are_selected_by_rule_kind_and_module(layers: GraphModule) -> None:
    declined = explain(layers).declined
    some = declined(rule="groups", module="layers.1")
    assert 0 < len(some) < len(declined)
    assert type(some) is type(declined)
    assert {entry.rule for entry in some} == {"groups"}
    assert ("linear_3", "reshape_2") in [entry.nodes for entry in some]
    assert ("linear_5", "reshape_4") not in [entry.nodes for entry in some]
    assert declined(module="Block") == declined(module="layers.*")
    assert declined(kind="group") == declined(rule="groups") != ()
    assert str(some).splitlines()[0].startswith("rule 'groups' on ")
    assert str(declined(rule="rms_norm")) == "nothing was declined"


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"rule": "group"}, "no rule 'group'. Did you mean 'groups'"),
        ({"kind": "linear_activatoin"}, "Did you mean 'linear_activation'"),
        ({"module": "layers.1.upp"}, r"no module matches 'layers.1.upp'. Did you mean 'layers.1.up'"),
        ({"module": nn.Linear}, "is not a path"),
    ],
)
def test_a_selection_by_a_name_that_does_not_exist_is_an_error(
    layers: GraphModule, options: dict[str, Any], hint: str
) -> None:
    with pytest.raises(InvalidArgument, match=hint):
        explain(layers).declined(**options)


def test_what_is_outside_has_its_module_and_its_cost(layers: GraphModule) -> None:
    outside = explain(layers).outside()
    entry = next(o for o in outside if o.name == "linear_1")
    assert (entry.operator, entry.module, entry.rule) == ("linear", "layers.0.down", "groups")
    assert entry.flops == 2 * 4 * 16 * 8
    assert entry.bytes == 4 * (4 * 16 + 16 * 8 + 8 + 4 * 8)
    lines = str(outside).splitlines()
    assert lines[0] == f"{len(outside)} operations in no region"
    row = next(line for line in lines if " linear " in line)
    assert row.split()[:2] == ["3", "linear"]
    assert "layers.0–2.down" in row
    assert str(explain(fuse(trace(chain), Fixed("all", "relu exp tanh sigmoid"))).outside()) == (
        "every operation is in a region"
    )


@pytest.mark.parametrize("asked_about", [("linear_1",), ("linear_1", "reshape"), ("linear_1", "linear")])
def test_no_reason_is_given_twice(asked_about: tuple[str, ...]) -> None:
    answers = explain(dovetail.fuse(layered(2))).why_not(*asked_about)
    texts = [answer.rpartition("rule 'groups'")[2].partition(": ")[2] for answer in answers]
    assert len(texts) == len(set(texts))
