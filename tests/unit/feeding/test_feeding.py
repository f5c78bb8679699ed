"""Roles of ranks, and a trainer's link to its feeders over a channel that the test moves by hand."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from speechdp.comm import packets
from speechdp.comm.packets import Pacing, Packet, PacketChannel, Sent
from speechdp.comm.serial import SerialCommunicator
from speechdp.comm.startup.create import create_fed_job
from speechdp.comm.startup.feeder_roles import assign_roles
from speechdp.data.plan.epoch_plan import Segments
from speechdp.errors import CommunicationError, ConfigError, RunError, ShardError
from speechdp.feeding.fed_source import gather_feeder_times, pack_segments, unpack_segments
from speechdp.feeding.feeder_link import DEPTH, FeederLink
from tests.helpers.waiting import LIMIT_S, no_thread_left, wait_until


def test_the_last_ranks_of_each_host_feed() -> None:
    roles = assign_roles(["a", "b", "a", "b", "a", "b", "a", "b"], 2)
    assert roles.trainers == (0, 1, 2, 3)
    assert roles.feeders == (4, 5, 6, 7)
    assert [roles.trainers_of(feeder) for feeder in roles.feeders] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    roles = assign_roles(["a", "a", "b", "b", "b"], 1)
    assert (roles.trainers, roles.feeders) == ((0, 2, 3), (1, 4))


def test_trainers_of_a_host_begin_with_different_feeders() -> None:
    roles = assign_roles(["a"] * 5, 2)
    assert [roles.feeders_of(trainer) for trainer in roles.trainers] == [[3, 4], [4, 3], [3, 4]]


@pytest.mark.parametrize("hosts", [["a"], ["a", "a"], ["a", "a", "a", "b", "b"]])
def test_a_host_on_which_nobody_would_train_is_named(hosts: list[str]) -> None:
    with pytest.raises(ConfigError, match=rf"--feeders 2: of the ranks on {hosts[-1]}, .* at least 3 "):
        assign_roles(hosts, 2)


def test_feeders_without_a_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "HOROVOD_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)
    start = "--feeders 2: .* start with speechdp launch -np 3 -- train ..."
    for backend in ("auto", "mpi"):  # which a run that goes on has to keep
        with pytest.raises(ConfigError, match=f"{start}, or give --feeders 0$"):
            create_fed_job(backend, 2)
    with pytest.raises(ConfigError, match=f"{start} with --backend auto, or give --feeders 0$"):
        create_fed_job("serial", 2)


def test_feeders_under_horovodrun_without_mpi_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    for name, value in (("RANK", "0"), ("SIZE", "3"), ("GLOO_RENDEZVOUS_ADDR", "127.0.0.1")):
        monkeypatch.setenv(f"HOROVOD_{name}", value)
    with pytest.raises(ConfigError, match=r"--feeders 1: .* horovodrun does not start here; "):
        create_fed_job("horovod", 1)


@pytest.mark.parametrize("num", [0, 3])
def test_segments_are_packed_whole(num: int) -> None:
    columns = np.random.default_rng(0).integers(1, 1000, (5, num))
    segments = unpack_segments(pack_segments(Segments(*columns)))
    for name, column in zip(("shard", "utterance", "start", "num_frames", "speed"), columns, strict=True):
        np.testing.assert_array_equal(getattr(segments, name), column)
        assert getattr(segments, name).dtype == np.int64


def test_looks_become_rarer_the_longer_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now_s
        slept.append(seconds)
        now_s += seconds + 1e-6

    monkeypatch.setattr(packets.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(packets.time, "sleep", sleep)
    pacing = Pacing()
    while now_s < 1.0:
        pacing.sleep(moving=False)
    assert slept == sorted(slept) and slept[0] == 20e-6 and slept[-1] == 1e-3
    assert len(slept) < 1100
    slept.clear()
    pacing.sleep(moving=True)  # long after the last packet
    pacing.reset()
    pacing.sleep(moving=True)
    pacing.sleep(moving=False)
    assert slept == [100e-6, 0, 20e-6]


class ByHand(PacketChannel):
    """Keeps what is sent; gives what the test puts in."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 9
        self.sent: list[tuple[int, dict[str, Any]]] = []
        self.coming: list[Packet | BaseException] = []

    def send(
        self, dest: int, head: dict[str, Any], tensors: Sequence[Tensor] = (), sent: Sent | None = None
    ) -> None:
        self.sent.append((dest, head))

    def receive(self) -> Packet | None:
        if not self.coming:
            return None
        coming = self.coming.pop(0)
        if isinstance(coming, BaseException):
            raise coming
        return coming

    @property
    def is_moving(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def asked(self, feeder: int) -> list[int]:
        """Return the numbers of the batches that a feeder has been asked for."""
        return [head["number"] for dest, head in self.sent if dest == feeder and head["op"] == "batch"]

    def answer(self, number: int, **head: Any) -> None:
        """Let the batch of this number arrive."""
        source = next(dest for dest, sent in self.sent if sent.get("number") == number)
        self.coming.append(Packet(source, {"number": number, "op": "batch", **head}))


@pytest.fixture
def channel() -> ByHand:
    return ByHand()


@pytest.fixture
def link(channel: ByHand) -> Iterator[FeederLink]:
    with no_thread_left():
        link = FeederLink(channel, [5, 7])
        yield link
        link.abandon()


BATCH = {"op": "batch", "source": 0}


def test_batches_wait_until_a_feeder_has_room(channel: ByHand, link: FeederLink) -> None:
    answers = [link.ask_for_batch(dict(BATCH), []) for _ in range(3 * DEPTH)]
    assert (channel.asked(5), channel.asked(7)) == ([0, 2], [1, 3])
    channel.answer(1)
    answers[1].result(LIMIT_S)
    assert (channel.asked(5), channel.asked(7)) == ([0, 2], [1, 3, 4])
    channel.answer(3)  # 7 is the faster one, and gets the rest
    answers[3].result(LIMIT_S)
    assert (channel.asked(5), channel.asked(7)) == ([0, 2], [1, 3, 4, 5])
    for number in (0, 2, 4, 5):
        channel.answer(number)
    assert [answer.result(LIMIT_S).head["number"] for answer in answers] == list(range(6))


def test_what_is_closed_is_asked_of_nobody(channel: ByHand, link: FeederLink) -> None:
    kept = [link.ask_for_batch(dict(BATCH), []) for _ in range(2 * DEPTH)]
    dropped = link.ask_for_batch(dict(BATCH), [])
    other = link.ask_for_batch({"op": "batch", "source": 1}, [])
    link.forget(0)
    assert dropped.cancelled() and not other.cancelled()
    for number in range(2 * DEPTH + 1):
        wait_until(lambda n=number: n in channel.asked(5) + channel.asked(7), "the question")  # type: ignore[misc]
        channel.answer(number)
    assert other.result(LIMIT_S).head["number"] == 2 * DEPTH
    assert all(answer.result(LIMIT_S) for answer in kept)


@pytest.mark.parametrize(("name", "kind"), [("ShardError", ShardError), ("RunError", RunError)])
def test_errors_name_the_feeder(channel: ByHand, link: FeederLink, name: str, kind: type[Exception]) -> None:
    answer = link.ask_for_batch(dict(BATCH), [])
    channel.answer(0, error=[name, "train.h5: utterance 3 is damaged"])
    with pytest.raises(kind, match=r"^feeder rank 5: train\.h5: utterance 3 is damaged$"):
        answer.result(LIMIT_S)


def test_goodbye_waits_for_what_is_on_its_way(channel: ByHand, link: FeederLink) -> None:
    answer = link.ask_for_batch(dict(BATCH), [])
    closing = threading.Thread(target=link.close, args=(75,))
    closing.start()
    closing.join(0.05)
    assert closing.is_alive() and not [head for _, head in channel.sent if head["op"] == "bye"]
    channel.answer(0)
    closing.join(LIMIT_S)
    assert not closing.is_alive() and answer.done()
    assert channel.sent[-2:] == [(feeder, {"op": "bye", "exit_code": 75}) for feeder in (5, 7)]
    link.close()
    assert len(channel.sent) == 3
    with pytest.raises(CommunicationError, match="closed"):
        link.ask(5, {"op": "times"})


def test_a_broken_channel_is_told_to_all_who_wait_and_ask(channel: ByHand, link: FeederLink) -> None:
    answers = [link.ask_for_batch(dict(BATCH), []) for _ in range(2 * DEPTH + 1)]
    channel.coming.append(CommunicationError("the cable is gone"))
    for answer in answers:
        with pytest.raises(CommunicationError, match="the cable is gone"):
            answer.result(LIMIT_S)
    assert not link.is_open
    calls = (lambda: link.ask(5, {}), lambda: link.ask_for_batch(dict(BATCH), []), link.close)
    for call in calls:
        with pytest.raises(CommunicationError, match="the cable is gone"):
            call()


def test_ranks_that_read_themselves_have_no_feeders_to_tell_of() -> None:
    local: Any = object()
    assert gather_feeder_times(local, SerialCommunicator()) == []
