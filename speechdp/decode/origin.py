"""What a model's file says of its training: what its classes are, and whether data are of that kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError
from speechdp.labels.hmm import StateInventory
from speechdp.labels.kaldi_pdfs import KaldiPdfs


def is_ctc(config: Mapping[str, Any]) -> bool:
    """Tell by what its file says whether a model's classes are CTC's: phones and a blank, no states."""
    return config.get("criterion") == "ctc"


def check_task(dataset: Dataset) -> None:
    """Refuse data whose speech is not to be recognised; their class list is another's.

    Raises:
        ConfigError: they are for synthesis.
    """
    if dataset.task != "acoustic":
        raise ConfigError(
            f"{dataset.path}: holds spectrograms for synthesis; give data prepared without --task synthesis"
        )


#: What makes data fit a model that is to score them.
_AS_TRAINED = "prepare the data with --like RUN, the run of the model"


def check_origin(
    config: dict[str, Any],
    dataset: Dataset,
    classes: StateInventory | KaldiPdfs,
    remedy: str = _AS_TRAINED,
) -> None:
    """Refuse data made otherwise than those of training; nothing else might notice.

    Args:
        config: what the model's file says of its training; what it lacks is not compared.
        dataset: the data.
        classes: theirs.
        remedy: how to get data that fit.

    Raises:
        ConfigError: the class list, the sampling rate or the features are others.
    """
    if config.get("classes_sha256", classes.sha256) != classes.sha256:
        words = (
            "" if isinstance(classes, KaldiPdfs) else " (--lexicon as well, for other words in its phones)"
        )
        raise ConfigError(
            f"{dataset.classes_path}: is not the class list the model was trained on; {remedy}{words}"
        )
    of_data = {"sampling_rate": dataset.sampling_rate, "features": dataset.features.to_dict()}
    for name, value in of_data.items():
        if config.get(name, value) != value:
            raise ConfigError(
                f"{dataset.path}: {name} {value} is not what the model was trained on ({config[name]}); "
                f"{remedy}"
            )
