"""Embed recordings in a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import soundfile

from speechdp.data.shards.dataset import Dataset


def embedded_audio(
    dataset: Dataset, split: str, utterance_ids: Sequence[str], max_bytes: int
) -> dict[str, str]:
    """Return recordings as `data:` URLs of 16-bit WAV, by utterance id.

    Args:
        utterance_ids: utterances to embed; if not all fit, the first ones are taken.
        max_bytes: largest size of all samples together; base64 in the page takes a third more.

    Returns:
        An empty dict if the data set stores features, because its recordings may be anywhere.

    Raises:
        ShardError: a shard is damaged.
    """
    if dataset.stored != "audio":
        return {}
    found: dict[str, str] = {}
    with dataset.open_shards(split) as shards:
        places = {name: (shard, i) for shard in shards for i, name in enumerate(shard.utterance_ids)}
        for utterance_id in utterance_ids:
            shard, position = places[utterance_id]
            samples, _ = shard.read_samples(position)
            max_bytes -= samples.nbytes
            if max_bytes < 0:
                break
            file = io.BytesIO()
            soundfile.write(file, samples, dataset.sampling_rate, format="WAV", subtype="PCM_16")
            encoded = base64.b64encode(file.getvalue()).decode("ascii")
            found[utterance_id] = f"data:audio/wav;base64,{encoded}"
    return found
