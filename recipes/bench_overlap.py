"""What overlap pays: a step against generation alone and training alone, on the same actors in one run.

    python recipes/bench_overlap.py [-- any flag of train.py]      about 3 minutes

The trainer is pinned to core 1, the driver, the engine and the agent worker to core 0, one thread each, in every measurement (Ray's own processes run
where there is room): on cores that both share, a step costs the sum of the two, whatever the order. Medians over --measured steps after --warm ones.
"""

import asyncio
import os
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
from recipes.bench_pool import table  # noqa: E402
from train import PHASES, Config, Log, Parts, loop, make_pool, parse, quiet, resolve, start, start_ray  # noqa: E402


@dataclass(frozen=True)
class Bench:
    """Step time against generation alone and training alone."""

    measured: int = 20                 # steps of each measurement
    warm: int = 4                      # steps before them that do not count
    flags: Annotated[tuple[str, ...], tyro.conf.Positional] = ()   # flags of train.py, behind --


def to_core(core: int) -> None:
    """Pin this process and its children, threads that run already too."""
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


async def pin(parts: Parts) -> None:
    """The trainer to core 1; the driver, engines and agent workers to core 0."""
    for thread in psutil.Process().threads():                        # not its children: Ray's own processes run where there is room
        os.sched_setaffinity(thread.id, {0})
    await asyncio.gather(*[a.__ray_call__.remote(lambda self: to_core(0)) for a in parts.engines + parts.workers],
                         *[r.__ray_call__.remote(lambda self: to_core(1)) for r in parts.trainer.ranks])


async def generation(cfg: Config, parts: Parts, bench: Bench) -> tuple[float, list]:
    """Seconds of a batch of groups with the trainer idle, and the last of them."""
    pool, seconds = make_pool(cfg, parts, read_prompts(cfg.generator, "train"), 0), []
    for _ in range(bench.warm + bench.measured):
        began = time.monotonic()
        groups = await pool.take(cfg.generator.prompts_per_step)
        pool.release(len(groups), 0)
        seconds.append(time.monotonic() - began)
    await pool.drained(set())
    return statistics.median(seconds[bench.warm:]), groups


async def training(cfg: Config, parts: Parts, bench: Bench, groups: list) -> float:
    """Seconds of the loop's work on one batch with the engines idle: collate, old logprobs, advantages, update."""
    seconds, method = [], ESTIMATORS[cfg.estimator]
    for _ in range(bench.warm + bench.measured):
        began = time.monotonic()
        batch = collate([r for g in groups for r in g.rollouts], AGGREGATIONS[cfg.losses.aggregation], cfg.generator.temperature, cfg.trainer.minibatches, version=0)
        batch.old_logprobs = await parts.trainer.logprobs(batch)
        batch.advantages = method(batch, cfg.estimation)
        await parts.trainer.update(batch, cfg.losses.loss)
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds[bench.warm:])


async def step(cfg: Config, parts: Parts, bench: Bench, staleness: int) -> dict[str, float]:
    """Medians of the phases of train.py's own loop."""
    cfg = replace(cfg, steps=bench.warm + bench.measured, generator=replace(cfg.generator, max_staleness=staleness))
    with tempfile.TemporaryDirectory() as directory:
        log = Log(cfg, Path(directory), 0)
        await parts.publish(0)
        await loop(cfg, parts, make_pool(cfg, parts, read_prompts(cfg.generator, "train"), 0), read_prompts(cfg.generator, "eval"), log, 0, 1.0)
        log.close()
        rows = [row for row in log.rows if "reward" in row][bench.warm:]
    return {name: statistics.median(row[name] for row in rows) for name in ("step_seconds", *(f"{phase}_seconds" for phase in PHASES))}


async def main(bench: Bench) -> None:
    cfg, _ = parse(["--eval-every", "0", "--eval-prompts", "1", "--eval-samples", "0", "--checkpoint-every", "0", *bench.flags])
    quiet()
    start_ray(None)
    parts = await start(cfg, replace(resolve(cfg), cores=1))
    await pin(parts)
    await parts.publish(0)
    alone, groups = await generation(cfg, parts, bench)
    trained = await training(cfg, parts, bench, groups)
    rows = [{"what": "generation alone", "step_seconds": alone}, {"what": "training alone", "step_seconds": trained}]
    rows += [{"what": what} | await step(cfg, parts, bench, k) for what, k in (("synchronous step, --max-staleness 0", 0), ("asynchronous step, --max-staleness 1", 1))]
    for row in rows:
        row |= {"larger": row["step_seconds"] / max(alone, trained), "sum": row["step_seconds"] / (alone + trained)} | {name: row.get(name, 0.0) for name in ("wait_seconds", "publish_seconds")}
    Console(width=120).print(table("Seconds, medians", rows, {
        "what": ("", "{}"), "step_seconds": ("seconds", "{:.3f}"), "larger": ("/ larger of the two", "{:.2f}"), "sum": ("/ their sum", "{:.2f}"),
        "wait_seconds": ("wait", "{:.3f}"), "publish_seconds": ("publish", "{:.3f}")}))
    await asyncio.wait([asyncio.ensure_future(e.stop.remote()) for e in parts.engines], timeout=10)
    ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(Bench)))
