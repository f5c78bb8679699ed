"""Kaldi directories as they are found: segments, paths of other machines, files and ids that are missing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speechdp.cli.main import run as speechdp
from speechdp.data.corpora.corpus import Corpus
from speechdp.data.corpora.kaldi_dir import ReadingRules, read_kaldi_dir, read_segments
from speechdp.data.corpora.missing_files import missing_error, suggest_mapping
from speechdp.data.corpora.path_map import PathMap
from speechdp.data.corpora.reader import read_corpus
from speechdp.data.prepare.pipeline import Prepared, prepare
from speechdp.data.prepare.reading import read_whole_corpus
from speechdp.data.signal.audio import AudioPart, probe, read_audio
from speechdp.errors import ConfigError
from speechdp.options.prepare import FilesOptions, PrepareOptions
from tests.helpers.corpora import kaldi_folder, no_progress, shared_data, write_tone

SKIP = ReadingRules(skip_incomplete=True)


def recording(folder: Path, seconds: float = 3.0) -> tuple[Path, np.ndarray]:
    """Write a recording; return its file and its samples."""
    path = write_tone(folder / "wav" / "rec.wav", seconds)
    return path, soundfile.read(path, dtype="float32")[0]


def cut_folder(folder: Path, segments: str) -> Path:
    """Write a Kaldi data directory with one recording of 3 s and utterances utt0, utt1 cut from it."""
    source = kaldi_folder(folder, 2)
    recording(source)
    (source / "wav.scp").write_text("rec wav/rec.wav\n")
    (source / "segments").write_text(segments)
    return source


def test_segments_are_cut_out_of_recordings(tmp_path: Path) -> None:
    source = cut_folder(tmp_path, "utt0 rec 0.5 1.25\nutt1 rec 2 -1\n")
    samples = recording(tmp_path)[1]
    corpus = read_corpus(source, None)
    assert [(u.utterance_id, u.speaker, u.text) for u in corpus.utterances] == [
        ("utt0", "spk0", "zero two"),
        ("utt1", "spk1", "one two"),
    ]
    parts = [u.audio for u in corpus.utterances]
    assert [probe(part).num_samples for part in parts] == [6000, 8000]
    np.testing.assert_array_equal(read_audio(parts[0], 8000), samples[4000:10000])
    np.testing.assert_array_equal(read_audio(parts[1], 8000), samples[16000:])
    assert len(read_audio(parts[0], 16000)) == 12000
    assert str(parts[0]) == f"utterance utt0 of {source / 'wav' / 'rec.wav'} (0.5 s to 1.25 s)"


def test_an_end_beyond_the_recording_is_cut_if_it_is_near(tmp_path: Path) -> None:
    path, samples = recording(tmp_path)
    np.testing.assert_array_equal(read_audio(AudioPart(path, 2.0, 3.49), 8000), samples[16000:])
    for part in (AudioPart(path, 2.0, 3.5), AudioPart(path, 3.0, 3.2)):
        for use in (probe, lambda part: read_audio(part, 8000)):
            with pytest.raises(
                ConfigError, match=r"rec\.wav \(. s to 3\.. s\): the recording ends at 3 s; correct"
            ):
                use(part)


def test_utterances_beyond_the_end_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = cut_folder(tmp_path / "kaldi", "utt0 rec 0 1\nutt1 rec 1 9\n")
    assert speechdp(["prepare", str(source), str(tmp_path / "data"), "--split", "random:dev=0"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"utterance utt1 of {source / 'wav' / 'rec.wav'} (1 s to 9 s): the recording ends at 3 s" in error


def test_utterances_outside_of_their_recording_are_named_at_once_and_can_be_left_out(tmp_path: Path) -> None:
    times = ((0, 3), (1, 9), (4, 5), (1, 1.00001), (2, -1))
    source = kaldi_folder(tmp_path / "kaldi", 5)
    recording(source)
    (source / "wav.scp").write_text("rec wav/rec.wav\n")
    (source / "segments").write_text("".join(f"utt{n} rec {a} {b}\n" for n, (a, b) in enumerate(times)))
    options = PrepareOptions((source, tmp_path / "data"), split="random:dev=0", workers=1)
    with pytest.raises(
        ConfigError,
        match=r"utt1 of .* the recording ends at 3 s, and 2 more of 5 utterances are outside of theirs; "
        r"correct the times in segments, or leave them out, as --skip-incomplete does$",
    ):
        prepare(options, no_progress)
    skipping = dataclasses.replace(options, files=FilesOptions(skip_incomplete=True))
    done = prepare(skipping, no_progress)
    assert done.dataset.num_utterances("train") == 2
    said = "left out: 3 utterances that have times outside of the recording, first utt1, utt2, utt3"
    assert said in done.notices
    (source / "segments").write_text("".join(f"utt{n} rec 1 1.00001\n" for n in range(5)))
    with pytest.raises(
        ConfigError, match=r"utt0 of .*: holds no sample, and 4 more .* or leave them out$"
    ):  # which the option would not do
        prepare(dataclasses.replace(skipping, overwrite=True), no_progress)


def test_a_channel_may_be_named(tmp_path: Path) -> None:
    left, right = (np.round(np.random.default_rng(n).uniform(-9000, 9000, 8000)) / 32768 for n in (0, 1))
    soundfile.write(tmp_path / "two.wav", np.stack([left, right], axis=1), 8000, subtype="PCM_16")
    for channel, samples in enumerate((left, right)):
        read = read_audio(AudioPart(tmp_path / "two.wav", 0.25, 0.5, channel), 8000)
        np.testing.assert_allclose(read, samples[2000:4000], atol=1e-6)
    with pytest.raises(ConfigError, match="has no channel 2, only 2"):
        probe(AudioPart(tmp_path / "two.wav", channel=2))
    with pytest.raises(ConfigError, match="has 2 channels"):
        read_audio(AudioPart(tmp_path / "two.wav"), 8000)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("u rec 1", "has 3 fields, not 4 or 5; write UTTERANCE RECORDING START END"),
        ("u rec 1 2 0 0", "has 6 fields"),
        ("u rec one 2", "could not convert string to float"),
        ("u rec 2 1", "2 1 is no stretch of time"),
        ("u rec -1 1", "-1 1 is no stretch"),
        ("u rec 1 nan", "1 nan is no stretch"),
        ("u rec 1 inf", "1 inf is no stretch"),
        ("u rec 1 2 -1", "1 2 -1 is no stretch"),
        ("first rec 1 2", "first is listed a second time"),
    ],
)
def test_lines_that_are_no_segments_are_refused_by_number(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "segments").write_text(f"first rec 0 1\n{line}\n")
    with pytest.raises(ConfigError, match=f"segments:2: {reason}") as caught:
        read_segments(tmp_path / "segments")
    assert "\n" not in str(caught.value)


def test_segments_of_recordings_that_are_not_there(tmp_path: Path) -> None:
    source = cut_folder(tmp_path, "utt0 rec 0 1\nutt1 other 1 2\n")
    with pytest.raises(
        ConfigError, match=r"recording other of utterance utt1 is not in wav\.scp \(1 missing\)"
    ):
        read_kaldi_dir(source)
    corpus = read_kaldi_dir(source, SKIP)
    assert [u.utterance_id for u in corpus.utterances] == ["utt0"]
    assert corpus.notices == (
        "left out: 1 utterance that is not in segments, or whose recording is not in wav.scp, first utt1",
    )


def test_incomplete_utterances_are_left_out_and_counted_where_that_is_asked_for(tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path, 5)
    (source / "text").write_text("utt0 one\nutt1\nutt3 two\nutt4 two\nother two\nmore one\n")
    (source / "utt2spk").write_text("utt0 a\nutt1 a\nutt2 a\nutt4 b\n")
    with pytest.raises(ConfigError, match=r"fix_data_dir\.sh, or leave them out with --skip-incomplete"):
        read_kaldi_dir(source)
    corpus = read_kaldi_dir(source, SKIP)
    assert [u.utterance_id for u in corpus.utterances] == ["utt0", "utt4"]
    assert corpus.notices == (
        "left out: 2 utterances that are not in wav.scp, first more",
        "left out: 1 utterance that is not in utt2spk, first utt3",
        "left out: 1 utterance that is not in text, first utt2",
        "left out: 1 utterance that has an empty transcript, first utt1",
    )


def test_folders_of_audio_may_be_incomplete_too(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_tone(tmp_path / f"{name}.wav")
    (tmp_path / "text").write_text("a one\nc ...\nd one\n")
    corpus = read_corpus(tmp_path, "folder", None, SKIP)
    assert [u.utterance_id for u in corpus.utterances] == ["a"]
    assert corpus.notices == (
        "left out: 1 utterance that has no transcript in text, first b",
        "left out: 1 utterance that has no audio, but a transcript in text, first d",
        "left out: 1 utterance that has an empty transcript, first c",
    )
    (tmp_path / "text").unlink()
    (tmp_path / "a.txt").write_text("one")
    beside = read_corpus(tmp_path, "folder", None, SKIP)
    assert beside.notices == ("left out: 2 utterances that have no transcript in *.txt, first b",)


def moved(folder: Path, number: int = 3) -> Path:
    """Write a Kaldi data directory whose wav.scp names the paths of another machine."""
    source = kaldi_folder(folder, number)
    for file in (source / "wav").iterdir():
        (source / "audio" / "wav").mkdir(parents=True, exist_ok=True)
        file.rename(source / "audio" / "wav" / file.name)
    lines = (f"utt{n} /export/c/corpus/wav/utt{n}.wav\n" for n in range(number))
    (source / "wav.scp").write_text("".join(lines))
    return source


def read(source: Path, **files: object) -> Corpus:
    options = PrepareOptions((source, source / "data"), files=FilesOptions(**files))  # type: ignore[arg-type]
    return read_whole_corpus(options, source, no_progress)


def test_paths_of_another_machine_are_mapped_and_the_map_is_suggested(tmp_path: Path) -> None:
    source = moved(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read(source)
    mapping = f"/export/c/corpus={source / 'audio'}"
    assert str(caught.value) == (
        f"{source / 'wav.scp'}: 3 of 3 files do not exist, first /export/c/corpus/wav/utt0.wav; "
        f"--path-map {mapping} finds 3 of them"
    )
    corpus = read(source, path_map=(mapping,))
    assert [u.audio for u in corpus.utterances] == [source / "audio/wav" / f"utt{n}.wav" for n in range(3)]
    (source / "audio" / "wav" / "utt1.wav").unlink()
    with pytest.raises(
        ConfigError,
        match=rf"1 of 3 files do not exist, first .*utt1\.wav; --path-map {mapping} leads there: give the "
        "folder that holds them, or leave them out with --skip-incomplete$",
    ):
        read(source, path_map=(mapping,))
    some = read(source, path_map=(mapping,), skip_incomplete=True)
    assert [u.utterance_id for u in some.utterances] == ["utt0", "utt2"]
    assert some.notices == ("left out: 1 utterance that has no audio file, first utt1",)


def test_files_without_a_byte_are_counted_and_can_be_left_out(tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path, 4)
    for name in ("utt1", "utt3"):
        (source / "wav" / f"{name}.wav").write_bytes(b"")
    with pytest.raises(
        ConfigError,
        match=r"2 of 4 audio files are empty \(0 bytes\), first .*utt1\.wav; copy or fetch them again, or "
        "leave them out with --skip-incomplete",
    ):
        read(source)
    some = read(source, skip_incomplete=True)
    assert [u.utterance_id for u in some.utterances] == ["utt0", "utt2"]
    assert some.notices == ("left out: 2 utterances that have an empty audio file, first utt1",)
    for file in (source / "wav").iterdir():
        file.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"4 of 4 audio files are empty .*; copy or fetch them again$"):
        read(source, skip_incomplete=True)


def test_the_longest_beginning_is_mapped_and_only_whole_names() -> None:
    path_map = PathMap.parse(("/a=/x", "/a/b/=/y/"))
    mapped = [path_map.mapped(path) for path in ("/a/b/c.wav", "/a/c.wav", "/ab/c.wav", "/a", "c.wav")]
    assert mapped == ["/y/c.wav", "/x/c.wav", "/ab/c.wav", "/x", "c.wav"]


@pytest.mark.parametrize("text", ["/a", "=/b", "/=/b", "/a="])
def test_maps_that_are_not_understood(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--path-map {text}: is not understood; write OLD=NEW"):
        FilesOptions(path_map=(text,))


def test_the_suggestion_is_the_longest_common_end(tmp_path: Path) -> None:
    for name in ("one/a/x.wav", "two/b/a/x.wav", "two/b/a/y.wav"):
        write_tone(tmp_path / name, 0.1)
    missing = [Path("/old/b/a/x.wav"), Path("/old/b/a/z.wav")]
    assert suggest_mapping(missing, tmp_path) == ("/old", str(tmp_path / "two"))
    assert suggest_mapping([Path("a/x.wav")], tmp_path) == ("a", str(tmp_path / "one" / "a"))
    assert suggest_mapping([Path("/old/z.wav")], tmp_path) is None
    assert suggest_mapping([Path("x.wav")], tmp_path) is None  # nothing is left to be replaced
    link = tmp_path / "link.wav"
    link.symlink_to("gone.wav")
    assert "is a symbolic link to gone.wav" in str(missing_error([link], 1, "here", tmp_path))


def test_the_suggestion_is_a_map_that_is_understood(tmp_path: Path) -> None:
    write_tone(tmp_path / "audio" / "a.wav", 0.1)
    assert suggest_mapping([Path("/audio/a.wav")], tmp_path) == ("/audio", str(tmp_path / "audio"))
    assert suggest_mapping([Path("/a.wav")], tmp_path) is None


def prepared(source: Path, **options: object) -> Prepared:
    paths = (source, source.with_name("data"))
    return prepare(PrepareOptions(paths, workers=1, **options), no_progress)  # type: ignore[arg-type]


def test_a_cut_corpus_is_prepared(tmp_path: Path) -> None:
    source = cut_folder(tmp_path / "kaldi", "utt0 rec 0 1\nutt1 rec 1.5 3.4\n")
    dataset = prepared(source, split="random:dev=0", shards=1).dataset
    assert dataset.num_frames("train") == 100 + 150
    with dataset.open_shard("train", 0) as shard:
        assert sorted(shard.utterance_ids) == ["utt0", "utt1"]


def test_the_command_line_takes_several_maps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = moved(tmp_path / "kaldi")
    arguments = ["prepare", str(source), str(tmp_path / "data"), "--split", "random:dev=0"]
    first = ["--path-map", f"/export/c/corpus/wav/utt1.wav={source / 'audio/wav/utt1.wav'}"]
    assert speechdp([*arguments, *first]) == 1
    assert "2 of 3 files do not exist" in (error := capsys.readouterr().err)
    assert f"; --path-map /export/c/corpus={source / 'audio'} finds 2 of them" in error
    assert speechdp([*arguments, *first, "--path-map", f"/export/c/corpus={source / 'audio'}"]) == 0


def test_a_map_that_begins_no_path_is_refused(tmp_path: Path) -> None:
    source = moved(tmp_path)
    unused = (
        rf"^--path-map /exprt/c=/y: no path in the tables of {source} \(the first is "
        r"/export/c/corpus/wav/utt0\.wav\) begins with /exprt/c; correct it, or leave it out$"
    )
    with pytest.raises(ConfigError, match=unused):  # where its typo is why files are missing
        read(source, path_map=("/exprt/c=/y",))
    maps = (f"/export/c/corpus={source / 'audio'}", "/exprt/c=/y")
    with pytest.raises(ConfigError, match=unused):  # and where all files are there
        read(source, path_map=maps)
    # A map that a longer one goes before everywhere is no typo.
    read(source, path_map=(f"/export/c/corpus={source / 'audio'}", "/export/c=/y"))


def test_a_map_that_leads_to_nothing_is_what_to_mend(tmp_path: Path) -> None:
    source = moved(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read(source, path_map=("/export=/wrong",))
    assert str(caught.value) == (
        f"{source / 'wav.scp'}: none of 3 files is there, first /wrong/c/corpus/wav/utt0.wav; "
        f"--path-map /export/c/corpus={source / 'audio'} finds 3 of them"
    )
    read(source, path_map=(f"/export/c/corpus={source / 'audio'}",))
    with pytest.raises(
        ConfigError, match=rf"--path-map /export/c/corpus={source / 'audio'} finds 3 of them$"
    ):
        read(source, path_map=("/export/c/corpus=/wrong/deep",))
    for file in (source / "audio" / "wav").iterdir():
        file.unlink()
    with pytest.raises(ConfigError) as caught:
        read(source, path_map=("/export=/wrong",))
    assert str(caught.value) == (
        f"{source / 'wav.scp'}: none of 3 files is there, first /wrong/c/corpus/wav/utt0.wav; "
        "--path-map /export=/wrong leads there: give the folder that holds them"
    )


def test_a_suggested_map_may_replace_more_than_the_wrong_one(tmp_path: Path) -> None:
    """/old=/elsewhere/audio, but audio/ is below the corpus: /old is what is still there to be replaced."""
    write_tone(tmp_path / "audio" / "a.wav", 0.1)
    path_map = PathMap.parse(("/old=/elsewhere/audio",))
    missing = Path(path_map.mapped("/old/a.wav"))
    error = str(missing_error([missing], 1, "here", tmp_path, path_map))
    assert error.endswith(f"; --path-map /old={tmp_path / 'audio'} finds 1 of them")


def test_a_directory_of_lhotse_names_what_its_pipes_run() -> None:
    with pytest.raises(ConfigError, match=r"wav\.scp:1: a pipe \(lbi-3536-23268-0000\) runs sox \(3 pipes"):
        read_kaldi_dir(shared_data("kaldi", "lhotse_mini_librispeech2"))


def test_parts_and_files_can_be_told_apart() -> None:
    part = AudioPart(Path("a.wav"))
    assert str(part) == "a.wav" and part != dataclasses.replace(part, start_s=1.0)
