"""What a data directory is to hold: sources read this from a corpus, the pipeline writes it."""

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
        """Its id."""
        ...

    @property
    def speaker(self) -> str:
        """Who says it."""
        ...

    @property
    def text(self) -> str:
        """Its transcript."""
        ...


class ShardContent(Protocol):
    """The utterances of one shard, of which the process that writes the shard makes what it stores."""

    @property
    def utterances(self) -> Sequence[Named]:
        """All of them, in the shard's order."""
        ...

    def ready(self, path: Path, header: ShardHeader) -> Iterator[Utterance | AudioUtterance]:
        """Yield what the shard of that path and header stores of each."""
        ...


@dataclass(frozen=True)
class Contents:
    """All that is to be written.

    Attributes:
        manifest: what data.json says, but for its splits.
        shards: of each split.
        stage: what writing the shards does, for people.
        save: writes what stands beside the shards into the data directory.
        notices: what to tell the user.
    """

    manifest: Manifest
    shards: Mapping[str, Sequence[ShardContent]]
    stage: str
    save: Callable[[Path], None]
    notices: tuple[str, ...] = ()


def deal_splits(
    splits: Mapping[str, Sequence[_Item]], size: Callable[[_Item], int], num_shards: int, seed: int
) -> dict[str, list[tuple[_Item, ...]]]:
    """Deal each split's utterances out to shards of about equal `size`.

    Train gets `num_shards`, dev and test a quarter as many, for they are small.
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
