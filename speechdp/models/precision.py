"""The number formats of a model's computation: float32, or half precision under torch.autocast.

Parameters, gradients and optimizer state are float32 in every format.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from speechdp.errors import ConfigError

if TYPE_CHECKING:  # options import the formats, and --help and the launcher do without torch
    import torch
    from torch import Tensor, nn

PrecisionName = Literal["fp32", "bf16", "fp16"]


class Precision:
    """The number format of forward and backward passes on one device.

    Args:
        name: fp32 leaves torch unchanged; bf16 and fp16 cast matrix products, convolutions and recurrent
            layers.
        device: device that computes.

    Attributes:
        scales_losses: whether losses must be scaled, or gradients would underflow (`parallel/loss_scale.py`).
    """

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        self.name, self._device = name, device
        self.scales_losses = name == "fp16"

    def computing(self) -> AbstractContextManager[object]:
        """Return a context in which torch computes in this format."""
        if self.name == "fp32":
            return nullcontext()
        import torch  # noqa: PLC0415

        dtype = torch.bfloat16 if self.name == "bf16" else torch.float16
        return torch.autocast(self._device.type, dtype=dtype)

    def check(self, model: nn.Module) -> None:
        """Refuse a format that this device, or torch on it, cannot use for `model`.

        Raises:
            ConfigError: it cannot; the message names the formats to choose from.
        """
        if self.name == "fp32":
            return
        kinds = _recurrent_kinds(model)
        if (obstacle := self._obstacle(kinds)) is None:
            return
        other = Precision("bf16" if self.name == "fp16" else "fp16", self._device)
        remedy = f"{other.name} or fp32" if other._obstacle(kinds) is None else "fp32"
        raise ConfigError(f"--precision {self.name}: {obstacle}; use {remedy}")

    def _obstacle(self, kinds: list[nn.RNNBase]) -> str | None:
        """Return why a model with these recurrent layers cannot be computed in this format; None: it can."""
        import torch  # noqa: PLC0415

        is_cuda = self._device.type == "cuda"
        where = torch.cuda.get_device_name(self._device) if is_cuda else "CPU"
        if self.name == "bf16" and is_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
            return f"{where} cannot compute in it"
        for kind in kinds:
            try:
                self._try(kind)
            except RuntimeError:  # e.g. oneDNN has no such kernel
                name = type(kind).__name__
                return f"torch {torch.__version__} cannot compute this model's {name} in it on this {where}"
        return None

    def _try(self, module: nn.RNNBase) -> None:
        """Run a recurrent layer once, forward and backward, over two steps of zeros."""
        import torch  # noqa: PLC0415

        module = module.to(self._device)
        with self.computing(), torch.enable_grad():
            outputs = module(torch.zeros(2, 1, module.input_size, device=self._device))[0]
        outputs.float().sum().backward()


def _recurrent_kinds(model: nn.Module) -> list[nn.RNNBase]:
    """Return a small layer of each kind of recurrent layer in a model: support does not depend on sizes.

    They are torch's own classes, because the constructor of a derived class is unknown.
    """
    from torch import nn  # noqa: PLC0415

    kinds: dict[object, nn.RNNBase] = {}
    for module in model.modules():
        kind = next((k for k in (nn.LSTM, nn.GRU, nn.RNN) if isinstance(module, k)), None)
        if kind is not None:
            projects = {"proj_size": 8} if module.proj_size else {}
            made = kind(16, 16, bidirectional=module.bidirectional, **projects)
            kinds[kind, module.bidirectional, bool(projects)] = made
    return list(kinds.values())


def has_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether this CPU has matrix units for bfloat16 (Intel's AMX).

    Args:
        cpuinfo: Linux's description of the CPU; other systems do not run on a CPU that has them.
    """
    try:
        return "amx_bf16" in cpuinfo.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return False


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x`, converted to float32 if it is in half precision, for computing a loss."""
    return x.float() if x.is_floating_point() and x.element_size() < 4 else x


def tf32_in_force() -> str:
    """Say for which operations a GPU rounds float32 to TF32."""
    import torch  # noqa: PLC0415

    matmul = torch.backends.cuda.matmul.allow_tf32
    cudnn = torch.backends.cudnn.allow_tf32
    return f"TF32 {'on' if matmul else 'off'} in matrix products, {'on' if cudnn else 'off'} in cuDNN"
