"""The host: system, Python, console, CPUs, memory, shared memory and disks, as this process may use them.

Facts are gathered by :func:`look_at_machine`; each judge is a function of them. Not here: GPUs (accelerator.py) and
packages (packages.py). What a run needs of memory comes from the plan (memory.py).
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from quickstart.arguments import RunConfig
from quickstart.config.profile import cgroup_quota, usable_cpus
from quickstart.doctor.finding import Finding, error, note, ok, warning

GB = 10**9
UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63
SMALL_SHARED = 1 * GB  # Docker's default is 64 MB; loaders and NCCL between processes want more
RAY_FULL = 0.95  # of its disk: Ray stops making objects there
OLDEST, NEWEST = (3, 10), (3, 12)  # Python of verl 0.9.1 (METADATA, Requires-Python)


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The disk under a folder."""

    folder: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What there is. Sizes in bytes; None: not known on this system, or no limit."""

    platform: str = "linux"  # sys.platform
    python: tuple[int, int, int] = (3, 11, 0)
    encoding: str = "utf-8"  # of standard output
    host_cpus: int = 1
    affinity_cpus: int = 1
    quota_cpus: float | None = None
    ram_bytes: int = 0  # of the host
    available_bytes: int = 0  # of the host, now
    limit_bytes: int | None = None  # of the cgroup
    used_bytes: int = 0  # in the cgroup, without caches that can be dropped
    shared_bytes: int | None = None  # size of /dev/shm

    @property
    def cpus(self) -> int:
        """What this process may keep busy."""
        quota = self.quota_cpus or self.affinity_cpus
        return max(1, min(self.affinity_cpus, int(quota)))

    @property
    def usable_bytes(self) -> int:
        """Memory that a new process can get now."""
        if self.limit_bytes is None:
            return self.available_bytes
        return min(self.available_bytes, max(self.limit_bytes - self.used_bytes, 0))


def look_at_machine() -> Machine:
    """A few ms."""
    import psutil

    memory = psutil.virtual_memory()
    limit, used = cgroup_memory()
    shared = Path("/dev/shm")
    return Machine(
        platform=sys.platform,
        python=sys.version_info[:3],
        encoding=sys.stdout.encoding or "unknown",
        host_cpus=os.cpu_count() or 1,
        affinity_cpus=len(os.sched_getaffinity(0)) if sys.platform == "linux" else usable_cpus(),
        quota_cpus=cgroup_quota(),
        ram_bytes=memory.total,
        available_bytes=memory.available,
        limit_bytes=limit,
        used_bytes=used,
        shared_bytes=shutil.disk_usage(shared).total if shared.is_dir() else None,
    )


def cgroup_memory(root: Path = Path("/sys/fs/cgroup")) -> tuple[int | None, int]:
    """(limit, in use) of this process's container, version 2 or 1; (None, 0) where there is no limit."""
    for limit_name, used_name, stat_name in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        if not (root / limit_name).is_file():
            continue
        text = (root / limit_name).read_text().strip()
        if text == "max" or int(text) >= UNLIMITED:
            return None, 0
        stat = dict(line.split() for line in (root / stat_name).read_text().splitlines() if len(line.split()) == 2)
        droppable = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
        return int(text), max(int((root / used_name).read_text()) - droppable, 0)
    return None, 0


def disk_of(folder: Path) -> Disk:
    """The disk that a folder lies on, or will once it is made."""
    there = next(p for p in (folder, *folder.parents) if p.exists())
    usage = shutil.disk_usage(there)
    return Disk(folder=str(folder), free_bytes=usage.free, total_bytes=usage.total)


def gigabytes(size: float) -> str:
    """12.3 GB, 456 MB: decimal, as disks are sold and GPUs are not."""
    return f"{size / GB:.1f} GB" if size >= 0.95 * GB else f"{size / 10**6:.0f} MB"


def judge_platform(machine: Machine) -> Finding:
    """Linux is what verl and Ray are built for."""
    if machine.platform == "win32":
        found = "Windows"
        fix = "work in WSL2 (wsl --install) or on Linux; set PYTHONUTF8=1 for programs outside it"
        return error("platform", found, fix, rule="verl, vLLM and file locking do not run natively on Windows")
    if machine.platform == "darwin":
        fix = "nothing, for small models; a GPU run needs Linux"
        return note("platform", "macOS: CPU runs only (no CUDA, no vLLM, no flash-attn; Metal is not used)", fix)
    return ok("platform", machine.platform)


def judge_python(machine: Machine) -> Finding:
    """verl's own range."""
    text = ".".join(map(str, machine.python))
    if OLDEST <= machine.python[:2] <= NEWEST:
        return ok("python", text)
    fix = "make a new environment, for example: uv venv --python 3.11"
    return error("python", text, fix, rule="verl 0.9.1 needs Python 3.10, 3.11 or 3.12")


def judge_encoding(machine: Machine) -> Finding:
    """A console that cannot show Chinese shows question marks; files are UTF-8 in any case."""
    if machine.encoding.lower().replace("-", "").replace("_", "") == "utf8":
        return ok("console", "UTF-8")
    found = f"{machine.encoding}: characters that it lacks are shown as `?`; files are written in UTF-8"
    return note("console", found, "export PYTHONUTF8=1 (and LANG=C.UTF-8)")


def judge_cpus(machine: Machine, cfg: RunConfig | None) -> Finding:
    """What the process may use is what counts, not what the host has."""
    limits = []
    if machine.affinity_cpus < machine.host_cpus:
        limits.append(f"affinity allows {machine.affinity_cpus}")
    if machine.quota_cpus is not None:
        limits.append(f"the container's quota is {machine.quota_cpus:g}")
    found = f"{machine.cpus} usable of {machine.host_cpus}" + (f" ({', '.join(limits)})" if limits else "")
    threads = None if cfg is None or cfg.training.num_threads == "auto" else cfg.training.num_threads
    if threads is not None and threads > machine.cpus:
        rule = f"{threads} threads on {machine.cpus} CPUs wait for each other"
        fix = f"write {machine.cpus} or auto"
        return warning("cpus", found, fix, field="training.num_threads", rule=rule)
    return ok("cpus", found)


def judge_memory(machine: Machine) -> Finding:
    """How much there is; whether it suffices, the memory plan says."""
    limit = "" if machine.limit_bytes is None else f", the container may use {gigabytes(machine.limit_bytes)}"
    found = f"{gigabytes(machine.usable_bytes)} usable now of {gigabytes(machine.ram_bytes)}{limit}"
    return ok("host memory", found)


def judge_shared_memory(machine: Machine, uses_ray: bool) -> Finding:
    """Only processes that share tensors need it: a cluster, not a run in one process."""
    if machine.shared_bytes is None:
        return ok("shared memory", "no /dev/shm on this system, and one process needs none")
    found = f"/dev/shm has {gigabytes(machine.shared_bytes)}"
    if machine.shared_bytes >= SMALL_SHARED:
        return ok("shared memory", found)
    fix = "start the container with --shm-size=8g (Docker) or --ipc=host"
    if uses_ray:
        return warning("shared memory", found, fix, rule="Ray keeps its objects there")
    return note("shared memory", f"{found}: enough for one process, too little for backend ray", fix)


def judge_disk(disk: Disk, what: str, needed_bytes: int, fix: str, field: str = "") -> Finding:
    """Free space against what a run writes there."""
    found = f"{gigabytes(disk.free_bytes)} free under {disk.folder}"
    check = f"disk: {what}"
    if disk.free_bytes < needed_bytes:
        return error(check, found, fix, field=field, rule=f"about {gigabytes(needed_bytes)} will be written there")
    if disk.free_bytes < 2 * needed_bytes:
        return warning(check, found, fix, field=field, rule=f"about {gigabytes(needed_bytes)} will be written there")
    return ok(check, found + (f", about {gigabytes(needed_bytes)} needed" if needed_bytes else ""))


def judge_ray_disk(disk: Disk, uses_ray: bool) -> Finding:
    """Ray's session folder and spilled objects; Ray stops making objects on a disk that is 95 % full."""
    used = 1 - disk.free_bytes / disk.total_bytes
    found = f"{gigabytes(disk.free_bytes)} free under {disk.folder} ({used:.0%} full)"
    if used <= RAY_FULL:
        return ok("disk: Ray", found)
    fix = "free some space there, or set RAY_TMPDIR to a short path on another disk"
    if uses_ray:
        return warning(
            "disk: Ray", found, fix, rule=f"Ray stops making objects when a disk is over {RAY_FULL:.0%} full"
        )
    return note("disk: Ray", f"{found}; a run in one process does not use it", fix)


def ray_folder() -> Path:
    """Where Ray puts its sessions."""
    return Path(os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp")))


def hub_folder() -> Path:
    """Where downloaded models are kept."""
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
