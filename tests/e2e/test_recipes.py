"""Every command of docs/recipes, as it is written there, on a part of the corpus and for one epoch."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import soundfile

from speechdp.cli import main
from speechdp.data.espeak.espeak import Voice, start_espeak
from speechdp.data.shards.dataset import Dataset
from tests.helpers.corpora import needs_espeak, shared_data
from tests.helpers.jobs import alone
from tests.helpers.mpi import run_job

#: A dozen jobs one after another: five minutes on a machine at rest, several times as long on a busy one.
pytestmark = pytest.mark.timeout(2400)

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"


def commands_of(recipe: str) -> list[str]:
    """Return the commands in the indented blocks of a recipe."""
    text = (RECIPES / recipe).read_text(encoding="utf-8")
    blocks = re.findall(r"(?:^    .*\n)+", text, re.MULTILINE)
    return [line.strip() for line in "".join(blocks).replace("\\\n", " ").splitlines()]


def run_recipe(recipe: str, folder: Path) -> None:
    """Run the commands of a recipe one after another in a folder, training in them shortened."""
    for line in commands_of(recipe):
        words = shlex.split(line)
        if words[0] == "cd":
            folder /= words[1]
        elif words[0] == "speechdp":
            ended = run_job([*alone(), *shortened(words[1:])], timeout_s=1200, cwd=folder)
            assert ended.exit_code == 0, f"{line}\n{ended.output}"
        else:
            subprocess.run(line, shell=True, check=True, cwd=folder)


def shortened(words: list[str]) -> list[str]:
    """Train for an epoch, with one seed and two strategies, which do not race."""
    changed = {
        "--epochs": "1",
        "--realign-epochs": "1",
        "--seeds": "1",
        "--strategies": "gradient_averaging,dpsgd",
    }
    short = [changed.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    return [*short, "--race", "0"] if words[0] == "compare" else short


def part_of_an4(folder: Path, each: slice, speakers: slice = slice(None)) -> Path:
    """Write a Kaldi directory with some utterances of each of some speakers, beside its recordings."""
    source = shared_data("an4")
    folder.mkdir(parents=True)
    of_speaker: dict[str, list[str]] = {}
    for line in (source / "utt2spk").read_text().splitlines():
        utterance, speaker = line.split()
        of_speaker.setdefault(speaker, []).append(utterance)
    chosen = {one for name in sorted(of_speaker)[speakers] for one in of_speaker[name][each]}
    for name in ("wav.scp", "text", "utt2spk"):
        lines = (source / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(line for line in lines if line.split()[0] in chosen))
    return folder


def scales_chosen_on_dev(folder: Path, decoded: str) -> int:
    """Count the decodings of a split below a folder; each must have used a trigram with scales from dev."""
    records = sorted(folder.glob(f"**/wer-{decoded}.json"))
    for path in records:
        record = json.loads(path.read_text())
        assert record["grammar"] == "ngram" and record["tuning"]["split"] == "dev", path
    return len(records)


def unpacked_an4(folder: Path) -> None:
    """Write what CMU's archive holds: one utterance of each speaker, all transcripts, the lexicon."""
    source = shared_data("an4")
    part = part_of_an4(folder.with_name("part"), slice(3, 4))
    for line in (part / "wav.scp").read_text().splitlines():
        recording = source / line.split()[1]
        samples, rate = soundfile.read(recording, dtype="int16")
        sphere = (folder / "wav" / recording.relative_to(source / "flac")).with_suffix(".sph")
        sphere.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(sphere, samples, rate, subtype="PCM_16", format="NIST", endian="BIG")
    etc = folder / "etc"
    etc.mkdir()
    said = [line.split() for line in (part / "text").read_text().splitlines()]
    with_name = [(words, name.partition("-")[2]) for name, *words in said]
    (etc / "an4_train.transcription").write_text(
        "".join(f"<s> {' '.join(words)} </s> ({name})\n" for words, name in with_name[:-10])
    )
    (etc / "an4_test.transcription").write_text(
        "".join(f"{' '.join(words)} ({name})\n" for words, name in with_name[-10:])
    )
    known: dict[str, int] = {}
    entries = []
    for line in (source / "lexicon.txt").read_text().splitlines():
        word, sounds = line.split(maxsplit=1)
        known[word] = known.get(word, 0) + 1
        variant = f"({known[word]})" if known[word] > 1 else ""
        entries.append(f"{word}{variant}\t{sounds}\n")
    (etc / "an4.dic").write_text("".join(entries))


def test_an4(tmp_path: Path) -> None:
    unpacked_an4(tmp_path / "an4")
    run_recipe("an4.md", tmp_path)
    # What the recipe makes of the archive is what the shared directory has.
    for name in ("text", "utt2spk"):
        made, part = ((tmp_path / at / name).read_text().splitlines() for at in ("an4", "part"))
        assert sorted(line.rstrip() for line in made) == sorted(part), name
    of_all = (shared_data("an4") / "lexicon.txt").read_text().split()
    assert (tmp_path / "an4" / "lexicon.txt").read_text().split() == of_all
    assert scales_chosen_on_dev(tmp_path, "test") == 3
    assert (tmp_path / "words.ctm").read_text().count("\n") > 0
    assert (tmp_path / "OUT" / "compare" / "compare.html").is_file()


def test_speechocean762(tmp_path: Path) -> None:
    # Its layout with AN4's recordings: two Kaldi directories with paths that begin beside them.
    repository = tmp_path / "speechocean762"
    part_of_an4(repository / "train", slice(3, 4), slice(0, 40))
    part_of_an4(repository / "test", slice(5, 9), slice(40, 50))
    (repository / "flac").symlink_to(shared_data("an4") / "flac")
    (repository / "resource").mkdir()
    (repository / "resource" / "lexicon.txt").symlink_to(shared_data("an4") / "lexicon.txt")
    run_recipe("speechocean762.md", tmp_path)
    assert json.loads((repository / "RUN" / "wer-test.json").read_text())["unknown_words"] > 0
    assert scales_chosen_on_dev(repository, "dev") == 3


def german_folder(folder: Path) -> None:
    """Write a folder for each of twelve voices, with sentences they say in German."""
    colours, things = ("grüne", "weiße", "schöne", "große"), ("Tür", "Straße", "Bäume", "Füße")
    espeak = start_espeak()
    for number in range(12):
        voice = Voice(f"de+{'mf'[number % 2]}{number // 2 + 1}", 130 + 5 * number)
        place = folder / f"sprecher{number}"
        place.mkdir(parents=True)
        for index in range(4):
            words = ["zwölf", colours[(index + number) % 4], things[(index // 2 + number) % 4]]
            samples = espeak.speak(words, voice, 1 + index).samples
            soundfile.write(place / f"satz{index}.wav", samples, espeak.sampling_rate, subtype="PCM_16")
            (place / f"satz{index}.txt").write_text(f"{' '.join(words)}.\n", encoding="utf-8")


@needs_espeak
def test_own_corpus(tmp_path: Path) -> None:
    for name in ("CORPUS", "NEW", "OTHER"):
        german_folder(tmp_path / name)
    run_recipe("own-corpus.md", tmp_path)
    assert "ü" in (tmp_path / "DATA" / "lexicon.txt").read_text(encoding="utf-8")
    assert len((tmp_path / "words.txt").read_text(encoding="utf-8").splitlines()) == 48
    assert (tmp_path / "TEST" / "data.json").is_file()
    assert (tmp_path / "OUT" / "compare" / "compare.html").is_file()


@needs_espeak
def test_own_corpus_of_one_speaker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the page says beside its first command, which is refused."""
    german_folder(tmp_path / "many")
    (tmp_path / "CORPUS").mkdir()
    for path in (tmp_path / "many").glob("*/*"):
        path.rename(tmp_path / "CORPUS" / f"{path.parent.name}-{path.name}")
    page = (RECIPES / "own-corpus.md").read_text(encoding="utf-8")
    lines = page.splitlines()
    (command,) = (line.split() for line in lines if line.startswith("    speechdp prepare CORPUS"))
    (split,) = re.findall(r"Replace the last option by\n`--split (\S+)`", page)
    paths = [str(tmp_path / name) for name in command[2:4]]
    assert main.run(["prepare", *paths, *command[4:]]) == 1
    assert "needs 3 speakers, it has 1" in capsys.readouterr().err
    assert command[-2] == "--split"
    assert main.run(["prepare", *paths, *command[4:-1], split]) == 0
    assert Dataset.open(tmp_path / "DATA").split_names == ("train", "dev", "test")


@pytest.mark.parametrize("recipe", sorted(path.name for path in RECIPES.glob("*.md")))
def test_every_recipe_has_a_test(recipe: str) -> None:
    name = f"test_{recipe.removesuffix('.md').replace('-', '_')}"
    assert name in globals(), f"write {name}"
