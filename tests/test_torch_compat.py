"""Capture works with a torch that lacks, or has changed, a name that is patched, and states what is weaker."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dovetail
from dovetail import torch_compat
from dovetail.ir import weight_fetch
from tests.frontend.test_capture_refusals import Hooks

SOURCE = Path(dovetail.__file__).parent
X = torch.ones(2, 4)


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -grads[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Negates(Model):
    def forward(self, x: Tensor) -> Tensor:
        return Negated.apply(self.linear(x)).relu()


class Infers(Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            self.linear(x)
        return x * 2


class Seeds(Model):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return x * 2


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report and warn as in a new process."""
    monkeypatch.setattr(torch_compat, "_reported", set())
    monkeypatch.setattr(torch_compat, "_compared", set())


CHECKS = ["FUNCTION_APPLY", "INFERENCE_MODE", "GRADIENT_HOOKS", "SEEDING", "EFFECTFUL_TARGETS", "DISPATCH"]


def _without(monkeypatch: pytest.MonkeyPatch, name: str) -> list[torch_compat.TorchName]:
    """Let a constant of torch_compat stand for names that torch does not have."""

    def gone(known: torch_compat.TorchName) -> torch_compat.TorchName:
        owner, _, attribute = known.path.rpartition(".")
        return replace(known, path=f"{owner}.absent_{attribute.strip('_')}")

    known = getattr(torch_compat, name)
    absent = tuple(map(gone, known)) if isinstance(known, tuple) else gone(known)
    monkeypatch.setattr(torch_compat, name, absent)
    names = list(absent) if isinstance(absent, tuple) else [absent]
    monkeypatch.setattr(torch_compat, "NAMES", (*torch_compat.NAMES, *names))
    return names


@pytest.mark.parametrize("name", CHECKS)
def test_capture_works_without_a_name_and_states_once_what_is_weaker(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    absent = _without(monkeypatch, name)
    model = Model()
    with caplog.at_level(logging.WARNING, logger="dovetail"):
        for _ in range(2):
            assert torch.equal(dovetail.capture(model, (X,))(X), model(X))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(absent)
    assert len(torch_compat.weaker_checks()) == len(absent)
    for each, message in zip(absent, messages, strict=True):
        assert each.path in message
        assert each.without in message
        assert torch.__version__ in message


def test_nothing_is_stated_where_every_name_is_there(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="dovetail"):
        dovetail.capture(Model(), (X,))
    assert not caplog.records
    assert torch_compat.weaker_checks() == []


def test_a_function_is_noticed_in_the_history_where_apply_cannot_be_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _without(monkeypatch, "FUNCTION_APPLY")
    with pytest.raises(dovetail.CaptureError, match="forward applies Negated"):
        dovetail.capture(Negates(), (X,))
    model = Negates().requires_grad_(False)
    assert torch.equal(dovetail.capture(model, (X,))(X), model(X))


@pytest.mark.parametrize(
    ("name", "kind"), [("GRADIENT_HOOKS", Hooks), ("INFERENCE_MODE", Infers), ("DISPATCH", Negates)]
)
def test_a_name_that_is_there_refuses_what_its_absence_lets_pass(
    name: str, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(dovetail.CaptureError):
        dovetail.capture(kind(), (X,))
    _without(monkeypatch, name)
    if kind is Negates:
        with pytest.raises(dovetail.CaptureError):
            dovetail.capture(kind(), (X,))
    else:
        dovetail.capture(kind(), (X,))


def test_seeding_is_noticed_from_the_state_where_the_functions_cannot_be_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _without(monkeypatch, "SEEDING")
    # Beside other threads only the seed is compared, which must not be the one that forward sets.
    with torch.random.fork_rng():
        torch.manual_seed(1)
        with pytest.raises(dovetail.CaptureError, match="seeds a random generator"):
            dovetail.capture(Seeds(), (X,))


@pytest.mark.parametrize("form", ["method of C", "inherited", "no method"])
def test_apply_of_another_kind(
    form: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Up to 2.13 it is a class method of Python, since 2.14 one of C, which has no `__func__`."""
    of_c = vars(torch._C._FunctionBase)["apply"]
    assert not hasattr(of_c, "__func__")
    if form == "method of C":
        monkeypatch.setattr(torch.autograd.Function, "apply", of_c)
    elif form == "inherited":
        monkeypatch.delattr(torch.autograd.Function, "apply")
    else:
        monkeypatch.setattr(torch.autograd.Function, "apply", _Callable())
    stored = vars(torch.autograd.Function).get("apply")
    with caplog.at_level(logging.WARNING, logger="dovetail"):
        dovetail.capture(Model(), (X,))
        if form != "no method":
            with pytest.raises(dovetail.CaptureError, match=r"in forward\n +return Negated.apply"):
                dovetail.capture(Negates(), (X,))
    assert vars(torch.autograd.Function).get("apply") is stored
    assert len(caplog.records) == (form == "no method")


class _Callable:
    def __call__(self, *args: Any) -> Any:
        raise NotImplementedError


def test_a_name_that_cannot_be_assigned_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    name = torch_compat.TorchName(
        "builtins.int.bit_length", "a method of a type of C", "nothing", is_check=True
    )
    with (
        caplog.at_level(logging.WARNING, logger="dovetail"),
        torch_compat.patched([(name, lambda _: len)]) as done,
    ):
        assert not done
        assert (3).bit_length() == 2
    assert "builtins.int.bit_length" in caplog.text


def test_what_was_replaced_is_put_back_after_an_error() -> None:
    class Owner:
        @classmethod
        def stored(cls) -> str:
            return cls.__name__

    class Heir(Owner):
        pass

    sys.modules["dovetail_heir"] = owner = type(sys)("dovetail_heir")
    owner.Heir = Heir  # type: ignore[attr-defined]
    name = torch_compat.TorchName("dovetail_heir.Heir.stored", "", "")
    try:
        with torch_compat.patched([(name, lambda _: lambda: "other")]):
            assert Heir.stored() == "other"
            raise KeyError
    except KeyError:
        pass
    finally:
        del sys.modules["dovetail_heir"]
    assert "stored" not in vars(Heir)
    assert Heir.stored() == "Heir"


@pytest.mark.parametrize(
    ("version", "is_newer"),
    [
        ("2.11.0", False),
        ("2.15.1+cu132", False),
        ("2.16.0", True),
        ("3.0.0.dev20270101", True),
        ("odd", False),
    ],
)
def test_a_torch_newer_than_tested_warns_once(
    version: str, is_newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            dovetail.capture(Model(), (X,))
    messages = [str(w.message) for w in caught if "was tested with torch" in str(w.message)]
    assert len(messages) == is_newer
    assert all(version in message and "2.11 to 2.15" in message for message in messages)
    assert all(w.filename == __file__ for w in caught if "was tested with torch" in str(w.message))


def test_this_torch_is_one_that_was_tested() -> None:
    version = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    assert torch_compat.OLDEST <= version <= torch_compat.NEWEST


def test_every_name_has_a_purpose_and_a_fallback() -> None:
    assert all(name.purpose and name.without for name in torch_compat.NAMES)
    assert len({name.path for name in torch_compat.NAMES}) == len(torch_compat.NAMES)
    constants = [value for key, value in vars(torch_compat).items() if key.isupper() and key != "NAMES"]
    named = [n for value in constants for n in (value if isinstance(value, tuple) else (value,))]
    assert {n for n in named if isinstance(n, torch_compat.TorchName)} == set(torch_compat.NAMES)


PROBED = re.compile(
    r"(has|get|set)attr\(torch\b(?!\.(ops|Tensor))[\w.]*, \"_|setattr\((torch|Tensor)\b"
    r"|^ *(from|import) torch\b.*\n( .*\n)*? *except ImportError",
    re.MULTILINE,
)


def test_no_other_file_tests_for_names_of_torch() -> None:
    tests_for_names = [
        f"{path.relative_to(SOURCE)}:{text.count(chr(10), 0, probed.start()) + 1}"
        for path in SOURCE.rglob("*.py")
        if path.name != "torch_compat.py"
        for text in (path.read_text(),)
        for probed in PROBED.finditer(text)
        if "onnx" not in path.name
    ]
    assert tests_for_names == []


@pytest.mark.parametrize(
    "name",
    [
        "COMPOSITE_OPERATOR",
        "PRESERVED_OPERATOR",
        "DICT_VERSION",
        "ROOT_GUARD_MANAGER",
        "GUARD_MANAGER_TYPE",
        "GENERATOR_METACLASS",
    ],
)
def test_what_is_only_slower_or_refused_without_a_name_is_not_stated(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _without(monkeypatch, name)
    monkeypatch.setattr(weight_fetch, "dict_version", weight_fetch.find_dict_version())
    assert (weight_fetch.dict_version is None) >= (name == "DICT_VERSION")
    model = Model()
    with caplog.at_level(logging.WARNING, logger="dovetail"):
        graph = dovetail.fuse(dovetail.capture(model, (X,)))
    assert torch.equal(graph(X), model(X))
    model.linear.weight.data += 1
    assert torch.equal(graph(X), model(X))
    assert not caplog.records
