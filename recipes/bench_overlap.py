"""What overlap pays: a step against generation alone and training alone, on the same actors in one run.

    python recipes/bench_overlap.py [-- any flag of train.py]      about 5 minutes

The trainer is pinned to core 1; the driver, the engine, the agent worker and Ray's own processes to core 0, one thread each, in every measurement: on cores
that both share, a step costs the sum of the two, whatever the order. Every measurement starts a batch of prompt groups as the loop does, all at once when the
last are complete. They take turns, --rounds short ones in changing order, so that a machine whose speed drifts slows all of them alike: cores of a virtual
machine may flip between two speeds within seconds, whatever runs there. Figures are means over the steps of all turns (medians of two speeds are the one or
the other), the first --warm and the last of each turn left out (beside the last nothing is generated).
A step waits for the slower of the two each time, so where each core changes its speed by itself the mean step is longer than the larger of the two means even if nothing
else took time: "longer of each pair" divides by the mean, over all pairs of a step of generation alone and one of training alone, of the longer of the two.
The learning rate is 0, so that the policy, and with it the length of its answers, is the same in all of them; everything else of an update is done.
"Both at once" is the loop without publishes and without what it writes: a step's distance from it is what these two cost.
"""

import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import psutil
import ray
import tyro
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from estimators import ESTIMATORS, collate  # noqa: E402
from generator import read_prompts  # noqa: E402
from losses import AGGREGATIONS  # noqa: E402
from recipes.bench_pool import table, to_core  # noqa: E402
from train import Config, Log, Parts, loop, make_pool, parse, quiet, resolve, start, start_ray  # noqa: E402


@dataclass(frozen=True)
class Bench:
    """Step time against generation alone and training alone."""

    rounds: int = 8                    # turns of each measurement
    measured: int = 6                  # steps of a turn that count
    warm: int = 2                      # steps before them that do not
    flags: Annotated[tuple[str, ...], tyro.conf.Positional] = ()   # flags of train.py, behind --


async def pin(parts: Parts) -> None:
    """The trainer to core 1, all else to core 0."""
    driver = psutil.Process()
    to_core([driver, *driver.children(recursive=True)], 0)
    for rank in parts.trainer.ranks:
        to_core([psutil.Process(await rank.__ray_call__.remote(lambda self: os.getpid()))], 1)


async def generation(cfg: Config, parts: Parts, steps: int, trained: bool = False) -> tuple[list[dict], list[list]]:
    """Seconds and tokens of each of so many batches of groups, started as the loop does: all at once when the last are complete, or, with --partial-rollout, when a batch is; and the batches.

    `trained`: each is also trained while the next is generated, so that it is the loop without publishes and without what it writes.
    """
    pool, rows, batches = make_pool(cfg, parts, read_prompts(cfg.generator, "train"), 0), [], []
    for _ in range(steps):
        began = time.monotonic()
        batches.append(await pool.take(cfg.generator.prompts_per_step))
        pool.release(len(batches[-1]), 0)
        update = (await training(cfg, parts, batches[-1:]))[0]["step_seconds"] if trained else 0.0
        if not cfg.generator.partial_rollout:
            await pool.drained(set())
        rows.append({"step_seconds": time.monotonic() - began, "update_seconds": update, "response_tokens": sum(int(s.response_mask.sum()) for g in batches[-1] for r in g.rollouts for s in r)})
    await pool.drained(set())
    return rows, batches


async def training(cfg: Config, parts: Parts, batches: list[list]) -> list[dict]:
    """Seconds and tokens of the loop's work on each batch: collate, advantages, update."""
    rows, method = [], ESTIMATORS[cfg.estimator]
    for groups in batches:
        began = time.monotonic()
        batch = collate([r for g in groups for r in g.rollouts], AGGREGATIONS[cfg.losses.aggregation], cfg.generator.temperature, cfg.trainer.minibatches, version=0)
        if cfg.old_first:
            batch.old_logprobs = await parts.trainer.logprobs(batch)
        batch.advantages = method(batch, cfg.estimation)
        await parts.trainer.update(batch, cfg.losses.loss)
        rows.append({"step_seconds": time.monotonic() - began, "response_tokens": int(batch.response_mask.sum())})
    return rows


async def loop_rows(cfg: Config, parts: Parts, steps: int, staleness: int) -> list[dict]:
    """Rows of train.py's own loop."""
    cfg = replace(cfg, steps=steps, generator=replace(cfg.generator, max_staleness=staleness, partial_rollout=cfg.generator.partial_rollout and staleness > 0))
    with tempfile.TemporaryDirectory() as directory:
        log = Log(cfg, Path(directory), 0)
        await parts.publish(0)
        await loop(cfg, parts, make_pool(cfg, parts, read_prompts(cfg.generator, "train"), 0), read_prompts(cfg.generator, "eval"), log, 0, 1.0)
        log.close()
        return [row for row in log.rows if "reward" in row]


async def main(bench: Bench) -> None:
    cfg, _ = parse(["--eval-every", "0", "--eval-prompts", "1", "--eval-samples", "0", "--checkpoint-every", "0", "--learning-rate", "0", *bench.flags])
    quiet()
    start_ray(None)
    parts = await start(cfg, replace(resolve(cfg), cores=1))
    await pin(parts)
    await parts.publish(0)
    steps, counted, seen = bench.warm + bench.measured + 1, slice(bench.warm, -1), {}
    _, batches = await generation(cfg, parts, steps)
    measurements = {
        "generation alone": lambda: generation(cfg, parts, steps), "training alone": lambda: training(cfg, parts, batches), "both at once, no publish": lambda: generation(cfg, parts, steps, trained=True),
        "synchronous step, --max-staleness 0": lambda: loop_rows(cfg, parts, steps, 0), "asynchronous step, --max-staleness 1": lambda: loop_rows(cfg, parts, steps, 1)}
    for turn in range(bench.rounds):
        for what in random.Random(turn).sample(list(measurements), len(measurements)):
            rows = await measurements[what]()
            seen.setdefault(what, []).extend((rows[0] if isinstance(rows, tuple) else rows)[counted])
    rows = [{"what": what} | {name: statistics.fmean(row.get(name, 0.0) for row in seen[what]) for name in ("step_seconds", "response_tokens", "update_seconds", "wait_seconds", "publish_seconds")} for what in measurements]
    longer = statistics.fmean(max(g["step_seconds"], t["step_seconds"]) for g in seen["generation alone"] for t in seen["training alone"])
    for row in rows:
        row |= {"larger": row["step_seconds"] / max(r["step_seconds"] for r in rows[:2]), "longer": row["step_seconds"] / longer, "both": row["step_seconds"] / rows[2]["step_seconds"], "sum": row["step_seconds"] / sum(r["step_seconds"] for r in rows[:2])}
    Console(width=160).print(table(f"Seconds, means of {bench.rounds * bench.measured} steps", rows, {
        "what": ("", "{}"), "step_seconds": ("seconds", "{:.3f}"), "larger": ("/ larger mean", "{:.2f}"), "longer": ("/ longer of each pair", "{:.2f}"), "both": ("/ both at once", "{:.2f}"), "sum": ("/ their sum", "{:.2f}"),
        "response_tokens": ("tokens", "{:.0f}"), "update_seconds": ("update", "{:.3f}"), "wait_seconds": ("wait", "{:.3f}"), "publish_seconds": ("publish", "{:.3f}")}))
    await asyncio.wait([asyncio.ensure_future(e.stop.remote()) for e in parts.engines], timeout=10)
    ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(Bench)))
