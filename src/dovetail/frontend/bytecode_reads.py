"""What Python code reads, from its bytecode: a digest of code, the names it reads, and the attributes it may read.

Used to describe what a trace depends on (`trace_dependencies`). The analysis is conservative: a name that may be read
counts as read. Where the instructions that were executed are known, only these are analyzed.
"""

from __future__ import annotations

import dataclasses
import dis
import functools
import hashlib
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from dovetail.frontend.release_code import is_release


@functools.lru_cache(maxsize=16384)
def code_digest(code: types.CodeType) -> str:
    """Return a hash of a code object and those nested in it: instructions, constants, names and lines."""
    digest = hashlib.sha256()
    for part in (
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_flags,
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_name,
        code.co_firstlineno,
        tuple(code.co_lines()),
        getattr(code, "co_exceptiontable", b""),
    ):
        digest.update(repr(part).encode())
    for constant in code.co_consts:
        digest.update(_constant_text(constant).encode())
    return digest.hexdigest()[:32]


def _constant_text(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):
        return f"frozenset{sorted(map(_constant_text, cast('frozenset[Any]', value)))}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant_text, cast('tuple[Any, ...]', value)))})"
    return f"{type(value).__name__} {value!r}"


Read = tuple[str, tuple[str, ...], bool]
_ATTRIBUTE_READS = ("LOAD_ATTR", "LOAD_METHOD")


_SKIPPED = ("CACHE", "EXTENDED_ARG")
_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)


@functools.lru_cache(maxsize=4096)
def _instructions(code: types.CodeType) -> list[dis.Instruction]:
    return [i for i in dis.get_instructions(code) if i.opname not in _SKIPPED]


Executed = Mapping[types.CodeType, frozenset[int]]
"""The offsets of the instructions of code objects that were executed; of code that is not among them, all count."""


@functools.lru_cache(maxsize=4096)
def _positions(code: types.CodeType, offsets: frozenset[int] | None) -> frozenset[int] | None:
    """Return the positions among `_instructions` that were executed, in whole basic blocks; None for all of them."""
    if offsets is None:
        return None
    executed: list[int] = []
    block: list[int] = []
    is_executed, position = False, 0
    for instruction in dis.get_instructions(code):
        if instruction.is_jump_target:
            executed += block if is_executed else ()
            block, is_executed = [], False
        is_executed |= instruction.offset in offsets
        if instruction.opname not in _SKIPPED:
            block.append(position)
            position += 1
        if instruction.opcode in _JUMPS:
            executed += block if is_executed else ()
            block, is_executed = [], False
    executed += block if is_executed else ()
    return frozenset(executed)


@functools.lru_cache(maxsize=4096)
def offsets_by_line(code: types.CodeType) -> dict[int | None, frozenset[int]]:
    """Return the offsets of the instructions on each line of code."""
    offsets: dict[int | None, set[int]] = {}
    for start, end, line in code.co_lines():
        offsets.setdefault(line, set()).update(range(start, end, 2))
    return {line: frozenset(numbers) for line, numbers in offsets.items()}


@functools.lru_cache(maxsize=16384)
def reads(code: types.CodeType, offsets: frozenset[int] | None = None) -> tuple[Read, ...]:
    """Return the names that code reads, each with the attributes read from it at once, and whether it is written.

    Modules that it imports are `import name`, with the attributes that are imported from them, or read from the local
    variable that they are bound to. With `offsets`, only the instructions there were executed.
    """
    reads: dict[Read, None] = {}
    instructions, executed = _instructions(code), _positions(code, offsets)
    for at, instruction in enumerate(instructions):
        if executed is not None and at not in executed:
            continue
        name = instruction.opname
        if name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            reads[instruction.argval, (), True] = None
        elif name in ("LOAD_GLOBAL", "LOAD_NAME"):
            reads[instruction.argval, _attributes(instructions, at + 1), False] = None
        elif name == "IMPORT_NAME":
            level, names = instructions[at - 2].argval, instructions[at - 1].argval
            dots = "." * (level if isinstance(level, int) else 0)
            for chain in _import_chains(instructions, at + 1, is_from=names is not None):
                target = instruction.argval if names is not None else instruction.argval.partition(".")[0]
                reads[f"import {dots}{target}", chain, False] = None
    return tuple(reads)


def _attributes(instructions: list[dis.Instruction], at: int) -> tuple[str, ...]:
    """Return the names of the attributes that are read one from the other from here on."""
    chain: list[str] = []
    while at < len(instructions) and instructions[at].opname in _ATTRIBUTE_READS:
        chain.append(instructions[at].argval)
        at += 1
    return tuple(chain)


def _import_chains(
    instructions: list[dis.Instruction], at: int, *, is_from: bool
) -> Iterator[tuple[str, ...]]:
    """Yield the attributes that are read from a module that was imported just before."""
    inner: tuple[str, ...] = ()
    while at < len(instructions):
        instruction = instructions[at]
        if instruction.opname == "IMPORT_FROM":
            if is_from:
                yield (instruction.argval,)
            else:
                inner = (*inner, instruction.argval)
        elif instruction.opname == "STORE_FAST" and not is_from:
            for place, use in enumerate(instructions):
                if use.opname.startswith("LOAD_FAST") and use.argval == instruction.argval:
                    yield (*inner, *_attributes(instructions, place + 1))
            return
        elif instruction.opname.startswith("STORE_") and not is_from:
            yield inner
            return
        elif not instruction.opname.startswith(("STORE_", "SWAP", "POP_TOP", "ROT_", "COPY")):
            return
        at += 1


def module_name(name: str, namespace: dict[str, Any]) -> str:
    """Return the full name of a module that code imports, perhaps by a relative one."""
    relative = name.lstrip(".")
    level = len(name) - len(relative)
    if not level:
        return relative
    package = str(namespace.get("__package__") or namespace.get("__name__", "")).split(".")
    return ".".join([*package[: len(package) - level + 1], *filter(None, [relative])])


@dataclasses.dataclass(frozen=True)
class ReadNames:
    """The names by which entered code can read attributes; with `everything` it may read any of them."""

    names: frozenset[str]
    everything: bool


def names_read(codes: Iterable[types.CodeType], executed: Executed | None = None) -> ReadNames:
    """Return the names by which code, and code nested in it, reads or writes attributes.

    Where `executed` has the instructions of code, code that is nested in it counts only if it is among `codes`.
    """
    names = set(_READ_IN_C)
    everything = False
    waiting = list(codes)
    while waiting:
        code = waiting.pop()
        offsets = executed.get(code) if executed is not None else None
        if offsets is None:
            waiting += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        names |= _names_of(code, offsets)
        everything = everything or (not is_release(code.co_filename) and reads_by_value(code, offsets))
    return ReadNames(frozenset(names), everything)


def names_in(string: str) -> Iterable[str]:
    """Return the names by which a string may address attributes: as a dotted path, or in a format string."""
    if "{" in string:
        return _NAME.findall(string)
    return string.split(".") if "." in string else ()


_NAME = re.compile(r"\w+")
_READ_IN_C = ("keys", "items")
"""The names by which Python itself reads attributes, to copy a mapping."""
_READ_ALL = frozenset(
    [
        "vars",
        "dir",
        "getmembers",
        "getmembers_static",
        "__reduce_ex__",
        "__getstate__",
        "vformat",
        "get_field",
    ]
)
_READ_ONE = frozenset(
    ["getattr", "hasattr", "getattr_static", "__getattr__", "__getattribute__", "attrgetter", "methodcaller"]
)
_WRITE_ONE = frozenset(["setattr", "delattr", "__setattr__", "__delattr__"])
_OF_OBJECT = frozenset(["getattr", "hasattr", "getattr_static", "setattr", "delattr"])
"""Functions that get an object, then the name of an attribute."""
_FORMATS = frozenset(["format", "format_map"])
"""Methods of strings, which read the attributes that the string names."""
_ACCESSORS = ("__getattr__", "__getattribute__", "__setattr__", "__delattr__")


@functools.lru_cache(maxsize=16384)
def reads_by_value(code: types.CodeType, offsets: frozenset[int] | None = None) -> bool:
    """Return whether code may read attributes whose names are not among its constants.

    With `offsets` it counts too if it may write such: what other code reads may differ afterwards.
    """
    used = {*code.co_names, *(c for c in code.co_consts if c == "__dict__")}
    by_name = _READ_ONE if offsets is None else _READ_ONE | _WRITE_ONE
    is_named = bool(used & (_READ_ALL | _FORMATS | by_name | {"__dict__"}))
    if not is_named and "MATCH_CLASS" not in _opnames(code):
        return False
    instructions, positions = _instructions(code), _positions(code, offsets)
    for at, instruction in enumerate(instructions):
        if positions is not None and at not in positions:
            continue
        if instruction.opname == "MATCH_CLASS":
            return True
        if instruction.argval == "__dict__" and not _gets_constant(instructions, at + 1):
            return True
        if instruction.opcode not in dis.hasname:
            continue
        if instruction.argval in _READ_ALL:
            return True
        is_method = instruction.opname in _ATTRIBUTE_READS and instruction.argval in _FORMATS
        if is_method and instructions[at - 1].opname != "LOAD_CONST":
            return True
        if instruction.argval in by_name and not _has_constant_name(code, instructions, at):
            return True
    return False


@functools.lru_cache(maxsize=16384)
def _opnames(code: types.CodeType) -> frozenset[str]:
    return frozenset(i.opname for i in _instructions(code))


def _gets_constant(instructions: list[dis.Instruction], at: int) -> bool:
    """Return whether what was just loaded is only asked for the value of a constant key."""
    following = [i for i in instructions[at : at + 5] if i.opname not in ("PRECALL", "CALL", "PUSH_NULL")]
    is_get = following[0].opname in _ATTRIBUTE_READS and following[0].argval == "get"
    return is_get and following[1].opname == "LOAD_CONST"


def _has_constant_name(code: types.CodeType, instructions: list[dis.Instruction], at: int) -> bool:
    """Return whether the function that an instruction loads is called with a name that is a constant.

    In a method that gives attributes on access, it may also be the name it was called with, which other code has.
    """
    function = instructions[at].argval
    argument = _argument(instructions, at, 1 if function in _OF_OBJECT else 0)
    own = code.co_varnames[:1] if function.startswith("__") else ()
    if argument is not None and argument.opname.startswith("LOAD_FAST") and argument.argval in own:
        argument = _argument(instructions, at, 1)  # a method of a class, called with the object itself
    if argument is None:
        return False
    return argument.opname == "LOAD_CONST" or _is_accessed_name(code, instructions, argument)


def _is_accessed_name(
    code: types.CodeType, instructions: list[dis.Instruction], argument: dis.Instruction
) -> bool:
    """Return whether a method that gives attributes on access loads the name it was called with.

    That may have been replaced by what a table has for it, whose values are followed like others.
    """
    if code.co_name not in _ACCESSORS or not code.co_argcount or not _accesses(argument, "LOAD_FAST"):
        return False
    name = code.co_varnames[min(1, code.co_argcount - 1)]
    if argument.argval != name:
        return False
    stores = [at for at, i in enumerate(instructions) if _accesses(i, "STORE_FAST", name)]
    if not stores:
        return True
    # A table that this code computes, or gets from other code, may have any values.
    if any(i.opname.startswith("BUILD_") for i in instructions):
        return False
    calls = sum(i.opname.startswith("CALL") for i in instructions)
    with_super = any(i.opname.startswith("LOAD_SUPER") for i in instructions)
    callees = _ACCESSORS if with_super else (*_ACCESSORS, "super")
    if calls > sum(i.opcode in dis.hasname and i.argval in callees for i in instructions):
        return False
    return all(
        instructions[at].opname == "STORE_FAST"
        and instructions[at - 1].opname == "BINARY_SUBSCR"
        and _accesses(instructions[at - 2], "LOAD_FAST", name)
        for at in stores
    )


def _accesses(instruction: dis.Instruction, opname: str, variable: str = "") -> bool:
    """Return whether an instruction loads or stores a local variable, perhaps together with another one."""
    variables = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    return instruction.opname.startswith(opname) and (not variable or variable in variables)


def _argument(instructions: list[dis.Instruction], at: int, number: int) -> dis.Instruction | None:
    """Return the instruction that loads an argument of the function loaded at `at`; None if it is computed."""
    depth, begin, is_computed = 0, 0, True
    for position in range(at + 1, len(instructions)):
        instruction = instructions[position]
        name, count = instruction.opname, instruction.arg
        if name in ("PUSH_NULL", "KW_NAMES"):
            continue
        if instruction.opcode in _JUMPS or "_KW" in name or "_EX" in name or depth < 0:
            return None
        if name in ("PRECALL", "CALL") and depth == count:
            break
        if depth == number:
            begin, is_computed = position, False
        depth += dis.stack_effect(instruction.opcode, count)
        is_computed |= position > begin and depth == number + 1
    return None if is_computed else instructions[begin]


@functools.lru_cache(maxsize=16384)
def _names_of(code: types.CodeType, offsets: frozenset[int] | None) -> frozenset[str]:
    """Return the names that code uses, and those that the strings among its constants may be."""
    if offsets is None:
        names: set[str] = set(code.co_names)
        constants = code.co_consts
    else:
        instructions, positions = _instructions(code), _positions(code, offsets)
        used = [i for at, i in enumerate(instructions) if positions is None or at in positions]
        names = {i.argval for i in used if i.opcode in dis.hasname}
        constants = [i.argval for i in used if i.opcode in dis.hasconst]
    strings = [c for c in _flat_constants(constants) if isinstance(c, str)]
    # Code that ran was found by its name, also where torch's own code did that.
    names.update(strings, (part for string in strings for part in names_in(string)), [code.co_name])
    return frozenset(names)


def _flat_constants(constants: Iterable[Any]) -> Iterator[Any]:
    for constant in constants:
        if isinstance(constant, (tuple, frozenset)):
            yield from _flat_constants(cast("tuple[Any, ...]", constant))
        else:
            yield constant
