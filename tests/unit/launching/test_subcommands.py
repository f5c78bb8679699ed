"""Which subcommands may be started on several ranks."""

from __future__ import annotations

import pytest

from speechdp.cli.main import run
from speechdp.cli.support.subcommands import SUBCOMMANDS
from speechdp.errors import ConfigError
from speechdp.launching.subcommands import OVER_RANKS, STARTS_JOBS, check_ranks


def test_only_what_divides_its_work_is_started_on_several_ranks() -> None:
    """The copies of another would write the same files, and end one another's."""
    assert {*OVER_RANKS, *STARTS_JOBS} <= set(SUBCOMMANDS) and not {*OVER_RANKS} & {*STARTS_JOBS}
    for name in OVER_RANKS:
        check_ranks([name], 4)
    for name in set(SUBCOMMANDS) - {*OVER_RANKS, *STARTS_JOBS}:
        check_ranks([name], 1)
        with pytest.raises(
            ConfigError, match=f"^{name} is a single process: 4 copies .* run it without launch"
        ):
            check_ranks([name], 4)


@pytest.mark.parametrize("name", STARTS_JOBS)
def test_what_starts_ranks_is_not_started_on_ranks(name: str) -> None:
    for num_ranks in (1, 4):
        with pytest.raises(ConfigError, match=f"^{name} starts its own jobs: .* without launch"):
            check_ranks([name, "D", "O"], num_ranks)
        check_ranks([name, "D", "O", "--job=race-4"], num_ranks)  # a job that it has started


def test_launch_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", "-np", "2", "--dry-run", "--", "inspect", "D"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(
        "speechdp: inspect is a single process: 2 copies would interfere with one another"
    )
    assert run(["launch", "-np", "1", "--dry-run", "--", "inspect", "D"]) == 0
