"""Steps that replace matches, regions or modules, and the binding of operands to the arguments of a replacement."""

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
from dovetail.scheduling.call_recording import record_results
from dovetail.scheduling.edits import ReplaceEdit, isolate
from dovetail.scheduling.finders import (
    ByModule,
    ByRegion,
    ByRule,
    PartMatch,
    PartRegion,
    finder_of,
    is_within,
    relative_path,
)
from dovetail.scheduling.replace_module import replace_modules
from dovetail.scheduling.replacement_checks import (
    ABSENT,
    Operand,
    Probe,
    Replacement,
    check_fits,
    check_order,
    flat_leaves,
    in_mode,
    own_state,
    result_order,
    run_probe,
    signature_of,
)
from dovetail.scheduling.resolve import (
    AddressGroup,
    body_keys,
    group_by_graph,
    is_path_target,
    resolve_paths,
    target_entries,
    target_list,
)
from dovetail.scheduling.session import ScheduleSession

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
Params = Mapping[str, Any] | None


def _checked_arguments(params: Params, concrete_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fixed arguments of a replacement; raise unless both are mappings."""
    for label, mapping in (("params", params), ("concrete_args", concrete_args)):
        if mapping is not None and not isinstance(mapping, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"{label} is a dict by name, not a {type(mapping).__name__}.")
    return dict(concrete_args or {})


def replace_target(
    session: ScheduleSession,
    new: Any,
    target: Any,
    *,
    params: Params,
    concrete_args: Mapping[str, Any] | None,
    check: bool,
    name: str | None,
) -> None:
    """Replace a match, a region, a list of matches, or the modules at some paths by a module or function."""
    label = _label(new, name)
    fixed = _checked_arguments(params, concrete_args)
    if is_path_target(target):
        paths = resolve_paths(session, target)
        refuse_sharing(session, new, params, paths)

        def exchange() -> None:
            _replace_modules(session, dict.fromkeys(paths, new), params, fixed, check, label)

        entry = {"do": "replace", "paths": paths, "new": new, "name": label}
        entry |= {"params": dict(params)} if params else {}
        entry |= {"concrete_args": fixed} if fixed else {}
        session.step(lambda _: entry, exchange)
        return
    items, _ = target_list(target, "replace")
    refuse_sharing(session, new, params, [])

    def run() -> dict[str, Any]:
        groups = group_by_graph(session, items, "replace")
        if len(groups) > 1:
            graphs = ", ".join(f"'{g.root or 'the model'}'" for g in groups)
            raise ScheduleError(
                f"a list is replaced by one call, and these are in more than one graph ({graphs}). "
                f"Give the matches of one of them, or replace each by itself: replace_all(matches, factory)"
            )
        entry = _replace_group(session, new, groups[0], params, fixed, check, label)
        return {"do": "replace", **entry, "new": new, "name": label}

    session.step(lambda entry: entry, run)


def replace_all(
    session: ScheduleSession,
    paths: tuple[str, ...],
    what: Any,
    factory: Callable[[Any], Any],
    *,
    params: Params,
    concrete_args: Mapping[str, Any] | None,
    check: bool,
) -> list[str]:
    """Replace modules of a class, or matches, each by what a factory returns for it; return their paths."""
    if not callable(factory):
        raise InvalidArgument(f"replace_all takes a function that makes replacements, not {factory!r}.")
    fixed = _checked_arguments(params, concrete_args)
    if isinstance(what, type) and issubclass(what, nn.Module):
        return _replace_class(session, paths, what, factory, params, fixed, check)
    is_match_list = isinstance(what, (PartMatch, PartRegion)) or (
        isinstance(what, (list, tuple)) and not is_path_target(what)
    )
    items = target_list(what if is_match_list else session.find(paths, finder_of(what)), "replace")[0]

    def run() -> dict[str, Any]:
        groups = group_by_graph(session, items, "replace")
        at = target_entries(groups, body_keys(session, groups))
        details: dict[str, Any] = {}
        for item in items:
            new = factory(item)
            refuse_sharing(session, new, params, [])
            group = group_by_graph(session, [item], "replace")[0]
            details = _replace_group(session, new, group, params, fixed, check, _label(new, None))
        return {"do": "replace_all", **details, "at": at, "factory": factory}

    session.step(lambda details: details, run)
    return [item.module_path if isinstance(item, PartMatch) else item.path for item in items]


def _replace_class(
    session: ScheduleSession,
    paths: tuple[str, ...],
    cls: type[nn.Module],
    factory: Callable[[nn.Module], Any],
    params: Params,
    fixed: dict[str, Any],
    check: bool,
) -> list[str]:
    targets: dict[str, nn.Module] = {}
    with session.with_replacements() as model:
        for path, module in model.named_modules(remove_duplicate=False):
            is_inside = bool(path) and any(is_within(path, outer) for outer in paths)
            if type(module) is cls and is_inside and not any(is_within(path, outer) for outer in targets):
                targets[path] = module
        # A module with two paths stays one module.
        replacements = {module: factory(module) for module in dict.fromkeys(targets.values())}
    if not targets:
        raise ScheduleError(
            f"no module of class {cls.__name__} is in {', '.join(p or 'the model' for p in paths)}"
        )
    owners: dict[int, nn.Module] = {}
    for old, new in replacements.items():
        if owners.setdefault(id(new), old) is not old:
            refuse_sharing(session, new, params, list(targets))
    new_modules = {path: replacements[module] for path, module in targets.items()}
    label = getattr(factory, "__name__", "factory")
    label = label if label.isidentifier() else cls.__name__
    entry = {"do": "replace_all", "paths": list(paths), "class": cls, "factory": factory}
    entry |= {"params": dict(params)} if params else {}
    entry |= {"concrete_args": fixed} if fixed else {}
    session.step(lambda _: entry, lambda: _replace_modules(session, new_modules, params, fixed, check, label))
    return list(targets)


def _replace_modules(
    session: ScheduleSession,
    new_modules: Mapping[str, Any],
    params: Params,
    fixed: dict[str, Any],
    check: bool,
    label: str,
) -> None:
    """Replace modules in the model where nothing around them is traced, else in the graph."""
    if "" in new_modules:
        raise InvalidArgument("the model itself cannot be replaced; schedule the other model.")
    roots = {path: session.state.root_of(path) for path in new_modules}
    outside = {path: new for path, new in new_modules.items() if roots[path] in (None, path)}
    if outside:
        replace_modules(session, outside, params, fixed, check, label)
    for path, root in roots.items():
        if path in outside or root is None:
            continue
        if params:
            params = {name: _operand_name(root, path, source) for name, source in params.items()}
        for match in _calls_of(session, root, path):
            group = group_by_graph(session, [match], "replace")[0]
            old = session.state.traces[root].module.get_submodule(relative_path(path, root))
            _replace_group(
                session,
                new_modules[path],
                group,
                params,
                fixed,
                check,
                label,
                None if check or params else old,
            )


def _operand_name(root: str, path: str, source: Any) -> Any:
    """Return the operand name of a parameter of the module at `path`."""
    return f"{relative_path(path, root)}.{source}".replace(".", "_") if isinstance(source, str) else source


def _calls_of(session: ScheduleSession, root: str, path: str) -> list[PartMatch]:
    """Return the operations of each call of a module within a traced part."""
    scope = relative_path(path, root)
    matches = session.find([root], ByModule(re.compile(f"^{re.escape(scope)}$")))
    if not matches:
        closed = session.regions_holding(path)
        why = f"they are in {', '.join(closed[:4])}" if closed else matches.why
        raise ScheduleError(f"the traced part '{root}' has no operation of '{path}': {why}")
    return list(matches)


def _replace_group(
    session: ScheduleSession,
    new: Any,
    group: AddressGroup,
    params: Params,
    fixed: dict[str, Any],
    check: bool,
    label: str,
    old: nn.Module | None = None,
) -> dict[str, Any]:
    """Check a replacement of matches in one graph and apply it; return its entry in the history.

    With `old`, the module whose call this was, the order of the operands is checked against it.
    """
    matches = list(group.matches)
    trace = session.state.traces[group.root]
    call = trace.calls[group.form]
    gm, region = isolate(session.state.graphs[group.root, group.form].gm, matches)
    probe = run_probe(gm, region, call.example, trace.module)
    order = result_order(region)
    results, count = _results(session, group, probe, order)
    replacement = bind_replacement(new, _identifier(label), matches, params, fixed, results)
    if old is not None:
        with in_mode(old, _is_training(session, group)):
            check_order(replace(replacement, new=old).adapter(matches, region), probe)
    with in_mode(new, _is_training(session, group)):
        effects = check_fits(
            replacement.adapter(matches, region),
            probe,
            label,
            count,
            values=check,
            may_write="writes" in region.effects,
        )
        details: dict[str, Any] = {
            "at": target_entries([group], body_keys(session, [group])),
            "siblings": len(matches),
        }
        tried = replace(replacement, declared_effects=effects)
        session.edit(ReplaceEdit(group.root, group.form, group.addresses, new=tried))
    if replacement.params:
        details["params"] = {name: operand_name(matches, at) for name, at in replacement.params.items()}
    return details | ({"concrete_args": fixed} if fixed else {})


def _is_training(session: ScheduleSession, group: AddressGroup) -> bool:
    try:
        return session.module_at(group.matches[0].module_path).training
    except AttributeError:
        return session.state.traces[group.root].module.training


def _results(
    session: ScheduleSession, group: AddressGroup, probe: Probe, order: Sequence[int]
) -> tuple[tuple[int, ...], int]:
    """Return which result of a replacement each result of the matches is, and how many it must have."""
    match = group.matches[0]
    count = max([len(order), *(i + 1 for i in order)])
    if len(group.matches) > 1 or not isinstance(match.finder, ByModule):
        declared = sum(len(m.outputs) for m in group.matches)
        return tuple(range(max(count, declared))), max(count, declared)
    trace = session.state.traces[group.root]
    with session.with_replacements():
        example = trace.calls[group.form].example
        # The module path of a grouped match is relative to the traced part.
        returned = [flat_leaves(value) for value in record_results(trace.module, match.module_path, example)]
    if len(order) == 1 and all(len(values) == 1 for values in returned):
        return (0,), 1
    reasons: list[ScheduleError] = []
    for values in returned:
        try:
            return result_permutation(group.matches, probe, values, order), len(values)
        except ScheduleError as reason:
            reasons.append(reason)
    raise reasons[0]


def refuse_sharing(session: ScheduleSession, new: Any, params: Params, paths: Sequence[str]) -> None:
    """Raise if a module with weights of its own would be in two places."""
    own = own_state(new, params or {})
    if not own:
        return
    places = [path for path, module in session.state.swaps.items() if module.__dict__ is new.__dict__]
    places += [
        e.root for e in session.state.edits if isinstance(e, ReplaceEdit) and e.new and e.new.new is new
    ]
    if len(paths) > 1 or places:
        shown = ", ".join(f"'{p or 'the model'}'" for p in [*places, *paths][:4])
        raise ScheduleError(
            f"one {type(new).__name__} would be in more than one place ({shown}), which would share its weights "
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


def bind_replacement(
    new: Callable[..., Any],
    label: str,
    matches: Sequence[PartMatch],
    params: Mapping[str, Any] | None,
    fixed: Mapping[str, Any],
    results: tuple[int, ...],
) -> Replacement:
    """Bind the operands of matches to a replacement: by the names of a pattern's arguments, else by position."""
    bound_params = {name: operand_of(matches, value) for name, value in (params or {}).items()}
    _require_parameters(new, bound_params)
    arguments = _arguments(matches, set(bound_params.values()))
    names = _parameter_names(new)
    is_pattern = len(matches) == 1 and _pattern_names(matches[0]) is not None
    positional: list[Operand] = []
    named: dict[str, Operand] = {}
    present = [name for name, operand in arguments.items() if operand != ABSENT]
    if is_pattern and present and all(name in names for name in present):
        named = {name: arguments[name] for name in arguments if name in names}
    else:
        only = {name for name, kind in names.items() if kind is inspect.Parameter.KEYWORD_ONLY}
        named = {name: operand for name, operand in arguments.items() if name in only}
        positional = [operand for name, operand in arguments.items() if name not in only]
        while positional and positional[-1] == ABSENT:
            positional.pop()
    free = names.keys() - named.keys() - fixed.keys() - set(list(names)[: len(positional)])
    literals = tuple(name for name in matches[0].literals if name in free) if is_pattern else ()
    arity = tuple(len(match.operands) for match in matches)
    outputs = tuple(len(match.outputs) for match in matches)
    return Replacement(
        new, label, tuple(positional), results, arity, outputs, named, literals, bound_params, dict(fixed)
    )


def _parameter_names(new: Any) -> dict[str, Any]:
    signature = signature_of(new)
    parameters = signature.parameters.values() if signature is not None else ()
    return {p.name: p.kind for p in parameters if p.kind in _NAMED}


def _require_parameters(new: Any, bound_params: Mapping[str, Operand]) -> None:
    if not bound_params:
        return
    if not isinstance(new, torch.nn.Module):
        raise InvalidArgument(
            "params are parameters of a new module; a function is called with the values themselves."
        )
    state = {**dict(new.named_parameters()), **dict(new.named_buffers())}
    for name in bound_params:
        if name not in state:
            raise ScheduleError(
                f"the new module has no parameter '{name}'; there are {', '.join(state) or 'none'}"
            )


def _pattern_names(match: PartMatch) -> list[str] | None:
    """Return the arguments of the pattern of a match, in order; None without a pattern."""
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


def _arguments(matches: Sequence[PartMatch], bound: set[Operand]) -> dict[str, Operand]:
    """Return the operands to call with: a pattern's in its order, otherwise each value except weights, once."""
    if len(matches) == 1 and (pattern := _pattern_names(matches[0])) is not None:
        numbers = {name: i for i, name in enumerate(matches[0].operands)}
        names = [name for name in pattern if name not in matches[0].literals]
        named = {name: (0, numbers[name]) if name in numbers else ABSENT for name in names}
        return {name: operand for name, operand in named.items() if operand not in bound}
    arguments: dict[str, Operand] = {}
    for i, match in enumerate(matches):
        for j, value in enumerate(match.operands.values()):
            is_weight = value is None or (value.node.op == "get_attr" and isinstance(value.value, Tensor))
            if value is not None and not is_weight and (i, j) not in bound:
                arguments.setdefault(value.name, (i, j))
    return arguments


def operand_of(matches: Sequence[PartMatch], value: Any) -> Operand:
    """Return the operand of matches that is a value of one, or has a name; `1.w` is `w` of the second."""
    if isinstance(value, Value):
        for i, match in enumerate(matches):
            for j, operand in enumerate(match.operands.values()):
                if operand is not None and operand.name == value.name:
                    return i, j
    elif isinstance(value, str):
        first, _, rest = value.partition(".")
        places = (
            [int(first)] if rest and first.isdigit() and int(first) < len(matches) else range(len(matches))
        )
        name = rest if isinstance(places, list) else value
        for i in places:
            for j, (key, operand) in enumerate(matches[i].operands.items()):
                if name == key or (operand is not None and operand.name == name):
                    return i, j
        operands = dict.fromkeys(key for match in matches for key in match.operands)
        raise ScheduleError(
            f"'{value}' is not an operand of what is replaced; the operands are {', '.join(operands) or 'none'}"
        )
    raise InvalidArgument(f"params takes values of the match, such as match['w'], not {value!r}.")


def operand_name(matches: Sequence[PartMatch], operand: Operand) -> str:
    """Return the name of an operand in the history."""
    match, which = operand
    name = list(matches[match].operands)[which]
    return name if len(matches) == 1 else f"{match}.{name}"


def result_permutation(
    matches: Sequence[PartMatch], probe: Probe, values: Sequence[Any], region_results: Sequence[int]
) -> tuple[int, ...]:
    """Return which value that a module returned each result of its operations is, by comparing values.

    Results are in the order of computation, and a module may return them in any order.
    """
    _, results, _ = probe.calls[0]
    outputs = [
        value for _, value in sorted(zip(region_results, results, strict=True), key=lambda pair: pair[0])
    ]
    order: list[int] = []
    for value in outputs:
        same = [i for i, leaf in enumerate(values) if i not in order and _equal(leaf, value)]
        if not same:
            names = ", ".join(node.name for match in matches for node in match.outputs)
            raise ScheduleError(
                f"not all of {names} are returned by '{matches[0].module_path}', so that a replacement would not return them"
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
