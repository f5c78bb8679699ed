"""Mixing beside training: nothing is lost whatever the order, on a GPU without a wait."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from speechdp.strategies.mechanisms.pending_correction import EffectiveParameters

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def mix(one: EffectiveParameters, other: EffectiveParameters) -> None:
    """Exchange snapshots that both have taken already."""
    synchronize()  # as the message between them would
    one.incoming.copy_(other._own)
    other.incoming.copy_(one._own)
    synchronize()
    for each in (one, other):
        with each.side():
            each.correct()


def pair(device: str) -> tuple[Tensor, Tensor, EffectiveParameters, EffectiveParameters]:
    x = torch.arange(5, dtype=torch.float64, device=device)
    y = torch.ones(5, dtype=torch.float64, device=device)
    return x, y, EffectiveParameters(x, exchanging=True), EffectiveParameters(y, exchanging=True)


def snapshots(*all_of_them: EffectiveParameters) -> None:
    for each in all_of_them:
        with each.side():
            each.snapshot()


@pytest.mark.parametrize("device", DEVICES)
def test_a_mixing_without_a_step_gives_both_the_mean(device: str) -> None:
    x, y, one, other = pair(device)
    mean = (x + y) / 2
    snapshots(one, other)
    mix(one, other)
    assert one.take() == other.take() == 1
    assert torch.equal(x, mean)
    assert torch.equal(y, mean)
    assert one.take() == 0
    assert torch.equal(x, mean)


@pytest.mark.parametrize("device", DEVICES)
def test_an_update_between_snapshot_and_sum_is_kept_whole(device: str) -> None:
    x, y, one, other = pair(device)
    mean = (x + y) / 2
    snapshots(one, other)
    with one.update():
        x.add_(3.0)
    mix(one, other)
    one.take()
    other.take()
    assert torch.equal(x, mean + 3)
    assert torch.equal(y, mean)


@pytest.mark.parametrize("device", DEVICES)
def test_what_waits_is_mixed_on_while_parameters_stay(device: str) -> None:
    """A slow rank is mixed several times in one of its steps."""
    x, y, slow, one = pair(device)
    z = torch.full_like(x, 9.0)
    other = EffectiveParameters(z, exchanging=True)
    before = x.clone()
    snapshots(slow, one)
    mix(slow, one)
    snapshots(slow, other)
    mix(slow, other)
    snapshots(slow, other)
    mix(slow, other)
    assert torch.equal(x, before), "training must see one set of parameters"
    assert slow.num_pending == 3
    assert [each.take() for each in (slow, one, other)] == [3, 1, 2]
    expected = ((before + 1) / 2 + 9) / 2
    for actual in (x, z):
        assert torch.allclose(actual, expected, rtol=0, atol=1e-12)
    assert torch.allclose(y, (before + 1) / 2, rtol=0, atol=1e-12)
    assert slow.num_mixings == 3


def test_a_shared_correction_is_taken_by_those_that_receive_it() -> None:
    x, _, leader, other = pair("cpu")
    z = x.clone()
    member = EffectiveParameters(z, exchanging=False)
    snapshots(leader, other)
    mix(leader, other)
    sent: list[Tensor] = []
    assert leader.take(lambda correction: sent.append(correction.clone()), 1) == 1
    assert member.take(lambda correction: correction.copy_(sent[0]), 1) == 1
    assert torch.equal(x, z)


@pytest.mark.gpu
@needs_gpu
def test_training_on_a_gpu_does_not_wait_for_an_exchange_under_way() -> None:
    x, _, one, _ = pair("cuda")
    with one.side():
        one.snapshot()
        torch.cuda._sleep(2_000_000_000)  # stands for an exchange: about a second of the other stream
    with one.update():
        x.add_(1.0)
    one.take()
    updated = torch.cuda.Event()
    updated.record()
    updated.synchronize()
    with one.side():
        assert not torch.cuda.current_stream().query(), "the exchange was over before the update"
    torch.cuda.synchronize()
