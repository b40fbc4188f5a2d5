"""Model folders that fail badly in transformers and verl: each kind of damage has a message of its own.

Cases 39 to 45 of the list of failures of real users, and their kin.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quickstart import config
from quickstart.doctor import architecture, hub, parameters, tokens
from quickstart.doctor.facts import POLICY, REWARD, TOKENIZER, Facts
from quickstart.doctor.finding import Finding
from quickstart.doctor.model import check_model_folder
from quickstart.doctor.running import Blocked, run_checks
from quickstart.errors import UserError

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 988097824\n"
TABLE: architecture.Table = {
    "CAUSAL_LM": {"qwen2": "Qwen2ForCausalLM", "opt": "OPTForCausalLM"},
    "TOKEN_CLASSIFICATION": {"qwen2": "x"},
}


@pytest.fixture
def folder(tiny_tied: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that may be damaged."""
    return Path(shutil.copytree(tiny_tied, tmp_path / "model"))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def shards(folder: Path) -> None:
    """Pretend that the weights are in two files, one of them missing."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def cut_in_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:200])


def only_gguf(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.gguf")


DAMAGE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "missing shard": (shards, "1 of 2 weight files missing, first model-00002-of-00002.safetensors", "download"),
    "cut off": (cut, "5000 bytes where its header says", "download the file again"),
    "cut in the header": (cut_in_header, "200 bytes", "download the file again"),
    "LFS pointer": (lambda f: (f / "model.safetensors").write_text(LFS), "model.safetensors", "git lfs pull"),
    "gguf": (only_gguf, "only model.gguf", "original checkpoint"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weight file", "put model.safetensors there"),
    "no config": (lambda f: (f / "config.json").unlink(), "model.safetensors", "global_step_N/model"),
    "broken config": (lambda f: (f / "config.json").write_text('{"model_type":'), "config.json", "download"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "no tokenizer file", "tokenizer_name_or_path"),
}


@pytest.mark.parametrize(("damage", "found", "fix"), DAMAGE.values(), ids=DAMAGE.keys())
def test_each_damage_has_its_message(folder: Path, damage: Callable[[Path], object], found: str, fix: str) -> None:
    assert check_model_folder(folder, POLICY) == []
    damage(folder)
    (fault,) = check_model_folder(folder, POLICY)
    assert fault.field == POLICY
    assert found in fault.found
    assert fix in fault.fix


def test_the_messages_of_case_39_differ(tiny_tied: Path, tmp_path: Path) -> None:
    rules = set()
    for name in ("missing shard", "cut off", "LFS pointer", "gguf"):
        broken = Path(shutil.copytree(tiny_tied, tmp_path / name))
        DAMAGE[name][0](broken)
        (fault,) = check_model_folder(broken, POLICY)
        rules.add(fault.rule)
    assert len(rules) == 4


# ---- names ----


def test_a_name_that_can_only_be_a_path_is_not_asked_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "qwen").mkdir()
    with pytest.raises(UserError) as caught:
        hub.find_local(str(tmp_path / "qwne"), POLICY)
    (fault,) = caught.value.faults
    assert (fault.rule, fault.field) == ("no folder of that name", POLICY)
    assert "qwen" in fault.fix


def test_a_trailing_slash_is_no_other_folder(tiny_tied: Path) -> None:
    assert hub.model_folder(f"{tiny_tied}/", POLICY) == tiny_tied.resolve()


def test_an_unreachable_hub_names_three_ways_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub, "_cached", lambda name: None)
    with pytest.raises(UserError) as caught:
        hub.model_folder("someone/some-model", POLICY)
    (fault,) = caught.value.faults
    for way in ("HF_ENDPOINT", "local folder", "data/bundled_model"):
        assert way in fault.fix


@pytest.mark.parametrize(
    ("needed", "address", "offline", "answers", "state", "words"),
    [
        ([], hub.DEFAULT_HUB, False, False, "ok", "not needed"),
        ([], hub.DEFAULT_HUB, True, False, "ok", "HF_HUB_OFFLINE is set"),
        (["a/b"], hub.DEFAULT_HUB, False, True, "ok", "to be downloaded: a/b"),
        (["a/b"], "https://hf-mirror.com", False, True, "ok", "a mirror"),
        (["a/b"], hub.DEFAULT_HUB, False, False, "error", "does not answer within 3 s"),
        (["a/b"], hub.DEFAULT_HUB, True, True, "error", "HF_HUB_OFFLINE forbids"),
    ],
)
def test_the_hub_is_judged_only_where_it_is_needed(
    needed: list[str], address: str, offline: bool, answers: bool, state: str, words: str
) -> None:
    found = hub.judge_hub(needed, address, offline=offline, reachable=lambda: answers)
    assert found.state == state
    assert words in found.found


def test_what_is_needed_from_the_hub(monkeypatch: pytest.MonkeyPatch, tiny_tied: Path) -> None:
    monkeypatch.setattr(hub, "_cached", lambda name: None)
    cfg = config.from_arguments({"model_name_or_path": str(tiny_tied)}, {"train_file": "data/sample_100.jsonl"})
    assert hub.needed_from_hub(cfg) == []
    cfg = config.from_arguments({"model_name_or_path": "someone/some-model"}, {"train_file": "someone/some-rows"})
    assert hub.needed_from_hub(cfg) == ["someone/some-model", "someone/some-rows"]


# ---- architecture and size ----


def judge(settings: dict[str, Any], *, trusts: bool = False, critic: bool = True) -> Finding:
    return architecture.judge_policy(settings, TABLE, POLICY, trusts_code=trusts, needs_critic=critic)


def test_transformers_own_list_is_read_without_importing_it() -> None:
    table = architecture.known_architectures()
    assert table["CAUSAL_LM"]["qwen2"] == "Qwen2ForCausalLM"
    assert table["TOKEN_CLASSIFICATION"]["llama"] == "LlamaForTokenClassification"


def test_a_known_architecture() -> None:
    assert judge({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}).state == "ok"


@pytest.mark.parametrize(
    ("settings", "found", "fix"),
    [
        ({"model_type": "qwen22"}, "model_type qwen22", "qwen2"),
        ({}, "without model_type", "original model"),
        ({"model_type": "opt"}, "model_type opt", "rl.rl_type=grpo"),
        (
            {"model_type": "qwen2", "architectures": ["Qwen2ForSequenceClassification"]},
            "Qwen2ForSeq",
            "reward_model_name",
        ),
        ({"model_type": "phi9", "auto_map": {"AutoConfig": "x"}}, "model_type phi9", "trust_remote_code=true"),
    ],
    ids=["unknown", "none", "no value model", "reward model", "own code"],
)
def test_architectures_that_are_refused(settings: dict[str, Any], found: str, fix: str) -> None:
    finding = judge(settings)
    assert (finding.state, finding.field) == ("error", POLICY)
    assert found in finding.found
    assert fix in finding.fix


def test_own_code_that_is_trusted_and_methods_without_a_value_model() -> None:
    assert judge({"model_type": "phi9", "auto_map": {}}, trusts=True).state == "note"
    assert judge({"model_type": "opt"}, critic=False).state == "ok"


def test_parameters_are_counted_from_headers(tiny_tied: Path, tiny_untied: Path, tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    for model in (tiny_tied, tiny_untied, tiny_llama):
        settings = json.loads((model / "config.json").read_text())
        shape = parameters.model_shape(model, settings)
        assert shape is not None
        assert shape.parameters == AutoModelForCausalLM.from_pretrained(model).num_parameters()
        assert shape.tied == settings["tie_word_embeddings"]
        assert shape.head_parameters == (0 if shape.tied else 264 * 64)
        assert (shape.hidden, shape.layers, shape.kv_heads, shape.head_dim, shape.stored) == (64, 2, 2, 16, "F32")


def test_a_tied_head_that_is_stored_all_the_same_counts_once() -> None:
    stored = {"embed": ("BF16", (10, 4)), "lm_head.weight": ("BF16", (10, 4)), "norm": ("F32", (4,))}
    assert parameters.count(stored, tied=True) == (44, 0, "BF16")
    assert parameters.count(stored, tied=False) == (84, 40, "BF16")


def test_bin_files_are_estimated_and_odd_configs_are_said(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 4000)
    shape = parameters.model_shape(tmp_path, {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 9})
    assert shape is not None
    assert (shape.parameters, shape.counted, shape.intermediate) == (2000, False, 32)
    assert "estimated" in architecture.judge_size(shape, POLICY).found
    assert parameters.model_shape(tmp_path, {"d_state": 8}) is None
    assert architecture.judge_size(None, POLICY).state == "note"


# ---- tokenizer ----

FACTS = tokens.TokenFacts(
    kind="Qwen2Tokenizer",
    size=258,
    largest_id=257,
    embedding=264,
    eos="<|im_end|>",
    pad="<|pad|>",
    stop_ids=frozenset([1]),
    after_answer=(1, 5),
)


def tokens_with(**changes: Any) -> dict[str, Finding]:
    found = tokens.judge_tokens(dataclasses.replace(FACTS, **changes), POLICY)
    return {finding.check: finding for finding in found}


def test_facts_of_a_real_tokenizer(tiny_tied: Path) -> None:
    facts = Facts(None, [f"model.model_name_or_path={tiny_tied}", "profile=cpu"])
    assert facts.tokens.eos == facts.tokens.pad == "<|im_end|>"
    assert facts.tokens.embedding == 264
    assert facts.tokens.after_answer is not None
    assert facts.tokens.stop_ids & set(facts.tokens.after_answer)
    assert {f.state for f in tokens.judge_tokens(facts.tokens, POLICY)} == {"ok", "note"}


def test_a_tokenizer_larger_than_the_embedding() -> None:
    found = tokens_with(largest_id=264)["tokenizer"]
    assert (found.state, found.field) == ("error", POLICY)
    assert "264" in found.found
    assert "264, has no row" in found.rule


def test_padding_is_said_and_never_refused() -> None:
    assert tokens_with()["pad and eos"].state == "ok"
    assert tokens_with(pad="<|im_end|>")["pad and eos"].state == "note"
    assert "verl pads with eos" in tokens_with(pad=None)["pad and eos"].found


def test_a_template_whose_end_generation_does_not_know() -> None:
    found = tokens_with(after_answer=(7, 8))["end of answers"]
    assert (found.state, "[1]" in found.found, "generation_config.json" in found.fix) == ("warning", True, True)
    assert tokens_with(after_answer=None)["end of answers"].state == "ok"


def without_template(folder: Path) -> Path:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit(folder / "tokenizer_config.json", lambda c: c.pop("chat_template", None))
    return folder


def test_case_40_no_chat_template(folder: Path) -> None:
    assert tokens.has_own_template(folder)
    assert not tokens.has_own_template(without_template(folder))
    found = tokens.judge_template(config.from_arguments(), has_template=False)
    assert (found.state, found.field) == ("error", "model.chat_template")
    assert "no chat template" in found.found
    assert "model.chat_template=chatml" in found.fix


def test_the_named_template_stands_in_only_where_asked_and_needed(folder: Path) -> None:
    asked = config.from_arguments({"chat_template": "chatml", "model_name_or_path": str(folder)})
    assert tokens.judge_template(asked, has_template=False).state == "note"
    assert "not used" in tokens.judge_template(asked, has_template=True).found
    assert tokens.chat_template(asked) is None
    without_template(folder)
    assert tokens.chat_template(asked) == tokens.CHATML
    assert tokens.load_tokenizer(asked).chat_template == tokens.CHATML


def test_no_end_token_means_no_end(folder: Path) -> None:
    edit(
        folder / "tokenizer_config.json", lambda c: c.update(eos_token=None, tokenizer_class="PreTrainedTokenizerFast")
    )
    edit(folder / "config.json", lambda c: c.update(model_type="unknown", eos_token_id=None))
    with pytest.raises(UserError) as caught:
        tokens.load_tokenizer(config.from_arguments({"model_name_or_path": str(folder)}))
    (fault,) = caught.value.faults
    assert (fault.field, "eos_token" in fault.rule, "tokenizer_config.json" in fault.fix) == (POLICY, True, True)


@pytest.mark.parametrize(("positions", "state"), [(None, "ok"), (384, "ok"), (383, "error")])
def test_the_longest_sequence(positions: int | None, state: str) -> None:
    cfg = config.from_arguments(None, {"max_prompt_length": 256, "max_response_length": 128})
    found = tokens.judge_positions(positions, cfg)
    assert found.state == state
    if state == "error":
        assert "256 + 128 = 384" in found.found
        assert "383" in found.fix


# ---- reward models (cases 41 and 42), through the doctor ----


def save_classifier(folder: Path, labels: int) -> Path:
    import tiny_models
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    tokenizer = tiny_models.make_tokenizer()
    end = tokenizer.eos_token_id
    settings = Qwen2Config(
        **tiny_models.SHAPE, num_labels=labels, pad_token_id=end, eos_token_id=end, bos_token_id=None
    )
    Qwen2ForSequenceClassification(settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def reward_findings(policy: Path, reward: Path) -> list[Finding]:
    from quickstart.doctor.checks import reward_model_checks

    settings = [f"model.model_name_or_path={policy}", "rl.reward=model", f"{REWARD}={reward}", "profile=cpu"]
    return run_checks(reward_model_checks(Facts(None, settings)))


def test_a_reward_model_with_one_output(tiny_tied: Path, tmp_path: Path) -> None:
    (found,) = reward_findings(tiny_tied, save_classifier(tmp_path / "rm", 1))
    assert (found.state, "one output" in found.found) == ("ok", True)


def test_case_41_two_outputs(tiny_tied: Path, tmp_path: Path) -> None:
    (found,) = reward_findings(tiny_tied, save_classifier(tmp_path / "rm", 2))
    assert (found.state, found.field) == ("error", REWARD)
    assert "1 output" in found.rule
    assert "2" in found.rule


def test_case_42_a_language_model_as_reward_model(tiny_tied: Path) -> None:
    (found,) = reward_findings(tiny_tied, tiny_tied)
    assert (found.state, found.field) == ("error", REWARD)
    assert "no score head" in found.rule


def test_a_damaged_reward_model_is_named_as_such(tiny_tied: Path, tmp_path: Path) -> None:
    reward = save_classifier(tmp_path / "rm", 1)
    (reward / "model.safetensors").write_text(LFS)
    (found,) = reward_findings(tiny_tied, reward)
    assert (found.state, found.field, "git lfs pull" in found.fix) == ("error", REWARD, True)


# ---- facts ----


def test_a_model_that_is_not_here_blocks_what_needs_it_and_is_told_once(tmp_path: Path) -> None:
    facts = Facts(None, [f"model.model_name_or_path={tmp_path}", "profile=cpu"])  # an empty folder
    assert facts.attempt(lambda: facts.shape) is None  # asks, and leaves the message to the check whose it is
    with pytest.raises(UserError):
        facts.model  # noqa: B018
    with pytest.raises(Blocked, match="model folder"):
        facts.tokenizer  # noqa: B018


def test_a_tokenizer_folder_needs_no_weights(folder: Path, tiny_tied: Path) -> None:
    (folder / "model.safetensors").unlink()
    facts = Facts(None, [f"{POLICY}={tiny_tied}", f"{TOKENIZER}={folder}", "profile=cpu"])
    assert facts.tokenizer_folder == folder.resolve()


def test_a_damaged_header_is_no_model(tmp_path: Path) -> None:
    from quickstart.doctor.model import read_safetensors_header

    path = tmp_path / "x.safetensors"
    for content in (b"", b"1234567", struct.pack("<Q", 1 << 60) + b"{}", struct.pack("<Q", 3) + b"[1]"):
        path.write_bytes(content)
        assert read_safetensors_header(path) is None
