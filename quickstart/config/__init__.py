"""YAML, profile and command line to one checked RunConfig; and the filling in of "auto".

    cfg = load("configs/ppo_min.yaml", ["rl.rl_type=grpo"])     # defaults < file < profile < command line
    cfg = from_arguments(ModelArguments(...), DataArguments(...), RLArguments(...), {"output_dir": "outputs"})
    resolved = resolve(cfg)

All faults of a config come in one UserError, each with the nearest legal value. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quickstart.arguments import SECTIONS, RunConfig, Source
from quickstart.config import build as _build
from quickstart.config.build import Entries, Entry, merge, section_entries
from quickstart.config.casting import Refused, cast, listing
from quickstart.config.dump import to_mapping, to_yaml
from quickstart.config.explicit import is_explicit
from quickstart.config.names import TOP_LEVEL, unknown_key, unknown_section
from quickstart.config.overrides import Override, parse_overrides
from quickstart.config.paths import REPOSITORY
from quickstart.config.profile import Gpu, Probe, choose_profile, probe_machine
from quickstart.config.reading import parse_value, read_file
from quickstart.config.resolve import Choice, Resolved, resolve, with_value
from quickstart.config.rules import (
    check_steps,
    fewer_rows,
    generations,
    kl_place,
    samples_per_step,
    samples_per_update,
)
from quickstart.errors import Fault, UserError, permitted

__all__ = [
    "DEFAULT_CONFIG",
    "Choice",
    "Gpu",
    "Probe",
    "Resolved",
    "check_steps",
    "fewer_rows",
    "from_arguments",
    "generations",
    "is_explicit",
    "kl_place",
    "load",
    "probe_machine",
    "resolve",
    "samples_per_step",
    "samples_per_update",
    "to_mapping",
    "to_yaml",
    "with_value",
]

DEFAULT_CONFIG = "configs/ppo_min.yaml"


@permitted()
def load(path: str | None, overrides: list[str]) -> RunConfig:
    """Read a config file and the settings of the command line.

    path None: configs/ppo_min.yaml of the current folder or the repository. Raises UserError.
    """
    file = config_path(path)
    content, lines = read_file(file)
    faults: list[Fault] = []
    parsed = collect_overrides(overrides, faults)

    def where(prefix: str) -> Any:
        def at(name: str) -> str:
            key = f"{prefix}{name}".rstrip(".")
            return f"{key} ({file}:{lines[key]})" if key in lines else f"{key} ({file})"

        return at

    faults.extend(unknown_section(where("")(str(k)), str(k)) for k in content if k not in TOP_LEVEL)
    in_file = read_sections(content, where, "", faults)
    on_line = override_entries(parsed, faults)
    name, why = pick_profile(content, parsed, merge([in_file, on_line]), where(""), faults)
    profiles = content.get("profiles")
    chosen = (profiles.get(name) or {}) if isinstance(profiles, Mapping) and name else {}
    in_profile = read_profile(chosen, where, f"profiles.{name}.", faults)
    source = Source(
        config_path=str(file), profile=name, profile_why=why, overrides=tuple(overrides), notices=told_twice(parsed)
    )
    return _build.build(merge([in_file, in_profile, on_line]), source, faults)


@permitted()
def from_arguments(
    model_args: Any = None,
    data_args: Any = None,
    rl_args: Any = None,
    training_args: Any = None,
    verl: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The same from Python: argument objects, or plain mappings of their fields. Raises UserError."""
    faults: list[Fault] = []
    entries: Entries = {}
    for section, given in zip(SECTIONS, (model_args, data_args, rl_args, training_args), strict=True):
        entries.update(section_entries(section, as_mapping(section, given), key_of(section), faults))
    entries.update(section_entries("verl", verl, key_of("verl"), faults))
    return _build.build(entries, Source(), faults)


def key_of(section: str) -> Any:
    """Names a setting that came from Python."""
    return lambda name: f"{section}.{name}".rstrip(".")


def constant(where: str) -> Any:
    """One place for all keys."""
    return lambda name: where


def as_mapping(section: str, given: Any) -> Any:
    """What differs from the defaults in an argument object; anything else as it is."""
    if not isinstance(given, SECTIONS[section]):
        return given
    defaults = {f.name: _build.default_of(f) for f in dataclasses.fields(given)}
    return {name: value for name, value in vars(given).items() if value != defaults[name]}


def config_path(path: str | None) -> Path:
    """The file that was named; without one, or where it is not here, the repository's is looked at."""
    wanted = Path(path or DEFAULT_CONFIG).expanduser()
    fallback = REPOSITORY / wanted
    return fallback if not wanted.exists() and fallback.is_file() else wanted


def collect_overrides(overrides: list[str], faults: list[Fault]) -> list[Override]:
    """Those of the right form; the others go to faults."""
    parsed: list[Override] = []
    for text in overrides:
        try:
            parsed.extend(parse_overrides([text]))
        except UserError as error:  # gathered here so that one message has all faults
            faults.extend(error.faults)
    return parsed


def told_twice(parsed: list[Override]) -> tuple[str, ...]:
    """Settings that the command line has more than once."""
    keys = [override.key for override in parsed]
    last = {override.key: override.text for override in parsed}
    return tuple(
        f"{key} was given {keys.count(key)} times; the last one counts: {last[key]}"
        for key in dict.fromkeys(keys)
        if keys.count(key) > 1
    )


def read_sections(content: Mapping[str, Any], where: Any, prefix: str, faults: list[Fault]) -> Entries:
    """The entries of all sections in a mapping."""
    entries: Entries = {}
    for section in (*SECTIONS, "verl"):
        if section in content:
            at = where(f"{prefix}{section}.")
            entries.update(section_entries(section, content[section], at, faults))
    return entries


def read_profile(chosen: Any, where: Any, prefix: str, faults: list[Fault]) -> Entries:
    """The entries of one profile, which holds sections and nothing else."""
    if not isinstance(chosen, Mapping):
        rule, fix = "a profile holds sections", "write rl:, model: and so on below it"
        faults.append(Fault(field=where(prefix)(""), found=repr(chosen), rule=rule, fix=fix))
        return {}
    inner = (*SECTIONS, "verl")
    faults.extend(unknown_section(where(prefix)(str(k)), str(k)) for k in chosen if k not in inner)
    return read_sections(chosen, where, prefix, faults)


def override_entries(parsed: list[Override], faults: list[Fault]) -> Entries:
    """Entries of the command line. A third part (data.columns.prompt) sets one key of a mapping."""
    layers: list[Entries] = []
    for override in parsed:
        section, *rest = override.path
        where = f"{override.key} (command line)"
        if section == "verl":
            content = {".".join(rest): parse_value(override.text)}
            layers.append(section_entries("verl", content, constant(where), faults))
        elif section in SECTIONS:
            layers.append(section_override(section, rest, override.text, where, faults))
    return merge(layers)


def section_override(section: str, rest: list[str], text: str, where: str, faults: list[Fault]) -> Entries:
    """One override of one of our fields."""
    name, *inner = rest
    kind = _build.kinds(section).get(name)
    takes_mapping = kind is not None and not isinstance(cast({"a": "b"}, kind), Refused)
    if kind is None or (inner and not takes_mapping):
        faults.append(unknown_key(where, section, ".".join(rest)))
        return {}
    if inner:
        return {f"{section}.{name}": Entry({".".join(inner): text}, where)}
    return {f"{section}.{name}": Entry(parse_value(text) if text.lstrip()[:1] in ("[", "{") else text, where)}


def pick_profile(
    content: Mapping[str, Any], parsed: list[Override], entries: Entries, where: Any, faults: list[Fault]
) -> tuple[str | None, str]:
    """The profile by command line or file; auto looks at training.device, then at the machine."""
    raw = content.get("profiles")
    profiles = [str(name) for name in raw] if isinstance(raw, Mapping) else []
    if raw is not None and not isinstance(raw, Mapping):
        rule, fix = "profiles are a mapping of names", "write cpu: and gpu: below it"
        faults.append(Fault(field=where("profiles"), found=repr(raw), rule=rule, fix=fix))
    typed = [override.text for override in parsed if override.path == ("profile",)]
    wanted = str(typed[-1] if typed else content.get("profile") or "auto").strip()
    if wanted != "auto" and wanted not in profiles:
        choices = ("auto", *profiles)
        rule = f"must be {', '.join(choices)}"
        place = "profile (command line)" if typed else where("profile")
        fix = f"leave it out, so that the machine decides, or write {listing(choices)}"
        faults.append(Fault(field=place, found=repr(wanted), rule=rule, fix=fix))
        return None, ""
    device = entries.get("training.device", Entry("auto", ""))
    return choose_profile(wanted, str(device.value), profiles)
