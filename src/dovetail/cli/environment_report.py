"""`info`: versions, devices, the cache, and for each backend whether it can be used."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from dovetail.cli.console import Console
from dovetail.errors import DovetailError
from dovetail.ir.text_tables import amount
from dovetail.lowering.backend_protocol import DEFAULT, backend_names, resolve, why_unusable
from dovetail.lowering.cache import Cache, cpp_compiler, default_folder
from dovetail.lowering.failures import one_line
from dovetail.tuning.environment import PACKAGES, current_environment
from dovetail.tuning.environment import Environment as MeasuredEnvironment

_ALSO = ("transformers", "sqlalchemy", "psycopg", "optuna", "rich", "typer")
"""Packages besides those of backends that commands use."""


def info(console: Console) -> None:
    """Show versions, devices and usable backends.

    Of a backend that cannot be used here, the reason; also the disk cache and the packages that are installed.
    """
    devices = [current_environment()]
    devices += [
        current_environment(torch.device("cuda", number)) for number in range(torch.cuda.device_count())
    ]
    backends = [(name, _why_not(name)) for name in backend_names()]
    cache = Cache(default_folder())
    packages = {name: _version(name) for name in (*PACKAGES, *_ALSO)}
    installed = {name: number for name, number in packages.items() if number}
    facts = [
        ("dovetail", version("dovetail")),
        ("torch", str(torch.__version__)),
        ("python", f"{platform.python_version()}, {sys.executable}"),
        ("system", platform.platform()),
        ("threads", str(torch.get_num_threads())),
        ("C++ compiler", cpp_compiler() or "none"),
        *(("device", _device(environment)) for environment in devices),
        ("cache", f"{cache.folder}, {amount(cache.size())} of at most {amount(cache.limit)}"),
        ("packages", ", ".join(f"{name} {number}" for name, number in installed.items())),
    ]
    width = max(len(name) for name, _ in facts)
    for name, fact in facts:
        console.text(f"{name:<{width}}  {fact}")
    console.text()
    rows = [
        [name, "yes" if reason is None else "no", "yes" if name in DEFAULT else "", reason or ""]
        for name, reason in backends
    ]
    console.table(("backend", "usable", "default", "why not"), rows)
    console.document(
        {
            "dovetail": version("dovetail"),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "system": platform.platform(),
            "threads": torch.get_num_threads(),
            "devices": [environment.device for environment in devices],
            "cache": {"folder": str(cache.folder), "bytes": cache.size(), "limit": cache.limit},
            "packages": packages,
            "backends": [{"name": n, "usable": reason is None, "reason": reason} for n, reason in backends],
        }
    )


def _why_not(name: str) -> str | None:
    try:
        return why_unusable(resolve(name)[0])
    except DovetailError as error:
        return str(error)
    except Exception as error:  # a backend of another package
        return one_line(error)


def _device(environment: MeasuredEnvironment) -> str:
    return f"{environment.device}{f', driver {environment.driver}' if environment.driver else ''}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
