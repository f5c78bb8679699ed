"""Which jobs a profile consists of, their batches, loaders and steps; what is refused before any starts."""

from __future__ import annotations

from typing import Any

import pytest

from speechdp import remedies
from speechdp.comm.device import RANKS_PER_GPU
from speechdp.errors import ConfigError
from speechdp.experiments.profile.notes import about_cores, notes_on
from speechdp.experiments.profile.plan import PlannedJob, ProfilePlan, batch_of_rank
from speechdp.options.model import ModelOptions
from speechdp.options.run import TrainOptions
from tests.helpers.options import options_with

SPEECH = TrainOptions(ModelOptions(), task="synthesis")


def named(jobs: list[PlannedJob]) -> dict[str, PlannedJob]:
    return {job.entry.name: job for job in jobs}


def test_a_profile_of_synthesis() -> None:
    jobs = ProfilePlan((1, 2), strong=True).jobs(SPEECH)
    assert [job.entry.name for job in jobs] == [
        "weak-1", "weak-2", "strong-1", "strong-2", "encoder-1", "encoder-2", "decoder-1", "decoder-2",
        "postproc-1", "postproc-2", "blocking-2", "pooled-2",
    ]  # fmt: skip
    loaders = {job.entry.kind: job.entry.loader for job in jobs}
    assert loaders["blocking"] == "blocking-sort" and loaders["weak"] == loaders["pooled"] == "pooled"
    assert loaders["decoder"] == "none"


def test_the_two_loaders_are_compared_whatever_the_order_of_the_runs() -> None:
    jobs = named(ProfilePlan((2,)).jobs(options_with(order="laplace")))
    assert jobs["weak-2"].options.batch.order == "laplace"
    assert jobs["pooled-2"].options.batch.order == "pooled"
    assert jobs["blocking-2"].options.batch.order == "blocking-sort"


def test_an_acoustic_model_has_other_modules() -> None:
    jobs = ProfilePlan((2,)).jobs(TrainOptions())
    assert [job.entry.name for job in jobs] == ["weak-2", "encoder-2", "output-2", "blocking-2", "pooled-2"]


def test_weak_keeps_a_ranks_batch_strong_that_of_all() -> None:
    jobs = named(ProfilePlan((1, 2, 4), strong=True).jobs(options_with(batch_size=8)))
    assert [jobs[f"weak-{n}"].entry.batch_size for n in (1, 2, 4)] == [8, 8, 8]
    assert [jobs[f"strong-{n}"].entry.batch_size for n in (1, 2, 4)] == [8, 4, 2]
    assert jobs["strong-4"].options.batch.batch_size == 2
    # On one rank they are one: it is measured once.
    assert [jobs[f"strong-{n}"].entry.folder for n in (1, 2, 4)] == ["weak-1", "strong-2", "strong-4"]


def test_frames_instead_of_segments() -> None:
    jobs = named(ProfilePlan((1, 2), strong=True).jobs(options_with(batch_frames=600)))
    assert jobs["strong-2"].options.batch.batch_frames == 300 and jobs["weak-2"].entry.batch_size == 0
    assert "blocking-2" not in jobs  # it has batches of equal numbers


@pytest.mark.parametrize(
    "given",
    [{"recipe": "adpsgd-asr", "batch_size": 16}, {"base_batch": 16, "base_learning_rate": 0.01}],
)
def test_learning_rates_that_follow_the_batch_of_all_ranks(given: dict[str, Any]) -> None:
    options = options_with(**given)
    jobs = named(ProfilePlan((1, 2), strong=True).jobs(options))
    assert batch_of_rank(options) == jobs["weak-2"].entry.batch_size == 16
    assert jobs["strong-2"].entry.batch_size == 8


def test_the_exchange_comes_after_backward_to_be_told_apart() -> None:
    def strategy(text: str) -> str:
        return ProfilePlan((1,), only=("weak",)).jobs(options_with(strategy=text))[0].options.strategy.text

    assert strategy("gradient_averaging") == "gradient_averaging:overlap=false"
    assert strategy("gradient_averaging:every=2") == "gradient_averaging:every=2,overlap=false"
    assert strategy("gradient_averaging:overlap=true") == "gradient_averaging:overlap=true"
    assert strategy("model_averaging:period=4") == "model_averaging:period=4"


def test_only_some_kinds() -> None:
    jobs = ProfilePlan((1, 2), only=("decoder", "weak")).jobs(SPEECH)
    assert [job.entry.name for job in jobs] == ["weak-1", "weak-2", "decoder-1", "decoder-2"]


def test_one_rank_asks_for_no_back_end() -> None:
    jobs = named(ProfilePlan((1, 2)).jobs(options_with(backend="mpi")))
    assert jobs["weak-1"].options.backend == "auto" and jobs["weak-2"].options.backend == "mpi"


def test_feeders_feed_one_job_and_are_started_besides() -> None:
    jobs = named(ProfilePlan((1, 2)).jobs(options_with(feeders=1)))
    assert jobs["fed-2"].num_processes == 3 and jobs["weak-2"].num_processes == 2


def test_the_blocking_trainloader_reads_two_groups() -> None:
    jobs = named(ProfilePlan((2,), steps=20).jobs(TrainOptions()))
    assert jobs["blocking-2"].entry.steps == jobs["pooled-2"].entry.steps == 67
    jobs = named(ProfilePlan((2,), steps=20, loader_steps=9).jobs(TrainOptions()))
    assert jobs["blocking-2"].entry.steps == 9 and jobs["weak-2"].entry.steps == 20
    jobs = named(ProfilePlan((2,), steps=20, warmup=0).jobs(TrainOptions()))
    assert jobs["blocking-2"].entry.steps == 65  # the second stop comes after 64


def test_iterations_as_on_the_poster() -> None:
    jobs = named(ProfilePlan((1, 4), steps=180, poster_iterations=True, strong=True).jobs(SPEECH))
    assert [jobs[name].entry.steps for name in ("weak-1", "weak-4", "decoder-4")] == [180, 720, 720]
    assert jobs["strong-4"].entry.steps == 180


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        ({"ranks": (0, 1)}, {}, "write different numbers of ranks from 1"),
        ({"ranks": (2, 2)}, {}, "different numbers of ranks from 1"),
        ({"only": ("decodr",)}, {}, "--only decodr: choose from weak, strong, encoder"),
        ({"only": ("decoder",)}, {}, "a model of --task acoustic has no decoder, but encoder, output"),
        ({"only": ("fed",)}, {}, "needs --feeders"),
        ({"steps": 3, "warmup": 3}, {}, "leaves none of --steps 3"),
        ({"loader_steps": 2}, {}, "--loader-steps 2: must be more than --warmup 3"),
        ({"strong": True}, {"batch_size": 5}, "a batch of 5 does not divide by 2 ranks"),
        ({}, {"global_batch": 8}, "--global-batch does not apply to profile"),
        ({}, {"recipe": "adpsgd-asr"}, "--global-batch does not apply to profile"),
        ({}, {"max_steps": 4}, "use --steps"),
        ({}, {"realign": 1}, "--realign does not apply to profile"),
        ({}, {"order": "blocking-sort"}, "profile measures it by itself"),
        (
            {},
            {"strategy": "ad_psgd"},
            "no common steps that could be measured; give --strategy gradient_averaging",
        ),
    ],
)
def test_what_is_refused(plan: dict[str, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^--") as caught:
        ProfilePlan(**{"ranks": (1, 2), **plan}).jobs(options_with(**options))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_more_ranks_than_cores_are_said_in_one_line() -> None:
    assert about_cores((1, 2, 4), 4) == []
    (line,) = about_cores((8, 1, 4), 2)
    assert line.startswith("this machine has 2 cores: with 4 and 8 ranks they take turns")


def test_a_missing_gpu_is_said_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RANKS_PER_GPU, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    plan = ProfilePlan((1,))
    assert notes_on(plan, options_with(device="cpu"), on_this_machine=True) == []
    (line,) = notes_on(plan, TrainOptions(), on_this_machine=True)
    assert line.startswith("torch sees no GPU")
    with (
        remedies.of_command(("device",)),
        pytest.raises(ConfigError, match=r"--device cuda: torch sees no GPU on this host; .*--device cpu"),
    ):
        notes_on(plan, options_with(device="cuda"), on_this_machine=True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    room = "the GPUs that torch sees here have room for 1 rank; give at most 1, "
    with pytest.raises(ConfigError, match=f"--ranks 2: {room}"):
        notes_on(ProfilePlan((1, 2)), TrainOptions(), on_this_machine=True)
