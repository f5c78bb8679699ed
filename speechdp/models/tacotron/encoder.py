"""The encoder: symbols to a memory that the decoder attends to.

Legend: B batch, S symbols, W config.width.
"""

from __future__ import annotations

from torch import Tensor, nn

from speechdp.models.tacotron.cbhg import Cbhg, CbhgSizes
from speechdp.models.tacotron.config import TacotronConfig
from speechdp.models.tacotron.padding import frame_mask
from speechdp.models.tacotron.prenet import Prenet


class Encoder(nn.Module):
    """Embedding, pre-net, CBHG (Wang et al. 2017, section 3.2)."""

    def __init__(self, num_symbols: int, config: TacotronConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_symbols, config.embedding_dim)
        self.prenet = Prenet(config.embedding_dim, config.prenet_hidden, config.prenet_dim, config.dropout)
        self.cbhg = Cbhg(
            CbhgSizes(
                inputs=config.prenet_dim,
                bank=config.encoder_bank,
                width=config.width,
                projection=config.width,
                highways=config.highways,
            )
        )

    def forward(self, symbols: Tensor) -> Tensor:
        """Return (B, S, 2W) for symbols (B, S) int64, -1 past each end; the output is zero there."""
        # Keep the texts' lengths on the symbols' device: reading them here would wait for a GPU.
        lengths = (symbols >= 0).sum(dim=1)  # (B,)
        mask = frame_mask(lengths, symbols.shape[1], symbols.device)  # (B, S)
        embedded = self.embedding(symbols.clamp(min=0))
        keep = self.prenet.draw(*symbols.shape, like=embedded) if self.training else None
        hidden = self.prenet(embedded, keep) * mask.unsqueeze(2)
        memory: Tensor = self.cbhg(hidden, mask, lengths)
        return memory * mask.unsqueeze(2)
