"""The expansion of bash's words: quotes, variables, arrays, arithmetic, and the division into words.

A variable that is not set, and the output of a command, which is not run, stand in a value as marked source text.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from typing import NamedTuple

from megatron.config.bash.syntax import ASSIGNMENT, end_of_expansion, words_of

# Private characters around source text without a value, and for the blanks in it.
_BEGIN, _END, _BLANK = "\ue000", "\ue001", "\ue002"
# Private characters where bash begins another word, and where it had a quoted part.
_CUT, _QUOTED = "\ue003", "\ue004"
_ESCAPES = {"n": "\n", "t": "\t"}
_QUOTE, _EXPANSION = re.compile(r"'|\"|\$'"), re.compile(r"`|\$[({]|[<>]\(")
_UNSET = re.compile(rf"{_BEGIN}\$\w+{_END}")


def _unknown(source: str) -> str:
    return _BEGIN + re.sub(r"\s", _BLANK, source) + _END


def shown(text: str) -> str:
    """``text`` with the source text in place of what has no value."""
    return text.replace(_BEGIN, "").replace(_END, "").replace(_BLANK, " ")


def without_unset(text: str) -> str:
    """``text`` in which variables that are not set are empty, as in bash."""
    return _UNSET.sub("", text)


def is_unknown(text: str) -> bool:
    """Whether ``text`` contains the output of a command."""
    return _BEGIN in without_unset(text)


def sources(text: str) -> list[str]:
    """The source texts in ``text`` that have no value."""
    return [shown(found) for found in re.findall(f"{_BEGIN}[^{_END}]*{_END}", text)]


@dataclass
class Variables:
    """The variables of a script, and the arguments of the function that runs."""

    values: dict[str, str | dict[str, str]] = field(default_factory=dict)
    """Text, or the elements of an array by index or key."""
    arguments: tuple[str, ...] | None = None
    """None outside of functions: the script's own arguments are not known."""

    def copy(self) -> "Variables":
        values = {name: value if isinstance(value, str) else dict(value) for name, value in self.values.items()}
        return Variables(values, self.arguments)

    def get(self, name: str, key: str = "0") -> str | None:
        """The value of a variable or an element, if it is set."""
        if name.isdigit():
            found = (self.arguments or ())[int(name) - 1 : int(name)]
            return found[0] if found else None if self.arguments is None else ""
        value = self.values.get(name)
        return value if isinstance(value, str) or value is None else value.get(key)

    def elements(self, name: str) -> list[str] | None:
        """The values of an array, if it is set."""
        if name in "@*":
            return list(self.arguments or ())
        value = self.values.get(name)
        return None if value is None else [value] if isinstance(value, str) else list(value.values())

    def assign(self, source: str) -> None:
        """The assignment in ``source``: ``A=1``, ``A+=1``, ``A=(1 2)``, ``A[1]=2``."""
        found = ASSIGNMENT.match(source)
        assert found is not None, source
        name, subscript, adds = found[1], found[2], found[3] == "+"
        value = source[found.end() :]
        if value.startswith("(") and not subscript:
            present = self.values.get(name, {}) if adds else {}
            array = {"0": present} if isinstance(present, str) else dict(present)
            for word in words_of(value[1:-1]):
                keyed = re.match(r"\[([^\]]*)\]=", word)
                if keyed:
                    array[joined(keyed[1], self)] = joined(word[keyed.end() :], self)
                    continue
                for text in fields(word, self):
                    array[str(max((int(key) for key in array if key.isdigit()), default=-1) + 1)] = text
            self.values[name] = array
            return
        key = self.index(name, subscript[1:-1]) if subscript else "0"
        text = (self.get(name, key) or "" if adds else "") + joined(value, self)
        old = self.values.get(name)
        if subscript or isinstance(old, dict):
            self.values[name] = ({"0": old} if isinstance(old, str) else old or {}) | {key: text}
        else:
            self.values[name] = text

    def index(self, name: str, subscript: str) -> str:
        """The key of an element: a key as it is, a number as computed."""
        key, present = joined(subscript, self), self.values.get(name)
        keys = list(present) if isinstance(present, dict) else []
        if key in keys:
            return key
        number = arithmetic(key, self)
        if number is None or any(not one.isdigit() for one in keys):
            return key
        return keys[number] if number < 0 and -number <= len(keys) else str(number)


class _Piece(NamedTuple):
    """A part of a word."""

    values: list[str]
    """Several for an array, each of which becomes a word."""
    is_quoted: bool


def fields(source: str, variables: Variables) -> list[str]:
    """The words that bash makes of one word in the source."""
    text = ""
    for piece in _pieces(source, variables, is_quoted=False):
        # A quoted part keeps its blanks, and makes a word even if it is empty. Elements of an array are separate words.
        values = [_QUOTED + value if piece.is_quoted else re.sub(r"\s+", _CUT, value) for value in piece.values]
        text += _CUT.join(values)
    return [word.replace(_QUOTED, "") for word in text.split(_CUT) if word]


def joined(source: str, variables: Variables) -> str:
    """The value of one word in the source where bash divides nothing, as in an assignment."""
    return "".join(" ".join(piece.values) for piece in _pieces(source, variables, is_quoted=False))


def _pieces(source: str, variables: Variables, is_quoted: bool) -> Iterator[_Piece]:
    position = 0
    while position < len(source):
        character = source[position]
        if character == "\\":
            following = source[position + 1 : position + 2]
            is_special = not is_quoted or following in '$`"\\\n'
            yield _Piece([following.replace("\n", "") if is_special else character + following], True)
            position += 2
        elif _EXPANSION.match(source, position) or (not is_quoted and _QUOTE.match(source, position)):
            end = end_of_expansion(source, position)
            whole, inside = source[position:end], source[position + 1 : end - 1]
            if character == "'":
                yield _Piece([inside], True)
            elif character == '"':
                inner = list(_pieces(inside, variables, is_quoted=True))
                if not inner or any(piece.values for piece in inner):
                    yield _Piece([""], True)
                yield from inner
            elif whole.startswith("$'"):
                yield _Piece([re.sub(r"\\(.)", lambda match: _ESCAPES.get(match[1], match[1]), inside[1:])], True)
            elif whole.startswith("${"):
                yield from _parameter(inside[1:], variables, is_quoted)
            else:
                is_number = whole.startswith("$((") and whole.endswith("))")
                number = arithmetic(whole[3:-2], variables) if is_number else None
                # A command is not run.
                yield _Piece([_unknown(whole) if number is None else str(number)], is_quoted)
            position = end
        elif name := re.compile(r"\$(\d|\w+|[@*#?$!-])").match(source, position):
            yield from _parameter(name[1], variables, is_quoted)
            position = name.end()
        else:
            plain = re.compile(r"[^\\'\"$`<>]+|.", re.DOTALL).match(source, position)
            assert plain is not None
            yield _Piece([plain[0]], True)
            position = plain.end()


_PARAMETER = re.compile(r"(!?)(#?)(\w+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.DOTALL)


def _parameter(inner: str, variables: Variables, is_quoted: bool) -> Iterator[_Piece]:
    """The value of ``${inner}``."""
    found, source = _PARAMETER.fullmatch(inner), f"${{{inner}}}"
    if inner in ("#", "?"):
        yield _Piece([str(len(variables.arguments or ())) if inner == "#" else "0"], is_quoted)
        return
    if found is None or found[3] in "#?$!-":
        yield _Piece([_unknown(source)], is_quoted)
        return
    indirect, counts, name, subscript, rest = found.groups()
    is_list = name in "@*" or subscript in ("@", "*")
    if indirect and is_list:  # ${!A[@]}: the keys
        present = variables.values.get(name, {})
        values: list[str] | None = list(present) if isinstance(present, dict) else ["0"]
    elif is_list:
        values = variables.elements(name)
    else:
        if indirect:  # ${!A}: the variable whose name is the value of A
            name = variables.get(name) or "unknown"
        value = variables.get(name, "0" if subscript is None else variables.index(name, subscript))
        values = None if value is None else [value]
    if counts:  # ${#A}
        number = len(values or ()) if is_list else len((values or [""])[0])
        yield _Piece([str(number)], is_quoted)
        return
    choice = re.match(r"(:?)([-=+?])", rest)
    if choice:  # ${A:-default} and the like
        default, text = rest[choice.end() :], " ".join(values or ())
        is_set = values is not None and (without_unset(text) != "" or not (choice[1] or _UNSET.search(text)))
        if is_set == (choice[2] == "+") and choice[2] != "?":
            if choice[2] == "=" and name.isidentifier():
                variables.values[name] = joined(default, variables)
            yield from _pieces(default, variables, is_quoted)
            return
        if choice[2] == "+":
            return
    elif rest and values is not None:
        texts = [_modified(value, rest, variables) for value in values]
        values = [_unknown(source) if text is None else text for text in texts]
    if values is None:
        values = [_unknown(f"${name}")]
    if is_list and is_quoted and (subscript or name) == "*":
        values = [" ".join(values)]
    yield _Piece(values, is_quoted)


def _modified(value: str, operation: str, variables: Variables) -> str | None:
    """``value`` after ``#``, ``%``, ``/``, ``^``, ``,`` or a range; None for what is not computed."""
    if is_unknown(value):
        return None
    value = without_unset(value)
    if operation in ("^^", ",,"):
        return value.upper() if operation == "^^" else value.lower()
    if cut := re.match(r"##?|%%?", operation):
        pattern = _regular_expression(joined(operation[cut.end() :], variables))
        # The shortest match of # and %, the longest of ## and %%.
        ends = range(len(value) + 1)
        candidates = ends if cut[0] in ("#", "%%") else reversed(ends)
        for end in candidates:
            part, kept = (value[:end], value[end:]) if cut[0][0] == "#" else (value[end:], value[:end])
            if re.fullmatch(pattern, part, re.DOTALL):
                return kept
        return value
    if replacing := re.fullmatch(r"(//?)((?:\\.|[^/])+)(?:/(.*))?", operation, re.DOTALL):
        pattern = _regular_expression(joined(replacing[2], variables))
        new = joined(replacing[3] or "", variables)
        return re.sub(pattern, lambda _: new, value, count=0 if replacing[1] == "//" else 1)
    if part_of := re.fullmatch(r":([^:]+)(?::(.+))?", operation):
        start = arithmetic(part_of[1], variables)
        length = len(value) if part_of[2] is None else arithmetic(part_of[2], variables)
        if start is not None and length is not None:
            return value[start:][:length]
    return None


def _regular_expression(pattern: str) -> str:
    return translate(pattern).removesuffix(r"\Z").removesuffix(r"\z")


def matches(value: str, pattern: str) -> bool:
    """Whether ``value`` has the form of a pattern with ``*``, ``?`` and ``[ ]``."""
    return re.fullmatch(_regular_expression(pattern), value) is not None


_BINARY: Mapping[type[ast.operator | ast.cmpop], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    ast.Mod: lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def arithmetic(source: str, variables: Variables) -> int | None:
    """The value of an arithmetic expression; None for one that is not computed. A name without a value is 0."""
    text = without_unset(joined(source, variables))

    def number(match: re.Match[str]) -> str:
        value = without_unset(variables.get(match[0]) or "0").strip()
        return value if re.fullmatch(r"-?\d+", value) else "unknown()"

    text = re.sub(r"\b[A-Za-z_]\w*", number, text)
    # Python's parser reads the rest.
    text = re.sub(r"!(?!=)", " not ", text.replace("&&", " and ").replace("||", " or ")).strip()
    try:
        return _computed(ast.parse(text or "0", mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError):
        return None


def _computed(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_computed(operand)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not _computed(operand))
        case ast.BinOp(left=left, op=kind, right=right):
            return _BINARY[type(kind)](_computed(left), _computed(right))
        case ast.Compare(left=left, ops=[kind], comparators=[right]):
            return int(_BINARY[type(kind)](_computed(left), _computed(right)))
        case ast.BoolOp(op=kind, values=values):
            combined = all if isinstance(kind, ast.And) else any
            return int(combined(_computed(value) for value in values))
    raise ValueError(ast.dump(node))
