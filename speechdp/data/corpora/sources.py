"""Make one corpus of several sources: some are divided by a rule, others are dev or test as a whole."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from speechdp.counting import counted, counted_clause
from speechdp.data.corpora.corpus import SPLIT_NAMES, Corpus
from speechdp.data.corpora.same_sound import SameFiles, SoundIndex, times_of
from speechdp.data.corpora.splits import RANDOM_DEFAULT, original_name, original_start, without_test
from speechdp.data.signal.audio import AudioSource
from speechdp.errors import ConfigError


@dataclass(frozen=True)
class Source:
    """One place from which a corpus is read.

    Attributes:
        path: as given by the user.
        split: `dev` or `test` if all of it is that; None: a rule divides it.
    """

    path: Path
    split: str | None = None

    def __str__(self) -> str:
        """Return the source as written on the command line."""
        return str(self.path) if self.split is None else f"--{self.split} {self.path}"


def joined(parts: Sequence[tuple[Source, Corpus]], *, is_ruled: bool = False) -> Corpus:
    """Return the utterances of all sources as one corpus.

    Audio in a source that is divided may also be in one that is dev or test, e.g. in a folder of that source,
    as a copy or in another cut of a recording.  It then stays only in the latter; copies of it that Kaldi's
    scripts changed are left out.  If two sources use an id for different utterances, all ids get the name of
    their folder.  Speakers of the same name are one speaker.

    Args:
        parts: each source and the corpus read from it.
        is_ruled: --split divides the sources, whatever division of their own they have.

    Raises:
        ConfigError: the same audio is in two sources that are divided, or in dev and test; nothing is left to
            be divided; or a source's own division conflicts with this.
    """
    if len(parts) == 1 and parts[0][0].split is None:
        return parts[0][1]
    parts = _with_one_division(parts, is_ruled=is_ruled)
    files = SameFiles((u.audio, source) for source, corpus in parts for u in corpus.utterances)
    parts = _without_held_out(parts, files)
    _refuse_twice(parts, files)
    names = _names([source.path for source, _ in parts])
    notices: tuple[str, ...] = ()
    if not _are_ids_apart(parts):
        parts = [(source, _renamed(each, name)) for (source, each), name in zip(parts, names, strict=True)]
        example = parts[0][1].utterances[0].utterance_id
        notices = (
            f"sources share utterance ids, so each id now begins with the name of its source, e.g. {example}",
        )
    held_out: dict[str, str] = {}
    for (source, _), name in zip(parts, names, strict=True):
        if source.split is not None:
            held_out[source.split] = "+".join(filter(None, (held_out.get(source.split), name)))
    divided = [source for source, _ in parts if source.split is None]
    return Corpus.of(
        ", ".join(map(str, divided or [source for source, _ in parts])),
        chain.from_iterable(
            (corpus if source.split is None else _in_split(corpus, source.split)).utterances
            for source, corpus in parts
        ),
        may_lack_text=True,  # each has been checked
        notices=(*(f"{each.source}: {notice}" for _, each in parts for notice in each.notices), *notices),
        held_out=held_out,
        files=files,
    )


def _with_one_division(
    parts: Sequence[tuple[Source, Corpus]], *, is_ruled: bool
) -> Sequence[tuple[Source, Corpus]]:
    """Make sure that all sources have a division of their own, or none has.

    Raises:
        ConfigError: only some of the sources to be divided have their own division, and neither --split nor a
            source of dev is given; or one fills a split that is a separate source.
    """
    if is_ruled:
        return [(source, _in_split(corpus, None)) for source, corpus in parts]
    _refuse_own_splits(parts)
    divided = [(source, corpus) for source, corpus in parts if source.split is None]
    own = [source for source, corpus in divided if corpus.has_splits]
    others = [source for source, corpus in divided if not corpus.has_splits]
    if not own or not others:
        return parts
    given = {source.split for source, _ in parts}
    if "dev" not in given:  # else everything without a split is train
        rule = without_test(RANDOM_DEFAULT) if "test" in given else RANDOM_DEFAULT
        raise ConfigError(
            f"{others[0]}: has no division into train, dev and test of its own, and {own[0]} has one; divide "
            f"both by a rule, e.g. --split {rule}"
        )
    return [(source, _in_split(corpus, "train") if source in others else corpus) for source, corpus in parts]


def _in_split(corpus: Corpus, split: str | None) -> Corpus:
    utterances = (u if u.split == split else replace(u, split=split) for u in corpus.utterances)
    return replace(corpus, utterances=tuple(utterances))


def _refuse_own_splits(parts: Sequence[tuple[Source, Corpus]]) -> None:
    """Refuse a source's own division if it has a split that is also given as a separate source."""
    given = {source.split for source, _ in parts}
    for source, corpus in parts:
        own = {utterance.split for utterance in corpus.utterances} if source.split is None else set()
        for split in (name for name in SPLIT_NAMES if name in own & given):
            raise ConfigError(
                f"{corpus.source}: has a {split} split of its own; leave --{split} out, or give only its "
                "utterances to train on"
            )


def _without_held_out(
    parts: Sequence[tuple[Source, Corpus]], files: SameFiles
) -> list[tuple[Source, Corpus]]:
    """Remove from the sources to be divided those utterances whose sound is given for dev or test."""
    held_out = SoundIndex(
        files,
        (
            (u.audio, source)
            for source, corpus in parts
            if source.split is not None
            for u in corpus.utterances
        ),
    )
    are_several = sum(source.split is None for source, _ in parts) > 1

    def left_of(source: Source, corpus: Corpus) -> Corpus:
        if source.split is not None:
            return corpus
        where = ((u.utterance_id, held_out.find(u.audio)) for u in corpus.utterances)
        there = {utterance_id: source for utterance_id, source in where if source is not None}
        if not there:
            return corpus
        # Changed copies go, too: one at another speed, for example, holds the speech that is tested.
        taken = set(map(original_name, there))
        stay = tuple(u for u in corpus.utterances if original_name(u.utterance_id) not in taken)
        counts = Counter(there.values())
        if not stay:
            named = " and ".join(map(str, counts))
            remedy = "leave it out as a SOURCE" if are_several else "give others to train on"
            raise ConfigError(f"{source}: all of its utterances are in {named}, too; {remedy}")
        split_notices = [
            counted_clause(number, "utterance", f"are also in {each.path}, and used for {each.split} only")
            for each, number in counts.items()
        ]
        copies = len(corpus.utterances) - len(stay) - len(there)
        if copies:
            split_notices.append(
                f"left out: {counted(copies, 'utterance')} changed from those, by Kaldi's names for such"
            )
        return replace(corpus, utterances=stay, notices=(*corpus.notices, *split_notices))

    return [(source, left_of(source, corpus)) for source, corpus in parts]


def _refuse_twice(parts: Sequence[tuple[Source, Corpus]], files: SameFiles) -> None:
    first: dict[tuple[Hashable, ...], tuple[Source, AudioSource]] = {}
    for source, corpus in parts:
        for utterance in corpus.utterances:
            place = files.of(utterance.audio), times_of(utterance.audio)
            earlier, audio = first.setdefault(place, (source, utterance.audio))
            if earlier is not source:
                copied = "" if audio == utterance.audio else f" (there {audio})"
                raise ConfigError(
                    f"{utterance.audio}: is read from {earlier}{copied} and from {source}; give sources that "
                    "have no audio in common"
                )


def _are_ids_apart(parts: Sequence[tuple[Source, Corpus]]) -> bool:
    ids = Counter(utterance.utterance_id for _, corpus in parts for utterance in corpus.utterances)
    return all(count == 1 for count in ids.values())


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each folder, without spaces and different from the others."""
    whole = [os.path.realpath(path) for path in paths]
    names = [Path(path).name for path in whole]
    if len(set(names)) < len(names):
        common = os.path.commonpath(whole)
        names = [os.path.relpath(path, common).replace(os.sep, "-") for path in whole]
    return ["_".join(name.split()) for name in names]


def _renamed(corpus: Corpus, name: str) -> Corpus:
    """Insert a name into all ids, after the prefix that Kaldi's scripts add to ids of changed copies."""

    def with_name(utterance_id: str) -> str:
        start = original_start(utterance_id)
        return f"{utterance_id[:start]}{name}-{utterance_id[start:]}"

    renamed = (
        replace(u, utterance_id=with_name(u.utterance_id), own_id=u.utterance_id) for u in corpus.utterances
    )
    return replace(corpus, utterances=tuple(renamed))
