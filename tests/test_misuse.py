"""One wrong input for every argument of every public function: each is refused with an error of dovetail's own."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dovetail
from dovetail import rules

X = torch.randn(2, 8)


class Opaque:
    """An object that is nothing dovetail knows."""


# Of each kind of wrong thing one; what is right for an argument is named beside it.
WRONG: dict[str, Any] = {
    "none": None,
    "number": 3,
    "text": "a",
    "tensor": X,
    "module": nn.Linear(8, 8),
    "list": [],
    "dict": {},
    "object": Opaque(),
    "function": lambda: 1,
    "class": nn.Linear,
}


@functools.cache
def parts() -> tuple[nn.Module, Any, Any, Any]:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    gm = dovetail.capture(model, (X,))
    return model, gm, dovetail.fuse(gm), dovetail.schedule(model, (X,))


def compiled(**given: Any) -> Any:
    arguments = {"args": (X,), "backends": "eager", "on_error": "raise", **given}
    return dovetail.compile(
        given.pop("model", parts()[0]), **{k: v for k, v in arguments.items() if k != "model"}
    )


def relu_plus(x: Any) -> Any:
    return torch.relu(x) + 1


# A call with the wrong thing in one place, and the things that are right there.
CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "capture": (lambda b: dovetail.capture(b, (X,)), "module"),
    "capture args": (lambda b: dovetail.capture(parts()[0], b), ""),
    "capture kwargs": (lambda b: dovetail.capture(parts()[0], (X,), b), "none dict"),
    "capture dynamic_shapes": (
        lambda b: dovetail.capture(parts()[0], (X,), dynamic_shapes=b),
        "none list dict",
    ),
    "compile": (lambda b: compiled(model=b), "module"),
    "compile bundle": (lambda b: compiled(backends=None, bundle=b), "none"),
    "bundle": (lambda b: dovetail.bundle(b, "never.bundle"), ""),
    "tune": (lambda b: dovetail.tune(b, (X,)), "module"),
    "tune budget": (lambda b: dovetail.tune(nn.ReLU(), (X,), budget=b), "number"),
    "compile args": (lambda b: compiled(args=b), "none"),
    "compile kwargs": (lambda b: compiled(kwargs=b), "none dict"),
    "compile backends": (lambda b: compiled(backends=b), "none list dict"),
    "compile rules": (lambda b: compiled(rules=b), "none list"),
    "compile pipeline": (lambda b: compiled(pipeline=b), "none list"),
    "compile plan": (lambda b: compiled(plan=b), "none dict"),
    "compile dynamic": (lambda b: compiled(dynamic=b), "none"),
    "compile dynamic_shapes": (lambda b: compiled(dynamic_shapes=b), "none list dict"),
    "compile on_error": (lambda b: compiled(on_error=b), ""),
    "compile verify": (lambda b: compiled(verify=b), ""),
    "compile granularity": (lambda b: compiled(granularity=b), ""),
    "compile smallest": (lambda b: compiled(smallest=b), "number"),
    "compile timeout": (lambda b: compiled(timeout=b), "none number"),
    "compile cache": (lambda b: compiled(cache=b), "text"),
    "compile cuda_graphs": (lambda b: compiled(cuda_graphs=b), ""),
    "compile process_group": (lambda b: compiled(process_group=b), "none"),
    "compile rank_timeout": (lambda b: compiled(rank_timeout=b), "number"),
    "tune process_group": (lambda b: dovetail.tune(nn.ReLU(), (X,), process_group=b), "none"),
    "tune rank_timeout": (lambda b: dovetail.tune(nn.ReLU(), (X,), rank_timeout=b), "number"),
    "compile check_capture": (lambda b: compiled(check_capture=b), ""),
    "fuse": (lambda b: dovetail.fuse(b), ""),
    "fuse rules": (lambda b: dovetail.fuse(parts()[1], b), "none list"),
    "fuse must": (lambda b: dovetail.fuse(parts()[1], must=b), "none list dict"),
    "fuse never": (lambda b: dovetail.fuse(parts()[1], never=b), "none list dict"),
    "fuse limits": (lambda b: dovetail.fuse(parts()[1], limits=b), "none"),
    "fuse priorities": (lambda b: dovetail.fuse(parts()[1], priorities=b), "none dict"),
    "fuse fuel": (lambda b: dovetail.fuse(parts()[1], fuel=b), "none number"),
    "fuse cost": (lambda b: dovetail.fuse(parts()[1], cost=b), "none"),
    "fuse on_error": (lambda b: dovetail.fuse(parts()[1], on_error=b), ""),
    "Fuse priorities": (lambda b: dovetail.Fuse(priorities=b), "none dict"),
    "lower": (lambda b: dovetail.lower(b, "eager"), ""),
    "lower backends": (lambda b: dovetail.lower(parts()[2], b), "none list dict"),
    "Lower": (lambda b: dovetail.Lower(b), "none list dict"),
    "explain": (dovetail.explain, ""),
    "why_not": (lambda b: dovetail.explain(parts()[2]).why_not(b, "relu"), ""),
    "regions": (dovetail.regions, ""),
    "regions kind": (lambda b: dovetail.regions(parts()[2], kind=b), "none text"),
    "text": (dovetail.text, ""),
    "diff": (lambda b: dovetail.diff(parts()[1], b), ""),
    "check": (dovetail.check, ""),
    "refresh": (dovetail.refresh, ""),
    "declare": (lambda b: dovetail.declare(parts()[1], b), "dict"),
    "outline nodes": (lambda b: dovetail.outline(parts()[1], b, kind="k"), ""),
    "outline kind": (lambda b: dovetail.outline(parts()[1], ["relu"], kind=b), "text"),
    "outline escapes": (lambda b: dovetail.outline(parts()[1], ["relu"], kind="k", escapes=b), "dict"),
    "inline name": (lambda b: dovetail.inline(parts()[2], b), "none"),
    "inline kind": (lambda b: dovetail.inline(parts()[2], kind=b), "none"),
    "save": (lambda b: dovetail.save(b, "never.pt2"), ""),
    "save path": (lambda b: dovetail.save(parts()[2], b), "text"),
    "load": (dovetail.load, "text"),
    "to_onnx path": (lambda b: dovetail.to_onnx(parts()[2], b), "text"),
    "to_model_explorer path": (lambda b: dovetail.to_model_explorer(parts()[2], b), "text"),
    "to_stablehlo": (dovetail.to_stablehlo, ""),
    "to_flashinfer_trace": (lambda b: dovetail.to_flashinfer_trace(b, "never"), ""),
    "to_flashinfer_trace folder": (lambda b: dovetail.to_flashinfer_trace(parts()[2], b), "text"),
    "to_flashinfer_trace store": (
        lambda b: dovetail.to_flashinfer_trace(parts()[2], "never", store=b),
        "none",
    ),
    "solution_backend": (dovetail.solution_backend, ""),
    "solution_backend bound": (lambda b: dovetail.solution_backend("never", bound=b), ""),
    "export_measurements": (lambda b: dovetail.export_measurements(b, "never.jsonl"), ""),
    "export_measurements path": (lambda b: dovetail.export_measurements("never.db", b), "text"),
    "export_measurements environment": (
        lambda b: dovetail.export_measurements("never.db", "never.jsonl", environment=b),
        "",
    ),
    "import_measurements": (lambda b: dovetail.import_measurements(b, "never.db"), ""),
    "replace_region": (lambda b: dovetail.replace_region(parts()[2], b, torch.relu), ""),
    "report": (lambda b: dovetail.report(b, "never.html"), ""),
    "report path": (lambda b: dovetail.report(parts()[2], b), "text"),
    "report compare": (lambda b: dovetail.report(parts()[2], "never.html", compare=b), "none"),
    "report plan": (lambda b: dovetail.report(parts()[2], "never.html", plan=b), "none"),
    "report profile": (lambda b: dovetail.report(parts()[2], "never.html", profile=b), "none"),
    "schedule": (lambda b: dovetail.schedule(b, (X,)), "module"),
    "schedule args": (lambda b: dovetail.schedule(parts()[0], b), "none list"),
    "find": (lambda b: parts()[3].find(b), "text class"),
    "find where": (lambda b: parts()[3].find(where=b), "function module class"),
    "fuse matches": (lambda b: parts()[3].fuse(b), ""),
    "lower matches": (lambda b: parts()[3].lower([], b), ""),
    "part": (lambda b: parts()[3][b], "number"),
    "undo": (lambda b: parts()[3].undo(b), ""),
    "fuse_modules": (lambda b: dovetail.fuse_modules(b, ["0", "1"]), ""),
    "fuse_modules names": (lambda b: dovetail.fuse_modules(parts()[0], b), ""),
    "bisect": (lambda b: dovetail.bisect(b, parts()[1], lambda g: True), ""),
    "bisect_lowering": (lambda b: dovetail.bisect_lowering(b, lambda g: True), ""),
    "Pipeline": (dovetail.Pipeline, "list dict"),
    "pipeline of": (lambda b: dovetail.Pipeline([dovetail.Fuse()])(b), ""),
    "Limits": (lambda b: dovetail.Limits(nodes=b), "none number"),
    "Decline": (dovetail.Decline, "text"),
    "RuleSet": (dovetail.RuleSet, "list"),
    "RuleSet name": (lambda b: dovetail.RuleSet()[b], ""),
    "rule": (lambda b: dovetail.rule(b, kind="k"), "none"),
    "rule kind": (lambda b: dovetail.rule(kind=b)(relu_plus), "text"),
    "rule examples": (lambda b: dovetail.rule(kind="k", examples=b)(relu_plus), "none list"),
    "rule through": (lambda b: dovetail.rule(kind="k", through=b)(relu_plus), "list"),
    "rule attrs": (lambda b: dovetail.rule(kind="k", attrs=b)(relu_plus), "none dict function module class"),
    "capability": (lambda b: rules.capability(b, kind="k"), "text function class"),
    "capability kind": (lambda b: rules.capability({"add"}, kind=b), "text"),
    "modules": (lambda b: rules.modules(b, kind="k"), "text class"),
    "siblings": (lambda b: rules.siblings(of=b), "none text function class"),
    "repeats": (lambda b: rules.repeats(min_size=b), "number"),
    "optional": (lambda b: dovetail.optional(X, b), "function module class"),
    "Ledger": (dovetail.Ledger.from_json, ""),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_wrong_is_refused_in_words_of_our_own(name: str) -> None:
    call, right = CALLS[name]
    for kind, value in WRONG.items():
        if kind in right.split():
            continue
        with pytest.raises(dovetail.DovetailError) as refused:
            call(value)
        assert len(str(refused.value)) > 15, kind


def test_the_sweep_covers_every_public_function() -> None:
    functions = [n for n in dovetail.__all__ if n[0].islower()]
    called = {word for name in CALLS for word in name.split()}
    # What only makes values of values.
    assert set(functions) - called == {"either"}


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*Python 3.14:DeprecationWarning")
def test_scripted_modules_are_refused_wherever_they_are() -> None:
    scripted, traced = torch.jit.script(nn.ReLU()), torch.jit.trace(nn.ReLU(), X)
    for model, what in ((scripted, "the model"), (traced, "the model"), (Wrapped(scripted), "'inner'")):
        for call in (
            lambda m: dovetail.capture(m, (X,)),
            lambda m: dovetail.compile(m, (X,), backends="eager"),
            lambda m: dovetail.compile(m),
            lambda m: dovetail.fuse_modules(m, ["inner", "inner"]),
        ):
            with pytest.raises(
                dovetail.InvalidArgument, match=f"{what}.*TorchScript.*Give the Python module"
            ):
                call(model)
    for model in (scripted, traced):
        with pytest.raises(dovetail.InvalidArgument, match=r"the model.*TorchScript"):
            dovetail.schedule(model, (X,))
    # Parts beside one can be scheduled.
    beside = dovetail.schedule(nn.Sequential(scripted, nn.GELU()), (X,))
    assert len(beside["1"].find(where=lambda n: "gelu" in str(n.target))) == 1
    with pytest.raises(dovetail.ScheduleError, match="'0' is a TorchScript module"):
        beside.find(where=lambda n: True)


def test_inputs_that_the_model_does_not_take_are_named_with_the_module() -> None:
    model = Wrapped(nn.Linear(8, 8))
    with pytest.raises(
        dovetail.CaptureError, match=r"float32\[2, 9\].*in 'inner' \(Linear\).*(?s:.*)itself runs on"
    ):
        dovetail.capture(model, (torch.randn(2, 9),))
    with pytest.raises(dovetail.CaptureError, match=r"return self.inner\(x\) \+ 1"):
        dovetail.capture(model, (torch.randn(2, 9),))
    gm = dovetail.capture(model, (X,))
    with pytest.raises(dovetail.CallMismatch, match=r"shape \(2, 8\) and has \(2, 9\)"):
        gm(torch.randn(2, 9))
    with pytest.raises(dovetail.CaptureError, match=r"dynamic_shapes do not fit"):
        dovetail.capture(model, (X,), dynamic_shapes={"y": {0: torch.export.Dim.AUTO}})
    with pytest.raises(dovetail.InvalidArgument, match="not the class Wrapped"):
        dovetail.capture(Wrapped, (X,))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({5: torch.export.Dim("b")}, "'x' has 2 dimensions, and none is 5"),
        ({"0": torch.export.Dim.AUTO}, "'x' has 2 dimensions, and none is '0'"),
        ({0: 3}, "dimension 0 of 'x' is 2, not 3"),
        ({0: torch.export.Dim("b", min=5)}, "is 2, outside of the range of"),
        ((torch.export.Dim("b", min=7, max=9), None), "is 2, outside of the range of"),
    ],
)
def test_a_dynamic_dimension_that_the_inputs_contradict_is_named(entry: Any, reason: str) -> None:
    with pytest.raises(dovetail.CaptureError, match=reason):
        dovetail.capture(Wrapped(nn.ReLU()), (X,), dynamic_shapes={"x": entry})


@pytest.mark.parametrize("name", [n for n in dovetail.backends.__all__ if n != "Backend"])
def test_a_backend_refuses_options_that_it_does_not_have(name: str) -> None:
    backend = getattr(dovetail.backends, name)
    with pytest.raises(dovetail.InvalidArgument, match=rf"{name} has no argument 'optoins'\. (Did|Its|It)"):
        backend(optoins={})
    assert isinstance(backend(), dovetail.Backend)


@pytest.mark.parametrize(
    ("hook", "hint"),
    [("prepair", "Did you mean 'prepare'"), (None, "There are compile, compile_async, load")],
)
def test_asking_a_backend_for_a_method_that_there_is_not(hook: object, hint: str) -> None:
    with pytest.raises(dovetail.InvalidArgument, match=f"a backend has no method .*{hint}"):
        dovetail.backends.Eager().implements(hook)  # type: ignore[arg-type]


@pytest.mark.parametrize("graph", [None, "graph", nn.ReLU()])
def test_a_context_of_rules_needs_a_graph(graph: object) -> None:
    with pytest.raises(dovetail.InvalidArgument, match=r"expected a torch\.fx\.GraphModule"):
        dovetail.RuleContext(graph)  # type: ignore[arg-type]


def test_an_empty_name_is_no_backend() -> None:
    with pytest.raises(dovetail.InvalidArgument, match="there is no backend ''"):
        dovetail.compile(nn.ReLU(), (X,), backends="")
    assert dovetail.compile(nn.ReLU(), (X,), backends=[])(X).equal(nn.ReLU()(X))


def test_renamed_arguments_are_refused_with_their_new_names() -> None:
    gm = dovetail.capture(nn.ReLU(), (X,))
    for call in (
        lambda: dovetail.compile(nn.ReLU(), specialisations=3),  # type: ignore[call-arg]
        lambda: dovetail.lower(gm, specialisations=3),  # type: ignore[call-arg]
        lambda: dovetail.Lower(specialisations=3),  # type: ignore[call-arg]
    ):
        with pytest.raises(dovetail.InvalidArgument, match="give recompile_limit"):
            call()
    with pytest.raises(dovetail.InvalidArgument, match="to `lower` or `compile`"):
        dovetail.fuse(gm, backend="eager")  # type: ignore[call-arg]
    with pytest.raises(dovetail.InvalidArgument, match=r"Cleanup has no argument 'deep'\. It takes none"):
        dovetail.Cleanup(deep=True)  # type: ignore[call-arg]
