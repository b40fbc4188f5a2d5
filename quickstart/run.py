"""Training from the command line: parse, build, run, report how it ended. Nothing else lives here.

    python -m quickstart.run [--config FILE] [section.key=value ...]

Exit codes: 0 done, 2 something that the user can fix (one message, no traceback), 1 a bug of ours, 130 interrupted.
"""

from __future__ import annotations

import io
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quickstart.errors import EXIT_BUG, EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER, Fault, RunError, UserError

FLAGS = ("--config", "--debug", "--dry-run", "--help", "-h", "--print-config", "--version")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line, read but not judged."""

    config: str | None = None
    overrides: tuple[str, ...] = ()
    flags: frozenset[str] = frozenset()


def main(argv: Sequence[str] | None = None) -> int:
    """The whole program. argv without the program's name; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    forgive_encoding()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end_as_interrupted)
    try:
        return execute(parse(arguments), arguments)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return EXIT_USER
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:  # the last line of defence: whatever gets here is our fault, not the user's
        from quickstart.crash import report_bug

        report_bug(error, arguments)
        return EXIT_BUG


def execute(command: Command, arguments: Sequence[str]) -> int:
    """Do what the command line says."""
    from quickstart import __version__, helptext

    if command.flags & {"--help", "-h"}:
        print(helptext.full())
        return EXIT_DONE
    if "--version" in command.flags:
        print(f"quickstart {__version__}")
        return EXIT_DONE

    from quickstart import config, verl_compose

    resolved = config.resolve(config.load(command.config, list(command.overrides)))
    if "--dry-run" in command.flags:
        from quickstart.trainers.api import foresee

        print(helptext.plan(foresee(resolved.cfg, resolved.choices)))
        return EXIT_DONE
    if "--print-config" in command.flags:
        verl_compose.check_keys(resolved.cfg.verl)
        if resolved.cfg.training.memory_budget_gb is not None:
            from quickstart.doctor import before

            resolved = before.foreseen(resolved)
        print(config.to_yaml(resolved.cfg))
        return EXIT_DONE

    from quickstart.trainers.api import train

    try:
        result = train(resolved.cfg, resolved.choices, ["python", "-m", "quickstart.run", *arguments])
    except UserError:
        raise
    except Exception as error:
        if not resolved.cfg.verl:
            raise
        from quickstart.crash import append, first_line

        raise RunError(
            verl_fault(
                resolved.cfg.verl,
                f"{type(error).__name__}: {first_line(error)}",
                append("".join(traceback.format_exception(error)), arguments),
            )
        ) from error
    return result if isinstance(result, int) else EXIT_DONE


def verl_fault(keys: Mapping[str, object], error: str, log: Path) -> Fault:
    """An error in a run with keys of verl's own: these are what no check of ours has seen."""
    return Fault(
        field=", ".join(f"verl.{key}" for key in keys),
        found=", ".join(map(repr, keys.values())),
        rule=f"with these values verl stopped: {error}",
        fix=f"leave them out, or put them back one by one; the whole story is in {log}",
    )


def end_as_interrupted(number: int, frame: object) -> None:
    """SIGTERM (`kill`, a scheduler): as Ctrl-C, so that the run's files say how it ended."""
    raise KeyboardInterrupt


def parse(arguments: Sequence[str]) -> Command:
    """Split flags from settings. Raises UserError on a flag that does not exist."""
    config: str | None = None
    flags: set[str] = set()
    overrides: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name == "--config":
            config = value if equals else next(rest, "")
            if not config or config.startswith("--"):
                raise UserError(flag_fault(argument, "no file after --config", "write --config configs/ppo_min.yaml"))
        elif argument in FLAGS:
            flags.add(argument)
        elif argument.startswith("-") and not equals:
            raise UserError(flag_fault(argument, "an unknown flag", nearest_flag(argument)))
        else:
            overrides.append(argument)
    return Command(config=config, overrides=tuple(overrides), flags=frozenset(flags))


def flag_fault(argument: str, found: str, fix: str) -> Fault:
    """Fault for the part of the command line that starts with dashes."""
    return Fault(field=argument, found=found, rule=f"flags are {', '.join(FLAGS)}", fix=fix)


def nearest_flag(argument: str) -> str:
    """The flag, or the setting, that was probably meant."""
    from difflib import get_close_matches

    from quickstart.config.names import suggestion

    close = get_close_matches(argument, FLAGS, n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else suggestion("", argument.lstrip("-").replace("-", "_"))


def forgive_encoding() -> None:
    """A console that is not UTF-8 shows ? instead of stopping the program."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
