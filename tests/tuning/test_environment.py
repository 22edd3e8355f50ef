"""Environments: the key that measurements are shared by, JSON, and what changed since."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail import InvalidArgument
from dovetail.tuning import environment as module
from dovetail.tuning.apply_plan import environment_of_call
from dovetail.tuning.environment import Environment, current_environment

H200 = Environment(
    device="cuda: NVIDIA H200, sm_90",
    driver="570.86.15",
    torch="2.13.0",
    python="3.11.7",
    threads=8,
    packages=(("onnxruntime", "1.31.1"), ("triton", "3.5.0")),
)


def test_the_key_is_the_same_in_every_release() -> None:
    # Written down: another key would orphan the measurements of every store.
    assert H200.key == "905568bc097f6756"


@pytest.mark.parametrize("field", dataclasses.fields(Environment), ids=lambda field: field.name)
def test_every_field_is_part_of_the_key(field: Any) -> None:
    other = {
        "threads": 9,
        "packages": (("triton", "3.5.0"),),
        "settings": (("matmul", "high"),),
    }.get(field.name, "other")
    assert dataclasses.replace(H200, **{field.name: other}).key != H200.key


def test_the_order_of_packages_does_not_matter() -> None:
    swapped = dataclasses.replace(H200, packages=H200.packages[::-1])
    assert swapped == H200
    assert swapped.key == H200.key


def test_json_gives_the_environment_back() -> None:
    data = H200.to_json()
    assert data["packages"] == [["onnxruntime", "1.31.1"], ["triton", "3.5.0"]]
    assert Environment.from_json(data) == H200


@pytest.mark.parametrize(
    "change",
    [
        {"threads": "8"},
        {"threads": True},
        {"torch": 2.13},
        {"packages": "triton"},
        {"packages": [["triton"]]},
        {"packages": [["triton", 3]]},
        {"settings": [["matmul"]]},
        {"more": 1},
    ],
    ids=str,
)
def test_other_json_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"an environment (is a dict with the keys|has text as) device"):
        Environment.from_json({**H200.to_json(), **change})


def test_json_that_is_not_a_dict_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="an environment is a dict"):
        Environment.from_json([1, 2])  # type: ignore[arg-type]


def test_differences_name_both_versions() -> None:
    now = Environment(
        device="cpu: AMD EPYC",
        driver="",
        torch="2.14.0",
        python="3.11.7",
        threads=8,
        packages=(("openvino", "2026.4"), ("triton", "3.6.0")),
    )
    assert now.differences(H200) == (
        "device cpu: AMD EPYC, was cuda: NVIDIA H200, sm_90",
        "driver none, was 570.86.15",
        "torch 2.14.0, was 2.13.0",
        "openvino 2026.4, was not installed",
        "triton 3.6.0, was 3.5.0",
        "onnxruntime not installed, was 1.31.1",
    )
    assert H200.differences(H200) == ()


def test_settings_that_are_not_the_defaults_are_part_of_the_environment() -> None:
    before = current_environment()
    assert before.settings == ()
    assert "settings" not in before.to_json()
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    try:
        changed = current_environment()
        assert environment_of_call(torch.nn.Linear(2, 2), (), {}) == changed
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
    settings = dict(changed.settings)
    assert (settings["matmul"], settings["deterministic"]) == ("medium", "True")
    assert changed.key != before.key
    assert Environment.from_json(changed.to_json()) == changed
    differences = changed.differences(before)
    assert "matmul medium, was torch's default" in differences
    assert "deterministic torch's default, was True" in before.differences(changed)


def test_a_precision_that_is_set_to_its_default_is_no_other_environment() -> None:
    before = current_environment()
    torch.set_float32_matmul_precision("highest")
    assert current_environment() == before


def test_the_current_environment_is_that_of_the_process() -> None:
    environment = current_environment()
    assert environment == current_environment(torch.device("cpu"))
    assert environment.device.startswith("cpu: ")
    assert environment.driver == ""
    assert environment.torch == torch.__version__
    assert environment.threads == torch.get_num_threads()
    assert "onnxruntime" in dict(environment.packages)
    assert Environment.from_json(environment.to_json()) == environment


@pytest.mark.parametrize("content", ["processor : 0\nBogoMIPS : 50.00\n", None], ids=["no model", "no file"])
def test_a_processor_without_a_model_name_has_its_architecture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "cpuinfo").write_text(content)
    monkeypatch.setattr(module, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(module.platform, "processor", lambda: "")
    monkeypatch.setattr(module.platform, "machine", lambda: "aarch64")
    assert current_environment().device.startswith("cpu: aarch64")


@pytest.mark.parametrize(
    ("content", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue Jan\nGCC 12.2.0", "570.86.15"),
        (None, "CUDA 12.8"),
    ],
    ids=["file", "no file"],
)
def test_a_cuda_device_has_name_architecture_and_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None, driver: str
) -> None:
    if content is not None:
        (tmp_path / "version").write_text(content)
    monkeypatch.setattr(module, "_NVIDIA_VERSION", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"H200 {index}")
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12080, raising=False)
    assert current_environment(torch.device("cuda")).device == "cuda: H200 1, sm_91"
    assert current_environment(torch.device("cuda", 0)).device == "cuda: H200 0, sm_90"
    assert current_environment(torch.device("cuda", 0)).driver == driver


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InvalidArgument, match="no device 'cuda:3': torch has 1 CUDA devices"):
        current_environment(torch.device("cuda", 3))


def test_another_device_is_its_type() -> None:
    assert current_environment(torch.device("meta")).device == "meta"
