"""The user's own reward: `function:FILE.py:NAME`, with verl's signature.

    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs): -> float | dict with "score"

The file is run once, as a module of its own. Its folder is put at the end of sys.path for the life of the process, so
that it can import files beside it, and these cannot shadow installed packages. `async def` is understood.
Not here: what happens when it is called (guard.py).
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from quickstart.errors import Fault, UserError
from quickstart.rewards.guard import fix_for, user_traceback

SETTING = "rl.reward"
SIGNATURE = "(data_source, solution_str, ground_truth, extra_info=None, **kwargs)"
CALLED_WITH = ("data_source", "solution_str", "ground_truth", "extra_info")


def split(reward: str) -> tuple[Path, str]:
    """`function:FILE.py:NAME` as its file and name. The form was checked with the config."""
    file, _, name = reward.partition(":")[2].rpartition(":")
    return Path(file).expanduser(), name


def load(reward: str) -> tuple[Callable[..., Any], Path]:
    """The function and its file.

    Raises:
        UserError: no such file, it does not run, no such name, not a function, or not verl's signature.
    """
    file, name = split(reward)
    if not file.is_file():
        raise _refused(str(file), "no such file", "write function:FILE.py:NAME with the path of your file")
    file = file.resolve()
    module = _run(file)
    if name not in vars(module):
        raise _refused(f"{file} without {name}", "the file must define that name", _names_fix(module))
    function = vars(module)[name]
    if not callable(function) or inspect.isclass(function):
        found = f"{name} in {file}, {'a class' if inspect.isclass(function) else 'of type ' + type(function).__name__}"
        raise _refused(found, "the reward must be a function", f"def {name}{SIGNATURE}")
    _check_signature(function, name, file)
    return function, file


def _refused(found: str, rule: str, fix: str) -> UserError:
    return UserError(Fault(field=SETTING, found=found, rule=rule, fix=fix))


def _run(file: Path) -> ModuleType:
    """The file as a module. It stands in sys.modules, where dataclasses and pickle look for it."""
    name = f"quickstart_reward_{file.stem}_{sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        found = f"{error.filename}:{error.lineno}: {error.msg}: {(error.text or '').strip()}"
        raise _refused(found, "the file must be valid Python", "correct that line") from None
    except (Exception, SystemExit) as error:
        found = f"{type(error).__name__}: {error}, while loading {file}"
        fix = f"{fix_for(error)}\n{user_traceback(error, file)}"
        raise _refused(found, "the file must load without an error", fix) from error
    return module


def _names_fix(module: ModuleType) -> str:
    own = [n for n, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__]
    return f"use one of its functions: {', '.join(own)}" if own else f"add def compute_score{SIGNATURE}"


def _check_signature(function: Callable[..., Any], name: str, file: Path) -> None:
    try:
        signature = inspect.signature(function)
        signature.bind(**dict.fromkeys(CALLED_WITH))
    except (TypeError, ValueError) as error:
        found = f"{name}{signature}" if isinstance(error, TypeError) else f"{name}: {error}"
        rule = f"verl calls it with the keywords {', '.join(CALLED_WITH)}"
        raise _refused(f"{found} in {file}", rule, f"write def {name}{SIGNATURE}") from None
