"""losses.py owns the policy losses, the mismatch correction, the KL estimators, the entropy and the aggregations.

Pure functions of tensors: no forward pass, no optimizer, no logging. A policy loss gives the loss of every token
[B, T]; the step's loss is sum(loss_weight * token loss), where `loss_weight` (AGGREGATIONS) was fixed for the whole
optimizer step, so micro-batches and ranks only add. Adding one is a function, a row in its table and a test.

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


def tokens_of(mask: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """(response tokens of the row's owner [B], number of owners that have any [])."""
    tokens = torch.zeros(int(owner.max()) + 1).index_add(0, owner, mask.sum(-1).float())
    return tokens[owner].clamp(min=1), (tokens > 0).sum().clamp(min=1)


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
    """numerator - denominator where masked in, cut to +-30; exactly 0 (and no gradient) elsewhere. A NaN stays one. [B, T]"""
    zero = torch.zeros((), dtype=numerator.dtype)
    return (torch.where(mask, numerator, zero) - torch.where(mask, denominator, zero)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ppo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cfg: "LossConfig") -> tuple[Tensor, Tensor]:
    """-min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) per token, and where the clip took the gradient. arXiv:1707.06347, eq. 7

    All inputs [B, T]; gradient flows through logprobs only. Asymmetric clipping is DAPO's clip-higher.
    """
    ratio = log_ratio(logprobs, old_logprobs, mask).exp()                                      # [B, T]
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)                                 # [B, T]
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    return loss, (clipped * advantages < ratio * advantages) & mask                            # [B, T], [B, T]


def reinforce(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cfg: "LossConfig") -> tuple[Tensor, Tensor]:
    """-A * pi / stop_gradient(pi): the value is -A and the gradient is that of -A * log pi. Williams 1992

    pi_old := pi, so it is meant for one optimizer step a batch; old_logprobs only enters through the mismatch ratio.
    """
    ratio = log_ratio(logprobs, logprobs.detach(), mask).exp()                                 # [B, T], all ones
    return -ratio * advantages, torch.zeros_like(mask)


def sft(logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor | None, mask: Tensor, cfg: "LossConfig") -> tuple[Tensor, Tensor]:
    """-log pi of the given tokens: supervised fine-tuning through the same update."""
    return -torch.where(mask, logprobs, torch.zeros((), dtype=logprobs.dtype)), torch.zeros_like(mask)


POLICY_LOSSES = {"ppo": ppo, "reinforce": reinforce, "sft": sft}


# ---------------------------------------------------------------------------------------------------- mismatch correction
def mismatch_correction(old_logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, cfg: "LossConfig") -> Tensor:
    """Detached weights [B, T] for tokens that another policy sampled: mismatch_ratio = pi_old/mu, cut at the top.

    off: 1. token + trunc: min(ratio, mismatch_high), truncated importance sampling (TIS, https://fengyao.notion.site/off-policy-rl).
    It corrects both the engine-trainer gap and staleness, token by token.
    """
    if cfg.mismatch_level == "off":
        return mask.to(old_logprobs.dtype)
    ratio = log_ratio(old_logprobs.detach(), behaviour_logprobs, mask).exp()                   # [B, T]
    return ratio.clamp(max=cfg.mismatch_high) * mask


# ---------------------------------------------------------------------------------------------------- KL, entropy
def kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kind: str) -> Tensor:
    """Per-token estimates of KL(pi || ref) from pi's own samples, with d = log pi - log ref. http://joschu.net/blog/kl-approx.html

    k1 = d (unbiased, may be negative); k2 = d^2 / 2 (its gradient is the reverse KL's); k3 = e^-d - 1 + d (unbiased, >= 0).
    """
    d = log_ratio(logprobs, ref_logprobs, mask)                                                # [B, T]
    return {"k1": d, "k2": d ** 2 / 2, "k3": torch.expm1(-d) + d}[kind]


# ---------------------------------------------------------------------------------------------------- configuration, sum
@dataclass(frozen=True)
class LossConfig:
    """What the loss of a step is made of."""

    loss: Literal[*POLICY_LOSSES] = "ppo"   # policy loss
    aggregation: Literal[*AGGREGATIONS] = "token-mean"   # how token losses become one number
    clip_low: float = 0.2              # ppo: lower clip, 1 - clip_low
    clip_high: float = 0.2             # ppo: upper clip, 1 + clip_high
    mismatch_level: Literal["off", "token"] = "token"   # correction for pi_old/mu: off, or per token and truncated (TIS)
    mismatch_high: float = 2.0         # upper limit of the corrected ratio
    kl_coef: float = 0.0               # weight of the KL to the reference policy in the loss; 0 = none
    kl_kind: Literal["k1", "k2", "k3"] = "k3"   # estimator of that KL; k1 is refused as a loss
    entropy_coef: float = 0.0          # weight of the entropy bonus; 0 = entropy is not computed
    mask_truncated: bool = False       # leave rollouts that hit a token limit out of the loss and its denominators

    def __post_init__(self):
        if self.clip_low < 0 or self.clip_high < 0 or self.clip_low >= 1:
            raise ValueError(f"--clip-low {self.clip_low} --clip-high {self.clip_high}: want 0 <= clip-low < 1 and clip-high >= 0.")
        if self.mismatch_high < 1:
            raise ValueError(f"--mismatch-high {self.mismatch_high} would shrink even on-policy tokens; want at least 1.")
        if self.kl_coef and self.kl_kind == "k1":
            raise ValueError("--kl-coef with --kl-kind k1: k1 as a loss has zero expected gradient. Use --kl-kind k2 or k3, or --kl-reward-coef.")


def step_loss(logprobs: Tensor, entropy: Tensor | None, batch, cfg: LossConfig, kind: str) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The part of the optimizer step's loss that these rows carry, and its metrics as name -> (sum, count).

    loss = sum over tokens of loss_weight * (w * policy loss + kl_coef * KL - entropy_coef * entropy), w the mismatch
    correction. `batch` has the fields of estimators.Batch; logprobs (and entropy) [B, T] carry the gradient.
    """
    mask, weight = batch.response_mask, batch.loss_weight
    token_loss, clipped = POLICY_LOSSES[kind](logprobs, batch.old_logprobs, batch.advantages, mask, cfg)
    tokens, zero = mask.sum(), torch.zeros((), dtype=logprobs.dtype)
    metrics = {}
    if kind != "sft":
        correction = mismatch_correction(batch.old_logprobs, batch.behaviour_logprobs, mask, cfg)
        token_loss = token_loss * correction
        gap = log_ratio(batch.old_logprobs, batch.behaviour_logprobs, mask)                    # [B, T]
        metrics |= {
            "clip_frac": (clipped.sum(), tokens),
            "policy_kl": (torch.where(mask, kl(batch.old_logprobs, logprobs.detach(), mask, "k3"), zero).sum(), tokens),
            "mismatch_kl": ((torch.expm1(gap) - gap).sum(), tokens),
            "mismatch_cut_frac": ((gap.exp() > cfg.mismatch_high).sum() if cfg.mismatch_level != "off" else zero, tokens),
        }
    if batch.ref_logprobs is not None:
        ref_kl = kl(logprobs, batch.ref_logprobs, mask, cfg.kl_kind)
        metrics["ref_kl"] = (ref_kl.detach().sum(), tokens)
        token_loss = token_loss + cfg.kl_coef * ref_kl
    if entropy is not None:
        metrics["entropy"] = (torch.where(mask, entropy.detach(), zero).sum(), tokens)
        token_loss = token_loss - cfg.entropy_coef * torch.where(mask, entropy, zero)
    return torch.where(mask, weight * token_loss, zero).sum(), metrics
