"""Parquet and arrow in all their variants give the rows that went in."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quickstart.arguments import DataArguments
from quickstart.data import read_rows
from quickstart.errors import UserError

ROWS = [
    {"prompt": [{"role": "user", "content": f"问题 {i}"}], "chosen": "好" * i + "a", "rejected": "b", "score": i}
    for i in range(2500)
]


def read(path, **settings):
    return read_rows(DataArguments(train_file=str(path), **settings))


def faults(path):
    with pytest.raises(UserError) as error:
        read(path)
    return error.value.faults


def write(path, kind, rows=ROWS):
    table = pa.Table.from_pylist(rows)
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "arrow file":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    return path


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("parquet", "A.PARQUET"), ("arrow file", "a.arrow"), ("arrow stream", "a.arrow"), ("arrow file", "a.feather")],
)
def test_rows_come_back_in_order_with_their_numbers(tmp_path, kind, name, packed):
    path = write(tmp_path / name, kind)
    if packed:
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path = tmp_path / f"{name}.gz"
    rows = read(path).rows
    assert [(row.prompt_messages, row.chosen, row.extra, row.line) for row in rows] == [
        (row["prompt"], row["chosen"], {"score": row["score"]}, i) for i, row in enumerate(ROWS, 1)
    ]


def test_all_kinds_of_file_give_the_same_rows(tmp_path):
    row = {"prompt": "hi", "chosen": "a", "rejected": "b"}
    line = json.dumps(row)
    (tmp_path / "A.JSONL").write_text(line)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    (tmp_path / "a.json").write_text(f"[{line}]")
    (tmp_path / "a.csv").write_text("prompt,chosen,rejected\nhi,a,b\n")
    write(tmp_path / "a.parquet", "parquet", [row])
    write(tmp_path / "a.arrow", "arrow stream", [row])
    tables = [read(path) for path in sorted(tmp_path.iterdir())]
    assert len(tables) == 6
    for table in tables:
        (only,) = table.rows
        assert (only.prompt_messages[0]["content"], only.chosen, only.rejected) == ("hi", "a", "b")


def test_pandas_writes_nested_cells_that_are_read(tmp_path):
    import pandas

    pandas.DataFrame(ROWS[:3]).to_parquet(tmp_path / "a.parquet")
    assert [row.prompt_messages for row in read(tmp_path / "a.parquet").rows] == [row["prompt"] for row in ROWS[:3]]


def test_binary_columns_are_not_read_and_that_is_said(tmp_path):
    rows = [{"prompt": "hi", "raw": b"\x00", "nested": [{"bytes": b"x"}]}]
    write(tmp_path / "a.parquet", "parquet", rows)
    table = read(tmp_path / "a.parquet")
    assert table.rows[0].extra == {}
    assert any("binary data are not read: raw, nested" in notice for notice in table.notices)


@pytest.mark.parametrize(
    ("kind", "name"), [("parquet", "a.parquet"), ("arrow file", "a.arrow"), ("arrow stream", "b.arrow")]
)
def test_a_file_that_was_cut_off_is_one_fault(tmp_path, kind, name):
    path = write(tmp_path / name, kind)
    path.write_bytes(path.read_bytes()[:-5000])
    found = faults(path)
    assert any(fault.field == str(path) and "cannot be read as" in fault.found for fault in found)


def test_no_rows_in_a_good_file(tmp_path):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    (fault,) = faults(tmp_path / "a.parquet")
    assert "no records" in fault.rule


def test_a_parquet_file_named_jsonl_is_known_by_its_content(tmp_path):
    write(tmp_path / "a.jsonl", "parquet", ROWS[:2])
    assert len(read(tmp_path / "a.jsonl").rows) == 2


def test_reading_json_loads_nothing_heavy(tmp_path):
    import subprocess
    import sys

    (tmp_path / "a.jsonl").write_text('{"prompt": "hi"}\n')
    code = (
        "import sys; from quickstart.data import read_rows; from quickstart.arguments import DataArguments;"
        f"assert len(read_rows(DataArguments(train_file={str(tmp_path / 'a.jsonl')!r})).rows) == 1;"
        "heavy = {'torch', 'ray', 'verl', 'transformers', 'datasets', 'pyarrow', 'numpy'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
