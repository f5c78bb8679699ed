"""Choose the channel that is read of a recording with several."""

from __future__ import annotations

from typing import Literal

from speechdp.errors import ConfigError

#: What is read of a file with several channels: the channel of this number, counted from 1, or their mean.
Channel = int | Literal["mix"]
MIX: Literal["mix"] = "mix"


def parse_channel(text: str, others: str = "or mix") -> Channel:
    """Parse the value of --channel.

    Args:
        others: what may be given instead of a number, for the message.

    Raises:
        ConfigError: it is neither a number of at least 1 nor `mix`.

    Example:
        >>> parse_channel("2"), parse_channel("mix")
        (2, 'mix')
    """
    if text == MIX:
        return MIX
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise ConfigError(f"--channel {text}: give the number of a channel, 1 for the first, {others}")
    return int(text)


def channel_read(channel: Channel) -> str:
    """Return a phrase for what is read of files with several channels.

    Example:
        >>> channel_read(2), channel_read("mix")
        ('channel 2', 'their mean')
    """
    return "their mean" if channel == MIX else f"channel {channel}"
