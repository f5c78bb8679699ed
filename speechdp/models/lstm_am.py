"""The acoustic model: stacked LSTM or BLSTM, optional bottleneck, softmax over HMM states.

Legend: B batch, T frames, F feature dimensions, H hidden (2 x cells if bidirectional), C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from speechdp.models.lstm_config import LstmConfig

__all__ = ["LstmAcousticModel", "LstmConfig"]


class LstmAcousticModel(nn.Module):
    """(B, T, F) features to (B, T, C) logits of HMM-state posteriors.

    One set of weights (a plain `nn.LSTM`), three ways through it, all the same function: segments of one
    length need no care; on a GPU unequal ones are packed, as cuDNN wants them; on a CPU they stay padded
    and the backward direction runs over each segment turned round, which is about twice as fast as
    packing there (oneDNN's fused kernel takes no packed input).
    """

    def __init__(self, feature_dim: int, num_classes: int, config: LstmConfig) -> None:
        super().__init__()
        self.config = config
        self.lstm = nn.LSTM(
            feature_dim,
            config.cells,
            config.layers,
            batch_first=True,
            bidirectional=config.bidirectional,
            dropout=config.dropout if config.layers > 1 else 0.0,
            proj_size=config.projection,
        )
        hidden = (config.projection or config.cells) * (2 if config.bidirectional else 1)
        self.dropout = nn.Dropout(config.dropout)
        self.bottleneck = nn.Linear(hidden, config.bottleneck) if config.bottleneck else nn.Identity()
        self.output = nn.Linear(config.bottleneck or hidden, num_classes)
        self._initialise()

    def _initialise(self) -> None:
        """Xavier for matrices (as recalled of arXiv 1904.04956), zero biases but 1 for the forget gates."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
            else:
                nn.init.zeros_(parameter)
                if ".bias_ih" in name:  # gates stand in the order input, forget, cell, output
                    nn.init.ones_(parameter[self.config.cells : 2 * self.config.cells])

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Return logits (B, T, C) for features (B, T, F) and CPU lengths (B,)."""
        logits: Tensor = self.output(self.encode(features, lengths))  # (B, T, C)
        return logits

    def encode(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Return what the output layer sees, (B, T, bottleneck or H)."""
        if not self.config.bidirectional or bool((lengths == features.shape[1]).all()):
            hidden, _ = self.lstm(features)  # (B, T, H); padding at the end reaches no earlier frame
        elif features.is_cuda or self.config.projection:
            hidden = self._encode_packed(features, lengths)
        else:
            hidden = self._encode_padded(features, lengths)
        encoded: Tensor = self.bottleneck(self.dropout(hidden))
        return encoded

    def _encode_packed(self, features: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(features, lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = self.lstm(packed)
        padded: Tensor = pad_packed_sequence(hidden, batch_first=True, total_length=features.shape[1])[0]
        return padded

    def _encode_padded(self, features: Tensor, lengths: Tensor) -> Tensor:
        hidden = features.transpose(0, 1)  # (T, B, F)
        turn = _turned_indices(lengths, features.shape[1])  # (T, B)
        batch = torch.arange(features.shape[0])
        for layer in range(self.config.layers):
            forward = self._one_direction(hidden, f"l{layer}")
            backward = self._one_direction(hidden[turn, batch], f"l{layer}_reverse")[turn, batch]
            hidden = torch.cat([forward, backward], dim=2)  # (T, B, H)
            if layer < self.config.layers - 1:
                hidden = nn.functional.dropout(hidden, self.config.dropout, self.training)
        return hidden.transpose(0, 1)

    def _one_direction(self, inputs: Tensor, suffix: str) -> Tensor:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        weights = [getattr(self.lstm, f"{name}_{suffix}") for name in names]
        zeros = inputs.new_zeros(1, inputs.shape[1], self.config.cells)
        # has_biases, num_layers, dropout, train, bidirectional, batch_first
        outputs: Tensor = torch.lstm(
            inputs, (zeros, zeros), weights, True, 1, 0.0, self.training, False, False
        )[0]
        return outputs


def _turned_indices(lengths: Tensor, num_frames: int) -> Tensor:
    """Return (T, B) indices that turn each segment round and leave its padding where it is."""
    frame = torch.arange(num_frames).unsqueeze(1)  # (T, 1)
    return torch.where(frame < lengths, lengths - 1 - frame, frame)
