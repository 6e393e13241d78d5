"""estimators.py owns the training batch (Batch, collate) and the advantage estimators (ESTIMATORS).

Every estimator is a pure function (batch, cfg) -> advantages [B, T]: new tensors out, nothing written into, no model,
no clipping, no loss. Adding one is a function here, a row in ESTIMATORS and a test; `--estimator` reads the keys.

Letters: B rows (one a segment), T tokens, R rollouts, L response tokens of the longest rollout. A rollout counts once
however many segments it has; where a method needs a *sequence*, that is a rollout: its response tokens in time order,
across its segments and across whatever was observed in between.
Sources: named in each function; the record's rules are arXiv:2607.21653, section 4.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agent import Trajectory


# ---------------------------------------------------------------------------------------------------- the batch
@dataclass
class Batch:
    """What one training step reads. Column t of every [B, T] tensor is about token t. None = not asked for."""

    token_ids: Tensor                  # [B, T] int32, padded with 0 beyond `lengths`
    response_mask: Tensor              # [B, T] bool, True where the policy sampled the token
    behaviour_logprobs: Tensor         # [B, T] float32, nats: mu, what the engine sampled with; 0 off the response
    policy_versions: Tensor            # [B, T] int32, version of the weights that sampled it; -1 off the response
    lengths: Tensor                    # [B] int64, true lengths: never guessed from the mask or a pad id
    rollout: Tensor                    # [B] int64, row -> rollout
    position: Tensor                   # [B] int64, place of the segment in its rollout, in time order
    rollout_rewards: Tensor            # [R] float64, one a rollout
    rollout_group: Tensor              # [R] int64, rollouts of one prompt share the number
    truncated: Tensor                  # [R] bool, some segment of the rollout was cut short
    loss_weight: Tensor                # [B, T] float32, the loss is sum(loss_weight * token loss), see collate
    minibatch: Tensor                  # [B] int64, the optimizer step (of each epoch) that trains the row
    temperature: float                 # sampling temperature of the run; the trainer divides its logits by it
    old_logprobs: Tensor | None = None  # [B, T] pi_old, the trainer's view of the same tokens before this update
    ref_logprobs: Tensor | None = None  # [B, T] the frozen reference policy
    advantages: Tensor | None = None   # [B, T]

    def spread(self, per_rollout: Tensor) -> Tensor:
        """[R] -> [B, T]: every response token gets its rollout's number, everything else 0."""
        return per_rollout.float()[self.rollout, None] * self.response_mask

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
            mask_truncated: bool = False) -> Batch:
    """Scored rollouts (lists of segments) -> Batch, in the order given.

    `aggregation` (losses.AGGREGATIONS) turns masks into `loss_weight`, once for each whole optimizer step: micro-batches,
    packing and ranks then only add. Groups are dealt to the `minibatches` in order and never split. With `mask_truncated`
    the tokens of truncated rollouts get weight 0 and leave the denominators (DAPO's overlong filtering).
    Raises ValueError for a rollout that has no reward or no sampled token: those are dropped before, and counted.
    """
    rows = [segment for segments in rollouts for segment in segments]
    for segment in rows:
        if segment.reward is None or segment.reward != segment.reward:
            raise ValueError(f"Rollout {segment.rollout} has no reward; unscored rollouts must be dropped before collate, never trained as 0.")
    index = {segments[0].rollout: i for i, segments in enumerate(rollouts)}
    rollout = torch.tensor([index[s.rollout] for s in rows])                                   # [B]
    position = torch.tensor([p for segments in rollouts for p in range(len(segments))])        # [B]
    groups = list(dict.fromkeys(segments[0].group for segments in rollouts))
    group = torch.tensor([groups.index(segments[0].group) for segments in rollouts])           # [R]
    if minibatches > len(groups):
        raise ValueError(f"--minibatches {minibatches} asks for more optimizer steps than there are prompt groups ({len(groups)}); lower it.")

    lengths = torch.tensor([len(s) for s in rows])
    def pad(name: str, dtype, fill=0) -> Tensor:
        out = torch.full((len(rows), int(lengths.max())), fill, dtype=dtype)
        for i, segment in enumerate(rows):
            out[i, : len(segment)] = torch.tensor(getattr(segment, name))
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
    return Batch(
        token_ids=pad("token_ids", torch.int32), response_mask=response_mask,
        behaviour_logprobs=pad("behaviour_logprobs", torch.float32), policy_versions=pad("policy_versions", torch.int32, -1),
        lengths=lengths, rollout=rollout, position=position,
        rollout_rewards=torch.tensor([segments[0].reward for segments in rollouts], dtype=torch.float64),
        rollout_group=group, truncated=truncated, loss_weight=loss_weight, minibatch=minibatch, temperature=temperature)


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
    """Numbers that estimators read."""

    gamma: float = 1.0                 # discount per response token (reinforce)
    whiten: bool = True                # whiten where the method says so (reinforce, reinforce_baseline)
    kl_reward_coef: float = 0.0        # weight of -KL to the reference policy as a reward per token (reinforce); 0 = none


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


def discounted_returns(batch: Batch, token_rewards: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + gamma * G_{t+1} over a rollout's response tokens in time order; observed tokens are skipped. [B, T]"""
    row, column, owner, place = batch.sequences()
    rewards = torch.zeros(len(batch.rollout_rewards), int(place.max()) + 1)                    # [R, L]
    rewards[owner, place] = token_rewards[row, column]
    for t in range(rewards.shape[1] - 2, -1, -1):
        rewards[:, t] += gamma * rewards[:, t + 1]
    returns = torch.zeros(batch.response_mask.shape)
    returns[row, column] = rewards[owner, place]
    return returns                                                                             # [B, T]


def final_rewards(batch: Batch) -> Tensor:
    """The rollout's reward on the last response token of its last segment, 0 elsewhere. [B, T]"""
    row, column, owner, place = batch.sequences()
    last = torch.ones(len(row), dtype=torch.bool)
    last[:-1] = owner[:-1] != owner[1:]
    rewards = torch.zeros(batch.response_mask.shape)
    rewards[row[last], column[last]] = batch.rollout_rewards[owner[last]].float()
    return rewards                                                                             # [B, T]


# ---------------------------------------------------------------------------------------------------- estimators
def reinforce(batch: Batch, cfg: EstimatorConfig) -> Tensor:
    """A_t = discounted return of (reward on the last token - kl_reward_coef * k1 per token), whitened. REINFORCE++, arXiv:2501.03262

    k1 = old_logprobs - ref_logprobs, an unbiased estimate of the KL to the reference policy, in nats.
    """
    rewards = final_rewards(batch)                                                             # [B, T]
    if cfg.kl_reward_coef:
        rewards = rewards - cfg.kl_reward_coef * (batch.old_logprobs - batch.ref_logprobs) * batch.response_mask
    returns = discounted_returns(batch, rewards, cfg.gamma)                                    # [B, T]
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


@dataclass(frozen=True)
class Estimator:
    """A method and what it needs. `groups`: a baseline within the prompt, so --group-size must be above 1."""

    advantages: Callable[..., Tensor]
    groups: bool = False
    kl_reward: bool = False            # reads --kl-reward-coef

    def __call__(self, batch: Batch, cfg: EstimatorConfig) -> Tensor:
        return self.advantages(batch, cfg)


ESTIMATORS = {                         # the only list of names: the CLI reads its keys
    "grpo": Estimator(grpo, groups=True),
    "dr_grpo": Estimator(dr_grpo, groups=True),
    "rloo": Estimator(rloo, groups=True),
    "reinforce": Estimator(reinforce, kl_reward=True),
    "reinforce_baseline": Estimator(reinforce_baseline, groups=True),
}
