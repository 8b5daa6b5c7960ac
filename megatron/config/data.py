"""Flags for the tokenizer, the corpus and the loader."""

import re
from dataclasses import dataclass
from typing import Literal

from megatron.errors import ConfigError
from megatron.flags import changed_flags, require_at_least, require_flag, require_fraction, values_of
from megatron.urls import check_place, refuse_urls

TokenizerType = Literal[
    "SentencePieceTokenizer",
    "Llama2Tokenizer",
    "GPTSentencePieceTokenizer",
    "TikTokenizer",
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "NullTokenizer",
]

# Other names of a tokenizer.
TOKENIZER_ALIASES: dict[str, TokenizerType] = {
    "Llama2Tokenizer": "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
}

_STAGE_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")

DEFAULT_SPLIT = "969, 30, 1"
_SPLIT_PATHS = ("train_data_path", "valid_data_path", "test_data_path")
_OF_FIM = ("fim_rate", "fim_spm_rate", "fim_prefix_token", "fim_middle_token", "fim_suffix_token")
TEXT_FORMAT = ("text_key", "fim_data", *_OF_FIM)
_LOADERS = ("data_module", "train_text_path")


@dataclass(frozen=True)
class TokenizerConfig:
    """Tokenizer of the corpus."""

    tokenizer_type: TokenizerType | None = None
    """Tokenizer: SentencePieceTokenizer (aliases Llama2Tokenizer, GPTSentencePieceTokenizer), TikTokenizer (Llama 3's
    tokenizer.model), HuggingFaceTokenizer (a tokenizer.json or its directory), GPT2BPETokenizer (--vocab-file and
    --merge-file; the default for a corpus with these two flags) or NullTokenizer (text is ids separated by spaces)."""
    tokenizer_model: str | None = None
    """Tokenizer file (or directory, for HuggingFaceTokenizer)."""
    vocab_file: str | None = None
    """GPT2BPETokenizer: vocab.json, with the id of every token. No effect with other tokenizers; refused with
    HuggingFaceTokenizer, to which Megatron-LM passes it."""
    merge_file: str | None = None
    """GPT2BPETokenizer: merges.txt. No effect with other tokenizers; refused with HuggingFaceTokenizer, to which
    Megatron-LM passes it."""
    vocab_size: int | None = None
    """NullTokenizer: V for ids 0..V-1, with end-of-document = V. With --mock-data and no tokenizer: the vocabulary
    size, by default the size of the --model preset (Llama 2: 32,000, Llama 3: 128,256, Qwen3: 151,936). With another
    tokenizer: the number of ids of the model, at least the tokenizer's; Qwen3's models have more."""
    tiktoken_num_special_tokens: int = 256
    """TikTokenizer: number of special ids after the ordinary ones (Llama 3: 256)."""
    tiktoken_pattern: Literal["v1", "v2"] | None = None
    """Accepted for Megatron-LM compatibility with other tokenizers; no effect. TikTokenizer always uses Llama 3's
    pattern."""
    trust_remote_code: bool = False
    """Refused: no code from a tokenizer's directory is ever executed."""

    @property
    def canonical_type(self) -> TokenizerType | None:
        """The type under its first name."""
        return None if self.tokenizer_type is None else TOKENIZER_ALIASES.get(self.tokenizer_type, self.tokenizer_type)

    @property
    def without_effect(self) -> list[str]:
        """The given flags that the tokenizer does not use."""
        is_used = self.tokenizer_type == "GPT2BPETokenizer"
        return [] if is_used else changed_flags(self, "vocab_file", "merge_file")

    def check(self) -> None:
        require_at_least(1, values_of(self, "vocab_size"))
        places = values_of(self, "tokenizer_model", "vocab_file", "merge_file")
        refuse_urls(places, "copy the tokenizer to a local path")
        if self.tokenizer_type == "GPT2BPETokenizer":
            for flag, path in values_of(self, "vocab_file", "merge_file").items():
                if path is None:
                    raise ConfigError(f"--tokenizer-type GPT2BPETokenizer needs {flag}: add it with the file.")
            if self.tokenizer_model is not None:
                raise ConfigError(
                    f"--tokenizer-model {self.tokenizer_model} is not used by --tokenizer-type GPT2BPETokenizer, which "
                    "reads --vocab-file and --merge-file: remove it."
                )
        elif self.tokenizer_type == "HuggingFaceTokenizer":
            for flag in self.without_effect:
                raise ConfigError(
                    f"{flag} and --tokenizer-type HuggingFaceTokenizer exclude each other, because its tokenizer.json "
                    "has the vocabulary and the merges: remove one of them."
                )
        require_at_least(0, values_of(self, "tiktoken_num_special_tokens"))
        if self.trust_remote_code:
            raise ConfigError(
                "--trust-remote-code is not supported, because it executes code from the tokenizer's directory: remove "
                "it and set --tokenizer-model to a tokenizer.json."
            )
        if self.tiktoken_pattern is not None and self.tokenizer_type == "TikTokenizer":
            raise ConfigError(
                f"--tiktoken-pattern {self.tiktoken_pattern} is not supported, because Llama 3's tokenizer has its own "
                "pattern: remove it."
            )
        if self.tokenizer_type == "NullTokenizer" and self.vocab_size is None:
            raise ConfigError(
                "--tokenizer-type NullTokenizer needs --vocab-size V (ids 0..V-1, end-of-document = V): add it."
            )
        without_model = (None, "NullTokenizer", "GPT2BPETokenizer")
        if self.tokenizer_type not in without_model and self.tokenizer_model is None:
            raise ConfigError(f"--tokenizer-type {self.tokenizer_type} needs --tokenizer-model: add it with the file.")


@dataclass(frozen=True)
class DataConfig:
    """Corpora, sample order and data loader."""

    # Corpora
    data_path: tuple[str, ...] = ()
    """Corpus prefixes (P for P.bin and P.idx), or weight-prefix pairs: 0.7 corpus_a 0.3 corpus_b."""
    split: str = DEFAULT_SPLIT
    """Weights of the train, validation and test splits of every corpus."""
    train_data_path: tuple[str, ...] = ()
    """Corpora of the train split, in the format of --data-path; replaces --data-path and --split."""
    valid_data_path: tuple[str, ...] = ()
    """Corpora of the validation split, with --train-data-path or --skip-train."""
    test_data_path: tuple[str, ...] = ()
    """Corpora of the test split, with --train-data-path or --skip-train."""
    data_args_path: str | None = None
    """File with the value of --data-path, for long blends."""
    per_split_data_args_path: str | None = None
    """JSON file with the corpora of each split: {"train": [...], "valid": [...], "test": [...]}."""
    # Caches
    data_cache_path: str | None = None
    """Directory for the cached sample order (default: cache/GPTDataset_indices beside the first corpus)."""
    object_storage_cache_path: str | None = None
    """Directory for copies of the .idx files of remote corpora, such as s3://bucket/corpus (default:
    --data-cache-path); .bin files are read where they are."""
    # Order of the samples
    sample_order: Literal["megatron", "extendable", "best-fit"] = "megatron"
    """Sample order over several epochs: megatron is Megatron-LM's order, which changes from sample 0 on when a longer
    run needs one more epoch; extendable shuffles every epoch separately, so that a longer run begins with the samples
    of a shorter one; best-fit packs whole documents into samples, and cuts only those that are longer than a sample
    (docs/sample_order.md)."""
    new_data_stage: str | None = None
    """Name of a data stage. If the checkpoint of --load is not in the stage of this name, the run begins the stage: it
    reads the corpora of the command line from their first sample with its --seq-length, and keeps the optimizer state,
    the learning-rate schedule and the counters. Otherwise the run continues in the stage, so that the same command can
    be restarted."""
    mid_level_dataset_surplus: float = 0.005
    """Fraction of additional samples that are built for each corpus of a weighted blend."""
    num_dataset_builder_threads: int = 1
    """Number of corpora of a blend that are opened and whose sample orders are built in parallel."""
    mock_data: bool = False
    """Train on synthetic samples, a function of (seed, sample index), instead of --data-path."""
    # Data of one's own, and texts
    data_module: str | None = None
    """FILE.py:FUNCTION, data of your own instead of --data-path: the Python file is executed on every rank, and its
    function returns the loader of this rank's samples (docs/data.md), also for evaluation, unless --valid-data-path is
    given."""
    train_text_path: tuple[str, ...] = ()
    """Texts that are tokenized and packed while training, instead of --data-path: files (.jsonl, .txt, .md, .parquet,
    also .gz and .zst), directories, globs, their URLs, or dataset:NAME for a Hugging Face dataset, as a stream."""
    valid_text_path: tuple[str, ...] = ()
    """Texts of the validation split, with --train-text-path."""
    text_key: str = "text"
    """--train-text-path: JSON key or column of the text."""
    fim_data: bool = False
    """--train-text-path: fill in the middle (arXiv 2207.14255). Documents are divided into prefix, middle and suffix at
    two random characters, and the middle comes last."""
    fim_rate: float = 0.5
    """--fim-data: fraction of the documents that are divided."""
    fim_spm_rate: float = 0.5
    """--fim-data: fraction of the divided documents in the order suffix, prefix, middle; the others begin with the
    prefix."""
    fim_prefix_token: str = "<fim_prefix>"
    """--fim-data: token of the tokenizer before the prefix."""
    fim_middle_token: str = "<fim_middle>"
    """--fim-data: token before the middle."""
    fim_suffix_token: str = "<fim_suffix>"
    """--fim-data: token before the suffix."""
    seq_length: int | None = None
    """Tokens per sample (required for training)."""
    # Loader threads
    num_workers: int = 2
    """Threads per rank that read microbatches ahead; 0 reads in the training thread."""
    dataloader_timeout: int | None = None
    """Seconds that a rank waits for a microbatch from its loader threads before the run fails; 0 waits without limit
    (default: half of --distributed-timeout-minutes). With --num-workers 0 there is no limit."""
    dataloader_type: Literal["single", "cyclic"] = "single"
    """Sample order: single follows the sample index and is the same in every layout; cyclic shuffles the samples of
    each data-parallel rank in every epoch, so the order depends on the data-parallel size."""
    eod_mask_loss: bool = False
    """Mask the loss at end-of-document input tokens."""
    reset_attention_mask: bool = False
    """Restrict attention to the tokens of the same document; saves time."""
    dataloader_inter_document_masking: bool = False
    """Same as --reset-attention-mask."""
    reset_position_ids: bool = False
    """Restart position ids at the beginning of each document."""
    mmap_bin_files: bool = True
    """Memory-map local .bin files; --no-mmap-bin-files uses ordinary file reads."""
    data_verification_rate: float = 20.0
    """Megabytes per second that each rank reads in the background to compare the corpus blocks of this run with their
    digests in P.digests.json, in the order of consumption; 0 compares only .idx files, at the start."""

    @property
    def sources(self) -> dict[str, object]:
        """The flags for the corpora that are set."""
        paths = ("data_path", "data_args_path", "per_split_data_args_path", *_SPLIT_PATHS)
        flags = values_of(self, "mock_data", *_LOADERS, *paths)
        return {flag: value for flag, value in flags.items() if value}

    @property
    def loader(self) -> str | None:
        """The flag of a loader that reads the training data instead of corpora, if one is given."""
        return next((flag for flag, value in values_of(self, *_LOADERS).items() if value), None)

    @property
    def split_paths(self) -> dict[str, tuple[str, ...]]:
        """``--train-data-path``, ``--valid-data-path`` and ``--test-data-path`` by split."""
        return {"train": self.train_data_path, "valid": self.valid_data_path, "test": self.test_data_path}

    @property
    def is_per_split(self) -> bool:
        """Whether every split has separate corpora."""
        return self.per_split_data_args_path is not None or any(self.split_paths.values())

    @property
    def index_cache_path(self) -> str | None:
        """Directory for copies of the ``.idx`` files of remote corpora."""
        return self.object_storage_cache_path or self.data_cache_path

    @property
    def masks_documents(self) -> bool:
        """Whether attention is restricted to the same document."""
        return self.reset_attention_mask or self.dataloader_inter_document_masking

    @property
    def marks_documents(self) -> bool:
        """Whether samples include the document boundaries."""
        return self.masks_documents or self.reset_position_ids

    def check(self) -> None:
        sources, of_splits = list(self.sources), values_of(self, *_SPLIT_PATHS)
        trained = [flag for flag in sources if flag not in ("--valid-data-path", "--test-data-path")]
        if len(trained) > 1 or (len(sources) > 1 and not {"--train-data-path", self.loader}.issuperset(trained)):
            raise ConfigError(f"{' and '.join(sources)} exclude each other: remove all but one of them.")
        if (self.is_per_split or self.loader) and self.split != DEFAULT_SPLIT:
            raise ConfigError(f"--split {self.split!r} has no effect with {sources[0]}: remove one of them.")
        if self.sample_order == "extendable" and self.dataloader_type == "cyclic":
            raise ConfigError(
                "--sample-order extendable has no effect with --dataloader-type cyclic, which shuffles all samples: "
                "remove one of them."
            )
        if self.sample_order == "best-fit" and self.mock_data:
            raise ConfigError("--sample-order best-fit packs documents, which --mock-data has not: remove one of them.")
        self._check_loader()
        # Files that are read at once, or mapped, must be local; corpora may be URLs.
        lists = values_of(self, "data_args_path", "per_split_data_args_path")
        refuse_urls(lists, "copy the file to a local path; the corpora that it lists may be URLs")
        refuse_urls(values_of(self, "data_cache_path"), "use a local directory, whose files can be mapped")
        copies = values_of(self, "object_storage_cache_path")
        refuse_urls(copies, "use a local directory for copies of .idx files, and set --data-path to the corpora")
        texts = values_of(self, "train_text_path", "valid_text_path")
        for flag, path in {"--data-path": self.data_path, **of_splits, **texts}.items():
            for word in path:
                check_place(flag, word.removeprefix("dataset:"))
        if self.new_data_stage is not None and not _STAGE_NAME.fullmatch(self.new_data_stage):
            raise ConfigError(
                f"--new-data-stage {self.new_data_stage!r} is not a valid name: use up to 64 letters, digits, '.', "
                "'_', '-'."
            )
        rates = ("dataloader_timeout", "data_verification_rate", "mid_level_dataset_surplus")
        require_at_least(0, values_of(self, "num_workers", *rates))
        require_at_least(1, values_of(self, "seq_length", "num_dataset_builder_threads"))
        if self.dataloader_timeout is not None and self.num_workers == 0:
            raise ConfigError(
                f"--dataloader-timeout {self.dataloader_timeout} needs loader threads: set --num-workers 1 or "
                "more, or remove it."
            )

    def _check_loader(self) -> None:
        if self.loader is not None:
            for flag in changed_flags(self, "sample_order", "dataloader_type", "mid_level_dataset_surplus"):
                raise ConfigError(f"{flag} orders the samples of corpora, and {self.loader} has none: remove it.")
        refuse_urls(values_of(self, "data_module"), "copy the file")
        if self.data_module is not None and not all(self.data_module.rpartition(":")[::2]):
            raise ConfigError(f"--data-module {self.data_module} is not FILE.py:FUNCTION: name a file and a function.")
        require_fraction(values_of(self, "fim_rate", "fim_spm_rate"), with_one=True)
        of_texts = changed_flags(self, "valid_text_path", "text_key", "fim_data")
        require_flag("--train-text-path", bool(self.train_text_path), of_texts)
        require_flag("--fim-data", self.fim_data, changed_flags(self, *_OF_FIM))
        if self.valid_text_path and self.valid_data_path:
            raise ConfigError("--valid-text-path and --valid-data-path exclude each other: remove one of them.")
