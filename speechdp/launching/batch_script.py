"""Fill in the scripts that batch systems run: slurm.sbatch, lsf.bsub, pbs.qsub and sge.qsub.

Each batch system parses directive lines (`#SBATCH ...`) in its own way, so they hold only values of a few
plain characters.  Everything else is quoted for bash, on the lines of `cd` and `exec`.  A newline in an
argument is written as an escape: Grid Engine and LSF look for directives in the whole file, even inside a
quoted word.
"""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from speechdp import exit_codes
from speechdp.counting import counted
from speechdp.errors import ConfigError
from speechdp.launching.allocation import Scheduler

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class BatchSystem:
    """How to submit a job to a batch system, cancel it, and run it again.

    Attributes:
        name: its name in messages.
        template: the script's template, a file in templates/; a script has its suffix.
        program: program that accepts scripts, with its options.
        printed_id: pattern of the job id in the program's output.
        cancel: program that ends a job, given its id.
        reads_stdin: whether `program` reads the script from stdin.
        id_in_output: placeholder of the job id in the name of an output file; None: there is none, and
            without --output the file is NAME.oNUMBER.
        replaced_in_folder: characters that it replaces in the path of a job's working directory.  It would
            not find the directory, and the job would wait for ever or fail without a message.
        requeue: program that puts a running job back into the queue, given its id; (): the job's exit code
            does so.
        requeued_code: exit code of a job that is to run again.
    """

    name: str
    template: str
    program: tuple[str, ...]
    printed_id: re.Pattern[str]
    cancel: str
    reads_stdin: bool = False
    id_in_output: str | None = None
    replaced_in_folder: str = ""
    requeue: tuple[str, ...] = ()
    requeued_code: int = exit_codes.STOPPED


SYSTEMS: dict[Scheduler, BatchSystem] = {
    "slurm": BatchSystem(
        name="Slurm",
        template="slurm.sbatch",
        program=("sbatch", "--parsable"),
        printed_id=re.compile(r"^([0-9]+)(?:;[A-Za-z0-9._-]+)?$", re.MULTILINE),
        cancel="scancel",
        id_in_output="%j",
        replaced_in_folder="%\\",
        requeue=("scontrol", "requeue"),
    ),
    "lsf": BatchSystem(  # its script has `-Q "75"`
        name="LSF",
        template="lsf.bsub",
        program=("bsub",),
        printed_id=re.compile(r"Job <([0-9]+)>"),
        cancel="bkill",
        reads_stdin=True,
        id_in_output="%J",
    ),
    "pbs": BatchSystem(
        name="PBS",
        template="pbs.qsub",
        program=("qsub",),
        printed_id=re.compile(r"^([0-9]+(?:\[\])?(?:\.[A-Za-z0-9._-]+)?)$", re.MULTILINE),
        cancel="qdel",
        requeue=("qrerun",),
    ),
    "sge": BatchSystem(
        name="Grid Engine",
        template="sge.qsub",
        program=("qsub", "-terse"),
        printed_id=re.compile(r"^([0-9]+)(?:\.[0-9:-]+)?$", re.MULTILINE),
        cancel="qdel",
        id_in_output="$JOB_ID",
        replaced_in_folder="$",
        requeued_code=99,
    ),
}

#: Time kept for SIGTERM, SIGKILL and the end of launch itself if the ranks do not exit by themselves, s.
_ENDING_S = 15
_SHORTEST_GRACE_S = 5

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,62}")
_QUEUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._,@-]{0,126}")
_ACCOUNT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,126}")
_OUTPUT = re.compile(r"(?:[A-Za-z0-9._/]|%j)(?:[A-Za-z0-9._/+=-]|%j){0,500}")
_TIME = re.compile(r"(?:([0-9]{1,3})-)?([0-9]{1,4}):([0-5][0-9]):([0-5][0-9])")
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Resources:
    """The resources that a job requests.

    Attributes:
        nodes: number of nodes.
        ranks_per_node: number of ranks on each node.
        time: time limit as H:MM:SS or, as Slurm writes it, D-HH:MM:SS.
        gpus_per_rank: number of GPUs per rank.
        cpus_per_rank: number of cores per rank; None: the batch system's default.
    """

    nodes: int
    ranks_per_node: int
    time: str
    gpus_per_rank: int = 0
    cpus_per_rank: int | None = None

    def __post_init__(self) -> None:
        _check_range("--nodes", self.nodes, 1, 99_999)
        _check_range("--ranks-per-node", self.ranks_per_node, 1, 9_999)
        _check_range("--gpus-per-rank", self.gpus_per_rank, 0, 64)
        if self.cpus_per_rank is not None:
            _check_range("--cpus-per-rank", self.cpus_per_rank, 1, 4_096)
        if self.time_s == 0:
            raise ConfigError(f"--time {self.time}: must be more than 0; write H:MM:SS, e.g. 8:00:00")

    @property
    def time_s(self) -> int:
        """The time limit, s.  Raises ConfigError if `time` has another form."""
        match = _TIME.fullmatch(self.time)
        if match is None:
            raise ConfigError(
                f"--time {self.time!r} is not of the form H:MM:SS or D-HH:MM:SS, e.g. 8:00:00 or 7-00:00:00"
            )
        days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


@dataclass(frozen=True)
class Placement:
    """Name, queue, account and output file of a job; each value goes on a directive line.

    Attributes:
        name: name of the job.
        queue: partition of Slurm, queue of the other systems; None: the default one.
        account: who pays: account of Slurm and PBS, project of LSF and Grid Engine; None: the default.
        output: file for the job's output, in which `%j` stands for the job's number; None: `default_output`.
        parallel_environment: parallel environment of Grid Engine.
    """

    name: str
    queue: str | None = None
    account: str | None = None
    output: str | None = None
    parallel_environment: str = "orte"

    def __post_init__(self) -> None:
        _check("--name", self.name, _NAME, "a letter, then letters, digits, . _ - (63 at most)")
        _check("--queue (--partition)", self.queue, _QUEUE, "letters, digits, . _ - @ and commas")
        _check("--account", self.account, _ACCOUNT, "letters, digits and . _ - : @ / +")
        _check("--output", self.output, _OUTPUT, "letters, digits and . _ - + = /, %j for the job's number")
        _check(
            "--parallel-environment",
            self.parallel_environment,
            _NAME,
            "a letter, then letters, digits, . _ -",
        )


@dataclass(frozen=True)
class BatchJob:
    """One job to submit.

    Attributes:
        resources: nodes, ranks and time to request.
        placement: name, queue, account and output file.
        python: absolute path of the Python that runs speechdp on the nodes.
        folder: absolute path of the job's working directory.
        command: what every rank runs: a subcommand and its arguments.
        launch_options: more options of speechdp launch.
        signal_s: time before the limit at which the ranks are asked to save and exit, s.
        requeue: whether to start the job again after that, and after the loss of a node.
        outlives_node: whether the job can continue without one of its nodes.
    """

    resources: Resources
    placement: Placement
    python: Path
    folder: Path
    command: tuple[str, ...]
    launch_options: tuple[str, ...] = ()
    signal_s: int = 60
    requeue: bool = True
    outlives_node: bool = False

    def __post_init__(self) -> None:
        _check_range("--signal-s", self.signal_s, 1, 65_535)
        if self.signal_s >= self.resources.time_s:
            raise ConfigError(
                f"--signal-s {self.signal_s} is not less than --time {self.resources.time}; "
                "the stop signal would come before the job starts: lower --signal-s or raise --time"
            )

    @property
    def launch_words(self) -> tuple[str, ...]:
        """Options of speechdp launch; the ranks may save for nearly as long as they are warned in advance."""
        grace_s = max(_SHORTEST_GRACE_S, self.signal_s - _ENDING_S)
        requeue = ("--requeue",) if self.requeue else ()
        # The user's options come last, and so take precedence.
        return (*requeue, "--grace-s", str(grace_s), *self.launch_options)


def render(scheduler: Scheduler, job: BatchJob) -> str:
    """Return the script to submit to `scheduler` for `job`.

    Raises:
        ConfigError: LSF, which counts in minutes, would warn the job as it starts.
    """
    warned_min = _whole_minutes(job.signal_s)
    if scheduler == "lsf" and warned_min >= _whole_minutes(job.resources.time_s):
        raise ConfigError(
            f"--signal-s {job.signal_s}: LSF warns in whole minutes, {warned_min} before the limit, and "
            f"--time {job.resources.time} is no longer; the stop signal would come as the job starts: lower "
            "--signal-s or raise --time"
        )
    words = {
        "by_hand": False,
        "title": f"Written by speechdp submit: {counted(job.resources.nodes, 'node')}, "
        f"{counted(job.resources.ranks_per_node, 'rank')} on each.",
        "folder": quote(str(job.folder)),
        "python": quote(str(job.python)),
        "launch_options": _launch_options(job),
        "command": " ".join(quote(word) for word in job.command),
    }
    return _fill(scheduler, job, words)


def example(scheduler: Scheduler) -> str:
    """Return the script in launch/ that users edit and submit by hand."""
    job = BatchJob(
        resources=Resources(nodes=2, ranks_per_node=2, time="1:00:00"),
        placement=Placement(name="train"),
        python=Path(),
        folder=Path(),
        command=(),
    )
    words = {
        "by_hand": True,
        "title": "",
        "folder": "",
        "python": '"$python"',
        "launch_options": _launch_options(job),
        "command": '"$@"',
    }
    return _fill(scheduler, job, words)


def default_output(scheduler: Scheduler, name: str) -> str | None:
    """Return the default output file in the job's folder; None: the batch system's own, NAME.oNUMBER."""
    job_id = SYSTEMS[scheduler].id_in_output
    return None if job_id is None else f"speechdp-{name}.{job_id}.out"


def job_name(text: str) -> str:
    """Turn a folder's name into the name of a job: characters not allowed in it become dashes."""
    name = _NOT_IN_A_NAME.sub("-", text).strip("-._")
    if not name[:1].isalpha():
        name = f"run-{name}".rstrip("-")
    return name[:40]


def quote(word: str) -> str:
    """Return a word quoted for bash, on one line of printable text."""
    raw = os.fsencode(word)
    if all(byte >= 0x20 and byte != 0x7F for byte in raw) and word.isprintable():
        return shlex.quote(word)
    # For control characters, and bytes that are not text, $'...' gives the number of each byte.
    plain = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _-./=:,+@%"
    return "$'" + "".join(chr(byte) if byte in plain else f"\\{byte:03o}" for byte in raw) + "'"


def output_file(scheduler: Scheduler, placement: Placement) -> str | None:
    """Return the output file in the form of the batch system's directive.

    Raises:
        ConfigError: the name has `%j`, and the batch system cannot insert the job id.
    """
    if placement.output is None:
        return default_output(scheduler, placement.name)
    system = SYSTEMS[scheduler]
    if system.id_in_output is None and "%j" in placement.output:
        raise ConfigError(
            f"--output {placement.output}: {system.name} does not replace %j by the job id; leave it out"
        )
    return placement.output.replace("%j", system.id_in_output or "")


def _launch_options(job: BatchJob) -> str:
    return "".join(f" {quote(word)}" for word in job.launch_words)


def _fill(scheduler: Scheduler, job: BatchJob, words: dict[str, object]) -> str:
    resources, placement = job.resources, job.placement
    script = _template(scheduler).render(
        vars(placement) | vars(resources),
        **words,
        output=output_file(scheduler, placement),
        num_ranks=resources.nodes * resources.ranks_per_node,
        gpus_per_node=resources.gpus_per_rank * resources.ranks_per_node,
        cpus_per_node=(resources.cpus_per_rank or 1) * resources.ranks_per_node,
        time=_clock(resources.time_s),
        time_s=resources.time_s,
        time_minutes=_clock(_whole_minutes(resources.time_s) * 60).removesuffix(":00"),
        signal_s=job.signal_s,
        signal_minutes=_whole_minutes(job.signal_s),
        requeue=job.requeue,
        outlives_node=job.outlives_node,
    )
    return script.rstrip("\n") + "\n"


def _template(scheduler: Scheduler) -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415 - a launch starts without

    environment = Environment(
        loader=PackageLoader("speechdp.launching"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        autoescape=False,
    )
    return environment.get_template(SYSTEMS[scheduler].template)


def _clock(seconds: int) -> str:
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _whole_minutes(seconds: int) -> int:
    return -(-seconds // 60)


def _check(option: str, value: str | None, pattern: re.Pattern[str], allowed: str) -> None:
    if value is not None and not pattern.fullmatch(value):
        raise ConfigError(f"{option} {value!r} cannot be used in a batch script; allowed: {allowed}")


def _check_range(option: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{option} {value}: a number from {low} to {high} is needed")
