"""A region alone in a folder, and code for it brought back."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

import dovetail
from dovetail import zoo
from dovetail.errors import InvalidArgument, LoweringError, RegionError, UnknownRegion
from dovetail.lowering.lower import replace_region


class Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(torch.sigmoid(x * self.a) + 1)
        return torch.tanh(torch.sigmoid(y * self.b) + 1)


def gates(train: bool = False) -> GraphModule:
    graph = dovetail.capture(Gates().train(train), (torch.randn(3, 4),))
    names = (("mul", "sigmoid", "add", "tanh"), ("mul_1", "sigmoid_1", "add_1", "tanh_1"))
    requests = [dovetail.Request(nodes, "npu.gate", 2, {"shift": 1}) for nodes in names]
    return dovetail.outline(graph, requests)


def gate(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh((x * w).sigmoid().add(1))


def checked(folder: Path, *arguments: str) -> int:
    """What the runner returns, here and now: a process of its own loads torch first."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["check.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(folder / "check.py"), run_name="__main__")
    return int(ended.value.code or 0)


def test_what_is_in_the_folder(tmp_path: Path) -> None:
    region = dovetail.regions(gates())[0]
    folder = region.export(tmp_path / "deep" / "gate")
    assert sorted(p.name for p in folder.iterdir()) == [
        "body.pt2",
        "body.txt",
        "check.py",
        "expected.pt",
        "inputs.pt",
        "region.json",
    ]
    manifest = json.loads((folder / "region.json").read_text())
    assert (manifest["kind"], manifest["version"], manifest["attrs"], manifest["key"]) == (
        "npu.gate",
        2,
        {"shift": 1},
        region.key,
    )
    assert [(o["name"], o["dtype"], o["shape"], o["strides"]) for o in manifest["operands"]] == [
        ("x", "float32", [3, 4], [4, 1]),
        ("a", "float32", [4], [1]),
    ]
    assert manifest["torch"] == torch.__version__
    assert (folder / "body.txt").read_text() == dovetail.text(region.body)
    inputs = torch.load(folder / "inputs.pt", weights_only=True)
    expected = torch.load(folder / "expected.pt", weights_only=True)
    (result,) = torch.export.load(folder / "body.pt2").module()(*inputs)
    assert torch.equal(result, expected["results"][0])
    assert torch.equal(region.body(*inputs)[0], result)
    assert sorted(p.name for p in folder.parent.iterdir()) == ["gate"]
    again = region.export(tmp_path / "again")
    assert torch.equal(torch.load(again / "inputs.pt")[0], inputs[0])


def test_the_runner_distinguishes_good_code_from_bad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = dovetail.regions(gates())[0].export(tmp_path / "gate")
    good, bad, wide = tmp_path / "good.py", tmp_path / "bad.py", tmp_path / "wide.py"
    good.write_text("def run(x, w):\n    return ((x * w).sigmoid() + 1).tanh()\n")
    bad.write_text("def run(x, w):\n    return ((x * w).sigmoid() + 1.001).tanh()\n")
    wide.write_text("def run(x, w):\n    return ((x * w).sigmoid() + 1).tanh().double()\n")
    assert checked(folder) == 0
    assert checked(folder, str(good)) == 0
    capsys.readouterr()
    assert checked(folder, str(bad)) == 1
    assert "result 0 is off by" in capsys.readouterr().out
    assert checked(folder, str(wide)) == 1
    assert "result 0 has dtype torch.float64, not torch.float32" in capsys.readouterr().out


REFUSED = {
    "def run(x, w):\n    y = ((x * w).sigmoid() + 1).tanh()\n    x.mul_(2)\n    return y\n": (
        "operand 0 was written, and the body does not write it"
    ),
    "def run(x, w):\n    y = ((x * w).sigmoid() + 1).tanh()\n    w.data = w.data[:2]\n    return y\n": (
        "operand 1 was written, and the body does not write it"
    ),
    "def other(x, w):\n    return x\n": "has no function `run`",
    "run = 3\n": "has no function `run`",
    "def run(x, w):\n    pass\n": "`run` returned a NoneType; return a tensor or a tuple of 1",
    "def run(x, w):\n    return x, w\n": "`run` returned 2 results; return 1",
    "def run(x, w):\n    return ()\n": "`run` returned 0 results; return 1",
}


def test_the_runner_reports_what_is_no_code_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = dovetail.regions(gates())[0].export(tmp_path / "gate")
    for number, (code, reason) in enumerate(REFUSED.items()):
        path = tmp_path / f"code_{number}.py"
        path.write_text(code)
        assert checked(folder, str(path)) == 1, code
        (line,) = capsys.readouterr().out.splitlines()
        assert line.endswith(reason)
    assert checked(folder, str(tmp_path / "none.py")) == 1
    assert "there is no file" in capsys.readouterr().out


def test_what_the_body_writes_the_code_may_write(tmp_path: Path) -> None:
    graph = dovetail.capture(lambda x, y: x.add_(1) * y, (torch.ones(3), torch.ones(3)))
    names = [n.name for n in graph.graph.nodes if n.op == "call_function"]
    region = dovetail.regions(dovetail.outline(graph, names, kind="k"))[0]
    folder = region.export(tmp_path / "k")
    assert checked(folder) == 0
    (tmp_path / "both.py").write_text("def run(x, y):\n    return x.add_(1) * y.add_(0)\n")
    assert checked(folder, str(tmp_path / "both.py")) == 0
    (tmp_path / "none.py").write_text("def run(x, y):\n    return (x + 1) * y\n")
    assert checked(folder, str(tmp_path / "none.py")) == 1


def test_the_runner_needs_torch_alone(tmp_path: Path) -> None:
    folder = dovetail.regions(gates())[0].export(tmp_path / "gate")
    code = f"import sys, runpy; sys.modules['dovetail'] = None; sys.argv = ['']; runpy.run_path({str(folder / 'check.py')!r}, run_name='__main__')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "npu.gate: as the body does\n"), ran.stderr


@pytest.mark.parametrize("name", ["llama", "resnet", "moe"])
def test_regions_of_the_zoo_can_be_exported(name: str, tmp_path: Path) -> None:
    row = zoo.get(name)
    inputs = row.example_inputs()
    graph = dovetail.fuse(dovetail.capture(row.build(), inputs.args, inputs.kwargs))
    outlined = dovetail.regions(graph)
    for region in outlined:
        folder = region.export(tmp_path / region.name)
        operands = torch.load(folder / "inputs.pt", weights_only=True)
        expected = torch.load(folder / "expected.pt", weights_only=True)
        torch.manual_seed(0)
        with torch.no_grad():
            results = torch.export.load(folder / "body.pt2").module()(*operands)
        for value, reference in zip(results, expected["results"], strict=True):
            assert torch.equal(value, reference) if isinstance(reference, Tensor) else value == reference
        for i, reference in expected["operands"].items():
            assert torch.equal(operands[i], reference)
    assert outlined


def test_sizes_that_vary_are_reported(tmp_path: Path) -> None:
    graph = dovetail.capture(
        lambda x: torch.relu(x + 1), (torch.ones(3, 4),), dynamic_shapes={"x": {0: Dim("b", min=2, max=9)}}
    )
    region = dovetail.regions(dovetail.outline(graph, ["add", "relu"], kind="k"))[0]
    manifest = json.loads((region.export(tmp_path / "k") / "region.json").read_text())
    (size, _) = manifest["operands"][0]["shape"]
    assert manifest["sizes_that_vary"] == {size: "VR[2, 9]"}


def test_exports_that_are_refused(tmp_path: Path) -> None:
    region = dovetail.regions(gates())[0]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(InvalidArgument, match="not empty"):
        region.export(tmp_path / "full")
    (tmp_path / "empty").mkdir()
    region.export(str(tmp_path / "empty"))
    with pytest.raises(InvalidArgument, match="neither a str nor a Path"):
        region.export(3)  # type: ignore[arg-type]
    bare = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    unknown = dovetail.regions(dovetail.outline(bare, ["relu", "add"], kind="k"))[0]
    with pytest.raises(RegionError, match="its operand 'x' has no known value"):
        unknown.export(tmp_path / "unknown")
    indexed = dovetail.capture(
        lambda t, i: torch.relu(t[1 - i]), (torch.ones(1, 3), torch.zeros(2, dtype=torch.int64))
    )
    names = [n.name for n in indexed.graph.nodes if n.op == "call_function"]
    strict = dovetail.regions(dovetail.outline(indexed, names, kind="k"))[0]
    with pytest.raises(RegionError, match="does not accept random operands"):
        strict.export(tmp_path / "strict")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "full"]


def backends(gm: GraphModule) -> dict[str, str | None]:
    return {r.name: r.backend for r in dovetail.regions(gm, nested=True)}


def test_a_callable_for_one_region_or_for_all_with_its_body() -> None:
    graph, x = gates(), torch.randn(3, 4)
    region = dovetail.regions(graph)[0]
    calls: list[int] = []

    def counted(a: Tensor, b: Tensor) -> Tensor:
        calls.append(1)
        return gate(a, b)

    one, both = replace_region(graph, "npu_gate_1", counted), replace_region(graph, region.key, counted)
    name = counted.__qualname__
    assert backends(one) == {"npu_gate_0": None, "npu_gate_1": name}
    assert backends(both) == {"npu_gate_0": name, "npu_gate_1": name}
    assert backends(graph) == {"npu_gate_0": None, "npu_gate_1": None}
    with torch.no_grad():
        for replaced, count in ((one, 1), (both, 2)):
            calls.clear()
            torch.testing.assert_close(replaced(x), graph(x))
            assert len(calls) == count
    assert dovetail.text(one) == dovetail.text(graph)
    assert dovetail.text(dovetail.inline(both)) == dovetail.text(dovetail.inline(graph))


WRONG: dict[str, tuple[Any, str]] = {
    "values": (lambda x, w: gate(x, w) + 1e-2, "off by 0.01"),
    "dtype": (lambda x, w: gate(x, w).double(), "dtype"),
    "shape": (lambda x, w: gate(x, w)[:2], "shape"),
    "strides": (lambda x, w: gate(x, w).t().contiguous().t(), "strides"),
    "count": (lambda x, w: (gate(x, w), x), "2 results"),
    "type": (lambda x, w: None, "NoneType"),
    "writes": (lambda x, w: (gate(x, w), x.mul_(2))[0], "wrote operand 0"),
    "raises": (lambda x: x, "positional"),
}


@pytest.mark.parametrize("which", WRONG)
def test_wrong_code_is_refused(which: str) -> None:
    graph = gates()
    before = dovetail.text(graph)
    function, reason = WRONG[which]
    with pytest.raises(LoweringError, match=reason):
        replace_region(graph, "npu_gate_0", function)
    assert dovetail.text(graph) == before
    assert backends(graph) == {"npu_gate_0": None, "npu_gate_1": None}


def test_values_are_not_compared_unasked() -> None:
    graph, x = gates(), torch.randn(3, 4)
    rough = replace_region(graph, "npu_gate_1", lambda x, w: gate(x, w) + 1e-2, check=False)
    with torch.no_grad():
        torch.testing.assert_close(rough(x), graph(x) + 1e-2)
    with pytest.raises(LoweringError, match="shape"):
        replace_region(graph, "npu_gate_1", lambda x, w: gate(x, w)[:2], check=False)


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return gate(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * 2, grads[0].sum(0)


def test_gradients_are_compared_where_it_trains() -> None:
    graph, x = gates(train=True), torch.randn(3, 4)
    with pytest.raises(LoweringError, match="the gradient of operand"):
        replace_region(graph, "npu_gate_0", Wrong.apply, trains=True)
    calls: list[int] = []

    def counted(a: Tensor, b: Tensor) -> Tensor:
        calls.append(1)
        return gate(a, b)

    trained = replace_region(graph, "npu_gate_0", counted, trains=True)
    calls.clear()
    trained(x).sum().backward()
    assert calls
    unchecked = replace_region(graph, "npu_gate_0", counted)
    calls.clear()
    unchecked(x).sum().backward()
    assert not calls


def test_others_keep_their_backends() -> None:
    graph, x = gates(), torch.randn(3, 4)
    lowered = dovetail.lower(graph, {"npu_gate_0": ["eager"]})
    both = replace_region(lowered, "npu_gate_1", gate)
    assert backends(both) == {"npu_gate_0": "eager", "npu_gate_1": "gate"}
    third = replace_region(both, "npu_gate_0", lambda x, w: gate(x, w))
    assert backends(third)["npu_gate_1"] == "gate"
    assert backends(third)["npu_gate_0"] not in ("eager", None)
    with torch.no_grad():
        torch.testing.assert_close(third(x), graph(x))
    assert {e.backend for e in dovetail.explain(both).lowered} >= {"eager", "gate"}
    assert backends(lowered) == {"npu_gate_0": "eager", "npu_gate_1": None}


def test_regions_inside_others() -> None:
    graph = dovetail.outline(gates(), ["npu_gate_0", "npu_gate_1"], kind="all")
    replaced = replace_region(graph, "all_0/npu_gate_0", gate)
    assert backends(replaced) == {"all_0": None, "all_0/npu_gate_0": "gate", "all_0/npu_gate_1": None}
    whole = replace_region(replaced, "all_0", lambda x, a, b: gate(gate(x, a), b))
    assert backends(whole)["all_0"] is not None
    with torch.no_grad():
        x = torch.randn(3, 4)
        torch.testing.assert_close(whole(x), graph(x))
    with pytest.raises(RegionError, match="is inside 'all_0'"):
        replace_region(whole, "all_0/npu_gate_1", gate)


def test_wrong_arguments() -> None:
    graph = gates()
    with pytest.raises(UnknownRegion, match="npu_gate_9"):
        replace_region(graph, "npu_gate_9", gate)
    with pytest.raises(InvalidArgument, match="cannot be called"):
        replace_region(graph, "npu_gate_0", 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="neither the name"):
        replace_region(graph, 3, gate)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="check"):
        replace_region(graph, "npu_gate_0", gate, check="no")  # type: ignore[arg-type]


def test_code_compiled_for_the_artefact_comes_back(tmp_path: Path) -> None:
    graph, x = gates(), torch.randn(3, 4)
    folder = dovetail.regions(graph)[0].export(tmp_path / "gate")
    manifest = json.loads((folder / "region.json").read_text())
    body = torch.export.load(folder / "body.pt2").module()
    back = replace_region(graph, manifest["key"], body)
    with torch.no_grad():
        torch.testing.assert_close(back(x), graph(x))
    assert set(backends(back).values()) == {type(body).__qualname__}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


def picked(table: Tensor, rows: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    return nn.functional.embedding(rows, table) * 2, table.gather(1, at) + 1


DOMAINS: list[Any] = [
    (Normed().eval(), (torch.randn(2, 3, 6, 6),)),
    (lambda x, v: (x * 2) * torch.rsqrt(v + 1e-5), (torch.randn(2, 8), torch.rand(8))),
    (lambda x: torch.log(x) + torch.sqrt(x.reshape(2, 2) * 3).reshape(4), (torch.rand(4),)),
    (lambda x: torch.log(x - 1) * 2 + torch.log1p(x), (torch.rand(4) + 2,)),
    (lambda x: torch.logit(x) + torch.acos(x) + x.pow(0.5), (torch.rand(9),)),
    (lambda x: (1 - torch.atanh(x)) * torch.asin(x.double()).float(), (torch.rand(9),)),
    (lambda x, y: torch.xlogy(x, y) + torch.acosh(y), (torch.rand(9), torch.rand(9) + 1)),
    (lambda x, y: nn.functional.binary_cross_entropy(x, y) * 2, (torch.rand(9), torch.rand(9))),
    (lambda x, i: (x // i) + (x % i), (torch.arange(6), torch.arange(1, 7))),
    (picked, (torch.randn(1, 1), torch.zeros(5, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64))),
    (lambda x, i: x[i] * x[:, i + 1].sum(), (torch.randn(2, 2), torch.zeros(3, dtype=torch.int64))),
    (
        lambda x, t: nn.functional.cross_entropy(x, t) * 2,
        (torch.randn(3, 1), torch.zeros(3, dtype=torch.int64)),
    ),
]


@pytest.mark.parametrize(("function", "args"), DOMAINS)
def test_samples_are_numbers_that_the_body_computes_with(tmp_path: Path, function: Any, args: Any) -> None:
    with torch.no_grad():
        graph = dovetail.capture(function, args)
    names = [n.name for n in graph.graph.nodes if n.op == "call_function"]
    (region,) = dovetail.regions(dovetail.outline(graph, names, kind="whole"))
    for seed in range(3):
        folder = region.export(tmp_path / str(seed), seed=seed)
        for value in torch.load(folder / "expected.pt", weights_only=True)["results"]:
            assert value.isfinite().all()


def test_samples_of_what_may_be_any_number_are_normal(tmp_path: Path) -> None:
    region = dovetail.regions(gates())[0]
    inputs = torch.load(region.export(tmp_path / "gate") / "inputs.pt", weights_only=True)
    assert (inputs[0] < 0).any()
