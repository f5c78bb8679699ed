"""GPU facts and readings from NVML: the hardware of a run, and its utilisation."""

from __future__ import annotations

import contextlib
import importlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Reasons for a GPU's reduced clock, by the bits of NVML's clock event reasons.  Bit 0, idle, is none.
CLOCK_LIMITS = {
    "power": 0x04 | 0x80,  # software power cap, hardware power brake
    "heat": 0x20 | 0x40,
    "hardware": 0x08,  # also set together with the power brake and with heat
    "settings": 0x02 | 0x10 | 0x100,  # application clocks, sync boost (other GPUs' clocks), display clocks
}
#: Inode of the initial namespace of process ids, fixed in Linux (PROC_PID_INIT_INO).
_FIRST_PID_NAMESPACE = 0xEFFFFFFC


def gpu_facts(device: torch.device) -> dict[str, Any] | None:
    """Return name, memory (bytes), driver and power limit (W) of a CUDA device; None for a CPU.

    NVML counts all GPUs of the host, torch only those in CUDA_VISIBLE_DEVICES, so the device is looked up by
    its UUID.  Without the package nvidia-ml-py (extra `gpu`) only torch's values are returned, and the key
    "nvml" says why.
    """
    if device.type != "cuda":
        return None
    import torch  # noqa: PLC0415 (reports import CLOCK_LIMITS without torch)

    properties = torch.cuda.get_device_properties(device)
    facts: dict[str, Any] = {"name": properties.name, "memory_bytes": properties.total_memory}
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return {**facts, "nvml": "not installed; pip install 'speechdp[gpu]'"}
    try:
        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
            facts["driver"] = nvml.nvmlSystemGetDriverVersion()
            facts["power_limit_w"] = nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return {**facts, "nvml": str(error)}
    return facts


def gpu_uuid(device: torch.device) -> str | None:
    """Return NVML's UUID of a CUDA device, independent of CUDA_VISIBLE_DEVICES; None for a CPU."""
    if device.type != "cuda":
        return None
    import torch  # noqa: PLC0415

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def visible_gpus() -> list[str]:
    """Return the UUIDs of the GPUs visible through CUDA_VISIBLE_DEVICES, in torch's order."""
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        return []
    return [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count())]


class GpuReader:
    """Read utilisation, clocks and users of some GPUs through NVML.  For use by one thread.

    Attributes:
        uuids, names: of the requested GPUs that NVML knows, in the order of the request; empty without NVML.
        numbers: NVML's indices of these GPUs, as in nvidia-smi, independent of CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self.uuids: list[str] = []
        self.names: list[str] = []
        self.numbers: list[int] = []
        self._handles: list[Any] = []
        self._problems: list[str] = []
        self._nvml: Any = None
        self._unanswered: set[int] = set()  # GPUs for which a query of other users had no answer
        self._answered: set[int] = set()
        if not uuids:
            return
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            self._problems.append("GPUs: nvidia-ml-py is not installed; pip install 'speechdp[gpu]'")
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self._problems.append(f"GPUs: {error}")
            return
        self._nvml = nvml
        for uuid in uuids:
            self._open(uuid)

    def read(self, problems: list[str]) -> list[list[float | int | None]]:
        """Return one row per GPU; values that cannot be read are None, and `problems` names them.

        Returns:
            [index, utilisation in %, memory in bytes, power in W, SM clock in MHz, clock event reasons]; the
            index refers to `uuids`, the reasons are bits, see CLOCK_LIMITS.
        """
        problems += self._problems
        self._problems.clear()
        return [self._read_one(i, handle, problems) for i, handle in enumerate(self._handles)]

    def read_others(
        self, users: Mapping[str, Collection[int]], job: Collection[int], problems: list[str]
    ) -> list[list[int | None]]:
        """Return each GPU's use by processes outside of the job; takes longer than `read`.

        A container has its own process ids.  Inside it, some drivers list the host's ids, others leave out
        processes outside of the container.  So a GPU is reported only if all the job's processes on it are
        listed under their ids here, and memory that no listed process holds is counted as other processes'.
        In a container that shows neither other processes nor such memory, the GPU is not reported.

        Args:
            users: ids of the job's processes on this host that use a GPU, by its UUID.
            job: ids of all the job's processes on this host: one may have a context on a GPU that is not its
                own.
            problems: gets a line for each value that cannot be read.

        Returns:
            [index, number of processes, bytes that they hold or None] for each GPU whose users are known; the
            index refers to `uuids`.
        """
        nvml, rows, ours = self._nvml, list[list[int | None]](), set(job)
        for index, (uuid, handle) in enumerate(zip(self.uuids, self._handles, strict=True)):
            if not (own := set(users.get(uuid, ()))):
                continue
            try:
                listed = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except (AttributeError, nvml.NVMLError) as error:  # AttributeError: pynvml no longer has the call
                problems.append(f"GPU {self.numbers[index]}: other processes: {error}")
                continue
            held = _bytes_by_process((int(process.pid), process.usedGpuMemory) for process in listed)
            others = held.keys() - ours
            num_bytes = self._bytes_of_others(handle, held, others) if own <= held.keys() else None
            if own <= held.keys() and (others or num_bytes is not None or _sees_all_processes()):
                rows.append([index, len(others), num_bytes])
                self._answered.add(index)
            else:
                self._unanswered.add(index)
        return rows

    def unanswered_queries(self) -> list[str]:
        """Return a line for each GPU that `read_others` never reported."""
        return [
            f"GPU {self.numbers[index]}: other processes: NVML does not list all processes, or not by the "
            "ids that they have here (a container?)"
            for index in sorted(self._unanswered - self._answered)
        ]

    def close(self) -> None:
        """Release NVML.  Safe to call twice."""
        nvml, self._nvml = self._nvml, None
        self._handles.clear()
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def _open(self, uuid: str) -> None:
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            name, number = self._nvml.nvmlDeviceGetName(handle), self._nvml.nvmlDeviceGetIndex(handle)
        except self._nvml.NVMLError as error:
            self._problems.append(f"{uuid}: {error}")
            return
        self.uuids.append(uuid)
        self.names.append(str(name))
        self.numbers.append(int(number))
        self._handles.append(handle)

    def _read_one(self, index: int, handle: Any, problems: list[str]) -> list[float | int | None]:
        nvml = self._nvml
        readings: dict[str, Callable[[], float | int]] = {
            "utilisation": lambda: int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "memory": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
            "power": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,  # mW
            "clock": lambda: int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "clock event reasons": lambda: self._clock_event_reasons(handle),
        }
        values: list[float | int | None] = [index]
        for what, read in readings.items():
            try:
                values.append(read())
            except (AttributeError, nvml.NVMLError) as error:  # AttributeError: pynvml no longer has the call
                problems.append(f"GPU {self.numbers[index]}: {what}: {error}")
                values.append(None)
        return values

    def _clock_event_reasons(self, handle: Any) -> int:
        """Return the bits; drivers before 535, and pynvml of that time, call them throttle reasons."""
        nvml = self._nvml
        with contextlib.suppress(AttributeError, nvml.NVMLError):
            return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))

    def _bytes_of_others(
        self, handle: Any, held: Mapping[int, int | None], others: Collection[int]
    ) -> int | None:
        """Return the memory that other processes hold, listed or not; None if unknown.

        Args:
            held: bytes of each listed process; None or 0 if NVML does not know.
            others: ids of those outside of the job.
        """
        nvml = self._nvml
        listed = [held[pid] for pid in others]
        known = [sum(size or 0 for size in listed)] if listed and None not in listed else []
        own = [size for pid, size in held.items() if pid not in others]
        if all(own):
            # Excludes the driver's reserved memory, which the first version of the call includes.
            with contextlib.suppress(AttributeError, nvml.NVMLError):
                used = int(nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used)
                known.append(max(0, used - sum(size or 0 for size in own)))
        return max(known, default=None)


class GpuTally:
    """Sum a reader's rows of one GPU, for a summary of the whole run."""

    def __init__(self, number: int) -> None:
        """Create an empty tally.

        Args:
            number: NVML's index of the GPU.
        """
        self._number = number
        self._clocks: Counter[int] = Counter()  # like the next two, of samples in which a kernel ran
        self._limits: Counter[str] = Counter()
        self._num_reasons = 0
        self._others = _Mean()
        self._others_bytes = _Mean()

    def add(self, row: Sequence[float | int | None]) -> None:
        """Add a row of `GpuReader.read`."""
        _, utilisation, _, _, clock, reasons = row
        if not utilisation:
            return  # an idle GPU lowers its clock; if the utilisation is unknown, the GPU may be idle
        if clock is not None:
            self._clocks[int(clock)] += 1
        if reasons is not None:
            self._num_reasons += 1
            self._limits.update(name for name, bits in CLOCK_LIMITS.items() if int(reasons) & bits)

    def add_others(self, row: Sequence[int | None]) -> None:
        """Add a row of `GpuReader.read_others`."""
        _, number, num_bytes = row
        if number is not None:
            self._others.add(number)
        if num_bytes is not None:
            self._others_bytes.add(num_bytes)

    def summary(self) -> dict[str, Any]:
        """Return the rank's entry `gpu` in timing.json (docs/timing.md); only values that were read."""
        found: dict[str, Any] = {"index": self._number}
        if self._clocks:
            found |= {"clock_mhz": _median(self._clocks), "lowest_clock_mhz": min(self._clocks)}
        if self._num_reasons:
            found["limits"] = {name: round(n / self._num_reasons, 4) for name, n in self._limits.items()}
        if self._others.number:
            found |= {"others": round(self._others.mean, 3), "most_others": int(self._others.most)}
        if self._others_bytes.number:
            found["others_bytes"] = round(self._others_bytes.mean)
        return found


class _Mean:
    """Mean and maximum of some amounts."""

    def __init__(self) -> None:
        self.number = 0
        self.most = 0.0
        self._sum = 0.0

    def add(self, amount: float) -> None:
        self.number += 1
        self.most = max(self.most, amount)
        self._sum += amount

    @property
    def mean(self) -> float:
        return self._sum / self.number


def _median(counts: Mapping[int, int]) -> int:
    """Return the lower median of values, given the count of each."""
    before, half = 0, (sum(counts.values()) + 1) // 2
    for value in sorted(counts):
        before += counts[value]
        if before >= half:
            return value
    raise AssertionError("no values")


def _bytes_by_process(listed: Iterable[tuple[int, int | None]]) -> dict[int, int | None]:
    """Return the bytes of each process, which may be listed more than once; None: NVML does not know."""
    held: dict[int, int | None] = {}
    for pid, size in listed:
        before = held.get(pid, 0)
        held[pid] = None if size is None or before is None else before + size
    return held


def _sees_all_processes() -> bool:
    """Return whether this is the machine's initial process-id namespace, unlike in a container."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False
