"""Options that decide which data makes up a batch, and who makes it ready.

The docstring under a field is its help on the command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from speechdp.data.plan.epoch_plan import Order, PlanOptions
from speechdp.errors import ConfigError
from speechdp.models.presets import Preset
from speechdp.options.recipe import Recipe


@dataclass(frozen=True)
class BatchOptions:
    """How utterances become batches; options default to the preset's."""

    batch_size: int | None = None
    """Segments a rank and step."""
    global_batch: int | None = None
    """Segments a step, all ranks together; default with --recipe adpsgd-asr: 2560."""
    chunk_frames: int | None = None
    """Longest segment in frames; 0 takes utterances whole."""
    left_context: int | None = None
    """Frames before a segment that are input only."""
    right_context: int = 0
    """Frames after a segment that are input only."""
    batch_frames: int = 0
    """Instead of --batch-size: a rank and step take as many segments as fit in so many frames, padding
    included."""
    order: Order = "pooled"
    """shuffled: entirely at random; pooled: sorted by length inside shuffled pools, batches shuffled;
    laplace: shuffled bins, sorted inside, up and down in turn; blocking-sort: the IBM poster's trainloader,
    to measure against: it reads and sorts 32 batches while training waits."""

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.global_batch is not None:
            raise ConfigError(
                "--batch-size (of a rank) and --global-batch (of all ranks) exclude each other: give one"
            )
        if self.batch_frames < 0:
            raise ConfigError(f"--batch-frames {self.batch_frames}: frames a rank and step, or 0")
        if self.batch_frames and (self.batch_size or self.global_batch is not None):
            raise ConfigError("--batch-frames excludes --batch-size and --global-batch: give one")
        if self.batch_frames and self.order == "blocking-sort":
            raise ConfigError("--order blocking-sort has batches of equal numbers: leave out --batch-frames")
        if self.global_batch is not None and self.global_batch < 1:
            raise ConfigError(f"--global-batch {self.global_batch}: a batch holds at least 1 segment")
        for name in ("left_context", "right_context"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative")

    def resolve(self, preset: Preset, recipe: Recipe, size: int | None) -> BatchOptions:
        """Fill what was not given from `recipe`, then `preset`, for `size` ranks that train.

        The result's batch_size is 0 where --batch-frames counts.
        """
        batch_size = self.batch_size
        if batch_size is None:
            if self.batch_frames and recipe.global_batch is not None:
                raise ConfigError("--batch-frames: the recipe counts segments; give --global-batch instead")
            share = self._share(recipe, size) or preset.batch_size
            batch_size = 0 if self.batch_frames else share
        return BatchOptions(
            batch_size=batch_size,
            chunk_frames=preset.chunk_frames if self.chunk_frames is None else self.chunk_frames,
            left_context=preset.left_context if self.left_context is None else self.left_context,
            right_context=self.right_context,
            batch_frames=self.batch_frames,
            order=self.order,
        )

    def plan(self, seed: int) -> PlanOptions:
        """Return what the epoch plan needs; of resolved options."""
        assert self.batch_size is not None and self.chunk_frames is not None
        return PlanOptions(self.batch_size, self.chunk_frames, seed, self.order, self.batch_frames)

    def _share(self, recipe: Recipe, size: int | None) -> int | None:
        """Return a rank's part of the global batch; None where there is no global batch."""
        total = recipe.global_batch if self.global_batch is None else self.global_batch
        if total is None:
            return None
        assert size is not None, "a global batch is shared out by resolve(size)"
        if total % size:
            raise ConfigError(
                f"--global-batch {total}{'' if self.global_batch else ' (of the recipe)'}: does not divide "
                f"by {size} ranks; give a multiple of {size}, or --batch-size"
            )
        return total // size


@dataclass(frozen=True)
class LoadingOptions:
    """Where batches are made ready, and what is noted meanwhile; none of it changes what is in them."""

    feeders: int = 0
    """Ranks of each host that read and preprocess for the others, which then touch no shard."""
    loader_threads: int = 1
    """Threads of a rank, or a feeder, that make batches ready: they preprocess, or where there is nothing to
    preprocess, read."""
    preprocess_on: Literal["cpu", "gpu"] = "cpu"
    """Where features, deltas and augmentation are computed."""
    sample_hz: float = 10.0
    """Times a second that the use of GPUs and processes is noted, for the report; 0: never."""

    def __post_init__(self) -> None:
        if self.feeders < 0:
            raise ConfigError(f"--feeders {self.feeders}: ranks of each host, or 0")
        if self.loader_threads < 1:
            raise ConfigError(f"--loader-threads {self.loader_threads}: at least 1")
        if not 0 <= self.sample_hz <= 100:
            raise ConfigError(f"--sample-hz {self.sample_hz:g}: times a second, at most 100, or 0")
        if self.feeders and self.preprocess_on == "gpu":
            raise ConfigError("--feeders preprocess on CPUs: leave out --preprocess-on gpu, or the feeders")
