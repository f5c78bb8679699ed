"""The batch scripts: what bash and the batch systems make of them."""

from __future__ import annotations

import argparse
import os
import shlex
import stat
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speechdp.errors import ConfigError
from speechdp.launching.allocation import Scheduler
from speechdp.launching.batch_script import (
    SYSTEMS,
    BatchJob,
    Placement,
    Resources,
    example,
    quote,
    render,
)

REPOSITORY = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Documented:
    """What a batch system says of its scripts.

    Attributes:
        prefix: with which the lines for it begin.
        options: its own; `name!` takes no value, `name+` may be repeated, `name2` has two values.
        folder: the variable with the folder of submission; "": jobs begin there.
    """

    prefix: str
    options: str
    folder: str


DOCUMENTED: dict[Scheduler, Documented] = {
    "slurm": Documented(
        "#SBATCH",
        "job-name nodes ntasks-per-node cpus-per-task gres time partition account output open-mode signal "
        "requeue! no-requeue! no-kill!",
        "SLURM_SUBMIT_DIR",
    ),
    "lsf": Documented("#BSUB", "J n R+ gpu W q P o wa wt Q r! rn!", "LS_SUBCWD"),
    "pbs": Documented("#PBS", "N S l+ q A j o r", "PBS_O_WORKDIR"),
    "sge": Documented("#$", "N S cwd! pe2 l+ notify! q P j o r", ""),
}
SCHEDULERS = tuple(DOCUMENTED)
JOB = BatchJob(
    resources=Resources(nodes=3, ranks_per_node=4, time="8:30:30", gpus_per_rank=2, cpus_per_rank=6),
    placement=Placement("night-run", queue="gpu", account="speech", output="logs/%j.txt"),
    python=Path("/opt/v/bin/python"),
    folder=Path("/home/u/my runs"),
    command=("train", "D", "R", "--resume"),
    launch_options=("--max-restarts", "3"),
)
PLAIN = replace(JOB, resources=Resources(2, 2, "1:00:00"), placement=Placement("x"), launch_options=())
HOSTILE = (
    "; rm -rf /",
    "$(id)",
    "`id`",
    "a\nb",
    "x\n#SBATCH --wrap=id",
    "x\n#$ -N evil\n#BSUB -J evil\n#PBS -N evil",
    "it's",
    'say "no"',
    "\\",
    "$HOME",
    "--help",
    "-",
    "",
    " ",
    "*",
    "~",
    "!!",
    "Füße 語 \u2028 \x1b[31m",
    "\udcff not UTF-8",
    "{{ name }} {% raw %} @X@ ${python} %j",
    "tab\tbell\x07\x7f",
)


def directives(scheduler: Scheduler, script: str) -> list[str]:
    """Return the words of all directive lines, wherever they stand, as Grid Engine and LSF look for them."""
    prefix = DOCUMENTED[scheduler].prefix
    words: list[str] = []
    for line in script.splitlines():
        if line.startswith(prefix + " "):
            words += shlex.split(line.removeprefix(prefix))
    return words


def parser(scheduler: Scheduler) -> argparse.ArgumentParser:
    """Return a parser of the options the batch system documents; unknown ones are errors."""
    result = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    dashes = "--" if scheduler == "slurm" else "-"
    for option in DOCUMENTED[scheduler].options.split():
        name = dashes + option.rstrip("!+2")
        if option.endswith("!"):
            result.add_argument(name, action="store_true")
        elif option.endswith("+"):
            result.add_argument(name, action="append")
        elif option.endswith("2"):
            result.add_argument(name, nargs=2)
        else:
            result.add_argument(name)
    return result


def parse(scheduler: Scheduler, script: str) -> dict[str, object]:
    found = vars(parser(scheduler).parse_args(directives(scheduler, script)))
    return {name: value for name, value in found.items() if value not in (None, False)}


def check_with_bash(script: str) -> None:
    answer = subprocess.run(["bash", "-n"], input=os.fsencode(script), capture_output=True, check=False)
    assert answer.returncode == 0 and answer.stderr == b""


def test_what_every_batch_system_documents_is_known_here() -> None:
    assert set(DOCUMENTED) == set(SYSTEMS), "give each system of SYSTEMS a row in DOCUMENTED"


def test_slurm_directives() -> None:
    assert parse("slurm", render("slurm", JOB)) == {
        "job_name": "night-run",
        "nodes": "3",
        "ntasks_per_node": "4",
        "cpus_per_task": "6",
        "gres": "gpu:8",
        "time": "8:30:30",
        "partition": "gpu",
        "account": "speech",
        "output": "logs/%j.txt",
        "open_mode": "append",
        "signal": "B:USR1@60",
        "requeue": True,
    }


def test_lsf_directives() -> None:
    assert parse("lsf", render("lsf", replace(JOB, signal_s=61))) == {
        "J": "night-run",
        "n": "12",
        "R": ["span[ptile=4]", "affinity[core(6)]"],
        "gpu": "num=8",
        "W": "8:31",
        "q": "gpu",
        "P": "speech",
        "o": "logs/%J.txt",
        "wa": "USR1",
        "wt": "2",
        "Q": "75",
        "r": True,
    }


def test_lsf_would_warn_a_job_as_it_starts_that_is_as_short_in_minutes() -> None:
    job = replace(JOB, resources=Resources(1, 2, "0:02:00"), signal_s=61)
    with pytest.raises(ConfigError, match="--signal-s 61: LSF warns in whole minutes, 2 before the limit"):
        render("lsf", job)
    render("lsf", replace(job, signal_s=60))
    render("slurm", job)


def test_pbs_directives() -> None:
    job = replace(JOB, placement=replace(JOB.placement, output="logs/all.txt"))
    assert parse("pbs", render("pbs", job)) == {
        "N": "night-run",
        "S": "/bin/bash",
        "l": [
            "select=3:ncpus=24:mpiprocs=4:ompthreads=6:ngpus=8",
            "place=scatter",
            "walltime=8:30:30",
        ],
        "q": "gpu",
        "A": "speech",
        "j": "oe",
        "o": "logs/all.txt",
        "r": "y",
    }
    assert "select=2:ncpus=2:mpiprocs=2:ompthreads=1" in directives("pbs", render("pbs", PLAIN))
    with pytest.raises(ConfigError, match="PBS does not replace %j"):
        render("pbs", JOB)


@pytest.mark.parametrize(
    ("scheduler", "output"), [("slurm", "%j.txt"), ("lsf", "%J.txt"), ("sge", "$JOB_ID.txt")]
)
def test_the_name_of_an_output_file_may_begin_with_the_job_id(scheduler: Scheduler, output: str) -> None:
    job = replace(JOB, placement=replace(JOB.placement, output="%j.txt"))
    assert parse(scheduler, render(scheduler, job))["output" if scheduler == "slurm" else "o"] == output


def test_grid_engine_directives() -> None:
    assert parse("sge", render("sge", JOB)) == {
        "N": "night-run",
        "S": "/bin/bash",
        "cwd": True,
        "pe": ["orte", "12"],
        "l": ["gpu=2", "h_rt=8:30:30"],
        "notify": True,
        "q": "gpu",
        "P": "speech",
        "j": "y",
        "o": "logs/$JOB_ID.txt",
        "r": "y",
    }


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_what_is_not_asked_for_is_left_out(scheduler: Scheduler) -> None:
    script = render(scheduler, replace(PLAIN, requeue=False))
    found = parse(scheduler, script)
    assert not {"partition", "q", "account", "A", "P", "gres", "gpu", "cpus_per_task", "Q", "requeue"} & set(
        found
    )
    assert "gpu" not in " ".join(directives(scheduler, script))
    assert found.get("r", "n") == "n"
    assert found.get("no_requeue", True) and found.get("rn", True)
    assert "launch --grace-s 45 -- train" in script
    check_with_bash(script)


def fake_python(folder: Path) -> Path:
    """Return a program that writes its folder and arguments, each ended by a zero byte, to $SEEN."""
    path = folder / "fake python"
    path.write_text('#!/bin/sh\nprintf "%s\\0" "$PWD" "$@" >"$SEEN"\n', encoding="utf-8")
    path.chmod(stat.S_IRWXU)
    return path


def run_script(script: str, folder: Path, *arguments: str, **environ: str) -> list[str]:
    """Run a script as batch systems do, as a copy elsewhere, and return what the fake Python was given."""
    spool = folder / "spool"
    spool.mkdir(exist_ok=True)
    copy, seen = spool / "job_script", folder / "seen"
    copy.write_bytes(os.fsencode(script))
    subprocess.run(
        ["bash", str(copy), *arguments],
        env={"PATH": os.environ["PATH"], "SEEN": str(seen), **environ},
        cwd=folder,
        check=True,
        timeout=300,
    )
    return [os.fsdecode(word) for word in seen.read_bytes().split(b"\0")[:-1]]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_hostile_words_reach_the_program_untouched(scheduler: Scheduler, tmp_path: Path) -> None:
    folder = tmp_path / "a b;$(id)"
    folder.mkdir()
    job = replace(
        PLAIN,
        python=fake_python(tmp_path),
        folder=folder,
        command=HOSTILE,
        launch_options=("--mpi-args", "a 'b'"),
    )
    script = render(scheduler, job)
    assert parse(scheduler, script) == parse(scheduler, render(scheduler, PLAIN))
    assert len(script.splitlines()) == len(render(scheduler, PLAIN).splitlines())
    own = ["--requeue", "--grace-s", "45"]
    wanted = ["-m", "speechdp", "launch", *own, "--mpi-args", "a 'b'", "--", *HOSTILE]
    assert run_script(script, tmp_path) == [str(folder), *wanted]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=8))
def test_any_word_survives_quoting(tmp_path: Path, words: list[str]) -> None:
    line = " ".join(quote(word) for word in words)
    assert len(line.splitlines()) <= 1
    answer = subprocess.run(
        ["bash", "-c", f'printf "%s\\0" x {line}'], capture_output=True, check=True, timeout=300
    )
    assert [os.fsdecode(word) for word in answer.stdout.split(b"\0")[1:-1]] == words


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_files_in_launch_are_these_templates(scheduler: Scheduler) -> None:
    path = REPOSITORY / "launch" / SYSTEMS[scheduler].template
    remedy = (
        f"mend speechdp/launching/templates/{SYSTEMS[scheduler].template}, then: .venv/bin/python -c 'from "
        f'speechdp.launching.batch_script import example; print(example("{scheduler}"), end="")\' > {path}'
    )
    assert path.read_text(encoding="utf-8") == example(scheduler), remedy
    check_with_bash(example(scheduler))
    parse(scheduler, example(scheduler))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_files_in_launch_take_a_command_or_their_own(scheduler: Scheduler, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    environ = {"SPEECHDP_PYTHON": str(fake_python(tmp_path))}
    if variable := DOCUMENTED[scheduler].folder:
        environ[variable] = str(folder)
    else:
        folder = tmp_path
    begin = [str(folder), "-m", "speechdp", "launch", "--requeue", "--grace-s", "45", "--"]
    script = example(scheduler)
    given = run_script(script, tmp_path, "train", "D", "R x", "--note", "$(id)", **environ)
    assert given == [*begin, "train", "D", "R x", "--note", "$(id)"]
    assert run_script(script, tmp_path, **environ) == [*begin, "train", "data", "runs/first", "--resume"]


def test_a_missing_installation_is_said(tmp_path: Path) -> None:
    answer = subprocess.run(
        ["bash", "-s"], input=example("slurm"), text=True, capture_output=True, cwd=tmp_path, check=False
    )
    assert answer.returncode == 1
    assert answer.stderr.startswith(f"no {tmp_path}/.venv/bin/python: submit from")


def warned(script: str, tmp_path: Path, **environ: str) -> int:
    """Run a script whose Python, tmp_path/python, waits for a warning; return the exit code, 75 after one.

    A second since the boot passes with each of the script's sleeps, and none before its Python can be warned,
    as it has long been able to by then: on a busy machine bash alone takes longer.
    """
    program, pause, ready = tmp_path / "python", tmp_path / "sleep", tmp_path / "ready"
    uptime = tmp_path / "uptime"
    # By sigwait: a handler's signal that comes just before a sleep begins is looked at only after the sleep.
    program.write_text(
        f"#!{sys.executable}\nimport pathlib, signal, sys\n"
        f"signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\npathlib.Path({str(ready)!r}).touch()\n"
        "signal.sigwait([signal.SIGUSR1])\nsys.exit(75)\n",
        encoding="utf-8",
    )
    ready.unlink(missing_ok=True)
    uptime.write_text("1000.99 2000.00\n")
    # Whatever ends the sleep, the warning is to come.
    wait = f"until [ -e '{ready}' ]; do /bin/sleep 0.1; done; read -r s _ <'{uptime}'"
    pause.write_text(f"#!/bin/sh\n{wait}; echo \"$((${{s%.*}} + 1)).00 2000.00\" >'{uptime}'\nkill -9 $$\n")
    for file in (program, pause):
        file.chmod(stat.S_IRWXU)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "SPEECHDP_PYTHON": str(program), **environ}
    assert script.count("</proc/uptime") == 2
    answer = subprocess.run(
        ["bash"],
        input=script.replace("</proc/uptime", f"<'{uptime}'"),
        text=True,
        env=environ,
        cwd=tmp_path,
        check=False,
        timeout=300,
    )
    return answer.returncode


@pytest.mark.parametrize("scheduler", ["pbs", "sge"])
def test_the_script_itself_warns_where_the_batch_system_does_not(
    scheduler: Scheduler, tmp_path: Path
) -> None:
    python, resources = tmp_path / "python", Resources(1, 1, "0:00:03")
    job = replace(PLAIN, resources=resources, python=python, folder=tmp_path, signal_s=2)
    assert warned(render(scheduler, job), tmp_path) == 75


@pytest.mark.parametrize("scheduler", ["pbs", "sge"])
def test_the_warning_goes_by_no_clock_that_may_be_set(scheduler: Scheduler, tmp_path: Path) -> None:
    """SECONDS follows the clock, and begins with what the job's environment has by that name."""
    python, resources = tmp_path / "python", Resources(1, 1, "0:00:03")
    job = replace(PLAIN, resources=resources, python=python, folder=tmp_path, signal_s=2)
    assert warned(render(scheduler, job), tmp_path, SECONDS="-3600") == 75


@pytest.mark.parametrize("scheduler", ["pbs", "sge"])
def test_the_files_in_launch_warn_before_another_limit(
    scheduler: Scheduler, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    edited = example(scheduler).replace(":-3600}", ":-61}")
    assert edited != example(scheduler)
    assert warned(edited, tmp_path) == 75
    assert warned(example(scheduler), tmp_path, SPEECHDP_LIMIT_S="61") == 75
    for limit in ("4:00:00", "60", "0x10"):
        assert warned(example(scheduler), tmp_path, SPEECHDP_LIMIT_S=limit) == 1
        assert f"limit_s={limit}: give the time limit in seconds, more than 60" in capfd.readouterr().err
