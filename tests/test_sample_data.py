"""data/sample_100.jsonl is what its README says: 100 rows, half English and half Chinese, nothing twice."""

import json
from pathlib import Path

import pytest

SAMPLE = Path(__file__).resolve().parents[1] / "data" / "sample_100.jsonl"


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]


def is_chinese(text: str) -> bool:
    letters = [char for char in text if char.isalpha()]
    return sum("\u4e00" <= char <= "\u9fff" for char in letters) > len(letters) / 2


def test_there_are_100_rows_of_three_text_fields(rows):
    assert len(rows) == 100
    for row in rows:
        assert list(row) == ["prompt", "chosen", "rejected"]
        assert all(isinstance(text, str) and text == text.strip() and text for text in row.values())


def test_half_of_the_rows_are_chinese_and_languages_take_turns(rows):
    languages = [is_chinese(row["chosen"]) for row in rows]
    assert sum(languages) == 50
    assert languages == [False, True] * 50


def test_both_answers_of_a_row_are_in_one_language(rows):
    for row in rows:
        assert is_chinese(row["chosen"]) == is_chinese(row["rejected"]), row["prompt"]


def test_no_text_appears_twice(rows):
    texts = [text for row in rows for text in row.values()]
    assert len(set(texts)) == 300


def test_chinese_text_is_stored_as_it_is_read():
    raw = SAMPLE.read_text(encoding="utf-8")
    assert "\\u" not in raw
    assert "\ufffd" not in raw


def test_rejected_answers_are_sentences_of_similar_length(rows):
    for row in rows:
        unit = (lambda text: len(text)) if is_chinese(row["chosen"]) else (lambda text: len(text.split()))
        assert unit(row["rejected"]) >= 8, row["prompt"]
        assert 0.4 < unit(row["rejected"]) / unit(row["chosen"]) < 2, row["prompt"]
