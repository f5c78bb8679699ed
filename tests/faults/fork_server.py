"""Jobs without their imports: a process that has imported everything forks the ranks of job after job.

The server is `python -m tests.faults.fork_server SOCKET`, with the shim preloaded.  It starts no thread and
initialises neither MPI nor a process group; for each connection it forks a supervisor, which forks the ranks,
looks after their end, and answers.  It ends when its stdin does.  Ranks meet as torchrun's do, over a
TCPStore that a process of the job's own serves.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tests.helpers.fork_server import do_and_exit, forks_with, import_everything
from tests.helpers.mpi import REPOSITORY, job_environment

SHIM_SOURCE = Path(__file__).with_name("iofault.c")
#: Seconds from SIGTERM to SIGKILL when a rank has failed, as Open MPI's.
_TERMINATION_S = 1.0


@dataclass(frozen=True)
class Process:
    """A process of a job.

    Attributes:
        arguments: of `speechdp`.
        order: for the shim (iofault.c); empty: none.
        env: variables that it gets besides.
        spoilt: how it is spoilt (spoilt.py); empty: not at all.
    """

    arguments: Sequence[str]
    order: str = ""
    spoilt: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class JobEnd:
    """How a job ended.

    Attributes:
        exit_codes: of each process; None of those that the launcher ended because another had failed.
        stdout, stderr: of each process.
        seconds: it took.
        hung: it took too long and had to be killed.
    """

    exit_codes: list[int | None]
    stdout: list[str]
    stderr: list[str]
    seconds: float
    hung: bool

    @property
    def is_well(self) -> bool:
        """Whether it ended as if nothing had gone wrong."""
        return not any(code != 0 for code in self.exit_codes)


def why_no_shim() -> str | None:
    """Return why no operation can be made to fail here, None where it can."""
    if not sys.platform.startswith("linux"):
        return "the shim that makes operations fail is preloaded, which is done on Linux only"
    return (
        None if shutil.which("cc") else "there is no C compiler (cc) for the shim that makes operations fail"
    )


def build_shim(folder: Path) -> Path:
    """Compile the shim; return the library."""
    library = folder / "iofault.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SHIM_SOURCE), "-ldl"], check=True
    )
    return library


class ForkServer:
    """A running server.  `run` may be called by several threads at once."""

    def __init__(self, address: Path, environment: Mapping[str, str]) -> None:
        self._address = address
        #: Of jobs that are started, not run here.
        self.environment = environment

    def run(self, processes: Sequence[Process], folder: Path, *, limit_s: float = 240.0) -> JobEnd:
        """Run a job, which may take `limit_s`; what its processes print goes to files in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        request = {
            "processes": [asdict(process) for process in processes],
            "folder": str(folder),
            "limit_s": limit_s,
        }
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(self._address))
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        printed = [
            [_output(folder, number, what).read_text(errors="replace") for number in range(len(processes))]
            for what in ("out", "err")
        ]
        return JobEnd(stdout=printed[0], stderr=printed[1], **json.loads(answer))


def ranks(size: int, arguments: Sequence[str], orders: Mapping[int, str], spoilt: str = "") -> list[Process]:
    """Return the processes of `speechdp ARGUMENTS` over `size` ranks; `orders` to the shim by rank."""
    if size == 1:
        return [Process(arguments, orders.get(0, ""), spoilt)]
    announced = {"WORLD_SIZE": str(size), "GLOO_SOCKET_IFNAME": "lo"}
    return [
        Process(
            arguments, orders.get(rank, ""), spoilt, {**announced, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(size)
    ]


@contextmanager
def fork_server() -> Iterator[ForkServer]:
    """Start a server; it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="speechdp-faults-") as temporary, ExitStack() as stack:
        shim, address = build_shim(Path(temporary)), Path(temporary) / "socket"
        preloaded = {**job_environment(), "LD_PRELOAD": str(shim), "IOFAULT_SHIM": str(shim)}
        environment = {**preloaded, **stack.enter_context(forks_with(preloaded, Path(temporary)))}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.fork_server", str(address)],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            if not process.stdout.readline():
                raise RuntimeError("the fork server did not start; its message stands above")
            yield ForkServer(address, environment)
        finally:
            process.stdin.close()
            process.wait()
            process.stdout.close()


def _output(folder: Path, number: int, what: str) -> Path:
    return folder / f"{number}.{what}"


# --- in the server ---


def _serve(address: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever was interrupted closes our stdin
    import_everything()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            readable, _, _ = select.select([listener, sys.stdin], [], [], 1.0)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if sys.stdin in readable:
                return
            if listener in readable:
                connection, _ = listener.accept()
                _forked(partial(_supervise, connection, listener))
                connection.close()


def _forked(work: Callable[[], int]) -> int:
    """Do something in a forked process, which leaves with what it returns; return its id."""
    pid = os.fork()
    if pid:
        return pid
    do_and_exit(work)


def _supervise(connection: socket.socket, listener: socket.socket) -> int:
    """Run the job that is asked for over a connection, and answer."""
    listener.close()
    request = json.loads(connection.makefile().readline())
    processes = [Process(**process) for process in request["processes"]]
    folder = Path(request["folder"])
    store, port = _store(len(processes)) if len(processes) > 1 else (0, 0)
    begun = time.monotonic()
    pids = {
        _forked(
            partial(_rank, process, port, [_output(folder, number, what) for what in ("out", "err")])
        ): number
        for number, process in enumerate(processes)
    }
    try:
        answer = _watch(pids, connection, request["limit_s"])
    finally:
        if store:
            os.kill(store, signal.SIGKILL)
    answer["seconds"] = time.monotonic() - begun
    with contextlib.suppress(BrokenPipeError):  # whoever asked has gone
        connection.sendall(json.dumps(answer).encode())
    return 0


def _store(size: int) -> tuple[int, int]:
    """Serve a TCPStore in a process of its own; return its id and the port."""
    import torch.distributed as dist  # noqa: PLC0415

    listener = socket.create_server(("127.0.0.1", 0), backlog=2 * size)
    port = int(listener.getsockname()[1])

    def serve() -> NoReturn:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            port,
            size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        while store is not None:
            signal.pause()
        raise AssertionError

    pid = _forked(serve)
    listener.close()
    return pid, port


def _rank(process: Process, port: int, outputs: Sequence[Path]) -> int:
    """Be a rank: what `python -m speechdp ARGUMENTS` would be under a launcher."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd, path in zip((1, 2), outputs, strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, fd)
        os.close(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.environ.update(process.env)
    if port:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = ["speechdp", *process.arguments]
    if process.order:
        ctypes.CDLL(os.environ["IOFAULT_SHIM"]).iofault_arm(process.order.encode())
    if process.spoilt:
        getattr(importlib.import_module("tests.faults.spoilt"), process.spoilt)()
    from speechdp.cli import main  # noqa: PLC0415

    main.leave = sys.exit  # type: ignore[assignment]  # what is registered to be done at the end is the server's
    main.main()
    return 0


def _watch(pids: dict[int, int], connection: socket.socket, limit_s: float) -> dict[str, Any]:
    """Wait until all have ended; where one fails end the others, as launchers do."""
    codes: dict[int, int | None] = {}
    running = {os.pidfd_open(pid): pid for pid in pids}
    deadline, hung, is_ending = time.monotonic() + limit_s, False, False
    while running:
        ended, _, _ = select.select([*running, connection], [], [], max(0.0, deadline - time.monotonic()))
        for fd in set(ended) - {connection}:
            pid = running.pop(fd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            codes[pids[pid]] = None if is_ending and not hung else code
            os.close(fd)
        if (
            not ended and not is_ending
        ) or connection in ended:  # late, or nobody waits for the answer any more
            hung, deadline = True, time.monotonic() + limit_s
            _signal(running.values(), signal.SIGKILL)
        elif not ended:
            _signal(running.values(), signal.SIGKILL)
            deadline = time.monotonic() + limit_s
        elif not is_ending and any(codes.values()):
            is_ending, deadline = True, time.monotonic() + _TERMINATION_S
            _signal(running.values(), signal.SIGTERM)
    return {"exit_codes": [codes[n] for n in sorted(codes)], "hung": hung}


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, number)


if __name__ == "__main__":
    _serve(sys.argv[1])
