"""Notes on a machine that readers of a profile's figures need, one line each."""

from __future__ import annotations

from speechdp.counting import counted
from speechdp.errors import ConfigError
from speechdp.experiments.profile.plan import ProfilePlan
from speechdp.launching.cores import available_cores
from speechdp.options.run import TrainOptions


def notes_on(plan: ProfilePlan, options: TrainOptions, *, on_this_machine: bool) -> list[str]:
    """Return cautions about ranks, cores and GPUs of this machine; nothing is known of other hosts.

    Raises:
        ConfigError: a GPU was requested but there is none.
    """
    if not on_this_machine:
        return []
    return _about_gpus(options.device, max(plan.ranks)) + about_cores(plan.ranks, available_cores())


def about_cores(ranks: tuple[int, ...], cores: int) -> list[str]:
    """Return cautions about more ranks than cores."""
    more = [str(number) for number in sorted(ranks) if number > cores]
    if not more:
        return []
    return [
        f"this machine has {counted(cores, 'core')}: with {' and '.join(more)} ranks they take turns, and "
        "times there say nothing about as many machines or GPUs"
    ]


def _about_gpus(device: str, most_ranks: int) -> list[str]:
    from speechdp.comm.device import ranks_on_gpus  # noqa: PLC0415 - torch, for which --help must not wait

    room = ranks_on_gpus(device)
    if device == "cpu":
        return []
    if room == 0:
        return ["torch sees no GPU: everything is computed, and timed, on the CPU"]
    if most_ranks > room:
        raise ConfigError(
            f"--ranks {most_ranks}: the GPUs that torch sees here have room for {counted(room, 'rank')}; "
            f"give at most {room}, a --hostfile, or --device cpu"
        )
    return []
