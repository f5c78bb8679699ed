"""Parse a launcher's output: find out which rank failed, and hide banners that our own message replaces.

Open MPI and Horovod print ten lines of their own around a rank's one, among them "Primary job terminated
normally, but 1 process returned a non-zero exit code".  Known texts are turned into faults and hidden;
anything else is passed on unchanged.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

from speechdp import exit_codes
from speechdp.launching.faults import ENDED_BY_SSH, LOST_HOST, Fault
from speechdp.process.notices import WARNING

_RULE = re.compile(r"-{74}")
#: A rank's line without a line break, followed directly by mpirun's rule.
_RULE_BEHIND = re.compile(rb"(.*[^-\n])(-{74}\r?\n)", re.DOTALL)
#: `mpirun --tag-output` and horovodrun put the rank before each line, and so do `srun --label` and Hydra's
#: `-prepend-rank`.
_TAG = re.compile(r"^(?:\[\d+(?:,\d+)?\]<(?:stderr|stdout)>:\s?| *\d+: |\[\d+\] )")
#: The part of srun's tag received so far, before what may be a known line.
_LABEL_BEGUN = re.compile(rb" *\d*(?::(?: |$)|$)")
#: A rank's last message; a rank that does not yet know that it is one of several does not name itself.
_SAID = re.compile(
    rf"(?!{WARNING})speechdp: (?:rank (?P<rank>\d+)(?: \([^)]*\))? on (?P<host>[^\s:]+): )?(?P<text>.*)"
)
#: srun's names of signals that end a task, as given by strsignal.
_SIGNAL_NAMES = {signal.strsignal(number): int(number) for number in signal.Signals}
#: Beginnings of a hung rank's line (watchdog/watchdog.py, watchdog/script_watchdog.py).
_HUNG = ("no step ended for ", "hung for ")
#: Message of a rank ended by a signal, after cleaning up (process/ending.py).
_ENDED = re.compile(r"ended by (?P<name>SIG[A-Z0-9]+)")
_LATE = re.compile(r"rank (?P<rank>\d+) on (?P<host>[^\s:,;]+) \(no sign of life")


@dataclass(frozen=True)
class _Banner:
    """A text that a launcher prints, and the fault that it reports; None: it reports none.

    Attributes:
        is_last_word: whether it counts only if no fault was reported before, and is shown if it reports none:
            Hydra's messages about ranks that it killed itself, and about its own end.
    """

    text: re.Pattern[str]
    fault: Callable[[re.Match[str]], Fault | None]
    is_last_word: bool = False


def _nothing(_match: re.Match[str]) -> None:
    return None


def _killed(match: re.Match[str]) -> Fault:
    return Fault("killed", int(match["rank"]), match["host"], signal=int(match["signal"]))


def _killed_by_name(match: re.Match[str]) -> Fault | None:
    number = _SIGNAL_NAMES.get(match["name"])
    return None if number is None else Fault("killed", int(match["rank"]), match["host"], signal=number)


def _aborted(match: re.Match[str]) -> Fault:
    return Fault("aborted", int(match["rank"]))


def _exited(match: re.Match[str]) -> Fault:
    return Fault("exited", int(match["rank"]), match.groupdict().get("host"), exit_code=int(match["code"]))


def _ended_under_horovodrun(match: re.Match[str]) -> Fault:
    code, rank = int(match["code"]), int(match["rank"])
    if 128 < code < ENDED_BY_SSH:  # a shell between horovodrun and the rank reports signals so
        return Fault("killed", rank, signal=code - 128)
    return Fault("exited", rank, exit_code=code)


def _not_reached(match: re.Match[str]) -> Fault:
    return Fault("not reached", host=match.groupdict().get("host"))


def _no_program(match: re.Match[str]) -> Fault:
    return Fault("no program", host=match["host"])


def _no_folder(match: re.Match[str]) -> Fault:
    return Fault("no folder", detail=f"{match['folder']} ({match['error']})")


def _no_room(match: re.Match[str]) -> Fault:
    return Fault("no room", host=match["host"])


def _no_shared_memory(match: re.Match[str]) -> Fault:
    return Fault("no shared memory", host=match["host"])


def _start_hung(_match: re.Match[str]) -> Fault:
    return Fault("start hung", exit_code=exit_codes.HUNG)


def _host_lost(match: re.Match[str]) -> Fault:
    return Fault("host lost", host=match["host"])


def _host_lost_by_hydra(match: re.Match[str]) -> Fault:
    """Return a lost host with Open MPI's exit code for it: Hydra's own is 255 whatever happened."""
    return Fault("host lost", host=match.groupdict().get("host"), exit_code=LOST_HOST)


def _some_rank_killed(match: re.Match[str]) -> Fault:
    return Fault("killed", signal=int(match["signal"]))


#: Texts between two rules of dashes; runs of blanks and line breaks are replaced by one blank.
_BLOCKS = (
    # Open MPI 4 and 5
    _Banner(
        re.compile(
            r"noticed that process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) "
            r"exited on signal (?P<signal>\d+)"
        ),
        _killed,
    ),
    _Banner(re.compile(r"MPI_ABORT was invoked on rank (?P<rank>\d+)"), _aborted),
    _Banner(
        re.compile(
            r"one or more processes exited with non-zero status.*"
            r"Process name: \[\S*?,(?P<rank>\d+)\] Exit code: (?P<code>\d+)"
        ),
        _exited,
    ),
    _Banner(
        re.compile(r"lost communication with a remote daemon.*Remote daemon: \S+ on node (?P<host>\S+)"),
        _host_lost,
    ),
    _Banner(re.compile(r"MPI communication peer process has unexpectedly disconnected"), _nothing),
    _Banner(re.compile(r"ORTE does not know how to route a message"), _nothing),
    _Banner(re.compile(r"was unable to reliably start one or more daemons"), _not_reached),
    _Banner(
        re.compile(r"unable to (launch|start) the specified application.*Node: (?P<host>\S+)"), _no_program
    ),
    _Banner(
        re.compile(
            r"unable to create the desired directory: Directory: (?P<folder>\S+) Error: (?P<error>.*?) "
            r"Please check"
        ),
        _no_folder,
    ),
    _Banner(
        re.compile(
            r"unable to reach each other for MPI communications.*Process 1 \(\S+\) is on host: (?P<host>\S+) "
            r"Process 2 \(\S+\) is on host: (?P=host) BTLs attempted: self Your MPI job"
        ),
        _no_shared_memory,
    ),
    _Banner(re.compile(r"orte_init failed for some reason.* orte_session_dir failed"), _nothing),
    _Banner(re.compile(r"Primary job +terminated normally, but"), _nothing),
    _Banner(
        re.compile(r"mpirun has exited due to process rank|This may have caused other processes"), _nothing
    ),
)
_LINES = (
    # From a rank that waited for the others in MPI_Init, where no code of ours can run, and ended itself.
    # The fraction is _TIMER_MARK_S of comm/startup/start_guard.py: a script's own timer may not end it.
    _Banner(re.compile(r"^Timeout \(\d+:\d\d:\d\d\.015625\)!$"), _start_hung),
    _Banner(re.compile(r"^Connection to (?P<host>\S+) closed by remote host\.$"), _host_lost),
    _Banner(re.compile(r"^\[warn\] Epoll |plm:rsh: Warning: setpgid"), _nothing),
    _Banner(re.compile(r"ORTE_ERROR_LOG: .* in file \S*(show_help|session_dir)\.c"), _nothing),
    _Banner(
        re.compile(r'more process(es have| has) sent help message|"orte_base_help_aggregate" to 0'), _nothing
    ),
    # A full disk for the files in TMPDIR by which daemons inform ranks about each other.
    _Banner(
        re.compile(r"^\[(?P<host>[^\s:\]]+):\d+\] PMIX ERROR: OUT-OF-RESOURCE in file \S*dstore"), _no_room
    ),
    _Banner(re.compile(r"PMIX ERROR: ERROR in file \S*(dstore|gds_ds)"), _nothing),
    # From a daemon whose ranks were gone before all had been notified of the end.
    _Banner(re.compile(r"PMIX ERROR: UNREACHABLE in file \S*pmix_server"), _nothing),
    _Banner(re.compile(r"^mpirun: Forwarding signal \d+ to job"), _nothing),
    # Horovod, about a peer that is gone
    _Banner(re.compile(r"Horovod background loop uncaught exception"), _nothing),
    _Banner(re.compile(r"^\[\d{4}-\d\d-\d\d [\d:.]+: E ?$"), _nothing),
    # srun
    _Banner(
        re.compile(
            r"^srun: error: (?P<host>\S+): tasks? (?P<rank>\d+)[\d,-]*: "
            r"(?P<name>[A-Z][a-z ]+?)(?: \(core dumped\))?$"
        ),
        _killed_by_name,
    ),
    _Banner(
        re.compile(
            r"^srun: error: (?P<host>\S+): tasks? (?P<rank>\d+)[\d,-]*: Exited with exit code (?P<code>\d+)"
        ),
        _exited,
    ),
    _Banner(re.compile(r"^srun: error: Node failure on (?P<host>\S+)"), _host_lost),
    _Banner(re.compile(r"^srun: Job step aborted"), lambda _: Fault("step aborted")),
    _Banner(
        re.compile(r"^srun: error: Timed out waiting for job step to complete"),
        lambda _: Fault("step timed out"),
    ),
    _Banner(
        re.compile(
            r"^srun: (Terminating StepId|launch/slurm: _step_signal"
            r"|cluster configuration lacks support for cpu binding)"  # which srun_command does not request
        ),
        _nothing,
    ),
    # Hydra: the parent of a rank (mpi/rank_process.py), MPI_Abort, and mpiexec itself
    _Banner(
        re.compile(r"^speechdp: rank (?P<rank>\d+) on (?P<host>\S+): killed by signal (?P<signal>\d+)$"),
        _killed,
    ),
    _Banner(
        re.compile(r"^speechdp: rank (?P<rank>\d+) on (?P<host>\S+): left with exit code (?P<code>\d+)$"),
        _exited,
    ),
    _Banner(
        re.compile(
            r"^Abort\(\d+\) on node \d+ \(rank (?P<rank>\d+) in comm \d+\): application called MPI_Abort"
        ),
        _aborted,
    ),
    _Banner(re.compile(r"^\[mpiexec@[^\]]+\] control_cb .*: assert \(!closed\) failed"), _host_lost_by_hydra),
    _Banner(
        re.compile(r"^\[mpiexec@[^\]]+\] Error: Downstream from host (?P<host>\S+) exited abnormally"),
        _host_lost_by_hydra,
    ),
    _Banner(
        re.compile(
            r"^\[mpiexec@[^\]]+\] (?:\S+ \(.*\): Launch proxy failed\."
            r"|Error: Unable to run bstrap_proxy on (?P<host>[^\s:]+))"
        ),
        _not_reached,
    ),
    _Banner(re.compile(r"^\[proxy:[\d:]+@(?P<host>[^\]]+)\] \S+ \(.*\): execvp error on file "), _no_program),
    _Banner(
        re.compile(r"^(?:=   KILLED BY SIGNAL: |YOUR APPLICATION TERMINATED .*signal )(?P<signal>\d+)"),
        _some_rank_killed,
        is_last_word=True,
    ),
    _Banner(re.compile(r"^={83}$|^=   (?:BAD TERMINATION|RANK|PID|CLEANING UP|YOU CAN IGNORE)"), _nothing),
    _Banner(
        re.compile(r"^=   EXIT CODE: \d+|^YOUR APPLICATION TERMINATED WITH"), _nothing, is_last_word=True
    ),
    _Banner(re.compile(r"^This typically refers to a problem with your application\.$"), _nothing),
    _Banner(re.compile(r"^Please see the FAQ page for debugging suggestions$"), _nothing),
    _Banner(re.compile(r"^\[(?:mpiexec|proxy:[\d:]+)@[^\]]+\] "), _nothing, is_last_word=True),
    # Slurm builds that allow several slurmd on a host, such as Debian's, add a name: slurmstepd-n1.
    _Banner(re.compile(r"^slurmstepd(-\S+)?: error: \*\*\* STEP \S+ ON \S+ CANCELLED"), _nothing),
)
#: Message of the shell between horovodrun and a rank about the rank's end.
_SHELLS_WORD = re.compile(r"\[\d+\]<stderr>:(Killed|Terminated)")
#: horovodrun ends with a traceback of its own, whose last line but two says what happened.
_TRACE_BEGINS = "Traceback (most recent call last):"
#: The same, directly behind the first words about a horovodrun thread that fails at its end.
_TRACE_BEGINS_BEHIND = f"Exception in thread {_TRACE_BEGINS}"
_TRACE_OF_LAUNCHER = "Horovod detected that one or more processes exited with non-zero status"
_TRACES = (
    _Banner(
        re.compile(rf"{_TRACE_OF_LAUNCHER}.*Process name: (?P<rank>\d+) Exit code: (?P<code>\d+)"),
        _ended_under_horovodrun,
    ),
    _Banner(re.compile(r"could not connect to some hosts via ssh"), _not_reached),
)
_BEGINNINGS = (
    b"---",
    b"[",
    b"speechdp: ",
    b"Traceback",
    b"Exception in thread Traceback",
    b"Connection to",
    b"Timeout (",
    b"srun: ",
    b"slurmstepd",
    b"Abort(",
    b"=",
    b"YOUR APPLICATION",
    b"This typically",
    b"Please see",
)
_MOST_HELD_LINES = 80


class LauncherOutput:
    """Takes a launcher's stderr piece by piece and returns the parts to show.

    Attributes:
        faults: faults found so far, in order.
    """

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self._rest = b""
        self._begun = False  # whether the beginning of the current line has been shown
        self._held: list[bytes] = []
        self._in_trace = False
        self._after_trace = False

    def feed(self, data: bytes) -> bytes:
        """Take data that was read; return what to show at once."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        shown = b""
        for line in lines:
            behind = _RULE_BEHIND.fullmatch(line + b"\n")
            for part in (line + b"\n",) if behind is None else (behind[1] + b"\n", behind[2]):
                shown += part if self._begun else self._take(part)
                self._begun = False
        # The progress bar and prompts have no line break: hold back only what may become a known line.
        if self._rest and (self._begun or not (self._held or _may_be_known(self._rest))):
            shown, self._rest, self._begun = shown + self._rest, b"", True
        return shown

    def end(self) -> bytes:
        """Return what is still held back, after the launcher has ended."""
        shown = self._take(self._rest) if self._rest else b""
        self._rest = b""
        return shown + self._release()

    def _take(self, line: bytes) -> bytes:
        raw = line.decode(errors="replace").rstrip("\r\n")
        ends_trace, self._after_trace = self._after_trace and not raw, False
        if ends_trace or _SHELLS_WORD.fullmatch(raw):  # Horovod's message ends with a blank line
            return b""
        text = _TAG.sub("", raw)
        if self._held:
            return self._hold(line, text)
        begins_trace = text in (_TRACE_BEGINS, _TRACE_BEGINS_BEHIND)
        if _RULE.fullmatch(text) or begins_trace:
            self._held, self._in_trace = [line], begins_trace
            return b""
        if _note(_LINES, text, self.faults):
            return b""
        self._note_own(text)
        return line

    def _hold(self, line: bytes, text: str) -> bytes:
        self._held.append(line)
        if self._note_own(text) or len(self._held) > _MOST_HELD_LINES:  # never hold back our own lines
            return self._release()
        if not (self._ends_trace(text) if self._in_trace else _RULE.fullmatch(text)):
            return b""
        held = b"".join(self._held).decode(errors="replace")
        body = " ".join(_RULE.sub("", held).split())
        if _note(_TRACES if self._in_trace else _BLOCKS, body, self.faults):
            self._held, self._after_trace = [], self._in_trace
            return b""
        return self._release()

    def _ends_trace(self, text: str) -> bool:
        """Return whether a traceback ends: at its first line not indented; Horovod's at its exit code."""
        if text == "" or text[0].isspace() or _TRACE_OF_LAUNCHER in text:
            return False
        return "Exit code:" in text or not any(_TRACE_OF_LAUNCHER.encode() in line for line in self._held)

    def _release(self) -> bytes:
        shown, self._held = b"".join(self._held), []
        return shown

    def _note_own(self, text: str) -> bool:
        match = _SAID.match(text)
        if match is None:
            return False
        silent = tuple(dict.fromkeys(found["host"] for found in _LATE.finditer(match["text"])))
        # horovodrun exits with 1 whatever a rank's exit code.
        exit_code = exit_codes.HUNG if match["text"].startswith(_HUNG) else None
        rank = None if match["rank"] is None else int(match["rank"])
        ended = _ENDED.fullmatch(match["text"].strip())
        if ended is not None and ended["name"] in signal.Signals.__members__:
            number = signal.Signals[ended["name"]]
            self.faults.append(Fault("killed", rank, match["host"], signal=number))
            return True
        self.faults.append(Fault("reported", rank, match["host"], exit_code=exit_code, silent_hosts=silent))
        return True


def _note(banners: tuple[_Banner, ...], text: str, faults: list[Fault]) -> bool:
    """Record the fault that a known text reports; return whether the text is known."""
    for banner in banners:
        match = banner.text.search(text)
        if match is None:
            continue
        if banner.is_last_word and faults:
            return True
        fault = banner.fault(match)
        if fault is not None:
            faults.append(fault)
        return fault is not None or not banner.is_last_word
    return False


def _may_be_known(rest: bytes) -> bool:
    """Return whether a partial line may become a known one."""
    label = _LABEL_BEGUN.match(rest)
    untagged = rest if label is None else rest[label.end() :]
    return any(untagged.startswith(known[: len(untagged)]) for known in _BEGINNINGS)
