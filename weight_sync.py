"""weight_sync.py owns how the trainer's weights reach the engines: the weight source, the transfer, publish, coverage.

It does not decide when to publish. The transfer is vLLM's own weight-transfer API at both ends: `nccl` between GPUs,
`ipc` on a shared GPU, and `gloo`, registered here, for CPUs. vLLM's worker imports this module by name
(`worker_extension_cls`), so neither AutoModel nor Ray is imported at its top.

Version: an integer, carried by the weights. Engines start with dummy weights; the first publish brings version 0.
Sources: vllm.distributed.weight_transfer (vLLM 0.29); the pause-send-resume order is arXiv:2607.21653, section 3.
"""

import asyncio
import math
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer.base import ParamMeta, TrainerInitInfo, WeightSource, WeightTransferInitInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine, NCCLWeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

CHUNK = 64 << 20                       # bytes of one gloo broadcast, and of one call of load_weights
SMALL = 1 << 20                        # tensors below this many elements travel in float32, whatever the engine holds them in


# ---------------------------------------------------------------------------------------------------- what is sent
class PolicySource(WeightSource):
    """The policy's parameters under Hugging Face names, whole, in one order on every trainer rank.

    Iterating casts each parameter to its wire dtype on `device`, gathers what is sharded (a collective) and yields it.
    `tied_head` also sends the embedding as `lm_head.weight`, for an engine that keeps a copy of its own (the CPU engine does).
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, device: torch.device, tied_head: bool):
        self.model, self.dtype, self.device, self.tied_head = model, dtype, device, tied_head
        held = model.state_dict().keys()
        self.buffers = [name for name, buffer in model.named_buffers() if name in held and buffer.is_floating_point()]   # that a checkpoint holds
        self.unchanged: dict[str, str] = {}                              # what a checkpoint holds as it is -> its name there: asked of the library once, not at each publish
        self.told: list[ParamMeta] = []                                  # metadata: no update changes it

    def converted(self, materialize) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor in its wire dtype) of everything that is sent; materialize makes a parameter a whole tensor of a dtype.

        Large tensors travel in the engine's dtype; small ones (norms, biases, routers) exact: the engine may hold them in float32.
        So do buffers that a checkpoint holds: a router's correction, which the engine has as a parameter.
        """
        embedding = self.model.get_input_embeddings().weight if self.tied_head else None
        for name, parameter in [*self.model.named_parameters(), *((name, self.model.get_buffer(name)) for name in self.buffers)]:
            tensor = materialize(parameter, torch.float32 if parameter.numel() < SMALL else self.dtype)
            pairs = [(self.unchanged[name], tensor)] if name in self.unchanged else to_hf(self.model, name, tensor)
            if len(pairs) == 1 and pairs[0][1] is tensor:
                self.unchanged[name] = pairs[0][0]
            yield from ((hf, t.contiguous()) for hf, t in pairs)
            if parameter is embedding:
                yield "lm_head.weight", tensor.contiguous()

    def metadata(self) -> list[ParamMeta]:
        self.told = self.told or [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.converted(lambda p, dtype: torch.empty(p.shape, dtype=dtype, device="meta"))]
        return self.told

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        def gather(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            if isinstance(parameter, dist.tensor.DTensor) and parameter.device_mesh.size() == 1:
                parameter = parameter.to_local()                         # whole already; each operation on a DTensor takes 0.1 ms
            parameter = parameter.detach().to(self.device, dtype)        # offloaded parameters live on the CPU; cast first, so that fewer bytes are gathered
            return parameter.full_tensor() if isinstance(parameter, dist.tensor.DTensor) else parameter

        return self.converted(gather)


def to_hf(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """One parameter under the names of its checkpoint: stacked experts, for one, become many tensors. By the library's own rules."""
    if hasattr(model, "state_dict_adapter"):                             # AutoModel's own classes
        return model.state_dict_adapter.convert_single_tensor_to_hf(name, tensor)
    from transformers.core_model_loading import revert_weight_conversion

    return list(revert_weight_conversion(model, {name: tensor}).items())


# ---------------------------------------------------------------------------------------------------- gloo, for CPUs
@dataclass
class GlooInit(TrainerInitInfo):
    """The trainer's end of the transfer group: rank 0 of 1 + all engine workers."""

    backend: ClassVar[str] = "gloo"
    master_address: str
    master_port: int
    world_size: int


@dataclass
class GlooWorkerInit(WeightTransferInitInfo):
    """An engine's end: its workers take the ranks from rank_offset on."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


class GlooTrainer(NCCLTrainerWeightTransferEngine):
    """Trainer end: vLLM's NCCL round trip (start, update alongside the broadcast, finish) with gloo broadcasts."""

    @classmethod
    def trainer_init(cls, init_info: GlooInit, *, client, source=None):
        self = cls(client=client, source=source, is_sender=init_info.is_sender, packed=False)
        if self.is_sender:
            address, port, world = init_info.master_address, init_info.master_port, init_info.world_size
            invited = client.begin_init(dict(master_address=address, master_port=port, rank_offset=1, world_size=world))
            self.model_update_group = stateless_init_torch_distributed_process_group(address, port, 0, world, "gloo")
            client.wait(invited)
        return self

    def _broadcast(self, source, meta) -> None:
        if not self.is_sender:
            for _ in source:                                  # each parameter is gathered by all ranks
                pass
            return
        for chunk in chunks(self._checked_iter(source, meta), lambda pair: pair[1].nbytes):
            dist.broadcast(torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in chunk]), group_src=0, group=self.model_update_group)


class GlooWorker(NCCLWeightTransferEngine):
    """Engine end: receives each tensor and loads it as a checkpoint tensor; start and finish are vLLM's layerwise reload."""

    init_info_cls = GlooWorkerInit

    def init_transfer_engine(self, init_info: GlooWorkerInit) -> None:
        rank = init_info.rank_offset + self.parallel_config.rank
        self.model_update_group = stateless_init_torch_distributed_process_group(
            init_info.master_address, init_info.master_port, rank, init_info.world_size, "gloo")

    def start_weight_update(self) -> None:
        super().start_weight_update()
        for module in self.model.modules():                   # vLLM prepacks a CPU's experts only when it makes their kernel: it must make it anew
            if hasattr(module, "quant_method") and hasattr(module.quant_method, "moe_kernel"):
                module.quant_method.moe_kernel = None

    def update_weights(self, update_info: dict) -> None:      # the base class synchronises an accelerator, which a CPU has not
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info) -> None:
        dtypes = [getattr(torch, name) for name in update_info.dtype_names]
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, update_info.shapes)]
        for chunk in chunks(zip(update_info.names, dtypes, update_info.shapes, sizes), lambda item: item[3]):
            packed = torch.empty(sum(size for *_, size in chunk), dtype=torch.uint8)
            dist.broadcast(packed, group_src=0, group=self.model_update_group)
            parts = packed.split([size for *_, size in chunk])
            self.model.load_weights([(name, part.clone().view(dtype).view(shape)) for (name, dtype, shape, _), part in zip(chunk, parts)])


def chunks(items: Iterable, size: Callable) -> Iterator[list]:
    """Items in runs of CHUNK bytes or a little more; both ends cut alike. A broadcast, or a call of load_weights, of each tensor would cost most of a publish."""
    chunk, total = [], 0
    for item in items:
        chunk, total = chunk + [item], total + size(item)
        if total > CHUNK:
            yield chunk
            chunk, total = [], 0
    if chunk:
        yield chunk


WeightTransferEngineFactory.register_engine("gloo", GlooWorker)
WeightTransferTrainerFactory.register_engine("gloo", GlooTrainer)


# ---------------------------------------------------------------------------------------------------- coverage
class Receiver:
    """Mixed into vLLM's worker: takes the weights of a publish and counts what it really loaded, parameter by parameter."""

    def ping(self) -> bool:
        """Answers when the worker does: not while it is stuck in a transfer."""
        return True

    def watch_weights(self) -> None:
        """From now on note every element that reaches an engine parameter. Called once, before the first publish."""
        model = self.model_runner.get_model()                # without the wrapper that replays CUDA graphs
        load, self.loaded, first, targets = model.load_weights, {}, {}, {}
        tied = {name for name, p in model.named_parameters(remove_duplicate=False) if first.setdefault(id(p), name) != name}
        self.needed = elements(model, tied)

        def recording(weights):
            if not targets:                                  # again in the first update: outside one, packed weights are empty,
                self.needed = elements(model, tied)          # and in one, a tied head has a placeholder of its own
            weights, reached = list(weights), set()
            if any(name not in targets for name, _ in weights):
                for name, weight in weights:                 # the first time one by one: so it is known which parameter each goes to
                    targets[name] = {held_name(p, self.needed) for p in load([(name, weight)])}
                    reached |= targets[name]
            else:
                reached = {held_name(p, self.needed) for p in load(weights)}
            for name, weight in weights:
                for parameter in targets[name] & reached:
                    self.loaded[parameter] = self.loaded.get(parameter, 0) + weight.numel()
            return reached

        model.load_weights = recording

    def receive(self, info: dict | None, last: bool) -> list[str]:
        """vLLM's start, update and finish of a publish in one call, or in one a buffer; after the `last` says what none of them reached."""
        if not self.loaded:
            self.start_weight_update()
        if info is not None:
            self.update_weights(info)
        if not last:
            return []
        self.finish_weight_update()
        return self.missing_weights()

    def missing_weights(self) -> list[str]:
        """Engine parameters that the last update left untouched or filled only in part; clears the notes.

        With tensor parallelism a worker holds a share of what it is sent, so enough elements is at least its own number.
        """
        loaded, self.loaded = self.loaded, {}
        return [name for name, n in self.needed.items() if name not in loaded or loaded[name] < n]


def held_name(reported: str, held: dict[str, int]) -> str:
    """The model's name of a parameter that load_weights reports: a wrapper layer's is left out of it (experts.w2 for experts.routed_experts.w2)."""
    module, _, leaf = reported.rpartition(".")
    inside = [] if reported in held else [name for name in held if name.startswith(f"{module}.") and name.endswith(f".{leaf}")]
    return inside[0] if len(inside) == 1 else reported


def elements(model: torch.nn.Module, tied: set[str]) -> dict[str, int]:
    """Elements of each engine parameter that a checkpoint fills; the rows that pad a vocabulary are not among them, nor the second names of `tied` ones."""
    needed = {name: p.numel() for name, p in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, VocabParallelEmbedding):
            for parameter, p in module.named_parameters(prefix=name, recurse=False):
                needed[parameter] = module.shard_indices.num_org_elements * p[0].numel() if p.dim() > 1 else p.numel()
    return {name: n for name, n in needed.items() if name not in tied}


# ---------------------------------------------------------------------------------------------------- the two ends meet
class EngineClient:
    """vLLM's control plane of an update, for several engines: each call goes to all, each engine gets ranks of its own. `whole`: an update is one call (not so with ipc)."""

    def __init__(self, engines: list, workers_per_engine: int, whole: bool):
        self.engines, self.workers, self.whole = engines, workers_per_engine, whole

    def begin_init(self, info: dict) -> list:
        return [e.init_weight_transfer_engine.remote(info | {"rank_offset": info["rank_offset"] + i * self.workers} if "rank_offset" in info else info)
                for i, e in enumerate(self.engines)]

    def wait(self, refs: list) -> None:
        import ray

        ray.get(refs)

    def init_weight_transfer_engine(self, info: dict) -> None:
        self.wait(self.begin_init(info))

    def start_weight_update(self) -> None:
        """Nothing yet: an engine starts with the first weights that come, and, if `whole`, ends with them."""

    def update_weights(self, info) -> None:
        self.wait([e.receive.remote(info, self.whole) for e in self.engines])

    def finish_weight_update(self, weight_version=None) -> None:
        if not self.whole:
            self.wait([e.receive.remote(None, True) for e in self.engines])


def open_transfer(backend: str, rank: int, source: PolicySource, engines: list, workers_per_engine: int, address: str):
    """Join trainer rank and engines in one transfer group; called on every trainer rank, rank 0 sends. Returns the sender."""
    world = 1 + len(engines) * workers_per_engine
    with socket.socket() as s:
        s.bind(("", 0))
        port = s.getsockname()[1]
    if backend == "gloo":
        info = GlooInit(address, port, world, rank=rank)
    elif backend == "nccl":
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        info = NCCLTrainerInitInfo(address, port, world, rank=rank)
    else:
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        info = IPCTrainerInitInfo(packed=True, rank=rank)
    return WeightTransferTrainerFactory.trainer_init(info, client=EngineClient(engines, workers_per_engine, backend != "ipc"), source=source)


async def publish(trainer, engines: list, version: int, waiting: Callable[[str], AbstractAsyncContextManager]) -> None:
    """Bring the trainer's weights to every engine as `version`: pause(keep), send, check coverage, relabel, resume.

    The label changes just before resume, when no token of the old weights can still arrive. Caches of the old weights
    are dropped by the pause. Raises RuntimeError when some engine parameter was not reached; that engine stays paused.
    `waiting(what)` is the caller's context around each wait: it says what is awaited, and raises when that takes too
    long, for vLLM's transfer itself never gives up.
    """
    async with waiting(f"the engines to pause for version {version}"):
        await asyncio.gather(*[e.pause.remote() for e in engines])
    async with waiting(f"the weights of version {version} to be sent and received"):
        await trainer.send_weights()
    async with waiting(f"the engines to say what they received of version {version}, and to resume"):
        missing = {name for names in await asyncio.gather(*[e.resume.remote(version) for e in engines]) for name in names}
    if missing:
        raise RuntimeError(
            f"Publishing version {version} did not reach {len(missing)} engine parameters: {', '.join(sorted(missing)[:8])}. They would go on with "
            "other weights than the trainer's. Compare the names that weight_sync.PolicySource yields with the engine's model.")
