"""A compiler for an accelerator that knows four kinds of operations: it takes those, and leaves the rest to another one.

Run it with `python examples/vendor_backend.py`. It needs `pip install 'dovetail[onnxruntime]'`. The accelerator is a
stand-in: a few kernels in plain torch, and a count of how often each was called.
"""

import inspect
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dovetail
from dovetail import Const
from dovetail.backends.external.onnxruntime import OnnxRuntime
from dovetail.rules import library

# 1. What the accelerator runs: a kernel for each kind.


def run_sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def run_avg_pool(
    x: Tensor, *, kernel: list[int], stride: list[int], padding: list[int], ceil: bool, include_pad: bool
) -> Tensor:
    (height, width), (down, across), (top, left) = kernel, stride or kernel, padding
    windows = F.pad(x, (left, left, top, top)).unfold(2, height, down).unfold(3, width, across)
    return windows.mean((-2, -1))


def run_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    return torch.softmax(scores, -1) @ v


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "sigmoid": run_sigmoid,
}


def run_conv_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: list[int],
    padding: list[int],
    activation: str,
) -> Tensor:
    height, width = weight.shape[2:]
    rows = (x.shape[2] + 2 * padding[0] - height) // stride[0] + 1
    columns = F.unfold(x, (height, width), padding=padding, stride=stride)
    product = weight.flatten(1) @ columns
    if bias is not None:
        product = product + bias[:, None]
    return ACTIVATIONS[activation](product).unflatten(-1, (rows, -1))


KERNELS: dict[str, Callable[..., Tensor]] = {
    "npu.sigmoid": run_sigmoid,
    "npu.avg_pool": run_avg_pool,
    "npu.attention": run_attention,
    "npu.conv_act": run_conv_act,
}


def why_not(kind: str, attrs: Mapping[str, Any]) -> str | None:
    """Why the accelerator has no such variant of a kind; None if it has."""
    if kind == "npu.avg_pool" and attrs["ceil"]:
        return "windows that hang over the edge are not pooled"
    if kind == "npu.avg_pool" and any(attrs["padding"]) and not attrs["include_pad"]:
        return "padding always counts"
    if kind == "npu.attention":
        if attrs.get("mask_type", "none") != "none":
            return "nothing can be added to the scores"
        if attrs.get("dropout") or attrs.get("softcap") or attrs.get("groups", 1) != 1:
            return "it has no dropout, no cap on scores and no shared heads"
    if kind == "npu.conv_act":
        if any(n != 1 for n in attrs.get("dilation", ())) or attrs.get("groups", 1) != 1:
            return "convolutions have neither dilation nor groups"
        if attrs["activation"] not in ACTIVATIONS:
            return f"there is no {attrs['activation']}"
    return None


# 2. What of a model it claims, by kind. A pattern is a function; what the library finds can be claimed as it is.


@dovetail.rule(kind="npu.sigmoid")
def sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x)


@dovetail.rule(kind="npu.avg_pool")
def avg_pool(
    x: Tensor,
    kernel: Any = Const([2, 2]),
    stride: Any = Const([2, 2]),
    padding: Any = Const([0, 0]),
    ceil: Any = Const(False),
    include_pad: Any = Const(True),
) -> Tensor:
    return F.avg_pool2d(x, kernel, stride, padding, ceil, include_pad)


@avg_pool.guard
def pools(match: dovetail.Match) -> dovetail.Decline | None:
    reason = why_not("npu.avg_pool", match.literals)
    return None if reason is None else dovetail.Decline(reason)


class Claim(dovetail.Rule):
    """What a rule of the library finds, as a kind of the vendor's; `says` has the attributes that its kernel takes."""

    def __init__(self, kind: str, inner: dovetail.Rule, *attributes: str) -> None:
        self.name, self.kind, self.inner, self.attributes = f"npu.{inner.name}", kind, inner, attributes

    def propose(self, context: dovetail.RuleContext) -> Iterable[dovetail.Candidate | dovetail.Refusal]:
        for proposal in self.inner.propose(context):
            if isinstance(proposal, dovetail.Refusal):
                yield replace(proposal, rule=self.name)
                continue
            attrs = dict(proposal.attrs or {})
            reason = why_not(self.kind, attrs)
            unknown = set(proposal.arguments or ()) - set(inspect.signature(KERNELS[self.kind]).parameters)
            if reason is None and unknown:
                reason = f"its kernel has no argument {', '.join(sorted(unknown))}"
            if reason is not None:
                yield dovetail.Refusal(self.name, proposal.members, reason)
                continue
            chosen = {name: attrs[name] for name in self.attributes if attrs[name] is not None}
            yield replace(proposal, rule=self.name, kind=self.kind, version=1, attrs=chosen)


RULES = dovetail.RuleSet(
    sigmoid,
    avg_pool,
    Claim("npu.attention", library.ATTENTION["attention"], "causal", "scale"),
    Claim("npu.attention", library.ATTENTION["attention_by_hand"], "causal", "scale"),
    Claim("npu.conv_act", library.CONVOLUTION["conv2d_act"], "stride", "padding", "activation"),
)


# 3. The backend: kernels by kind, and what it does not take.


class Npu(dovetail.Backend):
    """Runs the kinds it has kernels for, in float32."""

    name = "npu"
    rules = RULES

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.kernels = {kind: self._counted(kind, kernel) for kind, kernel in KERNELS.items()}

    def supports(self, region: dovetail.Region) -> Any:
        answer = super().supports(region)
        if answer is not True:
            return answer
        reason = why_not(region.kind, region.attrs)
        for node in region.inputs:
            if node.meta["val"].dtype != torch.float32:
                reason = f"it computes in float32, and '{node.name}' is {node.meta['val'].dtype}"
        return True if reason is None else dovetail.Decline(reason)

    def compile(self, region: dovetail.Region, examples: Any) -> Callable[..., tuple[Tensor, ...]]:
        kernel = super().compile(region, examples)
        (results,) = region.body.graph.output_node().args
        # Results lie in memory as torch's do: attention's have the heads side by side.
        strides = [node.meta["val"].stride() for node in results]

        def run(*operands: Any) -> tuple[Tensor, ...]:
            return tuple(
                laid_out(value, layout) for value, layout in zip(kernel(*operands), strides, strict=True)
            )

        return run

    def _counted(self, kind: str, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(kernel)
        def counted(*operands: Any, **named: Any) -> Tensor:
            self.calls[kind] += 1
            return kernel(*operands, **named)

        return counted


def laid_out(value: Tensor, strides: tuple[int, ...]) -> Tensor:
    if value.stride() == strides:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value)


# 4. The same compiler, given a file: it takes the functions of its domain, and has all others written out.


def compiled_from(path: Path, calls: Counter[str]) -> Callable[[Tensor], Tensor]:
    """A fused graph that was handed over as ONNX, its `npu` functions run by the kernels above."""
    import onnx
    from onnx.inliner import inline_selected_functions
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun

    def metadata(node: Any) -> dict[str, Any]:
        """What the region is: kind, attributes, and which operand is which argument."""
        return json.loads({entry.key: entry.value for entry in node.metadata_props}["dovetail.region"])

    class Kernel(OpRun):
        op_domain = "npu"

        def _run(self, *operands: Any, **attributes: Any) -> tuple[Any, ...]:
            region = metadata(self.onnx_node)
            calls[region["kind"]] += 1
            given = {name: torch.tensor(operands[i]) for name, i in region["arguments"].items()}
            return (KERNELS[region["kind"]](**given, **region["attrs"]).numpy(),)

    model = onnx.load(path)
    mine = {(f.domain, f.name) for f in model.functions if f.domain == "npu"}
    for node in [*model.graph.node, *(n for f in model.functions for n in f.node)]:
        if (node.domain, node.op_type) in mine and why_not(metadata(node)["kind"], metadata(node)["attrs"]):
            mine.discard((node.domain, node.op_type))
    model = inline_selected_functions(model, sorted(mine), exclude=True)
    running = ReferenceEvaluator(model, new_ops=[type(name, (Kernel,), {}) for _, name in sorted(mine)])
    return lambda x: torch.from_numpy(running.run(None, {model.graph.input[0].name: x.numpy()})[0])


# 5. A model that has all of it, and some that the accelerator does not know.


class Net(nn.Module):
    """A small vision transformer: convolutions, a pool, attention with a gate, linear layers."""

    def __init__(self, width: int = 16, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.wide = nn.Conv2d(width, width, 3, padding=2, dilation=2)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.gate = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.wide(torch.relu(self.stem(x))))
        x = F.avg_pool2d(x, 2).flatten(2).transpose(1, 2)
        for qkv, gate in zip(self.qkv, self.gate, strict=True):
            q, k, v = qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + mixed * torch.sigmoid(gate(x))
        return self.head(x.mean(1))


def main() -> None:
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    model, x = Net().eval(), torch.randn(2, 3, 16, 16)
    npu, other = Npu(), OnnxRuntime()

    # Claimed by kind; everything else is as it was, and so are the results, bit for bit.
    fused = dovetail.fuse(dovetail.capture(model, (x,)), npu.rules)
    print("same bits:", torch.equal(fused(x), model(x)))
    for declined in dovetail.explain(fused).declined:
        print(f"left alone: {', '.join(declined.nodes)}: {declined.reason}")

    # What is left goes to another compiler, which makes regions of what it knows.
    lowered = dovetail.lower(dovetail.fuse(fused, other.rules), [npu, other])
    for region in dovetail.regions(lowered):
        print(f"{region.name:16} {region.backend or 'as it is':12} {' '.join(region.nodes)}")
    npu.calls.clear()  # kernels are tried on made-up operands before they are used
    print(f"off by at most {_off(lowered(x), model(x)):.0e}:", dict(npu.calls))

    # The same from a file. Regions of other kinds are in it too, and mean nothing to this compiler.
    with tempfile.TemporaryDirectory() as folder:
        path = dovetail.to_onnx(dovetail.fuse(fused), Path(folder) / "fused.onnx")
        calls: Counter[str] = Counter()
        print(f"off by at most {_off(compiled_from(path, calls)(x), model(x)):.0e}:", dict(calls))


def _off(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max())


if __name__ == "__main__":
    main()
