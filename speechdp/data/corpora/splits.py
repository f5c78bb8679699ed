"""Divide a corpus into train, dev and test, and a split into shards."""

from __future__ import annotations

import hashlib
import heapq
import math
import random
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from speechdp.data.corpora.corpus import SPLIT_NAMES, UNKNOWN_SPEAKER, Corpus, CorpusUtterance
from speechdp.errors import ConfigError

INDEX_DEFAULT = "index:test=0-4,dev=5-9"
RANDOM_DEFAULT = "random:dev=0.05,test=0.05"
#: Value in data.json for splits that are the corpus's own.
BY_CORPUS = "corpus"
SPEAKERS_DEFAULT = "speakers:dev=0.1,test=0.1"
#: Fewer speakers cannot fill train, dev and test.
_FEWEST_SPEAKERS = 3
#: The least share of a corpus that the split by takes must leave for training to be the default.
_LEAST_TRAINED = 0.1
_FORMS = (
    "speakers:dev=0.1,test=0.1 or random:dev=0.05,test=0.05 or index:test=0-4,dev=5-9 or "
    "speaker:test=NAME,dev=NAME"
)

#: Prefixes and suffixes that Kaldi's scripts add to the names of utterances and speakers that they change and
#: add; there are several if one script changes what another has added.
_CHANGED = re.compile(
    r"(?:(?:[svp][pv]\d+\.\d+|rvb\d+|rev\d+)[-_])*(?P<name>.+?)(?:-(?:reverb|noise|music|babble))*"
)

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class SplitRule(ABC):
    """Decides which split an utterance belongs to; `spec` is the rule as written in data.json."""

    spec: str

    @property
    @abstractmethod
    def named(self) -> tuple[str, ...]:
        """The splits other than train that the rule fills."""

    @abstractmethod
    def split_of(self, utterance: CorpusUtterance) -> str:
        """Return train, dev or test."""


@dataclass(frozen=True)
class IndexSplit(SplitRule):
    """Splits by the number of the take; `parts` holds inclusive ranges for each split."""

    parts: dict[str, tuple[tuple[int, int], ...]]

    @property
    def named(self) -> tuple[str, ...]:
        return tuple(self.parts)

    def split_of(self, utterance: CorpusUtterance) -> str:
        if utterance.index is None:
            raise ConfigError(
                f"--split {self.spec}: utterance {utterance.utterance_id} has no index; use a --pattern with "
                f"{{index}} or --split {RANDOM_DEFAULT}"
            )
        for name, ranges in self.parts.items():
            if any(low <= utterance.index <= high for low, high in ranges):
                return name
        return "train"


@dataclass(frozen=True)
class RandomSplit(SplitRule):
    """Splits by a hash of seed and utterance id: adding utterances or sources does not move the others."""

    parts: dict[str, float]
    seed: int

    @property
    def named(self) -> tuple[str, ...]:
        return _with_a_share(self.parts)

    def split_of(self, utterance: CorpusUtterance) -> str:
        place = self.place_of(utterance)
        for name, fraction in self.parts.items():
            if place < fraction:
                return name
            place -= fraction
        return "train"

    def place_of(self, utterance: CorpusUtterance) -> float:
        """Return the place of an utterance in [0, 1), uniform; copies have the place of their original.

        It is computed from the id in the utterance's source: a further source with the same ids changes
        nothing.
        """
        name = original_name(utterance.own_id or utterance.utterance_id)
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return int.from_bytes(digest[:8], "big") / 2.0**64


@dataclass(frozen=True)
class SpeakerSplit(SplitRule):
    """Splits by speaker; `parts` holds the speakers of each split, whose copies go with them."""

    parts: dict[str, tuple[str, ...]]

    @property
    def named(self) -> tuple[str, ...]:
        return tuple(self.parts)

    def split_of(self, utterance: CorpusUtterance) -> str:
        named, of_original = self._split_of_speaker
        name = utterance.speaker
        return named.get(name) or of_original.get(original_name(name), "train")

    @cached_property
    def _split_of_speaker(self) -> tuple[dict[str, str], dict[str, str]]:
        """The split of each speaker, by name and by the name of the original."""
        of_first = list(reversed(self.parts.items()))  # a speaker named twice goes into the first split
        named = {speaker: name for name, speakers in of_first for speaker in speakers}
        return named, {original_name(speaker): name for speaker, name in named.items()}


@dataclass(frozen=True)
class SpeakerShares:
    """Makes a rule by speaker: `parts` holds each split's share of the speakers, `seed` chooses them."""

    spec: str
    parts: dict[str, float]
    seed: int

    @property
    def named(self) -> tuple[str, ...]:
        """The splits other than train that the rule fills."""
        return _with_a_share(self.parts)

    def chosen_from(self, corpus: Corpus, held_out_speaker: str | None) -> SpeakerSplit:
        """Choose the speakers of dev and test: the nearest whole number to each share, but at least one.

        Args:
            corpus: the corpus whose speakers are divided.
            held_out_speaker: a speaker who is in test anyway.

        Raises:
            ConfigError: no speaker is left for train.
        """
        # Copies of a speaker, e.g. at other speeds, do not count as other speakers.
        copies: dict[str, list[str]] = {}
        for name in corpus.speakers:
            copies.setdefault(original_name(name), []).append(name)
        if held_out_speaker is not None:
            copies.pop(original_name(held_out_speaker), None)
        speakers = list(copies)
        names = [name for name in self.named if name != "test" or held_out_speaker is None]
        counts = {name: max(1, round(self.parts[name] * len(speakers))) for name in names}
        if sum(counts.values()) >= len(speakers):
            # With a held-out speaker as test, only a random dev part of the others is possible.
            can_be_apart = held_out_speaker is None and len(speakers) > 1
            at_random = "random:" + ",".join(f"{name}=0.05" for name in self.named)
            remedy = options_apart(speakers, self.named) if can_be_apart else f"--split {at_random}"
            raise ConfigError(
                f"{corpus.source}: --split {self.spec} needs {sum(counts.values()) + 1} speakers, it has "
                f"{len(speakers)}; choose {remedy}"
            )
        order = iter(
            sorted(speakers, key=lambda name: hashlib.sha256(f"{self.seed} {name}".encode()).digest())
        )
        chosen = {
            name: tuple(sorted(speaker for _ in range(num) for speaker in copies[next(order)]))
            for name, num in counts.items()
        }
        return SpeakerSplit(self.spec, chosen)


@dataclass(frozen=True)
class OneSplit(SplitRule):
    """Puts every utterance into the same split."""

    name: str

    @property
    def named(self) -> tuple[str, ...]:
        return (self.name,)

    def split_of(self, utterance: CorpusUtterance) -> str:
        return self.name


_ALL_TRAIN = OneSplit("all:train", "train")


@dataclass(frozen=True)
class CorpusSplit(SplitRule):
    """Splits as the corpus itself specifies."""

    @property
    def named(self) -> tuple[str, ...]:
        return ()

    def split_of(self, utterance: CorpusUtterance) -> str:
        assert utterance.split is not None
        return utterance.split


@dataclass(frozen=True)
class GivenSplits(SplitRule):
    """Dev or test, or both, are separate sources (`given`); `base` divides the utterances outside of them."""

    given: tuple[str, ...]
    base: SplitRule

    @property
    def named(self) -> tuple[str, ...]:
        return (*self.given, *(name for name in self.base.named if name != "train"))

    def split_of(self, utterance: CorpusUtterance) -> str:
        return utterance.split if utterance.split in self.given else self.base.split_of(utterance)


@dataclass(frozen=True)
class HeldOutSpeaker(SplitRule):
    """One speaker is the test part; `base` takes the dev part from the others, and the rest is train."""

    speaker: str
    base: SplitRule

    @property
    def named(self) -> tuple[str, ...]:
        return ("test", *(name for name in self.base.named if name == "dev"))

    def split_of(self, utterance: CorpusUtterance) -> str:
        if self._is_of_speaker(utterance):
            return "test"
        return "dev" if self.base.split_of(utterance) == "dev" else "train"

    def leaves_any_of(self, corpus: Corpus) -> bool:
        """Return whether there are utterances of other speakers."""
        return not all(map(self._is_of_speaker, corpus.utterances))

    def _is_of_speaker(self, utterance: CorpusUtterance) -> bool:
        return original_name(utterance.speaker) == original_name(self.speaker)


def original_name(name: str) -> str:
    """Return the name of the original of a changed copy of an utterance or speaker, by Kaldi's naming.

    Example:
        >>> original_name("sp0.9-ann"), original_name("ann-reverb"), original_name("ann")
        ('ann', 'ann', 'ann')
    """
    match = _CHANGED.fullmatch(name)
    return name if match is None else match["name"]


def original_start(name: str) -> int:
    """Return the position in a name at which the original's name begins.

    Example:
        >>> original_start("sp0.9-ann"), original_start("ann-reverb")
        (6, 0)
    """
    match = _CHANGED.fullmatch(name)
    return 0 if match is None else match.start("name")


def options_apart(speakers: Collection[str], wanted: Collection[str] = ("dev", "test")) -> str:
    """Return options that keep two or more speakers apart in the wanted splits; of two, one is tested."""
    if len(speakers) > len(wanted):
        return "--split speakers:" + ",".join(f"{name}=0.1" for name in wanted)
    return f"--held-out-speaker {min(set(speakers) - {UNKNOWN_SPEAKER})} --split random:dev=0.1"


def parse_split(spec: str, seed: int) -> SplitRule | SpeakerShares:
    """Parse the value of --split.  Raises ConfigError if it has none of the forms."""
    kind, _, rest = spec.partition(":")
    parts: dict[str, str] = {}
    for part in rest.split(","):
        name, equals, value = part.partition("=")
        if not equals or name not in ("dev", "test") or name in parts or not value:
            raise ConfigError(f"--split {spec}: {part!r} is not understood; write {_FORMS}")
        parts[name] = value
    try:
        if kind == "index":
            return IndexSplit(spec, {name: _ranges(value) for name, value in parts.items()})
        if kind == "random":
            return RandomSplit(spec, _fractions(parts), seed)
        if kind == "speakers":
            return SpeakerShares(spec, _fractions(parts), seed)
    except ValueError as error:
        raise ConfigError(f"--split {spec}: {error}; write {_FORMS}") from error
    if kind == "speaker":
        return SpeakerSplit(spec, {name: tuple(value.split("+")) for name, value in parts.items()})
    raise ConfigError(f"--split {spec}: {kind!r} is not known; write {_FORMS}")


def choose_rule(
    corpus: Corpus, spec: str | None, held_out_speaker: str | None, seed: int, *, by_speaker: bool = True
) -> SplitRule:
    """Return the rule that the options specify.

    The default is the corpus's own division; by index if the corpus counts its takes and enough are left for
    training; by speaker if there are three or more; else at random.  If dev is a separate source, everything
    else is train; if only test is, the default rule takes only dev out of the rest.

    Args:
        corpus: the corpus to divide.
        spec: value of --split, or None.
        held_out_speaker: the speaker who is the test split, or None.
        seed: of random choices.
        by_speaker: whether the default keeps speakers apart.

    Raises:
        ConfigError: a speaker that the corpus does not have, too few speakers, or a --split that is not
            understood or fills a split that is a separate source.
    """
    given = tuple(name for name in SPLIT_NAMES if name in corpus.held_out)
    if not given:
        return _rule_of(corpus, spec, held_out_speaker, seed, _default(corpus, by_speaker=by_speaker))
    parsed = None if spec is None else parse_split(spec, seed)
    filled = () if parsed is None else parsed.named
    for name in given:
        if name in filled:
            raise ConfigError(f"--split {spec}: fills {name}, and so does --{name}; leave one of them out")
    rest = corpus.to_divide
    sources = "sources:" + ",".join(f"{name}={corpus.held_out[name]}" for name in given)
    if not rest.utterances:
        if spec is not None or held_out_speaker is not None:
            raise ConfigError(
                "--split and --held-out-speaker divide a SOURCE, and there is none; leave them out"
            )
        return GivenSplits(sources, given, _ALL_TRAIN)
    default = "" if "dev" in given else without_test(_default(rest, by_speaker=by_speaker))
    base = _rule_of(rest, spec, held_out_speaker, seed, default)
    return GivenSplits(sources if base == _ALL_TRAIN else f"{sources};{base.spec}", given, base)


def _rule_of(
    corpus: Corpus, spec: str | None, held_out_speaker: str | None, seed: int, default: str
) -> SplitRule:
    """Return the rule for what is divided: `default` if none is given; if that is empty, all is train."""
    if spec is None and corpus.has_splits:
        rule: SplitRule = CorpusSplit(BY_CORPUS)
    elif not (spec or default):
        rule = _ALL_TRAIN
    else:
        parsed = parse_split(spec or default, seed)
        rule = parsed.chosen_from(corpus, held_out_speaker) if isinstance(parsed, SpeakerShares) else parsed
    wanted = (
        [name for names in rule.parts.values() for name in names] if isinstance(rule, SpeakerSplit) else []
    )
    if held_out_speaker is not None:
        wanted.append(held_out_speaker)
        spec = f"held-out-speaker={held_out_speaker};{rule.spec}"
        rule = HeldOutSpeaker(spec, held_out_speaker, rule)
    unknown = sorted(set(wanted) - {*corpus.speakers, *map(original_name, corpus.speakers)})
    if unknown:
        known = ", ".join(corpus.speakers[:20])
        raise ConfigError(f"{corpus.source}: has no speaker {unknown[0]!r}; its speakers are {known}")
    return rule


def _default(corpus: Corpus, *, by_speaker: bool) -> str:
    if corpus.has_index and _suits_takes(corpus):
        return INDEX_DEFAULT
    num_speakers = len(set(map(original_name, corpus.speakers)))
    knows_speakers = UNKNOWN_SPEAKER not in corpus.speakers and num_speakers >= _FEWEST_SPEAKERS
    return SPEAKERS_DEFAULT if by_speaker and knows_speakers else RANDOM_DEFAULT


def without_test(spec: str) -> str:
    """Return a rule's spec without its test part."""
    kind, _, parts = spec.partition(":")
    return f"{kind}:{','.join(part for part in parts.split(',') if not part.startswith('test='))}"


def _suits_takes(corpus: Corpus) -> bool:
    """Return whether the default split by takes fills all splits and leaves a reasonable share for training.

    Speech Commands counts its takes, too, but hardly anybody repeats a word ten times: next to nothing would
    be train.  If takes are numbered from 100, nothing would be held out.
    """
    rule = parse_split(INDEX_DEFAULT, seed=0)
    assert isinstance(rule, IndexSplit)
    counts = Counter(map(rule.split_of, corpus.utterances))
    has_all = all(counts[name] for name in SPLIT_NAMES)
    return has_all and counts["train"] >= _LEAST_TRAINED * len(corpus.utterances)


def split_corpus(
    corpus: Corpus, rule: SplitRule, *, needs_train: bool = True, may_be_like: bool = False
) -> dict[str, list[CorpusUtterance]]:
    """Divide the utterances, keeping their order; return only splits that hold any.

    Args:
        corpus: the corpus to divide.
        rule: the rule.
        needs_train: whether an empty train split is an error.
        may_be_like: whether --like, which needs no train split, is a remedy.

    Raises:
        ConfigError: train (if it is needed), or a split that the rule fills, is empty.
    """
    splits: dict[str, list[CorpusUtterance]] = {name: [] for name in SPLIT_NAMES}
    for utterance in corpus.utterances:
        splits[rule.split_of(utterance)].append(utterance)
    for name in (*(["train"] if needs_train else []), *rule.named):
        if not splits[name]:
            remedy = _remedy(corpus, rule, name)
            if may_be_like and not corpus.held_out:
                remedy += ", or add --like RUN to test a trained model"
            raise ConfigError(
                f"{corpus.source}: no utterance falls into {name} by '{rule.spec}' "
                f"(of {len(corpus.to_divide.utterances)}); {remedy}"
            )
    return {name: utterances for name, utterances in splits.items() if utterances}


def _remedy(corpus: Corpus, rule: SplitRule, empty: str) -> str:
    """Return the remedy for a split that `rule` has left empty."""
    if isinstance(rule, GivenSplits):
        if empty in rule.given:
            return f"leave --{empty} out, or name one of its speakers in --speakers"
        return _remedy_of_rest(corpus.to_divide, rule.base, empty, rule.given)
    return _remedy_of_rest(corpus, rule, empty)


def _remedy_of_rest(corpus: Corpus, rule: SplitRule, empty: str, given: Collection[str] = ()) -> str:
    """Return the remedy for an empty split of what a rule divides; `given` names splits that are sources."""
    if not corpus.utterances:
        return "name one of its speakers in --speakers"
    if isinstance(rule, HeldOutSpeaker) and empty == "train" and not rule.leaves_any_of(corpus):
        return "leave --held-out-speaker out, as nobody else speaks"
    drawn = rule.base if isinstance(rule, HeldOutSpeaker) else rule
    if not isinstance(drawn, RandomSplit):
        shares = ",".join(f"{name}=0.2" for name in ("dev", "test") if name not in given)
        return f"choose another --split, e.g. random:{shares}"
    wanted = "smaller" if empty == "train" else "larger"
    if isinstance(rule, HeldOutSpeaker):
        return f"give dev a {wanted} share of the others, or choose another --seed"
    places = sorted({drawn.place_of(utterance) for utterance in corpus.utterances})
    share = (math.floor(100 * places[0]) + 1) / 100  # two decimals, enough to include the first of them
    if share > places[-1]:
        return "it has too few utterances to be divided: add some"
    only = drawn.named[0] if len(drawn.named) == 1 else None
    larger = f"give {wanted} shares, or test alone:" if only is None else f"give a {wanted} share, e.g."
    return f"{larger} --split random:{only or 'test'}={share:g}"


def speakers_on_both_sides(splits: Mapping[str, Sequence[CorpusUtterance]]) -> list[str]:
    """Return the speakers that are both in train and held out, sorted; none if there are not two speakers.

    Two speakers are too few for train, dev and test: then only a test split, if there is one, must be apart.
    """
    speakers = {
        name: {original_name(utterance.speaker) for utterance in part} for name, part in splits.items()
    }
    everyone = set().union(*speakers.values())
    if len(everyone) < 2:
        return []
    only_test = len(everyone) < _FEWEST_SPEAKERS and "test" in speakers
    looked_at = {"test"} if only_test else speakers.keys() - {"train"}
    held_out = set().union(*(speakers[split] for split in looked_at))
    return sorted((speakers.get("train", set()) & held_out) - {UNKNOWN_SPEAKER})


def deal(items: Sequence[_Item], sizes: Sequence[int], num_parts: int, seed: str) -> list[list[_Item]]:
    """Shuffle items by a seed and deal them into parts of balanced sizes.

    Each part is a random sample of the whole.  There are at most as many parts as items, none empty.
    """
    order = list(range(len(items)))
    random.Random(seed).shuffle(order)
    parts: list[list[_Item]] = [[] for _ in range(min(num_parts, len(items)))]
    lightest = [(0, 0, part) for part in range(len(parts))]  # a heap of (load, number of items, part)
    for position in order:
        load, count, part = lightest[0]
        parts[part].append(items[position])
        heapq.heapreplace(lightest, (load + sizes[position], count + 1, part))
    return parts


def _with_a_share(parts: Mapping[str, float]) -> tuple[str, ...]:
    return tuple(name for name, share in parts.items() if share > 0)


def _ranges(value: str) -> tuple[tuple[int, int], ...]:
    ranges = []
    for part in value.split("+"):
        low, dash, high = part.partition("-")
        ranges.append((int(low), int(high if dash else low)))
    return tuple(ranges)


def _fractions(parts: dict[str, str]) -> dict[str, float]:
    fractions = {name: float(value) for name, value in parts.items()}
    if any(not 0 <= fraction < 1 for fraction in fractions.values()) or sum(fractions.values()) >= 1:
        raise ValueError("fractions must be at least 0 and add up to less than 1")
    return fractions
