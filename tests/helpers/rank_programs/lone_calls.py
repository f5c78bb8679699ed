"""A script with collective calls of one rank alone: `lone_calls.py FOLDER WHAT`; `group-WHAT`: in a group."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import speechdp
from speechdp.comm.base import Communicator


def main(comm: Communicator) -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2].removeprefix("group-")
    if what != sys.argv[2]:
        comm = comm.split(0)
    model = torch.nn.Linear(4, 2).to(comm.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = speechdp.DataParallel(model, optimizer, comm, folder=folder / "run")
    is_first = comm.rank == 0
    if what == "load" and is_first:
        run.load_checkpoint()
    with run:
        for number in range(8):
            with run.step(weight=3) as step:
                step.backward(model(torch.ones(3, 4, device=comm.device)).square().sum())
            if is_first and number == 3:
                run.save(folder / "model.pt")  # the one call that is for any rank
                if what == "checkpoint":
                    run.save_checkpoint()
                if what == "dawdle":
                    time.sleep(600)
        if what == "evaluate" and is_first:
            with run.evaluating():
                pass
    if what == "make" and is_first:
        speechdp.DataParallel(model, optimizer, comm)
    print(f"rank {comm.rank} has done {run.steps} steps")


speechdp.run_ranks(main)
