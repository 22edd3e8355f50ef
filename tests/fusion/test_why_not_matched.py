"""What goes wrong without an error is reported: rules that fail or match nothing, names that name nothing."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dovetail
from dovetail import Decline, InvalidArgument, RegionError, UnknownNode, either, explain, fuse, regions, rule
from dovetail.rules import capability
from dovetail.rules.library import KINDS

X = torch.randn(2, 8)


def model(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(F.gelu(x) * 2) + torch.sigmoid(x)


def model_as_module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.GELU(), torch.nn.Tanh())


def scaled(**options: Any) -> Any:
    def pattern(x: Any) -> Any:
        return F.gelu(x) * 2

    return rule(kind="scaled", **options)(pattern)


@pytest.fixture
def gm() -> torch.fx.GraphModule:
    return dovetail.capture(model, (X,))


def misspelled_attribute(m: Any) -> Any:
    return None if m["x"].dtyp == torch.float32 else Decline("other dtype")


def missing_name(m: Any) -> Any:
    return None if m["x"].dtype == float32 else Decline("other dtype")  # type: ignore[name-defined]  # noqa: F821


def wrong_operand(m: Any) -> Any:
    return None if m["y"].dtype == torch.float32 else Decline("other dtype")


def returns_a_bool(m: Any) -> Any:
    return m["x"].dtype == torch.float32


@pytest.mark.parametrize(
    ("guard", "error"),
    [
        (misspelled_attribute, "dtyp"),
        (missing_name, "name 'float32' is not defined"),
        (wrong_operand, "y"),
        (returns_a_bool, "returned True; return None to accept"),
    ],
)
def test_a_guard_that_fails_is_warned_of_once_with_its_traceback(gm: Any, guard: Any, error: str) -> None:
    guarded = scaled()
    guarded.guard(guard)
    with pytest.warns(RuntimeWarning, match=r"rule 'pattern' failed and was left out") as caught:
        fused = fuse(gm, guarded)
    (warning,) = caught
    assert error in str(warning.message)
    assert "Traceback" in str(warning.message)
    assert guard.__name__ in str(warning.message)
    assert warning.filename == __file__
    (failure,) = explain(fused).errors
    assert error in failure.error
    assert not regions(fused)
    fuse(gm, guarded)  # the same rule and error are not warned of again
    with pytest.raises(dovetail.RuleError, match="guard"):
        fuse(gm, guarded, on_error="raise")
    again = scaled()
    again.guard(guard)
    with pytest.warns(RuntimeWarning, match="left out"):
        fuse(gm, again)


def test_predicates_and_attributes_that_fail_are_warned_of(gm: Any) -> None:
    with pytest.warns(RuntimeWarning, match=r"(?s)capability:k' failed.*no attribute 'opp'"):
        fuse(gm, capability(lambda node: node.opp == "x", kind="k"))
    with pytest.warns(RuntimeWarning, match=r"(?s)rule 'pattern' failed.*its attrs raised KeyError"):
        fuse(gm, scaled(attrs=lambda m: {}["x"]))


def test_a_guard_that_declines_is_no_failure(gm: Any) -> None:
    guarded = scaled()
    guarded.guard(lambda m: Decline("not today"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ledger = explain(fuse(gm, guarded))
    assert not ledger.errors
    assert not ledger.unmatched


def test_a_rule_that_matched_nothing_is_in_the_ledger(gm: Any) -> None:
    def absent(x: Any) -> Any:
        return torch.erf(x).cos()

    ledger = explain(fuse(gm, [scaled(), rule(absent, kind="k")]))
    assert ledger.unmatched == ("absent",)
    assert "matched nothing: absent" in str(ledger)
    assert dovetail.Ledger.from_json(ledger.to_json()).unmatched == ("absent",)
    assert "matched nothing" not in str(explain(fuse(gm, scaled())))
    # Fusing again, as `compile` does for what is left, keeps the first and adds nothing that has matched.
    again = explain(fuse(fuse(gm, [scaled(), rule(absent, kind="k")]), scaled()))
    assert again.unmatched == ("absent",)
    compiled = dovetail.compile(model_as_module(), (X,), rules=rule(absent, kind="k"), backends="eager")
    assert "matched nothing: absent" in str(explain(compiled))
    # Of a whole library only the user's own are listed.
    among = explain(fuse(gm, [dovetail.rules.DEFAULT, rule(absent, kind="k")]))
    assert len(among.unmatched) > 8
    assert "matched nothing: absent" in str(among).splitlines()
    assert "matched nothing" not in str(explain(fuse(gm)))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("geluu", "gelu"),
        ("gleu", "gelu"),
        ("LayerNorm", "layer_norm"),
        ("conv_2d", "conv2d"),
        ("lineer", "linear"),
        ("attentoin", "attention"),
        ("swigluu", "swiglu"),
        ("aten.gelu.defualt", "aten.gelu.default"),
        ("aten.geluu", "aten.gelu"),
        ("torch.nn.functional.geluu", "gelu"),
    ],
)
def test_a_misspelled_operator_is_refused_with_the_nearest(name: str, meant: str) -> None:
    for make in (lambda: capability({name, "add"}, kind="k"), lambda: dovetail.rules.siblings(of=name)):
        with pytest.raises(InvalidArgument, match=rf"Did you mean '{meant}'"):
            make()


@pytest.mark.parametrize("name", ["F.gelu", "nn.functional.gelu"])
def test_a_name_of_python_code_is_refused_with_that_of_the_operator(name: str) -> None:
    with pytest.raises(InvalidArgument, match="Give 'gelu'"):
        capability({name}, kind="k")


@pytest.mark.parametrize(
    "name", [*sorted(KINDS), "my_gelu", "npu.pool", "mylib::op", "gelu", "truediv", "multiply"]
)
def test_kinds_and_other_words_for_operators_are_names(name: str) -> None:
    capability({name}, kind="k")


def test_words_of_python_and_rules_are_met(gm: Any) -> None:
    assert regions(fuse(gm, capability({"multiply"}, kind="k", min_size=1)))[0].nodes == ("mul",)
    first = rule(lambda x: F.gelu(x) * 2, kind="gelu2", name="first")
    both = fuse(fuse(gm, first), capability({first, "tanh"}, kind="k"))
    assert regions(both)[0].nodes == ("gelu", "mul", "tanh")


def test_what_must_be_together_is_in_one_region_or_refused(gm: Any) -> None:
    rules = [scaled(), rule(lambda x, y: torch.tanh(x) + y, kind="tail", name="tail")]
    assert len(regions(fuse(gm, rules, must=[["gelu", "mul"]]))) == 2
    with pytest.raises(
        RegionError, match=r"must=\['gelu', 'tanh'\]: 'gelu' and 'tanh' are in no common region"
    ):
        fuse(gm, rules, must=[["gelu", "tanh"]])
    with pytest.raises(RegionError, match="'sigmoid' in no region"):
        fuse(gm, rules, must=["gelu", "sigmoid"])
    fuse(gm, rules, must=["gelu", "tanh"])
    with pytest.raises(UnknownNode, match=r"'tnah'.*Did you mean 'tanh'"):
        fuse(gm, rules, must=[["gelu", "tnah"]])
    for wrong in ({"gelu": "mul"}, b"gelu", [None], [["gelu", None]], [3]):
        for option in ("must", "never"):
            with pytest.raises(InvalidArgument, match=rf"{option}: .* is neither a node"):
                fuse(gm, rules, **{option: wrong})
    together = dovetail.Fuse(rules, must=[["gelu", "mul"]])
    assert hash(together) == hash(dovetail.Fuse(rules, must=(("gelu", "mul"),)))
    assert len(regions(together(gm))) == 2
    with pytest.raises(InvalidArgument, match="'scaled' names no operation"):
        fuse(gm, rules, must=[["gelu", "scaled"]])
    assert not regions(gm)


def test_lowering_without_regions_is_warned_of(gm: Any) -> None:
    with pytest.warns(UserWarning, match=r"no regions to lower: `dovetail.fuse` makes them") as caught:
        dovetail.lower(gm, "eager")
    assert caught[0].filename == __file__
    unfused = fuse(gm, rule(lambda x: torch.erf(x).cos(), kind="k", name="absent"))
    with pytest.warns(UserWarning, match="no rule made any"):
        dovetail.lower(unfused, "eager")
    dovetail.lower(gm, [])
    dovetail.lower(fuse(gm, scaled()), "eager", smallest=1)


def test_names_are_refused_with_the_nearest(gm: Any) -> None:
    fused = fuse(gm, scaled())
    for call, meant in (
        (lambda: dovetail.inline(fused, "scaled_O"), "scaled_0"),
        (lambda: dovetail.inline(fused, kind="scald"), "scaled"),
        (lambda: dovetail.lower(fused, {"scald": "eager"}), "scaled"),
        (lambda: dovetail.lower(fused, "egaer"), "eager"),
        (lambda: dovetail.outline(gm, ["gellu"], kind="k"), "gelu"),
        (lambda: dovetail.declare(gm, {"aten.geluu.default": "pure"}), "aten.gelu.default"),
        (lambda: dovetail.replace_region(fused, "scaled_1", torch.relu), "scaled_0"),
        (lambda: explain(fused).why_not("gellu", "mul"), "gelu"),
        (lambda: fuse(gm, scaled(), never="gellu"), "gelu"),
        (lambda: fuse(gm, scaled(), priorities={"scald": 1}), "scaled"),
        (lambda: dovetail.RuleSet(scaled())["patern"], "pattern"),
        (lambda: dovetail.schedule(torch.nn.Sequential(torch.nn.ReLU()), (X,))["00"], "0"),
    ):
        with pytest.raises(dovetail.DovetailError, match=meant):
            call()


def test_alternatives_are_no_failures(gm: Any) -> None:
    fused = fuse(gm, rule(lambda x: either(F.gelu(x), F.relu(x)) * 2, kind="k", name="either"))
    assert len(regions(fused)) == 1


def test_operators_that_are_registered_later_are_known() -> None:
    with torch.library._scoped_library("silence_test", "FRAGMENT") as library:
        library.define("first(Tensor x) -> Tensor")
        capability({"silence_test.first"}, kind="k")
        with pytest.raises(InvalidArgument, match=r"Did you mean 'silence_test\.first"):
            capability({"silence_test.frist"}, kind="k")
        library.define("second(Tensor x) -> Tensor")
        capability({"silence_test.second", "silence_test::second.default"}, kind="k")


@pytest.mark.filterwarnings("ignore:rule .* failed:RuntimeWarning")
def test_why_not_names_a_rule_that_failed(gm: Any) -> None:
    guarded = scaled()
    guarded.guard(misspelled_attribute)
    assert "rule 'pattern' failed" in str(explain(fuse(gm, guarded)).why_not("gelu", "mul"))
