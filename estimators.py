"""estimators.py owns the training batch (Batch, collate) and the advantage estimators (ESTIMATORS).

Every estimator is a pure function (batch, cfg) -> advantages [B, T]: new tensors out, nothing written into, no model,
no clipping, no loss. Adding one is a function here, a row in ESTIMATORS and a test; `--estimator` reads the keys.

Letters: B rows (one a segment), T tokens, R rollouts, L response tokens of the longest rollout. A rollout counts once
however many segments it has; where a method needs a *sequence*, that is a rollout: its response tokens in time order,
across its segments and across whatever was observed in between.
Tensors are in torch's default dtype: float32 in a run, float64 where recipes/exact_gradient.py holds them to the exact gradient.
Sources: named in each function; the rules of Batch are arXiv:2607.21653, section 4.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from agent import Trajectory


# ---------------------------------------------------------------------------------------------------- the batch
PER_ROLLOUT = ("raw_rewards", "rollout_rewards", "rollout_group", "truncated")        # fields of Batch with one entry a rollout


@dataclass
class Batch:
    """What one training step reads. Column t of every [B, T] tensor is about token t. None = not asked for."""

    token_ids: Tensor                  # [B, T] int32, padded with 0 beyond `lengths`
    response_mask: Tensor              # [B, T] bool, True where the policy sampled the token
    behaviour_logprobs: Tensor         # [B, T] nats: mu, what the engine sampled with; 0 off the response
    policy_versions: Tensor            # [B, T] int32, version of the weights that sampled it; -1 off the response
    lengths: Tensor                    # [B] int64, true lengths: never guessed from the mask or a pad id
    rollout: Tensor                    # [B] int64, row -> rollout
    position: Tensor                   # [B] int64, place of the segment in its rollout, in time order
    raw_rewards: Tensor                # [R] float64, one a rollout, as the agent gave it: what metrics report
    rollout_rewards: Tensor            # [R] float64, what estimators read: raw_rewards, or what shape_rewards made of them
    rollout_group: Tensor              # [R] int64, rollouts of one prompt share the number
    truncated: Tensor                  # [R] bool, some segment of the rollout was cut short
    loss_weight: Tensor                # [B, T] the loss is sum(loss_weight * token loss), see collate
    minibatch: Tensor                  # [B] int64, the optimizer step (of each epoch) that trains the row
    version: int                       # that of the weights under training: a token is version - policy_versions publishes old
    temperature: float                 # sampling temperature of the run; the trainer divides its logits by it
    images: list[list[bytes]] | None = None   # [B] the image files that each row's token_ids show, in order; None: no row shows any
    old_logprobs: Tensor | None = None  # [B, T] pi_old, the trainer's view of the same tokens before this update
    ref_logprobs: Tensor | None = None  # [B, T] the frozen reference policy, or the teacher
    values: Tensor | None = None       # [B, T] V_t, the critic's view before this update of what token t and all later ones will earn
    advantages: Tensor | None = None   # [B, T]
    returns: Tensor | None = None      # [B, T] what the critic learns to predict
    routed_experts: list | None = None  # [B] of each row None, or [C, layers, k] (or a Ray reference to it): experts that the engine chose for its first C tokens
    kl_scale: float = 1.0              # factor on both KL coefficients, moved by losses.adapt_kl_scale

    def __getstate__(self) -> dict:
        """Its tensors as arrays: a pickle carries those as they lie in memory, tensors through torch.save."""
        return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in vars(self).items()}

    def __setstate__(self, state: dict) -> None:
        vars(self).update({name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in state.items()})   # from Ray: read-only

    def spread(self, per_rollout: Tensor) -> Tensor:
        """[R] -> [B, T]: every response token gets its rollout's number, everything else 0."""
        return per_rollout.to(self.behaviour_logprobs.dtype)[self.rollout, None] * self.response_mask

    def sequences(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(row, column, rollout, place) of every response token, rollout by rollout in time order; each [N]."""
        order = torch.argsort(self.rollout * (self.position.max() + 1) + self.position)       # [B] rows in time order
        row, column = self.response_mask[order].nonzero(as_tuple=True)
        row = order[row]
        owner = self.rollout[row]
        counts = torch.bincount(owner, minlength=len(self.rollout_rewards))                   # [R]
        place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[owner]
        return row, column, owner, place


def collate(rollouts: list[list[Trajectory]], aggregation: Callable, temperature: float = 1.0, minibatches: int = 1,
            mask_truncated: bool = False, version: int = 0) -> Batch:
    """Scored rollouts (lists of segments) -> Batch, in the order given.

    `aggregation` (losses.AGGREGATIONS) turns masks into `loss_weight`, once for each whole optimizer step: micro-batches,
    packing and ranks then only add. Groups are dealt to the `minibatches` in order and never split. With `mask_truncated`
    the tokens of truncated rollouts get weight 0 and leave the denominators (DAPO's overlong filtering).
    Raises ValueError for a rollout that has no reward or no sampled token: those are dropped before, and counted.
    """
    rows = [segment for segments in rollouts for segment in segments]
    for segment in rows:
        if segment.reward is None or not math.isfinite(segment.reward):
            raise ValueError(f"Rollout {segment.rollout} has no reward ({segment.reward}); unscored rollouts must be dropped before collate, never trained as 0.")
    index = {segments[0].rollout: i for i, segments in enumerate(rollouts)}
    rollout = torch.tensor([index[s.rollout] for s in rows])                                   # [B]
    position = torch.tensor([p for segments in rollouts for p in range(len(segments))])        # [B]
    groups = {g: i for i, g in enumerate(dict.fromkeys(segments[0].group for segments in rollouts))}
    group = torch.tensor([groups[segments[0].group] for segments in rollouts])                 # [R]
    if minibatches > len(groups):
        raise ValueError(f"--minibatches {minibatches} asks for more optimizer steps than there are prompt groups ({len(groups)}); lower it.")

    lengths = torch.tensor([len(s) for s in rows])
    there = torch.arange(int(lengths.max())) < lengths[:, None]                                # [B, T] no padding
    def pad(name: str, dtype, fill=0) -> Tensor:
        out = torch.full(there.shape, fill, dtype=dtype)
        out[there] = torch.from_numpy(np.concatenate([getattr(s, name) for s in rows])).to(dtype)
        return out                                                                             # [B, T]

    response_mask = pad("response_mask", torch.bool)
    if (torch.zeros(len(rollouts), dtype=torch.long).index_add_(0, rollout, response_mask.sum(-1)) == 0).any():
        raise ValueError("A rollout without a sampled token reached collate; such rollouts must be dropped and counted before.")
    truncated = torch.tensor([any(s.truncated for s in segments) for segments in rollouts])    # [R]
    minibatch = (group * minibatches // len(groups))[rollout]                                  # [B]
    counted = response_mask & ~truncated[rollout, None] if mask_truncated else response_mask   # [B, T]
    loss_weight = torch.zeros(counted.shape)
    for m in range(minibatches):
        mine = minibatch == m
        loss_weight[mine] = aggregation(counted[mine], rollout[mine], group[rollout[mine]])
    rewards = torch.tensor([segments[0].reward for segments in rollouts], dtype=torch.float64)   # [R]
    return Batch(
        token_ids=pad("token_ids", torch.int32), response_mask=response_mask,
        behaviour_logprobs=pad("behaviour_logprobs", torch.get_default_dtype()), policy_versions=pad("policy_versions", torch.int32, -1),
        lengths=lengths, rollout=rollout, position=position,
        raw_rewards=rewards, rollout_rewards=rewards, rollout_group=group, truncated=truncated, loss_weight=loss_weight, minibatch=minibatch, version=version, temperature=temperature,
        routed_experts=[s.routed_experts for s in rows] if any(s.routed_experts is not None for s in rows) else None,
        images=[[image.file for image in s.images] for s in rows] if any(s.images for s in rows) else None)


def supervised_batch(pairs: list[tuple[list[int], list[int]]], aggregation: Callable) -> Batch:
    """(prompt ids, answer ids) pairs -> Batch whose response tokens are the answers, for supervised fine-tuning."""
    rollouts = []
    for i, (prompt, answer) in enumerate(pairs):
        trajectory = Trajectory(rollout=i, group=i, reward=0.0)
        trajectory.extend(prompt)
        trajectory.extend(answer, logprobs=[0.0] * len(answer), policy_versions=[-1] * len(answer))   # nobody sampled them
        rollouts.append([trajectory])
    return collate(rollouts, aggregation)


# ---------------------------------------------------------------------------------------------------- pieces
@dataclass(frozen=True)
class EstimatorConfig:
    """Numbers that estimators read. Those an estimator does not name in its row of ESTIMATORS are refused with it."""

    gamma: float = 1.0                 # discount per response token
    gae_lambda: float = 1.0            # GAE's lambda: 1 = Monte Carlo returns minus the value, 0 = one-step differences
    whiten: bool = True                # whiten where the method says so
    kl_reward_coef: float = 0.0        # weight of -KL to the reference policy as a reward per token; 0 = none
    kl_reward_kind: Literal["k1", "k3"] = "k1"   # estimator of that KL; k1's expected gradient is the KL's, k3's is not
    reward_clip: tuple[float, float] | None = None   # rewards are cut to this range before the estimator; None = not
    overlong_buffer: int = 0           # tokens before --context-length over which a penalty grows to its full size; 0 = none
    overlong_penalty: float = 1.0      # that full size
    truncated_reward: float | None = None   # reward of truncated rollouts: times it in [0, 1], or replaced by it below 0; None = as it is

    def __post_init__(self):
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: want a number from 0 to 1.")
        if self.reward_clip is not None and not self.reward_clip[0] < self.reward_clip[1]:
            raise ValueError(f"--reward-clip {self.reward_clip[0]} {self.reward_clip[1]}: want the lower limit first, then a higher one.")
        if self.overlong_buffer < 0 or self.overlong_penalty < 0:
            raise ValueError(f"--overlong-buffer {self.overlong_buffer} --overlong-penalty {self.overlong_penalty}: both are sizes, so want at least 0.")
        if self.truncated_reward is not None and not self.truncated_reward <= 1:
            raise ValueError(f"--truncated-reward {self.truncated_reward}: want a factor in [0, 1], or a negative reward.")
        if self.overlong_buffer and self.truncated_reward is not None:
            raise ValueError("--overlong-buffer and --truncated-reward both punish length; choose one.")


def shape_rewards(batch: Batch, cfg: EstimatorConfig, context_length: int) -> Tensor:
    """raw rewards -> rewards that estimators read, [R]: first the penalty for length, then the cut to --reward-clip.

    Overlong (DAPO, arXiv:2503.14476, eq. 13): -penalty * clip(longest - (context_length - buffer), 0, buffer) / buffer,
    `longest` the tokens of the rollout's longest segment, prompt and observations included. Segments are not added up.
    """
    rewards = batch.raw_rewards
    if cfg.overlong_buffer:
        longest = torch.zeros(len(rewards), dtype=torch.long).scatter_reduce(0, batch.rollout, batch.lengths, "amax")   # [R]
        rewards = rewards - cfg.overlong_penalty * (longest.double() - context_length + cfg.overlong_buffer).clamp(0, cfg.overlong_buffer) / cfg.overlong_buffer
    if (c := cfg.truncated_reward) is not None:
        rewards = torch.where(batch.truncated, rewards * c if c >= 0 else torch.full_like(rewards, c), rewards)
    return rewards.clamp(*cfg.reward_clip) if cfg.reward_clip else rewards


def group_mean(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """(mean of the rollout's group [R], size of it [R]); where all rewards of a group are equal the mean is exactly that reward."""
    zeros = torch.zeros(int(group.max()) + 1, dtype=rewards.dtype)
    count = zeros.index_add(0, group, torch.ones_like(rewards))
    mean = zeros.index_add(0, group, rewards) / count
    low, high = (zeros.scatter_reduce(0, group, rewards, how, include_self=False) for how in ("amin", "amax"))
    mean = torch.where(low == high, low, mean)         # 0.1 + 0.1 + 0.1 over 3 is not 0.1 in binary: an equal group must give 0
    return mean[group], count[group]


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / std over the masked tokens of the batch, population variance; 0 off the mask and where all are equal."""
    values = x[mask].double()
    if values.numel() == 0 or values.min() == values.max():
        return torch.zeros_like(x)
    mean, std = values.mean(), values.var(unbiased=False).clamp(min=1e-8).sqrt()
    return ((x - mean) / std).to(x.dtype) * mask


def backward_sums(batch: Batch, token_values: Tensor, factor: float) -> Tensor:
    """S_t = x_t + factor * S_{t+1} over a rollout's response tokens in time order; observed tokens are skipped. [B, T]"""
    row, column, owner, place = batch.sequences()
    sums = torch.zeros(len(batch.rollout_rewards), int(place.max()) + 1, dtype=token_values.dtype)   # [R, L]
    sums[owner, place] = token_values[row, column]
    for t in range(sums.shape[1] - 2, -1, -1):
        sums[:, t] += factor * sums[:, t + 1]
    out = torch.zeros_like(token_values)
    out[row, column] = sums[owner, place]
    return out                                                                                 # [B, T]


def final_rewards(batch: Batch) -> Tensor:
    """The rollout's reward on the last response token of its last segment, 0 elsewhere. [B, T]"""
    row, column, owner, place = batch.sequences()
    last = torch.ones(len(row), dtype=torch.bool)
    last[:-1] = owner[:-1] != owner[1:]
    rewards = torch.zeros(batch.response_mask.shape)
    rewards[row[last], column[last]] = batch.rollout_rewards[owner[last]].to(rewards.dtype)
    return rewards                                                                             # [B, T]


def ref_gap(batch: Batch) -> Tensor:
    """d = log pi_old - log pi_ref of the response tokens, nats, cut to +-30; 0 elsewhere, and where both are -inf. [B, T]"""
    read = batch.response_mask & ~(batch.old_logprobs.isneginf() & batch.ref_logprobs.isneginf())
    return torch.where(read, batch.old_logprobs - batch.ref_logprobs, 0.0).clamp(-30, 30)


def token_rewards(batch: Batch, cfg: EstimatorConfig) -> Tensor:
    """The rollout's reward on its last response token, minus kl_reward_coef * KL estimate on every one. [B, T]

    With d = ref_gap: k1 = d, k3 = e^-d - 1 + d (http://joschu.net/blog/kl-approx.html).
    """
    rewards = final_rewards(batch)
    if cfg.kl_reward_coef:
        d = ref_gap(batch)                                                                     # [B, T]
        kl = d if cfg.kl_reward_kind == "k1" else torch.expm1(-d) + d
        rewards = rewards - batch.kl_scale * cfg.kl_reward_coef * kl
    return rewards                                                                             # [B, T]


def generalized_advantages(batch: Batch, cfg: EstimatorConfig) -> Tensor:
    """A_t = delta_t + gamma * lambda * A_{t+1}, delta_t = r_t + gamma * V_{t+1} - V_t; V after the last token is 0. arXiv:1506.02438

    t runs over the rollout's response tokens in time order, across its segments: V_{t+1} is that of the next sampled token.
    """
    row, column, owner, _ = batch.sequences()
    values = batch.values[row, column]                                                         # [N]
    following = torch.zeros_like(values)
    following[:-1] = torch.where(owner[1:] == owner[:-1], values[1:], 0.0)
    deltas = torch.zeros_like(batch.values)                                                    # [B, T]
    deltas[row, column] = token_rewards(batch, cfg)[row, column] + cfg.gamma * following - values
    return backward_sums(batch, deltas, cfg.gamma * cfg.gae_lambda)


def value_targets(batch: Batch, cfg: EstimatorConfig) -> Tensor:
    """R_t = A_t + V_t with A_t before whitening: what the critic learns to predict (the return itself at lambda 1). [B, T]"""
    return generalized_advantages(batch, cfg) + torch.where(batch.response_mask, batch.values, 0.0)


# ---------------------------------------------------------------------------------------------------- estimators
def reinforce(batch: Batch, cfg: EstimatorConfig) -> Tensor:
    """A_t = discounted return of token_rewards (reward at the end, KL penalty per token), whitened. REINFORCE++, arXiv:2501.03262"""
    returns = backward_sums(batch, token_rewards(batch, cfg), cfg.gamma)                       # [B, T]
    return whiten(returns, batch.response_mask) if cfg.whiten else returns


def reinforce_baseline(batch: Batch, cfg: EstimatorConfig) -> Tensor:
    """A_i = r_i - mean reward of i's prompt, then whitened over the batch's response tokens. arXiv:2501.03262, section 3"""
    mean, _ = group_mean(batch.rollout_rewards, batch.rollout_group)
    advantages = batch.spread(batch.rollout_rewards - mean)                                    # [B, T]
    return whiten(advantages, batch.response_mask) if cfg.whiten else advantages


def grpo(batch: Batch, cfg: EstimatorConfig) -> Tensor:
    """A_i = (r_i - mean) / (sample std + 1e-6) over i's prompt; exactly 0 alone or where all rewards are equal. arXiv:2402.03300, eq. 3"""
    rewards, group = batch.rollout_rewards, batch.rollout_group                                # [R], [R]
    mean, count = group_mean(rewards, group)
    squares = torch.zeros(int(group.max()) + 1, dtype=rewards.dtype).index_add(0, group, (rewards - mean) ** 2)[group]
    std = (squares / (count - 1).clamp(min=1)).sqrt()                                          # [R]
    return batch.spread((rewards - mean) / (std + 1e-6))


def dr_grpo(batch: Batch, cfg: EstimatorConfig) -> Tensor:
    """A_i = r_i - mean reward of i's prompt, not divided by its std. Dr. GRPO, arXiv:2503.20783"""
    mean, _ = group_mean(batch.rollout_rewards, batch.rollout_group)
    return batch.spread(batch.rollout_rewards - mean)


def rloo(batch: Batch, cfg: EstimatorConfig) -> Tensor:
    """A_i = r_i - mean reward of the *other* rollouts of i's prompt = (r_i - mean) * n / (n - 1); r_i itself when alone. arXiv:2402.14740"""
    rewards = batch.rollout_rewards
    mean, count = group_mean(rewards, batch.rollout_group)
    return batch.spread(torch.where(count > 1, (rewards - mean) * count / (count - 1).clamp(min=1), rewards))


def flash_reinforce(batch: Batch, cfg: EstimatorConfig) -> Tensor:
    """A_i = r_i - mean reward over the batch's rollouts, whatever their prompts; it needs no second rollout of a prompt."""
    mean, _ = group_mean(batch.rollout_rewards, torch.zeros_like(batch.rollout_group))
    return batch.spread(batch.rollout_rewards - mean)


def gae(batch: Batch, cfg: EstimatorConfig) -> Tensor:
    """A_t = generalized_advantages with the critic's values, whitened. PPO, arXiv:1707.06347"""
    advantages = generalized_advantages(batch, cfg)                                            # [B, T]
    return whiten(advantages, batch.response_mask) if cfg.whiten else advantages


def on_policy_distill(batch: Batch, cfg: EstimatorConfig) -> Tensor:
    """A_t = log p_teacher - log pi_old of each token the student sampled: the reverse KL to --ref, step by step; rewards are not read.

    E[-A_t] is KL(pi || teacher) at that position, in nats. https://thinkingmachines.ai/blog/on-policy-distillation
    """
    return -ref_gap(batch)                                                                     # [B, T]


@dataclass(frozen=True)
class Estimator:
    """A method and what it needs, in one row: nothing else lists its name.

    `reads` names the fields of EstimatorConfig it looks at; any other that is set is refused at start. A method that reads
    rewards (`rewards`) also obeys those of shape_rewards.
    """

    advantages: Callable[[Batch, EstimatorConfig], Tensor]
    reads: tuple[str, ...] = ()
    groups: bool = False               # a baseline within the prompt, so --group-size must be above 1
    critic: bool = False               # reads batch.values, so a value model is trained along
    old: bool = False                  # reads batch.old_logprobs whatever the KL flags say: they are then there before the update
    teacher: bool = False              # reads batch.ref_logprobs of --ref whatever the KL flags say
    rewards: bool = True

    def __call__(self, batch: Batch, cfg: EstimatorConfig) -> Tensor:
        return self.advantages(batch, cfg)

    def unread(self, cfg: EstimatorConfig) -> list[str]:
        """Fields that were set and that this method would ignore."""
        read = self.reads + (SHAPING if self.rewards else ())
        return [f.name for f in fields(cfg) if getattr(cfg, f.name) != f.default and f.name not in read]


SHAPING = ("reward_clip", "overlong_buffer", "overlong_penalty", "truncated_reward")   # read by shape_rewards
KL_REWARD = ("kl_reward_coef", "kl_reward_kind")                                       # read by token_rewards

ESTIMATORS = {                         # the only list of names: the CLI reads its keys
    "grpo": Estimator(grpo, groups=True),
    "dr_grpo": Estimator(dr_grpo, groups=True),
    "rloo": Estimator(rloo, groups=True),
    "reinforce": Estimator(reinforce, reads=("gamma", "whiten", *KL_REWARD)),
    "reinforce_baseline": Estimator(reinforce_baseline, reads=("whiten",), groups=True),
    "flash_reinforce": Estimator(flash_reinforce),
    "gae": Estimator(gae, reads=("gamma", "gae_lambda", "whiten", *KL_REWARD), critic=True),
    "on_policy_distill": Estimator(on_policy_distill, old=True, teacher=True, rewards=False),
}
