"""Divide a corpus of audio and transcripts into splits, and read the headers of the audio."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from speechdp.counting import counted, counted_clause
from speechdp.data.corpora.corpus import SPLIT_NAMES, Corpus, CorpusUtterance
from speechdp.data.corpora.same_sound import SameFiles, SoundIndex
from speechdp.data.corpora.splits import (
    OneSplit,
    SplitRule,
    choose_rule,
    options_apart,
    original_name,
    speakers_on_both_sides,
    split_corpus,
)
from speechdp.data.prepare.jobs import Progress
from speechdp.data.prepare.plausibility import warn_of_undivided
from speechdp.data.prepare.unreadable import channels_error, outside_error, unreadable_error
from speechdp.data.shards.dataset import Dataset
from speechdp.data.signal.audio import AudioInfo, AudioSource, common_sampling_rate, file_of, probe
from speechdp.data.signal.channel import Channel, channel_read
from speechdp.errors import OutsideRecordingError, SeveralChannelsError, UnreadableAudioError
from speechdp.options.prepare import PrepareOptions


@dataclass(frozen=True)
class Division:
    """A corpus in splits.

    Attributes:
        rule: the rule that divided it, as written in data.json.
        splits: the utterances of each split that holds any.
        notices: messages for the user.
        held_out: the splits that are separate sources.
        files: see Corpus.
    """

    rule: str
    splits: dict[str, list[CorpusUtterance]]
    notices: tuple[str, ...]
    held_out: tuple[str, ...]
    files: SameFiles | None


@dataclass(frozen=True)
class DividedCorpus(Division):
    """A corpus in splits, whose audio has been looked at.

    Attributes:
        sampling_rate: rate to which the audio is resampled, in Hz.
        seconds: duration of the audio of each utterance.
    """

    sampling_rate: int
    seconds: dict[AudioSource, float]

    @classmethod
    def of(
        cls, corpus: Corpus, options: PrepareOptions, progress: Progress, like: Dataset | None = None
    ) -> DividedCorpus:
        """Divide a corpus according to the options.

        Args:
            corpus: the whole corpus.
            options: how to divide it, and the seed.
            progress: called with the number of headers read.
            like: data of a model that the corpus is prepared for.  They determine the sampling rate, and all
                utterances go into test unless the options or the corpus say otherwise.

        Raises:
            ConfigError: the split is impossible, or a file is no audio of one channel, or of another rate.
        """
        return cls.probed(divide(corpus, options, for_model=like is not None), options, progress, like)

    @classmethod
    def probed(
        cls, division: Division, options: PrepareOptions, progress: Progress, like: Dataset | None = None
    ) -> DividedCorpus:
        """Read the headers of a divided corpus's audio.  Raises ConfigError as `of`."""
        splits = division.splits
        infos = probe_all(list(dict.fromkeys(u.audio for each in splits.values() for u in each)), progress)
        seconds = {info.source: info.num_samples / info.sampling_rate for info in infos}
        rate = common_sampling_rate(infos, options.resample) if like is None else like.sampling_rate
        notices = division.notices + channels_read(infos, options.files.channel if like is None else None)
        if options.is_for_recognition:
            notices += warn_of_splits(splits, division.held_out)
        notices += warn_of_same_sound(
            {name: [(u.utterance_id, u.audio) for u in part] for name, part in splits.items()},
            division.files,
        )
        if like is not None:
            notices += _resampled(infos, rate)
        return cls(**vars(replace(division, notices=notices)), sampling_rate=rate, seconds=seconds)


def divide(corpus: Corpus, options: PrepareOptions, *, for_model: bool = False) -> Division:
    """Divide a corpus according to the options.

    Args:
        corpus: the whole corpus.
        options: how to divide it, and the seed.
        for_model: whether it is prepared for a trained model.  Then no train split is needed, and all
            utterances go into test unless the options or the corpus say otherwise.

    Raises:
        ConfigError: the split is impossible.
    """
    is_divided = corpus.has_splits or corpus.held_out
    if for_model and not (options.split or options.held_out_speaker or is_divided):
        rule: SplitRule = OneSplit("all:test", "test")
    else:
        by_speaker = options.is_for_recognition
        rule = choose_rule(
            corpus, options.split, options.held_out_speaker, options.seed, by_speaker=by_speaker
        )
    may_be_like = options.is_for_recognition and not for_model
    splits = split_corpus(corpus, rule, needs_train=not for_model, may_be_like=may_be_like)
    return Division(rule.spec, splits, corpus.notices, tuple(corpus.held_out), corpus.files)


def warn_of_splits(
    splits: Mapping[str, Sequence[CorpusUtterance]], held_out: Collection[str] = ()
) -> tuple[str, ...]:
    """Return warnings of splits that give no meaningful error rate.

    Args:
        splits: the utterances of each split.
        held_out: the splits that are separate sources, which no --split changes.
    """
    words = (word for utterances in splits.values() for u in utterances for word in u.words)
    return (
        warn_of_speakers(splits, held_out)
        + _warn_of_single(splits, held_out)
        + _warn_of_large_dev(splits)
        + warn_of_undivided(words)
    )


def _warn_of_single(
    splits: Mapping[str, Sequence[CorpusUtterance]], held_out: Collection[str]
) -> tuple[str, ...]:
    """Warn of a dev or test split of one utterance; not without train, where the user chose what to test."""
    single = [name for name, utterances in splits.items() if name != "train" and len(utterances) == 1]
    if not single or "train" not in splits:
        return ()
    hold = "holds a single utterance" if len(single) == 1 else "hold a single utterance each"
    shares = ",".join(f"{name}=0.2" for name in ("dev", "test") if name not in held_out)
    larger = [f"give larger shares, e.g. --split random:{shares}"] if {*single} - {*held_out} else []
    larger += [f"give --{name} more" for name in single if name in held_out]
    problem = f"{' and '.join(single)} {hold}, on which an error rate means nothing"
    return (f"warning: {problem}; {', and '.join(larger)}",)


def _warn_of_large_dev(splits: Mapping[str, Sequence[CorpusUtterance]]) -> tuple[str, ...]:
    """Warn of a dev split that is larger than train: the two are probably exchanged."""
    dev, train = (len(splits.get(name, ())) for name in ("dev", "train"))
    if dev <= train or train == 0:
        return ()
    return (
        f"warning: dev holds {counted(dev, 'utterance')}, train only {train:,}; if that is not meant, see "
        "--split",
    )


def warn_of_speakers(
    splits: Mapping[str, Sequence[CorpusUtterance]], held_out: Collection[str] = ()
) -> tuple[str, ...]:
    """Warn of speakers in both train and a held-out split: new speakers would have more word errors.

    Args:
        splits: the utterances of each split.
        held_out: the splits that are separate sources.
    """
    names = speakers_on_both_sides(splits)
    if not names:
        return ()
    speakers_of = {
        name: {original_name(u.speaker) for u in utterances} for name, utterances in splits.items()
    }
    shared = [name for name in ("dev", "test") if speakers_of.get(name, set()) & {*names}]
    divided = set().union(*(speakers for name, speakers in speakers_of.items() if name not in held_out))
    given_anew = [name for name in shared if name in held_out] or (shared if len(divided) < 2 else [])
    if given_anew:
        apart = " and ".join(f"--{name}" for name in given_anew) + " of other speakers would keep them apart"
    else:
        wanted = [name for name in ("dev", "test") if name not in held_out]
        apart = f"{options_apart(divided, wanted)} keeps speakers apart"
    return (
        f"warning: {counted_clause(len(names), 'speaker', 'are both in train and held out')}, first "
        f"{names[0]}; results do not hold for new speakers ({apart})",
    )


def warn_of_same_sound(
    sounds: Mapping[str, Sequence[tuple[str, AudioSource]]], asked: SameFiles | None = None
) -> tuple[str, ...]:
    """Warn of held-out utterances whose sound an earlier split has, too: copies, or parts that overlap.

    Args:
        sounds: the id and the audio of each split's utterances.
        asked: files that have been looked up on the disk already.
    """
    order = [name for name in SPLIT_NAMES if name in sounds]
    files = SameFiles(((audio, name) for name in order for _, audio in sounds[name]), asked)
    warnings = []
    indices = {
        name: SoundIndex(files, ((audio, utterance) for utterance, audio in sounds[name]))
        for name in order[:-1]
    }
    for first, second in itertools.combinations(order, 2):
        found = ((utterance, indices[first].find(audio)) for utterance, audio in sounds[second])
        shared = [(utterance, other) for utterance, other in found if other is not None]
        if shared:
            (one, other), predicate = shared[0], f"have sound that {first} has, too"
            warnings.append(
                f"warning: {counted_clause(len(shared), f'{second} utterance', predicate)}, first {one} "
                f"({other} in {first}): a copy of the file, or an overlapping part, so its errors mean "
                "little; leave one of the two out"
            )
    return tuple(warnings)


def channels_read(infos: Iterable[AudioInfo], asked_for: Channel | None) -> tuple[str, ...]:
    """Report what is read of files with several channels, or that --channel has no effect without any.

    Args:
        infos: headers of all audio.
        asked_for: value of --channel.
    """
    files: dict[Channel, set[Path]] = {}
    for info in infos:
        if info.channel is not None:
            files.setdefault(info.channel, set()).add(file_of(info.source))
    if not files:
        return () if asked_for is None else (f"--channel {asked_for}: all audio has one channel already",)
    listed = ", ".join(
        f"{channel_read(channel)} of {len(those):,}"
        for channel, those in sorted(files.items(), key=lambda item: str(item[0]))
    )
    return (f"of {counted(len(set().union(*files.values())), 'file')} of several channels: {listed}",)


def _resampled(infos: Sequence[AudioInfo], rate: int) -> tuple[str, ...]:
    """Report audio that is resampled to the rate of a model's data."""
    lower = [info for info in infos if info.sampling_rate < rate]
    others = [info for info in infos if info.sampling_rate != rate]
    if lower:
        files = counted_clause(len(lower), "file", f"have {lower[0].sampling_rate} Hz")
        return (
            f"warning: {files}, less than the {rate} Hz that the model was trained on; expect more errors",
        )
    return (f"resampled {counted(len(others), 'file')} to {rate} Hz",) if others else ()


def probe_all(sources: Sequence[AudioSource], progress: Progress) -> list[AudioInfo]:
    """Read the headers of audio files.  Raises ConfigError if one is not audio of one channel."""
    infos = []
    errors: dict[Path, UnreadableAudioError] = {}  # a failed download spoils many: all are named at once
    channels: dict[Path, SeveralChannelsError] = {}
    outside: list[OutsideRecordingError] = []
    for number, source in enumerate(sources, 1):
        try:
            infos.append(probe(source))
        except UnreadableAudioError as error:
            errors.setdefault(file_of(source), error)
        except SeveralChannelsError as error:
            channels.setdefault(file_of(source), error)
        except OutsideRecordingError as error:
            outside.append(error)
        if number % 100 == 0 or number == len(sources):
            progress("reading headers", number, len(sources))
    num_files = len({file_of(source) for source in sources})
    if errors:
        raise unreadable_error(errors, num_files)
    if channels:
        raise channels_error(channels, num_files)
    if outside:
        raise outside_error(outside, len(sources))
    return infos
