"""Options of `speechdp prepare` for --task synthesis only."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from speechdp.data.corpora.joining import JoinRule
from speechdp.errors import ConfigError
from speechdp.options.shown import shown


@dataclass(frozen=True)
class SynthesisArguments:
    """For --task synthesis only."""

    input: Literal["characters", "phones"] = "characters"
    """What the model reads texts as; phones needs a lexicon with every word."""
    speakers: Annotated[str | None, shown("NAMES", "all; one voice with --synthetic")] = None
    """Speakers to use, joined by +, e.g. anna+bob.
    With --synthetic: number of eSpeak NG voices, or the name of one, e.g. en-us+f2."""
    join: Annotated[str | None, shown("A-B", "utterances as they are")] = None
    """Concatenate A to B random recordings of a speaker with short pauses between them, e.g. 1-3.
    This turns recordings of single words into phrases."""
    join_times: Annotated[int, shown("N")] = 1
    """How often each recording is used with --join."""
    keep_recordings: Literal["held-out", "all"] = "held-out"
    """Recordings to keep in addition to the spectrograms.
    held-out: those of dev and test, for comparison; all: also those of train.
    DATA/recordings-train is then a corpus that a recogniser can be trained on."""
    num_fft: Annotated[
        int | None, shown("N", "smallest power of two >= 1.2 windows: 512 at 8 kHz, 2048 at 24 kHz")
    ] = None
    """Number of points of the Fourier transform."""

    @property
    def named_speakers(self) -> tuple[str, ...]:
        """Speakers of a corpus to use; empty: all."""
        return () if self.speakers is None else tuple(filter(None, self.speakers.split("+")))

    @property
    def join_rule(self) -> JoinRule | None:
        """How recordings are joined; None: not at all.  Raises ConfigError on what is not understood."""
        if self.join is None:
            self.refuse_joining("it goes with --join A-B")
            return None
        return JoinRule.parse(self.join, self.join_times)

    def refuse(self) -> None:
        """Refuse every option given: the data are not for synthesis.  Raises ConfigError naming the first."""
        for option in fields(self):
            if getattr(self, option.name) != option.default:
                name = "--" + option.name.replace("_", "-")
                raise ConfigError(f"{name} goes with --task synthesis; add that or leave it out")

    def refuse_joining(self, why: str) -> None:
        """Refuse the options of joining.  Raises ConfigError naming the first."""
        for name, given in (("--join", self.join is not None), ("--join-times", self.join_times != 1)):
            if given:
                raise ConfigError(f"{name}: {why}; leave it out")
