"""Search for example operands on which a pattern runs, so that it can be traced before any graph is known.

The problem is a small constraint satisfaction problem whose constraints are the pattern's own operators: find ranks, sizes
and dtypes that all of them accept. Operands start without a shape; the first operator that reads one raises, and the search
assigns the operands of that operator next (conflict-directed, like lazy unification), trying common ranks and dtypes first, and
backtracks when an operator rejects an assignment. Most patterns need a few dozen runs on the meta device. The search is
bounded in calls, weighed by what they cost, and not in time: a pattern that is traced on one machine is traced on every one.
Shapes that worked for one combination of alternatives are tried first for the next.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

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

# Most searches that succeed take a few hundred calls of torch; this many take about a second.
_MAX_COST = 12_000

# Functions whose meta kernels are written in Python, by a part of their names: the cost in calls of others.
_COSTS = (("lstm", 200), ("gru", 200), ("rnn", 200), ("attention", 12), ("norm", 8))

# The cost of a call on fake tensors, in calls on tensors of the meta device.
_FAKE_COST = 8
_MAX_VARIANTS = 512

# What operators, and patterns themselves, raise about shapes and dtypes.
_REJECTIONS = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)

# Messages of TypeErrors that do not depend on shapes.
_INVALID_CALL = re.compile(
    r"unexpected keyword argument|multiple values for|positional arguments? but|required (positional|keyword-only)"
)


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""The shape and dtype of each operand."""


@dataclass(frozen=True)
class Parameters:
    """The arguments of a pattern by role."""

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
    shapes: Shapes
    literals: dict[str, Any]


def parameters_of(function: Callable[..., Any], name: str) -> Parameters:
    """Return a pattern's arguments: operands, optional ones (default None), literals (default Const()), fixed ones."""
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
    """An operand without a shape; the first operation that reads it raises `_NeedsShape`."""

    label: str

    def label_of(self) -> str:
        return cast("str", vars(self)["label"])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = pytree.tree_leaves((args, kwargs or {}))
        names = [leaf.label_of() for leaf in leaves if isinstance(leaf, _UnknownShape)]
        raise _NeedsShape(getattr(func, "__name__", ""), list(dict.fromkeys(names)))


def _unknown_shape(label: str) -> _UnknownShape:
    operand = torch.Tensor._make_subclass(_UnknownShape, torch.empty(0, device="meta"))
    operand.label = label
    return operand


class _CallCounter(TorchFunctionMode):
    """Counts the torch functions that are called, and adds up their costs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.cost = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        name = getattr(func, "__name__", "")
        self.cost += next((cost for part, cost in _COSTS if part in name), 1)
        return func(*args, **(kwargs or {}))


class ExampleSearch:
    """Runs a pattern on tensors without data until every operation accepts their shapes."""

    def __init__(self, function: Callable[..., Any], name: str, parameters: Parameters) -> None:
        self.function, self.name, self.parameters = function, name, parameters
        self.unknown = {n: _unknown_shape(n) for n in parameters.operands}
        self.cost, self.reached = 0, (-1, False, 0)
        self.quick, self.confirmed = True, True
        self.known: list[Shapes] = []
        self.failure: Exception | None = None
        self.unfixable = False

    def examples(self) -> list[PatternExample]:
        """Return an example for each combination of alternatives; RuleError if none of them runs."""
        examples: list[PatternExample] = []
        tried = 0
        for absent in _subsets(self.parameters.optional):
            picks: dict[Site, int] | None = {}
            while picks is not None:
                example, picks = self._example(picks, absent)
                if example is not None:
                    examples.append(example)
                tried += 1
                if tried > _MAX_VARIANTS:
                    what = f"its alternatives combine in more than {_MAX_VARIANTS} ways; split it into several rules"
                    raise RuleError(self.name, what)
        if not examples:
            raise self._untraceable("no shapes were found on which it runs")
        return examples

    def _untraceable(self, why: str) -> RuleError:
        hint = "give `examples=[(tensor, ...)]` to show what it takes"
        error = RuleError(self.name, f"its pattern cannot be traced: {why} ({_reason(self.failure)}); {hint}")
        error.__cause__ = self.failure
        return error

    def examples_on(self, shapes: Shapes, absent: frozenset[str]) -> list[PatternExample]:
        """Return an example for each combination of alternatives that runs on `shapes`; RuleError if none does."""
        examples: list[PatternExample] = []
        picks: dict[Site, int] | None = {}
        while picks is not None:
            chooser, literals = self._literals_on(picks, shapes, absent)
            if literals is not None:
                examples.append(PatternExample(chooser.chosen, absent, shapes, literals))
            picks = chooser.next_picks()
        if not examples:
            what = f"its pattern does not run on the example given ({_reason(self.failure)})"
            raise RuleError(self.name, what) from self.failure
        return examples

    def _literals_on(
        self, picks: Mapping[Site, int], shapes: Shapes, absent: frozenset[str]
    ) -> tuple[Chooser, dict[str, Any] | None]:
        """Return literals with which the pattern runs on `shapes`, None without any, and the chooser of that run."""
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
                        # An operand that no operation reads can have any shape.
                        for operand in self.parameters.operands:
                            if operand not in absent:
                                outcome.setdefault(operand, ((size,), torch.float32))
                        if outcome not in self.known:
                            self.known.insert(0, outcome)
                        return PatternExample(chooser.chosen, absent, outcome, literals), chooser.next_picks()
        return None, chooser.next_picks()

    def _literals(self) -> Iterator[dict[str, Any]]:
        known = {n: c.example for n, c in self.parameters.literals.items() if c.has_example}
        names = [n for n in self.parameters.literals if n not in known]
        ways = list(itertools.product(range(len(_LITERALS)), repeat=len(names)))
        for way in sorted(ways, key=sum):
            values = [_LITERALS[k] + i / 1000 if k == 0 else _LITERALS[k] for i, k in enumerate(way)]
            yield {**known, **dict(zip(names, values, strict=True))}

    def _attempts(self, size: int, absent: frozenset[str]) -> Iterator[Shapes]:
        if size == _SIZES[0]:
            for known in self.known:
                yield {k: v for k, v in known.items() if k not in absent}
        yield {}

    def _search(
        self, chooser: Chooser, absent: frozenset[str], start: Shapes, literals: dict[str, Any], size: int
    ) -> Shapes | None:
        stack: list[Iterator[Shapes]] = [iter([start])]
        while stack:
            shapes = next(stack[-1], None)
            if shapes is None:
                stack.pop()
                continue
            if self.cost > _MAX_COST:
                raise self._untraceable(
                    "no shapes on which it runs were found within the bound of the search"
                )
            chooser.restart()
            need = self._run(chooser, absent, shapes, literals)
            if need is None:
                if self.unfixable:
                    return None
                continue
            if not need.names:
                # The bound applies to the search for one combination of alternatives.
                self.cost = 0
                return shapes
            stack.append(_shapes_for(need, shapes, size))
        return None

    def _run(
        self, chooser: Chooser, absent: frozenset[str], shapes: Shapes, literals: dict[str, Any]
    ) -> _NeedsShape | None:
        """Return the operands that need a shape next; an empty list of names if it ran, None if it failed."""
        if self.quick:
            # The meta device is quick, and accepts more than others do.
            with torch.device("meta"):
                need = self._run_on("meta", chooser, absent, shapes, literals)
            if need is None or need.names or not self.confirmed:
                return need
            chooser.restart()
        with FakeTensorMode(allow_non_fake_inputs=True):
            return self._run_on("cpu", chooser, absent, shapes, literals)

    def _run_on(
        self, device: str, chooser: Chooser, absent: frozenset[str], shapes: Shapes, literals: dict[str, Any]
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
            # Which operands are absent may change what is called; nothing else that is tried does.
            self.unfixable = isinstance(error, TypeError) and bool(_INVALID_CALL.search(str(error)))
            if not isinstance(error, _REJECTIONS) or (self.unfixable and not self.parameters.optional):
                raise RuleError(self.name, f"its pattern cannot be traced: {_reason(error)}") from error
            # The error reported is that of the run that got furthest.
            reached = (_offset(error), device != "meta", counting.calls)
            if reached > self.reached:
                self.failure, self.reached = error, reached
            return None
        finally:
            self.cost += (1 + counting.cost) * (1 if device == "meta" else _FAKE_COST)
        return _NeedsShape("", [])


def _shapes_for(need: _NeedsShape, settled: Shapes, size: int) -> Iterator[Shapes]:
    """Yield assignments of shapes to the operands needed: floats of every rank first, then indices and masks."""
    names, count = need.names, len(need.names)
    dtypes = sorted(itertools.product(range(len(_DTYPES)), repeat=min(count, 2)), key=sum)
    convolves = "conv" in need.operation
    for kinds in dtypes:
        # Where an operation reads many operands, the last ones are alike: statistics, weights, masks.
        each = [kinds[0], *[0] * (count - 2), kinds[-1]] if count > 1 else list(kinds)
        for ranks in _ranks_for(need.operation, count):
            shapes: Shapes = {}
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
    rest = count - 2
    assignments: dict[tuple[int, ...], None] = {}
    for first, second in itertools.product(ranks, repeat=2):
        assignments[(first, second, *[1] * rest)] = None
        assignments[(first, *[second] * (rest + 1))] = None
        assignments[(*[first] * (rest + 1), second)] = None
        assignments[(first, first, *[second] * rest)] = None
    yield from assignments


def _subsets(names: tuple[str, ...]) -> Iterator[frozenset[str]]:
    """Yield every choice of optional operands to leave out, those that leave out fewest first."""
    for count in range(len(names) + 1):
        for left_out in itertools.combinations(names, count):
            yield frozenset(left_out)


def _reason(error: Exception | None) -> str:
    if error is None:
        return "it was never run"
    first = (str(error).strip().splitlines() or [""])[0]
    if "DataDependent" in type(error).__name__:
        first = "it branches on, or takes a size from, values that are only known at run time"
    line = source_location.of_exception(error)
    return f"{type(error).__name__}: {first}{'' if line is None else f', at {line.inline}'}"


def _offset(error: Exception) -> int:
    """Return the bytecode offset in the pattern where an error was raised; -1 before its first instruction."""
    below = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return -1 if below is None else below.tb_lasti
