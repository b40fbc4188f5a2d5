"""JSON in all its wrappings: lines, arrays, objects around them; and broken JSON, with the line."""

import json

import pytest

from quickstart.arguments import DataArguments
from quickstart.data import read_rows
from quickstart.errors import UserError

ROWS = [{"prompt": f"question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(3)]


def read(path, **settings):
    return read_rows(DataArguments(train_file=str(path), **settings))


def faults(path, **settings):
    with pytest.raises(UserError) as error:
        read(path, **settings)
    return error.value.faults


def texts(table):
    return [row.prompt_messages[0]["content"] for row in table.rows]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "A.JSONL", "a.ndjson"])
@pytest.mark.parametrize(
    "text",
    [
        lines(ROWS),
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
        json.dumps({"data": ROWS}),
        json.dumps({"data": ROWS}, indent=2),
    ],
    ids=["lines", "array", "pretty array", "wrapped", "pretty wrapped"],
)
def test_content_decides_not_the_name(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    table = read(tmp_path / name)
    assert texts(table) == ["question 0", "question 1", "question 2"]
    assert table.rows_read == 3


def test_array_elements_know_their_lines(tmp_path):
    (tmp_path / "a.json").write_text("[\n" + ",\n\n".join(json.dumps(row) for row in ROWS) + "\n]\n")
    assert [row.line for row in read(tmp_path / "a.json").rows] == [2, 4, 6]


def test_wrapped_rows_know_their_lines(tmp_path):
    text = '{"version": [1, {"x": "}"}],\n "data":\n [\n' + ",\n".join(json.dumps(row) for row in ROWS) + "]}"
    (tmp_path / "a.json").write_text(text)
    assert [row.line for row in read(tmp_path / "a.json").rows] == [4, 5, 6]


def test_the_wrapper_that_was_taken_is_said(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"meta": 1, "data": ROWS}))
    assert any("field `data`" in notice for notice in read(tmp_path / "a.json").notices)


def test_several_lists_need_data_field(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"train": ROWS, "test": ROWS[:1]}))
    (fault,) = faults(tmp_path / "a.json")
    assert fault.field.startswith("data.field")
    assert "train, test" in fault.found
    assert fault.fix == "set data.field=train"
    assert len(read(tmp_path / "a.json", field="test").rows) == 1


def test_a_wrong_data_field_lists_the_ones_that_are_there(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"rows": ROWS}))
    (fault,) = faults(tmp_path / "a.json", field="data")
    assert "data, fields with a list of objects: rows" in fault.found
    assert fault.fix == "set data.field=rows"


def test_data_field_on_plain_lines_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(ROWS))
    (fault,) = faults(tmp_path / "a.jsonl", field="data")
    assert "second value" in fault.rule


def test_one_row_with_lists_inside_is_a_row_and_no_wrapper(tmp_path):
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    (tmp_path / "a.json").write_text(json.dumps(row, indent=1))
    (only,) = read(tmp_path / "a.json").rows
    assert only.answer == "hello"


@pytest.mark.parametrize("raw", [b"", b"\n\n  \n", b"\xef\xbb\xbf", b"[]", b'{"data": []}'])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_nothing_in_the_file_is_said(tmp_path, name, raw):
    (tmp_path / name).write_bytes(raw)
    (fault,) = faults(tmp_path / name)
    assert str(tmp_path / name) in fault.found + fault.field
    assert "no records" in fault.rule or fault.found == "columns data"


def test_a_cut_last_line_is_named_as_incomplete(tmp_path):
    good = json.dumps(ROWS[0])
    (tmp_path / "a.jsonl").write_text(f"{good}\n{good[:-5]}")
    (fault,) = faults(tmp_path / "a.jsonl")
    assert fault.field.endswith("a.jsonl:2")
    assert "incomplete JSON" in fault.rule
    assert "complete or remove" in fault.fix


def test_all_bad_lines_are_found_in_one_go_and_the_first_ten_named(tmp_path):
    broken = [
        lines(ROWS[:1]),
        "{'prompt': 'single quotes'}\n" * 12,
        '{"prompt": "x",}\n',
        "nonsense\n",
        '["a"]\n',
        "3\n",
    ]
    (tmp_path / "a.jsonl").write_text("".join(broken))
    found = faults(tmp_path / "a.jsonl")
    quotes = next(fault for fault in found if "double quotes" in fault.fix and fault.field.endswith(":2"))
    assert "in 13 rows" in quotes.rule
    assert "also: 3, 4, 5, 6, 7, 8, 9, 10, 11 and 3 more" in quotes.rule
    assert any(fault.field.endswith(":15") for fault in found)
    objects = next(fault for fault in found if "object" in fault.rule)
    assert objects.found == "['a']"
    assert objects.field.endswith(":16")
    assert "also: 17" in objects.rule


def test_a_syntax_error_inside_an_array_names_its_line(tmp_path):
    (tmp_path / "a.json").write_text("[\n" + json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1]) + "\n]")
    (fault,) = faults(tmp_path / "a.json")
    assert fault.field.endswith("a.json:3")
    assert "',' delimiter" in fault.rule


def test_a_trailing_comma_is_called_by_its_name(tmp_path):
    (tmp_path / "a.json").write_text("[\n" + json.dumps(ROWS[0]) + ",\n]")
    (fault,) = faults(tmp_path / "a.json")
    assert fault.field.endswith("a.json:2")
    assert "comma before the closing bracket" in fault.rule


def test_an_array_that_ends_early_is_incomplete(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(ROWS)[:-1])
    (fault,) = faults(tmp_path / "a.json")
    assert "incomplete JSON" in fault.rule


@pytest.mark.parametrize("line", ["[" * 100_000, '{"prompt": ' + "9" * 5000 + "}"], ids=["deep", "long number"])
def test_what_the_json_module_cannot_hold_is_a_fault_too(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(lines(ROWS) + line + "\n")
    (fault,) = faults(tmp_path / "a.jsonl")
    assert fault.field.endswith("a.jsonl:4")
    assert "not valid JSON" in fault.rule


def test_max_samples_reads_no_further(tmp_path):
    (tmp_path / "a.jsonl").write_text(lines(ROWS) + "broken")
    table = read(tmp_path / "a.jsonl", max_samples=2)
    assert texts(table) == ["question 0", "question 1"]
    assert table.rows_read == 2
