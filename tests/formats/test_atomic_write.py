"""Files that are written: what they replace, through what, and what is no place for them."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import SaveError
from dovetail.formats.archive.save import save
from dovetail.formats.onnx.to_onnx import to_onnx

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx.reference")


@pytest.fixture(params=[save, to_onnx])
def write(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    graph = dovetail.capture(lambda x: torch.relu(x + 1), (torch.ones(2),))
    return lambda path: request.param(graph, path)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_rights_of_what_is_replaced_stay(write: Callable[[Any], Any], tmp_path: Path) -> None:
    path = tmp_path / "graph"
    before = os.umask(0o027)
    try:
        write(path)
        assert mode(path) == 0o640
        for rights in (0o600, 0o664):
            path.write_bytes(b"before")
            path.chmod(rights)
            write(path)
            assert mode(path) == rights
            assert path.stat().st_size > 6
    finally:
        os.umask(before)


def test_what_a_link_leads_to_is_written(write: Callable[[Any], Any], tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    link, file = tmp_path / "link", tmp_path / "far" / "file"
    link.symlink_to(Path("far") / "file")
    for _ in ("new", "replaced"):
        write(link)
        assert os.readlink(link) == os.path.join("far", "file")
        assert file.stat().st_size > 6
        file.write_bytes(b"before")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["far", "file", "link"]


def test_no_place_for_a_file(
    write: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "around").symlink_to("around")
    os.mkfifo(tmp_path / "pipe")
    refused = {
        "": "the path is empty",
        str(tmp_path): "is a folder; give the name of a file",
        str(tmp_path / "none" / "x"): "there is no folder '.*none'",
        str(tmp_path / "around"): "not a regular file",
        str(tmp_path / "pipe"): "not a regular file",
    }
    monkeypatch.chdir(tmp_path)
    for path, reason in refused.items():
        with pytest.raises(SaveError, match=reason):
            write(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["around", "pipe"]


def test_weights_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The limit itself is what protobuf can hold, two gigabytes.
    monkeypatch.setattr("dovetail.formats.onnx.to_onnx._LARGEST", 10)
    graph = dovetail.capture(torch.nn.Linear(64, 64), (torch.ones(1, 64),))
    (tmp_path / "m.onnx.data").write_bytes(b"before")
    (tmp_path / "m.onnx.data").chmod(0o600)
    to_onnx(graph, tmp_path / "m.onnx")
    assert mode(tmp_path / "m.onnx.data") == 0o600
    x = torch.ones(1, 64)
    model = onnx.load(tmp_path / "m.onnx")
    (result,) = onnx.reference.ReferenceEvaluator(model).run(None, {model.graph.input[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(result), graph(x).detach())
    (tmp_path / "link").symlink_to("m.onnx")
    with pytest.raises(SaveError, match="is a link, and weights"):
        to_onnx(graph, tmp_path / "link")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "m.onnx", "m.onnx.data"]
