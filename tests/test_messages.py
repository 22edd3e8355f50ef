"""The page of messages has every warning of the package, every diagnostic and every error; nothing else."""

import ast
import functools
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

import dovetail
from dovetail import errors
from tests.guides import ROOT

PAGE = ROOT / "docs" / "messages.md"
# A part of the message that the case at hand fills in.
GAP = "…"


def test_every_message_of_the_package_is_on_the_page() -> None:
    page = PAGE.read_text()
    missing = [message for message in _messages() if _longest(message) not in page]
    assert not missing


def test_every_message_on_the_page_is_one_of_the_package() -> None:
    parts = [part for message in _messages() for part in message.split(GAP)]
    rows = re.findall(r"^\| (`.+?) \| ", PAGE.read_text(), re.MULTILINE)
    quoted = [message for row in rows for message in re.findall(r"`([^`]*[ …][^`]*)`", row)]
    assert len(quoted) > 30
    unknown = [
        part
        for message in quoted
        for part in message.replace("\\|", "|").split(GAP)
        if len(part) > 6 and not any(part.strip(" .:'") in known for known in parts)
    ]
    assert not unknown


def test_every_error_is_on_the_page() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text().split("## Errors")[1]))
    classes = {
        n for n, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.DovetailError)
    }
    assert classes <= named
    assert all(hasattr(dovetail, name) for name in classes)


@pytest.mark.parametrize("setting", ["dovetail", "+dovetail"])
def test_torch_logs_shows_what_is_done(setting: str) -> None:
    code = (
        "import torch, dovetail\n"
        "gm = dovetail.capture(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()), (torch.ones(1, 2),))\n"
        "dovetail.fuse(gm)\n"
    )
    environment = {**os.environ, "TORCH_LOGS": setting}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert "dovetail/fusion/fuse.py" in done.stderr
    assert "round 1:" in done.stderr


@functools.cache
def _messages() -> tuple[str, ...]:
    """Return what the package warns of or logs as a warning, with a gap for what is filled in."""
    return tuple(dict.fromkeys(_walked()))


def _walked() -> Iterator[str]:
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                values = _assigned(function)
                for call in ast.walk(function):
                    if isinstance(call, ast.Call):
                        for message in _reported(call):
                            for value in (
                                values.get(message.id, []) if isinstance(message, ast.Name) else [message]
                            ):
                                text = _template(value, values)
                                if text.strip(f" .:{GAP}"):
                                    yield text


def _reported(call: ast.Call) -> Iterator[ast.expr]:
    name = ast.unparse(call.func)
    if name == "warnings.warn" or re.fullmatch(r"_LOG\.(warning|error)|_log\.(warning|error)", name):
        yield call.args[0]
    elif (name.split(".")[-1] == "report" or name == "Diagnostic") and len(call.args) == 2:
        yield call.args[1]


def _assigned(function: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    values: dict[str, list[ast.expr]] = {}
    for each in ast.walk(function):
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            values.setdefault(each.targets[0].id, []).append(each.value)
    return values


def _template(value: ast.expr, names: dict[str, list[ast.expr]]) -> str:
    if isinstance(value, ast.Constant):
        return re.sub(r"%[sdr]", GAP, str(value.value)).split("\n")[0]
    if isinstance(value, ast.FormattedValue):
        name = value.value.id if isinstance(value.value, ast.Name) else ""
        constants = [v for v in names.get(name, []) if isinstance(v, ast.Constant)]
        return str(constants[0].value) if len(constants) == len(names.get(name, [])) == 1 else GAP
    if isinstance(value, ast.JoinedStr):
        return "".join(_template(part, names) for part in value.values)
    if isinstance(value, ast.BinOp):
        return _template(value.left, names) + _template(value.right, names)
    return GAP


def _longest(message: str) -> str:
    """Return the longest part of a message's first sentence that the case at hand does not fill in."""
    first = re.split(r"\. (?=[A-Z])", message)[0]
    return max(first.split(GAP), key=len).strip(" .:'")
