"""Sizes of a Tacotron, and how its decoder is computed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from speechdp.errors import ConfigError

DecoderKind = Literal["fast", "loop"]


@dataclass(frozen=True)
class TacotronConfig:
    """Sizes of a Tacotron; the defaults are the paper's (PAPER below).

    A plain dictionary of numbers and strings (`dataclasses.asdict`) restores it, and is stored in the header
    of a model file.

    Attributes:
        embedding_dim: size of a symbol's embedding.
        prenet_hidden: size of the first layer of both pre-nets.
        prenet_dim: size of the second layer of both pre-nets, and input channels of the encoder's CBHG.
        width: channels of each convolution of a bank and of the highway layers, and cells per direction of
            the bidirectional GRU, in both CBHG modules: the memory has 2 x width values per symbol.
        encoder_bank: number of convolutions in the encoder's bank, of kernel widths 1, 2, ...
        postproc_bank: likewise in the post-processing net.
        postproc_projection: channels between the two projections of the post-processing net.
        highways: number of highway layers of a CBHG.
        attention_dim: cells of the attention GRU, and size of queries and keys.
        decoder_dim: cells of each of the two residual GRUs.
        reduction: number of frames per decoder step (r).
        dropout: dropout of both pre-nets, 0 to 1.
        decoder: "fast" or "loop", two computations of the same function (see decoder.py).
    """

    embedding_dim: int = 256
    prenet_hidden: int = 256
    prenet_dim: int = 128
    width: int = 128
    encoder_bank: int = 16
    postproc_bank: int = 8
    postproc_projection: int = 256
    highways: int = 4
    attention_dim: int = 256
    decoder_dim: int = 256
    reduction: int = 2
    dropout: float = 0.5
    decoder: DecoderKind = "fast"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and value < 1:
                raise ConfigError(f"--{field.name.replace('_', '-')} {value}: must be at least 1")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"--dropout {self.dropout}: must be at least 0 and less than 1")
        if self.decoder not in ("fast", "loop"):
            raise ConfigError(f"--decoder {self.decoder}: give fast or loop")

    @property
    def memory_dim(self) -> int:
        """Number of values per symbol in the encoder's output."""
        return 2 * self.width

    def num_steps(self, num_frames: int) -> int:
        """Return the number of decoder steps for this many frames."""
        return -(-num_frames // self.reduction)


PAPER = TacotronConfig()
"""Wang et al. 2017 (arXiv 1703.10135), table 1, and its reduction of 2. Public code trains with 5, which
learns to attend earlier and costs less (`--reduction 5`). Batch size 150 per rank as on the IBM poster (the
paper: 32); 7 M parameters at 80 mel and 1025 linear values."""

SMALL = TacotronConfig(
    embedding_dim=128,
    prenet_hidden=128,
    prenet_dim=64,
    width=64,
    encoder_bank=8,
    postproc_bank=6,
    postproc_projection=128,
    highways=2,
    attention_dim=128,
    decoder_dim=128,
    reduction=3,
)
"""Half of every width, for one GPU or many cores. Suggested batch size 64 per rank."""

TINY = TacotronConfig(
    embedding_dim=64,
    prenet_hidden=96,
    prenet_dim=48,
    width=48,
    encoder_bank=6,
    postproc_bank=4,
    postproc_projection=96,
    highways=2,
    attention_dim=64,
    decoder_dim=64,
    reduction=2,
)
"""For CPUs and short utterances of few words. Suggested batch size 8 per rank."""
