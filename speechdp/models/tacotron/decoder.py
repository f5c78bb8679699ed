"""The attention decoder: memory to mel frames, r frames per step.

Legend: B batch, S symbols, C memory values per symbol, T frames, N decoder steps, r frames per step,
M mel bins, A config.attention_dim, D config.decoder_dim, P config.prenet_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speechdp.errors import ConfigError
from speechdp.models.captured import Capturable, CapturedFunction, Recorder
from speechdp.models.precision import at_least_float32
from speechdp.models.tacotron.attention_rnn import attention_rnn, attention_rnn_by_graphs, attention_steps
from speechdp.models.tacotron.attention_steps import AttentionWeights
from speechdp.models.tacotron.config import TacotronConfig
from speechdp.models.tacotron.padding import frame_mask
from speechdp.models.tacotron.prenet import Keep, Prenet
from speechdp.models.tacotron.recurrent import gru_sequence


@dataclass(frozen=True)
class DecoderOutput:
    """The decoder's output with teacher forcing.

    Attributes:
        mel: (B, T, M), zero past each utterance's end.
        stop_logits: (B, N), for "the last frame is among those generated so far".
        attention: (B, N, S), rows sum to 1 over an utterance's own symbols.
    """

    mel: Tensor
    stop_logits: Tensor
    attention: Tensor


@dataclass(frozen=True)
class FreeRun:
    """The decoder's output when it is fed its own frames; the attributes are as in `model.Generated`."""

    mel: Tensor
    attention: Tensor
    lengths: Tensor
    stopped: Tensor


@dataclass(frozen=True)
class _Text:
    """The text a step attends to: memory (B, S, C), keys (B, S, A), mask (B, S) bool, true at a symbol."""

    memory: Tensor
    keys: Tensor
    mask: Tensor


@dataclass(frozen=True)
class _State:
    """The state passed between steps: hidden (B, A), context (B, C), two residual (B, D)."""

    hidden: Tensor
    context: Tensor
    residual: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class _Steps:
    """Outputs of one or all steps: mel (..., B, rM), stop logits (..., B), attention (..., B, S)."""

    mel: Tensor
    stop: Tensor
    attention: Tensor


class Decoder(Capturable):
    """Pre-net, attention GRU, two residual GRUs, mel and stop layers (Wang et al. 2017, section 3.3).

    A step reads the last frame of the previous step (zeros at first). With teacher forcing, all those frames
    are known beforehand, and only the attention GRU with its context must run step by step. config.decoder
    selects whether this is used ("fast"), or every layer runs step by step as in public code ("loop"). Both
    draw the same dropout and give the same numbers with the same parameters.
    """

    def __init__(self, mel_dim: int, config: TacotronConfig) -> None:
        super().__init__()
        self.config = config
        self.mel_dim = mel_dim
        attention, decoder, memory = config.attention_dim, config.decoder_dim, config.memory_dim
        self.prenet = Prenet(mel_dim, config.prenet_hidden, config.prenet_dim, config.dropout)
        self.attention_gru = nn.GRUCell(config.prenet_dim + memory, attention)
        self.key = nn.Linear(memory, attention)
        self.query = nn.Linear(attention, attention, bias=False)
        self.score = nn.Parameter(torch.empty(1, attention))
        nn.init.xavier_uniform_(self.score)
        self.project = nn.Linear(attention + memory, decoder)
        self.residual_1 = nn.GRUCell(decoder, decoder)
        self.residual_2 = nn.GRUCell(decoder, decoder)
        self.mel = nn.Linear(decoder, config.reduction * mel_dim)
        self.stop = nn.Linear(decoder + memory, 1)
        self._captured: CapturedFunction | None = None

    def by_graphs(self, make_recorder: Callable[[], Recorder]) -> list[CapturedFunction]:
        """Run the attention's steps with graphs when the decoder is teacher-forced."""
        self._captured = CapturedFunction(attention_steps, make_recorder())
        return [self._captured]

    def forward(self, memory: Tensor, symbols: Tensor, mel: Tensor, lengths: Tensor) -> DecoderOutput:
        """Decode memory (B, S, C) of symbols (B, S), teacher-forced with mel (B, T, M), CPU lengths (B,)."""
        num_frames = mel.shape[1]
        previous = self._previous_frames(mel)  # (N, B, M)
        keep = self.prenet.draw(*previous.shape[:2], like=previous) if self.training else None
        text = self._text(memory, symbols)
        run = self._run_fast if self.config.decoder == "fast" else self._run_loop
        steps = run(previous, keep, text)
        mask = frame_mask(lengths, num_frames, mel.device).unsqueeze(2)
        return DecoderOutput(
            mel=self._unfold(steps.mel)[:, :num_frames] * mask,
            stop_logits=steps.stop.transpose(0, 1),
            attention=steps.attention.transpose(0, 1),
        )

    @torch.no_grad()
    def run_freely(
        self, memory: Tensor, symbols: Tensor, max_frames: int, *, dropout: bool = False
    ) -> FreeRun:
        """Decode until the stop prediction exceeds 0.5 for each utterance, or max_frames are generated."""
        if max_frames < 1:
            raise ConfigError(f"max_frames {max_frames}: must be at least 1")
        text = self._text(memory, symbols)
        batch_size = memory.shape[0]
        state = self._first_state(memory)
        frame = memory.new_zeros(batch_size, self.mel_dim)
        stopped = torch.zeros(batch_size, dtype=torch.bool, device=memory.device)
        num_steps = torch.zeros(batch_size, dtype=torch.int64, device=memory.device)
        made: list[_Steps] = []
        for _ in range(self.config.num_steps(max_frames)):
            keep = self.prenet.draw(batch_size, like=frame) if dropout else None
            step, state = self._step(self.prenet(frame, keep), text, state)
            made.append(step)
            num_steps = num_steps + (~stopped).long()
            stopped = stopped | (step.stop > 0)
            if bool(stopped.all()):
                break
            frame = step.mel[:, -self.mel_dim :]
        lengths = (num_steps * self.config.reduction).clamp(max=max_frames)
        num_frames = min(max_frames, len(made) * self.config.reduction)
        frames = frame_mask(lengths, num_frames, memory.device).unsqueeze(2)
        steps = frame_mask(num_steps, len(made), memory.device).unsqueeze(2)
        return FreeRun(
            mel=self._unfold(torch.stack([step.mel for step in made]))[:, :num_frames] * frames,
            attention=torch.stack([step.attention for step in made], dim=1) * steps,
            lengths=lengths.cpu(),
            stopped=stopped.cpu(),
        )

    def _previous_frames(self, mel: Tensor) -> Tensor:
        """Return (N, B, M): zeros, then the last frame of every group of r but the last group."""
        reduction = self.config.reduction
        last = (self.config.num_steps(mel.shape[1]) - 1) * reduction
        previous = mel[:, reduction - 1 : last : reduction].transpose(0, 1)  # (N - 1, B, M)
        return torch.cat([mel.new_zeros(1, mel.shape[0], mel.shape[2]), previous])

    def _unfold(self, mel: Tensor) -> Tensor:
        """Return (B, N r, M) for (N, B, rM)."""
        num_steps, batch_size, _ = mel.shape
        groups = mel.view(num_steps, batch_size, self.config.reduction, self.mel_dim)
        return groups.transpose(0, 1).reshape(batch_size, -1, self.mel_dim)

    def _text(self, memory: Tensor, symbols: Tensor) -> _Text:
        return _Text(memory, self.key(memory), symbols >= 0)

    def _first_state(self, memory: Tensor) -> _State:
        batch_size = memory.shape[0]
        zeros = memory.new_zeros(batch_size, self.config.decoder_dim)
        return _State(
            hidden=memory.new_zeros(batch_size, self.config.attention_dim),
            context=memory.new_zeros(batch_size, memory.shape[2]),
            residual=(zeros, zeros),
        )

    def _run_loop(self, previous: Tensor, keep: Keep | None, text: _Text) -> _Steps:
        state = self._first_state(text.memory)
        made: list[_Steps] = []
        for index, frame in enumerate(previous):
            prenet = self.prenet(frame, (keep[0][index], keep[1][index]) if keep else None)
            step, state = self._step(prenet, text, state)
            made.append(step)
        return _Steps(
            mel=torch.stack([step.mel for step in made]),
            stop=torch.stack([step.stop for step in made]),
            attention=torch.stack([step.attention for step in made]),
        )

    def _step(self, prenet: Tensor, text: _Text, state: _State) -> tuple[_Steps, _State]:
        """Generate r frames from prenet (B, P): one step of every layer."""
        inputs = torch.cat([prenet.to(state.context.dtype), state.context], dim=1)
        hidden = self.attention_gru(inputs, state.hidden)
        met = torch.tanh(text.keys + self.query(hidden).unsqueeze(1))  # (B, S, A)
        energies = (met @ self.score[0]).masked_fill(~text.mask, -torch.inf)  # (B, S)
        attention = torch.softmax(at_least_float32(energies), dim=1)
        context = torch.bmm(attention.unsqueeze(1), text.memory).squeeze(1)  # (B, C)
        inputs = self.project(torch.cat([hidden, context], dim=1))  # (B, D)
        first = self.residual_1(inputs, state.residual[0])
        inputs = inputs + first
        second = self.residual_2(inputs, state.residual[1])
        steps = self._make(inputs + second, context, attention)
        return steps, _State(hidden, context, (first, second))

    def _run_fast(self, previous: Tensor, keep: Keep | None, text: _Text) -> _Steps:
        gru = self.attention_gru
        weights = AttentionWeights(
            weight_ih=gru.weight_ih,
            weight_hh=gru.weight_hh,
            bias_ih=gru.bias_ih,
            bias_hh=gru.bias_hh,
            query=self.query.weight,
            v=self.score[0],
        )
        inputs = self.prenet(previous, keep), text.memory, text.keys, text.mask, weights
        if self._captured is not None and torch.is_grad_enabled():
            hidden, context, attention = attention_rnn_by_graphs(self._captured, *inputs)
        else:
            hidden, context, attention = attention_rnn(*inputs)
        made = self.project(torch.cat([hidden, context], dim=2))  # (N, B, D)
        for cell in (self.residual_1, self.residual_2):
            made = made + gru_sequence(made, cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)
        return self._make(made, context, attention)

    def _make(self, hidden: Tensor, context: Tensor, attention: Tensor) -> _Steps:
        """Compute frames and stop logits from hidden (..., B, D) and context (..., B, C)."""
        stop = self.stop(torch.cat([hidden, context], dim=-1)).squeeze(-1)
        return _Steps(self.mel(hidden), stop, attention)
