"""Images end to end: what an Env and the three wires show, what the engine saw, what the trainer computes from it, before and after a publish.

The models are random and tiny (recipes/make_vision.py). vLLM's class of the second imports torchvision: without it, that one is skipped.
"""

import asyncio
import base64
import importlib.util
import io
import json
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
import torch

from agent import Image, Trajectory, Vision, image_of_url, take_images
from estimators import collate
from generator import AgentWorker, GeneratorConfig
from losses import AGGREGATIONS
from recipes import make_vision
from recipes.colour import ask, picture, prompts
from train import Config, resolve, start
from trainer import TrainerConfig, plan_microbatches, take_rows

from conftest import ROOT, TINY
from test_weight_sync import gap, update

KINDS = ["idefics3", pytest.param("qwen2_5_vl", marks=pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="vLLM's Qwen2.5-VL imports torchvision, which is not installed"))]


def png(colour, size=(48, 40)) -> bytes:
    PIL.Image.new("RGB", size, colour).save(file := io.BytesIO(), format="PNG")
    return file.getvalue()


def url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


# ---------------------------------------------------------------------------------------------------- a model with eyes
@pytest.fixture(scope="session", params=KINDS)
def eyes(request, tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("eyes") / request.param)
    make_vision.make(make_vision.Config(path, request.param))
    return path


@pytest.fixture(scope="session")
def sight(eyes, cluster, loop):
    """(cfg, parts): engine, trainer and agent worker of a vision-language model, version 0 published; micro-batches of few rows."""
    cfg = Config(model=eyes, device="cpu", dtype="float32", generator=GeneratorConfig(
        agent=str(ROOT / "recipes/colour.py"), context_length=512, max_new_tokens=6, kv_cache_gb=0.1),
        trainer=TrainerConfig(tokens_per_microbatch=400, learning_rate=1e-3, warmup_steps=0, decay="constant"))

    async def begin():
        parts = await start(cfg, resolve(cfg))
        await parts.publish(0)
        return parts

    parts = loop.run_until_complete(begin())
    yield cfg, parts
    loop.run_until_complete(parts.stop()) if hasattr(parts, "stop") else None


async def episodes(parts, rows: list[dict], name: str, samples: int = 2, worker=None) -> list:
    groups = await (worker or parts.workers[0]).run_groups.remote(list(enumerate(rows)), parts.engines[0], samples, 1.0, 7, name)
    assert not any(g.dropped for g in groups), [g.errors for g in groups]
    return [r for g in groups for r in g.rollouts]


def test_the_trainer_sees_what_the_engine_saw_before_and_after_an_update(sight, loop):
    """Two turns with an image each, one segment; gap at most 1e-4 at both versions, far more with the images of other rows or the old weights.

    The same prompts come again after the publish, so vision features or prefixes of the old weights would show. The tower is trained.
    """
    cfg, parts = sight

    async def scenario():
        before = await episodes(parts, prompts("train")[:5], "before")
        assert all(len(segments) == 1 and len(segments[0].images) == 2 for segments in before)
        assert await gap(cfg, parts, before) <= 1e-4
        swapped = [[replace(s, images=[replace(a, file=b.file) for a, b in zip(s.images, reversed(s.images))])] for [s] in before]
        assert await gap(cfg, parts, swapped) > 1e-3
        weights = await parts.trainer.ranks[0].parameters.remote()
        await update(cfg, parts, before)
        moved = await parts.trainer.ranks[0].parameters.remote()
        tower = [name for name in weights if "vision" in name or "visual" in name]
        assert tower and all(not torch.equal(weights[name], moved[name]) for name in tower if weights[name].dim() > 1)
        assert await gap(cfg, parts, before) > 1e-3
        await parts.publish(1)
        after = await episodes(parts, prompts("train")[:5], "after")
        assert await gap(cfg, parts, after) <= 1e-4
        assert {v for [s] in after for v in s.policy_versions[s.response_mask]} == {1}

    loop.run_until_complete(scenario())


def test_the_first_prompt_is_what_the_models_processor_makes_of_the_rendered_messages(sight, loop):
    """An oracle for the expansion: the processor given the whole text and the image at once."""
    cfg, parts = sight
    row = prompts("train")[0]
    [[segment]] = loop.run_until_complete(episodes(parts, [row], "oracle", samples=1))
    processor = Vision(cfg.model).processor
    text = processor.tokenizer.apply_chat_template(ask(row["prompt"], *row["label"]), tokenize=False, add_generation_prompt=True)
    ids = processor(text=[text], images=[picture(*row["label"])], add_special_tokens=False)["input_ids"][0]
    assert segment.token_ids[: int(np.flatnonzero(segment.response_mask)[0])].tolist() == list(ids)
    assert segment.images[0].file == take_images(ask("", *row["label"]), Vision(cfg.model))[1][0]


AGENT = '''
import anthropic, base64, openai
from agent import ChatAgent, Result


class AgentRunner(ChatAgent):
    async def run(self, ctx):
        wire, url = ctx.label
        media, data = url.removeprefix("data:").split(";base64,")
        if wire == "anthropic":
            client = anthropic.AsyncAnthropic(base_url=ctx.session_url, api_key=ctx.api_key)
            image = {"type": "image", "source": {"type": "base64", "media_type": media, "data": data}}
            messages = [{"role": "user", "content": [image, {"type": "text", "text": "what?"}]}]
            asked = []
            for more in ("sure?", [{"type": "text", "text": "and now?"}, image]):
                counted = await client.messages.count_tokens(model=ctx.model, messages=messages)
                reply = await client.messages.create(model=ctx.model, messages=messages, max_tokens=6)
                asked.append(reply.usage.input_tokens)
                assert counted.input_tokens == reply.usage.input_tokens
                messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": more}]
            return Result(reward=1.0, info={"asked": asked})
        client = openai.AsyncOpenAI(base_url=ctx.base_url, api_key=ctx.api_key)
        if wire == "chat":
            image = {"type": "image_url", "image_url": {"url": url}}
            messages, asked = [{"role": "user", "content": [image, {"type": "text", "text": "what?"}]}], []
            for more in ("sure?", ""):
                reply = await client.chat.completions.create(model=ctx.model, messages=messages)
                asked.append(reply.usage.prompt_tokens)
                messages += [reply.choices[0].message, {"role": "user", "content": more}]
            return Result(reward=1.0, info={"asked": asked})
        image = {"type": "input_image", "image_url": url}
        items, asked = [{"role": "user", "content": [image, {"type": "input_text", "text": "what?"}]}], []
        for more in ("sure?", ""):
            reply = await client.responses.create(model=ctx.model, input=items)
            asked.append(reply.usage.input_tokens)
            items += [*reply.output, {"role": "user", "content": more}]
        return Result(reward=1.0, info={"asked": asked})
'''


def test_images_come_over_the_three_wires_by_their_sdks(sight, loop, tmp_path):
    """Two turns, one image: one segment each, usage and count_tokens count the ids the engine saw, gap at most 1e-4."""
    cfg, parts = sight
    (tmp_path / "sees.py").write_text(AGENT)
    worker = AgentWorker.remote(cfg.model, replace(cfg.generator, agent=str(tmp_path / "sees.py")))
    rows = [{"prompt": "-", "label": (wire, url(png(colour)))} for wire in ("chat", "responses", "anthropic") for colour in ("red", "blue")]

    async def scenario():
        found = await episodes(parts, rows, "wires", worker=worker)
        for segments, row in zip(found, [row for row in rows for _ in range(2)]):
            [segment] = segments
            assert [i.file for i in segment.images] == [image_of_url(row["label"][1])]
            runs = np.flatnonzero(np.diff(np.concatenate([[False], segment.response_mask]).astype(int)) == 1)      # where answers begin
            assert runs.tolist() == segment.info["asked"]
        assert await gap(cfg, parts, found) <= 1e-4

    loop.run_until_complete(scenario())
