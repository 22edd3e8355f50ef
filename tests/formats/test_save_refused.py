"""What is no file of ours is told so, nothing in one is run, and what cannot be saved leaves everything as it was."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import sympy
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import dovetail
from dovetail.errors import DovetailError, InvalidArgument, InvalidFile, SaveError
from dovetail.formats.archive.container import GRAPH, HEADER
from dovetail.formats.archive.load import load
from dovetail.formats.archive.save import save
from dovetail.ir.symbolic_expr import parse_expression

from .saved import first_node, redescribed, rewritten


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("offset", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x) + self.offset)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    sizes = {"x": {0: torch.export.Dim("batch", min=2, max=8)}}
    graph = dovetail.fuse(dovetail.capture(Small().eval(), (torch.ones(2, 3),), dynamic_shapes=sizes))
    save(graph, tmp_path / "graph.pt2")
    return tmp_path / "graph.pt2"


def test_half_a_file(path: Path) -> None:
    whole = path.read_bytes()
    for part in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:part])
        with pytest.raises(InvalidFile, match="not an archive, or is truncated"):
            load(path)


def test_other_files(tmp_path: Path) -> None:
    other = tmp_path / "other.pt2"
    other.write_text("something else")
    with pytest.raises(InvalidFile, match="not an archive"):
        load(other)
    torch.save({"a": torch.ones(2)}, other)
    with pytest.raises(InvalidFile, match=r"not a file that `dovetail\.save` wrote"):
        load(other)
    torch.export.save(torch.export.export(Small(), (torch.ones(2, 3),)), other)
    with pytest.raises(InvalidFile, match=r"dovetail\.capture\(torch\.export\.load\(path\)\)"):
        load(other)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothing.pt2")
    with pytest.raises(InvalidArgument):
        load(3)  # type: ignore[arg-type]


def test_flipped_bytes_are_seen_or_do_not_matter(path: Path) -> None:
    whole, rng = path.read_bytes(), Random(0)
    expected = dovetail.text(load(path))
    refused = 0
    for _ in range(60):
        at = rng.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
        try:
            assert dovetail.text(load(path)) == expected
        except InvalidFile:
            refused += 1
    assert refused > 20


def test_a_changed_description(path: Path) -> None:
    changed = rewritten(path, lambda name, data: data + b" " if name.endswith(GRAPH) else data)
    with pytest.raises(InvalidFile, match="was changed since it was saved"):
        load(changed)
    for lost in (GRAPH, "weight_0", "model_constants_config.json"):
        with pytest.raises(InvalidFile, match="is damaged"):
            load(rewritten(path, lambda name, data, lost=lost: None if name.endswith(lost) else data))


def test_other_numbers(path: Path) -> None:
    loads = rewritten(path, lambda name, data: data)
    assert dovetail.text(load(loads)) == dovetail.text(load(path))
    for record in ("/weight_0", "/weight_1", "/tensor_0"):
        with zipfile.ZipFile(path) as archive:
            assert any(name.endswith(record) for name in archive.namelist())

        def zeros(name: str, data: bytes, record: str = record) -> bytes:
            return bytes(len(data)) if name.endswith(record) else data

        with pytest.raises(
            InvalidFile, match=f"was changed since it was saved: the checksum of its record '.*{record}'"
        ):
            load(rewritten(path, zeros))


def test_a_file_from_before_there_were_checksums(path: Path) -> None:
    older = redescribed(path, lambda description: description.pop("checksums"))
    x = torch.randn(2, 3)
    assert torch.equal(load(older)(x), load(path)(x))


@pytest.mark.parametrize("version", [True, 0, "1", 1.0, None])
def test_a_version_that_is_none(path: Path, version: Any) -> None:
    def other(name: str, data: bytes) -> bytes:
        return json.dumps({**json.loads(data), "format": version}).encode() if name.endswith(HEADER) else data

    with pytest.raises(InvalidFile, match="has no format version"):
        load(rewritten(path, other))


def test_a_newer_version(path: Path) -> None:
    def newer(name: str, data: bytes) -> bytes:
        if not name.endswith(HEADER):
            return data
        return json.dumps({**json.loads(data), "format": 99, "dovetail": "9.1"}).encode()

    with pytest.raises(InvalidFile, match=r"version 99 of the format and was saved by dovetail 9\.1"):
        load(rewritten(path, newer))


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


def test_pickles_in_a_file_are_never_opened(path: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    trap = pickle.dumps(Trap(mark))

    def put(name: str, data: bytes) -> bytes:
        if "sample_inputs" in name or name.endswith((".pt", "weight_0")):
            return trap
        if name.endswith("model_weights_config.json"):
            config = json.loads(data)
            for row in config["config"].values():
                row["use_pickle"] = True
            return json.dumps(config).encode()
        return data

    with pytest.raises(InvalidFile, match="pickled"):
        load(rewritten(path, put))
    only_inputs = rewritten(path, lambda name, data: trap if "sample_inputs" in name else data)
    assert load(only_inputs)(torch.ones(2, 3)).shape == (2, 3)
    assert not mark.exists()
    # The very same file does run it for whoever unpickles.
    pickle.loads(trap)
    assert mark.exists()


BAD: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a function": lambda d: first_node(d, "call_function").__setitem__(1, {"fn": "os.system"}),
    "an evaluator": lambda d: first_node(d, "call_function").__setitem__(1, {"fn": "builtins.eval"}),
    "a loader": lambda d: first_node(d, "call_function").__setitem__(1, {"op": "load_library::__func__"}),
    "an attribute": lambda d: first_node(d, "call_function").__setitem__(1, {"fn": "builtins.getattr"}),
    "a name": lambda d: first_node(d, "placeholder").__setitem__(4, "x): import os #"),
    "a parameter": lambda d: d["convention"]["slots"][0].__setitem__(0, "x, y=print()"),
    "an input": lambda d: first_node(d, "placeholder").__setitem__(1, "x=print()"),
    "a place": lambda d: first_node(d, "get_attr").__setitem__(1, 'a"); print("b'),
    "a keyword": lambda d: first_node(d, "call_function").__setitem__(3, {"d": [["a=print(), b", 1]]}),
    "a method": lambda d: first_node(d, "call_function").__setitem__(
        slice(0, 2), ["call_method", "__reduce__"]
    ),
    "a guard": lambda d: d["convention"]["guards"].append("__import__('os').getcwd()"),
    "a lambda": lambda d: d["convention"]["guards"].append("(lambda: 1)()"),
    "a text": lambda d: d["convention"]["guards"].append("'a' * 9"),
    "a range": lambda d: d["convention"]["ranges"].append(["print()", 0, 1]),
    "a bound": lambda d: d["convention"]["ranges"][0].__setitem__(1, "print()"),
    "a factory": lambda d: _returns(d, "collections.defaultdict", FACTORY),
    "an enumeration": lambda d: _returns(
        d, "builtins.list", '{"__enum__": true, "fqn": "antigravity:A", "name": "B"}'
    ),
    "a module": lambda d: d["modules"][d["root"]]["modules"].append(["again", d["root"]]),
    "a tensor": lambda d: d["tensors"][0][2].__setitem__(0, 4096),
    "a number": lambda d: first_node(d, "call_function").__setitem__(6, 10**6),
    "nothing": lambda d: d.pop("modules"),
    "a symbol": lambda d: next(iter(d["symbols"].values())).__setitem__(0, "x"),
    "an expression": lambda d: _sizes(d).__setitem__(0, {"x": ["SymInt", "Add('print()')", []]}),
}


FACTORY = {"default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": []}


def _returns(described: dict[str, Any], kind: str, context: Any) -> None:
    tree = {"type": kind, "context": context, "children_spec": []}
    described["convention"]["out"] = json.dumps([1, tree])


def _sizes(described: dict[str, Any]) -> list[Any]:
    return next(row for row in described["values"] if isinstance(row, list))[1]


@pytest.mark.parametrize("which", BAD)
def test_a_description_that_makes_no_sense(
    which: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = redescribed(path, BAD[which])
    with pytest.raises(InvalidFile):
        load(changed)(torch.ones(2, 3))
    assert capsys.readouterr().out == ""
    assert "antigravity" not in sys.modules


def test_expressions_are_never_evaluated() -> None:
    known = {"s0": sympy.Symbol("s0", integer=True)}
    assert str(parse_expression("Add(Symbol('s0', integer=True), Integer(2))", known)) == "s0 + 2"
    for text in (
        "__import__('os')",
        "Add('print(1)')",
        "Symbol('a.b')",
        "Integer.__class__",
        "(lambda: 1)()",
        "1 +",
    ):
        with pytest.raises(InvalidArgument):
            parse_expression(text, known)


def test_an_operator_that_is_not_there(path: Path) -> None:
    changed = redescribed(path, lambda d: first_node(d, "call_function").__setitem__(1, {"op": "acme::mix"}))
    with pytest.raises(InvalidFile, match=r"'acme::mix', which this torch does not have\. Load the library"):
        load(changed)


# What cannot be saved.


def helper(x: Tensor) -> Tensor:
    return x + 1


torch.fx.wrap("helper")


class Calls(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return helper(self.inner(x))


def test_python_code_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "graph.pt2"
    target.write_text("old")
    traced = dovetail.capture(torch.fx.symbolic_trace(Calls(nn.Linear(3, 3))), (torch.ones(3),))
    with pytest.raises(
        SaveError, match=r"node 'inner': it calls 'inner', a Linear, which is Python code"
    ) as caught:
        save(traced, target)
    assert caught.value.node == "inner"
    captured = dovetail.capture(torch.fx.symbolic_trace(Calls(nn.Identity())), (torch.ones(3),))
    function = dovetail.capture(torch.fx.symbolic_trace(helper_of_helper), (torch.ones(3),))
    for graph, what in ((captured, "Identity"), (function, "it calls helper, which is Python code")):
        with pytest.raises(SaveError, match=what):
            save(graph, target)
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["graph.pt2"]


def helper_of_helper(x: Tensor) -> Tensor:
    return helper(x) * 2


def test_hooks_are_refused() -> None:
    graph = dovetail.capture(torch.relu, (torch.ones(3),))
    graph.register_forward_hook(lambda *_: None)
    with pytest.raises(SaveError, match="hooks"):
        save(graph, io.BytesIO())


def test_inputs_of_which_nothing_is_known_are_refused() -> None:
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(SaveError, match="node 'x': the value of this input is unknown"):
        save(graph, io.BytesIO())


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


def test_types_without_a_name_are_refused() -> None:
    pytree.register_pytree_node(Box, lambda b: ([b.value], None), lambda v, _: Box(next(iter(v))))
    try:
        graph = dovetail.capture(lambda x: Box(x + 1), (torch.ones(3),))
        with pytest.raises(SaveError, match="serialized_type_name"):
            save(graph, io.BytesIO())
    finally:
        pytree._deregister_pytree_node(Box)


def test_weights_that_have_no_numbers_are_refused() -> None:
    graph = dovetail.capture(Small().to("meta"), (torch.ones(2, 3, device="meta"),))
    with pytest.raises(SaveError, match="meta device"):
        save(graph, io.BytesIO())


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "graph.pt2"
    graph = dovetail.capture(torch.relu, (torch.ones(3),))
    save(graph, target)
    before = target.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(torch.export, "save", full)
        with pytest.raises(OSError, match="no space left"):
            save(graph, target)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(OSError, match="no space left"):
            save(graph, target)
    assert target.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["graph.pt2"]
    with pytest.raises(SaveError, match="no folder"):
        save(graph, tmp_path / "none" / "graph.pt2")


def test_wrong_arguments() -> None:
    with pytest.raises(InvalidArgument, match="GraphModule"):
        save(nn.Linear(2, 2), io.BytesIO())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="neither a path nor a file"):
        save(dovetail.capture(torch.relu, (torch.ones(3),)), 3)  # type: ignore[arg-type]
    assert issubclass(InvalidFile, DovetailError)
    assert issubclass(SaveError, DovetailError)
