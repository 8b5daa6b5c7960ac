"""``megatron-llama diff``: its text, page and JSON of a verdict with values that are not finite."""

import json
import math
import re

from megatron.comparison.finding import Comparison, Difference, Verdict
from megatron.comparison.page import to_json, to_page, to_text

NAMES = ("a <b>", "b & c")


def verdict() -> Verdict:
    distances = (1e-14, math.inf, math.nan)
    rows = [{"direction": "forward", "name": f"<{one}>", "distance": one, "expected": 1e-13} for one in distances]
    curves = {
        "iterations": [1, 2, 3],
        "a": [math.nan, 8.0, 7.0],
        "b": [math.nan, math.nan, 8.0],
        "expected": [1e-3] * 3,
        "first": 2,
    }
    tokens = {"first": 4, "a": [17, 5], "b": [17, 6]}
    parts = (
        Comparison("flags", "All flags.", (Difference("flags", "--x", "<1>", "2", changes_loss=False),)),
        Comparison("data", "Samples.", (Difference("data", "tokens", "5", "6"),), figures={"tokens": tokens}),
        Comparison("weights", "No common iteration.", is_complete=False),
        Comparison("curves", "3 iterations.", figures=curves),
        Comparison("operations", "3 tensors.", figures={"rows": rows, "first": 1}),
    )
    return Verdict("unclear", "Not <decided>.", (), (Difference("flags", "--y", "1", "2"),), parts)


def test_the_page_escapes_loads_nothing_and_marks_what_is_first() -> None:
    page = to_page(verdict(), NAMES)
    assert "a &lt;b&gt;" in page and "Not &lt;decided&gt;." in page and "&lt;inf&gt;" in page
    assert "<decided>" not in page and "<inf>" not in page and "<1>" not in page
    assert not re.findall(r"(?:src|href)=|url\(", page)
    assert re.findall(r'badge bad">(\d+)<', page) == ["5", "6"]
    assert "iteration 2: the first beyond" in page
    # Distances that are infinite or no number have a place too.
    assert page.count("<circle") == 6 and not re.findall(r'\b(?:c|x|y)\w*="-?(?:nan|inf)', page)


def test_the_text_and_json_have_every_part() -> None:
    text, content = to_text(verdict(), NAMES), json.loads(to_json(verdict(), NAMES))
    assert re.search(r"weights +not compared +No common iteration\.", text) and "differs, not tried:\n  --y" in text
    assert content["exit_code"] == 2 and content["parts"][3]["figures"]["b"] == ["nan", "nan", 8.0]


def test_a_verdict_without_parts_has_a_page() -> None:
    empty = Verdict("equal", "Equal.")
    assert "Equal." in to_page(empty, NAMES) and "Equal." in to_text(empty, NAMES)
