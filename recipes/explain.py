"""Shows how one saved rollout was trained, token by token: what was clipped, gated or left out, and how hard each token was pushed.

    python recipes/explain.py runs/<name> --step 1 --rollout 7
    python recipes/explain.py runs/<name> --policy runs/<name>/hf          the same tokens under a later policy: clipping acts

All of a step's policy loss that reaches the model is one number a token, with A its advantage and w its mismatch weight:

    dLoss/dlogprob = loss_weight * (w * slope + kl_scale * kl_coef * kl_slope)        loss_weight = 1 / denominator

    slope      ppo: -policy_ratio * A, 0 where clipped        gspo: -s * A, 0 where clipped; s = exp(mean log policy_ratio of the rollout)
               cispo: -min(policy_ratio, ceiling) * A         reinforce: -A         sft: -1, with w = 1
    kl_slope   k2: d         k3: 1 - e^-d                     d = logprob - ref_logprob
    ratios     policy_ratio = pi/pi_old = e^(current - old)   mismatch_ratio = pi_old/mu = e^(old - behaviour)

The batch and its advantages are rebuilt by the run's own functions; from there on this is a second implementation beside
losses.py, one token at a time in plain floats, which tests/test_explain.py holds to autograd's gradient of losses.step_loss.
An entropy bonus acts through the entropy and is not shown. config.json holds the flags of the run's last start.
"""

import json
import sys
import zipfile
from dataclasses import dataclass
from math import exp, inf, log
from pathlib import Path

import numpy as np
import torch
import tyro
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from agent import Trajectory, reserved  # noqa: E402
from estimators import ESTIMATORS, Batch, collate, shape_rewards, value_targets  # noqa: E402
from losses import AGGREGATIONS, LOG_RATIO_LIMIT, LossConfig  # noqa: E402
from train import Config, from_dict, quiet, read_model, read_rows  # noqa: E402
from trainer import forward, take_rows  # noqa: E402


@dataclass(frozen=True)
class Arguments:
    """Explain one saved rollout, token by token."""

    run: tyro.conf.Positional[Path]    # directory of the run, runs/<name>
    step: int | None = None            # step to look at; None = the newest saved
    rollout: int | None = None         # number of the rollout; None = the first of the step
    policy: str | None = None          # current policy, a directory in Hugging Face layout; None = the old one, as in the step's first update


# ---------------------------------------------------------------------------------------------------- the coefficient
@dataclass(frozen=True)
class Token:
    """One sampled token: its logprobs in nats under four policies, its advantage and its loss_weight."""

    behaviour: float
    old: float
    current: float
    ref: float | None
    advantage: float
    loss_weight: float


def gap(a: float, b: float) -> float:
    """a - b, cut to +-30 as in losses.log_ratio; two -inf are equal."""
    return 0.0 if a == b else max(min(a - b, LOG_RATIO_LIMIT), -LOG_RATIO_LIMIT)


def divergence(token: Token, gate: str) -> float:
    """How far pi_old's chance q of this token is from mu's chance p of it, as a choice between this token and another."""
    p, q = (min(max(exp(x), 1e-6), 1 - 1e-6) for x in (token.behaviour, token.old))
    return abs(p - q) if gate == "tv" else p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))


def clipped(ratio: float, advantage: float, cfg: LossConfig) -> tuple[float, str]:
    """-ratio * A, but 0 where the ratio has already gone beyond the clip in the direction A pushes it; and which clip."""
    if advantage > 0 and ratio > 1 + cfg.clip_high:
        return 0.0, f"clip high {1 + cfg.clip_high:g}"
    if advantage < 0 and ratio < 1 - cfg.clip_low:
        return 0.0, f"clip low {1 - cfg.clip_low:g}"
    return -ratio * advantage, ""


def ppo(token: Token, s: float, cfg: LossConfig) -> tuple[float, str]:
    ratio = exp(gap(token.current, token.old))
    if cfg.dual_clip and token.advantage < 0 and ratio > cfg.dual_clip:
        return 0.0, f"dual clip {cfg.dual_clip:g}"
    if token.advantage < 0 and ratio == exp(LOG_RATIO_LIMIT):
        return 0.0, "ratio limit e^30"
    return clipped(ratio, token.advantage, cfg)


def cispo(token: Token, s: float, cfg: LossConfig) -> tuple[float, str]:
    ratio, ceiling = exp(gap(token.current, token.old)), cfg.cispo_ceiling
    return -min(ratio, ceiling) * token.advantage, f"ceiling {ceiling:g}" if ratio > ceiling else ""


SLOPES = {                             # (token, s, cfg) -> (d policy loss / d logprob, the rule that cut it)
    "ppo": ppo,
    "gspo": lambda token, s, cfg: clipped(s, token.advantage, cfg),
    "cispo": cispo,
    "reinforce": lambda token, s, cfg: (-token.advantage, ""),
    "sft": lambda token, s, cfg: (-1.0, ""),
}
KL_SLOPES = {"k2": lambda d: d, "k3": lambda d: 1 - exp(-d)}


def sequence_ratio(tokens: list[Token]) -> float:
    """gspo's s: the geometric mean of the rollout's policy ratios."""
    return exp(sum(gap(t.current, t.old) for t in tokens) / len(tokens))


def judged_sequence(tokens: list[Token], cfg: LossConfig) -> float | None:
    """What a gate over whole rollouts judges: product (seq) or geometric mean (geo) of mismatch ratios, or the mean divergence."""
    if cfg.mismatch_level not in ("seq", "geo"):
        return None
    if cfg.mismatch_gate != "ratio":
        return sum(divergence(t, cfg.mismatch_gate) for t in tokens) / len(tokens)
    total = sum(gap(t.old, t.behaviour) for t in tokens)
    return exp(gap(total, 0.0) if cfg.mismatch_level == "seq" else total / len(tokens))


def mismatch(token: Token, judged: float | None, cfg: LossConfig) -> tuple[float, str]:
    """w = mismatch_ratio, unless a limit cuts it or a gate drops the token; and which. `judged` is the sequence's number, if a gate asks for it."""
    if cfg.mismatch_level == "off" or cfg.loss == "sft":
        return 1.0, ""
    ratio, low, high = exp(gap(token.old, token.behaviour)), cfg.mismatch_low, cfg.mismatch_high
    if cfg.mismatch_mode in ("clip", "trunc"):
        limit = high if ratio > high else low if ratio < low and cfg.mismatch_mode == "clip" else None
        return (ratio, "") if limit is None else (limit, f"mismatch {cfg.mismatch_mode} {limit:g}")
    if cfg.mismatch_gate != "ratio":
        low, high = -inf, cfg.mismatch_limit
    if judged is None:
        judged = ratio if cfg.mismatch_gate == "ratio" else divergence(token, cfg.mismatch_gate)
    return (ratio, "") if low <= judged <= high else (0.0, f"mismatch mask {cfg.mismatch_level}")


def coefficients(tokens: list[Token], cfg: LossConfig, kl_factor: float) -> list[tuple[float, float, str]]:
    """(w, dLoss/dlogprob, what cut it) of all sampled tokens of one rollout; kl_factor = kl_scale * kl_coef."""
    s, judged, out = sequence_ratio(tokens), judged_sequence(tokens, cfg), []
    for token in tokens:
        slope, clip = SLOPES[cfg.loss](token, s, cfg)
        w, gate = mismatch(token, judged, cfg)
        push = w * slope
        if kl_factor:
            d = gap(token.current, token.ref)
            push += kl_factor * KL_SLOPES[cfg.kl_kind](d) if abs(d) < LOG_RATIO_LIMIT else 0.0
        rules = ", ".join(filter(None, (clip, gate))) or "-"
        out.append((w, token.loss_weight * push, rules) if token.loss_weight else (w, 0.0, "truncated"))
    return out


# ---------------------------------------------------------------------------------------------------- what the run left
def read_step(run: Path, step: int | None) -> tuple[Config, int, Batch, list[list[Trajectory]]]:
    """(config, step, the batch as the step trained on it, its rollouts). Raises ValueError where there is no such thing."""
    if not (run / "config.json").is_file():
        raise ValueError(f"{run}: there is no run here, for it has no config.json. Give the directory of a run, runs/<name>.")
    saved = sorted(int(p.stem) for p in (run / "rollouts").glob("*.npz"))
    if not saved:
        raise ValueError(f"{run}: no rollouts were saved there. Train with --save-rollouts.")
    step = saved[-1] if step is None else step
    if step not in saved:
        raise ValueError(f"{run}: step {step} was not saved. There are {len(saved)} steps from {saved[0]} to {saved[-1]}.")
    try:
        arrays = dict(np.load(run / "rollouts" / f"{step:06d}.npz"))
    except (zipfile.BadZipFile, EOFError):
        raise ValueError(f"{run}: the rollouts of step {step} are not whole: still being written, or cut short. Choose another --step.") from None
    cfg = from_dict(Config, json.loads((run / "config.json").read_text()))
    for name, needed in (("old_logprobs", True), ("ref_logprobs", cfg.reference), ("values", ESTIMATORS[cfg.estimator].critic)):
        if needed and name not in arrays:
            raise ValueError(f"{run}: the rollouts of step {step} have no {name}: an older version or other flags wrote them. Train again to explain a step.")
    kl_scales = [row["kl_scale"] for row in read_rows(run / "metrics.jsonl") if row["step"] == step and "kl_scale" in row]
    if cfg.losses.kl_target and not kl_scales:
        raise ValueError(f"{run}: metrics.jsonl has no kl_scale of step {step}, which --kl-target moves: the run ended before it was written. Choose another --step.")
    rollouts = read_rollouts(arrays)
    return cfg, step, rebuild(cfg, rollouts, arrays, *kl_scales[-1:]), rollouts


def read_rollouts(arrays: dict[str, np.ndarray]) -> list[list[Trajectory]]:
    """The step's trajectories as collate takes them: a list of segments for each rollout, in the order of the file."""
    rollouts: dict[int, list[Trajectory]] = {}
    for i, (start, end) in enumerate(zip(arrays["offsets"], arrays["offsets"][1:])):
        tokens = (arrays[name][start:end] for name in ("token_ids", "response_mask", "behaviour_logprobs", "policy_versions"))
        segment = Trajectory(int(arrays["rollout"][i]), int(arrays["group"][i]), *tokens, float(arrays["reward"][i]), bool(arrays["truncated"][i]))
        rollouts.setdefault(segment.rollout, []).append(segment)
    return list(rollouts.values())


def rebuild(cfg: Config, rollouts: list[list[Trajectory]], arrays: dict[str, np.ndarray], kl_scale: float = 1.0) -> Batch:
    """The batch again as train.loop makes it, with the saved numbers where the loop asks the trainer's models."""
    batch = collate(rollouts, AGGREGATIONS[cfg.losses.aggregation], cfg.generator.temperature, cfg.trainer.minibatches, cfg.losses.mask_truncated)
    batch.rollout_rewards, batch.kl_scale = shape_rewards(batch, cfg.estimation, cfg.generator.context_length), kl_scale
    inside = torch.arange(batch.token_ids.shape[1]) < batch.lengths[:, None]                   # [B, T] not padding
    for name in {"old_logprobs", "ref_logprobs", "values"} & arrays.keys():
        padded = torch.zeros(inside.shape)
        padded[inside] = torch.from_numpy(arrays[name]).to(padded.dtype)
        setattr(batch, name, padded)                                                           # [B, T]
    if ESTIMATORS[cfg.estimator].critic:
        batch.returns = value_targets(batch, cfg.estimation)                                   # [B, T]
    batch.advantages = ESTIMATORS[cfg.estimator](batch, cfg.estimation)                        # [B, T]
    return batch


def rollout_tokens(batch: Batch, rows: Tensor, logprobs: Tensor) -> list[Token]:
    """The sampled tokens of one rollout, whose segments are `rows` of the batch, in time order; logprobs [B, T] of the current policy."""
    mask = batch.response_mask[rows]
    read = (batch.behaviour_logprobs, batch.old_logprobs, logprobs, batch.ref_logprobs, batch.advantages, batch.loss_weight)
    return [Token(*values) for values in zip(*([None] * int(mask.sum()) if x is None else x[rows][mask].tolist() for x in read))]


def logprobs_under(policy: str, batch: Batch, rows: Tensor) -> Tensor:
    """log p of these rows' tokens under the policy in that directory, by transformers on the CPU in float32; 0 in other rows. [B, T]"""
    from transformers import AutoModelForCausalLM

    path, config = read_model("--policy", policy)
    if hasattr(config, "vision_config"):
        raise ValueError(f"--policy {policy} reads images, which rollouts/ does not hold. Leave the flag out.")
    if config.vocab_size <= (largest := int(batch.token_ids[rows].max())):
        raise ValueError(f"--policy {policy} has a vocabulary of {config.vocab_size} tokens and the rollout holds id {largest}: it is another model's.")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        found, _ = forward(model, take_rows(batch, rows.tolist()), torch.device("cpu"))        # [b, t], logits over the run's temperature
    out = torch.zeros(batch.response_mask.shape)
    out[rows, : found.shape[1]] = found.to(out.dtype)
    if not out[batch.response_mask].isfinite().all():
        raise ValueError(f"--policy {policy}: its logprobs are not finite, so it has diverged. Choose another.")
    return out


# ---------------------------------------------------------------------------------------------------- printing
def number(x: float) -> str:
    """Three decimals, or the size of what is too small or too large for them."""
    return "0" if x == 0 else f"{x:.3f}" if 0.0005 <= abs(x) < 10_000 else f"{x:.0e}"


def shown(tokenizer, token_id: int) -> str:
    """A token as text: quoted and escaped, a control token bare, a piece of a character by its name in the vocabulary."""
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    if text in reserved(tokenizer):
        return text
    return repr(text) if "\ufffd" not in text else str(tokenizer.convert_ids_to_tokens(token_id))


def flags(cfg, *names: str) -> str:
    return " ".join(f"--{name.replace('_', '-')} {getattr(cfg, name)}" for name in names)


def heading(args: Arguments, cfg: Config, step: int, batch: Batch, r: int, first: Trajectory, tokens: list[Token]) -> Table:
    """Which rollout this is (number r of the batch) and the flags that made the numbers below."""
    c, rows, mates = cfg.losses, batch.rollout == r, batch.rollout_group == batch.rollout_group[r]
    raw, shaped = (" ".join(f"{x:g}" for x in rewards[mates].tolist()) for rewards in (batch.raw_rewards, batch.rollout_rewards))
    clips = {"ppo": ("clip_low", "clip_high", "dual_clip"), "gspo": ("clip_low", "clip_high"), "cispo": ("cispo_ceiling",)}
    limits = ("mismatch_limit",) if c.mismatch_gate != "ratio" else ("mismatch_high",) if c.mismatch_mode == "trunc" else ("mismatch_low", "mismatch_high")
    judged = judged_sequence(tokens, c)
    lines = {
        "run": f"{args.run}, step {step}: made version {step} out of version {step - 1}",
        "rollout": f"{first.rollout} of group {first.group}: segments {int(rows.sum())}, tokens {int(batch.lengths[rows].sum())}, sampled {len(tokens)}"
                   + (", truncated" if batch.truncated[r] else ""),
        "reward": f"{batch.raw_rewards[r]:g}, shaped {batch.rollout_rewards[r]:g}; its group's: {raw}, shaped {shaped}",
        "advantage": f"{flags(cfg, 'estimator')} {flags(cfg.estimation, *ESTIMATORS[cfg.estimator].reads)}",
        "loss": flags(c, "loss", *clips.get(c.loss, ())) + (f"; this rollout's s is {number(sequence_ratio(tokens))}" if c.loss == "gspo" else ""),
        "mismatch": flags(c, "mismatch_level", *(() if c.mismatch_level == "off" else ("mismatch_gate", "mismatch_mode", *limits)))
                    + (f"; this rollout is judged at {number(judged)}" if judged is not None else ""),
        "KL": f"{flags(c, 'kl_coef', 'kl_kind')}; kl_scale {batch.kl_scale:g}" if c.kl_coef else "not in the loss",
        "denominator": f"{flags(c, 'aggregation', 'mask_truncated')} {flags(cfg.trainer, 'minibatches')}; this rollout is in minibatch {int(batch.minibatch[rows][0]) + 1}",
        "current": args.policy or "= old, as in the first optimizer step of the batch; --policy shows another",
    }
    grid = Table.grid(padding=(0, 2))
    for name, line in lines.items():
        grid.add_row(f"[bold]{name}[/]", escape(line))
    return grid


def token_table(tokenizer, batch: Batch, rows: Tensor, tokens: list[Token], results: list[tuple[float, float, str]]) -> Table:
    """One line a token: observed ones are dim, those that a rule acted on yellow, a line stands between segments."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    ref = ["ref\nlogprob"] if batch.ref_logprobs is not None else []
    for name in ("pos", "id", "text", "mask", "version", "behaviour\nlogprob", "old\nlogprob", "current\nlogprob", *ref, "policy\nratio", "mismatch\nratio",
                 "mismatch\nweight", "cut by", "advantage", "denomi-\nnator", "dLoss/\ndlogprob"):
        table.add_column(name, justify="left" if name in ("text", "cut by") else "right", no_wrap=name != "cut by", max_width=34 if name == "cut by" else 16)
    sampled = iter(zip(tokens, results))
    for row in rows.tolist():
        for place, token_id in enumerate(batch.token_ids[row, : batch.lengths[row]].tolist()):
            start = [str(place), str(token_id), escape(shown(tokenizer, token_id))]
            if not batch.response_mask[row, place]:
                table.add_row(*start, "0", style="dim")
                continue
            t, (w, coefficient, rule) = next(sampled)
            numbers = (t.behaviour, t.old, t.current, *([t.ref] if ref else []), exp(gap(t.current, t.old)), exp(gap(t.old, t.behaviour)), w)
            table.add_row(*start, "1", str(int(batch.policy_versions[row, place])), *map(number, numbers), rule, number(t.advantage),
                          f"{1 / t.loss_weight:.0f}" if t.loss_weight else "-", f"{coefficient:+.2e}" if coefficient else "0", style="" if rule == "-" else "yellow")
        table.add_section()
    return table


def show(args: Arguments) -> None:
    from transformers import AutoTokenizer

    cfg, step, batch, rollouts = read_step(args.run, args.step)
    numbers = [segments[0].rollout for segments in rollouts]
    if args.rollout is not None and args.rollout not in numbers:
        raise ValueError(f"{args.run}: step {step} has no rollout {args.rollout}. It has {len(numbers)}, numbered from {min(numbers)} to {max(numbers)}.")
    r = 0 if args.rollout is None else numbers.index(args.rollout)
    rows = (batch.rollout == r).nonzero()[:, 0]                                                # [b] in time order
    tokens = rollout_tokens(batch, rows, logprobs_under(args.policy, batch, rows) if args.policy else batch.old_logprobs)
    results = coefficients(tokens, cfg.losses, batch.kl_scale * cfg.losses.kl_coef)
    tokenizer = AutoTokenizer.from_pretrained(read_model("the run's --model", cfg.model)[0])
    console = Console(highlight=False, width=max(Console().width, 160))                        # never squeezed: a cut number would mislead
    console.print(heading(args, cfg, step, batch, r, rollouts[r][0], tokens))
    console.print(token_table(tokenizer, batch, rows, tokens, results))
    console.print("mask 1: sampled by the policy, 0: observed. dLoss/dlogprob = (mismatch weight * slope + KL) / denominator; each loss has its slope at the top of\n"
                  "recipes/explain.py. Below 0 the step raises this token's logprob, above 0 it lowers it; the larger, the harder.")


def main(args: list[str] | None = None) -> int:
    quiet()
    try:
        show(tyro.cli(Arguments, args=args))
        return 0
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
