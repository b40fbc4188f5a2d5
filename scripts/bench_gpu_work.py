"""The work of bench_gpu.py: model, rows and reward, and the commands that run it: ours, stock verl's and TRL's."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

PROMPTS, NEW_TOKENS, UPDATE = 100, 128, 20
REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return min(1.0, sum(character.isdigit() for character in solution_str) / 8)
"""


@dataclass(frozen=True, kw_only=True)
class Work:
    """How much is done in one run."""

    prompts: int = PROMPTS
    new_tokens: int = NEW_TOKENS
    steps: int


def make_inputs(folder: Path) -> None:
    """Model, rows and reward under `folder`; nothing where they are already."""
    import random

    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    if (folder / "rows.jsonl").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(0)
    torch.manual_seed(0)
    sums = [(dice.randint(0, 20), dice.randint(1, 20)) for _ in range(PROMPTS)]  # a pair must not be equal
    question = "Say {} plus {}, and explain how the digits add up in a short paragraph. Task number {}."
    rows = [
        {"prompt": question.format(a, b, i), "chosen": f"{a + b} " * 40, "rejected": f"{a - b} " * 40}
        for i, (a, b) in enumerate(sums)
    ]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    bpe.train_from_iterator([json.dumps(row) for row in rows], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[2], pad_token=special[0])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer.save_pretrained(folder / "model")
    shape = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    Qwen2ForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder / "model")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    write_parquet(folder / "train.parquet", rows)
    text = "\n".join(json.dumps(row) for row in rows)
    (folder / "rows.jsonl").write_text(text + "\n", encoding="utf-8")


def write_parquet(path: Path, rows: list[dict[str, str]]) -> None:
    """The rows in verl's own format, for the stock trainer."""
    from datasets import Dataset

    Dataset.from_list(
        [
            {
                "data_source": "bench",
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "ability": "chat",
                "reward_model": {"style": "rule", "ground_truth": row["chosen"]},
                "extra_info": {"index": index},
            }
            for index, row in enumerate(rows)
        ]
    ).to_parquet(path)


def rows_file(folder: Path, prompts: int) -> Path:
    """The rows of the benchmark, as often as it takes, each prompt with a number of its own."""
    if prompts == PROMPTS:
        return folder / "rows.jsonl"
    path = folder / f"rows_{prompts}.jsonl"
    lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(lines[i % len(lines)]) for i in range(prompts)]
    text = "".join(json.dumps(row | {"prompt": f"{row['prompt']} ({i})"}) + "\n" for i, row in enumerate(rows))
    path.write_text(text, encoding="utf-8")
    return path


def our_command(folder: Path, method: str, work: Work, output: Path, extra: list[str]) -> list[str]:
    """`python -m quickstart.run` with the work of this benchmark."""
    batch = {"ppo": (work.prompts, 1), "grpo": (work.prompts // 4, 4)}.get(method)
    rollout = [f"rl.rollout_batch_size={batch[0]}", f"rl.num_generations={batch[1]}"] if batch else []
    return [
        *(sys.executable, "-m", "quickstart.run", "profile=gpu"),
        f"model.model_name_or_path={folder / 'model'}",
        f"data.train_file={rows_file(folder, work.prompts)}",
        *("data.max_prompt_length=256", f"data.max_response_length={work.new_tokens}", "data.overlong=truncate"),
        *(f"rl.rl_type={method}", f"rl.reward=function:{folder / 'reward.py'}:compute_score", *rollout),
        *(f"rl.per_device_train_batch_size={UPDATE}", f"rl.gradient_accumulation_steps={1 if batch else 5}"),
        *(f"training.max_steps={work.steps}", "training.save_steps=never", f"training.output_dir={output}", *extra),
    ]


def learn_command(output: Path, device: str, steps: int) -> list[str]:
    """PPO of the bundled model on the sample rows with the settings of profile cpu, where its reward rises."""
    return [
        *(sys.executable, "-m", "quickstart.run", "profile=cpu", f"training.device={device}", "model.torch_dtype=auto"),
        *(f"training.max_steps={steps}", "training.save_steps=never", f"training.output_dir={output}"),
    ]


def trl_command(folder: Path, method: str, steps: int) -> list[str]:
    """The same work with TRL (bench_gpu_trl.py)."""
    script = Path(__file__).with_name("bench_gpu_trl.py")
    return [sys.executable, str(script), method, str(steps), str(folder)]


def stock_command(folder: Path, steps: int) -> list[str]:
    """verl's own main_ppo with its vLLM rollout, and what it needs to run on one device without flash-attn."""
    actor = "actor_rollout_ref"
    sdpa = "override_config.attn_implementation=sdpa"
    micro = UPDATE
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        *(f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/train.parquet"),
        *(f"data.train_batch_size={PROMPTS}", "data.max_prompt_length=256", f"data.max_response_length={NEW_TOKENS}"),
        "data.dataloader_num_workers=0",
        *(f"{actor}.model.path={folder}/model", f"{actor}.model.use_remove_padding=False", f"+{actor}.model.{sdpa}"),
        *(f"critic.model.path={folder}/model", "critic.model.use_remove_padding=False", f"+critic.model.{sdpa}"),
        *(f"{actor}.actor.ppo_mini_batch_size={UPDATE}", f"{actor}.actor.ppo_micro_batch_size_per_gpu={micro}"),
        *(f"critic.ppo_micro_batch_size_per_gpu={micro}", f"{actor}.rollout.log_prob_micro_batch_size_per_gpu={micro}"),
        *(f"{actor}.ref.log_prob_micro_batch_size_per_gpu={micro}", f"{actor}.rollout.name=vllm"),
        *(f"{actor}.rollout.tensor_model_parallel_size=1", f"{actor}.rollout.gpu_memory_utilization=0.3"),
        *("algorithm.use_kl_in_reward=True", "algorithm.adv_estimator=gae"),
        f"reward.custom_reward_function.path={folder}/reward.py",
        *("trainer.n_gpus_per_node=1", "trainer.nnodes=1", f"trainer.total_training_steps={steps}"),
        *("trainer.total_epochs=10", "trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1"),
        *("+ray_kwargs.ray_init.include_dashboard=False", 'trainer.logger=["console"]'),
    ]


def value_head_file(folder: Path) -> Path:
    """A module that lets stock verl's critic load without flash-attn (verl/utils/model.py:649 asks for it)."""
    path = folder / "bench_value_head.py"
    path.write_text(
        "import verl.utils.model as model\n"
        "from quickstart.plugin.shims import load_value_head_model\n"
        "model.load_valuehead_model = load_value_head_model\n",
        encoding="utf-8",
    )
    return path
