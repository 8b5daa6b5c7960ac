"""The reader of pickles returns data, and executes nothing, whatever the pickle says."""

import codecs
import enum
import os
import pickle
import pickletools
import struct
import sys
from argparse import Namespace
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint.megatron_lm.safe_pickle import ALLOWED, Global, PersistentId, Record, read_pickle
from megatron.errors import CheckpointError
from tests.messages import assert_helpful

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text() | st.integers(-99, 99), inner, max_size=4)
        | st.tuples(inner, inner)
        | st.tuples(inner)
    ),
    max_leaves=20,
)


class Runs:
    """Calls ``function`` when it is unpickled."""

    def __init__(self, function: object, *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


WATCHED = ("import", "exec", "compile", "open", "pickle.find_class", "os.", "subprocess.", "socket.", "ctypes.")
"""Events of Python's audit hooks that a reader of data has no reason for."""
_seen: list[str] | None = None


def _watch(event: str, arguments: object) -> None:
    if _seen is not None and event.startswith(WATCHED):
        _seen.append(event)


sys.addaudithook(_watch)
# Text of protocol 0 is decoded by a codec that Python imports when it is first used.
codecs.lookup("raw-unicode-escape")


@contextmanager
def watched() -> Iterator[list[str]]:
    """The watched events that happen inside."""
    global _seen
    seen: list[str] = []
    _seen = seen
    try:
        yield seen
    finally:
        _seen = None


def read(content: bytes) -> object:
    """What the reader returns; fails the test if it imports, executes or opens anything."""
    with watched() as seen:
        try:
            return read_pickle(content, "/model/common.pt")
        finally:
            assert not seen


def refusal(content: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(content)
    assert_helpful(str(caught.value), "/model/common.pt")
    return str(caught.value)


def test_pickle_itself_is_seen() -> None:
    with watched() as seen:
        pickle.loads(pickle.dumps(Runs(os.getpid)))
    assert "pickle.find_class" in seen


# --- data ----------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(PLAIN, st.sampled_from([2, 4, 5]))
def test_plain_data_is_read_as_pickle_reads_it(value: object, protocol: int) -> None:
    found = read(pickle.dumps(value, protocol))
    assert found == value
    assert pickle.dumps(found, 5) == pickle.dumps(value, 5)  # also the types


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_containers_of_torch_and_of_the_library_become_plain_data(protocol: int) -> None:
    shared = [1]
    counts: dict[str, int] = defaultdict(int, a=1)
    value = [OrderedDict(b=2, a=1), counts, torch.Size((3, 4)), {1, 2}, frozenset("x"), b"\xff", shared, shared]
    found = read(pickle.dumps(value, protocol))
    assert isinstance(found, list)
    plain = [{"b": 2, "a": 1}, {"a": 1}, (3, 4)]
    assert found[:3] == plain
    assert found[5:] == [b"\xff", shared, shared]
    assert found[6] is found[7]
    if protocol > 2:
        assert found[3:5] == [{1, 2}, frozenset("x")]


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_objects_become_records_of_names_and_data(protocol: int) -> None:
    found = read(pickle.dumps(Namespace(layers=3, dtype=torch.bfloat16, place=Path("x")), protocol))
    assert isinstance(found, Record)
    assert (found.name, found.arguments) == ("argparse.Namespace", ())
    assert found.attributes["layers"] == 3
    dtype, place = found.attributes["dtype"], found.attributes["place"]
    assert isinstance(dtype, Global)
    assert dtype.name == "torch.bfloat16"
    assert isinstance(place, Record)
    assert (place.name, place.arguments) == (f"{type(Path('x')).__module__}.PosixPath", ("x",))


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_are_read_that_any_python_has_written(module: str) -> None:
    """Python 3.13 names another module than the others."""
    found = read(f"\x80\x02c{module}\nPosixPath\nX\x01\x00\x00\x00x\x85R.".encode("latin-1"))
    assert isinstance(found, Record) and (found.name, found.arguments) == (f"{module}.PosixPath", ("x",))


def test_storages_are_references() -> None:
    found = read(b"\x80\x02(X\x07\x00\x00\x00storageK\x01tQ.")
    assert isinstance(found, PersistentId)
    assert found.value == ("storage", 1)


def test_no_allowed_name_is_a_way_to_run_code() -> None:
    for name in ALLOWED:
        module, _, attribute = name.rpartition(".")
        assert module.split(".")[0] not in ("os", "posix", "nt", "subprocess", "sys", "shutil", "runpy", "importlib")
        assert attribute not in ("eval", "exec", "compile", "__import__", "getattr", "open", "load", "loads", "apply")


# --- attacks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (os.system, ("touch mark",)),
        (eval, ("1",)),
        (getattr, ("", "join")),
        (pickle.loads, (b"N.",)),
        (torch.load, ("x",)),
        (enum.Enum, ("x",)),
    ],
)
def test_a_function_is_refused_by_its_name(function: Any, arguments: tuple[object, ...], protocol: int) -> None:
    message = refusal(pickle.dumps({"args": [Runs(function, *arguments)]}, protocol))
    assert f"{function.__name__}, which is not" in message
    assert "nothing was imported or executed" in message


REFUSED = Path(__file__).with_name("refused_pickles.txt").read_text().splitlines()[1:]


@pytest.mark.parametrize("row", REFUSED)
def test_other_programs_are_refused(row: str) -> None:
    program, _, words = row.partition(" -> ")
    assert words in refusal(program.encode().decode("unicode_escape").encode("latin-1"))


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"x.",
        b"\x80\x02X" + struct.pack("<I", 2**32 - 1) + b"x.",
        b"\x80\x04\x8e" + struct.pack("<Q", 2**63 + 5) + b"x.",
        b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
        b"\x80\x02\x8b" + struct.pack("<i", -1) + b"x.",
        b"\x80\x02\x8a\x40" + b"\x7f" * 64 + b".",
    ],
)
def test_huge_lengths_and_numbers_are_refused(content: bytes) -> None:
    refusal(content)


def test_a_huge_index_of_the_memo_takes_no_memory() -> None:
    assert read(b"\x80\x02K\x01r\xff\xff\xff\xff.") == 1


def test_nesting_is_no_recursion() -> None:
    depth = 50_000
    assert read(b"\x80\x02" + b"]" * depth + b"a" * (depth - 1) + b".")
    assert read(b"\x80\x02" + b")" + b"\x85" * depth + b".")
    # The hash of a nested tuple recurses.
    assert "a key" in refusal(b"\x80\x02})" + b"\x85" * depth + b"K\x01s.")
    assert "a key" in refusal(b"\x80\x04\x8f()" + b"\x85" * depth + b"\x90.")


def test_a_list_that_contains_itself_is_data() -> None:
    found = read(b"\x80\x02]q\x00h\x00a.")
    assert isinstance(found, list)
    assert found[0] is found


OPCODES = [opcode.code.encode("latin1") for opcode in pickletools.opcodes]
PROGRAMS = st.lists(st.sampled_from([*OPCODES, b"cos\nsystem\n", b"K\x01", b"\x8c\x02os"]), max_size=30).map(b"".join)


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=60) | PROGRAMS)
def test_any_bytes_and_any_program_are_read_or_refused(content: bytes) -> None:
    for whole in (content, b"\x80\x02(" + content, b"\x80\x04}]" + content, b"\x80\x04" + content + b"."):
        try:
            read(whole)
        except CheckpointError as error:
            assert_helpful(str(error), "/model/common.pt")
