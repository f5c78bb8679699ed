from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from speechdp.data.shards.alignment_file import open_targets, write_targets
from speechdp.data.shards.shard import Shard
from speechdp.decode.align import Aligner, AlignmentJob, AlignmentReport, align_shards
from speechdp.decode.graphs.graph import LexiconTransducer
from speechdp.decode.scoring import AcousticScorer
from speechdp.labels.hmm import StateInventory, count_frames_and_runs
from speechdp.labels.lexicon import Lexicon
from tests.helpers.oracle import Spoken, oracle, write_dataset

SPOKEN = [
    Spoken("u1", "one two", "one two"),
    Spoken("u2", "two", "two", num_frames=5),  # two has six states
    Spoken("u3", "", "", num_frames=12),
    Spoken("u4", "one two", "one two", num_frames=33),
    Spoken("u5", "two", "one", num_frames=30),  # a wrong transcript is aligned all the same
]


def test_aligner_finds_the_states_and_counts_what_it_cannot_align() -> None:
    lexicon = Lexicon({"ab": (("A", "B"),), "c": (("C",), ("B", "A"))})
    inventory = StateInventory(("A", "B", "C"))
    aligner = Aligner(LexiconTransducer(lexicon, inventory, np.full(12, 0.5)))
    classes = np.array(
        [0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 6, 7, 8, 3, 3, 4, 5], np.int32
    )  # c by its variant
    scores = np.full((len(classes), 12), -5.0, np.float32)
    scores[np.arange(len(classes)), classes] = 0
    found = aligner.align(["ab", "c"], scores)
    assert found is not None and found.tolist() == classes.tolist()
    assert aligner.align(["ab", "c"], scores[:8]) is None
    assert (aligner.num_too_short, aligner.num_failed) == (1, 0)
    assert aligner.align(["ab", "c"], scores[:9]) is not None  # exactly one frame a state
    assert aligner.align(["ab", "x"], scores) is None and aligner.num_unknown == 1


def test_few_graphs_are_kept_where_every_transcript_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    lexicon = Lexicon({"ab": (("A", "B"),), "c": (("C",),)})
    transducer = LexiconTransducer(lexicon, StateInventory(("A", "B", "C")), np.full(12, 0.5))
    aligner, composed = Aligner(transducer), []
    monkeypatch.setattr("speechdp.decode.align._MAX_KEPT_STATES", 150)
    compose = transducer.compose
    monkeypatch.setattr(transducer, "compose", lambda *graph: composed.append(1) or compose(*graph))
    scores = np.zeros((200, 12), np.float32)
    for words in (["ab"], ["c"], ["ab"], ["ab"] * 20, ["ab"] * 21, ["ab"]):
        assert aligner.align(words, scores) is not None
    assert len(composed) == 5  # "ab" was kept at first, and had to go for the long ones


def test_only_the_words_of_a_transcript_are_spelt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lexicon of a hundred thousand words would take seconds, and each transcript's graph milliseconds."""
    lexicon = Lexicon({"ab": (("A", "B"), ("A",)), **{f"c{i}": (("C",),) for i in range(50)}})
    transducer = LexiconTransducer(lexicon, StateInventory(("A", "B", "C")), np.full(12, 0.5))
    chain, spelt = transducer._chain, []
    monkeypatch.setattr(transducer, "_chain", lambda *given: spelt.append(given) or chain(*given))
    assert Aligner(transducer).align(["ab", "c7", "ab"], np.zeros((60, 12), np.float32)) is not None
    assert len(spelt) == 1 + 2 + 1  # silence, two pronunciations, and one


def align(tmp_path: Path, previous: bool) -> tuple[Shard, list[np.ndarray], AlignmentReport]:
    dataset = write_dataset(tmp_path / "data", [SPOKEN])
    (path,) = dataset.shard_paths("test")
    shard = Shard(path)
    old_path = tmp_path / "old.h5" if previous else None
    if old_path is not None:
        ones = [np.ones(spoken.num_frames, np.int32) for spoken in SPOKEN]
        write_targets(old_path, shard, ones, "realigned-1")
    inventory = StateInventory.load(dataset.classes_path)
    model = oracle(inventory.num_classes)
    transducer = LexiconTransducer(Lexicon.load(dataset.lexicon_path), inventory, model.self_loop.numpy())
    report = align_shards(
        [AlignmentJob(path, old_path, tmp_path / "new.h5")],
        Aligner(transducer),
        AcousticScorer(model.model, model.class_log_prior).score,
        AlignmentReport.empty(inventory.num_classes),
        "realigned-2",
    )
    new = open_targets(tmp_path / "new.h5", shard)
    assert new.alignment == "realigned-2"
    return shard, [new.read(u) for u in range(len(SPOKEN))], report


def test_shard_is_aligned_and_what_fails_keeps_its_targets(tmp_path: Path) -> None:
    shard, targets, report = align(tmp_path, previous=False)
    for u in (0, 2, 3):
        assert targets[u].tolist() == shard.read(u)[0][:, 0].tolist()  # the oracle's feature is the class
    assert targets[1].tolist() == [0] * 5
    assert (report.utterances, report.too_short, report.failed) == (5, 1, 0)
    assert report.frames == shard.num_frames
    assert report.changed_frames == sum(int((t != 0).sum()) for t in targets)
    counts = [count_frames_and_runs(t, len(report.frames_per_class)) for t in targets]
    assert report.frames_per_class.tolist() == sum(c[0] for c in counts).tolist()
    assert report.runs_per_class.tolist() == sum(c[1] for c in counts).tolist()


def test_previous_alignment_is_what_is_kept(tmp_path: Path) -> None:
    _, targets, report = align(tmp_path, previous=True)
    assert targets[1].tolist() == [1] * 5
    assert report.changed_frames == sum(int((t != 1).sum()) for t in targets)


def test_reports_of_ranks_add_up() -> None:
    parts = []
    for rank in range(3):
        report = AlignmentReport.empty(4)
        report.add(np.array([0, 0, 1], np.int32), np.array([0, 1, rank], np.int32))
        report.too_short += rank
        parts.append(report.to_dict())
    merged = AlignmentReport.merge(parts)
    assert (merged.utterances, merged.frames, merged.too_short) == (3, 9, 3)
    assert merged.frames_per_class.tolist() == [4, 4, 1, 0]
    assert merged.runs_per_class.tolist() == [4, 3, 1, 0]
    assert merged.changed_frames == 2 + 1 + 2
