"""Open a source of batches on this rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from speechdp.comm.base import Communicator
from speechdp.data.loading.preprocessing_source import PreprocessingSource
from speechdp.data.loading.reader import SplitReader
from speechdp.data.loading.source import SplitSource
from speechdp.data.loading.source_request import SourceRequest
from speechdp.data.loading.threaded_source import ThreadedSource
from speechdp.data.shards.dataset import Dataset
from speechdp.data.transforms.preprocess import CACHE_BYTES, Preprocessor


class SourceOpener(Protocol):
    """Opens sources of batches on other ranks."""

    def open(self, request: SourceRequest) -> SplitSource:
        """Open a source.  Collective over the ranks that train."""
        ...


@dataclass(frozen=True)
class SourceOptions:
    """Where and how this rank makes batches; nothing here changes what is in them.

    Attributes:
        device: the GPU that batches are for, or the CPU.
        preprocess_on: "cpu" or "gpu".
        num_threads: threads that preprocess on the CPU, or read if there is nothing to preprocess.
        num_ranks: ranks that the batches are for.  Each has its own window, whose features are cached.
        comm: ranks that share the reading of the shards' indices, or None.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    preprocess_on: Literal["cpu", "gpu"] = "cpu"
    num_threads: int = 1
    num_ranks: int = 1
    comm: Communicator | None = None


def make_preprocessor(dataset: Dataset, request: SourceRequest, num_ranks: int = 1) -> Preprocessor:
    """Build the preprocessor between shards and model.  Raises ConfigError if it does not fit the data."""
    return Preprocessor(
        dataset.features,
        dataset.sampling_rate,
        dataset.stored,
        request.inputs,
        request.augment,
        request.seed,
        cache_bytes=num_ranks * CACHE_BYTES,
    )


def open_local_source(dataset: Dataset, request: SourceRequest, options: SourceOptions) -> SplitSource:
    """Open a split for reading on this rank.  Collective if the options have a communicator.

    Raises:
        ConfigError: the data do not allow this preprocessing.
        ShardError: damaged data.
    """
    preprocessor = make_preprocessor(dataset, request, options.num_ranks)
    reader = SplitReader(
        dataset,
        request.split,
        request.alignments,
        request.context,
        comm=options.comm,
        pin=options.device.type == "cuda",
        transcripts=request.transcripts,
    )
    if preprocessor.is_plain:
        return reader if options.num_threads == 1 else ThreadedSource(reader, options.num_threads)
    device = options.device if options.preprocess_on == "gpu" else torch.device("cpu")
    return PreprocessingSource(reader, preprocessor, num_threads=options.num_threads, device=device)
