"""Installed versions against the ranges in verl's own metadata and in ours. Reads metadata, imports nothing.

verl's base list and this project's list must hold; verl's extras are for one machine kind each (its `vllm` extra pins
torch 2.11.0), so an installed package outside of an extra's range is said, not refused.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from quickstart.doctor.finding import Finding, error, note, ok, warning

OURS = "quickstart-rl"
SHOWN = (
    "verl",
    "torch",
    "transformers",
    "tensordict",
    "ray",
    "TransferQueue",
    "datasets",
    "accelerate",
    "peft",
    "vllm",
)
EXTRAS = ("vllm", "fsdp")  # of verl: for the GPU
NEEDED = {  # not in verl's base list, imported by its trainer and rollout server all the same (verl-core)
    "TransferQueue", "pyzmq", "msgspec", "cachetools", "fastapi", "uvicorn",
}  # fmt: skip

HEAVY = ("torch", "transformers", "verl")  # thousands of modules; what holds for their first ones holds for the rest

Versions = Callable[[str], str | None]  # package -> installed version, None where it is not installed


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One line of somebody's list."""

    requirement: Requirement
    whose: str  # verl, verl[vllm], this project
    must: bool  # whether a run cannot do without


def installed(name: str) -> str | None:
    """The version of a package by its metadata."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def requirements_of(name: str) -> list[Requirement]:
    """What a package asks for; nothing where it is not installed."""
    try:
        return [Requirement(line) for line in metadata.requires(name) or ()]
    except metadata.PackageNotFoundError:
        return []


def wanted_versions() -> list[Wanted]:
    """verl's base list, its extras for the GPU, what its trainer imports beside them, and our own list."""
    lines = [(requirement, "verl") for requirement in requirements_of("verl")]
    lines += [(requirement, "this project") for requirement in requirements_of(OURS)]
    return [wanted for requirement, whose in lines for wanted in read_line(requirement, whose)]


def read_line(requirement: Requirement, whose: str) -> Iterable[Wanted]:
    """A base line must hold. Of verl-core only NEEDED must; of the extras for the GPU nothing."""
    marker = requirement.marker
    if marker is None or marker.evaluate({"extra": ""}):
        yield Wanted(requirement=requirement, whose=whose, must=True)
    elif whose == "verl" and marker.evaluate({"extra": "verl-core"}) and requirement.name in NEEDED:
        yield Wanted(requirement=requirement, whose="verl[verl-core]", must=True)
    elif whose == "verl":
        for extra in EXTRAS:
            if requirement.name != "verl" and marker.evaluate({"extra": extra}):
                yield Wanted(requirement=requirement, whose=f"verl[{extra}]", must=False)


def judge_packages(wanted: Sequence[Wanted], version_of: Versions, *, on_gpu: bool) -> list[Finding]:
    """One line with all versions, then one for each that does not fit."""
    shown = ", ".join(f"{name} {version}" for name in SHOWN if (version := version_of(name)))
    refused = [finding for want in wanted if want.must for finding in judge_needed(want, version_of)]
    findings = list({(finding.check, finding.found): finding for finding in refused}.values())
    if not findings:
        findings = [ok("packages", f"{shown}: all inside the ranges that verl states")]
    return findings + judge_extras(wanted, version_of, on_gpu=on_gpu) + judge_trl(version_of)


def judge_needed(want: Wanted, version_of: Versions) -> list[Finding]:
    """A package that a run cannot do without."""
    requirement = want.requirement
    version = version_of(requirement.name)
    fix = f"pip install '{bare(requirement)}'"
    check = f"package {requirement.name}"
    if version is None:
        return [error(check, "not installed", fix, rule=f"{want.whose} needs it")]
    if not fits(requirement, version):
        return [error(check, version, fix, rule=f"{want.whose} needs {requirement.specifier}")]
    return []


def judge_extras(wanted: Sequence[Wanted], version_of: Versions, *, on_gpu: bool) -> list[Finding]:
    """Installed packages outside of verl's tested set for GPUs, in one line."""
    off: dict[str, str] = {}
    for want in wanted:
        version = version_of(want.requirement.name)
        if not want.must and version is not None and not fits(want.requirement, version):
            off[want.requirement.name] = (
                f"{want.requirement.name} {version} ({want.whose}: {want.requirement.specifier})"
            )
    off.pop("trl", None)  # has a line of its own
    if not off:
        return []
    found = f"not the versions that verl was tested with on GPUs: {', '.join(off.values())}"
    if not on_gpu:
        return [note("packages for GPUs", f"{found}; that does not matter on a CPU")]
    fix = "for a GPU: pip install 'quickstart-rl[gpu]', which has the tested set; other sets may work"
    return [warning("packages for GPUs", found, fix)]


def judge_trl(version_of: Versions) -> list[Finding]:
    """trl 1 and later beside verl 0.9.1: `import verl` raises (verl/models/transformers/monkey_patch.py:352)."""
    version = version_of("trl")
    if version is None or Version(version) < Version("1"):
        return []
    fix = "pip uninstall trl (this project does not use it), or keep it in another environment"
    return [error("package trl", version, fix, rule="verl 0.9.1 cannot be imported beside trl 1 or later")]


def uncompiled(names: Iterable[str] = HEAVY) -> dict[Path, Path]:
    """First source file of each package that has no bytecode -> where it should lie. Imports nothing.

    What has no source file there (a zip, bytecode alone) is no such package.
    """
    sources = [source for name in names if (source := source_of(name)) is not None]
    places = {source: Path(util.cache_from_source(str(source))) for source in sources}
    return {source: place for source, place in places.items() if not place.exists()}


def source_of(name: str) -> Path | None:
    """The file that importing a package would begin with."""
    try:
        spec = util.find_spec(name)
    except ValueError:  # something that was put among the modules by hand
        return None
    source = Path(spec.origin) if spec is not None and spec.origin else None
    return source if source is not None and source.suffix == ".py" and source.is_file() else None


def judge_bytecode(missing: Mapping[Path, Path], *, kept: bool) -> list[Finding]:
    """Packages that Python compiles anew with each start, because it may not keep the result.

    pip compiles what it installs; uv and many container builds do not, and these often set PYTHONDONTWRITEBYTECODE.

    Args:
        missing: see :func:`uncompiled`.
        kept: whether Python writes bytecode (not sys.dont_write_bytecode).
    """
    lost = {source: place for source, place in missing.items() if not (kept and writable(place))}
    if not lost:
        return []
    names = ", ".join(source.parent.name for source in lost)
    place = next(iter(lost.values()))
    why = f"Python may not write {place.parent}" if kept else "PYTHONDONTWRITEBYTECODE (or python -B) is set"
    rule = "so thousands of files are compiled at every start (22 instead of 9 s to the first step on 2 CPU cores)"
    folders = sorted({str(source.parent.parent) for source in lost})
    command = [sys.executable, *["-O"] * sys.flags.optimize, "-m", "compileall", "-qq", "-j", "0", *folders]
    once = f"once, where it may write: {shlex.join(command)}"
    fix = once if kept else f"unset PYTHONDONTWRITEBYTECODE, or {once}"
    return [warning("bytecode", f"{names} have none, and {why}", fix, rule=rule)]


def writable(place: Path) -> bool:
    """Whether a file can be made there, by its nearest folder that exists."""
    return os.access(next(parent for parent in place.parents if parent.exists()), os.W_OK)


def fits(requirement: Requirement, version: str) -> bool:
    """Whether an installed version is in range; a local part such as +cpu does not count."""
    return requirement.specifier.contains(Version(version).public, prereleases=True)


def bare(requirement: Requirement) -> str:
    """Name, extras and range, as pip takes them."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"


def torch_of(package: str) -> str | None:
    """The torch that a package was built for, as its metadata pins it; None where it pins none."""
    pins = [r.specifier for r in requirements_of(package) if r.name == "torch" and r.marker is None]
    return str(pins[0]) if pins else None
