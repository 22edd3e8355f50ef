"""AOTInductor: compiles a region to a package with a library that runs without a compiler."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from dovetail.errors import checked_init
from dovetail.ir.graph_module import Body
from dovetail.lowering.backend_protocol import Answer, Backend, Compiled
from dovetail.lowering.compile_unit import operand_devices, suppress_warnings, why_effectful, why_not_static
from dovetail.outlining.inline import flat
from dovetail.outlining.region import Region
from dovetail.rules.rule import Decline


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
