"""`speechdp simulate RUN`: predict the time of the same training on another cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from speechdp.errors import ConfigError
from speechdp.options.shown import shown

if TYPE_CHECKING:
    from speechdp.parallel.registry import StrategyChoice
    from speechdp.simulation.simulate import GivenLink, Request


@dataclass(frozen=True)
class SimulateCommand:
    """Predict frames/s, efficiency and cost of strategies and periods on a cluster, from measured steps.

    speechdp simulate RUN --ranks 8,16,...,1024 --ranks-per-node 8 --bandwidth 100gbit --latency 5us

    Only time is predicted, never accuracy."""

    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """Folder of a finished run, or of a sweep, comparison or profile.
    The page is written to its sub-folder `simulation`."""

    ranks: Annotated[str, shown("N,...")] = "8,16,...,1024"
    """Numbers of ranks to predict for.  Dots continue by the ratio of the two numbers before them."""
    ranks_per_node: Annotated[int | None, shown("N", "as measured")] = None
    """Ranks on each node, which share its link to the other nodes."""
    bandwidth: Annotated[str, shown("RATE", "as measured")] = ""
    """Bandwidth of a node's link to the others in each direction, e.g. 1gbit, 100gbit or 25GB/s.
    No message between nodes is faster than one inside a node (--intra-bandwidth)."""
    latency: Annotated[str, shown("TIME", "as measured")] = ""
    """Latency of a message between nodes, e.g. 5us."""
    intra_bandwidth: Annotated[str, shown("RATE", "as measured")] = ""
    """Bandwidth between two ranks of a node."""
    intra_latency: Annotated[str, shown("TIME", "as measured")] = ""
    """Latency of a message between two ranks of a node."""
    compute_speedup: float = 1.0
    """Factor by which ranks compute faster than measured.  Data loading stays as measured."""
    slow: Annotated[str, shown("RANK:FACTOR,...", "none")] = ""
    """Ranks whose own work takes FACTOR times as long as measured, e.g. 1:2 if rank 1 has half the speed.
    Ranks count from 0.  Predictions for fewer ranks ignore those that do not exist."""
    strategies: Annotated[str, shown("STRATEGY,...", "all")] = ""
    """Strategies to predict, with options as in --strategy; docs/strategies.md lists them.
    Each is predicted with all --periods, unless it has a period of its own."""
    periods: Annotated[str, shown("STEPS,...")] = "1,4,16,64"
    """Averaging periods to predict, in steps."""
    allreduce: Annotated[
        Literal["auto", "ring", "tree", "hierarchical"] | None,
        shown("{auto,ring,tree,hierarchical}", "ring on CPUs, auto on GPUs"),
    ] = None
    """How all ranks sum a vector.  auto: the fastest of the three."""
    target_frames: Annotated[str, shown("FRAMES", "as many as the run trained on")] = ""
    """Number of frames to train on, for the cost in GPU-hours, e.g. 1e9 or 600mf."""

    def run(self) -> int:
        """Predict, print the table, write the page."""
        from speechdp.cli.report import show_report  # noqa: PLC0415 (keeps `speechdp --help` fast)
        from speechdp.report.simulation.report import write_simulation  # noqa: PLC0415
        from speechdp.simulation.measured import read_measured  # noqa: PLC0415
        from speechdp.simulation.quantities import frame_count  # noqa: PLC0415
        from speechdp.simulation.simulate import simulate  # noqa: PLC0415

        request = self._request()
        frames = frame_count("--target-frames", self.target_frames) if self.target_frames else None
        measured = read_measured(self.out)
        simulation = simulate(measured.runs, request, measured.notes)
        show_report(write_simulation(self.out, simulation, frames))
        return 0

    def _request(self) -> Request:
        from speechdp.simulation.quantities import (  # noqa: PLC0415
            MOST_FACTOR,
            MOST_RANKS,
            MOST_STEPS,
            numbers,
            slow_ranks,
        )
        from speechdp.simulation.simulate import Request  # noqa: PLC0415

        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ConfigError(f"--ranks-per-node {self.ranks_per_node}: at least 1")
        if not 1 / MOST_FACTOR < self.compute_speedup < MOST_FACTOR:
            raise ConfigError(
                f"--compute-speedup {self.compute_speedup:g}: must be above {1 / MOST_FACTOR:g} and below a "
                "million, e.g. 20"
            )
        ranks = numbers("--ranks", self.ranks, MOST_RANKS)
        factors = slow_ranks("--slow", self.slow)
        if max(factors, default=0) >= max(ranks):
            raise ConfigError(
                f"--slow {self.slow}: there is no rank {max(factors)} among {max(ranks):,}; count from 0"
            )
        return Request(
            ranks=ranks,
            ranks_per_node=self.ranks_per_node,
            between=_link("", self.bandwidth, self.latency),
            within=_link("intra-", self.intra_bandwidth, self.intra_latency),
            speedup=self.compute_speedup,
            factors=factors,
            strategies=self._strategies(),
            periods=numbers("--periods", self.periods, MOST_STEPS),
            algorithm=self.allreduce,
        )

    def _strategies(self) -> tuple[StrategyChoice, ...]:
        from speechdp.experiments.compare.plan import checked_strategies  # noqa: PLC0415

        # Unknown ones are refused once the runs are read: a run may have been trained with them.
        return checked_strategies(self.strategies, others=True) if self.strategies else ()


def _link(prefix: str, rate: str, time: str) -> GivenLink:
    from speechdp.simulation.quantities import bandwidth, latency  # noqa: PLC0415
    from speechdp.simulation.simulate import GivenLink  # noqa: PLC0415

    return GivenLink(
        bandwidth(f"--{prefix}bandwidth", rate) if rate else None,
        latency(f"--{prefix}latency", time) if time else None,
    )
