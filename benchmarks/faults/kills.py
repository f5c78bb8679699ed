"""Signal random processes of trainings, comparisons and sweeps: the models must be those of undisturbed ones.

    python benchmarks/faults/kills.py [--minutes 30] [--seed 1] [--commands train,compare,sweep]

A story is a command, drawn at random: a training with some strategy, back-end, number format and 2 or 3 ranks
under `speechdp launch`, with --max-restarts or without; or a comparison or sweep.  At random instants a
process of it (launch, mpirun, a rank, ...) gets a signal, mostly SIGKILL; then the same command is given
again, until it ends well.  Wrong is:

- a job that does not end in 4 minutes, or leaves a process behind;
- a traceback, or an end without a word where the process that speaks was not the one signalled;
- a start that nobody disturbed and that fails, or more than 9 starts;
- a model that is not, bit for bit, that of the same command left in peace.

A process that mpirun has forked and that is not yet what it will be is left alone: there a signal of a crash,
which nothing in it can cause, waits for ever in a handler of UCX's.

Each story is a line on standard error; those that are wrong keep their folder.  Data is synthesised.
Last line: JSON {"stories": ..., "starts": ..., "signals": ..., "wrong": ...}.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.helpers.jobs import SPEECHDP
from tests.helpers.mpi import REPOSITORY, job_environment

#: Strategies whose runs repeat, as they are killed or not.
_STRATEGIES = (
    "gradient_averaging",
    "model_averaging:period=4",
    "model_averaging:period=4,compression=int8",
    "delayed_averaging:period=4",
    "dpsgd",
    "slowmo:period=4",
    "bmuf:period=4",
    "diloco:period=4",
)
_TINY = ("--preset", "tiny", "--context", "none", "--batch-size", "4", "--checkpoint-steps", "4")
_SIGNALS = (
    *[signal.SIGKILL] * 5,
    *[signal.SIGTERM] * 2,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGSTOP,  # and SIGCONT soon after
)
#: The variable by which processes of a job are known.
_MARK = "KILLS_STORY"
_LONGEST_S, _LEFT_S = 240.0, 45.0
_MOST_STARTS, _DISTURBED_STARTS = 9, 4
#: Of signals, how many go to the process that was started.
_TO_FIRST = 0.3


@dataclass(frozen=True)
class Command:
    """What is started.

    Attributes:
        arguments: of speechdp, but for the folder to write, for which "OUT" stands.
        more: options of launch that only some starts have.
    """

    arguments: tuple[str, ...]
    more: tuple[str, ...] = ()

    def line(self, out: Path, rng: random.Random | None = None) -> list[str]:
        """Return the command line; with `rng` at times with options that the undisturbed one has not."""
        words = [str(out) if word == "OUT" else word for word in self.arguments]
        if rng is not None and self.more and rng.random() < 0.4:
            words[3:3] = self.more  # after launch -np N
        return [*SPEECHDP, *words]


def draw_command(name: str, data: Path, rng: random.Random) -> Command:
    """Return a command of this name."""
    if name == "compare":
        what = (
            "--strategies",
            "gradient_averaging,model_averaging:period=4",
            "--ranks",
            "2",
            "--seeds",
            "1,2",
        )
        options = (*what, "--race", "0", *_TINY, "--epochs", "3", "--backend", "torch")
        return Command(("compare", str(data), "OUT", *options))
    if name == "sweep":
        options = ("--periods", "1,4", "--race", "0", *_TINY, "--epochs", "3", "--backend", "torch")
        return Command(("launch", "-np", "2", "--", "sweep", str(data), "OUT", *options))
    how = {
        "--strategy": rng.choice(_STRATEGIES),
        "--backend": rng.choice(("mpi", "horovod", "torch")),
        "--precision": rng.choice(("fp32", "fp32", "bf16")),
    }
    options = (*[word for pair in how.items() for word in pair], *_TINY, "--epochs", "16", "--resume")
    started = ("launch", "-np", str(rng.choice((2, 2, 3))), "--", "train", str(data), "OUT")
    return Command((*started, *options), ("--max-restarts", "3"))


@dataclass
class Story:
    """What was done to a command, and what was wrong."""

    command: Command
    starts: list[str] = field(default_factory=list)
    signals: int = 0
    wrong: list[str] = field(default_factory=list)


def models(folder: Path) -> dict[str, str]:
    """Return the checksum of every model below a folder, by its path; not of runs in equal time."""
    found = sorted(folder.rglob("model.safetensors"))
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in found
        if not path.parent.name.startswith("time-")
    }


class Processes:
    """The processes of one start."""

    def __init__(self, command: Sequence[str], output: Path, mark: str) -> None:
        self._mark, self._begun = f"{_MARK}={mark}".encode(), time.monotonic()
        with output.open("wb") as file:
            self.first = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env={**job_environment(), _MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def alive(self) -> list[tuple[int, str]]:
        """Return number and command line of each that has not ended."""
        found: list[tuple[int, str]] = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self._mark in (entry / "environ").read_bytes().split(b"\0"):
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if words:  # a zombie has none
                        found.append((int(entry.name), words))
            except OSError:
                continue
        return found

    def signal_one(self, rng: random.Random) -> tuple[str, bool] | None:
        """Send a signal to one of them; None where all have ended.

        Returns:
            Which, to whom and when; whether it is the process that was started.
        """
        alive = self.alive()
        launchers = [pid for pid, words in alive if "/mpirun " in words]
        alive = [one for one in alive if one[0] not in launchers[1:]]
        if not alive:
            return None
        pid = self.first.pid if rng.random() < _TO_FIRST else rng.choice(alive)[0]
        number = rng.choice(_SIGNALS)
        _send(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(rng.choice((0.2, 3.0)))
            _send(pid, signal.SIGCONT)
        words = next((words for other, words in alive if other == pid), "?")
        kind = "launch" if pid == self.first.pid else words.rpartition("/bin/")[2][:16]
        return f"{number.name} of {kind} after {time.monotonic() - self._begun:.2f} s", pid == self.first.pid

    def end(self) -> list[str]:
        """Wait until all have ended, or end them; return what was wrong."""
        wrong = []
        if not _within(_LONGEST_S, lambda: self.first.poll() is not None):
            wrong.append(f"had not ended after {_LONGEST_S:g} s: {[_state(*one) for one in self.alive()]}")
            for pid, _ in reversed(self.alive()):  # Python's then say in the output where they stand
                _send(pid, signal.SIGABRT)
                time.sleep(1)
        elif not _within(_LEFT_S, lambda: not self.alive()):
            wrong.append(f"left {self.alive()}")
        for pid, _ in self.alive():
            _send(pid, signal.SIGKILL)
        self.first.wait()
        return wrong


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _state(pid: int, words: str) -> str:
    """Return what the kernel says that a process waits for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        waits = Path(f"/proc/{pid}/wchan").read_text()
    except OSError:
        state = waits = "?"
    return f"{pid} {state} {waits} {words[-80:]}"


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def start_once(story: Story, out: Path, rng: random.Random, usual_s: float) -> bool:
    """Start a story's command, disturb it or not, wait for its end; return whether it ended well."""
    number = len(story.starts) + 1
    output = out.with_name(f"{out.name}-{number}.txt")
    job = Processes(story.command.line(out, rng), output, f"{os.getpid()}-{output.name}")
    done: list[str] = []
    first_hit = False
    for turn in range(rng.choice((1, 1, 2, 3)) if number <= _DISTURBED_STARTS else 0):
        wait_s = rng.uniform(0, usual_s * (0.2 if turn else 1.0))
        if _within(wait_s, lambda: job.first.poll() is not None) or (sent := job.signal_one(rng)) is None:
            break
        done.append(sent[0])
        first_hit = first_hit or sent[1]
    story.wrong += job.end()
    story.signals += len(done)
    story.starts.append(f"{', '.join(done) or 'in peace'}: {job.first.returncode}")
    text = output.read_text(errors="replace")
    ended_well = job.first.returncode == 0
    if "Traceback" in text:
        story.wrong.append(f"a traceback in {output.name}")
    if not ended_well and not done:
        story.wrong.append(f"failed undisturbed: {output.name}")
    if not ended_well and not first_hit and not text.strip():
        story.wrong.append(f"ended without a word: {output.name}")
    return ended_well


def run_story(
    command: Command, expected: dict[str, str], usual_s: float, out: Path, rng: random.Random
) -> Story:
    """Start a command again and again until it ends well, disturbing it; compare what it leaves."""
    story = Story(command)
    while len(story.starts) < _MOST_STARTS:
        if start_once(story, out, rng, usual_s):
            break
    else:
        story.wrong.append(f"never done in {_MOST_STARTS} starts")
        return story
    if (found := models(out)) != expected:
        story.wrong.append(f"other models: {sorted(set(found.items()) ^ set(expected.items()))}")
    return story


def main() -> None:
    """Prepare, then tell stories until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--commands", default="train,train,compare,sweep", help="drawn from these")
    options = parser.parse_args()
    rng, until = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    folder = Path(tempfile.mkdtemp(prefix="speechdp-kills-"))
    data = folder / "data"
    subprocess.run([*SPEECHDP, "prepare", "--synthetic", "0.001", str(data)], check=True, stdout=sys.stderr)
    undisturbed: dict[Command, tuple[dict[str, str], float]] = {}
    stories: list[Story] = []
    while time.monotonic() < until:
        command = draw_command(rng.choice(options.commands.split(",")), data, rng)
        out = folder / f"story-{len(stories) + 1}"
        if command not in undisturbed:
            begun, reference = time.monotonic(), folder / "undisturbed"
            subprocess.run(command.line(reference), env=job_environment(), check=True, stdout=sys.stderr)
            undisturbed[command] = models(reference), time.monotonic() - begun
            shutil.rmtree(reference)
        story = run_story(command, *undisturbed[command], out, rng)
        stories.append(story)
        said = {"command": " ".join(command.arguments[-15:]), "starts": story.starts, "wrong": story.wrong}
        print(json.dumps(said), file=sys.stderr, flush=True)
        if not story.wrong:
            for path in (out, *folder.glob(f"{out.name}-*.txt")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    wrong = sum(bool(story.wrong) for story in stories)
    if wrong == 0:
        shutil.rmtree(folder)
    else:
        print(f"{folder} has the folders of {wrong} stories", file=sys.stderr)
    counts = {
        "stories": len(stories),
        "starts": sum(len(story.starts) for story in stories),
        "signals": sum(story.signals for story in stories),
        "wrong": wrong,
    }
    print(json.dumps(counts))
    sys.exit(int(wrong > 0))


if __name__ == "__main__":
    main()
