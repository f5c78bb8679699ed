"""The synthesis loss by hand: sums over unpadded frames, whatever a batch is padded to."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from speechdp.data.loading.batch import IGNORED_TARGET, Batch
from speechdp.models.tacotron.config import TacotronConfig
from speechdp.models.tacotron.model import Tacotron, TacotronOutput
from speechdp.tasks.synthesis import SynthesisTask
from speechdp.tasks.synthesis_losses import GUIDE_WIDTH, STOP_WEIGHT, synthesis_losses

MEL, LINEAR, SYMBOLS = 3, 5, 7
CONFIG = TacotronConfig(
    embedding_dim=6,
    prenet_hidden=5,
    prenet_dim=4,
    width=4,
    encoder_bank=2,
    postproc_bank=2,
    postproc_projection=4,
    highways=1,
    attention_dim=6,
    decoder_dim=6,
    reduction=2,
)


def make_model() -> Tacotron:
    torch.manual_seed(3)
    return Tacotron(SYMBOLS, MEL, LINEAR, CONFIG).eval()


def make_batch(lengths: list[int], num_symbols: list[int], *, spare: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(5)
    longest, most = max(lengths) + spare, max(num_symbols) + spare
    features = torch.zeros(len(lengths), longest, MEL + LINEAR)
    targets = torch.full((len(lengths), most), IGNORED_TARGET)
    for row, (frames, symbols) in enumerate(zip(lengths, num_symbols, strict=True)):
        features[row, :frames] = torch.rand(frames, MEL + LINEAR, generator=generator)
        targets[row, :symbols] = torch.randint(SYMBOLS, (symbols,), generator=generator)
    return Batch(features, targets, torch.tensor(lengths), sum(lengths))


def run(model: Tacotron, batch: Batch) -> TacotronOutput:
    output: TacotronOutput = model(batch.targets, batch.features[:, :, :MEL], batch.lengths)
    return output


def test_parts_by_hand() -> None:
    model, batch = make_model(), make_batch([5, 4, 1], [3, 2, 4])
    output = run(model, batch)
    losses = synthesis_losses(output, batch, model)
    mel = linear = stop = guide = 0.0
    for row, frames in enumerate(batch.lengths.tolist()):
        symbols = int((batch.targets[row] >= 0).sum())
        steps = math.ceil(frames / 2)
        for t in range(frames):
            mel += (output.mel[row, t] - batch.features[row, t, :MEL]).abs().mean().item()
            linear += (output.linear[row, t] - batch.features[row, t, MEL:]).abs().mean().item()
            step = t // 2
            probability = torch.sigmoid(output.stop_logits[row, step]).item()
            last = step == steps - 1
            stop -= STOP_WEIGHT * math.log(probability) if last else math.log(1 - probability)
            for s in range(symbols):
                far = 1 - math.exp(-((step / steps - s / symbols) ** 2) / (2 * GUIDE_WIDTH**2))
                guide += far * output.attention[row, step, s].item()
    assert losses.mel.item() == pytest.approx(mel, rel=1e-5)
    assert losses.linear.item() == pytest.approx(linear, rel=1e-5)
    assert losses.stop.item() == pytest.approx(stop, rel=1e-5)
    assert losses.guide.item() == pytest.approx(guide, rel=1e-5)


def gradients(model: Tacotron, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def test_more_padding_changes_nothing() -> None:
    model, task = make_model(), SynthesisTask(guided_attention=0.5)
    small, padded = make_batch([5, 4, 1], [3, 2, 4]), make_batch([5, 4, 1], [3, 2, 4], spare=3)
    losses = [task.loss(model, batch).total for batch in (small, padded)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    first, second = (gradients(model, loss) for loss in losses)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


def test_a_batch_is_the_sum_of_its_utterances() -> None:
    model, task = make_model(), SynthesisTask(guided_attention=0.5)
    batch = make_batch([5, 4, 1], [3, 2, 4])
    parts = [
        Batch(
            batch.features[row : row + 1, :frames],
            batch.targets[row : row + 1, : int((batch.targets[row] >= 0).sum())],
            batch.lengths[row : row + 1],
            frames,
        )
        for row, frames in enumerate(batch.lengths.tolist())
    ]
    total = sum(task.loss(model, part).total.item() for part in parts)
    assert task.loss(model, batch).total.item() == pytest.approx(total, rel=1e-5)
    scores = [task.score(model, part) for part in parts]
    whole = task.score(model, batch)
    for metric in task.metrics:
        expected = sum(score.sums[metric.key] for score in scores)
        assert whole.sums[metric.key] == pytest.approx(expected, rel=1e-5)
    assert whole.num_frames == sum(score.num_frames for score in scores) == 10


def test_scores_are_the_errors_and_the_attention_s_maximum() -> None:
    model, batch = make_model(), make_batch([6, 4], [3, 3])
    output, scores = run(model, batch), SynthesisTask().score(model, batch)
    losses = synthesis_losses(output, batch, model)
    assert scores.sums["l1_error"] == pytest.approx((losses.mel + losses.linear).item())
    focus = output.attention.amax(2)  # steps of 2 frames
    maximum = scores.sums["attention_maximum"]
    assert maximum == pytest.approx((2 * (focus[0].sum() + focus[1, :2].sum())).item())
    assert 1 / 3 <= maximum / scores.num_frames <= 1


def test_the_guide_counts_only_with_a_weight() -> None:
    model, batch = make_model(), make_batch([5, 4], [3, 2])
    losses = synthesis_losses(run(model, batch), batch, model)
    plain, guided = (SynthesisTask(weight).loss(model, batch).total.item() for weight in (0.0, 2.0))
    assert guided - plain == pytest.approx(2 * losses.guide.item(), rel=1e-4)
