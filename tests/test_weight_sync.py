"""The three invariants on the real stack: what the engine samples with is what the trainer holds, by version and number."""

import asyncio
import shutil
import time
import types
from functools import partial

import numpy as np
import pytest
import ray
import torch

from agent import Trajectory
from estimators import collate, supervised_batch
from generator import GeneratorConfig, Sampling
from losses import AGGREGATIONS
from recipes.arithmetic import prompts
from train import Config, resolve, start, waiting
from trainer import TrainerConfig
from weight_sync import EngineClient, PolicySource, Receiver, publish

from conftest import ROOT, TINY


def moe(vocabulary: int):
    """A random mixture of 8 experts, 2 layers, tied head."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=512, eos_token_id=258, tie_word_embeddings=True, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2))


async def rollouts(cfg, parts, count: int, name: str, engine: int = 0) -> list:
    """`count` sampled single-turn rollouts on one engine."""
    groups = await parts.workers[0].run_groups.remote(list(enumerate(prompts("train")[:count])), parts.engines[engine], 1, cfg.generator.temperature, cfg.seed, name)
    return [r for g in groups for r in g.rollouts]


async def gap(cfg, parts, sampled: list) -> float:
    """max |trainer logprob - engine logprob| over the sampled tokens, in nats."""
    batch = collate(sampled, AGGREGATIONS["token-mean"], cfg.generator.temperature)
    difference = await parts.trainer.logprobs(batch) - batch.behaviour_logprobs
    return difference[batch.response_mask].abs().max().item()


async def update(cfg, parts, sampled: list) -> None:
    """A real update that changes the weights: alternate advantages, two epochs of the run's loss."""
    batch = collate(sampled, AGGREGATIONS["token-mean"], cfg.generator.temperature)
    batch.old_logprobs = await parts.trainer.logprobs(batch)
    batch.advantages = batch.spread(torch.tensor([1.0, -1.0]).repeat(len(sampled))[: len(sampled)])
    await parts.trainer.update(batch, "ppo")


def test_forward_consistency_over_publishes_and_after_a_real_update(trained, loop):
    """Float32: at most 1e-4 nats over 20 rollouts, the same after 5 publishes of unchanged weights; after an update and a
    publish the engine agrees with the new weights to 1e-4, differs from the old ones, and its tokens carry the new version."""
    cfg, parts = trained

    async def scenario():
        version = 10
        await parts.publish(version)
        before = await rollouts(cfg, parts, 20, "before")
        assert await gap(cfg, parts, before) <= 1e-4
        for _ in range(5):
            version += 1
            await parts.publish(version)
        again = await rollouts(cfg, parts, 20, "again")
        assert await gap(cfg, parts, again) <= 1e-4
        assert {v for r in again for v in r[0].policy_versions[r[0].response_mask]} == {version}
        await update(cfg, parts, again)
        assert await gap(cfg, parts, again) > 1e-2                             # the trainer moved, the engine's tokens are the old weights'
        await parts.publish(version + 1)
        after = await rollouts(cfg, parts, 20, "after")
        assert await gap(cfg, parts, after) <= 1e-4
        assert {v for r in after for v in r[0].policy_versions[r[0].response_mask]} == {version + 1}

    loop.run_until_complete(scenario())


def test_b17_a_cached_prefix_of_the_old_weights_is_not_used_after_a_publish(trained, loop):
    """A prompt of 100 tokens (3 cache blocks of 32) at version 20, an update, the same prompt again: the new weights' logprobs."""
    cfg, parts = trained
    prompt = np.array([60 + i % 30 for i in range(100)], np.int32)

    async def sample(name):
        completion = (await parts.engines[0].generate.remote([(name, prompt, 8, [])], [Sampling(cfg.generator.temperature)]))[0]
        trajectory = Trajectory(0, 0, reward=0.0)
        trajectory.extend(prompt)
        trajectory.extend(completion.token_ids, completion.logprobs, completion.policy_versions)
        return [[trajectory]]

    async def scenario():
        await parts.publish(20)
        first = await sample("first")
        assert await gap(cfg, parts, first) <= 1e-4 and await gap(cfg, parts, await sample("cached")) <= 1e-4
        await update(cfg, parts, await rollouts(cfg, parts, 8, "u"))
        await parts.publish(21)
        assert await gap(cfg, parts, await sample("second")) <= 1e-4

    loop.run_until_complete(scenario())


class Model(torch.nn.Module):
    """A stand-in for vLLM's model: two fused parameters of 12 elements, loaded in parts of 4."""

    def __init__(self):
        super().__init__()
        self.qkv, self.mlp = torch.nn.Parameter(torch.zeros(12)), torch.nn.Parameter(torch.zeros(12))

    def load_weights(self, weights):
        return {"qkv" if name.startswith("q") else "mlp" for name, _ in weights}


def test_b18_coverage_names_a_parameter_that_no_part_or_only_some_parts_reached():
    worker = Receiver()
    model = Model()
    worker.model_runner = types.SimpleNamespace(get_model=lambda: model)
    model.mlp = torch.nn.Parameter(torch.zeros(0))           # packed, as a CPU engine's linears are outside an update
    worker.watch_weights()
    model.mlp = torch.nn.Parameter(torch.zeros(12))
    for name in ("qa", "qb", "qc", "ma", "mb"):
        model.load_weights([(name, torch.zeros(4))])
    assert worker.missing_weights() == ["mlp"]               # 8 of its 12 elements
    for name in ("qa", "qb", "qc", "ma", "mb", "mc"):
        model.load_weights([(name, torch.zeros(4))])
    assert worker.missing_weights() == []
    model.load_weights([(name, torch.zeros(4)) for name in ("qa", "qb", "qc", "ma", "mb")])     # all at once, as later updates come
    assert worker.missing_weights() == ["mlp"]
    assert worker.missing_weights() == ["qkv", "mlp"]        # a publish that loaded nothing is an error too


def test_b18_a_tied_head_is_covered_by_the_embedding_although_an_update_gives_it_a_placeholder():
    """Both names are one parameter when the engine starts; during an update vLLM holds two, and only the first is ever loaded."""
    model, worker = Model(), Receiver()
    model.head = model.qkv
    worker.model_runner = types.SimpleNamespace(get_model=lambda: model)
    worker.watch_weights()
    model.head = torch.nn.Parameter(torch.zeros(12))
    for name in ("qa", "qb", "qc", "ma", "mb", "mc"):
        model.load_weights([(name, torch.zeros(4))])
    assert worker.missing_weights() == []


class Worker(Receiver):
    """A stand-in for vLLM's worker, with its three calls of an update."""

    def __init__(self):
        model, self.calls = Model(), []
        self.model_runner = types.SimpleNamespace(get_model=lambda: model)
        self.watch_weights()

    def start_weight_update(self):
        self.calls.append("start")

    def update_weights(self, info):
        self.calls.append("update")
        self.model_runner.get_model().load_weights([(name, torch.zeros(4)) for name in info["names"]])

    def finish_weight_update(self):
        self.calls.append("finish")


@pytest.mark.parametrize("whole", [True, False])
def test_a_publish_is_one_call_of_an_engine_or_one_a_buffer_and_says_in_the_end_what_is_missing(monkeypatch, whole):
    """nccl and gloo tell of all weights at once: one call, not four. ipc of a buffer of them: two buffers and the end are three. vLLM's order holds in both, twice over; what was loaded before counts no more."""
    import ray

    names, worker, calls = ["qa", "qb", "qc", "ma", "mb", "mc"], Worker(), []

    def receive(info, last):
        calls.append(last)
        return worker.receive(info, last)

    client = EngineClient([types.SimpleNamespace(receive=types.SimpleNamespace(remote=receive))], 1, whole)
    told = []
    monkeypatch.setattr(ray, "get", told.extend)
    for sent in (names, names[:5]):
        client.start_weight_update()
        for buffer in [sent] if whole else [sent[:3], sent[3:]]:
            client.update_weights({"names": buffer})
        client.finish_weight_update()
    assert calls == ([True] if whole else [False, False, True]) * 2
    assert worker.calls == (["start", "update", "finish"] if whole else ["start", "update", "update", "finish"]) * 2
    assert told == ([[], ["mlp"]] if whole else [[], [], [], [], [], ["mlp"]])


def test_b18_the_source_sends_small_tensors_exact_and_a_tied_head_when_the_engine_has_its_own():
    """1.001 and 1.002 are one number in bfloat16: the router [8, 128] must travel in float32, the embedding [9000, 128] in bfloat16.

    Stacked experts travel one by one under their checkpoint names, and metadata says what iteration yields.
    """
    model = moe(vocabulary=9000)
    torch.nn.init.constant_(model.model.layers[0].mlp.gate.weight, 1.001)
    sent = dict(PolicySource(model, torch.bfloat16, torch.device("cpu"), tied_head=True))
    assert sent["model.layers.0.mlp.gate.weight"].unique().tolist() == pytest.approx([1.001], abs=1e-7)
    assert sent["model.embed_tokens.weight"].dtype == torch.bfloat16 and torch.equal(sent["lm_head.weight"], sent["model.embed_tokens.weight"])
    assert sent["model.layers.1.mlp.experts.7.down_proj.weight"].shape == (128, 64) and not [n for n in sent if n.endswith("experts.down_proj")]
    assert "lm_head.weight" not in dict(PolicySource(model, torch.bfloat16, torch.device("cpu"), tied_head=False))
    assert [(m.name, m.dtype, m.shape) for m in PolicySource(model, torch.bfloat16, torch.device("cpu"), True).metadata()] == [(n, t.dtype, tuple(t.shape)) for n, t in sent.items()]


def test_the_library_is_asked_once_for_the_name_of_what_a_checkpoint_holds_as_it_is(monkeypatch):
    """transformers walks the whole model for each answer: 0.6 ms. Stacked experts are converted each time; what is sent stays the same, after an update too."""
    import weight_sync

    asked, to_hf, model = [], weight_sync.to_hf, moe(vocabulary=300)
    monkeypatch.setattr(weight_sync, "to_hf", lambda model, name, tensor: asked.append(name) or to_hf(model, name, tensor))
    source = PolicySource(model, torch.bfloat16, torch.device("cpu"), tied_head=False)
    first, names = dict(source), set(asked)
    asked.clear()
    with torch.no_grad():
        for p in model.parameters():
            p += 1.0
    second = dict(source)
    assert names == {name for name, _ in model.named_parameters()} and set(asked) == {name for name in names if ".experts." in name}
    assert first.keys() == second.keys()
    fresh = dict(PolicySource(model, torch.bfloat16, torch.device("cpu"), tied_head=False))
    assert all(torch.equal(second[name], fresh[name]) for name in fresh) and not torch.equal(second["model.norm.weight"], torch.ones(128))
    metadata = source.metadata()
    asked.clear()
    assert source.metadata() == metadata and not asked


def test_a_publish_that_leaves_a_parameter_behind_fails_the_run_and_names_it(loop):
    """publish with an engine that reports a missing parameter: RuntimeError with its name."""
    from types import SimpleNamespace

    calls = []

    def actor(**replies):
        async def call(name, *args):
            calls.append(name)
            return replies.get(name)
        return SimpleNamespace(**{name: SimpleNamespace(remote=lambda *a, name=name: call(name, *a)) for name in ("pause", "resume")})

    async def send():
        calls.append("send")

    trainer = SimpleNamespace(send_weights=send)
    with pytest.raises(RuntimeError, match="version 3 did not reach 1 engine parameters: model.layers.1.qkv"):
        loop.run_until_complete(publish(trainer, [actor(resume=["model.layers.1.qkv"])], 3, partial(waiting, deadline=5)))
    assert calls == ["pause", "send", "resume"]
    calls.clear()
    loop.run_until_complete(publish(trainer, [actor(resume=[])], 3, partial(waiting, deadline=5)))
    assert calls == ["pause", "send", "resume"]


def test_b19_a_publish_that_stalls_raises_within_its_deadline_and_says_what_it_waited_for(loop):
    from types import SimpleNamespace

    async def nothing():
        return []

    async def never():
        await asyncio.Event().wait()

    engine = SimpleNamespace(**{name: SimpleNamespace(remote=nothing) for name in ("pause", "resume")})
    with pytest.raises(TimeoutError, match="waited 0 s for the weights of version 3 to be sent"):
        loop.run_until_complete(publish(SimpleNamespace(send_weights=never), [engine], 3, partial(waiting, deadline=0.05)))


@pytest.mark.long
@pytest.mark.parametrize("kind, trainers, engines", [("dense", 2, 2), ("dense", 4, 1), ("experts", 1, 1)])
def test_b18_b19_every_rank_and_engine_of_a_transfer_group_holds_the_published_weights(cluster, hostile_model, loop, tmp_path, kind, trainers, engines):
    """Every engine has a rank of its own and every gather is joined by all trainer ranks: 3 updates of all parameters and
    publishes, all engines agree with the sharded trainer to 1e-4, a mixture of experts with a tied head too."""
    model = hostile_model
    if kind == "experts":
        model = str(tmp_path / "moe")
        shutil.copytree(TINY, model)
        moe(vocabulary=262).save_pretrained(model)
    cfg = Config(model=model, device="cpu", dtype="float32", generator=GeneratorConfig(agent=str(ROOT / "recipes/arithmetic.py"), engines=engines, temperature=0.7),
                 trainer=TrainerConfig(trainers=trainers, learning_rate=1e-3, warmup_steps=0, decay="constant"))

    async def scenario():
        parts = await start(cfg, resolve(cfg))
        for version in range(4):
            await asyncio.wait_for(parts.publish(version), 60)
            for engine in range(engines):
                sampled = await rollouts(cfg, parts, 8, f"v{version}", engine)
                assert await gap(cfg, parts, sampled) <= 1e-4
                assert {v for r in sampled for v in r[0].policy_versions[r[0].response_mask]} == {version}
            await update(cfg, parts, sampled)
        await asyncio.gather(*[e.stop.remote() for e in parts.engines])
        for actor in parts.engines + parts.workers + parts.trainer.ranks:
            ray.kill(actor)

    loop.run_until_complete(scenario())


@pytest.mark.long
def test_b16_a_rollout_that_straddles_a_publish_carries_both_versions_token_exact(cluster, loop, tmp_path):
    """24 answers of up to 400 tokens by a policy of random weights (hardly ever an end), a publish of changed weights in their middle. Every
    token's logprob equals that of the weights of its version, recomputed by transformers: version 0 up to the boundary,
    version 1 from it on; the very next token on either side would be off by more than the band under the other weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from recipes.make_tiny import make_model

    shutil.copytree(TINY, tmp_path / "random")
    make_model(AutoTokenizer.from_pretrained(TINY), 128, 4, seed=5).save_pretrained(tmp_path / "random")
    cfg = Config(model=str(tmp_path / "random"), device="cpu", dtype="float32", trainer=TrainerConfig(learning_rate=3e-3, warmup_steps=0, decay="constant"),
                 generator=GeneratorConfig(agent=str(ROOT / "recipes/arithmetic.py"), partial_rollout=True, context_length=512, max_new_tokens=400))

    async def scenario():
        parts = await start(cfg, resolve(cfg))
        await parts.publish(0)
        await parts.trainer.export(tmp_path / "0")
        await parts.trainer.update(supervised_batch([([60, 61], [62, 63, 64])], AGGREGATIONS["token-mean"]), "sft")
        await parts.trainer.export(tmp_path / "1")
        requests = [(f"long-{i}", np.asarray([261, 60 + i, 61], np.int32), 400, []) for i in range(24)]
        for _ in range(2):                                 # the second, warm, says how long 40 tokens of each take
            began = time.monotonic()
            await parts.engines[0].generate.remote([(f"{name}-{began}", prompt, 40, stop) for name, prompt, _, stop in requests], [Sampling()] * 24)
        seconds = time.monotonic() - began
        answers = asyncio.ensure_future(asyncio.wait_for(parts.engines[0].generate.remote(requests, [Sampling()] * 24), 120))
        await asyncio.sleep(3 * seconds)                   # about 120 of 400 tokens
        await parts.publish(1)
        answers = await answers
        for actor in parts.engines + parts.workers + parts.trainer.ranks:
            ray.kill(actor)
        return requests, answers

    requests, answers = loop.run_until_complete(scenario())
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / v) for v in "01"]
    straddling, apart = 0, []
    for (_, prompt, _, _), answer in zip(requests, answers):
        ids = torch.tensor(np.concatenate([prompt, answer.token_ids]))[None].long()
        with torch.no_grad():
            under = [(m(ids).logits[0, len(prompt) - 1:-1]).log_softmax(-1).gather(1, ids[0, len(prompt):, None])[:, 0].numpy() for m in models]
        versions = answer.policy_versions
        assert len(versions) == len(answer.token_ids) == len(answer.logprobs) <= 400 and (np.diff(versions) >= 0).all()
        np.testing.assert_allclose(answer.logprobs, np.where(versions == 0, *under), atol=1e-4)
        if set(versions.tolist()) == {0, 1}:
            straddling += 1
            edge = int((versions == 0).sum())
            apart += [abs(under[0][t] - under[1][t]) for t in (edge - 1, edge)]
    assert straddling >= 8 and np.median(apart) > 1e-3
