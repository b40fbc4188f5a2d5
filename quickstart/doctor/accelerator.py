"""torch against the driver, the GPU, collectives, flash-attn, vllm and our plugin in verl: facts to findings.

Facts come from version files, the driver (config.profile) and child processes (children.py). Nothing here imports
torch.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from quickstart.arguments import RunConfig
from quickstart.config import Gpu, Probe
from quickstart.doctor.children import Answer
from quickstart.doctor.finding import Finding, error, note, ok, warning

AMPERE = (8, 0)  # the first compute capability with bfloat16 and flash-attn 2 kernels
CPU_WHEEL = "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
FLASH_FIX = "pip install flash-attn --no-build-isolation (a source build against the installed torch), or uninstall it"


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """What torch's version file says."""

    version: str
    cuda: str | None  # the CUDA it was built for, "13.0"; None: a build without CUDA


def torch_build() -> TorchBuild | None:
    """Read from torch/version.py, since importing torch takes seconds. None: not installed."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text()
    version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b[^=]*=\s*['\"](\d[^'\"]*)", text, re.MULTILINE)
    return TorchBuild(version=version[1] if version else "unknown", cuda=cuda[1] if cuda else None)


def driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the installed driver runs, as (major, minor); None: no driver. Starts nothing."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(number))
    return number.value // 1000, number.value % 1000 // 10


def judge_torch(build: TorchBuild | None, driver: tuple[int, int] | None, device: str) -> Finding:
    """CUDA's own rule: a driver runs every build of its major version, and of older ones."""
    if build is None:
        return error("torch", "not installed", f"on a CPU: {CPU_WHEEL}; on a GPU: pip install 'quickstart-rl[gpu]'")
    if device == "cpu":
        tail = "" if build.cuda is None else f" (built for CUDA {build.cuda}, unused)"
        return ok("torch", f"{build.version}, run on the CPU{tail}")
    if build.cuda is None:
        found, rule = f"{build.version}, a build without CUDA", "training.device is cuda"
        return error("torch", found, "pip install 'quickstart-rl[gpu]', or set training.device=cpu", rule=rule)
    if driver is None:
        found = f"{build.version} for CUDA {build.cuda}, and no CUDA driver"
        return error("torch", found, "install the NVIDIA driver, or set training.device=cpu")
    if int(build.cuda.split(".")[0]) > driver[0]:
        found = f"{build.version} for CUDA {build.cuda}, with a driver for CUDA {driver[0]}.{driver[1]}"
        fix = f"update the driver, or install a torch built for CUDA {driver[0]} (pytorch.org, wheel cu{driver[0]}x)"
        return error("torch", found, fix, rule="a driver runs builds up to its own major version")
    return ok("torch", f"{build.version} for CUDA {build.cuda}, driver for CUDA {driver[0]}.{driver[1]}")


def judge_idle_gpu(
    build: TorchBuild | None, driver: tuple[int, int] | None, probe: Probe, device: str
) -> list[Finding]:
    """A GPU that is there and not used, which otherwise shows only as slowness."""
    if device != "cpu" or driver is None:
        return []
    if build is not None and build.cuda is None:
        fix = "for the GPU: pip install 'quickstart-rl[gpu]'; for the CPU all is well"
        return [warning("gpu", "a CUDA driver is here, but torch is a build without CUDA, so the CPU trains", fix)]
    if probe.gpus:
        return [note("gpu", f"{probe.gpus[0].name} is here and not used", "set training.device=cuda or auto")]
    return [note("gpu", f"not usable: {probe.why_no_gpu}")]


def judge_gpu(gpus: tuple[Gpu, ...], cfg: RunConfig) -> list[Finding]:
    """Which settings follow from the card's generation."""
    if not gpus:
        return [ok("gpu", "none; the CPU trains")]
    gpu = gpus[0]
    more = f" and {len(gpus) - 1} more" if len(gpus) > 1 else ""
    capability = f"compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    text = f"{gpu.name}{more}, {gpu.memory_bytes / 2**30:.0f} GiB, {capability}"
    if gpu.capability >= AMPERE:
        return [ok("gpu", text)]
    findings = [
        note("gpu", f"{text}, before Ampere: float16 instead of bfloat16, sdpa instead of flash-attn, eager vllm")
    ]
    rule = f"{capability}; it needs 8.0 (Ampere)"
    if cfg.model.torch_dtype == "bfloat16":
        fix = "write auto, float16 or float32"
        findings.append(warning("gpu", "bfloat16", fix, field="model.torch_dtype", rule=f"emulated, slow: {rule}"))
    if cfg.model.use_flash_attention_2:
        fix = "write false; torch's own attention (sdpa) is used"
        findings.append(error("gpu", "true", fix, field="model.use_flash_attention_2", rule=rule))
    return findings


def judge_kernel(answer: Answer) -> Finding:
    """A small product on the device, in a child process."""
    if answer.failure:
        done = ", ".join(answer.facts) or "nothing"
        found = f"a 256 x 256 product failed: {answer.failure} (done before: {done})"
        fix = "torch does not fit this card or its driver: pip install 'quickstart-rl[gpu]', or set training.device=cpu"
        return error("cuda kernel", found, fix, rule="a kernel must run before training can")
    names = ", ".join(name for name, value in answer.facts.items() if value == "ok")
    return ok("cuda kernel", f"products in {names} are right ({answer.seconds:.1f} s)")


def judge_collectives(answer: Answer, devices: int) -> Finding:
    """One process needs gloo; several GPUs need NCCL."""
    facts = answer.facts
    if "gloo" not in facts:
        fix = f"reinstall torch (on a CPU: {CPU_WHEEL})"
        return error("torch import", f"it fails: {answer.failure}", fix, rule="torch must import")
    have = [name for name in ("gloo", "nccl") if facts[name]]
    found = f"torch {facts['torch']} has {' and '.join(have) or 'no backend'}"
    if not facts["gloo"]:
        return error("collectives", found, "install a torch build with gloo", rule="a run in one process uses gloo")
    if devices > 1 and not facts["nccl"]:
        fix = "install a CUDA build of torch, or set training.num_devices=1"
        return error("collectives", found, fix, field="training.num_devices", rule="several GPUs talk through NCCL")
    return ok("collectives", found)


def judge_plugin(answer: Answer) -> Finding:
    """verl swallows a plugin that fails to load and goes on as if there were none."""
    facts = answer.facts
    if facts.get("plugin") == "registered":
        return ok("plugin in verl", f"registered in verl {facts['verl']} ({answer.seconds:.1f} s)")
    if "verl" not in facts:
        fix = "reinstall the pinned set: pip install -e . (scripts/install.sh)"
        return error("verl import", f"it fails: {answer.failure}", fix, rule="verl must import")
    rule = "verl loads it by the entry point `verl.plugins`, and says nothing where that fails"
    if facts.get("plugin") == "no entry point":
        fix = "install the package, do not only put it on the path: pip install -e ."
        return error("plugin in verl", "quickstart has no entry point here", fix, rule=rule)
    if answer.failure:
        return error("plugin in verl", f"it does not load: {answer.failure}", "reinstall: pip install -e .", rule=rule)
    fix = "unset VERL_USE_EXTERNAL_PLUGINS, or set it to auto"
    return error("plugin in verl", "verl was told not to load it", fix, rule=rule)


def judge_flash(installed: str | None, answer: Answer | None, torch: str, cfg: RunConfig) -> Finding:
    """Optional everywhere. answer: of the child that imports it, None where it is not installed."""
    asked = cfg.model.use_flash_attention_2 or cfg.model.reward_use_flash_attention_2
    field = "model.use_flash_attention_2" if asked else ""
    changes = "torch's sdpa attends, and rows are padded instead of packed (use_remove_padding off)"
    if installed is None or answer is None:
        if asked:
            return error(
                "flash-attn", "not installed", f"write false, or {FLASH_FIX}", field=field, rule="it was asked for"
            )
        return ok("flash-attn", f"not installed, and not needed: {changes}")
    if answer.failure:
        found = f"{installed} does not import beside torch {torch}: {answer.failure}"
        rule = "it was built for another torch"
        if asked:
            return error("flash-attn", found, f"write false, or {FLASH_FIX}", field=field, rule=rule)
        fix = f"{FLASH_FIX}; transformers and verl look for it"
        return warning("flash-attn", found, fix, rule=rule)
    use = "used: rows are packed" if asked else f"installed, not asked for: {changes}"
    return ok("flash-attn", f"{installed}, {use}")


def judge_vllm(version: str | None, wants: str | None, torch: TorchBuild | None, cfg: RunConfig) -> Finding:
    """wants: the torch that the installed vllm pins. vllm replaces torch in silence when it is installed."""
    used = cfg.rl.rollout_engine == "vllm"
    if version is None:
        if used:
            fix = "write hf, or pip install 'quickstart-rl[gpu]'"
            return error("vllm", "not installed", fix, field="rl.rollout_engine", rule="it was asked for")
        return ok("vllm", "not installed, and not needed: the rollout engine is hf")
    if wants and torch and not SpecifierSet(wants).contains(Version(torch.version).public):
        found = f"vllm {version} is built for torch {wants}, installed is {torch.version}"
        fix = "pip install 'quickstart-rl[gpu]', which has a pair that fits"
        if used:
            return error(
                "vllm", found, fix, field="rl.rollout_engine", rule="its kernels do not load with another torch"
            )
        return note("vllm", f"{found}; the rollout engine is hf, so it is not loaded", fix)
    return ok("vllm", f"{version}, for torch {wants or 'of any version'}")


def judge_vllm_import(answer: Answer) -> Finding:
    """What versions do not show: its libraries load with the import, and want this torch and this driver."""
    if answer.failure:
        fix = "write hf, or pip install 'quickstart-rl[gpu]', whose vllm and torch fit each other"
        return error(
            "vllm import", f"it fails: {answer.failure}", fix, field="rl.rollout_engine", rule="it was asked for"
        )
    return ok("vllm import", f"{answer.facts['vllm']} ({answer.seconds:.1f} s)")
