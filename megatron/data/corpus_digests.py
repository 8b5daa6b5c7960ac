"""Digests of a corpus in ``P.digests.json``, next to ``P.bin`` and ``P.idx``, and the comparison of a corpus with them.

The file has the XXH3-64 of every block of both files. The tools that write a corpus compute the digests from the bytes
in memory. A block has 1 MiB: large enough that the digests of a terabyte are 16 MB of text, small enough to locate
damage. The file has a digest of its own text.

Indexes are compared before they are used, blocks of tokens during training. Ranks share the work: of all blocks of all
corpora, each rank compares every ``world_size``-th. A thread compares blocks of tokens in the order in which the run
reads them, so damage is found soon after, mostly before, a step uses it, and only blocks that the run reads are
compared. The thread reads with ``pread``; file system and XXH3 release the interpreter's lock.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from megatron.data.digests import BLOCK_BYTES, FileDigests, is_sealed, new_digests, seal
from megatron.data.gpt_dataset import BlendedDataset, CorpusDataset, Dataset, corpus_datasets
from megatron.data.indexed_dataset import FILES_OF_CORPUS, IndexedDataset, allow_open_files
from megatron.data.storage import open_stored, write_atomically
from megatron.errors import DataError

Integers = npt.NDArray[np.int64]

FORMAT_VERSION = 1
SUFFIX = ".digests.json"

_KEY = "digests"
_BLOCK_BITS = 44  # the lower bits of a key are the block, the upper ones the corpus
_SAMPLES_AT_A_TIME = 64
_PATIENCE = 10.0  # seconds to wait for the thread to end
_LARGEST_SHARE_OF_A_CORE = 0.2  # of a thread without blocks to compare


@dataclass(frozen=True)
class CorpusDigests:
    tokens: FileDigests  # of P.bin
    index: FileDigests  # of P.idx

    def fingerprint(self) -> str:
        """One digest for the whole corpus: XXH3-128 of all sizes and digests, in hexadecimal."""
        digest = xxhash.xxh3_128()
        for file in (self.tokens, self.index):
            digest.update(file.size.to_bytes(8, "big"))
            digest.update(file.digests)
        return digest.hexdigest()


def digests_path(prefix: str) -> str:
    """Path of the digests of a corpus; a URL for a remote corpus."""
    return f"{prefix}{SUFFIX}"


def encode_digests(digests: CorpusDigests) -> str:
    files = {".bin": digests.tokens, ".idx": digests.index}
    records = {kind: file.encode() for kind, file in files.items()}
    head = {"format_version": FORMAT_VERSION, "algorithm": "XXH3-64", "block_bytes": BLOCK_BYTES}
    return seal(_KEY, json.dumps({**head, "files": records}))


def decode_digests(text: str) -> CorpusDigests:
    """The inverse of :func:`encode_digests`; raises ``ValueError`` for an invalid text."""
    try:
        document = json.loads(text)[_KEY]
        if document["format_version"] != FORMAT_VERSION or document["block_bytes"] != BLOCK_BYTES:
            raise ValueError(
                f"format version {document['format_version']} with blocks of {document['block_bytes']} bytes, where "
                f"this code reads version {FORMAT_VERSION} with {BLOCK_BYTES}"
            )
        if not is_sealed(_KEY, text):
            raise ValueError("its digest does not match its content")
        files = document["files"]
        return CorpusDigests(FileDigests.decode(files[".bin"]), FileDigests.decode(files[".idx"]))
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__} {error}") from error


def read_digests(prefix: str) -> CorpusDigests | None:
    """The digests of a corpus; None if there are none. Raises :class:`DataError` for a damaged file."""
    path = digests_path(prefix)
    try:
        with open_stored(path) as file:
            return decode_digests(file.read().decode())
    except FileNotFoundError:
        return None
    except ValueError as error:  # also of a text that is not UTF-8
        raise DataError(
            f"{path} is damaged ({error}): copy it again, or write it again with tools/inspect_dataset.py {prefix} "
            "--write-digests."
        ) from error
    except DataError:
        raise
    except Exception as error:  # every remote file system has its own
        raise DataError(f"{path} cannot be read ({error}): make it readable, or remove it.") from error


def write_digests(prefix: str, digests: CorpusDigests) -> None:
    """Write the digests of a local corpus atomically; errors are ``OSError``."""
    text = encode_digests(digests).encode()
    write_atomically(digests_path(prefix), lambda file: file.write(text))


def compute_digests(prefix: str) -> CorpusDigests:
    """The digests of the present files of a local corpus; reads them completely. Errors are ``OSError``."""
    found = []
    for kind in (".bin", ".idx"):
        digests = new_digests()
        with open(f"{prefix}{kind}", "rb", buffering=0) as file:
            digests.read(file)
        found.append(FileDigests.of(digests))
    return CorpusDigests(*found)


def corpus_fingerprint(prefix: str) -> str | None:
    """The fingerprint in the digests file of a corpus, which is not read; None if there is no such file."""
    digests = read_digests(prefix)
    return None if digests is None else digests.fingerprint()


def check_file(path: str, digests: FileDigests, blocks: Iterable[int] | None = None, name: str | None = None) -> None:
    """Compare ``blocks`` of the local file ``path``; errors name ``name`` (``path`` may be a copy)."""
    try:
        with open(path, "rb", buffering=0) as file:
            number = file.fileno()
            size = os.fstat(number).st_size
            check_blocks(name or path, digests, size, lambda start, count: os.pread(number, count, start), blocks)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): make it readable.") from error


def check_blocks(
    path: str,
    digests: FileDigests,
    size: int,
    read: Callable[[int, int], bytes | bytearray],
    blocks: Iterable[int] | None = None,
) -> None:
    """Raise :class:`DataError` if the ``size`` of the file ``path``, or one of ``blocks`` (default: all), differs from
    ``digests``. ``read(start, size)`` returns bytes of the file."""
    check_size(path, digests, size)
    for block in range(digests.num_blocks) if blocks is None else blocks:
        start, stop = digests.range_of(block)
        damage = damage_of(path, digests, block, read(start, stop - start))
        if damage is not None:
            raise DataError(f"{damage}: {remedy_of(path)}.")


def check_size(path: str, digests: FileDigests, size: int) -> None:
    """Raise :class:`DataError` if ``size`` differs from ``digests``."""
    if size != digests.size:
        raise DataError(f"{path} has {size} bytes instead of {digests.size}: {remedy_of(path)}.")


def damage_of(path: str, digests: FileDigests, block: int, content: bytes | bytearray) -> str | None:
    """The beginning of a sentence if the ``content`` of a block is damaged; None if its digest matches."""
    if digests.matches(block, content):
        return None
    start, stop = digests.range_of(block)
    beside = os.path.basename(digests_path(os.path.splitext(path)[0]))
    return f"{path} is damaged in bytes {start} to {stop} (block {block}), whose digest is not the one in {beside}"


def remedy_of(path: str) -> str:
    prefix = os.path.splitext(path)[0]
    return (
        f"copy it again; or, if another program wrote it since, write the digests anew with tools/inspect_dataset.py "
        f"{prefix} --write-digests"
    )


class BlockUses(NamedTuple):
    """Reads of blocks, in the order of the samples; each block once per call of :func:`block_uses`."""

    # [uses] index of a sample among the requested ones
    positions: Integers
    # [uses] index of the corpus in corpora_of
    corpora: Integers
    # [uses] index of the block in its .bin file
    blocks: Integers


def corpora_of(dataset: Dataset) -> list[IndexedDataset]:
    """The corpora of a dataset, each once; none for synthetic data."""
    return list({child.corpus.prefix: child.corpus for child in corpus_datasets(dataset)}.values())


def block_uses(dataset: Dataset, samples: Integers) -> BlockUses:
    """The blocks that ``samples`` ``[n]`` of ``dataset`` read, each at the first sample that reads it."""
    if isinstance(dataset, CorpusDataset):
        positions, blocks = _blocks_of_one(dataset, samples)
        uses = BlockUses(positions, np.zeros_like(blocks), blocks)
    elif isinstance(dataset, BlendedDataset):
        uses = _blocks_of_blend(dataset, samples)
    else:
        nothing = np.zeros(0, np.int64)
        uses = BlockUses(nothing, nothing, nothing)
    # The first use of every block, in the order of the samples.
    order = np.argsort(uses.positions, kind="stable")
    keys = (uses.corpora << _BLOCK_BITS) + uses.blocks
    _, first = np.unique(keys[order], return_index=True)
    kept = order[np.sort(first)]
    return BlockUses(uses.positions[kept], uses.corpora[kept], uses.blocks[kept])


def _blocks_of_blend(blend: BlendedDataset, samples: Integers) -> BlockUses:
    prefixes = [corpus.prefix for corpus in corpora_of(blend)]
    children, rows = blend.dataset_index[samples], blend.dataset_sample_index[samples].astype(np.int64)
    parts = []
    for number in np.unique(children).tolist():
        child = blend.datasets[number]
        (places,) = np.nonzero(children == number)
        positions, blocks = _blocks_of_one(child, rows[places])
        corpora = np.full(len(blocks), prefixes.index(child.corpus.prefix))
        parts.append(BlockUses(places[positions], corpora, blocks))
    return BlockUses(*(np.concatenate(arrays) for arrays in zip(*parts)))


def _blocks_of_one(dataset: CorpusDataset, samples: Integers) -> tuple[Integers, Integers]:
    """For every read of a block: the index of the sample in ``samples``, and the block."""
    # Byte ranges in .bin, one for every part of a document that a sample has: [r] each.
    positions, documents, first_token, stop_token = dataset.document_ranges(samples)
    offsets, size = dataset.corpus.byte_offsets[documents], dataset.corpus.dtype.itemsize
    starts, stops = offsets + first_token * size, offsets + stop_token * size
    read = stops > starts
    positions, starts, stops = positions[read], starts[read], stops[read]
    first, last = starts // BLOCK_BYTES, (stops - 1) // BLOCK_BYTES
    counts = last - first + 1  # blocks of each range
    place = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)  # in its range: 0, 1, ...
    return np.repeat(positions, counts), np.repeat(first, counts) + place


# The digests of corpora by prefix; None for a corpus without digests.
Digests = Mapping[str, CorpusDigests | None]


class Share(NamedTuple):
    """A rank's share of the blocks."""

    rank: int = 0
    world_size: int = 1


def check_indexes(prefixes: Sequence[str], index_cache: str | None, share: Share, num_threads: int = 1) -> Digests:
    """Compare this rank's share of the blocks of every ``.idx`` file, and the sizes of both files, with the digests.

    Raises :class:`DataError` for a difference; a corpus without digests passes. ``num_threads`` corpora are opened in
    parallel.
    """
    allow_open_files(len(prefixes), FILES_OF_CORPUS)
    open_corpus = partial(IndexedDataset, mmap=False, index_cache=index_cache)
    with ThreadPoolExecutor(num_threads) as threads:
        corpora = list(threads.map(open_corpus, prefixes))
        found = dict(zip(prefixes, threads.map(read_digests, prefixes), strict=True))
    first = 0  # number of a file's first block among those of all files
    for corpus, (prefix, digests) in zip(corpora, found.items(), strict=True):
        if digests is None:
            continue
        check_size(f"{prefix}.bin", digests.tokens, corpus.stored_bytes)
        blocks = range((share.rank - first) % share.world_size, digests.index.num_blocks, share.world_size)
        check_file(corpus.index_path, digests.index, blocks, name=f"{prefix}.idx")
        first += digests.index.num_blocks
    return found


class SampleRange(NamedTuple):
    """Samples of a run, by their position in the sample order."""

    split: str
    dataset: Dataset
    start: int
    stop: int
    samples: Callable[[int, int], Integers]  # the samples of ``dataset`` in a range of positions


@dataclass(frozen=True)
class Damage:
    path: str
    description: str  # the beginning of a sentence: file, bytes, block
    split: str  # whose samples read the block
    position: int  # of the first of these samples in the sample order


class BlockComparison:
    """Compares this rank's blocks of the corpora with digests, each once."""

    def __init__(self, digests: Digests, share: Share) -> None:
        self._digests = {prefix: found for prefix, found in digests.items() if found is not None}
        sizes = [found.tokens.num_blocks for found in self._digests.values()]
        firsts = np.cumsum([0, *sizes])
        # By prefix, [blocks] bool: whether a block belongs to this rank and is not compared yet.
        self._pending = {
            prefix: (np.arange(first, first + size) % share.world_size) == share.rank
            for prefix, first, size in zip(self._digests, firsts, sizes)
        }
        self.remaining = sum(int(pending.sum()) for pending in self._pending.values())

    def compare(self, wanted: SampleRange) -> Iterator[Damage | int]:
        """Compare the blocks of these samples, in order. Yields after each step: the bytes read (0 for arithmetic), or
        the damage."""
        corpora = corpora_of(wanted.dataset)
        for start in range(wanted.start, wanted.stop, _SAMPLES_AT_A_TIME):
            samples = wanted.samples(start, min(start + _SAMPLES_AT_A_TIME, wanted.stop))
            uses = block_uses(wanted.dataset, samples)
            for place, number, block in zip(*(array.tolist() for array in uses)):
                corpus = corpora[number]
                if corpus.prefix not in self._pending or not self._pending[corpus.prefix][block]:
                    continue
                self._pending[corpus.prefix][block] = False
                self.remaining -= 1
                path, digests = f"{corpus.prefix}.bin", self._digests[corpus.prefix].tokens
                begin, end = digests.range_of(block)
                damage = damage_of(path, digests, block, corpus.stored(begin, end - begin))
                yield end - begin if damage is None else Damage(path, damage, wanted.split, start + place)
            yield 0


class BackgroundComparison:
    """Compares blocks in a thread, at a limited rate; :attr:`found` has the result."""

    def __init__(self, comparison: BlockComparison, ranges: Sequence[SampleRange], bytes_per_s: float) -> None:
        self._comparison = comparison
        self._ranges = ranges
        self._bytes_per_s = bytes_per_s
        self._stop = threading.Event()
        # The first damage, or the error that ended the thread.
        self.found: Damage | Exception | None = None
        self._thread = threading.Thread(target=self._run, name="compare-corpora", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for wanted in self._ranges:
                begun = time.monotonic()
                for step in self._comparison.compare(wanted):
                    if isinstance(step, Damage):
                        self.found = step
                        return
                    busy = time.monotonic() - begun
                    # Seconds: for a step that reads by the rate, otherwise by the share of a core.
                    pause = step / self._bytes_per_s - busy if step else busy * (1 / _LARGEST_SHARE_OF_A_CORE - 1)
                    if self._stop.wait(max(pause, 0.0)) or not self._comparison.remaining:
                        return
                    begun = time.monotonic()
        except Exception as error:  # raised in the training's thread, which polls ``found``
            self.found = error

    def finish(self, ranges: Sequence[SampleRange]) -> None:
        """End the thread, and compare the remaining blocks of ``ranges`` at full speed."""
        self.close()
        for wanted in ranges:
            for step in self._comparison.compare(wanted):
                if isinstance(step, Damage):
                    self.found = self.found or step
                if self.found is not None or not self._comparison.remaining:
                    return

    def close(self) -> None:
        """End the thread; a thread that waits for a hanging file system ends with the process."""
        self._stop.set()
        self._thread.join(_PATIENCE)
