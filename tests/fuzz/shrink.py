"""Making a failing case smaller, greedily, as long as the same property still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from .program import Asked, Case, Do, Fused, Opened, Program, Ref, Stage, Step, refs, substitute

Fails = Callable[[Case], bool]


def shrink(case: Case, fails: Fails, *, seconds: float = 20.0) -> Case:
    """The smallest case found for which `fails` still says yes; `case` itself must fail."""
    until = time.monotonic() + seconds
    before = None
    while case != before and time.monotonic() < until:
        before = case
        for simpler in (
            _without_some_steps,
            _with_simpler_stages,
            _with_simpler_units,
            _with_simpler_program,
            _without_each_step,
            _plainer,
        ):
            case = _descend(case, simpler, fails, until)
    return case


def _descend(case: Case, simpler: Callable[[Case], Iterator[Case]], fails: Fails, until: float) -> Case:
    """Take what simplifications work, going on from where the last one worked instead of from the start."""
    at = 0
    candidates = list(simpler(case))
    while at < len(candidates) and time.monotonic() < until:
        if fails(candidates[at]):
            case = candidates[at]
            candidates = list(simpler(case))
        else:
            at += 1
    return case


def _without_some_steps(case: Case) -> Iterator[Case]:
    """Without a stretch of steps, long stretches first."""
    steps = case.program.steps
    size = len(steps) // 2
    while size > 1:
        for i in range(0, len(steps), size):
            gone = _with_readers(case, {step.name for step in steps[i : i + size]})
            yield _dropped(case, gone, dict.fromkeys(gone, case.program.inputs[0][0]))
        size //= 2


def _with_readers(case: Case, gone: set[str]) -> set[str]:
    closure = set(gone)
    for step in case.program.steps:
        if closure.intersection(step.reads):
            closure.add(step.name)
    return closure


def _with_simpler_stages(case: Case) -> Iterator[Case]:
    for stages in _simpler_stages(case.stages):
        yield replace(case, stages=stages)


def _with_simpler_program(case: Case) -> Iterator[Case]:
    for program in _simpler_programs(case.program):
        yield replace(case, program=program)


def _with_simpler_units(case: Case) -> Iterator[Case]:
    """With a class of modules made simpler as programs are, or without it."""
    expressions = [o.make for p in (case.program, *(u.program for u in case.units)) for o in p.owned]
    for i, unit in enumerate(case.units):
        before, after = case.units[:i], case.units[i + 1 :]
        if not any(f"{unit.name}()" in make for make in expressions):
            yield replace(case, units=(*before, *after))
            continue
        alone = Case(unit.program)
        for simpler in (_without_some_steps, _with_simpler_program, _without_each_step):
            for smaller in simpler(alone):
                yield replace(case, units=(*before, replace(unit, program=smaller.program), *after))


def _without_each_step(case: Case) -> Iterator[Case]:
    for i in reversed(range(len(case.program.steps))):
        yield from _without_step(case, i)


def _plainer(case: Case) -> Iterator[Case]:
    if case.thorough:
        yield replace(case, thorough=False)
    if case.salt:
        yield replace(case, salt=0)
    if case.keywords:
        yield replace(case, keywords=0)
    if not case.train:
        yield replace(case, train=True)


def _simpler_stages(stages: tuple[Stage, ...]) -> Iterator[tuple[Stage, ...]]:
    for i, stage in enumerate(stages):
        yield stages[:i] + stages[i + 1 :]
        if isinstance(stage, Opened):
            continue
        if isinstance(stage, Do):
            yield from ((*stages[:i], less, *stages[i + 1 :]) for less in _simpler_steps(stage))
            continue
        if isinstance(stage, Fused):
            for j in range(len(stage.rules) if len(stage.rules) > 1 else 0):
                less = replace(stage, rules=stage.rules[:j] + stage.rules[j + 1 :])
                yield (*stages[:i], less, *stages[i + 1 :])
            if stage.options:
                yield (*stages[:i], replace(stage, options=()), *stages[i + 1 :])
            continue
        for j, asked in enumerate(stage):
            if len(stage) > 1:
                yield (*stages[:i], stage[:j] + stage[j + 1 :], *stages[i + 1 :])
            for simpler in _simpler_requests(asked):
                yield (*stages[:i], (*stage[:j], simpler, *stage[j + 1 :]), *stages[i + 1 :])


def _simpler_steps(do: Do) -> Iterator[Do]:
    for j in range(len(do.picks)):
        yield replace(do, picks=do.picks[:j] + do.picks[j + 1 :])
    for j in range(len(do.options)):
        yield replace(do, options=do.options[:j] + do.options[j + 1 :])
    if do.at:
        yield replace(do, at="")


def _simpler_requests(asked: Asked) -> Iterator[Asked]:
    for k in range(len(asked.nodes)):
        if len(asked.nodes) > 1:
            yield replace(asked, nodes=asked.nodes[:k] + asked.nodes[k + 1 :])
    if asked.escapes != "auto":
        yield replace(asked, escapes="auto")
    if isinstance(asked.escapes, dict):
        for name in asked.escapes:
            yield replace(asked, escapes={k: v for k, v in asked.escapes.items() if k != name})
    for field, default in (("attrs", None), ("version", 1), ("by_node", False), ("kind", "fused")):
        if getattr(asked, field) != default:
            yield replace(asked, **{field: default})


def _simpler_programs(program: Program) -> Iterator[Program]:
    if program.traced:
        yield replace(program, traced="")
    if program.values == "symbolic":
        yield replace(program, values="all")
    if program.values != "none":
        yield replace(program, values="none")
    if program.marks:
        yield replace(program, marks=False)
    if program.grads:
        yield replace(program, grads=False)
    used = {name for step in program.steps for name in step.reads} | {r.name for r in refs(program.output)}
    for i, (name, _) in enumerate(program.inputs):
        if name not in used and len(program.inputs) > 1:  # one is always there to stand in for a value
            yield replace(program, inputs=program.inputs[:i] + program.inputs[i + 1 :])
    for i, owned in enumerate(program.owned):
        named = any(
            s.op in ("get_attr", "call_module") and s.target.split(".")[0] == owned.name
            for s in program.steps
        )
        if not named:
            yield replace(program, owned=program.owned[:i] + program.owned[i + 1 :])
    leaves = list(dict.fromkeys(refs(program.output)))
    if len(leaves) > 1 or program.output != leaves[0]:
        for leaf in leaves:
            yield replace(program, output=leaf)
        yield replace(program, output=tuple(leaves))
        for leaf in leaves:
            yield replace(program, output=tuple(x for x in leaves if x != leaf))


def _without_step(case: Case, i: int) -> Iterator[Case]:
    """Without one step: its readers read something it read instead, or an input, or go as well."""
    step = case.program.steps[i]
    used = [s for s in case.program.steps if step.name in s.reads]
    if not used and step.name not in {r.name for r in refs(case.program.output)}:
        yield _dropped(case, {step.name}, {})
        return
    stand_ins = list(dict.fromkeys([*step.reads, case.program.inputs[0][0]]))
    for name in stand_ins:
        yield _dropped(case, {step.name}, {step.name: name})
    gone = _with_readers(case, {step.name})
    yield _dropped(case, gone, dict.fromkeys(gone, case.program.inputs[0][0]))


def _dropped(case: Case, gone: set[str], instead: dict[str, str]) -> Case:
    def to(ref: Ref) -> Ref:
        return Ref(instead.get(ref.name, ref.name))

    program = case.program
    steps = tuple(
        Step(s.name, s.op, s.target, substitute(s.args, to), substitute(s.kwargs, to))
        for s in program.steps
        if s.name not in gone
    )
    kept = tuple(k for stage in case.stages if (k := _stage_without(stage, gone)))
    output = substitute(program.output, to)
    return replace(case, program=replace(program, steps=steps, output=output), stages=kept)


def _stage_without(stage: Stage, gone: set[str]) -> Stage:
    if isinstance(stage, (Opened, Fused, Do)):
        return stage
    return tuple(kept for asked in stage if (kept := _without_names(asked, gone)).nodes)


def _without_names(asked: Asked, gone: set[str]) -> Asked:
    escapes = asked.escapes
    if isinstance(escapes, dict):
        escapes = {k: v for k, v in escapes.items() if k not in gone}
    return replace(asked, nodes=tuple(n for n in asked.nodes if n not in gone), escapes=escapes)
