"""This process made ready for verl without Ray: variables, threads, seeds, and a process group of one.

The variables must be set before torch and verl are imported: they are read then.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from quickstart.arguments import RunConfig
from quickstart.errors import Fault, RunError

# verl's workers read these as torchrun would set them (single_controller/base/worker.py:190).
ONE_PROCESS = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
QUIET = {
    # Threads of torch wait asleep, after a short spin. By default they spin for milliseconds: beside one other busy
    # process on 2 cores a step of 0.8 s took 11 s. Asleep at once it takes 1.1 s there, and 0.73 s alone;
    # with this spin 0.60 s alone and 1.8 s beside another. libgomp reads both when torch is imported.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "10000",
    "RAY_ENABLE_AUTO_CONNECT": "0",  # a stray ray.get must fail, not start a cluster
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


def set_variables(device: str) -> None:
    """Environment variables of a local run; what the user has set stays, but for the process group's."""
    os.environ.update(ONE_PROCESS)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"


def keep_datasets_in(folder: Path) -> None:
    """verl reads rows with the datasets library, which copies them into its own cache: here, not in the home folder,
    which may be full or not writable."""
    path = folder / "datasets"
    os.environ["HF_DATASETS_CACHE"] = str(path)
    loaded = sys.modules.get("datasets")
    if loaded is not None:
        loaded.config.HF_DATASETS_CACHE = path


@contextmanager
def awake(cfg: RunConfig) -> Iterator[None]:
    """A GPU does its first products beside what happens inside: its context and cuBLAS take half a second.

    Not where verl is to be deterministic: it sets what cuBLAS reads with its first product (workers/engine/utils.py).
    """
    if cfg.training.device != "cuda" or any("full_determinism" in key for key in cfg.verl):
        yield
        return
    thread = threading.Thread(target=_first_product, args=("cuda",), name="quickstart-wake", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _first_product(device: str) -> None:
    import torch

    with suppress(Exception):  # what is wrong with the device the run meets itself, where it can say what it was doing
        for dtype in (torch.float32, torch.bfloat16):
            torch.ones(64, 64, dtype=dtype, device=device).matmul(torch.ones(64, 64, dtype=dtype, device=device)).sum()


def set_threads(count: int) -> None:
    """CPU threads of torch. Without this a container's torch starts one a host core."""
    import torch

    torch.set_num_threads(count)


@contextmanager
def imports_whole() -> Iterator[None]:
    """A Ctrl-C inside waits for the end of the block; a second one does not.

    An import that is cut off leaves half a module behind, and libraries turn the interruption into errors of their own
    (omegaconf: 'NoneType' object has no attribute '_invalidate_flags_cache').
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


@contextmanager
def memory_limit(device: str, budget_gib: float | None) -> Iterator[None]:
    """On a GPU this process's tensors take no more than the budget inside the block, or the run ends and says so.

    What nvidia-smi shows stays under it: the CUDA context and libraries, which torch does not count, are taken off. On
    a CPU nothing is capped: there the plan alone holds.

    Raises:
        RunError: the budget did not suffice.
    """
    if device != "cuda" or budget_gib is None:
        yield
        return
    import torch

    from quickstart.doctor.memory import DEVICE_BASE

    total = torch.cuda.get_device_properties(0).total_memory
    tensors = max(budget_gib * 2**30 - DEVICE_BASE, 0)
    torch.cuda.set_per_process_memory_fraction(min(1.0, tensors / total), 0)
    try:
        yield
    except torch.OutOfMemoryError as error:
        rule = f"the GPU memory of this budget did not suffice: {str(error).strip().splitlines()[0]}"
        fix = "write more, or a smaller rl.per_device_train_batch_size or data.max_response_length"
        raise RunError(Fault(field="training.memory_budget_gb", found=f"{budget_gib:g}", rule=rule, fix=fix)) from error
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


def seed_everything(seed: int) -> None:
    """Python's, numpy's and torch's generators, all devices."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def process_group() -> Iterator[None]:
    """A process group of this one process, without a port or a child.

    gloo on a GPU too: with one rank there is nothing to send, and starting NCCL costs about a second. Must exist before
    verl's workers, which would ask for "cpu:gloo,cpu:gloo" on a CPU (utils/distributed.py:89) and fail.
    """
    import torch.distributed as dist

    if dist.is_initialized():  # a notebook's earlier run
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
