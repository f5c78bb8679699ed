"""Named models, each with its usual batches."""

from __future__ import annotations

from dataclasses import dataclass

from speechdp.models.lstm_config import LstmConfig
from speechdp.models.tacotron import config as tacotron
from speechdp.models.tacotron.config import TacotronConfig


@dataclass(frozen=True)
class Preset:
    """A model and the batches it is trained on.

    Attributes:
        model: sizes of the model; None for a user's task, which has its own.
        batch_size: segments per rank and step.
        chunk_frames: frames per segment, 0 for whole utterances.
        left_context: number of frames before a chunk that are only input.
        guided_attention: weight of attention far from the diagonal in the loss of a synthesis model.
    """

    model: LstmConfig | TacotronConfig | None
    batch_size: int
    chunk_frames: int = 0
    left_context: int = 0
    guided_attention: float = 0.0


#: For small corpora and CPUs: seconds per epoch on the spoken digits.
LSTM_TINY = LstmConfig(layers=2, cells=128, bidirectional=True, dropout=0.4)
PRESETS: dict[str, Preset] = {
    "tiny": Preset(LSTM_TINY, batch_size=16),
    # Rosciszewski & Kaliski, HPCS 2017: 4 x 800 LSTM; chunk width 20, left context 40 and 100 chunks a
    # minibatch are the defaults of Kaldi's nnet3 RNN training script.
    "kaldi-4x800": Preset(
        LstmConfig(layers=4, cells=800, bidirectional=False), batch_size=100, chunk_frames=20, left_context=40
    ),
    # Zhang et al., ICASSP 2019 (arXiv 1904.04956), sizes as recalled: 43.15 M parameters at 260 inputs and
    # 32,000 classes; unrolled over 21 frames.
    "swb2000": Preset(
        LstmConfig(layers=6, cells=512, bidirectional=True, bottleneck=256), batch_size=256, chunk_frames=21
    ),
    # Spoken digits on a CPU; guided attention (Tachibana et al. 2018) finds the diagonal with little speech.
    "tacotron-tiny": Preset(tacotron.TINY, batch_size=8, guided_attention=1.0),
    "tacotron-small": Preset(tacotron.SMALL, batch_size=64, guided_attention=1.0),
    # Wang et al. 2017; 150 utterances a GPU as on the IBM/NTU poster.
    "tacotron": Preset(tacotron.PAPER, batch_size=150),
}
