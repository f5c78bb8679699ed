"""The acoustic-model task: an LSTM over HMM states, by frame cross-entropy or by whole transcripts.

Legend: B batch, T frames, C classes, H what the output layer sees.
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

if TYPE_CHECKING:  # options know the task, and --help and the launcher do without torch and HDF5
    from torch import Tensor, nn

    from speechdp.data.loading.batch import Batch
    from speechdp.data.shards.dataset import Dataset
    from speechdp.tasks.model_file import ClassCounts

#: Of all log-probabilities in --criterion full-sum.  Neighbouring frames are not independent: with scale 1
#: the first alignment that comes up, usually silence nearly everywhere, is never left again.
FULL_SUM_SCALE = 0.3
#: Share of a class's prior that is of the last step's batch.
_PRIOR_UPDATE = 0.02
#: Least prior, as a share of the uniform one: a class that is hardly seen is not made likely by that.
_MIN_PRIOR_SHARE = 0.01


@dataclass(frozen=True)
class AcousticTask(Task):
    """What an acoustic model is trained for and judged by.

    Attributes:
        sizes: of the model.
        silence: classes that are silence's; empty where they are not known.
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
        """Return the task of the criterion given, with a preset's sizes, changed by those given."""
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
        """Refuse data without the names of their classes."""
        from speechdp.labels.kaldi_pdfs import classes_of  # noqa: PLC0415

        classes_of(dataset)

    def for_data(self, dataset: Dataset) -> AcousticTask:
        """Return the task with the silence of these data, which Kaldi's pdfs do not tell."""
        from speechdp.labels.kaldi_pdfs import classes_of  # noqa: PLC0415

        return replace(self, silence=classes_of(dataset).silence)

    def make_network(self, feature_dim: int, num_classes: int) -> nn.Module:
        """Return the network with initial weights, drawn from torch's random numbers, on the CPU.

        A task derived from this one has another network by this method alone.  Decoding makes it again, of
        the options that were trained with, and gives it the weights of the model file.

        Returns:
            Maps features (B, T, F) and lengths (B,), on the CPU, to logits (B, T, C).  If it also has
            `encode`, of the same arguments, to (B, T, H), and `output`, from (..., H) to logits, only frames
            with a target are classified in training, and `profile` times both parts.
        """
        from speechdp.models.lstm_am import LstmAcousticModel  # noqa: PLC0415

        return LstmAcousticModel(feature_dim, num_classes, self.sizes)

    def make_model(self, data: TaskData) -> Any:
        """Return the network for these data.  Raises ConfigError: `make_network` from outside makes none."""
        from speechdp.tasks.registry import made_network  # noqa: PLC0415

        return made_network(self, data.feature_dim, self.num_outputs(data))

    def num_outputs(self, data: TaskData) -> int:
        """Return how many classes the network tells apart: those of the targets."""
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
        """Return the network but its output layer (with the choice of learnt frames), that, cross-entropy."""
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
        """Return what the model file says of the data, a checksum of the classes' names among it."""
        from speechdp.labels.kaldi_pdfs import classes_of  # noqa: PLC0415

        return {**super().describe_data(data), "classes_sha256": classes_of(data.dataset).sha256}

    def save(self, run_dir: Path, model: Any, facts: dict[str, Any], counts: ClassCounts | None) -> None:
        """Write the model with the counts that decoding needs; one that is not decoded as any task's."""
        from speechdp.tasks.model_file import save_model  # noqa: PLC0415

        if not self.decodes:
            super().save(run_dir, model, facts, counts)
            return
        save_model(run_dir, model, counts, {**self._made_by(model), **facts})

    def _made_by(self, model: Any) -> dict[str, Any]:
        """Return what a model file says of a network that is not ours: the task that makes it again."""
        from speechdp.models.lstm_am import LstmAcousticModel  # noqa: PLC0415

        is_ours = isinstance(model, LstmAcousticModel)
        return {} if is_ours else {"task": self.name, "options": write_options(self)}

    def _learnt_frames(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        from speechdp.data.loading.batch import IGNORED_TARGET  # noqa: PLC0415

        # Padding and context leave before the output layer: with 32,000 classes it is most of the work.
        learnt = batch.targets != IGNORED_TARGET  # (B, T)
        logits = _classified(model, self._encoded(model, batch)[learnt])  # (frames, C)
        return at_least_float32(logits), batch.targets[learnt]

    def _encoded(self, model: Any, batch: Batch) -> Tensor:
        """Return what a network's output layer sees, (B, T, H); the logits where it has no such parts."""
        network = model.encode if _has_parts(model) else model
        return self._of_each_frame(network(batch.features, batch.lengths), batch)

    def _logits(self, model: Any, batch: Batch) -> Tensor:
        """Return a network's logits, (B, T, C)."""
        return self._of_each_frame(model(batch.features, batch.lengths), batch)

    def _of_each_frame(self, found: Tensor, batch: Batch) -> Tensor:
        """Return what a network gives.  Raises ConfigError: it is not a vector for each frame."""
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
        """Count the frames that are right, and those of them that are not silence.

        Args:
            correct: whether the class of each of `targets` was found; not where a target is ignored.
            targets: classes, of utterances that are scored.
            num_frames: number of those that are not ignored.
        """
        in_speech = (correct & self._is_speech(targets)).sum()
        sums = {FRAME_ACCURACY.key: float(correct.sum().item()), SPEECH_ACCURACY.key: float(in_speech.item())}
        num_speech = int(self._is_speech(targets).sum().item())
        return FrameScores(sums, num_frames, {SPEECH_ACCURACY.key: num_speech})

    def _is_speech(self, targets: Tensor) -> Tensor:
        """Tell which targets are known not to be silence."""
        import torch  # noqa: PLC0415

        from speechdp.data.loading.batch import IGNORED_TARGET  # noqa: PLC0415

        if not self.silence:
            return torch.zeros_like(targets, dtype=torch.bool)
        silence = torch.tensor(self.silence, device=targets.device)
        return (targets != IGNORED_TARGET) & ~torch.isin(targets, silence)


def _has_parts(model: Any) -> bool:
    return hasattr(model, "encode") and hasattr(model, "output")


def _classified(model: Any, encoded: Tensor) -> Tensor:
    """Return the logits, (..., C), of what `_encoded` gives or of some of its frames, (..., H)."""
    logits: Tensor = model.output(encoded) if _has_parts(model) else encoded
    return logits


class TranscriptTask(AcousticTask):
    """An acoustic model that learns transcripts as a whole, without an alignment.

    An utterance with fewer frames than its transcript needs is left out.
    """

    def loss(self, model: Any, batch: Batch) -> LossSum:
        """Return the summed loss of a batch with at least one frame."""
        return LossSum(self.total(model, self._logits(model, batch), batch), batch.num_frames)

    @abstractmethod
    def total(self, model: Any, logits: Tensor, batch: Batch) -> Tensor:
        """Return the summed loss of a batch by its logits (B, T, C)."""

    def score(self, model: Any, batch: Batch) -> FrameScores:
        """Score a batch: log-probability of the transcripts by the posteriors alone, and frame accuracy."""
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
        """Return the network but its output layer, that, and the sum over state sequences."""

        def encode(values: Values, batch: Batch) -> Values:
            return {"encoded": self._encoded(model, batch)}  # (B, T, H)

        def classify(values: Values, batch: Batch) -> Values:
            return {"logits": _classified(model, values["encoded"])}  # (B, T, C)

        def lose(values: Values, batch: Batch) -> Values:
            return {LOSS: self.total(model, values["logits"], batch)}

        return Stage("encoder", encode), Stage("output", classify), Stage("loss", lose)

    def describe_data(self, data: TaskData) -> dict[str, Any]:
        """Return what the model file says of the data; refuses data without pronunciations."""
        from speechdp.labels.kaldi_pdfs import refuse_kaldi_pdfs  # noqa: PLC0415
        from speechdp.labels.lexicon import Lexicon  # noqa: PLC0415

        remedy = "leave --criterion out, they are aligned already"
        refuse_kaldi_pdfs(data.dataset.classes_path, "training without an alignment", remedy)
        Lexicon.load(data.dataset.lexicon_path)
        return super().describe_data(data)


@dataclass(frozen=True)
class FullSumTask(TranscriptTask):
    """Learns by the sum over all state sequences of a transcript's HMM.

    The loss of an utterance is -log of the sum over all state sequences of its transcript of

        product over frames of  (p(class | x) / p(class)^prior_scale * p(transition))^FULL_SUM_SCALE

    divided by FULL_SUM_SCALE: its gradient is that of the cross-entropy against the occupancies of the
    classes.  The priors are a running average of the model's own posteriors: they keep frequent classes,
    silence above all, from taking what is not theirs.

    Source: Raissi et al. 2022, "HMM vs. CTC for automatic speech recognition: comparison based on full-sum
    training from scratch"; the scales of public RWTH recipes.

    Attributes:
        prior_scale: 0 leaves the posteriors as they are.
    """

    metrics = (TRANSCRIPT_LOG_PROB, FRAME_ACCURACY, SPEECH_ACCURACY)
    modules = TranscriptTask.modules
    transcripts: ClassVar[TranscriptOptions] = TranscriptOptions(transition_scale=FULL_SUM_SCALE)

    prior_scale: float = 0.3

    def __post_init__(self) -> None:
        if not 0 <= self.prior_scale <= 1:
            raise ConfigError(f"--prior-scale {self.prior_scale}: must be from 0 to 1")

    def make_model(self, data: TaskData) -> Any:
        """Return the network with initial weights, and beside them the running average of its posteriors."""
        import torch  # noqa: PLC0415

        model = super().make_model(data)
        prior = torch.full((data.num_classes,), 1 / data.num_classes)
        # Each rank has its own, averaged where the model is judged or saved, as statistics of normalisation.
        model.register_buffer("class_prior", prior, persistent=False)
        return model

    def save(self, run_dir: Path, model: Any, facts: dict[str, Any], counts: ClassCounts | None) -> None:
        """Write the model with its own priors, and the self-loops it was trained with, as counts."""
        import numpy as np  # noqa: PLC0415

        from speechdp.tasks.model_file import ClassCounts  # noqa: PLC0415

        assert counts is not None
        frames = model.class_prior.double().cpu().numpy() * counts.frames.sum()
        runs = frames * (1 - self.transcripts.self_loop)
        # None has 0, which would say that its phone is unknown to the model: the average forgets rare ones.
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
            # NaN, as of a pass in float16, would stay for ever.  On the device: no host waits for it.
            mean = torch.where(mean.isfinite().all(), mean, model.class_prior)
            model.class_prior.lerp_(mean, _PRIOR_UPDATE)
        # As multiples of the uniform prior, so that the loss begins as it would be without priors.
        prior = (model.class_prior * logits.shape[2]).clamp(min=_MIN_PRIOR_SHARE)
        scores = FULL_SUM_SCALE * (log_posteriors - self.prior_scale * prior.log())
        log_probs, _ = full_sum(scores, batch.lengths, batch.transcripts)
        return -log_probs.sum() / FULL_SUM_SCALE


@dataclass(frozen=True)
class CtcTask(TranscriptTask):
    """Learns by connectionist temporal classification: classes are the phones and a blank.

    Source: Graves et al. 2006.
    """

    metrics = (TRANSCRIPT_LOG_PROB,)
    counts_classes = False
    modules = TranscriptTask.modules
    transcripts: ClassVar[TranscriptOptions] = TranscriptOptions("ctc")

    def num_outputs(self, data: TaskData) -> int:
        """Return how many classes the network tells apart: phones and a blank."""
        return num_ctc_classes(data.dataset.num_classes)

    def describe_data(self, data: TaskData) -> dict[str, Any]:
        """Return what the model file says of the data, with the number of CTC's classes."""
        if data.tying is not None:
            raise ConfigError(
                "--alignments: has states in context, which --criterion ctc does not learn; leave it out"
            )
        return {**super().describe_data(data), "num_classes": self.num_outputs(data)}

    def save(self, run_dir: Path, model: Any, facts: dict[str, Any], counts: ClassCounts | None) -> None:
        """Write the model, which says of itself that it is CTC's."""
        super().save(run_dir, model, {"criterion": "ctc", **facts}, None)

    def total(self, model: Any, logits: Tensor, batch: Batch) -> Tensor:
        from speechdp.labels.forward_backward import full_sum  # noqa: PLC0415

        assert batch.transcripts is not None
        log_posteriors = at_least_float32(logits).log_softmax(2)
        log_probs, _ = full_sum(log_posteriors, batch.lengths, batch.transcripts)
        return -log_probs.sum()
