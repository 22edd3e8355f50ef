"""Module paths of operations, and repeated ones in a short form."""

from __future__ import annotations

import pytest

from dovetail.ir.module_paths import fold_paths, format_ranges, is_within, join_path_list, path_of


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([0], "0"),
        ([0, 1], "0,1"),
        (range(32), "0–31"),
        ([7, 0, 1, 2, 3], "0–3,7"),
        (range(0, 40, 2), "0,2,4,6,8,…,38"),
        ([], ""),
    ],
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert format_ranges(numbers) == text


@pytest.mark.parametrize(
    ("paths", "folded"),
    [
        ([f"model.layers.{i}.mlp" for i in range(32)], ["model.layers.0–31.mlp"]),
        ([f"layers.{i}" for i in (0, 1, 2, 5)], ["layers.0–2,5"]),
        (["a.b", "c", "a.b"], ["a.b", "c"]),
        (["", "layers.0"], ["", "layers.0"]),
        ([f"layers.{i}.{n}" for i in (0, 1, 2) for n in ("q", "k", "v")], ["layers.0–2.{q,k,v}"]),
        ([f"block.{n}" for n in "abcde"], ["block.*"]),
        # Three stages of two layers and one of four: not all combinations of two sets.
        (
            [f"stages.{s}.layers.{i}" for s, n in enumerate((2, 4, 2, 2)) for i in range(n)],
            ["stages.0,2,3.layers.0,1", "stages.1.layers.0–3"],
        ),
        # A name with a digit in it is no index.
        (["layer1.0", "layer1.1", "layer2.0"], ["layer1.0,1", "layer2.0"]),
        ([], []),
    ],
)
def test_folding(paths: list[str], folded: list[str]) -> None:
    assert fold_paths(paths) == folded


def test_only_names_of_the_same_modules_are_joined() -> None:
    assert fold_paths(["layers.0.q", "layers.1.q", "layers.0.k"]) == ["layers.0,1.q", "layers.0.k"]


def test_of_many_paths_the_first_are_shown() -> None:
    assert join_path_list(["", "a.0", "a.1", "b.c", "d.e", "f.g"]) == "(top level), a.0,1, b.c and 2 more"


def test_the_path_is_that_of_the_innermost_module() -> None:
    stack = {"L__self__": ("", "M"), "L__self___layers_0": ("L['self'].layers.0", "Layer")}
    assert path_of({"nn_module_stack": stack}) == "layers.0"
    assert path_of({}) == ""


def test_a_path_is_within_the_modules_around_it() -> None:
    assert is_within("layers.10.mlp", "layers.10")
    assert not is_within("layers.10.mlp", "layers.1")
    assert is_within("layers.10", "")
