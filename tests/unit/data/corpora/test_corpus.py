"""Corpora: Kaldi directories and audio folders, and what is wrong with them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import soundfile

from speechdp.data.corpora import audio_folder
from speechdp.data.corpora.audio_folder import read_audio_folder
from speechdp.data.corpora.corpus import Corpus, CorpusUtterance
from speechdp.data.corpora.kaldi_dir import ReadingRules, read_kaldi_dir
from speechdp.data.corpora.reader import read_corpus
from speechdp.data.shards.dataset import DATA_FORMAT, MANIFEST_NAME
from speechdp.data.signal.audio import probe
from speechdp.errors import ConfigError
from speechdp.parallel.run_files import RUN_FORMAT
from tests.helpers.corpora import digit_folder, kaldi_folder, shared_data, tone, write_tone


def test_kaldi_directory(tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path / "kaldi")
    corpus = read_corpus(source, None)
    assert [u.utterance_id for u in corpus.utterances] == ["utt0", "utt1", "utt2"]
    assert corpus.utterances[1].text == "one two"
    assert corpus.utterances[1].speaker == "spk1"
    assert corpus.utterances[1].audio == source / "wav" / "utt1.wav"
    assert corpus.speakers == ("spk0", "spk1")
    assert corpus.words == {"zero", "one", "two"}
    assert not corpus.has_index


def test_a_real_kaldi_directory() -> None:
    corpus = read_kaldi_dir(shared_data("kaldi", "yesno_keighrim", "data", "train_yesno"))
    assert len(corpus.utterances) == 31
    assert corpus.words == {"YES", "NO"}  # Kaldi's transcripts keep their case
    assert corpus.speakers == ("global",)


def test_audio_inside_an_archive_is_no_missing_file(tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path / "kaldi", 2)
    (source / "wav.ark").write_bytes(b"utt0 RIFF")
    (source / "wav.scp").write_text(f"utt0 {source / 'wav.ark'}:5\nutt1 wav/utt1.wav\n")
    with pytest.raises(
        ConfigError, match=r"wav\.scp:1: the audio of utt0 is inside an archive, .* wav-copy "
    ):
        read_kaldi_dir(source)


def test_kaldi_paths_from_the_working_directory_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kaldi_folder(tmp_path / "kaldi")
    write_tone(tmp_path / "wav" / "utt0.wav")
    monkeypatch.chdir(tmp_path)
    assert read_kaldi_dir(tmp_path / "kaldi").utterances[0].audio == Path("wav/utt0.wav")


_KALDI_ERRORS = {
    "pipe": (
        "wav.scp",
        "utt0 a.wav\nutt1 sph2pipe -f wav b.sph |\n",
        r"wav\.scp:2: a pipe \(utt1\) runs sph2pipe .*--allow-pipes",
    ),
    "one field": ("wav.scp", "utt0 a.wav\n\nutt1\n", r"wav\.scp:3: 'utt1' has one field"),
    "twice": (
        "wav.scp",
        "utt0 a.wav\nutt1 b.wav\nutt0 c.wav\n",
        r"wav\.scp:3: utt0 is listed a second time",
    ),
    "no text": ("text", "utt0 one\nutt1 one\n", r"text: lacks utterance utt2 of wav\.scp .*fix_data_dir"),
    "more text": (
        "text",
        "utt0 one\nutt1 one\nutt2 one\nutt3 one\n",
        r"wav\.scp: lacks utterance utt3 of text",
    ),
    "empty text": ("text", "utt0 one\nutt1\nutt2 one\n", r"utterance utt1 .* has an empty transcript"),
    "text twice": ("text", "utt0 one\nutt0 two\n", r"text:2: utt0 is listed a second time"),
    "no speaker": ("utt2spk", "utt0 a\nutt1\nutt2 b\n", r"utt2spk:2: 'utt1' has one field"),
    "two speakers": ("utt2spk", "utt0 a\nutt1 a b\nutt2 b\n", r"utt2spk:2: utt1 has 2 speakers; write one"),
    "speaker missing": ("utt2spk", "utt0 a\nutt1 a\n", r"utt2spk: lacks utterance utt2"),
    "segments": (
        "segments",
        "utt0 rec 0 1\n",
        r"segments: recording rec of utterance utt0 is not in wav\.scp",
    ),
    "nothing": ("wav.scp", "", r"lacks utterance utt0"),
}


@pytest.mark.parametrize("name", _KALDI_ERRORS)
def test_kaldi_errors_name_the_line_and_the_remedy(tmp_path: Path, name: str) -> None:
    file, content, message = _KALDI_ERRORS[name]
    source = kaldi_folder(tmp_path)
    (source / file).write_text(content)
    with pytest.raises(ConfigError, match=message) as raised:
        read_kaldi_dir(source)
    assert "\n" not in str(raised.value) and ";" in str(raised.value)


@pytest.mark.parametrize("file", ["text", "utt2spk"])
def test_kaldi_files_that_are_missing_or_not_text(tmp_path: Path, file: str) -> None:
    source = kaldi_folder(tmp_path)
    (source / file).write_bytes(b"utt0 \xff\xfe\n")
    with pytest.raises(ConfigError, match=f"{file}: is not UTF-8"):
        read_kaldi_dir(source)
    (source / file).unlink()
    message = {"text": "cannot be read", "utt2spk": "does not exist, nor does spk2utt; write a line"}[file]
    with pytest.raises(ConfigError, match=f"{file}: {message}"):
        read_kaldi_dir(source)


def test_speakers_may_stand_in_spk2utt_alone(tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path)
    (source / "utt2spk").unlink()
    (source / "spk2utt").write_text("ann utt0 utt2\nbob utt1\n")
    assert [u.speaker for u in read_kaldi_dir(source).utterances] == ["ann", "bob", "ann"]
    (source / "spk2utt").write_text("ann utt0 utt2\nbob utt1 utt2\n")
    with pytest.raises(ConfigError, match="spk2utt:2: utt2 is listed a second time"):
        read_kaldi_dir(source)


def test_a_byte_order_mark_is_no_letter(tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path)
    text = (source / "text").read_text()
    (source / "text").write_text("\ufeff" + text, encoding="utf-8")
    assert [u.text for u in read_kaldi_dir(source).utterances] == ["zero two", "one two", "two two"]


def test_transcripts_of_signs_alone_are_left_out_if_asked(tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path)
    (source / "text").write_text("utt0 -\nutt1 one\nutt2 ...\n")
    corpus = read_kaldi_dir(source, ReadingRules(skip_incomplete=True))
    assert [u.utterance_id for u in corpus.utterances] == ["utt1"]
    assert "2 utterances that have an empty transcript" in " ".join(corpus.notices)


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (
            None,
            r"is a Kaldi data directory \(it has a wav.scp\); leave --pattern out, or give --corpus folder",
        ),
        ("kaldi", "is read by --corpus kaldi, not as a folder of audio; leave --pattern out"),
    ],
)
def test_a_pattern_does_not_go_with_a_kaldi_directory(
    tmp_path: Path, reader: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_corpus(kaldi_folder(tmp_path), reader, "{word}")


def test_whether_a_corpus_is_divided_is_found_out_once() -> None:
    class Watched(CorpusUtterance):
        looks = 0

        def __getattribute__(self, name: str) -> Any:
            Watched.looks += name == "split"
            return super().__getattribute__(name)

    Corpus.of(Path("here"), [Watched(f"u{number}", "ann", "one", Path("a.wav")) for number in range(100)])
    assert 0 < Watched.looks <= 300


def test_labels_in_the_names(tmp_path: Path) -> None:
    corpus = read_corpus(digit_folder(tmp_path / "deep" / "er").parent, None)
    first = corpus.utterances[0]
    assert (first.utterance_id, first.text, first.speaker, first.index) == ("0_ann_0", "zero", "ann", 0)
    assert len(corpus.utterances) == 48 and corpus.has_index
    assert corpus.words == {"zero", "one"}


def test_another_pattern_with_folders(tmp_path: Path) -> None:
    for word in ("Yes", "no"):
        write_tone(tmp_path / word / "ann_nohash_0.wav")
    corpus = read_audio_folder(tmp_path, "{word}/{speaker}_nohash_{index}")
    assert [(u.utterance_id, u.text, u.speaker) for u in corpus.utterances] == [
        ("Yes-ann_nohash_0", "Yes", "ann"),
        ("no-ann_nohash_0", "no", "ann"),
    ]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("{speaker}_{index}", "has no field for the word"),
        ("{digit}_{colour}_{index}", r"\{colour\} is not known; the fields are \{digit\} \{word\}"),
        ("{digit}_{digit}", "redefinition .*name each field once"),
        ("{word}-{speaker}", r"0_ann_0\.wav: its name does not match"),
    ],
)
def test_patterns_that_do_not_work(tmp_path: Path, pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_audio_folder(digit_folder(tmp_path, num_indices=1), pattern)


def test_a_text_file_in_the_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tone(tmp_path / "carol" / f"{name}.wav")
    (tmp_path / "text").write_text("a Hello, World!\nb yes\n")
    corpus = read_audio_folder(tmp_path)
    assert [(u.text, u.speaker) for u in corpus.utterances] == [("Hello, World!", "carol"), ("yes", "carol")]
    (tmp_path / "utt2spk").write_text("a dave\nb eve\n")
    assert read_audio_folder(tmp_path).speakers == ("dave", "eve")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a one\n", r"b\.wav: utterance b has no transcript"),
        ("a one\nb two\nc three\n", "no audio file for utterance c"),
        ("a one\nb\n", "utterance b .* has an empty transcript"),
        ("a one\nb ...\n", "utterance b .* has an empty transcript"),
    ],
)
def test_text_and_audio_that_do_not_agree(tmp_path: Path, text: str, message: str) -> None:
    for name in ("a", "b"):
        write_tone(tmp_path / f"{name}.wav")
    (tmp_path / "text").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_audio_folder(tmp_path)


def test_transcripts_as_librispeech_has_them(tmp_path: Path) -> None:
    for utterance in ("84-1-0000", "84-1-0001", "99-7-0000"):
        speaker, chapter, _ = utterance.split("-")
        write_tone(tmp_path / speaker / chapter / f"{utterance}.flac")
    (tmp_path / "84" / "1" / "84-1.trans.txt").write_text("84-1-0000 GO UP\n84-1-0001 GO DOWN\n")
    (tmp_path / "99" / "7" / "99-7.trans.txt").write_text("99-7-0000 STOP\n")
    corpus = read_audio_folder(tmp_path)
    assert [(u.utterance_id, u.speaker, u.text) for u in corpus.utterances] == [
        ("84-1-0000", "84", "GO UP"),
        ("84-1-0001", "84", "GO DOWN"),
        ("99-7-0000", "99", "STOP"),
    ]


def test_a_text_beside_each_audio_file(tmp_path: Path) -> None:
    write_tone(tmp_path / "ann" / "1.wav").with_suffix(".txt").write_text("Yes.\n")
    write_tone(tmp_path / "bob" / "1.wav").with_suffix(".txt").write_text("no\n")
    corpus = read_audio_folder(tmp_path)
    assert [(u.utterance_id, u.speaker, u.text) for u in corpus.utterances] == [
        ("ann-1", "ann", "Yes."),
        ("bob-1", "bob", "no"),
    ]
    write_tone(tmp_path / "bob" / "2.wav")
    with pytest.raises(ConfigError, match=r"2\.wav: has no transcript 2\.txt beside it; write"):
        read_audio_folder(tmp_path)
    for name in "345678":
        write_tone(tmp_path / "bob" / f"{name}.wav")
    with pytest.raises(
        ConfigError, match=r"bob/2\.wav: .*, and 6 more of 9 audio files have none: "
    ) as refused:
        read_audio_folder(tmp_path)
    assert "bob/3.wav, " in str(refused.value) and "bob/6.wav, ...; write" in str(refused.value)


def test_speakers_are_the_folders_above_where_names_repeat(tmp_path: Path) -> None:
    for name in ("ann/wav/1", "ann/wav/2", "bob/wav/3"):
        write_tone(tmp_path / "corpus" / f"{name}.wav")
        (tmp_path / "corpus" / f"{name}.txt").write_text("one")
    corpus = read_audio_folder(tmp_path / "corpus")
    assert {u.utterance_id: u.speaker for u in corpus.utterances} == {"1": "ann", "2": "ann", "3": "bob"}
    (tmp_path / "corpus").rename(tmp_path / "data")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "data").rename(tmp_path / "corpus" / "data")
    corpus = read_audio_folder(tmp_path / "corpus")
    assert corpus.speakers == ("data-ann-wav", "data-bob-wav")


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    write_tone(tmp_path / "elsewhere" / "dora" / "1.wav")
    (tmp_path / "elsewhere" / "dora" / "1.txt").write_text("one")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "dora").symlink_to(tmp_path / "elsewhere" / "dora")
    (tmp_path / "elsewhere" / "dora" / "loop").symlink_to(tmp_path / "corpus")
    corpus = read_audio_folder(tmp_path / "corpus")
    assert [(u.utterance_id, u.speaker, u.text) for u in corpus.utterances] == [("1", "dora", "one")]


def test_two_paths_of_one_name_are_refused(tmp_path: Path) -> None:
    for name in ("a-b/c", "a/b-c", "d/c"):
        write_tone(tmp_path / f"{name}.wav")
        (tmp_path / f"{name}.txt").write_text("one")
    with pytest.raises(ConfigError, match="are both utterance a-b-c; rename one"):
        read_audio_folder(tmp_path)


def test_folders_without_audio_or_transcripts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        read_corpus(tmp_path / "gone", None)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file, not a folder; give a Kaldi data directory"):
        read_corpus(tmp_path / "file", None)
    (tmp_path / "file").unlink()
    with pytest.raises(ConfigError, match="holds no audio"):
        read_corpus(tmp_path, None)
    write_tone(tmp_path / "0_1_0_0_1_1_0_1.wav")  # yesno's form, which must not pass for FSDD's
    with pytest.raises(
        ConfigError,
        match=r"no transcripts found; give a file 'text'.*--pattern.*--corpus .*; docs/.*STM\); "
        r"to recognise .*: speechdp transcribe RUN /\S+, with a trained RUN$",
    ):
        read_corpus(tmp_path, None)
    (tmp_path / "metadata.csv").write_text("0_1_0_0_1_1_0_1|yes|yes\n")
    with pytest.raises(
        ConfigError, match=r"preparing\.md says how .* of a table like metadata\.csv; to recognise .* RUN$"
    ):
        read_corpus(tmp_path, None)


@pytest.mark.parametrize("name", [b"caf\xe9.wav", b"caf\xe9/a.wav"])
def test_names_of_another_encoding_are_refused(tmp_path: Path, name: bytes) -> None:
    for path in (tmp_path / "b.wav", tmp_path / os.fsdecode(name)):
        path.parent.mkdir(exist_ok=True)
        path.touch()
        path.with_suffix(".txt").write_text("one")
    with pytest.raises(ConfigError, match=r"caf.*\.wav: its name is not UTF-8; rename it"):
        read_audio_folder(tmp_path)


def test_lists_of_checksums_and_hidden_files_are_no_audio(tmp_path: Path) -> None:
    digit_folder(tmp_path / "recordings", num_indices=1)
    (tmp_path / "SHA256SUMS.wav").write_text("0123 0_ann_0.wav\n")
    (tmp_path / "recordings" / "._0_ann_0.wav").write_bytes(b"")
    assert len(read_audio_folder(tmp_path).utterances) == 4


@pytest.mark.parametrize(("record", "form"), [(MANIFEST_NAME, DATA_FORMAT), ("run.json", RUN_FORMAT)])
def test_prepared_data_and_runs_inside_a_corpus_are_no_part_of_it(
    tmp_path: Path, record: str, form: str
) -> None:
    digit_folder(tmp_path, num_indices=1)
    made = tmp_path / "below" / "made"
    digit_folder(made / "recordings", num_indices=1)
    digit_folder(tmp_path / ".made.partial" / "recordings", num_indices=1)  # prepare was killed
    for content in ('{"format": "another"}', "[1]", "{", None):
        (made / record).unlink() if content is None else (made / record).write_text(content)
        assert len(read_audio_folder(tmp_path).utterances) == 8, content
    (made / record).write_text(json.dumps({"format": form, "version": 1}))
    assert len(read_audio_folder(tmp_path).utterances) == 4
    assert len(read_audio_folder(made).utterances) == 4  # named itself


def test_a_stray_file_among_labelled_ones_is_named(tmp_path: Path) -> None:
    write_tone(digit_folder(tmp_path, num_indices=1) / "music.wav")
    with pytest.raises(ConfigError, match=r"music\.wav: its name does not match --pattern .*; move it away"):
        read_audio_folder(tmp_path)


def test_a_pattern_that_no_file_matches_is_to_be_changed(tmp_path: Path) -> None:
    digit_folder(tmp_path, num_indices=1)
    with pytest.raises(
        ConfigError, match=r"--pattern '\{speaker\}-\{digit\}'; nor does any .* give a pattern"
    ):
        read_audio_folder(tmp_path, pattern="{speaker}-{digit}")


def test_letters_with_marks_are_the_same_in_either_encoding(tmp_path: Path) -> None:
    for name in ("Zoe\u0308/a", "Zo\u00eb/b", "ann/c"):
        write_tone(tmp_path / f"{name}e\u0301.wav")
    (tmp_path / "text").write_text("a\u00e9 yes\nbe\u0301 no\nc\u00e9 no\n", encoding="utf-8")
    corpus = read_audio_folder(tmp_path)
    assert {u.utterance_id: u.speaker for u in corpus.utterances} == {
        "a\u00e9": "Zo\u00eb", "b\u00e9": "Zo\u00eb", "c\u00e9": "ann"
    }  # fmt: skip
    (tmp_path / "text").write_text("a\u00e9 yes\nae\u0301 no\n", encoding="utf-8")
    with pytest.raises(
        ConfigError, match="text: ae\u0301 is listed twice, in two encodings of its letters; remove one"
    ):
        read_audio_folder(tmp_path)


def test_names_that_folders_share_but_for_the_encoding_of_letters_have_the_folder_in_them(
    tmp_path: Path,
) -> None:
    for name in ("ann/cafe\u0301", "bob/caf\u00e9"):
        write_tone(tmp_path / f"{name}.wav")
        (tmp_path / f"{name}.txt").write_text("yes\n")
    utterances = read_audio_folder(tmp_path).utterances
    assert [u.utterance_id for u in utterances] == ["ann-caf\u00e9", "bob-caf\u00e9"]


@pytest.mark.parametrize("table", ["text", "utt2spk", "1.trans.txt"])
def test_a_table_with_the_blanks_of_the_files_names_says_how_to_write_them(
    tmp_path: Path, table: str
) -> None:
    for number in "12":
        write_tone(tmp_path / f"Jo\u0308rg Take {number}.wav")
    right = "J\u00f6rg_Take_1 one\nJ\u00f6rg_Take_2 two\n"
    if table == "utt2spk":
        (tmp_path / "text").write_text(right, encoding="utf-8")
    (tmp_path / table).write_text(right, encoding="utf-8")
    assert len(read_audio_folder(tmp_path).utterances) == 2
    (tmp_path / table).write_text("J\u00f6rg_Take_1 one\nJ\u00f6rg Take 2 two\n", encoding="utf-8")
    with pytest.raises(
        ConfigError,
        match=rf"{table}:2: an id ends at its first blank; write J\u00f6rg_Take_2 for 'J\u00f6rg Take 2'",
    ):
        read_audio_folder(tmp_path)


def test_a_word_after_an_id_is_no_part_of_a_name_with_blanks(tmp_path: Path) -> None:
    for name in ("a", "a one"):
        write_tone(tmp_path / f"{name}.wav")
    (tmp_path / "text").write_text("a one\na_one two\n")
    corpus = read_audio_folder(tmp_path)
    assert [(u.utterance_id, u.text) for u in corpus.utterances] == [("a", "one"), ("a_one", "two")]


def test_a_name_with_blanks_may_begin_with_that_of_another_file(tmp_path: Path) -> None:
    for name in ("a", "a 1", "a 2"):
        write_tone(tmp_path / f"{name}.wav")
    (tmp_path / "text").write_text("a one\na 1 two\na 2 two\n")
    with pytest.raises(
        ConfigError, match=r"text:2: an id ends at its first blank; write a_1 for 'a 1', and likewise"
    ):
        read_audio_folder(tmp_path)
    (tmp_path / "text").write_text("a one\na_1 two\na_2 two\na three\n")
    with pytest.raises(ConfigError, match=r"text:4: a is listed a second time"):
        read_audio_folder(tmp_path)


def test_texts_that_no_audio_has_the_name_of_are_told_of(tmp_path: Path) -> None:
    write_tone(tmp_path / "ann" / "1.wav").with_suffix(".txt").write_text("yes\n")
    (tmp_path / "ann" / "._1.txt").write_bytes(b"")
    assert read_audio_folder(tmp_path).notices == ()
    (tmp_path / "bob").mkdir()
    (tmp_path / "bob" / "2.m4a").touch()  # a format that is not read
    for number in "23":
        (tmp_path / "bob" / f"{number}.txt").write_text("no\n")
    corpus = read_audio_folder(tmp_path)
    first = tmp_path / "bob" / "2.txt"
    assert corpus.notices == (
        f"not used, because no readable audio file has the same name: 2 .txt files, first {first}",
    )
    assert [u.utterance_id for u in corpus.utterances] == ["1"]


def _commands_of(form: str, folder: Path) -> str:
    """Return the commands of docs/preparing.md for a form of transcripts, for the corpus in a folder."""
    page = Path(__file__).parents[4].joinpath("docs", "preparing.md").read_text(encoding="utf-8")
    block = re.search(rf"{form}.*\n\n((?:    .*\n)+)", page)
    assert block is not None
    return re.sub(r"\bCORPUS\b", str(folder), block[1])


@pytest.mark.parametrize(
    "columns",
    [("client_id", "path", "sentence", "up_votes"), ("client_id", "path", "sentence_id", "sentence", "age")],
)
def test_common_voices_table_becomes_a_text_by_the_command_of_the_docs(
    tmp_path: Path, columns: tuple[str, ...]
) -> None:
    rows = [("ann", "common_voice_de_1.mp3", "Ja, gern."), ("bob", "common_voice_de_2.mp3", "Nein")]
    lines = ["\t".join(columns)]
    for row in rows:
        write_tone((tmp_path / "clips" / row[1]).with_suffix(".wav"))
        values = dict(zip(("client_id", "path", "sentence"), row, strict=True))
        lines.append("\t".join(values.get(column, "x") for column in columns))
    (tmp_path / "validated.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    subprocess.run(_commands_of("Common Voice", tmp_path), shell=True, check=True)
    assert [(u.utterance_id, u.speaker, u.text) for u in read_audio_folder(tmp_path).utterances] == [
        ("common_voice_de_1", "ann", "Ja, gern."),
        ("common_voice_de_2", "bob", "Nein"),
    ]


def test_two_files_of_one_utterance_are_refused(tmp_path: Path) -> None:
    write_tone(tmp_path / "0_ann_0.wav")
    write_tone(tmp_path / "0_ann_0.flac")
    with pytest.raises(ConfigError, match="are both utterance 0_ann_0; rename one"):
        read_audio_folder(tmp_path)


def test_transcripts_beside_audio_are_found_where_the_first_has_none(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tone(tmp_path / f"{name}.wav", 0.1)
    (tmp_path / "b.txt").write_text("one\n")
    corpus = read_audio_folder(tmp_path, rules=ReadingRules(skip_incomplete=True))
    assert [(u.utterance_id, u.text) for u in corpus.utterances] == [("b", "one")]
    corpus = read_audio_folder(tmp_path, rules=ReadingRules(needs_text=False))
    assert [u.text for u in corpus.utterances] == ["", "one"]


def test_files_are_named_as_often_for_many_tables_as_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LibriSpeech has a table for each chapter: naming all files anew for each would take hours."""
    named: list[str] = []
    plain = audio_folder._plain_name

    def noted(name: str) -> str:
        named.append(name)
        return plain(name)

    monkeypatch.setattr(audio_folder, "_plain_name", noted)

    def times(num_tables: int) -> int:
        folder = tmp_path / str(num_tables)
        for number in range(12):
            chapter = folder / str(number % num_tables)
            write_tone(chapter / f"ann-{number}.wav")
            with (chapter / f"{number % num_tables}.trans.txt").open("a", encoding="utf-8") as table:
                table.write(f"ann-{number} one\n")
        named.clear()
        assert len(read_audio_folder(folder).utterances) == 12
        return len(named)

    assert times(6) == times(1)


def test_sample_numbers_of_timit_are_no_words(tmp_path: Path) -> None:
    for number in range(3):
        path = write_tone(tmp_path / f"sx{number}.wav")
        path.with_suffix(".txt").write_text(f"0 {46797 + number} She had your dark suit.\n")
    with pytest.raises(ConfigError, match=r"sx0\.txt: begins with two sample numbers, as all transcripts"):
        read_audio_folder(tmp_path)
    (tmp_path / "sx2.txt").write_text("0 1 2\n")  # digits that somebody says
    assert read_audio_folder(tmp_path).utterances[2].text == "0 1 2"


def test_the_recipe_for_vctk(tmp_path: Path) -> None:
    for speaker in ("p225", "p226"):
        for microphone in (1, 2):
            write_tone(tmp_path / "CORPUS" / "wav48" / speaker / f"{speaker}_001_mic{microphone}.flac")
        (tmp_path / "CORPUS" / "txt" / speaker).mkdir(parents=True)
        (tmp_path / "CORPUS" / "txt" / speaker / f"{speaker}_001.txt").write_text("Please call Stella.\n")
    subprocess.run(_commands_of("VCTK", tmp_path / "CORPUS"), shell=True, check=True)
    corpus = read_audio_folder(tmp_path / "CORPUS", rules=ReadingRules(skip_incomplete=True))
    assert [(u.utterance_id, u.speaker, u.text) for u in corpus.utterances] == [
        (f"{speaker}_001_mic1", speaker, "Please call Stella.") for speaker in ("p225", "p226")
    ]


def test_the_recipe_for_timit(tmp_path: Path) -> None:
    for speaker in ("FCJF0", "MDAC0"):
        path = write_tone(tmp_path / "TIMIT" / "TRAIN" / "DR1" / speaker / "SA1.WAV")
        path.with_suffix(".TXT").write_text("0 46797 She had your dark suit.\n")
    subprocess.run(_commands_of("TIMIT", tmp_path), shell=True, check=True, cwd=tmp_path)
    corpus = read_audio_folder(tmp_path / "TIMIT" / "TRAIN")
    assert [(u.utterance_id, u.speaker, u.text) for u in corpus.utterances] == [
        (f"DR1-{speaker}-SA1", speaker, "She had your dark suit.") for speaker in ("FCJF0", "MDAC0")
    ]


def test_the_recipe_for_stm(tmp_path: Path) -> None:
    (tmp_path / "CORPUS" / "sph").mkdir(parents=True)
    (tmp_path / "CORPUS" / "stm").mkdir()
    soundfile.write(tmp_path / "CORPUS" / "sph" / "Al_2009.sph", tone(5.0), 8000, format="NIST")
    (tmp_path / "CORPUS" / "stm" / "Al_2009.stm").write_text(
        ";; a comment\n"
        "Al_2009 1 Al_2009 0.50 2.25 <o,f0,male> thank you so much\n"
        "Al_2009 1 inter_segment_gap 2.25 3.00 <o,f0,> ignore_time_segment_in_scoring\n"
        "Al_2009 1 other 3.00 4.50 without a label\n"
    )
    subprocess.run(_commands_of("STM", Path("CORPUS")), shell=True, check=True, cwd=tmp_path)
    corpus = read_corpus(tmp_path / "KALDI", None)
    assert [(u.utterance_id, u.speaker, u.text) for u in corpus.utterances] == [
        ("Al_2009-0000050-0000225", "Al_2009", "thank you so much"),
        ("other-0000300-0000450", "other", "without a label"),
    ]
    assert [probe(u.audio).num_samples for u in corpus.utterances] == [14_000, 12_000]
