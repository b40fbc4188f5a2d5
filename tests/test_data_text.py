"""Encodings, byte-order marks, line ends and gzip: repaired where it is safe, else one message with the way out."""

import gzip
import json

import pytest

from quickstart.arguments import DataArguments
from quickstart.data import encoding, read_rows
from quickstart.errors import UserError

ROW = {"prompt": "把这句话翻译成英文：你好，世界。", "chosen": "Hello, world.", "rejected": "世界。"}
LINE = json.dumps(ROW, ensure_ascii=False)
JAPANESE = "これはテストです。よろしくお願いします。ありがとうございました。"
KOREAN = "안녕하세요 세계. 이것은 시험입니다. 감사합니다."
TRADITIONAL = "這是一個測試，請把這句話翻譯成英文。謝謝你的幫助，我們明天再見。"
FRENCH = "Le café était fermé à cause de la fête, où êtes-vous allé déjà cet été ?"


def read(path, **settings):
    return read_rows(DataArguments(train_file=str(path), **settings))


def faults(path, **settings):
    with pytest.raises(UserError) as error:
        read(path, **settings)
    return error.value.faults


def test_a_byte_order_mark_is_not_part_of_the_first_row(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + LINE.encode() + b"\n" + LINE.encode())
    assert [row.prompt_messages[0]["content"] for row in read(tmp_path / "a.jsonl").rows] == [ROW["prompt"]] * 2


@pytest.mark.parametrize(
    "raw",
    [
        f"{LINE}\n{LINE}\n",
        f"{LINE}\n{LINE}",
        f"{LINE}\r\n{LINE}\r\n",
        f"\n\n{LINE}\n   \n\t\n{LINE}\n\n",
        f"\r\n{LINE}\r\n\r\n{LINE}",
    ],
    ids=["plain", "no final newline", "CRLF", "blank lines", "CRLF and blank lines"],
)
def test_line_ends_and_blank_lines_do_not_change_the_rows(tmp_path, raw):
    (tmp_path / "a.jsonl").write_bytes(raw.encode())
    table = read(tmp_path / "a.jsonl")
    assert [row.chosen for row in table.rows] == ["Hello, world."] * 2
    assert table.rows_read == 2


def test_blank_lines_count_for_the_line_number(tmp_path):
    (tmp_path / "a.jsonl").write_text(f"\n\n{LINE}\n\n{LINE}\n", encoding="utf-8")
    assert [row.line for row in read(tmp_path / "a.jsonl").rows] == [3, 5]


def test_line_separators_inside_a_text_do_not_split_a_row(tmp_path):
    row = {**ROW, "prompt": "one\u2028two\x85three\x0bfour"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read(tmp_path / "a.jsonl").rows[0].prompt_messages[0]["content"] == row["prompt"]


@pytest.mark.parametrize(
    ("codec", "name", "text"),
    [
        ("gb18030", "GB18030", ROW["prompt"]),
        ("gbk", "GB18030", "请写一首关于秋天的短诗，不超过四行。"),
        ("big5", "BIG5", TRADITIONAL),
        ("shift_jis", "SHIFT_JIS", JAPANESE),
        ("euc-kr", "EUC-KR", KOREAN),
        ("cp1252", "CP1252", FRENCH),
        ("utf-16", "UTF-16", ROW["prompt"]),
        ("utf-16-le", "UTF-16LE", "a prompt in English"),
        ("utf-16-be", "UTF-16BE", "a prompt in English"),
        ("utf-32", "UTF-32", ROW["prompt"]),
    ],
)
def test_another_encoding_is_named_with_the_command_that_converts(tmp_path, codec, name, text):
    row = json.dumps({"prompt": text, "chosen": "a", "rejected": "b"}, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_bytes(f"{row}\n{row}\n".encode(codec))
    (fault,) = faults(tmp_path / "a.jsonl")
    assert fault.field == f"{tmp_path / 'a.jsonl'}:1"
    assert fault.found == f"bytes that look like {name}"
    assert "UTF-8" in fault.rule
    assert f"iconv -f {name} -t UTF-8" in fault.fix


def test_the_short_gb18030_case_of_a_real_user(tmp_path):
    raw = '{"prompt":[{"role":"user","content":"你好世界"}]}'.encode("gb18030")
    (tmp_path / "a.jsonl").write_bytes(raw)
    (fault,) = faults(tmp_path / "a.jsonl")
    assert "GB18030" in fault.found


def test_the_first_foreign_line_is_named_not_line_one(tmp_path):
    english = b'{"prompt": "hi", "chosen": "a", "rejected": "b"}\n'
    (tmp_path / "a.jsonl").write_bytes(english * 3 + LINE.encode("gb18030") + b"\n")
    (fault,) = faults(tmp_path / "a.jsonl")
    assert fault.field.endswith("a.jsonl:4")


def test_a_json_document_in_another_encoding_names_the_line(tmp_path):
    (tmp_path / "a.json").write_bytes(json.dumps([ROW, ROW], ensure_ascii=False, indent=1).encode("gb18030"))
    (fault,) = faults(tmp_path / "a.json")
    assert fault.field.endswith("a.json:3")
    assert "GB18030" in fault.found


def test_a_gzip_file_in_another_encoding_is_converted_through_zcat(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINE.encode("gb18030")))
    (fault,) = faults(tmp_path / "a.jsonl.gz")
    assert "zcat" in fault.fix
    assert "utf8_a.jsonl" in fault.fix


def test_damaged_bytes_in_a_utf8_file_name_their_lines_and_the_rest_is_read(tmp_path):
    bad = LINE.encode().replace("世".encode(), b"\xff\x96", 1)
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([LINE.encode(), bad, LINE.encode(), bad]))
    (fault,) = faults(tmp_path / "a.jsonl")
    assert fault.field.endswith("a.jsonl:2")
    assert "0xff" in fault.found
    assert "in 2 rows" in fault.rule
    assert "also: 4" in fault.rule


def test_damage_before_any_good_line_is_still_seen_as_damage(tmp_path):
    bad = LINE.encode().replace("世".encode(), b"\xff", 1)
    (tmp_path / "a.jsonl").write_bytes(bad + b"\n" + LINE.encode())
    (fault,) = faults(tmp_path / "a.jsonl")
    assert "valid UTF-8" in fault.rule


def test_bytes_of_no_encoding_are_not_guessed_at(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "' + bytes(range(128, 256)) + b'"}\n')
    (fault,) = faults(tmp_path / "a.jsonl")
    assert "not recognised" in fault.found


@pytest.mark.parametrize("name", ["a.jsonl.gz", "A.JSONL.GZ", "packed.jsonl"])
def test_gzip_is_unpacked_whatever_the_name(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(f"{LINE}\n{LINE}\n".encode()))
    assert len(read(tmp_path / name).rows) == 2


def test_a_plain_file_named_gz_is_read(tmp_path):
    (tmp_path / "a.jsonl.gz").write_text(LINE, encoding="utf-8")
    assert len(read(tmp_path / "a.jsonl.gz").rows) == 1


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_a_cut_off_gzip_file_is_one_fault(tmp_path, suffix):
    packed = gzip.compress((LINE + "\n").encode() * 1000)
    path = tmp_path / f"a.{suffix}.gz"
    path.write_bytes(packed[: len(packed) // 2])
    found = faults(path)
    assert any("does not unpack" in fault.found and fault.field == str(path) for fault in found)


def test_a_guess_needs_evidence():
    assert encoding.guess(b"plain ascii") is None
    assert encoding.guess("你好".encode()) is None
