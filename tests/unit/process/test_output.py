"""Output that cannot be written, or that a signal cuts short: no traceback, and what was made is kept."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from speechdp.cli import main
from speechdp.data.shards.dataset import Dataset
from speechdp.parallel.stop import StopRequest
from speechdp.process import output
from speechdp.process.ending import end_by_exception
from tests.helpers.tiny_data import TINY_MODEL, write_tiny_data

needs_dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
#: The only line there is about standard output, where nothing else tells.
LINE = (
    "speechdp: standard output: cannot be written (No space left on device), lines are lost; "
    "free some space there, or send it elsewhere\n"
)
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TRAINING = (*TINY_MODEL, "--epochs", "1", "--backend", "serial", "--sample-hz", "0")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("output") / "data")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[int, str]]]:
    """Run `speechdp ARGUMENTS` in this process over streams of its own; return exit code and stderr."""
    kept = {descriptor: os.dup(descriptor) for descriptor in (0, 1, 2)}
    streams = sys.stdout, sys.stderr
    errors = tmp_path / "stderr"

    def put(descriptor: int, target: int | Path | None) -> None:
        if target is None:
            os.close(descriptor)
            return
        opened = target if isinstance(target, int) else os.open(target, os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)

    def run(
        stdout: int | Path | None, *arguments: str | Path, stderr: Path | None = errors
    ) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["speechdp", *map(str, arguments)])
        monkeypatch.setattr(output, "_losses", {})
        monkeypatch.setattr(main, "leave", sys.exit)  # this process stays
        for number in (*ENDING, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        for descriptor, target in ((1, stdout), (2, stderr)):
            put(descriptor, target)
        sys.stdout = None if stdout is None else io.TextIOWrapper(io.FileIO(1, "w", closefd=False))  # type: ignore[assignment]
        sys.stderr = None if stderr is None else io.TextIOWrapper(io.FileIO(2, "w", closefd=False))  # type: ignore[assignment]
        with pytest.raises(SystemExit) as ended:
            main.main()
        sys.stderr.flush()
        assert isinstance(ended.value.code, int)
        return ended.value.code, errors.read_text() if errors.exists() else ""

    yield run
    sys.stdout, sys.stderr = streams
    for descriptor, copy in kept.items():
        os.dup2(copy, descriptor)
        os.close(copy)


def gone() -> int:
    """Return the writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


Command = Callable[..., tuple[int, str]]


@needs_dev_full
@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"], ["inspect", "DATA"]])
def test_a_command_that_only_shows_ends_with_a_line(
    command: Command, dataset: Dataset, arguments: list[str]
) -> None:
    words = [str(dataset.path) if word == "DATA" else word for word in arguments]
    assert command(Path("/dev/full"), *words) == (1, LINE)


@needs_dev_full
def test_where_nothing_can_be_written_the_exit_code_tells(command: Command) -> None:
    assert command(Path("/dev/full"), "--help", stderr=Path("/dev/full")) == (1, "")
    assert command(Path("/dev/full"), "inspect", "nowhere", stderr=None) == (1, "")


def test_nobody_who_reads_is_exit_code_141_without_a_word(command: Command, dataset: Dataset) -> None:
    assert command(gone(), "inspect", dataset.path) == (141, "")
    assert command(gone(), "inspect", "nowhere")[0] == 1  # what went wrong counts more


def test_closed_streams_are_not_taken_by_the_next_file(command: Command, dataset: Dataset) -> None:
    assert command(None, "inspect", dataset.path, stderr=None) == (0, "")
    for descriptor in (1, 2):
        assert os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))  # noqa: PTH116


@needs_dev_full
@pytest.mark.parametrize(
    ("stdout", "exit_code", "said"),
    [
        (
            lambda: Path("/dev/full"),
            0,
            "standard output: cannot be written (No space left on device), lines ",
        ),
        (gone, 141, "standard output: its reader has exited, "),
    ],
)
def test_training_goes_on_and_says_so_in_the_run(
    command: Command,
    dataset: Dataset,
    tmp_path: Path,
    stdout: Callable[[], int | Path],
    exit_code: int,
    said: str,
) -> None:
    run = tmp_path / "run"
    assert command(stdout(), "train", dataset.path, run, *TRAINING) == (exit_code, "")
    assert (run / "completed.json").is_file()
    (notice,) = (run / "notices.txt").read_text().splitlines()
    assert said in notice


def test_a_run_that_begins_only_later_is_told_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `speechdp launch`, whose ranks make the folder; --overwrite takes it away again."""
    monkeypatch.setattr(output, "_losses", {})
    run = tmp_path / "run"
    writing = gone()
    try:
        with output.losses_noted_in(run):
            monkeypatch.setattr(output, "STDOUT", writing)
            monkeypatch.setitem(output._NAMES, writing, "standard output")
            assert output.write_standard(writing, b"lost") == 4
            assert not run.exists()
            run.mkdir()
            (run / "run.json").touch()
        assert "its reader has exited" in (run / "notices.txt").read_text()
        assert output.lost_output() is not None
    finally:
        os.close(writing)


def test_a_stream_that_blocks_loses_nothing() -> None:
    """Whoever shares a terminal or pipe may have set it so."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    received = []

    def read() -> None:
        time.sleep(0.2)
        with open(reading, "rb") as file:  # noqa: PTH123 - a descriptor
            received.append(len(file.read()))

    reader = threading.Thread(target=read)
    reader.start()
    stream = output._kept(io.TextIOWrapper(io.FileIO(writing, "w", closefd=False)), output.STDOUT)
    stream.write("x" * 300_000)
    stream.flush()
    os.close(writing)
    reader.join()
    assert received == [300_000]


# --- signals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", ENDING)
def test_a_signal_ends_a_command_in_one_line(
    command: Command,
    dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    signum: signal.Signals,
) -> None:
    cleaned: list[int] = []

    def describe(_dataset: Dataset) -> str:
        try:
            signal.raise_signal(signum)
        finally:
            signal.raise_signal(signum)  # the terminal's second does not disturb the cleaning up
            cleaned.append(1)
        return ""

    monkeypatch.setattr("speechdp.cli.inspect.describe", describe)
    code, said = command(tmp_path / "stdout", "inspect", dataset.path)
    assert (code, said, cleaned) == (128 + signum, f"speechdp: ended by {signum.name}\n", [1])


def test_decode_is_ended_likewise(
    command: Command, tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "speechdp.tasks.model_file.load_model", lambda *args, **options: signal.raise_signal(signal.SIGTERM)
    )
    code, said = command(tmp_path / "stdout", "decode", tmp_path, dataset.path, "--backend", "serial")
    assert (code, said) == (143, "speechdp: ended by SIGTERM\n")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize(
    ("arguments", "work"),
    [
        (("compare", "DATA", "OUT"), "speechdp.experiments.compare.run.Comparer.run"),
        (("compare", "DATA", "OUT"), "speechdp.cli.report.print_report"),
        (("tune", "DATA", "OUT", "--ranks", "2"), "speechdp.experiments.tune.run.measure"),
        (("profile", "DATA", "OUT"), "speechdp.experiments.profile.jobs.Profiler.run"),
        (("sweep", "--script", __file__, "OUT"), "speechdp.experiments.sweep.script.run_script_sweep"),
    ],
)
def test_an_experiment_stops_between_two_jobs_as_in_one(
    command: Command,
    dataset: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: Sequence[str],
    work: str,
    signum: signal.Signals,
) -> None:
    """So that a batch job that is warned then goes on, too, when it is started again."""
    places = {"DATA": dataset.path, "OUT": tmp_path / "out"}
    monkeypatch.setattr("speechdp.experiments.compare.run.Comparer.run", lambda _: SimpleNamespace(runs=()))
    monkeypatch.setattr(work, lambda *_args, **_options: signal.raise_signal(signum))
    code, said = command(tmp_path / "stdout", *(places.get(word, word) for word in arguments))
    assert (code, said) == (75, "")
    news = (tmp_path / "stdout").read_text()
    assert f"stopped as requested; the same command continues {tmp_path / 'out'}" in news
    assert not (tmp_path / "out" / "owner.json").exists()


def test_a_terminal_that_closes_stops_training_but_for_nohup() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as request:
            end_by_exception()
            signal.raise_signal(signal.SIGHUP)
            assert request.received is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopRequest() as request:
            signal.raise_signal(signal.SIGHUP)
            assert request.received == "SIGHUP"
    finally:
        signal.signal(signal.SIGHUP, former)


@needs_dev_full
def test_a_rank_that_can_say_nothing_still_leaves() -> None:
    program = (
        "import sys; from speechdp.comm.environment import end_process, end_process_with\n"
        "print('unwritten') if sys.argv[1] == 'plain' else end_process_with('the last word', 124)\n"
        "end_process(70)"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w") as full:
        for how, code in (("plain", 70), ("with words", 124)):
            argv = [sys.executable, "-c", program, how]
            ended = subprocess.run(argv, stdout=full, stderr=full, env=buffered, check=False)
            assert ended.returncode == code
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    argv = [sys.executable, "-c", program, "with words"]
    assert subprocess.run(argv, stderr=writing, timeout=300, check=False).returncode == 124
    for descriptor in (reading, writing):
        os.close(descriptor)
