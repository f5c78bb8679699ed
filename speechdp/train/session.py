"""The session: what all runs of a process share."""

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
        device: device this rank computes on.
        reporter: shows progress and notices.
        stop: source of stop requests by signals, or None.
        facts: facts recorded in run.json (command, versions, hosts).
        feeders: opens sources of batches on the ranks that feed this one; None: this rank reads its data
            itself.
        pause_at: step after which a run evaluates and stops as if asked to; 0: none.
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
        """Return whether this rank has been asked to stop; the others may not have been."""
        return self.stop is not None and self.stop.received is not None

    def alone(self, stop: StopSource) -> Session:
        """Return a session of this rank alone, which is rank 0; its facts keep only the first host.

        Args:
            stop: source of stop requests that includes signals to the other ranks, which wait meanwhile.
        """
        facts = {**self.facts, "hosts": self.facts.get("hosts", [])[:1]}
        return dataclasses.replace(self, comm=SerialCommunicator(), stop=stop, facts=facts)
