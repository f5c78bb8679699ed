"""A script that saves and goes on: `own_checkpoints.py STEPS [dies] [heeds]`.

With `dies` rank 1 dies once, at step 5; with `heeds` it saves and ends where a signal asks it to stop.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import speechdp
from speechdp.comm.base import Communicator


def main(comm: Communicator) -> None:
    model = torch.nn.Linear(3, 1)
    run = speechdp.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.01), comm, "bmuf:period=2")
    saved = run.load_checkpoint()
    with run:
        print(f"rank {comm.rank} begins at step {run.steps}", flush=True)
        while run.steps < int(sys.argv[1]):
            if run.steps == 5 and saved is None and "dies" in sys.argv:
                comm.barrier()  # both have saved
                if comm.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.02)
            with run.step() as step:
                step.backward(model(torch.ones(2, 3)).square().mean())
            if run.steps % 3 == 0:
                run.save_checkpoint()
                with run.evaluating():
                    run.log(valid_loss=1 / run.steps)
            if "heeds" in sys.argv and run.should_stop:
                run.save_checkpoint()
                print(f"rank {comm.rank} stops after step {run.steps}", flush=True)
                return
    print(f"rank {comm.rank} has done {run.steps} steps", flush=True)


speechdp.run_ranks(main)
