"""The acoustic model that benchmarks train."""

from __future__ import annotations

from speechdp.data.shards.dataset import Dataset
from speechdp.models.lstm_am import LstmAcousticModel
from speechdp.options.run import TrainOptions
from speechdp.train.models import make_model


def make_acoustic_model(dataset: Dataset, options: TrainOptions) -> LstmAcousticModel:
    """Build an acoustic model with weights that depend on the seed alone."""
    model = make_model(dataset, options)
    assert isinstance(model, LstmAcousticModel)
    return model
