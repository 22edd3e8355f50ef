"""History: undone, saved, and done again on another model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail.rules.library.linear import linear_gelu
from dovetail.scheduling.history import History, import_object
from dovetail.scheduling.schedule import Schedule, schedule
from tests.scheduling.models import Net, activation, is_gelu, mlp, net


def scheduled() -> tuple[Schedule, Tensor]:
    model, x = net(training=False)
    s = schedule(model, (x,))
    s.fuse(s["blocks.*"].find(mlp), kind="mlp", attrs={"tile": 64})
    s.fuse(s["blocks.1"].find(nn.LayerNorm), kind="norm", backends="torchscript")
    s.annotate(s.regions[0], level=2)
    return s, x


def test_undo_takes_the_last_step_back():
    model, x = net()
    s = schedule(model, (x,))
    texts = [s.text()]
    s.fuse(s["blocks.0"].find(mlp))
    texts.append(s.text())
    s.fuse(s["blocks.1"].find(activation))
    assert len(s.history) == 3
    s.undo()
    assert s.text() == texts[1]
    (entry,) = s.undo()
    assert entry["do"] == "fuse"
    assert s.text() == texts[0]
    with pytest.raises(dovetail.DovetailError, match="cannot undo 1 steps: there are 0"):
        s.undo()
    with pytest.raises(dovetail.InvalidArgument, match="number of steps"):
        s.undo(0)


def test_a_history_is_replayed_on_another_instance_without_inputs():
    s, x = scheduled()
    other = Net().eval()
    expected = other(x)
    t = schedule(other).replay(s.history)
    assert t.text() == s.text()
    assert t.history == s.history
    torch.testing.assert_close(t.build()(x), expected)


def test_a_history_is_saved_as_json_and_loaded(tmp_path: Path):
    s, _ = scheduled()
    path = s.history.save(tmp_path / "history.json")
    data = json.loads(path.read_text())
    assert [step["do"] for step in data["steps"]] == ["schedule", "fuse", "fuse", "annotate"]
    other = Net().eval()
    assert schedule(other).replay(path).text() == s.text()
    assert schedule(Net().eval()).replay(str(path)).text() == s.text()
    assert schedule(Net().eval()).replay(History.load(path)).text() == s.text()


@pytest.mark.parametrize(
    "location",
    [
        "dovetail.rules.library.linear:linear_gelu",
        "dovetail.rules.library.a_file_of_another_version:linear_gelu",
    ],
)
def test_a_rule_of_the_library_is_resolved_wherever_a_history_has_it(location: str):
    model, x = net(training=False)
    s = schedule(model, (x,))
    s.fuse(s["blocks.*"].find(linear_gelu))
    text = s.history.json()
    assert '"dovetail.rules.library.linear:linear_gelu"' in text
    saved = text.replace("dovetail.rules.library.linear:linear_gelu", location)
    assert schedule(Net().eval()).replay(History.load(saved)).text() == s.text()


def test_a_rule_that_the_library_does_not_have_is_refused():
    model, x = net(training=False)
    s = schedule(model, (x,))
    s.fuse(s["blocks.*"].find(linear_gelu))
    saved = s.history.json().replace("linear:linear_gelu", "another_file:another_rule")
    with pytest.raises(dovetail.DovetailError, match="another_file:another_rule' cannot be imported"):
        schedule(Net().eval()).replay(History.load(saved))


def test_history_has_no_names_of_nodes():
    s, _ = scheduled()
    text = s.history.json()
    assert all(f'"{name}"' not in text for name in ("linear", "linear_1", "gelu", "layer_norm", "mlp_0"))


def test_what_cannot_be_imported_cannot_be_saved():
    model, x = net()
    s = schedule(model, (x,))
    s.fuse(s["blocks.0"].find(where=lambda n: is_gelu(n)), kind="gelu")
    with pytest.raises(
        dovetail.DovetailError, match=r"step 1 cannot be saved: .*lambda.* cannot be imported"
    ):
        s.history.json()


@pytest.mark.parametrize("text", ["[]", "{}", '{"dovetail schedule": 1}', '{"steps": []}', "{nonsense"])
def test_what_is_no_history_is_refused(text: str, tmp_path: Path):
    path = tmp_path / "history.json"
    path.write_text(text)
    with pytest.raises(dovetail.DovetailError, match="not the history of a schedule"):
        History.load(path)


def test_a_newer_history_is_refused():
    with pytest.raises(dovetail.DovetailError, match="version 99"):
        History.load('{"dovetail schedule": 99, "steps": []}')


class Other(nn.Module):
    """Blocks as the others, but another activation in one of them."""

    def __init__(self) -> None:
        super().__init__()
        inner = Net()
        inner.blocks[1] = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.blocks, self.head = inner.blocks, inner.head

    forward = Net.forward


def test_a_history_that_does_not_fit_is_replayed_not_at_all():
    s, x = scheduled()
    t = schedule(Other().eval(), (x,))
    before = t.text()
    with pytest.raises(
        dovetail.DovetailError, match=r"step 1 \(fuse\) cannot be replayed: .*blocks.1.* has 0 matches"
    ):
        t.replay(s.history)
    assert t.text() == before
    assert t.history == []


def test_a_body_that_computes_something_else_is_refused():
    s, _ = scheduled()
    t = schedule(Net().eval(), (torch.randn(5, 8),))
    with pytest.raises(dovetail.DovetailError, match="computes something else"):
        t.replay(s.history)


@pytest.mark.parametrize("step", [{"do": "dance", "paths": ["head"]}, {"do": "fuse"}, {}])
def test_an_unknown_step_is_refused(step: dict[str, Any]):
    model, x = net()
    with pytest.raises(dovetail.DovetailError, match=r"step 0 .* cannot be replayed"):
        schedule(model, (x,)).replay([step])


@pytest.mark.parametrize(
    ("history", "reason"),
    [(3, "replay takes a history"), ([3], "step 0"), ("no such file", "cannot be read")],
)
def test_what_is_no_history_is_not_replayed(history: Any, reason: str):
    model, x = net()
    with pytest.raises(dovetail.DovetailError, match=reason):
        schedule(model, (x,)).replay(history)


def test_a_replay_that_fails_leaves_a_built_model_as_it_was():
    s, x = scheduled()
    t = schedule(Net().eval(), (x,))
    built = t.build()
    with pytest.raises(dovetail.DovetailError, match="step 2"):
        t.replay([*s.history[:2], {"do": "dance", "paths": ["head"]}])
    assert not any("forward" in module.__dict__ for module in built.modules())


def fuse_everything(s: Schedule, what: Any, *, kind: str) -> int:
    matches = s["blocks.*"].find(what)
    for match in matches:
        s.fuse(match, kind=kind)
    return len(matches)


def test_a_primitive_of_ones_own_is_one_step():
    model, x = net()
    s = schedule(model, (x,))
    before = s.text()
    assert s.apply(fuse_everything, mlp, kind="mlp") == 3
    assert [entry["do"] for entry in s.history] == ["schedule", "apply"]
    after = s.text()
    s.undo()
    assert s.text() == before
    t = schedule(Net(), (x,)).replay(s.history)
    s.apply(fuse_everything, mlp, kind="mlp")
    assert schedule(Net(), (x,)).replay(History.load(s.history.json())).text() == after
    assert t.text() == before


def test_a_primitive_that_fails_leaves_nothing():
    def fail(s: Schedule) -> None:
        s.fuse(s["blocks.0"].find(mlp))
        raise ValueError("no")

    model, x = net()
    s = schedule(model, (x,))
    before = s.text()
    with pytest.raises(ValueError, match="no"):
        s.apply(fail)
    assert s.text() == before
    assert s.history == []
    with pytest.raises(dovetail.InvalidArgument, match="apply takes a function"):
        s.apply(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["dovetail.backends.aoti:Aoti", "dovetail.backends.inductor:Aoti"])
def test_a_backend_is_read_by_its_name_whatever_file_has_it(path: str) -> None:
    assert import_object(path) is dovetail.backends.Aoti
