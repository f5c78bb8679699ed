"""Save the import time of processes that tests start: a server that has imported everything forks them.

A `python -m speechdp ...` or `python SCRIPT.py` that finds the server's address in its environment
(startup/sitecustomize.py) asks the server to fork, and then only represents the fork: it forwards signals and
ends as the fork does.  So launchers, mpirun and tests see the usual processes, 3 s of a core earlier.
Processes that a fork cannot replace (another network, other settings of Python or of libraries) run by
themselves, as does everything for which a test requests it (`BY_ITSELF`).

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

#: Variables with the folder of the session's server, and with its socket's path in a job's environment.
FOLDER, ADDRESS = "SPEECHDP_TEST_FORK_FOLDER", "SPEECHDP_TEST_FORK_ADDRESS"
#: For jobs that must be real processes, because a test that looks into /proc or stops one would not reach
#: the fork.
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
#: Other modules than ours that a job imports.
_IMPORTED = (
    *("torch.utils.tensorboard", "torch.distributed", "torch._dynamo", "multiprocessing.pool"),
    *("psutil", "scipy.optimize", "matplotlib.pyplot", "rich.console"),
)
#: Prefixes of variables that are read when a process starts or a library is loaded.
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
#: Prefixes of variables by which launchers tell a process that it is a rank.
_ANNOUNCING = ("OMPI_", "PMIX_", "PMI_", "HOROVOD_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")


# --- in tests ---


@contextlib.contextmanager
def session_of_forks() -> Iterator[None]:
    """Fork the jobs that this process and its children start during the block."""
    with tempfile.TemporaryDirectory(prefix="speechdp-forks-", ignore_cleanup_errors=True) as folder:
        os.environ[FOLDER] = f"{folder}:{os.getpid()}"
        try:
            yield
        finally:
            del os.environ[FOLDER]


def environment_of_forks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that let a job's processes be forked; empty outside of a session."""
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
                process.returncode = 0  # it outlives this process, so do not wait for it
    return ours


@contextlib.contextmanager
def forks_with(environment: Mapping[str, str], folder: Path) -> Iterator[dict[str, str]]:
    """Serve jobs with another environment during the block; yield the variables to add to theirs."""
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
    """Start the server, which ends with its owner; return once it is serving."""
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
    """Import every module that a job imports, so that its ranks need not."""
    if "torch" in sys.modules:  # a fork of a process that has already imported
        return
    import speechdp  # noqa: PLC0415

    gc.disable()  # imported objects stay, and searching them for garbage again and again slows the start
    for module in pkgutil.walk_packages(speechdp.__path__, "speechdp."):
        if not module.name.startswith(_NOT_IMPORTED):
            importlib.import_module(module.name)
    for name in _IMPORTED:
        importlib.import_module(name)
    _parse_once()
    _work_once()
    _leave_torchs_operators_alone()
    gc.collect()
    gc.freeze()  # frozen objects are never collected, so their memory stays shared with forks
    gc.enable()


def _leave_torchs_operators_alone() -> None:
    """Keep forks from destroying torch's Python-defined operators at their end, which would copy 32 MB."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def _parse_once() -> None:
    """Let every subcommand's parser read and cache our docstrings, which takes a quarter of a rank's time."""
    from speechdp.cli.support.command_line import parse  # noqa: PLC0415
    from speechdp.cli.support.subcommands import SUBCOMMANDS  # noqa: PLC0415

    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        for name in SUBCOMMANDS:
            with contextlib.suppress(SystemExit):
                parse(name, ["--help"])


def _work_once() -> None:
    """Trigger one-time work of torch, oneDNN, matplotlib and Python by a tiny training and its report.

    Repeating it would take a fifth of a rank's time, and half of a report's.  All threads have ended when
    this returns: a fork would inherit none of them, but the locks that they held.
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
            del os.environ[name]  # left by the test whose job is the first
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
    """The work of a fork.

    Attributes:
        request: request of the process that represents it (handing_over.py).
        streams: standard input, output and error.
    """

    request: dict[str, Any]
    streams: list[int]

    @property
    def why_not(self) -> str:
        """Why a fork of this process would differ from the requested process; "": it would not."""
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
    """Fork on request until the owner ends; return in each fork, with its work."""
    # SIGINT also goes to the owner.  It is blocked, not ignored: a fork must not lose one sent before it has
    # a handler.
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
                with contextlib.suppress(ProcessLookupError):  # the process that represents it was killed
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
                with contextlib.suppress(OSError):  # it was killed meanwhile, which the next look finds
                    connection.sendall(b"%d\n" % pid)
                running[os.pidfd_open(pid)] = pid, connection


def _die_together(connection: socket.socket, pid: int) -> None:
    """Let the kernel kill a fork as soon as the process that represents it is gone.

    If this process did it, the fork would run until this process gets a core, and a rank that a test has
    killed would take further steps meanwhile.
    """
    fcntl.fcntl(connection, fcntl.F_SETOWN, pid)
    fcntl.fcntl(connection, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(connection, fcntl.F_SETFL, os.O_ASYNC)


def _accept(connection: socket.socket) -> _Work | None:
    """Read a request; refuse an impossible one."""
    try:
        _, streams, _, _ = socket.recv_fds(connection, 1, 3)
        work = _Work(json.loads(connection.makefile("rb").readline()), streams)
        if not work.why_not:
            return work
        print(f"not forked: {work.request['arguments']}: {work.why_not}", file=sys.stderr, flush=True)
        _close(streams)
        connection.sendall(b"0\n")
    except (OSError, ValueError):  # the requesting process was killed meanwhile
        pass
    connection.close()
    return None


def _close(descriptors: list[int]) -> None:
    for fd in descriptors:
        os.close(fd)


# --- in a fork ---


def _become(work: _Work) -> None:
    """Take the identity of the process that represents this fork."""
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
    if "IOFAULT" in os.environ:  # read by the shim when it is loaded (tests/faults)
        ctypes.CDLL(os.environ["LD_PRELOAD"]).iofault_arm_by_environment()
    _open_streams()
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    for seed in (random.seed, np.random.seed, torch.seed):  # otherwise every fork would draw the same numbers
        seed()
    put_gates_up()
    sys.orig_argv = request["orig_argv"]
    _run(request["arguments"])


def ignore_only(numbers: list[int]) -> None:
    """Ignore only these of the forwarded signals, whatever the server itself ignores.

    A shell lets its background processes ignore SIGINT, and nohup lets them ignore SIGHUP; mpirun resets
    both for its ranks.
    """
    for number in SIGNALS:
        if number in numbers:
            signal.signal(number, signal.SIG_IGN)
        elif signal.getsignal(number) == signal.SIG_IGN:
            is_ctrl_c = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)


def _open_streams() -> None:
    """Open the standard streams as Python does when it starts."""
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
    """Recreate now what a fork has lost of torch, because two threads doing so at once would crash.

    The thread pool (`caffe2::pthreadpool`): the first thread that computes recreates it, and a second one
    finds none meanwhile.  The autograd engine: the first thread that saves a tensor for backward destroys the
    old one, and so does a second one meanwhile.
    """
    import torch  # noqa: PLC0415

    torch.set_num_threads(torch.get_num_threads())
    ones = torch.ones(1, requires_grad=True)
    (ones * ones).backward()


def do_and_exit(work: Callable[[], int | None]) -> NoReturn:
    """Do the work in a fork, and end the process as Python would, with the exit code that the work returns.

    Unlike Python, do not finalize the interpreter, which would touch and therefore copy all shared memory:
    half of the cost of a tiny training.
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
        mpi.Finalize()  # as mpi4py itself does when Python ends
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
