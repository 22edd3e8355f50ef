"""Steps that replace matches, regions or modules by other modules or functions, checked on recorded calls first."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.ir.module_paths import is_within
from dovetail.numerics.sample_inputs import random_inputs
from dovetail.scheduling.call_recording import (
    ModelInputs,
    RecordedCall,
    copy_tensors,
    expand_objects,
    isolated_run,
    record_results,
)
from dovetail.scheduling.edits import ReplaceEdit, isolate
from dovetail.scheduling.finders import ByModule, PartMatch, PartRegion, finder_of, relative_path
from dovetail.scheduling.install import hook_kind
from dovetail.scheduling.replacement_checks import (
    Probe,
    ProbedModule,
    bind_replacement,
    bind_results,
    check_fits,
    check_order,
    check_results,
    check_signature,
    flat_leaves,
    in_mode,
    label_of,
    operand_name,
    own_state,
    result_order,
    run_probe,
)
from dovetail.scheduling.resolve import (
    AddressGroup,
    group_by_graph,
    is_path_target,
    resolve_paths,
    target_entries,
    target_list,
)
from dovetail.scheduling.session import ScheduleSession

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplaceOptions:
    """Options of a replacement: its parameters that others replace, fixed arguments, whether values are compared."""

    params: Mapping[str, Any] | None
    concrete_args: Mapping[str, Any] | None
    check: bool

    def __post_init__(self) -> None:
        for label in ("params", "concrete_args"):
            mapping = getattr(self, label)
            if mapping is not None and not isinstance(mapping, Mapping):
                raise InvalidArgument(f"{label} is a dict by name, not a {type(mapping).__name__}.")
            # A copy: a factory may change what the caller passed.
            object.__setattr__(self, label, None if mapping is None else dict(cast("Any", mapping)))

    @property
    def fixed(self) -> dict[str, Any]:
        return dict(self.concrete_args or {})

    def entry(self) -> dict[str, Any]:
        """Return the options as they are in the history."""
        options = {"params": dict(self.params or {}), "concrete_args": self.fixed}
        return {name: values for name, values in options.items() if values}


def replace_target(
    session: ScheduleSession,
    new: Any,
    target: Any,
    options: ReplaceOptions,
    name: str | None,
) -> None:
    """Replace a match, a region, a list of matches, or the modules at some paths by a module or function."""
    label = _label(new, name)
    if is_path_target(target):
        paths = resolve_paths(session, target)
        refuse_sharing(session, new, options, paths)
        entry = {"do": "replace", "paths": paths, "new": new, "name": label, **options.entry()}
        new_modules = dict.fromkeys(paths, new)
        session.step(lambda _: entry, lambda: _replace_modules(session, new_modules, options, label))
        return
    items, _ = target_list(target, "replace")
    refuse_sharing(session, new, options, [])

    def run() -> dict[str, Any]:
        groups = group_by_graph(session, items, "replace")
        if len(groups) > 1:
            graphs = ", ".join(f"'{g.root or 'the model'}'" for g in groups)
            raise ScheduleError(
                f"a list is replaced by one call, and these are in more than one graph ({graphs}). "
                f"Give the matches of one of them, or replace each by itself: replace_all(matches, factory)"
            )
        entry = _replace_group(session, new, groups[0], options, label)
        return {"do": "replace", **entry, "new": new, "name": label}

    session.step(lambda entry: entry, run)


def replace_all(
    session: ScheduleSession,
    paths: tuple[str, ...],
    what: Any,
    factory: Callable[[Any], Any],
    options: ReplaceOptions,
) -> list[str]:
    """Replace modules of a class, or matches, each by what a factory returns for it; return their paths."""
    if not callable(factory):
        raise InvalidArgument(f"replace_all takes a function that makes replacements, not {factory!r}.")
    if isinstance(what, type) and issubclass(what, nn.Module):
        return _replace_class(session, paths, what, factory, options)
    is_match_list = isinstance(what, (PartMatch, PartRegion)) or (
        isinstance(what, (list, tuple)) and not is_path_target(what)
    )
    items = target_list(what if is_match_list else session.find(paths, finder_of(what)), "replace")[0]

    def run() -> dict[str, Any]:
        groups = group_by_graph(session, items, "replace")
        at = target_entries(session, groups)
        details: dict[str, Any] = {}
        for item in items:
            new = factory(item)
            refuse_sharing(session, new, options, [])
            group = group_by_graph(session, [item], "replace")[0]
            details = _replace_group(session, new, group, options, _label(new, None))
        return {"do": "replace_all", **details, "at": at, "factory": factory}

    session.step(lambda details: details, run)
    return [item.module_path if isinstance(item, PartMatch) else item.path for item in items]


def _replace_class(
    session: ScheduleSession,
    paths: tuple[str, ...],
    cls: type[nn.Module],
    factory: Callable[[nn.Module], Any],
    options: ReplaceOptions,
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
            refuse_sharing(session, new, options, list(targets))
    new_modules = {path: replacements[module] for path, module in targets.items()}
    label = getattr(factory, "__name__", "factory")
    label = label if label.isidentifier() else cls.__name__
    entry = {"do": "replace_all", "paths": list(paths), "class": cls, "factory": factory, **options.entry()}
    session.step(lambda _: entry, lambda: _replace_modules(session, new_modules, options, label))
    return list(targets)


def _replace_modules(
    session: ScheduleSession, new_modules: Mapping[str, Any], options: ReplaceOptions, label: str
) -> None:
    """Replace modules in the model where nothing around them is traced, else in the graph."""
    if "" in new_modules:
        raise InvalidArgument("the model itself cannot be replaced; schedule the other model.")
    roots = {path: session.state.root_of(path) for path in new_modules}
    outside = {path: new for path, new in new_modules.items() if roots[path] in (None, path)}
    if outside:
        _replace_in_model(session, outside, options, label)
    for path, root in roots.items():
        if path in outside or root is None:
            continue
        operands = {n: _operand_name(root, path, source) for n, source in (options.params or {}).items()}
        bound = replace(options, params=operands or None)
        calls = _calls_of(session, root, path)
        old = session.state.traces[root].module.get_submodule(relative_path(path, root))
        reference = None if options.check or options.params else old
        for match in calls:
            group = group_by_graph(session, [match], "replace")[0]
            _replace_group(session, new_modules[path], group, bound, label, reference)


def _operand_name(root: str, path: str, source: Any) -> Any:
    """Return the operand name of a parameter of the module at `path`, as torch.fx names it."""
    if not isinstance(source, str):
        return source
    name = f"{relative_path(path, root)}.{source}".replace(".", "_")
    return f"_{name}" if name[0].isdigit() else name


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
    options: ReplaceOptions,
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
    replacement = bind_replacement(new, _identifier(label), matches, options.params, options.fixed, results)
    if old is not None:
        with in_mode(old, _is_training(session, group)):
            check_order(replace(replacement, new=old).adapter(matches, region), probe)
    with in_mode(new, _is_training(session, group)):
        effects = check_fits(
            replacement.adapter(matches, region),
            probe,
            label,
            count,
            values=options.check,
            may_write="writes" in region.effects,
        )
        details = {"at": target_entries(session, [group]), "siblings": len(matches)}
        tried = replace(replacement, declared_effects=effects)
        session.edit(ReplaceEdit(group.root, group.form, group.addresses, new=tried))
    operands = {name: operand_name(matches, at) for name, at in replacement.params.items()}
    return details | replace(options, params=operands).entry()


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
    example = trace.calls[group.form].example

    def run(inputs: ModelInputs, probe: Probe) -> ProbedModule:
        # The module path of a grouped match is relative to the traced part.
        with session.with_replacements():
            returned = record_results(trace.module, match.module_path, inputs)
        return ProbedModule(probe.calls[0][1], [flat_leaves(value) for value in returned])

    first = run(example, probe)
    if len(order) == 1 and all(len(values) == 1 for values in first.returned):
        return (0,), 1
    binding = bind_results(group.matches, [first], order)
    if not binding.is_unique:
        gm, region = isolate(session.state.graphs[group.root, group.form].gm, list(group.matches))
        other = _other_values(example)
        try:
            second = run(other, run_probe(gm, region, other, trace.module))
            binding = bind_results(group.matches, [first, second], order)
        except Exception as error:  # a model need not take other values, such as indices or masks
            _log.debug("results of '%s' were compared on the example alone: %s", match.module_path, error)
    return binding.results, binding.count


def _other_values(example: ModelInputs) -> ModelInputs:
    """Return inputs with other values of floating point than the example."""

    def other(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.dtype.is_floating_point
        return random_inputs([leaf], seed=1)[0] if is_float else leaf

    return example.map(other)


def refuse_sharing(session: ScheduleSession, new: Any, options: ReplaceOptions, paths: Sequence[str]) -> None:
    """Raise if a module with weights of its own would be in two places."""
    own = own_state(new, options.params or {})
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


def _replace_in_model(
    session: ScheduleSession, new_modules: Mapping[str, Any], options: ReplaceOptions, label: str
) -> None:
    """Replace modules at some paths, each checked on the calls of the module there."""
    inner = [root for root in session.state.traces if any(is_within(root, path) for path in new_modules)]
    if inner:
        raise ScheduleError(
            f"'{inner[0]}' was traced, and would be lost with what it is in. Undo its steps first"
        )
    calls = session.record(new_modules)
    replacements: dict[str, nn.Module] = {}
    for path, new in new_modules.items():
        old = session.module_at(path)
        what = hook_kind(old)
        if what is not None:
            raise ScheduleError(
                f"'{path}' has a {what}, which would be lost. Remove it, or replace what is within the module"
            )
        module = _as_module(new, options.fixed)
        with in_mode(module, old.training), _shared_parameters(session, old, module, options.params):
            for call in calls[path]:
                named = {**call.example.kwargs, **options.fixed}
                check_signature(new, len(call.example.args), named, label)
                _check_call(module, old, call, path, label, options.check)
        replacements[path] = module
    session.state = replace(session.state, swaps={**session.state.swaps, **replacements})


def _check_call(
    module: nn.Module, old: nn.Module, call: RecordedCall, path: str, label: str, check: bool
) -> None:
    both = nn.ModuleList([old, module])
    with isolated_run(both), torch.no_grad():
        try:
            result = copy_tensors(call.example.copied().call(module))
        except Exception as error:
            raise ScheduleError(
                f"'{label}' does not accept the arguments of '{path}': {type(error).__name__}: {error}"
            ) from error
    expected = call.result
    if check:
        # From the same state, which both may share, and the same random numbers.
        with isolated_run(both), torch.no_grad():
            expected = call.example.copied().call(old)
    check_results(
        flat_leaves(expand_objects(result)), flat_leaves(expand_objects(expected)), label, values=check
    )


class FunctionModule(nn.Module):
    """A function as a module, with further arguments fixed."""

    def __init__(self, function: Callable[..., Any], fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self.function = function
        self.fixed = dict(fixed)

    def _get_name(self) -> str:
        return label_of(self.function)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **self.fixed, **kwargs)


def _as_module(new: Any, fixed: Mapping[str, Any]) -> nn.Module:
    if not callable(new):
        raise InvalidArgument(f"replace takes a module or a function, not a {type(new).__name__}.")
    if not isinstance(new, nn.Module):
        return FunctionModule(new, fixed)
    if not fixed:
        return new
    wrapper = _partial_module(type(new), dict(fixed))
    object.__setattr__(wrapper, "__dict__", new.__dict__)
    return wrapper


def _partial_module(cls: type[nn.Module], fixed: dict[str, Any]) -> nn.Module:
    """Return a module with arguments fixed, to which the attributes of one of the class are still to be given."""

    def forward(self: nn.Module) -> Callable[..., Any]:
        own = self.__dict__.get("forward")
        return partial(own if own is not None else cls.forward.__get__(self), **fixed)

    def reduced(self: nn.Module, protocol: Any) -> Any:
        return _partial_module, (cls, fixed), self.__dict__

    # A property takes precedence over instance attributes; torch's own classes look their forward up on the class.
    body = {"forward": property(forward), "__module__": cls.__module__, "__reduce_ex__": reduced}
    subclass = type(cls.__name__, (cls,), body)
    subclass.__qualname__ = cls.__qualname__
    return cast("nn.Module", object.__new__(subclass))


@contextmanager
def _shared_parameters(
    session: ScheduleSession, old: nn.Module, module: nn.Module, params: Mapping[str, Any] | None
) -> Generator[None]:
    """Make parameters of a new module the same objects as parameters of the model; undone if it does not fit."""
    before: list[tuple[nn.Module, str, Any]] = []
    try:
        for name, source in (params or {}).items():
            owner, _, own = name.rpartition(".")
            if name not in dict(module.named_parameters()):
                names = ", ".join(n for n, _ in module.named_parameters()) or "none"
                raise ScheduleError(f"the new module has no parameter '{name}'; there are {names}")
            value = _parameter(session, old, source)
            holder = module.get_submodule(owner)
            before.append((holder, own, holder._parameters[own]))
            holder._parameters[own] = value
        yield
    except BaseException:
        for holder, own, value in reversed(before):
            holder._parameters[own] = value
        raise


def _parameter(session: ScheduleSession, old: nn.Module, source: Any) -> nn.Parameter:
    """Return a parameter of the module that is replaced, or of the model, by name or as an object."""
    own = dict(old.named_parameters())
    if isinstance(source, str):
        parameter = own[source] if source in own else _parameter_at(session, source)
        if parameter is None:
            names = ", ".join(own) or "none"
            raise ScheduleError(f"there is no parameter '{source}'; the module that is replaced has {names}")
        return parameter
    if isinstance(source, nn.Parameter):
        with session.with_replacements() as model:
            if any(source is p for p in (*own.values(), *model.parameters())):
                return source
    raise InvalidArgument(
        f"params of a module that is replaced are its parameters, or names of them, not a {type(source).__name__}."
    )


def _parameter_at(session: ScheduleSession, path: str) -> nn.Parameter | None:
    """Return a parameter of the model by its full name."""
    owner, _, name = path.rpartition(".")
    try:
        return session.module_at(owner)._parameters.get(name)
    except AttributeError:
        return None
