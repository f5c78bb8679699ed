"""Corpora read from a manifest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speechdp.cli.main import run as run_speechdp
from speechdp.data.corpora.corpus import Corpus
from speechdp.data.corpora.kaldi_dir import ReadingRules
from speechdp.data.corpora.path_map import PathMap
from speechdp.data.corpora.reader import read_corpus, reader_of
from speechdp.data.shards.dataset import Dataset
from speechdp.data.signal.audio import AudioPart
from speechdp.errors import ConfigError
from tests.helpers.corpora import write_tone


def read(folder: Path, name: str, text: str, rules: ReadingRules | None = None) -> Corpus:
    """Read a manifest of that text."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read_corpus(path, None, None, rules or ReadingRules())


def test_a_table_says_where_utterances_are(tmp_path: Path) -> None:
    header = "audio,start,end,speaker,text,note"
    text = f'{header}\nd/a b.wav,0.5,2.25,ann,"One, two",x\n\nd/a b.wav,2.25,,bob,THREE,\n'
    first, second = read(tmp_path, "m.csv", text).utterances
    assert (first.utterance_id, first.speaker, first.text) == ("a_b-0000050-0000225", "ann", "One, two")
    assert isinstance(first.audio, AudioPart)
    assert (first.audio.path, first.audio.start_s, first.audio.end_s) == (tmp_path / "d/a b.wav", 0.5, 2.25)
    assert (second.utterance_id, second.text) == ("a_b-0000225", "THREE")
    assert isinstance(second.audio, AudioPart)
    assert (second.audio.start_s, second.audio.end_s) == (2.25, None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nemo.json", '{"audio_filepath": "a.wav", "duration": 1.5, "text": "one", "pred_text": "nine"}\n'),
        ("deepspeech.csv", "wav_filename,wav_filesize,transcript\na.wav,20,one\n"),
        ("hugging_face.csv", "file_name,transcription\na.wav,one\n"),
        ("common_voice.tsv", "client_id\tpath\tsentence\tage\nann\ta.wav\tone\t\n"),
        ("speech_brain.csv", "ID,duration,wav,spk_id,wrd\na,1.5,a.wav,ann,one\n"),
        (
            "speech_brain.json",
            '{\n  "a": {\n    "wav": "a.wav",\n    "length": 1.25,\n    "words": "one"\n  }\n}\n',
        ),
        ("speech_brain.json", '{"a": {"wav": "a.wav", "length": 1.25, "words": "one", "spk_id": "ann"}}'),
        ("data.list", '{"key": "a", "wav": "a.wav", "txt": "one"}\n'),
        ("wenet.list", '{"key": "a", "wav": "a.wav", "txt": "one", "start": 0, "end": 1.5}\n'),
        ("nemo.json", '{"audio_filename": "a.wav", "duration": 1.5, "text": "one", "speaker": "ann"}\n'),
        ("hugging_face.jsonl", '{"audio_file_name": "a.wav", "text": "one"}\n'),
        ("spontaneous.tsv", "client_id\taudio_file\tduration_ms\ttranscription\nann\ta.wav\t1500\tone\n"),
        ("coqui_tts.csv", "audio_file,text,speaker_name,emotion_name\na.wav,one,ann,calm\n"),
        ("capitals.csv", "Audio,Text\na.wav,one\n"),
        ("windows.csv", "\ufeffaudio,text\r\na.wav,one\r\n\r\n"),
        ("spaced.csv", 'ID, wav, wrd\na, a.wav, "one"\n'),
    ],
)
def test_manifests_of_others_are_read_as_they_are(name: str, text: str, tmp_path: Path) -> None:
    (utterance,) = read(tmp_path, name, text).utterances
    assert (utterance.utterance_id, utterance.text) == ("a", "one")
    assert utterance.speaker == ("ann" if "ann" in text else "unknown")
    audio = utterance.audio
    assert (audio.path if isinstance(audio, AudioPart) else audio) == tmp_path / "a.wav"
    assert (audio.end_s if isinstance(audio, AudioPart) else None) == (1.5 if "1.5" in text else None)


def test_duration_counts_from_the_start_and_channels_from_one(tmp_path: Path) -> None:
    line = json.dumps({"id": "u", "audio": "a.wav", "offset": 1, "duration": 2, "channel": 2, "text": "one"})
    (utterance,) = read(tmp_path, "m.jsonl", line).utterances
    audio = utterance.audio
    assert isinstance(audio, AudioPart)
    assert (utterance.utterance_id, audio.start_s, audio.end_s, audio.channel) == ("u", 1, 3, 1)


def test_in_a_table_of_tabs_quotes_belong_to_the_words(tmp_path: Path) -> None:
    (utterance,) = read(tmp_path, "m.tsv", 'path\tsentence\na.wav\t"One" or two\n').utterances
    assert utterance.text == '"One" or two'


LJSPEECH = (
    'LJ001-0001|In 1456, "printing"|In fourteen fifty-six, "printing"\r\n'
    "Zo\u00eb 2|Yes.\r\nLJ001-0003|No.|\r\n\r\n"
)


@pytest.mark.parametrize("as_folder", [False, True])
def test_ljspeechs_table_is_read_as_it_is(as_folder: bool, tmp_path: Path) -> None:
    table = tmp_path / "metadata.csv"
    table.write_text(LJSPEECH, encoding="utf-8", newline="")
    write_tone(tmp_path / "wavs" / "LJ001-0003.wav")  # what else is missing is found later, with all that is
    found = read_corpus(tmp_path if as_folder else table, None).utterances
    assert [(u.utterance_id, u.text, u.audio) for u in found] == [
        ("LJ001-0001", 'In fourteen fifty-six, "printing"', tmp_path / "wavs" / "LJ001-0001.wav"),
        ("LJ001-0003", "No.", tmp_path / "wavs" / "LJ001-0003.wav"),
        ("Zo\u00eb_2", "Yes.", tmp_path / "wavs" / "Zo\u00eb 2.wav"),
    ]


def test_ljspeechs_audio_may_be_elsewhere(tmp_path: Path) -> None:
    audio = write_tone(tmp_path / "far" / "LJ-1.wav")
    rules = ReadingRules(path_map=PathMap.parse([f"wavs={tmp_path / 'far'}"]))
    (utterance,) = read(tmp_path, "metadata.csv", "LJ-1|One\n", rules).utterances
    assert utterance.audio == audio


def test_a_folder_with_labels_in_names_may_have_a_table_like_ljspeechs(tmp_path: Path) -> None:
    (tmp_path / "metadata.csv").write_text("one_ann_1|One\n", encoding="utf-8")
    write_tone(tmp_path / "wavs" / "one_ann_1.wav")
    assert reader_of(tmp_path, None) == "manifest"
    (utterance,) = read_corpus(tmp_path, None, "{word}_{speaker}_{index}").utterances
    assert (utterance.text, utterance.speaker) == ("one", "ann")


def test_a_folder_with_transcripts_of_its_own_is_no_ljspeech(tmp_path: Path) -> None:
    (tmp_path / "metadata.csv").write_text(LJSPEECH, encoding="utf-8")
    assert reader_of(tmp_path, None) == "folder"  # no wavs
    write_tone(tmp_path / "wavs" / "LJ001-0001.wav")
    assert reader_of(tmp_path, None) == "manifest"
    (tmp_path / "wavs" / "ann").mkdir()
    for others in ("text", "wavs/a.txt", "wavs/ann/a.txt", "ann.trans.txt"):
        (tmp_path / others).write_text("a one\n", encoding="utf-8")
        assert reader_of(tmp_path, None) == "folder", others
        (tmp_path / others).unlink()
    (tmp_path / "wav.scp").write_text("a a.wav\n", encoding="utf-8")
    assert reader_of(tmp_path, None) == "kaldi"


@pytest.mark.parametrize("text", ["a.wav,yes|no\n", "other|One\n", f"other|One\n{300 * 'x'}\n"])
def test_a_table_with_none_of_ljspeechs_audio_is_not_taken_for_it(text: str, tmp_path: Path) -> None:
    write_tone(tmp_path / "wavs" / "LJ-1.wav")
    says = r":1: has '\|' between .*header that is known; .* the audio there as .*/wavs/ID\.wav$"
    with pytest.raises(ConfigError, match=says):
        read(tmp_path, "metadata.csv", text)
    assert reader_of(tmp_path, None) == "folder"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "m.csv",
            "a.wav,one\nb.wav,two\n",
            r"m\.csv:1: has no column name .*, only 'a\.wav', 'one'; write a header",
        ),
        ("m.csv", "id,text\na,one\n", r"m\.csv:1: has no column for the audio; call it audio or "),
        ("m.csv", "audio,said\na.wav,one\n", r"m\.csv:1: has no column for the text; call it text or "),
        ("metadata.csv", "id|one|two|three\n", r":1: has '\|' between its fields.*commas between fields$"),
        ("m.csv", "audio|text\na.wav|one\n", r":1: has '\|' between its fields, and no header that is k"),
        ("m.csv", "LJ-1|One\nLJ-2\n", r"m\.csv:2: has 1 field between '\|'; write ID\|TEXT or ID\|TEXT\|"),
        ("m.csv", "LJ-1|One\n|Two\n", r"m\.csv:2: has no id; write the name of its audio file, without"),
        ("m.csv", "LJ-1|One\nLJ-1|Two\n", r":2: is utterance LJ-1, as is .*m\.csv:1; give each an id"),
        ("m.csv", "audio;text\na.wav;one\n", r":1: has ';' between its fields.*commas between fields$"),
        ("m.tsv", "audio,text\na.wav,one\n", r":1: has ',' between its fields.*tabs between fields$"),
        ("m.csv", "wav,start,stop,wrd\na,0,9,b\n", r":1: has start and stop, which count samples in Sp"),
        ("m.csv", "id,audio,text\na b,a.wav,one\n", r":2: id is 'a b'; give one without spaces"),
        ("m.json", "{}", r"m\.json: holds no utterance; write one on each line$"),
        ("m.csv", "audio,path,text\na.wav,b,one\n", r"has both audio and path for the audio; leave"),
        ("m.csv", "audio,end,duration,text\na.wav,1,1,one\n", r"has both end and duration; leave one out"),
        (
            "m.csv",
            "audio,text\na.wav,one, two\n",
            r":2: has 3 fields, and the header 2; put fields",
        ),
        ("m.tsv", "audio\ttext\na.wav one\n", r":2: has 1 fields, and the header 2; put tabs between"),
        ("m.csv", 'audio,text\na.wav,"one\n', r"m\.csv:3: unexpected end of data; write a table as CSV"),
        ("m.csv", "audio,start,text\na.wav,soon,one\n", r":2: start is 'soon'; give seconds, 0 or more"),
        ("m.csv", "audio,start,text\na.wav,-1,one\n", r":2: start is '-1'; give seconds"),
        ("m.csv", "audio,start,end,text\na.wav,2,1,one\n", r":2: ends at 1 s, not after its start"),
        ("m.csv", "audio,channel,text\na.wav,0,one\n", r":2: channel is '0'; give its number, 1 for the"),
        ("m.csv", "audio,text\n,one\n", r":2: names no audio; give a file, or remove the line"),
        ("m.csv", "audio,text\na.wav,\n", r"utterance a .* has an empty transcript"),
        (
            "m.csv",
            "audio,text\na.wav,one\nb/a.wav,two\n",
            r":3: is utterance a, as is .*m\.csv:2; give each an id",
        ),
        (
            "m.csv",
            "audio,text,split\na.wav,one,eval\n",
            r"is in split 'eval'; splits are train",
        ),
        ("m.csv", "audio,text\n", r"m\.csv: holds no utterance; write one on each line below a h"),
        ("m.jsonl", '{"audio": "a.wav"\n', r"m\.jsonl:1: .*; write a JSON object on each line"),
        ("m.json", '[\n{"audio": "a.wav"}]\n', r"m\.json:1: .*; write a JSON object on each line"),
        ("m.json", '["a.wav"]\n', r"m\.json:1: is no JSON object; write one on each line"),
        ("m.jsonl", '{"audio": ["a.wav"], "text": "one"}\n', r":1: audio is \['a.wav'\]; give a text or a n"),
    ],
)
def test_what_is_no_manifest_is_refused(name: str, text: str, says: str, tmp_path: Path) -> None:
    write_tone(tmp_path / "wavs" / "LJ-1.wav")
    with pytest.raises(ConfigError, match=says):
        read(tmp_path, name, text)


def test_words_may_be_left_out_where_none_are_needed(tmp_path: Path) -> None:
    text = "audio,text\na.wav,one\nb.wav,\n"
    kept = read(tmp_path, "m.csv", text, ReadingRules(skip_incomplete=True))
    assert [u.utterance_id for u in kept.utterances] == ["a"] and "have an empty" not in str(kept.notices)
    assert "1 utterance that has an empty transcript, first b" in kept.notices[0]
    (only,) = read(tmp_path, "n.csv", "audio\na.wav\n", ReadingRules(needs_text=False)).utterances
    assert only.text == ""


def test_paths_of_another_machine_are_mapped(tmp_path: Path) -> None:
    rules = ReadingRules(path_map=PathMap.parse([f"/there={tmp_path}"]))
    (utterance,) = read(tmp_path, "m.csv", "audio,text\n/there/a.wav,one\n", rules).utterances
    assert utterance.audio == tmp_path / "a.wav"
    rules = ReadingRules(path_map=PathMap.parse([f"$data_root={tmp_path}"]))  # a variable of SpeechBrain's
    (utterance,) = read(tmp_path, "m.csv", "ID,wav,wrd\nb,$data_root/d/b.wav,one\n", rules).utterances
    assert utterance.audio == tmp_path / "d" / "b.wav"


def test_a_manifest_is_prepared_with_its_splits_and_missing_files_name_a_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        write_tone(tmp_path / "corpus" / "wavs" / f"{name}.wav", seed=1)
    rows = ("a.wav,one,train", "b.wav,two,dev", "c.wav,one,test")
    lines = ["path,text,split", *(f"/there/{row}" for row in rows)]
    (tmp_path / "corpus" / "m.csv").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    assert run_speechdp(["prepare", "corpus/m.csv", "data", "--workers", "1"]) == 1
    assert "--path-map /there=corpus/wavs finds 3 of them" in capsys.readouterr().err
    command = ["prepare", "corpus/m.csv", "data", "--workers", "1", "--path-map", "/there=corpus/wavs"]
    assert run_speechdp(command) == 0
    dataset = Dataset.open(tmp_path / "data")
    assert {name: len(split.shards) for name, split in dataset.splits.items()} == dict.fromkeys(
        ("train", "dev", "test"), 1
    )
    assert dataset.split == "corpus"


@pytest.mark.parametrize(
    ("name", "folder", "columns"),
    [
        ("cv/train.tsv", "clips", "client_id\tpath\tsentence"),
        ("cv/clips/train.tsv", "clips", "client_id\tpath\tsentence"),
        ("cv/ss-corpus-de.tsv", "audios", "client_id\taudio_file\ttranscription"),
    ],
)
def test_lists_of_common_voice_name_files_of_clips(
    name: str, folder: str, columns: str, tmp_path: Path
) -> None:
    for other in ("clips", "audios"):
        (tmp_path / "cv" / other).mkdir(parents=True)
    (utterance,) = read(tmp_path, name, f"{columns}\nann\ta.mp3\tone\n").utterances
    assert utterance.audio == tmp_path / "cv" / folder / "a.mp3"
    (other,) = read(tmp_path, "cv/own.csv", "path,text\na.wav,one\n").utterances
    assert other.audio == tmp_path / "cv" / "a.wav"


def test_the_map_that_is_advised_for_files_named_from_the_manifest_finds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b", "c"):
        write_tone(tmp_path / "corpus" / "wavs" / f"{name}.wav", seed=1)
    rows = ("a.wav,one,train", "b.wav,two,dev", "c.wav,one,test")
    (tmp_path / "corpus" / "m.csv").write_text("\n".join(["path,text,split", *rows]))
    monkeypatch.chdir(tmp_path)
    command = ["prepare", "corpus/m.csv", "data", "--workers", "1"]
    assert run_speechdp(command) == 1
    advised = capsys.readouterr().err.partition("--path-map ")[2].split()[0]
    assert advised == "corpus=corpus/wavs"
    assert run_speechdp([*command, "--path-map", advised]) == 0


def test_options_that_are_for_others_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.csv"
    path.write_text("audio,text\na.wav,one\n")
    assert run_speechdp(["prepare", str(path), str(tmp_path / "data"), "--pattern", "{word}"]) == 1
    assert "m.csv: is a manifest, which has the labels; leave --pattern out" in capsys.readouterr().err
    assert run_speechdp(["prepare", str(path), str(tmp_path / "data"), "--allow-pipes"]) == 1
    assert "whose tables --allow-pipes is for; leave it out" in capsys.readouterr().err
