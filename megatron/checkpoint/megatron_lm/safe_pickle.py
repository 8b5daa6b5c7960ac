"""A reader of pickles that imports and calls nothing: it interprets opcodes as plain data and inert records.

A pickle is a program for a stack machine. ``pickletools.genops`` only decodes its opcodes; the few that make data are
interpreted here. A global is a :class:`Global`, its call a :class:`Record`, and both are names with data. Globals
beyond :data:`ALLOWED` and all other opcodes are refused.
"""

import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.errors import CheckpointError

# --- globals ------------------------------------------------------------------------------------------------

PLAIN = frozenset(
    ["collections.OrderedDict", "collections.defaultdict", "torch.Size", "_codecs.encode", "__builtin__.bytes"]
)
"""Globals whose calls make plain data."""


def _plain_data(name: str, arguments: tuple[object, ...]) -> object:
    """The result of a call of one of the :data:`PLAIN` globals, made here. Raises ``ValueError``."""
    if name == "collections.defaultdict":  # defaultdict(factory); its items follow
        return {}
    if name == "torch.Size":  # Size((1, 2))
        (sizes,) = arguments or ((),)
        if not isinstance(sizes, tuple) or not all(type(size) is int for size in sizes):
            raise ValueError("has a torch.Size that is not made of integers")
        return sizes
    if name == "_codecs.encode":  # encode(text, "latin1"): protocol 2 stores bytes so
        text, encoding = arguments
        if not isinstance(text, str) or encoding != "latin1":
            raise ValueError("has bytes in an unknown encoding")
        return text.encode("latin1")
    is_dict = name == "collections.OrderedDict"  # OrderedDict(), whose items follow; else bytes(), which is empty
    if arguments:
        raise ValueError("has an OrderedDict with arguments" if is_dict else "has bytes made of arguments")
    return {} if is_dict else b""


_STORAGES = (
    "BFloat16Storage BoolStorage ByteStorage CharStorage DoubleStorage FloatStorage HalfStorage IntStorage LongStorage "
    "ShortStorage"
)
_DTYPES = (
    "bfloat16 bool float16 float32 float64 float8_e4m3fn float8_e5m2 half float double int16 int32 int64 int8 uint8"
)
_OF_MODULE = {
    "argparse": "Namespace",
    "builtins": "set frozenset list dict int float str bool",
    "__builtin__": "set frozenset list dict int long float str unicode bool",
    "datetime": "timedelta",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
    "megatron.core.dist_checkpointing.validation": "StrictHandling",
    "megatron.core.enums": "ModelType Fp4Recipe Fp8Recipe",
    "megatron.core.inference.config": (
        "AsyncScheduleMode CudaGraphSizingDistribution KVCacheManagementMode PrefixCachingCoordinatorPolicy "
        "PrefixCachingEvictionPolicy"
    ),
    "megatron.core.inference.moe": "InferenceGroupedGemmBackend",
    "megatron.core.rerun_state_machine": "RerunDiagnostic RerunMode RerunState RerunValidationStatus",
    "megatron.core.transformer.enums": (
        "AttnBackend AttnMaskType AttnType CudaGraphModule CudaGraphScope InferenceCudaGraphScope LayerType ModelType"
    ),
    "megatron.core.transformer.pipeline_parallel_layer_layout": "PipelineParallelLayerLayout",
    "numpy": "dtype ndarray",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "pathlib": "Path PosixPath PurePosixPath",
    "pathlib._local": "Path PosixPath PurePosixPath",  # Python 3.13
    "signal": "Signals",
    "torch": f"device {_STORAGES} {_DTYPES}",
    "torch._utils": "_rebuild_parameter _rebuild_tensor_v2 _rebuild_tensor_v3",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties "
        "TensorStorageMetadata _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.planner": "SavePlan TensorWriteData WriteItem WriteItemType",
    "torch.serialization": "_get_layout",
    "torch.storage": "UntypedStorage",
    "types": "SimpleNamespace",
}

ALLOWED = PLAIN | {f"{module}.{name}" for module, names in _OF_MODULE.items() for name in names.split()}
"""All names that are allowed; calls of those that are not :data:`PLAIN` are kept as records of name and arguments."""


# --- opcodes ------------------------------------------------------------------------------------------------

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


_NUMBERS = frozenset(["BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"])
_TEXTS = frozenset(["BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"])
_LITERALS = _NUMBERS | _TEXTS
_PUTS, _GETS = frozenset(["MEMOIZE", "BINPUT", "LONG_BINPUT"]), frozenset(["BINGET", "LONG_BINGET"])
_CONSTANTS: dict[str, Callable[[], object]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
}


class _Machine:
    """The stack and the memo of one pickle."""

    def __init__(self) -> None:
        self._stack: list[object] = []
        self._memo: dict[int, object] = {}

    def run(self, content: bytes) -> object:
        stack, memo = self._stack, self._memo
        for opcode, argument, _ in pickletools.genops(content):
            name = opcode.name
            # The frequent opcodes come first.
            if name in _LITERALS:
                if isinstance(argument, int) and argument.bit_length() > _MAX_INTEGER_BITS:
                    raise ValueError(f"it has an integer of {argument.bit_length()} bits")
                stack.append(argument)
            elif name in _PUTS:
                memo[len(memo) if argument is None else int(str(argument))] = stack[-1]
            elif name in _GETS:
                assert isinstance(argument, int)
                stack.append(memo[argument])
            elif name == "MARK":
                stack.append(_Mark())
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name]())
            else:
                self._step(name, argument)
        result = self._pop()
        if self._stack:
            raise ValueError("values remain on its stack")
        return result

    # An example: ``{"a": (1, 2)}`` is EMPTY_DICT, BINUNICODE "a", BININT1 1, BININT1 2, TUPLE2, SETITEM.
    #
    #   {} │ {} "a" │ {} "a" 1 │ {} "a" 1 2 │ {} "a" (1, 2) │ {"a": (1, 2)}      the stack, its top on the right
    #
    # MARK begins a group of any size, which the next TUPLE, APPENDS or SETITEMS takes from the stack.

    def _step(self, name: str, argument: object) -> None:
        """Interpret an opcode that takes values from the stack. Raises ``ValueError``."""
        stack = self._stack
        match name:
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                values = [self._pop() for _ in range(int(name[-1]))]
                stack.append(tuple(reversed(values)))
            case "TUPLE":
                stack.append(tuple(self._pop_group()))
            case "SETITEM" | "SETITEMS":
                items = [self._pop(), self._pop()][::-1] if name == "SETITEM" else self._pop_group()
                target = stack[-1]
                if not isinstance(target, dict) or len(items) % 2:
                    raise ValueError("it sets items of a value that is not a dict")
                target.update(zip(_keys(items[::2]), items[1::2], strict=True))
            case "APPEND" | "APPENDS":
                values, target = [self._pop()] if name == "APPEND" else self._pop_group(), stack[-1]
                if not isinstance(target, list):
                    raise ValueError("it appends to a value that is not a list")
                target.extend(values)
            case "ADDITEMS":
                values, target = self._pop_group(), stack[-1]
                if not isinstance(target, set):
                    raise ValueError("it adds to a value that is not a set")
                target.update(_keys(values))
            case "GLOBAL":
                stack.append(_allowed(str(argument).replace(" ", ".")))
            case "STACK_GLOBAL":
                last, module = self._pop(), self._pop()
                if not isinstance(last, str) or not isinstance(module, str):
                    raise ValueError("it has a global without a name")
                stack.append(_allowed(f"{module}.{last}"))
            case "REDUCE" | "NEWOBJ":
                arguments, function = self._pop(), self._pop()
                if not isinstance(function, Global) or not isinstance(arguments, tuple):
                    raise ValueError("it calls a value that is not a named function")
                is_plain = function.name in PLAIN
                stack.append((_plain_data if is_plain else Record)(function.name, arguments))
            case "BUILD":
                state, target = self._pop(), stack[-1]
                if isinstance(target, Record):
                    target.state = state
                elif not isinstance(target, dict):  # attributes of an OrderedDict have no use
                    raise ValueError("it sets the state of plain data")
            case "BINPERSID":
                stack.append(PersistentId(self._pop()))
            case "FROZENSET":
                stack.append(frozenset(_keys(self._pop_group())))
            case "PROTO" | "FRAME" | "STOP":
                pass
            case _:
                raise ValueError(f"it has the opcode {name}, which is not in Megatron-LM's checkpoints")

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


def _allowed(name: str) -> Global:
    if name not in ALLOWED:
        raise _RefusedGlobal(printable(name))
    return Global(name)


def _keys(values: list[object]) -> list[object]:
    """``values``, which are keys or elements of a set; raises ``ValueError`` for others.

    Tuples in tuples are refused, since their hash recurses.
    """
    scalars = (str, int, float, bytes, type(None))
    for value in values:
        parts = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(part, (*scalars, Record, Global)) for part in parts):
            raise ValueError("it has a key that is not a name or a number")
    return values
