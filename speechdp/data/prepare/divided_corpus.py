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
        rule = choose_rule(corpus, options.split, options.held_out_speaker, options.seed)
        splits = split_corpus(corpus, rule)
        infos = probe_all([utterance.audio for utterance in corpus.utterances], progress)
        seconds = {info.path: info.num_samples / info.sampling_rate for info in infos}
        return cls(rule.spec, splits, common_sampling_rate(infos, options.resample), seconds)


def probe_all(files: list[Path], progress: Progress) -> list[AudioInfo]:
    """Read the headers of audio files.  Raises ConfigError on what is no audio of one channel."""
    infos = []
    for number, file in enumerate(files, 1):
        infos.append(probe(file))
        if number % 100 == 0 or number == len(files):
            progress("reading headers", number, len(files))
    return infos
