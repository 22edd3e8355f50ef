"""Key-value caches of Hugging Face models: made known to pytree when one is about, and handed back updated."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch.utils._pytree import TreeSpec

from dovetail.graph.capturing.specs import children, context_of


def prepare() -> None:
    """Let pytree take `transformers.DynamicCache` apart, if transformers is loaded; uses its own registration."""
    kind = cache_type()
    if kind is None or kind in pytree.SUPPORTED_NODES:
        return
    integration = importlib.import_module("transformers.integrations.executorch")
    register = getattr(integration, "register_dynamic_cache_export_support", None)
    if register is not None:
        register()


def cache_type() -> type | None:
    """`transformers.DynamicCache`, if transformers is loaded."""
    module = sys.modules.get("transformers.cache_utils")
    return getattr(module, "DynamicCache", None)


def is_cache(value: object) -> bool:
    kind = cache_type()
    return kind is not None and isinstance(value, kind)


@dataclass(frozen=True)
class Carried:
    """A cache argument that the model updates in place and returns: which parameter, and where in the results.

    `start` and `count` are the leaves of the results that make up the cache.
    """

    slot: int
    start: int
    count: int


def find_cache(spec: TreeSpec) -> tuple[int, int] | None:
    """First leaf and number of leaves of the only cache in a spec."""
    kind = cache_type()
    found: list[tuple[int, int]] = []
    queue: list[tuple[TreeSpec, int]] = [(spec, 0)]
    while queue:
        at, start = queue.pop()
        if kind is not None and at.type is kind:
            found.append((start, at.num_leaves))
            continue
        for child in children(at):
            queue.append((child, start))
            start += child.num_leaves
    return found[0] if len(found) == 1 else None


def split_at(spec: TreeSpec, start: int) -> tuple[TreeSpec, TreeSpec]:
    """The spec with the cache whose leaves begin at `start` as one leaf, and the cache's own spec."""
    kind = cache_type()
    leaf = pytree.tree_structure(0)
    inner: list[TreeSpec] = []

    def walk(at: TreeSpec, first: int) -> TreeSpec:
        if at.type is kind and first == start:
            inner.append(at)
            return leaf
        if at.type is None:
            return at
        parts: list[TreeSpec] = []
        for child in children(at):
            parts.append(walk(child, first))
            first += child.num_leaves
        return TreeSpec(at.type, context_of(at), parts)

    outer = walk(spec, 0)
    return outer, inner[0]


def hand_back(given: Any, updated: Any) -> Any:
    """Give the caller's cache the updated state; returns the caller's."""
    given.__dict__.update(updated.__dict__)
    return given
