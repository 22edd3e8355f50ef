"""Writes a dataset of FlashInfer-Trace for a graph, with the measurements of a store as traces of its definitions."""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch.fx import GraphModule

from dovetail.errors import RegionError, checked_call
from dovetail.formats.flashinfer_trace import Definition, checked_folder, define_region, write_dataset
from dovetail.ir.graph_module import GraphOwner
from dovetail.outlining.region import regions

if TYPE_CHECKING:
    from dovetail.tuning.environment import Environment
    from dovetail.tuning.measurement import Measurement, Subject
    from dovetail.tuning.store import Store

_STATUSES = (
    (r"took longer than", "TIMEOUT"),
    (r": verify: ", "INCORRECT_NUMERICAL"),
    (r": trial: .*shape", "INCORRECT_SHAPE"),
    (r": trial: .*dtype", "INCORRECT_DTYPE"),
    (r": (supports|compile|load): ", "COMPILE_ERROR"),
)
"""The status of a failure by the first of these that its text contains; else it is a RUNTIME_ERROR."""


@dataclass(frozen=True)
class Dataset:
    """What was written: the folder, the names of the definitions, how many traces, and what was left out with the reason.

    `left_out` has regions without a definition by their name, and definitions without a workload by theirs.
    """

    folder: Path
    definitions: tuple[str, ...]
    traces: int
    left_out: Mapping[str, str]


@checked_call()
def to_flashinfer_trace(
    gm: GraphModule | GraphOwner,
    folder: str | os.PathLike[str],
    *,
    store: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Write the regions of a graph as a dataset of FlashInfer-Trace, and return what was written.

    Each distinct body is a definition with its reference in torch, and a workload; with a `store`, its measurements for
    inference are traces, in which a solution is a backend. Random bodies, those that write operands, and dtypes that the
    format does not have are left out. Files in the folder that have other names are kept.
    """
    root = checked_folder(folder)
    definitions: dict[str, Definition] = {}
    keys: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for region in regions(gm):
        try:
            definition = define_region(region)
        except RegionError as error:
            left_out[region.name] = str(error).removesuffix(".")
            continue
        definitions.setdefault(definition.name, definition)
        keys[definition.name] = region.key
        if definition.workload is None:
            left_out[definition.name] = definition.no_workload
    traces = {} if store is None else _traces(store, definitions, keys)
    write_dataset(root, definitions.values(), traces)
    return Dataset(root, tuple(definitions), sum(map(len, traces.values())), left_out)


def _traces(
    store: str | os.PathLike[str], definitions: Mapping[str, Definition], keys: Mapping[str, str]
) -> dict[str, list[dict[str, Any]]]:
    """Return the traces of definitions by name, those of each in the order of environments and digests."""
    from dovetail.tuning.store import open_existing

    by_key = {key: definitions[name] for name, key in keys.items() if definitions[name].workload is not None}
    traces: dict[str, list[dict[str, Any]]] = {}
    with open_existing(store) as opened:
        for environment, subject, measurement in _measured(opened):
            definition = by_key.get(subject.key)
            if definition is None or subject.mode != "inference":
                continue
            completed = opened.completed(subject, environment)
            record = {
                "definition": definition.name,
                "workload": definition.workload,
                "solution": subject.backend,
                "evaluation": _evaluation(environment, subject, measurement, completed),
            }
            traces.setdefault(definition.name, []).append(record)
    return traces


def _measured(store: Store) -> Iterator[tuple[Environment, Subject, Measurement]]:
    for environment in store.environments():
        for subject, measurement in store.results(environment, kind="body"):
            yield environment, subject, measurement


def _evaluation(
    environment: Environment, subject: Subject, measurement: Measurement, completed: float
) -> dict[str, Any]:
    failure = measurement.failure
    status = "PASSED"
    if failure:
        status = next(
            (name for text, name in _STATUSES if re.search(text, failure, re.DOTALL)), "RUNTIME_ERROR"
        )
    evaluation: dict[str, Any] = {
        "status": status,
        "environment": {
            "hardware": environment.device,
            "libs": {"torch": environment.torch, "python": environment.python, **dict(environment.packages)},
        },
        "timestamp": datetime.fromtimestamp(completed, UTC).isoformat(timespec="seconds"),
        "log": failure,
    }
    if status in ("PASSED", "INCORRECT_NUMERICAL"):
        evaluation["correctness"] = _correctness(subject, measurement)
    if not failure:
        latency = statistics.median(measurement.samples)
        reference = cast("Sequence[float]", measurement.details.get("reference") or ())
        evaluation["performance"] = {"latency_ms": 1e3 * latency}
        if reference:
            beside = statistics.median(reference)
            speedup = beside / latency if latency else 0.0
            evaluation["performance"] |= {"reference_latency_ms": 1e3 * beside, "speedup_factor": speedup}
    return evaluation


def _correctness(subject: Subject, measurement: Measurement) -> dict[str, Any]:
    """Return the relative error; the absolute one is not measured.

    Results that are not floating-point numbers have none, and were verified to be equal.
    """
    error = measurement.numeric_error
    if measurement.failure:
        error = math.nan
    elif error is None:
        error = 0.0
    number = error if math.isfinite(error) else ("NaN" if math.isnan(error) else "Infinity")
    return {
        "max_relative_error": number,
        "extra": {"norm": "root mean square of each result", "operands": subject.operands},
    }
