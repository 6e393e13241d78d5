"""trainer.py owns the models under training: sharding, logprobs, values, micro-batches, optimizers, reference, checkpoints.

It knows no rollouts and no rewards, and does not choose an estimator: it is given a Batch. `Trainer` is the driver's
handle; the work is done by N `Rank` actors (Ray) under FSDP2, one a GPU, or gloo processes on a CPU. Master weights
and gradients are float32, the forward runs in the run's dtype.

Sizes: the N ranks are a mesh of dp_replicate x dp_shard x cp x tp, tp innermost. The tp x cp ranks of one data-parallel
place are given the same rows: tp splits the matrices, cp the columns of each row; ep deals a mixture's experts to the
ranks, whatever their rows. FSDP2 shards over dp_shard x cp, and copies over dp_replicate.

Letters: B rows and T tokens of the batch, b rows and t tokens of a micro-batch, N ranks, D = N / (tp x cp) data-parallel
places, V vocabulary.
Sources: FSDP2 is torch.distributed.fsdp.fully_shard; models and sharding plans are NVIDIA NeMo AutoModel's.
"""

import asyncio
import gc
import json
import os
import pickle
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import ray
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from agent import UNSAID, Vision, blank_image, load_vision, picture
from estimators import PER_ROLLOUT, Batch
from losses import LossConfig, critic_step_loss, step_loss


# ---------------------------------------------------------------------------------------------------- configuration
@dataclass(frozen=True)
class TrainerConfig:
    """How the policy is trained."""

    trainers: int = 1                  # N, ranks that share the policy (FSDP2)
    tp_size: int = 1                   # ranks that split each matrix (tensor parallel), vocabulary included; given the same rows
    cp_size: int = 1                   # ranks that split the columns of each row (context parallel), on GPUs; given the same rows
    ep_size: int = 1                   # ranks that share out a mixture's experts (expert parallel), on GPUs
    dp_replicate_size: int = 1         # copies of the sharded policy (hybrid sharding): gradients are averaged over them
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
    offload_optimizer: bool = False    # master weights, gradients and moments in CPU memory, where the optimizer steps: less GPU memory, more time
    ref: str | None = None             # reference policy of a KL (None = the run's starting model), or the teacher to distill from
    critic: str | None = None          # model that the critic starts from, with a new head (gae); None = the run's starting model

    def __post_init__(self):
        for name in ("trainers", "tp_size", "cp_size", "ep_size", "dp_replicate_size", "epochs", "minibatches", "tokens_per_microbatch"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: want at least 1.")
        if self.trainers % self.same_rows or self.trainers % self.ep_size:
            raise ValueError(f"--trainers {self.trainers} is no multiple of --tp-size {self.tp_size} times --cp-size {self.cp_size}, or not of --ep-size {self.ep_size}. Change --trainers.")
        if self.places % self.dp_replicate_size or 1 < self.dp_replicate_size == self.places:
            raise ValueError(f"--dp-replicate-size {self.dp_replicate_size}: --trainers {self.trainers} leaves {self.places} data-parallel ranks (after --tp-size and --cp-size); "
                             "each copy wants at least 2 of them, all as many. Use more --trainers, or a smaller --dp-replicate-size.")
        if self.ep_size > 1 and (self.same_rows > 1 or self.dp_replicate_size > 1 or self.offload_optimizer):
            raise ValueError(f"--ep-size {self.ep_size} goes with plain data parallelism only: leave out --tp-size, --cp-size, --dp-replicate-size and --offload-optimizer. "
                             "AutoModel has no tensor-parallel plan for attention beside expert parallelism, and its experts lie outside FSDP2's offload.")

    @property
    def same_rows(self) -> int:
        """Ranks of one data-parallel place: they are given the same rows."""
        return self.tp_size * self.cp_size

    @property
    def places(self) -> int:
        """D, data-parallel places: each is given rows of its own."""
        return self.trainers // self.same_rows

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps a batch."""
        return self.epochs * self.minibatches


# ---------------------------------------------------------------------------------------------------- splitting a batch
def plan_microbatches(batch: Batch, rows: Tensor, ranks: int, budget: int) -> list[list[list[int]]]:
    """Rows -> for each data-parallel rank a list of micro-batches (lists of rows), as many on every rank; an idle one is empty.

    A rollout's segments stay together (sequence ratios need them). Longest first, dealt to the ranks in turn, so ranks
    carry like loads and a micro-batch (rows times its longest row <= budget, tokens) has little padding.
    """
    members, owner, lengths = defaultdict(list), batch.rollout.tolist(), batch.lengths.tolist()
    for row in rows.tolist():
        members[owner[row]].append(row)
    rollouts = sorted(members.values(), key=lambda m: (-max(lengths[r] for r in m), m[0]))
    plan: list[list[list[int]]] = [[] for _ in range(ranks)]
    longest = [0] * ranks                                              # row of each rank's open micro-batch: of its first rollout
    for i, member in enumerate(rollouts):
        lap, place = divmod(i, ranks)
        rank = place if lap % 2 == 0 else ranks - 1 - place            # there and back: none always gets the longest
        if not plan[rank] or (len(plan[rank][-1]) + len(member)) * longest[rank] > budget:
            plan[rank].append([])
            longest[rank] = max(lengths[r] for r in member)
        plan[rank][-1].extend(member)
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
        elif isinstance(value, list):
            value = [value[row] for row in rows.tolist()]
        cut[f.name] = value
    small = Batch(**cut)
    return replace(small, response_mask=torch.zeros_like(small.response_mask), loss_weight=torch.zeros_like(small.loss_weight), routed_experts=None) if idle else small


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


def forward(model, batch: Batch, device: torch.device, entropy: bool = False, split: "SplitRows | None" = None, vision: Vision | None = None) -> tuple[Tensor, Tensor | None]:
    """logprobs (and entropy), nats, [b, t] of the batch's tokens, exact on response tokens; float32 whatever the compute dtype.

    Rows are padded on the right, so causal attention needs no mask. The head runs only from the first response column on.
    `split`: this rank computes its share of the columns only (context parallel), and has the others' results from them.
    `vision`: that of a vision-language model, needed for every batch of one.
    """
    token_ids, first = head_columns(batch, device)                                 # [b, t]
    if split:
        inputs, keep, targets, whole_rows = split(model, token_ids, first)
    else:
        inputs = with_images(vision, token_ids, [file for row in batch.images or [] for file in row]) if vision else {"input_ids": token_ids}
        keep = torch.arange(first - 1, token_ids.shape[1] - 1, device=device)
        targets, whole_rows = token_ids[:, first:], lambda states: states          # [b, t-first]
    logits = model(**inputs, use_cache=False, logits_to_keep=keep).logits          # [b, t-first, V], in the compute dtype
    if vision:
        logits = logits[: len(token_ids)]
    logits, group = (logits.to_local(), logits.device_mesh.get_group()) if isinstance(logits, DTensor) else (logits, None)
    logprobs, h = TokenScores.apply(logits.flatten(0, 1), targets.flatten(), batch.temperature, entropy, vision.token if vision else None, group)
    return align(whole_rows(logprobs.view(targets.shape)), first), align(whole_rows(h.view(targets.shape)), first) if entropy else None   # [b, t]


class TokenScores(torch.autograd.Function):
    """(log p of the targets, entropy or None), nats, float32 [n], from logits [n, V] of any dtype, which are divided by the temperature in float32.

    FLOAT_LOGITS at a time, in the backward too: neither the logits nor their gradient are ever whole in float32.
    `group`: ranks that hold a part of the vocabulary each, V / tp in order (tensor parallel); only numbers a token cross between them, and each has the gradient of its part.
    `unsaid`: Vision.token or None. d log p / d logit = (onehot - p) / T, d entropy / d logit = -p (log p + entropy) / T.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, temperature: float, entropy: bool, unsaid: int | None, group) -> tuple[Tensor, Tensor | None]:
        def of_all_ranks(numbers: Tensor, op=dist.ReduceOp.SUM) -> Tensor:
            if group:
                dist.all_reduce(numbers, op, group)
            return numbers

        place = targets - (logits.shape[-1] * dist.get_rank(group) if group else 0)   # [n] of the target in this rank's part
        mine = (place >= 0) & (place < logits.shape[-1])
        ctx.how, place = (temperature, unsaid), place.clamp(0, logits.shape[-1] - 1)[:, None]
        log_p, most, total, mean = (torch.zeros(len(targets), device=logits.device) for _ in range(4))   # [n]
        for rows in TokenScores.pieces(logits):
            most[rows] = of_all_ranks(TokenScores.said(logits[rows], unsaid).amax(-1).float(), dist.ReduceOp.MAX)
            x = TokenScores.scaled(logits[rows], most[rows], *ctx.how)                 # [r, V]
            log_p[rows] = of_all_ranks(torch.where(mine[rows], x.gather(1, place[rows])[:, 0], 0))
            weight = x.exp() if entropy else x.exp_()                                  # [r, V]  p times `total`
            total[rows] = of_all_ranks(weight.sum(-1))
            if entropy:
                mean[rows] = of_all_ranks(weight.mul_(x.clamp_(min=NEVER)).sum(-1)) / total[rows]    # of x under p
        log_p, h = log_p - total.log(), total.log() - mean if entropy else None
        ctx.save_for_backward(logits, place, mine, most, total, log_p, h)
        return log_p, h

    @staticmethod
    def backward(ctx, g: Tensor, g_h: Tensor | None) -> tuple:
        logits, place, mine, most, total, log_p, h = ctx.saved_tensors
        temperature, scale = ctx.how[0], -1 / (total * ctx.how[0])[:, None]            # [n, 1]
        gradient, of_target = torch.empty_like(logits), -g * log_p.expm1()             # [n, V]; [n]  g (1 - p)
        for rows in TokenScores.pieces(logits):
            x = TokenScores.scaled(logits[rows], most[rows], *ctx.how)                 # [r, V]
            if h is None:
                torch.mul(x.exp_(), g[rows, None] * scale[rows], out=gradient[rows])   # in the dtype of the logits
            else:                                                                      # log p + h = x - log(total) + h
                p = x.exp().mul_(scale[rows])
                torch.mul(p, x.clamp_(min=NEVER).add_((h - total.log())[rows, None]).mul_(g_h[rows, None]).add_(g[rows, None]), out=gradient[rows])
        if h is not None:
            of_target = of_target - log_p.exp() * (log_p.clamp(min=NEVER) + h) * g_h
        of_target = torch.where(mine, (of_target / temperature).to(gradient.dtype), gradient.gather(1, place)[:, 0])
        return gradient.scatter_(1, place, of_target[:, None]), None, None, None, None, None

    @staticmethod
    def pieces(logits: Tensor) -> list[slice]:
        size = max(1, FLOAT_LOGITS // logits.shape[-1])
        return [slice(begin, begin + size) for begin in range(0, len(logits), size)]

    @staticmethod
    def said(logits: Tensor, unsaid: int | None) -> Tensor:
        """The logits, or a float32 copy with that of `unsaid` lowered."""
        if unsaid is not None:
            logits = logits.to(torch.float32, copy=True)
            logits[:, unsaid] += UNSAID
        return logits

    @staticmethod
    def scaled(logits: Tensor, most: Tensor, temperature: float, unsaid: int | None) -> Tensor:
        """(logits - most) / T in float32, in one pass."""
        return torch.add(most[:, None] / -temperature, TokenScores.said(logits, unsaid), alpha=1 / temperature)


FLOAT_LOGITS = 1 << 26                 # that are in float32 at once
NEVER = -1e4                           # log of a chance that is 0 in float32: keeps 0 log 0 = 0 where a logit is -inf


@dataclass
class SplitRows:
    """Context parallelism of one forward and backward: each rank of the group has its share of every row's columns, in AutoModel's load-balanced order.

    `until_backward` keeps AutoModel's ring attention in place: it must be open through the backward.
    """

    mesh: "torch.distributed.DeviceMesh"
    until_backward: ExitStack

    def __call__(self, model, token_ids: Tensor, first: int) -> tuple[dict, Tensor, Tensor, Callable]:
        """(the model's inputs, this rank's columns that say something about a response, their targets, its results [b, kept] -> those of all, [b, t-first])."""
        from nemo_automodel.components.distributed.context_parallel.sharder import ContextParallelSharder

        columns = torch.arange(token_ids.shape[1], device=token_ids.device).expand(token_ids.shape)
        inputs = {"input_ids": token_ids.clone(), "labels": token_ids.roll(-1, 1), "position_ids": columns.clone()}   # sharded in place, column t with token t+1
        sharder = ContextParallelSharder(model, self.mesh, inputs)
        context, inputs = sharder.shard(inputs)
        self.until_backward.enter_context(context())
        targets, position = inputs.pop("labels"), inputs["position_ids"][0]                      # [b, t/cp], [t/cp]; padding has position 0
        own = torch.arange(len(position), device=position.device)
        told = (position >= first - 1) & (position < token_ids.shape[1] - 1)
        keep = own[told]

        def whole_rows(states: Tensor) -> Tensor:
            mine = torch.zeros(targets.shape, device=states.device).index_copy(1, keep, states)  # [b, t/cp]
            return sharder.gather_token_tensor(mine, trim=True)[:, first - 1: -1]

        return inputs, keep, targets[:, keep], whole_rows


def with_images(vision: Vision, token_ids: Tensor, files: list[bytes]) -> dict:
    """What the model is given: token ids [b, t] and the pixels of the images they show, as its own processor makes them.

    A batch that shows none gets a further row with a blank image: each rank of FSDP2 must join the gathers of the vision
    tower, and each parameter have a gradient, if only of 0. The tower is trained like the rest.
    """
    if not files:
        files = [blank_image()]
        row = torch.tensor([vision.expansion(files[0])], device=token_ids.device)
        width = max(row.shape[1], token_ids.shape[1])
        token_ids = torch.cat([F.pad(ids, (0, width - ids.shape[1])) for ids in (token_ids, row)])
    seen = dict(vision.processor(images=[picture(file) for file in files], return_tensors="pt").to(token_ids.device))
    if "mm_token_type_ids" in vision.processor.model_input_names:                  # where an image's rows and columns have positions of their own
        seen["mm_token_type_ids"] = (token_ids == vision.token).int()
    return {"input_ids": token_ids} | seen


def forward_values(model, batch: Batch, device: torch.device) -> Tensor:
    """V_t [b, t], units of reward: what the critic expects from token t on, told only what stands before it."""
    token_ids, first = head_columns(batch, device)                                 # [b, t]
    values = model(input_ids=token_ids, use_cache=False).logits[..., 0].float()    # [b, t]
    return align(values[:, first - 1: -1], first)                                  # [b, t]


# ---------------------------------------------------------------------------------------------------- routing replay
class Replay:
    """Says which experts a gate takes: those recorded for a token, or, where there are none, those it has just chosen.

    A gate of AutoModel asks the `apply` of its `router_replay` and weighs the experts it is told by its own scores, so that
    gradient flows into it as ever (arXiv:2510.11370). AutoModel's RouterReplay would take a -1 for an index, and drives all
    models of the process, reference included.
    """

    recorded: Tensor | None = None     # [n, k] experts of the n tokens of the forward, -1 = none; None = no replay
    tokens: Tensor | float = 0.0       # that had a record in the last forward
    differing: Tensor | float = 0.0    # share of their recorded experts that the gate itself would not have taken, summed over these tokens

    def apply(self, chosen: Tensor) -> Tensor:
        """Experts that the gate chose, [n, k] -> experts that it takes, [n, k]."""
        if self.recorded is None:
            return chosen
        if self.recorded.shape != chosen.shape:
            raise ValueError(f"The engine told {list(self.recorded.shape)} experts (tokens, top-k) and the trainer's gate chooses {list(chosen.shape)}. Use --routing-replay off.")
        known = self.recorded >= 0                                                 # [n, k]
        missed = known & (self.recorded[:, :, None] != chosen[:, None]).all(-1)    # [n, k]
        self.tokens, self.differing = known[:, 0].sum(), missed.float().mean(-1).sum()
        return torch.where(known, self.recorded, chosen)                           # [n, k]


def replay_handles(model) -> dict[int, Replay]:
    """A Replay on each gate of `model`, by the number of its layer among all layers, dense ones included. Raises ValueError where there is no gate."""
    gates = {int(re.search(r"\.(\d+)\.", name)[1]): gate for name, gate in model.named_modules() if hasattr(gate, "router_replay") and "mtp" not in name}
    if not gates:
        raise ValueError(f"--routing-replay: {type(model).__name__} has none of AutoModel's gates, so its experts cannot be chosen for it. Use --routing-replay off.")
    for gate in gates.values():
        gate.router_replay = Replay()
    return {layer: gate.router_replay for layer, gate in gates.items()}


@contextmanager
def replaying(handles: dict[int, Replay], batch: Batch, device: torch.device) -> Iterator[None]:
    """Forward passes over the batch take its recorded experts. It must last until after the backward, which runs checkpointed layers again."""
    recorded = recorded_experts(batch) if handles and batch.routed_experts else None                 # [b, t, layers, k]
    if recorded is not None:
        if recorded.shape[2] <= max(handles):
            raise ValueError(f"The engine told the experts of {recorded.shape[2]} layers; the trainer's model has a gate in layer {max(handles)}. Use --routing-replay off.")
        recorded = recorded.to(device).flatten(0, 1)                               # [b * t, layers, k]
        for layer, handle in handles.items():
            handle.recorded = recorded[:, layer].long()                            # [b * t, k]
    try:
        yield
    finally:
        for handle in handles.values():
            handle.recorded, handle.tokens, handle.differing = None, 0.0, 0.0


def route_metrics(handles: dict[int, Replay], batch: Batch) -> dict[str, tuple]:
    """Of the last forward, each as (sum, count) over tokens and layers: share of tokens with recorded experts, and share of these experts that the gates would not have taken."""
    tokens, differing = (sum(getattr(h, name) for h in handles.values()) for name in ("tokens", "differing"))
    return {"route_recorded_frac": (tokens, int(batch.lengths.sum()) * len(handles)), "route_differs_frac": (differing, tokens)}


def recorded_experts(batch: Batch) -> Tensor | None:
    """[b, t, layers, k] int16, -1 where none are known: padding, a row's last token, a record that is lost. None when no row has any."""
    rows = [fetch(record) for record in batch.routed_experts]
    shapes = {row.shape[1:] for row in rows if row is not None}
    if not shapes:
        return None
    out = torch.full((*batch.token_ids.shape, *shapes.pop()), -1, dtype=torch.int16)
    for i, row in enumerate(rows):
        if row is not None:
            out[i, : len(row)] = torch.tensor(row)
    return out


def fetch(record):
    """The array that a Ray reference stands for; None when it was lost with the agent worker that put it. Anything else as it is."""
    try:
        return ray.get(record) if isinstance(record, ray.ObjectRef) else record
    except ray.exceptions.ObjectLostError:
        return None


def store(record):
    return ray.put(record)


class WholePickler(pickle.Pickler):
    """Writes what a Ray reference stands for, since the reference ends with the run; loaded, it lies in the object store of the new one."""

    def reducer_override(self, value):
        return (store, (fetch(value),)) if isinstance(value, ray.ObjectRef) else NotImplemented


# ---------------------------------------------------------------------------------------------------- model
def load_model(path: str, dtype: torch.dtype, device: torch.device, cfg: TrainerConfig, critic: bool = False, trained: bool = True, vision: bool = False):
    """(model, its AutoModel mesh): the model at `path` with float32 master weights, sharded by FSDP2 over all ranks in the sizes of `cfg`, computing in `dtype`.

    GPU: AutoModel's own classes (under context parallelism transformers' class, as AutoModel's attention would need
    Transformer Engine there). CPU: transformers' class under AutoModel's parallelizer (its loader wants a CUDA device).
    `critic`: the same backbone under a new head with one output a token (a token classifier of one label), transformers'
    class everywhere: AutoModel would take its causal model for it. It is sharded over all ranks, whatever the sizes:
    ranks of one data-parallel place then compute the same values, and the mean over them is the same gradient.
    `vision`: the class with eyes; its vision tower is trained like the rest.
    AutoModel does not shard one rank, which would also drop the dtype policy: there fully_shard is called here, so that
    compute dtype, checkpoint and publish are one code at every number of ranks.
    """
    from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config
    from nemo_automodel.components.distributed.mesh import ParallelismSizes
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    recompute, alone = cfg.activation_checkpointing and trained, dist.get_world_size() == 1
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")} if cfg.offload_optimizer else {}
    sizes = ParallelismSizes() if critic else ParallelismSizes(tp_size=cfg.tp_size, cp_size=cfg.cp_size, ep_size=cfg.ep_size, dp_replicate_size=cfg.dp_replicate_size)
    setup = DistributedSetup.build(FSDP2Config(mp_policy=policy, **{} if alone else offload), sizes, activation_checkpointing=recompute)
    if device.type == "cuda" and not critic:
        from nemo_automodel import NeMoAutoModelForCausalLM, NeMoAutoModelForImageTextToText

        model = (NeMoAutoModelForImageTextToText if vision else NeMoAutoModelForCausalLM).from_pretrained(path, torch_dtype=torch.float32, distributed_setup=setup, attn_implementation="sdpa", force_hf=cfg.cp_size > 1)
    else:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForTokenClassification

        head = {"num_labels": 1} if critic else {}
        model = (AutoModelForTokenClassification if critic else AutoModelForImageTextToText if vision else AutoModelForCausalLM).from_pretrained(path, dtype=torch.float32, **head)
        model = model if offload else model.to(device)
        if not alone:
            from nemo_automodel.components.distributed.model_parallelizer import parallelize_model

            model = parallelize_model(model, setup.mesh_context)
    if alone:
        if recompute and (device.type == "cpu" or critic):       # AutoModel's loader has done it for its own
            model.gradient_checkpointing_enable()
        shard = dict(mesh=setup.mesh_context.device_mesh["dp_shard"], mp_policy=policy, **offload)
        lists = [m for m in model.modules() if isinstance(m, (torch.nn.ModuleList, torch.nn.ModuleDict))]
        inner = {m for outer in lists for m in outer.modules() if m is not outer}
        for layer in (layer for layers in lists if layers not in inner for layer in layers.children()):      # of the language model, and of its vision tower
            fully_shard(layer, **shard)
        fully_shard(model, **shard)
    for module in model.modules() if offload else ():            # FSDP2 brings parameters to the GPU for their layer, but not buffers
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    assert all(p.dtype == torch.float32 for p in model.parameters()), "master weights must be float32"
    model.train(recompute)                 # else as in eval: dropout would make the forward another model's
    for gate in (m for m in model.modules() if hasattr(m, "router_replay")):
        gate.eval()                        # AutoModel's gates add a loss of their own in train mode, for balance
    return model, setup.mesh_context


@dataclass(frozen=True)
class Shape:
    """What a model's config.json says about its size: numbers of parameters, unless said otherwise."""

    parameters: int
    layer: int                         # the largest layer's, without its routed experts
    layer_experts: int                 # and in them
    tables: int                        # embedding and head
    num_experts: int                   # routed experts of a layer; 0 = dense

    @staticmethod
    def of(config) -> "Shape":
        """Of the transformers model that a config describes; nothing is loaded or allocated."""
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        with torch.device("meta"):
            model = (AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM).from_config(config)
        layers = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=lambda m: sum(p.numel() for p in m.parameters()))   # not a vision tower's
        experts = [[p for name, p in layer.named_parameters() if ".experts." in name] for layer in layers]   # stacked: [experts, ...]
        routed = [sum(p.numel() for p in stack) for stack in experts]
        return Shape(
            sum(p.numel() for p in model.parameters()), max(sum(p.numel() for p in layer.parameters()) - n for layer, n in zip(layers, routed)), max(routed),
            sum(p.numel() for p in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}), max((len(p) for stack in experts for p in stack), default=0))


def rank_memory(shape: Shape, config, cfg: TrainerConfig, ref: int, critic: int, itemsize: int = 2) -> dict[str, float]:
    """GB that a trainer rank needs at most, by what for: a check before anything is loaded. `ref`, `critic`: parameters of these models, 0 = none; `itemsize`: bytes of the compute dtype, below those of bfloat16.

    States: 16 bytes a parameter (float32 master, gradient, two moments; a reference: 4), shared by the ranks of one copy,
    not on the GPU under offload. Work: 6 a logit of a micro-batch (bfloat16, its gradient, a copy) and 1 GB of float32 ones, `kept_bytes` a
    token and layer of activations (2 a hidden unit when recomputed), both over one context-parallel rank's columns, and
    what FSDP2 gathers: embedding, head and two layers with this rank's experts in bfloat16, one in float32 gradients. A
    publish, when that is over, gathers a layer's experts whole, twice in bfloat16. 3 GB for CUDA and the transfer's buffer. A vision tower's activations are not counted.
    """
    text, tokens, sharers = config.get_text_config(), cfg.tokens_per_microbatch / cfg.cp_size, cfg.trainers // cfg.dp_replicate_size
    states = 0 if cfg.offload_optimizer else (16 * shape.parameters + 4 * ref + 16 * critic) / sharers
    activations = itemsize / 2 * tokens * text.num_hidden_layers * (2 * text.hidden_size if cfg.activation_checkpointing else kept_bytes(text, shape, cfg.tp_size))
    layer = shape.layer / cfg.tp_size + shape.layer_experts / cfg.ep_size
    gathered = (itemsize + 4) * shape.tables / cfg.tp_size + (2 * itemsize + 4) * layer if sharers > 1 or cfg.offload_optimizer else 0
    work = max(activations + 3 * itemsize * tokens * text.vocab_size / cfg.tp_size + 16 * FLOAT_LOGITS + gathered, 4 * shape.layer_experts)
    return {"states": states / 2**30, "work": work / 2**30, "CUDA": 3.0}


def kept_bytes(text, shape: Shape, tp: int) -> float:
    """Bytes of bfloat16 activations that a layer keeps of each token until its backward, under tensor parallelism on each of `tp` ranks.

    16 a hidden unit for the residual stream and its norms, 10 a unit of the queries and of the keys for projection, norm,
    rotation and attention (scores are never kept), 8 a unit of a gated MLP; a mixture's token keeps that of its experts and
    of a shared one, and 4 a hidden unit in each expert. Counted on Qwen3 and its mixture by a test.
    """
    hidden, heads = text.hidden_size, text.num_attention_heads
    head = text.qk_nope_head_dim + text.qk_rope_head_dim if latent_width(text) else head_width(text)
    attention = 10 * head * (heads + key_value_heads(text)) / tp
    if shape.num_experts:
        taken, width = text.num_experts_per_tok, shape.layer_experts / shape.num_experts / (3 * hidden)
        return 16 * hidden + attention + 8 * (taken + 1) * width + 4 * taken * hidden
    return 16 * hidden + attention + 8 * (text.intermediate_size if hasattr(text, "intermediate_size") else 4 * hidden) / tp


def key_value_heads(text) -> int:
    return text.num_key_value_heads if hasattr(text, "num_key_value_heads") else text.num_attention_heads        # older models have as many


def head_width(text) -> int:
    return text.head_dim if hasattr(text, "head_dim") and text.head_dim else text.hidden_size // text.num_attention_heads


def latent_width(text) -> int:
    """Of latent attention (one vector a token); 0 = the usual one."""
    return text.kv_lora_rank if hasattr(text, "kv_lora_rank") else 0


def learning_rate(cfg: TrainerConfig, total: int, step: int) -> float:
    """Factor on the peak learning rate at optimizer step `step` (from 0) of `total`: linear warm-up, then --decay."""
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    left = 1 - min(1.0, (step - cfg.warmup_steps) / max(1, total - cfg.warmup_steps))
    return {"constant": 1.0, "linear": left, "cosine": 0.5 * (1 + torch.cos(torch.tensor(torch.pi * (1 - left))).item())}[cfg.decay]


class Learner:
    """A sharded model with its optimizer and learning-rate schedule: the policy, or the critic."""

    def __init__(self, model, mesh, rate: float, cfg: TrainerConfig, steps: int):
        self.model, self.mesh, self.max_norm, self.places = model, mesh, cfg.max_grad_norm, cfg.places
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(cfg.beta1, cfg.beta2), weight_decay=cfg.weight_decay)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: learning_rate(cfg, steps * cfg.optimizer_steps, step))

    def step(self) -> tuple[float, float]:
        """One AdamW step on the gradients that are there; returns (their norm before clipping, learning rate)."""
        from nemo_automodel.components.distributed.tp_replicas import synchronize_tp_replica_gradients
        from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm

        synchronize_tp_replica_gradients([self.model], self.mesh.device_mesh)      # what every tensor-parallel rank has stays the same on all
        norm = scale_grads_and_clip_grad_norm(                                     # over several meshes; experts have the sum over places, others the mean
            self.max_norm, [self.model], device_mesh=self.mesh.device_mesh, moe_mesh=self.mesh.moe_mesh, ep_axis_name="ep" if self.mesh.moe_mesh else None, dp_group_size=self.places)
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
        self.rank, self.world, self.places, self.path, self.cfg, self.loss, self.steps, self.seed = rank, world, cfg.places, model, cfg, loss, steps, seed
        self.dtype = getattr(torch, dtype)
        self.device = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")

    def address(self) -> tuple[str, int]:
        """This node and a free port on it, for the ranks' rendezvous."""
        import socket

        with socket.socket() as s:
            s.bind(("", 0))
            return ray.util.get_node_ip_address(), s.getsockname()[1]

    def start(self, address: str, port: int, ref: bool, critic: bool, replay: bool = False) -> int:
        """Join the process group, load and shard; returns the number of parameters of the policy."""
        os.environ.update(MASTER_ADDR=address, MASTER_PORT=str(port), RANK=str(self.rank), WORLD_SIZE=str(self.world), LOCAL_RANK="0")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group("cuda:nccl,cpu:gloo" if self.device.type == "cuda" else "gloo")
        torch.manual_seed(self.seed)                             # the critic's new head is the same on every rank
        cfg, self.vision = self.cfg, load_vision(self.path)
        sees = bool(self.vision)
        self.model, mesh = load_model(self.path, self.dtype, self.device, cfg, vision=sees)
        self.mesh, self.replays = mesh.device_mesh, replay_handles(self.model) if replay else {}
        self.policy = Learner(self.model, mesh, cfg.learning_rate, cfg, self.steps)
        self.ref = load_model(cfg.ref or self.path, self.dtype, self.device, cfg, trained=False, vision=sees)[0].eval() if ref else None
        self.critic = Learner(*load_model(cfg.critic or self.path, self.dtype, self.device, cfg, critic=True), cfg.critic_learning_rate, cfg, self.steps) if critic else None
        gc.freeze()
        return sum(p.numel() for p in self.model.parameters())

    def split(self, until_backward: ExitStack) -> SplitRows | None:
        """How `forward` splits rows, when ranks share their columns."""
        return SplitRows(self.mesh, until_backward) if self.cfg.cp_size > 1 else None

    @torch.no_grad()
    def per_token(self, batch: Batch, microbatches: list[list[int]], what: str) -> list[Tensor]:
        """One number for each response token, [b, t] a micro-batch, 0 elsewhere: log p under the policy or the reference, or the value."""
        out = []
        for rows in microbatches:
            small = take_rows(batch, rows)
            if what == "values":
                numbers = forward_values(self.critic.model, small, self.device)
            else:
                with ExitStack() as stack:
                    model, handles = (self.ref, {}) if what == "ref_logprobs" else (self.model, self.replays)
                    stack.enter_context(replaying(handles, small, self.device))
                    numbers, _ = forward(model, small, self.device, split=self.split(stack), vision=self.vision)
            out.append((numbers, small.response_mask))
        return [numbers.cpu() * mask for numbers, mask in out]         # read when all are under way

    def update(self, batch: Batch, plan: list[list[list[int]]], kind: str) -> tuple[dict[str, tuple[float, float]], list[Tensor]]:
        """All optimizer steps of one batch: for each epoch and minibatch, its micro-batches, then one AdamW step.

        `kind` is a key of POLICY_LOSSES, or "value" for the critic. Returns metrics and, where the batch has no old_logprobs, those of each micro-batch:
        its forward has the weights before the one step that there then is, so pi_old is pi.
        """
        learner, prefix = (self.critic, "critic_") if kind == "value" else (self.policy, "")
        old: list[Tensor] = []
        metrics: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for microbatches in plan * self.cfg.epochs:
            for rows in microbatches:
                small = take_rows(batch, rows)
                there = to_device(small, self.device)
                with ExitStack() as until_backward:
                    until_backward.enter_context(replaying({} if kind == "value" else self.replays, small, self.device))
                    if kind == "value":
                        loss, seen = critic_step_loss(forward_values(learner.model, small, self.device), there, self.loss)
                    else:
                        logprobs, entropy = forward(learner.model, small, self.device, bool(self.loss.entropy_coef), self.split(until_backward), self.vision)
                        if there.old_logprobs is None and kind != "sft":
                            there.old_logprobs = logprobs.detach()
                            old.append(there.old_logprobs * there.response_mask)
                        loss, seen = step_loss(logprobs, entropy, there, self.loss, kind)
                        seen |= route_metrics(self.replays, small) if self.replays and rows else {}
                    (loss * self.places).backward()            # FSDP2 takes the mean over ranks, the loss is a sum over data-parallel places
                for name, (total, count) in (seen | {prefix + "loss": (loss.detach(), 0.0)}).items():
                    metrics[name][0] += total                  # a tensor still, read when all are under way
                    metrics[name][1] += count
            norm, rate = learner.step()
            metrics[prefix + "grad_norm"][0] += norm / self.places
            metrics[prefix + "grad_norm"][1] += 1 / self.places
            metrics[prefix + "learning_rate"] = [rate / self.places, 1 / self.places]
        metrics[prefix + "loss"][1] = len(plan) * self.cfg.epochs / self.places      # a sum over micro-batches and ranks, a mean over optimizer steps
        return {name: (float(total), float(count)) for name, (total, count) in metrics.items()}, [numbers.cpu() for numbers in old]

    # ---- publish
    def open_transfer(self, backend: str, engines: list, workers_per_engine: int, address: str) -> None:
        """Join the engines' transfer group (rank 0 sends)."""
        from weight_sync import PolicySource, open_transfer

        tied = backend == "gloo" and self.model.config.tie_word_embeddings
        source = PolicySource(self.model, self.dtype, self.device, tied_head=tied)
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
        from huggingface_hub import save_torch_state_dict
        from transformers import AutoConfig, AutoTokenizer, GenerationConfig

        from weight_sync import PolicySource

        tensors, dtype = {}, AutoConfig.from_pretrained(self.path).dtype or torch.float32
        for name, tensor in PolicySource(self.model, torch.float32, self.device, tied_head=False):     # every rank joins each gather, rank 0 keeps it
            if self.rank == 0:
                tensors[name] = tensor.to("cpu", dtype, copy=True)                                     # experts are views of one tensor, which safetensors would not write
        if self.rank:
            return
        Path(path).mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(tensors, path)
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
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def in_rows(batch: Batch, plan: list[list[list[int]]], told: list[list[Tensor]]) -> Tensor:
    """[B, T] of the pieces [b, t] that the data-parallel places told of their micro-batches; 0 beyond them."""
    out = torch.zeros(batch.response_mask.shape)
    for mine, pieces in zip(plan, told):
        for rows, piece in zip(mine, pieces):
            if rows:
                out[torch.tensor(rows), : piece.shape[1]] = piece
    return out


def to_device(batch: Batch, device: torch.device) -> Batch:
    return replace(batch, **{f.name: getattr(batch, f.name).to(device) for f in fields(batch) if isinstance(getattr(batch, f.name), Tensor)})


# ---------------------------------------------------------------------------------------------------- driver's handle
class Trainer:
    """The policy as the loop sees it (and its reference and critic): logprobs, values, update, save, ...; every call is awaited."""

    def __init__(self, model: str, cfg: TrainerConfig, loss: LossConfig, device: str, dtype: str, steps: int, seed: int, options: list[dict],
                 ref: bool = False, critic: bool = False, replay: bool = False):
        self.cfg, self.with_ref, self.with_critic, self.with_replay = cfg, ref, critic, replay
        self.ranks = [Rank.options(**own).remote(rank, cfg.trainers, model, cfg, loss, device, dtype, steps, seed) for rank, own in enumerate(options)]   # a rank's own

    async def _all(self, method: str, *args) -> list:
        return await asyncio.gather(*[getattr(rank, method).remote(*args) for rank in self.ranks])

    async def start(self) -> int:
        """Load everywhere; returns the number of parameters."""
        self.address, port = await self.ranks[0].address.remote()
        return (await self._all("start", self.address, port, self.with_ref, self.with_critic, self.with_replay))[0]

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
        same, plan = self.cfg.same_rows, plan_microbatches(batch, torch.arange(len(batch.lengths)), self.cfg.places, self.cfg.tokens_per_microbatch)
        stored = ray.put(batch)
        results = await asyncio.gather(*[rank.per_token.remote(stored, plan[i // same], what) for i, rank in enumerate(self.ranks)])
        return in_rows(batch, plan, results[::same])                               # one rank of each data-parallel place

    async def update(self, batch: Batch, kind: str) -> dict[str, float]:
        """One batch's optimizer steps of the policy with POLICY_LOSSES[kind], or of the critic ("value"); metrics, each a sum over a count.

        batch.old_logprobs may be None when there is one optimizer step: its own forward then tells them, and they are put there.
        """
        steps = int(batch.minibatch.max()) + 1
        if kind not in ("value", "sft") and batch.old_logprobs is None and steps * self.cfg.epochs > 1:
            raise ValueError(f"{steps * self.cfg.epochs} optimizer steps a batch need old_logprobs from before the first: await Trainer.logprobs, and put them into the batch.")
        plans = [plan_microbatches(batch, (batch.minibatch == m).nonzero()[:, 0], self.cfg.places, self.cfg.tokens_per_microbatch) for m in range(steps)]
        stored, same = ray.put(batch), self.cfg.same_rows
        seen = await asyncio.gather(*[rank.update.remote(stored, [plan[i // same] for plan in plans], kind) for i, rank in enumerate(self.ranks)])
        if any(pieces for _, pieces in seen):
            batch.old_logprobs = in_rows(batch, plans[0], [pieces for _, pieces in seen[::same]])
        totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for name, (total, count) in (item for metrics, _ in seen[::same] for item in metrics.items()):   # by name: ranks may have seen different ones
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
        with (unfinished / "pool.pkl").open("wb") as file:
            await asyncio.to_thread(WholePickler(file).dump, pool)                 # it may wait for what references stand for
        (unfinished / "run.json").write_text(json.dumps(extra, indent=1))
        shutil.rmtree(path, ignore_errors=True)
        unfinished.rename(path)

    async def load(self, path: Path) -> tuple[dict, dict]:
        """Load a finished checkpoint; returns what `save` was given as `extra` and as `pool`."""
        await self._all("load", str(path / "trainer"))
        return json.loads((path / "run.json").read_text()), pickle.loads((path / "pool.pkl").read_bytes())

    async def export(self, path: Path) -> None:
        await self._all("export", str(path))
