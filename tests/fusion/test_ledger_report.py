"""The first page of a ledger: what it shows, and that it is short for any model."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail import zoo
from dovetail.fusion.coverage import coverage
from dovetail.fusion.fuse import fuse
from dovetail.fusion.ledger import Ledger, explain
from dovetail.fusion.ledger_entries import Lowered, Measured
from dovetail.fusion.ledger_report import MOST_LINES
from dovetail.ir.graph_module import GraphOwner
from tests.fusion.helpers import Fixed
from tests.fusion.test_cost import Call
from tests.fusion.test_ledger import X, chain, example
from tests.fusion.test_speed import Named
from tests.fusion.test_speed import chain as long_chain
from tests.outlining.helpers import trace
from tests.zoo_graphs import zoo_graph, zoo_inputs


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x))).reshape(2, -1, 8).transpose(0, 1).reshape(-1, 8)


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def layered(count: int) -> torch.fx.GraphModule:
    return dovetail.capture(Layers(count).eval(), (torch.randn(4, 8),))


def test_a_small_graph_has_a_small_page() -> None:
    assert str(explain(example())).splitlines() == [
        "1 region in 1 round: 3 of 4 operations, 75 % of bytes, 75 % of flops",
        "  kind  regions  operations  bytes  flops  launches saved  bytes saved",
        "  wide        1        75 %   75 %   75 %               2         96 B",
        "in no region: 1 operation, 25 % of bytes, 25 % of flops",
        "      1  sigmoid (25 % of bytes, 25 % of flops)",
        "         rule 'pair': 'tanh' went to region 'wide_0' (rule 'wide')",
        "2 times declined; ask `.declined(rule=, module=, kind=)`, `.outside()`, `.why_not(...)`; terms: "
        "docs/glossary.md",
    ]


def test_a_near_miss_has_the_matched_operations_and_the_reason() -> None:
    @dovetail.rule(kind="wide")
    def wide(x):  # type: ignore[no-untyped-def]
        return x.relu().exp()

    @wide.guard
    def never(m):  # type: ignore[no-untyped-def]
        return dovetail.Decline("wider than my kernel takes")

    gm = dovetail.capture(Call(chain), (X,))
    ledger = explain(fuse(gm, [wide, Fixed("wave", refusals=[("tanh sigmoid", "no sine follows")])]))
    page = str(ledger)
    assert "  wide: all 2 operations matched at 'relu', 'exp', but\n    wider than my kernel takes" in page
    assert "  wave: 2 of 3 operations matched at 'tanh', 'sigmoid':\n    no sine follows" in page
    (answer,) = ledger.why_not(rule="wide")
    assert answer.startswith("rule 'wide': all 2 operations matched at 'relu', 'exp', but it declined")
    assert "all 2 operations matched, but wider than" in str(ledger.outside())
    assert ", though all 2 operations matched: wider" in str(ledger.why_not("relu", "exp"))


def test_operators_without_a_formula_are_named() -> None:
    @torch.library.custom_op("unfamiliar::scan", mutates_args=())
    def scan(x: Tensor) -> Tensor:
        return x.clone()

    scan.register_fake(torch.empty_like)
    gm = dovetail.capture(Call(lambda x: scan(x.exp()).tanh() + torch.linalg.inv(x @ x.t())[:1, :1]), (X,))
    page = str(explain(fuse(gm)))
    assert (
        "flops not known, one counted for each element: aten.linalg_inv (1 time), unfamiliar.scan (1 time)"
        in page
    )
    assert coverage(gm).uncounted == (("aten.linalg_inv", 1), ("unfamiliar.scan", 1))
    assert "flops not known" not in str(explain(fuse(layered(1))))


def test_sections_without_content_have_no_heading() -> None:
    gm = fuse(trace(chain), Fixed("all", "relu exp tanh sigmoid"))
    assert str(explain(gm)).splitlines() == [
        "1 region in 1 round: 4 of 4 operations",
        "  kind  regions  operations  launches saved  bytes saved",
        "  all         1       100 %               3          0 B",
    ]


def test_repeated_layers_are_one_place() -> None:
    page = str(explain(fuse(layered(6))))
    assert "layers.0–5" in page
    assert "layers.3" not in page
    row = next(line for line in page.splitlines() if "linear_activation" in line)
    assert row.split()[:2] == ["linear_activation", "6"]
    assert row.endswith("layers.0–5")


def test_without_its_graph_a_ledger_shows_what_was_recorded() -> None:
    page = str(Ledger.from_json(explain(example()).to_json()))
    assert page.splitlines()[:3] == [
        "1 region in 1 round",
        "  kind  regions  launches saved  bytes saved",
        "  wide        1               2         96 B",
    ]
    assert "      1  pair: '…' went to region '…' (rule '…')" in page
    # There is nothing to look up for what needs the graph.
    assert page.splitlines()[-1] == "2 times declined; ask `.declined(rule=, kind=)`; terms: docs/glossary.md"


def test_regions_that_a_backend_refused_are_counted_and_not_their_bodies() -> None:
    class Choosy(dovetail.Backend):
        name = "choosy"
        kernels: ClassVar[Any] = {"nothing": torch.relu}

    regions = dovetail.fuse(layered(6))
    page = str(explain(dovetail.lower(regions, [Choosy()])))
    count = len(dovetail.regions(regions))
    [left] = [line for line in page.splitlines() if line.startswith("by no backend: ")]
    [refused] = [line for line in page.splitlines() if line.startswith("  not choosy: ")]
    assert left.startswith(f"by no backend: {count} regions")
    assert f" and {count - 1} others, supports: " in refused


def test_regions_that_were_inlined_are_history() -> None:
    assert (
        str(explain(dovetail.inline(example()))).splitlines()[0]
        == "no regions: 1 region of before is inlined"
    )


def test_regions_outlined_by_hand_are_shown_too() -> None:
    page = str(explain(dovetail.outline(trace(chain), ["relu", "exp"], kind="mine")))
    assert page.splitlines()[0] == "1 region: 2 of 4 operations"
    assert "no rules were applied to this graph" in page


def test_regions_within_regions_have_rows_of_their_own() -> None:
    gm = fuse(trace(chain), [Fixed("inner", "relu exp"), Fixed("outer", "inner_0 tanh", nests=True)])
    lines = str(explain(gm)).splitlines()
    assert lines[0] == "1 region in 2 rounds, with 1 region inside them: 3 of 4 operations"
    assert lines[2].split()[:2] == ["outer", "1"]
    assert lines[3].split()[:3] == ["within:", "inner", "1"]


def test_what_regions_within_regions_save_is_part_of_what_the_outermost_save() -> None:
    gm = dovetail.fuse(layered(3))
    gm = dovetail.fuse(gm, dovetail.rules.modules("layers.*", kind="layer"))
    lines = str(explain(gm)).splitlines()
    titles = lines[1]
    at = slice(titles.index("flops") + 5, titles.index("launches saved") + len("launches saved"))
    saved = {line[: titles.index("regions")].strip(): line[at].split()[-1] for line in lines[2:5]}
    # Five operations of each layer are launched, and one call of the layer now.
    assert saved == {"layer": "12", "within: linear_activation": "3", "within: group": "3"}
    assert explain(gm).launches_saved == 12


def test_regions_that_were_inlined_save_nothing() -> None:
    gm = dovetail.fuse(layered(3))
    page = str(explain(dovetail.inline(gm, "group_0")))
    [row] = [line.split() for line in page.splitlines() if line.split()[:1] == ["group"]]
    assert row[1] == "2"
    assert row[-4:-1] == ["2", "512", "B"]


def test_rules_that_matched_nothing_are_named() -> None:
    page = str(explain(fuse(trace(chain), [Fixed("pair", "relu exp"), Fixed("absent")])))
    assert "matched nothing: absent" in page


def test_what_backends_did_and_what_runs_as_it_is() -> None:
    class Mine(dovetail.Backend):
        name = "mine"

        def supports(self, region: dovetail.Region) -> bool | str:
            return True if region.kind == "linear_activation" else "only activations"

        def compile(self, region: dovetail.Region, examples: Any) -> Any:
            return region.body

    lowered = dovetail.lower(fuse(layered(2)), [Mine()])
    lowered(torch.randn(4, 8))
    page = str(explain(lowered))
    assert "mine: 1 piece of code for 2 regions" in page
    assert "by no backend: " in page
    assert "only activations" in page


def test_recompilations_have_their_cause() -> None:
    fast = dovetail.compile(Layers(2).eval(), (torch.randn(4, 8),), backends=["eager"])
    with torch.no_grad():
        fast(torch.randn(6, 8))
    page = str(explain(fast))
    assert "of 2 graphs" in page
    assert "since it was compiled:" in page
    assert "recompiled: " in page


class Broken(dovetail.Rule):
    def __init__(self, number: int) -> None:
        self.name, self.kind = f"broken_{number}", "broken"

    def propose(self, context: dovetail.RuleContext) -> Any:
        raise LookupError(self.name)


def crowded() -> Ledger:
    """A ledger with more of everything than fits."""
    gm, _ = long_chain(400)
    names = [n.name for n in gm.graph.nodes if n.op == "call_function"]
    kinds = [Fixed(f"kind_{k}", f"{names[2 * k]} {names[2 * k + 1]}") for k in range(30)]
    reasons = [
        Fixed(f"near_{k}", refusals=[(names[100 + k : 104 + k], f"reason of sort {'x' * k}")])
        for k in range(30)
    ]
    new = fuse(gm, [*kinds, *reasons, *(Broken(k) for k in range(5))])
    lowered = dovetail.lower(new, ["eager"])
    ledger = explain(lowered)
    return replace(
        ledger,
        lowered=tuple(
            Lowered(f"r{k}", f"b{k % 7}", "compiled" if k < 20 else f"s{k}", 1, 0.1, "x" * k)
            for k in range(40)
        ),
        diagnostics=tuple(f"recompiled: {'y' * k}" for k in range(20)),
        measured=tuple(Measured("body", f"b{k}", "eager", 0.1 * k, "other", 1.0) for k in range(20)),
    )


@pytest.mark.filterwarnings("ignore:rule 'broken:RuntimeWarning")
def test_the_page_is_bounded_whatever_there_is_to_show() -> None:
    lines = str(crowded()).splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= 300
    for part in (
        "other kind",
        "other reason",
        "rule 'broken",
        "near misses",
        "since it",
        "measured by",
        "b0: ",
        "terms:",
    ):
        assert any(part in line for line in lines), part


@pytest.mark.parametrize("name", zoo.names())
def test_the_page_of_every_model_of_the_zoo_is_short(name: str) -> None:
    page = str(explain(fuse(zoo_graph(name))))
    assert len(page.splitlines()) <= MOST_LINES
    assert "in no region: " in page


def test_the_page_of_a_compiled_model_with_many_captures_and_training_graphs_is_short() -> None:
    inputs = zoo_inputs("llama")
    fast = dovetail.compile(zoo.get("llama").build("tiny"), inputs.args, inputs.kwargs, backends=["eager"])
    for length in (3, 5):
        fast(torch.ones(1, length, dtype=torch.int64))
    fast.train()(torch.ones(2, 7, dtype=torch.int64))
    assert isinstance(fast, GraphOwner)
    assert len(fast.graphs) > 1
    assert len(str(explain(fast)).splitlines()) <= MOST_LINES


def test_the_page_of_a_graph_of_many_nodes_is_short() -> None:
    gm, sets = long_chain(20_000)
    page = str(explain(fuse(gm, Named(sets[:5000:2]), rounds=1)))
    assert page.splitlines()[0].startswith("2,500 regions in 1 round: 10,000 of 20,000 operations")
    assert len(page.splitlines()) <= MOST_LINES


def hugging_face(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(0, 50, (1, 8))
    if name == "bert":
        small = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
        model = transformers.BertModel(transformers.BertConfig(num_hidden_layers=12, **small))
        return model, (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if name == "llama":
        config = transformers.LlamaConfig(
            num_hidden_layers=32,
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            vocab_size=50,
            use_cache=False,
        )
        return transformers.LlamaModel(config), (ids,), {}
    return (
        transformers.ResNetForImageClassification(transformers.ResNetConfig()),
        (torch.randn(1, 3, 32, 32),),
        {},
    )


@pytest.mark.parametrize(
    ("name", "places"),
    [
        (
            "bert",
            ["encoder.layer.0–11.attention.self", "encoder.layer.0–11.attention.self.{query,key,value}"],
        ),
        ("llama", ["layers.0–31.mlp", "layers.0–31.self_attn.{q_proj,k_proj,v_proj}"]),
        ("resnet", ["resnet.embedder.embedder", "classifier.1"]),
    ],
)
def test_models_of_transformers(name: str, places: list[str]) -> None:
    model, args, kwargs = hugging_face(name)
    ledger = explain(fuse(dovetail.capture(model.eval(), args, kwargs)))
    page = str(ledger)
    assert len(page.splitlines()) <= MOST_LINES
    assert max(map(len, page.splitlines())) <= 140
    assert not [place for place in places if place not in page]
    assert str(pickle.loads(pickle.dumps(ledger)))
