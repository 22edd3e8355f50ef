"""Ranges of a size: examples and patterns of them, and captures that hold for a range."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import dovetail
from dovetail import InvalidArgument, Plan
from dovetail.outlining.region import graph_key
from dovetail.tuning.apply_plan import environment_of_call
from dovetail.tuning.check_plan import capture_for_plan
from dovetail.tuning.decisions import GraphDecision
from dovetail.tuning.size_ranges import (
    SizedExample,
    describe_inputs,
    dynamic_shapes_for,
    model_pattern,
    patterns_for,
    sized_examples,
)


def tokens(size: int) -> Tensor:
    return torch.zeros(1, size, dtype=torch.int64)


def ranges(examples: list[SizedExample]) -> list[tuple[int, int]]:
    return [example.range for example in examples]


def sizes_of(examples: list[SizedExample]) -> list[int]:
    return [int(example.args[0].shape[1]) for example in examples]


def test_inputs_are_described_in_order_with_n_for_sizes_that_vary() -> None:
    args = (tokens(5), [torch.zeros(2, 5, 5), True])
    kwargs = {"scale": 0.5, "mode": "sum", "mask": None}
    fixed = "int64[1, 5]; float32[2, 5, 5]; True; 0.5; 'sum'; NoneType"
    assert describe_inputs(args, kwargs, {}) == fixed
    varying = "int64[1, n]; float32[2, n, n]; True; 0.5; 'sum'; NoneType"
    assert describe_inputs(args, kwargs, {0: {1}, 1: {1, 2}}) == varying
    assert describe_inputs((torch.zeros((), dtype=torch.bfloat16),), {}, {}) == "bfloat16[]"


def test_ranges_meet_at_the_geometric_mean_of_neighbouring_sizes() -> None:
    examples = sized_examples((tokens(16),), {}, [(tokens(128),), (tokens(4),)])
    assert sizes_of(examples) == [4, 16, 128]
    assert ranges(examples) == [(2, 8), (9, 45), (46, 128)]
    assert {example.pattern for example in examples} == {"int64[1, n]"}


@pytest.mark.parametrize("others", [[3], [2, 4, 8], [5, 6, 7], [2, 1000], [3, 9, 27, 81, 243]])
def test_ranges_of_a_list_partition_the_sizes_from_two_to_the_largest(others: list[int]) -> None:
    examples = sized_examples((tokens(4),), {}, [(tokens(n),) for n in others])
    covered = [n for low, high in ranges(examples) for n in range(low, high + 1)]
    assert covered == list(range(2, max(4, *others) + 1))
    assert all(low <= n <= high for n, (low, high) in zip(sizes_of(examples), ranges(examples), strict=True))


def test_sizes_of_zero_and_one_are_ranges_of_their_own() -> None:
    examples = sized_examples((tokens(1),), {}, [(tokens(0),), (tokens(6),), (tokens(24),)])
    assert sizes_of(examples) == [0, 1, 6, 24]
    assert ranges(examples) == [(0, 0), (1, 1), (2, 12), (13, 24)]
    # A range that began at 1 would be captured with a size that torch.export specializes.
    assert ranges(sized_examples((tokens(1),), {}, [(tokens(9),)])) == [(1, 1), (2, 9)]


def test_an_example_that_is_given_twice_is_one_range() -> None:
    examples = sized_examples((tokens(4),), {}, [(tokens(4),), (tokens(9),), (tokens(9),)])
    assert ranges(examples) == [(2, 6), (7, 9)]


def test_a_dim_is_divided_at_three_sizes_and_elements_repeat_or_are_cut() -> None:
    example = torch.tensor([[1, 2, 3]])
    examples = sized_examples((example,), {}, {0: {1: Dim("s", min=2, max=32)}})
    assert sizes_of(examples) == [2, 8, 32]
    assert ranges(examples) == [(2, 4), (5, 16), (17, 32)]
    assert examples[0].args[0].tolist() == [[1, 2]]
    assert examples[1].args[0].tolist() == [[1, 2, 3, 1, 2, 3, 1, 2]]
    assert {e.pattern for e in examples} == {"int64[1, n]"}
    assert example.tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(("low", "high"), [(2, 3), (2, 4), (0, 9), (1, 100), (7, 8), (5, 4096)])
def test_ranges_of_a_dim_partition_it_without_the_sizes_that_are_specialized(low: int, high: int) -> None:
    examples = sized_examples((tokens(4),), {}, {0: {-1: Dim("s", min=low, max=high)}})
    covered = [n for first, last in ranges(examples) for n in range(first, last + 1)]
    assert covered == list(range(max(2, low), high + 1))
    assert all(a <= n <= b for n, (a, b) in zip(sizes_of(examples), ranges(examples), strict=True))


def test_one_size_of_positional_and_keyword_arguments_varies_together() -> None:
    size = Dim("s", min=2, max=8)
    args, kwargs = (tokens(3), torch.zeros(7)), {"mask": torch.ones(3, 5), "scale": 2}
    examples = sized_examples(args, kwargs, {0: {1: size}, "mask": {0: size}})
    assert [tuple(e.kwargs["mask"].shape) for e in examples] == [(2, 5), (4, 5), (8, 5)]
    assert {e.pattern for e in examples} == {"int64[1, n]; float32[7]; float32[n, 5]; 2"}
    assert all(e.args[1] is args[1] and e.kwargs["scale"] == 2 for e in examples)


X, Y = torch.zeros(2, 4), torch.zeros(2, 6)
SIZE, OTHER = Dim("s", min=2, max=8), Dim("s", min=2, max=9)


@pytest.mark.parametrize(
    ("args", "sizes", "message"),
    [
        ((X,), [], "sizes must be a list of example inputs, each a tuple like `args`, or a mapping"),
        ((X,), 8, "sizes must be a list of example inputs"),
        ((X,), [Y], "each of the examples is a tuple like `args`, not a Tensor."),
        ((X,), [(Y, 1)], "the examples have other inputs than `args`."),
        ((X,), [(Y.int(),)], "the examples differ in more than a size."),
        ((X,), [(Y[0],)], "the examples differ in more than a size."),
        ((X,), [(X,)], "no size differs between the examples and `args`."),
        ((X,), [(torch.zeros(3, 6),)], "more than one size varies; tune them one after the other."),
        ((X, X), [(Y, torch.zeros(2, 5))], "more than one size varies"),
        ((X, X), [(Y, X)], None),
        ((X,), {0: SIZE}, "sizes[0] must be {dim: Dim(name, min=..., max=...)} with one dimension."),
        ((X,), {0: {0: SIZE, 1: SIZE}}, "sizes[0] must be {dim: Dim(name, min=..., max=...)} with one"),
        ((X,), {0: {1: Dim("s")}}, "sizes[0][1] must be a Dim with a `min` and a `max`."),
        ((X,), {0: {1: 8}}, "sizes[0][1] must be a Dim with a `min` and a `max`."),
        ((X,), {0: {"1": SIZE}}, "sizes[0]['1'] must be a Dim with a `min` and a `max`."),
        ((X, X), {0: {1: SIZE}, 1: {1: OTHER}}, "all dimensions must have one range, for one size varies."),
        ((X,), {0: {1: Dim("s", min=0, max=2)}}, "the range from 2 to 2 has less than two sizes."),
        ((X,), {}, "all dimensions must have one range"),
        ((X,), {1: {1: SIZE}}, "there is no argument 1; 1 are given."),
        ((X,), {-1: {1: SIZE}}, "there is no argument -1; 1 are given."),
        ((X,), {"x": {1: SIZE}}, "there is no keyword argument 'x'; give positional arguments by their"),
        ((X,), {0: {2: SIZE}}, "there is no dimension 2 of a Tensor."),
        ((X,), {0: {-3: SIZE}}, "there is no dimension -3 of a Tensor."),
        ((X, 5), {1: {0: SIZE}}, "there is no dimension 0 of a int."),
    ],
)
def test_examples_that_differ_in_other_than_one_size_are_refused(
    args: tuple[Any, ...], sizes: Any, message: str | None
) -> None:
    if message is None:
        assert ranges(sized_examples(args, {}, sizes)) == [(2, 4), (5, 6)]
        return
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        sized_examples(args, {}, sizes)


def test_examples_that_differ_in_a_number_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="differ in more than a size"):
        sized_examples((X, 3), {}, [(Y, 4)])


def test_an_example_without_elements_to_repeat_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        sized_examples((torch.zeros(2, 0),), {}, {0: {1: SIZE}})


def forward(x: Tensor, y: Tensor | None = None, *, mask: Any = None) -> None: ...


def shapes(sizes: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
    """The dynamic shapes of a call, with the range of each dimension in place of its Dim."""
    given = dynamic_shapes_for(sizes, forward, args, kwargs)
    if given is None:
        return None
    return {
        name: dims and {d: (dim.__name__, dim.min, dim.max) for d, dim in dims.items()}
        for name, dims in given.items()
    }


def test_calls_with_a_size_in_a_range_are_captured_for_the_range() -> None:
    sizes = {"int64[1, n]": ((2, 8), (9, 45))}
    assert shapes(sizes, tokens(2)) == {"x": {1: ("n", 2, 8)}}
    assert shapes(sizes, tokens(8)) == {"x": {1: ("n", 2, 8)}}
    assert shapes(sizes, tokens(9)) == {"x": {1: ("n", 9, 45)}}
    assert shapes(sizes, tokens(45)) == {"x": {1: ("n", 9, 45)}}


@pytest.mark.parametrize(
    "argument",
    [tokens(4).int(), torch.zeros(2, 4, dtype=torch.int64), torch.zeros(1), 4],
    ids=["dtype", "batch", "rank", "number"],
)
def test_other_calls_are_not(argument: Any) -> None:
    sizes = {"int64[1, n]": ((2, 8), (9, 45))}
    assert shapes(sizes, argument) is None
    assert shapes(sizes, tokens(4), tokens(4)) is None


def test_a_size_in_no_range_is_captured_for_the_gap_it_is_in() -> None:
    sizes = {"int64[1, n]": ((4, 8), (20, 45))}
    assert shapes(sizes, tokens(1)) == {"x": None}
    assert shapes(sizes, tokens(2)) == {"x": {1: ("n", 2, 3)}}
    assert shapes(sizes, tokens(9)) == {"x": {1: ("n", 9, 19)}}
    assert shapes(sizes, tokens(46))["x"][1][:2] == ("n", 46)


def test_a_range_of_one_size_is_not_symbolic() -> None:
    assert shapes({"int64[1, n]": ((1, 1), (7, 7))}, tokens(1)) == {"x": None}
    assert shapes({"int64[1, n]": ((1, 1), (7, 7))}, tokens(7)) == {"x": None}
    assert shapes({}, tokens(7)) is None


def test_inputs_that_have_the_size_in_common_have_one_dim() -> None:
    sizes = {"int64[1, n]; float32[n, n]; float32[3, n]; True": ((2, 8),)}
    mask = [torch.zeros(3, 5), True]
    given = dynamic_shapes_for(sizes, forward, (tokens(5), torch.zeros(5, 5)), {"mask": mask})
    dim = given["x"][1]
    assert (dim.min, dim.max) == (2, 8)
    assert given == {"x": {1: dim}, "y": {0: dim, 1: dim}, "mask": [{1: dim}, None]}
    other = dynamic_shapes_for(sizes, forward, (tokens(5), torch.zeros(5, 6)), {"mask": mask})
    assert other is None
    number = dynamic_shapes_for(sizes, forward, (tokens(5), torch.zeros(5, 5)), {"mask": [mask[0], False]})
    assert number is None


def test_the_pattern_that_describes_the_call_has_the_ranges() -> None:
    sizes = {"int64[1, n]": ((2, 8),), "float32[n, 4]": ((2, 16),), "float32[4, n]": ((5, 9),)}
    assert shapes(sizes, torch.zeros(3, 4)) == {"x": {0: ("n", 2, 16)}}
    assert shapes(sizes, torch.zeros(4, 7)) == {"x": {1: ("n", 5, 9)}}
    # Two patterns describe it; in the second one its size is in no range.
    assert shapes(sizes, torch.zeros(4, 4)) == {"x": {0: ("n", 2, 16)}}


@pytest.mark.parametrize("text", ["a; b", "; "])
def test_text_among_the_inputs_does_not_change_the_pattern(text: str) -> None:
    pattern = describe_inputs((tokens(4),), {"mask": text}, {0: {1}})
    assert shapes({pattern: ((2, 8),)}, tokens(4), mask=text) == {"x": {1: ("n", 2, 8)}, "mask": None}


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.head(self.embed(x)), 1).cumsum(1)


def compiled(
    sizes: Mapping[str, tuple[tuple[int, int], ...]], **options: Any
) -> tuple[nn.Module, Any, Callable[[int], Tensor]]:
    model = Scorer().eval()
    here = environment_of_call(model, (), {})
    plan = Plan().with_decisions("inference", here, sizes=sizes)
    fast = dovetail.compile(model, (torch.arange(4)[None],), plan=plan, backends=[], **options)
    return model, fast, lambda size: torch.arange(size)[None] % 16


def captures_after(
    sizes: Iterable[int], model: nn.Module, fast: Any, inputs: Callable[[int], Tensor]
) -> list[int]:
    """The number of captures after the call of each size, all with the values of the model."""
    counts: list[int] = []
    for size in sizes:
        assert torch.equal(fast(inputs(size)), model(inputs(size)))
        counts.append(len(fast._captures.captures))
    return counts


def test_sizes_of_one_range_share_a_capture() -> None:
    calls = compiled({"int64[1, n]": ((2, 8), (9, 45))})
    assert captures_after((4, 8, 2, 20, 45, 9, 5), *calls) == [1, 1, 1, 2, 2, 2, 2]
    # A size in no range has a capture of its own.
    assert captures_after((1, 3, 30), *calls) == [3, 3, 3]


def test_without_ranges_sizes_of_one_range_do_not() -> None:
    assert captures_after((4, 8), *compiled({})) == [1, 2]
    # `dynamic` of the caller is used in place of the plan's ranges.
    assert captures_after((4, 8, 2), *compiled({"int64[1, n]": ((2, 8),)}, dynamic=False)) == [1, 2, 3]


def test_a_size_in_a_range_is_captured_for_it_after_sizes_in_none() -> None:
    calls = compiled({"int64[1, n]": ((2, 8), (9, 45))})
    assert captures_after((4, 50, 60, 20), *calls) == [1, 2, 2, 3]


def test_models_with_inputs_alike_keep_their_ranges_in_one_plan() -> None:
    first = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).eval()
    second = nn.Sequential(nn.Linear(16, 16), nn.Tanh()).eval()
    x, pattern = torch.randn(8, 16), "float32[n, 16]"

    def planned(model: nn.Module, high: int) -> Plan:
        sizes = {model_pattern(pattern, model): ((2, high),)}
        plan = Plan().with_decisions("inference", environment_of_call(model, (x,), {}), sizes=sizes)
        key = graph_key(capture_for_plan(model, (x,), None, plan))
        decision = GraphDecision("g", execution="graph")
        return plan | plan.with_decisions(
            "inference", environment_of_call(model, (x,), {}), graphs={key: decision}
        )

    one, other = planned(first, 16), planned(second, 40)
    for plan in (one | other, other | one, Plan.from_json((one | other).to_json())):
        plan.check(first, (x,))
        plan.check(second, (x,))


def test_ranges_of_any_model_and_those_of_another_are_used_where_there_are_no_own() -> None:
    pattern, model = "float32[n, 8]", nn.Linear(8, 8)
    own, another = model_pattern(pattern, model), model_pattern(pattern, nn.Linear(8, 9))
    ranges = {another: ((2, 4),), pattern: ((2, 5),), own: ((2, 6),)}
    assert patterns_for(ranges, model) == {pattern: ((2, 6),)}
    assert patterns_for({key: ranges[key] for key in (another, pattern)}, model) == {pattern: ((2, 5),)}
    assert patterns_for({another: ((2, 4),)}, model) == {pattern: ((2, 4),)}
    assert model_pattern(pattern, nn.Linear(8, 8)) == own
    assert model_pattern(pattern, lambda x: x) == pattern
