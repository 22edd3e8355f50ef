"""A bundle is opened without tracing or compiling, checked, and refused with what differs."""

import contextlib
import gc
import json
import logging
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail.frontend import capture as frontend
from dovetail.lowering import compile_region

_log = logging.getLogger("dovetail_tests.bundle")


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def nothing_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a model is traced or a body compiled from here on."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("traced or compiled again")

    monkeypatch.setattr(frontend, "_from_model", refuse)
    monkeypatch.setattr(compile_region.Compilation, "_compile_inline", refuse)


def write_bundle(
    path: Path, cache: Path, *, backend: str = "torchscript", model: Any = None
) -> tuple[Any, Any]:
    model = model or Net().eval()
    x = torch.randn(4, 8)
    with torch.no_grad():
        fast = dovetail.compile(model, (x,), backends=backend, cache=cache)
        fast(x)
    assert dovetail.bundle(fast, path) == path
    # Code in memory would be used before that of the bundle.
    del fast
    gc.collect()
    return model, x


def test_a_bundle_is_opened_without_tracing_or_compiling(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "net.bundle"
    write_bundle(path, tmp_path / "one")
    request.getfixturevalue("nothing_is_done_again")
    other, x = Net().eval(), torch.randn(4, 8)
    with torch.no_grad():
        fast = dovetail.compile(other, (x,), bundle=path, cache=tmp_path / "two")
        torch.testing.assert_close(fast(x), other(x))
        # Weights are the model's own.
        other.layers[0].up.weight.mul_(2)  # type: ignore[union-attr, operator]
        torch.testing.assert_close(fast(x), other(x))
    assert not fast.diagnostics
    assert {event.outcome for event in dovetail.explain(fast.graphs[0]).lowered} == {"disk"}


def test_a_bundle_is_opened_in_the_first_call(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = tmp_path / "net.bundle"
    model, x = write_bundle(path, tmp_path / "one")
    request.getfixturevalue("nothing_is_done_again")
    fast = dovetail.compile(model, bundle=str(path), cache=tmp_path / "two")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert len(fast.graphs) == 1


def test_calls_that_it_does_not_cover_are_compiled_as_those_were(tmp_path: Path) -> None:
    path = tmp_path / "net.bundle"
    model, x = write_bundle(path, tmp_path / "one")
    with torch.no_grad():
        fast = dovetail.compile(model, (x,), bundle=path, cache=tmp_path / "two")
        longer = torch.randn(9, 8)
        torch.testing.assert_close(fast(longer), model(longer))
        torch.testing.assert_close(fast(x), model(x))
    assert len(fast.graphs) == 2
    assert [d.kind for d in fast.diagnostics] == ["recompiled"]
    assert {r.backend for r in dovetail.regions(fast.graphs[1])} == {"torchscript"}


class Masked(Net):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = super().forward(x)
        return x if mask is None else x * mask


def test_a_first_call_with_another_argument_leaves_the_bundle_open(tmp_path: Path) -> None:
    path = tmp_path / "net.bundle"
    model, x = write_bundle(path, tmp_path / "one", model=Masked().eval())
    with torch.no_grad():
        fast = dovetail.compile(model, bundle=path, cache=tmp_path / "two")
        mask = torch.rand(4, 8)
        torch.testing.assert_close(fast(x, mask), model(x, mask))
        torch.testing.assert_close(fast(x), model(x))
    assert not [d for d in fast.diagnostics if d.kind == "stale"]


def test_every_capture_is_in_it(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model, path = Net().eval(), tmp_path / "net.bundle"
    first, second, third = torch.randn(4, 8), torch.randn(6, 8), torch.randn(7, 8)
    with torch.no_grad():
        fast = dovetail.compile(model, (first,), backends="torchscript", cache=tmp_path / "one")
        fast(first), fast(second)
    dovetail.bundle(fast, path)
    request.getfixturevalue("nothing_is_done_again")
    with torch.no_grad():
        # The second capture has a dynamic size.
        again = dovetail.compile(Net().eval(), (first,), bundle=path, cache=tmp_path / "two")
        again.load_state_dict(model.state_dict())
        for x in (first, second, third):
            torch.testing.assert_close(again(x), model(x))
    assert len(again.graphs) == 2


def test_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "net.bundle"
    _, x = write_bundle(path, tmp_path / "one")
    deeper = Net(4).eval()
    with pytest.raises(dovetail.BundleMismatch, match=r"model\.layers\.3") as refused, torch.no_grad():
        dovetail.compile(deeper, (x,), bundle=path, cache=tmp_path / "two", on_error="raise")
    assert refused.value.problems
    with torch.no_grad():
        fast = dovetail.compile(deeper, (x,), bundle=path, cache=tmp_path / "two")
        torch.testing.assert_close(fast(x), deeper(x))
    (stale,) = fast.diagnostics
    assert stale.kind == "stale"
    assert "does not fit" in stale.message


class Settings(nn.Module, contextlib.nullcontext[float]):
    """A module whose value only code of the standard library reads."""

    def __init__(self, value: float) -> None:
        nn.Module.__init__(self)
        self.enter_result = value


class Configured(nn.Module):
    def __init__(self, value: float, level: int) -> None:
        super().__init__()
        self.settings = Settings(value)
        logging.getLogger("dovetail_tests").setLevel(level)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.settings as value:
            return x * value if _log.isEnabledFor(logging.INFO) else x


@pytest.mark.parametrize(("value", "level"), [(3.0, logging.INFO), (2.0, logging.ERROR)])
def test_a_model_with_other_settings_is_traced(value: float, level: int, tmp_path: Path) -> None:
    path = tmp_path / "net.bundle"
    write_bundle(path, tmp_path / "one", model=Configured(2.0, logging.INFO))
    x = torch.randn(4, 8)
    with torch.no_grad():
        same = dovetail.compile(Configured(2.0, logging.INFO), (x,), bundle=path, check_capture=False)
        other = Configured(value, level)
        fast = dovetail.compile(other, (x,), bundle=path, cache=tmp_path / "two", check_capture=False)
        torch.testing.assert_close(fast(x), other(x))
    assert not same.diagnostics
    assert [diagnostic.kind for diagnostic in fast.diagnostics] == ["stale"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("torch", "1.0"), ("processor", "another"), ("threads", 999), ("python", "cpython 2.7")],
)
def test_another_machine_is_refused_with_what_differs(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "net.bundle"
    model, x = write_bundle(path, tmp_path / "one")
    rewrite(path, lambda manifest: manifest["machine"].update({name: value}))
    with pytest.raises(dovetail.BundleMismatch, match=f"{name} is .*was {value!r}"):
        dovetail.compile(model, (x,), bundle=path, cache=tmp_path / "two")


def test_another_backend_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.bundle"
    model, x = write_bundle(path, tmp_path / "one")
    rewrite(path, lambda manifest: manifest["backends"].update(torchscript="torchscript of another release"))
    with pytest.raises(dovetail.BundleMismatch, match="another release"), torch.no_grad():
        dovetail.compile(model, (x,), bundle=path, cache=tmp_path / "two")


def rewrite(path: Path, change: Any) -> None:
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    manifest = json.loads(parts["manifest.json"])
    change(manifest)
    parts["manifest.json"] = json.dumps(manifest).encode()
    with zipfile.ZipFile(path, "w") as file:
        for name, data in parts.items():
            file.writestr(name, data)


def test_a_damaged_bundle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.bundle"
    model, x = write_bundle(path, tmp_path / "one")
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        parts = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w") as file:
        for name, data in parts.items():
            file.writestr(name, data if name == "manifest.json" else b"x" + data[1:])
    with pytest.raises(dovetail.InvalidFile, match="digest"):
        dovetail.compile(model, (x,), bundle=path, cache=tmp_path / "two")
    for broken in (whole[: len(whole) // 2], b"", b"text"):
        path.write_bytes(broken)
        with pytest.raises(dovetail.InvalidFile, match=r"net\.bundle"):
            dovetail.compile(model, (x,), bundle=path, cache=tmp_path / "two")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("manifest.json", json.dumps({"format": 99}))
    with pytest.raises(dovetail.InvalidFile, match="version 99"):
        dovetail.compile(model, (x,), bundle=path, cache=tmp_path / "two")
    with pytest.raises(dovetail.InvalidFile, match="cannot be read"):
        dovetail.compile(model, (x,), bundle=tmp_path / "missing", cache=tmp_path / "two")


def test_invalid_arguments(tmp_path: Path) -> None:
    path = tmp_path / "net.bundle"
    model, x = write_bundle(path, tmp_path / "one")
    with pytest.raises(dovetail.InvalidArgument, match="a bundle or backends"):
        dovetail.compile(model, (x,), bundle=path, backends="eager", cache=tmp_path / "two")
    with pytest.raises(dovetail.InvalidArgument, match="disk cache"):
        dovetail.compile(model, (x,), bundle=path, cache=False)
    with pytest.raises(dovetail.InvalidArgument, match="what `compile` returned"):
        dovetail.bundle(model, path)  # type: ignore[arg-type]
    with pytest.raises(dovetail.InvalidArgument, match="no graphs yet"):
        dovetail.bundle(dovetail.compile(model, cache=tmp_path / "one"), path)
    with torch.no_grad():
        fast = dovetail.compile(model, (x,), backends="eager", cache=tmp_path / "one")
    with pytest.raises(dovetail.SaveError, match="no folder"):
        dovetail.bundle(fast, tmp_path / "missing" / "net.bundle")


class Global(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * len(sys.argv)


def test_a_trace_that_cannot_be_compared_is_not_bundled(tmp_path: Path) -> None:
    x = torch.randn(3)
    fast = dovetail.compile(Global(), (x,), backends="eager", cache=tmp_path / "one")
    with pytest.raises(dovetail.SaveError, match=r"sys\.argv"):
        dovetail.bundle(fast, tmp_path / "net.bundle")
    assert not (tmp_path / "net.bundle").exists()


def test_training_is_bundled(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model, x, path = Net(), torch.randn(4, 8), tmp_path / "net.bundle"
    fast = dovetail.compile(model, (x,), backends="torchscript", cache=tmp_path / "one")
    fast(x).sum().backward()
    dovetail.bundle(fast, path)
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    request.getfixturevalue("nothing_is_done_again")
    dovetail.compile(model, (x,), bundle=path, cache=tmp_path / "two")(x).sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


SCRIPT = """
import sys, time
import torch
start = time.perf_counter()
import dovetail
from dovetail.zoo import get
name, backend, path, cache = sys.argv[1:]
torch.manual_seed(0)
torch.set_num_threads(1)
model = get(name).build().eval()
inputs = get(name).example_inputs()
with torch.no_grad():
    if backend:
        fast = dovetail.compile(model, inputs.args, inputs.kwargs, backends=backend, cache=cache)
        fast(*inputs.args, **inputs.kwargs)
        dovetail.bundle(fast, path)
    else:
        fast = dovetail.compile(model, inputs.args, inputs.kwargs, bundle=path, cache=cache, on_error="raise")
        result = fast(*inputs.args, **inputs.kwargs)
        modules = [m for m in ("torch._inductor", "torch._dynamo", "sympy") if m in sys.modules]
        torch.testing.assert_close(result, model(*inputs.args, **inputs.kwargs))
        print({e.outcome for e in dovetail.explain(fast.graphs[0]).lowered}, modules)
"""


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama", "inductor"),
        ("llama", "onnxruntime"),
        ("llama", "openvino"),
        pytest.param("bert", "inductor", marks=pytest.mark.long),
    ],
)
def test_another_process_opens_it_without_a_compiler(name: str, backend: str, tmp_path: Path) -> None:
    if backend in ("onnxruntime", "openvino"):
        pytest.importorskip(backend)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    outputs: list[str] = []
    for given, cache in ((backend, "one"), ("", "two")):
        arguments = [name, given, str(tmp_path / "model.bundle"), str(tmp_path / cache)]
        done = subprocess.run(
            [sys.executable, str(script), *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout.strip())
    assert outputs[1] == "{'disk'} []"
