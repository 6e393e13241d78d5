"""What breaks in a real run, and what then happens: it goes on at full size, or stops with a message and a usable checkpoint; nothing stays behind."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from transformers import AutoTokenizer

from estimators import collate, supervised_batch
from generator import GeneratorConfig
from losses import AGGREGATIONS
from recipes.arithmetic import prompts
from recipes.make_tiny import make_model
from train import Config, evaluate, finished_checkpoints

from conftest import ROOT, TINY, running
from test_train import SMALL, assert_nothing_left, finish, metrics, until_step

LONG = [*SMALL, "--steps", "12", "--eval-samples", "0"]


class Run:
    """train.py in a directory of its own, whose parts can be found by name."""

    def __init__(self, directory: Path, *flags: str):
        self.marker, self.directory = f"nanomolt-fault-{os.getpid()}-{time.monotonic_ns()}", directory / "runs" / "run"
        self.process = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *LONG, *flags, "--name", "run"], cwd=directory, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True, env=os.environ | {"MARKER": self.marker})

    def until_step(self, step: int) -> None:
        until_step(self.process, self.directory, step)

    def part(self, name: str) -> psutil.Process:
        """The run's process whose title starts with `name` (ray::Engine, ray::Rank, ray::AgentWorker, VLLM::EngineCore)."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.cmdline() and process.cmdline()[0].startswith(name) and process.environ().get("MARKER") == self.marker:
                    found.append(process)
            except psutil.Error:
                continue
        assert found, name
        return found[0]

    def end(self, seconds: float = 240) -> str:
        """The whole output, when it has ended and nothing it started is left."""
        output = finish(self.process, seconds)
        assert_nothing_left(self.marker, 30)
        return output


def whole(run: Run, output: str) -> list[dict]:
    """The steps of a run that went on at full size: every one there, with all its rollouts, and no version skipped."""
    assert run.process.returncode == 0, output
    steps = [row for row in metrics(run.directory) if "reward" in row]
    assert [row["version"] for row in steps] == list(range(1, 13)) and all(row["rollouts"] == 32 for row in steps)
    assert all(row["staleness_max"] <= 1 for row in steps) and "Traceback" not in output
    return steps


@pytest.mark.long
@pytest.mark.parametrize("name", ["VLLM::EngineCore", "ray::Engine"])
def test_a_killed_engine_is_restarted_and_brought_to_the_current_version(tmp_path, name):
    run = Run(tmp_path)
    run.until_step(3)
    run.part(name).kill()
    output = run.end()
    assert whole(run, output)[-1]["engine_restarts"] == 1
    assert "restarting engine 0" in output and "serve version" in output


@pytest.mark.long
def test_one_of_two_engines_dies_and_the_other_goes_on(tmp_path):
    run = Run(tmp_path, "--engines", "2")
    run.until_step(3)
    run.part("VLLM::EngineCore").kill()
    assert whole(run, run.end())[-1]["engine_restarts"] == 1


@pytest.mark.long
def test_an_engine_that_hangs_is_restarted_though_nothing_died(tmp_path):
    """Its process is frozen: whatever waits for it, rollouts or a publish, learns it by a deadline; the engine is made anew and brought to the version."""
    run = Run(tmp_path, "--publish-timeout", "20", "--engine-timeout", "15")
    run.until_step(3)
    run.part("VLLM::EngineCore").send_signal(signal.SIGSTOP)
    output = run.end()
    assert whole(run, output)[-1]["engine_restarts"] >= 1 and ("has not answered for 15 s" in output or "waited 20 s for" in output)


BLOCKING = """
import time
from recipes.arithmetic import AgentRunner as Sums, prompts


class AgentRunner(Sums):
    async def step(self, action):
        if self.prompt["messages"][0]["content"].startswith("7+"):
            time.sleep(3600)
        return await super().step(action)
"""


@pytest.mark.long
def test_an_agent_that_blocks_its_worker_is_named_and_costs_its_groups(tmp_path):
    """time.sleep in an async step stops the whole worker, its time-outs too. It is restarted; a group that saw three ends is dropped, counted and replaced."""
    (tmp_path / "blocking.py").write_text(BLOCKING)
    run = Run(tmp_path, "--agent", "blocking.py", "--rollout-timeout", "6", "--eval-prompts", "1", "--steps", "40")
    output = run.end(580)
    assert run.process.returncode == 0, output
    rows = [row for row in metrics(run.directory) if "reward" in row]
    assert [row["version"] for row in rows] == list(range(1, 41)) and all(row["rollouts"] == 32 for row in rows)
    assert "agent worker 0 has not answered for 6 s" in output and rows[-1]["dropped/worker_died"] >= 4


@pytest.mark.long
def test_a_killed_agent_worker_is_restarted_and_its_groups_are_asked_for_again(tmp_path):
    run = Run(tmp_path)
    run.until_step(3)
    run.part("ray::AgentWorker").kill()
    assert sum(row["dropped_groups"] for row in whole(run, run.end())) == 0


@pytest.mark.long
def test_a_killed_trainer_rank_ends_the_run_with_a_usable_checkpoint(tmp_path):
    run = Run(tmp_path)
    run.until_step(4)
    run.part("ray::Rank").kill()
    output = run.end()
    assert run.process.returncode == 1 and "--resume" in output and "Traceback" not in output
    assert [p.name for p in finished_checkpoints(run.directory)] == ["000003"]
    assert json.loads((run.directory / "checkpoints/000003/run.json").read_text())["version"] == 3


@pytest.mark.long
def test_a_trainer_rank_that_hangs_ends_the_run_by_its_deadline(tmp_path):
    run = Run(tmp_path, "--wait-timeout", "75")
    run.until_step(4)
    run.part("ray::Rank").send_signal(signal.SIGSTOP)
    output = run.end()
    assert run.process.returncode == 1 and "waiting 60 s for the trainer, step" in output and "waited 75 s for the trainer, step" in output and "Go on from version 3 with --resume" in output


@pytest.mark.long
def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_keeps_the_last_one(tmp_path):
    """As with a full disk: after the checkpoint of step 3 nothing can be created beside it any more (its directory's place is taken by a file)."""
    run = Run(tmp_path)
    run.until_step(4)
    (run.directory / "checkpoints/000006.unfinished").write_text("in the way")
    output = run.end()
    assert run.process.returncode == 1 and "Go on from version 3 with --resume" in output and "Traceback" not in output
    assert [p.name for p in finished_checkpoints(run.directory)] == ["000003"] and "Error" in (run.directory / "error.log").read_text()


# ---------------------------------------------------------------------------------------------------- in this process: at a chosen moment
@pytest.fixture(scope="module")
def cell(cluster, loop, tmp_path_factory):
    """(cfg, parts): an engine, a trainer and a worker of their own, of a policy large enough (19M parameters) to be hit in the middle of a send."""
    model = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    make_model(tokenizer, 512, 6, seed=1).save_pretrained(model)
    tokenizer.save_pretrained(model)
    cfg = Config(model=str(model), device="cpu", dtype="float32", eval_samples=0,
                 generator=GeneratorConfig(agent=str(ROOT / "recipes/arithmetic.py"), partial_rollout=True, publish_timeout=40.0, engine_timeout=15.0))
    with running(cfg, loop) as parts:
        yield cfg, parts


async def agrees(cfg, parts, version: int) -> None:
    """The engine samples with the trainer's weights, and says so."""
    groups = await parts.run_groups(list(enumerate(prompts("train")[:8])), 0, 1, 1.0, None, f"check-{version}-{time.monotonic_ns()}")
    batch = collate([r for g in groups for r in g.rollouts], AGGREGATIONS["token-mean"], 1.0)
    gap = (await parts.trainer.logprobs(batch) - batch.behaviour_logprobs)[batch.response_mask].abs()
    assert len(gap) >= 8 and gap.max() <= 1e-4 and set(batch.policy_versions[batch.response_mask].tolist()) == {version}


def core(parts) -> int:
    """The process that computes for engine 0."""
    return next(pid for pid in parts.processes[0] if "EngineCore" in psutil.Process(pid).name())


class Struck:
    """The trainer, whose next send is struck in its middle."""

    def __init__(self, trainer, after: float, pid: int, sign: int):
        self.trainer, self.after, self.pid, self.sign, self.strikes = trainer, after, pid, sign, 0

    def __getattr__(self, name: str):
        return getattr(self.trainer, name)

    async def send_weights(self) -> None:
        sending = asyncio.ensure_future(self.trainer.send_weights())
        if not self.strikes:
            await asyncio.sleep(self.after)
            assert not sending.done()
            os.kill(self.pid, self.sign)
            self.strikes += 1
        await sending


@pytest.mark.long
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_dies_or_stalls_in_the_middle_of_a_send_gets_the_version_in_a_new_group(cell, loop, sign):
    """The weights change, the send of version 1 begins and its engine is killed (or frozen: --publish-timeout decides) halfway through
    the seconds that a send takes. Every engine then serves version 1 with the trainer's weights, and rollouts that were in flight are complete."""
    cfg, parts = cell

    async def scenario():
        await parts.trainer.update(supervised_batch([([60, 61], [62, 63, 64])], AGGREGATIONS["token-mean"]), "sft")
        began = time.monotonic()
        await parts.publish(1)
        seconds, restarts = time.monotonic() - began, parts.restarts
        trainer = parts.trainer
        parts.trainer = Struck(trainer, seconds / 2, core(parts), sign)
        flying = asyncio.ensure_future(parts.run_groups(list(enumerate(prompts("train")[:200])), 0, 4, 1.0, None, f"flying-{sign}"))
        await asyncio.sleep(0.3)
        await trainer.update(supervised_batch([([60, 61], [62, 63, 65])], AGGREGATIONS["token-mean"]), "sft")
        await parts.publish(2)
        assert parts.trainer.strikes == 1 and parts.restarts == restarts + 1
        parts.trainer = trainer
        groups = await asyncio.wait_for(flying, 120)
        assert [len(g.rollouts) for g in groups] == [4] * 200
        await agrees(cfg, parts, 2)

    loop.run_until_complete(scenario())


@pytest.mark.long
def test_an_eval_goes_on_when_its_engine_dies(cell, loop):
    """Greedy answers of the same weights: the eval whose engine was killed under way reports what an undisturbed one does, prompts and all."""
    cfg, parts = cell
    held_out = prompts("eval")

    async def scenario():
        await parts.publish(3)
        undisturbed = await parts.guarded(evaluate(cfg, parts, held_out, 3), 3)
        disturbed = asyncio.ensure_future(parts.guarded(evaluate(cfg, parts, held_out, 3), 3))
        await asyncio.sleep(undisturbed["eval/seconds"] / 2)
        assert not disturbed.done()
        os.kill(core(parts), signal.SIGKILL)
        seen = await asyncio.wait_for(disturbed, 200)
        assert seen["eval/dropped"] == 0 and parts.restarts
        for name in ("eval/greedy", "eval/greedy_reward", "eval/prompts", "eval/version"):
            assert seen[name] == undisturbed[name]
        await agrees(cfg, parts, 3)

    loop.run_until_complete(scenario())
