"""profile.json and the files of its jobs: what is written is read, what is damaged is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from speechdp.errors import ConfigError, RunError
from speechdp.experiments.profile.common_start import start_of
from speechdp.experiments.profile.jobs import job_summary, merged
from speechdp.experiments.profile.record import JobEntry, read_profile, read_record, write_record
from speechdp.experiments.record import FAILED
from tests.helpers.profiles import MadeUpProfile, write_profile


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return write_profile(tmp_path / "profile", MadeUpProfile(ranks=(1, 2)))


def test_a_profile_is_read_as_it_was_written(out: Path) -> None:
    profile = read_profile(out)
    assert profile.settings.preset == "tacotron-tiny" and profile.settings.warmup_steps == 3
    weak = profile.of_kind("weak")
    assert [job.name for job in weak] == ["weak-1", "weak-2"]
    assert [len(rank) for rank in weak[1].steps] == [8, 8]
    step = weak[1].steps[1][4]
    assert step.step == 5 and step.frames == 40 * 32
    phases = [step.seconds("decoder", phase) for phase in ("forward", "backward", "")]
    assert phases[0] > 0 and phases[1] > phases[0] and phases[2] == 0
    assert step.seconds("decoder") == pytest.approx(sum(phases))
    assert weak[1].memory is not None and weak[1].memory.balance == pytest.approx(403 / 400)
    assert weak[1].samples[0].ranks == (0, 1)


def test_a_job_that_failed_has_no_steps(out: Path) -> None:
    record = read_record(out)
    write_record(out, record.with_job(1, state=FAILED, message="rank 1: no memory"))
    job = read_profile(out).jobs[1]
    assert job.entry.message == "rank 1: no memory" and job.steps == [] and job.memory is None
    assert [each.name for each in read_profile(out).of_kind("weak")] == ["weak-1"]


def test_what_a_later_version_adds_is_passed_over(out: Path) -> None:
    content = json.loads((out / "profile.json").read_text())
    content["novelty"], content["jobs"][0]["novelty"] = 1, 2
    (out / "profile.json").write_text(json.dumps(content))
    assert read_record(out).jobs[0].name == "weak-1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"format": "speechdp-profile", "version": 9, "jobs": []}', "version 9"),
        ('{"format": "speechdp-run", "version": 1}', "speechdp-run"),
    ],
)
def test_a_damaged_profile_is_named(out: Path, text: str, message: str) -> None:
    (out / "profile.json").write_text(text)
    with pytest.raises(ConfigError, match=r"profile\.json") as caught:
        read_profile(out)
    assert message in str(caught.value) and "run speechdp profile into" in str(caught.value)


def test_a_folder_elsewhere_is_refused(out: Path) -> None:
    text = (out / "profile.json").read_text().replace('"folder": "weak-2"', '"folder": "../weak-2"')
    (out / "profile.json").write_text(text)
    with pytest.raises(ConfigError, match="is not the name of a folder"):
        read_record(out)


@pytest.mark.parametrize(
    "damage", ["", '{"rank": 0}\n', '{"rank":0,"host":"a","pid":1,"clock_offset_s":0}\n{}\n']
)
def test_a_damaged_rank_is_named(out: Path, damage: str) -> None:
    (out / "weak-2" / "rank-0001.jsonl").write_text(damage)
    with pytest.raises(RunError, match=r"weak-2/rank-0001.jsonl: cannot be read .*run the profile again"):
        read_profile(out)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"wall_s": ', '"wall_s": NaN, "was": ', "line 2: wall_s is nan, not a number"),
        ('"wall_s": ', '"wall_s": -', "cannot be"),
        ('"start_s": ', '"start_s": "x", "was": ', "start_s is 'x', not a number"),
        ('"start_s": ', '"start_s": 1' + 400 * "0" + ', "was": ', "not a number"),
        ('"step": 1,', '"step": true,', "step is True, not a whole number"),
        ('"frames": ', '"was": ', "line 2: there is no frames"),
        ('["trainloader", "", ', '[7, "", ', "name is 7, not a word"),
        ('["trainloader", "", ', '["trainloader", "sideways", ', "trainloader 'sideways' of"),
        (
            '["trainloader", "", ',
            '["trainloader", "", "soon", ',
            r"is not \[name, phase, start_s, dur",
        ),
        ('"functions": [', '"functions": 3, "was": [', "functions is not a list"),
        ('"host": "node-a"', '"host": 5', "line 1: host is 5, not a word"),
        ('{"step": ', '{"step"', r"\(8 lines damaged\)"),
        ('{"step": 8', '{"step" 8', r"\(1 line damaged\)"),
    ],
)
def test_values_that_cannot_be_are_named(out: Path, old: str, new: str, message: str) -> None:
    path = out / "weak-2" / "rank-0001.jsonl"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(RunError, match=message) as caught:
        read_profile(out)
    assert str(caught.value).startswith(f"{path}: cannot be read (") and "\n" not in str(caught.value)


def test_lost_steps_and_another_ranks_file_are_named(out: Path) -> None:
    path = out / "weak-2" / "rank-0001.jsonl"
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:-2]))
    with pytest.raises(RunError, match=r"rank-0001\.jsonl: has 6 of 8 steps; run the profile again"):
        read_profile(out)
    path.write_text((out / "weak-2" / "rank-0000.jsonl").read_text())
    with pytest.raises(RunError, match=r"rank-0001\.jsonl: is that of rank 0"):
        read_profile(out)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("memory.json", '{"unit": "rss", "ranks": []}'),
        ("memory.json", '{"unit": "rss", "ranks": [{"rank": 0, "peak_bytes": "much"}]}'),
        ("memory.json", '{"unit": "stone", "ranks": [{}]}'),
        ("job.json", "[]"),
    ],
)
def test_damaged_facts_are_named(out: Path, name: str, text: str) -> None:
    (out / "weak-2" / name).write_text(text)
    with pytest.raises(RunError, match=rf"weak-2/{name}: cannot be read \(.*\); run the profile again"):
        read_profile(out)


@pytest.mark.parametrize(
    "change", [{"kind": "wide"}, {"state": "odd"}, {"ranks": 0}, {"ranks": "2"}, {"wall_s": "x"}]
)
def test_a_job_that_cannot_be_is_named(out: Path, change: dict[str, object]) -> None:
    content = json.loads((out / "profile.json").read_text())
    content["jobs"][1].update(change)
    (out / "profile.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"profile\.json: cannot be read"):
        merged(out, None, print)  # type: ignore[arg-type]


def test_a_missing_rank_is_named(out: Path) -> None:
    (out / "decoder-2" / "rank-0000.jsonl").unlink()
    with pytest.raises(RunError, match=r"decoder-2/rank-0000.jsonl: cannot be read"):
        read_profile(out)


# --- the same command again -----------------------------------------------------------------------


def test_finished_jobs_are_kept_and_others_join_them(out: Path) -> None:
    record = read_record(out)
    write_record(out, record.with_job(0, state=FAILED))
    new = JobEntry("weak-4", "weak", 4, 32, "pooled", "weak-4", 8, state="pending")
    asked = dataclasses.replace(record, jobs=(dataclasses.replace(record.jobs[0], state="pending"), new))
    states = {job.name: job.state for job in merged(out, asked, print).jobs}
    assert states["weak-1"] == "pending" == states["weak-4"] and states["weak-2"] == "complete"
    assert list(states)[:3] == ["weak-1", "weak-2", "weak-4"] and "decoder-2" in states


def test_a_job_of_other_length_is_measured_again(out: Path) -> None:
    record = read_record(out)
    longer = dataclasses.replace(record.jobs[1], steps=99, state="pending")
    jobs = merged(out, dataclasses.replace(record, jobs=(longer,)), print).jobs
    assert {job.name: job.state for job in jobs}["weak-2"] == "pending"


def test_another_profile_in_the_folder_is_refused(out: Path) -> None:
    record = read_record(out)
    other = dataclasses.replace(record.settings, decoder="loop", command=("other",))
    with pytest.raises(
        ConfigError, match=r"other options \(decoder was fast, is loop\); choose another folder"
    ):
        merged(out, dataclasses.replace(record, settings=other), print)


def test_the_news_of_a_job_leave_out_the_warm_up(out: Path) -> None:
    line = job_summary(read_profile(out).jobs[0], 3)
    milliseconds = float(line.split()[0])
    assert 500 < milliseconds < 540 and "(decoder 5" in line  # the made-up step takes 0.513 s


# --- the common start -----------------------------------------------------------------------------


def test_ranks_of_one_host_share_the_moment() -> None:
    everyone = [{"host": "a", "times": [1.0, 2.0, 3.0]}, {"host": "a", "times": [1.1, 2.5, 3.2]}]
    assert start_of(everyone, 0) == start_of(everyone, 1)
    assert start_of(everyone, 1).origin_s == 3.0


def test_the_clock_of_another_host_is_set_right() -> None:
    everyone = [
        {"host": "a", "times": [1.0, 2.0, 3.0]},
        {"host": "b", "times": [101.0, 102.0, 105.0]},  # the last barrier let it go late
        {"host": "b", "times": [101.5, 102.6, 103.4]},
    ]
    for rank in (1, 2):
        start = start_of(everyone, rank)
        assert start.clock_offset_s == 100.0 and start.origin_s == 103.0
