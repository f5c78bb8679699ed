"""The poster's functions (encoder, decoder, postproc) one by one, on random inputs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speechdp.models.presets import PRESETS
from speechdp.models.tacotron.config import DecoderKind, TacotronConfig
from speechdp.models.tacotron.model import Tacotron

#: What is timed: the functions of the poster, the decoder as the plain loop and as it is used.
FUNCTIONS = ("encoder", "decoder loop", "decoder fast", "postproc")
#: The same calls on tensors of a few elements, so that hardly anything but the calls is left: what the host
#: of a GPU does, where a call only launches its kernel.
LAUNCHES = "decoder loop, launches only"


@dataclass(frozen=True)
class Sizes:
    """The batch of one replica.

    Attributes:
        batch: utterances.
        symbols: of each utterance.
        frames: of each utterance.
        mel_dim, linear_dim: of a frame.
        num_symbols: different ones.
    """

    batch: int
    symbols: int
    frames: int
    mel_dim: int = 80
    linear_dim: int = 513
    num_symbols: int = 40


#: A few words at 16 kHz, 1.5 s: as long as those of `prepare --synthetic` are on the average.
WORDS = Sizes(batch=8, symbols=16, frames=120)
#: Sentences at 24 kHz.
SENTENCES = Sizes(batch=150, symbols=90, frames=400, linear_dim=1025)
ONE = Sizes(batch=1, symbols=2, frames=120, mel_dim=1, linear_dim=1, num_symbols=2)

CONFIGS = {name: preset.model for name, preset in PRESETS.items() if isinstance(preset.model, TacotronConfig)}


@dataclass(frozen=True)
class Inputs:
    """What a model is trained on in one step: as a Batch, but random and without padding.

    Attributes:
        symbols: (B, S) int64.
        mel: (B, T, M) float32.
        linear: (B, T, L) float32.
        lengths: (B,) int64, on the CPU.
    """

    symbols: Tensor
    mel: Tensor
    linear: Tensor
    lengths: Tensor


def make_inputs(sizes: Sizes, device: torch.device, *, seed: int = 1) -> Inputs:
    """Return a random batch of these sizes."""
    random = torch.Generator().manual_seed(seed)
    shape = (sizes.batch, sizes.frames)
    return Inputs(
        torch.randint(sizes.num_symbols, (sizes.batch, sizes.symbols), generator=random).to(device),
        torch.rand(*shape, sizes.mel_dim, generator=random).to(device),
        torch.rand(*shape, sizes.linear_dim, generator=random).to(device),
        torch.full((sizes.batch,), sizes.frames, dtype=torch.int64),
    )


def sizes_of(preset: str) -> Sizes:
    """Return the batch of a replica: as many utterances as the preset has."""
    sizes = SENTENCES if preset == "tacotron" else WORDS
    return dataclasses.replace(sizes, batch=PRESETS[preset].batch_size)


def config_of(preset: str, decoder: DecoderKind = "fast") -> TacotronConfig:
    """Return the preset's sizes, with one of the decoders."""
    return dataclasses.replace(CONFIGS[preset], decoder=decoder)


def smallest(config: TacotronConfig) -> TacotronConfig:
    """Return a model of as many calls a step, on tensors of one element or a few."""
    names = [field.name for field in dataclasses.fields(config) if field.type == "int"]
    ones: dict[str, Any] = dict.fromkeys(set(names) - {"reduction"}, 1)
    return dataclasses.replace(config, **ones)


def make_model(config: TacotronConfig, sizes: Sizes, device: torch.device) -> Tacotron:
    """Return a model of these sizes in training mode, always with the same parameters."""
    torch.manual_seed(1)
    model = Tacotron(sizes.num_symbols, sizes.mel_dim, sizes.linear_dim, config)
    return model.to(device).train()


class Function:
    """One function of one replica, forward and backward, its inputs detached from the others.

    Args:
        run: from the leaves to the outputs.
        leaves: inputs whose gradient is wanted as well.
    """

    def __init__(self, run: Callable[[], tuple[Tensor, ...]], leaves: Sequence[Tensor]) -> None:
        self._run, self._leaves = run, leaves
        self._outputs: tuple[Tensor, ...] = ()
        self._gradients: list[Tensor] = []

    def forward(self) -> None:
        """Compute the outputs and keep them for `backward`."""
        self._outputs = self._run()

    def backward(self) -> None:
        """Compute the gradients; those of the outputs are random numbers."""
        if not self._gradients:
            self._gradients = [torch.randn_like(output) for output in self._outputs]
        for leaf in self._leaves:
            leaf.grad = None
        torch.autograd.backward(self._outputs, self._gradients)
        self._outputs = ()


def make_function(name: str, preset: str, sizes: Sizes, device: torch.device) -> Function:
    """Return one of FUNCTIONS, or LAUNCHES, of a replica of its own."""
    decoder: DecoderKind = "loop" if "loop" in name else "fast"
    config = config_of(preset, decoder)
    if name == LAUNCHES:
        config, sizes = smallest(config), dataclasses.replace(ONE, frames=sizes.frames)
    return _function(name.split(maxsplit=1)[0], make_model(config, sizes, device), sizes, device)


def _function(part: str, model: Tacotron, sizes: Sizes, device: torch.device) -> Function:
    inputs = make_inputs(sizes, device)
    parameters = list(model.parameters())
    if part == "encoder":
        return Function(lambda: (model.encode(inputs.symbols),), parameters)
    if part == "postproc":
        mel = inputs.mel.requires_grad_()
        return Function(lambda: (model.postproc(mel, inputs.lengths),), [*parameters, mel])
    with torch.no_grad():
        memory = model.encode(inputs.symbols)
    memory.requires_grad_()

    def decode() -> tuple[Tensor, ...]:
        output = model.decode(memory, inputs.symbols, inputs.mel, inputs.lengths)
        return output.mel, output.stop_logits

    return Function(decode, [*parameters, memory])


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(run: Callable[[], None], device: torch.device) -> float:
    """Return the seconds that a call takes, with what it launches."""
    synchronise(device)
    begin = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - begin
