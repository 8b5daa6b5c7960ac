"""Flags for the tokenizer, the corpus and the loader."""

from dataclasses import dataclass
from typing import Literal

from megatron.config.errors import ConfigError
from megatron.config.ranges import require_at_least

TokenizerType = Literal[
    "SentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer", "HuggingFaceTokenizer", "NullTokenizer"
]

DEFAULT_SPLIT = "969, 30, 1"


@dataclass(frozen=True)
class TokenizerConfig:
    """Which tokenizer turns text into ids."""

    tokenizer_type: TokenizerType | None = None
    """Tokenizer: SentencePieceTokenizer (alias Llama2Tokenizer), TikTokenizer (Llama 3's tokenizer.model),
    HuggingFaceTokenizer (a tokenizer.json or its directory) or NullTokenizer (text is ids separated by spaces)."""
    tokenizer_model: str | None = None
    """Tokenizer file (or directory, for HuggingFaceTokenizer)."""
    vocab_size: int | None = None
    """NullTokenizer: ids 0..V-1, with end-of-document = V. With --mock-data and no tokenizer: the size of the
    vocabulary. Otherwise it must equal the tokenizer's own size."""
    tiktoken_num_special_tokens: int = 256
    """TikTokenizer: number of reserved special ids after the ordinary ones (Llama 3: 256)."""
    tiktoken_pattern: Literal["v1", "v2"] | None = None
    """Accepted beside other tokenizers for Megatron-LM recipes, where it has no meaning. TikTokenizer reads Llama 3's
    file, which goes with a pattern of its own."""
    trust_remote_code: bool = False
    """HuggingFaceTokenizer: accepted for Megatron-LM recipes, but must stay off: no code from a tokenizer
    directory is ever executed."""

    def check(self) -> None:
        """Raise :class:`ConfigError` on a value that cannot be honoured."""
        require_at_least(1, {"--vocab-size": self.vocab_size})
        require_at_least(0, {"--tiktoken-num-special-tokens": self.tiktoken_num_special_tokens})
        if self.trust_remote_code:
            raise ConfigError(
                "--trust-remote-code would execute code from the tokenizer's directory, which this codebase "
                "never does: remove it and point --tokenizer-model at a tokenizer.json."
            )
        if self.tiktoken_pattern is not None and self.tokenizer_type == "TikTokenizer":
            raise ConfigError(
                f"--tiktoken-pattern {self.tiktoken_pattern} is not how Llama 3's tokenizer cuts text: remove it."
            )
        if self.tokenizer_type == "NullTokenizer" and self.vocab_size is None:
            raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size (ids 0..V-1, end-of-document = V).")
        if self.tokenizer_type not in (None, "NullTokenizer") and self.tokenizer_model is None:
            raise ConfigError(f"--tokenizer-type {self.tokenizer_type} needs --tokenizer-model with its file.")


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from and in which order."""

    data_path: tuple[str, ...] = ()
    """Corpus prefixes (P for P.bin and P.idx), or weight-prefix pairs: 0.7 corpus_a 0.3 corpus_b."""
    split: str = DEFAULT_SPLIT
    """Weights of the train, validation and test splits of every corpus."""
    train_data_path: tuple[str, ...] = ()
    """Corpora of the train split alone, in the words of --data-path; with it and the next two no corpus is split."""
    valid_data_path: tuple[str, ...] = ()
    """Corpora of the validation split alone."""
    test_data_path: tuple[str, ...] = ()
    """Corpora of the test split alone."""
    data_args_path: str | None = None
    """A file that holds the words of --data-path, for long blends."""
    per_split_data_args_path: str | None = None
    """A JSON file with the words of the paths of the splits: {"train": [...], "valid": [...], "test": [...]}."""
    data_cache_path: str | None = None
    """Directory for the cached sample order (default: cache/GPTDataset_indices beside the first corpus)."""
    object_storage_cache_path: str | None = None
    """Directory for copies of the .idx files of remote corpora, such as s3://bucket/corpus (default:
    --data-cache-path); .bin files are read where they are."""
    sample_order: Literal["megatron", "extendable"] = "megatron"
    """Order of samples over several epochs: megatron is Megatron-LM's, which changes from sample 0 when a longer run
    needs one more epoch; extendable shuffles every epoch apart, so that a longer run goes on where a shorter ended."""
    mid_level_dataset_surplus: float = 0.005
    """Share by which each corpus of a weighted blend is built larger than its part."""
    num_dataset_builder_threads: int = 1
    """Corpora of a blend that are opened, and whose orders are built, at the same time."""
    mock_data: bool = False
    """Train on synthetic samples, a function of (seed, sample index), instead of --data-path."""
    seq_length: int | None = None
    """Tokens per sample, required for training."""
    num_workers: int = 2
    """Loader processes per rank; 0 reads in the training process."""
    dataloader_type: Literal["single", "cyclic"] = "single"
    """Order of samples: single takes them in the order of the index, the same in every layout; cyclic shuffles
    anew each epoch inside every data-parallel rank's share, so that the order depends on their number."""
    eod_mask_loss: bool = False
    """No loss where the input token is the end of a document."""
    reset_attention_mask: bool = False
    """Keep attention inside documents; costs memory for their boundaries alone, and saves time."""
    dataloader_inter_document_masking: bool = False
    """The same as --reset-attention-mask, which holds the boundaries of documents here, too."""
    reset_position_ids: bool = False
    """Count positions from the beginning of each document."""
    mmap_bin_files: bool = True
    """Memory-map local .bin files; --no-mmap-bin-files reads them with ordinary file reads."""
    create_attention_mask_in_dataloader: bool = False
    """Accepted for Megatron-LM recipes; must stay off: kernels build the causal mask themselves."""

    @property
    def sources(self) -> dict[str, object]:
        """The flags that say where samples come from, as far as they are given: exactly one, or some of the three
        paths of splits."""
        flags = {
            "--mock-data": self.mock_data,
            "--data-path": self.data_path,
            "--data-args-path": self.data_args_path,
            "--per-split-data-args-path": self.per_split_data_args_path,
            **{f"--{split}-data-path": path for split, path in self.split_paths.items()},
        }
        return {flag: value for flag, value in flags.items() if value}

    @property
    def split_paths(self) -> dict[str, tuple[str, ...]]:
        """The words of each split's own path."""
        return {"train": self.train_data_path, "valid": self.valid_data_path, "test": self.test_data_path}

    @property
    def is_per_split(self) -> bool:
        """Whether every split has corpora of its own."""
        return self.per_split_data_args_path is not None or any(self.split_paths.values())

    @property
    def masks_documents(self) -> bool:
        """Whether attention stays inside documents."""
        return self.reset_attention_mask or self.dataloader_inter_document_masking

    @property
    def marks_documents(self) -> bool:
        """Whether samples say where documents begin."""
        return self.masks_documents or self.reset_position_ids

    def check(self) -> None:
        """Raise :class:`ConfigError` on a value that cannot be honoured."""
        self._check_sources()
        if self.sample_order == "extendable" and self.dataloader_type == "cyclic":
            raise ConfigError(
                "--sample-order extendable has no use with --dataloader-type cyclic, which shuffles over all samples "
                "that there are: drop one of them."
            )
        if self.data_cache_path is not None and "://" in self.data_cache_path:
            raise ConfigError(f"--data-cache-path {self.data_cache_path} must be a directory, which can be mapped.")
        if self.object_storage_cache_path is not None and "://" in self.object_storage_cache_path:
            raise ConfigError(
                f"--object-storage-cache-path {self.object_storage_cache_path} must be a directory for local copies of "
                ".idx files; name the corpora themselves with --data-path."
            )
        if self.create_attention_mask_in_dataloader:
            raise ConfigError(
                "--create-attention-mask-in-dataloader is not supported, because attention kernels build the "
                "causal mask themselves: use --no-create-attention-mask-in-dataloader."
            )
        require_at_least(0, {"--num-workers": self.num_workers})
        require_at_least(0, {"--mid-level-dataset-surplus": self.mid_level_dataset_surplus})
        require_at_least(1, {"--seq-length": self.seq_length})
        require_at_least(1, {"--num-dataset-builder-threads": self.num_dataset_builder_threads})

    def _check_sources(self) -> None:
        sources = list(self.sources)
        if len(sources) > 1 and not all(flag[2:].removesuffix("-data-path") in self.split_paths for flag in sources):
            raise ConfigError(f"{' and '.join(sources)} exclude each other: drop all but one of them.")
        if self.is_per_split and self.split != DEFAULT_SPLIT:
            raise ConfigError(f"--split {self.split!r} divides no corpus when {sources[0]} is given: drop one of them.")
        if any(self.split_paths.values()) and not self.train_data_path:
            raise ConfigError(f"{sources[0]} needs --train-data-path beside it: give the corpora to train on, too.")
