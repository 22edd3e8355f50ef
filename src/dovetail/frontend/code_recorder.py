"""The code objects that are entered, and the instructions that are executed, while a model's forward is traced."""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import sys
import threading
import types
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, cast

from dovetail.frontend.bytecode_reads import offsets_by_line
from dovetail.frontend.release_code import is_algebra, is_release

_BY_INSTRUCTION = sys.version_info < (3, 12)


class CodeRecorder:
    """Collects the code objects that are entered on this thread, except in torch functions.

    From Python 3.12 on by `sys.monitoring`, where each code object costs one event; before, by the C part of cProfile.
    """

    def __init__(self) -> None:
        self.codes: set[types.CodeType] = set()
        self.obstacle = ""
        """Why nothing could be recorded."""
        self._thread = threading.get_ident()
        self._profiler: Any = None
        self._tool: int | None = None
        self._is_active = False

    def start(self) -> None:
        """Begin to record; a profiler that is active already is left alone."""
        if hasattr(sys, "monitoring"):
            self._start_monitoring()
        elif sys.getprofile() is not None:
            self.obstacle = "a profiler is active"
        else:
            self._profiler = importlib.import_module("_lsprof").Profiler(subcalls=False, builtins=False)
            self._profiler.enable()
        self._is_active = not self.obstacle

    def stop(self) -> None:
        """End the recording."""
        self._require_unchanged()
        if self._profiler is not None:
            self._profiler.disable()
            entries = self._profiler.getstats()
            self.codes.update(entry.code for entry in entries if isinstance(entry.code, types.CodeType))
            self._profiler = None
        if self._tool is not None:
            monitoring: Any = cast("Any", sys).monitoring
            monitoring.set_events(self._tool, 0)
            monitoring.register_callback(self._tool, monitoring.events.PY_START, None)
            monitoring.free_tool_id(self._tool)
            self._tool = None
        self._is_active = False

    @property
    def is_active(self) -> bool:
        """Whether code that is entered now is recorded."""
        return self._is_active

    @contextmanager
    def paused(self) -> Generator[None]:
        """Do not record what runs in here, which may be most of the trace."""
        self._require_unchanged()
        was_active, self._is_active = self._is_active, False
        if self._profiler is not None and was_active:
            self._profiler.disable()
        try:
            yield
        finally:
            self._is_active = was_active
            if self._profiler is not None and was_active:
                self._profiler.enable()

    def _require_unchanged(self) -> None:
        """Note as an obstacle that forward has ended the recording."""
        if not self._is_active:
            return
        if self._profiler is not None:
            is_recording = sys.getprofile() is self._profiler
        else:
            is_recording = cast("Any", sys).monitoring.get_tool(self._tool) == "dovetail"
        if not is_recording:
            self.obstacle = "forward sets a profiler"

    def _start_monitoring(self) -> None:
        monitoring: Any = cast("Any", sys).monitoring
        free = [tool for tool in range(6) if monitoring.get_tool(tool) is None]
        if not free:
            self.obstacle = "all tools of sys.monitoring are in use"
            return
        self._tool = free[-1]
        monitoring.use_tool_id(self._tool, "dovetail")
        monitoring.register_callback(self._tool, monitoring.events.PY_START, self._entered)
        # Code that an earlier recording has seen is reported again.
        monitoring.restart_events()
        monitoring.set_events(self._tool, monitoring.events.PY_START)

    def _entered(self, code: types.CodeType, _: int) -> Any:
        if not self._is_active or threading.get_ident() != self._thread:
            return None
        self.codes.add(code)
        return cast("Any", sys).monitoring.DISABLE


class InstructionRecorder:
    """Collects the offsets of the instructions that are executed on this thread, by code object.

    Of torch, the standard library and this package only which code is entered, and nothing of sympy. From Python 3.12 on,
    all instructions of a line count as executed with it. It uses `sys.settrace`, which debuggers and tools that measure
    coverage use too: `obstacle` is not empty then.
    """

    def __init__(self) -> None:
        self._executed: dict[types.CodeType, set[int]] | None = None

    @property
    def obstacle(self) -> str:
        """Why nothing can be recorded now; "" if nothing prevents it."""
        tracer = sys.gettrace()
        return "" if tracer is None or tracer == self._enter else "a debugger or the like is active"

    @property
    def is_active(self) -> bool:
        """Whether what is executed now is recorded."""
        return self._executed is not None and sys.gettrace() == self._enter

    @contextmanager
    def recording(self) -> Generator[dict[types.CodeType, set[int]]]:
        """Record what runs in here. Recordings nest: what an inner one collects, the outer one has afterwards."""
        outer, executed = self._executed, dict[types.CodeType, set[int]]()
        self._executed = executed
        if outer is None:
            sys.settrace(self._enter)
        try:
            yield executed
        finally:
            self._executed = outer
            if outer is None:
                sys.settrace(None)
            self.add(executed)

    def add(self, executed: Mapping[types.CodeType, Iterable[int]]) -> None:
        """Add executed instructions to the recording that is active, if one is."""
        if self._executed is not None:
            for code, offsets in executed.items():
                self._executed.setdefault(code, set()).update(offsets)

    @contextmanager
    def paused(self) -> Generator[None]:
        """Do not record what runs in here."""
        was_active = self.is_active
        if was_active:
            sys.settrace(None)
        try:
            yield
        finally:
            if was_active:
                sys.settrace(self._enter)

    def _enter(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if self._executed is None or is_algebra(frame.f_code.co_filename):
            return None
        self._executed.setdefault(frame.f_code, set())
        if is_release(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = _BY_INSTRUCTION
        return self._at_instruction

    def _at_instruction(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if self._executed is None:
            return None
        if event == "opcode":
            self._executed.setdefault(frame.f_code, set()).add(frame.f_lasti)
        elif event == "line" and not _BY_INSTRUCTION:
            by_line = offsets_by_line(frame.f_code)
            offsets = self._executed.setdefault(frame.f_code, set())
            offsets |= by_line.get(frame.f_lineno, frozenset()) | by_line.get(None, frozenset())
        return self._at_instruction


_RECORDERS: contextvars.ContextVar[tuple[CodeRecorder | InstructionRecorder, ...]] = contextvars.ContextVar(
    "_RECORDERS", default=()
)


@contextmanager
def recording() -> Generator[CodeRecorder]:
    """Let the trace of a model in this context record the code that it enters."""
    recorder = CodeRecorder()
    with activated(recorder):
        try:
            yield recorder
        finally:
            recorder.stop()


@contextmanager
def activated(recorder: CodeRecorder | InstructionRecorder) -> Generator[None]:
    """Let torch functions in the trace of a model in this context pause a recorder."""
    token = _RECORDERS.set((*_RECORDERS.get(), recorder))
    try:
        yield
    finally:
        _RECORDERS.reset(token)


def active_recorders() -> tuple[CodeRecorder | InstructionRecorder, ...]:
    """Return the recorders of this context."""
    return _RECORDERS.get()


@contextmanager
def paused(recorders: Iterable[CodeRecorder | InstructionRecorder]) -> Generator[None]:
    """Pause recorders while this runs."""
    with contextlib.ExitStack() as stack:
        for recorder in recorders:
            stack.enter_context(recorder.paused())
        yield
