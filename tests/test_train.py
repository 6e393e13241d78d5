"""Flags, plan and log by hand; the whole program as a user runs it: learning, killed and resumed, interrupted."""

import asyncio
import json
import math
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from rich.console import Console

from agent import Trajectory
from estimators import ESTIMATORS, EstimatorConfig
from generator import GeneratorConfig, Group, Pool, PromptStream
from losses import LossConfig
from recipes import arithmetic
from recipes.plot import phases
from train import PHASES, Clock, Config, Log, Parts, check_shared_memory, finished_checkpoints, from_dict, make_pool, make_trainer, parse, read_rows, resolve, waiting
from train import loop as train_loop
from trainer import TrainerConfig

from conftest import ROOT, TINY

SMALL = ["--steps", "6", "--prompts-per-step", "8", "--group-size", "4", "--eval-prompts", "40", "--eval-every", "0", "--eval-samples", "2", "--checkpoint-every", "3", "--warmup-steps", "2"]


def launch(cwd: Path, *flags: str) -> subprocess.Popen:
    """train.py in a directory of its own, in a process group of its own."""
    return subprocess.Popen([sys.executable, str(ROOT / "train.py"), *flags], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def finish(process: subprocess.Popen, seconds: float = 300) -> str:
    output, _ = process.communicate(timeout=seconds)
    return output


def leftovers(marker: str) -> list[str]:
    """Processes whose environment carries the marker: whatever a run started."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (directory / "environ").read_bytes():
                found.append((directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80])
        except OSError:
            continue
    return [line for line in found if line]


def assert_nothing_left(marker: str, seconds: float) -> None:
    """No process carries the marker any more, at the latest after `seconds`."""
    deadline = time.monotonic() + seconds
    while leftovers(marker) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert leftovers(marker) == []


def until_step(process: subprocess.Popen, run: Path, step: int, seconds: float = 240) -> None:
    """Returns when the run in that directory has written down `step`; fails if it ends before, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while max((row["step"] for row in read_rows(run / "metrics.jsonl")), default=-1) < step:
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def error_of(*flags: str, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), *flags], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


# ---------------------------------------------------------------------------------------------------- flags
@pytest.mark.parametrize("make, words", [
    (lambda: Config(generator=GeneratorConfig(group_size=1)), "--group-size 1"),
    (lambda: Config(estimator="reinforce_baseline", generator=GeneratorConfig(group_size=1)), "--group-size 1"),
    (lambda: Config(losses=LossConfig(loss="reinforce"), trainer=TrainerConfig(epochs=2)), "--epochs 2"),
    (lambda: Config(losses=LossConfig(loss="sft")), "--loss sft"),
    (lambda: Config(trainer=TrainerConfig(minibatches=64)), "--minibatches 64"),
    (lambda: Config(losses=LossConfig(kl_coef=0.1, kl_kind="k1")), "zero expected gradient"),
    (lambda: Config(estimation=EstimatorConfig(kl_reward_coef=0.1)), "--kl-reward-coef is not read by --estimator grpo"),
    (lambda: Config(estimation=EstimatorConfig(gamma=0.9)), "--gamma is not read by --estimator grpo, only by reinforce, gae"),
    (lambda: Config(estimator="on_policy_distill", estimation=EstimatorConfig(reward_clip=(0, 1)), trainer=TrainerConfig(ref="x")), "--reward-clip is not read"),
    (lambda: Config(estimator="on_policy_distill"), "name it with --ref"),
    (lambda: Config(trainer=TrainerConfig(ref="x")), "nothing reads a reference"),
    (lambda: Config(trainer=TrainerConfig(critic="x")), "--critic x: .*has no critic"),
    (lambda: Config(trainer=TrainerConfig(critic_learning_rate=1e-4)), "--critic-learning-rate 0.0001: .*has no critic"),
    (lambda: Config(losses=LossConfig(value_clip=0.5)), "--value-clip 0.5: .*has no critic"),
    (lambda: Config(losses=LossConfig(kl_target=0.1)), "--kl-target"),
    (lambda: Config(losses=LossConfig(kl_horizon=5)), "--kl-horizon 5"),
    (lambda: Config(losses=LossConfig(kl_kind="k2")), "--kl-kind k2"),
    (lambda: Config(losses=LossConfig(kl_kind="k1")), "--kl-kind k1"),
    (lambda: Config(losses=LossConfig(mismatch_level="off", mismatch_high=3.0), generator=GeneratorConfig(max_staleness=0)), "reads no other --mismatch flag"),
    (lambda: Config(losses=LossConfig(mismatch_low=0.1)), "--mismatch-low 0.1 is not read by --mismatch-mode trunc"),
    (lambda: Config(losses=LossConfig(mismatch_limit=0.1)), "--mismatch-limit is read by"),
    (lambda: Config(losses=LossConfig(mismatch_mode="mask", mismatch_gate="tv", mismatch_high=3.0)), "tv has --mismatch-limit"),
    (lambda: Config(estimation=EstimatorConfig(overlong_penalty=2.0)), "--overlong-penalty 2.0"),
    (lambda: Config(estimator="reinforce", estimation=EstimatorConfig(kl_reward_kind="k3")), "--kl-reward-kind k3"),
    (lambda: Config(generator=GeneratorConfig(dynamic_filter=(1, 0))), "--dynamic-filter"),
    (lambda: Config(estimator="reinforce", generator=GeneratorConfig(dynamic_filter=(0, 1), group_size=1)), "--dynamic-filter"),
    (lambda: Config(losses=LossConfig(mismatch_level="off")), "--max-staleness 1 trains on tokens of older weights"),
    (lambda: resolve(Config(model="no/such/model")), "no config.json there"),
    (lambda: resolve(Config(model="/nowhere")), "no config.json there"),
    (lambda: resolve(Config(losses=LossConfig(kl_coef=0.1), trainer=TrainerConfig(ref="no/such/model"))), "--ref no/such/model: no config.json there"),
    (lambda: resolve(Config(estimator="gae", trainer=TrainerConfig(critic="no/such/model"))), "--critic no/such/model: no config.json there"),
    (lambda: resolve(Config(model=str(TINY), generator=GeneratorConfig(tool_parser="hermes"))), "read a ChatAgent's answers"),
    (lambda: resolve(Config(model=str(TINY), device="cuda")), "no usable NVIDIA GPU"),
    (lambda: resolve(Config(model=str(TINY), device="cpu", generator=GeneratorConfig(context_length=4096))), "1024 positions"),
    (lambda: resolve(Config(model=str(TINY), device="cpu", generator=GeneratorConfig(engine_tp_size=2))), "--engine-tp-size 2"),
    (lambda: resolve(Config(model=str(TINY), device="cpu", generator=GeneratorConfig(routing_replay="on"))), "is no mixture of experts that reads text only"),
    (lambda: resolve(Config(model=str(TINY), device="cpu", trainer=TrainerConfig(trainers=2, cp_size=2))), "need GPUs"),
    (lambda: resolve(Config(model=str(TINY), device="cpu", trainer=TrainerConfig(trainers=8, tp_size=8))), "4 attention heads, which that does not divide"),
    (lambda: resolve(Config(model=str(TINY), device="cuda", dry_run=True, trainer=TrainerConfig(trainers=2, ep_size=2))), "that of --model has 0"),
    (lambda: resolve(Config(model=str(TINY), device="cuda", dry_run=True, generator=GeneratorConfig(engine_tp_size=16))), "need 17 GPUs"),
    (lambda: resolve(Config(model=str(TINY), device="cpu", generator=GeneratorConfig(engine_args='{"spec_method": "ngram", "spec_tokens": 3}'))), "not the policy's"),
    (lambda: Config(generator=GeneratorConfig(engine_args='{"kv_cache_dtype": "fp8"}'), losses=LossConfig(mismatch_level="off")), "--mismatch-level off leaves"),
])
def test_flags_that_cannot_work_are_refused_before_anything_starts(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_one_gpu_for_engine_and_trainer_is_refused_when_it_cannot_hold_both():
    """24 GB, 0.4 of them (9.6) the engine's: a trainer of 14 GB fits, one of 15 does not, nor either when 5 GB are taken; 10^9 parameters in bfloat16 and
    2 GB besides are 3.9 GB, so a share of 0.1 is too small for the engine."""
    check_shared_memory(24, 24, 0.4, 14, 10**9, cache=5)
    with pytest.raises(ValueError, match="--kv-cache-gb 7"):              # 1.9 of weights, 2 besides, 7: more than 0.4 x 24
        check_shared_memory(24, 24, 0.4, 14, 10**9, cache=7)
    with pytest.raises(ValueError, match="9.6 GB for the engine .* up to 15.0 GB for the trainer .* --tokens-per-microbatch"):
        check_shared_memory(24, 24, 0.4, 15, 10**9)
    with pytest.raises(ValueError, match="more than the 19.0 GB that are free"):
        check_shared_memory(24, 19, 0.4, 14, 10**9)
    with pytest.raises(ValueError, match="leaves the engine 2.4 GB .* Raise it to 0.16"):
        check_shared_memory(24, 24, 0.1, 14, 10**9)


def test_an_engine_takes_most_of_its_own_gpu_and_less_of_a_shared_one_unless_told():
    assert [GeneratorConfig().gpu_share(shared) for shared in (False, True)] == [0.85, 0.4]
    assert [GeneratorConfig(gpu_memory_utilization=0.3).gpu_share(shared) for shared in (False, True)] == [0.3, 0.3]
    with pytest.raises(ValueError, match="--gpu-memory-utilization 1.0"):
        GeneratorConfig(gpu_memory_utilization=1.0)


def test_routes_are_replayed_for_a_mixture_on_a_gpu_unless_told_otherwise(tmp_path, monkeypatch):
    """A CPU engine cannot tell its experts: `auto` leaves replay off there, `on` is refused. On two GPUs auto and on are on, off is off."""
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, max_position_embeddings=256).save_pretrained(tmp_path)

    def plan(device, model=str(tmp_path), **flags):
        return resolve(Config(model=model, device=device, generator=GeneratorConfig(**flags)))
    assert plan("cpu").shape.num_experts == 4 and not plan("cpu").replay and "each for itself" in dict(plan("cpu").rows(Config()))["routing"]
    with pytest.raises(ValueError, match="CPU engine does not tell"):
        plan("cpu", routing_replay="on")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [plan("cuda", routing_replay=value).replay for value in ("auto", "on", "off")] == [True, True, False]
    assert not plan("cuda", model=str(TINY)).replay and "routing" not in dict(plan("cuda", model=str(TINY)).rows(Config()))


def test_a_users_mistake_is_one_message_with_the_way_out_and_exit_code_2(tmp_path):
    assert "--estimator" in error_of("--estimator", "gpro")
    assert "no such file" in error_of("--agent", "nowhere.py")
    assert "no run to go on with" in error_of("--resume", cwd=tmp_path)
    assert "leaves it nothing" in error_of("--group-size", "1")


def test_a_second_run_of_the_same_name_is_refused_and_a_finished_one_is_not_resumed(tmp_path):
    """Two runs in one directory would mix their metrics and checkpoints."""
    run = tmp_path / "runs" / "old"
    (run / "checkpoints" / "000130").mkdir(parents=True)
    (run / "checkpoints" / "000130" / "run.json").write_text("{}")
    (run / "metrics.jsonl").write_text('{"step": 0}\n')
    (run / "config.json").write_text(json.dumps(asdict(Config())))
    assert "already holds a run" in error_of("--name", "old", cwd=tmp_path)
    assert "it is finished" in error_of("--resume", cwd=tmp_path)


def test_a_line_cut_short_by_a_kill_is_left_out_of_the_metrics(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"st')
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 0}, {"step": 1}]


def test_a_plan_for_700_billion_parameters_at_expert_parallel_256_needs_a_config_json_only(tmp_path):
    """DeepSeek-V3's shape on 256 ranks and 32 engines of 8 GPUs: 16 x 671e9 / 256 bytes of states a rank, 2 x 671e9 / 8 of weights on an engine's GPU, 512 GPUs on 64 nodes; the flags that cannot be are refused."""
    from transformers import DeepseekV3Config

    DeepseekV3Config().save_pretrained(tmp_path)
    flags = dict(model=str(tmp_path), device="cuda", dry_run=True, generator=GeneratorConfig(engines=32, engine_tp_size=8))
    cfg = Config(**flags, trainer=TrainerConfig(trainers=256, ep_size=256, activation_checkpointing=True, tokens_per_microbatch=4096))
    plan = resolve(cfg)
    rows = dict(plan.rows(cfg))
    assert plan.nodes == (8,) * 64 and "512 GPUs" in rows["nodes"] and "engines on 32 of them" in rows["nodes"] and "expert parallel 256" in rows["trainers"]
    assert plan.rank_gb["states"] == pytest.approx(16 * 671.026e9 / 256 / 2**30, rel=1e-4) and "weights 156.236 GB" in rows["engines"]
    for wrong, words in ((dict(trainers=96, ep_size=96), "divides them"), (dict(trainers=2, tp_size=2), "split with --ep-size")):
        with pytest.raises(ValueError, match=words):
            resolve(Config(**flags, trainer=TrainerConfig(**wrong)))


def test_the_dry_run_prints_the_resolved_plan_and_starts_nothing(tmp_path):
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), "--dry-run", "--device", "cpu"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "0.84 M parameters" in done.stdout and "gloo" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_config_survives_its_file():
    cfg = Config(estimator="rloo", generator=GeneratorConfig(max_new_tokens=None, dynamic_filter=(0.0, 1.0)), estimation=EstimatorConfig(reward_clip=(-1.0, 1.0)), trainer=TrainerConfig(learning_rate=1e-5))
    assert from_dict(Config, json.loads(json.dumps(asdict(cfg)))) == cfg


def test_a_half_written_checkpoint_is_not_finished(tmp_path):
    """b20: only a directory under its final name, with run.json in it, counts."""
    (tmp_path / "checkpoints" / "000003.unfinished").mkdir(parents=True)
    (tmp_path / "checkpoints" / "000003.unfinished" / "run.json").write_text("{}")
    (tmp_path / "checkpoints" / "000002").mkdir()
    assert finished_checkpoints(tmp_path) == []
    (tmp_path / "checkpoints" / "000002" / "run.json").write_text("{}")
    assert [p.name for p in finished_checkpoints(tmp_path)] == ["000002"]


def test_a_reference_of_another_vocabulary_is_refused(tmp_path):
    """Its logprobs of the same ids would be about other words."""
    (tmp_path / "config.json").write_text((TINY / "config.json").read_text().replace('"vocab_size": 262', '"vocab_size": 999'))
    with pytest.raises(ValueError, match="vocabulary of 999"):
        resolve(Config(model=str(TINY), device="cpu", losses=LossConfig(kl_coef=0.1), trainer=TrainerConfig(ref=str(tmp_path))))


# ---------------------------------------------------------------------------------------------------- waiting
def test_a_wait_names_what_it_waits_for_and_ends_at_its_deadline(capsys):
    """Patience 0.1 s, deadline 0.35 s: said at 0.1, 0.2 and 0.3 s, then TimeoutError with the same words; a shorter wait says nothing."""
    async def what():
        return "the moon"

    async def scenario():
        async with waiting(what, deadline=5, patience=5):
            await asyncio.sleep(0.01)
        async with waiting(what, deadline=0.35, patience=0.1):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError, match="waited 0 s for the moon"):
        asyncio.run(scenario())
    assert capsys.readouterr().out.count("for the moon") == 3


def test_a_timeout_from_inside_a_wait_keeps_its_own_words():
    async def scenario():
        async with waiting("the moon", deadline=5):
            raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match="^of its own$"):
        asyncio.run(scenario())


# ---------------------------------------------------------------------------------------------------- where the time goes
def assert_phases_add_up(row: dict) -> None:
    assert phases(row) == list(PHASES)                     # no other field has such a name: the picture would count it
    assert min(row[f"{phase}_seconds"] for phase in PHASES) >= 0
    assert sum(row[f"{phase}_seconds"] for phase in PHASES) == pytest.approx(row["step_seconds"], abs=1e-6)


class Scripted(selectors.DefaultSelector):
    """Of an event loop whose time is `now`: it passes only where somebody sleeps, and at once."""

    now = 0.0

    def select(self, timeout=None):
        self.now += timeout or 0
        return super().select(0)


@pytest.fixture
def scripted(monkeypatch):
    """(run, busy): asyncio.run in scripted time, and a function that keeps the event loop busy for so many seconds of it."""
    selector = Scripted()
    monkeypatch.setattr(time, "monotonic", lambda: selector.now)
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        yield runner.run, lambda seconds: setattr(selector, "now", selector.now + seconds)


def test_a_clock_books_each_second_to_its_phase_the_others_to_rest_and_those_of_an_eval_to_none(scripted):
    """1 and 2 s of update, 3 of an eval, 1 between: a step of 4 s, 1 of it rest; the next one begins at nothing."""
    run, busy = scripted

    async def scenario():
        clock = Clock(5)
        async with clock("update", "it"):
            await asyncio.sleep(1)
        with clock.timing("eval"):
            busy(3)
        busy(1)
        async with clock("update", "it"):
            busy(2)
        return clock.take(), clock.take()

    first, second = run(scenario())
    assert first == pytest.approx(dict.fromkeys(first, 0) | {"update_seconds": 3, "rest_seconds": 1, "step_seconds": 4})
    assert second == dict.fromkeys(first, 0)


def test_the_loop_books_what_a_step_waits_for_where_it_waits(scripted, tmp_path):
    """In seconds, two groups a step. Group 0 takes 2, group 1 takes 1: of 2 to generate, 1 is the wait for the head of the line. Logprobs take 1, the update 2, so
    groups 2 and 3, which take 6, are awaited 1 before the publish, which takes 1. Eval, checkpoint and pictures, 3 each, are in no step; release takes 1: rest of the step after it."""
    (run, busy), takes = scripted, [2, 1, 6, 6]

    def rollouts(n: int) -> Group:
        made = [Trajectory(rollout=2 * n + i, group=n, reward=float(i)) for i in (0, 1)]
        for trajectory in made:
            trajectory.extend([5])
            trajectory.extend([6], [-1.0], [0])
        return Group(n, {}, rollouts=[[trajectory] for trajectory in made])

    async def run_group(n: int, prompt: dict) -> Group:
        await asyncio.sleep(takes.pop(0))
        return rollouts(n)

    class SlowPool(Pool):
        def release(self, *args):
            busy(1)
            super().release(*args)

    class SlowLog(Log):
        def plot(self):
            busy(3)

    class Trainer:
        async def logprobs(self, batch):
            await asyncio.sleep(1)
            return batch.behaviour_logprobs

        async def update(self, batch, loss):
            await asyncio.sleep(2)
            return dict.fromkeys(("mismatch_weight", "mismatch_weight_squared", "mismatch_cut_frac", "mismatch_kl", "grad_norm"), 0.0)

        async def save(self, path, extra, pool):
            await asyncio.sleep(3)

        async def export(self, path):
            path.mkdir(exist_ok=True)

    class Everything(Parts):
        async def run_groups(self, prompts, *_):
            await asyncio.sleep(3)
            return [rollouts(n) for n, _ in prompts]

        async def publish(self, version):
            await asyncio.sleep(1)

    async def scenario():
        cfg = Config(steps=2, eval_every=1, eval_samples=0, checkpoint_every=1, save_rollouts=False, generator=GeneratorConfig(prompts_per_step=2, group_size=2), trainer=TrainerConfig(epochs=2))
        pool = SlowPool(PromptStream([{"prompt": str(n)} for n in range(4)], 0), run_group, 2, max_staleness=1, wanted=4)
        log = SlowLog(cfg, tmp_path, 0)
        busy(1)                                            # before the loop: no part of it
        await train_loop(cfg, Everything(Trainer(), [None], [None], None, cfg.generator), pool, [{"prompt": "0"}], log, 0, 1.0)
        return log.rows

    rows = run(scenario())
    expected = [dict(generate=1, wait=2, samples=0, logprobs=1, update=2, publish=1, rest=0, step=7), dict(generate=0, wait=0, samples=0, logprobs=1, update=2, publish=1, rest=1, step=5)]
    for row, seconds in zip(rows, expected, strict=True):
        assert_phases_add_up(row)
        assert {phase: row[f"{phase}_seconds"] for phase in seconds} == pytest.approx(seconds)


def test_rows_of_an_older_run_lack_phases_and_the_terminal_shows_them_all_the_same(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.25, "train_seconds": 1.0}) + "\n")
    console = Console(width=140)
    with console.capture() as shown:
        console.print(Log(Config(), tmp_path, 1).table())
    assert re.search(r"1│ 0.250│ .*nan", shown.get()), shown.get()


def test_pi_old_has_a_forward_of_its_own_where_something_reads_it_before_or_after_the_first_optimizer_step():
    for cfg, first in ((Config(), False), (Config(estimator="gae"), False), (Config(losses=LossConfig(kl_coef=0.1)), False), (Config(trainer=TrainerConfig(epochs=2)), True), (Config(trainer=TrainerConfig(minibatches=2)), True),
                       (Config(estimator="on_policy_distill", trainer=TrainerConfig(ref="x")), True), (Config(estimator="reinforce", estimation=EstimatorConfig(kl_reward_coef=0.1)), True)):
        assert cfg.old_first == first, cfg


# ---------------------------------------------------------------------------------------------------- what breaks
def test_a_group_whose_worker_dies_while_an_engine_is_broken_holds_up_no_drain():
    """The worker dies first; when it is back an engine is broken, which only the publish behind the drain mends: the group counts as one that waits for an engine."""
    class Worker:
        def __init__(self):
            self.run_groups, self.whereabouts = SimpleNamespace(remote=self.dies), SimpleNamespace(remote=self.answers)

        async def dies(self, *_):
            raise ray.exceptions.ActorDiedError()

        async def answers(self, _):
            parts.broken.set()

    async def scenario():
        global parts
        parts = Parts(None, [None], [Worker()], None, GeneratorConfig())
        running = asyncio.ensure_future(parts.run_groups([(7, {"prompt": "x"})], 7, 1, 1.0, None, "train"))
        await asyncio.sleep(0.05)
        running.cancel()
        return parts.stalled

    assert asyncio.run(scenario()) == {7}


def test_rollouts_that_cannot_be_written_end_the_run_at_the_next_step_or_checkpoint(tmp_path, monkeypatch):
    """They are written beside the next step, so it is that step, or the checkpoint before it, that learns of a full disk."""
    def full(*_):
        raise OSError(28, "No space left on device")

    async def scenario(then):
        log = Log(Config(), tmp_path, 0)
        await log.save([], SimpleNamespace(version=0))
        with pytest.raises(OSError, match="No space left"):
            await then(log)

    monkeypatch.setattr("train.save_rollouts", full)
    asyncio.run(scenario(lambda log: log.save([], SimpleNamespace(version=1))))
    asyncio.run(scenario(lambda log: log.checkpoint(1, None, None, 1.0)))


# ---------------------------------------------------------------------------------------------------- README
README = (ROOT / "README.md").read_text()
PRESETS = {name: flags.split() for name, flags in re.findall(r"^\| ([^|`]+?) \| `(--estimator [^`]+)` \|$", README, re.M)}


def test_every_method_of_the_readme_is_a_line_of_flags_that_is_accepted():
    assert len(PRESETS) >= 13 and {flags[1] for flags in PRESETS.values()} == set(ESTIMATORS) - {"reinforce_baseline"}
    for flags in PRESETS.values():
        parse(flags)


def test_the_estimator_of_the_readme_is_one_function_and_one_row(tmp_path):
    """Pasted at the end of estimators.py, --help offers it and it does what it says: rewards 0, 0, 3 have the median 0."""
    code = re.search(r"```python\n(def median_baseline.*?)```", README, re.S).group(1)
    for file in ROOT.glob("*.py"):
        (tmp_path / file.name).write_text(file.read_text())
    with (tmp_path / "estimators.py").open("a") as file:
        file.write("\n\n" + code)
    script = ("from agent import Trajectory; from estimators import *; from losses import token_mean\nrows = []\n"
              "for i, reward in enumerate([0.0, 0.0, 3.0]):\n    t = Trajectory(i, 0, reward=reward); t.extend([5]); t.extend([6], [-1.0], [0]); rows.append([t])\n"
              "print(ESTIMATORS['median_baseline'](collate(rows, token_mean), EstimatorConfig())[:, 1].tolist())")
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[0.0, 0.0, 3.0]", done.stderr
    done = subprocess.run([sys.executable, "train.py", "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "median_baseline" in done.stdout


# ---------------------------------------------------------------------------------------------------- the program
def two_steps(loop, stack, directory: Path, flags: list[str]) -> list[dict]:
    """Metrics of two steps through the loop, on the engine that all tests share and a trainer of its own."""
    cfg, _ = parse([*flags, "--steps", "2", "--eval-prompts", "20", "--eval-samples", "0", "--checkpoint-every", "0", "--device", "cpu"])
    plan, shared = resolve(cfg), stack[1]

    async def train():
        parts = Parts(make_trainer(cfg, plan), shared.engines, shared.workers, plan, cfg.generator)
        await parts.trainer.start()
        await parts.trainer.open_transfer(plan.transfer, parts.engines, 1)
        await parts.publish(0)
        log, pool = Log(cfg, directory, 0), make_pool(cfg, parts, arithmetic.prompts("train"), 0)
        await train_loop(cfg, parts, pool, arithmetic.prompts("eval"), log, 0, 1.0)
        log.close()
        for rank in parts.trainer.ranks:
            ray.kill(rank)
        await shared.trainer.open_transfer(plan.transfer, shared.engines, 1)      # the engine belongs to the shared trainer again
        await shared.publish(0)

    loop.run_until_complete(train())
    rows = metrics(directory)
    assert [row["version"] for row in rows] == [1, 2] and "eval/greedy" in rows[-1]
    for row in rows:
        assert_phases_add_up(row)
    return rows


def test_tensor_parallel_ranks_and_an_offloaded_one_train_and_publish(stack, loop, tmp_path):
    """Each publish passes coverage, and what the engine samples under it has the trainer's logprobs to 1e-4."""
    for name, flags in (("tp", ["--trainers", "2", "--tp-size", "2"]), ("offload", ["--offload-optimizer"])):
        (tmp_path / name).mkdir()
        rows = two_steps(loop, stack, tmp_path / name, [*flags, "--max-staleness", "0", "--prompts-per-step", "8"])
        assert all(0 < row["grad_norm"] and row["logprob_gap_max"] <= 1e-4 for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("method", sorted(PRESETS))
def test_every_method_of_the_readme_trains(stack, loop, tmp_path, method):
    """Two steps of each line: finite metrics, an update that is not empty, the metrics that belong to its parts."""
    rows = two_steps(loop, stack, tmp_path, PRESETS[method])
    for row in rows:
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float)), row
        assert (row["grad_norm"] > 0 or "--ref" in PRESETS[method]) and row["mismatch_cut_frac"] < 0.5      # a policy that is its own teacher has nothing to learn
        assert ("ref_kl" in row) == any(flag in PRESETS[method] for flag in ("--kl-coef", "--kl-reward-coef", "--ref"))
        assert ("explained_variance" in row) == ("gae" in PRESETS[method])
        assert ("dropped/filtered" in row) == ("--dynamic-filter" in PRESETS[method])


@pytest.mark.long
def test_a_run_killed_and_resumed_is_the_unbroken_run(tmp_path):
    """Six steps at once, and the same with a kill -9 after step 4 and --resume from the checkpoint of step 3: from step 4 on
    the same prompts, the same tokens, the same logprobs and metrics to 1e-4, though step 4 trains rollouts that were
    sampled before the checkpoint; no process is left by the kill."""
    whole = launch(tmp_path, *SMALL, "--name", "whole")
    output = finish(whole)
    assert whole.returncode == 0, output
    marker = f"nanomolt-test-{os.getpid()}"
    broken = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *SMALL, "--name", "broken"], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=os.environ | {"MARKER": marker})
    run = tmp_path / "runs" / "broken"
    until_step(broken, run, 4)
    broken.kill()
    broken.wait()
    assert_nothing_left(marker, 120)
    assert [p.name for p in finished_checkpoints(run)] == ["000003"]
    resumed = launch(tmp_path, "--resume", "--name", "broken")
    output = finish(resumed)
    assert resumed.returncode == 0, output
    assert [r["step"] for r in metrics(run)] == list(range(7))
    for step in (4, 5, 6):
        a, b = (np.load(tmp_path / "runs" / name / "rollouts" / f"{step:06d}.npz") for name in ("whole", "broken"))
        for field in ("token_ids", "response_mask", "policy_versions", "rollout", "group", "reward", "offsets"):
            assert np.array_equal(a[field], b[field]), (step, field)
        np.testing.assert_allclose(a["behaviour_logprobs"], b["behaviour_logprobs"], atol=1e-4)
    steps = {r["step"]: r for r in metrics(tmp_path / "runs" / "whole") if "reward" in r}
    again = {r["step"]: r for r in metrics(run) if "reward" in r}
    for step in (4, 5, 6):
        for name in ("reward", "grad_norm", "learning_rate", "loss", "response_tokens", "version"):
            assert again[step][name] == pytest.approx(steps[step][name], abs=1e-4, rel=1e-3), (step, name)


@pytest.mark.long
def test_the_default_run_learns_and_leaves_what_it_promises(tmp_path):
    """The quick start's own flags: held-out greedy accuracy starts between 0.50 and 0.65 and rises by 15 points; every
    file is there; vLLM's and transformers' layout is exported; metrics carry versions and stay within the consistency band."""
    run = launch(tmp_path, "--estimator", "grpo", "--name", "quick", "--seed", "7")
    output = finish(run, 580)
    assert run.returncode == 0, output
    directory = tmp_path / "runs" / "quick"
    rows = metrics(directory)
    evals = [r for r in rows if "eval/greedy" in r]
    assert 0.50 <= evals[0]["eval/greedy"] <= 0.65 and evals[-1]["eval/greedy"] >= evals[0]["eval/greedy"] + 0.15
    assert [r["eval/version"] for r in evals] == [0, 65, 130]
    steps = [r for r in rows if "reward" in r]
    assert [r["version"] for r in steps] == list(range(1, 131))
    for name in ("staleness_mean", "staleness_max", "mismatch_kl", "pass_rate", "grad_norm", "tokens_per_second", "step_seconds", *(f"{phase}_seconds" for phase in PHASES)):
        assert all(name in r for r in steps), name
    assert max(r["eval/logprob_gap_max"] for r in evals) <= 1e-4
    assert steps[0]["staleness_max"] == 0 and {r["staleness_max"] for r in steps[1:]} == {1} and all(r["ess_frac"] > 0.9 for r in steps)
    assert all(sum(r.get(f"age{age}/tokens", 0) for age in (0, 1)) == r["response_tokens"] for r in steps)
    best = max(evals, key=lambda r: r["eval/greedy"])
    assert json.loads((directory / "best/eval.json").read_text())["eval/version"] == best["eval/version"]
    for name in ("config.json", "reward.png", "staleness.png", "time.png", "time.txt", "tensorboard", "best/model.safetensors", "rollouts/000130.npz", "checkpoints/000130/run.json", "hf/model.safetensors", "hf/tokenizer.json"):
        assert (directory / name).exists(), name
    assert "WARNING" not in output and "Traceback" not in output and len(output.splitlines()) < 80, output


@pytest.mark.long
def test_a_critic_learns_along_and_the_policy_by_it(tmp_path):
    """gae, 80 steps: the critic explains more of the returns than at first, and held-out greedy accuracy rises by 8 points."""
    run = launch(tmp_path, "--estimator", "gae", "--gae-lambda", "0.95", "--steps", "80", "--eval-every", "0", "--eval-samples", "0", "--name", "run")
    output = finish(run, 580)
    assert run.returncode == 0, output
    rows = metrics(tmp_path / "runs" / "run")
    explained = [r["explained_variance"] for r in rows if "reward" in r]
    assert sum(explained[:5]) / 5 < 0 and sum(explained[-10:]) / 10 > max(0.02, sum(explained[:5]) / 5 + 0.1)
    assert rows[-1]["eval/greedy"] >= rows[0]["eval/greedy"] + 0.08


@pytest.mark.long
def test_a_student_approaches_its_teacher_without_a_reward(tmp_path):
    """recipes/distill.py from nothing: reverse KL to the teacher falls by half at least, held-out greedy accuracy rises by 10 points."""
    done = subprocess.run([sys.executable, str(ROOT / "recipes/distill.py"), "--student", str(tmp_path / "student"), "--", "--name", "run", "--eval-every", "0", "--eval-samples", "0"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(tmp_path / "runs" / "run")
    kl = [r["ref_kl"] for r in rows if "ref_kl" in r]
    assert sum(kl[-10:]) <= sum(kl[:10]) / 2
    assert rows[-1]["eval/greedy"] >= rows[0]["eval/greedy"] + 0.10


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_says_so_and_leaves_no_process(tmp_path, how):
    marker = f"nanomolt-{how.name}-{os.getpid()}"
    run = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *SMALL, "--steps", "500", "--name", "cut"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"MARKER": marker})
    until_step(run, tmp_path / "runs/cut", 2)
    run.send_signal(how)
    output = finish(run, 60)
    assert run.returncode == 130 and ("with --resume" in output) == bool(finished_checkpoints(tmp_path / "runs" / "cut")), output
    assert_nothing_left(marker, 120)


@pytest.mark.long
def test_a_run_on_two_ray_nodes_uses_both(tmp_path):
    """Two Ray nodes on this machine, two engines, two trainer ranks: one of each on either node. Seeds decide the tokens of version 0, so
    the first eval and the first step's reward are those of a private run with one engine and one rank."""
    with socket.socket() as s:
        s.bind(("", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    marker = f"nanomolt-nodes-{os.getpid()}"
    environment = os.environ | {"MARKER": marker, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    common = ["--num-cpus", "1", "--object-store-memory", "200000000", "--disable-usage-stats", "--block"]
    ray_command = str(Path(sys.executable).parent / "ray")
    nodes = [subprocess.Popen([ray_command, "start", "--head", "--port", address.split(":")[1], "--include-dashboard=false", *common], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)]
    time.sleep(10)
    nodes.append(subprocess.Popen([ray_command, "start", "--address", address, *common], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    time.sleep(10)
    try:
        run = [sys.executable, str(ROOT / "train.py"), *SMALL, "--steps", "3", "--engines", "2", "--trainers", "2"]
        over = subprocess.run([*run, "--ray-address", address, "--name", "two"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    finally:
        for node in nodes:
            node.terminate()
    assert over.returncode == 0, over.stdout + over.stderr
    placed = [set(re.findall(r"(?:engine|trainer rank) \d", part)) for part in re.search(r"^node .*$", over.stdout, re.M).group().split(";")]
    assert sorted(placed, key=sorted) == [{"engine 0", "trainer rank 0"}, {"engine 1", "trainer rank 1"}]
    assert_nothing_left(marker, 30)
    alone = subprocess.run([sys.executable, str(ROOT / "train.py"), *SMALL, "--steps", "3", "--name", "one"], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    two, one = (metrics(tmp_path / "runs" / name) for name in ("two", "one"))
    assert [row["version"] for row in two] == [row["version"] for row in one] == [0, 1, 2, 3]
    assert two[1]["reward"] == one[1]["reward"] and two[0]["eval/greedy"] == one[0]["eval/greedy"]


def test_best_is_replaced_only_by_a_better_eval_also_of_a_run_that_lost_rows(tmp_path):
    """Evals 0.5, 0.7, then, in a resumed run whose rows end before the second, 0.6 and 0.8: exports after the first, second and fourth."""
    exported = []

    class Exporter:
        async def export(self, path):
            path.mkdir(exist_ok=True)
            exported.append(path)

    for greedy, kept in ((0.5, 0.5), (0.7, 0.7), (0.6, 0.7), (0.8, 0.8)):
        log = Log(Config(), tmp_path, 0)                   # no rows
        asyncio.run(log.keep_best({"eval/greedy": greedy, "step": 1}, Exporter()))
        assert json.loads((tmp_path / "best/eval.json").read_text()) == {"eval/greedy": kept}
    assert len(exported) == 3
