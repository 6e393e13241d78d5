"""Tests of losses.py: values by hand, gradients by autograd and by definition, and what masked entries must not do.

Tensors are [B, T], column t about token t, and float64 unless a test says otherwise.
"""

import itertools
import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from losses import AGGREGATIONS, POLICY_LOSSES, LossConfig, kl, log_ratio, mismatch_correction, ppo, reinforce, sft, step_loss

CASES = {case["id"].split("-")[0]: case for case in json.loads((Path(__file__).parent / "cases.json").read_text())}
OFF = LossConfig(mismatch_level="off")
FULL = LossConfig(kl_coef=0.3, kl_kind="k3", entropy_coef=0.2, mismatch_high=1.5)     # every term of the loss at work
few = settings(max_examples=50, deadline=None, derandomize=True, database=None)


# ---------------------------------------------------------------------------------------------------- builders
@dataclass
class Rows:
    """The fields of a batch that a loss reads; each [B, T]."""

    response_mask: Tensor
    loss_weight: Tensor
    old_logprobs: Tensor | None = None
    behaviour_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    ref_logprobs: Tensor | None = None

    def take(self, rows) -> "Rows":
        return Rows(*(None if value is None else value[rows] for value in (getattr(self, f.name) for f in fields(self))))


def f64(*rows) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def close(seen, wanted, atol=1e-5):
    torch.testing.assert_close(torch.as_tensor(seen, dtype=torch.float64), torch.as_tensor(wanted, dtype=torch.float64), rtol=0, atol=atol)


def weights(mask: Tensor, aggregation: str = "token-mean", rollout=None, group=None) -> Tensor:
    """loss_weight with a rollout and a prompt of its own for each row, unless told."""
    rows = range(len(mask))
    return AGGREGATIONS[aggregation](mask, torch.tensor(rollout or rows), torch.tensor(group or rows))


def random_rows(seed: int, rows: int = 4, columns: int = 5) -> tuple[Rows, Tensor, Tensor]:
    """(rows, logprobs, entropy) in float64: policies within e^+-1 of each other, about two thirds of the tokens sampled."""
    g = torch.Generator().manual_seed(seed)
    def near(center, width):
        return center + width * (2 * torch.rand(rows, columns, generator=g, dtype=torch.float64) - 1)
    mask = torch.rand(rows, columns, generator=g) < 0.67
    mask[0, 0] = True
    logprobs = near(torch.full((rows, columns), -3.0, dtype=torch.float64), 1.5)
    batch = Rows(mask, weights(mask).double(), near(logprobs, 0.5), near(logprobs, 1.0), near(torch.zeros(()), 2.0), near(logprobs, 1.0))
    return batch, logprobs, near(torch.full((rows, columns), 2.0), 1.0)


def step(batch: Rows, logprobs: Tensor, entropy: Tensor | None = None, cfg=FULL, kind="ppo"):
    """(loss, its gradient in logprobs, metrics)."""
    logprobs = logprobs.clone().requires_grad_()
    loss, metrics = step_loss(logprobs, entropy, batch, cfg, kind)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0], metrics


def of_one_row(logprobs, old, advantages, mask=None, loss=ppo, cfg=OFF):
    """Token losses of one row, and the gradient of each in its own logprob."""
    logprobs = f64(logprobs).requires_grad_()
    mask = torch.ones_like(logprobs, dtype=torch.bool) if mask is None else torch.tensor([mask], dtype=torch.bool)
    token_loss, clipped = loss(logprobs, f64(old), f64(advantages), mask, cfg)
    return token_loss[0].detach(), torch.autograd.grad(token_loss.sum(), logprobs)[0][0], clipped[0]


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
    old = [-3.0] * 4
    logprobs = [-3.0 + math.log(token["ratio"]) for token in tokens]
    loss, gradient, clipped = of_one_row(logprobs, old, [token["advantage"] for token in tokens], cfg=cfg)
    close(loss, expect["loss"])
    close(gradient, expect["dloss_dlogprob"])
    assert clipped.tolist() == [True, False, False, True]
    batch = Rows(torch.ones(1, 4, dtype=torch.bool), torch.ones(1, 4), f64(old), f64(old), f64([token["advantage"] for token in tokens]))
    clipped, tokens = step(batch, f64(logprobs), cfg=cfg)[2]["clip_frac"]
    assert clipped / tokens == expect["clip_fraction"]


@few
@given(st.integers(0, 9999))
def test_before_any_update_ppo_and_reinforce_have_the_policy_gradient(seed):
    """At pi = pi_old both have value -A and gradient -A per token: that of -A log pi."""
    batch, logprobs, _ = random_rows(seed)
    batch = replace(batch, old_logprobs=logprobs, ref_logprobs=None)
    wanted = -(batch.loss_weight * batch.advantages)
    for kind in ("ppo", "reinforce"):
        loss, gradient, metrics = step(batch, logprobs, cfg=OFF, kind=kind)
        close(loss, wanted.sum(), atol=1e-12)
        close(gradient, wanted, atol=1e-12)
        assert metrics["clip_frac"][0] == 0 and metrics["policy_kl"][0] == 0


def test_reinforce_does_not_know_the_old_policy():
    """pi_old := pi, so whatever old_logprobs says, value -A and gradient -A."""
    loss, gradient, clipped = of_one_row([-1.0, -2.0], [-9.0, -0.1], [3.0, -0.5], loss=reinforce)
    assert (loss.tolist(), gradient.tolist(), clipped.tolist()) == ([-3.0, 0.5], [-3.0, 0.5], [False, False])


def test_sft_is_the_negative_logprob_of_the_given_tokens():
    """-log pi, gradient -1, and 0 off the mask whatever is there; no advantage and no other policy is asked for."""
    logprobs = f64([-1.0, -math.inf]).requires_grad_()
    loss, _ = sft(logprobs, None, None, torch.tensor([[True, False]]), OFF)
    assert loss.tolist() == [[1.0, 0.0]]
    assert torch.autograd.grad(loss.sum(), logprobs)[0].tolist() == [[-1.0, 0.0]]


def test_a_ratio_beyond_float_is_cut_and_stays_finite():
    """100 and -inf nats apart: the log ratio is cut to 30 and -30, in float32 too, and no gradient passes the cut."""
    logprobs = torch.tensor([[0.0, -math.inf]], requires_grad=True)
    ratio = log_ratio(logprobs, torch.tensor([[-100.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool))
    assert ratio.tolist() == [[30.0, -30.0]] and ratio.exp().square().isfinite().all()
    assert torch.autograd.grad(ratio.sum(), logprobs)[0].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("kind", sorted(POLICY_LOSSES))
def test_a_nan_logprob_of_a_trained_token_is_not_hidden(kind):
    """A model that has diverged gives NaN. The loss must say so: taken as ratio 1 it would look like an on-policy token."""
    batch, logprobs, _ = random_rows(0)
    logprobs[0, 0] = math.nan
    assert batch.response_mask[0, 0] and step(replace(batch, ref_logprobs=None), logprobs, cfg=OFF, kind=kind)[0].isnan()


# ---------------------------------------------------------------------------------------------------- masks
@pytest.mark.parametrize("kind", ["ppo", "reinforce"])
def test_a_masked_infinity_does_not_reach_the_loss(kind):
    """Case n17 c: logprobs [-1, -inf] under both policies, mask [1, 0], advantage 1: loss -1, gradient [-1, 0]."""
    c, expect = CASES["n17"]["given"]["c"], CASES["n17"]["expect"]["c"]
    mask = torch.tensor([c["action_mask"]], dtype=torch.bool)
    logprobs, old = f64([float(x) for x in c["logprob"]]), f64([float(x) for x in c["old_logprob"]])
    loss, gradient, metrics = step(Rows(mask, weights(mask), old, old, f64([c["advantage"]] * 2)), logprobs, cfg=LossConfig(), kind=kind)
    assert (loss.item(), gradient[0].tolist()) == (expect["loss"], expect["gradient"])
    assert all(math.isfinite(s) and n == 1 for s, n in metrics.values())


@pytest.mark.parametrize("kind", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan, 1e30])
def test_masked_entries_are_never_read(kind, poison):
    """Whatever stands off the mask in any input, loss, gradient and metrics stay bit for bit, and the gradient there is 0."""
    for seed in range(3):
        batch, logprobs, entropy = random_rows(seed)
        mask = batch.response_mask
        poisoned = replace(batch, **{name: torch.where(mask, getattr(batch, name), poison)
                                     for name in ("old_logprobs", "behaviour_logprobs", "advantages", "ref_logprobs")})
        clean = step(batch, logprobs, entropy, kind=kind)
        dirty = step(poisoned, torch.where(mask, logprobs, poison), torch.where(mask, entropy, poison), kind=kind)
        assert clean[0] == dirty[0] and torch.equal(clean[1], dirty[1]) and clean[2] == dirty[2]
        assert (dirty[1][~mask] == 0).all() and (dirty[1][mask] != 0).any()


@pytest.mark.parametrize("kind", sorted(POLICY_LOSSES))
def test_an_empty_mask_gives_zero_and_not_nan(kind):
    """Case n10 a: no token, so loss 0, gradient 0, and every metric a finite sum over a count (0 tokens)."""
    batch, logprobs, entropy = random_rows(0)
    nothing = torch.zeros_like(batch.response_mask)
    for aggregation in AGGREGATIONS:
        empty = replace(batch, response_mask=nothing, loss_weight=weights(nothing, aggregation))
        loss, gradient, metrics = step(empty, logprobs, entropy, kind=kind)
        assert loss == CASES["n10"]["expect"]["a"]["loss"] and (gradient == CASES["n10"]["expect"]["a"]["gradient"]).all()
        assert all(total == 0 for total, _ in metrics.values())


# ---------------------------------------------------------------------------------------------------- mismatch correction
def n15(level: str, high: float = 2.0) -> tuple[Tensor, Tensor, Tensor, LossConfig]:
    given_ = CASES["n15"]["given"]
    return f64(given_["trainer_logprob_before_update"]), f64(given_["rollout_logprob"]), torch.ones(1, 3, dtype=torch.bool), LossConfig(
        mismatch_level=level, mismatch_high=high)


def test_truncated_importance_weights_are_cut_at_the_top_only():
    """Case n15: ratios e^0.2, e^-1, e^3 with a ceiling of 2: 1.221, 0.368, 2; off: 1, 1, 1; 0 off the mask."""
    old, behaviour, mask, cfg = n15("token")
    close(mismatch_correction(old, behaviour, mask, cfg)[0], CASES["n15"]["expect"]["token_trunc_[0.5,2]"])
    close(mismatch_correction(*n15("token", high=1e9))[0], CASES["n15"]["expect"]["ratio"])
    assert mismatch_correction(*n15("off")).tolist() == [[1, 1, 1]]
    for level in ("token", "off"):
        old, behaviour, mask, cfg = n15(level)
        assert mismatch_correction(old, behaviour, ~mask, cfg).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("kind", ["ppo", "reinforce"])
def test_the_correction_multiplies_the_token_loss_and_carries_no_gradient(kind):
    """Case n15 at pi = pi_old, A = 1, weight 1: gradient -w per token; pi_old gets none, though the weight is made of it."""
    old, behaviour, mask, cfg = n15("token")
    w = CASES["n15"]["expect"]["token_trunc_[0.5,2]"]
    loss, gradient, _ = step(Rows(mask, torch.ones(1, 3), old, behaviour, torch.ones(1, 3)), old, cfg=cfg, kind=kind)
    close(loss, -sum(w))
    close(gradient[0], [-x for x in w])
    old.requires_grad_()
    assert not mismatch_correction(old, behaviour, mask, cfg).requires_grad


def test_the_mismatch_metrics_by_hand():
    """Case n15: gaps 0.2, -1, 3. Cut above 2: one of three. k3 of each: e^g - 1 - g = 0.021403, 0.367879, 16.085537."""
    old, behaviour, mask, cfg = n15("token")
    batch = Rows(mask, torch.ones(1, 3), old, behaviour, torch.ones(1, 3))
    metrics = step(batch, old, cfg=cfg)[2]
    assert metrics["mismatch_cut_frac"] == (1, 3)
    close(metrics["mismatch_kl"][0], 0.021403 + 0.367879 + 16.085537)
    assert metrics["mismatch_kl"][1] == 3
    off = step(batch, old, cfg=OFF)[2]
    assert off["mismatch_cut_frac"] == (0, 3) and off["mismatch_kl"] == metrics["mismatch_kl"]


def test_the_policy_kl_metric_is_that_of_the_step_just_made():
    """pi_old = -1, pi = -1.5: k3 of KL(pi_old || pi) is e^-0.5 - 1 + 0.5 = 0.106531."""
    batch = Rows(torch.ones(1, 1, dtype=torch.bool), torch.ones(1, 1), f64([-1.0]), f64([-1.0]), f64([1.0]))
    close(step(batch, f64([-1.5]), cfg=OFF)[2]["policy_kl"][0], CASES["n14"]["expect"]["k3"][0])


# ---------------------------------------------------------------------------------------------------- KL, entropy
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
    """Case n14 in the loss: A = 0, weights 1, so loss = 0.5 * (0.106531 + 0.148721) - 0.1 * (2 + 3)."""
    given_, expect = CASES["n14"]["given"], CASES["n14"]["expect"]
    logprobs, ref, mask = f64(given_["policy_logprob"]), f64(given_["reference_logprob"]), torch.ones(1, 2, dtype=torch.bool)
    batch = Rows(mask, torch.ones(1, 2), logprobs, logprobs, torch.zeros(1, 2), ref)
    loss, gradient, metrics = step(batch, logprobs, f64([2.0, 3.0]), replace(OFF, kl_coef=0.5, kl_kind="k3", entropy_coef=0.1))
    close(loss, 0.5 * sum(expect["k3"]) - 0.1 * 5)
    close(gradient[0], [0.5 * (1 - math.exp(-0.5)), 0.5 * (1 - math.exp(0.5))])
    close(metrics["ref_kl"][0], sum(expect["k3"]))
    assert metrics["entropy"] == (5, 2)
    close(step(batch, logprobs, None, replace(OFF, kl_coef=0.5, kl_kind="k2"))[0], 0.5 * sum(expect["k2"]))


def test_the_entropy_bonus_pulls_on_entropy():
    """d loss / d entropy = -coefficient * weight on response tokens, 0 elsewhere."""
    batch, logprobs, entropy = random_rows(3)
    entropy.requires_grad_()
    loss, _ = step_loss(logprobs, entropy, batch, FULL, "ppo")
    close(torch.autograd.grad(loss, entropy)[0], -FULL.entropy_coef * batch.loss_weight * batch.response_mask, atol=1e-12)


# ---------------------------------------------------------------------------------------------------- the step's loss
@pytest.mark.parametrize("kind", ["ppo", "sft"])
def test_gradients_are_the_slope_of_the_loss(kind):
    """gradcheck in float64, all terms at work, in logprobs and entropy (reinforce holds its value at -A by design)."""
    for seed in range(3):
        batch, logprobs, entropy = random_rows(seed)
        assert torch.autograd.gradcheck(lambda x, h: step_loss(x, h, batch, FULL, kind)[0], (logprobs.requires_grad_(), entropy.requires_grad_()))


@few
@given(st.integers(0, 9999), st.sampled_from(["ppo", "reinforce"]))
def test_the_loss_is_the_weighted_sum_by_definition(seed, kind):
    """Oracle: the formulas of the docstrings, token by token, in Python floats."""
    batch, logprobs, entropy = random_rows(seed)
    total = 0.0
    for place in batch.response_mask.nonzero():
        pi, old, mu, ref, A, h, w = (x[tuple(place)].item() for x in (
            logprobs, batch.old_logprobs, batch.behaviour_logprobs, batch.ref_logprobs, batch.advantages, entropy, batch.loss_weight))
        ratio = math.exp(pi - old)
        policy = -A if kind == "reinforce" else -min(ratio * A, min(max(ratio, 0.8), 1.2) * A)
        total += w * (min(math.exp(old - mu), 1.5) * policy + 0.3 * (math.exp(ref - pi) - 1 + pi - ref) - 0.2 * h)
    close(step(batch, logprobs, entropy, kind=kind)[0], total, atol=1e-9)


@few
@given(st.integers(0, 9999), st.sampled_from(sorted(POLICY_LOSSES)), st.permutations(range(4)), st.integers(1, 3))
def test_any_split_into_micro_batches_has_the_same_loss_and_gradient(seed, kind, order, cut):
    """loss_weight is fixed for the step, so parts only add: losses, gradients, and the sum of every metric."""
    batch, logprobs, entropy = random_rows(seed)
    loss, gradient, metrics = step(batch, logprobs, entropy, kind=kind)
    parts = [(rows, step(batch.take(rows), logprobs[rows], entropy[rows], kind=kind)) for rows in (order[:cut], order[cut:])]
    close(sum(part[0] for _, part in parts), loss, atol=1e-9)
    for rows, part in parts:
        close(part[1], gradient[rows], atol=1e-12)
    for name, (total, _) in metrics.items():
        close(sum(part[2][name][0] for _, part in parts), total, atol=1e-9)


@pytest.mark.parametrize("kind", sorted(POLICY_LOSSES))
def test_a_metric_does_not_depend_on_the_number_of_micro_batches(kind):
    """A metric is sum / count, both added up by name: one part or four, the quotient is the same. The loss itself is a sum."""
    batch, logprobs, entropy = random_rows(0)
    parts = [step(batch.take([row]), logprobs[[row]], entropy[[row]], kind=kind)[2] for row in range(4)]
    for name, (total, count) in step(batch, logprobs, entropy, kind=kind)[2].items():
        parts_total, parts_count = (sum(part[name][k] for part in parts) for k in (0, 1))
        close(parts_total if name == "loss" else parts_total / parts_count, total if name == "loss" else total / count, atol=1e-9)


@pytest.mark.parametrize("kind", sorted(POLICY_LOSSES))
def test_inputs_stay_as_they_were(kind):
    """Bit for bit, and only logprobs and entropy are asked for a gradient."""
    batch, logprobs, entropy = random_rows(1)
    kept = [x.clone() for x in (logprobs, entropy, *(getattr(batch, f.name) for f in fields(batch)))]
    step(batch, logprobs, entropy, kind=kind)
    for before, after in zip(kept, (logprobs, entropy, *(getattr(batch, f.name) for f in fields(batch))), strict=True):
        assert torch.equal(before, after) and not after.requires_grad


# ---------------------------------------------------------------------------------------------------- configuration
@pytest.mark.parametrize("bad, words", [
    ({"clip_low": -0.1}, "--clip-low"), ({"clip_low": 1.0}, "--clip-low"), ({"clip_high": -0.1}, "--clip-high"),
    ({"mismatch_high": 0.9}, "--mismatch-high"), ({"kl_coef": 0.1, "kl_kind": "k1"}, "--kl-kind k1.*k2 or k3"),
])
def test_settings_that_make_no_sense_are_refused_with_their_flags(bad, words):
    with pytest.raises(ValueError, match=words):
        LossConfig(**bad)
