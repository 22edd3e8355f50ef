"""Names of torch that are patched, or whose presence decides what is done, each with its purpose and the fallback.

torch 2.11 to 2.15 are tested. A name that another version lacks or no longer lets be replaced never stops a capture:
the check that needs it is weaker, which is logged once under `dovetail` and listed by `weaker_checks()`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from dovetail.errors import user_stacklevel

OLDEST, NEWEST = (2, 11), (2, 15)
"""The first and the last version of torch that the whole test suite has passed on."""
_MISSING = object()
_log = logging.getLogger("dovetail")
_reported: set[str] = set()
_compared: set[str] = set()


@dataclass(frozen=True)
class TorchName:
    """A dotted name, what it is used for, and what happens in a torch without it.

    `is_check` marks names without which something wrong may go unnoticed; the others cost speed, a feature or nothing.
    """

    path: str
    purpose: str
    without: str
    is_check: bool = False

    @property
    def value(self) -> Any:
        """The object of that name; None if torch has none."""
        owner, attribute = self.owner()
        value = getattr(owner, attribute, None)
        if value is None:
            self.report()
        return value

    def report(self) -> None:
        """Log, once, that a check is weaker because of this name."""
        if self.is_check and self.path not in _reported:
            _reported.add(self.path)
            _log.warning("torch %s has no usable %s: %s.", torch.__version__, self.path, self.without)

    def owner(self) -> tuple[Any, str]:
        """Return the module or class that has the name, and the name in it."""
        path, _, attribute = self.path.rpartition(".")
        return _resolved(path), attribute


@functools.cache
def _resolved(path: str) -> Any:
    """Return the module or class of a dotted name; None if it does not exist."""
    parts = path.split(".")
    owner: Any = importlib.import_module(parts[0])
    for at, part in enumerate(parts[1:], start=2):
        inner = getattr(owner, part, None)
        if inner is None:
            with contextlib.suppress(ImportError):
                inner = importlib.import_module(".".join(parts[:at]))
        if inner is None:
            return None
        owner = inner
    return owner


def changed_settings(
    modules: Sequence[str], variables: tuple[str, ...], without: frozenset[str] = frozenset()
) -> list[str]:
    """Return the settings of torch's configuration modules that are not the defaults, as text.

    A module that is not imported has its defaults, and is not imported here, unless the environment has variables that
    begin with one of `variables`, which it may read. Those are part of the result, except the ones in `without`.
    """
    read = sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith(variables) and name not in without
    )
    changed = list(read)
    for name in modules:
        config: Any = importlib.import_module(name) if read else sys.modules.get(name)
        settings = getattr(config, "save_config_portable", None) or getattr(config, "get_config_copy", None)
        if settings is None:
            continue
        entries = getattr(config, "_config", {})
        for key, value in sorted(settings().items()):
            default = getattr(entries.get(key), "default", None)
            if type(default) is not type(value) or default != value:
                shown = sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value
                changed.append(f"{name}.{key}={shown!r}")
    return changed


def weaker_checks() -> list[str]:
    """Return what is checked less strictly with this torch, as noticed so far: one sentence each."""
    return [f"{name.path}: {name.without}" for name in NAMES if name.path in _reported]


def warn_if_untested() -> None:
    """Warn, once, if torch is newer than every version that was tested."""
    version = torch.__version__
    if version in _compared:
        return
    _compared.add(version)
    numbers = version.split("+")[0].split(".")[:2]
    if all(n.isdigit() for n in numbers) and tuple(map(int, numbers)) > NEWEST:
        newest = ".".join(map(str, NEWEST))
        warnings.warn(
            f"dovetail was tested with torch {'.'.join(map(str, OLDEST))} to {newest}, and this is {version}. Compare "
            f"results (capture(..., check_capture=True), lower(..., verify=True)), or install torch {newest}.",
            stacklevel=user_stacklevel(),
        )


@contextlib.contextmanager
def patched(
    replacements: Sequence[tuple[TorchName, Callable[[Any], Any]]],
) -> Generator[frozenset[TorchName]]:
    """Temporarily replace each name by what its function returns for the original; yield the names that were replaced.

    A name that does not exist or cannot be assigned is reported and left alone.
    """
    undo: list[tuple[Any, str, Any]] = []
    done: set[TorchName] = set()
    try:
        for name, replace in replacements:
            owner, attribute = name.owner()
            # As it is stored: a class method must be restored as one. One that is inherited must not be restored at all.
            original = inspect.getattr_static(owner, attribute, _MISSING)
            if original is _MISSING:
                name.report()
                continue
            stored = vars(owner).get(attribute, _MISSING)
            try:
                setattr(owner, attribute, replace(original))
            except (AttributeError, TypeError):
                name.report()
                continue
            undo.append((owner, attribute, stored))
            done.add(name)
        yield frozenset(done)
    finally:
        for owner, attribute, stored in reversed(undo):
            if stored is _MISSING:
                delattr(owner, attribute)
            else:
                setattr(owner, attribute, stored)


def bound(original: Any, cls: type) -> Callable[..., Any]:
    """Return a class method bound to `cls`, be it one of Python (up to torch 2.13) or of C (since 2.14)."""
    return cast("Callable[..., Any]", original.__get__(None, cls))


# Replaced while a model is traced.
FUNCTION_APPLY = TorchName(
    "torch.autograd.Function.apply",
    "notices a function with a backward formula of its own, which tracing drops",
    "such a function is noticed in the history of the model's results only, without its line, and one that leads to no "
    "result is not noticed",
    is_check=True,
)
INFERENCE_MODE = TorchName(
    "torch.autograd.grad_mode.inference_mode.__enter__",
    "notices torch.inference_mode() in forward, which tracing drops",
    "inference mode in forward is not noticed, and what is computed in it has gradients in the graph",
    is_check=True,
)
GRADIENT_HOOKS = tuple(
    TorchName(
        f"torch.Tensor.{method}",
        "notices hooks on gradients, which a graph cannot hold",
        "hooks on gradients that forward registers by it are dropped without an error",
        is_check=True,
    )
    for method in ("register_hook", "register_post_accumulate_grad_hook")
)
SEEDING = tuple(
    TorchName(
        f"torch.{function}",
        "notices the line that seeds or reads the default random generator in forward",
        "seeding is noticed from the state of the generator when the next operator runs, without its line, and reading "
        "the seed is not noticed",
        is_check=True,
    )
    for function in ("manual_seed", "seed", "initial_seed", "set_rng_state")
)
EFFECTFUL_TARGETS = TorchName(
    "torch.fx.node._side_effectful_functions",
    "keeps operators without results while torch eliminates dead code during decomposition; torch adds to it itself",
    "operators that return nothing may be dropped from the graph",
    is_check=True,
)
CONV_BACKEND = TorchName(
    "torch._C._select_conv_backend",
    "chooses the kernel of a convolution, and so its memory format, as outside of torch.export, which disables cuDNN",
    "results of convolutions in channels last are captured as contiguous on a GPU, and regions are compiled again when "
    "the first call has them in channels last",
)
DONATED_BUFFERS = TorchName(
    "torch._functorch._aot_autograd.graph_compile.collect_bw_donated_buffer_idxs",
    "lets a backward that Inductor compiled run twice (retain_graph) by donating no buffer to it",
    "the option donated_buffer is set instead",
)

# Looked up; what is there differs between versions.
DISPATCH = tuple(
    TorchName(
        f"torch._ops.{function}",
        "shows on the stack that an operator is being dispatched, whose kernels a graph runs again",
        "only derivatives that register_autograd installs are known to belong to an operator; an operator whose Autograd "
        "kernel applies a function of its own is refused",
        is_check=True,
    )
    for function in ("OpOverload.__call__", "OpOverload.redispatch", "OpOverloadPacket.__call__")
)
GENERATOR_METACLASS = TorchName(
    "torch._C._set_generator_metaclass",
    "present where torch's tracer lifts generators into a graph (since 2.12)",
    "models that draw from a torch.Generator of their own are refused",
)
DICT_VERSION = TorchName(
    "torch._C._dynamo.guards.dict_version",
    "shows whether no attribute of a module was written since the last call",
    "attributes are looked up in every call, which is slower",
)
ROOT_GUARD_MANAGER = TorchName(
    "torch._C._dynamo.guards.RootGuardManager",
    "compares the versions of many dicts in C++",
    "they are compared one by one, slower",
)
GUARD_MANAGER_TYPE = TorchName(
    "torch._dynamo.guards.GuardManagerType",
    "names the kind of guards that compare the versions of dicts in C++",
    "they are compared one by one, slower",
)
TENSOR_GUARDS = TorchName(
    "torch._C._dynamo.guards.TensorGuards",
    "compares the operands of a compiled region with those it was compiled for, in C++",
    "generated Python does the same, slower",
)
ALIASING_TAG = TorchName(
    "torch.Tag.maybe_aliasing_or_mutating",
    "marks operators whose result may be an operand",
    "schemas and a table of such operators decide alone",
)
REDUCTION_TAG = TorchName(
    "torch.Tag.reduction", "marks reductions", "a table of operator names decides alone"
)
EFFECT_OF_OPERATOR = TorchName(
    "torch._higher_order_ops.effects._get_effect",
    "gives the effect that an operator was registered with",
    "only operators without results count as effects, so one that was registered with an effect and returns something "
    "may be moved or dropped",
    is_check=True,
)
CUSTOM_OPERATOR = TorchName(
    "torch._library.custom_ops._maybe_get_opdef",
    "identifies operators of torch.library.custom_op, which write to their operands without a gradient history",
    "a graph in which such an operator writes to an input raises where that input is a leaf that requires gradients",
)
COMPOSITE_OPERATOR = TorchName(
    "torch._export.utils._is_cia_op",
    "decides which operators decomposition may take apart, so that a program is decomposed without tracing it again",
    "torch decomposes the program by tracing it again, which takes longer",
)
PRESERVED_OPERATOR = TorchName(
    "torch._export.utils._is_preservable_cia_op",
    "decides which composite operators decomposition keeps",
    "torch decomposes the program by tracing it again, which takes longer",
)
BATCHED_TENSOR = TorchName(
    "torch._C._functorch.is_batchedtensor",
    "recognizes the tensors that vmap passes to a function, which have no storage of their own",
    "models that write in place inside of vmap are not captured",
)
FUNCTORCH_UNWRAPPED = TorchName(
    "torch._C._functorch.get_unwrapped",
    "gives the tensor behind one that vmap passes to a function",
    "models that write in place inside of vmap are not captured",
)
AVX512 = TorchName(
    "torch.cpu._is_avx512_supported",
    "detects which vector instructions there are, so that Inductor need not build programs to find out",
    "Inductor finds out by itself, in about 7 s",
)
VNNI = TorchName(
    "torch.cpu._is_vnni_supported",
    "detects whether sums of bytes are exact on this processor",
    "nothing runs in int8",
)
COMPILE_POOL = TorchName(
    "torch._inductor.async_compile.AsyncCompile.pool",
    "renews the threads that Inductor builds C++ with after a fork",
    "a process that was forked after a compilation may wait for threads that it does not have",
)
WAIT_FOR_KERNELS = TorchName(
    "torch._inductor.async_compile.AsyncCompile.wait",
    "lets the kernels of several regions be built at a time",
    "regions are compiled one after the other",
)
GENERATED_MODULES = TorchName(
    "torch._inductor.codecache.PyCodeCache.modules",
    "stores the C++ kernels of a region with its code",
    "they are compiled again on another machine, or if the folder of the compilation was cleared",
)
GRAPH_CODE = TorchName(
    "torch.fx.GraphModule.recompile",
    "defers the code of graphs that the exporter only edits",
    "capturing a deep model takes longer",
)
CLEAR_WORKSPACES = TorchName(
    "torch._C._cuda_clearCublasWorkspaces",
    "lets the workspaces of cuBLAS for a recording be part of it, and go with it",
    "each recording of a CUDA graph may keep tens of MiB until the process ends",
)
GROUP_STORE = TorchName(
    "torch.distributed.distributed_c10d._get_process_group_store",
    "gives the key-value store of a process group, by which ranks share decisions",
    "process_group= of `compile` and `tune` is refused",
)
UNBACKED_BINDINGS = TorchName(
    "torch.export._trace._replace_unbacked_bindings",
    "is skipped for programs without sizes that depend on data, which it visits to no effect",
    "capturing a deep model takes longer",
)
TRACED_PROXIES = tuple(
    TorchName(
        f"torch.fx.experimental.proxy_tensor.{name}",
        "copies the nodes of repeated layers while a model is traced",
        "every layer of a model is traced",
    )
    for name in ("get_proxy_mode", "get_proxy_slot", "track_tensor_tree", "disable_proxy_modes_tracing")
)
NAMES: tuple[TorchName, ...] = (
    FUNCTION_APPLY,
    INFERENCE_MODE,
    *GRADIENT_HOOKS,
    *SEEDING,
    EFFECTFUL_TARGETS,
    CONV_BACKEND,
    DONATED_BUFFERS,
    *DISPATCH,
    GENERATOR_METACLASS,
    DICT_VERSION,
    ROOT_GUARD_MANAGER,
    GUARD_MANAGER_TYPE,
    TENSOR_GUARDS,
    ALIASING_TAG,
    REDUCTION_TAG,
    EFFECT_OF_OPERATOR,
    BATCHED_TENSOR,
    FUNCTORCH_UNWRAPPED,
    CUSTOM_OPERATOR,
    COMPOSITE_OPERATOR,
    PRESERVED_OPERATOR,
    AVX512,
    VNNI,
    COMPILE_POOL,
    WAIT_FOR_KERNELS,
    GENERATED_MODULES,
    GRAPH_CODE,
    CLEAR_WORKSPACES,
    GROUP_STORE,
    UNBACKED_BINDINGS,
    *TRACED_PROXIES,
)
"""Every name of torch that is patched or whose presence is tested."""
