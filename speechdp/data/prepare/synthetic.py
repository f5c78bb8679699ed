"""Prepare synthetic speech of eSpeak NG, with exact phone times, for users without a corpus at hand.

Voices of one synthesiser are not real speakers: figures on these data show that the system works and how fast
it is, not how well a model would recognise people.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speechdp.data.espeak.espeak import check_espeak
from speechdp.data.espeak.speaking import SpeakingJob, SpokenUtterance
from speechdp.data.espeak.synthetic_plan import PlannedUtterance, plan_corpus
from speechdp.data.espeak.voice_plan import plan_voices, voices_of
from speechdp.data.prepare.contents import Contents, deal_splits
from speechdp.data.prepare.jobs import Progress, run_jobs
from speechdp.data.prepare.language_model import prepare_language_model, users_model
from speechdp.data.prepare.recognition import RecognitionLabels
from speechdp.data.prepare.spectrograms import SynthesisLabels
from speechdp.data.shards.layout import AudioUtterance, ShardHeader, Stored, Utterance
from speechdp.data.signal.features import FeatureConfig, check_mel_bins, shift_s
from speechdp.labels.hmm import StateInventory, alignment_from_phone_times
from speechdp.labels.lexicon import Lexicon
from speechdp.labels.symbols import SymbolInventory
from speechdp.options.prepare import PrepareOptions

#: Pronunciations with less than this share of a word's occurrences, or beyond this number, are left out.
_FEWEST_SHARE = 0.02
_MOST_VARIANTS = 4


def speak_for_recognition(options: PrepareOptions, scratch: Path, progress: Progress) -> Contents:
    """Let many voices speak digits and commands.

    Raises:
        ConfigError: eSpeak NG is not installed or fails, or the features cannot be computed.
        RunError: a process was killed.
    """
    check_espeak()
    features = options.feature_config()
    check_mel_bins(options.synthetic_rate, features)
    plan = plan_corpus(options.hours, options.seed)
    spoken = _speak(plan, (features, options.store), options, scratch, progress)
    lexicon = _collect_lexicon(spoken["train"])
    texts = {name: [utterance.text.split() for utterance in each] for name, each in plan.items()}
    model = prepare_language_model(
        options.for_language_model, lexicon, texts, users_model(options.for_language_model)
    )
    inventory = StateInventory(lexicon.phones)
    labels = RecognitionLabels(lexicon, inventory, features, options.synthetic_rate, model)
    return Contents(
        manifest=labels.manifest("exact", _rule(options), options),
        shards={name: [TimedShard(job, lexicon, inventory) for job in jobs] for name, jobs in spoken.items()},
        stage="writing shards",
        save=labels.save,
    )


def speak_for_synthesis(options: PrepareOptions, scratch: Path, progress: Progress) -> Contents:
    """Let a few voices speak; all splits have the same voices.

    Raises:
        ConfigError: as `speak_for_recognition`; no such voice, spectrograms that cannot be computed.
        RunError: a process was killed.
    """
    wanted = options.for_synthesis
    voices = voices_of(wanted.speakers)
    check_espeak()
    features = options.spectrogram_config(options.synthetic_rate)
    plan = plan_voices(options.hours, voices, options.seed)
    # Speak audio, and compute spectrograms later: dev and test also keep their recordings.
    spoken = _speak(plan, (FeatureConfig(), "audio"), options, scratch, progress)
    jobs = [job for of_split in spoken.values() for job in of_split]
    lexicon = _collect_lexicon(jobs) if wanted.input == "phones" else None
    labels = SynthesisLabels(
        SymbolInventory.of_kind(wanted.input, lexicon), lexicon, features, options.synthetic_rate
    )
    rule = f"{_rule(options)};speakers={','.join(voices)}"
    return labels.contents(rule, spoken, keep_train=wanted.keep_recordings == "all")


def _rule(options: PrepareOptions) -> str:
    return f"synthetic:hours={options.hours:g},seed={options.seed}"


def _speak(
    plan: Mapping[str, Sequence[PlannedUtterance]],
    content: tuple[FeatureConfig, Stored],
    options: PrepareOptions,
    scratch: Path,
    progress: Progress,
) -> dict[str, list[SpeakingJob]]:
    """Speak the planned utterances, one job per shard, each in a separate process."""
    features, stored = content
    dealt = deal_splits(plan, lambda u: round(u.expected_s * 100), options.shards, options.seed)
    rate, seed = options.synthetic_rate, options.seed
    jobs = {
        name: [
            SpeakingJob(scratch / f"{name}-{number:05d}", part, rate, features, seed, stored)
            for number, part in enumerate(parts)
        ]
        for name, parts in dealt.items()
    }
    all_jobs = [job for of_split in jobs.values() for job in of_split]
    run_jobs(all_jobs, "speaking", options.workers, progress, always_apart=True)
    return jobs


@dataclass(frozen=True)
class TimedShard:
    """A shard of spoken utterances; targets come from the times of the phones."""

    job: SpeakingJob
    lexicon: Lexicon
    inventory: StateInventory

    @property
    def utterances(self) -> tuple[PlannedUtterance, ...]:
        """All utterances, in the shard's order."""
        return self.job.utterances

    def ready(self, _path: Path, header: ShardHeader) -> Iterator[Utterance | AudioUtterance]:
        """Yield each utterance with its features (or samples) and targets."""
        kind = AudioUtterance if header.stored == "audio" else Utterance
        for spoken, content in self.job.spoken():
            step_s = shift_s(header.sampling_rate, header.features)
            targets = _targets(spoken, step_s, self.lexicon, self.inventory)
            planned = spoken.utterance
            yield kind(planned.utterance_id, planned.speaker, planned.text, content, targets)


def _collect_lexicon(jobs: Sequence[SpeakingJob]) -> Lexicon:
    """Collect each word's pronunciations from eSpeak NG's output."""
    counts: dict[str, Counter[tuple[str, ...]]] = {}
    for job in jobs:
        for spoken, _ in job.spoken():
            for word, phones in spoken.words:
                if phones:
                    counts.setdefault(word, Counter())[tuple(phone for phone, _, _ in phones)] += 1
    return Lexicon({word: _usual_variants(counts[word]) for word in sorted(counts)})


def _usual_variants(counts: Counter[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    ranked = sorted(counts, key=lambda variant: (-counts[variant], variant))
    fewest = _FEWEST_SHARE * counts.total()
    return tuple(variant for variant in ranked[:_MOST_VARIANTS] if counts[variant] >= fewest)


def _targets(
    spoken: SpokenUtterance, frame_shift_s: float, lexicon: Lexicon, inventory: StateInventory
) -> npt.NDArray[np.int32]:
    times: list[tuple[str, float, float]] = []
    for word, phones in spoken.words:
        if all(phone in inventory.phones for phone, _, _ in phones):
            times.extend(phones)
        else:  # a phone that never occurs in train: take the usual pronunciation, spread over the word
            times.extend(_spread(lexicon.pronunciations[word][0], phones[0][1], phones[-1][2]))
    return alignment_from_phone_times(times, spoken.num_frames, frame_shift_s, inventory)


def _spread(phones: Sequence[str], start_s: float, end_s: float) -> list[tuple[str, float, float]]:
    edges = np.linspace(start_s, end_s, len(phones) + 1).tolist()
    return list(zip(phones, edges[:-1], edges[1:], strict=True))
