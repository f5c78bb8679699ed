"""Time contenders in turn, each in processes of its own, and compare them pair by pair.

Machines drift: a ratio is taken within a round, in which every contender ran once, and the median over
rounds is quoted with its range.  A contender is a command that prints, as its last line, JSON with a rate.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from speechdp.report.runs.raced import RacedSpeed

REPOSITORY = Path(__file__).resolve().parents[2]
Rates = dict[str, list[float]]


def launch_ranks(
    size: int, program: Sequence[str], *, timeout_s: float = 300.0, env: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Run `python PROGRAM` on `size` ranks of this machine; return the JSON of rank 0's last line."""
    command = [str(Path(sys.prefix) / "bin" / "mpirun"), "--oversubscribe", "--bind-to", "none"]
    # As `speechdp launch` does for jobs on one machine: Open MPI 4 wants ssh even then.
    command += ["--mca", "plm", "isolated", "-n", str(size), sys.executable, *program]
    return run_job(command, timeout_s=timeout_s, env=env)


def run_job(
    command: Sequence[str], *, timeout_s: float = 300.0, env: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Run a command that starts ranks; return the JSON of rank 0's last line."""
    environment = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPOSITORY),
        **(env or {}),
    }
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SystemExit(f"{' '.join(command)} did not end in {timeout_s:.0f} s\n{error.stderr!r}") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode != 0 or not lines:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    result: dict[str, float] = json.loads(lines[-1])
    return result


def run_rounds(contenders: Sequence[str], measure: Callable[[str], float], rounds: int, unit: str) -> Rates:
    """Measure every contender once a round, forwards and backwards in turn; print each figure."""
    rates: Rates = {name: [] for name in contenders}
    for number in range(rounds):
        order = list(contenders) if number % 2 == 0 else list(reversed(contenders))
        for name in order:
            rates[name].append(measure(name))
            print(f"round {number + 1}/{rounds}: {name:<32} {rates[name][-1]:>12,.0f} {unit}", flush=True)
    return rates


def compare(rates: Rates, ours: str, peer: str) -> float:
    """Print and return the median over rounds of ours / peer; from 6 rounds on, print its interval, too."""
    ratios = [a / b for a, b in zip(rates[ours], rates[peer], strict=True)]
    median = statistics.median(ratios)
    interval = RacedSpeed(tuple(ratios), peer).interval
    surely = "" if interval is None else f"; 95 % interval {interval[0]:.3f} to {interval[1]:.3f}"
    print(f"{ours} / {peer}: median {median:.3f}, from {min(ratios):.3f} to {max(ratios):.3f}{surely}")
    return round(median, 3)
