"""Make a data directory for synthesis of a few voices of eSpeak NG, for users without a corpus at hand."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from speechdp.data.corpora.splits import deal
from speechdp.data.espeak.espeak import check_espeak
from speechdp.data.espeak.speaking import SpeakingJob, read_spoken
from speechdp.data.espeak.synthetic_plan import PlannedUtterance
from speechdp.data.espeak.voice_plan import plan_voices, voices_of
from speechdp.data.prepare.jobs import Progress
from speechdp.data.prepare.recognition import shards_of_split
from speechdp.data.prepare.recordings import keep_recording, list_recordings
from speechdp.data.prepare.synthesis import (
    PreparedSynthesis,
    SpectrogramOptions,
    finish_synthesis,
    new_texts,
)
from speechdp.data.prepare.synthetic import check_hours, collect_lexicon, speak_all
from speechdp.data.shards.data_dir import check_target, new_data_dir
from speechdp.data.shards.dataset import Dataset, Manifest, ShardEntry, SplitEntry
from speechdp.data.shards.layout import ShardHeader, Utterance
from speechdp.data.shards.shard import ShardWriter
from speechdp.data.signal.features import FeatureConfig
from speechdp.data.signal.spectrogram import compute_spectrogram
from speechdp.errors import ConfigError
from speechdp.files import scratch_folder
from speechdp.labels.symbols import SymbolInventory, SymbolKind


@dataclass(frozen=True)
class VoiceOptions:
    """What `speechdp prepare --synthetic HOURS DATA --task synthesis` was asked for.

    Attributes:
        hours: of speech in all, roughly; train gets 80 %, dev and test 10 % each.
        data: the data directory to make.
        speakers: how many voices, or the name of one; None: one.
        input: what texts are written in.
        spectrogram: settings of the spectrograms.
        keep_train: keep the recordings of train beside those of dev and test.
        num_shards: of the training part; dev and test get a quarter as many.
        sampling_rate: of the audio the spectrograms are computed from, in Hz.
        seed: equal seeds give equal bytes.
        overwrite: replace a data directory that exists.
        num_workers: processes at a time; None means one a core.
    """

    hours: float
    data: Path
    speakers: str | None = None
    input: SymbolKind = "characters"
    spectrogram: SpectrogramOptions = field(default_factory=SpectrogramOptions)
    keep_train: bool = False
    num_shards: int = 8
    sampling_rate: int = 16000
    seed: int = 1
    overwrite: bool = False
    num_workers: int | None = None


def prepare_voices(options: VoiceOptions, progress: Progress) -> PreparedSynthesis:
    """Speak a corpus and write it as a data directory of spectrograms, whole or not at all.

    Args:
        options: see VoiceOptions.
        progress: told the stage, how much is done, and of how much.

    Raises:
        ConfigError: eSpeak NG is not installed, or an option cannot be used.
        ShardError: the disk is full or cannot be written.
        RunError: a synthesis process died.
    """
    check_hours(options.hours)
    if options.num_shards < 1:
        raise ConfigError(f"--shards {options.num_shards}: give at least 1")
    voices = voices_of(options.speakers)
    check_espeak()
    features = options.spectrogram.config(options.sampling_rate)
    check_target(options.data, options.overwrite)
    plan = plan_voices(options.hours, voices, options.seed)
    with (
        new_data_dir(options.data, options.overwrite) as directory,
        scratch_folder(directory, ".speaking-") as scratch,
    ):
        jobs = {name: _jobs(name, plan[name], scratch, options) for name in plan}
        spoken = [job for of_split in jobs.values() for job in of_split]
        speak_all(spoken, options.num_workers, progress)
        lexicon = collect_lexicon(spoken) if options.input == "phones" else None
        symbols = SymbolInventory.of_kind(options.input, lexicon)
        manifest = Manifest(
            sampling_rate=options.sampling_rate,
            features=features,
            num_classes=symbols.num_symbols,
            alignment="text",
            split=f"synthetic:hours={options.hours:g},seed={options.seed};speakers={','.join(voices)}",
            splits={},
            stored="spectrograms",
        )
        work = _VoiceWork(directory, manifest, symbols, options.keep_train)
        splits = {name: work.write_split(name, jobs[name]) for name in jobs}
        list_recordings(directory, plan)
        finish_synthesis(directory, dataclasses.replace(manifest, splits=splits), symbols, lexicon)
    return PreparedSynthesis(Dataset.open(options.data, just_written=True), new_texts(plan))


def _jobs(
    name: str, utterances: list[PlannedUtterance], scratch: Path, options: VoiceOptions
) -> list[SpeakingJob]:
    sizes = [round(utterance.expected_s * 100) for utterance in utterances]
    dealt = deal(utterances, sizes, shards_of_split(name, options.num_shards), f"{options.seed} {name}")
    # Audio, of which spectrograms are made here: dev and test keep their recordings, too.
    return [
        SpeakingJob(
            stem=scratch / f"{name}-{number:05d}",
            utterances=tuple(part),
            sampling_rate=options.sampling_rate,
            features=FeatureConfig(),
            seed=options.seed,
            stored="audio",
        )
        for number, part in enumerate(dealt)
    ]


@dataclass(frozen=True)
class _VoiceWork:
    directory: Path
    manifest: Manifest
    symbols: SymbolInventory
    keep_train: bool

    def write_split(self, name: str, jobs: list[SpeakingJob]) -> SplitEntry:
        """Turn what has been spoken into a split's shards."""
        header = self.manifest.header(name)
        entries = []
        for job in jobs:
            with ShardWriter(self.directory / f"{job.stem.name}.h5", header) as writer:
                for spoken, content in read_spoken(job):
                    writer.add(self._utterance(spoken.utterance, content, header))
            entries.append(ShardEntry.of(writer))
        return SplitEntry.of(entries, (utterance.speaker for job in jobs for utterance in job.utterances))

    def _utterance(
        self, planned: PlannedUtterance, content: npt.NDArray[Any], header: ShardHeader
    ) -> Utterance:
        samples = content.astype(np.float32) / np.float32(32768.0)
        name = planned.utterance_id
        keep_recording(self.directory, header, name, samples, of_train=self.keep_train)
        features = compute_spectrogram(samples, header.sampling_rate, header.features)
        return Utterance(name, planned.speaker, planned.text, features, self.symbols.encode(planned.text))
