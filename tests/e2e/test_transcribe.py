"""`speechdp transcribe`: recordings of real speech, alone and joined, by a model trained for it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from speechdp.cli.main import run as speechdp
from speechdp.decode.recognise import DecodingOptions
from speechdp.decode.transcribe import Transcriber, kept_data
from speechdp.tasks.model_file import load_model
from tests.helpers.corpora import some_fsdd

OPTIONS = ("--layers", "1", "--cells", "32", "--epochs", "8", "--batch-size", "4", "--learning-rate", "0.01")


@dataclass(frozen=True)
class Trained:
    """A model, the data it was tested on, and their recordings."""

    run: Path
    data: Path
    recordings: list[Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("transcribe")
    corpus = some_fsdd(folder / "corpus", ("jackson",), tuple(range(12)), digits=5)
    data, run = folder / "data", folder / "run"
    split = ("--split", "index:test=0-1,dev=2", "--lm-order", "2", "--dtype", "float32")
    assert speechdp(["prepare", str(corpus), str(data), *split, "--workers", "1"]) == 0
    assert speechdp(["train", str(data), str(run), "--backend", "serial", "--flat-start", *OPTIONS]) == 0
    assert speechdp(["decode", str(run), str(data), "--backend", "serial"]) == 0
    recordings = sorted(path for path in corpus.iterdir() if path.stem.endswith(("_0", "_1")))
    return Trained(run, data, recordings)


def test_a_file_is_heard_as_in_a_data_directory(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    files = [str(path) for path in trained.recordings]
    ctm = tmp_path / "words.ctm"
    assert speechdp(["transcribe", str(trained.run), *files, "--ctm", str(ctm)]) == 0
    printed = capsys.readouterr()
    hypotheses = (trained.run / "hypotheses" / "test.txt").read_text()
    assert sorted(printed.out.splitlines()) == sorted(hypotheses.splitlines())
    assert "real-time factor" in printed.err
    # Most are right: a model that has learnt nothing would get one in five.
    digits = ("zero", "one", "two", "three", "four")
    right = [line.split()[1:] == [digits[int(line[0])]] for line in printed.out.splitlines()]
    assert sum(right) > 0.6 * len(right), printed.out
    lines = [line.split() for line in ctm.read_text().splitlines()]
    assert [(name, word) for name, _, _, _, word, _ in lines] == [
        (line.split()[0], word) for line in printed.out.splitlines() for word in line.split()[1:]
    ]
    assert all(float(duration) > 0 and 0 <= float(sure) <= 1 for _, _, _, duration, _, sure in lines)


def test_a_long_recording_is_cut_and_its_times_go_on(trained: Trained, tmp_path: Path) -> None:
    pause = np.zeros(2400, np.float32)
    waves = [soundfile.read(path, dtype="float32")[0] for path in trained.recordings]
    starts = np.cumsum([0, *(len(wave) + len(pause) for wave in waves)]) / 8000
    joined = np.concatenate([part for wave in waves for part in (wave, pause)])
    soundfile.write(tmp_path / "long.wav", joined, 8000)
    options = DecodingOptions(acoustic_scale=0.5)
    model = load_model(trained.run, torch.device("cpu"))
    found = Transcriber(model, kept_data(trained.run), options, longest_s=2.0).transcribe(
        tmp_path / "long.wav", "long"
    )
    times = [(word.start_s, word.start_s + word.duration_s) for word in found.words]
    assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(times))
    assert found.duration_s == pytest.approx(starts[-1]) and times[-1][1] <= found.duration_s
    # Nearly every recording has a word that was heard while it was spoken.
    middles = [(start + end) / 2 for start, end in times]
    heard = [any(a <= m < b for m in middles) for a, b in itertools.pairwise(starts)]
    assert sum(heard) >= 0.8 * len(heard)


def test_what_cannot_be_transcribed(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, recording = str(trained.run), str(trained.recordings[0])
    (tmp_path / "no.wav").write_text("no audio")
    (tmp_path / "out.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    kept = trained.run / "trained_on"
    for arguments, message in (
        ((run, recording, "-o", str(tmp_path / "out.txt")), "out.txt: exists; give another name"),
        ((str(tmp_path / "run"), recording), "run: no such folder"),
        ((run, str(tmp_path / "empty")), "empty: holds no audio"),
        ((run, recording, recording, "--ctm", str(tmp_path / "ctm")), "are both named"),
        ((run, recording, "--longest", "0"), "--longest 0"),
        ((run, recording, "--longest", "inf"), "--longest inf"),
        ((run, recording, "-o", str(tmp_path / "no" / "out.txt")), "no: no such folder"),
        ((run, recording, "-o", str(tmp_path / "a"), "--ctm", str(tmp_path / "a")), "give two files"),
    ):
        capsys.readouterr()
        assert speechdp(["transcribe", *arguments]) == 1
        printed = capsys.readouterr()
        assert message in printed.err and printed.err.count("\n") == 1 and printed.out == ""
    assert (tmp_path / "out.txt").read_text() == "mine"
    assert speechdp(["transcribe", run, str(tmp_path / "no.wav"), recording]) == 1
    printed = capsys.readouterr()
    assert "no.wav: unreadable audio" in printed.err
    assert printed.out.startswith(trained.recordings[0].stem)  # the others are not lost
    kept.rename(trained.run / "gone")
    try:
        assert speechdp(["transcribe", run, recording]) == 1
        assert "keeps no lexicon" in capsys.readouterr().err
    finally:
        (trained.run / "gone").rename(kept)
