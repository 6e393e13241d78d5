"""Images end to end: what an Env and the three wires show, what the engine saw, what the trainer computes from it, before and after a publish.

The models are random and tiny (recipes/make_vision.py). vLLM's class of the second imports torchvision: without it, that one is skipped.
"""

import asyncio
import base64
import importlib.util
import io
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
import ray
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from agent import Budget, Env, Result, Trajectory, Vision, image_of_url, reads_parts_only, run_episode, take_images, tokenize
from estimators import collate
from generator import AgentWorker, GeneratorConfig, Sampling
from losses import AGGREGATIONS
from recipes import make_vision
from recipes.colour import ask, picture, prompts
from recipes.make_tiny import make_tokenizer
from train import Config, make_trainer, resolve
from trainer import TrainerConfig, plan_microbatches, take_rows

from conftest import ROOT, running
from test_agent import TOKENIZER, answer
from test_chat_server import WIRES, Table, wires
from test_weight_sync import gap, update

few = settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
KINDS = ["idefics3", pytest.param("qwen2_5_vl", marks=pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="vLLM's Qwen2.5-VL imports torchvision, which is not installed"))]


def png(colour, size=(48, 40)) -> bytes:
    PIL.Image.new("RGB", size, colour).save(file := io.BytesIO(), format="PNG")
    return file.getvalue()


def url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


RED, BLUE, WIDE = png("red", (1, 1)), png("blue", (1, 1)), png("red", (3, 1))


class Eyes(Vision):
    """A processor of a few bytes: an image is a mark and as many placeholders as it is wide."""

    def __init__(self, parts_only: bool):
        self.tokenizer = make_tokenizer()
        self.tokenizer.add_special_tokens({"additional_special_tokens": ["<image>", "<mark>"]})
        self.tokenizer.chat_template, self.parts_only = make_vision.TEMPLATE % "<image>", parts_only
        if parts_only:                 # plain text is a list of characters, none of which is a part
            self.tokenizer.chat_template = self.tokenizer.chat_template.replace("message['content'] is string", "false")
        assert reads_parts_only(self.tokenizer) == parts_only
        self.processor = SimpleNamespace(image_token="<image>")
        self.token, self.mark = self.tokenizer.convert_tokens_to_ids(["<image>", "<mark>"])

    def expansion(self, file: bytes) -> list[int]:
        return [self.mark] + [self.token] * PIL.Image.open(io.BytesIO(file)).width


EYES, STRICT = Eyes(False), Eyes(True)


def part(wire: str, file: bytes | str) -> dict:
    """A text, or an image, as a wire carries it."""
    if isinstance(file, str):
        return {"type": "input_text" if wire == "responses" else "text", "text": file}
    return {"chat": {"type": "image_url", "image_url": {"url": url(file)}}, "responses": {"type": "input_image", "image_url": url(file)},
            "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file).decode()}}}[wire]


# ---------------------------------------------------------------------------------------------------- ids and rows
@few
@given(st.lists(st.sampled_from([1, 2, RED, BLUE, WIDE]), max_size=12), st.lists(st.sampled_from([3, WIDE, RED]), max_size=6))
def test_collapsed_ids_expand_to_the_same_again(first, second):
    """In a segment grown in two steps each image lies where it says, and vLLM is sent one placeholder for each."""
    segment = Trajectory(0, 0)
    for stretch in (first, second):
        files = [x for x in stretch if isinstance(x, bytes)]
        ids, images = EYES.expand([EYES.token if isinstance(x, bytes) else x for x in stretch], files)
        segment.extend(ids, images=images)
    everything = first + second
    assert [i.file for i in segment.images] == [x for x in everything if isinstance(x, bytes)]
    assert all(segment.token_ids[i.start : i.start + i.length].tolist() == EYES.expansion(i.file) for i in segment.images)
    sent = EYES.collapse(segment.token_ids.tolist(), segment.images)
    assert sent == [EYES.token if isinstance(x, bytes) else x for x in everything]
    assert EYES.expand(sent, [i.file for i in segment.images]) == (segment.token_ids.tolist(), segment.images)


def test_a_template_that_writes_no_placeholder_is_refused():
    with pytest.raises(ValueError, match="0 times for 1 images"):
        EYES.expand([1, 2, 3], [RED])


@few
@given(st.lists(st.tuples(st.integers(1, 9), st.lists(st.sampled_from([RED, BLUE, WIDE]), max_size=2)), min_size=1, max_size=8), st.integers(1, 3), st.integers(4, 40))
def test_rows_keep_their_images_when_they_are_reordered_and_cut(rows, ranks, budget):
    """Each row begins with its number; whatever micro-batch it lands in, its images are its own."""
    rollouts = []
    for i, (length, files) in enumerate(rows):
        trajectory = Trajectory(i, i, reward=0.0)
        ids, images = EYES.expand([EYES.token] * len(files), files)
        trajectory.extend([i + 1, *ids], images=[replace(image, start=image.start + 1) for image in images])
        trajectory.extend([1] * length, logprobs=[-1.0] * length, policy_versions=[0] * length)
        rollouts.append([trajectory])
    batch = collate(rollouts, AGGREGATIONS["token-mean"])
    seen = []
    for microbatches in plan_microbatches(batch, torch.arange(len(rows)), ranks, budget):
        for small in (take_rows(batch, chosen) for chosen in microbatches):
            for n, ids in enumerate(small.token_ids.tolist()):
                files = [] if small.images is None else small.images[n]
                assert files == rows[ids[0] - 1][1] and ids.count(EYES.token) == sum(len(EYES.expansion(f)) - 1 for f in files)
                seen.append(ids[0])
    assert set(seen) == set(range(1, len(rows) + 1))


# ---------------------------------------------------------------------------------------------------- the wires
@wires
@pytest.mark.parametrize("eyes", [EYES, STRICT], ids=["text or parts", "parts only"])
@few
@given(st.lists(st.lists(st.sampled_from(["a", "b", RED, BLUE, WIDE]), min_size=1, max_size=3), min_size=1, max_size=4), st.data())
def test_a_conversation_with_images_is_one_segment_until_one_of_them_is_another(wire, eyes, turns, data):
    """Each prompt is the whole conversation rendered anew and expanded; with another file in one place the request is a segment of its own."""
    shown = [(n, k) for n, turn in enumerate(turns) for k, x in enumerate(turn) if isinstance(x, bytes)]
    assume(shown)
    table = Table(*[answer(*EYES.tokenizer.encode("ok"), EYES.tokenizer.eos_token_id) for _ in range(2 * len(turns))], tokenizer=eyes.tokenizer, vision=eyes)

    async def converse(turns) -> None:
        messages = []
        for turn in turns:
            _, messages = await table.say(wire, messages + [{"role": "user", "content": [part(wire, x) for x in turn]}])

    def expected(turns) -> list[int]:
        """The last prompt of a conversation."""
        messages = []
        for turn in turns:
            parts = [{"type": "image"} if isinstance(x, bytes) else {"type": "text", "text": x} for x in turn]
            if not any(isinstance(x, bytes) for x in turn):
                parts = "\n".join(turn)
            messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": "ok"}]
        text = eyes.tokenizer.apply_chat_template([eyes.message(m) for m in messages[:-1]], tokenize=False, add_generation_prompt=True)
        return EYES.expand(tokenize(EYES.tokenizer, text), [x for turn in turns for x in turn if isinstance(x, bytes)])[0]

    asyncio.run(converse(turns))
    assert table.engine.prompts == [expected(turns[: n + 1]) for n in range(len(turns))]
    n, k = data.draw(st.sampled_from(shown))
    other = data.draw(st.sampled_from([file for file in (RED, BLUE, WIDE) if file != turns[n][k]]))
    edited = [[other if (n, k) == (i, j) else x for j, x in enumerate(turn)] for i, turn in enumerate(turns)]
    asyncio.run(converse(edited))
    assert table.engine.prompts[-1] == expected(edited)
    segments = table.server.close(table.session)
    assert len(segments) == 2
    assert [[i.file for i in s.images] for s in segments] == [[x for turn in t for x in turn if isinstance(x, bytes)] for t in (turns, edited)]
    for segment in segments:
        assert all(segment.token_ids[i.start : i.start + i.length].tolist() == EYES.expansion(i.file) for i in segment.images)


def test_a_tools_image_and_count_tokens_and_a_literal_placeholder():
    """A screenshot in a tool result is seen; a user who writes the placeholder as text shows nothing; count_tokens counts expanded ids."""
    table = Table(answer(1, EYES.tokenizer.eos_token_id), answer(2, EYES.tokenizer.eos_token_id), tokenizer=EYES.tokenizer, vision=EYES)
    messages = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [part("messages", "see"), part("messages", WIDE)]}]}]
    body = {"model": "m", "messages": messages}
    counted = asyncio.run(table.post("messages/count_tokens", body)).json["input_tokens"]
    reply = asyncio.run(table.post("messages", body | {"max_tokens": 9}))
    assert reply.code == 200 and table.engine.prompts[0].count(EYES.token) == 3
    assert counted == reply.json["usage"]["input_tokens"] == len(table.engine.prompts[0])


@wires
@pytest.mark.parametrize("image, vision, words", [
    (RED, None, "reads text only"), ("http", EYES, "nothing is fetched"), ("base64", EYES, "base64"), (b"no picture", EYES, "no image")])
def test_an_image_that_cannot_be_seen_is_refused_with_400_and_nothing_is_sampled(wire, image, vision, words):
    table = Table(answer(8, 1), **({"tokenizer": EYES.tokenizer, "vision": vision} if vision else {}))
    path, body, _ = WIRES[wire]
    if isinstance(image, bytes):
        shown = part(wire, image)
    else:
        where = {"http": "https://example.com/a.png", "base64": "data:image/png;base64,%%%"}[image]
        shown = {"chat": {"type": "image_url", "image_url": {"url": where}}, "responses": {"type": "input_image", "image_url": where},
                 "messages": {"type": "image", "source": {"type": "url", "url": where} if image == "http" else {"type": "base64", "media_type": "image/png", "data": "%%%"}}}[wire]
    reply = asyncio.run(table.post(path, body([{"role": "user", "content": [part(wire, "hello"), shown]}])))
    assert reply.code == 400 and words in reply.json["error"]["message"] and not table.engine.prompts


@pytest.mark.parametrize("eyes", [EYES, STRICT], ids=["text or parts", "parts only"])
def test_an_env_shows_images_in_its_first_and_in_later_observations(eyes):
    """The engine is asked with the whole conversation, rendered and expanded; a text turn between shows none."""
    class Shows(Env):
        turn = 0

        async def reset(self, prompt):
            return [{"role": "user", "content": [{"type": "image", "image": RED}, {"type": "text", "text": "left?"}]}]

        async def step(self, action):
            self.turn += 1
            return Result(terminated=self.turn == 3, observation="and?" if self.turn == 1 else [{"role": "user", "content": [part("chat", WIDE)]}])

    end, asked = eyes.tokenizer.eos_token_id, []

    async def generate(token_ids, max_tokens, stop, turn, images):
        asked.append((token_ids.tolist(), [i.file for i in images]))
        return answer(*eyes.tokenizer.encode("ok"), end)

    [segment] = asyncio.run(run_episode(Shows(), {"prompt": ""}, eyes.tokenizer, generate, Budget(500), vision=eyes))
    said = "<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n"
    text = said % "<image>left?" + "ok<|im_end|>\n" + said % "and?" + "ok<|im_end|>\n" + said % "<image>"
    assert asked[-1] == (EYES.expand(tokenize(eyes.tokenizer, text), [RED, WIDE])[0], [RED, WIDE]) and [len(files) for _, files in asked] == [1, 1, 2]
    assert segment.token_ids[:-3].tolist() == asked[-1][0]


def test_an_env_that_shows_an_image_to_a_text_model_is_told_so():
    class Shows(Env):
        async def reset(self, prompt):
            return ask("left?", "r", "g")

    with pytest.raises(ValueError, match="reads text only"):
        asyncio.run(run_episode(Shows(), {"prompt": ""}, TOKENIZER, None, Budget(100)))


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
    with running(cfg, loop) as parts:
        yield cfg, parts


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


def test_images_stay_in_flight_over_a_publish_and_each_token_is_of_the_version_it_carries(sight, loop):
    """24 long answers to an image, a publish of changed weights in their middle: tokens of the new version agree with the trainer to 1e-4, those before are further off."""
    cfg, parts = sight
    vision, engine = Vision(cfg.model), parts.engines[0]

    async def answers(name: str, limit: int) -> list:
        requests = []
        for i in range(24):
            messages, files = take_images(ask(f"{name} {i}", "r", "b"), vision)
            ids, images = vision.expand(tokenize(vision.processor.tokenizer, vision.processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)), files)
            requests.append((f"{name}-{i}", np.asarray(ids, np.int32), limit, [], images))
        rollouts = []
        for (_, ids, _, _, images), answer in zip(requests, await engine.generate.remote(requests, [Sampling()] * 24)):
            segment = Trajectory(len(rollouts), 0, reward=0.0)
            segment.extend(ids, images=images)
            segment.extend(answer.token_ids, answer.logprobs, answer.policy_versions)
            rollouts.append([segment])
        return rollouts

    async def scenario():
        await parts.publish(10)
        before = await answers("warm", 40)
        await update(cfg, parts, before)
        going = asyncio.ensure_future(answers("over", 300))
        while not going.done() and await engine.__ray_call__.remote(lambda self: max((r.detokenizer.num_output_tokens() for r in [*self.llm.output_processor.request_states.values()]), default=0)) < 60:
            await asyncio.sleep(0.02)
        await parts.publish(11)
        batch = collate(await going, AGGREGATIONS["token-mean"], cfg.generator.temperature)
        off = (await parts.trainer.logprobs(batch) - batch.behaviour_logprobs).abs()
        return batch, off

    batch, off = loop.run_until_complete(scenario())
    new, old = (batch.response_mask & (batch.policy_versions == version) for version in (11, 10))
    assert (new.any(1) & old.any(1)).sum() >= 4 and (new | old == batch.response_mask).all()
    assert off[new].max() <= 1e-4 and off[old].mean() > 1e-3


def test_a_model_whose_images_cannot_be_trained_is_refused_before_anything_starts(tmp_path):
    """Gemma 3: its processor stands one id for an image, which it expands to others, and only these are read as pixels."""
    from transformers import Gemma3Config, Gemma3ImageProcessorPil, Gemma3Processor, PreTrainedTokenizerFast

    marks = dict(boi_token="<start_of_image>", image_token="<image_soft_token>", eoi_token="<end_of_image>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer().backend_tokenizer, eos_token="<|im_end|>", extra_special_tokens=marks)
    tokenizer.chat_template = make_vision.TEMPLATE % "<start_of_image>"
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1)
    Gemma3Config(text_config=sizes | dict(vocab_size=len(tokenizer), head_dim=32, num_key_value_heads=1), vision_config=sizes, image_token_index=tokenizer.image_token_id).save_pretrained(tmp_path)
    Gemma3Processor(Gemma3ImageProcessorPil(size={"height": 32, "width": 32}), tokenizer, image_seq_length=4).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="not supported: its processor stands '<start_of_image>'.*want one id"):
        resolve(Config(model=str(tmp_path), device="cpu"))


@pytest.mark.long
def test_two_ranks_do_what_one_does_although_only_one_of_them_sees_an_image(eyes, cluster, loop):
    """Five rows, one with images: logprobs and, after an update, all parameters agree to 1e-5; so does a run that never shows an image."""
    vision, draw = Vision(eyes), np.random.default_rng(0)

    def rows(shows: bool) -> list:
        rollouts = []
        for i in range(5):
            files = [png("red"), png("blue", (30, 50))] if shows and i == 3 else []
            ids, images = vision.expand(tokenize(vision.processor.tokenizer, render_text(vision, len(files))), files)
            trajectory = Trajectory(i, i, reward=0.0)
            trajectory.extend(ids, images=images)
            trajectory.extend(draw.integers(0, 250, 4 + i), logprobs=[-5.0] * (4 + i), policy_versions=[0] * (4 + i))
            rollouts.append([trajectory])
        return rollouts

    async def of(ranks: int, batches: list) -> list:
        cfg = Config(model=eyes, device="cpu", dtype="float32", generator=GeneratorConfig(agent=str(ROOT / "recipes/colour.py")),
                     trainer=TrainerConfig(trainers=ranks, tokens_per_microbatch=200, learning_rate=1e-3, warmup_steps=0, decay="constant"))
        trainer = make_trainer(cfg, resolve(cfg))
        await trainer.start()
        out = []
        for batch in batches:
            batch.old_logprobs = await trainer.logprobs(batch)
            batch.advantages = batch.spread(torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0]))
            await trainer.update(batch, "ppo")
            out.append((batch.old_logprobs, (await asyncio.gather(*[rank.parameters.remote() for rank in trainer.ranks]))[0]))
        for rank in trainer.ranks:
            ray.kill(rank)
        return out

    batches = [collate(rows(False), AGGREGATIONS["token-mean"]), collate(rows(True), AGGREGATIONS["token-mean"])]
    for (one, mine), (two, theirs) in zip(*[loop.run_until_complete(of(n, [replace(b) for b in batches])) for n in (1, 2)]):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=0)
        assert all((mine[name] - theirs[name]).abs().max() <= 1e-5 for name in mine)


def render_text(vision: Vision, images: int) -> str:
    return vision.processor.tokenizer.apply_chat_template([{"role": "user", "content": [{"type": "image"}] * images + [{"type": "text", "text": "what?"}]}], tokenize=False, add_generation_prompt=True)
