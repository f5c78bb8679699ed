"""Carrying a profile out: jobs one after another, what each is given, kept and failed ones."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from speechdp.cli.main import run as speechdp
from speechdp.errors import ConfigError
from speechdp.experiments.jobs import JobStarter, JobStopped
from speechdp.experiments.profile.derived import STEP, job_costs
from speechdp.experiments.profile.jobs import Profiler, ProfileRequest
from speechdp.experiments.profile.plan import ProfilePlan
from speechdp.experiments.profile.record import ProfileRecord, read_profile, read_record
from speechdp.options.batch import BatchOptions
from speechdp.options.model import ModelOptions
from speechdp.options.run import TrainOptions
from speechdp.report.kit.formatting import milliseconds
from speechdp.report.kit.pages import WrittenReport
from tests.helpers.network_disk import remember_as_missing
from tests.helpers.profiles import MadeUpProfile, write_job, write_profile
from tests.helpers.tiny_data import TinySizes, write_tiny_data

PLAN = ProfilePlan((1, 2), only=("weak", "decoder"), strong=True, steps=8)
OPTIONS = TrainOptions(ModelOptions(), BatchOptions(batch_size=32), task="synthesis", backend="mpi")


class MadeUpStarter:
    """Writes made-up records where a real one would start ranks.

    Attributes:
        started: processes and words of every job.
        fails: what goes wrong, by job.
        silent: jobs that end well and leave nothing.
    """

    def __init__(self, fails: dict[str, str] | None = None, silent: Sequence[str] = ()) -> None:
        self.started: list[tuple[int, list[str]]] = []
        self.fails, self.silent = fails or {}, silent

    def run(self, num_ranks: int, arguments: Sequence[str], log: Path, *, folder: Path) -> str | None:
        self.started.append((num_ranks, list(arguments)))
        (job,) = [word.removeprefix("--job=") for word in arguments if word.startswith("--job=")]
        assert log.name == f"{job}.log"
        out = Path(arguments[2])
        entry = next(each for each in read_record(out).jobs if each.name == job)
        if job in self.fails:
            (out / entry.folder).mkdir()
            return self.fails[job]
        if job not in self.silent:
            write_job(out / entry.folder, entry, MadeUpProfile(steps=entry.steps))
        return None


def carry_out(out: Path, starter: MadeUpStarter, **settings: Any) -> tuple[ProfileRecord, list[str]]:
    base = write_profile(out.parent / "made-up", MadeUpProfile(ranks=(1,))) if not settings else None
    made_up = read_record(base or out.parent / "made-up").settings
    request = ProfileRequest(Path("DATA"), out, PLAN.jobs(OPTIONS), dataclasses.replace(made_up, **settings))
    said: list[str] = []
    profiler = Profiler(request, starter, said.append)  # type: ignore[arg-type]
    return profiler.run(), said


def test_every_job_is_started_over_its_ranks_with_its_options(tmp_path: Path) -> None:
    starter = MadeUpStarter()
    record, said = carry_out(tmp_path / "out", starter)
    assert [(n, words[3]) for n, words in starter.started] == [
        (1, "--job=weak-1"), (2, "--job=weak-2"), (2, "--job=strong-2"),
        (1, "--job=decoder-1"), (2, "--job=decoder-2"),
    ]  # fmt: skip
    strong = starter.started[2][1]
    for word in ("profile", "--steps=8", "--task=synthesis", "--batch-size=16", "--backend=mpi"):
        assert word in strong
    assert "--strategy=gradient_averaging:overlap=false" in strong
    assert strong[1] == str(Path("DATA").absolute())
    assert {job.state for job in record.jobs} == {"complete"}
    profile = read_profile(tmp_path / "out")
    assert [job.name for job in profile.of_kind("strong")] == ["strong-1", "strong-2"]
    assert profile.of_kind("strong")[0].steps == profile.of_kind("weak")[0].steps
    assert said[0] == "[1/6] weak-1: 1 rank, 8 steps"
    costs = job_costs(profile.of_kind("weak")[0], 3)  # of which the table is made
    assert f"weak-1: {milliseconds(costs[STEP].total_s)} ms per step (decoder 5" in said[1]
    assert said[-1].endswith(" ms per step (decoder alone)")
    assert "[3/6] strong-1: is weak-1" in said


def test_the_same_command_keeps_what_is_done_and_tries_the_rest_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    record, said = carry_out(out, MadeUpStarter({"weak-1": "rank 0: no memory"}, ["decoder-2"]))
    states = {job.name: job.state for job in record.jobs}
    assert states == {
        "weak-1": "failed", "weak-2": "complete", "strong-1": "failed", "strong-2": "complete",
        "decoder-1": "complete", "decoder-2": "failed",
    }  # fmt: skip
    assert "[1/6] weak-1: failed: rank 0: no memory" in said
    assert "rank 0 has left no record in" in record.jobs[5].message
    again = MadeUpStarter()
    record, _ = carry_out(out, again, device="CPU")
    assert [words[3] for _, words in again.started] == ["--job=weak-1", "--job=decoder-2"]
    assert {job.state for job in record.jobs} == {"complete"}


def test_jobs_that_have_lost_their_files_are_measured_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    carry_out(out, MadeUpStarter())
    shutil.rmtree(out / "weak-1")
    (out / "decoder-2" / "rank-0001.jsonl").write_text("{")
    again = MadeUpStarter()
    record, said = carry_out(out, again, device="CPU")
    assert [words[3] for _, words in again.started] == ["--job=weak-1", "--job=decoder-2"]
    assert {job.state for job in record.jobs} == {"complete"}
    assert any(line.startswith(f"weak-1: was finished, but {out / 'weak-1'}") for line in said)
    assert len(read_profile(out).of_kind("strong")) == 2


def test_lost_jobs_that_are_not_asked_for_are_left_out(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_profile(out, MadeUpProfile(ranks=(1, 2)))
    request = ProfileRequest(Path("DATA"), out, PLAN.jobs(OPTIONS), read_record(out).settings)
    shutil.rmtree(out / "encoder-2")
    record = Profiler(request, MadeUpStarter(), print).run()  # type: ignore[arg-type]
    assert "encoder-1" in [job.name for job in record.jobs]
    assert "encoder-2" not in [job.name for job in record.jobs]


def test_a_record_that_cannot_be_read_fails_its_job_alone(tmp_path: Path) -> None:
    class Torn(MadeUpStarter):
        def run(self, num_ranks: int, arguments: Sequence[str], log: Path, *, folder: Path) -> str | None:
            message = super().run(num_ranks, arguments, log, folder=folder)
            if "--job=weak-2" in arguments:
                (Path(arguments[2]) / "weak-2" / "rank-0001.jsonl").write_text("{")
            return message

    record, said = carry_out(tmp_path / "out", Torn())
    assert [job.name for job in record.jobs if job.state == "failed"] == ["weak-2"]
    assert any("weak-2: failed: " in line and "1 line damaged" in line for line in said)


@pytest.mark.parametrize(
    ("options", "ranks", "words"),
    [
        ((), 1, "train DATA"),
        ((), 2, "launch -np 2 -- train DATA"),
        (("--tag-output",), 1, "train DATA"),
        (("--hostfile", "F"), 1, "launch --hostfile F -np 1 -- train DATA"),
        (("--hostfile=F",), 1, "launch --hostfile=F -np 1 -- train DATA"),
    ],
)
def test_with_a_hostfile_one_rank_goes_to_its_hosts_too(
    options: tuple[str, ...], ranks: int, words: str, tmp_path: Path
) -> None:
    log = tmp_path / "logs" / "log"
    assert JobStarter(("true",), {}, options).run(ranks, ["train", "DATA"], log) is None
    assert log.read_text() == f"$ true {words}\n"


def test_what_a_job_has_written_on_another_host_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder was looked for before the job; a network disk remembers that there was none."""
    written = tmp_path / "runs" / "weak-2"
    written.mkdir(parents=True)
    (written / "rank-0000.jsonl").touch()
    remember_as_missing(monkeypatch, [written.parent, written, written / "rank-0000.jsonl"])
    assert not written.exists()
    starter = JobStarter(("true",), {}, ("--hostfile", "F"))
    assert starter.run(2, ["train", "DATA"], tmp_path / "any.log", folder=written) is None
    assert (written / "rank-0000.jsonl").is_file()


def test_another_profile_in_the_folder_is_refused(tmp_path: Path) -> None:
    carry_out(tmp_path / "out", MadeUpStarter())
    with pytest.raises(ConfigError, match=r"was started with other options \(decoder was fast, is loop\)"):
        carry_out(tmp_path / "out", MadeUpStarter(), decoder="loop")
    with pytest.raises(ConfigError, match=r"was started with other options \(--steps was 8, is 9\); choose"):
        carry_out(tmp_path / "out", MadeUpStarter(), steps=9)


def test_a_stop_leaves_what_is_done(tmp_path: Path) -> None:
    class Stopping(MadeUpStarter):
        def run(self, num_ranks: int, arguments: Sequence[str], log: Path, *, folder: Path) -> str | None:
            if "--job=decoder-1" in arguments:
                raise JobStopped
            return super().run(num_ranks, arguments, log, folder=folder)

    with pytest.raises(JobStopped):
        carry_out(tmp_path / "out", Stopping())
    states = [job.state for job in read_record(tmp_path / "out").jobs]
    assert states == ["complete"] * 4 + ["pending"] * 2


# --- the command line -----------------------------------------------------------------------------


def test_the_command_ends_with_the_page_and_says_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    starter = MadeUpStarter({"output-2": "rank 1: no memory"})
    monkeypatch.setattr(JobStarter, "run", lambda self, *job, folder: starter.run(*job, folder=folder))
    page = tmp_path / "page.html"
    written = WrittenReport(page, page, None, "", ("Encoder scales.",))
    monkeypatch.setattr("speechdp.report.profile.page.write_profile_page", lambda out: written)
    data = write_tiny_data(tmp_path / "data", TinySizes(train=4, dev=2, test=2, shards=1)).path
    words = ["profile", str(data), str(tmp_path / "out"), "--only", "weak,output", "--steps", "5"]
    assert speechdp([*words, "--backend", "mpi"]) == 1
    printed = capsys.readouterr()
    assert "Encoder scales." in printed.out and str(page) in printed.out
    assert printed.err.startswith("speechdp: 1 of 4 jobs failed") and printed.err.count("\n") == 1
    starter.fails.clear()
    assert speechdp([*words, "--backend", "mpi"]) == 0
    assert [each[1][3] for each in starter.started[4:]] == ["--job=output-2"]
    assert speechdp([*words, "--backend", "mpi", "--seed", "7"]) == 1
    assert (
        "was started with other options (seed was 1, is 7); choose another folder" in capsys.readouterr().err
    )
    assert speechdp([*words, "--backend", "mpi", "--device", "cpu"]) == 1
    assert "was started with other options (device was " in capsys.readouterr().err
    assert speechdp([*words, "--backend", "mpi", "--seed", "7", "--overwrite"]) == 0
    assert len(starter.started) == 9


def test_a_stop_has_the_exit_code_of_what_can_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> str | None:
        raise JobStopped

    monkeypatch.setattr(JobStarter, "run", stopped)
    data = write_tiny_data(tmp_path / "data", TinySizes(train=4, dev=2, test=2, shards=1)).path
    monkeypatch.chdir(tmp_path)
    assert speechdp(["profile", str(data), "--only", "strong", "--ranks", "1", "--steps", "5"]) == 75
    printed = capsys.readouterr().out
    assert printed.startswith(f"profile in {tmp_path / 'profile'}\n") and "stopped as requested" in printed
    assert "there is nothing to scale" in printed


# --- the command line, before any job starts ------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--task", "synthesis"],
            "holds features, and --task synthesis is trained on spectrograms; add --task acoustic, or "
            "prepare the recordings with --task synthesis",
        ),
        (["--only", "decoder"], "a model of --task acoustic has no decoder"),
        (["--ranks", "1,x"], "--ranks"),
        (["--train-split", "none"], "has no split 'none'"),
        (["--launch-args", '"'], "cannot be split into words"),
        (["--feeders", "1", "--hostfile", "hosts"], "on one machine only"),
        (["--overwrite"], "--overwrite deletes only folders that hold a profile"),
    ],
)
def test_what_is_refused(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("node1 slots=2\n", encoding="utf-8")
    data = write_tiny_data(tmp_path / "data", TinySizes(train=4, dev=2, test=2, shards=1)).path
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").touch()
    assert speechdp(["profile", str(data), str(tmp_path / "out"), *words]) == 1
    err = capsys.readouterr().err
    assert message in err and err.startswith("speechdp: ") and err.count("\n") == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_a_job_of_its_own_is_no_job_of_a_launcher(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_tiny_data(tmp_path / "data", TinySizes(train=4, dev=2, test=2, shards=1)).path
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert speechdp(["profile", str(data), str(tmp_path / "out")]) == 1
    assert "profile starts its own jobs" in capsys.readouterr().err
