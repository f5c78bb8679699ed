"""Make a data directory: a source reads a corpus, jobs write the shards, and data.json is written last."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from speechdp.data.prepare.contents import Contents, ShardContent
from speechdp.data.prepare.jobs import Progress, run_jobs
from speechdp.data.prepare.kaldi import read_kaldi
from speechdp.data.prepare.like import open_like, read_corpus_like
from speechdp.data.prepare.recognition import read_corpus_for_recognition
from speechdp.data.prepare.synthesis import read_corpus_for_synthesis
from speechdp.data.prepare.synthetic import speak_for_recognition, speak_for_synthesis
from speechdp.data.prepare.unreadable import as_option_does
from speechdp.data.shards.data_dir import new_data_dir
from speechdp.data.shards.dataset import Dataset, ShardEntry, SplitEntry
from speechdp.data.shards.description import record_description
from speechdp.data.shards.layout import ShardHeader
from speechdp.data.shards.writer import ShardWriter
from speechdp.errors import ConfigError, UnreadableAudioError
from speechdp.files import cannot_be_read, scratch_folder
from speechdp.options.prepare import PrepareOptions


@dataclass(frozen=True)
class Prepared:
    """The data directory that was made, and messages for the user."""

    dataset: Dataset
    notices: tuple[str, ...]


def prepare(options: PrepareOptions, progress: Progress) -> Prepared:
    """Read a corpus, or synthesise one, and write a data directory completely or not at all.

    Args:
        options: see PrepareOptions.
        progress: called with the stage, how much is done, and how much there is.

    Raises:
        ConfigError: the corpus, its audio, texts, lexicon, alignment, the split or the target cannot be used.
        ShardError: the disk is full or cannot be written.
        RunError: a process was killed.
    """
    if options.like is not None and options.files.channel is None:
        files = dataclasses.replace(options.files, channel=open_like(options.like).channel)
        options = dataclasses.replace(options, files=files)
    with (
        new_data_dir(options.data, options.overwrite) as directory,
        scratch_folder(directory, ".scratch-") as scratch,
    ):
        contents = _read(options, scratch, progress)
        try:
            splits = _write_shards(directory, contents, options.workers, progress)
        except UnreadableAudioError as error:  # after a header that was readable
            raise ConfigError(as_option_does(error)) from error
        contents.save(directory)
        record_description(directory)
        manifest = dataclasses.replace(contents.manifest, splits=splits, channel=options.files.channel)
        manifest.write(directory)
    return Prepared(Dataset.open(options.data, just_written=True), contents.notices)


def _read(options: PrepareOptions, scratch: Path, progress: Progress) -> Contents:
    """Read the corpus, or synthesise it in the folder `scratch`."""
    try:
        return _source(options)(options, scratch, progress)
    except OSError as error:
        if error.filename is None or Path(os.fsdecode(error.filename)).is_relative_to(scratch):
            raise  # the disk of DATA
        raise ConfigError(cannot_be_read(os.fsdecode(error.filename), error)) from error


def _source(options: PrepareOptions) -> Callable[[PrepareOptions, Path, Progress], Contents]:
    """Return the function that reads the corpus; its folder holds files until the shards are written."""
    if options.from_kaldi.kaldi is not None:
        return read_kaldi
    if options.synthetic is not None:
        return speak_for_recognition if options.is_for_recognition else speak_for_synthesis
    if options.like is not None:
        return read_corpus_like
    return read_corpus_for_recognition if options.is_for_recognition else read_corpus_for_synthesis


@dataclass(frozen=True)
class _ShardJob:
    """One shard to write."""

    path: Path
    header: ShardHeader
    content: ShardContent

    @property
    def num_utterances(self) -> int:
        """Number of utterances of the shard."""
        return len(self.content.utterances)

    def run(self, advance: Callable[[], None]) -> ShardEntry:
        """Write the shard, calling `advance` after each utterance."""
        with ShardWriter(self.path, self.header) as writer:
            for utterance in self.content.ready(self.path, self.header):
                writer.add(utterance)
                advance()
        return ShardEntry.of(writer)


def _write_shards(
    directory: Path, contents: Contents, num_workers: int | None, progress: Progress
) -> dict[str, SplitEntry]:
    jobs = {
        split: [
            _ShardJob(directory / f"{split}-{number:05d}.h5", contents.manifest.header(split), shard)
            for number, shard in enumerate(shards)
        ]
        for split, shards in contents.shards.items()
    }
    all_jobs = [job for of_split in jobs.values() for job in of_split]
    entries = iter(run_jobs(all_jobs, contents.stage, num_workers, progress))
    return {
        split: SplitEntry.of(
            [next(entries) for _ in of_split],
            (utterance.speaker for job in of_split for utterance in job.content.utterances),
        )
        for split, of_split in jobs.items()
    }
