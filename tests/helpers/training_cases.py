"""Runs that must resume bitwise: each strategy, with what else has a state (optimizer, dropout, masks)."""

from __future__ import annotations

from speechdp.data.transforms.preprocess import AugmentOptions
from speechdp.options.batch import BatchOptions
from speechdp.options.optimizer import OptimizerOptions
from speechdp.options.run import ModelOptions, TrainOptions
from speechdp.parallel.registry import StrategyChoice
from tests.helpers.tiny_data import TinySizes

CHECKPOINT_STEPS = 4
#: Two ranks make about a dozen steps an epoch of it.
SIZES = TinySizes(train=40, shards=3)

_MODEL = ModelOptions(layers=1, cells=8, dropout=0.2)
_DEEPER = ModelOptions(layers=2, cells=6, dropout=0.3, bottleneck=5)
_CAUSAL = ModelOptions(layers=2, cells=6, dropout=0.3, bidirectional=False, projection=4)
_BATCHES = BatchOptions(batch_size=2)
_CHUNKS = BatchOptions(batch_size=4, chunk_frames=8, left_context=3)
_SGD = OptimizerOptions("sgd", weight_decay=0.01, warmup_epochs=0.5, anneal_from=1)
_ANNEALED = OptimizerOptions("adam", learning_rate=0.01, warmup_epochs=0.3, anneal_from=1)
_ADAM = OptimizerOptions("adam", learning_rate=0.01)
_ADAMW = OptimizerOptions("adamw", weight_decay=0.01, max_gradient_norm=0.0)


def _options(
    strategy: str, model: ModelOptions, batch: BatchOptions, optimizer: OptimizerOptions
) -> TrainOptions:
    return TrainOptions(
        model,
        batch,
        optimizer,
        augment=AugmentOptions(spec_augment=batch is _CHUNKS),
        strategy=StrategyChoice(strategy),
        epochs=2,
        checkpoint_steps=CHECKPOINT_STEPS,
    )


CASES = {
    "gradients": _options("gradient_averaging", _MODEL, _BATCHES, _ADAM),
    "accumulated": _options("gradient_averaging:every=3,bucket_mib=0.001", _DEEPER, _CHUNKS, _SGD),
    "low-rank": _options("gradient_averaging:compression=powersgd,rank=1", _MODEL, _BATCHES, _ADAM),
    "period-5": _options("model_averaging:period=5", _MODEL, _BATCHES, _ADAM),
    "average-momentum": _options("model_averaging:period=3,momentum=average", _CAUSAL, _CHUNKS, _SGD),
    "kaldi": _options(
        "model_averaging:period=2,first=best,leave_out=0.05,max_change=0.5,combine=4", _MODEL, _BATCHES, _SGD
    ),
    "adaptive": _options(
        "adaptive_averaging:period=3,begin=2,interval=5,learning_rate=scale", _MODEL, _BATCHES, _SGD
    ),
    "quadratic": _options("adaptive_averaging:rule=qsr,alpha=0.025,period=2", _MODEL, _BATCHES, _ANNEALED),
    "block-momentum": _options("bmuf:period=3,nesterov=true", _CAUSAL, _CHUNKS, _SGD),
    "diloco": _options("diloco:period=5", _DEEPER, _BATCHES, _ADAMW),
    "frames": _options("model_averaging:period=150f,momentum=reset", _DEEPER, _BATCHES, _ADAMW),
    # An average is under way at the checkpoint of step 4.
    "delayed": _options("delayed_averaging:period=6,fragments=2,delay=2", _DEEPER, _CHUNKS, _SGD),
    "quantised": _options("bmuf:period=3,compression=int4", _MODEL, _BATCHES, _SGD),
    # An average is under way at the checkpoint of step 4.
    "quantised-delayed": _options(
        "delayed_averaging:period=6,fragments=2,delay=2,compression=int8", _DEEPER, _CHUNKS, _SGD
    ),
    # At the checkpoint of step 4 the nodes' means have been apart for two steps.
    "nodes": _options("slowmo:period=2,between_nodes=6,node_size=1,compression=int8", _MODEL, _BATCHES, _SGD),
    "nodes-gradients": _options("gradient_averaging:between_nodes=3,node_size=1", _MODEL, _BATCHES, _ADAM),
    "decentralised": _options("dpsgd:topology=random", _MODEL, _BATCHES, _ADAM),
    "quantised-neighbours": _options("dpsgd:compression=int8", _DEEPER, _CHUNKS, _SGD),
}

#: The same for a synthesis model, whose batch normalisation keeps statistics on every rank.
SYNTHESIS_CASES = {
    name: TrainOptions(
        ModelOptions(reduction=2),
        _BATCHES,
        OptimizerOptions("adam", learning_rate=0.01),
        strategy=StrategyChoice(strategy),
        task="synthesis",
        epochs=2,
        checkpoint_steps=CHECKPOINT_STEPS,
    )
    for name, strategy in {"gradients": "gradient_averaging", "period-3": "model_averaging:period=3"}.items()
}
