"""What is written for each operator, run on torch's own samples: ONNX Runtime and OpenVINO give what torch gives."""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from dovetail.backends.external.external_base import CompiledModel
from dovetail.formats.onnx.region_model import region_model
from dovetail.ir.tensor_spec import layout_of
from dovetail.lowering.backend_protocol import by_name
from dovetail.lowering.failures import UnsupportedOp
from tests.formats.onnx_samples import Sample, samples

# Among equal numbers torch itself promises no order.
UNORDERED = {"aten.topk.default"}


def run(backend: Any, sample: Sample) -> list[Tensor] | None:
    """The results by a backend; None if it does not take the operation."""
    node = next(n for n in sample.gm.graph.nodes if n.op == "call_function")
    if backend.why_not(node) is not None:
        return None
    operands, results = [layout_of(v) for v in sample.given], [layout_of(v) for v in sample.expected]
    if any(r.order is None for r in results):
        return None
    try:
        model = region_model(sample.gm.graph, backend.dialect, operands=operands, results=results)
    except UnsupportedOp:  # of a second result that ONNX has not
        return None
    return list(
        CompiledModel(backend, model.SerializeToString(), tuple(operands), tuple(results))(*sample.given)
    )


def difference(actual: Tensor, expected: Tensor) -> str | None:
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return f"{actual.dtype} {tuple(actual.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    if not actual.is_floating_point():
        return None if torch.equal(actual, expected) else "other whole numbers"
    near = torch.allclose(actual, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    return None if near else f"off by {(actual - expected).abs().max().item()}"


def check(backend: Any, dtype: torch.dtype, each: int, least: int) -> None:
    wrong: dict[str, str] = {}
    compared: Counter[str] = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the database has samples at the edge of what an operator takes
        for sample in samples(dtype, each):
            target = str(sample.target)
            try:
                results = run(backend, sample)
            except Exception as error:
                wrong.setdefault(target, f"{target}: {error}")
                continue
            if results is None or target in UNORDERED:
                continue
            compared[target] += 1
            for value, expected in zip(results, sample.expected, strict=True):
                reason = difference(value, expected)
                if reason is not None:
                    wrong.setdefault(target, f"{target}: {reason}")
    assert not wrong, "\n".join(wrong.values())
    assert len(compared) >= least, f"only {len(compared)} operators were tried"


@pytest.mark.long
@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
@pytest.mark.parametrize(
    ("dtype", "least"), [(torch.float32, 150), (torch.int64, 40), (torch.bool, 25)], ids=str
)
def test_every_operator_gives_what_torch_gives(name: str, dtype: torch.dtype, least: int) -> None:
    check(by_name(name), dtype, 4, least if name == "onnxruntime" else least // 4)
