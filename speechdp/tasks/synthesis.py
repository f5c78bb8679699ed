"""The synthesis task: from symbols to mel and linear spectrograms, with attention and a stop prediction.

Legend: B batch, T frames, S symbols, N decoder steps of r frames, M mel bins, L linear bins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speechdp.errors import ConfigError
from speechdp.models.presets import Preset
from speechdp.models.tacotron.config import TINY, TacotronConfig
from speechdp.tasks.base import LOSS, FrameScores, LossSum, Stage, Task, TaskData, Values
from speechdp.tasks.metrics import ATTENTION_MAXIMUM, L1_ERROR, RECORDS

if TYPE_CHECKING:  # options import the task, and --help and the launcher do without torch and HDF5
    from speechdp.data.loading.batch import Batch
    from speechdp.data.shards.dataset import Dataset
    from speechdp.models.tacotron.model import Tacotron, TacotronOutput
    from speechdp.tasks.model_file import ClassCounts


@dataclass(frozen=True)
class SynthesisTask(Task):
    """Train and evaluate a synthesis model.

    Attributes:
        guided_attention: weight of the guide in the loss; 0: attention is not guided, as in the paper.
        sizes: sizes of the model.
    """

    name = "synthesis"
    metrics = RECORDS["synthesis"].metrics
    trains_on = ("spectrograms",)
    whole_utterances = True
    presets = ("tacotron-tiny", "tacotron-small", "tacotron")
    model_options = ("dropout", "reduction", "decoder", "guided_attention")
    modules = ("encoder", "decoder", "postproc")

    guided_attention: float = 0.0
    sizes: TacotronConfig = TINY

    def __post_init__(self) -> None:
        if not 0 <= self.guided_attention < float("inf"):
            raise ConfigError(f"--guided-attention {self.guided_attention}: must not be negative")

    @classmethod
    def of_preset(cls, preset: Preset, given: Mapping[str, Any]) -> SynthesisTask:
        """Return the task with a preset's sizes and guide, changed by the given ones."""
        assert isinstance(preset.model, TacotronConfig)
        sizes = dict(given)
        return cls(sizes.pop("guided_attention", preset.guided_attention), replace(preset.model, **sizes))

    @classmethod
    def check_data(cls, dataset: Dataset) -> None:
        """Refuse data without the symbols of its texts."""
        from speechdp.labels.symbols import symbols_of  # noqa: PLC0415

        symbols_of(dataset)

    def make_model(self, data: TaskData) -> Tacotron:
        """Return the Tacotron with initial weights."""
        from speechdp.models.tacotron.model import Tacotron  # noqa: PLC0415

        dataset = data.dataset
        mel_dim, linear_dim = dataset.features.num_mel_bins, dataset.features.linear_dim
        return Tacotron(dataset.num_classes, mel_dim, linear_dim, self.sizes)

    def loss(self, model: Tacotron, batch: Batch) -> LossSum:
        """Return the summed loss of a batch, with teacher forcing."""
        from speechdp.tasks.synthesis_losses import synthesis_losses  # noqa: PLC0415

        losses = synthesis_losses(self._output(model, batch), batch, model)
        return LossSum(losses.total(self.guided_attention), batch.num_frames)

    def score(self, model: Tacotron, batch: Batch) -> FrameScores:
        """Score a batch, with teacher forcing: the absolute errors, and the sharpness of the attention.

        Sharpness is the maximum of the attention over symbols, with each step weighted by its frames: the
        focus rate of Ren et al. 2019 (FastSpeech), section 3.3.
        """
        import torch  # noqa: PLC0415

        from speechdp.tasks.synthesis_losses import synthesis_losses  # noqa: PLC0415

        with torch.no_grad():
            output = self._output(model, batch)
            losses = synthesis_losses(output, batch, model)
        reduction, num_steps = model.config.reduction, output.stop_logits.shape[1]
        first = torch.arange(num_steps) * reduction
        frames = (batch.lengths.unsqueeze(1) - first).clamp(0, reduction)  # (B, N), on the CPU
        sharpness = (output.attention.amax(2).cpu() * frames).sum()
        errors = (losses.mel + losses.linear).item()
        return FrameScores({L1_ERROR.key: errors, ATTENTION_MAXIMUM.key: sharpness.item()}, batch.num_frames)

    def stages(self, model: Tacotron) -> tuple[Stage, ...]:
        """Return the stages: encoder, decoder, post-processing net, and the whole loss."""
        from speechdp.models.tacotron.model import TacotronOutput  # noqa: PLC0415
        from speechdp.tasks.synthesis_losses import synthesis_losses  # noqa: PLC0415

        def encode(values: Values, batch: Batch) -> Values:
            return {"memory": model.encode(batch.targets)}

        def decode(values: Values, batch: Batch) -> Values:
            taught = batch.features[:, :, : model.mel_dim]
            decoded = model.decode(values["memory"], batch.targets, taught, batch.lengths)
            return {"mel": decoded.mel, "stop": decoded.stop_logits, "attention": decoded.attention}

        def postprocess(values: Values, batch: Batch) -> Values:
            return {"linear": model.postproc(values["mel"], batch.lengths)}

        def lose(values: Values, batch: Batch) -> Values:
            output = TacotronOutput(values["mel"], values["linear"], values["stop"], values["attention"])
            return {LOSS: synthesis_losses(output, batch, model).total(self.guided_attention)}

        named = {"encoder": encode, "decoder": decode, "postproc": postprocess, "loss": lose}
        return tuple(Stage(name, run) for name, run in named.items())

    def model_facts(self) -> dict[str, Any]:
        """Return how the decoder is computed, and the number of frames per step."""
        return {"decoder": self.sizes.decoder, "reduction": self.sizes.reduction}

    def describe_data(self, data: TaskData) -> dict[str, Any]:
        """Return what the model file records about the data, including the symbols."""
        from speechdp.labels.symbols import symbols_of  # noqa: PLC0415

        return {**data.facts(), "symbols": symbols_of(data.dataset).to_dict()}

    def save(self, run_dir: Path, model: Any, facts: dict[str, Any], counts: ClassCounts | None) -> None:
        """Write the model with its symbols."""
        from speechdp.tasks.model_file import save_synthesis_model  # noqa: PLC0415

        save_synthesis_model(run_dir, model, facts)

    def _output(self, model: Tacotron, batch: Batch) -> TacotronOutput:
        output: TacotronOutput = model(batch.targets, batch.features[:, :, : model.mel_dim], batch.lengths)
        return output
