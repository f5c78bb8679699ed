"""Which subcommands may be started on ranks: those that divide their work among them."""

from __future__ import annotations

from collections.abc import Sequence

from speechdp.errors import ConfigError, UsageError

#: Commands that divide their work among the ranks they are started on.
OVER_RANKS = ("train", "sweep", "decode")
#: Commands that start ranks themselves.
STARTS_JOBS = ("compare", "tune", "profile")
#: By it their ranks are told, in one word with its value, what they are ranks of.
_JOB_OPTION = "--job="


def check_ranks(command: Sequence[str], num_ranks: int) -> None:
    """Refuse to start a subcommand on ranks of which it would know nothing.

    Args:
        command: subcommand and its arguments, no script.
        num_ranks: that are to be started.

    Raises:
        UsageError: each would start ranks.
        ConfigError: the ranks would all do the same and write the same files.
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
