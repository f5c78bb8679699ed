"""Every finding of the doctor: facts that make it, and the remedy that stands beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from speechdp.doctor.finding import Finding
from speechdp.doctor.judge_network import clock_offset, judge_clocks, judge_interfaces, judge_speed
from speechdp.doctor.judge_nodes import judge_nodes
from speechdp.doctor.judge_paths import judge_data, judge_folder
from speechdp.doctor.seen import Rank, label_ranks

GIB = 1 << 30
NODE: dict[str, Any] = {
    "host": "n1",
    "machine": "",
    "python": "/v/bin/python",
    "versions": {"speechdp version": "0.1.0", "torch version": "2.13.0", "speechdp code": "abc"},
    "cores": 4,
    "threads": "2",
    "gpus": {"torch_cuda": "", "devices": [], "nvml_gpus": -1, "driver": ""},
    "interfaces": {"eth0": ["10.0.0.1"]},
    "infiniband": False,
    "memlock_bytes": 8 << 20,
    "open_files": 65536,
    "file_locking": "",
}
CONNECT: dict[str, Any] = {
    "backend": "mpi",
    "rank": 0,
    "size": 2,
    "launcher": [0, 2],
    "mpi": [0, 2],
    "mpi_threads": 3,
    "mpi_threads_needed": 3,
    "mpi_library": "Open MPI v4.1.8",
}
DATA = {"checksum": "c" * 64, "shards": 3, "missing": [], "verified": False}
FOLDER = {"error": "", "remedy": "", "unseen": [], "free_bytes": 50 * GIB}
HOROVOD = {
    "rank": 0,
    "size": 2,
    "controller": "gloo",
    "latency_s": 1e-3,
    "bus_bytes_s": 1e9,
    "bytes": 1 << 24,
}
GPUS = {"torch_cuda": "12.8", "devices": [{"name": "H200"}] * 4, "nvml_gpus": 4, "driver": "570.1"}


def two_ranks() -> list[Rank]:
    """Return two good hosts with a rank each."""
    ranks = []
    for index, host in enumerate(("n1", "n2")):
        facts = copy.deepcopy(
            {"node": NODE, "connect": CONNECT, "data": DATA, "folder": FOLDER, "horovod": HOROVOD}
        )
        facts["node"].update(host=host, interfaces={"eth0": [f"10.0.0.{index + 1}"]})
        facts["connect"].update(rank=index, launcher=[index, 2], mpi=[index, 2])
        facts["horovod"].update(rank=index)
        ranks.append(Rank(index, host, facts))
    return ranks


def all_findings(ranks: list[Rank]) -> list[Finding]:
    return [
        *judge_nodes(ranks, {}),
        *judge_data(ranks, "DATA"),
        *judge_folder(ranks, "/runs"),
        *judge_interfaces(ranks, None, job_hangs=False),
    ]


def test_two_good_hosts_are_well() -> None:
    assert [finding for finding in all_findings(two_ranks()) if finding.status != "ok"] == []


def test_one_rank_is_not_called_ranks() -> None:
    [rank] = two_ranks()[:1]
    rank.facts["connect"].update(size=1, launcher=[0, 1], mpi=[0, 1])
    rank.facts["horovod"].update(size=1)
    found = [finding.found for finding in judge_nodes([rank], {}) if finding.check == "world"]
    assert found == ["launcher and back-end agree on 1 rank"]


def node(**changes: Any) -> Callable[[list[Rank]], None]:
    """Return what changes the second host."""
    return lambda ranks: ranks[1].facts["node"].update(changes)


def version(name: str) -> Callable[[list[Rank]], None]:
    return lambda ranks: ranks[1].facts["node"]["versions"].update({name: "other"})


def part(name: str, **changes: Any) -> Callable[[list[Rank]], None]:
    return lambda ranks: ranks[1].facts[name].update(changes)


def gpus(*hosts: dict[str, Any]) -> Callable[[list[Rank]], None]:
    def change(ranks: list[Rank]) -> None:
        for rank, theirs in zip(ranks, hosts, strict=True):
            rank.facts["node"]["gpus"] = theirs

    return change


def same_address(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.facts["node"]["interfaces"]["docker0"] = ["172.17.0.1"]


def one_name(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.facts["node"]["host"] = "localhost"


def one_machine(ranks: list[Rank]) -> None:
    one_name(ranks)
    for rank in ranks:
        rank.facts["node"]["machine"] = "b7 uts:[1] net:[2]"


def one_name_of_two_machines(ranks: list[Rank]) -> None:
    one_machine(ranks)
    ranks[-1].facts["node"]["machine"] = "b7 uts:[3] net:[4]"


NO_GPU = {**GPUS, "devices": []}
CASES = [
    (version("speechdp version"), "speechdp version", "fail", "install the same version"),
    (version("torch version"), "torch version", "fail", "install the same version"),
    (version("speechdp code"), "speechdp code", "fail", "same state"),
    (version("horovod version"), "versions", "ok", ""),
    (part("connect", mpi_library="Open MPI v5.0.11"), "MPI library", "fail", "install the same version"),
    (part("connect", rank=0, size=1, mpi=[0, 1]), "world", "fail", "srun with --mpi=pmix"),
    (part("connect", mpi=[0, 1]), "world", "fail", "mpirun of the MPI"),
    (part("horovod", rank=0, size=1), "world", "fail", "rebuild Horovod"),
    (part("connect", mpi_threads=1), "MPI threads", "fail", "MPI_THREAD_MULTIPLE"),
    (part("horovod", skipped="Horovod is not installed"), "Horovod", "warn", "--backend mpi"),
    (one_name, "host names", "fail", "its own name"),
    (one_machine, "host names", "warn", "name it once in the hostfile"),
    (one_name_of_two_machines, "host names", "fail", "its own name"),
    (node(cores=1), "cores", "warn", "OMP_NUM_THREADS"),
    (node(threads="1"), "cores", "warn", "one value for all"),
    (gpus(GPUS, {**NO_GPU, "nvml_gpus": 0}), "GPUs", "fail", "leave out hosts without GPUs"),
    (gpus(NO_GPU, NO_GPU), "GPUs", "warn", "a torch with CUDA"),
    (gpus({**NO_GPU, "nvml_gpus": 0}, {**NO_GPU, "nvml_gpus": -1}), "GPUs", "warn", "nvidia-smi"),
    (gpus({**GPUS, "torch_cuda": "", "devices": []}, NODE["gpus"]), "GPUs", "warn", "a torch with CUDA"),
    (gpus(GPUS, {**GPUS, "driver": "535.0"}), "GPU driver", "warn", "one driver"),
    (gpus(GPUS, {**GPUS, "devices": [{"name": "V100"}] * 4}), "GPU kind", "warn", "with the same GPUs"),
    (node(open_files=256), "limits", "warn", "nofile"),
    (node(infiniband=True), "limits", "warn", "memlock"),
    (node(file_locking="off"), "file locking", "warn", "unset HDF5_USE_FILE_LOCKING"),
    (node(file_locking="FALSE"), "file locking", "warn", "unset HDF5_USE_FILE_LOCKING"),
    (lambda ranks: ranks[1].facts.update(data={"error": "no data.json"}), "data", "fail", "all hosts see"),
    (part("data", missing=["train-0001.h5"]), "data", "fail", "copy DATA"),
    (part("data", checksum="d" * 64), "data", "fail", "prepare the data once"),
    (part("folder", error="Permission denied"), "run folder", "fail", "you may write to"),
    (
        part("folder", error="Disk quota exceeded", remedy="free some space"),
        "run folder",
        "fail",
        "free some",
    ),
    (part("folder", unseen=[0]), "run folder", "fail", "not a local disk"),
    (lambda ranks: ranks[0].facts["folder"].update(unseen=[1]), "run folder", "fail", "not a local disk"),
    (part("folder", free_bytes=GIB // 2), "disk", "warn", "free some space"),
    (part("folder", free_bytes=1 << 20), "disk", "fail", "free some space"),
    (same_address, "interfaces", "warn", "--interface eth0"),
]


@pytest.mark.parametrize(("change", "check", "status", "remedy"), CASES)
def test_a_wrong_thing_has_its_line_and_remedy(
    change: Callable[[list[Rank]], None], check: str, status: str, remedy: str
) -> None:
    ranks = two_ranks()
    change(ranks)
    found = [finding for finding in all_findings(ranks) if finding.check == check]
    assert [finding.status for finding in found] == [status], found
    assert remedy in found[0].remedy
    bad = [finding for finding in all_findings(ranks) if finding.status != "ok"]
    assert all(finding.check == check for finding in bad), bad


def test_the_odd_host_is_named() -> None:
    ranks = two_ranks()
    third = copy.deepcopy(ranks[1].facts)
    third["node"].update(host="n3")
    ranks.append(Rank(2, "n3", third))
    version("torch version")(ranks)
    (finding,) = [f for f in judge_nodes(ranks, {}) if f.check == "torch version"]
    assert finding.hosts == ("n2",)
    assert finding.found == "2.13.0 (n1, n3), other (n2)"


def test_more_ranks_than_gpus() -> None:
    ranks = two_ranks()
    one = {**GPUS, "devices": GPUS["devices"][:1]}
    gpus(one, one)(ranks)
    ranks += [Rank(2, "n2", ranks[1].facts)]
    found = [f for f in judge_nodes(ranks, {}) if f.check == "GPUs"]
    assert [(f.status, f.hosts, f.found) for f in found] == [("warn", ("n2",), "more ranks than GPUs")]


def test_slots_count_as_ranks_where_the_probe_has_fewer() -> None:
    ranks = two_ranks()
    one = {**GPUS, "devices": GPUS["devices"][:1]}
    gpus(one, one)(ranks)
    for rank in ranks:
        rank.facts["node"].update(cores=2, threads="2")
    found = {f.check: f for f in judge_nodes(ranks, {"n1": 1, "n2": 8}) if f.check in ("cores", "GPUs")}
    assert [(f.status, f.hosts) for f in found.values()] == [("warn", ("n2",))] * 2
    assert found["cores"].found == "8 ranks of 2 threads on 2 cores (n2)"


def test_gpus_on_all_are_told() -> None:
    ranks = two_ranks()
    gpus(GPUS, GPUS)(ranks)
    assert [f.found for f in judge_nodes(ranks, {}) if f.check == "GPUs"] == ["4 x H200 a host"]


def test_shared_addresses_are_red_where_the_job_hung() -> None:
    ranks = two_ranks()
    same_address(ranks)
    (finding,) = judge_interfaces(ranks, None, job_hangs=True)
    assert (finding.status, finding.hosts) == ("fail", ("n1", "n2"))
    (finding,) = judge_interfaces(ranks, "eth0", job_hangs=False)
    assert finding.status == "ok"


def test_a_missing_interface_is_red() -> None:
    (finding,) = judge_interfaces(two_ranks(), "ib0", job_hangs=False)
    assert (finding.status, finding.hosts) == ("fail", ("n1", "n2"))
    assert "eth0" in finding.remedy


def clock(offset_s: float, *, late_s: float = 0.0) -> dict[str, list[float]]:
    """Return readings around three barriers that last 1 ms, of a rank that comes `late_s` to the second."""
    begins = [0.0, 10.0 + late_s, 20.0]
    ends = [0.001, 10.001 + 0.5, 20.001]
    return {"before": [b + offset_s for b in begins], "after": [e + offset_s for e in ends]}


def test_clock_offset_is_bounded_by_the_best_round() -> None:
    assert clock_offset(clock(0.0), clock(2.5)) == pytest.approx(2.5, abs=1e-3)
    assert clock_offset(clock(0.0), clock(-0.2, late_s=0.4)) == pytest.approx(-0.2, abs=1e-3)


@pytest.mark.parametrize(("offset_s", "status"), [(0.9, "ok"), (-1.1, "warn")])
def test_clocks(offset_s: float, status: str) -> None:
    ranks = [Rank(0, "n1", {"clock": clock(0.0)}), Rank(1, "n2", {"clock": clock(offset_s)})]
    (finding,) = judge_clocks(ranks)
    assert finding.status == status
    if status == "warn":
        assert finding.hosts == ("n2",)
        assert "chrony" in finding.remedy


def with_speeds(*rates_mb: float) -> list[Rank]:
    """Return as many hosts as there are rates, of the pairs 0-1, 1-2, ..., and last-first."""
    n = len(rates_mb)
    facts: list[dict[str, Any]] = [{} for _ in range(n)]
    for i, rate in enumerate(rates_mb):
        pair = (i, i + 1) if i < n - 1 else (i, 0)
        for rank in pair:
            facts[rank][f"pair {pair[0]} {pair[1]}"] = {"bus_bytes_s": rate * 1e6, "latency_s": 1e-4}
    return [Rank(i, f"n{i + 1}", theirs) for i, theirs in enumerate(facts)]


@pytest.mark.parametrize("rates", [(12, 12, 110), (12, 13, 110, 108), (110, 12, 12, 110, 115)])
def test_a_slow_link_names_its_host(rates: tuple[float, ...]) -> None:
    (finding,) = judge_speed(with_speeds(*rates))
    slow = "n3" if len(rates) == 5 else "n2"
    assert (finding.status, finding.hosts) == ("fail", (slow,))
    assert "ethtool" in finding.remedy


def test_links_of_one_speed_are_well_and_crawling_ones_warned_of() -> None:
    assert [f.status for f in judge_speed(with_speeds(110, 100, 90))] == ["ok"]
    (finding,) = judge_speed(with_speeds(12, 12, 12))
    assert finding.status == "warn"
    assert "--interface" in finding.remedy


def test_labels_come_from_the_hostfile_unless_the_launcher_chose() -> None:
    facts = {1: {"node": {"host": "b"}}, 0: {}}
    assert [rank.host for rank in label_ranks(facts, ["x", "y"], trust_place=True)] == ["x", "y"]
    assert [rank.host for rank in label_ranks(facts, ["x", "y"], trust_place=False)] == ["x", "b"]
