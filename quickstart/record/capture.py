"""Send everything that libraries print to the log file, and keep the terminal for our own few lines.

    with Capture(outputs.log) as capture:
        print("to the log")                       # verl, Ray, warnings, logging, C code writing to fd 1 and 2
        capture.say("to the terminal, and to the log")
        with capture.terminal():
            breakpoint()                          # the user's code has the real stdin, stdout and stderr

What was there before is back at the end, also after an exception. Under pytest and in notebooks, where sys.stdout is
no file, only the Python streams are exchanged and file descriptors stay alone.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TextIO

STDOUT, STDERR = 1, 2


class Capture:
    """Context manager; one at a time in a process. say() and terminal() also work before and after it."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._file: TextIO | None = None  # the log, while capturing
        self._user = (sys.stdout, sys.stderr)  # what the user sees
        self._screen = sys.stdout  # the same as _user[0], or a stream on the real descriptor
        self._kept: dict[int, int] = {}  # descriptor -> copy of what it was
        self._guests = 0  # how deep inside terminal() calls we are, over all threads
        self._lock = threading.RLock()
        self.before_guest: Callable[[], None] = lambda: None  # called before user code gets the terminal
        self._silent = False  # the terminal is gone (closed pipe): the run goes on without it

    def __enter__(self) -> Capture:
        assert self._file is None, "already capturing"
        self._user = (sys.stdout, sys.stderr)
        flush(*self._user)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.log, "a", encoding="utf-8", errors="backslashreplace", buffering=1)
        if has_descriptor(sys.stdout) and has_descriptor(sys.stderr):
            self._kept = {number: os.dup(number) for number in (STDOUT, STDERR)}
        self._screen = self._open_screen()
        self._to_log()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        self._to_terminal()
        for copy in self._kept.values():
            os.close(copy)
        if self._screen is not self._user[0]:
            with contextlib.suppress(BrokenPipeError):  # what a closed pipe never took is in its buffer
                self._screen.close()
        self._kept, self._screen = {}, self._user[0]
        # The log stays open: a thread or handler of a library may hold it. It closes with its last holder.
        self._file.flush()
        self._file = None

    def _open_screen(self) -> TextIO:
        """A stream to the terminal that does not pass through descriptor 1; it never fails on a character."""
        if not self._kept:
            return self._user[0]
        encoding = self._user[0].encoding or "utf-8"
        return open(os.dup(self._kept[STDOUT]), "w", encoding=encoding, errors="replace", buffering=1, closefd=True)

    def _to_log(self) -> None:
        assert self._file is not None
        flush(*self._user, self._screen)
        for number in self._kept:
            os.dup2(self._file.fileno(), number)
        sys.stdout = sys.stderr = self._file
        move_handlers(self._user, self._file)

    def _to_terminal(self) -> None:
        assert self._file is not None
        flush(sys.stdout, sys.stderr)
        for number, copy in self._kept.items():
            os.dup2(copy, number)
        sys.stdout, sys.stderr = self._user
        move_handlers((self._file,), self._user[1])

    @contextlib.contextmanager
    def terminal(self) -> Iterator[None]:
        """Give stdin, stdout and stderr back to the user's code. Nests, also over threads."""
        with self._lock:
            self._guests += 1
            if self._guests == 1 and self._file:
                self.before_guest()
                self._to_terminal()
        try:
            yield
        finally:
            with self._lock:
                self._guests -= 1
                if self._guests == 0 and self._file:
                    self._to_log()

    def say(self, text: str) -> None:
        """One or more lines to the terminal and to the log."""
        self.note(text)
        self.draw(text + "\n")

    def note(self, text: str) -> None:
        """To the log only."""
        if self._file:
            self._file.write(text + "\n")

    def draw(self, text: str) -> None:
        """Raw text to the terminal only. Characters that it does not know become ?; a closed one is left alone."""
        if self._silent:
            return
        encoding = self._screen.encoding or "utf-8"
        try:
            self._screen.write(text.encode(encoding, "replace").decode(encoding))
            self._screen.flush()
        except (BrokenPipeError, ValueError):  # `| head` went away; hours of training are worth more than its lines
            self._silent = True
            self.note("the terminal is closed; going on without it")

    @property
    def is_tty(self) -> bool:
        """Whether somebody watches, so that a line may be redrawn."""
        return self._screen.isatty() and os.environ.get("TERM") != "dumb"

    @property
    def encoding(self) -> str:
        """Of the terminal, lower case: utf-8, gbk, ascii."""
        return (self._screen.encoding or "utf-8").lower().replace("utf8", "utf-8")

    def tail(self, lines: int = 20) -> str:
        """The end of the log, for a message about a crash."""
        if self._file:
            self._file.flush()
        if not self.log.exists():
            return ""
        with open(self.log, "rb") as file:
            file.seek(max(0, file.seek(0, io.SEEK_END) - 400 * lines))
            return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-lines:])


def has_descriptor(stream: TextIO | None) -> bool:
    """Whether a stream is backed by a file of the system. None: there is no stream (pythonw)."""
    if stream is None:
        return False
    try:
        stream.fileno()
    except (OSError, ValueError):  # io.UnsupportedOperation is both
        return False
    return True


def flush(*streams: TextIO | None) -> None:
    """Flush those that are open; a closed pipe is no reason to stop."""
    for stream in streams:
        if stream is not None and not stream.closed:
            with contextlib.suppress(BrokenPipeError):
                stream.flush()


def move_handlers(old: tuple[TextIO, ...], new: TextIO) -> None:
    """Point logging handlers that hold one of the old streams to the new one."""
    loggers = [logging.root, *(x for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger))]
    for handler in {handler for logger in loggers for handler in logger.handlers}:
        if type(handler) is logging.StreamHandler and any(handler.stream is stream for stream in old):
            handler.setStream(new)
