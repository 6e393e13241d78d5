"""Tests of losses.py: values by hand, gradients by autograd and by definition, and what masked entries must not do.

Tensors are [B, T], column t about token t, and float64 unless a test says otherwise.
"""

import collections
import itertools
import json
import math
import statistics
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Bernoulli, kl_divergence

from losses import (
    AGGREGATIONS, POLICY_LOSSES, LossConfig, adapt_kl_scale, binary_divergence, cispo, critic_step_loss, gspo, kl, log_ratio, mismatch_correction, ppo, reinforce,
    sft, step_loss, value_loss)

CASES = {case["id"].split("-")[0]: case for case in json.loads((Path(__file__).parent / "cases.json").read_text())}
OFF = LossConfig(mismatch_level="off")
ACCEPTED = [                           # level, gate and mode of the mismatch correction that go together; all others are refused
    "off ratio trunc", "off ratio clip", "off ratio mask", "off binary_kl mask", "off tv mask",
    "token ratio trunc", "token ratio clip", "token ratio mask", "token binary_kl mask", "token tv mask",
    "seq ratio mask", "seq binary_kl mask", "seq tv mask", "geo ratio mask"]
EVERY = [(kind, correction) for kind in POLICY_LOSSES for correction in ACCEPTED[:1] + ACCEPTED[5:] if kind != "sft" or correction == ACCEPTED[0]]
every = pytest.mark.parametrize("kind, correction", EVERY, ids=[f"{kind}-{correction.replace(' ', '-')}" for kind, correction in EVERY])
few = settings(max_examples=50, deadline=None, derandomize=True, database=None)


# ---------------------------------------------------------------------------------------------------- builders
@dataclass
class Rows:
    """The fields of a batch that a loss reads: [B, T], rollout [B] (a rollout a row, unless told) and numbers."""

    response_mask: Tensor
    loss_weight: Tensor
    old_logprobs: Tensor | None = None
    behaviour_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    ref_logprobs: Tensor | None = None
    rollout: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    policy_versions: Tensor | None = None
    version: int = 0
    kl_scale: float = 1.0

    def __post_init__(self):
        self.rollout = torch.arange(len(self.response_mask)) if self.rollout is None else self.rollout
        self.policy_versions = torch.zeros_like(self.response_mask, dtype=torch.int32) if self.policy_versions is None else self.policy_versions

    def take(self, rows) -> "Rows":
        return Rows(*(value[rows] if isinstance(value, Tensor) else value for value in (getattr(self, f.name) for f in fields(self))))


def corrected(correction: str, **options) -> LossConfig:
    """"token ratio mask" and other flags as a LossConfig."""
    level, gate, mode = correction.split()
    return LossConfig(mismatch_level=level, mismatch_gate=gate, mismatch_mode=mode, **options)


def full(kind: str, correction: str) -> LossConfig:
    """Every term of the loss at work, with limits that cut some of random_rows' tokens and not others."""
    own = {"ppo": dict(dual_clip=1.45, clip_high=0.3), "gspo": dict(clip_low=0.1, clip_high=0.05), "cispo": dict(cispo_ceiling=1.25)}
    return corrected(correction, loss=kind, kl_coef=0.3, kl_kind="k3", entropy_coef=0.2, mismatch_low=0.7, mismatch_high=1.4, mismatch_limit=0.02, **own.get(kind, {}))


def f64(*rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def close(seen, wanted, atol=1e-5):
    torch.testing.assert_close(torch.as_tensor(seen, dtype=torch.float64), torch.as_tensor(wanted, dtype=torch.float64), rtol=0, atol=atol)


def weights(mask: Tensor, aggregation: str = "token-mean", rollout=None, group=None) -> Tensor:
    """loss_weight with a rollout and a prompt of its own for each row, unless told."""
    rows = range(len(mask))
    return AGGREGATIONS[aggregation](mask, torch.tensor(rollout or rows), torch.tensor(group or rows))


def random_rows(seed: int, columns: int = 5, rollout=(0, 1, 0, 2)) -> tuple[Rows, Tensor, Tensor]:
    """(rows, logprobs, entropy) in float64: policies within e^+-1 of each other, about two thirds of the tokens sampled, one rollout in two rows."""
    g, rows = torch.Generator().manual_seed(seed), len(rollout)
    def near(center, width):
        return center + width * (2 * torch.rand(rows, columns, generator=g, dtype=torch.float64) - 1)
    zeros = torch.zeros(rows, columns, dtype=torch.float64)
    mask = torch.rand(rows, columns, generator=g) < 0.67
    mask[0, 0] = True
    logprobs = near(zeros - 3, 1.5)
    batch = Rows(mask, weights(mask).double(), near(logprobs, 0.5), near(logprobs, 1.0), near(zeros, 2.0), near(logprobs, 1.0), torch.tensor(rollout),
                 near(logprobs + 3, 0.5), near(zeros, 2.0), torch.randint(5, 8, mask.shape, generator=g), version=7, kl_scale=0.5)
    return batch, logprobs, near(zeros + 2, 1.0)


def step(batch: Rows, logprobs: Tensor, entropy: Tensor | None = None, cfg=OFF, kind=None):
    """(loss, its gradient in logprobs, metrics)."""
    logprobs = logprobs.clone().requires_grad_()
    loss, metrics = step_loss(logprobs, entropy, batch, cfg, kind or cfg.loss)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0], metrics


def critic_step(batch: Rows, values: Tensor, cfg=OFF):
    """The same for the critic's values."""
    values = values.clone().requires_grad_()
    loss, metrics = critic_step_loss(values, batch, cfg)
    return loss.detach(), torch.autograd.grad(loss, values)[0], metrics


def one_row(old=None, behaviour=None, advantages=None, width=None, **more) -> Rows:
    """A rollout of one row, all of whose tokens are sampled and have weight 1."""
    rows = [None if x is None else f64(x) for x in (old, behaviour, advantages)]
    ones = torch.ones(1, width or next(x for x in rows if x is not None).shape[1], dtype=torch.float64)
    return Rows(ones.bool(), ones, *rows, **{name: f64(x) if isinstance(x, list) else x for name, x in more.items()})


def of_one_row(loss, logprobs, old, advantages, cfg=OFF):
    """Token losses of one row, the gradient of their sum, and where the clip took it; each [T]."""
    logprobs = f64(logprobs).requires_grad_()
    token_loss, clipped = loss(logprobs, one_row(old, advantages=advantages), cfg)
    return token_loss[0].detach(), torch.autograd.grad(token_loss.sum(), logprobs)[0][0], clipped[0].tolist()


def total(parts) -> dict[str, list[float]]:
    """Metrics of micro-batches added up by name, as the trainer does."""
    out = collections.defaultdict(lambda: [0.0, 0.0])
    for metrics in parts:
        for name, pair in metrics.items():
            out[name] = [a + float(b) for a, b in zip(out[name], pair)]
    return out


def same(seen, wanted, atol=1e-9):
    """(loss, gradient, metrics): all metrics have the same sums and counts."""
    close(seen[0], wanted[0], atol)
    close(seen[1], wanted[1], atol)
    assert seen[2].keys() == wanted[2].keys()
    for name in seen[2]:
        close([float(x) for x in seen[2][name]], [float(x) for x in wanted[2][name]], atol)


# ---------------------------------------------------------------------------------------------------- aggregation
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_a_token_mean_is_not_a_sequence_mean(mode):
    """Case n09: losses 2, 2, 2 and 8 (masked entries NaN): (6 + 8)/4 = 3.5, (2 + 8)/2 = 5, (6 + 8)/2 = 7."""
    case = CASES["n09"]
    mask = torch.tensor(case["given"]["mask"], dtype=torch.bool)
    losses = f64(*[[math.nan if x is None else x for x in row] for row in case["given"]["losses"]])
    close(step(Rows(mask, weights(mask, mode)), -losses, kind="sft")[0], case["expect"][mode])


def test_the_prompt_mean_gives_every_prompt_the_same_say():
    """Prompt a: losses 2, 2, 2 and 8 over two rollouts, mean 14/4; prompt b: 1. (3.5 + 1)/2 = 2.25."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 0]], dtype=torch.bool)
    losses = f64([2, 2, 2], [8, 0, 0], [0, 1, 0])
    close((weights(mask, "prompt-mean-token-mean", group=[0, 0, 1]) * losses).sum(), 2.25)


def test_a_rollout_in_two_segments_is_one_sequence():
    """Losses 2, 2, 2 | 8 of one rollout and 1 of another: sequence means 3.5 and 1, so 2.25; sums 14 and 1, so 7.5."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 1, 0]], dtype=torch.bool)
    losses = f64([2, 2, 2], [8, 0, 0], [0, 1, 0])
    close((weights(mask, "seq-mean-token-mean", rollout=[0, 0, 1]) * losses).sum(), 2.25)
    close((weights(mask, "seq-mean-token-sum", rollout=[0, 0, 1]) * losses).sum(), 7.5)


@few
@given(st.lists(st.tuples(
    st.integers(0, 2), st.integers(0, 1), st.lists(st.booleans(), min_size=4, max_size=4)), min_size=1, max_size=6), st.integers(0, 99))
@example([(0, 0, [True, False, True, False]), (1, 0, [False] * 4), (0, 1, [False] * 4)], 0)
def test_aggregations_follow_their_definition(rows, seed):
    """Oracle: nested Python means. A row is (rollout within its prompt, prompt, mask); rollouts and prompts without tokens do not exist."""
    rollout, group = [prompt * 3 + r for r, prompt, _ in rows], [prompt for _, prompt, _ in rows]
    mask = torch.tensor([m for *_, m in rows])
    losses = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def mean(values):
        return sum(values) / max(1, len(values))

    def tokens_of_each(owners):
        owned = {}
        for owner, row, row_mask in zip(owners, losses.tolist(), mask.tolist()):
            owned.setdefault(owner, []).extend(x for x, m in zip(row, row_mask) if m)
        return [x for x in owned.values() if x]
    wanted = {
        "token-mean": mean(list(itertools.chain(*tokens_of_each(rollout)))),
        "seq-mean-token-mean": mean([mean(x) for x in tokens_of_each(rollout)]),
        "prompt-mean-token-mean": mean([mean(x) for x in tokens_of_each(group)]),
        "seq-mean-token-sum": mean([sum(x) for x in tokens_of_each(rollout)]),
    }
    assert set(wanted) == set(AGGREGATIONS)
    for name, value in wanted.items():
        w = weights(mask, name, rollout, group)
        close((w * losses).sum(), value)
        assert (w[~mask] == 0).all()


def test_micro_batches_and_ranks_add_up_to_the_token_mean():
    """Case n08: 8 tokens of sum 14 give 1.75 however they are split; with a mean over 2 ranks each part counts double, 2.0 and 1.5."""
    ranks = [CASES["n08"]["given"][f"rank{k}_micro_batches"] for k in (0, 1)]
    sequences = [losses for rank in ranks for losses in rank]
    mask = torch.tensor([[t < len(losses) for t in range(4)] for losses in sequences])
    logprobs = -f64(*[losses + [99] * (4 - len(losses)) for losses in sequences])
    batch = Rows(mask, weights(mask))
    parts = [step(batch.take([k]), logprobs[[k]], kind="sft")[0] for k in range(4)]
    expect = CASES["n08"]["expect"]
    close(sum(parts), expect["loss"])
    close(step(batch, logprobs, kind="sft")[0], expect["loss"])
    close([2 * (parts[0] + parts[1]), 2 * (parts[2] + parts[3])], [expect["rank0_contribution"], expect["rank1_contribution"]])


# ---------------------------------------------------------------------------------------------------- policy losses
def test_ppo_clips_only_where_the_ratio_has_gone_too_far_already():
    """Case n11, clip 0.2 and 0.28: loss -1.28, 1.5, -0.5, 0.8; gradient 0, 1.5, -0.5, 0; half the tokens clipped."""
    tokens, expect = CASES["n11"]["given"]["tokens"], CASES["n11"]["expect"]
    cfg = replace(OFF, clip_low=CASES["n11"]["given"]["eps_low"], clip_high=CASES["n11"]["given"]["eps_high"])
    old, logprobs, advantages = [-3.0] * 4, [-3.0 + math.log(token["ratio"]) for token in tokens], [token["advantage"] for token in tokens]
    loss, gradient, clipped = of_one_row(ppo, logprobs, old, advantages, cfg)
    close(loss, expect["loss"])
    close(gradient, expect["dloss_dlogprob"])
    assert clipped == [True, False, False, True]
    clipped, tokens = step(one_row(old, old, advantages), f64(logprobs), cfg=cfg)[2]["clip_frac"]
    assert clipped / tokens == expect["clip_fraction"]


def test_the_dual_clip_bounds_what_a_bad_token_can_cost():
    """c = 3, A = -1: ratio 2 costs 2 (gradient 2), ratio 4 costs 3 and not 4 (gradient 0, counted as clipped), ratio 0.5 is ppo's 0.8.
    With A = 1 a ratio of 4 is clipped at 1.2 as ever, and A = 0 costs nothing."""
    logprobs, advantages = [math.log(ratio) for ratio in (2, 4, 0.5, 4, 4)], [-1.0, -1.0, -1.0, 1.0, 0.0]
    loss, gradient, clipped = of_one_row(ppo, logprobs, [0.0] * 5, advantages, replace(OFF, dual_clip=3.0))
    close(loss, [2, 3, 0.8, -1.2, 0])
    close(gradient, [2, 0, 0, 0, 0])
    assert clipped == [False, True, True, True, False]
    assert of_one_row(ppo, logprobs, [0.0] * 5, advantages)[2] == [False, False, True, True, False]       # dual_clip 0 is none


def test_cispo_caps_the_weight_and_keeps_every_gradient():
    """Case n12, ceiling 1.25 at logprob -0.7: loss -min(ratio, 1.25) * A * -0.7 = 0.875, 0.77, -1.75; gradient -1.25, -1.1, 2.5."""
    tokens, expect, logprob = CASES["n12"]["given"]["tokens"], CASES["n12"]["expect"], CASES["n12"]["given"]["logprob"]
    loss, gradient, clipped = of_one_row(cispo, [logprob] * 3, [logprob - math.log(token["ratio"]) for token in tokens], [token["advantage"] for token in tokens],
                                         replace(OFF, loss="cispo", cispo_ceiling=CASES["n12"]["given"]["ceiling"]))
    close(loss, expect["loss"])
    close(gradient, expect["dloss_dlogprob"])
    assert clipped == [True, False, True]
    loss, gradient, clipped = of_one_row(cispo, [-1.0, -math.inf], [-1.0, -math.inf], [1.0, 1.0], replace(OFF, loss="cispo", cispo_ceiling=1.0))
    assert (loss.tolist(), gradient.tolist(), clipped) == ([1.0, 1e4], [-1.0, 0.0], [False, False])      # log 0 counts as -1e4; ratio 1 is at the ceiling, not beyond


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "token-mean"])
def test_gspo_has_one_ratio_a_sequence_over_its_response_tokens(aggregation):
    """Case n13, clip 0.1: s = e^0.2 (mean of 0.2, -0.1, 0.5; the product would be e^0.6) and e^-0.3, so token losses -1.1 and 0.9 everywhere."""
    rows, expect = CASES["n13"]["given"]["rows"], CASES["n13"]["expect"]
    gaps, mask = f64(*(row["log_ratio"] for row in rows)), torch.tensor([row["action_mask"] for row in rows], dtype=torch.bool)
    advantages = f64(*([row["advantage"]] * 4 for row in rows))
    batch, eps = Rows(mask, weights(mask, aggregation).double(), torch.full_like(gaps, -8.0), torch.full_like(gaps, -8.0), advantages), CASES["n13"]["given"]["eps"]
    wide = replace(OFF, loss="gspo", clip_low=0.9, clip_high=9.0)
    close(-gspo(gaps - 8, batch, wide)[0][mask] / advantages[mask], [expect["ratio"][0]] * 3 + [expect["ratio"][1]])
    cfg = replace(OFF, loss="gspo", clip_low=eps, clip_high=eps)
    token_loss, clipped = gspo(gaps - 8, batch, cfg)
    close(token_loss[mask], [expect["token_loss"][0]] * 3 + [expect["token_loss"][1]])
    assert torch.equal(clipped, mask)                  # both sequences have gone too far, and no masked token is counted
    close(step(batch, gaps - 8, cfg=cfg)[0], expect[aggregation])


@few
@given(st.integers(0, 9999))
def test_gspos_gradient_is_that_of_its_sequence_form(seed):
    """Under seq-mean-token-mean with one A a rollout: autograd of mean over rollouts of -min(s A, clip(s) A), s = exp(mean of log ratio)."""
    batch, logprobs, _ = random_rows(seed)
    share = weights(batch.response_mask, "seq-mean-token-mean", batch.rollout.tolist()).double()
    A = f64([1.5, -0.5, 0.8])[0]
    batch = replace(batch, advantages=A[batch.rollout][:, None].expand(4, 5), loss_weight=share, ref_logprobs=None)
    current, present = logprobs.clone().requires_grad_(), [i for i in range(3) if batch.response_mask[batch.rollout == i].any()]
    s = torch.stack([(current - batch.old_logprobs)[batch.rollout == i][batch.response_mask[batch.rollout == i]].mean().exp() for i in present])
    wanted = -torch.minimum(s * A[present], s.clamp(0.9, 1.05) * A[present]).mean()
    loss, gradient, _ = step(batch, logprobs, cfg=replace(OFF, loss="gspo", clip_low=0.1, clip_high=0.05))
    close(loss, wanted.detach(), atol=1e-7)
    close(gradient, torch.autograd.grad(wanted, current)[0], atol=1e-7)


@few
@given(st.integers(0, 9999))
def test_before_any_update_ppo_gspo_and_reinforce_have_the_policy_gradient(seed):
    """At pi = pi_old all have value -A and gradient -A per token: that of -A log pi, which is cispo's value. Nothing is clipped."""
    batch, logprobs, _ = random_rows(seed)
    batch = replace(batch, old_logprobs=logprobs, ref_logprobs=None)
    wanted = -(batch.loss_weight * batch.advantages)
    for kind in ("ppo", "gspo", "reinforce", "cispo"):
        loss, gradient, metrics = step(batch, logprobs, kind=kind)
        close(loss, (wanted * (logprobs if kind == "cispo" else 1)).sum(), atol=1e-12)
        close(gradient, wanted, atol=1e-12)
        assert metrics["clip_frac"][0] == 0 and metrics["policy_kl"][0] == 0


def test_reinforce_does_not_know_the_old_policy():
    """pi_old := pi, so whatever old_logprobs says, value -A and gradient -A."""
    loss, gradient, clipped = of_one_row(reinforce, [-1.0, -2.0], [-9.0, -0.1], [3.0, -0.5])
    assert (loss.tolist(), gradient.tolist(), clipped) == ([-3.0, 0.5], [-3.0, 0.5], [False, False])


def test_sft_is_the_negative_logprob_of_the_given_tokens():
    """-log pi, gradient -1, and 0 off the mask whatever is there; no advantage and no other policy is asked for."""
    logprobs = f64([-1.0, -math.inf]).requires_grad_()
    loss, clipped = sft(logprobs, Rows(torch.tensor([[True, False]]), None), OFF)
    assert (loss.tolist(), clipped.tolist()) == ([[1.0, 0.0]], [[False, False]])
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == [[-1.0, 0.0]]


# ---------------------------------------------------------------------------------------------------- the step's loss, by definition
def sequences_of(batch: Rows) -> list[list[tuple[int, int]]]:
    """The places of each rollout's response tokens."""
    places = [tuple(place) for place in batch.response_mask.nonzero().tolist()]
    return [mine for i in batch.rollout.unique() if (mine := [place for place in places if batch.rollout[place[0]] == i])]


def correction_by_definition(batch: Rows, cfg: LossConfig) -> dict[tuple[int, int], tuple[float, bool]]:
    """Oracle: place -> (weight, whether a limit was reached), in Python floats."""
    out = {}
    for places in sequences_of(batch):
        mu, old = ([x[place].item() for place in places] for x in (batch.behaviour_logprobs, batch.old_logprobs))
        ratios, n = [math.exp(o - m) for o, m in zip(old, mu)], len(places)
        if cfg.mismatch_gate == "ratio":
            low, high = cfg.mismatch_low, cfg.mismatch_high
            judged = {"seq": [math.prod(ratios)] * n, "geo": [statistics.geometric_mean(ratios)] * n}.get(cfg.mismatch_level, ratios)
        else:
            low, high = 0.0, cfg.mismatch_limit
            p, q = ([math.exp(x) for x in policy] for policy in (mu, old))
            judged = [abs(a - b) if cfg.mismatch_gate == "tv" else a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)) for a, b in zip(p, q)]
            judged = [statistics.fmean(judged)] * n if cfg.mismatch_level == "seq" else judged
        for place, ratio, x in zip(places, ratios, judged):
            if cfg.mismatch_level == "off":
                out[place] = 1.0, False
            elif cfg.mismatch_mode == "mask":
                out[place] = (ratio, False) if low <= x <= high else (0.0, True)
            elif cfg.mismatch_mode == "clip":
                out[place] = min(max(ratio, low), high), not low <= ratio <= high
            else:
                out[place] = min(ratio, high), ratio > high
    return out


def policy_by_definition(kind: str, pi: float, old: float, s: float, A: float, cfg: LossConfig) -> tuple[float, float, bool]:
    """Oracle: (token loss, its slope in log pi, whether the clip took the gradient); s is the sequence's ratio."""
    if kind in ("reinforce", "sft"):
        return (-A, -A, False) if kind == "reinforce" else (-pi, -1.0, False)
    ratio = s if kind == "gspo" else math.exp(pi - old)
    if kind == "cispo":
        capped = min(ratio, cfg.cispo_ceiling)
        return -capped * A * pi, -capped * A, ratio > cfg.cispo_ceiling
    if kind == "ppo" and A < 0 and ratio > cfg.dual_clip:
        return -cfg.dual_clip * A, 0.0, True
    bound = 1 + cfg.clip_high if A > 0 else 1 - cfg.clip_low
    return (-bound * A, 0.0, True) if (ratio > bound if A > 0 else ratio < bound) else (-ratio * A, -ratio * A, False)


@every
def test_loss_gradient_and_metrics_follow_their_definition(kind, correction):
    """Oracle: weight * (w * policy loss + kl_scale * 0.3 * k3 - 0.2 * entropy), token by token, and its slope; metrics as sums over tokens, some
    by how many publishes ago the token was sampled. Every limit acts somewhere."""
    cfg, cuts = full(kind, correction), set()
    for seed in range(12):
        batch, logprobs, entropy = random_rows(seed)
        wanted, slopes, by_place = 0.0, torch.zeros_like(logprobs), correction_by_definition(batch, cfg)
        metrics = collections.defaultdict(lambda: [0.0, 0])
        for places in sequences_of(batch):
            s = math.exp(statistics.fmean((logprobs - batch.old_logprobs)[place].item() for place in places))
            for place in places:
                pi, old, mu, ref, A, h, share = (x[place].item() for x in (
                    logprobs, batch.old_logprobs, batch.behaviour_logprobs, batch.ref_logprobs, batch.advantages, entropy, batch.loss_weight))
                loss, slope, clipped = policy_by_definition(kind, pi, old, s, A, cfg)
                w, cut = (1.0, False) if kind == "sft" else by_place[place]
                k3, age = math.exp(ref - pi) - 1 + pi - ref, f"age{7 - batch.policy_versions[place]}/"
                wanted += share * (w * loss + 0.5 * 0.3 * k3 - 0.2 * h)
                slopes[place] = share * (w * slope + 0.5 * 0.3 * (1 - math.exp(ref - pi)))
                seen = {"ref_kl": k3, "entropy": h} if kind == "sft" else {
                    "ref_kl": k3, "entropy": h, "clip_frac": clipped, age + "clip_frac": clipped, age + "cut_frac": cut, age + "mismatch_ratio": math.exp(old - mu),
                    "mismatch_weight": w, "mismatch_weight_squared": w * w, "mismatch_cut_frac": cut,
                    "policy_kl": math.exp(pi - old) - 1 + old - pi, "mismatch_kl": math.exp(old - mu) - 1 + mu - old}
                for name, x in seen.items():
                    metrics[name] = [metrics[name][0] + x, metrics[name][1] + 1]
        if kind != "sft" and cfg.mismatch_level in ("seq", "geo"):                              # decided by sequence, counted by sequence
            metrics["mismatch_cut_frac"] = [sum(by_place[places[0]][1] for places in sequences_of(batch)), len(sequences_of(batch))]
        same(step(batch, logprobs, entropy, cfg), (wanted, slopes, metrics))
        cuts |= {cut for _, cut in by_place.values()}
    assert cuts == ({False} if cfg.mismatch_level == "off" else {False, True})


@pytest.mark.parametrize("kind", ["ppo", "gspo", "sft"])
def test_gradients_are_the_slope_of_the_loss(kind):
    """gradcheck in float64, all terms at work, in logprobs and entropy. reinforce and cispo hold factors fixed by design, so their slope is by
    definition above; gspo does too, and has the slope of its value where all tokens of a sequence weigh the same."""
    for seed in range(3):
        batch, logprobs, entropy = random_rows(seed)
        if kind == "gspo":
            share = weights(batch.response_mask, "seq-mean-token-mean", batch.rollout.tolist()).double()
            batch = replace(batch, loss_weight=share, advantages=f64([1.0, -1.0, 0.5])[0][batch.rollout][:, None].expand(4, 5))
        cfg = full(kind, "off ratio trunc" if kind == "gspo" else "token ratio trunc")
        assert torch.autograd.gradcheck(lambda x, h: step_loss(x, h, batch, cfg, kind)[0], (logprobs.requires_grad_(), entropy.requires_grad_()))


# ---------------------------------------------------------------------------------------------------- laws of the step's loss
@every
def test_any_split_into_micro_batches_has_the_same_loss_gradient_and_metrics(kind, correction):
    """loss_weight is fixed for the step, so parts only add, rows in any order, as long as a rollout's rows stay together."""
    cfg = full(kind, correction)
    for seed, first, order in itertools.product(range(2), ((0,), (1,), (0, 2)), ((0, 1, 2, 3), (3, 2, 1, 0))):
        batch, logprobs, entropy = random_rows(seed)
        parts = [[row for row in order if (batch.rollout[row] in first) == chosen] for chosen in (True, False)]
        seen = [step(batch.take(rows), logprobs[rows], entropy[rows], cfg) for rows in parts]
        gradient = torch.zeros_like(logprobs)
        for rows, part in zip(parts, seen):
            gradient[rows] = part[1]
        same((seen[0][0] + seen[1][0], gradient, total(part[2] for part in seen)), step(batch, logprobs, entropy, cfg))


@every
def test_where_a_rollout_is_cut_into_rows_does_not_matter(kind, correction):
    """Every row once with the tokens before column 2 and once with the others: the same sequences, so the same loss, gradients and metrics."""
    cfg, first = full(kind, correction), torch.arange(5) < 2
    for seed in range(3):
        batch, logprobs, entropy = random_rows(seed)
        cut = replace(batch.take([0, 1, 2, 3] * 2), response_mask=torch.cat([batch.response_mask & first, batch.response_mask & ~first]))
        loss, gradient, metrics = step(cut, logprobs.repeat(2, 1), entropy.repeat(2, 1), cfg)
        same((loss, gradient[:4] + gradient[4:], metrics), step(batch, logprobs, entropy, cfg))


@every
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan, 1e30])
def test_padding_and_masked_entries_are_never_read(kind, correction, poison):
    """Whatever stands off the mask in any input, two more columns of it too: loss, gradient and metrics stay, and the gradient there is 0."""
    cfg = full(kind, correction)
    for seed in range(2):
        batch, logprobs, entropy = random_rows(seed)
        mask = batch.response_mask

        def dirty(x, poison=poison):
            return torch.nn.functional.pad(torch.where(mask, x, poison), (0, 2), value=poison)
        poisoned = replace(batch, response_mask=torch.nn.functional.pad(mask, (0, 2)), policy_versions=dirty(batch.policy_versions, -77), **{
            name: dirty(getattr(batch, name)) for name in ("loss_weight", "old_logprobs", "behaviour_logprobs", "advantages", "ref_logprobs")})
        seen, wanted = step(poisoned, dirty(logprobs), dirty(entropy), cfg), step(batch, logprobs, entropy, cfg)
        same((seen[0], seen[1][:, :5], seen[2]), wanted, atol=1e-12)
        assert (seen[1][~poisoned.response_mask] == 0).all() and (seen[1] != 0).any()


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "reinforce"])
def test_a_masked_infinity_does_not_reach_the_loss(kind):
    """Case n17 c: logprobs [-1, -inf] under both policies, mask [1, 0], advantage 1: loss -1 (cispo: 1 = -A log pi), gradient [-1, 0]."""
    c, expect = CASES["n17"]["given"]["c"], CASES["n17"]["expect"]["c"]
    mask = torch.tensor([c["action_mask"]], dtype=torch.bool)
    logprobs, old = f64([float(x) for x in c["logprob"]]), f64([float(x) for x in c["old_logprob"]])
    loss, gradient, metrics = step(Rows(mask, weights(mask), old, old, f64([c["advantage"]] * 2)), logprobs, cfg=LossConfig(), kind=kind)
    assert (loss.item(), gradient[0].tolist()) == (1.0 if kind == "cispo" else expect["loss"], expect["gradient"])
    assert all(math.isfinite(s) and n == 1 for s, n in metrics.values())


@every
def test_an_empty_mask_gives_zero_and_not_nan(kind, correction):
    """Case n10 a: no token, so loss 0, gradient 0, and every metric a sum of 0 over a count of 0."""
    batch, logprobs, entropy = random_rows(0)
    nothing = torch.zeros_like(batch.response_mask)
    for aggregation in AGGREGATIONS:
        empty = replace(batch, response_mask=nothing, loss_weight=weights(nothing, aggregation))
        loss, gradient, metrics = step(empty, logprobs, entropy, full(kind, correction))
        assert loss == CASES["n10"]["expect"]["a"]["loss"] and (gradient == CASES["n10"]["expect"]["a"]["gradient"]).all()
        assert all(total == 0 and count == 0 for total, count in metrics.values())


def test_a_ratio_beyond_float_is_cut_and_stays_finite():
    """100 and inf nats apart: the log ratio is cut to 30 and -30, in float32 too, and no gradient passes the cut. Two -inf are equal."""
    logprobs = torch.tensor([[0.0, -math.inf, -1.0, -math.inf]], requires_grad=True)
    ratio = log_ratio(logprobs, torch.tensor([[-100.0, -1.0, -math.inf, -math.inf]]), torch.ones(1, 4, dtype=torch.bool))
    assert ratio.tolist() == [[30.0, -30.0, 30.0, 0.0]] and ratio.exp().square().isfinite().all()
    assert torch.autograd.grad(ratio.sum(), logprobs)[0].tolist() == [[0.0] * 4]


@every
@pytest.mark.parametrize("together", [1, 16])
def test_extreme_logprobs_give_finite_numbers(kind, correction, together):
    """float32, every combination of 0, -1, -100 and -inf for pi, pi_old and mu, A = 1 and -1, alone or 16 a sequence, and a row without a
    response token: loss, gradient and metrics are finite; pi = -inf has no slope. (For sft -inf is an infinite loss, and rightly so.)"""
    pi, old, mu, A = torch.cartesian_prod(*[torch.tensor([0.0, -1.0, -100.0, -math.inf])] * 3, torch.tensor([1.0, -1.0])).T.reshape(4, -1, together)
    ref = torch.where(old == -1, torch.tensor(-math.inf), mu)
    if kind == "sft":
        pi = pi.clamp(min=-100.0)
    mask = torch.arange(len(pi))[:, None].expand_as(pi) > 0
    loss, gradient, metrics = step(Rows(mask, weights(mask), old, mu, A, ref), pi, torch.ones_like(pi), full(kind, correction))
    assert loss.isfinite() and gradient.isfinite().all() and all(math.isfinite(x) for pair in metrics.values() for x in pair)
    assert (gradient[pi == -math.inf] == 0).all() and (gradient[0] == 0).all() and (gradient != 0).any()


@every
def test_a_nan_logprob_of_a_trained_token_is_not_hidden(kind, correction):
    """A model that has diverged gives NaN. The loss must say so: taken as ratio 1 it would look like an on-policy token."""
    batch, logprobs, _ = random_rows(0)
    logprobs[0, 0] = math.nan
    assert batch.response_mask[0, 0] and step(replace(batch, ref_logprobs=None), logprobs, cfg=full(kind, correction))[0].isnan()


@pytest.mark.parametrize("correction", [x for x in ACCEPTED if "off" not in x])
def test_a_nan_logprob_of_the_old_policy_is_not_dropped_as_a_mismatch(correction):
    """NaN is beyond no limit: were it masked like a ratio out of bounds, the loss would stay finite and nobody would know."""
    batch, logprobs, _ = random_rows(0)
    old = batch.old_logprobs.clone()
    old[0, 0] = math.nan
    assert batch.response_mask[0, 0] and step(replace(batch, old_logprobs=old, ref_logprobs=None), logprobs, cfg=full("reinforce", correction))[0].isnan()


@every
def test_inputs_stay_as_they_were(kind, correction):
    """Bit for bit, and only logprobs and entropy are asked for a gradient."""
    batch, logprobs, entropy = random_rows(1)
    inputs = [logprobs, entropy, *(x for f in fields(batch) if isinstance(x := getattr(batch, f.name), Tensor))]
    kept = [x.clone() for x in inputs]
    step(batch, logprobs, entropy, full(kind, correction))
    critic_step(batch, logprobs)
    for before, after in zip(kept, inputs, strict=True):
        assert torch.equal(before, after) and not after.requires_grad


# ---------------------------------------------------------------------------------------------------- mismatch correction
def n15(correction: str, low: float = 0.5, high: float = 2.0, **more) -> tuple[Rows, LossConfig]:
    given_ = CASES["n15"]["given"]
    return one_row(given_["trainer_logprob_before_update"], given_["rollout_logprob"], [1.0] * 3, **more), corrected(correction, mismatch_low=low, mismatch_high=high)


@pytest.mark.parametrize("correction, low, high, key", [
    ("token ratio trunc", 0.0, 1e9, "ratio"), ("token ratio trunc", 0.5, 2.0, "token_trunc_[0.5,2]"), ("token ratio clip", 0.5, 2.0, "token_clip_[0.5,2]"),
    ("token ratio mask", 0.5, 2.0, "token_mask_[0.5,2]"), ("geo ratio mask", 0.5, 2.0, "geo_mask_[0.5,2]"), ("geo ratio mask", 0.5, 3.0, "geo_mask_[0.5,3]"),
    ("seq ratio mask", 0.5, 3.0, "seq_mask_[0.5,3]"), ("seq ratio mask", 0.5, 10.0, "ratio"),
])
def test_weights_of_pi_old_over_mu_by_hand(correction, low, high, key):
    """Case n15: ratios e^0.2, e^-1, e^3, geometric mean 2.082, product 9.025. What a mask keeps has the token's own ratio, not its sequence's."""
    seen, cut = mismatch_correction(*n15(correction, low, high))
    close(seen[0], CASES["n15"]["expect"][key])
    close(cut[0].int(), [float(abs(w - ratio) > 1e-9) for w, ratio in zip(CASES["n15"]["expect"][key], CASES["n15"]["expect"]["ratio"])])


@pytest.mark.parametrize("level, statistic", [("seq", "product"), ("geo", "geometric_mean")])
def test_a_sequence_is_dropped_by_its_product_or_its_geometric_mean(level, statistic):
    """Case n15: an upper limit just above 9.025 (2.082) keeps all three tokens, one just below drops them; the same for lower limits of the inverse."""
    batch, _ = n15("off ratio trunc")
    inverse = replace(batch, old_logprobs=batch.behaviour_logprobs, behaviour_logprobs=batch.old_logprobs)
    for factor, kept in ((1.0001, 3), (0.9999, 0)):
        high = CASES["n15"]["expect"][statistic] * factor
        for rows, limits in ((batch, dict(mismatch_high=high)), (inverse, dict(mismatch_low=1 / high))):
            assert (mismatch_correction(rows, corrected(f"{level} ratio mask", **limits))[0] > 0).sum() == kept


@pytest.mark.parametrize("correction", [x for x in ACCEPTED if "off" not in x])
def test_a_token_on_the_limit_is_kept(correction):
    """pi_old = mu with limits 1 and 1: nothing is dropped or counted as cut. tv of 1/2 and 1/4 is 1/4: kept at a limit of 1/4."""
    seen, cut = mismatch_correction(one_row([-1.0, -2.0], [-1.0, -2.0]), corrected(correction, mismatch_low=1.0, mismatch_high=1.0))
    assert (seen.tolist(), cut.any().item()) == ([[1, 1]], False)
    if "tv" in correction:
        rows = one_row([math.log(0.25)], [math.log(0.5)], [1.0])
        close(mismatch_correction(rows, corrected(correction, mismatch_limit=0.25))[0], [[0.5]])


@pytest.mark.parametrize("correction", ACCEPTED)
def test_weights_are_0_off_the_mask_and_1_on_policy(correction):
    """pi_old = mu on the mask: 1 and never cut, whatever is judged; and 0, not cut, off it, where the policies are far apart."""
    mask = torch.tensor([[True, False, True]])
    seen, cut = mismatch_correction(Rows(mask, None, f64([-1.0, -9.0, -2.0]), f64([-1.0, -0.1, -2.0])), corrected(correction))
    assert (seen.tolist(), cut.any().item()) == ([[1, 0, 1]], False)


@pytest.mark.parametrize("kind", ["ppo", "gspo", "cispo", "reinforce"])
@pytest.mark.parametrize("correction", ACCEPTED)
def test_the_correction_multiplies_the_token_loss_and_carries_no_gradient(kind, correction):
    """Case n15 at pi = pi_old, A = 1, weight 1: gradient -w per token, and the loss is -sum w (cispo: times log pi). pi_old gets no
    gradient, though the weight is made of it: "gradient_through_weight" is false."""
    batch, cfg = n15(correction, high=3.0)
    w = mismatch_correction(batch, cfg)[0]
    loss, gradient, _ = step(batch, batch.old_logprobs, cfg=cfg, kind=kind)
    close(gradient, -w)
    close(loss, -(w * (batch.old_logprobs if kind == "cispo" else 1)).sum())
    batch.old_logprobs.requires_grad_()
    assert mismatch_correction(batch, cfg)[0].requires_grad == CASES["n15"]["expect"]["gradient_through_weight"]


def test_equal_weights_have_ratio_1_and_raw_engine_logprobs_do_not():
    """Case n16: both sides -0.142932 at temperature 1/2: ratio 1. Against the engine's raw logprob it would be 1.303, divided by T 1.959."""
    given_, expect = CASES["n16"]["given"], CASES["n16"]["expect"]
    trainer = (f64(given_["logits"]) / given_["temperature"]).log_softmax(-1)[0, given_["token"]].item()
    close(trainer, expect["trainer_logprob"])
    wrong = expect["wrong"]
    seen, _ = mismatch_correction(one_row([trainer] * 3, [expect["behaviour_logprob"], wrong["raw"], wrong["raw_divided_by_T"]]), LossConfig())
    close(seen[0], [expect["ratio_at_equal_weights"], wrong["ratio_against_raw"], wrong["ratio_against_raw_divided"]])


def test_the_mismatch_metrics_by_hand():
    """Case n15: gaps 0.2, -1, 3. Cut above 2: one token of three. k3 of each: e^g - 1 - g = 0.021403, 0.367879, 16.085537."""
    batch, cfg = n15("token ratio trunc")
    metrics = step(batch, batch.old_logprobs, cfg=cfg)[2]
    assert metrics["mismatch_cut_frac"] == (1, 3)
    close(metrics["mismatch_kl"][0], 0.021403 + 0.367879 + 16.085537)
    assert metrics["mismatch_kl"][1] == 3
    off = step(batch, batch.old_logprobs)[2]
    assert off["mismatch_cut_frac"] == (0, 3) and off["mismatch_kl"] == metrics["mismatch_kl"]


@pytest.mark.parametrize("correction, wanted", [("token ratio mask", (2, 4)), ("seq ratio mask", (1, 2)), ("geo ratio mask", (1, 2)), ("seq tv mask", (1, 2))])
def test_the_cut_share_counts_what_was_judged(correction, wanted):
    """Rollout 0 in two rows with ratios 1 | e^2, e^2, rollout 1 with ratio 1, rollout 2 without a token: 2 of 4 tokens, or 1 of 2 rollouts."""
    mask = torch.tensor([[1, 0], [1, 1], [1, 0], [0, 0]], dtype=torch.bool)
    old = f64([-1.0, 0], [-1, -1], [-1, 0], [0, 0])
    behaviour = f64([-1.0, 0], [-3, -3], [-1, 0], [0, 0])
    batch = Rows(mask, weights(mask), old, behaviour, torch.ones(4, 2), rollout=torch.tensor([0, 0, 1, 2]))
    assert step(batch, old, cfg=corrected(correction))[2]["mismatch_cut_frac"] == wanted


def test_the_divergence_of_a_two_way_choice_by_hand():
    """p = mu = 1/2, q = pi_old = 1/4: KL = 1/2 ln 2 + 1/2 ln(2/3) = 0.143841, tv = 1/4; the other way round 0.130812 and 1/4; 0 for equals
    and off the mask. mu = 1 and pi_old = 0 are held at 1e-6 from the ends: 13.815482 nats, not infinite."""
    half, quarter = math.log(0.5), math.log(0.25)
    old, mu, mask = f64([quarter, half, half, quarter, -math.inf]), f64([half, quarter, half, half, 0.0]), torch.tensor([[True, True, True, False, True]])
    close(binary_divergence(old, mu, mask, "binary_kl"), [[0.143841, 0.130812, 0, 0, 13.815482]])
    close(binary_divergence(old, mu, mask, "tv"), [[0.25, 0.25, 0, 0, 0.999998]])


@few
@given(st.lists(st.tuples(*[st.floats(0.001, 0.999)] * 2), min_size=1, max_size=5))
def test_the_divergence_is_that_of_bernoulli_distributions(pairs):
    """Oracle: torch.distributions for the KL, half the L1 distance of the two-way distributions for tv; never negative."""
    p, q = f64([p for p, _ in pairs]), f64([q for _, q in pairs])
    mask = torch.ones_like(p, dtype=torch.bool)
    seen = {gate: binary_divergence(q.log(), p.log(), mask, gate) for gate in ("binary_kl", "tv")}
    close(seen["binary_kl"], kl_divergence(Bernoulli(probs=p), Bernoulli(probs=q)), atol=1e-9)
    close(seen["tv"], ((p - q).abs() + ((1 - p) - (1 - q)).abs()) / 2, atol=1e-9)
    assert (seen["binary_kl"] >= -1e-12).all() and (seen["tv"] >= 0).all()


# ---------------------------------------------------------------------------------------------------- KL, entropy
def test_the_policy_kl_metric_is_that_of_the_step_just_made():
    """pi_old = -1, pi = -1.5: k3 of KL(pi_old || pi) is e^-0.5 - 1 + 0.5 = 0.106531."""
    close(step(one_row([-1.0], [-1.0], [1.0]), f64([-1.5]))[2]["policy_kl"][0], CASES["n14"]["expect"]["k3"][0])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_estimators_have_the_sign_and_direction_of_pi_against_ref(kind):
    """Case n14: d = 0.5 and -0.5: k1 = d, k2 = 0.125, k3 = e^-d - 1 + d = 0.106531 and 0.148721."""
    given_, mask = CASES["n14"]["given"], torch.ones(1, 2, dtype=torch.bool)
    close(kl(f64(given_["policy_logprob"]), f64(given_["reference_logprob"]), mask, kind)[0], CASES["n14"]["expect"][kind])
    assert kl(f64([-1.0]), f64([-3.0]), torch.zeros(1, 1, dtype=torch.bool), kind).tolist() == [[0.0]]


@few
@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=2, max_size=5))
def test_kl_estimators_on_average_over_the_policy(logits):
    """Oracle: two categorical distributions summed out. E[k1] = E[k3] = KL(pi||ref); the gradient of E[k2] with the samples held
    fixed is that of KL(pi||ref); that of k1 is 0, which is why it is refused as a loss. k2 and k3 are never negative."""
    theta = torch.tensor([a for a, _ in logits], dtype=torch.float64, requires_grad=True)
    logp, logq = theta.log_softmax(-1)[None], f64([b for _, b in logits]).log_softmax(-1)
    p, mask = logp.detach().exp(), torch.ones_like(logp, dtype=torch.bool)
    estimate = {kind: kl(logp, logq, mask, kind) for kind in ("k1", "k2", "k3")}
    exact = (logp.exp() * (logp - logq)).sum()
    for kind in ("k1", "k3"):
        close((p * estimate[kind]).sum().detach(), exact.detach(), atol=1e-9)
    def gradient(x):
        return torch.autograd.grad(x, theta, retain_graph=True)[0]
    close(gradient((p * estimate["k2"]).sum()), gradient(exact), atol=1e-9)
    close(gradient((p * estimate["k1"]).sum()), torch.zeros(len(logits)), atol=1e-9)
    assert (estimate["k2"] >= 0).all() and (estimate["k3"] >= -1e-12).all()


def test_kl_adds_to_the_loss_and_entropy_takes_from_it():
    """Case n14 in the loss: A = 0, weights 1, so loss = 2 * 0.25 * (0.106531 + 0.148721) - 0.1 * (2 + 3) with a kl_scale of 2. The metric is
    k3 without any factor, whatever estimator the loss has, and without a coefficient the loss has none."""
    given_, expect = CASES["n14"]["given"], CASES["n14"]["expect"]
    logprobs, ref = f64(given_["policy_logprob"]), given_["reference_logprob"]
    batch = one_row(given_["policy_logprob"], given_["policy_logprob"], [0.0, 0.0], ref_logprobs=ref, kl_scale=2.0)
    loss, gradient, metrics = step(batch, logprobs, f64([2.0, 3.0]), replace(OFF, kl_coef=0.25, kl_kind="k3", entropy_coef=0.1))
    close(loss, 0.5 * sum(expect["k3"]) - 0.1 * 5)
    close(gradient[0], [0.5 * (1 - math.exp(-0.5)), 0.5 * (1 - math.exp(0.5))])
    assert metrics["entropy"] == (5, 2)
    loss, gradient, with_k2 = step(batch, logprobs, None, replace(OFF, kl_coef=0.25, kl_kind="k2"))
    close(loss, 0.5 * sum(expect["k2"]))
    close(gradient[0], [0.5 * 0.5, 0.5 * -0.5])
    loss, gradient, without = step(batch, logprobs)
    assert loss == 0 and (gradient == 0).all()
    for seen in (metrics, with_k2, without):
        close(seen["ref_kl"][0], sum(expect["k3"]))
        assert seen["ref_kl"][1] == 2


def test_the_entropy_bonus_pulls_on_entropy():
    """d loss / d entropy = -coefficient * weight on response tokens, 0 elsewhere."""
    batch, logprobs, entropy = random_rows(3)
    entropy.requires_grad_()
    loss, _ = step_loss(logprobs, entropy, batch, full("ppo", "token ratio trunc"), "ppo")
    close(torch.autograd.grad(loss, entropy)[0], -0.2 * batch.loss_weight * batch.response_mask, atol=1e-12)


@pytest.mark.parametrize("seen, wanted", [(0.1, 2.0), (0.11, 2.02), (0.09, 1.98), (0.12, 2.04), (0.5, 2.04), (0.08, 1.96), (0.0, 1.96)])
def test_the_kl_scale_is_steered_to_its_target(seen, wanted):
    """Target 0.1, scale 2, 100 rollouts of a horizon of 1000: 2 * (1 + e/10), e = seen/0.1 - 1 cut to 0.2 either way."""
    close(adapt_kl_scale(2.0, seen, 100, LossConfig(kl_target=0.1, kl_horizon=1000)), wanted)


def test_without_a_target_the_kl_scale_stays_and_a_nan_is_not_hidden():
    assert adapt_kl_scale(2.0, 0.5, 100, LossConfig()) == 2.0
    assert math.isnan(adapt_kl_scale(2.0, math.nan, 100, LossConfig(kl_target=0.1)))


# ---------------------------------------------------------------------------------------------------- value loss
def test_the_value_loss_by_hand():
    """V_old = 1, c = 0.2. V = 1.1, R = 2: 0.9^2/2, gradient -0.9. V = 1.5, R = 2: clipped to 1.2, 0.8^2/2 is more than 0.5^2/2: no gradient.
    V = 1.5, R = 1: 0.5^2/2 is more than 0.2^2/2, so the gradient stays, 0.5. V = 0.5, R = 0: clipped to 0.8. A fifth token is masked."""
    values = f64([1.1, 1.5, 1.5, 0.5, 9.0]).requires_grad_()
    batch = Rows(torch.tensor([[True] * 4 + [False]]), f64([0.25] * 5), values=f64([1.0] * 5), returns=f64([2.0, 2.0, 1.0, 0.0, 0.0]))
    loss, clipped = value_loss(values, batch, LossConfig(value_clip=0.2))
    close(loss.detach(), [[0.405, 0.32, 0.125, 0.32, 0]])
    close(torch.autograd.grad(loss.sum(), values)[0], [[-0.9, 0, 0.5, 0, 0]])
    assert clipped.tolist() == [[False, True, False, True, False]]
    loss, gradient, metrics = critic_step(batch, values.detach(), LossConfig(value_clip=0.2))
    close(loss, 0.25 * (0.405 + 0.32 + 0.125 + 0.32))
    close(gradient, [[-0.225, 0, 0.125, 0, 0]])
    assert metrics["value_clip_frac"] == (2, 4)
    close(metrics["value_error"][0], 0.81 + 3 * 0.25)
    assert metrics["value_error"][1] == 4


def test_a_value_within_the_clip_is_not_counted_as_clipped():
    """V_old = 0.1 and V = -0.08 are 0.18 < 0.2 apart, so the gradient passes and nothing was clipped."""
    batch = one_row(width=1, values=[0.1], returns=[0.0])
    batch = replace(batch, values=batch.values.float(), returns=batch.returns.float())
    _, gradient, metrics = critic_step(batch, torch.tensor([[-0.08]]))
    assert gradient != 0 and metrics["value_clip_frac"][0] == 0


def test_the_gradient_of_the_value_loss_is_its_slope():
    """gradcheck in float64, with values within and beyond the clip."""
    for seed in range(3):
        batch, logprobs, _ = random_rows(seed)
        assert 0 < critic_step(batch, logprobs + 3)[2]["value_clip_frac"][0] < batch.response_mask.sum()
        assert torch.autograd.gradcheck(lambda x: critic_step_loss(x, batch, OFF)[0], (logprobs + 3).requires_grad_())


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan, 1e30])
def test_the_critics_step_adds_up_and_reads_no_masked_entry(poison):
    """Micro-batches of one row, with whatever stands off the mask, add up to the loss, gradient and metrics of the whole."""
    batch, logprobs, _ = random_rows(2)
    mask, values = batch.response_mask, logprobs + 3
    dirty = replace(batch, **{name: torch.where(mask, getattr(batch, name), poison) for name in ("values", "returns", "loss_weight")})
    parts = [critic_step(dirty.take([row]), torch.where(mask, values, poison)[[row]]) for row in range(4)]
    same((sum(part[0] for part in parts), torch.cat([part[1] for part in parts]), total(part[2] for part in parts)), critic_step(batch, values))
    nothing = critic_step(replace(dirty, response_mask=torch.zeros_like(mask)), values)
    assert nothing[0] == 0 and (nothing[1] == 0).all() and all(pair == (0, 0) for pair in nothing[2].values())


def test_a_nan_value_is_not_hidden():
    batch, logprobs, _ = random_rows(0)
    logprobs[0, 0] = math.nan
    assert critic_step(batch, logprobs)[0].isnan()


# ---------------------------------------------------------------------------------------------------- configuration
def test_every_combination_of_the_mismatch_flags_is_accepted_or_refused_by_name():
    """4 levels x 3 gates x 3 modes: the 14 of ACCEPTED, and for the other 22 an error that names two flags and the way out."""
    for correction in itertools.product(("off", "token", "seq", "geo"), ("ratio", "binary_kl", "tv"), ("mask", "clip", "trunc")):
        level, gate, mode = correction
        if " ".join(correction) in ACCEPTED:
            assert [corrected(" ".join(correction), loss=kind).loss for kind in POLICY_LOSSES] == list(POLICY_LOSSES)
            continue
        with pytest.raises(ValueError) as error:
            corrected(" ".join(correction))
        named = {f"--mismatch-level {level}", f"--mismatch-gate {gate}", f"--mismatch-mode {mode}"}
        assert sum(flag in str(error.value) for flag in named) == 2 and ("Use --mismatch-mode mask" in str(error.value) or "Use --mismatch-level seq" in str(error.value))


@pytest.mark.parametrize("bad, words", [
    ({"clip_low": -0.1}, "--clip-low"), ({"clip_low": 1.0}, "--clip-low"), ({"clip_high": -0.1}, "--clip-high"),
    ({"mismatch_high": 0.9}, "--mismatch-high"), ({"mismatch_low": 1.1, "mismatch_high": 1.2}, "--mismatch-low"), ({"mismatch_low": -0.1}, "--mismatch-low"),
    ({"mismatch_limit": 0.0}, "--mismatch-limit"), ({"value_clip": 0.0}, "--value-clip"), ({"kl_horizon": 0}, "--kl-horizon"), ({"kl_target": -0.1}, "--kl-target"),
    ({"kl_coef": 0.1, "kl_kind": "k1"}, "--kl-kind k1.*k2 or k3"),
    ({"dual_clip": 1.2}, "--dual-clip 1.2.*more than 1"), ({"dual_clip": 1.3, "clip_high": 0.4}, "--dual-clip 1.3"), ({"dual_clip": -3.0}, "--dual-clip -3"),
    ({"loss": "cispo", "cispo_ceiling": 0.9}, "--cispo-ceiling 0.9.*at least 1"),
])
def test_settings_that_make_no_sense_are_refused_with_their_flags(bad, words):
    with pytest.raises(ValueError, match=words):
        LossConfig(**bad)


@pytest.mark.parametrize("options, readers", [
    ({"clip_low": 0.1}, ["ppo", "gspo"]), ({"clip_high": 0.3}, ["ppo", "gspo"]), ({"dual_clip": 3.0}, ["ppo"]), ({"cispo_ceiling": 2.0}, ["cispo"]),
])
def test_a_flag_that_the_loss_does_not_read_is_refused(options, readers):
    """And the message says who reads it."""
    flag = "--" + next(iter(options)).replace("_", "-")
    for kind in POLICY_LOSSES:
        if kind in readers:
            LossConfig(loss=kind, **options)
        else:
            with pytest.raises(ValueError, match=f"{flag}.*{'.*'.join(readers)}.*{kind}"):
                LossConfig(loss=kind, **options)


def test_the_ends_of_each_range_are_accepted():
    for options in ({"clip_low": 0.0, "clip_high": 0.0}, {"mismatch_low": 0.0, "mismatch_high": 1.0}, {"mismatch_low": 1.0}, {"loss": "cispo", "cispo_ceiling": 1.0},
                    {"kl_target": 0.0}, {"kl_horizon": 1}, {"kl_kind": "k1"}, {"dual_clip": 1.21}):
        assert {name: getattr(LossConfig(**options), name) for name in options} == options
