"""`speechdp launch --max-restarts` over several nodes: the model is that of an undisturbed run."""

from __future__ import annotations

import json
from pathlib import Path

from speechdp.data.shards.dataset import Dataset
from tests.cluster.lab import Lab
from tests.cluster.training import (
    LONG,
    NUM_EPOCHS,
    Training,
    assert_nothing_left,
    assert_same_model,
    on_one_node,
)
from tests.helpers.gates import Gates
from tests.helpers.jobs import our_lines
from tests.helpers.mpi import Ended

#: Of some 200 steps, the one at which a job waits for its rank or node to be killed.
GATE = 70


def assert_started_again(ended: Ended, run: Path, reason: str, where: str) -> None:
    """Check that the job has ended well after one more start, and said why and where."""
    assert ended.exit_code == 0, ended.output
    assert (run / "completed.json").exists()
    fault, start = our_lines(ended)
    assert fault.startswith(f"speechdp launch: {reason}"), fault
    assert f"; last checkpoint: {run}/checkpoints/step-" in fault, fault
    assert start == f"speechdp launch: start 2 of 3: {where}", start


def test_a_killed_rank(lab: Lab, dataset: Dataset) -> None:
    run, gates = lab.folder / "killed-rank", Gates(lab.folder / "gates-killed-rank", GATE)
    again = ("--max-restarts", "2")
    with Training(lab, dataset, ("n1", "n2", "n3"), launch=again, train=LONG).begun(run, gates) as job:
        job.kill_rank(1)
        gates.open()
        ended = job.finish()
    assert_started_again(ended, run, "rank 1 on n2 was killed", "3 ranks on n1 (1), n2 (1), n3 (1)")
    assert_same_model(run, on_one_node(lab, dataset, 3, LONG))


def test_a_dead_node_is_left_out_where_others_have_room(lab: Lab, dataset: Dataset) -> None:
    run, gates = lab.folder / "killed-node", Gates(lab.folder / "gates-killed-node", GATE)
    again = ("-np", "3", "--max-restarts", "2")
    with Training(lab, dataset, slots=2, launch=again, train=LONG).begun(run, gates) as job:
        lab.kill_node("n2")
        gates.open()
        ended = job.finish()
        assert_nothing_left(lab, ["n1", "n3"])
    assert_started_again(ended, run, "host n2 was lost", "3 ranks on n1 (2), n3 (1); without n2")
    assert_same_model(run, on_one_node(lab, dataset, 3, LONG))


def test_with_fewer_ranks_where_they_have_not(lab: Lab, dataset: Dataset) -> None:
    run, gates = lab.folder / "fewer-ranks", Gates(lab.folder / "gates-fewer-ranks", GATE)
    again = ("--max-restarts", "2", "--min-ranks", "2")
    with Training(lab, dataset, launch=again, train=LONG).begun(run, gates) as job:
        lab.kill_node("n3")
        gates.open()
        ended = job.finish()
    assert_started_again(ended, run, "host n3 was lost", "2 ranks on n1 (1), n2 (1); without n3")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [round(line["epoch"]) for line in lines] == list(range(1, NUM_EPOCHS + 1))


def test_too_few_slots_are_left(lab: Lab, dataset: Dataset) -> None:
    run, gates = lab.folder / "too-few", Gates(lab.folder / "gates-too-few", GATE)
    again = ("--max-restarts", "2")
    with Training(lab, dataset, ("n1", "n2"), launch=again, train=LONG).begun(run, gates) as job:
        lab.kill_node("n2")
        gates.open()
        ended = job.finish()
    assert ended.exit_code != 0, ended.output
    fault, refusal = our_lines(ended)
    assert fault.startswith("speechdp launch: host n2 was lost"), fault
    assert "2 ranks need as many slots, but the hosts that respond have 1 (no response: n2)" in refusal, (
        refusal
    )
