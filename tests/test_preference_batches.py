"""Rows to tokens, mismatched rows, and which rows a step has. No model; the tokenizer has one token a byte."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quickstart.data.prepare import Labelled, Pair
from quickstart.errors import UserError
from quickstart.trainers.preference_batches import (
    Limits,
    TokenRow,
    block_edges,
    check_both_kinds,
    encode_labelled,
    encode_pairs,
    rotate,
    steps_of,
)

WIDE = Limits(prompt=200, answer=100, positions=512, overlong="stop")
USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def pair(prompt: str = "Hi", chosen: str = "yes", rejected: str = "no", line: int = 1) -> Pair:
    messages = [{"role": "user", "content": prompt}]
    return Pair(prompt=messages, chosen=chosen, rejected=rejected, file="a.jsonl", line=line)


def labelled(completion: str, label: bool, line: int = 1) -> Labelled:
    messages = [{"role": "user", "content": "Hi"}]
    return Labelled(prompt=messages, completion=completion, label=label, file="a.jsonl", line=line)


def limits(**changes: Any) -> Limits:
    return Limits(**{**vars(WIDE), **changes})


def test_a_pair_is_two_rows_with_one_prompt(byte_tokenizer: Any) -> None:
    chosen, rejected = encode_pairs([pair()], byte_tokenizer, WIDE).rows
    decode = byte_tokenizer.decode
    assert decode(chosen.prompt) == decode(rejected.prompt) == USER.format("Hi")
    assert decode(chosen.answer) == "yes<|im_end|>\n"
    assert decode(rejected.answer) == "no<|im_end|>\n"


def test_chinese_and_several_turns(byte_tokenizer: Any) -> None:
    messages = [{"role": r, "content": c} for r, c in (("user", "你好"), ("assistant", "好"), ("user", "再见"))]
    row = Pair(prompt=messages, chosen="拜拜", rejected="你好", file="a", line=1)
    chosen, _ = encode_pairs([row], byte_tokenizer, WIDE).rows
    assert byte_tokenizer.decode(chosen.answer) == "拜拜<|im_end|>\n"
    assert byte_tokenizer.decode(chosen.prompt).count("<|im_start|>") == 4


def test_long_answers_are_cut_at_their_end(byte_tokenizer: Any) -> None:
    encoded = encode_pairs([pair(chosen="abcdefgh", rejected="x")], byte_tokenizer, limits(answer=4))
    assert byte_tokenizer.decode(encoded.rows[0].answer) == "abcd"
    assert encoded.cut_answers == 1


def test_long_prompts_lose_their_start(byte_tokenizer: Any) -> None:
    encoded = encode_pairs([pair(prompt="abcdefgh")], byte_tokenizer, limits(prompt=25, overlong="truncate"))
    assert byte_tokenizer.decode(encoded.rows[0].prompt) == USER.format("abcdefgh")[len("<|im_start|>u") :]
    assert len(encoded.rows[0].prompt) == 25


def test_positions_of_the_model_cut_the_answer_but_leave_one_token(byte_tokenizer: Any) -> None:
    whole = encode_pairs([pair(chosen="abcdef", rejected="uvw")], byte_tokenizer, WIDE).rows[0]
    room = len(whole.prompt) + 1
    encoded = encode_pairs([pair(chosen="abcdef", rejected="uvw")], byte_tokenizer, limits(positions=room))
    assert [len(row.answer) for row in encoded.rows] == [1, 1]
    with pytest.raises(UserError, match="leave room for an answer"):
        encode_pairs([pair(chosen="abcdef", rejected="uvw")], byte_tokenizer, limits(positions=room - 1))


@pytest.mark.parametrize(
    ("row", "changes", "told"),
    [
        (pair(chosen="same", rejected="same", line=7), {}, "a.jsonl:7: found the same answer"),
        (pair(chosen="abcd1", rejected="abcd2", line=7), {"answer": 4}, "data.max_response_length>4"),
        (pair(prompt="x" * 300, line=7), {}, "a.jsonl:7: found a prompt of 319 tokens"),
    ],
)
def test_rows_without_use_are_refused_with_their_place(
    byte_tokenizer: Any, row: Pair, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError) as error:
        encode_pairs([pair(), row], byte_tokenizer, limits(**changes))
    assert told in error.value.render()


def test_many_bad_rows_are_counted(byte_tokenizer: Any) -> None:
    rows = [pair(chosen="a", rejected="a", line=i) for i in range(25)]
    with pytest.raises(UserError) as error:
        encode_pairs(rows, byte_tokenizer, WIDE)
    assert "a.jsonl:9" in error.value.render()
    assert "15 more such rows" in error.value.render()


def test_template_that_drops_the_answer_is_named(byte_tokenizer: Any) -> None:
    def apply_chat_template(messages: list[dict[str, str]], **_: Any) -> str:
        return messages[0]["content"]

    broken = SimpleNamespaceTokenizer(byte_tokenizer, apply_chat_template)
    with pytest.raises(UserError, match="chat template"):
        encode_labelled([labelled("x", True)], broken, WIDE)


class SimpleNamespaceTokenizer(SimpleNamespace):
    """A tokenizer with another template."""

    def __init__(self, inner: Any, template: Any) -> None:
        super().__init__(inner=inner, apply_chat_template=template)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def test_labels_follow_their_rows(byte_tokenizer: Any) -> None:
    encoded = encode_labelled([labelled("a", True), labelled("b", False)], byte_tokenizer, WIDE)
    assert encoded.labels == [True, False]
    assert [byte_tokenizer.decode(row.answer)[0] for row in encoded.rows] == ["a", "b"]


@pytest.mark.parametrize(("labels", "kind"), [([True] * 3, "good"), ([False] * 3, "bad")])
def test_one_kind_of_labels_is_refused(labels: list[bool], kind: str) -> None:
    with pytest.raises(UserError, match=f"3 answers, all labelled {kind}"):
        check_both_kinds(labels, "data.train_file")


def rows(count: int) -> list[TokenRow]:
    return [TokenRow(prompt=[i], answer=[100 + i]) for i in range(count)]


def test_rotation_inside_blocks() -> None:
    """Blocks of 2 over 5 rows: 0 1 | 2 3 4, since a block of one would be matched with itself."""
    assert block_edges(5, 2) == [0, 2, 5]
    mixed = rotate(rows(5), 2)
    assert [row.prompt[0] for row in mixed] == [0, 1, 2, 3, 4]
    assert [row.answer[0] for row in mixed] == [101, 100, 104, 102, 103]


@given(st.integers(2, 60), st.integers(2, 20))
def test_no_row_meets_its_own_answer(count: int, block: int) -> None:
    mixed = rotate(rows(count), block)
    assert all(row.answer[0] != row.prompt[0] + 100 for row in mixed)
    assert sorted(row.answer[0] for row in mixed) == [100 + i for i in range(count)]


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.none() | st.integers(0, 9))
def test_every_unit_once_an_epoch(count: int, block: int, per_step: int, steps: int, seed: int | None) -> None:
    size = block * per_step
    if count // block < per_step:
        return
    plan = steps_of(count, steps=steps, size=size, block=block, seed=seed)
    assert [len(step) for step in plan] == [size] * steps
    per_epoch = count // block // per_step
    for start in range(0, steps, per_epoch):
        seen = Counter(unit for step in plan[start : start + per_epoch] for unit in step)
        assert max(seen.values()) == 1
    for step in plan:  # blocks stay whole and in order
        starts = step[::block]
        assert all(start % block == 0 for start in starts)
        assert step == [start + i for start in starts for i in range(block)]


def test_epochs_have_orders_of_their_own() -> None:
    plan = steps_of(12, steps=6, size=4, block=1, seed=1)
    first, second = [u for s in plan[:3] for u in s], [u for s in plan[3:] for u in s]
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert plan == steps_of(12, steps=6, size=4, block=1, seed=1)
    assert steps_of(12, steps=3, size=4, block=1, seed=None)[0] == [0, 1, 2, 3]
