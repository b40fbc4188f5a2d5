"""Whatever happens to a good file, it ends in rows or in one UserError, and no row is lost unnamed."""

import contextlib
import csv
import io
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quickstart.arguments import DataArguments
from quickstart.data import read_rows
from quickstart.data.shapes import OUR_COLUMNS
from quickstart.errors import UserError

COLUMNS = ("prompt", "chosen", "rejected")
ROWS = [
    {"prompt": "为什么天是蓝的？", "chosen": 'Air "scatters" blue,\nmore.', "rejected": "不知道。"},
    {"prompt": "Say hi", "chosen": "hi", "rejected": "no"},
    {"prompt": "写一首诗", "chosen": "春眠不觉晓", "rejected": "……"},
]
MESSAGE_ROWS = [
    {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "chosen": [{"role": "assistant", "content": row["chosen"]}],
        "rejected": [{"role": "assistant", "content": row["rejected"]}],
    }
    for row in ROWS
]


def as_lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def as_csv(rows):
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


FILES = {
    "a.jsonl": as_lines(ROWS),
    "b.jsonl": as_lines(MESSAGE_ROWS),
    "a.json": json.dumps(ROWS, ensure_ascii=False, indent=1),
    "b.json": json.dumps({"data": MESSAGE_ROWS}, ensure_ascii=False),
    "a.csv": as_csv(ROWS),
}


def read(name, raw):
    """The table, or None where the file was refused; any other error is a failure."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(raw)
        with contextlib.suppress(UserError):
            table = read_rows(DataArguments(train_file=str(path)))
            assert table.rows_read == len(table.rows) + sum(table.dropped.values())
            assert table.rows
            return table
    return None


def mutilate(raw, cuts):
    """Each cut: from where, how many bytes go, what comes instead; positions are shares of the length."""
    for at, count, instead in cuts:
        position = int(at * len(raw))
        raw = raw[:position] + instead + raw[position + count :]
    return raw


JUNK = st.one_of(
    st.binary(max_size=4),
    st.sampled_from(
        [b"\n", b"\r\n", b'"', b"{", b"}", b"[", b"]", b",", b"\\", b"\0", b"\xef\xbb\xbf", b"null", b"\xff"]
    ),
)
CUTS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 30), JUNK), min_size=1, max_size=4)


@pytest.mark.parametrize("name", FILES)
@given(cuts=CUTS)
@settings(max_examples=150, deadline=None)
def test_bytes_cut_out_and_junk_put_in(name, cuts):
    read(name, mutilate(FILES[name].encode(), cuts))


@pytest.mark.parametrize("name", FILES)
@given(raw=st.binary(max_size=200))
@settings(max_examples=50, deadline=None)
def test_any_bytes_at_all(name, raw):
    read(name, raw)


@pytest.mark.parametrize("name", FILES)
@given(codec=st.sampled_from(["gb18030", "utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7"]))
@settings(max_examples=12, deadline=None)
def test_another_encoding(name, codec):
    table = read(name, FILES[name].encode(codec))
    if table is not None:
        assert table.rows_read == 3
        assert codec in ("utf-8-sig", "utf-7")


def as_table(kind):
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(MESSAGE_ROWS)
    sink = pa.BufferOutputStream()
    if kind == "a.parquet":
        pq.write_table(table, sink)
    else:
        new = pa.ipc.new_file if kind == "a.feather" else pa.ipc.new_stream
        with new(sink, table.schema) as writer:
            writer.write_table(table)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("name", ["a.parquet", "a.feather", "a.arrow"])
@given(cuts=CUTS)
@settings(max_examples=80, deadline=None)
def test_tables_with_bytes_cut_out_do_not_crash_the_process(name, cuts):
    read(name, mutilate(as_table(name), cuts))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "type", "text", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
KNOWN = (*(name for name in OUR_COLUMNS if name != "ability"), "images", "other")
RECORDS = st.dictionaries(st.sampled_from(KNOWN), VALUES, max_size=6)


@given(records=st.lists(RECORDS | VALUES, min_size=1, max_size=4), good=st.integers(0, 2))
@settings(max_examples=400, deadline=None)
def test_any_values_in_any_columns(records, good):
    table = read("a.jsonl", "".join(json.dumps(record) + "\n" for record in ROWS[:good] + records).encode())
    if table is not None:
        assert table.rows_read == good + len(records)


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@given(texts=st.lists(st.tuples(TEXTS, TEXTS, TEXTS), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_texts_come_back_character_by_character_from_every_kind_of_file(texts):
    rows = [dict(zip(COLUMNS, (f"p{a}", f"a{b}", f"b{c}"), strict=True)) for a, b, c in texts]
    raw = {
        "a.jsonl": as_lines(rows),
        "ascii.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "a.json": json.dumps(rows, ensure_ascii=False),
        "w.json": json.dumps({"rows": rows}, indent=2),
        "a.csv": as_csv(rows),
    }
    for name, text in raw.items():
        table = read(name, text.encode())
        assert table is not None
        assert [(row.prompt_messages[0]["content"], row.chosen, row.rejected) for row in table.rows] == [
            tuple(row[column] for column in COLUMNS) for row in rows
        ]


@given(order=st.lists(st.sampled_from(["good", "empty", "same", "nul"]), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_rows_in_equal_rows_out_and_rows_named(order):
    kinds = {
        "good": ROWS[1],
        "empty": {**ROWS[1], "prompt": ""},
        "same": ROWS[1],
        "nul": {**ROWS[1], "chosen": "\0"},
    }
    table = read("a.jsonl", as_lines(kinds[kind] for kind in order).encode())
    bad = sum(kind in ("empty", "nul") for kind in order)
    assert (table is None) == (bad == len(order))
    if table is not None:
        assert (table.rows_read, len(table.rows)) == (len(order), len(order) - bad)
        assert sum(table.dropped.values()) == bad
