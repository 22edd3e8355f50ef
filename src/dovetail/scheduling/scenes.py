"""Graphs as finders see them."""

from __future__ import annotations

from torch.fx import GraphModule

from dovetail.rules.scene import Scene


class Scenes:
    """Graphs as finders see them; what was found in one is remembered as long as it is among the last looked at."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._made: dict[GraphModule, Scene] = {}

    def __call__(self, gm: GraphModule) -> Scene:
        scene = self._made.pop(gm, None) or Scene(gm)
        self._made[gm] = scene
        while len(self._made) > self._most:
            del self._made[next(iter(self._made))]
        return scene
