"""What is recorded of a GPU, with a stand-in for NVML; and with the real one where there is a GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from speechdp.timing.gpu import gpu_facts

CUDA = torch.device("cuda", 0)


class FakeNvml(SimpleNamespace):
    NVMLError = RuntimeError

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__(fails=fails, running=0, asked="")

    def nvmlInit(self) -> None:  # noqa: N802 (NVML's name)
        self.running += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.running -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "555.1"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self.asked = uuid
        if self.fails:
            raise RuntimeError("Not Found")
        return uuid

    def nvmlDeviceGetPowerManagementLimit(self, handle: str) -> int:  # noqa: N802
        return 700_000


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H200", total_memory=139 * 2**30, uuid="1-2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_a_cpu_has_none() -> None:
    assert gpu_facts(torch.device("cpu")) is None


@pytest.mark.usefixtures("one_gpu")
def test_the_device_is_looked_up_by_uuid_and_nvml_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    expected = {"name": "H200", "memory_bytes": 139 * 2**30, "driver": "555.1", "power_limit_w": 700.0}
    assert gpu_facts(CUDA) == expected
    assert (nvml.asked, nvml.running) == ("GPU-1-2", 0)


@pytest.mark.usefixtures("one_gpu")
def test_an_error_of_nvml_is_recorded_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(fails=True)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    facts = gpu_facts(CUDA)
    assert facts is not None and facts["nvml"] == "Not Found" and nvml.running == 0


@pytest.mark.usefixtures("one_gpu")
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    facts = gpu_facts(CUDA)
    assert facts is not None and "speechdp[gpu]" in facts["nvml"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_real_gpu() -> None:
    facts = gpu_facts(CUDA)
    assert facts is not None and facts["memory_bytes"] > 0
