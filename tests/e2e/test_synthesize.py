"""`speechdp synthesize` from the command line, with a model that has learnt nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from speechdp import exit_codes
from speechdp.cli.main import run as speechdp
from speechdp.data.prepare.pipeline import prepare
from speechdp.data.shards.dataset import Dataset
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig
from speechdp.options.prepare import PrepareOptions, SpeechOptions
from speechdp.tasks.model_file import ClassCounts, save_model
from tests.helpers.corpora import digit_folder, no_progress
from tests.helpers.tiny_speech import write_tiny_speech
from tests.helpers.untrained_speech import write_untrained_run

FAST = ("--iterations", "2", "--max-seconds", "0.5", "--no-attention-end")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("synthesize")
    options = PrepareOptions(
        (digit_folder(folder / "digits", ("ann",)), folder / "data"),
        task="synthesis",
        for_synthesis=SpeechOptions(join="1-2"),
        workers=1,
    )
    return prepare(options, no_progress).dataset


@pytest.fixture
def run(tmp_path: Path, data: Dataset) -> Path:
    return write_untrained_run(tmp_path / "run", data)


def recogniser(folder: Path) -> tuple[Path, Path]:
    """Prepare data of the same recordings for recognition, and a model that has learnt nothing."""
    source, am_data, am_run = folder / "digits", folder / "am-data", folder / "am"
    assert speechdp(["prepare", str(digit_folder(source, ("ann",))), str(am_data), "--workers", "1"]) == 0
    dataset = Dataset.open(am_data)
    torch.manual_seed(0)
    model = LstmAcousticModel(dataset.feature_dim, dataset.num_classes, LstmConfig(1, 4, bidirectional=False))
    ones = np.ones(dataset.num_classes, dtype=np.int64)
    facts = {"feature_dim": dataset.feature_dim, "num_classes": dataset.num_classes}
    am_run.mkdir()
    save_model(am_run, model, ClassCounts(2 * ones, ones), facts)
    return am_run, am_data


def test_texts_become_sound_and_pictures(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "said.wav"
    assert speechdp(["synthesize", str(run), "one 2!", "-o", str(out), *FAST]) == 0
    first = soundfile.read(out)[0]
    assert soundfile.info(out).samplerate == 8000 and len(first) == 39 * 100
    assert f"{out}: 0.49 s, 8000 Hz; it did not stop by itself and was cut at --max-seconds" in (
        capsys.readouterr().out
    )
    assert not out.with_suffix(".png").exists()
    both = ["synthesize", str(run), "two", "one 2!", "-o", str(out), "--picture", *FAST]
    assert speechdp(both) == 0
    names = ["said-1.png", "said-1.wav", "said-2.png", "said-2.wav", "said.wav"]
    assert sorted(path.name for path in tmp_path.glob("said*")) == names
    np.testing.assert_allclose(soundfile.read(tmp_path / "said-2.wav")[0], first, atol=1e-3)
    capsys.readouterr()
    assert speechdp(both) == 1
    assert "said-1.wav: exists" in capsys.readouterr().err


def test_held_out_texts_are_measured_and_heard(
    run: Path, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    am_run, am_data = recogniser(tmp_path)
    command = ["synthesize", str(run), "--data", str(data.path), "--split", "test", *FAST]
    command += ["--recogniser", str(am_run), "--recogniser-data", str(am_data)]
    assert speechdp(command) == 0
    out = capsys.readouterr().out
    record = json.loads((run / "synthesis.json").read_text())
    number = data.num_utterances("test")
    assert (record["format"], record["split"]) == ("speechdp-synthesis", "test")
    assert record["utterances"] == record["utterances_of_split"] == len(record["said"]) == number
    assert (
        record["endings"] == {"stop": 0, "attention": 0, "limit": number} and f"{number} of {number}" in out
    )
    assert 0 < record["mcd_db"]["low"] <= record["mcd_db"]["mean"] <= record["mcd_db"]["high"]
    assert f"{record['mcd_db']['mean']:.2f} dB" in out and 0 < record["focus_rate"]["mean"] <= 1
    ratios = [
        max(one["frames"], n) / min(one["frames"], n)
        for one in record["said"]
        for n in [one["recorded_frames"]]
    ]
    weighted = [one["mcd_db"] * ratio for one, ratio in zip(record["said"], ratios, strict=True)]
    assert record["mcd_sl_db"]["mean"] == pytest.approx(sum(weighted) / number)
    words = sum(len(one["text"].split()) for one in record["said"])
    assert [record["word_errors"][source]["words"] for source in ("recorded", "copy", "synthetic")] == [
        words
    ] * 3
    assert record["recogniser"]["grammar"] == "digit-loop" and f"of {words} words" in out
    for picture in record["pictures"]:
        for source in (".png", "-recorded.wav", "-copy.wav", "-synthetic.wav"):
            assert (run / picture.replace(".png", source)).is_file()
    name = record["pictures"][0].removeprefix("synthesis/test-").removesuffix(".png")
    recorded = soundfile.read(run / "synthesis" / f"test-{name}-recorded.wav")[0]
    np.testing.assert_allclose(
        recorded, soundfile.read(data.path / "recordings" / f"{name}.flac")[0], atol=1e-4
    )


def test_part_of_a_split_and_data_without_recordings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = write_tiny_speech(tmp_path / "data")
    run = write_untrained_run(tmp_path / "run", dataset, stops=True)
    command = ["synthesize", str(run), "--data", str(dataset.path), "--max-utterances", "2", "--split", "dev"]
    assert speechdp([*command, *FAST]) == 0
    record = json.loads((run / "synthesis.json").read_text())
    assert record["utterances"] == 2 and record["utterances_of_split"] == 6 and record["endings"]["stop"] == 2
    assert record["word_errors"] == {} and record["recogniser"] is None
    assert "dev: 2 of 6 utterances" in capsys.readouterr().out
    assert not list((run / "synthesis").glob("*-recorded.wav"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either texts to speak"),
        (["one", "--data", "DATA"], "give either texts to speak"),
        (["--data", "DATA", "--recogniser", "AM"], "belong together"),
        (["one", "--recogniser", "AM", "--recogniser-data", "AM"], "add --data"),
        (["one", "-o", "a.mp3"], "a.mp3: only WAV"),
        (["one", "-o", "nowhere/a.wav"], "no such folder"),
        (["one", "-o", "a" * 300 + ".wav"], "the name has 304 bytes; give one of at most 240"),
        (["one", "-o", "a" * 300 + "/a.wav"], "cannot be written (File name too long)"),
        (["drei §", "-o", "TMP/a.wav"], "'§'"),
        (["--data", "DATA", "--split", "nix"], "no split 'nix'"),
        (["--data", "DATA", "--max-utterances", "-1"], "--max-utterances -1"),
        (["--data", "DATA", "-o", "a.wav"], "--out goes with texts to speak, not with --data; leave it out"),
        (["--data", "DATA", "--picture"], "--picture goes with texts to speak"),
        (["--data", "DATA", "--overwrite"], "--overwrite goes with texts to speak"),
        (["one", "--split", "dev"], "--split goes with --data; leave it out"),
        (["one", "--max-utterances", "3"], "--max-utterances goes with --data"),
        (["--data", "DATA", "--grammar", "word-loop"], "--grammar goes with --recogniser; leave it out"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    run: Path,
    data: Dataset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [text.replace("DATA", str(data.path)).replace("TMP", str(tmp_path)) for text in arguments]
    expected = exit_codes.USAGE if message.startswith("give either") else exit_codes.FAILED
    assert speechdp(["synthesize", str(run), *given]) == expected
    error = capsys.readouterr().err
    assert message in error and error.count("speechdp:") == 1 and "Traceback" not in error


def test_a_request_that_is_refused_leaves_what_was_measured_before(
    run: Path, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    am_run, am_data = recogniser(tmp_path)
    command = ["synthesize", str(run), "--data", str(data.path), *FAST]
    assert speechdp([*command, "--max-utterances", "1"]) == 0
    before = {path: path.read_bytes() for path in (run / "synthesis").iterdir()}
    assert before
    # The recogniser has no language model: what --grammar asks for cannot be.
    heard = ["--recogniser", str(am_run), "--recogniser-data", str(am_data), "--grammar", "ngram"]
    assert speechdp([*command, *heard]) == 1
    assert "the grammar ngram needs a language model" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (run / "synthesis").iterdir()} == before
    assert speechdp(command) == 0  # a measurement takes their place
    assert before.keys() <= set((run / "synthesis").iterdir())


def test_other_models_and_other_data_are_refused(
    run: Path, data: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    am_run, am_data = recogniser(tmp_path)
    other = write_tiny_speech(tmp_path / "other")
    for arguments, message in (
        ([am_run, "one", "-o", str(tmp_path / "a.wav")], "is an acoustic model"),
        ([run, "--data", str(am_data)], "holds features, not spectrograms"),
        ([run, "--data", str(other.path)], "features differ from what the model was trained on"),
    ):
        assert speechdp(["synthesize", *map(str, arguments)]) == 1
        assert message in capsys.readouterr().err
