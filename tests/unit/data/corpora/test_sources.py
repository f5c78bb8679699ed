"""Several sources as one corpus: sets to train on beside sets that are dev or test as a whole."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from speechdp.cli import main
from speechdp.data.corpora.corpus import UNKNOWN_SPEAKER, Corpus, CorpusUtterance
from speechdp.data.corpora.sources import Source, joined
from speechdp.data.corpora.splits import choose_rule, split_corpus
from speechdp.data.prepare.divided_corpus import warn_of_splits
from speechdp.data.prepare.pipeline import Prepared, prepare
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError
from speechdp.options.prepare import FilesOptions, PrepareOptions, SpeechOptions
from tests.helpers.corpora import digit_folder, kaldi_folder, no_progress, write_tone


def _part(
    name: str, speakers: str, split: str | None = None, own: str | None = None
) -> tuple[Source, Corpus]:
    """Return a source with two utterances of each speaker, a letter."""
    path = Path(name)
    return Source(path, split), Corpus.of(
        path,
        (
            CorpusUtterance(f"{speaker}{n}", speaker, "one", path / f"{speaker}{n}.wav", split=own)
            for speaker in speakers
            for n in range(2)
        ),
    )


def _divided(corpus: Corpus, spec: str | None = None, speaker: str | None = None) -> dict[str, str]:
    """Return the ids of each split."""
    splits = split_corpus(corpus, choose_rule(corpus, spec, speaker, 1))
    return {name: " ".join(u.utterance_id for u in utterances) for name, utterances in splits.items()}


def test_what_is_given_for_dev_and_test_is_just_that() -> None:
    corpus = joined([_part("a", "xy"), _part("b", "z"), _part("d", "d", "dev"), _part("t", "t", "test")])
    assert _divided(corpus) == {"train": "x0 x1 y0 y1 z0 z1", "dev": "d0 d1", "test": "t0 t1"}
    assert choose_rule(corpus, None, None, 1).spec == "sources:dev=d,test=t"


def test_dev_may_be_of_several_sources() -> None:
    corpus = joined([_part("a", "x"), _part("c/clean", "c", "dev"), _part("c/other", "o", "dev")])
    assert _divided(corpus) == {"train": "x0 x1", "dev": "c0 c1 o0 o1"}
    assert choose_rule(corpus, None, None, 1).spec == "sources:dev=clean+other"


def test_sources_without_dev_and_test_are_divided_as_one_corpus() -> None:
    corpus = joined([_part("a", "vw"), _part("b", "xy")])
    assert choose_rule(corpus, None, None, 1).spec == "speakers:dev=0.1,test=0.1"
    assert len(_divided(corpus)["train"].split()) == 4


def test_beside_a_test_source_dev_is_taken_from_the_rest() -> None:
    corpus = joined([_part("a", "vwxyz"), _part("t", "t", "test")])
    divided = _divided(corpus)
    assert divided["test"] == "t0 t1"
    assert len(divided["dev"].split()) == 2 and len(divided["train"].split()) == 8
    assert choose_rule(corpus, None, None, 1).spec == "sources:test=t;speakers:dev=0.1"
    named = _divided(corpus, "speaker:dev=x+z")
    assert named == {"train": "v0 v1 w0 w1 y0 y1", "dev": "x0 x1 z0 z1", "test": "t0 t1"}


def test_beside_a_dev_source_a_speaker_may_be_held_out() -> None:
    corpus = joined([_part("a", "xyz"), _part("d", "d", "dev")])
    assert _divided(corpus, None, "y") == {"train": "x0 x1 z0 z1", "dev": "d0 d1", "test": "y0 y1"}


def test_a_division_of_a_source_s_own_counts_beside_what_is_given() -> None:
    (source, first), (_, second) = _part("a", "x", own="train"), _part("a", "y", own="dev")
    own = source, Corpus.of(source.path, (*first.utterances, *second.utterances))
    corpus = joined([own, _part("t", "t", "test")])
    assert _divided(corpus) == {"train": "x0 x1", "dev": "y0 y1", "test": "t0 t1"}
    with pytest.raises(ConfigError, match=r"^a: has a dev split of its own; leave --dev out, or give only"):
        joined([own, _part("d", "d", "dev")])


def test_a_split_is_not_filled_twice() -> None:
    corpus = joined([_part("a", "xyz"), _part("t", "t", "test")])
    for spec in ("random:dev=0.2,test=0.2", "speakers:test=0.3", "speaker:test=t", "index:test=0"):
        with pytest.raises(ConfigError, match=re.escape(f"--split {spec}: fills test, and so does --test; ")):
            choose_rule(corpus, spec, None, 1)


def test_remedies_leave_alone_what_is_given() -> None:
    corpus = joined([_part("a", "x"), _part("t", "t", "test")])
    with pytest.raises(ConfigError, match=r"^a: .* has 1; choose --split random:dev=0.05$"):
        choose_rule(corpus, "speakers:dev=0.1", None, 1)
    with pytest.raises(ConfigError, match=r"^a: .*\(of 2\); give a larger share, e.g. --split ") as refused:
        _divided(corpus, "random:dev=0.0001")
    assert _divided(corpus, str(refused.value).rsplit(" ", 1)[1]).keys() == {"train", "dev", "test"}
    with pytest.raises(
        ConfigError, match=r"falls into train .*; choose another --split, e.g. random:dev=0.2$"
    ):
        _divided(corpus, "speaker:dev=x")
    none = replace(corpus, utterances=corpus.utterances[:2])
    with pytest.raises(ConfigError, match=r"falls into train .*; name one of its speakers in --speakers$"):
        _divided(none)
    of_dev = joined([_part("a", "x"), _part("d", "d", "dev")])
    with pytest.raises(
        ConfigError, match=r"falls into train .*; leave --held-out-speaker out, as nobody else"
    ):
        _divided(of_dev, None, "x")


def test_a_share_of_nothing_fills_no_split() -> None:
    corpus = joined([_part("a", "vwxyz"), _part("t", "t", "test")])
    for spec in ("speakers:dev=0.2,test=0", "random:dev=0.9,test=0"):
        assert _divided(corpus, spec)["test"] == "t0 t1"


def test_what_is_also_in_a_test_source_is_not_trained_on(tmp_path: Path) -> None:
    whole = digit_folder(tmp_path / "corpus", ("ann", "bob", "eve"), 2)
    part = digit_folder(whole / "part", ("zoe",), 2)
    (tmp_path / "link").symlink_to(whole)  # another way to the same files
    prepared = _prepared((tmp_path / "link", tmp_path / "data"), test=(part,), split="random:dev=0.3")
    assert prepared.dataset.splits["test"].utterances == 4
    assert sum(split.utterances for split in prepared.dataset.splits.values()) == 16
    assert f"{tmp_path / 'link'}: 4 utterances are also in {part}, and used for test only" in prepared.notices


def test_what_dev_and_test_take_is_told_of_each(tmp_path: Path) -> None:
    whole = digit_folder(tmp_path / "corpus", ("ann", "bob"), 2)
    dev, test = digit_folder(whole / "dev", ("eve",), 1), digit_folder(whole / "test", ("zoe",), 3)
    prepared = _prepared((whole, tmp_path / "data"), dev=(dev,), test=(test,))
    told = [notice.removeprefix(f"{whole}: ") for notice in prepared.notices if "are also in" in notice]
    assert told == [
        f"2 utterances are also in {dev}, and used for dev only",
        f"6 utterances are also in {test}, and used for test only",
    ]


def test_what_the_same_pipe_writes_is_the_same_audio(tmp_path: Path) -> None:
    """A part of a Kaldi data directory that was made by subset_data_dir.sh, say."""
    whole, part = kaldi_folder(tmp_path / "train", 6), tmp_path / "part"
    lines = "".join(f"utt{n} cat {whole}/wav/utt{n}.wav |\n" for n in range(6))
    (whole / "wav.scp").write_text(lines, encoding="utf-8")
    part.mkdir()
    for name in ("wav.scp", "text", "utt2spk"):
        rows = (whole / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (part / name).write_text("".join(rows[:2]), encoding="utf-8")
    files = FilesOptions(allow_pipes=True)
    prepared = _prepared((whole, tmp_path / "data"), dev=(part,), files=files)
    assert {name: split.utterances for name, split in prepared.dataset.splits.items()} == {
        "train": 4,
        "dev": 2,
    }
    assert "ran the programs of pipes, without a shell: cat (6 times)" in prepared.notices


def test_changed_copies_of_what_is_tested_are_not_trained_on() -> None:
    source, corpus = _part("a", "xy")
    copies = (replace(u, utterance_id=f"sp0.9-{u.utterance_id}", audio=Path("c")) for u in corpus.utterances)
    changed = Corpus.of(source.path, (*corpus.utterances, *copies))
    whole = joined([(source, changed), _part("a", "y", "dev")])
    assert _divided(whole) == {"train": "sp0.9-x0 sp0.9-x1 x0 x1", "dev": "y0 y1"}
    assert whole.notices == (
        "a: 2 utterances are also in a, and used for dev only",
        "a: left out: 2 utterances changed from those, by Kaldi's names for such",
    )


def test_nothing_is_left_where_dev_and_test_take_all() -> None:
    with pytest.raises(
        ConfigError, match=r"^a: all of its utterances are in --dev a and --test a, too; give"
    ):
        joined([_part("a", "xy"), _part("a", "x", "dev"), _part("a", "y", "test")])
    with pytest.raises(
        ConfigError, match=r"^a: all of its .* are in --dev a, too; leave it out as a SOURCE$"
    ):
        joined([_part("a", "x"), _part("b", "z"), _part("a", "x", "dev")])  # of a shell's corpus/*


def test_links_of_files_are_not_trained_on_either(tmp_path: Path) -> None:
    """A list of files to test with is often a folder of links."""
    whole = digit_folder(tmp_path / "corpus", ("ann", "bob"), 3)
    (tmp_path / "test").mkdir()
    for file in whole.glob("0_bob_*"):
        (tmp_path / "test" / file.name.replace("bob", "bobby")).symlink_to(file)
    prepared = _prepared((whole, tmp_path / "data"), test=(tmp_path / "test",), split="random:dev=0.3")
    sizes = {name: split.utterances for name, split in prepared.dataset.splits.items()}
    assert sizes["test"] == 3 and sizes["train"] + sizes["dev"] == 9


@pytest.mark.parametrize(
    ("sources", "held_out", "message"),
    [
        (("corpus/part",), {"test": ("corpus",)}, "all of its utterances are in --test .*corpus, too; give"),
        (("corpus", "corpus/part"), {}, r"zoe_0.wav: is read from .*corpus and from .*part; give sources"),
        (("other",), {"dev": ("corpus",), "test": ("corpus/part",)}, r"zoe_0.wav: is read from"),
        (("other", "other"), {}, "other: is given twice; give it once"),
        (
            ("other",),
            {"dev": ("corpus",), "test": ("corpus",)},
            r"from --dev .*corpus and from --test .*corpus;",
        ),
        (("other",), {"test": ("nowhere",)}, "nowhere: no such folder"),
    ],
)
def test_sources_that_overlap_or_are_not_there_are_refused(
    tmp_path: Path, sources: tuple[str, ...], held_out: dict[str, tuple[str, ...]], message: str
) -> None:
    whole = digit_folder(tmp_path / "corpus", ("ann", "bob", "eve"), 1)
    digit_folder(whole / "part", ("zoe",), 1)
    digit_folder(tmp_path / "other", ("max",), 1)
    given = {name: tuple(tmp_path / path for path in paths) for name, paths in held_out.items()}
    with pytest.raises(ConfigError, match=message):
        _prepared((*(tmp_path / path for path in sources), tmp_path / "data"), **given)
    assert not (tmp_path / "data").exists()


def test_ids_that_two_sources_have_get_their_names() -> None:
    (source, corpus), other = _part("x/train", "a"), _part("y/train", "a")
    copy = CorpusUtterance("sp0.9-a0", "sp0.9-a", "one", Path("x/train/copy.wav"))
    whole = joined([(source, Corpus.of("x/train", (*corpus.utterances, copy))), other])
    ids = [utterance.utterance_id for utterance in whole.utterances]
    # Copies of an utterance are still known as such: they stay in its split.
    assert ids == ["sp0.9-x-train-a0", "x-train-a0", "x-train-a1", "y-train-a0", "y-train-a1"]
    assert any("share utterance ids" in notice for notice in whole.notices)
    assert whole.speakers == ("a", "sp0.9-a")


def test_warnings_advise_what_is_possible_beside_the_sources() -> None:
    def warnings(train: str, dev: str, test: str, *held_out: str) -> str:
        splits = {
            name: [
                CorpusUtterance(f"{name}{n}", s, "one", Path(f"{name}{n}")) for n, s in enumerate(speakers)
            ]
            for name, speakers in (("train", train), ("dev", dev), ("test", test))
        }
        return " ".join(warn_of_splits(splits, held_out))

    assert "(--split speakers:dev=0.1,test=0.1 keeps" in warnings("abcd", "aa", "bb")
    assert "(--split speakers:dev=0.1 keeps" in warnings("abcd", "aa", "tt", "test")
    assert "(--dev of other speakers would" in warnings("aaaa", "aa", "tu", "test")
    assert "(--test of other speakers would" in warnings("aaaa", "dd", "aa", "dev")
    assert "(--test of other speakers would" in warnings("abcd", "ee", "at", "test")
    assert "(--dev and --test of other speakers would" in warnings("abcd", "ae", "at", "dev", "test")
    assert "test holds a single utterance" in warnings("abcd", "ee", "t", "test")
    assert "nothing; give --test more" in warnings("abcd", "ee", "t", "test")
    assert "give larger shares, e.g. --split random:dev=0.2" in warnings("abcd", "e", "tu", "test")


def _prepared(paths: tuple[Path, ...], **options: object) -> Prepared:
    return prepare(PrepareOptions(paths, workers=1, **options), no_progress)  # type: ignore[arg-type]


def test_folders_and_kaldi_directories_may_be_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = digit_folder(tmp_path / "digits", ("ann", "bob", "eve"), 1)
    kaldi = kaldi_folder(tmp_path / "kaldi", 4)
    data = tmp_path / "data"
    arguments = ["prepare", str(folder), str(kaldi), str(data), "--workers", "1", "--shards", "2"]
    for name in ("dev", "test"):
        for number in range(2):  # each option may be repeated
            held_out = tmp_path / f"{name}-{number}"
            write_tone(held_out / f"1_{name}_{number}.wav")
            arguments += [f"--{name}", str(held_out)]
    assert main.run(arguments) == 0
    assert "split by sources:dev=dev-0+dev-1,test=test-0+test-1" in capsys.readouterr().out
    splits = Dataset.open(data).splits
    assert {name: split.utterances for name, split in splits.items()} == {"train": 10, "dev": 2, "test": 2}


def test_a_pattern_is_for_the_folders_among_the_sources(tmp_path: Path) -> None:
    write_tone(tmp_path / "folder" / "ann-one.wav")
    write_tone(tmp_path / "folder" / "ann-two.wav")
    kaldi = kaldi_folder(tmp_path / "kaldi", 2)
    prepared = _prepared((tmp_path / "folder", tmp_path / "data"), dev=(kaldi,), pattern="{speaker}-{word}")
    assert {name: split.utterances for name, split in prepared.dataset.splits.items()} == {
        "train": 2,
        "dev": 2,
    }
    with pytest.raises(ConfigError, match=r"kaldi: is a Kaldi data directory .*; leave --pattern out"):
        _prepared((kaldi, tmp_path / "x"), dev=(kaldi_folder(tmp_path / "more"),), pattern="{speaker}-{word}")


def test_words_of_a_test_source_are_not_in_the_vocabulary(tmp_path: Path) -> None:
    train = digit_folder(tmp_path / "train", ("ann",), 2, digits=2)
    test = digit_folder(tmp_path / "test", ("bob",), 1, digits=3)
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text("zero Z\none W\n")
    prepared = _prepared((train, tmp_path / "data"), test=(test,), lexicon=lexicon, split="random:dev=0.5")
    assert any("test: 1 of 3 words" in notice for notice in prepared.notices)


def test_a_path_map_may_be_for_any_of_the_sources(tmp_path: Path) -> None:
    """Also where its use comes after files of another are found missing: that message is the right one."""
    train, test = kaldi_folder(tmp_path / "train"), kaldi_folder(tmp_path / "test")
    (test / "wav.scp").write_text("".join(f"utt{n} /old/utt{n}.wav\n" for n in range(3)))
    mapped = FilesOptions(path_map=(f"/old={test}/wav",))
    options = {"test": (test,), "files": mapped, "split": "random:dev=0.4"}
    assert _prepared((train, tmp_path / "data"), **options).dataset.splits["test"].utterances == 3
    (train / "wav" / "utt0.wav").unlink()
    with pytest.raises(ConfigError, match=r"train/wav.scp: 1 of 3 files do not exist, first wav/utt0.wav"):
        _prepared((train, tmp_path / "again"), **options)


def test_what_is_left_out_is_told_of_each_source(tmp_path: Path) -> None:
    train, test = kaldi_folder(tmp_path / "train", 5), kaldi_folder(tmp_path / "test")
    (test / "wav" / "utt1.wav").unlink()
    files = FilesOptions(skip_incomplete=True)
    prepared = _prepared((train, tmp_path / "data"), test=(test,), files=files, split="random:dev=0.4")
    assert any(notice.startswith(f"{test}: ") and "no audio file" in notice for notice in prepared.notices)
    assert prepared.dataset.splits["test"].utterances == 2


def test_a_corpus_for_a_trained_model_may_have_all_splits(tmp_path: Path) -> None:
    like = _prepared((digit_folder(tmp_path / "in"), tmp_path / "like")).dataset.path
    new, test = digit_folder(tmp_path / "new", ("eve",), 2), digit_folder(tmp_path / "test", ("zoe",), 2)
    only = _prepared((new, test, tmp_path / "only"), like=like).dataset
    assert {name: split.utterances for name, split in only.splits.items()} == {"test": 8}
    both = _prepared((new, tmp_path / "both"), like=like, dev=(test,)).dataset
    assert {name: split.utterances for name, split in both.splits.items()} == {"train": 4, "dev": 4}


def test_a_corpus_for_a_trained_model_may_have_no_source_but_dev_and_test(tmp_path: Path) -> None:
    like = _prepared((digit_folder(tmp_path / "in"), tmp_path / "like")).dataset.path
    dev, test = digit_folder(tmp_path / "dev", ("eve",), 2), digit_folder(tmp_path / "test", ("zoe",), 3)
    both = _prepared((tmp_path / "both",), like=like, dev=(dev,), test=(test,)).dataset
    assert {name: split.utterances for name, split in both.splits.items()} == {"dev": 4, "test": 6}
    assert both.split == "sources:dev=dev,test=test"
    only = _prepared((tmp_path / "only",), like=like, dev=(dev,)).dataset
    assert {name: split.utterances for name, split in only.splits.items()} == {"dev": 4}
    with pytest.raises(ConfigError, match="divide a SOURCE, and there is none; leave them out"):
        _prepared((tmp_path / "none",), like=like, dev=(dev,), split="random:test=0.5")
    with pytest.raises(ConfigError, match="prepare takes SOURCE and DATA, not 1 paths"):
        _prepared((tmp_path / "none",), dev=(dev,), test=(test,))


def test_synthesis_takes_voices_from_all_sources(tmp_path: Path) -> None:
    train, test = digit_folder(tmp_path / "train", ("ann",), 3), digit_folder(tmp_path / "test", ("bob",), 2)
    options: dict[str, object] = {"task": "synthesis", "dev": (test,)}
    dataset = _prepared((train, tmp_path / "data"), **options).dataset
    assert {name: split.utterances for name, split in dataset.splits.items()} == {"train": 6, "dev": 4}
    of_ann = SpeechOptions(speakers="ann")
    with pytest.raises(ConfigError, match=r"falls into dev by .*; leave --dev out, or name one of its"):
        _prepared((train, tmp_path / "x"), **options, for_synthesis=of_ann)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"synthetic": 0.1}, "--test does not go with --synthetic"),
        ({"held_out_speaker": "ann"}, "--held-out-speaker and --test both make the test split"),
    ],
)
def test_options_that_do_not_go_with_a_test_source(options: dict[str, object], message: str) -> None:
    paths = (Path("data"),) if "synthetic" in options else (Path("train"), Path("data"))
    with pytest.raises(ConfigError, match=message):
        PrepareOptions(paths, test=(Path("test"),), **options)  # type: ignore[arg-type]


def test_unknown_speakers_of_two_sources_are_no_one_speaker() -> None:
    """Nothing says that somebody nameless is on both sides."""
    utterances = [CorpusUtterance(f"u{n}", UNKNOWN_SPEAKER, "one", Path(f"{n}")) for n in range(4)]
    assert warn_of_splits({"train": utterances[:2], "test": utterances[2:]}, ("test",)) == ()
    ann = [CorpusUtterance(f"ann{n}", "ann", "one", Path(f"ann{n}")) for n in range(4)]
    bob = CorpusUtterance("bob", "bob", "one", Path("bob"))
    splits = {"train": [*utterances[:2], *ann[:2], bob], "dev": ann[2:], "test": utterances[2:]}
    (warning,) = warn_of_splits(splits, ("test",))
    assert "first ann" in warning and "(--split speakers:dev=0.1 keeps speakers apart)" in warning


def test_another_source_with_the_same_ids_moves_no_utterance() -> None:
    parts = [_part(name, "abcdefghij") for name in "xyz"]
    alone = _divided(joined(parts[:1]), "random:dev=0.3,test=0.3")
    for number in (2, 3):
        together = _divided(joined(parts[:number]), "random:dev=0.3,test=0.3")
        for split, ids in alone.items():
            of_first = [name.partition("-")[2] for name in together[split].split() if name.startswith("x-")]
            assert of_first == ids.split()


def test_sources_with_and_without_a_division_of_their_own_need_a_rule() -> None:
    own, others = [_part("a", "xyz", own="train"), _part("b", "vw")], [_part("t", "t", "test")]
    for parts, rule in ((own, "random:dev=0.05,test=0.05"), (own + others, "random:dev=0.05")):
        with pytest.raises(ConfigError) as refused:
            joined(parts)
        assert str(refused.value) == (
            "b: has no division into train, dev and test of its own, and a has one; divide both by a rule, "
            f"e.g. --split {rule}"
        )
        corpus = joined(parts, is_ruled=True)
        assert {u.split for u in corpus.to_divide.utterances} == {None}
        assert choose_rule(corpus, rule, None, 1).named
    # With --dev all else is train.
    corpus = joined([*own, _part("d", "d", "dev")])
    assert _divided(corpus) == {"train": "v0 v1 w0 w1 x0 x1 y0 y1 z0 z1", "dev": "d0 d1"}
