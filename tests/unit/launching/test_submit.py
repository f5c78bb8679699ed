"""speechdp submit: what is written, called and said; the batch systems are scripts that note it all."""

from __future__ import annotations

import os
import secrets
import stat
import typing
from pathlib import Path

import pytest

from speechdp.cli.main import run
from speechdp.errors import ConfigError
from speechdp.launching.allocation import Scheduler
from speechdp.launching.batch_script import SYSTEMS
from speechdp.launching.submit import check_command, detect_scheduler, plan_submission, submit, write_script
from speechdp.launching.variables import PAUSE
from speechdp.ownership import batch_job

RESOURCES = ["--nodes", "2", "--ranks-per-node", "4", "--time", "8:00:00"]
SCRIPT = ("python", "own.py")
ANSWERS = {
    "slurm": ("sbatch", "4711;cluster1"),
    "lsf": ("bsub", "Job <4711> is submitted to queue <normal>."),
    "pbs": ("qsub", "4711.server.example.org"),
    "sge": ("qsub", "4711"),
}


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("SGE_ROOT", raising=False)
    (tmp_path / "bin").mkdir()
    return folder


def install(folder: Path, program: str, answer: str, exit_code: int = 0) -> None:
    """Put a program into folder/bin that notes its arguments and its input."""
    path = folder / "bin" / program
    path.write_text(
        f'#!/bin/sh\nprintf "%s\\0" "$@" >{folder}/arguments\ncat >{folder}/input\n'
        f"cat <<'END'\n{answer}\nEND\nexit {exit_code}\n",
        encoding="utf-8",
    )
    path.chmod(stat.S_IRWXU)


def arguments(folder: Path) -> list[str]:
    return (folder / "arguments").read_text(encoding="utf-8").split("\0")[:-1]


@pytest.mark.parametrize("scheduler", sorted(ANSWERS))
def test_a_job_is_submitted(
    scheduler: str, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program, answer = ANSWERS[scheduler]
    install(tmp_path, program, answer)
    more = ["--scheduler", scheduler, "--scheduler-args=--mem 4G '--note=a; id'"]
    assert run(["submit", *RESOURCES, *more, "--", "train", "D", "runs/night $(id)", "--seed", "1"]) == 0
    suffix = {"slurm": "sbatch", "lsf": "bsub"}.get(scheduler, "qsub")
    script = work / f"speechdp-night-id.{suffix}"
    text = script.read_text(encoding="utf-8")
    assert text.splitlines()[-1].endswith("-- train D 'runs/night $(id)' --seed 1 --resume")
    own = {"slurm": ["--parsable"], "sge": ["-terse"]}.get(scheduler, [])
    last = [] if scheduler == "lsf" else [str(script)]
    assert arguments(tmp_path) == [*own, "--mem", "4G", "--note=a; id", *last]
    assert (tmp_path / "input").read_text(encoding="utf-8") == (text if scheduler == "lsf" else "")
    job_id = "4711.server.example.org" if scheduler == "pbs" else "4711"
    output = "night-id.o4711" if scheduler == "pbs" else "speechdp-night-id.4711.out"
    cancel = {"slurm": "scancel", "lsf": "bkill"}.get(scheduler, "qdel")
    assert capsys.readouterr().out.splitlines() == [
        f"job {job_id} submitted: {script}",
        f"output: {work / output}",
        f"end it: {cancel} {job_id}",
    ]
    assert sorted(path.name for path in work.iterdir()) == [script.name]


def test_dry_run_shows_a_script_that_can_be_submitted(
    work: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    options = ["--scheduler", "lsf", "--scheduler-args=-M '4 G\n'", "--max-restarts", "2", "--dry-run"]
    assert run(["submit", *RESOURCES, *options, "--", "train", "D", "R"]) == 0
    lines = os.fsdecode(capfdbinary.readouterr().out).splitlines()
    assert lines[0] == "#!/bin/bash"
    assert lines[-3].endswith(
        "-m speechdp launch --requeue --grace-s 45 --max-restarts 2 -- train D R --resume"
    )
    assert lines[-1] == f"# bsub -M $'4 G\\012' < '{work}/speechdp-R.bsub'"
    assert list(work.iterdir()) == []


def test_the_umask_holds_and_links_are_not_followed(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = work / "speechdp-x.sbatch"
    other = tmp_path / "other"
    other.write_text("mine", encoding="utf-8")
    (work / f".{script.name}.guessed.tmp").symlink_to(other)
    with monkeypatch.context() as guessed:
        guessed.setattr(secrets, "token_hex", lambda _: "guessed")
        with pytest.raises(ConfigError, match="the script cannot be written"):
            write_script(script, "text")
    former = os.umask(0o077)
    try:
        write_script(script, "text")
    finally:
        os.umask(former)
    assert other.read_text(encoding="utf-8") == "mine"
    assert stat.S_IMODE(script.stat().st_mode) == 0o600


def failure(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 1) -> str:
    assert run(["submit", *words]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("speechdp: ") and captured.err.count("\n") == 1
    return captured.err


def test_what_the_batch_system_says_is_shown(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*RESOURCES, "--scheduler", "slurm", "--", "train", "D", "R"]
    install(tmp_path, "sbatch", "sbatch: error: Invalid account\nBatch job submission failed", 1)
    said = failure(words, capsys)
    assert f"sbatch refused {work}/speechdp-R.sbatch with exit code 1" in said
    assert "Invalid account Batch job submission failed" in said
    install(tmp_path, "sbatch", "thank you")
    assert "printed no job id; it says: thank you" in failure(words, capsys)


@pytest.mark.parametrize(
    ("scheduler", "name", "signs"),
    [("slurm", "100%j", "%"), ("slurm", "a\\b%", r"% and \\"), ("sge", "my $HOME", r"\$")],
)
def test_folders_a_batch_system_would_not_find(scheduler: Scheduler, name: str, signs: str) -> None:
    with pytest.raises(ConfigError, match=f"{scheduler} replaces {signs} in the path of a job's folder"):
        plan_submission(scheduler, "x", Path("/work") / name, ())


def test_a_missing_program(work: Path, tmp_path: Path) -> None:
    submission = plan_submission("slurm", "x", work, ())
    with pytest.raises(ConfigError, match=r"sbatch is not on PATH; .*--dry-run"):
        submit(submission, str(tmp_path / "bin"))


@pytest.mark.parametrize(
    ("programs", "environ", "wanted"),
    [
        (["sbatch", "qsub", "qconf"], {}, "slurm"),
        (["bsub", "qsub"], {}, "lsf"),
        (["qsub", "qconf", "pbsnodes"], {}, "sge"),
        (["qsub", "pbsnodes"], {"SGE_ROOT": "/old"}, "pbs"),
        (["qsub"], {"SGE_ROOT": "/sge"}, "sge"),
    ],
)
def test_the_scheduler_is_found_by_its_programs(
    programs: list[str], environ: dict[str, str], wanted: str, work: Path, tmp_path: Path
) -> None:
    for program in programs:
        install(tmp_path, program, "")
    scheduler, because = detect_scheduler(str(tmp_path / "bin"), environ)
    assert scheduler == wanted
    assert "is on PATH" in because or "are on PATH" in because


def test_no_scheduler_and_a_doubtful_one(work: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"neither sbatch, bsub nor qsub .*--dry-run"):
        detect_scheduler(str(tmp_path / "bin"), {})
    install(tmp_path, "qsub", "")
    with pytest.raises(ConfigError, match="give --scheduler pbs or sge"):
        detect_scheduler(str(tmp_path / "bin"), {})


def test_who_only_looks_is_asked_for_which_batch_system(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    said = failure([*RESOURCES, "--dry-run", "--", "train", "D", "R"], capsys)
    assert said.endswith(
        "is on PATH; name the one that the script is for: --scheduler slurm, lsf, pbs or sge\n"
    )


def test_a_script_counts_its_nodes_and_ranks(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = ["--nodes", "1", "--ranks-per-node", "1", "--time", "1:00:00", "--scheduler", "slurm", "--dry-run"]
    assert run(["submit", *one, "--", "train", "D", "R"]) == 0
    assert "# Written by speechdp submit: 1 node, 1 rank on each.\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "nothing to submit"),
        (["launch", "-np", "2", "--", "train", "D", "R"], 2, "not launch"),
        (["submit"], 2, "not submit"),
        (["train", "--seed", "1", "D", "R"], 2, "folders right after the subcommand"),
        (["train", "D", "R", "--overwrite"], 1, "--overwrite in a batch job would delete"),
        (["train", "D", ""], 2, "the argument after 'D' is empty"),
        (["train", "D", "R", "--pause-at", "100"], 1, "--pause-at ends the job with exit code 75"),
        (
            ["prepare", "C", "D"],
            1,
            "prepare is a single process: 8 copies would interfere with one another; run ",
        ),
        (["posteriors", "R", "D", "-o", "o"], 1, "posteriors is a single process: 8 copies"),
        (["python", "-m", "speechdp", "train", "D", "R"], 2, "after --: ... -- train DATA RUN"),
    ],
)
def test_a_command_that_cannot_work_is_not_submitted(
    words: list[str], code: int, said: str, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in failure([*RESOURCES, "--scheduler", "slurm", "--", *words], capsys, code)
    assert list(work.iterdir()) == []


def test_an_unknown_command_is_not_submitted(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        run(["submit", *RESOURCES, "--scheduler", "slurm", "--", "trian", "D", "R"])
    said = capsys.readouterr().err
    assert "unknown command 'trian'" in said and "write python before it: -- python SCRIPT" in said
    assert list(work.iterdir()) == []


@pytest.mark.parametrize("name", ["launch", "submit"])
def test_two_dashes_are_asked_for(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = RESOURCES if name == "submit" else ["-np", "2"]
    assert run([name, *options, "train", "D", "R", "--epochs", "1"]) == 2
    said = capsys.readouterr().err
    assert said == f"speechdp: {name}: write -- before the command: ... -- train ...\n"


def test_options_that_launch_takes_are_submitted(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--scheduler", "slurm", "--dry-run", "--max-restarts", "1", "--", "train", "D", "R"]
    for options in ("--launcher srun --min-ranks 8", "-np 3 --min-ranks 3", "--hostfile F --min-ranks 20"):
        assert run(["submit", *RESOURCES, f"--launch-args={options}", *command]) == 0
        assert f" --max-restarts 1 {options} -- train D R" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "outlives_node"),
    [
        (["--max-restarts", "1", "--launch-args=--min-ranks 4"], True),
        (["--max-restarts", "1", "--launch-args=-np 4"], True),  # a node is spare
        (["--launch-args=--max-restarts 2 --min-ranks 1"], True),
        # It could not be started again on one node: Slurm is to end it, and to start it on others.
        (["--max-restarts", "1"], False),
        (["--max-restarts", "1", "--launch-args=--min-ranks 5"], False),
        (["--launch-args=-np 4"], False),
    ],
)
def test_slurm_leaves_a_job_that_goes_on_without_a_node(
    options: list[str], outlives_node: bool, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--scheduler", "slurm", "--dry-run", *options, "--", "train", "D", "R"]
    assert run(["submit", *RESOURCES, *command]) == 0
    assert ("#SBATCH --no-kill\n" in capsys.readouterr().out) == outlives_node


def test_only_what_can_go_on_is_submitted_with_restarts(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*RESOURCES, "--scheduler", "slurm", "--max-restarts", "1", "--", "decode", "R", "D"]
    assert "only train, sweep and Python scripts can be restarted" in failure(words, capsys)


def test_an_output_file_that_nobody_could_write_is_refused(
    work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "sbatch", "7")
    words = [*RESOURCES, "--scheduler", "slurm", "--output", "logs/%j.out", "--", "train", "D", "R"]
    said = f"--output logs/%j.out: there is no folder {work}/logs; make it first\n"
    assert failure(words, capsys).endswith(said)
    inner = [word.replace("logs/%j.out", "logs-%j/out") for word in words]
    assert failure(inner, capsys).endswith("put %j into the file's name instead\n")
    assert list(work.iterdir()) == []
    (work / "logs").mkdir()
    assert run(["submit", *words]) == 0
    assert f"output: {work}/logs/7.out\n" in capsys.readouterr().out


def test_an_edited_script_is_kept(work: Path) -> None:
    script = work / "speechdp-x.sbatch"
    assert write_script(script, "one") is None
    assert write_script(script, "one") is None
    script.write_text("edited", encoding="utf-8")
    kept = write_script(script, "two")
    assert kept is not None and kept.read_text(encoding="utf-8") == "edited"
    assert script.read_text(encoding="utf-8") == "two"


def test_data_that_is_not_there_is_told(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["submit", *RESOURCES, "--scheduler", "slurm", "--dry-run", "--", "train", "D", "R"]
    assert run(command) == 0
    assert "warning: D/data.json is not there (yet)" in capsys.readouterr().err
    (work / "D").mkdir()
    (work / "D" / "data.json").touch()
    assert run(command) == 0
    assert "warning" not in capsys.readouterr().err


def test_a_script_is_submitted_as_it_is(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, name in (
        (["runs/own.py", "--overwrite"], "own"),
        (["-m", "my.training", "--seed=1"], "my.training"),
    ):
        command = ["submit", *RESOURCES, "--scheduler", "slurm", "--dry-run", "--", "python3", *words]
        assert run(command) == 0
        said = capsys.readouterr().out
        assert f"#SBATCH --job-name={name}\n" in said
        assert f" launch --requeue --grace-s 45 -- python3 {' '.join(words)}\n" in said


def test_a_script_that_the_batch_system_starts_again_may_begin_anew(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "2"}
    for name, value in facts.items():
        monkeypatch.setenv(name, value)
    for restarts, options, is_told in (
        # What is in the folder at the first start is another job's, not to be cleared.
        ("", ["--requeue"], False),
        ("0", ["--requeue"], False),
        ("1", ["--requeue"], True),
        ("1", [], False),
    ):
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        assert run(["launch", *options, "--dry-run", "--", "python", "-m", "own"]) == 0
        assert ("SPEECHDP_RESUME=1" in capsys.readouterr().out) == is_told


def test_train_goes_on_when_it_is_started_again() -> None:
    assert check_command(["train", "D", "R"], requeue=True) == ("train", "D", "R", "--resume")
    for option in ("--resume", "--no-resume"):
        assert check_command(["train", "D", "R", option], requeue=True) == ("train", "D", "R", option)
    assert check_command(["sweep", "D", "O"], requeue=True) == ("sweep", "D", "O")
    assert check_command(["decode", "R", "--overwrite"], requeue=False) == ("decode", "R", "--overwrite")
    for command in ("compare", "tune", "profile"):
        with pytest.raises(
            ConfigError, match=f"^{command} starts its own jobs, but the script would start it"
        ):
            check_command([command, "D", "O"], requeue=False)
    for option in ("--overwrite", "--overwrite=True"):
        with pytest.raises(ConfigError, match="remove the folder"):
            check_command(["sweep", "D", "O", option], requeue=True)
    # A file that is written once more is none that anything goes on from.
    posteriors = ("posteriors", "R", "D", "-o", "o.ark", "--overwrite")
    assert check_command(posteriors, requeue=True) == posteriors


def test_a_script_that_pauses_is_not_submitted_to_be_requeued(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PAUSE, "evaluation:100")
    words = [*RESOURCES, "--scheduler", "slurm", "--dry-run"]
    assert f"{PAUSE}=evaluation:100 ends the job with exit" in failure([*words, "--", *SCRIPT], capsys)
    assert run(["submit", *words, "--no-requeue", "--", *SCRIPT]) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--time", "1h"], "--time '1h'"),
        (["--name", "a b"], "--name 'a b'"),
        (["--nodes", "0"], "--nodes 0"),
        (["--max-restarts", "-1"], "--max-restarts -1"),
        (["--scheduler-args", "'"], "--scheduler-args"),
        (["--launch-args", '"'], "--launch-args"),
        (["--partition", "a;b"], "--queue (--partition) 'a;b'"),
        # What launch would refuse hours later.
        (["--max-restarts", "1", "--launch-args=--min-ranks 9"], "--min-ranks 9: must be from 1 to"),
        (["--launch-args=--min-ranks 2"], "--min-ranks is the smallest number of ranks for a restart"),
        (["--launch-args=--controller gloo"], "--controller gloo belongs to --launcher horovodrun"),
        (["--launch-args=-np 9"], "--nodes 2 --ranks-per-node 4: 9 ranks wanted, but it has only 8 slots"),
        (["--launch-args=--grace-s -1"], "--grace-s -1"),
        (
            ["--scheduler", "pbs", "--launch-args=--launcher srun"],
            "--launcher srun works inside a Slurm job only; leave it out",
        ),
        (["--launch-args=--hostfile F --min-ranks 20"], "give --max-restarts as well"),
        (["--scheduler", "sge", "--cpus-per-rank", "4"], "--cpus-per-rank 4: Grid Engine counts slots"),
        (["--parallel-environment", "mpi"], "--parallel-environment mpi: is for Grid Engine only"),
    ],
)
def test_a_mistake_is_one_line(
    options: list[str], said: str, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*RESOURCES, "--scheduler", "slurm", *options, "--", "train", "D", "R"]
    assert said in failure(words, capsys)
    assert list(work.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["train", "D", "R", "--strategy", "adaptive_averaging:growth=0.5"], "growth=0.5: must be "),
        (["train", "D", "R", "--strategy", "model_averaging:perod=4"], "perod"),
        (["sweep", "D", "O", "--reference", "bmuf:period=0"], "bmuf:period: '0' is not a period"),
        (["sweep", "D", "O", "--swept", "model_averaging:period=4"], "--periods sets the period"),
    ],
)
def test_options_of_a_strategy_are_checked_before_the_queue(
    command: list[str], said: str, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in failure([*RESOURCES, "--scheduler", "slurm", "--", *command], capsys)
    assert list(work.iterdir()) == []


def test_a_batch_system_is_in_every_place() -> None:
    names = set(typing.get_args(Scheduler))
    repository = Path(__file__).resolve().parents[3]
    places = {
        "SYSTEMS of speechdp/launching/batch_script.py": set(SYSTEMS),
        "_SYSTEMS of speechdp/ownership/batch_job.py": {name for _, name, *_ in batch_job._SYSTEMS},
        "speechdp/launching/templates, and the same in launch/": {
            name for name, system in SYSTEMS.items() if (repository / "launch" / system.template).is_file()
        },
    }
    different = {place: names ^ there for place, there in places.items() if names != there}
    assert not different, f"other batch systems than Scheduler of launching/allocation.py has: {different}"
