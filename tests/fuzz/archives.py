"""Archives as `save` writes them, and mutations of each level: bytes, zip structure, header, graph, tensors."""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import json
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

import dovetail
from dovetail.formats.archive.container import GRAPH, HEADER

_DEEP = "\0deep\0"
"""Stands in a tree of JSON for lists nested deeper than Python can recurse: they are put into the text."""

_EXPRESSIONS = (
    "Pow(9, Pow(9, 9))",
    "Pow(Integer(9), Pow(Integer(9), Integer(9)))",
    "LShift(Integer(1), Integer(99999999999))",
    "Integer(" + "9" * 5000 + ")",
    "Float('1e99999999', precision=53)",
    "Add(Symbol('s0', integer=True), 'print(1)')",
    "Mul(" + ", ".join(["Symbol('s0', integer=True)"] * 300) + ")",
    "(" * 500 + "1" + ")" * 500,
    "9**9**9 > s0",
    "s0 << 10**10 > 0",
    "round(s0, -10**9) > 0",
    "__import__('os').abort()",
    "1 // (s0 - s0)",
    "s77 > 0",
)
_WORDS = """
    aten::from_file aten::save aten::add.Tensor prim::Print _c10d_functional::all_reduce dovetail_fuzz::note
    os.system builtins.eval builtins.getattr torch.load torch.relu operator.attrgetter __class__
    forward.__globals__ forward training _modules __call__
"""
_NAMES = (
    *_WORDS.split(),
    "x): import os #",
    'a"); print("b',
    "../../x",
    "/etc/passwd",
    "C:\\x",
    "a\0b",
    "\ud800",
    "é\u2028x\r\nimport os",
    "lambda",
    "None",
    "self",
    "",
    "x" * 70_000,
)
_NUMBERS = (0, -1, 1, 2, 7, 63, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**400)
_ODD = (None, True, False, 0.5, 1e308, float("nan"), float("inf"), [], {}, _DEEP)
_CONFIGS = ("model_weights_config.json", "model_constants_config.json")
_DTYPES = ("float32", "int8", "qint8", "bool", "complex64", "uint64", "float8_e4m3fn", "Tensor", "_inductor")
_DEVICES = ("cpu", "cuda", "cuda:99", "meta", "mps", "nowhere", "cpu:1", "")
_TAGS = (
    "n",
    "t",
    "d",
    "sl",
    "v",
    "s",
    "sz",
    "f",
    "c",
    "e",
    "torch",
    "dev",
    "op",
    "pk",
    "ho",
    "fn",
    "x",
    "zz",
)


class Small(nn.Module):
    """Weights that are tied, shared, empty, not persistent and written, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)
        whole = torch.arange(8.0)
        self.register_buffer("low", whole[:4])
        self.register_buffer("high", whole[4:])
        self.register_buffer("empty", torch.empty(0, 3))

    def forward(self, x: Tensor, *, gain: float = 2.0) -> dict[str, Any]:
        self.calls.add_(1)
        y = self.second(torch.relu(self.first(x))) * self.scale + self.low - self.high
        return {"out": (y * gain, None), "calls": self.calls + torch.tensor([1.0, -2.0, 3.0, 4.0])}


class Chosen(nn.Module):
    """A higher-order operator, whose graphs are attributes."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,)) + 1


def _halves(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x, y]).reshape(2, -1)


def _nested() -> GraphModule:
    def twice(x: Tensor) -> Tensor:
        return torch.sigmoid(torch.sigmoid(x * 3) + x) * 3

    graph = dovetail.capture(twice, (torch.ones(2, 4),))
    graph = dovetail.outline(
        graph, ["mul", "sigmoid"], kind="npu.scaled", attrs={"by": 3, "names": ["x", "é"]}
    )
    return dovetail.outline(graph, ["npu_scaled_0", "add"], kind="block", escapes={"add": "output"})


@functools.cache
def originals() -> tuple[bytes, ...]:
    """Sound archives, of graphs with dynamic sizes, guards, nested regions, sub-graphs, and traced ones."""
    torch.manual_seed(0)
    sizes = {"x": {0: Dim("b", min=2, max=9)}}
    batch = Dim("batch", min=2, max=20)
    graphs = [
        dovetail.fuse(dovetail.capture(Small(), (torch.ones(3, 4),), dynamic_shapes=sizes)),
        dovetail.fuse(dovetail.capture(_halves, (torch.ones(4),) * 2, dynamic_shapes=({0: 2 * batch},) * 2)),
        _nested(),
        dovetail.capture(Chosen(), (torch.ones(3),)),
        dovetail.capture(torch.fx.symbolic_trace(_traced), (torch.ones(2, 3),)),
    ]
    written: list[bytes] = []
    for graph in graphs:
        file = io.BytesIO()
        dovetail.save(graph, file)
        written.append(file.getvalue())
    return tuple(written)


def _traced(x: Tensor) -> Tensor:
    return nn.functional.gelu(x.relu() + x.shape[0]).softmax(-1)[0]


def mutant(rng: Random) -> tuple[str, bytes]:
    """A mutation of a sound archive, and what was done to it."""
    data = rng.choice(originals())
    level = rng.choices(list(_LEVELS), weights=[3, 4, 2, 12, 2, 3])[0]
    return level, _LEVELS[level](rng, data)


def _bytes(rng: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        at, length = rng.randrange(len(changed)), rng.choice((1, 2, 4, 30, 500))
        what = rng.randrange(6)
        if what == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            changed[at : at + length] = rng.randbytes(length)
        elif what == 2:
            del changed[at : at + length]
        elif what == 3:
            changed[at:at] = rng.randbytes(length)
        elif what == 4:
            changed[at : at + length] = rng.choice((b"\0", b"\xff")) * length
        else:
            other = rng.randrange(len(changed))
            changed[at : at + length] = changed[other : other + length]
        if len(changed) < 2:
            break
    if rng.random() < 0.1:
        del changed[rng.randrange(len(changed) + 1) :]
    return bytes(changed)


Records = dict[str, bytes]


def unpacked(data: bytes) -> Records:
    """The records of an archive by name."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(rows: list[tuple[str, bytes, int]]) -> bytes:
    """An archive of records, each with how it is compressed; names may repeat."""
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as archive:
        warnings.simplefilter("ignore")
        for name, data, method in rows:
            info = zipfile.ZipInfo(name.encode("utf-8", "replace").decode()[:60_000])
            info.compress_type = method
            archive.writestr(info, data)
    return file.getvalue()


def _stored(records: Records) -> bytes:
    return packed([(name, data, zipfile.ZIP_STORED) for name, data in records.items()])


def _zip(rng: Random, data: bytes) -> bytes:
    """Entries renamed, doubled, dropped, reordered or compressed, or a directory that lies about them."""
    rows = [(name, body, zipfile.ZIP_STORED) for name, body in unpacked(data).items()]
    if rng.random() < 0.5:
        return _lying(rng, data)
    for _ in range(rng.choice((1, 1, 3))):
        at = rng.randrange(len(rows))
        name, body, method = rows[at]
        what = rng.randrange(7)
        if what == 0:
            del rows[at]
        elif what == 1:
            rows.append(rows[at])
        elif what == 2:
            rows[at] = (rng.choice((rng.choice(_NAMES), name + "/", "x/" + name, name.upper())), body, method)
        elif what == 3:
            rows[at] = (name, rng.choice(rows)[1], method)
        elif what == 4:
            rng.shuffle(rows)
        elif what == 5:
            rows[at] = (name, body, zipfile.ZIP_DEFLATED)
        else:
            # Compressed, a few kilobytes; read whole it would be gigabytes in a file of some megabytes.
            rows[at] = (name, bytes(rng.choice((10**4, 10**6))), zipfile.ZIP_DEFLATED)
        if not rows:
            break
    return packed(rows)


def _lying(rng: Random, data: bytes) -> bytes:
    """Fields of the directory or of the record at the end with other numbers."""
    changed = bytearray(data)
    end = data.rfind(b"PK\5\6")
    entries = [i for i in range(len(data) - 4) if data[i : i + 4] == b"PK\1\2"]
    for _ in range(rng.choice((1, 1, 2, 5))):
        number = rng.choice((0, 1, 0xFFFF, 0xFFFFFFFF, 0x7FFFFFFF, len(data), rng.randrange(2**32)))
        if rng.random() < 0.3:
            offset, size = rng.choice(((8, 2), (10, 2), (12, 4), (16, 4), (20, 2)))
            at = end + offset
        else:
            offset, size = rng.choice(
                ((8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (42, 4), (46, 4))
            )
            at = rng.choice(entries) + offset
        changed[at : at + size] = struct.pack("<L", number)[:size]
    if rng.random() < 0.2:
        # The larger form of the record at the end, which may claim anything.
        wide = struct.pack(
            "<4sQHHLLQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, *(rng.choice((1, end, 2**40, 2**63)) for _ in "1234")
        )
        changed[end:end] = wide + struct.pack("<4sLQL", b"PK\6\7", 0, rng.choice((end, 2**63)), 1)
    return bytes(changed)


def _hostile(rng: Random, among: Any) -> Any:
    """A value that has no place where it is put, or only by chance."""
    what = rng.randrange(10)
    if what == 0:
        return rng.choice(_NUMBERS)
    if what == 1:
        return rng.choice(_ODD)
    if what == 2:
        return rng.choice(_NAMES)
    if what == 3:
        return rng.choice(_EXPRESSIONS)
    if what == 4:
        return {rng.choice(_TAGS): rng.choice((0, 1, 10**6, "x", [], [0], [[0, 0]], rng.choice(_NAMES)))}
    if what == 5:
        return rng.choice((rng.choice(_DTYPES), rng.choice(_DEVICES)))
    if what == 6:
        return [rng.choice(_NUMBERS)] * rng.choice((1, 3, 100, 20_000))
    if what == 7:
        return {"x": [rng.choice(("SymInt", "SymBool", "SymFloat")), rng.choice(_EXPRESSIONS), ["s0"]]}
    # Something sound from another place of the same file gets past more checks than anything invented.
    return copy.deepcopy(rng.choice(_places(among))[2])


def _places(tree: Any, most: int = 4000) -> list[tuple[Any, Any, Any]]:
    """Containers, keys and values of a tree of JSON, each once; the first ones of a large tree."""
    places: list[tuple[Any, Any, Any]] = []
    queue = [tree]
    while queue and len(places) < most:
        at = queue.pop()
        items = at.items() if isinstance(at, dict) else enumerate(at)
        for key, value in list(items):
            places.append((at, key, value))
            if isinstance(value, dict | list) and value:
                queue.append(value)
    return places


def _mutate_tree(rng: Random, tree: Any) -> None:
    """Replace, remove, double or exchange some parts of a tree of JSON."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = _places(tree)
        if not places:
            return
        # Parts of every kind are as likely as the many parts of the commonest kind.
        at, key, value = (
            rng.choice(places) if rng.random() < 0.6 else rng.choice(_by_depth(rng, tree, places))
        )
        what = rng.randrange(8)
        if what == 0:
            del at[key]
        elif what == 1 and isinstance(at, list):
            at.insert(key, copy.deepcopy(value))
        elif what == 2 and isinstance(at, list):
            rng.shuffle(at)
        elif what == 3 and isinstance(value, str):
            at[key] = value[: rng.randrange(len(value) + 1)] + rng.choice(
                ("'", '"', "\n", ")", ".", "9", "(", "\0")
            )
        elif what == 4 and isinstance(value, int) and not isinstance(value, bool):
            at[key] = value + rng.choice((-1, 1, 2**32, -(2**32)))
        else:
            at[key] = _hostile(rng, tree)


def _by_depth(rng: Random, tree: Any, places: list[tuple[Any, Any, Any]]) -> list[tuple[Any, Any, Any]]:
    """The places in one entry of the tree."""
    if not isinstance(tree, dict) or not tree:
        return places
    chosen = tree[rng.choice(list(tree))]
    inside = _places(chosen) if isinstance(chosen, dict | list) else []
    return inside or places


def _text(tree: Any) -> bytes:
    depth = 3000
    return json.dumps(tree).replace(json.dumps(_DEEP), "[" * depth + "]" * depth).encode()


def signed(records: Records, graph: bytes) -> Records:
    """The records with another description, whose digest is right."""
    name = next(n for n in records if n.endswith(GRAPH))
    header = json.loads(records[name.replace(GRAPH, HEADER)])
    header["digest"] = hashlib.sha256(graph).hexdigest()
    return {**records, name: graph, name.replace(GRAPH, HEADER): json.dumps(header).encode()}


def _changed_record(rng: Random, data: bytes, ending: str) -> bytes:
    records = unpacked(data)
    name = next(n for n in records if n.endswith(ending))
    tree = json.loads(records[name])
    _mutate_tree(rng, tree)
    records[name] = _text(tree)
    return _stored(records)


def _graph(rng: Random, data: bytes) -> bytes:
    records = unpacked(data)
    tree = json.loads(next(body for name, body in records.items() if name.endswith(GRAPH)))
    _mutate_tree(rng, tree)
    return _stored(signed(records, _text(tree)))


def _tensors(rng: Random, data: bytes) -> bytes:
    """Other bytes for a tensor, or other facts about it, checksums being right."""
    records = unpacked(data)
    tree = json.loads(next(body for name, body in records.items() if name.endswith(GRAPH)))
    name = rng.choice([n for n in records if "/data/" in n])
    body = records[name]
    records[name] = rng.choice((b"", body[:-1], body * 2, rng.randbytes(len(body)), body + b"\0"))
    if rng.random() < 0.8:
        sums = tree.get("checksums", [])
        old, new = zlib.crc32(body), zlib.crc32(records[name])
        tree["checksums"] = [new if n == old else n for n in sums]
    if tree["tensors"] and rng.random() < 0.7:
        row = rng.choice(tree["tensors"])
        at = rng.randrange(len(row))
        row[at] = rng.choice(
            (_hostile(rng, tree), [rng.choice(_NUMBERS)] * rng.randrange(4), rng.choice(_DTYPES))
        )
    return _stored(signed(records, _text(tree)))


_LEVELS: dict[str, Callable[[Random, bytes], bytes]] = {
    "bytes": _bytes,
    "zip": _zip,
    "header": lambda rng, data: _changed_record(rng, data, HEADER),
    "graph": _graph,
    "config": lambda rng, data: _changed_record(rng, data, rng.choice(_CONFIGS)),
    "tensors": _tensors,
}
