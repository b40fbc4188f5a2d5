"""Files are whole, JSON is valid, whatever a model or a metric throws at them."""

import errno
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quickstart import writing
from quickstart.errors import RunError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def test_a_file_is_replaced_and_no_temporary_name_stays(tmp_path):
    path = tmp_path / "a.json"
    writing.write_atomic(path, "one")
    writing.write_atomic(path, "two", durable=True)
    assert path.read_text() == "two"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_write_keeps_the_version_before(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    writing.write_atomic(path, "one")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing.os, "replace", full)
    with pytest.raises(RunError, match="disk"):
        writing.write_atomic(path, "two")
    assert path.read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@given(JSON)
def test_json_comes_back_as_it_was(value):
    assert json.loads(writing.to_json(value)) == value
    assert json.loads(writing.to_json(value, indent=2)) == value


def test_chinese_stays_readable_and_lone_surrogates_stay_valid(tmp_path):
    path = tmp_path / "a.jsonl"
    writing.write_json_lines(path, [{"text": "你好\u2028\ud800!"}])
    raw = path.read_bytes().decode("utf-8")
    assert "你好" in raw
    assert len(raw.splitlines()) == 1
    assert json.loads(raw) == {"text": "你好\u2028\ud800!"}


def test_what_is_not_finite_is_named():
    clean, lost = writing.without_nonfinite({"a": 1.0, "b": math.nan, "c": -math.inf, "d": 3, "e": np.float32(0.5)})
    assert clean == {"a": 1.0, "b": None, "c": None, "d": 3, "e": 0.5}
    assert lost == ["b", "c"]
    json.loads(writing.to_json(clean))


def test_nan_never_reaches_a_file_by_accident():
    with pytest.raises(ValueError, match="not JSON compliant"):
        writing.to_json({"a": math.nan})


def test_numbers_of_numpy_are_numbers():
    assert json.loads(writing.to_json({"a": np.float32(0.5), "b": np.int64(3), "c": {1, 2}})) == {
        "a": 0.5,
        "b": 3,
        "c": [1, 2],
    }
