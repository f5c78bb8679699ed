"""--criterion full-sum and ctc: acoustic models that learn transcripts without an alignment."""

from __future__ import annotations

import dataclasses
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speechdp.cli.decode import DecodeCommand
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.loading.batch import IGNORED_TARGET, Batch
from speechdp.data.shards.alignment_file import open_targets
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.shard import Shard
from speechdp.data.transforms.inputs import InputOptions
from speechdp.errors import ConfigError, RunError
from speechdp.labels.hmm import StateInventory
from speechdp.labels.lexicon import Lexicon
from speechdp.labels.transcript_hmm import TranscriptCompiler, TranscriptHmms
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig
from speechdp.options.batch import BatchOptions
from speechdp.options.optimizer import OptimizerOptions
from speechdp.options.recognition import RecognitionOptions
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.parallel.registry import StrategyChoice
from speechdp.tasks.acoustic import AcousticTask, CtcTask, FullSumTask
from speechdp.tasks.base import TaskData
from speechdp.tasks.metrics import SPEECH_ACCURACY
from speechdp.tasks.model_file import ClassCounts, load_model
from speechdp.train.realign import train_with_realignment
from speechdp.train.run import train_run
from speechdp.train.session import Session
from tests.helpers.finished_run import assert_equal_runs, evaluations, model_tensors
from tests.helpers.tiny_data import TinySizes, write_tiny_data

CPU = torch.device("cpu")
ALONE = SerialCommunicator()
SIZES = LstmConfig(layers=1, cells=5, bidirectional=True)
#: Of batches of 4 utterances, 6 an epoch.
OPTIONS = TrainOptions(
    ModelOptions(layers=1, cells=4, dropout=0.2, criterion="full-sum"), BatchOptions(batch_size=4), epochs=2
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("full-sum") / "data", TinySizes(train=60, dev=10))


def made(dataset: Dataset, task: FullSumTask) -> LstmAcousticModel:
    torch.manual_seed(0)
    return task.make_model(TaskData(dataset, InputOptions())).eval()


def batch_of(dataset: Dataset, lengths: list[int], spare: int = 0) -> Batch:
    """Make a batch of random features of `one two`, which takes 15 frames, and `two`, which takes 6."""
    compiler = TranscriptCompiler(
        Lexicon.load(dataset.lexicon_path), StateInventory.load(dataset.classes_path), 0.6
    )
    words = [["one", "two"] if row % 2 == 0 else ["two"] for row in range(len(lengths))]
    hmms = TranscriptHmms.of([compiler.compile(text) for text in words])
    features = torch.zeros(len(lengths), max(lengths) + spare, dataset.feature_dim)
    targets = torch.full(features.shape[:2], IGNORED_TARGET)
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(length)
        features[row, :length] = torch.randn(length, dataset.feature_dim, generator=generator)
        targets[row, :length] = torch.arange(length) % dataset.num_classes
    learnt = sum(n for n, least in zip(lengths, hmms.min_frames.tolist(), strict=True) if n >= least)
    return Batch(features, targets, torch.tensor(lengths), learnt, transcripts=hmms)


def row_of(batch: Batch, row: int) -> Batch:
    assert batch.transcripts is not None
    length = int(batch.lengths[row])
    hmms = TranscriptHmms(**{name: a[row : row + 1] for name, a in vars(batch.transcripts).items()})
    one = slice(row, row + 1)
    learnt = length if length >= hmms.min_frames[0] else 0
    features, targets = batch.features[one, :length], batch.targets[one, :length]
    return Batch(features, targets, batch.lengths[one], learnt, transcripts=hmms)


# --- the loss -----------------------------------------------------------------------------------------


def test_a_batch_is_the_sum_of_its_utterances_and_padding_changes_nothing(dataset: Dataset) -> None:
    task = FullSumTask(SIZES)
    model, batch = made(dataset, task), batch_of(dataset, [30, 25, 18, 6])
    parts = [row_of(batch, row) for row in range(4)]
    total = sum(task.loss(model, part).total.item() for part in parts)
    for whole in (batch, batch_of(dataset, [30, 25, 18, 6], spare=4)):
        loss = task.loss(model, whole)
        assert loss.num_frames == 79
        assert loss.total.item() == pytest.approx(total, rel=1e-5)
        scores = task.score(model, whole)
        assert scores.num_frames == 79
        for metric in task.metrics:
            expected = sum(task.score(model, part).sums[metric.key] for part in parts)
            assert scores.sums[metric.key] == pytest.approx(expected, rel=1e-5)


def test_what_is_too_short_is_left_out(dataset: Dataset) -> None:
    task = FullSumTask(SIZES)
    model = made(dataset, task)
    with_short, without = batch_of(dataset, [30, 5, 14, 9]), batch_of(dataset, [30, 5, 14, 9])
    kept = [row_of(without, row) for row in (0, 3)]
    loss = task.loss(model, with_short)
    assert loss.num_frames == 39
    assert loss.total.item() == pytest.approx(sum(task.loss(model, part).total.item() for part in kept))
    scores = task.score(model, with_short)
    for metric in task.metrics:
        expected = sum(task.score(model, part).sums[metric.key] for part in kept)
        assert scores.sums[metric.key] == pytest.approx(expected)
    spoken = FullSumTask(SIZES, silence=(0,))
    counts = [spoken.score(model, part).counts[SPEECH_ACCURACY.key] for part in (with_short, *kept)]
    assert counts[0] == sum(counts[1:]) > 0


def test_the_gradient_is_that_of_cross_entropy_against_occupancies(dataset: Dataset) -> None:
    """So it sums to zero in every frame, and is no larger than that of the frame criterion."""
    task = FullSumTask(SIZES)
    batch = batch_of(dataset, [30, 25])
    logits = torch.randn(2, 30, dataset.num_classes, generator=torch.Generator().manual_seed(0))
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(task.total(made(dataset, task), logits, batch), logits)
    inside = torch.arange(30) < batch.lengths.unsqueeze(1)
    torch.testing.assert_close(gradient.sum(2), torch.zeros(2, 30), atol=1e-5, rtol=0)
    occupancies = logits.softmax(2) - gradient
    assert (occupancies[inside] > -1e-5).all() and (gradient[~inside] == 0).all()
    torch.testing.assert_close(occupancies[inside].sum(1), torch.ones(55))


def test_priors_follow_the_posteriors_in_training_only(dataset: Dataset) -> None:
    task = FullSumTask(SIZES)
    model, batch = made(dataset, task), batch_of(dataset, [30, 25])
    with torch.no_grad():
        model.output.bias[0] = 5.0  # silence everywhere
    prior = model.get_buffer("class_prior")
    task.loss(model, batch)
    torch.testing.assert_close(prior, torch.full_like(prior, 1 / len(prior)))
    model.train()
    for _ in range(200):
        task.loss(model, batch)
    inside = torch.arange(30) < batch.lengths.unsqueeze(1)
    expected = model(batch.features, batch.lengths)[inside].softmax(1).mean(0)
    torch.testing.assert_close(prior, expected.detach(), rtol=0.05, atol=0.01)
    logits = model(batch.features, batch.lengths).detach().requires_grad_()

    def silence(prior_scale: float) -> float:
        """Return the occupancy of silence's first state."""
        total = dataclasses.replace(task, prior_scale=prior_scale).total(model, logits, batch)
        (gradient,) = torch.autograd.grad(total, logits)
        return float((logits.detach().softmax(2) - gradient)[inside][:, 0].sum())

    assert silence(0.3) < 0.9 * silence(0.0)  # what is said to be frequent counts for less


def test_a_pass_that_is_no_number_leaves_the_priors_as_they_are(dataset: Dataset) -> None:
    task = FullSumTask(SIZES)
    model, batch = made(dataset, task).train(), batch_of(dataset, [30, 25])
    task.loss(model, batch)
    before = model.class_prior.clone()
    weights = model.output.weight.detach().clone()
    with torch.no_grad():
        model.output.weight.fill_(float("nan"))
    task.loss(model, batch)
    assert torch.equal(model.class_prior, before)
    with torch.no_grad():
        model.output.weight.copy_(weights)
    task.loss(model, batch)
    assert not torch.equal(model.class_prior, before) and bool(model.class_prior.isfinite().all())


def test_stages_come_to_the_loss(dataset: Dataset) -> None:
    task = FullSumTask(SIZES)
    model, batch = made(dataset, task), batch_of(dataset, [30, 25])
    values: dict[str, torch.Tensor] = {}
    for stage in task.stages(model):
        values |= stage.run(values, batch)
    torch.testing.assert_close(values["loss"], task.loss(model, batch).total)


# --- options ------------------------------------------------------------------------------------------


def test_the_criterion_chooses_the_task() -> None:
    assert type(TrainOptions().make_task()) is AcousticTask
    task = TrainOptions(ModelOptions(cells=7, criterion="full-sum", prior_scale=0.5)).make_task()
    assert isinstance(task, FullSumTask)
    assert (task.sizes.cells, task.prior_scale, task.name) == (7, 0.5, "acoustic")
    assert TrainOptions().source("train", augmented=True).transcripts is None
    assert OPTIONS.source("train", augmented=True).transcripts == task.transcripts
    assert (
        OPTIONS.fingerprint()
        != dataclasses.replace(
            OPTIONS, model=dataclasses.replace(OPTIONS.model, criterion="frame")
        ).fingerprint()
    )


FULL_SUM = ModelOptions(criterion="full-sum")
FULL_SUM_FAR = ModelOptions(criterion="full-sum", prior_scale=1.5)


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (FULL_SUM_FAR, BatchOptions(), "--prior-scale 1.5: must be from 0"),
        (ModelOptions(prior_scale=0.5), BatchOptions(), "--prior-scale: goes with --criterion full-sum"),
        (
            FULL_SUM,
            BatchOptions(chunk_frames=20),
            "whole utterances: give --chunk-frames 0 .*--criterion frame",
        ),
        (ModelOptions("kaldi-4x800", criterion="full-sum"), BatchOptions(), "whole utterances"),
    ],
)
def test_what_does_not_go_together_is_refused(model: ModelOptions, batch: BatchOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainOptions(model, batch)
    if model.preset == "kaldi-4x800":
        TrainOptions(model, BatchOptions(chunk_frames=0, left_context=0))


def test_it_goes_with_the_acoustic_task_only() -> None:
    with pytest.raises(ConfigError, match="--criterion goes with --task acoustic"):
        TrainOptions(ModelOptions(criterion="full-sum"), task="synthesis")


def test_data_without_pronunciations_are_refused(tmp_path: Path) -> None:
    dataset = write_tiny_data(tmp_path / "data")
    count = dataset.num_classes
    dataset.classes_path.write_text("".join(f"{i} pdf-{i}\n" for i in range(count)))
    with pytest.raises(ConfigError, match=r"without an alignment: .* Kaldi pdfs; leave --criterion out"):
        train_run(Session(dataset, ALONE, CPU), OPTIONS, tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- training -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["gradient_averaging", "model_averaging:period=2"])
def test_it_learns_the_states_without_an_alignment(dataset: Dataset, tmp_path: Path, strategy: str) -> None:
    """Targets are those the features were made of; training never sees them."""
    options = TrainOptions(
        ModelOptions(layers=1, cells=16, dropout=0.0, criterion="full-sum"),
        BatchOptions(batch_size=4),
        OptimizerOptions("adam", learning_rate=0.01),
        strategy=StrategyChoice(strategy),
        epochs=6,
    )
    run_threads(2, lambda comm: train_run(Session(dataset, comm, CPU), options, tmp_path))
    last = evaluations(tmp_path)[-1]
    assert last["heldout_frames"] == dataset.num_frames("dev")
    assert last["heldout_frame_accuracy"] > 0.6
    assert -0.8 < last["heldout_transcript_log_prob"] < 0
    metrics = json.loads((tmp_path / "run.json").read_text())["metrics"]
    keys = ["transcript_log_prob", "frame_accuracy", "frame_accuracy_no_silence"]
    assert [metric["key"] for metric in metrics] == keys
    assert last["heldout_frame_accuracy_no_silence"] > 0.6
    trained = load_model(tmp_path, CPU)  # as decoding and alignment do
    assert trained.self_loop.numpy() == pytest.approx(np.full(dataset.num_classes, 0.6), abs=0.02)
    counts = model_tensors(tmp_path)["class_frames"].numpy()
    assert counts.sum() == pytest.approx(dataset.num_frames("train"), abs=dataset.num_classes)
    assert not any("class_prior" in name for name in model_tensors(tmp_path))


def test_a_resumed_run_goes_on_with_its_priors(dataset: Dataset, tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, checkpoint_steps=4)
    train_run(Session(dataset, ALONE, CPU), options, tmp_path / "whole")
    short = dataclasses.replace(options, max_steps=20)
    train_run(Session(dataset, ALONE, CPU), short, tmp_path / "cut")
    record = json.loads((tmp_path / "cut" / "run.json").read_text())
    record["fingerprint"], record["options"] = options.fingerprint(), options.to_json(1)
    (tmp_path / "cut" / "run.json").write_text(json.dumps(record))
    for name in ("completed.json", "model.safetensors"):
        (tmp_path / "cut" / name).unlink()
    train_run(Session(dataset, ALONE, CPU), options, tmp_path / "cut", resume=True)
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")


def utterances_with(dataset: Dataset, split: str, word: str) -> int:
    shards = map(Shard, dataset.shard_paths(split))
    return sum(word in shard.text(u).split() for shard in shards for u in range(shard.num_utterances))


@pytest.mark.parametrize(
    ("times", "why"),
    [pytest.param(20, "too_short", id="short"), pytest.param(0, "unknown_words", id="unknown")],
)
def test_utterances_that_do_not_fit_are_left_out_and_counted_once(
    tmp_path: Path, times: int, why: str
) -> None:
    """Over all epochs and ranks, which pass them on; a long pronunciation makes all of one word too short."""
    dataset = write_tiny_data(tmp_path / "data", TinySizes(train=24, dev=6))
    pronunciations = dict(Lexicon.load(dataset.lexicon_path).pronunciations)
    (one,) = pronunciations.pop("one")
    others = pronunciations | ({"one": (one * times,)} if times else {})
    Lexicon(others).save(dataset.lexicon_path)
    options = dataclasses.replace(OPTIONS, epochs=3)
    run_threads(2, lambda comm: train_run(Session(dataset, comm, CPU), options, tmp_path / "run"))
    numbers = {split: utterances_with(dataset, split, "one") for split in ("train", "dev")}
    assert 0 < numbers["train"] < 24 and 0 < numbers["dev"] < 6
    left_out = json.loads((tmp_path / "run" / "timing.json").read_text())["left_out"]
    assert left_out == {split: {why: number} for split, number in numbers.items()}
    assert evaluations(tmp_path / "run")[-1]["heldout_frames"] < dataset.num_frames("dev")


def test_where_no_utterance_fits_every_rank_says_so(tmp_path: Path) -> None:
    dataset = write_tiny_data(tmp_path / "data")
    phones = StateInventory.load(dataset.classes_path).phones
    Lexicon({"three": (phones[:2],)}).save(dataset.lexicon_path)

    def refused(comm: Communicator) -> str:
        with pytest.raises(RunError) as error:
            train_run(Session(dataset, comm, CPU), OPTIONS, tmp_path / "run")
        return str(error.value)

    message = (
        "no frame of the training split was learnt: no utterance fits its transcript; choose another with"
    )
    assert run_threads(2, refused) == [f"{message} --train-split"] * 2


def test_a_class_that_is_hardly_met_keeps_a_frame(dataset: Dataset, tmp_path: Path) -> None:
    """Else decoding would take it for one that the model has never seen."""
    task = FullSumTask(SIZES)
    model = made(dataset, task)
    model.get_buffer("class_prior")[3] = 0.0
    frames = np.full(dataset.num_classes, 100)
    task.save(tmp_path, model, {}, ClassCounts(frames, frames // 3))
    tensors = model_tensors(tmp_path)
    assert tensors["class_frames"].min() == tensors["class_frames"][3] == 1
    assert tensors["class_runs"].min() == 1


# --- as a first round ---------------------------------------------------------------------------------


def test_the_first_round_alone_has_the_criterion(tmp_path: Path) -> None:
    """And finds the states that the features were made of."""
    data = write_tiny_data(tmp_path / "data", TinySizes(train=60, dev=10))
    options = TrainOptions(
        ModelOptions(layers=1, cells=16, dropout=0.0, prior_scale=0.3),
        BatchOptions(batch_size=4),
        OptimizerOptions("adam", learning_rate=0.01),
        epochs=1,
        realign=2,
        realign_epochs=5,
        realign_criterion="full-sum",
    )
    train_with_realignment(Session(data, ALONE, CPU), options, tmp_path / "run")
    models = [
        json.loads((tmp_path / "run" / name / "run.json").read_text())["options"]["model"]
        for name in ("realign/1", "realign/2", ".")
    ]
    by_round = [(model["criterion"], model["prior_scale"]) for model in models]
    assert by_round == [("full-sum", 0.3), (None, None), (None, None)]
    same = frames = 0
    for path in data.shard_paths("train"):
        with (
            Shard(path) as shard,
            closing(open_targets(tmp_path / "run" / "alignments" / "1" / path.name, shard)) as found,
        ):
            for number in range(shard.num_utterances):
                exact = shard.read(number)[1]
                same += int((found.read(number) == exact).sum())
                frames += len(exact)
    assert same / frames > 0.8


@pytest.mark.parametrize(
    ("criterion", "realign", "realign_criterion", "message"),
    [
        ("full-sum", 1, None, "--realign: not with --criterion full-sum"),
        (None, 0, "full-sum", "--realign-criterion: goes with --realign"),
    ],
)
def test_rounds_that_make_no_sense_are_refused(
    criterion: Any, realign: int, realign_criterion: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainOptions(ModelOptions(criterion=criterion), realign=realign, realign_criterion=realign_criterion)


def test_the_scale_of_the_priors_is_the_first_rounds_alone() -> None:
    options = TrainOptions(ModelOptions(prior_scale=0.5), realign=2, realign_criterion="full-sum")
    assert options.first_round_model().prior_scale == 0.5
    assert type(options.make_task()) is AcousticTask
    later = options.on_alignments(Path("alignments/1"))
    assert later == TrainOptions(alignments=Path("alignments/1"))
    with pytest.raises(ConfigError, match=r"--prior-scale 1\.5: must be from 0 to 1"):
        TrainOptions(ModelOptions(prior_scale=1.5), realign=2, realign_criterion="full-sum")
    with pytest.raises(ConfigError, match=r"--prior-scale: goes with .*--realign-criterion full-sum"):
        TrainOptions(ModelOptions(prior_scale=0.5), realign=2)


def test_a_first_round_over_chunks_is_refused_before_it_begins() -> None:
    with pytest.raises(ConfigError, match=r"whole utterances.*, or leave out --realign-criterion full-sum$"):
        TrainOptions(batch=BatchOptions(chunk_frames=20), realign=1, realign_criterion="full-sum")


# --- CTC ----------------------------------------------------------------------------------------------


def test_ctc_learns_words_that_decode_finds(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = TrainOptions(
        ModelOptions(layers=1, cells=16, dropout=0.0, criterion="ctc"),
        BatchOptions(batch_size=4),
        OptimizerOptions("adam", learning_rate=0.01),
        strategy=StrategyChoice("model_averaging:period=2"),
        epochs=30,
    )
    assert isinstance(options.make_task(), CtcTask)
    assert options.to_decode("test") == "test"
    run_threads(2, lambda comm: train_run(Session(dataset, comm, CPU), options, tmp_path))
    found = [line["heldout_transcript_log_prob"] for line in evaluations(tmp_path)]
    assert found[-1] > 0.5 * found[0] and "heldout_frame_accuracy" not in evaluations(tmp_path)[0]
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["decodes"] is True
    assert len(model_tensors(tmp_path)["model.output.bias"]) == dataset.num_classes // 3
    with pytest.raises(RunError, match="--criterion ctc model, which has no states, so only decode"):
        load_model(tmp_path, CPU)
    assert DecodeCommand(tmp_path, dataset.path, "dev", tune_on="dev", device="cpu")._on_rank(ALONE) == 0
    result = json.loads((tmp_path / "wer-dev.json").read_text())
    assert result["wer"] < 0.5, result["wer"]
    assert "prior_scale" not in result["tuning"]["chosen"]
    command = DecodeCommand(tmp_path, dataset.path, "dev", search=RecognitionOptions(prior_scale=0.5))
    with pytest.raises(ConfigError, match="--prior-scale has no effect with a model of --criterion ctc"):
        command._on_rank(ALONE)


def test_models_of_ctc_do_not_align() -> None:
    with pytest.raises(ConfigError, match="--realign: not with --criterion ctc"):
        TrainOptions(ModelOptions(criterion="ctc"), realign=1)
