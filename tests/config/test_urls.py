"""A URL where a flag names a place: it is read or written as a URL, or refused, but never a folder named "s3:"."""

import dataclasses
import os
from pathlib import Path
from typing import Any, get_args

import pytest

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.urls import is_url, refuse_urls

URL = "s3://bucket/place"

TAKES_A_URL = {
    "load",
    "pretrained_checkpoint",
    "redundant_save",
    "data_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
}
NAMES_NO_PLACE = {
    "freeze_parameters",
    "inject_fault",
    "pipeline_model_parallel_layout",
    "moe_layer_freq",
    "no_rope_freq",
    "new_data_stage",
    "rank_order",
    "save_interval",
    "split",
    "step_batch_size_schedule",
    "validation_set_names",
    "wandb_entity",
    "wandb_exp_name",
    "wandb_project",
    "kernel",
}


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
        if flag.name not in TAKES_A_URL | NAMES_NO_PLACE
    ],
)
def test_a_flag_that_does_not_take_a_url_says_so(group: Any, flag: dataclasses.Field[Any]) -> None:
    values = (URL,) if isinstance(flag.default, tuple) else URL
    name = "--" + flag.name.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"{name} {URL} is a URL, but the flag needs a local path: ."):
        group(**{flag.name: values}).check()


def test_every_listed_flag_exists() -> None:
    assert {flag.name for _, flag in text_flags()} >= TAKES_A_URL


def test_save_names_the_flag_that_takes_a_url() -> None:
    with pytest.raises(ConfigError, match="set --redundant-save to the URL"):
        CheckpointConfig(save="s3://bucket/run").check()


@pytest.mark.parametrize(
    "place", ["s3://bucket/run", "gs://b", "simplecache::s3://bucket/run", "memory://x", "file:///x"]
)
def test_a_scheme_makes_a_url(place: str) -> None:
    assert is_url(place)


@pytest.mark.parametrize("place", ["run", "./run", "/data/a:b", "a:b/c", "C:/run", "s3:/bucket"])
def test_all_else_is_a_path(place: str) -> None:
    assert not is_url(place)


def test_a_path_object_that_has_lost_a_slash_is_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"--json s3:/bucket/x is a URL"):
        refuse_urls({"--json": Path("s3://bucket/x")}, "name a local file")
    refuse_urls({"--json": Path("out/a:b.json"), "--svg": None}, "name a local file")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CheckpointConfig(load="s3:/bucket/run"), "--load s3:/bucket/run is not a path or a URL"),
        (CheckpointConfig(save="a", redundant_save=("b", "s3://c", "s3://c/")), "s3://c/ is given twice"),
        (CheckpointConfig(save="a", redundant_save=("b", "a")), "--redundant-save a is the directory of --save"),
        (CheckpointConfig(save="a", redundant_save=("ftp://me:secret@host/x",)), r"ftp://\*{3}@host/x contains"),
        (CheckpointConfig(load="ftp://me:secret@host/x"), "contains a password"),
        (DataConfig(data_path=("1.0", "ftp://me:secret@host/x")), "--data-path .* contains a password"),
    ],
)
def test_a_place_that_cannot_be_honoured_is_refused(config: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        config.check()
    assert "secret" not in str(caught.value)


def test_nothing_is_created_when_a_url_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError):
        CheckpointConfig(save=URL).check()
    assert os.listdir(tmp_path) == []
