"""The values that the words of a command line have in the fields of a run, by an independent reading of the words."""

from megatron.command_line.parser import values_by_field
from megatron.config.run import RunConfig
from megatron.config.run_parser import RUN_PARSER


def value_in(config: RunConfig, flag: str) -> object:
    """The value of the field of a flag; for ``--no-x`` the negation of x."""
    known = RUN_PARSER.flags
    positive = known.get(flag) or known[f"--{flag.removeprefix('--no-')}"]
    value = values_by_field(config)[positive.field.name]
    return value if flag in known else not value


def assert_same(value: object, words: tuple[str, ...]) -> None:
    """``value`` is what a shell's words mean: on, one number or word, or several."""
    if not words:
        assert value is True
        return
    found = value if isinstance(value, tuple) else (value,)
    assert len(found) == len(words), (value, words)
    for one, word in zip(found, words):
        assert float(word) == one if isinstance(one, int | float) else word == one, (value, words)
