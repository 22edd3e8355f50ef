"""One model type: built, exported, captured, fused, inlined, differentiated, compiled, each beside what it must equal."""

from __future__ import annotations

import copy
import inspect
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import dovetail
from dovetail.cli.transformers_config import model_class
from dovetail.cli.transformers_models import first_model_that_runs
from dovetail.frontend.cache_pytrees import register_caches

from .overrides import overrides

Report = Callable[[str, Any], None]


class Skipped(Exception):
    """A stage that has nothing to compare; the reason is its message."""


def warm_up() -> None:
    """Load and run once what every child needs, so that the forked ones begin with it; starts no thread."""
    torch.set_num_threads(1)
    register_caches()
    model, kwargs = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LayerNorm(4)), {"input": torch.zeros(2, 4)}
    torch.export.export(model, (), kwargs, strict=False).module()
    fused = dovetail.fuse(dovetail.capture(model, (), kwargs))
    dovetail.text(dovetail.inline(fused))
    with torch.no_grad():
        dovetail.compile(model, (), kwargs, backends=[])(**kwargs)


def examine(model_type: str, columns: tuple[str, ...], backends: list[str], report: Report) -> None:
    """Report `True` or the reason for each column, in order, and the seconds of each."""
    warnings.simplefilter("ignore")
    subject = _timed("built", report, lambda: Subject(model_type, backends))
    if subject is None:
        return
    report("config", subject.shrinker)
    report("class", type(subject.model).__name__)
    if "exports" in columns and not _timed("exports", report, subject.export):
        return
    report("inputs", sorted(subject.kwargs))
    for column in columns:
        if column not in ("built", "exports"):
            _timed(column, report, getattr(subject, column))
            if column == "captured" and subject.graph is None:
                return


def _timed(column: str, report: Report, stage: Callable[[], Any]) -> Any:
    """What the stage returns, or None if it failed; the column gets True or the reason."""
    began = time.perf_counter()
    report("stage", column)
    result: Any = None
    try:
        result = stage()
        verdict: Any = True
    except Skipped as skipped:
        verdict = f"skipped: {skipped}"
    except Exception as error:
        traceback.print_exc()
        verdict = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
    report(column, verdict)
    report(f"{column}_s", round(time.perf_counter() - began, 2))
    report("cpu_s", round(time.process_time(), 1))
    return result


class Subject:
    """A small model of a type with inputs that it runs on, and what is derived from it stage by stage."""

    def __init__(self, model_type: str, backends: list[str]) -> None:
        self.backends = backends
        if model_class(model_type) is None:
            raise Skipped("no model class")
        self.graph: Any = None
        self.fused_graph: Any = None
        self.drift = self.rounding = ""
        self.refused_gradients: Exception | None = None
        try:
            small = first_model_that_runs(model_type, overrides(model_type))
        except ValueError as error:
            raise RuntimeError(str(error)) from None
        self.model, self.unrun_model = small.model, small.uncalled
        self.kwargs, self.shrinker = small.kwargs, small.shrinker

    def fresh(self) -> tuple[nn.Module, dict[str, Any]]:
        return copy.deepcopy(self.model), pytree.tree_map(_clone, self.kwargs)

    def export(self) -> bool:
        """Export with the given inputs; where torch cannot, without a cache, with a mask, and then with text alone."""
        given, parameters = self.kwargs, inspect.signature(self.model.forward).parameters
        tries = [given, *([{**given, "use_cache": False}] if "use_cache" in parameters else [])]
        if "attention_mask" in parameters and "attention_mask" not in given and "input_ids" in given:
            tries.append({**tries[-1], "attention_mask": torch.ones_like(given["input_ids"])})
        if "input_ids" in given and len(given) > 1:
            tries.append({"input_ids": given["input_ids"][:, :2].contiguous()})
        for i, self.kwargs in enumerate(tries):
            try:
                self.program = self._exported()
                break
            except Exception as error:
                if i == 0:
                    first = error
        else:
            raise first
        self.eager = _outputs(*self.fresh())
        return True

    def _exported(self) -> torch.export.ExportedProgram:
        model, kwargs = self.fresh()
        return torch.export.export(model, (), kwargs, strict=False)

    def unrun(self) -> None:
        """Capture the model before it was ever called: what it sets in its first call is a side effect then."""
        self._captured(lambda: copy.deepcopy(self.unrun_model))

    def captured(self) -> None:
        self.graph, self.refused_gradients = self._captured(lambda: copy.deepcopy(self.model))

    def _captured(self, model: Callable[[], nn.Module]) -> tuple[Any, Exception | None]:
        """The graph, and why it is for inference only, if it is."""
        try:
            return dovetail.capture(model(), (), self.fresh()[1]), None
        except dovetail.DovetailError as refusal:
            with torch.no_grad():
                return dovetail.capture(model(), (), self.fresh()[1]), refusal

    def equal(self) -> None:
        theirs = _outputs(self.program.module(), self.fresh()[1])
        self.drift, self.rounding = _difference(theirs, self.eager, 1e-5), _difference(theirs, self.eager)
        _same(_outputs(copy.deepcopy(self.graph), self.fresh()[1]), theirs, "the exported program")

    def faithful(self) -> None:
        """Compare the exported program with eager mode; where it differs, the check of captures must notice."""
        if not self.drift:
            if self.rounding:
                raise Skipped(f"{self.rounding} in the exported program, by rounding")
            return
        model, kwargs = self.fresh()
        try:
            dovetail.capture(model, (), kwargs, check_capture=True)
        except dovetail.CaptureError as noticed:
            raise Skipped(f"{self.drift} in the exported program; noticed: {noticed}") from None
        raise AssertionError(f"{self.drift} in the exported program, and check_capture does not notice")

    def fused(self) -> None:
        self.fused_graph = dovetail.fuse(self.graph)
        before = _outputs(copy.deepcopy(self.graph), self.fresh()[1])
        _same(_outputs(copy.deepcopy(self.fused_graph), self.fresh()[1]), before, "the captured graph")

    def inverse(self) -> None:
        if self.fused_graph is None:
            raise Skipped("not fused")
        restored = dovetail.inline(self.fused_graph)
        if dovetail.text(restored) != dovetail.text(self.graph):
            raise AssertionError("the inlined graph has another text than the captured one")

    def gradients(self) -> None:
        if self.refused_gradients is not None:
            raise self.refused_gradients
        self._must_be_faithful()
        model, kwargs = self.fresh()
        try:
            theirs = _gradients(model, kwargs)
        except RuntimeError as error:
            raise Skipped(f"eager mode has no gradients: {error}") from error
        mine = _gradients(copy.deepcopy(self.fused_graph or self.graph), self.fresh()[1])
        if not theirs:
            raise Skipped("no parameter has a gradient in eager mode")
        if theirs.keys() != mine.keys():
            raise AssertionError(f"gradients of {sorted(theirs.keys() ^ mine.keys())[:4]} on one side only")
        largest = max(float(g.abs().max()) for g in theirs.values() if g.numel())
        for name, expected in theirs.items():
            if not expected.numel():
                continue
            # What ought to be zero is the rounding of larger ones.
            scale = max(float(expected.abs().max()), 1e-2 * largest)
            error = float((mine[name] - expected).abs().nan_to_num().max())
            if error > 1e-4 * scale + 1e-7:
                raise AssertionError(f"gradient of '{name}' differs by {error:.2e} of {scale:.2e}")

    def _must_be_faithful(self) -> None:
        if self.drift:
            raise Skipped("the exported program differs from eager mode")

    def compiled(self) -> None:
        self._must_be_faithful()
        model, kwargs = self.fresh()
        tolerance = 1e-3 if self.backends else 1e-5 if self.rounding else 0.0
        with torch.no_grad():
            fast = dovetail.compile(model, (), kwargs, backends=self.backends, on_error="raise")
            _same(_outputs(fast, self.fresh()[1]), self.eager, "eager", tolerance=tolerance)


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _outputs(model: Any, kwargs: dict[str, Any]) -> list[Any]:
    torch.manual_seed(0)
    with torch.no_grad():
        return pytree.tree_leaves(model(**kwargs))


def _gradients(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    floats = [v for v in pytree.tree_leaves(model(**kwargs)) if isinstance(v, Tensor) and v.requires_grad]
    if not floats:
        return {}
    torch.manual_seed(1)
    sum((v.float() * torch.randn(v.shape)).sum() for v in floats if not v.is_complex()).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _same(mine: list[Any], theirs: list[Any], what: str, tolerance: float = 0.0) -> None:
    difference = _difference(mine, theirs, tolerance)
    if difference:
        raise AssertionError(f"{difference}; compared with {what}")


def _difference(mine: list[Any], theirs: list[Any], tolerance: float = 0.0) -> str:
    if len(mine) != len(theirs):
        return f"{len(mine)} results instead of {len(theirs)}"
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if isinstance(a, Tensor) != isinstance(b, Tensor):
            return f"result {i} is {type(a).__name__} instead of {type(b).__name__}"
        if isinstance(a, Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"result {i} is {a.dtype} {tuple(a.shape)} instead of {b.dtype} {tuple(b.shape)}"
            if not _close(a.detach(), b.detach(), tolerance):
                gap = (a.double() - b.double()).abs().nan_to_num().max() if not a.is_complex() else "?"
                return f"result {i} differs by {float(gap):.2e}" if a.numel() else ""
    return ""


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if tolerance and a.is_floating_point():
        return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    missing = a.isnan()
    return torch.equal(missing, b.isnan()) and torch.equal(a[~missing], b[~missing])
