"""A synthesis run whose model has learnt nothing, as `speechdp train` would leave it."""

from __future__ import annotations

from pathlib import Path

import torch

from speechdp.data.shards.dataset import Dataset
from speechdp.labels.symbols import SymbolInventory
from speechdp.models.tacotron.config import TacotronConfig
from speechdp.models.tacotron.model import Tacotron
from speechdp.tasks.model_file import save_synthesis_model

SIZES = TacotronConfig(
    embedding_dim=8,
    prenet_hidden=8,
    prenet_dim=6,
    width=4,
    encoder_bank=3,
    postproc_bank=2,
    postproc_projection=6,
    highways=1,
    attention_dim=8,
    decoder_dim=8,
    reduction=3,
)


def write_untrained_run(run_dir: Path, dataset: Dataset, *, stops: bool = False) -> Path:
    """Write RUN/model.safetensors for a data directory; `stops`: at the first step, else never."""
    symbols = SymbolInventory.load(dataset.symbols_path)
    torch.manual_seed(3)
    features = dataset.features
    model = Tacotron(symbols.num_symbols, features.num_mel_bins, features.linear_dim, SIZES)
    torch.nn.init.constant_(model.decoder.stop.bias, 99.0 if stops else -99.0)
    run_dir.mkdir(parents=True)
    facts = {
        "symbols": symbols.to_dict(),
        "features": features.to_dict(),
        "sampling_rate": dataset.sampling_rate,
    }
    save_synthesis_model(run_dir, model, facts)
    return run_dir
