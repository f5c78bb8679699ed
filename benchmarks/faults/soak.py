"""Train for half an hour while ranks, nodes, links and the disk fail at random: the model must be the same.

    python benchmarks/faults/soak.py [--minutes 30] [--seed 1] [--epochs N] [--out FILE.json]
        [-- options of train]

Needs root (nodes are namespaces, tests/cluster/lab.py).  Three nodes, two ranks on two of them, one to spare;
`speechdp launch --max-restarts` runs on the first.  A fault comes 10 to 60 s after the run has recovered from
the last one: a rank or a node is killed, a link cut, a node frozen, the disk of the run stopped for 8 s or
slowed for 20 s; all the while each operation on the run's files, on all ranks, is late by up to 50 ms.
Before that the same run is trained undisturbed.  Data is synthesised.

Back at full speed: the steps of 3 s took at most 1.25 times as long as in the median of the undisturbed time
before.  Last line: JSON {"same_model": 1, "minutes": ..., "faults": ..., "back_s_after_a_killed_rank": ...}.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import safetensors.torch
import torch

from benchmarks.faults.soak_faults import Disk, Fault, Faults, stoppable_disk, why_no_disk
from benchmarks.faults.soak_watch import WINDOW_S, Event, Watch, show
from tests.cluster.lab import Lab, why_not
from tests.faults.fork_server import build_shim, why_no_shim
from tests.helpers.jobs import SPEECHDP, ended_within
from tests.helpers.killed import last_step
from tests.helpers.mpi import REPOSITORY, job_environment

_CHECKPOINT_STEPS = 50
_HANG_TIMEOUT_S = 12
_OPTIONS = (
    "--preset", "tiny", "--checkpoint-steps", str(_CHECKPOINT_STEPS), "--hang-timeout", str(_HANG_TIMEOUT_S),
    "--backend", "mpi",
)  # fmt: skip
_POLL_S = 0.25
_SLOWER = 1.25
#: How late an operation on the run's files is at most, us: writes and all that changes folders, and opening.
_LONGEST_DELAY_US = 50_000
_LATE_OPERATIONS = "open,create,opendir,write,fsync,fsyncdir,rename,unlink,mkdir,rmdir"
#: A run that has not recovered in so long has failed.
_RECOVERY_S = 180.0
#: Share of the disturbed run's time in which steps are taken, roughly: how many epochs fill the minutes.
_USEFUL = 0.6


def train(data: Path, run: Path, epochs: int, more: Sequence[str]) -> list[str]:
    """Return the command line of the training."""
    return ["train", str(data), str(run), *_OPTIONS, "--epochs", str(epochs), *more]


def undisturbed(data: Path, run: Path, epochs: int, more: Sequence[str]) -> float:
    """Train on this machine alone; return the seconds an epoch took."""
    begun = time.monotonic()
    ended = ended_within(7200, [*SPEECHDP, "launch", "-np", "2", "--", *train(data, run, epochs, more)])
    _assert_well(ended.exit_code, ended.output)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float(lines[-1]["time_s"]) / epochs if epochs > 1 else time.monotonic() - begun


def disturbed(
    lab: Lab, disk: Disk, run: Path, command: Sequence[str], seed: int
) -> tuple[list[Event], float]:
    """Train over the nodes while faults come; return them, and the time it took in s."""
    faults, watch = Faults(lab, disk, run, seed), Watch(run)
    pauses = random.Random(seed + 1)
    launch = [*SPEECHDP, "launch", "--hostfile", str(lab.hostfile(1)), "-np", "2", "--max-restarts", "1000"]
    begun = time.monotonic()
    events: list[Event] = []
    launch.append(_late_files(build_shim(disk.path), run, seed))
    command = lab.command(lab.names[0], [*launch, "--", *command])
    with closing(faults), _started(command, lab.folder / "output.txt") as job:
        speeds = _wait_for_speed(job, watch, pauses.uniform(15, 30))
        while job.poll() is None:
            full = statistics.median(speeds)
            before, at, step, checkpoint = len(_starts(run)), time.monotonic(), watch.step(), last_step(run)
            fault = faults.cause()
            back_s = _recover(job, watch, run, fault, before, full, at)
            starts = _starts(run)[before:]
            resumed_from = starts[-1] if starts else None
            lost = 0 if resumed_from is None else max(0, step - resumed_from)
            event = Event(
                at - begun,
                fault.kind,
                fault.where,
                fault.restarts,
                step,
                checkpoint,
                resumed_from,
                lost,
                back_s,
            )
            print(json.dumps(asdict(event)), file=sys.stderr, flush=True)
            assert resumed_from is None or resumed_from >= checkpoint, (
                "more was lost than since the checkpoint"
            )
            events.append(event)
            faults.wait_until_mended()
            speeds = speeds[-40:] + _wait_for_speed(job, watch, pauses.uniform(10, 60))
        seconds = time.monotonic() - begun
    _assert_well(job.returncode, (lab.folder / "output.txt").read_text())
    return events, seconds


def _late_files(shim: Path, run: Path, seed: int) -> str:
    """Return what has mpirun give every rank, on whatever node, a shim that makes it late with its files."""
    order = f"folder={run};op={_LATE_OPERATIONS};n=0;longest_us={_LONGEST_DELAY_US};seed={seed}"
    return f"--mpi-args={shlex.join(['-x', f'LD_PRELOAD={shim}', '-x', f'IOFAULT={order}'])}"


@contextmanager
def _started(command: Sequence[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a job that prints into a file; it does not outlive the block."""
    with output.open("wb") as file:
        job = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=job_environment(),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield job
    except BaseException:
        print(output.read_text(), file=sys.stderr)
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def _wait_for_speed(job: subprocess.Popen[bytes], watch: Watch, seconds: float) -> list[float]:
    """Let the run alone for a while; return its speeds in steps a second."""
    begun, speeds = time.monotonic(), []
    while job.poll() is None and time.monotonic() < begun + seconds:
        watch.step()
        time.sleep(_POLL_S)
        speed = watch.speed(begun)
        if speed > 0:
            speeds.append(speed)
    return speeds


def _recover(
    job: subprocess.Popen[bytes], watch: Watch, run: Path, fault: Fault, before: int, full: float, at: float
) -> float | None:
    """Wait until the run is as fast as before; return how long after `at` that began, s."""
    again = None
    while job.poll() is None:
        assert time.monotonic() < at + _RECOVERY_S, f"the run has not recovered from: {fault}"
        watch.step()
        if again is None and (not fault.restarts or len(_starts(run)) > before):
            again = time.monotonic()
        if again is not None and watch.speed(again) * _SLOWER >= full:
            return max(0.0, time.monotonic() - WINDOW_S - at)
        time.sleep(_POLL_S)
    return None


def _starts(run: Path) -> list[int]:
    """Return the step from which each start of the run went on."""
    try:
        lines = (run / "starts.jsonl").read_text().splitlines()
        return [int(json.loads(line)["step"]) for line in lines]
    except (OSError, ValueError):
        return []


def compare(run: Path, other: Path) -> None:
    """Raise AssertionError unless two runs have the same model, bit for bit, and the same evaluations."""
    first, second = (safetensors.torch.load_file(path / "model.safetensors") for path in (run, other))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), f"{name} differs"
    rows = [
        [
            {key: row[key] for key in ("epoch", "step", "frames", "train_loss", "heldout_log_prob")}
            for row in map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
        ]
        for path in (run, other)
    ]
    assert rows[0] == rows[1], "metrics.jsonl differ"


def _assert_well(exit_code: int, output: str) -> None:
    if exit_code != 0:
        raise SystemExit(f"the run failed with exit code {exit_code}\n{output}")


def main() -> None:
    """Prepare, train undisturbed and disturbed, compare, report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=0, help="0: as many as fill the minutes")
    parser.add_argument("--out", type=Path)
    parser.add_argument("more", nargs="*")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # nodes and disk go down
    reason = why_not() or why_no_disk() or why_no_shim()
    if reason is not None:
        raise SystemExit(f"soak: {reason}")
    with tempfile.TemporaryDirectory(prefix="speechdp-soak-") as temporary, stoppable_disk() as disk:
        folder, data = Path(temporary), disk.path / "data"
        prepare = [*SPEECHDP, "prepare", "--synthetic", "0.3", str(data)]
        subprocess.run(prepare, check=True, stdout=sys.stderr)
        epochs = options.epochs
        if not epochs:
            epoch_s = undisturbed(data, folder / "trial", 3, options.more)
            epochs = max(3, round(options.minutes * 60 * _USEFUL / epoch_s))
        undisturbed(data, folder / "undisturbed", epochs, options.more)
        run = disk.path / "disturbed"
        with Lab(3, folder) as lab:
            command = train(data, run, epochs, options.more)
            events, seconds = disturbed(lab, disk, run, command, options.seed)
        compare(folder / "undisturbed", run)
    show(events)
    result = {
        "same_model": 1,
        "minutes": round(seconds / 60, 1),
        "epochs": epochs,
        "faults": len(events),
        "restarts": sum(event.resumed_from is not None for event in events),
        "most_steps_lost": max((event.lost_steps for event in events), default=0),
        "back_s_after_a_killed_rank": _median([e.back_s for e in events if e.kind == "rank killed"]),
    }
    if options.out is not None:
        options.out.write_text(json.dumps({**result, "events": [asdict(e) for e in events]}, indent=2) + "\n")
    print(json.dumps(result))


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 1) if known else None


if __name__ == "__main__":
    main()
