"""How the code is laid out: which room may import which, where heavy imports and verl's keys may stand, how long it is.

Reads the sources; imports nothing of them. Not here: what `--help` imports at run time (test_run).
"""

from __future__ import annotations

import ast
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "quickstart"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A room may import the rooms that stand before it in its row; nothing points back. A new room gets a place here.
TRAINING = (
    "errors",
    "imports",
    "words",
    "arguments",
    "verl_owned",
    "config",
    "writing",
    "outputs",
    "data",
    "rewards",
    "doctor",
    "verl_compose",
    "verl_config",
    "plugin",
    "record",
    "helptext",
    "trainers",
    "crash",
    "run",
    "__init__",
    "__main__",
)
# These share nothing with a trainer but files: they also work on a run that died, or was copied from elsewhere.
READING = ("compare", "verify", "report", "chat")
READING_MAY = ("errors", "words", "arguments", "verl_owned", "config", "writing", "outputs")

HEAVY = {"torch", "verl", "ray", "transformers", "datasets", "peft", "tensordict", "transfer_queue"}
# The only files that may import them when they are loaded; all others do it inside a function, when it is needed.
HEAVY_MODULES = (
    "plugin/",
    "trainers/ppo.py",
    "trainers/preference",
    "trainers/losses.py",
    "trainers/export.py",
)
# Where verl's keys are spelled, and where a user's misplaced verl key is recognised in order to say so.
VERL_KEYS = ("verl_owned.py", "verl_compose.py", "verl_config.py", "plugin/", "config/names.py")

LONGEST, LONGEST_MEDIAN = 400, 200


def name_of(module: Path) -> str:
    return module.relative_to(PACKAGE).as_posix()


def room_of(module: Path) -> str:
    return module.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of all imports in a tree; of `from a import b` both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written out"
            yield from (str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names))


def at_load(tree: ast.Module) -> Iterator[str]:
    """Imports that run when the module is loaded: not those in functions, nor those for the type checker."""
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield from imported(node)


def rooms_imported(module: Path) -> set[str]:
    """Rooms of this package that a module imports anywhere, its own left out."""
    parts = (name.split(".") for name in imported(ast.parse(module.read_text(encoding="utf-8"))))
    rooms = {part[1] for part in parts if part[0] == "quickstart" and len(part) > 1}
    return {room for room in rooms if (PACKAGE / room).exists() or (PACKAGE / f"{room}.py").exists()} - {
        room_of(module)
    }


def allowed(room: str) -> set[str]:
    """Rooms that a room may import."""
    if room in READING:
        return set(READING_MAY)
    return set(TRAINING[: TRAINING.index(room)])


def test_every_room_has_a_place():
    assert {room_of(module) for module in MODULES} <= {*TRAINING, *READING}


def test_imports_point_one_way():
    wrong = {name_of(module): rooms_imported(module) - allowed(room_of(module)) for module in MODULES}
    assert {name: sorted(rooms) for name, rooms in wrong.items() if rooms} == {}


def test_heavy_libraries_are_imported_where_they_are_needed():
    light = [module for module in MODULES if not name_of(module).startswith(HEAVY_MODULES)]
    found = {
        name_of(module): heavy
        for module in light
        if (heavy := HEAVY & {name.split(".")[0] for name in at_load(ast.parse(module.read_text(encoding="utf-8")))})
    }
    assert found == {}


def test_verl_keys_are_spelled_in_two_places():
    found = [name_of(module) for module in MODULES if "actor_rollout_ref" in module.read_text(encoding="utf-8")]
    assert [name for name in found if not name.startswith(VERL_KEYS)] == []


def test_every_module_says_what_it_is():
    docs = {name_of(module): ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) for module in MODULES}
    assert [name for name, doc in docs.items() if doc is None or len(doc.split()) < 4] == []


def test_modules_are_short():
    lengths = {name_of(module): len(module.read_text(encoding="utf-8").splitlines()) for module in MODULES}
    assert {name: lines for name, lines in lengths.items() if lines >= LONGEST} == {}
    assert statistics.median(lengths.values()) < LONGEST_MEDIAN


def test_the_top_level_is_fixed():
    """Design: these, and dot files."""
    root = PACKAGE.parent
    if not (root / ".git").exists():
        pytest.skip("no git checkout: whatever lies here may be the user's")
    listed = subprocess.run(["git", "-C", str(root), "ls-files"], capture_output=True, text=True, check=True).stdout
    there = {line.split("/")[0] for line in listed.splitlines() if not line.startswith(".")}
    files = {"README.md", "README_zh.md", "LICENSE", "pyproject.toml"}
    assert there <= files | {"quickstart", "scripts", "data", "configs", "outputs", "tests"}
