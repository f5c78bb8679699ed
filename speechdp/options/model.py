"""Options of the model: a preset, and single sizes of it changed.

The docstring under a field is its help on the command line.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from speechdp.data.shards.dataset import TaskName
from speechdp.errors import ConfigError
from speechdp.models.lstm_am import LstmConfig
from speechdp.models.presets import PRESETS, Preset
from speechdp.models.tacotron.config import TacotronConfig

PresetName = Literal["tiny", "kaldi-4x800", "swb2000", "tacotron-tiny", "tacotron-small", "tacotron"]
#: What is trained where nobody chose a model.
DEFAULT_PRESET: dict[TaskName, PresetName] = {"acoustic": "tiny", "synthesis": "tacotron-tiny"}
#: Options of one task's models alone.
_ACOUSTIC = ("layers", "cells", "bidirectional", "projection", "bottleneck")
_SYNTHESIS = ("reduction", "decoder", "guided_attention")


@dataclass(frozen=True)
class ModelOptions:
    """The model."""

    preset: PresetName | None = None
    """Sizes to start from; the options below change single ones.  Default: tiny, with --task synthesis
    tacotron-tiny; tacotron has the published sizes."""
    layers: int | None = None
    """LSTM layers."""
    cells: int | None = None
    """Cells a layer and direction."""
    bidirectional: bool | None = None
    """BLSTM (True) or LSTM (False)."""
    projection: int | None = None
    """Size of the recurrent projection (LSTMP), 0 for none."""
    bottleneck: int | None = None
    """Size of the linear layer before the softmax, 0 for none."""
    dropout: float | None = None
    """Dropout between layers and before the output; of synthesis in the pre-nets."""
    reduction: int | None = None
    """Synthesis: frames a decoder step puts out."""
    decoder: Literal["fast", "loop"] | None = None
    """Synthesis: how teacher-forced decoder steps are computed; loop is the plain way, of the same result."""
    guided_attention: float | None = None
    """Synthesis: weight of attention far from the diagonal in the loss; 0: none, as published."""

    def name(self, task: TaskName) -> PresetName:
        """Return the preset's name."""
        return self.preset or DEFAULT_PRESET[task]

    def base(self, task: TaskName) -> Preset:
        """Return the preset.  Raises ConfigError if it is a model of another task."""
        name = self.name(task)
        preset = PRESETS[name]
        if preset.task != task:
            known = ", ".join(n for n, other in PRESETS.items() if other.task == task)
            raise ConfigError(f"--preset {name}: is no model for --task {task}; choose one of {known}")
        return preset

    def check(self, task: TaskName) -> None:
        """Refuse options of another task's models, and sizes that cannot be.  Raises ConfigError."""
        for name in _SYNTHESIS if task == "acoustic" else _ACOUSTIC:
            if getattr(self, name) is not None:
                other = "synthesis" if task == "acoustic" else "acoustic"
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} goes with --task {other}, not with --task {task}; leave it out")
        if self.guided_attention is not None and not 0 <= self.guided_attention < float("inf"):
            raise ConfigError(f"--guided-attention {self.guided_attention}: must not be negative")
        if task == "acoustic":
            self.lstm()
        else:
            self.tacotron()

    def lstm(self) -> LstmConfig:
        """Return the sizes of an acoustic model: the preset's, changed by the options given."""
        config = self.base("acoustic").model
        assert isinstance(config, LstmConfig)
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(LstmConfig)}
        return dataclasses.replace(
            config, **{name: value for name, value in given.items() if value is not None}
        )

    def tacotron(self) -> TacotronConfig:
        """Return the sizes of a synthesis model: the preset's, changed by the options given."""
        config = self.base("synthesis").model
        assert isinstance(config, TacotronConfig)
        return dataclasses.replace(
            config,
            dropout=config.dropout if self.dropout is None else self.dropout,
            reduction=config.reduction if self.reduction is None else self.reduction,
            decoder=self.decoder or config.decoder,
        )

    def guide(self) -> float:
        """Return the weight of guided attention in the loss of a synthesis model."""
        return (
            self.base("synthesis").guided_attention
            if self.guided_attention is None
            else self.guided_attention
        )
