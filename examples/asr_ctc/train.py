"""Train a small digit recogniser with CTC on all ranks: plain.py with speechdp in it."""

import torch
from digits import Recogniser, batches, loss_sum

import speechdp


def main(comm):
    torch.manual_seed(1)
    model = Recogniser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.5)
    with speechdp.DataParallel(model, optimizer, comm) as run:
        for features, texts in run.batches(batches(120, seed=1 + comm.rank)):
            with run.step(weight=len(texts)) as step:
                loss = loss_sum(model, features, texts)
                step.backward(loss)
            scheduler.step()
    with torch.no_grad():
        loss = sum(loss_sum(model.eval(), *batch) for batch in batches(10, seed=99)) / 80
    print(f"held-out loss {loss:.3f}")
    run.log(heldout_loss=loss)


if __name__ == "__main__":
    speechdp.run_ranks(main)
