"""Checks for authors of tasks: the requirements that every task must meet (docs/api.md)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from speechdp.data.loading.batch import IGNORED_TARGET, Batch
from speechdp.data.shards.dataset import Dataset, Manifest
from speechdp.data.signal.features import FeatureConfig
from speechdp.data.transforms.inputs import InputOptions
from speechdp.extensions import write_options
from speechdp.labels.hmm import StateInventory
from speechdp.labels.lexicon import Lexicon, lexicon_for
from speechdp.labels.symbols import SymbolInventory
from speechdp.labels.transcript_hmm import TranscriptHmm, TranscriptHmms, make_compiler
from speechdp.parallel.replica import Replica
from speechdp.parallel.run_files import MODEL_NAME
from speechdp.parallel.untrained import load_untrained, untrained_tensors
from speechdp.tasks.base import (
    LOSS,
    FrameScores,
    LossSum,
    Task,
    TaskData,
    Values,
    loss_mistake,
    score_mistake,
)
from speechdp.tasks.model_file import ClassCounts
from speechdp.tasks.registry import task_class, task_options

#: Frames of each utterance, and symbols of its text.
_LENGTHS = ((17, 6), (11, 4), (9, 5), (6, 2))
#: Their words, for tasks that learn transcripts: each utterance has enough frames for its states.
_TEXTS = ("one two", "two", "one", "two")
_UPDATES = 30
_LEARNING_RATE = 1e-3
_FEATURES = FeatureConfig(num_mel_bins=6, dtype="float32")
#: Why a loss is not a sum over utterances, as found by padding an utterance that is alone in its batch.
_PADDING_COUNTS = (
    "an utterance has another loss once it is padded: set frames behind batch.lengths to 0 before each layer "
    "that sees neighbours (convolutions, attention, backward LSTMs), and leave them out of the loss (targets "
    "of -1) and of normalisation, which may not be over the batch in evaluation mode"
)
_OTHERS_COUNT = (
    "padding alone changes nothing, so the loss is a mean (give a sum, reduction='sum'), or the other "
    "utterances of a batch count: leave out normalisation over the batch in evaluation mode, and "
    "whatever else mixes rows"
)
#: Spectrograms of 6 bins: the smallest that a synthesis model takes.
TINY_SPECTROGRAMS = FeatureConfig(
    kind="spectrogram",
    num_mel_bins=6,
    num_fft=16,
    frame_length_ms=2.0,
    frame_shift_ms=0.5,
    preemphasis=0.97,
    mean_normalise=False,
    variance_normalise=False,
)


def task_contract(
    task: str, *, load: Callable[[Path], nn.Module] | None = None, tolerance: float = 1e-4
) -> None:
    """Check that a task meets what training relies on, with four synthetic utterances; takes seconds.

    - its options are read as they are written;
    - equal seeds give equal weights and, including dropout, equal losses;
    - the parameters may be moved into one vector, as training does;
    - the loss is a sum over frames: that of a batch is the sum of its utterances' losses, whatever their
      order and padding;
    - the gradients are finite, and following them lowers the loss;
    - the scores are those of the declared metrics and are sums like the loss, and scoring changes nothing;
    - a model that is read back from its file has the same scores;
    - training that continues in a new model, from a checkpoint's contents (parameters, buffers, optimizer),
      equals uninterrupted training;
    - the stages, if the task has any, end with the loss.

    Losses are compared in evaluation mode, without dropout.

    Example::

        def test_predictive_coding():
            task_contract("predictive_coding:ahead=2")

    Args:
        task: name and options, as on the command line; if the task has presets, its default options are used.
        load: reads a model back from the folder that the task's own `save` wrote; None: `save` is that of
            `Task`.
        tolerance: share by which sums in another order may differ.

    Raises:
        AssertionError: the task breaks a requirement, which the message names.
        ConfigError: there is no such task, or an option is wrong.
    """
    cls = task_class(task)
    made = cls(**task_options(task))
    _options_are_read_as_written(task, made)
    for kind in dict.fromkeys("text" if stored == "spectrograms" else "classes" for stored in cls.trains_on):
        with tempfile.TemporaryDirectory() as folder:
            dataset = _speech_and_text(Path(folder)) if kind == "text" else _aligned_features(Path(folder))
            cls.check_data(dataset)
            _Contract(task, made.for_data(dataset), dataset, tolerance, load).check(Path(folder))


def _options_are_read_as_written(text: str, made: Task) -> None:
    if made.presets:  # tasks with presets take their options from the command line
        return
    options = write_options(made)
    written = f"{made.name}:{options}" if options else made.name
    again = type(made)(**task_options(written))
    assert again == made, f"{text}: options are not read as they are written: {written} is {again}"


@dataclass(frozen=True)
class _Utterance:
    """A synthetic utterance: features (T, F), targets (T,) or (S,), and the HMM of its words if needed."""

    features: Tensor
    targets: Tensor
    transcript: TranscriptHmm | None = None


@dataclass(frozen=True)
class _Contract:
    """The checks of a task on data of one kind.

    Attributes:
        text: the task as it was given, for messages.
    """

    text: str
    task: Task
    dataset: Dataset
    tolerance: float
    load: Callable[[Path], nn.Module] | None

    def check(self, folder: Path) -> None:
        """Run all checks; `folder` is for the model file."""
        utterances = self._utterances()
        batch = _batch(utterances)
        self._seeds_decide(batch)
        model = self._model(1)
        self._loss_is_a_sum(model, utterances)
        self._gradients_are_finite(model, batch)
        self._learns(model, batch)
        scores = self._scores_are_sums(model, utterances)
        self._same_after_saving(model, batch, scores, folder)
        self._resumes(batch)
        self._stages_end_with_the_loss(model, batch)

    @property
    def _data(self) -> TaskData:
        return TaskData(self.dataset, InputOptions())

    def _model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.task.make_model(self._data)

    def _utterances(self) -> list[_Utterance]:
        generator = torch.Generator().manual_seed(3)
        has_texts, num_classes = self.dataset.has_texts, self.dataset.num_classes
        found = []
        for (frames, symbols), transcript in zip(_LENGTHS, self._transcripts(), strict=True):
            features = torch.rand(frames, self.dataset.feature_dim, generator=generator)
            targets = torch.randint(num_classes, (symbols if has_texts else frames,), generator=generator)
            found.append(_Utterance(features if has_texts else 4 * features - 2, targets, transcript))
        return found

    def _transcripts(self) -> list[TranscriptHmm | None]:
        """Return the HMM of each utterance's words, for a task that learns whole transcripts."""
        options = self.task.transcripts
        if options is None:
            return [None for _ in _TEXTS]
        lexicon = Lexicon.load(self.dataset.lexicon_path)
        compiler = make_compiler(lexicon, StateInventory.load(self.dataset.classes_path), options)
        return [compiler.compile(text.split()) for text in _TEXTS]

    def _seeds_decide(self, batch: Batch) -> None:
        first, second = self._model(1), self._model(1)
        assert list(first.parameters()), f"{self.text}: the model has no parameters"
        for (name, one), other in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
            assert torch.equal(one, other), (
                f"{self.text}: equal seeds give different initial weights ({name})"
            )
        totals = []
        for model in (first, second):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(2)
                totals.append(self._loss_sum(model.train(), batch).total)
        assert torch.equal(*totals), f"{self.text}: equal seeds give different losses; draw by torch alone"

    def _loss_is_a_sum(self, model: nn.Module, utterances: Sequence[_Utterance]) -> None:
        model.eval()
        whole, parts = (
            self._loss(model, _batch(utterances)),
            [self._loss(model, _batch([u])) for u in utterances],
        )
        what = "the loss of a batch is not the sum of its utterances' losses"
        self._assert_close(sum(parts), whole, what, lambda: self._why_no_sum(model, utterances, sum(parts)))
        padded = self._loss(model, _batch(utterances, spare=3))
        self._assert_close(padded, whole, "more padding changes the loss", lambda: _PADDING_COUNTS)
        turned = self._loss(model, _batch(utterances[::-1]))
        self._assert_close(turned, whole, "the order of utterances in a batch changes the loss")

    def _why_no_sum(self, model: nn.Module, utterances: Sequence[_Utterance], alone: float) -> str:
        """Say why the loss of a batch differs from the sum of its utterances' losses, one by one."""
        longest = max(len(utterance.features) for utterance in utterances)
        padded = sum(
            self._loss(model, _batch([utterance], spare=longest - len(utterance.features)))
            for utterance in utterances
        )
        return _OTHERS_COUNT if self._are_close(padded, alone) else _PADDING_COUNTS

    def _loss(self, model: nn.Module, batch: Batch) -> float:
        loss = self._loss_sum(model, batch)
        total = loss.total
        assert total.isfinite(), f"{self.text}: the loss is {total.item()}"
        assert loss.num_frames == batch.num_frames, (
            f"{self.text}: the loss counts {loss.num_frames} frames of a batch of {batch.num_frames}; give "
            "batch.num_frames, by which gradients are divided"
        )
        return total.item()

    def _loss_sum(self, model: nn.Module, batch: Batch) -> LossSum:
        loss = self.task.loss(model, batch)
        mistake = loss_mistake(self.task, loss)
        assert mistake is None, f"{self.text}: {mistake}"
        return loss

    def _gradients_are_finite(self, model: nn.Module, batch: Batch) -> None:
        model.train()
        total = self._loss_sum(model, batch).total
        total.backward()  # type: ignore[no-untyped-call]
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for name, gradient in gradients.items():
            assert bool(gradient.isfinite().all()), f"{self.text}: the gradient of {name} is not finite"
        moved = any(bool(gradient.count_nonzero()) for gradient in gradients.values())
        assert moved, f"{self.text}: all gradients are 0: the loss does not depend on the model's parameters"
        model.zero_grad()

    def _learns(self, model: nn.Module, batch: Batch) -> None:
        """Train with Adam, with the parameters as views into one vector."""
        before = self._loss(model.eval(), batch)
        replica = _replica_of(model)
        moved = self._loss(model, batch)
        self._assert_close(moved, before, "the loss changes as the parameters are moved into one vector")
        after = self._train(replica, batch, _UPDATES)
        assert after < before, f"{self.text}: {_UPDATES} updates lead from a loss of {before:g} to {after:g}"

    def _train(self, replica: Replica, batch: Batch, updates: int) -> float:
        """Apply `updates` updates, always with the same dropout; return the final loss."""
        model = replica.model.train()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            for _ in range(updates):
                loss = self._loss_sum(model, batch)
                loss.total.backward()  # type: ignore[no-untyped-call]
                replica.apply_gradients(loss.num_frames)
        return self._loss(model.eval(), batch)

    def _resumes(self, batch: Batch) -> None:
        """Train, then compare continuing in the same model and in a new one with its state loaded."""
        replica, other = _replica_of(self._model(1)), _replica_of(self._model(9))
        self._train(replica, batch, _UPDATES // 3)
        other.parameters.values.copy_(replica.parameters.values)
        load_untrained(other.model, untrained_tensors(replica.model), self.text)
        other.load_optimizer_tensors(replica.optimizer_tensors())
        found, expected = (self._train(each, batch, _UPDATES // 3) for each in (other, replica))
        self._assert_close(
            found,
            expected,
            "training that was interrupted goes on otherwise, as what the loss depends on is neither a "
            "parameter nor a buffer of the model; the loss",
        )

    def _scores_are_sums(self, model: nn.Module, utterances: Sequence[_Utterance]) -> FrameScores:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        whole = self._scores(model, _batch(utterances))
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), f"{self.text}: scoring changes the model ({name})"
        parts = [self._scores(model, _batch([utterance])) for utterance in utterances]
        summed: dict[str, float] = {key: sum(part.sums[key] for part in parts) for key in whole.sums}
        counted = {key: sum(part.count(key) for part in parts) for key in whole.sums}
        again = self._scores(model, _batch(utterances))
        padded = self._scores(model, _batch(utterances[::-1], spare=3))
        for other, what in (
            (
                FrameScores(summed, sum(part.num_frames for part in parts), counted),
                "is not the sum of the utterances'",
            ),
            (again, "is another when it is scored again"),
            (padded, "changes with padding, or the order of utterances"),
        ):
            assert other.num_frames == whole.num_frames, (
                f"{self.text}: the number of scored frames {what}: {other.num_frames}, {whole.num_frames}"
            )
            for key, value in whole.sums.items():
                self._assert_close(other.sums[key], value, f"the score {key} of a batch {what}")
                self._assert_close(
                    other.count(key), whole.count(key), f"the frames of {key} of a batch {what}"
                )
        return whole

    def _scores(self, model: nn.Module, batch: Batch) -> FrameScores:
        with torch.no_grad():
            scores = self.task.score(model.eval(), batch)
        mistake = score_mistake(self.task, scores)
        assert mistake is None, f"{self.text}: {mistake}"
        declared, given = {metric.key for metric in self.task.metrics}, set(scores.sums)
        assert given == declared, (
            f"{self.text}: metrics {sorted(declared)} are declared, {sorted(given)} scored"
        )
        counted = set(scores.counts)
        assert counted <= declared, f"{self.text}: {sorted(counted - declared)} are counted, but not declared"
        for key, value in scores.sums.items():
            assert np.isfinite(value), f"{self.text}: the score {key} is {value}"
        return scores

    def _same_after_saving(self, model: nn.Module, batch: Batch, scores: FrameScores, folder: Path) -> None:
        facts = self.task.describe_data(self._data)
        json.dumps(facts)
        ones = np.ones(self.dataset.num_classes, np.int64)
        counts = ClassCounts(ones, ones.copy()) if self.task.counts_classes else None
        self.task.save(folder, model, facts, counts)
        assert (folder / MODEL_NAME).is_file(), f"{self.text}: save has written no {MODEL_NAME}"
        read = self._read_back(folder) if self.load is None else self.load(folder)
        for key, value in self._scores(read, batch).sums.items():
            self._assert_close(value, scores.sums[key], f"read back from its file, the model's {key}")

    def _read_back(self, folder: Path) -> nn.Module:
        """Return a new model with the weights of the file."""
        tensors = safetensors.torch.load_file(folder / MODEL_NAME)
        weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
        model = self._model(9)
        missing = sorted(set(model.state_dict()) ^ set(weights))
        assert not missing, (
            f"{self.text}: the model and its file do not have the same weights ({', '.join(missing[:3])}); "
            "give task_contract load= where save writes a file of another form"
        )
        model.load_state_dict(weights)
        return model

    def _stages_end_with_the_loss(self, model: nn.Module, batch: Batch) -> None:
        if not self.task.modules:
            return
        values: Values = {}
        stages = self.task.stages(model.eval())
        names = tuple(stage.name for stage in stages[:-1])
        assert names == self.task.modules, f"{self.text}: modules are {self.task.modules}, stages {names}"
        for stage in stages:
            values.update(stage.run(values, batch))
        assert LOSS in values, f"{self.text}: the last stage gives no {LOSS!r}"
        whole = self._loss(model, batch)
        self._assert_close(values[LOSS].item(), whole, "the stages end with another loss than `loss` gives")

    def _are_close(self, found: float, expected: float) -> bool:
        return abs(found - expected) <= self.tolerance * max(1.0, abs(expected))

    def _assert_close(
        self, found: float, expected: float, what: str, why: Callable[[], str] | None = None
    ) -> None:
        if not self._are_close(found, expected):
            cause = f"; {why()}" if why is not None else ""
            raise AssertionError(f"{self.text}: {what}: {found:g} is not {expected:g}{cause}")


def _replica_of(model: nn.Module) -> Replica:
    return Replica(model, lambda parameters: torch.optim.Adam(parameters, _LEARNING_RATE))


def _batch(utterances: Sequence[_Utterance], *, spare: int = 0) -> Batch:
    """Return a batch padded to the longest utterance plus `spare` frames."""
    lengths = torch.tensor([len(utterance.features) for utterance in utterances])
    longest = int(lengths.max()) + spare
    most = max(len(utterance.targets) for utterance in utterances) + spare
    features = torch.zeros(len(utterances), longest, utterances[0].features.shape[1])
    targets = torch.full((len(utterances), most), IGNORED_TARGET)
    for row, utterance in enumerate(utterances):
        features[row, : len(utterance.features)] = utterance.features
        targets[row, : len(utterance.targets)] = utterance.targets
    hmms = [utterance.transcript for utterance in utterances if utterance.transcript is not None]
    transcripts = TranscriptHmms.of(hmms) if hmms else None
    return Batch(features, targets, lengths, int(lengths.sum()), transcripts=transcripts)


def _aligned_features(folder: Path) -> Dataset:
    """Return a data directory of features with a class per frame; without shards, as no check reads them."""
    lexicon = lexicon_for(("one", "two"))
    inventory = StateInventory(lexicon.phones)
    lexicon.save(folder / "lexicon.txt")
    inventory.save(folder / "classes.txt")
    Manifest(8000, _FEATURES, inventory.num_classes, "exact", "given", {}).write(folder)
    return Dataset.open(folder)


def _speech_and_text(folder: Path) -> Dataset:
    """Return a data directory of spectrograms with the symbols of their texts; also without shards."""
    inventory = SymbolInventory.of_kind("characters")
    inventory.save(folder / "symbols.json")
    inventory.save_classes(folder / "classes.txt")
    Manifest(8000, TINY_SPECTROGRAMS, inventory.num_symbols, "text", "given", {}, "spectrograms").write(
        folder
    )
    return Dataset.open(folder)
