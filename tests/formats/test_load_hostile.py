"""Files that are made to do harm: each is refused at once, whatever it claims, and costs no more than its own size."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch.utils._sympy import functions

import dovetail
from dovetail.errors import CallMismatch, InvalidArgument, InvalidFile
from dovetail.formats.archive.load import load
from dovetail.ir.symbolic_expr import evaluate_expression, parse_expression

from .saved import first_node, redescribed, refused

Change = Callable[[dict[str, Any]], Any]


def sizes_of(described: dict[str, Any]) -> list[Any]:
    """A row of a fake tensor with a symbolic size."""
    return next(
        r for r in described["values"] if isinstance(r, list) and any(isinstance(n, dict) for n in r[1])
    )


def symbol_in(described: dict[str, Any]) -> str:
    return next(iter(described["symbols"]))


def test_the_original_loads(path: Path) -> None:
    assert load(path)(torch.ones(2, 3))["out"].shape == (2, 3)


EXPRESSIONS = [
    "Pow(9, Pow(9, 9))",
    "Pow(Integer(9), Pow(Integer(9), Integer(9)))",
    "PowByNatural(Integer(9), PowByNatural(Integer(9), Integer(9)))",
    "LShift(Integer(1), Integer(99999999999))",
    "Mul(" + ", ".join(["Pow(SYMBOL, Integer(31))"] * 30) + ")",
    "Pow(Pow(Pow(SYMBOL, Integer(30)), Integer(30)), Integer(30))",
    "Equality("
    + ", ".join(["Mul(" + ", ".join([f"Add(SYMBOL, Integer({n}))" for n in range(20)]) + ")"] * 2)
    + ")",
    f"Integer({'9' * 1000})",
    f"Integer({'9' * 10**6})",
    "Float('1e999999999', precision=53)",
    "Float('1.0', precision=999999999)",
    "RoundDecimal(Float('1.0', precision=53), Integer(-999999999))",
    "(" * 10_000 + "1" + ")" * 10_000,
    "-" * 10_000 + "1",
    "Add(" * 1000 + "Integer(1)" + ")" * 1000,
    "Max(" + ", ".join(f"Integer({n})" for n in range(2000)) + ")",
    "Symbol('unknown', integer=True)",
    "Integral(SYMBOL)",
    "Function('f')(SYMBOL)",
    "sympify('1')",
    "",
    "\0",
]


@pytest.mark.parametrize("place", ["size", "stride", "offset", "value"])
@pytest.mark.parametrize("text", EXPRESSIONS, ids=range(len(EXPRESSIONS)))
def test_an_expression_that_is_none_or_too_much(path: Path, text: str, place: str) -> None:
    def change(described: dict[str, Any]) -> None:
        symbol = symbol_in(described)
        kind = "SymBool" if text.startswith("Equality") else "SymInt"
        row = {"x": [kind, text.replace("SYMBOL", f"Symbol('{symbol}', integer=True)"), [symbol]]}
        if place == "value":
            described["values"].append(row)
        elif place == "offset":
            sizes_of(described)[3] = row
        else:
            sizes_of(described)[1 if place == "size" else 2][0] = row

    refused(redescribed(path, change))


PARTS = [f"Symbol('part{n}', integer=True)" for n in range(40)]


def many(write: Callable[[int], str], count: int, kind: str = "SymInt") -> Change:
    """Values of distinct expressions over sizes, each within what one may be."""

    def change(described: dict[str, Any]) -> None:
        names = [f"part{n}" for n in range(len(PARTS))]
        described["symbols"] |= {name: [4, 2, None] for name in names}
        described["values"] += [{"x": [kind, write(n), names]} for n in range(count)]

    return change


def symbols(count: int) -> Change:
    def change(described: dict[str, Any]) -> None:
        names = [f"part{n}" for n in range(count)]
        described["symbols"] |= {name: [4, 2, None] for name in names}
        described["values"].append({"x": ["SymInt", "Integer(1)", names]})

    return change


def product(n: int) -> str:
    return f"Mul({', '.join(f'Add({part}, {n + i + 1})' for i, part in enumerate(PARTS[:9]))})"


def polynomial(n: int) -> str:
    return f"Add({', '.join(f'Mul({n + i + 2}, Pow({PARTS[i % 6]}, {i // 6 + 1}))' for i in range(29))})"


def nested(name: str, n: int) -> str:
    return f"{name}(Add(2, " * 12 + PARTS[0] + "".join(f"), {n + 200 - i})" for i in range(12))


MANY: dict[str, Change] = {
    "sums": many(lambda n: f"Add({PARTS[0]}, {n})", 12_000),
    "products": many(product, 2_000),
    "remainders": many(lambda n: f"Mod({PARTS[0]}, {n + 2})", 5_000),
    "nested remainders": many(lambda n: nested("PythonMod", n), 1_000),
    "nested divisions": many(lambda n: nested("FloorDiv", n), 1_000),
    "divided products": many(lambda n: f"FloorDiv({product(n)}, Add({PARTS[0]}, {n + 1}))", 2_000),
    "divided polynomials": many(lambda n: f"FloorDiv({polynomial(n)}, {polynomial(n + 7)})", 500),
    "maxima": many(
        lambda n: f"Max({', '.join(f'Mod({part}, {n + i + 3})' for i, part in enumerate(PARTS[:32]))})", 1_000
    ),
    "conjunctions": many(
        lambda n: f"And({', '.join(f'StrictLessThan({part}, {n})' for part in PARTS)})", 1_000, "SymBool"
    ),
    "roundings": many(
        lambda n: f"ceiling(Add({', '.join(f'floor(Mul({p}, Rational(1, {n + 2})))' for p in PARTS)}))", 500
    ),
    "roots": many(lambda n: f"Pow(Integer({2**63 + n}), Rational(1, 3))", 10_000),
    "exponentials": many(lambda n: f"floor(OpaqueUnaryFn_exp(Mul({PARTS[0]}, {10**12 + n})))", 10),
    "symbols": symbols(12_000),
}


@pytest.mark.parametrize("place", ["value", "size"])
@pytest.mark.parametrize("change", MANY.values(), ids=MANY.keys())
def test_many_expressions_that_are_each_just_within_bounds(path: Path, change: Change, place: str) -> None:
    def as_sizes(described: dict[str, Any]) -> None:
        before = len(described["values"])
        change(described)
        added = described["values"][before:]
        described["values"][before:] = [
            [before + i, [row, 3], [3, 1], 0, "float32", "cpu", False, False] for i, row in enumerate(added)
        ]

    refused(redescribed(path, change if place == "value" else as_sizes))


def test_expressions_are_read_as_they_were_written() -> None:
    """Equal to what sympy and torch simplified, order of arguments included."""
    s, t = (sympy.Symbol(name, integer=True, positive=True) for name in "st")
    for expr in (
        3 * s * t + 2 * s - 7,
        (s + 1) * (t - 1) ** 2,
        sympy.Mul(2, s + t, evaluate=False),
        functions.FloorDiv(s + 3, 2) * t,
        functions.PythonMod(s * t, 5) + functions.Mod(s, 3),
        functions.Max(1, functions.FloorDiv(s, 4) - 1, functions.Min(s, t)),
        functions.ToFloat(s) * 0.5,
        functions.TruncToInt(functions.IntTrueDiv(s, t)),
        sympy.And(s < 3, sympy.Eq(t, 4), sympy.Or(s > t, sympy.Ne(t, 7))),
        sympy.Not(sympy.Eq(functions.PythonMod(s, 8), 0)),
    ):
        parsed = parse_expression(sympy.srepr(expr), {"s": s, "t": t})
        assert (parsed, hash(parsed), str(parsed)) == (expr, hash(expr), str(expr))
        assert evaluate_expression(parsed, {s: 12, t: 4}) == expr.subs({s: 12, t: 4})


def test_a_few_of_the_same_expressions_load(path: Path) -> None:
    for change in (
        many(product, 5),
        many(lambda n: f"Mod({PARTS[0]}, {n + 2})", 20),
        many(lambda n: nested("PythonMod", n), 5),
        many(lambda n: f"FloorDiv({polynomial(n)}, {polynomial(n + 7)})", 5),
        symbols(100),
    ):
        assert load(redescribed(path, change))(torch.ones(2, 3))["out"].shape == (2, 3)


def test_ten_thousand_parameters_take_no_longer_than_other_values(path: Path) -> None:
    row = [3, [3], [1], 0, "float32", "cpu", True, True]
    changed = redescribed(path, lambda d: d["values"].extend([[900 + n, *row[1:]] for n in range(10_000)]))
    began = time.thread_time()
    load(changed)
    assert time.thread_time() - began < 2


GUARDS = [
    "9**9**9 > SYMBOL",
    "SYMBOL**99999999 > 0",
    "2**SYMBOL > 0",
    "SYMBOL << 99999999999 > 0",
    "1 << SYMBOL > 0",
    "((SYMBOL**15)**15)**15 > 0",
    "round(SYMBOL, -99999999999) > 0",
    "9" * 1000 + " > SYMBOL",
    "9" * 10**6 + " > SYMBOL",
    "(" * 1000 + "SYMBOL" + ")" * 1000,
    "not " * 5000 + "SYMBOL",
    "unknown > 0",
    "SYMBOL in SYMBOL",
    "SYMBOL @ SYMBOL",
    "max(*SYMBOL)",
    "max(SYMBOL)",
    "int(SYMBOL, base=SYMBOL)",
    "[SYMBOL for SYMBOL in SYMBOL]",
    "(SYMBOL := 1)",
    "f'{SYMBOL}'",
    "SYMBOL.__class__",
    "'a' * 9",
    "b''",
    "...",
    "1j > SYMBOL",
]


@pytest.mark.parametrize("text", GUARDS, ids=range(len(GUARDS)))
def test_a_guard_that_is_no_arithmetic_or_too_much(path: Path, text: str) -> None:
    refused(
        redescribed(path, lambda d: d["convention"]["guards"].append(text.replace("SYMBOL", symbol_in(d))))
    )


def test_guards_as_exporters_write_them(path: Path) -> None:
    for text in (
        "SYMBOL % 2 == 0 or SYMBOL > 1",
        "max(1, SYMBOL // 2) <= (3 * SYMBOL**2 - 1) / 2",
        "not SYMBOL == 7",
    ):
        changed = redescribed(
            path, lambda d, text=text: d["convention"]["guards"].append(text.replace("SYMBOL", symbol_in(d)))
        )
        assert load(changed)(torch.ones(2, 3))["out"].shape == (2, 3)


@pytest.mark.parametrize(
    "text", ["1 // (SYMBOL - 2) > 0", "int(1e308 * SYMBOL * 1e308) > 0", "(0.5 + SYMBOL) & 1 == 0"]
)
def test_a_guard_that_cannot_be_computed_is_a_mismatch(path: Path, text: str) -> None:
    changed = redescribed(
        path, lambda d: d["convention"]["guards"].append(text.replace("SYMBOL", symbol_in(d)))
    )
    with pytest.raises(CallMismatch, match="cannot be computed"):
        load(changed)(torch.ones(2, 3))


def test_the_message_about_a_guard_does_not_grow(path: Path) -> None:
    # Names that are parts of the words they are replaced by.
    def change(described: dict[str, Any]) -> None:
        convention = described["convention"]
        old = symbol_in(described)
        row = next(row for row in convention["inputs"] if row[0] == "tensor")
        row[1] = "abcdefghijklmnopqrstuvwxyz" * 4
        row[4]["t"] = [
            letter if size == old else size for letter, size in zip("sz", row[4]["t"], strict=True)
        ]
        convention["ranges"] = []
        convention["guards"] = ["s > 1000 and s > 1000 and s > 1000"]

    with pytest.raises(CallMismatch) as caught:
        load(redescribed(path, change))(torch.ones(2, 3))
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "name", ["None", "lambda", "values", "max", "size", "_shape0", "holds", "__builtins__", "ﬁ"]
)
def test_a_symbol_with_the_name_of_something_else(path: Path, name: str) -> None:
    def change(described: dict[str, Any]) -> None:
        row = next(row for row in described["convention"]["inputs"] if row[0] == "tensor")
        row[4]["t"] = [name if isinstance(size, str) else size for size in row[4]["t"]]
        described["convention"]["ranges"] = []

    refused(redescribed(path, change))


# Operators and attributes.


def calls(tag: str, name: str) -> Change:
    return lambda d: first_node(d, "call_function").__setitem__(1, {tag: name})


@pytest.mark.parametrize(
    ("tag", "name", "why"),
    [
        ("op", "aten::from_file", "opens a file by its name"),
        ("pk", "aten::from_file", "opens a file by its name"),
        ("op", "aten::save", "not an operator of tensors"),
        ("op", "aten::manual_seed", "not an operator of tensors"),
        ("op", "aten::_reshape_alias", "stays within the memory"),
        ("op", "prim::Print", "not one of torch's own"),
        ("op", "_c10d_functional::all_reduce", "not one of torch's own"),
        ("op", "profiler::_record_function_enter_new", "not one of torch's own"),
        ("ho", "print", "not on the list"),
        ("fn", "torch.from_file", "may not call"),
        ("fn", "torch.load", "may not call"),
        ("fn", "operator.attrgetter", "may not call"),
        ("fn", "operator.methodcaller", "may not call"),
        ("op", "aten::__class__", "does not have"),
        ("op", "load_library::x", "does not have"),
        ("op", "aten", "does not have"),
        ("ho", "__class__", "does not have"),
    ],
)
def test_what_a_graph_may_not_call(path: Path, tag: str, name: str, why: str) -> None:
    refused(redescribed(path, calls(tag, name)), why)


def test_an_operator_among_arguments_is_looked_at_too(path: Path) -> None:
    for written in ({"op": "aten::from_file"}, {"d": [["a", [{"op": "aten::from_file"}]]]}):
        refused(
            redescribed(
                path, lambda d, written=written: first_node(d, "call_function")[2]["t"].append(written)
            ),
            "opens a file",
        )


@pytest.mark.parametrize(
    "trust", [True, {"aten::from_file"}, ["aten::from_file.default"], {"aten"}, {"torch.ops.aten.from_file"}]
)
def test_trust_lifts_the_list(path: Path, trust: Any) -> None:
    changed = redescribed(path, calls("op", "aten::from_file"))
    refused(changed, r"load\(path, trust=\{'aten::from_file'\}\)")
    assert "from_file" in dovetail.text(load(changed, trust=trust))


def test_trust_is_of_what_it_names_alone(path: Path) -> None:
    changed = redescribed(path, calls("op", "aten::from_file"))
    for trust in (False, (), {"acme"}, {"aten::from_files"}, {"from_file"}, {"prims"}):
        with pytest.raises(InvalidFile, match="opens a file"):
            load(changed, trust=trust)
    for wrong in ("aten", {1}, [None], 3, None):
        with pytest.raises(InvalidArgument, match="trust"):
            load(path, trust=wrong)  # type: ignore[arg-type]
    # Python functions are never named by a file that is trusted.
    with pytest.raises(InvalidFile, match="may not call"):
        load(redescribed(path, calls("fn", "os.system")), trust=True)


@pytest.mark.parametrize(
    "target",
    [
        "__class__",
        "forward",
        "forward.__func__.__globals__",
        "_modules",
        "training",
        "graph",
        "linear.__dict__",
        "linear.forward",
        "code",
        "linear",
        "linear.nothing",
        "nothing.weight",
        "state_dict",
    ],
)
@pytest.mark.parametrize("op", ["get_attr", "call_module"])
def test_nodes_name_what_the_file_holds_and_nothing_else(path: Path, op: str, target: str) -> None:
    def change(described: dict[str, Any]) -> None:
        row = first_node(described, "get_attr")
        row[0], row[1] = op, target

    refused(redescribed(path, change))


@pytest.mark.parametrize(
    "method", ["apply_", "map_", "register_hook", "share_memory_", "untyped_storage", "__class__", "data_ptr"]
)
def test_methods_that_reach_beyond_tensors(path: Path, method: str) -> None:
    refused(
        redescribed(
            path, lambda d: first_node(d, "call_function").__setitem__(slice(0, 2), ["call_method", method])
        )
    )


@pytest.mark.parametrize(
    "name",
    [
        "forward",
        "training",
        "_modules",
        "__call__",
        "__class__",
        "state_dict",
        "a.b",
        "\ud800",
        "a\0",
        "x\r",
        "",
    ],
)
@pytest.mark.parametrize("table", ["modules", "parameters", "buffers", "constants"])
def test_modules_hold_nothing_in_the_place_of_something_else(path: Path, table: str, name: str) -> None:
    row = {
        "modules": [name, None],
        "parameters": [name, None],
        "buffers": [name, None, True],
        "constants": [name, 0],
    }
    refused(redescribed(path, lambda d: d["modules"][d["root"]][table].append(row[table])))
