"""How long training takes to begin: from `speechdp launch -np 2 -- train` to the end of its first step.

    python benchmarks/commands/start.py [--rounds 5] [--ranks 2] [--out OUT]

Each round starts a training of one step on a little synthetic speech (made once in OUT), and beside it what
no start can do without: `mpirun -np 2 python -c "import torch, mpi4py.MPI"`.  The machine may be busy: what
counts is the ratio of the two within a round, one right after the other, in alternating order.  A second
ratio is that of the CPU times of both jobs from beginning to end, which others disturb less.

Stages of a start, s from its beginning: the launcher has started mpirun; the run has begun (ranks have met
and data are checked: run.json is there); its first step has ended (the timeline of rank 0 has a line); all
processes have ended.

Last line: JSON {"start_vs_imports": median of the ratios, "cpu_vs_imports": ..., "first_step_s": ...}.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich import box
from rich.table import Table

from benchmarks.data.data_wait import prepare
from speechdp.cli.support.console import make_console
from speechdp.experiments.jobs import JobStarter
from speechdp.launching.command import child_environment, own_program
from speechdp.launching.hostfile import local_hosts
from speechdp.launching.mpi.job import LaunchJob
from speechdp.launching.processes import descendants, program_name
from speechdp.launching.programs import find_mpirun

IMPORTS = "import torch, mpi4py.MPI"
_HOURS = 0.02
_LOOK_EVERY_S = 0.005


@dataclass(frozen=True)
class Start:
    """Times of a training's beginning, s from when `speechdp launch` was started, and all its CPU time, s."""

    launched_s: float
    begun_s: float
    stepped_s: float
    ended_s: float
    cpu_s: float


@dataclass(frozen=True)
class Round:
    """A start, and the imports that it is compared with: their wall and CPU time, s."""

    start: Start
    imports_s: float
    imports_cpu_s: float

    @property
    def ratio(self) -> float:
        """Time to the end of the first step over that of the imports."""
        return self.start.stepped_s / self.imports_s

    @property
    def cpu_ratio(self) -> float:
        """The same of the CPU times of whole jobs."""
        return self.start.cpu_s / self.imports_cpu_s


def _cpu_s() -> float:
    """Return the CPU time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run_watched(
    argv: list[str], environment: Mapping[str, str], stages: Mapping[str, Callable[[int], bool]]
) -> dict[str, float]:
    """Run a command to its end; return when each stage was first seen, and `ended` and `cpu`, s."""
    cpu, begun = _cpu_s(), time.perf_counter()
    seen: dict[str, float] = {}
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(argv, env=dict(environment), stdout=output, stderr=subprocess.STDOUT)
        while child.poll() is None:
            for name, is_reached in stages.items():
                if name not in seen and is_reached(child.pid):
                    seen[name] = time.perf_counter() - begun
            time.sleep(_LOOK_EVERY_S)
        ended = time.perf_counter() - begun
        if child.returncode != 0 or len(seen) < len(stages):
            output.seek(0)
            said = output.read().decode(errors="replace")
            raise SystemExit(f"{' '.join(argv)}: exit code {child.returncode}, seen {sorted(seen)}\n{said}")
    return {**seen, "ended": ended, "cpu": _cpu_s() - cpu}


def measure_start(data: Path, run_dir: Path, ranks: int) -> Start:
    """Start a training of one step; return when what was reached."""
    shutil.rmtree(run_dir, ignore_errors=True)
    timeline = run_dir / "timeline" / "rank-0000.jsonl"
    training = ("train", str(data), str(run_dir), "--max-steps", "1")
    found = _run_watched(
        [*own_program(Path(sys.executable)), "launch", "-np", str(ranks), "--", *training],
        os.environ,
        {
            "launched": lambda pid: any(map(_is_mpirun, descendants(pid))),
            "begun": lambda pid: (run_dir / "run.json").exists(),
            "stepped": lambda pid: timeline.exists() and '"step"' in timeline.read_text(errors="replace"),
        },
    )
    return Start(found["launched"], found["begun"], found["stepped"], found["ended"], found["cpu"])


def _is_mpirun(pid: int) -> bool:
    return program_name(pid).startswith(("mpirun", "orterun", "prterun"))


def measure_imports(ranks: int) -> tuple[float, float]:
    """Run the imports alone on so many ranks; return wall and CPU time, s."""
    mpi = find_mpirun(Path(sys.prefix), os.environ.get("PATH", os.defpath))
    job = LaunchJob(local_hosts(ranks).allocate(ranks), (sys.executable,), ("-c", IMPORTS))
    cores = max(1, (os.cpu_count() or 1) // ranks)
    environment = child_environment(job, mpi, os.environ, is_root=os.geteuid() == 0, cores=cores)
    argv = [str(mpi.mpirun), "-np", str(ranks), "--bind-to", "none", "--oversubscribe"]
    found = _run_watched([*argv, *job.program, *job.arguments], environment, {})
    return found["ended"], found["cpu"]


def measure_round(number: int, data: Path, out: Path, ranks: int) -> Round:
    """Measure both, the imports first in every other round."""
    if number % 2:
        imports = measure_imports(ranks)
        return Round(measure_start(data, out / "run", ranks), *imports)
    start = measure_start(data, out / "run", ranks)
    return Round(start, *measure_imports(ranks))


def as_table(rounds: list[Round]) -> Table:
    """Lay out the stages of each round, and the two ratios."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    headings = ("launcher", "ranks meet", "first step", "end", "CPU", "imports", "their CPU", "ratio")
    for heading in ("round", *headings, "CPU ratio"):
        table.add_column(heading, justify="right")
    for number, it in enumerate(rounds):
        s = it.start
        stages = (s.launched_s, s.begun_s - s.launched_s, s.stepped_s - s.begun_s, s.ended_s - s.stepped_s)
        shares = [f"{stage:.2f} s ({stage / s.ended_s:.0%})" for stage in stages]
        others = [f"{x:.2f} s" for x in (s.cpu_s, it.imports_s, it.imports_cpu_s)]
        table.add_row(str(number + 1), *shares, *others, f"{it.ratio:.2f}", f"{it.cpu_ratio:.2f}")
    return table


def main() -> None:
    """Measure round by round, and print the table and the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "speechdp-start")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    data = given.out / "data"
    starter = JobStarter(own_program(Path(sys.executable)), dict(os.environ), ())
    prepare(data, "features", _HOURS, starter)
    measure_round(0, data, given.out, given.ranks)  # fills the page cache
    rounds = [measure_round(number, data, given.out, given.ranks) for number in range(given.rounds)]
    make_console().print(as_table(rounds))
    figures = {
        "start_vs_imports": statistics.median(it.ratio for it in rounds),
        "cpu_vs_imports": statistics.median(it.cpu_ratio for it in rounds),
        "first_step_s": statistics.median(it.start.stepped_s for it in rounds),
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
