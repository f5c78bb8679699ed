"""Corpora prepared for a trained model: what is taken from it, what may be missing, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speechdp.cli.main import run as speechdp
from speechdp.comm.serial import SerialCommunicator
from speechdp.data.corpora.reader import read_corpus
from speechdp.data.prepare.divided_corpus import divide
from speechdp.data.prepare.like import open_like
from speechdp.data.prepare.pipeline import Prepared, prepare
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.description import keep_description
from speechdp.decode.recogniser import DecodingOptions
from speechdp.decode.split import decode_split
from speechdp.errors import ConfigError, RunError, ShardError
from speechdp.labels.hmm import StateInventory
from speechdp.labels.lexicon import Lexicon
from speechdp.language.ngram import NgramModel
from speechdp.options.prepare import LanguageModelOptions, PrepareOptions
from speechdp.parallel.run_files import RunDirectory
from tests.helpers.corpora import digit_folder, kaldi_folder, no_progress, write_tone
from tests.helpers.faulty_disk import faulty_disk, full
from tests.helpers.grammars import language_model_in
from tests.helpers.oracle import oracle
from tests.helpers.tiny_speech import write_tiny_speech


@pytest.fixture(scope="module")
def prepared_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of two speakers who say ten digits, with features that nobody chooses by default."""
    folder = tmp_path_factory.mktemp("trained")
    source = digit_folder(folder / "source", digits=10)
    options = PrepareOptions(
        (source, folder / "data"), features="mfcc", num_mel_bins=20, mean_normalise=False, workers=1
    )
    return prepare(options, no_progress).dataset.path


@pytest.fixture
def trained(prepared_once: Path, tmp_path: Path) -> Dataset:
    """Those data, to be changed by the test."""
    return Dataset.open(shutil.copytree(prepared_once, tmp_path / "trained"))


def like(source: Path, given: Path, **options: object) -> Prepared:
    paths = (source, source.with_name(f"{source.name}-data"))
    return prepare(PrepareOptions(paths, like=given, workers=1, **options), no_progress)  # type: ignore[arg-type]


def run_of(dataset: Dataset, folder: Path, *, keeps: bool = True) -> Path:
    """Begin a run of some data."""
    run = RunDirectory(folder)
    run.begin({"data": {"path": str(dataset.path), "checksum": dataset.checksum}})
    if keeps:
        assert keep_description(dataset, run.path / "trained_on") == []
    return folder


def texts_of(dataset: Dataset, split: str = "test") -> dict[str, str]:
    found = {}
    for number in range(len(dataset.shard_paths(split))):
        with dataset.open_shard(split, number) as shard:
            found |= dict(zip(shard.utterance_ids, shard.texts, strict=True))
    return found


def test_features_rate_classes_and_lexicon_are_those_of_the_model(trained: Dataset, tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "new", ("eve",), num_indices=3)  # two digits only, one speaker
    prepared = like(source, trained.path)
    dataset = prepared.dataset
    assert (dataset.features, dataset.sampling_rate) == (trained.features, trained.sampling_rate)
    assert dataset.classes_path.read_bytes() == trained.classes_path.read_bytes()
    assert dataset.lexicon_path.read_bytes() == trained.lexicon_path.read_bytes()
    assert dataset.num_classes == trained.num_classes == 60
    assert (dataset.split_names, dataset.split, dataset.alignment) == (("test",), "all:test", "flat")
    assert dataset.num_utterances("test") == 6 and prepared.notices == ()
    dataset.verify()
    with dataset.open_shard("test", 0) as shard:
        words = shard.text(0).split()
        targets = shard.read(0)[1]
    phones = Lexicon.load(dataset.lexicon_path).pronunciations[words[0]][0]
    states = [c for phone in phones for c in StateInventory.load(dataset.classes_path).classes_of(phone)]
    assert list(dict.fromkeys(targets[targets > 2].tolist())) == states


def test_a_run_serves_when_its_data_are_gone(trained: Dataset, tmp_path: Path) -> None:
    run = run_of(trained, tmp_path / "run")
    source = digit_folder(tmp_path / "new", ("eve",), num_indices=1)
    by_data = like(source, trained.path).dataset.checksum
    shutil.rmtree(trained.path)
    assert like(source, run, overwrite=True).dataset.checksum == by_data
    kept = open_like(run)
    assert (kept.checksum, kept.num_classes) == (trained.checksum, 60)


def test_runs_of_earlier_versions_lead_to_their_data(trained: Dataset, tmp_path: Path) -> None:
    run = run_of(trained, tmp_path / "run", keeps=False)
    assert open_like(run).path == trained.path
    file = trained.path / "data.json"
    file.write_text(file.read_text() + "\n")
    with pytest.raises(
        ConfigError, match=r"was trained on other data than .*trained holds now; give the data"
    ):
        open_like(run)
    shutil.rmtree(trained.path)
    with pytest.raises(
        ConfigError, match=r"keeps no copy of the settings of its data, and .*trained is gone"
    ):
        open_like(run)
    with pytest.raises(ConfigError, match="is neither a run nor a data directory"):
        open_like(tmp_path / "nothing")


def test_a_larger_lexicon_cuts_no_classes(trained: Dataset, tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "new", ("eve",), num_indices=1)
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text(trained.lexicon_path.read_text() + "nine-one N AY N W AH N\n")
    dataset = like(source, trained.path, lexicon=lexicon).dataset
    assert dataset.num_classes == 60 and "nine-one" in Lexicon.load(dataset.lexicon_path)
    # What decoding compares is the same: the model fits.
    oracle_model = oracle(60)
    decode_split(oracle_model, dataset, "test", tmp_path / "run", DecodingOptions(), SerialCommunicator())
    lexicon.write_text("zero Z IH R OW\none W AH N\nvoila V W A L A\n")
    with pytest.raises(
        ConfigError, match=r"lexicon\.txt: 2 phones are not among those of the model, first A;"
    ):
        like(source, trained.path, lexicon=lexicon, overwrite=True)


def test_audio_without_transcripts_can_be_decoded(trained: Dataset, tmp_path: Path) -> None:
    for name in ("ann/a", "ann/b", "c"):
        write_tone(tmp_path / "new" / f"{name}.wav")
    prepared = like(tmp_path / "new", trained.path)
    dataset = prepared.dataset
    assert texts_of(dataset) == {"a": "", "b": "", "c": ""} and dataset.alignment == "none"
    assert prepared.notices == (
        "no utterance has a transcript: the data can be neither trained on nor decoded, as decode counts "
        "errors; use speechdp transcribe RUN FILES to recognise the words, speechdp posteriors to score the "
        "frames",
    )
    assert dataset.splits["test"].speakers == 2
    dataset.verify()


def test_a_kaldi_directory_may_lack_text(trained: Dataset, tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path / "new")
    (source / "text").write_text("utt0 -\nutt1 ONE TWO\n")
    assert texts_of(like(source, trained.path).dataset) == {"utt0": "", "utt1": "one two", "utt2": ""}
    (source / "text").unlink()
    prepared = like(source, trained.path, overwrite=True, store="audio")
    assert texts_of(prepared.dataset) == {"utt0": "", "utt1": "", "utt2": ""}
    with pytest.raises(ConfigError, match="text: cannot be read"):
        prepare(PrepareOptions((source, tmp_path / "data")), no_progress)


def test_unknown_words_are_counted_and_leave_no_targets(trained: Dataset, tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path / "new")
    (source / "text").write_text("utt0 one shoe\nutt1 two shoe tree\nutt2 Two\n")
    prepared = like(source, trained.path)
    assert prepared.dataset.alignment == "none"
    assert prepared.notices == (
        "2 words (3 occurrences) are not in the lexicon and will be errors, e.g. shoe tree; the data can be "
        "decoded, but not trained on",
    )
    assert texts_of(prepared.dataset)["utt2"] == "two"
    result = decode_split(
        oracle(60), prepared.dataset, "test", tmp_path / "run", DecodingOptions(), SerialCommunicator()
    )
    assert result.wer.words == 6


def test_splits_may_be_asked_for(trained: Dataset, tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "new", ("eve", "fay", "guy"), num_indices=3)
    prepared = like(source, trained.path, split="speakers:dev=0.3,test=0.3")
    assert prepared.dataset.split_names == ("train", "dev", "test")
    assert like(
        source, trained.path, split="speaker:test=eve+fay+guy", overwrite=True
    ).dataset.split_names == ("test",)


def test_audio_of_another_rate_is_resampled_and_said(trained: Dataset, tmp_path: Path) -> None:
    write_tone(tmp_path / "new" / "0_eve_0.wav", 0.5, 16000)
    write_tone(tmp_path / "new" / "0_eve_1.wav", 0.5, 8000)
    prepared = like(tmp_path / "new", trained.path)
    assert prepared.dataset.sampling_rate == 8000 and prepared.dataset.num_frames("test") == 100
    assert prepared.notices == ("resampled 1 file to 8000 Hz",)
    write_tone(tmp_path / "new" / "0_eve_1.wav", 0.5, 4000)
    (warning,) = like(tmp_path / "new", trained.path, overwrite=True).notices
    assert warning.startswith(
        "warning: 1 file has 4000 Hz, less than the 8000 Hz that the model was trained on"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--features", "mfcc"], "--like takes all settings of the features"),
        (["--num-mel-bins", "24"], "--like takes all settings of the features"),
        (["--resample", "8000"], "--like takes all settings of the features"),
        (["--task", "synthesis"], "--like prepares a corpus for a recogniser"),
        (
            ["--lexicon", "graphemes"],
            "spells the words of --lm beside --like, .*add --lm FILE",
        ),
        (["--unknown-words", "skip"], "--unknown-words does not go with --like"),
    ],
)
def test_settings_beside_like_are_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert speechdp(["prepare", "in", "out", "--like", "run", *options]) == 1
    assert re.search(message, capsys.readouterr().err)


def test_data_are_not_made_in_those_they_are_like(trained: Dataset, tmp_path: Path) -> None:
    options = PrepareOptions((tmp_path / "corpus", trained.path / "more"), like=trained.path)
    with pytest.raises(ConfigError, match=r"lies in .*, which holds prepared data \(data\.json\); give a f"):
        prepare(options, no_progress)
    assert not (trained.path / "more").exists()


def test_data_that_are_no_recognisers_are_refused(tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "new", ("eve",), num_indices=1)
    with pytest.raises(
        ConfigError, match=r"--like .*speech: is for synthesis; give the run or the data of a"
    ):
        like(source, write_tiny_speech(tmp_path / "speech").path)


def test_the_advice_of_decoding_is_what_helps(trained: Dataset, tmp_path: Path) -> None:
    source = digit_folder(tmp_path / "new", ("eve",), num_indices=1)
    config = {"classes_sha256": StateInventory.load(trained.classes_path).sha256}
    model = oracle(60)
    object.__setattr__(model, "config", config)
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text("zero Z IH R OW\none W AH N\n")
    plain = prepare(
        PrepareOptions((source, tmp_path / "plain"), split="random:dev=0", lexicon=lexicon),
        no_progress,
    ).dataset
    with pytest.raises(
        ConfigError, match=r"is not the class list the model was trained on; .* with --like RUN"
    ):
        decode_split(model, plain, "train", tmp_path / "run", DecodingOptions(), SerialCommunicator())
    same = like(source, trained.path).dataset
    decode_split(model, same, "test", tmp_path / "run", DecodingOptions(), SerialCommunicator())


def test_what_a_run_keeps_is_whole(trained: Dataset, tmp_path: Path) -> None:
    run = run_of(trained, tmp_path / "run")
    names = sorted(path.name for path in (run / "trained_on").iterdir())
    assert names == ["classes.txt", "data.json", "files.json", "lexicon.txt"]
    for name in set(names) - {"files.json"}:
        assert (run / "trained_on" / name).read_bytes() == (trained.path / name).read_bytes()
    assert json.loads((run / "run.json").read_text())["data"]["checksum"] == trained.checksum
    assert np.array_equal(open_like(run).num_frames("train"), trained.num_frames("train"))


def test_what_a_run_keeps_is_copied_again_only_where_the_data_have_changed(
    trained: Dataset, tmp_path: Path
) -> None:
    (trained.path / "G.fst").write_bytes(bytes(3 << 20))
    (trained.path / "words.txt").write_text("one 1\n")
    kept = run_of(trained, tmp_path / "run") / "trained_on"
    assert (kept / "G.fst").read_bytes() == bytes(3 << 20)
    files = {path.name: path.stat().st_ino for path in kept.iterdir()}
    assert keep_description(trained, kept) == []
    assert {path.name: path.stat().st_ino for path in kept.iterdir()} == files
    (trained.path / "words.txt").write_text("two 1\nthree 2\n")
    (trained.path / "G.fst").unlink()
    assert keep_description(trained, kept) == []
    assert (kept / "words.txt").read_text() == "two 1\nthree 2\n"
    assert files.keys() - {path.name for path in kept.iterdir()} == {"G.fst"}


def test_a_language_model_that_cannot_be_read_is_left_out_of_a_run(trained: Dataset, tmp_path: Path) -> None:
    (trained.path / "G.fst").write_text("first")
    kept = run_of(trained, tmp_path / "run") / "trained_on"
    (trained.path / "words.txt").mkdir()
    (notice,) = keep_description(trained, kept)
    assert "holds no language model: " in notice and "words.txt: cannot be read" in notice
    names = sorted(path.name for path in kept.iterdir())
    assert names == ["classes.txt", "data.json", "files.json", "lexicon.txt"]
    (trained.path / "lexicon.txt").unlink()
    (trained.path / "lexicon.txt").mkdir()
    with pytest.raises(ShardError, match=r"lexicon\.txt: cannot be read \(Is a directory\)"):
        keep_description(trained, kept)


def test_a_full_disk_refuses_what_a_run_keeps_in_a_line(trained: Dataset, tmp_path: Path) -> None:
    with faulty_disk(0, full()) as disk:
        assert keep_description(trained, tmp_path / "whole") == []
    for number in range(1, disk.num_operations + 1):
        kept = tmp_path / str(number)
        try:
            with faulty_disk(number, full()):
                keep_description(trained, kept)
        except RunError as error:
            assert str(error).startswith(f"{kept}: cannot be written (No space left on device)")
            assert not (kept / "data.json").exists() and not list(kept.glob(".*"))


def run_with_language_model(tmp_path: Path) -> tuple[Path, Dataset]:
    """Return a run, and the data that it was trained on."""
    source = kaldi_folder(tmp_path / "old", 4)
    made = PrepareOptions(
        (source, tmp_path / "old-data"),
        split="random:dev=0",
        for_language_model=LanguageModelOptions(lm_order=2),
    )
    data = prepare(made, no_progress).dataset
    return run_of(data, tmp_path / "run"), data


def test_the_language_model_goes_along_and_may_be_another(tmp_path: Path) -> None:
    run, _ = run_with_language_model(tmp_path)
    assert (run / "trained_on" / "lm.arpa.gz").is_file()
    new = kaldi_folder(tmp_path / "new", 2)
    (new / "text").write_text("utt0 one two\nutt1 two shoe\n")
    dataset = like(new, run).dataset
    kept, taken = (language_model_in(path) for path in (run / "trained_on", dataset.path))
    assert isinstance(kept, NgramModel) and isinstance(taken, NgramModel) and taken.words == kept.words
    (test,) = json.loads((dataset.path / "lm.json").read_text())["splits"].values()
    assert (test["words"], test["unknown"]) == (4, 1)
    (tmp_path / "G.arpa").write_text(
        "\\data\\\nngram 1=3\n\n\\1-grams:\n-0.3 two\n-0.6 </s>\n-99 <s>\n\n\\end\\\n"
    )
    other = like(new, run, overwrite=True, for_language_model=LanguageModelOptions(lm=tmp_path / "G.arpa"))
    model = language_model_in(other.dataset.path)
    assert isinstance(model, NgramModel) and "two" in model.words and "one" not in model.words
    (tmp_path / "lexicon.txt").write_text("uan W AH N\n")
    without = like(new, run, overwrite=True, lexicon=tmp_path / "lexicon.txt")
    assert language_model_in(without.dataset.path) is None
    assert without.notices[0] == (
        f"without a language model: {run / 'trained_on' / 'lm.arpa.gz'}: none of its words is in the "
        "lexicon; --lm takes another"
    )


def test_a_changed_copy_is_refused_with_the_options_that_replace_it(tmp_path: Path) -> None:
    run, data = run_with_language_model(tmp_path)
    kept, new = run / "trained_on", kaldi_folder(tmp_path / "new", 4)
    (kept / "lm.arpa.gz").unlink()
    (kept / "lm.json").unlink()
    with pytest.raises(
        RunError, match=r"lm\.arpa\.gz: is missing; .*, or give another with --lm FILE, or del"
    ):
        like(new, run, overwrite=True)
    estimated = LanguageModelOptions(lm_order=2)
    like(
        new, run, overwrite=True, split="random:dev=0", for_language_model=estimated
    )  # does not use that of the run
    (kept / "lexicon.txt").write_text("".join((kept / "lexicon.txt").read_text().splitlines(True)[:-1]))
    with pytest.raises(
        RunError, match=r"lexicon\.txt: was changed \(.*, or give another with --lexicon FILE"
    ):
        like(new, run, overwrite=True)
    lexicon = data.lexicon_path
    like(new, run, overwrite=True, split="random:dev=0", lexicon=lexicon, for_language_model=estimated)
    (kept / "classes.txt").write_text("0 SIL_0\n")
    with pytest.raises(RunError, match=r"classes\.txt: was changed .* trained on, or delete files\.json"):
        like(new, run, overwrite=True, lexicon=lexicon)


def test_utterances_without_transcript_are_no_texts_of_a_language_model(
    trained: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = kaldi_folder(tmp_path / "new", 4)
    (source / "text").write_text("utt0 one two\nutt1 -\nutt2 one two\n")
    arpa = tmp_path / "G.arpa"
    arpa.write_text("\\data\\\nngram 1=4\n\n\\1-grams:\n-0.1 one\n-0.2 two\n-2.0 </s>\n-99 <s>\n\n\\end\\\n")
    options = LanguageModelOptions(lm=arpa)
    dataset = like(source, trained.path, for_language_model=options).dataset
    (test,) = json.loads((dataset.path / "lm.json").read_text())["splits"].values()
    assert test == {"words": 4, "unknown": 0, "perplexity": pytest.approx(10 ** (2.3 / 3), abs=1e-3)}
    (source / "text").write_text("utt0 -\nutt1 shoe\n")
    like(source, trained.path, for_language_model=options, overwrite=True)
    assert json.loads((dataset.path / "lm.json").read_text())["splits"]["test"] == {"words": 1, "unknown": 1}
    (source / "text").unlink()
    like(source, trained.path, for_language_model=options, overwrite=True)
    assert speechdp(["inspect", str(dataset.path)]) == 0
    out = capsys.readouterr().out
    assert "  test: no transcripts\n" in out and "perplexity" not in out


def test_a_language_model_is_estimated_on_the_train_split_there_is(trained: Dataset, tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path / "new", 5)
    (source / "text").write_text("utt0 one shoe two\nutt1 one\nutt2 two one\n")
    options = LanguageModelOptions(lm_order=2)
    with pytest.raises(
        ConfigError, match=r"--lm-order 2: there is no train split to .* e\.g\. with --split random:"
    ):
        like(source, trained.path, for_language_model=options)
    dataset = like(source, trained.path, for_language_model=options, split="speaker:test=spk1").dataset
    model = language_model_in(dataset.path)
    assert isinstance(model, NgramModel) and ("two", "one") in model.log10_probs
    assert ("one", "two") not in model.log10_probs  # there is a word between them, if an unknown one
    # An utterance without transcript is no sentence.
    assert ("<s>", "</s>") not in model.log10_probs


@pytest.mark.parametrize(
    ("options", "for_model", "fits"),
    [({}, False, True), ({}, True, False), ({"task": "synthesis"}, False, False)],
)
def test_like_is_a_remedy_only_where_it_helps(
    tmp_path: Path, options: dict[str, Any], for_model: bool, fits: bool
) -> None:
    corpus = read_corpus(digit_folder(tmp_path / "new", ("eve",), num_indices=1), None)
    asked = PrepareOptions((tmp_path, tmp_path / "data"), split="index:test=90-99", **options)
    with pytest.raises(ConfigError, match="falls into test by") as caught:
        divide(corpus, asked, for_model=for_model)
    assert ("--like RUN" in str(caught.value)) == fits
