"""A failing case as a script of its own: plain torch.fx, dovetail, and nothing of this package."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from . import ops
from .fusing import WRITTEN
from .program import Case, Do, Fused, Opened, Program, Stage, Step
from .units import source

_TAIL = '''
def run(gm):
    """Outputs, inputs afterwards, state afterwards, random stream, side effects."""
    torch.manual_seed(3)
    LOG.clear()
    inputs = make_inputs()
    try:
        outputs = gm(*inputs)
    finally:
        torch.set_grad_enabled(True)
    return dict(outputs=outputs, inputs=inputs, state=gm.state_dict(), random=torch.get_rng_state().sum(), log=list(LOG))


if __name__ == "__main__":
    print(dovetail.text(build()))
    result = outlined(build())
    print(dovetail.text(result))
    dovetail.check(result)
    want, got = run(build()), run(result)
    for key in want:
        same = str(want[key]) == str(got[key])
        print(key, "same" if same else f"DIFFERENT\\n  before: {want[key]}\\n  after:  {got[key]}")
    original, result = build(), outlined(build())
    back = dovetail.inline(result)
    print("inline", "same" if dovetail.text(back) == dovetail.text(original) else dovetail.diff(original, back))
'''

_MORE = {
    "dead-code": """    result.graph.eliminate_dead_code()
    result.recompile()
    print("after dead-code elimination", run(result))
""",
    "deepcopy": """    again = copy.deepcopy(result)
    print("deepcopy", dovetail.diff(result, again) or "same text", run(again))
""",
    "pickle": """    again = pickle.loads(pickle.dumps(result))
    print("pickle", dovetail.diff(result, again) or "same text", run(again))
""",
    "inline": """    for region in dovetail.regions(result, nested=True):
        for how in ({"name": region.name}, {"kind": region.kind}, {"depth": 1}):
            part = dovetail.inline(result, **how)
            dovetail.check(part)
            back = dovetail.inline(part)
            print(how, dovetail.diff(original, back) or "same text")
""",
}


def script(case: Case, which: str, words: str) -> str:
    """Python source that shows the failure by itself."""
    title = f"{which}: {words}".replace('"""', "'''").replace("\\", "/")
    if case.is_model:
        return schedule_script(case, title)
    lines = [
        f'"""{title[:1500]}"""',
        "",
        "import copy",
        "import pickle",
        "",
        *_prelude(case.program),
        "import dovetail",
        "",
        "",
        *_inputs(case.program),
        *_build(case.program),
        *_outlined(case.stages),
    ]
    tail = _TAIL.lstrip("\n")
    for word, more in _MORE.items():
        if word in which:
            tail += more
    return "\n".join(lines) + tail


def schedule_script(case: Case, title: str) -> str:
    """A model and the steps of its schedule; doing and judging them is left to this package."""
    model = "\n".join(f"# {line}".rstrip() for line in source(case).splitlines())
    steps = "".join(f"    {stage!r},\n" for stage in case.stages)
    check = "verify_capture" if case.captures else "verify_schedule"
    home = "capture_properties" if case.captures else "schedule_properties"
    programs = [case.program, *(unit.program for unit in case.units)]
    names = sorted({n for p in programs for n in (*dict(p.inputs), *(step.name for step in p.steps))})
    return (
        f'"""{title[:1500]}"""\n\n{model}\n\nimport torch\n\n'
        "from tests.fuzz.program import Case, Do, Owned, Program, Ref, Step, Unit\n"
        f"from tests.fuzz.{home} import {check}\n\n"
        f"{', '.join(names)}, = map(Ref, {names})\n"
        f"case = {replace(case, stages=())!r}\n"
        f"steps = (\n{steps})\n"
        f"print({check}(Case(**{{**vars(case), 'stages': steps}})))\n"
    )


def _prelude(program: Program) -> list[str]:
    """The imports; the calls with visible effects in full where they are used."""
    expressions = [o.make for o in program.owned] + [s.target for s in program.steps]
    own = ("dovetail_fuzz", "shout", "overwrite", "gather", "Counter", "adder", "branch")
    if any(word in each for each in expressions for word in own):
        source = inspect.getsource(ops)
        return [source[source.index("import operator") : source.index("__all__")].rstrip()]
    return [
        "import operator",
        "import torch",
        "import torch.nn.functional as F",
        "from torch import nn",
        "",
        "LOG = []",
    ]


def _inputs(program: Program) -> list[str]:
    lines = ["def make_inputs():", f"    made = [{', '.join(make for _, make in program.inputs)}]"]
    if program.grads:
        lines.append("    made = [x.requires_grad_() if x.is_floating_point() else x for x in made]")
    return [*lines, "    return made", "", ""]


def _build(program: Program) -> list[str]:
    lines = ["def build():", "    torch.manual_seed(7)", "    root = nn.Module()"]
    for owned in program.owned:
        forms = {
            "parameter": f"root.{owned.name} = nn.Parameter({owned.make})",
            "buffer": f"root.register_buffer({owned.name!r}, {owned.make})",
            "transient": f"root.register_buffer({owned.name!r}, {owned.make}, persistent=False)",
            "constant": f"root.{owned.name} = {owned.make}",
            "module": f"root.{owned.name} = {owned.make}",
        }
        lines.append(f"    {forms[owned.how]}")
    lines.append("    g = torch.fx.Graph()")
    lines += [
        f"    {name} = g.create_node('placeholder', {name!r}, name={name!r})" for name, _ in program.inputs
    ]
    lines += [f"    {_step(step)}" for step in program.steps]
    lines += [f"    g.output({program.output!r})", "    gm = torch.fx.GraphModule(root, g)", *_after(program)]
    return [*lines, "    return gm", "", ""]


def _step(step: Step) -> str:
    target = step.target if step.op == "call_function" else repr(step.target)
    kwargs = f", {step.kwargs!r}" if step.kwargs else ""
    return f"{step.name} = g.create_node({step.op!r}, {target}, {step.args!r}{kwargs}, name={step.name!r})"


_EVERY_NODE = ["    for i, n in enumerate(gm.graph.nodes):"]
_CONCRETE_VALUES = """    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(*make_inputs())"""
_SYMBOLIC_VALUES = """    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    def fake(i, x):
        sizes = [DimDynamic.DYNAMIC if d == 0 and x.dim() > 1 else DimDynamic.STATIC for d in range(x.dim())]
        context = StatelessSymbolicContext(dynamic_sizes=sizes)
        return mode.from_tensor(x, symbolic_context=context, source=ConstantSource(f"x{i}"))

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    fakes = [fake(i, x) for i, x in enumerate(make_inputs())]
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*fakes)"""


def _after(program: Program) -> list[str]:
    """What is done to the graph once it stands: traced anew, values and marks filled in."""
    if program.traced:
        return [
            "    from torch.fx.experimental.proxy_tensor import make_fx",
            f"    gm = make_fx(gm, tracing_mode={program.traced!r}, _allow_non_fake_inputs=True)(*make_inputs())",
        ]
    lines: list[str] = []
    if program.values != "none":
        lines += (_SYMBOLIC_VALUES if program.values == "symbolic" else _CONCRETE_VALUES).splitlines()
        lines += ["    torch.set_grad_enabled(True)", *_EVERY_NODE, "        n.meta.setdefault('val', None)"]
    if program.values == "some":
        lines += ["        if i % 3 == 1:", "            del n.meta['val']"]
    if program.marks:
        lines += [*_EVERY_NODE, "        n.meta['mark'] = ('other tool', i)"]
    return lines


def _outlined(stages: tuple[Stage, ...]) -> list[str]:
    lines = ["def outlined(gm):"]
    for stage in stages:
        if isinstance(stage, tuple) and any(asked.by_node for asked in stage):
            lines.append("    # found with nodes instead of their names")
        lines += ["    try:", f"        gm = {_call(stage)}"]
        lines += ["    except dovetail.DovetailError as error:", "        print(type(error).__name__, error)"]
    return [*lines, "    return gm", "", "", ""]


def _call(stage: Stage) -> str:
    if isinstance(stage, Opened):
        return f"dovetail.inline(gm, {stage.how}={stage.what!r})"
    if isinstance(stage, Fused):
        options = "".join(f", {k}={v!r}" for k, v in stage.options)
        return f"dovetail.fuse(gm, [{', '.join(WRITTEN[r] for r in stage.rules)}]{options})"
    if isinstance(stage, Do):
        raise TypeError("a step of a schedule has a script of its own")
    each = [_arguments(asked.nodes, vars(asked)) for asked in stage]
    if len(each) == 1:
        return f"dovetail.outline(gm, {each[0]})"
    return f"dovetail.outline(gm, [{', '.join(f'dovetail.Request({a})' for a in each)}])"


def _arguments(nodes: tuple[str, ...], facts: dict[str, Any]) -> str:
    defaults = {"version": 1, "attrs": None, "escapes": "auto"}
    more = [f"{k}={facts[k]!r}" for k, default in defaults.items() if facts[k] != default]
    return ", ".join([repr(list(nodes)), f"kind={facts['kind']!r}", *more])
