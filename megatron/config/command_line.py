"""The command line of a run: its words, split once, each flag with where it comes from, and the :class:`RunConfig`; and
``--help``."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron.architectures.catalog import PRESETS
from megatron.command_line.flag import docstrings, flag_help, flags_of, group_help, groups_of, two_columns
from megatron.command_line.parser import changed_values
from megatron.command_line.words import COMMAND_LINE, Given, split_words, surplus
from megatron.config.checks import check_run, flags_in, without_sentences_on
from megatron.config.dry_run import FlagFileConfig
from megatron.config.megatron_lm import NO_EFFECT
from megatron.config.model import ModelConfig, preset
from megatron.config.run import RunConfig
from megatron.config.run_parser import RUN_PARSER, check_without_effect
from megatron.config.run_yaml import read_run_yaml
from megatron.errors import ConfigError
from megatron.flags import changed_flags

DEFAULT = "the defaults"


@dataclass(frozen=True)
class ParsedLine:
    """A command line with its mistakes."""

    config: RunConfig
    """The run, in which flags with a mistake have their defaults."""
    mistakes: tuple[ConfigError, ...]
    """What is wrong with the words."""
    no_effect: tuple[str, ...]
    """Flags that change nothing, as they were typed."""
    inferred: tuple[str, ...]
    """Flags that follow from others, with the reason."""
    origins: Mapping[str, str]
    """Where the value of a field comes from, if it is not the default: the command line, a line of a file, a preset, a
    checkpoint, a model of Hugging Face."""

    def checked(self, world_size: int | None = None) -> RunConfig:
        """The run; raises :class:`ConfigError` for mistakes. With ``world_size`` the error also says what the checks
        find in the flags that can be parsed."""
        if self.mistakes:
            found = [] if world_size is None else self._found_by_checks(world_size)
            raise ConfigError.of([*self.mistakes, *found])
        return self.config

    def _found_by_checks(self, world_size: int) -> list[ConfigError]:
        """What the checks find, without sentences about a flag that has a mistake."""
        if self.config.checkpoint.load_hf is not None:
            return []  # The directory has sizes that the checks need.
        named = {flag for error in self.mistakes for sentence in error.sentences for flag in flags_in(sentence)}
        try:
            check_run(self.config, self.config.dry_run.num_gpus or world_size)
        except ConfigError as error:
            return [kept for one in error.causes or [error] for kept in without_sentences_on(one, named)]
        except Exception:
            return []  # A check may need a flag that has a mistake.
        return []

    def describe_origins(self) -> str:
        """How many flags come from where, if they come from several places."""
        # All lines of a file are one place.
        places = Counter(origin.partition(", line ")[0] for origin in self.origins.values())
        return ", ".join(f"{count} from {place}" for place, count in places.items()) if len(places) > 1 else ""


@dataclass(frozen=True)
class CommandLine:
    """The flags that are given, in order: of those for the same field, the last one counts."""

    given: tuple[Given, ...]
    defaults: RunConfig = field(default_factory=lambda: RUN_PARSER.config())
    """Values of the flags that are not given. A preset comes before those of the model."""
    origin: str = DEFAULT
    """Where ``defaults`` come from."""

    @classmethod
    def of(cls, arguments: Iterable[str]) -> "CommandLine":
        """Split ``arguments``, and read the file of ``--config``; raises :class:`ConfigError` if it cannot be read."""
        return cls.of_flags(split_words(arguments))

    @classmethod
    def of_flags(cls, given: Sequence[Given]) -> "CommandLine":
        """The flags with those of the file of ``--config`` before them, so that they override the file's."""
        files = [one for one in given if one.flag == "--config"]
        if not files:
            return cls(tuple(given))
        if len(files) > 1:
            raise ConfigError("--config is given twice: write all flags into one file.")
        path, *more = files[0].values or ("",)
        if not path:
            raise ConfigError("--config needs a YAML file: add its path.")
        if more:
            raise ConfigError(surplus(more[0]))
        FlagFileConfig(config=path).check()
        return cls((*read_run_yaml(Path(path)), *(one for one in given if one is not files[0])))

    def with_defaults(self, defaults: RunConfig, origin: str) -> "CommandLine":
        """The same flags over other defaults."""
        return replace(self, defaults=defaults, origin=origin)

    def over_model(self, origin: str, model: ModelConfig) -> RunConfig:
        """The run in which flags of the model that are not given have the values of ``model``, from ``origin``."""
        return self.with_defaults(RUN_PARSER.config(model=model), origin).parse().config

    def over(self, words: Sequence[str], origin: str = COMMAND_LINE) -> "CommandLine":
        """The same flags after those in ``words``, which they override."""
        return replace(self, given=(*split_words(words, origin), *self.given))

    def without(self, names: Collection[str]) -> "CommandLine":
        """The flags without those of the fields ``names``, in either form."""
        return replace(self, given=tuple(one for one in self.given if self._field(one) not in names))

    @property
    def fields(self) -> frozenset[str]:
        """The fields of the flags."""
        return frozenset(map(self._field, self.given))

    @staticmethod
    def _field(given: Given) -> str:
        found = RUN_PARSER.find(given.flag)
        return given.flag[2:].replace("-", "_") if found is None else found[0].field.name

    @property
    def words(self) -> list[str]:
        """The words of the flags."""
        return [word for one in self.given for word in one.words]

    def show_help(self, *, prints: bool = True) -> None:
        """With ``--help``: print it if this process ``prints`` (true on one rank), and raise :class:`SystemExit`."""
        for one in self.given:
            if one.flag in ("--help", "-h"):
                topic = one.values[0] if one.values else ""
                text = help_text(topic)
                if prints:
                    print(text)
                raise SystemExit(0)

    def parse(self) -> ParsedLine:
        """The run that the flags describe, and what is wrong with them."""
        mistakes = []
        for one in self.given:
            if one.flag in NO_EFFECT:
                try:
                    check_without_effect(one)
                except ConfigError as error:
                    mistakes.append(error)
        values = RUN_PARSER.read(one for one in self.given if one.flag not in NO_EFFECT)
        default, origins = self.defaults, dict[str, str]()
        if self.origin != DEFAULT:
            origins = dict.fromkeys(changed_values(default, RUN_PARSER.config()), self.origin)
        # The preset is the default of the model's flags, wherever --model stands.
        name = values.of_field.get("model")
        if name in PRESETS:
            default = replace(default, model=preset(name))
            origins |= dict.fromkeys(changed_values(default.model, ModelConfig()), f"--model {name}")
        config = RUN_PARSER.build(replace(values, mistakes=[]), default)
        origins |= {field: given.origin for field, given in values.given.items()}
        inferred = []
        if config.has_two_tokenizer_files_alone:
            config = replace(config, tokenizer=replace(config.tokenizer, tokenizer_type="GPT2BPETokenizer"))
            inferred.append("--tokenizer-type GPT2BPETokenizer: --vocab-file and --merge-file are its files")
        no_effect = [one.as_typed for one in self.given if RUN_PARSER.has_no_effect(one)]
        if not config.model.num_experts and not config.checkpoint.use_checkpoint_args:
            # Without experts it has no effect, and Megatron-LM accepts it, too.
            no_effect += changed_flags(config.parallel, "expert_tensor_parallel_size")
        no_effect += config.tokenizer.without_effect
        return ParsedLine(
            config, (*values.mistakes, *mistakes), tuple(dict.fromkeys(no_effect)), tuple(inferred), origins
        )


def parse_command_line(arguments: Sequence[str]) -> RunConfig:
    """The run of a command line.

    On ``--help`` prints the help and raises :class:`SystemExit`. Raises :class:`ConfigError` for unknown flags, with
    the nearest known ones, and for invalid values.
    """
    line = CommandLine.of(arguments)
    line.show_help()
    return line.parse().checked()


# --- help ----------------------------------------------------------------------------------------------------

_INTRODUCTION = """\
Pretrain a Llama model.

  One process:   python pretrain_llama.py FLAGS
  Several:       torchrun --nproc-per-node N pretrain_llama.py FLAGS
  A first run:   bash examples/quickstart.sh"""

# Flags of the overview.
MOST_USED = """
    --model --num-layers --hidden-size --num-attention-heads --data-path --mock-data --tokenizer-type --tokenizer-model
    --seq-length --micro-batch-size --global-batch-size --train-iters --lr --min-lr --lr-decay-style --lr-warmup-iters
    --weight-decay --bf16 --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
    --use-distributed-optimizer --recompute-activations --save --save-interval --load --eval-interval --log-interval
    --dry-run --config
"""


def help_text(topic: str) -> str:
    """The help about ``topic``: a group, a flag, ``all``, or empty for the overview.

    Raises :class:`ConfigError` for another word, with the nearest flag.
    """
    name, titles = topic.removeprefix("--").replace("_", "-"), docstrings(RunConfig)
    # Title and dataclass of each group.
    groups = {
        group.replace("_", "-"): (titles[group].rstrip("."), kind) for group, kind in groups_of(RunConfig).items()
    }
    if name == "":
        return _overview(groups)
    shown = [
        group_help(f"{title}: {' '.join((kind.__doc__ or '').split())}", kind)
        for group, (title, kind) in groups.items()
        if name in (group, "all")
    ]
    if shown:
        return "\n\n".join(shown if name in groups else [_INTRODUCTION, *shown])
    for group, (title, kind) in groups.items():
        for flag in flags_of(kind):
            if flag.name in (f"--{name}", f"--{name.removeprefix('no-')}"):
                return f"{flag_help(flag)}\n\n{title}: --help {group} shows the flags beside it."
    suggestion = RUN_PARSER.suggestion(topic).replace("see --help.", "use --help alone.")
    raise ConfigError(f"--help {topic} is no group and no flag: {suggestion}")


def _overview(groups: Mapping[str, tuple[str, type]]) -> str:
    by_name = {flag.name: flag for flag in flags_of(RunConfig)}
    most_used = [by_name[name] for name in MOST_USED.split()]
    left = max(len(flag.usage) for flag in most_used if len(flag.usage) <= 40) + 2
    lines = [_INTRODUCTION, "", "Flags that most runs need:"]
    for flag in most_used:
        lines += two_columns(flag.usage, flag.summary, left)
    lines += ["", "Groups of flags:"]
    left = max(map(len, groups)) + 2
    for group, (title, kind) in groups.items():
        lines += two_columns(group, f"{title} ({len(flags_of(kind))} flags)", left)
    lines += ["", "--help GROUP shows a group, --help FLAG a flag, --help all everything; docs/flags.md is the same."]
    return "\n".join(lines)
