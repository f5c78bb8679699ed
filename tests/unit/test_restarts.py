"""Whether a job is started again, over which hosts, with which command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from speechdp.errors import ConfigError
from speechdp.launching.hostfile import Host, Hostfile
from speechdp.launching.launcher_output import Fault
from speechdp.launching.outcome import Target
from speechdp.launching.restarts import RestartPolicy, Restarts, find_reachable, going_on
from speechdp.launching.supervise import JobEnd

HOSTS = (Host("n1", 2), Host("n2", 2), Host("n3", 2))
KILLED = JobEnd(137, None, (Fault("killed", 2, "n2", signal=9),))


def restarts(
    folder: Path, num_ranks: int = 4, policy: RestartPolicy | None = None, gone: Sequence[str] = ()
) -> Restarts:
    def reachable(hosts: Sequence[Host]) -> list[Host]:
        return [host for host in hosts if host.name not in gone]

    result = Restarts(
        policy or RestartPolicy(2), Hostfile("F", HOSTS), num_ranks, Target("train", folder, None), reachable
    )
    result.begin()
    return result


def save(folder: Path, step: int) -> None:
    (folder / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)


def test_a_killed_rank_is_started_again_on_the_same_hosts(tmp_path: Path) -> None:
    job = restarts(tmp_path)
    assert job.why_not(KILLED, 137) is None
    assert job.next_hosts(KILLED.faults) == (Host("n1", 2), Host("n2", 2))


def test_hosts_that_do_not_answer_are_left_out(tmp_path: Path) -> None:
    job = restarts(tmp_path, gone=["n2"])
    assert job.next_hosts([Fault("host lost", host="n2")]) == (Host("n1", 2), Host("n3", 2))


def test_a_host_on_which_ranks_died_twice_is_left_out_where_others_have_room(tmp_path: Path) -> None:
    job = restarts(tmp_path, policy=RestartPolicy(5))
    assert job.next_hosts(KILLED.faults)[1].name == "n2"
    assert [host.name for host in job.next_hosts(KILLED.faults)] == ["n1", "n3"]
    crowded = restarts(tmp_path, num_ranks=6, policy=RestartPolicy(5))
    crowded.next_hosts(KILLED.faults)
    assert len(crowded.next_hosts(KILLED.faults)) == 3


def test_too_few_hosts_end_it_unless_fewer_ranks_will_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"6 ranks need .* hosts that answer have 4 \(no answer: n3\)"):
        restarts(tmp_path, num_ranks=6, gone=["n3"]).next_hosts([])
    fewer = restarts(tmp_path, num_ranks=6, policy=RestartPolicy(1, min_ranks=3), gone=["n3"])
    assert fewer.next_hosts([]) == HOSTS[:2]


def test_what_would_fail_again_is_not_started_again(tmp_path: Path) -> None:
    job = restarts(tmp_path)
    refused = JobEnd(1, None, (Fault("said", 0, "n1"),))
    assert "it would fail in the same way" in str(job.why_not(refused, 1))
    save(tmp_path, 10)  # it had gone on: the disk may have been full for a while
    assert job.why_not(refused, 1) is None
    assert job.why_not(JobEnd(0, None), 1) is None  # Open MPI 5 after the loss of a host
    assert job.why_not(JobEnd(2, None), 2) == ""
    assert job.why_not(JobEnd(143, 15), 143) == ""
    assert job.why_not(JobEnd(0, None), 0) == ""


def test_restarts_are_counted(tmp_path: Path) -> None:
    job = restarts(tmp_path, policy=RestartPolicy(1))
    job.next_hosts([])
    assert "--max-restarts 1 are used up" in str(job.why_not(KILLED, 137))
    assert restarts(tmp_path, policy=RestartPolicy()).why_not(KILLED, 137) == ""


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    train = Target("train", tmp_path, None)
    for policy, target, said in (
        (RestartPolicy(-1), train, "at least 0"),
        (RestartPolicy(1), None, "only train and sweep"),
        (RestartPolicy(1, min_ranks=5), train, "from 1 to the number of ranks, 4"),
        (RestartPolicy(0, min_ranks=2), train, "give --max-restarts as well"),
    ):
        with pytest.raises(ConfigError, match=said):
            policy.check(4, target)
    RestartPolicy(1, min_ranks=4).check(4, train)


def test_the_same_run_goes_on() -> None:
    assert going_on(["train", "D", "R", "--overwrite"]) == ("train", "D", "R", "--resume")
    assert going_on(["train", "D", "R", "--resume"]) == ("train", "D", "R", "--resume")
    assert going_on(["sweep", "D", "O", "--overwrite"]) == ("sweep", "D", "O")


def test_hosts_are_tried_by_starting_a_process_there(tmp_path: Path) -> None:
    def probe(host: Host) -> list[str]:
        return [sys.executable, "-c", f"raise SystemExit({int(host.name == 'n2')})"]

    found = find_reachable([Host("localhost", 1), *HOSTS], probe, {})
    assert [host.name for host in found] == ["localhost", "n1", "n3"]
