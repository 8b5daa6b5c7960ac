"""``--inject-fault``: what its grammar accepts, what it means, and what is refused in a sentence."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.commands import pretrain_llama
from megatron.config.checks import check_run
from megatron.config.command_line import parse_command_line
from megatron.errors import ConfigError
from megatron.features.faults.flags import (
    ITERATION,
    KINDS,
    LOAD,
    SAVE,
    START,
    TARGETS,
    Fault,
    check_allowed,
    parse_fault,
    parse_faults,
)
from tests.end_to_end.run_process import MOCK_RUN, words_of

NUMBERS = st.integers(1, 10**6)


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    """Any fault that a user can write."""
    name = draw(st.sampled_from(sorted(KINDS)))
    kind = KINDS[name]
    moment = draw(st.sampled_from(sorted(kind.moments)))
    is_numbered = moment in (ITERATION, SAVE)
    number = None
    if kind.number is not None and not (kind.number.is_optional and draw(st.booleans())):
        whole = draw(st.integers(int(kind.number.least), int(kind.number.most)))
        number = float(whole) if kind.number.is_whole else min(whole + draw(st.sampled_from((0, 0.5, 0.25))), 1e6)
    return Fault(
        name,
        moment,
        first=draw(NUMBERS) if is_numbered else 1,
        count=draw(NUMBERS) if is_numbered and kind.can_last else 1,
        rank=None if kind.is_on_all_ranks else draw(st.none() | st.integers(0, 10**6)),
        target=draw(st.sampled_from(TARGETS)) if kind.has_target else None,
        number=number,
        times=draw(st.none() | NUMBERS),
    )


@given(st.lists(faults(), min_size=1, max_size=4, unique=True))
def test_a_fault_is_read_as_it_is_written(wanted: list[Fault]) -> None:
    assert parse_faults(",".join(map(str, wanted))) == tuple(wanted)


@given(faults(), st.sampled_from((ITERATION, SAVE, LOAD, START)), NUMBERS)
def test_a_fault_covers_exactly_its_moments(fault: Fault, moment: str, number: int) -> None:
    inside = moment == fault.moment and number in range(fault.first, fault.first + fault.count)
    assert fault.covers(moment, number) == inside


@st.composite
def damaged_faults(draw: st.DrawFn) -> str:
    text = str(draw(faults()))
    place = draw(st.integers(0, len(text) - 1))
    return text[:place] + draw(st.sampled_from(("", ":", "@", "+", "9", "x", "-"))) + text[place + 1 :]


@given(damaged_faults() | st.text(alphabet="abcdefiklnoprstuvwxyz@:+.,0123456789-_ \n(){}[]'\"é\u0661", max_size=40))
def test_any_other_text_is_refused_in_a_sentence(text: str) -> None:
    """Nothing is evaluated; a text that is accepted by chance means what its fixed form says."""
    try:
        found = parse_faults(text)
    except ConfigError as error:
        assert "--inject-fault" in str(error)
    else:
        assert parse_faults(",".join(map(str, found))) == found


def test_the_examples_of_the_issue() -> None:
    spec = "kill@12:rank1,stop@20:rank0,slow@30+10:rank1:1.3,flip@15:rank1:weight:29,nan@40:rank1,enospc@save2,exit@9"
    assert parse_faults(spec) == (
        Fault("kill", ITERATION, 12, rank=1),
        Fault("stop", ITERATION, 20, rank=0),
        Fault("slow", ITERATION, 30, 10, 1, number=1.3),
        Fault("flip", ITERATION, 15, rank=1, target="weight", number=29),
        Fault("nan", ITERATION, 40, rank=1),
        Fault("enospc", SAVE, 2),
        Fault("exit", ITERATION, 9, number=1),
    )
    assert parse_fault("kill@load:always") == Fault("kill", LOAD, times=None)
    assert parse_fault("kill@start:times2") == Fault("kill", START, times=2)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("", "KIND@MOMENT"),
        ("kill", "KIND@MOMENT"),
        ("burn@3", "one of kill, stop"),
        ("kill@", "the moment ''"),
        ("kill@0", "from 1"),
        ("kill@3+2", "no duration"),
        ("kill@3:7", "kill takes no '7'"),
        ("kill@3:rank1:rank2", "rank is given twice"),
        ("kill@3:times0", "times begins at 1"),
        ("kill@3:times2:always", "either always or timesN"),
        ("enospc@3", "the moment of enospc is saveN"),
        ("nan@load", "the moment of nan is an iteration"),
        ("slow@3:rank1", "the factor is missing"),
        ("slow@3:rank1:0.5", "from 1 to 1e+06"),
        ("exit@3:0.5", "a whole number"),
        ("exit@3:0", "from 1 to 255"),
        ("flip@3:29", "needs one of weight, gradient, moment, master"),
        ("flip@3:weight", "the bit is missing"),
        ("flip@3:weight:64", "from 0 to 63"),
        ("spike@3+2:rank1:30", "remove :rank1"),
        ("kill@3,kill@3", "twice"),
        ("__import__('os').abort()@3", "KIND@MOMENT"),
    ],
)
def test_mistakes_are_explained(spec: str, reason: str) -> None:
    with pytest.raises(ConfigError, match="--inject-fault") as caught:
        parse_faults(spec)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


RUN = {**MOCK_RUN, "run_dir": "runs"}


@pytest.mark.parametrize(
    ("spec", "flags", "reason"),
    [
        ("kill@3:rank2", {}, "ranks 0 to 1"),
        ("kill@3", {"run_dir": None}, "needs --run-dir"),
        ("enospc@save1", {}, "needs --save"),
        ("enospc@save1", {"save": "saves", "async_save": True}, "remove --async-save"),
        ("stoploader@3", {}, "set --num-workers"),
        ("stopwriter@3", {"save": "saves"}, "add --async-save"),
    ],
)
def test_faults_that_do_not_fit_the_other_flags_are_refused(
    spec: str, flags: dict[str, str | bool | None], reason: str
) -> None:
    config = parse_command_line(words_of({**RUN, "inject_fault": spec, **flags}))
    with pytest.raises(ConfigError) as caught:
        check_run(config, 2)
    assert reason in str(caught.value)
    good = dataclasses.replace(config, operation=dataclasses.replace(config.operation, inject_fault=None))
    check_run(good, 2)


def test_the_environment_has_to_allow_faults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_allowed(None, None)
    check_allowed("kill@3", "1")
    words = words_of({**RUN, "inject_fault": "exception@1"})
    for value in (None, "0", "true"):
        if value is None:
            monkeypatch.delenv("MEGATRON_FAULTS", raising=False)
        else:
            monkeypatch.setenv("MEGATRON_FAULTS", value)
        assert pretrain_llama.main(words) == 2
        assert "MEGATRON_FAULTS=1" in capsys.readouterr().err
