"""What compiled code depends on beside the program: the machine, the compiler, and how torch is set."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

_SWITCHES = (
    "cuda.matmul.fp32_precision",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
)
"""Attributes of `torch.backends`. The older `allow_tf32` says the same and may not be read after these were set."""


def precision() -> dict[str, Any]:
    """How exact and how repeatable torch is asked to be, as plain values."""
    found: dict[str, Any] = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "dtype": torch.get_default_dtype(),
        "matmul": _read(torch.get_float32_matmul_precision),
    }
    for name in _SWITCHES:
        found[name] = _read(functools.partial(attrgetter(name), torch.backends))
    return found


def set_precision(wanted: Mapping[str, Any]) -> None:
    """Bring torch to what `precision` told in another process."""
    now = precision()
    if now["matmul"] != wanted["matmul"] and wanted["matmul"] is not None:
        torch.set_float32_matmul_precision(wanted["matmul"])
    torch.use_deterministic_algorithms(wanted["deterministic"], warn_only=wanted["warn_only"])
    torch.set_default_dtype(wanted["dtype"])
    for name in _SWITCHES:
        if wanted.get(name) is not None and now[name] != wanted[name]:
            place, _, switch = name.rpartition(".")
            setattr(attrgetter(place)(torch.backends), switch, wanted[name])


def _read(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except (
        AttributeError,
        RuntimeError,
    ):  # not in this release, or set in two ways that torch cannot reconcile
        return None


@functools.cache
def toolchain() -> tuple[str, ...]:
    """The releases, the processor and the C++ compiler that code is made with; found without running anything."""
    processor = (platform.machine(), torch.backends.cpu.get_cpu_capability(), _processor())
    return (
        f"torch {torch.__version__}",
        f"python {sys.version}",
        *processor,
        _compiler(os.environ.get("CXX")),
    )


def _processor() -> str:
    """The model and the instruction sets of the processor: code made for one may not run on another."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "features", "cpu implementer", "cpu part")
    lines = [line for line in first.splitlines() if line.lower().startswith(wanted)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _compiler(named: str | None) -> str:
    candidates = [named.split()[0]] if named and named.split() else ["g++", "clang++", "c++", "cl"]
    path = next((p for p in map(shutil.which, candidates) if p is not None), None)
    if path is None:
        return f"no compiler {named}"
    try:
        at = Path(path).resolve()
        facts = at.stat()
    except OSError:
        return f"{named} {path}"
    return f"{named} {at} {facts.st_size} {facts.st_mtime_ns}"


def devices(found: Iterable[torch.device]) -> list[str]:
    """What tells accelerators apart as far as code for them goes."""
    told: set[str] = set()
    for device in found:
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            runtime = torch.version.cuda or torch.version.hip
            told.add(f"{torch.cuda.get_device_name(device)} {major}.{minor} {runtime} triton {_triton()}")
        else:
            told.add(device.type)
    return sorted(told)


@functools.cache
def _triton() -> str:
    for name in ("triton", "pytorch-triton", "triton-rocm"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""
