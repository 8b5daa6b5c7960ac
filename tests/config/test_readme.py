"""What the README tells a user to type is accepted."""

import re
import shlex
from pathlib import Path

from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.config.flag_names import flag_names

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_first_run_on_a_gpu_node_has_good_flags() -> None:
    command = re.search(r"pretrain_llama\.py \\\n(.*?)```", README, re.DOTALL)
    assert command is not None
    config = parse_command_line(shlex.split(command[1].replace("\\\n", " ")))
    check_run(config, 8)
    assert config.model.resolve(128256, 4, config.seq_length).num_parameters() == 8_030_261_248


def test_the_flags_by_purpose_exist() -> None:
    table = README[README.index("## Flags by purpose") : README.index("## Coming from Megatron-LM")]
    mentioned = set(re.findall(r"`(--[a-z0-9-]+)", table))
    assert len(mentioned) > 30
    assert mentioned - set(flag_names()) <= {"--help"}


def test_every_place_that_the_readme_names_is_there() -> None:
    for path in re.findall(r"`((?:tools|benchmarks|examples|megatron|docs|tests)/[\w./-]*)`", README):
        assert (Path(__file__).parents[2] / path).exists(), path
