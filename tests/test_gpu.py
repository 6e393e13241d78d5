"""What only GPUs can show: nccl and ipc transfers, AutoModel's own classes, bfloat16, and learning on one GPU.

    python -m pytest -m gpu tests                   everything that the machine's GPUs allow; numbers go to runs/gpu.json
    python -m pytest tests/test_gpu.py --rehearse   the same programs on a CPU: tiny models, gloo, float32

Each check is a program of its own (this file's `main`), so that it sees just the GPUs it is meant to see, and one that
hangs or dies ends alone. It prints its numbers as its last line of JSON; the test states the claim. The programs of all
selected tests run side by side, whatever the order of the tests, and leave what they print beside the numbers.
"""

import asyncio
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent
TINY = ROOT / "recipes" / "tiny"
MEAN, MOST = 0.015, 0.15               # band of |trainer - engine| logprob in bfloat16, nats: mean over a version's tokens, and any token
EXACT = 1e-4                           # the same in float32, any token


# ---------------------------------------------------------------------------------------------------- running the checks
@dataclass(frozen=True)
class Check:
    """A program of this file and what it may use."""

    name: str                          # of a function below
    kind: str = "tiny"                 # of model
    gpus: int = 1
    seconds: float = 300               # from its start; the longest start first
    gb: float = 30                     # memory of each of its GPUs; with an engine on the one GPU what `resolve` wants free, GB
    cpu: bool = True                   # it can be rehearsed

    def __str__(self) -> str:
        return f"{self.name}-{self.kind}-{self.gpus}"


def needs(*checks: Check):
    """The test runs once for each of the checks; its `seen` are the numbers."""
    return pytest.mark.parametrize("seen", checks, ids=str, indirect=True)


AT_ONCE = 7                            # programs on a GPU, with 16 cores to each GPU


class Programs:
    """Runs checks side by side: the longest first, each on the GPUs that have most room, with a Ray and a time limit of its own.

    `ends[check]` is a future of its numbers. All numbers go to the report as they come, with the seconds at which each program began and ended; what is printed goes to a file for each check.
    """

    def __init__(self, checks: list[Check], report: Path, models: dict[str, Path], gpus: int, gb: float):
        self.report, self.models, self.device, self.numbers, self.running = report, models, "cuda" if gpus else "cpu", {}, set()
        self.began, self.spans = time.monotonic(), {}      # seconds from here at which each program began and ended
        self.gb, self.room, self.freed, self.stopping = gb, {gpu: gb for gpu in range(gpus)}, threading.Condition(), False
        self.logs = report.with_suffix("")
        self.logs.mkdir(parents=True, exist_ok=True)
        self.pool = ThreadPoolExecutor(AT_ONCE * gpus or 1)
        kinds = {check.kind for check in checks if not models[check.kind].exists()}
        self.made = {kind: self.pool.submit(self.run, Check("make", kind, seconds=150, gb=8)) for kind in sorted(kinds)}
        self.ends = {check: self.pool.submit(self.check, check) for check in sorted(checks, key=lambda check: -check.seconds)}

    def check(self, check: Check) -> dict:
        if check.kind in self.made:
            self.made[check.kind].result()
        try:
            seen = json.loads([line for line in self.run(check).splitlines() if line.startswith("{")][-1])     # libraries may have a last word
        except Exception as error:
            seen = {"error": str(error)}
            raise
        finally:
            with self.freed:
                self.numbers[str(check)] = seen
                self.report.write_text(json.dumps(self.numbers | {"seconds": self.spans}, indent=1))
        return seen

    def run(self, check: Check) -> str:
        """What the check's program printed. Raises RuntimeError with the end of it when it fails or takes too long; then all it started is killed."""
        log, own = self.logs / f"{check}.log", tempfile.mkdtemp(prefix="ray")          # short: Ray's sockets lie there
        command = [sys.executable, __file__, check.name, str(self.models[check.kind]), self.device]
        with self.places(check) as gpus, log.open("w") as file:
            began, environment = time.monotonic(), {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "HF_HUB_OFFLINE": "1", "RAY_TMPDIR": own, "RAY_prestart_worker_first_driver": "0"}
            process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            self.running.add(process)
            try:
                end = f"ended with {process.wait(check.seconds)}"
            except subprocess.TimeoutExpired:
                end = "was killed"
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            self.running.remove(process)
            self.spans[str(check)] = round(began - self.began), round(time.monotonic() - self.began)
        output = log.read_text()
        if process.returncode:
            actors = [text for file in sorted(Path(own).glob("ray/session_latest/logs/worker*.err")) if "Error" in (text := file.read_text(errors="replace"))]
            raise RuntimeError(f"{' '.join(command)} {end} after {time.monotonic() - began:.0f} s.\n{output[-4000:]}" + "".join(f"\n--- an actor of it:\n{text[-2000:]}" for text in actors))
        shutil.rmtree(own, ignore_errors=True)
        return output

    @contextmanager
    def places(self, check: Check):
        """The GPUs for a check, as CUDA_VISIBLE_DEVICES names them, once each has room for it; one that wants more than a GPU has gets it alone."""
        names, gb = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, self.room))).split(","), min(check.gb, self.gb)
        with self.freed:
            self.freed.wait_for(lambda: self.stopping or sum(room >= gb for room in self.room.values()) >= check.gpus * bool(self.room))
            if self.stopping:
                raise RuntimeError(f"{check} was not started: the tests have ended")
            mine = sorted(self.room, key=lambda gpu: -self.room[gpu])[: check.gpus]
            for gpu in mine:
                self.room[gpu] -= gb
        try:
            yield [names[gpu] for gpu in mine]
        finally:
            with self.freed:
                for gpu in mine:
                    self.room[gpu] += gb
                self.freed.notify_all()

    def stop(self) -> None:
        """Kill what runs, start nothing more."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        with self.freed:
            self.stopping = True
            self.freed.notify_all()
        for process in list(self.running):
            with suppress(ProcessLookupError):             # it may just have ended
                os.killpg(process.pid, signal.SIGKILL)


def lacking(check: Check, config) -> str:
    """What this machine has not that the check needs; "" = nothing."""
    if check.kind == "smollm2" and not Path(config.getoption("--smollm2")).is_dir():
        return f"no model at {config.getoption('--smollm2')}: python recipes/smollm2.py --prepare-only"
    if config.getoption("--rehearse"):
        return "" if check.cpu else "not on a CPU"
    if torch.cuda.device_count() < check.gpus:
        return f"needs {check.gpus} GPUs, here are {torch.cuda.device_count()}"
    return ""


@pytest.fixture(scope="session")
def programs(request, tmp_path_factory):
    """All programs of the selected tests that this machine can run, on their way."""
    from train import gpu_memory

    config, made = request.config, tmp_path_factory.mktemp("models")
    wanted = [item.callspec.params["seen"] for item in request.session.items if "seen" in item.fixturenames]
    checks = [check for check in dict.fromkeys(wanted) if not lacking(check, config)]
    models = {check.kind: made / check.kind for check in checks} | {"tiny": TINY, "smollm2": Path(config.getoption("--smollm2"))}
    gpus = 0 if config.getoption("--rehearse") else torch.cuda.device_count()
    programs = Programs(checks, Path(config.getoption("--gpu-report")), models, gpus, 0.93 * gpu_memory()[0] if gpus else 0)
    yield programs
    programs.stop()


@pytest.fixture
def seen(request, programs) -> dict:
    """The numbers of the test's check."""
    if lack := lacking(request.param, request.config):
        pytest.skip(lack)
    try:
        return programs.ends[request.param].result()
    except RuntimeError as error:
        pytest.fail(str(error), pytrace=False)


# ---------------------------------------------------------------------------------------------------- the claims
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(3600)]               # a test waits for a program, which has a limit of its own


@needs(Check("publishes", "tied", 2, 460, 20), Check("publishes", "dense", 2, 450, 20), Check("publishes", "experts", 2, 480, 28), Check("publishes", "corrected", 2, 470, 20),
       Check("publishes", "tied", 1, 450, 31), Check("publishes", "dense", 1, 450, 31), Check("publishes", "experts", 1, 520, 37))
def test_every_token_has_the_logprob_of_the_version_it_carries_over_20_publishes_in_flight(seen, rehearse):
    """64 answers in flight all the time, an update of all weights and a publish, 20 times; two GPUs: nccl, one: ipc.

    What ends under version v is scored by the trainer while it holds v: tokens labelled v are in the band (coverage is
    checked by each publish), older ones of the same answers are further off; the band is as wide at the end as at the start.
    With routers' corrections, each publish brings others, which change most choices of experts.
    """
    assert seen["transfer"] == ("gloo" if rehearse else "nccl" if seen["gpus"] == 2 else "ipc") and (rehearse or len({seen["engine_gpu"], seen["trainer_gpu"]}) == seen["gpus"])
    assert len(seen["gap_mean"]) == 21 and min(seen["tokens"]) >= 100 and seen["straddling"] >= 40
    mean, most = (EXACT, EXACT) if rehearse else (MEAN, MOST)
    assert max(seen["gap_mean"]) <= mean and max(seen["gap_max"]) <= most
    assert np.median(seen["older_mean"]) > 3 * max(seen["gap_mean"])
    assert np.mean(seen["gap_mean"][-5:]) <= 1.5 * np.mean(seen["gap_mean"][:5]) + 1e-6


@needs(Check("speculation", "repeats", 1, 440, 31, cpu=False))                # refused on a CPU: vLLM's sampler of drafts is wrong there
def test_speculation_and_prefix_caching_leave_labels_and_logprobs_as_they_are_over_20_publishes_in_flight(seen):
    """The same with drafts from the text (n-gram, 3 tokens), by a model that repeats every other token: many drafts are accepted, and tokens are in the band of their version."""
    assert len(seen["gap_mean"]) == 21 and min(seen["tokens"]) >= 100 and seen["straddling"] >= 40
    assert seen["accepted"] > 0.2 * seen["drafted"] and seen["accepted"] > 0.05 * seen["sampled"]
    assert max(seen["gap_mean"]) <= MEAN and max(seen["gap_max"]) <= MOST
    assert np.median(seen["older_mean"]) > 2 * np.median(seen["gap_mean"])      # it learns slowly, so as to go on repeating


@needs(Check("sizes", "tied", 2, 370, 28), Check("sizes", "dense", 2, 360, 32), Check("sizes", "experts", 2, 380, 36))
def test_every_size_has_one_ranks_logprobs_gradient_norm_and_weights(seen, rehearse):
    """Two ranks split each way, all at once on two GPUs, beside one rank: logprobs inside the band, gradient norms within 2 %, the export and
    what a publish sends bit by bit the original, names included; and an update after saving and loading is the update before."""
    one, split = seen["one"], {name: size for name, size in seen.items() if name != "one"}
    assert split or rehearse                                                # a CPU has neither ring attention nor AutoModel's experts
    for size, many in split.items():
        assert many["exported"] and many["sent"] and many["resumed"] and many["places"] == {"tp": 1, "cp": 1, "ep": 2}[size], many
        assert many["gap_mean"] <= (EXACT if rehearse else MEAN) and many["gap_max"] <= (EXACT if rehearse else MOST), many
        assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4 if rehearse else 0.02), (one, many)


@needs(Check("memory", "tied", 1, 200, 36), Check("memory", "experts", 1, 375, 36))
def test_what_offload_and_recomputation_save_and_cost(seen, rehearse):
    """One rank, each flag by itself, the same update: gradient norm stays, memory falls; the peak is below what rank_memory foretells."""
    plain = seen["plain"]
    for name in ("activation_checkpointing", "offload_optimizer"):
        assert seen[name]["grad_norm"] == pytest.approx(plain["grad_norm"], rel=0.01)
        assert rehearse or seen[name]["peak_gb"] < plain["peak_gb"]
    assert rehearse or all(s["peak_gb"] <= s["rank_gb"] for s in seen.values())
    assert rehearse or seen["offload_optimizer"]["held_gb"] < 0.3 * plain["held_gb"]


@needs(Check("images", "vision", 2, 400, 20), Check("images", "vision", 1, 410, 26))
def test_the_trainer_sees_the_images_that_the_engine_saw_over_3_publishes(seen, rehearse):
    """Two turns with an image each: gaps in the band at each version, further off with each other's images (while the model is the one made: updates drown what images say); the tower moves."""
    mean, most = (EXACT, EXACT) if rehearse else (MEAN, MOST)
    assert len(seen["gap_mean"]) == 4 and max(seen["gap_mean"]) <= mean and max(seen["gap_max"]) <= most
    assert seen["swapped_mean"][0] > 1.5 * seen["gap_mean"][0] and min(seen["older_mean"]) > 3 * max(seen["gap_mean"]) and seen["tower_moved"] > 0


@needs(Check("forward", "tied", 1, 190, 20), Check("forward", "experts", 1, 190, 26), Check("forward", "corrected", 1, 190, 20))
def test_one_rank_has_float32_masters_bfloat16_compute_and_the_logprobs_of_transformers(seen, rehearse):
    """AutoModel's class under FSDP2 on one rank, from a bfloat16 checkpoint; the oracle is transformers' class in float32."""
    assert seen["masters"] == seen["gradients"] == ["torch.float32"] and seen["sharded"] == ["DTensor"]
    assert seen["logits"] == "torch.bfloat16" and (rehearse or seen["class"].startswith("nemo_automodel."))
    assert seen["gap_mean"] <= MEAN and seen["gap_max"] <= MOST


@needs(Check("critic", "tied", 1, 195))
def test_the_critic_learns_and_the_reference_starts_where_the_policy_does(seen):
    """One value a token, its error falls below a half of the first; log p under the reference equals the policy's."""
    assert seen["value_shape"][-1] == 1 and seen["error"][-1] < 0.5 * seen["error"][0]
    assert seen["ref_gap"] == 0.0 and seen["memory_gb"] <= seen["rank_gb"]


@needs(Check("replay", "ties", 1, 500, 37))
def test_replay_takes_the_experts_of_the_engine_and_closes_the_gap_that_near_ties_open(seen, rehearse):
    """32 rollouts of three turns, one version, an engine with CUDA graphs; the router's scores lie about a bfloat16 step apart. Every token but the last has a
    record, prefix-cached ones too (rollouts of a prompt share it, and each turn its history); replayed gates take exactly these, and the gap is that of a dense model."""
    assert seen["rollouts"] == 32 and seen["turns"] == [3] and seen["finite"]
    if rehearse:                                           # a CPU's engine does not tell its experts
        assert seen["live"]["gap_max"] <= EXACT
        return
    assert seen["records"] == seen["tokens_but_last"]
    assert seen["live"]["differs"] > 0.02 and seen["replay"]["differs"] == 0.0 and 0 < seen["route_differs_frac"] <= seen["live"]["differs"]
    assert seen["replay"]["gap_mean"] <= MEAN and seen["replay"]["gap_mean"] < 0.5 * seen["live"]["gap_mean"]
    assert max(seen["replay"]["gap_mean_of_turn"]) <= MEAN


@needs(Check("recompute", "experts", 1, 250, 26))
def test_gradients_of_a_replayed_forward_are_the_same_with_activations_recomputed(seen, rehearse):
    """Random experts recorded for every token but the last; no more apart than a few times what the same backward done twice is, and far from those of the live choice."""
    assert seen["recomputed"] <= max(3 * seen["twice"], 2e-3)
    assert rehearse or seen["live"] > 10 * seen["recomputed"]


@needs(Check("refused", seconds=180, gb=0, cpu=False))
def test_an_engine_that_leaves_the_trainer_too_little_is_refused_before_anything_starts(seen):
    """One GPU, 95 % of it for the engine: exit code 2, and the message names the flags that help."""
    assert seen["code"] == 2 and "share one GPU" in seen["output"] and "--tokens-per-microbatch" in seen["output"]


@pytest.mark.long
@needs(Check("quick_start", "tiny", 1, 490, 15))
def test_the_quick_start_learns_on_one_gpu(seen):
    """`python train.py --estimator grpo` with nothing else than what lets it share its GPU with other checks: held-out greedy accuracy rises by 0.1 at least."""
    assert seen["greedy"][-1] >= seen["greedy"][0] + 0.1 and max(seen["gap_mean"]) <= MEAN


@pytest.mark.long
@needs(Check("smollm2", "smollm2", 1, 510, 45))                          # few beside it: it has a claim on time
def test_smollm2_reaches_030_on_chain_sum_within_five_minutes_on_one_gpu(seen, rehearse):
    """recipes/smollm2.py, warm-up included; the model is models/smollm2, or what --smollm2 names."""
    assert rehearse or (max(seen["greedy"]) >= 0.30 and seen["seconds"] < 300 and max(seen["gap_mean"]) <= 0.08)    # larger logits than a random model's, so a wider band


# ---------------------------------------------------------------------------------------------------- models of the checks
def make_model(kind: str, path: Path, tiny: bool) -> None:
    """Random weights in bfloat16 (tiny: float32) under the embedded policy's tokenizer: Qwen3-0.6B's shape with a tied head or one of its own, or 1.2B in 32 experts,
    with `ties` under routers whose rows are nearly one row: scores of about 0.6 that lie about 0.004 apart, the step of a bfloat16 there; with `corrected` GLM-4's mixture,
    whose routers add a correction to the scores that they choose by. `repeats`: embeddings are large beside what the layers add, so that the tied head finds the last
    token again, at the real size with a probability of about 0.6."""
    from transformers import AutoTokenizer, Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from recipes.bench_gpu import shapes

    if kind == "vision":               # vLLM's Qwen2.5-VL imports torchvision
        from recipes import make_vision

        architecture = "qwen2_5_vl" if importlib.util.find_spec("torchvision") else "idefics3"
        return make_vision.make(make_vision.Config(str(path), architecture, width=64 if tiny else 1024, layers=2 if tiny else 16))
    shape, experts = shapes(300 if tiny else None)
    dtype = torch.float32 if tiny else torch.bfloat16
    torch.manual_seed(0)
    with torch.device("cpu" if tiny else "cuda"):
        if kind == "corrected":
            shape |= experts | dict(num_hidden_layers=shape["num_hidden_layers"] // 4 + 2, n_routed_experts=experts["num_experts"], first_k_dense_replace=1, use_qk_norm=True)
            model = Glm4MoeForCausalLM(Glm4MoeConfig(**shape, tie_word_embeddings=False, eos_token_id=258, dtype=dtype))
        elif kind in ("experts", "ties"):
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape | experts, tie_word_embeddings=False, eos_token_id=258, dtype=dtype))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=kind != "dense", eos_token_id=258, dtype=dtype))
    for gate in (p for name, p in model.named_parameters() if kind == "ties" and name.endswith("mlp.gate.weight")):
        gate.data = gate[:1] + 0.05 * (gate - gate[:1]).detach()
    if kind == "repeats":
        model.model.embed_tokens.weight.data *= 80
        model.model.norm.weight.data /= 80
    correct(model)
    model.to(dtype).save_pretrained(path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(path)


def correct(model) -> None:
    """Draw the routers' corrections anew, where there are such: as large as their scores are apart."""
    with torch.no_grad():
        for name, correction in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                correction.copy_(0.2 * torch.randn(correction.shape))


def random_batch(rows: int, vocabulary: int, seed: int):
    """Rows of 16 given and 20 to 60 sampled random tokens; alternate advantages, so that an update moves the weights."""
    from agent import Trajectory
    from estimators import collate
    from losses import AGGREGATIONS

    draw, rollouts = np.random.default_rng(seed), []
    for i in range(rows):
        n = int(draw.integers(20, 60))
        trajectory = Trajectory(rollout=i, group=i, reward=0.0)
        trajectory.extend(draw.integers(0, vocabulary, 16))
        trajectory.extend(draw.integers(0, vocabulary, n), logprobs=np.full(n, -np.log(vocabulary)), policy_versions=[0] * n)
        rollouts.append([trajectory])
    batch = collate(rollouts, AGGREGATIONS["token-mean"], 1.0)
    batch.advantages = batch.spread(torch.tensor([1.0, -1.0]).repeat(rows)[:rows])
    return batch


# ---------------------------------------------------------------------------------------------------- the checks
SPECULATION = '{"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}, "enable_prefix_caching": true, "disable_log_stats": false}'
SHARED = dict(kv_cache_gb=4.0, gpu_memory_utilization=0.06)               # of an engine with others on its GPU: vLLM would take their comings and goings for its own


def drafts(engine) -> dict:
    """Tokens that the engine sampled, drafted and had accepted so far; 0 where it does not count."""
    from vllm.v1.metrics.reader import Counter, get_metrics_snapshot

    counts = {metric.name: metric.value for metric in get_metrics_snapshot() if isinstance(metric, Counter)}
    names = {"sampled": "generation_tokens", "drafted": "spec_decode_num_draft_tokens", "accepted": "spec_decode_num_accepted_tokens"}
    return {ours: counts.get(f"vllm:{theirs}", 0) for ours, theirs in names.items()}


async def speculation(model: str, device: str) -> dict:
    return await publishes(model, device, SPECULATION, learning_rate=3e-5)                     # so that it still repeats after 20 updates


async def publishes(model: str, device: str, engine_args: str = "{}", learning_rate: float = 1e-4, count: int = 20, in_flight: int = 64) -> dict:
    """Sample without pause while versions 0 .. count are published; score what ends under each while the trainer holds it."""
    from agent import Trajectory
    from estimators import collate
    from generator import GeneratorConfig, Sampling
    from losses import AGGREGATIONS
    from train import Config, resolve, start, waiting
    from trainer import TrainerConfig
    from weight_sync import publish

    in_flight, wanted = (16, 200) if device == "cpu" else (in_flight, 500)    # wanted: tokens of a version to score
    replay = "off" if Path(model).name == "corrected" else "auto"              # replay would hide another choice of experts
    cfg = Config(model=model, device=device, trainer=TrainerConfig(learning_rate=learning_rate, warmup_steps=0, decay="constant", tokens_per_microbatch=2048),
                 generator=GeneratorConfig(agent=str(ROOT / "recipes/arithmetic.py"), partial_rollout=True, context_length=1024, max_new_tokens=900, enforce_eager=True, routing_replay=replay, engine_args=engine_args, **SHARED))
    plan, began = resolve(cfg), time.monotonic()
    parts = await start(cfg, plan)
    ready, engine, trainer, draw = time.monotonic() - began, parts.engines[0], parts.trainer, random.Random(0)
    ended, serial, stop = [], iter(range(10**9)), False

    async def keep_sampling() -> None:
        while not stop:
            prompt = np.asarray([draw.randrange(2, 250) for _ in range(32)], np.int32)
            answer, = await engine.generate.remote([(f"r{next(serial)}", prompt, draw.randrange(20, 200), [])], [Sampling()])
            ended.append((prompt, answer))

    def rows(answers: list) -> list:
        out = []
        for i, (prompt, answer) in enumerate(answers):
            trajectory = Trajectory(rollout=i, group=i, reward=0.0)
            trajectory.extend(prompt)
            trajectory.extend(answer.token_ids, answer.logprobs, answer.policy_versions)
            out.append([trajectory])
        return out

    print(f"ready after {ready:.0f} s", flush=True)
    seen = {"transfer": plan.transfer, "gpus": sum(plan.nodes), "ready_seconds": ready, "gap_mean": [], "gap_max": [], "older_mean": [], "tokens": [], "publish_seconds": [], "straddling": 0}
    publish_began = time.monotonic()
    await publish(trainer, parts.engines, 0, partial(waiting, deadline=120))
    seen["publish_seconds"].append(time.monotonic() - publish_began)
    samplers = [asyncio.ensure_future(keep_sampling()) for _ in range(in_flight)]
    for version in range(count + 1):
        while sum(int((a.policy_versions == version).sum()) for _, a in ended) < wanted:
            done, _ = await asyncio.wait(samplers, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        answers, ended[:] = [(prompt, a) for prompt, a in ended if version in a.policy_versions][:48], []
        batch = collate(rows(answers), AGGREGATIONS["token-mean"], 1.0)
        batch.old_logprobs = await trainer.logprobs(batch)
        gap = (batch.old_logprobs - batch.behaviour_logprobs).abs()
        now = batch.response_mask & (batch.policy_versions == version)
        older = batch.response_mask & (batch.policy_versions < version)
        seen["gap_mean"].append(gap[now].mean().item())
        seen["gap_max"].append(gap[now].max().item())
        seen["tokens"].append(int(now.sum()))
        seen["older_mean"] += [gap[older].mean().item()] if older.any() else []
        seen["straddling"] += sum(len(set(a.policy_versions.tolist())) > 1 for _, a in answers)
        print(f"version {version}: {seen['tokens'][-1]} tokens, gap mean {seen['gap_mean'][-1]:.1e} max {seen['gap_max'][-1]:.1e}, older tokens {seen['older_mean'][-1:]}", flush=True)
        if version < count:
            batch.advantages = batch.spread(torch.tensor([1.0, -1.0]).repeat(len(answers))[: len(answers)])
            await trainer.update(batch, "ppo")
            await trainer.ranks[0].__ray_call__.remote(lambda rank: correct(rank.model))
            publish_began = time.monotonic()
            await publish(trainer, parts.engines, version + 1, partial(waiting, deadline=120))
            seen["publish_seconds"].append(time.monotonic() - publish_began)
    stop = True
    seen |= await engine.__ray_call__.remote(drafts)
    seen["trainer_gpu"], seen["engine_gpu"] = await asyncio.gather(*[actor.__ray_call__.remote(lambda self: os.environ.get("CUDA_VISIBLE_DEVICES")) for actor in (trainer.ranks[0], engine)])
    seen["memory_gb"], seen["rank_gb"] = await trainer.ranks[0].__ray_call__.remote(lambda self: torch.cuda.max_memory_allocated() / 2**30), sum(plan.rank_gb.values())
    return seen


TURNS = """
from agent import Env, Result

class AgentRunner(Env):
    turn = 0

    async def step(self, action):
        self.turn += 1
        return Result(reward=float(len(action) % 2), terminated=self.turn == 3, observation="and then, after all of that?")
"""


def differing(rank, batch, replay: bool) -> float:
    """Share of the recorded experts that the rank's gates do not take in a forward over the batch."""
    from trainer import forward, recorded_experts, replaying, take_rows

    missed = known = 0
    layers = {next(int(part) for part in name.split(".") if part.isdigit()): m for name, m in rank.model.named_modules() if hasattr(m, "router_replay")}
    for start in range(0, len(batch.lengths), 8):
        small, took, hooks = take_rows(batch, list(range(start, min(start + 8, len(batch.lengths))))), {}, []
        for layer, gate in layers.items():
            hooks.append(gate.register_forward_hook(lambda m, i, out, layer=layer: took.update({layer: out[1].cpu()})))
        with torch.no_grad(), replaying(rank.replays if replay else {}, small, rank.device):
            forward(rank.model, small, rank.device)
        for hook in hooks:
            hook.remove()
        recorded = recorded_experts(small).flatten(0, 1).long()               # [n, layers, k]
        for layer, experts in took.items():
            there = recorded[:, layer] >= 0
            known += int(there.sum())
            missed += int((there & (recorded[:, layer, :, None] != experts[:, None]).all(-1)).sum())
    return missed / known


async def replay(model: str, device: str) -> dict:
    from estimators import collate
    from generator import GeneratorConfig
    from losses import AGGREGATIONS
    from train import Config, resolve, start
    from trainer import TrainerConfig

    agent = Path(model) / "turns.py"
    agent.write_text(TURNS)
    cfg = Config(model=model, device=device, trainer=TrainerConfig(learning_rate=1e-5, warmup_steps=0, decay="constant", tokens_per_microbatch=2048),
                 generator=GeneratorConfig(agent=str(agent), context_length=1024, max_new_tokens=48, **SHARED))
    parts = await start(cfg, resolve(cfg))
    await parts.publish(0)
    groups = await parts.run_groups([(i, {"prompt": f"{i}: " + "say something that nobody has said before. " * 3}) for i in range(8)], 0, 4, 1.0, 0, "replay")
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    batch = collate(rollouts, AGGREGATIONS["token-mean"], 1.0)
    turn = torch.cumsum(batch.response_mask & ~torch.nn.functional.pad(batch.response_mask, (1, 0))[:, :-1], 1)     # [B, T] answer that a sampled token is part of
    seen = {"rollouts": len(rollouts), "turns": sorted(set(turn.max(1).values.tolist()))}
    for name, given in {"live": replace(batch, routed_experts=None), "replay": batch}.items():
        gap = (await parts.trainer.logprobs(given) - batch.behaviour_logprobs).abs()
        seen[name] = {"gap_mean": gap[batch.response_mask].mean().item(), "gap_max": gap[batch.response_mask].max().item(),
                      "gap_mean_of_turn": [gap[batch.response_mask & (turn == k)].mean().item() for k in (1, 2, 3)]}
        if batch.routed_experts:
            seen[name]["differs"] = await parts.trainer.ranks[0].__ray_call__.remote(differing, batch, name == "replay")
        print(name, seen[name], flush=True)
    if batch.routed_experts:
        import ray

        seen["records"], seen["tokens_but_last"] = [len(ray.get(r)) for r in batch.routed_experts], [int(n) - 1 for n in batch.lengths]
    batch.old_logprobs = await parts.trainer.logprobs(batch)
    batch.advantages = batch.spread(torch.tensor([1.0, -1.0]).repeat(16)[: len(rollouts)])
    metrics = await parts.trainer.update(batch, "ppo")
    return seen | {"finite": bool(np.isfinite(list(metrics.values())).all())} | {k: v for k, v in metrics.items() if k.startswith("route")}


async def images(model: str, device: str) -> dict:
    """Episodes of recipes/colour.py under versions 0 .. 3, all weights updated between; |trainer - engine|, also with the two images of a row exchanged, and of tokens of the version before."""
    from estimators import collate
    from generator import GeneratorConfig
    from losses import AGGREGATIONS
    from recipes.colour import prompts
    from train import Config, resolve, start
    from trainer import TrainerConfig

    cfg = Config(model=model, device=device, trainer=TrainerConfig(learning_rate=1e-3 if device == "cpu" else 1e-4, warmup_steps=0, decay="constant", tokens_per_microbatch=1024),
                 generator=GeneratorConfig(agent=str(ROOT / "recipes/colour.py"), context_length=512, max_new_tokens=16, enforce_eager=True, **SHARED | dict(kv_cache_gb=0.1)))
    plan = resolve(cfg)
    parts = await start(cfg, plan)
    seen = {"transfer": plan.transfer, "gap_mean": [], "gap_max": [], "swapped_mean": [], "older_mean": []}
    first = await parts.trainer.ranks[0].parameters.remote()
    for version in range(4):
        await parts.publish(version)
        groups = await parts.workers[0].run_groups.remote(list(enumerate(prompts("train")[:16])), parts.engines[0], 2, 1.0, 0, f"v{version}")
        assert not any(g.dropped for g in groups), [g.errors for g in groups]
        batch = collate([r for g in groups for r in g.rollouts], AGGREGATIONS["token-mean"], 1.0)
        batch.old_logprobs = await parts.trainer.logprobs(batch)

        async def gap(batch) -> torch.Tensor:
            return (await parts.trainer.logprobs(batch) - batch.behaviour_logprobs).abs()[batch.response_mask]

        now = await gap(batch)
        seen["gap_mean"].append(now.mean().item())
        seen["gap_max"].append(now.max().item())
        seen["swapped_mean"].append((await gap(replace(batch, images=[row[::-1] for row in batch.images]))).mean().item())
        batch.advantages = batch.spread(torch.tensor([1.0, -1.0]).repeat(16))
        await parts.trainer.update(batch, "ppo")
        seen["older_mean"].append((await gap(batch)).mean().item())
    last = await parts.trainer.ranks[0].parameters.remote()
    seen["tower_moved"] = min((last[name] - first[name]).abs().max().item() for name in first if ("vision" in name or "visual" in name) and first[name].dim() > 1)
    seen["class"] = await parts.trainer.ranks[0].__ray_call__.remote(lambda self: str(type(self.model).__mro__[2]))
    return seen


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("", 0))
        return s.getsockname()[1]


def bare_rank(model: str, device: str, ref: bool = False, critic: bool = False, **flags):
    """A Rank of this process, the only one, computing in bfloat16."""
    from losses import LossConfig
    from trainer import Rank, TrainerConfig

    rank = Rank.__ray_metadata__.modified_class(0, 1, model, TrainerConfig(warmup_steps=0, decay="constant", **flags), LossConfig(), device, "bfloat16", 10, 0)
    rank.start("127.0.0.1", free_port(), ref, critic)
    return rank


def forward(model: str, device: str) -> dict:
    from transformers import AutoConfig, AutoModelForCausalLM

    rank, vocabulary = bare_rank(model, device), AutoConfig.from_pretrained(model).vocab_size
    batch = random_batch(16, vocabulary, seed=1)
    mine, = rank.per_token(batch, [list(range(16))], "logprobs")
    logits = rank.model(input_ids=batch.token_ids[:2].long().to(rank.device), use_cache=False).logits
    logits.float().logsumexp(-1).mean().backward()
    seen = {
        "class": type(rank.model).__mro__[2].__module__,                  # FSDPx, FSDPModule, x
        "logits": str(logits.dtype), "masters": sorted({str(p.dtype) for p in rank.model.parameters()}),
        "sharded": sorted({type(p).__name__ for p in rank.model.parameters()}), "gradients": sorted({str(p.grad.dtype) for p in rank.model.parameters() if p.grad is not None})}
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(rank.device)
    gaps = []
    for row in range(16):
        n = int(batch.lengths[row])
        ids = batch.token_ids[row, :n].long().to(rank.device)
        with torch.no_grad():
            theirs = plain(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[15:, 0].cpu()
        gaps.append((mine[row, 16:n] - theirs).abs())
    gaps = torch.cat(gaps)
    return seen | {"gap_mean": gaps.mean().item(), "gap_max": gaps.max().item()}


def recompute(model: str, device: str) -> dict:
    from transformers import AutoConfig

    from trainer import forward, load_model, replay_handles, replaying

    torch.backends.cuda.enable_cudnn_sdp(False)            # as AutoModel does for good when it recomputes: another kernel of attention rounds otherwise, by 0.8 % of the gradient
    config, rank = AutoConfig.from_pretrained(model), bare_rank(model, device)
    batch, draw = random_batch(16, config.vocab_size, seed=3), np.random.default_rng(0)
    batch.routed_experts = [np.stack([draw.permutation(config.num_experts)[: config.num_experts_per_tok] for _ in range((n - 1) * config.num_hidden_layers)]
                                     ).reshape(n - 1, config.num_hidden_layers, -1).astype(np.int8) for n in batch.lengths.tolist()]

    def gradient(model, handles) -> list:
        with replaying(handles, batch, rank.device):
            (forward(model, batch, rank.device)[0] * batch.advantages.to(rank.device)).sum().backward()
        grads = [p.grad.full_tensor().cpu() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return grads

    def apart(a: list, b: list) -> float:
        return (sum((x - y).double().square().sum() for x, y in zip(a, b, strict=True)) / sum(y.double().square().sum() for y in b)).sqrt().item()

    handles = replay_handles(rank.model) if device == "cuda" else {}                 # on a CPU it is transformers' class, which has no gates to replay
    once, live = gradient(rank.model, handles), gradient(rank.model, {})
    again = gradient(rank.model, handles)
    checkpointed, _ = load_model(model, torch.bfloat16, rank.device, replace(rank.cfg, activation_checkpointing=True))
    recomputed = gradient(checkpointed, replay_handles(checkpointed) if device == "cuda" else {})
    return {"twice": apart(again, once), "recomputed": apart(recomputed, once), "live": apart(live, once)}


def critic(model: str, device: str) -> dict:
    from transformers import AutoConfig

    from trainer import Shape, rank_memory

    config = AutoConfig.from_pretrained(model)
    rank = bare_rank(model, device, ref=True, critic=True, critic_learning_rate=1e-4, tokens_per_microbatch=2048)
    batch = random_batch(16, config.vocab_size, seed=2)
    everything = [list(range(16))]
    policy, = rank.per_token(batch, everything, "logprobs")
    reference, = rank.per_token(batch, everything, "ref_logprobs")
    batch.old_logprobs, batch.behaviour_logprobs, batch.returns = policy, policy, 2.0 * batch.response_mask
    errors = []
    for _ in range(12):
        batch.values, = rank.per_token(batch, everything, "values")
        metrics, _ = rank.update(batch, [everything], "value")
        errors.append(metrics["value_error"][0] / metrics["value_error"][1])
    rank.update(batch, [everything], "ppo")
    shape = list(rank.critic.model(input_ids=batch.token_ids[:1].long().to(rank.device), use_cache=False).logits.shape)
    memory, parameters = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0, Shape.of(config).parameters
    return {"error": errors, "ref_gap": (policy - reference).abs().max().item(), "value_shape": shape, "memory_gb": memory,
            "rank_gb": sum(rank_memory(Shape.of(config), config, rank.cfg, parameters, parameters).values())}


SIZES = {"one": {}, "tp": dict(trainers=2, tp_size=2), "cp": dict(trainers=2, cp_size=2), "ep": dict(trainers=2, ep_size=2)}


def sizes(model: str, device: str) -> dict:
    """`size` of every size that goes with the model, all at once, each rank a process (on a CPU one size after the other); those of several ranks are compared with one rank's."""
    names = {"tied": ["one", "tp", "cp"], "dense": ["one", "tp", "cp"], "experts": ["one", "ep"]}[Path(model).name]
    seen, ranks, place = {}, {}, Path(model).parent / f"sizes-{Path(model).name}"
    place.mkdir(exist_ok=True)
    for name in [n for n in names if device == "cuda" or n not in ("cp", "ep")]:
        port, world = str(free_port()), SIZES[name].get("trainers", 1)
        gpus = [{"CUDA_VISIBLE_DEVICES": os.environ["CUDA_VISIBLE_DEVICES"].split(",")[i % 2]} if device == "cuda" else {"OMP_NUM_THREADS": "1"} for i in range(world)]
        ranks[name] = [subprocess.Popen([sys.executable, __file__, "size", model, device, name, str(i), port, str(place)], cwd=ROOT, env=os.environ | gpus[i], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                       for i in range(world)]
        if device == "cpu":
            [rank.wait() for rank in ranks[name]]
    for name, processes in ranks.items():
        outputs = [process.communicate()[0] for process in processes]
        assert not any(process.returncode for process in processes), f"{name}: " + "\n".join(output[-3000:] for output in outputs)
        seen[name] = json.loads(outputs[0].splitlines()[-1])
        gap = (torch.load(place / f"{name}.pt") - torch.load(place / "one.pt")).abs()
        seen[name] |= {"gap_mean": gap[gap > 0].mean().item() if gap.any() else 0.0, "gap_max": gap.max().item()}
    return seen


def size(model: str, device: str, name: str, rank: str, port: str, place: str) -> dict:
    """One rank of a size: logprobs of a batch, what it would publish and export, one update, and the same update after a save and a load."""
    import torch.distributed as dist
    from safetensors.torch import load_file
    from transformers import AutoConfig

    from losses import LossConfig
    from trainer import Rank, TrainerConfig, plan_microbatches
    from weight_sync import PolicySource

    cfg = TrainerConfig(warmup_steps=0, decay="constant", learning_rate=1e-4, tokens_per_microbatch=400, **SIZES[name])
    me = Rank.__ray_metadata__.modified_class(int(rank), cfg.trainers, model, cfg, LossConfig(entropy_coef=0.01), device, "bfloat16" if device == "cuda" else "float32", 10, 0)
    began = time.monotonic()
    me.start("127.0.0.1", int(port), False, False)
    batch = random_batch(15, AutoConfig.from_pretrained(model).vocab_size, seed=1)
    plan = plan_microbatches(batch, torch.arange(15), cfg.places, 400)
    mine, logprobs = plan[int(rank) // cfg.same_rows], torch.zeros(batch.response_mask.shape)
    for rows, piece in zip(mine, me.per_token(batch, mine, "logprobs")):
        logprobs[torch.tensor(rows, dtype=torch.long), : piece.shape[1]] = piece if rows else piece[:0]
    if cfg.trainers > 1:                                           # each place's rows from all places; ranks of one place have the same
        dist.all_reduce(logprobs)
    batch.old_logprobs = batch.behaviour_logprobs = logprobs = logprobs / cfg.same_rows
    original = {n: t for file in Path(model).glob("*.safetensors") for n, t in load_file(file).items()}
    source = PolicySource(me.model, next(iter(original.values())).dtype, me.device, tied_head=False)
    sent = {n: t.to("cpu", original[n].dtype, copy=True) for n, t in source}
    promised = {(m.name, m.shape) for m in source.metadata()}
    me.export(f"{place}/{name}-hf")
    exported = {n: t for file in Path(place, f"{name}-hf").glob("*.safetensors") for n, t in load_file(file).items()} if rank == "0" else {}

    def whole_model() -> dict:
        return {n: t.clone() for n, t in me.parameters().items()}

    began_update = time.monotonic()
    metrics, _ = me.update(batch, [mine], "ppo")
    seconds = time.monotonic() - began_update
    me.save(f"{place}/{name}-checkpoint")
    me.update(batch, [mine], "ppo")
    twice = whole_model()
    me.load(f"{place}/{name}-checkpoint")
    once = whole_model()
    me.update(batch, [mine], "ppo")
    again = whole_model()
    if rank == "0":
        torch.save(logprobs, f"{place}/{name}.pt")
    same = [(again[n] - twice[n]).norm() <= 1e-3 * (twice[n] - once[n]).norm() + 1e-9 for n in again]      # atomic additions of a GPU are not exact
    return {
        "places": cfg.places, "grad_norm": metrics["grad_norm"][0] / metrics["grad_norm"][1], "class": type(me.model).__mro__[2].__module__, "seconds": time.monotonic() - began, "update_seconds": seconds,
        "exported": exported.keys() == original.keys() and all(torch.equal(exported[n], original[n]) for n in original),
        "sent": promised == {(n, tuple(t.shape)) for n, t in sent.items()} and sent.keys() == original.keys() and all(torch.equal(sent[n], original[n]) for n in original),
        "resumed": all(same) and any((again[n] != once[n]).any() for n in again), "memory_gb": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0}


def memory(model: str, device: str) -> dict:
    """The third update of one rank with each memory flag by itself: gradient norm, seconds, GB held between steps and at most."""
    import gc

    import torch.distributed as dist
    from transformers import AutoConfig

    from trainer import Shape, plan_microbatches, rank_memory

    config, seen = AutoConfig.from_pretrained(model), {}
    tokens = 8192 if device == "cuda" else 500
    for name, flags in {"plain": {}, "activation_checkpointing": {"activation_checkpointing": True}, "offload_optimizer": {"offload_optimizer": True}}.items():
        rank = bare_rank(model, device, learning_rate=1e-5, tokens_per_microbatch=tokens, **flags)
        batch = random_batch(109 if device == "cuda" else 6, config.vocab_size, seed=2)      # rows of 75: one micro-batch, as large as it may be
        everything, = plan_microbatches(batch, torch.arange(len(batch.lengths)), 1, tokens)
        batch.old_logprobs, = rank.per_token(batch, everything, "logprobs")
        batch.behaviour_logprobs = batch.old_logprobs
        for _ in range(3):
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began = time.monotonic()
            metrics, _ = rank.update(batch, [everything], "ppo")
            seconds = time.monotonic() - began
            seen[name] = seen.get(name) or {"grad_norm": metrics["grad_norm"][0] / metrics["grad_norm"][1]}
        gb = (torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30) if device == "cuda" else (0.0, 0.0)
        seen[name] |= {"update_seconds": seconds, "held_gb": gb[0], "peak_gb": gb[1], "rank_gb": sum(rank_memory(Shape.of(config), config, rank.cfg, 0, 0).values())}
        del rank
        dist.destroy_process_group()
        gc.unfreeze()                                          # Rank.start has frozen it, cycles of modules and hooks included
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return seen


def trained(command: list[str]) -> dict:
    """What a program that trains shows: seconds, accuracy and mean gap (nats) of each eval, and three rows of its metrics."""
    began, name = time.monotonic(), f"gpu-{os.getpid()}"
    subprocess.run([sys.executable, *command, "--name", name], cwd=ROOT, check=True)
    rows = [json.loads(line) for line in (ROOT / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    evals = [row for row in rows if "eval/greedy" in row]
    return {"seconds": time.monotonic() - began, "greedy": [row["eval/greedy"] for row in evals], "gap_mean": [row["eval/logprob_gap_mean"] for row in evals],
            "rows": [rows[1], rows[len(rows) // 2], rows[-1]]}


def shared(device: str) -> list[str]:
    """SHARED as flags of train.py."""
    return [word for name, value in SHARED.items() for word in (f"--{name.replace('_', '-')}", str(value))] if device == "cuda" else ["--device", "cpu"]


def quick_start(model: str, device: str) -> dict:
    return trained(["train.py", "--estimator", "grpo", *shared(device)])


def smollm2(model: str, device: str) -> dict:
    return trained(["recipes/smollm2.py", "--model", model, "--", *shared(device), *(["--enforce-eager"] if device == "cuda" else ["--steps", "2"])])


def refused(model: str, device: str) -> dict:
    run = subprocess.run([sys.executable, "train.py", "--gpu-memory-utilization", "0.95", "--tokens-per-microbatch", "4000000", "--name", "refused"], cwd=ROOT, capture_output=True, text=True)
    return {"code": run.returncode, "output": run.stdout}


def main(name: str, model: str, device: str, *more: str) -> None:
    """Make a model, its kind being the directory's name, or run one check on it; the last line printed is its numbers."""
    import ray

    from train import quiet, start_ray

    quiet()
    if name == "make":
        return make_model(Path(model).name, Path(model), tiny=device == "cpu")
    check = globals()[name]
    if not asyncio.iscoroutinefunction(check):
        return print(json.dumps(check(model, device, *more)), flush=True)
    start_ray(None)                                        # the others are single ranks of this process, or programs of their own
    try:
        print(json.dumps(asyncio.run(check(model, device))), flush=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(*sys.argv[1:])
