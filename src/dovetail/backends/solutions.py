"""Kernels from solutions of FlashInfer-Trace: source files in JSON, each for the definition of one body.

A solution is chosen by the name of its definition, which has the key of the body in it, and is verified against the body
before it is used. It gets contiguous operands in the order of the definition; by default it writes its results to tensors
that are passed after them (destination-passing style).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dovetail.errors import InvalidArgument, InvalidFile, checked_call
from dovetail.formats.flashinfer_trace import definition_name, why_not_defined
from dovetail.ir.effects import summarize_body
from dovetail.lowering.backend_protocol import Answer, Backend, Compiled, Unfit, kernel_call
from dovetail.lowering.compile_unit import unit_of
from dovetail.numerics.compare import expected_outcome
from dovetail.outlining.region import Region
from dovetail.rules.rule import Decline

_LANGUAGES = {"python": (), "triton": ("triton",)}
"""The languages that are taken, each with the packages that it needs."""


@dataclass(frozen=True)
class Solution:
    """A kernel for a definition: `sources` are files by path, `entry_point` is "file.py::function".

    With `passes_destinations` the function writes its results to its last arguments; otherwise it returns them.
    """

    name: str
    definition: str
    language: str
    entry_point: str
    passes_destinations: bool
    dependencies: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Solution:
        """Read a solution, without running it; raise InvalidFile if it is not one."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise InvalidFile(path, f"cannot be read: {error.strerror or error}.") from error
        except (ValueError, RecursionError) as error:
            raise InvalidFile(path, f"is not a solution: it is not JSON ({error}).") from error
        try:
            return cls._from_json(data)
        except ValueError as error:
            raise InvalidFile(path, f"is not a solution: {error}.") from error

    @classmethod
    def _from_json(cls, data: Any) -> Solution:
        document = _object(data, "the document")
        spec = _object(document.get("spec"), "'spec'")
        sources: dict[str, str] = {}
        for each in _list(document, "sources"):
            source = _object(each, "a source")
            path = _text(source, "path")
            parts = PurePosixPath(path).parts
            if path.startswith("/") or ".." in parts or "\\" in path or ":" in path or path in sources:
                raise ValueError(
                    f"the source path '{path}' is not relative, leads out of the folder, or is there twice"
                )
            sources[path] = _text(source, "content")
        entry_point = _text(spec, "entry_point")
        entry_file, _, function = entry_point.partition("::")
        if entry_file not in sources or not function.isidentifier():
            raise ValueError(f"the entry point '{entry_point}' is not '<path of a source>::<function>'")
        passes_destinations = spec.get("destination_passing_style", True)
        if not isinstance(passes_destinations, bool):
            raise ValueError("'destination_passing_style' is neither true nor false")
        dependencies = spec.get("dependencies") or []
        if not isinstance(dependencies, list) or not all(
            isinstance(d, str) for d in cast("list[Any]", dependencies)
        ):
            raise ValueError("'dependencies' is not a list of names")
        return cls(
            _text(document, "name"),
            _text(document, "definition"),
            _text(spec, "language"),
            entry_point,
            passes_destinations,
            tuple(cast("list[str]", dependencies)),
            tuple(sources.items()),
        )

    @property
    def digest(self) -> str:
        """A hash of all fields as 16 hexadecimal digits."""
        return hashlib.blake2b(repr(tuple(vars(self).items())).encode(), digest_size=8).hexdigest()

    def why_unusable(self) -> str | None:
        """Return what of it cannot be used in this process; None if all can."""
        if self.language not in _LANGUAGES:
            return f"it is written in {self.language}; solutions in {' and '.join(_LANGUAGES)} are taken"
        for dependency in (*_LANGUAGES[self.language], *self.dependencies):
            if not _is_installed(dependency):
                return f"it needs {dependency}, which is not installed"
        return None


@checked_call()
def solution_backend(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, bound: float | None = None
) -> Backend:
    """Return a backend that runs regions by solutions of FlashInfer-Trace, each verified before it is used.

    `paths` are files of solutions, folders of them, or datasets, which have a folder "solutions". A solution is for the region whose definition, as
    `to_flashinfer_trace` names it, it has. Solutions are code that is run: use those only that you trust. `bound` is how
    far their results may be off relative to their size; without it they must be as exact as the body.
    """
    if bound is not None and not _is_positive(bound):
        raise InvalidArgument(f"bound is a finite positive number or None, not {bound!r}.")
    solutions = [Solution.load(path) for path in _files(paths)]
    if not solutions:
        raise InvalidArgument("there is no solution (.json) at the given paths.")
    return SolutionBackend(solutions, bound)


class SolutionBackend(Backend):
    """Runs regions by solutions; of those for one definition the first that can be used here."""

    name = "solutions"
    smallest = 1
    must_verify = True

    def __init__(self, solutions: Sequence[Solution], bound: float | None = None) -> None:
        self.solutions, self.bound = tuple(solutions), bound

    @property
    def options(self) -> Mapping[str, Any]:
        return {"solutions": [solution.digest for solution in self.solutions], "bound": self.bound}

    def supports(self, region: Region) -> Answer:
        reason = why_not_defined(unit_of(region))
        solution = self._solution(region) if reason is None else reason
        return Decline(solution) if isinstance(solution, str) else True

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        solution = self._solution(region)
        if isinstance(solution, str):
            raise Unfit(solution)
        with _ExitsRefused(solution):
            function = _load(solution)
        kernel = _writing(function, region) if solution.passes_destinations else function

        def call(*operands: Any) -> Any:
            with _ExitsRefused(solution):
                return kernel(*(a.contiguous() if isinstance(a, Tensor) else a for a in operands))

        # Names and attributes are those of the pattern, while a definition has the operands of the body.
        return kernel_call(call, replace(region, arguments={}, attrs={}, results=()), examples)

    def _solution(self, region: Region) -> Solution | str:
        """Return the solution for a region, or why there is none."""
        name = definition_name(region)
        reasons: list[str] = []
        for solution in self.solutions:
            if solution.definition == name:
                reason = solution.why_unusable()
                if reason is None:
                    return solution
                reasons.append(f"solution '{solution.name}' is not used: {reason}")
        return "; ".join(reasons) or f"there is no solution for the definition '{name}'"


class _ExitsRefused:
    """Makes an attempt of a solution to end the process an error of the solution."""

    def __init__(self, solution: Solution) -> None:
        self._solution = solution

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, SystemExit):
            raise Unfit(f"solution '{self._solution.name}' ends the process (SystemExit: {error})") from error


def _writing(function: Callable[..., Any], region: Region) -> Callable[..., Any]:
    """Return what allocates the results of a region's body, and has a function write them after its operands."""
    body, effects = region.body, summarize_body(region.body)

    @functools.lru_cache(maxsize=64)
    def specs(signature: tuple[Any, ...]) -> list[tuple[Any, torch.dtype, torch.device]]:
        with FakeTensorMode():
            fakes = [
                torch.empty(s[0], dtype=s[1], device=s[2]) if isinstance(s, tuple) else s for s in signature
            ]
        outputs = expected_outcome(body, effects, fakes, grad=False).outputs
        if not all(isinstance(value, Tensor) for value in outputs):
            raise Unfit("a result is not a tensor, so that it cannot be written to its destination")
        return [(tuple(value.shape), value.dtype, value.device) for value in outputs]

    def call(*operands: Any) -> tuple[Tensor, ...]:
        signature = tuple(
            (tuple(a.shape), a.dtype, a.device) if isinstance(a, Tensor) else a for a in operands
        )
        destinations = tuple(torch.empty(shape, dtype=d, device=at) for shape, d, at in specs(signature))
        function(*operands, *destinations)
        return destinations

    return call


# By digest. The folder of a module lasts as long as the process: compilers read its source when they are first called.
_FUNCTIONS: dict[str, Callable[..., Any]] = {}
_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def _load(solution: Solution) -> Callable[..., Any]:
    """Import the sources of a solution as a package of their own, and return its function."""
    if solution.digest in _FUNCTIONS:
        return _FUNCTIONS[solution.digest]
    _FOLDERS.append(tempfile.TemporaryDirectory(prefix="dovetail-solution-", ignore_cleanup_errors=True))
    root = Path(_FOLDERS[-1].name)
    for path, content in solution.sources:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    file, _, function = solution.entry_point.partition("::")
    stem = PurePosixPath(file).with_suffix("").parts
    if PurePosixPath(file).suffix != ".py" or any("." in part for part in stem):
        raise Unfit(f"the entry point '{solution.entry_point}' is not in a Python file that can be imported")
    package = ModuleType(f"dovetail_solution_{solution.digest}")
    package.__path__ = [str(root)]
    sys.modules[package.__name__] = package
    module = import_module(".".join((package.__name__, *stem)))
    loaded = getattr(module, function, None)
    if not callable(loaded):
        raise Unfit(f"solution '{solution.name}' has no function '{function}' in '{file}'")
    _FUNCTIONS[solution.digest] = loaded
    return loaded


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _files(paths: Any) -> list[Path]:
    single = isinstance(paths, (str, os.PathLike))
    given: list[Any] = [paths] if single else list(paths) if isinstance(paths, Iterable) else [None]
    if not all(isinstance(path, (str, os.PathLike)) for path in given):
        raise InvalidArgument(f"paths {paths!r} are not the names of files or folders.")
    files: list[Path] = []
    for root in map(Path, given):
        folder = root / "solutions" if (root / "solutions").is_dir() else root
        files += sorted(folder.rglob("*.json")) if folder.is_dir() else [root]
    return files


def _is_installed(dependency: str) -> bool:
    """Return whether a distribution or module is installed that a requirement such as "triton >= 3" names."""
    match = re.match(r"[\w.-]+", dependency)
    name = match.group() if match else dependency
    try:
        version(name)
    except (PackageNotFoundError, ValueError):
        try:
            return importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):
            return False
    return True


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")
    return cast("dict[str, Any]", value)


def _list(document: Mapping[str, Any], name: str) -> list[Any]:
    value = document.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"'{name}' is not a list with an element")
    return cast("list[Any]", value)


def _text(document: Mapping[str, Any], name: str) -> str:
    value = document.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"'{name}' is not text")
    return value
