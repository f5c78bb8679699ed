"""Decoding and alignment show the model what training showed it: deltas, splicing, features of audio."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.corpora.corpus import UNKNOWN_SPEAKER
from speechdp.data.shards.dataset import Dataset, Manifest, ShardEntry, SplitEntry
from speechdp.data.shards.shard import AudioUtterance, Shard, ShardHeader, ShardWriter
from speechdp.data.signal.compute import compute_features
from speechdp.data.signal.features import FeatureConfig, kaldi_features, num_frames_of
from speechdp.data.transforms.inputs import InputOptions
from speechdp.data.transforms.preprocess import Preprocessor
from speechdp.decode.align import Aligner, AlignmentJob, AlignmentReport, align_shards
from speechdp.decode.graphs.graph import LexiconTransducer
from speechdp.decode.recogniser import DecodingOptions
from speechdp.decode.scoring import AcousticScorer
from speechdp.decode.split import SpokenSplit, decode_split
from speechdp.errors import ConfigError
from speechdp.labels.hmm import StateInventory
from speechdp.labels.lexicon import Lexicon
from tests.helpers.oracle import FEATURES, Oracle, OracleModel, Spoken, oracle, write_dataset

SPOKEN = [Spoken("a1", "one", "one"), Spoken("b1", "two", "two", 30)]
INPUTS = InputOptions(deltas=1, splice=1)


class SplicedOracle(OracleModel):
    """Reads the class from the first feature of the frame in the middle."""

    def forward(self, features: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        dims = FEATURES.feature_dim * (INPUTS.deltas + 1)
        assert features.shape[2] == 3 * dims
        return super().forward(features[:, :, dims : 2 * dims], lengths)


def spliced(num_classes: int) -> Oracle:
    config = {"inputs": dataclasses.asdict(INPUTS)}
    return dataclasses.replace(oracle(num_classes), model=SplicedOracle(num_classes), config=config)


def test_decoding_makes_the_inputs_the_model_file_names(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data", [SPOKEN[:1], SPOKEN[1:]])
    options, comm = DecodingOptions(), SerialCommunicator()
    result = decode_split(spliced(dataset.num_classes), dataset, "test", tmp_path / "run", options, comm)
    assert result.hypotheses.read_text() == "a1 one\nb1 two\n"


def test_alignment_makes_the_inputs_it_is_told(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data", [SPOKEN])
    (path,) = dataset.shard_paths("test")
    inventory, trained = StateInventory.load(dataset.classes_path), spliced(dataset.num_classes)
    transducer = LexiconTransducer(Lexicon.load(dataset.lexicon_path), inventory, trained.self_loop.numpy())
    report = align_shards(
        [AlignmentJob(path, None, tmp_path / "new.h5")],
        Aligner(transducer),
        AcousticScorer(trained.model, trained.class_log_prior).score,
        AlignmentReport.empty(dataset.num_classes),
        "realigned-1",
        INPUTS,
    )
    assert (report.utterances, report.failed, report.too_short) == (2, 0, 0)


@pytest.mark.parametrize("inputs", [InputOptions(), INPUTS])
def test_an_utterance_of_audio_is_read_as_the_models_input(tmp_path: Path, inputs: InputOptions) -> None:
    config = FeatureConfig(num_mel_bins=12)
    samples = np.random.default_rng(0).normal(0, 1000, 2000).astype(np.int16)
    targets = np.arange(num_frames_of(2000, 8000, config), dtype=np.int32)
    header = ShardHeader(config, 8000, 99, "flat", "test", "audio")
    with ShardWriter(tmp_path / "a.h5", header) as writer:
        writer.add(AudioUtterance("a", "s", "one", samples, targets))
    with Shard(tmp_path / "a.h5") as shard:
        found, found_targets = Preprocessor.for_shard(shard.header, inputs).read(shard, 0)
    np.testing.assert_array_equal(found_targets, targets)
    features = compute_features(samples / np.float32(32768), 8000, config)
    expected = Preprocessor(config, 8000, "features", inputs).whole(features)
    assert found.shape == (25, 12 * inputs.copies)
    np.testing.assert_allclose(found, expected, atol=5e-4)


#: Speaker and number of samples of each utterance of a split.
RECORDED = [
    ("ann", 2000),
    ("bob", 1200),
    ("ann", 400),
    (UNKNOWN_SPEAKER, 800),
    ("bob", 600),
    (UNKNOWN_SPEAKER, 900),
]


def write_recordings(path: Path, config: FeatureConfig) -> tuple[Dataset, list[np.ndarray]]:
    """Write a test split that stores audio, in two shards; return the samples."""
    dataset = write_dataset(path, [SPOKEN])
    manifest = Manifest(8000, config, dataset.num_classes, "flat", "given", {}, "audio")
    rng, samples, entries = np.random.default_rng(0), [], []
    for number, some in enumerate((RECORDED[:4], RECORDED[4:])):
        writer = ShardWriter(path / f"test-{number:05}.h5", manifest.header("test"))
        with writer:
            for speaker, length in some:
                samples.append(rng.normal(0, rng.uniform(100, 3000), length).astype(np.int16))
                targets = np.zeros(num_frames_of(length, 8000, config), np.int32)
                name = f"{number}-{len(samples)}"
                writer.add(AudioUtterance(name, speaker, "one", samples[-1], targets))
        entries.append(ShardEntry.of(writer))
    splits = {"test": SplitEntry.of(entries, (speaker for speaker, _ in RECORDED))}
    dataclasses.replace(manifest, splits=splits).write(path)
    return Dataset.open(path), samples


@pytest.mark.parametrize("variance", [True, False])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_features_are_normalised_over_a_speaker(tmp_path: Path, size: int, variance: bool) -> None:
    config = FeatureConfig(num_mel_bins=12, variance_normalise=variance)
    dataset, samples = write_recordings(tmp_path / "data", config)

    def read(comm: Communicator) -> list[np.ndarray]:
        with SpokenSplit.open(dataset, "test", comm) as split:
            return list(split.features(INPUTS, "speaker"))

    by_rank = run_threads(size, read)
    found = [by_rank[number % size][number // size] for number in range(len(RECORDED))]
    raw = [kaldi_features(x.astype(np.float32), 8000, config) for x in samples]
    by_speaker = [
        speaker if speaker != UNKNOWN_SPEAKER else str(n) for n, (speaker, _) in enumerate(RECORDED)
    ]
    alone = Preprocessor(config, 8000, "features", INPUTS)
    for rows, speaker, features in zip(raw, by_speaker, found, strict=True):
        pooled = np.concatenate([x for x, other in zip(raw, by_speaker, strict=True) if other == speaker])
        expected = rows - pooled.mean(axis=0)
        expected = expected / pooled.std(axis=0) if variance else expected
        np.testing.assert_allclose(features, alone.whole(expected.astype(np.float32)), atol=2e-3)
    np.testing.assert_array_equal(np.concatenate(found), np.concatenate(run_threads(1, read)[0]))


def test_features_that_are_normalised_already_are_not_normalised_anew(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path / "data", [SPOKEN])
    options, comm = DecodingOptions(normalise="speaker"), SerialCommunicator()
    with pytest.raises(ConfigError, match=r"--normalise speaker: .* holds features"):
        decode_split(oracle(dataset.num_classes), dataset, "test", tmp_path / "run", options, comm)
