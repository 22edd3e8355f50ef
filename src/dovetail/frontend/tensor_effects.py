"""Calls in forward whose effect on tensors or random streams torch.export drops silently.

`TensorEffects` is a torch function mode that is active while forward is traced: it reports changes of tensor metadata,
tensors and generators that the model does not own, seeding, and values whose `requires_grad` is set.
"""

from __future__ import annotations

import concurrent.futures.thread
import multiprocessing.queues
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._guards import CompileContext
from torch.overrides import TorchFunctionMode

from dovetail import torch_compat
from dovetail.frontend.code_recorder import CodeRecorder, active_recorders, paused
from dovetail.ir import source_location

Note = Callable[[str, "source_location.SourceLine | None", str], None]
_REAL = (Tensor, nn.Parameter)

# The code that threads of executors and of queues between processes run.
_EXECUTOR = cast(Any, concurrent.futures.thread)._worker.__code__
_FEEDER = cast(Any, multiprocessing.queues.Queue)._feed.__code__

# In-place operators that change sizes, strides or storage of the tensor object itself.
_IN_PLACE = (
    "t_ squeeze_ unsqueeze_ transpose_ swapaxes_ swapdims_ as_strided_ resize_ resize_as_ set_ detach_"
)
_METADATA_METHODS = frozenset(_IN_PLACE.split())
_STRIDE_READS = frozenset(["stride", "is_contiguous", "contiguous"])
_METADATA_SETTERS = frozenset({"data", "grad"})

# The first of the seeds that no model sets: a generator that has another one was seeded, or set to an older state.
_SENTINEL_SEED = 0x5DEECE66D_1CE4E5B9 & (2**63 - 1)


class TensorEffects(TorchFunctionMode):
    """Reports uses of tensors and generators that a graph of the model cannot repeat.

    `begin` and `end` are called when forward starts and returns. In between every generator gets another seed at each
    call, so that seeding it and restoring an earlier state are detected; `restore` restores every stream. If other
    threads may draw from the default generator meanwhile, that one is not changed, and only another seed is detected.
    """

    def __init__(self, note: Note) -> None:
        super().__init__()
        self.note = note
        self.data_line: source_location.SourceLine | None = None
        self.stride_reads: set[str] = set()
        self._visible: dict[int, str] = {}
        self._leaves: dict[int, tuple[Tensor, source_location.SourceLine | None]] = {}
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        self._default_seed = 0
        self._last_seed = _SENTINEL_SEED
        # Whether forward has begun and not returned.
        self.is_running = False
        self._compile_id: Any = None
        self._host_state: Any = None
        self._forward_line: source_location.SourceLine | None = None
        self._lifts_generators = torch_compat.GENERATOR_METACLASS.value is not None
        self._recorders = active_recorders()
        self._code_recorders = [r for r in self._recorders if isinstance(r, CodeRecorder)]

    def _note_here(self, what: str, advice: str) -> None:
        self.note(what, source_location.of_caller(), advice)

    def begin(self, model: nn.Module, inputs: Sequence[Any]) -> None:
        self._visible = {id(x): "an input" for x in inputs if isinstance(x, Tensor)}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._visible.setdefault(id(tensor), f"'{name}'")
        self.is_running = True
        for recorder in self._code_recorders:
            recorder.start()
        # Newer versions of torch.export have a compile context of their own; that of Dynamo is another one.
        self._compile_id = CompileContext.current_compile_id()
        default = torch.default_generator
        self._default_seed = default.initial_seed()
        for generator in [*([default] if _is_alone() else []), *generators_of(model)]:
            self._generators.append((generator, generator.get_state()))
        self._advance()
        self._host_state = _host_random_state() if model.training else None
        code = getattr(type(model).forward, "__code__", None)
        self._forward_line = code and source_location.SourceLine(
            code.co_filename, code.co_firstlineno, "forward"
        )

    def end(self, results: Any) -> None:
        for recorder in self._code_recorders:
            recorder.stop()
        default = torch.default_generator
        reseeded = not self._is_watched(default) and default.initial_seed() != self._default_seed
        if reseeded or self._is_reseeded():
            self.note_seeding(self._forward_line)
        if self._host_state is not None and self._host_state != _host_random_state():
            self.note(
                "forward draws numbers from Python's or NumPy's random module, which a graph would repeat in every call",
                self._forward_line,
                "Draw with torch (torch.rand(())), or pass the number as an argument.",
            )
        sources = {id(leaf): line for leaf, line in self._leaves.values()}
        for result in pytree.tree_leaves(results):
            lines = _only_sources(result, sources) if isinstance(result, Tensor) else None
            if lines:
                self.note(
                    "forward makes an intermediate value require gradients, and a result requires gradients only because "
                    "of it, which a graph cannot repeat",
                    lines[0],
                    "Detach the result, or make the value a parameter or an input that requires gradients.",
                )

    def restore(self) -> None:
        """Restore the state of every generator."""
        for generator, state in self._generators:
            generator.set_state(state)
        self._generators.clear()
        self.is_running = False

    def _advance(self) -> None:
        """Give every generator another seed, so that an earlier state differs from the present one."""
        self._last_seed -= len(self._generators)
        for number, (generator, _) in enumerate(self._generators):
            generator.manual_seed(self._last_seed + number)

    def _is_watched(self, generator: torch.Generator) -> bool:
        return any(generator is known for known, _ in self._generators)

    def _is_reseeded(self) -> bool:
        seeds = [generator.initial_seed() for generator, _ in self._generators]
        return seeds != list(range(self._last_seed, self._last_seed + len(seeds)))

    def note_seeding(self, line: source_location.SourceLine | None) -> None:
        self.note(
            "forward seeds a random generator or sets its state, which a graph cannot do",
            line,
            "Seed it outside the model, or draw the numbers outside and pass them in.",
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Dynamo, which traces the branches of control flow, traces this too.
        if not self._recorders or torch.compiler.is_dynamo_compiling():
            return self._call(func, args, kwargs)
        active = [recorder for recorder in self._recorders if recorder.is_active]
        if not active or _calls_back(func, args, kwargs):
            return self._call(func, args, kwargs)
        with paused(active):
            return self._call(func, args, kwargs)

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # Dynamo, which traces the branches of control flow, traces this too, where fake tensors look like real ones.
        in_dynamo = torch.compiler.is_dynamo_compiling()
        # It also runs code of its own here, and restores the state of the default generator afterwards.
        if not in_dynamo and CompileContext.current_compile_id() == self._compile_id:
            if self._is_reseeded():
                self.note_seeding(source_location.of_caller())
            self._advance()
        for argument in (*args, *kwargs.values()):
            parts: Any = argument if isinstance(argument, (list, tuple)) else (argument,)
            for part in parts:
                if type(part) in _REAL:
                    if not in_dynamo and part.requires_grad:
                        self._note_here(
                            "forward uses a tensor that requires gradients and that the model does not own",
                            "Make it an attribute of the module (in a ParameterList or ModuleList if it is in a list), "
                            "or pass the module that owns it.",
                        )
                elif isinstance(part, torch.Generator):
                    self._check_generator(part)
        if not self._lifts_generators and kwargs.get("generator") is torch.default_generator:
            kwargs = {**kwargs, "generator": None}
        self._check_call(func, args, kwargs)
        result = func(*args, **kwargs)
        if kwargs.get("requires_grad") is True and isinstance(result, Tensor):
            self._leaves[id(result)] = (result, source_location.of_caller())
        return result

    def _check_generator(self, generator: torch.Generator) -> None:
        if generator in torch.cuda.default_generators:
            return
        if not self._is_watched(generator) and generator is not torch.default_generator:
            self._note_here(
                "forward draws from a torch.Generator that is not an attribute of the model, and a graph would "
                "continue its stream instead of creating it in every call",
                "Make the generator in __init__ and keep it on the module, or draw the numbers outside and pass them in.",
            )
        elif not self._lifts_generators and generator is not torch.default_generator:
            self._note_here(
                f"forward draws from a torch.Generator, which torch {torch.__version__} cannot lift into a graph",
                "Draw from the default generator, draw the numbers outside and pass them in, or use torch 2.13.",
            )

    def _check_call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if name == "__set__":
            attribute = getattr(func.__self__, "__name__", "")
            if attribute == "requires_grad":
                self._check_requires_grad(first, bool(args[1]))
            elif attribute in _METADATA_SETTERS:
                self._check_metadata(first, f"{attribute} =", any_tensor=attribute == "data")
        elif name == "__get__" and getattr(func.__self__, "__name__", "") == "data":
            self.data_line = source_location.of_caller()
        elif name in _STRIDE_READS:
            self.stride_reads.add(name)
        elif name in _METADATA_METHODS:
            self._check_metadata(first, f"{name}()")
        elif name == "requires_grad_":
            self._check_requires_grad(first, bool((*args[1:], kwargs.get("requires_grad", True))[0]))
        elif name == "retain_grad" and isinstance(first, Tensor) and not first.is_leaf:
            self._note_here(
                "forward calls retain_grad(), which a graph cannot repeat",
                "Return the value and call retain_grad() on the result.",
            )
        elif name == "random_" and len(args) + len(kwargs) > 2:
            self._note_here(
                "forward calls random_(from, to), which torch.export cannot write down",
                "Use torch.randint(from, to, size) and copy_ the result.",
            )

    def _check_metadata(self, tensor: Any, what: str, *, any_tensor: bool = False) -> None:
        owner = self._visible.get(id(tensor))
        if owner is None and not any_tensor:
            return
        self._note_here(
            f"forward changes {owner or 'a tensor'} itself by `{what}`, which a graph cannot do to a tensor of its caller",
            "Use the operator that returns a new tensor (t, squeeze, detach, ...), and copy_ values where they must be "
            "written.",
        )

    def _check_requires_grad(self, tensor: Any, value: bool) -> None:
        if not isinstance(tensor, Tensor) or tensor.requires_grad == value:
            return
        owner = self._visible.get(id(tensor))
        if owner is not None:
            self._note_here(
                f"forward sets requires_grad of {owner}, which a graph cannot do to a tensor of its caller",
                "Set requires_grad before the model is called.",
            )
        elif value:
            self._leaves[id(tensor)] = (tensor, source_location.of_caller())


_LITERALS = frozenset((int, float, complex, bool, str, bytes, type(None), type(...), torch.Size))
_CONTAINERS = frozenset((list, tuple, set, frozenset))
_OF_TORCH = (
    Tensor,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Generator,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
)


def _calls_back(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a function may call code that is not torch's: its own, or that of an argument which torch asks.

    Torch calls callables, and methods of numbers and sequences of other classes.
    """
    module = getattr(func, "__module__", None) or "torch"
    if isinstance(func, types.FunctionType) and not module.startswith("torch"):
        return True
    waiting: list[Any] = [*args, *kwargs.values()]
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind in _LITERALS or isinstance(value, _OF_TORCH):
            continue
        if kind in _CONTAINERS:
            waiting.extend(value)
        elif kind is dict:
            waiting.extend(value.values())
        elif kind is slice:
            waiting += (value.start, value.stop, value.step)
        else:
            return True
    return False


def _is_alone() -> bool:
    """Return whether no other thread may draw random numbers.

    Some threads never do: the monitor of tqdm, workers of executors, like Inductor's, that have no task, and those that
    feed the queues of processes.
    """
    running = sys._current_frames()
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    return all(
        type(thread).__module__.startswith("tqdm.") or _is_idle_worker(running.get(thread.ident or 0))
        for thread in others
    )


def _is_idle_worker(frame: types.FrameType | None) -> bool:
    if frame is not None and frame.f_code is _EXECUTOR:
        return True
    while frame is not None and frame.f_code is not _FEEDER:
        frame = frame.f_back
    return frame is not None


def generators_of(model: nn.Module) -> list[torch.Generator]:
    """Return the generators among the attributes of a model's modules, also in lists, tuples and dicts."""
    generators: dict[int, torch.Generator] = {}
    for module in model.modules():
        for value in vars(module).values():
            parts: Any = (value,)
            if isinstance(value, (list, tuple)):
                parts = value
            elif isinstance(value, dict):
                parts = cast("dict[Any, Any]", value).values()
            for part in parts:
                if isinstance(part, torch.Generator) and part is not torch.default_generator:
                    generators[id(part)] = part
    return list(generators.values())


def _host_random_state() -> Any:
    numpy_random = sys.modules.get("numpy.random")
    state = None if numpy_random is None else numpy_random.get_state()
    return random.getstate(), None if state is None else (state[0], state[1].tobytes(), *state[2:])


def _only_sources(
    result: Tensor, sources: dict[int, source_location.SourceLine | None]
) -> list[source_location.SourceLine | None]:
    """Return the lines of `sources` if the gradient of a result reaches no other leaf, else an empty list."""
    if not sources or not result.requires_grad:
        return []
    if result.grad_fn is None:
        return [sources[id(result)]] if id(result) in sources else []
    reached: list[source_location.SourceLine | None] = []
    for node in autograd_history([result]):
        variable = getattr(node, "variable", None)
        if variable is not None:
            if id(variable) not in sources:
                return []
            reached.append(sources[id(variable)])
    return reached


def autograd_history(results: Iterable[Any], end: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield every autograd node that the gradients of the tensors among `results` reach before those of `end`, once each."""
    waiting: list[Any] = [result.grad_fn for result in results if isinstance(result, Tensor)]
    visited = set(end)
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        yield node
        waiting.extend(following for following, _ in node.next_functions)
