"""Batches with the HMMs of their transcripts: however they are made, and none where nobody asks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from speechdp.comm.base import Communicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.loading.batch import Batch
from speechdp.data.loading.source import SplitSource
from speechdp.data.loading.source_options import SourceOptions, open_local_source
from speechdp.data.loading.source_request import SourceRequest
from speechdp.data.plan.epoch_plan import PlanOptions, plan_epoch
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.shard import Shard
from speechdp.data.transforms.preprocess import AugmentOptions
from speechdp.labels.hmm import StateInventory
from speechdp.labels.lexicon import Lexicon
from speechdp.labels.transcript_hmm import NO_PATH, TranscriptCompiler, TranscriptHmms, TranscriptOptions
from tests.helpers.corpora import stored_digits
from tests.helpers.feeding import Trainer, fed

HMMS = TranscriptOptions(self_loop=0.7, silence_probability=0.25, transition_scale=0.5)
REQUEST = SourceRequest("train", seed=5, transcripts=HMMS)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    return stored_digits(tmp_path_factory.mktemp("transcripts"))


def shards_of(dataset: Dataset) -> list[Shard]:
    return [Shard(path) for path in dataset.shard_paths("train")]


def batches(dataset: Dataset, request: SourceRequest, num_threads: int = 1) -> list[tuple[list[str], Batch]]:
    """Return the texts and the batches of an epoch."""
    shards = shards_of(dataset)
    with closing(open_local_source(dataset, request, SourceOptions(num_threads=num_threads))) as source:
        plan = plan_epoch(source.index, PlanOptions(5), 0, 1).ranks[0]
        found = []
        for number in range(plan.num_batches):
            segments = plan.batch(number)
            places = zip(segments.shard.tolist(), segments.utterance.tolist(), strict=True)
            found.append(([shards[shard].text(u) for shard, u in places], source.batch(segments)))
    return found


def expected(dataset: Dataset, texts: list[str]) -> TranscriptHmms:
    compiler = TranscriptCompiler(
        Lexicon.load(dataset.lexicon_path), StateInventory.load(dataset.classes_path), 0.7, 0.25, 0.5
    )
    return TranscriptHmms.of([compiler.compile(text.split()) for text in texts])


def assert_same(one: TranscriptHmms | None, other: TranscriptHmms) -> None:
    assert one is not None
    for name, array in vars(other).items():
        np.testing.assert_array_equal(getattr(one, name), array)
        assert getattr(one, name).dtype == array.dtype


@pytest.mark.parametrize(
    ("kind", "augment", "num_threads"),
    [
        ("features", AugmentOptions(), 1),
        ("features", AugmentOptions(), 2),
        ("features", AugmentOptions(spec_augment=True), 2),
        ("audio", AugmentOptions(speed_perturb=True), 2),
    ],
)
def test_every_way_to_a_batch_brings_the_hmms(
    stored: dict[str, Dataset], kind: str, augment: AugmentOptions, num_threads: int
) -> None:
    request = dataclasses.replace(REQUEST, augment=augment)
    found = batches(stored[kind], request, num_threads)
    assert sum(len(texts) for texts, _ in found) == stored[kind].num_utterances("train")
    for texts, batch in found:
        assert_same(batch.transcripts, expected(stored[kind], texts))
        assert batch.transcripts is not None
        fits = batch.lengths.numpy() >= batch.transcripts.min_frames
        assert batch.num_frames == batch.lengths.numpy()[fits].sum()


def test_who_does_not_ask_gets_none_and_needs_no_lexicon(stored: dict[str, Dataset], tmp_path: Path) -> None:
    without = dataclasses.replace(REQUEST, transcripts=None)
    assert all(batch.transcripts is None for _, batch in batches(stored["features"], without))


def test_the_request_travels_whole() -> None:
    for request in (REQUEST, dataclasses.replace(REQUEST, transcripts=None)):
        assert SourceRequest.from_json(json.loads(json.dumps(request.to_json()))) == request


def test_fed_batches_bring_the_hmms(stored: dict[str, Dataset]) -> None:
    dataset = stored["features"]
    local = batches(dataset, REQUEST)

    def train(trainer: Trainer) -> list[Batch]:
        with closing(trainer.feeders.open(REQUEST)) as source:
            plan = plan_epoch(source.index, PlanOptions(5), 0, 1).ranks[0]
            return [source.batch(plan.batch(number)) for number in range(plan.num_batches)]

    (found,) = fed(1, 1, lambda number: dataset, train)
    assert len(found) == len(local)
    for batch, (texts, own) in zip(found, local, strict=True):
        assert batch.num_frames == own.num_frames
        assert_same(batch.transcripts, expected(dataset, texts))


@pytest.fixture
def without_one(stored: dict[str, Dataset]) -> Iterator[Dataset]:
    """Data whose lexicon lacks the word `one`."""
    dataset = stored["features"]
    whole = dataset.lexicon_path.read_text()
    lines = [line for line in whole.splitlines(keepends=True) if not line.startswith("one")]
    dataset.lexicon_path.write_text("".join(lines))
    yield dataset
    dataset.lexicon_path.write_text(whole)


def test_a_word_without_a_pronunciation_leaves_its_utterance_out(without_one: Dataset) -> None:
    found = batches(without_one, REQUEST)
    unknown = 0
    for texts, batch in found:
        assert batch.transcripts is not None
        fits = np.array(["one" not in text.split() for text in texts])
        assert ((batch.transcripts.min_frames < NO_PATH) == fits).all()
        assert batch.num_frames == batch.lengths.numpy()[fits].sum()
        unknown += int((~fits).sum())
    assert 0 < unknown < without_one.num_utterances("train")


def test_what_is_left_out_is_counted_once_whoever_reads_it(without_one: Dataset) -> None:
    """Over ranks, epochs and feeders."""
    texts = [shard.text(u) for shard in shards_of(without_one) for u in range(shard.num_utterances)]
    expected = {"unknown_words": sum("one" in text.split() for text in texts)}

    def read_all(source: SplitSource) -> None:
        for _ in range(2):
            plan = plan_epoch(source.index, PlanOptions(5), 0, 1).ranks[0]
            for number in range(plan.num_batches):
                source.batch(plan.batch(number))

    def local(comm: Communicator) -> dict[str, int]:
        with closing(open_local_source(without_one, REQUEST, SourceOptions(num_threads=2))) as source:
            read_all(source)
            return source.left_out.gather(comm)

    def train(trainer: Trainer) -> dict[str, int]:
        with closing(trainer.feeders.open(REQUEST)) as source:
            read_all(source)
            return source.left_out.gather(trainer.comm)

    assert run_threads(2, local) == [expected] * 2
    assert fed(2, 2, lambda number: without_one, train) == [expected] * 2
