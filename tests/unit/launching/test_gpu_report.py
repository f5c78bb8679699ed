"""What `make test-gpu` runs, and the report of it; the parts themselves need GPUs."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from launch import gpu_report
from launch.gpu_report import TAIL_LINES, Part, parts, run
from speechdp.cli.support.command_line import check_forwarded
from speechdp.comm.sums import REDUCIBLE
from speechdp.parallel.registry import parse_strategy
from tests.helpers.mpi import run_job
from tests.helpers.processes import is_running
from tests.helpers.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device")
def test_without_a_gpu_it_says_so_in_a_line(tmp_path: Path) -> None:
    words = [sys.executable, "launch/gpu_report.py", "--report", str(tmp_path / "report.json")]
    ended = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "test-gpu: torch sees no GPU here; run it on a machine with NVIDIA GPUs\n"
    assert list(tmp_path.iterdir()) == []


def test_two_ranks_share_a_gpu_by_mpi_and_have_one_each_with_every_back_end(tmp_path: Path) -> None:
    for num_gpus in (1, 2, 8):
        pairs = [part for part in parts(num_gpus, tmp_path) if part.name.startswith("two ranks")]
        found = {(part.environment["CUDA_VISIBLE_DEVICES"], _option(part, "--backend")) for part in pairs}
        expected = {("0", "mpi")}
        if num_gpus > 1:
            expected |= {("0,1", "mpi"), ("0,1", "torch"), ("0,1", "horovod")}
        assert found == expected
        shared = {
            part.environment.get("SPEECHDP_RANKS_PER_GPU") for part in pairs if "on 1 GPU," in part.name
        }
        assert shared == {"2"}
    names = [part.name for part in parts(2, tmp_path)]
    assert len(set(names)) == len(names)


def test_every_back_end_sums_what_it_is_given(tmp_path: Path) -> None:
    """A part whose back-end refuses the strategy would fail on every machine."""
    pairs = [part for part in parts(2, tmp_path) if part.name.startswith("two ranks")]
    asked = {(_option(part, "--backend"), _option(part, "--strategy")) for part in pairs}
    needed = {"fp16": torch.float16, "bf16": torch.bfloat16}
    for backend, text in asked:
        dtype = needed.get(getattr(parse_strategy(text), "compression", "none"), torch.float32)
        assert dtype in REDUCIBLE[backend], f"{backend} cannot sum what {text} exchanges"
    in_half = {backend for backend, text in asked if "compression=fp16" in text}
    quantised = {backend for backend, text in asked if text.startswith("delayed") and "=int8" in text}
    in_two_levels = {backend for backend, text in asked if "between_nodes=" in text}
    assert in_half == {"torch", "horovod"} and quantised == in_two_levels == {"mpi", "torch", "horovod"}


def test_of_the_gpus_that_a_scheduler_has_assigned_the_first_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-5, 7,2")
    environments = [part.environment for part in parts(3, tmp_path)]
    chosen = {e["CUDA_VISIBLE_DEVICES"] for e in environments if "CUDA_VISIBLE_DEVICES" in e}
    assert chosen == {"GPU-5", "GPU-5,7"}


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "import sys; print(2); print('UserWarning: old driver', file=sys.stderr)",
            (2, "UserWarning: old driver"),
        ),
        ("print('no number')", (0, "no number")),
        ("raise SystemExit('no torch')", (0, "no torch")),
    ],
)
def test_gpus_are_counted_whatever_torch_says_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: tuple[int, str]
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(gpu_report, "PYTHON", str(program))
    assert gpu_report.count_gpus() == expected


def _option(part: Part, name: str) -> str:
    return part.command[list(part.command).index(name) + 1]


def test_its_commands_are_ones_that_there_are(tmp_path: Path) -> None:
    """Options are read as the command line reads them: a wrong one would be found after an hour of GPUs."""
    for part in parts(2, tmp_path):
        program, *words = part.command
        if program == gpu_report.SPEECHDP:
            check_forwarded(words)
            if "--" in words:
                check_forwarded(words[words.index("--") + 1 :])
        elif words[0] != "-m":
            script = words[0] if program == gpu_report.PYTHON else program
            assert (REPOSITORY / script).is_file(), script
        if program == gpu_report.PYTHON and words[0].startswith("benchmarks/"):
            # As the server of forks has it, which imports torch for all of them.
            known = run_job([sys.executable, words[0], "--help"], env={"CUDA_VISIBLE_DEVICES": ""})
            assert known.exit_code == 0, known.output
            assert all(word in known.stdout for word in words if word.startswith("--"))


@pytest.mark.parametrize(
    ("script", "says", "outcome", "code"),
    [
        ("print('well')", "", "ok", 0),
        ("print('horovod-nccl/wheel')", "-nccl/", "ok", 0),
        ("print('horovod-cpu/wheel')", "-nccl/", "failed", 0),
        ("raise SystemExit(3)", "", "failed", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "", "failed", -11),
    ],
)
def test_what_counts_as_well(script: str, says: str, outcome: str, code: int) -> None:
    result = run(Part("part", [sys.executable, "-c", script], says=says))
    assert (result.outcome, result.exit_code) == (outcome, code)


def test_a_program_that_is_missing_is_named() -> None:
    result = run(Part("part", ["./no-such-program"]))
    assert (result.outcome, result.exit_code) == ("failed", None)
    assert list(result.output) == ["./no-such-program: No such file or directory"]


def test_past_its_limit_a_part_is_ended_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted, wait = tmp_path / "child", gpu_report._wait
    script = (
        "import os, subprocess\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print('begun', flush=True)\n"
        f"open({str(noted)!r} + '.new', 'w').write(str(child.pid))\n"
        f"os.rename({str(noted)!r} + '.new', {str(noted)!r})\nchild.wait()\n"
    )

    def wait_once_begun(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
        wait_until(noted.exists, "the part's child")
        return wait(process, limit_s)

    monkeypatch.setattr(gpu_report, "_wait", wait_once_begun)
    result = run(Part("part", [sys.executable, "-c", script], limit_s=0.1))
    assert (result.outcome, result.exit_code, list(result.output)) == ("past its limit", None, ["begun"])
    wait_until(lambda: not is_running(int(noted.read_text())), "the end of the part's child")


def test_a_part_that_ends_as_it_is_to_be_ended_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    kill = os.killpg

    def kill_too_late(pid: int, number: int) -> None:
        kill(pid, number)
        raise ProcessLookupError

    monkeypatch.setattr(os, "killpg", kill_too_late)
    result = run(Part("part", ["sleep", "600"], limit_s=0.1))
    assert (result.outcome, result.exit_code) == ("past its limit", None)


def test_the_end_of_the_output_and_what_was_measured_are_kept(tmp_path: Path) -> None:
    measured = tmp_path / "timing.json"
    script = f"import sys\nfor n in range(200): print(n)\nopen({str(measured)!r}, 'w').write('7')"
    result = run(Part("part", [sys.executable, "-c", script], files=[measured, tmp_path / "none"]))
    assert "199" in result.output and "0" not in result.output and len(result.output) == TAIL_LINES
    assert result.files == {"timing.json": "7", "none": "cannot be read: No such file or directory"}


def test_the_report_is_whole_after_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    script = (
        "import json, sys; r = json.load(open(sys.argv[1]));"
        "assert not r['complete'] and r['outcomes'] == {'first': 'failed'}"
    )
    listed = [
        Part("first", [sys.executable, "-c", "raise SystemExit(2)"]),
        Part("second", [sys.executable, "-c", script, str(path)]),
    ]
    monkeypatch.setattr(gpu_report, "count_gpus", lambda: (1, ""))
    monkeypatch.setattr(gpu_report, "parts", lambda num_gpus, folder: listed)
    assert gpu_report.main(["--report", str(path)]) == 1
    report = json.loads(path.read_text())
    assert report["complete"] and report["outcomes"] == {"first": "failed", "second": "ok"}
    assert report["versions"]["torch"] == metadata.version("torch") and "nvidia-smi" in report
    assert capsys.readouterr().out.endswith(f"1 of 2 parts went well; send back {path}\n")
    assert gpu_report.main(["--report", str(path), "--only", "third"]) == 1


def test_some_parts_have_the_data_that_they_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, listed = tmp_path / "report.json", parts(1, tmp_path)
    assert [part.name for part in listed if part.prepares] == ["data", "spectrograms"]
    nothing = [dataclasses.replace(part, command=["true"], says="") for part in listed]
    monkeypatch.setattr(gpu_report, "count_gpus", lambda: (1, ""))
    monkeypatch.setattr(gpu_report, "parts", lambda num_gpus, folder: nothing)
    assert gpu_report.main(["--report", str(path), "--only", "acoustic in fp16"]) == 0
    outcomes = json.loads(path.read_text())["outcomes"]
    assert list(outcomes) == ["data", "spectrograms", "acoustic in fp16"]


def test_ctrl_c_ends_the_part_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a session of its own, which the terminal's signal does not reach."""
    wait, started = subprocess.Popen.wait, list[subprocess.Popen[bytes]]()

    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if process not in started:
            started.append(process)
            raise KeyboardInterrupt
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(Part("part", ["sleep", "5000"]))
    assert started[0].returncode == -signal.SIGTERM
