"""inspect, why, fuse, report, convert and diff, on every form of MODEL."""

import json
import sys
from pathlib import Path

import pytest
import torch

import dovetail as library
from dovetail.cli.model_source import import_attribute
from dovetail.tuning.decisions import BackendChoice, GraphDecision, Spread
from tests.cli.runner import dovetail
from tests.reporting.documents import document_of
from tests.tuning.plans import plan_for


@pytest.mark.parametrize(
    ("arguments", "inputs"),
    [
        (["zoo:mlp"], ["float32[2, 16]"]),
        (["zoo:mlp", "--arg", "batch=3"], ["float32[3, 16]"]),
        (["models.py:gated"], ["float32[4, 8]"]),
        (["models.py:gated", "--arg", "width=4"], ["float32[4, 4]"]),
        (["models:gated"], ["float32[4, 8]"]),
        (["models.py:scaled"], ["float32[4, 8]", "float32[4, 16]"]),
        (["models.py:alone", "--input", "2x8", "--input", "scale=2x16"], ["float32[2, 8]", "float32[2, 16]"]),
        (["models.py:model", "--input", "2x8"], ["float32[2, 8]"]),
        (["models.py:Gated", "--input", "2x8"], ["float32[2, 8]"]),
    ],
)
def test_a_model_is_built_with_its_inputs(folder: Path, arguments: list[str], inputs: list[str]) -> None:
    shown = dovetail("inspect", *arguments, "--json")
    assert shown.code == 0, shown.err
    assert shown.document["inputs"] == inputs
    assert shown.document["model"] == arguments[0]


def test_a_file_is_imported_by_the_name_that_workers_find(folder: Path) -> None:
    assert import_attribute("models.py:Gated").__module__ == "models"
    (folder / "json.py").write_text("def loads():\n    return 3\n")
    assert import_attribute("json.py:loads")() == 3
    assert sys.modules["json"] is json


def test_inspect_prints_the_first_page(folder: Path) -> None:
    shown = dovetail("inspect", "models.py:gated")
    assert shown.code == 0
    assert "models.py:gated: Gated, 288 parameters, inputs float32[4, 8]" in shown.out
    assert "1 region in 1 round: 4 of 4 operations" in shown.out


def test_json_is_the_only_thing_on_stdout(folder: Path) -> None:
    shown = dovetail("inspect", "models.py:gated", "--json")
    assert shown.document["coverage"]["operations"] == 4
    assert [r["kind"] for r in shown.document["regions"]] == ["swiglu"]
    assert library.Ledger.from_json(json.dumps(shown.document["ledger"])).rounds == 1
    assert shown.err == "made by the factory\n"


def test_a_fused_file_is_shown_as_it_is(archive: str) -> None:
    shown = dovetail("inspect", archive)
    assert "fused.pt2: Gated, 288 parameters, inputs float32[4, 8]" in shown.out
    assert "swiglu" in shown.out
    assert dovetail("diff", archive, archive).out == "no difference\n"


def test_a_file_of_torch_export_is_captured(folder: Path) -> None:
    x = torch.randn(4, 8)
    torch.export.save(
        torch.export.export(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), (x,)), "plain.pt2"
    )
    shown = dovetail("inspect", "plain.pt2", "--json")
    assert shown.code == 0, shown.err
    assert shown.document["inputs"] == ["float32[4, 8]"]
    assert [r["kind"] for r in shown.document["regions"]] == ["linear_activation"]
    assert shown.document["class"] == "Sequential"
    measured = dovetail(
        "bench", "plain.pt2", "--no-torch-compile", "--backend", "torchscript", "--seconds", "0.1", "--json"
    )
    assert measured.document["programs"][1]["lowered"] == "1 of 1, 1 compiled"


def test_inputs_of_a_file_without_examples_bind_by_name(folder: Path) -> None:
    assert dovetail("fuse", "models.py:scaled", "-o", "scaled.pt2").code == 0
    shown = dovetail(
        "bench", "scaled.pt2", "--no-torch-compile", "--backend", "eager", "--seconds", "0.1", "--json"
    )
    assert shown.code == 0, shown.err
    assert shown.document["inputs"] == ["float32[4, 8]", "float32[4, 16]"]


def test_rules_are_named_in_many_ways(folder: Path) -> None:
    def kinds(*rules: str) -> list[str]:
        options = [word for rule in rules for word in ("--rules", rule)]
        return [
            r["kind"] for r in dovetail("inspect", "models.py:gated", *options, "--json").document["regions"]
        ]

    assert kinds("models.py:gate") == ["gate"]
    assert kinds("groups") == ["group"]
    assert kinds("swiglu") == ["swiglu"]
    assert kinds("gates,norms") == ["swiglu"]
    assert kinds("norms", "rms_norm") == []


def test_must_and_never_are_constraints(folder: Path) -> None:
    never = dovetail("fuse", "models.py:gated", "--never", "silu", "--json")
    assert all("silu" not in region["operations"] for region in never.document["regions"])
    must = dovetail("fuse", "models.py:gated", "--rules", "groups", "--must", "silu", "--json")
    assert any("silu" in region["operations"] for region in must.document["regions"])
    impossible = dovetail("fuse", "models.py:gated", "--rules", "norms", "--must", "silu")
    assert (impossible.code, "must='silu': 'silu' in no region" in impossible.error) == (1, True)


def test_why_answers_for_operations_and_rules(folder: Path) -> None:
    one = dovetail("why", "zoo:llama", "linear")
    assert one.out.startswith("- 'linear' is in no region: rule 'groups'")
    two = dovetail("why", "zoo:llama", "linear_6", "mul_8", "--json").document
    assert two["first"] == "linear_6"
    assert two["reasons"][0].startswith("they are in two regions")
    rule = dovetail("why", "models.py:gated", "--rule", "rms_norm")
    assert "\n- rule 'rms_norm' got to 1 of 7 operations" in rule.out


def test_fuse_writes_what_load_reads(folder: Path) -> None:
    done = dovetail("fuse", "models.py:gated", "-o", "fused.pt2", "--report", "report.html")
    assert done.code == 0
    assert "wrote fused.pt2 (" in done.out
    assert "wrote report.html (" in done.out
    assert [r.kind for r in library.regions(library.load("fused.pt2"))] == ["swiglu"]
    assert Path("report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("suffix", [".onnx", ".mlir", ".mlirbc", ".json", ".pt2"])
def test_convert_writes_by_suffix(archive: str, suffix: str) -> None:
    if suffix.startswith(".mlir"):
        pytest.importorskip("torch_mlir")
    done = dovetail("convert", archive, f"out{suffix}", "--json")
    assert done.code == 0, done.err
    assert done.document["regions"] == 1
    assert Path(f"out{suffix}").stat().st_size == done.document["bytes"]


def test_report_compares_two_programs(archive: str) -> None:
    done = dovetail("report", archive, "--compare", "models.py:gated", "-o", "page.html")
    assert done.code == 0
    assert "\nwrote page.html (" in done.out


def test_report_shows_the_program_of_a_plan(folder: Path) -> None:
    spread = Spread(2e-4, 1e-4, 3e-4, 9)
    decision = GraphDecision("Gated", spread, whole=BackendChoice("eager"))
    model = import_attribute("models.py:Gated")().eval()
    plan_for(model, torch.randn(4, 8), decision=decision).save("plan.json")
    done = dovetail("report", "models.py:gated", "--plan", "plan.json", "-o", "page.html")
    assert done.code == 0, done.err
    page = document_of(Path("page.html"))["graphs"][0]
    assert [(row["region"], row["seconds"]) for row in page["measured"]] == [("whole_0", 2e-4)]
    assert [row["choice"] for row in page["planned"]] == ["one region by eager"]
    other = dovetail(
        "report", "models.py:gated", "--arg", "width=4", "--plan", "plan.json", "-o", "other.html"
    )
    assert other.code == 1
    assert "there is no decision for the graph" in other.err
    assert "environment=False" not in other.err
    assert not Path("other.html").exists()


def test_options_go_to_the_models_that_take_them(archive: str) -> None:
    arguments = ["diff", archive, "models.py:gated", "--rules", "default", "--arg"]
    assert dovetail(*arguments, "width=8").code == 0
    assert dovetail(*arguments, "width=4").code == 1
    alone = ["diff", "zoo:mlp", "models.py:alone", "--input", "4x8", "--device", "cpu", "--json"]
    assert dovetail(*alone).document["equal"] is False
    compared = dovetail("report", archive, "--compare", "models.py:gated", "--arg", "width=8")
    assert compared.code == 0, compared.err


def test_convert_names_every_suffix() -> None:
    shown = " ".join(dovetail("convert", "--help").out.split())
    assert all(suffix in shown for suffix in (".pt2", ".onnx", ".mlir", ".stablehlo", ".mlirbc", ".json"))


def test_diff_exits_with_one_if_anything_differs(archive: str) -> None:
    assert dovetail("diff", "models.py:gated", "models.py:gated").code == 0
    changed = dovetail("diff", "models.py:gated", archive)
    assert changed.code == 1
    assert "+   %swiglu_0" in changed.out
    assert changed.out.endswith(" lines differ\n")
    fused = dovetail("diff", "models.py:gated", archive, "--rules", "default", "--json")
    assert (fused.code, fused.document["equal"]) == (0, True)
