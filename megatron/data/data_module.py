"""Data of one's own: the function that a user names, the loader that it returns, and the loader's state.

    def build(context: DataContext) -> Iterator: ...    # of --data-module FILE.py:build, or RunParts.build_loader

The function returns an iterator of this data-parallel rank's samples; a generator is enough. A loader with
``state_dict`` and ``load_state_dict`` continues from checkpoints. Every rank of a replica has a loader of its own and
must read the same samples, so a loader is a function of what its context says.
"""

import base64
import json
import os
import runpy
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.data.gpt_dataset import Sample, build_sample
from megatron.data.tokenizers import Tokenizer
from megatron.errors import ConfigError, DataError, UserError

_ENDLESS = 1 << 62


@dataclass(frozen=True)
class DataContext:
    """What the function of a loader receives."""

    config: RunConfig
    """All flags: ``config.seq_length``, ``config.training.seed`` ..."""
    tokenizer: Tokenizer | None
    """None without ``--tokenizer-type``."""
    vocab_size: int
    end_of_document: int
    split: Literal["train", "validation"]
    """For validation the function may return None. Every evaluation calls it again, and reads the same samples."""
    rank: int
    """The data-parallel rank."""
    size: int
    """The number of data-parallel ranks."""
    consumed_samples: int
    """Samples of all ranks that were trained in this data stage; a loader without a state begins there."""
    global_batch_size: Callable[[int], int]
    """Samples of the iteration that begins after so many samples of the whole run."""


class SampleLoader(Protocol):
    """An iterator of the samples of a data-parallel rank.

    A sample is its ``seq_length + 1`` token ids, or these and the weights ``[seq_length]`` of the losses: the loss at
    place i predicts token i + 1. Optional are ``state_dict()``, the state after the last sample as JSON values, tensors
    and arrays; ``load_state_dict(state)``; and ``redivide(states)``, which takes the states of all data-parallel ranks
    of a run that had another number of them.
    """

    def __next__(self) -> Any: ...


BuildLoader = Callable[[DataContext], Any]
"""Returns a :class:`SampleLoader`; None for a split without data."""


def load_function(place: str) -> BuildLoader:
    """The function of ``--data-module FILE.py:FUNCTION``; executes the file. Raises :class:`ConfigError`."""
    path, _, name = place.rpartition(":")
    if not os.path.isfile(path):
        raise ConfigError(f"--data-module {place}: {path} is not a file: name an existing Python file.")
    with explained(f"--data-module {place}"):
        found = runpy.run_path(path, run_name="data_module")
    if not callable(found.get(name)):
        raise ConfigError(f"--data-module {place}: {path} has no function {name}: define it, or name another.")
    return found[name]


@contextmanager
def explained(name: str, *passed: type[Exception]) -> Iterator[None]:
    """Raise an exception of a user's code, unless it is one of the ``passed``, as one sentence with its place."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (UserError, *passed)):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = " ".join(f"{type(error).__name__} {error}".split())
        raise DataError(f"{name} raised {reason} ({frame.filename}, line {frame.lineno}): correct it.") from error


# --- samples -------------------------------------------------------------------------------------------------


class SampleStream:
    """The samples of a loader as a dataset: each read returns the next sample, whatever its index."""

    def __init__(self, loader: Any, name: str, context: DataContext) -> None:
        self.loader, self._name = loader, name
        data, end = context.config.data, context.end_of_document
        self._length = context.config.seq_length + 1
        self._masked_token = end if data.eod_mask_loss else None
        self._document_end = end if data.marks_documents else None

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, index: int) -> Sample:
        try:
            with explained(self._name, OSError, StopIteration):
                found = next(self.loader)
        except StopIteration:
            raise DataError(f"The samples of {self._name} have ended: train for fewer iterations.") from None
        tokens, *weights = found if isinstance(found, tuple) else (found,)
        arrays = [np.asarray(part) for part in (tokens, *weights)]
        shapes = [(self._length,), (self._length - 1,)][: len(arrays)]
        if [part.shape for part in arrays] != shapes or not np.issubdtype(arrays[0].dtype, np.integer):
            shown = " and ".join(f"{one.dtype}{list(one.shape)}" for one in arrays)
            raise DataError(
                f"{self._name} returned the sample {shown}: return {self._length} token ids (--seq-length + 1), or a "
                f"tuple of them and {self._length - 1} weights of the losses."
            )
        sample = build_sample(arrays[0].astype(np.int64), self._masked_token, self._document_end)
        if weights:
            sample["loss_mask"] *= arrays[1].astype(np.float32)
        return sample

    def state(self) -> Tensor | None:
        """The loader's state after the last sample, as bytes of JSON ``[n]``; None without one."""
        if not hasattr(self.loader, "state_dict"):
            return None
        with explained(f"state_dict of {self._name}"):
            return encode_state(self.loader.state_dict())


@dataclass(frozen=True)
class SavedLoader:
    """The states of the loaders in a checkpoint."""

    size: int
    """The number of data-parallel ranks that it has the states of."""
    states: Sequence[Tensor]
    """This rank's state if the run has as many data-parallel ranks, otherwise the states of all."""


def open_stream(build: BuildLoader, name: str, context: DataContext, saved: SavedLoader | None = None) -> SampleStream:
    """The samples of a new loader, which continues from the ``saved`` states.

    Raises :class:`ConfigError` for what is no loader, and for a loader that the checkpoint cannot continue.
    """
    with explained(name):
        loader = build(context)
    if loader is None and context.split != "train":
        raise ConfigError(
            f"Evaluation needs validation data, and {name} has none: set --valid-data-path, or remove --eval-interval."
        )
    if not hasattr(loader, "__next__"):
        found = type(loader).__name__
        raise ConfigError(f"{name} returned {found}, which has no __next__: return an iterator of samples.")
    has_state = hasattr(loader, "state_dict")
    if has_state != hasattr(loader, "load_state_dict"):
        raise ConfigError(f"{name} returned a loader with one of state_dict and load_state_dict: define both.")
    way_out = "begin these data at their first sample with --new-data-stage and a new name"
    if context.consumed_samples and has_state != (saved is not None):
        what = f"no state, and the loader of {name} needs one"
        if saved is not None:
            what = f"the state of a loader, and the loader of {name} has no load_state_dict"
        raise ConfigError(f"The checkpoint has {what}: {way_out}.")
    if saved is not None:
        if saved.size != context.size and not hasattr(loader, "redivide"):
            raise ConfigError(
                f"The checkpoint has the loader's states of {saved.size} data-parallel ranks, this run has "
                f"{context.size}, and the loader of {name} has no redivide: use ranks and parallel sizes that give "
                f"data-parallel size {saved.size}, define redivide, or {way_out}."
            )
        states = [decode_state(state) for state in saved.states]
        with explained(name):
            if saved.size == context.size:
                loader.load_state_dict(states[0])
            else:
                loader.redivide(states)
    return SampleStream(loader, name, context)


# --- states --------------------------------------------------------------------------------------------------


def encode_state(state: Any) -> Tensor:
    """A state of JSON values, tensors and arrays as the bytes of its JSON, uint8 ``[n]``."""
    return torch.frombuffer(bytearray(json.dumps(state, default=_encode).encode()), dtype=torch.uint8)


def decode_state(state: Tensor) -> Any:
    """The inverse of :func:`encode_state`; tuples come back as lists."""
    return json.loads(state.numpy().tobytes(), object_hook=_decode)


def _encode(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, Tensor | np.ndarray):
        raise TypeError(f"{type(value).__name__} is neither a JSON value nor a tensor or an array")
    if isinstance(value, Tensor):
        return {"tensor": _encode(value.numpy(force=True))}
    if value.dtype.hasobject:
        raise TypeError("an array of objects cannot be saved")
    return {"array": base64.b64encode(value.tobytes()).decode(), "dtype": value.dtype.str, "shape": value.shape}


def _decode(value: dict[str, Any]) -> Any:
    if value.keys() == {"array", "dtype", "shape"}:
        array = np.frombuffer(base64.b64decode(value["array"]), np.dtype(value["dtype"]))
        return array.reshape(value["shape"]).copy()
    return torch.from_numpy(value["tensor"]) if value.keys() == {"tensor"} else value
