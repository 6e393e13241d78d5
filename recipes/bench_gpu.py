"""How close to the floor: generation against raw vLLM, training against a plain AutoModel step, publish, and the asynchronous step against both, in one run.

    python recipes/bench_gpu.py                     Qwen3-0.6B's shape, random weights, 64 prompts x 8 rollouts of 128 + 512 tokens; two GPUs
    python recipes/bench_gpu.py --parts training publish -- --gpu-memory-utilization 0.2      on one GPU, which the engine shares
    python recipes/bench_gpu.py --kind experts --parts training steps       a mixture of 1.2B in 32 experts
    python recipes/bench_gpu.py --tiny              the same programs on a CPU, for whoever changes them; its ratios mean nothing

Every figure is a ratio to something measured in the same run, on the same actors. The tables also go to runs/bench_gpu-<kind>.json.
"""

import asyncio
import itertools
import json
import random
import statistics
import string
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import ray
import torch
import tyro
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from agent import Trajectory, render_prompt  # noqa: E402
from estimators import ESTIMATORS, collate  # noqa: E402
from generator import AgentWorker, Sampling, read_prompts  # noqa: E402
from losses import AGGREGATIONS  # noqa: E402
from recipes.bench_overlap import generation, loop_rows  # noqa: E402
from recipes.bench_pool import table  # noqa: E402
from train import PHASES, Config, Parts, Plan, parse, quiet, resolve, start, start_ray  # noqa: E402
from weight_sync import publish  # noqa: E402

ENV = """
from agent import Env, Result

class AgentRunner(Env):
    max_turns = {turns}

    async def step(self, action):
        return Result(reward=float(len(action) % 2), terminated={turns} == 1, observation="and then?")
"""
CHAT = """
from openai import AsyncOpenAI
from agent import ChatAgent, Result

CLIENT = AsyncOpenAI(base_url="-", api_key="-", timeout=600)

class AgentRunner(ChatAgent):
    async def run(self, ctx):
        client = CLIENT.with_options(base_url=ctx.base_url, api_key=ctx.api_key)
        reply = await client.chat.completions.create(model=ctx.model, messages=ctx.messages)
        return Result(reward=float(len(reply.choices[0].message.content) % 2))
"""


@dataclass(frozen=True)
class Bench:
    """Ratios of one run on two GPUs, or one."""

    kind: Literal["dense", "experts"] = "dense"   # Qwen3-0.6B's shape with a tied head, or 1.2B in 32 experts of which a token takes 4
    parts: tuple[Literal["generation", "training", "publish", "steps"], ...] = ("generation", "training", "publish", "steps")
    tiny: bool = False                 # toy sizes, for a CPU
    warm: int = 2                      # steps that do not count
    measured: int = 3                  # steps that do
    flags: Annotated[tuple[str, ...], tyro.conf.Positional] = ()   # flags of train.py, behind --

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(prompts of a step, rollouts of each, tokens of a prompt, tokens of an answer)"""
        return (4, 2, 24, 16) if self.tiny else (64, 8, 128, 512)


# ---------------------------------------------------------------------------------------------------- model and prompts
def shapes(toy_words: int | None) -> tuple[dict, dict]:
    """(Qwen3-0.6B's sizes, what a mixture of 1.2B in 32 experts has instead or besides), as fields of transformers' configs; `toy_words`: toy sizes with so many words."""
    shape = dict(vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096)
    experts = dict(num_hidden_layers=16, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=512, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
    if toy_words:
        shape |= dict(vocab_size=toy_words, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
        experts |= dict(num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
    return shape, experts


def make_model(kind: str, tiny: bool, path: Path) -> None:
    """Random weights of Qwen3-0.6B's shape (or a mixture's), under a byte-level tokenizer with as many words as Qwen3's: all of one, two and three letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from recipes.make_tiny import CHATML

    words, letters = 2000 if tiny else 151_643, string.ascii_letters + string.digits
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a, b in itertools.product(letters, repeat=2)]
    merges = list(itertools.islice(itertools.chain(merges, ((a + b, c) for (a, b), c in itertools.product(merges, letters))), words - len(alphabet)))
    raw = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate([*alphabet, *(a + b for a, b in merges)])}, merges=merges))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=["<|im_start|>"])
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(path)
    shape, experts = shapes(2048 if tiny else None)
    dtype = torch.float32 if tiny else torch.bfloat16
    with torch.device("cpu" if tiny else "cuda"):
        torch.manual_seed(0)
        common = dict(eos_token_id=tokenizer.eos_token_id, dtype=dtype)
        model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True, **common)) if kind == "dense" else Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape | experts, tie_word_embeddings=False, **common))
    model.to(dtype).save_pretrained(path)


def make_prompts(tokenizer, count: int, tokens: int, path: Path) -> None:
    """Random texts that are `tokens` tokens with the template around them, or a few less."""
    draw = random.Random(0)
    with path.open("w") as file:
        for i in range(count):
            text = "".join(draw.choices(string.ascii_letters, k=4 * tokens))
            while len(render_prompt(tokenizer, text)) > tokens:
                text = text[: -max(1, len(render_prompt(tokenizer, text)) - tokens)]
            file.write(json.dumps({"prompt": text, "split": "train" if i else "eval"}) + "\n")


# ---------------------------------------------------------------------------------------------------- generation
async def inside(engine, function: Callable, *args) -> tuple[float, Any]:
    """(seconds by the engine actor's own clock, result) of `await function(AsyncLLM, *args)` in that actor, with nothing of ours around it."""
    def begin(self, function, *args) -> None:
        async def timed() -> tuple[float, Any]:
            await self.llm.reset_prefix_cache()
            began = time.monotonic()
            result = await function(self.llm, *args)
            return time.monotonic() - began, result
        self.bench = asyncio.run_coroutine_threadsafe(timed(), self.loop)

    await engine.__ray_call__.remote(begin, function, *args)
    while (out := await engine.__ray_call__.remote(lambda self: self.bench.result() if self.bench.done() else None)) is None:
        await asyncio.sleep(0.2)
    return out


async def replay(llm, conversations: list[list[tuple[list[int], int]]]) -> int:
    """Raw vLLM: (prompt, tokens to sample) of each turn after the one before it, conversations all at once. Returns the number of sampled tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    async def converse(i: int, turns: list) -> int:
        total = 0
        for turn, (ids, tokens) in enumerate(turns):
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
            async for output in llm.generate({"prompt_token_ids": ids}, params, request_id=f"raw-{time.monotonic()}-{i}-{turn}"):
                total += len(output.outputs[0].token_ids)
        return total

    return sum(await asyncio.gather(*[converse(i, turns) for i, turns in enumerate(conversations)]))


async def through(parts: Parts, prompts: list[dict], samples: int, name: str) -> tuple[float, list]:
    """(seconds, rollouts) of every prompt's rollouts, started all at once on the parts' workers."""
    await inside(parts.engines[0], nothing)
    began = time.monotonic()
    groups = await asyncio.gather(*[parts.run_groups([(n, prompt)], n, samples, 1.0, None, name) for n, prompt in enumerate(prompts)])
    seconds = time.monotonic() - began
    assert not any(g.dropped for groups in groups for g in groups), next(g.errors for groups in groups for g in groups if g.dropped)
    return seconds, [segments for groups in groups for g in groups for segments in g.rollouts]


async def nothing(llm) -> None:
    pass


def turns_of(segment: Trajectory) -> list[tuple[list[int], int]]:
    """(prompt, tokens sampled) of each turn of a trajectory."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], segment.response_mask, [False]]).astype(int)))
    return [(segment.token_ids[:begin].tolist(), int(end - begin)) for begin, end in edges.reshape(-1, 2)]


async def generations(cfg: Config, plan: Plan, parts: Parts, bench: Bench, directory: Path) -> list[dict]:
    """Tokens/s of raw vLLM, of an Env, of a chat agent over its real client, and of four turns against a replay of their tokens."""
    prompts, samples, _, answer = bench.sizes
    questions = read_prompts(cfg.generator, "train")[:prompts]
    agents = {"Env, one turn": (ENV.format(turns=1), answer), "ChatAgent, OpenAI client": (CHAT, answer), "Env, four turns": (ENV.format(turns=4), answer // 4)}
    rows, own = [], parts.workers
    for number, (what, (source, tokens)) in enumerate(agents.items()):
        file = directory / f"agent{number}.py"
        file.write_text(source)
        gen = replace(cfg.generator, agent=str(file), max_new_tokens=tokens)
        parts.workers = [AgentWorker.options(num_cpus=0, max_concurrency=100_000).remote(plan.model, gen) for _ in range(gen.agent_workers)]
        await through(parts, questions[:2], 1, f"warm-{number}")                   # imports, and the chat server's start
        seconds, rollouts = await through(parts, questions, samples, f"bench-{number}")
        sampled = sum(int(s.response_mask.sum()) for segments in rollouts for s in segments)
        floor, raw = await inside(parts.engines[0], replay, [turns_of(segments[0]) for segments in rollouts])
        rows.append({"what": what, "tokens": sampled, "rate": sampled / seconds, "raw": raw / floor, "ratio": sampled / seconds * floor / raw})
        for worker in parts.workers:
            ray.kill(worker)
    parts.workers = own
    return rows


# ---------------------------------------------------------------------------------------------------- training
def random_batch(cfg: Config, vocabulary: int, lengths: list[int], prompt: int):
    """Rollouts of random tokens: `prompt` given ones, then as many sampled as `lengths` says; as the loop would have them."""
    draw, rollouts, group = np.random.default_rng(0), [], cfg.generator.group_size
    for i, n in enumerate(lengths):
        trajectory = Trajectory(rollout=i, group=i // group, reward=float(i % 2))
        trajectory.extend(draw.integers(0, vocabulary, prompt))
        trajectory.extend(draw.integers(0, vocabulary, n), logprobs=np.full(n, -np.log(vocabulary)), policy_versions=[0] * n)
        rollouts.append([trajectory])
    return collate(rollouts, AGGREGATIONS[cfg.losses.aggregation], cfg.generator.temperature, cfg.trainer.minibatches, version=0)


def plain_step(rank, token_ids: torch.Tensor, lengths: torch.Tensor, budget: int, repeat: int) -> float:
    """Median seconds of a plain AutoModel step in a rank's process: its class under the same FSDP2 and dtypes, rows [B, T] as they come in
    micro-batches of `budget` tokens, AutoModel's own loss, backward, AdamW. No logprobs kept, no metrics, no clipping."""
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy

    from trainer import load_model

    model, _ = load_model(rank.path, rank.dtype, rank.device, rank.cfg)
    optimizer, loss_of, seconds = torch.optim.AdamW(model.parameters(), lr=1e-6), MaskedCrossEntropy(), []
    for _ in range(repeat):
        began = time.monotonic()
        row = 0
        while row < len(lengths):
            rows = max(1, budget // int(lengths[row: row + max(1, budget // token_ids.shape[1])].max()))
            longest = int(lengths[row: row + rows].max())
            ids = token_ids[row: row + rows, :longest].long().to(rank.device)
            labels = torch.where(torch.arange(1, longest + 1, device=rank.device) < lengths[row: row + rows, None].to(rank.device), ids.roll(-1, 1), -100)
            (loss_of(model(input_ids=ids, use_cache=False).logits, labels) / int(lengths.sum())).backward()
            row += rows
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    del model, optimizer
    if rank.device.type == "cuda":
        torch.cuda.empty_cache()
    return statistics.median(seconds[1:])


async def trainings(cfg: Config, plan: Plan, parts: Parts, bench: Bench) -> list[dict]:
    """Tokens/s of update, and of logprobs (which a step with one optimizer step leaves out), on rows of equal and of mixed lengths, against a plain AutoModel step on rows of equal length: nothing padded there."""
    from transformers import AutoConfig

    prompts, samples, prompt, answer = bench.sizes
    rollouts, method, rank, budget, rows = prompts * samples, ESTIMATORS[cfg.estimator], parts.trainer.ranks[0], cfg.trainer.tokens_per_microbatch, []
    vocabulary, draw = 2000 if bench.tiny else 151_643, np.random.default_rng(1)
    mixed, active = draw.integers(1, answer + 1, rollouts).tolist(), plan.shape.parameters
    if experts := plan.shape.num_experts:                                # a token takes some of them
        config = AutoConfig.from_pretrained(plan.model)
        active -= plan.shape.layer_experts * config.num_hidden_layers * (1 - config.num_experts_per_tok / experts)
    for what, lengths in (("equal", [answer] * rollouts), ("mixed", mixed)):
        batch = random_batch(cfg, vocabulary, lengths, prompt)
        tokens, seconds = int(batch.lengths.sum()), []
        plain = tokens / await rank.__ray_call__.remote(plain_step, batch.token_ids, batch.lengths, min(budget, 16_384), 3)      # by the sizes its float32 logits would not fit with more
        for _ in range(3):
            began = time.monotonic()
            batch.advantages, batch.old_logprobs = method(batch, cfg.estimation), None
            await parts.trainer.update(batch, cfg.losses.loss)
            between = time.monotonic()
            await parts.trainer.logprobs(batch)
            seconds.append((time.monotonic() - between, between - began))
        logprobs, update = (statistics.median(column) for column in list(zip(*seconds[1:])))
        unpadded = rows[0]["plain"] if rows else plain
        rows.append({"what": f"{what} lengths, {tokens:,} tokens", "logprobs": tokens / logprobs, "update": tokens / update, "plain": plain, "ratio": tokens / update / unpadded,
                     "seconds": update, "flops": 6 * active * tokens / update / 1e12})
    return rows


# ---------------------------------------------------------------------------------------------------- publish
async def publishes(cfg: Config, parts: Parts, bench: Bench) -> list[dict]:
    """Medians of the phases of a publish, engines idle and with 64 requests in flight."""
    rows, in_flight, answer = [], 4 if bench.tiny else 64, bench.sizes[-1]
    for busy in (False, True):
        seen: dict[str, list[float]] = {name: [] for name in ("pause", "send", "resume")}
        names_of = (f"publish-{busy}-{i}" for i in itertools.count())

        async def keep_sampling() -> None:
            while True:
                await parts.engines[0].generate.remote([(next(names_of), np.random.randint(300, 1300, 128, dtype=np.int32), answer, [])], [Sampling()])

        samplers = [asyncio.ensure_future(keep_sampling()) for _ in range(in_flight * busy)]
        for version in range(9):
            await asyncio.sleep(1.0)
            names = iter(seen)

            @asynccontextmanager
            async def timed(what: str):
                name, began = next(names), time.monotonic()
                yield
                seen[name].append(time.monotonic() - began)

            await publish(parts.trainer, parts.engines, version, timed)
        assert not any(sampler.done() for sampler in samplers), next(sampler for sampler in samplers if sampler.done()).exception()
        for sampler in samplers:
            sampler.cancel()
        phases = {name: statistics.median(values[1:]) for name, values in seen.items()}
        rows.append({"what": f"{in_flight * busy} requests in flight", "total": statistics.median(map(sum, list(zip(*seen.values()))[1:])), **phases})
    return rows


# ---------------------------------------------------------------------------------------------------- steps
async def steps(cfg: Config, parts: Parts, bench: Bench, trained: float) -> AsyncIterator[dict]:
    """The loop's steps, without and with partial rollout, beside generation alone, one batch after the other, and training alone."""
    ended, kept = (replace(cfg, generator=replace(cfg.generator, partial_rollout=partial)) for partial in (False, True))
    await parts.publish(0)
    rows, _ = await generation(ended, parts, 1 + bench.measured)
    alone = statistics.median(row["step_seconds"] for row in rows[1:])
    for what, own in {"ended before a publish": ended, "kept in flight over a publish": kept}.items():
        rows = (await loop_rows(own, parts, bench.warm + bench.measured + 1, cfg.generator.max_staleness))[bench.warm: -1]      # beside the last nothing is generated
        seen = {name: statistics.median(row[name] for row in rows) for name in ("step_seconds", *(f"{phase}_seconds" for phase in PHASES))}
        yield seen | {"what": what, "alone": alone, "trained": trained, "ratio": seen["step_seconds"] / max(alone, trained)}


# ---------------------------------------------------------------------------------------------------- the run
async def main(bench: Bench) -> None:
    from transformers import AutoTokenizer

    prompts, samples, prompt, answer = bench.sizes
    model = ROOT / "models" / f"bench-{bench.kind}{'-tiny' * bench.tiny}"
    if not (model / "model.safetensors").is_file():
        make_model(bench.kind, bench.tiny, model)
    quiet()
    console, report = Console(width=150), {}
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        make_prompts(AutoTokenizer.from_pretrained(model), 4 * prompts, prompt, directory / "prompts.jsonl")
        (directory / "agent.py").write_text(ENV.format(turns=1))
        size = ["--context-length", "256" if bench.tiny else "1024", "--max-num-seqs", "1024", "--max-num-batched-tokens", "8192", "--tokens-per-microbatch", "32768"]
        cfg, _ = parse(["--model", str(model), "--agent", str(directory / "agent.py"), "--prompts", str(directory / "prompts.jsonl"), "--prompts-per-step", str(prompts), "--group-size", str(samples),
                        "--max-new-tokens", str(answer), "--learning-rate", "1e-6", "--agent-workers", "1" if bench.tiny else "4", *size,
                        "--eval-every", "0", "--eval-prompts", "1", "--eval-samples", "0", "--checkpoint-every", "0", *bench.flags])
        if "generation" in bench.parts and cfg.generator.engines > 1:
            raise ValueError(f"--engines {cfg.generator.engines}: raw vLLM, which generation is compared with, is measured on one engine. Leave generation out of --parts, or take one engine.")
        start_ray(None)
        plan, began = resolve(cfg), time.monotonic()
        parts = await start(cfg, plan)
        await parts.publish(0)
        console.print(f"{bench.kind}: ready after {time.monotonic() - began:.0f} s, {plan.shape.parameters / 1e6:,.0f} M parameters, {plan.transfer}")

        def show(name: str, title: str, rows: list[dict], forms: dict) -> None:
            report[name] = rows
            console.print(table(title, rows, {"what": ("", "{}")} | forms))
            file = ROOT / "runs" / f"bench_gpu-{bench.kind}.json"
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(report, indent=1))

        if "generation" in bench.parts:
            show("generation", f"Sampled tokens/s, {prompts} prompts x {samples} at once", await generations(cfg, plan, parts, bench, directory),
                 {"tokens": ("tokens", "{:,}"), "rate": ("tokens/s", "{:,.0f}"), "raw": ("raw vLLM", "{:,.0f}"), "ratio": ("ratio", "{:.3f}")})
        if "training" in bench.parts:
            show("training", "Tokens/s of one rank, prompts included", await trainings(cfg, plan, parts, bench),
                 {"logprobs": ("logprobs", "{:,.0f}"), "update": ("update", "{:,.0f}"), "plain": ("plain AutoModel step", "{:,.0f}"), "ratio": ("update / plain, equal lengths", "{:.3f}"),
                  "seconds": ("seconds of an update", "{:.2f}"), "flops": ("update, TFLOP/s", "{:.0f}")})
        if "publish" in bench.parts:
            show("publish", "Seconds of a publish, medians of 8", await publishes(cfg, parts, bench),
                 {name: (name, "{:.3f}") for name in ("total", "pause", "send", "resume")})
        if "steps" in bench.parts:
            rows = []
            async for row in steps(cfg, parts, bench, report["training"][0]["seconds"] if "training" in report else 0.0):
                rows.append(row)
                show("steps", f"Seconds of a step, medians of {bench.measured}", rows, {"step_seconds": ("step", "{:.2f}"), "alone": ("generation alone", "{:.2f}"), "trained": ("training alone", "{:.2f}"), "ratio": ("step / larger", "{:.3f}")}
                     | {f"{phase}_seconds": (phase, "{:.2f}") for phase in PHASES})
        await asyncio.wait([asyncio.ensure_future(e.stop.remote()) for e in parts.engines], timeout=10)
        ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(Bench)))
