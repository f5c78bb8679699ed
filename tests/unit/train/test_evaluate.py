"""Held-out figures: those of all frames, whoever scores them."""

from __future__ import annotations

import copy
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.loading.batch import Batch
from speechdp.data.loading.reader import SplitReader
from speechdp.data.loading.source_request import Context
from speechdp.data.plan.epoch_plan import PlanOptions
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig
from speechdp.models.precision import Precision
from speechdp.tasks.acoustic import AcousticTask
from speechdp.tasks.base import FrameScores
from speechdp.train.evaluate import Evaluator, HeldOutScores
from tests.helpers.tiny_data import TinySizes, write_tiny_data

CPU = torch.device("cpu")
FP32 = Precision("fp32", CPU)
#: A phone of these data, taken for silence: they have none.
PAUSE = (3, 4, 5)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("evaluate") / "data", TinySizes(dev=7))


def make_model(dataset: Dataset, *, bidirectional: bool = True) -> LstmAcousticModel:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = LstmConfig(1, 5, bidirectional, dropout=0.5)
        return LstmAcousticModel(dataset.feature_dim, dataset.num_classes, config)


def by_hand(dataset: Dataset, model: LstmAcousticModel) -> HeldOutScores:
    """Score utterance by utterance."""
    log_prob, correct, frames, speech_correct, speech_frames = 0.0, 0, 0, 0, 0
    model.eval()
    for index in range(len(dataset.shard_paths("dev"))):
        with dataset.open_shard("dev", index) as shard, torch.no_grad():
            for utterance in range(shard.num_utterances):
                features, targets = shard.read(utterance)
                x = torch.from_numpy(features).unsqueeze(0)
                scores = model(x, torch.tensor([len(features)]))[0].log_softmax(-1).numpy()
                log_prob += float(scores[np.arange(len(targets)), targets].sum(dtype=np.float64))
                correct += int((scores.argmax(1) == targets).sum())
                frames += len(targets)
                speech = ~np.isin(targets, PAUSE)
                speech_correct += int((scores.argmax(1) == targets)[speech].sum())
                speech_frames += int(speech.sum())
    assert 0 < speech_frames < frames
    values = {
        "log_prob": log_prob / frames,
        "frame_accuracy": correct / frames,
        "frame_accuracy_no_silence": speech_correct / speech_frames,
    }
    return HeldOutScores(values, frames, log_prob / frames)


def evaluate(
    dataset: Dataset,
    model: LstmAcousticModel,
    comm: Communicator,
    options: PlanOptions,
    context: Context | None = None,
    silence: tuple[int, ...] = PAUSE,
) -> HeldOutScores:
    with closing(SplitReader(dataset, "dev", context=context)) as reader:
        return Evaluator(reader, options, comm, CPU, FP32).evaluate(
            copy.deepcopy(model), AcousticTask(silence=silence)
        )


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_any_number_of_ranks_gives_the_figures_of_all_frames(dataset: Dataset, size: int) -> None:
    model = make_model(dataset)
    expected = by_hand(dataset, model)
    for result in run_threads(size, lambda comm: evaluate(dataset, model, comm, PlanOptions(2))):
        assert result.num_frames == expected.num_frames == dataset.num_frames("dev")
        for key in ("frame_accuracy", "frame_accuracy_no_silence"):
            assert result.values[key] == expected.values[key]
        assert result.score == result.values["log_prob"] == pytest.approx(expected.score, rel=1e-6)


def test_chunks_with_their_context_score_every_frame_once(dataset: Dataset) -> None:
    """A unidirectional model that sees all the past scores as on whole utterances."""
    model = make_model(dataset, bidirectional=False)
    expected = by_hand(dataset, model)
    chunks = PlanOptions(3, chunk_frames=7)
    result = evaluate(dataset, model, SerialCommunicator(), chunks, Context(left=1000))
    assert result.num_frames == expected.num_frames
    assert result.score == result.values["log_prob"] == pytest.approx(expected.score, rel=1e-6)
    for key in ("frame_accuracy", "frame_accuracy_no_silence"):
        assert result.values[key] == expected.values[key]


@pytest.mark.parametrize("silence", [(), tuple(range(1000))], ids=["unknown", "everything"])
def test_a_metric_that_no_frame_counts_for_is_absent(dataset: Dataset, silence: tuple[int, ...]) -> None:
    result = evaluate(dataset, make_model(dataset), SerialCommunicator(), PlanOptions(2), silence=silence)
    assert set(result.values) == {"log_prob", "frame_accuracy"}


def test_the_classes_of_silence_are_those_of_the_data(tmp_path: Path) -> None:
    dataset = write_tiny_data(tmp_path / "data")
    assert AcousticTask().for_data(dataset).silence == (0, 1, 2)
    pdfs = "".join(f"{index} pdf-{index}\n" for index in range(dataset.num_classes))
    dataset.classes_path.write_text(pdfs)
    assert AcousticTask().for_data(dataset).silence == ()  # which of them are silence only Kaldi knows


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_in_the_mode_it_was_in(dataset: Dataset, training: bool) -> None:
    with closing(SplitReader(dataset, "dev")) as reader:
        model = make_model(dataset).train(training)
        evaluator = Evaluator(reader, PlanOptions(4), SerialCommunicator(), CPU, FP32)
        first, second = (evaluator.evaluate(model, AcousticTask()) for _ in range(2))
        assert model.training is training
        assert first == second  # no dropout
        assert all(p.grad is None for p in model.parameters())


class Careless(AcousticTask):
    """Scores without a thought of gradients, and leaves out a metric."""

    def score(self, model: LstmAcousticModel, batch: Batch) -> FrameScores:
        frames, _ = self._learnt_frames(model, batch)
        assert not frames.requires_grad
        return FrameScores({"log_prob": -1.0}, batch.num_frames)


def test_a_metric_that_is_not_scored_is_named_and_no_gradient_is_kept(dataset: Dataset) -> None:
    message = r"--task acoustic: score\(\) returns no sum for frame_accuracy, .*; add it to FrameScores.sums"
    with closing(SplitReader(dataset, "dev")) as reader, pytest.raises(ConfigError, match=message):
        Evaluator(reader, PlanOptions(2), SerialCommunicator(), CPU, FP32).evaluate(
            make_model(dataset), Careless()
        )


class Mean(AcousticTask):
    """Gives tensors where sums are asked for."""

    def score(self, model: LstmAcousticModel, batch: Batch) -> FrameScores:
        return FrameScores({metric.key: torch.ones(3) for metric in self.metrics}, batch.num_frames)  # type: ignore[misc]


def test_scores_that_are_no_numbers_are_refused(dataset: Dataset) -> None:
    message = (
        rf"score\(\) of {__name__}:Mean must return FrameScores\(.*the sum of \S+ is an object of type Tensor"
    )
    with closing(SplitReader(dataset, "dev")) as reader, pytest.raises(ConfigError, match=message):
        Evaluator(reader, PlanOptions(2), SerialCommunicator(), CPU, FP32).evaluate(
            make_model(dataset), Mean()
        )
