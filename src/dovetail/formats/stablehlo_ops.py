"""Operators as StableHLO: graphs are imported by torch-mlir, with what it and XLA are known to get wrong replaced."""

from __future__ import annotations

import functools
import importlib.util
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, Node

from dovetail.formats.op_support import COMMON_VALIDATED, INTEGRAL, ProbedSupport, SupportProbe
from dovetail.formats.reexport import lerp, pow_as_root
from dovetail.ir.process_state import reset_at_fork
from dovetail.ir.schema import argument_of, op_name
from dovetail.lowering.backend_protocol import load_package
from dovetail.lowering.failures import UnsupportedOp

ATEN = torch.ops.aten
PACKAGE = "torch_mlir"
_PIPELINES = (
    "builtin.module(torchdynamo-export-to-torch-backend-pipeline{extra-library=})",
    "builtin.module(torch-backend-to-stablehlo-backend-pipeline{allow-non-finites=true})",
    # Source locations are paths on this machine.
    "builtin.module(strip-debuginfo)",
)
_CONVERTING = reset_at_fork(threading.Lock())


def missing() -> str | None:
    """Return what to install, or None if torch-mlir is installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        return "torch_mlir is not installed; pip install 'dovetail[stablehlo]'"
    return None


def import_graphs(graphs: Mapping[str, Graph]) -> Any:
    """Return a StableHLO module with a function for each graph, whose nodes must have fake values.

    Matrix products have the precision of `torch.get_float32_matmul_precision`.
    """
    ir = load_package("torch_mlir.ir")
    manager = load_package("torch_mlir.passmanager").PassManager
    importing = load_package("torch_mlir.extras.fx_importer").FxImporter
    with _CONVERTING:
        context = ir.Context()
        load_package("torch_mlir.dialects.torch").register_dialect(context)
        try:
            importer = importing(context=context)
            for name, graph in graphs.items():
                importer.import_stateless_graph(graph, func_name=name)
            module = importer.module
            with context:
                for pipeline in _PIPELINES:
                    manager.parse(pipeline).run(module.operation)
        except Exception as error:
            raise UnsupportedOp(_reason(error)) from error
        with context, ir.Location.unknown():
            _legalize(ir, module)
    return module


def portable(module: Any) -> bytes:
    """Return a module as a portable artifact that StableHLO releases of the last twelve weeks and later ones read."""
    library = load_package("torch_mlir._mlir_libs._stablehlo")
    needed = library.StablehloCompatibilityRequirement.WEEK_12
    return library.serialize_portable_artifact(
        module, library.get_version_from_compatibility_requirement(needed)
    )


def nested_operations(owner: Any) -> Iterator[Any]:
    """Yield the operations inside an operation, those of nested regions included."""
    for region in owner.regions:
        for block in region.blocks:
            for op in list(block.operations):
                yield op
                yield from nested_operations(op)


def _legalize(ir: Any, module: Any) -> None:
    """Leave nothing but StableHLO and functions, and set the precision of products."""
    exact = torch.get_float32_matmul_precision() == "highest"
    word = "HIGHEST" if exact else "DEFAULT"
    precision = ir.Attribute.parse(f"[#stablehlo<precision {word}>, #stablehlo<precision {word}>]")
    for op in list(nested_operations(module.operation)):
        name = op.operation.name
        if name == "arith.constant":
            with ir.InsertionPoint(op):
                constant = ir.Operation.create(
                    "stablehlo.constant",
                    results=[op.operation.result.type],
                    attributes={"value": op.operation.attributes["value"]},
                )
            op.operation.result.replace_all_uses_with(constant.result)
            op.operation.erase()
        elif name == "stablehlo.compare" and _is_unsigned(ir, op):
            op.operation.attributes["compare_type"] = ir.Attribute.parse(
                "#stablehlo<comparison_type UNSIGNED>"
            )
        elif name == "stablehlo.compare" and op.operation.parent.name == "stablehlo.sort":
            # NaN is the largest of all, as in torch.
            if "FLOAT" in str(op.operation.attributes["compare_type"]):
                op.operation.attributes["compare_type"] = ir.Attribute.parse(
                    "#stablehlo<comparison_type TOTALORDER>"
                )
        elif name in ("stablehlo.dot_general", "stablehlo.convolution"):
            op.operation.attributes["precision_config"] = precision
        elif name.partition(".")[0] not in ("stablehlo", "func", "builtin"):
            raise UnsupportedOp(f"torch-mlir leaves a {name}")


def _is_unsigned(ir: Any, op: Any) -> bool:
    kind = ir.RankedTensorType(op.operation.operands[0].type).element_type
    return str(kind) == "i1" or str(kind).startswith("ui")


_FAILED = re.compile(r"(?:failed to legalize|unsupported|expected|error:)[^\n]*?'([a-z_0-9.]+)'")
_CALLED = re.compile(r'name = "(torch\.[a-z_0-9.A-Z]+)"')


def _reason(error: BaseException) -> str:
    text = str(error)
    match = _CALLED.search(text) or _FAILED.search(text)
    if match is not None:
        return f"torch-mlir has no StableHLO conversion of {match.group(1)}"
    line = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"torch-mlir does not convert it: {line.strip()[:200]}"


_VALIDATED_NAMES = """
    _native_batch_norm_legit_functional.default _upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec
    _upsample_nearest_exact3d.vec addbmm.default addr.default all.dim amax.default amin.default any.default any.dim
    any.dims argmax.default argmin.default argsort.default atan2.default avg_pool1d.default avg_pool2d.default
    bilinear.default clamp.Tensor clamp_max.Tensor clamp_max.default clamp_min.Tensor conv3d.default
    conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input copysign.Tensor cosine_similarity.default
    cross.default deg2rad.default diag.default diag_embed.default exp2.default fmax.default fmin.default
    kron.default log1p.default log_sigmoid.default logsumexp.default max.other meshgrid.indexing min.other
    mish.default nan_to_num.default native_group_norm.default native_layer_norm.default prod.dim_int round.decimals
    scatter_add.default slice_scatter.default sort.default std.correction std.default std_mean.correction
    std_mean.default std_mean.dim sum_to_size.default tensordot.default true_divide.Tensor upsample_linear1d.vec
    upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec var.correction var.default var.dim
    var_mean.correction var_mean.default var_mean.dim vdot.default
"""
_VALIDATED = COMMON_VALIDATED | frozenset(_VALIDATED_NAMES.split())
"""Operators whose results in XLA were compared with torch's."""


def _addcmul(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Any:
    return NotImplemented if value == 1 else x + a * value * b


def _addcdiv(x: Tensor, a: Tensor, b: Tensor, *, value: float = 1) -> Any:
    return NotImplemented if value == 1 else x + a * value / b


def _log_sigmoid(x: Tensor) -> Tensor:
    return torch.clamp(x, max=0) - torch.log1p(torch.exp(-x.abs()))


def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    if eps is not None:
        return NotImplemented
    return ATEN.rms_norm.default(x, normalized_shape, weight, torch.finfo(x.dtype).eps)


def _max_pool2d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Any:
    """Pool with a partial last window as the maximum over the positions in a window."""
    k, p, d = (_pair(one) for one in (kernel, padding, dilation))
    s = _pair(stride) if stride else k
    counts, missing = [0, 0], [0, 0]
    for i in range(2):
        size, reach = x.shape[i - 2], d[i] * (k[i] - 1) + 1
        counts[i] = -((reach - size - 2 * p[i]) // s[i]) + 1
        # No window begins behind the end of the image.
        counts[i] -= (counts[i] - 1) * s[i] >= size + p[i]
        missing[i] = (counts[i] - 1) * s[i] + reach - size - 2 * p[i]
    if not ceil_mode or max(missing) <= 0:
        return NotImplemented
    down, across = (max(n, 0) for n in missing)
    least = -torch.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    wide = F.pad(x, (p[1], p[1] + across, p[0], p[0] + down), value=least)
    rows, columns = (
        [slice(j * d[i], j * d[i] + (counts[i] - 1) * s[i] + 1, s[i]) for j in range(k[i])] for i in range(2)
    )
    return functools.reduce(torch.maximum, [wide[..., r, c] for r in rows for c in columns])


def _pair(sizes: Sequence[int]) -> list[int]:
    return [sizes[0], sizes[-1]]


def _product_only(product: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a workaround for `beta=0`, where torch ignores the added tensor even if it is NaN."""

    def run(x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        if beta:
            return NotImplemented
        result = product(a, b)
        return result if alpha == 1 else result * alpha

    return run


def _arg_extremum(target: Any) -> Callable[..., Any]:
    """Return a workaround for argmax and argmin of NaN, which torch treats as the extremum."""

    def run(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        if not x.dtype.is_floating_point:
            return NotImplemented
        nan = torch.isnan(x)
        has_nan = nan.any() if dim is None else nan.any(dim, keepdim)
        return torch.where(has_nan, torch.argmax(nan.int(), dim, keepdim), target(x, dim, keepdim))

    return run


def _nan_last(target: Any) -> Callable[..., Any]:
    """Return a workaround for sorting NaN of negative sign, which would come first."""

    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not x.dtype.is_floating_point:
            return NotImplemented
        return target(torch.where(torch.isnan(x), torch.nan, x), *args, **kwargs)

    return run


def _cosine_similarity(x: Tensor, y: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """Clamp the norm of each side by itself, as torch does."""
    dtype = torch.promote_types(x.dtype, y.dtype)
    a, b = (
        one / torch.linalg.vector_norm(one, 2, dim, keepdim=True).clamp(min=eps)
        for one in torch.broadcast_tensors(x.to(dtype), y.to(dtype))
    )
    return (a * b).sum(dim)


XLA_WORKAROUNDS: Mapping[Any, Callable[..., Any]] = {
    ATEN.pow.Tensor_Scalar: pow_as_root,
    ATEN.lerp.Scalar: lerp,
    ATEN.lerp.Tensor: lerp,
    ATEN.addcmul.default: _addcmul,
    ATEN.addcdiv.default: _addcdiv,
    ATEN.log_sigmoid.default: _log_sigmoid,
    ATEN.rms_norm.default: _rms_norm,
    ATEN.max_pool2d.default: _max_pool2d,
    ATEN.addmm.default: _product_only(torch.mm),
    ATEN.baddbmm.default: _product_only(torch.bmm),
    ATEN.argmax.default: _arg_extremum(ATEN.argmax.default),
    ATEN.argmin.default: _arg_extremum(ATEN.argmin.default),
    ATEN.sort.default: _nan_last(ATEN.sort.default),
    ATEN.argsort.default: _nan_last(ATEN.argsort.default),
    ATEN.topk.default: _nan_last(ATEN.topk.default),
    ATEN.cosine_similarity.default: _cosine_similarity,
}


class StableHloSupport(ProbedSupport):
    """Which operations torch-mlir writes as StableHLO such that XLA computes what torch does."""

    name = "stablehlo"
    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset({torch.float32, torch.float64, *INTEGRAL})
    flushes_denormals: ClassVar[bool] = True

    def probe(self) -> SupportProbe:
        return _probe()


@functools.cache
def _probe() -> SupportProbe:
    return SupportProbe(
        convert=lambda graph: import_graphs({"main": graph}),
        table=lambda: load_package("torch_mlir.extras.fx_decomp_util").get_decomposition_table(),
        validated=_VALIDATED,
        why_wrong=_why_wrong,
        decompose_first=_DECOMPOSED,
        workarounds=XLA_WORKAROUNDS,
    )


_DECOMPOSED = frozenset(
    {
        "aten.scaled_dot_product_attention.default",
        "aten._native_batch_norm_legit_no_training.default",
        "aten.unbind.int",
        "aten.diff.default",
        "aten.einsum.default",
    }
)
"""Operators that torch-mlir converts only when they are decomposed; some einsums would crash it."""


def _why_wrong(node: Node) -> str | None:
    """Return why XLA computes something else than torch for these arguments, or None."""
    name = op_name(node.target)
    if name in ("std", "var", "std_mean", "var_mean"):
        operand, result = (_numel(n) for n in (node.args[0], node))
        if (argument_of(node, "correction") or 0) * result > operand:
            return "its correction is larger than the number of elements"
    first = node.args[0] if node.args else None
    value = first.meta.get("val") if isinstance(first, Node) else None
    if name in _SIGNED_ONLY and isinstance(value, Tensor) and value.dtype is torch.uint8:
        return f"torch-mlir treats uint8 as int8 in {node.target}"
    return None


_SIGNED_ONLY = frozenset(("all", "amax", "amin", "any", "argmax", "argmin", "max", "max_pool2d", "min"))


def _numel(node: Any) -> int:
    value = node.meta["val"]
    return (value if isinstance(value, Tensor) else value[0]).numel()
