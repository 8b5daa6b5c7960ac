"""What the stays of earlier attempts teach."""

import json
from pathlib import Path

import pytest

from megatron.operation.stays import FILE, command_key, longest_stays, write_stays

KEY = command_key(["pretrain_llama.py", "--bf16"], 8)


def test_the_longest_stay_of_the_same_command_counts(tmp_path: Path) -> None:
    assert longest_stays(tmp_path, KEY) == longest_stays(None, KEY) == {}
    write_stays(tmp_path, KEY, "a", {"start": 8.0, "save": 0.4})
    write_stays(tmp_path, KEY, "a", {"start": 8.0, "save": 0.5})
    write_stays(tmp_path, KEY, "b", {"start": 2.0, "save": 0.6})
    write_stays(tmp_path, command_key(["pretrain_llama.py", "--bf16"], 16), "c", {"start": 100.0})
    assert longest_stays(tmp_path, KEY) == {"start": 8.0, "save": 0.6}
    assert len(json.loads((tmp_path / FILE).read_text())["attempts"]) == 3


def test_old_attempts_are_forgotten(tmp_path: Path) -> None:
    for attempt in range(40):
        write_stays(tmp_path, KEY, str(attempt), {"save": float(40 - attempt)})
    assert longest_stays(tmp_path, KEY) == {"save": 20.0}


@pytest.mark.parametrize(
    "text",
    ["", "[", "{}", "[" * 100_000, '{"schema": 1, "attempts": 3}', '{"schema": 1, "attempts": [3, {"command": []}]}'],
)
def test_a_damaged_file_teaches_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert longest_stays(tmp_path, KEY) == {}
    write_stays(tmp_path, KEY, "a", {"save": 1.0})
    assert longest_stays(tmp_path, KEY) == {"save": 1.0}
