"""Small ONNX models of many opsets, read as ONNX Runtime runs them, or refused with the reason."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dovetail
from dovetail.errors import InvalidFile
from dovetail.interop.onnx_operators import operators
from dovetail.interop.onnx_reading import from_onnx
from dovetail.interop.onnx_versions import NEWEST, OLDEST
from dovetail.interop.onnx_writing import to_onnx

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

FAR = 2**63 - 1
X = torch.linspace(-2, 2, 24).sin().reshape(2, 3, 4)
PICTURE = torch.linspace(-3, 3, 84).sin().reshape(1, 2, 7, 6)
Row = tuple[Tensor, str, int, dict[str, Any], dict[str, Any]]


def model_of(x: Tensor, name: str, opset: int, held: dict[str, Any], attributes: dict[str, Any]) -> Any:
    """One operator; `held` are its other inputs, None those that it is not given; `results` how many it has."""
    helper = onnx.helper
    given = {k: torch.as_tensor(v) for k, v in held.items() if v is not None}
    weights = [onnx.numpy_helper.from_array(v.numpy(), k) for k, v in given.items()]
    results = [f"y{i}" for i in range(attributes.get("results", 1))]
    kept = {k: v for k, v in attributes.items() if k != "results"}
    inputs = ["x", *(k if v is not None else "" for k, v in held.items())]
    graph = helper.make_graph(
        [helper.make_node(name, inputs, results, **kept)],
        "g",
        [helper.make_tensor_value_info("x", 1, list(x.shape))],
        [helper.make_empty_tensor_value_info(r) for r in results],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def whole(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def sliced(starts: Sequence[int], ends: Sequence[int], axes: Sequence[int], steps: Sequence[int]) -> Any:
    return {"s": whole(*starts), "e": whole(*ends), "a": whole(*axes), "t": whole(*steps)}


NEAREST = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
STATISTICS = {
    k: torch.tensor(v) for k, v in {"s": [1.0, 2], "b": [0.0, 1], "m": [0.5, 1], "v": [2.0, 1]}.items()
}
READ: dict[str, Row] = {
    **{
        f"{name} of {opset}": (X, name, opset, {}, {})
        for name in ("Softmax", "LogSoftmax")
        for opset in (7, 11, 12, 13)
    },
    "Softmax from the second": (X, "Softmax", 11, {}, {"axis": 2}),
    "ReduceMean by attribute": (X, "ReduceMean", 17, {}, {"axes": [1], "keepdims": 0}),
    "ReduceMean by input": (X, "ReduceMean", 18, {"a": whole(-1)}, {}),
    "ReduceSum by attribute": (X, "ReduceSum", 11, {}, {"axes": [1]}),
    "ReduceSum of nothing": (X, "ReduceSum", 13, {"a": whole()}, {"noop_with_empty_axes": 1}),
    "ReduceProd of all": (X, "ReduceProd", 18, {"a": whole()}, {}),
    **{
        f"{name} of nothing": (X, name, 20, {}, {"noop_with_empty_axes": 1})
        for name in ("ReduceSum", "ReduceMax", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSumExp")
    },
    "Split in halves": (X, "Split", 13, {}, {"axis": 2, "results": 2}),
    "Split in one": (X, "Split", 13, {}, {"axis": 2}),
    "Split by attribute": (X, "Split", 11, {}, {"axis": 2, "split": [1, 3], "results": 2}),
    "Split by number": (X, "Split", 18, {}, {"axis": 1, "num_outputs": 2, "results": 2}),
    "Squeeze by attribute": (X[:1], "Squeeze", 11, {}, {"axes": [0]}),
    "BatchNormalization of 9": (PICTURE, "BatchNormalization", 9, STATISTICS, {}),
    "BatchNormalization of 15": (PICTURE, "BatchNormalization", 15, STATISTICS, {}),
    "Clip by attribute": (X, "Clip", 6, {}, {"min": -0.5, "max": 0.5}),
    "Clip from above": (X, "Clip", 13, {"least": None, "most": 0.5}, {}),
    "Pad by attribute": (X, "Pad", 10, {}, {"pads": [0, 1, 0, 0, 0, 2], "value": 3.0}),
    "Pad some": (X, "Pad", 18, {"p": whole(1, 0, 2, 1), "v": None, "a": whole(-1, 1)}, {"mode": "edge"}),
    **{
        f"Pad all, {mode}": (X, "Pad", 19, {"p": whole(1, 2, 3, 1, 0, 2)}, {"mode": mode})
        for mode in ("constant", "reflect", "edge", "wrap")
    },
    "Resize": (PICTURE, "Resize", 13, {"r": None, "s": [1.0, 1.0, 1.5, 2.0]}, NEAREST),
    "Resize some": (PICTURE, "Resize", 18, {"r": None, "s": [2.0, 2.0]}, {"axes": [2, 3], **NEAREST}),
    "Cast": (X, "Cast", 19, {}, {"to": 7}),
    "Flatten": (X, "Flatten", 13, {}, {"axis": -1}),
    **{
        f"Conv {pad} {steps}": (
            PICTURE,
            "Conv",
            20,
            {"w": PICTURE[:, :, :3, :2]},
            {"auto_pad": pad, "strides": steps},
        )
        for pad in ("SAME_UPPER", "SAME_LOWER", "VALID")
        for steps in ([1, 1], [2, 3])
    },
    **{
        f"MaxPool {pad}": (PICTURE, "MaxPool", 20, {}, {"auto_pad": pad, "kernel_shape": [3, 2]})
        for pad in ("SAME_UPPER", "SAME_LOWER")
    },
    "AveragePool": (PICTURE, "AveragePool", 20, {}, {"auto_pad": "SAME_UPPER", "kernel_shape": [3, 3]}),
    "Slice all backwards": (X, "Slice", 20, sliced([-1, -1], [-FAR, -FAR], [1, 2], [-1, -1]), {}),
    "Slice one backwards": (X, "Slice", 20, sliced([-1, 0], [-FAR, 2], [1, 2], [-1, 1]), {}),
    "Slice a part backwards": (X, "Slice", 13, sliced([2], [0], [2], [-1]), {}),
    "Slice every other backwards": (X, "Slice", 13, sliced([100, 1], [-FAR, 0], [-1, 1], [-2, -1]), {}),
    "Slice nothing backwards": (X, "Slice", 13, sliced([0], [2], [2], [-1]), {}),
    "TopK": (X, "TopK", 24, {"k": whole(2)}, {"results": 2}),
    "newest": (X, "Relu", NEWEST, {}, {}),
}


@pytest.mark.parametrize("which", READ)
def test_what_is_read_is_what_onnx_runtime_runs(which: str, tmp_path: Path) -> None:
    x = READ[which][0]
    onnx.save(model_of(*READ[which]), tmp_path / "m.onnx")
    session = ort.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    wanted = [torch.from_numpy(v) for v in session.run(None, {"x": x.numpy()})]
    torch.testing.assert_close(list(from_onnx(tmp_path / "m.onnx")(x)), wanted)


REFUSED: dict[str, tuple[Row, str]] = {
    "newer": ((X, "Relu", NEWEST + 1, {}, {}), f"is of opset {NEWEST + 1}, and read up to {NEWEST}"),
    "no way up": ((X, "GRU", 3, {}, {}), "is of opset 3, which onnx does not convert to 20: .*GRU"),
    "ConvTranspose": (
        (PICTURE, "ConvTranspose", 20, {"w": PICTURE.reshape(2, 1, 7, 6)}, {"auto_pad": "SAME_UPPER"}),
        r"ConvTranspose \('y0'\): a transposed convolution with auto_pad 'SAME_UPPER'",
    ),
    "uneven": (
        (PICTURE, "AveragePool", 20, {}, {"auto_pad": "SAME_UPPER", "kernel_shape": [2, 2]}),
        "an average pooling with uneven padding",
    ),
    "element type": ((X, "Cast", 19, {}, {"to": 17}), "no dtype for the element type 17"),
    "results": (
        (PICTURE, "MaxPool", 20, {}, {"kernel_shape": [2, 2], "results": 2}),
        "2 results are asked for, of which 1 can be had",
    ),
    "channels": ((PICTURE, "Resize", 13, {"r": None, "s": [1.0, 2, 2, 2]}, NEAREST), "of channels"),
    "torch": ((X, "Reshape", 20, {"s": whole(5)}, {}), r"Reshape \('y0'\): RuntimeError: shape '\[5\]'"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_what_is_not_read_is_told(which: str, tmp_path: Path) -> None:
    row, reason = REFUSED[which]
    onnx.save(model_of(*row), tmp_path / "m.onnx")
    with pytest.raises(InvalidFile, match=reason):
        from_onnx(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("own", "others", "reason"), [(20, 9, "function 'sq' of opset 9"), (9, 20, "opset 9 and has")]
)
def test_old_functions_are_refused(own: int, others: int, reason: str, tmp_path: Path) -> None:
    helper = onnx.helper
    body = [helper.make_node("Softmax", ["a"], ["b"])]
    made = model_of(X, "Relu", own, {}, {})
    made.functions.append(
        helper.make_function("acme", "sq", ["a"], ["b"], body, [helper.make_opsetid("", others)])
    )
    onnx.save(made, tmp_path / "m.onnx")
    with pytest.raises(InvalidFile, match=reason):
        from_onnx(tmp_path / "m.onnx")


def test_sizes_of_an_old_file_keep_their_names(tmp_path: Path) -> None:
    made = model_of(X, "Softmax", 11, {}, {})
    made.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    onnx.save(made, tmp_path / "m.onnx")
    x = torch.randn(5, 3, 4)
    (found,) = from_onnx(tmp_path / "m.onnx", sizes={"n": 5})(x)
    torch.testing.assert_close(found, x.flatten(1).softmax(1).reshape(5, 3, 4))


def test_a_picture_grown_is_read_again(tmp_path: Path) -> None:
    gm = dovetail.capture(lambda x: F.interpolate(x, scale_factor=2.0), (PICTURE,))
    names = [n.name for n in gm.graph.nodes if n.op == "call_function"]
    for number, graph in enumerate((gm, dovetail.outline(gm, names, kind="grow"))):
        again = from_onnx(to_onnx(graph, tmp_path / f"{number}.onnx"))
        assert torch.equal(again(PICTURE)[0], gm(PICTURE))


@pytest.mark.parametrize("value", [torch.tensor([3]), torch.tensor([2.5]), torch.tensor([True]), None])
def test_a_constant_has_its_own_type(value: Tensor | None, tmp_path: Path) -> None:
    helper = onnx.helper
    held = {} if value is None else {"value": onnx.numpy_helper.from_array(value.numpy())}
    made = model_of(X, "Shape", 20, {}, {})
    made.graph.node.append(helper.make_node("ConstantOfShape", ["y0"], ["c"], **held))
    made.graph.output[0].name = "c"
    onnx.save(made, tmp_path / "m.onnx")
    wanted = torch.zeros(X.shape) if value is None else value.expand(X.shape)
    torch.testing.assert_close(from_onnx(tmp_path / "m.onnx")(X)[0], wanted)


UNREAD = {("ConvTranspose", "output_shape")}


def test_operators_take_what_onnx_gives_them() -> None:
    """Up to the newest opset that is read: one after it may have inputs and attributes that nobody has looked at."""
    missing: set[tuple[str, str]] = set()
    for schema in onnx.defs.get_all_schemas_with_history():
        read = operators().get(schema.name) if not schema.domain else None
        last = (
            onnx.defs.get_schema(schema.name, OLDEST, "").since_version
            if read and schema.since_version < OLDEST
            else 0
        )
        if read is None or schema.since_version > NEWEST or schema.since_version < last:
            continue
        taken = inspect.signature(read).parameters.values()
        kinds = [p.kind for p in taken]
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            missing |= {(schema.name, a) for a in schema.attributes if a not in {p.name for p in taken}}
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            places = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
            missing |= {(schema.name, i.name) for i in schema.inputs[places:]}
    assert missing == UNREAD
