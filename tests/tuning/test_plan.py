"""Plans as files and values: what is written is read back, in one order, and what is wrong in a file is named."""

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dovetail
import dovetail.zoo
from dovetail import InvalidArgument, InvalidFile, Plan, SaveError
from dovetail.tuning.decisions import (
    Alternative,
    BackendChoice,
    BlockDecision,
    BodyDecision,
    GraphDecision,
    PassChoice,
    RegionChoice,
    Spread,
    decode,
    encode,
)
from dovetail.tuning.environment import Environment
from dovetail.tuning.plan import VERSION, Scope
from tests.tuning.helpers import HERE, THERE

GPU = replace(HERE, device="cuda: H100, sm_90", driver="570.1")
FAST = Spread(1.5e-3, 1.4e-3, 1.6e-3, 30)
GRAPH = GraphDecision(
    "decoder",
    FAST,
    Alternative("torch.compile", Spread(2e-3, 1.9e-3, 2.1e-3, 30), "slower by 33 %"),
    (Alternative("the model as it is", reason="3 times slower"),),
    pipeline=(PassChoice("MergeParallel", {"groups": ["linear 8x4 to [4, 4]"], "materialise": True}),),
    cuda_graphs=False,
)
REGION = RegionChoice(
    "rms_norm",
    (3, 4, 5),
    2,
    {"eps": 1e-6},
    {"x": 0, "weight": 1},
    (5, None),
    "rms_norm",
    {"*": "output", "3": "duplicate"},
)
BLOCK = BlockDecision("block of 54 operations", FAST, regions=(REGION, RegionChoice("tail", (7, 8))), gap=0.0)
BODY = BodyDecision(
    "rms_norm_0", FAST, operands="f32[2, 8]", backend=BackendChoice("inductor", {"options": {"a": [1, 2]}})
)
AS_IT_IS = BodyDecision("rest_1")


def example() -> Plan:
    return (
        Plan()
        .with_decisions("inference", HERE, graphs={"g1": GRAPH}, blocks={"b1": BLOCK}, bodies={"k1": BODY})
        .with_decisions("training", GPU, graphs={"g1": GraphDecision("decoder", execution="torch.compile")})
        .with_decisions("inference", THERE, bodies={"k2": AS_IT_IS})
    )


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    plan = example()
    assert Plan.from_json(plan.to_json()) == plan
    path = tmp_path / "plan.json"
    plan.save(path)
    plan.save(str(path))
    assert Plan.load(path) == Plan.load(str(path)) == plan
    assert list(tmp_path.iterdir()) == [path]
    assert pickle.loads(pickle.dumps(plan)) == copy.deepcopy(plan) == plan
    assert Plan.from_json(Plan().to_json()) == Plan()
    with pytest.raises(SaveError, match="no folder"):
        plan.save(tmp_path / "nowhere" / "plan.json")


def test_equal_plans_are_equal_bytes_whatever_the_order_of_their_decisions() -> None:
    plan = example()
    other = (
        Plan()
        .with_decisions("inference", THERE, bodies={"k2": AS_IT_IS})
        .with_decisions("training", GPU, graphs={"g1": GraphDecision("decoder", execution="torch.compile")})
        .with_decisions(
            "inference",
            HERE,
            bodies={"k1": BODY},
            blocks={
                "b1": replace(
                    BLOCK, regions=(replace(REGION, arguments={"weight": 1, "x": 0}), BLOCK.regions[1])
                )
            },
            graphs={"g1": GRAPH},
        )
    )
    assert other == plan
    assert other.to_json() == plan.to_json()
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()


def test_what_has_its_default_is_not_written() -> None:
    assert encode(AS_IT_IS) == {"label": "rest_1"}
    assert encode(RegionChoice("tail", (7, 8))) == {"kind": "tail", "members": [7, 8]}
    assert decode(BodyDecision, {"label": "rest_1"}, "") == AS_IT_IS


def test_lookup_prefers_what_was_measured_here_and_ignores_other_devices_and_modes() -> None:
    plan = example()
    nearby = plan.lookup(plan.graphs, "g1", "inference", HERE)
    assert nearby is not None
    assert (nearby.decision, nearby.differences) == (GRAPH, ())
    newer = plan.lookup(plan.graphs, "g1", "inference", THERE)
    assert newer is not None
    assert newer.differences == ("torch 2.14.0, was 2.13.0", "onnxruntime not installed, was 1.31.1")
    assert plan.lookup(plan.graphs, "g1", "inference", GPU) is None
    assert plan.lookup(plan.graphs, "g1", "training", HERE) is None
    assert plan.lookup(plan.graphs, "g2", "inference", HERE) is None
    both = plan.with_decisions("inference", THERE, graphs={"g1": GraphDecision("decoder", execution="graph")})
    for environment, execution in ((HERE, "regions"), (THERE, "graph"), (replace(THERE, threads=7), "graph")):
        nearest = both.lookup(both.graphs, "g1", "inference", environment)
        assert nearest is not None
        assert nearest.decision.execution == execution


def test_merged_plans_have_the_decisions_of_both_and_of_two_the_later_one() -> None:
    other = Plan().with_decisions(
        "inference", HERE, graphs={"g2": GRAPH}, bodies={"k1": replace(BODY, backend=None)}
    )
    merged = example() | other
    assert set(merged.graphs) == {"g1", "g2"}
    assert set(merged.environments) == {HERE.key, THERE.key, GPU.key}
    assert merged.bodies["k1"][Scope("inference", HERE.key)].backend is None
    assert example() | Plan() == Plan() | example() == example()
    with pytest.raises(TypeError):
        example() | {}  # type: ignore[operator]


def test_a_difference_has_a_line_for_each_decision_that_is_another() -> None:
    plan = example()
    assert plan.diff(plan) == ""
    timed = plan.with_decisions("inference", HERE, bodies={"k1": replace(BODY, seconds=None, label="other")})
    assert plan.diff(timed) == ""
    changed = plan.with_decisions(
        "inference", HERE, bodies={"k1": replace(BODY, backend=None), "k3": AS_IT_IS}
    )
    lines = plan.diff(changed).splitlines()
    at = f"inference on cpu: test, torch 2.13.0 ({HERE.key[:6]})"
    assert lines == [
        f'body k1 {at}: rms_norm_0: inductor(options={{"a": [1, 2]}}), 1.5 ms [1.4 ms, 1.6 ms] -> as it is, '
        "1.5 ms [1.4 ms, 1.6 ms]",
        f"body k3 {at}: added: rest_1: as it is",
    ]
    assert changed.diff(plan).splitlines()[1] == f"body k3 {at}: removed: rest_1: as it is"


def test_explain_has_the_choice_its_time_the_runner_up_and_what_was_rejected() -> None:
    text = example().explain()
    assert "measured on cpu: test, torch 2.13.0" in text
    assert f"graph g1 (inference on cpu: test, torch 2.13.0 ({HERE.key[:6]})) decoder: MergeParallel(" in text
    assert "-> regions of its blocks, 1.5 ms [1.4 ms, 1.6 ms]" in text
    assert "runner-up: torch.compile, 2 ms [1.9 ms, 2.1 ms]: slower by 33 %" in text
    assert "rejected: the model as it is: 3 times slower" in text
    assert "block of 54 operations: rms_norm (3), tail (2)" in text
    assert "  optimal by the measured costs" in text
    assert "  not compared with other programs, for lack of time" in text
    assert repr(example()) == str(example()) == "Plan(1 graph, 1 block, 2 bodies, 3 environments)"


def test_explain_has_how_certain_a_decision_is() -> None:
    def explained(decision: GraphDecision) -> str:
        return Plan().with_decisions("inference", HERE, graphs={"g": decision}).explain()

    confirmed = replace(GRAPH, is_confirmed=True, noise=0.021, undecided=3)
    assert "  confirmed in a fresh process; noise 2.1%; 3 programs undecided" in explained(confirmed)
    assert "  not confirmed in a fresh process; noise 2.1%" in explained(
        replace(confirmed, is_confirmed=False)
    )
    # One environment needs no name in each line.
    assert "graph g (inference) decoder: " in explained(confirmed)
    # What was measured is no difference, as long as the same is decided.
    plans = [
        Plan().with_decisions("inference", HERE, graphs={"g": decision}) for decision in (GRAPH, confirmed)
    ]
    assert plans[0].diff(plans[1]) == ""
    bounded = Plan().with_decisions("inference", HERE, blocks={"b": replace(BLOCK, gap=0.05)})
    assert "  at most 5.0% from optimal by the measured costs" in bounded.explain()


def test_ranges_of_sizes_belong_to_the_mode_and_environment_they_were_measured_in() -> None:
    pattern = "float32[n, 8]"
    plan = Plan().with_decisions("inference", HERE, sizes={pattern: ((2, 16), (17, 64))})
    assert Plan.from_json(plan.to_json()) == plan
    other = Plan().with_decisions("inference", HERE, sizes={pattern: ((10, 20), (80, 90))})
    # Of two that overlap, the later one is used: a size is in one range only.
    assert (plan | other).sizes == {pattern: {Scope("inference", HERE.key): ((10, 20), (80, 90))}}
    assert (other | plan).sizes == {
        pattern: {Scope("inference", HERE.key): ((2, 16), (17, 64), (80, 90))},
    }
    training = plan | Plan().with_decisions("training", THERE, sizes={pattern: ((5, 6),)})
    assert len(training.sizes[pattern]) == 2
    assert plan.diff(training) == (
        f"sizes of {pattern} training on cpu: test, torch 2.14.0 ({THERE.key[:6]}): none -> 5 to 6"
    )
    assert f"sizes of {pattern} (inference): 2 to 16, 17 to 64" in plan.explain()


def test_a_plan_differs_from_plans_only() -> None:
    with pytest.raises(InvalidArgument, match="a plan differs from another plan, not from a dict"):
        example().diff({})  # type: ignore[arg-type]


def edited(change: Any) -> str:
    data = json.loads(example().to_json())
    change(data)
    return json.dumps(data)


def at(data: dict[str, Any], section: str) -> dict[str, Any]:
    (by_scope,) = [v for k, v in data[section].items() if k in ("g1", "b1", "k1")]
    return next(v for k, v in by_scope.items() if k.startswith("inference"))


ENVIRONMENT = {"device": 1, **{k: v for k, v in HERE.to_json().items() if k != "device"}}
WRONG: dict[str, tuple[str, str]] = {
    "empty": ("", "is not a plan, or was cut short: it is not JSON ("),
    "cut short": (example().to_json()[:700], "is not a plan, or was cut short: it is not JSON ("),
    "deep": ("[" * 200_000, "is not a plan, or was cut short: it is not JSON ("),
    "a list": ("[]", "is not a plan: its 'format' is not 'dovetail-plan'."),
    "foreign": ('{"format": "other", "version": 1}', "is not a plan: its 'format' is not 'dovetail-plan'."),
    "newer": (
        edited(lambda d: d.update(version=VERSION + 1)),
        f"has version {VERSION + 1} of the format, and this dovetail reads up to version {VERSION}. Use a newer",
    ),
    "version": (
        edited(lambda d: d.update(version="1")),
        "is not a valid plan: version: '1' is not a number of 1 or more.",
    ),
    "section": (
        edited(lambda d: d.update(block={})),
        "is not a valid plan: it has an unknown section 'block'. Did you mean 'blocks'?",
    ),
    "not an object": (
        edited(lambda d: d.update(graphs=[1])),
        "is not a valid plan: graphs: [1] is not an object.",
    ),
    "no scope": (
        edited(lambda d: d["graphs"].update(g7={})),
        "is not a valid plan: graphs.g7: it has no decision.",
    ),
    "mode": (
        edited(lambda d: d["graphs"].update(g7={f"eval@{HERE.key}": {"label": "x"}})),
        f"is not a valid plan: graphs.g7: 'eval@{HERE.key}' does not begin with 'inference@' or 'training@'.",
    ),
    "unknown environment": (
        edited(lambda d: d["graphs"].update(g7={"inference@abc": {"label": "x"}})),
        "is not a valid plan: graphs.g7: the environment 'abc' is not among `environments`.",
    ),
    "edited environment": (
        edited(lambda d: d["environments"][HERE.key].update(torch="2.99")),
        f"is not a valid plan: environments.{HERE.key}: the key of what it describes is ",
    ),
    "environment": (
        edited(lambda d: d["environments"].update(x=ENVIRONMENT)),
        "is not a valid plan: environments.x: an environment has text as device",
    ),
    "no label": (
        edited(lambda d: at(d, "graphs").pop("label")),
        f"is not a valid plan: graphs.g1.inference@{HERE.key}: the field 'label' is missing.",
    ),
    "unknown field": (
        edited(lambda d: at(d, "bodies").update(color=1)),
        f"is not a valid plan: bodies.k1.inference@{HERE.key}: unknown field 'color'; there are label, ",
    ),
    "type": (
        edited(lambda d: at(d, "blocks")["regions"][0].update(members=[3, "4"])),
        f"is not a valid plan: blocks.b1.inference@{HERE.key}.regions[0].members[1]: '4' is not an integer.",
    ),
    "bool": (
        edited(lambda d: at(d, "blocks")["regions"][0].update(version=True)),
        f"is not a valid plan: blocks.b1.inference@{HERE.key}.regions[0].version: True is not an integer.",
    ),
    "execution": (
        edited(lambda d: at(d, "graphs").update(execution="eager")),
        f"is not a valid plan: graphs.g1.inference@{HERE.key}.execution: 'eager' is not one of 'regions', ",
    ),
    "too large": (
        edited(lambda d: at(d, "bodies")["seconds"].update(median=10**400)),
        f"is not a valid plan: bodies.k1.inference@{HERE.key}.seconds.median: 10000",
    ),
    "not finite": (
        edited(lambda d: at(d, "bodies")["seconds"].update(low=float("nan"))),
        f"is not a valid plan: bodies.k1.inference@{HERE.key}.seconds.low: nan is not a finite number.",
    ),
    "null": (
        edited(lambda d: at(d, "blocks").update(regions=None)),
        f"is not a valid plan: blocks.b1.inference@{HERE.key}.regions: None is not a list.",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_a_file_is_named_with_its_place(tmp_path: Path, name: str) -> None:
    text, message = WRONG[name]
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InvalidFile) as caught:
        Plan.load(path)
    assert str(caught.value).startswith(f"'{path}' {message}")
    assert caught.value.path == str(path)
    with pytest.raises(InvalidArgument) as refused:
        Plan.from_json(text)
    assert str(refused.value).startswith(f"the text {message}")
    with pytest.raises(InvalidFile):
        dovetail.compile(dovetail.zoo.get("mlp").build("tiny"), plan=path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00PK")
    for path, reason in (
        (tmp_path / "nowhere.json", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (binary, "'utf-8' codec can't decode"),
        ("a\0b", "embedded null"),
    ):
        with pytest.raises(InvalidFile) as caught:
            Plan.load(path)
        assert str(caught.value).startswith(f"'{path}' cannot be read as a plan: {reason}")
    for wrong in (3, None, b"plan.json"):
        with pytest.raises(InvalidArgument, match="neither a str nor a Path"):
            Plan.load(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="a int is not the text of a plan"):
        Plan.from_json(3)  # type: ignore[arg-type]


def test_a_plan_describes_every_environment_it_was_measured_in() -> None:
    with pytest.raises(InvalidArgument, match="'nowhere', which the plan does not describe"):
        Plan(graphs={"g": {Scope("inference", "nowhere"): GRAPH}})
    with pytest.raises(InvalidArgument, match="a plan has no 'body'; give graphs, blocks or bodies"):
        Plan().with_decisions("inference", HERE, body={"k": BODY})


def test_floats_and_environments_come_back_bit_for_bit() -> None:
    odd = Environment("cpu: Größe", "", "2.13", "3.11", 2, (("numpy", "1"),))
    exact = replace(BODY, seconds=Spread(0.1 + 0.2, 1e-300, 5e-324, 1))
    plan = Plan().with_decisions("training", odd, bodies={"k": exact})
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert "Größe" in plan.to_json()


def test_what_is_no_path_no_mode_and_no_key_of_a_dict_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="path None is neither a str nor a Path"):
        example().save(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="mode 'eval'; give 'inference' or 'training'"):
        Plan().with_decisions("eval", HERE)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unhashable type: 'Plan'"):
        hash(example())
