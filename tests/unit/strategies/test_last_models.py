"""Which averaged models are kept for the final combine, and what becomes of them."""

from __future__ import annotations

import torch
from torch import Tensor

from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.parallel.strategy import Progress
from speechdp.strategies.mechanisms.last_models import LastModels


def _model(number: float) -> Tensor:
    return torch.full((3,), number, dtype=torch.float64)


def _offer(models: LastModels, epochs: list[float], num_epochs: int) -> None:
    """Offer a model at each of these epochs; a model is filled with its epoch."""
    for epoch in epochs:
        models.offer(_model(epoch), Progress(1, 0.0, 0.0, epoch, num_epochs))


def _kept(models: LastModels) -> list[float]:
    state = models.state_dict()
    return [float(state[f"kept.{i}"][0]) for i in range(state["num_kept"])]


def test_models_are_spread_over_the_last_half_epoch() -> None:
    models = LastModels(5, SerialCommunicator())
    _offer(models, [i / 20 for i in range(1, 200)], num_epochs=10)  # 20 averages an epoch, the last left out
    models.conclude(_model(10.0), is_new=True)
    assert _kept(models) == [9.6, 9.7, 9.8, 9.9, 10.0]


def test_of_a_short_training_the_last_quarter() -> None:
    models = LastModels(5, SerialCommunicator())
    _offer(models, [i / 20 for i in range(1, 21)], num_epochs=1)
    models.conclude(_model(1.0), is_new=False)
    assert _kept(models) == [0.8, 0.85, 0.9, 0.95, 1.0]


def test_of_fewer_averages_all_are_kept_and_the_final_model() -> None:
    models = LastModels(20, SerialCommunicator())
    _offer(models, [9.2, 9.6, 9.8], num_epochs=10)
    models.conclude(_model(10.0), is_new=True)
    assert _kept(models) == [9.6, 9.8, 10.0]


def test_the_final_model_is_kept_once() -> None:
    for is_new, kept in ((False, [9.6, 9.8]), (True, [9.6, 9.8, 10.0])):
        models = LastModels(20, SerialCommunicator())
        _offer(models, [9.6, 9.8], num_epochs=10)
        models.conclude(_model(10.0), is_new=is_new)
        assert _kept(models) == kept


def test_training_that_ends_early_has_nothing_to_combine() -> None:
    models = LastModels(5, SerialCommunicator())
    _offer(models, [1.0, 2.0, 3.0], num_epochs=10)
    models.conclude(_model(3.0), is_new=False)
    assert models.means(_model(0)) == []


def test_means_reach_every_rank_though_rank_0_alone_keeps_models() -> None:
    def check(comm: Communicator) -> None:
        models = LastModels(3, comm)
        _offer(models, [0.9, 0.99], num_epochs=1)
        models.conclude(_model(4.0), is_new=True)
        assert sum(isinstance(v, Tensor) for v in models.state_dict().values()) == (
            3 if comm.rank == 0 else 0
        )
        means = models.means(_model(0))
        assert torch.equal(
            torch.stack(means), torch.stack([_model((4 + 0.99) / 2), _model((4 + 0.99 + 0.9) / 3)])
        )

    run_threads(3, check)


def test_what_is_kept_survives_a_checkpoint() -> None:
    whole, first = LastModels(3, SerialCommunicator()), LastModels(3, SerialCommunicator())
    _offer(whole, [0.84, 0.86, 0.95], num_epochs=1)
    _offer(first, [0.84, 0.86], num_epochs=1)
    second = LastModels(3, SerialCommunicator())
    second.load_state_dict(first.state_dict())
    _offer(second, [0.95], num_epochs=1)
    for models in (whole, second):
        models.conclude(_model(1.0), is_new=True)
    assert _kept(second) == _kept(whole) == [0.84, 0.95, 1.0]
