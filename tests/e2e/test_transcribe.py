"""`speechdp transcribe`: recordings of real speech, alone and joined, by a model trained for it."""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import signal
import types
import wave
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch

from speechdp.cli.main import run as speechdp
from speechdp.data.kaldi.matrix import read_matrix, read_scp
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.description import keep_description
from speechdp.decode.graphs.graph import Grammar
from speechdp.decode.recogniser import DecodingOptions
from speechdp.decode.transcribe import (
    Recording,
    TimedWord,
    Transcriber,
    Transcription,
    kept_data,
    usual_piece_s,
)
from speechdp.errors import ConfigError, RunError, SpeechDPError
from speechdp.labels import decision_tree
from speechdp.process.ending import Ended
from speechdp.tasks.model_file import load_model
from speechdp.train import tied_states
from speechdp.trained import AcousticModel
from tests.helpers.corpora import TrainedOnFsdd, tone, trained_on_fsdd

OPTIONS = ("--layers", "1", "--cells", "32", "--epochs", "8", "--batch-size", "4", "--learning-rate", "0.01")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedOnFsdd:
    made = trained_on_fsdd(tmp_path_factory.mktemp("transcribe"), *OPTIONS)
    assert speechdp(["decode", str(made.run), str(made.data), "--backend", "serial"]) == 0
    return made


def test_a_file_is_heard_as_in_a_data_directory(
    trained: TrainedOnFsdd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    files = [str(path) for path in trained.recordings]
    ctm = tmp_path / "words.ctm"
    assert speechdp(["transcribe", str(trained.run), *files, "--ctm", str(ctm)]) == 0
    printed = capsys.readouterr()
    assert ", peak memory " in printed.err
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


def test_a_model_in_python_hears_what_the_commands_hear(trained: TrainedOnFsdd, tmp_path: Path) -> None:
    model = AcousticModel(trained.run)
    lines = (trained.run / "hypotheses" / "test.txt").read_text().splitlines()
    heard = [model.transcribe(path).line().strip() for path in trained.recordings]
    assert sorted(heard) == sorted(lines)
    path = trained.recordings[0]
    integers, rate = soundfile.read(path, dtype="int16")
    floats = torch.from_numpy(integers / 32768)
    assert model.transcribe(floats, rate).words == model.transcribe(str(path)).words
    features = model.features(path)
    assert np.array_equal(model.features(integers, rate), features)
    assert np.array_equal(model.features(floats, rate), features)
    archive, scp = tmp_path / "test.ark", tmp_path / "test.scp"
    written = ("-o", str(archive), "--scp", str(scp), "--kind", "log_posterior")
    assert speechdp(["posteriors", str(trained.run), str(trained.data), *written]) == 0
    expected = read_matrix(read_scp(scp)[path.stem], path.stem)
    np.testing.assert_allclose(model.log_posteriors(features), expected, atol=1e-4)
    assert model.class_names[:4] == ("SIL_0", "SIL_1", "SIL_2", "AH_0")
    assert len(model.class_names) == len(model.log_priors) == expected.shape[1]


def test_what_was_tuned_is_used_unless_something_is_given(
    trained: TrainedOnFsdd, capsys: pytest.CaptureFixture[str]
) -> None:
    run, recording = str(trained.run), str(trained.recordings[0])
    assert speechdp(["transcribe", run, recording]) == 0
    assert "as decode --tune-on" not in capsys.readouterr().err
    before = (trained.run / "wer-test.json").read_bytes()
    tuned = ["decode", run, str(trained.data), "--tune-on", "dev", "--backend", "serial"]
    try:
        assert speechdp(tuned) == 0
        chosen = json.loads((trained.run / "wer-test.json").read_text())["tuning"]["chosen"]
        capsys.readouterr()
        assert speechdp(["transcribe", run, recording]) == 0
        said = capsys.readouterr().err
        assert f"speechdp: acoustic-scale {chosen['acoustic_scale']:g}, prior-scale " in said
        assert "as decode --tune-on dev chose them" in said
        assert speechdp(["transcribe", run, recording, "--lm-scale", "1"]) == 0
        said = capsys.readouterr().err
        assert "as decode --tune-on" not in said
        assert "speechdp: --lm-scale is given, so what decode --tune-on dev chose (acoustic-scale " in said
    finally:
        (trained.run / "wer-test.json").write_bytes(before)
        (trained.run / "tuned.json").unlink()


def test_states_in_context(
    trained: TrainedOnFsdd,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that knows them hears files as in a data directory, and is judged on data prepared like it."""
    monkeypatch.setattr(decision_tree, "_MIN_GAIN", 20.0)
    monkeypatch.setattr(tied_states, "grow", functools.partial(decision_tree.grow, min_frames=20))
    run = tmp_path / "run"
    targets = ("--alignments", str(trained.run / "alignments" / "0"), "--context", "both")
    assert speechdp(["train", str(trained.data), str(run), "--backend", "serial", *targets, *OPTIONS]) == 0
    tying = load_model(run, torch.device("cpu")).tying
    assert tying is not None and tying.num_classes > tying.inventory.num_classes
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for path in trained.recordings:
        (corpus / path.name).symlink_to(path)
    like = ["--like", str(run), "--workers", "1"]
    assert speechdp(["prepare", str(corpus), str(tmp_path / "like"), *like]) == 0
    assert speechdp(["decode", str(run), str(tmp_path / "like"), "--backend", "serial"]) == 0
    capsys.readouterr()
    files, ctm = [str(path) for path in trained.recordings], tmp_path / "words.ctm"
    assert speechdp(["transcribe", str(run), *files, "--ctm", str(ctm)]) == 0
    printed = capsys.readouterr().out
    hypotheses = (run / "hypotheses" / "test@like.txt").read_text()
    assert sorted(printed.splitlines()) == sorted(hypotheses.splitlines())
    digits = ("zero", "one", "two", "three", "four")
    right = [line.split()[1:] == [digits[int(line[0])]] for line in printed.splitlines()]
    assert sum(right) > 0.6 * len(right), printed
    sure = [float(line.split()[-1]) for line in ctm.read_text().splitlines()]
    assert sure and all(0 <= value <= 1 for value in sure) and np.median(sure) > 0.3
    names = AcousticModel(run).class_names
    assert len(set(names)) == tying.num_classes and names[0] == "SIL_0.0"


def test_a_model_of_ctc_hears_words_and_when_they_were_spoken(
    trained: TrainedOnFsdd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, ctm = tmp_path / "run", tmp_path / "words.ctm"
    options = (*OPTIONS, "--epochs", "40", "--criterion", "ctc")  # too few for all words
    assert speechdp(["train", str(trained.data), str(run), "--backend", "serial", *options]) == 0
    capsys.readouterr()
    files = [str(path) for path in trained.recordings]
    assert speechdp(["transcribe", str(run), *files, "--ctm", str(ctm)]) == 0
    digits = ("zero", "one", "two", "three", "four")
    printed = capsys.readouterr().out.splitlines()
    right = [line.split()[1:] == [digits[int(line[0])]] for line in printed]
    heard = [hit for hit, line in zip(right, printed, strict=True) if len(line.split()) > 1]
    assert len(heard) >= 2 and sum(heard) >= 0.6 * len(heard), printed
    times = [line.split() for line in ctm.read_text().splitlines()]
    long = {name: soundfile.info(path).duration for name, path in zip(map(str, files), files, strict=True)}
    assert times and all(float(since) >= 0 and float(last) > 0 for _, _, since, last, *_ in times)
    assert all(float(since) + float(last) <= max(long.values()) + 0.02 for _, _, since, last, *_ in times)
    assert all(0 <= float(sure) <= 1 for *_, sure in times)
    model = AcousticModel(run)
    assert [model.transcribe(path).line().split() for path in files] == [line.split() for line in printed]
    assert model.class_names[:2] == ("<blank>", "AH") and not model.log_priors.any()
    with pytest.raises(ConfigError, match=r"^prior_scale has no effect with a model of --criterion ctc"):
        AcousticModel(run, prior_scale=0.5)
    refused = speechdp(["transcribe", str(run), *files, "--prior-scale", "0.5"])
    assert refused == 1
    assert "--prior-scale has no effect with a model of --criterion ctc" in capsys.readouterr().err


def test_the_channels_of_a_file_are_heard_each_by_itself(
    trained: TrainedOnFsdd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [tmp_path / "left.wav", tmp_path / "right.wav"]
    waves = [soundfile.read(path, dtype="float32")[0] for path in trained.recordings[:2]]
    length = max(map(len, waves))
    waves = [np.pad(samples, (0, length - len(samples))) for samples in waves]
    for path, samples in zip(sides, waves, strict=True):
        soundfile.write(path, samples, 8000)
    call = tmp_path / "call.wav"
    soundfile.write(call, np.stack(waves, axis=1), 8000)

    def heard(path: Path, *options: str, run: Path = trained.run) -> list[list[str]]:
        assert speechdp(["transcribe", str(run), str(path), *options]) == 0
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    capsys.readouterr()
    alone = [heard(path)[0][1:] for path in sides]
    assert all(alone)
    assert heard(call, "--channel", "each") == [["call-1", *alone[0]], ["call-2", *alone[1]]]
    times = [
        [("call", str(n), *line[2:]) for line in heard(path, "--ctm", "-")] for n, path in enumerate(sides, 1)
    ]
    each = heard(call, "--channel", "each", "--ctm", "-")
    assert [tuple(line) for line in each] == [*times[0], *times[1]]
    assert [tuple(line) for line in heard(call, "--channel", "2", "--ctm", "-")] == times[1]
    assert heard(sides[0], "--channel", "each") == [["left", *alone[0]]]
    # Nothing is guessed, but what the training data were.
    assert speechdp(["transcribe", str(trained.run), str(call)]) == 1
    assert "call.wav: has 2 channels; add --channel each for a transcript of every" in capsys.readouterr().err
    shutil.copytree(trained.run, tmp_path / "run")
    record = tmp_path / "run" / "trained_on" / "data.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "channel": 2}))
    (record.parent / "files.json").unlink()  # a change on purpose
    assert heard(call, run=tmp_path / "run") == [["call", *alone[1]]]
    assert heard(call, "--channel", "1", run=tmp_path / "run") == [["call", *alone[0]]]
    # A name of a channel that is also that of a file.
    sides[0].rename(tmp_path / "call-1.wav")
    assert speechdp(["transcribe", str(trained.run), str(tmp_path), "--channel", "each"]) == 1
    said = capsys.readouterr().err
    assert "both have a transcript named call-1; rename one, or transcribe them in two commands" in said
    assert speechdp(["transcribe", str(trained.run), str(call), "--channel", "both"]) == 1
    assert (
        "--channel both: give the number of a channel, 1 for the first, mix, or each"
        in capsys.readouterr().err
    )


def test_a_long_recording_is_cut_and_its_times_go_on(trained: TrainedOnFsdd, tmp_path: Path) -> None:
    pause = np.zeros(2400, np.float32)
    waves = [soundfile.read(path, dtype="float32")[0] for path in trained.recordings]
    starts = np.cumsum([0, *(len(wave) + len(pause) for wave in waves)]) / 8000
    joined = np.concatenate([part for wave in waves for part in (wave, pause)])
    soundfile.write(tmp_path / "long.wav", joined, 8000)
    options = DecodingOptions(acoustic_scale=0.2, nbest=4, lattice_beam=14.0)
    model = load_model(trained.run, torch.device("cpu"))
    found = Transcriber(model, kept_data(trained.run), options, longest_s=2.0).transcribe(
        Recording("long", "long", tmp_path / "long.wav")
    )
    times = [(word.start_s, word.start_s + word.duration_s) for word in found.words]
    assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(times))
    assert found.sampling_rate == 8000
    assert found.duration_s == pytest.approx(starts[-1]) and times[-1][1] <= found.duration_s
    costs = [each.cost for each in found.candidates]
    assert 1 < len(costs) <= 4 and costs == sorted(costs)
    assert found.candidates[0].words == tuple(word.word for word in found.words)
    assert found.nbest().startswith(f"long-1 {costs[0]:.3f} ")
    # Nearly every recording has a word that was heard while it was spoken.
    middles = [(start + end) / 2 for start, end in times]
    heard = [any(a <= m < b for m in middles) for a, b in itertools.pairwise(starts)]
    assert sum(heard) >= 0.8 * len(heard)


def test_pieces_are_as_long_as_what_the_model_has_learnt_from(trained: TrainedOnFsdd, tmp_path: Path) -> None:
    kept = kept_data(trained.run)
    assert usual_piece_s(kept) == 5.0  # its utterances are single digits
    for mean_s, usual_s in ((3.8, 5.7), (12.0, 18.0), (60.0, 30.0)):
        for split in kept.splits.values():
            object.__setattr__(split, "frames", round(100 * mean_s * split.utterances))  # frozen
        assert usual_piece_s(kept) == pytest.approx(usual_s, abs=0.1)


def test_a_run_that_lacks_a_part_of_what_it_keeps_is_not_used_without_it(
    trained: TrainedOnFsdd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = str(trained.recordings[0])
    run = shutil.copytree(trained.run, tmp_path / "run")
    kept = run / "trained_on"

    def heard() -> str:
        capsys.readouterr()
        assert speechdp(["transcribe", str(run), recording]) == 0
        return capsys.readouterr().out

    def refused() -> str:
        capsys.readouterr()
        assert speechdp(["transcribe", str(run), recording]) == 1
        printed = capsys.readouterr()
        with pytest.raises(SpeechDPError) as raised:
            AcousticModel(run).transcribe(recording)
        assert printed.out == "" and printed.err.count("\n") == 1 and str(raised.value) in printed.err
        return printed.err

    whole = heard()
    (kept / "lm.arpa.gz").unlink()
    (kept / "lm.json").unlink()
    remedy = (
        "copy it again from the run, or from the data that were trained on, or delete files.json beside it"
    )
    assert f"{kept / 'lm.arpa.gz'}: is missing; {remedy} to do without it" in refused()
    for name in ("lm.arpa.gz", "lm.json"):
        shutil.copy(trained.data / name, kept)  # as it says
    assert heard() == whole
    lines = (kept / "lexicon.txt").read_text().splitlines(keepends=True)
    (kept / "lexicon.txt").write_text("".join(lines[:-1]))
    assert f"{kept / 'lexicon.txt'}: was changed (" in refused()
    (kept / "files.json").unlink()  # on purpose, and in runs of earlier versions
    heard()


def test_decoding_tells_of_training_data_that_were_changed_since(
    trained: TrainedOnFsdd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, data = (
        shutil.copytree(trained.run, tmp_path / "run"),
        shutil.copytree(trained.data, tmp_path / "data"),
    )

    def warned() -> str:
        capsys.readouterr()
        assert speechdp(["decode", str(run), str(data), "--backend", "serial"]) == 0
        return capsys.readouterr().err

    assert "since" not in warned()
    lines = (data / "lexicon.txt").read_text().splitlines(keepends=True)
    (data / "lexicon.txt").write_text("".join(lines[:-1]))
    (data / "lm.arpa.gz").unlink()
    (data / "lm.json").unlink()
    assert speechdp(["decode", str(run), str(data), "--backend", "serial"]) == 1
    (data / "files.json").unlink()  # as it says
    since = f"{data}: changed, removed or added since {run} was trained: lexicon.txt"
    assert f"{since}, lm.arpa.gz, lm.json; used as found: if" in warned()
    for name in ("lexicon.txt", "lm.arpa.gz", "lm.json"):
        shutil.copy(run / "trained_on" / name, data)  # as it says
    (data / "lexicon.txt").write_text("".join(reversed(lines)))  # as long
    assert f"{since}; used as found" in warned()
    (run / "trained_on" / "files.json").write_text("{")  # which decode does without
    assert "since" not in warned()


def test_a_model_is_not_used_with_what_the_run_of_other_data_keeps(
    trained: TrainedOnFsdd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(trained.run, tmp_path / "run")
    other = shutil.copytree(trained.data, tmp_path / "other")
    values = json.loads((other / "data.json").read_text())
    (other / "data.json").write_text(json.dumps({**values, "split": "random:"}))
    keep_description(Dataset.open(other), run / "trained_on")
    assert speechdp(["transcribe", str(run), str(trained.recordings[0])]) == 1
    said = (
        f"{run / 'trained_on'}: describes other data than the model beside it was trained on; copy trained_on"
    )
    assert said in capsys.readouterr().err
    (run / "trained_on" / "files.json").unlink()
    assert speechdp(["transcribe", str(run), str(trained.recordings[0])]) == 0


def test_what_cannot_be_transcribed(
    trained: TrainedOnFsdd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, recording = str(trained.run), str(trained.recordings[0])
    (tmp_path / "no.wav").write_text("no audio")
    (tmp_path / "out.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    copy = tmp_path / "copies" / trained.recordings[0].name
    copy.parent.mkdir()
    copy.write_bytes(trained.recordings[0].read_bytes())
    with wave.open(str(tmp_path / "short.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(20))
    kept = trained.run / "trained_on"
    for arguments, message in (
        ((run, recording, "-o", str(tmp_path / "out.txt")), "out.txt: exists; give another name"),
        ((str(tmp_path / "run"), recording), "run: no such folder"),
        ((run, str(tmp_path / "empty")), "empty: holds no audio"),
        ((recording, run), f"{run}: is a run, and holds no audio; RUN stands first: transcribe RUN FILE"),
        ((run, recording, recording, "--ctm", str(tmp_path / "ctm")), "is given twice; leave one out"),
        ((run, recording, str(copy), "--ctm", str(tmp_path / "ctm")), "are both named"),
        ((run, str(tmp_path / "gone.wav")), "gone.wav: no such audio file"),  # nothing is summed up
        ((run, recording, "--longest", "0"), "--longest 0"),
        ((run, recording, "--nbest", "3"), "--nbest N and --nbest-out FILE go together"),
        ((run, recording, "--rescore-weight", "0.5"), "--rescore-weight goes with --rescore-lm FILE"),
        ((run, recording, "--lattice-beam", "5"), "--lattice-beam goes with --nbest N or --rescore-lm FILE"),
        ((run, recording, "--longest", "inf"), "--longest inf"),
        ((run, recording, "-o", str(tmp_path / "no" / "out.txt")), "no: no such folder; give a name in"),
        ((run, recording, "--ctm", str(tmp_path / "no.wav" / "ctm")), "no.wav: is a file, not a folder"),
        ((run, recording, "-o", str(tmp_path / "a"), "--ctm", str(tmp_path / "a")), "give one for each"),
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
    assert speechdp(["transcribe", run, str(tmp_path / "short.wav")]) == 0
    printed = capsys.readouterr()
    assert printed.out == "short\n" and "short.wav: too short to hold a word; leave it out" in printed.err
    assert "1 recording, 0.0 s" in printed.err
    kept.rename(trained.run / "gone")
    try:
        assert speechdp(["transcribe", run, recording]) == 1
        assert "keeps no lexicon" in capsys.readouterr().err
    finally:
        (trained.run / "gone").rename(kept)


class Echo:
    """In place of a model: hears the name of each file, and ends where it is told.

    Attributes:
        ends: what ends it, by the name of the recording.
        alive: what it has returned, while somebody keeps it.
    """

    def __init__(self, ends: dict[str, BaseException] | None = None) -> None:
        self.ends = ends or {}
        self.alive = weakref.WeakSet[Transcription]()
        self.most_alive = 0
        self.remark = ""

    def __call__(self, *_: object) -> Echo:
        return self

    def transcribe(self, recording: Recording) -> Transcription:
        name = recording.name
        if name in self.ends:
            raise self.ends[name]
        self.most_alive = max(self.most_alive, len(self.alive))
        found = Transcription(name, (TimedWord(f"word-{name}", 0.5, 0.25, 0.5),), 2.0, 16000)
        self.alive.add(found)
        return found


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Echo:
    heard = Echo()
    monkeypatch.setattr("speechdp.decode.transcribe.Transcriber", heard)
    kept = types.SimpleNamespace(sampling_rate=16000, channel=None)
    monkeypatch.setattr("speechdp.decode.transcribe.kept_data", lambda _run: kept)
    monkeypatch.setattr("speechdp.decode.transcribe.grammar_of", lambda _kept: Grammar.WORD_LOOP)
    model = SimpleNamespace(config={})
    monkeypatch.setattr("speechdp.tasks.model_file.load_model", lambda *_, **__: model)
    return heard


def recordings_in(folder: Path, *names: str) -> str:
    folder.mkdir()
    for name in names:
        soundfile.write(folder / name, tone(0.1, 16000), 16000, format="WAV")
    return str(folder)


@pytest.mark.parametrize(
    ("end", "exit_code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (Ended(signal.SIGTERM), 143, "ended by SIGTERM"),
        (RunError("the model's output is NaN"), 1, "the model's output is NaN"),
    ],
)
def test_what_was_finished_before_an_end_is_left(
    echo: Echo,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    end: BaseException,
    exit_code: int,
    said: str,
) -> None:
    folder = recordings_in(tmp_path / "talks", "a.wav", "b.wav", "c.wav", "d.wav")
    out, ctm = tmp_path / "out.txt", tmp_path / "words.ctm"
    command = ["transcribe", "RUN", folder, "-o", str(out), "--ctm", str(ctm)]
    echo.ends = {"c": end}
    keep = "move it away, or --overwrite replaces it"
    assert speechdp(command) == exit_code
    assert capsys.readouterr().err == (
        f"speechdp: {out}.partial: holds the finished part, 2 recordings; {keep}\n"
        f"speechdp: {ctm}.partial: holds the finished part, 2 recordings; {keep}\n"
        f"speechdp: {said}\n"
    )
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == [
        "out.txt.partial",
        "words.ctm.partial",
    ]
    assert Path(f"{out}.partial").read_text() == "a word-a\nb word-b\n"
    assert Path(f"{ctm}.partial").read_text() == "a 1 0.50 0.25 word-a 0.50\nb 1 0.50 0.25 word-b 0.50\n"
    # They may be hours of work.
    echo.ends = {}
    assert speechdp(command) == 1
    assert "out.txt.partial: exists; give another name or add --overwrite" in capsys.readouterr().err
    assert speechdp([*command, "--overwrite"]) == 0
    assert out.read_text() == "a word-a\nb word-b\nc word-c\nd word-d\n"
    assert ctm.read_text().count("\n") == 4 and not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("outputs", "printed", "files"),
    [
        (["-o", "-"], "a word-a\n", {}),
        (["--ctm", "-"], "a 1 0.50 0.25 word-a 0.50\n", {}),
        (["-o", "out", "--ctm", "-"], "a 1 0.50 0.25 word-a 0.50\n", {"out": "a word-a\n"}),
        (["-o", "-", "--ctm", "-"], "", {}),
    ],
)
def test_a_dash_is_standard_output(
    echo: Echo,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outputs: list[str],
    printed: str,
    files: dict[str, str],
) -> None:
    recordings_in(tmp_path / "talks", "a.wav")
    monkeypatch.chdir(tmp_path)
    assert speechdp(["transcribe", "RUN", "talks", *outputs]) == (0 if printed else 1)
    said = capsys.readouterr()
    assert said.out == printed and ("only one of --out, --ctm" in said.err) == (not printed)
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == files


@pytest.mark.parametrize(
    "names", [("x.partial", "x"), ("x", "x.partial"), ("x", "link/x"), ("x", "link/x.partial")]
)
def test_no_file_grows_under_the_name_of_another(
    echo: Echo, tmp_path: Path, capsys: pytest.CaptureFixture[str], names: tuple[str, str]
) -> None:
    folder = recordings_in(tmp_path / "talks", "a.wav")
    (tmp_path / "link").symlink_to(tmp_path)
    out, ctm = (str(tmp_path / name) for name in names)
    assert speechdp(["transcribe", "RUN", folder, "-o", out, "--ctm", ctm]) == 1
    said = capsys.readouterr().err
    assert "two of --out, --ctm and --nbest-out are the same file, or would be while one is written" in said
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


@pytest.mark.parametrize("option", ["--out", "--ctm"])
@pytest.mark.parametrize(
    "name", ["talks/a.wav", "link.wav", "talks/b"]
)  # b.partial is what b is until it is whole
def test_no_recording_is_replaced_by_its_words(
    echo: Echo, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, name: str
) -> None:
    folder = Path(recordings_in(tmp_path / "talks", "a.wav", "b.partial"))
    (tmp_path / "link.wav").symlink_to(folder / "a.wav")
    before = [path.read_bytes() for path in sorted(folder.iterdir())]
    given = [str(folder), str(folder / "b.partial")]
    assert speechdp(["transcribe", "RUN", *given, option, str(tmp_path / name), "--overwrite"]) == 1
    assert ": is a recording to be recognised, and --out, --ctm or" in capsys.readouterr().err
    assert [path.read_bytes() for path in sorted(folder.iterdir())] == before


def test_where_nothing_was_finished_nothing_is_left(
    echo: Echo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recordings_in(tmp_path / "talks", "a.wav")
    echo.ends = {"a": KeyboardInterrupt()}
    (tmp_path / "out.txt").write_text("of before")
    assert speechdp(["transcribe", "RUN", folder, "-o", str(tmp_path / "out.txt"), "--overwrite"]) == 130
    assert capsys.readouterr().err == "speechdp: interrupted\n"
    assert (tmp_path / "out.txt").read_text() == "of before"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["out.txt"]


def test_many_recordings_take_no_more_memory_than_one(
    echo: Echo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recordings_in(tmp_path / "talks", *(f"{number}.wav" for number in range(5)))
    assert speechdp(["transcribe", "RUN", folder, "-o", str(tmp_path / "out.txt")]) == 0
    assert echo.most_alive <= 1
    said = capsys.readouterr().err
    assert said.startswith("speechdp: 5 recordings, 10.0 s in ") or said.startswith(
        "5 recordings, 10.0 s in "
    )
    assert "nothing found" not in said


def test_recordings_in_which_nothing_was_found_are_named(
    echo: Echo, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(recordings_in(tmp_path / "talks", *(f"{number}.wav" for number in range(7))))
    heard = {name: Transcription(name, (), 0.01, 16000, 0.01) for name in "0245"} | {
        name: Transcription(name, (TimedWord("yes", 0.5, 0.25, 0.5),), 4.0, 16000, 1.5) for name in "13"
    }
    whole = Transcription("6", (TimedWord("yes", 0.5, 0.25, 0.5),), 4.0, 16000)
    monkeypatch.setattr(echo, "transcribe", lambda recording: heard.get(recording.name, whole))
    assert speechdp(["transcribe", "RUN", str(folder), "-o", str(tmp_path / "out.txt")]) == 0
    *lines, last = [line for line in capsys.readouterr().err.splitlines() if "nothing found" in line]
    assert lines == [
        f"speechdp: {folder / '0.wav'}: nothing found in it",
        f"speechdp: {folder / '1.wav'}: nothing found in 1.50 s of its 4.00 s",
        f"speechdp: {folder / '2.wav'}: nothing found in it",
        f"speechdp: {folder / '3.wav'}: nothing found in 1.50 s of its 4.00 s",
        f"speechdp: {folder / '4.wav'}: nothing found in it",
    ]
    assert "; nothing found in 3.04 s of 6 recordings, nor in" in last  # named or not


def test_recordings_of_a_lower_rate_are_warned_of_once(
    echo: Echo, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # All files are of 16 kHz: what counts is what was read with the sound, not what another look says.
    folder = Path(recordings_in(tmp_path / "talks", *(f"{number}.wav" for number in range(4))))
    rates = {"0": 16000, "1": 8000, "2": 8000, "3": 48000}
    heard = {name: Transcription(name, (), 0.1, rate) for name, rate in rates.items()}
    monkeypatch.setattr(echo, "transcribe", lambda recording: heard[recording.name])
    assert speechdp(["transcribe", "RUN", str(folder), "-o", str(tmp_path / "out.txt")]) == 0
    (warning,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert warning == (
        f"speechdp: warning: {folder / '1.wav'} has 8000 Hz, less than the 16000 Hz that the model was "
        "trained on; expect more errors in it and others like it"
    )


def test_what_was_converted_as_advised_is_not_in_the_way(
    echo: Echo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recordings_in(tmp_path / "talks", "a.m4a", "a.wav", "b.M4A", "c.flac", "b.c.aac")
    files = [str(path) for path in sorted(Path(folder).iterdir())]
    for given in ([folder], files):
        assert speechdp(["transcribe", "RUN", *given]) == 0
        names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
        assert sorted(names) == ["a", "b", "b.c", "c"]
    # Two that can be read are two recordings.
    (Path(folder) / "a.flac").touch()
    assert speechdp(["transcribe", "RUN", folder]) == 1
    assert "are both utterance a; rename one" in capsys.readouterr().err


def test_ranks_that_would_all_do_the_same_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = recordings_in(tmp_path / "talks", "a.wav")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert speechdp(["transcribe", "RUN", folder]) == 1
    assert (
        capsys.readouterr().err
        == "speechdp: transcribe runs on one rank, not 4; give it without mpirun or srun\n"
    )


def test_an_old_run_is_told_what_decode_needs(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match="prepare the recordings and their transcripts with --like RUN and use"
    ):
        kept_data(tmp_path)


def test_standard_input_is_not_read(echo: Echo, capsys: pytest.CaptureFixture[str]) -> None:
    assert speechdp(["transcribe", "RUN", "-"]) == 1
    said = capsys.readouterr().err
    assert said == "speechdp: -: sound is not read from standard input; write it to a file first\n"


def test_a_manifest_is_no_audio(echo: Echo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.csv").write_text("audio,text\na.wav,one\n")
    assert speechdp(["transcribe", "RUN", str(tmp_path / "m.csv")]) == 1
    assert "m.csv: is a table by its name, not an audio file; give the audio files" in capsys.readouterr().err
