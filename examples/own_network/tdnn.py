"""An acoustic model with a network of your own: a time-delay neural network (TDNN) with factored layers.

It trains, aligns, is decoded and transcribes as the built-in one does:

    speechdp launch -np 2 -- train DATA RUN --task tdnn:Tdnn --flat-start --context both --epochs 12
    speechdp decode RUN DATA --split dev --task tdnn:Tdnn

where Python finds this file: in the folder worked in, or by PYTHONPATH.

Sources: Povey et al. 2018, "Semi-orthogonal low-rank matrix factorization for deep neural networks", whose
layers these are, with layer normalisation in place of batch normalisation and of the constraint on the
factors; Vanhoucke, Devin & Heigold 2013, "Multiframe deep neural networks for acoustic modeling".

Legend: B utterances, T frames, F feature dimensions, K frames that make one step, S = ceil(T / K) steps,
W width of a layer, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu

from speechdp.tasks.acoustic import AcousticTask


class FactoredLayer(nn.Module):
    """(B, S, W) to (B, S, W): down to a few dimensions over steps t - d and t, up again over t and t + d.

    Args:
        width: W.
        inner: dimensions between.
        distance: d, steps.
        dropout: probability, 0 to 1.
    """

    def __init__(self, width: int, inner: int, distance: int, dropout: float) -> None:
        super().__init__()
        self.distance = distance
        self.norm = nn.LayerNorm(width)
        self.down = nn.Linear(2 * width, inner, bias=False)
        self.up = nn.Linear(2 * inner, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, inside: Tensor) -> Tensor:
        """Return the outputs; `inside`, (B, S, 1), is 1 where there is speech and 0 in the padding."""
        # What padding holds must reach no frame, or an utterance would depend on the others of its batch.
        here = self.norm(hidden) * inside
        before = pad(here, (0, 0, self.distance, 0))[:, : here.shape[1]]
        factors = self.down(torch.cat([before, here], 2)) * inside
        after = pad(factors, (0, 0, 0, self.distance))[:, self.distance :]
        outputs: Tensor = hidden + self.dropout(relu(self.up(torch.cat([factors, after], 2))))
        return outputs


class TdnnNetwork(nn.Module):
    """(B, T, F) features to (B, T, C) logits.

    K frames are one step, which sees those of its neighbours too, and each step classifies its K frames: the
    layers work at a K-th of the rate, and classes, alignments and decoding stay at that of the features.
    """

    def __init__(self, feature_dim: int, num_classes: int, sizes: Tdnn) -> None:
        super().__init__()
        self.stride = sizes.stride
        self.input = nn.Linear(3 * sizes.stride * feature_dim, sizes.width)
        distances = [1, 1] + [3] * (sizes.layers - 2)
        self.layers = nn.ModuleList(
            FactoredLayer(sizes.width, sizes.inner, distance, sizes.dropout) for distance in distances
        )
        self.norm = nn.LayerNorm(sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)
        self.bottleneck = nn.Linear(sizes.width, sizes.stride * sizes.bottleneck)
        self.output = nn.Linear(sizes.bottleneck, num_classes)

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Return logits (B, T, C) for features (B, T, F) and CPU lengths (B,)."""
        logits: Tensor = self.output(self.encode(features, lengths))
        return logits

    def encode(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Return what the output layer sees, (B, T, bottleneck).

        A network with `encode` and `output` is trained faster: only frames with a target are classified.
        """
        num_frames = features.shape[1]
        frame = torch.arange(num_frames, device=features.device)
        inside = (frame < lengths.to(features.device).unsqueeze(1)).unsqueeze(2).to(features.dtype)
        spare = (0, 0, 0, -num_frames % self.stride)
        steps = pad(features * inside, spare).reshape(len(features), -1, self.stride * features.shape[2])
        inside = pad(inside, spare)[:, :: self.stride]
        before, after = pad(steps, (0, 0, 1, 0))[:, :-1], pad(steps, (0, 0, 0, 1))[:, 1:]
        hidden = self.input(torch.cat([before, steps, after], 2))
        for layer in self.layers:
            hidden = layer(hidden, inside)
        vectors = self.bottleneck(self.dropout(relu(self.norm(hidden))))
        encoded: Tensor = vectors.reshape(len(features), -1, vectors.shape[2] // self.stride)
        return encoded[:, :num_frames]


@dataclass(frozen=True)
class Tdnn(AcousticTask):
    """An acoustic model of factored TDNN layers.

    Attributes:
        width: of a layer.
        inner: dimensions of its factors.
        layers: at least 2; the last ones look three steps to each side.
        stride: frames that make one step.
        bottleneck: dimensions that a frame is classified by.
        dropout: probability, 0 to 1.
    """

    presets = ()
    model_options = ()
    batch_size = 6

    width: int = 256
    inner: int = 64
    layers: int = 8
    stride: int = 3
    bottleneck: int = 128
    dropout: float = 0.2

    def make_network(self, feature_dim: int, num_classes: int) -> nn.Module:
        return TdnnNetwork(feature_dim, num_classes, self)
