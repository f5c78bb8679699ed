"""Every figure of the IBM/NTU poster in kind, and its three open questions, from one command.

    python benchmarks/papers/poster.py [DATA] [--ranks 1,2] [--steps 20] [--preset tacotron-tiny]
        [--quick] [--gpu]
        [--only profile,decoder,threads,memory] [--out OUT] [--plot FILE] [-- options of speechdp profile]

1. profile: `speechdp profile` of the synthesis task over the numbers of ranks: the time of each function,
   weak and strong, all together and each module alone; batches from a blocking trainloader, from the pooled
   one, and from a feeder.  OUT/profile/report/profile.html shows the poster's figures 2 to 5.
2. decoder: decoder_cost.py, the decoder as the plain loop and as the fast one, and what a step consists of.
3. threads: poster_threads.py, replicas as threads of one process, as on the poster, and as processes.
4. memory: poster_master.py, one rank that holds everything, as on the poster, and equal ranks.

Without DATA synthetic speech is prepared.  Needs a quiet machine with as many cores as ranks.  --gpu takes
the paper's sizes with batch 150, fp32 and bf16; --quick only sees whether everything works.  OUT keeps
what is done (delete it to measure anew).  Last line: JSON; a balance is the most over the least peak memory:

    {"decoder_speedup", "step_speedup": loop over fast, "launch_share": of the loop's time,
     "memory_balance": of the profile's ranks, "equal_memory_balance", "poster_memory_balance": of the two
     schemes' whole processes, "equal_working_balance", "poster_working_balance": without what Python and
     PyTorch take, "weak_efficiency", "single_efficiency": {function: at the most ranks},
     "threads_decoder_efficiency", "processes_decoder_efficiency", "threads_launch_efficiency",
     "processes_launch_efficiency", "wait": {loader: share of the step time}}
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich import box
from rich.table import Table

from benchmarks.strategies.paired import REPOSITORY
from speechdp.cli.support.console import make_console
from speechdp.experiments.profile.derived import STEP, make_loading, make_scaling
from speechdp.experiments.profile.record import BLOCKING, FED, POOLED, STRONG, WEAK, Profile, read_profile
from speechdp.launching.command import own_program

PARTS = ("profile", "decoder", "threads", "memory")
GPU_PARTS = (*PARTS, "decoder_bf16")
SINGLE = ("encoder", "decoder", "postproc")
#: Functions that one rank has as well: what a rank waits, or exchanges, is none that could scale.
WHOLE = (*SINGLE, "loss", "update", STEP)
LOADERS = {BLOCKING: "blocking", POOLED: "overlapped", FED: "with feeders"}
LAUNCHES = "decoder loop, launches only"

Result = dict[str, Any]


def run_program(name: str, words: Sequence[str]) -> Result:
    """Run a benchmark beside this one, with what it prints; return the JSON of its last line."""
    command = [sys.executable, str(Path(__file__).with_name(f"{name}.py")), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    last = ""
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                last = line
            else:
                print(line, end="", flush=True)
    if process.returncode != 0 or not last:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    result: Result = json.loads(last)
    return result


def run_profile(given: argparse.Namespace, out: Path) -> Result:
    """Profile the synthesis task; return efficiencies, memory and waiting."""
    data: Path = given.data or out / "data"
    if given.data is None and not (data / "data.json").is_file():
        run_speechdp("prepare", "--synthetic", str(given.hours), "--task", "synthesis", str(data))
    words = [str(data), str(out / "profile"), "--task", "synthesis", "--preset", given.preset]
    words += ["--ranks", ",".join(map(str, given.ranks)), "--threads", "1"]
    words += ["--steps", str(given.steps), "--warmup", str(given.warmup)]
    words += (
        ["--only", "weak,blocking", "--loader-steps", "3"] if given.quick else ["--strong", "--feeders", "1"]
    )
    run_speechdp("profile", *words, *given.options)
    return profile_figures(read_profile(out / "profile"))


def run_speechdp(*words: str) -> None:
    """Run a command of ours with what it prints."""
    command = [*own_program(Path(sys.executable)), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    code = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False).returncode
    if code != 0:
        raise SystemExit(f"{' '.join(command)} ended with {code}; its message stands above")


def profile_figures(profile: Profile) -> Result:
    """Return what the profile says: efficiencies at the most ranks, memory and its balance, waiting."""
    result: Result = {"weak": {}, "strong": {}, "single": {}, "wait": {}, "memory_mb": []}
    for kind in (WEAK, STRONG, *SINGLE):
        scaling = make_scaling(profile, kind)
        if scaling is None or len(scaling.ranks) < 2:
            continue
        for name in [kind] if kind in SINGLE else [name for name in WHOLE if name in scaling.costs]:
            efficiency = scaling.efficiency(name, scaling.ranks[-1])
            if efficiency is not None:
                result["single" if kind in SINGLE else kind][name] = round(efficiency, 3)
    for kind, loader in LOADERS.items():
        for job in profile.of_kind(kind)[-1:]:
            loading = make_loading(job, profile.settings.warmup_steps)
            result["wait"][loader] = round(loading.share, 4)
    for job in profile.of_kind(WEAK)[-1:]:
        if job.memory is not None:
            result["memory_mb"] = [round(rank.peak_bytes / 1e6, 1) for rank in job.memory.ranks]
            result["memory_balance"] = round(job.memory.balance, 3)
    return result


def run_parts(given: argparse.Namespace, out: Path) -> dict[str, Result]:
    """Measure the parts asked for, one after another; finished ones are read back."""
    programs = programs_of(given)
    found: dict[str, Result] = {}
    for name in given.only:
        path = out / f"{name}.json"
        if not path.is_file():
            begin = time.perf_counter()
            print(f"{name}:", flush=True)
            result = run_profile(given, out) if name == "profile" else run_program(*programs[name])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(result, indent=1) + "\n")
            print(f"{name} took {time.perf_counter() - begin:.0f} s", flush=True)
        found[name] = json.loads(path.read_text())
    return found


def programs_of(given: argparse.Namespace) -> dict[str, tuple[str, list[str]]]:
    """Return the benchmark of each part but the profile, and its command line."""
    device = ["--preset", given.preset, *(["--device", "cuda"] if given.gpu else [])]
    replicas = sorted({1, 2, *given.ranks})
    cost = [*device, "--rounds", "1" if given.quick else "9"]
    threads = [*device, "--replicas", ",".join(map(str, replicas))]
    memory = [*device, "--ranks", str(replicas[-1])]
    if given.quick:
        threads += ["--rounds", "1", "--seconds", "0.05"]
        memory += ["--batch", "32", "--steps", "2"]
    return {
        "decoder": ("decoder_cost", cost),
        "decoder_bf16": ("decoder_cost", [*cost, "--precision", "bf16"]),
        "threads": ("poster_threads", threads),
        "memory": ("poster_master", memory),
    }


def conclude(found: dict[str, Result]) -> Result:
    """Return the last line, of the parts that there are."""
    result: Result = {}
    for part, prefix in (("decoder", ""), ("decoder_bf16", "bf16_")):
        for name in ("decoder_speedup", "step_speedup", "launch_share") if part in found else ():
            result[prefix + name] = found[part][name]
    if profile := found.get("profile"):
        result["memory_balance"] = profile.get("memory_balance")
        result["weak_efficiency"] = profile["weak"]
        result["single_efficiency"] = profile["single"]
        result["wait"] = profile["wait"]
    if memory := found.get("memory"):
        for scheme, name in (("equal", "equal"), ("master", "poster")):
            result[f"{name}_memory_balance"] = memory[scheme]["peak_balance"]
            result[f"{name}_working_balance"] = memory[scheme]["working_balance"]
    if threads := found.get("threads"):
        for way in ("threads", "processes"):
            for function, name in (("decoder loop", "decoder"), (LAUNCHES, "launch")):
                by_number = threads[way][function]
                most = max(by_number, key=int)
                result[f"{way}_{name}_efficiency"] = by_number[most]["efficiency"]
    return result


def show_profile(result: Result) -> None:
    """Print the efficiencies of functions, memory and waiting."""
    table = Table(
        title="Efficiency at the most ranks, against one", title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("function")
    for title in ("weak", "strong", "alone, weak"):
        table.add_column(title, justify="right")
    for name in result["weak"]:
        figures = (result[kind].get(name) for kind in ("weak", "strong", "single"))
        table.add_row(name, *("" if value is None else f"{value:.2f}" for value in figures))
    if table.rows:
        make_console().print(table)
    if result["memory_mb"]:
        peaks = ", ".join(f"{value:.0f}" for value in result["memory_mb"])
        print(f"memory of each rank: {peaks} MB; most / least {result['memory_balance']:.3f}")
    for loader, share in result["wait"].items():
        print(f"waiting for batches, trainloader {loader}: {100 * share:.2f} % of the step time")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; what stands after `--` goes to `speechdp profile`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], help="1,2 by default")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--preset", default="")
    parser.add_argument("--hours", type=float, default=0.4, help="of synthetic speech")
    parser.add_argument("--gpu", action="store_true", help="on CUDA, the paper's sizes, --ranks 1 by default")
    parser.add_argument("--quick", action="store_true", help="see whether it works, in a minute")
    parser.add_argument("--only", type=lambda text: text.split(","), help="parts, separated by commas")
    parser.add_argument("--out", type=Path, help="folder that keeps what is done; default: none")
    parser.add_argument("--plot", type=Path)
    ours = list(arguments)
    end = ours.index("--") if "--" in ours else len(ours)
    given = parser.parse_args(ours[:end])
    given.options = [*ours[end + 1 :], *(["--device", "cuda"] if given.gpu else [])]
    given.preset = given.preset or ("tacotron" if given.gpu else "tacotron-tiny")
    given.ranks = given.ranks or ([1] if given.gpu else [1, 2])
    parts = GPU_PARTS if given.gpu else PARTS
    given.only = given.only or parts
    if unknown := set(given.only) - set(parts):
        parser.error(f"--only {', '.join(sorted(unknown))}: choose from {', '.join(parts)}")
    if given.quick:
        given.steps, given.warmup, given.ranks, given.hours = 2, 1, given.ranks[-1:], 0.05
    return given


def main() -> None:
    given = parse(sys.argv[1:])
    cores = len(os.sched_getaffinity(0))
    if max(given.ranks) > cores and not given.gpu:
        print(f"{max(given.ranks)} ranks share {cores} cores: no weak efficiency can be near 1")
    with tempfile.TemporaryDirectory() as temporary:
        found = run_parts(given, given.out or Path(temporary))
    if profile := found.get("profile"):
        show_profile(profile)
        if given.out is not None:
            print(f"the poster's figures: {given.out / 'profile' / 'report' / 'profile.html'}")
    if given.plot is not None:
        from benchmarks.papers.poster_plot import draw  # noqa: PLC0415  matplotlib takes a second to import

        draw(given.plot, found)
    print(json.dumps(conclude(found)))


if __name__ == "__main__":
    main()
