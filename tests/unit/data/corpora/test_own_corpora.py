"""Corpora read by classes from outside the package."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import speechdp
from speechdp.cli.main import run as run_speechdp
from speechdp.data.corpora.corpus import CorpusUtterance
from speechdp.data.corpora.kaldi_dir import ReadingRules
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
        ({"split": "eval"}, "utterance u1 is in split 'eval'; splits are train, dev and test: give it"),
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


@dataclass(frozen=True)
class Failing(CorpusReader):
    """Fails in various ways."""

    way: str = "value"

    def __post_init__(self) -> None:
        if self.way == "made":
            raise ValueError("cannot be\nmade")

    def read(self, source: Path) -> Iterable[CorpusUtterance]:
        match self.way:
            case "unreadable":
                (source / "corpus.bin").read_text(encoding="utf-8")
            case "gone":
                (source / "gone.csv").read_text(encoding="utf-8")
            case "unnamed":
                raise OSError("not gzipped")
            case "refused":
                raise ConfigError("refused by the reader")
            case "none":
                return None  # type: ignore[return-value]
        return iter([self.utterance("one")])

    def utterance(self, text: str) -> CorpusUtterance:
        return CorpusUtterance("u1", "ann", text, Path("a.wav"), index=int(self.way))


@pytest.mark.parametrize(
    ("reader", "words"),
    [
        ("atlantis", "unknown corpus 'atlantis'; there are: folder, kaldi"),
        (f"{__name__}:Forgetful", "Forgetful has no read"),
        (f"{__name__}:Careless", "yields 'u1'; yield CorpusUtterance objects"),
        (f"{TABLE}:files=x", "has no option 'files'; it has: file, lower_case"),
        ("folder:x=1", "--corpus folder:x=1: folder has no options; write --corpus folder"),
        ("kaldi:", "wav.scp: cannot be read"),
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


def line_of(text: str) -> int:
    """Return the number of the first line of this file that is `text`."""
    return [line.strip() for line in Path(__file__).read_text(encoding="utf-8").split("\n")].index(text) + 1


@pytest.mark.parametrize(
    ("way", "line", "reason"),
    [
        ("made", 'raise ValueError("cannot be\\nmade")', "ValueError: cannot be made"),
        (
            "unreadable",
            '(source / "corpus.bin").read_text(encoding="utf-8")',
            "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        ),
        ("unnamed", 'raise OSError("not gzipped")', "OSError: not gzipped"),
        (
            "many",
            'return CorpusUtterance("u1", "ann", text, Path("a.wav"), index=int(self.way))',
            "ValueError: invalid literal for int() with base 10: 'many'",
        ),
        ("none", None, "TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_a_reader_that_fails_is_named_with_the_line(
    tmp_path: Path, way: str, line: str | None, reason: str
) -> None:
    (tmp_path / "corpus.bin").write_bytes(b"\xff")
    place = f"{__file__}, line {line_of(line)}" if line else __file__
    reader = f"{__name__}:Failing"
    with pytest.raises(ConfigError) as caught:
        read_corpus(tmp_path, f"{reader}:way={way}")
    remedy = f"correct the reader, or what it reads in {tmp_path}"
    assert str(caught.value) == f"corpus {reader}: {place}: {reason}; {remedy}"


@pytest.mark.parametrize(
    ("way", "error", "message"),
    [("gone", FileNotFoundError, "gone.csv"), ("refused", ConfigError, "^refused by the reader$")],
)
def test_what_names_its_file_passes_through(
    tmp_path: Path, way: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        read_corpus(tmp_path, f"{__name__}:Failing:way={way}")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"utterance_id": 7}, "utterance_id of utterance 7 is 7; give a text without spaces"),
        (
            {"speaker": None},
            "speaker of utterance 'u1' is None; give a text, 'unknown' where it is not known",
        ),
        ({"text": 1.5}, "text of utterance 'u1' is 1.5; give the words as a text"),
        ({"audio": None}, "audio of utterance 'u1' is None; give a path"),
        ({"index": "3"}, "index of utterance 'u1' is '3'; give a whole number or None"),
    ],
)
def test_the_types_of_what_it_reads_are_checked(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "utterance_id": "u1",
        "speaker": "ann",
        "text": "one",
        "audio": "a.wav",
        "index": 3,
    }

    @speechdp.corpus("typed")
    @dataclass(frozen=True)
    class Typed(CorpusReader):
        changed: bool = False

        def read(self, source: Path) -> Iterable[CorpusUtterance]:
            return [CorpusUtterance(**(given | (changes if self.changed else {})))]

    assert read_corpus(tmp_path, "typed").utterances[0].audio == tmp_path / "a.wav"
    with pytest.raises(ConfigError, match=f"^corpus typed: {re.escape(words)}$"):
        read_corpus(tmp_path, "typed:changed=yes")


def test_a_short_row_of_the_example_is_named(tmp_path: Path) -> None:
    (tmp_path / "corpus.csv").write_text("id,speaker,split,audio,text\nu1,ann,dev,a.wav,one\nu2,ann\n")
    with pytest.raises(ConfigError, match=r"corpus.csv:3: has fewer fields than columns; fill them in"):
        read_corpus(tmp_path, TABLE)


@pytest.mark.parametrize("is_registered", [True, False])
def test_an_option_without_a_value_is_no_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_registered: bool
) -> None:
    if is_registered:
        read_corpus(table(tmp_path), TABLE)
    else:
        offered = metadata.EntryPoint("table_corpus", TABLE, CORPORA.group)
        points = {CORPORA.group: [offered]}
        monkeypatch.setattr(metadata, "entry_points", lambda group: points.get(group, []))
    with pytest.raises(ConfigError, match="table_corpus:lower_case: has no value; write lower_case="):
        read_corpus(tmp_path, "table_corpus:lower_case")
    # A class of a module that has registered its own name is meant where it is given.
    assert CORPORA.named(f"{TABLE}:file=x")[1] == "file=x"


def test_ours_can_be_named(tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path / "kaldi")
    assert read_corpus(source, "kaldi") == read_corpus(source, None)
    with pytest.raises(ConfigError, match="choose another"):
        speechdp.corpus("kaldi")(Careless)


@pytest.mark.parametrize("option", [["--path-map", "/a=/b"], ["--allow-pipes"]])
@pytest.mark.parametrize("reader", [TABLE, "folder"])
def test_options_of_kaldis_tables_are_refused_elsewhere(
    tmp_path: Path, reader: str, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["prepare", str(table(tmp_path)), str(tmp_path / "data"), "--corpus", reader, *option]
    assert run_speechdp(arguments) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path}: is not read as a Kaldi data directory, whose tables {option[0]} is for;" in error


def test_empty_transcripts_of_a_reader_are_left_out_if_asked(tmp_path: Path) -> None:
    source = table(tmp_path, text="...")
    corpus = read_corpus(source, TABLE, rules=ReadingRules(skip_incomplete=True))
    assert [u.utterance_id for u in corpus.utterances] == ["u0", "u2", "u3", "u4"]
    assert corpus.notices == ("left out: 1 utterance that has an empty transcript, first u1",)
    assert (
        len(read_corpus(source, TABLE, rules=ReadingRules(skip_incomplete=True, needs_text=False)).utterances)
        == 5
    )


def test_maps_are_not_advised_where_paths_are_not_mapped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = table(tmp_path, audio="gone/2.wav")
    assert run_speechdp(["prepare", str(source), str(tmp_path / "data"), "--corpus", TABLE]) == 1
    error = capsys.readouterr().err
    assert "1 of 5 files do not exist" in error and "path-map" not in error
    assert "gone/2.wav; check the paths, or leave them out with --skip-incomplete" in error
