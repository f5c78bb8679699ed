"""What a batch job may be called and ask for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from speechdp.errors import ConfigError
from speechdp.launching.batch_script import BatchJob, Placement, Resources, job_name

PLACEMENT = Placement("night-run", queue="gpu", account="speech", output="logs/%j.txt")
RESOURCES = Resources(nodes=3, ranks_per_node=4, time="1:00:00", gpus_per_rank=2, cpus_per_rank=6)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"name": "x; id"}, "--name"),
        ({"name": "x\n#SBATCH --wrap"}, "--name"),
        ({"name": "x\n"}, "--name"),
        ({"name": "1x"}, "--name"),
        ({"name": "-x"}, "--name"),
        ({"name": ""}, "--name"),
        ({"queue": "a b"}, "--queue"),
        ({"queue": "$(id)"}, "--queue"),
        ({"account": 'a"'}, "--account"),
        ({"output": "a b"}, "--output"),
        ({"output": "-a"}, "--output"),
        ({"output": "%u"}, "--output"),
        ({"output": "a\n"}, "--output"),
        ({"parallel_environment": "orte 4"}, "--parallel-environment"),
    ],
)
def test_what_stands_on_directive_lines_is_plain(changed: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said} "):
        replace(PLACEMENT, **changed)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("0:00:01", 1), ("12:34:56", 45_296), ("168:00:00", 604_800), ("7-00:30:00", 606_600)],
)
def test_times(time: str, seconds: int) -> None:
    assert Resources(1, 1, time).time_s == seconds


@pytest.mark.parametrize(
    "time",
    [
        "",
        "1",
        "60",
        "1:00",
        "1:60:00",
        "1:00:60",
        "-1:00:00",
        "1-",
        "1-1:00",
        "1:00:00\n",
        "٣:00:00",
        "0:00:00",
    ],
)
def test_times_that_are_none(time: str) -> None:
    with pytest.raises(ConfigError, match=r"^--time "):
        Resources(1, 1, time)


def test_numbers_have_limits() -> None:
    for changed in ({"nodes": 0}, {"ranks_per_node": 0}, {"gpus_per_rank": -1}, {"cpus_per_rank": 0}):
        with pytest.raises(ConfigError, match="^--" + next(iter(changed)).replace("_", "-")):
            replace(RESOURCES, **changed)
    with pytest.raises(ConfigError, match="--signal-s 3600 is not less than --time 1:00:00"):
        BatchJob(RESOURCES, PLACEMENT, Path("/v/python"), Path("/"), ("train", "D", "R"), signal_s=3600)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("first", "first"),
        ("2026-11", "run-2026-11"),
        ("a b;c", "a-b-c"),
        ("語", "run"),
        ("", "run"),
        ("x" * 99, "x" * 40),
    ],
)
def test_a_folders_name_becomes_a_jobs(text: str, name: str) -> None:
    assert job_name(text) == name
    Placement(job_name(text))


@pytest.mark.parametrize(("signal_s", "grace_s"), [(1, "5"), (19, "5"), (21, "6"), (600, "585")])
def test_ranks_may_save_for_nearly_as_long_as_they_are_warned_ahead(signal_s: int, grace_s: str) -> None:
    job = BatchJob(RESOURCES, PLACEMENT, Path("/v/python"), Path("/"), ("train", "D", "R"), signal_s=signal_s)
    assert job.launch_words == ("--requeue", "--grace-s", grace_s)
    # Of two the last counts: the user's.
    job = replace(job, requeue=False, launch_options=("--grace-s", "9"))
    assert job.launch_words == ("--grace-s", grace_s, "--grace-s", "9")
