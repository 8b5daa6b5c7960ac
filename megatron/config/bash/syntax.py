"""The commands of a bash script, as a tree. Words keep their source text, because their meaning depends on variables.

Grammar: https://pubs.opengroup.org/onlinepubs/9699919799/utilities/V3_chap02.html, and of bash arrays, ``[[ ]]``,
``(( ))`` and ``<<<``. Redirections are dropped.

Of 533 public training scripts this parser reads all; tree-sitter-bash 0.25.1 refuses 7, and splits ``$DIR/$NAME.x``
into two words in 32.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=", re.ASCII)
_OPERATOR = re.compile(r"&&|\|\||;;&|;;|;&|\|&|[;&|()\n]")
_REDIRECTION = re.compile(r"\d*(?:<<<|<<-|<<|>>|>&|<&|<>|>\||[<>](?!\())|&>>|&>")
_BLANK = re.compile(r"[ \t\r]|\\\r?\n|(?<![^\s;&|()])#[^\n]*")
_END_OF_WORD = set(" \t\r\n;&|()<>")


@dataclass(frozen=True)
class Simple:
    """A command of words, or ``[[ ]]``, whose words are operands and operators, or ``(( ))`` with one word."""

    line: int
    words: tuple[str, ...]
    here_document: list[str] = field(default_factory=list)
    """Its text, once it has been read."""


@dataclass(frozen=True)
class Chain:
    """Commands joined by ``&&``, ``||`` and ``|``; the operator before each, which is empty or ``!`` for the first."""

    parts: tuple[tuple[str, "Node"], ...]


@dataclass(frozen=True)
class If:
    """``if`` with the condition and body of each branch; the condition of ``else`` is empty."""

    line: int
    branches: tuple[tuple["Body", "Body"], ...]


@dataclass(frozen=True)
class Loop:
    """``for`` over words, or ``while`` and ``until`` with a condition."""

    line: int
    kind: Literal["for", "while", "until"]
    name: str
    words: tuple[str, ...]
    condition: "Body"
    body: "Body"


@dataclass(frozen=True)
class Case:
    """``case`` with the patterns and body of each branch."""

    line: int
    word: str
    branches: tuple[tuple[tuple[str, ...], "Body"], ...]


@dataclass(frozen=True)
class Group:
    """``{ }``, or the subshell ``( )``."""

    body: "Body"
    is_subshell: bool


@dataclass(frozen=True)
class Function:
    name: str
    body: "Body"


Node = Simple | Chain | If | Loop | Case | Group | Function
Body = tuple[Node, ...]


def end_of_expansion(text: str, start: int) -> int:
    """The position after the expansion, quoted text or array that begins at ``start``."""
    closing = {"'": "'", '"': '"', "`": "`"}.get(text[start])
    position = start + 1
    if text.startswith("$'", start):
        closing, position = "'", start + 2
    elif text.startswith("${", start):
        closing, position = "}", start + 2
    elif closing is None:
        closing, position = ")", text.index("(", start) + 1  # $( $(( <( >( and the parenthesis of an array
    is_plain = text[start] == "'"
    while position < len(text):
        character = text[position]
        if character == closing:
            return position + 1
        if character == "\\" and not is_plain:
            position += 2
        elif is_plain or text[start] == "`" or text.startswith("$'", start):
            position += 1
        elif closing == ")" and character == "#" and text[position - 1] in " \t\n(":
            position = (text + "\n").index("\n", position)
        elif (
            re.match(r"\$[({]|`", text[position : position + 2])
            or (closing != '"' and text[position] in "'\"")
            or (closing == ")" and character == "(")
        ):
            position = end_of_expansion(text, position)  # nested
        else:
            position += 1
    raise ValueError(f"line {text.count(chr(10), 0, start) + 1}: {text[start : start + 2].strip()!r} is not closed")


class _Tokens:
    """The operators and words of a script, one after the other."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        # Where the next token begins, and the token, if it has been read.
        self._peeked: tuple[int, str] | None = None
        # The here-documents whose text begins after the present line: delimiter, whether tabs are stripped, text.
        self._here: list[tuple[str, bool, list[str]]] = []
        # The text of the last one, once its line has ended.
        self.here_document: list[str] = []

    @property
    def line(self) -> int:
        return self._text.count("\n", 0, self._peeked[0] if self._peeked else self._position) + 1

    def peek(self) -> str:
        """The next operator or word, empty at the end."""
        if self._peeked is None:
            start = self._position
            self._peeked = start, self._read()
        return self._peeked[1]

    def next(self) -> str:
        """The next operator or word, empty at the end. Redirections are skipped."""
        token = self.peek()
        self._peeked = None
        return token

    def _read(self) -> str:
        self._skip_blanks()
        # Redirections are dropped; the text of a here-document is kept, because it may be a script.
        while redirection := _REDIRECTION.match(self._text, self._position):
            self._position = redirection.end()
            self._skip_blanks()
            target = self._word()
            if redirection[0].endswith(("<<", "<<-")) and not redirection[0].endswith("<<<"):
                self.here_document = []
                delimiter = re.sub(r"['\"\\]", "", target)
                self._here.append((delimiter, redirection[0].endswith("-"), self.here_document))
            self._skip_blanks()
        if operator := _OPERATOR.match(self._text, self._position):
            self._position = operator.end()
            if operator[0] == "\n":
                self._read_here_documents()
            return operator[0]
        return self._word()

    def operand(self, previous: str = "") -> str:
        """The next operand or operator of ``[[ ]]``, after the ``previous`` one."""
        if previous == "=~":  # a regular expression may contain parentheses
            self._skip_blanks()
            return self._word(ends=" \t\n")
        while self._text[self._position : self._position + 1] == "\n" or _BLANK.match(self._text, self._position):
            self._position += 1
        if operator := re.compile(r"&&|\|\||[()<>]").match(self._text, self._position):
            self._position = operator.end()
            return operator[0]
        return self._word()

    def arithmetic(self) -> str:
        """The text up to ``))``."""
        end = self._text.find("))", self._position)
        if end < 0:
            raise ValueError(f"line {self.line}: '((' is not closed")
        found = self._text[self._position : end]
        self._position = end + 2
        return found

    def starts(self, text: str) -> bool:
        """Whether ``text`` follows, and is skipped."""
        # A token that has been read already is read again from its beginning.
        start = self._peeked[0] if self._peeked else self._position
        while blank := _BLANK.match(self._text, start):
            start = blank.end()
        if not self._text.startswith(text, start):
            return False
        self._position, self._peeked = start + len(text), None
        return True

    def _skip_blanks(self) -> None:
        while blank := _BLANK.match(self._text, self._position):
            self._position = blank.end()

    def _word(self, ends: str | None = None) -> str:
        text, start = self._text, self._position
        position = start
        stops = set(ends) if ends else _END_OF_WORD
        while position < len(text):
            # A=(1 2) is one word, unlike f (
            is_array = text[position] == "(" and ASSIGNMENT.fullmatch(text, start, position)
            if is_array or re.match(r"['\"`]|\$[({']|[<>]\(", text[position : position + 2]):
                position = end_of_expansion(text, position)
            elif text[position] == "\\":
                position += 2
            elif text[position] in stops:
                break
            else:
                position += 1
        self._position = min(position, len(text))
        return text[start : self._position]

    def _read_here_documents(self) -> None:
        for delimiter, strips_tabs, found in self._here:
            while self._position < len(self._text):
                line, _, _ = self._text[self._position :].partition("\n")
                self._position += len(line) + 1
                line = line.lstrip("\t") if strips_tabs else line
                if line.rstrip("\r") == delimiter:
                    break
                found.append(line)
        self._here = []


def words_of(text: str) -> list[str]:
    """The words of ``text``, such as the elements of an array, without commands."""
    tokens = _Tokens(text)
    found = []
    while token := tokens.next():
        if token != "\n":
            found.append(token)
    return found


def parse(text: str) -> Body:
    """The commands of a script. Raises :class:`ValueError` for text that is no script, with the line."""
    tokens = _Tokens(text)
    body = _body(tokens, ())
    if rest := tokens.next():
        raise ValueError(f"line {tokens.line}: {rest!r} is not expected")
    return body


def _body(tokens: _Tokens, ends: Sequence[str]) -> Body:
    """The commands up to one of the words or operators ``ends``, which remains."""
    commands = []
    while (token := tokens.peek()) and token not in ends:
        if token in (";", "&", "\n"):
            tokens.next()
        else:
            commands.append(_chain(tokens))
    return tuple(commands)


def _chain(tokens: _Tokens) -> Node:
    parts = [("", _command(tokens))]
    while (operator := tokens.peek()) in ("&&", "||", "|", "|&"):
        tokens.next()
        _skip_lines(tokens)
        parts.append((operator, _command(tokens)))
    return parts[0][1] if len(parts) == 1 else Chain(tuple(parts))


def _skip_lines(tokens: _Tokens) -> None:
    while tokens.peek() == "\n":
        tokens.next()


def _expect(tokens: _Tokens, *wanted: str) -> str:
    token = tokens.next()
    if token not in wanted:
        raise ValueError(f"line {tokens.line}: {' or '.join(wanted)!r} is missing before {token!r}")
    return token


def _command(tokens: _Tokens) -> Node:
    line, tokens.here_document = tokens.line, []
    if tokens.starts("(("):
        return Simple(line, ("((", tokens.arithmetic()))
    token = tokens.next()
    if token == "!":
        return Chain((("!", _command(tokens)),))
    if token == "if":
        return _if(tokens, line)
    if token in ("for", "select", "while", "until"):
        return _loop(tokens, line, token)
    if token == "case":
        return _case(tokens, line)
    if token in ("{", "("):
        body = _body(tokens, ("}" if token == "{" else ")",))
        tokens.next()
        return Group(body, token == "(")
    if token == "[[":
        return _test(tokens, line)
    if token == "function" or tokens.peek() == "(":
        name = tokens.next() if token == "function" else token
        while tokens.peek() in ("(", ")", "\n"):
            tokens.next()
        inner = _command(tokens)
        return Function(name, inner.body if isinstance(inner, Group) else (inner,))
    return _simple(tokens, line, token)


def _simple(tokens: _Tokens, line: int, first: str) -> Simple:
    words = [first]
    while (token := tokens.peek()) and not _OPERATOR.fullmatch(token):
        words.append(tokens.next())
    if _OPERATOR.fullmatch(first):
        raise ValueError(f"line {tokens.line}: {first!r} is not expected")
    return Simple(line, tuple(words), tokens.here_document)


def _if(tokens: _Tokens, line: int) -> If:
    # if A; then B; elif C; then D; else E; fi  is  ((A, B), (C, D), ((), E))
    branches, keyword = [], "if"
    while keyword != "fi":
        condition: Body = ()
        if keyword != "else":
            condition = _body(tokens, ("then",))
            _expect(tokens, "then")
        body = _body(tokens, ("elif", "else", "fi"))
        branches.append((condition, body))
        keyword = _expect(tokens, "elif", "else", "fi")
    return If(line, tuple(branches))


def _loop(tokens: _Tokens, line: int, kind: str) -> Loop:
    name, words, condition = "", list[str](), tuple[Node, ...]()
    if kind in ("while", "until"):
        condition = _body(tokens, ("do",))
    elif tokens.starts("(("):
        words.append(f"$(({tokens.arithmetic()}))")  # its number of turns is not computed
    else:
        name = tokens.next()
        while (token := tokens.peek()) not in (";", "\n", "do", ""):
            words.append(token)
            tokens.next()
        words = words[1:] if words[:1] == ["in"] else ['"$@"']
    while tokens.peek() in (";", "\n"):
        tokens.next()
    _expect(tokens, "do")
    body = _body(tokens, ("done",))
    _expect(tokens, "done")
    return Loop(
        line, "until" if kind == "until" else "while" if condition else "for", name, tuple(words), condition, body
    )


def _case(tokens: _Tokens, line: int) -> Case:
    word = tokens.next()
    _skip_lines(tokens)
    _expect(tokens, "in")
    branches = []
    _skip_lines(tokens)
    while (token := tokens.next()) != "esac":
        if not token:
            raise ValueError(f"line {tokens.line}: 'esac' is missing")
        patterns = []
        while token != ")":
            if token not in ("(", "|"):
                patterns.append(token)
            if not (token := tokens.next()):
                raise ValueError(f"line {tokens.line}: ')' is missing")
        body = _body(tokens, (";;", ";&", ";;&", "esac"))
        branches.append((tuple(patterns), body))
        if tokens.peek() != "esac":
            tokens.next()
        _skip_lines(tokens)
    return Case(line, word, tuple(branches))


def _test(tokens: _Tokens, line: int) -> Simple:
    words = ["[["]
    while (token := tokens.operand(words[-1])) != "]]" or words[-1] == "=~":
        if not token and words[-1] != "=~":
            raise ValueError(f"line {line}: '[[' is not closed")
        words.append(token)
    return Simple(line, tuple(words))


def source_of(body: Body) -> str:
    """A condition in one line, for a message."""
    return "; ".join(_source(node) for node in body)


def _source(node: Node) -> str:
    if isinstance(node, Chain):
        return " ".join(f"{operator} {_source(part)}".strip() for operator, part in node.parts)
    if isinstance(node, Simple):
        closing = {"[[": " ]]", "((": "))"}.get(node.words[0], "")
        return " ".join(node.words) + closing
    return f"{type(node).__name__.lower()} ..."
