"""A URL where a flag names a place: it is read or written as a URL, or refused, but never a folder named "s3:"."""

import dataclasses
from pathlib import Path
from typing import Any, get_args

import pytest

from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.urls import is_url, refuse_urls

URL = "s3://bucket/place"

TAKES_A_URL = """
    load pretrained_checkpoint redundant_save data_path train_data_path valid_data_path test_data_path
"""
NAMES_NO_PLACE = """
    freeze_parameters inject_fault pipeline_model_parallel_layout moe_layer_freq no_rope_freq new_data_stage rank_order
    save_interval split step_batch_size_schedule validation_set_names wandb_entity wandb_exp_name wandb_project kernel
"""


def text_flags() -> list[tuple[Any, dataclasses.Field[Any]]]:
    """Every flag of training that takes any text, with the group that it is in."""
    return [
        (group.default_factory, flag)
        for group in dataclasses.fields(RunConfig)
        for flag in dataclasses.fields(group.default_factory)  # type: ignore[arg-type]
        if _takes_text(flag.type)
    ]


def _takes_text(kind: Any) -> bool:
    return kind is str or any(_takes_text(part) for part in get_args(kind) if isinstance(part, type) or get_args(part))


@pytest.mark.parametrize(
    ("group", "flag"),
    [
        pytest.param(group, flag, id=flag.name)
        for group, flag in text_flags()
        if flag.name not in f"{TAKES_A_URL} {NAMES_NO_PLACE}".split()
    ],
)
def test_a_flag_that_does_not_take_a_url_says_so(group: Any, flag: dataclasses.Field[Any]) -> None:
    values = (URL,) if isinstance(flag.default, tuple) else URL
    name = "--" + flag.name.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"{name} {URL} is a URL, but the flag needs a local path: ."):
        group(**{flag.name: values}).check()


def test_every_listed_flag_exists() -> None:
    assert {flag.name for _, flag in text_flags()} >= {*TAKES_A_URL.split(), *NAMES_NO_PLACE.split()}


def test_a_scheme_makes_a_url_and_all_else_is_a_path() -> None:
    for place in ("s3://bucket/run", "gs://b", "simplecache::s3://bucket/run", "memory://x", "file:///x"):
        assert is_url(place), place
    for place in ("run", "./run", "/data/a:b", "a:b/c", "C:/run", "s3:/bucket"):
        assert not is_url(place), place


def test_a_path_object_that_has_lost_a_slash_is_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"--json s3:/bucket/x is a URL"):
        refuse_urls({"--json": Path("s3://bucket/x")}, "name a local file")
    refuse_urls({"--json": Path("out/a:b.json"), "--svg": None}, "name a local file")
