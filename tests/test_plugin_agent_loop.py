"""verl's agent loop in this process: the user's reward runs in the main thread, and its error ends the run as it is."""

import ast
import asyncio
import inspect
import sys
import threading
import types
from pathlib import Path

import local_runs
import pytest
import reward_probe
import verl_text

from quickstart.plugin import agent_loop
from quickstart.plugin.agent_loop import PLAIN_HYDRA, InlineExecutor, LocalLoop

PROBE = Path(reward_probe.__file__)


@pytest.fixture
def reward(monkeypatch):
    """Sets what the reward does."""
    monkeypatch.setattr(reward_probe, "CALLS", 0)
    return lambda behave: monkeypatch.setattr(reward_probe, "BEHAVE", behave)


@pytest.fixture
def train(tiny_tied, sums, tmp_path, process_variables):
    """A run of one step, 8 prompts with 2 answers each."""

    def train(name="compute_score"):
        cfg = local_runs.settings(tiny_tied, rl={"rl_type": "grpo", "num_generations": 2})
        return local_runs.run(local_runs.verl_config_of(cfg, sums, tmp_path, steps=1, reward=(PROBE, name)))

    return train


class TestRewardErrors:
    def test_the_run_ends_with_that_very_exception(self, reward, train):
        error = ZeroDivisionError("row 3 of the user's own file")

        def behave(text):
            if reward_probe.CALLS == 5:
                raise error
            return 0.0

        reward(behave)
        with pytest.raises(ZeroDivisionError) as caught:
            train()
        assert caught.value is error

    def test_the_first_of_several_errors_is_the_one(self, reward, train):
        def behave(text):
            raise ValueError(f"call {reward_probe.CALLS}")

        reward(behave)
        with pytest.raises(ValueError, match=r"call 1$"):
            train()

    def test_ctrl_c_inside_a_reward_ends_the_run_at_once(self, reward, train):
        def behave(text):
            raise KeyboardInterrupt

        reward(behave)
        with pytest.raises(KeyboardInterrupt):
            train()
        assert reward_probe.CALLS == 1

    def test_an_error_of_a_coroutine(self, reward, train):
        error = ValueError("async")

        def behave(text):
            raise error

        reward(behave)
        with pytest.raises(ValueError, match="async") as caught:
            train("compute_score_async")
        assert caught.value is error

    def test_the_next_run_is_not_affected(self, reward, train):
        def behave(text):
            raise ValueError

        reward(behave)
        with pytest.raises(ValueError):  # noqa: PT011
            train()
        reward(lambda text: 1.0)
        assert train().updates[1]["critic/score/mean"] == 1.0


class TestWhereARewardRuns:
    def test_in_the_main_thread_so_that_a_breakpoint_works(self, reward, train):
        threads = set()

        def behave(text):
            threads.add(threading.current_thread())
            return 0.0

        reward(behave)
        train()
        assert threads == {threading.main_thread()}

    def test_once_an_answer(self, reward, train):
        reward(lambda text: 0.5)
        record = train()
        assert reward_probe.CALLS == len(record.rollouts[1]) == 16
        assert {row["reward"] for row in record.rollouts[1]} == {0.5}

    def test_coroutines_too(self, reward, train):
        reward(lambda text: 0.25)
        assert {row["reward"] for row in train("compute_score_async").rollouts[1]} == {0.25}

    def test_while_another_event_loop_is_running(self, reward, train):
        """In a notebook the kernel's loop runs in the same thread."""
        reward(lambda text: 0.5)

        async def cell():
            before = asyncio.get_running_loop()
            record = train()
            assert asyncio.get_running_loop() is before
            await asyncio.sleep(0)
            return record

        assert asyncio.run(cell()).updates[1]["critic/score/mean"] == 0.5

    def test_an_error_while_another_event_loop_is_running(self, reward, train):
        def behave(text):
            raise ValueError("in a cell")

        reward(behave)

        async def cell():
            with pytest.raises(ValueError, match="in a cell"):
                train()
            return asyncio.get_running_loop().is_running()

        assert asyncio.run(cell())


class TestLocalLoop:
    @pytest.fixture
    def loop(self):
        loop = LocalLoop()
        yield loop
        loop.close()

    def test_gives_the_result(self, loop):
        async def double(x):
            await asyncio.sleep(0)
            return 2 * x

        assert loop.run(double(4)) == 8

    def test_work_for_the_executor_runs_here(self, loop):
        async def where():
            return await asyncio.get_running_loop().run_in_executor(None, threading.current_thread)

        assert loop.run(where()) is threading.current_thread()

    def test_what_was_left_behind_is_cancelled_at_the_end(self):
        loop, seen = LocalLoop(), []

        async def waits():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        async def starts():
            loop.task = asyncio.get_running_loop().create_task(waits())
            await asyncio.sleep(0)

        loop.run(starts())
        loop.close()
        assert seen == ["cancelled"]
        assert loop.loop.is_closed()


class TestInlineExecutor:
    def test_runs_at_once_in_this_thread(self):
        done = InlineExecutor(max_workers=1).submit(threading.current_thread)
        assert done.done()
        assert done.result() is threading.current_thread()

    def test_an_error_waits_in_the_future(self):
        with pytest.raises(ZeroDivisionError):
            InlineExecutor(max_workers=1).submit(lambda: 1 / 0).result()

    def test_ctrl_c_does_not(self):
        def interrupt():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            InlineExecutor(max_workers=1).submit(interrupt)


class TestPlainHydra:
    def test_a_bare_class(self):
        made = PLAIN_HYDRA.utils.instantiate({"_target_": "types.SimpleNamespace"}, a=1)
        assert made == types.SimpleNamespace(a=1)

    def test_anything_else_is_hydras(self):
        config = {"_target_": "types.SimpleNamespace", "b": {"_target_": "types.SimpleNamespace", "c": 3}}
        made = PLAIN_HYDRA.utils.instantiate(config=config, a=1)
        assert made == types.SimpleNamespace(a=1, b=types.SimpleNamespace(c=3))

    def test_verls_agent_loop_uses_nothing_else_of_hydra(self):
        from verl.experimental.agent_loop import agent_loop as verls

        assert verl_text.attributes(verl_text.tree(verls), "hydra") == {"utils"}
        assert verl_text.attributes(verl_text.tree(verls), "hydra.utils") == {"instantiate"}


class TestVerlsWorker:
    """What `_Worker` overrides and reads is still there."""

    def test_methods_and_tasks(self):
        assert {"_run_agent_loop", "generate_sequences", "_run_prompt"} <= set(dir(agent_loop._VerlWorker))
        assert "self.background_tasks = set()" in inspect.getsource(agent_loop._VerlWorker.__init__)

    def test_an_error_of_a_conversation_is_only_logged_by_verl(self):
        text = inspect.getsource(agent_loop._VerlWorker._run_prompt)
        assert "logger.error(" in text
        assert 'status = "failure"' in text

    def test_every_conversation_goes_through_the_overridden_method(self):
        tree = ast.parse(inspect.getsource(sys.modules[agent_loop._VerlWorker.__module__]))
        assert len(verl_text.calls(tree, "self._run_agent_loop")) == 1

    def test_rewards_go_to_the_event_loops_own_executor(self):
        from verl.experimental.reward_loop.reward_manager import naive

        for call in verl_text.calls(verl_text.tree(naive), "self.loop.run_in_executor"):
            assert ast.unparse(call.args[0]) == "None"
