"""Compare what a model's file says about its training with data that it is used on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError
from speechdp.labels.hmm import StateInventory
from speechdp.labels.kaldi_pdfs import KaldiPdfs


def is_ctc(config: Mapping[str, Any]) -> bool:
    """Return whether a model's classes are those of CTC, phones and a blank, according to its config."""
    return config.get("criterion") == "ctc"


def check_task(dataset: Dataset) -> None:
    """Refuse data that are not for recognition; their class list belongs to another task.

    Raises:
        ConfigError: the data are for synthesis.
    """
    if dataset.task != "acoustic":
        raise ConfigError(
            f"{dataset.path}: holds spectrograms for synthesis; give data prepared without --task synthesis"
        )


#: How to get data that fit a model.
_AS_TRAINED = "prepare the data with --like RUN, the run of the model"


def check_origin(
    config: dict[str, Any],
    dataset: Dataset,
    classes: StateInventory | KaldiPdfs,
    remedy: str = _AS_TRAINED,
) -> None:
    """Refuse data that differ from those of training; nothing else might notice the difference.

    Args:
        config: what the model's file records of its training; entries that it lacks are not compared.
        dataset: the data.
        classes: classes of the data.
        remedy: how to get data that fit.

    Raises:
        ConfigError: the class list, the sampling rate or the features differ.
    """
    words = "" if isinstance(classes, KaldiPdfs) else " (--lexicon as well, for other words in its phones)"
    check_classes(config, dataset.classes_path, classes, f"{remedy}{words}")
    of_data = {"sampling_rate": dataset.sampling_rate, "features": dataset.features.to_dict()}
    for name, value in of_data.items():
        if config.get(name, value) != value:
            raise ConfigError(
                f"{dataset.path}: {name} {value} is not what the model was trained on ({config[name]}); "
                f"{remedy}"
            )


def check_classes(
    config: Mapping[str, Any], path: Path, classes: StateInventory | KaldiPdfs, remedy: str
) -> None:
    """Refuse a class list, read from `path`, that differs from that of training.

    Args:
        config, remedy: as for `check_origin`.

    Raises:
        ConfigError: it differs.
    """
    if config.get("classes_sha256", classes.sha256) != classes.sha256:
        raise ConfigError(f"{path}: is not the class list the model was trained on; {remedy}")
