"""Tests of chat_server.py: three wires in, segments out, against a scripted engine; real SDKs over a socket; one real engine.

Tokens are those of toy.json (see test_agent.py). Most tests call the ASGI app in process, without a network.
"""

import asyncio
import functools
import json
import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import chat_server
from agent import Budget, render_delta
from chat_server import ChatServer, Refused, read_chat, read_messages, read_responses

from test_agent import CASES, FEEDBACK, HELLO, TEMPLATE, TOKENIZER, TOY, Answer, answer, ids_and_mask, told, toy_segment, toy_tokenizer

TOOLS = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "look", "arguments": {"city": "Paris"}}</tool_call>'
few = settings(max_examples=60, deadline=None, derandomize=True, database=None)


# ---------------------------------------------------------------------------------------------------- helpers
class Engine:
    """Gives scripted answers in order of the calls (raises those that are exceptions), each when `gate` lets it."""

    def __init__(self, *answers):
        self.answers, self.prompts, self.asked, self.gate = list(answers), [], [], None

    async def __call__(self, token_ids, max_tokens, stop, turn, images=()):
        self.prompts.append(token_ids.tolist())
        self.asked.append({"max_tokens": max_tokens, "stop": stop, "turn": turn})
        if self.gate is not None:
            await self.gate.wait()
        reply = self.answers[len(self.prompts) - 1] if self.gate is None else self.answers[turn]
        if isinstance(reply, BaseException):
            raise reply
        return reply


async def call(app, method: str, path: str, body=None, key: str = "", headers: dict | None = None):
    """One HTTP request to an ASGI app -> (code, text, json or None)."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else b""
    sent, chunks = [{"type": "http.request", "body": raw, "more_body": False}], []
    lines = {"authorization": f"Bearer {key}", "content-type": "application/json"} | (headers or {})
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
             "root_path": "", "scheme": "http", "headers": [(k.encode(), v.encode("latin-1")) for k, v in lines.items()], "server": ("127.0.0.1", 1), "client": ("127.0.0.1", 2)}

    async def receive():
        return sent.pop(0) if sent else await asyncio.Event().wait()

    async def send(event):
        chunks.append(event)
    await app(scope, receive, send)
    text = b"".join(c.get("body", b"") for c in chunks[1:]).decode()
    kind = dict(chunks[0]["headers"])[b"content-type"]
    return SimpleNamespace(code=chunks[0]["status"], text=text, json=json.loads(text) if kind == b"application/json" else None)


class Table:
    """One session of a scripted engine."""

    def __init__(self, *answers, tokenizer=TOKENIZER, context=1000, max_new_tokens=None, temperature=1.0, **parsers):
        self.engine, self.server = Engine(*answers), ChatServer(tokenizer, "toy", **parsers)
        self.session = self.server.open(self.engine, Budget(context, max_new_tokens), temperature, rollout=7, group=3)

    async def post(self, path: str, body, key: str | None = None):
        return await call(self.server.app, "POST", f"/s/{self.session.id}/v1/{path}", body, self.session.key if key is None else key)

    async def say(self, wire: str, messages: list, **fields):
        """One request -> (text, the messages with the answer as its SDK would send it back)."""
        path, body, echo = WIRES[wire]
        reply = await self.post(path, body(messages) | fields)
        assert reply.code == 200, reply.text
        return reply.json, messages + echo(reply.json)

    def close(self) -> list:
        return [ids_and_mask(s) for s in self.server.close(self.session)]


WIRES = {                              # path, messages -> body, reply -> what goes into the next request
    "chat": ("chat/completions", lambda m: {"model": "m", "messages": m}, lambda r: [r["choices"][0]["message"]]),
    "messages": ("messages", lambda m: {"model": "m", "max_tokens": 900, "messages": [x for x in m if x["role"] != "system"]} | (
        {"system": m[0]["content"]} if m[0]["role"] == "system" else {}), lambda r: [{"role": "assistant", "content": r["content"]}]),
    "responses": ("responses", lambda m: {"model": "m", "input": m}, lambda r: r["output"]),
}
wires = pytest.mark.parametrize("wire", WIRES)


def user(text="hello") -> dict:
    return {"role": "user", "content": text}


def tool_result(wire: str, text: str, call_id: str = "c1") -> dict:
    return {"chat": {"role": "tool", "tool_call_id": call_id, "content": text},
            "messages": {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": [{"type": "text", "text": text}]}]},
            "responses": {"type": "function_call_output", "call_id": call_id, "output": text}}[wire]


def words(text: str, end: tuple = (1,), **kwargs) -> Answer:
    return answer(*TOKENIZER.encode(text, add_special_tokens=False), *end, **kwargs)


def scenario(test):
    return functools.wraps(test)(lambda *args, **kwargs: asyncio.run(test(*args, **kwargs)))


def text_of(reply: dict) -> str:
    if "choices" in reply:
        return reply["choices"][0]["message"]["content"]
    if "output" in reply:
        return "".join(part["text"] for item in reply["output"] if item["type"] == "message" for part in item["content"])
    return "".join(block["text"] for block in reply["content"] if block["type"] == "text")


# ---------------------------------------------------------------------------------------------------- the cases
async def play(case: str, wire: str) -> tuple[Table, list]:
    """A case of toy.json through a wire."""
    turns = TOY["cases"][case]["turns"]
    table, messages, replies = Table(*[answer(*t["sampled"], finish=t.get("finish_reason", "stop")) for t in turns]), [], []
    for turn in turns:
        messages += [tool_result(wire, text) if role == "tool" else {"role": role, "content": text} for role, text in turn["messages_added"]]
        reply, messages = await table.say(wire, messages)
        replies.append(reply)
    return table, replies


@wires
@pytest.mark.parametrize("case", ["drift", "think_user", "think_tool", "truncated", "emoji", "special_text"])
@scenario
async def test_b01_to_b06_the_segments_hold_the_sampled_ids_and_prompts_are_their_prefixes(case, wire):
    """toy.json: sampled ids are never encoded again (b01), a rewritten history starts a segment (b02), separator and header (b03), an
    inserted end has mask 0 (b04), control text is text (b05); and each prompt that the engine saw is a prefix of one segment."""
    table, _ = await play(case, wire)
    segments = table.close()
    expect = TOY["cases"][case]["expect"]
    count = len(expect.get("either", [expect])[0]["segments"])
    assert segments == [toy_segment(case, i) for i in range(count)]
    assert all(any(ids[: len(p)] == p for ids, _ in segments) for p in table.engine.prompts)


@scenario
async def test_b03_a_later_prompt_is_the_earlier_ids_and_the_feedback():
    table, _ = await play("drift", "chat")
    assert table.engine.prompts == [HELLO, HELLO + [6, 7, 1] + FEEDBACK]


@wires
@pytest.mark.parametrize("sampled, closing", [(answer(6, 7, 1), []), (answer(6, 7, finish="length"), [1]), (answer(6, 7, 11, stop="plan"), [1])])
@scenario
async def test_b04_what_ended_an_answer_is_trained_and_what_was_missing_is_not(sampled, closing, wire):
    """[6,7,1], [6,7] cut and [6,7,11] ended by the stop string "plan": all of them mask 1, text "hello"; the inserted end has mask 0."""
    table = Table(sampled, answer(8, 1))
    reply, messages = await table.say(wire, [user()])
    assert text_of(reply) == "hello"
    await table.say(wire, messages + [user()])
    n = len(sampled.token_ids)
    assert table.close() == [(HELLO + sampled.token_ids + closing + FEEDBACK + [8, 1], [0] * 9 + [1] * n + [0] * (len(closing) + 10) + [1, 1])]


@scenario
async def test_n20_experts_of_a_segment_are_the_first_told_of_each_position_and_a_new_segment_has_its_own():
    """9 + 3, feedback 10, 2 sampled; then turn 2 asked anew with the first answer edited: a segment of 24 tokens told of once."""
    answers = answer(6, 7, 1), answer(8, 1), answer(8, 1)
    for turn, (reply, tokens) in enumerate(zip(answers, (12, 24, 24))):
        reply.routed_experts = told(turn, tokens)
    table = Table(*answers)
    _, messages = await table.say("chat", [user()])
    await table.say("chat", messages + [user()])
    await table.say("chat", [user(), {"role": "assistant", "content": "hellollo"}, user()])
    first, second = (s.routed_experts[:, 0].tolist() for s in table.server.close(table.session))
    assert first == [[p, int(p > 10)] for p in range(23)] and second == [[p, 2] for p in range(23)]


@scenario
async def test_b05_a_template_that_writes_bos_gives_exactly_one():
    table = Table(answer(8, 1), answer(8, 1), tokenizer=toy_tokenizer("{{ bos_token }}" + TEMPLATE))
    _, messages = await table.say("chat", [user()])
    await table.say("chat", messages + [user()])
    assert table.close()[0][0] == [16, *HELLO, 8, 1, *FEEDBACK, 8, 1]


@wires
@scenario
async def test_b06_a_character_of_two_tokens_arrives_whole_streamed_or_not(wire):
    """[12,13,1] is one emoji; in a stream no delta holds half of it (U+FFFD)."""
    table = Table(answer(12, 13, 1))
    path, body, _ = WIRES[wire]
    reply, _ = await table.say(wire, [user()])
    assert text_of(reply) == TOY["cases"]["emoji"]["expect"]["text"]
    streamed = (await table.post(path, body([user()]) | {"stream": True})).text
    assert "\ufffd" not in streamed and ("😀" in streamed or "\\ud83d\\ude00" in streamed)


@wires
@pytest.mark.parametrize("count, room", [(24, 0), (25, -1), (22, 2)])
@scenario
async def test_b07_a_prompt_without_room_is_an_answer_cut_at_nothing(count, room, wire):
    """Limit 32, n words make 8 + n ids. At 32 and 33 nothing is asked, the answer is empty and "length", the rollout truncated; at 30 max_tokens is 2."""
    table = Table(answer(8, 1), context=32)
    reply, _ = await table.say(wire, [user("hello" * count)])
    assert [a["max_tokens"] for a in table.engine.asked] == ([2] if room > 0 else [])
    ended = {"chat": lambda: reply["choices"][0]["finish_reason"], "messages": lambda: reply["stop_reason"],
             "responses": lambda: (reply["status"], (reply["incomplete_details"] or {}).get("reason"))}[wire]()
    assert ended == ({"chat": "stop", "messages": "end_turn", "responses": ("completed", None)} if room > 0 else
                     {"chat": "length", "messages": "max_tokens", "responses": ("incomplete", "max_output_tokens")})[wire]
    segments = table.server.close(table.session)
    assert [(len(s), s.truncated) for s in segments] == [(32, False) if room > 0 else (0, True)]


@scenario
async def test_b07_a_tool_result_that_fills_the_context_loses_no_earlier_turn():
    """9 + 3 ids used, the result and header need 10: in 22 nothing can follow. One segment, its answer kept, marked; in 23 one token can."""
    for context in (22, 23):
        table = Table(answer(6, 7, 1), answer(8, finish="length"), context=context)
        _, messages = await table.say("chat", [user()])
        reply, _ = await table.say("chat", messages + [tool_result("chat", "hello")])
        assert reply["choices"][0]["finish_reason"] == "length" and reply["usage"]["completion_tokens"] == context - 22
        [segment] = table.server.close(table.session)
        more = ([2, 0, 5, 2, 8, 1, 2, 0, 4, 2, 8], [0] * 10 + [1]) if context == 23 else ([], [])
        assert ids_and_mask(segment) == (HELLO + [6, 7, 1] + more[0], [0] * 9 + [1] * 3 + more[1]) and segment.truncated


@scenario
async def test_b07_the_shortest_answers():
    """[1] alone trains one token; an answer of no token at all trains none and leaves no segment, only the empty one of an empty rollout."""
    table = Table(answer(1))
    reply, _ = await table.say("chat", [user()])
    assert text_of(reply) == "" and table.close() == [(HELLO + [1], [0] * 9 + [1])]
    table = Table(answer())
    await table.say("chat", [user()])
    assert table.close() == [([], [])]


@pytest.mark.parametrize("wire_value, value", [
    ('{"city": "Paris"}', {"city": "Paris"}), (None, {}), ("", {}), ('{"city": ', '{"city": '), ("[1]", "[1]"), ('{"a": NaN}', '{"a": NaN}')])
def test_b08_arguments_are_decoded_once_for_the_template(wire_value, value):
    """The wire carries a string, templates want a mapping; null and "" are {}, broken JSON stays text."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": wire_value}}
    chat = read_chat({"model": "m", "messages": [user(), {"role": "assistant", "content": None, "tool_calls": [call]}]})
    assert chat.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call | {"function": {"name": "look", "arguments": value}}]}
    item = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": wire_value}
    assert read_responses({"model": "m", "input": [user(), item]}).messages == chat.messages


def test_b09_an_anthropic_request_becomes_the_messages_of_a_template():
    """toy.json, anthropic_request: system first, text in order, results with their ids."""
    case = TOY["anthropic_request"]
    assert read_messages(case["request"]).messages == case["expect_messages"]
    assert read_messages(case["request"] | {"system": "Be brief."}).messages == case["expect_messages"]
    assert chat_server.STOP_REASONS == case["stop_reason"]


@wires
@scenario
async def test_b10_a_failed_generation_leaves_nothing_and_its_retry_is_one_turn(wire):
    """(a) of the case: 500 in the SDK's error object, then the same messages again: one turn, and the next extends it."""
    table = Table(answer(6, 7, 1), OSError("engine"), answer(8, 1))
    _, messages = await table.say(wire, [user()])
    path, body, _ = WIRES[wire]
    failed = await table.post(path, body(messages + [user()]))
    assert failed.code == 500 and "OSError: engine" in failed.json["error"]["message"] and failed.json["error"]["type"] == "api_error"
    await table.say(wire, messages + [user()])
    assert table.close() == [toy_segment("drift")]


@wires
@scenario
async def test_b10_the_same_request_again_gets_the_same_answer_and_is_sampled_once(wire):
    """(b): the answer was lost on its way, the client resends, streamed or not, before and after the conversation went on."""
    table = Table(answer(6, 7, 1), answer(8, 1))
    path, body, _ = WIRES[wire]
    first, messages = await table.say(wire, [user()])
    assert (await table.say(wire, [user()]))[0] == first
    await table.say(wire, messages + [user()])
    assert (await table.say(wire, [user()]))[0] == first
    assert (await table.post(path, body([user()]) | {"stream": True})).code == 200
    assert len(table.engine.prompts) == 2 and table.close() == [toy_segment("drift")]


@scenario
async def test_b10_a_resend_while_the_first_still_runs_shares_its_generation():
    """(c): one generation, both callers answered alike; so does a client that hangs up and comes back."""
    table = Table(answer(6, 7, 1))
    table.engine.gate = asyncio.Event()
    calls = [asyncio.ensure_future(table.say("chat", [user()])) for _ in range(3)]
    await asyncio.sleep(0.01)
    calls[0].cancel()                                      # this one hangs up
    await asyncio.sleep(0)
    table.engine.gate.set()
    (a, _), (b, _) = await asyncio.gather(*calls[1:])
    assert a == b and len(table.engine.prompts) == 1 and table.close() == [(HELLO + [6, 7, 1], [0] * 9 + [1] * 3)]


@scenario
async def test_a_client_that_hangs_up_alone_loses_no_token():
    """Nobody waits any more: the answer is still committed, and there when the client comes back."""
    table = Table(answer(6, 7, 1))
    table.engine.gate = asyncio.Event()
    gone = asyncio.ensure_future(table.say("chat", [user()]))
    await asyncio.sleep(0.01)
    gone.cancel()
    table.engine.gate.set()
    await asyncio.sleep(0.01)
    reply, _ = await table.say("chat", [user()])
    assert text_of(reply) == "hello" and len(table.engine.prompts) == 1 and table.close()[0][1] == [0] * 9 + [1] * 3


@wires
@scenario
async def test_b11_interleaved_conversations_are_two_segments(wire):
    """A1, B1 (other system prompt), A2, B2: A1+A2 and B1+B2, in order of their first request."""
    table = Table(answer(6, 7, 1), answer(8, 11, 1), answer(8, 1), answer(11, 1))
    a, b = [user()], [{"role": "system", "content": "plan"}, user()]
    _, a = await table.say(wire, a)
    _, b = await table.say(wire, b)
    await table.say(wire, a + [user()])
    await table.say(wire, b + [user()])
    head = [0, 14, 2, 11, 1, 2] + HELLO
    assert table.close() == [toy_segment("drift"), (head + [8, 11, 1] + FEEDBACK + [11, 1], [0] * 15 + [1] * 3 + [0] * 10 + [1, 1])]


@scenario
async def test_b11_requests_at_once_never_mix():
    """Two continuations of one answer at once, the second ends first: it extends the segment, and the other has its own,
    in which the first answer is observed. Each sampled token is trained once."""
    table = Table(answer(6, 7, 1), answer(8, 1), answer(11, 1))
    _, messages = await table.say("chat", [user()])
    gates = [asyncio.Event(), asyncio.Event()]
    plain = table.engine.__call__

    async def gated(token_ids, max_tokens, stop, turn, images=()):
        await gates[turn - 1].wait()
        return await plain(token_ids, max_tokens=max_tokens, stop=stop, turn=turn)

    table.session.generate = gated
    table.engine.answers = [None, answer(11, 1), answer(8, 1)]               # in order of arrival at the engine
    both = [asyncio.ensure_future(table.say("chat", messages + [user(text)])) for text in ("hello", "plan")]
    await asyncio.sleep(0.01)
    gates[1].set()
    await both[1]
    gates[0].set()
    await both[0]
    plan = [2, 0, 3, 2, 11, 1, 2, 0, 4, 2]
    assert table.close() == [(HELLO + [6, 7, 1] + plan + [11, 1], [0] * 9 + [1] * 3 + [0] * 10 + [1, 1]),
                             (HELLO + [6, 7, 1] + FEEDBACK + [8, 1], [0] * 22 + [1, 1])]


@scenario
async def test_b11_more_than_one_choice_is_refused_by_name():
    table = Table(answer(8, 1))
    reply = await table.post("chat/completions", {"model": "m", "messages": [user()], "n": 2})
    assert reply.code == 400 and reply.json["error"]["param"] == "n" and not table.engine.prompts


@pytest.fixture(scope="module")
def hermes() -> ChatServer:
    """A server with vLLM's parser of calls in <tool_call> tags."""
    return ChatServer(TOKENIZER, "toy", tool_parser="hermes")


def seated(server: ChatServer, *answers, context=1000) -> Table:
    table = Table.__new__(Table)
    table.engine, table.server = Engine(*answers), server
    table.session = server.open(table.engine, Budget(context), 1.0)
    return table


def tools_for(wire: str) -> list:
    f = TOOLS[0]["function"]
    return {"chat": TOOLS, "messages": [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}], "responses": [f | {"type": "function", "strict": True}]}[wire]


@wires
@scenario
async def test_b12_a_streamed_tool_call_is_captured_whole(wire, hermes):
    """Every id of the answer is trained, however the text is cut for the wire; the last events are those the SDK waits for."""
    table = seated(hermes, words("hello" + CALL))
    path, body, _ = WIRES[wire]
    reply = await table.post(path, body([user()]) | {"stream": True, "tools": tools_for(wire)})
    lines = reply.text.strip().split("\n\n")
    events = [json.loads(line.split("data: ")[1]) for line in lines if not line.endswith("[DONE]")]
    if wire == "chat":
        assert lines[-1] == "data: [DONE]" and [e["choices"][0]["finish_reason"] for e in events] == [None] * (len(events) - 1) + ["tool_calls"]
        arguments = "".join(c["function"]["arguments"] for e in events for c in e["choices"][0]["delta"].get("tool_calls", []))
    elif wire == "messages":
        assert [e["type"] for e in events] == [
            "message_start", "content_block_start", "content_block_delta", "content_block_stop", "content_block_start", "content_block_delta", "content_block_stop",
            "message_delta", "message_stop"] and events[-2]["delta"]["stop_reason"] == "tool_use"
        arguments = "".join(e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta")
    else:
        assert [e["sequence_number"] for e in events] == list(range(len(events))) and events[-1]["type"] == "response.completed"
        arguments = "".join(e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta")
    assert json.loads(arguments) == {"city": "Paris"}
    [(ids, mask)] = table.close()
    n = len(table.engine.answers[0].token_ids)
    assert mask == [0] * (len(ids) - n) + [1] * n and ids[-n:] == table.engine.answers[0].token_ids


@wires
@scenario
async def test_b21_images_are_refused_and_nothing_is_sampled(wire):
    """Policies here read text; an image that was dropped in silence would be trained as if it had been seen."""
    part = {"chat": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
            "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
            "responses": {"type": "input_image", "image_url": "data:image/png;base64,AA=="}}[wire]
    table = Table(answer(8, 1))
    path, body, _ = WIRES[wire]
    text = {"type": "input_text" if wire == "responses" else "text", "text": "hello"}
    reply = await table.post(path, body([user([text, part])]))
    assert reply.code == 400 and "image" in reply.json["error"]["message"] and not table.engine.prompts


# ---------------------------------------------------------------------------------------------------- segments
@wires
@scenario
async def test_a_tool_call_and_its_result_stay_in_one_segment(wire, hermes):
    """The call comes back as its SDK sends it, then the result: the prompt is the ids so far, then the result's markup, nothing rendered again."""
    said = words("hello" + CALL)
    table = seated(hermes, said, answer(8, 1))
    reply, messages = await table.say(wire, [user()], tools=tools_for(wire))
    call_id = {"chat": lambda: messages[-1]["tool_calls"][0]["id"], "messages": lambda: messages[-1]["content"][1]["id"], "responses": lambda: messages[-1]["call_id"]}[wire]()
    await table.say(wire, messages + [tool_result(wire, "hello", call_id)], tools=tools_for(wire))
    first, second = table.engine.prompts
    assert second == first + said.token_ids + [2, 0, 5, 2, 8, 1, 2, 0, 4, 2]
    assert table.close() == [(second + [8, 1], [0] * len(first) + [1] * len(said.token_ids) + [0] * 10 + [1, 1])]


@scenario
async def test_b04_length_wins_over_a_call_and_broken_calls_stay_text(hermes):
    """A whole call in an answer that was cut is told as "length"; half a call, and arguments that are no object, are text."""
    for said, finish, calls in ((words(CALL, (), finish="length"), "length", 1), (words(CALL[:30], (), finish="length"), "length", 0),
                                (words(CALL.replace('{"city": "Paris"}', "[1]")), "stop", 0), (words(CALL.replace('"Paris"', "NaN")), "stop", 0)):
        reply, _ = await seated(hermes, said).say("chat", [user()], tools=TOOLS)
        assert (reply["choices"][0]["finish_reason"], len(reply["choices"][0]["message"].get("tool_calls", []))) == (finish, calls)
        assert calls or text_of(reply) == TOKENIZER.decode(said.token_ids[:-1] if finish == "stop" else said.token_ids)


@pytest.mark.parametrize("argument", ['"\\ud83d"', "[" * 900 + "]" * 900])
@wires
@scenario
async def test_a_call_that_no_wire_can_carry_stays_text_and_its_turn_is_one(wire, argument, hermes):
    """Half of a split emoji's escape, 900 brackets: the policy's mistake is an answer like any other, and the same request again is a retry."""
    table = seated(hermes, words(CALL.replace('"Paris"', argument)), answer(8, 1))
    reply, _ = await table.say(wire, [user()], tools=tools_for(wire))
    assert "<tool_call>" in text_of(reply)
    assert (await table.say(wire, [user()], tools=tools_for(wire)))[0] == reply
    assert len(table.engine.prompts) == 1 and len(table.close()) == 1


@wires
@scenario
async def test_numbers_come_back_as_a_javascript_client_writes_them(wire, hermes):
    """1.0 has become 1, 1e2 100: the same arguments as parsed JSON, so the same segment."""
    said = words(CALL.replace('"Paris"', "[1.0, 1e2, -0.0, 1.5]"))
    table = seated(hermes, said, answer(8, 1))
    reply, messages = await table.say(wire, [user()], tools=tools_for(wire))
    back = json.loads(re.sub(r"\[1\.0, (1e2|100\.0), -0\.0, 1\.5\]", "[1, 100, 0, 1.5]", json.dumps(messages[-1])))
    call_id = {"chat": lambda: back["tool_calls"][0]["id"], "messages": lambda: back["content"][0]["id"], "responses": lambda: back["call_id"]}[wire]()
    await table.say(wire, messages[:-1] + [back, tool_result(wire, "hello", call_id)], tools=tools_for(wire))
    assert json.dumps(back) != json.dumps(messages[-1]) and len(table.close()) == 1


@scenario
async def test_a_stop_token_that_opens_the_next_turn_is_not_written_twice():
    """As in GLM's template: no markup closes a turn, the next one's first token ends it, and the policy samples that token. Env and ChatAgent agree."""
    template = "{% for m in messages %}<|im_end|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    tokenizer = toy_tokenizer(template)
    table = Table(answer(8, 1), answer(8, 1), tokenizer=tokenizer)
    _, messages = await table.say("chat", [user()])
    await table.say("chat", messages + [user()])
    first, second = table.engine.prompts
    assert second == first + [8, 1] + render_delta(tokenizer, "hello", [8, 1]) == first + [8, 1, 8, 0]


@pytest.mark.parametrize("echoed", [0, 1])
@scenario
async def test_two_answers_of_one_text_keep_their_own_reasoning(echoed):
    """Best of 2: both are told "hello", one after "plan", one after "he". Either goes on behind its own ids when it comes back."""
    table = Table(answer(9, 11, 10, 8, 1), answer(9, 6, 10, 8, 1), answer(8, 1), reasoning_parser="deepseek_r1")
    replies = [(await table.say("chat", [user()], metadata={"n": n}))[0]["choices"][0]["message"] for n in "ab"]
    assert [r["content"] for r in replies] == ["hello", "hello"] and replies[0]["reasoning_content"] != replies[1]["reasoning_content"]
    await table.say("chat", [user(), replies[echoed], {"role": "tool", "content": "hello"}])
    assert table.engine.prompts[2][:14] == HELLO + [[9, 11, 10, 8, 1], [9, 6, 10, 8, 1]][echoed] and len(table.close()) == 2


@pytest.mark.parametrize("fields, called", [({}, False), ({"tools": TOOLS}, True), ({"tools": TOOLS, "tool_choice": "auto"}, True), ({"tools": TOOLS, "tool_choice": "none"}, False)])
@scenario
async def test_calls_are_taken_out_only_where_the_client_allows_them(hermes, fields, called):
    """tool_choice "none", and a request without tools: whatever the policy writes is text."""
    reply, _ = await seated(hermes, words(CALL)).say("chat", [user()], **fields)
    assert ("tool_calls" in reply["choices"][0]["message"]) == called and (called or text_of(reply) == CALL)


@pytest.mark.parametrize("echo, segments", [
    ({"content": "hello", "reasoning_content": "plan"}, 1), ({"content": "hello"}, 1), ({"content": [{"type": "text", "text": "hello"}], "reasoning": "plan"}, 1),
    ({"content": "hello", "reasoning_content": "he"}, 2), ({"content": "plan"}, 2), ({"content": "hello\n"}, 2), ({"content": None}, 2)])
@scenario
async def test_absent_reasoning_is_no_edit_and_another_text_is(echo, segments):
    """[9,11,10,8,1] is told as reasoning "plan", text "hello". What comes back equal in what a wire carries goes on from the sampled ids."""
    table = Table(answer(9, 11, 10, 8, 1), answer(8, 1), reasoning_parser="deepseek_r1")
    reply, _ = await table.say("chat", [user()])
    assert (text_of(reply), reply["choices"][0]["message"]["reasoning_content"]) == ("hello", "plan")
    await table.say("chat", [user(), {"role": "assistant"} | echo, {"role": "tool", "content": "hello"}])
    rows = table.close()
    assert len(rows) == segments and rows[0][0][:14] == HELLO + [9, 11, 10, 8, 1]
    assert sum(sum(mask) for _, mask in rows) == 7


@pytest.mark.parametrize("newer, segments", [({"role": "tool", "content": "hello"}, 1), ({"role": "user", "content": "hello"}, 2)])
@scenario
async def test_reasoning_that_did_not_come_back_is_put_in_its_place_before_rendering(newer, segments):
    """A template that writes reasoning_content until the next user message, and a client that drops it: behind a tool result the
    render still starts with the sampled answer's; behind a user message the template itself has dropped it, as for a client that keeps it."""
    writes = TEMPLATE.replace("{% else %}{{ m.content }}", "{% else %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}")
    for kept in ({}, {"reasoning_content": "plan"}):
        table = Table(answer(9, 11, 10, 8, 1), answer(8, 1), tokenizer=toy_tokenizer(writes), reasoning_parser="deepseek_r1")
        await table.say("chat", [user()])
        await table.say("chat", [user(), {"role": "assistant", "content": "hello"} | kept, newer])
        assert len(table.close()) == segments
        assert table.engine.prompts[1][9:14] == ([9, 11, 10, 8, 1] if segments == 1 else [8, 1, 2, 0, 3])


@pytest.mark.parametrize("newer", [{"role": "tool", "content": "hello"}, {"role": "user", "content": "hello"}])
@scenario
async def test_a_template_that_writes_only_the_last_answer_with_an_empty_think_block_splits_nothing(newer):
    """As Qwen3's does: the render with the answer last does not start the longer one, what the engine saw and sampled does. A sampled
    block that the template drops later is another prompt, and a segment of its own (behind a user message)."""
    quirk = TEMPLATE.replace("{% else %}{{ m.content }}", "{% else %}{% if m.role == 'assistant' and loop.last and '</think>' not in m.content %}<think></think>{% endif %}{{ m.content }}")
    for sampled, segments in (([8, 1], 1), ([9, 10, 8, 1], 2 if newer["role"] == "user" else 1)):
        table = Table(answer(*sampled), answer(8, 1), tokenizer=toy_tokenizer(quirk))
        reply, messages = await table.say("chat", [user()])
        await table.say("chat", messages + [newer])
        rows = table.close()
        assert len(rows) == segments and rows[0][0][: 9 + len(sampled)] == HELLO + sampled
        assert sum(sum(mask) for _, mask in rows) == len(sampled) + 2


@wires
@scenario
async def test_other_metadata_asks_for_another_sample_of_the_same_messages(wire):
    """Best of 2 with equal requests: two answers, two segments with the prompt of each; without metadata they would be a retry."""
    table = Table(answer(6, 7, 1), answer(8, 1))
    replies = [(await table.say(wire, [user()], metadata={"user_id": name}))[0] for name in ("a", "b", "a")]
    assert [text_of(r) for r in replies] == ["hello", "hello", "hello"] and replies[0] == replies[2] != replies[1]
    assert [ids for ids, _ in table.close()] == [HELLO + [6, 7, 1], HELLO + [8, 1]]


@wires
@scenario
async def test_an_edited_answer_starts_a_segment_rendered_from_what_the_client_sent(wire):
    """The answer was [6,7,1] "hello"; the client sends "plan" instead: the old segment stays, the new one holds 11 with mask 0."""
    table = Table(answer(6, 7, 1), answer(8, 1))
    await table.say(wire, [user()])
    await table.say(wire, [user(), {"role": "assistant", "content": "plan"}, user()])
    assert table.close() == [(HELLO + [6, 7, 1], [0] * 9 + [1] * 3), (HELLO + [11, 1] + FEEDBACK + [8, 1], [0] * 21 + [1, 1])]


@scenario
async def test_a_fork_observes_what_was_trained_and_keeps_its_ids():
    """u, [6,7,1], then "hello" and later "plan" on the same answer: the second branch has [6,7] (not [8]) with mask 0; and it is
    extended in its turn, as is the first, and a fork of a fork."""
    table = Table(answer(6, 7, 1), answer(8, 1), answer(11, 1), answer(8, 8, 1), answer(11, 11, 1), answer(8, 1))
    _, stem = await table.say("chat", [user()])
    _, left = await table.say("chat", stem + [user()])
    _, right = await table.say("chat", stem + [user("plan")])
    await table.say("chat", right + [user()])
    await table.say("chat", left + [user()])
    await table.say("chat", stem + [user("he")])
    plan = [2, 0, 3, 2, 11, 1, 2, 0, 4, 2]
    assert table.close() == [
        (HELLO + [6, 7, 1] + FEEDBACK + [8, 1] + FEEDBACK + [11, 11, 1], [0] * 9 + [1] * 3 + [0] * 10 + [1] * 2 + [0] * 10 + [1] * 3),
        (HELLO + [6, 7, 1] + plan + [11, 1] + FEEDBACK + [8, 8, 1], [0] * 22 + [1] * 2 + [0] * 10 + [1] * 3),
        (HELLO + [6, 7, 1] + [2, 0, 3, 2, 6, 1, 2, 0, 4, 2] + [8, 1], [0] * 22 + [1] * 2)]


@wires
@scenario
async def test_changed_tools_and_compaction_start_segments_and_the_older_one_can_go_on(wire):
    """Without tools, with tools, without again: the third request finds the first segment."""
    table = Table(answer(6, 7, 1), answer(8, 1), answer(11, 1), answer(8, 11, 1))
    _, messages = await table.say(wire, [user()])
    await table.say(wire, messages + [user()], tools=tools_for(wire))
    _, longer = await table.say(wire, messages + [user()])
    await table.say(wire, [user("plan"), *longer[-1:], user()])             # compaction: the front was summed up
    rows = table.close()
    assert len(rows) == 3 and rows[0] == (HELLO + [6, 7, 1] + FEEDBACK + [11, 1], [0] * 9 + [1] * 3 + [0] * 10 + [1] * 2)
    assert [sum(mask) for _, mask in rows] == [5, 2, 3]


@scenario
async def test_after_an_overflow_a_shorter_request_goes_on_from_the_last_answer():
    """Context 30: 12 ids, then 19 more do not fit ("length", nothing sampled, not remembered as said), then 10 do: one segment, seen as truncated."""
    table = Table(answer(6, 7, 1), answer(8, 1), context=30)
    _, messages = await table.say("chat", [user()])
    reply, _ = await table.say("chat", messages + [user("hello" * 10)])
    assert (text_of(reply), reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]) == ("", "length", 0)
    await table.say("chat", messages + [user()])
    [segment] = table.server.close(table.session)
    assert ids_and_mask(segment)[0] == HELLO + [6, 7, 1] + FEEDBACK + [8, 1] and segment.truncated


@scenario
async def test_truncation_of_the_last_answer_of_each_segment_is_seen():
    """Cut, then whole: not truncated, as for an Env. Whole, then cut: truncated."""
    table = Table(answer(6, 7, finish="length"), answer(8, 1), answer(11, 1), answer(8, finish="length"))
    for first in ("hello", "plan"):
        _, messages = await table.say("chat", [user(first)])
        await table.say("chat", messages + [user()])
    assert [s.truncated for s in table.server.close(table.session)] == [False, True]


@scenario
async def test_logprobs_versions_rollout_and_group_are_the_engines_and_the_sessions():
    table = Table(answer(6, 7, 1, version=3), answer(8, 1, version=4))
    _, messages = await table.say("chat", [user()])
    await table.say("chat", messages + [user()])
    [s] = table.server.close(table.session)
    assert s.policy_versions.tolist() == [-1] * 9 + [3] * 3 + [-1] * 10 + [4, 4]
    assert s.behaviour_logprobs.tolist() == [0] * 9 + [-0.5, -1, -1.5] + [0] * 10 + [-0.5, -1] and (s.rollout, s.group) == (7, 3)


@scenario
async def test_a_completion_without_its_logprobs_is_an_error_and_leaves_the_segment_as_it_was():
    table = Table(answer(6, 7, 1), Answer([8, 1], [-0.1, None], [0, 0]))
    _, messages = await table.say("chat", [user()])
    reply = await table.post("chat/completions", {"model": "m", "messages": messages + [user()]})
    assert reply.code == 500 and "logprob" in reply.json["error"]["message"] and table.close() == [(HELLO + [6, 7, 1], [0] * 9 + [1] * 3)]


@scenario
async def test_limits_and_stop_strings_reach_the_engine():
    """The smallest of room (1000 - 9), the client's limit and the run's (50) applies; turns count the requests that are sampled."""
    table = Table(*[answer(8, 1)] * 5, max_new_tokens=50)
    for i, fields in enumerate(({}, {"max_tokens": 7}, {"max_completion_tokens": 9, "max_tokens": 8}, {"max_tokens": 99}, {"stop": ["a", "b"]})):
        await table.say("chat", [user(f"{i}")], **fields)
    assert [a["max_tokens"] for a in table.engine.asked] == [50, 7, 8, 50, 50] and [a["turn"] for a in table.engine.asked] == [0, 1, 2, 3, 4]
    assert [a["stop"] for a in table.engine.asked] == [[]] * 4 + [["a", "b"]]


@scenario
async def test_count_tokens_is_the_prompt_that_would_be_sent_and_samples_nothing():
    table = Table(answer(6, 7, 1), answer(8, 1))
    _, messages = await table.say("messages", [user()])
    asked = {"model": "m", "messages": messages + [user()]}
    counted = await table.post("messages/count_tokens", asked)
    assert len(table.engine.prompts) == 1
    reply, _ = await table.say("messages", messages + [user()])
    assert counted.json == {"input_tokens": reply["usage"]["input_tokens"]} == {"input_tokens": 22}


# ---------------------------------------------------------------------------------------------------- fields
@pytest.mark.parametrize("wire, field, value", [
    ("chat", "n", 2), ("chat", "logit_bias", {"8": 5}), ("chat", "presence_penalty", 0.1), ("chat", "frequency_penalty", -1), ("chat", "logprobs", True), ("chat", "seed", 1),
    ("chat", "response_format", {"type": "json_object"}), ("chat", "tool_choice", "required"), ("chat", "tool_choice", {"type": "function", "function": {"name": "look"}}),
    ("chat", "functions", []), ("chat", "best_of", 2), ("chat", "temperature", "hot"), ("chat", "max_tokens", 0), ("chat", "max_tokens", True), ("chat", "stop", [""]), ("chat", "stop", 3),
    ("chat", "messages", "hello"), ("chat", "messages", [3]), ("chat", "model", None), ("chat", "stream", "yes"), ("chat", "tools", [{"type": "custom", "custom": {"name": "x"}}]),
    ("messages", "top_k", 5), ("messages", "max_tokens", None), ("messages", "tool_choice", {"type": "any"}), ("messages", "tools", [{"type": "web_search_20250305", "name": "web_search"}]),
    ("messages", "mcp_servers", [{"type": "url"}]), ("messages", "output_config", {"format": {"type": "json_schema"}}), ("messages", "container", "c"),
    ("messages", "messages", [user(), {"role": "assistant", "content": "pre"}]),
    ("responses", "previous_response_id", "resp_1"), ("responses", "conversation", "c"), ("responses", "background", True), ("responses", "include", ["message.output_text.logprobs"]),
    ("responses", "truncation", "auto"), ("responses", "text", {"format": {"type": "json_schema"}}), ("responses", "tools", [{"type": "web_search"}]), ("responses", "input", None)])
@scenario
async def test_what_cannot_be_honoured_is_refused_by_name(wire, field, value):
    """400 in the SDK's error object, its message names the field; nothing is sampled."""
    table = Table(answer(8, 1))
    path, body, _ = WIRES[wire]
    reply = await table.post(path, body([user()]) | {field: value})
    error = reply.json["error"]
    assert reply.code == 400 and error["type"] == "invalid_request_error" and field.split("_")[0] in error["message"] and not table.engine.prompts
    assert ("type" in reply.json) == (wire == "messages")


@pytest.mark.parametrize("wire, fields", [
    ("chat", {"metadata": {"a": "b"}, "user": "u", "store": False, "stream_options": {"include_usage": True}, "parallel_tool_calls": True, "n": 1, "presence_penalty": 0.0, "top_p": 1.0,
              "temperature": 0.5, "logprobs": False, "response_format": {"type": "text"}, "tool_choice": "auto", "stop": None, "logit_bias": {}, "prompt_cache_key": "k"}),
    ("messages", {"metadata": {"user_id": "u"}, "thinking": {"type": "disabled"}, "temperature": 0.5, "stop_sequences": [], "service_tier": "auto",
                  "system": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]}),
    ("responses", {"metadata": {}, "store": False, "include": ["reasoning.encrypted_content"], "parallel_tool_calls": True, "text": {"format": {"type": "text"}}, "truncation": "disabled",
                   "instructions": "hello", "reasoning": None, "temperature": 0.5, "top_p": 1})])
@scenario
async def test_what_real_clients_always_send_is_accepted_without_a_word(wire, fields):
    """At the run's own temperature 0.5."""
    table = Table(answer(8, 1), temperature=0.5)
    assert text_of((await table.say(wire, [user()], **fields))[0]) == "hello" and table.server.notes == []


@scenario
async def test_a_temperature_that_is_not_the_runs_is_ignored_and_said_once():
    table = Table(answer(8, 1), answer(8, 1))
    await table.say("chat", [user("a")], temperature=0.2, top_p=0.9)
    await table.say("messages", [user("b")], temperature=0.3, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [note.split(" asked for ")[1].split(";")[0] for note in table.server.notes] == ["temperature=0.2", "top_p=0.9", "thinking={'type': 'enabled', 'budget_tokens': 1024}"]


@scenario
async def test_claude_codes_counting_header_splits_no_conversation():
    """Its first system block differs from request to request and is meant for the vendor, not the model."""
    table = Table(answer(6, 7, 1), answer(8, 1))
    system = lambda n: [{"type": "text", "text": f"x-anthropic-billing-header: cch={n}"}, {"type": "text", "text": "plan"}]
    _, messages = await table.say("messages", [user()], system=system(1))
    await table.say("messages", messages + [user()], system=system(2))
    assert len(table.close()) == 1 and table.engine.prompts[0][:6] == [0, 14, 2, 11, 1, 2]


@scenario
async def test_a_template_that_refuses_is_a_400_with_its_words():
    table = Table(answer(8, 1), tokenizer=toy_tokenizer("{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + TEMPLATE))
    reply = await table.post("chat/completions", {"model": "m", "messages": [{"role": "system", "content": "x"}, user()]})
    assert reply.code == 400 and "no system here" in reply.json["error"]["message"]


def test_a_model_or_parser_that_cannot_serve_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="chat template"):
        ChatServer(toy_tokenizer(None), "toy")
    with pytest.raises(ValueError, match="exactly once"):
        ChatServer(toy_tokenizer("{% for m in messages %}{{ m.role }}{% endfor %}"), "toy")
    with pytest.raises(ValueError, match="--tool-parser hermess.*hermes"):
        ChatServer(TOKENIZER, "toy", tool_parser="hermess")
    from generator import GeneratorConfig
    with pytest.raises(ValueError, match="--reasoning-parser qwen.*qwen3"):
        GeneratorConfig(reasoning_parser="qwen")


# ---------------------------------------------------------------------------------------------------- doors and limits
@wires
@pytest.mark.parametrize("key, code, kind", [("", 401, "authentication_error"), ("sk-wrong", 401, "authentication_error"), ("sk-\xff\u00e9", 401, "authentication_error")])
@scenario
async def test_a_wrong_key_opens_nothing(wire, key, code, kind):
    table = Table(answer(8, 1))
    path, body, _ = WIRES[wire]
    reply = await table.post(path, body([user()]), key=key)
    assert (reply.code, reply.json["error"]["type"]) == (code, kind) and not table.engine.prompts


@scenario
async def test_a_session_is_reached_by_its_own_key_only_and_dies_with_its_rollout():
    """The key of one session is 401 at another; unknown and closed ones are 404, in both error shapes; sessions share nothing."""
    table = Table(answer(6, 7, 1), answer(8, 1))
    other = table.server.open(table.engine, Budget(1000), 1.0)
    assert other.key != table.session.key and len(other.key) > 40
    assert (await table.post("chat/completions", {"model": "m", "messages": [user()]}, key=other.key)).code == 401
    assert (await call(table.server.app, "POST", f"/s/{other.id}/v1/messages", {}, "", {"x-api-key": table.session.key})).code == 401
    await table.say("chat", [user()])
    mine = await call(table.server.app, "POST", f"/s/{other.id}/v1/messages", WIRES["messages"][1]([user()]), "", {"x-api-key": other.key})
    assert mine.code == 200 and len(table.engine.prompts) == 2                # the same request in another session is another request
    table.close()
    assert [len(s.token_ids) for s in table.server.close(other)] == [11] and not table.server.sessions
    for path in ("chat/completions", "messages", "responses", "messages/count_tokens"):
        reply = await table.post(path, {})
        assert reply.code == 404 and reply.json["error"]["type"] == "not_found_error"
    assert (await call(table.server.app, "GET", f"/s/{table.session.id}/v1/models", None, table.session.key)).code == 404


@scenario
async def test_closing_cancels_what_is_in_flight_and_its_client_is_told():
    table = Table(answer(8, 1))
    table.engine.gate = asyncio.Event()
    waiting = asyncio.ensure_future(table.post("chat/completions", {"model": "m", "messages": [user()]}))
    await asyncio.sleep(0.01)
    assert table.close() == [([], [])]
    reply = await waiting
    assert reply.code == 404 and "closed" in reply.json["error"]["message"] and all(t.cancelled() for t in table.session.answers.values())
    with pytest.raises(Refused, match="closed"):           # its body was still being read when the session was closed
        await table.session.answer(read_chat({"model": "m", "messages": [user("late")]}))
    assert len(table.engine.prompts) == 1


@scenario
async def test_limits_have_clear_errors(monkeypatch):
    """Bytes (413), messages and tools (400), answers waited for at once (429)."""
    table = Table(*[answer(8, 1)] * 9)
    for name, value in (("MAX_BODY", 5000), ("MAX_MESSAGES", 10), ("MAX_TOOLS", 3), ("MAX_IN_FLIGHT", 2)):
        monkeypatch.setattr(chat_server, name, value)
    ask = lambda **fields: table.post("chat/completions", {"model": "m", "messages": [user()]} | fields)
    assert (await ask(user="x" * 5000)).code == 413
    assert (await ask(messages=[user()] * 11)).code == 400 and (await ask(tools=TOOLS * 4)).code == 400
    table.engine.gate = asyncio.Event()
    calls = [asyncio.ensure_future(ask(max_tokens=n)) for n in (1, 2, 3)]
    await asyncio.sleep(0.01)
    table.engine.gate.set()
    assert [r.code for r in await asyncio.gather(*calls)] == [200, 200, 429]


@pytest.mark.parametrize("body", [
    b"", b"{", b"[]", b"3", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b'{"a":' * 100_000, b'{"model": ' + b"9" * 5000 + b"}",
    b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "stop": "\\ud800"}'])
@scenario
async def test_a_body_that_is_no_json_object_of_unicode_text_is_a_400(body):
    table = Table(answer(8, 1))
    reply = await table.post("chat/completions", body)
    assert reply.code == 400 and reply.json["error"]["type"] == "invalid_request_error"


@scenario
async def test_other_paths_and_methods_are_told_what_there_is():
    table = Table()
    for method, path in (("POST", "/v1/chat/completions"), ("GET", f"/s/{table.session.id}/v1/messages"), ("POST", f"/s/{table.session.id}/v1/embeddings"), ("GET", "/docs"), ("GET", "/")):
        reply = await call(table.server.app, method, path, None, table.session.key)
        assert reply.code == 404 and "is not served" in reply.json["error"]["message"]


@scenario
async def test_the_port_is_on_the_loopback_only():
    server = ChatServer(TOKENIZER, "toy")
    await server.start()
    await asyncio.sleep(0.05)
    assert server.url.startswith("http://127.0.0.1:")
    assert [s.getsockname()[0] for listener in server.listening.servers for s in listener.sockets] == ["127.0.0.1"]
    await server.stop()


# ---------------------------------------------------------------------------------------------------- whatever clients do
class Dice:
    """An engine that answers by a seeded die, fails when told to, and writes down every prompt and what it sampled for it."""

    TEXTS = ["hello", "plan", "<think>plan</think>hello", CALL, "hello" + CALL, CALL[:25], "", "😀", "\n he", CALL + CALL]

    def __init__(self, seed: int):
        self.random, self.log, self.fail, self.late = random.Random(seed), [], False, 0

    async def __call__(self, token_ids, max_tokens, stop, turn, images=()):
        for _ in range(self.random.randrange(4)):          # answers end in any order
            await asyncio.sleep(0)
        if self.fail:
            self.fail = False
            raise OSError("engine")
        ids = TOKENIZER.encode(self.random.choice(self.TEXTS), add_special_tokens=False) + [1]
        if self.random.random() < 0.3:                     # he + llo, where the encoder would write hello
            ids = [6, 7] + ids
        finish = "stop" if len(ids) <= max_tokens else "length"
        ids, n = ids[:max_tokens], len(self.log) + 1
        self.log.append((token_ids.tolist(), ids, [-n - k / 1024 for k in range(len(ids))], [n] * len(ids)))
        return Answer(*self.log[-1][1:], finish)


def runs(trajectory) -> list[tuple]:
    """(ids before, sampled ids, logprobs, versions) of each unbroken sampled stretch; whatever is not sampled has logprob 0 and version -1."""
    mask, found = trajectory.response_mask.tolist(), []
    assert not trajectory.behaviour_logprobs[~trajectory.response_mask].any() and (trajectory.policy_versions[~trajectory.response_mask] == -1).all()
    edges = [i for i in range(1, len(mask) + 1) if i == len(mask) or mask[i] != mask[i - 1]]
    for start, end in zip(edges, edges[1:]):
        if mask[start]:
            found.append(tuple(x.tolist() for x in (trajectory.token_ids[:start], trajectory.token_ids[start:end], trajectory.behaviour_logprobs[start:end], trajectory.policy_versions[start:end])))
    return found


MOVES = ["say", "say", "say", "retry", "fork", "edit", "compact", "tool", "sub-agent", "fail", "at once", "change tools", "stream"]


class Client:
    """A conversation kept by its SDK's own habits on one wire."""

    def __init__(self, wire: str, messages: list, tools: bool):
        self.wire, self.messages, self.tools = wire, messages, tools

    def copy(self, messages: list) -> "Client":
        return Client(self.wire, messages, self.tools)

    async def ask(self, table: Table, **fields):
        path, body, echo = WIRES[self.wire]
        reply = await table.post(path, body(self.messages) | ({"tools": tools_for(self.wire)} if self.tools else {}) | fields)
        if reply.code == 200 and not fields:
            self.messages = self.messages + echo(reply.json)
        return reply


async def live(table: Table, dice: Dice, moves: list[tuple[str, int]]) -> None:
    """Play moves; each number chooses among whatever there is to choose from."""
    clients = [Client("chat", [user("0")], False)]
    for n, (move, number) in enumerate(moves, 1):
        client, text = clients[number % len(clients)], user(["hello", "plan", "<|im_end|>", "😀"][number % 4] + str(n))
        if move == "sub-agent":
            clients.append(Client(list(WIRES)[number % 3], [{"role": "system", "content": "plan"}, text], number % 2 == 0))
            client = clients[-1]
        elif move == "retry":
            messages, count = client.messages, len(dice.log)
            first = await client.ask(table)
            client.messages, sampled = messages, len(dice.log)
            again = await client.ask(table)
            assert again.json == first.json and len(dice.log) == sampled and sampled - count <= 1
            continue
        elif move == "fork":
            client = client.copy(client.messages[: 1 + number % len(client.messages)] + [text])
            clients.append(client)
        elif move == "edit":
            client.messages = client.messages + [{"role": "assistant", "content": "edited"}, text]
        elif move == "compact":
            client.messages = client.messages[:1] + [text]
        elif move == "tool":
            client.messages = client.messages + [tool_result(client.wire, "hello", str(number))]
        elif move == "change tools":
            client.tools = not client.tools
        else:
            client.messages = client.messages + [text]
        dice.fail = move == "fail"
        if move == "at once":
            others = [client.copy(client.messages + [user(f"{n}.{k}")]) for k in range(3)]
            await asyncio.gather(client.ask(table), client.copy(client.messages).ask(table), *[c.ask(table) for c in others])
            clients += others[:1]
        reply = await client.ask(table, **{"stream": True} if move == "stream" else {})
        assert reply.code in (200, 400, 500) and (reply.code != 500 or "OSError" in reply.text)
        if reply.code == 500:
            assert (await client.ask(table)).code == 200
        dice.fail = False


@pytest.mark.parametrize("context", [90, 100_000])
@pytest.mark.parametrize("parsers", [{}, {"tool_parser": "hermes", "reasoning_parser": "deepseek_r1"}], ids=["plain", "parsers"])
@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), moves=st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0, 59)), min_size=1, max_size=14))
def test_whatever_clients_do_every_sampled_token_is_trained_once_behind_the_prompt_it_was_sampled_for(served, context, parsers, seed, moves):
    """Oracle: the engine's own log. The sampled stretches of all segments, each with all ids before it, its logprobs and versions,
    are the engine's (prompt, ids, logprobs, versions), each once; in order of the first request."""
    dice = Dice(seed)
    table = Table.__new__(Table)
    table.server = served(**parsers)
    table.engine, table.session = dice, table.server.open(dice, Budget(context), 1.0)
    asyncio.run(live(table, dice, moves))
    segments = table.server.close(table.session)
    assert sorted(run for segment in segments for run in runs(segment)) == sorted(dice.log)
    assert not table.server.sessions


@pytest.fixture(scope="module")
def served():
    return functools.cache(lambda **parsers: ChatServer(TOKENIZER, "toy", **parsers))


NAMES = sorted({n for f in (chat_server.CHAT_FIELDS, chat_server.MESSAGES_FIELDS, chat_server.RESPONSES_FIELDS) for n in (*f.read, *f.harmless, *f.hints, *f.neutral)} | {
    "role", "content", "type", "text", "name", "id", "arguments", "function", "tool_calls", "tool_call_id", "tool_use_id", "call_id", "output", "thinking", "summary", "format",
    "input_schema", "parameters", "description", "reasoning_content", "seed", "", "x"})
ATOMS = st.none() | st.booleans() | st.integers(-3, 10**12) | st.floats(allow_nan=False) | st.sampled_from(
    ["user", "assistant", "system", "tool", "developer", "text", "tool_use", "tool_result", "function", "function_call", "function_call_output", "message", "reasoning", "thinking",
     "redacted_thinking", "image_url", "auto", "none", "{}", "{", "hello", "<|im_end|>", "\ue0000\ue001", "\ue002", "\ud800", "", "ephemeral"]) | st.text(max_size=5)
TEXTS = ["hello", "<|im_end|>", "\ue0000\ue001", "\ue002", "", "{", "{}", "a" * 300, "😀"]
JSON = st.recursive(ATOMS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5), max_leaves=12)
GOOD = {
    "chat/completions": {"model": "m", "messages": [{"role": "system", "content": "x"}, user(), {"role": "assistant", "content": "hello", "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]}, {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "a"}]}], "tools": TOOLS},
    "messages": CASES and TOY["anthropic_request"]["request"] | {"tools": tools_for("messages")},
    "responses": {"model": "m", "input": [user(), {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
                                          {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}, {"type": "function_call_output", "call_id": "c", "output": "hello"}], "tools": tools_for("responses")},
}
GOOD["messages/count_tokens"] = GOOD["messages"]


def places(value, at=()) -> list[tuple]:
    """Paths of everything inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at] + [place for key, part in inside for place in places(part, (*at, key))]


def planted(value, at: tuple, new):
    """A copy of `value` with `new` at a place."""
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = planted(value[at[0]], at[1:], new)
    return copy


def found(value, at: tuple):
    return found(value[at[0]], at[1:]) if at else value


@st.composite
def bodies(draw):
    """A good request with one to three things replaced or added; half of what is replaced stays of its kind. Or any JSON at all."""
    path = draw(st.sampled_from(list(GOOD)))
    if draw(st.integers(0, 9)) == 0:
        return path, draw(JSON)
    body = GOOD[path]
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from(places(body)[1:] or [()]))
        alike = [n for n in TEXTS if isinstance(found(body, at), str) and at[-1] not in ("role", "type")]
        body = planted(body, at, draw(st.sampled_from(alike) if alike and draw(st.booleans()) else JSON))
        if isinstance(body, dict) and draw(st.integers(0, 3)) == 0:
            body = body | {draw(st.sampled_from(NAMES)): draw(JSON)}
        if draw(st.booleans()):
            break
    return path, body


def fuzz(examples: int) -> None:
    server, codes = ChatServer(TOKENIZER, "toy", tool_parser="hermes", reasoning_parser="deepseek_r1"), {}

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(bodies(), min_size=10, max_size=10), st.integers(0, 10**6))
    def ten(requests, seed):
        async def send():
            session = server.open(dice, Budget(2000), 1.0)
            for path, body in requests:
                reply = await call(server.app, "POST", f"/s/{session.id}/v1/{path}", body, session.key)
                assert reply.code in (200, 400), (reply.code, reply.text)
                assert reply.code == 200 or reply.json["error"]["type"] == "invalid_request_error"
                codes[reply.code] = codes.get(reply.code, 0) + 1
            return server.close(session)

        dice = Dice(seed)
        assert sorted(run for segment in asyncio.run(send()) for run in runs(segment)) == sorted(dice.log)

    ten()
    assert not server.sessions and min(codes.get(200, 0), codes.get(400, 0)) >= examples // 2, codes   # at least a twentieth each: both ways are tried
    assert sum(codes.values()) >= 10 * examples


def test_no_request_body_crashes_a_wire():
    """1,000 requests on all wires: 200 or 400, never a 5xx, nothing left open, and what was sampled is trained once all the same."""
    fuzz(100)


@pytest.mark.long
def test_no_request_body_crashes_a_wire_10_000_times():
    fuzz(1000)


# ---------------------------------------------------------------------------------------------------- the SDKs themselves, over a socket
def openai_turn(client, session, messages, stream: bool, **fields):
    """-> (text, calls as (id, name, arguments), how it ended, tokens, what to send back)."""
    asked = {"model": "m", "messages": messages, "tools": TOOLS} | fields
    if stream:
        with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
            for _ in events:
                pass
            done = events.current_completion_snapshot      # get_final_completion raises for an answer that was cut
    else:
        done = client.chat.completions.create(**asked)
    m = done.choices[0].message
    calls = [(c.id, c.function.name, json.loads(c.function.arguments)) for c in m.tool_calls or ()]
    return m.content or "", calls, done.choices[0].finish_reason, (done.usage.prompt_tokens, done.usage.completion_tokens), [m]


def responses_turn(client, session, messages, stream: bool, **fields):
    asked = {"model": "m", "input": messages, "tools": tools_for("responses")} | fields
    if stream:
        with client.responses.stream(**asked) as events:
            for event in events:
                pass
            done = event.response                          # of response.completed or response.incomplete; get_final_response knows the first only
    else:
        done = client.responses.create(**asked)
    calls = [(i.call_id, i.name, json.loads(i.arguments)) for i in done.output if i.type == "function_call"]
    ended = {"completed": "tool_calls" if calls else "stop", "incomplete": "length"}[done.status]
    return done.output_text, calls, ended, (done.usage.input_tokens, done.usage.output_tokens), list(done.output)


def anthropic_turn(client, session, messages, stream: bool, **fields):
    asked = {"model": "m", "max_tokens": 900, "messages": messages, "tools": tools_for("messages")} | fields
    if stream:
        with client.messages.stream(**asked) as events:
            text = "".join(events.text_stream)
            done = events.get_final_message()
        assert text == "".join(b.text for b in done.content if b.type == "text")
    else:
        done = client.messages.create(**asked)
    calls = [(b.id, b.name, b.input) for b in done.content if b.type == "tool_use"]
    ended = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}[done.stop_reason]
    return "".join(b.text for b in done.content if b.type == "text"), calls, ended, (done.usage.input_tokens, done.usage.output_tokens), [{"role": "assistant", "content": done.content}]


def connect(wire: str, session, key: str | None = None, **options):
    import anthropic
    import openai

    key = session.key if key is None else key
    return anthropic.Anthropic(base_url=session.session_url, api_key=key, **options) if wire == "messages" else openai.OpenAI(base_url=session.base_url, api_key=key, **options)


TURNS = {"chat": openai_turn, "messages": anthropic_turn, "responses": responses_turn}


@wires
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@scenario
async def test_a_stock_client_talks_calls_a_tool_and_is_cut_in_one_segment(wire, stream, hermes):
    """A synchronous SDK client in a thread, as an agent would use it. Its own types assemble the same text, calls, ends and counts,
    whole or streamed; what it sends back goes on from the sampled ids; a failed generation is retried by the SDK unseen."""
    long = "plan " * 60
    script = [words(long), OSError("engine"), words("hello" + CALL), words("he", (), finish="length")]
    await hermes.start()
    table = seated(hermes, *script)

    def agent() -> list:
        client, messages, told = connect(wire, table.session), [user()], []
        with client:
            for _ in range(3):
                text, calls, ended, tokens, back = TURNS[wire](client, table.session, messages, stream)
                told.append((text, [c[1:] for c in calls], ended, tokens))
                messages = messages + back + ([tool_result(wire, "hello", calls[0][0])] if calls else [user()])
        return told

    told = await asyncio.to_thread(agent)
    [segment] = hermes.close(table.session)
    prompts, sampled = [p for i, p in enumerate(table.engine.prompts) if i != 1], [a for a in script if not isinstance(a, OSError)]
    counts = [(len(p), len(a.token_ids)) for p, a in zip(prompts, sampled)]
    assert told == [(long, [], "stop", counts[0]), ("hello", [("look", {"city": "Paris"})], "tool_calls", counts[1]), ("he", [], "length", counts[2])]
    assert [(ids, new) for ids, new, _, _ in runs(segment)] == [(p, a.token_ids) for p, a in zip(prompts, sampled)]
    assert segment.truncated
    await hermes.stop()


@scenario
async def test_asynchronous_clients_list_models_count_tokens_and_raise_their_own_errors():
    """Each refusal is the SDK's exception for its status; errors of the wrong shape would be bare APIStatusErrors without a message."""
    import anthropic
    import openai

    table = Table(answer(6, 7, 1), answer(8, 1))
    await table.server.start()
    table.session = table.server.open(table.engine, Budget(1000), 1.0)
    o = openai.AsyncOpenAI(base_url=table.session.base_url, api_key=table.session.key)
    a = anthropic.AsyncAnthropic(base_url=table.session.session_url, api_key=table.session.key)
    assert [m.id async for m in await o.models.list()] == ["toy"]
    assert (await a.messages.count_tokens(model="m", messages=[user()])).input_tokens == 9
    assert (await o.chat.completions.create(model="m", messages=[user()])).choices[0].message.content == "hello"
    deltas = [d async for d in await o.chat.completions.create(model="m", messages=[user()], stream=True)]
    assert "".join(d.choices[0].delta.content or "" for d in deltas) == "hello"
    async with a.messages.stream(model="m", max_tokens=5, messages=[user(), {"role": "assistant", "content": "hello"}, user()]) as stream:
        assert (await stream.get_final_text()) == "hello"
    for sdk, ask in ((openai, lambda **f: o.chat.completions.create(model="m", messages=[user()], **f)), (anthropic, lambda **f: a.messages.create(model="m", max_tokens=5, messages=[user()], **f))):
        with pytest.raises(sdk.BadRequestError, match="tool_choice"):
            await ask(tools=TOOLS if sdk is openai else tools_for("messages"), tool_choice="required" if sdk is openai else {"type": "any"})
    with pytest.raises(openai.AuthenticationError, match="ctx.api_key"):
        await o.with_options(api_key="sk-x").models.list()
    with pytest.raises(anthropic.AuthenticationError, match="ctx.api_key"):
        await a.with_options(api_key="sk-x").messages.count_tokens(model="m", messages=[user()])
    assert table.close() == [toy_segment("drift")]
    with pytest.raises(anthropic.NotFoundError, match="rollout is over"):
        await a.messages.create(model="m", max_tokens=5, messages=[user()])
    await o.close(), await a.close()
    await table.server.stop()


# ---------------------------------------------------------------------------------------------------- rollouts on the real engine
ENV = """
from agent import Env, Result

class AgentRunner(Env):
    async def step(self, action):
        self.said = [*self.__dict__.get("said", []), action]
        return Result(reward=float(len(self.said) == 3), observation="and " + str(len(self.said)), terminated=len(self.said) == 3, info={"said": self.said})
"""
CHATTER = """
import asyncio
import openai
from agent import ChatAgent, Result

class AgentRunner(ChatAgent):
    async def run(self, ctx):
        kind, messages, said = ctx.prompt.get("kind"), list(ctx.messages), []
        if kind == "raises": raise KeyError("broken tool")
        if kind == "hangs": await asyncio.sleep(600)
        if kind == "silent": return Result(reward=1.0)
        if kind == "nothing": return 3
        if kind == "exits": raise SystemExit(1)
        if kind == "cancels": raise asyncio.CancelledError
        with openai.OpenAI(base_url=ctx.base_url, api_key=ctx.api_key) as client:      # synchronous on purpose: it blocks every agent of the worker
            for turn in range(3):
                reply = client.chat.completions.create(model=ctx.model, messages=messages, temperature=ctx.temperature)
                said.append(reply.choices[0].message.content)
                messages += [reply.choices[0].message, {"role": "user", "content": f"and {turn + 1}"}]
                if kind == "long": break
        return Result(reward=None if kind == "unscored" else 1.0, info={"said": said})
"""


def worker_of(cfg, tmp_path, name: str, source: str, **changes):
    from dataclasses import replace

    from generator import AgentWorker

    (tmp_path / f"{name}.py").write_text(source)
    return AgentWorker.options(num_cpus=0).remote(cfg.model, replace(cfg.generator, agent=str(tmp_path / f"{name}.py"), **changes))


def test_an_engine_that_is_gone_is_the_runs_matter_and_no_failure_of_the_agent(tmp_path):
    """The agent's client would only see a 500, and retry; the rollout ends at once with EngineGone, its session with it."""
    from conftest import TINY
    from generator import AgentWorker, EngineGone, GeneratorConfig

    async def remote(requests, sampling):
        raise EngineGone("restarted")

    (tmp_path / "chatter.py").write_text(CHATTER.replace("openai.OpenAI", "openai.AsyncOpenAI").replace("with openai", "async with openai").replace("= client.", "= await client."))
    worker = AgentWorker.__ray_metadata__.modified_class(str(TINY), GeneratorConfig(agent=str(tmp_path / "chatter.py")))
    with pytest.raises(EngineGone, match="restarted"):
        asyncio.run(worker.run_groups([(0, {"prompt": "1+1"})], SimpleNamespace(generate=SimpleNamespace(remote=remote)), 1, 1.0, None, "gone"))
    assert not worker.chat.sessions


def test_an_env_and_a_chat_agent_of_the_same_task_train_the_same_tokens(stack, loop, tmp_path):
    """Three turns, 2 prompts x 2 rollouts, the same seeds: ids, masks, versions and text are equal, logprobs to 1e-5 (they were batched
    differently), though one side goes through a blocking SDK, a socket and the template's messages."""
    import ray

    cfg, parts = stack
    prompts = [(i, {"prompt": text}) for i, text in enumerate(("12+34", "7+5"))]
    groups = []
    for name, source in (("env", ENV), ("chatter", CHATTER)):
        worker = worker_of(cfg, tmp_path, name, source)
        groups.append(ray.get(worker.run_groups.remote(prompts, parts.engines[0], 2, 0.7, 11, name)))
        ray.kill(worker)
    rollouts = [[segments for group in side for segments in group.rollouts] for side in groups]
    assert [len(side) for side in rollouts] == [4, 4] and all(len(segments) == 1 for side in rollouts for segments in side)
    for [a], [b] in zip(*rollouts):
        assert ids_and_mask(a) == ids_and_mask(b) and sum(np.diff(a.response_mask.astype(int)) == 1) == 3
        assert (a.policy_versions.tolist(), a.info, a.reward, a.rollout, a.group, a.truncated) == (b.policy_versions.tolist(), b.info, b.reward, b.rollout, b.group, b.truncated)
        np.testing.assert_allclose(a.behaviour_logprobs, b.behaviour_logprobs, atol=1e-5)


def test_b14_every_kind_of_failing_chat_agent_is_dropped_and_counted_like_an_env(stack, loop, tmp_path):
    """Raises, hangs, samples nothing, has no room, is unscored, returns a number, exits, cancels itself; the others stay."""
    import ray

    cfg, parts = stack
    worker = worker_of(cfg, tmp_path, "unruly_chatter", CHATTER, rollout_timeout=15.0)
    kinds = ["fine", "raises", "hangs", "silent", "long", "unscored", "nothing", "exits", "cancels"]
    prompts = [(i, {"prompt": "1+1" if kind != "long" else "x" * 500, "kind": kind}) for i, kind in enumerate(kinds)]
    groups = dict(zip(kinds, ray.get(worker.run_groups.remote(prompts, parts.engines[0], 2, 1.0, 0, "unruly_chatter"))))
    assert {k: dict(g.dropped) for k, g in groups.items()} == {
        "fine": {}, "raises": {"error_KeyError": 2}, "hangs": {"timeout": 2}, "silent": {"empty": 2}, "long": {"prompt_too_long": 2}, "unscored": {"unscored": 2},
        "nothing": {"error_TypeError": 2}, "exits": {"error_RuntimeError": 2}, "cancels": {"error_RuntimeError": 2}}
    assert "rollout 2 of prompt 1: KeyError: 'broken tool'" in groups["raises"].errors
    ray.kill(worker)
