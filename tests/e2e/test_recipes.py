"""Every command of docs/recipes, as it is written there, on a part of the corpus and for one epoch."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.helpers.corpora import shared_data
from tests.helpers.jobs import alone, ended_within

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"


def commands_of(recipe: str) -> list[list[str]]:
    """Return the commands in the indented blocks of a recipe, as words."""
    text = (RECIPES / recipe).read_text(encoding="utf-8")
    blocks = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line) for line in lines]
    assert commands and all(words[0] == "speechdp" for words in commands)
    return commands


def part_of_an4(folder: Path) -> Path:
    """Write a Kaldi directory with two utterances of each speaker."""
    source = shared_data("an4")
    folder.mkdir()
    (folder / "flac").symlink_to(source / "flac")
    speakers = [line.split() for line in (source / "utt2spk").read_text().splitlines()]
    kept: dict[str, list[str]] = {}
    for utterance, speaker in speakers:
        kept.setdefault(speaker, []).append(utterance)
    chosen = {utterance for utterances in kept.values() for utterance in utterances[3:5]}
    for name in ("wav.scp", "text", "utt2spk"):
        lines = (source / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(line for line in lines if line.split()[0] in chosen))
    (folder / "lexicon.txt").write_bytes((source / "lexicon.txt").read_bytes())
    return folder


def shortened(words: list[str], folder: Path) -> list[str]:
    """Train for an epoch, with one seed and at most two strategies, and keep everything in `folder`."""
    changed = {"--epochs": "1", "--seeds": "1", "--strategies": "gradient_averaging,dpsgd"}
    words = [changed.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    names = {"an4", "DATA", "RUN", "OUT", "words.ctm"}
    return [str(folder / word) if word.split("/")[0] in names else word for word in words]


def test_an4(tmp_path: Path) -> None:
    part_of_an4(tmp_path / "an4")
    for words in commands_of("an4.md"):
        ended = ended_within(400, alone(*shortened(words, tmp_path)[1:]))
        assert ended.exit_code == 0, f"{shlex.join(words)}\n{ended.output}"
    tuned = [*(tmp_path / "OUT").glob("**/wer-test.json"), tmp_path / "RUN" / "wer-test.json"]
    assert len(tuned) == 3
    for errors in tuned:
        record = json.loads(errors.read_text())
        assert record["grammar"] == "ngram" and record["tuning"]["split"] == "dev"
    assert (tmp_path / "words.ctm").read_text().count("\n") > 0
    assert (tmp_path / "OUT" / "compare" / "compare.html").is_file()


@pytest.mark.parametrize("recipe", sorted(path.name for path in RECIPES.glob("*.md")))
def test_every_recipe_has_a_test(recipe: str) -> None:
    name = f"test_{recipe.removesuffix('.md').replace('-', '_')}"
    assert name in globals(), f"write {name}"
