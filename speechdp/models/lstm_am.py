"""The acoustic model: stacked LSTM or BLSTM, optional bottleneck, softmax over HMM states.

Legend: B batch, T frames, F feature dimensions, H hidden (2 x cells if bidirectional), C classes,
K subsampling, S = ceil(T / K) steps of the LSTM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from speechdp.models.captured import Capturable, CapturedFunction, Recorder, rounded_up
from speechdp.models.lstm_config import LstmConfig

__all__ = ["LstmAcousticModel", "LstmConfig"]

#: Gate input at which the sigmoid is exactly 0, in float16, too.
_CLOSED = -1e4


class LstmAcousticModel(Capturable):
    """Map (B, T, F) features to (B, T, C) logits of HMM-state posteriors.

    There is one set of weights (a plain `nn.LSTM`) and three ways to compute it, all the same function.
    Segments of equal length need no special treatment; unequal ones stay padded.  On a CPU the backward
    direction runs over each reversed segment, which is about twice as fast as packing (oneDNN's fused kernel
    takes no packed input).  On a GPU both directions run at once, and an extra input, which is 1 in the
    padding, closes the input gates there: the state stays zero, as if a segment began at its own end.  With
    packed input, cuDNN launches kernels step by step, which took 7 times as long with `tiny` on an H100.

    Training on a GPU goes layer by layer; only a unidirectional LSTM without dropout between its layers runs
    all of them at once.  cuDNN would draw that dropout from a generator that no checkpoint holds.  CUDA
    graphs replay these parts on request (`by_graphs`).

    Without lengths nothing in `forward` depends on values, so `torch.jit.trace` and ONNX record it for any
    number of frames.

    With subsampling, K frames side by side are one input of the LSTM, and a linear layer (the bottleneck, if
    there is one) makes K vectors, one per frame, from each of its outputs: classes, alignments and decoding
    stay at the rate of the features, and the recurrence has a K-th of the steps.  Source: the multi-frame
    prediction of Vanhoucke, Devin & Heigold 2013, "Multiframe deep neural networks for acoustic modeling".
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
        at_once = not config.bidirectional and not (config.dropout and config.layers > 1)
        every = range(config.layers)
        self._parts = [_Part(self.lstm, every)] if at_once else [_Part(self.lstm, [n]) for n in every]
        self._initialise()

    def _initialise(self) -> None:
        """Initialise matrices by Xavier (as recalled of arXiv 1904.04956), biases by 0 (forget gates 1)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
            else:
                nn.init.zeros_(parameter)
                if ".bias_ih" in name:  # the order of gates is input, forget, cell, output
                    nn.init.ones_(parameter[self.config.cells : 2 * self.config.cells])

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return logits (B, T, C) for features (B, T, F) and CPU lengths (B,); None: no segment is padded."""
        logits: Tensor = self.output(self.encode(features, lengths))  # (B, T, C)
        return logits

    def encode(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the input of the output layer, (B, T, bottleneck or H)."""
        num_frames, k = features.shape[1], self.config.subsampling
        if k > 1:
            features = _stacked(features, lengths, k)
            lengths = None if lengths is None else (lengths + k - 1) // k
        vectors = self.bottleneck(self.dropout(self._recur(features, lengths)))  # (B, S, K x encoded)
        encoded: Tensor = vectors.reshape(vectors.shape[0], -1, vectors.shape[2] // k)[:, :num_frames]
        return encoded

    def by_graphs(self, make_recorder: Callable[[], Recorder]) -> list[CapturedFunction]:
        """Train with CUDA graphs from now on."""
        return [part.by_graphs(make_recorder()) for part in self._parts]

    def _recur(self, features: Tensor, lengths: Tensor | None) -> Tensor:
        """Return the last layer's outputs, (B, T, H)."""
        lengths = unless_even(lengths, features.shape[1])
        if features.is_cuda and torch.is_grad_enabled():
            return self._train_on_gpu(features, lengths)
        if lengths is None or not self.config.bidirectional:  # padding at the end reaches no earlier frame
            hidden: Tensor = self.lstm(features)[0]
            return hidden
        if features.is_cuda or self.config.projection:
            return self._encode_flagged(features, lengths)
        return self._encode_turned(features, lengths)

    def _train_on_gpu(self, features: Tensor, lengths: Tensor | None) -> Tensor:
        num_frames = features.shape[1]
        if lengths is not None:  # pad to one of a few lengths: graphs are captured for each
            features = nn.functional.pad(features, (0, 0, 0, rounded_up(num_frames) - num_frames))
        if lengths is None or not self.config.bidirectional:
            return self._encode_plain(features)[:, :num_frames]
        return self._encode_flagged(features, lengths)[:, :num_frames]

    def _encode_plain(self, features: Tensor) -> Tensor:
        return self._encode_in_parts(features, features.new_zeros(*features.shape[:2], 0))

    def _encode_flagged(self, features: Tensor, lengths: Tensor) -> Tensor:
        frame = torch.arange(features.shape[1], device=features.device)  # (T,)
        is_padding = (frame >= lengths.to(features.device).unsqueeze(1)).unsqueeze(2)  # (B, T, 1)
        return self._encode_in_parts(features.masked_fill(is_padding, 0), is_padding.to(features.dtype))

    def _encode_in_parts(self, hidden: Tensor, flag: Tensor) -> Tensor:
        for part in self._parts:
            hidden = part(hidden, flag)
            if part is not self._parts[-1]:
                hidden = nn.functional.dropout(hidden, self.config.dropout, self.training)
        return hidden

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


class _Part:
    """Layers that run in one call.

    Args:
        lstm: the LSTM that they belong to.
        layers: their consecutive indices.
    """

    def __init__(self, lstm: nn.LSTM, layers: Sequence[int]) -> None:
        ways = ("", "_reverse") if lstm.bidirectional else ("",)
        kinds = ["weight_ih", "weight_hh", "bias_ih", "bias_hh", *["weight_hr"] * bool(lstm.proj_size)]
        self._lstm = lstm
        self._names = [f"{kind}_l{layer}{way}" for layer in layers for way in ways for kind in kinds]
        shape = _Shape(len(layers), lstm.num_layers, lstm.bidirectional, lstm.proj_size)
        self._function = partial(_run_layers, shape)
        self._captured: CapturedFunction | None = None

    def by_graphs(self, recorder: Recorder) -> CapturedFunction:
        """Run them with graphs where captured; return the function to capture."""
        self._captured = CapturedFunction(self._function, recorder)
        return self._captured

    def __call__(self, inputs: Tensor, flag: Tensor) -> Tensor:
        """Return the outputs (B, T, H) over `inputs` (B, T, I).

        `flag` is 1 in the padding, (B, T, 1), or empty without padding, (B, T, 0).
        """
        tensors = [inputs, flag.to(inputs.dtype)]
        weights = [getattr(self._lstm, name) for name in self._names]
        outputs = self._captured(tensors, weights) if self._captured else self._function(*tensors, *weights)
        return outputs[0]


@dataclass(frozen=True)
class _Shape:
    """Layers that run in one call: their number, that of the whole LSTM, and the LSTM's `proj_size`."""

    num_layers: int
    of_layers: int
    bidirectional: bool
    projection: int


def _run_layers(shape: _Shape, inputs: Tensor, flag: Tensor, *weights: Tensor) -> tuple[Tensor]:
    """Run layers over inputs (B, T, I) from zero states; only one layer if `flag` is (B, T, 1)."""
    layers, cells = list(weights), weights[1].shape[0] // 4
    num_rows = shape.num_layers * (2 if shape.bidirectional else 1)
    if flag.shape[2]:
        # A GPU is fastest with matrices whose width is a multiple of 8.
        num_flags = 8 - inputs.shape[2] % 8
        inputs = torch.cat([inputs, nn.functional.pad(flag, (0, num_flags - 1))], dim=2)
        for number in range(0, len(layers), len(layers) // num_rows):
            closing = layers[number].new_zeros(len(layers[number]), num_flags)
            closing[:cells, 0] = _CLOSED  # the input gate's rows are the first
            layers[number] = torch.cat([layers[number], closing], dim=1)
    if flag.shape[2] or shape.num_layers < shape.of_layers:
        layers = _in_one_piece(layers)
    state = inputs.new_zeros(num_rows, len(inputs), shape.projection or cells)
    cell_state = inputs.new_zeros(num_rows, len(inputs), cells)
    # has_biases, num_layers, dropout, train, bidirectional, batch_first
    how = True, shape.num_layers, 0.0, torch.is_grad_enabled(), shape.bidirectional, True
    return (torch.lstm(inputs, (state, cell_state), layers, *how)[0],)


def _in_one_piece(weights: list[Tensor]) -> list[Tensor]:
    """Return copies in cuDNN's layout, matrices, then biases; otherwise cuDNN copies them one by one."""
    order = sorted(range(len(weights)), key=lambda number: weights[number].dim() == 1)
    flat = torch.cat([weights[number].flatten() for number in order])
    parts = torch.split(flat, [weights[number].numel() for number in order])
    found = dict(zip(order, parts, strict=True))
    return [found[number].view_as(weight) for number, weight in enumerate(weights)]


def unless_even(lengths: Tensor | None, num_frames: int) -> Tensor | None:
    """Return the lengths (B,) of segments in `num_frames` frames each; None if none is padded."""
    return None if lengths is None or bool((lengths == num_frames).all()) else lengths


def _stacked(features: Tensor, lengths: Tensor | None, k: int) -> Tensor:
    """Return (B, S, K x F): K frames side by side, padded with copies of a segment's last frame."""
    num_segments, num_frames, dim = features.shape
    last = torch.full((num_segments,), num_frames - 1) if lengths is None else lengths - 1
    frame = torch.arange((num_frames + k - 1) // k * k)  # (S x K,); ONNX rounds quotients towards 0
    frame = torch.minimum(frame, last.unsqueeze(1)).to(features.device)  # (B, S x K)
    whole = features.gather(1, frame.unsqueeze(2).expand(-1, -1, dim))
    return whole.reshape(num_segments, -1, k * dim)


def _turned_indices(lengths: Tensor, num_frames: int) -> Tensor:
    """Return (T, B) indices that reverse each segment and leave its padding in place."""
    frame = torch.arange(num_frames).unsqueeze(1)  # (T, 1)
    return torch.where(frame < lengths, lengths - 1 - frame, frame)
