"""The engine behind verl's rollout interface: weights taken in place, requests batched, errors passed on."""

import asyncio
import types

import pytest
import torch

from quickstart.errors import RunError
from quickstart.plugin import rollout as module
from quickstart.plugin.engine import Generator
from quickstart.plugin.rollout import LocalRollout, read_sampling, stop_token_ids

PROMPT = [5, 6, 7]
GREEDY = {"temperature": 0.0}
CPU = types.SimpleNamespace(device_type="cpu")


def make(folder, **changes):
    """A rollout without weights, configured as in a run."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import HFModelConfig, RolloutConfig

    model = HFModelConfig(path=str(folder), override_config={"attn_implementation": "sdpa"})
    settings = {"name": "hf", "dtype": "float32", "response_length": 8, "seed": 0} | changes
    return LocalRollout(omega_conf_to_dataclass(RolloutConfig(**settings)), model, CPU)


def actor(folder, scale=1.0):
    """Weights as the actor sends them: every name of the state dict, tied ones too."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return model


def send(rollout, model, steps=0, **changes):
    weights = model.state_dict() | changes
    asyncio.run(rollout.update_weights(((n, v) for n, v in weights.items() if v is not None), global_steps=steps))


def ask(rollout, *requests):
    """All requests at the same time; (prompt, sampling_params) each."""

    async def together():
        calls = [rollout.generate(str(i), prompt_ids=p, sampling_params=s) for i, (p, s) in enumerate(requests)]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), timeout=60)

    return asyncio.run(together())


def transformers_greedy(model, prompt, new):
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, eos_token_id=1, pad_token_id=1
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=["tiny_tied", "tiny_untied", "tiny_llama"])
def folder(request):
    return request.getfixturevalue(request.param)


class TestWeights:
    def test_first_weights_are_used(self, folder):
        rollout, model = make(folder), actor(folder)
        send(rollout, model)
        (answer,) = ask(rollout, (PROMPT, GREEDY))
        assert answer.token_ids == transformers_greedy(model, PROMPT, 8)

    def test_an_update_changes_answers_in_place(self, folder):
        rollout = make(folder)
        send(rollout, actor(folder), steps=0)
        places = {name: p.data_ptr() for name, p in rollout.model.named_parameters()}
        (before,) = ask(rollout, (PROMPT, GREEDY))
        changed = actor(folder, scale=-1.5)
        send(rollout, changed, steps=1)
        (after,) = ask(rollout, (PROMPT, GREEDY))
        assert after.token_ids == transformers_greedy(changed, PROMPT, 8) != before.token_ids
        assert {name: p.data_ptr() for name, p in rollout.model.named_parameters()} == places
        assert (before.extra_fields["global_steps"], after.extra_fields["global_steps"]) == (0, 1)

    def test_an_update_of_the_actors_own_tensors_is_seen(self, folder):
        """In float32 on a CPU the rollout holds the actor's tensors, which the optimizer changes in place."""
        rollout, model = make(folder), actor(folder)
        send(rollout, model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.5)
        send(rollout, model)
        (answer,) = ask(rollout, (PROMPT, GREEDY))
        assert answer.token_ids == transformers_greedy(model, PROMPT, 8)

    def test_weights_are_rounded_to_the_engines_type(self, folder):
        rollout, model = make(folder, dtype="bfloat16"), actor(folder)
        for scale in (1.0, 1.01):  # adopted, then copied
            with torch.no_grad():
                model.model.norm.weight.mul_(scale)
            send(rollout, model)
            own = rollout.model.model.norm.weight
            assert own.dtype == torch.bfloat16
            assert torch.equal(own, model.model.norm.weight.bfloat16())

    @pytest.mark.parametrize("later", [False, True])
    def test_a_missing_name_is_an_error(self, folder, later):
        rollout, model = make(folder), actor(folder)
        if later:
            send(rollout, model)
        with pytest.raises(AssertionError, match=r"missing \['model.norm.weight'\]"):
            send(rollout, model, **{"model.norm.weight": None})

    @pytest.mark.parametrize("later", [False, True])
    def test_an_unknown_name_is_an_error(self, folder, later):
        rollout, model = make(folder), actor(folder)
        if later:
            send(rollout, model)
        with pytest.raises(AssertionError, match=r"unknown .*lora_A"):
            send(rollout, model, **{"model.layers.0.lora_A": torch.zeros(1)})

    def test_a_head_of_its_own_must_be_sent(self, tiny_untied):
        with pytest.raises(AssertionError, match=r"missing \['lm_head.weight'\]"):
            send(make(tiny_untied), actor(tiny_untied), **{"lm_head.weight": None})

    def test_a_tied_head_may_be_sent_or_not(self, tiny_tied):
        for change in ({}, {"lm_head.weight": None}):
            rollout, model = make(tiny_tied), actor(tiny_tied, scale=-1.5)
            send(rollout, model, **change)
            assert rollout.model.lm_head.weight is rollout.model.model.embed_tokens.weight
            assert ask(rollout, (PROMPT, GREEDY))[0].token_ids == transformers_greedy(model, PROMPT, 8)

    def test_only_named_tensors_are_understood(self, tiny_tied):
        with pytest.raises(AssertionError, match="delta_flush"):
            asyncio.run(make(tiny_tied).update_weights([], wire_format="delta_flush"))

    def test_the_checkpoint_is_not_read_again(self, tiny_tied):
        assert all(p.is_meta for p in make(tiny_tied).model.parameters())

    def test_no_gradient_flows(self, tiny_tied):
        rollout = make(tiny_tied)
        send(rollout, actor(tiny_tied))
        assert not any(p.requires_grad for p in rollout.model.parameters())
        assert not rollout.model.training


@pytest.fixture
def ready(tiny_tied):
    rollout = make(tiny_tied)
    send(rollout, actor(tiny_tied), steps=3)
    return rollout


@pytest.fixture
def batches(monkeypatch):
    """Number of rows of each call of Generator.generate."""
    sizes = []
    whole = Generator.generate

    def counted(self, prompts, sampling, on_tokens=None):
        sizes.append(len(prompts))
        return whole(self, prompts, sampling, on_tokens)

    monkeypatch.setattr(Generator, "generate", counted)
    return sizes


class TestRequests:
    def test_requests_that_wait_are_one_batch(self, ready, batches):
        ask(ready, *[([5, i], {}) for i in range(2, 8)])
        assert batches == [6]

    def test_a_batch_starts_the_moment_all_expected_are_there(self, ready, batches, monkeypatch):
        monkeypatch.setattr(module, "QUIET_SECONDS", 60.0)
        ready.expected = lambda: 6
        ask(ready, *[([5, i], {}) for i in range(2, 8)])
        assert batches == [6]

    def test_fewer_than_expected_wait_for_quiet_and_then_go(self, ready, batches):
        ready.expected = lambda: 100
        assert len(ask(ready, (PROMPT, {}), (PROMPT, {}))) == 2
        assert batches == [2]

    def test_a_later_request_is_a_batch_of_its_own(self, ready, batches):
        async def two_turns():
            first = await ready.generate("a", prompt_ids=PROMPT, sampling_params=GREEDY)
            return await ready.generate("a", prompt_ids=PROMPT + first.token_ids, sampling_params=GREEDY)

        asyncio.run(two_turns())
        assert batches == [1, 1]

    def test_answers_go_to_those_who_asked(self, ready):
        prompts = [[5, i] for i in range(2, 8)]
        together = ask(ready, *[(p, GREEDY) for p in prompts])
        for prompt, answer in zip(prompts, together, strict=True):
            assert answer.token_ids == ask(ready, (prompt, GREEDY))[0].token_ids

    def test_each_request_keeps_its_settings(self, ready):
        greedy, sampled, short = ask(
            ready, (PROMPT, GREEDY), (PROMPT, {"temperature": 5.0}), (PROMPT, {"max_tokens": 2})
        )
        assert greedy.token_ids == ask(ready, (PROMPT, GREEDY))[0].token_ids != sampled.token_ids
        assert len(short.token_ids) <= 2

    def test_what_verl_is_told(self, ready):
        (answer,) = ask(ready, (PROMPT, GREEDY))
        assert answer.stop_reason == "completed"
        assert len(answer.log_probs) == len(answer.token_ids) == 8
        versions = {
            name: answer.extra_fields[name] for name in ("global_steps", "min_global_steps", "max_global_steps")
        }
        assert set(versions.values()) == {3}
        assert answer.extra_fields["finish_reason"] == "length"

    def test_max_num_seqs_bounds_a_batch(self, tiny_tied):
        rollout = make(tiny_tied, max_num_seqs=2)
        send(rollout, actor(tiny_tied))
        rows = []
        rollout.model.register_forward_pre_hook(
            lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        assert len(ask(rollout, *[([5, i], GREEDY) for i in range(2, 7)])) == 5
        assert max(rows) == 2

    def test_an_answer_stays_within_the_models_positions(self, ready):
        (answer,) = ask(ready, (list(range(2, 200)) + list(range(2, 200)) + [7] * 112, GREEDY))
        assert len(answer.token_ids) == 512 - 198 - 198 - 112

    def test_images_are_refused(self, ready):
        with pytest.raises(AssertionError, match="text models only"):
            asyncio.run(ready.generate("a", prompt_ids=PROMPT, sampling_params={}, image_data=["x"]))


class TestDraws:
    def test_follow_from_the_step_and_go_on_within_it(self, ready):
        def drawn(*numbers):
            ready.begin(*numbers)
            return ask(ready, (PROMPT, {}))[0].token_ids

        first, more = drawn(1, 0), drawn(1, 0)
        other = drawn(1, 1)
        assert first != more
        assert other not in (first, more)
        assert drawn(1, 0) == first

    def test_begin_comes_after_the_first_weights(self, tiny_tied):
        with pytest.raises(AssertionError, match="no weights yet"):
            make(tiny_tied).begin(1, 0)


class TestErrors:
    def test_reach_every_request_that_waits(self, ready, monkeypatch):
        error = RuntimeError("out of memory")

        def fail(*_):
            raise error

        monkeypatch.setattr(Generator, "generate", fail)
        assert ask(ready, (PROMPT, {}), ([9], {}), ([8], {})) == [error] * 3

    def test_the_next_batch_starts_clean(self, ready):
        bad, good = ask(ready, ([], {}))[0], ask(ready, (PROMPT, GREEDY))[0]
        assert "empty prompt" in str(bad)
        assert len(good.token_ids) == 8

    def test_generating_before_the_first_weights(self, tiny_tied):
        (error,) = ask(make(tiny_tied), (PROMPT, {}))
        assert "no weights yet" in str(error)

    def test_a_prompt_that_fills_the_model(self, ready):
        (error,) = ask(ready, ([5] * 512, {}))
        assert "fills all of the model's positions" in str(error)

    def test_ctrl_c_is_not_held_back(self, ready, monkeypatch):
        def interrupt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(Generator, "generate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ask(ready, (PROMPT, {}))


class TestReadSampling:
    def test_verls_parameters(self):
        params = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.0, "logprobs": True}
        got = read_sampling(params, 64, 1000)
        assert (got.temperature, got.top_p, got.top_k, got.max_new_tokens) == (0.7, 0.9, 20, 64)

    def test_greedy_as_verl_writes_it(self):
        from verl.trainer.ppo.v1.agent_loop_tq import apply_greedy_sampling_params

        params: dict = {}
        apply_greedy_sampling_params(params)
        got = read_sampling(params, 8, 8)
        assert (got.temperature, got.top_p, got.top_k) == (0.0, 1.0, 0)

    @pytest.mark.parametrize(
        ("params", "room", "limit"),
        [
            ({}, 100, 64),
            ({"max_tokens": 10}, 100, 10),
            ({"max_new_tokens": 12}, 100, 12),
            ({"max_tokens": 1000}, 100, 64),
            ({"max_tokens": 50}, 7, 7),
        ],
    )
    def test_the_shortest_limit_holds(self, params, room, limit):
        assert read_sampling(params, 64, room).max_new_tokens == limit

    @pytest.mark.parametrize("top_k", [-1, 0])
    def test_no_top_k(self, top_k):
        assert read_sampling({"top_k": top_k}, 1, 1).top_k == 0

    def test_no_room(self):
        with pytest.raises(AssertionError, match="positions"):
            read_sampling({}, 8, 0)


class TestStopTokens:
    @pytest.mark.parametrize(
        ("tokenizer", "model", "wanted"),
        [
            (1, None, [1]),
            (1, 2, [1, 2]),
            (1, [2, 3], [1, 2, 3]),
            (None, 2, [2]),
            (1, "no config", [1]),
            (None, None, []),
        ],
    )
    def test_tokenizers_and_models(self, tokenizer, model, wanted):
        config = None if model == "no config" else types.SimpleNamespace(eos_token_id=model)
        assert stop_token_ids(types.SimpleNamespace(eos_token_id=tokenizer), config) == wanted

    def test_both_end_an_answer(self, tiny_tied):
        rollout, model = make(tiny_tied), actor(tiny_tied)
        wanted = transformers_greedy(model, PROMPT, 8)
        rollout.model_config.generation_config.eos_token_id = [wanted[2], 999]
        send(rollout, model)
        (answer,) = ask(rollout, (PROMPT, GREEDY))
        assert answer.token_ids == wanted[: wanted.index(wanted[2]) + 1]
        assert answer.extra_fields["finish_reason"] == "stop"


class TestOutOfMemory:
    def break_it(self, rollout, *failing):
        generator, rows = rollout._generator, []
        original = generator._batch

        def fail(prompts, sampling, *more):
            rows.append(len(prompts))
            if len(rows) in failing:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return original(prompts, sampling, *more)

        generator._batch = fail
        return rows

    @pytest.fixture
    def rollout(self, tiny_tied):
        rollout = make(tiny_tied)
        send(rollout, actor(tiny_tied))
        return rollout

    def test_come_in_halves_once(self, rollout):
        told = []
        rollout.tell = told.append
        wanted = ask(rollout, *[(PROMPT, GREEDY)] * 4)
        rows = self.break_it(rollout, 1)
        found = ask(rollout, *[(PROMPT, GREEDY)] * 4)
        assert rows == [4, 2, 2]
        assert [a.token_ids for a in found] == [a.token_ids for a in wanted]
        assert len(told) == 1
        assert "2 instead of 4 answers at a time" in told[0]

    @pytest.mark.parametrize("failing", [(1, 2), (1, 4)])
    def test_then_it_is_the_end(self, rollout, failing):
        self.break_it(rollout, *failing)
        answers = [ask(rollout, *[(PROMPT, GREEDY)] * 4) for _ in range(2)]
        errors = [e for turn in answers for e in turn if isinstance(e, RunError)]
        assert errors
        assert "generating answers: found out of memory" in str(errors[0])

    def test_one_cannot_be_halved(self, rollout):
        self.break_it(rollout, 1)
        (error,) = ask(rollout, (PROMPT, GREEDY))
        assert "one answer at a time" in str(error)

    def test_other_errors_pass(self, rollout):
        rollout._generator._batch = lambda *_: 1 / 0
        (error,) = ask(rollout, (PROMPT, GREEDY))
        assert isinstance(error, ZeroDivisionError)
