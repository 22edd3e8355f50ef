"""Generated programs as plain data: easy to build anew, to make smaller, and to print as a script."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node

from . import ops
from .values import annotate


class NotAProgram(Exception):
    """The program itself cannot be built or run, so nothing follows from it."""


@dataclass(frozen=True)
class Ref:
    """An argument that is the value of an earlier step. Printed as the variable a script has for it."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Step:
    """One node. The target of a call_function is a Python expression; its value is looked up when built."""

    name: str
    op: str
    target: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def reads(self) -> list[str]:
        return [ref.name for ref in refs((self.args, self.kwargs))]


@dataclass(frozen=True)
class Owned:
    """Something the module owns: a parameter, buffer, constant or child, and the expression that makes it."""

    name: str
    how: str  # "parameter", "buffer", "transient" (a buffer that is not saved), "constant" or "module"
    make: str


@dataclass(frozen=True)
class Program:
    """A graph, what its module owns, and the inputs to run it with."""

    inputs: tuple[tuple[str, str], ...]
    owned: tuple[Owned, ...]
    steps: tuple[Step, ...]
    output: Any
    values: str = "none"  # meta["val"]: "none", "all", "some" or "symbolic"
    traced: str = ""  # a make_fx tracing mode: the graph is traced anew
    marks: bool = False  # stack traces and other meta on the nodes
    grads: bool = False  # whether float inputs require gradients


@dataclass(frozen=True)
class Asked:
    """One request, by names: what `dovetail.Request` is made from."""

    nodes: tuple[str, ...]
    kind: str = "fused"
    version: int = 1
    attrs: dict[str, Any] | None = None
    escapes: str | dict[str, str] = "auto"
    by_node: bool = False  # given as Node objects instead of names


@dataclass(frozen=True)
class Opened:
    """Regions to be inlined before going on: `how` is "name", "kind" or "depth"."""

    how: str
    what: str | int


@dataclass(frozen=True)
class Fused:
    """Rules by their names in `fusing.RULES`, and options of `fuse`."""

    rules: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Do:
    """A step on a schedule: what, in which parts, on which of what is found there (all if none is picked)."""

    what: str
    at: str = ""
    find: str = ""
    picks: tuple[int, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


Stage = tuple[Asked, ...] | Opened | Fused | Do


@dataclass(frozen=True)
class Unit:
    """A class of modules: its forward is a program, which calls units before it as children."""

    name: str
    program: Program


@dataclass(frozen=True)
class Case:
    """A program and what is done to it: each stage takes the result of the one before."""

    program: Program
    stages: tuple[Stage, ...] = ()
    thorough: bool = False  # also copy, pickle and inline in part
    salt: int = 0  # decides the choices that a property makes
    is_model: bool = False  # the program is the forward of a model, to be scheduled or captured
    captures: bool = False  # the model is captured and compared with itself
    units: tuple[Unit, ...] = ()  # classes of the model's modules
    keywords: int = 0  # how many of the last inputs the model is given by name
    train: bool = True


def refs(value: Any) -> Iterator[Ref]:
    """Every reference in an argument, in order."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Ref):
            yield item
        elif isinstance(item, (tuple, list)):
            stack.extend(reversed(item))
        elif isinstance(item, dict):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, slice):
            stack.extend((item.step, item.stop, item.start))


def substitute(value: Any, to: Callable[[Ref], Any]) -> Any:
    """An argument with each reference replaced."""
    if isinstance(value, Ref):
        return to(value)
    if isinstance(value, (tuple, list)):
        return type(value)(substitute(v, to) for v in value)
    if isinstance(value, dict):
        return {k: substitute(v, to) for k, v in value.items()}
    if isinstance(value, slice):
        return slice(*(substitute(v, to) for v in (value.start, value.stop, value.step)))
    return value


@functools.cache
def _compiled(expression: str) -> Any:
    return compile(expression, expression, "eval")


@functools.cache
def target(expression: str) -> Any:
    """The callable an expression names."""
    return eval(_compiled(expression), vars(ops))


def make(expression: str, root: nn.Module | None = None) -> Any:
    """A fresh object from an expression, the same numbers each time; `root` is what is owned so far."""
    if "nn." not in expression:
        return eval(_compiled(expression), {**vars(ops), "root": root})
    stream = torch.get_rng_state()
    seed(7)
    try:
        return eval(_compiled(expression), vars(ops))
    finally:
        torch.set_rng_state(stream)


def seed(number: int) -> None:
    """What `torch.manual_seed` does where there is only a CPU, in a thousandth of the time."""
    torch.default_generator.manual_seed(number)


def own(root: nn.Module, owned: Owned) -> None:
    value = make(owned.make, root)
    if owned.how == "parameter":
        root.register_parameter(owned.name, value if isinstance(value, nn.Parameter) else nn.Parameter(value))
    elif owned.how in ("buffer", "transient"):
        root.register_buffer(owned.name, value, persistent=owned.how == "buffer")
    elif owned.how == "module":
        root.add_module(owned.name, value)
    else:
        setattr(root, owned.name, value)


def make_inputs(program: Program, *, batch: int = 0) -> list[Any]:
    """Inputs to run a program with; `batch` more rows in the first dimension of each."""
    values: list[Any] = []
    for _, expression in program.inputs:
        value = make(expression)
        if isinstance(value, torch.Tensor):
            if batch and value.dim():
                value = torch.cat([value, value[:1].expand(batch, *value.shape[1:])])
            if program.grads and value.is_floating_point():
                value.requires_grad_()
        values.append(value)
    return values


def build(program: Program) -> GraphModule:
    """The program as a GraphModule with state of its own."""
    gm = _build_untraced(program)
    try:
        if program.traced:
            return _traced(program, gm)
        if program.values != "none":
            annotate(gm, make_inputs(program), program.values)
    except Exception as error:  # tracing has limits of its own
        raise NotAProgram(f"{type(error).__name__}: {error}") from error
    return gm


def _build_untraced(program: Program) -> GraphModule:
    root = nn.Module()
    for owned in program.owned:
        own(root, owned)
    graph = Graph()
    nodes: dict[str, Node] = {}

    def to(ref: Ref) -> Node:
        return nodes[ref.name]

    for name, _ in program.inputs:
        nodes[name] = graph.create_node("placeholder", name, name=name)
    for i, step in enumerate(program.steps):
        callee = target(step.target) if step.op == "call_function" else step.target
        args, kwargs = substitute(step.args, to), substitute(step.kwargs, to)
        node = nodes[step.name] = graph.create_node(step.op, callee, args, kwargs, name=step.name)
        if program.marks:
            _mark(node, i)
    graph.output(substitute(program.output, to))
    return GraphModule(root, graph)


def _mark(node: Node, i: int) -> None:
    """Meta of the kind that other tools leave, of which nothing may be lost."""
    node.meta["stack_trace"] = f'File "model.py", line {i}'
    node.meta["nn_module_stack"] = {"a": ("a", "A"), f"a.{i // 4}": (f"a.{i // 4}", "B")}
    if i % 3 == 0:
        node.meta["mark"] = ("other tool", i)


def _traced(program: Program, gm: GraphModule) -> GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    enabled, stream = torch.is_grad_enabled(), torch.get_rng_state()
    try:
        graph = make_fx(gm, tracing_mode=program.traced, _allow_non_fake_inputs=True)(*make_inputs(program))
        held = (*vars(graph).values(), *graph.buffers(), *graph.parameters())
        if any(isinstance(value, FakeTensor) for value in held):
            raise NotAProgram("a constant without numbers was traced in")
        return graph
    finally:
        torch.set_grad_enabled(enabled)
        torch.set_rng_state(stream)
