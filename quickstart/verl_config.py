"""Translation: our arguments -> verl's keys. Beside `plugin/` and `verl_compose` the only place that spells these.

Everything here is a pure function of the arguments. Where a default of verl's is wrong for one device and a first run,
the line says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quickstart.arguments import ESTIMATORS, RunConfig
from quickstart.config import generations
from quickstart.doctor.sizes import ENGINE_ROWS

ACTOR = "actor_rollout_ref.actor"
REFERENCE = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
ENGINES = (f"{ACTOR}.fsdp_config", f"{REFERENCE}.fsdp_config", "critic.fsdp")

PRECISION = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, kw_only=True)
class RunPaths:
    """The files that verl is told about."""

    train: Path  # parquet in verl's row format
    evaluation: Path  # the same; verl insists on one, so the training file stands in where there is none
    checkpoints: Path
    reward_file: Path  # Python file that verl loads the reward function from
    reward_name: str
    reward_kwargs: dict[str, Any]
    chat_template: str | None = None  # for a tokenizer that has none


def batch_table(cfg: RunConfig, devices: int = 1) -> dict[str, int]:
    """The arithmetic of one step, in samples unless named otherwise (verl trainer_base.py:1601 multiplies by n)."""
    rl = cfg.rl
    samples = rl.rollout_batch_size * generations(cfg)
    update = rl.per_device_train_batch_size * rl.gradient_accumulation_steps * devices
    return {
        "prompts_per_step": rl.rollout_batch_size,
        "samples_per_step": samples,
        "samples_per_update": update,
        "samples_per_micro_batch": rl.per_device_train_batch_size,
        "updates_per_step": samples // update * rl.ppo_epochs,
    }


def translate(cfg: RunConfig, paths: RunPaths, *, device: str, steps: int) -> dict[str, Any]:
    """verl's keys and values for a PPO-family run, flat and dotted, without the user's own `verl:` section.

    Args:
        cfg: resolved arguments, no "auto" left.
        device: "cpu" or "cuda".
        steps: global steps of the whole run.
    """
    return (
        _data(cfg, paths)
        | _model(cfg, paths.chat_template)
        | _actor(cfg)
        | _critic(cfg)
        | _engines(cfg)
        | _rollout(cfg, device)
        | _algorithm(cfg)
        | _reward(paths)
        | _trainer(cfg, paths, device, steps)
    )


def translate_preference(cfg: RunConfig, *, chat_template: str | None, steps: int) -> dict[str, Any]:
    """verl's keys for dpo, kto, simpo and orpo: the actor alone, no rollout, critic or reward.

    Args:
        cfg: resolved arguments, no "auto" left. A micro batch counts pairs where rows come in pairs.
        chat_template: for a tokenizer that has none.
        steps: optimizer steps of the whole run.
    """
    keys = _model(cfg, chat_template) | _actor(cfg) | _engines(cfg) | {f"{ACTOR}.optim.total_training_steps": steps}
    return {key: value for key, value in keys.items() if key.startswith((f"{ACTOR}.", f"{MODEL}."))}


def _data(cfg: RunConfig, paths: RunPaths) -> dict[str, Any]:
    return {
        "data.train_files": str(paths.train),
        "data.val_files": str(paths.evaluation),
        "data.train_batch_size": cfg.rl.rollout_batch_size,
        "data.max_prompt_length": cfg.data.max_prompt_length,
        "data.max_response_length": cfg.data.max_response_length,
        "data.shuffle": cfg.data.shuffle,
        "data.seed": cfg.training.seed,  # verl: null, another order in every run
        "data.dataloader_num_workers": 0,  # verl: 8 processes, for rows that are read already
        "data.trust_remote_code": cfg.model.trust_remote_code,
    }


def _model(cfg: RunConfig, chat_template: str | None) -> dict[str, Any]:
    model = cfg.model
    attention = "flash_attention_2" if model.use_flash_attention_2 else "sdpa"
    keys: dict[str, Any] = {}
    for prefix, path in ((MODEL, model.model_name_or_path), ("critic.model", critic_path(cfg))):
        keys |= {
            f"{prefix}.path": path,
            f"{prefix}.tokenizer_path": model.tokenizer_name_or_path or model.model_name_or_path,
            f"{prefix}.trust_remote_code": model.trust_remote_code,
            f"{prefix}.custom_chat_template": chat_template,
            f"{prefix}.override_config.attn_implementation": attention,  # verl: flash_attention_2 (model.py:185)
            f"{prefix}.enable_gradient_checkpointing": bool(model.gradient_checkpointing),
            # packed rows need flash attention's varlen kernels; with sdpa they attend across rows
            f"{prefix}.use_remove_padding": model.use_flash_attention_2,
        }
    # logits of a whole micro batch never exist at once (plugin/fused_head.py); on a CPU they are small
    keys |= {
        f"{MODEL}.use_fused_kernels": cfg.training.device == "cuda",
        f"{MODEL}.fused_kernel_options.impl_backend": "torch",
    }
    if model.lora_rank:
        keys |= {
            f"{MODEL}.lora_rank": model.lora_rank,
            f"{MODEL}.lora_alpha": model.lora_alpha,
            f"{MODEL}.lora.merge": True,  # else the rollout gets base weights alone (engine_workers.py:767)
        }
    return keys


def critic_path(cfg: RunConfig) -> str:
    """Where the critic starts from: its own checkpoint, or the policy's body with a fresh head."""
    return cfg.model.critic_model_name_or_path or cfg.model.model_name_or_path


def _optimizer(cfg: RunConfig, prefix: str, learning_rate: float) -> dict[str, Any]:
    rl = cfg.rl
    # float16: the fused kernel wants found_inf as a number, and verl's scaler for FSDP has a list of one
    # (torch/distributed/fsdp/sharded_grad_scaler.py), so that the first update would stop
    fused = cfg.training.device == "cuda" and cfg.model.torch_dtype != "float16"
    own = {f"{prefix}.override_optimizer_config": {"fused": True}} if fused else {}
    return own | {
        f"{prefix}.lr": learning_rate,
        f"{prefix}.lr_scheduler_type": rl.lr_scheduler_type,
        f"{prefix}.lr_warmup_steps_ratio": rl.warmup_ratio,
        f"{prefix}.lr_warmup_steps": -1,  # null crashes (transformer_impl.py:514)
        f"{prefix}.weight_decay": rl.weight_decay,
        f"{prefix}.clip_grad": rl.max_grad_norm,
    }


def _actor(cfg: RunConfig) -> dict[str, Any]:
    rl = cfg.rl
    micro = rl.per_device_train_batch_size
    prompts_per_update = micro * rl.gradient_accumulation_steps // generations(cfg)
    return _optimizer(cfg, f"{ACTOR}.optim", rl.learning_rate) | {
        f"{ACTOR}.ppo_mini_batch_size": prompts_per_update,  # in prompts: verl multiplies by n (trainer_base.py:1830)
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": micro,
        f"{REFERENCE}.log_prob_micro_batch_size_per_gpu": inference_rows(cfg),
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": inference_rows(cfg),
        f"{ACTOR}.ppo_epochs": rl.ppo_epochs,
        f"{ACTOR}.clip_ratio": rl.ppo_clip_ratio,
        f"{ACTOR}.clip_ratio_low": rl.ppo_clip_ratio,
        f"{ACTOR}.clip_ratio_high": rl.ppo_clip_ratio,
        f"{ACTOR}.entropy_coeff": rl.entropy_coef,
        f"{ACTOR}.use_kl_loss": rl.kl_placement == "loss",
        f"{ACTOR}.kl_loss_coef": rl.kl_coef,
        f"{ACTOR}.kl_loss_type": rl.kl_estimator,
        f"{ACTOR}.data_loader_seed": cfg.training.seed,
        f"{ACTOR}.use_torch_compile": False,  # compiling costs more than a short run
    }


INFERENCE_TOKENS = 49152  # of a GPU's pass without gradients: 1 GB for 0.5B weights, no logits (plugin/fused_head.py)


def inference_rows(cfg: RunConfig) -> int:
    """Rows of one pass without gradients: on a GPU as many as fit INFERENCE_TOKENS, a pass costs the host the same.

    A divisor of the rows of a step, which verl asks for (workers/engine/utils.py:125).
    """
    micro, length = cfg.rl.per_device_train_batch_size, cfg.data.max_prompt_length + cfg.data.max_response_length
    samples = cfg.rl.rollout_batch_size * generations(cfg)
    if cfg.training.device != "cuda":
        return micro
    fitting = range(micro, INFERENCE_TOKENS // length + 1, micro)
    return max((rows for rows in fitting if samples % rows == 0), default=micro)


def _critic(cfg: RunConfig) -> dict[str, Any]:
    rl = cfg.rl
    return _optimizer(cfg, "critic.optim", rl.critic_learning_rate) | {
        "critic.ppo_micro_batch_size_per_gpu": rl.per_device_train_batch_size,
        # the V1 trainer never hands that on to the engine, which then packs 32,768 tokens (trainer_base.py:266-283)
        "critic.fsdp.use_dynamic_bsz": False,
        "critic.fsdp.micro_batch_size_per_gpu": rl.per_device_train_batch_size,
        "critic.fsdp.infer_micro_batch_size_per_gpu": inference_rows(cfg),
        "critic.cliprange_value": rl.value_clip,
        "critic.data_loader_seed": cfg.training.seed,
    }


def _engines(cfg: RunConfig) -> dict[str, Any]:
    precision = PRECISION[cfg.model.torch_dtype]
    # `dtype` of the engine is read nowhere; compute precision comes from mixed_precision only, and its default is
    # bf16 (transformer_impl.py:391-399). Master weights stay fp32: at lr 1e-6 bf16 weights do not move.
    mixed = {"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    keys: dict[str, Any] = {f"{ACTOR}.strategy": "fsdp2", "critic.strategy": "fsdp2"}
    for engine in ENGINES:
        keys |= {
            f"{engine}.strategy": "fsdp2",  # fsdp1 fails on a CPU (transformer_impl.py:444)
            f"{engine}.model_dtype": "fp32",
            f"{engine}.mixed_precision": mixed,
            f"{engine}.use_torch_compile": False,
            f"{engine}.seed": cfg.training.seed,
        }
    for engine, offload in ((ENGINES[0], cfg.rl.actor_offload), (ENGINES[2], cfg.rl.critic_offload)):
        keys |= {f"{engine}.param_offload": offload == "cpu", f"{engine}.optimizer_offload": offload == "cpu"}
    return keys


def _rollout(cfg: RunConfig, device: str) -> dict[str, Any]:
    rl = cfg.rl
    # answers at a time: vllm makes its cache and its graphs for so many, once
    rows = {f"{ROLLOUT}.max_num_seqs": min(batch_table(cfg)["samples_per_step"], ENGINE_ROWS)}
    return (rows if rl.rollout_engine == "vllm" else {}) | {
        f"{ROLLOUT}.name": rl.rollout_engine,
        f"{ROLLOUT}.dtype": cfg.model.torch_dtype,
        f"{ROLLOUT}.n": rl.num_generations,
        f"{ROLLOUT}.temperature": rl.temperature,
        f"{ROLLOUT}.top_p": rl.top_p,
        f"{ROLLOUT}.top_k": rl.top_k,
        f"{ROLLOUT}.seed": cfg.training.seed,
        f"{ROLLOUT}.tensor_model_parallel_size": 1,  # verl: 2
        f"{ROLLOUT}.agent.num_workers": 1,  # verl: 8
        f"{ROLLOUT}.free_cache_engine": device == "cuda" and rl.rollout_engine == "vllm",
    }


def _algorithm(cfg: RunConfig) -> dict[str, Any]:
    rl = cfg.rl
    keys = {
        "algorithm.adv_estimator": ESTIMATORS[rl.rl_type],
        "algorithm.gamma": rl.gamma,
        "algorithm.lam": rl.lam,
        "algorithm.use_kl_in_reward": rl.kl_placement == "reward",
        "algorithm.kl_penalty": rl.kl_estimator,
        "algorithm.kl_ctrl.type": rl.kl_controller,
        "algorithm.kl_ctrl.kl_coef": rl.kl_coef,
        "algorithm.kl_ctrl.target_kl": rl.kl_target,
        "algorithm.kl_ctrl.horizon": rl.kl_horizon,
    }
    if not rl.recompute_old_log_probs:
        keys["algorithm.rollout_correction.bypass_mode"] = True  # old log-probs are the rollout's
    return keys


def _reward(paths: RunPaths) -> dict[str, Any]:
    return {
        # `reward.*` only: the old top-level keys parse and are ignored by main_ppo (reward.py:70)
        "reward.custom_reward_function.path": str(paths.reward_file),
        "reward.custom_reward_function.name": paths.reward_name,
        "reward.custom_reward_function.reward_kwargs": paths.reward_kwargs,
        "reward.num_workers": 1,  # verl: 8 actors
    }


def _trainer(cfg: RunConfig, paths: RunPaths, device: str, steps: int) -> dict[str, Any]:
    training = cfg.training
    save = {"never": -1, "end": steps}.get(str(training.save_steps), training.save_steps)
    keys = {
        "trainer.device": device,
        "trainer.n_gpus_per_node": 1,  # verl: 8
        "trainer.nnodes": 1,
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": max(steps, 1),  # the step count rules; an epoch has one step or more
        "trainer.val_before_train": training.eval_before_train,  # verl: true
        "trainer.test_freq": training.eval_steps or -1,
        "trainer.save_freq": save,
        "trainer.max_actor_ckpt_to_keep": training.save_total_limit,
        "trainer.max_critic_ckpt_to_keep": training.save_total_limit,
        "trainer.default_local_dir": str(paths.checkpoints),
        "trainer.logger": [],  # verl: console and wandb; our recorder takes the metrics instead
        "trainer.resume_mode": "disable",  # verl: auto, which picks up another run's checkpoint in silence
    }
    if training.resume_from_checkpoint:
        keys |= {
            "trainer.resume_mode": "resume_path",
            "trainer.resume_from_path": str(training.resume_from_checkpoint),
        }
    return keys
