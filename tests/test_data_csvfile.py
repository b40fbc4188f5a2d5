"""CSV and TSV: cells that hold anything, quotes that are broken, conversations as JSON text."""

import csv
import io
import json

import pytest

from quickstart.arguments import DataArguments
from quickstart.data import read_rows
from quickstart.errors import UserError

HEADER = ["prompt", "chosen", "rejected"]
HARD = ['a, "quoted"\n\n line', "tab\tand;semicolon", "x" * 200_000]


def table_text(rows, delimiter=","):
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, lineterminator="\n").writerows(rows)
    return out.getvalue()


def read(path, **settings):
    return read_rows(DataArguments(train_file=str(path), **settings))


def faults(path):
    with pytest.raises(UserError) as error:
        read(path)
    return error.value.faults


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("A.CSV", ";"), ("a.csv", "\t"), ("a.tsv", "\t")])
def test_cells_come_back_as_they_are(tmp_path, name, delimiter):
    (tmp_path / name).write_text(table_text([HEADER, HARD], delimiter))
    (row,) = read(tmp_path / name).rows
    assert [row.prompt_messages[0]["content"], row.chosen, row.rejected] == HARD


def test_a_row_knows_the_line_that_it_begins_in(tmp_path):
    (tmp_path / "a.csv").write_text(table_text([HEADER, HARD, [], ["p", "a", "b"]]))
    assert [row.line for row in read(tmp_path / "a.csv").rows] == [2, 6]


def test_crlf_and_a_byte_order_mark_as_excel_writes_them(tmp_path):
    raw = "\ufeff" + table_text([HEADER, ["你好", "您好", "嗯"]]).replace("\n", "\r\n")
    (tmp_path / "a.csv").write_bytes(raw.encode())
    (row,) = read(tmp_path / "a.csv").rows
    assert row.chosen == "您好"
    assert row.rejected == "嗯"


def test_an_unclosed_quote_does_not_swallow_the_rest(tmp_path):
    (tmp_path / "a.csv").write_text('prompt,chosen,rejected\np,a,b\nq,"never closed,b\nr,c,d\n')
    (fault,) = faults(tmp_path / "a.csv")
    assert fault.field.endswith("a.csv:3")
    assert "not valid CSV" in fault.rule
    assert "close the quote" in fault.fix


def test_rows_of_another_width_are_named(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,chosen,rejected\np,a\nq,a,b\nr,a,b,c\n")
    (fault,) = faults(tmp_path / "a.csv")
    assert fault.field.endswith("a.csv:2")
    assert fault.found == "2 cells, the first 'p'"
    assert "also: 4" in fault.rule
    assert "commas" in fault.fix


def test_a_column_twice_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,chosen,chosen\np,a,b\n")
    (fault,) = faults(tmp_path / "a.csv")
    assert "chosen twice" in fault.found


def test_conversations_as_json_in_a_cell(tmp_path):
    messages = [{"role": "user", "content": 'say "hi", please'}]
    (tmp_path / "a.csv").write_text(table_text([HEADER, [json.dumps(messages), "hi", "no"]]))
    (row,) = read(tmp_path / "a.csv").rows
    assert row.prompt_messages == messages


def test_conversations_as_python_text_are_refused_with_the_way_out(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    (tmp_path / "a.csv").write_text(table_text([HEADER, [str(messages), "hi", "no"]]))
    (fault,) = faults(tmp_path / "a.csv")
    assert fault.field.endswith("a.csv:2")
    assert "json.dumps" in fault.fix


def test_labels_are_parsed_strictly(tmp_path):
    rows = [["prompt", "completion", "label"], ["p", "a", "True"], ["p", "b", "false"], ["p", "c", "0"]]
    (tmp_path / "a.csv").write_text(table_text(rows))
    assert [row.label for row in read(tmp_path / "a.csv").rows] == [True, False, False]


def test_an_index_column_without_a_name_is_no_column(tmp_path):
    (tmp_path / "a.csv").write_text(",prompt,chosen,rejected\n0,p,a,b\n")
    (row,) = read(tmp_path / "a.csv").rows
    assert row.extra == {}


def test_a_header_alone_has_no_records(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,chosen,rejected\n")
    (fault,) = faults(tmp_path / "a.csv")
    assert "no records" in fault.rule


def test_an_empty_cell_is_left_out_by_name(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,chosen,rejected\n,a,b\np,a,b\n")
    table = read(tmp_path / "a.csv")
    assert len(table.rows) == 1
    assert f"1 of 2 rows left out, the prompt is empty: {tmp_path / 'a.csv'}:2" in table.notices
