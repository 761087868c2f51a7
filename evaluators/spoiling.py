"""Tests that must fail: a test's own source with one assertion turned round, so that honest code fails where it passed.

Code under test shares a process with its tests, and can make any report say anything. What it can't know is which copy of a
test is turned: the one who passes both was never asked. Edits are textual, so everything else of a file stays as it is.
"""

from __future__ import annotations

import ast
import random
from typing import Any, NamedTuple

_OPPOSITE = {
    "assertEqual": "assertNotEqual", "assertNotEqual": "assertEqual", "assertTrue": "assertFalse", "assertFalse": "assertTrue",
    "assertIn": "assertNotIn", "assertNotIn": "assertIn", "assertIs": "assertIsNot", "assertIsNot": "assertIs",
    "assertIsNone": "assertIsNotNone", "assertIsNotNone": "assertIsNone", "assertIsInstance": "assertNotIsInstance",
    "assertNotIsInstance": "assertIsInstance", "assertAlmostEqual": "assertNotAlmostEqual", "assertListEqual": "assertNotEqual",
    "assertDictEqual": "assertNotEqual", "assertTupleEqual": "assertNotEqual", "assertSetEqual": "assertNotEqual",
}  # fmt: skip
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Target(NamedTuple):
    """A test function: names of the classes around it, and its own."""

    classes: tuple[str, ...]
    name: str


# Stands for whatever classes, in a target known by its function's name only.
ANYWHERE = ("*",)


class _Edit(NamedTuple):
    start: int
    end: int
    text: bytes


def spoil(source: bytes, targets: set[Target], chance: random.Random, *, certain: bool) -> tuple[bytes, set[Target]]:
    """`source` in which the named functions fail, and which of them were found. With `certain`, they fail at their start,
    whatever the code under test does; without, as inconspicuously as they allow. Nothing is found in what is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return source, set()
    text = _Text(source)
    edits: list[_Edit] = []
    found: set[Target] = set()
    for target, function in _functions(tree, ()):
        wanted = target in targets or Target(ANYWHERE, target.name) in targets
        if wanted and not _expects_failure(text, tree, target, function):
            edits.append(_at_start(text, function, chance) if certain else _natural(text, function, chance))
            found.add(target)
    out = source
    for e in sorted(edits, reverse=True):
        out = out[: e.start] + e.text + out[e.end :]
    try:
        ast.parse(out)
    except (SyntaxError, ValueError):  # an unusual layout: better no control than one that fails by itself
        return (source, set()) if certain else spoil(source, targets, chance, certain=True)
    return out, found


def functions(source: bytes) -> set[Target]:
    """All test functions, by pytest's and unittest's default names."""
    try:
        return {t for t, _ in _functions(ast.parse(source), ()) if t.name.startswith("test")}
    except (SyntaxError, ValueError):
        return set()


def _functions(node: ast.AST, classes: tuple[str, ...]):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            yield Target(classes, child.name), child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, (*classes, child.name))
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _functions(child, classes)


def _expects_failure(text: _Text, tree: ast.Module, target: Target, function: _Function) -> bool:
    """Does the source say that this test, its class or its module may fail?"""
    places: list[ast.AST] = [function, *function.decorator_list]
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in target.classes:
            places += [*node.decorator_list, *(n for n in node.body if isinstance(n, ast.Assign))]
    places += [n for n in tree.body if isinstance(n, ast.Assign)]
    pieces = (text.source[text.begin(p) : text.end(p)] for p in places)  # type: ignore[arg-type]
    return any(word in piece for piece in pieces for word in (b"xfail", b"expectedFailure"))


class _Text:
    """Byte offsets of lines: what the parser's positions count from."""

    def __init__(self, source: bytes):
        self.source = source
        self.lines = [0]
        for line in source.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        # A byte order mark belongs to no line's columns.
        self._bom = 3 if source.startswith(b"\xef\xbb\xbf") else 0

    def at(self, line: int, column: int) -> int:
        return self.lines[line - 1] + column + (self._bom if line == 1 else 0)

    def begin(self, node: ast.stmt | ast.expr) -> int:
        return self.at(node.lineno, node.col_offset)

    def end(self, node: ast.stmt | ast.expr) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.at(node.end_lineno, node.end_col_offset)

    def indent(self, node: ast.stmt) -> bytes:
        line = self.source[self.lines[node.lineno - 1] : self.begin(node)]
        return line if not line.strip() else b""


def _false(chance: random.Random) -> bytes:
    a = chance.randrange(10, 1000)
    return b"assert %d == %d" % (a, a + chance.randrange(1, 1000))


def _at_start(text: _Text, function: _Function, chance: random.Random) -> _Edit:
    first = function.body[0]
    at = text.begin(first)
    if first.lineno == function.lineno or not text.indent(first) or _decorated(first):
        if isinstance(first, ast.ClassDef | _Function):
            at = text.at(min([first.lineno, *(d.lineno for d in first.decorator_list)]), first.col_offset)
            return _Edit(at, at, _false(chance) + b"\n" + b" " * first.col_offset)
        return _Edit(at, at, _false(chance) + b"; ")
    return _Edit(at, at, _false(chance) + b"\n" + text.indent(first))


def _decorated(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef | _Function) and bool(node.decorator_list)


def _natural(text: _Text, function: _Function, chance: random.Random) -> _Edit:
    """The last statement is turned round if it is an assertion, so all that comes before it still happens."""
    last = function.body[-1]
    leaves = any(isinstance(n, ast.Return | ast.Yield | ast.YieldFrom) for n in ast.walk(function))
    if leaves or last.lineno == function.lineno:
        return _at_start(text, function, chance)
    if (constant := _compared(last)) is not None:
        return _Edit(text.begin(constant), text.end(constant), _other(constant.value, chance))
    if isinstance(last, ast.Assert):
        start, end = _outer(text, last)
        return _Edit(start, end, b" not (" + text.source[start:end] + b")")
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and isinstance(last.value.func, ast.Attribute):
        name = last.value.func.attr
        if name in _OPPOSITE:
            end = text.end(last.value.func)
            return _Edit(end - len(name.encode()), end, _OPPOSITE[name].encode())
    if not text.indent(last):
        return _at_start(text, function, chance)
    end = text.end(last)
    line = text.source.find(b"\n", end)
    end = len(text.source) if line < 0 else line
    return _Edit(end, end, b"\n" + text.indent(last) + _false(chance))


def _compared(node: ast.stmt) -> ast.Constant | None:
    """The plain value that the last statement says something must equal. Another value there fails for honest code, and
    also shows objects that claim to equal anything."""
    operands: list[ast.expr] = []
    if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.Eq):
        if len(node.test.ops) == 1:
            operands = [node.test.left, *node.test.comparators]
    elif (
        isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call) and isinstance(call.func, ast.Attribute)
    ):
        operands = call.args[:2] if call.func.attr in ("assertEqual", "assertEquals") else []
    return next((o for o in operands if isinstance(o, ast.Constant) and type(o.value) in (str, int, bytes)), None)


def _other(value: Any, chance: random.Random) -> bytes:
    if isinstance(value, int):
        return str(value + chance.randrange(1, 100)).encode()
    at, letter = chance.randint(0, len(value)), chance.choice("abcdefghijklmnopqrstuvwxyz")
    changed = value[:at] + (letter if isinstance(value, str) else letter.encode()) + value[at:]
    return ascii(changed).encode()


def _outer(text: _Text, node: ast.Assert) -> tuple[int, int]:
    """The condition with the parentheses around it, which the parser doesn't count."""
    start = text.begin(node) + len(b"assert")
    end = text.source.rfind(b",", text.end(node.test), text.begin(node.msg)) if node.msg is not None else text.end(node)
    return start, end


_BROKEN = {
    "throw new Error('control');\n": ("js", "mjs", "cjs", "ts", "mts", "cts", "jsx", "tsx"),
    "#error control\n": ("c", "h", "cc", "cpp", "cxx", "hpp", "hh", "m"),
    'compile_error!("control");\n': ("rs",),
    "exit 1\n": ("sh", "bash", "bats"),
    "raise 'control'\n": ("rb",),
    "<?php throw new Exception('control'); ?>\n": ("php",),
    "raise SystemExit('control')\n": ("py",),
}


def break_file(path: str, source: bytes) -> bytes:
    """A test file of any language that can't pass a single test."""
    ending = path.rpartition(".")[2].lower()
    for text, endings in _BROKEN.items():
        if ending in endings:
            return text.encode() + source
    return b"control\n"
