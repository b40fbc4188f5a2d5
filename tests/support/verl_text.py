"""verl's installed source as text and syntax tree, for tests that hold our code to it."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

NEAR = 10  # lines that a place may be off


def root() -> Path:
    """The folder that holds the package verl."""
    spec = util.find_spec("verl")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.parent


def lines_near(place: str) -> Iterator[str]:
    """Text around each line of "verl/x.py:10-20" or "verl/x.py:10,30"; one piece a line or range."""
    file, _, numbers = place.partition(":")
    text = (root() / file).read_text(encoding="utf-8").splitlines()
    for part in numbers.split(","):
        first, _, last = part.partition("-")
        start, end = int(first), int(last or first)
        assert end <= len(text), f"{place}: the file has {len(text)} lines"
        yield "\n".join(text[max(0, start - 1 - NEAR) : end + NEAR])


@functools.cache
def tree(module: ModuleType) -> ast.Module:
    """A module's syntax tree."""
    return ast.parse(inspect.getsource(module))


def attributes(node: ast.AST, owner: str) -> set[str]:
    """Every X of `owner.X` below a node; the owner may be dotted ("self.critic_wg")."""
    return {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == owner}


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    """Every call of `name(...)` below a node; the name may be dotted."""
    return [n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func) == name]


def binds(call: ast.Call, target: Any) -> None:
    """Raise TypeError unless `target` takes this call's arguments by number and name."""
    positional = [a for a in call.args if not isinstance(a, ast.Starred)]
    starred = len(positional) < len(call.args) or any(k.arg is None for k in call.keywords)
    names = {k.arg: None for k in call.keywords if k.arg is not None}
    signature = inspect.signature(target)
    bind = signature.bind_partial if starred else signature.bind
    bind(*[None] * len(positional), **names)
