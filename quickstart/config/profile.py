"""What this machine has, and which profile of a config fits. No torch: the driver is asked in a child process.

A child, because cuInit in this process would make CUDA unusable in everything forked from it later.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Asks the CUDA driver for count, then name, bytes and compute capability of each device. Prints one line each. What is
# free the driver tells only to those who hold a context, which takes a second; NVML tells it at once. -1: unknown.
ASK_DRIVER = """
import ctypes

def free(device):
    uuid, handle, memory = (ctypes.c_ubyte * 16)(), ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        failed = nvml.nvmlInit_v2() or cuda.cuDeviceGetUuid(uuid, device)
        text = bytes(uuid).hex()
        name = "-".join(["GPU", text[:8], text[8:12], text[12:16], text[16:20], text[20:]])
        failed = failed or nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        failed = failed or nvml.nvmlDeviceGetMemoryInfo(handle, memory)
    except (OSError, AttributeError):
        return -1
    return -1 if failed else memory[1]  # total, free, used

cuda = ctypes.CDLL("libcuda.so.1")
status, count = cuda.cuInit(0), ctypes.c_int()
if status: raise SystemExit(f"cuInit returned {status}")
cuda.cuDeviceGetCount(ctypes.byref(count))
for number in range(count.value):
    device, name, size = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t()
    major, minor = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), number)
    cuda.cuDeviceGetName(name, 128, device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    print(size.value, free(device), major.value, minor.value, name.value.decode())
"""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One visible CUDA device."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    free_bytes: int | None = None  # when it was looked at; None: not known


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What the choices of "auto" need to know. A test builds one by hand."""

    gpus: tuple[Gpu, ...] = ()  # those that torch can use
    why_no_gpu: str = ""  # set when gpus is empty
    cpus: int = 1  # what this process may use, not what the host has
    has_vllm: bool = False
    has_flash_attention: bool = False


@cache
def probe_machine() -> Probe:
    """Look once: a few ms without a CUDA driver, about 0.3 s with one."""
    gpus, why = find_gpus()
    return Probe(
        gpus=gpus,
        why_no_gpu=why,
        cpus=usable_cpus(),
        has_vllm=importlib.util.find_spec("vllm") is not None,
        has_flash_attention=importlib.util.find_spec("flash_attn") is not None,
    )


def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    """The usable CUDA devices, or none and the reason."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return (), "CUDA_VISIBLE_DEVICES hides all devices"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return (), "no CUDA driver on this machine"
    if not torch_has_cuda():
        return (), "there is a CUDA driver, but the installed torch is built without CUDA"
    return ask_driver()


def ask_driver() -> tuple[tuple[Gpu, ...], str]:
    """Start the child and read its lines."""
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", ASK_DRIVER], capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return (), "the CUDA driver did not answer within 60 s"
    if child.returncode:
        reason = child.stderr.strip().splitlines()[-1] if child.stderr.strip() else f"exit code {child.returncode}"
        return (), f"the CUDA driver refused: {reason}"
    gpus = []
    for line in child.stdout.splitlines():
        size, free, major, minor, name = line.split(" ", 4)
        known = int(free) if int(free) >= 0 else None
        gpus.append(Gpu(name=name, memory_bytes=int(size), capability=(int(major), int(minor)), free_bytes=known))
    return tuple(gpus), "" if gpus else "the CUDA driver sees no device"


def torch_has_cuda() -> bool:
    """Read from torch's version file, since importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return bool(version.exists() and re.search(r"^cuda\b[^=]*=\s*['\"]\d", version.read_text(), re.MULTILINE))


def usable_cpus() -> int:
    """CPUs by affinity and by the cgroup's quota, at least 1."""
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quota = cgroup_quota()
    return max(1, min(count, int(quota)) if quota else count)


def cgroup_quota() -> float | None:
    """CPUs that the container may use on average; None: no limit set."""
    newer = Path("/sys/fs/cgroup/cpu.max")
    if newer.exists():
        limit, period = newer.read_text().split()[:2]
        return None if limit == "max" else float(limit) / float(period)
    older = Path("/sys/fs/cgroup/cpu")
    if (older / "cpu.cfs_quota_us").exists():
        limit_us = int((older / "cpu.cfs_quota_us").read_text())
        return None if limit_us <= 0 else limit_us / int((older / "cpu.cfs_period_us").read_text())
    return None


def choose_profile(wanted: str, device: str, profiles: list[str]) -> tuple[str | None, str]:
    """The profile to use and why. wanted: auto or a name of profiles (checked before); device: auto, cpu, cuda."""
    if wanted != "auto":
        return wanted, "asked for"
    if not profiles:
        return None, "the config has no profiles"
    if device in ("cpu", "cuda"):
        name, why = {"cpu": "cpu", "cuda": "gpu"}[device], f"training.device is {device}"
    else:
        probe = probe_machine()
        name = "gpu" if probe.gpus else "cpu"
        why = f"{len(probe.gpus)} x {probe.gpus[0].name}" if probe.gpus else probe.why_no_gpu
    return (name, why) if name in profiles else (None, f"{why}, and the config has no profile {name}")
