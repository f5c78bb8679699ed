"""Options that determine the contents of a batch and where batches are prepared.

The docstring under a field is its help on the command line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from speechdp.counting import counted
from speechdp.data.plan.epoch_plan import Order, PlanOptions
from speechdp.errors import ConfigError
from speechdp.models.presets import Preset
from speechdp.options.recipe import Recipe
from speechdp.options.shown import shown


@dataclass(frozen=True)
class BatchOptions:
    """How utterances become batches.  A segment is a whole utterance, or a chunk of it (--chunk-frames)."""

    batch_size: Annotated[int | None, shown("SEGMENTS", "the preset's")] = None
    """Segments in each rank's batch."""
    global_batch: Annotated[
        int | None, shown("SEGMENTS", "--batch-size x ranks; 2560 with --recipe adpsgd-asr")
    ] = None
    """Segments in each step over all ranks together, instead of --batch-size.
    Must be a multiple of the number of ranks."""
    chunk_frames: Annotated[int | None, shown("FRAMES", "the preset's")] = None
    """Cut utterances into segments of at most this many frames; 0: whole utterances."""
    left_context: Annotated[int | None, shown("FRAMES", "the preset's")] = None
    """Frames before each chunk that the model sees but is not trained on."""
    right_context: Annotated[int, shown("FRAMES")] = 0
    """Frames after each chunk that the model sees but is not trained on."""
    batch_frames: Annotated[int, shown("FRAMES", "0: batches of --batch-size segments")] = 0
    """Fill each rank's batch with as many segments as fit in this many frames, padding included.
    Used instead of --batch-size."""
    order: Order = "pooled"
    """Order of segments and batches within an epoch.
    pooled: sorted by length within random pools (little padding), then batches are shuffled.
    shuffled: entirely at random (most padding).
    laplace: random bins, each sorted by length, alternately ascending and descending.
    blocking-sort: 32 batches at a time are read and sorted while training waits; a baseline for timing."""

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.global_batch is not None:
            raise ConfigError(
                "--batch-size (of a rank) and --global-batch (of all ranks) exclude each other: give one"
            )
        if self.batch_frames < 0:
            raise ConfigError(f"--batch-frames {self.batch_frames}: must be at least 0 frames")
        if self.batch_frames and (self.batch_size or self.global_batch is not None):
            raise ConfigError("--batch-frames excludes --batch-size and --global-batch: give one")
        if self.batch_frames and self.order == "blocking-sort":
            raise ConfigError(
                "--order blocking-sort needs batches of equal numbers of segments: leave out --batch-frames"
            )
        if self.global_batch is not None and self.global_batch < 1:
            raise ConfigError(f"--global-batch {self.global_batch}: must be at least 1 segment")
        for name in ("left_context", "right_context"):
            if (getattr(self, name) or 0) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: must not be negative")

    def resolve(self, preset: Preset, recipe: Recipe, size: int | None) -> BatchOptions:
        """Fill in missing options from `recipe`, then `preset`, for `size` training ranks.

        The result's batch_size is 0 if --batch-frames is used.

        Raises:
            ConfigError: a global batch that is not divisible by `size`, or chunk contexts without chunks.
        """
        batch_size = self.batch_size
        if batch_size is None:
            if self.batch_frames and recipe.global_batch is not None:
                raise ConfigError(
                    "--batch-frames: the recipe's batch is in segments; give --global-batch instead"
                )
            share = self._share(recipe, size) or preset.batch_size
            batch_size = 0 if self.batch_frames else share
        chunk_frames = self.chunk_frames_with(preset)
        if chunk_frames == 0:
            self._refuse_contexts(preset)
        return BatchOptions(
            batch_size=batch_size,
            chunk_frames=chunk_frames,
            left_context=preset.left_context if self.left_context is None else self.left_context,
            right_context=self.right_context,
            batch_frames=self.batch_frames,
            order=self.order,
        )

    def chunk_frames_with(self, preset: Preset) -> int:
        """Return the frames of a chunk, those of `preset` if none are given; 0: whole utterances."""
        return preset.chunk_frames if self.chunk_frames is None else self.chunk_frames

    def plan(self, seed: int) -> PlanOptions:
        """Return the options of the epoch plan; options must be resolved."""
        assert self.batch_size is not None and self.chunk_frames is not None
        return PlanOptions(self.batch_size, self.chunk_frames, seed, self.order, self.batch_frames)

    def _refuse_contexts(self, preset: Preset) -> None:
        """Refuse contexts of whole utterances, which have no neighbours; ignore the preset's."""
        for name, usual in (("left_context", preset.left_context), ("right_context", 0)):
            value = getattr(self, name)
            if value not in (None, 0, usual):
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} {value}: goes with --chunk-frames; leave it out, or give both")

    def _share(self, recipe: Recipe, size: int | None) -> int | None:
        """Return a rank's share of the global batch; None without a global batch."""
        total = recipe.global_batch if self.global_batch is None else self.global_batch
        if total is None:
            return None
        assert size is not None, "a global batch is shared out by resolve(size)"
        if total % size:
            few = max(ranks for ranks in range(1, size) if total % ranks == 0)
            raise ConfigError(
                f"--global-batch {total}{'' if self.global_batch else ' (of the recipe)'}: is not divisible "
                f"by {size} ranks; give a multiple of {size}, or --batch-size (a run that has started keeps "
                f"its batch: continue it with {counted(few, 'rank')})"
            )
        return total // size


@dataclass(frozen=True)
class LoadingOptions:
    """Where batches are read and preprocessed.  These options do not affect the contents of a batch."""

    feeders: Annotated[int, shown("N", "0: every rank loads its own")] = 0
    """Number of ranks on each host that do not train, but read and preprocess batches for those that do."""
    loader_threads: Annotated[int, shown("N")] = 1
    """Threads in each rank (or feeder) that preprocess batches, or read them if there is no preprocessing."""
    preprocess_on: Literal["cpu", "gpu"] = "cpu"
    """Where features, deltas and augmentation are computed."""
    sample_hz: Annotated[float, shown("HZ")] = 10.0
    """How often the load of GPUs and processes is sampled for the report, in Hz, at most 100; 0: never."""

    def __post_init__(self) -> None:
        if self.feeders < 0:
            raise ConfigError(f"--feeders {self.feeders}: must be at least 0")
        if self.loader_threads < 1:
            raise ConfigError(f"--loader-threads {self.loader_threads}: must be at least 1")
        if not 0 <= self.sample_hz <= 100:
            raise ConfigError(f"--sample-hz {self.sample_hz:g}: must be from 0 to 100")
        if self.feeders and self.preprocess_on == "gpu":
            raise ConfigError("--feeders preprocess on CPUs: leave out --preprocess-on gpu, or the feeders")
