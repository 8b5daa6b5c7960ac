"""Digests of tensors as two 64-bit integers, and votes over ranks that should have equal ones.

A digest is a sum of integers modulo 2^64, so it is the same on every device and in every order of addition. The first
sum is of the 8-byte words of the tensor: a single flipped bit always changes it. The second sum weights the words by
their positions: it also sees words that were exchanged, and changes that cancel in the first.
"""

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ROW = 1024
"""Words of a row. Words are weighted by row and by column, which needs no memory for weights or products."""
_ROW_FACTOR, _TAIL_FACTOR = 0x5851F42D4C957F2D, 0x14057B7EF767814F
"""Odd factors of the weighted sums of rows and of the tail."""


def digest(tensor: Tensor) -> Tensor:
    """The digest ``[2]`` of the bits of a contiguous ``tensor``."""
    body, tail = _words(tensor)
    if body.numel() <= 2 * _ROW:
        words = torch.cat((body, tail)) if tail.numel() else body
        return torch.stack((words.sum(), (words * _positions(words)).sum()))
    rows = body[: body.numel() // _ROW * _ROW].view(-1, _ROW)
    rest = torch.cat((body[rows.numel() :], tail))
    by_row, by_column = rows.sum(dim=1), rows.sum(dim=0)
    weighted = (
        (by_row * _positions(by_row)).sum() * _ROW_FACTOR
        + (by_column * _positions(by_column)).sum()
        + (rest * _positions(rest)).sum() * _TAIL_FACTOR
    )
    return torch.stack((by_row.sum() + rest.sum(), weighted))


def _words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The whole 8-byte words of ``tensor``, and its remaining bytes, each as an int64 number."""
    flat = tensor.detach().reshape(-1)
    if flat.storage_offset() * flat.itemsize % 8:
        flat = flat.clone()  # a view of 8-byte words must begin at one
    num_words = flat.nbytes // 8
    if num_words * 8 == flat.nbytes:
        return flat.view(torch.int64), flat.new_zeros(0, dtype=torch.int64)
    octets = flat.view(torch.uint8)
    return octets[: num_words * 8].view(torch.int64), octets[num_words * 8 :].to(torch.int64)


def _positions(words: Tensor) -> Tensor:
    """1, 2, 3 ... for every word."""
    return torch.arange(1, words.numel() + 1, device=words.device)


def digests(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The digest of every tensor: ``[tensors, 2]``."""
    if not tensors:
        return torch.zeros((0, 2), dtype=torch.int64, device=device)
    return torch.stack([digest(tensor) for tensor in tensors])


def key_of(*names: Hashable) -> int:
    """An odd number for ``names``, the same in every process: the factor of a tensor's digest in a fold."""
    hashed = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little", signed=True) | 1


def fold(parts: Tensor, keys: Tensor) -> Tensor:
    """One digest ``[2]`` of the digests ``parts`` ``[tensors, 2]``, each multiplied by its ``keys`` ``[tensors]``.

    The keys are odd, so a change of one part changes the fold.
    """
    return (parts * keys.unsqueeze(1)).sum(dim=0)


@dataclass(frozen=True)
class OddRanks:
    """The ranks of a group that have other bits than the rest."""

    ranks: tuple[int, ...]
    others: tuple[int, ...]
    """The ranks that agree; none without a majority, and then ``ranks`` are the whole group."""

    @property
    def is_by_vote(self) -> bool:
        """Whether more than half of the group agrees, so that ``ranks`` are the wrong ones."""
        return bool(self.others)


def find_odd(values: Mapping[int, Hashable]) -> OddRanks | None:
    """The ranks of a group whose value is not the majority's; None if all ``values``, by rank, are equal.

    Without a majority, as among two ranks, all ranks are named.
    """
    if len(set(values.values())) <= 1:
        return None
    (majority, count), *_ = Counter(values.values()).most_common(1)
    ranks = tuple(sorted(values))
    if 2 * count <= len(ranks):
        return OddRanks(ranks, ())
    odd = tuple(rank for rank in ranks if values[rank] != majority)
    return OddRanks(odd, tuple(rank for rank in ranks if rank not in odd))


def list_ranks(ranks: Iterable[int], most: int = 8) -> str:
    """``ranks`` in words: rank 3; ranks 1 and 2; ranks 1, 2, 3 and 40 more."""
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > most:
        return f"ranks {', '.join(numbers[: most - 1])} and {len(numbers) - most + 1} more"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
