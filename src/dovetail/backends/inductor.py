"""torch's Inductor, one body at a time."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch

from dovetail import torch_compat
from dovetail.errors import checked_init
from dovetail.ir.graph_module import Body
from dovetail.ir.process_state import on_fork, released_by_fork
from dovetail.lowering.backend_protocol import Answer, Backend, Compiled, quiet
from dovetail.lowering.cache import tool_folder
from dovetail.outlining.inline import flat
from dovetail.outlining.region import Region
from dovetail.rules.rule import Decline

_LOCK = released_by_fork(threading.Lock())
_STARTED: list[threading.Thread] = []


def warm() -> None:
    """Start the processes that compile kernels, and Triton's driver; once, and without waiting for them.

    Nothing is imported ahead: modules load no sooner for being loaded in a thread beside a capture. Nor is anything
    here needed for correct code: what cannot be done ahead is done by the compiler itself.
    """
    import torch

    if not torch.cuda.is_available():
        return
    with _LOCK:
        if _STARTED:
            return
        _STARTED.append(threading.Thread(target=_start_driver, daemon=True))
    with contextlib.suppress(Exception):
        compiling = import_module("torch._inductor.async_compile").AsyncCompile
        compiling.warm_pool()
        # Until the first job has come back Inductor compiles one kernel after the other by itself.
        compiling.use_process_pool()
    _STARTED[0].start()


def _start_driver() -> None:
    """Let Triton build its driver, for which it runs a C compiler."""
    with contextlib.suppress(Exception):
        _ = import_module("triton.runtime").driver.active.utils


# Triton's folder follows from the first unless it is set, and Inductor sets it for good when it first needs it.
_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@checked_init()
class Inductor(Backend):
    """Compiles a region with `torch._inductor.standalone_compile`; options are those of `torch._inductor.config`."""

    name = "inductor"
    trains = True

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = dict(options or {})
        self.version = f"1 {torch.__version__}"

    @property
    def options(self) -> Mapping[str, Any]:
        """The options given, and a digest of those in force for everybody."""
        return {**self._options, "in force": _in_force()}

    def supports(self, region: Region) -> Answer:
        if any(word not in ("writes", "random") for word in region.effects):
            return Decline(f"it has effects ({', '.join(region.effects)}) that must stay where they are")
        return True

    def warm(self) -> None:
        """Start what every compilation needs, beside other work."""
        warm()

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        import torch._inductor as inductor

        graph = flat(cast("Body", region.body))
        dynamic = any(
            isinstance(n, torch.SymInt) for e in examples if isinstance(e, torch.Tensor) for n in e.shape
        )

        def compiled() -> Compiled:
            return inductor.standalone_compile(
                graph,
                list(examples),
                dynamic_shapes="from_graph" if dynamic else "from_example_inputs",
                options={"config_patches": dict(self._options)} if self._options else {},
            )

        # Where warnings are errors, those of torch about its own parts would be taken for faults of the compiler.
        with quiet(), _backward_at_once(), _in_our_folder():
            return _without_probing(compiled)

    def save(self, compiled: Any) -> bytes:
        """The artefact as bytes. Kernels for a CPU are not in them: those lie in the folder it was compiled in."""
        with _in_our_folder(), tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "artefact")
            compiled.save(path=path, format="binary")
            return Path(path).read_bytes()

    def load(self, data: bytes, region: Region) -> Compiled:
        """The artefact again; what is missing in the folder it was compiled in is built anew."""
        import torch._inductor as inductor

        with quiet(), _backward_at_once(), _in_our_folder(), tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "artefact")
            Path(path).write_bytes(data)
            artefacts = cast("Any", inductor).CompiledArtifact
            return _without_probing(lambda: artefacts.load(path=path, format="binary"))


class _Pool:
    """The threads that Inductor builds C++ with, which it keeps for as long as the process lives."""

    def after_fork(self) -> None:
        """Let it start others: torch renews its processes in a child, and not these."""
        if "torch._inductor.async_compile" in sys.modules:
            getattr(torch_compat.COMPILE_POOL.value, "cache_clear", bool)()


_POOL = _Pool()
on_fork(_POOL)
_distrusted: list[str] = []
"""What a compiler said of vector instructions that torch has; not empty where Inductor has to find out by itself."""


def _without_probing(make: Callable[[], Compiled]) -> Compiled:
    """Make code for the vector instructions that torch itself was built for and runs with.

    Inductor would build and load a small program for each kind, which takes longer than most bodies. Where the
    compiler does not know them after all, it does.
    """
    import torch._inductor.config as config
    import torch._inductor.cpu_vec_isa as vectors

    switch = "cpp.vec_isa_ok"
    if (
        _distrusted
        or not _vectors_are_known()
        or getattr(getattr(config, "cpp", None), "vec_isa_ok", 0) is not None
    ):
        return make()
    try:
        with cast("Any", config).patch({switch: True}):
            return make()
    except Exception as error:
        if not _is_of_the_compiler(error):
            raise
        _distrusted.append(str(error))
    remembered: list[Any] = [type(isa).__bool__ for isa in getattr(vectors, "supported_vec_isa_list", ())]
    for answer in (vectors.valid_vec_isa_list, *remembered):
        getattr(answer, "cache_clear", bool)()
    return make()


def _vectors_are_known() -> bool:
    capability = torch.backends.cpu.get_cpu_capability()
    more = torch_compat.AVX512.value
    return capability == "AVX512" or (capability == "AVX2" and more is not None and not more())


def _is_of_the_compiler(error: Exception) -> bool:
    """Whether C++ could not be built or loaded. Inductor's own errors name what they were made of in their text."""
    told = f"{type(error).__name__}: {error}"
    return any(name in told for name in ("CppCompileError", "ImportError", "OSError"))


def _in_force() -> str:
    """What is set in Inductor and AOTAutograd for the whole process, as a digest."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    told: list[str] = []
    for config in cast("list[Any]", [inductor, functorch]):
        portable = getattr(config, "save_config_portable", None) or getattr(config, "get_config_copy", None)
        if portable is not None:
            told.append(repr(sorted(portable().items())))
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _in_our_folder() -> Generator[None]:
    """Let Inductor keep its kernels in the cache, where there is one: an artefact without them is built again."""
    folder = tool_folder("inductor")
    if folder is None:
        yield
        return
    before = {name: os.environ.get(name) for name in _FOLDERS}
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    os.environ.pop("TRITON_CACHE_DIR", None)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _backward_at_once() -> Generator[None]:
    """Compile forward and backward together, and keep what backward reads, so that it can run twice.

    Told by its option to donate nothing, AOTAutograd writes down no list of what is donated, and on the first
    backward takes that for something. So it gets a list with nothing on it.
    """
    import torch._functorch.config as config

    def donating_nothing(_: Any) -> Any:
        return lambda *_, **__: []  # pyright: ignore

    with torch_compat.patched([(torch_compat.DONATED_BUFFERS, donating_nothing)]) as replaced:
        options = {
            "force_non_lazy_backward_lowering": True,
            **({} if replaced else {"donated_buffer": False}),
        }
        with config.patch({k: v for k, v in options.items() if hasattr(config, k)}):  # pyright: ignore
            yield
