"""Tacotron: shapes, padding that reaches nothing, two decoders that agree, and free running."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from speechdp.errors import ConfigError
from speechdp.models.presets import PRESETS
from speechdp.models.tacotron.config import PAPER, TINY, TacotronConfig
from speechdp.models.tacotron.model import Tacotron, TacotronOutput
from speechdp.models.without_weights import without_weights

SIZES = TacotronConfig(
    embedding_dim=12,
    prenet_hidden=10,
    prenet_dim=8,
    width=6,
    encoder_bank=4,
    postproc_bank=3,
    postproc_projection=9,
    highways=2,
    attention_dim=11,
    decoder_dim=7,
    reduction=3,
)
NUM_SYMBOLS, MEL_DIM, LINEAR_DIM = 9, 5, 13


def make_model(config: TacotronConfig = SIZES) -> Tacotron:
    torch.manual_seed(0)
    return Tacotron(NUM_SYMBOLS, MEL_DIM, LINEAR_DIM, config)


def make_batch(lengths: list[int], text_lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    symbols = torch.randint(0, NUM_SYMBOLS, (len(lengths), max(text_lengths)))
    mel = torch.rand(len(lengths), max(lengths), MEL_DIM)
    for row, (length, text_length) in enumerate(zip(lengths, text_lengths, strict=True)):
        symbols[row, text_length:] = -1
        mel[row, length:] = 0.0
    return symbols, mel, torch.tensor(lengths)


def test_shapes_zeros_behind_each_end_and_attention_on_own_symbols() -> None:
    symbols, mel, lengths = make_batch([14, 7, 10], [6, 3, 5])
    output = make_model()(symbols, mel, lengths)
    assert output.mel.shape == (3, 14, MEL_DIM)
    assert output.linear.shape == (3, 14, LINEAR_DIM)
    assert output.stop_logits.shape == (3, 5)
    assert output.attention.shape == (3, 5, 6)
    for row, length in enumerate([14, 7, 10]):
        assert bool((output.mel[row, length:] == 0).all())
        assert bool((output.linear[row, length:] == 0).all())
        assert bool((output.linear[row, :length] != 0).any(dim=1).all())
    torch.testing.assert_close(output.attention.sum(dim=2), torch.ones(3, 5))
    assert bool((output.attention[1, :, 3:] == 0).all())


def test_without_weights_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(tensor: Tensor) -> Tensor:
        raise AssertionError("drawn for no memory")

    monkeypatch.setattr("torch.nn.init.orthogonal_", draw)
    with without_weights():
        assert make_model().encoder.embedding.weight.is_meta


def test_in_eval_mode_an_utterance_does_not_depend_on_its_batch() -> None:
    symbols, mel, lengths = make_batch([8, 14], [4, 7])
    model = make_model()
    model(symbols, mel, lengths)  # running statistics that are not the first ones
    model.eval()
    together = model(symbols, mel, lengths)
    alone = model(symbols[:1, :4], mel[:1, :8], lengths[:1])
    torch.testing.assert_close(together.mel[:1, :8], alone.mel)
    torch.testing.assert_close(together.linear[:1, :8], alone.linear)
    torch.testing.assert_close(together.stop_logits[:1, :3], alone.stop_logits)
    torch.testing.assert_close(together.attention[:1, :3, :4], alone.attention)


def test_more_padding_does_not_change_a_training_step() -> None:
    # In double precision: gradients cancel, and by how much float32 sums differ depends on the CPU.
    symbols, mel, lengths = make_batch([8, 12], [4, 6])
    mel = mel.double()
    config = replace(SIZES, dropout=0.0)
    wider = torch.nn.functional.pad(symbols, (0, 3), value=-1)
    longer = torch.nn.functional.pad(mel, (0, 0, 0, 6))
    plain, padded = make_model(config).double(), make_model(config).double()
    _loss(plain(symbols, mel, lengths)).backward()
    _loss(padded(wider, longer, lengths)).backward()
    for name, parameter in plain.named_parameters():
        if name.startswith("decoder.stop"):
            continue  # stop logits behind an utterance's end are the task's to mask
        torch.testing.assert_close(parameter.grad, padded.get_parameter(name).grad, msg=name)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(buffer, padded.get_buffer(name), msg=name)


def _loss(output: TacotronOutput) -> Tensor:
    return output.mel.square().sum() + output.linear.square().sum()


@pytest.mark.parametrize("reduction", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_fast_and_loop_decoder_agree(reduction: int, dropout: float) -> None:
    batch = make_batch([14, 7, 10], [6, 3, 5])
    outputs, gradients = [], []
    states = []
    for decoder in ("fast", "loop"):
        config = replace(SIZES, decoder=decoder, reduction=reduction, dropout=dropout)  # type: ignore[arg-type]
        model = make_model(config)
        states.append(model.state_dict())
        torch.manual_seed(5)
        output = model(*batch)
        (_loss(output) + output.stop_logits.sum() + output.attention.square().sum()).backward()
        outputs.append(output)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert states[0].keys() == states[1].keys()
    for name in ("mel", "linear", "stop_logits", "attention"):
        torch.testing.assert_close(
            getattr(outputs[0], name), getattr(outputs[1], name), atol=1e-5, rtol=1e-5, msg=name
        )
    for name, gradient in gradients[0].items():
        assert gradient is not None, name
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-4, rtol=1e-3, msg=name)


def test_every_frame_is_heard_only_by_later_groups() -> None:
    symbols, mel, lengths = make_batch([12], [4])
    model = make_model().eval()
    before = model(symbols, mel, lengths).mel
    mel[0, 5] += 1.0  # the last frame of the second group of three
    after = model(symbols, mel, lengths).mel
    changed = (before != after).any(dim=2)[0].tolist()
    assert changed == [False] * 6 + [True] * 6
    mel[0, 4] += 1.0  # inside a group: never heard
    torch.testing.assert_close(model(symbols, mel, lengths).mel, after)


def test_free_running_is_what_teaching_with_its_own_frames_gives() -> None:
    symbols, _, _ = make_batch([5, 5], [6, 3])
    model = make_model().eval()
    model.decoder.stop.bias.data.fill_(-50.0)
    free = model.generate(symbols, max_frames=13)
    assert free.lengths.tolist() == [13, 13]
    assert not bool(free.stopped.any())
    taught = model(symbols, free.mel, free.lengths)
    torch.testing.assert_close(free.mel, taught.mel, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(free.linear, taught.linear, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(free.attention, taught.attention, atol=1e-5, rtol=1e-5)


def test_each_utterance_stops_by_itself_and_alone_says_the_same() -> None:
    symbols, _, _ = make_batch([5, 5, 5], [6, 3, 5])
    model = make_model().eval()
    model.decoder.stop.bias.data.fill_(-50.0)
    logits = model(symbols, *_taught_frames(model, symbols)).stop_logits + 50.0  # (B, N)
    # A bias at which the utterances stop at different steps, if any two ever do.
    threshold = logits.max(dim=1).values.min().item() - 1e-4
    model.decoder.stop.bias.data.fill_(-threshold)
    expected = [int((row > threshold).nonzero()[0]) + 1 for row in logits]
    assert len(set(expected)) > 1, "a test in which all stop together shows little"
    together = model.generate(symbols, max_frames=60)
    assert together.lengths.tolist() == [3 * steps for steps in expected]
    assert bool(together.stopped.all())
    for row, steps in enumerate(expected):
        assert bool((together.mel[row, 3 * steps :] == 0).all())
        assert bool((together.attention[row, steps:] == 0).all())
        alone = model.generate(symbols[row : row + 1], max_frames=60)
        torch.testing.assert_close(together.linear[row : row + 1, : 3 * steps], alone.linear)


def _taught_frames(model: Tacotron, symbols: Tensor) -> tuple[Tensor, Tensor]:
    free = model.generate(symbols, max_frames=60)
    return free.mel, free.lengths


def test_generating_is_deterministic_unless_dropout_is_asked_for() -> None:
    symbols, _, _ = make_batch([5, 5], [6, 3])
    model = make_model().eval()
    plain = [model.generate(symbols, max_frames=12).linear for _ in range(2)]
    torch.testing.assert_close(plain[0], plain[1], atol=0, rtol=0)
    varied = [model.generate(symbols, max_frames=12, dropout=True).linear for _ in range(2)]
    assert varied[0].shape != varied[1].shape or not torch.equal(varied[0], varied[1])


def test_the_paper_sizes() -> None:
    model = Tacotron(60, 80, 1025, PAPER)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["encoder.embedding.weight"] == (60, 256)
    assert shapes["encoder.prenet.layer_1.weight"] == (256, 256)
    assert shapes["encoder.prenet.layer_2.weight"] == (128, 256)
    assert [shapes[f"encoder.cbhg.bank.{k}.weight"] for k in (0, 15)] == [(128, 128, 1), (128, 128, 16)]
    assert "encoder.cbhg.bank.16.weight" not in shapes
    assert shapes["encoder.cbhg.project_1.weight"] == (128, 16 * 128, 3)
    assert shapes["encoder.cbhg.project_2.weight"] == (128, 128, 3)
    assert shapes["decoder.attention_gru.weight_ih"] == (3 * 256, 128 + 256)
    assert shapes["decoder.residual_2.weight_hh"] == (3 * 256, 256)
    assert shapes["decoder.mel.weight"] == (2 * 80, 256)
    assert shapes["postproc.cbhg.bank.7.weight"] == (128, 80, 8)
    assert shapes["postproc.cbhg.project_1.weight"] == (256, 8 * 128, 3)
    assert shapes["postproc.cbhg.project_2.weight"] == (80, 256, 3)
    assert shapes["postproc.linear.weight"] == (1025, 256)
    assert len([name for name in shapes if "highways" in name and name.endswith("weight")]) == 8


def test_a_configuration_survives_a_dictionary_and_mistakes_are_refused() -> None:
    assert TacotronConfig(**asdict(TINY)) == TINY
    assert TINY.num_steps(11) == 6
    with pytest.raises(ConfigError, match="--reduction 0"):
        replace(TINY, reduction=0)
    with pytest.raises(ConfigError, match=r"--dropout 1\.0"):
        replace(TINY, dropout=1.0)
    with pytest.raises(ConfigError, match="--decoder slow"):
        TacotronConfig(decoder="slow")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_frames 0"):
        make_model().generate(torch.zeros(1, 1, dtype=torch.int64), max_frames=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks a GPU whether the host waits for it")
@pytest.mark.parametrize("decoder", ["fast", "loop"])
def test_a_step_on_a_gpu_never_waits_for_it(decoder: str) -> None:
    symbols, mel, lengths = make_batch([14, 7, 10], [6, 3, 5])
    model = make_model(replace(SIZES, decoder=decoder)).cuda()  # type: ignore[arg-type]
    on_device = symbols.cuda(), mel.cuda()
    _loss(model(*on_device, lengths)).backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _loss(model(*on_device, lengths)).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("decoder", ["fast", "loop"])
def test_autocast_to_bfloat16_stays_near(decoder: Literal["fast", "loop"]) -> None:
    torch.manual_seed(0)
    model = Tacotron(9, 6, 8, replace(TINY, decoder=decoder))
    symbols, mel, lengths = torch.randint(9, (3, 7)), torch.rand(3, 20, 6), torch.tensor([20, 11, 5])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(symbols, mel, lengths).linear.sum().backward()
        half = model.eval()(symbols, mel, lengths)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    whole = model(symbols, mel, lengths)
    for name in ("mel", "linear", "attention"):
        torch.testing.assert_close(getattr(half, name).float(), getattr(whole, name), rtol=0.05, atol=0.05)


def test_the_documented_sizes_are_those_of_the_presets() -> None:
    text = (Path(__file__).parents[3] / "docs" / "synthesis.md").read_text()
    rows = {row[1].strip(): [c.strip() for c in row[2:5]] for row in (r.split("|") for r in text.splitlines())
            if len(row) == 6}  # fmt: skip
    columns = [name.strip("`") for name in rows["size"]]
    for place, name in enumerate(columns):
        config = PRESETS[name].model
        assert isinstance(config, TacotronConfig)
        assert rows["attention GRU; residual GRUs"][place] == f"{config.attention_dim}; {config.decoder_dim}"
        assert rows["r (`--reduction`)"][place] == str(config.reduction)
        assert rows["utterances a step and rank"][place] == str(PRESETS[name].batch_size)
        shown, linear = rows["parameters, 40 symbols"][place].removesuffix(" linear)").split(" M (")
        parameters = sum(p.numel() for p in Tacotron(40, 80, int(linear), config).parameters())
        assert f"{parameters / 1e6:.2f}" == shown
