"""Which files a setting names: file, list, glob, folder, saved data set; and what cannot be read."""

import json

import pytest

from quickstart.arguments import DataArguments
from quickstart.data import read_rows
from quickstart.errors import UserError


def put(path, text, count=1):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": f"{text} {i}"}) + "\n" for i in range(count)))


def read(files, **settings):
    return read_rows(DataArguments(train_file=files if isinstance(files, list) else str(files), **settings))


def prompts(table):
    return [row.prompt_messages[0]["content"] for row in table.rows]


def faults(files, **settings):
    with pytest.raises(UserError) as error:
        read(files, **settings)
    return error.value.faults


def test_a_list_is_read_in_its_order(tmp_path):
    put(tmp_path / "a.jsonl", "a", 2)
    put(tmp_path / "b.json", "b")
    assert prompts(read([str(tmp_path / "b.json"), str(tmp_path / "a.jsonl")])) == ["b 0", "a 0", "a 1"]


def test_a_glob_is_sorted(tmp_path):
    for name in ("c.jsonl", "a.jsonl", "sub/b.jsonl", "x.txt"):
        put(tmp_path / name, name)
    assert prompts(read(f"{tmp_path}/*.jsonl")) == ["a.jsonl 0", "c.jsonl 0"]
    assert prompts(read(f"{tmp_path}/**/*.jsonl")) == ["a.jsonl 0", "c.jsonl 0", "sub/b.jsonl 0"]


def test_a_glob_without_a_match_is_refused(tmp_path):
    put(tmp_path / "a.jsonl", "a")
    (fault,) = faults(f"{tmp_path}/*.parquet")
    assert fault.field == "data.train_file"
    assert fault.rule == "no file matches the pattern"


def test_a_folder_gives_its_data_files_and_no_others(tmp_path):
    put(tmp_path / "data/b.jsonl", "b")
    put(tmp_path / "data/deep/a.JSON", "a")
    put(tmp_path / "data/.hidden/x.jsonl", "x")
    put(tmp_path / "data/dataset_info.json", "x")
    (tmp_path / "data/README.md").write_text("# about")
    assert prompts(read(tmp_path / "data")) == ["b 0", "a 0"]


def test_held_out_files_of_a_folder_are_set_aside_and_said(tmp_path):
    for name in ("train.jsonl", "test.jsonl", "my_dev_1.jsonl", "contest.jsonl"):
        put(tmp_path / name, name)
    table = read(tmp_path)
    assert prompts(table) == ["contest.jsonl 0", "train.jsonl 0"]
    assert any("my_dev_1.jsonl, test.jsonl" in notice for notice in table.notices)
    assert prompts(read(tmp_path, split="test")) == ["test.jsonl 0"]
    (fault,) = faults(tmp_path, split="validation")
    assert "no file named validation" in fault.rule


def test_a_folder_with_held_out_names_only_is_read(tmp_path):
    put(tmp_path / "test.jsonl", "a")
    assert prompts(read(tmp_path)) == ["a 0"]


def test_a_folder_without_data_shows_what_is_in_it(tmp_path):
    (tmp_path / "README.md").write_text("# about")
    (fault,) = faults(tmp_path)
    assert "README.md" in fault.found
    assert ".jsonl" in fault.fix


def test_saved_data_sets_are_read_in_their_own_order(tmp_path):
    import datasets

    table = datasets.Dataset.from_list([{"prompt": f"p {i}"} for i in range(5)])
    table.save_to_disk(tmp_path / "one", num_shards=2)
    assert prompts(read(tmp_path / "one")) == [f"p {i}" for i in range(5)]
    datasets.DatasetDict({"train": table, "test": table.select([3])}).save_to_disk(tmp_path / "many")
    assert len(read(tmp_path / "many").rows) == 5
    assert prompts(read(tmp_path / "many", split="test")) == ["p 3"]
    (fault,) = faults(tmp_path / "many", split="dev")
    assert "splits train, test" in fault.found
    assert fault.fix == "set data.split=train"


def test_a_missing_file_names_the_nearest(tmp_path):
    put(tmp_path / "train.jsonl", "a")
    (fault,) = faults(tmp_path / "trian.jsonl")
    assert fault.field == "data.train_file"
    assert fault.rule == "no such file"
    assert "train.jsonl" in fault.fix


def test_all_missing_files_and_all_bad_rows_come_at_once(tmp_path):
    put(tmp_path / "a.jsonl", "a")
    (tmp_path / "b.jsonl").write_text("nonsense\n")
    found = faults([str(tmp_path / name) for name in ("a.jsonl", "no.jsonl", "b.jsonl", "neither.jsonl")])
    assert [fault.rule[:12] for fault in found] == ["no such file", "no such file", "not valid JS"]


def test_an_empty_list_is_refused():
    (fault,) = faults([])
    assert fault.found == "an empty list"


@pytest.mark.parametrize(
    ("name", "content", "found", "fix"),
    [
        ("a.txt", b"hello", "suffix .txt", "convert it"),
        ("a", b"hello", "suffix none", "convert it"),
        (
            "a.jsonl",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
            "Git LFS pointer",
            "git lfs pull",
        ),
        ("a.zip", b"PK\x03\x04rest", "a zip archive", "unzip"),
        ("a.parquet", b"<html>not found</html>", "begins with b'<html>no'", "download it again"),
    ],
)
def test_files_that_are_no_data_say_what_they_are(tmp_path, name, content, found, fix):
    (tmp_path / name).write_bytes(content)
    (fault,) = faults(tmp_path / name)
    assert fault.field == str(tmp_path / name)
    assert found in fault.found
    assert fix in fault.fix


def test_one_empty_file_among_others_is_said(tmp_path):
    put(tmp_path / "a.jsonl", "a")
    (tmp_path / "b.jsonl").write_text("")
    table = read([str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
    assert f"{tmp_path / 'b.jsonl'} has no records" in table.notices


def test_a_split_that_nothing_uses_is_said(tmp_path):
    put(tmp_path / "a.jsonl", "a")
    assert any("data.split=test is not used" in notice for notice in read(tmp_path / "a.jsonl", split="test").notices)
