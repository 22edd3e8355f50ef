"""Well-known kinds as contracts, and the rules that match them.

A `Kind` is defined by its reference, a plain torch function of exactly the arguments and attributes of its regions.
A rule for it is traced on first use, and only for a graph that has the operators it cannot match without.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from dovetail.errors import InvalidArgument, RuleError
from dovetail.ir.nodes import is_projection
from dovetail.ir.schema import op_name, static_size
from dovetail.outlining.region import make_identity
from dovetail.rules.patterns.alternatives import Const, either
from dovetail.rules.patterns.match_state import Match
from dovetail.rules.patterns.normalized_graph import normalized_graph_of
from dovetail.rules.patterns.pattern_rule import PatternRule
from dovetail.rules.rule import Candidate, Decline, Proposal, RuleContext

_MAX_DISTANCE = 8

# Fewer operations in common are chance.
_MIN_NEAR_MISS = 3

# What every graph is full of: to have only these in common is to have nothing in common.
_COMMON_OPS = frozenset({"add", "sub", "mul", "div", "neg", "slice", "cat"})
Required = inspect.Parameter.empty
"""The default of an attribute that has none."""


@dataclass(frozen=True, eq=False)
class Kind:
    """The contract of a kind: `reference(**arguments, **attrs)` computes the results of every region of it.

    Parameters of the reference that are not keyword-only are the arguments, None where an optional one is absent;
    keyword-only ones are the attributes, all of which every region has. `draws` states the order of random draws;
    `rounds_to` names the argument to whose dtype the reference rounds what it computed of float32.
    """

    name: str
    version: int
    reference: Callable[..., Any]
    draws: str = ""
    rounds_to: str = ""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reference(*args, **kwargs)

    @cached_property
    def arguments(self) -> Mapping[str, inspect.Parameter]:
        """The arguments by name; those with a default may be absent."""
        return self._parameters(keyword_only=False)

    @cached_property
    def attrs(self) -> Mapping[str, inspect.Parameter]:
        """The attributes by name, each with its type and perhaps a default."""
        return self._parameters(keyword_only=True)

    def _parameters(self, *, keyword_only: bool) -> dict[str, inspect.Parameter]:
        parameters = inspect.signature(self.reference).parameters
        only = inspect.Parameter.KEYWORD_ONLY
        return {name: p for name, p in parameters.items() if (p.kind is only) == keyword_only}

    def is_default(self, name: str, value: Any) -> bool:
        """Whether an attribute has the value that the reference takes it to have when it is not given."""
        parameter = self.attrs.get(name)
        return parameter is not None and parameter.default is not Required and parameter.default == value

    def complete(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes with defaults filled in; KeyError names one that is unknown or missing."""
        for name in attrs:
            if name not in self.attrs:
                raise KeyError(f"kind '{self.name}' has no attribute '{name}'")
        given = {name: attrs.get(name, p.default) for name, p in self.attrs.items()}
        for name, value in given.items():
            if value is Required:
                raise KeyError(f"kind '{self.name}' needs the attribute '{name}'")
        return given

    def describes(self, version: int, arguments: Iterable[str], attrs: Iterable[str]) -> bool:
        """Whether a region of this version, with these arguments and attributes, is covered by the contract."""
        return (
            version == self.version
            and set(arguments) <= set(self.arguments)
            and set(attrs) == set(self.attrs)
        )


def kind(
    name: str, *, version: int = 1, draws: str = "", rounds_to: str = ""
) -> Callable[[Callable[..., Any]], Kind]:
    """Make a kind of its reference, as a decorator."""
    return lambda reference: Kind(name, version, reference, draws, rounds_to)


class LibraryRule(PatternRule):
    """A pattern rule for a well-known kind, whose arguments are those of the kind's reference.

    `needs` names operators without which there is no match, so that most graphs cost nothing: words separated by
    blanks, each one operator or several with `|` between them; `when` is asked beyond that. A near-miss of one or two
    operations is not reported, nor one that reached none of these operators, save such as every graph is full of.
    The region's attributes are what `attrs_of` returns, literals of the pattern if it is not given, and the kind's
    defaults. `results_of` names the kind's results where they are not the pattern's, None for one that is not there.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        kind: Kind,
        needs: str,
        attrs_of: Callable[[Match], Mapping[str, Any]] | None = None,
        results_of: Callable[[Match], Sequence[Node | None]] | None = None,
        when: Callable[[RuleContext], bool] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(function, kind=kind.name, version=kind.version, checked=False, **options)
        self.reference = kind
        self.needs = tuple(frozenset(word.split("|")) for word in needs.split())
        self.attrs_of, self.results_of, self.when = attrs_of, results_of, when
        self.guard(lambda match: keeps_precision(match, kind.rounds_to))
        unknown = [name for name in self.parameters.operands if name not in kind.arguments]
        if unknown:
            raise RuleError(self.name, f"'{unknown[0]}' is not an argument of the kind '{kind.name}'")

    def propose(self, context: RuleContext) -> Iterable[Proposal]:
        """What was found, looked for once in a context: other rules may ask for it too."""
        return context.analysis(self._look)

    def _look(self, context: RuleContext) -> tuple[Proposal, ...]:
        names = context.analysis(_op_names)
        if names is not None and not all(word & names for word in self.needs):
            return ()
        if self.when is not None and not self.when(context):
            return ()
        return tuple(p for p in super().propose(context) if self._is_worth_telling(context, p))

    def _is_worth_telling(self, context: RuleContext, found: Proposal) -> bool:
        if isinstance(found, Candidate) or found.matched >= found.wanted:
            return True
        if found.matched < _MIN_NEAR_MISS:
            return False
        telling = [word for word in self.needs if not word <= _COMMON_OPS]
        reached = {n for i in found.members for n in context.analysis(_op_names_by_position)[i]}
        return not telling or any(word & reached for word in telling)

    def attributes(self, match: Match) -> dict[str, Any] | Decline:
        attrs = self.attrs_of(match) if self.attrs_of is not None else super().attributes(match)
        if isinstance(attrs, Decline):
            return attrs
        for name, value in attrs.items():
            try:
                make_identity(self.kind, self.version, {name: value})
            except InvalidArgument:
                return Decline(f"its '{name}' would be {value!r}, and attributes cannot hold that")
        return self.reference.complete(attrs)

    def results(self, match: Match) -> Sequence[Node | None]:
        return self.results_of(match) if self.results_of is not None else super().results(match)


def keeps_precision(match: Match, rounds_to: str = "") -> Decline | None:
    """Refuse steps in a narrower dtype than the first floating operand has, and casts from float64 of any operand.

    A reference computes in the dtypes of the operands; it may round to that of the operand `rounds_to`.
    """
    values = [v for v in match.operands.values() if v is not None and _float_bits(v.value)]
    doubles = {v.aten: v for v in values if _float_bits(v.value) == _DOUBLE}
    narrow = match.operands.get(rounds_to) if not doubles else None
    for aten, node in match.aten.items():
        bits = _float_bits(aten.meta.get("val"))
        if narrow is not None and bits and aten.meta["val"].dtype == narrow.dtype:
            continue
        cast = [
            doubles[n] for n in aten.all_input_nodes if n in doubles and op_name(aten.target) == "_to_copy"
        ]
        for value in (*values[:1], *cast):
            if 0 < bits < _float_bits(value.value):
                return Decline(f"'{value.name}' is rounded to {aten.meta['val'].dtype} on the way", at=node)
    return None


_DOUBLE = 64


def _float_bits(value: Any) -> int:
    """The width of the floating-point numbers of a tensor, or of the parts of complex ones; 0 for anything else."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return 0
    return torch.finfo(value.dtype).bits


def same_sizes(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether sizes are written alike: asking whether symbols are equal would add a guard."""
    return [str(n) for n in first] == [str(n) for n in second]


def shapes_differ(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether shapes that an elementwise operation or a product relates are known to differ.

    Symbols that differ are equal in every call that works, unless one size is 1.
    """
    if len(first) != len(second):
        return True
    pairs = ((static_size(a), static_size(b)) for a, b in zip(first, second, strict=True))
    return any(a != b if a is not None and b is not None else 1 in (a, b) for a, b in pairs)


def library_rule(
    kind: Kind,
    *,
    needs: str,
    attrs_of: Callable[[Match], Mapping[str, Any]] | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], LibraryRule]:
    """Make a rule for a well-known kind of a function; see `Known` and `dovetail.rules.pattern.rule`."""
    return lambda function: LibraryRule(function, kind=kind, needs=needs, attrs_of=attrs_of, **options)


def has_op(match: Match, *names: str) -> bool:
    """Whether an operator of one of these names is among the operations matched."""
    return any(op_name(node.target) in names for node in match.aten)


def results_by_position(match: Match) -> list[Node | None]:
    """The results of the one operator of a match that returns a tuple, by their place in it."""
    source = cast("Node", match.outputs[0].args[0])
    parts = {cast("int", user.args[1]): user for user in source.users if is_projection(user)}
    return [parts.get(i) for i in range(max(parts) + 1)]


def nearest_consumer(nodes: Collection[Node], wanted: Set[str], between: Set[str]) -> Node | None:
    """The nearest operator of a wanted name that reads what nodes make, with only a few of those in between."""
    inside = set(nodes)
    reached = [user for node in nodes for user in node.users if user not in inside]
    for _ in range(_MAX_DISTANCE):
        found = next((n for n in reached if op_name(n.target) in wanted), None)
        if found is not None:
            return found
        reached = [user for n in reached if op_name(n.target) in between for user in n.users]
    return None


def bundle_literals(
    name: str, literals: Mapping[str, Any], make: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a pattern be written with one argument in place of several literals, as what `make` returns for these.

    `literals` has an example for each; to the rule each is an argument with the default `Const(example)`.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def pattern(*args: Any, **arguments: Any) -> Any:
            made = make(**{each: arguments.pop(each, None) for each in literals})
            return function(*args, **{name: made}, **arguments)

        own = inspect.signature(function)
        kept = [p for p in own.parameters.values() if p.name != name]
        added = [
            inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=Const(example))
            for each, example in literals.items()
        ]
        cast("Any", pattern).__signature__ = own.replace(parameters=[*kept, *added])
        return pattern

    return decorate


def _op_names_by_position(context: RuleContext) -> Mapping[int, Set[str]]:
    """The operators that each position comes to as patterns see it."""
    found: dict[int, set[str]] = {i: set() for i in range(len(context.nodes))}
    for node, places in context.analysis(normalized_graph_of).origins.items():
        for i in places:
            found[i].add(op_name(node.target))
    return found


def _op_names(context: RuleContext) -> frozenset[str] | None:
    """The operators of a graph as patterns see it, None where it cannot be seen."""
    shadow = context.analysis(normalized_graph_of)
    if shadow.why_none:
        return None
    return frozenset(op_name(target) for target in shadow.by_target)


Activation = Callable[[Tensor], Tensor]
_REL_TOL = 1e-6
"""The relative tolerance of a rounded constant: a few float32 roundings, so that the reference is reproduced."""
_ACTIVATIONS: Mapping[str, Activation] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "squared_relu": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish,
    "elu": F.elu,
    "mish": F.mish,
    "softplus": F.softplus,
    "hardsigmoid": F.hardsigmoid,
    "selu": F.selu,
    "celu": F.celu,
    "log_sigmoid": F.logsigmoid,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
}


def activate(x: Tensor, activation: str | None, slope: float | None = None) -> Tensor:
    """The activation that the attributes of a kind name; None is the identity."""
    if activation is None:
        return x
    if activation == "leaky_relu":
        return F.leaky_relu(x, cast("float", slope))
    return _ACTIVATIONS[activation](x)


def close_to(match: Match, name: str, meant: float) -> Decline | None:
    """Refuse a captured constant that differs from the one meant by more than rounding."""
    value = match.literals.get(name)
    if value is None or math.isclose(value, meant, rel_tol=_REL_TOL):
        return None
    return Decline(f"it has {value!r} where {meant:.7g} is meant")


def is_floating_point(match: Match) -> Decline | None:
    """Refuse integers and complex numbers, which operators do not take where their steps by hand do."""
    for name in ("x", "gate", "empty", "table"):
        value = match.operands.get(name)
        if value is not None and not value.dtype.is_floating_point:
            return Decline(f"'{value.name}' is {value.dtype}, not a real floating-point value", at=value)
    return None


def square(x: Tensor) -> Tensor:
    """x², as people write it."""
    return either(lambda: x.pow(2), lambda: x * x, lambda: x.square())


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return either(lambda: F.silu(x), lambda: x * torch.sigmoid(x))


def relu6(x: Tensor) -> Tensor:
    """min(max(x, 0), 6)."""
    return either(
        lambda: F.relu6(x),
        lambda: F.hardtanh(x, 0.0, 6.0),
        lambda: x.clamp(0, 6),
        lambda: x.clamp(min=0).clamp(max=6),
        lambda: torch.relu(x).clamp(max=6),
    )


SIMPLE_ACTIVATIONS: Mapping[str, tuple[str, Activation]] = {
    "relu6": ("relu6|hardtanh|clamp", relu6),
    "relu": ("relu", torch.relu),
    "silu": ("silu|sigmoid", silu),
    "tanh": ("tanh", torch.tanh),
    "sigmoid": ("sigmoid", torch.sigmoid),
    "hardswish": ("hardswish", F.hardswish),
    "elu": ("elu", F.elu),
    "mish": ("mish", F.mish),
}
"""Activations without constants of their own: the operators one of which each has, and the step.

The first of them whose operators are there is the one that is meant.
"""


def _halved(x: Tensor, gate: Tensor) -> Tensor:
    """x * gate / 2, however it is put together."""
    return either(
        lambda: x * 0.5 * gate,
        lambda: x * (gate * 0.5),
        lambda: x * gate * 0.5,
        lambda: x / 2 * gate,
        lambda: x * gate / 2,
    )


def _erf_gelu(x: Tensor, root: Any, inverse: Any) -> Tensor:
    turned = either(lambda: torch.erf(x / root), lambda: torch.erf(x * inverse))
    return _halved(x, turned + 1.0)


def _tanh_gelu(x: Tensor, factor: Any, cubic: Any) -> Tensor:
    cube = either(lambda: x.pow(3), lambda: x * x * x, lambda: x * (x * x))
    inner = either(
        lambda: (x + cube * cubic) * factor,
        lambda: (x + x * cubic * x * x) * factor,
        lambda: x * factor * (1.0 + x * cubic * x),
        lambda: x * factor * (1.0 + x * x * cubic),
        lambda: x * (1.0 + x * x * cubic) * factor,
    )
    return _halved(x, torch.tanh(inner) + 1.0)


def _gelu(x: Tensor, *, root: Any, inverse: Any, factor: Any, cubic: Any, slope: Any) -> Tensor:
    """A GELU: exact, its tanh approximation, or the quick one by a sigmoid."""
    return either(
        lambda: F.gelu(x),
        lambda: F.gelu(x, approximate="tanh"),
        lambda: _erf_gelu(x, root, inverse),
        lambda: _tanh_gelu(x, factor, cubic),
        lambda: x * torch.sigmoid(x * slope),
    )


_GELU_EXAMPLES = {"root": 1.4143, "inverse": 0.7072, "factor": 0.7979, "cubic": 0.0448, "slope": 1.7021}
_GELU_CONSTANTS = {
    "root": math.sqrt(2.0),
    "inverse": math.sqrt(0.5),
    "factor": math.sqrt(2.0 / math.pi),
    "cubic": 0.044715,
    "slope": 1.702,
}
with_gelu = bundle_literals("gelu", _GELU_EXAMPLES, partial(partial, _gelu))
"""Hands a pattern the step `gelu`: any GELU, with constants that `gelu_constants` guards."""
GELU_NAMES = {"none": "gelu", "tanh": "gelu_tanh", "sigmoid": "gelu_quick"}
"""The name of the activation for each approximation of a GELU."""


def gelu_approximation(match: Match) -> str:
    """Which GELU it is, by the word that torch has for it; "sigmoid" for x * sigmoid(1.702 * x)."""
    if has_op(match, "sigmoid"):
        return "sigmoid"
    spelled = any(node.kwargs.get("approximate") == "tanh" for node in match.aten)
    return "tanh" if spelled or has_op(match, "tanh") else "none"


def activation_name(match: Match) -> str | None:
    """The activation among the operations of a match that has at most one: a ReLU, a SiLU, or any GELU."""
    if has_op(match, "relu"):
        return "relu"
    if has_op(match, "silu") or (has_op(match, "sigmoid") and "slope" not in match.literals):
        return "silu"
    return GELU_NAMES[gelu_approximation(match)] if has_op(match, "gelu", "erf", "tanh", "sigmoid") else None


def is_gelu(match: Match) -> Decline | None:
    """Refuse constants that are not those of a GELU."""
    verdicts = (close_to(match, name, value) for name, value in _GELU_CONSTANTS.items())
    return next((v for v in verdicts if v is not None), None)


def combine_halves(x: Tensor, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """What is made of the two halves of the last dimension, however they are cut."""
    middle = x.shape[-1] // 2

    def chunks() -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return join(a, b)

    def sizes() -> Tensor:
        a, b = x.split([middle, middle], dim=-1)
        return join(a, b)

    return either(chunks, sizes, lambda: join(x[..., :middle], x[..., middle:]))
