"""The in-memory store, held to TransferQueue: what is put is got, packed the same way, by the same calls."""

import inspect

import pytest
import torch
import transfer_queue as tq
import verl_text
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict
from transfer_queue.storage.managers.simple_storage_manager import AsyncSimpleStorageManager
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.v1 import agent_loop_tq, replay_buffer, trainer_base

from quickstart.plugin.store import MemoryStore, join_column, split_column


def jagged(*rows):
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def rows_of(data, name):
    """A column as one plain value a row."""
    return [v.tolist() if isinstance(v, torch.Tensor) else v for v in split_column(data.get(name), len(data))]


@pytest.fixture
def store():
    """Three rows, a jagged, a scalar and an object column, a column shared by all, and tags."""
    store = MemoryStore()
    fields = TensorDict(
        {
            "ids": jagged([1, 2], [3], [4, 5, 6]),
            "score": torch.tensor([0.5, 1.5, 2.5]),
            "uid": NonTensorStack("u", "u", "v"),
            "info": NonTensorStack({"a": 1}, {"a": 2}, {}),
            "step": NonTensorData(7),
        },
        batch_size=3,
    )
    store.kv_batch_put(["a", "b", "c"], "train", fields, [{"n": 1}, {"n": 2}, {"n": 3}])
    return store


class TestPutAndGet:
    def test_every_kind_of_column_comes_back(self, store):
        data = store.kv_batch_get(["a", "b", "c"], "train")
        assert {name: rows_of(data, name) for name in data.keys()} == {  # noqa: SIM118  (a TensorDict iterates over rows)
            "ids": [[1, 2], [3], [4, 5, 6]],
            "score": [0.5, 1.5, 2.5],
            "uid": ["u", "u", "v"],
            "info": [{"a": 1}, {"a": 2}, {}],
            "step": [7, 7, 7],
        }

    def test_in_the_order_of_the_keys(self, store):
        data = store.kv_batch_get(["c", "a"], "train", ["ids", "uid"])
        assert rows_of(data, "ids") == [[4, 5, 6], [1, 2]]
        assert rows_of(data, "uid") == ["v", "u"]

    def test_one_key_as_text(self, store):
        assert rows_of(store.kv_batch_get("b", "train", ["ids"]), "ids") == [[3]]

    def test_a_field_that_no_row_has_is_left_out(self, store):
        data = store.kv_batch_get(["a", "b"], "train", ["ref_log_prob", "ids"])
        assert list(data.keys()) == ["ids"]

    def test_a_field_that_some_rows_lack_is_an_error(self, store):
        store.kv_batch_put(["a"], "train", TensorDict({"value": torch.tensor([1.0])}, batch_size=1))
        with pytest.raises(KeyError, match="value"):
            store.kv_batch_get(["a", "b"], "train", ["value"])
        with pytest.raises(KeyError, match="value"):
            store.kv_batch_get(["b", "a"], "train")

    def test_an_unknown_key_is_an_error(self, store):
        with pytest.raises(KeyError, match="z"):
            store.kv_batch_get(["a", "z"], "train")

    def test_a_second_put_replaces_fields_of_that_name_only(self, store):
        new = TensorDict({"score": torch.tensor([9.0, 8.0]), "extra": jagged([1], [2])}, batch_size=2)
        meta = store.kv_batch_put(["c", "a"], "train", new)
        assert rows_of(store.kv_batch_get(["a", "b", "c"], "train", ["score"]), "score") == [8.0, 1.5, 9.0]
        assert rows_of(store.kv_batch_get(["a"], "train", ["ids"]), "ids") == [[1, 2]]
        assert {"extra", "ids", "score"} <= set(meta.fields)

    def test_partitions_are_apart(self, store):
        store.kv_batch_put(["a"], "val", TensorDict({"score": torch.tensor([3.0])}, batch_size=1), [{}])
        assert rows_of(store.kv_batch_get(["a"], "train", ["score"]), "score") == [0.5]
        assert set(store.kv_list("val")) == {"val"}

    def test_tensor_columns_alone(self, store):
        assert set(store.tensors(["b", "c"], "train").keys()) == {"ids", "score"}

    def test_columns_and_keys_must_match(self, store):
        with pytest.raises(ValueError, match="zip"):
            store.kv_batch_put(["a", "b"], "train", TensorDict({"x": torch.zeros(3)}, batch_size=3))


class TestTags:
    def test_are_merged(self, store):
        store.kv_put("a", "train", tag={"status": "finished"})
        store.kv_batch_put(["b"], "train", tags=[{"n": 20}])
        assert store.kv_list("train")["train"] == {"a": {"n": 1, "status": "finished"}, "b": {"n": 20}, "c": {"n": 3}}

    def test_a_prompt_may_have_tags_and_no_row(self, store):
        store.kv_put("prompt", "train", tag={"is_prompt": True})
        assert store.kv_list()["train"]["prompt"] == {"is_prompt": True}
        assert store.kv_batch_get(["prompt"], "train").is_empty()

    def test_lists_are_copies(self, store):
        store.kv_list("train")["train"]["a"]["n"] = 99
        meta = store.kv_batch_put(["a"], "train", tags=[{}])
        meta.tags[0]["n"] = 98
        assert store.kv_list("train")["train"]["a"]["n"] == 1

    def test_an_unknown_partition_lists_nothing(self, store):
        assert store.kv_list("val").get("val", {}) == {}

    def test_returned_keys_tags_and_fields(self, store):
        meta = store.kv_batch_put(["c", "a"], "train", tags=[{"m": 1}, {"m": 2}])
        assert (meta.keys, meta.partition_id) == (["c", "a"], "train")
        assert meta.tags == [{"n": 3, "m": 1}, {"n": 1, "m": 2}]
        assert meta.extra_info == {}


class TestClear:
    def test_rows_and_tags_are_gone(self, store):
        store.kv_clear(["a", "c", "unknown"], "train")
        assert store.kv_list("train") == {"train": {"b": {"n": 2}}}
        with pytest.raises(KeyError):
            store.kv_batch_get(["a"], "train")

    def test_one_key_as_text(self, store):
        store.kv_clear("abc", "train")
        store.kv_clear("b", "train")
        assert set(store.kv_list("train")["train"]) == {"a", "c"}


WORDS = st.text("xyz", min_size=1, max_size=3)
ROW = st.fixed_dictionaries(
    {
        "jagged": st.lists(st.integers(-9, 9), min_size=1, max_size=5).map(lambda v: torch.tensor(v)),
        "scalar": st.integers(-9, 9).map(torch.tensor),
        "object": st.one_of(WORDS, st.dictionaries(WORDS, st.integers(), max_size=2), st.none()),
    }
)


class TestProperties:
    @settings(max_examples=60, deadline=None)
    @given(rows=st.dictionaries(WORDS, ROW, min_size=1, max_size=6), data=st.data())
    def test_round_trip_in_any_order_and_any_number_of_puts(self, rows, data):
        store, keys = MemoryStore(), list(rows)
        cut = data.draw(st.integers(0, len(keys)))
        for part in (keys[:cut], keys[cut:]):
            if part:
                columns = {
                    name: join_column([rows[key][name] for key in part]) for name in ("jagged", "scalar", "object")
                }
                store.kv_batch_put(part, "train", TensorDict(columns, batch_size=len(part)))
        order = data.draw(st.permutations(keys))
        got = store.kv_batch_get(order, "train")
        for name in ("jagged", "scalar"):
            assert rows_of(got, name) == [rows[key][name].tolist() for key in order]
        assert rows_of(got, "object") == [rows[key]["object"] for key in order]

    @settings(max_examples=60, deadline=None)
    @given(rows=st.lists(ROW, min_size=1, max_size=6), name=st.sampled_from(["jagged", "scalar", "object"]))
    def test_columns_are_packed_as_transfer_queue_packs_them(self, rows, name):
        values = [row[name] for row in rows]
        ours, theirs = join_column(values), AsyncSimpleStorageManager._pack_field_values(values)
        assert type(ours) is type(theirs)
        if isinstance(ours, torch.Tensor):
            assert ours.layout == theirs.layout
            assert ours.dtype == theirs.dtype
            assert [v.tolist() for v in ours.unbind()] == [v.tolist() for v in theirs.unbind()]
        else:
            assert ours.tolist() == theirs.tolist()


USERS = [trainer_base, replay_buffer, agent_loop_tq, padding_utils]
ASYNC_TRAINERS_ONLY = {"save_checkpoint", "load_checkpoint"}


class TestAgainstVerl:
    @pytest.mark.parametrize("module", USERS)
    def test_every_call_is_one_that_the_store_has(self, module):
        used = verl_text.attributes(verl_text.tree(module), "tq") - ASYNC_TRAINERS_ONLY
        assert used
        for name in used:
            for call in verl_text.calls(verl_text.tree(module), f"tq.{name}"):
                verl_text.binds(call, getattr(MemoryStore(), name))

    def test_checkpoints_of_the_queue_are_for_asynchronous_trainers(self):
        for method in ("_load_checkpoint", "_save_checkpoint"):
            text = inspect.getsource(getattr(trainer_base.PPOTrainer, method))
            before = text.partition("tq.load_checkpoint" if "load" in method else "tq.save_checkpoint")[0]
            assert 'self.trainer_mode != "sync"' in before

    @pytest.mark.parametrize("name", ["kv_batch_put", "kv_put", "kv_batch_get", "kv_list", "kv_clear"])
    def test_parameters_stand_in_transfer_queues_order(self, name):
        ours = list(inspect.signature(getattr(MemoryStore(), name)).parameters)
        assert ours == list(inspect.signature(getattr(tq, name)).parameters)[: len(ours)]

    def test_what_it_lacks_is_an_error(self):
        with pytest.raises(AttributeError):
            _ = MemoryStore().kv_batch_get_by_meta
