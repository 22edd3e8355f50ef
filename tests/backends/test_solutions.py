"""Solutions of FlashInfer-Trace as kernels of regions: used where they compute the body, else refused with the reason."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail import zoo
from dovetail.backends.solutions import Solution

RETURNING = """
import torch
from . import scaling

def run(x, weight):
    return scaling.normalized(x) * weight
"""
SCALING = """
import torch

def normalized(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
"""
WRITING = """
import torch

def run(x, gate_weight, up_weight, output):
    assert x.is_contiguous() and output.is_contiguous()
    gate, up = x @ gate_weight.t(), x @ up_weight.t()
    torch.mul(torch.nn.functional.silu(gate), up, out=output)
"""


@pytest.fixture(scope="module")
def llama() -> Any:
    entry = zoo.get("llama")
    return dovetail.fuse(dovetail.capture(entry.build().eval(), entry.example_inputs().args))


def definition(gm: Any, kind: str, folder: Path) -> str:
    names = dovetail.to_flashinfer_trace(gm, folder / "dataset").definitions
    return next(name for name in names if name.startswith(kind))


def solution(
    definition: str,
    sources: dict[str, str] | str,
    *,
    returns: bool = True,
    entry: str = "main.py::run",
    **spec: Any,
) -> dict[str, Any]:
    files = {"main.py": sources} if isinstance(sources, str) else sources
    build = {"language": "python", "target_hardware": ["cpu"], "entry_point": entry, **spec}
    if returns:
        build["destination_passing_style"] = False
    return {
        "name": f"{definition}_test",
        "definition": definition,
        "author": "test",
        "spec": build,
        "sources": [{"path": path, "content": content} for path, content in files.items()],
    }


def lowered(gm: Any, folder: Path, *documents: dict[str, Any], **options: Any) -> Any:
    for number, document in enumerate(documents):
        path = folder / "solutions" / f"{number}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(document))
    return dovetail.lower(gm, [dovetail.solution_backend(folder / "solutions", **options)])


def used(gm: Any) -> set[str]:
    return {region.kind for region in dovetail.regions(gm) if region.backend == "solutions"}


def reasons(gm: Any, kind: str) -> list[tuple[str, str]]:
    return [(e.outcome, e.reason) for e in dovetail.explain(gm).lowered if e.region.startswith(kind)]


def test_solutions_run_the_regions_of_their_definitions(llama: Any, tmp_path: Path) -> None:
    returning = solution(
        definition(llama, "rms_norm", tmp_path), {"src/main.py": RETURNING, "src/scaling.py": SCALING},
        entry="src/main.py::run",
    )  # fmt: skip
    writing = solution(
        definition(llama, "swiglu", tmp_path), WRITING, returns=False, dependencies=["torch >= 2"]
    )
    gm = lowered(llama, tmp_path, returning, writing)
    assert used(gm) == {"rms_norm", "swiglu"}
    dataset = dovetail.solution_backend(tmp_path)  # the folder around "solutions"
    assert used(dovetail.lower(llama, [dataset])) == {"rms_norm", "swiglu"}
    args = zoo.get("llama").example_inputs().args
    with torch.no_grad():
        torch.testing.assert_close(gm(*args), llama(*args), atol=1e-5, rtol=1e-4)
    (declined,) = {reason for outcome, reason in reasons(gm, "attention") if outcome == "supports"}
    assert declined.startswith("there is no solution for the definition 'attention_")


@pytest.mark.parametrize(
    ("edit", "outcome", "reason"),
    [
        (lambda code: code.replace("* weight", "* weight + 1e-3"), "verify", "result 0 is off"),
        (lambda code: code.replace("* weight", "* weight.half()").replace("(x)", "(x.half())"), "trial", "dtype"),
        (lambda code: code.replace("* weight", "* weight[:, None, None, None]"), "trial", "shape"),
        (lambda code: code.replace("return", "return 0,"), "trial", "returned 2 results where the region has 1"),
        (lambda code: code.replace("return", "x.zero_(); return"), "trial", "it wrote operand 0"),
        (lambda code: "import dovetail_is_not_this\n" + code, "compile", "No module named"),
        (lambda code: "raise SystemExit(3)\n" + code, "compile", "ends the process (SystemExit: 3)"),
        (lambda code: code.replace("return", "raise SystemExit; return"), "trial", "ends the process"),
        (lambda code: code.replace("def run(", "def other("), "compile", "has no function 'run' in 'main.py'"),
        (lambda code: code.replace("weight)", "weight, more)", 1), "trial", "missing 1 required positional"),
    ],
)  # fmt: skip
def test_a_solution_that_does_not_compute_the_body_is_refused(
    llama: Any, tmp_path: Path, edit: Callable[[str], str], outcome: str, reason: str
) -> None:
    sources = {"main.py": edit(RETURNING), "scaling.py": SCALING}
    gm = lowered(llama, tmp_path, solution(definition(llama, "rms_norm", tmp_path), sources))
    assert not used(gm)
    ((stage, text),) = {*reasons(gm, "rms_norm")}
    assert stage == outcome
    assert reason in text


def test_a_backend_around_it_is_verified_too(llama: Any, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(
        json.dumps(solution(definition(llama, "rms_norm", tmp_path), "def run(x, weight, output): ..."))
    )
    assert dovetail.backends.CudaGraphs(dovetail.solution_backend(path)).must_verify
    assert not dovetail.backends.CudaGraphs("eager").must_verify


def test_a_bound_admits_less_exact_code(llama: Any, tmp_path: Path) -> None:
    sources = {"main.py": RETURNING.replace("* weight", "* weight * 1.001"), "scaling.py": SCALING}
    document = solution(definition(llama, "rms_norm", tmp_path), sources)
    assert used(lowered(llama, tmp_path, document, bound=0.01)) == {"rms_norm"}
    assert not used(lowered(llama, tmp_path, document, bound=0.0001))
    for bound in (float("inf"), float("nan"), 0.0):
        with pytest.raises(dovetail.InvalidArgument, match="bound is a finite positive number or None"):
            dovetail.solution_backend(tmp_path / "solutions", bound=bound)


def test_what_this_process_cannot_run_is_declined(llama: Any, tmp_path: Path) -> None:
    name = definition(llama, "rms_norm", tmp_path)
    sources = {"main.py": RETURNING, "scaling.py": SCALING}
    cuda = solution(name, "__global__ void run() {}", language="cuda")
    needs = solution(name, sources, dependencies=["no_such_package >= 2"])
    for document, reason in (
        (cuda, "written in cuda; solutions in python and triton"),
        (needs, "no_such_package >= 2"),
    ):
        gm = lowered(llama, tmp_path, document)
        ((outcome, text),) = {*reasons(gm, "rms_norm")}
        assert outcome == "supports"
        assert f"solution '{name}_test' is not used: it " in text
        assert reason in text
    # The next one for the same definition is taken.
    assert used(lowered(llama, tmp_path, cuda, solution(name, sources))) == {"rms_norm"}


def test_what_cannot_be_verified_is_refused(tmp_path: Path) -> None:
    def counted_from_the_end(table: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return torch.relu(table[5 - i]) * 2

    gm = dovetail.capture(counted_from_the_end, (torch.randn(5, 4), torch.tensor([1, 3])))
    gm = dovetail.outline(gm, ["rsub", "index", "relu", "mul"], kind="picked")
    code = "import torch\ndef run(i, table):\n    return torch.relu(table[5 - i]) * 2\n"
    gm = lowered(gm, tmp_path, solution(definition(gm, "picked", tmp_path), code))
    assert not used(gm)
    ((outcome, text),) = reasons(gm, "picked")
    assert outcome == "verify"
    assert "it cannot be verified: the body itself rejects sample inputs" in text


def test_destinations_have_the_sizes_of_each_call(tmp_path: Path) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * 2).t() + 1

    gm = dovetail.capture(model, (torch.randn(3, 8),), dynamic_shapes=({0: torch.export.Dim("n")},))
    operations = [node for node in gm.graph.nodes if node.op == "call_function"]
    gm = dovetail.outline(gm, operations, kind="turned")
    code = "def run(x, output):\n    output.copy_((x * 2).clamp(min=0).t() + 1)\n"
    gm = lowered(gm, tmp_path, solution(definition(gm, "turned", tmp_path), code, returns=False))
    for n in (3, 5, 9):
        x = torch.randn(n, 8)
        assert torch.equal(gm(x), model(x))
        assert gm(x).stride() == model(x).stride()
    assert used(gm) == {"turned"}


def test_weights_that_need_gradients_run_the_body(llama: Any, tmp_path: Path) -> None:
    sources = {"main.py": RETURNING, "scaling.py": SCALING}
    gm = lowered(llama, tmp_path, solution(definition(llama, "rms_norm", tmp_path), sources))
    args = zoo.get("llama").example_inputs().args
    gm(*args).sum().backward()
    assert all(p.grad is not None for p in gm.parameters())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sources": []}, "'sources' is not a list with an element"),
        ({"sources": [{"path": "../main.py", "content": "x"}]}, "leads out of the folder"),
        ({"sources": [{"path": "/main.py", "content": "x"}]}, "is not relative"),
        ({"sources": [{"path": "main.py"}]}, "'content' is not text"),
        ({"spec": {"language": "python", "entry_point": "other.py::run"}}, "is not '<path of a source>::<function>'"),
        ({"spec": {"language": "python", "entry_point": "main.py"}}, "is not '<path of a source>::<function>'"),
        ({"spec": {"entry_point": "main.py::run"}}, "'language' is not text"),
        ({"spec": None}, "'spec' is not an object"),
        ({"name": ""}, "'name' is not text"),
    ],
)  # fmt: skip
def test_files_that_are_not_solutions_are_refused(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps({**solution("rms_norm_0", "def run(): ..."), **change}))
    with pytest.raises(dovetail.InvalidFile) as refused:
        Solution.load(path)
    assert str(refused.value).startswith(f"'{path}' is not a solution: ")
    assert reason in str(refused.value)


def test_paths_are_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(dovetail.InvalidArgument, match="no solution"):
        dovetail.solution_backend(tmp_path)
    with pytest.raises(dovetail.InvalidFile, match="cannot be read: No such file"):
        dovetail.solution_backend([tmp_path / "absent.json"])
    (tmp_path / "s.json").write_text("{")
    with pytest.raises(dovetail.InvalidFile, match="it is not JSON"):
        dovetail.solution_backend(tmp_path / "s.json")
