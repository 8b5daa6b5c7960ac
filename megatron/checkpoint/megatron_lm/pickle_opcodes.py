"""A reader of pickles that imports and calls nothing: it interprets opcodes as plain data and inert records.

A pickle is a program for a stack machine. ``pickletools.genops`` only decodes its opcodes; the few that make data are
interpreted here. A global is a :class:`Global`, its call a :class:`Record`, and both are names with data. Globals
beyond :data:`~megatron.checkpoint.megatron_lm.safe_pickle.ALLOWED` and all other opcodes are refused.
"""

import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from megatron.checkpoint.megatron_lm.safe_pickle import ALLOWED, BUILDERS
from megatron.errors import CheckpointError

MAX_BYTES = 1 << 30
"""Longest pickle that is read; memory is a multiple of its length."""
_MAX_INTEGER_BITS = 64


@dataclass(frozen=True, eq=False, slots=True)
class Global:
    """A class or function by its name; nothing is imported."""

    name: str


@dataclass(eq=False, slots=True)
class Record:
    """An object as its pickle describes it: the name of its class, the arguments, and the state."""

    name: str
    arguments: tuple[object, ...]
    state: object = field(default=None)

    @property
    def attributes(self) -> dict[object, object]:
        """The state of an object with a ``__dict__``; empty for others."""
        return self.state if isinstance(self.state, dict) else {}


@dataclass(frozen=True, eq=False, slots=True)
class PersistentId:
    """A reference to data beside the pickle, such as a tensor's storage."""

    value: object


def read_pickle(content: bytes, where: str) -> object:
    """The value that the pickle ``content`` describes; ``where`` names it in a :class:`CheckpointError`.

    Values are plain Python data, :class:`Record`, :class:`Global` and :class:`PersistentId`.
    """
    if len(content) > MAX_BYTES:
        raise CheckpointError(
            f"{where} has {len(content):,} bytes of pickled data, and at most {MAX_BYTES:,} are read: choose another "
            "checkpoint."
        )
    try:
        return _Machine().run(content)
    except _RefusedGlobal as refused:
        raise CheckpointError(
            f"{where} refers to {refused}, which is not a class of Megatron-LM's checkpoints; nothing was imported or "
            "executed: use a checkpoint from a source that you trust."
        ) from None
    except (ValueError, TypeError, LookupError, OverflowError, struct.error) as error:
        raise CheckpointError(
            f"{where} is not a readable pickle ({printable(str(error))}): copy the checkpoint again."
        ) from None


def printable(text: str) -> str:
    """At most 200 characters of ``text``, for a message of one line."""
    return "".join(one if one.isprintable() else "?" for one in text[:200])


class _RefusedGlobal(Exception):
    """The name of a global that is not allowed."""


class _Mark:
    """The beginning of a group of values on the stack."""


def _is_key(value: object) -> bool:
    """Whether ``value`` may be a key or an element of a set. Nested tuples may not, since their hash recurses."""
    scalars = (str, int, float, bytes, Record, Global)
    if isinstance(value, tuple):
        return all(element is None or isinstance(element, scalars) for element in value)
    return value is None or isinstance(value, scalars)


class _Machine:
    """The stack and the memo of one pickle."""

    def __init__(self) -> None:
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}

    def run(self, content: bytes) -> object:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name in _LITERALS:
                self._push(_literal(argument))
            elif opcode.name in _CONSTANTS:
                self._push(_CONSTANTS[opcode.name]())
            elif opcode.name in _MEMO_OPCODES:
                self._remember(opcode.name, argument)
            elif opcode.name in _ACTIONS:
                _ACTIONS[opcode.name](self)
            elif opcode.name == "GLOBAL":
                self._push(_allowed(str(argument).replace(" ", ".")))
            elif opcode.name not in _IGNORED:
                raise ValueError(f"it has the opcode {opcode.name}, which is not in Megatron-LM's checkpoints")
        result = self._pop()
        if self._stack:
            raise ValueError("values remain on its stack")
        return result

    def _push(self, value: object) -> None:
        self._stack.append(value)

    def _pop(self) -> object:
        value = self._stack.pop()
        if isinstance(value, _Mark):
            raise ValueError("a value is missing on its stack")
        return value

    def _pop_group(self) -> list[object]:
        """The values since the last mark."""
        group = []
        while not isinstance(value := self._stack.pop(), _Mark):
            group.append(value)
        group.reverse()
        return group

    def _remember(self, name: str, index: object) -> None:
        """Put the top of the stack into the memo, or get a value from it."""
        if "GET" in name:
            assert isinstance(index, int)
            self._push(self._memo[index])
        else:
            self._memo[len(self._memo) if index is None else int(str(index))] = self._stack[-1]

    def tuple_of(self, count: int) -> None:
        values = [self._pop() for _ in range(count)]
        self._push(tuple(reversed(values)))

    def group_as(self, kind: Callable[[list[object]], object]) -> None:
        group = self._pop_group()
        if kind is frozenset:
            _check_keys(group)
        self._push(kind(group))

    def append(self, values: list[object]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            _refuse("appends to a value that is not a list")
        target.extend(values)

    def add(self) -> None:
        values, target = self._pop_group(), self._stack[-1]
        if not isinstance(target, set):
            _refuse("adds to a value that is not a set")
        _check_keys(values)
        target.update(values)

    def set_items(self, values: list[object]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(values) % 2:
            _refuse("sets items of a value that is not a dict")
        _check_keys(values[::2])
        target.update(zip(values[::2], values[1::2], strict=True))

    def set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self.set_items([key, value])

    def stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if not isinstance(name, str) or not isinstance(module, str):
            _refuse("has a global without a name")
        self._push(_allowed(f"{module}.{name}"))

    def reduce(self) -> None:
        """A call: plain data of a few globals, otherwise a record of the call."""
        arguments, function = self._pop(), self._pop()
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            _refuse("calls a value that is not a named function")
        builder = BUILDERS.get(function.name)
        self._push(builder(*arguments) if builder else Record(function.name, arguments))

    def build(self) -> None:
        state, target = self._pop(), self._stack[-1]
        if isinstance(target, Record):
            target.state = state
        elif not isinstance(target, dict):  # attributes of an OrderedDict have no use
            _refuse("sets the state of plain data")

    def persistent_id(self) -> None:
        self._push(PersistentId(self._pop()))

    def mark(self) -> None:
        self._push(_Mark())


def _allowed(name: str) -> Global:
    if name not in ALLOWED:
        raise _RefusedGlobal(printable(name))
    return Global(name)


def _literal(value: object) -> object:
    if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
        raise ValueError(f"it has an integer of {value.bit_length()} bits")
    return value


def _check_keys(values: list[object]) -> None:
    if not all(map(_is_key, values)):
        raise ValueError("it has a key that is not a name or a number")


def _refuse(reason: str) -> NoReturn:
    raise ValueError(f"it {reason}")


_IGNORED = frozenset({"PROTO", "FRAME", "STOP"})
_LITERALS = frozenset(
    [
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "LONG4",
        "BINFLOAT",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
    ]
)
_MEMO_OPCODES = frozenset(["MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"])
_CONSTANTS: dict[str, Callable[[], object]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}
_ACTIONS: dict[str, Callable[[_Machine], None]] = {
    "MARK": _Machine.mark,
    "TUPLE1": lambda machine: machine.tuple_of(1),
    "TUPLE2": lambda machine: machine.tuple_of(2),
    "TUPLE3": lambda machine: machine.tuple_of(3),
    "TUPLE": lambda machine: machine.group_as(tuple),
    "FROZENSET": lambda machine: machine.group_as(frozenset),
    "APPEND": lambda machine: machine.append([machine._pop()]),
    "APPENDS": lambda machine: machine.append(machine._pop_group()),
    "ADDITEMS": _Machine.add,
    "SETITEM": _Machine.set_item,
    "SETITEMS": lambda machine: machine.set_items(machine._pop_group()),
    "STACK_GLOBAL": _Machine.stack_global,
    "REDUCE": _Machine.reduce,
    "NEWOBJ": _Machine.reduce,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent_id,
}
