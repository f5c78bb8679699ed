"""Commands beside a job that owns their folder, and folders that are links or another user's."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from speechdp.cli.main import run as speechdp
from speechdp.cli.sweep import SweepCommand
from speechdp.cli.train import TrainCommand
from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.data.shards.data_dir import check_target, new_data_dir, owner_file
from speechdp.data.shards.dataset import Dataset
from speechdp.errors import ConfigError, RunError
from speechdp.experiments.race.plan import RaceOptions
from speechdp.experiments.sweep.plan import SweepPlan
from speechdp.experiments.sweep.training import run_sweep
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.ownership.claimant import Claimant
from speechdp.ownership.overwrite import RUN, TUNE, check_overwrite, empty
from speechdp.ownership.owner import OWNER_FILE, FolderOwner, Surroundings
from speechdp.parallel.run_files import Metrics
from speechdp.parallel.script_folder import ScriptFolder
from speechdp.parallel.stop import StopRequest
from speechdp.process.ending import Ended
from speechdp.tasks.metrics import Metric
from speechdp.train.ownership import owned
from speechdp.train.progress import SilentReporter
from speechdp.train.session import Session
from speechdp.watchdog import shared_disk
from tests.helpers.corpora import needs_espeak
from tests.helpers.jobs import SPEECHDP
from tests.helpers.mpi import REPOSITORY, job_environment
from tests.helpers.tiny_data import TINY_MODEL, TinySizes, write_tiny_data

SIZES = TinySizes(train=4, dev=2, test=2, shards=1)
#: Seconds, long enough for whatever must happen.
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_tiny_data(tmp_path_factory.mktemp("owned") / "data", SIZES)


def owner(folder: Path, file: Path | None = None, **changes: object) -> FolderOwner:
    claimant = replace(Claimant.here("train", {}), **changes)  # type: ignore[arg-type]
    return FolderOwner(folder, claimant, Surroundings(print, print), file=file, beats=False)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


# --- beside a job that runs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "record"),
    [
        (["train", "--resume"], "run.json"),
        (["train", "--overwrite"], "run.json"),
        (["train"], ""),
        (["sweep", "--overwrite"], "sweep.json"),
        (["compare", "--overwrite"], "compare.json"),
        (["profile", "--overwrite"], "profile.json"),
    ],
)
def test_a_folder_in_use_is_refused_and_left_as_it_is(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], record: str
) -> None:
    out = tmp_path / "out"
    with owner(out):
        for name in filter(None, (record, "model_averaging-1/run.json")):
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_text("{}")
        before = tree(out)
        name, *options = command
        assert speechdp([name, str(dataset.path), str(out), *options]) == 73
        assert one_line(capsys).startswith(
            f"speechdp: {out}: is in use by speechdp train, process {os.getpid()} on "
        )
        assert tree(out) == before


@pytest.mark.parametrize(("command", "record"), [("sweep", "sweep.json"), ("compare", "compare.json")])
def test_what_holds_a_run_in_use_is_not_deleted(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, record: str
) -> None:
    out = tmp_path / "out"
    with owner(out / "gradient_averaging"):
        (out / record).write_text("{}")
        before = tree(out)
        assert speechdp([command, str(dataset.path), str(out), "--overwrite"]) == 73
        assert f"{out / 'gradient_averaging'}: is in use by" in one_line(capsys)
        assert tree(out) == before


@pytest.mark.parametrize("command", ["sweep", "compare", "profile", "tune"])
@pytest.mark.parametrize("name", ["DATA", "--initial-model", "--alignments"])
def test_what_is_to_be_read_is_not_deleted(
    dataset: Dataset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    name: str,
) -> None:
    for module in ("compare", "tune"):  # it would say that this is no model
        monkeypatch.setattr(f"speechdp.cli.{module}.check_training", lambda *given, **named: None)
    out = tmp_path / "out"
    shutil.copytree(dataset.path, out / "mine")
    (out / f"{command}.json").write_text("{}")
    before = tree(out)
    data = out / "mine" if name == "DATA" else dataset.path
    given = [] if name == "DATA" else [f"{name}={out / 'mine'}"]
    if command == "tune":
        given += ["--ranks", "2"]
    assert speechdp([command, str(data), str(out), "--overwrite", *given]) == 1
    lies = f"{name} {out / 'mine'}: lies in {out}, which --overwrite empties; give "
    assert lies in one_line(capsys)
    assert tree(out) == before


@pytest.mark.parametrize(
    ("command", "option", "message"),
    [
        ("sweep", "--decode-split=no-such", "no-such"),
        ("sweep", "--realign-from=throughout", "--realign-from throughout"),
        ("sweep", "--initial-model=/no/such", "/no/such"),
        ("sweep", "--target=5", "--target 5: the log-probability is below 0"),
        ("compare", "--realign-from=throughout", "--realign-from throughout"),
        ("compare", "--initial-model=/no/such", "/no/such"),
        ("compare", "--task=synthesis", "--task synthesis is trained on"),
        ("compare", "--target=5", "--target 5: the log-probability is below 0"),
        ("tune", "--realign-from=throughout", "--realign-from throughout"),
        ("tune", "--initial-model=/no/such", "/no/such"),
    ],
)
def test_a_command_that_cannot_be_carried_out_deletes_nothing(
    dataset: Dataset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    option: str,
    message: str,
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / f"{command}.json").write_text("{}")
    more = ["--realign=1"] if "throughout" in option else []
    more += ["--ranks=2"] if command == "tune" else []
    assert speechdp([command, str(dataset.path), str(out), "--overwrite", option, *more]) == 1
    assert message in capsys.readouterr().err
    assert tree(out) == {f"{command}.json": b"{}"}


def test_what_holds_a_run_of_a_search_in_use_is_not_deleted(tmp_path: Path) -> None:
    """They lie a level deeper than those of a sweep."""
    out = tmp_path / "out"
    for run in (out / "runs" / "bmuf-16-mpi", out / "measure" / "mpi"):
        with owner(run):
            (out / "tune.json").write_text("{}")
            before = tree(out)
            check_overwrite(out, TUNE)
            with owner(out) as mine, pytest.raises(ConfigError, match=f"^{run}: is in use by"):
                empty(mine, TUNE)
            assert tree(out) == before
    with owner(out) as mine:
        assert empty(mine, TUNE) == ""
    assert tree(out) == {}


@pytest.mark.parametrize("command", ["prepare", "shard"])
def test_data_that_are_being_made_are_refused(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    data, link = tmp_path / "data", tmp_path / "link"
    shutil.copytree(dataset.path, data)
    link.symlink_to(data)
    partial = tmp_path / ".data.partial"
    partial.mkdir()
    (partial / "train-00000.h5").touch()
    words = ["prepare", "--synthetic", "0.01"] if command == "prepare" else ["shard", str(dataset.path)]
    options = ["--overwrite"] if command == "prepare" else ["--overwrite", "--shards", "2"]
    with owner(data, owner_file(data)):
        for name in (data, link):
            assert speechdp([*words, str(name), *options]) == 73
            assert one_line(capsys).startswith(f"speechdp: {name}: is in use by speechdp train")
        assert (partial / "train-00000.h5").is_file() and tree(data) == tree(dataset.path)
    # Once its owner has gone by a kill, what it has left goes as well.
    process = subprocess.Popen(["true"])
    process.wait()
    owner(data, owner_file(data), pid=process.pid).acquire()
    assert speechdp(["shard", str(dataset.path), str(link), "--overwrite", "--shards", "2"]) == 0
    assert capsys.readouterr().err.startswith(f"{link}: taken over from ")
    assert sorted(os.listdir(tmp_path)) == ["data", "link"]  # noqa: PTH208
    assert link.is_symlink() and len(Dataset.open(data).shard_paths("train")) == 2


def test_a_run_of_a_sweep_is_owned_while_it_is_trained_and_no_longer(
    dataset: Dataset, tmp_path: Path
) -> None:
    seen: list[str] = []

    class Noting(SilentReporter):
        def evaluated(self, metrics: Metrics, held_out: Sequence[Metric]) -> None:
            seen.extend(str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob(OWNER_FILE))

    plan = SweepPlan("model_averaging", ("2",), (), one_rank_steps=0, decode_split="")
    options = TrainOptions(ModelOptions(layers=1, cells=4), epochs=1)
    session = Session(dataset, SerialCommunicator(), torch.device("cpu"))
    run_sweep(session, options, plan, tmp_path, lambda name: Noting(), RaceOptions(0))
    assert seen == ["model_averaging-2"] and list(tmp_path.rglob(OWNER_FILE)) == []


@pytest.fixture
def no_signs_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave signs of life to the test: one that comes by itself would see half of what the test does."""
    monkeypatch.setattr(FolderOwner, "_run", lambda _: None)


@pytest.mark.usefixtures("no_signs_by_themselves")
def test_ranks_agree_on_who_owns_and_one_says_that_it_was_overtaken(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, int]] = []
    monkeypatch.setattr(
        "speechdp.comm.environment.end_process_with", lambda text, code: said.append((text, code))
    )

    def train(comm: Communicator) -> None:
        session = Session(dataset, comm, torch.device("cpu"))
        with owned(session, tmp_path / "run", "train") as mine:
            assert (mine is not None) == (comm.rank == 0) and (tmp_path / "run" / OWNER_FILE).is_file()
            comm.barrier()
            if mine is not None:
                (tmp_path / "run" / OWNER_FILE).unlink()
                owner(tmp_path / "run").acquire()
                mine.beat()
            comm.barrier()

    run_threads(2, train, timeout_s=DEADLINE_S)
    ((text, code),) = said
    assert code == 73 and text.count("\n") == 1
    assert text.startswith("speechdp: rank 0 on ") and "run: was taken over by speechdp train" in text
    assert (tmp_path / "run" / OWNER_FILE).is_file()


@pytest.mark.usefixtures("no_signs_by_themselves")
def test_a_print_that_hangs_keeps_no_overtaken_rank(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("speechdp.comm.environment.end_process_with", lambda text, code: ended.append(code))
    monkeypatch.setattr("speechdp.process.bounded._PATIENCE_S", 0.1)
    is_read = threading.Event()

    class Printing(SilentReporter):
        def end(self) -> None:
            is_read.wait()

    session = Session(dataset, SerialCommunicator(), torch.device("cpu"), Printing())
    with owned(session, tmp_path, "train") as mine:
        assert mine is not None
        (tmp_path / OWNER_FILE).unlink()
        owner(tmp_path).acquire()
        beating = threading.Thread(target=mine.beat, daemon=True)
        beating.start()
        beating.join(DEADLINE_S)
        meanwhile = [*ended]
        is_read.set()
    assert meanwhile == [73]


@pytest.mark.parametrize("command", [TrainCommand, SweepCommand])
def test_a_signal_ends_the_waiting_for_a_sign_of_life(
    dataset: Dataset, tmp_path: Path, command: type[TrainCommand | SweepCommand]
) -> None:
    """What was to be overwritten is still there: --resume would go on with it."""
    said: list[str] = []

    class Noting(SilentReporter):
        def notice(self, text: str) -> None:
            said.append(text)

    record = "run.json" if command is TrainCommand else "sweep.json"
    (tmp_path / record).write_text("{}")
    owner(tmp_path, boot="another", host="another").acquire()
    with StopRequest() as stop:
        session = Session(dataset, SerialCommunicator(), torch.device("cpu"), Noting(), stop)
        os.kill(os.getpid(), signal.SIGTERM)
        assert command(dataset.path, tmp_path, overwrite=True)._on_rank(session) == 75
    assert said[-1] == f"stopped as requested before it began; repeat the command: {tmp_path}"
    assert sorted(os.listdir(tmp_path)) == [OWNER_FILE, record]  # noqa: PTH208


# --- links and rights -------------------------------------------------------------------------------------


def test_a_run_behind_a_link_is_overwritten_where_it_is(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link, scratch = tmp_path / "run", tmp_path / "scratch"
    link.symlink_to(scratch)
    command = ["train", str(dataset.path), str(link), *TINY_MODEL, "--epochs", "1"]
    for options in ([], ["--overwrite"]):
        assert speechdp([*command, *options]) == 1
        assert f"{link}: is a symbolic link to {scratch}, where there is no folder" in one_line(capsys)
    scratch.mkdir()
    assert speechdp(command) == 0
    (scratch / "hypotheses").mkdir()
    assert speechdp([*command, "--overwrite"]) == 0
    assert link.is_symlink() and (scratch / "completed.json").is_file()
    assert not (scratch / "hypotheses").exists()


def test_data_behind_a_link_are_made_where_it_leads(dataset: Dataset, tmp_path: Path) -> None:
    link, disk = tmp_path / "data", tmp_path / "disk" / "mine"
    link.symlink_to(disk)
    with pytest.raises(ConfigError, match=f"is a symbolic link to {disk}, which does not exist"):
        check_target(link, overwrite=True)
    disk.mkdir(parents=True)
    for number in (1, 2):
        with new_data_dir(link, overwrite=True) as directory:
            assert directory == tmp_path / "disk" / ".mine.partial"
            shutil.copytree(dataset.path, directory, dirs_exist_ok=True)
            (directory / f"{number}.h5").touch()
        assert link.is_symlink() and (disk / f"{number}.h5").is_file()
        assert (disk / "1.h5").exists() == (number == 1)
    assert os.listdir(disk.parent) == ["mine"]  # noqa: PTH208
    with pytest.raises(ConfigError, match="File name too long"):
        check_target(tmp_path / ("long" * 99), overwrite=False)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(ConfigError, match="is a symbolic link"):
        check_target(loop, overwrite=True)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Lose the rights that root has; other users have none to lose."""
    former = os.geteuid()
    if former == 0:
        os.seteuid(65534)
    try:
        if not os.access(__file__, os.R_OK, effective_ids=True):
            pytest.skip("other users may not read this checkout")
        yield
    finally:
        os.seteuid(former)


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a folder that every user may read, and only its owner write."""
    folder = Path(tempfile.mkdtemp(prefix="speechdp-test-"))
    yield folder
    for path in (folder, *folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    shutil.rmtree(folder)


def test_what_this_user_may_not_write_is_refused_before_the_work(
    dataset: Dataset, shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = shared / "data", shared / "run"
    shutil.copytree(dataset.path, data)
    run.mkdir()
    (run / "run.json").write_text("{}")
    before = tree(shared)
    for folder in (data, run, shared):
        folder.chmod(0o555)
    with as_nobody():
        for command, message in {
            (
                "prepare",
                "--synthetic",
                "1",
                "DATA",
                "--overwrite",
            ): f"{data}: cannot be created in {shared}, where you have",
            (
                "prepare",
                "--synthetic",
                "1",
                "NEW",
            ): f"{shared / 'new'}: cannot be created in {shared}, where you have no write permission",
            (
                "train",
                "DATA",
                "RUN",
                "--overwrite",
            ): f"{run}: this user may not delete its contents (it belongs",
            (
                "train",
                "DATA",
                "RUN",
                "--resume",
            ): f"{run}: cannot be written (Permission denied); make it writable",
            ("sweep", "DATA", "NEW"): f"{shared / 'new'}: cannot be written (Permission denied)",
        }.items():
            names = {"DATA": data, "RUN": run, "NEW": shared / "new"}
            assert speechdp([str(names.get(word, word)) for word in command]) == 1
            assert message in one_line(capsys)
    shared.chmod(0o1777)
    data.chmod(0o755)
    if os.geteuid() == 0:
        with as_nobody(), pytest.raises(ConfigError, match="belongs to another user and cannot be replaced"):
            check_target(data, overwrite=True)
    assert tree(shared) == before


def test_what_may_not_be_listed_is_refused_and_nothing_of_it_deleted(shared: Path) -> None:
    shared.chmod(0o755)
    run = shared / "run"
    (run / "status").mkdir(parents=True)
    for path in (run / "run.json", run / "status" / "0.json"):
        path.touch()
    for folder in (run, run / "status"):
        run.chmod(0o777)
        folder.chmod(0o311)
        with as_nobody():
            with pytest.raises(ConfigError, match=f"^{folder}: this user may not delete .*0311"):
                check_overwrite(run, RUN)
            if folder == run:
                with pytest.raises(RunError, match=f"^{folder}: cannot be written"):
                    empty(owner(run), RUN)
    (run / "status").chmod(0o755)
    assert sorted(tree(run)) == ["run.json", "status/0.json"]


# --- signals ----------------------------------------------------------------------------------------------


@needs_espeak
@pytest.mark.parametrize(
    ("number", "exit_code", "line"),
    [
        (signal.SIGINT, 130, "speechdp: interrupted"),
        (signal.SIGTERM, 143, "speechdp: ended by SIGTERM"),
        (signal.SIGKILL, -9, ""),
    ],
)
def test_prepare_ends_by_a_signal_without_a_trace(
    tmp_path: Path, number: signal.Signals, exit_code: int, line: str
) -> None:
    """Ctrl-C reaches all processes of the terminal, here those of a session."""
    data = tmp_path / "data"
    with subprocess.Popen(
        [*SPEECHDP, "prepare", "--synthetic", "5", str(data), "--workers", "1"],
        cwd=REPOSITORY,
        env=job_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            deadline = time.monotonic() + DEADLINE_S
            while not any(path.stat().st_size for path in tmp_path.glob(".data.partial/.scratch-*/*.rows")):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            assert speechdp(["prepare", "--synthetic", "1", str(data)]) == 73  # its owner lives
            if number == signal.SIGINT:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            err = process.communicate(timeout=DEADLINE_S)[1]
        finally:
            process.kill()
    said = [text for text in err.splitlines() if not text.startswith("speaking: ")]
    assert process.returncode == exit_code and said == ([line] if line else [])
    left = [".data.owner.json", ".data.partial"] if number == signal.SIGKILL else []
    assert sorted(os.listdir(tmp_path)) == left  # noqa: PTH208


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_end_between_two_renames_loses_no_data(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    data, link = tmp_path / "data", tmp_path / "link"
    shutil.copytree(dataset.path, data)
    link.symlink_to(data)
    replace_path, calls = Path.replace, 0

    def ended(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if is_killed and calls > 1:
            raise Ended(signal.SIGKILL)  # nothing happens any more
        replace_path(source, target)
        if calls == 1:
            raise Ended(signal.SIGTERM)

    with monkeypatch.context() as signals:
        signals.setattr(Path, "replace", ended)
        with pytest.raises(Ended), new_data_dir(link, overwrite=True) as directory:
            (directory / "new").touch()
    assert sorted(os.listdir(tmp_path)) == [".data.former" if is_killed else "data", "link"]  # noqa: PTH208
    assert speechdp(["shard", str(dataset.path), str(link), "--shards", "2"]) == 1  # for want of --overwrite
    assert sorted(os.listdir(tmp_path)) == ["data", "link"] and tree(data) == tree(dataset.path)  # noqa: PTH208


def test_half_an_old_directory_is_not_brought_back(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    shutil.copytree(dataset.path, data)
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
        with new_data_dir(data, overwrite=True) as directory:
            (directory / "new").touch()
    assert (tmp_path / ".data.former").is_dir()
    shutil.rmtree(data)
    with new_data_dir(data, overwrite=False) as directory:
        (directory / "newer").touch()
    assert os.listdir(tmp_path) == ["data"] and os.listdir(data) == ["newer"]  # noqa: PTH208


def test_a_folder_that_a_rank_does_not_see_is_refused_before_anything_is_done_in_it(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told at the first checkpoint, hours later where alignments were made before."""
    monkeypatch.setattr(shared_disk, "_VISIBLE_S", 0.1)
    (tmp_path / "host1" / "run").mkdir(parents=True)

    def own(comm: Communicator) -> None:
        folder = tmp_path / f"host{comm.rank}" / "run"
        with (
            pytest.raises(
                RunError, match=r"/run: rank 1 on \S+ does not see what rank 0 .*; put RUN on a disk"
            ),
            owned(Session(dataset, comm, torch.device("cpu")), folder, "train"),
        ):
            pytest.fail("begun")

    run_threads(2, own)
    assert not (tmp_path / "host0" / "run").exists()  # nor kept


def test_a_script_is_told_at_its_start_that_it_will_not_be_able_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where it saves nothing, it can train all the same."""
    monkeypatch.setattr(shared_disk, "_VISIBLE_S", 0.1)

    def begin(comm: Communicator) -> None:
        folder = ScriptFolder(tmp_path / f"host{comm.rank}" / "run", comm)
        folder.begin({}, torch.device("cpu"), state_of=None)
        folder.release()

    run_threads(2, begin)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "does not see" in line]
    assert line.startswith("speechdp: warning: ") and line.endswith("until then no checkpoint can be saved")
