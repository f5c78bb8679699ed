"""Make targets with states in context from an alignment without, by decision trees grown on its frames.

Every rank accumulates statistics over its own shards.  One exchange sums them, rank 0 grows the trees, and
every rank writes the targets of its shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speechdp.data.shards.alignment_file import open_targets, write_targets
from speechdp.data.shards.shard import Shard
from speechdp.data.transforms.inputs import FEATURES_ALONE
from speechdp.data.transforms.preprocess import Preprocessor
from speechdp.errors import ConfigError, RunError
from speechdp.files import cannot_be_written
from speechdp.labels.decision_tree import ContextStatistics, grow
from speechdp.labels.gaussian_mixtures import cepstra_of
from speechdp.labels.hmm import FloatArray, IntArray, StateInventory
from speechdp.labels.state_tying import StateTying
from speechdp.options.run import TrainOptions
from speechdp.parallel.run_files import RunDirectory
from speechdp.process.ending import Stopped
from speechdp.train.session import Session
from speechdp.train.tolerance import require_all_ranks


def tie_states(
    session: Session,
    options: TrainOptions,
    alignments: Path | None,
    output: Path,
    made_by: Mapping[str, Any],
) -> None:
    """Write targets with states in context for the training and held-out splits.  Collective.

    Args:
        options: options with the context and the largest number of classes.
        alignments: folder of the targets without context; None: those in the shards.
        output: folder for tying.json and the targets.
        made_by: options to record.

    Raises:
        Stopped: a rank was asked to stop.
        ConfigError: there are more states without context than allowed classes, or too many phones.
        ShardError: a shard or its targets are damaged.
        RunError: a feature is not finite, there is no frame of speech, a rank is lost, or writing fails.
    """
    assert options.context != "none"
    require_all_ranks(session.comm)
    inventory = StateInventory.load(session.dataset.classes_path)
    statistics = ContextStatistics(inventory, options.context)
    dim = _count(session, options.train_split, alignments, statistics)
    tying = _grow(session, statistics, dim, options.max_classes)
    output.mkdir(parents=True, exist_ok=True)
    _write(session, options, alignments, output, tying)
    if session.comm.rank == 0:
        try:
            tying.save(output)
        except OSError as error:
            raise RunError(cannot_be_written(output, error)) from error
        RunDirectory(output).complete({"classes": tying.num_classes, "made_by": dict(made_by)})
    session.comm.barrier()
    what = "the phone before" if options.context == "left" else "the phones before and after"
    session.reporter.notice(
        f"context: {tying.num_classes} states depend on {what}, of {inventory.num_classes} without; {output}"
    )


def _count(session: Session, split: str, alignments: Path | None, statistics: ContextStatistics) -> int:
    """Accumulate this rank's statistics until asked to stop; return the input size.  Collective."""
    are_cepstra = session.dataset.features.kind != "log_mel"
    dim = 0
    for path in _own(session, split):
        for x, states in _utterances(session, path, alignments, read_features=True):
            if not np.isfinite(x).all():
                raise RunError(f"{path}: has features that are NaN or infinite; prepare the data again")
            cepstra = cepstra_of(x, are_cepstra=are_cepstra)
            dim = cepstra.shape[1]
            statistics.add(cepstra, states)
    _stop_together(session)
    return int(max(session.comm.allgather_object(dim)))


def _grow(session: Session, statistics: ContextStatistics, dim: int, max_classes: int) -> StateTying:
    """Sum all ranks' statistics and grow the trees.  Collective."""
    comm = session.comm
    codes = sorted(set().union(*map(set, comm.allgather_object(list(statistics.sums)))))
    if not codes:
        raise RunError(
            f"{session.dataset.path}: has no frame of speech to tie states by; check the alignment"
        )
    sums = torch.from_numpy(statistics.matrix(codes, dim))
    comm.allreduce(sums, name="tied-states")
    # Every rank would grow the same trees, but taking rank 0's does not rely on that.
    found: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            found = {"tying": grow(statistics, codes, sums.numpy(), max_classes).to_json()}
        except ConfigError as error:
            found = {"error": str(error)}
    found = comm.broadcast_object(found)
    if "error" in found:
        raise ConfigError(found["error"])
    return StateTying.from_json(found["tying"])


def _write(
    session: Session, options: TrainOptions, alignments: Path | None, output: Path, tying: StateTying
) -> None:
    """Write the targets of this rank's shards until asked to stop.  Collective."""
    for split in (options.train_split, options.held_out):
        for path in _own(session, split):
            targets = [tying.tied(s) for _, s in _utterances(session, path, alignments, read_features=False)]
            if session.is_asked_to_stop():
                break
            with Shard(path) as shard:
                write_targets(output / path.name, shard, targets, f"tied-{tying.context}", tying.num_classes)
    _stop_together(session)


def _own(session: Session, split: str) -> list[Path]:
    return session.dataset.shard_paths(split)[session.comm.rank :: session.comm.size]


def _utterances(
    session: Session, path: Path, alignments: Path | None, *, read_features: bool
) -> Iterator[tuple[FloatArray, IntArray]]:
    """Yield features (T, F), or none, and targets (T,) of each utterance of a shard, until asked to stop."""
    with ExitStack() as stack:
        shard = stack.enter_context(Shard(path))
        preprocessor = Preprocessor.for_shard(shard.header, FEATURES_ALONE)
        of_folder = None
        if alignments is not None:
            of_folder = stack.enter_context(closing(open_targets(alignments / path.name, shard)))
        nothing: tuple[FloatArray, IntArray] = np.zeros((0, 0), np.float32), np.zeros(0, np.int32)
        for u in range(shard.num_utterances):
            if session.is_asked_to_stop():
                return
            needs_shard = read_features or of_folder is None
            x, states = preprocessor.read(shard, u) if needs_shard else nothing
            yield x, states if of_folder is None else of_folder.read(u)


def _stop_together(session: Session) -> None:
    """Raise Stopped on all ranks if any was asked to stop, RunError if one is lost.  Collective."""
    asked = session.comm.allgather_object(session.is_asked_to_stop())
    require_all_ranks(session.comm)
    if any(asked):
        raise Stopped
