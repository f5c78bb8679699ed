"""Scores for Kaldi: what stands in the archive, in which order, and what is refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import kaldi_native_io
import numpy as np
import numpy.typing as npt
import pytest
import torch

from speechdp.cli.main import run as speechdp
from speechdp.data.shards.dataset import Dataset
from speechdp.decode import posteriors
from speechdp.decode.posteriors import PosteriorOptions, PosteriorResult, write_posteriors
from speechdp.errors import ConfigError, RunError
from speechdp.labels.hmm import UNSEEN_LOG_LIKELIHOOD, log_priors
from tests.helpers.faulty_disk import faulty_disk, full
from tests.helpers.oracle import Oracle, OracleModel, Spoken, oracle, write_dataset
from tests.helpers.tiny_speech import write_tiny_speech

SHARDS = [
    [Spoken("c1", "one two", "one two"), Spoken("a1", "three", "four", 25)],
    [Spoken("b1", "four", "four", 22), Spoken("B1", "two", "two", 2), Spoken("é", "one", "one one", 50)],
]
ORDER = ["B1", "a1", "b1", "c1", "é"]  # by bytes


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return write_dataset(tmp_path / "data", SHARDS)


def skewed(num_classes: int) -> Oracle:
    """Make a model whose class 0 was never seen in training and whose class 1 was seen most."""
    frames = np.arange(num_classes) * 0 + 10
    frames[0], frames[1] = 0, 1000
    return dataclasses.replace(oracle(num_classes), class_log_prior=torch.from_numpy(log_priors(frames)))


def write(
    dataset: Dataset, trained: Oracle, archive: Path, **others: object
) -> tuple[PosteriorResult, dict[str, npt.NDArray[np.float32]]]:
    options = PosteriorOptions("test", archive, **others)  # type: ignore[arg-type]
    result = write_posteriors(trained, dataset, options, lambda done, total: None)
    return result, read(f"ark:{archive}")


def read(rspecifier: str) -> dict[str, npt.NDArray[np.float32]]:
    with kaldi_native_io.SequentialFloatMatrixReader(rspecifier) as reader:
        return {key: np.array(matrix) for key, matrix in reader}


def network(dataset: Dataset) -> dict[str, npt.NDArray[np.float32]]:
    """Compute the oracle's log-posteriors directly."""
    table = OracleModel(dataset.num_classes).table.detach()
    found = {}
    for index in range(2):
        with dataset.open_shard("test", index) as shard:
            for u, name in enumerate(shard.utterance_ids):
                classes = torch.from_numpy(shard.read(u)[0][:, 0]).long()
                found[name] = torch.log_softmax(table[classes], dim=-1).numpy()
    return found


def test_log_posteriors_are_the_networks(dataset: Dataset, tmp_path: Path) -> None:
    result, scores = write(dataset, skewed(dataset.num_classes), tmp_path / "o.ark", kind="log_posterior")
    assert list(scores) == ORDER
    assert result == PosteriorResult(5, 40 + 25 + 22 + 2 + 50, dataset.num_classes)
    for name, expected in network(dataset).items():
        np.testing.assert_allclose(scores[name], expected, atol=1e-6)
        np.testing.assert_allclose(np.exp(scores[name]).sum(axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("prior_scale", [1.0, 0.5])
def test_log_likelihoods_are_divided_by_the_priors(
    dataset: Dataset, tmp_path: Path, prior_scale: float
) -> None:
    trained = skewed(dataset.num_classes)
    _, scores = write(dataset, trained, tmp_path / "out.ark", prior_scale=prior_scale)
    prior = trained.class_log_prior.numpy()
    for name, expected in network(dataset).items():
        np.testing.assert_allclose(
            scores[name][:, 1:], expected[:, 1:] - prior_scale * prior[1:], rtol=1e-5, atol=1e-5
        )
        assert (scores[name][:, 0] == UNSEEN_LOG_LIKELIHOOD).all()


def test_the_table_finds_every_matrix(dataset: Dataset, tmp_path: Path) -> None:
    scp = tmp_path / "out.scp"
    _, scores = write(dataset, skewed(dataset.num_classes), tmp_path / "out.ark", scp=scp)
    assert [line.split()[0] for line in scp.read_text().splitlines()] == ORDER
    by_table = read(f"scp:{scp}")
    for name in ORDER:
        np.testing.assert_array_equal(by_table[name], scores[name])


def test_the_order_does_not_depend_on_what_is_held_at_once(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = skewed(dataset.num_classes)
    write(dataset, trained, tmp_path / "together.ark")
    monkeypatch.setattr(posteriors, "_MAX_HELD_VALUES", 1)
    write(dataset, trained, tmp_path / "apart.ark")
    assert (tmp_path / "apart.ark").read_bytes() == (tmp_path / "together.ark").read_bytes()


def test_a_full_disk_leaves_the_old_archive(dataset: Dataset, tmp_path: Path) -> None:
    archive = tmp_path / "out.ark"
    archive.write_bytes(b"old")
    with (
        faulty_disk(1, full()),
        pytest.raises(RunError, match=r"out\.ark: cannot be written \(No space left"),
    ):
        write(dataset, skewed(dataset.num_classes), archive)
    assert archive.read_bytes() == b"old" and not list(tmp_path.glob(".*"))


def test_nan_and_what_does_not_fit_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    trained = oracle(dataset.num_classes)
    with torch.no_grad():
        trained.model.table[:] = float("nan")
    with pytest.raises(RunError, match=r"out\.ark: utterance B1: the model's output is NaN"):
        write(dataset, trained, tmp_path / "out.ark")
    other = dataclasses.replace(oracle(dataset.num_classes), config={"sampling_rate": 16000})
    with pytest.raises(ConfigError, match="sampling_rate 8000 is not what the model was trained on"):
        write(dataset, other, tmp_path / "out.ark")
    other = dataclasses.replace(oracle(dataset.num_classes), config={"classes_sha256": "of another lexicon"})
    with pytest.raises(ConfigError, match="is not the class list the model was trained on"):
        write(dataset, other, tmp_path / "out.ark")
    assert not list(tmp_path.glob("*.ark"))


def test_places_that_cannot_be_written_are_refused_before_scoring(dataset: Dataset, tmp_path: Path) -> None:
    for archive, scp in ((tmp_path / "no" / "o.ark", None), (tmp_path, None), (tmp_path / "o.ark", tmp_path)):
        with pytest.raises(ConfigError, match="cannot be written there"):
            write(dataset, oracle(dataset.num_classes), archive, scp=scp)
    with pytest.raises(ConfigError, match="is the archive itself"):
        PosteriorOptions("test", tmp_path / "o.ark", tmp_path / "o.ark")
    for scale in (-1.0, 1e39, float("inf"), float("nan")):
        with pytest.raises(
            ConfigError, match=rf"--prior-scale {re.escape(str(scale))}: must be a number from 0 on"
        ):
            PosteriorOptions("test", tmp_path / "o.ark", prior_scale=scale)
    with pytest.raises(ConfigError, match="--prior-scale has no effect with --kind log_posterior; leave it"):
        PosteriorOptions("test", tmp_path / "o.ark", kind="log_posterior", prior_scale=0.5)


def test_data_of_synthesis_are_told_from_damaged_ones(tmp_path: Path) -> None:
    speech = write_tiny_speech(tmp_path / "speech")
    with pytest.raises(ConfigError, match="speech: holds spectrograms for synthesis; give data prepared wit"):
        write(speech, oracle(speech.num_classes), tmp_path / "out.ark")


def test_the_command_needs_a_finished_run(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["posteriors", str(tmp_path), str(dataset.path), "-o", str(tmp_path / "out.ark")]
    assert speechdp(arguments) == 1
    assert "no such model" in capsys.readouterr().err
