"""decode --tune-on: settings chosen on one split, used on another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from speechdp.cli.decode import DecodeCommand
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.shards.dataset import Dataset
from speechdp.decode import tuning
from speechdp.decode.graph import Grammar
from speechdp.decode.language_model import save_language_model
from speechdp.decode.recognise import DecodingOptions, decode_split
from speechdp.decode.tuning import tune
from speechdp.errors import ConfigError
from speechdp.language.kneser_ney import estimate
from speechdp.process.ending import Stopped
from tests.helpers.oracle import Oracle, OracleModel, Spoken, oracle, write_dataset

#: What is said twice is meant once: more costly words (or a smaller acoustic scale) are right.
SHARDS = [
    [Spoken("a", "one", "one one"), Spoken("b", "two", "two two", 44), Spoken("c", "one two", "one two", 50)],
    [Spoken("d", "two", "two two", 48), Spoken("e", "four", "four", 30)],
]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return write_dataset(tmp_path / "data", SHARDS, "dev")


def unsure(num_classes: int) -> Oracle:
    """A model that is not sure, so that costs of words matter."""
    sure = oracle(num_classes)
    model = OracleModel(num_classes, confidence=1.0)
    return Oracle(model, sure.class_log_prior, sure.self_loop, sure.config)


def add_language_model(dataset: Dataset) -> None:
    texts = [["one"], ["two"], ["one", "two"], ["two"], ["four"]]
    save_language_model(estimate(texts, 2, ["one", "two", "four"]), dataset.path)


@pytest.mark.parametrize("grammar", [None, Grammar.WORD_LOOP, Grammar.TRANSCRIPT_SET])
def test_the_best_setting_is_found_and_does_what_it_promises(
    dataset: Dataset, tmp_path: Path, grammar: Grammar | None
) -> None:
    add_language_model(dataset)
    model, comm, start = unsure(dataset.num_classes), SerialCommunicator(), DecodingOptions(grammar=grammar)
    tuned = tune(model, dataset, "dev", start, comm)
    tried = {
        None: {"acoustic_scale", "lm_scale", "insertion_log_prob"},
        Grammar.WORD_LOOP: {"acoustic_scale", "insertion_log_prob"},
        Grammar.TRANSCRIPT_SET: {"acoustic_scale"},
    }[grammar]
    assert set(tuned.record["chosen"]) == tried
    result = decode_split(model, dataset, "dev", tmp_path / "run", tuned.options, comm, tuning=tuned.record)
    errors = result.wer.insertions + result.wer.deletions + result.wer.substitutions
    assert errors == tuned.record["errors"] == min(trial["errors"] for trial in tuned.record["trials"])
    assert errors <= tuned.record["trials"][0]["errors"]
    values = json.loads((tmp_path / "run" / "wer-dev.json").read_text())
    assert values["tuning"] == tuned.record
    assert values["grammar"] == (grammar or Grammar.NGRAM).value
    assert values["graph"]["determinised"] == (grammar is None)
    for name in tried:
        assert values["options"][name] == tuned.record["chosen"][name]


def test_tuning_helps_where_words_are_inserted(tmp_path: Path) -> None:
    right = [[Spoken("a", "one two", "one two", 60), Spoken("b", "four", "four", 50)]]
    dataset = write_dataset(tmp_path / "data", right, "dev")
    start = DecodingOptions(grammar=Grammar.WORD_LOOP, insertion_log_prob=20.0)
    tuned = tune(unsure(dataset.num_classes), dataset, "dev", start, SerialCommunicator())
    before = next(
        t for t in tuned.record["trials"] if (t["acoustic_scale"], t["insertion_log_prob"]) == (1.0, 20.0)
    )
    assert tuned.record["errors"] < before["errors"]
    assert tuned.summary().startswith("tuned on dev: acoustic-scale ")


def test_where_nothing_helps_nothing_is_changed(tmp_path: Path) -> None:
    right = [[Spoken("a", "one two", "one two", 60), Spoken("b", "four", "four")]]
    dataset = write_dataset(tmp_path / "data", right, "dev")
    start = DecodingOptions(acoustic_scale=0.77, insertion_log_prob=-0.1)
    tuned = tune(oracle(dataset.num_classes), dataset, "dev", start, SerialCommunicator())
    assert tuned.options == start and tuned.record["errors"] == 0


@pytest.mark.parametrize("size", [2, 4, 7])
def test_any_number_of_ranks_chooses_the_same(dataset: Dataset, size: int) -> None:
    add_language_model(dataset)
    alone = tune(unsure(dataset.num_classes), dataset, "dev", DecodingOptions(), SerialCommunicator())
    results = run_threads(
        size, lambda comm: tune(unsure(dataset.num_classes), dataset, "dev", DecodingOptions(), comm)
    )
    assert all(result == alone for result in results)


def test_the_network_runs_once(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    model = unsure(dataset.num_classes)
    tune(model, dataset, "dev", DecodingOptions(), SerialCommunicator())
    assert len(model.model.batch_shapes) == 1


def test_a_rank_that_is_asked_to_stop_stops_all(dataset: Dataset) -> None:
    def run(comm: object) -> str:
        asked = comm.rank == 1  # type: ignore[attr-defined]
        try:
            tune(unsure(dataset.num_classes), dataset, "dev", DecodingOptions(), comm, lambda: asked)  # type: ignore[arg-type]
        except Stopped:
            return "stopped"
        return "went on"

    assert run_threads(2, run) == ["stopped", "stopped"]


def test_command_tunes_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = write_dataset(tmp_path / "dev", SHARDS, "dev")
    other = write_dataset(tmp_path / "test", SHARDS, "test")
    for path in other.shard_paths("test"):
        path.rename(dataset.path / path.name)
    both = json.loads((dataset.path / "data.json").read_text())
    both["splits"] |= json.loads((other.path / "data.json").read_text())["splits"]
    (dataset.path / "data.json").write_text(json.dumps(both))

    def load_model(_run: Path, device: torch.device) -> Oracle:
        model = unsure(dataset.num_classes)
        model.model.to(device)
        return model

    monkeypatch.setattr("speechdp.tasks.model_file.load_model", load_model)
    monkeypatch.setattr(tuning, "_VALUES", {"acoustic_scale": (0.5, 1.0), "insertion_log_prob": (0.0, -3.0)})
    run_dir, where = tmp_path / "run", {"backend": "serial", "device": "cpu"}
    assert DecodeCommand(run_dir, dataset.path, tune_on="dev", **where).run() == 0  # type: ignore[arg-type]
    out = capsys.readouterr().out
    values = json.loads((run_dir / "wer-test.json").read_text())
    assert out.startswith("tuned on dev: acoustic-scale ") and "; test, digit-loop" in out
    assert values["tuning"]["split"] == "dev" and len(values["tuning"]["trials"]) >= 3
    assert not (run_dir / "wer-dev.json").exists()
    with pytest.raises(ConfigError, match="--tune-on test: "):
        DecodeCommand(run_dir, dataset.path, tune_on="test", **where)._on_rank(SerialCommunicator())  # type: ignore[arg-type]
