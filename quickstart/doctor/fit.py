"""Settings chosen so that the memory plan stays under training.memory_budget_gb, the cheapest in time first.

Pure functions of settings and a planner. What somebody set stays as it is (config.explicit), and so do the samples of
an update: a smaller micro batch has more passes, and losses stay what they were. Not here: the plan's arithmetic
(memory.py), and the cap on a GPU's allocator (trainers.environment).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quickstart.arguments import CRITIC_TYPES, PREFERENCE_TYPES, ROLLOUT_TYPES, RunConfig
from quickstart.config import Choice, Resolved, is_explicit, with_value
from quickstart.config.explicit import BATCH
from quickstart.config.rules import value_of
from quickstart.doctor.budget import Planner, place_of, words
from quickstart.doctor.finding import Finding, ok
from quickstart.doctor.memory import RESERVE, MemoryPlan
from quickstart.errors import Fault, UserError

FIELD = "training.memory_budget_gb"
CHECKPOINTING = "model.gradient_checkpointing"
GIB = 2**30
# What a change costs in time, in numbers that only compare. Copies of a role that rests come before more passes: all of
# them together cost less than one halving of the micro batch, and three halvings less than computing activations twice.
OFFLOAD_PRICES = {"reference": 1, "reward": 1, "critic": 3, "actor": 4}
HALVING_PRICE, CHECKPOINTING_PRICE = 10, 35
RESTS = {
    "reference": "its weights wait in host memory until log-probs are taken",
    "reward": "its weights wait in host memory until answers are scored",
    "critic": "its weights and Adam's moments wait in host memory until its update",
    "actor": "its weights and Adam's moments wait in host memory until they are used",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """Settings that make the plan smaller, and the reason that is shown for each of them."""

    values: Mapping[str, tuple[Any, str]]  # `section.key` -> (value, why)
    price: float


Combination = tuple[Change, ...]


def budget_bytes(cfg: RunConfig, card: int | None = None) -> int:
    """training.memory_budget_gb in bytes; no more than the card has."""
    assert cfg.training.memory_budget_gb is not None, "asked for with a budget only"
    wanted = int(cfg.training.memory_budget_gb * GIB)
    return min(wanted, card) if card is not None else wanted


def fit(cfg: RunConfig, choices: Sequence[Choice], plan: Planner, card: int | None = None) -> Resolved:
    """The cheapest combination of changes whose peak stays under the budget; on a GPU RESERVE of it stays free.

    Args:
        cfg: resolved settings with a memory budget.
        choices: what was chosen for "auto" so far.
        plan: the memory plan of changed settings.
        card: bytes of the GPU; None: a CPU, whose budget is host memory.

    Raises:
        UserError: no combination fits.
    """
    limit, free = budget_bytes(cfg, card) * usable(cfg), open_fields(cfg, choices)
    peaks = {each: plan(changed(cfg, each)).peak(place_of(cfg))[0] for each in combinations(cfg, free)}
    for combination, peak in peaks.items():
        if peak <= limit:
            return Resolved(cfg=changed(cfg, combination), choices=told(cfg, choices, combination, plan))
    least = min(peaks, key=lambda each: peaks[each])
    raise UserError(too_small(cfg, plan(changed(cfg, least)), card, free))


def usable(cfg: RunConfig) -> float:
    """The share of a budget that the plan may fill: a GPU's allocator is held to it, and needs room to move."""
    return 1.0 if cfg.training.device == "cpu" else 1 - RESERVE


def levers(cfg: RunConfig) -> list[str]:
    """Settings that could make this run's plan smaller without changing what it learns."""
    rl = cfg.rl
    roles = ["reference"] if rl.rl_type not in PREFERENCE_TYPES else []
    roles += ["reward"] if rl.rl_type in ROLLOUT_TYPES and rl.reward == "model" else []
    roles += ["critic"] if rl.rl_type in CRITIC_TYPES else []
    offloads = [f"rl.{role}_offload" for role in [*roles, "actor"] if vars(rl)[f"{role}_offload"] is None]
    batch = BATCH if rl.rl_type != "kto" else ()  # its KL is estimated within a micro batch
    return [
        *(offloads if cfg.training.device != "cpu" else ()),
        *(batch if rl.per_device_train_batch_size > 1 else ()),
        *([CHECKPOINTING] if not cfg.model.gradient_checkpointing else []),
    ]


def open_fields(cfg: RunConfig, choices: Iterable[Choice]) -> frozenset[str]:
    """Those that nobody set. Checkpointing that was `auto` is among the choices."""
    automatic = {choice.field for choice in choices}
    found = {key for key in levers(cfg) if key in automatic or not is_explicit(cfg, key)}
    return frozenset(found if found.issuperset(BATCH) else found.difference(BATCH))


def combinations(cfg: RunConfig, free: Collection[str]) -> list[Combination]:
    """All ways to change what is free, the cheapest first; the first is no change."""
    measures: list[list[Combination]] = []
    for role, price in OFFLOAD_PRICES.items():
        if f"rl.{role}_offload" in free:
            measures.append([(), (Change(values={f"rl.{role}_offload": ("cpu", RESTS[role])}, price=price),)])
    if BATCH[0] in free:
        measures.append([(), *((split,) for split in splits(cfg))])
    if CHECKPOINTING in free:
        why = "activations are computed again in the backward pass"
        measures.append([(), (Change(values={CHECKPOINTING: (True, why)}, price=CHECKPOINTING_PRICE),)])
    found = [tuple(itertools.chain.from_iterable(parts)) for parts in itertools.product(*measures)]
    return sorted(found, key=lambda parts: sum(change.price for change in parts))


def splits(cfg: RunConfig) -> list[Change]:
    """Smaller micro batches that make up the same update."""
    micro, passes = cfg.rl.per_device_train_batch_size, cfg.rl.gradient_accumulation_steps
    samples, found = micro * passes, []
    for size in range(micro - 1, 0, -1):
        if samples % size == 0:
            why = f"less at a time: {samples // size} passes of {size}, not {passes} of {micro}"
            same = f"the same {samples} samples an update"
            values = {BATCH[0]: (size, why), BATCH[1]: (samples // size, same)}
            found.append(Change(values=values, price=HALVING_PRICE * math.log2(micro / size)))
    return found


def changed(cfg: RunConfig, combination: Combination) -> RunConfig:
    """The settings with these changes."""
    for change in combination:
        for key, (value, _) in change.values.items():
            cfg = with_value(cfg, key, value)
    return cfg


def told(cfg: RunConfig, choices: Sequence[Choice], combination: Combination, plan: Planner) -> tuple[Choice, ...]:
    """The choices with those of the budget, each with what it does to the plan's peak."""
    place, found = place_of(cfg), []
    peak = plan(cfg).peak(place)[0]
    for change in combination:
        cfg = changed(cfg, (change,))
        after = plan(cfg).peak(place)[0]
        for number, (key, (value, why)) in enumerate(change.values.items()):
            effect = f"; planned peak {gib(peak)} -> {gib(after)} GiB" if number == 0 else ""
            found.append(Choice(field=key, value=value, why=f"memory budget: {why}{effect}"))
        peak = after
    replaced = {choice.field for choice in found}
    return (*(choice for choice in choices if choice.field not in replaced), *found)


def too_small(cfg: RunConfig, least: MemoryPlan, card: int | None, free: Collection[str]) -> Fault:
    """What to say where nothing fits. least: the smallest of the plans."""
    peak, phase = least.peak(place_of(cfg))
    needs = math.ceil(peak / usable(cfg) / GIB * 10) / 10
    room = f", {RESERVE:.0%} of it to stay free" if usable(cfg) < 1 else ""
    rule = f"the least that this run needs by the memory plan is {needs:g} GiB{room}, in the phase `{phase}`"
    ways = [f"write {needs:g} or more"] if card is None or needs * GIB <= card else []
    held = [key for key in levers(cfg) if key not in free]
    ways += [f"leave {' and '.join(held)} to the plan by not setting it"] if held else []
    ways.append("take a smaller model, model.lora_rank=16 or a shorter data.max_response_length")
    return Fault(
        field=FIELD,
        found=f"{cfg.training.memory_budget_gb:g}",
        rule=f"{rule} ({words(least, place_of(cfg))})",
        fix=", or ".join(ways),
    )


def judge_fit(before: RunConfig, fitted: Resolved) -> Finding:
    """What the budget changes, for the doctor's table."""
    values = [f"{c.field}={c.value}" for c in fitted.choices if value_of(before, c.field) != c.value]
    changes = f"changes {', '.join(values)}" if values else "nothing has to be changed"
    return ok("memory budget", f"{before.training.memory_budget_gb:g} GiB: {changes}")


def gib(size: float) -> str:
    """12.3, without a unit."""
    return f"{size / GIB:.1f}" if size >= 0.95 * GIB else f"{size / GIB:.2f}"
