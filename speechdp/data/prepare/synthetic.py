"""Make a data directory of synthetic speech with exact phone times, for users without a corpus at hand.

Voices of one synthesiser are not real speakers: figures on this data say that the machinery works and how
fast it is, not how well a model would recognise people.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speechdp.data.corpora.splits import deal
from speechdp.data.espeak.espeak import check_espeak
from speechdp.data.espeak.speaking import SpeakingJob, SpokenUtterance, read_spoken
from speechdp.data.espeak.synthetic_plan import PlannedUtterance, plan_corpus
from speechdp.data.prepare.jobs import Progress, run_jobs
from speechdp.data.prepare.recognition import Prepared, finish, shards_of_split
from speechdp.data.shards.data_dir import check_target, new_data_dir
from speechdp.data.shards.dataset import Dataset, Manifest, ShardEntry, SplitEntry
from speechdp.data.shards.layout import AudioUtterance, Stored, Utterance
from speechdp.data.shards.shard import ShardWriter
from speechdp.data.signal.features import FeatureConfig, check_mel_bins
from speechdp.errors import ConfigError
from speechdp.files import scratch_folder
from speechdp.labels.hmm import StateInventory, alignment_from_phone_times
from speechdp.labels.lexicon import Lexicon

_MAX_HOURS = 10_000.0
#: Pronunciations rarer than this share of a word's, or beyond so many, are left out of the lexicon.
_FEWEST_SHARE = 0.02
_MOST_VARIANTS = 4


@dataclass(frozen=True)
class SyntheticOptions:
    """What `speechdp prepare --synthetic HOURS DATA` was asked for.

    Attributes:
        hours: of speech in all, roughly; train gets 80 %, dev and test 10 % each.
        data: the data directory to make.
        num_shards: of the training part; dev and test get a quarter as many.
        features: what to compute.
        sampling_rate: of the audio the features are computed from, in Hz.
        seed: equal seeds give equal bytes.
        overwrite: replace a data directory that exists.
        num_workers: processes at a time; None means one a core.
        stored: features, or the audio to make them from while training.
    """

    hours: float
    data: Path
    num_shards: int = 8
    features: FeatureConfig = field(default_factory=FeatureConfig)
    sampling_rate: int = 16000
    seed: int = 1
    overwrite: bool = False
    num_workers: int | None = None
    stored: Stored = "features"


def prepare_synthetic(options: SyntheticOptions, progress: Progress) -> Prepared:
    """Speak a corpus and write it as a data directory, whole or not at all.

    Args:
        options: see SyntheticOptions.
        progress: told the stage, how much is done, and of how much.

    Raises:
        ConfigError: eSpeak NG is not installed, or an option cannot be used.
        ShardError: the disk is full or cannot be written.
        RunError: a synthesis process died.
    """
    check_hours(options.hours)
    if options.num_shards < 1:
        raise ConfigError(f"--shards {options.num_shards}: give at least 1")
    check_espeak()
    check_mel_bins(options.sampling_rate, options.features)
    check_target(options.data, options.overwrite)
    plan = plan_corpus(options.hours, options.seed)
    with (
        new_data_dir(options.data, options.overwrite) as directory,
        scratch_folder(directory, ".speaking-") as scratch,
    ):
        jobs = {name: _jobs(name, plan[name], scratch, options) for name in plan}
        speak_all([job for of_split in jobs.values() for job in of_split], options.num_workers, progress)
        lexicon = collect_lexicon(jobs["train"])
        manifest = Manifest(
            sampling_rate=options.sampling_rate,
            features=options.features,
            num_classes=StateInventory(lexicon.phones).num_classes,
            alignment="exact",
            split=f"synthetic:hours={options.hours:g},seed={options.seed}",
            splits={},
            stored=options.stored,
        )
        splits = {name: _write_split(name, jobs[name], manifest, lexicon, directory) for name in jobs}
        finish(directory, manifest, splits, lexicon)
    return Prepared(Dataset.open(options.data, just_written=True), 0)


def check_hours(hours: float) -> None:
    """Refuse hours that cannot be spoken.  Raises ConfigError."""
    if not 0 < hours <= _MAX_HOURS:
        raise ConfigError(f"--synthetic {hours:g}: give hours of speech above 0, e.g. 1")


def _jobs(
    name: str, utterances: list[PlannedUtterance], scratch: Path, options: SyntheticOptions
) -> list[SpeakingJob]:
    sizes = [round(utterance.expected_s * 100) for utterance in utterances]
    num_shards = shards_of_split(name, options.num_shards)
    dealt = deal(utterances, sizes, num_shards, f"{options.seed} {name}")
    return [
        SpeakingJob(
            scratch / f"{name}-{number:05d}",
            tuple(part),
            options.sampling_rate,
            options.features,
            options.seed,
            options.stored,
        )
        for number, part in enumerate(dealt)
    ]


def speak_all(jobs: Sequence[SpeakingJob], num_workers: int | None, progress: Progress) -> None:
    """Run all jobs, each in a process of its own.

    Raises:
        ConfigError: eSpeak NG does not do it.
        RunError: a process died.
    """
    run_jobs(jobs, "speaking", num_workers, progress, always_apart=True)


def collect_lexicon(jobs: Sequence[SpeakingJob]) -> Lexicon:
    """Take each word's pronunciations from what eSpeak NG said in the training part."""
    counts: dict[str, Counter[tuple[str, ...]]] = {}
    for job in jobs:
        for spoken, _ in read_spoken(job):
            for word, phones in spoken.words:
                if phones:
                    counts.setdefault(word, Counter())[tuple(phone for phone, _, _ in phones)] += 1
    return Lexicon({word: _usual_variants(counts[word]) for word in sorted(counts)})


def _usual_variants(counts: Counter[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    ranked = sorted(counts, key=lambda variant: (-counts[variant], variant))
    fewest = _FEWEST_SHARE * counts.total()
    return tuple(variant for variant in ranked[:_MOST_VARIANTS] if counts[variant] >= fewest)


def _write_split(
    name: str, jobs: Sequence[SpeakingJob], manifest: Manifest, lexicon: Lexicon, directory: Path
) -> SplitEntry:
    kind = AudioUtterance if manifest.stored == "audio" else Utterance
    inventory = StateInventory(lexicon.phones)
    entries = []
    for job in jobs:
        with ShardWriter(directory / f"{job.stem.name}.h5", manifest.header(name)) as writer:
            for spoken, content in read_spoken(job):
                targets = _targets(spoken, manifest.features.frame_shift_s, lexicon, inventory)
                planned = spoken.utterance
                writer.add(kind(planned.utterance_id, planned.speaker, planned.text, content, targets))
        entries.append(ShardEntry.of(writer))
    return SplitEntry.of(entries, (utterance.speaker for job in jobs for utterance in job.utterances))


def _targets(
    spoken: SpokenUtterance, frame_shift_s: float, lexicon: Lexicon, inventory: StateInventory
) -> npt.NDArray[np.int32]:
    times: list[tuple[str, float, float]] = []
    for word, phones in spoken.words:
        if all(phone in inventory.phones for phone, _, _ in phones):
            times.extend(phones)
        else:  # a phone the training part never had: the usual pronunciation, spread over the word
            times.extend(_spread(lexicon.pronunciations[word][0], phones[0][1], phones[-1][2]))
    return alignment_from_phone_times(times, spoken.num_frames, frame_shift_s, inventory)


def _spread(phones: Sequence[str], start_s: float, end_s: float) -> list[tuple[str, float, float]]:
    edges = np.linspace(start_s, end_s, len(phones) + 1).tolist()
    return list(zip(phones, edges[:-1], edges[1:], strict=True))
