"""Data sets on the hub: rows where it answers, one message with the ways out where it does not."""

import datasets
import pytest

from quickstart.arguments import DataArguments
from quickstart.data import hub, read_rows
from quickstart.errors import UserError

NAME = "owner/pairs"
ROWS = [{"prompt": f"q {i}", "chosen": "a", "rejected": "b"} for i in range(3)]


@pytest.fixture
def answers(monkeypatch):
    """A hub that is there, and a library that gives or raises what the test wants."""
    calls = []

    def answers(result):
        def load_dataset(name, config_name, split):
            calls.append((name, config_name, split))
            if isinstance(result, Exception):
                raise result
            return datasets.Dataset.from_list(result)

        monkeypatch.setattr(hub, "_online", lambda: True)
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return calls

    return answers


def fault(**settings):
    with pytest.raises(UserError) as error:
        read_rows(DataArguments(train_file=NAME, **settings))
    (only,) = error.value.faults
    return only


def test_rows_of_a_split_and_configuration(answers):
    calls = answers(ROWS)
    table = read_rows(DataArguments(train_file=NAME, split="train_prefs", config_name="all"))
    assert calls == [(NAME, "all", "train_prefs")]
    assert [row.prompt_messages[0]["content"] for row in table.rows] == ["q 0", "q 1", "q 2"]
    assert [(row.file, row.line) for row in table.rows] == [(NAME, 1), (NAME, 2), (NAME, 3)]


def test_without_a_split_it_is_train(answers):
    calls = answers(ROWS)
    read_rows(DataArguments(train_file=NAME))
    assert calls == [(NAME, None, "train")]


def test_a_wrong_split_lists_the_ones_that_exist(answers):
    answers(ValueError("Unknown split \"train\". Should be one of ['train_prefs', 'test_prefs']."))
    found = fault()
    assert found.field == "data.split"
    assert "train_prefs" in found.rule
    assert "data.split" in found.fix


def test_a_missing_configuration_lists_the_ones_that_exist(answers):
    answers(ValueError("Config name is missing.\nPlease pick one among the available configs: ['a', 'b']\nExample: x"))
    found = fault()
    assert found.field == "data.config_name"
    assert "['a', 'b']" in found.rule


def test_an_unknown_or_gated_data_set(answers):
    answers(datasets.exceptions.DatasetNotFoundError("Dataset 'owner/pairs' doesn't exist on the Hub"))
    found = fault()
    assert found.field == "data.train_file"
    assert found.found == NAME
    assert "hf auth login" in found.fix


def test_an_unreachable_hub_is_said_at_once_with_three_ways_out(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    found = fault()
    assert found.field == "data.train_file"
    assert "http://127.0.0.1:9 cannot be reached" in found.rule
    for way in ("HF_ENDPOINT", "local copy", "bundled rows"):
        assert way in found.fix


def test_offline_means_not_asking(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "reachable", lambda *_: pytest.fail("asked the hub"))
    assert "cannot be reached" in fault().rule


def test_a_cached_copy_is_taken_without_the_hub(answers, monkeypatch, tmp_path):
    calls = answers(ROWS)
    monkeypatch.setattr(hub, "_online", lambda: False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    (tmp_path / "owner___pairs").mkdir()
    assert len(read_rows(DataArguments(train_file=NAME)).rows) == 3
    assert calls
    assert datasets.config.HF_HUB_OFFLINE is True
