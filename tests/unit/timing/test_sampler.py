"""The sampler beside training: what it writes of processes and GPUs, and that it never stands in the way."""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from speechdp import jsonl
from speechdp.errors import RunError
from speechdp.report.kit.utilisation import utilisation_course
from speechdp.report.runs.samples import Samples, read_samples
from speechdp.timing.gpu import GpuReader, GpuTally, _sees_all_processes, gpu_uuid, visible_gpus
from speechdp.timing.sampler import Sampler
from tests.helpers.nvml import FakeNvml
from tests.helpers.waiting import wait_until


@pytest.fixture(autouse=True)
def flushed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "FLUSH_INTERVAL_NS", 0)


@pytest.fixture
def spinning() -> Iterator[int]:
    """A process with two threads that hash, which needs no GIL."""
    program = (
        "import hashlib, threading\n"
        "def work():\n"
        "    while True: hashlib.sha256(b'x' * 10_000_000).digest()\n"
        "[threading.Thread(target=work).start() for _ in range(2)]\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    yield process.pid
    process.kill()
    process.wait()


def sample_until(path: Path, enough: Callable[[Samples], bool], **options: Any) -> Samples:
    """Sample until `enough` holds of what has been written."""
    with Sampler(path, options.pop("ranks", {0: os.getpid()}), hz=options.pop("hz", 50.0), **options):
        wait_until(lambda: path.read_text().count("\n") and enough(read_samples(path)), "enough samples")
    return read_samples(path)


def some(samples: Samples) -> bool:
    return len(samples.t_s) >= 3


def test_processes_are_sampled_threads_included(tmp_path: Path, spinning: int) -> None:
    def used(samples: Samples) -> bool:
        """Return whether the process has been seen to compute, whatever cores it gets afterwards."""
        return some(samples) and bool(np.nanmean(samples.cpu_percent[:, 1]) > 5)

    ranks = {3: os.getpid(), 7: spinning}
    samples = sample_until(tmp_path / "timeline" / "s.jsonl", used, ranks=ranks, hz=10, gpus=False)
    assert (samples.kind, samples.ranks, samples.hz, samples.gpus) == ("cpu", (3, 7), 10, ())
    assert (samples.rss_bytes[:, 0] > 10_000_000).all()
    assert (np.diff(samples.t_s) > 0).all() and samples.t_s[0] >= 0


def test_a_process_that_ends_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    path = tmp_path / "s.jsonl"

    def ended(samples: Samples) -> bool:
        if some(samples) and process.poll() is None:
            process.kill()
            process.wait()
        return bool(np.isnan(samples.rss_bytes[:, 1]).any())

    samples = sample_until(path, ended, ranks={0: os.getpid(), 1: process.pid}, gpus=False)
    assert ended(samples) and not np.isnan(samples.rss_bytes).all(axis=0).any()
    assert not np.isnan(samples.rss_bytes[:, 0]).any()
    with Sampler(path, {0: process.pid}, gpus=False):
        pass
    assert any("rank 0" in notice for notice in read_samples(path).notices)


def test_what_psutil_passes_on_of_the_system_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patches:
        patches.setattr(psutil.Process, "memory_info", refuse)
        samples = sample_until(tmp_path / "s.jsonl", some, gpus=False)
    assert np.isnan(samples.rss_bytes).all()
    assert samples.notices == ("rank 0: [Errno 24] Too many open files",)
    with monkeypatch.context() as patches:
        patches.setattr(psutil, "cpu_count", refuse)
        with Sampler(tmp_path / "t.jsonl", {0: os.getpid()}, gpus=False) as ended:
            wait_until(lambda: ended.problem, "the end of sampling")
    assert ended.problem is not None and "(Too many open files); training continues" in ended.problem


def test_the_longer_it_lasts_the_fewer_samples_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of weeks would fill the disk."""
    monkeypatch.setattr("speechdp.timing.sampler._LINES_AT_ONE_RATE", 5)
    samples = sample_until(tmp_path / "s.jsonl", lambda s: len(s.t_s) >= 17, gpus=False)
    # With the head line, 5, 5 and 5 lines at 50, 25 and 12.5 a second; then each comes 80 ms later at least.
    assert (np.diff(samples.t_s[14:]) > 0.079).all()
    assert samples.hz == 50 and (np.diff(samples.elapsed_s) > 0).all()
    course = utilisation_course([samples])
    assert course is not None and not np.isnan(course.values).any()


def test_a_large_file_is_read_without_all_of_its_text(tmp_path: Path) -> None:
    path, num_samples = tmp_path / "s.jsonl", 20_000
    with path.open("w") as file:
        file.write('{"kind":"cpu","hz":10.0,"host":"a","ranks":{"0":1,"1":2},"gpus":[]}\n')
        for number in range(num_samples):
            file.write(f'{{"t_s":{number / 10},"ranks":[[0,50.5,{number}],[1,null,7]]}}\n')
    tracemalloc.start()
    samples = read_samples(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert samples.rss_bytes[:, 0].tolist() == list(range(num_samples))
    assert np.isnan(samples.cpu_percent[:, 1]).all() and (samples.rss_bytes[:, 1] == 7).all()
    assert peak_bytes < 8_000_000  # a dictionary for each line takes 20


def test_time_counts_from_the_origin_given(tmp_path: Path) -> None:
    origin_s = time.perf_counter() - 1000
    samples = sample_until(tmp_path / "s.jsonl", some, gpus=False, origin_s=origin_s)
    assert 1000 < samples.t_s[0] < time.perf_counter() - origin_s


def test_gpus_are_found_by_uuid_in_their_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    used = {0: "GPU-b", 1: "GPU-a", 2: "GPU-b", 3: "GPU-elsewhere"}
    samples = sample_until(tmp_path / "s.jsonl", some, gpu_of_rank=used)
    assert (samples.kind, samples.gpus, samples.gpu_of_rank) == ("gpu", ("L4", "H200"), {0: 0, 1: 1, 2: 0})
    assert samples.gpu_percent[0].tolist() == [7, 93]
    assert samples.gpu_memory_bytes[0, 0] == 3 * 2**30
    assert (samples.power_w[0, 1], samples.clock_mhz[0, 1], samples.clock_reasons[0, 1]) == (412.5, 1980, 0)
    assert samples.notices == ("GPU-elsewhere: Not Found",)
    assert nvml.running == 0


def test_without_ranks_gpus_the_visible_ones_are_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = SimpleNamespace(uuid="b")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert (visible_gpus(), gpu_uuid(torch.device("cuda", 0))) == (["GPU-b"], "GPU-b")
    assert sample_until(tmp_path / "s.jsonl", some).gpus == ("L4",)
    assert sample_until(tmp_path / "none.jsonl", some, gpus=False).kind == "cpu"


def test_what_nvml_cannot_read_is_left_out_and_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml(power=0, utilisation=2)  # two readings succeed: one of each GPU
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    samples = sample_until(tmp_path / "s.jsonl", some, gpu_of_rank={0: "GPU-a", 1: "GPU-b"})
    assert samples.gpu_percent[0].tolist() == [93, 7] and np.isnan(samples.gpu_percent[1:]).all()
    assert np.isnan(samples.power_w).all() and (samples.clock_mhz == 1980).all()
    assert sorted(samples.notices) == [
        "GPU 2: power: Not Supported",
        "GPU 2: utilisation: GPU is lost",
        "GPU 3: power: Not Supported",
        "GPU 3: utilisation: GPU is lost",
    ]
    assert nvml.running == 0


OWN, PEER, OTHER = os.getpid(), os.getppid(), 2**30


def conditions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, **options: Any
) -> tuple[dict[int, dict[str, Any]], Samples]:
    """Sample two ranks that share a GPU; return what stands in timing.json of them, and the samples."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    used = {0: "GPU-b", 1: "GPU-b"}
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
    with Sampler(path, {0: OWN, 1: PEER}, hz=50, gpu_of_rank=used, **options) as sampler:
        wait_until(lambda: path.read_text().count("\n") and some(read_samples(path)), "enough samples")
    return sampler.gpu_summaries(), read_samples(path)


def in_container(monkeypatch: pytest.MonkeyPatch, *, is_in: bool) -> None:
    """Make the process ids those of the first namespace, or of another one."""
    number = Path("/proc/self/ns/pid").stat().st_ino
    monkeypatch.setattr("speechdp.timing.gpu._FIRST_PID_NAMESPACE", number + is_in)


def test_process_ids_are_those_of_the_whole_machine_in_its_first_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Linux names the first one so since 3.8 (PROC_PID_INIT_INO in include/linux/proc_ns.h).
    is_first = os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"  # noqa: PTH115 - no file of that name
    assert _sees_all_processes() == is_first
    with monkeypatch.context() as patches:
        patches.setattr(Path, "stat", lambda path: SimpleNamespace(st_ino=4026531836))
        assert _sees_all_processes()
        patches.setattr(Path, "stat", lambda path: SimpleNamespace(st_ino=4026532441))
        assert not _sees_all_processes()

        def refuse(path: Path) -> None:
            raise FileNotFoundError(path)

        patches.setattr(Path, "stat", refuse)
        assert not _sees_all_processes()


def test_others_on_a_gpu_are_counted_without_the_ranks_that_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_container(monkeypatch, is_in=False)
    nvml = FakeNvml()
    nvml.listed = {"GPU-b": {OWN: 2**29, PEER: 2**29, OTHER: 3 * 2**28}}
    found, samples = conditions(tmp_path, monkeypatch, nvml)
    assert found[0] == found[1] and found[0]["index"] == 3 and samples.gpu_numbers == (3,)
    # 2 GiB are in use, of which the ranks hold one: more than the process that is listed has.
    assert (found[0]["others"], found[0]["most_others"], found[0]["others_bytes"]) == (1, 1, 2**30)
    assert (samples.others[0, 0], samples.others_bytes[0, 0]) == (1, 2**30)
    assert np.isnan(samples.others).sum() >= len(samples.t_s) - 2  # once a second
    assert samples.notices == ()
    nvml.listed = {"GPU-b": {OWN: None, PEER: None}}
    found, samples = conditions(tmp_path, monkeypatch, nvml)
    assert found[0]["others"] == 0 and "others_bytes" not in found[0] and np.isnan(samples.others_bytes).all()


@pytest.mark.parametrize(
    "listed",
    [
        {7: 2**29, 8: 2**29, OTHER: 2**29},  # by the ids that they have on the host
        {OWN: 2**29, OTHER: 2**29},  # one rank is in another container
        {OWN: 0, PEER: 0},  # nobody else that a container would see, and whose memory is not known
        {},
    ],
)
def test_what_a_container_hides_is_not_taken_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: dict[int, int]
) -> None:
    in_container(monkeypatch, is_in=True)
    nvml = FakeNvml()
    nvml.listed = {"GPU-b": listed}
    found, samples = conditions(tmp_path, monkeypatch, nvml)
    assert "others" not in found[0] and "others_bytes" not in found[0] and np.isnan(samples.others).all()
    assert samples.notices == (
        "GPU 3: other processes: NVML does not list all processes, or not by the ids that they have here (a "
        "container?)",
    )


def test_memory_that_no_process_of_a_container_holds_is_that_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_container(monkeypatch, is_in=True)
    nvml = FakeNvml()
    nvml.listed = {"GPU-b": {OWN: 2**28, PEER: 2**28}}
    found, samples = conditions(tmp_path, monkeypatch, nvml)
    assert (found[0]["others"], found[0]["others_bytes"]) == (0, 3 * 2**29) and samples.notices == ()


def test_a_gpu_that_the_job_uses_in_other_containers_too_is_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml()
    nvml.listed = {"GPU-b": {OWN: 2**28, PEER: 2**28, OTHER: 2**28}}
    found, samples = conditions(tmp_path, monkeypatch, nvml, unobserved_gpus=["GPU-b"])
    assert "others" not in found[0] and np.isnan(samples.others).all() and found[0]["clock_mhz"] == 1980


def test_ranks_are_no_others_on_a_gpu_that_is_not_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may have a context on each GPU that it sees."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml := FakeNvml())
    nvml.listed = {"GPU-a": {OWN: 2**30, PEER: 2**28}, "GPU-b": {PEER: 2**30, OTHER: 2**28}}
    path, used = tmp_path / "s.jsonl", {0: "GPU-a"}  # rank 1 has none of which anything is known
    with Sampler(path, {0: OWN, 1: PEER}, hz=50, gpu_of_rank=used) as sampler:
        wait_until(lambda: path.read_text().count("\n") and some(read_samples(path)), "enough samples")
    found = sampler.gpu_summaries()[0]
    assert (found["others"], found["most_others"], found["others_bytes"]) == (0, 0, 3 * 2**28)


def test_a_process_that_is_listed_twice_holds_both_amounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml()
    nvml.listed = {"GPU-b": [(OWN, 2**29), (PEER, 2**29), (OTHER, 2**30), (OTHER, 2**29)]}
    found, _ = conditions(tmp_path, monkeypatch, nvml)
    assert (found[0]["others"], found[0]["others_bytes"]) == (1, 3 * 2**29)
    nvml.listed = {"GPU-b": [(OWN, 2**28), (OWN, 2**28), (PEER, 2**29)]}
    found, _ = conditions(tmp_path, monkeypatch, nvml)
    assert (found[0]["others"], found[0]["others_bytes"]) == (0, 2**30)


@pytest.mark.parametrize("refused", [{}, {"throttle_reasons": 0}, {"event_reasons": 0}])
def test_clock_event_reasons_are_read_by_either_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: dict[str, int]
) -> None:
    nvml = FakeNvml(**refused)
    nvml.reasons, nvml.listed = 0x04, {"GPU-b": {OWN: 2**29, PEER: 2**29}}
    found, samples = conditions(tmp_path, monkeypatch, nvml)
    assert (samples.clock_reasons == 4).all() and found[0]["limits"] == {"power": 1.0}
    assert samples.notices == ()


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_calls_that_the_package_has_dropped_end_no_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropped: int
) -> None:
    calls = [
        ("clock event reasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
        ("other processes", "nvmlDeviceGetComputeRunningProcesses"),
    ]
    for _, name in calls[:dropped]:
        monkeypatch.delattr(FakeNvml, name)
    nvml = FakeNvml(event_reasons=0)
    nvml.listed = {"GPU-b": {OWN: 2**29, PEER: 2**29}}
    found, samples = conditions(tmp_path, monkeypatch, nvml)
    assert len(samples.t_s) >= 3 and found[0]["clock_mhz"] == 1980
    assert [notice.rpartition(": ")[0] for notice in samples.notices] == [
        f"GPU 3: {what}" for what, _ in calls[:dropped]
    ]
    assert ("limits" in found[0], "others" in found[0]) == (dropped < 1, dropped < 2)


def test_a_driver_that_lists_no_processes_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, samples = conditions(tmp_path, monkeypatch, FakeNvml(processes=0))
    assert "others" not in found[0]
    assert samples.notices == ("GPU 3: other processes: Not Supported",)


def test_clocks_are_those_of_a_busy_gpu_and_say_what_held_them_down() -> None:
    tally = GpuTally(3)
    assert tally.summary() == {"index": 3}
    for utilisation, clock, reasons in (
        *[(90, 1980, 0)] * 5,
        *[(90, 1410, 0x04)] * 2,
        (90, 1200, 0x48),
        (None, 210, 0x01),  # as on a part of a GPU (MIG): it may be idle
        *[(0, 345, 0x01)] * 9,
    ):
        tally.add([3, utilisation, 2**30, 400.0, clock, reasons])
    tally.add([3, 90, None, None, None, None])
    assert tally.summary() == {
        "index": 3, "clock_mhz": 1980, "lowest_clock_mhz": 1200,
        "limits": {"power": 0.25, "heat": 0.125, "hardware": 0.125},
    }  # fmt: skip
    for number, num_bytes in ((0, None), (0, 4), (2, 8), (2, None)):
        tally.add_others([3, number, num_bytes])
    assert {"others": 1.0, "most_others": 2, "others_bytes": 6}.items() <= tally.summary().items()


def test_samples_of_versions_without_clock_event_reasons_are_read(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text(
        '{"kind":"gpu","hz":10,"host":"a","ranks":{"0":1},"gpus":["H200"],"gpu_of_rank":{"0":0}}\n'
        '{"t_s":1,"ranks":[],"gpus":[[0,93,7,412.5,1980]]}\n'
        '{"t_s":2,"ranks":[],"gpus":[[0,93,7,412.5,1965,4]],"others":[[0,1,null]]}\n'
    )
    samples = read_samples(tmp_path / "s.jsonl")
    assert samples.clock_mhz[:, 0].tolist() == [1980, 1965]
    assert np.isnan(samples.clock_reasons[0, 0]) and samples.clock_reasons[1, 0] == 4
    assert samples.gpu_numbers == (0,)
    assert (
        np.isnan(samples.others[0, 0]) and samples.others[1, 0] == 1 and np.isnan(samples.others_bytes).all()
    )


def test_the_stand_in_has_only_what_nvml_has() -> None:
    nvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    ours = {name for name in vars(FakeNvml) if name.lower().startswith("nvml")}
    assert len(ours) == 15 and [name for name in ours if not hasattr(nvml, name)] == []
    if not torch.cuda.is_available():
        problems: list[str] = []
        reader = GpuReader(["GPU-a"])
        assert reader.read(problems) == [] and len(problems) == 1
        reader.close()


@pytest.mark.parametrize("nvml", [None, FakeNvml(init=0)])
def test_without_nvml_processes_are_sampled_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    samples = sample_until(tmp_path / "s.jsonl", some, gpu_of_rank={0: "GPU-a"})
    assert samples.kind == "cpu" and (samples.rss_bytes > 0).all()
    assert len(samples.notices) == 1 and samples.notices[0].startswith("GPUs: ")


def test_its_thread_and_file_end_with_the_block_also_after_an_error(tmp_path: Path) -> None:
    gc.collect()  # else descriptors of earlier tests may be closed meanwhile
    before, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())  # noqa: PTH208 - descriptors
    with pytest.raises(KeyError), Sampler(tmp_path / "s.jsonl", {0: os.getpid()}, hz=1, gpus=False):
        (thread,) = set(threading.enumerate()) - threads
        raise KeyError
    assert not thread.is_alive() and set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert json.loads((tmp_path / "s.jsonl").read_text().splitlines()[0])["kind"] == "cpu"


def test_a_file_that_cannot_be_opened_is_told_not_raised(tmp_path: Path) -> None:
    (tmp_path / "timeline").write_text("a file where the folder should be")
    with Sampler(tmp_path / "timeline" / "s.jsonl", {0: os.getpid()}, gpus=False) as sampler:
        pass
    assert (
        sampler.problem is not None
        and "s.jsonl" in sampler.problem
        and "training continues" in sampler.problem
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_ends_the_sampling_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").symlink_to("/dev/full")
    with Sampler(tmp_path / "s.jsonl", {0: os.getpid()}, hz=100, gpus=False) as sampler:
        pass
    assert sampler.problem is not None and "No space left" in sampler.problem


def test_a_resumed_run_appends_a_section_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    sample_until(path, some, gpus=False, origin_s=time.perf_counter() - 1000)
    with path.open("a") as file:
        file.write('{"t_s": 4')  # killed while writing
    first = read_samples(path)
    both = sample_until(path, lambda s: len(s.t_s) >= len(first.t_s) + 3, ranks={5: os.getpid()}, gpus=False)
    assert both.ranks == (0, 5) and both.num_damaged == 1
    assert both.section.tolist() == [0] * len(first.t_s) + [1] * (len(both.t_s) - len(first.t_s))
    assert np.isnan(both.cpu_percent[both.section == 1, 0]).all()
    assert (np.diff(both.elapsed_s) > 0).all() and not (np.diff(both.t_s) > 0).all()


def test_a_file_without_samples_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with pytest.raises(RunError, match=r"s\.jsonl: cannot be read"):
        read_samples(path)
    path.write_text('{"t_s": 1, "ranks": []}\n')
    with pytest.raises(RunError, match="no head line"):
        read_samples(path)


def test_odd_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(
        '{"kind": "cpu", "hz": "often", "ranks": {"0": 1, "x": 2}, "gpus": 3, "gpu_of_rank": 1}\n'
        '{"t_s": 1, "ranks": [[0, 50, 7], [0, 1], [[], 1, 2], [9, 1, 2], "?"], "gpus": [[0, 1, 2, 3, 4]]}\n'
        '{"t_s": "late"}\nnull\n'
        '{"t_s": 2, "ranks": [[0, null, true]]}\n{"t_s": 3, "ranks": [[0, "much", 1' + 400 * "0" + "]]}\n"
    )
    samples = read_samples(path)
    assert samples.cpu_percent.tolist()[0] == [50] and np.isnan(samples.cpu_percent[1, 0])
    assert samples.rss_bytes[0, 0] == 7 and samples.gpu_percent.shape == (3, 0)
    assert np.isnan(samples.cpu_percent[2, 0]) and np.isnan(samples.rss_bytes[2, 0])


def test_keys_that_are_no_ranks_are_passed_over(tmp_path: Path) -> None:
    keys = {"01": 0, "1": 1, "9" * 5000: 0, "\u0663": 1}
    head = {"kind": "gpu", "hz": 10, "ranks": keys, "gpus": ["a", "b"], "gpu_of_rank": keys}
    (tmp_path / "s.jsonl").write_text(json.dumps(head) + "\n")
    samples = read_samples(tmp_path / "s.jsonl")
    assert samples.ranks == (1,) and samples.gpu_of_rank == {1: 1}
