"""How to give the channel of audio files on the command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import tyro

from speechdp.data.signal.channel import Channel, parse_channel


def _text(read: Callable[[str], Any]) -> tyro.constructors.PrimitiveConstructorSpec[Any]:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="N|mix",
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: value is None or isinstance(value, (int, str)),
        str_from_instance=lambda value: [str(value)],
    )


def _channel_or_each(text: str) -> Channel | Literal["each"]:
    return "each" if text == "each" else parse_channel(text, "mix, or each")


#: Parsers of a channel on the command line; the second also accepts `each` (every channel by itself).
CHANNEL_TEXT, CHANNEL_OR_EACH_TEXT = _text(parse_channel), _text(_channel_or_each)
