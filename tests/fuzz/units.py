"""Models made of generated programs: classes of modules within others, as plain data and as Python source."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from random import Random
from types import ModuleType
from typing import Any

import torch
from torch import nn

from . import effects, ops
from .builder import Builder
from .generate import INPUTS, PURE, Category, draw_output, pick_category
from .program import Case, NotAProgram, Owned, Program, Ref, Step, Unit, seed

NAME = "dovetail_fuzz_model"
"""The module that classes of a model are in while it is looked at, so that a history can name them."""

MODULES = (
    "nn.Linear(3, 3)",
    "nn.Linear(3, 3)",
    "nn.Dropout(0.5)",
    "nn.BatchNorm1d(3)",
    "nn.BatchNorm1d(3).eval()",
    "nn.ReLU()",
    "nn.ReLU(inplace=True)",
    "nn.LayerNorm(3)",
    "nn.Identity()",
    "nn.GELU()",
    "nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.25), nn.ReLU(inplace=True))",
    "Tally()",
    "Tally(rebinds=True)",
)
STATE = tuple(item for item in effects.STATE if item[0] != "constant")


class Nest(Builder):
    """A program in the making that may call modules of classes made before."""

    def __init__(
        self, rng: Random, known: dict[str, tuple[Program, type[nn.Module]]], *, grads: bool
    ) -> None:
        super().__init__(rng, grads=grads)
        self.known = known

    def child(self, name: str) -> tuple[str, nn.Module]:
        """A module of a class: one that is there, a new one, one of two in a list, or another name of one."""
        there = [o for o in self.owned if o.how == "module" and f"{name}()" in o.make]
        if there and self.rng.randrange(2):
            one = self.choice(there)
            path = f"{one.name}.{self.rng.randrange(2)}" if "ModuleList" in one.make else one.name
            return path, self.root.get_submodule(path)
        own = f"p{len(self.owned)}"
        cls = self.known[name][1]
        singles = [o for o in there if "ModuleList" not in o.make]
        way = self.rng.randrange(6)
        if way == 0:
            self._own(own, f"nn.ModuleList([{name}(), {name}()])", nn.ModuleList([cls(), cls()]))
            return f"{own}.0", self.root.get_submodule(f"{own}.0")
        if way == 1 and singles:
            one = self.choice(singles)
            self._own(own, f"root.{one.name}  # {name}()", self.root.get_submodule(one.name))
        else:
            self._own(own, f"{name}()", cls())
        return own, self.root.get_submodule(own)

    def _own(self, name: str, make: str, module: nn.Module) -> None:
        self.owned.append(Owned(name, "module", make))
        self.root.add_module(name, module)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Ref | None:
        # Called by name, an operator that does not fit returns a word for it instead of raising.
        if name.startswith("__"):
            return None
        return super().method(name, *args, **kwargs)

    def call_child(self, path: str, child: nn.Module, *args: Any, **kwargs: Any) -> Ref | None:
        return self._add("call_module", path, args, kwargs, child)


def unit(b: Builder) -> None:
    """A module of one of the classes called, perhaps again at once; what it returns is taken apart."""
    assert isinstance(b, Nest)
    if not b.known:
        return
    name = b.choice(list(b.known))
    program = b.known[name][0]
    path, child = b.child(name)
    for _ in range(1 + b.chance(3)):
        given: list[tuple[str, Any]] = []
        for own, expression in program.inputs:
            like = torch.as_tensor(eval(expression, vars(ops)))
            fits = b.tensor(lambda v, like=like: v.shape == like.shape) if b.rng.randrange(4) else b.tensor()
            given.append((own, fits or b.tensor()))
        named = b.rng.randrange(len(given) + 1) if b.chance(3) else 0
        cut = len(given) - named
        result = b.call_child(path, child, *(v for _, v in given[:cut]), **dict(given[cut:]))
        if result is not None:
            _take(b, result)


def _take(b: Builder, result: Ref) -> None:
    value = b.of(result)
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, (tuple, list)):
        keys = list(range(len(value)))
    for key in keys:
        if value[key] is not None and b.rng.randrange(4):
            part = b.call("operator.getitem", result, key)
            if part is not None and isinstance(value[key], (tuple, list)):
                _take(b, part)


def small_module(b: Builder) -> None:
    x = b.tensor(lambda v: v.dim() == 2 and v.shape[-1] == 3)
    if x is not None:
        b.module(b.choice(MODULES), x)


def state(b: Builder) -> None:
    known = [o.name for o in b.owned if o.how in ("buffer", "transient", "parameter")]
    if known and b.chance(2):
        b.attr(b.choice(known))
        return
    b.attr(b.new_owned(*b.choice(STATE)).name)


def update(b: Builder) -> None:
    """A buffer written from something that was computed."""
    buffers = [o.name for o in b.owned if o.how in ("buffer", "transient")]
    owned = b.choice(buffers) if buffers else b.new_owned(*STATE[b.rng.randrange(3)]).name
    buffer = b.attr(owned)
    if buffer is None:
        return
    value = b.like(buffer)
    if value is not None and b.rng.randrange(2):
        value = b.call("torch.ops.aten.detach.default", value)
    b.call(b.choice(("torch.Tensor.add_", "torch.Tensor.copy_", "torch.Tensor.mul_")), buffer, value or 0.5)


def quiet(b: Builder) -> None:
    """Something computed without gradients."""
    x = b.tensor()
    if x is None:
        return
    if b.chance(2):
        b.call(f"quietly({b.choice(('torch.relu', 'torch.tanh', 'F.gelu', 'torch.neg'))})", x)
    else:
        b.call(f"quietly({b.choice(('torch.add', 'torch.mul', 'torch.sub'))})", x, b.like(x))


def patterned(b: Builder) -> None:
    """What the patterns of a schedule look for."""
    x = b.tensor()
    if x is None:
        return
    y = b.like(x)
    way = b.rng.randrange(4)
    if way == 0:
        result = b.call("torch.relu", x)
        b.call("torch.add", result, y) if result else None
    elif way == 1:
        result = b.call("torch.tanh", x)
        b.call("torch.mul", result, b.choice((0.5, 2.0))) if result else None
    elif way == 2:
        for _ in range(2):
            b.call("torch.relu", x)
    else:
        b.call("F.softmax", x, -1)


LEAF: dict[Category, int] = {
    **{category: 1 + weight // 3 for category, weight in PURE.items()},
    patterned: 14,
    small_module: 10,
    state: 3,
    update: 3,
    effects.write: 4,
    effects.draw: 2,
    effects.clash: 1,
    quiet: 2,
}
ROOT: dict[Category, int] = {**LEAF, unit: 60}


def draw_model(
    rng: Random, more: dict[Category, int] | None = None, inputs: Sequence[str] = INPUTS[:3]
) -> Case:
    """A model of a few classes, one within another; nothing is done to it yet. `more` are categories beside those here."""
    known: dict[str, tuple[Program, type[nn.Module]]] = {}
    units: list[Unit] = []
    grads = rng.randrange(3) == 0
    enabled, stream = torch.is_grad_enabled(), torch.get_rng_state()
    seed(1)
    try:
        for i in range(rng.randrange(4)):
            part = Unit(f"Part{i}", _draw_program(rng, known, grads=grads, most=7, more=more, inputs=inputs))
            units.append(part)
            known[part.name] = (part.program, classes(units)[part.name])
        root = _draw_program(rng, known, grads=grads, most=12, more=more, inputs=inputs)
    except NotAProgram:
        raise
    except Exception as error:  # a unit that does not even stand on its own
        raise NotAProgram(f"{type(error).__name__}: {error}") from error
    finally:
        torch.set_grad_enabled(enabled)
        torch.set_rng_state(stream)
    keywords = rng.randrange(len(root.inputs) + 1) if rng.randrange(3) == 0 else 0
    return Case(root, is_model=True, units=tuple(units), keywords=keywords, train=rng.randrange(3) > 0)


def _draw_program(
    rng: Random,
    known: dict[str, tuple[Program, type[nn.Module]]],
    *,
    grads: bool,
    most: int,
    more: dict[Category, int] | None,
    inputs: Sequence[str],
) -> Program:
    b = Nest(rng, known, grads=grads)
    b.add_input(INPUTS[0] if more is None else b.choice(inputs))
    for _ in range(rng.randrange(3)):
        b.add_input(b.choice(inputs))
    length = 2 + rng.randrange(most)
    weights = {**(ROOT if known else LEAF), **(more or {})}
    for _ in range(4 * length):
        if len(b.steps) >= length:
            break
        pick_category(rng, weights)(b)
    if b.chance(4):
        _share(b)
    return b.finish(draw_output(b))


def _share(b: Nest) -> None:
    """Let two modules that are in different ones be the same."""
    inner = [(path, type(m)) for path, m in b.root.named_modules() if "." in path]
    pairs = [
        (p, q) for p, cls in inner for q, other in inner if p < q and cls is other and not q.startswith(p)
    ]
    if pairs:
        one, other = b.choice(pairs)
        b.owned.append(Owned(_item(other), "module", f"root.{_item(one)}"))


def _item(path: str) -> str:
    """A path as Python has it."""
    first, *rest = path.split(".")
    return first + "".join(f"[{atom}]" if atom.isdigit() else f".{atom}" for atom in rest)


# Source


def source(case: Case) -> str:
    """The classes of a model as Python source; `Model` is the model's own."""
    return "\n\n\n".join("\n".join(_class(u)) for u in (*case.units, Unit("Model", case.program)))


def _class(unit: Unit) -> Iterator[str]:
    program = unit.program
    yield f"class {unit.name}(nn.Module):"
    yield "    def __init__(self):"
    yield "        super().__init__()"
    if any("root." in owned.make for owned in program.owned):
        yield "        root = self"
    for owned in program.owned:
        forms = {
            "parameter": f"self.{owned.name} = nn.Parameter({owned.make})",
            "buffer": f"self.register_buffer({owned.name!r}, {owned.make})",
            "transient": f"self.register_buffer({owned.name!r}, {owned.make}, persistent=False)",
            "module": f"self.{owned.name} = {owned.make}",
            "constant": f"self.{owned.name} = {owned.make}",
        }
        yield f"        {forms[owned.how]}"
    yield ""
    yield f"    def forward(self, {', '.join(name for name, _ in program.inputs)}):"
    for step in program.steps:
        yield f"        {step.name} = {_call(step)}"
    yield f"        return {program.output!r}"


def _call(step: Step) -> str:
    if step.op == "get_attr":
        return f"self.{step.target}"
    args = [repr(a) for a in step.args]
    callee = step.target
    if step.op == "call_method":
        callee = f"{args.pop(0)}.{step.target}"
    elif step.op == "call_module":
        callee = f"self.{_item(step.target)}"
    return f"{callee}({', '.join([*args, *(f'{k}={v!r}' for k, v in step.kwargs.items())])})"


def classes(units: list[Unit]) -> dict[str, Any]:
    return _run("\n\n\n".join("\n".join(_class(u)) for u in units))


def _run(text: str) -> dict[str, Any]:
    module = ModuleType(NAME)
    vars(module).update({k: v for k, v in vars(ops).items() if not k.startswith("__")})
    sys.modules[NAME] = module
    exec(compile(text, NAME, "exec"), vars(module))
    return vars(module)


def maker(case: Case) -> Callable[[], nn.Module]:
    """What makes the model of a case, each time an equal one."""
    cls = _run(source(case))["Model"]

    def make() -> nn.Module:
        stream = torch.get_rng_state()
        seed(7)
        try:
            model: nn.Module = cls()
        finally:
            torch.set_rng_state(stream)
        return model if case.train else model.eval()

    return make


def known_classes(case: Case) -> dict[str, Any]:
    """The classes of a model's modules by name, as they are imported now."""
    here = vars(sys.modules[NAME])
    return {unit.name: here[unit.name] for unit in case.units}


def given(case: Case, inputs: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as the model of a case is called with them."""
    cut = len(inputs) - case.keywords
    names = [name for name, _ in case.program.inputs]
    return tuple(inputs[:cut]), dict(zip(names[cut:], inputs[cut:], strict=True))
