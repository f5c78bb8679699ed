"""Describe the contents of a new data directory: a source makes them, the pipeline writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from speechdp.data.corpora.splits import deal
from speechdp.data.shards.dataset import Manifest
from speechdp.data.shards.layout import AudioUtterance, ShardHeader, Utterance

_Item = TypeVar("_Item")


class Named(Protocol):
    """An utterance of any corpus."""

    @property
    def utterance_id(self) -> str:
        """Id of the utterance."""
        ...

    @property
    def speaker(self) -> str:
        """Speaker of the utterance."""
        ...

    @property
    def text(self) -> str:
        """Transcript of the utterance."""
        ...


class ShardContent(Protocol):
    """The utterances of one shard; the process that writes the shard computes what it stores."""

    @property
    def utterances(self) -> Sequence[Named]:
        """All utterances, in the shard's order."""
        ...

    def ready(self, path: Path, header: ShardHeader) -> Iterator[Utterance | AudioUtterance]:
        """Yield what the shard at `path` stores of each utterance, according to its header."""
        ...


@dataclass(frozen=True)
class Contents:
    """All contents of a data directory.

    Attributes:
        manifest: contents of data.json except for its splits.
        shards: shards of each split.
        stage: description of the writing of shards, for progress messages.
        save: writes the other files of the data directory.
        notices: messages for the user.
    """

    manifest: Manifest
    shards: Mapping[str, Sequence[ShardContent]]
    stage: str
    save: Callable[[Path], None]
    notices: tuple[str, ...] = ()


def deal_splits(
    splits: Mapping[str, Sequence[_Item]], size: Callable[[_Item], int], num_shards: int, seed: int
) -> dict[str, list[tuple[_Item, ...]]]:
    """Deal each split's utterances to shards of about equal `size`.

    Train gets `num_shards`, dev and test a quarter as many because they are small.
    """
    return {
        name: [
            tuple(part)
            for part in deal(
                utterances,
                [size(utterance) for utterance in utterances],
                num_shards if name == "train" else max(1, num_shards // 4),
                f"{seed} {name}",
            )
        ]
        for name, utterances in splits.items()
    }
