"""The acoustic model: its sizes, and three ways through it that are one function."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Event

import pytest
import torch
from torch import Tensor, nn

from speechdp.data.loading.batch import IGNORED_TARGET, Batch
from speechdp.errors import ConfigError
from speechdp.models.captured import CudaRecorder, Graphs, _recording_stream
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig, unless_even
from speechdp.models.precision import Precision, PrecisionName
from speechdp.models.presets import PRESETS
from speechdp.tasks.acoustic import AcousticTask
from tests.helpers.repeats import Repeats

TOLERANCE = 1e-12
FEATURES, CLASSES = 5, 7
LENGTHS = [9, 4, 1, 9, 6]
CONFIGS = {
    "LSTM": LstmConfig(2, 6, False),
    "BLSTM": LstmConfig(3, 6, True),
    "BLSTM with bottleneck": LstmConfig(2, 6, True, bottleneck=3),
    "LSTM with projection": LstmConfig(2, 6, False, projection=4),
    "BLSTM with projection": LstmConfig(2, 6, True, projection=4, bottleneck=3),
    "LSTM, two frames a step": LstmConfig(2, 6, False, subsampling=2),
    "BLSTM with bottleneck, four frames a step": LstmConfig(2, 6, True, bottleneck=3, subsampling=4),
}
Way = Callable[[LstmAcousticModel, Tensor, Tensor], Tensor]


def make_model(config: LstmConfig) -> LstmAcousticModel:
    torch.manual_seed(3)
    return LstmAcousticModel(FEATURES, CLASSES, config).double()


def make_segments() -> tuple[Tensor, Tensor]:
    """Return features (B, T, F) with noise for padding, which must reach nothing, and lengths (B,)."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(len(LENGTHS), max(LENGTHS), FEATURES, generator=generator, dtype=torch.float64)
    return features, torch.tensor(LENGTHS)


def as_called(model: LstmAcousticModel, features: Tensor, lengths: Tensor) -> Tensor:
    return model(features, lengths)


def flagged(model: LstmAcousticModel, features: Tensor, lengths: Tensor) -> Tensor:
    """What a GPU does with unequal lengths."""
    if model.config.bidirectional:
        model._recur = model._encode_flagged  # type: ignore[method-assign]
    return model(features, lengths)


def on_gpu(model: LstmAcousticModel, features: Tensor, lengths: Tensor) -> Tensor:
    """What a GPU does in training, here without one."""
    model._recur = partial(_recur_as_on_gpu, model)  # type: ignore[method-assign]
    return model(features, lengths)


def _recur_as_on_gpu(model: LstmAcousticModel, features: Tensor, lengths: Tensor) -> Tensor:
    return model._train_on_gpu(features, unless_even(lengths, features.shape[1]))


def by_graphs(model: LstmAcousticModel, features: Tensor, lengths: Tensor) -> Tensor:
    """Likewise, by graphs from the third pass on."""
    graphs = Graphs.of(model, torch.device("cpu"), Repeats)
    for _ in range(2):
        gradients(model, on_gpu(model, features, lengths), lengths)
    assert graphs.has_new
    graphs.capture()
    return on_gpu(model, features, lengths)


def one_by_one(model: LstmAcousticModel, features: Tensor, lengths: Tensor) -> Tensor:
    """Each segment alone, in torch's own order of operations: the definition."""
    logits = features.new_zeros(*features.shape[:2], CLASSES)
    for row, length in enumerate(lengths.tolist()):
        steps = in_steps(features[row, :length], model.config.subsampling)
        encoded = model.bottleneck(model.lstm(steps.unsqueeze(0))[0])  # (1, S, K x encoded)
        vectors = encoded.reshape(-1, model.output.in_features)  # (S x K, encoded)
        logits[row, :length] = model.output(vectors)[:length]
    return logits


def in_steps(frames: Tensor, size: int) -> Tensor:
    """Put `size` frames (T, F) side by side; the last one stands again where there are too few."""
    while len(frames) % size:
        frames = torch.cat([frames, frames[-1:]])
    return torch.stack([frames[n : n + size].flatten() for n in range(0, len(frames), size)])


def gradients(model: LstmAcousticModel, logits: Tensor, lengths: Tensor) -> list[Tensor]:
    model.zero_grad()
    real = torch.arange(logits.shape[1]) < lengths.unsqueeze(1)
    weights = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
    (logits[real].tanh() * weights).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("way", [as_called, flagged, on_gpu, by_graphs])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_every_way_equals_each_segment_alone(config: LstmConfig, way: Way) -> None:
    model = make_model(config)
    features, lengths = make_segments()
    expected = one_by_one(model, features, lengths)
    logits = way(model, features, lengths)
    assert logits.shape == (len(LENGTHS), max(LENGTHS), CLASSES)
    for row, length in enumerate(LENGTHS):
        assert (logits[row, :length] - expected[row, :length]).abs().max() <= TOLERANCE
    mine = gradients(model, logits, lengths)
    theirs = gradients(model, one_by_one(model, features, lengths), lengths)
    assert len(mine) == len(theirs) == len(list(model.parameters()))
    for one, other in zip(mine, theirs, strict=True):
        assert (one - other).abs().max() <= TOLERANCE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("error:RNN module weights")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_gpu_gives_what_a_cpu_gives(config: LstmConfig) -> None:
    model = make_model(config)
    features, lengths = make_segments()
    logits = model(features, lengths)
    expected = gradients(model, logits, lengths)
    found = model.cuda()(features.cuda(), lengths).cpu()
    for row, length in enumerate(LENGTHS):
        assert (found[row, :length] - logits[row, :length]).abs().max() <= 1e-9
    for one, other in zip(gradients(model, found, lengths), expected, strict=True):
        assert (one.cpu() - other).abs().max() <= 1e-9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("error:RNN module weights")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_graphs_give_on_a_gpu_what_they_are_captured_from(
    config: LstmConfig, precision: PrecisionName, capsys: pytest.CaptureFixture[str]
) -> None:
    if config.projection and precision != "fp32":
        pytest.skip("cuDNN's projections are not computed by autocast")
    device = torch.device("cuda")
    model = make_model(replace(config, dropout=0.3)).float().to(device)
    allocating = Event()
    with ThreadPoolExecutor(1) as pool:  # as the loader's does, while graphs are captured
        loader = pool.submit(allocate, allocating)
        try:
            check_graphs(model, device, precision)
        finally:
            allocating.set()
        loader.result()
    assert not capsys.readouterr().err


def check_graphs(model: LstmAcousticModel, device: torch.device, precision: PrecisionName) -> None:
    graphs = Graphs.of(model, device, lambda: CudaRecorder(device))
    passes: dict[int, list[list[Tensor]]] = {1: [], 2: [], 3: []}
    for turn in range(12):
        number = 1 + turn % 3
        features, lengths = make_segments()
        features, lengths = features[number - 1 :].float().to(device), lengths[number - 1 :]
        if number == 3:
            lengths = torch.full_like(lengths, features.shape[1])
        torch.manual_seed(number)
        with Precision(precision, device).computing():
            logits = model(features, lengths)
        passes[number].append([logits.detach().clone(), *gradients(model, logits.double().cpu(), lengths)])
        graphs.capture()
    for first, *others in passes.values():
        for other in others:
            assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))
    assert all(
        part._captured and None not in part._captured._passes.values() and len(part._captured._passes) == 3
        for part in model._parts
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_graphs_are_captured_again_for_parameters_that_have_moved() -> None:
    device = torch.device("cuda")
    model = make_model(CONFIGS["BLSTM"]).to(device)
    graphs = Graphs.of(model, device, lambda: CudaRecorder(device))
    streams = [torch.cuda.Stream(device) for _ in range(40)]  # none is the one that records
    assert _recording_stream(device) not in streams
    features, lengths = make_segments()
    for turn in range(8):
        if turn == 4:
            for parameter in model.parameters():
                parameter.data = parameter.detach().clone()
        gradients(model, model(features.to(device), lengths).cpu(), lengths)
        graphs.capture()
    assert all(part._captured and len(part._captured._passes) == 1 for part in model._parts)


def allocate(is_over: Event) -> None:
    while not is_over.wait(0.001):
        torch.empty(2**22, device="cuda", pin_memory=False).zero_()
        torch.cuda.empty_cache()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_segments_of_one_length_take_the_short_way_to_the_same_end(config: LstmConfig) -> None:
    model = make_model(config)
    features, _ = make_segments()
    lengths = torch.full((len(LENGTHS),), features.shape[1])
    logits = model(features, lengths)
    assert (logits - one_by_one(model, features, lengths)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_without_lengths_it_is_recorded_for_any_number_of_frames(config: LstmConfig) -> None:
    model = make_model(config).eval()
    features, _ = make_segments()
    recorded = torch.jit.trace(model, (features[:1],), check_trace=False)
    for others in (features[:1, :1], features[:2, :4], torch.cat([features, features], 1)):
        lengths = torch.full(others.shape[:1], others.shape[1])
        assert torch.equal(recorded(others), model(others))
        assert torch.equal(model(others), model(others, lengths))


@pytest.mark.parametrize("way", [as_called, flagged, on_gpu, by_graphs])
@pytest.mark.parametrize("name", ["BLSTM", "BLSTM with bottleneck, four frames a step"])
def test_padding_reaches_no_frame(name: str, way: Way) -> None:
    model = make_model(CONFIGS[name])
    features, lengths = make_segments()
    other = features.clone()
    for row, length in enumerate(LENGTHS):
        other[row, length:] = 1000.0
    one, two = way(model, features, lengths), way(model, other, lengths)
    for row, length in enumerate(LENGTHS):
        assert torch.equal(one[row, :length], two[row, :length])


def test_dropout_is_between_layers_and_before_the_output_and_only_in_training() -> None:
    model = make_model(LstmConfig(2, 6, True, dropout=0.5))
    features, lengths = make_segments()
    torch.manual_seed(0)
    one, two = model(features, lengths), model(features, lengths)
    assert not torch.equal(one, two)
    model.eval()
    assert torch.equal(model(features, lengths), model(features, lengths))
    model.train()
    model.dropout.p = 0.0  # what is left is between the layers
    assert not torch.equal(model(features, lengths), model(features, lengths))


def test_dropout_of_a_single_layer_gives_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    make_model(LstmConfig(1, 6, True, dropout=0.5))
    assert not recwarn.list


# --- sizes --------------------------------------------------------------------------------------------


def test_swb2000_has_the_parameters_of_the_paper() -> None:
    """Zhang et al., ICASSP 2019: 43.15 M with 260 inputs and 32,000 classes."""
    with torch.device("meta"):
        model = LstmAcousticModel(260, 32_000, PRESETS["swb2000"].model)
    assert sum(p.numel() for p in model.parameters()) == 43_154_944
    assert PRESETS["swb2000"].chunk_frames == 21


def test_kaldi_preset_is_4_times_800() -> None:
    preset = PRESETS["kaldi-4x800"]
    with torch.device("meta"):
        model = LstmAcousticModel(40, 3000, preset.model)
    first, others = 4 * 800 * (40 + 800 + 2), 4 * 800 * (800 + 800 + 2)
    assert sum(p.numel() for p in model.parameters()) == first + 3 * others + 800 * 3000 + 3000
    assert (preset.chunk_frames, preset.left_context) == (20, 40)


def test_initial_biases_let_the_cells_remember() -> None:
    cells = 6
    model = make_model(LstmConfig(2, cells, True, bottleneck=3))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            bound = (6 / sum(parameter.shape)) ** 0.5
            assert 0 < parameter.abs().max() <= bound
        elif ".bias_ih" in name:
            assert parameter.tolist() == [0.0] * cells + [1.0] * cells + [0.0] * 2 * cells
        else:
            assert not parameter.any()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"layers": 0}, "--layers 0: must be at least 1"),
        ({"cells": 0}, "--cells 0: must be at least 1"),
        ({"subsampling": 0}, "--subsampling 0: must be at least 1"),
        ({"layers": -1}, "--layers -1: must not be negative"),
        ({"dropout": 1.0}, "--dropout 1.0: must be less than 1"),
        ({"dropout": float("nan")}, "--dropout nan: must be less than 1"),
        ({"projection": 8}, "--projection 8: must be smaller than --cells 8"),
        ({"bottleneck": -2}, "--bottleneck -2: must not be negative"),
    ],
)
def test_impossible_sizes_are_named(sizes: dict[str, float], message: str) -> None:
    values: dict[str, object] = {"layers": 1, "cells": 8, "bidirectional": True} | sizes
    with pytest.raises(ConfigError, match=message):
        LstmConfig(**values)  # type: ignore[arg-type]


# --- the task -----------------------------------------------------------------------------------------


def batch_with_context() -> Batch:
    features, lengths = make_segments()
    targets = torch.randint(CLASSES, features.shape[:2], generator=torch.Generator().manual_seed(2))
    for row, length in enumerate(LENGTHS):
        targets[row, length:] = IGNORED_TARGET
        targets[row, : length // 3] = IGNORED_TARGET  # left context
    return Batch(features, targets, lengths, int((targets != IGNORED_TARGET).sum()))


def test_loss_is_the_sum_over_the_frames_to_be_learnt() -> None:
    model, batch = make_model(CONFIGS["BLSTM"]), batch_with_context()
    loss = AcousticTask().loss(model, batch)
    logits = one_by_one(model, batch.features, batch.lengths)
    expected = nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
    )
    assert abs(loss.total.item() - expected.item()) <= 1e-10
    assert loss.num_frames == batch.num_frames == sum(n - n // 3 for n in LENGTHS)


def test_scores_are_sums_of_log_probabilities_and_of_frames_classified_as_aligned() -> None:
    model, batch = make_model(CONFIGS["BLSTM"]).eval(), batch_with_context()
    scores = AcousticTask().score(model, batch)
    log_probs = one_by_one(model, batch.features, batch.lengths).log_softmax(-1)
    learnt = batch.targets != IGNORED_TARGET
    targets = batch.targets[learnt]
    chosen = log_probs[learnt].gather(1, targets.unsqueeze(1))
    assert abs(scores.sums["log_prob"] - chosen.sum().item()) <= 1e-10
    assert scores.sums["frame_accuracy"] == int((log_probs[learnt].argmax(1) == targets).sum())
    assert scores.num_frames == batch.num_frames
    assert scores.sums["log_prob"] == pytest.approx(-AcousticTask().loss(model, batch).total.item())
