"""The result of a report in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """What a report says, sentence by sentence.

    Attributes:
        headline: one sentence: the result.
        details: what speaks for it, one sentence or two a subject.
        cautions: what the reader must know before trusting the above.
        warning: what makes all of the rest doubtful; "" if nothing does.
    """

    headline: str
    details: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    warning: str = ""

    @property
    def body(self) -> tuple[str, ...]:
        """What follows the headline."""
        return self.details

    @property
    def sentences(self) -> tuple[str, ...]:
        """All of it, in the order to be read."""
        return tuple(filter(None, (self.warning, self.headline, *self.body, *self.cautions)))
