"""Edits of models that change their graphs are noticed: facts differ, or cannot be described; without edits they are equal.

The models are in `edits/`: `=== name | first | second`, then a module where `$V` is either of both, and where the line
`FORWARD expression` stands for a model that returns this expression.
"""

import importlib.util
import linecache
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.frontend.capture import capture
from dovetail.frontend.code_recorder import recording
from dovetail.frontend.trace_dependencies import TraceRecord, describe, differences
from dovetail.frontend.value_state import Undescribable

HEAD = """
import argparse, builtins, collections, configparser, contextlib, contextvars, ctypes, dataclasses, decimal, enum
import functools, importlib, inspect, itertools, math, operator, os, random, sys, threading, time, types, warnings
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
"""
MODEL = r"""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)
    def forward(self, x):
        return \1
"""


def edits(name: str) -> dict[str, tuple[str, str]]:
    """Return both versions of the modules in a file, by name."""
    text = (Path(__file__).parent / "edits" / f"{name}.txt").read_text()
    modules: dict[str, tuple[str, str]] = {}
    for part in re.split(r"^=== ", text, flags=re.MULTILINE)[1:]:
        title, _, source = part.partition("\n")
        case, *values = title.split(" | ")
        source = HEAD + re.sub(r"^FORWARD (.*)$", MODEL, source, flags=re.MULTILINE)
        first, second = (source.replace("$V", value) for value in values)
        modules[case] = first, second
    return modules


STATE, CODE, REFUSED = edits("state"), edits("code"), edits("refused")


class Loader:
    """Loads versions of a module under one name, as other processes would, and describes their models."""

    def __init__(self, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name, self._path, self._patch = (
            f"edited_{re.sub('[^a-z]', '_', name)}",
            folder / "edited.py",
            monkeypatch,
        )
        self._module: Any = None

    def _model(self, source: str, value: float) -> tuple[Any, Any]:
        self._path.write_text(source)
        self._path.with_name("value.txt").write_text(str(value))
        linecache.clearcache()
        settings: Any = types.ModuleType("edited_settings")
        settings.SCALE, settings.__file__ = value, f"/nowhere/{value}/edited_settings.py"
        spec = importlib.util.spec_from_file_location(self.name, self._path)
        assert spec is not None
        self._module = importlib.util.module_from_spec(spec)
        self._patch.setitem(sys.modules, "edited_settings", settings)
        self._patch.setitem(sys.modules, self.name, self._module)
        self._patch.setitem(os.environ, "EDITED", str(value))
        # Code of pytest that any import runs is reached by no name.
        finders = [f for f in sys.meta_path if not getattr(f, "__module__", "").startswith("_pytest")]
        self._patch.setattr(sys, "meta_path", finders)
        exec(compile(source, str(self._path), "exec"), self._module.__dict__)
        getattr(self._module, "setup", lambda: None)()
        torch.manual_seed(0)
        model = getattr(self._module, "build", None) or self._module.Model
        inputs = getattr(self._module, "X", torch.randn(4, 4))
        return model().eval(), (inputs,)

    def _end(self) -> None:
        getattr(self._module, "teardown", lambda: None)()

    def record(self, source: str) -> TraceRecord:
        """Trace a model, and return what the trace depends on."""
        try:
            with torch.no_grad(), recording() as recorder:
                model, args = self._model(source, 2.0)
                capture(model, args, {})
            if recorder.obstacle:
                raise Undescribable(recorder.obstacle)
            return describe(model, (args, {}), recorder.codes)
        finally:
            self._end()

    def differences(self, record: TraceRecord, source: str, value: float) -> list[str]:
        """Return which facts differ for a model that was not traced."""
        try:
            model, args = self._model(source, value)
            return differences(record.facts, record.current(model, (args, {})))
        except Undescribable as error:
            return [str(error)]
        finally:
            self._end()


def check(name: str, versions: tuple[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = versions
    loader = Loader(name, folder, monkeypatch)
    record = loader.record(first)
    assert loader.differences(record, first, 2.0) == []
    assert loader.differences(record, second, 3.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STATE)
def test_edits_of_values(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(name, STATE[name], tmp_path, monkeypatch)


@pytest.fixture(autouse=True)
def modules_are_restored() -> Iterator[None]:
    """Remove modules that the sources have added: some answer every attribute, which other tests do not expect."""
    before = set(sys.modules)
    yield
    for name in [n for n in sys.modules if n.startswith("edited") and n not in before]:
        del sys.modules[name]


@pytest.mark.parametrize("name", CODE)
def test_edits_that_other_code_reads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in ("cond closure attr", "flex like hof") and "tvm" in sys.modules:
        # Dynamo calls inspect.getfile, which TVM replaces: such traces are not kept, as is right.
        pytest.skip("TVM has replaced inspect.getfile in this process")
    check(name, CODE[name], tmp_path, monkeypatch)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_described(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Undescribable):
        Loader(name, tmp_path, monkeypatch).record(REFUSED[name][0])


def test_sets_that_are_iterated_in_another_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two strings whose order depends on which was added first, as on the hash seed.
    first = "a"
    second = next(b for b in map("b{}".format, range(1000)) if set_order(first, b) != set_order(b, first))
    names = [first, second]
    source = f"{HEAD}S = set()\nfor s in $V: S.add(s)\n"
    source += MODEL.replace(r"\1", f"x * (2 if list(S)[0] == {first!r} else 3)")
    versions = source.replace("$V", repr(names)), source.replace("$V", repr(names[::-1]))
    check("sets", versions, tmp_path, monkeypatch)


def set_order(*members: str) -> list[str]:
    result: set[str] = set()
    for member in members:
        result.add(member)
    return list(result)
