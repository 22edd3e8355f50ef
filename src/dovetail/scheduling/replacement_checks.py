"""Something else called where a region stood, after it has shown that it fits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx import GraphModule

from dovetail.errors import InvalidArgument, ScheduleError
from dovetail.ir.effects import DeclaredEffects
from dovetail.ir.graph_module import copy_graph, rebuild
from dovetail.ir.meta_keys import REGION
from dovetail.numerics.tolerance import Reference, difference
from dovetail.outlining.region import Region
from dovetail.scheduling.call_recording import ModelInputs, copied, undisturbed
from dovetail.scheduling.finders import PartMatch

Operand = tuple[int, int]
"""The number of a match among those that are replaced, and of an operand among its own."""
ABSENT: Operand = (-1, -1)
"""An operand that a pattern may have, and a match does not."""


@dataclass(frozen=True, eq=False)
class Replacement:
    """What is called instead, and with what.

    `given` are the operands it takes by position, `named` by keyword; `literals` are captured ones it takes by
    keyword, `params` parameters of its own that operands stand for, `fixed` further arguments. `results` says which
    result of it each result of the matches is. `arity` is how many operands each match has, and `outputs` how many
    results: where they are others, this is no replacement for it.
    """

    new: Callable[..., Any]
    name: str
    given: tuple[Operand, ...]
    results: tuple[int, ...]
    arity: tuple[int, ...]
    outputs: tuple[int, ...]
    named: Mapping[str, Operand] = field(default_factory=dict[str, Operand])
    literals: tuple[str, ...] = ()
    params: Mapping[str, Operand] = field(default_factory=dict[str, Operand])
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tells: DeclaredEffects | None = None

    @property
    def is_registered(self) -> bool:
        """Whether it is put among the model's modules, and so follows its mode, device and training."""
        return isinstance(self.new, nn.Module)

    def adapter(self, found: Sequence[PartMatch], region: Region) -> Adapter:
        """A module that takes a region's operands and gives its results."""
        arity = tuple(len(match.operands) for match in found)
        if arity != self.arity:
            raise ScheduleError(
                f"'{self.name}' was made for operations that read {_counted(self.arity)} values, and here they read "
                f"{_counted(arity)}"
            )
        outputs = tuple(len(match.outputs) for match in found)
        if outputs != self.outputs:
            raise ScheduleError(
                f"'{self.name}' was made for operations of which {_counted(self.outputs)} results are used, and here "
                f"{_counted(outputs)} are"
            )
        inputs = {node.name: i for i, node in enumerate(region.inputs)}

        def number(operand: Operand) -> int | None:
            match, which = operand
            value = None if operand == ABSENT else list(found[match].operands.values())[which]
            if value is None:
                return None
            name = value.name
            if name not in inputs:
                raise ScheduleError(
                    f"'{name}' is no operand of what is replaced; there are {', '.join(inputs) or 'none'}"
                )
            return inputs[name]

        return Adapter(
            self.new,
            tuple(number(operand) for operand in self.given),
            tuple(self.results[i] for i in result_order(region)),
            {**{name: found[0].literals[name] for name in self.literals}, **self.fixed},
            {name: number(operand) for name, operand in self.params.items()},
            {name: number(operand) for name, operand in self.named.items()},
            self.tells,
        )


def _counted(arity: Sequence[int]) -> str:
    return " and ".join(map(str, arity))


def own_state(new: Any, taken: Mapping[str, Any]) -> list[str]:
    """Parameters and buffers of a module that nothing of the model stands for."""
    if not isinstance(new, nn.Module):
        return []
    names = [*dict(new.named_parameters()), *dict(new.named_buffers())]
    return [name for name in names if name not in taken]


def result_order(region: Region) -> tuple[int, ...]:
    """Which result of the matches each result of the body is."""
    if not region.results:
        return tuple(range(len(region.outputs)))
    if any(number is None for number in region.results):
        lost = [o.name for o, number in zip(region.outputs, region.results, strict=False) if number is None]
        raise ScheduleError(
            f"inner values of what is replaced are used outside of it: {', '.join(lost)}. "
            f"A replacement does not make them; match less, or more"
        )
    # Results of the kind that nothing reads are not among those of the matches.
    numbers = cast("tuple[int, ...]", region.results)
    rank = {number: i for i, number in enumerate(sorted(numbers))}
    return tuple(rank[number] for number in numbers)


def leaves(value: Any) -> list[Any]:
    """The values that something returned, in order; what is None is none."""
    return [leaf for leaf in pytree.tree_leaves(value) if leaf is not None]


def label_of(new: Any) -> str:
    """What a replacement is called where it is told of."""
    return type(new).__name__ if isinstance(new, nn.Module) else getattr(new, "__name__", type(new).__name__)


class Adapter(nn.Module):
    """Called as a body is, runs what was put in its place."""

    def __init__(
        self,
        new: Callable[..., Any],
        order: tuple[int | None, ...],
        results: tuple[int, ...],
        fixed: dict[str, Any],
        params: dict[str, int | None],
        named: dict[str, int | None],
        tells: DeclaredEffects | None,
    ) -> None:
        super().__init__()
        self.new, self.tells = new, tells
        self.order, self.results, self.fixed, self.params, self.named = order, results, fixed, params, named

    def _get_name(self) -> str:
        return label_of(self.new)

    def made(self, operands: Sequence[Any]) -> Any:
        """What the replacement returns for the operands of the body."""
        given = tuple(None if i is None else operands[i] for i in self.order)
        named = {name: None if i is None else operands[i] for name, i in self.named.items()}
        kwargs = {**self.fixed, **named}
        if not self.params:
            return self.new(*given, **kwargs)
        own = {name: operands[i] for name, i in self.params.items() if i is not None}
        return torch.func.functional_call(cast("nn.Module", self.new), own, given, kwargs)

    def forward(self, *operands: Any) -> tuple[Any, ...]:
        made = self.made(operands)
        flat = [made] if isinstance(made, Tensor) else leaves(made)
        return tuple(flat[i] for i in self.results)


class Probe(nn.Module):
    """Runs a body and keeps what it was given and what it made, and the state of the random numbers before."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["body"] = body
        self.calls: list[tuple[tuple[Any, ...], tuple[Any, ...], Any]] = []

    def forward(self, *operands: Any) -> tuple[Any, ...]:
        given, drawn = copied(operands), random_state()
        made = tuple(self.__dict__["body"](*operands))
        self.calls.append((given, copied(made), drawn))
        return made


def random_state() -> list[Tensor]:
    """The state of the random numbers: of the CPU, and of each device that draws any."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(i) for i in devices)]


def set_random_state(state: Sequence[Tensor]) -> None:
    torch.set_rng_state(state[0])
    for i, drawn in enumerate(state[1:]):
        torch.cuda.set_rng_state(drawn, i)


def with_replacement(
    gm: GraphModule, found: Sequence[PartMatch], region: Region, new: Replacement
) -> GraphModule:
    """The graph with a call of something else where a region was called."""
    return with_call(gm, region, new.adapter(found, region), new.name)


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


def probed(gm: GraphModule, region: Region, example: ModelInputs, owner: nn.Module) -> Probe:
    """What a region is given and makes when the part is called as it was recorded."""
    probe = Probe(region.body)
    run = with_call(gm, region, probe, "probe")
    # The graph holds the buffers of modules that stand in place of the owner's.
    with undisturbed(owner), undisturbed(run), torch.no_grad():
        example.copied().call(run)
    return probe


def check_fits(
    adapter: Adapter, probe: Probe, name: str, count: int, *, values: bool, may_write: bool
) -> DeclaredEffects:
    """Raise unless a replacement takes what a region was given and gives `count` results, as the region did.

    Their number, shapes and dtypes are compared, and with `values` the numbers, drawn ones included. Returns what it
    was seen to do besides.
    """
    check_signature(adapter.new, len(adapter.order), {**adapter.fixed, **adapter.named}, name)
    operands, wanted, drawn = probe.calls[0]
    try:
        made, told = _tried(adapter, operands, drawn)
    except Exception as error:
        raise ScheduleError(
            f"'{name}' does not take what it is given ({_told(operands, adapter.order)}): "
            f"{type(error).__name__}: {error}"
        ) from error
    if len(made) != count:
        raise ScheduleError(f"'{name}' returns {len(made)} values, and what it stands for returns {count}")
    compare([made[i] for i in adapter.results], wanted, name, adapter.results, values=values)
    if told.writes and not may_write:
        raise ScheduleError(
            f"'{name}' writes to what it is given, which what it stands for does not, and others may read. "
            f"Let it work on a copy"
        )
    return told if not isinstance(adapter.new, nn.Module) else _in_either_mode(adapter, probe, told)


def check_order(adapter: Adapter, probe: Probe) -> None:
    """Raise where a module called with the operands in this order computes something else than its own operations.

    A graph does not record which operand was which argument; they are ordered by where they are first read.
    """
    if len(adapter.order) < 2:
        return
    operands, expected, drawn = probe.calls[0]
    try:
        results, _ = _tried(adapter, operands, drawn)
        compare([results[i] for i in adapter.results], expected, "it", adapter.results, values=True)
    except ScheduleError as error:
        raise ScheduleError(
            f"which operand is which argument of the module is not known from the graph: called with them in the order "
            f"in which they are first read, it computes something else ({error}). Replace it before anything around it is "
            f"traced"
        ) from error
    except Exception:  # it does not run on these operands; what the replacement does with them is tried next
        return


def _tried(
    adapter: Adapter, operands: Sequence[Any], drawn: Sequence[Tensor]
) -> tuple[list[Any], DeclaredEffects]:
    """What a replacement returns, and what it does to what it is given, to its state and to the random numbers."""
    given = list(copied(operands))
    tensors = [value for value in given if isinstance(value, Tensor)]
    state = [*adapter.parameters(), *adapter.buffers()]
    with undisturbed(adapter), torch.no_grad():
        set_random_state(drawn)
        before = [value._version for value in tensors], [value._version for value in state]
        made = leaves(adapter.made(given))
        is_random = not all(map(torch.equal, drawn, random_state()))
        wrote = [value._version for value in tensors] != before[0]
        kept = [value._version for value in state] == before[1]
        kept = kept and all(
            a is b for a, b in zip(state, [*adapter.parameters(), *adapter.buffers()], strict=False)
        )
    places = {value.untyped_storage().data_ptr() for value in tensors if value.layout is torch.strided}
    results = [value for value in made if isinstance(value, Tensor) and value.layout is torch.strided]
    shares = any(value.untyped_storage().data_ptr() in places for value in results)
    return made, DeclaredEffects(wrote, shares, not kept, is_random)


def _in_either_mode(adapter: Adapter, probe: Probe, told: DeclaredEffects) -> DeclaredEffects:
    """What a module does in its own mode or in the other, for the model's may change."""
    modes = [(module, module.training) for module in adapter.modules()]
    operands, _, drawn = probe.calls[0]
    adapter.train(not cast("nn.Module", adapter.new).training)
    try:
        _, other = _tried(adapter, operands, drawn)
    except Exception:  # in that mode it does not run on these values, so that nothing is known of it
        other = DeclaredEffects(writes=True, shares=True, state=True, random=True)
    finally:
        for module, mode in modes:
            module.training = mode
    return DeclaredEffects(
        told.writes or other.writes,
        told.shares or other.shares,
        told.state or other.state,
        told.random or other.random,
    )


def compare(
    made: Sequence[Any],
    wanted: Sequence[Any],
    name: str,
    numbers: Sequence[int] | None = None,
    *,
    values: bool,
) -> None:
    """Raise unless results are of the same number, shapes and dtypes, and with `values` as good as equal."""
    if len(made) != len(wanted):
        raise ScheduleError(f"'{name}' returns {len(made)} values, not {len(wanted)}")
    for i, has, needs in zip(numbers or range(len(made)), made, wanted, strict=True):
        if not isinstance(needs, Tensor):
            continue
        if not isinstance(has, Tensor):
            raise ScheduleError(f"result {i} of '{name}' is a {type(has).__name__}, not a tensor")
        alike = (has.shape, has.dtype, has.device, has.layout)
        if alike != (needs.shape, needs.dtype, needs.device, needs.layout):
            raise ScheduleError(
                f"result {i} of '{name}' is {_form(has)}, and what it stands for is {_form(needs)}"
            )
        wrong = difference(has.detach(), Reference(needs)) if values else None
        if wrong is not None:
            raise ScheduleError(f"result {i} of '{name}' {wrong}")


def check_signature(new: Any, given: int, named: Mapping[str, Any], name: str) -> None:
    """Raise unless something can be called with so many values and some further arguments."""
    signature = signature_of(new)
    if signature is None:
        return
    try:
        signature.bind(*[None] * given, **named)
    except TypeError as error:
        also = f" and {', '.join(named)}" if named else ""
        raise ScheduleError(
            f"'{name}' takes {signature}, and is given {given} values{also}: {error}. "
            f"`concrete_args` fixes further arguments"
        ) from None


def signature_of(new: Any) -> inspect.Signature | None:
    """What something is called with, None where it does not tell."""
    if not callable(new):
        raise InvalidArgument(f"replace takes a module or a function, not a {type(new).__name__}.")
    try:
        return inspect.signature(new.forward if isinstance(new, nn.Module) else new)
    except (TypeError, ValueError):
        return None


@contextmanager
def in_mode(new: Any, training: bool) -> Generator[None]:
    """A new module in the mode of what it stands for; in its own again if it turns out not to fit.

    Where it is in that mode already, modules in it may be in others, such as norms that are not to be trained.
    """
    if not isinstance(new, nn.Module):
        yield
        return
    modes = [(module, module.training) for module in new.modules()]
    if new.training != training:
        new.train(training)
    try:
        yield
    except BaseException:
        for module, mode in modes:
            module.training = mode
        raise


def _form(value: Tensor) -> str:
    where = "" if value.device.type == "cpu" else f" on {value.device}"
    where += "" if value.layout is torch.strided else f" ({str(value.layout).removeprefix('torch.')})"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{where}"


def _told(operands: Sequence[Any], order: Sequence[int | None]) -> str:
    given = [None if i is None else operands[i] for i in order]
    return ", ".join(_form(v) if isinstance(v, Tensor) else repr(v) for v in given)
