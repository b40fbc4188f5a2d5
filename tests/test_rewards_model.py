"""A reward model scores text in its own template, batched as single; what is no reward model is refused before."""

import asyncio
import copy
import json

import pytest
import torch
import transformers

from quickstart import config, rewards
from quickstart.errors import RunError, UserError
from quickstart.rewards.model import ModelReward, ModelSettings
from quickstart.rewards.model_check import check_reward_model

RM_TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN = SIZES | {"num_key_value_heads": 1, "vocab_size": 264, "max_position_embeddings": 256}
TEXTS = ["hi", "a longer answer, of more words", "你好", "x" * 90, "", "yes"] * 4


def save(folder, tokenizer, kind="Qwen2", head="ForSequenceClassification", template=RM_TEMPLATE, **settings):
    """A tiny random model of some architecture as a folder."""
    torch.manual_seed(0)
    options = {"num_labels": 1} if head == "ForSequenceClassification" else {}
    model_config = getattr(transformers, f"{kind}Config")(**(QWEN | options | settings))
    getattr(transformers, f"{kind}{head}")(model_config).save_pretrained(folder)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def make(tmp_path, byte_tokenizer):
    def make(**settings):
        return save(tmp_path / "rm", byte_tokenizer, **settings)

    return make


def reward_of(path, **settings):
    return ModelReward(settings=ModelSettings(path=path, **settings))


def refused(path):
    with pytest.raises(UserError) as error:
        check_reward_model(path, trust_remote_code=False)
    (fault,) = error.value.faults
    assert fault.field == "model.reward_model_name_or_path"
    return fault


def alone(path, text):
    """The score that the authors of such models show: one text, the checkpoint's own configuration."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    with torch.inference_mode():
        return model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits[0][0].item()


def test_the_conversation_is_written_in_the_reward_models_own_template(make):
    conversation = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert reward_of(make()).render(conversation) == "[user] q\n[assistant] a\n"


@pytest.mark.parametrize("pad", [None, 0, 1], ids=["no padding id", "unused padding id", "padding id in the text"])
def test_a_batch_scores_as_its_rows_alone(make, pad):
    path = make(pad_token_id=pad)
    texts = [f"<|im_start|>{text}<|im_end|>" for text in TEXTS]
    scores = reward_of(path).scores(texts)
    assert len(set(scores)) > 4
    for text in set(texts):
        assert scores[texts.index(text)] == pytest.approx(alone(path, text), abs=1e-5)


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Gemma", "GPT2", "Bert"])
def test_other_architectures(make, kind):
    settings = {"pad_token_id": 0}
    if kind == "GPT2":
        settings |= {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256}
    if kind == "Gemma":
        settings |= {"head_dim": 8}
    path = make(kind=kind, **settings)
    scores = reward_of(path).scores(["one text", "another"])
    assert scores == pytest.approx([alone(path, "one text"), alone(path, "another")], abs=1e-5)


def test_weights_that_rest_elsewhere_score_the_same(make):
    path = make()
    reward = reward_of(path, offload=True)
    assert reward.scores(TEXTS) == reward_of(path).scores(TEXTS)
    assert next(reward._model.parameters()).device.type == "cpu"


def test_half_precision_is_kept(make):
    reward = reward_of(make(), dtype="bfloat16")
    reward.load()
    assert next(reward._model.parameters()).dtype == torch.bfloat16
    assert all(isinstance(score, float) for score in reward.scores(TEXTS))


def test_two_outputs_are_refused_with_their_labels(make):
    fault = refused(make(num_labels=2))
    assert "LABEL_0, LABEL_1" in fault.found
    assert "must have 1 output, this one has 2" in fault.rule
    assert "one output" in fault.fix


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_is_no_reward_model(make, tied):
    fault = refused(make(head="ForCausalLM", tie_word_embeddings=tied))
    assert "a language model" in fault.found
    assert "no score head in the checkpoint: score.weight" in fault.rule
    assert "random" in fault.rule


def test_a_head_of_another_kind_is_named(make, tmp_path):
    from safetensors.torch import load_file, save_file

    path = make(head="ForCausalLM")
    weights = load_file(tmp_path / "rm/model.safetensors")
    save_file(weights | {"v_head.summary.weight": torch.zeros(1, 16)}, tmp_path / "rm/model.safetensors")
    assert "v_head.summary.weight" in refused(path).found


def test_a_missing_template_is_refused(make):
    fault = refused(make(template=None))
    assert "no chat template" in fault.rule
    assert "chat_template.jinja" in fault.fix


def test_a_template_that_refuses_or_forgets_the_answer(tmp_path, byte_tokenizer):
    strict = "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
    assert "one message only" in refused(save(tmp_path / "a", byte_tokenizer, template=strict)).rule
    forgets = "{{ messages[0]['content'] }}"
    assert "leaves the answer out" in refused(save(tmp_path / "b", byte_tokenizer, template=forgets)).rule


def test_folders_that_are_no_model(tmp_path, make):
    assert refused(str(tmp_path / "none")).rule == "no folder of that name"
    assert "transformers cannot read it" in refused(str(tmp_path)).rule
    path = make()
    (tmp_path / "rm/model.safetensors").write_bytes((tmp_path / "rm/model.safetensors").read_bytes()[:500])
    assert "damaged" in refused(path).rule
    (tmp_path / "rm/model.safetensors").unlink()
    assert "no weight file" in refused(path).rule


def test_a_tokenizer_of_another_model_is_refused(make, tmp_path):
    assert "258 tokens and its model 100" in refused(make(vocab_size=100)).rule


def test_weights_that_are_missing_in_the_body_are_refused_on_loading(make, tmp_path):
    from safetensors.torch import load_file, save_file

    path = make()
    weights = load_file(tmp_path / "rm/model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "rm/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="1 weights are not in the checkpoint"):
        reward_of(path).load()


def test_weights_in_several_files_and_in_torchs_format(make, tmp_path):
    path = make()
    scores = reward_of(path).scores(TEXTS)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    for file in (tmp_path / "rm").glob("tok*"):
        (tmp_path / "sharded" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "sharded/chat_template.jinja").write_text(RM_TEMPLATE)
    assert reward_of(str(tmp_path / "sharded")).scores(TEXTS) == scores
    torch.save(model.state_dict(), tmp_path / "rm/pytorch_model.bin")
    (tmp_path / "rm/model.safetensors").unlink()
    assert reward_of(path).scores(TEXTS) == scores


def calls(answers, prompt="q"):
    info = {"prompt": [{"role": "user", "content": prompt}], "file": "a.jsonl", "line": 3}
    return [
        {"data_source": "x", "solution_str": text, "ground_truth": "", "extra_info": dict(info)} for text in answers
    ]


def settings(path, **rl):
    model = {"reward_model_name_or_path": path, "torch_dtype": "float32"}
    return config.from_arguments(model, {}, {"reward": "model"} | rl, {"device": "cpu"})


def test_answers_that_arrive_together_are_scored_together(make, monkeypatch):
    cfg = settings(make())
    reward = rewards.build(cfg)
    sizes = []
    forward = ModelReward._forward
    monkeypatch.setattr(ModelReward, "_forward", lambda self, rows: sizes.append(len(rows)) or forward(self, rows))
    scores = reward.score_all(calls(TEXTS))
    assert sizes == [16, 8]
    expected = reward.score_all(calls(["你好"]))[0]
    assert scores[2] == pytest.approx(expected, abs=1e-6)


def test_the_entry_for_verl_is_the_waiting_one(make):
    cfg = settings(make())
    file, name, kwargs = rewards.for_verl(cfg, rewards.build(cfg))
    assert name == "compute_score_async"
    json.dumps(kwargs)
    from verl.utils.import_utils import load_extern_object

    entry = load_extern_object(str(file), name)

    async def two():
        return await asyncio.gather(*(entry(**call, **kwargs) for call in calls(["a", "b"])))

    assert all(isinstance(score, float) for score in asyncio.run(two()))


def test_a_conversation_that_is_too_long_stops_everybody_who_waits(make):
    reward = rewards.build(settings(make()))
    with pytest.raises(RunError) as error:
        reward.score_all(calls(["short", "x" * 300, "short"]))
    (fault,) = error.value.faults
    assert fault.field == "a.jsonl:3"
    assert "reads at most 256" in fault.rule
    assert "data.max_response_length" in fault.fix

    async def each():
        tasks = [reward.call_async(**call) for call in calls(["short", "x" * 300, "short"])]
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=5)

    assert [type(result) for result in asyncio.run(each())] == [RunError] * 3


def test_a_bad_reward_model_stops_before_the_start(make):
    with pytest.raises(UserError, match="must have 1 output"):
        rewards.build(settings(make(num_labels=2)))


def test_the_weights_can_be_loaded_ahead(make):
    reward = rewards.build(settings(make()))
    reward.load()
    assert reward.score.__self__._model is not None
