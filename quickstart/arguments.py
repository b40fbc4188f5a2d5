"""The settings a user can change: sections model, data, rl, training, and the RunConfig that holds them.

Plain keyword-only dataclasses. Each field carries its default, its legal range and its explanation, so that the
reader, `--help` and the checks in :mod:`quickstart.config` use one text. Not here: reading YAML, checking, filling in
"auto". Nothing here imports torch, ray, verl or transformers.
"""
# ruff: noqa: RUF009 - `option` returns dataclasses.field(...), evaluated once per class as meant

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

# rl_type -> the name of verl's advantage estimator (verl/trainer/ppo/core_algos.py, AdvantageEstimator).
ESTIMATORS: dict[str, str] = {
    "ppo": "gae",
    "grpo": "grpo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo",
    "remax": "remax",
    "opo": "opo",
    "grpo_passk": "grpo_passk",
    "gpg": "gpg",
    "rloo_vectorized": "rloo_vectorized",
    "grpo_vectorized": "grpo_vectorized",
    "optimal_token_baseline": "optimal_token_baseline",
    "tir_optimal_token_baseline": "tir_optimal_token_baseline",
    "gdpo": "gdpo",
}
ROLLOUT_TYPES = tuple(ESTIMATORS)  # these generate answers and score them
CRITIC_TYPES = ("ppo",)  # these train a value model
SINGLE_TYPES = ("ppo", "reinforce_plus_plus", "remax")  # one answer per prompt is enough
GROUP_TYPES = tuple(name for name in ROLLOUT_TYPES if name not in SINGLE_TYPES)  # the group is the baseline
PREFERENCE_TYPES = ("dpo", "kto", "simpo", "orpo")  # these learn from chosen and rejected answers, no rollout
REFERENCE_PREFERENCE_TYPES = ("dpo", "kto")  # of these, the ones with a reference model
RL_TYPES = ROLLOUT_TYPES + PREFERENCE_TYPES


def option(
    default: Any,
    doc: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    ratio: bool = False,
    path: Literal["model", "data"] | None = None,
    used_by: tuple[str, ...] = (),
    why: str = "",
) -> Any:
    """A dataclass field with its explanation and its legal range.

    ratio: a share of one; "10%" is understood. path: looked up from the current folder, then from the repository.
    used_by: the rl types that read the field; empty means all. why: the reason, where a value outside would run but
    train wrongly.
    """
    metadata = {
        "doc": doc,
        "above": above,
        "at_least": at_least,
        "below": below,
        "at_most": at_most,
        "ratio": ratio,
        "path": path,
        "used_by": used_by,
        "why": why,
    }
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Auto = Literal["auto"]
RLType = Literal[
    "ppo",
    "grpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "remax",
    "opo",
    "grpo_passk",
    "gpg",
    "rloo_vectorized",
    "grpo_vectorized",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "gdpo",
    "dpo",
    "kto",
    "simpo",
    "orpo",
]
# verl's names and Schulman's names for the same estimators; "full" parses in verl but is not implemented there.
KLEstimator = Literal["auto", "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Which models, and how they are loaded."""

    model_name_or_path: str = option(
        "Qwen/Qwen2-0.5B", "the policy: a local folder or a name on the Hugging Face hub", path="model"
    )
    tokenizer_name_or_path: str | None = option(None, "its tokenizer; null: beside the model", path="model")
    critic_model_name_or_path: str | None = option(
        None,
        "start of the value model; null: the policy's weights with a new value head",
        path="model",
        used_by=CRITIC_TYPES,
    )
    reward_model_name_or_path: str | None = option(
        None,
        "a sequence-classification reward model with one output; read when rl.reward is `model`",
        path="model",
        used_by=ROLLOUT_TYPES,
    )
    torch_dtype: Dtype = option(
        "auto",
        "precision of the computation; auto: float32 on a CPU, bfloat16 on a GPU that has it (verl: bfloat16)",
    )
    use_flash_attention_2: bool = option(
        False, "flash-attn kernels for policy and critic, CUDA only; false: torch's sdpa (verl: true)"
    )
    reward_use_flash_attention_2: bool = option(False, "the same for the reward model", used_by=ROLLOUT_TYPES)
    gradient_checkpointing: Auto | bool = option(
        "auto",
        "compute activations again in the backward pass instead of keeping them: a tenth of their memory or less, "
        "updates about 30% slower; `quickstart doctor` says what it saves in your run; auto: on a GPU below 24 GB",
    )
    lora_rank: int = option(0, "rank of the LoRA adapters; 0: train all weights", at_least=0)
    lora_alpha: int = option(32, "LoRA scale, the update is multiplied by alpha / rank (verl: 16)", at_least=1)
    chat_template: Literal["chatml"] | None = option(
        None, "a named template for a base model that ships none; null: the tokenizer's own must exist"
    )
    trust_remote_code: bool = option(False, "run Python code that comes with a model from the hub")


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """Which rows, how they are read, and how long they may be."""

    train_file: str | list[str] = option(
        "data/sample_100.jsonl",
        "file or files, one row {prompt, chosen, rejected} each (other shapes are recognised), or a hub data set",
        path="data",
    )
    eval_file: str | list[str] | None = option(None, "rows for evaluation; null: none", path="data")
    max_prompt_length: int = option(512, "longest prompt, in tokens", at_least=1)
    max_response_length: int = option(256, "longest answer, in tokens (verl: 512)", at_least=1)
    columns: dict[str, str] = option(
        {}, "our name to your column, where they differ: {prompt: question, chosen: good, rejected: bad}"
    )
    overlong: Literal["stop", "drop", "truncate"] = option(
        "stop",
        "prompts above max_prompt_length. stop: drop up to 1% of the rows by name, refuse more; "
        "drop: drop all by name; truncate: cut from the left (verl: drops in silence)",
    )
    shuffle: bool = option(True, "a new order each epoch, from training.seed")
    max_samples: int | None = option(None, "read only so many rows; null: all", at_least=1)
    field: str | None = option(None, "where a JSON file wraps its rows in an object, the key of the list")
    split: str | None = option(None, "split of a hub data set; null: train")
    config_name: str | None = option(None, "configuration of a hub data set")
    cache_dir: str | None = option(None, "folder for converted data; null: beside the outputs. Must be writable")


@dataclass(frozen=True, kw_only=True)
class RLArguments:
    """The algorithm and its numbers. One step is one rollout of rollout_batch_size prompts and its updates."""

    rl_type: RLType = option("ppo", "the algorithm; all but dpo, kto, simpo, orpo generate and score answers")
    reward: str = option(
        "preference",
        "preference: similarity (chrF) to the chosen answer against the rejected one; function:FILE.py:NAME: "
        "your own; verl: verl's scorers by data_source; model: model.reward_model_name_or_path",
        used_by=ROLLOUT_TYPES,
    )
    num_train_epochs: int = option(1, "passes over the data; training.max_steps goes before it (verl: 30)", at_least=1)
    rollout_batch_size: int = option(20, "prompts of one step (verl: 1024)", at_least=1, used_by=ROLLOUT_TYPES)
    num_generations: Auto | int = option(
        "auto",
        "answers per prompt; auto: 1 for ppo, reinforce_plus_plus and remax, 4 for the group methods (verl: 1)",
        at_least=1,
        used_by=ROLLOUT_TYPES,
    )
    per_device_train_batch_size: int = option(
        4, "samples in one forward and backward pass (dpo: pairs); sets the memory needed", at_least=1
    )
    gradient_accumulation_steps: int = option(
        1, "passes added up before one optimizer update: batch size x this x devices samples", at_least=1
    )
    ppo_epochs: int = option(1, "times that each rollout is used for updates", at_least=1, used_by=ROLLOUT_TYPES)
    learning_rate: float = option(1e-6, "step size of the policy's optimizer", above=0, at_most=1)
    critic_learning_rate: float = option(
        1e-5, "step size of the value model's optimizer", above=0, at_most=1, used_by=CRITIC_TYPES
    )
    lr_scheduler_type: Literal["constant", "cosine"] = option("constant", "after warm-up; verl has these two")
    warmup_ratio: float = option(
        0.0,
        "share of all steps in which the learning rate climbs from 0; the first of them changes nothing",
        at_least=0,
        below=1,
        ratio=True,
    )
    weight_decay: float = option(
        0.01, "of AdamW; it pulls all weights towards 0, norms and biases too, as verl does", at_least=0, below=1
    )
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm", above=0)
    ppo_clip_ratio: float = option(
        0.2,
        "the probability ratio counts only within 1 +- this",
        above=0,
        below=1,
        ratio=True,
        used_by=ROLLOUT_TYPES,
    )
    value_clip: float = option(
        0.5, "the value may move only so far from the old one in an update", above=0, used_by=CRITIC_TYPES
    )
    entropy_coef: float = option(
        0.0, "weight of the entropy bonus; 0: none", at_least=0, below=1, used_by=ROLLOUT_TYPES
    )
    gamma: float = option(
        1.0, "discount from token to token", above=0, at_most=1, ratio=True, used_by=("ppo", "reinforce_plus_plus")
    )
    lam: float = option(
        1.0, "lambda of GAE: 1 low bias, less: low variance", at_least=0, at_most=1, ratio=True, used_by=CRITIC_TYPES
    )
    kl_placement: Literal["auto", "none", "reward", "loss"] = option(
        "auto",
        "where the distance to the reference model is charged; auto: ppo and reinforce_plus_plus in the reward, "
        "the rest in the loss (verl: none)",
        used_by=ROLLOUT_TYPES,
    )
    kl_coef: float = option(
        0.001,
        "weight of that distance",
        at_least=0,
        at_most=10,
        used_by=ROLLOUT_TYPES,
        why="a large weight keeps the policy where it is, a negative one pays it for drifting away",
    )
    kl_controller: Literal["fixed", "adaptive"] = option(
        "fixed", "adaptive: kl_coef moves to hold kl_target; only with kl_placement reward", used_by=ROLLOUT_TYPES
    )
    kl_target: float = option(0.1, "KL that the adaptive controller aims at, in nats", above=0, used_by=ROLLOUT_TYPES)
    kl_horizon: int = option(
        10000, "how slowly the adaptive controller moves, in samples", at_least=1, used_by=ROLLOUT_TYPES
    )
    kl_estimator: KLEstimator = option(
        "auto", "auto: kl (= k1) in the reward, low_var_kl (= k3) in the loss, as in verl", used_by=ROLLOUT_TYPES
    )
    temperature: float = option(
        1.0,
        "of sampling during rollouts",
        above=0,
        at_most=10,
        used_by=ROLLOUT_TYPES,
        why="at 0 all answers to a prompt are equal, the log-probs are 0 or -1e7, and nothing is learned",
    )
    top_p: float = option(
        1.0,
        "sample from the tokens that make up this share of probability",
        above=0,
        at_most=1,
        ratio=True,
        used_by=ROLLOUT_TYPES,
    )
    top_k: int = option(-1, "sample from the k likeliest tokens; -1: all", at_least=-1, used_by=ROLLOUT_TYPES)
    rollout_engine: Literal["auto", "hf", "vllm"] = option(
        "auto",
        "hf: transformers, starts in seconds, CPU or GPU; vllm: in the same process, GPU only, starts in a minute",
        used_by=ROLLOUT_TYPES,
    )
    recompute_old_log_probs: bool = option(
        True,
        "the policy reads each answer again before its update. false: the rollout's log-probs are taken, one pass "
        "less, and verl measures neither entropy nor how far rollout and policy are apart",
        used_by=ROLLOUT_TYPES,
    )
    actor_offload: Literal["cpu"] | None = option(None, "cpu: policy weights and optimizer rest in host memory")
    critic_offload: Literal["cpu"] | None = option(None, "the same for the value model", used_by=CRITIC_TYPES)
    reward_offload: Literal["cpu"] | None = option(None, "the same for the reward model", used_by=ROLLOUT_TYPES)
    reference_offload: Literal["cpu"] | None = option(None, "the same for the reference model")
    beta: Auto | float = option(
        "auto",
        "dpo, kto: strength of the pull to the reference; simpo: reward scale; orpo: weight of the odds ratio; "
        "auto: 0.1, simpo 2.0",
        above=0,
        used_by=PREFERENCE_TYPES,
        why="at 0 chosen and rejected weigh the same and nothing is learned",
    )
    dpo_loss: Literal["sigmoid", "ipo", "hinge"] = option("sigmoid", "form of the dpo loss", used_by=("dpo",))
    label_smoothing: float = option(
        0.0,
        "assumed share of pairs with the answers swapped",
        at_least=0,
        below=0.5,
        ratio=True,
        used_by=("dpo",),
        why="from 0.5 on the loss prefers the rejected answer",
    )
    reference_free: bool = option(False, "dpo without a reference model", used_by=("dpo",))
    simpo_gamma: float = option(1.0, "target margin between chosen and rejected", at_least=0, used_by=("simpo",))
    desirable_weight: Auto | float = option(
        "auto", "kto: weight of good answers; auto: from the counts", above=0, used_by=("kto",)
    )
    undesirable_weight: Auto | float = option(
        "auto", "kto: weight of bad answers; auto: from the counts", above=0, used_by=("kto",)
    )


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """Where results go, how long it runs, and on what."""

    output_dir: str = option("outputs", "folder of the results; a finished run in it moves to history/")
    logging_steps: int = option(1, "lines on the console every so many steps; the records hold every step", at_least=1)
    seed: int = option(42, "of data order, sampling and initial weights", at_least=0, at_most=2**32 - 1)
    max_steps: int | None = option(None, "stop after so many steps; null: from rl.num_train_epochs", at_least=1)
    save_steps: Literal["end", "never"] | int = option(
        "end",
        "a checkpoint every so many steps, and at the end (verl: never). Each takes 16 bytes a weight on disk, 28 with "
        "a critic (8 and 14 GB for 0.5 billion), and the time to write them; save_total_limit of them are kept. never: "
        "nothing to resume from, and the trained model is lost",
        at_least=1,
    )
    save_total_limit: int = option(2, "checkpoints kept, the newest (verl: all)", at_least=1)
    eval_steps: int | None = option(None, "evaluate every so many steps; null: never", at_least=1)
    eval_before_train: bool = option(False, "evaluate once before the first step (verl: true)")
    resume_from_checkpoint: str | None = option(
        None, "a folder global_step_N, or latest; null: a new run (verl: resumes in silence)"
    )
    backend: Literal["auto", "local", "ray"] = option(
        "auto", "local: one process, one device; ray: verl's own cluster; auto: by num_devices"
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "auto: cuda where there is a usable GPU, else cpu")
    num_devices: Auto | int = option("auto", "auto: 1 (verl: 8)", at_least=1)
    num_threads: Auto | int = option("auto", "CPU threads of torch; auto: what this process may use", at_least=1)
    memory_budget_gb: float | None = option(
        None,
        "GiB that a run may take of the device's memory (on a CPU: of the host's). Offload, micro batch and "
        "checkpointing that you leave open are chosen so that the memory plan stays below; null: no limit",
        above=0,
    )


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the settings came from. For messages and records; no behaviour hangs on it."""

    config_path: str | None = None  # the YAML file, None from Python
    profile: str | None = None  # the chosen one of the file's profiles
    profile_why: str = ""
    overrides: tuple[str, ...] = ()  # section.key=value, as typed
    given: frozenset[str] = frozenset()  # `section.key` that somebody set, as opposed to defaults
    notices: tuple[str, ...] = ()  # what was understood in another way than written, or is not used


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of one run, checked. Built by :mod:`quickstart.config`, never by hand."""

    model: ModelArguments = field(default_factory=ModelArguments)
    data: DataArguments = field(default_factory=DataArguments)
    rl: RLArguments = field(default_factory=RLArguments)
    training: TrainingArguments = field(default_factory=TrainingArguments)
    verl: dict[str, Any] = field(default_factory=dict)  # flat: dotted verl key -> value
    source: Source = field(default_factory=Source)


Section = ModelArguments | DataArguments | RLArguments | TrainingArguments
SECTIONS: dict[str, type[Any]] = {
    "model": ModelArguments,
    "data": DataArguments,
    "rl": RLArguments,
    "training": TrainingArguments,
}


def field_names(section: str) -> tuple[str, ...]:
    """Names of the settings of a section, in the order in which they are written above."""
    return tuple(f.name for f in dataclasses.fields(SECTIONS[section]))


def algorithm_name(rl_type: str) -> str:
    """As printed in log lines: PPO, GRPO, REINFORCE++."""
    return rl_type.upper().replace("_PLUS_PLUS", "++").replace("_", " ")
