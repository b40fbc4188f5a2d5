"""verl keys that a setting of ours is translated to: written in the `verl:` section they would go round its checks.

`rl.temperature=0` is refused; the same thing under verl's name trained for an hour on greedy answers. So a key that has
a setting is set by that setting, and the message says which. All other keys of verl's are free. Not here: whether a key
exists (verl_compose).
"""

from __future__ import annotations

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"

FIXED = "one process trains on one device"  # no setting; what it follows from

# verl's key -> our setting, or why there is none
OWNED: dict[str, str] = {
    "data.train_files": "data.train_file",
    "data.val_files": "data.eval_file",
    "data.train_batch_size": "rl.rollout_batch_size",
    "data.max_prompt_length": "data.max_prompt_length",
    "data.max_response_length": "data.max_response_length",
    "data.shuffle": "data.shuffle",
    "data.seed": "training.seed",
    f"{MODEL}.path": "model.model_name_or_path",
    f"{MODEL}.tokenizer_path": "model.tokenizer_name_or_path",
    f"{MODEL}.lora_rank": "model.lora_rank",
    f"{MODEL}.lora_alpha": "model.lora_alpha",
    f"{MODEL}.enable_gradient_checkpointing": "model.gradient_checkpointing",
    f"{MODEL}.trust_remote_code": "model.trust_remote_code",
    "critic.model.path": "model.critic_model_name_or_path",
    f"{ACTOR}.optim.lr": "rl.learning_rate",
    f"{ACTOR}.optim.lr_scheduler_type": "rl.lr_scheduler_type",
    f"{ACTOR}.optim.lr_warmup_steps_ratio": "rl.warmup_ratio",
    f"{ACTOR}.optim.weight_decay": "rl.weight_decay",
    f"{ACTOR}.optim.clip_grad": "rl.max_grad_norm",
    "critic.optim.lr": "rl.critic_learning_rate",
    f"{ACTOR}.ppo_mini_batch_size": "rl.gradient_accumulation_steps",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": "rl.per_device_train_batch_size",
    "critic.ppo_micro_batch_size_per_gpu": "rl.per_device_train_batch_size",
    f"{ACTOR}.ppo_epochs": "rl.ppo_epochs",
    f"{ACTOR}.entropy_coeff": "rl.entropy_coef",
    f"{ACTOR}.use_kl_loss": "rl.kl_placement",
    f"{ACTOR}.kl_loss_coef": "rl.kl_coef",
    f"{ACTOR}.kl_loss_type": "rl.kl_estimator",
    "critic.cliprange_value": "rl.value_clip",
    f"{ROLLOUT}.name": "rl.rollout_engine",
    f"{ROLLOUT}.n": "rl.num_generations",
    f"{ROLLOUT}.temperature": "rl.temperature",
    f"{ROLLOUT}.top_p": "rl.top_p",
    f"{ROLLOUT}.top_k": "rl.top_k",
    f"{ROLLOUT}.dtype": "model.torch_dtype",
    f"{ROLLOUT}.seed": "training.seed",
    f"{ROLLOUT}.tensor_model_parallel_size": FIXED,
    "algorithm.adv_estimator": "rl.rl_type",
    "algorithm.gamma": "rl.gamma",
    "algorithm.lam": "rl.lam",
    "algorithm.use_kl_in_reward": "rl.kl_placement",
    "algorithm.kl_penalty": "rl.kl_estimator",
    "algorithm.kl_ctrl.type": "rl.kl_controller",
    "algorithm.kl_ctrl.kl_coef": "rl.kl_coef",
    "algorithm.kl_ctrl.target_kl": "rl.kl_target",
    "algorithm.kl_ctrl.horizon": "rl.kl_horizon",
    "critic.enable": "rl.rl_type",
    "reward.custom_reward_function.path": "rl.reward",
    "reward.custom_reward_function.name": "rl.reward",
    f"{ACTOR}.strategy": FIXED,
    "critic.strategy": FIXED,
    "trainer.device": "training.device",
    "trainer.n_gpus_per_node": "training.num_devices",
    "trainer.nnodes": "training.num_devices",
    "trainer.total_training_steps": "training.max_steps",
    "trainer.total_epochs": "rl.num_train_epochs",
    "trainer.val_before_train": "training.eval_before_train",
    "trainer.test_freq": "training.eval_steps",
    "trainer.save_freq": "training.save_steps",
    "trainer.default_local_dir": "training.output_dir",
    "trainer.resume_mode": "training.resume_from_checkpoint",
    "trainer.resume_from_path": "training.resume_from_checkpoint",
}

# Where a key must lie for dpo, kto and their like to read it (plugin/training.py).
READ_WITHOUT_ROLLOUTS = (
    f"{MODEL}.",
    f"{ACTOR}.checkpoint.",
    f"{ACTOR}.fsdp_config.",
    f"{ACTOR}.optim.",
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{ACTOR}.ulysses_sequence_parallel_size",
    f"{ACTOR}.use_dynamic_bsz",
)


def owners_of(key: str) -> list[tuple[str, str]]:
    """(verl's key, our setting) for each owned key that `key` is, or that lies below it."""
    return [(name, owner) for name, owner in OWNED.items() if name == key or name.startswith(f"{key}.")]
