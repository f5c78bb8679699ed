from __future__ import annotations

import dataclasses
import errno
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speechdp.cli.decode import DecodeCommand
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.shards.dataset import Dataset
from speechdp.decode.graphs.graph import Grammar
from speechdp.decode.recogniser import DecodingOptions
from speechdp.decode.results import DecodingResult, DecodingSpeed
from speechdp.decode.scoring import AcousticScorer
from speechdp.decode.split import decode_split
from speechdp.errors import ConfigError, RunError
from speechdp.labels.hmm import StateInventory
from speechdp.report.decoding.page import write_decoding_page
from tests.helpers.oracle import Oracle, OracleModel, Spoken, oracle, write_dataset
from tests.helpers.tiny_speech import write_tiny_speech

SHARDS = [
    [Spoken("c1", "one two", "one two"), Spoken("a1", "three", "four", 25)],
    [Spoken("b1", "four", "four", 22), Spoken("d1", "two", "two", 2), Spoken("a2", "one", "one one", 50)],
]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return write_dataset(tmp_path / "data", SHARDS)


def decode(dataset: Dataset, run_dir: Path, **options: object) -> DecodingResult:
    trained = oracle(dataset.num_classes)
    return decode_split(
        trained,
        dataset,
        "test",
        run_dir,
        DecodingOptions(**options),
        SerialCommunicator(),  # type: ignore[arg-type]
    )


#: Insertions, deletions, substitutions and words of each utterance.
ERRORS = "a1 0 0 1 1\na2 1 0 0 1\nb1 0 0 0 1\nc1 0 0 0 2\nd1 0 1 0 1\n"


def test_hypotheses_errors_and_files(dataset: Dataset, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = decode(dataset, run_dir)
    text = (run_dir / "hypotheses" / "test.txt").read_text()
    # sorted by id; d1 has 2 frames, in which no path ends: an empty hypothesis
    assert text == "a1 four\na2 one one\nb1 four\nc1 one two\nd1\n"
    assert result.grammar is Grammar.DIGIT_LOOP and result.failed == 1 and result.retried == 1
    values = json.loads((run_dir / "wer-test.json").read_text())
    expected = {"split": "test", "grammar": "digit-loop", "words": 6, "wer": 0.5, "utterances": 5}
    expected |= {"insertions": 1, "deletions": 1, "substitutions": 1, "hypotheses": "hypotheses/test.txt"}
    assert expected.items() <= values.items()
    assert values["failed"] == 1 and values["options"]["beam"] == 16.0
    assert values["errors"] == "hypotheses/test.errors"
    assert (run_dir / values["errors"]).read_text() == ERRORS
    assert 0 <= values["wer_low"] <= 0.5 <= values["wer_high"]
    assert (values["sentence_errors"], values["ser"]) == (3, 0.6)
    assert [(row["speaker"], row["words"], row["wer"]) for row in values["speakers"]] == [("s", 6, 0.5)]


def test_what_has_no_transcript_is_recognised_and_not_counted(tmp_path: Path) -> None:
    untold = [Spoken("b0", "", "one two"), Spoken("e0", "", "two")]
    expected = decode(write_dataset(tmp_path / "data", SHARDS), tmp_path / "run")
    found = decode(write_dataset(tmp_path / "more", [*SHARDS, untold]), tmp_path / "other", nbest=3)
    assert found.wer == expected.wer and found.speakers == expected.speakers
    assert (expected.untranscribed, found.untranscribed) == (0, 2)
    assert found.nbest is not None and found.nbest.oracle.utterances == 5
    assert {"b0 one two", "e0 two"} < set(
        (tmp_path / "other" / "hypotheses" / "test.txt").read_text().splitlines()
    )
    assert json.loads((tmp_path / "other" / "wer-test.json").read_text())["untranscribed"] == 2


def test_speakers_stand_by_their_error_rates_where_they_are_known(tmp_path: Path) -> None:
    utterances = [
        Spoken("a", "one two", "one two", speaker="ann"),
        Spoken("b", "three", "four", speaker="bob"),
        Spoken("c", "four", "two", speaker="unknown"),
    ]
    dataset = write_dataset(tmp_path / "data", [utterances])
    result = decode(dataset, tmp_path / "run")
    assert {name: errors.wer for name, errors in result.speakers.items()} == {"bob": 1.0, "ann": 0.0}
    values = json.loads((tmp_path / "run" / "wer-test.json").read_text())
    assert [row["speaker"] for row in values["speakers"]] == ["bob", "ann"]
    assert values["words"] == 4  # those of unknown speakers count, but for nobody
    assert values["wer_of_new_speakers"] is None


def test_what_other_speakers_may_expect_is_recorded_where_each_word_has_a_speaker(tmp_path: Path) -> None:
    heard = [("ann", "one two"), ("bob", "four two"), ("cem", "one two"), ("dee", "one one")]
    said = [Spoken(name[0], "one two", words, speaker=name) for name, words in heard]
    result = decode(write_dataset(tmp_path / "data", [said]), tmp_path / "run")
    assert (result.wer.wer, len(result.speakers)) == (0.25, 4)
    low, high = json.loads((tmp_path / "run" / "wer-test.json").read_text())["wer_of_new_speakers"]
    assert 0 < low < result.wer.wer_low + 0.1 and result.wer.wer_high < high <= 1
    assert f"as these 4 do: WER {100 * low:.1f} to {100 * high:.1f} %" in result.speakers_remark

    said.append(Spoken("e", "three", "three", speaker="unknown"))
    assert not decode(write_dataset(tmp_path / "more", [said]), tmp_path / "other").speakers_remark


@pytest.mark.parametrize(
    ("trained_on", "are_there", "is_told"),
    [("eve", True, True), ("cem", True, False), ("sp0.9-cem", True, False), ("eve", False, False)],
)
def test_nothing_is_said_of_other_speakers_where_some_were_trained_on(
    tmp_path: Path, trained_on: str, are_there: bool, is_told: bool
) -> None:
    heard = [("ann", "one two"), ("bob", "two two"), ("cem", "one two"), ("dee", "one one")]
    said = [Spoken(name[0], "one two", words, speaker=name) for name, words in heard]
    data = write_dataset(tmp_path / "data", [said]).path
    learnt = [Spoken("x", "one two", "one two", speaker=trained_on)]
    train = write_dataset(tmp_path / "train", [learnt], split="train").path
    manifests = [json.loads((folder / "data.json").read_text()) for folder in (data, train)]
    manifests[0]["splits"] |= manifests[1]["splits"]
    (data / "data.json").write_text(json.dumps(manifests[0]))
    if are_there:
        (train / "train-00000.h5").rename(data / "train-00000.h5")
    dataset = Dataset.open(data)
    trained = oracle(dataset.num_classes)
    for checksum, tells in ((dataset.checksum, is_told), ("of other data", True)):
        own = dataclasses.replace(trained, config={"data_checksum": checksum})
        result = decode_split(own, dataset, "test", tmp_path / "run", DecodingOptions(), SerialCommunicator())
        assert bool(result.speakers_remark) is tells


def test_other_data_leave_the_runs_own_results_alone(dataset: Dataset, tmp_path: Path) -> None:
    run_dir, model = tmp_path / "run", oracle(dataset.num_classes)
    (run_dir / "trained_on").mkdir(parents=True)
    (run_dir / "trained_on" / "data.json").write_text('{"splits": {"test": {}}}')
    (run_dir / "wer-test.json").write_text("the run's own")
    trained = dataclasses.replace(model, config=model.config | {"data_checksum": "of others"})
    result = decode_split(trained, dataset, "test", run_dir, DecodingOptions(), SerialCommunicator())
    assert (run_dir / "wer-test.json").read_text() == "the run's own"
    record = json.loads((run_dir / "wer-test@data.json").read_text())
    assert record["data"] == {"path": str(dataset.path), "checksum": dataset.checksum}
    assert record["hypotheses"] == "hypotheses/test@data.txt"
    assert (run_dir / "hypotheses" / "test@data.txt").is_file()
    assert write_decoding_page(result, dataset, run_dir).html.name == "decoding-test@data.html"


@pytest.mark.parametrize("size", [2, 4, 7])
def test_any_number_of_ranks_gives_the_same_files(dataset: Dataset, tmp_path: Path, size: int) -> None:
    alone = decode(dataset, tmp_path / "alone")
    together = tmp_path / "together"
    results = run_threads(
        size,
        lambda comm: decode_split(
            oracle(dataset.num_classes), dataset, "test", together, DecodingOptions(), comm
        ),
    )
    assert all(result.wer == alone.wer and result.retried == alone.retried for result in results)
    for name in ("wer-test.json", "hypotheses/test.txt"):
        assert (together / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()


def test_speeds_of_ranks_are_summed() -> None:
    mine, other = DecodingSpeed(10.0, 2.0, 0.5, 0.25, 2**20), DecodingSpeed(30.0, 1.0, 1.5, 0.75, 3 * 2**20)
    both = DecodingSpeed.over([vars(mine), vars(other)])
    assert both == DecodingSpeed(40.0, 2.0, 2.0, 1.0, 3 * 2**20)
    assert both.summary() == (
        "real-time factor 0.075 a core (network 0.050, search 0.025), 40.0 s of speech; graph in 2.0 s; "
        "peak memory 3 MiB a rank"
    )


def test_transcripts_as_grammar_correct_what_was_said(dataset: Dataset, tmp_path: Path) -> None:
    decode(dataset, tmp_path / "run", grammar=Grammar.TRANSCRIPT_SET)
    lines = (tmp_path / "run" / "hypotheses" / "test.txt").read_text().splitlines()
    assert lines[1] in ("a2 one", "a2 one two", "a2 four")  # "one one" is nobody's transcript


def test_model_of_another_corpus_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    other = oracle(dataset.num_classes + 3)
    with pytest.raises(ConfigError, match=f"the model has {dataset.num_classes + 3} classes"):
        decode_split(other, dataset, "test", tmp_path, DecodingOptions(), SerialCommunicator())


def test_other_features_or_rates_than_in_training_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    for config in ({"sampling_rate": 16000}, {"features": dataset.features.to_dict() | {"kind": "mfcc"}}):
        trained = dataclasses.replace(oracle(dataset.num_classes), config=config)
        with pytest.raises(ConfigError, match=f"{next(iter(config))} .* not what the model was trained on"):
            decode_split(trained, dataset, "test", tmp_path, DecodingOptions(), SerialCommunicator())


def test_another_class_list_of_the_same_length_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    inventory = StateInventory.load(dataset.classes_path)
    config: dict[str, object] = {"classes_sha256": inventory.sha256}
    trained = dataclasses.replace(oracle(dataset.num_classes), config=config)
    decode_split(trained, dataset, "test", tmp_path / "run", DecodingOptions(), SerialCommunicator())
    StateInventory((*inventory.phones[:-1], "zz")).save(dataset.classes_path)
    with pytest.raises(ConfigError, match=r"classes\.txt: is not the class list the model was trained on"):
        decode_split(trained, dataset, "test", tmp_path / "run", DecodingOptions(), SerialCommunicator())


def test_data_of_synthesis_are_told_from_damaged_ones(tmp_path: Path) -> None:
    speech, comm = write_tiny_speech(tmp_path / "speech"), SerialCommunicator()
    with pytest.raises(ConfigError, match="speech: holds spectrograms for synthesis; give data prepared wit"):
        decode_split(oracle(speech.num_classes), speech, "test", tmp_path / "run", DecodingOptions(), comm)


def test_no_split_overwrites_another(tmp_path: Path) -> None:
    for split in ("test", "dev"):
        dataset = write_dataset(tmp_path / split, SHARDS, split)
        trained = oracle(dataset.num_classes)
        decode_split(trained, dataset, split, tmp_path / "run", DecodingOptions(), SerialCommunicator())
    for split in ("test", "dev"):
        assert json.loads((tmp_path / "run" / f"wer-{split}.json").read_text())["split"] == split
        assert (tmp_path / "run" / "hypotheses" / f"{split}.txt").is_file()


def test_split_without_words_is_refused(tmp_path: Path) -> None:
    silent = write_dataset(tmp_path / "data", [[Spoken("a", "", "one")]])
    with pytest.raises(
        ConfigError, match=r"has no transcripts to count errors by; .* speechdp transcribe RUN FILES"
    ):
        decode(silent, tmp_path / "run")


def test_full_disk_is_one_line(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    with pytest.raises(RunError, match="cannot be written"):
        decode(dataset, tmp_path / "run")


def test_a_run_that_may_not_be_written_is_decoded_by_the_commands_of_the_docs(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that was said of a colleague's run was to have its disk mounted for writing."""
    run, mkdir = tmp_path / "RUN", Path.mkdir
    run.mkdir()
    (run / "run.json").write_text("{}")

    def refuse(self: Path, *args: Any, **kwargs: Any) -> None:
        if self.parent == run:
            raise OSError(errno.EROFS, "Read-only file system", str(self))
        mkdir(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)  # root may write anywhere
    said = (
        r"; or give a folder of your own with links to all in .*/RUN but hypotheses and report \(docs/run-d"
    )
    with pytest.raises(
        RunError, match=rf"/RUN/hypotheses: cannot be written \(Read-only file system\).*{said}"
    ):
        decode(dataset, run)
    docs = (Path(__file__).parents[3] / "docs" / "run-directory.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    (mkdir MINE .*)$", docs, re.MULTILINE)
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    decode(dataset, tmp_path / "MINE")
    assert (tmp_path / "MINE" / "hypotheses").is_dir()
    assert [path.name for path in run.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"beam": 0}, "--beam 0"),
        ({"acoustic_scale": float("nan")}, "--acoustic-scale nan"),
        ({"max_active": 1}, "--max-active 1"),
        ({"acoustic_scale": float("inf")}, "--acoustic-scale inf: must be finite"),
        ({"lm_scale": float("inf")}, "--lm-scale inf: must be finite"),
        ({"insertion_log_prob": float("nan")}, "--insertion-log-prob nan: must be finite"),
        ({"prior_scale": -0.5}, "--prior-scale -0.5"),
        ({"prior_scale": float("inf")}, "--prior-scale inf: must be finite"),
        ({"silence_probability": 1.0}, "--silence-probability 1.0"),
        ({"lattice_beam": float("inf")}, "--lattice-beam inf"),
        ({"acoustic_scale": 1e38}, "--acoustic-scale 1e+38: must be finite, and at most 1,000,000 in size"),
        ({"insertion_log_prob": -1e30}, "--insertion-log-prob -1e+30: must be finite, and at most"),
        ({"prior_scale": 1e39}, "--prior-scale 1e+39: must be finite, and at most"),
        ({"nbest": -1}, "--nbest -1"),
        ({"nbest": 10**10}, "--nbest 10000000000: must be at most 2,147,483,647"),
        ({"rescore_weight": 1.5}, "--rescore-weight 1.5"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, float], option: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(option)):
        DecodingOptions(**options)  # type: ignore[arg-type]


def test_scorer_batches_by_length_and_gives_every_utterance_its_own_scores() -> None:
    model = OracleModel(4)
    model.train()
    rng = np.random.default_rng(0)
    utterances = [rng.integers(4, size=(n, 2)).astype(np.float32) for n in rng.integers(60, size=300)]
    log_prior = np.log([0.1, 0.2, 0.3, 0.4]).astype(np.float32)
    scorer = AcousticScorer(model, log_prior, prior_scale=0.5, max_padded_frames=500)
    scored = dict(scorer.score(iter(utterances)))
    assert sorted(scored) == list(range(300))
    for u, features in enumerate(utterances):
        logits = model.table.detach()[torch.from_numpy(features[:, 0]).long()]
        expected = torch.log_softmax(logits, -1).numpy() - 0.5 * log_prior
        np.testing.assert_allclose(scored[u], expected, rtol=1e-5)
    assert all(batch * frames <= 500 for batch, frames in model.batch_shapes)
    assert len(model.batch_shapes) < 40
    assert model.training and scored[0].dtype == np.float32


def test_command_prints_the_error_rate_and_the_file(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Path] = []

    def load_model(run_dir: Path, device: torch.device, **_: object) -> Oracle:
        asked.append(run_dir)
        trained = oracle(dataset.num_classes)
        trained.model.to(device)
        return trained

    monkeypatch.setattr("speechdp.tasks.model_file.load_model", load_model)
    run_dir = tmp_path / "run"
    assert (
        DecodeCommand(run_dir, dataset.path, grammar="word-loop", backend="serial", device="cpu").run() == 0
    )
    out = capsys.readouterr().out
    assert asked == [run_dir]
    assert "WER 50.00 % [95 % interval " in out and "1 ins, 1 del, 1 sub" in out
    assert "test, word-loop" in out and "1 utterance needed a wider beam; without hypothesis: 1" in out
    assert "SER 60.00 % [95 % interval " in out and "(3 / 5 utterances have an error)" in out
    # 139 frames of 10 ms
    assert re.search(r"real-time factor \d+\.\d{3} a core \(.*\), 1\.4 s of speech; .* MiB a rank", out)
    assert f"hypotheses: {run_dir / 'hypotheses' / 'test.txt'}" in out
    assert f"page: {run_dir / 'report' / 'decoding-test.html'}" in out
    assert "by speaker" not in out  # there is one
    assert (run_dir / "report" / "decoding-test.html").is_file()
