"""Read one YAML file into plain Python, with the line of every key. Not here: what the keys mean.

Differs from yaml.safe_load: 1e-6 is a number, `no` and `on` stay text, dates stay text, a key that stands twice is a
fault. Every fault names file and line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml

from quickstart.errors import Fault, UserError


class Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's reading of bare words."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9]*(?:_[0-9]+)*)$"), list("-+0123456789")
)
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$"
    ),
    list("-+0123456789."),
)
Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^(?:<<)$"), ["<"])


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The mapping in the file, and `dotted key -> line`. Raises UserError."""
    text = read_text(path)
    try:
        node = yaml.compose(text, Loader=Loader)
        if node is None or node.tag.endswith(":null"):
            raise UserError(
                Fault(field=str(path), found="no settings", rule="a config must hold sections", fix=EXAMPLE)
            )
        lines = key_lines(node, path)
        loader = Loader(text)
        try:
            content = loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise UserError(syntax_fault(path, text, error)) from None
    if not isinstance(content, dict):
        found = f"a {type(content).__name__}"
        raise UserError(Fault(field=str(path), found=found, rule="a config must be a mapping of sections", fix=EXAMPLE))
    return content, lines


EXAMPLE = "start from configs/ppo_min.yaml"


def read_text(path: Path) -> str:
    """The file as text; UTF-8, with or without a byte-order mark."""
    if path.is_dir():
        raise UserError(
            Fault(field=str(path), found="a folder", rule="--config wants a YAML file", fix=f"name a file in {path}")
        )
    if not path.exists():
        raise UserError(
            Fault(field=str(path), found="no such file", rule="--config wants a YAML file", fix=missing_fix(path))
        )
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        found = f"byte 0x{error.object[error.start]:02x}"
        fix = f"save the file as UTF-8 (iconv -f GB18030 -t UTF-8 {path.name})"
        raise UserError(Fault(field=f"{path}:{line}", found=found, rule="a config must be UTF-8", fix=fix)) from None
    except PermissionError:
        raise UserError(
            Fault(
                field=str(path),
                found="a file that you may not read",
                rule="it must be readable",
                fix=f"chmod u+r {path}",
            )
        ) from None


def missing_fix(path: Path) -> str:
    """Name the YAML file that was probably meant."""
    from difflib import get_close_matches

    folder = path.parent if path.parent.is_dir() else Path("configs")
    present = sorted(p.name for p in folder.glob("*.y*ml")) if folder.is_dir() else []
    close = get_close_matches(path.name, present, n=1, cutoff=0.4) or present[:1]
    return f"use {folder / close[0]}" if close else "write the path of an existing file"


def key_lines(node: yaml.Node, path: Path) -> dict[str, int]:
    """Line of each dotted key; a key that stands twice in one mapping is a fault."""
    lines: dict[str, int] = {}
    faults: list[Fault] = []
    seen: set[int] = set()  # an alias may point back to a node above it

    def walk(part: yaml.Node, prefix: str) -> None:
        if not isinstance(part, yaml.MappingNode) or id(part) in seen:
            return
        seen.add(id(part))
        here: dict[str, int] = {}
        for key, value in part.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in here and name != "<<":
                faults.append(twice(path, prefix + name, here[name], line))
            here[name] = line
            lines[prefix + name] = line
            walk(value, f"{prefix}{name}.")

    walk(node, "")
    if faults:
        raise UserError(faults)
    return lines


def twice(path: Path, key: str, first: int, second: int) -> Fault:
    """One key, two lines."""
    return Fault(
        field=f"{path}:{second}",
        found=f"`{key}` a second time, first in line {first}",
        rule="a key may stand once",
        fix=f"remove one of the lines {first} and {second}",
    )


def syntax_fault(path: Path, text: str, error: yaml.YAMLError) -> Fault:
    """YAML's own message, with the line shown."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    number = mark.line + 1 if mark else 1
    rows = text.splitlines()
    shown = rows[number - 1].strip() if number <= len(rows) else "the end of the file"
    problem = (error.problem if isinstance(error, yaml.MarkedYAMLError) else None) or str(error).splitlines()[0]
    fix = "indent with spaces, not tabs" if "\\t" in problem else "check indentation, colons and quotes there"
    return Fault(field=f"{path}:{number}", found=f"{shown!r}", rule=f"not valid YAML: {problem}", fix=fix)


def parse_value(text: str) -> Any:
    """A value from the command line, read as YAML; what is no YAML is text."""
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError:
        return text
