"""Real and made-up corpora for tests."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile

from speechdp.data.prepare.pipeline import prepare
from speechdp.data.shards.dataset import Dataset
from speechdp.data.shards.shard import Shard, ShardHeader, ShardWriter, Utterance
from speechdp.data.signal.features import FeatureConfig
from speechdp.options.prepare import PrepareOptions

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

needs_espeak = pytest.mark.skipif(
    importlib.util.find_spec("espeakng_loader") is None, reason="espeakng-loader is not installed"
)


def shared_data(*parts: str) -> Path:
    """Return a path below SPEECHDP_DATA (else ../shared/data by the checkout); skip without it."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data"
    path = Path(os.environ.get("SPEECHDP_DATA", str(beside))).joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path} is absent; set SPEECHDP_DATA to the folder that holds {parts[0]}/")
    return path


def fsdd_dir() -> Path:
    """Return the recordings of the Free Spoken Digit Dataset; skip the test without them."""
    return shared_data("fsdd", "recordings")


def some_fsdd(folder: Path, speakers: tuple[str, ...], indices: tuple[int, ...], digits: int = 10) -> Path:
    """Copy a few FSDD recordings into a new folder."""
    folder.mkdir(parents=True)
    source = fsdd_dir()
    for speaker in speakers:
        for index in indices:
            for digit in range(digits):
                shutil.copy(source / f"{digit}_{speaker}_{index}.flac", folder)
    return folder


@dataclass(frozen=True)
class TrainedOnFsdd:
    """A model, the data it was trained on, and recordings of their test part."""

    run: Path
    data: Path
    recordings: list[Path]


def trained_on_fsdd(folder: Path, *options: str) -> TrainedOnFsdd:
    """Train on recordings of five digits by one speaker, on one rank."""
    from speechdp.cli.main import run as speechdp  # noqa: PLC0415 - most tests do without all commands

    corpus = some_fsdd(folder / "corpus", ("jackson",), tuple(range(12)), digits=5)
    data, run = folder / "data", folder / "run"
    split = ("--split", "index:test=0-1,dev=2", "--lm-order", "2", "--dtype", "float32")
    assert speechdp(["prepare", str(corpus), str(data), *split, "--workers", "1"]) == 0
    assert speechdp(["train", str(data), str(run), "--backend", "serial", "--flat-start", *options]) == 0
    recordings = sorted(path for path in corpus.iterdir() if path.stem.endswith(("_0", "_1")))
    return TrainedOnFsdd(run, data, recordings)


_PYTEST_FOLDER = re.compile(r"pytest-\d+|popen-gw\d+")


def tone(
    seconds: float, sampling_rate: int = 8000, seed: int | tuple[int, ...] = 0
) -> npt.NDArray[np.float32]:
    """Make noise that swells and fades, as (S,) samples."""
    num = round(seconds * sampling_rate)
    noise = np.random.default_rng(seed).standard_normal(num)
    return (0.1 * noise * np.hanning(num)).astype(np.float32)


def write_tone(path: Path, seconds: float = 0.5, sampling_rate: int = 8000, seed: int = 0) -> Path:
    """Write a 16-bit audio file of made-up sound; names of files and folders make it another: no copies."""
    # pytest numbers its folders anew in each run, in which the sound is to be the same.
    names = [name for name in path.absolute().parts if not _PYTEST_FOLDER.fullmatch(name)]
    named = zlib.crc32("/".join(names[-3:]).encode())
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, tone(seconds, sampling_rate, (seed, named)), sampling_rate, subtype="PCM_16")
    return path


def digit_folder(
    folder: Path, speakers: tuple[str, ...] = ("ann", "bob"), num_indices: int = 12, digits: int = 2
) -> Path:
    """Write a folder named as FSDD is, of made-up sound."""
    for number, speaker in enumerate(speakers):
        for index in range(num_indices):
            for digit in range(digits):
                write_tone(
                    folder / f"{digit}_{speaker}_{index}.wav", 0.4, seed=100 * number + 10 * index + digit
                )
    return folder


def stored_digits(folder: Path, **options: Any) -> dict[str, Dataset]:
    """Prepare a digit folder twice, as features and as audio; return both."""
    corpus = digit_folder(folder / "corpus")
    options = {"shards": 2, "num_mel_bins": 12, "pattern": "{digit}_{speaker}_{index}", **options}
    return {
        kind: prepare(
            PrepareOptions((corpus, folder / kind), split="random:dev=0.2,test=0.1", store=kind, **options),
            no_progress,
        ).dataset
        for kind in ("features", "audio")
    }


def kaldi_folder(folder: Path, num_utterances: int = 3) -> Path:
    """Write a Kaldi data directory of made-up sound: utterances utt0, utt1, ... of two speakers."""
    ids = [f"utt{number}" for number in range(num_utterances)]
    for number, utterance in enumerate(ids):
        write_tone(folder / "wav" / f"{utterance}.wav", seed=number)
    (folder / "wav.scp").write_text("".join(f"{u} wav/{u}.wav\n" for u in ids))
    (folder / "text").write_text("".join(f"{u} {DIGITS[n % 10]} two\n" for n, u in enumerate(ids)))
    (folder / "utt2spk").write_text("".join(f"{u} spk{n % 2}\n" for n, u in enumerate(ids)))
    return folder


def make_utterances(lengths: tuple[int, ...], header: ShardHeader, seed: int = 0) -> list[Utterance]:
    """Make random utterances that fit a shard's header."""
    rng = np.random.default_rng(seed)
    return [
        Utterance(
            utterance_id=f"utt-{number}",
            speaker=f"spk-{number % 3}",
            text="zero één",
            features=rng.standard_normal((length, header.feature_dim)).astype(header.features.dtype),
            targets=rng.integers(0, header.num_classes, length).astype(np.int32),
        )
        for number, length in enumerate(lengths)
    ]


def write_shard(path: Path, lengths: tuple[int, ...] = (7, 1, 12), *, num_mel_bins: int = 5) -> Shard:
    """Write a small random shard and open it."""
    header = ShardHeader(FeatureConfig(num_mel_bins=num_mel_bins), 8000, 9, "flat", "train")
    with ShardWriter(path, header) as writer:
        for utterance in make_utterances(lengths, header):
            writer.add(utterance)
    return Shard(path)


def no_progress(stage: str, done: int, total: int) -> None:
    """Take a progress report and do nothing with it."""
