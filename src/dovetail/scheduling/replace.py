"""Steps that put something else where a match, a region or a module stands."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.rules.patterns.match_state import Value
from dovetail.rules.patterns.pattern_rule import PatternRule
from dovetail.scheduling.call_recording import returned_by
from dovetail.scheduling.edits import ReplaceEdit, isolated
from dovetail.scheduling.finders import (
    ByModule,
    ByRegion,
    ByRule,
    PartMatch,
    PartRegion,
    below,
    finder_of,
    is_within,
)
from dovetail.scheduling.replace_module import swapped
from dovetail.scheduling.replacement_checks import (
    ABSENT,
    Operand,
    Probe,
    Replacement,
    check_fits,
    check_order,
    in_mode,
    leaves,
    own_state,
    probed,
    result_order,
    signature_of,
)
from dovetail.scheduling.resolve import (
    AddressGroup,
    grouped,
    is_path,
    keys_of,
    listed,
    resolved_paths,
    spelled_targets,
)
from dovetail.scheduling.session import ScheduleSession

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
Params = Mapping[str, Any] | None


def _fixed(params: Params, concrete_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Further arguments of a replacement, after a look at the form of both mappings."""
    for label, given in (("params", params), ("concrete_args", concrete_args)):
        if given is not None and not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"{label} is a dict by name, not a {type(given).__name__}.")
    return dict(concrete_args or {})


def replace_target(
    work: ScheduleSession,
    new: Any,
    target: Any,
    *,
    params: Params,
    concrete_args: Mapping[str, Any] | None,
    check: bool,
    name: str | None,
) -> None:
    """Put a module or function in the place of a match, a region, siblings, or the modules at some paths."""
    label = _label(new, name)
    fixed = _fixed(params, concrete_args)
    if is_path(target):
        paths = resolved_paths(work, target)
        refuse_sharing(work, new, params, paths)

        def exchange() -> None:
            _replace_modules(work, dict.fromkeys(paths, new), params, fixed, check, label)

        told = {"do": "replace", "paths": paths, "new": new, "name": label}
        told |= {"params": dict(params)} if params else {}
        told |= {"concrete_args": fixed} if fixed else {}
        work.step(lambda _: told, exchange)
        return
    items, _ = listed(target, "replace")
    refuse_sharing(work, new, params, [])

    def run() -> dict[str, Any]:
        groups = grouped(work, items, "replace")
        if len(groups) > 1:
            graphs = ", ".join(f"'{g.root or 'the model'}'" for g in groups)
            raise ScheduleError(
                f"a list is replaced by one call, and these are in several graphs ({graphs}). "
                f"Give the matches of one of them, or replace each by itself: replace_all(matches, factory)"
            )
        told = _replace_group(work, new, groups[0], params, fixed, check, label)
        return {"do": "replace", **told, "new": new, "name": label}

    work.step(lambda told: told, run)


def replace_all(
    work: ScheduleSession,
    paths: tuple[str, ...],
    what: Any,
    factory: Callable[[Any], Any],
    *,
    params: Params,
    concrete_args: Mapping[str, Any] | None,
    check: bool,
) -> list[str]:
    """Replace modules of a class, or matches, each by what a factory makes of it; returns where they are."""
    if not callable(factory):
        raise InvalidArgument(f"replace_all takes a function that makes replacements, not {factory!r}.")
    fixed = _fixed(params, concrete_args)
    if isinstance(what, type) and issubclass(what, nn.Module):
        return _replace_class(work, paths, what, factory, params, fixed, check)
    is_given = isinstance(what, (PartMatch, PartRegion)) or (
        isinstance(what, (list, tuple)) and not is_path(what)
    )
    items = listed(what if is_given else work.find(paths, finder_of(what)), "replace")[0]

    def run() -> dict[str, Any]:
        groups = grouped(work, items, "replace")
        at = spelled_targets(groups, keys_of(work, groups))
        told: dict[str, Any] = {}
        for item in items:
            new = factory(item)
            refuse_sharing(work, new, params, [])
            group = grouped(work, [item], "replace")[0]
            told = _replace_group(work, new, group, params, fixed, check, _label(new, None))
        return {"do": "replace_all", **told, "at": at, "factory": factory}

    work.step(lambda told: told, run)
    return [item.module_path if isinstance(item, PartMatch) else item.path for item in items]


def _replace_class(
    work: ScheduleSession,
    paths: tuple[str, ...],
    cls: type[nn.Module],
    factory: Callable[[nn.Module], Any],
    params: Params,
    fixed: dict[str, Any],
    check: bool,
) -> list[str]:
    found: dict[str, nn.Module] = {}
    with work.exchanged() as model:
        for path, module in model.named_modules(remove_duplicate=False):
            is_inside = bool(path) and any(is_within(path, outer) for outer in paths)
            if type(module) is cls and is_inside and not any(is_within(path, outer) for outer in found):
                found[path] = module
        # A module that the model has in two places stays one.
        made = {module: factory(module) for module in dict.fromkeys(found.values())}
    if not found:
        raise ScheduleError(
            f"no module of class {cls.__name__} is in {', '.join(p or 'the model' for p in paths)}"
        )
    seen: dict[int, nn.Module] = {}
    for old, new in made.items():
        if seen.setdefault(id(new), old) is not old:
            refuse_sharing(work, new, params, list(found))
    news = {path: made[module] for path, module in found.items()}
    label = getattr(factory, "__name__", "factory")
    label = label if label.isidentifier() else cls.__name__
    told = {"do": "replace_all", "paths": list(paths), "class": cls, "factory": factory}
    told |= {"params": dict(params)} if params else {}
    told |= {"concrete_args": fixed} if fixed else {}
    work.step(lambda _: told, lambda: _replace_modules(work, news, params, fixed, check, label))
    return list(found)


def _replace_modules(
    work: ScheduleSession,
    news: Mapping[str, Any],
    params: Params,
    fixed: dict[str, Any],
    check: bool,
    label: str,
) -> None:
    """Other modules at some paths: in the model where nothing around them is traced, else in the graph."""
    if "" in news:
        raise InvalidArgument("the model itself cannot be replaced; schedule the other model.")
    roots = {path: work.state.root_of(path) for path in news}
    outside = {path: new for path, new in news.items() if roots[path] in (None, path)}
    if outside:
        swapped(work, outside, params, fixed, check, label)
    for path, root in roots.items():
        if path in outside or root is None:
            continue
        if params:
            params = {name: _operand_name(root, path, source) for name, source in params.items()}
        for match in _calls_of(work, root, path):
            group = grouped(work, [match], "replace")[0]
            old = work.state.traces[root].module.get_submodule(below(path, root))
            _replace_group(
                work, news[path], group, params, fixed, check, label, None if check or params else old
            )


def _operand_name(root: str, path: str, source: Any) -> Any:
    """A parameter of the module at `path` as operands of a graph are called."""
    return f"{below(path, root)}.{source}".replace(".", "_") if isinstance(source, str) else source


def _calls_of(work: ScheduleSession, root: str, path: str) -> list[PartMatch]:
    """The operations of each call of a module within a traced part."""
    scope = below(path, root)
    found = work.find([root], ByModule(re.compile(f"^{re.escape(scope)}$")))
    if not found:
        closed = work.regions_holding(path)
        why = f"they are in {', '.join(closed[:4])}" if closed else found.why
        raise ScheduleError(f"no operation of '{path}' is to be found in the traced part '{root}': {why}")
    return list(found)


def _replace_group(
    work: ScheduleSession,
    new: Any,
    group: AddressGroup,
    params: Params,
    fixed: dict[str, Any],
    check: bool,
    label: str,
    old: nn.Module | None = None,
) -> dict[str, Any]:
    """Try a replacement where matches of one graph stand, and put it there; what history keeps of it.

    With `old`, the module whose call this was, the order of the operands is checked on that.
    """
    found = list(group.found)
    trace = work.state.traces[group.root]
    call = trace.calls[group.form]
    gm, region = isolated(work.state.graphs[group.root, group.form].gm, found)
    probe = probed(gm, region, call.example, trace.module)
    order = result_order(region)
    results, count = _results(work, group, probe, order)
    replacement = bound(new, _identifier(label), found, params, fixed, results)
    if old is not None:
        with in_mode(old, _is_training(work, group)):
            check_order(replace(replacement, new=old).adapter(found, region), probe)
    with in_mode(new, _is_training(work, group)):
        tells = check_fits(
            replacement.adapter(found, region),
            probe,
            label,
            count,
            values=check,
            may_write="writes" in region.effects,
        )
        told: dict[str, Any] = {
            "at": spelled_targets([group], keys_of(work, [group])),
            "siblings": len(found),
        }
        tried = replace(replacement, tells=tells)
        work.edit(ReplaceEdit(group.root, group.form, group.addresses, new=tried))
    if replacement.params:
        told["params"] = {name: spelled_operand(found, at) for name, at in replacement.params.items()}
    return told | ({"concrete_args": fixed} if fixed else {})


def _is_training(work: ScheduleSession, group: AddressGroup) -> bool:
    try:
        return work.module_at(group.found[0].module_path).training
    except AttributeError:
        return work.state.traces[group.root].module.training


def _results(
    work: ScheduleSession, group: AddressGroup, probe: Probe, order: Sequence[int]
) -> tuple[tuple[int, ...], int]:
    """Which result of a replacement each result of the matches is, and how many there are."""
    match = group.found[0]
    known = max([len(order), *(i + 1 for i in order)])
    if len(group.found) > 1 or not isinstance(match.finder, ByModule):
        declared = sum(len(m.outputs) for m in group.found)
        return tuple(range(max(known, declared))), max(known, declared)
    trace = work.state.traces[group.root]
    with work.exchanged():
        example = trace.calls[group.form].example
        # Matches of a group are as the traced part's graph has them.
        returned = [leaves(value) for value in returned_by(trace.module, match.module_path, example)]
    if len(order) == 1 and all(len(values) == 1 for values in returned):
        return (0,), 1
    reasons: list[ScheduleError] = []
    for values in returned:
        try:
            return order_of_results(group.found, probe, values, order), len(values)
        except ScheduleError as reason:
            reasons.append(reason)
    raise reasons[0]


def refuse_sharing(work: ScheduleSession, new: Any, params: Params, paths: Sequence[str]) -> None:
    """Raise if a module with weights of its own would stand in two places."""
    own = own_state(new, params or {})
    if not own:
        return
    places = [path for path, module in work.state.swaps.items() if module.__dict__ is new.__dict__]
    places += [e.root for e in work.state.edits if isinstance(e, ReplaceEdit) and e.new and e.new.new is new]
    if len(paths) > 1 or places:
        here = ", ".join(f"'{p or 'the model'}'" for p in [*places, *paths][:4])
        raise ScheduleError(
            f"one {type(new).__name__} would stand in several places ({here}), which would share its weights "
            f"({', '.join(own[:3])}). Make one for each: replace_all(what, factory), or take the weights over with `params`"
        )


def _label(new: Any, name: str | None) -> str:
    if not callable(new) or isinstance(new, type):
        what = f"the class {new.__name__}" if isinstance(new, type) else f"a {type(new).__name__}"
        raise InvalidArgument(f"replace takes a module or a function, not {what}.")
    return name or getattr(new, "__name__", type(new).__name__)


def _identifier(label: str) -> str:
    text = "".join(c if c.isalnum() else "_" for c in label).strip("_")
    return text if text and not text[0].isdigit() else f"new_{text}"


def bound(
    new: Callable[..., Any],
    label: str,
    found: Sequence[PartMatch],
    params: Mapping[str, Any] | None,
    fixed: Mapping[str, Any],
    results: tuple[int, ...],
) -> Replacement:
    """A replacement for matches. Parameters called as a pattern's arguments are theirs; else order counts."""
    taken = {name: operand_of(found, value) for name, value in (params or {}).items()}
    _require_parameters(new, taken)
    arguments = _arguments(found, set(taken.values()))
    names = _parameter_names(new)
    is_pattern = len(found) == 1 and _pattern_names(found[0]) is not None
    given: list[Operand] = []
    named: dict[str, Operand] = {}
    present = [name for name, operand in arguments.items() if operand != ABSENT]
    if is_pattern and present and all(name in names for name in present):
        named = {name: arguments[name] for name in arguments if name in names}
    else:
        only = {name for name, kind in names.items() if kind is inspect.Parameter.KEYWORD_ONLY}
        named = {name: operand for name, operand in arguments.items() if name in only}
        given = [operand for name, operand in arguments.items() if name not in only]
        while given and given[-1] == ABSENT:
            given.pop()
    free = names.keys() - named.keys() - fixed.keys() - set(list(names)[: len(given)])
    literals = tuple(name for name in found[0].literals if name in free) if is_pattern else ()
    arity = tuple(len(match.operands) for match in found)
    outputs = tuple(len(match.outputs) for match in found)
    return Replacement(new, label, tuple(given), results, arity, outputs, named, literals, taken, dict(fixed))


def _parameter_names(new: Any) -> dict[str, Any]:
    signature = signature_of(new)
    parameters = signature.parameters.values() if signature is not None else ()
    return {p.name: p.kind for p in parameters if p.kind in _NAMED}


def _require_parameters(new: Any, taken: Mapping[str, Operand]) -> None:
    if not taken:
        return
    if not isinstance(new, torch.nn.Module):
        raise InvalidArgument(
            "params are parameters of a new module; a function is called with the values themselves."
        )
    known = {**dict(new.named_parameters()), **dict(new.named_buffers())}
    for name in taken:
        if name not in known:
            raise ScheduleError(
                f"the new module has no parameter '{name}'; there are {', '.join(known) or 'none'}"
            )


def _pattern_names(match: PartMatch) -> list[str] | None:
    """The arguments of the pattern that a match is of, in order; None if it is of none."""
    if isinstance(match.finder, ByRule) and match.request is not None:
        for rule in match.finder.rules:
            if isinstance(rule, PatternRule) and rule.name == match.request.rule:
                return list(rule.parameters.operands)
    if match.request is not None and match.request.arguments:
        return list(match.request.arguments)
    if isinstance(match.finder, ByRegion) and not match.operands.keys() <= {
        value.name for value in match.operands.values() if value is not None
    }:
        return list(match.operands)
    return None


def _arguments(found: Sequence[PartMatch], taken: set[Operand]) -> dict[str, Operand]:
    """The operands to call with: a pattern's in its order, otherwise each value that is no weight, once."""
    if len(found) == 1 and (pattern := _pattern_names(found[0])) is not None:
        numbers = {name: i for i, name in enumerate(found[0].operands)}
        wanted = [name for name in pattern if name not in found[0].literals]
        named = {name: (0, numbers[name]) if name in numbers else ABSENT for name in wanted}
        return {name: operand for name, operand in named.items() if operand not in taken}
    known: dict[str, Operand] = {}
    for i, match in enumerate(found):
        for j, value in enumerate(match.operands.values()):
            is_weight = value is None or (value.node.op == "get_attr" and isinstance(value.value, Tensor))
            if value is not None and not is_weight and (i, j) not in taken:
                known.setdefault(value.name, (i, j))
    return known


def operand_of(found: Sequence[PartMatch], value: Any) -> Operand:
    """An operand of matches: as a value of one of them, or by name; `1.w` is `w` of the second."""
    if isinstance(value, Value):
        for i, match in enumerate(found):
            for j, known in enumerate(match.operands.values()):
                if known is not None and known.name == value.name:
                    return i, j
    elif isinstance(value, str):
        first, _, rest = value.partition(".")
        places = [int(first)] if rest and first.isdigit() and int(first) < len(found) else range(len(found))
        name = rest if isinstance(places, list) else value
        for i in places:
            for j, (key, known) in enumerate(found[i].operands.items()):
                if name == key or (known is not None and known.name == name):
                    return i, j
        there = dict.fromkeys(key for match in found for key in match.operands)
        raise ScheduleError(
            f"'{value}' is no operand of what is replaced; there are {', '.join(there) or 'none'}"
        )
    raise InvalidArgument(f"params takes values of the match, such as match['w'], not {value!r}.")


def spelled_operand(found: Sequence[PartMatch], operand: Operand) -> str:
    """An operand as history keeps it."""
    match, which = operand
    name = list(found[match].operands)[which]
    return name if len(found) == 1 else f"{match}.{name}"


def order_of_results(
    found: Sequence[PartMatch], probe: Probe, values: Sequence[Any], region_results: Sequence[int]
) -> tuple[int, ...]:
    """Which value that a module returned each result of its operations is, told by their numbers.

    Operations are listed as they are computed, and a module may return what they make in any order.
    """
    _, made, _ = probe.calls[0]
    outputs = [value for _, value in sorted(zip(region_results, made, strict=True), key=lambda pair: pair[0])]
    order: list[int] = []
    for value in outputs:
        same = [i for i, leaf in enumerate(values) if i not in order and _equal(leaf, value)]
        if not same:
            names = ", ".join(node.name for match in found for node in match.outputs)
            raise ScheduleError(
                f"not all of {names} are returned by '{found[0].module_path}', so that something that stands for it "
                f"would not make them"
            )
        order.append(same[0])
    return tuple(order)


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b or (type(a) is type(b) and a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return (
        bool(torch.allclose(a, b, rtol=1e-4, atol=1e-5, equal_nan=True))
        if a.is_floating_point()
        else torch.equal(a, b)
    )
