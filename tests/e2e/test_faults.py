"""What goes wrong on two ranks: one line that names file, rank and remedy, all ranks end, nothing is lost."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from speechdp.checkpoint.state import checkpoint_steps
from speechdp.cli.main import run as speechdp
from speechdp.comm.environment import host_name
from speechdp.data.shards.dataset import Dataset
from tests.helpers.begun_run import begin_run, load_last_checkpoint
from tests.helpers.corpora import digit_folder
from tests.helpers.jobs import DEADLINE_S, by_launch, ended_within, our_lines, under_mpirun
from tests.helpers.mpi import Ended
from tests.helpers.tiny_data import TINY_MODEL, TinySizes, flip_byte, truncate, write_tiny_data
from tests.parallel.test_communicator_backends import needs_horovod

OPTIONS = (*TINY_MODEL, "--batch-size", "2", "--epochs", "3", "--backend", "mpi")
ANY_RANK = rf"speechdp: rank [01] on {re.escape(host_name())}: "


@pytest.fixture(scope="module")
def whole_data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("faults") / "data", TinySizes(train=40))


@pytest.fixture
def data(whole_data: Dataset, tmp_path: Path) -> Dataset:
    """A copy to be damaged."""
    shutil.copytree(whole_data.path, tmp_path / "data")
    return Dataset.open(tmp_path / "data")


def resume(data: Dataset, run: Path, *options: str) -> Ended:
    """Go on over two ranks with a run that must fail."""
    return ended_within(DEADLINE_S, under_mpirun(2, "train", data.path, run, *OPTIONS, *options, "--resume"))


def assert_one_line(ended: Ended, pattern: str) -> None:
    assert ended.exit_code == 1, ended.output
    (line,) = our_lines(ended)
    assert re.fullmatch(ANY_RANK + pattern, line), ended.output
    assert "Traceback" not in ended.stderr, ended.output


def assert_whole(run: Path, step: int | None = None) -> None:
    """The last checkpoint loads on all ranks, and nothing says the run is complete."""
    states = load_last_checkpoint(run)
    if step is not None:
        assert states[0].values["counters"]["step"] == step
    assert not (run / "completed.json").exists() and not (run / "model.safetensors").exists()


# --- data ---------------------------------------------------------------------------------------------


def test_a_truncated_shard(data: Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin_run(data, run, OPTIONS)
    path = data.shard_paths("train")[1]
    truncate(path)
    ended = resume(data, run)
    assert_one_line(ended, rf"{path}: .*truncated.*; prepare the data again or copy the file again.*")
    assert_whole(run)


def test_a_flipped_byte_in_the_features(data: Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"
    begin_run(data, run, OPTIONS)
    path = data.shard_paths("train")[1]
    name = flip_byte(path, 4, "features")
    ended = resume(data, run)
    assert_one_line(ended, rf"{path}: utterance {name} is damaged \(checksum\); prepare the data again .*")
    assert_whole(run)


@needs_horovod
def test_a_flipped_byte_in_the_targets_of_the_held_out_split(data: Dataset, tmp_path: Path) -> None:
    """Found by one rank in the evaluation, while the other waits for its sums."""
    run = tmp_path / "run"
    options = ("--backend", "horovod")
    begin_run(data, run, (*OPTIONS, *options))
    steps_before = next(checkpoint_steps(run))
    path = data.shard_paths("dev")[0]
    name = flip_byte(path, 2, "targets")
    ended = resume(data, run, *options)
    assert_one_line(ended, rf"{path}: utterance {name} is damaged \(checksum\); prepare the data again .*")
    assert_whole(run, steps_before)


def test_an_unreadable_audio_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = digit_folder(tmp_path / "corpus")
    broken = sorted(corpus.iterdir())[5]
    broken.write_bytes(b"RIFF\0\0\0\0WAVEnothing")
    assert speechdp(["prepare", str(corpus), str(tmp_path / "data"), "--workers", "1"]) == 1
    (line,) = [n for n in capsys.readouterr().err.splitlines() if n.startswith("speechdp")]
    assert line.startswith(f"speechdp: {broken}: ")
    assert not (tmp_path / "data").exists()


def test_an_unknown_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = digit_folder(tmp_path / "corpus")
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text("one W AH N\ntwo T UW\n")  # the corpus says zero, too
    arguments = ["prepare", str(corpus), str(tmp_path / "data"), "--lexicon", str(lexicon), "--workers", "1"]
    assert speechdp(arguments) == 1
    (line,) = [n for n in capsys.readouterr().err.splitlines() if n.startswith("speechdp")]
    assert "zero" in line and str(lexicon) in line
    assert not (tmp_path / "data").exists()


# --- training -----------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite(whole_data: Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"
    diverging = ["--optimizer", "sgd", "--learning-rate", "1e37", "--max-gradient-norm", "0"]
    arguments = ["train", whole_data.path, run, *OPTIONS, *diverging, "--checkpoint-steps", "1"]
    ended = ended_within(DEADLINE_S, under_mpirun(2, *arguments))
    what = r"(the loss is (nan|inf) at step \d+|a parameter is not finite after step \d+)"
    remedy = "lower --learning-rate or --max-gradient-norm, or inspect the data"
    assert_one_line(ended, rf"{what} \(epoch 1\) on rank [01]: {remedy}; last checkpoint: {run}/.*")
    assert_whole(run)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1.2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1200k", "none", str(disk)]
    mounted = subprocess.run(mount, check=False, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_at_a_checkpoint(whole_data: Dataset, small_disk: Path) -> None:
    """Two checkpoints of 480 kB fit, the third does not; the run goes on when there is room."""
    run = small_disk / "run"
    options = [*OPTIONS, "--cells", "64", "--checkpoint-steps", "3"]
    ended = ended_within(DEADLINE_S, by_launch(2, "train", whole_data.path, run, *options))
    assert ended.exit_code == 1, ended.output
    first, last = our_lines(ended)
    # Both write, and either may be the one that finds no room, or that tells of it.
    failed = re.fullmatch(
        ANY_RANK + rf"{run}/checkpoints: cannot be written \(No space left on device on rank ([01])\); "
        rf"free some space, then continue with --resume; last checkpoint: {run}/checkpoints/step-00000006",
        first,
    )
    assert failed, ended.output
    assert "Traceback" not in ended.stderr, ended.output
    named = f"speechdp launch: rank ([01]) on {re.escape(host_name())} failed, its message is above"
    ended_by = re.match(named, last)
    told_by = first.removeprefix("speechdp: rank ")[0]
    assert ended_by and ended_by[1] in {failed[1], told_by}, ended.output
    assert last.endswith(f"; last checkpoint: {run}/checkpoints/step-00000006")  # what to do is said above
    assert_whole(run, 6)

    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    ended = ended_within(DEADLINE_S, by_launch(2, "train", whole_data.path, run, *options, "--resume"))
    assert ended.exit_code == 0, ended.output
    assert "resuming from step 6" in ended.stdout and (run / "completed.json").is_file()
    assert [p.name for p in (run / "checkpoints").iterdir() if p.name.startswith(".")] == []


# --- command lines ------------------------------------------------------------------------------------


def differing(data: Dataset, one: list[str | Path], other: list[str | Path]) -> Ended:
    """Start rank 0 with one command line and rank 1 with another."""
    rank_0 = under_mpirun(1, "train", data.path, *one)
    rank_1 = under_mpirun(1, "train", data.path, *other)
    return ended_within(DEADLINE_S, [*rank_0, ":", *rank_1[2:]])


def test_ranks_with_different_options(whole_data: Dataset, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = differing(whole_data, [run, *OPTIONS], [run, *OPTIONS, "--seed", "2"])
    assert_one_line(
        ended, r"ranks 0 \(\S+\) and 1 \(\S+\) differ in the seed: 1 and 2; start every rank with the same .*"
    )
    assert not run.exists()


def test_ranks_with_different_runs(whole_data: Dataset, tmp_path: Path) -> None:
    """One would have resumed what the other began: each would have waited in another exchange."""
    ended = differing(whole_data, [tmp_path / "a", *OPTIONS], [tmp_path / "b", *OPTIONS, "--resume"])
    assert_one_line(ended, rf"ranks 0 .* differ in the RUN folder: {tmp_path}/a and {tmp_path}/b; start .*")
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_a_hostfile_with_too_few_slots(
    whole_data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    run = tmp_path / "run"
    job = ["launch", "--hostfile", str(hosts), "-np", "4", "--", "train", str(whole_data.path), str(run)]
    assert speechdp(job) == 1
    assert capsys.readouterr().err.startswith(f"speechdp: {hosts}: 4 ranks wanted, but it has only 2 slots")
    assert not run.exists()
