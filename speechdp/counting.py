"""Format numbers and names of things for messages."""

from __future__ import annotations

from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """Return a number and what is counted: `1 rank`, `4 ranks`; thousands are separated."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def agreeing(number: int, predicate: str) -> str:
    """Return a predicate that begins with are, have or do in the grammatical number for `number` things.

    Example:
        >>> agreeing(1, "have no text"), agreeing(2, "have no text")
        ('has no text', 'have no text')
    """
    verb, blank, rest = predicate.partition(" ")
    return f"{_OF_ONE[verb]}{blank}{rest}" if number == 1 else predicate


def counted_clause(number: int, noun: str, predicate: str) -> str:
    """Return a number, a noun and a predicate that agrees (`agreeing`): `1 file has 8000 Hz`."""
    return f"{counted(number, noun)} {agreeing(number, predicate)}"


_OF_ONE = {"are": "is", "have": "has", "do": "does"}


def epoch_text(epoch: float) -> str:
    """Format a number of epochs; a fraction, in a paused epoch, is rounded to a hundredth.

    Example:
        >>> epoch_text(2), epoch_text(20 / 27)
        ('2', '0.74')
    """
    return f"{round(epoch, 2):g}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question whether a similar name was meant, `; did you mean train?`; "": none is similar."""
    import difflib  # noqa: PLC0415 - only for a message; every command imports this module

    like = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {like[0]}?" if like else ""
