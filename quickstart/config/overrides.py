"""The command line of a run: `--config FILE` and `section.key=value`. Text in, text out: types come later."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from quickstart.arguments import SECTIONS
from quickstart.config.names import VERL_GROUPS, homes, suggestion
from quickstart.errors import Fault, UserError

KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")


@dataclass(frozen=True)
class Override:
    """One `section.key=value`. path has two parts or more, but for `profile`."""

    path: tuple[str, ...]
    text: str

    @property
    def key(self) -> str:
        """Dotted, as typed."""
        return ".".join(self.path)


def parse_overrides(arguments: Iterable[str]) -> list[Override]:
    """Read them all. Raises UserError that names every one which is not of the form section.key=value."""
    parsed: list[Override] = []
    faults: list[Fault] = []
    for argument in arguments:
        result = parse_override(argument)
        if isinstance(result, Fault):
            faults.append(result)
        else:
            parsed.append(result)
    if faults:
        raise UserError(faults)
    return parsed


def parse_override(argument: str) -> Override | Fault:
    """One argument of the command line. The value goes from the first = to the end, as it stands."""
    key, equals, text = argument.partition("=")
    key = key.strip()
    if not equals or not KEY.fullmatch(key):
        return bad_form(argument, key)
    path = tuple(key.split("."))
    if path == ("profile",):
        return Override(path, text.strip())
    if len(path) < 2 or path[0] not in (*SECTIONS, "verl"):
        return bad_key(argument, path)
    if not text.strip():
        return fault(argument, "no value after =", "write null to switch a setting off, or leave it out")
    return Override(path, unquote(text))


def unquote(text: str) -> str:
    """Without one pair of quotes around it (a shell may have left them)."""
    bare = text.strip()
    return bare[1:-1] if len(bare) >= 2 and bare[0] == bare[-1] and bare[0] in "\"'" else text


def bad_form(argument: str, key: str) -> Fault:
    """No = at all, or no key in front of it."""
    bare = key.lstrip("-+")
    if bare != key and KEY.fullmatch(bare):
        return fault(argument, "dashes or + in front of a setting", f"write {full_key(bare)}=VALUE")
    if key.endswith((".yaml", ".yml")):
        return fault(argument, "a file name", f"write --config {argument}")
    if (KEY.fullmatch(key) and "." in key) or homes(key):
        return fault(argument, "a key without a value", f"write {full_key(key)}=VALUE, without blanks around =")
    found = "something without a key" if "=" in argument else "a word without = in it"
    return fault(argument, found, "for example rl.learning_rate=1e-6")


def bad_key(argument: str, path: tuple[str, ...]) -> Fault:
    """A key without its section, or with one that does not exist."""
    if path[0] in SECTIONS or path[0] == "verl":
        return fault(argument, "a section without a key", f"write {path[0]}.KEY=VALUE")
    if len(path) > 1 and path[0] in VERL_GROUPS:
        return fault(argument, "verl's own key", f"put verl. in front: verl.{argument}")
    return fault(argument, "an unknown key", suggestion("", path[-1]))


def full_key(bare: str) -> str:
    """With its section, where the bare name has one."""
    return bare if "." in bare else (homes(bare) or [f"section.{bare}"])[0]


def fault(argument: str, found: str, fix: str) -> Fault:
    """All faults of this module look alike."""
    return Fault(field=argument, found=found, rule="settings are written section.key=value", fix=fix)
