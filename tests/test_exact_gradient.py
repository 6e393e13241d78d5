"""What recipes/exact_gradient.py shows, as facts about estimators.py and losses.py: which gradients are exact, which are not, by how much.

Every number is an expectation over all batches, so nothing here is sampled but where it says so. Biases and standard
deviations are relative to the size of the exact gradient.
"""

import dataclasses
import functools
import itertools
import math
import statistics

import pytest
import torch

from agent import Trajectory
from estimators import ESTIMATORS, EstimatorConfig, collate
from losses import AGGREGATIONS, LossConfig, step_loss
from recipes.exact_gradient import (
    CORRECTIONS, EXACT, PLAIN, TARGETS, Config, Policies, Result, Row, World, all_rows, chosen_rows, corrected, float64, gradients, main, make_settings,
    measure, reward_gradient, token_kl_gradient)

WHITENED = EstimatorConfig(whiten=True)


@pytest.fixture(autouse=True)
def double():
    with float64():
        yield


@functools.cache
def settings(group_size=3, horizon=2):
    """3 tokens: 7 trajectories of 1 or 2 tokens, 84 multisets of 3; and 8 trajectories of one token."""
    return make_settings(Config(horizon=horizon, group_size=group_size))


def result(row: Row, **size) -> Result:
    return measure(*settings(**size)[row.setting], row)


def mean(row: Row, **size) -> torch.Tensor:
    """E g, [S * V]."""
    world, policies = settings(**size)[row.setting]
    return world.law(policies.behaviour) @ gradients(world, policies, row)


def row(estimator="rloo", cfg=PLAIN, loss=EXACT, **fields) -> Row:
    return Row("", "", estimator, cfg, loss, **fields)


def exact(**flags) -> LossConfig:
    return dataclasses.replace(EXACT, **flags)


def close(seen, wanted, atol=1e-10):
    torch.testing.assert_close(torch.as_tensor(seen), torch.as_tensor(wanted), rtol=0, atol=atol)


def scores(world: World, theta: torch.Tensor) -> torch.Tensor:
    """grad log p of every token of every trajectory by the formula: one-hot(action) - pi at its state. [N, T, S, V]"""
    out = torch.zeros(*world.mask.shape, *world.shape)
    for n, t in world.mask.nonzero().tolist():
        out[n, t, world.states[n, t]] = -theta.softmax(-1)[world.states[n, t]]
        out[n, t, world.states[n, t], world.tokens[n, t]] += 1
    return out


# ---------------------------------------------------------------------------------------------------- the enumeration
def step_gradient(world: World, policies: Policies, row: Row, members) -> torch.Tensor:
    """g of one ordered batch with nothing shared: its own collate, and autograd from step_loss to the table of logits. [S * V]"""
    tables = [world.logprobs(x) for x in (policies.old, policies.ref, policies.behaviour)]
    rollouts = []
    for i, n in enumerate(members):
        trajectory, tokens = Trajectory(10 + i, 4, reward=float(world.rewards[n])), world.tokens[n][world.mask[n]].tolist()
        trajectory.extend([0])
        trajectory.extend(tokens, [0.0] * len(tokens), [0] * len(tokens))
        rollouts.append([trajectory])
    batch = collate(rollouts, AGGREGATIONS[row.loss.aggregation])
    old, ref, mu = (table[list(members), : batch.token_ids.shape[1]] for table in tables)
    batch = dataclasses.replace(batch, old_logprobs=old, ref_logprobs=ref, behaviour_logprobs=mu)
    batch = dataclasses.replace(batch, advantages=ESTIMATORS[row.estimator](batch, row.cfg))
    theta = policies.current.clone().requires_grad_()
    loss, _ = step_loss(world.logprobs(theta)[list(members), : batch.token_ids.shape[1]], None, batch, row.loss, row.loss.loss)
    return -torch.autograd.grad(loss, theta)[0].flatten()


@pytest.mark.parametrize("row", [
    row("grpo", loss=exact(loss="ppo", aggregation="token-mean"), setting="moved"),
    row("reinforce", WHITENED, corrected("token trunc (TIS)", aggregation="seq-mean-token-mean"), setting="stale"),
    row("rloo", PLAIN, corrected("seq mask", loss="gspo", kl_coef=0.3, kl_kind="k3"), setting="stale"),
], ids=["grpo-ppo-moved", "whitened-TIS", "gspo-seq-mask-kl"])
def test_multisets_stand_for_all_ordered_batches(row):
    """7^2 ordered pairs: each has the gradient of its multiset, and the multiset the probability of its pairs together."""
    world, policies = settings(group_size=2)[row.setting]
    g, law = gradients(world, policies, row), world.law(policies.behaviour)
    p = [float(world.logprobs(policies.behaviour)[n].sum().exp()) for n in range(7)]
    place, probability = {tuple(chosen): m for m, chosen in enumerate(world.chosen.tolist())}, [0.0] * len(law)
    for pair in itertools.product(range(7), repeat=2):
        m = place[tuple(sorted(pair))]
        probability[m] += p[pair[0]] * p[pair[1]]
        close(step_gradient(world, policies, row, pair), g[m])
    close(probability, law)
    close(law.sum(), 1.0)


def test_multisets_of_three_have_1_3_or_6_orders():
    """aaa is one tuple, aab three, abc six: together 7^3; and (G, members) in any order give one gradient."""
    world, policies = settings()["on"]
    orders = [{1: 1, 2: 3, 3: 6}[len(set(chosen))] for chosen in world.chosen.tolist()]
    assert world.orders.tolist() == orders and sum(orders) == 7**3
    for members in ((0, 3, 5), (1, 6, 6)):
        g = gradients(world, policies, row("grpo"))[world.chosen.tolist().index(list(members))]
        for order in itertools.permutations(members):
            close(step_gradient(world, policies, row("grpo"), order), g)


def test_the_world_is_every_trajectory_once():
    """3 tokens, horizon 2: 0, then 1x and 2x for x in 0, 1, 2; probabilities add up to 1, rewards all differ."""
    world, policies = settings()["on"]
    assert [world.tokens[n][world.mask[n]].tolist() for n in range(7)] == [[0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]]
    close(world.logprobs(policies.current).sum(-1).exp().sum(), 1.0)
    assert len(set(world.rewards.tolist())) == 7
    with pytest.raises(ValueError, match="Lower --vocabulary"):
        World(5, 4, 4, 0)
    with pytest.raises(ValueError, match="--horizon 0"):
        Config(horizon=0)


def test_the_exact_gradient_is_that_of_a_recursion_over_states():
    """Second implementation: J = sum over a of pi(a|s) (r if the trajectory ends, else J of the next state), by finite differences."""
    world, policies = settings()["on"]
    rewards = {tuple(world.tokens[n][world.mask[n]].tolist()): float(world.rewards[n]) for n in range(7)}
    states = [(), (1,), (2,)]

    def expected(theta, prefix=()):
        weights = [math.exp(x) for x in theta[states.index(prefix)]]
        return sum(w / sum(weights) * (rewards[*prefix, a] if (*prefix, a) in rewards else expected(theta, (*prefix, a))) for a, w in enumerate(weights))

    seen, theta, h = reward_gradient(world, policies), policies.current.tolist(), 1e-5
    for s, v in itertools.product(range(3), range(3)):
        up, down = ([[x + d * ((i, j) == (s, v)) for j, x in enumerate(line)] for i, line in enumerate(theta)] for d in (h, -h))
        close(float(seen[s, v]), (expected(up) - expected(down)) / (2 * h), atol=1e-8)


def by_hand(advantages, token_weight) -> torch.Tensor:
    """E g written out over ordered triples: sum over rollouts i and their tokens of weight * A_i * (one-hot - pi). [S * V]"""
    world, policies = settings()["on"]
    score, p = scores(world, policies.current).sum(1).flatten(1), world.logprobs(policies.current).sum(-1).exp()
    lengths, total = world.mask.sum(-1).tolist(), 0
    for triple in itertools.product(range(7), repeat=3):
        a, n = advantages([float(world.rewards[i]) for i in triple], [lengths[i] for i in triple]), [lengths[i] for i in triple]
        total = total + p[list(triple)].prod() * sum(token_weight(n, k) * a[k] * score[i] for k, i in enumerate(triple))
    return total


def standardized(rewards, lengths):
    return [(r - statistics.fmean(rewards)) / (statistics.stdev(rewards) + 1e-6) for r in rewards]


def whitened(rewards, lengths):
    """Over tokens: a rollout of two tokens counts twice."""
    values = [r for r, n in zip(rewards, lengths) for _ in range(n)]
    return [(r - statistics.fmean(values)) / statistics.pstdev(values) if len(set(values)) > 1 else 0.0 for r in rewards]


@pytest.mark.parametrize("seen, advantages, token_weight", [
    (row("reinforce"), lambda r, n: r, lambda n, k: 1 / 3),
    (row("grpo"), standardized, lambda n, k: 1 / 3),
    (row("grpo", loss=LossConfig()), standardized, lambda n, k: 1 / sum(n)),
    (row("grpo", loss=exact(aggregation="seq-mean-token-mean")), standardized, lambda n, k: 1 / 3 / n[k]),
    (row("reinforce", WHITENED), whitened, lambda n, k: 1 / 3),
], ids=["reinforce", "grpo", "grpo-token-mean-ppo-TIS", "grpo-seq-mean-token-mean", "whitened"])
def test_expected_gradients_equal_those_written_out_by_hand(seen, advantages, token_weight):
    """Second implementation: Python's statistics and the formula of the softmax's gradient, over all 343 ordered triples."""
    close(mean(seen), by_hand(advantages, token_weight))


def test_the_four_columns_by_hand():
    """dr_grpo with G = 3 is 2/3 of the exact gradient: bias 1/3, cosine 1, scale 2/3. reinforce: variance of one rollout / 3, as rollouts are independent."""
    world, policies = settings()["on"]
    seen = result(row("dr_grpo"))
    close([seen.bias, seen.cosine, seen.scale], [1 / 3, 1.0, 2 / 3])
    one = world.rewards[:, None] * scores(world, policies.current).sum(1).flatten(1)           # [N, S * V]
    p, exact_gradient = world.logprobs(policies.current).sum(-1).exp(), reward_gradient(world, policies).flatten()
    close(result(row("reinforce")).std, ((p @ one.square().sum(-1) - exact_gradient.square().sum()) / 3).sqrt() / exact_gradient.norm())


# ---------------------------------------------------------------------------------------------------- estimators
@pytest.mark.parametrize("estimator", ["reinforce", "rloo"])
@pytest.mark.parametrize("size", [dict(group_size=2), dict(group_size=3), dict(horizon=3, group_size=2)], ids=str)
def test_reinforce_and_rloo_give_the_exact_gradient(estimator, size):
    """A baseline made of the other rollouts does not depend on this one's actions: no bias, and less variance."""
    assert result(row(estimator), **size).bias < 1e-10
    assert result(row("rloo"), **size).std < 0.6 * result(row("reinforce"), **size).std


@pytest.mark.parametrize("estimator", ["dr_grpo", "reinforce_baseline", "flash_reinforce"])
@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_a_mean_that_holds_the_rollout_itself_shrinks_the_gradient_by_1_over_G(estimator, group_size):
    """r_i - mean = (1 - 1/G) (r_i - mean of the others): exactly (1 - 1/G) of the exact gradient, direction and all."""
    world, policies = settings(group_size)["on"]
    close(mean(row(estimator), group_size=group_size), (1 - 1 / group_size) * reward_gradient(world, policies).flatten())


def test_flash_reinforce_over_one_prompt_is_dr_grpo():
    """The batch's mean is the prompt's: every single gradient agrees, so the variance does too."""
    close(gradients(*settings()["on"], row("flash_reinforce")), gradients(*settings()["on"], row("dr_grpo")))


BIASED = {                             # name -> (row, its bias, its 1 - cosine)
    "whitening": (row("reinforce", WHITENED), 1.487, 0.2345),
    "whitening behind a baseline": (row("reinforce_baseline", WHITENED), 1.487, 0.2345),
    "division by the group's std": (row("grpo"), 1.332, 0.1754),
    "token-mean": (row(loss=exact(aggregation="token-mean")), 0.384, 0.00045),
    "prompt-mean-token-mean": (row(loss=exact(aggregation="prompt-mean-token-mean")), 0.384, 0.00045),
    "seq-mean-token-mean": (row(loss=exact(aggregation="seq-mean-token-mean")), 0.477, 0.0098),
}


@pytest.mark.parametrize("name", BIASED)
def test_deviations_and_lengths_as_divisors_bias_the_gradient_in_size_and_direction(name):
    """Whitening 1.49, GRPO's std 1.33, token-mean's random denominator 0.38, the own length 0.48 of the exact gradient.

    Most of token-mean's bias is size: its angle is arccos(1 - 0.00045) = 1.7 degrees, against 40, 34 and 8 of the others.
    """
    row, bias, turned = BIASED[name]
    seen = result(row)
    assert seen.bias == pytest.approx(bias, abs=1e-3) and seen.bias > 0.3
    assert 1 - seen.cosine == pytest.approx(turned, abs=1e-4) and 1 - seen.cosine > 3e-4


def test_gae_is_unbiased_for_any_values_of_the_state_before_the_token():
    """lambda = gamma = 1: A_t = r - V(s_t). Values -3, 7 and 0.5 of the three states, or 1 in all; the exact ones have less variance."""
    odd = torch.tensor([-3.0, 7.0, 0.5])
    stds = {}
    for name, value in (("exact", None), ("one", 1.0), ("odd", odd)):
        seen = result(row("gae", value=value))
        stds[name] = seen.std
        assert seen.bias < 1e-10, name
    assert stds["exact"] < 0.5 * stds["one"] < stds["odd"]
    assert stds["exact"] < 0.2 * result(row("reinforce")).std


def test_gae_is_exact_with_the_exact_values_at_any_lambda_and_biased_with_wrong_ones_below_1():
    """lambda 0, exact V: A = E[r | s, a] - V(s), the least variance of all. V = 1: bias 2.30, the critic's error is not averaged out."""
    for lam in (0.0, 0.5):
        assert result(row("gae", dataclasses.replace(PLAIN, gae_lambda=lam))).bias < 1e-10
    assert result(row("gae", dataclasses.replace(PLAIN, gae_lambda=0.0))).std < result(row("gae")).std
    assert result(row("gae", dataclasses.replace(PLAIN, gae_lambda=0.0), value=1.0)).bias == pytest.approx(2.303, abs=1e-3)


# ---------------------------------------------------------------------------------------------------- policy losses
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_all_policy_losses_have_one_gradient_on_policy(aggregation):
    """pi = pi_old: every ratio is 1, nothing is clipped, and each batch's gradient is that of -A log pi; TIS and dual clip too."""
    world, policies = settings()["on"]
    wanted = gradients(world, policies, row("grpo", loss=exact(aggregation=aggregation)))
    for flags in (dict(loss="ppo"), dict(loss="gspo"), dict(loss="cispo"), dict(loss="ppo", dual_clip=3.0), dict(loss="ppo", mismatch_level="token")):
        close(gradients(world, policies, row("grpo", loss=exact(aggregation=aggregation, **flags))), wanted)


def test_losses_part_where_pi_has_left_pi_old():
    """Each two differ, by 0.03 (ppo, cispo) to 0.1 of the exact gradient; these two meet again where neither has a limit."""
    means = [mean(row(loss=exact(loss=name), setting="moved")) for name in ("reinforce", "ppo", "gspo", "cispo")]
    size = reward_gradient(*settings()["moved"]).norm()
    for a, b in itertools.combinations(means, 2):
        assert (a - b).norm() > 0.02 * size
    free = [exact(loss="ppo", clip_low=1 - 1e-9, clip_high=math.inf), exact(loss="cispo", cispo_ceiling=math.inf)]
    close(*(gradients(*settings()["moved"], row(loss=loss, setting="moved")) for loss in free))


def test_the_policy_ratio_is_the_exact_correction_of_one_token():
    """One token, mu = pi_old far from pi: sum of pi_old * pi/pi_old * ... = sum of pi * ... for cispo without a ceiling; ppo's clip is biased, and reinforce."""
    world, stale = settings()["one token"]
    moved = Policies(stale.behaviour, stale.old, stale.old, stale.ref)
    assert measure(world, moved, row(loss=exact(loss="cispo", cispo_ceiling=math.inf))).bias < 1e-10
    for name in ("ppo", "reinforce"):
        assert measure(world, moved, row(loss=exact(loss=name))).bias > 0.1


# ---------------------------------------------------------------------------------------------------- mismatch correction
def test_an_uncorrected_stale_policy_is_biased_and_the_unlimited_token_ratio_is_exact_for_one_token():
    """Bias 0.493 without correction; with it sum of mu * pi/mu * ... = sum of pi * ..., for twice the standard deviation (2.82, 1.40)."""
    off, free = (result(row(loss=corrected(name), setting="one token")) for name in ("off", "token, no limit"))
    assert off.bias == pytest.approx(0.493, abs=1e-3) and free.bias < 1e-10
    assert free.std > 2 * off.std


def test_truncation_and_masking_trade_variance_for_bias():
    """One token. No limit: bias 0, std 2.82. TIS: 0.349, 1.83. IcePop: 0.684, 1.33."""
    free, tis, icepop = (result(row(loss=corrected(name), setting="one token")) for name in ("token, no limit", "token trunc (TIS)", "token mask (IcePop)"))
    assert free.bias + 0.3 < tis.bias and tis.bias + 0.3 < icepop.bias
    assert free.std > tis.std + 0.9 and tis.std > icepop.std + 0.4


@pytest.mark.parametrize("name, weight", [
    ("off", lambda w: 1.0), ("token, no limit", lambda w: w), ("token trunc (TIS)", lambda w: w.clamp(max=2)), ("token clip", lambda w: w.clamp(0.5, 2)),
    ("token mask (IcePop)", lambda w: w * ((w >= 0.5) & (w <= 2)))])
@pytest.mark.parametrize("setting", ["one token", "stale"])
def test_a_token_correction_follows_its_formula(name, weight, setting):
    """Written out: sum of mu(tau) r(tau) * sum over t of weight(pi/mu at t) * (one-hot - pi). Prefix and later tokens stay mu's."""
    world, policies = settings(group_size=2, horizon=3)[setting]
    mu, pi = world.logprobs(policies.behaviour), world.logprobs(policies.current)              # [N, T]
    per_token = weight((pi - mu).exp()) * mu.sum(-1, keepdim=True).exp() * world.rewards[:, None] * world.mask
    seen = mean(row("reinforce", loss=corrected(name), setting=setting), group_size=2, horizon=3)
    close(seen, torch.einsum("nt,ntsv->sv", per_token, scores(world, policies.current)).flatten())


def test_over_trajectories_a_token_ratio_leaves_a_bias_and_limits_still_lower_the_variance():
    """Up to 3 tokens: bias 0.470 off and 0.257 without limits, for the ratios of the other tokens are left out; std 2.71, then 2.44 and 1.06."""
    names = ("off", "token, no limit", "token trunc (TIS)", "token mask (IcePop)")
    off, free, tis, icepop = (result(row(loss=corrected(name), setting="stale"), group_size=2, horizon=3) for name in names)
    assert off.bias > free.bias + 0.2 > 0.4
    assert free.std > tis.std + 0.1 and tis.std > icepop.std + 0.5


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_changes_nothing_on_policy(name):
    """mu = pi_old: every ratio is 1 and every divergence 0."""
    close(gradients(*settings()["on"], row(loss=corrected(name))), gradients(*settings()["on"], row()))


# ---------------------------------------------------------------------------------------------------- KL
def test_k1_as_a_loss_has_no_expected_gradient_and_k2_has_the_kls():
    """E[grad log pi] = 0, whatever ref is: noise of std 2.63 and nothing else. E[d grad log pi] = grad of sum of pi log(pi/ref)."""
    size = token_kl_gradient(*settings()["on"]).norm()
    k1, k2 = (result(row(only_kl=kind, target="- token KL")) for kind in ("k1", "k2"))
    assert mean(row(only_kl="k1")).norm() < 1e-10 * size and k1.std > 2
    assert k2.bias < 1e-10


def test_k3_as_a_loss_has_the_gradient_of_the_forward_kl():
    """E[(1 - ref/pi) grad log pi] = grad of KL(ref || pi) at the states that pi visits; 1.26 away from the reverse KL's."""
    world, policies = settings()["on"]
    theta = policies.current.clone().requires_grad_()
    forward = (policies.ref.softmax(-1) * (policies.ref.log_softmax(-1) - theta.log_softmax(-1))).sum(-1)
    close(mean(row(only_kl="k3")), -torch.autograd.grad((world.visits(policies.current) * forward).sum(), theta)[0].flatten())
    assert result(row(only_kl="k3", target="- token KL")).bias > 1


@pytest.mark.parametrize("kind", ["k2", "k3"])
def test_step_loss_adds_kl_coef_times_that_gradient(kind):
    close(mean(row(loss=exact(kl_coef=0.3, kl_kind=kind))) - mean(row()), 0.3 * mean(row(only_kl=kind)))


def test_k1_as_a_reward_follows_the_kl_of_whole_sequences_and_k3_does_not():
    """grad of E[r - 0.5 log(p/ref)] to 1e-10. k3 has the KL's mean as a reward, not its gradient: bias 1.05."""
    for kind, size in itertools.product(("k1", "k3"), (dict(), dict(horizon=3, group_size=2))):
        seen = result(row("reinforce", dataclasses.replace(PLAIN, kl_reward_coef=0.5, kl_reward_kind=kind), target="J - 0.5 KL"), **size)
        assert seen.bias < 1e-10 if kind == "k1" else seen.bias > 1


def test_distillation_follows_the_kl_of_its_tokens_not_that_of_whole_sequences():
    """-KL(pi || teacher) at each visited state, visits held fixed: exact. A token's effect on the KL of later states is left out (0.10)."""
    world, policies = settings()["on"]
    assert result(row("on_policy_distill", target="- token KL")).bias < 1e-10
    sequence = reward_gradient(world, policies, kl_coef=1.0) - reward_gradient(world, policies)
    assert (mean(row("on_policy_distill")) - sequence.flatten()).norm() > 0.09 * sequence.norm()
    close(mean(row("on_policy_distill")), mean(row(only_kl="k2")))


# ---------------------------------------------------------------------------------------------------- the program
def test_float64_ends_with_its_block_even_by_an_error():
    torch.set_default_dtype(torch.float32)
    with pytest.raises(KeyError):
        with float64():
            assert torch.zeros(1).dtype == torch.float64
            raise KeyError
    assert torch.get_default_dtype() == torch.float32


def test_rows_name_things_that_exist_once():
    """8 estimators and 3 of them whitened too, 4 losses, 4 aggregations, 11 corrections of a stale mu and 2 settings without."""
    for rows, count in ((list(chosen_rows()), 52), (list(all_rows()), 11 * 4 * 4 * 13)):
        assert len({(r.section, r.name) for r in rows}) == len(rows) == count
        assert {r.estimator for r in rows} == set(ESTIMATORS) and {r.target for r in rows} <= set(TARGETS)
        assert {r.setting for r in rows} <= set(settings())
    for r in list(all_rows())[::251]:
        assert all(math.isfinite(x) for x in (result(r, group_size=2).bias, result(r, group_size=2).std))


def test_the_program_prints_every_row_and_draws_the_figure(tmp_path, capsys):
    main(Config(horizon=2, group_size=2, figure=str(tmp_path / "new" / "figure.png")))
    shown = capsys.readouterr().out
    assert all(r.name in shown for r in chosen_rows())
    assert (tmp_path / "new" / "figure.png").stat().st_size > 50_000
