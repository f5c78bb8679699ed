"""--tolerate-loss: continue when a rank is lost, and refuse before step 1 jobs that could not."""

from __future__ import annotations

from speechdp import remedies
from speechdp.comm.base import Communicator
from speechdp.counting import counted
from speechdp.errors import ConfigError, RunError
from speechdp.options.run import TrainOptions
from speechdp.train.session import Session


def check_tolerance(session: Session, options: TrainOptions) -> None:
    """Refuse --tolerate-loss if the strategy, back-end or MPI cannot do it.  Raises ConfigError."""
    if not options.faults.tolerate_loss:
        return
    if not options.strategy.parsed.traits.survives_loss:
        raise ConfigError(
            f"--tolerate-loss: {options.strategy} waits for every rank in its exchanges; choose --strategy "
            "ad_psgd (without groups), or use speechdp launch --max-restarts instead"
        )
    if session.feeders is not None:
        raise ConfigError(
            "--tolerate-loss: training waits for every feeder; leave out --feeders or --tolerate-loss"
        )
    session.comm.check_loss_tolerance()


def begin_tolerating(session: Session, options: TrainOptions) -> None:
    """Let the ranks continue without lost ones, if that was requested.  Collective.

    Raises:
        RunError: as for `require_all_ranks`.
    """
    if options.faults.tolerate_loss:
        session.comm.tolerate_loss()
        require_all_ranks(session.comm)


def require_all_ranks(comm: Communicator) -> None:
    """Refuse to continue if a rank is lost, e.g. in an earlier run of this process.

    Work that is divided among all ranks would lack that rank's part, even if the rank had done it.

    Raises:
        RunError: a rank is lost, as agreed in the last collective; raised on all remaining ranks.
    """
    if lost := lost_ranks(comm):
        raise RunError(
            f"rank {lost[0]} is gone, but a run needs all its ranks to start; {remedies.resuming()}"
        )


def lost_ranks(comm: Communicator) -> list[int]:
    """Return the ranks that are lost, as agreed in the last collective."""
    return sorted(set(range(comm.size)) - set(comm.alive))


def loss_notice(session: Session, rank: int) -> str:
    """Return the line for the user about the loss of `rank`."""
    hosts = session.facts.get("hosts", [])
    where = f" on {hosts[rank]}" if rank < len(hosts) else ""
    num_left = session.comm.size - len(session.comm.gone | {rank})
    return f"rank {rank}{where} is gone; continuing with {counted(num_left, 'rank')}"
