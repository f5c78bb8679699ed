"""From data to words on two ranks: realign, train, decode, report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from speechdp.cli.main import run as speechdp
from speechdp.data.shards.alignment_file import open_targets
from speechdp.data.shards.dataset import Dataset
from speechdp.report.runs.folders import read_run
from tests.helpers.corpora import digit_folder
from tests.helpers.finished_run import evaluations
from tests.helpers.jobs import DEADLINE_S, by_launch, ended_within, our_lines, under_mpirun
from tests.helpers.tiny_data import TinySizes, flip_byte, write_tiny_data

OPTIONS = ("--layers", "1", "--cells", "16", "--dropout", "0", "--learning-rate", "0.02", "--batch-size", "4")
ROUNDS = ("--realign", "1", "--realign-epochs", "3", "--epochs", "4", "--backend", "mpi")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    sizes = TinySizes(train=80, dev=12, test=12, shards=3)
    return write_tiny_data(tmp_path_factory.mktemp("train") / "data", sizes)


@pytest.fixture(scope="module")
def trained(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run with a round of realignment on two ranks, and what it printed."""
    run = tmp_path_factory.mktemp("run") / "run"
    ended = ended_within(DEADLINE_S, by_launch(2, "train", dataset.path, run, *OPTIONS, *ROUNDS))
    assert ended.exit_code == 0, ended.output
    assert our_lines(ended) == [] and "Traceback" not in ended.stderr, ended.output
    return run, ended.stdout


def test_it_says_where_it_computes_and_how_well(trained: tuple[Path, str]) -> None:
    run, stdout = trained
    lines = stdout.splitlines()
    assert "2 ranks on" in lines[0] and "back-end mpi" in lines[0] and "CPU" in lines[0]
    assert [line for line in lines if line.startswith("alignment 1: 92 utterances, ")], stdout
    assert len([line for line in lines if "held-out log-prob" in line]) == 3 + 4
    assert lines[-1] == f"model: {run / 'model.safetensors'}"


def test_the_run_learns_and_leaves_what_it_should(dataset: Dataset, trained: tuple[Path, str]) -> None:
    run, _ = trained
    lines = evaluations(run)
    assert [line["epoch"] for line in lines] == [1.0, 2.0, 3.0, 4.0]
    assert lines[-1]["frames"] == 4 * dataset.num_frames("train")
    assert lines[-1]["heldout_frame_accuracy"] > 0.8
    assert lines[-1]["heldout_log_prob"] > lines[0]["heldout_log_prob"]
    record = json.loads((run / "run.json").read_text())
    assert record["size"] == 2 and record["backend"] == "mpi" and record["options"]["realign"] == 0
    assert record["options"]["alignments"] == str(run / "alignments" / "1")
    result = read_run(run)
    assert result.status == "complete" and result.problems == ()
    assert result.timing is not None and len(result.timing.ranks) == 2
    assert (run / "realign" / "1" / "completed.json").is_file()
    assert list((run / "tensorboard").iterdir())


def test_alignments_cover_the_splits_trained_and_scored_on(
    dataset: Dataset, trained: tuple[Path, str]
) -> None:
    folder = trained[0] / "alignments" / "1"
    assert (folder / "completed.json").is_file()
    paths = [*dataset.shard_paths("train"), *dataset.shard_paths("dev")]
    assert sorted(p.name for p in folder.glob("*.h5")) == sorted(p.name for p in paths)
    same, frames = 0, 0
    for split in ("train", "dev"):
        for index, path in enumerate(dataset.shard_paths(split)):
            with dataset.open_shard(split, index) as shard:
                targets = open_targets(folder / path.name, shard)
                assert targets.alignment == "realigned-1"
                for utterance in range(shard.num_utterances):
                    new, old = targets.read(utterance), shard.read(utterance)[1]
                    assert len(new) == len(old)
                    same, frames = same + int(np.sum(new == old)), frames + len(old)
                targets.close()
    assert same > 0.8 * frames  # the data's own alignment is exact, and the network has learnt it


def test_what_is_trained_can_be_decoded_and_reported(
    dataset: Dataset, trained: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = trained
    for split in ("dev", "test"):
        arguments = ["decode", str(run), str(dataset.path), "--split", split]
        assert speechdp(arguments) == 0
        assert f"hypotheses: {run}/hypotheses/{split}.txt" in capsys.readouterr().out
        errors = json.loads((run / f"wer-{split}.json").read_text())
        assert errors["split"] == split and errors["wer"] <= 0.1
    assert speechdp(["report", str(run)]) == 0
    assert "model_averaging" not in capsys.readouterr().out
    assert (run / "report").is_dir()


def test_a_class_list_of_other_data_is_refused(
    trained: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_tiny_data(tmp_path / "other")
    text = other.classes_path.read_text()
    other.classes_path.write_text(text.replace("W_", "Z_"))
    assert speechdp(["decode", str(trained[0]), str(other.path)]) == 1
    assert "is not the class list the model was trained on" in capsys.readouterr().err


def test_data_of_other_words_begin_from_a_model_as_its_refusal_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--epochs", "1", "--layers", "1", "--cells", "4", "--backend", "serial"]
    for words in (2, 3):
        digit_folder(tmp_path / f"in{words}", digits=words)
        assert speechdp(["prepare", f"in{words}", f"data{words}", "--shards", "1"]) == 0
    assert speechdp(["train", "data2", "run", *options]) == 0
    capsys.readouterr()
    command = ["train", "data3", "other", *options, "--initial-model", "run"]
    assert speechdp(command) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    advice = "--like run --split random:dev=0.1"
    assert f"or prepare the data with {advice} (--lexicon as well, for other words" in said
    Path("lexicon.txt").write_text("zero Z IY R OW\none W AH N\ntwo W IY\n")
    again = ["prepare", "in3", "data3", "--overwrite", *advice.split(), "--lexicon", "lexicon.txt"]
    assert speechdp(again) == 0 and speechdp(command) == 0


def test_damage_found_by_one_rank_in_decoding_ends_both(
    dataset: Dataset, trained: tuple[Path, str], tmp_path: Path
) -> None:
    shutil.copytree(dataset.path, tmp_path / "data")
    path = tmp_path / "data" / dataset.shard_paths("test")[0].name
    name = flip_byte(path, 1)
    ended = ended_within(
        DEADLINE_S, under_mpirun(2, "decode", trained[0], tmp_path / "data", "--backend", "mpi")
    )
    assert ended.exit_code == 1, ended.output
    (line,) = our_lines(ended)
    assert f"{path}: utterance {name} is damaged (checksum)" in line and "rank 1 on" in line


def test_the_same_command_again_does_nothing_over(dataset: Dataset, trained: tuple[Path, str]) -> None:
    run, _ = trained
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file() and p.name != "completed.json"}
    ended = ended_within(DEADLINE_S, by_launch(2, "train", dataset.path, run, *OPTIONS, *ROUNDS, "--resume"))
    assert ended.exit_code == 0, ended.output
    further = f"begin another run with --initial-model {run} --alignments {run}/alignments/"
    assert f"{run}: is complete already; to train its model further, {further}" in ended.stdout
    for path, time_ns in before.items():
        assert path.stat().st_mtime_ns == time_ns, path
