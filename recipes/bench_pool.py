"""What the control plane costs: pool, agent worker and Ray around an engine that computes nothing.

    python recipes/bench_pool.py               about 2 minutes; driver, worker and engine are pinned to one core

1. Overhead: thousands of rollouts in flight at once, of up to 32k tokens, with publishes in between, through the real Pool,
   AgentWorker and Ray: CPU of all three processes per rollout, and memory per token of what the pool holds.
2. The two orders of taking under stragglers: seconds lost at the head of the line against the bias in length.
"""

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import ray
import tyro
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from agent import Trajectory  # noqa: E402
from generator import AgentWorker, Completion, GeneratorConfig, Group, Pool, PromptStream  # noqa: E402
from recipes.arithmetic import prompts  # noqa: E402
from train import ROOT, Parts, quiet, start_ray  # noqa: E402


@dataclass(frozen=True)
class Config:
    """Overhead of the pool, and its two orders of taking under stragglers."""

    rollouts: tuple[int, ...] = (1000, 2000, 4000, 10_000)   # in flight at once, a multiple of group_size
    group_size: int = 8                # rollouts of a prompt
    longest: int = 32_768              # tokens of prompt and answer at most; answers' lengths are log-uniform from 16
    publishes: int = 4                 # versions that pass while the rollouts are in flight
    steps: int = 200                   # training steps of the comparison of orders
    training: float = 0.05             # seconds of each


@ray.remote(max_concurrency=100_000, concurrency_groups={"control": 1})
class ScriptedEngine:
    """Takes requests like Engine and answers all of them when told to: as many tokens as the draw says, of the versions that passed."""

    def __init__(self, longest: int):
        self.draw, self.longest, self.version, self.waiting, self.go = np.random.default_rng(0), longest, 0, 0, asyncio.Event()

    async def generate(self, requests, sampling) -> list[Completion]:
        self.waiting += len(requests)
        await self.go.wait()
        lengths = np.exp(self.draw.uniform(np.log(16), np.log(self.longest - 64), len(requests))).astype(int)
        return [Completion(np.full(n, 65, np.int32), np.full(n, -0.1, np.float32), np.arange(n, dtype=np.int32) * (self.version + 1) // n, "stop") for n in lengths]

    async def control(self, version: int, answer: bool) -> tuple[int, int]:
        """A publish, and whether to answer; returns requests that wait and the process's id."""
        self.version = version
        if answer:
            self.go.set()
        return self.waiting, os.getpid()


def to_core(processes: list[psutil.Process], core: int) -> None:
    """Pin processes, threads that run already too."""
    for process in processes:
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


def cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in processes)


def held_bytes() -> int:
    """What the driver holds at most: its resident memory, pages of Ray's object store that it read among it."""
    return psutil.Process().memory_info().rss


async def overhead(cfg: Config, rollouts: int, empty: int) -> dict[str, float]:
    """`rollouts` in flight in one pool, `publishes` versions pass, all are answered and taken."""
    gen = GeneratorConfig(agent=str(ROOT / "recipes/arithmetic.py"), context_length=cfg.longest, max_new_tokens=None, max_num_batched_tokens=cfg.longest, group_size=cfg.group_size)
    engine = ScriptedEngine.options(num_cpus=0).remote(cfg.longest)
    worker = AgentWorker.options(num_cpus=0, max_concurrency=100_000).remote(str(ROOT / "recipes/tiny"), gen)
    parts, rows, groups = Parts(None, [engine], [worker], None, gen), prompts("train"), rollouts // cfg.group_size

    async def run_group(n: int, prompt: dict) -> Group:
        return (await parts.run_groups([(n, prompt)], n, cfg.group_size, 1.0, None, "bench"))[0]

    _, engine_id = await engine.control.remote(0, False)
    worker_id = await worker.__ray_call__.remote(lambda self: os.getpid())
    near = [psutil.Process(), psutil.Process(engine_id), psutil.Process(worker_id)]
    to_core(near, 0)
    used, began = cpu_seconds(near), time.monotonic()
    pool = Pool(PromptStream(rows, seed=0), run_group, prompts_per_step=groups, max_staleness=cfg.publishes, wanted=groups)
    taking = asyncio.ensure_future(pool.take(groups))
    while (waiting := (await engine.control.remote(0, False))[0]) < rollouts:
        assert not taking.done(), f"{waiting} of {rollouts} requests reached the engine: {taking.result()}"
        await asyncio.sleep(0.1)
    publish = time.monotonic()
    for version in range(1, cfg.publishes + 1):
        await engine.control.remote(version, False)
    publish = (time.monotonic() - publish) / cfg.publishes
    await engine.control.remote(cfg.publishes, True)
    taken = await taking
    tokens = sum(len(s) for g in taken for segments in g.rollouts for s in segments)
    seconds, cpu, held = time.monotonic() - began, cpu_seconds(near) - used, held_bytes() - empty
    decoding, tokenizer = time.process_time(), AutoTokenizer.from_pretrained(ROOT / "recipes/tiny")
    for segment in (s for g in taken for segments in g.rollouts for s in segments):
        tokenizer.decode(segment.token_ids[segment.response_mask], skip_special_tokens=False)
    decoding = time.process_time() - decoding
    for actor in (worker, engine):
        ray.kill(actor)
    await asyncio.sleep(1)
    return {"rollouts": sum(len(g.rollouts) for g in taken), "tokens": tokens, "seconds": seconds, "publish_ms": 1000 * publish, "cpu_ms": 1000 * cpu / rollouts,
            "decode_ms": 1000 * decoding / rollouts, "bytes_a_token": held / tokens}


async def compare(cfg: Config, order: str) -> dict[str, float]:
    """Steps of 8 groups, max_staleness 1, in one order; 2 % of the groups take eight times as long."""
    draw, started = np.random.default_rng(1), []

    async def run_group(n: int, prompt: dict) -> Group:
        seconds = draw.uniform(0.02, 0.06) * (8 if draw.random() < 0.02 else 1)
        started.append(seconds)
        await asyncio.sleep(seconds)
        return Group(n, {}, rollouts=[[Trajectory(n, n, reward=1.0, info={"seconds": seconds})]])

    pool = Pool(PromptStream([{"prompt": str(i)} for i in range(1000)], seed=0), run_group, 8, max_staleness=1, order=order, wanted=8 * cfg.steps)
    began, trained = time.monotonic(), []
    for version in range(cfg.steps):
        trained += [g.rollouts[0][0].info["seconds"] for g in await pool.take(8)]
        await asyncio.sleep(cfg.training)
        pool.release(8, version + 1)
    pool.cancel()
    late = [sum(s > 0.07 for s in seconds) / len(seconds) for seconds in (trained, started)]
    return {"steps_a_second": cfg.steps / (time.monotonic() - began), "head_seconds": pool.head_seconds, "stale_groups": pool.dropped["stale_groups"],
            "length": np.mean(trained) / np.mean(started), "started": 100 * late[1], "trained": 100 * late[0]}


def table(title: str, rows: list[dict[str, float]], forms: dict[str, tuple[str, str]]) -> Table:
    out = Table(title=title, title_justify="left")
    for heading, _ in forms.values():
        out.add_column(heading, justify="right")
    for row in rows:
        out.add_row(*[form.format(row[name]) for name, (_, form) in forms.items()])
    return out


async def main(cfg: Config) -> None:
    quiet()
    start_ray(None)
    console, empty = Console(width=140), held_bytes()
    console.print(table(f"Overhead on one core, answers of up to {cfg.longest:,} tokens", [await overhead(cfg, n, empty) for n in cfg.rollouts], {
        "rollouts": ("rollouts in flight", "{:,}"), "tokens": ("tokens", "{:,}"), "seconds": ("seconds", "{:.1f}"), "publish_ms": ("control call ms", "{:.1f}"),
        "cpu_ms": ("CPU ms a rollout", "{:.2f}"), "decode_ms": ("of these decoding", "{:.2f}"), "bytes_a_token": ("driver bytes a token", "{:.1f}")}))
    ray.shutdown()
    orders = [{"order": order} | await compare(cfg, order) for order in ("start", "finished")]
    console.print(table("Orders of taking, 2 % stragglers of 8 times the length", orders, {
        "order": ("--order", "{}"), "steps_a_second": ("steps/s", "{:.2f}"), "head_seconds": ("head of line s", "{:.2f}"), "stale_groups": ("stale groups", "{}"),
        "length": ("trained / started length", "{:.3f}"), "started": ("stragglers started %", "{:.2f}"), "trained": ("stragglers trained %", "{:.2f}")}))


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(Config)))
