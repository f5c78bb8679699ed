"""Processes without their imports: one that has imported everything forks those that tests start.

A `python -m speechdp ...` or `python SCRIPT.py` that finds the server's address in its environment
(startup/sitecustomize.py) asks the server to fork, and only stands for the fork: it hands signals on and ends
as the fork does.  So launchers, mpirun and tests see the processes they always see, 3 s of a core earlier.
What a fork could not be like (another network, other settings of Python or of libraries) runs by itself, as
does everything where a test asks for it (`BY_ITSELF`).

The server starts no thread and initialises neither MPI nor a process group.  It starts with the first job of
a pytest session, serves all its workers, and ends with it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import pkgutil
import random
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tests.helpers.startup.gated import put_gates_up
from tests.helpers.startup.handing_over import SIGNALS, namespaces

#: Names the folder of the session's server; its socket's path, in what a job is given.
FOLDER, ADDRESS = "SPEECHDP_TEST_FORK_FOLDER", "SPEECHDP_TEST_FORK_ADDRESS"
#: For jobs that must be processes of their own: what a test sees in /proc, or stops, is not the fork.
BY_ITSELF = {ADDRESS: ""}
STARTUP = Path(__file__).with_name("startup")
_REPOSITORY = Path(__file__).resolve().parents[2]
#: Modules that initialise MPI, or start threads, when they are imported.
_NOT_IMPORTED = (
    "speechdp.comm.mpi.",
    "speechdp.comm.horovod.",
    "speechdp.comm.startup.fed_job",
    "speechdp.__main__",
)
#: Besides ours: what a job imports in its course.
_IMPORTED = (
    *("torch.utils.tensorboard", "torch.distributed", "torch._dynamo", "multiprocessing.pool"),
    *("psutil", "scipy.optimize", "matplotlib.pyplot", "rich.console"),
)
#: Beginnings of variables that are read as a process starts, or as a library is loaded.
_READ_AT_START = (
    "PYTHON",
    "LC_",
    "LANG",
    "LD_PRELOAD",
    "OMP_NUM",
    "MKL_",
    "OPENBLAS_",
    "MALLOC_",
    "CUDA_",
    "TZ",
)
#: Beginnings of variables by which launchers tell a process that it is a rank.
_ANNOUNCING = ("OMPI_", "PMIX_", "PMI_", "HOROVOD_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")


# --- in tests ---


@contextlib.contextmanager
def session_of_forks() -> Iterator[None]:
    """Let jobs that this process and its children start be forked, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="speechdp-forks-", ignore_cleanup_errors=True) as folder:
        os.environ[FOLDER] = f"{folder}:{os.getpid()}"
        try:
            yield
        finally:
            del os.environ[FOLDER]


def environment_of_forks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a job gets besides, so that its processes are forked; empty outside of a session."""
    if FOLDER not in os.environ:
        return {}
    folder, _, owner = os.environ[FOLDER].rpartition(":")
    address = Path(folder) / "socket"
    ours = _served_at(address)
    if not address.exists():
        with (Path(folder) / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not address.exists():
                process = _start({**environment, **ours, **BY_ITSELF}, address, int(owner))
                process.returncode = 0  # it outlives this process, which need not wait for it
    return ours


@contextlib.contextmanager
def forks_with(environment: Mapping[str, str], folder: Path) -> Iterator[dict[str, str]]:
    """Serve jobs of another environment in the block; yield what they get besides."""
    ours = _served_at(folder / "forks")
    process = _start({**environment, **ours, **BY_ITSELF}, folder / "forks", os.getpid())
    try:
        yield ours
    finally:
        process.terminate()
        process.wait()


def _served_at(address: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{STARTUP}{os.pathsep}{_REPOSITORY}", ADDRESS: str(address)}


def _start(environment: Mapping[str, str], address: Path, owner: int) -> subprocess.Popen[bytes]:
    """Start the server, which ends with its owner; return when it serves."""
    with address.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.fork_server", str(address), str(owner)],
            cwd=_REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == b"ready\n", address.with_suffix(".log").read_text()
    return process


# --- in the server ---


def import_everything() -> None:
    """Import all that a job imports in its course, so that its ranks need not."""
    if "torch" in sys.modules:  # a fork of a process that has done so
        return
    import speechdp  # noqa: PLC0415

    gc.disable()  # what is imported stays: to look for garbage in it again and again is a part of the start
    for module in pkgutil.walk_packages(speechdp.__path__, "speechdp."):
        if not module.name.startswith(_NOT_IMPORTED):
            importlib.import_module(module.name)
    for name in _IMPORTED:
        importlib.import_module(name)
    _parse_once()
    _work_once()
    _leave_torchs_operators_alone()
    gc.collect()
    gc.freeze()  # what is never collected stays shared with the forked
    gc.enable()


def _leave_torchs_operators_alone() -> None:
    """Have no fork take apart at its end what torch has defined in Python: it would copy 32 MB for that."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def _parse_once() -> None:
    """Have the parser of every subcommand read our docstrings, which it keeps: a quarter of a rank's time."""
    from speechdp.cli.main import SUBCOMMANDS, parse  # noqa: PLC0415

    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        for name in SUBCOMMANDS:
            with contextlib.suppress(SystemExit):
                parse(name, ["--help"])


def _work_once() -> None:
    """Do what torch, oneDNN, matplotlib and Python do once a process, by a tiny training and its report.

    Anew it would be a fifth of a rank's time, and half of a report's.  Threads have ended when this
    returns: a fork would have none of them, but the locks that they held.
    """
    from unittest import mock  # noqa: PLC0415

    from speechdp.cli.main import run  # noqa: PLC0415
    from tests.helpers.tiny_data import TINY_MODEL, TinySizes, write_tiny_data  # noqa: PLC0415
    from tests.helpers.waiting import wait_until  # noqa: PLC0415

    with (
        tempfile.TemporaryDirectory(prefix="speechdp-forks-") as folder,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        mock.patch.dict(os.environ),
    ):
        for name in [name for name in os.environ if name.startswith(_ANNOUNCING)]:
            del os.environ[name]  # of the test whose job is the first
        write_tiny_data(Path(folder, "data"), TinySizes(train=8, dev=4, test=4))
        options = [*TINY_MODEL, "--batch-size", "4", "--epochs", "1", "--device", "cpu"]
        for arguments in (
            ["train", f"{folder}/data", f"{folder}/run", *options],
            ["report", f"{folder}/run"],
        ):
            exit_code = run(arguments)
            assert exit_code == 0, (arguments[0], exit_code)
    wait_until(lambda: len([*Path("/proc/self/task").iterdir()]) == 1, "the end of threads of a training")


@dataclass
class _Work:
    """What a fork is to do.

    Attributes:
        request: of the process that stands for it (handing_over.py).
        streams: standard input, output and error.
    """

    request: dict[str, Any]
    streams: list[int]

    @property
    def why_not(self) -> str:
        """What a fork of this process would not be as the other; empty where nothing is."""
        theirs, ours = (_read_at_start(values) for values in (self.request["environment"], os.environ))
        variables = sorted(name for name, _ in theirs.items() ^ ours.items())
        different = {
            f"its environment ({', '.join(variables)})": bool(variables),
            "another Python": self.request["prefix"] != sys.prefix,
            "other namespaces": self.request["namespaces"] != namespaces(),
            "more open files": self.request["descriptors"] != 0,
        }
        return ", ".join(what for what, is_so in different.items() if is_so)


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}


def _serve(address: Path, owner: int) -> _Work | None:
    """Fork for whoever asks until the owner ends; return in each fork, with its work."""
    # The owner is interrupted, too.  Not ignored: what a fork is sent before it has a handler would be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    import_everything()
    running: dict[int, tuple[int, socket.socket]] = {}
    end = os.pidfd_open(owner)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"{address}.new")
        listener.listen(64)
        Path(f"{address}.new").rename(address)
        print("ready", flush=True)
        while True:
            asking = {connection.fileno(): pid for pid, connection in running.values()}
            readable, _, _ = select.select([listener, end, *running, *asking], [], [])
            if end in readable:
                return None
            for fd in set(readable) & set(running):
                pid, connection = running.pop(fd)
                os.close(fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError), connection:
                    connection.sendall(b"%d\n" % code)
            for pid in {asking[fd] for fd in readable if fd in asking} & {one for one, _ in running.values()}:
                with contextlib.suppress(ProcessLookupError):  # whoever stands for it was killed
                    os.kill(pid, signal.SIGKILL)
            if listener in readable:
                connection = listener.accept()[0]
                work = _accept(connection)
                if work is None:
                    continue
                pid = os.fork()
                if not pid:
                    _close([end, *running, *(other.detach() for _, other in running.values())])
                    connection.close()
                    return work
                _close(work.streams)
                _die_together(connection, pid)
                connection.sendall(b"%d\n" % pid)
                running[os.pidfd_open(pid)] = pid, connection


def _die_together(connection: socket.socket, pid: int) -> None:
    """Have the kernel kill a fork as soon as the process that stands for it is gone.

    Left to this process it would go on until that gets a core: a rank that a test has killed would take
    further steps meanwhile.
    """
    fcntl.fcntl(connection, fcntl.F_SETOWN, pid)
    fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(connection, fcntl.F_SETFL, os.O_ASYNC)


def _accept(connection: socket.socket) -> _Work | None:
    """Read a request; refuse what is not possible."""
    try:
        _, streams, _, _ = socket.recv_fds(connection, 1, 3)
        work = _Work(json.loads(connection.makefile("rb").readline()), streams)
        if not work.why_not:
            return work
        print(f"not forked: {work.request['arguments']}: {work.why_not}", file=sys.stderr, flush=True)
        _close(streams)
        connection.sendall(b"0\n")
    except (OSError, ValueError):  # it was killed meanwhile
        pass
    connection.close()
    return None


def _close(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)


# --- in a fork ---


def _become(work: _Work) -> None:
    """Be what the process that stands for this one would have been."""
    request = work.request
    os.setsid()
    for fd, stream in enumerate(work.streams):
        os.dup2(stream, fd)
    _close(work.streams)
    ignore_only(request["ignored"])
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    for name, limits in request["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), limits)
    os.sched_setaffinity(0, request["cores"])
    os.umask(request["umask"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    if "IOFAULT" in os.environ:  # which the shim reads when it is loaded (tests/faults)
        ctypes.CDLL(os.environ["LD_PRELOAD"]).iofault_arm_by_environment()
    _open_streams()
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    for seed in (random.seed, np.random.seed, torch.seed):  # else every fork would draw the same numbers
        seed()
    put_gates_up()
    sys.orig_argv = request["orig_argv"]
    _run(request["arguments"])


def ignore_only(numbers: list[int]) -> None:
    """Ignore these of the signals that are handed on, and no others, as the server itself may.

    A shell has what it starts in the background ignore SIGINT, nohup has it ignore SIGHUP; mpirun has its
    ranks heed them again.
    """
    for number in SIGNALS:
        if number in numbers:
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) == signal.SIG_IGN:
            is_ctrl_c = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)


def _open_streams() -> None:
    """Open Python's standard streams as it does when it starts."""
    for fd, name, errors in (
        (0, "stdin", "strict"),
        (1, "stdout", "strict"),
        (2, "stderr", "backslashreplace"),
    ):
        file = io.open(fd, "rb" if fd == 0 else "wb", closefd=False)  # noqa: SIM115, UP020
        at_each_line = fd == 2 or os.isatty(fd)
        stream = io.TextIOWrapper(file, "utf-8", errors, line_buffering=at_each_line)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(arguments: list[str]) -> None:
    """Run a module or a script as the program of this process."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], str(Path.cwd())
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        return
    script = Path(arguments[0])
    sys.argv, sys.path[0] = arguments, str(script.resolve().parent)
    vars(main).update(__file__=str(script), __builtins__=__builtins__, __cached__=None)
    exec(compile(script.read_bytes(), str(script), "exec"), vars(main))


def renew_torch() -> None:
    """Make what a fork has lost of torch now: two threads that do it at once crash.

    Its pool of threads (`caffe2::pthreadpool`): whoever computes first makes it anew, and a second one that
    comes meanwhile finds none.  Its engine of gradients: whoever first saves a tensor for backward takes the
    old one apart, and so does a second one that comes meanwhile.
    """
    import torch  # noqa: PLC0415

    torch.set_num_threads(torch.get_num_threads())
    ones = torch.ones(1, requires_grad=True)
    (ones * ones).backward()


def do_and_exit(work: Callable[[], int | None]) -> NoReturn:
    """Do something in a fork and end the process with the exit code it returns, as Python ends.

    But for taking the interpreter apart, which touches, and so copies, all memory that a fork shares: half of
    what a tiny training costs.
    """
    code: int | None = 1
    try:
        renew_torch()
        code = work()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]  waits for threads
    atexit._run_exitfuncs()
    if (mpi := sys.modules.get("mpi4py.MPI")) is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()  # as its own function at the end of Python does
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
    if code is not None and code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code or 0)


if __name__ == "__main__":
    given = _serve(Path(sys.argv[1]), int(sys.argv[2]))
    if given is not None:
        do_and_exit(partial(_become, given))
