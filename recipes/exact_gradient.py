"""Bias and variance of the gradient of one training step, exactly: estimators.py and losses.py in a world small enough to enumerate.

    python recipes/exact_gradient.py [--help]          15 seconds on one core; prints a table, draws a figure in runs/

The policy is a table of logits theta[state, token]. A state is what was sampled so far; token 0 or the horizon ends a
trajectory, so lengths vary, there are N trajectories, and the expected reward and its gradient have a closed form:

    J(theta) = sum over tau of p(tau) r(tau),   p(tau) = prod over t of softmax(theta[s_t])[a_t]

A step samples G rollouts of the prompt from mu and follows g = -d step_loss / d theta, advantages constant. The gradient of
a batch does not depend on the order of its rollouts, so instead of N^G tuples it is enough to go through the multisets:

    E g = sum over multisets (n_i copies of tau_i, n_1 + ... + n_N = G) of  G! / (n_1! ... n_N!) * prod mu(tau_i)^n_i * g

What a row should follow, e: grad J at pi; with the KL as a reward, grad of J - coef * KL(pi || ref) of whole trajectories; for a KL
in the loss and for distillation, minus grad of the token KL: the sum over states of visits * KL(pi || ref) at the state, with the
visits held fixed, since a token's own loss cannot see how it moves them. Columns:  bias |E g - e| / |e|,  cosine of E g and e,
scale <E g, e> / |e|^2,  std sqrt(E |g - E g|^2) / |e|.  Where cosine is 1 the bias is one of step size only.

Policies: behaviour mu, old pi_old, current pi, ref. on: mu = pi_old = pi. moved: mu = pi_old and pi has left it, as in the
later optimizer steps of a batch. stale: mu is another policy than pi_old = pi.
Letters: N trajectories, S states, V tokens, G rollouts a step, M multisets, T = 1 + horizon (column 0 is the prompt).
Sources: Williams 1992; of each method, see estimators.py and losses.py.
"""

import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from agent import Trajectory  # noqa: E402
from estimators import ESTIMATORS, Batch, EstimatorConfig, collate  # noqa: E402
from losses import AGGREGATIONS, LossConfig, kl, step_loss  # noqa: E402

LIMIT = 100_000                        # multisets at most
KL_COEF = 0.5                          # of the rows with the KL as a reward


@dataclass(frozen=True)
class Config:
    """Exact bias and variance of the gradient of one training step."""

    vocabulary: int = 3                # tokens; 0 ends a trajectory
    horizon: int = 3                   # tokens of a trajectory at most
    group_size: int = 3                # rollouts of a step, all of one prompt
    stale: float = 1.0                 # standard deviation of the noise on pi_old's logits that makes a stale mu
    moved: float = 0.2                 # the same that makes a pi that has moved
    seed: int = 3                      # of rewards and logits
    all: bool = False                  # estimator x loss x aggregation x correction instead of the chosen rows, no figure
    figure: str = "runs/exact_gradient.png"   # where the figure goes

    def __post_init__(self):
        if self.vocabulary < 2 or self.horizon < 1 or self.group_size < 1:
            raise ValueError(f"--vocabulary {self.vocabulary} --horizon {self.horizon} --group-size {self.group_size}: want at least 2 tokens, 1 step and 1 rollout.")


@contextmanager
def float64() -> Iterator[None]:
    """New tensors are float64 inside, in estimators.py and losses.py too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---------------------------------------------------------------------------------------------------- the world
@dataclass(frozen=True, eq=False)
class Policies:
    """Logits [S, V] of the policies of a step."""

    current: Tensor
    old: Tensor
    behaviour: Tensor
    ref: Tensor


class World:
    """Every trajectory of one prompt with its reward, and every batch of G of them. Make and use it under float64()."""

    def __init__(self, vocabulary: int, horizon: int, group_size: int, seed: int):
        prefixes = [p for h in range(horizon) for p in itertools.product(range(1, vocabulary), repeat=h)]
        paths = [(*p, a) for p in prefixes for a in range(vocabulary) if a == 0 or len(p) + 1 == horizon]
        if (count := math.comb(len(paths) + group_size - 1, group_size)) > LIMIT:
            raise ValueError(f"{len(paths)} trajectories in steps of {group_size} are {count:,} multisets, over {LIMIT:,}. "
                             "Lower --vocabulary, --horizon or --group-size.")
        def table(rows) -> Tensor:
            return torch.tensor([[0, *row, *[0] * (horizon - len(row))] for row in rows])      # [N, T]
        self.tokens = table(paths)
        self.states = table([prefixes.index(p[:t]) for t in range(len(p))] for p in paths)     # [N, T] state before the token
        self.mask = table([1] * len(p) for p in paths).bool()                                  # [N, T] sampled
        self.shape, self.random = (len(prefixes), vocabulary), torch.Generator().manual_seed(seed)   # S, V
        self.rewards = 1 + self.mask.sum(-1) / horizon + 0.5 * torch.randn(len(paths), generator=self.random)   # [N] longer is better
        self.chosen = torch.tensor(list(itertools.combinations_with_replacement(range(len(paths)), group_size)))   # [M, G]
        copies = F.one_hot(self.chosen, len(paths)).sum(1)                                     # [M, N]
        self.orders = (math.lgamma(group_size + 1) - torch.lgamma(copies + 1.0).sum(-1)).exp().round()   # [M] tuples of each

    def noise(self, scale: float) -> Tensor:
        return scale * torch.randn(self.shape, generator=self.random)                          # [S, V]

    def logprobs(self, theta: Tensor) -> Tensor:
        """Of every token of every trajectory, 0 off the response. [N, T]"""
        return theta.log_softmax(-1)[self.states, self.tokens] * self.mask

    def law(self, theta: Tensor) -> Tensor:
        """Probability that a step of G rollouts of theta is this multiset. [M]"""
        return self.orders * self.logprobs(theta).sum(-1).exp()[self.chosen].prod(-1)

    def visits(self, theta: Tensor, worth: Tensor | float = 1.0) -> Tensor:
        """Sum of p(tau) * worth [N] over the trajectories through each state: how often it is visited, for worth 1. [S]"""
        through = (self.logprobs(theta).sum(-1).exp() * worth)[:, None] * self.mask            # [N, T]
        return torch.zeros(self.shape[0]).index_add(0, self.states.flatten(), through.flatten())

    @cached_property
    def rollouts(self) -> list[list[Trajectory]]:
        """One segment a rollout, multiset after multiset; each multiset is a prompt group."""
        out = []
        for i, n in enumerate(self.chosen.flatten().tolist()):
            trajectory, tokens = Trajectory(i, i // self.chosen.shape[1], reward=float(self.rewards[n])), self.tokens[n][self.mask[n]].tolist()
            trajectory.extend([0])                                                             # the prompt
            trajectory.extend(tokens, logprobs=[0.0] * len(tokens), policy_versions=[0] * len(tokens))   # it keeps 32 bits; `gradients` puts mu in, in 64
            out.append([trajectory])
        return out

    @cached_property
    def steps(self) -> list[Batch]:
        """Each multiset as a batch of its own."""
        size = self.chosen.shape[1]
        return [collate(self.rollouts[i:i + size], AGGREGATIONS["token-mean"]) for i in range(0, len(self.rollouts), size)]

    @cache
    def all_steps(self, aggregation: str) -> Batch:
        """One batch of M * G rows with a minibatch a step: loss_weight is fixed for each step by itself, and losses only add."""
        return collate(self.rollouts, AGGREGATIONS[aggregation], minibatches=len(self.chosen))

    @cache
    def advantages(self, estimator: str, cfg: EstimatorConfig, policies: Policies, value: float | Tensor | None) -> Tensor:
        """Of each step by itself, with the critic of Row.value. [M * G, T]"""
        old, ref = self.logprobs(policies.old), self.logprobs(policies.ref)                    # [N, T]
        values = self.visits(policies.old, self.rewards) / self.visits(policies.old) if value is None else torch.zeros(self.shape[0]) + value   # [S]
        values, out = values[self.states] * self.mask, []                                      # [N, T] before the token
        for rows, step in zip(self.chosen, self.steps, strict=True):
            width = step.token_ids.shape[1]                                                    # of its longest rollout
            step = replace(step, old_logprobs=old[rows, :width], ref_logprobs=ref[rows, :width], values=values[rows, :width])
            out.append(F.pad(ESTIMATORS[estimator](step, cfg), (0, self.mask.shape[1] - width)))   # [G, T]
        return torch.cat(out)


# ---------------------------------------------------------------------------------------------------- what a row should follow
def reward_gradient(world: World, policies: Policies, kl_coef: float = 0.0) -> Tensor:
    """grad of E[r] - kl_coef * KL(pi || ref) of whole trajectories, at pi. [S, V]"""
    theta = policies.current.clone().requires_grad_()
    logp, ref = world.logprobs(theta).sum(-1), world.logprobs(policies.ref).sum(-1)            # [N]
    return torch.autograd.grad((logp.exp() * (world.rewards - kl_coef * (logp - ref))).sum(), theta)[0]


def token_kl_gradient(world: World, policies: Policies) -> Tensor:
    """-grad of the sum over states of visits * KL(pi || ref) at the state, visits held fixed: what token losses can see. [S, V]"""
    theta = policies.current.clone().requires_grad_()
    p, q = theta.log_softmax(-1), policies.ref.log_softmax(-1)                                 # [S, V]
    return -torch.autograd.grad((world.visits(policies.current) * (p.exp() * (p - q)).sum(-1)).sum(), theta)[0]


TARGETS = {"J": reward_gradient, f"J - {KL_COEF} KL": partial(reward_gradient, kl_coef=KL_COEF), "- token KL": token_kl_gradient}


# ---------------------------------------------------------------------------------------------------- one row
PLAIN = EstimatorConfig(whiten=False)
EXACT = LossConfig(loss="reinforce", aggregation="seq-mean-token-sum", mismatch_level="off")


@dataclass(frozen=True)
class Row:
    """A training step to examine."""

    section: str
    name: str
    estimator: str = "rloo"
    cfg: EstimatorConfig = PLAIN
    loss: LossConfig = EXACT
    only_kl: str = ""                  # losses.kl of this kind instead of step_loss, whose LossConfig refuses k1: the row shows why
    setting: str = "on"                # on, moved, stale or one token
    value: float | Tensor | None = None   # gae: the critic's answer in every state, or its answers [S]; None = the exact ones
    target: str = "J"


def gradients(world: World, policies: Policies, row: Row) -> Tensor:
    """g of every multiset: -(d loss / d logprob of a token) * (d that logprob / d theta), summed over its tokens. [M, S * V]"""
    rows = world.chosen.flatten()                                                              # [M * G]
    old, mu, ref = (world.logprobs(theta)[rows] for theta in (policies.old, policies.behaviour, policies.ref))   # [M * G, T]
    batch = replace(world.all_steps(row.loss.aggregation), old_logprobs=old, behaviour_logprobs=mu, ref_logprobs=ref,
                    advantages=world.advantages(row.estimator, row.cfg, policies, row.value))
    logprobs = world.logprobs(policies.current)[rows].requires_grad_()                         # [M * G, T]
    if row.only_kl:
        loss = (batch.loss_weight * kl(logprobs, ref, batch.response_mask, row.only_kl)).sum()
    else:
        loss, _ = step_loss(logprobs, None, batch, row.loss, row.loss.loss)
    (coefficient,) = torch.autograd.grad(loss, logprobs)                                       # [M * G, T]
    jacobian = torch.func.jacrev(world.logprobs)(policies.current).flatten(2)                  # [N, T, S * V]
    return -torch.einsum("bt,btp->bp", coefficient, jacobian[rows]).view(*world.chosen.shape, -1).sum(1)


@dataclass(frozen=True)
class Result:
    bias: float
    cosine: float                      # NaN where E g is 0
    scale: float
    std: float


def measure(world: World, policies: Policies, row: Row) -> Result:
    """The four columns of a row."""
    g, weight = gradients(world, policies, row), world.law(policies.behaviour)                 # [M, S * V], [M]
    mean, exact = weight @ g, TARGETS[row.target](world, policies).flatten()                   # [S * V]
    size, length, dot = exact.norm(), mean.norm(), mean @ exact
    cosine = dot / (size * length) if length > 1e-12 * size else math.nan
    return Result(*map(float, ((mean - exact).norm() / size, cosine, dot / size**2, (weight @ (g - mean).square().sum(-1)).sqrt() / size)))


# ---------------------------------------------------------------------------------------------------- rows
CORRECTIONS = {                        # name -> flags of losses.mismatch_correction
    "off": dict(mismatch_level="off"),
    "token, no limit": dict(mismatch_high=math.inf),
    "token trunc (TIS)": dict(mismatch_mode="trunc"),
    "token clip": dict(mismatch_mode="clip"),
    "token mask (IcePop)": dict(mismatch_mode="mask"),
    "seq mask": dict(mismatch_level="seq", mismatch_mode="mask"),
    "geo mask": dict(mismatch_level="geo", mismatch_mode="mask"),
    "token binary_kl": dict(mismatch_gate="binary_kl", mismatch_mode="mask"),
    "seq binary_kl": dict(mismatch_level="seq", mismatch_gate="binary_kl", mismatch_mode="mask"),
    "token tv": dict(mismatch_gate="tv", mismatch_mode="mask", mismatch_limit=0.15),   # tv <= sqrt(kl / 2): as strict as binary_kl at 0.05
    "seq tv": dict(mismatch_level="seq", mismatch_gate="tv", mismatch_mode="mask", mismatch_limit=0.15),
}


def corrected(name: str, **flags) -> LossConfig:
    return replace(EXACT, **{"mismatch_level": "token"} | CORRECTIONS[name] | flags)


def chosen_rows() -> Iterator[Row]:
    for name in ("reinforce", "reinforce_baseline", "dr_grpo", "flash_reinforce", "rloo", "grpo"):
        yield Row("1 estimators", name, name)
    for name in ("reinforce", "reinforce_baseline"):
        yield Row("1 estimators", f"{name}, whitened", name, replace(PLAIN, whiten=True))
    yield Row("1 estimators", "reinforce, gamma 0.9", "reinforce", replace(PLAIN, gamma=0.9))
    for name, value in (("exact V", None), ("V = 1", 1.0)):
        yield Row("1 estimators", f"gae, {name}", "gae", value=value)
        yield Row("1 estimators", f"gae, {name}, lambda 0", "gae", replace(PLAIN, gae_lambda=0.0), value=value)
    yield Row("1 estimators", "gae, exact V, whitened", "gae", replace(PLAIN, whiten=True))
    for estimator, name in itertools.product(("rloo", "grpo"), AGGREGATIONS):
        yield Row("2 aggregations", f"{estimator}, {name}", estimator, loss=replace(EXACT, aggregation=name))
    for setting, name in itertools.product(("on", "moved"), ("reinforce", "ppo", "cispo", "gspo")):
        yield Row("3 losses", f"{name}, {setting}", loss=replace(EXACT, loss=name), setting=setting)
    for name in list(CORRECTIONS)[:5]:
        yield Row("4 stale mu, one token", name, loss=corrected(name), setting="one token")
    for name in CORRECTIONS:
        yield Row("5 stale mu, trajectories", name, loss=corrected(name), setting="stale")
    for kind in ("k1", "k2", "k3"):
        yield Row("6 KL and distillation", f"{kind} as a loss", only_kl=kind, target="- token KL")
    for kind in ("k1", "k3"):
        yield Row("6 KL and distillation", f"{kind} as a reward", "reinforce", replace(PLAIN, kl_reward_coef=KL_COEF, kl_reward_kind=kind), target=f"J - {KL_COEF} KL")
    yield Row("6 KL and distillation", "on_policy_distill", "on_policy_distill", target="- token KL")


def all_rows() -> Iterator[Row]:
    """Estimator x whitening x policy loss x aggregation x correction, which matters only where mu is stale."""
    settings = [("on", "off"), ("moved", "off"), *(("stale", correction) for correction in CORRECTIONS)]
    for name, method in ESTIMATORS.items():
        for whiten in (False, True)[:1 + ("whiten" in method.reads)]:
            for loss, aggregation, (setting, correction) in itertools.product(("reinforce", "ppo", "cispo", "gspo"), AGGREGATIONS, settings):
                yield Row(name + ", whitened" * whiten, f"{loss}, {aggregation}, {setting}, {correction}", name, replace(PLAIN, whiten=whiten),
                          corrected(correction, loss=loss, aggregation=aggregation), setting=setting, target="- token KL" if method.teacher else "J")


# ---------------------------------------------------------------------------------------------------- table and figure
def make_settings(cfg: Config) -> dict[str, tuple[World, Policies]]:
    world, one = World(cfg.vocabulary, cfg.horizon, cfg.group_size, cfg.seed), World(8, 1, cfg.group_size, cfg.seed)
    pi, ref, far, near = (world.noise(x) for x in (1.0, 1.0, cfg.stale, cfg.moved))            # [S, V]
    single, gap = one.noise(1.0), one.noise(cfg.stale)                                         # [1, 8]
    return {"on": (world, Policies(pi, pi, pi, ref)), "moved": (world, Policies(pi + near, pi, pi, ref)),
            "stale": (world, Policies(pi, pi, pi + far, ref)), "one token": (one, Policies(single, single, single + gap, single))}


def report(results: list[tuple[Row, Result]]) -> Table:
    table = Table("", "follows grad of", *(Column(name, justify="right") for name in ("bias", "cosine", "scale", "std")), box=SIMPLE)
    for section, rows in itertools.groupby(results, key=lambda pair: pair[0].section):
        table.add_section()
        table.add_row(f"[bold]{section}")
        for row, r in rows:
            numbers = ["0" if abs(x) < 1e-10 else "-" if math.isnan(x) else f"{x:.3f}" for x in (r.bias, r.cosine, r.scale, r.std)]
            table.add_row(row.name, row.target, *numbers)
    return table


def draw(results: list[tuple[Row, Result]], path: str) -> None:
    """A panel a section: std over bias, the names of each point in a column beside it, in the order of std."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(19, 11), gridspec_kw=dict(left=0.04, right=0.87, bottom=0.06, top=0.92, wspace=0.95))
    for axis, (section, rows) in zip(axes.flat, itertools.groupby(results, key=lambda pair: pair[0].section)):
        points: dict[tuple[float, float], list[str]] = {}
        for row, r in sorted(rows, key=lambda pair: pair[1].std):
            points.setdefault((round(r.bias, 6), round(r.std, 6)), []).append(row.name)
        axis.scatter(*zip(*points), s=40, zorder=3)
        axis.set_title(section)
        (low, high), free, line = axis.get_ylim(), 0.0, 0.05                                   # `free`: the column is taken up to here
        for i, ((bias, std), names) in enumerate(points.items()):
            above = line * sum(map(len, list(points.values())[i + 1:]))
            height = min(max((std - low) / (high - low), free + line * len(names) / 2), 1 - above - line * len(names) / 2)
            free = height + line * len(names) / 2
            axis.annotate("\n".join(names), (bias, std), (1.06, height), textcoords="axes fraction", va="center",
                          arrowprops=dict(arrowstyle="-", color="0.7", lw=0.8, relpos=(0, 0.5)))
    figure.suptitle("Gradient of one training step: distance of its mean from the exact gradient, and its spread", fontsize=14)
    figure.supxlabel("bias / |exact|")
    figure.supylabel("standard deviation / |exact|", x=0.004)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main(cfg: Config) -> None:
    with float64():
        settings = make_settings(cfg)
        n, m = len(settings["on"][0].rewards), len(settings["on"][0].chosen)
        print(f"{n} trajectories; {n ** cfg.group_size:,} steps of {cfg.group_size} rollouts are {m:,} multisets")
        rows = list(all_rows() if cfg.all else chosen_rows())
        results = [(row, measure(*settings[row.setting], row)) for row in track(rows, transient=True)]
    Console(width=120).print(report(results))
    if not cfg.all:
        draw(results, cfg.figure)
        print(f"figure: {cfg.figure}")


if __name__ == "__main__":
    torch.set_num_threads(1)                                                                   # the tensors are small
    main(tyro.cli(Config))
