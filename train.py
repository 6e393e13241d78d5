"""train.py owns the run: its flags, where the parts are placed, the loop, evals and what is written down.

    python train.py --estimator grpo            the embedded default, on this machine
    python train.py --help                      every flag
    python train.py --dry-run                   the resolved plan, nothing started

It knows no model and no engine from inside. Read `loop` first: one training step, a phase a line.
"""

import asyncio
import gc
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import ray
import torch
import tyro
from jinja2 import TemplateError
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from agent import Env, load_agent, load_vision
from estimators import ESTIMATORS, Batch, EstimatorConfig, collate, shape_rewards, value_targets
from generator import AgentWorker, Engine, EngineGone, GeneratorConfig, Group, Pool, PromptStream, read_prompts
from losses import AGGREGATIONS, IGNORED, LossConfig, adapt_kl_scale
from trainer import Shape, Trainer, TrainerConfig, head_width, key_value_heads, latent_width, rank_memory

ROOT = Path(__file__).resolve().parent
console = Console(stderr=False, highlight=False)


# ---------------------------------------------------------------------------------------------------- configuration
@dataclass(frozen=True)
class Config:
    """nanomolt: reinforcement learning of a language-model agent.

    Without flags it trains the embedded 0.8M-parameter policy on sums of numbers below 100, on whatever machine this is.
    """

    estimator: Literal[*ESTIMATORS] = "grpo"   # how rewards become advantages
    model: str = "recipes/tiny"        # policy to start from: directory in Hugging Face layout, or hub id
    steps: int = 130                   # batches to train; each ends with one publish
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"   # dtype of both forwards; auto: bfloat16 on a GPU, float32 without
    device: Literal["auto", "cpu", "cuda"] = "auto"   # auto: cuda when there is an NVIDIA GPU
    seed: int = 0                      # prompts' order follows from it, and on a CPU every sampling seed
    eval_every: int = 65               # steps between evals; 0 = only at the start and at the end
    eval_prompts: int = 1000           # held-out prompts of an eval, at most
    eval_samples: int = 2              # k of pass@k: sampled answers for each eval prompt, next to the greedy one; 0 = greedy only
    pass_reward: float = 1.0           # a rollout passes when its reward is at least this
    checkpoint_every: int = 65         # steps between checkpoints; 0 = only at the end
    keep_checkpoints: int = 2          # newest checkpoints to keep
    save_rollouts: bool = True         # write every trained trajectory to rollouts/
    name: str | None = None            # directory under runs/; None = estimator and time, with --resume the newest run
    resume: bool = False               # go on from the newest finished checkpoint, with the run's own flags unless given anew
    wait_timeout: float = 3600.0       # seconds any one wait may take before the run stops and names it; rollouts, engines and publishes have limits of their own
    wandb: bool = False                # also log to Weights & Biases
    ray_address: str | None = None     # address of a running Ray cluster (`auto`: the one of this machine); None starts a private one
    dry_run: bool = False              # print the resolved plan and exit
    generator: Annotated[GeneratorConfig, tyro.conf.arg(name="")] = field(default_factory=GeneratorConfig)
    estimation: Annotated[EstimatorConfig, tyro.conf.arg(name="")] = field(default_factory=EstimatorConfig)
    losses: Annotated[LossConfig, tyro.conf.arg(name="")] = field(default_factory=LossConfig)
    trainer: Annotated[TrainerConfig, tyro.conf.arg(name="")] = field(default_factory=TrainerConfig)

    def __post_init__(self):
        estimator, gen, train = ESTIMATORS[self.estimator], self.generator, self.trainer
        if estimator.groups and gen.group_size == 1:
            raise ValueError(f"--estimator {self.estimator} compares the rollouts of one prompt, so --group-size 1 leaves it nothing. "
                             "Use at least 2, or --estimator reinforce.")
        for name in estimator.unread(self.estimation):
            readers = [other for other, method in ESTIMATORS.items() if name not in method.unread(self.estimation)]
            raise ValueError(f"--{name.replace('_', '-')} is not read by --estimator {self.estimator}, only by {', '.join(readers)}. Leave it out, or change --estimator.")
        for ignored, why in IGNORED:
            if ignored(self.losses):
                raise ValueError(why.format(c=self.losses))
        if self.estimation.overlong_penalty != 1.0 and not self.estimation.overlong_buffer:
            raise ValueError(f"--overlong-penalty {self.estimation.overlong_penalty} is the size of a penalty that --overlong-buffer 0 switches off; give it a buffer.")
        if self.estimation.kl_reward_kind != "k1" and not self.estimation.kl_reward_coef:
            raise ValueError(f"--kl-reward-kind {self.estimation.kl_reward_kind} says which KL is a reward, and --kl-reward-coef 0 has none; set it.")
        if estimator.teacher and train.ref is None:
            raise ValueError(f"--estimator {self.estimator} learns from a teacher: name it with --ref (a directory in Hugging Face layout or a hub id, same tokenizer).")
        for room, name in ((train, "critic"), (train, "critic_learning_rate"), (self.losses, "value_clip")):
            if (value := getattr(room, name)) != getattr(type(room), name) and not estimator.critic:       # a class holds its defaults
                raise ValueError(f"--{name.replace('_', '-')} {value}: --estimator {self.estimator} has no critic. Use --estimator gae, or leave it out.")
        if train.ref and not self.reference:
            raise ValueError(f"--ref {train.ref}: nothing reads a reference policy. Use --kl-coef, --kl-reward-coef or --estimator on_policy_distill.")
        if self.losses.kl_target and not (self.losses.kl_coef or self.estimation.kl_reward_coef):
            raise ValueError(f"--kl-target {self.losses.kl_target} steers a KL coefficient, and none is set. Use --kl-coef or --kl-reward-coef.")
        if self.losses.loss == "reinforce" and train.optimizer_steps > 1:
            raise ValueError(f"--loss reinforce has no ratio to clip, so it takes one optimizer step a batch; --epochs {train.epochs} times "
                             f"--minibatches {train.minibatches} is {train.optimizer_steps}. Use --loss ppo.")
        if self.losses.loss == "sft":
            raise ValueError("--loss sft is supervised fine-tuning; it has no rollouts. recipes/make_tiny.py shows how it runs through the same update.")
        if gen.max_staleness and self.losses.mismatch_level == "off":
            raise ValueError(f"--max-staleness {gen.max_staleness} trains on tokens of older weights, and --mismatch-level off leaves them uncorrected. "
                             "Use --mismatch-level token (or seq, geo), or --max-staleness 0.")
        if gen.quantised_cache and self.losses.mismatch_level == "off":
            raise ValueError(f"--engine-args kv_cache_dtype {gen.engine_arguments['kv_cache_dtype']} moves the engine's logprobs away from the trainer's, and --mismatch-level off leaves "
                             "that uncorrected. Use --mismatch-level token (or seq, geo), or leave kv_cache_dtype out.")
        if train.minibatches > gen.prompts_per_step:
            raise ValueError(f"--minibatches {train.minibatches} is more than --prompts-per-step {gen.prompts_per_step}; groups are not split.")
        for name, least in (("steps", 1), ("eval_prompts", 1), ("keep_checkpoints", 1), ("eval_samples", 0), ("eval_every", 0), ("checkpoint_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: want at least {least}.")

    @property
    def old_first(self) -> bool:
        """Advantages or a second optimizer step read pi_old, so it has a forward of its own; else that of the one step tells it."""
        return self.trainer.optimizer_steps > 1 or ESTIMATORS[self.estimator].old or self.estimation.kl_reward_coef > 0

    @property
    def reference(self) -> bool:
        """A KL or a teacher is asked for, so the reference policy is loaded."""
        return bool(self.losses.kl_coef or self.estimation.kl_reward_coef or ESTIMATORS[self.estimator].teacher)


@dataclass(frozen=True)
class Plan:
    """What the flags come to on this machine."""

    model: str                         # absolute path, or hub id
    ref: str
    critic: str
    device: str
    dtype: str
    transfer: str                      # weight transfer backend
    nodes: tuple[int, ...]             # GPUs of each node that are used: none on a CPU run
    cores: int                         # of one node
    shape: Shape
    tie_word_embeddings: bool
    replay: bool                       # a mixture whose trainer takes the experts that the engine chose
    rank_gb: dict[str, float]          # memory a trainer rank needs at most, GB by what for
    cache_gb: float                    # KV cache of one full context on each GPU of an engine
    missing: str                       # what the machine lacks, said by --dry-run; "" = nothing

    def rows(self, cfg: Config) -> list[tuple[str, str]]:
        gen, train, cuda = cfg.generator, cfg.trainer, self.device == "cuda"
        weights = self.shape.parameters * (2 if self.dtype == "bfloat16" else 4) / 2**30 / gen.engine_tp_size
        split = {"data parallel": train.places, "tensor parallel": train.tp_size, "context parallel": train.cp_size, "expert parallel": train.ep_size, "copies": train.dp_replicate_size}
        sizes = ", ".join(f"{name} {size}" for name, size in split.items() if size > 1)
        rank = f"at most {sum(self.rank_gb.values()):.1f} GB each (" + ", ".join(f"{name} {gb:.1f}" for name, gb in self.rank_gb.items()) + ")"
        return [
            ("model", f"{cfg.model}, {self.shape.parameters / 1e6:,.2f} M parameters" + (f", {self.shape.num_experts} experts a layer" if self.shape.num_experts else "")),
            ("nodes", self.missing or f"{len(self.nodes)}, with {', '.join(map(str, self.nodes))} GPUs and {self.cores} cores each"),
            ("device", f"{self.device}; forward in {self.dtype}, master weights in float32"),
            ("engines", f"{gen.engines} vLLM x {gen.engine_tp_size} {'GPU' if cuda else 'process'}, weights {weights:.3f} GB on each, KV cache {self.cache_gb:.3f} GB for a full context"
                        + (f"; {gen.engine_args}" if gen.engine_arguments else "")),
            ("trainers", f"{train.trainers} FSDP2 ranks{': ' * bool(sizes)}{sizes}; {rank}" + ", states on the CPU" * train.offload_optimizer),
        ] + [
            ("routing", "the engine's choice of experts is replayed in the trainer" if self.replay else "engine and trainer choose experts each for itself"),
        ] * bool(self.shape.num_experts) + [
            ("memory", f"of the GPU {gen.gpu_share(True):.0%} are the engine's; the trainer needs at most {sum(self.rank_gb.values()):.1f} GB"),
        ] * (self.transfer == "ipc") + [
            ("agents", f"{gen.agent_workers} workers of {gen.agent}"),
            ("transfer", f"{self.transfer}, group of {1 + gen.engines * gen.engine_tp_size}"),
            ("step", f"{gen.prompts_per_step} prompts x {gen.group_size} rollouts, {train.optimizer_steps} optimizer steps; "
                     + (f"rollouts at most {gen.max_staleness} publishes old, taken in order of {gen.order}" + ", kept in flight over a publish" * gen.partial_rollout
                        if gen.max_staleness else "strictly on-policy")),
            ("run", f"{cfg.steps} steps, eval every {cfg.eval_every or 'start and end'}, checkpoint every {cfg.checkpoint_every or 'end'}"),
        ]


def resolve(cfg: Config) -> Plan:
    """Check the flags against the machine and the model; raises ValueError before anything is started. --dry-run assumes the GPUs that are missing."""
    gen, train, nodes, where, missing = cfg.generator, cfg.trainer, (torch.cuda.device_count(),), "this machine", ""
    if cfg.ray_address:                                                  # the caller has connected to it
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        nodes, where = tuple(int(resources.get("GPU", 0)) for resources in alive), f"the cluster at {cfg.ray_address}"
    gpus = sum(nodes)
    if cfg.device == "cuda" and not gpus and not cfg.dry_run:
        raise ValueError(f"--device cuda: {where} has no usable NVIDIA GPU. Use --device cpu, or check the driver and the installed torch.")
    device = ("cuda" if gpus else "cpu") if cfg.device == "auto" else cfg.device
    need = train.trainers + gen.engines * gen.engine_tp_size
    shared = device == "cuda" and gpus == 1 and need == 2                # one GPU for both: weights move inside it
    if device == "cuda" and not shared and (need > gpus or gen.engines > sum(n // gen.engine_tp_size for n in nodes)):
        words = (f"{train.trainers} trainers and {gen.engines} engines of {gen.engine_tp_size} GPUs (each on one node) need {need} GPUs; {where} "
                 f"has {' + '.join(map(str, nodes))}.")
        if not cfg.dry_run or gen.engine_tp_size > GPUS_PER_NODE:
            raise ValueError(f"{words} Lower --trainers, --engines or --engine-tp-size, or use --device cpu.")
        a_node = GPUS_PER_NODE // gen.engine_tp_size                     # engines
        nodes = (GPUS_PER_NODE,) * max(-(-need // GPUS_PER_NODE), -(-gen.engines // a_node))
        missing = (f"{words} So suppose {len(nodes)} nodes of {GPUS_PER_NODE}: engines on {-(-gen.engines // a_node)} of them, {a_node} a node at most, "
                   f"and the ranks on the {GPUS_PER_NODE * len(nodes) - gen.engines * gen.engine_tp_size} GPUs that they leave.")
    if device == "cpu" and gen.engine_tp_size > 1:
        raise ValueError(f"--engine-tp-size {gen.engine_tp_size}: on a CPU an engine is one process. Use --engines for more of them.")
    if device == "cpu" and gen.drafts:
        raise ValueError(f"--engine-args: speculation ({gen.drafts.get('method')}) on a CPU: vLLM's CPU kernels leave the temperature of drafted tokens unset (expand_kernel), so tokens and "
                         "logprobs are not the policy's. Leave it out, or use GPUs.")
    if (gen.tool_parser or gen.reasoning_parser) and issubclass(load_agent(gen.agent).AgentRunner, Env):
        raise ValueError(f"--tool-parser and --reasoning-parser read a ChatAgent's answers; {gen.agent} is an Env, which gets the text as it is. Leave them out.")
    model, config = read_model("--model", cfg.model)
    ref, ref_config = read_model("--ref", train.ref or cfg.model)
    critic, critic_config = read_model("--critic", train.critic or cfg.model)
    if (theirs := ref_config.get_text_config().vocab_size) != (ours := config.get_text_config().vocab_size):
        raise ValueError(f"--ref {train.ref} has a vocabulary of {theirs} tokens, --model {cfg.model} one of {ours}: "
                         "logprobs of the same ids can only be compared under one tokenizer. Choose models of one family.")
    vision, limit = hasattr(config, "vision_config"), config.get_text_config().max_position_embeddings
    if vision and (ESTIMATORS[cfg.estimator].critic or not hasattr(ref_config, "vision_config")):
        raise ValueError(f"--model {cfg.model} reads images: a reference (--ref) must read them too, and there is no critic that does (--estimator {cfg.estimator}). Choose others.")
    if vision:
        try:
            load_vision(model).check(config.image_token_id)
        except (ValueError, OSError, TemplateError, AttributeError) as error:      # AttributeError: of a processor or a config that has no such id
            raise ValueError(f"--model {cfg.model} reads images in a way that is not supported: {str(error).rstrip('.')}. Choose another.") from None
    if gen.context_length > limit:
        raise ValueError(f"--context-length {gen.context_length} is more than the {limit} positions of {cfg.model}; lower it.")
    shape = Shape.of(config)
    check_sizes("--model", train, shape, config, device)
    ref_size = critic_size = 0                           # parameters
    if cfg.reference:
        ref_shape = Shape.of(ref_config)
        ref_size = ref_shape.parameters
        check_sizes("--ref", train, ref_shape, ref_config, device)                 # it is split like the policy
    if ESTIMATORS[cfg.estimator].critic:
        critic_size = Shape.of(critic_config).parameters
    if vision and gen.drafts:
        raise ValueError(f"--engine-args: speculation with {cfg.model}, which reads images: vLLM takes no logit_bias beside drafts, and the id that marks an image must never be sampled. Leave it out.")
    if gen.routing_replay == "on" and (not shape.num_experts or vision):
        raise ValueError(f"--routing-replay on: {cfg.model} is no mixture of experts that reads text only, so no routes are told for it. Leave it out.")
    if gen.routing_replay == "on" and device == "cpu":
        raise ValueError("--routing-replay on: vLLM's CPU engine does not tell which experts it chose. Leave it out; in float32 engine and trainer seldom choose differently.")
    dtype = ("bfloat16" if device == "cuda" else "float32") if cfg.dtype == "auto" else cfg.dtype
    transfer = "gloo" if device == "cpu" else "ipc" if shared else "nccl"
    cores = len(os.sched_getaffinity(0))
    rank_gb = rank_memory(shape, config, train, ref_size, critic_size, itemsize=2 if dtype == "bfloat16" else 4)
    if device == "cpu":
        del rank_gb["CUDA"]
    if shared and cfg.ray_address is None:               # the GPU of a cluster may be another machine's
        check_shared_memory(*gpu_memory(), gen.gpu_share(True), sum(rank_gb.values()), shape.parameters, gen.kv_cache_gb or 0.0)
    text = config.get_text_config()
    latent = latent_width(text)                          # whole on each GPU
    numbers = latent + text.qk_rope_head_dim if latent else 2 * max(1, key_value_heads(text) // gen.engine_tp_size) * head_width(text)
    cache_gb = gen.context_length * text.num_hidden_layers * numbers * (1 if gen.quantised_cache else 2 if dtype == "bfloat16" else 4) / 2**30
    return Plan(model, ref, critic, device, dtype, transfer, nodes if device == "cuda" else (0,) * len(nodes), cores, shape, bool(config.tie_word_embeddings),
                bool(shape.num_experts) and not vision and device == "cuda" and gen.routing_replay != "off", rank_gb, cache_gb, missing)


GPUS_PER_NODE = 8                      # of the nodes that --dry-run assumes


def check_sizes(flag: str, cfg: TrainerConfig, shape: Shape, config, device: str) -> None:
    """Raises ValueError when the model of `flag` cannot be split in the trainer's sizes, or not on this device."""
    text = config.get_text_config()
    if hasattr(config, "vision_config") and cfg.same_rows * cfg.ep_size > 1:
        raise ValueError(f"--tp-size {cfg.tp_size}, --cp-size {cfg.cp_size}, --ep-size {cfg.ep_size}: a model that reads images is split by plain data parallelism only. Leave them out.")
    if device == "cpu" and (cfg.cp_size > 1 or cfg.ep_size > 1):
        raise ValueError(f"--cp-size {cfg.cp_size}, --ep-size {cfg.ep_size}: torch's ring attention and AutoModel's mixtures need GPUs. On a CPU use --tp-size, --dp-replicate-size or plain --trainers.")
    if cfg.ep_size > 1 and (not shape.num_experts or shape.num_experts % cfg.ep_size):
        raise ValueError(f"--ep-size {cfg.ep_size} shares out the experts of a layer, and that of {flag} has {shape.num_experts}. Use a size that divides them, or --ep-size 1.")
    if cfg.same_rows > 1 and shape.num_experts:
        raise ValueError(f"--tp-size {cfg.tp_size}, --cp-size {cfg.cp_size}: a mixture of experts is split with --ep-size; AutoModel's need Transformer Engine for context parallelism, "
                         "and have no tensor-parallel plan for attention.")
    for name, count in (("attention heads", text.num_attention_heads), ("key-value heads", key_value_heads(text)), ("words in its vocabulary", text.vocab_size)):
        if count % cfg.tp_size:
            raise ValueError(f"--tp-size {cfg.tp_size}: the model of {flag} has {count} {name}, which that does not divide. Use a size that does, or --tp-size 1.")


def gpu_memory() -> tuple[float, float]:
    """(all, free) GB of the first GPU this process may use. Asked of the driver's own tool: asked through torch, this process would take memory there itself."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    seen = subprocess.run(["nvidia-smi", "-i", first, "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True)
    total, free = (float(mb) / 1024 for mb in seen.stdout.split(","))
    return total, free


def check_shared_memory(total: float, free: float, share: float, rank_gb: float, parameters: int, cache: float = 0.0) -> None:
    """Engine and trainer on one GPU (all in GB): raises ValueError when they may run out of its memory, before anything is loaded."""
    weights = parameters * 2 / 2**30 + 2                                       # in bfloat16, and what vLLM needs besides; the rest is KV cache
    engine = max(share * total, weights + cache)                               # --kv-cache-gb knows no share
    if engine + rank_gb > free:
        raise ValueError(f"engine and trainer share one GPU: {engine:.1f} GB for the engine (--gpu-memory-utilization {share}{f', --kv-cache-gb {cache}' * bool(cache)}) and up to {rank_gb:.1f} GB for the trainer are more "
                         f"than the {free:.1f} GB that are free of its {total:.1f}. Lower --gpu-memory-utilization (not below {weights / total:.2f}) or --tokens-per-microbatch, "
                         "use --activation-checkpointing, --offload-optimizer, a smaller model, or a second GPU.")
    if share * total < weights:
        raise ValueError(f"--gpu-memory-utilization {share} leaves the engine {share * total:.1f} GB of {total:.1f}; its weights and buffers need {weights:.1f}. Raise it to {weights / total:.2f} or more.")


def read_model(flag: str, name: str):
    """(path or hub id, its config); raises ValueError that names the flag."""
    from transformers import AutoConfig

    model = locate(name)
    local = Path(model).exists() or Path(model).is_absolute() or model.count(os.sep) != 1          # a hub id is owner/name
    if local and not Path(model, "config.json").is_file():
        raise ValueError(f"{flag} {name}: no config.json there. Give a directory in Hugging Face layout (recipes/make_tiny.py makes the "
                         "default one) or a hub id.")
    try:
        return model, AutoConfig.from_pretrained(model)
    except OSError as error:
        raise ValueError(f"{flag} {name} could not be loaded: {str(error).splitlines()[0]}") from None


def locate(model: str) -> str:
    """A model's absolute path where it is a directory, as given or in the repository; else a hub id, as it is."""
    return next((str(p.resolve()) for p in (Path(model), ROOT / model) if p.exists()), model)


# ---------------------------------------------------------------------------------------------------- waiting
@asynccontextmanager
async def waiting(what: str | Callable[[], Awaitable[str]], deadline: float, patience: float = 60.0) -> AsyncIterator[None]:
    """No wait is silent or endless: after `patience` seconds, and again after as many, the terminal says what is awaited
    and for how long already; after `deadline` seconds TimeoutError says it, and the caller acts. `what`: words, or who can say them."""
    began = time.monotonic()

    async def remind() -> None:
        while True:
            await asyncio.sleep(patience)
            words = what if isinstance(what, str) else await what()
            console.print(f"[yellow]waiting {time.monotonic() - began:.0f} s for[/] {escape(words)}", soft_wrap=True)

    reminder, limit = asyncio.ensure_future(remind()), asyncio.timeout(deadline)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"waited {deadline:.0f} s for {what if isinstance(what, str) else await what()}") from None
        raise
    finally:
        reminder.cancel()


# ---------------------------------------------------------------------------------------------------- placement
class Parts:
    """The running actors, and what keeps them running.

    An engine that dies or is stuck is restarted, joined to a new transfer group and brought to the current version before
    it serves; prompt groups that were on it wait and are asked for again. That happens where the trainer's weights have
    a known version: while the loop waits for rollouts or an eval, and at a publish. A trainer rank that dies ends the run.
    """

    def __init__(self, trainer: Trainer, engines: list, workers: list, plan: Plan, gen: GeneratorConfig):
        self.trainer, self.engines, self.workers, self.plan, self.gen = trainer, engines, workers, plan, gen
        self.processes: list[list[int]] = [[] for _ in engines]   # vLLM's, of each engine
        self.broken, self.stalled = asyncio.Event(), set()        # stalled: prompt groups that wait for an engine
        self.restarts, self.publishing = 0, False

    async def start(self) -> None:
        starts = asyncio.gather(*[e.start.remote() for e in self.engines])
        if self.plan.transfer == "ipc":                   # one GPU: vLLM measures what is free while it starts, so the trainer waits
            await starts
        self.processes, _ = await asyncio.gather(starts, self.trainer.start())
        await self.trainer.open_transfer(self.plan.transfer, self.engines, self.gen.engine_tp_size)

    async def run_groups(self, prompts: list[tuple[int, dict]], place: int, samples: int, temperature: float, seed: int | None, name: str) -> list[Group]:
        """AgentWorker.run_groups on worker and engine number `place`; when one of the two dies, again when there is a new one.

        Whoever saw three workers die gives up: its rollouts are dropped as `worker_died`. Three engines: the run ends.
        """
        deaths = Counter()
        while True:
            while self.broken.is_set():                              # `mend` is at it, and has deadlines
                self.stalled |= {n for n, _ in prompts}
                await asyncio.sleep(0.1)
            worker, engine = self.workers[place % len(self.workers)], self.engines[place % len(self.engines)]
            call = worker.run_groups.remote(prompts, engine, samples, temperature, seed, name)
            try:
                groups = await call
                for note in (note for group in groups for note in group.notes):
                    console.print(f"[yellow]{escape(note)}[/]", soft_wrap=True)
                return groups
            except asyncio.CancelledError:
                if ray.is_initialized():                             # else ray.cancel would start a Ray of its own
                    ray.cancel(call)
                raise
            except (ray.exceptions.RayActorError, EngineGone) as error:
                of = "engine" if isinstance(error, ray.exceptions.RayTaskError) else "worker"      # raised inside the worker: it was the engine
                deaths[of] += 1
                if of == "worker":
                    await self.answers(worker, place % len(self.workers))
                    if deaths[of] == 3:
                        return [Group(n, prompt, dropped=Counter(worker_died=samples), errors=[f"the agent worker died three times with prompt {n}"]) for n, prompt in prompts]
                elif deaths[of] == 3:
                    raise
                else:
                    self.broken.set()

    async def answers(self, worker, i: int) -> None:
        """Returns when agent worker i, which Ray restarts, answers again."""
        async with waiting(f"agent worker {i} to start again", 300):
            while True:
                try:
                    return await worker.whereabouts.remote("")
                except ray.exceptions.RayActorError:
                    await asyncio.sleep(1)

    async def waiting_for(self, pool: Pool) -> str:
        """What the pool waits for, and where that rollout is, asked of its worker."""
        if (flight := pool.oldest()) is None:
            return pool.waiting_for()
        place, engine = flight.index % len(self.workers), flight.index % len(self.engines)
        try:
            where = await asyncio.wait_for(self.workers[place].whereabouts.remote(f"train-{flight.index}"), 5)
        except (TimeoutError, ray.exceptions.RayError):
            where = f"agent worker {place} does not answer (an agent that blocks it with time.sleep or a synchronous client?)"
        return f"{pool.waiting_for()}; engine {engine}; {where}"

    async def watch(self) -> None:
        """For ever: an actor that answers nothing for its time-out is killed, so that whoever waits for it learns it; Ray restarts it."""
        gen = self.gen

        async def check(actor, ask, name: str, seconds: float) -> None:
            while True:
                await asyncio.sleep(seconds / 2)
                try:
                    await asyncio.wait_for(ask(), seconds)
                except TimeoutError:
                    if not self.publishing:              # a publish keeps engines busy, and has a deadline of its own
                        console.print(f"[yellow]{name} has not answered for {seconds:.0f} s[/]")
                        ray.kill(actor, no_restart=False)
                except ray.exceptions.RayError:
                    pass                                 # it has died: its rollouts know

        await asyncio.gather(*[check(e, e.serving.remote, f"engine {i}", gen.engine_timeout) for i, e in enumerate(self.engines)],
                             *[check(w, partial(w.whereabouts.remote, ""), f"agent worker {i}", gen.rollout_timeout) for i, w in enumerate(self.workers)])

    async def guarded(self, wanted: Coroutine, version: int):
        """Await `wanted`, and mend what breaks meanwhile; the trainer has the weights of `version` all the while."""
        task = asyncio.ensure_future(wanted)
        try:
            while not task.done():
                broke = asyncio.ensure_future(self.broken.wait())
                await asyncio.wait({task, broke}, return_when=asyncio.FIRST_COMPLETED)
                broke.cancel()
                if self.broken.is_set() and not task.done():
                    await self.publish(version)
            return task.result()
        finally:
            task.cancel()

    async def publish(self, version: int) -> None:
        """weight_sync.publish to all engines, mended first where that is needed. If it fails, they may hold parts of two versions: all are restarted, and it is done again, twice at most."""
        from weight_sync import publish

        for last in (False, False, True):
            self.publishing = True
            try:
                return await (self.mend(version) if self.broken.is_set() else publish(self.trainer, self.engines, version, partial(waiting, deadline=self.gen.publish_timeout)))
            except (ray.exceptions.RayError, TimeoutError) as error:
                if last:
                    raise
                console.print(f"[yellow]publishing version {version} failed:[/] {escape(str(error).strip().splitlines()[-1])}", soft_wrap=True)
                for engine in self.engines:
                    ray.kill(engine, no_restart=False)
                self.broken.set()
            finally:
                self.publishing = False

    async def mend(self, version: int) -> None:
        """Every engine serves `version` again: those that do not answer are killed, started anew, and published to in a group of their own."""
        from weight_sync import publish

        async def serving(engine) -> int | None:
            try:
                return await asyncio.wait_for(engine.serving.remote(), 30)
            except ray.exceptions.RayActorError:                     # dead, or Ray is restarting it already
                return None
            except (ray.exceptions.RayTaskError, TimeoutError):      # its vLLM is dead, or stuck
                ray.kill(engine, no_restart=False)
                return None

        async def revive(i: int) -> None:
            async with waiting(f"engine {i} to start again", self.gen.publish_timeout):
                while True:
                    try:
                        self.processes[i] = await self.engines[i].start.remote(self.processes[i])
                        return
                    except ray.exceptions.RayActorError:             # still restarting
                        await asyncio.sleep(1)

        began, found = time.monotonic(), await asyncio.gather(*[serving(e) for e in self.engines])
        dead = [i for i, v in enumerate(found) if v is None]
        console.print(f"[yellow]restarting engine {', '.join(map(str, dead)) or 'none'}[/]: it died or did not answer; {len(self.stalled)} prompt groups wait for it")
        await asyncio.gather(*map(revive, dead))
        behind = [e for e, v in zip(self.engines, found) if v != version]
        await self.trainer.open_transfer(self.plan.transfer, behind, self.gen.engine_tp_size)
        await publish(self.trainer, behind, version, partial(waiting, deadline=self.gen.publish_timeout))
        if len(behind) < len(self.engines):
            await self.trainer.open_transfer(self.plan.transfer, self.engines, self.gen.engine_tp_size)
        self.restarts += len(dead)
        self.stalled.clear()
        self.broken.clear()
        console.print(f"all engines serve version {version} again after {time.monotonic() - began:.0f} s")


QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1",
         "TOKENIZERS_PARALLELISM": "false"}


def quiet() -> None:
    """Keep the libraries' import-time chatter off the terminal; it is harmless, and what matters raises."""
    os.environ |= QUIET
    warnings.filterwarnings("ignore")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def start_ray(address: str | None) -> None:
    """A private Ray, quiet, whose workers find our flat modules; or the cluster at `address`."""
    environment = QUIET | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "PYTHONWARNINGS": "ignore",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",        # vLLM's ipc transfer sends handles of GPU memory between our own processes
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",           # on a CPU the engine core then runs its worker itself: one process less
        "OMP_WAIT_POLICY": "PASSIVE"}                    # idle threads sleep: engine and trainer share the cores
    if address is None:                                  # if this process is killed outright, nothing it started stays
        subprocess.Popen([sys.executable, str(ROOT / "recipes/reap.py"), str(os.getpid())], start_new_session=True,
                         stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    private = {} if address else {"object_store_memory": 512 * 2**20, "include_dashboard": False,
                                  "_system_config": {"prestart_worker_first_driver": False, "enable_metrics_collection": False}}     # its idle workers and its statistics, which nobody reads, took 3 % of a core
    if address and Path("~/.ray/auth_token").expanduser().is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # as `ray start --head` decides it
    try:
        ray.init(address=address or "local", logging_level="ERROR", log_to_driver=False, runtime_env={"env_vars": environment}, **private)
    except ConnectionError as error:
        raise ValueError(f"--ray-address {address}: no Ray cluster answers there ({error}). Start one with `ray start --head`, or leave the flag out. "
                         "If there is one, compare RAY_AUTH_MODE and its token (README, several nodes).") from None


async def placement(parts: "Parts") -> str:
    """Which part runs on which node."""
    names = [f"engine {i}" for i in range(len(parts.engines))] + [f"trainer rank {i}" for i in range(len(parts.trainer.ranks))] + [f"agent worker {i}" for i in range(len(parts.workers))]
    actors, nodes = parts.engines + parts.trainer.ranks + parts.workers, {}
    for name, node in zip(names, await asyncio.gather(*[a.__ray_call__.remote(lambda self: ray.get_runtime_context().get_node_id()) for a in actors])):
        nodes.setdefault(node[:6], []).append(name)
    return "; ".join(f"node {node}: {', '.join(names)}" for node, names in nodes.items())


GPUS = {"gloo": 0, "nccl": 1, "ipc": 0.5}                # of a rank or engine worker; ipc: engine and trainer share the one GPU


def on_node(plan: Plan, i: int) -> dict:
    """Options of the i-th actor of a kind: its GPUs say on which node it runs; where there are none, actors take the nodes in turn."""
    if plan.transfer != "gloo" or len(plan.nodes) == 1:
        return {}
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    alive = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(alive[i % len(alive)], soft=True)}


def make_trainer(cfg: Config, plan: Plan) -> Trainer:
    threads = {"env_vars": {"OMP_NUM_THREADS": str(max(1, plan.cores * len(plan.nodes) // cfg.trainer.trainers))}}
    options = [dict(num_cpus=0, num_gpus=GPUS[plan.transfer], runtime_env=threads) | on_node(plan, rank) for rank in range(cfg.trainer.trainers)]
    return Trainer(plan.model, replace(cfg.trainer, ref=plan.ref, critic=plan.critic), cfg.losses, plan.device, plan.dtype, cfg.steps, cfg.seed, options,
                   ref=cfg.reference, critic=ESTIMATORS[cfg.estimator].critic, replay=plan.replay)


def make_pool(cfg: Config, parts: Parts, prompts: list[dict], first: int) -> Pool:
    """The pool of a run that starts at version `first`; its groups go to the parts' workers and engines."""
    gen, P = cfg.generator, cfg.generator.prompts_per_step
    # Seeds make a run repeatable where nothing else decides its tokens: not where a publish may come in between (and a CPU engine ends when it resumes a seeded
    # request), nor on a GPU, whose sums depend on what else is in the batch: there vLLM would only draw for each request by itself, which takes longer.
    seed = None if gen.partial_rollout or parts.plan.device == "cuda" else cfg.seed

    async def run_group(n: int, prompt: dict) -> Group:
        return (await parts.run_groups([(n, prompt)], n, gen.group_size, gen.temperature, seed, "train"))[0]

    return Pool(
        PromptStream(prompts, cfg.seed), run_group, P, gen.max_staleness, gen.order,
        min_rollouts=min(2, gen.group_size) if ESTIMATORS[cfg.estimator].groups else 1, band=gen.dynamic_filter,
        give_up_after=gen.give_up_rounds * P, version=first, wanted=(cfg.steps - first) * P)


async def start(cfg: Config, plan: Plan) -> Parts:
    """Start engines, trainers and agent workers at the same time; the first publish is up to the caller."""
    torch.set_num_threads(1)                             # the driver's tensors are small: a second thread of its own would spin where engine and trainer compute
    gen = replace(cfg.generator, routing_replay="on" if plan.replay else "off")
    threads = 1 if plan.device == "cuda" else max(1, plan.cores * len(plan.nodes) // gen.engines)   # a GPU engine only prepares its steps on the CPU
    engine_threads = {"env_vars": {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}}
    engines = [Engine.options(num_cpus=0, num_gpus=GPUS[plan.transfer] * gen.engine_tp_size, max_concurrency=100_000, runtime_env=engine_threads, **on_node(plan, i))
               .remote(plan.model, gen, plan.dtype, plan.transfer, plan.tie_word_embeddings) for i in range(gen.engines)]
    workers = [AgentWorker.options(num_cpus=0, max_concurrency=100_000, **on_node(plan, i)).remote(plan.model, gen) for i in range(gen.agent_workers)]
    parts = Parts(make_trainer(cfg, plan), engines, workers, plan, gen)
    await parts.start()
    gc.collect()
    gc.freeze()                                          # what was imported: the collector would read all of it, for 0.2 s, every few steps
    if len(plan.nodes) > 1:
        console.print(await placement(parts), soft_wrap=True)
    return parts


# ---------------------------------------------------------------------------------------------------- the loop
async def loop(cfg: Config, parts: Parts, pool: Pool, held_out: list[dict], log: "Log", first: int, kl_scale: float) -> None:
    """One training step, a phase a line. version = batches trained = publishes = what vLLM samples with."""
    trainer, clock, aggregation, method, P = parts.trainer, log.clock, AGGREGATIONS[cfg.losses.aggregation], ESTIMATORS[cfg.estimator], cfg.generator.prompts_per_step
    clock.take()                                                                  # the first step begins here, each other with the row before it
    for version in range(first, cfg.steps):
        async with clock("generate", partial(parts.waiting_for, pool)):
            taking = pool.take(P)                                                 # none started more than max_staleness publishes ago
            groups = await (taking if pool.ready(P) else parts.guarded(taking, version))   # at once where it can: the trainer has its batch before the groups just released are sent out
        async with clock("samples", f"the batch of step {version + 1}"):          # from here on the pool's next groups are generated meanwhile
            batch = collate([rollout for group in groups for rollout in group.rollouts], aggregation, cfg.generator.temperature, cfg.trainer.minibatches, cfg.losses.mask_truncated, version)
            batch.rollout_rewards = shape_rewards(batch, cfg.estimation, cfg.generator.context_length)   # [R]
        async with clock("logprobs", f"the trainer, step {version + 1}: logprobs"):
            batch.old_logprobs = await trainer.logprobs(batch) if cfg.old_first else None   # [B, T]  pi_old, the trainer's view of mu's tokens; None: the update tells it
            if cfg.reference:
                batch.ref_logprobs, batch.kl_scale = await trainer.ref_logprobs(batch), kl_scale   # [B, T]
            if method.critic:
                batch.values = await trainer.values(batch)                        # [B, T]
        async with clock("update", f"the trainer, step {version + 1}: update"):
            batch.advantages = method(batch, cfg.estimation)                      # [B, T]
            metrics = await trainer.update(batch, cfg.losses.loss)                # losses.py, backward, optimizer steps
            if method.critic:
                batch.returns = value_targets(batch, cfg.estimation)              # [B, T]
                metrics |= await trainer.update(batch, "value")
            kl_scale = adapt_kl_scale(kl_scale, metrics.get("ref_kl", 0.0), len(batch.raw_rewards), cfg.losses)
        if not cfg.generator.partial_rollout:
            async with clock("wait", partial(parts.waiting_for, pool)):
                await pool.drained(parts.stalled)                                 # rollouts end under the weights they began with
        async with clock("publish", f"version {version + 1} to be published"):
            await parts.publish(version + 1)                                      # from here on vLLM samples the new weights
        row = log.row(batch, groups, pool, metrics, parts.restarts)
        await log.save(groups, batch)
        if due(cfg.eval_every, version + 1, cfg.steps):
            async with clock("eval", f"the eval of version {version + 1}"):       # before the next publish: one version
                row |= await parts.guarded(evaluate(cfg, parts, held_out, version + 1), version + 1)
                await log.keep_best(row, trainer)
        log.write(row)
        if due(cfg.checkpoint_every, version + 1, cfg.steps):
            async with clock("checkpoint", f"checkpoint {version + 1} to be written"):
                await log.checkpoint(version + 1, trainer, pool, kl_scale)
        pool.release(len(groups), version + 1)                                    # so many new prompts may start


def due(every: int, version: int, last: int) -> bool:
    """Every so many versions (0: never), and at the last one."""
    return version == last or bool(every) and version % every == 0


async def evaluate(cfg: Config, parts: Parts, held_out: list[dict], version: int) -> dict[str, float]:
    """Held-out prompts under the weights of `version`: greedy, and eval_samples sampled answers each (pass@1, pass@k)."""
    prompts, began = held_out[: cfg.eval_prompts], time.monotonic()

    async def run(samples: int, temperature: float, name: str) -> list[Group]:
        numbered = list(enumerate(prompts))
        parted = [numbered[i::len(parts.engines)] for i in range(len(parts.engines))]     # each engine's share, whole: one call
        calls = [parts.run_groups(part, i, samples, temperature, cfg.seed + 1, f"{name}-{version}") for i, part in enumerate(parted)]
        return [group for part in await asyncio.gather(*calls) for group in part]

    def passes(group: Group) -> int:
        return sum(segments[0].reward >= cfg.pass_reward for segments in group.rollouts)

    greedy = await run(1, 0.0, "greedy")
    result = {"eval/greedy": sum(map(passes, greedy)) / len(prompts), "eval/prompts": len(prompts), "eval/version": version}
    result["eval/greedy_reward"] = sum(s[0].reward for g in greedy for s in g.rollouts) / len(prompts)
    sampled = []
    if k := cfg.eval_samples:
        sampled = await run(k, cfg.generator.temperature, "sampled")
        result |= await consistency(cfg, parts, sampled)
        result["eval/pass1"] = sum(map(passes, sampled)) / (k * len(prompts))
        result[f"eval/pass{k}"] = sum(passes(g) > 0 for g in sampled) / len(prompts)
    lost = sum((g.dropped for g in greedy + sampled), Counter())
    result["eval/dropped"] = lost.total()                                           # they count as not passed
    if lost:
        first = next((e for g in greedy + sampled for e in g.errors), "no error was raised")
        console.print(f"[yellow]the eval lost rollouts:[/] {dict(lost)}; {escape(first)}", soft_wrap=True)
    result["eval/seconds"] = time.monotonic() - began
    return result


async def consistency(cfg: Config, parts: Parts, sampled: list[Group], most: int = 256) -> dict[str, float]:
    """|trainer's - engine's logprob| of freshly sampled tokens, nats: both have the same weights here, which training batches seldom have."""
    rollouts = [segments for group in sampled for segments in group.rollouts][:most]
    if not rollouts:
        return {}
    batch = collate(rollouts, AGGREGATIONS["token-mean"], cfg.generator.temperature)
    gap = (await parts.trainer.logprobs(batch) - batch.behaviour_logprobs)[batch.response_mask].abs()      # [N]
    return {"eval/logprob_gap_max": gap.max().item(), "eval/logprob_gap_mean": gap.mean().item()}


# ---------------------------------------------------------------------------------------------------- what is written down
PHASES = ("generate", "wait", "samples", "logprobs", "update", "publish", "rest")   # of a step: fields <phase>_seconds of its row, which add up to step_seconds


class Clock:
    """Where a step's seconds go: `async with clock("update", what):` waits for `what`, and adds the seconds to that phase.

    A step lasts from one `take` to the next. `rest` is what no phase timed: after a row is made, the log and
    release are the next row's rest. What is timed under a name that is no phase (eval, checkpoint) is no part of the step.
    """

    def __init__(self, deadline: float):
        self.seconds, self.began, self.deadline = Counter(), time.monotonic(), deadline

    @asynccontextmanager
    async def __call__(self, phase: str, what: str | Callable[[], Awaitable[str]]) -> AsyncIterator[None]:
        with self.timing(phase):
            async with waiting(what, self.deadline):
                yield

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[phase] += time.monotonic() - start

    def take(self) -> dict[str, float]:
        """Seconds of each phase and of the step; the next step begins now."""
        now = time.monotonic()
        self.seconds["rest"] = now - self.began - self.seconds.total()
        seconds = {f"{phase}_seconds": self.seconds[phase] for phase in PHASES}
        self.seconds, self.began = Counter(), now
        return seconds | {"step_seconds": sum(seconds.values())}


class Log:
    """runs/<name>/: config.json, metrics.jsonl, reward.png, staleness.png, time.png, time.txt, tensorboard/, rollouts/, checkpoints/<version>/, best/; and the terminal."""

    COLUMNS = {                        # metric -> (heading, format) of the terminal's table
        "step": ("step", "{:.0f}"), "reward": ("reward", "{:.3f}"), "staleness_mean": ("stale", "{:.2f}"), "staleness_max": ("max stale", "{:.0f}"), "mismatch_kl": ("mismatch kl", "{:.1e}"),
        "ess_frac": ("ess", "{:.3f}"), "grad_norm": ("grad norm", "{:.2f}"), "tokens_per_second": ("tokens/s", "{:.0f}"),
    } | {f"{phase}_seconds": (f"{phase} s", "{:.2f}") for phase in (*PHASES[:-1], "step")}

    def __init__(self, cfg: Config, directory: Path, first: int):
        from torch.utils.tensorboard import SummaryWriter

        self.cfg, self.directory, self.clock, self.saving = cfg, directory, Clock(cfg.wait_timeout), None
        (directory / "rollouts").mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(asdict(cfg), indent=1))
        (directory / "error.log").unlink(missing_ok=True)                            # of an earlier start
        metrics = directory / "metrics.jsonl"
        self.rows = [row for row in read_rows(metrics) if row["step"] <= first]
        metrics.write_text("".join(json.dumps(row) + "\n" for row in self.rows))     # rows beyond the checkpoint will be made again
        self.tensorboard = SummaryWriter(str(directory / "tensorboard"), purge_step=first + 1)
        self.wandb = None
        if cfg.wandb:
            import wandb

            self.wandb = wandb.init(project="nanomolt", name=directory.name, config=asdict(cfg), dir=str(directory))
        self.live = Live(self.table(), console=console, refresh_per_second=4, transient=False) if console.is_terminal else None
        if self.live:
            self.live.start()

    def table(self) -> Table:
        table = Table(padding=0, title=f"{self.directory}  step {self.rows[-1]['step'] if self.rows else 0} of {self.cfg.steps}", title_justify="left")
        for heading, _ in self.COLUMNS.values():
            table.add_column(heading, justify="right")
        for row in [r for r in self.rows if "reward" in r][-12:]:
            table.add_row(*[form.format(row.get(name, math.nan)) for name, (_, form) in self.COLUMNS.items()])   # rows of an older run lack some
        return table

    def write(self, row: dict) -> None:
        """One row to metrics.jsonl, TensorBoard, wandb and the terminal."""
        self.rows.append(row)
        with (self.directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        for name, value in row.items():
            self.tensorboard.add_scalar(name, value, row["step"])
        if self.wandb:
            self.wandb.log(row, step=row["step"])
        if self.live:
            self.live.update(self.table())
        elif "reward" in row and (row["step"] % 10 == 0 or row["step"] == 1):
            console.print("  ".join(f"{heading} {form.format(row[name])}" for name, (heading, form) in self.COLUMNS.items()), soft_wrap=True)
        if "eval/greedy" in row:
            shown = "  ".join(f"{name.removeprefix('eval/')} {value:.1e}" if "gap" in name else f"{name.removeprefix('eval/')} {value:.3f}" for name, value in row.items() if name.startswith("eval/") and isinstance(value, float))
            to = self.live.console if self.live else console
            to.print(f"[bold]eval of version {row['eval/version']}[/], {row['eval/prompts']} held-out prompts: {shown}", soft_wrap=True)
            with self.clock.timing("eval"):
                self.plot()

    def row(self, batch: Batch, groups: list[Group], pool: Pool, metrics: dict, restarts: int) -> dict:
        """The metrics of one step; batch.version is that of the weights before it, the row carries the one after it."""
        response, version = batch.response_mask, batch.version
        staleness = version - batch.policy_versions[response]                       # [N] in publishes
        gap = (batch.old_logprobs - batch.behaviour_logprobs)[response][staleness == 0].abs()   # nats, where trainer and engine had the same weights
        self.clock.seconds.update(generate=-pool.head_seconds, wait=pool.head_seconds)          # adds: behind a straggler, `take` waits for the head of the line
        seconds = self.clock.take()
        infos = [segments[-1].info for g in groups for segments in g.rollouts]
        rewards, tokens = batch.raw_rewards, int(response.sum())
        weight, squared = metrics.pop("mismatch_weight"), metrics.pop("mismatch_weight_squared")
        before = [segments[0].reward >= self.cfg.pass_reward for g in pool.considered for segments in g.rollouts]
        row = {
            "step": version + 1, "version": version + 1, "epoch": pool.stream.epoch(groups[-1].index),
            "reward": rewards.mean().item(), "shaped_reward": batch.rollout_rewards.mean().item(), "reward_std": rewards.std(unbiased=False).item(), "truncated_frac": batch.truncated.float().mean().item(),
            "staleness_mean": staleness.float().mean().item(), "staleness_max": staleness.max().item(),
            "rollouts": len(rewards), "response_tokens": tokens, "response_length": tokens / len(rewards), "tokens_per_second": tokens / seconds["step_seconds"],
            "pass_rate": sum(before) / len(before), "ess_frac": weight ** 2 / squared if squared else 0.0,
            "engine_restarts": restarts, "dropped_groups": pool.dropped_groups,
        } | {f"dropped/{reason}": n for reason, n in pool.dropped.items()} | metrics | seconds
        row |= {"logprob_gap_max": gap.max().item(), "logprob_gap_mean": gap.mean().item()} if len(gap) else {}
        row |= {f"age{age}/tokens": int(n) for age, n in enumerate(torch.bincount(staleness.long())) if n}
        for name in {k for info in infos for k, v in info.items() if isinstance(v, (int, float))}:
            values = [info[name] for info in infos if isinstance(info.get(name), (int, float))]
            row[f"info/{name}"] = sum(values) / len(values)
        if batch.ref_logprobs is not None:
            row["kl_scale"] = batch.kl_scale
        if batch.values is not None:
            spread = batch.returns[response].var(unbiased=False)
            row["explained_variance"] = (1 - (batch.returns - batch.values)[response].var(unbiased=False) / spread).item() if spread > 0 else 0.0
        if metrics["mismatch_cut_frac"] > 0.999 and self.cfg.losses.mismatch_mode == "mask":
            console.print(f"[yellow]step {version + 1}: --mismatch-mode mask dropped every token, so nothing was learned.[/] Widen --mismatch-low/-high or --mismatch-limit.")
        pool.head_seconds, pool.considered = 0.0, []
        return row

    async def save(self, groups: list[Group], batch: Batch) -> None:
        """What was trained, to rollouts/, in a thread beside the next step; what was given before is written when this returns."""
        await self.saved()
        if self.cfg.save_rollouts:
            self.saving = asyncio.ensure_future(asyncio.to_thread(save_rollouts, self.directory / "rollouts" / f"{batch.version + 1:06d}.npz", groups, batch))

    async def saved(self) -> None:
        if self.saving:
            await self.saving

    async def keep_best(self, row: dict, trainer: Trainer) -> None:
        """Export to best/ when the eval is better than that of what lies there (a resumed run may have lost the row): the weights are those of the eval, for it ended before the next update."""
        said = self.directory / "best" / "eval.json"
        if row["eval/greedy"] > (json.loads(said.read_text())["eval/greedy"] if said.is_file() else -1.0):
            await trainer.export(said.parent.resolve())
            said.write_text(json.dumps({k: v for k, v in row.items() if k.startswith("eval/")}, indent=1))

    async def checkpoint(self, version: int, trainer: Trainer, pool: Pool, kl_scale: float) -> None:
        """checkpoints/<version>: trainer state and the pool's place; it counts as finished only under its final name."""
        await self.saved()                               # rollouts/ is whole up to a checkpoint
        path = (self.directory / "checkpoints" / f"{version:06d}").resolve()
        await trainer.save(path, {"version": version, "kl_scale": kl_scale}, pool.state())
        for old in sorted(finished_checkpoints(self.directory))[: -self.cfg.keep_checkpoints]:
            shutil.rmtree(old)

    def plot(self) -> None:
        from recipes.plot import plot                    # matplotlib takes a second to import

        plot(self.directory)

    def close(self) -> None:
        if self.live:
            self.live.stop()
        try:
            self.plot()
            self.tensorboard.close()
            if self.wandb:
                self.wandb.finish()
        except OSError as error:                         # a full disk may be why the run ends
            console.print(f"[yellow]the last metrics and pictures could not be written:[/] {escape(str(error))}")


def save_rollouts(path: Path, groups: list[Group], batch: Batch) -> None:
    """Every trained trajectory of a step as flat arrays: segment i owns [offsets[i], offsets[i + 1]) of the token arrays.

    With what the trainer computed before the update (old_logprobs, and ref_logprobs and values where there are such), so
    that recipes/explain.py can show how each token was trained.
    """
    import numpy as np

    rows = [s for g in groups for segments in g.rollouts for s in segments]           # in the order of the batch's rows
    tokens = {name: np.concatenate([getattr(s, name) for s in rows]) for name in ("token_ids", "response_mask", "behaviour_logprobs", "policy_versions")}
    for name in ("old_logprobs", "ref_logprobs", "values"):
        if (tensor := getattr(batch, name)) is not None:
            tokens[name] = np.concatenate([row[: len(s)].numpy() for row, s in zip(tensor, rows)])
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        np.savez_compressed(
            file, **tokens, offsets=np.cumsum([0] + [len(s) for s in rows]), rollout=[s.rollout for s in rows], group=[s.group for s in rows],
            reward=[s.reward for s in rows], truncated=[s.truncated for s in rows], info=[json.dumps(s.info, default=str) for s in rows])
    unfinished.rename(path)


def read_rows(metrics: Path) -> list[dict]:
    """Rows of a metrics.jsonl; a last line that a kill cut short is left out."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def finished_checkpoints(directory: Path) -> list[Path]:
    return [p for p in (directory / "checkpoints").glob("*") if p.name.isdigit() and (p / "run.json").is_file()]


# ---------------------------------------------------------------------------------------------------- the run
async def run(cfg: Config, plan: Plan, directory: Path) -> None:
    """Start everything, train, leave nothing running."""
    gen = cfg.generator
    prompts, held_out, began = read_prompts(gen, "train"), read_prompts(gen, "eval"), time.monotonic()
    console.print(f"starting Ray, {gen.engines} vLLM engine(s), {cfg.trainer.trainers} trainer rank(s), {gen.agent_workers} agent worker(s)")
    with console.status("this takes half a minute to a minute on a CPU") if console.is_terminal else nullcontext():
        if cfg.ray_address is None:
            start_ray(None)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)   # after ray.init, which sets its own
        parts, log = None, None
        try:
            async with waiting("engines, trainer ranks and agent workers to load", cfg.wait_timeout):
                parts = await start(cfg, plan)
                checkpoints = sorted(finished_checkpoints(directory)) if cfg.resume else []
                saved, in_flight = await parts.trainer.load(checkpoints[-1].resolve()) if checkpoints else ({"version": 0, "kl_scale": 1.0}, None)
                first = saved["version"]
                await parts.publish(first)                                          # engines are synced before anything is sampled
        except BaseException:
            ray.shutdown()
            raise
    try:
        console.print(f"{directory}: ready after {time.monotonic() - began:.0f} s, starting from version {first}")
        log, watching = Log(cfg, directory, first), asyncio.ensure_future(parts.watch())
        watching.add_done_callback(lambda task: task.cancelled() or console.print(f"[yellow]engines and workers are no longer watched:[/] {escape(repr(task.exception()))}"))
        if first == 0:
            async with log.clock("eval", "the eval of version 0"):
                row = {"step": 0, "version": 0} | await parts.guarded(evaluate(cfg, parts, held_out, 0), 0)
                await log.keep_best(row, parts.trainer)
            log.write(row)
        pool = make_pool(cfg, parts, prompts, first)
        if in_flight:
            pool.load_state(in_flight)
            pool.release(0, first)                                                  # as after the checkpoint: what is too old by now goes back in line
        await loop(cfg, parts, pool, held_out, log, first, saved["kl_scale"])
        async with waiting("the policy to be written to hf/", cfg.wait_timeout):
            await parts.trainer.export((directory / "hf").resolve())
    finally:
        try:
            if log:
                log.close()
            rest = asyncio.all_tasks() - {asyncio.current_task()}                   # groups in flight, the watch: before Ray, which they use
            for task in rest:
                task.cancel()
            await asyncio.wait([*rest, *[asyncio.ensure_future(e.stop.remote()) for e in parts.engines]], timeout=10)
        finally:
            ray.shutdown()
    console.print(f"done: {directory}/ has reward.png, staleness.png, time.png, time.txt, metrics.jsonl, tensorboard/, rollouts/, checkpoints/, best/ and hf/ (transformers and vLLM load both)")


def from_dict(cls, values: dict):
    """config.json back into its dataclass."""
    rooms = {f.name: f.type.__origin__ for f in fields(cls) if isinstance(values.get(f.name), dict)}
    def value(f):
        seen = values[f.name]
        return from_dict(rooms[f.name], seen) if f.name in rooms else tuple(seen) if isinstance(seen, list) else seen
    return cls(**{f.name: value(f) for f in fields(cls) if f.name in values})


def parse(args: list[str] | None = None) -> tuple[Config, Path]:
    """Flags -> (Config, run directory). With --resume the run's own config.json gives the defaults."""
    cfg = tyro.cli(Config, args=args)
    runs = Path("runs")
    if not cfg.resume:
        directory = runs / (cfg.name or f"{cfg.estimator}-{time.strftime('%Y%m%d-%H%M%S')}")
        if (directory / "metrics.jsonl").exists():
            raise ValueError(f"{directory} already holds a run. Go on with --resume --name {directory.name}, or choose another --name.")
        return cfg, directory
    started = sorted(runs.glob("*/config.json"), key=lambda p: p.stat().st_mtime)       # written anew at each start
    candidates = [runs / cfg.name] if cfg.name else [p.parent for p in started]
    if not candidates or not (candidates[-1] / "config.json").is_file():
        raise ValueError(f"--resume: no run to go on with {'at ' + str(candidates[-1]) if candidates else 'under runs/'}. "
                         "Name it with --name, or start one without --resume.")
    if not finished_checkpoints(candidates[-1]):
        raise ValueError(f"--resume: {candidates[-1]} has no finished checkpoint. Start anew without --resume, and with a smaller --checkpoint-every.")
    saved = from_dict(Config, json.loads((candidates[-1] / "config.json").read_text()))
    cfg, version = tyro.cli(Config, args=args, default=saved), int(max(finished_checkpoints(candidates[-1])).name)
    if version >= cfg.steps:
        raise ValueError(f"--resume: {candidates[-1]} is at step {version} of {cfg.steps}, so it is finished. Give it a larger --steps to go on.")
    return cfg, candidates[-1]


def main() -> int:
    directory = Path("runs")
    try:
        quiet()
        cfg, directory = parse()
        if cfg.ray_address:                               # what its nodes have decides the plan
            start_ray(cfg.ray_address)
        plan = resolve(cfg)
        if cfg.dry_run:
            table = Table(show_header=False)
            for row in plan.rows(cfg):
                table.add_row(*row)
            console.print(table)
            return 0
        asyncio.run(run(cfg, plan, directory))
        return 0
    except ValueError as error:
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error   # raised in an actor: without its traceback
        console.print(f"[bold red]error:[/] {escape(str(cause))}", soft_wrap=True)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(f"[bold yellow]stopped.[/] {way_on(directory)}")
        return 130
    except Exception as error:                            # a dead or stuck trainer rank, a full disk, a fault of ours
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "error.log").write_text(traceback.format_exc())
        actor = "an engine, a trainer rank or an agent worker died, its log is in /tmp/ray/session_latest/logs. " if isinstance(error, ray.exceptions.RayActorError) else ""
        console.print(f"[bold red]error:[/] {actor}{type(error).__name__}: {escape((str(error).strip().splitlines() or [''])[-1])}\n"
                      f"The whole of it is in {directory}/error.log. {way_on(directory)}", soft_wrap=True)
        return 1


def way_on(directory: Path) -> str:
    """How a run that ended early can go on."""
    finished = sorted(finished_checkpoints(directory))
    return f"Go on from version {int(finished[-1].name)} with --resume." if finished else "There is no checkpoint yet."


if __name__ == "__main__":
    sys.exit(main())
