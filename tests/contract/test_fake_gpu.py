"""Training on a GPU that is not there: host and device tensors never meet, copies keep their order.

Tensors there have no data: shapes, devices and types are checked, not values, and not speeds.  Asynchronous
strategies are left to machines with a GPU, and so is what threads do at the same time: here they take turns.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.fake_gpu.cuda import torch_folder
from tests.helpers.own_script import named_nowhere

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA of its own"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
]
REPOSITORY = Path(__file__).resolve().parents[2]
_CASES = (
    "gradient_averaging",
    "gradient_averaging:compression=fp16",
    "gradient_averaging:every=2",
    "gradient_averaging:compression=powersgd,rank=1",
    "model_averaging:period=2,momentum=average,max_change=1",
    "model_averaging:period=2,leave_out=1",
    "model_averaging:period=2,begin=2",
    "bmuf:period=2",
    "slowmo:period=2",
    "diloco:period=2",
    "delayed_averaging:period=2,fragments=2",
    "adaptive_averaging:period=2",
    "dpsgd",
    "dpsgd:topology=complete",
    "dpsgd:compression=int8",
    "easgd:mode=sync,period=2",
    "easgd:mode=sync,period=2,compression=int4",
    "parameter_server:mode=sync",
    # Quantised by each rank, and sent in a thread of its own.
    "model_averaging:period=2,compression=int8",
    "delayed_averaging:period=2,delay=1,compression=int8",
    # On nodes of one rank, which has nobody to exchange with inside, and of two.
    "model_averaging:period=2,between_nodes=4,node_size=1",
    "model_averaging:period=2,between_nodes=4,node_size=2,compression=int8",
    "gradient_averaging:between_nodes=2,node_size=1",
    "gradient_averaging:between_nodes=2,node_size=2,compression=fp16",
)
STRATEGIES = (*_CASES, *named_nowhere(_CASES, lambda traits: traits.synchronous))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, folder = tmp_path_factory.mktemp("device") / "device.so", torch_folder()
    source = REPOSITORY / "tests" / "helpers" / "fake_gpu" / "device.cpp"
    built = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{folder / 'include'}", str(source)]
    built += ["-o", str(path), f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu"]
    subprocess.run(built, check=True)
    return path


def python(*words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


#: What is trained: task, precision, strategies.
TRAININGS = (
    ("acoustic", "fp16", STRATEGIES),
    ("acoustic", "fp32", STRATEGIES[:1]),
    ("synthesis", "bf16", (STRATEGIES[0], "model_averaging:period=2,compression=int8")),
)


@pytest.fixture(scope="module")
def trained(library: Path) -> list[tuple[str, str]]:
    """Return what each training has printed to stdout and stderr: one process has imported for all."""
    words = [word for *what, strategies in TRAININGS for word in ("--", *what, *strategies)]
    ended = python("-m", "tests.helpers.fake_gpu.train", library, *words[1:])
    assert ended.returncode == 0, ended.stderr[-3000:]
    printed = [re.split(r"^--\n", text, flags=re.MULTILINE) for text in (ended.stdout, ended.stderr)]
    return list(zip(*printed, strict=True))


@pytest.mark.parametrize("number", range(len(TRAININGS)), ids=lambda number: "-".join(TRAININGS[number][:2]))
def test_training_mixes_nothing_and_orders_its_copies(trained: list[tuple[str, str]], number: int) -> None:
    strategies = TRAININGS[number][2]
    stdout, stderr = trained[number]
    lines = stdout.splitlines()
    assert lines[-1:] == ["exit code 0"], stderr[-3000:]
    for strategy in strategies:
        assert f"step 5 of {strategy}" in lines, stdout[-2000:]
    # A batch is copied on its own stream, and what computes with it waits for that alone.  The gradients'
    # exchange waits for what has computed them; the host for the copy; the update for the way back.
    first, second = (lines.index(f"step {number} of gradient_averaging") for number in (1, 2))
    assert lines[first:second] == [
        "step 1 of gradient_averaging",
        "host: waits for event of side 0",
        "side 0: copy to the device, not waiting",
        "memory kept for side 0",
        "compute: waits for side 0",
        "side 1: event",
        "side 1: event",
        "compute: waits for event of side 1",
        "memory kept for compute",
        "memory kept for compute",
        "compute: event",
        "side 0: waits for event of compute",
        "side 0: copy to the host, not waiting",
        "memory kept for side 0",
        "side 0: event",
    ]


def test_host_and_device_are_told_apart(library: Path) -> None:
    """What the tests above rely on."""
    script = (
        "from pathlib import Path\nimport sys\nfrom tests.helpers.fake_gpu import cuda\n"
        "cuda.load(Path(sys.argv[1]))\nimport torch\nwith cuda.fake_cuda():\n"
        "    torch.ones(3, device='cuda') + 1\n"
        "    print('one device', flush=True)\n"
        "    torch.ones(3, device='cuda') + torch.ones(3)\n"
    )
    ended = python("-c", script, library)
    assert (ended.returncode, ended.stdout) == (1, "one device\n"), ended.stderr
    assert "FakeTensorDeviceMismatchError" in ended.stderr
