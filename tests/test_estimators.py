"""Tests of estimators.py: what collate keeps, and advantages by hand, by brute force and by the laws they obey.

A rollout is written (group, reward, *segments), a segment as its response mask: (7, 1.0, "0011", "01") has two segments
in which the policy sampled three tokens. What models say about them (logprobs, values) is written rollout by rollout.
"""

import copy
import dataclasses
import itertools
import json
import math
import pickle
import random
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent import Trajectory
from estimators import (
    ESTIMATORS, PER_ROLLOUT, Batch, EstimatorConfig, backward_sums, collate, final_rewards, shape_rewards, supervised_batch, token_rewards,
    value_targets, whiten)
from losses import AGGREGATIONS

CASES = {case["id"].split("-")[0]: case for case in json.loads((Path(__file__).parent / "cases.json").read_text())}
PLAIN = EstimatorConfig(whiten=False)
BASELINES = sorted(name for name, method in ESTIMATORS.items() if method.groups)
WHITENED = sorted(name for name, method in ESTIMATORS.items() if "whiten" in method.reads)
SETTINGS = {name: [cfg for cfg in (    # of every method, each kind of setting that it reads
    EstimatorConfig(), PLAIN, EstimatorConfig(gamma=0.5, whiten=False), EstimatorConfig(gamma=0.9, kl_reward_coef=0.3),
    EstimatorConfig(gamma=0.9, gae_lambda=0.7, whiten=False, kl_reward_coef=0.3, kl_reward_kind="k3")) if not method.unread(cfg)]
    for name, method in ESTIMATORS.items()}
EVERY = [(name, cfg) for name in SETTINGS for cfg in SETTINGS[name]]
PER_TOKEN = ("token_ids", "response_mask", "behaviour_logprobs", "policy_versions", "loss_weight", "old_logprobs", "ref_logprobs", "values")
few = settings(max_examples=20, deadline=None, derandomize=True, database=None)


# ---------------------------------------------------------------------------------------------------- builders
def segment(rollout: int, group: int, reward, mask: str, truncated=False, start=10) -> Trajectory:
    """Token t has id start + t; a sampled one has logprob -t/8 and version t."""
    trajectory, t = Trajectory(rollout, group, reward=reward, truncated=truncated), 0
    for bit, run in itertools.groupby(mask):
        places = range(t, t := t + len(list(run)))
        trajectory.extend([start + k for k in places], *([[-k / 8 for k in places], list(places)] if bit == "1" else []))
    return trajectory


def rollouts_of(*rollouts, truncated=()) -> list[list[Trajectory]]:
    return [[segment(100 + i, group, reward, mask, truncated=i in truncated) for mask in masks] for i, (group, reward, *masks) in enumerate(rollouts)]


def batch_of(*rollouts, **options) -> Batch:
    return collate(rollouts_of(*rollouts), AGGREGATIONS["token-mean"], **options)


def on_tokens(batch: Batch, numbers, elsewhere=99.0) -> torch.Tensor:
    """[B, T]: numbers[rollout] laid on the rollout's response tokens in time order, and `elsewhere` on all others."""
    following = [iter(x) for x in numbers]             # collate keeps a rollout's segments in time order
    return torch.tensor([[next(following[rollout]) if sampled else elsewhere for sampled in row] for rollout, row in zip(
        batch.rollout.tolist(), batch.response_mask.tolist())])


def with_models(batch: Batch, order=None, elsewhere=99.0) -> Batch:
    """The batch with logprobs, values and kl_scale; token k of rollout i has the numbers of (order[i], k), random ones."""
    tables = torch.rand(3, 6, 15, generator=torch.Generator().manual_seed(0)) * 2 - 1
    order = list(order or range(len(batch.rollout_rewards)))
    old, ref, values = (on_tokens(batch, table[order].tolist(), elsewhere) for table in tables)
    return dataclasses.replace(batch, old_logprobs=old, ref_logprobs=ref, values=values * 3, kl_scale=0.5)


def per_rollout(batch: Batch, per_token: torch.Tensor) -> list[list[float]]:
    """The response tokens' values of each rollout in time order; whatever lies elsewhere must be exactly 0."""
    assert (per_token[~batch.response_mask] == 0).all() and per_token.isfinite().all()
    out = [[] for _ in batch.rollout_rewards]
    for rollout, numbers, row in zip(batch.rollout.tolist(), per_token.tolist(), batch.response_mask.tolist()):
        out[rollout] += itertools.compress(numbers, row)
    return out


def response(batch: Batch, per_token: torch.Tensor) -> list[list[float]]:
    """The same of a tensor that may hold anything elsewhere."""
    return per_rollout(batch, torch.where(batch.response_mask, per_token, 0.0))


def one_each(batch: Batch, name: str, cfg=PLAIN) -> list[float]:
    """The one advantage of each rollout, where all its response tokens share it."""
    values = per_rollout(batch, ESTIMATORS[name](batch, cfg))
    assert all(len(set(v)) == 1 for v in values)
    return [v[0] for v in values]


def close(seen, wanted, atol=1e-5):
    torch.testing.assert_close(torch.as_tensor(seen, dtype=torch.float64), torch.as_tensor(wanted, dtype=torch.float64), rtol=0, atol=atol)


def all_close(seen: list[list[float]], wanted: list[list[float]], atol=1e-5):
    """What per_rollout gives, number by number."""
    assert [len(x) for x in seen] == [len(x) for x in wanted]
    close(sum(seen, []), sum(wanted, []), atol)


masks = st.text("01", min_size=1, max_size=5)
some_rollouts = st.lists(
    st.tuples(st.integers(0, 2), st.integers(-8, 8).map(float), st.lists(masks, min_size=1, max_size=3)).filter(lambda r: "1" in "".join(r[2])),
    min_size=1, max_size=6).map(lambda rollouts: [(group, reward, *masks) for group, reward, masks in rollouts])
some_cfg = st.builds(EstimatorConfig, whiten=st.just(False), gamma=st.sampled_from([0.0, 0.5, 0.9, 1.0]), gae_lambda=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
                     kl_reward_coef=st.sampled_from([0.0, 0.3]), kl_reward_kind=st.sampled_from(["k1", "k3"]))


# ---------------------------------------------------------------------------------------------------- collate
def test_rows_keep_what_the_trajectories_hold_and_padding_is_by_length():
    """A rollout of one segment and one of two; beyond its length a row has id 0, mask False, logprob 0 and version -1."""
    batch = batch_of((9, 2.0, "0101"), (7, 1.0, "011", "01"))
    assert batch.token_ids.tolist() == [[10, 11, 12, 13], [10, 11, 12, 0], [10, 11, 0, 0]]
    assert batch.response_mask.int().tolist() == [[0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 0, 0]]
    assert batch.behaviour_logprobs.tolist() == [[0, -0.125, 0, -0.375], [0, -0.125, -0.25, 0], [0, -0.125, 0, 0]]
    assert batch.policy_versions.tolist() == [[-1, 1, -1, 3], [-1, 1, 2, -1], [-1, 1, -1, -1]]
    assert (batch.lengths.tolist(), batch.rollout.tolist(), batch.position.tolist()) == ([4, 3, 2], [0, 1, 1], [0, 0, 1])
    assert (batch.raw_rewards.tolist(), batch.rollout_rewards.tolist(), batch.rollout_group.tolist()) == ([2.0, 1.0], [2.0, 1.0], [0, 1])
    assert {f.name for f in dataclasses.fields(Batch) if isinstance(x := getattr(batch, f.name), torch.Tensor) and len(x) == 2} == set(PER_ROLLOUT)   # 2 rollouts in 3 rows
    told = batch_of((9, 2.0, "01"), temperature=0.7, version=3)
    assert (told.temperature, told.version, batch.version) == (0.7, 3, 0)


def test_a_sequence_is_a_rollouts_response_tokens_in_time_order():
    """Rollout 0 has columns 1 and 3 of its first segment and 0 of its second, rollout 1 has 1 and 2; rows in any order, here the later segment first."""
    batch = batch_of((9, 2.0, "0101", "10"), (7, 1.0, "011"))
    swapped = dataclasses.replace(batch, **{f: getattr(batch, f)[[1, 2, 0]] for f in ("response_mask", "rollout", "position")})
    for seen, rows in ((batch, [0, 0, 1, 2, 2]), (swapped, [2, 2, 0, 1, 1])):
        assert [x.tolist() for x in seen.sequences()] == [rows, [1, 3, 0, 1, 2], [0, 0, 0, 1, 1], [0, 1, 2, 0, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_in_torchs_default_dtype(dtype):
    """Rewards are float64 always. In float64, 2/3 and 1/3 keep their digits: recipes/exact_gradient.py needs them."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        batch = with_models(batch_of((7, 1.0, "01"), (7, 0.0, "01"), (7, 0.0, "01")))
        seen = [batch.behaviour_logprobs, batch.loss_weight, value_targets(batch, PLAIN), *(ESTIMATORS[name](batch, cfg) for name, cfg in EVERY)]
        assert {x.dtype for x in seen} == {dtype} and batch.rollout_rewards.dtype == torch.float64
        close(ESTIMATORS["dr_grpo"](batch, PLAIN)[:, 1], [2 / 3, -1 / 3, -1 / 3], atol=torch.finfo(dtype).eps)
        close(batch.loss_weight[:, 1], [1 / 3] * 3, atol=torch.finfo(dtype).eps)
    finally:
        torch.set_default_dtype(usual)


def test_supervised_pairs_train_the_answers():
    """(prompt [5, 6], answer [7]) and (prompt [8], answer [9, 2]): three answer tokens of weight 1/3, which no version sampled."""
    batch = supervised_batch([([5, 6], [7]), ([8], [9, 2])], AGGREGATIONS["token-mean"])
    assert (batch.token_ids.tolist(), batch.response_mask.int().tolist()) == ([[5, 6, 7], [8, 9, 2]], [[0, 0, 1], [0, 1, 1]])
    assert (batch.policy_versions == -1).all() and (batch.behaviour_logprobs == 0).all() and batch.rollout_group.tolist() == [0, 1]
    close(batch.loss_weight, [[0, 0, 1 / 3], [0, 1 / 3, 1 / 3]])


def test_a_sampled_end_token_is_no_padding_even_where_padding_has_its_id():
    """Case n19 a with the id that collate pads by (0) as the end token: [5, 6, 7, end] in a batch of width 6 has length 4, attention 111100."""
    row, wide = Trajectory(0, 0, reward=1.0), segment(1, 0, 1.0, "000001")
    row.extend(CASES["n19"]["given"]["a"]["prompt"])
    row.extend([7, 0], [-0.1, -0.2], [0, 0])
    batch, expect = collate([[row], [wide]], AGGREGATIONS["token-mean"]), CASES["n19"]["expect"]["a"]
    assert batch.token_ids[0].tolist() == [5, 6, 7, 0, 0, 0]
    assert (torch.arange(6) < batch.lengths[0]).int().tolist() == expect["attention"]
    assert batch.response_mask[0].int().tolist() == expect["action_mask"]


def test_recorded_experts_stay_with_their_row_and_a_batch_without_any_has_none():
    """One of two rows has them: the same object, untouched (it may be a reference to another process's memory)."""
    rows, record = [Trajectory(rollout=i, group=0, reward=0.0) for i in range(2)], object()
    for row in rows:
        row.extend([1])
        row.extend([2], [-1.0], [0])
    assert collate([[row] for row in rows], AGGREGATIONS["token-mean"]).routed_experts is None
    rows[1].routed_experts = record
    batch = collate([[row] for row in rows], AGGREGATIONS["token-mean"])
    assert batch.routed_experts[0] is None and batch.routed_experts[1] is record


def test_a_batch_is_pickled_as_its_memory_lies():
    """Each tensor leaves as one buffer beside the pickle, uncopied, and arrives with its type and numbers; what is None stays None."""
    batch, buffers = with_models(batch_of((7, 1.0, "001", "0011"), (7, 0.0, "01"))), []
    arrived = pickle.loads(pickle.dumps(batch, 5, buffer_callback=buffers.append), buffers=buffers)
    tensors = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if isinstance(getattr(batch, f.name), torch.Tensor)}
    assert len(buffers) == len(tensors) and sum(b.raw().nbytes for b in buffers) == sum(t.nbytes for t in tensors.values())
    for f in dataclasses.fields(batch):
        mine, other = getattr(batch, f.name), getattr(arrived, f.name)
        assert torch.equal(mine, other) and mine.dtype == other.dtype if f.name in tensors else mine == other


def test_a_rollout_counts_once_however_many_segments_it_has():
    """Case n04: rows 1, 4, 1, 2 for rewards 1, 0, 0, 1 give four rewards of mean 0.5 (over rows it would be 0.375)."""
    given_, expect = CASES["n04"]["given"], CASES["n04"]["expect"]
    batch = batch_of(*((7, r, *["01"] * rows) for r, rows in zip(given_["rewards"], given_["rows_per_rollout"], strict=True)))
    assert len(batch.rollout_rewards) == expect["rollouts_present"]
    assert batch.rollout_rewards.mean() == expect["mean_reward_metric"]
    rows = ESTIMATORS["grpo"](batch, PLAIN)[:, 1]                                               # [B]
    close(rows, [a for a, n in zip(expect["advantage_per_rollout"], given_["rows_per_rollout"]) for _ in range(n)])


@pytest.mark.parametrize("unscored", [None, math.nan])
def test_a_rollout_without_a_reward_is_refused(unscored):
    """Case n05: None or NaN is never taken as 0; the message names the rollout (number 101). What is left when it was dropped: the case's numbers."""
    rewards = [unscored if r is None else r for r in CASES["n05"]["given"]["group"]]
    with pytest.raises(ValueError, match="Rollout 101"):
        batch_of(*((7, r, "01") for r in rewards))
    rollouts = rollouts_of((7, 1.0, "01"), (7, 0.0, "01", "01"))
    rollouts[1][1].reward = unscored                   # a later segment's counts as well
    with pytest.raises(ValueError, match="Rollout 101"):
        collate(rollouts, AGGREGATIONS["token-mean"])
    _, expect = CASES["n05"]["expect"]["either"]
    close(one_each(batch_of(*((7, r, "01") for r in rewards if r == r and r is not None)), "grpo"), [a for a in expect["advantages"] if a])


def test_a_rollout_without_a_sampled_token_is_refused():
    """Case b07: an answer that never came has no place for a reward; a second, empty segment of a rollout that has tokens is fine."""
    with pytest.raises(ValueError, match="sampled token"):
        batch_of((7, 1.0, "01"), (7, 1.0, "000", "00"))
    assert len(batch_of((7, 1.0, "01", "000")).lengths) == 2


def test_a_rollout_is_truncated_when_any_of_its_segments_is():
    rollouts = rollouts_of((7, 1.0, "01", "01"), (7, 0.0, "01"))
    rollouts[0][0].truncated = True
    assert collate(rollouts, AGGREGATIONS["token-mean"]).truncated.tolist() == [True, False]


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_truncated_rollouts_leave_the_denominator(aggregation):
    """Case n10 b: 4 tokens, and 6 of a truncated rollout, loss 1 each: 1.0 by either mean (0.4 or 0.5 if the row stayed in it)."""
    rollouts = rollouts_of((7, 1.0, "1111"), (7, 0.0, "111111"), truncated=[1])
    batch = collate(rollouts, AGGREGATIONS[aggregation], mask_truncated=True)
    close(batch.loss_weight.sum(), CASES["n10"]["expect"]["b"][aggregation])
    assert batch.loss_weight[1].tolist() == [0] * 6
    assert batch.response_mask[1].all()                 # still response tokens: advantages and metrics see them
    assert (collate(rollouts, AGGREGATIONS[aggregation]).loss_weight[1] > 0).all()


def test_a_step_of_truncated_rollouts_only_weighs_nothing():
    """All masked: weights 0, not 0/0."""
    for aggregation in AGGREGATIONS.values():
        batch = collate(rollouts_of((7, 1.0, "011"), truncated=[0]), aggregation, mask_truncated=True)
        assert batch.loss_weight.tolist() == [[0, 0, 0]]


def test_minibatches_take_whole_groups_in_order_and_weigh_each_by_itself():
    """Groups of 2, 1, 1, 2 rollouts in 2 steps: rows 0-2 and 3-5, each token 1/(tokens of its step) = 1/4 and 1/3."""
    batch = batch_of((5, 1.0, "11"), (5, 1.0, "01"), (6, 1.0, "01"), (7, 1.0, "01"), (8, 1.0, "01"), (8, 1.0, "01"), minibatches=2)
    assert batch.minibatch.tolist() == [0, 0, 0, 1, 1, 1]
    close(batch.loss_weight, [[1 / 4, 1 / 4], [0, 1 / 4], [0, 1 / 4], [0, 1 / 3], [0, 1 / 3], [0, 1 / 3]])


def test_the_prompt_mean_is_over_all_rollouts_of_a_prompt():
    """Prompt 5 has 2 + 1 tokens over two rollouts, prompt 6 has 1: weights 1/3 and 1, each times 1/2 for two prompts."""
    batch = collate(rollouts_of((5, 1.0, "11"), (6, 1.0, "01"), (5, 0.0, "01")), AGGREGATIONS["prompt-mean-token-mean"])
    close(batch.loss_weight, [[1 / 6, 1 / 6], [0, 1 / 2], [0, 1 / 6]])


def test_more_minibatches_than_groups_are_refused():
    with pytest.raises(ValueError, match="--minibatches 3"):
        batch_of((5, 1.0, "11"), (6, 1.0, "01"), minibatches=3)


@few
@given(some_rollouts, st.sampled_from(sorted(AGGREGATIONS)), st.integers(1, 3))
def test_weights_of_a_step_follow_from_its_own_rollouts_alone(rollouts, aggregation, minibatches):
    """Oracle: collate the groups of each minibatch as a batch of their own."""
    groups = list(dict.fromkeys(group for group, *_ in rollouts))
    minibatches = min(minibatches, len(groups))
    whole = collate(rollouts_of(*rollouts), AGGREGATIONS[aggregation], minibatches=minibatches)
    for m in range(minibatches):
        mine = [g for k, g in enumerate(groups) if k * minibatches // len(groups) == m]
        alone = collate(rollouts_of(*(r for r in rollouts if r[0] in mine)), AGGREGATIONS[aggregation])
        weights = whole.loss_weight[whole.minibatch == m]
        close(weights[:, : alone.loss_weight.shape[1]], alone.loss_weight)
        assert weights.sum() > 0


# ---------------------------------------------------------------------------------------------------- returns, whitening
def test_the_reward_lies_on_the_last_sampled_token_and_returns_skip_observed_ones():
    """Case n06: index 6 behind tool output, index 1 before a tail of feedback, none where nothing was sampled; gamma 1."""
    rows, expect = CASES["n06"]["given"]["rows"][:3], CASES["n06"]["expect"]["rows"][:3]
    batch = batch_of(*((k, row["reward"], "1" * len(row["action_mask"])) for k, row in enumerate(rows)))
    batch.response_mask[:] = False                     # collate refuses the third row, so the masks are written in afterwards
    for k, row in enumerate(rows):
        batch.response_mask[k, : len(row["action_mask"])] = torch.tensor(row["action_mask"], dtype=torch.bool)
    landed = final_rewards(batch)
    assert [row.nonzero().flatten().tolist() for row in landed] == [[e["reward_index"]] if e["reward_index"] is not None else [] for e in expect]
    assert [landed[0, 6], landed[1, 1]] == [1, 1]
    assert per_rollout(batch, backward_sums(batch, landed, 1.0)) == [e["returns_on_action_tokens"] for e in expect]


@pytest.mark.parametrize("name", ["reinforce", "gae"])
def test_kl_as_a_reward_is_paid_token_by_token(name):
    """Case n06, fourth row: 1 - 0.5 * (0.1 per token still to come) = 0.8, 0.85, 0.9, 0.95; the 9s on observed tokens do not count.
    The coefficient is 0.25 times a kl_scale of 2. A critic that says 0 leaves the returns as they are."""
    row, expect = CASES["n06"]["given"]["rows"][3], CASES["n06"]["expect"]["rows"][3]
    batch = batch_of((7, row["reward"], "".join(map(str, row["action_mask"]))))
    batch = dataclasses.replace(batch, old_logprobs=torch.tensor([row["kl"]]) - 2, ref_logprobs=torch.full((1, 7), -2.0), values=torch.zeros(1, 7), kl_scale=2.0)
    advantages = ESTIMATORS[name](batch, EstimatorConfig(whiten=False, kl_reward_coef=row["kl_coef"] / 2))
    close(per_rollout(batch, advantages), [expect["returns_on_action_tokens"]])
    assert (advantages[~batch.response_mask] == CASES["n06"]["expect"]["off_action_tokens"]).all()


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_kl_reward_has_the_sign_and_direction_of_old_against_ref(kind):
    """Case n14: d = 0.5 and -0.5, so k1 = d and k3 = e^-d - 1 + d = 0.106531 and 0.148721, each taken from the token's reward (0 and 3)."""
    given_, batch = CASES["n14"]["given"], batch_of((7, 3.0, "01", "01"))
    batch = dataclasses.replace(batch, old_logprobs=on_tokens(batch, [given_["policy_logprob"]]), ref_logprobs=on_tokens(batch, [given_["reference_logprob"]]))
    first, last = CASES["n14"]["expect"][kind]
    all_close(per_rollout(batch, token_rewards(batch, EstimatorConfig(kl_reward_coef=1.0, kl_reward_kind=kind))), [[-first, 3 - last]])


def test_a_k3_reward_beyond_float_is_cut():
    """100 nats apart: d is cut to -30 and 30, so k3 = e^30 - 1 - 30 and 29; float32 stays finite. Both -inf: no gap, k3 = 0."""
    batch = batch_of((7, 0.0, "111"))
    batch = dataclasses.replace(batch, old_logprobs=torch.tensor([[-100.0, 0.0, -math.inf]]), ref_logprobs=torch.tensor([[0.0, -100.0, -math.inf]]))
    seen = token_rewards(batch, EstimatorConfig(kl_reward_coef=1.0, kl_reward_kind="k3"))
    torch.testing.assert_close(seen, torch.tensor([[-(math.exp(30) - 31), -29.0, 0.0]]))
    torch.testing.assert_close(ESTIMATORS["on_policy_distill"](batch, PLAIN), torch.tensor([[30.0, -30.0, 0.0]]))


@pytest.mark.parametrize("reward", [math.inf, -math.inf])
def test_an_infinite_reward_is_refused(reward):
    """It would make every advantage of its group NaN."""
    with pytest.raises(ValueError, match="Rollout 100"):
        batch_of((7, reward, "01"), (7, 1.0, "01"))


def test_returns_are_discounted_by_sampled_tokens():
    """gamma 1/2, reward 8 on the last of four sampled tokens, over two segments and observed ones: 1, 2, 4, 8."""
    batch = batch_of((7, 8.0, "0101", "0110"))
    assert per_rollout(batch, ESTIMATORS["reinforce"](batch, EstimatorConfig(gamma=0.5, whiten=False))) == [[1, 2, 4, 8]]


@few
@given(some_rollouts, st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.integers(0, 99))
def test_returns_equal_the_sum_by_definition(rollouts, gamma, seed):
    """Oracle: G_t = sum over the rollout's later response tokens k of gamma^k r_{t+k}, for random rewards on every column."""
    batch = batch_of(*rollouts)
    rewards = torch.rand(batch.response_mask.shape, generator=torch.Generator().manual_seed(seed))
    seen = per_rollout(batch, backward_sums(batch, rewards, gamma))
    for paid, returns in zip(per_rollout(batch, rewards * batch.response_mask), seen, strict=True):
        close(returns, [sum(gamma**k * r for k, r in enumerate(paid[t:])) for t in range(len(paid))])


def test_whitening_counts_response_tokens_only():
    """Case n07: mean 1/3 and variance 8/9 of (1, 1, -1), so 0.707, 0.707, -1.414; the 99s are neither counted nor kept."""
    given_, expect = CASES["n07"]["given"], CASES["n07"]["expect"]
    mask = torch.tensor(given_["action_mask"], dtype=torch.bool)
    whitened = whiten(torch.tensor(given_["advantages"], dtype=torch.float32), mask)
    close(whitened[mask], expect["whitened_on_action_tokens"])
    assert (whitened[~mask] == 0).all()


def test_whitening_equal_values_or_none_gives_zero():
    """0.1 thrice has no deviation to divide by, though its mean in binary is 0.10000000000000002; an empty mask has no mean."""
    x = torch.full((1, 4), 0.1, dtype=torch.float64)
    assert whiten(x, torch.tensor([[True, True, True, False]])).tolist() == [[0] * 4]
    assert whiten(x, torch.zeros(1, 4, dtype=torch.bool)).tolist() == [[0] * 4]


def test_whitening_does_not_blow_up_a_deviation_near_0():
    """0 and 1e-6: deviation 5e-7, taken as sqrt(1e-8) = 1e-4, so -0.005 and 0.005 and not -1 and 1."""
    close(whiten(torch.tensor([[0.0, 1e-6]]), torch.ones(1, 2, dtype=torch.bool)), [[-0.005, 0.005]])


@few
@given(some_rollouts)
def test_whitened_advantages_have_mean_0_and_variance_1_over_response_tokens(rollouts):
    """Over the tokens of the batch, unless all are equal."""
    batch = with_models(batch_of(*rollouts))
    for name in WHITENED:
        plain = ESTIMATORS[name](batch, PLAIN)[batch.response_mask]
        values = ESTIMATORS[name](batch, EstimatorConfig())[batch.response_mask].double()
        close(values.mean(), 0.0)
        close(values.var(unbiased=False), float(plain.min() != plain.max()))


# ---------------------------------------------------------------------------------------------------- shaped rewards
def test_the_overlong_penalty_grows_with_the_longest_segment():
    """Context 10, buffer 4, penalty 2: nothing up to 6 tokens, 2/4 for each more, 2 from 10 on. Two segments of 7 and 5 are 7 long, not 12."""
    lengths = [(3,), (6,), (7,), (9,), (10,), (12,), (5, 7), (7, 5)]
    batch = batch_of(*((7, 1.0, *("0" * (n - 1) + "1" for n in segments)) for segments in lengths))
    shaped = shape_rewards(batch, EstimatorConfig(overlong_buffer=4, overlong_penalty=2.0), context_length=10)
    close(shaped, [1, 1, 0.5, -0.5, -1, -1, 0.5, 0.5])
    assert batch.raw_rewards.tolist() == [1] * 8 and shaped.dtype == torch.float64


@pytest.mark.parametrize("truncated_reward, wanted", [(0.0, [0, 0, 3]), (0.5, [1.5, -0.5, 3]), (1.0, [3, -1, 3]), (-0.5, [-0.5, -0.5, 3]), (None, [3, -1, 3])])
def test_a_truncated_rollout_keeps_a_share_of_its_reward_or_gets_another(truncated_reward, wanted):
    """Rewards 3 and -1 of truncated rollouts: times 0, 0.5 or 1, or -0.5 in their place. The third was not truncated and stays at 3."""
    batch = collate(rollouts_of((7, 3.0, "01", "01"), (7, -1.0, "01"), (7, 3.0, "01"), truncated=[0, 1]), AGGREGATIONS["token-mean"])
    close(shape_rewards(batch, EstimatorConfig(truncated_reward=truncated_reward), context_length=10), wanted)
    assert batch.raw_rewards.tolist() == [3, -1, 3]


def test_rewards_are_cut_after_the_penalty():
    """Reward 3, cut to [0, 2]. Overlong by 2: 3 - 2 = 1 (first cut it would be 2 - 2 = 0). Truncated, 0.5: 3/2 = 1.5 (first cut: 1).
    Alone the cut gives 2, and -3 becomes 0."""
    def shaped(reward=3.0, **options):
        batch = collate(rollouts_of((7, reward, "0001"), truncated=[0]), AGGREGATIONS["token-mean"])
        return shape_rewards(batch, EstimatorConfig(reward_clip=(0.0, 2.0), **options), context_length=4).tolist()
    assert shaped(overlong_buffer=2, overlong_penalty=2.0) == [1] and shaped(truncated_reward=0.5) == [1.5]
    assert shaped() == [2] and shaped(-3.0) == [0]


def test_estimators_read_the_shaped_rewards():
    """Whatever raw_rewards say, the advantages follow rollout_rewards: metrics keep the one, methods see the other."""
    batch = with_models(batch_of((7, 1.0, "01"), (7, 0.0, "011")))
    for name, cfg in EVERY:
        advantages = ESTIMATORS[name](batch, cfg)
        assert torch.equal(ESTIMATORS[name](dataclasses.replace(batch, raw_rewards=batch.raw_rewards * 9), cfg), advantages)


# ---------------------------------------------------------------------------------------------------- values
def test_gae_by_hand():
    """gamma = lambda = 1/2, reward 8 on the last of three sampled tokens (two segments, observed tokens between), V = 1, 2, 4.
    delta = 2/2 - 1, 4/2 - 2, 8 - 4 = 0, 0, 4; A = 0 + A_2/4, 0 + 4/4, 4 = 1/4, 1, 4; the critic learns A + V = 5/4, 3, 8."""
    batch, cfg = batch_of((7, 8.0, "0110", "001")), EstimatorConfig(gamma=0.5, gae_lambda=0.5, whiten=False)
    batch = dataclasses.replace(batch, values=on_tokens(batch, [[1.0, 2.0, 4.0]]))
    assert per_rollout(batch, ESTIMATORS["gae"](batch, cfg)) == [[0.25, 1, 4]]
    assert per_rollout(batch, value_targets(batch, cfg)) == [[1.25, 3, 8]]
    assert per_rollout(batch, value_targets(batch, dataclasses.replace(cfg, whiten=True))) == [[1.25, 3, 8]]   # targets are never whitened


@few
@given(some_rollouts, some_cfg)
def test_token_rewards_follow_their_definition(rollouts, cfg):
    """Oracle: the rollout's reward on its last sampled token, minus 1/2 (kl_scale) * coefficient * k1 or k3 on each, in Python floats."""
    batch = with_models(batch_of(*rollouts))
    pairs = zip(response(batch, batch.old_logprobs), response(batch, batch.ref_logprobs), strict=True)
    wanted = [[-0.5 * cfg.kl_reward_coef * (o - r if cfg.kl_reward_kind == "k1" else math.exp(r - o) - 1 + o - r) for o, r in zip(*pair)] for pair in pairs]
    for numbers, (_, reward, *_) in zip(wanted, rollouts):
        numbers[-1] += reward
    all_close(per_rollout(batch, token_rewards(batch, cfg)), wanted)


@few
@given(some_rollouts, some_cfg)
def test_gae_follows_its_recursion_over_a_rollouts_own_tokens(rollouts, cfg):
    """Oracle: the recursion in Python floats, backwards over the list of a rollout's sampled tokens, whatever was observed between."""
    batch, wanted = with_models(batch_of(*rollouts)), []
    paid, values = per_rollout(batch, token_rewards(batch, cfg)), response(batch, batch.values)
    for pair in zip(paid, values):
        following, advantage, backwards = 0.0, 0.0, []
        for r, v in list(zip(*pair))[::-1]:
            advantage = r + cfg.gamma * following - v + cfg.gamma * cfg.gae_lambda * advantage
            following = v
            backwards.append(advantage)
        wanted.append(backwards[::-1])
    all_close(per_rollout(batch, ESTIMATORS["gae"](batch, cfg)), wanted)
    all_close(per_rollout(batch, value_targets(batch, cfg)), [[a + v for a, v in zip(*pair)] for pair in zip(wanted, values)])


@few
@given(some_rollouts, some_cfg)
def test_the_ends_of_gae_are_returns_and_one_step_differences(rollouts, cfg):
    """lambda 1: return minus V, so the critic learns the return; lambda 0: r_t + gamma V_t+1 - V_t. With V = 0 and lambda 1 gae is reinforce."""
    batch, long, short = with_models(batch_of(*rollouts)), dataclasses.replace(cfg, gae_lambda=1.0), dataclasses.replace(cfg, gae_lambda=0.0)
    paid, values = per_rollout(batch, token_rewards(batch, cfg)), response(batch, batch.values)
    returns = [[sum(cfg.gamma**k * r for k, r in enumerate(x[t:])) for t in range(len(x))] for x in paid]
    all_close(per_rollout(batch, ESTIMATORS["gae"](batch, long)), [[g - v for g, v in zip(*pair)] for pair in zip(returns, values)])
    all_close(per_rollout(batch, value_targets(batch, long)), returns)
    all_close(per_rollout(batch, ESTIMATORS["gae"](batch, short)), [[r + cfg.gamma * n - v for r, v, n in zip(x, vs, [*vs[1:], 0])] for x, vs in zip(paid, values)])
    all_close(per_rollout(batch, ESTIMATORS["reinforce"](batch, cfg)), returns)
    all_close(per_rollout(batch, ESTIMATORS["gae"](dataclasses.replace(batch, values=torch.zeros_like(batch.values)), long)), returns)


# ---------------------------------------------------------------------------------------------------- advantages
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_statistics_are_those_of_the_prompt(name):
    """Case n03: rewards 1,0,0,0 of prompt p and 5,3,5,3 of q, interleaved; over the whole batch grpo would give -0.519121 first."""
    case = CASES["n03"]
    batch = batch_of(*((prompt, r, "011", "01") for prompt, r in zip(case["given"]["prompt"], case["given"]["rewards"], strict=True)))
    close(one_each(batch, name), case["expect"][name])


def test_flash_reinforce_has_one_baseline_for_the_batch_and_counts_rollouts():
    """Rewards 1 (three segments), 1, 1, 0 of four prompts: mean 3/4, so 1/4 thrice and -3/4. Over the rows it would be 5/6."""
    batch = batch_of((5, 1.0, "01", "011", "01"), (6, 1.0, "01"), (7, 1.0, "011"), (8, 0.0, "01"))
    assert one_each(batch, "flash_reinforce") == [0.25, 0.25, 0.25, -0.75]


def test_reinforce_baseline_whitens_what_dr_grpo_gives():
    """Rewards 1, 0 of one prompt and 4, 0 of another, one token each: 0.5, -0.5, 2, -2, mean 0, variance 2.125."""
    batch = batch_of((7, 1.0, "01"), (7, 0.0, "01"), (8, 4.0, "01"), (8, 0.0, "01"))
    close(one_each(batch, "reinforce_baseline", EstimatorConfig()), [x / 2.125**0.5 for x in (0.5, -0.5, 2, -2)])


def test_distillation_pays_what_the_teacher_likes_better():
    """log teacher - log student per token: -1 + 3 = 2, -2 + 0.5 = -1.5, whatever the rewards. Over samples of the student, p = (3/4, 1/4), the
    mean of -A is KL(p || q) = 3/4 ln(3/2) + 1/4 ln(1/2) = 0.130812 for a teacher q = (1/2, 1/2)."""
    batch = batch_of((7, 5.0, "01", "001"))
    batch = dataclasses.replace(batch, old_logprobs=on_tokens(batch, [[-3.0, -0.5]]), ref_logprobs=on_tokens(batch, [[-1.0, -2.0]]))
    assert per_rollout(batch, ESTIMATORS["on_policy_distill"](batch, EstimatorConfig())) == [[2, -1.5]]
    student, teacher = torch.tensor([[0.75, 0.25]]), torch.tensor([[0.5, 0.5]])
    each = dataclasses.replace(batch_of((7, 0.0, "11")), old_logprobs=student.log(), ref_logprobs=teacher.log())
    close((student * -ESTIMATORS["on_policy_distill"](each, EstimatorConfig())).sum(), 0.130812)


@pytest.mark.parametrize("name", BASELINES)
def test_a_lone_rollout_gets_no_advantage_but_rloos_own_reward(name):
    """Case n02: reward 0.6 alone. A mean over itself gives exactly 0; rloo has no others to average, so 0.6. Beside other prompts too."""
    expect = CASES["n02"]["expect"]["reinforce_baseline_before_whitening" if name == "reinforce_baseline" else name]
    lone = (7, CASES["n02"]["given"]["groups"][0][0], "011", "01")
    for others in [], [(8, 1.0, "01"), (8, 0.0, "01")]:
        seen = one_each(batch_of(lone, *others), name)[:1]
        close(seen, expect)
        assert name == "rloo" or seen == [0.0]


@pytest.mark.parametrize("name, cfg", [(n, c) for n, c in EVERY if n in BASELINES])
def test_equal_rewards_within_each_prompt_give_exactly_zero(name, cfg):
    """Case n01: groups of 1s, 0s and -0.5s differ among them, not within: no advantage, no NaN, whitened or not."""
    batch = batch_of(*((g, r, "011") for g, rewards in enumerate(CASES["n01"]["given"]["groups"]) for r in rewards))
    assert set(itertools.chain(*per_rollout(batch, ESTIMATORS[name](batch, cfg)))) == {0.0}


@few
@given(st.floats(-1e6, 1e6), st.integers(2, 7))
@example(0.1, 3)
def test_equal_rewards_give_exactly_zero_whatever_they_are(reward, size):
    """0.1 + 0.1 + 0.1 over 3 is not 0.1 in binary: a mean taken carelessly leaves 1e-17, which a deviation of 0 blows up."""
    batch = batch_of(*[(7, reward, "011")] * size)
    for name in BASELINES + ["flash_reinforce"]:
        assert set(one_each(batch, name)) == {0.0}
    assert set(one_each(batch, "reinforce", EstimatorConfig())) == {0.0}


def test_grpo_does_not_blow_up_a_deviation_near_0():
    """Rewards 0 and 1e-6: sample deviation 0.707e-6, and 1e-6 is added to it: A = 0.5e-6 / 1.707e-6 = 0.292893, not 0.707107."""
    close(one_each(batch_of((7, 0.0, "01"), (7, 1e-6, "01")), "grpo"), [-0.292893, 0.292893])


@few
@given(some_rollouts)
def test_advantages_follow_their_definition(rollouts):
    """Oracle: Python's statistics over the rewards of each prompt (of the batch for flash_reinforce), rollout by rollout."""
    batch, wanted = batch_of(*rollouts), {name: [] for name in BASELINES + ["flash_reinforce", "reinforce"]}
    for i, (group, reward, *_) in enumerate(rollouts):
        peers = [r for g, r, *_ in rollouts if g == group]
        others = [r for k, (g, r, *_) in enumerate(rollouts) if g == group and k != i]
        centred = reward - statistics.fmean(peers)
        wanted["dr_grpo"].append(centred)
        wanted["reinforce_baseline"].append(centred)
        wanted["grpo"].append(centred / statistics.stdev(peers) if len(set(peers)) > 1 else 0.0)
        wanted["rloo"].append(reward - statistics.fmean(others) if others else reward)
        wanted["flash_reinforce"].append(reward - statistics.fmean(r for _, r, *_ in rollouts))
        wanted["reinforce"].append(reward)
    for name, values in wanted.items():
        close(one_each(batch, name), values)


# ---------------------------------------------------------------------------------------------------- the rows of ESTIMATORS
OTHERS = dict(gamma=0.5, gae_lambda=0.5, whiten=False, kl_reward_coef=0.1, kl_reward_kind="k3",      # a value other than the default for every field
              reward_clip=(0.0, 0.5), overlong_buffer=3, overlong_penalty=0.5, truncated_reward=0.5)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_row_says_what_its_method_reads(name):
    """Change one input at a time: the advantages change exactly where the row says so, and a method asks for no tensor that the row does not name."""
    method = ESTIMATORS[name]
    batch = with_models(batch_of((7, 1.0, "0110"), (7, 0.0, "01", "01"), (8, 5.0, "011")))
    usual = EstimatorConfig(kl_reward_coef=0.3 if "kl_reward_coef" in method.reads else 0.0)

    def changes(cfg=EstimatorConfig(), usual=EstimatorConfig(), **tensors):
        return not torch.equal(method(dataclasses.replace(batch, **tensors), cfg), method(batch, usual))
    assert set(OTHERS) == {field.name for field in dataclasses.fields(EstimatorConfig)}
    for field, other in OTHERS.items():
        assert changes(dataclasses.replace(usual, **{field: other}), usual) == (field in method.reads), field
    assert changes(rollout_rewards=batch.rollout_rewards.flip(0)) == method.rewards
    assert changes(rollout_group=torch.tensor([0, 1, 1])) == method.groups
    assert changes(values=batch.values * 2) == method.critic
    assert changes(ref_logprobs=batch.ref_logprobs * 2) == method.teacher
    assert changes(old_logprobs=batch.old_logprobs * 2) == method.old
    assert not changes(**({} if method.critic else {"values": None}), **({} if method.teacher else {"ref_logprobs": None}), **({} if method.old else {"old_logprobs": None}))


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_a_field_that_was_set_is_read_or_listed(name):
    """Every field by itself, and all at once in their order. What shapes rewards is read by whoever reads rewards: all but on_policy_distill."""
    method = ESTIMATORS[name]
    shaping = () if name == "on_policy_distill" else ("reward_clip", "overlong_buffer", "overlong_penalty", "truncated_reward")
    assert method.unread(EstimatorConfig()) == []
    for field, other in OTHERS.items():
        assert method.unread(EstimatorConfig(**{field: other})) == ([] if field in (*method.reads, *shaping) else [field])
    together = EstimatorConfig(**{field: other for field, other in OTHERS.items() if field != "truncated_reward"})     # it is refused beside overlong_buffer
    assert method.unread(together) == [field for field in OTHERS if field not in (*method.reads, *shaping, "truncated_reward")]


@pytest.mark.parametrize("bad, words", [
    ({"gamma": 1.1}, "--gamma 1.1"), ({"gamma": -0.1}, "--gamma -0.1"), ({"gae_lambda": 1.1}, "--gae-lambda 1.1"), ({"gae_lambda": math.nan}, "--gae-lambda nan"),
    ({"reward_clip": (1.0, 1.0)}, "--reward-clip 1.0 1.0"), ({"reward_clip": (1.0, 0.0)}, "--reward-clip"), ({"overlong_buffer": -1}, "--overlong-buffer -1"),
    ({"overlong_penalty": -0.5}, "--overlong-penalty -0.5"), ({"truncated_reward": 1.5}, "--truncated-reward 1.5"), ({"truncated_reward": math.nan}, "--truncated-reward"),
    ({"overlong_buffer": 4, "truncated_reward": 0.0}, "--overlong-buffer and --truncated-reward"),
])
def test_settings_that_make_no_sense_are_refused_with_their_flags(bad, words):
    with pytest.raises(ValueError, match=words):
        EstimatorConfig(**bad)


def test_the_ends_of_each_range_are_accepted():
    for field, ends in dict(gamma=(0, 1), gae_lambda=(0, 1), truncated_reward=(-9, 0, 1), overlong_buffer=(0,), overlong_penalty=(0,)).items():
        assert all(getattr(EstimatorConfig(**{field: end}), field) == end for end in ends)


# ---------------------------------------------------------------------------------------------------- laws
@pytest.mark.parametrize("name, cfg", [(n, c) for n, c in EVERY if n != "flash_reinforce" and not (n in WHITENED and c.whiten)])
@few
@given(some_rollouts, st.integers(-8, 8))
def test_one_prompt_does_not_leak_into_another(name, cfg, rollouts, reward):
    """Change every reward, logprob and value of group 0: the other groups' advantages stay bit for bit. (Whitening and flash_reinforce are over the batch.)"""
    before = with_models(batch_of(*rollouts))
    after = batch_of(*((g, float(reward * i) if g == 0 else r, *m) for i, (g, r, *m) in enumerate(rollouts)))
    theirs = torch.tensor([rollouts[i][0] == 0 for i in after.rollout])[:, None]                # [B, 1]
    after = dataclasses.replace(before, rollout_rewards=after.rollout_rewards, **{
        field: torch.where(theirs, getattr(before, field) * 7, getattr(before, field)) for field in ("old_logprobs", "ref_logprobs", "values")})
    for (group, *_), *pair in zip(rollouts, *(per_rollout(batch, ESTIMATORS[name](batch, cfg)) for batch in (before, after))):
        assert group == 0 or pair[0] == pair[1]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@few
@given(some_rollouts, st.builds(random.Random, st.integers(0, 99)))
def test_the_order_of_rows_and_rollouts_does_not_matter(name, rollouts, random):
    """Shuffle the rows of the batch, or the rollouts before collate: every token keeps its advantage."""
    batch = with_models(batch_of(*rollouts))
    rows = random.sample(range(len(batch.rollout)), len(batch.rollout))
    by_row = (*PER_TOKEN, "lengths", "rollout", "position", "minibatch")
    shuffled = dataclasses.replace(batch, **{field: getattr(batch, field)[rows] for field in by_row})
    order = random.sample(range(len(rollouts)), len(rollouts))
    again = with_models(batch_of(*(rollouts[i] for i in order)), order)
    for cfg in SETTINGS[name]:
        advantages = ESTIMATORS[name](batch, cfg)
        close(ESTIMATORS[name](shuffled, cfg), advantages[rows])
        seen = per_rollout(batch, advantages)
        all_close(per_rollout(again, ESTIMATORS[name](again, cfg)), [seen[i] for i in order])


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@few
@given(some_rollouts, st.data())
def test_where_a_rollout_is_cut_into_segments_does_not_matter(name, rollouts, data):
    """"01101" and "011" + "01" are the same rollout: a segment's end is not the end of the episode."""
    joined, cut = [], []
    for group, reward, *masks in rollouts:
        whole = "".join(masks)
        places = sorted(data.draw(st.sets(st.integers(1, max(1, len(whole) - 1)), max_size=3)))
        joined.append((group, reward, whole))
        cut.append((group, reward, *(whole[a:b] for a, b in zip([0, *places], [*places, len(whole)]) if whole[a:b])))
    one, many = with_models(batch_of(*joined)), with_models(batch_of(*cut))
    for cfg in SETTINGS[name]:
        all_close(per_rollout(one, ESTIMATORS[name](one, cfg)), per_rollout(many, ESTIMATORS[name](many, cfg)))


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@few
@given(some_rollouts)
def test_padding_and_observed_tokens_are_never_read(name, rollouts):
    """Two columns more, and NaN wherever nothing was sampled (1e30 for value targets): the advantages stay, and are 0 there."""
    batch = with_models(batch_of(*rollouts))
    wide = dataclasses.replace(batch, **{field: torch.nn.functional.pad(getattr(batch, field), (0, 2)) for field in PER_TOKEN})
    wide = with_models(wide, elsewhere=math.nan)
    for cfg in SETTINGS[name]:
        assert torch.equal(ESTIMATORS[name](wide, cfg), torch.nn.functional.pad(ESTIMATORS[name](batch, cfg), (0, 2)))
        if ESTIMATORS[name].critic:
            assert torch.equal(value_targets(with_models(wide, elsewhere=1e30), cfg), torch.nn.functional.pad(value_targets(batch, cfg), (0, 2)))


def moved(batch: Batch, by) -> Batch:
    """The batch with every rollout's reward r made by(r)."""
    return dataclasses.replace(batch, rollout_rewards=by(batch.rollout_rewards))


@few
@given(some_rollouts, st.integers(-16, 16).map(lambda n: n / 4))
def test_a_shift_of_the_rewards_changes_nothing_where_there_is_a_baseline(rollouts, shift):
    """r + c has the mean + c. Undiscounted returns move by c on every token, so reinforce and gae do, unless whitened; so does rloo alone.
    Distillation reads no rewards."""
    alone = [sum(g == group for group, *_ in rollouts) == 1 for g, *_ in rollouts]
    batch = with_models(batch_of(*rollouts))
    for name, cfg in itertools.product(ESTIMATORS, (EstimatorConfig(), PLAIN)):
        before, after = (per_rollout(x, ESTIMATORS[name](x, cfg)) for x in (batch, moved(batch, lambda r: r + shift)))
        moves = [name == "rloo" and lone or name in ("reinforce", "gae") and not cfg.whiten for lone in alone]
        all_close(after, [[a + shift * move for a in numbers] for numbers, move in zip(before, moves)])


@pytest.mark.parametrize("name, cfg", [(n, c) for n, c in EVERY if not c.kl_reward_coef])
@few
@given(some_rollouts, st.sampled_from([0.5, 2.0, 16.0, -2.0]))
def test_a_scale_of_the_rewards_goes_through_but_not_through_a_deviation(name, cfg, rollouts, scale):
    """c r has the mean c m and the deviation |c| s: grpo and whatever is whitened keep all but the sign of c, the others are linear (gae in r and V
    together), and distillation reads no rewards."""
    before = with_models(batch_of(*rollouts))
    after = dataclasses.replace(moved(before, lambda r: r * scale), values=before.values * scale)
    factor = 1 if name == "on_policy_distill" else math.copysign(1, scale) if name == "grpo" or (name in WHITENED and cfg.whiten) else scale
    close(ESTIMATORS[name](after, cfg), ESTIMATORS[name](before, cfg) * factor, atol=1e-4)


@few
@given(some_rollouts)
def test_nothing_is_written_into_the_batch_or_the_trajectories(rollouts):
    """Bit for bit the same before and after; the results share no memory with the batch."""
    trajectories = rollouts_of(*rollouts)
    kept = copy.deepcopy(trajectories)
    batch = with_models(collate(trajectories, AGGREGATIONS["seq-mean-token-mean"]))
    before = copy.deepcopy(batch)
    for name, cfg in EVERY:
        ESTIMATORS[name](batch, cfg).fill_(77)
        value_targets(batch, cfg).fill_(77)
    shape_rewards(batch, EstimatorConfig(overlong_buffer=1, reward_clip=(0.0, 1.0)), context_length=2).fill_(77)
    for field in dataclasses.fields(Batch):
        torch.testing.assert_close(getattr(batch, field.name), getattr(before, field.name), rtol=0, atol=0)
    for seen, wanted in zip(itertools.chain(*trajectories), itertools.chain(*kept), strict=True):
        for field in dataclasses.fields(Trajectory):
            assert str(getattr(seen, field.name)) == str(getattr(wanted, field.name))
