"""From files to what training reads: checks by purpose, lengths, accounts, verl's format, the cache."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from quickstart import config
from quickstart.data import cache, prepare, prepare_labelled, prepare_pairs
from quickstart.data.lengths import render, token_counts, truncate
from quickstart.errors import UserError

TEMPLATE = 19  # tokens of the template around one user message, with the byte tokenizer
GOOD = {"prompt": "q", "chosen": "a", "rejected": "b"}


@pytest.fixture
def make(tmp_path, byte_tokenizer):
    """Settings for rows written to train.jsonl; data settings as keywords."""

    def make(rows, rl=None, eval_rows=None, **data):
        files = {"train_file": rows, "eval_file": eval_rows}
        for name, content in files.items():
            if content is not None:
                path = tmp_path / f"{name}.jsonl"
                path.write_text("".join(json.dumps(row) + "\n" for row in content))
                data[name] = str(path)
        return config.from_arguments({}, data, rl or {}, {"output_dir": str(tmp_path / "outputs")})

    return make


@pytest.fixture
def faults(make, byte_tokenizer):
    def faults(rows, run=prepare, **settings):
        with pytest.raises(UserError) as error:
            run(make(rows, **settings), byte_tokenizer)
        return error.value.faults

    return faults


def written(prepared):
    return pq.read_table(prepared.train_path).to_pylist()


def test_rows_are_in_verls_format(make, byte_tokenizer, tmp_path):
    prepared = prepare(make([GOOD | {"id": 4, "score": 4.5}, {**GOOD, "prompt": "r"}]), byte_tokenizer)
    assert written(prepared) == [
        {
            "data_source": "quickstart",
            "prompt": [{"role": "user", "content": text}],
            "ability": "chat",
            "reward_model": {"style": "rule", "ground_truth": "a"},
            "extra_info": {
                "index": index,
                "prompt": [{"role": "user", "content": text}],
                "chosen": "a",
                "rejected": "b",
                "label": None,
                "file": str(tmp_path / "train_file.jsonl"),
                "line": index + 1,
                "row": row,
            },
        }
        for index, (text, row) in enumerate([("q", '{"id": 4, "score": 4.5}'), ("r", None)])
    ]
    assert (prepared.num_train, prepared.num_eval, prepared.eval_path) == (2, 0, None)
    assert prepared.shape == "prompt, chosen, rejected"
    assert prepared.longest_prompt == TEMPLATE + 1


def test_verls_own_dataset_reads_them(make, byte_tokenizer, tmp_path, monkeypatch):
    import datasets
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    prepared = prepare(make([GOOD] * 3), byte_tokenizer)
    keys = {"max_prompt_length": 64, "return_raw_chat": True, "filter_overlong_prompts": True}
    dataset = RLHFDataset(str(prepared.train_path), byte_tokenizer, OmegaConf.create(keys))
    assert len(dataset) == 3
    assert dataset[0]["reward_model"]["ground_truth"] == "a"
    assert dataset[0]["extra_info"]["rejected"] == "b"
    assert dataset[2]["index"] == 2


def test_the_sum_is_what_sha256sum_prints(make, byte_tokenizer):
    cfg = make([GOOD])
    raw = Path(cfg.data.train_file).read_bytes()
    assert prepare(cfg, byte_tokenizer).sha256 == hashlib.sha256(raw).hexdigest()


def test_evaluation_rows_come_from_their_own_file(make, byte_tokenizer):
    prepared = prepare(make([GOOD] * 2, eval_rows=[{**GOOD, "chosen": "z"}]), byte_tokenizer)
    assert (prepared.num_train, prepared.num_eval) == (2, 1)
    assert pq.read_table(prepared.eval_path).to_pylist()[0]["reward_model"]["ground_truth"] == "z"


def test_faults_of_both_files_come_at_once(faults):
    found = faults([{"prompt": None}], eval_rows=[{"Prompt": "x"}])
    assert [fault.field.rsplit("/")[-1] for fault in found] == ["train_file.jsonl:1", "eval_file.jsonl"]


USELESS = [
    ({**GOOD, "prompt": ""}, "the prompt is empty"),
    ({**GOOD, "prompt": " \n"}, "the prompt is empty"),
    ({**GOOD, "chosen": ""}, "chosen is empty"),
    ({**GOOD, "rejected": "  "}, "rejected is empty"),
    ({**GOOD, "chosen": "b"}, "chosen and rejected are identical"),
    ({**GOOD, "prompt": "a\0b"}, "NUL character in prompt"),
    ({**GOOD, "chosen": "你\0"}, "NUL character in chosen"),
    ({**GOOD, "rejected": "x\ud83d"}, "half a surrogate pair in rejected"),
]


@pytest.mark.parametrize("run", [prepare, prepare_pairs, prepare_labelled], ids=["ppo", "dpo", "kto"])
@pytest.mark.parametrize(("row", "reason"), USELESS)
def test_useless_rows_are_left_out_by_name(make, byte_tokenizer, tmp_path, run, row, reason):
    notices = run(make([GOOD, row, GOOD]), byte_tokenizer).notices
    assert any(
        notice.startswith(f"1 of 3 rows left out, {reason}") and notice.endswith("train_file.jsonl:2")
        for notice in notices
    )


def test_a_whole_surrogate_pair_is_a_character(make, byte_tokenizer, tmp_path):
    cfg = make([GOOD])
    with open(cfg.data.train_file, "w") as file:
        file.write('{"prompt": "\\ud83d\\ude00", "chosen": "a", "rejected": "b"}\n')
    assert written(prepare(cfg, byte_tokenizer))[0]["prompt"][0]["content"] == "😀"


def test_no_row_left_says_why(faults):
    (fault,) = faults([{**GOOD, "chosen": "b"}] * 8)
    assert fault.field == "data.train_file"
    assert "0 of 8 rows" in fault.found
    assert "chosen and rejected are identical" in fault.rule
    assert "1, 2, 3, 4, 5, 6, 7, 8" in fault.rule


def test_more_than_ten_places_are_counted(make, byte_tokenizer):
    notices = prepare(make([{**GOOD, "prompt": ""}] * 15 + [GOOD]), byte_tokenizer).notices
    assert any(notice.startswith("15 of 16 rows") and notice.endswith(", 9, 10 and 5 more") for notice in notices)


def test_copies_are_kept_and_counted(make, byte_tokenizer):
    prepared = prepare(make([GOOD] * 3), byte_tokenizer)
    assert prepared.num_train == 3
    assert any("exact copies of earlier rows, kept (2 rows" in notice for notice in prepared.notices)


@pytest.mark.parametrize(
    ("run", "row", "rule", "fix"),
    [
        (prepare, {"prompt": "q"}, "compares answers with `chosen`", "data.columns.chosen"),
        (prepare, {"prompt": "q", "choosen": "x"}, "compares answers with `chosen`", "data.columns.chosen=choosen"),
        (prepare, {"prompt": "q", "response": "x"}, "compares answers with `chosen`", "data.columns.answer=response"),
        (prepare_pairs, {"prompt": "q", "chosen": "a"}, "`rejected` must be there", "data.columns.rejected"),
        (prepare_pairs, {"prompt": "q", "completion": "a"}, "`chosen` must be there", "data.columns.chosen"),
        (prepare_pairs, {**GOOD, "rejected": None}, "`rejected` must be there", "data.columns.rejected"),
        (prepare_labelled, {"prompt": "q", "completion": "a"}, "KTO needs a label", "data.columns.label"),
        (prepare_labelled, {"prompt": "q", "completion": None, "label": True}, "must be text", "write the answer"),
    ],
)
def test_what_the_algorithm_needs_must_be_there(faults, run, row, rule, fix):
    (fault,) = faults([row, row], run=run)
    assert fault.field.endswith("train_file.jsonl:1")
    assert rule in fault.rule
    assert "in 2 rows" in fault.rule
    assert fix in fault.fix


def test_a_function_reward_needs_no_answers(make, byte_tokenizer, tmp_path):
    (tmp_path / "r.py").write_text("def f(data_source, solution_str, ground_truth, extra_info): return 1.0\n")
    cfg = make([{"prompt": "q"}], rl={"reward": f"function:{tmp_path / 'r.py'}:f"})
    (row,) = written(prepare(cfg, byte_tokenizer))
    assert row["reward_model"]["ground_truth"] == ""


def test_a_bad_labelled_answer_is_not_aimed_at(make, byte_tokenizer, tmp_path):
    (tmp_path / "r.py").write_text("def f(data_source, solution_str, ground_truth, extra_info): return 1.0\n")
    rows = [{"prompt": "q", "completion": "x", "label": label} for label in (True, False)]
    cfg = make(rows, rl={"reward": f"function:{tmp_path / 'r.py'}:f"})
    good, bad = written(prepare(cfg, byte_tokenizer))
    assert (good["reward_model"]["ground_truth"], good["extra_info"]["rejected"]) == ("x", None)
    assert (bad["reward_model"]["ground_truth"], bad["extra_info"]["rejected"]) == ("", "x")


def test_pairs_for_dpo(make, byte_tokenizer):
    examples = prepare_pairs(make([GOOD, {**GOOD, "chosen": "c"}], eval_rows=[GOOD]), byte_tokenizer)
    assert [(pair.prompt[0]["content"], pair.chosen, pair.rejected, pair.line) for pair in examples.train] == [
        ("q", "a", "b", 1),
        ("q", "c", "b", 2),
    ]
    assert len(examples.evaluation) == 1


def test_pairs_are_taken_apart_for_kto(make, byte_tokenizer):
    examples = prepare_labelled(make([GOOD]), byte_tokenizer)
    assert [(row.completion, row.label, row.line) for row in examples.train] == [("a", True, 1), ("b", False, 1)]


def test_labelled_rows_for_kto(make, byte_tokenizer):
    rows = [{"prompt": "q", "completion": text, "label": label} for text, label in (("a", "true"), ("b", 0))]
    examples = prepare_labelled(make(rows), byte_tokenizer)
    assert [(row.completion, row.label) for row in examples.train] == [("a", True), ("b", False)]


def prompts_of(lengths):
    return [{**GOOD, "prompt": "x" * length} for length in lengths]


def test_lengths_count_the_template(make, byte_tokenizer):
    cfg = make(prompts_of([1] * 199 + [2]), max_prompt_length=TEMPLATE + 1)
    prepared = prepare(cfg, byte_tokenizer)
    assert prepared.num_train == 199
    assert prepared.longest_prompt == TEMPLATE + 2
    reason = f"1 of 200 rows left out, prompt longer than data.max_prompt_length={TEMPLATE + 1} tokens"
    assert any(notice.startswith(reason) and notice.endswith(":200") for notice in prepared.notices)


def test_more_than_one_percent_too_long_stops(faults):
    (fault,) = faults(prompts_of([1] * 98 + [300, 200]), max_prompt_length=64)
    assert fault.field == "data.max_prompt_length"
    assert "64, and 2 of 100 prompts" in fault.found
    assert f"the longest has {TEMPLATE + 300} tokens" in fault.found
    assert f"data.max_prompt_length={TEMPLATE + 300}" in fault.fix
    assert "overlong=drop" in fault.fix


def test_all_too_long_stops_also_when_dropping_is_asked_for(faults):
    (fault,) = faults(prompts_of([200]), max_prompt_length=64, overlong="drop")
    assert "0 of 1 row " in fault.found
    assert "longer than data.max_prompt_length=64" in fault.rule


def test_drop_drops_by_name(make, byte_tokenizer):
    prepared = prepare(make(prompts_of([200, 1, 300]), max_prompt_length=64, overlong="drop"), byte_tokenizer)
    assert prepared.num_train == 1
    assert any("2 of 3 rows left out" in notice and ":1, 3" in notice for notice in prepared.notices)


def test_truncate_cuts_from_the_left_and_says_so(make, byte_tokenizer):
    rows = [{**GOOD, "prompt": "".join(map(str, range(100)))}]
    prepared = prepare(make(rows, max_prompt_length=TEMPLATE + 5, overlong="truncate"), byte_tokenizer)
    assert written(prepared)[0]["prompt"][0]["content"] == "79899"[-5:]
    assert any(f"prompts cut from the left to {TEMPLATE + 5} tokens (1 row," in notice for notice in prepared.notices)


def test_truncation_keeps_characters_whole_and_the_system_message(byte_tokenizer):
    messages = [{"role": "system", "content": "sys"}, {"role": "user", "content": "春天的风" * 20}]
    full = token_counts(byte_tokenizer, [render(byte_tokenizer, messages)])[0]
    cut = truncate(byte_tokenizer, messages, full - 100)
    assert cut is not None
    assert cut[0] == messages[0]
    assert messages[1]["content"].endswith(cut[1]["content"])
    assert full - 103 <= token_counts(byte_tokenizer, [render(byte_tokenizer, cut)])[0] <= full - 100


def test_truncation_takes_the_oldest_turns_first(byte_tokenizer):
    def turn(role, text):
        return {"role": role, "content": text}

    messages = [turn("user", "x" * 50), turn("assistant", "y" * 50), turn("user", "z" * 10)]
    assert truncate(byte_tokenizer, messages, TEMPLATE + 10) == messages[2:]
    assert truncate(byte_tokenizer, messages, TEMPLATE + 4) == [turn("user", "zzzz")]
    assert truncate(byte_tokenizer, messages, TEMPLATE) is None


def test_given_answers_are_measured_where_they_are_trained_on(make, byte_tokenizer, faults):
    rows = [{**GOOD, "chosen": "x" * 40}] + [GOOD] * 9
    assert prepare(make(rows, max_response_length=8), byte_tokenizer).num_train == 10
    (fault,) = faults(rows, run=prepare_pairs, max_response_length=8)
    assert fault.field == "data.max_response_length"
    assert "the longest has 41 tokens" in fault.found  # 40 and the end mark
    assert len(prepare_pairs(make(rows, max_response_length=8, overlong="drop"), byte_tokenizer).train) == 9
    kept = prepare_pairs(make(rows, max_response_length=8, overlong="truncate"), byte_tokenizer)
    assert len(kept.train) == 10
    assert any("answers that training cuts to 8 tokens (1 row," in notice for notice in kept.notices)


def test_a_template_that_refuses_names_the_row(make, byte_tokenizer):
    import copy

    strict = copy.deepcopy(byte_tokenizer)
    strict.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}x"
    rows = [GOOD, {**GOOD, "system": "be brief"}]
    with pytest.raises(UserError) as error:
        prepare(make(rows), strict)
    (fault,) = error.value.faults
    assert fault.field.endswith("train_file.jsonl:2")
    assert "no system" in fault.rule
    assert fault.found == "roles system, user"


def test_a_missing_template_is_said_before_any_row(make, byte_tokenizer):
    import copy

    bare = copy.deepcopy(byte_tokenizer)
    bare.chat_template = None
    with pytest.raises(UserError) as error:
        prepare(make([{"prompt": None}]), bare)
    (fault,) = error.value.faults
    assert fault.field == "model.chat_template"
    assert "chatml" in fault.fix


# ---- cache ----


def test_nothing_changed_nothing_done(make, byte_tokenizer, monkeypatch):
    cfg = make([GOOD])
    first = prepare(cfg, byte_tokenizer)
    monkeypatch.setattr("quickstart.data.convert.write_parquet", lambda *_: pytest.fail("converted again"))
    assert prepare(cfg, byte_tokenizer) == first


@pytest.mark.parametrize("what", ["content", "columns", "max_prompt_length", "max_samples", "reward", "template"])
def test_what_matters_makes_a_new_entry(make, byte_tokenizer, what):
    import copy

    row = {**GOOD, "other": "o"}
    cfg, tokenizer = make([row] * 3), byte_tokenizer
    first = prepare(cfg, tokenizer)
    if what == "content":
        make([{**row, "chosen": "changed"}] * 3)
    elif what == "reward":
        cfg = dataclasses.replace(cfg, rl=dataclasses.replace(cfg.rl, reward="verl"))
    elif what == "template":
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template += " "
    else:
        changes = {"columns": {"chosen": "other"}, "max_prompt_length": 99, "max_samples": 2}
        cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, **{what: changes[what]}))
    second = prepare(cfg, tokenizer)
    assert second.train_path != first.train_path
    assert first.train_path.exists()


def test_a_damaged_entry_is_made_again(make, byte_tokenizer):
    cfg = make([GOOD])
    first = prepare(cfg, byte_tokenizer)
    first.train_path.write_bytes(b"cut off")
    assert written(prepare(cfg, byte_tokenizer))[0]["data_source"] == "quickstart"


def test_a_refused_run_leaves_nothing_behind(faults, tmp_path):
    faults([{"prompt": None}])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train_file.jsonl"]


def test_a_refused_run_leaves_an_old_cache_as_it_was(make, byte_tokenizer, faults, tmp_path):
    kept = prepare(make([GOOD]), byte_tokenizer)
    faults([GOOD, {"prompt": None}])
    assert [path.name for path in kept.cache_dir.iterdir()] == [kept.train_path.parent.name]


def test_an_entry_is_published_whole_or_not_at_all(tmp_path):
    with cache.NewEntry(tmp_path, "key") as new:
        new.rows_path.write_bytes(b"rows, and then the disk is full")
    assert list(tmp_path.iterdir()) == []


def test_the_cache_folder_must_be_writable(make, byte_tokenizer, tmp_path):
    (tmp_path / "file").write_text("in the way")
    cfg = make([GOOD], cache_dir=str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError) as error:
        prepare(cfg, byte_tokenizer)
    (fault,) = error.value.faults
    assert fault.field == "data.cache_dir"
    assert str(tmp_path / "file" / "cache") in fault.found
    assert "writable" in fault.rule
    assert "data.cache_dir" in fault.fix


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_found_by_writing(make, byte_tokenizer, tmp_path):
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(UserError):
        prepare(make([GOOD], cache_dir=str(tmp_path / "closed")), byte_tokenizer)


def test_the_cache_lies_beside_the_outputs(make, byte_tokenizer, tmp_path):
    assert prepare(make([GOOD]), byte_tokenizer).train_path.is_relative_to(tmp_path / ".quickstart_cache")
