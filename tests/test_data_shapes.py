"""Every shape of data that people have ends in the same rows; what does not fit is named with the column meant."""

import json

import pytest

from quickstart.arguments import DataArguments
from quickstart.data import read_rows
from quickstart.data.shapes import OUR_COLUMNS, SHAPES, nearest_column
from quickstart.errors import UserError

USER = {"role": "user", "content": "Why is the sky blue?"}
GOOD = {"role": "assistant", "content": "Air scatters blue light more."}
BAD = {"role": "assistant", "content": "Because."}
SYSTEM = {"role": "system", "content": "Be brief."}
FIRST = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.fixture
def read(tmp_path):
    def read(*rows, **settings):
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read_rows(DataArguments(train_file=str(path), **settings))

    return read


@pytest.fixture
def faults(read):
    def faults(*rows, **settings):
        with pytest.raises(UserError) as error:
            read(*rows, **settings)
        return error.value.faults

    return faults


def hh(*turns):
    return "".join(f"\n\n{who}: {what}" for who, what in turns)


Q, A, B = USER["content"], GOOD["content"], BAD["content"]
PAIRS = {
    "text": ({"prompt": Q, "chosen": A, "rejected": B}, "prompt, chosen, rejected"),
    "messages": ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, "prompt, chosen, rejected"),
    "one message each": ({"prompt": USER, "chosen": GOOD, "rejected": BAD}, "prompt, chosen, rejected"),
    "content parts": (
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": Q}]}], "chosen": A, "rejected": B},
        "prompt, chosen, rejected",
    ),
    "UltraFeedback": (
        {
            "prompt": Q,
            "prompt_id": "x",
            "chosen": [USER, GOOD],
            "rejected": [USER, BAD],
            "messages": [USER, GOOD],
            "score_chosen": 8.0,
            "score_rejected": 2.0,
        },
        "UltraFeedback binarized",
    ),
    "dialogues without a prompt": ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, "HH-RLHF"),
    "HH-RLHF": (
        {"chosen": hh(("Human", Q), ("Assistant", A)), "rejected": hh(("Human", Q), ("Assistant", B))},
        "HH-RLHF",
    ),
    "HH prompt column": ({"prompt": hh(("Human", Q)) + "\n\nAssistant:", "chosen": A, "rejected": B}, "prompt, chosen"),
    "PKU-SafeRLHF": (
        {"prompt": Q, "response_0": B, "response_1": A, "better_response_id": 1, "safer_response_id": 0},
        "PKU-SafeRLHF",
    ),
    "PKU, safer only": ({"prompt": Q, "response_0": A, "response_1": B, "safer_response_id": 0}, "PKU-SafeRLHF"),
    "Alpaca pairs": ({"instruction": Q, "input": "", "chosen": A, "rejected": B}, "Alpaca with chosen, rejected"),
    "ShareGPT pairs": (
        {
            "conversations": [{"from": "human", "value": Q}],
            "chosen": {"from": "gpt", "value": A},
            "rejected": {"from": "gpt", "value": B},
        },
        "ShareGPT with chosen, rejected",
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_all_ways_to_write_a_preference_give_the_same_row(read, name):
    record, shape = PAIRS[name]
    table = read(record)
    (row,) = table.rows
    assert (row.prompt_messages, row.chosen, row.rejected) == ([USER], A, B)
    assert shape in table.shape


ANSWERS = {
    "prompt, completion": {"prompt": Q, "completion": A},
    "completion messages": {"prompt": [USER], "completion": [GOOD]},
    "question, answer": {"question": Q, "answer": A},
    "prompt, answer": {"prompt": Q, "answer": A},
    "Alpaca": {"instruction": Q, "input": "", "output": A},
    "ShareGPT": {"conversations": [{"from": "human", "value": Q}, {"from": "gpt", "value": A}]},
    "messages": {"messages": [USER, GOOD]},
    "verl": {"data_source": "x", "prompt": [USER], "reward_model": {"style": "rule", "ground_truth": A}},
}


@pytest.mark.parametrize("name", ANSWERS)
def test_all_ways_to_write_one_answer_give_the_same_row(read, name):
    (row,) = read(ANSWERS[name]).rows
    assert (row.prompt_messages, row.answer, row.chosen, row.label) == ([USER], A, None, None)


def test_prompt_only(read):
    (row,) = read({"prompt": Q}).rows
    assert (row.prompt_messages, row.answer, row.chosen) == ([USER], None, None)


def test_a_conversation_that_ends_with_the_user_is_a_prompt(read):
    (row,) = read({"messages": [SYSTEM, *FIRST, USER]}).rows
    assert (row.prompt_messages, row.answer) == ([SYSTEM, *FIRST, USER], None)


def test_text_and_messages_mixed_are_one_shape(read):
    table = read({"prompt": Q}, {"prompt": [USER]})
    assert [row.prompt_messages for row in table.rows] == [[USER], [USER]]
    assert any("text taken as one user message (1 row," in notice for notice in table.notices)


def test_a_longer_dialogue_in_chosen_gives_the_whole_prompt(read):
    record = {"prompt": "hi", "chosen": [*FIRST, USER, GOOD], "rejected": [*FIRST, USER, BAD]}
    (row,) = read(record | {"score_chosen": 1, "score_rejected": 0}).rows
    assert (row.prompt_messages, row.chosen) == ([*FIRST, USER], A)


def test_the_system_column_leads_the_prompt(read):
    for record in (
        {"prompt": Q, "chosen": A, "rejected": B},
        {"instruction": Q, "output": A},
        {"messages": [USER, GOOD]},
    ):
        (row,) = read(record | {"system": SYSTEM["content"]}).rows
        assert row.prompt_messages == [SYSTEM, USER]


def test_alpaca_input_and_history(read):
    (row,) = read({"instruction": "Translate.", "input": "你好", "output": "hello", "history": [["hi", "hello"]]}).rows
    assert row.prompt_messages == [*FIRST, {"role": "user", "content": "Translate.\n\n你好"}]


def test_several_turns_of_hh_text(read):
    start = [("Human", "hi"), ("Assistant", "hello"), ("Human", Q)]
    (row,) = read({"chosen": hh(*start, ("Assistant", A)), "rejected": hh(*start, ("Assistant", B))}).rows
    assert row.prompt_messages == [*FIRST, USER]


def test_hh_dialogues_that_part_earlier_are_left_out_by_name(read):
    good = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
    other = {"chosen": [*FIRST, USER, GOOD], "rejected": [USER, BAD]}
    no_answer = {"chosen": hh(("Human", Q)) + "\n\nAssistant:", "rejected": hh(("Human", Q), ("Assistant", B))}
    table = read(good, other, no_answer)
    assert len(table.rows) == 1
    assert any("differ before the last answer" in notice and "a.jsonl:2" in notice for notice in table.notices)
    assert any("without an answer" in notice and "a.jsonl:3" in notice for notice in table.notices)


def test_pku_says_which_of_its_two_judgements_counts(read):
    record = PAIRS["PKU-SafeRLHF"][0]
    assert any("data.columns.better_response_id=safer_response_id" in notice for notice in read(record).notices)
    (row,) = read(record, columns={"better_response_id": "safer_response_id"}).rows
    assert (row.chosen, row.rejected) == (B, A)


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (True, True),
        (False, False),
        (1, True),
        (0, False),
        ("true", True),
        ("False", False),
        (" 1 ", True),
        ("0", False),
    ],
)
def test_labels_that_are_clear(read, value, label):
    (row,) = read({"prompt": Q, "completion": A, "label": value}).rows
    assert row.label is label


@pytest.mark.parametrize("value", ["maybe", "yes", "", 2, -1, 0.5, None, [True], "nan"])
def test_labels_that_are_not(faults, value):
    (fault,) = faults({"prompt": Q, "completion": A, "label": True}, {"prompt": Q, "completion": A, "label": value})
    assert fault.field.endswith("a.jsonl:2")
    assert "label" in fault.found
    assert "true or false" in fault.rule


def test_a_text_label_is_said(read):
    table = read({"prompt": Q, "completion": A, "label": True}, {"prompt": Q, "completion": A, "label": "false"})
    assert [row.label for row in table.rows] == [True, False]
    assert any("label: text read as true or false" in notice for notice in table.notices)


def test_roles_of_other_tools_are_mapped_and_said(read):
    turns = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": Q}, {"from": "gpt", "value": A}]
    table = read({"conversations": turns})
    assert table.rows[0].prompt_messages == [SYSTEM, USER]
    assert any("role human taken as user" in notice for notice in table.notices)


@pytest.mark.parametrize(
    ("role", "fix"),
    [("usr", "did you mean user?"), ("narrator", "use one of"), (None, "use one of"), (7, "use one of")],
)
def test_unknown_roles_are_refused(faults, role, fix):
    (fault,) = faults({"prompt": [{"role": role, "content": "hi"}]})
    assert fault.field.endswith("a.jsonl:1")
    assert "role" in fault.found
    assert fix in fault.fix


@pytest.mark.parametrize(
    ("record", "found"),
    [
        ({"prompt": None}, "prompt null"),
        ({"prompt": 3}, "prompt 3"),
        ({"prompt": []}, "prompt []"),
        ({"prompt": ["hi"]}, "'hi'"),
        ({"prompt": [{"role": "user", "content": None}]}, "content null"),
        ({"prompt": [{"role": "user"}]}, "content null"),
        ({"prompt": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]}, "a part of type 'image'"),
        ({"prompt": [{"role": "user", "content": "hi", "tool_calls": [1]}]}, "tool_calls"),
        ({"prompt": "hi", "images": ["x.png"]}, "images"),
        ({"prompt": [USER, GOOD]}, "last role assistant"),
        ({"prompt": "hi", "chosen": 1, "rejected": "b"}, "chosen 1"),
        ({"prompt": "hi", "chosen": [GOOD, GOOD], "rejected": "b"}, "chosen with assistant, assistant"),
        ({"prompt": "hi", "chosen": [USER], "rejected": "b"}, "chosen with user"),
        ({"prompt": "hi", "chosen": [], "rejected": "b"}, "chosen with nothing"),
        ({"prompt": "hi", "system": 1}, "system 1"),
        ({"messages": "hi"}, "messages 'hi'"),
        ({"messages": []}, "messages []"),
        ({"instruction": None, "output": "x"}, "instruction null"),
        ({"instruction": "x", "history": ["y"]}, "history 'y'"),
        ({"question": 1, "answer": "x"}, "question 1"),
        ({"chosen": "a", "rejected": "b"}, "chosen 'a'"),
        ({"prompt": "x", "response_0": "a", "response_1": "b", "better_response_id": 2}, "better_response_id 2"),
        ({"prompt": "x", "reward_model": "rule"}, "reward_model 'rule'"),
        ({"prompt": "x", "reward_model": {}, "data_source": 5}, "data_source 5"),
    ],
)
def test_a_row_that_does_not_fit_names_line_value_and_fix(faults, record, found):
    (fault,) = faults(record)
    assert fault.field.endswith("a.jsonl:1")
    assert found in fault.found
    assert fault.fix


def test_a_null_among_good_rows_names_its_line(faults):
    (fault,) = faults({"prompt": "a"}, {"prompt": None})
    assert fault.field.endswith("a.jsonl:2")


def test_keys_of_messages_that_are_not_used_are_said(read):
    table = read({"messages": [USER | {"weight": 1, "name": "Ann"}, GOOD]})
    assert any("not used: name, weight" in notice for notice in table.notices)


@pytest.mark.parametrize(
    ("record", "guess"),
    [
        ({"Prompt": "hi"}, "Prompt"),
        ({"promt": "hi"}, "promt"),
        ({"query": "hi", "response": "x"}, "query"),
        ({"text": "hi"}, "text"),
    ],
)
def test_a_missing_column_names_the_nearest(faults, record, guess):
    (fault,) = faults(record)
    assert "column `prompt` not found" in fault.rule
    assert ", ".join(record) in fault.found
    assert fault.fix == f"did you mean {guess}? set data.columns.prompt={guess}"


def test_columns_that_resemble_nothing_are_listed(faults):
    (fault,) = faults({"alpha": 1, "beta": 2})
    assert fault.found == "columns alpha, beta"
    assert "data.columns.prompt=" in fault.fix


def test_data_columns_renames(read):
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    table = read({"q": Q, "good": A, "bad": B, "id": 7}, columns=columns)
    (row,) = table.rows
    assert (row.prompt_messages, row.chosen, row.rejected, row.extra) == ([USER], A, B, {"id": 7})


def test_data_columns_may_choose_among_shapes(read):
    (row,) = read({"prompt": [*FIRST, USER, GOOD]}, columns={"messages": "prompt"}).rows
    assert (row.prompt_messages, row.answer) == ([*FIRST, USER], A)


def test_wrong_data_columns_are_all_reported(faults):
    found = faults({"Q": "hi", "good": "a"}, columns={"prompt": "q", "chosn": "good", "rejected": "bad"})
    by_field = {fault.field: fault for fault in found}
    assert by_field["data.columns.prompt"].fix == "did you mean Q?"
    assert by_field["data.columns.chosn"].fix == "did you mean chosen?"
    assert "Q, good" in by_field["data.columns.rejected"].found


def test_other_columns_are_carried_and_named(read):
    table = read(
        {"prompt": "hi", "answer": "x", "id": 4, "score": 4.5, "empty": None}, {"prompt": "a", "answer": "b", "id": "x"}
    )
    assert [row.extra for row in table.rows] == [{"id": 4, "score": 4.5}, {"id": "x"}]
    assert any("does not use: id, score, empty" in notice for notice in table.notices)


def test_verl_rows_keep_their_extra_info_and_ground_truth_types(read):
    base = {"data_source": "openai/gsm8k", "prompt": [USER], "ability": "math"}
    rows = [
        base | {"reward_model": {"ground_truth": "4"}, "extra_info": {"index": 9, "split": "train", "none": None}},
        base | {"reward_model": {"ground_truth": 4}},
        base | {"reward_model": {"ground_truth": {"target": ["a", "b"]}}},
        base | {"reward_model": {}},
    ]
    table = read(*rows)
    assert [row.answer for row in table.rows] == ["4", "4", '{"target": ["a", "b"]}', None]
    assert table.rows[0].extra == {"index": 9, "split": "train"}
    assert table.rows[2].extra == {"ground_truth": {"target": ["a", "b"]}}
    assert {row.data_source for row in table.rows} == {"openai/gsm8k"}
    assert any("numbers taken as text" in notice for notice in table.notices)


def test_files_of_different_shapes_meet_in_one_table(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(PAIRS["text"][0]))
    (tmp_path / "b.jsonl").write_text(json.dumps(PAIRS["HH-RLHF"][0]))
    table = read_rows(DataArguments(train_file=[str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]))
    assert [row.chosen for row in table.rows] == [A, A]
    assert table.shape == "prompt, chosen, rejected, chosen, rejected as whole dialogues (HH-RLHF)"


def test_every_shape_is_reachable():
    """A shape whose needs include an earlier one's would never be taken."""
    for index, shape in enumerate(SHAPES):
        earlier = [other.name for other in SHAPES[:index] if set(other.needs) <= set(shape.needs)]
        assert not earlier, f"{shape.name} is hidden by {earlier}"


def test_suggestions_prefer_case_over_spelling_over_meaning():
    assert nearest_column("prompt", ["question", "PROMPT", "promptt"]) == "PROMPT"
    assert nearest_column("prompt", ["question", "promptt"]) == "promptt"
    assert nearest_column("prompt", ["id", "question"]) == "question"
    assert nearest_column("prompt", ["id"]) is None
    assert "prompt" in OUR_COLUMNS
