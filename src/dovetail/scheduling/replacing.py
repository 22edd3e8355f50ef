"""Something else called where a region stood, after it has shown that it fits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.graph.keys import REGION
from dovetail.graph.module import attribute, copy_graph, rebuild
from dovetail.lowering.closeness import Reference, difference
from dovetail.outlining.region import Region
from dovetail.scheduling.recording import Example, copied, undisturbed


@dataclass(frozen=True, eq=False)
class Replacement:
    """What is called instead, and with what.

    `given` names the operands it takes in order, of those the match has names for; None is all that are no weights.
    `params` are parameters of its own that operands stand for. `fixed` are further arguments.
    """

    new: Callable[..., Any]
    name: str
    given: tuple[str, ...] | None = None
    params: Mapping[str, str] = field(default_factory=dict[str, str])
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def is_registered(self) -> bool:
        """Whether it has parameters or buffers of its own that nothing of the model stands for."""
        if not isinstance(self.new, nn.Module):
            return False
        names = {n for n, _ in self.new.named_parameters()} | {n for n, _ in self.new.named_buffers()}
        return bool(names - self.params.keys())

    def adapter(self, gm: GraphModule, region: Region) -> Adapter:
        """A module that takes a region's operands and gives its results."""
        numbers = operand_numbers(gm, region)
        params = {name: self._number(numbers, operand) for name, operand in self.params.items()}
        if self.given is not None:
            order = [self._number(numbers, name) for name in self.given]
        else:
            taken = set(params.values())
            order = [i for i in positional(gm, region) if i not in taken]
        return Adapter(self.new, tuple(order), result_order(region), dict(self.fixed), params)

    def _number(self, numbers: Mapping[str, int], name: str) -> int:
        if name not in numbers:
            raise ScheduleError(
                f"'{name}' is no operand of what is replaced; there are {', '.join(numbers) or 'none'}"
            )
        return numbers[name]


def operand_numbers(gm: GraphModule, region: Region) -> dict[str, int]:
    """Operands by what the pattern calls them, and by the names of their nodes."""
    numbers = {node.name: i for i, node in enumerate(region.inputs)}
    return {**numbers, **region.arguments}


def positional(gm: GraphModule, region: Region) -> list[int]:
    """The operands that a replacement is called with: those of the pattern in its order, else all but weights."""
    if region.arguments:
        return list(region.arguments.values())
    return [
        i
        for i, node in enumerate(region.inputs)
        if not (node.op == "get_attr" and isinstance(attribute(gm, str(node.target)), Tensor))
    ]


def result_order(region: Region) -> tuple[int, ...]:
    """Which result of a replacement each result of the body is."""
    count = len(region.outputs)
    if not region.results:
        return tuple(range(count))
    if any(number is None for number in region.results):
        lost = [o.name for o, number in zip(region.outputs, region.results, strict=False) if number is None]
        raise ScheduleError(
            f"inner values of what is replaced are used outside of it: {', '.join(lost)}. "
            f"A replacement does not make them; match less, or more"
        )
    return tuple(cast("tuple[int, ...]", region.results))


class Adapter(nn.Module):
    """Called as a body is, runs what was put in its place."""

    def __init__(
        self,
        new: Callable[..., Any],
        order: tuple[int, ...],
        results: tuple[int, ...],
        fixed: dict[str, Any],
        params: dict[str, int],
    ) -> None:
        super().__init__()
        self.new = new
        self.order, self.results, self.fixed, self.params = order, results, fixed, params

    def forward(self, *operands: Any) -> tuple[Any, ...]:
        given = tuple(operands[i] for i in self.order)
        if self.params:
            own = {name: operands[i] for name, i in self.params.items()}
            made: Any = torch.func.functional_call(cast("nn.Module", self.new), own, given, self.fixed)
        else:
            made = self.new(*given, **self.fixed)
        flat = tuple(cast("Sequence[Any]", made)) if isinstance(made, (tuple, list)) else (made,)
        return tuple(flat[i] for i in self.results)


class Probe(nn.Module):
    """Runs a body and keeps what it was given and what it made."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["body"] = body
        self.calls: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []

    def forward(self, *operands: Any) -> tuple[Any, ...]:
        given = copied(operands)
        made = tuple(self.__dict__["body"](*operands))
        self.calls.append((given, copied(made)))
        return made


def with_replacement(gm: GraphModule, region: Region, new: Replacement) -> GraphModule:
    """The graph with a call of something else where a region was called."""
    return with_call(gm, region, new.adapter(gm, region), new.name)


def with_call(gm: GraphModule, region: Region, module: nn.Module, name: str) -> GraphModule:
    target = _free(gm, name)
    graph = copy_graph(gm.graph)
    shared = False
    for node in graph.nodes:
        if node.name == region.node.name:
            node.target = target
            node.meta = {k: v for k, v in node.meta.items() if k != REGION}
        elif node.op == "call_module" and node.target == region.node.target:
            shared = True
    drop = frozenset() if shared else frozenset({str(region.node.target)})
    return rebuild(gm, graph, add={target: module}, drop=drop)


def _free(gm: GraphModule, wanted: str) -> str:
    taken = {*gm._modules, *gm._parameters, *gm._buffers, *(n.name for n in gm.graph.nodes)}
    count = 0
    while (name := f"{wanted}_{count}") in taken or hasattr(gm, name):
        count += 1
    return name


def check_fits(
    gm: GraphModule, region: Region, new: Replacement, example: Example, owner: nn.Module, *, values: bool
) -> None:
    """Raise unless a replacement takes what the region takes and gives what it gives, on the recorded inputs.

    Counts, shapes and dtypes are compared, and with `values` the numbers.
    """
    adapter = new.adapter(gm, region)
    check_signature(new.new, len(adapter.order), new.fixed, new.name)
    probe = Probe(region.body)
    run = with_call(gm, region, probe, "probe")
    modules = nn.ModuleList([owner, adapter])
    with undisturbed(modules), torch.no_grad():
        example.call(run)
        operands, wanted = probe.calls[0]
        try:
            made = adapter(*operands)
        except Exception as error:
            raise ScheduleError(
                f"'{new.name}' does not take what it is given ({_told(operands, adapter.order)}): "
                f"{type(error).__name__}: {error}"
            ) from error
    compare(made, wanted, new.name, values=values)


def compare(made: Sequence[Any], wanted: Sequence[Any], name: str, *, values: bool) -> None:
    """Raise unless results are of the same number, shapes and dtypes, and with `values` as good as equal."""
    if len(made) != len(wanted):
        raise ScheduleError(f"'{name}' returns {len(made)} values, not {len(wanted)}")
    for i, (has, needs) in enumerate(zip(made, wanted, strict=True)):
        if not isinstance(needs, Tensor):
            continue
        if not isinstance(has, Tensor):
            raise ScheduleError(f"result {i} of '{name}' is a {type(has).__name__}, not a tensor")
        if has.shape != needs.shape or has.dtype != needs.dtype:
            raise ScheduleError(
                f"result {i} of '{name}' is {_form(has)}, and what it stands for is {_form(needs)}"
            )
        wrong = difference(has.detach(), Reference(needs)) if values else None
        if wrong is not None:
            raise ScheduleError(f"result {i} of '{name}' {wrong}")


def check_signature(new: Any, given: int, fixed: Mapping[str, Any], name: str) -> None:
    """Raise unless something can be called with so many values and some further arguments."""
    if not callable(new):
        raise InvalidArgument(f"replace takes a module or a function, not a {type(new).__name__}.")
    function = new.forward if isinstance(new, nn.Module) else new
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*[None] * given, **fixed)
    except TypeError as error:
        also = f" and {', '.join(fixed)}" if fixed else ""
        raise ScheduleError(
            f"'{name}' takes {signature}, and is given {given} values{also}: {error}. "
            f"`concrete_args` fixes further arguments"
        ) from None


def _form(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _told(operands: Sequence[Any], order: Sequence[int]) -> str:
    given = [operands[i] for i in order]
    return ", ".join(_form(v) if isinstance(v, Tensor) else repr(v) for v in given)
