"""Which channel of a recording is read where it has several."""

from __future__ import annotations

from typing import Literal

from speechdp.errors import ConfigError

#: What is read of a file of several channels: the one of this number, counted from 1, or the mean of all.
Channel = int | Literal["mix"]
MIX: Literal["mix"] = "mix"


def parse_channel(text: str, others: str = "or mix") -> Channel:
    """Read a --channel.

    Args:
        others: what may be given besides numbers, for the message.

    Raises:
        ConfigError: it is neither a number from 1 on nor `mix`.

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
    """Say what is read of files of several channels.

    Example:
        >>> channel_read(2), channel_read("mix")
        ('channel 2', 'their mean')
    """
    return "their mean" if channel == MIX else f"channel {channel}"
