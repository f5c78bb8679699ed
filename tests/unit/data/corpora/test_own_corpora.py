"""Corpora read by classes from outside the package."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import speechdp
from speechdp.cli.main import run as run_speechdp
from speechdp.data.corpora.corpus import CorpusUtterance
from speechdp.data.corpora.reader import CORPORA, CorpusReader, read_corpus
from speechdp.data.corpora.splits import choose_rule, split_corpus
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError
from tests.helpers.corpora import kaldi_folder, write_tone
from tests.helpers.mpi import REPOSITORY

TABLE = "table_corpus:TableCorpus"
SPLITS = ("train", "train", "test", "train", "dev")


@pytest.fixture(autouse=True)
def _nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CORPORA, "registered", {})
    monkeypatch.delitem(sys.modules, "table_corpus", raising=False)
    monkeypatch.syspath_prepend(REPOSITORY / "examples" / "own_corpus")


def table(source: Path, **changes: str) -> Path:
    """Write a corpus as the example reads it; `changes` are those of utterance u1."""
    with (source / "corpus.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ("id", "speaker", "split", "audio", "text"))
        writer.writeheader()
        for number, split in enumerate(SPLITS):
            audio = write_tone(source / "audio" / f"{number}.wav", seed=number)
            name = str(audio.relative_to(source))
            row = {"id": f"u{number}", "speaker": "ann", "split": split, "audio": name, "text": "One TWO"}
            writer.writerow(row | (changes if number == 1 else {}))
    return source


def test_the_example_is_prepared_with_the_splits_of_its_authors(tmp_path: Path) -> None:
    source = table(tmp_path)
    assert (
        run_speechdp(["prepare", str(source), str(tmp_path / "data"), "--corpus", TABLE, "--workers", "1"])
        == 0
    )
    dataset = Dataset.open(tmp_path / "data")
    counts = {name: len(dataset.splits[name].shards) for name in ("train", "dev", "test")}
    assert counts == {"train": 3, "dev": 1, "test": 1} and dataset.split == "corpus"


def test_options_follow_its_name_and_a_split_that_is_asked_for_wins(tmp_path: Path) -> None:
    corpus = read_corpus(table(tmp_path), f"{TABLE}:lower_case=false")
    assert corpus.utterances[0].text == "One TWO"
    assert corpus.utterances[0].audio == tmp_path / "audio" / "0.wav"
    own = split_corpus(corpus, choose_rule(corpus, None, None, 1))
    assert [u.utterance_id for u in own["test"]] == ["u2"]
    asked = split_corpus(corpus, choose_rule(corpus, "random:test=0.5", None, 1))
    assert set(asked) == {"train", "test"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split": "eval"}, "utterance u1 is in split 'eval'; splits are train, dev and test"),
        ({"split": ""}, "utterance u1 is in split ''"),
        ({"id": "u 1"}, "'u 1' cannot be an utterance's id; give ids without spaces"),
        ({"id": ""}, "'' cannot be an utterance's id"),
        ({"id": "u2"}, "are both utterance u2"),
        ({"text": ""}, "utterance u1 .* has an empty transcript"),
    ],
)
def test_what_it_reads_is_checked(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_corpus(table(tmp_path, **changes), TABLE)


def test_splits_of_some_utterances_only_are_refused(tmp_path: Path) -> None:
    @speechdp.corpus("half")
    @dataclass(frozen=True)
    class Half(CorpusReader):
        def read(self, source: Path) -> Iterator[CorpusUtterance]:
            for number, split in enumerate(("train", None)):
                yield CorpusUtterance(f"u{number}", "ann", "one", Path("a.wav"), split=split)

    with pytest.raises(ConfigError, match="utterance u1 is in no split, while others are"):
        read_corpus(tmp_path, "half")


@dataclass(frozen=True)
class Forgetful(CorpusReader):
    """Has no read()."""


@dataclass(frozen=True)
class Careless(CorpusReader):
    """Yields what is no utterance."""

    def read(self, source: Path) -> Iterable[CorpusUtterance]:
        return ["u1"]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        ("atlantis", "unknown corpus 'atlantis'; there are: folder, kaldi"),
        (f"{__name__}:Forgetful", "Forgetful has no read"),
        (f"{__name__}:Careless", "yields 'u1'; yield CorpusUtterance objects"),
        (f"{TABLE}:files=x", "has no option 'files'; it has: file, lower_case"),
        ("gone:Table", "cannot be imported"),
        (f"{TABLE}:file=other.csv", "other.csv"),
    ],
)
def test_readers_that_cannot_be_used(
    tmp_path: Path, reader: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_speechdp(["prepare", str(table(tmp_path)), str(tmp_path / "data"), "--corpus", reader]) == 1
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error and not (tmp_path / "data").exists()


def test_ours_can_be_named(tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path / "kaldi")
    assert read_corpus(source, "kaldi") == read_corpus(source, None)
    with pytest.raises(ConfigError, match="choose another"):
        speechdp.corpus("kaldi")(Careless)
