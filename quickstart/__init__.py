"""quickstart: a short way into RL post-training of language models on verl's own trainer.

    from quickstart import DataArguments, ModelArguments, RLArguments, Trainer

The names are loaded when they are first used: importing this package costs nothing and starts nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quickstart.arguments import DataArguments, ModelArguments, RLArguments, TrainingArguments
    from quickstart.errors import UserError
    from quickstart.trainers.api import Trainer

__version__ = "0.1.0"
__all__ = ["DataArguments", "ModelArguments", "RLArguments", "Trainer", "TrainingArguments", "UserError"]

_HOMES = {
    "DataArguments": "quickstart.arguments",
    "ModelArguments": "quickstart.arguments",
    "RLArguments": "quickstart.arguments",
    "Trainer": "quickstart.trainers.api",
    "TrainingArguments": "quickstart.arguments",
    "UserError": "quickstart.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quickstart' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
