"""What a run leaves: terminal and log apart, files that others can read, nothing that stops on odd text or numbers."""

import io
import json
import logging
import math
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quickstart import config
from quickstart.arguments import RLArguments, RunConfig, TrainingArguments
from quickstart.config import Choice, Probe
from quickstart.outputs import OutputFolder
from quickstart.record.capture import Capture
from quickstart.record.console import Console, bar_text, printable, sample_table
from quickstart.record.recorder import Recorder, pick, settings_text, update_line
from quickstart.record.rollouts import write_rollouts
from quickstart.record.state import PLAIN_NAMES, TrainerState, plain_metrics
from quickstart.record.tensorboard import EventFile

REPOSITORY = Path(__file__).resolve().parents[1]
METRICS = {"critic/score/mean": 0.5, "actor/pg_loss": 0.01, "critic/vf_loss": 0.2, "actor/reward_kl_penalty": 0.001}


def row(reward=0.5, uid="u0", **more):
    return {
        "uid": uid,
        "reward": reward,
        "response": "a poem about rain",
        "prompt": "write a poem",
        "step": 1,
        "ground_truth": "rain falls",
        "prompt_length": 3,
        "response_length": 4,
        "finish_reason": "stop",
        **more,
    }


def run_script(script, *, binary=False, **environment):
    command = [sys.executable, "-c", script]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
    return subprocess.run(command, capture_output=True, text=not binary, env=env, check=False)


class TestCapture:
    SCRIPT = """
import logging, os, sys, subprocess, warnings
from pathlib import Path
from quickstart.record.capture import Capture
early = logging.getLogger("early"); early.addHandler(logging.StreamHandler()); early.setLevel("INFO")
print("before")
with Capture(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(os.environ["LOG"])) as capture:
    print("python out"); print("python err", file=sys.stderr)
    os.write(1, b"fd out\\n"); os.write(2, b"fd err\\n")
    subprocess.run(["sh", "-c", "echo child out; echo child err >&2"])
    early.info("early logger"); warnings.warn("a warning")
    late = logging.getLogger("late"); late.addHandler(logging.StreamHandler()); late.warning("late logger")
    capture.say("said to the user")
    with capture.terminal():
        print("guest out"); os.write(2, b"guest err\\n")
        subprocess.run(["sh", "-c", "echo guest child"])
    print("after the guest")
print("after"); late.warning("late logger afterwards"); early.info("early afterwards")
"""

    def test_terminal_and_log_are_kept_apart(self, tmp_path):
        log = tmp_path / "logs" / "run.log"
        done = run_script(self.SCRIPT, LOG=str(log))
        assert done.returncode == 0, done.stderr
        assert done.stdout.split("\n") == ["before", "said to the user", "guest out", "guest child", "after", ""]
        assert done.stderr.split("\n") == ["guest err", "late logger afterwards", "early afterwards", ""]
        text = log.read_text()
        for source in ("python", "fd", "child"):
            assert f"{source} out\n" in text
            assert f"{source} err\n" in text
        for line in ("early logger", "a warning", "late logger", "said to the user", "after the guest"):
            assert line in text, line
        assert "guest" not in text.replace("after the guest", "")

    def test_the_terminal_is_back_after_an_exception(self, tmp_path):
        script = """
import os, sys
from pathlib import Path
from quickstart.record.capture import Capture
with Capture(Path(os.environ["LOG"])):
    print("hidden")
    raise ValueError("seen")
"""
        done = run_script(script, LOG=str(tmp_path / "run.log"))
        assert done.stdout == ""
        assert "ValueError: seen" in done.stderr
        assert (tmp_path / "run.log").read_text() == "hidden\n"

    def test_under_pytests_own_capture(self, tmp_path, capfd):
        with Capture(tmp_path / "run.log") as capture:
            print("hidden")
            os.write(1, b"hidden too\n")
            capture.say("seen")
        print("seen later")
        assert capfd.readouterr().out == "seen\nseen later\n"
        assert (tmp_path / "run.log").read_text().split("\n") == ["hidden", "hidden too", "seen", ""]

    def test_where_stdout_is_no_file_descriptors_stay_alone(self, tmp_path, monkeypatch):
        """As in a notebook."""
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with Capture(tmp_path / "run.log") as capture:
            print("hidden")
            capture.say("seen")
            with capture.terminal():
                print("guest")
        print("after")
        assert out.getvalue() == "seen\nguest\nafter\n"
        assert (tmp_path / "run.log").read_text() == "hidden\nseen\n"

    def test_guests_may_nest_and_come_from_several_threads(self, tmp_path, capsys):
        from concurrent.futures import ThreadPoolExecutor

        with Capture(tmp_path / "run.log") as capture:

            def guest(number):
                with capture.terminal(), capture.terminal():
                    print(f"guest {number}")

            with ThreadPoolExecutor(8) as pool:
                list(pool.map(guest, range(64)))
            print("hidden")
        assert capsys.readouterr().out.count("guest") == 64
        assert (tmp_path / "run.log").read_text() == "hidden\n"

    def test_logging_handlers_get_their_stream_back(self, tmp_path):
        handler = logging.StreamHandler(sys.stderr)
        logger = logging.getLogger("quickstart.test")
        logger.addHandler(handler)
        before = handler.stream
        try:
            with Capture(tmp_path / "run.log"):
                assert handler.stream is not before
                logger.warning("hidden")
            assert handler.stream is before
            assert "hidden" in (tmp_path / "run.log").read_text()
        finally:
            logger.removeHandler(handler)

    def test_descriptors_do_not_leak(self, tmp_path, capfd):
        count = lambda: len(os.listdir("/proc/self/fd"))  # noqa: E731
        before = count()
        for _ in range(5):
            with Capture(tmp_path / "run.log"):
                print("hidden")
        assert count() <= before + 1

    def test_a_second_capture_after_the_first_appends(self, tmp_path, capsys):
        for word in ("one", "two"):
            with Capture(tmp_path / "run.log"):
                print(word)
        assert (tmp_path / "run.log").read_text() == "one\ntwo\n"

    def test_a_closed_pipe_does_not_stop_the_run(self, tmp_path):
        script = """
import os, sys, time
from pathlib import Path
from quickstart.record.capture import Capture
with Capture(Path(os.environ["LOG"])) as capture:
    for number in range(2000):
        capture.say(f"line {number} " + "x" * 100)
    capture.note("reached the end")
os._exit(0)
"""
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "LOG": str(tmp_path / "run.log")}
        command = f"{sys.executable} -c '{script}' | head -1; exit ${{PIPESTATUS[0]}}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        assert "reached the end" in (tmp_path / "run.log").read_text()

    def test_the_tail_is_the_end_of_the_log(self, tmp_path, capsys):
        with Capture(tmp_path / "run.log") as capture:
            for number in range(500):
                print("line", number)
            assert capture.tail(3) == "line 497\nline 498\nline 499"
        assert capture.tail(1) == "line 499"

    def test_a_breakpoint_in_user_code_reaches_the_real_terminal(self, tmp_path):
        script = """
import os, sys
from pathlib import Path
from quickstart.record.capture import Capture
with Capture(Path(os.environ["LOG"])) as capture:
    with capture.terminal():
        secret = 6 * 7
        breakpoint()
    capture.say("went on")
"""
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "LOG": str(tmp_path / "run.log")}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, input="p secret\nc\n", capture_output=True, text=True, env=env, check=False)
        assert "42" in done.stdout
        assert "went on" in done.stdout


class TestConsoleEncodings:
    SCRIPT = """
import os
from pathlib import Path
from quickstart.record.capture import Capture
from quickstart.record.console import Console
row = {"prompt": "写诗 \\U0001f600", "response": "春天 \\ud800 \\x1b[31mred", "reward": 0.5}
with Capture(Path(os.environ["LOG"])) as capture:
    console = Console(capture)
    console.line("奖励 → 0.5 \\U0001f600 \\ud800")
    console.samples("samples 样本", [row])
print("end")
"""

    @pytest.mark.parametrize("encoding", ["ascii", "gbk", "utf-8", "latin-1", "utf-16"])
    def test_no_console_stops_the_run(self, tmp_path, encoding):
        done = run_script(self.SCRIPT, binary=True, LOG=str(tmp_path / "run.log"), PYTHONIOENCODING=encoding)
        assert done.returncode == 0, done.stderr.decode(encoding, "replace")
        text = done.stdout.decode(encoding, "replace")
        assert "0.5" in text
        assert "end" in text
        assert "\x1b" not in text
        assert "奖励" in (tmp_path / "run.log").read_text(encoding="utf-8")

    def test_without_any_locale(self, tmp_path):
        (tmp_path / "script.py").write_text(self.SCRIPT, encoding="utf-8")
        script = f"import runpy; runpy.run_path({str(tmp_path / 'script.py')!r})"
        done = run_script(script, binary=True, LOG=str(tmp_path / "run.log"), LC_ALL="C", PYTHONUTF8="0")
        assert done.returncode == 0, done.stderr


class TestConsole:
    def test_the_bar_is_drawn_only_where_somebody_watches(self, tmp_path, capsys):
        with Capture(tmp_path / "run.log") as capture:
            console = Console(capture)
            console.begin(3)
            console.progress(1)
            console.line("hello")
            console.end()
        out = capsys.readouterr().out
        assert "step 1/3" not in out
        assert "hello" in out

    def test_on_a_terminal_the_bar_stays_below_the_lines(self, tmp_path):
        script = """
import os
from pathlib import Path
from quickstart.record.capture import Capture
from quickstart.record.console import Console
with Capture(Path(os.environ["LOG"])) as capture:
    console = Console(capture)
    console.begin(2)
    for step in (1, 2):
        console.line(f"line {step}")
        console.progress(step)
    console.end()
    console.line("done")
"""
        leader, follower = pty.openpty()
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "LOG": str(tmp_path / "run.log"), "TERM": "xterm"}
        process = subprocess.Popen([sys.executable, "-c", script], stdout=follower, stderr=follower, env=env)
        assert process.wait(30) == 0
        os.close(follower)
        text = os.read(leader, 65536).decode()
        os.close(leader)
        assert "step 2/2" in text
        assert text.rstrip().endswith("done")
        assert "\r" not in (tmp_path / "run.log").read_text()

    def test_bar(self):
        assert bar_text(5, 10, 61, fancy=False) == "step 5/10 ############------------ about 1:01 left"

    def test_chinese_and_english_columns_line_up(self):
        from rich.cells import cell_len

        rows = [
            {"prompt": "请写一首关于春天的诗" * 3, "response": "春风又绿江南岸" * 8, "reward": 0.91},
            {"prompt": "write a poem", "response": "The rain falls softly on the roof", "reward": 0.1},
        ]
        text = sample_table("samples", rows)
        lines = text.split("\n")
        assert max(cell_len(line) for line in lines) <= 110
        assert len({cell_len(line) for line in lines if line.endswith(("0.91", "0.10"))}) == 1
        assert sample_table("samples", rows[1:]).isascii()

    def test_what_a_model_writes_cannot_steer_the_terminal(self):
        nasty = "\x1b[2J\x07 a\x00b \u202e evil [red]markup[/red]\n\n  next"
        text = printable(nasty)
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert text == "[2J ab evil [red]markup[/red] next"
        assert "[red]markup[/red]" in sample_table("t", [{"prompt": nasty, "response": nasty, "reward": 1}])

    def test_chat_messages_are_shown_as_their_texts(self):
        assert printable([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]) == "hi there"

    def test_long_answers_are_cut(self):
        assert len(printable("word " * 500)) == 160

    def test_settings_are_a_table(self):
        cfg = config.from_arguments({"model_name_or_path": "org/model"}, {"train_file": "a/b/*.jsonl"})
        text = settings_text(cfg, [Choice(field="training.device", value="cpu", why="no driver")])
        assert text == "chosen automatically:\n  training.device  cpu  no driver"
        assert settings_text(cfg, []) == ""


class TestRollouts:
    def test_prompt_response_and_reward_come_first(self, tmp_path):
        path = tmp_path / "rollout_000000.jsonl"
        write_rollouts(path, [row(own_key=1), row()])
        lines = path.read_text().splitlines()
        assert len(lines) == 2
        first = json.loads(lines[0])
        assert list(first)[:6] == ["prompt", "response", "reward", "step", "uid", "ground_truth"]
        assert first["own_key"] == 1

    def test_chinese_is_readable_and_line_ends_inside_stay_inside(self, tmp_path):
        path = tmp_path / "r.jsonl"
        write_rollouts(path, [row(response="春天\n来了\u2028\ud83d\x85!")])
        raw = path.read_text(encoding="utf-8")
        assert "春天" in raw
        assert len(raw.splitlines()) == 1
        assert json.loads(raw)["response"] == "春天\n来了\u2028\ud83d\x85!"

    def test_a_reward_that_is_not_finite_is_null_and_named(self, tmp_path):
        path = tmp_path / "r.jsonl"
        write_rollouts(path, [row(reward=math.nan)])
        entry = json.loads(path.read_text())
        assert entry["reward"] is None
        assert entry["nonfinite"] == ["reward"]

    def test_the_datasets_library_and_pandas_free_readers_get_every_row(self, tmp_path):
        path = tmp_path / "r.jsonl"
        write_rollouts(path, [row(reward=number / 10) for number in range(10)])
        with open(path, encoding="utf-8") as file:
            assert [json.loads(line)["reward"] for line in file] == [number / 10 for number in range(10)]

    def test_extra_values_that_json_does_not_know(self, tmp_path):
        import numpy as np

        write_rollouts(tmp_path / "r.jsonl", [row(reward=np.float32(0.5), extra={"n": np.int64(3)}, flag=True)])
        entry = json.loads((tmp_path / "r.jsonl").read_text())
        assert (entry["reward"], entry["extra"], entry["flag"]) == (0.5, {"n": 3}, True)


def state(path, **settings):
    return TrainerState(path, max_steps=3, num_train_epochs=1, settings={"logging_steps": 1, **settings})


class TestTrainerState:
    def test_transformers_reads_it(self, tmp_path):
        trainer_callback = pytest.importorskip("transformers.trainer_callback")
        written = state(tmp_path / "s.json", eval_steps=5, save_steps=None, train_batch_size=4)
        for step in (1, 2, 3):
            written.add(step, step / 3, METRICS)
        read = trainer_callback.TrainerState.load_from_json(str(tmp_path / "s.json"))
        assert (read.global_step, read.max_steps, read.num_train_epochs, read.eval_steps) == (3, 3, 1, 5)
        assert read.epoch == 1.0
        assert [entry["step"] for entry in read.log_history] == [1, 2, 3]
        read.save_to_json(str(tmp_path / "again.json"))

    def test_every_field_of_transformers_is_there(self):
        import dataclasses

        from quickstart.record.state import DEFAULTS

        trainer_callback = pytest.importorskip("transformers.trainer_callback")
        names = {field.name for field in dataclasses.fields(trainer_callback.TrainerState)}
        ours = {*DEFAULTS, "epoch", "global_step", "max_steps", "num_train_epochs", "log_history"}
        nobody_counts = {"num_input_tokens_seen", "total_flos"}  # a 0 would look like a count
        assert ours == names - {"stateful_callbacks", *nobody_counts}

    def test_plain_names_stand_beside_verls(self, tmp_path):
        state(tmp_path / "s.json").add(1, 0.2, METRICS)
        entry = json.loads((tmp_path / "s.json").read_text())["log_history"][0]
        assert list(entry)[:6] == ["step", "epoch", "reward", "actor_loss", "critic_loss", "kl"]
        assert (entry["reward"], entry["actor_loss"], entry["critic_loss"], entry["kl"]) == (0.5, 0.01, 0.2, 0.001)
        assert METRICS.items() <= entry.items()

    @pytest.mark.parametrize(
        ("metrics", "kl"),
        [
            ({"actor/kl_loss": 0.3, "actor/ppo_kl": 0.0}, 0.3),
            ({"actor/reward_kl_penalty": 0.2, "actor/ppo_kl": 0.0}, 0.2),
            ({"actor/ppo_kl": 0.1}, 0.1),
            ({"kl": 0.7, "actor/ppo_kl": 0.1}, None),
        ],
    )
    def test_kl_is_the_distance_to_the_reference_where_there_is_one(self, metrics, kl):
        assert plain_metrics(metrics).get("kl") == kl

    def test_no_critic_no_critic_loss(self):
        assert set(plain_metrics({"actor/pg_loss": 1.0})) == {"actor_loss"}
        assert set(PLAIN_NAMES) == {"reward", "actor_loss", "critic_loss", "kl"}

    def test_values_that_are_not_finite_are_null_named_and_counted(self, tmp_path):
        written = state(tmp_path / "s.json")
        assert written.add(1, 0.1, {"actor/grad_norm": math.inf, "actor/pg_loss": math.nan, "actor/lr": 1e-6}) == [
            "actor_loss",
            "actor/grad_norm",
            "actor/pg_loss",
        ]
        written.add(2, 0.2, {"actor/grad_norm": math.nan})
        written.save()
        entry = json.loads((tmp_path / "s.json").read_text())["log_history"][0]
        assert entry["actor/grad_norm"] is None
        assert "actor/pg_loss" in entry["nonfinite"]
        assert written.nonfinite["actor/grad_norm"] == 2

    def test_a_resumed_run_keeps_its_history(self, tmp_path):
        state(tmp_path / "s.json").add(1, 0.5, METRICS)
        history = json.loads((tmp_path / "s.json").read_text())["log_history"]
        resumed = state(tmp_path / "s.json")
        resumed.load(history)
        resumed.add(2, 1.0, METRICS)
        resumed.save()
        assert [e["step"] for e in json.loads((tmp_path / "s.json").read_text())["log_history"]] == [1, 2]

    def test_a_short_run_is_on_disk_after_every_step(self, tmp_path):
        written = state(tmp_path / "s.json")
        for step in range(1, 6):
            written.add(step, step, METRICS)
            time.sleep(0.1)
            assert json.loads((tmp_path / "s.json").read_text())["global_step"] == step

    def test_ten_thousand_steps_stay_cheap_and_end_complete(self, tmp_path):
        metrics = {f"group/name_{number}": number / 7 for number in range(80)}
        written = state(tmp_path / "s.json")
        began = time.process_time()
        for step in range(1, 10_001):
            written.add(step, step / 100, metrics)
        written.save()
        assert (time.process_time() - began) / 10_000 < 0.002
        assert len(json.loads((tmp_path / "s.json").read_text())["log_history"]) == 10_000


class TestTensorBoard:
    def test_tensorboard_reads_the_events(self, tmp_path):
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        events = EventFile(tmp_path / "runs" / "now")
        for step in (1, 2, 3):
            events.scalars(step, {"reward": step / 10, "bad": math.nan})
        read = accumulator.EventAccumulator(str(tmp_path / "runs" / "now"))
        read.Reload()  # before close: a run is watched while it goes on
        assert [(e.step, pytest.approx(e.value)) for e in read.Scalars("reward")] == [(1, 0.1), (2, 0.2), (3, 0.3)]
        assert "bad" not in read.Tags()["scalars"]
        events.close()
        assert [p.name.startswith("events.out.tfevents.") for p in (tmp_path / "runs" / "now").iterdir()] == [True]


class TestRecorder:
    def play(self, tmp_path, capsys, *, rl_type="ppo", steps=2, reason="completed", metrics=METRICS, **training):
        cfg = RunConfig(rl=RLArguments(rl_type=rl_type), training=TrainingArguments(**training))
        cfg = config.resolve(cfg, Probe(cpus=2, why_no_gpu="none")).cfg
        root = tmp_path / "out"
        with OutputFolder.claim(root) as outputs, Capture(outputs.log) as capture:
            recorder = Recorder(outputs, cfg, capture, argv=["python", "-m", "quickstart.run"])
            recorder.phase("loading model tiny")
            recorder.begin(steps)
            for step in range(1, steps + 1):
                rows = [row(reward=0.1 * (n % 5) + step / 10, uid=f"u{n % 4}", step=step) for n in range(8)]
                recorder.rollout(step, rows)
                recorder.update(step, step / steps, metrics)
            recorder.evaluation(steps, 1.0, {"val-core/x": 0.5}, [row(reward=0.25)])
            recorder.saved(steps, outputs.checkpoint(steps))
            recorder.close(reason)
            recorder.close(reason)
        return root, capsys.readouterr().out

    def test_the_lines_of_a_run(self, tmp_path, capsys):
        _, out = self.play(tmp_path, capsys)
        for line in (
            "loading model tiny",
            "Step 1: rollout completed (4 prompts -> 8 responses)",
            "Step 1: reward computed (avg 0.26, std 0.13)",
            "Step 1: PPO update done. Loss: actor 0.01, critic 0.2, kl 0.001",
            "Step 2: evaluation done on 1 row: reward 0.250",
            "Step 2: checkpoint written to",
            "Training completed: 2 steps, reward 0.263 -> 0.363. Results are in",
        ):
            assert line in out, line

    def test_the_files_of_a_run(self, tmp_path, capsys):
        root, _ = self.play(tmp_path, capsys)
        assert sorted(p.name for p in (root / "rollouts").iterdir()) == [
            "evaluation_000002.jsonl",
            "rollout_000000.jsonl",
            "rollout_000001.jsonl",
        ]
        history = json.loads((root / "trainer_state.json").read_text())
        assert (history["global_step"], history["max_steps"]) == (2, 2)
        assert [entry["step"] for entry in history["log_history"]] == [1, 2, 2]
        assert history["log_history"][2]["eval_reward"] == 0.25
        assert list((root / "runs").glob("*/events.out.tfevents.*"))
        assert config.load(str(root / "config.yaml"), ["data.train_file=a/*.jsonl"]).rl.num_generations == 1
        assert "Step 1: rollout completed" in (root / "logs" / "run.log").read_text()

    def test_run_json_tells_how_to_run_it_again(self, tmp_path, capsys):
        root, _ = self.play(tmp_path, capsys)
        facts = json.loads((root / "run.json").read_text())
        assert facts["exit_reason"] == "completed"
        assert facts["command"] == ["python", "-m", "quickstart.run"]
        assert facts["versions"]["numpy"]
        assert facts["versions"]["vllm"] is None or isinstance(facts["versions"]["vllm"], str)
        assert (facts["seed"], facts["rl_type"], facts["device"]["kind"]) == (42, "ppo", "cpu")
        for name in ("started", "ended"):
            assert facts[name][-6] in "+-", "a time without its zone"

    def test_without_a_critic_its_loss_is_not_told(self, tmp_path, capsys):
        metrics = {"actor/pg_loss": 0.5, "actor/kl_loss": 0.25}
        _, out = self.play(tmp_path, capsys, rl_type="grpo", metrics=metrics)
        assert "Step 1: GRPO update done. Loss: actor 0.5, kl 0.25" in out

    def test_preference_methods_tell_their_own_figures(self):
        metrics = {"loss": 0.6931, "rewards/margins": 0.1, "rewards/accuracies": 0.5}
        assert update_line(3, "dpo", metrics) == "Step 3: DPO update done. Loss: 0.693, margin 0.1, accuracy 0.5"

    def test_samples_of_methods_without_rollouts_are_no_steps(self, tmp_path, capsys):
        cfg = config.resolve(RunConfig(rl=RLArguments(rl_type="dpo")), Probe(cpus=2, why_no_gpu="none")).cfg
        with OutputFolder.claim(tmp_path / "out") as outputs, Capture(outputs.log) as capture:
            recorder = Recorder(outputs, cfg, capture)
            recorder.begin(1)
            recorder.rollout(1, [row(reward=0.25), row(reward=0.5)])
            recorder.update(1, 1.0, {"loss": 0.6931})
            recorder.rollout(2, [row(reward=0.75)])
            recorder.close("completed")
        out = capsys.readouterr().out
        assert "Samples before training: 2 greedy answers, average reward 0.38" in out
        assert "Samples before training: best, middle and worst" in out
        assert "Samples after training: 1 greedy answer, average reward 0.75" in out
        assert "Training completed: 1 step, reward of the samples 0.375 -> 0.750. Results" in out
        assert "rollout completed" not in out
        assert "Step 2" not in out

    def test_logging_steps_thin_the_lines_but_not_the_records(self, tmp_path, capsys):
        root, out = self.play(tmp_path, capsys, steps=10, logging_steps=4)
        told = [line.split("Step ")[1].split(":")[0] for line in out.splitlines() if "rollout completed" in line]
        assert told == ["1", "4", "8", "10"]
        assert len(list((root / "rollouts").glob("rollout_*"))) == 10
        assert len(json.loads((root / "trainer_state.json").read_text())["log_history"]) == 11

    def test_the_user_sees_samples_of_the_first_and_the_last_step(self, tmp_path, capsys):
        _, out = self.play(tmp_path, capsys)
        assert out.count("best, middle and worst") == 2

    def test_values_that_are_not_finite_are_told(self, tmp_path, capsys):
        root, out = self.play(tmp_path, capsys, metrics={**METRICS, "actor/grad_norm": math.nan})
        assert "Step 1: not finite, recorded as null: actor/grad_norm" in out
        assert json.loads((root / "run.json").read_text())["nonfinite_values"] == {"actor/grad_norm": 2}

    def test_an_interrupted_run_says_so_in_its_files(self, tmp_path, capsys):
        root, out = self.play(tmp_path, capsys, reason="interrupted")
        assert json.loads((root / "run.json").read_text())["exit_reason"] == "interrupted"
        assert "Training ended early (interrupted)" in out

    @pytest.mark.parametrize("count", [0, 1, 2, 3, 7])
    def test_samples_are_best_middle_and_worst(self, count):
        picked = [r["reward"] for r in pick([row(reward=n) for n in range(count)])]
        assert len(picked) == min(count, 3)
        assert picked == sorted(picked, reverse=True)

    def test_closing_before_anything_happened(self, tmp_path, capsys):
        with OutputFolder.claim(tmp_path / "o") as outputs, Capture(outputs.log) as capture:
            Recorder(outputs, RunConfig(), capture).close("failed: the model does not fit")
        assert json.loads(outputs.trainer_state.read_text())["log_history"] == []
        assert json.loads(outputs.run.read_text())["exit_reason"].startswith("failed")

    def test_a_failure_points_to_the_log(self, tmp_path, capsys):
        root, out = self.play(tmp_path, capsys, reason="failed: RuntimeError: shapes\nand a long story")
        assert f"the log of it all: {root / 'logs' / 'run.log'}" in out
        assert "long story" not in out

    def test_the_last_metrics_can_be_asked_for(self, tmp_path, capsys):
        with OutputFolder.claim(tmp_path / "o") as outputs, Capture(outputs.log) as capture:
            recorder = Recorder(outputs, RunConfig(), capture)
            recorder.begin(1)
            recorder.update(1, 1.0, METRICS)
            recorder.close("completed")
        assert recorder.step == 1
        assert recorder.last_metrics["reward"] == 0.5


def test_record_imports_nothing_heavy():
    script = (
        "import sys, quickstart.record.recorder\n"
        "heavy = {'torch', 'ray', 'verl', 'transformers', 'datasets', 'tensorboard', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = run_script(script)
    assert done.returncode == 0, done.stderr
