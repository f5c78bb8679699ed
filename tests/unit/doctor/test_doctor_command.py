"""speechdp doctor: which hosts it examines, and the options it refuses; nothing is started."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from speechdp.cli import doctor
from speechdp.cli.doctor import DoctorCommand
from speechdp.cli.main import run
from speechdp.doctor.examine import DoctorRequest, Examination


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[DoctorRequest]:
    """Return what would be examined."""
    seen: list[DoctorRequest] = []

    def examine(request: DoctorRequest, _tell: object) -> Examination:
        seen.append(request)
        return Examination([])

    monkeypatch.setattr(doctor, "examine", examine)
    return seen


def test_an_allocation_that_cannot_be_read_is_passed_over_for_a_hostfile(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    requests: list[DoctorRequest],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2")
    assert DoctorCommand().run() == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "SLURM_JOB_NODELIST" in said and "--hostfile" in said
    assert requests == []
    hostfile = tmp_path / "hosts"
    assert DoctorCommand(hostfile=hostfile).run() == 1
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("hostfiles/") == 1 and "--hostfile" not in said  # one remedy
    hostfile.write_text("n1 slots=4\nn2 slots=4\n")
    assert DoctorCommand(hostfile=hostfile, num_ranks=3).run() == 0
    assert [(host.name, host.slots) for host in requests[0].hosts] == [("n1", 3), ("n2", 3)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--controller", "gloo"], "--controller gloo belongs to --launcher horovodrun"),
        (["--verify"], "--verify: there is no data to verify; give --data DATA"),
        (["--mpi-args", "a 'b"], '--mpi-args "a \'b" cannot be split into words'),
    ],
)
def test_options_that_cannot_be(
    options: list[str], said: str, requests: list[DoctorRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", *options]) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert requests == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--json", "HERE/nowhere/doctor.json"],
            "HERE/nowhere: no such folder; give a name in a folder that",
        ),
        (["--json", "HERE"], "HERE: is a folder; give the name of a file"),
        (["--run", "HERE/file"], "HERE/file: is a file; give the name of a folder"),
        (["--run", "HERE/file/run"], "HERE/file: is a file; give the name of a folder"),
        (
            ["--run", "HERE/link"],
            "HERE/link: is a symbolic link to nowhere, where there is no folder; make one",
        ),
    ],
)
def test_files_that_cannot_be_are_refused_before_anything_is_started(
    options: list[str],
    said: str,
    tmp_path: Path,
    requests: list[DoctorRequest],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    assert run(["doctor", *(word.replace("HERE", str(tmp_path)) for word in options)]) == 1
    error = capsys.readouterr().err
    assert said.replace("HERE", str(tmp_path)) in error and error.count("\n") == 1
    assert requests == []


def test_findings_that_the_disk_does_not_take_are_shown_all_the_same(
    tmp_path: Path,
    requests: list[DoctorRequest],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(_path: Path, _text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(doctor, "write_text_atomically", refuse)
    assert run(["doctor", "--json", str(tmp_path / "doctor.json")]) == 1
    assert len(requests) == 1
    said = (
        f"speechdp: {tmp_path / 'doctor.json'}: cannot be written (No space left on device); free some space"
    )
    assert said in capsys.readouterr().err


def test_a_run_is_looked_for_in_the_nearest_folder_there_is(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert doctor._folder_of(tmp_path / "runs") == tmp_path / "runs"
    assert doctor._folder_of(tmp_path / "runs" / "a" / "b") == tmp_path / "runs"
