"""What only GPUs can show: nccl and ipc transfers, AutoModel's own classes, bfloat16, and learning on one GPU.

    python -m pytest -m gpu tests                   everything that the machine's GPUs allow; numbers go to runs/gpu.json
    python -m pytest tests/test_gpu.py --rehearse   the same programs on a CPU: tiny models, gloo, float32

Each check is a program of its own (this file's `main`), so that it sees just the GPUs it is meant to see, and one that
hangs or dies ends alone. It prints its numbers as a last line of JSON; the test states the claim.
"""

import asyncio
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent
TINY = ROOT / "recipes" / "tiny"
MEAN, MOST = 0.015, 0.15               # band of |trainer - engine| logprob in bfloat16, nats: mean over a version's tokens, and any token
EXACT = 1e-4                           # the same in float32, any token


# ---------------------------------------------------------------------------------------------------- running a check
@pytest.fixture(scope="session")
def report(request):
    """Numbers of all checks by name, written after each."""
    path, numbers = Path(request.config.getoption("--gpu-report")), {}

    def add(name: str, seen: dict) -> dict:
        numbers[name] = seen
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(numbers, indent=1))
        return seen

    return add


def program(command: list[str], gpus: int, seconds: float) -> str:
    """Output of a program that sees the first `gpus` GPUs; killed with all it started after `seconds`. Skips where there are fewer."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, here are {torch.cuda.device_count()}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(visible[:gpus]), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"{' '.join(command)} took longer than {seconds} s:\n{output[-3000:]}")
    assert process.returncode == 0, output[-6000:]
    return output


@pytest.fixture(scope="session")
def check(rehearse, tmp_path_factory):
    """check(GPUs, seconds, name, kind of model) -> numbers of one of the checks below; models are made once."""
    models, device = tmp_path_factory.mktemp("models"), "cpu" if rehearse else "cuda"

    def run(gpus: int, seconds: float, name: str, kind: str) -> dict:
        model = TINY if kind == "tiny" else models / kind
        if not model.exists():
            program([sys.executable, __file__, "make", str(model), device], 0 if rehearse else 1, 120)
        return json.loads(program([sys.executable, __file__, name, str(model), device], 0 if rehearse else gpus, seconds).splitlines()[-1])

    return run


def train(run: Path, gpus: int, seconds: float, command: list[str]) -> tuple[list[dict], float]:
    """(metrics of a run, seconds it took) of a program that trains into `run`."""
    began = time.monotonic()
    program([sys.executable, *command], gpus, seconds)
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()], time.monotonic() - began


def gaps_of(rows: list[dict]) -> list[float]:
    """Mean |trainer - engine| logprob of freshly sampled tokens at each eval, nats."""
    return [r["eval/logprob_gap_mean"] for r in rows if "eval/logprob_gap_mean" in r]


# ---------------------------------------------------------------------------------------------------- the claims
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tied", "dense", "experts"])
@pytest.mark.parametrize("gpus", [2, 1])
def test_every_token_has_the_logprob_of_the_version_it_carries_over_20_publishes_in_flight(rehearse, report, check, gpus, kind):
    """64 answers in flight all the time, an update of all weights and a publish, 20 times; two GPUs: nccl, one: ipc.

    What ends under version v is scored by the trainer while it holds v: tokens labelled v are in the band (coverage is
    checked by each publish), older ones of the same answers are further off; the band is as wide at the end as at the start.
    """
    seen = report(f"publishes/{kind}/{gpus}", check(gpus, 400, "publishes", kind))
    assert seen["transfer"] == ("gloo" if rehearse else "nccl" if gpus == 2 else "ipc")
    assert len(seen["gap_mean"]) == 21 and min(seen["tokens"]) >= 100 and seen["straddling"] >= 40
    mean, most = (EXACT, EXACT) if rehearse else (MEAN, MOST)
    assert max(seen["gap_mean"]) <= mean and max(seen["gap_max"]) <= most
    assert np.median(seen["older_mean"]) > 3 * max(seen["gap_mean"])
    assert np.mean(seen["gap_mean"][-5:]) <= 1.5 * np.mean(seen["gap_mean"][:5]) + 1e-6
    assert rehearse or (seen["engine_gpu"] == seen["trainer_gpu"]) == (gpus == 1)


@pytest.mark.gpu
def test_speculation_and_prefix_caching_leave_labels_and_logprobs_as_they_are_over_20_publishes_in_flight(rehearse, report, check):
    """The same on a trained model, with drafts from the text (n-gram, 3 tokens) and without: its logits are larger than a random model's and so is the band, but no larger
    with drafts; older tokens of the same answers are further off. Accepted drafts come several tokens at once (so do steps whose outputs were not fetched one by one)."""
    if rehearse:
        pytest.skip("refused on a CPU: vLLM's sampler of drafts is wrong there")
    plain, seen = (report(f"{name}/tiny", check(1, 400, name, "tiny")) for name in ("publishes", "speculation"))
    assert len(seen["gap_mean"]) == 21 and seen["straddling"] >= 20 and seen["several_at_once"] > 2 * plain["several_at_once"]
    assert np.median(seen["gap_mean"]) <= 1.5 * np.median(plain["gap_mean"]) and max(seen["gap_mean"]) <= 2 * MEAN
    assert np.median(seen["older_mean"]) > 3 * np.median(seen["gap_mean"])


@pytest.mark.gpu
@pytest.mark.parametrize("kind, sizes", [("tied", ["tp", "cp"]), ("dense", ["tp", "cp"]), ("experts", ["ep"])])
def test_every_size_has_one_ranks_logprobs_gradient_norm_and_weights(rehearse, report, check, kind, sizes):
    """Two ranks split each way, all at once on two GPUs, beside one rank: logprobs inside the band, gradient norms within 2 %, the export and
    what a publish sends bit by bit the original, names included; and an update after saving and loading is the update before."""
    seen = report(f"sizes/{kind}", check(2, 500, "sizes", kind))
    for size in [s for s in sizes if s in seen or not rehearse]:            # a CPU has neither ring attention nor AutoModel's experts
        one, many = seen["one"], seen[size]
        assert many["exported"] and many["sent"] and many["resumed"] and many["places"] == {"tp": 1, "cp": 1, "ep": 2}[size], many
        assert many["gap_mean"] <= (EXACT if rehearse else MEAN) and many["gap_max"] <= (EXACT if rehearse else MOST), many
        assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4 if rehearse else 0.02), (one, many)
    assert rehearse or set(sizes) <= set(seen)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_what_offload_and_recomputation_save_and_cost(rehearse, report, check, kind):
    """One rank, each flag by itself, the same update: gradient norm stays, memory falls; the peak is below what rank_memory foretells."""
    seen = report(f"memory/{kind}", check(1, 500, "memory", kind))
    plain = seen["plain"]
    for name in ("activation_checkpointing", "offload_optimizer"):
        assert seen[name]["grad_norm"] == pytest.approx(plain["grad_norm"], rel=0.01)
        assert rehearse or seen[name]["peak_gb"] < plain["peak_gb"]
    assert rehearse or all(s["peak_gb"] <= s["rank_gb"] for s in seen.values())
    assert rehearse or seen["offload_optimizer"]["held_gb"] < 0.3 * plain["held_gb"]


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", [2, 1])
def test_the_trainer_sees_the_images_that_the_engine_saw_over_3_publishes(rehearse, report, check, gpus):
    """Two turns with an image each: gaps in the band at each version, further off with each other's images (while the model is the one made: updates drown what images say); the tower moves."""
    seen = report(f"images/{gpus}", check(gpus, 300, "images", "vision"))
    mean, most = (EXACT, EXACT) if rehearse else (MEAN, MOST)
    assert len(seen["gap_mean"]) == 4 and max(seen["gap_mean"]) <= mean and max(seen["gap_max"]) <= most
    assert seen["swapped_mean"][0] > 1.5 * seen["gap_mean"][0] and min(seen["older_mean"]) > 3 * max(seen["gap_mean"]) and seen["tower_moved"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_one_rank_has_float32_masters_bfloat16_compute_and_the_logprobs_of_transformers(rehearse, report, check, kind):
    """AutoModel's class under FSDP2 on one rank, from a bfloat16 checkpoint; the oracle is transformers' class in float32."""
    seen = report(f"forward/{kind}", check(1, 300, "forward", kind))
    assert seen["masters"] == seen["gradients"] == ["torch.float32"] and seen["sharded"] == ["DTensor"]
    assert seen["logits"] == "torch.bfloat16" and (rehearse or seen["class"].startswith("nemo_automodel."))
    assert seen["gap_mean"] <= MEAN and seen["gap_max"] <= MOST


@pytest.mark.gpu
def test_the_critic_learns_and_the_reference_starts_where_the_policy_does(rehearse, report, check):
    """One value a token, its error falls below a half of the first; log p under the reference equals the policy's."""
    seen = report("critic", check(1, 300, "critic", "tied"))
    assert seen["value_shape"][-1] == 1 and seen["error"][-1] < 0.5 * seen["error"][0]
    assert seen["ref_gap"] == 0.0 and seen["memory_gb"] <= seen["rank_gb"]


@pytest.mark.gpu
def test_replay_takes_the_experts_of_the_engine_and_closes_the_gap_that_near_ties_open(rehearse, report, check):
    """32 rollouts of three turns, one version, an engine with CUDA graphs; the router's scores lie about a bfloat16 step apart. Every token but the last has a
    record, prefix-cached ones too (rollouts of a prompt share it, and each turn its history); replayed gates take exactly these, and the gap is that of a dense model."""
    seen = report("replay", check(1, 580, "replay", "ties"))
    assert seen["rollouts"] == 32 and seen["turns"] == [3] and seen["finite"]
    if rehearse:                                           # a CPU's engine does not tell its experts
        assert seen["live"]["gap_max"] <= EXACT
        return
    assert seen["records"] == seen["tokens_but_last"]
    assert seen["live"]["differs"] > 0.02 and seen["replay"]["differs"] == 0.0 and 0 < seen["route_differs_frac"] <= seen["live"]["differs"]
    assert seen["replay"]["gap_mean"] <= MEAN and seen["replay"]["gap_mean"] < 0.5 * seen["live"]["gap_mean"]
    assert max(seen["replay"]["gap_mean_of_turn"]) <= MEAN


@pytest.mark.gpu
def test_gradients_of_a_replayed_forward_are_the_same_with_activations_recomputed(rehearse, report, check):
    """Random experts recorded for every token but the last; no more apart than a few times what the same backward done twice is, and far from those of the live choice."""
    seen = report("recompute", check(1, 300, "recompute", "experts"))
    assert seen["recomputed"] <= max(3 * seen["twice"], 2e-3)
    assert rehearse or seen["live"] > 10 * seen["recomputed"]


@pytest.mark.gpu
def test_an_engine_that_leaves_the_trainer_too_little_is_refused_before_anything_starts(rehearse, tmp_path):
    """One GPU, 95 % of it for the engine: exit code 2, and the message names the flags that help."""
    if rehearse or torch.cuda.device_count() == 0:
        pytest.skip("needs a GPU")
    run = subprocess.run([sys.executable, str(ROOT / "train.py"), "--gpu-memory-utilization", "0.95", "--tokens-per-microbatch", "4000000", "--name", "refused"], cwd=tmp_path,
                         env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"}, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2 and "share one GPU" in run.stdout and "--tokens-per-microbatch" in run.stdout


@pytest.mark.gpu
@pytest.mark.long
def test_the_quick_start_learns_on_one_gpu(rehearse, report):
    """`python train.py --estimator grpo` with nothing else: held-out greedy accuracy rises by 0.1 at least."""
    name = f"gpu-quick-{int(time.time())}"
    rows, seconds = train(ROOT / "runs" / name, 1, 600, ["train.py", "--estimator", "grpo", "--name", name] + ["--device", "cpu"] * rehearse)
    greedy = [r["eval/greedy"] for r in rows if "eval/greedy" in r]
    report("quick_start", {"seconds": seconds, "greedy": greedy, "gap_mean": gaps_of(rows), "rows": [rows[1], rows[len(rows) // 2], rows[-1]]})
    assert greedy[-1] >= greedy[0] + 0.1 and max(gaps_of(rows)) <= MEAN


@pytest.mark.gpu
@pytest.mark.long
def test_smollm2_reaches_030_on_chain_sum_within_five_minutes_on_one_gpu(rehearse, report, request):
    """recipes/smollm2.py, warm-up included; the model is models/smollm2, or what --smollm2 names."""
    model = Path(request.config.getoption("--smollm2"))
    if not model.is_dir():
        pytest.skip(f"no model at {model}: python recipes/smollm2.py --prepare-only")
    name, flags = f"gpu-smollm2-{int(time.time())}", ["--device", "cpu", "--steps", "2"] if rehearse else ["--enforce-eager"]
    rows, seconds = train(ROOT / "runs" / name, 1, 600, ["recipes/smollm2.py", "--model", str(model), "--", "--name", name, *flags])
    greedy = [r["eval/greedy"] for r in rows if "eval/greedy" in r]
    report("smollm2", {"seconds": seconds, "greedy": greedy, "gap_mean": gaps_of(rows), "rows": [rows[1], rows[len(rows) // 2], rows[-1]]})
    assert rehearse or (max(greedy) >= 0.30 and seconds < 300 and max(gaps_of(rows)) <= 0.08)    # larger logits than a random model's, so a wider band


# ---------------------------------------------------------------------------------------------------- models of the checks
def make_model(kind: str, path: Path, tiny: bool) -> None:
    """Random weights in bfloat16 (tiny: float32) under the embedded policy's tokenizer: Qwen3-0.6B's shape with a tied head or one of its own, or 1.2B in 32 experts,
    with `ties` under routers whose rows are nearly one row: scores of about 0.6 that lie about 0.004 apart, the step of a bfloat16 there."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    if kind == "vision":               # vLLM's Qwen2.5-VL imports torchvision
        from recipes import make_vision

        architecture = "qwen2_5_vl" if importlib.util.find_spec("torchvision") else "idefics3"
        return make_vision.make(make_vision.Config(str(path), architecture, width=64 if tiny else 1024, layers=2 if tiny else 16))
    shape = dict(vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096)
    experts = dict(num_hidden_layers=16, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=512, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
    if tiny:
        shape |= dict(vocab_size=300, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
        experts |= dict(num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
    dtype = torch.float32 if tiny else torch.bfloat16
    torch.manual_seed(0)
    with torch.device("cpu" if tiny else "cuda"):
        if kind in ("experts", "ties"):
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape | experts, tie_word_embeddings=False, eos_token_id=258, dtype=dtype))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=kind == "tied", eos_token_id=258, dtype=dtype))
    for gate in (p for name, p in model.named_parameters() if kind == "ties" and name.endswith("mlp.gate.weight")):
        gate.data = gate[:1] + 0.05 * (gate - gate[:1]).detach()
    model.to(dtype).save_pretrained(path)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(path)


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
SPECULATION = '{"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}, "enable_prefix_caching": true}'


def count_several(engine) -> None:
    """From here on `engine.several` counts the outputs that bring more than one token: accepted drafts, and steps that this loop was too late to fetch one by one."""
    generate, engine.several = engine.llm.generate, 0

    async def counting(*args, **kwargs):
        async for output in generate(*args, **kwargs):
            engine.several += len(output.outputs[0].token_ids) > 1
            yield output

    engine.llm.generate = counting


async def publishes(model: str, device: str, engine_args: str = "{}", count: int = 20, in_flight: int = 64) -> dict:
    """Sample without pause while versions 0 .. count are published; score what ends under each while the trainer holds it."""
    from agent import Trajectory
    from estimators import collate
    from generator import GeneratorConfig, Sampling
    from losses import AGGREGATIONS
    from train import Config, resolve, start, waiting
    from trainer import TrainerConfig
    from weight_sync import publish

    in_flight, wanted = (16, 200) if device == "cpu" else (in_flight, 1000)    # wanted: tokens of a version to score
    cfg = Config(model=model, device=device, trainer=TrainerConfig(learning_rate=1e-4, warmup_steps=0, decay="constant", tokens_per_microbatch=2048),
                 generator=GeneratorConfig(agent=str(ROOT / "recipes/arithmetic.py"), partial_rollout=True, context_length=1024, max_new_tokens=900, enforce_eager=True, gpu_memory_utilization=0.15, engine_args=engine_args))
    plan, began = resolve(cfg), time.monotonic()
    parts = await start(cfg, plan)
    ready, engine, trainer, draw = time.monotonic() - began, parts.engines[0], parts.trainer, random.Random(0)
    ended, serial, stop = [], iter(range(10**9)), False

    async def keep_sampling() -> None:
        while not stop:
            prompt = np.asarray([draw.randrange(2, 250) for _ in range(32)], np.int32)
            answer, = await engine.generate.remote([(f"r{next(serial)}", prompt, draw.randrange(40, 400), [])], [Sampling()])
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
    seen = {"transfer": plan.transfer, "ready_seconds": ready, "gap_mean": [], "gap_max": [], "older_mean": [], "tokens": [], "publish_seconds": [], "straddling": 0}
    await engine.__ray_call__.remote(count_several)
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
            publish_began = time.monotonic()
            await publish(trainer, parts.engines, version + 1, partial(waiting, deadline=120))
            seen["publish_seconds"].append(time.monotonic() - publish_began)
    stop = True
    seen["several_at_once"] = await engine.__ray_call__.remote(lambda self: self.several)
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
                 generator=GeneratorConfig(agent=str(agent), context_length=1024, max_new_tokens=48, gpu_memory_utilization=0.3))
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
                 generator=GeneratorConfig(agent=str(ROOT / "recipes/colour.py"), context_length=512, max_new_tokens=16, enforce_eager=True, gpu_memory_utilization=0.15, kv_cache_gb=0.1))
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


def bare_rank(model: str, device: str, ref: bool = False, critic: bool = False, **flags):
    """A Rank of this process, the only one, computing in bfloat16."""
    from losses import LossConfig
    from trainer import Rank, TrainerConfig

    rank = Rank.__ray_metadata__.modified_class(0, 1, model, TrainerConfig(warmup_steps=0, decay="constant", **flags), LossConfig(), device, "bfloat16", 10, 0)
    rank.start("127.0.0.1", 29000 + random.randrange(900), ref, critic)
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
        metrics = rank.update(batch, [everything], "value")
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
        port, world = str(29000 + random.randrange(900)), SIZES[name].get("trainers", 1)
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
    metrics = me.update(batch, [mine], "ppo")
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
            metrics = rank.update(batch, [everything], "ppo")
            seconds = time.monotonic() - began
            seen[name] = seen.get(name) or {"grad_norm": metrics["grad_norm"][0] / metrics["grad_norm"][1]}
        gb = (torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30) if device == "cuda" else (0.0, 0.0)
        seen[name] |= {"update_seconds": seconds, "held_gb": gb[0], "peak_gb": gb[1], "rank_gb": sum(rank_memory(Shape.of(config), config, rank.cfg, 0, 0).values())}
        del rank
        dist.destroy_process_group()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return seen


def main(name: str, model: str, device: str, *more: str) -> None:
    """Make a model, its kind being the directory's name, or run one check on it; the last line printed is its numbers."""
    import ray

    from train import quiet, start_ray

    quiet()
    if name == "make":
        return make_model(Path(model).name, Path(model), tiny=device == "cpu")
    if name in ("publishes", "speculation", "replay", "images"):
        start_ray(None)
        try:
            seen = asyncio.run({"replay": replay, "images": images}[name](model, device) if name in ("replay", "images") else publishes(model, device, SPECULATION if name == "speculation" else "{}"))
        finally:
            ray.shutdown()
    else:
        seen = {"forward": forward, "critic": critic, "recompute": recompute, "sizes": sizes, "size": size, "memory": memory}[name](model, device, *more)
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(*sys.argv[1:])
