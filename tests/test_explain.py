"""Tests of recipes/explain.py: its closed forms against autograd's gradient of losses.step_loss, its words by hand, its batch against the loop's."""

import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from agent import Trajectory
from conftest import ROOT, TINY
from estimators import ESTIMATORS, Batch, EstimatorConfig, collate, shape_rewards, value_targets
from generator import GeneratorConfig, Group
from losses import AGGREGATIONS, POLICY_LOSSES, LossConfig, step_loss
from recipes.explain import KL_SLOPES, SLOPES, Token, coefficients, main, read_step, rollout_tokens, shown
from train import Config, save_rollouts
from trainer import TrainerConfig, take_rows

LEVELS, GATES, MODES, KINDS = ("off", "token", "seq", "geo"), ("ratio", "binary_kl", "tv"), ("mask", "clip", "trunc"), ("k1", "k2", "k3")


# ---------------------------------------------------------------------------------------------------- builders
def random_groups(seed: int = 0) -> list[Group]:
    """4 prompts of 3 rollouts of 1 to 3 segments, about 4 sampled tokens each; some rollouts are truncated."""
    rng, groups = np.random.default_rng(seed), []
    for g in range(4):
        groups.append(Group(g, {}))
        for member in range(3):
            rollout, reward, truncated, segments = 100 + 3 * g + member, float(rng.choice([0.0, 0.25, 1.0])), bool(rng.random() < 0.3), []
            for _ in range(rng.integers(1, 4)):
                segment = Trajectory(rollout, g, reward=reward, truncated=truncated)
                for _ in range(2):
                    observed, sampled = rng.integers(1, 4, 2)
                    segment.extend(rng.integers(0, 256, observed))
                    segment.extend(rng.integers(0, 256, sampled), -rng.uniform(0.05, 3, sampled), rng.integers(3, 6, sampled))
                segments.append(segment)
            groups[-1].rollouts.append(segments)
    return groups


def near(center: Tensor, width: float, rows: Tensor, seed: int) -> Tensor:
    """center + noise of that width for each token and, a third of it, for each rollout (so that sequences drift too); at most 0."""
    g = torch.Generator().manual_seed(seed)
    drift = torch.randn(int(rows.max()) + 1, generator=g)[rows, None]
    return (center + width * (torch.randn(center.shape, generator=g) + drift / 3)).clamp(max=-1e-3)


def loop_batch(cfg: Config, groups: list[Group], kl_scale: float = 1.0) -> Batch:
    """The batch as train.loop makes it; the three models' answers are random numbers near the behaviour's."""
    batch = collate([r for g in groups for r in g.rollouts], AGGREGATIONS[cfg.losses.aggregation], cfg.generator.temperature, cfg.trainer.minibatches, cfg.losses.mask_truncated)
    batch.rollout_rewards = shape_rewards(batch, cfg.estimation, cfg.generator.context_length)
    batch.old_logprobs = near(batch.behaviour_logprobs, 0.2, batch.rollout, 1) * batch.response_mask
    if cfg.reference:
        batch.ref_logprobs, batch.kl_scale = near(batch.behaviour_logprobs, 0.5, batch.rollout, 2) * batch.response_mask, kl_scale
    if ESTIMATORS[cfg.estimator].critic:
        batch.values = torch.rand(batch.response_mask.shape, generator=torch.Generator().manual_seed(3)) * batch.response_mask
        batch.returns = value_targets(batch, cfg.estimation)
    batch.advantages = ESTIMATORS[cfg.estimator](batch, cfg.estimation)
    return batch


def write_run(path: Path, cfg: Config, groups: list[Group], steps=(6,), kl_scale: float = 1.0) -> Path:
    """runs/<name> as train.py leaves it after these steps."""
    (path / "rollouts").mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(asdict(cfg), indent=1))
    for step in steps:
        row = {"step": step} | ({"kl_scale": kl_scale} if cfg.reference else {})
        with (path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        save_rollouts(path / "rollouts" / f"{step:06d}.npz", groups, loop_batch(cfg, groups, kl_scale))
    return path


def config(**losses) -> Config:
    return Config(model=str(TINY), losses=LossConfig(**losses), generator=GeneratorConfig(prompts_per_step=4, group_size=3, temperature=0.7), trainer=TrainerConfig(minibatches=2))


def accepted(**options) -> LossConfig | None:
    try:
        return LossConfig(**options)
    except ValueError:
        return None


def settings_of(kind: str) -> list[LossConfig]:
    """Every accepted setting of a loss: aggregation x mismatch x KL, with limits that random batches reach; every second masks truncated rollouts."""
    limits = {"cispo": {"cispo_ceiling": 1.2}, "ppo": {"clip_high": 0.28}, "gspo": {"clip_low": 0.05, "clip_high": 0.05}}.get(kind, {})
    out = []
    for aggregation, level, gate, mode, kl_kind in itertools.product(AGGREGATIONS, LEVELS, GATES, MODES, (None, *KINDS)):
        low, high = (0.9, 1.1) if level == "geo" else (0.75, 1.3)
        cfg = accepted(loss=kind, aggregation=aggregation, mismatch_level=level, mismatch_gate=gate, mismatch_mode=mode, mismatch_low=low, mismatch_high=high,
                            mismatch_limit=0.05 if gate == "tv" else 0.02, kl_coef=0.3 if kl_kind else 0.0, kl_kind=kl_kind or "k3", mask_truncated=len(out) % 2 == 1, **limits)
        out += [cfg] if cfg else []
    return out


def explained(batch: Batch, logprobs: Tensor, cfg: LossConfig) -> tuple[Tensor, Counter]:
    """The coefficients of all rollouts, [B, T] float64, and how often each rule stands in the column."""
    out, rules = torch.zeros(batch.response_mask.shape, dtype=torch.float64), Counter()
    for r in range(len(batch.raw_rewards)):
        rows = (batch.rollout == r).nonzero()[:, 0]
        results = coefficients(rollout_tokens(batch, rows, logprobs), cfg, batch.kl_scale * cfg.kl_coef)
        place = torch.zeros_like(batch.response_mask)
        place[rows] = batch.response_mask[rows]
        out[place] = torch.tensor([c for _, c, _ in results], dtype=torch.float64)
        rules.update(rule for *_, line in results for rule in line.split(", "))
    return out, rules


def differentiated(batch: Batch, logprobs: Tensor, cfg: LossConfig) -> tuple[Tensor, dict]:
    """The same by autograd through step_loss, [B, T] float64, the two optimizer steps one by one; and the metrics' sums."""
    out, sums = torch.zeros(batch.response_mask.shape, dtype=torch.float64), Counter()
    for m in range(int(batch.minibatch.max()) + 1):
        rows = (batch.minibatch == m).nonzero()[:, 0]
        part = take_rows(batch, rows.tolist())
        part = replace(part, **{name: x.double() for name, x in vars(part).items() if isinstance(x, Tensor) and x.is_floating_point()})
        x = logprobs[rows, : part.token_ids.shape[1]].double().requires_grad_()
        loss, metrics = step_loss(x, None, part, cfg, cfg.loss)
        out[rows, : x.shape[1]] = torch.autograd.grad(loss, x)[0]
        sums.update({name: float(total) for name, (total, _) in metrics.items()})
    return out, sums


def one(current: float = 0.0, old: float = -1.0, behaviour: float = -1.0, advantage: float = 1.0, ref=None, weight: float = 0.25) -> Token:
    return Token(behaviour, old, current, ref, advantage, weight)


# ---------------------------------------------------------------------------------------------------- the coefficient
@pytest.mark.parametrize("kind", sorted(POLICY_LOSSES))
def test_the_closed_form_is_autograds_gradient_of_the_loss(kind):
    """Every accepted aggregation x correction x KL kind, truncated rollouts in and out by turns; both clips and both sides of each gate occur."""
    groups = random_groups()
    cfgs, batches, ruled = settings_of(kind), {}, Counter()
    for cfg in cfgs:
        key = cfg.aggregation, cfg.mask_truncated
        if key not in batches:
            batches[key] = loop_batch(replace(config(kl_coef=0.3), losses=LossConfig(aggregation=key[0], mask_truncated=key[1], kl_coef=0.3)), groups, kl_scale=1.7)
        batch = batches[key]
        logprobs = near(batch.old_logprobs, 0.4, batch.rollout, 4)
        seen, rules = explained(batch, logprobs, cfg)
        wanted, sums = differentiated(batch, logprobs, cfg)
        torch.testing.assert_close(seen, wanted, rtol=0, atol=1e-9, msg=lambda m: f"{cfg}\n{m}")
        assert seen.abs().max() > 1e-3 and (seen[~batch.response_mask] == 0).all()
        if kind != "sft" and not cfg.mask_truncated:        # the column counts what the metrics count; rules are named once each
            cut = sum(n for rule, n in rules.items() if rule.startswith("mismatch"))
            assert sum(n for rule, n in rules.items() if rule.startswith(("clip", "dual", "ceiling"))) == sums["clip_frac"]
            assert (0 < cut < int(batch.response_mask.sum())) == (cfg.mismatch_level != "off"), cfg
            assert cfg.mismatch_level in ("seq", "geo") or cut == sums["mismatch_cut_frac"]
        ruled += rules
    assert len(cfgs) == 4 * 14 * 3                                                # aggregations, corrections, KL kinds
    assert ruled["truncated"] and ruled["-"]
    clips = {"ppo": ("clip high 1.28", "clip low 0.8"), "gspo": ("clip high 1.05", "clip low 0.95"), "cispo": ("ceiling 1.2",)}.get(kind, ())
    assert all(ruled[rule] for rule in clips)
    gates = () if kind == "sft" else ("mismatch trunc 1.3", "mismatch clip 0.75", "mismatch clip 1.3", "mismatch mask token", "mismatch mask seq", "mismatch mask geo")
    assert all(ruled[rule] for rule in gates) and set(ruled) == {"-", "truncated", *clips, *gates}


def test_the_dual_clip_has_the_gradient_of_the_loss():
    """A dual clip of 1.3 that random ratios pass."""
    cfg = LossConfig(clip_high=0.2, dual_clip=1.3, mismatch_high=1.3)
    batch = loop_batch(config(), random_groups())
    logprobs = near(batch.old_logprobs, 0.4, batch.rollout, 4)
    seen, rules = explained(batch, logprobs, cfg)
    torch.testing.assert_close(seen, differentiated(batch, logprobs, cfg)[0], rtol=0, atol=1e-9)
    assert min(rules["dual clip 1.3"], rules["clip high 1.2"], rules["clip low 0.8"]) > 0


@pytest.mark.parametrize("kind", sorted(POLICY_LOSSES))
def test_float32_as_in_a_run_agrees_to_1e_6(kind):
    """step_loss in float32 on the very tensors that explain reads as floats."""
    cfg = LossConfig(loss=kind, kl_coef=0.3)
    batch = loop_batch(config(kl_coef=0.3), random_groups(), kl_scale=1.7)
    logprobs = near(batch.old_logprobs, 0.4, batch.rollout, 4).requires_grad_()
    wanted = torch.autograd.grad(step_loss(logprobs, None, batch, cfg, kind)[0], logprobs)[0]
    torch.testing.assert_close(explained(batch, logprobs.detach(), cfg)[0], wanted.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", sorted(POLICY_LOSSES))
def test_infinite_and_very_far_logprobs_stay_finite_and_right(kind):
    """-inf, -100 and 0 under each policy by turns (no -inf under the current one): beyond 30 nats no gradient passes the cut, and nothing is NaN."""
    def wild(center: Tensor, seed: int, lowest: float = -math.inf) -> Tensor:
        draw = torch.randint(0, 6, center.shape, generator=torch.Generator().manual_seed(seed))
        return torch.where(draw == 0, lowest, torch.where(draw == 1, -100.0, torch.where(draw == 2, 0.0, center)))

    batch = loop_batch(config(kl_coef=0.3), random_groups())
    for level, kl_kind, seed in itertools.product(("off", "token"), KL_SLOPES, range(0, 40, 10)):
        cfg = LossConfig(loss=kind, kl_coef=0.3, kl_kind=kl_kind, mismatch_level=level)
        rough = replace(batch, **{name: wild(getattr(batch, name), seed + k) for k, name in enumerate(("behaviour_logprobs", "old_logprobs", "ref_logprobs"))})
        logprobs = wild(batch.old_logprobs, seed + 3, lowest=-60.0)
        seen = explained(rough, logprobs, cfg)[0]
        assert seen.isfinite().all()
        torch.testing.assert_close(seen, differentiated(rough, logprobs, cfg)[0], rtol=1e-9, atol=1e-9)


def test_every_loss_and_every_kl_in_the_loss_has_a_formula():
    """A loss added to losses.py without one here must not pass unnoticed."""
    assert set(SLOPES) == set(POLICY_LOSSES)
    assert set(KL_SLOPES) == {kind for kind in KINDS if accepted(kl_coef=0.1, kl_kind=kind)}


# ---------------------------------------------------------------------------------------------------- the rule column, by hand
@pytest.mark.parametrize("token, options, coefficient, rule", [
    (one(-1.0), {}, -1 / 4, "-"),                                                                     # pi = old: -A / 4
    (one(-1 + math.log(1.5)), {}, 0, "clip high 1.2"),
    (one(-1 + math.log(1.5), advantage=-1), {}, 1.5 / 4, "-"),                                        # A pushes it back: never clipped
    (one(-1 + math.log(0.5), advantage=-1), {}, 0, "clip low 0.8"),
    (one(-1 + math.log(0.5)), {}, -0.5 / 4, "-"),
    (one(-1 + math.log(4), advantage=-1), {"dual_clip": 3.0}, 0, "dual clip 3"),
    (one(-1 + math.log(2), advantage=-1), {"dual_clip": 3.0}, 2 / 4, "-"),
    (one(-1 + math.log(4)), {"dual_clip": 3.0}, 0, "clip high 1.2"),                                  # the dual clip is for A < 0
    (one(-1 + math.log(1.5)), {"loss": "gspo"}, 0, "clip high 1.2"),                                  # one token: s is its ratio
    (one(-1 + math.log(8), advantage=2), {"loss": "cispo"}, -10 / 4, "ceiling 5"),                    # -5 * 2 / 4
    (one(-1 + math.log(8), advantage=2), {"loss": "reinforce"}, -2 / 4, "-"),
    (one(-1.0, behaviour=-1 - math.log(3)), {}, -2 / 4, "mismatch trunc 2"),
    (one(-1.0, behaviour=-1 + math.log(4)), {"mismatch_mode": "clip"}, -0.5 / 4, "mismatch clip 0.5"),
    (one(-1.0, behaviour=-1 + math.log(4)), {}, -0.25 / 4, "-"),                                      # trunc has no lower limit
    (one(-1.0, behaviour=-1 - math.log(3)), {"mismatch_mode": "mask"}, 0, "mismatch mask token"),
    (one(-1.0, behaviour=-1 - math.log(3)), {"mismatch_level": "geo", "mismatch_mode": "mask"}, 0, "mismatch mask geo"),
    (one(-1.0, behaviour=-1 - math.log(3)), {"mismatch_level": "seq", "mismatch_mode": "mask"}, 0, "mismatch mask seq"),
    (one(-1.0, behaviour=-1 - math.log(3)), {"mismatch_level": "off"}, -1 / 4, "-"),
    (one(-1 + math.log(1.5), behaviour=-1 - math.log(3)), {}, 0, "clip high 1.2, mismatch trunc 2"),
    (one(-1.0, weight=0.0), {}, 0, "truncated"),
    (one(-1.0, ref=-1.5), {"kl_coef": 0.2, "kl_kind": "k2"}, (-1 + 0.2 * 0.5) / 4, "-"),
    (one(-1.0, ref=-1.5), {"kl_coef": 0.2, "kl_kind": "k3"}, (-1 + 0.2 * (1 - math.exp(-0.5))) / 4, "-"),
    (one(-1 + math.log(1.5), ref=-1.5), {"kl_coef": 0.2, "kl_kind": "k2"}, 0.2 * (0.5 + math.log(1.5)) / 4, "clip high 1.2"),   # the KL is not clipped
])
def test_the_column_names_what_acted(token, options, coefficient, rule):
    """One token of advantage +-1 and loss_weight 1/4."""
    cfg = LossConfig(**options)
    _, seen, named = coefficients([token], cfg, cfg.kl_coef)[0]
    assert (seen, named) == (pytest.approx(coefficient, abs=1e-12), rule)


def test_a_gate_on_the_divergence_of_a_token():
    """mu 0.5, old 0.25: tv 0.25; binary KL ln 2 / 2 + ln(2/3) / 2 = 0.1438. What is kept carries its ratio 1/2."""
    token = one(math.log(0.25), math.log(0.25), math.log(0.5))
    for gate, value in (("tv", 0.25), ("binary_kl", math.log(2) / 2 + math.log(2 / 3) / 2)):
        for limit, weight in ((value + 1e-6, 0.5), (value - 1e-6, 0.0)):
            w, _, rule = coefficients([token], LossConfig(mismatch_gate=gate, mismatch_mode="mask", mismatch_limit=limit), 0.0)[0]
            assert (w, rule) == (pytest.approx(weight), "-" if weight else "mismatch mask token")


def test_gspo_has_one_ratio_for_all_segments():
    """Ratios 4 and 1/4 cancel out: s = 1, so no token is clipped and each has -A/4."""
    tokens = [one(-1 + math.log(4)), one(-1 - math.log(4))]
    assert [(c, rule) for _, c, rule in coefficients(tokens, LossConfig(loss="gspo"), 0.0)] == [(pytest.approx(-0.25), "-")] * 2


# ---------------------------------------------------------------------------------------------------- what is read back
@pytest.mark.parametrize("cfg", [
    config(), config(aggregation="seq-mean-token-sum", mask_truncated=True), config(kl_coef=0.1, kl_target=0.02),
    replace(config(), estimator="gae", estimation=EstimatorConfig(gae_lambda=0.9, gamma=0.99)),
    replace(config(), estimator="reinforce", estimation=EstimatorConfig(kl_reward_coef=0.2, overlong_buffer=120, overlong_penalty=0.5)),
    replace(config(), estimator="on_policy_distill", trainer=TrainerConfig(ref=str(TINY), minibatches=2)),
    replace(config(), estimator="rloo", estimation=EstimatorConfig(truncated_reward=0.5, reward_clip=(0.0, 0.9))),
], ids=lambda cfg: f"{cfg.estimator}-{cfg.losses.aggregation}-{cfg.losses.kl_coef}")
def test_the_batch_is_the_one_the_step_trained_on(cfg, tmp_path):
    """Every field, bit for bit."""
    groups = random_groups()
    run = write_run(tmp_path / "run", cfg, groups, kl_scale=1.7)
    seen_cfg, step, seen, rollouts = read_step(run, None)
    wanted = loop_batch(cfg, groups, kl_scale=1.7)
    assert (seen_cfg, step, [(r[0].rollout, r[0].group) for r in rollouts]) == (cfg, 6, [(100 + n, n // 3) for n in range(12)])
    for f in fields(Batch):
        a, b = getattr(seen, f.name), getattr(wanted, f.name)
        assert torch.equal(a, b) if isinstance(b, Tensor) else a == b, f.name


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Two saved steps; the numbers of the second's rollouts are 100 to 111."""
    return write_run(tmp_path_factory.mktemp("runs") / "run", config(), random_groups(), steps=(5, 6))


def test_a_later_policys_logprobs_are_those_of_transformers(run):
    """Segment by segment, unpadded, logits over the run's temperature 0.7, the token's own log softmax from the column before it."""
    from recipes.explain import logprobs_under
    from transformers import AutoModelForCausalLM

    batch = read_step(run, None)[2]
    rows = (batch.rollout == 4).nonzero()[:, 0]
    model, seen = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval(), logprobs_under(str(TINY), batch, rows)
    for row in rows.tolist():
        ids = batch.token_ids[row, : batch.lengths[row]].long()
        with torch.no_grad():
            wanted = (model(ids[None]).logits[0, :-1] / 0.7).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        mask = batch.response_mask[row, 1: batch.lengths[row]]
        torch.testing.assert_close(seen[row, 1: batch.lengths[row]][mask], wanted[mask], rtol=0, atol=1e-4)
    assert len(rows) > 1 and (seen[batch.rollout != 4] == 0).all()


def test_tokens_are_shown_so_that_nothing_hides():
    """Text is quoted and escaped, a control token is bare, half a character has its vocabulary name."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = tokenizer.encode("\n [", add_special_tokens=False) + [tokenizer.eos_token_id] + tokenizer.encode("é", add_special_tokens=False)
    assert [shown(tokenizer, i) for i in ids] == [r"'\n'", "' '", "'['", "<|im_end|>", "Ã", "©"]


# ---------------------------------------------------------------------------------------------------- the command
def lines_of(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def test_the_printed_table_has_a_line_for_every_token(run, capsys):
    """The newest step's first rollout: positions and ids of all its segments, mask 0 without numbers, mask 1 with the coefficient last."""
    assert main([str(run)]) == 0
    out = capsys.readouterr().out
    batch = read_step(run, 6)[2]
    rows = (batch.rollout == 0).nonzero()[:, 0]
    results = iter(coefficients(rollout_tokens(batch, rows, batch.old_logprobs), LossConfig(), 0.0))
    table = [line for line in lines_of(out) if line[0].isdigit()]
    wanted = [(row, place) for row in rows.tolist() for place in range(int(batch.lengths[row]))]
    assert [line[:2] for line in table] == [[str(place), str(int(batch.token_ids[row, place]))] for row, place in wanted]
    for line, (row, place) in zip(table, wanted):
        if batch.response_mask[row, place]:
            w, coefficient, rule = next(results)
            assert line[-1] == (f"{coefficient:+.2e}" if coefficient else "0") and (rule == "-" or rule in " ".join(line))
        else:
            assert line[-1] == "0" and len(line) < 7
    assert f"{run.name}, step 6" in out.replace("\n", "") and "100 of group 0" in out and "nan" not in out.lower()


def test_a_truncated_rollout_left_out_has_no_denominator(tmp_path, capsys):
    """--mask-truncated: weight 0, so no 1/weight, coefficient 0, and the rule says why."""
    groups = random_groups()
    number = next(r[0].rollout for g in groups for r in g.rollouts if r[0].truncated)
    assert main([str(write_run(tmp_path / "run", config(mask_truncated=True), groups)), "--rollout", str(number)]) == 0
    sampled = [line for line in lines_of(capsys.readouterr().out) if line[0].isdigit() and len(line) > 7]
    assert sampled and all((line[-4], line[-2:]) == ("truncated", ["-", "0"]) for line in sampled)


def test_the_command_line(run):
    """python recipes/explain.py in a process of its own, another rollout, under a policy: clipping acts and 160 columns hold it."""
    done = subprocess.run([sys.executable, str(ROOT / "recipes/explain.py"), str(run), "--step", "5", "--rollout", "107", "--policy", str(TINY)],
                          capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "107 of group 2" in done.stdout and "clip low 0.8" in done.stdout and "dLoss/" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 160


def resave(run: Path, drop: str) -> None:
    path = run / "rollouts/000006.npz"
    arrays = dict(np.load(path))
    np.savez_compressed(path, **{name: array for name, array in arrays.items() if name != drop})


def cut_short(run: Path, length: int) -> None:
    path = run / "rollouts/000006.npz"
    path.write_bytes(path.read_bytes()[:length])


def reconfigure(run: Path, **changes) -> None:
    (run / "config.json").write_text(json.dumps(asdict(replace(config(), **changes))))


def diverge(run: Path) -> None:
    """run/hf: the embedded policy with weights that are not numbers."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(TINY, run / "hf")
    save_file({name: torch.full_like(x, math.nan) for name, x in load_file(TINY / "model.safetensors").items()}, run / "hf/model.safetensors", {"format": "pt"})


def shrink(run: Path) -> None:
    """run/hf: a model of 10 tokens."""
    shutil.copytree(TINY, run / "hf")
    (run / "hf/config.json").write_text(json.dumps(json.loads((TINY / "config.json").read_text()) | {"vocab_size": 10}))


@pytest.mark.parametrize("spoil, arguments, words", [
    (lambda run: shutil.rmtree(run), [], "no run here"),
    (lambda run: None, ["--step", "7"], "step 7 was not saved.*2 steps from 5 to 6"),
    (lambda run: None, ["--rollout", "7"], "no rollout 7.*12, numbered from 100 to 111"),
    (lambda run: None, ["--policy", "/no/such/model"], "--policy /no/such/model: no config.json there"),
    (diverge, ["--policy", "{run}/hf"], "not finite, so it has diverged"),
    (shrink, ["--policy", "{run}/hf"], "a vocabulary of 10 tokens and the rollout holds id"),
    (lambda run: resave(run, drop="old_logprobs"), [], "no old_logprobs"),
    (lambda run: cut_short(run, 500), [], "not whole"),
    (lambda run: cut_short(run, 0), [], "not whole"),
    (lambda run: shutil.rmtree(run / "rollouts"), [], "no rollouts were saved"),
    (lambda run: reconfigure(run, losses=LossConfig(kl_coef=0.1)), [], "no ref_logprobs"),
    (lambda run: reconfigure(run, estimator="gae"), [], "no values"),
    (lambda run: reconfigure(run, model="/no/such/model"), [], "the run's --model /no/such/model: no config.json there"),
])
def test_wrong_input_is_one_line_and_exit_code_2(spoil, arguments, words, tmp_path, capsys):
    run = write_run(tmp_path / "run", config(), random_groups(), steps=(5, 6))
    spoil(run)
    assert main([str(run), *(a.format(run=run) for a in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and re.search(words, err)


def test_a_moving_kl_scale_that_was_never_written_is_not_guessed(tmp_path, capsys):
    """With --kl-target the scale of a step is only in metrics.jsonl; without, it never left 1."""
    for cfg, code in ((config(kl_coef=0.1, kl_target=0.02), 2), (config(kl_coef=0.1), 0)):
        run = write_run(tmp_path / str(code), cfg, random_groups())
        (run / "metrics.jsonl").unlink()
        assert main([str(run)]) == code
    assert "no kl_scale of step 6" in capsys.readouterr().err
