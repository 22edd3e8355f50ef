"""The forms of a pattern: one template per combination of alternatives, dialect and precision, made when needed."""

from __future__ import annotations

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
    """What one pattern looks like. Loose templates show its form; exact ones are traced on given operands."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        parameters: Parameters,
        given: Sequence[Sequence[Any]] | None,
    ) -> None:
        self.function, self.name, self.parameters = function, name, parameters
        self._given = given
        self._loose: dict[tuple[str, str], list[Template]] = {}
        self._exact: dict[Any, Template | str] = {}

    @cached_property
    def examples(self) -> list[PatternExample]:
        """Arguments on which the pattern runs, for each combination of its alternatives."""
        if self._given:
            return self._shown(self._given)
        return ExampleSearch(self.function, self.name, self.parameters).examples()

    def loose(self, dialect: str, dtypes: set[torch.dtype]) -> list[Template]:
        """Templates of the pattern's distinct forms in a dialect, at the precisions that a graph has."""
        other = any(d.is_floating_point and d is not torch.float32 for d in dtypes)
        low = torch.bfloat16 if other else None
        key = (dialect, "low" if low is not None else "full")
        full = self._full(dialect)
        if low is not None and key not in self._loose:
            self._loose[key] = _distinct_forms([*full, *self._low(dialect, low)])
        return self._loose[key]

    def exact(
        self,
        example: PatternExample,
        dialect: str,
        operands: Mapping[str, tuple[Any, Any]],
        found: MatchState,
    ) -> Template | str:
        """The template of the alternatives that were found, on these very operands, or why there is none.

        Operands are given as what makes them and their value: two that are one and the same stay so.
        """
        picks = {**example.picks, **found.sites}
        here = replace(example, picks=picks, literals={**example.literals, **found.literals})
        symbols: dict[str, str] = {}
        first: dict[int, int] = {}
        same = tuple(first.setdefault(id(n), i) for i, (n, _) in enumerate(operands.values()))
        values = tuple(value_signature(v, symbols) for _, v in operands.values())
        written = tuple((k, repr(v)) for k, v in here.literals.items())
        key = (dialect, tuple(sorted(picks.items())), example.absent, values, same, written)
        # Numbers of another graph's symbols cannot be compared with this one's.
        if symbols:
            key = (*key, tuple(symbols), _shape_env(operands))
        known = self._exact.get(key)
        if known is None:
            if len(self._exact) >= _MAX_EXACT:
                self._exact.clear()
            known = self._exact[key] = self._trace(here, dialect, operands)
        return known

    def _trace(
        self, here: PatternExample, dialect: str, operands: Mapping[str, tuple[Any, Any]]
    ) -> Template | str:
        stage = FakeEnvironment()
        made: dict[int, Any] = {}
        try:
            for source, value in operands.values():
                if id(source) not in made:
                    made[id(source)] = stage.stand_in(value)
            values = {name: made[id(source)] for name, (source, _) in operands.items()}
            return make_template(
                self.function, self.name, self.parameters, here, values=values, dialect=dialect, stage=stage
            )
        except DovetailError:
            raise
        except NotProvable as error:
            return str(error)
        except Exception as error:  # whatever torch says of these operands is the reason to decline
            first = (str(error).strip().splitlines() or [""])[0]
            return f"the pattern does not run on these operands: {type(error).__name__}: {first}"

    def _full(self, dialect: str) -> list[Template]:
        """The forms at the precision of the examples."""
        key = (dialect, "full")
        if key not in self._loose:
            shown = [e for example in self.examples for e in _at_ranks(example, dialect)]
            choosers = ((e, Chooser(e.picks, joint=True)) for e in _deduplicate(shown))
            made = [t for e, chooser in choosers if (t := self._form(e, dialect, chooser)) is not None]
            self._loose[key] = _distinct_forms(made)
            if all(template.blind for template in made):
                self._loose[dialect, "low"] = self._loose[key]
        return self._loose[key]

    def _low(self, dialect: str, low: torch.dtype) -> list[Template]:
        """The forms where some operands have a lower precision; what is cast there need not be elsewhere."""
        shown = [replace(e, picks={}) for example in self.examples for e in _at_precision(example, low)]
        made: list[Template] = []
        for example in _deduplicate(shown):
            picks: dict[Site, int] | None = {}
            while picks is not None:
                chooser = Chooser(picks, joint=True, mixed=True)
                template = self._form(replace(example, picks=picks), dialect, chooser)
                if template is not None:
                    made.append(template)
                picks = chooser.next()
        return made

    def _form(self, example: PatternExample, dialect: str, chooser: Chooser) -> Template | None:
        try:
            template = make_template(
                self.function, self.name, self.parameters, example, dialect=dialect, chooser=chooser
            )
        except RuleError:
            raise
        except Exception:
            if dialect == CAPTURED and example in self.examples:
                raise
            return None  # a rank or precision that was only a guess
        return replace(template, literals=self._literals(template, dialect, mixed=chooser.mixed))

    def _literals(
        self, template: Template, dialect: str, *, mixed: bool
    ) -> dict[str, tuple[tuple[Node, Path], ...]]:
        found: dict[str, tuple[tuple[Node, Path], ...]] = {}
        for name, value in template.example.literals.items():
            if isinstance(value, str) or (type(value) is float and not value.is_integer()):
                places = literal_places(template, value)
            else:
                places = self._moved(template, name, value, dialect, mixed=mixed)
            found[name] = tuple(places)
        return found

    def _moved(
        self, template: Template, name: str, value: Any, dialect: str, *, mixed: bool
    ) -> list[tuple[Node, Path]]:
        """Where a literal stands, told by what changes when it does."""
        others = _other_lists(value) if isinstance(value, list) else _PROBE_VALUES.get(type(value), ())
        for other in others:
            example = replace(template.example, literals={**template.example.literals, name: other})
            try:
                chooser = Chooser(example.picks, joint=True, mixed=mixed)
                changed = make_template(
                    self.function, self.name, self.parameters, example, dialect=dialect, chooser=chooser
                )
            except Exception:
                continue  # whatever torch says of it, another value was only a probe
            places = literal_differences(template, changed, value, other)
            if places:
                return merge_list_places(places, only_full=not isinstance(value, list))
        return []

    def check(self) -> None:
        """Refuse what cannot be a pattern, while the rule is being made."""
        forms = self._full(CAPTURED)
        used = {n for t in forms for n, node in t.operands.items() if node.users}
        for name in self.parameters.operands:
            if name not in used:
                raise RuleError(
                    self.name, f"its pattern ignores the argument '{name}'; use it or take it out"
                )
        for name in self.parameters.literals:
            places = [p for t in forms for p in t.literals.get(name, ())]
            if not places:
                raise RuleError(
                    self.name,
                    f"its pattern computes with the literal '{name}' or ignores it; a captured literal "
                    f"can only be handed to operations",
                )
        for template in forms:
            if component_count(template) > 1:
                raise RuleError(
                    self.name, "its pattern falls into parts that share no value; make each a rule of its own"
                )

    def _shown(self, examples: Sequence[Sequence[Any]]) -> list[PatternExample]:
        """The forms that a user's own examples show, one per combination of alternatives."""
        found: list[PatternExample] = []
        for values in examples:
            if len(values) != len(self.parameters.operands):
                raise RuleError(
                    self.name,
                    f"an example has {len(values)} values for {len(self.parameters.operands)} operands",
                )
            pairs = dict(zip(self.parameters.operands, values, strict=True))
            shapes = {
                n: (tuple(int(s) for s in v.shape), v.dtype)
                for n, v in pairs.items()
                if isinstance(v, Tensor)
            }
            absent = frozenset(n for n, v in pairs.items() if v is None)
            prober = ExampleSearch(self.function, self.name, self.parameters)
            found += prober.given(shapes, absent)
        return found


def _shape_env(operands: Mapping[str, tuple[Any, Any]]) -> Any:
    """The world that symbols are of; another one made later is never taken for it."""
    for _, value in operands.values():
        sizes = (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,)
        for size in sizes:
            if isinstance(size, SYMBOLIC):
                return weakref.ref(size.node.shape_env)
    return None


def _deduplicate(examples: list[PatternExample]) -> list[PatternExample]:
    return list({repr((sorted(e.shapes.items()), e.picks, e.absent)): e for e in examples}.values())


def _at_precision(example: PatternExample, low: torch.dtype) -> list[PatternExample]:
    """The same operands in a lower precision: all of them, only the first, all but the first."""
    floats = [n for n, (_, dtype) in example.shapes.items() if dtype.is_floating_point]
    ways = [set(floats), set(floats[:1]), set(floats[1:])]
    made: list[PatternExample] = []
    for lowered in ways:
        if not lowered:
            continue
        shapes = {n: (s, low if n in lowered else d) for n, (s, d) in example.shapes.items()}
        made.append(replace(example, shapes=shapes))
    return made


def _at_ranks(example: PatternExample, dialect: str) -> list[PatternExample]:
    """In AOTAutograd's dialect the rank of an operand decides which operators there are: try others too."""
    if dialect != AUTOGRAD:
        return [example]
    made = [example]
    ranks = {len(shape) for shape, _ in example.shapes.values()}
    top = max(ranks, default=0)
    size = next((s[0] for s, _ in example.shapes.values() if s), 8)
    for rank in (2, 3, 4):
        shapes = {n: ((size,) * rank if len(s) == top else s, d) for n, (s, d) in example.shapes.items()}
        made.append(replace(example, shapes=shapes))
    first = next(iter(example.shapes), None)
    if first is not None:
        for rank in (2, 3, 4):
            shapes = {**example.shapes, first: ((size,) * rank, example.shapes[first][1])}
            made.append(replace(example, shapes=shapes))
    return made


def _distinct_forms(templates: list[Template]) -> list[Template]:
    """One of each form: operators and wiring, absent operands, whatever the sizes."""
    found: dict[Any, Template] = {}
    for template in templates:
        form = _form_key(template)
        first = found.setdefault(form, template)
        known = (first.example, *first.alike)
        if template is not first and all(
            _alternatives_key(template.example) != _alternatives_key(e) for e in known
        ):
            found[form] = replace(first, alike=(*first.alike, template.example))
    return list(found.values())


def _alternatives_key(example: PatternExample) -> Any:
    return (dict(example.picks), example.absent)


def _other_lists(values: list[Any]) -> list[list[Any]]:
    """Lists that differ from the given one: in every place, then in one place only."""

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
