"""Count the utterances of a split that cannot be learnt when whole transcripts are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from speechdp.comm.base import Communicator
from speechdp.data.plan.segments import CorpusIndex
from speechdp.labels.transcript_hmm import NO_PATH, TranscriptHmms


class LeftOut:
    """Records the utterances that have no path through their HMMs, and why; thread-safe.

    Args:
        index: the utterances of the split.

    Example::

        fits = source.left_out.fits(segments.shard, segments.utterance, lengths, hmms)
        numbers = source.left_out.gather(comm)  # {"too_short": 3, "unknown_words": 1}
    """

    def __init__(self, index: CorpusIndex) -> None:
        self._index = index
        self._too_short, self._unknown = np.zeros((2, len(index)), dtype=bool)

    def fits(
        self,
        shard: npt.NDArray[np.integer],
        utterance: npt.NDArray[np.integer],
        lengths: npt.NDArray[np.int64],
        hmms: TranscriptHmms,
    ) -> npt.NDArray[np.bool_]:
        """Return which utterances of a batch have a path, (B,), and record the others.

        Args:
            shard: (B,).
            utterance: (B,) place in the shard.
            lengths: (B,) frames.
            hmms: HMMs of the transcripts.
        """
        fits: npt.NDArray[np.bool_] = lengths >= hmms.min_frames
        if not fits.all():
            position = np.searchsorted(self._index.shard, shard) + utterance
            unknown = hmms.min_frames == NO_PATH
            self._unknown[position[unknown]] = True
            self._too_short[position[~(fits | unknown)]] = True
        return fits

    def gather(self, comm: Communicator) -> dict[str, int]:
        """Count the utterances that any rank has left out, each once.  Collective.

        Returns:
            `too_short`: those with fewer frames than their transcripts need; `unknown_words`: those with
            words that cannot be pronounced.  Zero counts are left out.
        """
        own = {"too_short": self._too_short, "unknown_words": self._unknown}
        found = comm.allgather_object({why: np.flatnonzero(these).tolist() for why, these in own.items()})
        numbers = {why: len(set().union(*(part[why] for part in found))) for why in own}
        return {why: number for why, number in numbers.items() if number}
