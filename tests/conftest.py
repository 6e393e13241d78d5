"""One Ray, one engine, one trainer for all tests that need the real stack; they start when the first test asks."""

import asyncio
import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
TINY = ROOT / "recipes" / "tiny"
CALLER = ROOT / "recipes" / "caller"


def pytest_addoption(parser):
    parser.addoption("--rehearse", action="store_true", help="run the GPU tests' programs on a CPU: tiny models, gloo, float32")
    parser.addoption("--gpu-report", default=str(ROOT / "runs" / "gpu.json"), help="where the GPU tests write their numbers")
    parser.addoption("--smollm2", default=str(ROOT / "models" / "smollm2"), help="directory of SmolLM2-135M-Instruct for the GPU tests")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.get_closest_marker("gpu") and not (torch.cuda.is_available() or config.getoption("--rehearse")):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def rehearse(request) -> bool:
    return request.config.getoption("--rehearse")


@pytest.fixture(scope="session")
def loop():
    """The event loop that stands for the driver's."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def cluster():
    import ray

    from train import quiet, start_ray

    quiet()
    start_ray(None)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def hostile_model(tmp_path_factory) -> str:
    """The embedded policy with a generation_config.json that would change every sampling field left out."""
    path = tmp_path_factory.mktemp("model") / "hostile"
    shutil.copytree(TINY, path)
    file = path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {
        "do_sample": True, "top_k": 1, "top_p": 0.1, "min_p": 0.5, "temperature": 0.1, "repetition_penalty": 1.9, "max_new_tokens": 1}))
    return str(path)


@contextmanager
def running(cfg, loop):
    """Engine, trainer and agent worker of `cfg`, version 0 published; all are killed in the end."""
    import ray

    from train import resolve, start

    async def begin():
        parts = await start(cfg, resolve(cfg))
        await parts.publish(0)
        return parts

    parts = loop.run_until_complete(begin())
    yield parts
    for actor in parts.engines + parts.workers + parts.trainer.ranks:
        ray.kill(actor)


@pytest.fixture(scope="session")
def stack(cluster, hostile_model, loop):
    """(cfg, parts): a running engine, trainer and agent worker of the hostile model, version 0 published. Float32, 2 optimizer steps a batch."""
    from generator import GeneratorConfig
    from train import Config
    from trainer import TrainerConfig

    cfg = Config(model=hostile_model, device="cpu", dtype="float32", generator=GeneratorConfig(agent=str(ROOT / "recipes/arithmetic.py"), temperature=0.7, prompts_per_step=4),
                 trainer=TrainerConfig(epochs=2, learning_rate=1e-3, warmup_steps=0, decay="constant"))
    with running(cfg, loop) as parts:
        yield cfg, parts


@pytest.fixture
def trained(stack, loop, tmp_path):
    """The stack, for a test that trains it: afterwards trainer and engine have the weights of version 0 again."""
    _, parts = stack
    loop.run_until_complete(parts.trainer.save(tmp_path / "before", {}, {}))
    yield stack

    async def restore():
        await parts.trainer.load(tmp_path / "before")
        await parts.publish(0)

    loop.run_until_complete(restore())


@pytest.fixture(scope="session")
def caller(cluster, loop):
    """(cfg, parts): a running engine and agent worker of recipes/caller, which calls tools; version 0 published. Float32."""
    from generator import GeneratorConfig
    from train import Config

    cfg = Config(model=str(CALLER), device="cpu", dtype="float32", generator=GeneratorConfig(
        agent=str(ROOT / "recipes/chat_arithmetic.py"), tool_parser="hermes", context_length=4096, max_new_tokens=64, kv_cache_gb=0.25))
    with running(cfg, loop) as parts:
        yield cfg, parts
