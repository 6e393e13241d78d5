"""Tests of estimators.py: what collate keeps, and advantages by hand, by brute force and by the laws they obey.

A rollout is written (group, reward, *segments), a segment as its response mask: (7, 1.0, "0011", "01") has two segments
in which the policy sampled three tokens.
"""

import copy
import dataclasses
import itertools
import json
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent import Trajectory
from estimators import ESTIMATORS, Batch, EstimatorConfig, collate, discounted_returns, final_rewards, whiten
from losses import AGGREGATIONS

CASES = {case["id"].split("-")[0]: case for case in json.loads((Path(__file__).parent / "cases.json").read_text())}
PLAIN = EstimatorConfig(whiten=False)
BASELINES = sorted(name for name, method in ESTIMATORS.items() if method.groups)
DISCOUNTED = ("reinforce", EstimatorConfig(gamma=0.5, whiten=False))          # the one whose tokens differ within a rollout
EVERY = [(name, EstimatorConfig(whiten=w)) for name in sorted(ESTIMATORS) for w in (False, True)]
few = settings(max_examples=50, deadline=None, derandomize=True, database=None)


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


def per_rollout(batch: Batch, per_token: torch.Tensor) -> list[list[float]]:
    """The response tokens' values of each rollout in time order; whatever lies elsewhere must be exactly 0."""
    assert (per_token[~batch.response_mask] == 0).all() and per_token.isfinite().all()
    out = [[] for _ in batch.rollout_rewards]
    for row, rollout in enumerate(batch.rollout):      # collate keeps a rollout's segments in time order
        out[rollout] += per_token[row][batch.response_mask[row]].tolist()
    return out


def one_each(batch: Batch, name: str, cfg=PLAIN) -> list[float]:
    """The one advantage of each rollout, where all its response tokens share it."""
    values = per_rollout(batch, ESTIMATORS[name](batch, cfg))
    assert all(len(set(v)) == 1 for v in values)
    return [v[0] for v in values]


def close(seen, wanted):
    torch.testing.assert_close(torch.as_tensor(seen, dtype=torch.float64), torch.as_tensor(wanted, dtype=torch.float64), rtol=0, atol=1e-5)


masks = st.text("01", min_size=1, max_size=5)
some_rollouts = st.lists(
    st.tuples(st.integers(0, 2), st.integers(-8, 8).map(float), st.lists(masks, min_size=1, max_size=3)).filter(lambda r: "1" in "".join(r[2])),
    min_size=1, max_size=6).map(lambda rollouts: [(group, reward, *masks) for group, reward, masks in rollouts])


# ---------------------------------------------------------------------------------------------------- collate
def test_rows_keep_what_the_trajectories_hold_and_padding_is_by_length():
    """A rollout of one segment and one of two; beyond its length a row has id 0, mask False, logprob 0 and version -1."""
    batch = batch_of((9, 2.0, "0101"), (7, 1.0, "011", "01"))
    assert batch.token_ids.tolist() == [[10, 11, 12, 13], [10, 11, 12, 0], [10, 11, 0, 0]]
    assert batch.response_mask.int().tolist() == [[0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 0, 0]]
    assert batch.behaviour_logprobs.tolist() == [[0, -0.125, 0, -0.375], [0, -0.125, -0.25, 0], [0, -0.125, 0, 0]]
    assert batch.policy_versions.tolist() == [[-1, 1, -1, 3], [-1, 1, 2, -1], [-1, 1, -1, -1]]
    assert (batch.lengths.tolist(), batch.rollout.tolist(), batch.position.tolist()) == ([4, 3, 2], [0, 1, 1], [0, 0, 1])
    assert (batch.rollout_rewards.tolist(), batch.rollout_group.tolist()) == ([2.0, 1.0], [0, 1])


def test_a_sampled_end_token_is_no_padding_even_where_padding_has_its_id():
    """Case n19 a with the id that collate pads by (0) as the end token: [5, 6, 7, end] in a batch of width 6 has length 4, attention 111100."""
    row, wide = Trajectory(0, 0, reward=1.0), segment(1, 0, 1.0, "000001")
    row.extend(CASES["n19"]["given"]["a"]["prompt"])
    row.extend([7, 0], [-0.1, -0.2], [0, 0])
    batch, expect = collate([[row], [wide]], AGGREGATIONS["token-mean"]), CASES["n19"]["expect"]["a"]
    assert batch.token_ids[0].tolist() == [5, 6, 7, 0, 0, 0]
    assert (torch.arange(6) < batch.lengths[0]).int().tolist() == expect["attention"]
    assert batch.response_mask[0].int().tolist() == expect["action_mask"]


def test_a_rollout_counts_once_however_many_segments_it_has():
    """Case n04: rows 1, 4, 1, 2 for rewards 1, 0, 0, 1 give four rewards of mean 0.5 (over rows it would be 0.375)."""
    given_, expect = CASES["n04"]["given"], CASES["n04"]["expect"]
    batch = batch_of(*((7, r, *["01"] * rows) for r, rows in zip(given_["rewards"], given_["rows_per_rollout"], strict=True)))
    assert len(batch.rollout_rewards) == expect["rollouts_present"]
    assert batch.rollout_rewards.mean() == expect["mean_reward_metric"]
    rows = ESTIMATORS["grpo"](batch, PLAIN)[:, 1]                                               # [B]
    close(rows, [a for a, n in zip(expect["advantage_per_rollout"], given_["rows_per_rollout"]) for _ in range(n)])


def test_a_rollout_without_a_reward_is_refused():
    """Case n05: None is never taken as 0; the message names the rollout (number 101)."""
    with pytest.raises(ValueError, match="Rollout 101"):
        batch_of(*((7, r, "01") for r in CASES["n05"]["given"]["group"]))


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
    assert per_rollout(batch, discounted_returns(batch, landed, gamma=1.0)) == [e["returns_on_action_tokens"] for e in expect]


def test_kl_as_a_reward_is_paid_token_by_token():
    """Case n06, fourth row: 1 - 0.5 * (0.1 per token still to come) = 0.8, 0.85, 0.9, 0.95; the 9s on observed tokens do not count."""
    row, expect = CASES["n06"]["given"]["rows"][3], CASES["n06"]["expect"]["rows"][3]
    batch = batch_of((7, row["reward"], "".join(map(str, row["action_mask"]))))
    batch = dataclasses.replace(batch, old_logprobs=torch.tensor([row["kl"]]) - 2, ref_logprobs=torch.full((1, 7), -2.0))
    advantages = ESTIMATORS["reinforce"](batch, EstimatorConfig(whiten=False, kl_reward_coef=row["kl_coef"]))
    close(per_rollout(batch, advantages), [expect["returns_on_action_tokens"]])


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
    seen = per_rollout(batch, discounted_returns(batch, rewards, gamma))
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


@few
@given(some_rollouts)
def test_whitened_advantages_have_mean_0_and_variance_1_over_response_tokens(rollouts):
    """Over the tokens of the batch, unless all are equal; the law of reinforce and reinforce_baseline."""
    batch = batch_of(*rollouts)
    for name in ("reinforce", "reinforce_baseline"):
        plain = ESTIMATORS[name](batch, PLAIN)[batch.response_mask]
        values = ESTIMATORS[name](batch, EstimatorConfig())[batch.response_mask].double()
        close(values.mean(), 0.0)
        close(values.var(unbiased=False), float(plain.min() != plain.max()))


# ---------------------------------------------------------------------------------------------------- advantages
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_statistics_are_those_of_the_prompt(name):
    """Case n03: rewards 1,0,0,0 of prompt p and 5,3,5,3 of q, interleaved; over the whole batch grpo would give -0.519121 first."""
    case = CASES["n03"]
    batch = batch_of(*((prompt, r, "011", "01") for prompt, r in zip(case["given"]["prompt"], case["given"]["rewards"], strict=True)))
    close(one_each(batch, name), case["expect"][name])


def test_reinforce_baseline_whitens_what_dr_grpo_gives():
    """Rewards 1, 0 of one prompt and 4, 0 of another, one token each: 0.5, -0.5, 2, -2, mean 0, variance 2.125."""
    batch = batch_of((7, 1.0, "01"), (7, 0.0, "01"), (8, 4.0, "01"), (8, 0.0, "01"))
    close(one_each(batch, "reinforce_baseline", EstimatorConfig()), [x / 2.125**0.5 for x in (0.5, -0.5, 2, -2)])


@pytest.mark.parametrize("name", BASELINES)
def test_a_lone_rollout_gets_no_advantage_but_rloos_own_reward(name):
    """Case n02: reward 0.6 alone. A mean over itself gives exactly 0; rloo has no others to average, so 0.6."""
    batch, expect = batch_of((7, CASES["n02"]["given"]["groups"][0][0], "011")), CASES["n02"]["expect"]
    seen = one_each(batch, name)
    close(seen, expect["reinforce_baseline_before_whitening" if name == "reinforce_baseline" else name])
    assert name == "rloo" or seen == [0.0]


@pytest.mark.parametrize("name, cfg", [(n, c) for n, c in EVERY if n in BASELINES])
def test_equal_rewards_within_each_prompt_give_exactly_zero(name, cfg):
    """Case n01: groups of 1s, 0s and -0.5s differ among them, not within: no advantage, no NaN, whitened or not."""
    batch = batch_of(*((g, r, "011") for g, rewards in enumerate(CASES["n01"]["given"]["groups"]) for r in rewards))
    assert set(itertools.chain(*per_rollout(batch, ESTIMATORS[name](batch, cfg)))) == {0.0}


@few
@given(st.floats(-1e6, 1e6), st.integers(2, 7))
def test_equal_rewards_give_exactly_zero_whatever_they_are(reward, size):
    """0.1 + 0.1 + 0.1 over 3 is not 0.1 in binary: a mean taken carelessly leaves 1e-17, which a deviation of 0 blows up."""
    batch = batch_of(*[(7, reward, "011")] * size)
    for name in BASELINES:
        assert set(one_each(batch, name)) == {0.0}
    assert set(one_each(batch, "reinforce", EstimatorConfig())) == {0.0}


@few
@given(some_rollouts)
def test_advantages_follow_their_definition(rollouts):
    """Oracle: Python's statistics over the rewards of each prompt, rollout by rollout."""
    batch, wanted = batch_of(*rollouts), {name: [] for name in BASELINES + ["reinforce"]}
    for i, (group, reward, *_) in enumerate(rollouts):
        peers = [r for g, r, *_ in rollouts if g == group]
        others = [r for k, (g, r, *_) in enumerate(rollouts) if g == group and k != i]
        centred = reward - statistics.fmean(peers)
        wanted["dr_grpo"].append(centred)
        wanted["reinforce_baseline"].append(centred)
        wanted["grpo"].append(centred / statistics.stdev(peers) if len(set(peers)) > 1 else 0.0)
        wanted["rloo"].append(reward - statistics.fmean(others) if others else reward)
        wanted["reinforce"].append(reward)
    for name, values in wanted.items():
        close(one_each(batch, name), values)


# ---------------------------------------------------------------------------------------------------- laws
@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@few
@given(some_rollouts, st.integers(-8, 8))
def test_rewards_of_one_prompt_do_not_leak_into_another(name, rollouts, reward):
    """Change every reward of group 0: before whitening, the other groups' advantages stay bit for bit."""
    before = one_each(batch_of(*rollouts), name)
    after = one_each(batch_of(*((g, float(reward * i) if g == 0 else r, *m) for i, (g, r, *m) in enumerate(rollouts))), name)
    assert [a for a, (g, *_) in zip(before, rollouts) if g] == [a for a, (g, *_) in zip(after, rollouts) if g]


@pytest.mark.parametrize("name, cfg", EVERY + [DISCOUNTED])
@few
@given(some_rollouts, st.randoms(use_true_random=False))
def test_the_order_of_rows_and_rollouts_does_not_matter(name, cfg, rollouts, random):
    """Shuffle the rows of the batch, or the rollouts before collate: every token keeps its advantage."""
    batch = batch_of(*rollouts)
    advantages = ESTIMATORS[name](batch, cfg)
    rows = random.sample(range(len(batch.rollout)), len(batch.rollout))
    by_row = ("token_ids", "response_mask", "behaviour_logprobs", "policy_versions", "lengths", "rollout", "position", "loss_weight", "minibatch")
    shuffled = dataclasses.replace(batch, **{field: getattr(batch, field)[rows] for field in by_row})
    close(ESTIMATORS[name](shuffled, cfg), advantages[rows])
    order = random.sample(range(len(rollouts)), len(rollouts))
    again = batch_of(*(rollouts[i] for i in order))
    for i, values in zip(order, per_rollout(again, ESTIMATORS[name](again, cfg)), strict=True):
        close(values, per_rollout(batch, advantages)[i])


@pytest.mark.parametrize("name, cfg", EVERY + [DISCOUNTED])
@few
@given(some_rollouts, st.data())
def test_where_a_rollout_is_cut_into_segments_does_not_matter(name, cfg, rollouts, data):
    """"01101" and "011" + "01" are the same rollout: a segment's end is not the end of the episode."""
    joined, cut = [], []
    for group, reward, *masks in rollouts:
        whole = "".join(masks)
        places = sorted(data.draw(st.sets(st.integers(1, max(1, len(whole) - 1)), max_size=3)))
        joined.append((group, reward, whole))
        cut.append((group, reward, *(whole[a:b] for a, b in zip([0, *places], [*places, len(whole)]) if whole[a:b])))
    one, many = batch_of(*joined), batch_of(*cut)
    for a, b in zip(per_rollout(one, ESTIMATORS[name](one, cfg)), per_rollout(many, ESTIMATORS[name](many, cfg)), strict=True):
        close(a, b)


@few
@given(some_rollouts.filter(lambda rollouts: len({g for g, *_ in rollouts}) < len(rollouts)), st.integers(-16, 16).map(lambda n: n / 4))
def test_a_shift_changes_nothing_where_there_is_a_baseline(rollouts, shift):
    """r + c has the mean + c. Alone, rloo has no baseline and shifts; reinforce shifts always."""
    alone = [sum(g == group for group, *_ in rollouts) == 1 for g, *_ in rollouts]
    for name in ESTIMATORS:
        before = one_each(batch_of(*rollouts), name)
        after = one_each(batch_of(*((g, r + shift, *m) for g, r, *m in rollouts)), name)
        moves = [name == "reinforce" or (name == "rloo" and lone) for lone in alone]
        close(after, [a + shift * move for a, move in zip(before, moves)])


@few
@given(some_rollouts, st.sampled_from([0.5, 2.0, 16.0]))
def test_a_scale_goes_through_but_not_through_a_deviation(rollouts, scale):
    """c r has the mean and the deviation times c: grpo and whatever is whitened stay, the others are multiplied."""
    for name, cfg in EVERY:
        stays = name == "grpo" or (cfg.whiten and name in ("reinforce", "reinforce_baseline"))
        before, after = batch_of(*rollouts), batch_of(*((g, r * scale, *m) for g, r, *m in rollouts))
        close(ESTIMATORS[name](after, cfg), ESTIMATORS[name](before, cfg) * (1 if stays else scale))


@few
@given(some_rollouts)
def test_nothing_is_written_into_the_batch_or_the_trajectories(rollouts):
    """Bit for bit the same before and after; the result shares no memory with the batch."""
    trajectories = rollouts_of(*rollouts)
    kept = copy.deepcopy(trajectories)
    batch = collate(trajectories, AGGREGATIONS["seq-mean-token-mean"])
    logprobs = torch.linspace(-1, 0, batch.response_mask.numel()).view(batch.response_mask.shape)
    batch = dataclasses.replace(batch, old_logprobs=logprobs, ref_logprobs=logprobs.flip(0) - 1)
    before = copy.deepcopy(batch)
    for name, method in ESTIMATORS.items():
        method(batch, EstimatorConfig(kl_reward_coef=0.1 if method.kl_reward else 0.0)).fill_(77)
    for field in dataclasses.fields(Batch):
        torch.testing.assert_close(getattr(batch, field.name), getattr(before, field.name), rtol=0, atol=0)
    for seen, wanted in zip(itertools.chain(*trajectories), itertools.chain(*kept), strict=True):
        for field in dataclasses.fields(Trajectory):
            assert str(getattr(seen, field.name)) == str(getattr(wanted, field.name))
