"""The data of a run as recorded in its checkpoints: the corpora, the blend, and the parameters of the sample order.

A record is a JSON object. Corpora are compared by content (digests), so that they may move between restarts; their
paths are informative. A field that is missing in one of two records is not compared, since older records have fewer
fields.
"""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from megatron.config.data import TEXT_FORMAT, DataConfig, TokenizerConfig
from megatron.data.corpus_digests import corpus_fingerprint, digests_path
from megatron.data.dataset_builder import Sources
from megatron.data.digests import BlockDigests
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.sample_order import SPLIT_NAMES, normalize, parse_split
from megatron.data.text_inputs import list_sources
from megatron.data.tokenizers import tokenizer_files
from megatron.errors import DataError
from megatron.flags import changed_words

DataRecord = dict[str, Any]
CorpusRecord = dict[str, Any]

SAMPLED_BLOCKS = 16
BLOCK_BYTES = 1 << 16

# The fields of a corpus that are compared first, and what they are called in messages.
_CONTENT = {
    "index_bytes": ("bytes", ".idx"),
    "index_xxh3_128": ("digest", ".idx"),
    "token_bytes": ("bytes", ".bin"),
}

# What the fields are called in messages: the flag that sets them, where there is one.
_SETTINGS = {
    "mock_data": "--mock-data",
    "loader": "flag of a loader in place of corpora",
    "texts": "digest of the names and sizes of the files of --train-text-path",
    "text_format": "--text-key and --fim-data with its flags",
    "sequence_length": "--seq-length",
    "seed": "--seed",
    "split": "--split",
    "sample_order": "--sample-order",
    "mid_level_dataset_surplus": "--mid-level-dataset-surplus",
    "dataloader_type": "--dataloader-type",
    "eod_mask_loss": "--eod-mask-loss",
    "masks_documents": "--reset-attention-mask or --dataloader-inter-document-masking",
    "reset_position_ids": "--reset-position-ids",
    "micro_batch_size": "--micro-batch-size, on which --dataloader-type cyclic depends",
    "data_parallel_size": "data-parallel size, on which --dataloader-type cyclic depends",
    "vocabulary_size": "vocabulary size",
    "end_of_document": "end-of-document token",
    "tokenizer_type": "--tokenizer-type",
    "tokenizer_digest": "digest of the file of --tokenizer-model",
}


def record_corpus(corpus: IndexedDataset) -> CorpusRecord:
    """Path, sizes and digests of a corpus. Reads the whole ``.idx``, some blocks of ``.bin``, and ``.digests.json``."""
    size = corpus.dtype.itemsize
    places = [(start // size, length // size) for start, length in sampled_blocks(corpus.num_tokens * size, size)]
    return {
        "path": corpus.prefix,
        "index_bytes": os.path.getsize(corpus.index_path),
        "index_xxh3_128": file_digest(corpus.index_path),
        "token_bytes": corpus.stored_bytes,
        "block_xxh3_128": [xxhash.xxh3_128_hexdigest(tokens.tobytes()) for tokens in corpus.runs(places)],
        "all_blocks": corpus_fingerprint(corpus.prefix),
    }


def sampled_blocks(total: int, unit: int) -> list[tuple[int, int]]:
    """(start, length) in bytes of up to 16 blocks of 64 KiB, evenly spread over ``total`` bytes, from the first byte to
    the last; all bytes where they fit into the blocks. Blocks are aligned to ``unit``, which divides ``total``."""
    count = min(SAMPLED_BLOCKS, -(-total // BLOCK_BYTES))
    last = max(total - BLOCK_BYTES, 0)
    starts = [number * last // max(count - 1, 1) // unit * unit for number in range(count)]
    return [(start, min(BLOCK_BYTES, total - start)) for start in starts]


def file_digest(path: str) -> str:
    """XXH3-128 of a local file; raises :class:`DataError` if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return BlockDigests(None).read(file)[0].hex()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): make it readable.") from error


def tokenizer_digest(tokenizer: TokenizerConfig) -> str | None:
    """The digests of the files that determine the ids; None without any."""
    return "+".join(map(file_digest, tokenizer_files(tokenizer))) or None


def build_record(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    sources: Sources,
    corpora: Mapping[str, CorpusRecord],
    *,
    used_splits: Iterable[int],
    seed: int,
    vocabulary_size: int,
    end_of_document: int,
    micro_batch_size: int,
    data_parallel_size: int,
) -> DataRecord:
    """The record of a run; ``corpora`` has the corpora of the ``used_splits``, by prefix."""
    record: DataRecord = {
        "mock_data": data.mock_data,
        "sequence_length": data.seq_length,
        "seed": seed,
        "dataloader_type": data.dataloader_type,
        "eod_mask_loss": data.eod_mask_loss,
        "masks_documents": data.masks_documents,
        "reset_position_ids": data.reset_position_ids,
        "vocabulary_size": vocabulary_size,
        "end_of_document": end_of_document,
        "tokenizer_type": tokenizer.canonical_type,
        "tokenizer_digest": tokenizer_digest(tokenizer),
    }
    if data.dataloader_type == "cyclic":
        # Each data-parallel rank shuffles its own share of the samples.
        record |= {"micro_batch_size": micro_batch_size, "data_parallel_size": data_parallel_size}
    if data.mock_data:
        return record
    record["loader"] = data.loader
    if data.train_text_path:
        texts = list_sources(data.train_text_path, "--train-text-path")
        names = [(os.path.basename(path), size) for path, size in texts]
        record["texts"] = xxhash.xxh3_128_hexdigest(repr(names).encode())
        record["text_format"] = " ".join(changed_words(data, *TEXT_FORMAT))
    prefixes = list(corpora)
    blends = {}
    for index in used_splits:
        if (blend := sources.blends[index]) is not None:
            weights: Sequence[float | None] = blend.weights or [None] * len(blend.prefixes)
            blends[SPLIT_NAMES[index]] = [
                {"corpus": prefixes.index(prefix), "weight": weight}
                for prefix, weight in zip(blend.prefixes, weights, strict=True)
            ]
    return record | {
        "split": sources.split,
        "sample_order": data.sample_order,
        "mid_level_dataset_surplus": data.mid_level_dataset_surplus,
        "corpora": list(corpora.values()),
        "blends": blends,
    }


# --- comparing two records ------------------------------------------------------------------------------------


def training_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences that change the training samples, one line each with both values."""
    settings = []
    for field, name in _SETTINGS.items():
        if field in saved and field in now:
            pair = saved[field], now[field]
            # 99,1,0 and 99:1 are the same split.
            compared = [parse_split(one) for one in pair] if field == "split" and None not in pair else pair
            if compared[0] != compared[1]:
                settings.append(_both(name, *pair))
    return settings + blend_differences(saved, now, "train")


def evaluation_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences of the evaluation corpora only."""
    return [f"{split} split: {line}" for split in SPLIT_NAMES[1:] for line in blend_differences(saved, now, split)]


def blend_differences(saved: Mapping[str, Any], now: Mapping[str, Any], split: str) -> list[str]:
    """Differences of the corpora of a split and their weights; none if a record lacks the split."""
    if split not in saved.get("blends", {}) or split not in now.get("blends", {}):
        return []
    ours, theirs = _parts(saved, split), _parts(now, split)
    pairs, gone, added = _pair(ours, theirs)
    lines = [line for one, other in pairs for line in _content_differences(one.corpus, other.corpus)]
    lines += [f"corpus {part.path}: weight {part.weight_in_words} in the checkpoint, absent now" for part in gone]
    lines += [f"corpus {part.path}: absent in the checkpoint, weight {part.weight_in_words} now" for part in added]
    # Weights 1 and 2 give the order of weights 10 and 20: only shares count. None: by number of samples.
    shares = [(one.share, other.share) for one, other in pairs]
    is_same = all(one == other or (one and other and math.isclose(one, other, rel_tol=1e-12)) for one, other in shares)
    if gone or added or not is_same:
        lines += [
            _both(f"weight of {other.path}", one.weight_in_words, other.weight_in_words)
            for one, other in pairs
            if one.weight != other.weight
        ]
    order = [other for _, other in pairs]
    if not lines and [part.place for part in order] != [part.place for part in theirs]:
        lines.append(_both("order of the corpora", [part.path for part in order], [part.path for part in theirs]))
    return lines


class _Part(NamedTuple):
    """A corpus of a blend."""

    place: int
    corpus: CorpusRecord
    weight: float | None
    share: float | None

    @property
    def path(self) -> str:
        return str(self.corpus["path"])

    @property
    def weight_in_words(self) -> str:
        return "by number of samples" if self.weight is None else f"{self.weight:.15g}"


def _parts(record: Mapping[str, Any], split: str) -> list[_Part]:
    entries = record["blends"][split]
    weights = [entry["weight"] for entry in entries]
    shares = [None] * len(weights) if None in weights else normalize(weights)
    return [
        _Part(place, record["corpora"][entry["corpus"]], entry["weight"], share)
        for place, (entry, share) in enumerate(zip(entries, shares, strict=True))
    ]


def _pair(ours: Sequence[_Part], theirs: Sequence[_Part]) -> tuple[list[tuple[_Part, _Part]], list[_Part], list[_Part]]:
    """Corpora of both records with equal content or else equal path, in the order of ``ours``; and all others."""
    partner: dict[int, _Part] = {}
    left = {part.place: part for part in theirs}

    def content(part: _Part) -> Hashable:
        return (*(part.corpus[field] for field in _CONTENT), *part.corpus["block_xxh3_128"])

    keys: tuple[Callable[[_Part], Hashable], ...] = content, lambda part: part.path
    for key in keys:
        waiting = defaultdict(list)
        for other in left.values():
            waiting[key(other)].append(other)
        for part in ours:
            if part.place not in partner and waiting[key(part)]:
                partner[part.place] = waiting[key(part)].pop(0)
                del left[partner[part.place].place]
    pairs = [(part, partner[part.place]) for part in ours if part.place in partner]
    return pairs, [part for part in ours if part.place not in partner], list(left.values())


def _content_differences(saved: CorpusRecord, now: CorpusRecord) -> list[str]:
    path = now["path"]
    lines = [
        _both(f"{name} of {path}{kind}", saved[field], now[field])
        for field, (name, kind) in _CONTENT.items()
        if saved[field] != now[field]
    ]
    blocks = list(zip(saved["block_xxh3_128"], now["block_xxh3_128"], strict=False))
    different = [number for number, (one, other) in enumerate(blocks) if one != other]
    if different:
        name = f"digest of sampled block {different[0]} of {path}.bin ({len(different)} of {len(blocks)} blocks differ)"
        lines.append(_both(name, *blocks[different[0]]))
    digests = saved.get("all_blocks"), now.get("all_blocks")
    # With equal samples the file of all digests may still differ. It may be newer than the saved record.
    if not lines and None not in digests and digests[0] != digests[1]:
        lines.append(_both(f"content of {digests_path(path)}", *digests))
    return lines


def _both(name: str, saved: object, now: object) -> str:
    return f"{name}: {_in_words(saved)} in the checkpoint, {_in_words(now)} now"


def _in_words(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "none" if value is None else str(value)
