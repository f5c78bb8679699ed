"""Tacotron (Wang et al. 2017, arXiv 1703.10135): symbols to mel frames to linear spectrogram frames.

Legend: B batch, S symbols, T frames, N decoder steps, r frames per step, M mel bins, L linear bins,
W config.width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speechdp.models.tacotron.cbhg import Highway
from speechdp.models.tacotron.config import TacotronConfig
from speechdp.models.tacotron.decoder import Decoder, DecoderOutput
from speechdp.models.tacotron.encoder import Encoder
from speechdp.models.tacotron.postproc import Postproc


@dataclass(frozen=True)
class TacotronOutput:
    """The model's output for a batch with teacher forcing.

    Attributes:
        mel: (B, T, M), zero past each utterance's end.
        linear: (B, T, L), zero past each utterance's end.
        stop_logits: (B, N), for "the last frame is among those generated so far".
        attention: (B, N, S), rows sum to 1 over an utterance's own symbols.
    """

    mel: Tensor
    linear: Tensor
    stop_logits: Tensor
    attention: Tensor


@dataclass(frozen=True)
class Generated:
    """The model's output when it runs freely; T is the length of the longest utterance.

    Attributes:
        mel: (B, T, M), zero past each utterance's end.
        linear: (B, T, L), zero past each utterance's end.
        attention: (B, N, S), zero past each utterance's end.
        lengths: (B,) int64 on the CPU, frames of each utterance.
        stopped: (B,) bool on the CPU; false if max_frames, not the stop prediction, ended it.
    """

    mel: Tensor
    linear: Tensor
    attention: Tensor
    lengths: Tensor
    stopped: Tensor


class Tacotron(nn.Module):
    """Encoder, attention decoder and post-processing net; the profile times the three separately."""

    def __init__(self, num_symbols: int, mel_dim: int, linear_dim: int, config: TacotronConfig) -> None:
        super().__init__()
        self.num_symbols = num_symbols
        self.mel_dim = mel_dim
        self.linear_dim = linear_dim
        self.config = config
        self.encoder = Encoder(num_symbols, config)
        self.decoder = Decoder(mel_dim, config)
        self.postproc = Postproc(mel_dim, linear_dim, config)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Use Xavier for matrices, orthogonal for what a GRU feeds back, zero biases, embeddings of 0.3."""
        if self.encoder.embedding.weight.is_meta:
            return  # Nothing to fill, and torch 2.11 would import its compiler for it, which takes a second.
        for name, parameter in self.named_parameters():
            if "weight_hh" in name or "weight_ih" in name:
                fill = nn.init.orthogonal_ if "weight_hh" in name else nn.init.xavier_uniform_
                for gate in parameter.chunk(3):
                    fill(gate)
            elif name == "encoder.embedding.weight":
                nn.init.normal_(parameter, std=0.3)
            elif parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
            elif "bias" in name:
                nn.init.zeros_(parameter)
        for module in self.modules():
            if isinstance(module, Highway):
                module.reset_gate()

    def encode(self, symbols: Tensor) -> Tensor:
        """Return the memory (B, S, 2W) of symbols (B, S) int64, -1 past each end; the memory is zero there.

        Every text has at least one symbol.
        """
        memory: Tensor = self.encoder(symbols)
        return memory

    def decode(self, memory: Tensor, symbols: Tensor, mel: Tensor, lengths: Tensor) -> DecoderOutput:
        """Return the decoder's output, teacher-forced with mel (B, T, M) of CPU lengths (B,)."""
        output: DecoderOutput = self.decoder(memory, symbols, mel, lengths)
        return output

    def forward(self, symbols: Tensor, mel: Tensor, lengths: Tensor) -> TacotronOutput:
        """Return the output for symbols (B, S), teacher-forced with mel (B, T, M) of CPU lengths (B,)."""
        decoded = self.decode(self.encode(symbols), symbols, mel, lengths)
        linear = self.postproc(decoded.mel, lengths)
        return TacotronOutput(decoded.mel, linear, decoded.stop_logits, decoded.attention)

    @torch.no_grad()
    def generate(self, symbols: Tensor, *, max_frames: int, dropout: bool = False) -> Generated:
        """Speak symbols (B, S) int64, -1 past each end; each text stops when the stop prediction exceeds 0.5.

        In eval mode the same symbols give the same speech, whatever else is in the batch. `dropout` keeps
        the dropout of the decoder's pre-net on (as in Shen et al. 2018, section 2.2), for variation: off by
        default.
        """
        free = self.decoder.run_freely(self.encode(symbols), symbols, max_frames, dropout=dropout)
        linear = self.postproc(free.mel, free.lengths)
        return Generated(free.mel, linear, free.attention, free.lengths, free.stopped)
