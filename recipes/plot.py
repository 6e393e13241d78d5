"""Draws a run's pictures from its metrics.jsonl and config.json: train.py does so after every eval.

    python recipes/plot.py runs/<name>

reward.png: the reward of every batch, its running mean, and the evals. staleness.png: the age of the trained tokens, and what age did.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402


@dataclass(frozen=True)
class Config:
    """Draw a run's pictures again."""

    run: tyro.conf.Positional[Path]    # directory under runs/


def plot(run: Path) -> None:
    cfg = json.loads((run / "config.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines(keepends=True) if line.endswith("\n")]
    rewards(rows, f"{cfg['estimator']}, {Path(cfg['model']).name}, seed {cfg['seed']}", run / "reward.png")
    staleness([row for row in rows if "reward" in row], cfg["generator"]["max_staleness"], run / "staleness.png")


def rewards(rows: list[dict], title: str, file: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    steps, reward = [[row[name] for row in rows if "reward" in row] for name in ("step", "reward")]
    axes.plot(steps, reward, color="tab:blue", alpha=0.25, label="reward of the batch")
    recent = [reward[max(0, i - 9): i + 1] for i in range(len(reward))]
    axes.plot(steps, [sum(r) / len(r) for r in recent], color="tab:blue", label="mean of 10 batches")
    if evals := [(row["step"], row["eval/greedy"]) for row in rows if "eval/greedy" in row]:
        axes.plot(*zip(*evals), "o-", color="tab:orange", label="greedy pass rate, held out")
    axes.set(xlabel="step (batches trained)", ylabel="reward", title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    save(figure, file)


def staleness(rows: list[dict], bound: int, file: Path) -> None:
    """`rows` of training steps."""
    steps, figure, (ages, effect) = [row["step"] for row in rows], *plt.subplots(2, 1, figsize=(7, 5), dpi=120, sharex=True)
    oldest = int(max((row["staleness_max"] for row in rows), default=0))
    shares = [[row.get(f"age{age}/tokens", 0) / row["response_tokens"] for row in rows] for age in range(oldest + 1)]
    ages.stackplot(steps, shares, labels=[f"{age} publishes old" for age in range(oldest + 1)])
    ages.set(ylabel="share of tokens", ylim=(0, 1), title=f"Age of trained tokens, at most {bound}")
    ages.legend(loc="lower right")
    for name, heading in (("ess_frac", "effective sample size"), ("clip_frac", "clipped"), ("mismatch_cut_frac", "cut by the mismatch limits")):
        effect.plot(steps, [row[name] for row in rows], label=heading)
    effect.set(xlabel="step (batches trained)", ylabel="share", ylim=(-0.02, 1.02))
    effect.legend(loc="center right")
    effect.grid(alpha=0.3)
    save(figure, file)


def save(figure, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


if __name__ == "__main__":
    plot(tyro.cli(Config).run)
