"""Which parts a model has, counted from its modules, and which of them no proposal covers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

import dovetail
from dovetail.ir.schema import op_name
from dovetail.outlining.outline import Request
from dovetail.rules.library import ALL
from dovetail.rules.rule import Candidate, Refusal, RuleContext
from tests.rules.library.helpers import assert_references, request_for

NORM = ("rms_norm", "layer_norm")
MLP = ("swiglu", "geglu", "linear_activation")
KINDS: dict[str, tuple[str, ...]] = {
    # The zoo's.
    "RMSNorm": ("rms_norm",),
    "LayerNorm": ("layer_norm",),
    "Attention": ("attention",),
    "SwiGLU": ("swiglu",),
    "Experts": ("swiglu",),
    # Those of transformers.
    **{f"{name}RMSNorm": ("rms_norm",) for name in ("Llama", "Qwen2", "Qwen3", "Mixtral")},
    "T5LayerNorm": ("rms_norm",),
    **{
        f"{name}Attention": ("attention",)
        for name in (
            "Llama",
            "Qwen2",
            "Qwen3",
            "Mixtral",
            "GPT2",
            "T5",
            "ViT",
            "ViTSelf",
            "BertSelf",
            "Whisper",
        )
    },
    **{f"{name}MLP": ("swiglu",) for name in ("Llama", "Qwen2", "Qwen3")},
    "MixtralExperts": ("swiglu",),
    **dict.fromkeys(
        ("GPT2MLP", "ViTMLP", "ViTIntermediate", "BertIntermediate", "T5DenseActDense"),
        ("linear_activation",),
    ),
    "T5DenseGatedActDense": ("geglu",),
    # Layers that have their MLP in themselves.
    **dict.fromkeys(("WhisperEncoderLayer", "WhisperDecoderLayer"), ("linear_activation",)),
}
WRAPPERS = frozenset(
    {"BertAttention", "ViTAttentionWrapper", "T5LayerSelfAttention", "T5LayerCrossAttention"}
)
NOTABLE = re.compile("Norm|Attention|MLP|Experts|Intermediate|DenseAct|DenseGated")
_WHOLE = frozenset({"softmax", "scaled_dot_product_attention"})


@dataclass(frozen=True)
class Census:
    """The parts of a model by path, and what was proposed for its graph."""

    parts: dict[str, tuple[str, ...]]
    context: RuleContext
    candidates: list[Candidate]
    refusals: list[Refusal]

    def count(self, kind: str) -> int:
        return sum(c.kind == kind for c in self.candidates)

    def unfound(self) -> list[str]:
        """The parts that no proposal of their kind covers, each with the misses that came nearest."""
        return [self._miss(path) for path, kinds in self.parts.items() if not self._covered(path, kinds)]

    def _covered(self, path: str, kinds: tuple[str, ...]) -> bool:
        inside = {i for i in range(len(self.context.nodes)) if _under(self.context.module_path(i), path)}
        needed = {i for i in inside if self._must_be_in(i, path, kinds)}
        fitting = [set(c.members) for c in self.candidates if c.kind in kinds and set(c.members) <= inside]
        return bool(fitting) and any(needed <= members for members in fitting)

    def _must_be_in(self, i: int, path: str, kinds: tuple[str, ...]) -> bool:
        node = self.context.nodes[i]
        if node.op != "call_function":
            return False
        if "attention" in kinds:
            return op_name(node.target) in _WHOLE
        return self.context.module_path(i) == path and bool(set(kinds) & set(NORM))

    def _miss(self, path: str) -> str:
        near = [
            f"{r.rule}: {r.reason} ({r.matched} of {r.wanted})"
            for r in self.refusals
            if any(_under(self.context.module_path(i), path) for i in r.members)
        ]
        return f"{path}: {'; '.join(near[:3]) or 'nothing was near'}"


def _under(path: str, whole: str) -> bool:
    return path == whole or path.startswith(f"{whole}.")


def census(model: nn.Module, graph: GraphModule, extra: dict[str, tuple[str, ...]] | None = None) -> Census:
    """Look for all well-known kinds in a model's graph; `extra` has parts that have no module class of their own."""
    parts = {p: KINDS[type(m).__name__] for p, m in model.named_modules() if type(m).__name__ in KINDS}
    for path, module in model.named_modules():
        name = type(module).__name__
        if path and NOTABLE.search(name) and not name.startswith("BatchNorm"):
            assert path in parts or name in WRAPPERS, f"'{path}' is a {name}: say what it should be found as"
    context = RuleContext(graph)
    proposed: list[Any] = [p for rule in ALL for p in rule.propose(context)]
    candidates = [p for p in proposed if isinstance(p, Candidate)]
    refusals = [p for p in proposed if isinstance(p, Refusal)]
    return Census({**parts, **(extra or {})}, context, candidates, refusals)


def parts_by_kind(report: Census) -> Counter[str]:
    return Counter(kinds[0] for kinds in report.parts.values())


def outlined(report: Census) -> GraphModule:
    """The graph with the widest candidates that do not overlap as regions."""
    taken: set[int] = set()
    requests: list[Request] = []
    for c in sorted(report.candidates, key=lambda c: (-len(c.members), c.members, c.kind)):
        if taken & set(c.members) or report.context.index.between(set(c.members)):
            continue
        taken.update(c.members)
        requests.append(request_for(report.context.gm, c))
    fused = dovetail.outline(report.context.gm, requests)
    assert_references(fused)
    return fused


def same_results(first: Iterable[Any], second: Iterable[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
