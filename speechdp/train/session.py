"""What all runs of a process share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.data.loading.source_options import SourceOpener
from speechdp.data.shards.dataset import Dataset
from speechdp.parallel.stop import StopSource
from speechdp.train.progress import Reporter, SilentReporter


@dataclass(frozen=True)
class Session:
    """What all runs of a process share.

    Attributes:
        dataset: the data.
        comm: the ranks.
        device: where this rank computes.
        reporter: where news go.
        stop: the signal that asks to stop, or None.
        facts: recorded in run.json (command, versions, hosts).
        feeders: opens sources of batches on ranks that feed this one; None: this rank reads itself.
        pause_at: steps after which a run evaluates and stops as if asked; 0: it does not.
    """

    dataset: Dataset
    comm: Communicator
    device: torch.device
    reporter: Reporter = field(default_factory=SilentReporter)
    stop: StopSource | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    feeders: SourceOpener | None = None
    pause_at: int = 0

    def is_asked_to_stop(self) -> bool:
        """Return whether this rank has been asked to stop; the others may not know."""
        return self.stop is not None and self.stop.received is not None

    def alone(self, stop: StopSource) -> Session:
        """Return the session of this rank by itself, on rank 0: of the hosts it has the first.

        Args:
            stop: knows of signals that the others get while they wait.
        """
        facts = {**self.facts, "hosts": self.facts.get("hosts", [])[:1]}
        return dataclasses.replace(self, comm=SerialCommunicator(), stop=stop, facts=facts)
