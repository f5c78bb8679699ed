from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from speechdp.decode.align import Aligner
from speechdp.decode.graphs.graph import LexiconTransducer
from speechdp.labels.forward_backward import full_sum, occupancies
from speechdp.labels.hmm import StateInventory
from speechdp.labels.lexicon import SILENCE, Lexicon
from speechdp.labels.transcript_hmm import (
    LOG_ZERO,
    CtcCompiler,
    TranscriptCompiler,
    TranscriptHmm,
    TranscriptHmms,
)

LEXICON = Lexicon({"ab": (("A", "B"),), "c": (("C",), ("A",), ("C", "A")), "d": (("D",),)})
INVENTORY = StateInventory(("A", "B", "C", "D"))
NUM_CLASSES = INVENTORY.num_classes
STAY = np.random.default_rng(1).uniform(0.3, 0.8, NUM_CLASSES)
TRANSCRIPTS = [["c", "c"], ["d"], [], ["c", "d"], ["ab"]]
#: The last but one needs six frames.
LENGTHS = [8, 5, 4, 5, 8]
FIT = [True, True, True, False, True]


def hmms_of(transcripts: list[list[str]]) -> TranscriptHmms:
    compiler = TranscriptCompiler(LEXICON, INVENTORY, STAY, 0.3)
    return TranscriptHmms.of([compiler.compile(words) for words in transcripts])


def scores(seed: int = 0, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS), NUM_CLASSES)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def enumerated(hmm: TranscriptHmm, frames: np.ndarray) -> list[tuple[list[int], float]]:
    """Return the classes and the log-probability of every path through an HMM."""
    following: dict[int, list[tuple[int, float]]] = {}
    for target in range(len(hmm.classes)):
        for source, arc in zip(hmm.predecessors[target].tolist(), hmm.log_probs[target], strict=True):
            if arc > LOG_ZERO:
                following.setdefault(source, []).append((target, float(arc)))
    begun = np.flatnonzero(hmm.initial > LOG_ZERO).tolist()
    paths = [([s], float(hmm.initial[s]) + frames[0, hmm.classes[s]]) for s in begun]
    for frame in frames[1:]:
        paths = [
            ([*path, s], log_prob + arc + frame[hmm.classes[s]])
            for path, log_prob in paths
            for s, arc in following.get(path[-1], [])
        ]
    ended = [(path, p + hmm.final[path[-1]]) for path, p in paths if hmm.final[path[-1]] > LOG_ZERO]
    return [(hmm.classes[path].tolist(), float(log_prob)) for path, log_prob in ended]


def best_path(hmm: TranscriptHmm, frames: NDArray[np.float64]) -> list[int]:
    """Return the classes of the most probable state sequence (Viterbi)."""
    scores, came_from = hmm.initial + frames[0, hmm.classes], list[NDArray[np.int64]]()
    for frame in frames[1:]:
        entered = scores[hmm.predecessors] + hmm.log_probs  # (S, K)
        came_from.append(np.take_along_axis(hmm.predecessors, entered.argmax(1)[:, None], 1)[:, 0])
        scores = entered.max(1) + frame[hmm.classes]
    path = [int((scores + hmm.final).argmax())]
    for before in reversed(came_from):
        path.append(int(before[path[-1]]))
    return list(hmm.classes[path[::-1]].tolist())


def test_sums_and_occupancies_are_those_of_enumeration() -> None:
    log_likelihoods, hmms = scores(), hmms_of(TRANSCRIPTS)
    found = occupancies(log_likelihoods, torch.tensor(LENGTHS), hmms)
    assert found.fits.tolist() == FIT
    compiler = TranscriptCompiler(LEXICON, INVENTORY, STAY, 0.3)
    for row, (words, length) in enumerate(zip(TRANSCRIPTS, LENGTHS, strict=True)):
        if not FIT[row]:
            continue
        paths = enumerated(compiler.compile(words), log_likelihoods[row, :length].numpy())
        log_probs = np.array([log_prob for _, log_prob in paths])
        total = np.logaddexp.reduce(log_probs)
        assert found.log_probs[row].item() == pytest.approx(total, abs=1e-9)
        expected = np.zeros((max(LENGTHS), NUM_CLASSES))
        for path, log_prob in paths:
            expected[np.arange(length), path] += np.exp(log_prob - total)
        np.testing.assert_allclose(found.classes[row].numpy(), expected, atol=1e-9)


def test_gradient_is_the_occupancy() -> None:
    log_likelihoods, lengths, hmms = scores().requires_grad_(), torch.tensor(LENGTHS), hmms_of(TRANSCRIPTS)
    assert torch.autograd.gradcheck(lambda x: full_sum(x, lengths, hmms)[0], log_likelihoods, fast_mode=True)
    log_probs, fits = full_sum(log_likelihoods, lengths, hmms)
    assert fits.tolist() == FIT
    (gradient,) = torch.autograd.grad((log_probs * torch.arange(1.0, 6.0)).sum(), log_likelihoods)
    expected = occupancies(log_likelihoods, lengths, hmms).classes * torch.arange(1.0, 6.0)[:, None, None]
    torch.testing.assert_close(gradient, expected)
    with torch.no_grad():
        torch.testing.assert_close(full_sum(log_likelihoods, lengths, hmms)[0], log_probs)


def test_what_cannot_be_pronounced_changes_nothing_else_in_the_batch() -> None:
    lengths = torch.tensor([400, 300])
    generator = torch.Generator().manual_seed(0)
    log_likelihoods = 3 * torch.randn(2, 400, NUM_CLASSES, generator=generator)
    log_likelihoods.requires_grad_()
    alone, _ = full_sum(log_likelihoods[:1], lengths[:1], hmms_of([["c", "d"]]))
    log_probs, fits = full_sum(log_likelihoods, lengths, hmms_of([["c", "d"], ["c", "x"]]))
    assert fits.tolist() == [True, False]
    assert log_probs.tolist() == [pytest.approx(alone.item()), 0.0]
    (gradient,) = torch.autograd.grad(log_probs.sum(), log_likelihoods)
    torch.testing.assert_close(gradient[0].sum(1), torch.ones(400))
    assert (gradient[1] == 0).all()


def test_what_is_too_short_or_padding_has_no_occupancy() -> None:
    hmms, lengths = hmms_of(TRANSCRIPTS), torch.tensor(LENGTHS)
    found = occupancies(scores(), lengths, hmms)
    inside = (torch.arange(max(LENGTHS)) < lengths[:, None]) & torch.tensor(FIT)[:, None]
    torch.testing.assert_close(found.classes.sum(2), inside.double())
    assert found.log_probs[3] == 0


def test_values_past_the_end_change_nothing() -> None:
    hmms, lengths = hmms_of(TRANSCRIPTS), torch.tensor(LENGTHS)
    changed = torch.where((torch.arange(8) < lengths[:, None]).unsqueeze(2), scores(), 1000.0)
    found, expected = occupancies(changed, lengths, hmms), occupancies(scores(), lengths, hmms)
    torch.testing.assert_close(found.classes, expected.classes)
    torch.testing.assert_close(found.log_probs, expected.log_probs)


@pytest.mark.parametrize("scale", [0.0, 1000.0])
def test_extreme_scores_leave_finite_sums_of_one(scale: float) -> None:
    transcripts = [["ab", "c", "d", "c"]] * 2
    generator = torch.Generator().manual_seed(0)
    frames = scale * torch.randn(2, 200, NUM_CLASSES, generator=generator)
    found = occupancies(frames, torch.tensor([200, 120]), hmms_of(transcripts))
    assert found.classes.dtype == torch.float32
    assert found.log_probs.isfinite().all()
    expected = (torch.arange(200) < torch.tensor([[200], [120]])).float()
    torch.testing.assert_close(found.classes.sum(2), expected)


def test_best_path_is_the_one_that_the_decoding_graph_has() -> None:
    words, generator = ["c", "ab", "c", "d"], torch.Generator().manual_seed(3)
    transducer = LexiconTransducer(LEXICON, INVENTORY, STAY, 0.3)
    for _ in range(5):
        frames = 4 * torch.randn(1, 60, NUM_CLASSES, generator=generator)
        hmm = TranscriptCompiler(LEXICON, INVENTORY, STAY, 0.3).compile(words)
        aligned = Aligner(transducer).align(words, frames[0].numpy())
        assert aligned is not None and best_path(hmm, frames[0].numpy()) == aligned.tolist()


def test_a_batch_without_frames_fits_nothing() -> None:
    log_probs, fits = full_sum(torch.zeros(1, 0, NUM_CLASSES), torch.tensor([0]), hmms_of([["d"]]))
    assert log_probs.tolist() == [0.0] and not fits.any()


def test_over_the_graphs_of_ctc_the_sum_is_that_of_torch() -> None:
    """Also where a phone follows itself within a word and between two, and where nothing is said."""
    lexicon = Lexicon({"aab": (("A", "A", "B"),), "b": (("B",),), "c": (("C",),)})
    texts = [["aab", "b", "c"], ["b", "b"], [], ["c"], ["aab"]]
    labels = [[1, 1, 2, 2, 3], [2, 2], [], [3], [1, 1, 2]]
    lengths = torch.tensor([9, 7, 3, 9, 3])
    generator = torch.Generator().manual_seed(0)
    log_posteriors = torch.randn(5, 9, 4, generator=generator, dtype=torch.float64).log_softmax(2)
    log_posteriors.requires_grad_()
    compiler = CtcCompiler(lexicon, StateInventory(("A", "B", "C")))
    hmms = TranscriptHmms.of([compiler.compile(words) for words in texts])
    assert hmms.min_frames.tolist() == [7, 3, 1, 1, 4]
    log_probs, fits = full_sum(log_posteriors, lengths, hmms)
    assert fits.tolist() == [True, True, True, True, False]  # the last needs a blank between two A
    expected = -torch.nn.functional.ctc_loss(
        log_posteriors.transpose(0, 1),
        torch.tensor([label for row in labels for label in row]),
        lengths,
        torch.tensor([len(row) for row in labels]),
        reduction="none",
        zero_infinity=True,
    )
    torch.testing.assert_close(log_probs, expected)


def test_the_graphs_of_ctc_sum_over_pronunciations() -> None:
    lexicon = Lexicon({"c": (("C",), ("A", "C")), "a": (("A",),)})
    compiler = CtcCompiler(lexicon, StateInventory(("A", "B", "C")))
    log_posteriors = torch.randn(1, 8, 4, generator=torch.Generator().manual_seed(0)).log_softmax(2)
    lengths = torch.tensor([8])
    found, _ = full_sum(log_posteriors, lengths, TranscriptHmms.of([compiler.compile(["a", "c"])]))
    frames = log_posteriors[0].double()
    each = [
        -torch.nn.functional.ctc_loss(
            frames, torch.tensor(labels), lengths[0], torch.tensor(len(labels)), 0, "sum"
        )
        for labels in ([1, 3], [1, 1, 3])
    ]
    torch.testing.assert_close(found[0], torch.stack(each).logsumexp(0))


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (["pause"], "-+"),
        (["pause", "a"], "-+a+-*"),
        (["a", "pause", "a"], "-*a+-+a+-*"),
        (["ab"], "-*a+-+b+-*"),
        (["ab", "b"], "-*a+-+b+-+b+-*"),
        (["pa", "pa"], "-+a+-+a+-*"),
    ],
)
def test_silence_of_a_pronunciation_is_a_blank_that_must_be_there(words: list[str], pattern: str) -> None:
    lexicon = Lexicon(
        {
            "a": (("A",),),
            "b": (("B",),),
            "pause": ((SILENCE,),),
            "ab": (("A", SILENCE, "B"),),
            "pa": ((SILENCE, "A"),),
        }
    )
    hmm = CtcCompiler(lexicon, StateInventory(("A", "B"))).compile(words)
    log_posteriors = torch.randn(1, 6, 3, generator=torch.Generator().manual_seed(0)).double().log_softmax(2)
    found, _ = full_sum(log_posteriors, torch.tensor([6]), TranscriptHmms.of([hmm]))
    matching = (
        classes
        for classes in itertools.product(range(3), repeat=6)
        if re.fullmatch(pattern, "".join("-ab"[number] for number in classes))
    )
    each = [sum(float(log_posteriors[0, t, c]) for t, c in enumerate(classes)) for classes in matching]
    torch.testing.assert_close(found[0], torch.tensor(each).double().logsumexp(0))
