"""Measurements of finished runs: every step of every rank, split into its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from speechdp.counting import counted
from speechdp.errors import ConfigError
from speechdp.experiments.compare import record as compare_record
from speechdp.experiments.profile import record as profile_record
from speechdp.experiments.profile.measured import BACKWARD, FORWARD
from speechdp.experiments.profile.record import WEAK, ProfileJob, read_profile
from speechdp.files import cannot_be_read
from speechdp.ownership.overwrite import how_to_continue
from speechdp.parallel.registry import StrategyChoice
from speechdp.report.kit.formatting import run_labels
from speechdp.report.kit.same_machine import PREDICTIONS, machine_warning
from speechdp.report.runs.data_path import data_figures
from speechdp.report.runs.folders import read_sweep
from speechdp.report.runs.records import finite, words
from speechdp.report.runs.results import RunResult, RunTiming
from speechdp.report.runs.timing_file import read_timeline
from speechdp.simulation.exchanges import is_known

Steps: TypeAlias = npt.NDArray[np.float64]

#: Fewest steps after the warm-up that a prediction needs.
LEAST_STEPS = 8
#: Bytes per parameter: every back-end exchanges single precision.
PARAMETER_BYTES = 4
#: Number of vectors of the parameters' size that an optimizer keeps.
_OPTIMIZER_VECTORS = {"sgd": 1, "adam": 2, "adamw": 2}


@dataclass(frozen=True)
class StepTimes:
    """The parts of every step of every rank, s.  (steps, ranks) each

    Ranks of a run that is not `aligned` took their steps at their own pace, so the entries of a row are
    unrelated.

    Attributes:
        forward, backward, update: time of computation.
        others: time of copies to the device, and time that no span covers.
        data_wait: time without a ready batch.
        comm: time of exchanges that was not hidden, including the wait for other ranks.
        frames: frames of the rank's batch.
    """

    forward: Steps
    backward: Steps
    update: Steps
    others: Steps
    data_wait: Steps
    comm: Steps
    frames: Steps

    def work(self, speedup: float = 1.0) -> Steps:
        """Return the time of everything but exchanges, s, with computation `speedup` times as fast."""
        computing = self.forward + self.backward + self.update
        return computing / speedup + self.others + self.data_wait

    @property
    def trained(self) -> npt.NDArray[np.bool_]:
        """For each step, whether every rank had a batch.  (steps,)"""
        return np.asarray((self.frames > 0).all(axis=1))


@dataclass(frozen=True)
class MeasuredRun:
    """The speed-related facts of a finished run.

    Attributes:
        hosts: host of each rank.
        strategy: the strategy with its options.
        aligned: every rank is known to have taken the same steps at the same time.
        times: times of the ranks that train, without one that only serves.
        nbytes: bytes of the parameters.
        optimizer_vectors: as in `Model`.
        deliverable_per_s: frames/s of all ranks that the data path could deliver; None: not recorded.
        frames_trained: frames of all ranks in the whole run; None: not recorded.
        amount: name of its frames.
        on_gpu: whether it ran on GPUs.
        backend: back-end of its exchanges; "": not recorded.
    """

    name: str
    hosts: tuple[str, ...]
    strategy: StrategyChoice
    aligned: bool
    nbytes: float
    optimizer_vectors: int
    times: StepTimes
    deliverable_per_s: float | None = None
    frames_trained: float | None = None
    amount: str = "frames"
    on_gpu: bool = False
    backend: str = ""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.hosts)

    @property
    def trainers(self) -> int:
        """Number of ranks that train."""
        return int(self.times.frames.shape[1])

    @property
    def ranks_per_node(self) -> int:
        """Largest number of ranks on one host."""
        return max(self.hosts.count(host) for host in self.hosts)

    @property
    def crosses(self) -> bool:
        """Whether its exchanges went over a network."""
        return len(set(self.hosts)) > 1


@dataclass(frozen=True)
class MeasuredFolder:
    """Measurements of the finished runs in a folder.

    Attributes:
        runs: at least one, all of the same model.
        notes: whether the machines differed for the runs that steps are drawn from, and why other runs were
            left out; a sentence or two each.
    """

    runs: tuple[MeasuredRun, ...]
    notes: tuple[str, ...] = ()


def read_measured(folder: Path) -> MeasuredFolder:
    """Read the finished runs of a folder: a single run, or the output of sweep, compare or profile.

    A damaged run among several is left out.

    Raises:
        ConfigError: there is no finished run, or none with step times, or compare.json is damaged; the
            message says what to do.
        RunError: files of a profile are damaged.
    """
    notes: list[str] = []
    results: Sequence[RunResult] = ()
    if (folder / profile_record.FILE_NAME).is_file():
        runs = _runs_of_profile(folder)
    else:
        results = _results(folder)
        if len(results) == 1 and results[0].path.resolve() == folder.resolve():
            return MeasuredFolder((measured_run(results[0]),))
        runs = []
        for result in results:
            if not result.completed:
                continue
            try:
                runs.append(measured_run(result))
            except ConfigError as error:
                notes.append(f"A run was left out: {error}.")
                last = error
        if notes and not runs:
            raise last
    if not runs:
        raise ConfigError(f"{folder}: none of its runs has finished; give the command that made it again")
    if len({run.nbytes for run in runs}) > 1:
        raise ConfigError(f"{folder}: holds runs of models of different sizes; give the folder of one run")
    drawn_from = {run.name for run in basis(runs)}
    alike = [result for result in results if result.name in drawn_from]
    warning = machine_warning(alike, run_labels(results), PREDICTIONS)
    return MeasuredFolder(tuple(runs), tuple(filter(None, (warning, *notes))))


def _results(folder: Path) -> list[RunResult]:
    """Read a run, or the runs of a folder; for a comparison only those of its report, without rate trials."""
    results = list(read_sweep(folder).runs)
    if not (folder / compare_record.FILE_NAME).is_file():
        return results
    named = {run.folder for run in compare_record.read_record(folder).runs}
    return [result for result in results if result.path.name in named]


def measured_run(
    result: RunResult, *, may_have_paused: bool = False, last_bytes: int | None = None
) -> MeasuredRun:
    """Return the measurements of a finished run.

    Args:
        may_have_paused: also accept a run that was told to pause and recorded its timing then.
        last_bytes: number of bytes to read from the end of each rank's timeline; None: all steps.

    Raises:
        ConfigError: the run has not finished, or files are missing; the message names them.
    """
    path, timing, settings = result.path, result.timing, result.settings
    if not result.completed and not (may_have_paused and timing is not None):
        raise ConfigError(
            f"{path}: has not finished (no completed.json); continue it {how_to_continue(path)}, "
            "then simulate"
        )
    parameters = finite(settings.get("num_parameters"))
    hosts = None if timing is None else _hosts_of(timing, settings)
    if timing is None or hosts is None or not parameters:
        missing = "run.json: no num_parameters" if hosts is not None else "timing.json: missing or damaged"
        raise ConfigError(f"{path}: {missing}; train it again, or give another run")
    choice = StrategyChoice(str(settings.get("strategy", "")))
    times, aligned = _read_steps(path, timing, last_bytes, choice)
    figures = data_figures(timing, result.order)
    optimizer = result.setting("options", "resolved", "optimizer", "optimizer")
    last = None if result.last is None else result.last.frames
    return MeasuredRun(
        name=result.name,
        hosts=hosts,
        strategy=choice,
        aligned=aligned,
        nbytes=PARAMETER_BYTES * parameters,
        optimizer_vectors=_OPTIMIZER_VECTORS.get(str(optimizer), _OPTIMIZER_VECTORS["adam"]),
        times=times,
        deliverable_per_s=None if figures is None else figures.deliverable_per_s,
        frames_trained=last or float(sum(rank.frames for rank in timing.ranks)) or None,
        amount=result.kind.amount,
        on_gpu=result.on_gpu,
        backend=words(settings.get("backend")),
    )


def _hosts_of(timing: RunTiming, settings: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the host of each rank; None: unknown.  Timings summed from timelines do not name hosts."""
    recorded = settings.get("hosts")
    begun_on = dict(enumerate(recorded)) if isinstance(recorded, list) else {}
    hosts = tuple(rank.host or begun_on.get(rank.rank) for rank in timing.ranks)
    return tuple(map(str, hosts)) if all(hosts) else None


def _read_steps(
    path: Path, timing: RunTiming, last_bytes: int | None, choice: StrategyChoice
) -> tuple[StepTimes, bool]:
    """Read the timelines of a run: the steps that its timing sums, those of its last start after the warm-up.

    Steps of earlier starts may have been made on other machines, or by another number of ranks.

    Also returns whether all ranks are known to have taken the same steps at the same time.
    """
    # A rank without frames only serves others, as rank 0 does with dedicated=true.
    trainers = [rank for rank in timing.ranks if rank.frames > 0] or timing.ranks
    ranks = [_read_rank(path / "timeline" / f"rank-{rank.rank:04d}.jsonl", last_bytes) for rank in trainers]
    bounds = [
        (rank.first_step, rank.last_step)
        for rank in trainers
        if rank.first_step is not None and rank.last_step is not None
    ]
    is_bounded = len(bounds) == len(trainers)
    if is_bounded:
        ranks = [
            {number: step for number, step in steps.items() if first <= number <= last}
            for steps, (first, last) in zip(ranks, bounds, strict=True)
        ]
    # For a user's strategy, which may not even be available here, it is unknown who waits for whom.  Look it
    # up only now: that imports torch, which reports on runs without timelines do not need.
    aligned = is_known(choice) and choice.parsed.traits.synchronous
    if aligned:
        common = set.intersection(*(set(steps) for steps in ranks))
        kept = [[steps[number] for number in sorted(common)] for steps in ranks]
    else:
        # A line without frames comes from a rank that only waited for the others.
        kept = [[step for step in steps.values() if finite(step.get("frames"))] for steps in ranks]
        kept = [steps[: min(map(len, kept))] for steps in kept]
    if not is_bounded:  # earlier versions did not record which steps they summed
        kept = [steps[timing.warmup_steps :] for steps in kept]
    times = _table([[_parts(step) for step in steps] for steps in kept])
    if (count := int(times.trained.sum())) < LEAST_STEPS:
        raise ConfigError(
            f"{path}: has {counted(count, 'step')} after the warm-up of its last start, too few to predict "
            f"from (at least {LEAST_STEPS}); train longer"
        )
    return times, aligned


def _read_rank(file: Path, last_bytes: int | None) -> dict[int, dict[str, Any]]:
    """Read the steps of a rank's timeline, by number.  Raises ConfigError if there are none."""
    try:
        steps = read_timeline(file, last_bytes)[0]
    except FileNotFoundError as error:
        raise ConfigError(
            f"{file}: missing; its steps are what a simulation is made of: train the run again, or give "
            "another one"
        ) from error
    except OSError as error:
        raise ConfigError(cannot_be_read(file, error)) from error
    if not steps:
        raise ConfigError(f"{file}: damaged, no step of it can be read; give another run")
    return steps


def _parts(step: Mapping[str, Any]) -> tuple[float, ...]:
    """Return a step's forward, backward, update, others, data wait, comm and frames."""
    spans = dict.fromkeys(("data_wait", "h2d", "forward", "backward", "comm", "update"), 0.0)
    pieces = step.get("spans")
    for piece in pieces if isinstance(pieces, list) else ():
        if isinstance(piece, list) and len(piece) == 3 and str(piece[0]) in spans:
            spans[piece[0]] += finite(piece[2]) or 0.0
    others = max((finite(step.get("wall")) or 0.0) - sum(spans.values()), 0.0) + spans["h2d"]
    frames = finite(step.get("frames")) or 0.0
    return (
        *(spans[name] for name in ("forward", "backward", "update")),
        others,
        spans["data_wait"],
        spans["comm"],
        frames,
    )


def _table(ranks: Sequence[Sequence[tuple[float, ...]]]) -> StepTimes:
    table = np.array(ranks).reshape(len(ranks), -1, len(fields(StepTimes)))
    return StepTimes(*np.transpose(table, (2, 1, 0)))


def _runs_of_profile(folder: Path) -> list[MeasuredRun]:
    """Return the jobs of a profile that measured whole steps with a constant batch per rank."""
    profile = read_profile(folder)
    warmup = profile.settings.warmup_steps
    options = profile.settings.options or {}
    choice = StrategyChoice(str(options.get("strategy", "gradient_averaging"))).with_default(
        "overlap", "false"
    )
    found = []
    for job in profile.of_kind(WEAK):
        parameters = finite((job.facts or {}).get("num_parameters"))
        if parameters is None:
            raise ConfigError(f"{job.path}/job.json: no num_parameters; run the profile again")
        rows = [[_profile_parts(step) for step in steps[warmup:]] for steps in job.steps]
        if len(rows[0]) >= LEAST_STEPS:
            found.append(
                MeasuredRun(
                    job.name,
                    _hosts(job),
                    choice,
                    aligned=True,
                    nbytes=PARAMETER_BYTES * parameters,
                    optimizer_vectors=2,
                    times=_table(rows),
                    on_gpu=str((job.facts or {}).get("device", "CPU")) != "CPU",
                )
            )
    if not found:
        raise ConfigError(
            f"{folder}: no job `weak` of it has finished with {LEAST_STEPS} steps after the warm-up; run "
            "the profile with more --steps"
        )
    return found


def _hosts(job: ProfileJob) -> tuple[str, ...]:
    return tuple(record.host for record in job.rank_records)


def _profile_parts(step: Any) -> tuple[float, ...]:
    """Return a profiled step's parts, as `_parts` does."""
    forward, backward = (
        sum(f.duration_s for f in step.functions if f.phase == phase) for phase in (FORWARD, BACKWARD)
    )
    update, wait, comm, copy = (step.seconds(name) for name in ("update", "trainloader", "exchange", "h2d"))
    rest = max(step.wall_s - forward - backward - update - wait - comm - copy, 0.0)
    return (forward, backward, update, rest + copy, wait, comm, float(step.frames))


def basis(runs: Iterable[MeasuredRun]) -> tuple[MeasuredRun, ...]:
    """Return the runs to draw steps from: synchronous ones if there are any, on the most ranks.

    Ranks that share a machine slow each other down; runs on more ranks show more of that.
    """
    found = list(runs)
    found = [run for run in found if run.aligned] or found
    most = max(run.trainers for run in found)
    return tuple(run for run in found if run.trainers == most)
