"""The variants of a pattern: one template per combination of alternatives, dialect and precision, traced when needed.

Tracing a pattern on each place of a graph would be exact and slow. The loose templates are therefore traced once per rule,
on example operands, and deduplicated by form (operators and wiring); they propose matches. An exact template is traced on
the operands of a proposed match and cached by their signatures, so that the layers of a model share one. Where a captured
literal stands in a template is determined by differential testing: a float that occurs nowhere else is searched for, any other
literal is changed and the two traces are compared.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dovetail.errors import DovetailError, RuleError
from dovetail.ir.nodes import SYMBOLIC, value_signature
from dovetail.rules.patterns.alternatives import Chooser, Site
from dovetail.rules.patterns.example_shapes import ExampleSearch, Parameters, PatternExample
from dovetail.rules.patterns.match_state import MatchState
from dovetail.rules.patterns.template import (
    NotProvable,
    Path,
    Template,
    component_count,
    is_operation,
    literal_differences,
    literal_places,
    make_template,
    merge_list_places,
)
from dovetail.rules.patterns.trace import AUTOGRAD, CAPTURED, FakeEnvironment

_PROBE_VALUES = {float: (0.31831,), int: (0, 2, -1), bool: (True, False), type(None): (0.5, 1)}
_MAX_EXACT = 512


class Variants:
    """The templates of one pattern: loose ones of its forms, and exact ones traced on operands of a graph."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        parameters: Parameters,
        user_examples: Sequence[Sequence[Any]] | None,
    ) -> None:
        self.function, self.name, self.parameters = function, name, parameters
        self._template = functools.partial(make_template, function, name, parameters)
        self._user_examples = user_examples
        self._loose: dict[tuple[str, str], list[Template]] = {}
        self._exact: dict[Any, Template | str] = {}

    @cached_property
    def examples(self) -> list[PatternExample]:
        """Arguments on which the pattern runs, for each combination of its alternatives."""
        if self._user_examples:
            return self._from_user_examples(self._user_examples)
        return ExampleSearch(self.function, self.name, self.parameters).examples()

    def loose(self, dialect: str, dtypes: set[torch.dtype]) -> list[Template]:
        """Return templates of the pattern's distinct forms in a dialect, at the precisions that a graph has."""
        full = self._full(dialect)
        if all(d is torch.float32 for d in dtypes if d.is_floating_point):
            return full
        key = (dialect, "low")
        if key not in self._loose:
            self._loose[key] = _distinct_forms([*full, *self._low(dialect, torch.bfloat16)])
        return self._loose[key]

    def exact(
        self,
        example: PatternExample,
        dialect: str,
        operands: Mapping[str, tuple[Any, Any]],
        state: MatchState,
    ) -> Template | str:
        """Return the template of the alternatives matched, traced on these operands, or why there cannot be one.

        Each operand has its producer and its value; operands of one producer are one argument of the trace.
        """
        picks = {**example.picks, **state.sites}
        here = replace(example, picks=picks, literals={**example.literals, **state.literals})
        symbols: dict[str, str] = {}
        first: dict[int, int] = {}
        same = tuple(first.setdefault(id(n), i) for i, (n, _) in enumerate(operands.values()))
        values = tuple(value_signature(v, symbols) for _, v in operands.values())
        written = tuple((k, repr(v)) for k, v in here.literals.items())
        key = (dialect, tuple(sorted(picks.items())), example.absent, values, same, written)
        # Symbols of different graphs cannot be compared.
        if symbols:
            key = (*key, tuple(symbols), _shape_env(operands))
        if key not in self._exact:
            if len(self._exact) >= _MAX_EXACT:
                self._exact.clear()
            self._exact[key] = self._trace(here, dialect, operands)
        return self._exact[key]

    def _trace(
        self, here: PatternExample, dialect: str, operands: Mapping[str, tuple[Any, Any]]
    ) -> Template | str:
        fake_env = FakeEnvironment()
        copies: dict[int, Any] = {}
        try:
            for producer, value in operands.values():
                if id(producer) not in copies:
                    copies[id(producer)] = fake_env.fake_copy(value)
            values = {name: copies[id(producer)] for name, (producer, _) in operands.items()}
            return self._template(here, values=values, dialect=dialect, fake_env=fake_env)
        except DovetailError:
            raise
        except NotProvable as error:
            return str(error)
        except Exception as error:  # any error of torch on these operands is a reason to decline
            first = (str(error).strip().splitlines() or [""])[0]
            return f"the pattern does not run on these operands: {type(error).__name__}: {first}"

    def _full(self, dialect: str) -> list[Template]:
        """Return the forms at the precision of the examples."""
        key = (dialect, "full")
        if key not in self._loose:
            examples = [e for example in self.examples for e in _at_ranks(example, dialect)]
            choosers = ((e, Chooser(e.picks, joint=True)) for e in _deduplicate(examples))
            templates = [t for e, chooser in choosers if (t := self._form(e, dialect, chooser)) is not None]
            self._loose[key] = _distinct_forms(templates)
            if all(template.dtype_independent for template in templates):
                self._loose[dialect, "low"] = self._loose[key]
        return self._loose[key]

    def _low(self, dialect: str, low: torch.dtype) -> list[Template]:
        """Return the forms where some operands have a lower precision; casts in them are optional."""
        examples = [replace(e, picks={}) for example in self.examples for e in _at_precision(example, low)]
        templates: list[Template] = []
        for example in _deduplicate(examples):
            picks: dict[Site, int] | None = {}
            while picks is not None:
                chooser = Chooser(picks, joint=True, mixed=True)
                template = self._form(replace(example, picks=picks), dialect, chooser)
                if template is not None:
                    templates.append(template)
                picks = chooser.next_picks()
        return templates

    def _form(self, example: PatternExample, dialect: str, chooser: Chooser) -> Template | None:
        try:
            template = self._template(example, dialect=dialect, chooser=chooser)
        except RuleError:
            raise
        except Exception:
            if dialect == CAPTURED and example in self.examples:
                raise
            return None  # a rank or precision that the pattern need not support
        return replace(template, literals=self._literals(template, dialect, mixed=chooser.mixed))

    def _literals(
        self, template: Template, dialect: str, *, mixed: bool
    ) -> dict[str, tuple[tuple[Node, Path], ...]]:
        literals: dict[str, tuple[tuple[Node, Path], ...]] = {}
        for name, value in template.example.literals.items():
            if isinstance(value, str) or (type(value) is float and not value.is_integer()):
                places = literal_places(template, value)
            else:
                places = self._places_by_probing(template, name, value, dialect, mixed=mixed)
            literals[name] = tuple(places)
        return literals

    def _places_by_probing(
        self, template: Template, name: str, value: Any, dialect: str, *, mixed: bool
    ) -> list[tuple[Node, Path]]:
        """Return the places of a literal: those that change when it is changed."""
        others = _other_lists(value) if isinstance(value, list) else _PROBE_VALUES.get(type(value), ())
        for other in others:
            example = replace(template.example, literals={**template.example.literals, name: other})
            try:
                chooser = Chooser(example.picks, joint=True, mixed=mixed)
                changed = self._template(example, dialect=dialect, chooser=chooser)
            except Exception:
                continue  # the pattern need not run on a probed value
            places = literal_differences(template, changed, value, other)
            if places:
                return merge_list_places(places, only_full=not isinstance(value, list))
        return []

    def check(self) -> None:
        """Raise RuleError if the function cannot be a pattern."""
        forms = self._full(CAPTURED)
        used = {n for t in forms for n, node in t.operands.items() if node.users}
        for name in self.parameters.operands:
            if name not in used:
                what = f"its pattern ignores the argument '{name}'; use it or remove it"
                raise RuleError(self.name, what)
        for name in self.parameters.literals:
            if not any(template.literals.get(name) for template in forms):
                what = f"its pattern computes with the literal '{name}' or ignores it; a captured literal can only"
                raise RuleError(self.name, f"{what} be passed to operations")
        if any(component_count(template) > 1 for template in forms):
            what = "its pattern falls into parts that share no value; make each a rule of its own"
            raise RuleError(self.name, what)

    def _from_user_examples(self, examples: Sequence[Sequence[Any]]) -> list[PatternExample]:
        """Return examples with the shapes of the user's, one per combination of alternatives."""
        result: list[PatternExample] = []
        for values in examples:
            if len(values) != len(self.parameters.operands):
                what = f"an example has {len(values)} values for {len(self.parameters.operands)} operands"
                raise RuleError(self.name, what)
            pairs = dict(zip(self.parameters.operands, values, strict=True))
            shapes = {
                n: (tuple(int(s) for s in v.shape), v.dtype)
                for n, v in pairs.items()
                if isinstance(v, Tensor)
            }
            absent = frozenset(n for n, v in pairs.items() if v is None)
            search = ExampleSearch(self.function, self.name, self.parameters)
            result += search.examples_on(shapes, absent)
        return result


def _shape_env(operands: Mapping[str, tuple[Any, Any]]) -> Any:
    """Return a reference to the ShapeEnv of the operands' symbols; unlike an id, it is never reused."""
    for _, value in operands.values():
        sizes = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
        for size in sizes:
            if isinstance(size, SYMBOLIC):
                return weakref.ref(size.node.shape_env)
    return None


def _deduplicate(examples: list[PatternExample]) -> list[PatternExample]:
    return list({repr((sorted(e.shapes.items()), e.picks, e.absent)): e for e in examples}.values())


def _at_precision(example: PatternExample, low: torch.dtype) -> list[PatternExample]:
    """Return the example in a lower precision: all of its operands, only the first, all but the first."""
    floats = [n for n, (_, dtype) in example.shapes.items() if dtype.is_floating_point]
    return [
        replace(example, shapes={n: (s, low if n in lowered else d) for n, (s, d) in example.shapes.items()})
        for lowered in (floats, floats[:1], floats[1:])
        if lowered
    ]


def _at_ranks(example: PatternExample, dialect: str) -> list[PatternExample]:
    """Return the example at other ranks too, which decide on the operators in AOTAutograd's dialect."""
    if dialect != AUTOGRAD:
        return [example]
    examples, known = [example], example.shapes
    top = max((len(shape) for shape, _ in known.values()), default=0)
    size = next((s[0] for s, _ in known.values() if s), 8)
    for changed in ([n for n, (s, _) in known.items() if len(s) == top], list(known)[:1]):
        for rank in (2, 3, 4):
            shapes = {n: ((size,) * rank if n in changed else s, d) for n, (s, d) in known.items()}
            examples.append(replace(example, shapes=shapes))
    return examples


def _distinct_forms(templates: list[Template]) -> list[Template]:
    """Return one template of each form (operators, wiring and absent operands), whatever the sizes."""
    by_form: dict[Any, Template] = {}
    for template in templates:
        form, example = _form_key(template), template.example
        first = by_form.setdefault(form, template)
        known = (first.example, *first.same_form)
        if all((dict(e.picks), e.absent) != (dict(example.picks), example.absent) for e in known):
            by_form[form] = replace(first, same_form=(*first.same_form, example))
    return list(by_form.values())


def _other_lists(values: list[Any]) -> list[list[Any]]:
    """Return lists that differ from `values`: in every item, then in one item only."""

    def other(value: Any) -> Any:
        return not value if isinstance(value, bool) else value + 1

    single = [[*values[:i], other(v), *values[i + 1 :]] for i, v in enumerate(values)]
    return [[other(v) for v in values], *single]


def _form_key(template: Template) -> Any:
    number = {n: i for i, n in enumerate(template.program.graph.nodes)}
    named = {node: name for name, node in template.operands.items()}
    rows: list[Any] = []
    for node in template.program.graph.nodes:
        if not is_operation(node):
            continue
        used = tuple(named.get(n, number[n]) for n in node.all_input_nodes)
        absent = tuple(i for i, a in enumerate(node.args) if a is None)
        rows.append((str(node.target), number[node], used, absent))
    return (template.example.absent, tuple(rows), tuple(number[n] for n in template.outputs))
