"""Operators of torch.library in every form stay whole in the graph, and keep their derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail

Form = Callable[[Tensor, Tensor], Tensor]
NAMESPACE = "dovetail_forms"
OPS = getattr(torch.ops, NAMESPACE)


class Scaled(torch.autograd.Function):
    """A derivative that no tracing through the forward could find."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return OPS.by_key(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 17 * grads[0]


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 19 * grads[0]


def _define_decorated() -> None:
    def custom(kernel: Any, mutates: Any = ()) -> Any:
        return torch.library.custom_op(f"{NAMESPACE}::{kernel.__name__}", mutates_args=mutates)(kernel)

    def square(x: Tensor) -> Tensor:
        return x * x

    def scale(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    def gate(x: Tensor, w: Tensor, *, by: float = 2.0, mode: str = "a") -> tuple[Tensor, Tensor]:
        return x * w * by, (x > 0).long()

    def accumulate(into: Tensor, x: Tensor) -> None:
        into.add_(x)

    def accumulate_twice(into: Tensor, x: Tensor) -> Tensor:
        into.add_(x)
        return into * 2

    def each(xs: list[Tensor], by: int) -> list[Tensor]:
        return [x * by for x in xs]

    def shift(x: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
        result = x * 2 if bias is None else x * 2 + bias
        return result if dtype is None else result.to(dtype)

    def positive(x: Tensor) -> Tensor:
        return x[x > 0]

    def without_fake(x: Tensor) -> Tensor:
        return x * x

    for annotated in (square, scale, gate, accumulate, accumulate_twice, each, shift, positive, without_fake):
        annotated.__annotations__ = {
            "x": Tensor,
            "w": Tensor,
            "into": Tensor,
            "by": int if annotated is each else float,
            "mode": str,
            "xs": list[Tensor],
            "bias": Tensor | None,
            "dtype": torch.dtype | None,
            "return": {
                gate: tuple[Tensor, Tensor],
                accumulate: None,
                each: list[Tensor],
            }.get(annotated, Tensor),
        }
    custom(without_fake)
    custom(square).register_fake(torch.empty_like)
    scaling = custom(scale)
    scaling.register_fake(lambda x, by=2.0: torch.empty_like(x))
    scaling.register_autograd(lambda ctx, grad: (5 * grad, None))
    gating = custom(gate)
    gating.register_fake(
        lambda x, w, *, by=2.0, mode="a": (torch.empty_like(x), torch.empty_like(x, dtype=torch.long))
    )

    def save(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.by = keyword_only_inputs["by"]
        ctx.mark_non_differentiable(output[1])

    gating.register_autograd(
        lambda ctx, grad, _: (11 * grad * ctx.saved_tensors[1], ctx.by * grad * ctx.saved_tensors[0]),
        setup_context=save,
    )
    custom(accumulate, {"into"})
    custom(accumulate_twice, {"into"}).register_fake(lambda into, x: torch.empty_like(into))
    eaching = custom(each)
    eaching.register_fake(lambda xs, by: [torch.empty_like(x) for x in xs])
    eaching.register_autograd(lambda ctx, grads: ([3 * grad for grad in grads], None))
    shifting = custom(shift)
    shifting.register_fake(lambda x, bias, dtype=None: torch.empty_like(x, dtype=dtype))
    shifting.register_autograd(lambda ctx, grad: (7 * grad.float(), None, None))
    custom(positive).register_fake(lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()))


def _define_by_schema(lib: torch.library.Library) -> None:
    def define(schema: str, kernel: Any, key: str = "CompositeExplicitAutograd") -> str:
        lib.define(schema)
        name = schema.partition("(")[0]
        lib.impl(name, kernel, key)
        return f"{NAMESPACE}::{name}"

    def write(x: Tensor, *, out: Tensor) -> None:
        out.copy_(x + 1)

    def write_and_return(x: Tensor, *, out: Tensor) -> Tensor:
        out.copy_(x + 1)
        return out

    def pair(x: Tensor, *, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return q.copy_(x * 2), p.copy_(x + 1), x * 7

    def raise_both(p: Tensor, q: Tensor) -> Tensor:
        q.add_(2)
        return p.add_(1)

    for schema in ("on_cpu(Tensor x) -> Tensor", "derived(Tensor x) -> Tensor", "by_key(Tensor x) -> Tensor"):
        torch.library.register_fake(define(schema, lambda x: x * x, "CPU"), torch.empty_like, lib=lib)
    torch.library.register_autograd(f"{NAMESPACE}::derived", lambda ctx, grad: 13 * grad, lib=lib)
    lib.impl("by_key", Scaled.apply, "Autograd")
    define("explicit(Tensor x) -> Tensor", lambda x: x * x)
    define("implicit(Tensor x) -> Tensor", lambda x: torch.sin(x) * x, "CompositeImplicitAutograd")
    define("implicit_function(Tensor x) -> Tensor", lambda x: Sine.apply(x), "CompositeImplicitAutograd")
    define("plus_one(Tensor x) -> Tensor", lambda x: x + 1)
    define("plus_one.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", write_and_return)
    define("scale_(Tensor(a!) x, float by=2.0) -> Tensor(a!)", lambda x, by=2.0: x.mul_(by))
    define("view(Tensor(a) x) -> Tensor(a)", lambda x: x.view(-1))
    define("pair(Tensor x, *, Tensor(a!) p, Tensor(b!) q) -> (Tensor(b!), Tensor(a!), Tensor)", pair)
    define("raise_both(Tensor(a!) p, Tensor(b!) q) -> Tensor(a!)", raise_both)
    lib.define("no_fake(Tensor x) -> Tensor")
    lib.impl("no_fake", lambda x: x * 2, "CPU")
    define("write(Tensor x, *, Tensor(a!) out) -> ()", write)
    define("optional(Tensor x, bool given) -> Tensor?", lambda x, given: x + 1 if given else None)
    define("with_size(Tensor x) -> (Tensor, int)", lambda x: (x + 1, x.dim()))
    define("size_only(Tensor x) -> int", lambda x: x.dim())
    define("nested(Tensor x) -> (Tensor, Tensor[], Tensor)", lambda x: (x + 1, [x * 2, x * 3], x * 4))
    define("half_given(Tensor x) -> (Tensor, Tensor?)", lambda x: (x + 1, None))
    define("total(Tensor?[] xs) -> Tensor", lambda xs: sum(x for x in xs if x is not None))


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    lib = torch.library.Library(NAMESPACE, "FRAGMENT")
    _define_decorated()
    _define_by_schema(lib)
    yield
    lib._destroy()


def _written(operator: Any, into: Tensor, *args: Tensor) -> Tensor:
    operator(into, *args)
    return into


def _without_gradients(h: Tensor) -> Tensor:
    with torch.no_grad():
        return OPS.scale(h)


def _by_out(operator: Any, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    operator(x, out=out)
    return out


def _by_view(operator: Any, x: Tensor) -> Tensor:
    whole = torch.zeros(3, *x.shape)
    operator(x, out=whole[1])
    return whole.sum(0)


def _by_outs(x: Tensor) -> Tensor:
    p, q = torch.empty_like(x), torch.zeros(*x.shape[::-1]).t()
    return OPS.pair(x, p=p, q=q)[2] * 3 + p * 5 + q


def _scaled_view(x: Tensor) -> Tensor:
    OPS.scale_(x[:, 1:3], 3.0)
    return x


def _raised(p: Tensor, q: Tensor) -> Tensor:
    return OPS.raise_both(p, q) * q + p


# `h` requires gradients, `x` does not.
FORMS: dict[str, Form] = {
    "custom_op": lambda h, x: OPS.square(x) * h,
    "register_autograd": lambda h, x: OPS.scale(h),
    "called by name": lambda h, x: OPS.scale.default(h, by=3.0),
    "setup_context, keyword only": lambda h, x: OPS.gate(h, x, by=3.0)[0],
    "two results": lambda h, x: torch.add(*OPS.gate(h, x, mode="b")),
    "in no_grad": lambda h, x: _without_gradients(h) * h,
    "mutating": lambda h, x: _written(OPS.accumulate, x.clone(), x) * h,
    "mutating by a value with gradients": lambda h, x: _written(OPS.accumulate, x.clone(), h) * h,
    "mutating a value with gradients": lambda h, x: _written(OPS.accumulate, h * 1, x),
    "mutating an input": lambda h, x: _written(OPS.accumulate, x, x + 1) + h.detach() * x,
    "mutating and returning": lambda h, x: OPS.accumulate_twice(x.clone(), x) * h,
    "lists": lambda h, x: torch.stack(OPS.each([h, x, h * 2], 3)).sum(0),
    "no optional argument": lambda h, x: OPS.shift(h, None),
    "optional arguments": lambda h, x: OPS.shift(h, x, torch.float64),
    "size that depends on data": lambda h, x: OPS.positive(x).sum() * h,
    "define and impl": lambda h, x: OPS.on_cpu(x) * h,
    "define and register_autograd": lambda h, x: OPS.derived(h),
    "define and Autograd key": lambda h, x: OPS.by_key(h),
    "composite explicit": lambda h, x: OPS.explicit(x) * h,
    "composite implicit": lambda h, x: OPS.implicit(h),
    "composite implicit with a Function": lambda h, x: OPS.implicit_function(h),
    "functional form of an out-variant": lambda h, x: OPS.plus_one(x) * h,
    "out-variant without results": lambda h, x: _by_out(OPS.write, x) * h,
    "out-variant": lambda h, x: OPS.plus_one.out(x, out=torch.empty_like(x)) * h,
    "out-variant whose result is not read": lambda h, x: _by_out(OPS.plus_one.out, x) * h,
    "out-variant into a view": lambda h, x: _by_view(OPS.plus_one.out, x) * h,
    "out-variant with results in another order": lambda h, x: _by_outs(x) * h,
    "in-place": lambda h, x: OPS.scale_(x + 1) * h,
    "in-place on a value with gradients": lambda h, x: OPS.scale_(h * 1),
    "in-place on a view": lambda h, x: _scaled_view(x.clone()) * h,
    "in-place on an input": lambda h, x: OPS.scale_(x, 3.0) + h.detach() * x,
    "in-place on two, returning one": lambda h, x: _raised(x.clone(), x + 1) * h,
    "optional result": lambda h, x: OPS.optional(x, True) * h,
    "no result": lambda h, x: h if OPS.optional(x, False) is None else h * 2,
    "a number beside a tensor": lambda h, x: OPS.with_size(x)[0] * OPS.with_size(x)[1] * h,
    "a number": lambda h, x: h * OPS.size_only(x),
    "a list among results": lambda h, x: OPS.nested(x)[1][1] * OPS.nested(x)[2] * h,
    "None among results": lambda h, x: OPS.half_given(x)[0] * h,
    "list with None": lambda h, x: OPS.total([x, None, x + 1]) * h,
}


class Around(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.form(self.linear(x), x))


def _run(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """The result, the input afterwards and every gradient."""
    x = x.clone()
    result = model(x)
    parameters = list(model.parameters())
    grads = torch.autograd.grad(result.sum(), parameters, allow_unused=True) if result.requires_grad else ()
    return [result.detach(), x, *grads]


def _assert_equal(mine: list[Tensor | None], theirs: list[Tensor | None]) -> None:
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert a is b if a is None or b is None else torch.equal(a, b)


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@pytest.mark.parametrize(
    ("form", "trained"), [*((f, True) for f in FORMS), *((f, False) for f in [*FORMS][::6])]
)
def test_every_form_stays_whole(form: str, trained: bool) -> None:
    torch.manual_seed(0)
    model, x = Around(FORMS[form]).requires_grad_(trained), torch.randn(2, 4)
    graph = dovetail.capture(model, (x.clone(),))
    fused = dovetail.fuse(graph)
    expected = _run(model, x)
    _assert_equal(_run(graph, x), expected)
    _assert_equal(_run(fused, x), expected)
    assert dovetail.text(dovetail.inline(fused)) == dovetail.text(graph)


@pytest.mark.parametrize("form", ["register_autograd", "setup_context, keyword only", "lists"])
def test_derivatives_survive_strict_capture_and_files(form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Around(FORMS[form]), torch.randn(2, 4)
    expected = _run(model, x)
    _assert_equal(_run(dovetail.capture(model, (x,), strict=True), x), expected)
    dovetail.save(dovetail.fuse(dovetail.capture(model, (x,))), tmp_path / "model.pt2")
    loaded = dovetail.load(tmp_path / "model.pt2", trust={NAMESPACE})
    _assert_equal(_run(loaded, x), expected)


def _of_first_row(x: Tensor) -> Tensor:
    OPS.accumulate(x[0], torch.ones(4))
    return x * 3


WRITES_TO_INPUT: dict[str, Callable[[Tensor], Tensor]] = {
    "read afterwards": lambda x: _written(OPS.accumulate, x, torch.ones(4)).sin(),
    "not read": lambda x: OPS.accumulate_twice(x, torch.ones(4)).detach(),
    "written by a value computed from it": lambda x: _written(OPS.accumulate, x, x.detach().sigmoid()),
    "a part of it": _of_first_row,
    "after a write with history": lambda x: _written(OPS.accumulate, x.mul_(2), torch.ones(4)) * 3,
    "before a write with history": lambda x: _written(OPS.accumulate, x, torch.ones(4)).mul_(2) * 3,
}


@pytest.mark.parametrize("is_leaf", [True, False], ids=["leaf", "not a leaf"])
@pytest.mark.parametrize("was_required", [True, False], ids=["required", "not required"])
@pytest.mark.parametrize("write", WRITES_TO_INPUT)
def test_inputs_are_written_below_autograd(write: str, was_required: bool, is_leaf: bool) -> None:
    """An operator of custom_op may write to a leaf that requires gradients, and gives no operand another history."""
    if is_leaf and write.endswith("with history"):
        pytest.skip("eager mode refuses it too")

    def given(requires_grad: bool) -> tuple[Tensor, Tensor]:
        leaf = torch.linspace(-1, 2, 8).view(2, 4).requires_grad_(requires_grad)
        return leaf, leaf if is_leaf else leaf * 2

    def run(function: Callable[[Tensor], Tensor]) -> list[Any]:
        leaf, x = given(True)
        history = x.grad_fn
        result = function(x)
        total = result.sum() + x.sum()
        (gradient,) = torch.autograd.grad(total, leaf)
        kept = x.grad_fn is history or write.endswith("with history")
        return [result.tolist(), x.tolist(), x.is_leaf, kept, gradient.tolist()]

    function = WRITES_TO_INPUT[write]
    graph = dovetail.capture(function, (given(was_required)[1],))
    assert run(graph) == run(function)


def test_an_operator_without_a_derivative_refuses_backward_as_in_eager_mode() -> None:
    model, x = Around(lambda h, x: OPS.square(h)), torch.randn(2, 4)
    graph = dovetail.capture(model, (x,))
    for run in (model, graph):
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            run(x).sum().backward()


@pytest.mark.parametrize("form", [lambda h, x: Scaled.apply(h), lambda h, x: OPS.scale(Sine.apply(h))])
def test_a_function_beside_an_operator_is_still_refused(form: Form) -> None:
    with pytest.raises(dovetail.CaptureError, match="register_autograd"):
        dovetail.capture(Around(form), (torch.randn(2, 4),))


def test_a_triton_op_stays_whole() -> None:
    """Its fake kernel is its own function, which functionalisation would take apart outside of an export."""
    name = f"{NAMESPACE}::triton_sum"
    try:
        import triton
        import triton.language as tl
    except ImportError:

        def launch(x: Tensor, y: Tensor, out: Tensor) -> None:
            torch.add(x, y, out=out)
    else:

        @triton.jit
        def kernel(x, y, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
            at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(
                out + at,
                tl.load(x + at, mask=at < count) + tl.load(y + at, mask=at < count),
                mask=at < count,
            )

        def launch(x: Tensor, y: Tensor, out: Tensor) -> None:
            torch.library.wrap_triton(kernel)[(1,)](x, y, out, x.numel(), 16)

    def add(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        launch(x, y, out)
        return out

    add.__annotations__ = {"x": Tensor, "y": Tensor, "return": Tensor}
    op = torch.library.triton_op(name, add, mutates_args={})
    op.register_autograd(lambda ctx, grad: (5 * grad, None))
    op.register_kernel("cpu")(torch.add)
    torch.manual_seed(0)
    model, x = Around(lambda h, x: op(h, x)), torch.randn(2, 4)
    graph = dovetail.capture(model, (x,))
    assert OPS.triton_sum.default in {node.target for node in graph.graph.nodes}
    expected = _run(model, x)
    _assert_equal(_run(graph, x), expected)
    _assert_equal(_run(dovetail.fuse(graph), x), expected)


REFUSED: list[tuple[Form, str, str]] = [
    (lambda h, x: OPS.without_fake(x) * h, f"'{NAMESPACE}::without_fake'", "torch.library.register_fake"),
    (lambda h, x: OPS.no_fake(x) * h, f"'{NAMESPACE}.no_fake.default'", "torch.library.register_fake"),
    (lambda h, x: OPS.view(x) * h.view(-1), f"'{NAMESPACE}::view'", "Return a clone"),
    (
        lambda h, x: OPS.plus_one.out(h, out=torch.empty_like(x)) * h,
        f"{NAMESPACE}.plus_one.out",
        "new tensor",
    ),
]


@pytest.mark.parametrize(("form", "name", "advice"), REFUSED, ids=["custom_op", "impl", "view", "gradients"])
def test_what_no_functional_graph_holds_is_refused_by_name(form: Form, name: str, advice: str) -> None:
    with pytest.raises(dovetail.CaptureError) as caught:
        dovetail.capture(Around(form), (torch.randn(2, 4),))
    message = str(caught.value)
    assert name in message
    assert advice in message
    assert f"{__file__}:" in message


def test_an_out_variant_is_called_itself_on_memory_of_its_own(tmp_path: Path) -> None:
    model, x = Around(FORMS["out-variant"]), torch.randn(2, 4)
    graph = dovetail.capture(model, (x,))
    assert OPS.plus_one.out in {node.target for node in graph.graph.nodes}
    assert not any("functional" in str(node.target) for node in graph.graph.nodes)
    dovetail.save(graph, tmp_path / "model.pt2")
    _assert_equal(_run(dovetail.load(tmp_path / "model.pt2", trust={NAMESPACE}), x), _run(model, x))


class WriteThenTranspose(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        written = x * 2
        new = OPS.accumulate_twice(written, x)
        written.t_()
        return written + 0, new + 0


def test_a_new_result_of_an_operator_is_not_the_tensor_that_it_writes() -> None:
    model, x = WriteThenTranspose(), torch.randn(3, 4)
    rows = torch.export.Dim("rows", min=2, max=9)
    graph = dovetail.capture(model, (x,), dynamic_shapes={"x": {0: rows}})
    for result, expected in zip(graph(x), model(x), strict=True):
        assert torch.equal(result, expected)


MIXTURES = ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "jamba"]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "use_cache": False,
    "pad_token_id": 0,
}
SIZES_OF: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_hidden_layers": 1},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "gpt_oss": {
        "num_local_experts": 4,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "deepseek_v3": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "jamba": {
        "num_experts": 4,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "mixtral" else pytest.mark.long) for kind in MIXTURES],
)
def test_mixtures_of_experts_are_captured_and_train(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **SIZES_OF[kind]})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 64, (2, 6))
    graph = dovetail.capture(model, (ids,))
    fused = dovetail.fuse(graph)
    assert dovetail.text(dovetail.inline(fused)) == dovetail.text(graph)
    expected = model(ids).logits
    parameters = list(model.parameters())
    grads = torch.autograd.grad(expected.square().sum(), parameters, allow_unused=True)
    for run in (graph, fused):
        logits = run(ids).logits
        assert torch.equal(logits, expected)
        mine = torch.autograd.grad(logits.square().sum(), parameters, allow_unused=True)
        torch.testing.assert_close(mine, grads, rtol=1e-4, atol=1e-5)
