"""Open a data directory that `speechdp prepare` wrote."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from speechdp.data.shards.contiguous import OpenFiles
from speechdp.data.shards.layout import VERSION_OF, ShardHeader, Stored, check_format, stored_in
from speechdp.data.shards.shard import Shard
from speechdp.data.shards.writer import ShardWriter
from speechdp.data.signal.channel import MIX, Channel
from speechdp.data.signal.features import FeatureConfig
from speechdp.errors import ConfigError, ShardError
from speechdp.files import cannot_be_read, damage, write_text_atomically
from speechdp.json_input import parse_json

DATA_FORMAT = "speechdp-data"
MANIFEST_NAME = "data.json"
SYMBOLS_NAME = "symbols.json"
#: Value of `alignment` in data.json if there is none; such data cannot be trained on.
UNALIGNED = "none"
#: The same if each transcript is only spread evenly over its utterance.
FLAT = "flat"
#: The tasks that data are prepared for; tasks of other packages train on either kind.
TaskName = Literal["acoustic", "synthesis"]
TASK_OF: dict[Stored, TaskName] = {"features": "acoustic", "audio": "acoustic", "spectrograms": "synthesis"}


@dataclass(frozen=True)
class ShardEntry:
    """One shard as data.json lists it."""

    file: str
    utterances: int
    frames: int
    index_sha256: str

    @classmethod
    def of(cls, writer: ShardWriter) -> ShardEntry:
        """Describe a shard that was written."""
        return cls(writer.path.name, writer.num_utterances, writer.num_frames, writer.index_sha256)


@dataclass(frozen=True)
class SplitEntry:
    """One split (train, dev or test) as data.json lists it."""

    shards: tuple[ShardEntry, ...]
    utterances: int
    frames: int
    speakers: int

    @classmethod
    def of(cls, shards: Sequence[ShardEntry], speakers: Iterable[str]) -> SplitEntry:
        """Sum up a split's shards; `speakers` has the speaker of every utterance."""
        return cls(
            shards=tuple(shards),
            utterances=sum(shard.utterances for shard in shards),
            frames=sum(shard.frames for shard in shards),
            speakers=len(set(speakers)),
        )


@dataclass(frozen=True)
class Manifest:
    """The contents of data.json; with `stored` "audio", features are computed when they are needed.

    `channel` is the channel read from multi-channel audio files, counted from 1.
    """

    sampling_rate: int
    features: FeatureConfig
    num_classes: int
    alignment: str
    split: str
    splits: dict[str, SplitEntry]
    stored: Stored = "features"
    channel: Channel | None = None

    def header(self, split: str) -> ShardHeader:
        """Return the header that the shards of a split share."""
        return ShardHeader(
            self.features, self.sampling_rate, self.num_classes, self.alignment, split, self.stored
        )

    def to_json(self) -> str:
        """Return the text of data.json."""
        values: dict[str, Any] = {
            "format": DATA_FORMAT,
            "version": VERSION_OF[self.stored],
            "sampling_rate": self.sampling_rate,
            "features": self.features.to_dict(),
            "feature_dim": self.features.feature_dim,
            "num_classes": self.num_classes,
            "alignment": self.alignment,
            "split": self.split,
            "splits": {name: asdict(split) for name, split in self.splits.items()},
        }
        if self.stored != "features":
            values["stored"] = self.stored
        if self.channel is not None:
            values["channel"] = self.channel
        return json.dumps(values, indent=2) + "\n"

    def write(self, directory: Path) -> None:
        """Write data.json atomically.  Write it last: its presence says that the directory is complete."""
        write_text_atomically(directory / MANIFEST_NAME, self.to_json())


#: A language model beside the shards: an ARPA file, or a grammar with its words; and a record of its fit.
ARPA_NAME, GRAMMAR_NAME, WORDS_NAME, LM_RECORD_NAME = "lm.arpa.gz", "G.fst", "words.txt", "lm.json"
LANGUAGE_MODEL_NAMES = (ARPA_NAME, GRAMMAR_NAME, WORDS_NAME, LM_RECORD_NAME)


class Dataset:
    """A prepared data directory.

    Attributes:
        path: the directory.
        checksum: sha256 of data.json, which holds every shard's own: equal only for equal data.
        sampling_rate: in Hz.
        stored: "features", "audio" to compute features from, or "spectrograms" to be learnt from texts.
        features: how features were or will be computed.
        feature_dim, num_classes: sizes of a frame and of the targets.
        alignment: "flat", "exact", "kaldi", "none" (data for scoring only), or "text" for spectrograms.
        split: the rule that divided the corpus, e.g. "index:test=0-4,dev=5-9".
        splits: the entries of data.json, by split.
        channel: channel read from multi-channel audio files, counted from 1; None: nothing was chosen.
    """

    def __init__(self, path: Path, manifest: Manifest, checksum: str) -> None:
        self.path = path
        self.checksum = checksum
        self.sampling_rate = manifest.sampling_rate
        self.stored = manifest.stored
        self.features = manifest.features
        self.feature_dim = manifest.features.feature_dim
        self.num_classes = manifest.num_classes
        self.alignment = manifest.alignment
        self.split = manifest.split
        self.splits = manifest.splits
        self.channel = manifest.channel

    @classmethod
    def open(
        cls, path: Path | str, *, just_written: bool = False, remedy: str = "prepare the data again"
    ) -> Dataset:
        """Read a directory's data.json.

        Args:
            path: the directory.
            just_written: the directory was complete a moment ago, so whatever is missing was removed since.
            remedy: what to do about damage.

        Raises:
            ShardError: the directory does not exist, is incomplete, of another version, or damaged.
        """
        path = Path(path)
        _refuse_special_files(path)
        file = path / MANIFEST_NAME
        try:
            content = file.read_bytes()
        except OSError as error:
            if just_written:
                check = f"check the directory with speechdp inspect {path}"
                raise ShardError(cannot_be_read(file, error, check)) from error
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise ShardError(cannot_be_read(file, error)) from error
            if (path / "run.json").is_file():
                raise ShardError(
                    f"{path}: is a run, not a data directory; give the folder that speechdp prepare wrote"
                ) from error
            raise ShardError(
                f"{file}: cannot be read ({error.strerror}); "
                f"{path} is not a complete data directory, run speechdp prepare"
            ) from error
        return cls(path, _parse(file, content, remedy), hashlib.sha256(content).hexdigest())

    @property
    def split_names(self) -> tuple[str, ...]:
        """The splits that hold utterances."""
        return tuple(self.splits)

    @property
    def lexicon_path(self) -> Path:
        """The lexicon that the targets were made with."""
        return self.path / "lexicon.txt"

    @property
    def classes_path(self) -> Path:
        """The names of the classes, one a line."""
        return self.path / "classes.txt"

    @property
    def symbols_path(self) -> Path:
        """The symbols in which texts are written; only with spectrograms."""
        return self.path / SYMBOLS_NAME

    @property
    def task(self) -> TaskName:
        """The task that these data are prepared for."""
        return TASK_OF[self.stored]

    @property
    def has_texts(self) -> bool:
        """Whether the targets of an utterance are the symbols of its text, not a class for each frame."""
        return self.stored == "spectrograms"

    def shard_paths(self, split: str) -> list[Path]:
        """Return the shards of a split, in the order of data.json."""
        return [self.path / shard.file for shard in self._split(split).shards]

    def num_frames(self, split: str) -> int:
        """Return the number of frames of a split."""
        return self._split(split).frames

    def num_utterances(self, split: str) -> int:
        """Return the number of utterances of a split."""
        return self._split(split).utterances

    def open_shard(self, split: str, index: int, open_files: OpenFiles | None = None) -> Shard:
        """Open a shard and check that it is the one data.json names.  Raises ShardError."""
        entry = self._split(split).shards[index]
        shard = Shard(self.path / entry.file, open_files)
        header = shard.header
        for what, found, expected in (
            ("features", header.features, self.features),
            ("content", header.stored, self.stored),
            ("sampling rate", header.sampling_rate, self.sampling_rate),
            ("number of classes", header.num_classes, self.num_classes),
            ("alignment", header.alignment, self.alignment),
            ("split", header.split, split),
            ("number of utterances", shard.num_utterances, entry.utterances),
            ("number of frames", shard.num_frames, entry.frames),
            ("checksum", shard.index_sha256, entry.index_sha256),
        ):
            if found != expected:
                raise ShardError(
                    f"{shard.path}: is not the shard that {MANIFEST_NAME} lists ({what} differs); copy the "
                    "directory again or prepare the data again"
                )
        return shard

    @contextmanager
    def open_shards(self, split: str) -> Iterator[list[Shard]]:
        """Open all shards of a split for the block, as `open_shard`, in the order of data.json.

        Only a few files are open at a time: there may be more shards than a process may open files.
        """
        open_files = OpenFiles()
        with ExitStack() as stack:
            indices = range(len(self._split(split).shards))
            yield [stack.enter_context(self.open_shard(split, index, open_files)) for index in indices]

    def check_num_classes(self, path: Path, found: int) -> None:
        """Compare data.json's number of classes with that of their list at `path`.  Raises ConfigError."""
        if found != self.num_classes:
            raise ConfigError(
                f"{path}: lists {found} classes, {MANIFEST_NAME} says {self.num_classes}; "
                "copy the directory again or prepare the data again"
            )

    def verify(self, splits: Iterable[str] | None = None) -> Counter[str]:
        """Check every checksum and target of the directory; return how many shards have each storage layout.

        One shard is open at a time: there may be more shards than a process may open files.

        Args:
            splits: the splits to check; None: all.

        Raises:
            ShardError: the first damage.
        """
        storages: Counter[str] = Counter()
        for name in self.splits if splits is None else splits:
            for index in range(len(self._split(name).shards)):
                with self.open_shard(name, index) as shard:
                    shard.verify()
                    storages[shard.storage] += 1
        return storages

    def _split(self, name: str) -> SplitEntry:
        if name not in self.splits:
            known = ", ".join(self.splits)
            raise ShardError(f"{self.path}: has no split {name!r}, only {known}; name one of these")
        return self.splits[name]


def _refuse_special_files(directory: Path) -> None:
    """Refuse pipes, sockets and devices in place of files: opening a pipe blocks and ignores signals.

    Without data.json, as in /tmp, the directory is not ours, and its pipes and sockets do not matter.

    Raises:
        ShardError: names the first.
    """
    try:
        with os.scandir(directory) as entries:
            found = {e.name: e.is_file() or e.is_dir() or not Path(e).exists() for e in entries}
    except OSError:
        return  # reading data.json reports the reason
    names = [name for name, is_usual in found.items() if not is_usual]
    if names and MANIFEST_NAME in found:
        raise ShardError(
            f"{directory / min(names)}: is a pipe, socket or device, which data directories do not hold; "
            "remove it, and copy the file again if it stands for one"
        )


def _parse(file: Path, content: bytes, remedy: str) -> Manifest:
    try:
        values: dict[str, Any] = parse_json(content)
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object with format, version, splits and so on")
        check_format(file, values, DATA_FORMAT, *VERSION_OF.values())
        stored = stored_in(values)
        if not isinstance(values["splits"], dict):
            raise ValueError("splits is no JSON object of splits by name")
        splits = {name: _parse_split(name, split) for name, split in values["splits"].items()}
        files = [entry.file for split in splits.values() for entry in split.shards]
        # Both become file names: nothing outside the directory may be read or written.
        for name in (*splits, *files):
            if name in ("", "..") or Path(name).name != name or "\0" in name:
                raise ValueError(f"{name!r} is not a plain name")
        twice = [file for file, times in Counter(files).items() if times > 1]
        if twice:
            raise ValueError(f"it lists {twice[0]!r} twice")
        features = FeatureConfig.from_dict(values["features"])
        channel = values.get("channel")
        if channel not in (None, MIX) and (type(channel) is not int or channel < 1):
            raise ValueError(f"{channel!r} is no channel")
        num_classes = values["num_classes"]
        if type(num_classes) is not int or not 0 < num_classes < 1 << 31:  # targets are int32
            raise ValueError(f"{num_classes!r} is no number of classes")
        if values["feature_dim"] != features.feature_dim:
            raise ValueError(
                f"it says {values['feature_dim']!r} values a frame, its features have {features.feature_dim}"
            )
        return Manifest(
            sampling_rate=int(values["sampling_rate"]),
            features=features,
            num_classes=num_classes,
            alignment=str(values["alignment"]),
            split=str(values["split"]),
            splits=splits,
            stored=stored,
            channel=channel,
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ShardError(f"{file}: damaged ({damage(error)}); {remedy}") from error


def _parse_split(name: str, values: dict[str, Any]) -> SplitEntry:
    shards = tuple(ShardEntry(**shard) for shard in values["shards"])
    for shard in shards:
        _check_numbers(shard.utterances, shard.frames)
    split = SplitEntry(shards, *(values[key] for key in ("utterances", "frames", "speakers")))
    _check_numbers(split.utterances, split.frames, split.speakers)
    for what in ("utterances", "frames"):
        total, parts = getattr(split, what), sum(getattr(shard, what) for shard in shards)
        if total != parts:
            raise ValueError(f"split {name!r} has {total} {what}, its shards {parts}")
        if total == 0:
            raise ValueError(f"split {name!r} has no {what}")
    return split


def _check_numbers(*values: Any) -> None:
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise ValueError(f"{value!r} is no number of utterances, frames or speakers")
