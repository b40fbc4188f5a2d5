"""The command line of compare: folders in, a page and a picture out."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from quickstart.errors import EXIT_DONE, EXIT_USER, Fault, UserError, permitted
from quickstart.words import counted
from quickstart.writing import write_atomic

PAGE, PICTURE = "compare.html", "compare.png"
USAGE = """usage: python -m quickstart compare RUN RUN ... [--out FOLDER]

Reward, loss, KL, margins and time of several runs, as compare.html and compare.png. RUN is the output folder of a run,
or one under outputs/history. Runs of different methods may be mixed; runs that died show what they have.

  --out FOLDER   where the two files go; default: the folder that holds all runs"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or set(arguments) & {"-h", "--help"}:
        print(USAGE)
        return EXIT_DONE
    try:
        folders, out = parse(arguments)
        page, picture = compare(folders, out)
        print(f"{counted(len(folders), 'run')} compared: {page} (for a browser), {picture} (the curves)")
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return EXIT_USER
    return EXIT_DONE


def parse(arguments: Sequence[str]) -> tuple[list[Path], Path | None]:
    """Folders and the value of --out. Raises UserError."""
    folders: list[Path] = []
    out: Path | None = None
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name == "--out":
            value = value if equals else next(rest, "")
            if not value:
                raise UserError(Fault(field="--out", found="nothing", rule="needs a folder", fix="write --out FOLDER"))
            out = Path(value).expanduser()
        elif argument.startswith("-"):
            rule, fix = "the only flag is --out", "put ./ before a folder whose name begins with a dash"
            raise UserError(Fault(field=argument, found="an unknown flag", rule=rule, fix=fix))
        else:
            folders.append(Path(argument).expanduser())
    if not folders:
        raise UserError(Fault(field="RUN", found="no folder", rule="needs one run or more", fix="name output folders"))
    return folders, out


@permitted()
def compare(folders: Sequence[Path], out: Path | None = None) -> tuple[Path, Path]:
    """Write the page and the picture; gives their paths. Raises UserError."""
    from quickstart.compare.page import page
    from quickstart.compare.picture import picture
    from quickstart.compare.reading import read_runs

    runs = read_runs(folders)
    if not any(run.curves for run in runs):
        names = ", ".join(map(str, folders))
        rule = "at least one run must have a finite number to draw"
        raise UserError(Fault(field=names, found="records without numbers", rule=rule, fix="name other runs"))
    target = out or Path(os.path.commonpath([folder.absolute().parent for folder in folders]))
    if target.exists() and not target.is_dir():
        raise UserError(Fault(field="--out", found=f"{target} is a file", rule="must be a folder", fix="name a folder"))
    target.mkdir(parents=True, exist_ok=True)
    write_atomic(target / PAGE, page(runs))
    write_atomic(target / PICTURE, picture(runs))
    return target / PAGE, target / PICTURE
