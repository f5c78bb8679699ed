"""Divide a corpus of audio and transcripts into splits, and look at the audio's headers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from speechdp.data.corpora.corpus import Corpus, CorpusUtterance
from speechdp.data.corpora.splits import choose_rule, split_corpus
from speechdp.data.prepare.jobs import Progress
from speechdp.data.signal.audio import AudioInfo, common_sampling_rate, probe
from speechdp.options.prepare import PrepareOptions


@dataclass(frozen=True)
class DividedCorpus:
    """A corpus in splits.

    Attributes:
        rule: what divided it, as data.json has it.
        splits: the utterances of each split that holds any.
        sampling_rate: that the audio is brought to, in Hz.
        seconds: how long each file is.
    """

    rule: str
    splits: dict[str, list[CorpusUtterance]]
    sampling_rate: int
    seconds: dict[Path, float]

    @classmethod
    def of(cls, corpus: Corpus, options: PrepareOptions, progress: Progress) -> DividedCorpus:
        """Divide a corpus as the options say.

        Raises:
            ConfigError: the split cannot be made, or a file is no audio of one channel, or of another rate.
        """
        return cls.probed(*divide(corpus, options), options.resample, progress)

    @classmethod
    def probed(
        cls, rule: str, splits: dict[str, list[CorpusUtterance]], resample: int | None, progress: Progress
    ) -> DividedCorpus:
        """Look at the audio of a corpus that is divided.  Raises ConfigError as `of`."""
        infos = probe_all(sorted({u.audio for each in splits.values() for u in each}), progress)
        seconds = {info.path: info.num_samples / info.sampling_rate for info in infos}
        return cls(rule, splits, common_sampling_rate(infos, resample), seconds)


def divide(corpus: Corpus, options: PrepareOptions) -> tuple[str, dict[str, list[CorpusUtterance]]]:
    """Return the rule that divides a corpus, as data.json has it, and its splits.  Raises ConfigError."""
    rule = choose_rule(corpus, options.split, options.held_out_speaker, options.seed)
    return rule.spec, split_corpus(corpus, rule)


def probe_all(files: list[Path], progress: Progress) -> list[AudioInfo]:
    """Read the headers of audio files.  Raises ConfigError on what is no audio of one channel."""
    infos = []
    for number, file in enumerate(files, 1):
        infos.append(probe(file))
        if number % 100 == 0 or number == len(files):
            progress("reading headers", number, len(files))
    return infos
