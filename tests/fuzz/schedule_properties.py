"""What must hold of every schedule of a generated model, after every step that was done or refused."""

from __future__ import annotations

import copy
import functools
import json
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import dovetail
from dovetail.scheduling.history import History

from .observe import Seen, Snapshot, difference, loose_difference, observe
from .program import Case, Do, NotAProgram, make_inputs
from .properties import Outcome, Violated, same
from .scheduling import CHECKS, Play
from .units import given, known_classes, maker

_EXPORT_WARNS = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
# Where a part is called otherwise than when it was traced, and cannot be traced so, a warning reports it.
_FALLBACK = "a call runs the model as it is, for it cannot be captured: "
# Parts that have the same class are called in many ways.
_LIMIT = "the recompile limit of"
_NOT_STEPS = ("build", "release", "undo")


def verify_schedule(case: Case) -> Outcome:
    """Raise Violated for the first property that does not hold of a schedule."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _EXPORT_WARNS, FutureWarning)
        warnings.filterwarnings("ignore", _FALLBACK, UserWarning)
        warnings.filterwarnings("ignore", _LIMIT, UserWarning)
        trial = Trial(case)
        for stage in case.stages:
            assert isinstance(stage, Do)
            trial.step(stage)
        trial.finish()
        return trial.outcome


class Trial:
    def __init__(self, case: Case) -> None:
        self.case, self.outcome = case, Outcome()
        self.inputs = make_inputs(case.program)
        self.make = maker(case)
        self.twin, self.model = self.make(), self.make()
        self.expected = self.seen(self.twin, runs=2)
        if self.expected[-1].error:
            raise NotAProgram(self.expected[-1].error)
        self.modules = [(path, id(m)) for path, m in self.model.named_modules(remove_duplicate=False)]
        args, kwargs = given(self.case, self.inputs)
        self.play = Play(self.model, args, kwargs, known_classes(case))
        self.texts = [self.text()]

    def seen(
        self, model: nn.Module, *, runs: int = 1, inputs: list[Any] | None = None, grad: bool = True
    ) -> list[Seen]:
        def call(*values: Any) -> Any:
            args, kwargs = given(self.case, list(values))
            with torch.set_grad_enabled(grad):
                return model(*args, **kwargs)

        values = self.inputs if inputs is None else inputs
        return observe(call, Snapshot(model), values, runs=runs, gradients=grad)

    def text(self) -> str:
        return self.play.schedule.text()

    def readable(self) -> Any:
        """What can be read of a schedule."""
        s = self.play.schedule
        return [self.text(), str(s), repr(list(s.history)), [r.name for r in s.regions], self.play.is_built]

    # Steps

    def step(self, do: Do) -> None:
        self.outcome.stages += 1
        if do.what in CHECKS:
            getattr(self, f"check_{do.what}")(**dict(do.options))
            return
        before, marks = self.readable(), list(self.play.marks)
        try:
            self.play.carry_out(do)
        except dovetail.DovetailError as error:
            self.outcome.refused.append(type(error).__name__)
            self.play.marks = marks
            same(f"refused {do.what} changed something", before, self.readable())
            self.behaves(f"after a refused {do.what}")
            return
        except Exception as error:
            raise Violated(f"crash in {do.what} ({type(error).__name__})", str(error)) from error
        if do.what == "undo":
            del self.texts[len(self.play.marks) + 1 :]
            same("undo: text", self.texts[-1], self.text())
        elif do.what not in _NOT_STEPS:
            self.texts.append(self.text())
        self.outcome.regions = max(self.outcome.regions, len(self.play.schedule.regions))
        self.behaves(f"after {do.what}")

    def behaves(self, when: str) -> None:
        """The model as built is the twin, in all that can be seen."""
        with self.built() as model:
            names, now = list(self.twin.state_dict()), list(model.state_dict())
            if self.play.adds_state:  # what is put into a graph is saved under a name of its own too
                now = [name for name in now if name in names]
            same(f"{when}: state_dict", names, now)
            names = [name for name, _ in self.twin.named_parameters()]
            same(f"{when}: parameters", names, [name for name, _ in model.named_parameters()])
            self.compare(when, self.expected, self.seen(model, runs=2))

    def compare(self, when: str, expected: list[Seen], got: list[Seen], *, gradients: bool = True) -> None:
        if not self.play.is_exact and self.is_touchy:
            return
        judge = difference if self.play.is_exact else loose_difference
        which, words = judge(expected, got, gradients=gradients, aliasing=False)
        if which:
            raise Violated(f"{when}: {which}", words)

    @functools.cached_property
    def is_touchy(self) -> bool:
        """Whether rounding alone shows in the results, as where a norm divides by next to nothing."""
        for train in (None, True, False):
            with self.in_mode(train):
                expected = self.seen(self.twin)
                state = Snapshot(self.twin)
                with torch.no_grad():
                    moved = [_moved(x) for x in self.inputs]
                    for tensor in state.tensors.values():
                        tensor.copy_(_moved(tensor))
                got = self.seen(self.twin, inputs=moved)
                state.restore()
            if loose_difference(expected, got, gradients=True)[0]:
                return True
        return False

    @contextmanager
    def built(self) -> Generator[nn.Module]:
        self.tried("build", self.play.schedule.build)
        try:
            yield self.model
        finally:
            if not self.play.is_built:
                self.tried("release", self.play.schedule.release)

    @staticmethod
    def tried(what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Violated:
            raise
        except Exception as error:
            raise Violated(f"crash in {what} ({type(error).__name__})", str(error)) from error

    # What is looked at now and then

    def check_verify(self, train: bool | None) -> None:
        before = self.readable()
        if not self.play.is_exact and self.is_touchy:
            return
        try:
            with warnings.catch_warnings():
                if train is not None:  # what cannot be done in that mode runs as it was
                    warnings.filterwarnings("ignore", "a call runs the model as it is", UserWarning)
                self.play.schedule.verify(train=train)
        except dovetail.ScheduleError as error:
            # Where the model itself cannot be differentiated or run in that mode there is nothing to compare.
            if "the model itself cannot be run" not in str(error) or not self.cannot_be_run(train):
                raise Violated(f"verify ({type(error).__name__})", str(error)) from error
        except Exception as error:
            raise Violated(f"verify ({type(error).__name__})", str(error)) from error
        same("verify changed something", before, self.readable())
        self.behaves("after verify")

    def cannot_be_run(self, train: bool | None) -> bool:
        with self.in_mode(train):
            seen = self.seen(self.twin)[0]
        return bool(seen.error) or isinstance(seen.gradients, str)

    def check_replay(self) -> None:
        """A history that was saved does the same to another model of the same kind."""
        s = self.play.schedule
        try:
            text = s.history.json()
        except dovetail.ScheduleError as error:
            if self.play.can_be_saved:
                raise Violated("a history is not saved (ScheduleError)", str(error)) from error
            return
        except Exception as error:
            raise Violated(f"crash in saving ({type(error).__name__})", str(error)) from error
        json.loads(text)
        args, kwargs = given(self.case, self.inputs)
        fresh = self.make()
        again = dovetail.schedule(fresh, args, kwargs)
        try:
            again.replay(History.load(text))
        except Exception as error:
            raise Violated(f"replay ({type(error).__name__})", str(error)) from error
        same("replay: text", self.text(), again.text())
        same("replay: history", text, again.history.json())
        self.compare("replay", self.expected, self.seen(again.build(), runs=2))

    def check_copy(self) -> None:
        with self.built() as model:
            twin = self.tried("deepcopy", lambda: copy.deepcopy(model))
            self.compare("deepcopy", self.expected, self.seen(twin, runs=2))
        self.behaves("after deepcopy")

    def check_mode(self, train: bool) -> None:
        """In another mode than the one it was scheduled in; what cannot be done there runs as it was."""
        with self.in_mode(train), self.built() as model, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = self.seen(self.twin)
            if expected[0].error:
                return
            self.compare("in another mode", expected, self.seen(model))
            self.compare("without gradients", self.seen(self.twin, grad=False), self.seen(model, grad=False))
        self.behaves("after another mode")

    def check_batch(self) -> None:
        inputs = make_inputs(self.case.program, batch=1)
        with self.built() as model, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = self.seen(self.twin, inputs=inputs)
            if expected[0].error:
                return
            self.compare("another batch", expected, self.seen(model, inputs=inputs))
        self.behaves("after another batch")

    @contextmanager
    def in_mode(self, train: bool | None) -> Generator[None]:
        """Model and twin in one mode; what was swapped in is in a mode of its own, and left so if None."""
        with self.built():
            modes = [(m, m.training) for root in (self.twin, self.model) for m in root.modules()]
        with self.built():
            if train is not None:
                self.twin.train(train)
                self.model.train(train)
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    def finish(self) -> None:
        """Saved and done again elsewhere, then taken back: the model is its own again."""
        self.check_replay()
        s = self.play.schedule
        for _ in range(len(self.play.marks)):
            self.tried("undo", s.undo)
            self.play.marks.pop()
            self.texts.pop()
            same("undo: text", self.texts[-1], self.text())
        same("history after undoing all", [], list(s.history))
        self.behaves("after undoing all")
        self.tried("release", s.release)
        left = [path for path, m in self.model.named_modules() if "forward" in m.__dict__]
        same("forwards left on the model", [], left)
        same(
            "modules", self.modules, [(p, id(m)) for p, m in self.model.named_modules(remove_duplicate=False)]
        )
        self.compare("released", self.expected, self.seen(self.model, runs=2))


def _moved(value: Any) -> Any:
    """The same numbers but for a rounding."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return (value.detach() * (1 + 1e-6)).requires_grad_(value.requires_grad)
