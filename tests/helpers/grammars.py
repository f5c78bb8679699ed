"""Language models: a grammar as Kaldi has it (G.fst and words.txt), and what a data directory has."""

from __future__ import annotations

from pathlib import Path

import kaldifst

from speechdp.decode.language_model import LanguageModel, StoredModel


def write_grammar(folder: Path, words: str = "<eps> 0\nto 1\nsee 2\n#0 3\nother 4\n") -> Path:
    """Write "to see", or "other" after backing off."""
    fst = kaldifst.StdVectorFst()
    for _ in range(4):
        fst.add_state()
    fst.start = 0
    fst.set_final(2, 0.5)
    for source, label, cost, target in ((0, 1, 1.0, 1), (1, 2, 0.25, 2), (0, 3, 0.1, 3), (3, 4, 0.2, 2)):
        fst.add_arc(source, kaldifst.StdArc(label, 0 if label == 3 else label, cost, target))
    assert fst.write(str(folder / "G.fst"))
    (folder / "words.txt").write_text(words)
    return folder / "G.fst"


def language_model_in(folder: Path) -> LanguageModel | None:
    """Read the language model of a data directory; None where there is none."""
    stored = StoredModel.in_folder(folder)
    return None if stored is None else stored.model
