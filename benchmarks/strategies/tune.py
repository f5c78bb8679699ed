"""Does `speechdp tune` choose the setting that is best, and for how much of what finding it out costs?

    python benchmarks/strategies/tune.py [--clusters free,slow-link,slow-rank] [--backend mpi]
        [--budget 5m | --budget 4m,5m,8m | --budget-share 0.18]
        [--strategies a,b:momentum=reset] [--periods 4,16] [--batch-sizes 8,32] [--seeds 1,2] [--hours 0.25]
        [--epochs 24] [--race 12] [--out OUT] [-- options of speechdp train]

Two ranks on each cluster:

- free: this machine;
- slow-link: each rank in a network namespace of its own, 1 Gbit/s and 1 ms between them (as root);
- slow-rank: this machine, one rank 3 times as slow (`--slow-ranks 1:3`).

`speechdp tune` chooses first, within --budget: one for all clusters, or one for each in their order.  Then
every setting that it tried, those with other batches and those that it ruled out among them, is trained to
the end with every seed by `speechdp compare`, one comparison a batch; not those that the back-end refuses.
One race of all settings follows, longer than that of tune.  Times are steps over that race's speed: what the
machine did during a run counts for nothing.  The race is no part of the cost.

With --budget-share the comparison comes first: of all settings with the training's own batch, and of gradient
averaging with the others.  The budget of tune is that share of what these took on the cluster.  Settings that
tune tries beyond them (the one predicted to be fastest, with other batches) are compared afterwards, so that
the cost share is rather below what was asked for.

- regret: the time to target of what tune chose over the best setting's, minus 1; means over seeds.  The
  target is that of a comparison, the best held-out value that three quarters of the whole runs reached: who
  trains wants the result of a whole training.  tune cannot know it, as it trains none to the end.  The
  title of the table also has the regret at the target that tune itself used.
- cost share: `spent_s` of tune over the time that the runs of the full comparison took.

The best of many is partly so by luck, so that regret is rather too high than too low: the table has the
range of the seeds, and how often chance alone would choose as well.

Synthetic speech is prepared first.  OUT keeps what is done.

Last line: JSON {"regret_max": ..., "cost_share_max": ...} over the clusters; regret_max is null where a
setting was chosen that did not reach the target.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich import box
from rich.table import Table

from benchmarks.comm.namespaces import ended_by_signals
from benchmarks.comm.switch import SwitchedNodes, why_not
from benchmarks.strategies.straggler import prepare_synthetic
from speechdp import exit_codes
from speechdp.cli.support.console import make_console
from speechdp.counting import counted
from speechdp.experiments.compare.plan import checked_strategies, whole_numbers
from speechdp.experiments.compare.record import FILE_NAME, read_record
from speechdp.experiments.jobs import JobStarter, JobStopped
from speechdp.experiments.race.record import RaceRecord, find_race
from speechdp.experiments.tune.curves import Curve, Finish, finishes
from speechdp.experiments.tune.jobs import frames_per_step
from speechdp.experiments.tune.plan import STRATEGIES, Setting, settings_of
from speechdp.experiments.tune.record import MEASURE, TuneRecord, read_tune
from speechdp.experiments.tune.training import racing_text
from speechdp.launching.command import own_program
from speechdp.parallel.registry import StrategyChoice
from speechdp.report.compare.groups import ComparedRun, read_comparison, target_of_most
from speechdp.report.kit import formatting
from speechdp.simulation.predict import why_refused_on

RANKS = 2
FREE, SLOW_LINK, SLOW_RANK = "free", "slow-link", "slow-rank"
CLUSTERS = (FREE, SLOW_LINK, SLOW_RANK)
_BYTES_PER_S, _LATENCY_S = 1e9 / 8, 1e-3
_SLOWED = "--slow-ranks=1:3"


@dataclass(frozen=True)
class Cluster:
    """Where jobs run.

    Attributes:
        starter: runs a command on the first node.
        launch_options: with which commands there start ranks on all nodes.
        options: of training.
    """

    name: str
    starter: JobStarter
    launch_options: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def forwarded(self) -> tuple[str, ...]:
        """Words for a command that starts jobs itself."""
        return (f"--launch-args={shlex.join(self.launch_options)}",) if self.launch_options else ()


@dataclass(frozen=True)
class Verdict:
    """How well tune chose on a cluster.

    Attributes:
        chosen, best: names of settings.
        regret: at the target of the full comparison; infinite where the chosen one did not reach it.
        own_regret: at tune's own target.
        luck: share of the settings that reach the comparison's target within 5 % of the best one's time.
        tune_s, full_s: what tune took, and the runs of the full comparison.
        ends: of every setting at the comparison's target, the soonest first.
    """

    cluster: str
    chosen: str
    best: str
    regret: float
    own_regret: float
    luck: float
    tune_s: float
    full_s: float
    ends: Mapping[str, Finish]

    @property
    def cost_share(self) -> float:
        """What tune took over what the full comparison took."""
        return self.tune_s / self.full_s


def setting_in(record: TuneRecord, name: str) -> Setting:
    """Return a setting that tune tried."""
    found = record.of(name)
    return Setting(StrategyChoice(found.strategy), found.batch_size)


def tried_in(record: TuneRecord) -> list[Setting]:
    """Return all settings that tune tried, but for those that its back-end refuses."""
    return [setting_in(record, one.name) for one in record.tried if one.out_in != MEASURE]


def settings_before(cluster: str, given: argparse.Namespace) -> list[Setting]:
    """Return what tune is known to try before it has begun: all with the training's own batch.

    With other batches that is gradient averaging alone: which setting is predicted to be fastest, tune finds
    out.
    """
    periods = whole_numbers("periods", given.periods, least=1)
    own = settings_of(checked_strategies(given.strategies), periods)
    hosts = list(range(RANKS)) if cluster == SLOW_LINK else [0] * RANKS
    kept = [one for one in own if not why_refused_on(one.strategy, hosts, given.backend)]
    none = given.batch_sizes == "none"
    sizes = () if none else whole_numbers("batch-sizes", given.batch_sizes, least=1)
    return [*kept, *(Setting(own[0].strategy, size) for size in sizes)]


def budget_for(cluster: str, given: argparse.Namespace) -> str:
    """Return the budget that was given for a cluster."""
    budgets = given.budget.split(",")
    return str(budgets[given.clusters.index(cluster)] if len(budgets) > 1 else budgets[0])


def budget_of_share(runs: Mapping[Setting, Sequence[ComparedRun]], share: float) -> str:
    """Return a share of what runs took as a budget."""
    return f"{share * sum(cost_s(run, 0.0) for found in runs.values() for run in found):.0f}s"


def by_batch(settings: Sequence[Setting]) -> dict[int, list[Setting]]:
    """Return settings by their batch (0: the training's own)."""
    found: dict[int, list[Setting]] = {}
    for one in settings:
        found.setdefault(one.batch_size, []).append(one)
    return found


def regret(ends: Mapping[str, Finish], chosen: str) -> float:
    """Return how much later the chosen setting reached the target than the soonest one, as a share.

    Infinite where it did not reach it.

    Args:
        ends: of all settings that could be trained.
    """
    best_s = min(end.mean_s for end in ends.values())
    if math.isinf(best_s):
        return math.inf
    return ends[chosen].mean_s / best_s - 1 if chosen in ends else math.inf


def luck(ends: Mapping[str, Finish], tried: int, within: float = 0.05) -> float:
    """Return the share of the settings tried that are within so much of the best one."""
    best_s = min(end.mean_s for end in ends.values())
    return sum(end.mean_s <= (1 + within) * best_s for end in ends.values()) / tried


def curves_of(runs: Mapping[Setting, Sequence[ComparedRun]], race: RaceRecord) -> dict[str, list[Curve]]:
    """Return the scores of whole runs over their time at raced speed, of settings all of whose runs ended.

    Args:
        runs: one a seed.
        race: of all settings; what did not race has no curves.
    """
    speeds = race.speeds()
    baseline = race.frames_per_s(race.plan.baseline)
    curves: dict[str, list[Curve]] = {}
    for setting, found in runs.items():
        if setting.name not in speeds:
            continue
        rate = speeds[setting.name].ratio * baseline / frames_per_step(race, setting.name)
        of_setting = [_curve(run, rate) for run in found]
        whole = [curve for curve in of_setting if curve is not None]
        if whole and len(whole) == len(of_setting):
            curves[setting.name] = whole
    return curves


def _curve(run: ComparedRun, steps_per_s: float) -> Curve | None:
    if not run.is_finished or run.result is None:
        return None
    points = tuple(
        (one.step / steps_per_s, one.score)
        for one in run.result.evaluations
        if one.score is not None and math.isfinite(one.score)
    )
    return Curve(points) if points else None


def judge(
    cluster: str, tuned: TuneRecord, runs: Mapping[Setting, Sequence[ComparedRun]], race: RaceRecord
) -> Verdict:
    """Compare what tune chose with what the full comparison shows.  Raises SystemExit where nothing shows."""
    curves = curves_of(runs, race)
    target = target_of_most([run for found in runs.values() for run in found])
    if not curves or target is None or tuned.target is None:
        raise SystemExit(f"{cluster}: no setting could be trained to the end and raced")
    _, ends = finishes(curves, target)
    if all(math.isinf(end.mean_s) for end in ends.values()):
        raise SystemExit("no setting reached the comparison's target with all seeds; give more --epochs")
    _, own_ends = finishes(curves, tuned.target)
    return Verdict(
        cluster,
        tuned.chosen,
        next(iter(ends)),
        regret(ends, tuned.chosen),
        regret(own_ends, tuned.chosen),
        luck(ends, len(runs)),
        tuned.spent_s,
        sum(cost_s(run, tuned.start_s) for found in runs.values() for run in found),
        ends,
    )


def cost_s(run: ComparedRun, start_s: float) -> float:
    """Return how long a run took.

    An interrupted comparison that went on knows it of its later runs only: for others it is what their
    ranks trained and evaluated, and a start.

    Args:
        start_s: what a job takes besides.
    """
    if run.record.wall_s is not None:
        return run.record.wall_s
    if run.result is None or run.result.timing is None:
        return 0.0
    return start_s + max(rank.wall_s + rank.eval_s + rank.checkpoint_s for rank in run.result.timing.ranks)


def tune(cluster: Cluster, data: Path, out: Path, budget: str, given: argparse.Namespace) -> TuneRecord:
    """Let tune choose, or go on with its search; one that is complete is kept."""
    words = ["tune", str(data), str(out), f"--budget={budget}", f"--backends={given.backend}"]
    words += [f"--ranks={RANKS}", f"--strategies={given.strategies}", f"--periods={given.periods}"]
    words += [f"--batch-sizes={given.batch_sizes}", f"--seeds={given.seeds}", f"--threads={given.threads}"]
    _run(cluster, [*words, *cluster.forwarded, *cluster.options], out)
    return read_tune(out)


def compare(
    cluster: Cluster, data: Path, out: Path, compared: Sequence[Setting], given: argparse.Namespace
) -> dict[Setting, list[ComparedRun]]:
    """Train settings to the end, as far as that is not done; return their runs."""
    found: dict[Setting, list[ComparedRun]] = {}
    for batch, settings in by_batch(compared).items():
        folder = out.with_name(f"{out.name}-batch{batch}" if batch else out.name)
        words = ["compare", str(data), str(folder), f"--ranks={RANKS}", f"--seeds={given.seeds}"]
        words += [f"--strategies={','.join(one.strategy.text for one in settings)}", "--modes=frames"]
        words += ["--decode-split=", "--race=0", f"--backend={given.backend}", f"--threads={given.threads}"]
        words += [*cluster.forwarded, *cluster.options, *([f"--batch-size={batch}"] if batch else [])]
        # Given again, the command would forget how long runs took.
        if not (folder / FILE_NAME).is_file() or not read_record(folder).completed:
            _run(cluster, words, folder)
        runs = read_comparison(folder).runs
        for setting in settings:
            found[setting] = [run for run in runs if run.record.strategy.text == setting.strategy.text]
    return found


def hold_race(
    cluster: Cluster, data: Path, out: Path, settings: Sequence[Setting], given: argparse.Namespace
) -> RaceRecord:
    """Let all settings race, unless they have."""
    race = find_race(out, RANKS)
    if race is None:
        out.mkdir(parents=True, exist_ok=True)
        racing = racing_text(dict.fromkeys(settings, ""))
        words = ["tune", str(data), str(out), "--job=race", f"--racing={racing}"]
        words += [f"--race={given.race}", f"--ranks={RANKS}", f"--backends={given.backend}", "--seeds=1"]
        starter = cluster.starter
        environment = {**starter.environment, "OMP_NUM_THREADS": str(given.threads)}
        starter = JobStarter(starter.program, environment, cluster.launch_options)
        message = starter.run(RANKS, [*words, *cluster.options], out.with_name(f"{out.name}.log"))
        race = find_race(out, RANKS)
        if race is None:
            raise SystemExit(f"{out}: the race failed: {message}")
    return race


def _run(cluster: Cluster, words: Sequence[str], out: Path) -> None:
    """Run a command that starts its jobs itself.  A comparison some of whose runs failed is one, too."""
    out.parent.mkdir(parents=True, exist_ok=True)
    message = cluster.starter.run(1, words, out.with_name(f"{out.name}.log"))
    if message is not None and not (words[0] == "compare" and (out / FILE_NAME).is_file()):
        raise SystemExit(f"{out}: {words[0]} failed: {message}")


@contextmanager
def cluster_of(name: str, folder: Path, options: Sequence[str]) -> Iterator[Cluster]:
    """Make a cluster while the block runs.

    Args:
        folder: for its hostfile.
        options: of training, on every cluster.
    """
    program = own_program(Path(sys.executable))
    environment = dict(os.environ)
    if name != SLOW_LINK:
        slowed = (_SLOWED,) if name == SLOW_RANK else ()
        yield Cluster(name, JobStarter(program, environment), (), (*options, *slowed))
        return
    with ended_by_signals(), SwitchedNodes(RANKS, _BYTES_PER_S, _LATENCY_S) as nodes:
        folder.mkdir(parents=True, exist_ok=True)
        hosts = (folder / "hosts").absolute()
        hosts.write_text("".join(f"{node} slots=1\n" for node in nodes.names))
        launch = ("--hostfile", str(hosts), "--interface", "eth0")
        launch += (f"--mpi-args=--mca plm_rsh_agent {nodes.agent}",)
        starter = JobStarter((*nodes.on(nodes.names[0]), *program), environment)
        yield Cluster(name, starter, launch, tuple(options))


def measure(name: str, data: Path, out: Path, given: argparse.Namespace) -> Verdict:
    """Let tune choose on a cluster, train everything there, and judge."""
    with cluster_of(name, out, [f"--epochs={given.epochs}", *given.options]) as cluster:
        runs: dict[Setting, list[ComparedRun]] = {}
        if given.budget_share:
            runs = compare(cluster, data, out / "full", settings_before(name, given), given)
            budget = budget_of_share(runs, given.budget_share)
            print(f"{name}: {counted(len(runs), 'setting')} are trained; tune has {budget}", flush=True)
        else:
            budget = budget_for(name, given)
        tuned = tune(cluster, data, out / "tune", budget, given)
        tried = tried_in(tuned)
        due = [one for one in tried if one not in runs]
        spent = formatting.seconds(tuned.spent_s)
        then = f"; now {counted(len(due), 'setting')} are trained" if due else ""
        print(f"{name}: tune chose {tuned.chosen} in {spent}{then}", flush=True)
        # In a folder of their own: a comparison that goes on forgets how long its earlier runs took.
        folder = out / ("added" if given.budget_share else "full")
        runs |= compare(cluster, data, folder, due, given)
        runs = {one: runs[one] for one in tried}
        race = hold_race(cluster, data, out / "all", list(runs), given)
    return judge(name, tuned, runs, race)


def show(verdict: Verdict, tuned: TuneRecord) -> None:
    """Print what each setting took on a cluster, the soonest first, and how it fared with tune."""
    percent = formatting.percent
    title = (
        f"{verdict.cluster}: tune chose {verdict.chosen}: {_percent(verdict.regret)} later than the best "
        f"({_percent(verdict.own_regret)} at tune's own target), in {formatting.seconds(verdict.tune_s)} of "
        f"{formatting.seconds(verdict.full_s)}: {percent(verdict.cost_share)} %.  "
        f"{percent(verdict.luck)} % of the settings are within 5 % of the best."
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("setting")
    for column in ("to target, s", "range over seeds"):
        table.add_column(column, justify="right")
    table.add_column("in tune")
    for name, end in verdict.ends.items():
        least, most = end.range_s
        out_in = tuned.of(name).out_in
        what = f"out: {out_in}" if out_in else ("chosen" if name == verdict.chosen else "last two")
        table.add_row(name, _seconds(end.mean_s), f"{_seconds(least)} to {_seconds(most)}", what)
    for one in tuned.tried:
        if one.name not in verdict.ends:
            table.add_row(one.name, "failed", "", f"out: {one.out_in}" if one.out_in else "")
    make_console().print(table)


def _percent(share: float) -> str:
    return "never reached, or infinitely" if math.isinf(share) else f"{formatting.percent(share, 1)} %"


def _seconds(value: float) -> str:
    return "not reached" if math.isinf(value) else f"{value:.2f}"


def summary(verdicts: Sequence[Verdict]) -> dict[str, float | None]:
    """Return the figures of the last line."""
    worst = max(verdict.regret for verdict in verdicts)
    return {
        "regret_max": None if math.isinf(worst) else round(worst, 4),
        "cost_share_max": round(max(verdict.cost_share for verdict in verdicts), 4),
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; what stands after `--` goes to the training."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--budget", default="5m", help="of tune; one, or one for each of --clusters: 4m,8m")
    budget.add_argument(
        "--budget-share", type=float, default=0.0, help="of tune: of what the comparison took, e.g. 0.18"
    )
    parser.add_argument("--backend", default="mpi", help="of tune and the comparison")
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--periods", default="4,16")
    parser.add_argument("--batch-sizes", default="8,32", help="other batches of a rank, as tune has them")
    parser.add_argument("--seeds", default="1,2")
    parser.add_argument("--epochs", type=int, default=24, help="of a whole training")
    parser.add_argument("--hours", type=float, default=0.25, help="of synthetic speech")
    parser.add_argument("--race", type=int, default=12, help="rounds of the race of all settings")
    parser.add_argument("--threads", type=int, default=1, help="of a rank")
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs="*", help="after --: of the training")
    given = parser.parse_args(arguments)
    given.options = given.options or ["--preset=tiny", "--layers=1", "--cells=48", "--batch-size=16"]
    given.clusters = tuple(word for word in given.clusters.split(",") if word)
    unknown = set(given.clusters) - set(CLUSTERS)
    if unknown or not given.clusters:
        parser.error(f"--clusters: choose among {', '.join(CLUSTERS)}")
    if (number := len(given.budget.split(","))) not in (1, len(given.clusters)):
        parser.error(
            f"--budget: give one, or one for each of the {len(given.clusters)} clusters, not {number}"
        )
    if not 0 <= given.budget_share < 1:
        parser.error(f"--budget-share {given.budget_share:g}: give a share of the comparison, e.g. 0.18")
    return given


def main() -> None:
    given = parse(sys.argv[1:])
    reason = why_not() if SLOW_LINK in given.clusters else None
    if reason is not None:
        sys.exit(f"tune: {SLOW_LINK}: {reason}; or leave it out of --clusters")
    starter = JobStarter(own_program(Path(sys.executable)), dict(os.environ))
    with tempfile.TemporaryDirectory() as temporary:
        out = (given.out or Path(temporary)).absolute()
        prepare_synthetic(out / "data", starter, out / "prepare.log", given.hours)
        verdicts = []
        for name in given.clusters:
            try:
                verdicts.append(measure(name, out / "data", out / name, given))
            except JobStopped:
                print("stopped as requested; the same command goes on where --out was given", flush=True)
                sys.exit(exit_codes.STOPPED)
            show(verdicts[-1], read_tune(out / name / "tune"))
    print(json.dumps(summary(verdicts)))


if __name__ == "__main__":
    main()
