"""Fill in every "auto" and say why. Reads the machine through a Probe, so a test can invent one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quickstart.arguments import GROUP_TYPES, SECTIONS, RunConfig
from quickstart.config import rules
from quickstart.config.profile import Probe, probe_machine
from quickstart.errors import Fault, UserError


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One value that nobody wrote, and the reason for it."""

    field: str
    value: Any
    why: str


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A RunConfig without "auto", and what was chosen for it."""

    cfg: RunConfig
    choices: tuple[Choice, ...]


ROOMY_GIB = 24  # from here on a 0.5B model keeps its activations


def resolve(cfg: RunConfig, probe: Probe | None = None) -> Resolved:
    """Fill in "auto" in the order of CHOOSERS, each seeing the ones before. Raises UserError where nothing fits."""
    probe = probe or probe_machine()
    check_device(cfg, probe)
    choices: list[Choice] = []
    for key, choose in CHOOSERS:
        if rules.value_of(cfg, key) == "auto":
            value, why = choose(cfg, probe)
            cfg = with_value(cfg, key, value)
            if is_read(cfg, key):
                choices.append(Choice(field=key, value=value, why=why))
    faults = [fault for fault, _ in rules.check_rules(cfg)] + missing_packages(cfg, probe)
    if faults:
        raise UserError(faults)
    return Resolved(cfg=with_notices(cfg), choices=tuple(choices))


def is_read(cfg: RunConfig, key: str) -> bool:
    """Whether this rl_type reads the field; a choice for nobody is not worth a line."""
    section, name = key.split(".")
    field = next(f for f in dataclasses.fields(SECTIONS[section]) if f.name == name)
    return not field.metadata["used_by"] or cfg.rl.rl_type in field.metadata["used_by"]


def with_value(cfg: RunConfig, key: str, value: Any) -> RunConfig:
    """A copy with one `section.key` changed."""
    section, name = key.split(".")
    changed: Any = dataclasses.replace(vars(cfg)[section], **{name: value})
    return dataclasses.replace(cfg, **{section: changed})


def check_device(cfg: RunConfig, probe: Probe) -> None:
    """A GPU that was asked for must be there."""
    wanted = cfg.training.num_devices
    if cfg.training.device == "cuda" and not probe.gpus:
        fault = Fault(
            field="training.device", found="cuda", rule=f"no usable GPU: {probe.why_no_gpu}", fix="write auto or cpu"
        )
        raise UserError(fault)
    there = len(probe.gpus) if cfg.training.device != "cpu" and probe.gpus else None
    if wanted != "auto" and there is not None and wanted > there:
        fix = f"write {there} or less"
        raise UserError(
            Fault(field="training.num_devices", found=str(wanted), rule=f"this machine shows {there} GPU(s)", fix=fix)
        )


def missing_packages(cfg: RunConfig, probe: Probe) -> list[Fault]:
    """What was asked for must be installed."""
    faults = []
    if cfg.model.use_flash_attention_2 and not probe.has_flash_attention:
        rule, fix = "the flash-attn package is not installed", "write false, or install flash-attn"
        faults.append(Fault(field="model.use_flash_attention_2", found="true", rule=rule, fix=fix))
    if rules.rollout(cfg) and cfg.rl.rollout_engine == "vllm" and not probe.has_vllm:
        rule, fix = "the vllm package is not installed", "write hf or auto, or pip install 'quickstart-rl[gpu]'"
        faults.append(Fault(field="rl.rollout_engine", found="vllm", rule=rule, fix=fix))
    return faults


OFFLOADS = ("actor_offload", "critic_offload", "reward_offload", "reference_offload")


def with_notices(cfg: RunConfig) -> RunConfig:
    """Say which settings do nothing on this device."""
    idle = [f"rl.{name}" for name in OFFLOADS if vars(cfg.rl)[name]]
    if cfg.training.device != "cpu" or not idle:
        return cfg
    notice = f"on a CPU everything is in host memory already, so these do nothing: {', '.join(idle)}"
    return dataclasses.replace(cfg, source=dataclasses.replace(cfg.source, notices=(*cfg.source.notices, notice)))


def choose_device(cfg: RunConfig, probe: Probe) -> tuple[Any, str]:
    if probe.gpus:
        gpu = probe.gpus[0]
        return "cuda", f"{gpu.name}, {gpu.memory_bytes / 2**30:.0f} GiB"
    return "cpu", probe.why_no_gpu


def choose_num_devices(cfg: RunConfig, probe: Probe) -> tuple[Any, str]:
    if cfg.training.device == "cuda" and len(probe.gpus) > 1:
        return 1, f"{len(probe.gpus)} GPUs are there; training.num_devices={len(probe.gpus)} uses all"
    return 1, "one device"


def choose_backend(cfg: RunConfig, probe: Probe) -> tuple[Any, str]:
    if rules.devices(cfg) == 1:
        return "local", "one device: one process, no cluster to start"
    return "ray", f"{rules.devices(cfg)} devices"


def choose_dtype(cfg: RunConfig, probe: Probe) -> tuple[Any, str]:
    if cfg.training.device == "cpu":
        return "float32", "exact, and CPUs are not faster in less"
    major, minor = probe.gpus[0].capability
    if major >= 8:
        return "bfloat16", f"the GPU has it (compute capability {major}.{minor})"
    return "float16", f"the GPU has no bfloat16 (compute capability {major}.{minor}, 8.0 has)"


def choose_checkpointing(cfg: RunConfig, probe: Probe) -> tuple[Any, str]:
    if cfg.training.memory_budget_gb is not None:
        return False, "the memory budget does not need it, and it would cost time"  # else doctor.fit changes it
    if cfg.training.device == "cpu":
        return False, "host memory suffices, and it would cost time"
    memory = probe.gpus[0].memory_bytes / 2**30
    if memory >= ROOMY_GIB:
        return False, f"{memory:.0f} GiB of device memory suffice, and it would cost time"
    return True, f"saves device memory, of which there are {memory:.0f} GiB"


def choose_threads(cfg: RunConfig, probe: Probe) -> tuple[Any, str]:
    return probe.cpus, "CPUs that this process may use"


def choose_generations(cfg: RunConfig, probe: Probe) -> tuple[Any, str]:
    if cfg.rl.rl_type in GROUP_TYPES:
        return rules.generations(cfg), "this method compares the answers to one prompt"
    return rules.generations(cfg), "this method needs one answer per prompt"


def choose_kl_placement(cfg: RunConfig, probe: Probe) -> tuple[Any, str]:
    return rules.kl_place(cfg), "usual for this method"


def choose_kl_estimator(cfg: RunConfig, probe: Probe) -> tuple[Any, str]:
    if rules.kl_place(cfg) == "loss":
        return "low_var_kl", "never negative and of low variance, right as a loss"
    return "kl", "unbiased, right inside a reward"


def choose_engine(cfg: RunConfig, probe: Probe) -> tuple[Any, str]:
    """hf, however many steps are planned: vllm starts later and takes longer a step.

    Measured side by side on one H200 (0.5B model, 12,800 answer tokens a step, PPO): command to first update 28 s with
    hf and 103 s with vllm; a later rollout 0.7 s with hf's graphs and 2.2 s with vllm. Without graphs (layers with a
    sliding window) hf takes 2.2 s.
    """
    return "hf", "first to start, and no engine measured faster in later steps"


def choose_beta(cfg: RunConfig, probe: Probe) -> tuple[Any, str]:
    return (2.0, "as in the SimPO paper") if cfg.rl.rl_type == "simpo" else (0.1, "usual for this method")


Chooser = Callable[[RunConfig, Probe], tuple[Any, str]]
# Order matters: the dtype follows the device. kto's weights stay "auto", they follow from the counts in the data.
CHOOSERS: tuple[tuple[str, Chooser], ...] = (
    ("training.device", choose_device),
    ("training.num_devices", choose_num_devices),
    ("training.backend", choose_backend),
    ("training.num_threads", choose_threads),
    ("model.torch_dtype", choose_dtype),
    ("model.gradient_checkpointing", choose_checkpointing),
    ("rl.num_generations", choose_generations),
    ("rl.kl_placement", choose_kl_placement),
    ("rl.kl_estimator", choose_kl_estimator),
    ("rl.rollout_engine", choose_engine),
    ("rl.beta", choose_beta),
)
