"""The post-processing net: mel frames to linear spectrogram frames, seeing both past and future.

Legend: B batch, T frames, M mel bins, L linear bins.
"""

from __future__ import annotations

from torch import Tensor, nn

from speechdp.models.tacotron.cbhg import Cbhg, CbhgSizes
from speechdp.models.tacotron.config import TacotronConfig
from speechdp.models.tacotron.padding import frame_mask


class Postproc(nn.Module):
    """CBHG and a linear layer (Wang et al. 2017, section 3.4)."""

    def __init__(self, mel_dim: int, linear_dim: int, config: TacotronConfig) -> None:
        super().__init__()
        self.cbhg = Cbhg(
            CbhgSizes(
                inputs=mel_dim,
                bank=config.postproc_bank,
                width=config.width,
                projection=config.postproc_projection,
                highways=config.highways,
            )
        )
        self.linear = nn.Linear(2 * config.width, linear_dim)

    def forward(self, mel: Tensor, lengths: Tensor) -> Tensor:
        """Return (B, T, L) for mel (B, T, M) and CPU lengths (B,); zero past each utterance's end."""
        mask = frame_mask(lengths, mel.shape[1], mel.device)  # (B, T)
        rows = mask.unsqueeze(2)
        hidden = self.cbhg(mel * rows, mask, lengths)
        output: Tensor = self.linear(hidden) * rows
        return output
