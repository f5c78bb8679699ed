"""A small Tacotron learns to read an artificial language aloud, and to end with the text."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from speechdp.models.tacotron.config import TacotronConfig
from speechdp.models.tacotron.model import Tacotron, TacotronOutput

NUM_SYMBOLS, MEL_DIM, LINEAR_DIM = 6, 8, 12
FRAMES_A_SYMBOL, REDUCTION = 4, 2
SIZES = TacotronConfig(
    embedding_dim=16,
    prenet_hidden=32,
    prenet_dim=32,
    width=16,
    encoder_bank=3,
    postproc_bank=2,
    postproc_projection=16,
    highways=1,
    attention_dim=32,
    decoder_dim=32,
    reduction=REDUCTION,
    dropout=0.0,
)


def speak(batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return symbols (B, S), mel (B, T, M), lengths (B,): a symbol is a fixed sound of four frames."""
    sounds = torch.rand(NUM_SYMBOLS, MEL_DIM, generator=torch.Generator().manual_seed(7))
    text_lengths = torch.randint(3, 7, (batch_size,), generator=generator)
    symbols = torch.randint(0, NUM_SYMBOLS, (batch_size, 6), generator=generator)
    symbols[torch.arange(6) >= text_lengths.unsqueeze(1)] = -1
    mel = sounds[symbols.clamp(min=0)] * (symbols >= 0).unsqueeze(2)
    return symbols, mel.repeat_interleave(FRAMES_A_SYMBOL, dim=1), text_lengths * FRAMES_A_SYMBOL


def loss_of(output: TacotronOutput, mel: Tensor, lengths: Tensor, pull: float) -> Tensor:
    """Return L1 of mel and linear frames, stop cross-entropy, and guided attention times `pull`."""
    ends = (lengths // REDUCTION).unsqueeze(1)  # (B, 1)
    step = torch.arange(output.stop_logits.shape[1])  # (N,)
    real = (step < ends).float()  # (B, N)
    stop = functional.binary_cross_entropy_with_logits(
        output.stop_logits, (step == ends - 1).float(), weight=real
    )
    place = step[:, None] / ends[:, :, None]  # (B, N, 1)
    symbol = torch.arange(output.attention.shape[2]) / (lengths / FRAMES_A_SYMBOL)[:, None, None]
    off = 1 - torch.exp(-((place - symbol) ** 2) / (2 * 0.2**2))
    guide = (output.attention * off * real.unsqueeze(2)).sum() / real.sum()
    linear = torch.cat([mel, mel[:, :, :4]], dim=2)
    return (output.mel - mel).abs().mean() + (output.linear - linear).abs().mean() + stop + pull * guide


def train(steps: int) -> Tacotron:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(3)
    model = Tacotron(NUM_SYMBOLS, MEL_DIM, LINEAR_DIM, SIZES)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    for _ in range(steps):
        symbols, mel, lengths = speak(16, generator)
        optimizer.zero_grad()
        loss_of(model(symbols, mel, lengths), mel, lengths, pull=1.0).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def test_attention_becomes_diagonal_and_free_running_ends_with_the_text() -> None:
    symbols, mel, lengths = speak(20, torch.Generator().manual_seed(4))
    said = train(steps=160).generate(symbols, max_frames=60)
    assert bool(said.stopped.all())
    num_right = int((said.lengths == lengths).sum())
    assert num_right >= 18, f"{said.lengths.tolist()} for {lengths.tolist()}"
    for row, length in enumerate(lengths.tolist()):
        centre = said.attention[row, : length // REDUCTION].argmax(dim=1)  # (N,)
        assert bool((centre.diff() >= 0).all()), centre.tolist()
        assert int(centre[0]) <= 1, centre.tolist()
        assert int(centre[-1]) >= length // FRAMES_A_SYMBOL - 2, centre.tolist()
    frames = min(said.mel.shape[1], mel.shape[1])
    error = (said.mel[:, :frames] - mel[:, :frames]).abs().mean()
    # The median of all sounds is what a decoder that cannot read would say.
    spoken = mel[mel.sum(dim=2) > 0]  # (frames, M)
    blind = (spoken - spoken.median(dim=0).values).abs().sum() / mel[:, :frames].numel()
    assert float(error) < 0.95 * float(blind), f"{float(error)} against {float(blind)}"
