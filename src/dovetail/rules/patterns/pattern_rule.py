"""Pattern rules: a Python function is the pattern."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast, overload

from torch import Tensor
from torch.fx import Node

from dovetail.errors import InvalidArgument, RuleError, did_you_mean
from dovetail.outlining.region import make_identity
from dovetail.rules.patterns.example_shapes import parameters_of
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.patterns.matcher import THROUGH_OPTIONS
from dovetail.rules.patterns.pattern_search import PatternSearch
from dovetail.rules.patterns.variants import Variants
from dovetail.rules.rule import Decline, Proposal, Rule, RuleContext, require_int, require_policy

Guard = Callable[[Match], Decline | None]


class PatternRule(Rule):
    """Proposes every occurrence of a function's operations in a graph, in whatever form these are called.

    Calling the rule runs the function. `guard` adds a condition on the values bound.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        kind: str,
        name: str | None = None,
        priority: int = 0,
        version: int = 1,
        escapes: str = "auto",
        attrs: Mapping[str, Any] | Callable[[Match], Mapping[str, Any]] | None = None,
        through: Iterable[str] = (),
        examples: Sequence[Sequence[Any]] | None = None,
        checked: bool = True,
    ) -> None:
        if not callable(function):
            raise InvalidArgument(f"a pattern is a function, not a {type(function).__name__}.")
        self.function = function
        self.name = name if name is not None else getattr(function, "__name__", kind)
        make_identity(kind, version, attrs if isinstance(attrs, Mapping) else None)
        if attrs is not None and not isinstance(attrs, Mapping) and not callable(attrs):
            raise RuleError(self.name, f"attrs {attrs!r} is neither a mapping nor a function of the match")
        require_int(self.name, "priority", priority)
        require_policy(self.name, escapes)
        self.kind, self.priority, self.version = kind, priority, version
        self.escapes, self.attrs = escapes, attrs
        options = [through] if isinstance(through, str) else through
        is_collection = isinstance(options, (list, tuple, set, frozenset))
        if not is_collection or not all(option in THROUGH_OPTIONS for option in options):
            raise RuleError(self.name, f"through {through!r} has more than {', '.join(THROUGH_OPTIONS)}")
        self.through = frozenset(options)
        if examples is not None and not _are_examples(examples):
            raise RuleError(self.name, "its examples must be a list of the operands of a call each: [(x, y)]")
        self.guards: tuple[Guard, ...] = ()
        self.parameters = parameters_of(function, self.name)
        self.variants = Variants(function, self.name, self.parameters, examples)
        self._examples = examples
        if checked:
            self.variants.check()
        functools.update_wrapper(
            self, function, assigned=("__doc__", "__module__", "__wrapped__"), updated=()
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"rule({self.name})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        # Templates are traced again. The name of a decorated function resolves to its rule.
        if _resolve_qualname(self.function) is self:
            return cast("Any", self.function).__qualname__
        options = {name: getattr(self, name) for name in _OPTIONS}
        return _rebuild_rule, (self.function, options, self._examples, self.guards)

    def guard(self, function: Guard) -> Guard:
        """Add a condition, as a decorator: it takes the `Match` and returns None, or a `Decline` with the reason."""
        if not callable(function):
            raise RuleError(self.name, f"a guard is a function, not a {type(function).__name__}")
        self.guards = (*self.guards, function)
        return function

    def propose(self, context: RuleContext) -> Iterable[Proposal]:
        return PatternSearch(self, context).run()

    def matches(self, context: RuleContext) -> list[Match]:
        """Return every match that all guards accept; matches may overlap."""
        search = PatternSearch(self, context)
        for _ in search.run():
            pass
        return search.matches

    def check_guards(self, match: Match) -> Decline | None:
        """Return the refusal of the first guard that declines, None if all accept."""
        for guard in self.guards:
            label = getattr(guard, "__name__", "guard")
            try:
                verdict = guard(match)
            except Exception as error:
                raise RuleError(
                    self.name, f"its guard '{label}' raised {type(error).__name__}: {error}"
                ) from error
            if verdict is not None and not isinstance(verdict, Decline):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise RuleError(
                    self.name,
                    f"its guard '{label}' returned {verdict!r}; return None to accept or Decline(reason)",
                )
            if verdict is not None:
                return verdict
        return None

    def attributes(self, match: Match) -> dict[str, Any] | Decline:
        """Return the attributes of a match's region: the captured literals, and those that `attrs` adds.

        A literal that attributes cannot hold, such as an infinity, is a reason to decline.
        """
        for name, value in match.literals.items():
            try:
                make_identity(self.kind, self.version, {name: value})
            except InvalidArgument:
                return Decline(f"the literal '{name}' is {value!r}, and attributes cannot hold that")
        attrs = {**match.literals, **self._added(match)}
        try:
            make_identity(self.kind, self.version, attrs)
        except InvalidArgument as error:
            raise RuleError(self.name, str(error).removesuffix(".")) from error
        return attrs

    def results(self, match: Match) -> Sequence[Node | None]:
        """Return the nodes of the results that a kernel of the kind returns, in its order; None for one not computed."""
        return match.outputs

    def _added(self, match: Match) -> Mapping[str, Any]:
        if not callable(self.attrs):
            return self.attrs or {}
        try:
            added: Any = self.attrs(match)
        except Exception as error:
            raise RuleError(self.name, f"its attrs raised {type(error).__name__}: {error}") from error
        if added is not None and not isinstance(added, Mapping):
            raise RuleError(self.name, f"its attrs returned {added!r}; return a dict")
        return cast("Mapping[str, Any]", added or {})


_OPTIONS = ("kind", "name", "priority", "version", "escapes", "attrs", "through")


def _are_examples(examples: Any) -> bool:
    """Whether examples are a list of lists of tensors and None."""
    return isinstance(examples, (list, tuple)) and all(
        isinstance(one, (list, tuple)) and all(v is None or isinstance(v, Tensor) for v in cast("Any", one))
        for one in cast("Any", examples)
    )


def _resolve_qualname(function: Any) -> Any:
    """Return what a function's qualified name resolves to in its module."""
    value: Any = sys.modules.get(getattr(function, "__module__", ""))
    for atom in getattr(function, "__qualname__", "").split("."):
        value = getattr(value, atom, None)
    return value


def _rebuild_rule(
    function: Callable[..., Any], options: dict[str, Any], examples: Any, guards: tuple[Guard, ...]
) -> PatternRule:
    rule = PatternRule(function, **options, examples=examples, checked=False)
    rule.guards = guards
    return rule


@overload
def rule(function: Callable[..., Any], *, kind: str) -> PatternRule: ...


@overload
def rule(
    *,
    kind: str,
    name: str | None = None,
    priority: int = 0,
    version: int = 1,
    escapes: str = "auto",
    attrs: Mapping[str, Any] | Callable[[Match], Mapping[str, Any]] | None = None,
    through: Iterable[str] = (),
    examples: Sequence[Sequence[Any]] | None = None,
    checked: bool = True,
) -> Callable[[Callable[..., Any]], PatternRule]: ...


def rule(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a rule of a function: every occurrence of its operations in a graph is proposed as a region.

    Arguments without a default are operands and stay outside; one with the default None may be absent; one with the
    default `Const()` is a literal, captured into the region's `attrs`; any other default must be equal. `escapes` is
    the policy for inner values that are also used outside. `through` ("views", "casts") lets the graph have such
    operations between those of the pattern. `attrs` adds attributes, or computes them from the `Match`. `examples` are
    operands on which the pattern runs, needed where none can be found by trying. The pattern is traced and checked at
    once; with `checked=False` only when it is first used.
    """
    if isinstance(function, str):
        raise InvalidArgument(f"write @rule(kind={function!r}): the kind is a keyword.")
    if "kind" not in options:
        raise InvalidArgument("a rule needs a kind: @rule(kind='swiglu').")
    unknown = next((name for name in options if name not in (*_OPTIONS, "examples", "checked")), None)
    if unknown is not None:
        raise InvalidArgument(
            f"rule has no option '{unknown}'. {did_you_mean(unknown, _OPTIONS)}".rstrip(" ")
        )
    if function is not None:
        return PatternRule(function, **options)
    return functools.partial(PatternRule, **options)
