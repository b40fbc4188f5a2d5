"""The command line many times without paying for imports many times.

A server process imports what a run imports and then forks one child a run: a process of its own with its own streams,
signals and exit code, that does exactly what `python -m quickstart.run ARGUMENTS` does, five CPU seconds sooner. What
a cold start does is tested by real subprocesses (see `cold`).

    run = server.start(["training.max_steps=2"], folder)     # returns at once
    run.wait() ; run.stdout ; run.stderr
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0  # a busy machine with 2 cores


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run in its folder: files stdout, stderr, pid and, once it has ended, rc."""

    folder: Path

    @property
    def outputs(self) -> Path:
        """Its results, where output_dir is the default."""
        return self.folder / "outputs"

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text(encoding="utf-8")

    @property
    def ended(self) -> bool:
        return (self.folder / "rc").exists()

    def wait(self) -> int:
        """Exit code; minus the signal's number where one ended it."""
        self.until(lambda: self.ended)
        return int((self.folder / "rc").read_text())

    def until(self, happened) -> None:
        """Wait for a condition; the run's output is in the message when it never holds."""
        limit = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < limit, f"nothing for {PATIENCE_S:.0f} s\n{self.stdout}{self.stderr}"
            time.sleep(0.02)

    def says(self, text: str) -> None:
        """Wait until a text stands in its stdout."""
        self.until(lambda: text in self.stdout or self.ended)
        assert text in self.stdout, self.stdout + self.stderr

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.kill(int((self.folder / "pid").read_text()), signal.SIGINT)


class Server:
    """Forks runs. Close it at the end."""

    def __init__(self) -> None:
        command = [sys.executable, "-W", "ignore", __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)

    def run(self, arguments: list[str], folder: Path, *, code: int = 0) -> Run:
        """Start and wait; the exit code must be the expected one."""
        run = self.start(arguments, folder)
        found = run.wait()
        assert found == code, f"exit code {found}\n{run.stdout}{run.stderr}"
        return run

    def start(self, arguments: list[str], folder: Path, *, terminal: str | None = None) -> Run:
        """`python -m quickstart.run ARGUMENTS` in a folder, which keeps what it prints.

        terminal: a device that stands for keyboard and screen instead.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("stdout", "stderr"):
            (folder / name).write_text("")
        for name in ("rc", "pid"):
            (folder / name).unlink(missing_ok=True)
        request = {"arguments": arguments, "folder": str(folder), "terminal": terminal}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Run(folder=folder)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def cold(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """The real command line, in a fresh interpreter."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "quickstart.run", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def environment() -> dict[str, str]:
    """This process's variables, and where the package lies."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


# ---- the server's side ----


def serve() -> None:
    """Read requests until stdin closes."""
    preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system collects the keepers
    for line in sys.stdin:
        request = json.loads(line)
        if os.fork() == 0:
            keep(Path(request["folder"]), request["arguments"], request["terminal"])


def preload() -> None:
    """Import what a run imports. Threads do not survive a fork; OpenBLAS and jemalloc start theirs again."""
    sys.path.insert(0, str(REPOSITORY))
    from quickstart.imports import light
    from quickstart.trainers import environment as process

    process.set_variables("cpu")
    with light():
        import quickstart.trainers.ppo
        import quickstart.trainers.preference  # noqa: F401
    assert threading.active_count() == 1, threading.enumerate()


def keep(folder: Path, arguments: list[str], terminal: str | None) -> None:
    """Fork the run, wait for it, write down how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        act(folder, arguments, terminal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, status = os.waitpid(pid, 0)
    part = folder / "rc.part"
    part.write_text(str(os.waitstatus_to_exitcode(status)))
    os.replace(part, folder / "rc")
    os._exit(0)


def act(folder: Path, arguments: list[str], terminal: str | None) -> None:
    """Become the run."""
    os.chdir(folder)
    part = folder / "pid.part"
    part.write_text(str(os.getpid()))
    os.replace(part, folder / "pid")
    names = [terminal] * 3 if terminal else [os.devnull, "stdout", "stderr"]
    for number, name in enumerate(names):
        os.dup2(os.open(name, os.O_RDWR if terminal else os.O_RDONLY if number == 0 else os.O_WRONLY), number)
    streams = [open(number, mode, encoding="utf-8", buffering=1) for number, mode in enumerate("rww")]  # noqa: SIM115
    sys.stdin, sys.stdout, sys.stderr = streams
    sys.argv = ["quickstart.run", *arguments]
    try:
        runpy.run_module("quickstart.run", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)


if __name__ == "__main__":
    serve()
