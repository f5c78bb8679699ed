"""What the model of `speechdp simulate` predicts of HPCS 2017, beside what is reported and what we measured.

    python benchmarks/papers/hpcs2017_predicted.py [--bandwidth 1gbit] [--measured OUT [--from 600k]]

Rosciszewski & Kaliski average an LSTM of 4 x 800 every 600,000 frames on 2 x 4 GPUs.  Their MPI processes
stay, and load beside training; Kaldi's are started anew for every iteration, and load first.  That saved
54.9 % of the time, and more the more often they averaged: no more is public (the abstract).  Here an
iteration of theirs takes the steps of the slowest rank and an average over the link, one of Kaldi's way the
same without the link, and a restart: whatever is there once an iteration, queue, processes, files, average.

First table: GPUs' speed and restarts, and whether 600k frames are of all jobs or, as Kaldi counts, of each,
are varied in the range that can be; the last column is the restart with which the reported share would come
out.  So this is a bracket, not a test.

Second table: that share is fitted, by restarts alone or by loading alone (which is there for every frame);
the shares at other frequencies are predictions.  The paper gives their direction only.

--measured OUT: a folder of hpcs2017.py.  The phases of its trainings with --from frames an iteration, and the
steps of our run there, predict all the others, beside what these took.  Rounds, and trainings of a round,
that are not finished are passed over.

Last line: JSON {"reported": share, "predicted": [least, most]}, and with OUT {"median_error", "worst_error"}
of total times and {"saved_error"}, the most by which shares differ, without the row that was fitted.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from rich import box
from rich.table import Table

from benchmarks.papers.hpcs2017 import frame_count
from benchmarks.papers.hpcs2017_results import WAYS, Result, count
from benchmarks.papers.published_scaling import run_of
from speechdp.cli.support.console import make_console
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig
from speechdp.models.presets import PRESETS
from speechdp.parallel.registry import StrategyChoice
from speechdp.report.runs.folders import read_run
from speechdp.simulation.measured import MeasuredRun, StepTimes, measured_run
from speechdp.simulation.quantities import bandwidth
from speechdp.simulation.simulate import GivenLink, Request, simulate

REPORTED, FRAMES = 0.549, 600_000
_RANKS, _PER_NODE = 8, 4
#: Frames of a GPU in a second that are tried: an H100 with this model and float32 has 90,000 without CUDA
#: graphs (docs/results.md), and GPUs of 2017 have a tenth of its arithmetic or less.
SPEEDS = (3_000.0, 10_000.0, 30_000.0)
#: Seconds of a restart that are tried: compiled programs on an idle machine, to a queue that polls.
_RESTARTS_S = (2.0, 10.0, 30.0)
_OTHER_FRAMES = (75_000, 150_000, 300_000, 1_200_000, 2_400_000)
#: How much steps of a rank differ, and its inputs and classes: not published either, and of little weight.
_DEVIATION, _FEATURES, _CLASSES = 0.1, 40, 3_000
#: Bytes/s between two ranks of a node: MPI through the host's memory, about.
_INSIDE = 5e9
_AT_ONCE = GivenLink(math.inf, 0.0)


@dataclass(frozen=True)
class Round:
    """A round of hpcs2017.py.

    Attributes:
        folder: where it is.
        pairs: of each number of frames an iteration, what both ways took; finished ones.
        unfinished: numbers of frames that this or another round has begun, without a pair here; ascending.
    """

    folder: Path
    pairs: dict[int, dict[str, Result]]
    unfinished: tuple[int, ...]


@dataclass(frozen=True)
class Ways:
    """What an iteration takes, s.

    Attributes:
        ours: of ranks that stay: the slowest one's steps, and an average over the link.
        kaldi: of Kaldi's way, without restart and loading.
    """

    ours: float
    kaldi: float

    def saved(self, more_s: float) -> float:
        """Return the share of Kaldi's time that ours saves, with so much for restart and loading, s."""
        return 1 - self.ours / (self.kaldi + more_s)

    def explaining(self, share: float) -> float:
        """Return the restart and loading with which that share is saved, s."""
        return self.ours / (1 - share) - self.kaldi


def step_s(
    run: MeasuredRun, period: int, ranks: int, per_node: int, link: GivenLink, inside: GivenLink
) -> float:
    """Predict what a step takes of ranks that average their models every `period` steps, s."""
    strategy = StrategyChoice(f"model_averaging:period={period}")
    request = Request((ranks,), per_node, link, inside, strategies=(strategy,))
    (prediction,) = simulate([run], request).predictions
    return prediction.step_s.mean


def ways_of(speed: float, frames: float, bytes_per_s: float) -> Ways:
    """Predict the paper's iterations.

    Args:
        speed: frames/s of a GPU.
        frames: an iteration, of one job.
        bytes_per_s: of the link between the two workstations.
    """
    preset = PRESETS["kaldi-4x800"]
    batch = preset.batch_size * preset.chunk_frames
    run = run_of(batch / speed, _DEVIATION, batch, paper_parameters())
    period = max(1, round(frames / batch))
    link, inside = GivenLink(bytes_per_s, 50e-6), GivenLink(max(bytes_per_s, _INSIDE), 5e-6)
    ours, kaldi = (
        period * step_s(run, period, _RANKS, _PER_NODE, *links)
        for links in ((link, inside), (_AT_ONCE, _AT_ONCE))
    )
    return Ways(ours, kaldi)


def paper_parameters() -> int:
    """Return the number of parameters of an LSTM of the paper's size."""
    config = PRESETS["kaldi-4x800"].model
    assert isinstance(config, LstmConfig)
    with torch.device("meta"):
        return sum(p.numel() for p in LstmAcousticModel(_FEATURES, _CLASSES, config).parameters())


def show_bracket(bytes_per_s: float) -> list[float]:
    """Print what is predicted for what was not published; return the shares."""
    table = _table(
        f"share of the time saved at {count(FRAMES)} frames an iteration; reported: {REPORTED:.1%}",
        ("frames are of", "frames/s of a GPU", "iteration, s", *(f"restart {s:.0f} s" for s in _RESTARTS_S)),
        f"{REPORTED:.1%} with a restart of",
    )
    found = []
    for name, jobs in (("all jobs", _RANKS), ("each job", 1)):
        for speed in SPEEDS:
            ways = ways_of(speed, FRAMES / jobs, bytes_per_s)
            shares = [ways.saved(restart) for restart in _RESTARTS_S]
            found += shares
            cells = (f"{share:.0%}" for share in shares)
            table.add_row(
                name, f"{speed:,.0f}", f"{ways.ours:.1f}", *cells, f"{ways.explaining(REPORTED):.0f} s"
            )
    make_console().print(table)
    return found


def at_other_frequencies(frames: int, bytes_per_s: float) -> tuple[list[float], list[float]]:
    """Return the share saved at `frames` an iteration of all jobs, where the reported one is fitted.

    Returns:
        By restarts alone, and by loading alone, for each of SPEEDS.
    """
    restarts, loading = [], []
    for speed in SPEEDS:
        more_s = ways_of(speed, FRAMES / _RANKS, bytes_per_s).explaining(REPORTED)
        ways = ways_of(speed, frames / _RANKS, bytes_per_s)
        restarts.append(ways.saved(more_s))
        loading.append(ways.saved(more_s * frames / FRAMES))
    return restarts, loading


def show_fitted(bytes_per_s: float) -> None:
    """Print what follows for other frequencies from the share that is reported for one."""
    table = _table(
        f"share saved where {REPORTED:.1%} at {count(FRAMES)} is fitted, over GPUs of all speeds",
        ("frames an iteration", "by restarts alone", "by loading alone"),
        "reported",
    )
    for frames in _OTHER_FRAMES:
        cells = (f"{min(f):.0%} to {max(f):.0%}" for f in at_other_frequencies(frames, bytes_per_s))
        table.add_row(count(frames), *cells, "more" if frames < FRAMES else "less")
    make_console().print(table)


def predicted_totals(pair: dict[str, Result], run: MeasuredRun, iterations: int) -> dict[str, float]:
    """Predict what both ways take with another number of iterations, s, from the phases of one pair.

    Args:
        pair: of each way the training that is known.
        run: our run of it.
    """
    kaldi, ours = pair["kaldi"], pair["ours"]
    frames = kaldi.curve[-1][0]
    steps = frames / run.ranks / float(run.times.frames[run.times.trained].mean())
    period = max(1, round(steps / iterations))
    measured_s = float(run.times.work()[run.times.trained].mean())
    own_s = sum(kaldi.seconds[part] for part in ("compute", "load", "preprocess"))
    jobs = replace(run, times=_scaled(run.times, own_s / steps / measured_s))
    restart_s = (
        sum(kaldi.seconds[part] for part in ("start", "read_model", "write", "average", "other"))
        / kaldi.iterations
    )
    once_s = ours.total_s - ours.seconds["average"] - ours.seconds["wait"] - steps * measured_s
    return {
        "kaldi": steps * step_s(jobs, period, run.ranks, run.ranks, _AT_ONCE, _AT_ONCE)
        + iterations * restart_s,
        "ours": steps * step_s(run, period, run.ranks, run.ranks, GivenLink(), GivenLink()) + once_s,
    }


def _scaled(times: StepTimes, factor: float) -> StepTimes:
    parts = {
        name: factor * getattr(times, name)
        for name in ("forward", "backward", "update", "others", "data_wait")
    }
    return replace(times, **parts)


def show_measured(rounds: Sequence[Round], known: int) -> dict[str, float]:
    """Print what the trainings with `known` frames an iteration say of the others, beside these."""
    table = _table(
        f"total time, s: predicted from the phases at {count(known)}, and measured",
        (
            "frames an iteration",
            *(f"{name}, {what}" for name in WAYS.values() for what in ("predicted", "measured")),
        ),
        "saved, predicted / measured",
    )
    errors, saved_errors = [], []
    for frames in _frames_of(rounds):
        there = [one for one in rounds if frames in one.pairs]
        measured = {way: statistics.median(one.pairs[frames][way].total_s for one in there) for way in WAYS}
        predictions = [
            predicted_totals(
                one.pairs[known],
                measured_run(read_run(one.folder / f"ours-{known}" / "run")),
                one.pairs[frames]["kaldi"].iterations,
            )
            for one in there
        ]
        predicted = {way: statistics.median(each[way] for each in predictions) for way in WAYS}
        saved = [1 - t["ours"] / t["kaldi"] for t in (predicted, measured)]
        if frames != known:
            errors += [abs(predicted[way] / measured[way] - 1) for way in WAYS]
            saved_errors.append(abs(saved[0] - saved[1]))
        cells = (f"{t[way]:.1f}" for way in WAYS for t in (predicted, measured))
        table.add_row(
            count(frames) + (" (fitted)" if frames == known else ""),
            *cells,
            " / ".join(f"{share:.0%}" for share in saved),
        )
    make_console().print(table)
    return {
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "saved_error": max(saved_errors),
    }


def rounds_of(out: Path, known: int) -> list[Round]:
    """Return the rounds of a folder of hpcs2017.py that are finished with `known` frames an iteration.

    What is passed over is told on stderr, a line for each round.

    Raises:
        SystemExit: no pair of trainings is finished, none with `known` frames, or no other beside it.
    """
    rounds = _read_rounds(out)
    if not (present := _frames_of(rounds)):
        raise SystemExit(
            f"{out}: no round-*/ has a result.json of both ways, ours-N/ and kaldi-N/; --measured takes the "
            "--out of hpcs2017.py, once a pair of trainings is finished"
        )
    if known not in present:
        raise SystemExit(
            f"{out}: both ways are finished with {_counts(present)} frames an iteration, but not with "
            f"{count(known)}; choose by --from {count(present[-1])}"
        )
    usable = [one for one in rounds if known in one.pairs]
    for one in rounds:
        if known not in one.pairs:
            _note(f"{one.folder}: passed over as a whole, not finished at {count(known)} frames an iteration")
        elif one.unfinished:
            _note(f"{one.folder}: passed over at {_counts(one.unfinished)} frames an iteration, not finished")
    if _frames_of(usable) == [known]:
        raise SystemExit(
            f"{out}: beside {count(known)} frames an iteration, which are fitted, nothing is finished that "
            "could be predicted; run hpcs2017.py with others in --frames-per-iteration, too"
        )
    return usable


def _read_rounds(out: Path) -> list[Round]:
    begun: dict[Path, set[int]] = {folder: set() for folder in sorted(out.glob("round-*"))}
    for folder, found in begun.items():
        for way in WAYS:
            found |= {int(path.name.removeprefix(f"{way}-")) for path in folder.glob(f"{way}-*")}
    everywhere = sorted(set().union(*begun.values()))
    rounds = []
    for folder in begun:
        pairs = {frames: pair for frames in everywhere if (pair := _read(folder, frames)) is not None}
        rounds.append(Round(folder, pairs, tuple(frames for frames in everywhere if frames not in pairs)))
    return rounds


def _read(folder: Path, frames: int) -> dict[str, Result] | None:
    """Return what both ways took in a round; None where one is not finished."""
    found = {way: Result.read(folder / f"{way}-{frames}" / "result.json") for way in WAYS}
    pair = {way: result for way, result in found.items() if result is not None}
    return pair if len(pair) == len(WAYS) else None


def _frames_of(rounds: Sequence[Round]) -> list[int]:
    """Return the numbers of frames an iteration of which a round has a pair, ascending."""
    return sorted({frames for one in rounds for frames in one.pairs})


def _note(line: str) -> None:
    print(line, file=sys.stderr)


def _counts(several: Sequence[int]) -> str:
    return ", ".join(map(count, several))


def _table(title: str, columns: Sequence[str], last: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in (*columns, last):
        table.add_column(name, justify="right")
    return table


def main() -> None:
    """Predict and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bandwidth", default="1gbit")
    parser.add_argument("--measured", type=Path, metavar="OUT")
    parser.add_argument("--from", dest="known", type=frame_count, default="600k")
    given = parser.parse_args()
    bytes_per_s = bandwidth("--bandwidth", given.bandwidth)
    rounds = None if given.measured is None else rounds_of(given.measured, given.known)
    found = show_bracket(bytes_per_s)
    show_fitted(bytes_per_s)
    line = {"reported": REPORTED, "predicted": [round(min(found), 3), round(max(found), 3)]}
    if rounds is not None:
        errors = show_measured(rounds, given.known)
        line |= {name: round(error, 3) for name, error in errors.items()}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
