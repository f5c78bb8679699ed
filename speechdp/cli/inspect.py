"""`speechdp inspect`: show what a data directory holds and check that it is undamaged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from speechdp.cli.support.console import make_console
from speechdp.data.prepare.language_model import describe_language_model
from speechdp.data.shards.dataset import FLAT, UNALIGNED, Dataset
from speechdp.data.shards.description import check_description
from speechdp.data.shards.layout import Stored, printable
from speechdp.data.signal.channel import channel_read
from speechdp.labels.kaldi_pdfs import classes_of
from speechdp.labels.symbols import symbols_of

_FLAT_HINT = (
    "targets only spread each transcript evenly over its frames: align them as training begins, by "
    "train --flat-start (Gaussian mixtures) or train --realign 1"
)


@dataclass(frozen=True)
class InspectCommand:
    """Show hours, frames, speakers, classes and shards of a data directory, and verify its checksums."""

    data: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DATA")]
    """Data directory written by `speechdp prepare`."""
    verify: bool = True
    """Read every utterance, verify its checksum, and check that its targets are valid classes."""

    def run(self) -> int:
        """Print the table, then verify the data; a damaged file raises its one-line message."""
        console = make_console()
        dataset = Dataset.open(self.data)
        console.print(describe(dataset))
        if self.verify:
            check_description(dataset, read_all=True)
            if dataset.stored != "spectrograms":  # `describe` has looked at those of spectrograms
                classes_of(dataset)
            storages = dataset.verify()
            console.print(
                f"{sum(len(s.shards) for s in dataset.splits.values())} shards, all checksums match"
            )
            for storage, count in sorted(storages.items()):
                if storage != "contiguous":
                    console.print(
                        f"{count} shards are {storage}: every read unpacks whole chunks; "
                        "speechdp shard rewrites them, contiguous"
                    )
        return 0


def describe(dataset: Dataset, *, advises: bool = True) -> RenderableType:
    """Return a table of a data directory's splits, under a line with their common settings.

    Args:
        advises: whether to add how to align targets that are not aligned.
    """
    settings = _SETTINGS[dataset.stored](dataset)
    if dataset.channel is not None:
        settings += f"\nof files of several channels: {channel_read(dataset.channel)}"
    table = Table()
    table.add_column("split")
    for name in ("hours", "frames", "utterances", "speakers", "shards"):
        table.add_column(name, justify="right")
    for name, split in dataset.splits.items():
        hours = split.frames * dataset.features.frame_shift_s / 3600.0
        counts = (split.frames, split.utterances, split.speakers, len(split.shards))
        table.add_row(printable(name), f"{hours:.3f}", *(f"{count:,}" for count in counts))
    model = describe_language_model(dataset)
    lines = [Text("\n".join(model))] if model else []
    if advises and dataset.alignment == FLAT and "train" in dataset.splits:
        lines.append(Text(_FLAT_HINT))
    return Group(Text(str(dataset.path), style="bold"), Text(settings), table, *lines)


def _of_spectrograms(dataset: Dataset) -> str:
    features = dataset.features
    kind = symbols_of(dataset).kind
    return (
        f"{dataset.sampling_rate} Hz, spectrograms {features.num_mel_bins} mel + {features.linear_dim} "
        f"linear {features.dtype}, {features.frame_length_ms:g} ms every {features.frame_shift_ms:g} ms, "
        f"{features.num_fft} points, pre-emphasis {features.preemphasis:g}\n"
        f"{dataset.num_classes} symbols ({kind}), split by {printable(dataset.split).replace(';', ', ')}"
    )


def _of_features(dataset: Dataset) -> str:
    features = dataset.features
    normalised = [
        name
        for name, used in (("mean", features.mean_normalise), ("variance", features.variance_normalise))
        if used
    ]
    kind = f"{features.kind} x {dataset.feature_dim}"
    content = f"audio, for {kind}" if dataset.stored == "audio" else f"{kind} {features.dtype}"
    rate = f"{dataset.sampling_rate} Hz, " if dataset.sampling_rate else ""  # unknown for Kaldi's features
    whose = " by cmvn.scp" if normalised and features.cmvn == "speaker" else ""
    alignment = "no" if dataset.alignment == UNALIGNED else printable(dataset.alignment)
    return (
        f"{rate}{content}, "
        f"{features.frame_length_ms:g} ms every {features.frame_shift_ms:g} ms, "
        f"{' and '.join(normalised) or 'nothing'} normalised{whose}\n"
        f"{dataset.num_classes} classes, {alignment} alignment, "
        f"split by {printable(dataset.split)}"
    )


#: Description of a data directory's settings, by the contents of its shards.
_SETTINGS: dict[Stored, Callable[[Dataset], str]] = {
    "features": _of_features,
    "audio": _of_features,
    "spectrograms": _of_spectrograms,
}
