"""Batch plan and memory plan: numbers worked by hand, and what is said when they do not fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from quickstart import config
from quickstart.arguments import RunConfig
from quickstart.config import Probe
from quickstart.doctor import budget, memory, plan
from quickstart.doctor.machine import GB, Machine
from quickstart.doctor.memory import memory_plan
from quickstart.doctor.parameters import ModelShape
from quickstart.errors import UserError

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
HOST = Machine(ram_bytes=64 * GB, available_bytes=60 * GB)
CARD = Probe(gpus=(config.Gpu(name="card", memory_bytes=24 * 2**30, capability=(8, 6)),))


def settings(
    *, probe: Probe | None = None, data: dict[str, Any] | None = None, checkpointing: bool = False, **rl: Any
) -> RunConfig:
    training = {"device": "cpu"} if probe is None else {"device": "cuda"}
    cfg = config.from_arguments({"gradient_checkpointing": checkpointing}, data, rl, training)
    return config.resolve(cfg, probe or Probe(why_no_gpu="none")).cfg


# ---- batches ----


def test_ppo_batches_by_hand() -> None:
    cfg = settings(
        rl_type="grpo",
        rollout_batch_size=20,
        num_generations=4,
        per_device_train_batch_size=5,
        gradient_accumulation_steps=8,
        ppo_epochs=2,
        num_train_epochs=3,
    )
    numbers = plan.batch_plan(cfg, 105)
    assert numbers == plan.BatchPlan(
        rows=105,
        rows_per_step=20,
        answers_per_prompt=4,
        samples_per_step=80,
        samples_per_update=40,
        samples_at_a_time=5,
        accumulation=8,
        updates_per_step=4,
        steps_per_epoch=5,
        steps=15,
    )
    first, second = plan.judge_batches(cfg, numbers)
    assert first.state == "ok"
    assert "20 prompts x 4 = 80 answers, 4 updates of 40 (8 passes of 5)" in first.found
    assert "5 steps an epoch, 15 in all (3 epochs)" in first.found
    assert (second.state, second.field) == ("note", "rl.rollout_batch_size")
    assert "5 of 105 rows are not used" in second.found
    assert "15 or 21" in second.fix


def test_dpo_batches_by_hand() -> None:
    cfg = settings(rl_type="dpo", per_device_train_batch_size=4, gradient_accumulation_steps=2)
    numbers = plan.batch_plan(cfg, 100)
    assert (numbers.rows_per_step, numbers.updates_per_step, numbers.steps, numbers.rows_left_over) == (8, 1, 12, 4)
    assert "one update of 8 rows (2 passes of 4)" in plan.judge_batches(cfg, numbers)[0].found


@pytest.mark.parametrize(
    ("rl_type", "field"), [("ppo", "rl.rollout_batch_size"), ("dpo", "rl.gradient_accumulation_steps")]
)
def test_fewer_rows_than_a_step_takes(rl_type: str, field: str) -> None:
    cfg = settings(rl_type=rl_type, rollout_batch_size=8, per_device_train_batch_size=8)
    (found,) = plan.judge_batches(cfg, plan.batch_plan(cfg, 3))
    assert (found.state, found.field) == ("error", field)
    assert "8 rows for a step, with 3 rows of data" in found.found
    assert "3" in found.fix


# ---- memory ----


def test_full_ppo_of_half_a_billion_by_hand() -> None:
    """Weights 4 P, Adam 8 P, gradients 4 P; the reference 4 P and the engine's copy 2 P, in bytes."""
    cfg = settings(
        probe=CARD,
        rl_type="ppo",
        gradient_accumulation_steps=5,
        data={"max_prompt_length": 256, "max_response_length": 128},
    )
    items = {(i.role, i.kind): i for i in memory_plan(cfg, HALF_B).items}
    parameters, value_model = 494_032_768, 494_032_768 + 896 + 1
    assert items["actor", "weights"].size == 4 * parameters
    assert items["actor", "Adam"].size == 8 * parameters
    layers = parameters - 151_936 * 896  # the embedding is no part of a graph
    kept = 1536 * 24 * (20 * 896 + 10 * 896 + 8 * 4864)
    assert items["process", "shared gradients"].size == 4 * layers
    assert items["actor", "gradients"].size == 4 * (parameters - layers) + max(4 * layers - kept, 0)
    assert items["critic", "Adam"].size == 8 * value_model
    embedding = 151_936 * 896
    assert items["reference", "weights"].size == 4 * embedding + 2 * (parameters - embedding)
    assert items["rollout engine", "weights"].size == 2 * parameters
    spots = 4 * (256 + 128)  # micro batch x tokens
    assert items["actor", "logits"].size == 12 * 512 * 151_936
    layer = 20 * 896 + 10 * 896 + 8 * 4864
    assert items["actor", "activations"].size == spots * 24 * layer
    cache = 2 * 24 * 2 * 64 * 20 * 384 * 2
    assert items["rollout engine", "KV cache"].size == cache + cache // 24


def test_on_a_gpu_logits_exist_for_a_chunk_of_tokens() -> None:
    data = {"max_prompt_length": 256, "max_response_length": 128}
    cfg = settings(probe=CARD, rl_type="ppo", data=data, per_device_train_batch_size=20)
    assert 20 * 384 > memory.FUSED_TOKENS == 512
    sizes = {i.where.get("actor update"): i.size for i in memory_plan(cfg, HALF_B).items if i.kind == "logits"}
    assert sizes["device"] == 3 * 4 * 512 * 151_936


def test_passes_without_gradients_have_more_rows_on_a_gpu() -> None:
    data = {"max_prompt_length": 256, "max_response_length": 128}

    def size(rows: int) -> int:
        items = memory_plan(settings(probe=CARD, rl_type="ppo", data=data, rollout_batch_size=rows), HALF_B).items
        return next(item.size for item in items if item.kind == "pass without gradients")

    assert size(20) == 20 * 384 * (3 * 2 * 4864 + 4 * 896)
    assert size(400) == 49152 * (3 * 2 * 4864 + 4 * 896)  # about 1 GB


def test_the_plan_has_the_numbers_of_the_code() -> None:
    from quickstart import verl_config
    from quickstart.plugin import fused_head

    assert memory.FUSED_TOKENS == fused_head.CHUNK
    assert memory.INFERENCE_TOKENS == verl_config.INFERENCE_TOKENS


def test_gradients_have_one_buffer_while_models_stay_on_the_gpu() -> None:
    def gradients(*, checkpointing: bool = False, **rl: Any) -> dict[str, int]:
        cfg = settings(probe=CARD, checkpointing=checkpointing, rl_type="ppo", gradient_accumulation_steps=5, **rl)
        items = memory_plan(cfg, HALF_B).items
        return {item.role: item.size for item in items if item.kind.removeprefix("shared ") == "gradients"}

    whole, value_model = 4 * 494_032_768, 4 * (494_032_768 + 897)
    assert gradients(actor_offload="cpu", critic_offload="cpu") == {"actor": whole, "critic": value_model}
    assert gradients(checkpointing=True) == {"actor": whole, "critic": value_model}
    one = gradients(actor_offload="cpu")
    assert (one["process"], one["actor"]) == (whole - 4 * 151_936 * 896, whole)


def test_gradients_of_a_single_pass_come_as_activations_go() -> None:
    data = {"max_prompt_length": 256, "max_response_length": 128}
    one = {(i.role, i.kind): i.size for i in memory_plan(settings(rl_type="ppo", data=data), HALF_B).items}
    assert one["actor", "gradients"] == 4 * 151_936 * 896  # the output head's: activations and logits are larger
    assert one["critic", "gradients"] == 0
    short = {"max_prompt_length": 1, "max_response_length": 1}
    tiny = settings(rl_type="ppo", data=short, per_device_train_batch_size=1, rollout_batch_size=1)
    none = {(i.role, i.kind): i.size for i in memory_plan(tiny, HALF_B).items}
    passing = none["actor", "activations"] + 2 * 151_936 * 14
    assert none["actor", "gradients"] == 4 * 494_032_768 - passing


def test_checkpointing_keeps_the_inputs_of_layers_and_one_layer_in_full() -> None:
    cfg = settings(probe=CARD, checkpointing=True, data={"max_prompt_length": 256, "max_response_length": 128})
    items = {(i.role, i.kind): i.size for i in memory_plan(cfg, HALF_B).items}
    layer = 20 * 896 + 10 * 896 + 8 * 4864
    assert items["actor", "activations"] == 4 * 384 * (24 * 4 * 896 + layer)


def test_roles_that_a_method_does_not_have_cost_nothing() -> None:
    def roles(**rl: Any) -> set[str]:
        return {item.role for item in memory_plan(settings(**rl), HALF_B).items}

    assert roles(rl_type="ppo") == {"process", "actor", "critic", "reference", "rollout engine"}
    assert roles(rl_type="grpo") == {"process", "actor", "reference", "rollout engine"}
    assert roles(rl_type="grpo", kl_placement="none") == {"process", "actor", "rollout engine"}
    assert roles(rl_type="dpo") == {"process", "actor"}


def test_on_a_cpu_everything_is_host_memory() -> None:
    wanted = memory_plan(settings(rl_type="ppo", actor_offload="cpu"), HALF_B)
    assert wanted.peak("device")[0] == 0
    assert wanted.peak("host")[0] > 16 * 494_032_768


def test_offload_moves_what_rests_and_not_what_works() -> None:
    plain = memory_plan(settings(probe=CARD, rl_type="ppo"), HALF_B)
    moved = memory_plan(settings(probe=CARD, rl_type="ppo", critic_offload="cpu"), HALF_B)
    saved = 12 * (494_032_768 + 897)
    assert plain.total("device", "actor update") - moved.total("device", "actor update") == saved
    assert moved.total("host", "actor update") - plain.total("host", "actor update") == saved
    assert plain.total("host", "critic update") == moved.total("host", "critic update")


def test_adapters_alone_have_gradients_and_adam() -> None:
    cfg = settings(rl_type="grpo")
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, lora_rank=16))
    items = {(i.role, i.kind): i.size for i in memory_plan(cfg, HALF_B).items}
    # q and o: 2 x (896 + 896), k and v: 2 x (896 + 128), gate, up and down: 3 x (896 + 4864)
    adapters = 16 * 24 * (2 * 1792 + 2 * 1024 + 3 * 5760)
    assert adapters == 8_798_208  # as peft prints for Qwen2-0.5B, r=16, all linear layers
    assert items["actor", "Adam"] == 8 * adapters
    assert ("reference", "weights") not in items


def test_short_prompts_make_the_plan_smaller() -> None:
    cfg = settings(rl_type="grpo", data={"max_prompt_length": 512, "max_response_length": 64})
    wide = memory_plan(cfg, HALF_B).peak("host")[0]
    assert memory_plan(cfg, HALF_B, longest_prompt=64).peak("host")[0] < wide
    assert memory_plan(cfg, HALF_B, longest_prompt=4096).peak("host")[0] == wide


def test_a_critic_of_its_own_and_a_reward_model() -> None:
    small = dataclasses.replace(HALF_B, parameters=10**6, hidden=64)
    cfg = settings(probe=CARD, rl_type="ppo", reward_offload="cpu")
    wanted = memory_plan(cfg, HALF_B, critic=small, reward_parameters=10**8)
    items = {(i.role, i.kind): i for i in wanted.items}
    assert items["critic", "weights"].size == 4 * (10**6 + 65)
    assert items["reward", "weights"].size == 2 * 10**8
    assert items["reward", "weights"].where["rollout"] == "device"
    assert items["reward", "weights"].where["actor update"] == "host"


# ---- budget ----


def test_what_would_save_memory_is_named_with_its_price() -> None:
    cfg = settings(probe=CARD, rl_type="ppo", per_device_train_batch_size=4, gradient_accumulation_steps=5)
    wanted = memory_plan(cfg, HALF_B)
    ways = budget.savings(cfg, wanted, "device", lambda changed: memory_plan(changed, HALF_B))
    by_name = {way.change: way for way in ways}
    assert by_name["rl.reference_offload=cpu"].bytes_saved > 1 * GB
    assert "model.lora_rank=16" in by_name
    assert "rl.per_device_train_batch_size=2 rl.gradient_accumulation_steps=10" in by_name
    assert [way.bytes_saved for way in ways] == sorted((way.bytes_saved for way in ways), reverse=True)
    (found,) = budget.judge_savings(ways)
    assert "model.lora_rank=16 saves" in found.found
    assert "trains adapters only" in found.found


@pytest.mark.parametrize(("capacity", "state"), [(40 * GB, "ok"), (1.05, "warning"), (0.8, "error")])
def test_the_plan_against_a_card(capacity: float, state: str) -> None:
    cfg = settings(probe=CARD, rl_type="ppo")
    wanted = memory_plan(cfg, HALF_B)
    peak, phase = wanted.peak("device")
    size = int(capacity if capacity > 100 else peak * capacity)
    ways = budget.savings(cfg, wanted, "device", lambda changed: memory_plan(changed, HALF_B))
    device, host = budget.judge_budget(wanted, HOST, size, ways)
    assert (device.state, host.state) == (state, "ok")
    assert phase in device.found
    assert "actor Adam" in device.found
    if state != "ok":
        assert device.fix.startswith("set ")
        assert "(saves" in device.fix


@pytest.mark.parametrize(("free", "state"), [(None, "ok"), (39 * GB, "ok"), (1 * GB, "warning")])
def test_a_card_that_others_use(free: int | None, state: str) -> None:
    cfg = settings(probe=CARD, rl_type="ppo")
    device, _ = budget.judge_budget(memory_plan(cfg, HALF_B), HOST, 40 * GB, [], free)
    assert device.state == state
    if state == "warning":
        assert "1.0 GB are free now" in device.text
        assert device.fix.startswith("end the other programs on the GPU (nvidia-smi lists them)")


@pytest.mark.parametrize(
    ("machine", "state", "words"),
    [
        (Machine(ram_bytes=64 * GB, available_bytes=60 * GB), "ok", "60.0 GB are free"),
        (Machine(ram_bytes=64 * GB, available_bytes=4 * GB), "warning", "4.0 GB are free now"),
        (Machine(ram_bytes=8 * GB, available_bytes=8 * GB), "error", "exit code 137"),
        (Machine(ram_bytes=64 * GB, available_bytes=60 * GB, limit_bytes=8 * GB), "error", "8.0 GB"),
    ],
    ids=["fits", "not now", "never", "container"],
)
def test_the_plan_against_the_host(machine: Machine, state: str, words: str) -> None:
    cfg = settings(rl_type="ppo")
    wanted = memory_plan(cfg, HALF_B)
    (found,) = budget.judge_budget(wanted, machine, None, [])
    assert found.state == state
    assert words in found.text


def test_every_phase_of_a_plan_is_in_its_table() -> None:
    wanted = memory_plan(settings(rl_type="ppo"), HALF_B)
    assert wanted.phases == memory.PHASES
    rows = wanted.table("host")
    assert all(list(row) == list(memory.PHASES) for row in rows.values())
    assert sum(row["actor update"] for row in rows.values()) == wanted.total("host", "actor update")


def test_batch_rules_refuse_what_the_plan_cannot_multiply() -> None:
    with pytest.raises(UserError, match="split evenly"):
        settings(rollout_batch_size=8, per_device_train_batch_size=3)
