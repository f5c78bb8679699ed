"""What a profile says: times, efficiencies, waiting, and the sentences made of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from speechdp.experiments.profile.derived import (
    STEP,
    Scaling,
    all_scalings,
    job_costs,
    make_loading,
    make_scaling,
    waited_share,
    waiting_s,
)
from speechdp.experiments.profile.measured import MeasuredMemory, Memory
from speechdp.experiments.profile.record import STRONG, WEAK, Profile, read_profile
from speechdp.report.kit.formatting import MISSING
from speechdp.report.profile import loading_answer
from speechdp.report.profile.answer import find_answer
from speechdp.report.profile.table import make_tables
from tests.helpers.profile_checks import answer_of, job_of_one_step, recorded_seconds, small_profile
from tests.helpers.profiles import MadeUpProfile, write_profile


@pytest.fixture(scope="module")
def realistic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made_up = MadeUpProfile(steps=14, growth={"decoder": 0.25, "postproc": 0.06})
    return write_profile(tmp_path_factory.mktemp("profile") / "out", made_up)


def test_costs_are_medians_over_steps_of_means_over_ranks(realistic: Path) -> None:
    out = realistic
    cost = job_costs(next(job for job in read_profile(out).jobs if job.name == "weak-2"), 3)["decoder"]
    for phase, value in (("forward", cost.forward_s), ("backward", cost.backward_s)):
        ranks = [recorded_seconds(out, "weak-2", rank, "decoder", phase) for rank in (0, 1)]
        means = [statistics.fmean(pair) for pair in zip(*ranks, strict=True)]
        assert value == pytest.approx(statistics.median(means))
    assert cost.whole_s == 0 and cost.total_s == cost.forward_s + cost.backward_s
    assert 0.4 < cost.share < 0.6


def test_efficiency_is_t1_over_tn_or_over_n_tn(realistic: Path) -> None:
    profile = read_profile(realistic)
    weak, strong = make_scaling(profile, WEAK), make_scaling(profile, STRONG)
    assert weak is not None and strong is not None
    times = {n: weak.costs["decoder"][n].total_s for n in (1, 2, 4)}
    assert times[4] / times[1] == pytest.approx(1.75, rel=0.02)
    assert weak.efficiency("decoder", 4) == pytest.approx(times[1] / times[4])
    assert weak.efficiency("decoder", 1) == 1
    # A rank's time falls with its batch, so that a function that scales keeps its efficiency.
    assert strong.costs["encoder"][4].total_s == pytest.approx(weak.costs["encoder"][4].total_s / 4, rel=1e-3)
    assert strong.efficiency("encoder", 4) == pytest.approx(1, abs=0.02)
    assert strong.efficiency("decoder", 4) == pytest.approx(1 / 1.75, rel=0.02)
    # Waiting is no work that could scale.
    assert weak.efficiency("exchange", 4) is None and weak.efficiency("trainloader", 4) is None


def test_waiting_ends_when_the_last_rank_comes() -> None:
    job = job_of_one_step([(1.0, 4.0), (6.0, 1.0)], [(3.0, 2.0), (5.0, 2.0)])
    assert waiting_s(job) == {(0, 1, 0): 2.0, (1, 1, 0): 0.0, (0, 1, 1): 0.0, (1, 1, 1): 1.0}
    # A rank that leaves before the other comes waited for nobody longer than it was there.
    assert waiting_s(job_of_one_step([(1.0, 0.5)], [(3.0, 2.0)])) == {(0, 1, 0): 0.5, (1, 1, 0): 0.0}
    assert waited_share(job, 0) == pytest.approx(3.0 / 9.0) and waited_share(job, 1) is None
    assert waiting_s(job_of_one_step([(1.0, 4.0)], [(3.0, 2.0)], name="decoder")) == {}


def test_no_function_is_said_to_scale_if_even_the_worst_was_impossibly_fast(tmp_path: Path) -> None:
    """Other work on the machine slowed the job of one rank alone."""
    functions = ("encoder", "decoder", "postproc", "loss", "update")
    disturbed = MadeUpProfile(steps=14, growth=dict.fromkeys(functions, -0.2))
    headline = answer_of(write_profile(tmp_path / "disturbed", disturbed)).headline
    assert headline.startswith("Nothing can be said about scaling: even ")
    assert headline.endswith(" Profile again, in another folder, while nothing else runs there.")


def test_sentences_say_what_scales_and_what_does_not(realistic: Path) -> None:
    headline, *details = answer_of(realistic).sentences
    assert headline.startswith("Decoder loses most: on 4 ranks it takes 19")
    assert "an efficiency of 57 %, and takes 60 % of the step." in headline
    text = " ".join(details)
    assert "These scale: encoder 100 %, postproc 85 %." in text
    assert "With all ranks' batch constant the step keeps" in text and "decoder loses most, with 57 %" in text
    assert "decoder 100 % (in the whole step 57 %)" in text
    assert "Memory is balanced over 4 ranks: the largest peak is 1.02 times the smallest" in text
    assert "The first step takes 6.0 times as long as the usual one" in text
    assert "the first 3 steps are left out" in text
    assert "A blocking trainloader takes " in text and "one that works beside training" in text
    assert "More ranks than cores: 4 ranks share 2 cores, so from 4 ranks on" in text
    assert not any(word in text for word in ("nan", "None", "inf "))


def test_everything_scales_is_said_too(tmp_path: Path) -> None:
    answer = answer_of(small_profile(tmp_path, growth={}))
    assert answer.headline.startswith("Every function scales to 2 ranks: the worst,")


def test_blocking_is_compared_by_means(realistic: Path) -> None:
    profile = read_profile(realistic)
    (blocking,), (pooled,) = profile.of_kind("blocking"), profile.of_kind("pooled")
    loading = make_loading(blocking, 3)
    waits = [recorded_seconds(realistic, "blocking-4", rank, "trainloader", "") for rank in range(4)]
    assert statistics.median(waits[0]) == 0  # what a median would make of it
    assert loading.wait_s == pytest.approx(statistics.fmean(x for of_rank in waits for x in of_rank))
    assert loading.share > 10 * make_loading(pooled, 3).share
    assert loading.frames_per_s < make_loading(pooled, 3).frames_per_s


def test_efficiencies_that_cannot_be_are_cautioned(tmp_path: Path) -> None:
    text = " ".join(answer_of(small_profile(tmp_path, growth={"decoder": -0.3})).cautions)
    assert "Efficiencies far above 100 %" in text and "Decoder in weak scaling: 14" in text
    assert "encoder" not in text


def test_the_headline_counts_milliseconds_not_ratios(tmp_path: Path) -> None:
    functions = {"encoder": (0.1, 0.2), "decoder": (0.01, 0.01)}
    answer = answer_of(small_profile(tmp_path, functions=functions, growth={"encoder": 0.2, "decoder": 1.0}))
    assert answer.headline.startswith("Encoder loses most: on 2 ranks it takes 59")
    assert (
        "Exchange" not in answer.headline and answer.details[0] == "Others that do not scale: decoder 50 %."
    )


def test_what_is_too_small_to_be_judged_does_not_catch_the_eye(tmp_path: Path) -> None:
    functions = {"encoder": (0.1, 0.2), "loss": (0.001, 0.001)}
    profile = read_profile(small_profile(tmp_path, functions=functions, growth={"encoder": 0.5, "loss": 1.0}))
    (table, *_) = make_tables(profile, all_scalings(profile), None)
    notable = {head.name: any(cell.is_notable for cell in cells) for head, cells in table.cells()}
    assert notable["encoder"] and not notable["loss"]


def test_an_exchange_that_costs_more_is_said(tmp_path: Path) -> None:
    text = answer_of(small_profile(tmp_path, growth={"decoder": 0.3}, exchange_s=0.3)).headline
    assert text.startswith("Decoder loses most") and " Exchange costs more, 30" in text


def test_modules_alone_have_no_whole_step_in_the_cautions(tmp_path: Path) -> None:
    profile = read_profile(small_profile(tmp_path, growth={"decoder": -0.3}))
    jobs = profile.of_kind(WEAK)
    alone = [replace(job, entry=replace(job.entry, kind="decoder")) for job in jobs]
    only = replace(profile, jobs=tuple(alone))
    (caution,) = (c for c in find_answer(only, all_scalings(only)).cautions if "far above" in c)
    assert "differ. Decoder alone: 14" in caution and "% on 2 ranks." in caution and "whole" not in caution


def test_what_waiting_does_not_explain_is_no_merit_of_a_trainloader(realistic: Path) -> None:
    profile = read_profile(realistic)
    blocking, pooled = (make_loading(profile.of_kind(kind)[-1], 3) for kind in ("blocking", "pooled"))
    explained = (1 - pooled.share) / (1 - blocking.share)
    for factor in (1.0, 1.2):
        faster = replace(pooled, frames_per_s=factor * explained * blocking.frames_per_s)
        text = loading_answer._blocking(blocking, faster)
        assert (f"less waiting alone would give {explained:.2f} times: " in text) == (factor > 1)


@pytest.mark.parametrize(("steps", "verdict"), [(64, False), (65, True)])
def test_one_stop_of_the_blocking_trainloader_is_no_verdict(
    steps: int, verdict: bool, tmp_path: Path
) -> None:
    text = " ".join(answer_of(small_profile(tmp_path, loader_steps=steps)).details)
    assert ("A blocking trainloader takes" in text) == verdict
    assert ("blocking-2 took 64 steps, too few for its second stop" in text) == (not verdict)
    assert ("Waiting for batches takes" in text) == (not verdict)


def test_unbalanced_memory_is_called_so(tmp_path: Path) -> None:
    profile = read_profile(small_profile(tmp_path))
    ranks = (MeasuredMemory(0, 900 << 20, 0, 0, 0), MeasuredMemory(1, 400 << 20, 0, 0, 0))
    jobs = tuple(replace(job, memory=Memory("gpu", ranks)) for job in profile.jobs)
    unbalanced = replace(profile, jobs=jobs)
    text = " ".join(find_answer(unbalanced, all_scalings(unbalanced)).sentences)
    assert "Memory is not balanced over 2 ranks: the largest peak is 2.25 times the smallest" in text
    assert "GPU memory" in text and "More ranks than cores" not in text


def test_cautions_are_said_only_where_they_are_due(tmp_path: Path) -> None:
    answer = answer_of(small_profile(tmp_path, cores=1))
    few = " ".join(answer.cautions)
    assert answer.sentences[0].startswith("Figures rest on 2 steps after the warm-up")
    assert "--steps, 13 at least" in answer.warning and "Figures rest" not in few
    assert "More ranks than cores: 2 ranks share 1 core," in few
    calm = replace(MadeUpProfile(ranks=(1, 2), steps=14, samples=False), cores=4)
    calm_answer = answer_of(write_profile(tmp_path / "calm", calm))
    assert (calm_answer.cautions, calm_answer.warning) == ((), "")


@pytest.mark.parametrize(
    ("steps", "loader_steps", "words"),
    [
        (5, 67, "Figures rest on 2 steps after the warm-up; --steps, 13 at least."),
        (5, 4, "Figures rest on 1 step after the warm-up; --steps and --loader-steps, 13 at least."),
        (14, 5, "Figures of trainloaders rest on 2 steps after the warm-up; --loader-steps, 13 at least."),
        (14, 3, "Some jobs of trainloaders have no step after the 3; Take more with --loader-steps."),
        (14, 67, ""),
    ],
)
def test_the_option_that_gives_more_steps_is_named(
    steps: int, loader_steps: int, words: str, tmp_path: Path
) -> None:
    warning = answer_of(small_profile(tmp_path, steps=steps, loader_steps=loader_steps)).warning
    begins, _, ends = words.partition("; ")
    assert warning.startswith(begins) and warning.endswith(ends) and bool(words) == bool(warning)


def test_a_module_without_the_fewest_ranks_has_no_efficiency_beside_others(tmp_path: Path) -> None:
    out = write_profile(tmp_path / "out", MadeUpProfile(steps=14, samples=False, growth={"decoder": 0.25}))
    profile = read_profile(out)
    left = replace(profile, jobs=tuple(job for job in profile.jobs if job.name != "encoder-1"))
    scalings = all_scalings(left)
    of_kind = {scaling.kind: scaling for scaling in scalings}
    assert of_kind["encoder"].ranks == [2, 4] and of_kind["encoder"].efficiency("encoder", 4) is None
    assert of_kind["decoder"].efficiency("decoder", 4) is not None
    (sentence,) = (s for s in find_answer(left, scalings).details if s.startswith("Alone,"))
    assert "decoder" in sentence and "encoder" not in sentence
    (table,) = (t for t in make_tables(left, scalings, None) if t.id == "table-times-single")
    assert [column.key for column in table.columns] == [
        "ms_1", "ms_2", "ms_4", "efficiency_2", "efficiency_4"
    ]  # fmt: skip
    assert table.note.endswith("against 1 rank.")
    texts = {head.name: [column.text(row) for column in table.columns] for head, row in table.rows}
    assert [text == MISSING for text in texts["encoder"]] == [True, False, False, True, True]
    assert MISSING not in texts["decoder"]


def test_times_that_vary_and_batches_that_differ_are_cautioned(tmp_path: Path) -> None:
    calm = MadeUpProfile(ranks=(1, 2), steps=14, samples=False, cores=4)
    out = write_profile(tmp_path / "out", calm)
    for rank in (0, 1):
        path = out / "weak-2" / f"rank-{rank:04d}.jsonl"
        head, *lines = path.read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        for step in steps:
            step["frames"] *= 2
            for function in step["functions"]:
                function[3] *= 1 + (step["step"] % 2 if function[0] == "decoder" else 0)
        path.write_text("\n".join([head, *map(json.dumps, steps)]) + "\n")
    text = " ".join(answer_of(out).cautions)
    assert "Times of weak-2 vary from step to step" in text and "decoder 99 %" in text
    assert "encoder" not in text
    assert (
        "Batches of the weak jobs are not alike: frames of a rank in a step are 1,280 on 1, 2,560 on 2"
        in text
    )


def test_hosts_of_different_kinds_are_cautioned(tmp_path: Path) -> None:
    profile = read_profile(small_profile(tmp_path))

    def text_with(facts: Mapping[str, object]) -> str:
        first, *others = profile.jobs
        jobs = [replace(first, facts=facts), *(replace(job, facts={"cpus": ["B"]}) for job in others)]
        mixed = replace(profile, jobs=tuple(jobs))
        return " ".join(find_answer(mixed, all_scalings(mixed)).cautions)

    kinds = "hosts differ in kind, so their times do not compare: weak-1 on A; weak-2, strong-1,"
    assert kinds in text_with({"cpus": ["A"]})
    assert kinds in text_with({"cpus": ["B"], "gpus": [{"name": "A"}]})
    no_difference: list[dict[str, object]] = [{"cpus": ["B", "B"], "gpus": [None]}, {}, {"gpus": 3}]
    for alike in no_difference:
        assert "differ in kind" not in text_with(alike)


def test_one_number_of_ranks_says_nothing_about_scaling(tmp_path: Path) -> None:
    answer = answer_of(small_profile(tmp_path, ranks=(1,)))
    assert answer.headline == (
        "Only 1 rank was profiled, so nothing can be said about scaling; "
        "the largest part of the step is decoder, 51 %."
    )


def test_scalings_keep_the_order_of_a_step(realistic: Path) -> None:
    profile: Profile = read_profile(realistic)
    scalings: list[Scaling] = all_scalings(profile)
    assert [s.kind for s in scalings] == ["weak", "strong", "encoder", "decoder", "postproc"]
    assert list(scalings[0].costs)[:3] == ["trainloader", "h2d", "encoder"]
    assert list(scalings[0].costs)[-1] == STEP


def test_a_step_that_waits_is_not_said_to_scale_since_its_functions_do(tmp_path: Path) -> None:
    made_up = MadeUpProfile(ranks=(1, 2), steps=14, samples=False, growth={}, exchange_s=0.8)
    headline = answer_of(write_profile(tmp_path / "out", made_up)).headline
    assert "although every function of the model scales: exchange takes 81" in headline
    assert "Every function scales" not in headline


def test_cores_are_those_of_the_hosts_that_computed(tmp_path: Path) -> None:
    out = write_profile(tmp_path / "out", MadeUpProfile(ranks=(1, 4), steps=14, samples=False, cores=2))
    profile = read_profile(out)

    def cautions(cores: str) -> str:
        jobs = [replace(job, facts={"cpus": [f"EPYC, {cores}"] * job.ranks}) for job in profile.jobs]
        told = replace(profile, jobs=tuple(jobs))
        return " ".join(find_answer(told, all_scalings(told)).cautions)

    assert "More ranks than cores" not in cautions("64 cores")
    assert "More ranks than cores: 4 ranks share 1 core, so" in cautions("1 core")
    assert "More ranks than cores: 4 ranks share 2 cores" in " ".join(answer_of(out).cautions)
