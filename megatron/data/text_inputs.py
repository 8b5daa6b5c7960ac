"""Documents from files: jsonl, plain text, parquet and Hugging Face datasets, in small batches.

Reading is cheap and sequential; parsing and other expensive work is done by the receiver of a :class:`Batch`. Parts of
local files of lines are read by the receiver, too (:func:`divide_among_workers`).
"""

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import IO, Any, BinaryIO, Literal, NamedTuple

from megatron.data.storage import SourceFile, decompressed, find_files, open_stored, without_compression
from megatron.errors import DataError
from megatron.urls import is_url

# Who reads and who parses:
#
#   a local file of lines        the receiver gets a SourceRange, reads it with read_batches, and parses
#   .gz, .zst, parquet, URLs,    the sender reads, the receiver gets a Batch and parses
#   Hugging Face datasets
#
# A range has the lines that begin in it, so ranges need no index: with ranges [0, 20) and [20, 40) the line at byte 15
# belongs to the first one, which reads on behind byte 20, and the second one begins behind the next newline.

_loads: Callable[[bytes], Any] = json.loads
with suppress(ImportError):  # it is in the extra "data"
    import orjson

    _loads = orjson.loads

Separation = Literal["file", "paragraph", "line"]

DATASET_PREFIX = "dataset:"

_TEXT_ENDINGS = (".txt", ".text", ".md")
_JSON_ENDINGS = (".jsonl", ".json", ".ndjson")
_KNOWN_ENDINGS = (*_TEXT_ENDINGS, *_JSON_ENDINGS, ".parquet")


class InputFormat(NamedTuple):
    keys: tuple[str, ...] = ("text",)  # JSON keys or columns with text
    separation: Separation = "file"  # how plain-text files are divided into documents
    dataset_config: str | None = None
    dataset_split: str = "train"
    batch_bytes: int = 1 << 22  # approximate size of a batch
    # Longer documents are refused: there is probably no end of a document in the file.
    max_document_bytes: int = 1 << 28


class SourceRange(NamedTuple):
    """A source, or the lines that start in the bytes [``start``, ``stop``) of it."""

    path: str
    start: int
    stop: int  # the size of the source if it is read completely


class Batch(NamedTuple):
    """Consecutive documents of one source, not parsed yet."""

    path: str
    kind: Literal["json", "line", "row", "document"]
    first: int  # number of the first line (row, document), from 1 at range_start
    range_start: int  # byte of the source from which lines are numbered
    stored_bytes: int  # stored bytes that were read for the batch
    records: bytes | list[tuple[Any, ...]]  # whole lines; or the texts of each document, one per key


class BadDocument(NamedTuple):
    place: str
    reason: str


# --- which files, and which parts of them --------------------------------------------------------------------


def list_sources(inputs: Iterable[str], flag: str = "--input") -> list[SourceFile]:
    """The files and datasets of ``flag``; files of a directory or glob are sorted by name."""
    sources: list[SourceFile] = []
    for name in inputs:
        if name.startswith(DATASET_PREFIX):
            sources.append(SourceFile(name, 0))
            continue
        files = find_files(name)
        # A named file is read with any ending; of a directory or glob, files with a known ending.
        chosen = files
        if [file.path for file in files] != [name]:
            chosen = [file for file in files if without_compression(file.path).endswith(_KNOWN_ENDINGS)]
        if files and not chosen:
            endings = ", ".join(_KNOWN_ENDINGS)
            raise DataError(f"{name} holds no file named {endings} (or these with .gz or .zst): check {flag}.")
        if not files:
            remote = " or is empty" if is_url(name) else ""
            raise DataError(f"{name} does not exist or is not a file{remote}: check {flag}.")
        sources += chosen
    return sources


def is_plain_text(path: str) -> bool:
    """Whether a source is read as plain text, without keys."""
    return not path.startswith(DATASET_PREFIX) and without_compression(path).endswith(_TEXT_ENDINGS)


def whole_ranges(sources: Iterable[SourceFile]) -> list[SourceRange]:
    return [SourceRange(source.path, 0, source.size) for source in sources]


def cut_in_partitions(sources: list[SourceFile], count: int, separation: Separation) -> list[list[SourceRange]]:
    """Divide the sources into ``count`` partitions of about equally many bytes, keeping the order of documents.

    Uncompressed files of lines are cut; other files belong to the partition in which they begin.
    """
    # All sources, one after the other, are one range of bytes with ``count - 1`` cuts; a source without size is at 0.
    total = sum(source.size for source in sources)
    edges = [total * number // count for number in range(count)] + [total + 1]
    return [list(_ranges_between(sources, *ends, separation)) for ends in pairwise(edges)]


def _ranges_between(sources: list[SourceFile], begin: int, end: int, separation: Separation) -> Iterator[SourceRange]:
    position = 0
    for path, size in sources:
        if can_be_cut(path, separation):
            start, stop = max(begin - position, 0), min(end - position, size)
            if start < stop:
                yield SourceRange(path, start, stop)
        elif begin <= position < end:
            yield SourceRange(path, 0, size)
        position += size


def can_be_cut(path: str, separation: Separation) -> bool:
    """Whether a source is lines in a file, of which parts can be read."""
    if without_compression(path) != path or path.endswith(".parquet") or path.startswith(DATASET_PREFIX):
        return False
    return separation == "line" or not path.endswith(_TEXT_ENDINGS)


# --- reading -------------------------------------------------------------------------------------------------


def divide_among_workers(ranges: Iterable[SourceRange], form: InputFormat) -> Iterator[Batch | SourceRange]:
    """The work of a worker at a time, in order: a range that it reads itself, so that its text crosses no pipe.

    Sources that cannot be cut, and URLs, are read here, in batches.
    """
    for source in ranges:
        if can_be_cut(source.path, form.separation) and not is_url(source.path):
            for start in range(source.start, source.stop, form.batch_bytes):
                yield SourceRange(source.path, start, min(start + form.batch_bytes, source.stop))
        else:
            yield from read_batches([source], form)


def read_batches(ranges: Iterable[SourceRange], form: InputFormat) -> Iterator[Batch]:
    """The documents of all ranges, in order. Memory: one batch, or one document if it is larger."""
    for source in ranges:
        if source.path.startswith(DATASET_PREFIX):
            dataset = _open_dataset(source.path.removeprefix(DATASET_PREFIX), form)
            yield from _batch_rows(source.path, ((*map(row.get, form.keys),) for row in dataset), 0, form)
        else:
            yield from _read_range(source, form)


def numbered_batches(
    source: SourceFile, form: InputFormat, first: int, state: Any, is_wanted: Callable[[int], bool]
) -> Iterator[tuple[int, Any, Batch]]:
    """The batches of a source from the number ``first`` on: number, state, batch.

    Of a source that can be cut, only the batches with wanted numbers are read. The state of a Hugging Face dataset is
    that before the batch, and continues it there; of other sources it is None.
    """
    if can_be_cut(source.path, form.separation):
        for number in filter(is_wanted, range(first, -(-source.size // form.batch_bytes))):
            start = number * form.batch_bytes
            lines = SourceRange(source.path, start, min(start + form.batch_bytes, source.size))
            yield from ((number, None, batch) for batch in read_batches([lines], form))
    elif source.path.startswith(DATASET_PREFIX):
        dataset = _open_dataset(source.path.removeprefix(DATASET_PREFIX), form)
        dataset = dataset if hasattr(dataset, "state_dict") else dataset.to_iterable_dataset()
        if state is not None:
            dataset.load_state_dict(state)
        batches = _batch_rows(source.path, ((*map(row.get, form.keys),) for row in dataset), 0, form)
        state = dataset.state_dict()
        for number, batch in enumerate(batches, start=first):
            yield number, state, batch
            state = dataset.state_dict()
    else:
        whole = enumerate(read_batches(whole_ranges([source]), form))
        yield from ((number, None, batch) for number, batch in whole if number >= first)


def _read_range(source: SourceRange, form: InputFormat) -> Iterator[Batch]:
    path, kind = source.path, without_compression(source.path)
    try:
        with open_stored(path) as stored:
            if kind.endswith(".parquet"):
                yield from _read_parquet(source, stored, form)
            elif not kind.endswith(_TEXT_ENDINGS):
                yield from _read_lines(source, stored, "json", form)
            elif form.separation == "line":
                yield from _read_lines(source, stored, "line", form)
            elif form.separation == "paragraph":
                yield from _read_paragraphs(source, stored, form)
            else:
                text = decompressed(path, stored).read(form.max_document_bytes + 1)
                if len(text) > form.max_document_bytes:
                    raise DataError(
                        f"{path} has more than {form.max_document_bytes >> 20} MiB, which is too long for one "
                        "document: say with --text-documents paragraph, or line, where documents end."
                    )
                yield Batch(path, "document", 1, 0, source.stop, [(text,)])
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not a complete gzip file ({error}): copy it again.") from error
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist: check --input.") from error
    except OSError as error:
        if path.endswith(".zst") and not error.errno:
            raise DataError(f"{path} is not a complete zstd file ({error}): copy it again.") from error
        raise DataError(f"{path} cannot be read ({error.strerror or error}): check --input.") from error


def _read_lines(
    source: SourceRange, stored: BinaryIO, kind: Literal["json", "line"], form: InputFormat
) -> Iterator[Batch]:
    """Blocks of whole lines that start in the range."""
    content = decompressed(source.path, stored)
    position, number, reported = source.start, 1, source.start
    if source.start:  # the line of the byte before belongs to the previous range
        stored.seek(source.start - 1)
        position += len(_rest_of_line(content, source, form)) - 1
        reported = position
    while position < source.stop or content is not stored:
        size = form.batch_bytes if content is not stored else min(form.batch_bytes, source.stop - position)
        block = content.read(size)
        if not block:
            break
        if not block.endswith(b"\n"):
            # The line that begins in this block ends behind it.
            block += _rest_of_line(content, source, form)
        at = stored.tell() if content is not stored else position + len(block)
        # Counting lines is left to place_of where it can find the batch again.
        begin = position if content is stored else source.start
        yield Batch(source.path, kind, number, begin, at - reported, block)
        position, reported = position + len(block), at
        if content is not stored:
            number += block.count(b"\n")


def _rest_of_line(content: IO[bytes], source: SourceRange, form: InputFormat) -> bytes:
    rest = content.readline(form.max_document_bytes)
    if len(rest) == form.max_document_bytes:
        raise DataError(
            f"{source.path} has a line of more than {form.max_document_bytes >> 20} MiB: --input reads files by their "
            f"names' endings ({', '.join(_KNOWN_ENDINGS)}), all others as jsonl; rename or correct it."
        )
    return rest


def _read_paragraphs(source: SourceRange, stored: BinaryIO, form: InputFormat) -> Iterator[Batch]:
    """Paragraphs, separated by blank lines."""
    content = decompressed(source.path, stored)
    documents: list[tuple[bytes]] = []
    lines: list[bytes] = []
    size, size_of_lines, first, reported = 0, 0, 1, 0
    while True:
        line = _rest_of_line(content, source, form)
        if line.strip():
            lines.append(line)
            size_of_lines += len(line)
            if size_of_lines > form.max_document_bytes:
                raise DataError(
                    f"{source.path} has no blank line in {form.max_document_bytes >> 20} MiB: try --text-documents "
                    "line."
                )
            continue
        if lines:
            documents.append((b"".join(lines).rstrip(b"\r\n"),))
            size, size_of_lines, lines = size + size_of_lines, 0, []
        if documents and (size >= form.batch_bytes or not line):
            yield Batch(source.path, "document", first, 0, stored.tell() - reported, [*documents])
            size, first, reported, documents = 0, first + len(documents), stored.tell(), []
        if not line:
            return


def _read_parquet(source: SourceRange, stored: BinaryIO, form: InputFormat) -> Iterator[Batch]:
    """Rows; memory holds the text of at most one row group."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{source.path} needs the package pyarrow: pip install pyarrow.") from error
    try:
        file = parquet.ParquetFile(stored)
        _check_columns(source.path, form.keys, file.schema_arrow.names)
        rows = max(file.metadata.num_rows, 1)
        batches = file.iter_batches(batch_size=256, columns=list(form.keys))
        columns = ([batch.column(key).to_pylist() for key in form.keys] for batch in batches)
        records = (row for batch in columns for row in zip(*batch))
        yield from _batch_rows(source.path, records, source.stop / rows, form)
    except pyarrow.ArrowException as error:
        raise DataError(f"{source.path} is not a complete parquet file ({error}): copy it again.") from error


def _open_dataset(name: str, form: InputFormat) -> Any:
    """A Hugging Face dataset as a stream of rows; a saved one is opened from its directory."""
    try:
        import datasets
    except ImportError as error:
        raise DataError("--input dataset:... needs the package datasets: pip install datasets.") from error
    datasets.disable_progress_bars()
    try:
        if os.path.exists(os.path.join(name, "state.json")) or os.path.exists(os.path.join(name, "dataset_dict.json")):
            saved = datasets.load_from_disk(name)
            dataset = saved[form.dataset_split] if isinstance(saved, dict) else saved
        else:
            dataset = datasets.load_dataset(name, form.dataset_config, split=form.dataset_split, streaming=True)
    except Exception as error:  # of many kinds
        reason = " ".join(str(error).split())
        raise DataError(
            f"The dataset {name} cannot be opened ({reason}): check --input, --dataset-config and --dataset-split."
        ) from error
    if dataset.column_names:  # they may be unknown
        _check_columns(f"The dataset {name}", form.keys, dataset.column_names)
    return dataset


def _check_columns(source: str, keys: Sequence[str], columns: Sequence[str]) -> None:
    for key in keys:
        if key not in columns:
            found = ", ".join(columns)
            raise DataError(f"{source} has no column {key!r}, but {found}: name the right one with --json-keys.")


def _batch_rows(
    path: str, rows: Iterable[tuple[Any, ...]], stored_bytes_per_row: float, form: InputFormat
) -> Iterator[Batch]:
    records: list[tuple[Any, ...]] = []
    size, first = 0, 1
    for row in rows:
        records.append(row)
        size += 16 + sum(len(text) for text in row if isinstance(text, str))
        if size >= form.batch_bytes:
            yield Batch(path, "row", first, 0, round(len(records) * stored_bytes_per_row), records)
            size, first, records = 0, first + len(records), []
    if records:
        yield Batch(path, "row", first, 0, round(len(records) * stored_bytes_per_row), records)


# --- parsing -------------------------------------------------------------------------------------------------


def parse_documents(batch: Batch, keys: tuple[str, ...], key_flag: str) -> Iterator[tuple[int, list[str] | str]]:
    """The number in the batch and the texts (one per key) of every document, or its error."""
    if isinstance(batch.records, bytes):
        for place, line in enumerate(batch.records.split(b"\n")):
            if line and not line.isspace():
                if batch.kind == "json":
                    yield place, _parse_json(line, keys, key_flag)
                else:
                    yield place, _decode(batch, place, line.rstrip(b"\r"))
        return
    for place, texts in enumerate(batch.records):
        if batch.kind == "document":
            yield place, _decode(batch, place, texts[0])
        else:
            yield place, _check_texts(dict(zip(keys, texts)), keys, key_flag)


def place_of(batch: Batch, number: int) -> str:
    """File and line of a document, for messages."""
    number += batch.first
    if batch.range_start:
        number += _count_lines(batch.path, batch.range_start)
    if batch.kind == "document" and isinstance(batch.records, list):
        return f"{batch.path}, document {number}"
    return f"{batch.path}, {'row' if batch.kind == 'row' else 'line'} {number}"


def text_bytes(batch: Batch) -> int:
    """Bytes of text (or JSON) in a batch; characters if it has no bytes."""
    if isinstance(batch.records, bytes):
        return len(batch.records)
    return sum(len(text) for texts in batch.records for text in texts if text is not None and hasattr(text, "__len__"))


def _count_lines(path: str, start: int) -> int:
    """Number of lines that begin before byte ``start``."""
    lines, position = 0, 0
    with open_stored(path) as file:
        while block := file.read(min(1 << 20, start - 1 - position)):
            lines += block.count(b"\n")
            position += len(block)
    return lines + 1


def _decode(batch: Batch, place: int, text: bytes) -> list[str] | str:
    begins_file = not place and batch.first == 1 and not batch.range_start
    try:
        return [text.decode("utf-8-sig" if begins_file else "utf-8")]
    except UnicodeDecodeError as error:
        return f"is not valid UTF-8 ({error.reason} at byte {error.start}): convert, mend or remove it"


def _parse_json(line: bytes, keys: tuple[str, ...], key_flag: str) -> list[str] | str:
    document: Any
    may_have_surrogates = _loads is json.loads
    try:
        try:
            document = _loads(line)
        except ValueError:  # orjson refuses what json accepts: NaN, a byte order mark, halves of surrogate pairs
            document, may_have_surrogates = json.loads(line), True
    except (ValueError, RecursionError) as error:  # malformed JSON or UTF-8
        return f"is not valid JSON ({error}): mend or remove it"
    if not isinstance(document, dict):
        return "is not a JSON object: mend or remove it"
    return _check_texts(document, keys, key_flag, may_have_surrogates)


def _check_texts(
    document: dict[str, Any], keys: tuple[str, ...], key_flag: str, may_have_surrogates: bool = True
) -> list[str] | str:
    texts = [document.get(key) for key in keys]
    for key, text in zip(keys, texts):
        if not isinstance(text, str):
            found = f"has no text under the key {key!r}" if key in document else f"has no key {key!r}"
            return f"{found}: name the right key with {key_flag}, or remove the line"
        try:
            if may_have_surrogates and not text.isascii():
                text.encode()
        except UnicodeEncodeError:
            return "holds half of a surrogate pair, which is no text: mend or remove it"
    return texts  # type: ignore[return-value]
