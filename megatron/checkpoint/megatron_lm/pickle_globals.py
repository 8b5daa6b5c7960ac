"""The global names that a pickle in a checkpoint of Megatron-LM may contain. None of them is imported or called."""

from collections.abc import Callable, Mapping


def _no_elements(*arguments: object) -> dict[object, object]:
    """``defaultdict(factory)``; its items follow."""
    return {}


def _ordered(*arguments: object) -> dict[object, object]:
    """``OrderedDict()``; its items follow."""
    if arguments:
        raise ValueError("has an OrderedDict with arguments")
    return {}


def _size(*arguments: object) -> tuple[int, ...]:
    """``torch.Size((1, 2))``"""
    (sizes,) = arguments or ((),)
    if not isinstance(sizes, tuple) or not all(type(size) is int for size in sizes):
        raise ValueError("has a torch.Size that is not made of integers")
    return sizes


def _encoded(*arguments: object) -> bytes:
    """``_codecs.encode(text, "latin1")``: how protocol 2 stores bytes."""
    text, encoding = arguments
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("has bytes in an unknown encoding")
    return text.encode("latin1")


def _no_bytes(*arguments: object) -> bytes:
    """``bytes()``: how protocol 2 stores an empty one."""
    if arguments:
        raise ValueError("has bytes made of arguments")
    return b""


BUILDERS: Mapping[str, Callable[..., object]] = {
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": _no_elements,
    "torch.Size": _size,
    "_codecs.encode": _encoded,
    "__builtin__.bytes": _no_bytes,
}
"""Globals that stand for plain data, and the function of this file that makes it."""

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

ALLOWED = frozenset(BUILDERS) | {f"{module}.{name}" for module, names in _OF_MODULE.items() for name in names.split()}
"""All of them; those without a builder are kept as records of their name and arguments."""
