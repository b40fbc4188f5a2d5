"""Which keys exist, and what people write instead of them. An unknown key is never guessed at: it is refused, and the
real one is named.
"""

from __future__ import annotations

from quickstart.arguments import SECTIONS, field_names
from quickstart.errors import Fault

TOP_LEVEL = (*SECTIONS, "verl", "profile", "profiles")

# What other tools, papers and older verl versions call our fields. Only used in messages.
ALIASES: dict[str, str] = {
    "actor_learning_rate": "rl.learning_rate",
    "adv_estimator": "rl.rl_type",
    "advantage_estimator": "rl.rl_type",
    "algorithm": "rl.rl_type",
    "attn_implementation": "model.use_flash_attention_2",
    "base_model": "model.model_name_or_path",
    "batch_size": "rl.rollout_batch_size",
    "bf16": "model.torch_dtype",
    "clip_grad": "rl.max_grad_norm",
    "clip_ratio": "rl.ppo_clip_ratio",
    "cliprange": "rl.ppo_clip_ratio",
    "cliprange_value": "rl.value_clip",
    "critic_lr": "rl.critic_learning_rate",
    "dataset": "data.train_file",
    "dataset_name": "data.train_file",
    "dtype": "model.torch_dtype",
    "entropy_coeff": "rl.entropy_coef",
    "epochs": "rl.num_train_epochs",
    "eval_strategy": "training.eval_steps",
    "fp16": "model.torch_dtype",
    "grad_accum": "rl.gradient_accumulation_steps",
    "group_size": "rl.num_generations",
    "init_kl_coef": "rl.kl_coef",
    "kl": "rl.kl_placement",
    "kl_beta": "rl.kl_coef",
    "kl_loss_coef": "rl.kl_coef",
    "kl_loss_type": "rl.kl_estimator",
    "kl_penalty": "rl.kl_estimator",
    "lambda": "rl.lam",
    "loss_type": "rl.dpo_loss",
    "lora_r": "model.lora_rank",
    "lr": "rl.learning_rate",
    "lr_scheduler": "rl.lr_scheduler_type",
    "lr_warmup_steps_ratio": "rl.warmup_ratio",
    "max_completion_length": "data.max_response_length",
    "max_length": "data.max_response_length",
    "max_new_tokens": "data.max_response_length",
    "max_train_steps": "training.max_steps",
    "method": "rl.rl_type",
    "micro_batch_size": "rl.per_device_train_batch_size",
    "mini_batch_size": "rl.per_device_train_batch_size",
    "model": "model.model_name_or_path",
    "model_name": "model.model_name_or_path",
    "model_path": "model.model_name_or_path",
    "n": "rl.num_generations",
    "n_gpus_per_node": "training.num_devices",
    "num_epochs": "rl.num_train_epochs",
    "num_gpus": "training.num_devices",
    "num_ppo_epochs": "rl.ppo_epochs",
    "output": "training.output_dir",
    "ppo_micro_batch_size": "rl.per_device_train_batch_size",
    "ppo_micro_batch_size_per_gpu": "rl.per_device_train_batch_size",
    "ppo_mini_batch_size": "rl.gradient_accumulation_steps",
    "reward_fn": "rl.reward",
    "reward_funcs": "rl.reward",
    "reward_function": "rl.reward",
    "reward_model": "model.reward_model_name_or_path",
    "reward_model_path": "model.reward_model_name_or_path",
    "rollout_n": "rl.num_generations",
    "save_freq": "training.save_steps",
    "steps": "training.max_steps",
    "test_file": "data.eval_file",
    "test_freq": "training.eval_steps",
    "tokenizer": "model.tokenizer_name_or_path",
    "total_epochs": "rl.num_train_epochs",
    "total_training_steps": "training.max_steps",
    "train_batch_size": "rl.rollout_batch_size",
    "train_files": "data.train_file",
    "val_before_train": "training.eval_before_train",
    "val_file": "data.eval_file",
    "val_files": "data.eval_file",
    "vf_coef": "rl.critic_learning_rate",
    "warmup_steps": "rl.warmup_ratio",
}

# Old verl keys that still parse in 0.9.1 and are then read by nobody (main_ppo reads `reward.*` only).
DEAD_VERL_KEYS: dict[str, str] = {
    "custom_reward_function": "rl.reward=function:FILE.py:NAME (verl's own key is reward.custom_reward_function)",
    "reward_model": "rl.reward=model and model.reward_model_name_or_path (verl's own key is reward.reward_model)",
}

# verl's top-level config groups: written without `verl.` in front they are recognised and pointed there.
VERL_GROUPS = (
    "actor_rollout_ref",
    "algorithm",
    "critic",
    "custom_reward_function",
    "global_profiler",
    "ray_kwargs",
    "reward",
    "reward_manager",
    "reward_model",
    "trainer",
    "transfer_queue",
)


def all_keys() -> list[str]:
    """Every `section.key`."""
    return [f"{section}.{name}" for section in SECTIONS for name in field_names(section)]


def homes(name: str) -> list[str]:
    """Where a bare field name lives."""
    return [f"{section}.{name}" for section in SECTIONS if name in field_names(section)]


def suggestion(section: str, name: str) -> str:
    """The real key that was probably meant, as an instruction."""
    from difflib import get_close_matches

    bare = name.split(".")[-1]
    if elsewhere := homes(bare):
        return f"write {elsewhere[0]}"
    if bare.lower() in ALIASES:
        return f"write {ALIASES[bare.lower()]}"
    if section in SECTIONS and (close := get_close_matches(bare.lower(), field_names(section), n=1, cutoff=0.6)):
        return f"did you mean {section}.{close[0]}?"
    everywhere = {n: f"{s}.{n}" for s in SECTIONS for n in field_names(s)}
    if close := get_close_matches(bare.lower(), list(everywhere), n=1, cutoff=0.6):
        return f"did you mean {everywhere[close[0]]}?"
    return "remove it; `python -m quickstart.run --help` lists all keys"


def unknown_key(where: str, section: str, name: str) -> Fault:
    """Fault for a key that no section has. `where` is the key as written, with its place."""
    return Fault(
        field=where, found="an unknown key", rule=f"`{section}` has no `{name}`", fix=suggestion(section, name)
    )


def unknown_section(where: str, name: str) -> Fault:
    """Fault for a top-level key that does not exist."""
    from difflib import get_close_matches

    rule = f"top-level keys are {', '.join(TOP_LEVEL)}"
    if name in VERL_GROUPS:
        return Fault(field=where, found="verl's own key", rule=rule, fix=f"put it under verl:, as verl.{name}")
    if close := get_close_matches(name.lower(), TOP_LEVEL, n=1, cutoff=0.6):
        return Fault(field=where, found="an unknown section", rule=rule, fix=f"did you mean {close[0]}?")
    return Fault(field=where, found="an unknown key", rule=rule, fix=suggestion("", name))


def dead_verl_key(where: str, first: str) -> Fault:
    """Fault for a verl key that parses and is ignored."""
    return Fault(
        field=where,
        found="an old verl key",
        rule="verl 0.9.1 accepts it and ignores it",
        fix=f"use {DEAD_VERL_KEYS[first]}",
    )
