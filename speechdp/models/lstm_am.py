"""The acoustic model: stacked LSTM or BLSTM, optional bottleneck, softmax over HMM states.

Legend: B batch, T frames, F feature dimensions, H hidden (2 x cells if bidirectional), C classes,
K subsampling, S = ceil(T / K) steps of the LSTM.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from speechdp.models.lstm_config import LstmConfig

__all__ = ["LstmAcousticModel", "LstmConfig"]

#: Input of a gate whose sigmoid is exactly 0, in float16, too.
_CLOSED = -1e4


class LstmAcousticModel(nn.Module):
    """(B, T, F) features to (B, T, C) logits of HMM-state posteriors.

    One set of weights (a plain `nn.LSTM`), three ways through it, all the same function: segments of one
    length need no care; unequal ones stay padded.  On a CPU the backward direction runs over each segment
    turned round, which is about twice as fast as packing there (oneDNN's fused kernel takes no packed
    input).  On a GPU both directions run at once, and a further input that is 1 in the padding closes the
    input gates there: the state stays zero, as if a segment began at its own end.  Packed, cuDNN starts
    kernels step by step, which has taken 7 times as long with `tiny` on an H100.

    With subsampling, K frames side by side are one input of the LSTM, and from each of its outputs a
    linear layer (the bottleneck, if there is one) makes K vectors, one a frame: classes, alignments and
    decoding stay at the rate of the features, and the recurrence has a K-th of the steps.  Source: the
    multi-frame prediction of Vanhoucke, Devin & Heigold 2013, "Multiframe deep neural networks for acoustic
    modeling".
    """

    def __init__(self, feature_dim: int, num_classes: int, config: LstmConfig) -> None:
        super().__init__()
        self.config = config
        self.lstm = nn.LSTM(
            feature_dim * config.subsampling,
            config.cells,
            config.layers,
            batch_first=True,
            bidirectional=config.bidirectional,
            dropout=config.dropout if config.layers > 1 else 0.0,
            proj_size=config.projection,
        )
        hidden = (config.projection or config.cells) * (2 if config.bidirectional else 1)
        self.dropout = nn.Dropout(config.dropout)
        encoded = config.bottleneck or hidden
        has_linear = bool(config.bottleneck) or config.subsampling > 1
        self.bottleneck = nn.Linear(hidden, config.subsampling * encoded) if has_linear else nn.Identity()
        self.output = nn.Linear(encoded, num_classes)
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
        num_frames, k = features.shape[1], self.config.subsampling
        if k > 1:
            features, lengths = _stacked(features, lengths, k), (lengths + k - 1) // k
        vectors = self.bottleneck(self.dropout(self._recur(features, lengths)))  # (B, S, K x encoded)
        encoded: Tensor = vectors.reshape(len(vectors), -1, vectors.shape[2] // k)[:, :num_frames]
        return encoded

    def _recur(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Return the last layer's outputs, (B, T, H)."""
        if not self.config.bidirectional or bool((lengths == features.shape[1]).all()):
            hidden: Tensor = self.lstm(features)[0]  # padding at the end reaches no earlier frame
            return hidden
        if features.is_cuda or self.config.projection:
            return self._encode_flagged(features, lengths)
        return self._encode_turned(features, lengths)

    def _encode_flagged(self, features: Tensor, lengths: Tensor) -> Tensor:
        frame = torch.arange(features.shape[1], device=features.device)  # (T,)
        is_padding = (frame >= lengths.to(features.device).unsqueeze(1)).unsqueeze(2)  # (B, T, 1)
        flag, hidden = is_padding.to(features.dtype), features.masked_fill(is_padding, 0)
        for layer in range(self.config.layers):
            # Matrices whose width is a multiple of 8 are what a GPU is fastest with.
            num_flags = 8 - hidden.shape[2] % 8
            flags = nn.functional.pad(flag, (0, num_flags - 1))  # (B, T, flags): all but the first are 0
            hidden = self._both_directions(torch.cat([hidden, flags], dim=2), layer, num_flags)
            if layer < self.config.layers - 1:
                hidden = nn.functional.dropout(hidden, self.config.dropout, self.training)
        return hidden

    def _both_directions(self, inputs: Tensor, layer: int, num_flags: int) -> Tensor:
        """Run one layer over inputs whose last `num_flags` columns say where padding is, (B, T, H)."""
        config = self.config
        names = ["weight_ih", "weight_hh", "bias_ih", "bias_hh", *["weight_hr"] * bool(config.projection)]
        suffixes = (f"l{layer}", f"l{layer}_reverse")
        weights = [getattr(self.lstm, f"{name}_{suffix}") for suffix in suffixes for name in names]
        for number in (0, len(names)):
            flag_weight = weights[number].new_zeros(len(weights[number]), num_flags)
            flag_weight[: config.cells, 0] = _CLOSED  # the input gate's rows are the first
            weights[number] = torch.cat([weights[number], flag_weight], dim=1)
        weights = _in_one_piece(weights)
        outputs = inputs.new_zeros(2, len(inputs), config.projection or config.cells)
        cells = inputs.new_zeros(2, len(inputs), config.cells)
        # has_biases, num_layers, dropout, train, bidirectional, batch_first
        return torch.lstm(inputs, (outputs, cells), weights, True, 1, 0.0, self.training, True, True)[0]

    def _encode_turned(self, features: Tensor, lengths: Tensor) -> Tensor:
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


def _in_one_piece(weights: list[Tensor]) -> list[Tensor]:
    """Return copies that lie where cuDNN wants them, which else copies one by one: matrices, then biases."""
    order = sorted(range(len(weights)), key=lambda number: weights[number].dim() == 1)
    flat = torch.cat([weights[number].flatten() for number in order])
    parts = torch.split(flat, [weights[number].numel() for number in order])
    found = dict(zip(order, parts, strict=True))
    return [found[number].view_as(weight) for number, weight in enumerate(weights)]


def _stacked(features: Tensor, lengths: Tensor, k: int) -> Tensor:
    """Return (B, S, K x F): K frames side by side, a segment's last one again where there are too few."""
    num_segments, num_frames, dim = features.shape
    frame = torch.arange(-(-num_frames // k) * k)  # (S x K,)
    frame = torch.minimum(frame, (lengths - 1).unsqueeze(1)).to(features.device)  # (B, S x K)
    whole = features.gather(1, frame.unsqueeze(2).expand(-1, -1, dim))
    return whole.reshape(num_segments, -1, k * dim)


def _turned_indices(lengths: Tensor, num_frames: int) -> Tensor:
    """Return (T, B) indices that turn each segment round and leave its padding where it is."""
    frame = torch.arange(num_frames).unsqueeze(1)  # (T, 1)
    return torch.where(frame < lengths, lengths - 1 - frame, frame)
