"""What ranks of the doctor find out: by themselves, and together (ranks as threads)."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speechdp.comm.base import Communicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.doctor import exchange
from speechdp.doctor.facts import data_facts, node_facts
from speechdp.doctor.judge_network import clock_offset
from speechdp.doctor.links import slow_links
from speechdp.doctor.probe import ProbeOptions
from tests.helpers.tiny_data import TinySizes, flip_byte, write_tiny_data


def test_facts_of_a_node_are_json_and_name_what_is_compared() -> None:
    facts = json.loads(json.dumps(node_facts()))
    assert facts["python"] == sys.executable
    assert {"speechdp version", "speechdp code", "torch version"} <= set(facts["versions"])
    assert not any(address.startswith("127.") for a in facts["interfaces"].values() for address in a)


class _Nvml(SimpleNamespace):
    NVMLError = RuntimeError

    def nvmlInit(self) -> None:  # noqa: N802 (NVML's names)
        if self.fails:
            raise RuntimeError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 8

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "570.1"


@pytest.mark.parametrize(("fails", "expected"), [(False, (8, "570.1")), (True, (-1, ""))])
def test_gpus_the_driver_knows(
    monkeypatch: pytest.MonkeyPatch, fails: bool, expected: tuple[int, str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _Nvml(fails=fails))
    gpus = node_facts()["gpus"]
    assert (gpus["nvml_gpus"], gpus["driver"]) == expected


def test_facts_of_data(tmp_path: Path) -> None:
    dataset = write_tiny_data(tmp_path / "data", TinySizes(train=20))
    good = data_facts(dataset.path, verify=True)
    assert good["checksum"] == dataset.checksum
    assert (good["missing"], good["verified"]) == ([], True)
    shard = dataset.shard_paths("train")[0]
    flip_byte(shard, 3)
    assert "error" in data_facts(dataset.path, verify=True)
    shard.unlink()
    assert data_facts(dataset.path, verify=False)["missing"] == [shard.name]
    assert "prepare" in data_facts(tmp_path, verify=False)["error"]


def together(size: int, function: Any) -> list[Any]:
    return run_threads(size, function, timeout_s=240)


def test_a_shared_folder_is_seen_by_all_and_left_clean(tmp_path: Path) -> None:
    facts = together(3, lambda comm: exchange.folder_facts(comm, tmp_path, ".x-", "secret"))
    assert [(f["error"], f["unseen"]) for f in facts] == [("", [])] * 3
    assert all(f["free_bytes"] > 0 for f in facts)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_one_host_alone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_VISIBLE_WITHIN_S", 0.2)
    folders = [tmp_path / "a", tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    facts = together(3, lambda comm: exchange.folder_facts(comm, folders[comm.rank], ".x-", "t"))
    assert [f["unseen"] for f in facts] == [[2], [], [0]]


def test_a_folder_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_VISIBLE_WITHIN_S", 0.2)
    folders = [tmp_path, tmp_path / "none"]
    facts = together(2, lambda comm: exchange.folder_facts(comm, folders[comm.rank], ".x-", "t"))
    assert [f["error"] for f in facts] == ["", "No such file or directory"]
    assert facts[0]["unseen"] == []  # it could not be written, which is told already
    assert facts[1]["unseen"] == [0]


def test_a_file_of_somebody_else_stays(tmp_path: Path) -> None:
    theirs = tmp_path / ".x-0"
    theirs.write_text("theirs")
    (facts,) = together(1, lambda comm: exchange.folder_facts(comm, tmp_path, ".x-", "t"))
    assert facts["error"] == "File exists" and theirs.read_text() == "theirs"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_refuses_to_write_and_to_remove_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    (facts,) = together(1, lambda comm: exchange.folder_facts(comm, tmp_path, ".x-", "t"))
    assert facts["error"] == os.strerror(number)


def test_a_path_below_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (facts,) = together(1, lambda comm: exchange.folder_facts(comm, tmp_path / "file", ".x-", "t"))
    assert facts["error"] == "Not a directory"


def test_clocks_of_one_machine_agree() -> None:
    first, second = together(2, exchange.clock_facts)
    assert abs(clock_offset(first, second)) < 0.5


def test_speed_is_the_same_on_all_ranks() -> None:
    facts = together(2, lambda comm: exchange.speed_facts(comm, 1 << 20, "x"))
    assert facts[0] == facts[1]
    assert facts[0]["bytes"] == 1 << 20
    assert facts[0]["bus_bytes_s"] > 0


def test_pairs_are_measured_alone_and_known_to_all() -> None:
    def measure(comm: Communicator) -> dict[tuple[int, int], float]:
        rates = {(0, 2): 1e15}
        for pair in exchange.neighbours(["a", "a", "b", "c"]):
            exchange.pair_facts(comm, pair, 1 << 20, rates)
        return rates

    rates = together(4, measure)
    assert rates[1:] == rates[:-1]
    assert list(rates[0]) == [(0, 2), (2, 3), (3, 0)]
    assert rates[0][0, 2] == 1e15  # the best so far stays
    assert exchange.slow_pairs(rates[0]) == [(2, 3), (3, 0)]


def test_neighbours() -> None:
    assert exchange.neighbours(["a", "a"]) == []
    assert exchange.neighbours(["a", "b", "a"]) == [(0, 1)]
    assert exchange.neighbours(["a", "b", "c", "d"]) == [(0, 1), (1, 2), (2, 3), (3, 0)]


def test_slow_links_are_those_below_half_of_a_good_one() -> None:
    assert slow_links({(0, 1): 1.0}) == ({}, 0.0)
    slow, good = slow_links({("a", "b"): 49.0, ("b", "c"): 60.0, ("c", "a"): 100.0})
    assert (slow, good) == ({("a", "b"): 49.0}, 100.0)


def test_options_of_the_probe_survive_the_command_line() -> None:
    options = ProbeOptions("/d 'x'", "", "t", True, 5, 1.5, ("a", "b"))
    assert ProbeOptions.from_json(options.to_json()) == options
