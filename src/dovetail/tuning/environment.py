"""The environment of a measurement: the hardware and software that its result depends on."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dovetail.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "apache-tvm",
    "jax",
    "jaxlib",
    "numpy",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "openvino",
    "pytorch-triton",
    "torch-mlir",
    "triton",
)
"""The distributions that the built-in backends compile or run with, besides torch."""
_DEFAULT_SETTINGS: Mapping[str, object] = {
    "deterministic": False,
    "warn_only": False,
    "matmul": "highest",
    "cuda.matmul.fp32_precision": "none",
    "cuda.matmul.allow_fp16_reduced_precision_reduction": True,
    "cuda.matmul.allow_bf16_reduced_precision_reduction": True,
    "cuda.matmul.allow_fp16_accumulation": False,
    "cudnn.enabled": True,
    "cudnn.benchmark": False,
    "cudnn.deterministic": False,
    "cudnn.conv.fp32_precision": "tf32",
    "cudnn.rnn.fp32_precision": "tf32",
    "mkldnn.matmul.fp32_precision": "none",
    "mkldnn.conv.fp32_precision": "none",
}
"""What torch's settings of precision are unless a program changes them."""
_PAIRS = ("packages", "settings")
_ABSENT = {False: "not installed", True: "torch's default"}
_CPU_INFO = Path("/proc/cpuinfo")
_NVIDIA_VERSION = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Environment:
    """What a measurement depends on besides its subject: device, driver, torch, Python, threads, compilers.

    `device` is the type and model of the device, `driver` the version of its driver (empty on a CPU), `packages` the
    sorted names and versions of the installed packages that backends use, `settings` those of torch's precision and
    determinism that are not its defaults. Two environments with the same key share measurements.
    """

    device: str
    driver: str
    torch: str
    python: str
    threads: int
    packages: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name in _PAIRS:
            object.__setattr__(self, name, tuple(sorted(getattr(self, name))))

    @property
    def key(self) -> str:
        """The hash of all fields as 16 hexadecimal digits, equal in every process and release."""
        return hashlib.blake2b(canonical_json(self.to_json()).encode(), digest_size=8).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict of JSON values, without `settings` where all are the defaults."""
        values = {**asdict(self), **{name: [list(pair) for pair in getattr(self, name)] for name in _PAIRS}}
        return values if self.settings else {name: v for name, v in values.items() if name != "settings"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Environment:
        """Return the environment that `to_json` wrote; raise InvalidArgument for anything else."""
        names = {field.name for field in fields(cls)}
        if not isinstance(data, Mapping) or {*data, "settings"} != names:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"an environment is a dict with the keys {', '.join(sorted(names))}.")
        text = ("device", "driver", "torch", "python")
        pairs = {name: data.get(name, ()) for name in _PAIRS}
        if (
            not all(isinstance(data[name], str) for name in text)
            or type(data["threads"]) is not int
            or not all(map(_are_pairs, pairs.values()))
        ):
            raise InvalidArgument(
                f"an environment has text as {', '.join(text)}, an integer as threads, and pairs of name and version as "
                f"packages, of name and value as settings."
            )
        values: dict[str, Any] = {**data, **{name: tuple(map(tuple, each)) for name, each in pairs.items()}}
        return cls(**values)

    def differences(self, other: Environment) -> tuple[str, ...]:
        """Return how this environment differs from an earlier one, each as "torch 2.13.0, was 2.11.0"."""
        own, earlier = _properties(self), _properties(other)
        settings = {*dict(self.settings), *dict(other.settings)}
        return tuple(
            f"{name} {own.get(name, _ABSENT[name in settings])}, was {earlier.get(name, _ABSENT[name in settings])}"
            for name in dict.fromkeys((*own, *earlier))
            if own.get(name) != earlier.get(name)
        )


def canonical_json(value: object) -> str:
    """Return the JSON text that is the same for equal values: sorted keys, no spaces, ASCII, floats as `repr` has them."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def current_environment(device: torch.device | None = None) -> Environment:
    """Return the environment of this process for measurements on a device, the CPU by default."""
    import torch

    device = torch.device("cpu") if device is None else device
    kind = device.type
    if kind == "cuda":
        name, driver = _cuda_device(device), _cuda_driver()
    elif kind == "cpu":
        name, driver = f"{_cpu_model()}, {torch.backends.cpu.get_cpu_capability()}", ""
    else:
        name, driver = "", ""
    return Environment(
        device=f"{kind}: {name}" if name else kind,
        driver=driver,
        torch=str(torch.__version__),
        python=platform.python_version(),
        threads=torch.get_num_threads(),
        packages=_installed(),
        settings=current_settings(),
    )


def current_settings() -> tuple[tuple[str, str], ...]:
    """Return torch's settings of precision and determinism that are not its defaults, in order."""
    from dovetail.lowering.cache import precision

    # The default dtype is that of values in the graph. Where nothing is set, "none" is "ieee": a setting that all backends
    # share is read as each backend's own.
    now = {
        name: "none" if value == "ieee" else value
        for name, value in precision().items()
        if name != "dtype" and value is not None
    }
    changed = {name: str(value) for name, value in now.items() if value != _DEFAULT_SETTINGS.get(name, value)}
    return tuple(sorted(changed.items()))


def _are_pairs(pairs: object) -> bool:
    if not isinstance(pairs, list | tuple):
        return False
    return all(
        isinstance(pair, list | tuple)
        and len(cast("list[object]", pair)) == 2
        and all(isinstance(part, str) for part in cast("list[object]", pair))
        for pair in cast("list[object]", pairs)
    )


def _properties(environment: Environment) -> dict[str, str]:
    """Return what two environments are compared by: the fields, and each package as if it were one."""
    return {
        "device": environment.device,
        "driver": environment.driver or "none",
        "torch": environment.torch,
        "python": environment.python,
        "threads": str(environment.threads),
        **dict(environment.packages),
        **dict(environment.settings),
    }


def _installed() -> tuple[tuple[str, str], ...]:
    packages: list[tuple[str, str]] = []
    for name in PACKAGES:
        try:
            packages.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return tuple(sorted(packages))


def _cpu_model() -> str:
    """Return the model of the processor, or its architecture where the system does not name the model."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def _cuda_device(device: torch.device) -> str:
    import torch

    count = torch.cuda.device_count()
    index = cast("int | None", device.index)
    if index is None:
        index = torch.cuda.current_device() if count else 0
    if index >= count:
        raise InvalidArgument(f"there is no device 'cuda:{index}': torch has {count} CUDA devices.")
    major, minor = torch.cuda.get_device_capability(index)
    return f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}"


def _cuda_driver() -> str:
    """Return the version of the kernel module, or of the CUDA API that the driver offers where there is no such file.

    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue ..." has the version as its first dotted number.
    """
    import torch

    try:
        words = _NVIDIA_VERSION.read_text().split()
    except OSError:
        words = []
    release = next((w for w in words if "." in w and w.replace(".", "").isdigit()), "")
    if release:
        return release
    number: int = cast("Any", torch._C)._cuda_getDriverVersion()
    return f"CUDA {number // 1000}.{number % 1000 // 10}"
