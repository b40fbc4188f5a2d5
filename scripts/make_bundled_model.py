"""Make data/bundled_model: a very small Qwen2 with its own tokenizer, trained from nothing on data/sample_100.jsonl.

What it is for: PPO, GRPO, DPO and KTO on a laptop, with no GPU and no hub, along the code path that Qwen2-0.5B takes.
It learns the chosen and the rejected answer to each sample prompt equally well, so a sampled answer is as often bad
as good, and the reward starts at about 0.5 and has somewhere to go. It knows nothing else: it is not a chatbot.

    python scripts/make_bundled_model.py --out data/bundled_model --seed 1

Same machine, same versions, same seed: same weights. It takes a few minutes on two cores and prints at its end how
long prompts and answers are, six sampled answers, and what the reward looks like.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sacrebleu.metrics import CHRF
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "data" / "sample_100.jsonl"
OUT = ROOT / "data" / "bundled_model"

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 3328
MAX_NEW_TOKENS = 96
NOISE = 0.1
SYSTEM = "You are a helpful assistant."

# Qwen2's pattern (contractions, words, single digits, punctuation, white space), but a Chinese character stands alone:
# on so little text BPE would take whole phrases for words. For training only: the stored tokenizer is a plain
# Qwen2Tokenizer, as AutoTokenizer makes one for this kind of model anyway; without such merges both split alike.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|\p{Han}| ?[\p{L}&&[^\p{Han}]]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)

# ChatML as in Qwen2, with two differences: no system message is made up, and an unknown role is an error.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant'] %}
{{- raise_exception('role ' ~ message.role ~ ' is unknown: use system, user or assistant') }}
{%- endif %}
{{- '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True)
class Example:
    """One conversation as token numbers; the loss is taken from `start` on."""

    ids: list[int]
    start: int


def read_rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def is_chinese(char: str) -> bool:
    return "\u4e00" <= char <= "\u9fff"


def tokenizer_corpus(rows: list[dict[str, str]]) -> list[str]:
    """All texts, answers doubled, and each Chinese character on lines of its own, so that it becomes one token."""
    texts = [row["prompt"] for row in rows] + [row[key] for row in rows for key in ("chosen", "rejected")] * 2
    characters = sorted({char for text in texts for char in text if is_chinese(char)})
    return [*texts, SYSTEM, *(characters * 4)]


def build_tokenizer(rows: list[dict[str, str]]) -> Qwen2Tokenizer:
    """Byte-level BPE: any text can be encoded."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(tokenizer_corpus(rows), trainer)
    merges = [tuple(pair) for pair in json.loads(core.to_str())["model"]["merges"]]
    return Qwen2Tokenizer(
        vocab=core.get_vocab(),
        merges=merges,
        unk_token=None,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        padding_side="left",
    )


def build_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """About three million weights; heads of 64 as in Qwen2-0.5B, and as many as two devices can share."""
    config = Qwen2Config(
        vocab_size=math.ceil(len(tokenizer) / 64) * 64,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
    )
    return model


def prompt_text(tokenizer: Qwen2Tokenizer, prompt: str, system: str | None = None) -> str:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def make_example(tokenizer: Qwen2Tokenizer, prompt: str, answer: str, system: str | None) -> Example:
    head = tokenizer(prompt_text(tokenizer, prompt, system))["input_ids"]
    return Example(head + tokenizer(answer + END)["input_ids"], len(head))


def batches(examples: list[Example], size: int, rng: random.Random) -> Iterator[list[Example]]:
    """All examples once, in random order."""
    order = rng.sample(examples, len(examples))
    for i in range(0, len(order), size):
        yield order[i : i + size]


def collate(batch: list[Example], pad: int) -> dict[str, torch.Tensor]:
    width = max(len(example.ids) for example in batch)
    ids = torch.full((len(batch), width), pad)
    labels = torch.full((len(batch), width), -100)
    mask = torch.zeros((len(batch), width), dtype=torch.long)
    for row, example in enumerate(batch):
        end = len(example.ids)
        ids[row, :end] = torch.tensor(example.ids)
        labels[row, example.start : end] = ids[row, example.start : end]
        mask[row, :end] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def disturb(batch: dict[str, torch.Tensor], share: float) -> dict[str, torch.Tensor]:
    """Swap some answer tokens that the model reads for others of that answer; what it has to say next stays the same.

    A small model that samples slips now and then. This teaches it to find its way back to a readable answer.
    """
    ids = batch["input_ids"].clone()
    for row, labels in enumerate(batch["labels"]):
        places = (labels != -100).nonzero().flatten()
        words = ids[row, places]
        others = words[torch.randperm(len(words))]
        ids[row, places] = torch.where(torch.rand(len(words)) < share, others, words)
    return {**batch, "input_ids": ids}


def train(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    rows: list[dict[str, str]],
    *,
    epochs: int,
    learning_rate: float,
    batch_size: int,
    seed: int,
) -> None:
    """Plain supervised training on both answers of each row; now and then with a system message in front."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.05, fused=True
    )
    steps = epochs * math.ceil(2 * len(rows) / batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    model.train()
    for epoch in range(epochs):
        examples = [
            make_example(tokenizer, row["prompt"], row[key], SYSTEM if rng.random() < 0.2 else None)
            for row in rows
            for key in ("chosen", "rejected")
        ]
        noise = NOISE * max(0.0, 1 - epoch / (0.75 * epochs))  # none in the last quarter
        losses = []
        for batch in batches(examples, batch_size, rng):
            loss = model(**disturb(collate(batch, tokenizer.pad_token_id), noise)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if epoch % 5 == 4 or epoch + 1 == epochs:
            print(f"epoch {epoch + 1:3d} of {epochs}: loss {statistics.mean(losses):.3f}", flush=True)


@torch.no_grad()
def sample_answers(
    model: Any, tokenizer: Qwen2Tokenizer, prompts: list[str], count: int
) -> list[list[tuple[str, bool, int]]]:
    """For each prompt `count` answers at temperature 1: text, whether it came to an end, length in tokens."""
    model.eval()
    texts = [prompt_text(tokenizer, prompt) for prompt in prompts]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        max_new_tokens=MAX_NEW_TOKENS,
        num_return_sequences=count,
    )[:, batch["input_ids"].shape[1] :]
    answers = []
    for ids in output.tolist():
        ended = tokenizer.eos_token_id in ids
        length = ids.index(tokenizer.eos_token_id) + 1 if ended else len(ids)
        answers.append((str(tokenizer.decode(ids[:length], skip_special_tokens=True)), ended, length))
    return [answers[i : i + count] for i in range(0, len(answers), count)]


def preference_reward(answer: str, row: dict[str, str], chrf: CHRF) -> float:
    """0.5 + half of how much more the answer is like the chosen one than like the rejected one: 0 to 1."""
    good = chrf.sentence_score(answer, [row["chosen"]]).score / 100
    bad = chrf.sentence_score(answer, [row["rejected"]]).score / 100
    return 0.5 + 0.5 * (good - bad)


def chinese_share(text: str) -> float:
    letters = [char for char in text if char.isalpha()]
    return sum(map(is_chinese, letters)) / max(1, len(letters))


def describe(name: str, lengths: list[int]) -> str:
    ordered = sorted(lengths)
    p95 = ordered[int(0.95 * (len(ordered) - 1))]
    return f"{name}: mean {statistics.mean(lengths):.1f}, 95% below {p95}, longest {ordered[-1]}"


def report_lengths(tokenizer: Qwen2Tokenizer, rows: list[dict[str, str]]) -> None:
    prompts = [prompt_text(tokenizer, row["prompt"]) for row in rows]
    print(describe("tokens of a prompt", [len(tokenizer(prompt).input_ids) for prompt in prompts]))
    for key in ("chosen", "rejected"):
        print(describe(f"tokens of a {key} answer", [len(tokenizer(row[key] + END).input_ids) for row in rows]))


def report_answers(model: Any, tokenizer: Qwen2Tokenizer, rows: list[dict[str, str]], count: int = 8) -> None:
    """What a first rollout will look like."""
    chrf = CHRF()
    groups = sample_answers(model, tokenizer, [row["prompt"] for row in rows], count)
    flat = [answer for group in groups for answer in group]
    pairs = list(zip(rows, groups, strict=True))
    rewards = [[preference_reward(text, row, chrf) for text, _, _ in group] for row, group in pairs]
    values = [reward for group in rewards for reward in group]
    same_language = [
        (chinese_share(text) > 0.5) == (chinese_share(row["chosen"]) > 0.5)
        for row, group in pairs
        for text, _, _ in group
    ]
    print(f"answers that end within {MAX_NEW_TOKENS} tokens: {statistics.mean(e for _, e, _ in flat):.1%}")
    print(f"answers in the language of the row: {statistics.mean(same_language):.1%}")
    broken = statistics.mean("\ufffd" in text for text, _, _ in flat)
    print(f"answers with broken characters: {broken:.1%}")
    print(describe("tokens of an answer", [length for _, _, length in flat]))
    print(f"reward: mean {statistics.mean(values):.3f}, std {statistics.pstdev(values):.3f}")
    signal = statistics.mean(statistics.pstdev(group) > 0.05 for group in rewards)
    print(f"prompts with reward std above 0.05 over {count} answers: {signal:.0%}")
    both = statistics.mean(min(group) < 0.4 and max(group) > 0.6 for group in rewards)
    print(f"prompts with an answer below 0.4 and one above 0.6: {both:.0%}")
    distinct = statistics.mean(len({text for text, _, _ in group}) for group in groups)
    print(f"different answers among {count}: {distinct:.1f}")
    for (row, group), scores in list(zip(pairs, rewards, strict=True))[:6]:
        print(f"\n  {row['prompt']}\n  -> [{scores[0]:.2f}] {group[0][0]}")


def check_round_trip(tokenizer: Qwen2Tokenizer) -> None:
    for text in (
        "Hello, world!  Two spaces.\n",
        "你好，世界。龘",
        "emoji 🙂👍🏽 café naïve",
        "x = 3 × 4\t÷ 2",
    ):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text, text


def folder_mb(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=55)
    args = parser.parse_args()

    started = time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # sums in one order; and it is hardly slower on a busy laptop
    rows = read_rows(SAMPLE)
    tokenizer = build_tokenizer(rows)
    model = build_model(tokenizer)
    print(f"{len(tokenizer)} tokens, {model.num_parameters() / 1e6:.2f} million weights")
    report_lengths(tokenizer, rows)
    train(model, tokenizer, rows, epochs=args.epochs, learning_rate=1e-3, batch_size=10, seed=args.seed)
    model.bfloat16().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"trained in {time.monotonic() - started:.0f} s; {args.out} has {folder_mb(args.out):.2f} MB\n")

    stored = AutoTokenizer.from_pretrained(args.out)
    check_round_trip(stored)
    report_answers(AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32), stored, rows)


if __name__ == "__main__":
    main()
