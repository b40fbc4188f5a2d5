"""Waiting for a reward: what hangs says so, and Ctrl-C is not held up by it.

A thread looks once a second and only prints. Code that keeps Python's global lock (a runaway regular expression) keeps
that thread from running too. Not here: what a reward may return (guard.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any

PATIENCE_S = 10.0  # a call that takes longer is told; again when it has taken twice as long
LOOK_S = 1.0


def say(text: str) -> None:
    """To the user's terminal; around a reward's call that is what sys.stderr is."""
    print(text, file=sys.stderr, flush=True)


class Watch:
    """Tells of the call that has been running longest.

    Args:
        patience: seconds until it is told.
        look: seconds between two looks.
        tell: where the line goes.
    """

    def __init__(
        self, *, patience: float = PATIENCE_S, look: float = LOOK_S, tell: Callable[[str], None] = say
    ) -> None:
        self._patience, self._look, self._tell = patience, look, tell
        self._open: dict[object, tuple[float, str]] = {}  # calls that run: when they began, and their row
        self._lock = threading.Lock()
        self._is_looking = False

    @contextlib.contextmanager
    def over(self, place: str) -> Iterator[None]:
        """Around one call, of the row at `place`."""
        key = object()
        with self._lock:
            self._open[key] = (time.monotonic(), place)
            start, self._is_looking = not self._is_looking, True
        if start:
            threading.Thread(target=self._run, name="reward watch", daemon=True).start()
        try:
            yield
        finally:
            with self._lock:
                del self._open[key]

    def _run(self) -> None:
        """Until two looks in a row find nothing running."""
        due, watched, idle = self._patience, None, 0
        while idle < 2:
            time.sleep(self._look)
            with self._lock:
                key, (began, place) = next(iter(self._open.items()), (None, (0.0, "")))
                idle = 0 if key else idle + 1
                self._is_looking = idle < 2
            if key is not watched:
                due, watched = self._patience, key
            seconds = time.monotonic() - began
            if key and seconds >= due:
                due = 2 * seconds
                self._tell(f"the reward function has been running for {seconds:.0f} s on row {place}")


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Its result, from a thread of its own: in a notebook this thread's event loop is taken.

    A daemon, unlike a pool's thread: after Ctrl-C nobody waits for it.
    """
    done: Future[Any] = Future()

    def work() -> None:
        try:
            done.set_result(asyncio.run(coroutine))
        except BaseException as error:  # handed to the one who waits
            done.set_exception(error)

    threading.Thread(target=work, name="reward", daemon=True).start()
    return done.result()
