"""TVM's FuseOps and FuseOpsByPattern on one program: prints seconds as JSON. Run by benchmarks.fuse, one at a time.

python -m benchmarks.fuse_tvm chain 10000
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks.programs import PROGRAMS, QUARTERS, Program


def lowered(program: Program) -> Any:
    """The program as calls of primitive functions, which is what FuseOps takes."""
    from tvm import relax, te, topi

    kind = relax.TensorType((16, 16), "float32") if hasattr(relax, "TensorType") else None
    kind = kind or relax.TensorStructInfo((16, 16), "float32")
    builder = relax.BlockBuilder()
    nodes = {}
    for name, inputs, compute in (
        ("mul", 1, lambda a: topi.multiply(a, a)),
        ("add", 2, topi.add),
        ("mm", 2, topi.matmul),
    ):
        given = [te.placeholder((16, 16), name=f"a{i}") for i in range(inputs)]
        function = te.create_prim_func([*given, compute(*given)])
        nodes[name] = builder.add_func(function.with_attr("tir.noalias", True), name)
    x, w = relax.Var("x", kind), relax.Var("w", kind)
    with builder.function("main", [x, w]):
        with builder.dataflow():
            values = []
            for op, reads in program:
                given = [x if i < 0 else values[i] for i in reads]
                if op == "mm":
                    given.append(w)
                values.append(builder.emit(relax.call_tir(nodes[op], given, kind)))
            out = builder.emit_output(values[-1])
        builder.emit_func_output(out)
    return relax.transform.AnnotateTIROpPattern()(builder.get())


def spelled(program: Program) -> Any:
    """The program as high-level operators, which is what patterns are about."""
    from tvm import relax

    kind = relax.TensorType((16, 16), "float32") if hasattr(relax, "TensorType") else None
    kind = kind or relax.TensorStructInfo((16, 16), "float32")
    ops = {"mm": relax.op.matmul, "add": relax.op.add, "mul": relax.op.multiply, "times": relax.op.multiply}
    ops["sigmoid"] = relax.op.sigmoid
    builder = relax.BlockBuilder()
    x, w = relax.Var("x", kind), relax.Var("w", kind)
    with builder.function("main", [x, w]):
        with builder.dataflow():
            values = []
            for op, reads in program:
                given = [x if i < 0 else values[i] for i in reads]
                if op in ("mm", "mul"):
                    given.append(w if op == "mm" else given[0])
                values.append(builder.emit(ops[op](*given)))
            out = builder.emit_output(values[-1])
        builder.emit_func_output(out)
    return builder.get()


def main() -> int:
    from tvm import relax
    from tvm.relax.dpl import is_op, wildcard

    shape, nodes = sys.argv[1], int(sys.argv[2])
    program = PROGRAMS[shape](nodes)
    if shape == QUARTERS:
        x = wildcard()
        gated = is_op("relax.add")(is_op("relax.multiply")(x, is_op("relax.sigmoid")(x)), x)
        module = spelled(program)
        start = time.process_time()
        relax.transform.FuseOpsByPattern([("gated", gated)])(module)
        timings = {"FuseOpsByPattern": time.process_time() - start}
    else:
        module = lowered(program)
        start = time.process_time()
        relax.transform.FuseOps()(module)
        timings = {"FuseOps": time.process_time() - start}
    print(json.dumps(timings), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
