"""`speechdp doctor` on this machine: by mpirun and horovodrun, with good and bad data and folders."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.jobs import SPEECHDP
from tests.helpers.mpi import BIN, Ended, run_job
from tests.helpers.tiny_data import TinySizes, write_tiny_data

WELL = ("job", "versions", "world", "MPI threads", "GPUs", "data", "run folder", "interfaces", "allreduce")


def doctor(*options: str | Path) -> Ended:
    return run_job([*SPEECHDP, "doctor", *map(str, options)])


def findings(report: Path) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in json.loads(report.read_text())["findings"]}


def test_two_ranks_on_this_machine(tmp_path: Path) -> None:
    dataset = write_tiny_data(tmp_path / "data", TinySizes(train=20))
    report = tmp_path / "doctor.json"
    options = ("--data", dataset.path, "--run", tmp_path / "run", "--bandwidth-mib", "1", "--json", report)
    ended = doctor("-np", "2", *options)
    assert ended.exit_code == 0, ended.output
    found = findings(report)
    if torch.version.cuda and not torch.cuda.is_available():  # such a torch without a GPU is to be noticed
        assert found.pop("GPUs")["status"] == "warn"
    assert {found[check]["status"] for check in WELL if check in found} == {"ok"}, ended.output
    assert "all 2 ranks" in found["allreduce"]["found"]
    ranks = json.loads(report.read_text())["ranks"]
    assert ranks["1"]["connect"]["mpi"] == [1, 2]
    assert ranks["1"]["node"]["python"] == str(Path(sys.executable).absolute())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "doctor.json"]


def test_bad_data_and_folder_are_red(tmp_path: Path) -> None:
    ended = doctor("--data", tmp_path / "no data", "--run", "/proc/no/run")
    assert ended.exit_code == 1, ended.output
    lines = {line.split()[1]: line for line in ended.stdout.splitlines() if line.startswith("fail")}
    assert {"data", "run"} <= set(lines), ended.output
    assert "remedy: give a path all hosts see" in lines["data"]
    assert "/proc cannot be written: " in lines["run"]


@pytest.mark.skipif(
    not (BIN / "horovodrun").exists(), reason="Horovod is not installed; launch/build_horovod"
)
def test_by_horovodrun_over_gloo(tmp_path: Path) -> None:
    options = ("--launcher", "horovodrun", "--controller", "gloo", "--bandwidth-mib", "1", "--run", tmp_path)
    ended = doctor("-np", "2", *options)
    assert ended.exit_code == 0, ended.output
    assert "world                launcher and back-end agree on 2 ranks" in ended.stdout


def test_a_hostfile_that_cannot_be_read_is_a_red_line(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("n1 slots=none\n")
    ended = doctor("--hostfile", tmp_path / "hosts")
    assert ended.exit_code == 1
    assert ended.stdout.startswith(f"fail  hosts                {tmp_path / 'hosts'}:1: 'slots=none'"), (
        ended.output
    )
    assert ended.stderr == ""
