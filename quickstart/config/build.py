"""From raw entries (a file, a profile, the command line, Python objects) to a checked RunConfig, all faults at once."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from quickstart.arguments import PREFERENCE_TYPES, SECTIONS, RunConfig, Source, algorithm_name
from quickstart.config import casting, paths, rules
from quickstart.config.explicit import is_explicit, is_typed
from quickstart.config.names import DEAD_VERL_KEYS, dead_verl_key, unknown_key
from quickstart.errors import Fault, UserError
from quickstart.verl_owned import READ_WITHOUT_ROLLOUTS


@dataclass(frozen=True)
class Entry:
    """One setting as somebody wrote it. where: key and place, for messages."""

    value: Any
    where: str


Entries = dict[str, Entry]  # `section.key` -> entry; of two layers the later wins


@cache
def kinds(section: str) -> dict[str, Any]:
    """Field name -> type, for one section."""
    return typing.get_type_hints(SECTIONS[section])


def fields_of(section: str) -> dict[str, dataclasses.Field[Any]]:
    """Field name -> dataclass field with its metadata."""
    return {f.name: f for f in dataclasses.fields(SECTIONS[section])}


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The default, also of a mutable one."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def section_entries(section: str, content: Any, where: typing.Callable[[str], str], faults: list[Fault]) -> Entries:
    """Entries of one section's mapping. Unknown keys go to faults."""
    if content is None:
        return {}  # `rl:` with nothing below it
    if not isinstance(content, Mapping):
        found, fix = f"{content!r}", f"write {section}: and its settings indented below"
        faults.append(Fault(field=where(""), found=found, rule="a section holds settings", fix=fix))
        return {}
    if section == "verl":
        return verl_entries(content, where, faults)
    entries: Entries = {}
    for name, value in content.items():
        if name in fields_of(section):
            entries[f"{section}.{name}"] = Entry(value, where(str(name)))
        else:
            faults.append(unknown_key(where(str(name)), section, str(name)))
    return entries


def verl_entries(content: Mapping[Any, Any], where: typing.Callable[[str], str], faults: list[Fault]) -> Entries:
    """verl keys, nested or dotted, made flat. Keys that verl accepts and ignores go to faults."""
    flat: Entries = {}
    for key, value in flatten(content):
        if key.split(".")[0] in DEAD_VERL_KEYS:
            faults.append(dead_verl_key(where(key), key.split(".")[0]))
        else:
            flat[f"verl.{key}"] = Entry(value, where(key))
    return flat


def flatten(content: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Leaves with dotted keys. An empty mapping is a leaf."""
    leaves: list[tuple[str, Any]] = []
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            leaves.extend(flatten(value, f"{prefix}{key}."))
        else:
            leaves.append((f"{prefix}{key}", value))
    return leaves


def merge(layers: list[Entries]) -> Entries:
    """Later layers win; mappings (data.columns) are merged key by key, and verl.a.b replaces verl.a and verl.a.b.c."""
    merged: Entries = {}
    for layer in layers:
        for key, entry in layer.items():
            for old in [old for old in merged if old.startswith(f"{key}.") or key.startswith(f"{old}.")]:
                del merged[old]
            before = merged.get(key)
            if before and isinstance(before.value, Mapping) and isinstance(entry.value, Mapping):
                entry = Entry({**before.value, **entry.value}, entry.where)
            merged[key] = entry
    return merged


def build(entries: Entries, source: Source, faults: list[Fault]) -> RunConfig:
    """Cast, look paths up, check ranges and rules. Raises UserError with everything that is wrong."""
    faulty: set[str] = set()
    notices: list[str] = []
    repository = paths.repository_of(source.config_path)
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for section in SECTIONS:
        for name, field in fields_of(section).items():
            key = f"{section}.{name}"
            entry = entries.get(key, Entry(default_of(field), f"{key} (default)"))
            result = checked(entry, kinds(section)[name], field.metadata)
            if not isinstance(result, Fault) and field.metadata["path"]:
                result = located(entry.where, result, field.metadata["path"], repository, notices)
            if isinstance(result, Fault):
                faults.append(result)
                faulty.add(key)
                result = default_of(field)
            values[section][name] = result
    cfg = assemble(values, entries, source)
    found = [fault for fault, reads in rules.check_rules(cfg) if not faulty & reads]
    faults.extend(place(fault, entries) for fault in found)
    faults.extend(reward_file_faults(cfg, entries, repository, notices) if "rl.reward" not in faulty else [])
    if faults:
        raise UserError(faults)
    notices.extend(unused_notices(cfg))
    return dataclasses.replace(cfg, source=dataclasses.replace(cfg.source, notices=(*source.notices, *notices)))


def assemble(values: dict[str, dict[str, Any]], entries: Entries, source: Source) -> RunConfig:
    """The RunConfig of cast values."""
    sections = {section: SECTIONS[section](**values[section]) for section in SECTIONS}
    verl = {key.removeprefix("verl."): entry.value for key, entry in entries.items() if key.startswith("verl.")}
    return RunConfig(**sections, verl=verl, source=dataclasses.replace(source, given=frozenset(entries)))


def checked(entry: Entry, kind: Any, metadata: Mapping[str, Any]) -> Any:
    """The value in its type and range, or a Fault."""
    value = casting.cast(entry.value, kind, ratio=metadata["ratio"])
    if isinstance(value, casting.Refused):
        return Fault(field=entry.where, found=shown(entry.value), rule=value.rule, fix=value.fix)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return in_range(value, entry, metadata)
    return value


LIMITS = (
    ("above", lambda value, limit: value > limit, "must be above {}"),
    ("at_least", lambda value, limit: value >= limit, "must be at least {}"),
    ("below", lambda value, limit: value < limit, "must be below {}"),
    ("at_most", lambda value, limit: value <= limit, "must be at most {}"),
)


def in_range(value: float, entry: Entry, metadata: Mapping[str, Any]) -> Any:
    """The value, or a Fault with the limit that it breaks."""
    for name, holds, words in LIMITS:
        limit = metadata[name]
        if limit is None or holds(value, limit):
            continue
        rule = words.format(number(limit)) + (f": {metadata['why']}" if metadata["why"] else "")
        return Fault(field=entry.where, found=shown(entry.value), rule=rule, fix=range_fix(value, metadata))
    return value


def range_fix(value: float, metadata: Mapping[str, Any]) -> str:
    """The legal interval in words, or the percentage that was meant."""
    upper = metadata["at_most"] if metadata["at_most"] is not None else metadata["below"]
    if metadata["ratio"] and upper is not None and 2 <= value <= 100 and value / 100 < upper:
        return f"write {number(value / 100)} (a share of one) or {number(value)}%"
    parts = [
        words.format(number(metadata[name])).removeprefix("must be ")
        for name, _, words in LIMITS
        if metadata[name] is not None
    ]
    return "write a value " + " and ".join(parts)


def number(value: float) -> str:
    """Short: 1, 0.5, 1e-06."""
    return f"{value:.10g}"


def shown(value: Any) -> str:
    """A value as a reader of the file would write it, cut when long."""
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def located(where: str, value: Any, kind: Any, repository: Any, notices: list[str]) -> Any:
    """The value with its paths found, or a Fault."""
    if value is None:
        return None
    results = [paths.locate(text, kind, repository) for text in ([value] if isinstance(value, str) else value)]
    for result in results:
        if isinstance(result, paths.Missing):
            return Fault(field=where, found=repr(result.path), rule=result.rule, fix=result.fix)
    notices.extend(f"{where.split(' ')[0]}: {r.notice}" for r in results if isinstance(r, paths.Found) and r.notice)
    found = [r.path for r in results if isinstance(r, paths.Found)]
    return found[0] if isinstance(value, str) else found


def reward_file_faults(cfg: RunConfig, entries: Entries, repository: Any, notices: list[str]) -> list[Fault]:
    """A reward function's file must exist. (Whether it holds the function, the reward room checks.)"""
    if not rules.is_function(cfg.rl.reward):
        return []
    result = paths.locate(rules.reward_file(cfg.rl.reward), "data", repository)
    if isinstance(result, paths.Found):
        return []
    ways = "write function:FILE.py:NAME with the path of your file, or rl.reward=preference"
    fix = result.fix if result.is_near else ways
    rule = f"{result.path}: {result.rule}"
    return [place(Fault(field="rl.reward", found=repr(cfg.rl.reward), rule=rule, fix=fix), entries)]


def place(fault: Fault, entries: Entries) -> Fault:
    """The fault with the place where its field was set."""
    entry = entries.get(fault.field)
    return dataclasses.replace(fault, field=entry.where) if entry else fault


# Settings that only some values of another one read: without these, somebody's choice would be dropped in silence.
READ_ONLY_WITH: dict[str, tuple[str, Callable[[RunConfig], bool]]] = {
    "model.lora_alpha": ("model.lora_rank above 0", lambda c: c.model.lora_rank > 0),
    "model.reward_model_name_or_path": ("rl.reward=model", lambda c: c.rl.reward == "model"),
    "rl.reward_offload": ("rl.reward=model", lambda c: c.rl.reward == "model"),
    "rl.kl_target": ("rl.kl_controller=adaptive", lambda c: c.rl.kl_controller == "adaptive"),
    "rl.kl_horizon": ("rl.kl_controller=adaptive", lambda c: c.rl.kl_controller == "adaptive"),
}


def unused_notices(cfg: RunConfig) -> list[str]:
    """What somebody chose and this run does not read: settings, and keys of verl's."""
    unused, notices = [], []
    for section in SECTIONS:
        for name, field in fields_of(section).items():
            used_by = field.metadata["used_by"]
            key, value = f"{section}.{name}", vars(vars(cfg)[section])[name]
            condition, is_read = READ_ONLY_WITH.get(key, ("", None))
            if not is_typed(cfg, key) and (not is_explicit(cfg, key) or value == default_of(field)):
                continue
            if used_by and cfg.rl.rl_type not in used_by:
                unused.append(key)
            elif is_read is not None and not is_read(cfg):
                notices.append(f"{key} is read only with {condition}")
    if cfg.rl.rl_type in PREFERENCE_TYPES:
        unused += [f"verl.{key}" for key in cfg.verl if not key.startswith(READ_WITHOUT_ROLLOUTS)]
    return [*([f"{algorithm_name(cfg.rl.rl_type)} does not read: {', '.join(unused)}"] if unused else []), *notices]
