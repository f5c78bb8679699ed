"""The base class of strategies: what subclasses may write, and options that become a strategy at work."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from speechdp.comm.base import Communicator
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.threads.communicator import run_threads
from speechdp.errors import CommunicationError, ConfigError
from speechdp.parallel.registry import StrategyChoice, parse_strategy, strategy_names
from speechdp.parallel.strategy import Strategy, Traits
from speechdp.parallel.training_step import TrainingStep
from speechdp.strategies.dpsgd import Dpsgd
from speechdp.testing import make_batch, make_replica, summed_loss
from speechdp.timing.timeline import Timeline

#: What a strategy is given or what is done for it: not for subclasses.
FINAL = {"abandon", "attach", "close", "name", "observer", "peer_bytes"}
MOST_TO_WRITE = 15


def timeline() -> Timeline:
    return Timeline(None, rank=0, device=torch.device("cpu"))


def test_what_subclasses_write_is_little_and_stands_in_the_docstring() -> None:
    to_write = {name for name in vars(Strategy) if not name.startswith("_")} - FINAL
    assert len(to_write) <= MOST_TO_WRITE
    assert Strategy.__doc__ is not None
    listed = Strategy.__doc__.partition("What subclasses write")[2].partition("Some also")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == to_write


@pytest.mark.parametrize("name", strategy_names())
def test_options_stay_what_they_are_and_serve_many_runs(name: str) -> None:
    options = parse_strategy(name)
    before = dict(vars(options))
    # An asynchronous one alone: who else would answer?
    size = 2 if options.traits.synchronous and not options.traits.needs_peers else 1

    def train(comm: Communicator) -> None:
        first, second = (options.attach(make_replica(), comm, timeline()) for _ in range(2))
        assert first.replica is not second.replica and type(first) is type(second) is type(options)
        for strategy in (first, second):
            strategy.close()

    run_threads(size, train)
    assert vars(options) == before


def test_channels_that_a_strategy_opens_besides_are_counted_and_closed() -> None:
    def work(comm: Communicator) -> dict[str, Any]:
        strategy = parse_strategy("ad_psgd:groups=2").attach(make_replica(), comm, timeline())
        strategy.before_backward(1)
        summed_loss(strategy.replica.model, make_batch(comm.rank, 0)).backward()  # type: ignore[no-untyped-call]
        peers, group = strategy.channels
        sent = strategy.peer_bytes
        strategy.close()
        return {"all": sent, "group": round(group.sent_bytes), "peers": peers.sent_bytes}

    for found in run_threads(2, work):
        assert found["all"] == found["group"] + found["peers"] > 0


@dataclass(eq=False)
class CannotBegin(Dpsgd):
    """Opens a channel of its own, and raises on some ranks what no check has foreseen."""

    on_ranks: int = 2
    opened: ClassVar[dict[int, list[Any]]] = {}

    def set_up(self) -> None:
        super().set_up()
        self.channels.append(self.comm.peers())
        self.opened[self.comm.rank] = self.channels
        if self.comm.rank >= self.comm.size - self.on_ranks:
            raise ConfigError(f"rank {self.comm.rank} cannot begin")


def _is_closed(channel: Any, other: int) -> bool:
    try:
        channel.send(torch.zeros(1), other)
    except CommunicationError as error:
        return "the channel is closed" in str(error)
    return False


def test_a_strategy_that_cannot_begin_leaves_no_channel_open() -> None:
    def begin(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match=f"rank {comm.rank} cannot begin"):
            CannotBegin().attach(make_replica(), comm, timeline())
        channels = CannotBegin.opened[comm.rank]
        assert len(channels) == 2 and all(_is_closed(channel, 1 - comm.rank) for channel in channels)
        # The ranks go on with something else.
        parse_strategy("dpsgd").attach(make_replica(), comm, timeline()).close()

    run_threads(2, begin)


def test_a_rank_that_alone_cannot_begin_waits_for_nobody_and_says_why() -> None:
    def begin(comm: Communicator) -> None:
        CannotBegin(on_ranks=1).attach(make_replica(), comm, timeline())
        comm.barrier()

    with pytest.raises(ConfigError, match="rank 1 cannot begin"):
        run_threads(2, begin)
    assert all(_is_closed(channel, 0) for channel in CannotBegin.opened[1])


def test_the_loss_of_all_passes_of_a_step_is_observed_once() -> None:
    strategy = parse_strategy("adaptive_averaging").attach(make_replica(), SerialCommunicator(), timeline())
    seen = []
    assert strategy.observer is strategy
    strategy.observe_loss = lambda total, frames: seen.append((total.item(), frames))  # type: ignore[attr-defined]
    batches = [make_batch(0, number) for number in range(2)]
    losses = [summed_loss(strategy.replica.model, batch) for batch in batches]
    step = TrainingStep(strategy, strategy.timeline, sum(batch.num_frames for batch in batches))
    step.begin()
    for number, loss in enumerate(losses):
        step.backward(loss, last=number == 1)
    assert seen == [((losses[0] + losses[1]).item(), step.weight)]


def test_a_loss_is_observed_without_waiting_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a scaler, where one that is not finite must not count."""
    waits: list[str] = []
    replica = make_replica()
    replica.scaler = torch.amp.GradScaler("cpu")
    strategy = parse_strategy("model_averaging:leave_out=1").attach(replica, SerialCommunicator(), timeline())
    adaptive = parse_strategy("adaptive_averaging").attach(replica, SerialCommunicator(), timeline())
    loss = summed_loss(replica.model, make_batch(0, 0))
    with monkeypatch.context() as patched:
        for name in ("__bool__", "item", "tolist", "__float__", "__int__"):
            patched.setattr(torch.Tensor, name, lambda self, name=name: waits.append(name) or 1)
        for each in (strategy, adaptive):
            TrainingStep(each, each.timeline, 3).backward(loss, compute=lambda gradient: None)
    assert waits == []


def test_a_back_end_without_messages_is_refused_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = SerialCommunicator()
    monkeypatch.setattr(type(comm), "has_peers", False)

    def refuse() -> None:
        raise ConfigError("choose another")

    monkeypatch.setattr(comm, "peers", refuse)
    parse_strategy("gradient_averaging").check_ranks(comm)
    with pytest.raises(ConfigError, match="choose another"):
        parse_strategy("ad_psgd").check_ranks(comm)


def test_only_strategies_without_parts_of_their_own_resume_with_another_size() -> None:
    assert Traits().resumes_with_other_size
    assert not Traits(synchronous=False).resumes_with_other_size
    assert not Traits(needs_peers=True).resumes_with_other_size
    assert Traits(needs_peers=True, partners_follow_size=True).resumes_with_other_size
    assert not Traits(synchronous=False, partners_follow_size=True).resumes_with_other_size


def test_a_choice_is_read_once_and_only_where_it_is_asked_for() -> None:
    choice = StrategyChoice("model_averaging:period=4")
    assert choice.parsed is choice.parsed and choice.parsed.traits.period == "4"
    assert choice == StrategyChoice("model_averaging:period=4") != StrategyChoice("model_averaging:period=8")
    unknown = StrategyChoice("of_a_script:period=4")
    assert str(unknown) == "of_a_script:period=4"
    with pytest.raises(ConfigError, match="unknown strategy 'of_a_script'"):
        _ = unknown.parsed


def test_an_option_is_added_where_there_is_one_that_is_not_given() -> None:
    def added(text: str) -> str:
        return StrategyChoice(text).with_default("overlap", "false").text

    assert added("gradient_averaging") == "gradient_averaging:overlap=false"
    assert added("dpsgd:seed=3") == "dpsgd:seed=3,overlap=false"
    assert added("gradient_averaging:overlap=true") == "gradient_averaging:overlap=true"
    assert added("model_averaging") == "model_averaging"
