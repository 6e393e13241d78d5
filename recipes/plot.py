"""Draws a run's pictures from its metrics.jsonl and config.json: train.py does so after every eval.

    python recipes/plot.py runs/<name>

reward.png: the reward of every batch, its running mean, and the evals. staleness.png: the age of the trained tokens, and what age did.
time.png, time.txt: the seconds of every step by phase (PHASES in train.py says what they are), and their medians, means and shares.
"""

import json
import statistics
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
    if timed := [row for row in rows if "rest_seconds" in row]:                    # rows of an older run have other phases
        figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
        time_bars(axes, timed, [row["step"] for row in rows if "eval/greedy" in row])
        save(figure, run / "time.png")
        (run / "time.txt").write_text(time_table(timed, run.resolve().name))


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


def phases(row: dict) -> list[str]:
    """Those whose seconds add up to the step's: every field <phase>_seconds but the step's own; an agent's own metrics are info/..."""
    return [name.removesuffix("_seconds") for name in row if name.endswith("_seconds") and name != "step_seconds" and "/" not in name]


def time_bars(axes, rows: list[dict], evals: list[int], most: int = 130) -> None:
    """A stacked bar a step, or the mean of as many neighbours as it takes for at most `most` bars; the axis ends at 4 median bars, higher ones are cut off.
    `rows` of training steps; `evals`: steps that ended with one."""
    size = -(-len(rows) // most)
    bins = [rows[i:i + size] for i in range(0, len(rows), size)]
    left, width, bottom = [b[0]["step"] - 0.5 for b in bins], [len(b) for b in bins], [0.0] * len(bins)
    for phase in phases(rows[-1]):
        heights = [statistics.mean(row[f"{phase}_seconds"] for row in b) for b in bins]
        axes.bar(left, heights, width, bottom, align="edge", label=phase)
        bottom = [low + height for low, height in zip(bottom, heights)]
    for i, step in enumerate(evals):
        axes.axvline(step + 0.5, color="black", linestyle=":", linewidth=1, label="_" * bool(i) + "eval")
    axes.set(xlabel="step (batches trained)", ylabel="seconds", title="Where a step's time goes", xlim=(left[0], left[-1] + width[-1]),
             ylim=(0, min(1.05 * max(bottom), 4 * statistics.median(bottom))))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), reverse=True)


def time_table(rows: list[dict], name: str) -> str:
    """Median and mean seconds of each phase, and its share of all the steps' seconds; the last line is the step. `rows` of training steps."""
    lines = [f"{name}: {len(rows)} steps, {rows[0]['step']} to {rows[-1]['step']}; evals and checkpoints are no part of them", "",
             f"{'phase':<10}{'median s':>10}{'mean s':>10}{'share %':>10}"]
    for phase in [*phases(rows[-1]), "step"]:
        seconds = [row[f"{phase}_seconds"] for row in rows]
        share = 100 * sum(seconds) / sum(row["step_seconds"] for row in rows)
        lines.append(f"{phase:<10}{statistics.median(seconds):>10.3f}{statistics.mean(seconds):>10.3f}{share:>10.1f}")
    return "\n".join(lines) + "\n"


def save(figure, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


if __name__ == "__main__":
    plot(tyro.cli(Config).run)
