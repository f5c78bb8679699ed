"""Functions replayed as graphs: the same numbers, whatever came before, and the function where none can."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from speechdp.models import captured
from speechdp.models.captured import CapturedFunction, Graphs, rounded_up
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig
from speechdp.models.tacotron.config import TINY
from speechdp.models.tacotron.model import Tacotron
from tests.helpers.repeats import Repeats


def function(x: Tensor, flag: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.tanh(x @ weight + bias)
    return hidden, (hidden * flag).sum(1)


def parameters() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)]


def inputs(number: int, rows: int = 2, *, asks: bool = True) -> list[Tensor]:
    torch.manual_seed(number)
    return [torch.randn(rows, 3, requires_grad=asks), torch.randn(rows, 4)]


def gradients(outputs: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor]:
    total = outputs[0].square().sum() + outputs[1].exp().sum()
    return [g.clone() for g in torch.autograd.grad(total, leaves)]


def assert_right(make: CapturedFunction, given: list[Tensor], weights: list[Tensor]) -> None:
    """Outputs and gradients are the function's; what has come twice is captured afterwards."""
    leaves = [x for x in (*given, *weights) if x.requires_grad]
    outputs, expected = make(given, weights), function(*given, *weights)
    for one, other in zip(outputs, expected, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(gradients(outputs, leaves), gradients(expected, leaves), strict=True):
        assert torch.equal(one, other)
    make.capture()
    assert not make.has_new


def with_graphs(recorder: Repeats) -> tuple[CapturedFunction, list[Tensor]]:
    """Return the function with graphs for inputs of two rows, and its parameters."""
    make, weights = CapturedFunction(function, recorder), parameters()
    for _ in range(2):
        assert_right(make, inputs(1), weights)
    return make, weights


def test_kinds_in_turn_are_replayed_from_the_third_time_on() -> None:
    recorder, weights = Repeats(), parameters()
    make = CapturedFunction(function, recorder)
    for number in range(12):
        assert_right(make, inputs(number, rows=2 + number % 3), weights)
    assert recorder.num_recorded == 2 * 3
    assert recorder.num_replayed == 2 * (12 - 2 * 3)


def test_what_asks_for_no_gradient_gets_none() -> None:
    recorder, weights = Repeats(), parameters()
    make = CapturedFunction(function, recorder)
    weights[1].requires_grad_(False)
    for number in range(3):
        assert_right(make, inputs(number, asks=False), weights)
    assert recorder.num_replayed == 2


def test_parameters_are_read_as_they_are_now() -> None:
    recorder, weights = Repeats(), parameters()
    make = CapturedFunction(function, recorder)
    for number in range(4):
        assert_right(make, inputs(number), weights)
        with torch.no_grad():
            weights[0].mul_(0.5)
    assert recorder.num_recorded == 2


@pytest.mark.parametrize("change", ["moved", "frozen"])
def test_other_parameters_make_other_graphs(change: str) -> None:
    recorder, weights = Repeats(), parameters()
    make = CapturedFunction(function, recorder)
    for number in range(3):
        assert_right(make, inputs(number), weights)
    if change == "moved":
        weights[0].data = weights[0].detach().clone()
    else:
        weights[0].requires_grad_(False)
    for number in range(3):
        assert_right(make, inputs(number), weights)
    assert recorder.num_recorded == 4


def test_a_second_pass_forward_before_the_first_has_gone_backward_is_computed_without() -> None:
    recorder = Repeats()
    make, weights = with_graphs(recorder)
    first, second = inputs(2), inputs(3)
    outputs = make(first, weights), make(second, weights)
    assert recorder.num_replayed == 1
    for given, found in zip((first, second), outputs, strict=True):
        expected = gradients(function(*given, *weights), weights)
        for one, other in zip(gradients(found, weights), expected, strict=True):
            assert torch.equal(one, other)
    assert_right(make, inputs(4), weights)
    assert recorder.num_replayed == 4


def test_a_pass_forward_that_nobody_follows_is_forgotten() -> None:
    recorder = Repeats()
    make, weights = with_graphs(recorder)
    make(inputs(2), weights)
    assert_right(make, inputs(3), weights)
    assert recorder.num_replayed == 3


def test_outputs_outlive_the_next_pass() -> None:
    make, weights = with_graphs(Repeats())
    kept = make(inputs(2), weights)
    gradients(kept, weights)
    assert_right(make, inputs(3), weights)
    for one, other in zip(kept, function(*inputs(2), *weights), strict=True):
        assert torch.equal(one, other)


def test_a_second_pass_backward_is_refused() -> None:
    make, weights = with_graphs(Repeats())
    total = sum(y.sum() for y in make(inputs(2), weights))
    assert isinstance(total, Tensor)
    total.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="--cuda-graphs off"):
        total.backward()  # type: ignore[no-untyped-call]


def test_evaluation_is_computed_without() -> None:
    recorder, weights = Repeats(), parameters()
    make = CapturedFunction(function, recorder)
    with torch.no_grad():
        for _ in range(3):
            make(inputs(1), weights)
            make.capture()
    assert recorder.num_recorded == 0


def test_each_number_format_has_graphs_of_its_own() -> None:
    recorder, weights = Repeats(), parameters()
    make = CapturedFunction(function, recorder)
    for _ in range(4):
        assert_right(make, inputs(1), weights)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert_right(make, inputs(1), weights)
    assert recorder.num_recorded == 4
    assert recorder.num_replayed == 8


class _NotesAutocast(torch.autograd.Function):
    """The identity, which notes in what its passes are computed."""

    noted: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _NotesAutocast.noted.append(torch.is_autocast_enabled("cpu"))
        return gradient


def test_backward_is_captured_without_the_autocast_of_the_pass_forward() -> None:
    weights = parameters()

    def noting(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(_NotesAutocast.apply(y) for y in function(*tensors))  # type: ignore[no-untyped-call]

    make = CapturedFunction(noting, Repeats())
    for number in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = make(inputs(number), weights)
            make.capture()
        gradients(outputs, weights)
    assert _NotesAutocast.noted
    assert not any(_NotesAutocast.noted)


def test_there_are_graphs_of_so_many_kinds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "MOST_KINDS", 2)
    recorder, weights = Repeats(), parameters()
    make = CapturedFunction(function, recorder)
    for number in range(12):
        assert_right(make, inputs(number, rows=2 + number % 3), weights)
    assert recorder.num_recorded == 4


def test_what_cannot_be_captured_is_said_once_and_computed_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder, weights = Repeats(), parameters()

    def fail(_work: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 GiB")

    monkeypatch.setattr(recorder, "record", fail)
    make = [CapturedFunction(function, recorder) for _ in range(2)]
    graphs = Graphs(make, torch.device("cpu"))
    for number in range(4):
        for each in make:
            gradients(each(inputs(number), weights), weights)
        graphs.capture()
    assert not graphs.has_new and graphs.has_given_up
    assert_right(make[1], inputs(1), weights)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "CUDA out of memory. Tried to allocate 2 GiB" in said
    assert "--cuda-graphs off" in said


def test_lengths_are_rounded_up_by_an_eighth_at_most() -> None:
    rounded = {rounded_up(n) for n in range(100, 1601)}
    assert len(rounded) <= 33
    for length in range(1, 3000):
        assert length <= rounded_up(length) <= length * 9 / 8
        assert rounded_up(rounded_up(length)) == rounded_up(length)


def test_graphs_are_captured_at_steps_that_all_ranks_come_to_together() -> None:
    make, weights = CapturedFunction(function, Repeats()), parameters()
    graphs, captured_at = Graphs([make], torch.device("cpu")), []
    for step in range(1, 300):
        gradients(make(inputs(step, rows=2 + step // 40), weights), weights)
        if graphs.is_due() and graphs.has_new:
            captured_at.append(step)
            graphs.capture()
            assert not graphs.has_new
    assert captured_at == [4, 64, 256]  # at step 16 there is nothing new


def test_a_model_without_such_parts_has_nothing_to_capture() -> None:
    graphs = Graphs.of(torch.nn.Linear(2, 2), torch.device("cpu"), Repeats)
    assert not graphs.has_new
    graphs.capture()


def test_graphs_may_wait_for_pauses() -> None:
    graphs = Graphs([], torch.device("cpu"))
    graphs.wait_for_pauses()
    assert not any(graphs.is_due() for _ in range(300))


def test_what_asks_for_no_gradient_at_all_is_computed_without() -> None:
    recorder, weights = Repeats(), parameters()
    make = CapturedFunction(function, recorder)
    for weight in weights:
        weight.requires_grad_(False)
    for number in range(4):
        make(inputs(number, asks=False), weights)
        make.capture()
    assert recorder.num_recorded == 0


def test_gradients_add_up_where_there_were_none() -> None:
    """Autograd must not make a parameter's gradient of a place that the next pass writes over."""
    (make, weights), expected = with_graphs(Repeats()), parameters()
    for number in range(3):
        make(inputs(number), weights)[0].sum().backward()  # type: ignore[no-untyped-call]
        function(*inputs(number), *expected)[0].sum().backward()  # type: ignore[no-untyped-call]
    for one, other in zip(weights, expected, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_is_computed_without(copied: Callable[[Any], Any]) -> None:
    model = LstmAcousticModel(3, 4, LstmConfig(2, 4, bidirectional=True))
    Graphs.of(model, torch.device("cpu"), Repeats)
    features, lengths = torch.randn(2, 5, 3), torch.tensor([5, 3])
    other = copied(model)
    assert all(part._captured is None for part in other._parts)
    assert all(part._captured is not None for part in model._parts)
    assert torch.equal(other._train_on_gpu(features, lengths), model._train_on_gpu(features, lengths))
    decoder = Tacotron(5, 6, 9, TINY)
    Graphs.of(decoder, torch.device("cpu"), Repeats)
    assert decoder.decoder._captured is not None
    assert copied(decoder).decoder._captured is None


def test_graphs_that_are_closed_are_gone() -> None:
    recorder, weights = Repeats(), parameters()
    make = CapturedFunction(function, recorder)
    graphs = Graphs([make], torch.device("cpu"))
    for number in range(3):
        gradients(make(inputs(number), weights), weights)
        graphs.capture()
    assert not graphs.has_given_up
    graphs.close()
    replayed = recorder.num_replayed
    for number in range(3):
        assert_right(make, inputs(number), weights)
    assert recorder.num_replayed == replayed > 0


def test_without_room_no_more_graphs_are_captured() -> None:
    recorder, weights = Repeats(), parameters()
    make = CapturedFunction(function, recorder)
    for number in range(8):
        gradients(make(inputs(number, rows=2 + number % 2), weights), weights)
        make.capture(lambda: recorder.num_recorded == 0)
    assert recorder.num_recorded == 2
    assert make.has_new


def test_kinds_for_which_there_is_no_room_are_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(captured, "_memory_left", lambda device: lambda: False)
    weights = parameters()
    make = [CapturedFunction(function, Repeats()) for _ in range(2)]
    graphs = Graphs(make, torch.device("cpu"))
    for number in range(4):
        for each in make:
            gradients(each(inputs(number), weights), weights)
        graphs.capture()
    assert not graphs.has_given_up
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "not enough GPU memory for more CUDA graphs" in said
