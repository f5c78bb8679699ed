"""Keep many tensors in one vector, so that averaging over ranks is one exchange without a copy.

The tensors become views into one allocation.  Tensors that already shared a storage (cuDNN's packed LSTM
weights after `flatten_parameters`) keep their relative places and start a storage of their own.  cuDNN checks
for that before it uses the weights without repacking them at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from speechdp.errors import ConfigError

#: Views start at multiples of this, so that vectorised kernels see aligned rows (64 bytes = a cache line
#: and an AVX-512 register; cuDNN asks for less).
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Place:
    """Location of one tensor in the flat vector (offset and size in elements)."""

    offset: int
    num_elements: int
    shape: torch.Size


class FlatBuffer:
    """One vector holding `tensors` one after the other, with `num_extra` scalars appended.

    The extra scalars travel in the same exchange: a frame count costs no message of its own.

    Attributes:
        whole: the vector including padding and the extra scalars; what is exchanged.  (n + num_extra,)
        values: the same without the extra scalars.  (n,)
        extra: the scalars.  (num_extra,)
        views: one tensor per input tensor, in order and with its shape, sharing memory with `whole`.
        places: where each view is.

    Raises:
        ConfigError: tensors overlap in memory, so they cannot each have a place.
    """

    def __init__(self, tensors: Sequence[Tensor], *, num_extra: int = 0) -> None:
        assert tensors, "a flat buffer needs at least one tensor"
        first = tensors[0]
        assert all(t.dtype == first.dtype and t.device == first.device for t in tensors)
        chunks = _chunks_by_storage(tensors)
        align = max(1, _ALIGNMENT_BYTES // first.element_size())
        starts: list[int] = []
        end = 0
        for chunk in chunks:
            starts.append(end)
            end += -(-chunk.num_elements // align) * align
        self.whole = torch.zeros(end + num_extra, dtype=first.dtype, device=first.device)
        self.values = self.whole[:end]
        self.extra = self.whole[end:]
        self.views: list[Tensor] = [first] * len(tensors)
        self.places: list[Place] = [Place(0, 0, first.shape)] * len(tensors)
        for start, chunk in zip(starts, chunks, strict=True):
            self._place_chunk(tensors, start, chunk)

    def _place_chunk(self, tensors: Sequence[Tensor], start: int, chunk: _Chunk) -> None:
        piece = self.whole[start : start + chunk.num_elements]
        # A tensor from DLPack is the same memory under a storage that starts at the piece itself.
        alias = from_dlpack(piece) if chunk.num_elements else piece
        for index, offset in chunk.members:
            tensor = tensors[index]
            view = alias[offset : offset + tensor.numel()].view(tensor.shape)
            view.copy_(tensor.detach())
            self.views[index] = view
            self.places[index] = Place(start + offset, tensor.numel(), tensor.shape)

    def like(self) -> FlatBuffer:
        """Return a zeroed buffer of the same layout, e.g. gradients for parameters."""
        other = object.__new__(FlatBuffer)
        other.whole = torch.zeros_like(self.whole)
        other.values = other.whole[: self.values.numel()]
        other.extra = other.whole[self.values.numel() :]
        other.places = list(self.places)
        other.views = self.views_of(other.values)
        return other

    def views_of(self, vector: Tensor) -> list[Tensor]:
        """Return the tensors in another vector of this layout, in order."""
        return [vector[p.offset : p.offset + p.num_elements].view(p.shape) for p in self.places]

    def buckets(self, bucket_bytes: int) -> list[Bucket]:
        """Split `whole` into consecutive pieces of about `bucket_bytes`, in order of decreasing offset.

        Every element of `whole` is in exactly one bucket.  No tensor is split, so a bucket is complete when
        the last of its tensors is; a tensor larger than a bucket gets one to itself.  Backward fills
        gradients from the last layer to the first, hence the order; the extra scalars are in the bucket at
        the end of the vector.
        """
        limit = max(1, bucket_bytes // self.whole.element_size())
        # An empty tensor has the offset of the one after it: it must not close that one's bucket.
        places = [(place.offset, place.num_elements, i) for i, place in enumerate(self.places)]
        order = [i for _, _, i in sorted(places, reverse=True)]
        result: list[Bucket] = []
        end = self.whole.numel()
        members: list[int] = []
        for position, index in enumerate(order):
            members.append(index)
            start = self.places[index].offset
            is_last = position == len(order) - 1
            following = 0 if is_last else self.places[order[position + 1]].offset
            if is_last or end - following > limit:
                start = 0 if is_last else start
                result.append(Bucket(self.whole[start:end], tuple(members)))
                end, members = start, []
        return result


@dataclass(frozen=True)
class Bucket:
    """A contiguous piece of a flat buffer and the indices of the tensors in it."""

    piece: Tensor
    tensor_indices: tuple[int, ...]


@dataclass(frozen=True)
class _Chunk:
    num_elements: int
    members: tuple[tuple[int, int], ...]  # (index of the tensor, offset within the chunk)


def _chunks_by_storage(tensors: Sequence[Tensor]) -> list[_Chunk]:
    """Group tensors that are contiguous views of one storage, in the order of first appearance.

    Raises:
        ConfigError: tensors overlap.
    """
    groups: dict[int, list[int]] = {}
    for index, tensor in enumerate(tensors):
        # Empty tensors have no address of their own; each forms its own chunk.
        key = tensor.untyped_storage().data_ptr() if tensor.numel() and tensor.is_contiguous() else -1 - index
        groups.setdefault(key, []).append(index)
    chunks: list[_Chunk] = []
    for members in groups.values():
        base = min(int(tensors[i].storage_offset()) for i in members)
        offsets = [(i, int(tensors[i].storage_offset()) - base) for i in members]
        span = max(offset + tensors[i].numel() for i, offset in offsets)
        if not _disjoint([(o, tensors[i].numel()) for i, o in offsets]):
            shapes = " and ".join(str(list(tensors[i].shape)) for i in members)
            raise ConfigError(
                f"different parameters of the model share memory ({shapes}), as nn.Parameter(other.data) "
                "does; to tie weights, assign the same Parameter to both modules: head.weight = "
                "embedding.weight"
            )
        chunks.append(_Chunk(span, tuple(offsets)))
    return chunks


def _disjoint(ranges: list[tuple[int, int]]) -> bool:
    end = 0
    for offset, length in sorted(ranges):
        if offset < end:
            return False
        end = offset + length
    return True
