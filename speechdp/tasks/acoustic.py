"""The acoustic-model task: an LSTM over HMM states, trained by frame cross-entropy or on whole transcripts.

Legend: B batch, T frames, C classes, H input size of the output layer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from speechdp.errors import ConfigError
from speechdp.extensions import write_options
from speechdp.labels.transcript_hmm import TranscriptOptions, num_ctc_classes
from speechdp.models.lstm_config import LstmConfig
from speechdp.models.precision import at_least_float32
from speechdp.models.presets import LSTM_TINY, Preset
from speechdp.tasks.base import LOSS, FrameScores, LossSum, Stage, Task, TaskData, Values
from speechdp.tasks.metrics import FRAME_ACCURACY, LOG_PROB, RECORDS, SPEECH_ACCURACY, TRANSCRIPT_LOG_PROB

if TYPE_CHECKING:  # options import the task, and --help and the launcher do without torch and HDF5
    from torch import Tensor, nn

    from speechdp.data.loading.batch import Batch
    from speechdp.data.shards.dataset import Dataset
    from speechdp.tasks.model_file import ClassCounts

#: Scale of all log-probabilities in --criterion full-sum.  Neighbouring frames are not independent: with
#: scale 1, training never leaves the first alignment it finds, usually silence nearly everywhere.
FULL_SUM_SCALE = 0.3
#: Weight of the latest batch in the running average of the class priors.
_PRIOR_UPDATE = 0.02
#: Lowest prior, as a share of the uniform one: a rarely seen class must not become likely through its prior.
_MIN_PRIOR_SHARE = 0.01


@dataclass(frozen=True)
class AcousticTask(Task):
    """Train and evaluate an acoustic model.

    Attributes:
        sizes: sizes of the model.
        silence: classes of silence; empty if they are unknown.
    """

    name = "acoustic"
    metrics = RECORDS["acoustic"].metrics
    decodes = RECORDS["acoustic"].decodes
    counts_classes = True
    presets = ("tiny", "kaldi-4x800", "swb2000")
    model_options = (*(field.name for field in fields(LstmConfig)), "criterion", "prior_scale")
    modules = ("encoder", "output")

    sizes: LstmConfig = LSTM_TINY
    silence: tuple[int, ...] = field(default=(), kw_only=True)

    @classmethod
    def of_preset(cls, preset: Preset, given: Mapping[str, Any]) -> AcousticTask:
        """Return the task of the given criterion, with a preset's sizes, changed by the given ones."""
        assert isinstance(preset.model, LstmConfig)
        sizes = dict(given)
        criterion, prior_scale = sizes.pop("criterion", "frame"), sizes.pop("prior_scale", None)
        if criterion != "frame" and cls is not AcousticTask:
            raise ConfigError(
                f"--criterion {criterion}: --task {cls.name} has a loss of its own; leave it out"
            )
        config = replace(preset.model, **sizes)
        if criterion == "full-sum":
            return FullSumTask(config) if prior_scale is None else FullSumTask(config, prior_scale)
        if prior_scale is not None:
            raise ConfigError(
                "--prior-scale: goes with --criterion full-sum or --realign-criterion full-sum; leave it out"
            )
        return CtcTask(config) if criterion == "ctc" else cls(config)

    @classmethod
    def check_data(cls, dataset: Dataset) -> None:
        """Refuse data without the names of its classes."""
        from speechdp.labels.kaldi_pdfs import classes_of  # noqa: PLC0415

        classes_of(dataset)

    def for_data(self, dataset: Dataset) -> AcousticTask:
        """Return the task with the silence classes of this data, which are unknown for Kaldi's pdfs."""
        from speechdp.labels.kaldi_pdfs import classes_of  # noqa: PLC0415

        return replace(self, silence=classes_of(dataset).silence)

    def make_network(self, feature_dim: int, num_classes: int) -> nn.Module:
        """Return the network with initial weights, drawn from torch's random numbers, on the CPU.

        A derived task can replace the network by overriding this method alone.  Decoding calls it again, with
        the options used in training, and loads the weights of the model file.

        Returns:
            A module that maps features (B, T, F) and lengths (B,), on the CPU, to logits (B, T, C).  It may
            also have `encode`, from the same arguments to (B, T, H), and `output`, from (..., H) to logits;
            then training classifies only frames with a target, and `profile` times both parts.
        """
        from speechdp.models.lstm_am import LstmAcousticModel  # noqa: PLC0415

        return LstmAcousticModel(feature_dim, num_classes, self.sizes)

    def make_model(self, data: TaskData) -> Any:
        """Return the network for this data.  Raises ConfigError if a user's `make_network` fails."""
        from speechdp.tasks.registry import made_network  # noqa: PLC0415

        return made_network(self, data.feature_dim, self.num_outputs(data))

    def num_outputs(self, data: TaskData) -> int:
        """Return the number of classes that the network outputs: those of the targets."""
        return data.num_classes

    def loss(self, model: Any, batch: Batch) -> LossSum:
        """Return the summed cross-entropy of a batch with at least one frame."""
        from torch import nn  # noqa: PLC0415

        logits, targets = self._learnt_frames(model, batch)
        return LossSum(nn.functional.cross_entropy(logits, targets, reduction="sum"), batch.num_frames)

    def score(self, model: Any, batch: Batch) -> FrameScores:
        """Score a batch (Kaldi's log-probability per frame and frame accuracy, as sums)."""
        import torch  # noqa: PLC0415

        with torch.no_grad():
            logits, targets = self._learnt_frames(model, batch)
            log_prob = -torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        accuracy = self._accuracy(logits.argmax(dim=1) == targets, targets, batch.num_frames)
        return FrameScores(
            {LOG_PROB.key: log_prob.item(), **accuracy.sums}, batch.num_frames, accuracy.counts
        )

    def stages(self, model: Any) -> tuple[Stage, ...]:
        """Return the stages: encoder (which also picks the learnt frames), output layer, cross-entropy."""
        from torch import nn  # noqa: PLC0415

        from speechdp.data.loading.batch import IGNORED_TARGET  # noqa: PLC0415

        def encode(values: Values, batch: Batch) -> Values:
            learnt = batch.targets != IGNORED_TARGET  # (B, T)
            return {"encoded": self._encoded(model, batch)[learnt]}  # (frames, H)

        def classify(values: Values, batch: Batch) -> Values:
            return {"logits": _classified(model, values["encoded"])}  # (frames, C)

        def lose(values: Values, batch: Batch) -> Values:
            targets = batch.targets[batch.targets != IGNORED_TARGET]
            logits = at_least_float32(values["logits"])
            return {LOSS: nn.functional.cross_entropy(logits, targets, reduction="sum")}

        return Stage("encoder", encode), Stage("output", classify), Stage("loss", lose)

    def describe_data(self, data: TaskData) -> dict[str, Any]:
        """Return what the model file records about the data, including a checksum of the class names."""
        from speechdp.labels.kaldi_pdfs import classes_of  # noqa: PLC0415

        return {**super().describe_data(data), "classes_sha256": classes_of(data.dataset).sha256}

    def save(self, run_dir: Path, model: Any, facts: dict[str, Any], counts: ClassCounts | None) -> None:
        """Write the model with the counts that decoding needs; without them if it is not decoded."""
        from speechdp.tasks.model_file import save_model  # noqa: PLC0415

        if not self.decodes:
            super().save(run_dir, model, facts, counts)
            return
        save_model(run_dir, model, counts, {**self._made_by(model), **facts})

    def _made_by(self, model: Any) -> dict[str, Any]:
        """Return what the model file needs to make a user's network again: task and options."""
        from speechdp.models.lstm_am import LstmAcousticModel  # noqa: PLC0415

        is_ours = isinstance(model, LstmAcousticModel)
        return {} if is_ours else {"task": self.name, "options": write_options(self)}

    def _learnt_frames(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        from speechdp.data.loading.batch import IGNORED_TARGET  # noqa: PLC0415

        # Drop padding and context before the output layer: with 32,000 classes it is most of the work.
        learnt = batch.targets != IGNORED_TARGET  # (B, T)
        logits = _classified(model, self._encoded(model, batch)[learnt])  # (frames, C)
        return at_least_float32(logits), batch.targets[learnt]

    def _encoded(self, model: Any, batch: Batch) -> Tensor:
        """Return the input of the network's output layer, (B, T, H); its logits if it has no such parts."""
        network = model.encode if _has_parts(model) else model
        return self._of_each_frame(network(batch.features, batch.lengths), batch)

    def _logits(self, model: Any, batch: Batch) -> Tensor:
        """Return a network's logits, (B, T, C)."""
        return self._of_each_frame(model(batch.features, batch.lengths), batch)

    def _of_each_frame(self, found: Tensor, batch: Batch) -> Tensor:
        """Return the network's output.  Raises ConfigError if that is not one vector per frame."""
        utterances, frames = batch.features.shape[:2]
        if found.dim() == 3 and found.shape[:2] == (utterances, frames):
            return found
        raise ConfigError(
            f"--task {self.name}: for features of shape {tuple(batch.features.shape)} its network returns "
            f"{tuple(found.shape)}, not one vector per frame, ({utterances}, {frames}, ...); if it works at "
            "a lower frame rate, let each of its steps classify the frames that it stands for (docs/api.md, "
            "An acoustic network of your own)"
        )

    def _accuracy(self, correct: Tensor, targets: Tensor, num_frames: int) -> FrameScores:
        """Count the correct frames, and those among them that are not silence.

        Args:
            correct: whether the class of each of `targets` was found; False where a target is ignored.
            targets: classes, of scored utterances.
            num_frames: number of targets that are not ignored.
        """
        in_speech = (correct & self._is_speech(targets)).sum()
        sums = {FRAME_ACCURACY.key: float(correct.sum().item()), SPEECH_ACCURACY.key: float(in_speech.item())}
        num_speech = int(self._is_speech(targets).sum().item())
        return FrameScores(sums, num_frames, {SPEECH_ACCURACY.key: num_speech})

    def _is_speech(self, targets: Tensor) -> Tensor:
        """Return which targets are known not to be silence."""
        import torch  # noqa: PLC0415

        from speechdp.data.loading.batch import IGNORED_TARGET  # noqa: PLC0415

        if not self.silence:
            return torch.zeros_like(targets, dtype=torch.bool)
        silence = torch.tensor(self.silence, device=targets.device)
        return (targets != IGNORED_TARGET) & ~torch.isin(targets, silence)


def _has_parts(model: Any) -> bool:
    return hasattr(model, "encode") and hasattr(model, "output")


def _classified(model: Any, encoded: Tensor) -> Tensor:
    """Return the logits, (..., C), of the output of `_encoded` or some of its frames, (..., H)."""
    logits: Tensor = model.output(encoded) if _has_parts(model) else encoded
    return logits


class TranscriptTask(AcousticTask):
    """Train an acoustic model on whole transcripts, without an alignment.

    Utterances with fewer frames than their transcript needs are left out.
    """

    def loss(self, model: Any, batch: Batch) -> LossSum:
        """Return the summed loss of a batch with at least one frame."""
        return LossSum(self.total(model, self._logits(model, batch), batch), batch.num_frames)

    @abstractmethod
    def total(self, model: Any, logits: Tensor, batch: Batch) -> Tensor:
        """Return the summed loss of a batch with these logits, (B, T, C)."""

    def score(self, model: Any, batch: Batch) -> FrameScores:
        """Score a batch: log-probability of the transcripts from the posteriors alone, and frame accuracy."""
        import torch  # noqa: PLC0415

        from speechdp.labels.forward_backward import full_sum  # noqa: PLC0415

        assert batch.transcripts is not None
        with torch.no_grad():
            logits = at_least_float32(self._logits(model, batch))
        log_probs, fits = full_sum(logits.log_softmax(2), batch.lengths, batch.transcripts)
        targets = batch.targets[fits.to(batch.targets.device)]
        correct = logits[fits.to(logits.device)].argmax(dim=2) == targets  # never where a target is ignored
        accuracy = self._accuracy(correct, targets, batch.num_frames)
        sums = {TRANSCRIPT_LOG_PROB.key: log_probs.sum().item(), **accuracy.sums}
        declared = {metric.key: sums[metric.key] for metric in self.metrics}
        counts = {key: count for key, count in accuracy.counts.items() if key in declared}
        return FrameScores(declared, batch.num_frames, counts)

    def stages(self, model: Any) -> tuple[Stage, ...]:
        """Return the stages: encoder, output layer, sum over state sequences."""

        def encode(values: Values, batch: Batch) -> Values:
            return {"encoded": self._encoded(model, batch)}  # (B, T, H)

        def classify(values: Values, batch: Batch) -> Values:
            return {"logits": _classified(model, values["encoded"])}  # (B, T, C)

        def lose(values: Values, batch: Batch) -> Values:
            return {LOSS: self.total(model, values["logits"], batch)}

        return Stage("encoder", encode), Stage("output", classify), Stage("loss", lose)

    def describe_data(self, data: TaskData) -> dict[str, Any]:
        """Return what the model file records about the data; refuse data without pronunciations."""
        from speechdp.labels.kaldi_pdfs import refuse_kaldi_pdfs  # noqa: PLC0415
        from speechdp.labels.lexicon import Lexicon  # noqa: PLC0415

        remedy = "leave --criterion out, they are aligned already"
        refuse_kaldi_pdfs(data.dataset.classes_path, "training without an alignment", remedy)
        Lexicon.load(data.dataset.lexicon_path)
        return super().describe_data(data)


@dataclass(frozen=True)
class FullSumTask(TranscriptTask):
    """Train on the sum over all state sequences of a transcript's HMM.

    The loss of an utterance is -log of the sum over all state sequences of its transcript of

        product over frames of  (p(class | x) / p(class)^prior_scale * p(transition))^FULL_SUM_SCALE

    divided by FULL_SUM_SCALE, so that its gradient is that of the cross-entropy against the occupancies of
    the classes.  The priors are a running average of the model's own posteriors.  They keep frequent classes,
    silence above all, from absorbing frames of other classes.

    Source: Raissi et al. 2022, "HMM vs. CTC for automatic speech recognition: comparison based on full-sum
    training from scratch"; the scales of public RWTH recipes.

    Attributes:
        prior_scale: exponent of the priors; 0: the posteriors are used unchanged.
    """

    metrics = (TRANSCRIPT_LOG_PROB, FRAME_ACCURACY, SPEECH_ACCURACY)
    modules = TranscriptTask.modules
    transcripts: ClassVar[TranscriptOptions] = TranscriptOptions(transition_scale=FULL_SUM_SCALE)

    prior_scale: float = 0.3

    def __post_init__(self) -> None:
        if not 0 <= self.prior_scale <= 1:
            raise ConfigError(f"--prior-scale {self.prior_scale}: must be from 0 to 1")

    def make_model(self, data: TaskData) -> Any:
        """Return the network with initial weights, and a buffer for the running average of its posteriors."""
        import torch  # noqa: PLC0415

        model = super().make_model(data)
        prior = torch.full((data.num_classes,), 1 / data.num_classes)
        # Each rank has its own, averaged for evaluation and saving like statistics of batch normalisation.
        model.register_buffer("class_prior", prior, persistent=False)
        return model

    def save(self, run_dir: Path, model: Any, facts: dict[str, Any], counts: ClassCounts | None) -> None:
        """Write the model with its own priors, and the self-loops it was trained with, as counts."""
        import numpy as np  # noqa: PLC0415

        from speechdp.tasks.model_file import ClassCounts  # noqa: PLC0415

        assert counts is not None
        frames = model.class_prior.double().cpu().numpy() * counts.frames.sum()
        runs = frames * (1 - self.transcripts.self_loop)
        # At least 1: the average forgets rare phones, and a count of 0 would mean that the model does not
        # know the phone.
        frames, runs = (np.maximum(np.rint(values), 1).astype(np.int64) for values in (frames, runs))
        own = ClassCounts(frames, runs)
        super().save(run_dir, model, facts, own)

    def total(self, model: Any, logits: Tensor, batch: Batch) -> Tensor:
        import torch  # noqa: PLC0415

        from speechdp.labels.forward_backward import full_sum  # noqa: PLC0415

        assert batch.transcripts is not None
        log_posteriors = at_least_float32(logits).log_softmax(2)
        if model.training:
            frame = torch.arange(logits.shape[1])
            inside = (frame < batch.lengths.unsqueeze(1)).to(logits.device)  # (B, T)
            mean = log_posteriors.detach()[inside].exp().mean(0).to(model.class_prior.dtype)  # (C,)
            # A NaN, as from a float16 pass, would stay for ever.  The check is on the device: the host does
            # not wait.
            mean = torch.where(mean.isfinite().all(), mean, model.class_prior)
            model.class_prior.lerp_(mean, _PRIOR_UPDATE)
        # Priors relative to the uniform one, so that the loss starts as it would without priors.
        prior = (model.class_prior * logits.shape[2]).clamp(min=_MIN_PRIOR_SHARE)
        scores = FULL_SUM_SCALE * (log_posteriors - self.prior_scale * prior.log())
        log_probs, _ = full_sum(scores, batch.lengths, batch.transcripts)
        return -log_probs.sum() / FULL_SUM_SCALE


@dataclass(frozen=True)
class CtcTask(TranscriptTask):
    """Train by connectionist temporal classification: classes are the phones and a blank.

    Source: Graves et al. 2006.
    """

    metrics = (TRANSCRIPT_LOG_PROB,)
    counts_classes = False
    modules = TranscriptTask.modules
    transcripts: ClassVar[TranscriptOptions] = TranscriptOptions("ctc")

    def num_outputs(self, data: TaskData) -> int:
        """Return the number of classes that the network outputs: phones and a blank."""
        return num_ctc_classes(data.dataset.num_classes)

    def describe_data(self, data: TaskData) -> dict[str, Any]:
        """Return what the model file records about the data, with CTC's number of classes."""
        if data.tying is not None:
            raise ConfigError(
                "--alignments: has states in context, which --criterion ctc does not learn; leave it out"
            )
        return {**super().describe_data(data), "num_classes": self.num_outputs(data)}

    def save(self, run_dir: Path, model: Any, facts: dict[str, Any], counts: ClassCounts | None) -> None:
        """Write the model, marked as a CTC model."""
        super().save(run_dir, model, {"criterion": "ctc", **facts}, None)

    def total(self, model: Any, logits: Tensor, batch: Batch) -> Tensor:
        from speechdp.labels.forward_backward import full_sum  # noqa: PLC0415

        assert batch.transcripts is not None
        log_posteriors = at_least_float32(logits).log_softmax(2)
        log_probs, _ = full_sum(log_posteriors, batch.lengths, batch.transcripts)
        return -log_probs.sum()
