"""Schedules of generated models: what their steps look for and put in its place, and how they are done."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

import dovetail
from dovetail.scheduling.schedule import Schedule

from .program import Do

_aten = torch.ops.aten
ACTIVATIONS = (_aten.relu.default, _aten.tanh.default, _aten.gelu.default, _aten.neg.default)


# What a schedule looks for. All of it can be imported, so that histories can be saved, but where it says otherwise.


@dovetail.rule(kind="relu_sum")
def relu_sum(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x) + y


@dovetail.rule(kind="scaled", escapes="output")
def scaled(x: Tensor, factor: float = dovetail.Const()) -> Tensor:
    return torch.tanh(x) * factor


def product_sum(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def two_results(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(x), torch.relu(x) + y


def is_activation(node: Node) -> bool:
    return node.target in ACTIVATIONS


def is_anything(node: Node) -> bool:
    return True


FINDS: dict[str, Any] = {
    "relu": _aten.relu.default,
    "tanh": _aten.tanh.default,
    "gelu": _aten.gelu.default,
    "neg": _aten.neg.default,
    "softmax": _aten.softmax.int,
    "add": _aten.add,
    "mul": _aten.mul.Tensor,
    "linear": _aten.linear.default,
    "relu_sum": relu_sum,
    "scaled": scaled,
    "product_sum": product_sum,
    "two_results": two_results,
    "activation": is_activation,
    "anything": is_anything,
    "Linear": nn.Linear,
    "ReLU": nn.ReLU,
    "BatchNorm": nn.BatchNorm1d,
    "Sequential": nn.Sequential,
    "modules": r"m\d",
    "first": r"^p0$",
    "every": r".",
    "default": dovetail.rules.DEFAULT,
    "groups": dovetail.rules.groups(),
}
UNSAVED = ("groups", "lambda", "default")


CHECKS = ("verify", "replay", "copy", "mode", "batch")
"""Steps that leave a schedule as it is."""


# What takes the place of something, and computes the same.


def summed(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x).add(y)


class Summed(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(x) + y


def tanh_times(x: Tensor, factor: float) -> Tensor:
    return torch.tanh(x) * factor


def two(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    once = torch.relu(x)
    return once, once + y


def rectified(*values: Tensor) -> tuple[Tensor, ...]:
    """Siblings at once."""
    return tuple(torch.relu(v) for v in values)


def twin_of(thing: Any) -> Any:
    """A module equal to another, with the same state, or a function for a match of an activation."""
    if isinstance(thing, nn.Module):
        return copy.copy(thing)
    return _OPERATORS.get(str(thing.nodes[0].target).removeprefix("aten."), torch.relu)


_OPERATORS = {
    "relu.default": torch.relu,
    "tanh.default": torch.tanh,
    "gelu.default": F.gelu,
    "neg.default": torch.neg,
}
EQUALS: dict[str, tuple[Callable[[], Any], ...]] = {
    "relu": (lambda: torch.relu, lambda: F.relu, nn.ReLU),
    "tanh": (lambda: torch.tanh, nn.Tanh),
    "gelu": (lambda: F.gelu, nn.GELU),
    "neg": (lambda: torch.neg,),
    "relu_sum": (lambda: summed, Summed),
    "scaled": (lambda: tanh_times,),
    "product_sum": (lambda: F.linear,),
    "two_results": (lambda: two,),
    "siblings": (lambda: rectified,),
}


def relus_fused(s: Schedule, at: str) -> None:
    """A step of two steps."""
    regions = s[at].fuse(s[at].find(_aten.relu.default), kind="npu.relu")
    s.annotate(regions, tile=4)


class Mark(NamedTuple):
    """What a step means for the model: other roundings, whether it can be saved, whether it may bring state."""

    inexact: bool
    saved: bool
    adds: bool


class Play:
    """A schedule of a model, and what its steps so far mean for what must hold."""

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], known: dict[str, Any]
    ) -> None:
        self.model, self.known = model, known
        self.schedule = dovetail.schedule(model, args, kwargs)
        self.is_built = False
        self.kept: list[Any] = []  # what was found before, which may be out of date
        self.kept_find = ""
        self.marks: list[
            tuple[bool, bool]
        ] = []  # for each step: whether numbers may change, and whether it is saved

    @property
    def is_exact(self) -> bool:
        return not any(mark.inexact for mark in self.marks)

    @property
    def can_be_saved(self) -> bool:
        return all(mark.saved for mark in self.marks)

    @property
    def adds_state(self) -> bool:
        return any(mark.adds for mark in self.marks)

    def carry_out(self, do: Do) -> None:
        getattr(self, f"_{do.what}")(do, dict(do.options))

    def _mark(self, *, inexact: bool = False, saved: bool = True, adds: bool = False) -> None:
        self.marks.append(Mark(inexact, saved, adds))

    def _part(self, do: Do) -> Any:
        return self.schedule[do.at] if do.at else self.schedule

    def _matches(self, do: Do) -> Any:
        """Matches, those that were picked; a single one where one is asked for."""
        if do.find == "stale":
            matches: Any = list(self.kept)
        elif do.find == "lambda":
            matches = self._part(do).find(where=lambda n: n.target in ACTIVATIONS)
        else:
            matches = self._part(do).find(self.known.get(do.find, FINDS.get(do.find)))
        if matches and do.find != "stale":
            self.kept, self.kept_find = list(matches), do.find
        return _picked(do, matches)

    def _is_saved(self, do: Do) -> bool:
        return (self.kept_find if do.find == "stale" else do.find) not in UNSAVED

    def _targets(self, do: Do) -> Any:
        """Regions, matches, or a path, as a step takes them."""
        if do.find == "regions":
            return _picked(do, self._part(do).regions)
        return self._matches(do) if do.find else do.at

    def _fuse(self, do: Do, options: dict[str, Any]) -> None:
        options.pop("single", None)
        matches = self._matches(do)
        regions = self._part(do).fuse(matches, **options)
        assert isinstance(regions, list) == (isinstance(matches, list) and not options.get("together"))
        self._mark(inexact=options.get("backends") == "torchscript", saved=self._is_saved(do))

    def _lower(self, do: Do, options: dict[str, Any]) -> None:
        self.schedule.lower(self._targets(do), options["backends"])
        self._mark(inexact=options["backends"] == "torchscript")

    def _replace(self, do: Do, options: dict[str, Any]) -> None:
        ways = EQUALS["siblings" if options.get("siblings") else do.find]
        new = ways[options["way"] % len(ways)]()
        matches = self._matches(do)
        if isinstance(matches, list) and not options.get("siblings"):
            matches = matches[0] if matches else matches
        self.schedule.replace(new, matches, check=options["check"])
        self._mark(saved=not isinstance(new, nn.Module))

    def _replace_linear(self, do: Do, options: dict[str, Any]) -> None:
        """A layer that takes its weights over from what it stands for."""
        matches = self._matches(do)
        match = matches[0] if isinstance(matches, list) and matches else matches
        if isinstance(match, list):
            match = self._part(do).find(_aten.linear.default)[:1]
            if not match:
                raise dovetail.ScheduleError("nothing to replace")
            match = match[0]
        weights = [v for v in match.operands.values() if v is not None and v.node.op == "get_attr"]
        new = nn.Linear(3, 3, bias=len(weights) > 1)
        params = dict(zip(("weight", "bias"), weights, strict=False))
        self.schedule.replace(new, match, params=params, check=options["check"])
        self._mark(saved=False)

    def _replace_region(self, do: Do, options: dict[str, Any]) -> None:
        """What a region computes by its own body, as a module that was not there before."""
        region = _picked(do, self._part(do).regions)
        region = region[0] if isinstance(region, list) and region else region
        body = region if isinstance(region, list) else region.body
        self.schedule.replace(body, region, check=options["check"])
        self._mark(saved=False)

    def _replace_module(self, do: Do, options: dict[str, Any]) -> None:
        part = self._part(do)[0]
        old = part.modules[0]
        keeps = self._is_shared(old) or self._is_traced
        self._refuse_twice(old)
        part.replace(copy.copy(old) if keeps else copy.deepcopy(old), check=options["check"])
        self._mark(saved=False, adds=True)

    @property
    def _is_traced(self) -> bool:
        return "traced" in str(self.schedule)

    def _refuse_twice(self, module: nn.Module) -> None:
        """A copy that shares buffers, beside the module that it stands for in a graph, is nothing a user would do."""
        if self._is_traced and any(True for _ in module.buffers()):
            raise dovetail.ScheduleError("not tried")

    def _is_shared(self, module: nn.Module) -> bool:
        """Whether the model has it, or something in it, in another place too: a copy of its own would part them."""
        everywhere = Counter(id(m._buffers) for _, m in self.model.named_modules(remove_duplicate=False))
        here = Counter(id(m._buffers) for _, m in module.named_modules(remove_duplicate=False))
        return any(everywhere[key] > count for key, count in here.items())

    def _replace_all(self, do: Do, options: dict[str, Any]) -> None:
        what = self.known.get(do.find, FINDS.get(do.find))
        if isinstance(what, type):
            for module in self.model.modules():
                self._refuse_twice(module) if type(module) is what else None
        self._part(do).replace_all(what, twin_of, check=options["check"])
        self._mark(adds=True)

    def _decompose(self, do: Do, options: dict[str, Any]) -> None:
        target = self._targets(do)
        self.schedule.decompose(target)
        self._mark(inexact=do.find != "regions", saved=self._is_saved(do))

    def _annotate(self, do: Do, options: dict[str, Any]) -> None:
        self.schedule.annotate(self._targets(do), **options)
        self._mark()

    def _checkpoint(self, do: Do, options: dict[str, Any]) -> None:
        self.schedule.checkpoint(self._targets(do))
        self._mark()

    def _apply(self, do: Do, options: dict[str, Any]) -> None:
        self.schedule.apply(relus_fused, do.at)
        self._mark()

    def _build(self, do: Do, options: dict[str, Any]) -> None:
        self.schedule.build()
        self.is_built = True

    def _release(self, do: Do, options: dict[str, Any]) -> None:
        self.schedule.release()
        self.is_built = False

    def _undo(self, do: Do, options: dict[str, Any]) -> None:
        self.schedule.undo(options["steps"])
        del self.marks[len(self.marks) - options["steps"] :]


def _picked(do: Do, matches: Sequence[Any]) -> Any:
    items = list(matches)
    chosen = [items[i % len(items)] for i in dict.fromkeys(do.picks)] if items and do.picks else items
    return chosen[0] if chosen and dict(do.options).get("single") else chosen
