"""Which line of the user's own source an exception, an attribute or a graph node comes from."""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import re
import textwrap
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import nn
from torch.fx import Node

_OURS = str(Path(__file__).resolve().parents[1]) + os.sep

# Models and patterns that come with the package are like a user's.
_MODELS = (os.path.join(_OURS, "zoo"), os.path.join(_OURS, "rules", "library"))

# Frames have the path torch was imported by, which may lead through a link.
_TORCH = (str(Path(torch.__file__).resolve().parent), str(Path(torch.__file__).parent))
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


@dataclass(frozen=True)
class SourceLine:
    """A line of source code and its location."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{self.place}\n    {self.code}" if self.code else self.place

    @property
    def inline(self) -> str:
        """The same within a sentence."""
        return f"{self.place}: `{self.code}`" if self.code else self.place

    @property
    def place(self) -> str:
        return f"{self.file}:{self.number} in {self.function}"

    @property
    def code(self) -> str:
        return linecache.getline(self.file, self.number).strip()


def located(what: str, line: SourceLine | None, advice: str) -> str:
    """Return an error message: what is wrong, the user's line if it is known, and what to do."""
    where = f"\n  at {line}" if line is not None else ""
    return f"{what}{where}\n  {advice}"


def is_user_file(file: str) -> bool:
    """Whether code in `file` is the user's: not torch, not dovetail, not generated."""
    if file.startswith("<"):
        return False
    inside_library = file.startswith(_TORCH) or (file.startswith(_OURS) and not file.startswith(_MODELS))
    return not inside_library and not file.endswith(("/contextlib.py", "/functools.py"))


def of_exception(error: BaseException) -> SourceLine | None:
    """The deepest line of user code that the exception, or what caused it, passed through.

    An exception that the caller was handling at the time is only the context of this one, not its cause.
    """
    seen: set[int] = set()
    at: BaseException | None = error
    deepest: SourceLine | None = None
    while at is not None and id(at) not in seen and not _is_being_handled(at):
        seen.add(id(at))
        deepest = _deepest(at.__traceback__) or deepest
        at = at.__cause__ or at.__context__
    # A bytecode tracer never runs the user's frame; only its message has it.
    return deepest or of_stack_trace(str(error))


def _is_being_handled(error: BaseException) -> bool:
    """Whether a frame of the user's that is still running has caught the exception."""
    caught = error.__traceback__.tb_frame if error.__traceback__ is not None else None
    frame = inspect.currentframe()
    while frame is not None and frame is not caught:
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename)


def of_node(node: Node) -> SourceLine | None:
    """The deepest line of user code in the stack trace that the tracer left on a node."""
    return of_stack_trace(node.meta.get("stack_trace") or node.stack_trace or "")


def lines_of(trace: str) -> list[SourceLine]:
    """Return the lines of user code in the text of a stack trace, outermost first."""
    frames = _FRAME.finditer(trace)
    return [SourceLine(f["file"], int(f["line"]), f["function"]) for f in frames if is_user_file(f["file"])]


def of_stack_trace(text: str) -> SourceLine | None:
    """The deepest line of user code in the text of a stack trace."""
    for frame in reversed(list(_FRAME.finditer(text))):
        if is_user_file(frame["file"]):
            return SourceLine(frame["file"], int(frame["line"]), frame["function"])
    return None


def of_attribute(module: nn.Module, name: str) -> SourceLine | None:
    """The first line of the module's class that changes attribute `name` outside `__init__`, or its forward."""
    for cls in type(module).__mro__:
        if cls is nn.Module:
            break
        try:
            lines, start = inspect.getsourcelines(cls)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, TypeError, SyntaxError):
            continue
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef) or function.name == "__init__":
                continue
            for inner in ast.walk(function):
                if _touches(inner, name):
                    file = inspect.getsourcefile(cls) or "?"
                    return SourceLine(file, start + getattr(inner, "lineno", 1) - 1, function.name)
    code = getattr(type(module).forward, "__code__", None)
    return None if code is None else SourceLine(code.co_filename, code.co_firstlineno, "forward")


def _touches(statement: ast.AST, name: str) -> bool:
    if isinstance(statement, ast.Attribute) and statement.attr == name:
        return isinstance(statement.ctx, (ast.Store, ast.Del))
    if isinstance(statement, ast.Subscript) and isinstance(statement.ctx, (ast.Store, ast.Del)):
        return isinstance(statement.value, ast.Attribute) and statement.value.attr == name
    if not isinstance(statement, ast.Call):
        return False
    function = statement.func
    if isinstance(function, ast.Attribute):  # self.name.append(...)
        return isinstance(function.value, ast.Attribute) and function.value.attr == name
    return (
        isinstance(function, ast.Name)
        and function.id == "setattr"
        and any(isinstance(arg, ast.Constant) and arg.value == name for arg in statement.args)
    )


def of_caller() -> SourceLine | None:
    """The innermost line of user code on the current stack."""
    for frame in reversed(traceback.extract_stack()):
        if is_user_file(frame.filename):
            return SourceLine(frame.filename, frame.lineno or 0, frame.name)
    return None


def _deepest(trace: TracebackType | None) -> SourceLine | None:
    deepest: SourceLine | None = None
    for frame in traceback.extract_tb(trace):
        if is_user_file(frame.filename):
            deepest = SourceLine(frame.filename, frame.lineno or 0, frame.name)
    return deepest
