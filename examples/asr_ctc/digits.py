"""Spoken digits, made up: each digit is a few frames of its own spectrum, said fast or slowly, in noise."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

NUM_FEATURES, NUM_SYMBOLS = 20, 11  # ten digits, and CTC's blank


class Recogniser(nn.Module):
    """A small Transformer over frames; logits of digits and blank.  (T, B, 20) -> (T, B, 11)"""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.into = nn.Linear(NUM_FEATURES, width)
        self.encoder = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0)
        self.out = nn.Linear(width, NUM_SYMBOLS)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.out(self.encoder(self.into(features)))
        return logits.log_softmax(-1)


def batches(number: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of 8 utterances: features (T, 8, 20), and texts of three digits (8, 3)."""
    return list(_batches(number, seed))


def _batches(number: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    spectra = torch.randn(NUM_SYMBOLS, NUM_FEATURES, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    for _ in range(number):
        texts = torch.randint(1, NUM_SYMBOLS, (8, 3), generator=random)
        tempo = int(torch.randint(2, 5, (1,), generator=random))
        # A digit, a pause, a digit, a pause, ...
        said = torch.stack([texts, torch.zeros_like(texts)], 2).flatten(1).repeat_interleave(tempo, 1)
        clean = spectra[said] * (said > 0).unsqueeze(2)
        yield (clean + 0.3 * torch.randn(clean.shape, generator=random)).transpose(0, 1), texts


def loss_sum(model: nn.Module, features: Tensor, texts: Tensor) -> Tensor:
    """Return CTC's loss, summed over utterances."""
    lengths = torch.full((len(texts),), len(features))
    return nn.functional.ctc_loss(
        model(features), texts, lengths, torch.full_like(lengths, 3), reduction="sum"
    )
