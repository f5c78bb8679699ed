"""Sound that stands twice: copies, and parts of recordings that overlap, on two sides of a division."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import soundfile

from speechdp.data.corpora import same_sound
from speechdp.data.corpora.same_sound import SameFiles, SoundIndex
from speechdp.data.prepare import divided_corpus
from speechdp.data.prepare.pipeline import Prepared, prepare
from speechdp.data.signal.audio import AudioPart, AudioSource
from speechdp.errors import ConfigError
from speechdp.options.prepare import KaldiOptions, PrepareOptions
from tests.helpers.corpora import digit_folder, kaldi_folder, no_progress, write_tone


def _prepared(paths: tuple[Path, ...], **options: object) -> Prepared:
    return prepare(PrepareOptions(paths, workers=1, **options), no_progress)  # type: ignore[arg-type]


def _sizes(prepared: Prepared) -> dict[str, int]:
    return {name: split.utterances for name, split in prepared.dataset.splits.items()}


def _copy(file: Path, folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    return Path(shutil.copyfile(file, folder / name))


def test_copies_of_a_test_source_are_not_trained_on(tmp_path: Path) -> None:
    whole, test = digit_folder(tmp_path / "corpus", ("ann", "bob"), 3), tmp_path / "test"
    for index in range(3):
        _copy(whole / f"0_bob_{index}.wav", test, f"0_other_{index}.wav")
    prepared = _prepared((whole, tmp_path / "data"), test=(test,), split="random:dev=0.3")
    sizes = _sizes(prepared)
    assert sizes["test"] == 3 and sizes["train"] + sizes["dev"] == 9
    assert f"{whole}: 3 utterances are also in {test}, and used for test only" in prepared.notices


def test_copies_in_two_sources_are_refused_by_both_names(tmp_path: Path) -> None:
    one, two = digit_folder(tmp_path / "one", ("ann",), 2), digit_folder(tmp_path / "two", ("bob",), 2)
    copy = _copy(one / "0_ann_1.wav", two, "0_eve_1.wav")
    with pytest.raises(ConfigError) as refused:
        _prepared((one, two, tmp_path / "data"))
    assert str(refused.value) == (
        f"{copy}: is read from {one} (there {one / '0_ann_1.wav'}) and from {two}; give sources that have no "
        "audio in common"
    )


def _cut(folder: Path, segments: dict[str, tuple[float, float]], recording: Path) -> Path:
    """Write a Kaldi data directory of parts of a recording; first letters of ids are speakers."""
    folder.mkdir()
    (folder / "wav.scp").write_text(f"rec {recording}\n")
    (folder / "segments").write_text("".join(f"{u} rec {s} {e}\n" for u, (s, e) in segments.items()))
    (folder / "text").write_text("".join(f"{u} one two\n" for u in segments))
    (folder / "utt2spk").write_text("".join(f"{u} {u[0]}\n" for u in segments))
    return folder


def test_overlapping_parts_of_a_test_source_are_not_trained_on(tmp_path: Path) -> None:
    recording = write_tone(tmp_path / "rec.wav", 20.0)
    # c is within a test utterance, d shares 0.3 s of padding with one, e more than half of itself.
    cut = {"a": (0.0, 4.0), "b": (16.0, 20.0), "c": (5.0, 6.0), "d": (7.7, 9.7), "e": (11.9, 12.5)}
    whole = _cut(tmp_path / "whole", cut, recording)
    test = _cut(tmp_path / "test", {"t": (4.0, 8.0), "u": (10.0, 12.4)}, recording)
    prepared = _prepared((whole, tmp_path / "data"), test=(test,), split="random:dev=0")
    assert _sizes(prepared) == {"train": 3, "test": 2}
    assert f"{whole}: 2 utterances are also in {test}, and used for test only" in prepared.notices


def test_copies_within_a_corpus_are_told(tmp_path: Path) -> None:
    corpus = digit_folder(tmp_path / "corpus", ("ann", "bob"), 4)
    for name in ("0_cat_0.wav", "0_cat_1.wav"):
        _copy(corpus / "0_ann_0.wav", corpus, name)
    split = "speaker:dev=bob,test=cat"
    warned = [n for n in _prepared((corpus, tmp_path / "data"), split=split).notices if "sound" in n]
    assert warned == [
        "warning: 2 test utterances have sound that train has, too, first 0_cat_0 (0_ann_0 in train): a copy "
        "of the file, or an overlapping part, so its errors mean little; leave one of the two out"
    ]
    for name in ("0_cat_0.wav", "0_cat_1.wav"):
        (corpus / name).unlink()
        write_tone(corpus / name, 0.4)
    assert not any("sound" in n for n in _prepared((corpus, tmp_path / "other"), split=split).notices)


def test_overlapping_parts_within_a_corpus_are_told(tmp_path: Path) -> None:
    recording = write_tone(tmp_path / "rec.wav", 20.0)
    cut = {"a1": (0.0, 4.0), "a2": (8.0, 12.0), "b1": (3.7, 6.0), "c1": (10.0, 14.0), "c2": (13.0, 14.5)}
    whole = _cut(tmp_path / "whole", cut, recording)
    prepared = _prepared((whole, tmp_path / "data"), split="speaker:dev=b,test=c")
    assert [n.partition(":")[2].partition(":")[0] for n in prepared.notices if "sound" in n] == [
        " 1 test utterance has sound that train has, too, first c1 (a2 in train)"
    ]


def test_channels_of_a_file_are_different_sound_however_tables_name_them(tmp_path: Path) -> None:
    stereo = tmp_path / "call.wav"
    soundfile.write(stereo, [[0.1, 0.2]] * 32000, 8000)
    by_segments, by_table = AudioPart(stereo, channel=1), AudioPart(stereo, 1.0, 2.0, of_several=2)
    other, mean = AudioPart(stereo, channel=0), AudioPart(stereo, of_several="mix")
    files = SameFiles([(by_segments, 0), (by_table, 1), (other, 1), (mean, 1)])
    index = SoundIndex(files, [(by_segments, "right")])
    assert [index.find(one) for one in (by_table, other, mean)] == ["right", None, None]


def test_a_file_of_one_channel_is_one_whether_tables_name_it_or_not(tmp_path: Path) -> None:
    mono = write_tone(tmp_path / "a.wav", 1.0)
    copy = _copy(mono, tmp_path, "b.wav")
    named = [AudioPart(copy, channel=0), AudioPart(copy, of_several=2), AudioPart(mono, of_several="mix")]
    for one in named:
        files = SameFiles([(mono, 0), (one, 1)])
        assert SoundIndex(files, [(mono, "mono")]).find(one) == "mono"


def test_of_parts_that_touch_that_which_overlaps_is_named() -> None:
    file = Path("rec.wav")
    parts = [AudioPart(file, float(n), n + 1.0) for n in range(6)]
    long = AudioPart(file, 0.0, 2.2)
    files = SameFiles([(part, 0) for part in [*parts, long]])
    index = SoundIndex(files, ((part, f"part {n}") for n, part in enumerate(parts)))
    assert index.find(AudioPart(file, 3.4, 4.2)) == "part 3"
    assert index.find(AudioPart(file, 3.8, 5.2)) == "part 4"
    assert index.find(AudioPart(file, 6.0, 7.0)) is None
    # One that began earlier reaches beyond those that follow it, but shares too little.
    index = SoundIndex(files, [(long, "long"), (parts[1], "part 1"), (parts[2], "part 2")])
    assert index.find(AudioPart(file, 2.1, 4.0)) == "part 2"
    assert index.find(AudioPart(file, 1.0, 1.2)) == "long"


def test_only_files_of_one_size_on_two_sides_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    for name in ("_middle", "_whole"):
        function = getattr(same_sound, name)
        monkeypatch.setattr(same_sound, name, lambda path, f=function: (read.append(path), f(path))[1])
    same = [write_tone(tmp_path / f"{n}.wav", 0.5) for n in range(4)]  # of one size
    other = [write_tone(tmp_path / f"{n}.wav", 0.5 + n) for n in range(4, 8)]
    SameFiles([(path, 0) for path in same] + [(path, 1) for path in other])
    assert read == []
    SameFiles([(path, n % 2) for n, path in enumerate(same)])
    assert sorted(read) == sorted(map(str, same))  # the middles, which differ
    read.clear()
    link = tmp_path / "link.wav"
    link.symlink_to(same[0])
    files = SameFiles([(same[0], 0), (link, 1)])
    assert files.of(link) == files.of(same[0]) and read == []


def test_several_sources_are_asked_of_the_disk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name in ("_size", "_middle", "_whole"):
        function = getattr(same_sound, name)
        monkeypatch.setattr(
            same_sound, name, lambda path, n=name, f=function: (asked.append(f"{n} {path}"), f(path))[1]
        )
    one, two = digit_folder(tmp_path / "one", ("ann",), 3), digit_folder(tmp_path / "two", ("bob",), 3)
    _copy(one / "0_ann_0.wav", one, "0_cat_0.wav")  # looked for only where splits are compared
    prepared = _prepared((one, two, tmp_path / "data"), split="speaker:dev=cat,test=bob")
    assert any("1 dev utterance has sound that train has, too, first" in n for n in prepared.notices)
    assert len(asked) == len(set(asked)) and sum(each.startswith("_size") for each in asked) == 13


def test_the_sound_of_a_split_is_gone_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone_through: list[int] = []

    def noted(files: SameFiles, sounds: Iterable[tuple[AudioSource, str]]) -> SoundIndex[str]:
        listed = list(sounds)
        gone_through.append(len(listed))
        return SoundIndex(files, listed)

    monkeypatch.setattr(divided_corpus, "SoundIndex", noted)
    corpus = digit_folder(tmp_path / "corpus", ("ann", "bob", "cat"), 3)
    _copy(corpus / "0_bob_0.wav", corpus, "0_cat_9.wav")
    prepared = _prepared((corpus, tmp_path / "data"), split="speaker:dev=bob,test=cat")
    assert gone_through == [6, 6]  # train, for dev and for test, and dev, for test
    assert any("1 test utterance has sound that dev has, too, first 0_cat_9" in n for n in prepared.notices)


def test_files_that_differ_only_beside_their_middles_are_no_copies(tmp_path: Path) -> None:
    one, two = (write_tone(tmp_path / name, 2.0, 16000) for name in ("one.wav", "two.wav"))
    content = bytearray(one.read_bytes())
    content[-1] ^= 1
    two.write_bytes(content)
    files = SameFiles([(one, 0), (two, 1)])
    assert files.of(one) != files.of(two)


def test_what_cannot_be_read_is_no_copy(tmp_path: Path) -> None:
    empty = [tmp_path / "a.wav", tmp_path / "b.wav"]
    for path in empty:
        path.touch()
    gone = tmp_path / "gone.wav"
    files = SameFiles([(empty[0], 0), (empty[1], 1), (gone, 1)])
    assert files.of(empty[0]) != files.of(empty[1])
    assert files.of(gone) == files.of(gone)


def test_a_flat_corpus_is_looked_up_in_no_more_steps_than_it_needs() -> None:
    """A recording of very many parts: each is found among its neighbours."""
    parts = [AudioPart(Path("rec.wav"), 2.0 * n, 2.0 * n + 1.5) for n in range(100_000)]
    files = SameFiles([(part, 0) for part in parts])
    index = SoundIndex(files, ((part, n) for n, part in enumerate(parts)))
    assert [index.find(parts[n]) for n in range(0, 100_000, 10)] == list(range(0, 100_000, 10))


def test_formats_are_not_compared(tmp_path: Path) -> None:
    """As docs/preparing.md says: only the same bytes are a copy."""
    corpus = digit_folder(tmp_path / "corpus", ("ann", "bob"), 2)
    samples, rate = soundfile.read(corpus / "0_ann_0.wav")
    soundfile.write(corpus / "0_cat_0.flac", samples, rate)
    prepared = _prepared((corpus, tmp_path / "data"), split="speaker:dev=bob,test=cat")
    assert not any("sound" in notice for notice in prepared.notices)


def test_kaldi_alignments_are_told_of_copies_too(tmp_path: Path) -> None:
    source = kaldi_folder(tmp_path / "kaldi", 4)
    shutil.copyfile(source / "wav" / "utt0.wav", source / "wav" / "utt3.wav")
    pdfs = "".join(f"utt{n} " + "0 " * 50 + "\n" for n in range(4))
    (tmp_path / "pdfs").write_text(pdfs)
    kaldi = KaldiOptions(kaldi=source, ali_pdf=tmp_path / "pdfs")
    prepared = _prepared((tmp_path / "data",), from_kaldi=kaldi, split="speaker:dev=spk1")
    assert any("1 dev utterance has sound that train has, too, first utt3" in n for n in prepared.notices)
