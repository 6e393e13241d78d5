"""trainer.py owns the models under training: sharding, logprobs, values, micro-batches, optimizers, reference, checkpoints.

It knows no rollouts and no rewards, and does not choose an estimator: it is given a Batch. `Trainer` is the driver's
handle; the work is done by N `Rank` actors (Ray) under FSDP2, one a GPU, or gloo processes on a CPU. Master weights
and gradients are float32, the forward runs in the run's dtype.

Letters: B rows and T tokens of the batch, b rows and t tokens of a micro-batch, N ranks, V vocabulary.
Sources: FSDP2 is torch.distributed.fsdp.fully_shard; models and sharding plans are NVIDIA NeMo AutoModel's.
"""

import asyncio
import io
import json
import os
import pickle
import shutil
from collections import defaultdict
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import ray
import torch
import torch.nn.functional as F
from torch import Tensor

from agent import UNSAID, Vision, load_vision, picture
from estimators import PER_ROLLOUT, Batch
from losses import LossConfig, critic_step_loss, step_loss


# ---------------------------------------------------------------------------------------------------- configuration
@dataclass(frozen=True)
class TrainerConfig:
    """How the policy is trained."""

    trainers: int = 1                  # N, ranks that share the policy (FSDP2)
    learning_rate: float = 3e-4        # peak learning rate of AdamW
    critic_learning_rate: float = 1e-3   # that of the critic (gae)
    warmup_steps: int = 10             # optimizer steps of linear warm-up
    decay: Literal["constant", "linear", "cosine"] = "linear"   # what the learning rate does after the warm-up, to 0 at the last step
    beta1: float = 0.9                 # AdamW
    beta2: float = 0.95                # AdamW
    weight_decay: float = 0.0          # AdamW, decoupled
    max_grad_norm: float = 1.0         # gradients are scaled down to this L2 norm
    epochs: int = 1                    # passes over each batch
    minibatches: int = 1               # optimizer steps a pass
    tokens_per_microbatch: int = 16384   # rows times longest row of one forward and backward, tokens
    activation_checkpointing: bool = False   # recompute activations in the backward: less memory, more time
    ref: str | None = None             # reference policy of a KL (None = the run's starting model), or the teacher to distill from
    critic: str | None = None          # model that the critic starts from, with a new head (gae); None = the run's starting model

    def __post_init__(self):
        for name in ("trainers", "epochs", "minibatches", "tokens_per_microbatch"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: want at least 1.")

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps a batch."""
        return self.epochs * self.minibatches


# ---------------------------------------------------------------------------------------------------- splitting a batch
def plan_microbatches(batch: Batch, rows: Tensor, ranks: int, budget: int) -> list[list[list[int]]]:
    """Rows -> for each rank a list of micro-batches (lists of rows), as many on every rank; an idle one is empty.

    A rollout's segments stay together (sequence ratios need them). Longest first, dealt to the ranks in turn, so ranks
    carry like loads and a micro-batch (rows times its longest row <= budget, tokens) has little padding.
    """
    members = defaultdict(list)
    for row in rows.tolist():
        members[int(batch.rollout[row])].append(row)
    lengths = batch.lengths.tolist()
    rollouts = sorted(members.values(), key=lambda m: (-max(lengths[r] for r in m), m[0]))
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    for i, member in enumerate(rollouts):
        lap, place = divmod(i, ranks)
        mine = plan[place if lap % 2 == 0 else ranks - 1 - place]      # there and back: no rank always gets the longest
        longest = max(lengths[r] for r in (mine[-1] if mine else []) + member)
        if not mine or (len(mine[-1]) + len(member)) * longest > budget:
            mine.append([])
        mine[-1].extend(member)
    most = max(len(mine) for mine in plan)
    return [mine + [[] for _ in range(most - len(mine))] for mine in plan]


def take_rows(batch: Batch, rows: list[int]) -> Batch:
    """The given rows, cut to their longest. An empty list gives one row of weight 0: every rank must join each collective."""
    idle, rows = not rows, torch.tensor(rows or [int(batch.lengths.argmin())])
    longest = int(batch.lengths[rows].max())
    cut = {}
    for f in fields(batch):
        value = getattr(batch, f.name)
        if isinstance(value, Tensor) and f.name not in PER_ROLLOUT:
            value = value[rows, :longest] if value.dim() == 2 else value[rows]
        elif f.name == "images" and value is not None:
            value = [value[row] for row in rows.tolist()]
        cut[f.name] = value
    small = Batch(**cut)
    return replace(small, response_mask=torch.zeros_like(small.response_mask), loss_weight=torch.zeros_like(small.loss_weight)) if idle else small


# ---------------------------------------------------------------------------------------------------- forward
def align(states: Tensor, first: int) -> Tensor:
    """What the states of columns first-1 .. t-2 say, [b, t-first], -> [b, t], 0 before `first`.

    This is the one place where the shift happens: column t of the result is about token t and comes from the state
    before it, whether logprob, entropy or value (V_t does not know token t).
    """
    return F.pad(states, (first, 0))


def head_columns(batch: Batch, device: torch.device) -> tuple[Tensor, int]:
    """(token ids [b, t], first response column): the states before it are of no use to anybody."""
    response = batch.response_mask.any(0).nonzero()
    first = max(int(response[0]) if len(response) else batch.token_ids.shape[1] - 1, 1)
    return batch.token_ids.to(device).long(), first


def with_images(vision: Vision, token_ids: Tensor, files: list[bytes]) -> dict:
    """What the model is given: token ids [b, t] and the pixels of the images they show, as its own processor makes them.

    A batch that shows none gets a further row with a blank image: each rank of FSDP2 must join the gathers of the vision
    tower, and each parameter have a gradient, if only of 0. The tower is trained like the rest.
    """
    if not files:
        import PIL.Image

        PIL.Image.new("RGB", (64, 64), "white").save(blank := io.BytesIO(), format="PNG")
        files = [blank.getvalue()]
        row = torch.tensor([vision.expansion(files[0])], device=token_ids.device)
        width = max(row.shape[1], token_ids.shape[1])
        token_ids = torch.cat([F.pad(ids, (0, width - ids.shape[1])) for ids in (token_ids, row)])
    seen = dict(vision.processor(images=[picture(file) for file in files], return_tensors="pt").to(token_ids.device))
    if "mm_token_type_ids" in vision.processor.model_input_names:                  # where an image's rows and columns have positions of their own
        seen["mm_token_type_ids"] = (token_ids == vision.token).int()
    return {"input_ids": token_ids} | seen


def forward(model, batch: Batch, device: torch.device, entropy: bool = False, vision: Vision | None = None) -> tuple[Tensor, Tensor | None]:
    """logprobs (and entropy), nats, [b, t] of the batch's tokens, exact on response tokens; float32 whatever the compute dtype.

    Rows are padded on the right, so causal attention needs no mask. The head runs only from the first response column on.
    `vision`: that of a vision-language model, needed for every batch of one.
    """
    token_ids, first = head_columns(batch, device)                                 # [b, t]
    keep = torch.arange(first - 1, token_ids.shape[1] - 1, device=device)
    seen = with_images(vision, token_ids, [file for row in batch.images or [] for file in row]) if vision else {"input_ids": token_ids}
    logits = model(**seen, use_cache=False, logits_to_keep=keep).logits[: len(token_ids)].float() / batch.temperature   # [b, t-first, V]
    if vision:
        logits[..., vision.token] += UNSAID / batch.temperature
    targets = token_ids[:, first:]                                                 # [b, t-first]
    logprobs = -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    h = align(torch.distributions.Categorical(logits=logits).entropy(), first) if entropy else None   # [b, t]
    return align(logprobs, first), h                                               # [b, t]


def forward_values(model, batch: Batch, device: torch.device) -> Tensor:
    """V_t [b, t], units of reward: what the critic expects from token t on, told only what stands before it."""
    token_ids, first = head_columns(batch, device)                                 # [b, t]
    values = model(input_ids=token_ids, use_cache=False).logits[..., 0].float()    # [b, t]
    return align(values[:, first - 1: -1], first)                                  # [b, t]


# ---------------------------------------------------------------------------------------------------- model
def load_model(path: str, dtype: torch.dtype, device: torch.device, activation_checkpointing: bool = False, critic: bool = False, vision: bool = False):
    """The model at `path` with float32 master weights, sharded by FSDP2 over all ranks, computing in `dtype`.

    GPU: AutoModel's own classes. CPU: transformers' class under AutoModel's parallelizer (its loader wants a CUDA device).
    `critic`: the same backbone under a new head with one output a token (a token classifier of one label), transformers'
    class everywhere: AutoModel would take its causal model for it.
    AutoModel does not shard one rank, which would also drop the dtype policy: there fully_shard is called here, so that
    compute dtype, checkpoint and publish are one code at every number of ranks.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    head = {"num_labels": 1} if critic else {}
    setup = None
    if device.type == "cuda" or dist.get_world_size() > 1:
        from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config

        setup = DistributedSetup.build(FSDP2Config(mp_policy=policy), activation_checkpointing=activation_checkpointing)
    if device.type == "cuda" and not critic:
        from nemo_automodel import NeMoAutoModelForCausalLM, NeMoAutoModelForImageTextToText

        model = (NeMoAutoModelForImageTextToText if vision else NeMoAutoModelForCausalLM).from_pretrained(path, torch_dtype=torch.float32, distributed_setup=setup, attn_implementation="sdpa")
    else:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForTokenClassification

        model = (AutoModelForTokenClassification if critic else AutoModelForImageTextToText if vision else AutoModelForCausalLM).from_pretrained(path, dtype=torch.float32, **head).to(device)
        if dist.get_world_size() > 1:
            from nemo_automodel.components.distributed.model_parallelizer import parallelize_model

            model = parallelize_model(model, setup.mesh_context)
    if dist.get_world_size() == 1:
        if activation_checkpointing and (device.type == "cpu" or critic):     # AutoModel's loader has done it for its own
            model.gradient_checkpointing_enable()
        mesh = init_device_mesh(device.type, (1,))
        lists = [m for m in model.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.ModuleDict))]
        inner = {m for outer in lists for m in outer.modules() if m is not outer}
        for layer in (layer for layers in lists if layers not in inner for layer in layers.children()):      # of the language model, and of its vision tower
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    assert all(p.dtype == torch.float32 for p in model.parameters()), "master weights must be float32"
    return model.train(activation_checkpointing)      # else as in eval: dropout would make the forward another model's


def rank_memory(parameters: int, config, cfg: TrainerConfig, ref: bool, critic: bool) -> float:
    """GB that a lone rank needs at most: for a check before anything is loaded.

    16 bytes a parameter (float32 master, gradient, two moments; a reference: 4), 14 a logit of a micro-batch (float32
    and its gradients, bfloat16), 34 a token, layer and hidden unit of activations (arXiv:2205.05198, eq. 2, without
    the attention scores, which are never kept; 2 when recomputed), 3 GB for CUDA, a layer's gathered weights and the transfer's buffer.
    """
    text, tokens = config.get_text_config(), cfg.tokens_per_microbatch
    states = parameters * (16 + 4 * ref + 16 * critic)
    activations = tokens * text.num_hidden_layers * text.hidden_size * (2 if cfg.activation_checkpointing else 34)
    return (states + tokens * text.vocab_size * 14 + activations) / 2**30 + 3


def learning_rate(cfg: TrainerConfig, total: int, step: int) -> float:
    """Factor on the peak learning rate at optimizer step `step` (from 0) of `total`: linear warm-up, then --decay."""
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    left = 1 - min(1.0, (step - cfg.warmup_steps) / max(1, total - cfg.warmup_steps))
    return {"constant": 1.0, "linear": left, "cosine": 0.5 * (1 + torch.cos(torch.tensor(torch.pi * (1 - left))).item())}[cfg.decay]


class Learner:
    """A sharded model with its optimizer and learning-rate schedule: the policy, or the critic."""

    def __init__(self, model, rate: float, cfg: TrainerConfig, steps: int):
        self.model, self.max_norm = model, cfg.max_grad_norm
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(cfg.beta1, cfg.beta2), weight_decay=cfg.weight_decay)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: learning_rate(cfg, steps * cfg.optimizer_steps, step))

    def step(self) -> tuple[float, float]:
        """One AdamW step on the gradients that are there; returns (their norm before clipping, learning rate)."""
        norm = whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm))
        if not torch.isfinite(norm):
            raise ValueError(f"The gradient norm is {norm.item()}: the model has diverged or a logprob is not finite. Lower the learning rate; resume from the last checkpoint.")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        rate = self.scheduler.get_last_lr()[0]
        self.scheduler.step()
        return float(norm), rate

    def state(self) -> dict:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()["last_epoch"]}

    def load_state(self, state: dict) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(self.scheduler.state_dict() | {"last_epoch": state["scheduler"]})
        self.scheduler._last_lr = [g["lr"] for g in self.optimizer.param_groups]


# ---------------------------------------------------------------------------------------------------- rank
@ray.remote(max_restarts=0)
class Rank:
    """One FSDP2 rank: its shard of the policy and, if asked for, of the reference policy and of the critic."""

    def __init__(self, rank: int, world: int, model: str, cfg: TrainerConfig, loss: LossConfig, device: str, dtype: str, steps: int, seed: int):
        self.rank, self.world, self.path, self.cfg, self.loss, self.steps, self.seed = rank, world, model, cfg, loss, steps, seed
        self.dtype = getattr(torch, dtype)
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")

    def address(self) -> tuple[str, int]:
        """This node and a free port on it, for the ranks' rendezvous."""
        import socket

        with socket.socket() as s:
            s.bind(("", 0))
            return ray.util.get_node_ip_address(), s.getsockname()[1]

    def start(self, address: str, port: int, ref: bool, critic: bool) -> int:
        """Join the process group, load and shard; returns the number of parameters of the policy."""
        import torch.distributed as dist

        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), RANK=str(self.rank), WORLD_SIZE=str(self.world), LOCAL_RANK="0")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group("cuda:nccl,cpu:gloo" if self.device.type == "cuda" else "gloo")
        torch.manual_seed(self.seed)                             # the critic's new head is the same on every rank
        cfg, recompute = self.cfg, self.cfg.activation_checkpointing
        self.vision = load_vision(self.path)
        self.model = load_model(self.path, self.dtype, self.device, recompute, vision=bool(self.vision))
        self.policy = Learner(self.model, cfg.learning_rate, cfg, self.steps)
        self.ref = load_model(cfg.ref or self.path, self.dtype, self.device, vision=bool(self.vision)).eval() if ref else None
        value_model = load_model(cfg.critic or self.path, self.dtype, self.device, recompute, critic=True) if critic else None
        self.critic = Learner(value_model, cfg.critic_learning_rate, cfg, self.steps) if critic else None
        return sum(p.numel() for p in self.model.parameters())

    @torch.no_grad()
    def per_token(self, batch: Batch, microbatches: list[list[int]], what: str) -> list[Tensor]:
        """One number for each response token, [b, t] a micro-batch, 0 elsewhere: log p under the policy or the reference, or the value."""
        out = []
        for rows in microbatches:
            small = take_rows(batch, rows)
            if what == "values":
                numbers = forward_values(self.critic.model, small, self.device)
            else:
                numbers, _ = forward(self.ref if what == "ref_logprobs" else self.model, small, self.device, vision=self.vision)
            out.append(numbers.cpu() * small.response_mask)
        return out

    def update(self, batch: Batch, plan: list[list[list[int]]], kind: str) -> dict[str, tuple[float, float]]:
        """All optimizer steps of one batch: for each epoch and minibatch, its micro-batches, then one AdamW step.

        `kind` is a key of POLICY_LOSSES, or "value" for the critic.
        """
        learner, prefix = (self.critic, "critic_") if kind == "value" else (self.policy, "")
        metrics: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for microbatches in plan * self.cfg.epochs:
            for rows in microbatches:
                small = take_rows(batch, rows)
                if kind == "value":
                    values = forward_values(learner.model, small, self.device)
                    loss, seen = critic_step_loss(values, to_device(small, self.device), self.loss)
                else:
                    logprobs, entropy = forward(learner.model, small, self.device, entropy=bool(self.loss.entropy_coef), vision=self.vision)
                    loss, seen = step_loss(logprobs, entropy, to_device(small, self.device), self.loss, kind)
                (loss * self.world).backward()                 # FSDP2 takes the mean over ranks, the loss is a sum over them
                metrics[prefix + "loss"][0] += float(loss.detach())
                for name, (total, count) in seen.items():
                    metrics[name][0] += float(total)
                    metrics[name][1] += float(count)
            norm, rate = learner.step()
            metrics[prefix + "grad_norm"][0] += norm / self.world
            metrics[prefix + "grad_norm"][1] += 1 / self.world
            metrics[prefix + "learning_rate"] = [rate / self.world, 1 / self.world]
        metrics[prefix + "loss"][1] = len(plan) * self.cfg.epochs / self.world      # a sum over micro-batches and ranks, a mean over optimizer steps
        return {name: tuple(pair) for name, pair in metrics.items()}

    # ---- publish
    def open_transfer(self, backend: str, engines: list, workers_per_engine: int, address: str) -> None:
        """Join the engines' transfer group (rank 0 sends)."""
        from weight_sync import PolicySource, open_transfer

        tied = backend == "gloo" and self.model.config.tie_word_embeddings
        source = PolicySource(self.model, self.dtype, tied_head=tied)
        self.sender = open_transfer(backend, self.rank, source, engines, workers_per_engine, address)

    def send_weights(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()                       # the transfer reads on streams of its own: the optimizer must have written
        with torch.no_grad():
            self.sender.send_weights()

    # ---- checkpoints
    def learners(self) -> dict[str, Learner]:
        return {"policy": self.policy} | ({"critic": self.critic} if self.critic else {})

    def save(self, path: str) -> None:
        """Models, optimizers and schedules as a distributed checkpoint: any number of ranks may load it."""
        import torch.distributed.checkpoint as dcp

        dcp.save({name: learner.state() for name, learner in self.learners().items()}, checkpoint_id=path)
        torch.save(torch.get_rng_state(), Path(path) / f"rng_{self.rank}.pt")

    def load(self, path: str) -> None:
        import torch.distributed.checkpoint as dcp

        state = {name: learner.state() for name, learner in self.learners().items()}
        dcp.load(state, checkpoint_id=path)
        for name, learner in self.learners().items():
            learner.load_state(state[name])
        rng = Path(path) / f"rng_{self.rank}.pt"
        if rng.exists():
            torch.set_rng_state(torch.load(rng))

    def export(self, path: str) -> None:
        """Hugging Face layout (config, safetensors, tokenizer, generation config) in the dtype the model came in."""
        from weight_sync import PolicySource

        tensors = {}
        for name, tensor in PolicySource(self.model, torch.float32, tied_head=False):     # every rank joins each gather, rank 0 keeps it
            if self.rank == 0:
                tensors[name] = tensor.cpu()
        if self.rank:
            return
        from huggingface_hub import save_torch_state_dict
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        dtype = AutoConfig.from_pretrained(self.path).dtype or torch.float32
        Path(path).mkdir(parents=True, exist_ok=True)
        save_torch_state_dict({name: tensor.to(dtype) for name, tensor in tensors.items()}, path)
        AutoConfig.from_pretrained(self.path).save_pretrained(path)
        (self.vision.processor if self.vision else AutoTokenizer.from_pretrained(self.path)).save_pretrained(path)
        if Path(self.path, "generation_config.json").exists():
            GenerationConfig.from_pretrained(self.path).save_pretrained(path)

    def parameters(self) -> dict[str, Tensor]:
        """Whole parameters by name, for tests and audits."""
        return {name: whole(p) for name, p in self.model.named_parameters()}

    def moments(self) -> dict[str, Tensor]:
        """Whole first moments of AdamW by parameter name; after the first step (1 - beta1) times the clipped gradient."""
        state = self.policy.optimizer.state
        return {name: whole(state[p]["exp_avg"]) for name, p in self.model.named_parameters() if p in state}


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor gathered (a collective), or a plain one, on the CPU."""
    return (tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor).detach().cpu()


def to_device(batch: Batch, device: torch.device) -> Batch:
    return replace(batch, **{f.name: getattr(batch, f.name).to(device) for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)})


# ---------------------------------------------------------------------------------------------------- driver's handle
class Trainer:
    """The policy as the loop sees it (and its reference and critic): logprobs, values, update, save, ...; every call is awaited."""

    def __init__(self, model: str, cfg: TrainerConfig, loss: LossConfig, device: str, dtype: str, steps: int, seed: int, options: list[dict],
                 ref: bool = False, critic: bool = False):
        self.cfg, self.with_ref, self.with_critic = cfg, ref, critic
        self.ranks = [Rank.options(**own).remote(rank, cfg.trainers, model, cfg, loss, device, dtype, steps, seed) for rank, own in enumerate(options)]   # a rank's own

    async def _all(self, method: str, *args) -> list:
        return await asyncio.gather(*[getattr(rank, method).remote(*args) for rank in self.ranks])

    async def start(self) -> int:
        """Load everywhere; returns the number of parameters."""
        self.address, port = await self.ranks[0].address.remote()
        return (await self._all("start", self.address, port, self.with_ref, self.with_critic))[0]

    async def logprobs(self, batch: Batch) -> Tensor:
        """log p of every response token under the current policy, [B, T], nats; 0 elsewhere."""
        return await self.per_token(batch, "logprobs")

    async def ref_logprobs(self, batch: Batch) -> Tensor:
        """The same under the reference policy or teacher."""
        return await self.per_token(batch, "ref_logprobs")

    async def values(self, batch: Batch) -> Tensor:
        """The critic's V_t of every response token, [B, T], units of reward; 0 elsewhere."""
        return await self.per_token(batch, "values")

    async def per_token(self, batch: Batch, what: str) -> Tensor:
        plan = plan_microbatches(batch, torch.arange(len(batch.lengths)), len(self.ranks), self.cfg.tokens_per_microbatch)
        stored = ray.put(batch)
        results = await asyncio.gather(*[rank.per_token.remote(stored, mine, what) for rank, mine in zip(self.ranks, plan)])
        out = torch.zeros(batch.response_mask.shape)
        for mine, pieces in zip(plan, results):
            for rows, piece in zip(mine, pieces):
                if rows:
                    out[torch.tensor(rows), : piece.shape[1]] = piece
        return out                                                                 # [B, T]

    async def update(self, batch: Batch, kind: str) -> dict[str, float]:
        """One batch's optimizer steps of the policy with POLICY_LOSSES[kind], or of the critic ("value"); metrics, each a sum over a count."""
        steps = int(batch.minibatch.max()) + 1
        plans = [plan_microbatches(batch, (batch.minibatch == m).nonzero()[:, 0], len(self.ranks), self.cfg.tokens_per_microbatch) for m in range(steps)]
        stored = ray.put(batch)
        seen = await asyncio.gather(*[rank.update.remote(stored, [plan[i] for plan in plans], kind) for i, rank in enumerate(self.ranks)])
        totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for name, (total, count) in (item for metrics in seen for item in metrics.items()):      # by name: ranks may have seen different ones
            totals[name] = [totals[name][0] + total, totals[name][1] + count]
        return {name: total / max(count, 1e-12) for name, (total, count) in totals.items()}

    async def open_transfer(self, backend: str, engines: list, workers_per_engine: int) -> None:
        await self._all("open_transfer", backend, engines, workers_per_engine, self.address)

    async def send_weights(self) -> None:
        await self._all("send_weights")

    async def save(self, path: Path, extra: dict, pool: dict) -> None:
        """Write a checkpoint directory as a whole: it gets its final name only when everything is in it."""
        unfinished = path.with_name(path.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        await self._all("save", str(unfinished / "trainer"))
        (unfinished / "pool.pkl").write_bytes(pickle.dumps(pool))
        (unfinished / "run.json").write_text(json.dumps(extra, indent=1))
        shutil.rmtree(path, ignore_errors=True)
        unfinished.rename(path)

    async def load(self, path: Path) -> tuple[dict, dict]:
        """Load a finished checkpoint; returns what `save` was given as `extra` and as `pool`."""
        await self._all("load", str(path / "trainer"))
        return json.loads((path / "run.json").read_text()), pickle.loads((path / "pool.pkl").read_bytes())

    async def export(self, path: Path) -> None:
        await self._all("export", str(path))
