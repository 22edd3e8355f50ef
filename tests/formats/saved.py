"""What must hold of a graph that was saved, opened by us and by torch.export."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch.fx import GraphModule

import dovetail
from dovetail.errors import InvalidFile
from dovetail.formats.archive.container import GRAPH, HEADER
from dovetail.formats.archive.load import load
from dovetail.formats.archive.save import save
from tests.fuzz.files import peak_memory

_FACTS = [
    f.name for f in fields(dovetail.Region) if f.name not in ("body", "node", "inputs", "outputs", "backend")
]


def again(gm: GraphModule) -> tuple[GraphModule, io.BytesIO]:
    """The graph after saving and loading, and the file."""
    file = io.BytesIO()
    save(gm, file)
    file.seek(0)
    return load(file), file


def facts(gm: GraphModule) -> list[Any]:
    """All that is told of the regions, and which of them share a body."""
    bodies: dict[int, int] = {}
    return [
        (*(getattr(r, name) for name in _FACTS), r.key, bodies.setdefault(id(r.body), len(bodies)))
        for r in dovetail.regions(gm, nested=True)
    ]


def description(gm: GraphModule) -> tuple[str, str, str, list[Any], list[str]]:
    return (
        dovetail.text(gm),
        dovetail.text(dovetail.inline(gm)),
        str(dovetail.explain(gm)),
        facts(gm),
        list(gm.state_dict()),
    )


def seen(module: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Results, inputs and state after a call from a fixed seed, and where the random stream is then."""
    args, kwargs = copy.deepcopy((args, kwargs))
    before = copy.deepcopy(module.state_dict())
    torch.manual_seed(5)
    result = module(*args, **kwargs)
    after = {k: module.state_dict()[k].clone() for k in sorted(before)}
    spec = pytree.tree_structure(result)
    noted = [
        spec,
        *(_comparable(v) for v in pytree.tree_leaves((result, args, kwargs, after))),
        torch.rand(1).item(),
    ]
    module.load_state_dict(before)
    return noted


def _comparable(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return (
        value.dtype,
        tuple(value.shape),
        value.stride(),
        value.detach().contiguous().reshape(-1).view(torch.uint8).tolist(),
    )


def survives(gm: GraphModule, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> GraphModule:
    """Assert that nothing of a graph is lost in a file; returns the loaded graph."""
    before = description(gm)
    loaded, file = again(gm)
    assert description(gm) == before
    for was, now in zip(before, description(loaded), strict=True):
        assert now == was
    dovetail.check(loaded)
    expected = seen(gm, args, kwargs or {})
    assert seen(loaded, args, kwargs or {}) == expected
    file.seek(0)
    program = torch.export.load(file)
    assert seen(program.module(), args, kwargs or {}) == expected
    return loaded


def rewritten(path: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """The archive with some records changed, or left out."""
    changed = path.with_name("changed.pt2")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            data = change(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
    return changed


def redescribed(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The archive with another description, signed as ours are."""
    with zipfile.ZipFile(path) as old:
        name = next(n for n in old.namelist() if n.endswith(GRAPH))
        described = json.loads(old.read(name))
        change(described)
        text = json.dumps(described).encode()
        header = json.loads(old.read(name.replace(GRAPH, HEADER)))
    header["digest"] = hashlib.sha256(text).hexdigest()

    def put(name: str, data: bytes) -> bytes:
        return (
            text if name.endswith(GRAPH) else json.dumps(header).encode() if name.endswith(HEADER) else data
        )

    return rewritten(path, put)


def first_node(described: dict[str, Any], op: str) -> list[Any]:
    """The first node of an operation, as it is written."""
    rows = [row for m in described["modules"] if "graph" in m for row in m["graph"]["nodes"]]
    return next(row for row in rows if row[0] == op)


def refused(path: Path, match: str | None = None) -> None:
    """Assert that a file is refused, in two seconds of the processor and in a gigabyte."""
    began, before = time.thread_time(), peak_memory(reset=True)
    with pytest.raises(InvalidFile, match=match):
        load(path)
    assert peak_memory() - before < 2**30
    assert time.thread_time() - began < 2
