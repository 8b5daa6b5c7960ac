"""What a bash script starts, found by evaluating its variables, arrays and conditions. No command is run."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import eq, ge, gt, le, lt, ne

from megatron.config.bash.expansion import (
    Variables,
    arithmetic,
    fields,
    is_unknown,
    joined,
    matches,
    shown,
    sources,
    without_unset,
)
from megatron.config.bash.syntax import (
    ASSIGNMENT,
    Body,
    Case,
    Chain,
    Function,
    Group,
    If,
    Loop,
    Node,
    Simple,
    parse,
    source_of,
)

# Commands whose words may name a program, but do not start it.
_NAMING = "cat chmod cp echo git grep ln ls mkdir mv printf rm rsync sed tee touch"
_NO_START = frozenset(_NAMING.split())
_DECLARATIONS = frozenset(["declare", "export", "local", "readonly", "typeset"])
_MOST_TURNS = 1000


@dataclass(frozen=True)
class Started:
    """A command that the script starts."""

    line: int
    words: tuple[str, ...]
    """Words without a value contain marked source text (``megatron/config/bash/expansion.py``)."""


@dataclass
class Reading:
    """What a script starts, and what could not be decided."""

    variables: Variables
    functions: dict[str, Body] = field(default_factory=dict)
    started: list[Started] = field(default_factory=list)
    remarks: dict[str, None] = field(default_factory=dict)
    """Sentences, each once, in order."""

    def copy(self) -> "Reading":
        return Reading(self.variables.copy(), dict(self.functions), list(self.started), dict(self.remarks))

    def has_same_effect(self, other: "Reading") -> bool:
        """Whether the commands and the variables are the same."""
        return (self.variables.values, self.started) == (other.variables.values, other.started)


class _Left(Exception):
    """``exit``, ``return``, ``break`` or ``continue``, its argument."""


def evaluate(text: str, environment: Mapping[str, str]) -> Reading:
    """Read a script that is started without arguments in ``environment``.

    Raises :class:`ValueError` for text that is no script, with the line.
    """
    return _Evaluation(Reading(Variables(dict(environment)))).attempt(parse(text))


def started_by(words: Sequence[str], environment: Mapping[str, str]) -> list[Started]:
    """The Python files that a command with these words starts, also in the text of its ``bash -c``."""
    evaluation = _Evaluation(Reading(Variables(dict(environment))))
    evaluation.start(Simple(0, ()), words)
    return evaluation.reading.started


class _Evaluation:
    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        # The variables without a value that a condition has used.
        self.unset: list[str] = []

    def attempt(self, body: Body) -> Reading:
        """The reading after ``body``, which may leave the script. The present reading stays as it is."""
        before = self.reading
        self.reading = before.copy()
        with suppress(_Left):
            self.run(body)
        after, self.reading = self.reading, before
        return after

    def run(self, body: Body) -> bool | None:
        """Evaluate commands in order; whether the last one succeeds, None if that is not known."""
        status: bool | None = True
        for node in body:
            status = self._node(node)
        return status

    def _node(self, node: Node) -> bool | None:
        match node:
            case Simple():
                return self._simple(node)
            case Chain():
                return self._chain(node)
            case If():
                self._if(node)
            case Loop():
                self._loop(node)
            case Case():
                self._case(node)
            case Group():
                outside = self.reading.variables
                if node.is_subshell:  # its variables are a copy
                    self.reading.variables = outside.copy()
                status = self.run(node.body)
                self.reading.variables = outside
                return status
            case Function():
                self.reading.functions[node.name] = node.body
        return None

    def _chain(self, node: Chain) -> bool | None:
        status: bool | None = True
        for operator, part in node.parts:
            # A command whose result is not known is taken to succeed.
            if (operator == "&&" and status is False) or (operator == "||" and status is not False):
                continue
            status = self._node(part)
            if operator == "!":
                status = None if status is None else not status
            elif operator in ("|", "|&"):
                status = None
        return status

    def _if(self, node: If) -> None:
        (condition, body), *others = node.branches
        if not condition:
            self.run(body)
            return
        self.unset = []
        status, unset = self.run(condition), list(dict.fromkeys(self.unset))
        rest: Body = (If(node.line, tuple(others)),) if others else ()
        if status is not None and not unset:
            self.run(body if status else rest)
            return
        # Both branches are read; remarks name the choice only if they differ.
        inside, outside = self.attempt(body), self.attempt(rest)
        if status is None:
            # Between a branch that starts a program and one that does not, the first one is meant to be read.
            status = len(inside.started) > len(self.reading.started) == len(outside.started)
            remark = f"line {node.line}: whether {source_of(condition)} holds is not known without running the script"
        else:
            remark = f"line {node.line}: {source_of(condition)} is read with {' and '.join(unset)} empty"
        differs = not inside.has_same_effect(outside)
        self.reading = inside if status else outside
        if differs:
            self._remark(f"{remark}: the commands after it are {'kept' if status else 'left out'}.")

    def _remark(self, sentence: str) -> None:
        self.reading.remarks[sentence] = None

    def _loop(self, node: Loop) -> None:
        if node.kind == "for":
            items = [item for word in node.words for item in fields(word, self.reading.variables)]
            for item in items[:_MOST_TURNS]:
                if node.name:
                    self.reading.variables.values[node.name] = item
                if self._turn(node.body) == "break":
                    return
            return
        for _ in range(_MOST_TURNS):
            status = self.run(node.condition)
            if status is (node.kind == "until"):
                return
            # A turn that changes no variable would be repeated for ever.
            before = self.reading.variables.copy()
            if self._turn(node.body) == "break" or self.reading.variables.values == before.values:
                return
            if status is None:
                self._remark(
                    f"line {node.line}: whether {source_of(node.condition)} holds is not known without running the "
                    "script: the commands of the loop are read once."
                )
                return

    def _turn(self, body: Body) -> str:
        try:
            self.run(body)
        except _Left as left:
            if left.args[0] not in ("break", "continue"):
                raise
            return str(left.args[0])
        return ""

    def _case(self, node: Case) -> None:
        value = self.known(joined(node.word, self.reading.variables))
        for patterns, body in node.branches:
            if value is not None and any(matches(value, joined(one, self.reading.variables)) for one in patterns):
                self.run(body)
                return
        if value is None and any(not self.attempt(body).has_same_effect(self.reading) for _, body in node.branches):
            self._remark(f"line {node.line}: the value of {node.word} is not known: no branch of case is read.")

    def known(self, text: str) -> str | None:
        """``text`` with empty variables where they are not set, as in bash; None if a command decides it."""
        self.unset += [source for source in sources(text) if source.startswith("$") and "(" not in source]
        return None if is_unknown(text) else without_unset(text)

    def _simple(self, node: Simple) -> bool | None:
        variables = self.reading.variables
        if node.words[0] == "[[":
            return _Test(node.words[1:], self, is_double=True).result()
        if node.words[0] == "((":
            return self._arithmetic_command(node.words[1])
        # Assignments before a command are for this command alone; without a command they stay.
        words = list(node.words)
        while words and ASSIGNMENT.match(words[0]):
            words.pop(0)
        if not words:
            for word in node.words:
                variables.assign(word)
            return True
        if words[0] in _DECLARATIONS:
            is_array = any(re.match(r"-\w*[aA]", word) for word in words)
            for word in words[1:]:
                if ASSIGNMENT.match(word):
                    variables.assign(word)
                elif is_array and word.isidentifier():
                    variables.values.setdefault(word, {})
            return True
        return self._command(node, [field for word in words for field in fields(word, variables)])

    def _arithmetic_command(self, source: str) -> bool | None:
        # i=1, i+=1, i++: computed as the value of $(( )) in an assignment
        changed = re.fullmatch(r"\s*(\w+)\s*(\+\+|--|[-+*/]?=(?!=))(.*)", source, re.DOTALL)
        if changed is None:
            value = arithmetic(source, self.reading.variables)
            return None if value is None else value != 0
        name, operator, operand = changed.groups()
        expression = {"=": operand, "++": f"{name}+1", "--": f"{name}-1"}.get(
            operator, f"{name}{operator[0]}({operand})"
        )
        self.reading.variables.assign(f"{name}=$(({expression}))")
        return True

    def _command(self, node: Simple, words: Sequence[str]) -> bool | None:
        if not words:
            return None
        variables = self.reading.variables
        match list(words):
            case ["[", *operands, "]"] | ["test", *operands]:
                return _Test(operands, self, is_double=False).result()
            case ["true" | ":", *_]:
                return True
            case ["false", *_]:
                return False
            case ["exit" | "return" | "break" | "continue" as how, *_]:
                raise _Left(how)
            case ["let", *expressions]:
                return [self._arithmetic_command(one) for one in expressions][-1]
            case ["unset", *names]:
                for name in names:
                    variables.values.pop(name, None)
            case ["shift", *_]:
                variables.arguments = (variables.arguments or ())[1:]
            case ["set", "--", *arguments]:
                variables.arguments = tuple(arguments)
            case ["read" | "mapfile" | "readarray", *names]:
                for name in names:
                    if name.isidentifier():
                        variables.assign(f"{name}=$({words[0]})")
            case ["eval", *parts]:
                return self.run(parse(shown(" ".join(parts))))
            case ["source" | ".", file, *_]:
                self._remark(f"line {node.line}: {shown(file)} is not read.")
            case [name, *arguments] if name in self.reading.functions:
                before, variables.arguments = variables.arguments, tuple(arguments)
                try:
                    self.run(self.reading.functions[name])
                except _Left as left:
                    if left.args[0] != "return":
                        raise
                self.reading.variables.arguments = before
            case [name, *_] if name not in _NO_START:
                self.start(node, words)
        return None

    def start(self, node: Simple, words: Sequence[str]) -> None:
        """Note a command that starts a Python file, also in the text of ``bash -c`` or of a here-document."""
        inner = [word for word in words if re.search(r"\.py\s", shown(word))]
        if words[0] in ("bash", "sh", "sbatch", "srun", "ssh") and node.here_document:
            inner.append("\n".join(node.here_document))
        if any(word.endswith(".py") for word in words):
            self.reading.started.append(Started(node.line, tuple(words)))
        elif inner:
            # The inner script has lines of its own; remarks name the line of the outer one.
            before = len(self.reading.started)
            self.run(parse(shown(inner[-1])))
            started = self.reading.started
            started[before:] = [Started(node.line, one.words) for one in started[before:]]


class _Test:
    """The condition of ``[ ]``, or of the double ``[[ ]]``, whose operands are not expanded yet."""

    def __init__(self, words: Sequence[str], evaluation: _Evaluation, is_double: bool) -> None:
        self._words, self._evaluation, self._is_double = list(words), evaluation, is_double
        self._variables = evaluation.reading.variables

    def _take(self, *words: str) -> bool:
        found = bool(self._words) and self._words[0] in words
        if found:
            self._words.pop(0)
        return found

    def result(self) -> bool | None:
        """Whether the condition holds; None if that is not known."""
        return self._either() if self._words else False

    def _either(self) -> bool | None:
        result = self._both()
        while self._take("||", "-o"):
            other = self._both()
            result = True if result or other else None if None in (result, other) else False
        return result

    def _both(self) -> bool | None:
        result = self._primary()
        while self._take("&&", "-a"):
            other = self._primary()
            result = False if False in (result, other) else None if None in (result, other) else True
        return result

    def _primary(self) -> bool | None:
        if not self._words:
            return None
        if self._take("!"):
            result = self._primary()
            return None if result is None else not result
        if self._take("("):
            result = self._either()
            self._take(")")
            return result
        first = self._words.pop(0)
        if self._words and self._words[0] in _COMPARISONS:
            comparison = self._words.pop(0)
            return self._compared(first, comparison, self._words.pop(0) if self._words else "")
        is_unary = re.fullmatch(r"-[a-zA-Z]", first) is not None and bool(self._words)
        value = self._value(self._words.pop(0) if is_unary else first)
        if value is None:
            return None
        if not is_unary:
            return value != ""
        if first in ("-n", "-z"):
            return (value == "") is (first == "-z")
        # The others are tests of files.
        return self._variables.elements(value) is not None if first == "-v" else None

    def _value(self, word: str) -> str | None:
        return self._evaluation.known(joined(word, self._variables) if self._is_double else word)

    def _compared(self, left: str, comparison: str, right: str) -> bool | None:
        one, other = self._value(left), self._value(right)
        if one is None or other is None:
            return None
        if comparison in _NUMBERS:
            number, limit = arithmetic(one, self._variables), arithmetic(other, self._variables)
            return None if number is None or limit is None else _NUMBERS[comparison](number, limit)
        if comparison == "=~":
            try:
                return re.search(other, one) is not None
            except re.error:
                return None
        if comparison in ("<", ">"):
            return one != other and (one < other) is (comparison == "<")
        is_pattern = self._is_double and right[:1] not in ("'", '"')
        return (matches(one, other) if is_pattern else one == other) is (comparison != "!=")


_Comparison = Callable[[int, int], bool]
_NUMBERS: Mapping[str, _Comparison] = {"-eq": eq, "-ne": ne, "-lt": lt, "-le": le, "-gt": gt, "-ge": ge}
_COMPARISONS = frozenset([*_NUMBERS, "=", "==", "!=", "=~", "<", ">"])
