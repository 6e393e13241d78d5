"""losses.py owns the policy losses, the mismatch correction, the KL estimators, entropy, value loss and aggregations.

Pure functions of tensors: no forward pass, no optimizer, no logging. A policy loss gives the loss of every token
[B, T]; the step's loss is sum(loss_weight * token loss), where `loss_weight` (AGGREGATIONS) was fixed for the whole
optimizer step, so micro-batches and ranks only add. Adding one is a function, a row in its table and a test.
`batch` has the fields of estimators.Batch; a *sequence* is a rollout, whose segments are rows of one micro-batch.

Policies: behaviour = mu, what the engine sampled with; old = pi_old, the trainer before this update; current = pi,
bare `logprobs`; ref = frozen. policy_ratio = pi/pi_old, mismatch_ratio = pi_old/mu. Logprobs are in nats.
Letters: B rows, T tokens. Masked entries of any input may hold anything, infinities included: they are never read.
Sources: named in each function.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 30.0                 # |log ratio| beyond this is cut: e^30 stays finite in float32, products of it too


# ---------------------------------------------------------------------------------------------------- aggregation
def token_mean(mask: Tensor, rollout: Tensor, group: Tensor) -> Tensor:
    """w = 1 / (response tokens of the step): every token counts the same. DAPO, arXiv:2503.14476"""
    return mask / mask.sum().clamp(min=1)                                                      # [B, T]


def total_of(x: Tensor, owner: Tensor) -> Tensor:
    """[B, T] -> [B]: the sum over all rows of the row's owner (its rollout or prompt)."""
    return torch.zeros(int(owner.max()) + 1, dtype=x.dtype, device=x.device).index_add(0, owner, x.sum(-1))[owner]


def tokens_of(mask: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """(response tokens of the row's owner [B], number of owners that have any [])."""
    tokens = total_of(mask.long(), owner)
    return tokens.clamp(min=1), max(1, owner[tokens > 0].unique().numel())


def seq_mean_token_mean(mask: Tensor, rollout: Tensor, group: Tensor) -> Tensor:
    """w = 1 / (tokens of the rollout) / (rollouts): the mean over rollouts of their token means. GRPO, arXiv:2402.03300"""
    tokens, rollouts = tokens_of(mask, rollout)
    return mask / tokens[:, None] / rollouts                                                   # [B, T]


def prompt_mean_token_mean(mask: Tensor, rollout: Tensor, group: Tensor) -> Tensor:
    """w = 1 / (tokens of all rollouts of the prompt) / (prompts): the mean over prompts of their token means."""
    tokens, prompts = tokens_of(mask, group)
    return mask / tokens[:, None] / prompts                                                    # [B, T]


def seq_mean_token_sum(mask: Tensor, rollout: Tensor, group: Tensor) -> Tensor:
    """w = 1 / (rollouts): the mean over rollouts of their token sums, which is the unbiased policy gradient. arXiv:2503.20783"""
    return mask / tokens_of(mask, rollout)[1]                                                  # [B, T]


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "prompt-mean-token-mean": prompt_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
}


# ---------------------------------------------------------------------------------------------------- policy losses
def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """numerator - denominator where masked in, cut to +-30; exactly 0 (and no gradient) elsewhere. [B, T]

    Two -inf are equal: 0. A NaN stays one: a model that has diverged must not look on-policy.
    """
    read = mask & ~(numerator.isneginf() & denominator.isneginf())
    zero = torch.zeros((), dtype=numerator.dtype, device=numerator.device)
    return (torch.where(read, numerator, zero) - torch.where(read, denominator, zero)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_mean(x: Tensor, mask: Tensor, rollout: Tensor) -> Tensor:
    """[B, T] -> [B, 1]: the mean over the response tokens of the row's rollout, all its segments; x is 0 off the mask."""
    return (total_of(x, rollout) / total_of(mask.long(), rollout).clamp(min=1))[:, None]


def clipped_surrogate(ratio: Tensor, advantages: Tensor, mask: Tensor, cfg: "LossConfig") -> tuple[Tensor, Tensor]:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), and where the clip took the gradient; [B, T] both."""
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)                                 # [B, T]
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    return loss, (clipped * advantages < ratio * advantages) & mask


def ppo(logprobs: Tensor, batch, cfg: "LossConfig") -> tuple[Tensor, Tensor]:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) per token, and where the clip took the gradient. arXiv:1707.06347, eq. 7

    ratio = policy_ratio. Asymmetric limits are DAPO's clip-higher (arXiv:2503.14476). With --dual-clip c the loss of a
    token with A < 0 is at most -c * A (arXiv:1912.09729, eq. 5): a huge ratio cannot blow the step up.
    """
    mask, advantages = batch.response_mask, batch.advantages
    ratio = log_ratio(logprobs, batch.old_logprobs, mask).exp()                                # [B, T]
    loss, clipped = clipped_surrogate(ratio, advantages, mask, cfg)
    if cfg.dual_clip:
        beyond = (advantages < 0) & (ratio > cfg.dual_clip) & mask                             # [B, T]
        loss, clipped = torch.where(beyond, -cfg.dual_clip * advantages, loss), clipped | beyond
    return loss, clipped


def gspo(logprobs: Tensor, batch, cfg: "LossConfig") -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate with one ratio a sequence, s = exp(mean of log policy_ratio over its tokens). arXiv:2507.18071, eq. 14

    Its token form: the value of every token is that of s, the gradient passes through the token's own logprob:
    s_t = stop_gradient(s) * pi_t / stop_gradient(pi_t). Under seq-mean-token-mean it is the sequence form's gradient.
    """
    mask = batch.response_mask
    mean = sequence_mean(log_ratio(logprobs.detach(), batch.old_logprobs, mask), mask, batch.rollout)   # [B, 1]
    own = log_ratio(logprobs, logprobs.detach(), mask)                                         # [B, T], all 0, carries the gradient
    return clipped_surrogate((mean + own).exp(), batch.advantages, mask, cfg)


def cispo(logprobs: Tensor, batch, cfg: "LossConfig") -> tuple[Tensor, Tensor]:
    """-stop_gradient(min(policy_ratio, ceiling)) * A * log pi: every token keeps its gradient. MiniMax-M1, arXiv:2506.13585, eq. 4"""
    mask = batch.response_mask
    ratio = log_ratio(logprobs.detach(), batch.old_logprobs, mask).exp()                       # [B, T]
    bounded = torch.where(mask, logprobs, torch.zeros_like(logprobs)).clamp(min=-1e4)          # -inf would make the value infinite
    return -ratio.clamp(max=cfg.cispo_ceiling) * batch.advantages * bounded, (ratio > cfg.cispo_ceiling) & mask


def reinforce(logprobs: Tensor, batch, cfg: "LossConfig") -> tuple[Tensor, Tensor]:
    """-A * pi / stop_gradient(pi): the value is -A and the gradient is that of -A * log pi. Williams 1992

    pi_old := pi, so it is meant for one optimizer step a batch; old_logprobs only enters through the mismatch ratio.
    """
    mask = batch.response_mask
    ratio = log_ratio(logprobs, logprobs.detach(), mask).exp()                                 # [B, T], all ones
    return -ratio * batch.advantages, torch.zeros_like(mask)


def sft(logprobs: Tensor, batch, cfg: "LossConfig") -> tuple[Tensor, Tensor]:
    """-log pi of the given tokens: supervised fine-tuning through the same update."""
    mask = batch.response_mask
    return -torch.where(mask, logprobs, torch.zeros_like(logprobs)), torch.zeros_like(mask)


POLICY_LOSSES = {"ppo": ppo, "gspo": gspo, "cispo": cispo, "reinforce": reinforce, "sft": sft}


# ---------------------------------------------------------------------------------------------------- mismatch correction
def binary_divergence(old_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, gate: str) -> Tensor:
    """How far pi_old is from mu at the sampled token, as two-way choices "this token or another", >= 0. [B, T]

    With p = mu(token), q = pi_old(token): binary_kl = p ln(p/q) + (1 - p) ln((1 - p)/(1 - q)) in nats; tv = |p - q|.
    """
    p, q = (torch.where(mask, x, torch.zeros_like(x)).exp().clamp(1e-6, 1 - 1e-6) for x in (behaviour_logprobs, old_logprobs))
    divergence = (p - q).abs() if gate == "tv" else p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    return divergence.clamp(min=0) * mask                                                      # rounding can fall below 0


def mismatch_correction(batch, cfg: "LossConfig") -> tuple[Tensor, Tensor]:
    """(detached weights [B, T] for tokens that another policy sampled, where a limit was reached [B, T]).

    w = mismatch_ratio = pi_old/mu corrects both the engine-trainer gap and staleness, token by token.
    Level, what is judged: each token by itself (token), the product (seq) or the geometric mean (geo) of its sequence's w;
    with a divergence gate the token's divergence, or its mean over the sequence.
    Gate, by what: ratio, low <= w <= high; binary_kl or tv, divergence <= limit.
    Mode, what happens beyond: mask, weight 0, and whatever is kept carries its own w; clip, w cut to [low, high];
    trunc, w cut to high. Off: all 1.
    TIS = token trunc (https://fengyao.notion.site/off-policy-rl), IcePop = token mask (arXiv:2510.18855), seq-mask-TIS = geo mask.
    """
    mask, mu = batch.response_mask, batch.behaviour_logprobs
    old = batch.old_logprobs.detach()
    if cfg.mismatch_level == "off":
        return mask.to(old.dtype), torch.zeros_like(mask)
    gap = log_ratio(old, mu, mask)                                                             # [B, T]
    ratio = gap.exp() * mask
    if cfg.mismatch_mode in ("clip", "trunc"):
        low = cfg.mismatch_low if cfg.mismatch_mode == "clip" else 0.0
        cut = (ratio < low) | (ratio > cfg.mismatch_high)
        return ratio.clamp(low, cfg.mismatch_high) * mask, cut & mask
    if cfg.mismatch_gate == "ratio":
        judged = {"token": lambda: gap, "seq": lambda: total_of(gap, batch.rollout)[:, None], "geo": lambda: sequence_mean(gap, mask, batch.rollout)}
        judged = judged[cfg.mismatch_level]().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()   # [B, T] or [B, 1]
        drop = (judged < cfg.mismatch_low) | (judged > cfg.mismatch_high)                      # NaN is not dropped: it must show
    else:
        judged = binary_divergence(old, mu, mask, cfg.mismatch_gate)                           # [B, T]
        drop = (sequence_mean(judged, mask, batch.rollout) if cfg.mismatch_level == "seq" else judged) > cfg.mismatch_limit
    return torch.where(drop, torch.zeros_like(ratio), ratio), drop & mask


# ---------------------------------------------------------------------------------------------------- KL, value loss
def kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kind: str) -> Tensor:
    """Per-token estimates of KL(pi || ref) from pi's own samples, with d = log pi - log ref. http://joschu.net/blog/kl-approx.html

    k1 = d (unbiased, may be negative); k2 = d^2 / 2 (its gradient is the reverse KL's); k3 = e^-d - 1 + d (unbiased, >= 0).
    """
    d = log_ratio(logprobs, ref_logprobs, mask)                                                # [B, T]
    return {"k1": d, "k2": d ** 2 / 2, "k3": torch.expm1(-d) + d}[kind]


def adapt_kl_scale(scale: float, ref_kl: float, rollouts: int, cfg: "LossConfig") -> float:
    """scale * (1 + clip(ref_kl / target - 1, -0.2, 0.2) * min(rollouts / horizon, 1)): steers the KL to --kl-target. arXiv:1909.08593, 2.2

    `scale` multiplies --kl-coef and --kl-reward-coef; ref_kl is in nats a token. A step moves it by a fifth at most. Without a target it stays.
    """
    if not cfg.kl_target:
        return scale
    return scale * (1 + min(max(ref_kl / cfg.kl_target - 1, -0.2), 0.2) * min(rollouts / cfg.kl_horizon, 1))


def value_loss(values: Tensor, batch, cfg: "LossConfig") -> tuple[Tensor, Tensor]:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2 per token, and where the clip took the gradient; c = --value-clip. arXiv:1506.02438

    values [B, T] carry the gradient; V_old = batch.values, R = batch.returns, in units of reward.
    """
    mask = batch.response_mask
    values, old, returns = (torch.where(mask, x, torch.zeros_like(x)) for x in (values, batch.values, batch.returns))
    plain = (values - returns) ** 2 / 2                                                        # [B, T]
    clipped = (old + (values - old).clamp(-cfg.value_clip, cfg.value_clip) - returns) ** 2 / 2
    beyond = (values - old).abs() > cfg.value_clip                                             # rounding is no clip
    return torch.maximum(plain, clipped), (clipped > plain) & beyond & mask


# ---------------------------------------------------------------------------------------------------- configuration, sum
@dataclass(frozen=True)
class LossConfig:
    """What the loss of a step is made of."""

    loss: Literal[*POLICY_LOSSES] = "ppo"   # policy loss
    aggregation: Literal[*AGGREGATIONS] = "token-mean"   # how token losses become one number
    clip_low: float = 0.2              # ppo, gspo: lower clip, 1 - clip_low
    clip_high: float = 0.2             # ppo, gspo: upper clip, 1 + clip_high
    dual_clip: float = 0.0             # ppo: the loss of a token with A < 0 is at most -dual_clip * A; 0 = no such limit
    cispo_ceiling: float = 5.0         # cispo: upper limit of its ratio
    mismatch_level: Literal["off", "token", "seq", "geo"] = "token"   # correction for pi_old/mu: none, by token, by product or by geometric mean of a sequence
    mismatch_gate: Literal["ratio", "binary_kl", "tv"] = "ratio"      # what is judged: the ratio, or a divergence at the sampled token
    mismatch_mode: Literal["mask", "clip", "trunc"] = "trunc"         # what happens beyond the limits
    mismatch_low: float = 0.5          # ratio gate, mask and clip: lower limit
    mismatch_high: float = 2.0         # ratio gate: upper limit
    mismatch_limit: float = 0.05       # binary_kl (nats) and tv (probability) gates: upper limit
    kl_coef: float = 0.0               # weight of the KL to the reference policy in the loss; 0 = none
    kl_kind: Literal["k1", "k2", "k3"] = "k3"   # estimator of that KL; k1 is refused as a loss
    kl_target: float = 0.0             # nats a token that the KL coefficients are steered to; 0 = they stay fixed
    kl_horizon: int = 10_000           # rollouts over which they are
    entropy_coef: float = 0.0          # weight of the entropy bonus; 0 = entropy is not computed
    value_clip: float = 0.2            # gae: how far a value may move from its old one before its gradient is cut, reward units
    mask_truncated: bool = False       # leave rollouts that hit a token limit out of the loss and its denominators

    def __post_init__(self):
        if self.clip_low < 0 or self.clip_high < 0 or self.clip_low >= 1:
            raise ValueError(f"--clip-low {self.clip_low} --clip-high {self.clip_high}: want 0 <= clip-low < 1 and clip-high >= 0.")
        if not 0 <= self.mismatch_low <= 1 <= self.mismatch_high:
            raise ValueError(f"--mismatch-low {self.mismatch_low} --mismatch-high {self.mismatch_high}: an on-policy token has ratio 1; want 0 <= low <= 1 <= high.")
        if self.mismatch_limit <= 0 or self.value_clip <= 0 or self.kl_horizon <= 0 or self.kl_target < 0:
            raise ValueError(f"--mismatch-limit {self.mismatch_limit} --value-clip {self.value_clip} --kl-horizon {self.kl_horizon} --kl-target {self.kl_target}: "
                             "want numbers above 0 (0 switches --kl-target off).")
        for refused, why in REFUSED:
            if refused(self):
                raise ValueError(why.format(c=self))


REFUSED = [                            # (flags that do not go together, why and the way out)
    (lambda c: c.dual_clip and c.loss != "ppo", "--dual-clip is read by --loss ppo only, not by {c.loss}; leave it out."),
    (lambda c: c.dual_clip and c.dual_clip <= 1 + c.clip_high, "--dual-clip {c.dual_clip}: it bounds ratios that have gone far; want more than 1 + clip-high = {c.clip_high} + 1."),
    (lambda c: c.loss not in ("ppo", "gspo") and (c.clip_low, c.clip_high) != (0.2, 0.2), "--clip-low and --clip-high are read by --loss ppo and gspo, not by {c.loss}; leave them out."),
    (lambda c: c.loss != "cispo" and c.cispo_ceiling != 5.0, "--cispo-ceiling is read by --loss cispo only, not by {c.loss}; leave it out."),
    (lambda c: c.cispo_ceiling < 1, "--cispo-ceiling {c.cispo_ceiling} would shrink even on-policy tokens; want at least 1."),
    (lambda c: c.mismatch_level in ("seq", "geo") and c.mismatch_mode != "mask",
     "--mismatch-level {c.mismatch_level} keeps or drops whole sequences, so --mismatch-mode {c.mismatch_mode} has nothing to cut. Use --mismatch-mode mask."),
    (lambda c: c.mismatch_gate != "ratio" and c.mismatch_mode != "mask",
     "--mismatch-gate {c.mismatch_gate} judges a divergence, so --mismatch-mode {c.mismatch_mode} has no ratio limit to cut at. Use --mismatch-mode mask."),
    (lambda c: c.mismatch_gate != "ratio" and c.mismatch_level == "geo",
     "--mismatch-level geo is a mean of ratios; --mismatch-gate {c.mismatch_gate} judges divergences. Use --mismatch-level seq."),
    (lambda c: c.kl_coef and c.kl_kind == "k1",
     "--kl-coef with --kl-kind k1: k1 as a loss has zero expected gradient. Use --kl-kind k2 or k3, or --kl-reward-coef."),
]


IGNORED = [                            # (flags that the others leave without effect, why and the way out): refused by train.py
    (lambda c: c.mismatch_level == "off" and (c.mismatch_gate, c.mismatch_mode, c.mismatch_low, c.mismatch_high, c.mismatch_limit) != ("ratio", "trunc", 0.5, 2.0, 0.05),
     "--mismatch-level off corrects nothing, so it reads no other --mismatch flag; leave them out, or choose a level."),
    (lambda c: c.mismatch_mode == "trunc" and c.mismatch_low != 0.5, "--mismatch-low {c.mismatch_low} is not read by --mismatch-mode trunc, which has an upper limit only; use clip or mask."),
    (lambda c: c.mismatch_gate == "ratio" and c.mismatch_limit != 0.05, "--mismatch-limit is read by --mismatch-gate binary_kl and tv; the ratio gate has --mismatch-low and --mismatch-high."),
    (lambda c: c.mismatch_gate != "ratio" and (c.mismatch_low, c.mismatch_high) != (0.5, 2.0), "--mismatch-low and --mismatch-high are read by --mismatch-gate ratio; {c.mismatch_gate} has --mismatch-limit."),
    (lambda c: c.kl_kind != "k3" and not c.kl_coef, "--kl-kind {c.kl_kind} says which KL is in the loss, and --kl-coef 0 has none; set it."),
    (lambda c: c.kl_horizon != 10_000 and not c.kl_target, "--kl-horizon {c.kl_horizon} is read with --kl-target only; set it."),
]


def step_loss(logprobs: Tensor, entropy: Tensor | None, batch, cfg: LossConfig, kind: str) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The part of the optimizer step's loss that these rows carry, and its metrics as name -> (sum, count).

    loss = sum over tokens of loss_weight * (w * policy loss + kl_scale * kl_coef * KL - entropy_coef * entropy), w the
    mismatch correction. logprobs (and entropy) [B, T] carry the gradient.
    """
    mask, weight = batch.response_mask, batch.loss_weight
    token_loss, clipped = POLICY_LOSSES[kind](logprobs, batch, cfg)
    tokens, zero = mask.sum(), torch.zeros_like(logprobs[0, 0])
    metrics = {}
    if kind != "sft":
        correction, cut = mismatch_correction(batch, cfg)
        token_loss = token_loss * correction
        gap = log_ratio(batch.old_logprobs, batch.behaviour_logprobs, mask)                    # [B, T]
        metrics |= {
            "mismatch_weight": (correction.sum(), tokens), "mismatch_weight_squared": ((correction ** 2).sum(), tokens),
            "clip_frac": (clipped.sum(), tokens),
            "policy_kl": (torch.where(mask, kl(batch.old_logprobs, logprobs.detach(), mask, "k3"), zero).sum(), tokens),
            "mismatch_kl": ((torch.expm1(gap) - gap).sum(), tokens),
            "mismatch_cut_frac": (cut.sum(), tokens) if cfg.mismatch_level in ("off", "token") else (        # decided by token, or by sequence
                batch.rollout[cut.any(-1)].unique().numel(), batch.rollout[mask.any(-1)].unique().numel()),
        }
        ages = batch.version - batch.policy_versions                                           # [B, T] publishes
        for age in ages[mask].unique().tolist():
            of = mask & (ages == age)                                                          # [B, T]
            for name, x in {"mismatch_ratio": gap.exp(), "cut_frac": cut, "clip_frac": clipped}.items():
                metrics[f"age{age}/{name}"] = (torch.where(of, x, 0).sum(), of.sum())
    if batch.ref_logprobs is not None:
        metrics["ref_kl"] = (kl(logprobs.detach(), batch.ref_logprobs, mask, "k3").sum(), tokens)
        if cfg.kl_coef:
            token_loss = token_loss + batch.kl_scale * cfg.kl_coef * kl(logprobs, batch.ref_logprobs, mask, cfg.kl_kind)
    if entropy is not None:
        metrics["entropy"] = (torch.where(mask, entropy.detach(), zero).sum(), tokens)
        token_loss = token_loss - cfg.entropy_coef * torch.where(mask, entropy, zero)
    return torch.where(mask, weight * token_loss, zero).sum(), metrics


def critic_step_loss(values: Tensor, batch, cfg: LossConfig) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """sum over tokens of loss_weight * value_loss, and its metrics as name -> (sum, count); values [B, T] carry the gradient."""
    mask = batch.response_mask
    token_loss, clipped = value_loss(values, batch, cfg)
    error = torch.where(mask, values.detach() - batch.returns, torch.zeros_like(values))
    metrics = {"value_clip_frac": (clipped.sum(), mask.sum()), "value_error": ((error ** 2).sum(), mask.sum())}
    return torch.where(mask, batch.loss_weight * token_loss, torch.zeros_like(values)).sum(), metrics
