"""One training step of the poster's model over ranks: with one master (as nn.DataParallel), and as equals."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.papers import poster_model
from benchmarks.papers.poster_model import Inputs, Sizes
from speechdp.comm.base import Communicator, PeerCommunicator
from speechdp.models.tacotron.config import TacotronConfig
from speechdp.models.tacotron.model import Tacotron

_MB = 1e6


def loss_of(outputs: Sequence[Tensor], inputs: Inputs) -> Tensor:
    """Return L1 of mel and linear spectrograms, and the stop prediction's cross-entropy, as a mean."""
    mel, linear, stop = outputs[:3]
    spectrograms = nn.functional.l1_loss(mel, inputs.mel) + nn.functional.l1_loss(linear, inputs.linear)
    target = torch.zeros_like(stop)
    return spectrograms + nn.functional.binary_cross_entropy_with_logits(stop, target)


def forward(model: nn.Module, inputs: Inputs) -> tuple[Tensor, ...]:
    """Return everything that the model puts out: mel, linear, stop logits, attention."""
    output = model(inputs.symbols, inputs.mel, inputs.lengths)
    return output.mel, output.linear, output.stop_logits, output.attention


@dataclass(frozen=True)
class Job:
    """What both schemes train.

    Attributes:
        comm: the ranks.
        peers: messages between two of them.
        config: of the model.
        sizes: of one rank's batch.
        device: of the model.
    """

    comm: Communicator
    peers: PeerCommunicator
    config: TacotronConfig
    sizes: Sizes
    device: torch.device


class Scheme(ABC):
    """A way to train one model on all ranks.

    Attributes:
        model: this rank's.
        inputs: the batch that this rank holds.
        only_here: megabytes of what this rank holds and the others do not.
    """

    model: Tacotron
    inputs: Inputs
    only_here: dict[str, float]

    def __init__(self, job: Job) -> None:
        self.model = poster_model.make_model(job.config, job.sizes, job.device)
        self.only_here = {}

    @abstractmethod
    def step(self) -> None:
        """Train on one batch a rank.  Collective."""


class EqualRanks(Scheme):
    """Every rank with its batch, outputs, loss and optimizer."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._comm = job.comm
        self.inputs = poster_model.make_inputs(job.sizes, job.device, seed=job.comm.rank)
        self._optimizer = torch.optim.Adam(self.model.parameters())

    def step(self) -> None:
        self._optimizer.zero_grad()
        loss_of(forward(self.model, self.inputs), self.inputs).backward()
        flat = flat_gradient(self.model)
        self._comm.allreduce(flat, name="gradient").div_(self._comm.size)
        set_gradient(self.model, flat)
        self._optimizer.step()


class OneMaster(Scheme):
    """Rank 0 with the batch of all ranks, all outputs, the loss and the optimizer; the others compute."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._job, self._comm, self._peers = job, job.comm, job.peers
        self._is_master = job.comm.rank == 0
        if self._is_master:
            of_all = dataclasses.replace(job.sizes, batch=job.sizes.batch * job.comm.size)
            self.inputs = poster_model.make_inputs(of_all, job.device)
            self._optimizer = torch.optim.Adam(self.model.parameters())
        else:
            self.inputs = poster_model.make_inputs(job.sizes, job.device)  # overwritten by what comes

    def step(self) -> None:
        self._replicate()
        mine = self._scatter()
        outputs = forward(self.model, mine)
        gradients = self._gradients(outputs)
        for parameter in self.model.parameters():
            parameter.grad = None
        torch.autograd.backward(outputs[:3], gradients)
        flat = flat_gradient(self.model)
        if not self._is_master:
            self._peers.send(flat, 0)
            return
        others = torch.empty_like(flat)
        for source in range(1, self._comm.size):
            self._peers.recv(others, source)
            flat += others
        set_gradient(self.model, flat)
        self._optimizer.step()

    def _replicate(self) -> None:
        flat = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        self._comm.broadcast(flat, name="parameters")
        nn.utils.vector_to_parameters(flat, self.model.parameters())

    def _part(self, rank: int) -> slice:
        return slice(rank * self._job.sizes.batch, (rank + 1) * self._job.sizes.batch)

    def _scatter(self) -> Inputs:
        """Return this rank's part of the batch; linear spectrograms stay where the loss is."""
        inputs = self.inputs
        if not self._is_master:
            self._peers.recv(inputs.symbols, 0)
            self._peers.recv(inputs.mel, 0)
            return inputs
        for rank in range(1, self._comm.size):
            self._peers.send(inputs.symbols[self._part(rank)], rank)
            self._peers.send(inputs.mel[self._part(rank)], rank)
        first = self._part(0)
        return Inputs(inputs.symbols[first], inputs.mel[first], inputs.linear[first], inputs.lengths[first])

    def _gradients(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the loss's gradients by this rank's outputs: the master gathers, computes and scatters."""
        if not self._is_master:
            for output in outputs:
                self._peers.send(output.detach().contiguous(), 0)
            received = [output.new_empty(output.shape) for output in outputs[:3]]
            for gradient in received:
                self._peers.recv(gradient, 0)
            return received
        gathered = [self._gather(output.detach()) for output in outputs]
        loss_of(gathered, self.inputs).backward()
        gradients = [tensor.grad for tensor in gathered[:3] if tensor.grad is not None]
        self.only_here = self._figures(gathered)
        for rank in range(1, self._comm.size):
            for gradient in gradients:
                self._peers.send(gradient[self._part(rank)].contiguous(), rank)
        return [gradient[self._part(0)] for gradient in gradients]

    def _gather(self, own: Tensor) -> Tensor:
        """Return every rank's output, (ranks x B, ...), as a leaf."""
        batch = self._job.sizes.batch
        gathered = own.new_empty(batch * self._comm.size, *own.shape[1:])
        gathered[:batch] = own
        for source in range(1, self._comm.size):
            self._peers.recv(gathered[self._part(source)], source)
        return gathered.requires_grad_()

    def _figures(self, gathered: Sequence[Tensor]) -> dict[str, float]:
        """Return the megabytes of what the master alone holds."""
        inputs, others = self.inputs, 1 - 1 / self._comm.size
        batch = inputs.symbols.nbytes + inputs.mel.nbytes
        parameters = sum(p.nbytes for p in self.model.parameters())
        return {
            "inputs of the others": batch * others / _MB,
            "targets": inputs.linear.nbytes / _MB,
            "gathered outputs": sum(tensor.nbytes for tensor in gathered) / _MB,
            "their gradients": sum(tensor.nbytes for tensor in gathered[:3]) / _MB,
            "optimizer": 2 * parameters / _MB,  # Adam's two moments
        }


def flat_gradient(model: nn.Module) -> Tensor:
    """Return the gradient of all parameters as one vector; those without one count as zero."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([part.flatten() for part in parts])


def set_gradient(model: nn.Module, flat: Tensor) -> None:
    """Write a vector of `flat_gradient` back."""
    begin = 0
    for parameter in model.parameters():
        parameter.grad = flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
