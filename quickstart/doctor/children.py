"""Questions that only an import can answer, asked in child processes that may crash, hang or take their time.

A child prints JSON lines, so that what it found before it died is kept. Children run side by side while the other
checks look at files. Not here: what the answers mean (accelerator.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

# torch, then verl with our plugin in one process: verl imports torch anyway. A plugin that fails to load is only
# logged at DEBUG by verl (verl/__init__.py:73), so it is looked for here, and loaded again to see why.
STACK = """
import json, sys
def say(**facts): print(json.dumps(facts), flush=True)
import torch
say(torch=torch.__version__, cuda=torch.version.cuda, gloo=torch.distributed.is_gloo_available(),
    nccl=torch.distributed.is_nccl_available())
sys.modules["vllm"] = None  # 10 s of imports that verl's own import would add
import verl
say(verl=verl.__version__)
from verl.plugin.platform import PlatformRegistry
if "cpu" in PlatformRegistry._platforms:
    say(plugin="registered")
else:
    from importlib.metadata import entry_points
    ours = [e for e in entry_points(group="verl.plugins") if e.name == "quickstart"]
    if not ours:
        say(plugin="no entry point")
    else:
        ours[0].load()
        say(plugin="not loaded by verl")
"""

# A product of two matrices of ones, checked against the number that it must be, in each dtype that the device has.
KERNEL = """
import json, torch
for name in ("float32", "float16", "bfloat16"):
    if name == "bfloat16" and torch.cuda.get_device_capability()[0] < 8:
        continue
    a = torch.ones(256, 256, dtype=getattr(torch, name), device="cuda")
    assert float((a @ a).float().sum()) == 256.0**3, name
    print(json.dumps({name: "ok"}), flush=True)
print(json.dumps({"device": torch.cuda.get_device_name(), "free": torch.cuda.mem_get_info()[0]}), flush=True)
"""

FLASH = """
import json
import flash_attn
from flash_attn import flash_attn_func
print(json.dumps({"flash_attn": flash_attn.__version__}), flush=True)
"""

VLLM = """
import json
import vllm
print(json.dumps({"vllm": vllm.__version__}), flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a child said before it ended."""

    facts: dict[str, Any] = field(default_factory=dict)
    failure: str = ""  # why it did not come to its end; empty: it did
    seconds: float = 0.0


class Child:
    """A running question. Start it early, ask for the answer late.

    Args:
        code: Python that prints JSON objects, one a line.
        timeout: seconds from the start until it is ended.
        environment: variables beside the present ones.
    """

    def __init__(self, code: str, *, timeout: float, environment: dict[str, str] | None = None) -> None:
        self._began, self._timeout = time.monotonic(), timeout
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # so that what it started ends with it
        )

    def answer(self) -> Answer:
        """Wait for its end, at most until the timeout."""
        left = max(self._timeout - (time.monotonic() - self._began), 0.1)
        try:
            out, complaint = self._process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            self.end()
            out, _ = self._process.communicate()
            return self._answer(out, f"no end after {self._timeout:.0f} s")
        return self._answer(out, self._reason(complaint))

    def end(self) -> None:
        """Stop it where it still runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _answer(self, out: str, failure: str) -> Answer:
        facts: dict[str, Any] = {}
        for line in out.splitlines():
            if line.startswith("{"):
                facts |= json.loads(line)
        return Answer(facts=facts, failure=failure, seconds=time.monotonic() - self._began)

    def _reason(self, complaint: str) -> str:
        code = self._process.returncode
        if code == 0:
            return ""
        if code < 0:
            return f"ended by signal {signal.Signals(-code).name}"
        lines = complaint.strip().splitlines()
        return lines[-1][:300] if lines else f"exit code {code}"


def stack_child(device: str) -> Child:
    """torch, verl and our plugin."""
    variables = {"VERL_PLATFORM": "cpu"} if device == "cpu" else {}
    return Child(STACK, timeout=60, environment=variables)


def kernel_child() -> Child:
    """A kernel on the first CUDA device."""
    return Child(KERNEL, timeout=60)


def flash_child() -> Child:
    """The import of flash-attn, which fails where it was built for another torch."""
    return Child(FLASH, timeout=60)


def vllm_child() -> Child:
    """The import of vllm, which takes 10 s and fails where it was built for another torch."""
    return Child(VLLM, timeout=120)
