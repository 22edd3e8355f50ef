"""torch's Inductor, one region at a time: code for this process, or packages of AOTInductor."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from dovetail import torch_compat
from dovetail.backends.generated_module import (
    generated_modules,
    kernel_libraries,
    load_module,
    portable_module,
)
from dovetail.errors import checked_init
from dovetail.ir.graph_module import Body
from dovetail.ir.process_state import preserve_rng_state, register_after_fork, reset_at_fork
from dovetail.lowering.backend_protocol import Answer, Backend, CompileCost, Compiled
from dovetail.lowering.cache import cpp_compiler, tool_folder
from dovetail.lowering.region_support import operand_devices, suppress_warnings, why_effectful, why_not_static
from dovetail.numerics.sample_inputs import domains_of, random_inputs
from dovetail.outlining.inline import flat
from dovetail.outlining.region import Region
from dovetail.rules.rule import Decline

_LOCK = reset_at_fork(threading.Lock())
_STARTED: list[threading.Thread] = []
_SAMPLES = "dovetail_samples"
"""The attribute of an artifact that makes sample inputs, if it has no effects and no dynamic sizes."""
_MODULE = "module"
# `standalone_compile` enables it, and so waits for every kernel while it generates code.
_TUNED_EARLY = "triton.autotune_at_compile_time"


def _start_driver() -> None:
    """Let Triton build its driver, which runs a C compiler."""
    with contextlib.suppress(Exception):
        _ = import_module("triton.runtime").driver.active.utils


# Triton's folder is derived from the first unless it is set, and Inductor sets it permanently on first use.
_FOLDERS = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@checked_init()
class Inductor(Backend):
    """Compiles a region with `torch._inductor.standalone_compile`; options are those of `torch._inductor.config`."""

    name = "inductor"
    trains = True
    compile_cost = CompileCost(per_body=0.12, per_operation=0.035)
    variants: ClassVar[Sequence[Mapping[str, Any]]] = ({"options": {"max_autotune": True}},)

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = dict(options or {})
        self.version = f"1 {torch.__version__}"

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of this backend, and a digest of the global ones."""
        return {**self._options, "in force": _config_digest()}

    def missing(self) -> str | None:
        """Return what this machine lacks to compile for any of its devices; None if it has all."""
        if torch.cuda.is_available() or torch.xpu.is_available() or cpp_compiler() is not None:
            return None
        return "there is no C++ compiler (g++ or clang++, or the one that CXX names)"

    def supports(self, region: Region) -> Answer:
        if any(word not in ("writes", "random") for word in region.effects):
            return Decline(f"it has effects ({', '.join(region.effects)}) that must stay where they are")
        return True

    def warm(self) -> None:
        """Start the processes that compile kernels, and Triton's driver; once, and without waiting for them.

        Nothing is imported ahead: importing in a thread beside a capture is not faster. A failure is ignored, because
        the compiler starts what it needs by itself.
        """
        if not torch.cuda.is_available():
            return
        with _LOCK:
            if _STARTED:
                return
            _STARTED.append(threading.Thread(target=_start_driver, daemon=True))
        with contextlib.suppress(Exception):
            compiling = import_module("torch._inductor.async_compile").AsyncCompile
            compiling.warm_pool()
            # Until the first job has returned, Inductor compiles kernels one after the other in this process.
            compiling.use_process_pool()
        _STARTED[0].start()

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        return self.compile_async(region, examples)()

    def compile_async(self, region: Region, examples: Sequence[Any]) -> Callable[[], Compiled]:
        """Generate the code of a region, and leave its kernels to Inductor's workers.

        Kernels with several configurations are tuned in the first call, the trial run, as torch.compile does it.
        """
        import torch._inductor as inductor

        graph = flat(cast("Body", region.body))
        dynamic = any(
            isinstance(n, torch.SymInt) for e in examples if isinstance(e, torch.Tensor) for n in e.shape
        )

        def generate() -> Compiled:
            return inductor.standalone_compile(
                graph,
                list(examples),
                dynamic_shapes="from_graph" if dynamic else "from_example_inputs",
                options={"config_patches": {_TUNED_EARLY: False, **self._options}},
            )

        def finish() -> Compiled:
            with suppress_warnings(), _eager_backward(), _in_cache_folder():
                try:
                    kernels.wait()
                except Exception as error:
                    if not _remove_truncated(error) and (had_failed or not _disable_known_isa(error)):
                        raise
                    return generate()
                if not region.effects and not dynamic:
                    setattr(artifact, _SAMPLES, samples)
                return artifact

        def samples() -> list[Any]:
            return random_inputs(examples, domains=domains_of(graph.graph))

        had_failed = bool(_isa_errors)
        # If warnings are errors, torch's own deprecation warnings would fail the compilation.
        with suppress_warnings(), _eager_backward(), _in_cache_folder(), _deferred_kernels() as kernels:
            artifact = _without_probing(generate)
        return finish

    def save(self, compiled: Any) -> bytes:
        """Return the artifact as bytes, with the libraries of its C++ kernels, which Inductor keeps in a folder."""
        with _in_cache_folder(), tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "artifact")
            compiled.save(path=path, format="binary")
            return _joined(self._parts(compiled, Path(path).read_bytes()))

    def _parts(self, compiled: Any, artifact: bytes) -> list[tuple[str, bytes]]:
        """Return an artifact, the code of its module without Inductor where that is possible, and its libraries."""
        folder = os.environ.get(_FOLDERS[0])
        modules = list(generated_modules(artifact))
        paths = {path for module in modules for path in kernel_libraries(module).values()}
        if folder is None or not all(Path(path).is_relative_to(folder) for path in paths):
            return [("", artifact), (_MODULE, b"")]
        names = {path: os.path.relpath(path, folder) for path in sorted(paths)}
        inputs: Callable[[], list[Any]] | None = getattr(compiled, _SAMPLES, None)
        module = None
        if len(modules) == 1 and inputs is not None and not torch.is_grad_enabled():
            with preserve_rng_state():
                module = portable_module(modules[0], compiled, inputs, names)
        libraries = [(name, Path(path).read_bytes()) for path, name in names.items()]
        return [("", artifact), (_MODULE, module or b""), *libraries]

    def load(self, data: bytes, region: Region) -> Compiled:
        """Return the artifact that `save` wrote.

        Where its module was written in a form of its own, Inductor is not imported. Otherwise Inductor finds a kernel by
        its source and the command that compiles it, which has the paths of torch and of the compiler, and builds it
        again where these are others.
        """
        (_, artifact), (_, module), *libraries = _separated(data)
        with _in_cache_folder():
            paths = _restore_libraries(libraries)
        if module and len(paths) == len(libraries):
            with contextlib.suppress(Exception):  # whatever is missing, Inductor builds it
                return load_module(module, paths)
        import torch._inductor as inductor

        with (
            suppress_warnings(),
            _eager_backward(),
            _in_cache_folder(),
            tempfile.TemporaryDirectory() as folder,
        ):
            path = os.path.join(folder, "artifact")
            Path(path).write_bytes(artifact)
            artifact_type = cast("Any", inductor).CompiledArtifact
            return _without_probing(lambda: artifact_type.load(path=path, format="binary"))


def _restore_libraries(libraries: list[tuple[str, bytes]]) -> dict[str, str]:
    """Write libraries to the folder of the compilation, where they are missing; return their paths by name."""
    folder = os.environ.get(_FOLDERS[0])
    paths: dict[str, str] = {}
    for name, data in libraries if folder is not None else ():
        path = Path(cast("str", folder), name)
        if not path.resolve().is_relative_to(Path(cast("str", folder)).resolve()):
            continue
        paths[name] = str(path)
        if path.exists():
            continue
        path.parent.mkdir(mode=0o700, exist_ok=True)
        handle, written = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(written, 0o700)
        os.replace(written, path)
    return paths


def _joined(parts: list[tuple[str, bytes]]) -> bytes:
    """Return named bytes as one: their names and lengths in a line of JSON, then the bytes."""
    head = json.dumps([(name, len(data)) for name, data in parts]).encode()
    return head + b"\n" + b"".join(data for _, data in parts)


def _separated(data: bytes) -> list[tuple[str, bytes]]:
    head, _, rest = data.partition(b"\n")
    parts: list[tuple[str, bytes]] = []
    for name, length in json.loads(head):
        parts.append((name, rest[:length]))
        rest = rest[length:]
    return parts


class _PendingKernels:
    """Modules that Inductor generated, whose kernels its workers still build."""

    def __init__(self) -> None:
        self.waits: list[Callable[[], None]] = []

    def wait(self) -> None:
        """Wait for the kernels and put them into the modules."""
        while self.waits:
            self.waits.pop(0)()


@contextlib.contextmanager
def _deferred_kernels() -> Generator[_PendingKernels]:
    """Collect the kernels that modules, loaded by this thread, would wait for; that is left to the caller."""
    pending, thread = _PendingKernels(), threading.get_ident()

    def deferring(wait: Callable[..., None]) -> Callable[..., None]:
        def deferred(compiling: Any, scope: dict[str, Any]) -> None:
            # Code that is generated only to tune kernels is not a module, and calls them at once.
            if threading.get_ident() == thread and "__file__" in scope:
                pending.waits.append(functools.partial(wait, compiling, scope))
            else:
                wait(compiling, scope)

        return deferred

    with torch_compat.patched([(torch_compat.WAIT_FOR_KERNELS, deferring)]):
        yield pending


class _Pool:
    """The threads that Inductor builds C++ with, which it keeps for the life of the process."""

    def after_fork(self) -> None:
        """Discard the pool: torch restarts its worker processes in a child, but not these threads."""
        if "torch._inductor.async_compile" in sys.modules:
            getattr(torch_compat.COMPILE_POOL.value, "cache_clear", bool)()


_POOL = _Pool()
register_after_fork(_POOL)
_isa_errors: list[str] = []
"""Compiler errors for vector instructions that torch has; if there are any, Inductor probes the instructions itself."""


def _without_probing(make: Callable[[], Compiled]) -> Compiled:
    """Compile for the vector instructions that torch itself was built for and uses.

    Inductor would build and load a small program for each instruction set, which takes longer than most bodies. If the
    compiler does not support the instructions after all, Inductor probes them.
    """
    import torch._inductor.config as config

    switch = "cpp.vec_isa_ok"
    if (
        _isa_errors
        or not _isa_is_known()
        or getattr(getattr(config, "cpp", None), "vec_isa_ok", 0) is not None
    ):
        return make()
    try:
        with cast("Any", config).patch({switch: True}):
            return make()
    except Exception as error:
        if not _remove_truncated(error) and not _disable_known_isa(error):
            raise
    return make()


def _remove_truncated(error: Exception) -> bool:
    """Remove the library that could not be loaded because the linker was killed while it wrote it; return whether one was."""
    cut = re.search(r"(/\S+\.so): (?:file too short|invalid ELF header|cannot read file data)", str(error))
    if cut is None:
        return False
    with contextlib.suppress(OSError):
        Path(cut[1]).unlink()
        return True
    return False


def _disable_known_isa(error: Exception) -> bool:
    """Let Inductor probe vector instructions from now on, if this is an error of the C++ compiler; return that."""
    import torch._inductor.cpu_vec_isa as vectors

    if not _is_compiler_error(error):
        return False
    _isa_errors.append(str(error))
    remembered: list[Any] = [type(isa).__bool__ for isa in getattr(vectors, "supported_vec_isa_list", ())]
    for answer in (vectors.valid_vec_isa_list, *remembered):
        getattr(answer, "cache_clear", bool)()
    return True


def _isa_is_known() -> bool:
    capability = torch.backends.cpu.get_cpu_capability()
    more = torch_compat.AVX512.value
    return capability == "AVX512" or (capability == "AVX2" and more is not None and not more())


def _is_compiler_error(error: Exception) -> bool:
    """Whether C++ could not be built or loaded. Inductor's errors name their cause in the message."""
    message = f"{type(error).__name__}: {error}"
    return any(name in message for name in ("CppCompileError", "ImportError", "OSError"))


_CONFIGS = ("torch._inductor.config", "torch._functorch.config")
_VARIABLES = ("TORCHINDUCTOR", "TORCH_COMPILE", "FUNCTORCH", "AOT_", "TRITON")


def _config_digest() -> str:
    """Return a digest of the global settings of Inductor and AOTAutograd that are not the defaults."""
    changed = torch_compat.changed_settings(_CONFIGS, _VARIABLES, frozenset(_FOLDERS))
    return hashlib.sha256("\n".join(changed).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _in_cache_folder() -> Generator[None]:
    """Let Inductor keep its kernels in the disk cache, if there is one: without them an artifact is built again."""
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
def _eager_backward() -> Generator[None]:
    """Compile forward and backward together, without donated buffers, so that backward can run twice.

    With `donated_buffer=False` AOTAutograd records no list of donated buffers, and the first backward fails to handle
    the missing list. So the list is patched to be empty.
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


@checked_init()
class Aoti(Backend):
    """Compiles a region with AOTInductor, for inference and for the sizes of its operands; options are Inductor's.

    The result is the bytes of a package, which any process can load from disk without compiling.
    """

    name = "aoti"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = dict(options or {})
        self.version = f"1 {torch.__version__}"

    @property
    def options(self) -> Mapping[str, Any]:
        return self._options

    def supports(self, region: Region) -> Answer:
        reason = why_not_static(region) or why_effectful(region)
        if reason is None and len(set(operand_devices(region))) > 1:
            reason = "its operands are on different devices"
        return True if reason is None else Decline(reason)

    def compile(self, region: Region, examples: Sequence[Any]) -> Compiled:
        from torch._inductor import aoti_compile_and_package

        with (
            suppress_warnings(),
            torch.no_grad(),
            tempfile.TemporaryDirectory(prefix="dovetail-aoti-") as folder,
        ):
            inputs = tuple(e.detach() for e in examples)
            program = torch.export.export(flat(cast("Body", region.body)), inputs, strict=False)
            path = Path(folder) / "region.pt2"
            package = aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=dict(self._options)
            )
            return self.load(Path(package).read_bytes(), region)

    def save(self, compiled: Package) -> bytes:
        return compiled.data

    def load(self, data: bytes, region: Region) -> Package:
        index: Any = next(operand_devices(region), torch.device("cpu")).index
        return Package(data, -1 if index is None else index)


class Package:
    """The code of a package, and its bytes."""

    def __init__(self, data: bytes, device_index: int) -> None:
        self.data, self.device_index = data, device_index
        # The loader class alone: `aoti_load_package` would first compile six programs to probe the processor.
        from torch._C._aoti import AOTIModelPackageLoader

        with tempfile.NamedTemporaryFile(suffix=".pt2") as file:
            file.write(data)
            file.flush()
            loader = AOTIModelPackageLoader(file.name, "model", False, 1, device_index)
        self._run: Any = loader.run

    def __call__(self, *operands: Any) -> tuple[Any, ...]:
        return tuple(self._run(list(operands)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Package, (self.data, self.device_index)
