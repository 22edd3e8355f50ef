"""Graphs that unfold without end, records that lie, and archives that unpack to more than they are: all are refused."""

from __future__ import annotations

import copy
import io
import json
import os
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dovetail
from dovetail.errors import InvalidFile
from dovetail.formats.archive.container import GRAPH, HEADER
from dovetail.formats.archive.load import load

from .saved import first_node, redescribed, refused, rewritten

Change = Callable[[dict[str, Any]], Any]


# What is written once and used again and again.


def doubled(described: dict[str, Any], levels: int) -> None:
    """Modules of which each holds the next one twice."""
    empty: dict[str, Any] = {
        "training": False,
        "modules": [],
        "parameters": [],
        "buffers": [],
        "constants": [],
    }
    first = len(described["modules"])
    for level in range(levels):
        inside = [["a", first + level + 1], ["b", first + level + 1]] if level + 1 < levels else []
        described["modules"].append({**copy.deepcopy(empty), "modules": inside})
    described["modules"][described["root"]]["modules"].append(["twice", first])


def bodies(described: dict[str, Any], levels: int) -> None:
    """Graphs of which each calls the next one twice."""
    leaf = [
        ["placeholder", "x", {"t": []}, {"d": []}, "x", None, 0],
        ["output", "output", {"t": [{"t": [{"n": 0}]}]}, {"d": []}, "output", None, 0],
    ]
    call = ["call_module", "inner", {"t": [{"n": 0}]}, {"d": []}, "call", None, 0]
    first = len(described["modules"])
    for level in range(levels):
        is_last = level + 1 == levels
        nodes = leaf if is_last else [leaf[0], call, [*call[:4], "again", *call[5:]], leaf[1]]
        described["modules"].append(
            {
                "training": False,
                "modules": [] if is_last else [["inner", first + level + 1]],
                "parameters": [],
                "buffers": [],
                "constants": [],
                "graph": {
                    "body": False,
                    "name": "Inner",
                    "impure": False,
                    "borrowed": [],
                    "nodes": copy.deepcopy(nodes),
                    "canonical": None,
                    "outlining": None,
                    "meta": len(described["metas"]),
                },
            }
        )
    described["metas"].append({})
    for node in (n for m in described["modules"][first:] for n in m["graph"]["nodes"]):
        node[6] = len(described["metas"]) - 1
    described["modules"][described["root"]]["modules"].append(["twice", first])


def regions(described: dict[str, Any], levels: int) -> None:
    """Records of regions of which each has the next one twice."""
    node = next(row for row in _nodes(described) if "dovetail.region" in described["metas"][row[6]])
    first = len(described["metas"])
    record = described["metas"][node[6]]["dovetail.region"]
    for level in range(levels):
        inside = [["a", first + level + 1, 0, None, False, None]] * 2 if level + 1 < levels else []
        described["metas"].append({"dovetail.region": {**record, "members": inside}})
    node[6] = first


def itself(described: dict[str, Any], levels: int) -> None:
    """A record of a region that is among its own members."""
    node = next(row for row in _nodes(described) if "dovetail.region" in described["metas"][row[6]])
    described["metas"][node[6]]["dovetail.region"]["members"] = [
        ["a", node[6], 0, None, False, None]
    ] * levels


def metas(described: dict[str, Any], levels: int) -> None:
    """A meta of a thousand entries, and ten thousand nodes that have it."""
    described["metas"].append({f"k{n}": n for n in range(25 * levels)})
    nodes = described["modules"][described["root"]]["graph"]["nodes"]
    extra = [
        "call_function",
        {"fn": "torch.relu"},
        {"t": [{"n": 0}]},
        {"d": []},
        "n",
        None,
        len(described["metas"]) - 1,
    ]
    nodes[-1:-1] = [[*extra[:4], f"n{n}", *extra[5:]] for n in range(250 * levels)]


def _nodes(described: dict[str, Any]) -> list[Any]:
    return [row for m in described["modules"] if "graph" in m for row in m["graph"]["nodes"]]


@pytest.mark.parametrize("nest", [doubled, bodies, regions, itself, metas])
def test_what_unfolds_without_end(path: Path, nest: Callable[[dict[str, Any], int], None]) -> None:
    refused(redescribed(path, lambda d: nest(d, 60)))


def test_what_is_nested_a_little_still_loads(path: Path) -> None:
    for nest in (doubled, bodies):
        load(redescribed(path, lambda d, nest=nest: nest(d, 5)))


# What is written into generated code, imported, or believed of meta.


@pytest.mark.parametrize(
    "entry",
    [
        ("stack_trace", 'File "x.py", line 1, in f\r__import__("os").abort()\r'),
        ("stack_trace", 7),
        ("nn_module_stack", {"d": [["a", 3]]}),
        ("nn_module_stack", [1]),
        ("val", {"e": 0}),
        ("custom", "x"),
        ("dovetail.lowering", {"d": []}),
        ("dovetail.ledger", "x"),
        ("dovetail.effects", {"d": [["a", "b"]]}),
    ],
)
def test_meta_that_is_read_is_what_it_must_be(path: Path, entry: tuple[str, Any]) -> None:
    refused(redescribed(path, lambda d: d["metas"][first_node(d, "call_function")[6]].__setitem__(*entry)))


def test_a_part_of_something_that_is_no_node(path: Path) -> None:
    def change(described: dict[str, Any]) -> None:
        row = first_node(described, "call_function")
        row[1:4] = [{"fn": "operator.getitem"}, {"t": [False, 0]}, {"d": []}]

    dovetail.inline(load(redescribed(path, change)))


@pytest.mark.parametrize("returned", [None, {"n": 0}, {"t": [None]}, {"t": [{"t": [{"n": 0}]}]}, {"t": [1]}])
def test_a_body_that_returns_something_else_than_values(path: Path, returned: Any) -> None:
    def change(described: dict[str, Any]) -> None:
        graphs = [row["graph"] for row in described["modules"] if "graph" in row]
        body = next(graph for graph in graphs if graph["body"])
        body["nodes"][-1][2] = {"t": [returned]}

    with pytest.raises(InvalidFile, match="the body of a region does not return"):
        load(redescribed(path, change))


def test_an_enumeration_in_another_spelling(path: Path) -> None:
    context = json.dumps({"\0": True, "fqn": "antigravity:A", "name": "B"}).replace(
        "\\u0000", "\\u005f_enum__"
    )

    def change(described: dict[str, Any]) -> None:
        tree = {"type": "builtins.list", "context": context, "children_spec": []}
        described["convention"]["out"] = json.dumps([1, tree])

    refused(redescribed(path, change), "enumeration")
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["convention"].__setitem__("twins", [[0, 99]]),
        lambda d: d["convention"].__setitem__("carried", [0, 0, 1]),
        lambda d: d["convention"]["slots"].append(d["convention"]["slots"][0]),
        lambda d: d["convention"]["inputs"][0].__setitem__(2, "float32"),
        lambda d: d["convention"].__setitem__("out", json.dumps([1, _dict_of(3)])),
        lambda d: d["convention"].__setitem__("out", json.dumps([1, _dict_of(1, keys=2)])),
        lambda d: first_node(d, "placeholder")[2]["t"].append({"n": 0}),
        lambda d: first_node(d, "placeholder").__setitem__(1, "***x"),
        lambda d: first_node(d, "get_attr")[2]["t"].append(1),
        lambda d: first_node(d, "call_function").__setitem__(slice(0, 3), ["call_method", "relu", {"t": []}]),
        lambda d: first_node(d, "call_function").__setitem__(
            slice(0, 3), ["call_method", "relu", {"t": [7]}]
        ),
        lambda d: first_node(d, "call_function").__setitem__(6, first_node(d, "call_module")[6]),
        lambda d: first_node(d, "call_function").__setitem__(
            slice(1, 3), [{"fn": "operator.add"}, {"t": [1]}]
        ),
        lambda d: _member(d).__setitem__(3, "float32"),
        lambda d: first_node(d, "call_function")[2]["t"].append({"v": 0}),
        lambda d: first_node(d, "call_function")[2]["t"].append(10**400),
        lambda d: first_node(d, "call_function")[2]["t"].append(_deep(200)),
        lambda d: first_node(d, "call_function")[2]["t"].append({"dev": "nowhere"}),
    ],
)
def test_calls_that_could_not_be_written_as_code(path: Path, change: Change) -> None:
    refused(redescribed(path, change))


def _member(described: dict[str, Any]) -> list[Any]:
    return described["metas"][first_node(described, "call_module")[6]]["dovetail.region"]["members"][0]


def _dict_of(leaves: int, keys: int | None = None) -> dict[str, Any]:
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    names = [f"k{n}" for n in range(leaves if keys is None else keys)]
    return {"type": "builtins.dict", "context": json.dumps(names), "children_spec": [leaf] * leaves}


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


# Tensors.


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (1, "qint8"),
        (1, "Tensor"),
        (1, "_inductor"),
        (1, 3),
        (2, [2**62, 2**62]),
        (2, [-1, 3]),
        (2, [3] * 100_000),
        (2, [10**400]),
        (3, [2**40, 1]),
        (3, [-1, 1]),
        (3, [1]),
        (4, 2**63),
        (4, 10**9),
        (4, -1),
        (4, True),
        (5, "nowhere"),
        (5, "meta"),
        (5, 7),
        (6, 1),
        (7, "x"),
        (0, 10**9),
        (0, -1),
    ],
)
@pytest.mark.parametrize("is_fake", [False, True])
def test_facts_of_a_tensor_that_cannot_be(path: Path, at: int, value: Any, is_fake: bool) -> None:
    # A fake tensor has its dtype after its sizes, may be on any device, and may be of any size.
    if is_fake and (at in (0, 5) or value in (2**40, 10**9) or value == [2**40, 1]):
        return
    order = {1: 4, 2: 1, 3: 2, 4: 3}

    def change(described: dict[str, Any]) -> None:
        rows = described["values"] if is_fake else described["tensors"]
        row = next(r for r in rows if isinstance(r, list) and r[order[2] if is_fake else 2] == [3, 3])
        row[order.get(at, at) if is_fake else at] = value

    refused(redescribed(path, change))


def test_a_stride_of_nothing_over_more_than_can_be_counted(path: Path) -> None:
    def change(described: dict[str, Any]) -> None:
        row = next(r for r in described["tensors"] if r[2] == [3, 3])
        row[2], row[3] = [2**40, 2**40], [0, 0]

    refused(redescribed(path, change), "too many elements")


# Archives.


def repacked(path: Path, change: Callable[[zipfile.ZipFile, zipfile.ZipFile], None]) -> Path:
    target = path.with_name("packed.pt2")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        change(old, new)
    return target


@pytest.mark.parametrize("record", [HEADER, GRAPH, "weight_0", "model_weights_config.json"])
def test_a_small_record_that_unpacks_to_a_large_one(path: Path, record: str) -> None:
    def change(old: zipfile.ZipFile, new: zipfile.ZipFile) -> None:
        for name in old.namelist():
            is_bomb = name.endswith(record)
            method = zipfile.ZIP_DEFLATED if is_bomb else zipfile.ZIP_STORED
            new.writestr(name, bytes(2**26) if is_bomb else old.read(name), compress_type=method)

    bomb = repacked(path, change)
    assert bomb.stat().st_size < 2**20
    refused(bomb, "compressed")


def test_a_header_that_is_too_large(path: Path) -> None:
    refused(
        rewritten(path, lambda name, data: data + b" " * 2**20 if name.endswith(HEADER) else data), "bytes"
    )


def test_one_record_for_many_tensors(path: Path) -> None:
    """Each of many pieces of memory is the same record of a megabyte: a file of two would need gigabytes."""

    def change(described: dict[str, Any]) -> None:
        row = next(r for r in described["tensors"] if r[2] == [3, 3])
        place = described["storages"][row[0]]
        for _ in range(3000):
            described["storages"].append(place)
            described["checksums"].append(described["checksums"][row[0]])
            described["tensors"].append([len(described["storages"]) - 1, *row[1:]])

    refused(redescribed(path, change), "overlaps")


def test_a_record_twice(path: Path) -> None:
    def change(old: zipfile.ZipFile, new: zipfile.ZipFile) -> None:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        with pytest.warns(UserWarning, match="Duplicate"):
            new.writestr(old.namelist()[-1], b"other")

    refused(repacked(path, change), "twice")


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "C:\\x", "a\0b", "", "é" * 1000])
def test_other_records_are_left_alone(path: Path, name: str) -> None:
    def change(old: zipfile.ZipFile, new: zipfile.ZipFile) -> None:
        for known in old.namelist():
            new.writestr(known, old.read(known))
        info = zipfile.ZipInfo(name or "x")
        info.external_attr = 0o120777 << 16  # a symbolic link
        new.writestr(info, b"/etc/passwd")

    assert load(repacked(path, change))(torch.ones(2, 3))["out"].shape == (2, 3)


@pytest.mark.parametrize("field", [8, 10, 16, 20, 24, 28, 30, 42])
@pytest.mark.parametrize("number", [1, 0x7FFF, 0xFFFFFFFF])
def test_a_directory_with_false_entries(path: Path, field: int, number: int) -> None:
    whole = path.read_bytes()
    place = whole.rfind(b"PK\x01\x02", 0, whole.rfind(HEADER.encode()))
    size = 2 if field in (8, 10, 28, 30) else 4
    path.write_bytes(
        whole[: place + field] + struct.pack("<L", number)[:size] + whole[place + field + size :]
    )
    refused(path)


def test_values_without_end(path: Path) -> None:
    text = b'{"texts": [' + b"[]," * 2**23 + b"1]}"
    refused(rewritten(path, lambda name, data: text if name.endswith(GRAPH) else data), "changed since")


def test_what_is_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("", "pipe"):
        with pytest.raises(InvalidFile, match="not a file"):
            load(tmp_path / name)
    with pytest.raises(InvalidFile, match="text"):
        load(io.StringIO("x" * 100))  # type: ignore[arg-type]
    (tmp_path / "empty").touch()
    with pytest.raises(InvalidFile, match="not an archive"):
        load(tmp_path / "empty")
