"""generator.py owns how rollouts come about: Completion, Engine, AgentWorker, Pool and where prompts come from.

It knows no advantages, padding or losses, and not how weights arrive: it only names weight_sync's receiver to vLLM.
The path of a rollout: the Pool (in the driver's event loop) starts a prompt group, an AgentWorker (Ray) runs its
episodes, an Engine (Ray, vLLM AsyncLLM) turns token ids into token ids + behaviour logprobs + policy versions.
Every sampling field is sent explicitly, so no file of the model can change what the trainer assumes.

Letters: G rollouts of one prompt, P prompt groups of a step, E engines, W workers.
Sources: the streaming pool is arXiv:2607.21653, section 3; the order-of-start rule is explained at Pool.
"""

import asyncio
import gc
import itertools
import json
import os
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

import numpy as np
import ray

from agent import UNSAID, Budget, ChatAgent, ChatContext, Image, Result, Trajectory, as_messages, checked_reward, load_agent, load_vision, picture, run_episode


# ---------------------------------------------------------------------------------------------------- configuration
@dataclass(frozen=True)
class GeneratorConfig:
    """Where rollouts come from."""

    agent: str = "recipes/arithmetic.py"   # Python module that exports AgentRunner, and prompts(split) unless --prompts is given
    prompts: str | None = None         # JSONL file or Hugging Face data set of prompts (prompt or messages, label, tools); None = the agent's
    prompts_per_step: int = 32         # P, prompt groups of a training step
    group_size: int = 8                # G, rollouts of a prompt
    dynamic_filter: tuple[float, float] | None = None   # keep groups whose mean reward lies strictly between the two, replace the others; None = keep all
    max_staleness: int = 1             # k, publishes that a rollout may have started before the step that trains it; 0 = strictly on-policy
    order: Literal["start", "finished"] = "start"   # which groups a step takes: the first started, or the first complete (favours short answers, drops stale groups)
    partial_rollout: bool = False      # keep rollouts in flight across a publish: they go on under the new weights; without, a publish waits for them
    give_up_rounds: int = 8            # steps' worth of prompt groups that may be dropped in a row before the run stops and says why
    context_length: int = 128          # tokens of prompt and all turns together
    max_new_tokens: int | None = 8     # tokens of one answer; None = whatever the context leaves
    temperature: float = 1.0           # sampling temperature in training; the trainer divides its logits by it
    tool_parser: str | None = None     # vLLM's parser of a ChatAgent's tool calls (hermes, qwen3_coder, llama3_json, ...); None = calls stay text
    reasoning_parser: str | None = None   # vLLM's parser of a ChatAgent's reasoning (qwen3, deepseek_r1, ...); None = it stays in the text
    routing_replay: Literal["auto", "on", "off"] = "auto"   # a mixture's trainer takes the experts that the engine chose for each token; auto: on a GPU, whose engine can tell them
    engines: int = 1                   # E, vLLM engines; a rollout stays on one
    engine_tp_size: int = 1            # GPUs of one engine (tensor parallel)
    engine_args: str = "{}"            # further fields of vLLM's AsyncEngineArgs, verbatim, as JSON: '{"speculative_config": {"method": "ngram", ...}, "kv_cache_dtype": "fp8"}'
    agent_workers: int = 1             # W, processes that run agents
    max_num_seqs: int = 512            # sequences an engine runs at once
    max_num_batched_tokens: int = 16384   # tokens an engine takes in one step
    kv_cache_gb: float | None = None   # KV cache of an engine, GB; None = 1 on a CPU, on a GPU what --gpu-memory-utilization leaves
    gpu_memory_utilization: float | None = None   # share of its GPU an engine takes; None = 0.85, or 0.4 where it shares the GPU with the trainer
    enforce_eager: bool = False        # GPU engine without torch.compile and CUDA graphs: starts sooner, samples slower
    rollout_timeout: float = 600.0     # seconds one rollout may take before it is dropped and counted
    engine_timeout: float = 60.0       # seconds an engine may leave a question unanswered before it is restarted
    publish_timeout: float = 600.0     # seconds a publish may take before all engines are restarted

    def __post_init__(self):
        for name in ("prompts_per_step", "group_size", "give_up_rounds", "engines", "agent_workers", "context_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: want at least 1.")
        if self.dynamic_filter and (self.group_size == 1 or not self.dynamic_filter[0] < self.dynamic_filter[1]):
            raise ValueError(f"--dynamic-filter {self.dynamic_filter[0]} {self.dynamic_filter[1]}: want the lower limit first, then a higher one, and --group-size "
                             f"above 1 (it is {self.group_size}): it keeps prompts that are neither always solved nor never.")
        if self.max_staleness < 0:
            raise ValueError(f"--max-staleness {self.max_staleness}: want 0 (strictly on-policy) or more.")
        if self.partial_rollout and self.max_staleness == 0:
            raise ValueError("--partial-rollout with --max-staleness 0: a step then waits for all its rollouts, so none is in flight at a publish. Use --max-staleness 1 or more.")
        if not 0 < self.temperature <= 2:
            raise ValueError(f"--temperature {self.temperature}: training samples, so it must be above 0 (greedy decoding is for evals), and vLLM takes 2 at most.")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens {self.max_new_tokens}: want at least 1, or None for what the context leaves.")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization < 1:
            raise ValueError(f"--gpu-memory-utilization {self.gpu_memory_utilization}: want a share of the GPU, above 0 and below 1.")
        if self.kv_cache_gb is not None and self.kv_cache_gb <= 0:
            raise ValueError(f"--kv-cache-gb {self.kv_cache_gb}: want a size above 0, or None for the default.")
        if self.tool_parser or self.reasoning_parser:
            from chat_server import check_parsers

            check_parsers(self.tool_parser, self.reasoning_parser)
        if self.max_num_batched_tokens < self.context_length:
            raise ValueError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --context-length {self.context_length}: prompts are never cut "
                "into chunks, so one step must hold the longest.")

        check_engine_args(self.engine_arguments, self.drafts)

    @property
    def engine_arguments(self) -> dict:
        """--engine-args, read."""
        try:
            given = json.loads(self.engine_args)
        except json.JSONDecodeError as error:
            raise ValueError(f"--engine-args {self.engine_args}: no JSON ({error}). Want an object of vLLM's AsyncEngineArgs fields, quoted for the shell.") from None
        if not isinstance(given, dict):
            raise ValueError(f"--engine-args {self.engine_args}: want a JSON object, field name to value.")
        return given

    @property
    def quantised_cache(self) -> bool:
        """The KV cache holds fewer bits than the model's dtype."""
        return self.engine_arguments.get("kv_cache_dtype", "auto") not in (None, "auto", "bfloat16", "float16", "float32")

    @property
    def drafts(self) -> dict:
        """How the engine speculates, as vLLM's SpeculativeConfig; empty = not at all."""
        given = self.engine_arguments
        if not isinstance(given.get("speculative_config") or {}, dict):
            raise ValueError(f"--engine-args: speculative_config {given['speculative_config']!r}: want an object such as {{\"method\": \"ngram\", \"num_speculative_tokens\": 3}}.")
        return (given.get("speculative_config") or {}) | {field: given[flag] for flag, field in (("spec_method", "method"), ("spec_model", "model"), ("spec_tokens", "num_speculative_tokens")) if flag in given}

    def gpu_share(self, shared: bool) -> float:
        """Share of the memory of its GPU that an engine takes; `shared`: the trainer is on the same one."""
        return self.gpu_memory_utilization or (0.4 if shared else 0.85)


FIXED_ENGINE_ARGS = {                  # fields of AsyncEngineArgs that --engine-args may not set -> why, and the way out
    "model": "it is --model", "dtype": "it is --dtype", "max_model_len": "it is --context-length", "tensor_parallel_size": "it is --engine-tp-size",
    "max_num_seqs": "it is --max-num-seqs", "max_num_batched_tokens": "it is --max-num-batched-tokens", "gpu_memory_utilization": "it is --gpu-memory-utilization",
    "kv_cache_memory_bytes": "it is --kv-cache-gb", "enforce_eager": "it is --enforce-eager",
    "reasoning_parser": "it is --reasoning-parser", "seed": "each request carries its own", "logprobs_mode": "the trainer compares logprobs after the temperature",
    "load_format": "weights come by publishes only", "weight_transfer_config": "weights come by publishes only", "worker_cls": "weight_sync's receiver is mixed into vLLM's own worker",
    "worker_extension_cls": "weight_sync's receiver is mixed into vLLM's own worker", "hf_overrides": "engine and trainer must have one architecture",
    "tokenizer": "ids and text must mean the same to engine and agents", "quantization": "a publish sends the trainer's weights, so quantised ones would be another policy than the one trained",
    "quantization_config": "a publish sends the trainer's weights, so quantised ones would be another policy than the one trained", "enable_lora": "a publish sends whole weights",
    "enable_return_routed_experts": "it is --routing-replay",
    "logits_processors": "they change what is sampled, and the trainer does not know them", "enable_chunked_prefill": "a seeded request whose prefill is cut into chunks kills a CPU engine",
    "stream_interval": "tokens held back over a publish would carry the label of the next version", "pipeline_parallel_size": "a transfer group has --engine-tp-size workers of each engine",
    "data_parallel_size": "a transfer group has --engine-tp-size workers of each engine; use --engines", "nnodes": "an engine runs on one node",
    "mm_processor_kwargs": "engine and trainer must see the same pixels", "mm_device_do_normalize": "its buffers are overwritten by dummy weights, and no publish mends them",
    "mm_processor_cache_gb": "a pause would empty its two ends one after the other", "prefill_context_parallel_size": "a transfer group has --engine-tp-size workers of each engine",
    "distributed_executor_backend": "the transfer group counts on vLLM's own processes",
}
DRAFTS = ("ngram", "ngram_gpu", "suffix")   # speculation from the text itself: no weights that a publish would leave behind


def check_engine_args(given: dict, drafts: dict) -> None:
    """Raises ValueError for a field that vLLM's AsyncEngineArgs has not, that a flag of its own sets, or that would break what training counts on."""
    if not given:
        return
    from vllm import AsyncEngineArgs

    known = [f.name for f in fields(AsyncEngineArgs)]
    for name in given:
        if name not in known:
            raise ValueError(f"--engine-args: vLLM's AsyncEngineArgs has no field {name!r}. Close to it: {', '.join(get_close_matches(name, known, 5, 0.5)) or 'nothing'}.")
        if name in FIXED_ENGINE_ARGS:
            raise ValueError(f"--engine-args: {name} cannot be set there: {FIXED_ENGINE_ARGS[name]}. Leave it out.")
    if drafts and drafts.get("method") not in DRAFTS:
        raise ValueError(f"--engine-args: speculation by method {drafts.get('method')!r} (model {drafts.get('model')!r}) needs weights of its own, and a publish sends the policy's only: "
                         f"drafts would come from dummy or old weights. Use a method that drafts from the text: {', '.join(DRAFTS)}.")
    if drafts.get("rejection_sample_method") == "synthetic":
        raise ValueError("--engine-args: rejection_sample_method 'synthetic' accepts drafts that the policy would not sample, so logprobs are not those of the tokens' distribution. Use 'standard'.")


@dataclass(frozen=True)
class Sampling:
    """How an answer is sampled. In training only the temperature is free; evals may be greedy (temperature 0)."""

    temperature: float = 1.0
    seed: int | None = None            # None: not seeded


# ---------------------------------------------------------------------------------------------------- engine
@dataclass
class Completion:
    """One answer: n sampled ids with their logprobs (nats) and the version of the weights that sampled each, all [n]."""

    token_ids: np.ndarray              # int32
    logprobs: np.ndarray               # float32
    policy_versions: np.ndarray        # int32
    finish_reason: str                 # "stop" or "length"
    stop_reason: int | str | None = None   # a stop string, or a stop token that is not the eos
    routed_experts: np.ndarray | None = None   # [prompt + n - 1, layers, k] experts of every token but the last, int8 or int16; None: not told


def read_completion(token_ids: list[int], told, versions: list[int], finish_reason: str, stop_reason: int | str | None, name: str,
                    routed_experts: np.ndarray | None = None, prompt: int = 0) -> Completion:
    """vLLM's tokens and its FlatLogprobs of them (one entry each) -> Completion; raises ValueError, naming the request, when a sampled token has no logprob.

    So it does when experts are told, but not those of every token of prompt (a number of tokens) and answer but the last:
    which token a row is of would be a guess. Layers count as in the model; a dense one has zeros.
    """
    if len(told.token_ids) != len(token_ids):
        raise ValueError(f"vLLM returned {len(told.token_ids)} logprobs for {len(token_ids)} sampled tokens ({name}). "
                         "Every sampled token needs its behaviour logprob; check SamplingParams.logprobs in generator.py.")
    if absent := [token for token, of in zip(token_ids, told.token_ids) if token != of]:
        raise ValueError(f"vLLM returned no logprob for sampled token {absent[0]} ({name}); check logprobs_mode in generator.py.")
    if finish_reason not in ("stop", "length"):
        raise ValueError(f"vLLM ended {name} with {finish_reason!r} after {len(token_ids)} tokens: that is no end of an answer, so the rollout cannot be used.")
    if routed_experts is not None:
        if len(routed_experts) != prompt + len(token_ids) - 1:
            raise ValueError(f"vLLM told the experts of {len(routed_experts)} tokens ({name}), which has {prompt} + {len(token_ids)}: want one row for each but the last. "
                             "Use --routing-replay off.")
        routed_experts = routed_experts.astype(np.int8 if routed_experts.max() < 128 else np.int16)     # signed: the trainer marks what is not known by -1
    return Completion(
        np.asarray(token_ids, np.int32), np.asarray(told.logprobs, np.float32),
        np.asarray(versions, np.int32), finish_reason, stop_reason, routed_experts)


class EngineGone(RuntimeError):
    """An engine that has just been restarted has no weights yet: its caller must wait for the run to mend it."""


@ray.remote(max_restarts=-1, concurrency_groups={"control": 64})
class Engine:
    """One vLLM AsyncLLM: token ids in, Completions out, labelled with the version of the weights that sampled them.

    Control calls (pause, weight update, resume, health) have a concurrency group, and so an event loop, of their own:
    thousands of waiting generates never keep a publish from starting. Ray restarts the actor when it dies; it then
    waits for `start` and a publish, like a new one.
    """

    def __init__(self, model: str, cfg: GeneratorConfig, dtype: str, transfer: str, tie_word_embeddings: bool):
        self.model, self.cfg, self.dtype, self.transfer = model, cfg, dtype, transfer
        self.untie = tie_word_embeddings and transfer == "gloo"    # the CPU engine prepacks a head of its own
        self.version = -1                                          # dummy weights: nothing may be sampled before the first publish
        self.edges: dict[str, list[tuple[int, int]]] = {}          # request in flight over a publish -> (its tokens up to here, the version that sampled them)
        self.missing: list[str] | None = None                      # engine parameters that the last update did not reach; None: it is not over
        self.serial = itertools.count()                            # a name may come again, before a cancelled request of the same one has left
        self.llm = None

    async def start(self, orphans: list[int] = []) -> list[int]:
        """Load vLLM with dummy weights; the real ones come with the next publish. Returns the ids of vLLM's processes.

        `orphans` are those of the actor's earlier life: they outlive it, and would keep their memory.
        """
        import psutil
        from vllm import AsyncEngineArgs
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.v1.engine.async_llm import AsyncLLM

        for process in psutil.process_iter():
            if process.pid in orphans and "VLLM" in process.name():
                process.kill()
        self.loop, self.vision = asyncio.get_running_loop(), load_vision(self.model)
        cpu = {"enforce_eager": True, "distributed_executor_backend": "uni"}
        gpu = {"gpu_memory_utilization": self.cfg.gpu_share(self.transfer == "ipc"), "tensor_parallel_size": self.cfg.engine_tp_size, "enforce_eager": self.cfg.enforce_eager}
        cache = self.cfg.kv_cache_gb or (1.0 if self.transfer == "gloo" else None)
        fixed = dict(
            model=self.model, dtype=self.dtype, load_format="dummy", max_model_len=self.cfg.context_length, max_num_seqs=self.cfg.max_num_seqs,
            max_num_batched_tokens=self.cfg.max_num_batched_tokens, enable_chunked_prefill=False, enable_prefix_caching=True,
            kv_cache_memory_bytes=int(cache * 2**30) if cache else None, block_size=32 if self.transfer == "gloo" else None, logprobs_mode="processed_logprobs", disable_log_stats=True,
            mm_device_do_normalize=False,                          # else pixels are scaled by buffers of the engine's model, which dummy weights overwrite and no publish mends
            mm_processor_cache_gb=0,                               # its two ends are emptied one after the other at a pause: an image between would be missing later
            worker_extension_cls="weight_sync.Receiver", enable_return_routed_experts=self.cfg.routing_replay == "on",
            hf_overrides={"tie_word_embeddings": False} if self.untie else {},
            weight_transfer_config=WeightTransferConfig(backend=self.transfer), **(cpu if self.transfer == "gloo" else gpu))
        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**fixed | self.cfg.engine_arguments))
        await self.llm.collective_rpc("watch_weights")
        gc.freeze()
        return [process.pid for process in psutil.Process().children(recursive=True)]

    async def generate(self, requests: list[tuple], sampling: list[Sampling]) -> list[Completion]:
        """(name, token_ids, max_tokens, stop strings and, where token_ids show some, images) of each request -> its Completion, in order."""
        return await asyncio.gather(*[self._one(s, *request) for request, s in zip(requests, sampling)])

    async def _one(self, sampling: Sampling, name: str, token_ids: np.ndarray, max_tokens: int, stop: list[str], images: list[Image] = []) -> Completion:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams   # not from vllm, which looks the name up anew each time

        if self.version < 0:
            raise EngineGone("This engine still has dummy weights; publish a version before anything is sampled.")
        params = SamplingParams(
            n=1, temperature=sampling.temperature, top_p=1.0, top_k=0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0,
            repetition_penalty=1.0, seed=sampling.seed, max_tokens=max_tokens, min_tokens=0, stop=stop or None, ignore_eos=False, logprobs=0, flat_logprobs=True,
            detokenize=bool(stop), skip_special_tokens=False, skip_clone=True, include_stop_str_in_output=True, output_kind=RequestOutputKind.FINAL_ONLY,
            logit_bias={self.vision.token: UNSAID} if self.vision else None)
        prompt = token_ids.tolist()
        asked = tokens_input(prompt)                               # nothing to render; a raw prompt would go through a thread of vLLM's
        if images:
            asked = {"prompt_token_ids": self.vision.collapse(prompt, images), "multi_modal_data": {"image": [picture(image.file) for image in images]}}
        request = f"{name}-{next(self.serial)}"
        try:
            async for output in self.llm.generate(asked, params, request_id=request):
                pass                                               # the last, and only, one is whole
        except Exception:
            if self.llm.errored:                                   # vLLM's own process died: so does this actor, everyone learns it, and Ray restarts it
                os._exit(1)
            raise
        finally:
            edges = self.edges.pop(request, [])
        if output.prompt_token_ids != prompt:
            raise ValueError(f"vLLM expanded the images of {name} to a prompt of {len(output.prompt_token_ids)} tokens, the model's processor to another one of {len(prompt)}: "
                             "what is trained must be what was seen. This model's images are not supported.")
        answer, versions = output.outputs[0], []
        for end, version in [*edges, (len(answer.token_ids), self.version)]:
            versions += [version] * (end - len(versions))
        return read_completion(answer.token_ids, answer.logprobs, versions, answer.finish_reason, answer.stop_reason, name, answer.routed_experts, len(prompt))

    async def _control(self, coroutine):
        """Run on the loop that vLLM's client lives on: control calls arrive on another one."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    @ray.method(concurrency_group="control")
    async def serving(self) -> int | None:
        """Version of the weights it serves (-1: none yet), told only if vLLM's own processes answer; None: not started."""
        if self.llm is None:
            return None
        await self._control(self.llm.collective_rpc("ping"))
        return self.version

    @ray.method(concurrency_group="control")
    async def pause(self) -> None:
        """Freeze what is in flight and drop the caches of the old weights.

        AsyncLLM.pause_generation would also sleep 20 ms, for old tokens to arrive: here the send lies between, and the label changes after it.
        """
        self.missing = None
        await self._control(self.llm.renderer.clear_mm_cache_async())
        await self._control(self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True))

    @ray.method(concurrency_group="control")
    async def resume(self, version: int) -> list[str]:
        """From here on tokens are of `version`; those that requests in flight have so far are of the one before. Returns the engine parameters that the update did
        not reach; if there are any, it stays paused.

        What vLLM's process sent before the pause may still lie in its client's queue, or be under way through it in pieces
        of 128 requests: it is counted first.
        """
        async def relabel() -> None:
            while not self.llm.engine_core.outputs_queue.empty():
                await asyncio.sleep(0)
            for _ in range(self.cfg.max_num_seqs // 128 + 2):
                await asyncio.sleep(0)
            for request in self.llm.output_processor.request_states.values():
                self.edges.setdefault(request.external_req_id, []).append((request.detokenizer.num_output_tokens(), self.version))
            self.version = version
            await self.llm.resume_generation()

        assert self.missing is not None, "resumed before the last weights have come"
        if not self.missing:
            await self._control(relabel())
        return self.missing

    @ray.method(concurrency_group="control")
    async def init_weight_transfer_engine(self, info: dict) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._control(self.llm.init_weight_transfer_engine(WeightTransferInitRequest(info)))

    @ray.method(concurrency_group="control")
    async def receive(self, info: dict | None, last: bool) -> None:
        """Weights of a publish: all, or the next of them. Behind the `last` it is known which parameters, over all workers, they did not reach."""
        told = await self._control(self.llm.collective_rpc("receive", kwargs={"info": info, "last": last}))
        self.missing = sorted({name for names in told for name in names}) if last else None

    @ray.method(concurrency_group="control")
    async def stop(self) -> None:
        self.llm.shutdown()


# ---------------------------------------------------------------------------------------------------- agent worker
@dataclass
class Group:
    """A prompt and what became of its rollouts."""

    index: int                         # place in the prompt stream
    prompt: dict
    rollouts: list[list[Trajectory]] = field(default_factory=list)   # usable ones: segments of each
    dropped: Counter = field(default_factory=Counter)                # reason -> number of rollouts
    errors: list[str] = field(default_factory=list)                  # what went wrong, in words
    notes: list[str] = field(default_factory=list)                   # what the worker's chat server has to say, each once

    @property
    def mean_reward(self) -> float:
        return sum(segments[0].reward for segments in self.rollouts) / len(self.rollouts)


def rollout_seed(run_seed: int, group: int, member: int, turn: int) -> int:
    """A sampling seed that depends on the run, the rollout and the turn only, so that a resumed run draws the same."""
    return int(np.random.SeedSequence([run_seed, group, member, turn]).generate_state(1)[0])


@ray.remote(max_restarts=-1)
class AgentWorker:
    """Runs the episodes of whole prompt groups. Where the agent takes one turn, a group travels in one engine call.

    Ray restarts it when it dies; the pool's groups that it was running are then asked for again.
    """

    def __init__(self, model: str, cfg: GeneratorConfig):
        from transformers import AutoTokenizer

        self.vision = load_vision(model)                   # None: it reads text only
        self.tokenizer = self.vision.processor.tokenizer if self.vision else AutoTokenizer.from_pretrained(model)
        self.cfg = cfg
        self.agent = load_agent(cfg.agent).AgentRunner
        self.chat = None                                   # what serves its ChatAgents
        if issubclass(self.agent, ChatAgent):
            from chat_server import ChatServer             # with the SDKs whose types it speaks: seconds that an Env need not wait

            self.chat = ChatServer(self.tokenizer, model, cfg.tool_parser, cfg.reasoning_parser, self.vision)
        self.agents: asyncio.AbstractEventLoop | None = None   # where ChatAgents run: a client that blocks it keeps no server and no engine call waiting
        self.budget = Budget(cfg.context_length, cfg.max_new_tokens)
        self.life = uuid.uuid4().hex[:8]                   # an engine may still know requests of an earlier life by name
        self.places: dict[str, dict[int, tuple[str, float]]] = {}   # group -> rollout -> what it is in, since when
        gc.freeze()                                        # else the collector reads all that was imported, for 0.2 s, every few batches

    async def whereabouts(self, group: str) -> str:
        """Which rollout of a group ("name-index") has been longest in the same place, in words. No answer comes while an agent blocks this worker."""
        if self.agents:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self.agents))
        if not self.places.get(group):
            return "its rollouts have ended, or not begun"
        rollout, (place, since) = min(self.places[group].items(), key=lambda item: item[1][1])
        return f"rollout {rollout} has been in {place} for {time.monotonic() - since:.0f} s"

    async def run_groups(self, prompts: list[tuple[int, dict]], engine, samples: int, temperature: float, seed: int | None, name: str) -> list[Group]:
        """`samples` rollouts of each (index, prompt), on the engine given (an actor). Failures are counted by reason, never turned into rewards.

        `name` makes request names unique; `seed` is the run's, from which every rollout's and turn's follows; None: not seeded.
        """
        batcher = Batcher(engine, together=self.chat is None and self.agent.max_turns == 1)
        return await together([self._group(batcher, index, prompt, samples, temperature, seed, name) for index, prompt in prompts])

    async def _group(self, batcher: "Batcher", index: int, prompt: dict, samples: int, temperature: float, seed: int | None, name: str) -> Group:
        group = Group(index, prompt)
        outcomes = await together([self._rollout(batcher, index, prompt, member, samples, temperature, seed, name) for member in range(samples)])
        self.places.pop(f"{name}-{index}", None)
        for segments, reason, error in outcomes:
            if reason is None:
                group.rollouts.append(segments)
            else:
                group.dropped[reason] += 1
                group.errors += [error] if error else []
        if self.chat is not None:
            group.notes, self.chat.notes = self.chat.notes, []
        return group

    async def _rollout(self, batcher: "Batcher", index: int, prompt: dict, member: int, samples: int, temperature: float, seed: int | None, name: str):
        """One episode -> (segments, None, None), or (None, why it cannot be used, what went wrong)."""
        rollout, limit = index * samples + member, asyncio.timeout(self.cfg.rollout_timeout)

        places = self.places.setdefault(f"{name}-{index}", {})

        async def generate(token_ids, max_tokens, stop, turn, images=()) -> Completion:
            sampling = Sampling(temperature, None if seed is None or not temperature else rollout_seed(seed, index, member, turn))
            places[rollout] = f"the engine, turn {turn + 1}", time.monotonic()
            completion = await batcher.generate((f"{name}-{rollout}-{turn}-{self.life}", token_ids, max_tokens, stop, images), sampling)
            places[rollout] = f"the agent, turn {turn + 1}", time.monotonic()
            return completion

        try:
            places[rollout] = "the agent's reset", time.monotonic()
            async with limit:
                if self.chat is None:
                    segments = await run_episode(self.agent(), prompt, self.tokenizer, generate, self.budget, rollout, index, self.vision)
                else:
                    segments = await self._converse(prompt, generate, temperature, rollout, index)
            for segment in segments:
                if segment.routed_experts is not None:     # the largest array of a rollout: it goes from here to the trainer, not through the driver
                    segment.routed_experts = ray.put(segment.routed_experts)
        except (ray.exceptions.RayActorError, EngineGone):     # the engine is gone: the run's matter, not this rollout's
            raise
        except Exception as error:                         # one agent's fault costs one rollout; it is counted and shown
            if limit.expired():
                return None, "timeout", f"rollout {rollout} of prompt {index} took longer than --rollout-timeout {self.cfg.rollout_timeout} s"
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            return None, f"error_{type(cause).__name__}", f"rollout {rollout} of prompt {index}: {type(cause).__name__}: {cause}"
        finally:
            places.pop(rollout, None)
        if not any(s.response_mask.any() for s in segments):
            return None, "prompt_too_long" if segments[0].truncated else "empty", None
        if segments[0].reward is None:
            return None, "unscored", None
        return segments, None, None

    async def _converse(self, prompt: dict, generate, temperature: float, rollout: int, index: int) -> list[Trajectory]:
        """One rollout of a ChatAgent, in a session of its own that ends with it; its segments, which share its reward."""
        await self.chat.start()
        gone = asyncio.get_running_loop().create_future()

        async def answer(*args, **limits) -> Completion:
            try:
                return await generate(*args, **limits)
            except (ray.exceptions.RayActorError, EngineGone) as error:      # the agent's client would only see a failed request
                gone.done() or gone.set_exception(error)
                raise

        session = self.chat.open(answer, self.budget, temperature, rollout, index)
        running = self._run(ChatContext(
            prompt, as_messages(prompt.get("messages") or prompt["prompt"]), prompt.get("tools"), prompt.get("label"),
            session.base_url, session.session_url, session.key, self.chat.model, temperature))
        try:
            await asyncio.wait([running, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            segments = self.chat.close(session)
            running.cancel()
        if gone.done():
            gone.result()                                  # raises
        if running.cancelled():
            raise RuntimeError(f"{self.agent.__name__}.run cancelled itself.")
        result = running.result()
        if not isinstance(result, Result):
            raise TypeError(f"{self.agent.__name__}.run must return an agent.Result, got {type(result).__name__}.")
        for segment in segments:
            segment.reward, segment.info = checked_reward(result.reward, rollout), result.info
        segments[-1].truncated |= result.truncated
        return segments

    def _run(self, context: ChatContext) -> asyncio.Future:
        """Start a ChatAgent's run, in the thread that all of them share."""
        if self.agents is None:
            self.agents = asyncio.new_event_loop()
            self.agents.set_default_executor(ThreadPoolExecutor(1024))       # asyncio.to_thread of as many rollouts; threads start as they are needed
            threading.Thread(target=self.agents.run_forever, name="agents", daemon=True).start()

        async def run() -> Result:
            try:
                return await self.agent().run(context)
            except (SystemExit, KeyboardInterrupt) as error:                 # these would end the thread, and every other agent with it
                raise RuntimeError(f"the agent's run called {type(error).__name__}") from error

        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self.agents))


async def together(coroutines: list) -> list:
    """Their results, in order; when one fails the others are ended before the error goes on."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise


class Batcher:
    """Sends requests to an engine: each by itself, or, `together`, all that arrive in one pass of the event loop as one Ray call.

    A rollout that is cancelled (it took too long) takes its request out of the engine; of a call that carries others, when all are gone.
    """

    def __init__(self, engine, together: bool):
        self.engine, self.together, self.waiting, self.sending = engine, together, [], set()

    async def generate(self, request: tuple, sampling: Sampling) -> Completion:
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((request, sampling, answer))
        if not self.together:
            self.flush()
        elif len(self.waiting) == 1:
            asyncio.get_running_loop().call_soon(self.flush)
        return await answer

    def flush(self) -> None:
        batch, self.waiting = self.waiting, []
        task = asyncio.ensure_future(self.send(batch))
        self.sending.add(task)
        task.add_done_callback(self.sending.discard)

    async def send(self, batch: list) -> None:
        answers = [answer for _, _, answer in batch]
        call = self.engine.generate.remote([request for request, _, _ in batch], [sampling for _, sampling, _ in batch])

        def abort_when_all_are_gone(_) -> None:
            if all(answer.cancelled() for answer in answers):
                ray.cancel(call)

        for answer in answers:
            answer.add_done_callback(abort_when_all_are_gone)
        try:
            for answer, completion in zip(answers, await call):
                if not answer.done():
                    answer.set_result(completion)
        except Exception as error:
            for answer in answers:
                if not answer.done():
                    answer.set_exception(error)


# ---------------------------------------------------------------------------------------------------- prompts
def read_prompts(cfg: GeneratorConfig, split: str) -> list[dict]:
    """Prompts of a split ("train" or "eval") as dicts with `messages` or `prompt`. Raises ValueError naming the bad row.

    From --prompts (a JSONL file, or a data set for datasets.load_dataset), else from the agent module's prompts(split).
    Rows with a field `split` belong to that split; where none has one, a tenth drawn by a fixed seed (at most 1,000) is the eval split.
    """
    if cfg.prompts is None:
        module = load_agent(cfg.agent)
        if not hasattr(module, "prompts"):
            raise ValueError(f"--agent {cfg.agent} defines no prompts(split). Add it, or give --prompts a JSONL file or a data set.")
        rows = list(module.prompts(split))
    else:
        if Path(cfg.prompts).is_file():
            rows = list(read_jsonl(Path(cfg.prompts)))
        else:
            from datasets import load_dataset

            try:
                rows = [dict(row) for row in load_dataset(cfg.prompts, split="train")]
            except OSError as error:
                raise ValueError(f"--prompts {cfg.prompts} is neither a file here nor a data set that can be loaded: {error}") from None
        if any("split" in row for row in rows):
            rows = [row for row in rows if row.get("split", "train") == split]
        else:
            np.random.default_rng(0).shuffle(rows)               # the same split in every run, whatever the file's order
            held_out = min(1000, max(1, len(rows) // 10))
            rows = rows[-held_out:] if split == "eval" else rows[:-held_out]
    for i, row in enumerate(rows):
        if not isinstance(row, dict) or not (row.get("messages") or row.get("prompt")):
            raise ValueError(f"Prompt {i} of the {split} split has neither `messages` nor `prompt`: {str(row)[:200]}")
    if not rows:
        raise ValueError(f"The {split} split has no prompts. Check --prompts {cfg.prompts} or prompts({split!r}) in {cfg.agent}.")
    return rows


def read_jsonl(path: Path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON ({error}): {line[:100]}") from None


class PromptStream:
    """An endless, seeded order of prompts: number n is position n % len of epoch n // len, each epoch shuffled anew."""

    def __init__(self, prompts: list[dict], seed: int):
        self.prompts, self.seed, self.shuffled = prompts, seed, -1

    def __getitem__(self, n: int) -> dict:
        epoch, place = divmod(n, len(self.prompts))
        if epoch != self.shuffled:                               # a million prompts take 20 ms to shuffle: once an epoch
            self.shuffled, self.order = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.prompts))
        return self.prompts[self.order[place]]

    def epoch(self, n: int) -> int:
        return n // len(self.prompts)


# ---------------------------------------------------------------------------------------------------- pool
@dataclass
class Flight:
    """A prompt group on its way."""

    index: int                         # place in the prompt stream
    version: int                       # that of the weights when it started
    task: asyncio.Future               # its Group
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None

    def __post_init__(self):
        self.task.add_done_callback(self.end)

    def end(self, task: asyncio.Future) -> None:
        self.ended = time.monotonic()
        task.cancelled() or task.exception()     # whoever takes the group sees it; asyncio need not complain of those nobody takes


class Pool:
    """Prompt groups in flight, at most `slots` = (max_staleness + 1) * prompts_per_step started and not yet released.

    Order "start": `take` waits for the first groups in order of start, even when younger ones are complete. A group that
    has just started has fewer than `slots` others before it, each step takes prompts_per_step of them, and slots are
    freed by `release`, which the loop calls after `publish`: so it is trained at most max_staleness versions later.
    Order "finished": `take` has the first that are complete, and release drops what has grown older than the bound, counts
    it as stale and puts its prompt back in line: no wait behind stragglers, but long answers are trained less often.

    A group that ends with fewer than `min_rollouts` usable rollouts is dropped and counted, and its replacement goes to the
    back; so is, with a `band`, one whose mean reward is not strictly inside it (DAPO's dynamic sampling, arXiv:2503.14476).
    The pool lives in the driver's event loop, which nothing may block: groups go on while the loop awaits a training step.
    """

    def __init__(self, stream: PromptStream, run_group: Callable[[int, dict], Awaitable[Group]], prompts_per_step: int, max_staleness: int = 0, order: str = "start",
                 min_rollouts: int = 1, band: tuple[float, float] | None = None, give_up_after: int = 256, version: int = 0, wanted: float = float("inf")):
        self.stream, self.run_group, self.order, self.min_rollouts, self.band, self.give_up_after = stream, run_group, order, min_rollouts, band, give_up_after
        self.slots, self.max_staleness = (max_staleness + 1) * prompts_per_step, max_staleness
        self.version = version                   # of the weights that a group which starts now begins with
        self.wanted = wanted                     # groups that will still be taken: no more than these are started
        self.next = 0                            # next number of the prompt stream
        self.running: deque[Flight] = deque()    # in order of start
        self.taken = 0                           # groups that take handed out and release has not freed
        self.dropped: Counter = Counter()        # reason -> rollouts, since the start
        self.dropped_groups = 0
        self.head_seconds = 0.0                  # waited for the head of the line while a younger group was complete
        self.considered: list[Group] = []        # usable groups before the band, since the loop last emptied it
        self.pending: list[int] = []             # numbers to issue before new ones

    def fill(self) -> None:
        while len(self.running) + self.taken < self.slots and len(self.running) < self.wanted:
            n = self.pending.pop(0) if self.pending else self.next
            self.next = max(self.next, n + 1)
            self.running.append(Flight(n, self.version, asyncio.ensure_future(self.run_group(n, self.stream[n]))))

    async def next_group(self) -> tuple[Flight, Group]:
        """The next group to look at, by the pool's order, once it is complete."""
        began = time.monotonic()
        if self.order == "start":
            flight = self.running[0]
            if flight.ended is None:
                await asyncio.wait([flight.task])
        else:
            if all(f.ended is None for f in self.running):
                await asyncio.wait([f.task for f in self.running], return_when=asyncio.FIRST_COMPLETED)
            flight = min((f for f in self.running if f.ended is not None), key=lambda f: f.ended)
        self.running.remove(flight)
        younger = [f.ended for f in self.running if f.ended is not None]
        if self.order == "start" and younger:
            self.head_seconds += max(0.0, time.monotonic() - max(began, min(younger)))
        return flight, flight.task.result()

    def usable(self, group: Group) -> bool:
        """Whether a complete group may be trained; counts what is lost."""
        self.dropped.update(group.dropped)
        if len(group.rollouts) < self.min_rollouts:
            return False
        self.considered.append(group)
        if self.filtered(group):
            self.dropped["filtered"] += len(group.rollouts)
            return False
        return True

    def filtered(self, group: Group) -> bool:
        return bool(self.band) and not self.band[0] < group.mean_reward < self.band[1]

    def ready(self, count: int) -> bool:
        """Whether `take(count)` would wait for nothing, so that not even one pass of the event loop comes between."""
        complete = itertools.takewhile(lambda f: f.ended is not None, self.running) if self.order == "start" else (f for f in self.running if f.ended is not None)
        groups = [f.task.result() for f in complete]
        return sum(len(g.rollouts) >= self.min_rollouts and not self.filtered(g) for g in groups) >= count

    async def take(self, count: int) -> list[Group]:
        """The next `count` usable groups. Raises ValueError when nothing usable comes any more."""
        assert count + self.taken <= self.slots, f"{count} groups wanted and {self.taken} not released, of {self.slots} slots: this would wait for ever"
        groups, lost = [], 0
        self.fill()
        while len(groups) < count:
            flight, group = await self.next_group()
            assert self.version - flight.version <= self.max_staleness, f"group {flight.index} started at version {flight.version}, now {self.version}"
            if self.usable(group):
                groups.append(group)
                self.taken, self.wanted, lost = self.taken + 1, self.wanted - 1, 0
                continue
            self.dropped_groups, lost = self.dropped_groups + 1, lost + 1
            if lost >= self.give_up_after:
                first = f" First error: {group.errors[0]}." if group.errors else ""
                raise ValueError(
                    f"{lost} prompt groups in a row were dropped while {count - len(groups)} were wanted; rollouts lost so far: {dict(self.dropped)}.{first} "
                    "prompt_too_long: raise --context-length. error_*: see the message. unscored: the agent returned no reward. "
                    "filtered: every prompt is solved always or never; widen --dynamic-filter or change the prompts.")
            self.fill()
        return groups

    async def drained(self, stalled: set[int]) -> None:
        """Returns when no group is in flight any more but those that wait for an engine; complete ones stay to be taken."""
        while busy := [f.task for f in self.running if f.ended is None and f.index not in stalled]:
            await asyncio.wait(busy, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)

    def release(self, count: int, version: int) -> None:
        """`count` groups have been trained and `version` published: as many new ones may start, under its weights."""
        self.taken, self.version = self.taken - count, version
        stale = [f for f in self.running if version - f.version > self.max_staleness] if self.order == "finished" else []
        for flight in stale:
            self.running.remove(flight)
            flight.task.cancel()
            self.dropped_groups, self.dropped["stale_groups"] = self.dropped_groups + 1, self.dropped["stale_groups"] + 1
            self.pending.append(flight.index)
        self.fill()

    def oldest(self) -> Flight | None:
        """The group in flight that started first and is not complete: whoever waits for the pool waits for it, at the latest in the end."""
        return next((f for f in self.running if f.ended is None), None)

    def waiting_for(self) -> str:
        if (head := self.oldest()) is None:
            return "no prompt group: none is in flight"
        done = sum(f.ended is not None for f in self.running)
        return f"prompt group {head.index} (started {time.monotonic() - head.started:.0f} s ago at version {head.version}); {done} of {len(self.running)} groups are complete"

    def cancel(self) -> None:
        for flight in self.running:
            flight.task.cancel()

    def state(self) -> dict:
        """What a resumed run needs: complete groups as they are, the numbers of the others to issue again, in their order; nothing is skipped or trained twice."""
        complete = [(f.index, f.version, f.task.result()) for f in self.running if f.ended is not None and not f.task.cancelled() and f.task.exception() is None]
        numbers = {n for n, _, _ in complete}
        return {"next": self.next, "pending": [f.index for f in self.running if f.index not in numbers] + self.pending, "complete": complete,
                "dropped": dict(self.dropped), "dropped_groups": self.dropped_groups}

    def load_state(self, state: dict) -> None:
        self.next, self.pending = state["next"], list(state["pending"])
        self.dropped, self.dropped_groups = Counter(state["dropped"]), state["dropped_groups"]
        for index, version, group in state["complete"]:
            done = asyncio.get_running_loop().create_future()
            done.set_result(group)
            self.running.append(Flight(index, version, done, ended=time.monotonic()))
