"""chat_server.py owns the wires, sessions and segments: an unmodified OpenAI or Anthropic client in, token-exact Trajectories out.

It knows no rewards, groups or engines: it is given a `generate` callable like `agent.run_episode`. A wire turns a request
into one `Chat` and one `Answer` back into the SDK's own types; a session turns Chats into ids and knows no wire.

A request *extends* a segment at a mark, which stands behind each sampled answer: the tools are the mark's, the messages
start with the mark's, each equal in what a wire can carry back (role, text, images, call ids, names and parsed arguments), and the
template's render of the longer list starts with what the engine saw and sampled up to there, or with that of the shorter
(some templates write a call, or the last answer, in another way). Its prompt is then the ids the engine saw up
to the mark, the closing markup, and the new text; history is not tokenised again. Anything else is rendered whole: a new segment.
Where the segment has grown beyond the mark (a fork), the ids up to the mark are observed ones of a new segment.
So each sampled token is trained once, and every prompt is a prefix of its segment.

Answers are complete before they are sent, streamed ones too; what is captured comes from the engine's result only.
Sources: the OpenAI and Anthropic API references, and the types of their Python packages.
"""

import asyncio
import functools
import hashlib
import hmac
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvicorn
from anthropic.types import Message, MessageTokensCount, RawContentBlockDeltaEvent, RawContentBlockStartEvent, RawContentBlockStopEvent
from anthropic.types import RawMessageDeltaEvent, RawMessageStartEvent, RawMessageStopEvent, TextBlock, ThinkingBlock, ToolUseBlock
from anthropic.types import Usage as AnthropicUsage
from openai import types as openai_types
from openai.types import chat as openai_chat
from openai.types import responses as openai_responses
from openai.types.chat import chat_completion, chat_completion_chunk
from openai.types.responses import response_reasoning_item, response_usage
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from agent import ANSWER, Budget, Image, Trajectory, Vision, answer_text, escape, image_of_url, reserved, tokenize, unsampled

MAX_BODY = 32 * 2**20                  # bytes of a request
MAX_MESSAGES = 10_000                  # of a request
MAX_TOOLS = 1_000                      # of a request
MAX_STOP = 16                          # stop strings of a request
MAX_IN_FLIGHT = 64                     # answers that one session may be waiting for
PIECE = 64                             # characters of a streamed delta


# ---------------------------------------------------------------------------------------------------- records
@dataclass(frozen=True)
class Chat:
    """One request, whatever its wire. Messages and tools have the shape that chat templates read."""

    model: str                         # as the client wrote it; it gets it back
    messages: list[dict]               # role, content (text, or parts where there are images), reasoning_content, tool_calls (arguments parsed), tool_call_id, name
    tools: list[dict]
    call_tools: bool                   # whether calls are taken out of the answer's text
    max_tokens: int | None
    stop: list[str]
    stream: bool
    include_usage: bool                # a streamed chat completion ends with its usage
    hints: dict[str, Any]              # what the client asked for that training does not allow to differ
    metadata: dict                     # where it differs, an equal request is no retry but another sample


@dataclass(frozen=True)
class Call:
    id: str
    name: str
    arguments: str                     # a JSON object, as the policy wrote it


@dataclass(frozen=True)
class Answer:
    """One answer, whatever its wire."""

    text: str
    finish: str                        # "stop", "length" (wins over the next) or "tool_calls"
    prompt_tokens: int
    sampled_tokens: int
    reasoning: str | None = None       # None: no reasoning parser, or nothing found
    calls: tuple[Call, ...] = ()
    stop_string: str | None = None     # the one that ended it
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class Mark:
    """The place behind a sampled answer: what a longer conversation starts with, and what the engine saw up to there."""

    segment: Trajectory
    length: int                        # ids of the segment up to here
    messages: list[dict]               # escaped; the last is the answer
    last: list[int]                    # the last sampled id: where it is markup, that markup is not written again
    seen: tuple[int, bytes]            # length and name of the text up to here: the prompt's, the sampled answer and its markup


class Refused(Exception):
    """A request that is answered with an error: HTTP status, what is wrong with it, which field."""

    TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error"}

    def __init__(self, code: int, message: str, param: str | None = None):
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


# ---------------------------------------------------------------------------------------------------- reading requests
@dataclass(frozen=True)
class Fields:
    """What becomes of each top-level field of a wire's requests; a field that is nowhere here is refused by name."""

    read: set[str]
    harmless: set[str]                 # real clients send them; nothing of them concerns the answer
    hints: set[str]                    # ignored with one visible warning, unless they agree with the run
    neutral: dict[str, Any]            # the one value that changes nothing


CHAT_FIELDS = Fields(
    read={"model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options", "metadata"},
    harmless={"user", "store", "service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"},
    hints={"temperature", "top_p", "parallel_tool_calls", "reasoning_effort", "verbosity"},
    neutral={"n": 1, "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "logprobs": False, "top_logprobs": 0,
             "response_format": {"type": "text"}, "modalities": ["text"]})
MESSAGES_FIELDS = Fields(
    read={"model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream", "metadata"},
    harmless={"service_tier", "cache_control", "inference_geo", "user_profile_id", "workspace_id", "diagnostics"},
    hints={"temperature", "top_p", "thinking", "output_config", "context_management"},
    neutral={"mcp_servers": [], "speed": "standard"})
RESPONSES_FIELDS = Fields(
    read={"model", "input", "instructions", "tools", "tool_choice", "max_output_tokens", "stream", "include", "text", "metadata"},
    harmless={"user", "store", "service_tier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "stream_options",
              "client_metadata"},
    hints={"temperature", "top_p", "parallel_tool_calls", "reasoning"},
    neutral={"background": False, "top_logprobs": 0, "truncation": "disabled"})


def hints_of(body: dict, fields: Fields) -> dict[str, Any]:
    """The hints of a request. Raises Refused for a field that cannot be honoured."""
    hints = {}
    for name, value in body.items():
        if value is None or name in fields.read or name in fields.harmless:
            continue
        if name in ("temperature", "top_p") and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise Refused(400, f"{name}: want a number, got {value!r:.100}.", name)
        if name in fields.hints:
            hints[name] = value
        elif name not in fields.neutral:
            raise Refused(400, f"{name!r:.100} cannot be honoured by a policy in training. Leave it out.", name[:100])
        elif value != fields.neutral[name]:
            raise Refused(400, f"{name} cannot be honoured by a policy in training, got {value!r:.100}. Leave it out, or give {fields.neutral[name]!r}.", name)
    return hints


def get(body: dict, name: str, kind: type, default: Any = None, where: str = "") -> Any:
    """body[name], checked; `default` where it is absent or null, and Refused where that is `...`."""
    value = body.get(name)
    if value is None and default is not ...:
        return default
    if not isinstance(value, kind) or kind is int and isinstance(value, bool):
        raise Refused(400, f"{where}{name}: want {kind.__name__}, got {value!r:.100}.", f"{where}{name}")
    return value


def count(body: dict, name: str, default: Any = None) -> int | None:
    value = get(body, name, int, default)
    if value is not None and value < 1:
        raise Refused(400, f"{name}: want at least 1, got {value}.", name)
    return value


def records(body: dict, name: str, limit: int, default: Any = ...) -> list[dict]:
    rows = get(body, name, list, default)
    if len(rows) > limit:
        raise Refused(400, f"{name}: {len(rows)} of them; at most {limit} are taken.", name)
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise Refused(400, f"{name}[{i}]: want an object, got {row!r:.100}.", f"{name}[{i}]")
    return rows


TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def text_of(content: Any, where: str) -> str:
    """Message content as text: null is "", blocks are their texts, a line each."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(records({where: content}, where, MAX_MESSAGES)):
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in TEXT_PARTS:
            raise Refused(400, f"{where}[{i}]: a part of type {kind!r:.100} cannot be honoured here. Policies read text, and images of users and tools; no audio or files.", f"{where}[{i}]")
        texts.append(get(part, TEXT_PARTS[kind], str, ..., f"{where}[{i}]."))
    return "\n".join(texts)


IMAGE_PARTS = ("image", "image_url", "input_image")


def shown(content: Any, where: str) -> str | list[dict]:
    """What a user or a tool shows: its text, or, with images, parts in order: {"type": "text", "text": ...} and {"type": "image", "image": the file}."""
    if not (isinstance(content, list) and any(isinstance(part, dict) and part.get("type") in IMAGE_PARTS for part in content)):
        return text_of(content, where)
    parts = []
    for i, part in enumerate(records({where: content}, where, MAX_MESSAGES)):
        at, kind = f"{where}[{i}].", part.get("type")
        if kind not in IMAGE_PARTS:
            parts.append({"type": "text", "text": text_of([part], where)})
            continue
        if kind == "image":                                # Anthropic's
            source = get(part, "source", dict, ..., at)
            url = f"data:{source.get('media_type')};base64,{source.get('data')}" if source.get("type") == "base64" else str(source.get("url"))
        else:                                              # of chat completions, of Responses
            url = get(get(part, "image_url", dict, ..., at), "url", str, ..., f"{at}image_url.") if kind == "image_url" else get(part, "image_url", str, ..., at)
        try:
            parts.append({"type": "image", "image": image_of_url(url)})
        except ValueError as error:
            raise Refused(400, f"{where}[{i}]: {error}", f"{where}[{i}]") from None
    return parts


def strict(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def parsed(arguments: Any) -> dict | str:
    """Arguments of a call as templates want them, a mapping; what is no JSON object stays text."""
    if not arguments or isinstance(arguments, dict):
        return arguments or {}
    try:
        value = json.loads(arguments, parse_constant=strict)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def assistant(text: str, reasoning: str | None, calls: list[tuple[str, str, Any]]) -> dict:
    """An assistant message in the template's shape. Calls are (id, name, arguments)."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [{"id": i, "type": "function", "function": {"name": name, "arguments": parsed(arguments)}} for i, name, arguments in calls]
    return message


def function(tool: dict, where: str, parameters: str) -> dict:
    """A tool in the template's shape. `strict` is left out: nothing is sampled under a grammar."""
    get(tool, "name", str, ..., where), get(tool, "description", str, None, where), get(tool, parameters, dict, None, where)
    names = {"name": "name", "description": "description", parameters: "parameters"}
    return {"type": "function", "function": {names[key]: value for key, value in tool.items() if key in names and value is not None}}


def tools_of(body: dict, parameters: str = "parameters", nested: bool = False) -> tuple[list[dict], bool]:
    """(tools, whether the policy may call them). Raises Refused for built-in tools and forced calls."""
    tools, plain = [], (None, "custom") if parameters == "input_schema" else ("function",)
    for i, tool in enumerate(records(body, "tools", MAX_TOOLS, [])):
        kind = tool.get("type")
        if kind not in plain:
            raise Refused(400, f"tools[{i}]: a tool of type {kind!r:.100} cannot be honoured; only functions that the client runs.", f"tools[{i}].type")
        tools.append(function(get(tool, "function", dict, ..., f"tools[{i}].") if nested else tool, f"tools[{i}].", parameters))
    choice = body.get("tool_choice")
    choice = choice.get("type") if isinstance(choice, dict) else choice
    if choice not in (None, "auto", "none"):
        raise Refused(400, f"tool_choice {choice!r:.100} cannot be honoured: a policy in training is not forced to call. Use auto or none.", "tool_choice")
    return tools, bool(tools) and choice != "none"


def stops_of(body: dict, name: str) -> list[str]:
    stop = [body[name]] if isinstance(body.get(name), str) else get(body, name, list, [])
    if len(stop) > MAX_STOP or not all(isinstance(s, str) and s for s in stop):
        raise Refused(400, f"{name}: want at most {MAX_STOP} strings, none empty.", name)
    return stop


def read_chat(body: dict) -> Chat:
    """OpenAI /v1/chat/completions."""
    hints = hints_of(body, CHAT_FIELDS)
    messages = [chat_message(m, f"messages[{i}].") for i, m in enumerate(records(body, "messages", MAX_MESSAGES))]
    tools, call_tools = tools_of(body, nested=True)
    limits = [x for x in (count(body, "max_tokens"), count(body, "max_completion_tokens")) if x]
    options = get(body, "stream_options", dict, {})
    return Chat(get(body, "model", str, ...), messages, tools, call_tools, min(limits, default=None), stops_of(body, "stop"),
                get(body, "stream", bool, False), get(options, "include_usage", bool, False, "stream_options."), hints, get(body, "metadata", dict, {}))


def chat_message(m: dict, where: str) -> dict:
    role = m.get("role")
    text = (shown if role in ("user", "tool") else text_of)(m.get("content"), f"{where}content")
    if role in ("system", "developer", "user"):
        return {"role": "user" if role == "user" else "system", "content": text}
    if role == "tool":
        message = {"role": "tool", "tool_call_id": get(m, "tool_call_id", str, "", where), "content": text}
        return message | {"name": get(m, "name", str, ..., where)} if m.get("name") else message
    if role != "assistant":
        raise Refused(400, f"{where}role: want system, developer, user, assistant or tool, got {role!r:.100}.", f"{where}role")
    if m.get("function_call") is not None:
        raise Refused(400, f"{where}function_call is the form before tool_calls, which cannot be honoured. Use tools and tool_calls.", f"{where}function_call")
    calls = []
    for call in records(m, "tool_calls", MAX_TOOLS, []):
        f = get(call, "function", dict, ..., f"{where}tool_calls.")
        arguments = f.get("arguments") if isinstance(f.get("arguments"), dict) else get(f, "arguments", str, "", f"{where}tool_calls.")
        calls.append((get(call, "id", str, "", f"{where}tool_calls."), get(f, "name", str, ..., f"{where}tool_calls."), arguments))
    return assistant(text, get(m, "reasoning_content", str, None, where) or get(m, "reasoning", str, None, where), calls)


def read_messages(body: dict) -> Chat:
    """Anthropic /v1/messages."""
    chat = anthropic_chat(body, count(body, "max_tokens", ...))
    if chat.messages and chat.messages[-1]["role"] == "assistant":
        raise Refused(400, "messages: the last one is the assistant's. A prefilled answer cannot be honoured: every token of an answer is sampled.", "messages")
    return chat


def read_count(body: dict) -> Chat:
    """Anthropic /v1/messages/count_tokens."""
    return anthropic_chat(body, None)


def anthropic_chat(body: dict, max_tokens: int | None) -> Chat:
    hints = hints_of(body, MESSAGES_FIELDS)
    output = get(body, "output_config", dict, {})
    if output.get("format") is not None:
        raise Refused(400, "output_config.format cannot be honoured: nothing is sampled under a grammar. Leave it out.", "output_config.format")
    messages = system_message(body.get("system"))
    for i, m in enumerate(records(body, "messages", MAX_MESSAGES)):
        messages += anthropic_message(m, f"messages[{i}].")
    tools, call_tools = tools_of(body, "input_schema")
    if isinstance(body.get("tool_choice"), dict) and body["tool_choice"].get("disable_parallel_tool_use"):
        hints["parallel_tool_calls"] = False
    return Chat(get(body, "model", str, ...), messages, tools, call_tools, max_tokens, stops_of(body, "stop_sequences"),
                get(body, "stream", bool, False), True, hints, get(body, "metadata", dict, {}))


def system_message(system: Any) -> list[dict]:
    """Claude Code's first block counts its requests, which would make each a conversation of its own; it is no text for the model."""
    if isinstance(system, list):
        system = [b for b in system if not (isinstance(b, dict) and str(b.get("text")).startswith("x-anthropic-billing-header"))]
    text = text_of(system, "system")
    return [{"role": "system", "content": text}] if text else []


def anthropic_message(m: dict, where: str) -> list[dict]:
    """One Anthropic message as those of a template: tool results become messages of their own, in order."""
    role, content = m.get("role"), m.get("content")
    if role not in ("user", "assistant", "system"):
        raise Refused(400, f"{where}role: want user, assistant or system, got {role!r:.100}.", f"{where}role")
    if role == "system" or isinstance(content, str):
        return [{"role": role, "content": text_of(content, f"{where}content")}]
    blocks, own = records(m, "content", MAX_MESSAGES), ("tool_use", "thinking", "redacted_thinking") if role == "assistant" else ("tool_result",)
    texts, results, thinking, calls = [], [], [], []
    for i, block in enumerate(blocks):
        at, kind = f"{where}content[{i}].", block.get("type")
        if kind == "tool_result" and kind in own:
            results += [{"role": "user", "content": shown(texts, at)}] if texts else []
            texts = []
            results.append({"role": "tool", "tool_call_id": get(block, "tool_use_id", str, ..., at), "content": shown(block.get("content"), f"{at}content")})
        elif kind == "tool_use" and kind in own:
            calls.append((get(block, "id", str, ..., at), get(block, "name", str, ..., at), get(block, "input", dict, {}, at)))
        elif kind == "thinking" and kind in own:
            thinking.append(get(block, "thinking", str, "", at))
        elif kind != "redacted_thinking" or kind not in own:
            texts.append(block)
    if role == "assistant":
        return [assistant(text_of(texts, f"{where}content"), "\n".join(thinking) or None, calls)]
    return results + ([{"role": "user", "content": shown(texts, f"{where}content")}] if texts or not results else [])


def read_responses(body: dict) -> Chat:
    """OpenAI /v1/responses: the stateless subset that the OpenAI Agents SDK uses by default."""
    hints, verbosity = hints_of(body, RESPONSES_FIELDS), get(body, "text", dict, {}).get("verbosity")
    hints |= {"verbosity": verbosity} if verbosity is not None else {}
    kind = get(get(body, "text", dict, {}), "format", dict, {}, "text.").get("type", "text")
    if kind != "text":
        raise Refused(400, f"text.format {kind!r:.100} cannot be honoured: nothing is sampled under a grammar. Leave it out.", "text.format")
    for wish in get(body, "include", list, []):
        if wish != "reasoning.encrypted_content":          # asked for by default where nothing is stored; reasoning comes as text
            raise Refused(400, f"include {wish!r:.100} cannot be honoured. Leave it out.", "include")
    instructions = get(body, "instructions", str, "")
    items = [{"role": "user", "content": body["input"]}] if isinstance(body.get("input"), str) else records(body, "input", MAX_MESSAGES)
    tools, call_tools = tools_of(body)
    return Chat(get(body, "model", str, ...), [{"role": "system", "content": instructions}] * bool(instructions) + responses_messages(items), tools, call_tools,
                count(body, "max_output_tokens"), [], get(body, "stream", bool, False), True, hints, get(body, "metadata", dict, {}))


def responses_messages(items: list[dict]) -> list[dict]:
    """Input items as messages of a template: reasoning, text and calls of one answer, in this order, are one message."""
    messages, reasoning, text, calls = [], None, None, []

    def end() -> None:
        nonlocal reasoning, text, calls
        if reasoning is not None or text is not None or calls:
            messages.append(assistant(text or "", reasoning, calls))
        reasoning, text, calls = None, None, []

    for i, item in enumerate(items):
        at, kind = f"input[{i}].", item.get("type", "message")
        if kind == "reasoning":
            end()
            reasoning = "\n".join(get(part, "text", str, "", at) for part in records(item, "content", MAX_MESSAGES, []))
        elif kind == "function_call":
            calls.append((get(item, "call_id", str, ..., at), get(item, "name", str, ..., at), get(item, "arguments", str, "", at)))
        elif kind == "message" and item.get("role") == "assistant":
            if text is not None or calls:
                end()
            text = text_of(item.get("content"), f"{at}content")
        elif kind == "function_call_output":
            end()
            messages.append({"role": "tool", "tool_call_id": get(item, "call_id", str, ..., at), "content": shown(item.get("output"), f"{at}output")})
        elif kind == "message" and item.get("role") in ("system", "developer", "user"):
            end()
            messages.append(chat_message(item, at))
        else:
            raise Refused(400, f"{at}type {kind!r:.100} (role {item.get('role')!r:.100}) cannot be honoured: want messages, function calls, "
                               "their outputs or reasoning.", f"{at}type")
    end()
    return messages


# ---------------------------------------------------------------------------------------------------- sessions and segments
canonical = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode


def name_of(part: Any, before: bytes = b"") -> bytes:
    """16 bytes that stand for `part`, and for what came before it."""
    return hashlib.blake2b(before + canonical(part).encode(), digest_size=16).digest()


def as_javascript(value: Any) -> Any:
    """Parsed JSON whose numbers are as a JavaScript client sends them back: 1.0 has become 1."""
    if isinstance(value, list):
        return [as_javascript(v) for v in value]
    if isinstance(value, dict):
        return {k: as_javascript(v) for k, v in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def name_after(before: bytes, message: dict) -> bytes:
    """Name of a conversation with one message more. Reasoning is no part of it: wires and clients often leave it out."""
    return name_of({k: as_javascript(v) for k, v in message.items() if k != "reasoning_content"}, before)


@dataclass(frozen=True)
class Conversation:
    """A request as a session compares it: `names[n]` names the tools and the first n messages, reasoning aside; all escaped, an image the name of its file."""

    messages: list[dict]
    tools: list[dict] | None
    names: list[bytes]


class Session:
    """One rollout's requests -> its segments. It lives in one event loop; nothing is committed before its generation has succeeded.

    The same request again (a client's retry, whether or not the first is still running) gets the same answer, sampled once:
    whoever wants another sample of the same messages gives it other `metadata`.
    """

    def __init__(self, server: "ChatServer", generate: Callable, budget: Budget, temperature: float, rollout: int, group: int):
        self.server, self.generate, self.budget, self.temperature, self.rollout, self.group = server, generate, budget, temperature, rollout, group
        self.id, self.key = secrets.token_hex(8), f"sk-{secrets.token_urlsafe(32)}"
        self.base_url, self.session_url = f"{server.url}/s/{self.id}/v1", f"{server.url}/s/{self.id}"
        self.answers: dict[bytes, asyncio.Task] = {}       # of each request so far, by its name
        self.segments: list[tuple[int, Trajectory]] = []   # with the turn that began it
        self.marks: dict[bytes, list[Mark]] = {}           # by the name of the conversation up to there
        self.files: dict[str, bytes] = {}                  # of the images seen so far, by their names
        self.escaped: dict[bytes, Any] = {}                # messages and tools seen so far, ready for the template
        self.overflowed: list[Trajectory | None] = []      # segment that had no room for another answer; None: a new prompt that had none
        self.turns, self.closed = 0, False

    def ready(self, part: Any) -> Any:
        """`part` with its control tokens marked as text; old parts are not gone through again, nor kept twice."""
        name = name_of(part)
        if name not in self.escaped:
            self.escaped[name] = escape(part, self.server.reserved)
        return self.escaped[name]

    def conversation(self, chat: Chat) -> Conversation:
        names, messages = [name_of(chat.tools)], [self.filed(m) for m in chat.messages]
        for m in messages:
            names.append(name_after(names[-1], m))
        return Conversation([self.ready(m) for m in messages], self.ready(chat.tools) or None, names)

    def filed(self, message: dict) -> dict:
        """The message with its images' files put aside, under names made of their content, which stand in their place."""
        if isinstance(message["content"], str):
            return message
        if self.server.vision is None:
            raise Refused(400, f"An image cannot be honoured: {self.server.model} reads text only. Leave it out, or train a vision-language model.", "messages")
        parts = []
        for part in message["content"]:
            if part["type"] == "image":
                name = hashlib.blake2b(part["image"], digest_size=16).hexdigest()
                self.files[name], part = part["image"], part | {"image": name}
            parts.append(part)
        return message | {"content": parts}

    def mark(self, talk: Conversation) -> Mark | None:
        """The last mark that the conversation passes. Reasoning that came back must be the sampled one; absent, it is no edit."""
        for mark in (mark for name in reversed(talk.names[1:]) for mark in reversed(self.marks.get(name, []))):
            if all(m.get("reasoning_content") in (None, stored.get("reasoning_content")) for m, stored in zip(talk.messages, mark.messages)):
                return mark
        return None

    def prompt(self, talk: Conversation) -> tuple[list[int], list[Image], list[dict], str, Mark | None]:
        """(ids of the prompt, the images they show, its messages as rendered, their text, the mark it goes on from)."""
        mark = self.mark(talk)
        messages = mark.messages + talk.messages[len(mark.messages):] if mark else talk.messages
        text = self.server.render(messages, talk.tools, header=True)
        if mark:
            length, name = mark.seen
            shorter = text[:length] if name_of(text[:length]) == name else self.server.render(mark.messages, talk.tools, header=False)
            if text.startswith(shorter):
                new = unsampled(self.server.tokenizer, self.server.closing + text[len(shorter):], mark.last)
                old, new, later = Trajectory(self.rollout, self.group), *self.ids(new, messages[len(mark.messages):])
                old.extend(mark.segment.token_ids[: mark.length], images=[image for image in mark.segment.images if image.start < mark.length])
                old.extend(new, images=later)
                return old.token_ids.tolist(), old.images, messages, text, mark
        return *self.ids(text, messages), messages, text, None

    def ids(self, text: str, messages: list[dict]) -> tuple[list[int], list[Image]]:
        """Rendered text of these messages as ids, and the images that they show."""
        ids, names = tokenize(self.server.tokenizer, text), [part["image"] for m in messages if isinstance(m["content"], list) for part in m["content"] if part["type"] == "image"]
        try:
            return self.server.vision.expand(ids, [self.files[name] for name in names]) if names else (ids, [])
        except ValueError as error:                        # an image of a shape that the model does not take
            raise Refused(400, f"These images cannot be shown to the model: {error}", "messages") from error

    async def answer(self, chat: Chat) -> Answer:
        """The answer to a request. Raises Refused: too many at once, the template's refusal, a failed generation, a closed session."""
        if self.closed:                                    # while its body was read
            raise Refused(404, "This session was closed before the answer was sampled: its rollout is over.")
        self.server.note_hints(chat, self.temperature)
        talk = self.conversation(chat)
        name = name_of([[m.get("reasoning_content") for m in chat.messages], chat.max_tokens, chat.stop, chat.call_tools, chat.metadata], talk.names[-1])
        task = self.answers.get(name)
        if task is None or task.done() and (task.cancelled() or task.exception()):       # a failed one may be tried again
            if sum(not t.done() for t in self.answers.values()) >= MAX_IN_FLIGHT:
                raise Refused(429, f"This session waits for {MAX_IN_FLIGHT} answers already. Ask again when one has come.")
            task = self.answers[name] = asyncio.create_task(self.sample(chat, talk))
        try:
            return await asyncio.shield(task)              # a client that hangs up takes no answer from others, and finds its own when it comes back
        except asyncio.CancelledError:
            if self.closed:
                raise Refused(404, "This session was closed while the answer was sampled: its rollout is over.") from None
            raise

    async def sample(self, chat: Chat, talk: Conversation) -> Answer:
        ids, images, messages, text, mark = self.prompt(talk)
        room = self.budget.context - len(ids)
        if room <= 0:
            self.overflowed.append(mark.segment if mark else None)
            return Answer("", "length", len(ids), 0)
        limit = min(x for x in (room, chat.max_tokens, self.budget.max_new_tokens) if x)
        turn, self.turns = self.turns, self.turns + 1
        try:
            completion = await self.generate(np.asarray(ids, np.int32), max_tokens=limit, stop=chat.stop, turn=turn, images=images)
            sampled = Trajectory(self.rollout, self.group)
            sampled.extend(completion.token_ids, completion.logprobs, completion.policy_versions)
            sampled.routed_experts = completion.routed_experts     # of the prompt too
        except Exception as error:
            raise Refused(500, f"The generation failed: {type(error).__name__}: {error}") from error
        whole = answer_text(self.server.tokenizer, completion)
        answer = self.server.read(chat, whole, completion, len(ids))
        said = assistant(answer.text, answer.reasoning, [(c.id, c.name, c.arguments) for c in answer.calls])
        name, messages, seen = name_after(talk.names[-1], said), messages + [self.ready(said)], text + self.ready(whole) + self.server.closing
        if len(sampled):                                   # nothing that could fail comes after the commit
            segment = self.commit(turn, ids, images, sampled, mark)
            segment.truncated = completion.finish_reason == "length"
            self.marks.setdefault(name, []).append(Mark(segment, len(segment), messages, sampled.token_ids[-1:].tolist(), (len(seen), name_of(seen))))
        return answer

    def commit(self, turn: int, ids: list[int], images: list[Image], sampled: Trajectory, mark: Mark | None) -> Trajectory:
        """Append an answer to the segment it extends, or to a new one if there is none or it has grown since; returns the segment."""
        if mark and len(mark.segment) == mark.length:
            segment = mark.segment
            segment.extend(ids[mark.length:])
            segment.images = images
        else:
            segment = Trajectory(self.rollout, self.group)
            segment.extend(ids, images=images)
            self.segments.append((turn, segment))
        segment.extend(sampled.token_ids, sampled.behaviour_logprobs, sampled.policy_versions, sampled.routed_experts)
        return segment

    def close(self) -> list[Trajectory]:
        """End the session: what is in flight is cancelled. Returns its segments in order of their first request, at least one."""
        self.closed = True
        for task in self.answers.values():
            task.cancel()
        segments = [segment for _, segment in sorted(self.segments, key=lambda s: s[0])] or [Trajectory(self.rollout, self.group)]
        for segment in self.overflowed:
            (segment or segments[-1]).truncated = True
        return segments


# ---------------------------------------------------------------------------------------------------- writing answers
def pieces(text: str) -> list[str]:
    return [text[i : i + PIECE] for i in range(0, len(text), PIECE)]


def sse(*events: Any, named: bool = True) -> str:
    """Events of the SDK's own types as server-sent events."""
    return "".join((f"event: {e.type}\n" if named else "") + f"data: {e.model_dump_json(exclude_unset=True)}\n\n" for e in events)


def chat_usage(answer: Answer) -> openai_types.CompletionUsage:
    asked, given = answer.prompt_tokens, answer.sampled_tokens
    return openai_types.CompletionUsage(prompt_tokens=asked, completion_tokens=given, total_tokens=asked + given)


def write_chat(chat: Chat, answer: Answer) -> openai_chat.ChatCompletion:
    calls = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in answer.calls]
    message = {"role": "assistant", "content": answer.text if answer.text or not calls else None, "refusal": None}
    message |= {"tool_calls": calls} if calls else {}
    message |= {"reasoning_content": answer.reasoning} if answer.reasoning else {}
    choice = chat_completion.Choice(index=0, finish_reason=answer.finish, logprobs=None, message=openai_chat.ChatCompletionMessage(**message))
    return openai_chat.ChatCompletion(
        id=f"chatcmpl-{answer.id}", object="chat.completion", created=answer.created, model=chat.model, choices=[choice], usage=chat_usage(answer))


def stream_chat(chat: Chat, answer: Answer) -> str:
    """Role, reasoning, text, calls (first id and name, then arguments), finish_reason, usage if asked for, [DONE]."""
    deltas = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning_content": piece} for piece in pieces(answer.reasoning or "")] + [{"content": piece} for piece in pieces(answer.text)]
    for i, c in enumerate(answer.calls):
        deltas.append({"tool_calls": [{"index": i, "id": c.id, "type": "function", "function": {"name": c.name, "arguments": ""}}]})
        deltas += [{"tool_calls": [{"index": i, "function": {"arguments": piece}}]} for piece in pieces(c.arguments)]
    ends = [None] * len(deltas) + [answer.finish]
    choices = [[chat_completion_chunk.Choice(index=0, delta=delta, finish_reason=end, logprobs=None)] for delta, end in zip(deltas + [{}], ends)]
    chunk = functools.partial(
        openai_chat.ChatCompletionChunk, id=f"chatcmpl-{answer.id}", object="chat.completion.chunk", created=answer.created, model=chat.model)
    chunks = [chunk(choices=c) for c in choices] + ([chunk(choices=[], usage=chat_usage(answer))] if chat.include_usage else [])
    return sse(*chunks, named=False) + "data: [DONE]\n\n"


STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def blocks(answer: Answer) -> list:
    found = [ThinkingBlock(type="thinking", thinking=answer.reasoning, signature="")] if answer.reasoning else []
    found += [TextBlock(type="text", text=answer.text)] if answer.text or not answer.calls else []
    return found + [ToolUseBlock(type="tool_use", id=c.id, name=c.name, input=json.loads(c.arguments)) for c in answer.calls]


def write_message(chat: Chat, answer: Answer) -> Message:
    stopped = answer.stop_string if answer.finish == "stop" else None
    return Message(
        id=f"msg_{answer.id}", type="message", role="assistant", model=chat.model, content=blocks(answer), stop_sequence=stopped,
        stop_reason="stop_sequence" if stopped else STOP_REASONS[answer.finish],
        usage=AnthropicUsage(input_tokens=answer.prompt_tokens, output_tokens=answer.sampled_tokens))


def stream_message(chat: Chat, answer: Answer) -> str:
    """message_start, each block's start, deltas and stop, message_delta with the stop reason and usage, message_stop."""
    whole = write_message(chat, answer)
    usage = AnthropicUsage(input_tokens=answer.prompt_tokens, output_tokens=0)
    start = whole.model_copy(update={"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage})
    events: list = [RawMessageStartEvent(type="message_start", message=start)]
    for i, block in enumerate(whole.content):
        if block.type == "text":
            empty, deltas = {"text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces(block.text)]
        elif block.type == "thinking":
            empty = {"thinking": ""}
            deltas = [{"type": "thinking_delta", "thinking": piece} for piece in pieces(block.thinking)] + [{"type": "signature_delta", "signature": ""}]
        else:
            empty, deltas = {"input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces(json.dumps(block.input))]
        events.append(RawContentBlockStartEvent(type="content_block_start", index=i, content_block=block.model_copy(update=empty)))
        events += [RawContentBlockDeltaEvent(type="content_block_delta", index=i, delta=delta) for delta in deltas]
        events.append(RawContentBlockStopEvent(type="content_block_stop", index=i))
    delta = {"stop_reason": whole.stop_reason, "stop_sequence": whole.stop_sequence}
    events.append(RawMessageDeltaEvent(type="message_delta", delta=delta, usage={"output_tokens": answer.sampled_tokens}))
    return sse(*events, RawMessageStopEvent(type="message_stop"))


def output_items(answer: Answer, done: str) -> list:
    items = []
    if answer.reasoning:
        content = [response_reasoning_item.Content(type="reasoning_text", text=answer.reasoning)]
        items.append(openai_responses.ResponseReasoningItem(type="reasoning", id=f"rs_{answer.id}", summary=[], content=content, status=done))
    if answer.text or not answer.calls:
        text = openai_responses.ResponseOutputText(type="output_text", text=answer.text, annotations=[], logprobs=[])
        items.append(openai_responses.ResponseOutputMessage(type="message", id=f"msg_{answer.id}", role="assistant", content=[text], status=done))
    for i, c in enumerate(answer.calls):
        items.append(openai_responses.ResponseFunctionToolCall(
            type="function_call", id=f"fc_{answer.id}{i}", call_id=c.id, name=c.name, arguments=c.arguments, status="completed"))
    return items


def write_response(chat: Chat, answer: Answer) -> openai_responses.Response:
    cut = answer.finish == "length"
    tools = [{"type": "function", "strict": False, "parameters": {}} | tool["function"] for tool in chat.tools]
    usage = response_usage.ResponseUsage(
        input_tokens=answer.prompt_tokens, output_tokens=answer.sampled_tokens, total_tokens=answer.prompt_tokens + answer.sampled_tokens,
        input_tokens_details={"cached_tokens": 0, "cache_write_tokens": 0}, output_tokens_details={"reasoning_tokens": 0})
    return openai_responses.Response(
        id=f"resp_{answer.id}", object="response", created_at=answer.created, model=chat.model, error=None, instructions=None, metadata={},
        status="incomplete" if cut else "completed", incomplete_details={"reason": "max_output_tokens"} if cut else None,
        output=output_items(answer, "incomplete" if cut else "completed"), parallel_tool_calls=True,
        tool_choice="auto" if chat.call_tools else "none", tools=tools, usage=usage)


def item_events(item: Any, index: int) -> Iterator[tuple[type, dict]]:
    """Events of one output item, between its added and done: (type, fields)."""
    at = {"item_id": item.id, "output_index": index}
    if item.type == "function_call":
        for piece in pieces(item.arguments):
            yield openai_responses.ResponseFunctionCallArgumentsDeltaEvent, at | {"type": "response.function_call_arguments.delta", "delta": piece}
        done = {"type": "response.function_call_arguments.done", "arguments": item.arguments, "name": item.name}
        yield openai_responses.ResponseFunctionCallArgumentsDoneEvent, at | done
        return
    at |= {"content_index": 0}
    part, kind = item.content[0], "reasoning_text" if item.type == "reasoning" else "output_text"
    delta, done = (openai_responses.ResponseReasoningTextDeltaEvent, openai_responses.ResponseReasoningTextDoneEvent) if item.type == "reasoning" else (
        openai_responses.ResponseTextDeltaEvent, openai_responses.ResponseTextDoneEvent)
    extra = {} if item.type == "reasoning" else {"logprobs": []}
    yield openai_responses.ResponseContentPartAddedEvent, at | {"type": "response.content_part.added", "part": part.model_copy(update={"text": ""})}
    for piece in pieces(part.text):
        yield delta, at | extra | {"type": f"response.{kind}.delta", "delta": piece}
    yield done, at | extra | {"type": f"response.{kind}.done", "text": part.text}
    yield openai_responses.ResponseContentPartDoneEvent, at | {"type": "response.content_part.done", "part": part}


def stream_response(chat: Chat, answer: Answer) -> str:
    """created, in_progress, each output item's added, parts and done, then completed (incomplete where it was cut), numbered."""
    whole = write_response(chat, answer)
    start = whole.model_copy(update={"status": "in_progress", "output": [], "usage": None, "incomplete_details": None})
    events = [(openai_responses.ResponseCreatedEvent, {"type": "response.created", "response": start}),
              (openai_responses.ResponseInProgressEvent, {"type": "response.in_progress", "response": start})]
    for i, item in enumerate(whole.output):
        empty = item.model_copy(update={"status": "in_progress"} | ({"arguments": ""} if item.type == "function_call" else {"content": []}))
        events.append((openai_responses.ResponseOutputItemAddedEvent, {"type": "response.output_item.added", "output_index": i, "item": empty}))
        events += item_events(item, i)
        events.append((openai_responses.ResponseOutputItemDoneEvent, {"type": "response.output_item.done", "output_index": i, "item": item}))
    last = openai_responses.ResponseIncompleteEvent if whole.status == "incomplete" else openai_responses.ResponseCompletedEvent
    events.append((last, {"type": f"response.{whole.status}", "response": whole}))
    return sse(*[kind(sequence_number=n, **fields) for n, (kind, fields) in enumerate(events)])


def openai_error(refused: Refused) -> dict:
    kind = Refused.TYPES[refused.code]
    error = openai_types.shared.ErrorObject(message=refused.message, type=kind, param=refused.param, code="invalid_api_key" if refused.code == 401 else None)
    return {"error": error.model_dump()}


def anthropic_error(refused: Refused) -> dict:
    return {"type": "error", "error": {"type": Refused.TYPES[refused.code], "message": refused.message}}


@dataclass(frozen=True)
class Wire:
    """How one API writes: its request -> Chat, Answer -> its object or its events, and its error object."""

    read: Callable[[dict], Chat]
    write: Callable[[Chat, Answer], Any]
    stream: Callable[[Chat, Answer], str]
    error: Callable[[Refused], dict]


CHAT = Wire(read_chat, write_chat, stream_chat, openai_error)
RESPONSES = Wire(read_responses, write_response, stream_response, openai_error)
MESSAGES = Wire(read_messages, write_message, stream_message, anthropic_error)


# ---------------------------------------------------------------------------------------------------- the server
def check_parsers(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Raises ValueError when vLLM has no parser of that name."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for flag, name, known in (("--tool-parser", tool_parser, ToolParserManager), ("--reasoning-parser", reasoning_parser, ReasoningParserManager)):
        if name is not None and name not in known.list_registered():
            raise ValueError(f"{flag} {name}: vLLM has no such parser. It has {', '.join(known.list_registered())}.")


def load_parser(tokenizer, tool_parser: str | None, reasoning_parser: str | None):
    """vLLM's parser of an answer's text, made anew for each answer by calling it with the tools; None where both flags are off.

    Raises ValueError when the tokenizer lacks what a parser needs.
    """
    if tool_parser is None and reasoning_parser is None:
        return None
    check_parsers(tool_parser, reasoning_parser)
    from vllm.parser.parser_manager import ParserManager
    from vllm.tokenizers.hf import get_cached_tokenizer

    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)      # a policy writes broken calls every day; each would print a stack
    make = functools.partial(ParserManager.get_parser(tool_parser, reasoning_parser, enable_auto_tools=True), get_cached_tokenizer(tokenizer))
    try:
        make([])
    except Exception as error:
        raise ValueError(f"--tool-parser {tool_parser}, --reasoning-parser {reasoning_parser}: not for this model's tokenizer ({error}).") from error
    return make


async def read_json(request: Request) -> dict:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY:
                raise Refused(413, f"The request has more than {MAX_BODY} bytes. Send less.")
        value = json.loads(body, parse_constant=strict)
    except ClientDisconnect:
        raise Refused(400, "The client hung up before its request was whole.") from None
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"The body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refused(400, f"The body is a JSON {type(value).__name__}; want an object.")
    return value


class ChatServer:
    """Serves the sessions of one worker on a loopback port, in the event loop that starts it.

    Raises ValueError for a tokenizer without a chat template, or one that the parsers cannot read.
    """

    def __init__(self, tokenizer, model: str, tool_parser: str | None = None, reasoning_parser: str | None = None, vision: Vision | None = None):
        if tokenizer.chat_template is None:
            raise ValueError(f"{model} has no chat template, so a ChatAgent cannot talk to it. Choose a chat model, or write the agent as an Env.")
        self.tokenizer, self.model, self.vision, self.reserved = tokenizer, model, vision, reserved(tokenizer)
        self.tool_parser, self.parser = tool_parser, load_parser(tokenizer, tool_parser, reasoning_parser)
        stand_in = self.render([{"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER}], None, header=False)
        if stand_in.count(ANSWER) != 1:
            raise ValueError("The chat template does not write an assistant message's content exactly once, so turns cannot be joined to it.")
        self.closing = stand_in.split(ANSWER)[1]           # markup after an answer
        self.url = "http://127.0.0.1"                      # with its port once it has started
        self.sessions: dict[str, Session] = {}
        self.noted, self.notes = set(), []                 # what was said once; what nobody has shown yet
        self.running: asyncio.Task | None = None
        routes = [("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSES), ("/v1/messages", MESSAGES)]
        self.app = Starlette(
            routes=[Route(f"/s/{{session}}{path}", functools.partial(self.serve, wire), methods=["POST"]) for path, wire in routes] + [
                Route("/s/{session}/v1/messages/count_tokens", self.count_tokens, methods=["POST"]), Route("/s/{session}/v1/models", self.models)],
            exception_handlers={HTTPException: self.lost})

    # ------------------------------------------------------------ life
    async def start(self) -> None:
        """Listen, once. Nothing outside this machine can reach it."""
        if self.running is None:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)   # named, or asyncio leaves Nagle on: 40 ms a request
            listener.bind(("127.0.0.1", 0))
            listener.listen(2048)                          # from here on clients can connect, if only to wait for the task below
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            self.listening = uvicorn.Server(uvicorn.Config(
                self.app, log_level="error", access_log=False, lifespan="off", timeout_keep_alive=600, timeout_graceful_shutdown=1))
            self.running = asyncio.create_task(self.listening.serve(sockets=[listener]))

    async def stop(self) -> None:
        self.listening.should_exit, running, self.running = True, self.running, None
        await running

    def open(self, generate: Callable, budget: Budget, temperature: float, rollout: int = 0, group: int = 0) -> Session:
        session = Session(self, generate, budget, temperature, rollout, group)
        self.sessions[session.id] = session
        return session

    def close(self, session: Session) -> list[Trajectory]:
        """Its segments; from here on its key opens nothing."""
        del self.sessions[session.id]
        return session.close()

    # ------------------------------------------------------------ what sessions ask
    def note(self, key: str, text: str) -> None:
        """Say something once in the server's life."""
        if key not in self.noted:
            self.noted.add(key)
            self.notes.append(text)

    def note_hints(self, chat: Chat, temperature: float) -> None:
        agreed = {"temperature": temperature, "top_p": 1, "parallel_tool_calls": True, "thinking": {"type": "disabled"}}
        for name, value in chat.hints.items():
            if name not in agreed or value != agreed[name]:
                self.note(name, f"a chat client asked for {name}={value!r:.100}; it is ignored: the run samples at temperature {temperature} and top_p 1")
        if chat.tools and "tools" not in str(self.tokenizer.chat_template):
            self.note("template", f"a chat client offers tools, but the chat template of {self.model} does not show them to the model")
        if chat.call_tools and self.tool_parser is None:
            self.note("parser", "a chat client offers tools, but without --tool-parser calls stay in the answer's text")

    def render(self, messages: list[dict], tools: list[dict] | None, header: bool) -> str:
        messages = [self.vision.message(m) for m in messages] if self.vision else messages
        try:
            return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=header)
        except Exception as error:
            raise Refused(400, f"The model's chat template refuses these messages: {type(error).__name__}: {error}") from error

    def read(self, chat: Chat, text: str, completion, prompt_tokens: int) -> Answer:
        """A completion and its text as an answer: reasoning and calls taken out by vLLM's parsers."""
        reasoning, content, calls = self.parse(chat, text, completion.token_ids)
        finish = "length" if completion.finish_reason == "length" else "tool_calls" if calls else "stop"
        stop_string = completion.stop_reason if isinstance(completion.stop_reason, str) else None
        return Answer(content, finish, prompt_tokens, len(completion.token_ids), reasoning, calls, stop_string)

    def parse(self, chat: Chat, text: str, token_ids) -> tuple[str | None, str, tuple[Call, ...]]:
        """(reasoning, text, calls). What a parser cannot read, and calls whose arguments are no JSON object, stay text."""
        if self.parser is None:
            return None, text, ()
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(messages=[], tools=chat.tools or None, tool_choice="auto" if chat.call_tools else "none")
        try:
            reasoning, content, calls = self.parser(request.tools).parse(text, request, enable_auto_tools=True, model_output_token_ids=[int(t) for t in token_ids])
        except Exception as error:
            self.note("unreadable", f"vLLM's parser failed on an answer ({type(error).__name__}: {error}); it stays text")
            return None, text, ()
        calls = tuple(Call(c.id or f"call_{secrets.token_hex(12)}", c.name, c.arguments or "{}") for c in calls or ())
        try:                                               # half a split emoji, a thousand brackets: JSON that cannot be carried
            said = assistant("", None, [(c.id, c.name, c.arguments) for c in calls])
            name_after(b"", said), escape(said, self.reserved)
        except (UnicodeEncodeError, RecursionError):
            return None, text, ()
        if not all(isinstance(parsed(c.arguments), dict) for c in calls):
            return None, text, ()
        return reasoning or None, content or "", calls

    # ------------------------------------------------------------ requests
    def session(self, request: Request) -> Session:
        """The session of a request. Raises Refused: 404 for one that is unknown or over, 401 for a wrong key."""
        session = self.sessions.get(request.path_params["session"])
        if session is None:
            raise Refused(404, "There is no such session: its rollout is over, or never was.")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = request.headers.get("x-api-key") or (token if scheme.lower() == "bearer" else "")
        if not hmac.compare_digest(given.encode(), session.key.encode()):
            raise Refused(401, "Wrong API key for this session. Give the client ctx.api_key.")
        return session

    async def serve(self, wire: Wire, request: Request) -> Response:
        try:
            session = self.session(request)
            chat = wire.read(await read_json(request))
            answer = await session.answer(chat)
        except (Refused, RecursionError, UnicodeEncodeError) as error:
            return failed(wire.error, error)
        if chat.stream:
            return Response(wire.stream(chat, answer), media_type="text/event-stream")
        return Response(wire.write(chat, answer).model_dump_json(exclude_unset=True), media_type="application/json")

    async def count_tokens(self, request: Request) -> Response:
        try:
            session = self.session(request)
            ids, *_ = session.prompt(session.conversation(read_count(await read_json(request))))
        except (Refused, RecursionError, UnicodeEncodeError) as error:
            return failed(anthropic_error, error)
        return Response(MessageTokensCount(input_tokens=len(ids)).model_dump_json(), media_type="application/json")

    async def models(self, request: Request) -> Response:
        try:
            self.session(request)
        except Refused as error:
            return failed(openai_error, error)
        model = openai_types.Model(id=self.model, object="model", created=0, owned_by="nanomolt")
        return Response(json.dumps({"object": "list", "data": [model.model_dump(exclude_unset=True)]}), media_type="application/json")

    async def lost(self, request: Request, error: HTTPException) -> Response:
        """A path or method that no wire has."""
        refused = Refused(404, f"{request.method} {request.url.path} is not served. There are POST /v1/chat/completions, /v1/responses, /v1/messages, "
                               "/v1/messages/count_tokens and GET /v1/models, each behind a session's URL.")
        return failed(anthropic_error if "/messages" in request.url.path else openai_error, refused)


def failed(write: Callable[[Refused], dict], error: Exception) -> Response:
    if not isinstance(error, Refused):
        error = Refused(400, "The request is nested too deeply." if isinstance(error, RecursionError) else f"The request holds text that is no Unicode: {error}")
    return Response(json.dumps(write(error)), status_code=error.code, media_type="application/json")
