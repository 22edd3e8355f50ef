"""Writes one region to a folder with all that the author of a faster kernel needs, without the model."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.errors import InvalidArgument, RegionError
from dovetail.formats import artifact_check_script
from dovetail.formats.exported_program import exported
from dovetail.ir.nodes import example_size, symbol_ranges
from dovetail.ir.printer import text
from dovetail.ir.process_state import preserve_rng_state
from dovetail.lowering.compile_unit import CompileUnit, unit_of
from dovetail.lowering.failures import one_line
from dovetail.numerics.sample_inputs import as_non_leaf, random_inputs
from dovetail.outlining.inline import inline
from dovetail.outlining.region import Region, results

FORMAT = 1


def write(region: Region, folder: Path, *, seed: int = 0) -> Path:
    """Write a region as an artifact; see `Region.export`. Raise InvalidArgument for a folder that is not empty."""
    if not isinstance(seed, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidArgument(f"seed {seed!r} is not an int.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidArgument(f"'{folder}' exists and is not empty; give a new folder.")
    unit = unit_of(region)
    if unit.obstacle is not None:
        raise RegionError(f"region '{region.name}' cannot be exported: {unit.obstacle}.")
    if unit.effects.host_effect:
        raise RegionError(
            f"region '{region.name}' has effects on the host ({unit.effects.host_effect}): it cannot be run alone."
        )
    inputs, expected, after = _run_body(unit, seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Written to a temporary folder first, so that the artifact is complete or absent.
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        torch.export.save(exported(inline(unit.region.body)), scratch / "body.pt2")
        (scratch / "body.txt").write_text(text(unit.region.body), encoding="utf-8")
        torch.save(inputs, scratch / "inputs.pt")
        torch.save({"results": expected, "operands": after}, scratch / "expected.pt")
        identity = json.dumps(_identity(region, unit, seed), indent=2, sort_keys=False)
        (scratch / "region.json").write_text(identity + "\n", encoding="utf-8")
        (scratch / "check.py").write_text(inspect.getsource(artifact_check_script), encoding="utf-8")
        os.chmod(scratch, 0o777 & ~_umask())
        if folder.exists():
            folder.rmdir()
        scratch.rename(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(scratch)
        raise
    return folder


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _run_body(unit: CompileUnit, seed: int) -> tuple[list[Any], list[Any], dict[int, Any]]:
    """Return random operands, the body's results for them, and the values of the operands that it writes."""
    inputs = random_inputs(unit.values, seed, unit.domains)
    with preserve_rng_state(), torch.no_grad():
        torch.manual_seed(seed)
        operands = [
            as_non_leaf(value, True) if isinstance(value, Tensor) and i in unit.effects.writes else value
            for i, value in enumerate(random_inputs(unit.values, seed, unit.domains))
        ]
        try:
            values = unit.region.body(*operands)
        except Exception as error:
            raise RegionError(
                f"region '{unit.region.name}' does not accept random operands ({one_line(error)}), so that there is nothing to "
                f"compare with. `region.reproducer` writes a script whose operands you can change."
            ) from error
    return (
        inputs,
        [_copied(v) for v in values],
        {i: _copied(operands[i]) for i in sorted(unit.effects.writes)},
    )


def _copied(value: Any) -> Any:
    return value.detach().clone(memory_format=torch.preserve_format) if isinstance(value, Tensor) else value


def _identity(region: Region, unit: CompileUnit, seed: int) -> dict[str, Any]:
    roles = {number: name for name, number in region.arguments.items()}
    values = unit.values
    placeholders = [n for n in unit.region.body.graph.nodes if n.op == "placeholder"]
    outputs = [n.meta.get("val") for n in results(unit.region.body)]
    symbols: dict[str, str] = {}
    for value in (*values, *outputs):
        symbols |= symbol_ranges(value)
    return {
        "format": FORMAT,
        "kind": region.kind,
        "version": region.version,
        "attrs": region.attrs,
        "key": region.key,
        "name": region.name,
        "made_of": list(region.nodes),
        "rule": region.rule,
        "effects": list(region.effects),
        "writes": sorted(unit.effects.writes),
        "random": bool(unit.effects.random),
        "operands": [
            {"name": node.name, "argument": roles.get(i), **_describe_value(value)}
            for i, (node, value) in enumerate(zip(placeholders, values, strict=True))
        ],
        "results": [
            {"result": region.results[i] if region.results else None, **_describe_value(value)}
            for i, value in enumerate(outputs)
        ],
        "sizes_that_vary": symbols,
        "seed": seed,
        "dovetail": version("dovetail"),
        "torch": torch.__version__,
    }


def _describe_value(value: Any) -> dict[str, Any]:
    if not isinstance(value, Tensor):
        return {
            "type": type(value).__name__,
            "value": example_size(value) if isinstance(value, torch.SymInt) else value,
        }
    return {
        "type": "Tensor",
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": [_size(n) for n in value.shape],
        "strides": [_size(n) for n in value.stride()],
        "device": str(value.device),
        "requires_grad": value.requires_grad,
    }


def _size(size: Any) -> int | str:
    return size if isinstance(size, int) else str(size)
