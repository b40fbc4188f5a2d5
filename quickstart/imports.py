"""Packages that others import on the side, and that no run needs: seconds before the start.

Hidden around the imports that ask for them and nowhere else: the user's own code, a reward, may well use one.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# vllm (unless it is the rollout engine): verl's checkpoint engines ask for it (10 s); timm, sklearn: transformers'
# image models and candidate generator (1.9 s and 3 s); wandb: through timm (1.6 s; verl's Tracking imports it again
# when the user logs there).
UNUSED_PACKAGES = ("vllm", "timm", "sklearn", "wandb")


def unused_packages(rollout_engine: str) -> tuple[str, ...]:
    """What a run with this rollout engine has no use for."""
    return tuple(name for name in UNUSED_PACKAGES if name != rollout_engine)


@contextmanager
def light(rollout_engine: str = "hf") -> Iterator[None]:
    """Imports inside the block bring what a run with this rollout engine needs, and little more."""
    with garbage_kept(), without_packages(*unused_packages(rollout_engine)):
        yield


@contextmanager
def garbage_kept() -> Iterator[None]:
    """No search for garbage inside: among what imports make, all of which stays, it is a tenth of their time (6.0
    instead of 6.8 s, medians of 5 on 2 CPU cores). In a run (:func:`set_aside`) later searches leave out what is there
    at the end of the block: each would take 0.4 s.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if _runs:
            gc.freeze()
        if enabled:
            gc.enable()


_runs: list[str] = []  # those inside set_aside


@contextmanager
def set_aside() -> Iterator[None]:
    """Inside, searches for garbage leave out what imports have brought; after it they look everywhere again.

    What is garbage before is freed first: a notebook's last model would else keep its memory through the run. Nothing
    is set aside for a user who has done so before, or who searches at times of their own: that stays as it is.
    """
    if not gc.isenabled() or gc.get_freeze_count() or _runs:
        yield
        return
    gc.collect()
    _runs.append("run")
    try:
        yield
    finally:
        _runs.clear()
        gc.unfreeze()


@contextmanager
def without_packages(*names: str) -> Iterator[None]:
    """Imports inside the block find no packages of these names; those that are imported already stay."""
    hidden = [name for name in names if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # the import system's own way to say "not here"
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
