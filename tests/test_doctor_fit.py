"""Choices under training.memory_budget_gb: by hand-worked numbers, what is left alone, what is said, and the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import results
import yaml

from quickstart import config, run
from quickstart.arguments import RunConfig
from quickstart.config import Gpu, Probe, Resolved
from quickstart.config.explicit import BATCH, SHIPPED_BATCHES
from quickstart.doctor import before, fit
from quickstart.doctor.memory import Item, MemoryPlan, memory_plan
from quickstart.doctor.parameters import ModelShape
from quickstart.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[1]
GIB = 2**30
CARD = Probe(gpus=(Gpu(name="card", memory_bytes=80 * GIB, capability=(9, 0)),))
# Qwen2-0.5B, from its config.json and headers.
HALF_B = ModelShape(
    parameters=494_032_768,
    head_parameters=0,
    hidden=896,
    layers=24,
    heads=14,
    kv_heads=2,
    head_dim=64,
    intermediate=4864,
    vocabulary=151_936,
    positions=32_768,
    stored="BF16",
)


def toy_plan(cfg: RunConfig) -> MemoryPlan:
    """In GiB: 1 for the reference, 4 the critic, 5 the actor while they rest on the device, 2 always, 1 a sample of the
    micro batch, half a GiB with checkpointing."""
    rl = cfg.rl
    rest = 2 + (not rl.reference_offload) * 1 + (not rl.critic_offload) * 4 + (not rl.actor_offload) * 5
    each = 0.5 if cfg.model.gradient_checkpointing else 1.0
    size = int((rest + each * rl.per_device_train_batch_size) * GIB)
    place: Any = fit.place_of(cfg)
    return MemoryPlan(
        items=(Item(role="all", kind="things", size=size, where={"actor update": place}),), phases=("actor update",)
    )


def resolved(*, budget: float, probe: Probe = CARD, model: dict[str, Any] | None = None, **rl: Any) -> Resolved:
    training = {"memory_budget_gb": budget, "device": "cuda" if probe.gpus else "cpu"}
    return config.resolve(config.from_arguments(model, None, rl, training), probe)


def chosen(found: Resolved) -> dict[str, Any]:
    """What the budget changed."""
    return {choice.field: choice.value for choice in found.choices if choice.why.startswith("memory budget")}


def fitted(*, budget: float, **settings: Any) -> dict[str, Any]:
    start = resolved(budget=budget, **settings)
    return chosen(fit.fit(start.cfg, start.choices, toy_plan, 80 * GIB))


# ---- which changes, by the toy plan: 16 GiB where nothing is changed; of a GPU's budget 90% are planned ----

REFERENCE, CRITIC, ACTOR = ({f"rl.{role}_offload": "cpu"} for role in ("reference", "critic", "actor"))
HALF = {"rl.per_device_train_batch_size": 2, "rl.gradient_accumulation_steps": 2}
ONE = {"rl.per_device_train_batch_size": 1, "rl.gradient_accumulation_steps": 4}
CHECKPOINTING = {"model.gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("peak", "wanted"),
    [
        (16, {}),
        (15, REFERENCE),
        (14, CRITIC),  # the reference alone does not suffice
        (11.5, ACTOR),  # as dear as reference and critic together, and fewer changes
        (10, REFERENCE | ACTOR),
        (7, CRITIC | ACTOR),
        (6, REFERENCE | CRITIC | ACTOR),
        (4, REFERENCE | CRITIC | ACTOR | HALF),
        (3, REFERENCE | CRITIC | ACTOR | ONE),
        (2.5, REFERENCE | CRITIC | ACTOR | ONE | CHECKPOINTING),
    ],
)
def test_the_cheapest_that_fits(peak: float, wanted: dict[str, Any]) -> None:
    assert fitted(budget=peak / 0.9 + 0.01) == wanted


def test_what_somebody_set_stays() -> None:
    """null from Python or on the command line is a choice as well."""
    assert fitted(budget=14 / 0.9 + 0.01, critic_offload=None) == ACTOR
    held = fitted(budget=3 / 0.9 + 0.3, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert held == REFERENCE | CRITIC | ACTOR | CHECKPOINTING
    with pytest.raises(UserError):
        fitted(budget=2.5 / 0.9 + 0.01, model={"gradient_checkpointing": False})


def test_a_change_is_told_with_its_reason_and_what_it_saves() -> None:
    start = resolved(budget=4 / 0.9 + 0.01)
    found = {c.field: c.why for c in fit.fit(start.cfg, start.choices, toy_plan, 80 * GIB).choices}
    assert "host memory" in found["rl.reference_offload"]
    assert "planned peak 16.0 -> 15.0 GiB" in found["rl.reference_offload"]
    assert "2 passes of 2, not 1 of 4" in found["rl.per_device_train_batch_size"]
    assert "planned peak 6.0 -> 4.0 GiB" in found["rl.per_device_train_batch_size"]
    assert "same 4 samples" in found["rl.gradient_accumulation_steps"]


def test_a_second_fit_changes_nothing() -> None:
    start = resolved(budget=4 / 0.9 + 0.01)
    once = fit.fit(start.cfg, start.choices, toy_plan, 80 * GIB)
    assert fit.fit(once.cfg, once.choices, toy_plan, 80 * GIB) == once


def test_on_a_cpu_nothing_moves_and_the_whole_budget_counts() -> None:
    none = Probe(why_no_gpu="none")
    assert fitted(budget=16, probe=none) == {}
    assert fitted(budget=14, probe=none) == HALF
    assert fitted(budget=12.5, probe=none) == ONE | CHECKPOINTING


def test_kto_keeps_its_micro_batch() -> None:
    """Its KL is an estimate within a micro batch, so another one would have another loss."""
    assert fitted(budget=14.5, probe=Probe(why_no_gpu="none"), rl_type="kto") == CHECKPOINTING


def test_too_small_a_budget_names_the_least_and_the_way_out() -> None:
    start = resolved(budget=2, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    with pytest.raises(UserError) as caught:
        fit.fit(start.cfg, start.choices, toy_plan, 80 * GIB)
    (fault,) = caught.value.faults
    assert (fault.field, fault.found) == ("training.memory_budget_gb", "2")
    assert "3.4 GiB" in fault.rule  # 2 + 2 x 0.5, and 10% free
    assert "write 3.4 or more" in fault.fix
    assert "leave rl.per_device_train_batch_size and rl.gradient_accumulation_steps to the plan" in fault.fix
    fit.fit(*budget_of(start, 3.4), toy_plan, 80 * GIB)
    with pytest.raises(UserError) as caught:
        fit.fit(start.cfg, start.choices, toy_plan, 3 * GIB)
    assert "write" not in caught.value.faults[0].fix  # the card has no more


def budget_of(start: Resolved, budget: float) -> tuple[RunConfig, Any]:
    return config.with_value(start.cfg, "training.memory_budget_gb", budget), start.choices


def test_a_budget_beyond_the_card_is_the_card() -> None:
    start = resolved(budget=100)
    assert chosen(fit.fit(start.cfg, start.choices, toy_plan, int(15 / 0.9 * GIB) + GIB // 10)) == REFERENCE


# ---- what counts as set ----


def shipped(*overrides: str, probe: Probe = CARD, path: str = "configs/ppo_min.yaml") -> Resolved:
    device = "cuda" if probe.gpus else "cpu"
    bundled = f"model.model_name_or_path={REPOSITORY / 'data/bundled_model'}"
    return config.resolve(config.load(path, [f"training.device={device}", bundled, *overrides]), probe)


def open_to(found: Resolved) -> frozenset[str]:
    return fit.open_fields(found.cfg, found.choices)


def test_the_shipped_file_leaves_everything_open() -> None:
    wanted = {*BATCH, "rl.actor_offload", "rl.critic_offload", "rl.reference_offload", "model.gradient_checkpointing"}
    assert open_to(shipped("training.memory_budget_gb=12")) == wanted
    content = yaml.safe_load((REPOSITORY / "configs/ppo_min.yaml").read_text())
    for rl in (content["rl"], content["profiles"]["cpu"]["rl"]):
        assert tuple(rl[key.partition(".")[2]] for key in BATCH) in SHIPPED_BATCHES


def test_typed_and_edited_values_are_held(tmp_path: Path) -> None:
    typed = shipped("training.memory_budget_gb=12", "rl.per_device_train_batch_size=4", "rl.actor_offload=null")
    assert open_to(typed) == {"rl.critic_offload", "rl.reference_offload", "model.gradient_checkpointing"}
    text = (REPOSITORY / "configs/ppo_min.yaml").read_text()
    edited = text.replace("per_device_train_batch_size: 4 ", "per_device_train_batch_size: 10 ")
    edited = edited.replace("gradient_accumulation_steps: 5 ", "gradient_accumulation_steps: 2 ")
    (tmp_path / "mine.yaml").write_text(edited.replace("gradient_checkpointing: auto", "gradient_checkpointing: false"))
    mine = shipped("training.memory_budget_gb=12", path=str(tmp_path / "mine.yaml"))
    assert open_to(mine) == {"rl.actor_offload", "rl.critic_offload", "rl.reference_offload"}


# ---- the real plan ----


def test_half_a_billion_under_12_gib() -> None:
    """One role at a time in full, 12 P of weights and Adam, its gradients 4 P, casts 2 P and the engine's copy 2 P are
    20 P = 9.2 GiB, so all roles must make room for each other and the micro batch must be small."""
    start = shipped("training.memory_budget_gb=12", "profile=gpu")
    assert start.cfg.rl.per_device_train_batch_size * start.cfg.rl.gradient_accumulation_steps == 20

    def plan(cfg: RunConfig) -> MemoryPlan:
        return memory_plan(cfg, HALF_B, longest_prompt=64)

    assert plan(start.cfg).peak("device")[0] > 16 * GIB
    found = fit.fit(start.cfg, start.choices, plan, 80 * GIB)
    split = {"rl.per_device_train_batch_size": 1, "rl.gradient_accumulation_steps": 20}
    assert chosen(found) == REFERENCE | CRITIC | ACTOR | split
    assert plan(found.cfg).peak("device")[0] <= 0.9 * 12 * GIB


def test_a_budget_with_room_changes_nothing() -> None:
    start = shipped("training.memory_budget_gb=40", "profile=gpu")
    assert chosen(fit.fit(start.cfg, start.choices, lambda cfg: memory_plan(cfg, HALF_B), 80 * GIB)) == {}


# ---- through the entry points ----

BASE = ["profile=cpu", "training.device=cpu", "training.num_threads=1"]


def dry(capsys: pytest.CaptureFixture[str], *settings: str) -> tuple[str, dict[str, Any]]:
    assert run.main([*BASE, "--dry-run", *settings]) == 0
    text = capsys.readouterr().out
    return text, yaml.safe_load(text)


def test_a_dry_run_shows_what_a_budget_changes(capsys) -> None:
    _, plain = dry(capsys)
    text, tight = dry(capsys, "training.memory_budget_gb=0.95")
    micro, passes = (tight["rl"][key.partition(".")[2]] for key in BATCH)
    assert micro < plain["rl"]["per_device_train_batch_size"] == 20
    assert micro * passes == 20
    assert "memory budget: less at a time" in text


def test_a_model_that_is_not_here_is_planned_later(monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    start = resolved(budget=1, model={"model_name_or_path": "nobody/has-this"})
    found = before.foreseen(start)
    assert found.cfg == start.cfg
    assert found.choices[-1].field == "training.memory_budget_gb"


@pytest.mark.slow
def test_a_run_under_a_budget_learns_the_same(command_line, tmp_path: Path) -> None:
    job = [*BASE, "training.num_threads=2", "training.max_steps=2"]
    plain = command_line.run(job, tmp_path / "plain")
    tight = command_line.run([*job, "training.memory_budget_gb=0.95"], tmp_path / "tight")
    assert "memory budget: less at a time" in tight.stdout
    written = yaml.safe_load((tight.outputs / "config.yaml").read_text())["rl"]
    assert written["per_device_train_batch_size"] * written["gradient_accumulation_steps"] == 20
    assert written["per_device_train_batch_size"] < 20
    names = ("actor_loss", "critic_loss", "actor/grad_norm", "critic/grad_norm")
    wanted = pytest.approx(results.losses(plain.outputs, names), rel=1e-5, abs=1e-6)
    assert results.losses(tight.outputs, names) == wanted
    assert results.rewards(tight.outputs) == results.rewards(plain.outputs)
