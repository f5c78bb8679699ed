"""The parts of a step of the decoder's plain loop, each by itself, with the decoder's own layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.papers.poster_model import Function, Sizes
from speechdp.models.tacotron.config import TacotronConfig
from speechdp.models.tacotron.decoder import Decoder
from speechdp.models.tacotron.prenet import Keep

#: What a part hands to itself at the next step.
State = tuple[Tensor, ...]


@dataclass(frozen=True)
class Hands:
    """What a step's parts are handed, the same at every step.

    Attributes:
        frame: (B, M), of the step before.
        keep: dropout of the pre-net; None for none.
        prenet: (B, P).
        hidden: (B, A), of the attention GRU.
        context: (B, C).
        memory, keys: (B, S, C), (B, S, A).
        symbols: (B, S) bool, true at a symbol.
        inputs: (B, D), of the residual GRUs.
    """

    frame: Tensor
    keep: Keep | None
    prenet: Tensor
    hidden: Tensor
    context: Tensor
    memory: Tensor
    keys: Tensor
    symbols: Tensor
    inputs: Tensor

    def leaves(self) -> list[Tensor]:
        return [self.prenet, self.hidden, self.context, self.memory, self.keys, self.inputs]


def hands_of(decoder: Decoder, sizes: Sizes, device: torch.device) -> Hands:
    """Return random numbers of the right sizes."""
    config, batch = decoder.config, sizes.batch

    def leaf(*shape: int) -> Tensor:
        return torch.rand(*shape, device=device, requires_grad=True)

    frame = torch.rand(batch, sizes.mel_dim, device=device)  # data: without a gradient
    return Hands(
        frame=frame,
        keep=decoder.prenet.draw(batch, like=frame),
        prenet=leaf(batch, config.prenet_dim),
        hidden=leaf(batch, config.attention_dim),
        context=leaf(batch, config.memory_dim),
        memory=leaf(batch, sizes.symbols, config.memory_dim),
        keys=leaf(batch, sizes.symbols, config.attention_dim),
        symbols=torch.ones(batch, sizes.symbols, dtype=torch.bool, device=device),
        inputs=leaf(batch, config.decoder_dim),
    )


def _prenet(decoder: Decoder, given: Hands, state: State) -> tuple[Tensor, State]:
    return decoder.prenet(given.frame, given.keep), state


def _attention_gru(decoder: Decoder, given: Hands, state: State) -> tuple[Tensor, State]:
    inputs = torch.cat([given.prenet, given.context], dim=1)
    hidden = decoder.attention_gru(inputs, state[0] if state else given.hidden)
    return hidden, (hidden,)


def _attention(decoder: Decoder, given: Hands, state: State) -> tuple[Tensor, State]:
    met = torch.tanh(given.keys + decoder.query(given.hidden).unsqueeze(1))
    energies = (met @ decoder.score[0]).masked_fill(~given.symbols, -torch.inf)
    attention = torch.softmax(energies, dim=1)
    return torch.bmm(attention.unsqueeze(1), given.memory).squeeze(1), state


def _residual_grus(decoder: Decoder, given: Hands, state: State) -> tuple[Tensor, State]:
    first = decoder.residual_1(given.inputs, state[0] if state else given.inputs)
    inputs = given.inputs + first
    second = decoder.residual_2(inputs, state[1] if state else given.inputs)
    return inputs + second, (first, second)


def _projections(decoder: Decoder, given: Hands, state: State) -> tuple[Tensor, State]:
    inputs = decoder.project(torch.cat([given.hidden, given.context], dim=1))
    stop = decoder.stop(torch.cat([inputs, given.context], dim=1))
    return torch.cat([decoder.mel(inputs), stop], dim=1), state


#: Parts of a decoder step as the plain loop computes them (models/tacotron/decoder.py: Decoder._step).
PARTS: dict[str, Callable[[Decoder, Hands, State], tuple[Tensor, State]]] = {
    "pre-net": _prenet,
    "attention GRU": _attention_gru,
    "attention": _attention,
    "residual GRUs": _residual_grus,
    "projections": _projections,
}


def make_part(name: str, config: TacotronConfig, sizes: Sizes, device: torch.device) -> Function:
    """Return a part of the plain loop by itself, a decoder step after the other."""
    torch.manual_seed(1)
    decoder = Decoder(sizes.mel_dim, config).to(device)
    nn.init.normal_(decoder.score)
    given = hands_of(decoder, sizes, device)

    def run() -> tuple[Tensor, ...]:
        state: State = ()
        outputs = []
        for _ in range(config.num_steps(sizes.frames)):
            output, state = PARTS[name](decoder, given, state)
            outputs.append(output)
        return (torch.stack(outputs),)

    return Function(run, [*decoder.parameters(), *given.leaves()])
