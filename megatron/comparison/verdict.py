"""The verdict on two sides, from the parts and the search."""

from collections.abc import Sequence

from megatron.comparison.finding import Comparison, Difference, Verdict
from megatron.comparison.search import Found


def judge(parts: Sequence[Comparison], found: Found | None, why_not: str = "") -> Verdict:
    """The verdict; ``found`` is None if no experiment could be made, for the reason ``why_not``."""
    curves = next((one for one in parts if one.part == "curves"), None)
    differing = tuple(one for part in parts if part.part != "curves" for one in part.differences if one.changes_loss)
    if found is None:
        return _without_experiments(differing, curves, tuple(parts), why_not)
    whole = (*parts, *((found.kernels,) if found.kernels is not None else ()), found.operations)
    # Samples that differ after the recorded steps: with A's samples both sides agree.
    later = tuple(one for one in differing if one.part == "data" and one.what != "record")
    if causes := tuple(_with_values(one, differing) for one in found.causes or later):
        named = {one.what for one in (*causes, *found.operations.differences, *found.begun)}
        others = tuple(one for one in differing if one.what not in named)
        return Verdict("cause", _cause_sentence(causes, found), causes, others, whole)
    if curves is not None and curves.differences:
        one = curves.differences[0]
        sentence = (
            f"The curves differ by more than rounding: {one.what}, {one.remark}. These agree: "
            f"{found.operations.compared} What is left needs the weights or the optimizer state of that iteration: "
            "compare the checkpoints around it."
        )
        return Verdict("unclear", sentence, (), differing, whole)
    what = found.operations.compared
    if not found.operations.is_complete:
        return Verdict("unclear", f"Nothing differs as far as it was compared: {what}", (), differing, whole)
    if found.is_bitwise and not differing:
        return Verdict(
            "equal", f"Equal: the losses of two steps have the same bits. Compared were {what}", (), (), whole
        )
    return Verdict("rounding", f"Explained by rounding: no more differs in {what}", (), differing, whole)


def _without_experiments(
    differing: Sequence[Difference], curves: Comparison | None, whole: tuple[Comparison, ...], why_not: str
) -> Verdict:
    has_curves = curves is not None and curves.is_complete
    if not differing and has_curves and curves is not None and not curves.differences:
        sentence = "Explained by rounding: no flag, sample or weight that changes losses differs, and the curves agree"
        return Verdict("rounding", f"{sentence}. No operation was compared: {why_not}", (), (), whole)
    count = len(differing)
    what = f"{count} difference{'s' * (count != 1)} that may change the loss" if count else "no difference in the flags"
    sentence = f"Not decided: there {'are' if count > 1 else 'is'} {what}, and none could be tried: {why_not}"
    return Verdict("unclear", sentence, (), tuple(differing), tuple(whole))


def _with_values(cause: Difference, differing: Sequence[Difference]) -> Difference:
    """The difference with its values, of which the search knows the flag."""
    return next((one for one in differing if one.what == cause.what), cause)


def _cause_sentence(causes: Sequence[Difference], found: Found) -> str:
    first = next(iter(found.operations.differences), None)
    names = ", ".join(f"{one.what} ({one.a} in A, {one.b} in B)" for one in causes)
    if causes[0].part == "operations" and causes[0] in found.operations.differences:
        return f"The first operation that differs is {causes[0].what}: {causes[0].remark}."
    many = len(causes) > 1
    sentence = f"The cause{'s are' if many else ' is'} {names}: without {'them' if many else 'it'} both sides agree"
    return f"{sentence}. It shows first in {first.what}: {first.remark}." if first is not None else f"{sentence}."
