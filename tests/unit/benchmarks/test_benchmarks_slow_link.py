"""The nodes' scripts, the steps that are timed, and the ratios of the slow-link benchmark."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.comm import slow_link
from benchmarks.comm.namespaces import Nodes, agent_script, hosts_file
from benchmarks.comm.slow_link_plot import Result, draw, family

RESULTS = [
    Result("free", "no exchange", "model_averaging:period=1000000", "mpi", 1_000_000, 100.0),
    Result("free", "gradient_averaging", "gradient_averaging", "mpi", None, 50.0),
    Result("free", "gradient_averaging on torch", "gradient_averaging", "torch", None, 40.0),
    Result("free", "model_averaging_4", "model_averaging:period=4", "mpi", 4, 75.0),
    Result("1gbit", "gradient_averaging", "gradient_averaging", "mpi", None, 10.0),
    Result("1gbit", "gradient_averaging on torch", "gradient_averaging", "torch", None, 20.0),
    Result("1gbit", "model_averaging_4", "model_averaging:period=4", "mpi", 4, 50.0),
]


def test_the_agent_runs_what_mpirun_hands_over_as_ssh_would(tmp_path: Path) -> None:
    # Stand-ins for what needs root; `ip netns exec NAME command...` and `unshare --uts command...`.
    tools = {
        "ip": 'echo "in $3"; shift 3; exec "$@"',
        "unshare": 'shift; exec "$@"',
        "hostname": 'echo "as $1"',
    }
    for name, script in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    agent = tmp_path / "agent"
    agent.write_text(agent_script("p"))
    agent.chmod(0o755)
    command = [str(agent), "n2", "X=1 ; export X ;", 'echo "$X a  b"', "'c  d'"]
    done = subprocess.run(
        command, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "in pn2\nas n2\n1 a  b c  d\n"


def test_mpirun_starts_one_rank_on_every_node_from_the_first() -> None:
    argv = Nodes(3).mpirun(["python", "a b.py", "--name", "x y"])
    assert argv[1] == "n1"
    inner = shlex.split(argv[2])
    assert inner[inner.index("--host") + 1] == "n1:1,n2:1,n3:1"
    assert inner[inner.index("-n") + 1] == "3"
    assert inner[-4:] == ["python", "a b.py", "--name", "x y"]


def test_every_node_knows_all_by_name() -> None:
    assert hosts_file(["n1", "n2"]).splitlines() == ["127.0.0.1 localhost", "10.78.0.1 n1", "10.78.0.2 n2"]


@pytest.mark.parametrize(
    ("period", "steps"), [(None, 8), (1, 8), (3, 9), (4, 8), (16, 16), (64, 64), (1_000_000, 8)]
)
def test_whole_periods_are_timed(period: int | None, steps: int) -> None:
    assert slow_link.num_steps(period) == steps


def test_ratios_are_over_the_fastest_gradient_averaging_at_the_same_rate() -> None:
    assert slow_link.compare(RESULTS) == {
        "no_exchange_vs_gradient_free": 2.0,
        "model_averaging_4_vs_gradient_free": 1.5,
        "model_averaging_4_vs_gradient_1g": 2.5,
    }


def test_compressed_averages_are_held_against_none_and_full_precision_where_those_are_measured() -> None:
    in_int8 = Result(
        "1gbit", "model_averaging_16_int8", "model_averaging:period=16,compression=int8", "mpi", 16, 60.0
    )
    alone = Result("1gbit", "no exchange", "model_averaging:period=1000000", "mpi", 1_000_000, 80.0)
    in_full = Result("100mbit", "model_averaging_16", "model_averaging:period=16", "mpi", 16, 20.0)
    slower = replace(in_int8, rate="100mbit", frames_per_s=50.0)
    ratios = slow_link.compare_compressed([*RESULTS, alone, in_int8, in_full, slower])
    assert ratios == {"int8_vs_none_1g": 0.75, "int8_vs_fp32_100m": 2.5}
    assert family(in_int8) == "model_averaging int8"


def test_averages_in_two_levels_are_held_against_those_in_one() -> None:
    one = Result("1gbit", "model_averaging_16", "model_averaging:period=16", "mpi", 16, 20.0)
    two = replace(
        one,
        name="model_averaging_16_nodes_64",
        strategy=f"{one.strategy},between_nodes=64",
        frames_per_s=30.0,
    )
    rounded, rounded_two = (replace(r, name=f"{r.name}_int8", frames_per_s=40.0) for r in (one, two))
    assert slow_link.compare_levels([*RESULTS, one, two, rounded, rounded_two]) == {
        "model_averaging_16_nodes_64_vs_model_averaging_16_1g": 1.5,
        "model_averaging_16_nodes_64_int8_vs_model_averaging_16_int8_1g": 1.0,
    }
    assert family(two) == "model_averaging between nodes"
    assert [c.cycle for c in slow_link.IN_TWO_LEVELS] == [16, 64, 64, 16]


def test_the_last_line_has_the_keys_that_are_held_against_bounds() -> None:
    """Of the contenders and rates that a run without options measures."""
    every = [
        Result(rate, c.name, c.strategy, c.backend, c.cycle, 1.0)
        for rate in slow_link.parse([]).rates
        for c in slow_link.CONTENDERS
    ]
    found = slow_link.ratios(every)
    keys = {"int8_vs_none_1g", "dpsgd_vs_gradient_1g", "dpsgd_int8_vs_gradient_1g", "int8_vs_fp32_100m"}
    assert keys <= found.keys()
    assert keys <= set(re.findall(r"\w+", slow_link.__doc__ or ""))


def test_contenders_of_one_colour_share_strategy_and_back_end() -> None:
    assert [family(r) for r in RESULTS[:4]] == [
        "no exchange",
        "gradient_averaging",
        "gradient_averaging on torch",
        "model_averaging",
    ]


def test_results_are_written_and_drawn(tmp_path: Path) -> None:
    slow_link.write_csv(RESULTS, tmp_path / "new" / "r.csv")
    draw(RESULTS, tmp_path / "new" / "r.png")
    rows = list(csv.DictReader((tmp_path / "new" / "r.csv").open()))
    assert len(rows) == len(RESULTS)
    assert rows[3] == {
        "rate": "free",
        "strategy": "model_averaging:period=4",
        "backend": "mpi",
        "period": "4",
        "frames_per_s": "75.0",
    }
    assert (tmp_path / "new" / "r.png").read_bytes().startswith(b"\x89PNG")
