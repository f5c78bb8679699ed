"""Forward and backward of acoustic models: ours beside nn.LSTM packed and padded, and subsampled.

    python benchmarks/models/lstm.py [--rounds 5] [--seconds 2] [--batches 6,16,32] [--frames 100,300]
        [--device cuda] [--precision bf16]

On one core, or on a GPU.

Models: the preset `tiny` (2 x BLSTM-128), and 4 x BLSTM-320.  Batches are padded; lengths are drawn evenly
between half of the longest and the longest, and the same for all contenders.  All end in the same output
layer of 440 classes, and a sum of cross-entropies over the frames that are not padding.

- ours: LstmAcousticModel
- packed: its nn.LSTM over packed segments, the usual way
- padded: its nn.LSTM over padded segments, whose backward direction begins in the padding: another function
- subsampled: LstmAcousticModel with `--subsampling 3`: another model, with the same inputs and outputs
- graphs: on a GPU, LstmAcousticModel as `train` has it, by CUDA graphs
- fp32: LstmAcousticModel in float32, where --precision computes the others in another format

Contenders take turns in one process; a ratio is taken within a round.  Last line: JSON, for each ratio the
lowest median over models, batches and lengths: {"ours_vs_packed", "ours_vs_padded", "subsampled_vs_ours"},
on a GPU "graphs_vs_ours" and "graphs_vs_packed", with --precision bf16 or fp16 "ours_vs_fp32", too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.strategies.paired import compare, run_rounds
from speechdp.models.captured import CudaRecorder, Graphs
from speechdp.models.lstm_am import LstmAcousticModel, LstmConfig
from speechdp.models.precision import Precision
from speechdp.models.presets import LSTM_TINY

MODELS = {"2x128": replace(LSTM_TINY, dropout=0.0), "4x320": LstmConfig(4, 320, bidirectional=True)}
FEATURES, CLASSES, SUBSAMPLING = 40, 440, 3
RATIOS = (("ours", "packed"), ("ours", "padded"), ("subsampled", "ours"))
GPU_RATIOS = (("graphs", "ours"), ("graphs", "packed"))
Forward = Callable[[Tensor, Tensor], Tensor]


def packed(model: LstmAcousticModel) -> Forward:
    """Return logits (B, T, C) of (B, T, F) by nn.LSTM over packed segments."""

    def forward(features: Tensor, lengths: Tensor) -> Tensor:
        rows = pack_padded_sequence(features, lengths, batch_first=True, enforce_sorted=False)
        hidden = pad_packed_sequence(model.lstm(rows)[0], batch_first=True, total_length=features.shape[1])[0]
        logits: Tensor = model.output(hidden)
        return logits

    return forward


def padded(model: LstmAcousticModel) -> Forward:
    """Return logits (B, T, C) of (B, T, F) by nn.LSTM over all frames, padding included."""
    return lambda features, lengths: model.output(model.lstm(features)[0])


def make_batch(size: int, frames: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return features (B, T, F), lengths (B,) and targets (B, T), -100 in the padding."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(frames // 2, frames + 1, (size,), generator=generator)
    lengths[0] = frames
    features = torch.randn(size, frames, FEATURES, generator=generator)
    targets = torch.randint(CLASSES, (size, frames), generator=generator)
    targets[torch.arange(frames) >= lengths.unsqueeze(1)] = -100
    return features, lengths, targets


def rate(
    forward: Forward, batch: tuple[Tensor, Tensor, Tensor], seconds: float, precision: Precision
) -> float:
    """Return frames/s of forward and backward, padding not counted."""
    features, lengths, targets = batch
    steps, began = 0, time.perf_counter()
    while steps == 0 or time.perf_counter() - began < seconds:
        with precision.computing():
            logits = forward(features, lengths).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum")
        loss.backward()
        steps += 1
        if features.is_cuda and steps % 5 == 1:  # the host is not to run far ahead
            torch.cuda.synchronize()
    if features.is_cuda:
        torch.cuda.synchronize()
    return steps * int(lengths.sum()) / (time.perf_counter() - began)


def measure(config: LstmConfig, size: int, frames: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the median ratios for a model and a form of batch."""
    torch.manual_seed(1)
    device = torch.device(options.device)
    precision = Precision(options.precision, device)
    model = LstmAcousticModel(FEATURES, CLASSES, config).to(device)
    subsampled = LstmAcousticModel(FEATURES, CLASSES, replace(config, subsampling=SUBSAMPLING)).to(device)
    ways: dict[str, Any] = {
        "ours": model,
        "packed": packed(model),
        "padded": padded(model),
        "subsampled": subsampled,
    }
    precisions = dict.fromkeys(ways, precision)
    ratios, graphs = RATIOS, Graphs([], device)
    if device.type == "cuda":
        ways["graphs"] = LstmAcousticModel(FEATURES, CLASSES, config).to(device)
        graphs = Graphs.of(ways["graphs"], device, lambda: CudaRecorder(device))
        precisions["graphs"] = precision
        ratios += GPU_RATIOS
    if options.precision != "fp32":
        ways["fp32"], precisions["fp32"] = model, Precision("fp32", device)
        ratios += (("ours", "fp32"),)
    features, lengths, targets = make_batch(size, frames)
    batch = features.to(device), lengths, targets.to(device)

    def timed(name: str) -> float:
        return rate(ways[name], batch, options.seconds, precisions[name])

    for name, forward in ways.items():
        for _ in range(3):
            rate(forward, batch, 0, precisions[name])  # makes oneDNN's kernels
            graphs.capture()
    rates = run_rounds(list(ways), timed, options.rounds, "frames/s")
    return {f"{one}_vs_{other}": compare(rates, one, other) for one, other in ratios}


def main() -> None:
    """Measure, print a ratio a line and JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--batches", default="6,16,32")
    parser.add_argument("--frames", default="100,300")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name, config in MODELS.items():
        for size in map(int, options.batches.split(",")):
            for frames in map(int, options.frames.split(",")):
                print(f"{name}, {size} segments of up to {frames} frames", flush=True)
                found.append(measure(config, size, frames, options))
    print(json.dumps({key: min(ratios[key] for ratios in found) for key in found[0]}))


if __name__ == "__main__":
    main()
