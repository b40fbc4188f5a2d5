"""data/bundled_model loads as any Qwen2 does, encodes any text, and answers the sample prompts in their language."""

import json
from pathlib import Path

import pytest
import torch
from jinja2.exceptions import TemplateError
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

DATA = Path(__file__).resolve().parents[1] / "data"
FOLDER = DATA / "bundled_model"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, local_files_only=True).eval()


def is_chinese(text: str) -> bool:
    letters = [char for char in text if char.isalpha()]
    return sum("\u4e00" <= char <= "\u9fff" for char in letters) > len(letters) / 2


def test_folder_is_at_most_8_megabytes():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 8_000_000


def test_it_is_a_qwen2_with_finite_weights(model):
    assert isinstance(model, Qwen2ForCausalLM)
    assert all(torch.isfinite(weight).all() for weight in model.parameters())


def test_model_and_tokenizer_agree_on_special_tokens(model, tokenizer):
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    assert model.config.vocab_size >= len(tokenizer)


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!  Two spaces.\n",
        "你好，世界。龘",
        "emoji 🙂👍🏽 café naïve",
        "x = 3 × 4\t÷ 2 <b>&amp;</b>",
    ],
)
def test_any_text_comes_back_from_the_tokenizer_unchanged(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template_renders_all_three_roles(tokenizer):
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "你好"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Bye"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n你好<|im_end|>\n"
        "<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )


def test_chat_template_refuses_an_unknown_role_by_name(tokenizer):
    with pytest.raises(TemplateError, match="tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_sample_prompts_and_answers_fit_the_lengths_of_the_cpu_profile(tokenizer):
    for line in (DATA / "sample_100.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, return_dict=False
        )
        assert len(prompt) <= 64, row["prompt"]
        assert max(len(tokenizer(row[key])["input_ids"]) for key in ("chosen", "rejected")) <= 72, row["prompt"]


def test_greedy_answers_are_in_the_language_of_the_row_and_come_to_an_end(model, tokenizer):
    rows = [json.loads(line) for line in (DATA / "sample_100.jsonl").read_text(encoding="utf-8").splitlines()][:8]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
        )
        for row in rows
    ]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        do_sample=False,
        max_new_tokens=96,
    )[:, batch["input_ids"].shape[1] :]
    for row, ids in zip(rows, output.tolist(), strict=True):
        answer = tokenizer.decode(ids, skip_special_tokens=True)
        assert tokenizer.eos_token_id in ids, row["prompt"]
        assert len(answer) >= 15, row["prompt"]
        assert is_chinese(answer) == is_chinese(row["chosen"]), (row["prompt"], answer)
        assert "\ufffd" not in answer
