"""Train a small digit recogniser with CTC, in plain PyTorch, on one process."""

import torch
from digits import Recogniser, batches, loss_sum


def main():
    torch.manual_seed(1)
    model = Recogniser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.5)
    for features, texts in batches(120, seed=1):
        optimizer.zero_grad()
        loss = loss_sum(model, features, texts)
        (loss / len(texts)).backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        loss = sum(loss_sum(model.eval(), *batch) for batch in batches(10, seed=99)) / 80
    print(f"held-out loss {loss:.3f}")


if __name__ == "__main__":
    main()
