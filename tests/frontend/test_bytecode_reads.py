"""Which code reads attributes by names that are not among its constants."""

import types

import pytest

from dovetail.frontend.bytecode_reads import reads_by_value

CONSTANT = r"""
def f(c): return getattr(c, "a")
def f(c): return getattr(c.x.y, "a", None)
def f(c): return getattr(c.f(1), "a", c.f(2)) or hasattr(c, "b")
def f(c, x): return getattr(c, "a", x + 1)
def f(c): return operator.attrgetter("a.b")(c)
def f(c): return g(getattr(c, "a"), 3)
def f(c): return super().__getattribute__("__dict__").get("a")
def __getattribute__(c, key): return super().__getattribute__(key)
def __getattribute__(c, key):\n    if key in NAMES: key = NAMES[key]\n    return super().__getattribute__(key)
def __getattribute__(c, key): return object.__getattribute__(c, key)
def f(c): return object.__getattribute__(c, "a")
def f(c): return "{0.a}".format(c)
def f(c): return format(c, "x")
def __getattr__(c, key):\n    try: return super().__getattr__(key)\n    except AttributeError: return getattr(c.inner, key)
"""
COMPUTED = r"""
def f(c, k): return getattr(c, k)
def f(c, k): return getattr(c, "a" + k)
def f(c, k): return getattr(c, "a" + k, None)
def f(c): return getattr(c, "a".upper())
def f(c, k): return getattr(c, "a" if k else "b")
def f(c, k): return getattr(c, f"a{k}")
def f(c, k): return getattr(c, k[1:], "a")
def f(c, k): return getattr(*k)
def f(c, k): return getattr(c, -k)
def f(c, k): return [getattr(c, n) for n in k]
def f(c, k): return functools.reduce(getattr, k, c)
def f(c, k): return operator.attrgetter(k)(c)
def f(c): return vars(c)
def f(c): return getattr(c, "__dict__")
def f(c): return c.__dict__["a"]
def f(c):\n    match c:\n        case C(v): return v
def __getattr__(c, k): return getattr(c.inner, "_" + k)
def __getattr__(c, k):\n    k = "_" + k\n    return getattr(c.inner, k)
def __getattribute__(c, k):\n    k = "_" + k\n    return object.__getattribute__(c, k)
def __getattribute__(c, k): return object.__getattribute__(c, "_" + k)
def __getattr__(c, k):\n    k = g(k)\n    return object.__getattribute__(c, k)
def __getattr__(c, k):\n    n = g(k)\n    return object.__getattribute__(c, n)
def __getattribute__(c, k):\n    k = g(k)[k]\n    return object.__getattribute__(c, k)
def __getattribute__(c, k):\n    k = {k: g}[k]\n    return object.__getattribute__(c, k)
def f(c, k): return c.__getattr__(k)
def f(c, k): return k.format(c)
def f(c, k): return str.format("{0." + k + "}", c)
def f(c, k): return ("{c." + k + "}").format_map({"c": c})
def f(c, k): return string.Formatter().vformat(k, (c,), {})
def f(c, k): return string.Formatter().get_field(k, (c,), {})
"""
WRITTEN_BY_CONSTANT = r"""
def f(c): setattr(c, "a", 1)
def f(c): object.__setattr__(c, "a", 1)
def __setattr__(c, k, v): super().__setattr__(k, v)
def __setattr__(c, k, v): object.__setattr__(c, k, v)
def __delattr__(c, k): object.__delattr__(c, k)
"""
WRITTEN_BY_COMPUTED = r"""
def f(c, k): setattr(c, k, 1)
def f(c, k): delattr(c, "a" + k)
def f(c, k): object.__setattr__(c, k, 1)
def __setattr__(c, k, v): super().__setattr__("_" + k, v)
"""


def computes(source: str, *, is_executed: bool = False) -> bool:
    """Return whether a function, or one inside of it, reads or, if executed, writes attributes by names that it computes."""
    waiting = [compile(source.replace("\\n", "\n"), "/models/model.py", "exec")]
    while waiting:
        code = waiting.pop()
        if reads_by_value(code, frozenset(range(len(code.co_code))) if is_executed else None):
            return True
        waiting += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return False


@pytest.mark.parametrize("source", CONSTANT.strip().splitlines())
def test_names_that_are_constants(source: str) -> None:
    assert not computes(source)


@pytest.mark.parametrize("source", COMPUTED.strip().splitlines())
def test_names_that_are_computed(source: str) -> None:
    assert computes(source)


@pytest.mark.parametrize("source", WRITTEN_BY_CONSTANT.strip().splitlines())
def test_written_names_that_are_constants(source: str) -> None:
    assert not computes(source, is_executed=True)


@pytest.mark.parametrize("source", WRITTEN_BY_COMPUTED.strip().splitlines())
def test_written_names_that_are_computed(source: str) -> None:
    assert computes(source, is_executed=True)
    # Who only compares with another process need not know what is written.
    assert not computes(source)
