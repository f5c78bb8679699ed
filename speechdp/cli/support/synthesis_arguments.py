"""Options of `speechdp prepare` that data for synthesis have beside the others."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from speechdp.data.corpora.joining import JoinRule
from speechdp.errors import ConfigError


@dataclass(frozen=True)
class SynthesisArguments:
    """Options of data for synthesis (--task synthesis)."""

    input: Literal["characters", "phones"] = "characters"
    """What texts are written in; phones need each word in a lexicon."""
    speakers: str | None = None
    """Speakers to take, A+B; without it all.  With --synthetic: how many voices of eSpeak NG, or the name of
    one, e.g. en-us+f2; without it one."""
    join: str | None = None
    """Join A to B recordings of a speaker, drawn at random, with short pauses, e.g. 1-3: single words become
    strings of words."""
    join_times: int = 1
    """How often each recording is used."""
    keep_recordings: Literal["held-out", "all"] = "held-out"
    """Recordings to keep beside the spectrograms: of dev and test, to compare with, or of train as well, on
    which a recogniser can be trained (DATA/recordings-train is a corpus)."""
    num_fft: int | None = None
    """Points of the Fourier transform.  Without it: the least power of two of 1.2 windows or more (512 at
    8 kHz, 2048 at 24 kHz)."""

    @property
    def named_speakers(self) -> tuple[str, ...]:
        """The speakers of a corpus to take; none: all."""
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
