"""agent.py owns what a user writes (Env, ChatAgent, Result) and what a rollout leaves behind (Trajectory).

It knows no HTTP, vLLM, torch or Ray, and no groups: `run_episode` is given a `generate` callable and a tokenizer.
Token identity is kept here: an episode is one growing list of ids. The ids the engine sampled are appended as they
came, and only *new* text (the prompt, an observation) is ever tokenised; history is never rendered again. What ids stand
for an image is the model's own processor's word (`Vision`).

Letters: T tokens of one segment. A *segment* is one unbroken id sequence; a rollout of an Env is one segment, one of a ChatAgent may be several.
Sources: the Env interface follows Gymnasium (https://gymnasium.farama.org); token-in/token-out is arXiv:2607.21653, section 3.
"""

import base64
import binascii
import functools
import importlib.util
import inspect
import io
import json
import math
import numbers
import re
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np


# ---------------------------------------------------------------------------------------------------- records
@dataclass(frozen=True)
class Image:
    """An image that a segment shows: its file as it came (PNG, JPEG, ...), and where the ids lie that stand for it."""

    file: bytes
    start: int                         # place of the first of them in the segment
    length: int


ARRAYS = {"token_ids": np.int32, "response_mask": bool, "behaviour_logprobs": np.float32, "policy_versions": np.int32}    # of a Trajectory


@dataclass
class Trajectory:
    """One segment of one rollout: four arrays of equal length [T], grown only by `extend`.

    token_ids int32; response_mask True where the policy sampled; behaviour_logprobs (nats) and policy_versions as the
    engine reported them for sampled tokens, 0 and -1 elsewhere. `reward` is the rollout's (None = not scored).
    """

    rollout: int                       # which rollout; its segments share the number
    group: int                         # which prompt of the stream; rollouts of one group share the number
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))             # [T]
    response_mask: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))             # [T]
    behaviour_logprobs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))  # [T]
    policy_versions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))       # [T]
    reward: float | None = None
    truncated: bool = False            # the last answer hit a token limit, or the context was full
    info: dict[str, Any] = field(default_factory=dict)
    images: list[Image] = field(default_factory=list)   # in order; token_ids have them expanded, as the engine sees them
    routed_experts: Any = None         # [C, layers, k] experts that a mixture's engine chose for tokens 0..C-1; a Ray reference to it once the rollout has ended; None: not told

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getstate__(self) -> dict:
        """Its arrays as bytes inside the pickle: as buffers beside it each would cost more than its tokens, and lie in Ray's object store, which they would fill."""
        return vars(self) | {name: np.asarray(getattr(self, name), dtype).tobytes() for name, dtype in ARRAYS.items()}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state | {name: np.frombuffer(state[name], dtype) for name, dtype in ARRAYS.items()})       # read-only; `extend` makes new ones

    def extend(self, token_ids, logprobs=None, policy_versions=None, routed_experts=None, images=()) -> None:
        """Append tokens. With logprobs and policy_versions they were *sampled*; without, they were *observed*, and may show `images` (placed in token_ids).

        `routed_experts` come with sampled tokens and are those of the whole sequence so far but its last token, which the
        engine had not read yet: [len(self) + n - 1, layers, k]. A position keeps the first ones told of it.
        Raises ValueError when the three lengths differ or a logprob is missing (None, NaN) or positive infinite.
        """
        token_ids = np.asarray(token_ids, dtype=np.int32).reshape(-1)
        n = len(token_ids)
        if (logprobs is None) != (policy_versions is None):
            raise ValueError(f"Rollout {self.rollout}: sampled tokens need both logprobs and policy_versions; give both or neither.")
        sampled = logprobs is not None
        if sampled:
            logprobs = np.asarray(logprobs, dtype=np.float32)          # None becomes NaN
            policy_versions = np.asarray(policy_versions, dtype=np.int32).reshape(-1)
            if not len(logprobs) == len(policy_versions) == n:
                raise ValueError(
                    f"Rollout {self.rollout}: {n} sampled tokens came with {len(logprobs)} logprobs and {len(policy_versions)} policy "
                    "versions. Every sampled token needs one of each; nothing is filled in.")
            if np.isnan(logprobs).any() or np.isposinf(logprobs).any():
                where = int(np.flatnonzero(np.isnan(logprobs) | np.isposinf(logprobs))[0])
                raise ValueError(
                    f"Rollout {self.rollout}: the logprob of sampled token {where} (id {token_ids[where]}) is missing or not a number. "
                    "A token without its behaviour logprob cannot be trained; check what the engine returned.")
        if routed_experts is not None:
            assert len(routed_experts) == len(self) + n - 1, f"experts of {len(routed_experts)} tokens for a sequence of {len(self)} + {n}"
            told = routed_experts[:0] if self.routed_experts is None else self.routed_experts
            self.routed_experts = np.concatenate([told, routed_experts[len(told):]])
        self.images += [replace(image, start=len(self) + image.start) for image in images]
        self.token_ids = np.concatenate([self.token_ids, token_ids])
        self.response_mask = np.concatenate([self.response_mask, np.full(n, sampled)])
        self.behaviour_logprobs = np.concatenate([self.behaviour_logprobs, logprobs if sampled else np.zeros(n, np.float32)])
        self.policy_versions = np.concatenate([self.policy_versions, policy_versions if sampled else np.full(n, -1, np.int32)])


@dataclass
class Result:
    """What `Env.step` returns after one action, and `ChatAgent.run` at its end (which reads reward, truncated and info only).

    Rewards add up over the turns; None means "could not be scored" and drops the rollout (counted, never taken as 0).
    `info` of the last turn is the rollout's; its numbers become metrics.
    """

    reward: float | None = 0.0
    observation: str | list[dict] = ""   # text (a user message) or chat messages, with images if the model has eyes (see image_of_part); used only when the episode goes on
    terminated: bool = True              # True ends the episode
    truncated: bool = False              # ends it too, and marks the rollout as cut short
    info: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None        # limit of the next answer, tokens; None = the run's --max-new-tokens
    stop: list[str] = field(default_factory=list)   # stop strings of the next answer

    def __post_init__(self):
        if not isinstance(self.info, dict):
            raise TypeError(f"Result.info must be a dict, got {self.info!r:.100}. Its numbers become metrics.")


class Env:
    """An agent whose loop we own. Override `step`; override `reset` and `close` when there is state.

    A new instance serves each rollout. `self.prompt` is the prompt's dict (messages or prompt, label, anything else).
    """

    max_turns: int = 32                  # answers in an episode at most; 1 lets a whole group travel in one engine call

    async def reset(self, prompt: dict) -> str | list[dict]:
        """The first observation. By default the prompt's messages, or its text as one user message."""
        return prompt["messages"] if "messages" in prompt else prompt["prompt"]

    async def step(self, action: str) -> Result:
        """Answer to one action. `action` is the decoded answer without its stop token, which stays in the ids."""
        raise NotImplementedError(f"{type(self).__name__} needs `async def step(self, action) -> Result`.")

    async def close(self) -> None:
        """Called once on every way out of an episode."""


@dataclass(frozen=True)
class ChatContext:
    """What a ChatAgent is told: its task, and where its own client finds the policy. Key and URLs end with the rollout."""

    prompt: dict[str, Any]             # as the prompt source gave it
    messages: list[dict]               # its messages, or its text as one user message
    tools: list[dict] | None           # its tools
    label: Any                         # its label, for the reward; None where it has none
    base_url: str                      # for OpenAI clients: http://127.0.0.1:<port>/s/<session>/v1
    session_url: str                   # for Anthropic clients, which add /v1 themselves
    api_key: str                       # for both; nobody else's requests reach this rollout
    model: str                         # name to give the client; any other is served by the same policy
    temperature: float                 # what the server samples with, whatever the client asks for


class ChatAgent:
    """An agent that owns its loop: any program that talks to an OpenAI or Anthropic endpoint. Override `run`.

    A new instance serves each rollout. What the policy samples in answer to the requests of `run` is what is trained, all
    of it with the reward that `run` returns. All agents of a worker share one thread: a client that blocks (a synchronous
    SDK, subprocess.run) holds up the others, though never the server, so call it as `await asyncio.to_thread(...)`.
    """

    async def run(self, ctx: ChatContext) -> Result:
        raise NotImplementedError(f"{type(self).__name__} needs `async def run(self, ctx) -> Result`.")


@dataclass(frozen=True)
class Budget:
    """Token limits of an episode: `context` counts prompt and all turns, `max_new_tokens` one answer (None: what is left)."""

    context: int
    max_new_tokens: int | None = None


# ---------------------------------------------------------------------------------------------------- text to ids
_MARK = re.compile("\ue000(\\d+)\ue001")   # stands for the n-th reserved string, written by a user or a tool


def reserved(tokenizer) -> list[str]:
    """Strings that text may not carry into a template as they are: control tokens, longest first, and our own marks."""
    control = sorted({t.content for t in tokenizer.added_tokens_decoder.values() if t.special}, key=len, reverse=True)
    return control + ["\ue000", "\ue001", "\ue002"]


def escape(value, reserved: list[str]):
    """Replace reserved strings inside a message, a tool schema or any part of one by marks, so that they stay text when tokenised."""
    if isinstance(value, str):
        return re.sub("|".join(map(re.escape, reserved)), lambda m: f"\ue000{reserved.index(m[0])}\ue001", value)
    if isinstance(value, list):
        return [escape(v, reserved) for v in value]
    if isinstance(value, dict):
        return {escape(k, reserved): escape(v, reserved) for k, v in value.items()}
    return value


def tokenize(tokenizer, text: str) -> list[int]:
    """Ids of rendered text: the template's markup becomes control tokens, marked text never does. No BOS is added."""
    strings, ids = reserved(tokenizer), []
    for k, piece in enumerate(_MARK.split(text)):
        if k % 2:
            ids += tokenizer.encode(strings[int(piece)], add_special_tokens=False, split_special_tokens=True)
        elif piece:
            ids += tokenizer.encode(piece, add_special_tokens=False)
    return ids


def as_messages(observation: str | list[dict]) -> list[dict]:
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if isinstance(observation, list) and observation and all(isinstance(m, dict) and "role" in m for m in observation):
        return observation
    raise TypeError(f"An observation is text or a list of chat messages (dicts with role and content); got {observation!r:.200}.")


def plain(tokenizer, observation) -> list[int]:
    """Ids of an observation for a tokenizer without a chat template: text only, as it is."""
    if not isinstance(observation, str):
        raise ValueError("This tokenizer has no chat_template, so it cannot render messages. Give prompts and observations as text, or a chat model.")
    return tokenize(tokenizer, escape(observation, reserved(tokenizer)))


def render_prompt(tokenizer, observation: str | list[dict], tools: list | None = None) -> list[int]:
    """Ids of the first prompt: the model's own chat template up to and including the assistant header.

    A tokenizer without a chat template takes plain text only, as it is.
    """
    if tokenizer.chat_template is None:
        return plain(tokenizer, observation)
    return _rendered(tokenizer, tokenizer.chat_template, json.dumps([as_messages(observation), tools])).tolist()


@functools.lru_cache(maxsize=64)         # the rollouts of a group have one prompt
def _rendered(tokenizer, template: str, chat: str) -> np.ndarray:
    messages, tools = escape(json.loads(chat), reserved(tokenizer))
    return np.asarray(tokenize(tokenizer, tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=True)), np.int32)


# ---------------------------------------------------------------------------------------------------- images
def picture(file: bytes):
    """An image's file as pixels, the same for engine and trainer: a PIL image, RGB. Raises ValueError when it is none."""
    import PIL.Image

    try:
        return PIL.Image.open(io.BytesIO(file)).convert("RGB")
    except Exception as error:                             # each of its readers has its own
        raise ValueError(f"These {len(file)} bytes are no image that can be read: {error}") from None


def blank_image() -> bytes:
    """A white image's file, where any will do."""
    import PIL.Image

    PIL.Image.new("RGB", (64, 64), "white").save(file := io.BytesIO(), format="PNG")
    return file.getvalue()


@functools.lru_cache(maxsize=256)
def checked_file(file: bytes) -> bytes:
    """The first file equal to this one, which is an image: a group's rollouts share it, so that it travels once. Raises ValueError when it is none."""
    picture(file)
    return file


def image_of_url(url: str) -> bytes:
    """The file in a data URL (data:image/png;base64,...). Raises ValueError for any other URL: nothing is fetched."""
    head, _, data = url.partition(";base64,")
    if not head.startswith("data:image/"):
        raise ValueError(f"an image must come as a data URL (data:image/png;base64,...), got {url!r:.100}; nothing is fetched.")
    try:
        return checked_file(base64.b64decode(data, validate=True))
    except binascii.Error as error:
        raise ValueError(f"the base64 of an image's data URL is broken: {error}") from None


def image_of_part(part: dict) -> bytes:
    """The file of a message's part: OpenAI's {"type": "image_url", "image_url": {"url": ...}}, or {"type": "image", "image": a file's bytes or a PIL image}."""
    held = part.get(part["type"])
    if not (isinstance(held, dict) and isinstance(held.get("url"), str) if part["type"] == "image_url" else isinstance(held, bytes) or hasattr(held, "save")):
        raise ValueError(f"An image of a message was given as {str(part)[:100]}. Want {{'type': 'image_url', 'image_url': {{'url': 'data:image/png;base64,...'}}}} or {{'type': 'image', 'image': bytes or a PIL image}}.")
    if part["type"] == "image_url":
        return image_of_url(held["url"])
    if isinstance(held, bytes):
        return checked_file(held)
    held.save(file := io.BytesIO(), format="PNG")
    return checked_file(file.getvalue())


def reads_parts_only(tokenizer) -> bool:
    """Whether the chat template loses plain text: those of some vision models read lists of parts only."""
    return tokenizer.chat_template is not None and ANSWER not in tokenizer.apply_chat_template([{"role": "user", "content": ANSWER}], tokenize=False)


class Vision:
    """How a vision-language model sees: its own processor, which says what ids stand for an image. `token` is the id that the template
    writes once for an image and the model reads as pixels; it is never sampled (`UNSAID`), or one could not tell them apart."""

    def __init__(self, model: str):
        from transformers import AutoProcessor

        self.processor = AutoProcessor.from_pretrained(model)
        self.token, self.expansion = self.processor.image_token_id, functools.lru_cache(maxsize=256)(self.expansion)
        self.processor.tokenizer.chat_template = self.processor.tokenizer.chat_template or self.processor.chat_template     # some models keep it with the processor only
        self.parts_only = reads_parts_only(self.processor.tokenizer)

    def check(self, image_token_id: int) -> None:
        """Raises ValueError for a model whose images cannot be served and trained; `image_token_id` is the id that it reads as pixels."""
        if self.token != image_token_id:
            raise ValueError(f"its processor stands {self.processor.image_token!r} (id {self.token}) for an image, and the model reads pixels at id {image_token_id}: want one id for both.")
        messages, files = take_images([{"role": "user", "content": [{"type": "image", "image": blank_image()}, {"type": "text", "text": "What?"}]}], self)
        self.expand(render_prompt(self.processor.tokenizer, messages), files)

    def message(self, message: dict) -> dict:
        """A message as the template reads it."""
        text = message.get("content")
        return message | {"content": [{"type": "text", "text": text}]} if self.parts_only and isinstance(text, str) else message

    def expansion(self, file: bytes) -> list[int]:
        """The ids that stand for an image."""
        return list(self.processor(text=[self.processor.image_token], images=[picture(file)], add_special_tokens=False)["input_ids"][0])

    def expand(self, token_ids: list[int], files: list[bytes]) -> tuple[list[int], list[Image]]:
        """Rendered ids with every placeholder replaced by the ids of its image. Raises ValueError unless there are as many as images."""
        if (places := token_ids.count(self.token)) != len(files):
            raise ValueError(f"The chat template wrote {self.processor.image_token!r} {places} times for {len(files)} images: want once for each. Models whose template marks images in another way are not supported.")
        ids, images, left = [], [], iter(files)
        for token in token_ids:
            stand_in = [token]
            if token == self.token:
                stand_in = self.expansion(file := next(left))
                images.append(Image(file, len(ids), len(stand_in)))
            ids += stand_in
        return ids, images

    def collapse(self, token_ids: list[int], images: list[Image]) -> list[int]:
        """Expanded ids with one placeholder an image, as vLLM wants them; its own expansion gives token_ids again."""
        for image in reversed(images):
            token_ids = token_ids[: image.start] + [self.token] + token_ids[image.start + image.length:]
        return token_ids


UNSAID = -100.0                          # added to the logit of Vision.token by engine and trainer alike: the policy has no such word


def load_vision(model: str) -> Vision | None:
    """The eyes of the model at `model`; None for one that reads text only."""
    from transformers import AutoConfig

    return Vision(model) if hasattr(AutoConfig.from_pretrained(model), "vision_config") else None


def take_images(observation: str | list[dict], vision: Vision | None) -> tuple[str | list[dict], list[bytes]]:
    """(the observation with {"type": "image"} in the place of each image, as templates want it; the images' files, in order)."""
    messages, files = [], []
    for message in as_messages(observation) if isinstance(observation, list) or vision and vision.parts_only else []:
        message = vision.message(message) if vision else message
        if isinstance(message.get("content"), list):
            parts = []
            for part in message["content"]:
                if isinstance(part, dict) and part.get("type") in ("image", "image_url"):
                    files.append(image_of_part(part))
                    part = {"type": "image"}
                parts.append(part)
            message = message | {"content": parts}
        messages.append(message)
    if files and vision is None:
        raise ValueError(f"An observation shows {len(files)} images, but the model reads text only (its config has no vision_config). Choose a vision-language model.")
    return messages or observation, files


ANSWER = "\ue002"   # stands for the assistant's text where only the markup around it is wanted


def render_delta(tokenizer, observation: str | list[dict], sampled_ids, tools: list | None = None) -> list[int]:
    """Ids that follow an answer: the template's closing markup, the new messages, the next assistant header.

    The history is a stand-in, so nothing of it is rendered again. Closing markup that was already sampled (the stop
    token) is not repeated; where the answer was cut short it is added, as observed tokens.
    """
    if tokenizer.chat_template is None:
        return plain(tokenizer, observation)
    new, tools = escape([as_messages(observation), tools], reserved(tokenizer))
    text = [[{"type": "text", "text": said}] if all(isinstance(m.get("content"), list) for m in new) else said for said in ("question", ANSWER)]     # as the new ones are written
    history = [{"role": "user", "content": text[0]}, {"role": "assistant", "content": text[1]}]
    text = tokenizer.apply_chat_template(history + new, tools=tools, tokenize=False, add_generation_prompt=True)
    if text.count(ANSWER) != 1:
        raise ValueError("The chat template does not write an assistant message's content exactly once, so turns cannot be joined to it.")
    return tokenize(tokenizer, unsampled(tokenizer, text.split(ANSWER)[1], sampled_ids))


def unsampled(tokenizer, tail: str, sampled_ids) -> str:
    """The markup that follows an answer, without the stop token at its start where that one was sampled."""
    if len(sampled_ids):
        last = tokenizer.decode([int(sampled_ids[-1])], skip_special_tokens=False)
        if last in reserved(tokenizer) and tail.lstrip().startswith(last):       # some templates put white space before it
            return tail.lstrip()[len(last):]
    return tail


def answer_text(tokenizer, completion) -> str:
    """The sampled ids as text, decoded as one piece, without the stop token or stop string that ended them."""
    ids = np.asarray(completion.token_ids)                   # an array: the tokenizer checks a list element by element
    if completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str):
        ids = ids[:-1]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    return text.split(completion.stop_reason)[0] if isinstance(completion.stop_reason, str) else text


# ---------------------------------------------------------------------------------------------------- the episode
Generate = Callable[..., Awaitable[Any]]   # generate(token_ids, max_tokens=, stop=, turn=, images=) -> generator.Completion


def checked_reward(reward, rollout: int) -> float | None:
    """A finite float, or None for "not scored" (None, NaN or infinite). Anything else is the agent's mistake."""
    if reward is None:
        return None
    if isinstance(reward, (numbers.Real, np.number, np.bool_)):
        return float(reward) if math.isfinite(reward) else None
    raise TypeError(f"Rollout {rollout}: Result.reward must be a number or None, got {reward!r}. Convert it in your agent.")


async def run_episode(env: Env, prompt: dict, tokenizer, generate: Generate, budget: Budget, rollout: int = 0, group: int = 0, vision: Vision | None = None) -> list[Trajectory]:
    """One rollout of an Env: reset, then (generate, step) until it ends. Returns its segments (for an Env: one).

    Ends when step says terminated or truncated, after `max_turns` answers, or when the context is full; the last two
    set `truncated`. A prompt that leaves no room is never sent: the trajectory then has no sampled token.
    """
    trajectory = Trajectory(rollout, group)
    try:
        env.prompt, total, max_tokens, stop = prompt, 0.0, None, []
        observation, files = take_images(await env.reset(prompt), vision)
        ids = render_prompt(tokenizer, observation, prompt.get("tools"))
        ids, images = vision.expand(ids, files) if files else (ids, [])
        trajectory.extend(ids, images=images)
        turn = 0
        while True:
            room = budget.context - len(trajectory)
            if room <= 0:
                trajectory.truncated = True
                break
            limit = min(x for x in (room, max_tokens or budget.max_new_tokens) if x)
            completion = await generate(trajectory.token_ids, max_tokens=limit, stop=stop, turn=turn, images=trajectory.images)
            trajectory.extend(completion.token_ids, completion.logprobs, completion.policy_versions, completion.routed_experts)
            trajectory.truncated = completion.finish_reason == "length"
            result = await env.step(answer_text(tokenizer, completion))
            if not isinstance(result, Result):
                raise TypeError(f"{type(env).__name__}.step must return an agent.Result, got {type(result).__name__}.")
            reward = checked_reward(result.reward, rollout)
            total = None if total is None or reward is None else total + reward
            trajectory.reward, trajectory.info = total, result.info
            trajectory.truncated |= result.truncated
            if result.terminated or result.truncated:
                break
            turn += 1
            if turn == env.max_turns:
                trajectory.truncated = True
                break
            observation, files = take_images(result.observation, vision)
            delta = render_delta(tokenizer, observation, completion.token_ids, prompt.get("tools"))
            delta, images = vision.expand(delta, files) if files else (delta, [])
            if len(trajectory) + len(delta) >= budget.context:   # no room for an answer: earlier turns stay as they are
                trajectory.truncated = True
                break
            trajectory.extend(delta, images=images)
            max_tokens, stop = result.max_tokens, result.stop
        return [trajectory]
    finally:
        await env.close()


# ---------------------------------------------------------------------------------------------------- the user's module
def load_agent(path: str):
    """Import the run's agent module (a .py file) and check that it exports `AgentRunner`, an Env or a ChatAgent. Raises ValueError otherwise."""
    file = Path(path) if Path(path).is_file() else Path(__file__).parent / path      # as given, or in the repository
    if not file.is_file():
        raise ValueError(f"--agent {path}: there is no such file. Give the path of a Python module that defines AgentRunner.")
    if file.suffix != ".py":
        raise ValueError(f"--agent {path} is not a .py file. Give the path of a Python module that defines AgentRunner.")
    name = f"agent_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, "AgentRunner") or not inspect.isclass(module.AgentRunner) or not issubclass(module.AgentRunner, (Env, ChatAgent)):
        raise ValueError(f"--agent {path} defines no AgentRunner that is a subclass of agent.Env or agent.ChatAgent. Name your subclass `AgentRunner`.")
    for name in ("reset", "step", "close") if issubclass(module.AgentRunner, Env) else ("run",):
        if not inspect.iscoroutinefunction(getattr(module.AgentRunner, name)):
            raise ValueError(f"--agent {path}: AgentRunner.{name} must be `async def`, so that one worker can run many episodes at once.")
    return module
