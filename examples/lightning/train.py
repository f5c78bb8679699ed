"""Train a Lightning module on all ranks: loop and callbacks are Lightning's, the averaging speechdp's.

Lightning itself trains on one device (`devices=1`) and knows nothing of the other ranks.
"""

import sys
from pathlib import Path

import pytorch_lightning as lightning
import torch
from pytorch_lightning.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader

import speechdp

sys.path.insert(0, str(Path(__file__).parents[1] / "asr_ctc"))
from digits import Recogniser, batches, loss_sum


class DigitModule(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Recogniser()
        self.automatic_optimization = False  # the strategy says when the optimizer moves

    def training_step(self, batch, index):
        features, texts = batch
        with self.run.step(weight=len(texts)) as step:
            step.backward(loss_sum(self.model, features, texts))
        self.lr_schedulers().step()

    def validation_step(self, batch, index):
        features, texts = batch
        self.log("valid_loss", loss_sum(self.model, features, texts) / len(texts), batch_size=len(texts))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=2e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.5)]


class Averaging(lightning.Callback):
    """Trains with the ranks of `comm`; evaluates their average."""

    def __init__(self, comm, **options):
        self.comm, self.options = comm, options

    def on_train_start(self, trainer, module):
        module.run = speechdp.DataParallel(module, trainer.optimizers[0], self.comm, **self.options)
        module.run.__enter__()

    def on_validation_start(self, trainer, module):
        if not trainer.sanity_checking:
            self.shown = module.run.evaluating()
            self.shown.__enter__()

    def on_validation_end(self, trainer, module):
        if not trainer.sanity_checking:
            module.run.log(valid_loss=trainer.callback_metrics["valid_loss"])
            self.shown.__exit__(None, None, None)

    def on_train_end(self, trainer, module):
        module.run.__exit__(None, None, None)


def main(comm):
    torch.manual_seed(1)
    module = DigitModule()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        callbacks=[Averaging(comm, folder="run")],
        plugins=[LightningEnvironment()],  # else it looks for a job of several ranks itself
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    training = DataLoader(batches(40, seed=1 + comm.rank), batch_size=None)  # as many on every rank
    trainer.fit(module, training, DataLoader(batches(10, seed=99), batch_size=None))
    if comm.rank == 0:
        print(f"held-out loss {trainer.callback_metrics['valid_loss']:.3f}")


if __name__ == "__main__":
    speechdp.run_ranks(main)
