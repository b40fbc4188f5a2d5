"""A CPU as a verl device. verl 0.9.1 ships platforms for NVIDIA, AMD and Ascend only (verl/plugin/platform/).

Memory figures are those of the process: what verl calls allocated device memory is the resident set here, so that
`perf/max_memory_allocated_gb` says something true on a laptop too.
"""

from __future__ import annotations

import contextlib
import resource
import types
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

_KIB = 1024


def resident_bytes(*_: Any) -> int:
    """Memory of this process now, in bytes."""
    return psutil.Process().memory_info().rss


def peak_resident_bytes(*_: Any) -> int:
    """Largest memory of this process so far, in bytes (Linux reports KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


def memory_info(*_: Any) -> tuple[int, int]:
    """(free, total) bytes of the host."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _nothing(*_: Any, **__: Any) -> None:
    """The call has no meaning on a CPU."""


class _CpuDevice(types.ModuleType):
    """`torch.cpu` with what verl expects of a `torch.<device>` module (workers/engine_workers.py:218 and others)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def _cpu_device_module() -> types.ModuleType:
    module = _CpuDevice("quickstart_cpu_device")
    calls: dict[str, Any] = dict.fromkeys(
        ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"), _nothing
    )
    calls |= dict.fromkeys(("memory_allocated", "memory_reserved"), resident_bytes)
    calls |= dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), peak_resident_bytes)
    calls |= {
        "is_available": lambda: True,
        "current_device": lambda: "cpu",
        "device_count": lambda: 1,
        "mem_get_info": memory_info,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "get_device_name": lambda *_: "cpu",
    }
    for name, call in calls.items():
        setattr(module, name, call)
    return module


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """The host's processor. Chosen by `VERL_PLATFORM=cpu`; never picked by verl's probing while CUDA is there."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _cpu_device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return not torch.cuda.is_available()

    def current_device(self) -> Any:
        return "cpu"  # verl hands this to Tensor.to(): an index would mean a CUDA device

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """One device only."""

    def synchronize(self, device_index: int | None = None) -> None:
        """CPU work is synchronous."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The host allocator has none."""

    def empty_cache(self) -> None:
        """The host allocator has no cache of its own."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "QUICKSTART_CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        # single_controller/ray/base.py:233 counts node resources named GPU only; Ray is started with logical ones.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
