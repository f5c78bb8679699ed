"""Which subcommands may be started on ranks: those that divide their work among them."""

from __future__ import annotations

from collections.abc import Sequence

from speechdp.errors import ConfigError, UsageError

#: Commands that divide their work among the ranks they are started on.
OVER_RANKS = ("train", "sweep", "decode")
#: Commands that start ranks themselves.
STARTS_JOBS = ("compare", "tune", "profile")
#: Option by which the ranks of such a command learn what they are ranks of; one word with its value.
_JOB_OPTION = "--job="


def check_ranks(command: Sequence[str], num_ranks: int) -> None:
    """Refuse to start a subcommand on ranks if it does not divide its work among ranks.

    Args:
        command: subcommand and its arguments; not a script.
        num_ranks: number of ranks to be started.

    Raises:
        UsageError: every rank would start ranks.
        ConfigError: all ranks would do the same and write the same files.
    """
    name = command[0]
    if name in STARTS_JOBS:
        if not any(word.startswith(_JOB_OPTION) for word in command):
            raise UsageError(f"{name} starts its own jobs: give the command without launch")
    elif name not in OVER_RANKS and num_ranks > 1:
        raise ConfigError(
            f"{name} is a single process: {num_ranks} copies would interfere with one another; run it "
            "without launch, or with -np 1 (in a batch job: --nodes 1 --ranks-per-node 1)"
        )
