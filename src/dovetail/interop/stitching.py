"""Functions of a StableHLO module put together: calls of regions become composites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from dovetail.lowering.backends.foreign import loaded


@dataclass(frozen=True)
class Signature:
    """One call of a region: the function of its body, its identity, how many operands and results it has."""

    target: str
    kind: str
    version: int
    attrs: Mapping[str, Any]
    operands: int
    results: int


@dataclass(frozen=True)
class Stitched:
    """A module with composites; `module` is torch-mlir's."""

    module: Any


def stitched(
    module: Any,
    main: str,
    calls: Mapping[str, Sequence[Signature]],
    counts: Mapping[str, int],
    arguments: Sequence[str],
    updates: Sequence[str],
) -> Stitched:
    """Put composites into a module.

    Each function takes the results of the regions it calls as its last arguments, and gives what they are called with as
    its last results, after the `counts` that are its own. In between, in its block, a composite belongs.
    """
    ir = loaded("torch_mlir.ir")
    with module.context, ir.Location.unknown():
        for function in list(module.body.operations):
            name = ir.StringAttr(function.operation.attributes["sym_name"]).value
            _put(ir, function.operation, calls[name], counts[name])
            if name == main:
                _name(ir, function.operation, arguments, updates)
            else:
                function.operation.attributes["sym_visibility"] = ir.StringAttr.get("private")
        module.operation.verify()
    return Stitched(module)


def _put(ir: Any, function: Any, calls: Sequence[Signature], count: int) -> None:
    block = function.regions[0].blocks[0]
    last = list(block.operations)[-1].operation
    handed = count
    own = len(block.arguments) - sum(call.results for call in calls)
    at = own
    for call in calls:
        standins = [block.arguments[at + i] for i in range(call.results)]
        with ir.InsertionPoint(last):
            made = ir.Operation.create(
                "stablehlo.composite",
                results=[value.type for value in standins],
                operands=[last.operands[handed + i] for i in range(call.operands)],
                attributes={
                    "name": ir.StringAttr.get(call.kind),
                    "version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), call.version),
                    "composite_attributes": _attribute(ir, call.attrs),
                    "decomposition": ir.FlatSymbolRefAttr.get(call.target),
                },
            )
        for value, result in zip(standins, made.results, strict=True):
            value.replace_all_uses_with(result)
        handed, at = handed + call.operands, at + call.results
    with ir.InsertionPoint(last):
        given = ir.Operation.create("func.return", operands=[last.operands[i] for i in range(count)])
    last.erase()
    _sort(block, given)
    for i in reversed(range(own, len(block.arguments))):
        block.erase_argument(i)
    function.attributes["function_type"] = ir.TypeAttr.get(
        ir.FunctionType.get([a.type for a in block.arguments], [v.type for v in given.operands])
    )


def _sort(block: Any, last: Any) -> None:
    """Bring operations into an order in which each comes after what it reads, as near to the old one as can be."""
    waiting = [op.operation for op in block.operations]
    number = {op: i for i, op in enumerate(waiting)}
    done: set[int] = set()

    def needs(op: Any) -> list[int]:
        found: list[int] = []
        stack = [op]
        while stack:
            one = stack.pop()
            for value in one.operands:
                owner = getattr(value.owner, "operation", value.owner)
                if owner in number:
                    found.append(number[owner])
            for region in one.regions:
                for inner in region.blocks:
                    stack.extend(o.operation for o in inner.operations)
        return found

    before = [needs(op) for op in waiting]
    for start in range(len(waiting)):
        stack = [start]
        while stack:
            i = stack[-1]
            missing = [j for j in before[i] if j not in done and j != i]
            if i in done or not missing:
                stack.pop()
                if i not in done:
                    done.add(i)
                    if waiting[i] != last:
                        waiting[i].move_before(last)
            else:
                stack.extend(reversed(missing))


def _name(ir: Any, function: Any, arguments: Sequence[str], updates: Sequence[str]) -> None:
    """Write the names of arguments and updates beside them."""
    kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    named: list[dict[str, Any]] = [{"dovetail.name": ir.StringAttr.get(name)} for name in arguments]
    function.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(n) for n in named])
    plain = len(kind.results) - len(updates)
    given: list[dict[str, Any]] = [{} for _ in range(plain)]
    given += [{"dovetail.name": ir.StringAttr.get(name)} for name in updates]
    function.attributes["res_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(n) for n in given])


def _attribute(ir: Any, value: Any) -> Any:
    """JSON as attributes: whole numbers of 64 bits, float64, text, lists, dictionaries; null is the unit."""
    if value is None:
        return ir.UnitAttr.get()
    if isinstance(value, bool):
        return ir.BoolAttr.get(value)
    if isinstance(value, int):
        kind = ir.IntegerType.get_signless(64 if abs(value) < 2**63 else 128)
        return ir.IntegerAttr.get(kind, value)
    if isinstance(value, float):
        return ir.FloatAttr.get_f64(value)
    if isinstance(value, str):
        return ir.StringAttr.get(value)
    if isinstance(value, list):
        return ir.ArrayAttr.get([_attribute(ir, one) for one in cast("list[Any]", value)])
    return ir.DictAttr.get({k: _attribute(ir, v) for k, v in cast("Mapping[str, Any]", value).items()})
