"""The memory plan against what there is, and what would make it smaller.

Pure functions. Not here: the plan's arithmetic (memory.py) and the machine's facts (machine.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from quickstart.arguments import CRITIC_TYPES, PREFERENCE_TYPES, RunConfig
from quickstart.doctor.finding import Finding, error, note, ok, warning
from quickstart.doctor.machine import Machine, gigabytes
from quickstart.doctor.memory import RESERVE, Item, MemoryPlan, Place

MARGIN = 0.15  # the plan may be off by so much: only beyond it a run is refused
WORTH = 0.03  # share of the peak that a change must save to be named
LORA_RANK = 16
Planner = Callable[[RunConfig], MemoryPlan]


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One change of the settings and what it does to the peak."""

    change: str  # as typed on the command line
    bytes_saved: int  # at the peak, in the place that is looked at
    price: str


def savings(cfg: RunConfig, plan: MemoryPlan, place: Place, replan: Planner) -> list[Saving]:
    """What offload, LoRA, checkpointing or a smaller micro batch would save, the most first."""
    before, _ = plan.peak(place)
    found = []
    for change, price, changed in changes(cfg):
        saved = before - replan(changed).peak(place)[0]
        if saved > WORTH * before:
            found.append(Saving(change=change, bytes_saved=saved, price=price))
    return sorted(found, key=lambda saving: -saving.bytes_saved)


def changes(cfg: RunConfig) -> list[tuple[str, str, RunConfig]]:
    """(setting as typed, its price, settings with it) for everything that can be made smaller here."""
    rl, model = cfg.rl, cfg.model
    found: list[tuple[str, str, RunConfig]] = []

    def add(change: str, price: str, **values: object) -> None:
        new_rl = dataclasses.replace(rl, **{k: v for k, v in values.items() if k in vars(rl)})  # type: ignore[arg-type]
        new_model = dataclasses.replace(model, **{k: v for k, v in values.items() if k in vars(model)})  # type: ignore[arg-type]
        found.append((change, price, dataclasses.replace(cfg, rl=new_rl, model=new_model)))

    if cfg.training.device != "cpu":
        roles = ["actor", *(["critic"] if rl.rl_type in CRITIC_TYPES else [])]
        roles += [] if rl.rl_type in PREFERENCE_TYPES else ["reference"]
        for role in roles:
            if vars(rl)[f"{role}_offload"] is None:
                add(f"rl.{role}_offload=cpu", "copies in each step", **{f"{role}_offload": "cpu"})
    if not model.lora_rank:
        add(f"model.lora_rank={LORA_RANK}", "trains adapters only", lora_rank=LORA_RANK)
    if not model.gradient_checkpointing:
        add("model.gradient_checkpointing=true", "about 30% slower updates", gradient_checkpointing=True)
    micro = rl.per_device_train_batch_size
    if micro % 2 == 0:
        half, passes = micro // 2, rl.gradient_accumulation_steps * 2
        change = f"rl.per_device_train_batch_size={half} rl.gradient_accumulation_steps={passes}"
        add(change, "same update, slower", per_device_train_batch_size=half, gradient_accumulation_steps=passes)
    return found


def place_of(cfg: RunConfig) -> Place:
    """Where memory is scarce."""
    return "host" if cfg.training.device == "cpu" else "device"


def judge_budget(
    plan: MemoryPlan,
    machine: Machine,
    device_bytes: int | None,
    ways: list[Saving],
    device_free: int | None = None,
) -> list[Finding]:
    """The plan against the device and the host. device_bytes: of the GPU or training.memory_budget_gb; None: a CPU run.

    ways: of the place that matters, the device where there is one. device_free: None, it is not known.
    """
    findings: list[Finding] = []
    if device_bytes is not None:
        found = judge_device(plan, device_bytes, ways, device_free)
        findings.append(dataclasses.replace(found, data=plan.table("device")))
    found = judge_host(plan, machine, ways if device_bytes is None else [])
    return [*findings, dataclasses.replace(found, data=plan.table("host"))]


def judge_device(plan: MemoryPlan, device_bytes: int, ways: list[Saving], free: int | None = None) -> Finding:
    """A GPU is used up to RESERVE; beyond the plan's own error the run is refused. What others hold may go: warned."""
    check, (peak, phase) = "device memory plan", plan.peak("device")
    found = f"{gigabytes(peak)} of {gigabytes(device_bytes)} in the phase `{phase}` ({words(plan, 'device')})"
    fix = advice(ways)
    if peak > device_bytes * (1 + MARGIN):
        return error(check, found, fix, rule="it does not fit", field="training.memory_budget_gb")
    if free is not None and peak > free:
        rule = f"{gigabytes(free)} are free now, the rest is taken by other programs"
        return warning(check, found, f"end the other programs on the GPU (nvidia-smi lists them), or {fix}", rule=rule)
    if peak > device_bytes * (1 - RESERVE):
        return warning(check, found, fix, rule=f"it fits barely; {RESERVE:.0%} should stay free")
    return ok(check, found)


def judge_host(plan: MemoryPlan, machine: Machine, ways: list[Saving]) -> Finding:
    """Host memory: refused where it can never fit, warned where it does not fit now."""
    check, (peak, phase) = "host memory plan", plan.peak("host")
    there = min(machine.ram_bytes, machine.limit_bytes or machine.ram_bytes)
    found = f"{gigabytes(peak)} in the phase `{phase}` ({words(plan, 'host')})"
    fix = advice(ways) if ways else "take a smaller model, less offload, or a machine with more memory"
    if peak > there * (1 + MARGIN):
        rule = f"this process may have {gigabytes(there)}; beyond it the system kills it (exit code 137)"
        return error(check, found, fix, rule=rule)
    if peak > machine.usable_bytes:
        rule = f"{gigabytes(machine.usable_bytes)} are free now; beyond it the system kills it (exit code 137)"
        return warning(check, found, f"close other programs, or {fix}", rule=rule)
    return ok(check, f"{found}; {gigabytes(machine.usable_bytes)} are free")


def judge_savings(ways: list[Saving]) -> list[Finding]:
    """What there is to gain, also where it fits."""
    if not ways:
        return []
    return [note("memory savings", "; ".join(saving_words(way) for way in ways))]


def saving_words(way: Saving) -> str:
    """model.lora_rank=16 saves 5.9 GB (trains adapters only)."""
    return f"{way.change} saves {gigabytes(way.bytes_saved)} ({way.price})"


def advice(ways: list[Saving]) -> str:
    """The best ways out, as an instruction."""
    if not ways:
        return "take a smaller model, or shorten data.max_response_length"
    return "set " + ", or ".join(f"{way.change} (saves {gigabytes(way.bytes_saved)})" for way in ways[:3])


def words(plan: MemoryPlan, place: Place) -> str:
    """The largest items of the largest phase."""
    _, phase = plan.peak(place)
    return ", ".join(item_words(item) for item in plan.largest(place, phase))


def item_words(item: Item) -> str:
    """actor Adam 4.0 GB."""
    return f"{item.role} {item.kind} {gigabytes(item.size)}"
