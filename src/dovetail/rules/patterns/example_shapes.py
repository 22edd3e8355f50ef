"""Finding arguments on which a pattern runs, so that its operations can be seen before any graph is."""

from __future__ import annotations

import inspect
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from dovetail.errors import RuleError
from dovetail.ir import source_location
from dovetail.ir.process_state import suppress_fake_tensor_log
from dovetail.rules.patterns.alternatives import Chooser, Const, ConstMisuse, Site, choosing, opaque

_RANKS = (3, 2, 4, 1, 0, 5)
_SIZES = (8, 1, 16, 4, 32)
_DTYPES = (torch.float32, torch.int64, torch.bool)
_LITERALS = (0.61803, 1, False, None)

# Most searches that succeed take a few hundred calls of torch; this many take about a second, unless they are of costly
# functions: a call of attention takes as long as six of others.
_MAX_CALLS = 12_000
_MAX_SECONDS = 1.0

# What a call on fake tensors costs, in calls on tensors of the meta device.
_FAKE_COST = 8
_MAX_VARIANTS = 512

# Python refuses such calls whatever the shapes are.
_INVALID_CALL = re.compile(
    r"unexpected keyword argument|multiple values for|positional arguments? but|required (positional|keyword-only)"
)


@dataclass(frozen=True)
class Parameters:
    """The arguments of a pattern by what they stand for."""

    names: tuple[str, ...]
    operands: tuple[str, ...]
    optional: tuple[str, ...]
    literals: Mapping[str, Const]
    fixed: dict[str, Any]


@dataclass(frozen=True)
class PatternExample:
    """One way to run a pattern: which alternatives it takes, and arguments for them."""

    picks: Mapping[Site, int]
    absent: frozenset[str]
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    literals: dict[str, Any]


def parameters_of(function: Callable[..., Any], name: str) -> Parameters:
    """A pattern's arguments: operands, optional operands (default None), literals (default Const()), fixed ones."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise RuleError(name, f"its pattern's signature cannot be read: {error}") from error
    operands: list[str] = []
    optional: list[str] = []
    literals: dict[str, Const] = {}
    fixed: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise RuleError(name, f"its pattern takes '{parameter}'; name every argument")
        if parameter.default is parameter.empty or parameter.default is None:
            operands.append(parameter.name)
            if parameter.default is None:
                optional.append(parameter.name)
        elif parameter.default is Const or isinstance(parameter.default, Const):
            literals[parameter.name] = parameter.default if isinstance(parameter.default, Const) else Const()
        else:
            fixed[parameter.name] = parameter.default
    if not operands:
        raise RuleError(name, "its pattern takes no operand; name at least one argument without a default")
    names = tuple(signature.parameters)
    return Parameters(names, tuple(operands), tuple(optional), literals, fixed)


class _NeedsShape(Exception):
    def __init__(self, operation: str, names: list[str]) -> None:
        super().__init__(*names)
        self.operation, self.names = operation, names


class _UnknownShape(torch.Tensor):
    """Stands for an operand whose rank is not settled; the first operation that meets it says so."""

    label: str

    def label_of(self) -> str:
        return cast("str", vars(self)["label"])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        found = [leaf.label_of() for leaf in leaves if isinstance(leaf, _UnknownShape)]
        raise _NeedsShape(getattr(func, "__name__", ""), list(dict.fromkeys(found)))


def _unknown_shape(label: str) -> _UnknownShape:
    made = torch.Tensor._make_subclass(_UnknownShape, torch.empty(0, device="meta"))
    made.label = label
    return made


class _CallCounter(TorchFunctionMode):
    """Counts the torch functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class ExampleSearch:
    """Runs a pattern on tensors without data until shapes are found that every operation takes."""

    # What operators, and patterns themselves, raise about shapes and dtypes.
    silent: ClassVar[tuple[type[Exception], ...]] = (
        RuntimeError,
        TypeError,
        ValueError,
        IndexError,
        AssertionError,
    )

    def __init__(self, function: Callable[..., Any], name: str, parameters: Parameters) -> None:
        self.function, self.name, self.parameters = function, name, parameters
        self.unknown = {n: _unknown_shape(n) for n in parameters.operands}
        self.calls, self.seconds, self.reached = 0, 0.0, (-1, False, 0)
        self.quick, self.confirmed = True, True
        self.known: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = []
        self.failure: Exception | None = None
        self.incurable = False

    def examples(self) -> list[PatternExample]:
        """An example for each combination of alternatives; RuleError if there is none that runs."""
        found: list[PatternExample] = []
        failed = 0
        for absent in _subsets(self.parameters.optional):
            picks: dict[Site, int] | None = {}
            while picks is not None:
                example, picks = self._example(picks, absent)
                if example is not None:
                    found.append(example)
                else:
                    failed += 1
                if len(found) + failed > _MAX_VARIANTS:
                    raise RuleError(
                        self.name,
                        f"its alternatives combine in more than {_MAX_VARIANTS} ways; make it several rules",
                    )
        if not found:
            raise RuleError(
                self.name,
                "its pattern cannot be traced: no shapes were found on which it runs"
                f" ({_reason(self.failure)}); give `examples=[(tensor, ...)]` to show what it takes",
            ) from self.failure
        return found

    def given(
        self, shapes: dict[str, tuple[tuple[int, ...], torch.dtype]], absent: frozenset[str]
    ) -> list[PatternExample]:
        """An example for each combination of alternatives that runs on the shapes given."""
        found: list[PatternExample] = []
        picks: dict[Site, int] | None = {}
        while picks is not None:
            chooser, literals = self._given(picks, shapes, absent)
            if literals is not None:
                found.append(PatternExample(chooser.settled, absent, shapes, literals))
            picks = chooser.next()
        if not found:
            raise RuleError(
                self.name, f"its pattern does not run on the example given ({_reason(self.failure)})"
            ) from self.failure
        return found

    def _given(
        self,
        picks: Mapping[Site, int],
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]],
        absent: frozenset[str],
    ) -> tuple[Chooser, dict[str, Any] | None]:
        """Literals on which the pattern runs with the shapes given, and what was chosen on the way."""
        chooser = Chooser(picks, joint="tried")
        for self.quick, self.confirmed in ((True, False), (False, True)):
            for literals in self._literals():
                chooser = Chooser(picks, joint="tried")
                if self._search(chooser, absent, dict(shapes), literals, _SIZES[0]) is not None:
                    return chooser, literals
        return chooser, None

    def _example(
        self, picks: Mapping[Site, int], absent: frozenset[str]
    ) -> tuple[PatternExample | None, dict[Site, int] | None]:
        chooser = Chooser(picks, joint="tried")
        # Constants that a pattern brings along do not mix with tensors without data.
        for self.quick, size in [*((True, s) for s in _SIZES), *((False, s) for s in _SIZES[:2])]:
            for literals in self._literals():
                for shapes in self._attempts(size, absent):
                    chooser = Chooser(picks, joint="tried")
                    outcome = self._search(chooser, absent, dict(shapes), literals, size)
                    if outcome is not None:
                        # What no operation met can be anything.
                        for operand in self.parameters.operands:
                            if operand not in absent:
                                outcome.setdefault(operand, ((size,), torch.float32))
                        if outcome not in self.known:
                            self.known.insert(0, outcome)
                        return PatternExample(chooser.settled, absent, outcome, literals), chooser.next()
        return None, chooser.next()

    def _literals(self) -> Iterator[dict[str, Any]]:
        known = {n: c.example for n, c in self.parameters.literals.items() if c.has_example}
        names = [n for n in self.parameters.literals if n not in known]
        ways = list(itertools.product(range(len(_LITERALS)), repeat=len(names)))
        for way in sorted(ways, key=sum):
            values = [_LITERALS[k] + i / 1000 if k == 0 else _LITERALS[k] for i, k in enumerate(way)]
            yield {**known, **dict(zip(names, values, strict=True))}

    def _attempts(
        self, size: int, absent: frozenset[str]
    ) -> Iterator[dict[str, tuple[tuple[int, ...], torch.dtype]]]:
        if size == _SIZES[0]:
            for known in self.known:
                yield {k: v for k, v in known.items() if k not in absent}
        yield {}

    def _search(
        self,
        chooser: Chooser,
        absent: frozenset[str],
        start: dict[str, tuple[tuple[int, ...], torch.dtype]],
        literals: dict[str, Any],
        size: int,
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]] | None:
        stack: list[Iterator[dict[str, tuple[tuple[int, ...], torch.dtype]]]] = [iter([start])]
        while stack:
            shapes = next(stack[-1], None)
            if shapes is None:
                stack.pop()
                continue
            if self.calls > _MAX_CALLS or self.seconds > _MAX_SECONDS:
                raise RuleError(
                    self.name,
                    "its pattern cannot be traced: no shapes on which it runs were found in the bounded search for them"
                    f" ({_reason(self.failure)}); give `examples=[(tensor, ...)]` to show what it takes",
                ) from self.failure
            chooser.restart()
            before = time.thread_time()
            wanted = self._run(chooser, absent, shapes, literals)
            self.seconds += time.thread_time() - before
            if wanted is None and self.incurable:
                return None
            if wanted is None:
                continue
            if not wanted.names:
                # What is bounded is the search for one combination of alternatives.
                self.calls, self.seconds = 0, 0.0
                return shapes
            stack.append(_shapes_for(wanted, shapes, size))
        return None

    def _run(
        self,
        chooser: Chooser,
        absent: frozenset[str],
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]],
        literals: dict[str, Any],
    ) -> _NeedsShape | None:
        """The operands whose shape must be settled next; none if it ran, None if it failed."""
        if self.quick:
            # Tensors without data are quick to try, and forgive more than a device does.
            with torch.device("meta"):
                wanted = self._run_on("meta", chooser, absent, shapes, literals)
            if wanted is None or wanted.names or not self.confirmed:
                return wanted
            chooser.restart()
        with FakeTensorMode(allow_non_fake_inputs=True):
            return self._run_on("cpu", chooser, absent, shapes, literals)

    def _run_on(
        self,
        device: str,
        chooser: Chooser,
        absent: frozenset[str],
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]],
        literals: dict[str, Any],
    ) -> _NeedsShape | None:
        arguments = dict(self.parameters.fixed)
        arguments.update({name: opaque(value) for name, value in literals.items()})
        for name in self.parameters.operands:
            if name in absent:
                arguments[name] = None
            elif name in shapes:
                shape, dtype = shapes[name]
                arguments[name] = torch.empty(shape, dtype=dtype, device=device)
            else:
                arguments[name] = self.unknown[name]
        counting = _CallCounter()
        try:
            with suppress_fake_tensor_log(), choosing(chooser), torch.no_grad(), counting:
                self.function(**arguments)
        except _NeedsShape as need:
            return need
        except ConstMisuse as error:
            raise RuleError(self.name, str(error)) from None
        except Exception as error:
            # What is called may hang on which operands are there, and on nothing else that is tried.
            self.incurable = isinstance(error, TypeError) and bool(_INVALID_CALL.search(str(error)))
            if not isinstance(error, self.silent) or (self.incurable and not self.parameters.optional):
                raise RuleError(self.name, f"its pattern cannot be traced: {_reason(error)}") from error
            # The try that came furthest has the error to report.
            reached = (_offset(error), device != "meta", counting.calls)
            if reached > self.reached:
                self.failure, self.reached = error, reached
            return None
        finally:
            self.calls += (1 + counting.calls) * (1 if device == "meta" else _FAKE_COST)
        return _NeedsShape("", [])


def _shapes_for(
    need: _NeedsShape, settled: dict[str, tuple[tuple[int, ...], torch.dtype]], size: int
) -> Iterator[dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Ways to settle some operands: floats of every rank first, then with indices and masks among them."""
    names, count = need.names, len(need.names)
    dtypes = sorted(itertools.product(range(len(_DTYPES)), repeat=min(count, 2)), key=sum)
    convolves = "conv" in need.operation
    for kinds in dtypes:
        # Of many operands at once, the last ones are alike: statistics, weights, masks.
        each = [kinds[0], *[0] * (count - 2), kinds[-1]] if count > 1 else list(kinds)
        for ranks in _ranks_for(need.operation, count):
            shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
            for i, (name, rank, kind) in enumerate(zip(names, ranks, each, strict=True)):
                kernel = convolves and i > 0 and rank > 2
                shape = (size, size, *[1] * (rank - 2)) if kernel else (size,) * rank
                shapes[name] = (shape, _DTYPES[kind])
            yield {**settled, **shapes}


def _ranks_for(operation: str, count: int) -> Iterator[tuple[int, ...]]:
    digits = [int(c) for c in operation if c.isdigit()]
    own = (digits[0] + 2,) if "conv" in operation and digits and digits[0] < 4 else ()
    ranks = tuple(dict.fromkeys((*own, *_RANKS)))
    if count <= 2:
        yield from itertools.product(ranks, repeat=count)
        return
    seen: set[tuple[int, ...]] = set()
    for first, second in itertools.product(ranks, repeat=2):
        rest = count - 2
        ways = (
            (first, second, *[1] * rest),
            (first, *[second] * (rest + 1)),
            (*[first] * (rest + 1), second),
            (first, first, *[second] * rest),
        )
        for way in ways:
            if way not in seen:
                seen.add(way)
                yield way


def _subsets(names: tuple[str, ...]) -> Iterator[frozenset[str]]:
    """Every choice of optional operands to leave out, those that leave out least first."""
    for count in range(len(names) + 1):
        for left_out in itertools.combinations(names, count):
            yield frozenset(left_out)


def _reason(error: Exception | None) -> str:
    if error is None:
        return "it was never run"
    first = (str(error).strip().splitlines() or [""])[0]
    if "DataDependent" in type(error).__name__:
        first = "it branches on, or takes a size from, values that are known only when it runs"
    line = source_location.of_exception(error)
    return f"{type(error).__name__}: {first}{'' if line is None else f', at {line.inline}'}"


def _offset(error: Exception) -> int:
    """How far into the pattern an error was raised, as an offset in its bytecode; -1 before its first instruction."""
    below = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return -1 if below is None else below.tb_lasti
