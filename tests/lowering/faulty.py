"""Backends that go wrong, each in one way; workers import them from here."""

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from dovetail.lowering.backend_protocol import Answer, Backend, Compiled
from dovetail.outlining.region import Region

# How often code is run before it is used.
TRIAL_CALLS = 2


class Sound(Backend):
    """Does nothing wrong: what the others are derived from, and what they fall back to."""

    name = "sound"
    trains = True

    def supports(self, region: Region) -> Answer:
        return True

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        body = region.body
        return lambda *operands: self.wrap(body, operands)

    def wrap(self, body: Callable[..., Any], operands: Sequence[Any]) -> Any:
        return body(*operands)


class RaisesInSupports(Sound):
    name = "raises_in_supports"

    def supports(self, region: Region) -> Answer:
        raise ValueError("no idea")


class AnswersNonsense(Sound):
    name = "answers_nonsense"

    def supports(self, region: Region) -> Answer:
        return "perhaps"  # type: ignore[return-value]


class RaisesInCompile(Sound):
    name = "raises_in_compile"

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        raise ValueError("cannot make it")


class ReturnsNoCallable(Sound):
    name = "returns_no_callable"

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        return 5  # type: ignore[return-value]


class ReturnsNaN(Sound):
    name = "returns_nan"

    def wrap(self, body: Callable[..., Any], operands: Sequence[Any]) -> Any:
        return tuple(r * float("nan") for r in body(*operands))


class SlightlyWrong(Sound):
    name = "slightly_wrong"

    def wrap(self, body: Callable[..., Any], operands: Sequence[Any]) -> Any:
        return tuple(r * 1.01 for r in body(*operands))


class WrongShape(Sound):
    name = "wrong_shape"

    def wrap(self, body: Callable[..., Any], operands: Sequence[Any]) -> Any:
        return tuple(r.unsqueeze(0) for r in body(*operands))


class WrongDtype(Sound):
    name = "wrong_dtype"

    def wrap(self, body: Callable[..., Any], operands: Sequence[Any]) -> Any:
        return tuple(r.double() for r in body(*operands))


class WrongCount(Sound):
    name = "wrong_count"

    def wrap(self, body: Callable[..., Any], operands: Sequence[Any]) -> Any:
        results = body(*operands)
        return (*results, results[0])


class NoTuple(Sound):
    name = "no_tuple"

    def wrap(self, body: Callable[..., Any], operands: Sequence[Any]) -> Any:
        return body(*operands)[0]


class ReturnsItsInput(Sound):
    """Writes the result over an operand and returns that."""

    name = "returns_its_input"

    def wrap(self, body: Callable[..., Any], operands: Sequence[Any]) -> Any:
        (result,) = body(*operands)
        return (_first_like(operands, result).detach().view(result.shape),)


class WritesItsInput(Sound):
    name = "writes_its_input"

    def wrap(self, body: Callable[..., Any], operands: Sequence[Any]) -> Any:
        results = body(*operands)
        _first_like(operands, results[0]).detach().add_(1)
        return results


class ReusesItsResult(Sound):
    """Has one piece of memory for its result, which every call writes over."""

    name = "reuses_its_result"

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        held: list[Tensor] = []

        def run(*operands: Any) -> Any:
            (result,) = region.body(*operands)
            if not held:
                held.append(torch.empty_like(result))
            return (held[0].copy_(result),)

        return run


class RaisesWhenCalled(Sound):
    name = "raises_when_called"

    def wrap(self, body: Callable[..., Any], operands: Sequence[Any]) -> Any:
        raise RuntimeError("out of order")


class RaisesLater(Sound):
    """Runs in the trial, which is two calls, and never again."""

    name = "raises_later"

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        calls: list[int] = []

        def run(*operands: Any) -> Any:
            calls.append(1)
            if len(calls) > TRIAL_CALLS:
                raise RuntimeError("worn out")
            return region.body(*operands)

        return run


class InWorker(Sound):
    """Compiles in a process of its own; what it makes of a body is the number of that process."""

    name = "in_worker"
    isolation = "process"

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        return lambda: os.getpid()

    def save(self, compiled: Compiled) -> bytes:
        return str(compiled()).encode()

    def load(self, data: bytes, region: Region) -> Compiled:
        self.compiled_by.append(int(data))
        return region.body

    compiled_by: ClassVar[list[int]] = []


class RaisesInWorker(InWorker):
    name = "raises_in_worker"

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        raise ValueError(f"cannot make {region.kind} of {examples[0].dtype}")


class Crashes(InWorker):
    name = "crashes"

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        ctypes.string_at(0)
        raise AssertionError("still alive")


class Exits(InWorker):
    name = "exits"

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        os._exit(3)


class Hangs(InWorker):
    """Waits for ever, and so does a process that it has started and whose number it writes to a file."""

    name = "hangs"

    def __init__(self, note: Path) -> None:
        self.note = note

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        child = os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ)
        self.note.write_text(f"{os.getpid()} {child}")
        time.sleep(600)
        raise AssertionError("woke up")


class CannotTravel(InWorker):
    name = "cannot_travel"

    def __init__(self) -> None:
        self.unpicklable = lambda: None


class LoadRaises(InWorker):
    name = "load_raises"

    def load(self, data: bytes, region: Region) -> Compiled:
        raise OSError("torn")


def _first_like(operands: Sequence[Any], result: Tensor) -> Tensor:
    tensors = (o for o in operands if isinstance(o, torch.Tensor))
    return next(o for o in tensors if o.numel() == result.numel() and o.dtype == result.dtype)
