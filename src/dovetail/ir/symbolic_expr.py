"""Expressions over sizes, parsed from untrusted text.

Two notations are read: sympy's `srepr`, for symbolic sizes, and arithmetic in Python, for guards. Python's parser turns
text into a tree without evaluating any of it, and the tree must be in the grammar here. Since the cost of exact integer
arithmetic is that of its largest intermediate result, an upper bound of the bits of each subexpression is computed along
with it (a sum has the bits of its largest term and one per term, a product those of its factors together, a power those
of its base times the exponent), and an expression that exceeds the bound is refused before anything is computed. What
sympy and torch do to an expression expands it, so the number of monomials it expands to is bounded in the same way.

Expressions are built without sympy's automatic simplification, whose cost no bound of the text predicts (a remainder of
a remainder proves inequalities about both): what was simplified before it was written needs none, and reading takes time
linear in the text.
"""

from __future__ import annotations

import ast
import functools
import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import sympy
from sympy.core.sorting import ordered
from sympy.logic.boolalg import BooleanAtom
from torch.utils._sympy import functions
from torch.utils._sympy.numbers import int_oo

from dovetail.errors import InvalidArgument

# A size of a concatenation of two hundred symbolic parts has 10,000 characters, which is more than models have.
_MAX_CHARACTERS = 16_384
_MAX_NODES = 4_096
_MAX_DEPTH = 32

# What sympy needs to order the arguments of Max and Min grows with their square.
_MAX_COMPARED = 32
_SYMBOL_BITS = 64

# A product of 32 sizes, as a reshape of a tensor of many dimensions has.
_MAX_BITS = 2_048

# torch expands an expression in a few milliseconds up to here.
_MAX_MONOMIALS = 512

# What building an expression costs beside its characters, in characters: torch's functions look up what is known of
# their arguments, and lattice operations order theirs.
_FUNCTION_COST, _ARITHMETIC_COST = 128, 64
_LATTICE = frozenset({"Max", "Min", "And", "Or"})
_ARITHMETIC = frozenset({"Add", "Mul", "Pow"})

# Below the range of float64, so that a true division of two results cannot overflow.
_MAX_GUARD_BITS = 1_000
_MAX_INTEGER = 2**64
_SYMBOL = re.compile(r"[A-Za-z]\w*", re.ASCII)
_FLOAT = re.compile(r"-?\d{1,40}(\.\d{0,40})?(e[-+]?\d{1,3})?", re.ASCII | re.IGNORECASE)
_ARITHMETIC_CALLS = {"max": (2, 32), "min": (2, 32), "abs": (1, 1), "round": (1, 1), "int": (1, 1)}
_RESERVED = frozenset({*_ARITHMETIC_CALLS, "values", "holds", "size"})
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_BIT_OPERATORS = (ast.BitAnd, ast.BitOr, ast.BitXor, ast.RShift)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_SYMPY = (
    "Add Mul Pow Abs And Or Not Equality Unequality GreaterThan LessThan StrictGreaterThan StrictLessThan "
    "Max Min Mod floor ceiling"
)
_NAMED: dict[str, Any] = {name: getattr(sympy, name) for name in ("true", "false", "oo", "zoo", "nan")}
_NAMED["int_oo"] = int_oo
_POWERS = frozenset({"Pow", "PowByNatural", "FloatPow", "LShift", "RShift", "RoundDecimal"})


def parse_expression(
    text: str, symbols: Mapping[str, Any], spend: Callable[[int], None] = lambda cost: None
) -> Any:
    """Return the sympy expression that `srepr` wrote, over `symbols` by their names.

    Only constructors of arithmetic, comparisons and torch's functions of sizes are called, and only on what cannot make
    a large number. `spend` gets what each part costs (about a microsecond per unit) before it is built, and may raise.
    Raises InvalidArgument.
    """
    try:
        spend(len(text))
        return _Reader(symbols, spend).read(_tree(text), 0)[0]
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise InvalidArgument(f"{_shown(text)} is not an expression over sizes: {error}.") from error


def require_symbol(name: str) -> str:
    """Return the name if a symbol in a guard can have it; raise InvalidArgument otherwise."""
    if not _SYMBOL.fullmatch(name) or keyword.iskeyword(name) or name in _RESERVED or len(name) > 64:
        raise InvalidArgument(f"{_shown(name)} is not the name of a symbol.")
    return name


def require_arithmetic(text: str, symbols: Set[str]) -> None:
    """Raise InvalidArgument unless text is Python arithmetic over `symbols` that is cheap whatever their values are."""
    try:
        _guard_bits(_tree(text), symbols, 0)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{_shown(text)} is not arithmetic over sizes: {error}.") from error


def evaluate_expression(expr: Any, values: Mapping[Any, int]) -> Any:
    """Return the value of an expression for these values of symbols; raise InvalidArgument if it is not a number."""
    known: dict[Any, Any] = {symbol: sympy.Integer(value) for symbol, value in values.items()}
    for part in sympy.postorder_traversal(expr):
        if part not in known:
            known[part] = part.func(*[known[argument] for argument in part.args]) if part.args else part
            # sympy would keep an irrational value (the logarithm of a size) exact, at any cost.
            if not isinstance(known[part], (sympy.Number, BooleanAtom)):
                raise InvalidArgument(
                    f"{_shown(str(part))} is not a number for the sizes of the example inputs."
                )
    return known[expr]


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def _tree(text: str) -> ast.expr:
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters, and at most {_MAX_CHARACTERS} are read")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, MemoryError) as error:  # too many parentheses are a MemoryError
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if sum(1 for _ in ast.walk(tree)) > _MAX_NODES:
        raise ValueError(f"it has more than {_MAX_NODES} parts")
    return tree


def _integer(tree: ast.expr) -> int:
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        return -_integer(tree.operand)
    if not isinstance(tree, ast.Constant) or type(tree.value) is not int:
        raise ValueError(f"a {type(tree).__name__} is not an integer")
    if tree.value >= _MAX_INTEGER:
        raise ValueError(f"an integer of {tree.value.bit_length()} bits")
    return tree.value


@functools.cache
def _constructors() -> Mapping[str, Any]:
    """Return the constructors of expressions: torch's functions come before sympy's of the same name."""
    known = {name: getattr(sympy, name) for name in _SYMPY.split() if hasattr(sympy, name)}
    for name, value in vars(functions).items():
        if (
            isinstance(value, type)
            and issubclass(value, sympy.Basic)
            and value.__module__ == functions.__name__
        ):
            known[name] = value
    return known


class _Part(NamedTuple):
    """An expression, a bound of the bits of its value, and one of the monomials that it expands to."""

    value: Any
    bits: int
    monomials: int = 1


class _Reader:
    """Builds an expression bottom up."""

    def __init__(self, symbols: Mapping[str, Any], spend: Callable[[int], None]) -> None:
        self.symbols, self.spend = symbols, spend

    def read(self, tree: ast.expr, depth: int) -> _Part:
        if depth > _MAX_DEPTH:
            raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
        if isinstance(tree, ast.Constant) or _is_negative_constant(tree):
            return _Part(sympy.Integer(_integer(tree)), _integer(tree).bit_length())
        if isinstance(tree, ast.Name):
            if tree.id not in _NAMED:
                raise ValueError(f"{tree.id!r} is unknown")
            return _Part(_NAMED[tree.id], 1)
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
            return self._call(tree.func.id, tree, depth)
        raise ValueError(f"a {type(tree).__name__} has no place in it")

    def _call(self, name: str, tree: ast.Call, depth: int) -> _Part:
        if name == "Symbol":
            # Its assumptions are those of the symbol that stands for it.
            return _Part(self._symbol(tree), _SYMBOL_BITS)
        if name == "Float":
            return _Part(_float(tree), _SYMBOL_BITS)
        if tree.keywords:
            raise ValueError(f"{name} takes no keywords")
        if name in ("Integer", "Rational"):
            numbers = [_integer(argument) for argument in tree.args]
            if len(numbers) != (1 if name == "Integer" else 2) or (name == "Rational" and not numbers[1]):
                raise ValueError(f"{name} of {len(numbers)} numbers")
            return _Part(getattr(sympy, name)(*numbers), sum(number.bit_length() for number in numbers))
        if name not in _constructors():
            raise ValueError(f"{name!r} is unknown")
        cost = _ARITHMETIC_COST if name in _ARITHMETIC else _FUNCTION_COST
        self.spend(cost * (len(tree.args) if name in _LATTICE else 1))
        if name in ("Max", "Min") and len(tree.args) > _MAX_COMPARED:
            raise ValueError(f"{name} of more than {_MAX_COMPARED} terms")
        parts = [self.read(argument, depth + 1) for argument in tree.args]
        bits, monomials = _bounds(name, parts)
        if bits > _MAX_BITS or monomials > _MAX_MONOMIALS:
            raise ValueError(
                f"it is a number of {bits} bits or a sum of {monomials} terms, which is too much"
            )
        return _Part(_unevaluated(_constructors()[name], [part.value for part in parts]), bits, monomials)

    def _symbol(self, tree: ast.Call) -> Any:
        name = tree.args[0].value if len(tree.args) == 1 and isinstance(tree.args[0], ast.Constant) else None
        if not isinstance(name, str) or name not in self.symbols:
            raise ValueError(f"the symbol {name!r} is unknown")
        return self.symbols[name]


def _unevaluated(kind: Any, args: Sequence[Any]) -> Any:
    """Return an expression with arguments in sympy's order, so that it equals the one that was written."""
    if all(isinstance(argument, (sympy.Number, BooleanAtom)) for argument in args):
        return kind(*args)
    if kind in (sympy.And, sympy.Or):
        # Their constructors compare each argument with all others even with `evaluate=False`.
        joined: Any = sympy.Basic.__new__(kind, *ordered(set(args)))
        joined._argset = frozenset(args)
        return joined
    if kind in (sympy.Add, sympy.Mul):
        args = sorted(args, key=functools.cmp_to_key(sympy.Basic.compare))
    return kind(*args, evaluate=False)


def _is_negative_constant(tree: ast.expr) -> bool:
    return (
        isinstance(tree, ast.UnaryOp)
        and isinstance(tree.op, ast.USub)
        and isinstance(tree.operand, ast.Constant)
    )


def _float(tree: ast.Call) -> Any:
    text = tree.args[0].value if len(tree.args) == 1 and isinstance(tree.args[0], ast.Constant) else None
    if not isinstance(text, str) or not _FLOAT.fullmatch(text):
        raise ValueError("a Float without digits")
    precision = {str(k.arg): _integer(k.value) for k in tree.keywords}
    if not set(precision) <= {"precision"} or not 1 <= precision.get("precision", 53) <= 128:
        raise ValueError("a Float of that precision")
    return sympy.Float(text, **precision)


def _bounds(name: str, parts: Sequence[_Part]) -> tuple[int, int]:
    """Return bounds of the bits and of the monomials of a result, from those of its arguments."""
    bits, terms = [part.bits for part in parts], [part.monomials for part in parts]
    if name in _POWERS:
        if len(parts) != 2:
            raise ValueError(f"{name} of {len(parts)} arguments")
        exponent = parts[1].value
        if isinstance(exponent, sympy.Rational):
            if name == "Pow" and not exponent.is_Integer:
                raise ValueError("a root, which torch writes as a function of its own")
            size = int(abs(exponent)) + 1
            if name in ("LShift", "RShift"):
                return bits[0] + size, terms[0]
            return bits[0] * size, 1 if terms[0] == 1 else terms[0] ** min(size - 1, _MAX_DEPTH)
        # torch bounds what it computes of these itself.
        if name not in ("PowByNatural", "FloatPow", "LShift", "RShift"):
            raise ValueError(f"{name} with an exponent that is not a number")
        return sum(bits) + _SYMBOL_BITS, max(terms)
    if name == "Add":
        return max(bits, default=0) + len(bits), sum(terms)
    if name == "Mul":
        return sum(bits), math.prod(terms)
    return max([*bits, _SYMBOL_BITS]) + 1, max(terms, default=1)


def _guard_bits(tree: ast.expr, symbols: Set[str], depth: int) -> int:
    if depth > _MAX_DEPTH:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
    bits = _unbounded_bits(tree, symbols, depth + 1)
    if bits > _MAX_GUARD_BITS:
        raise ValueError(f"its value may have {bits} bits, and at most {_MAX_GUARD_BITS} are allowed")
    return bits


def _unbounded_bits(tree: ast.expr, symbols: Set[str], depth: int) -> int:
    def bits(part: ast.expr) -> int:
        return _guard_bits(part, symbols, depth)

    match tree:
        case ast.Constant(value=bool() | float()):
            return _SYMBOL_BITS
        case ast.Constant():
            return _integer(tree).bit_length()
        case ast.Name():
            if tree.id not in symbols:
                raise ValueError(f"the symbol {tree.id!r} is not stated by any input")
            return _SYMBOL_BITS
        case ast.UnaryOp():
            return bits(tree.operand) + 1
        case ast.BoolOp():
            return max(bits(value) for value in tree.values)
        case ast.IfExp():
            return max(bits(part) for part in (tree.test, tree.body, tree.orelse))
        case ast.Compare() if all(isinstance(op, _COMPARISONS) for op in tree.ops):
            return max(bits(part) for part in (tree.left, *tree.comparators))
        case ast.BinOp(op=ast.Pow()):
            return bits(tree.left) * (abs(_integer(tree.right)) + 1)
        case ast.BinOp(op=ast.LShift()):
            return bits(tree.left) + abs(_integer(tree.right))
        case ast.BinOp() if isinstance(tree.op, _OPERATORS + _BIT_OPERATORS):
            left, right = bits(tree.left), bits(tree.right)
            return left + right if isinstance(tree.op, ast.Mult) else max(left, right) + 1
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _ARITHMETIC_CALLS:
            fewest, most = _ARITHMETIC_CALLS[name]
            if not fewest <= len(tree.args) <= most:
                raise ValueError(f"{name} of {len(tree.args)} arguments")
            return max(bits(argument) for argument in tree.args)
        case _:
            raise ValueError(f"a {type(tree).__name__} has no place in it")
