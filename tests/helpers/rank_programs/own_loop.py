"""A script with a loop of its own, as docs/api.md has it: `own_loop.py FOLDER [FAILS]`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import speechdp
from speechdp.comm.base import Communicator


def main(comm: Communicator) -> None:
    folder, fails = Path(sys.argv[1]), len(sys.argv) > 2
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double().to(comm.device)
    groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    generator = torch.Generator().manual_seed(comm.rank)
    batches = [torch.randn(3 + comm.rank, 4, generator=generator).double() for _ in range(5 + comm.rank)]
    run = speechdp.DataParallel(model, optimizer, comm, folder=folder)
    with run:
        # One after another without a length: the ranks tell each other who has a batch.
        for x in run.batches(batches if not run.strategy.traits.synchronous else iter(batches)):
            with run.step(weight=len(x)) as step:
                step.backward(model(x.to(comm.device)).square().sum())
            if run.steps == 3:
                if fails and comm.rank == comm.size - 1:
                    raise ValueError("the script has a mistake")
                with run.evaluating():
                    run.log(valid_loss=1.0)
    run.save(folder / "model.safetensors")
    mine = [p.detach().cpu().numpy().tobytes().hex() for p in model.parameters()]
    assert len({str(other) for other in comm.allgather_object(mine)}) == 1
    print(f"rank {comm.rank} of {comm.size} over {comm.backend}: {run.steps} steps")


speechdp.run_ranks(main)
