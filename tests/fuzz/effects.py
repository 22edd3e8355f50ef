"""What generated programs are made of, by category: state, writes, random draws and other effects."""

from __future__ import annotations

import torch

from .builder import Builder
from .program import Ref
from .vocabulary import UNARY, A, multiple_results, unary, view

STATE = (
    ("buffer", "torch.linspace(-1, 1, 6).reshape(2, 3).clone()"),
    ("buffer", "torch.zeros(())"),
    ("transient", "torch.linspace(0, 1, 3)"),
    ("parameter", "torch.linspace(-1, 1, 6).reshape(3, 2).clone()"),
    ("parameter", "torch.linspace(1, 2, 3)"),
    ("parameter", "torch.linspace(-2, 2, 6).reshape(2, 3).clone()"),
    ("constant", "torch.full((2, 3), 0.75)"),
    ("constant", "torch.linspace(0, 2, 3)"),
)
MODULES = (
    "nn.Linear(3, 3)",
    "nn.Linear(3, 2)",
    "nn.Dropout(0.5)",
    "nn.Dropout(0.5).eval()",
    "nn.BatchNorm1d(3)",
    "nn.BatchNorm1d(3).eval()",
    "nn.ReLU()",
    "nn.ReLU(inplace=True)",
    "nn.LayerNorm(3)",
    "nn.Identity()",
    "nn.Flatten(0)",
    "nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.25), nn.ReLU(inplace=True))",
    "nn.Hardtanh(inplace=True)",
    "Counter()",
)


def state(b: Builder) -> None:
    """A parameter, buffer or constant: a new one, one read before, or one of a child's."""
    fields = [
        f"{o.name}.{part}"
        for o in b.owned
        if o.how == "module"
        for part in ("weight", "running_mean", "count", "step")
        if hasattr(getattr(b.root, o.name), part) and getattr(getattr(b.root, o.name), part) is not None
    ]
    if fields and b.chance(3):
        b.attr(b.choice(fields))
        return
    known = [o.name for o in b.owned if o.how != "module"]
    if known and b.chance(2):
        b.attr(b.choice(known))
        return
    how, expression = b.choice(STATE)
    tensors = [o for o in b.owned if o.how in ("buffer", "constant")]
    if tensors and b.chance(6):
        # Two names of one memory: a tied buffer, or a part of one.
        how, expression = "buffer", f"root.{b.choice(tensors).name}"
    b.attr(b.new_owned(how, expression).name)


def module(b: Builder) -> None:
    x = b.tensor(lambda v: v.dim() == 2 and v.shape[-1] == 3)
    if x is None:
        return
    if b.chance(8):
        b.module("adder()", b.tensor(), x)
    else:
        b.module(b.choice(MODULES), x)


def _written(b: Builder) -> Ref | None:
    """Something to write: often a view, a buffer or an input, so that others see it."""
    return b.tensor(_writable)


def _writable(value: torch.Tensor) -> bool:
    try:
        return value.dtype is torch.float32 and not (value.requires_grad and value.is_leaf)
    except RuntimeError:  # a view of several whose base was written: autograd refuses even to be asked
        return False


def write(b: Builder, into: Ref | None = None) -> None:
    x = into or _written(b)
    if x is None:
        return
    y = b.like(x)
    way = b.rng.randrange(26)
    if way == 0:
        b.call(f"{A}.add_.Tensor", x, y)
    elif way == 1:
        b.call(f"{A}.mul_.Tensor", x, 0.5)
    elif way == 2:
        b.call(f"{A}.copy_.default", x, y)
    elif way == 3:
        b.call(f"{A}.fill_.Scalar", x, 0.5)
    elif way == 4:
        b.call(f"{A}.relu_.default", x)
    elif way == 5:
        b.call(f"{A}.zero_.default", x)
    elif way == 6:
        index = b.call(f"{A}.arange.default", 1)
        value = b.call(f"{A}.scalar_tensor.default", 3.0)
        b.call(f"{A}.index_put_.default", x, [index], value) if index and value else None
    elif way == 7:
        b.call(f"{A}.add.out", y, 0.5, out=x)
    elif way == 8:
        b.call(f"{A}.exp.out", b.tensor(lambda v: v.shape == b.of(x).shape), out=x)
    elif way == 9:
        b.call("torch.add", y, y, out=x)
    elif way == 10:
        b.method(b.choice(("add_", "mul_", "sub_", "copy_")), x, y)
    elif way == 11:
        b.method("zero_", x)
    elif way == 12:
        b.call(b.choice(("operator.iadd", "operator.imul", "operator.isub")), x, y)
    elif way == 13:
        b.call("operator.setitem", x, 0, 0.25)
    elif way == 14:
        b.call("F.relu", x, inplace=True)
    elif way == 15:
        b.call("torch.relu_", x)
    elif way == 16:
        b.call(f"{A}.clamp_.default", x, -0.5, 0.5)
    elif way == 17:
        b.call(f"{A}._foreach_add_.Scalar", [x, y], 0.5)
    elif way == 18:
        b.call("torch.ops.dovetail_fuzz.bump.default", x, 0.5)
    elif way == 19:
        b.call("torch.ops.dovetail_fuzz.swap.default", x, y)
    elif way == 20:
        b.call("overwrite", x, 0.125)
    elif way == 21:
        mask = b.call(f"{A}.gt.Scalar", y, 0.0)
        b.call(f"{A}.masked_fill_.Scalar", x, mask, 1.0) if mask else None
    elif way == 22:
        b.call(f"{A}.addcmul_.default", x, y, y)
    elif way == 23:
        b.call("F.hardtanh", x, inplace=True)
    elif way == 24:
        b.method(b.choice(("relu_", "neg_", "abs_", "__iadd__")), x, *([1.0] if b.chance(3) else []))
    else:
        b.call("F.threshold", x, 0.1, 0.2, True)


def clash(b: Builder) -> None:
    """A view, a look at what it is a view of, a write through the view, and another look."""
    x = _written(b)
    if x is None:
        return
    before = len(b.steps)
    view(b) if b.rng.randrange(3) else multiple_results(b)
    refs = [Ref(step.name) for step in b.steps[before:] if x.name in step.reads or b.steps[-1] is step]
    views = [v for v in refs if isinstance(b.of(v), torch.Tensor) and _writable(b.of(v))]
    looked = b.call(b.choice(UNARY), x)
    if b.chance(3):
        unary(b)
    write(b, b.choice(views) if views else x)
    again = b.call(b.choice(UNARY), x)
    b.watched += [ref for ref in (looked, again) if ref is not None]


def reshape_in_place(b: Builder) -> None:
    """Writes that change what a value looks like, not its memory. Not of what the module owns."""
    owned = {id(t) for m in b.root.modules() for t in (*m._buffers.values(), *m.__dict__.values())}
    x = b.tensor(lambda v: v.dim() == 2 and id(v) not in owned and not v.requires_grad)
    if x is None or x.name in dict(b.inputs):
        return
    b.call(b.choice((f"{A}.t_.default", f"{A}.unsqueeze_.default")), x, *([0] if b.chance(2) else []))


def draw(b: Builder) -> None:
    x = b.tensor()
    shape = [2, 3]
    way = b.rng.randrange(18)
    if way == 0:
        b.call(f"{A}.rand.default", shape)
    elif way == 1:
        b.call(f"{A}.randn_like.default", x)
    elif way == 2:
        b.call(f"{A}.bernoulli.p", x, 0.5)
    elif way == 3:
        dropped = b.call(f"{A}.native_dropout.default", x, 0.5, True)
        for i in range(2):
            b.call("operator.getitem", dropped, i) if dropped and b.rng.randrange(3) else None
    elif way == 4:
        b.call("F.dropout", x, 0.5, True)
    elif way == 5:
        b.call("F.dropout", x, p=0.5, training=False)
    elif way == 6:
        b.call("torch.rand", *shape)
    elif way == 7:
        b.call("torch.randperm", 3)
    elif way == 8:
        b.call(f"{A}.normal_.default", _written(b))
    elif way == 9:
        b.call(f"{A}.uniform_.default", _written(b), 0.0, 1.0)
    elif way == 10:
        b.method("bernoulli_", _written(b), 0.5)
    elif way == 11:
        b.call("torch.rand_like", x)
    elif way == 12:
        b.call("F.dropout", _written(b), 0.25, inplace=True)
    elif way == 13:
        # Of other strides torch's fake kernel gives its result those of the operand, and its real one does not.
        b.call("F.rrelu", b.method("contiguous", x), training=True)
    elif way == 14:
        b.call("torch.bernoulli", b.call(f"{A}.sigmoid.default", x))
    elif way == 15:
        b.call(f"{A}.randint.default", 5, [2])
    elif way == 16:
        b.call("torch.normal", 0.0, 1.0, size=(2, 3))
    else:
        b.call(f"{A}.multinomial.default", b.call(f"{A}.sigmoid.default", x), 1)


def host_effects(b: Builder) -> None:
    x = b.tensor()
    if x is None:
        return
    tag = len(b.steps)
    way = b.rng.randrange(7)
    if way <= 2:
        b.call("torch.ops.dovetail_fuzz.note.default", x, tag)
    elif way == 3:
        b.call("shout", x, tag)
    elif way == 4:
        total = b.call(f"{A}.sum.default", b.call(f"{A}.abs.default", x))
        fine = b.call(f"{A}.ge.Scalar", total, 0.0) if total else None
        b.call(f"{A}._assert_async.msg", fine, "negative") if fine else None
    elif way == 5:
        b.call("torch._assert", True, "fine")
    else:
        b.call("torch.ops.dovetail_fuzz.note.default", x, tag)


def grad_mode(b: Builder) -> None:
    b.call(b.choice(("torch._C._set_grad_enabled", "torch.set_grad_enabled")), b.chance(2))


def branching(b: Builder) -> None:
    x = b.tensor()
    if x is None:
        return
    flag = b.call(f"{A}.gt.Scalar", b.call(f"{A}.sum.default", x), 0.0)
    if flag is None:
        return
    arms = [b.attr(b.new_owned("module", f"branch({by})").name) for by in (2.0, -1.0)]
    result = b.call("torch.ops.higher_order.cond", flag, *arms, (x,))
    if result is not None:
        b.call("operator.getitem", result, 0)
