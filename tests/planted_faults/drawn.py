"""Faults drawn by a seed: mutations of expressions in functions.

A drawn fault belongs to the text that it was drawn from: the same seed draws others after a change of the sources.
"""

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.planted_faults.fault import Fault, read, sources

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
_OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
}


class Mutation(NamedTuple):
    """An edit of the characters ``[start, stop)`` of a file, in a statement that begins on ``line`` (from 1)."""

    path: Path
    start: int
    stop: int
    new: str
    line: int
    what: str

    def fault(self, root: Path) -> Fault:
        """The same as a fault, with enough text before and behind it to be found."""
        text = read(self.path)
        first, last = self.start, self.stop
        while text.count(text[first:last]) > 1:
            first, last = max(0, first - 20), min(len(text), last + 20)
        new = text[first : self.start] + self.new + text[self.stop : last]
        name = str(self.path.relative_to(root))
        return Fault(f"{name}:{self.line}: {self.what}", text[first:last], new, file=name)


def mutations(path: Path) -> list[Mutation]:
    """All that are possible in the functions of a file."""
    text = read(path)
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def offset(line: int, column: int) -> int:
        """Of a position in bytes of UTF-8."""
        whole = text[starts[line - 1] : starts[line]].encode()
        return starts[line - 1] + len(whole[:column].decode())

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)

    def between(left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[tuple[int, int, str, str]]:
        start, stop = span(left)[1], span(right)[0]
        place = text.find(old, start, stop)
        if place >= 0 and text[start:stop].count(old) == 1:
            yield place, place + len(old), new, f"{old} becomes {new}"

    def edits(node: ast.AST) -> Iterator[tuple[int, int, str, str]]:
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield from between(left, right, *_COMPARISONS[type(operator)])
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
                yield from between(left, right, *_OPERATORS[type(operator)])
            case ast.BoolOp(op=operator, values=[left, right]):
                is_and = isinstance(operator, ast.And)
                yield from between(left, right, *(("and", "or") if is_and else ("or", "and")))
            case ast.UnaryOp(op=ast.Not()):
                # Without what follows: a parenthesis before the operand belongs to it.
                yield span(node)[0], span(node)[0] + len("not"), "", "not is left out"
            case ast.Constant(value=bool() as value):
                yield *span(node), str(not value), f"{value} becomes {not value}"
            case ast.Constant(value=int() as value) if text[slice(*span(node))] == str(value):
                yield *span(node), str(value + 1), f"{value} becomes {value + 1}"
            case ast.Expr(value=ast.Call()):
                yield *span(node), "pass", "a call is left out"

    found: list[Mutation] = []

    def visit(node: ast.AST, line: int | None) -> None:
        if isinstance(node, ast.stmt):
            is_first = not text[starts[node.lineno - 1] : span(node)[0]].strip()
            is_elif = text[span(node)[0] :].startswith("elif")
            line = node.lineno if line is not None and is_first and not is_elif else line
        if line is not None and line > 0:
            found.extend(Mutation(path, start, stop, new, line, what) for start, stop, new, what in edits(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in node.body:
                visit(statement, 0)
        elif not isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr):
            for name, value in ast.iter_fields(node):
                if name not in ("annotation", "returns", "decorator_list"):
                    for child in value if isinstance(value, list) else [value]:
                        if isinstance(child, ast.AST):
                            visit(child, line)

    visit(ast.parse(text), None)
    return found


def draw(root: Path, count: int, seed: int) -> list[Mutation]:
    """``count`` mutations, of as many files, each as likely as its number of mutations."""
    chance = random.Random(seed)
    drawn = [one for path in sources(root) for one in mutations(path)]
    chance.shuffle(drawn)
    by_file: dict[Path, Mutation] = {}
    for one in drawn:
        by_file.setdefault(one.path, one)
    return list(by_file.values())[:count]
