"""`python -m quickstart COMMAND ...`, also installed as `quickstart`: finds the command and hands the rest over."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from quickstart.errors import EXIT_DONE, EXIT_USER

# command -> (module with main(argv) -> exit code, what it does). A new command is one line here.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("quickstart.run", "train; the same as python -m quickstart.run"),
    "doctor": ("quickstart.doctor.command", "look at machine, model, data and settings; start nothing"),
    "compare": ("quickstart.compare", "several runs side by side, as a page and a picture"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return EXIT_DONE
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"error: there is no command {name!r}\n    fix: {nearest(name)}", file=sys.stderr)
        return EXIT_USER
    try:
        code = int(import_module(COMMANDS[name][0]).main(rest))
        sys.stdout.flush()
    except BrokenPipeError:  # `quickstart doctor | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    return code


def usage() -> str:
    """The commands that exist."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: python -m quickstart COMMAND ...", "", *lines, "", "COMMAND --help says more."])


def nearest(name: str) -> str:
    """The command that was probably meant."""
    from difflib import get_close_matches

    if "=" in name or name.startswith("-"):
        return f"write python -m quickstart run {name}"
    close = get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"commands are {', '.join(COMMANDS)}"


if __name__ == "__main__":
    sys.exit(main())
