"""Tests of agent.py: ids that stay as they were sampled, and episodes that end as they should.

The tokenizer is a real Hugging Face one with the 16 tokens of toy.json, so that expected ids can be read off:
0 <|im_start|>  1 <|im_end|>  2 newline  3 user  4 assistant  5 tool  6 he  7 llo  8 hello  9 <think>  10 </think>
11 plan  12 and 13 the halves of an emoji  14 system  15 space  16 <s> (BOS)  100+b the byte b.
"""

import asyncio
import json
import math
import pickle
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from agent import Budget, Env, Result, Trajectory, answer_text, checked_reward, escape, load_agent
from agent import render_delta, render_prompt, reserved, run_episode, tokenize

HERE = Path(__file__).parent
CASES = {case["id"].split("-")[0]: case for case in json.loads((HERE / "cases.json").read_text())}
TOY = json.loads((HERE / "toy.json").read_text())
HELLO = TOY["prompt_of_user_hello"]                     # 9 ids: the prompt of one user message "hello"
FEEDBACK = [2, 0, 3, 2, 8, 1, 2, 0, 4, 2]               # 10 ids: what follows a stopped answer when the user says "hello"
few = settings(max_examples=50, deadline=None, derandomize=True, database=None)

# ChatML that drops the <think> part of an assistant message before the last user message, as Qwen3's template does.
TEMPLATE = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is not string %}{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{% elif m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def toy_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the ids of toy.json. Like Llama's, its encoder puts a BOS in front when asked for special tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = dict(zip(printable + [b for b in range(256) if b not in printable], sorted(pre_tokenizers.ByteLevel.alphabet())))
    vocab, merges = {letters[b]: 100 + b for b in range(256)} | {"<s>": 16}, []
    for i, text in sorted(TOY["vocab"].items(), key=lambda item: -len(item[1])):        # longest match first
        word = "".join(letters[b] for b in (bytes.fromhex(text[6:]) if text.startswith("bytes") else text.encode()))
        for end in range(2, len(word) + 1) if text[0] != "<" else ():
            merges.append((word[: end - 1], word[end - 1]))
            vocab.setdefault(word[:end], 500 + len(merges))         # the steps on the way to a word
        vocab[word] = int(i)
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=list(dict.fromkeys(merges))))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
    bpe.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 16)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", bos_token="<s>")
    tokenizer.chat_template = template
    return tokenizer


TOKENIZER = toy_tokenizer()
GO_ON = Result(observation="hello", terminated=False)


# ---------------------------------------------------------------------------------------------------- fakes
@dataclass
class Answer:
    """The fields of a completion that an episode reads."""

    token_ids: list
    logprobs: list
    policy_versions: list
    finish_reason: str = "stop"
    stop_reason: str | int | None = None
    routed_experts: np.ndarray | None = None


def answer(*ids, finish="stop", stop=None, version=0) -> Answer:
    return Answer(list(ids), [-0.5 * (k + 1) for k in range(len(ids))], [version] * len(ids), finish, stop)


def told(turn: int, tokens: int) -> np.ndarray:
    """Experts as the engine tells them in a turn that ends with `tokens` tokens, [tokens - 1, 1, 2]: [position, turn] of each."""
    return np.array([[[position, turn]] for position in range(tokens - 1)], np.int16)


class Engine:
    """Gives scripted answers in order (raises those that are exceptions) and keeps what it was asked."""

    def __init__(self, *answers):
        self.answers, self.prompts, self.asked = list(answers), [], []

    async def __call__(self, token_ids, max_tokens, stop, turn, images=()):
        self.prompts.append(token_ids.tolist())
        self.asked.append({"max_tokens": max_tokens, "stop": stop, "turn": turn})
        reply = self.answers[turn]
        if isinstance(reply, BaseException):
            raise reply
        return reply


class Scene(Env):
    """Answers each action with the next scripted result (raises those that are exceptions)."""

    def __init__(self, *results, first=None, max_turns=32):
        self.results, self.first, self.max_turns, self.actions, self.closed = list(results), first, max_turns, [], 0

    async def reset(self, prompt):
        if isinstance(self.first, BaseException):
            raise self.first
        return await super().reset(prompt) if self.first is None else self.first[0]

    async def step(self, action):
        self.actions.append(action)
        reply = self.results[len(self.actions) - 1]
        if isinstance(reply, BaseException):
            raise reply
        return reply

    async def close(self):
        self.closed += 1


def play(env, engine, prompt=None, tokenizer=TOKENIZER, context=1000, max_new_tokens=None) -> Trajectory:
    segments = asyncio.run(run_episode(env, prompt or {"prompt": "hello"}, tokenizer, engine, Budget(context, max_new_tokens), rollout=7, group=3))
    assert len(segments) == 1
    return segments[0]


def ids_and_mask(trajectory) -> tuple[list, list]:
    assert len(trajectory.token_ids) == len(trajectory.response_mask) == len(trajectory.behaviour_logprobs) == len(trajectory.policy_versions)
    return trajectory.token_ids.tolist(), trajectory.response_mask.astype(int).tolist()


def toy_segment(case: str, index: int = 0) -> tuple[list, list]:
    expect = TOY["cases"][case]["expect"]
    segment = expect.get("either", [expect])[0]["segments"][index]
    return segment["ids"], segment["action_mask"]


# ---------------------------------------------------------------------------------------------------- Trajectory
def test_sampled_and_observed_tokens_keep_their_own_record():
    """Observed 5, 6; sampled 7, 2 by version 4: mask 0011, logprob 0 and version -1 where nothing was sampled."""
    trajectory = Trajectory(rollout=1, group=0)
    trajectory.extend([5, 6])
    trajectory.extend([7, 2], logprobs=[-0.25, -0.5], policy_versions=[4, 4])
    assert ids_and_mask(trajectory) == ([5, 6, 7, 2], [0, 0, 1, 1])
    assert trajectory.behaviour_logprobs.tolist() == [0, 0, -0.25, -0.5]
    assert trajectory.policy_versions.tolist() == [-1, -1, 4, 4]
    assert [x.dtype for x in (trajectory.token_ids, trajectory.response_mask, trajectory.behaviour_logprobs, trajectory.policy_versions)] == [
        np.int32, bool, np.float32, np.int32]


def test_a_trajectory_crosses_processes_within_its_pickle():
    """Equal arrays of the same types; no buffer beside the pickle, which Ray would keep in its object store; and it still grows, the original untouched."""
    trajectory, buffers = Trajectory(rollout=1, group=0, info={"right": 1}), []
    trajectory.extend([5, 6])
    trajectory.extend([7, 2], logprobs=[-0.25, -0.5], policy_versions=[4, 4])
    copy = pickle.loads(pickle.dumps(trajectory, 5, buffer_callback=buffers.append), buffers=buffers)
    assert not buffers
    for name, array in vars(trajectory).items():
        assert np.array_equal(getattr(copy, name), array) and getattr(getattr(copy, name), "dtype", None) == getattr(array, "dtype", None)
    copy.extend([9])
    assert len(copy) == 5 and ids_and_mask(trajectory) == ([5, 6, 7, 2], [0, 0, 1, 1])


def test_an_end_token_inside_a_segment_is_a_token_like_any_other():
    """Case n19 b: id 2 ends the prompt's first part, an answer and the feedback; each 2 stays, and only the sampled one is trained."""
    b = CASES["n19"]["given"]["b"]
    trajectory = Trajectory(rollout=1, group=0)
    trajectory.extend(b["prompt"])
    for k, sampled in enumerate(b["sampled"]):
        trajectory.extend(sampled, [-1.0] * len(sampled), [0] * len(sampled))
        trajectory.extend(b["feedback"][k] if k < len(b["feedback"]) else [])
    expect = CASES["n19"]["expect"]["b"]
    assert ids_and_mask(trajectory) == (expect["ids"], expect["action_mask"])


@pytest.mark.parametrize("logprobs, versions", [
    (CASES["n17"]["given"]["a"]["logprobs"], [0, 0, 0]),           # two logprobs for three tokens
    (CASES["n17"]["given"]["b"]["logprobs"], [0, 0, 0]),           # None in the middle
    ([-0.2, math.nan, -0.1], [0, 0, 0]),
    ([-0.2, math.inf, -0.1], [0, 0, 0]),
    ([-0.2, -0.4, -0.1], [0, 0]),                                  # two versions for three tokens
    ([-0.2, -0.4, -0.1], None),
    (None, [0, 0, 0]),
])
def test_sampled_tokens_without_a_logprob_or_a_version_each_are_refused(logprobs, versions):
    """Case n17 a and b: nothing is filled in (a 0 would weigh e^-2 = 0.135 for a trainer logprob of -2); the rollout is named."""
    trajectory = Trajectory(rollout=41, group=0)
    trajectory.extend([5])
    with pytest.raises(ValueError, match="Rollout 41"):
        trajectory.extend(CASES["n17"]["given"]["a"]["token_ids"], logprobs, versions)
    assert ids_and_mask(trajectory) == ([5], [0])


def test_a_logprob_of_minus_infinity_is_a_value():
    """A sampler may report log 0; what to make of it is for the losses, which cut the ratio."""
    trajectory = Trajectory(rollout=1, group=0)
    trajectory.extend([5], [-math.inf], [0])
    assert trajectory.behaviour_logprobs.tolist() == [-math.inf]


@few
@given(st.lists(st.tuples(
    st.booleans(), st.lists(st.tuples(st.integers(0, 99), st.floats(-9, 0, width=32), st.integers(0, 5)), max_size=4)), max_size=6))
def test_a_trajectory_is_the_concatenation_of_what_it_was_given(pieces):
    """Oracle: four Python lists grown side by side."""
    trajectory, ids, mask, logprobs, versions = Trajectory(rollout=1, group=0), [], [], [], []
    for sampled, tokens in pieces:
        new = [list(column) for column in zip(*tokens)] or [[], [], []]
        trajectory.extend(*(new if sampled else new[:1]))
        ids, mask = ids + new[0], mask + [int(sampled)] * len(tokens)
        logprobs, versions = logprobs + (new[1] if sampled else [0] * len(tokens)), versions + (new[2] if sampled else [-1] * len(tokens))
    assert ids_and_mask(trajectory) == (ids, mask)
    assert (trajectory.behaviour_logprobs.tolist(), trajectory.policy_versions.tolist()) == (logprobs, versions)


def test_n20_the_token_at_a_turn_boundary_gets_its_experts_from_the_next_turn():
    """Case n20: of 4 + 2 tokens turn 1 tells 5; of all 9 turn 2 tells 8, the sixth for the first time; the last token has none."""
    case, trajectory = CASES["n20"], Trajectory(rollout=1, group=0)
    trajectory.extend(range(case["given"]["turn1"]["prompt_tokens"]))
    for turn in case["given"]["turn1"], case["given"]["turn2"]:
        trajectory.extend(range(turn.get("feedback_tokens", 0)))
        n = turn["sampled_tokens"]
        trajectory.extend(range(n), [-1.0] * n, [0] * n, np.array(turn["rows"])[:, None])
    assert trajectory.routed_experts[:, 0].tolist() + [[-1, -1]] == case["expect"]["rows_by_position"] and len(trajectory) == 9


@few
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=5))
def test_a_position_keeps_the_first_experts_told_of_it(turns):
    """Turns of (observed, sampled) tokens. Oracle: a dictionary that is written to only where it has nothing."""
    trajectory, first = Trajectory(rollout=1, group=0), {}
    for turn, (observed, sampled) in enumerate(turns):
        trajectory.extend([5] * observed)
        experts = told(turn, len(trajectory) + sampled)
        trajectory.extend([6] * sampled, [-1.0] * sampled, [0] * sampled, experts)
        for position, row in enumerate(experts.tolist()):
            first.setdefault(position, row)
    assert trajectory.routed_experts.tolist() == [first[p] for p in range(len(trajectory) - 1)]


# ---------------------------------------------------------------------------------------------------- text to ids
def test_the_prompt_ends_with_the_assistant_header():
    """toy.json: user "hello" renders as <|im_start|>user newline hello<|im_end|> newline, then the header: 9 ids. Text is one user message."""
    assert render_prompt(TOKENIZER, "hello") == render_prompt(TOKENIZER, [{"role": "user", "content": "hello"}]) == HELLO


@pytest.mark.parametrize("place", ["user text", "content block", "tool result", "tool description", "argument value", "argument name"])
def test_control_tokens_written_by_users_and_tools_are_text(place):
    """Case b05: 1 is <|im_end|>. Whoever writes it, the prompt has as many 1s as with the harmless word in its place, and the text stays."""
    def ids(word):
        arguments = {"argument value": {"type": word}, "argument name": {word: 1}}.get(place, {})
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        message = {
            "content block": {"role": "user", "content": [{"type": "text", "text": word}]},
            "tool result": {"role": "tool", "content": word},
            "user text": {"role": "user", "content": word},
        }.get(place, {"role": "assistant", "content": "plan", "tool_calls": [call]})
        tools = [{"type": "function", "function": {"name": "f", "description": word}}] if place == "tool description" else None
        return render_prompt(TOKENIZER, [message], tools)
    assert ids("hello<|im_end|>").count(1) == ids("hello").count(1)
    assert TOKENIZER.decode(ids("hello<|im_end|>")) == TOKENIZER.decode(ids("hello")).replace("hello", "hello<|im_end|>")


@few
@given(st.lists(st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<s>", "<|im_", "end|>", "<", "|>", "s>", "hello", "\n", " ", "😀", "0"]), max_size=8).map("".join))
def test_escaped_text_keeps_every_character_and_has_no_control_id(text):
    """Whatever is written: the ids decode to the same text, and 0, 1 and 16 are not among them."""
    ids = tokenize(TOKENIZER, escape(text, reserved(TOKENIZER)))
    assert TOKENIZER.decode(ids) == text
    assert not {0, 1, 16} & set(ids)


@pytest.mark.parametrize("text", ["\ue0000\ue001", "\ue00099\ue001", "\ue002answer\ue003"])
def test_private_use_characters_of_a_user_are_text_too(text):
    """The marks that stand for control tokens are themselves characters that a user can write: they must come out as written."""
    assert TOKENIZER.decode(render_prompt(TOKENIZER, text)) == TOKENIZER.decode(HELLO).replace("hello", text)
    assert TOKENIZER.decode(render_delta(TOKENIZER, text, [8, 1])) == TOKENIZER.decode(FEEDBACK).replace("hello", text)


def test_a_template_that_writes_bos_gives_exactly_one():
    """Case b05: id 16 is BOS, which the encoder would write once more ([16, 8] for "hello"). A later turn has none."""
    tokenizer = toy_tokenizer("{{ bos_token }}" + TEMPLATE)
    assert tokenizer.encode("hello") == [16, 8]
    assert render_prompt(tokenizer, "hello") == [16, *HELLO]
    assert render_delta(tokenizer, "hello", [8, 1]) == FEEDBACK


def test_the_delta_opens_with_the_separator_and_closes_with_the_header():
    """Case b03: after a sampled <|im_end|> come newline, the user message, and the assistant header: [2, 0,3,2,8,1,2, 0,4,2]."""
    assert render_delta(TOKENIZER, "hello", [8, 1]) == FEEDBACK


@pytest.mark.parametrize("sampled", [[6, 7], [8, 16], []])
def test_an_answer_without_its_closing_token_gets_it_from_the_template(sampled):
    """Case b04: cut short, ended by another control token (16), or empty: the closing 1 is added, once."""
    assert render_delta(TOKENIZER, "hello", sampled) == [1, *FEEDBACK]


def test_the_delta_does_not_depend_on_what_was_answered_before():
    """Case b02: the template drops <think> from earlier turns, but the history is not rendered, so the delta is the same 10 ids."""
    assert render_delta(TOKENIZER, "hello", [9, 11, 10, 8, 1]) == FEEDBACK
    tool = [{"role": "tool", "content": "hello"}]
    assert render_delta(TOKENIZER, tool, [9, 11, 10, 8, 1]) == [2, 0, 5, 2, 8, 1, 2, 0, 4, 2]


def test_a_template_that_hides_or_repeats_an_answer_is_refused():
    """Without exactly one place where the answer stands, nothing says what follows it."""
    for template in ("{% for m in messages %}{{ m.role }}{% endfor %}", "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"):
        with pytest.raises(ValueError, match="exactly once"):
            render_delta(toy_tokenizer(template), "hello", [8, 1])


def test_a_tokenizer_without_a_template_takes_text_as_it_is():
    """No template, no markup and no BOS: "hello" is [8] before and between answers, and a control string stays text."""
    plain = toy_tokenizer(None)
    assert render_prompt(plain, "hello") == render_delta(plain, "hello", [8, 1]) == [8]
    for ids in (render_prompt(plain, "hello<|im_end|>"), render_delta(plain, "hello<|im_end|>", [8, 1])):
        assert plain.decode(ids) == "hello<|im_end|>" and 1 not in ids


@pytest.mark.parametrize("render", [render_prompt, lambda tokenizer, messages: render_delta(tokenizer, messages, [8, 1])], ids=["prompt", "delta"])
def test_a_tokenizer_without_a_template_refuses_messages(render):
    with pytest.raises(ValueError, match="chat_template"):
        render(toy_tokenizer(None), [{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("ids, finish, stop, text", [
    ([8, 1], "stop", None, "hello"),                               # the end token ended it
    ([8, 10], "stop", 10, "hello"),                                # an id of stop_token_ids ended it
    ([8, 1], "length", None, "hello<|im_end|>"),                   # nothing ended it, so nothing is taken away
    ([6, 7, 11], "stop", "plan", "hello"),                         # a stop string, whole in the last token
    ([6, 7], "stop", "lo", "hel"),                                 # a stop string that is a part of the last token
    ([1], "stop", None, ""),
    ([], "length", None, ""),
    ([12, 13, 1], "stop", None, TOY["cases"]["emoji"]["expect"]["text"]),   # case b06: one character over two tokens
])
def test_an_action_is_the_answer_without_what_ended_it(ids, finish, stop, text):
    """Ids are decoded as one piece (no U+FFFD); the token or string that ended the answer is not part of the action."""
    assert answer_text(TOKENIZER, answer(*ids, finish=finish, stop=stop)) == text


def test_a_stop_string_that_the_last_token_writes_twice_is_cut_at_the_first():
    """Stop "l", sampled "he" and "llo": the engine stops at the first l, so the action is "he", not "hel"."""
    assert answer_text(TOKENIZER, answer(6, 7, stop="l")) == "he"


# ---------------------------------------------------------------------------------------------------- the episode
@pytest.mark.parametrize("case", ["drift", "think_tool", "special_text", "truncated", "emoji"])
def test_an_episode_trains_the_ids_that_were_sampled(case):
    """toy.json (b01, b02, b04, b05, b06): sampled ids are never decoded and encoded again, new text has mask 0, each prompt is the prefix."""
    turns = TOY["cases"][case]["turns"]
    answers = [answer(*turn["sampled"], finish=turn.get("finish_reason", "stop")) for turn in turns]
    messages = [[{"role": role, "content": text} for role, text in turn["messages_added"]] for turn in turns]
    env, engine = Scene(*(Result(observation=m, terminated=False) for m in messages[1:]), Result()), Engine(*answers)
    trajectory = play(env, engine, {"messages": messages[0]})
    assert ids_and_mask(trajectory) == toy_segment(case)
    sent = 0
    for prompt, turn in zip(engine.prompts, turns, strict=True):
        assert trajectory.token_ids[: len(prompt)].tolist() == prompt and len(prompt) > sent
        sent = len(prompt) + len(turn["sampled"])
        assert trajectory.token_ids[len(prompt) : sent].tolist() == turn["sampled"]
    assert sent == len(trajectory)


def test_thinking_of_an_earlier_turn_stays_when_the_user_goes_on():
    """Case think_user as an Env plays it: one segment, prompt + [9,11,10,6,7,1] + feedback + [8,1], nothing rewritten."""
    trajectory = play(Scene(GO_ON, Result()), Engine(answer(9, 11, 10, 6, 7, 1), answer(8, 1)))
    assert ids_and_mask(trajectory) == (HELLO + [9, 11, 10, 6, 7, 1] + FEEDBACK + [8, 1], [0] * 9 + [1] * 6 + [0] * 10 + [1] * 2)


def test_logprobs_and_versions_are_the_ones_reported():
    """Two answers of versions 3 and 4; an inserted closing token (answer 1 was cut) has logprob 0 and version -1."""
    trajectory = play(Scene(GO_ON, Result()), Engine(answer(6, 7, finish="length", version=3), answer(8, 1, version=4)))
    assert trajectory.policy_versions.tolist() == [-1] * 9 + [3, 3] + [-1] * 11 + [4, 4]
    assert trajectory.behaviour_logprobs.tolist() == [0] * 9 + [-0.5, -1.0] + [0] * 11 + [-0.5, -1.0]
    assert not trajectory.truncated                     # the last answer was whole


def test_experts_are_those_the_engine_told_of_each_position():
    """9 + 3 tokens, 10 of feedback, 2 sampled: turn 0 tells of positions 0..10, turn 1 of the rest but the last."""
    answers = answer(6, 7, 1), answer(8, 1)
    answers[0].routed_experts, answers[1].routed_experts = told(0, 12), told(1, 24)
    trajectory = play(Scene(GO_ON, Result()), Engine(*answers))
    assert len(trajectory) == 24 and trajectory.routed_experts[:, 0].tolist() == [[p, int(p > 10)] for p in range(23)]


def test_the_action_is_text_and_the_ids_keep_the_stop():
    """Case b04: sampled [6,7,1] and [8,11] (stop string "plan"): actions "hello" and "hello", all five sampled ids trained."""
    env = Scene(GO_ON, Result())
    trajectory = play(env, Engine(answer(6, 7, 1), answer(8, 11, stop="plan")))
    assert env.actions == ["hello", "hello"]
    assert ids_and_mask(trajectory) == (HELLO + [6, 7, 1] + FEEDBACK + [8, 11], [0] * 9 + [1] * 3 + [0] * 10 + [1] * 2)


def test_an_answer_that_hit_a_limit_marks_the_rollout():
    """finish_reason "length" on the last answer: truncated, though the Env says terminated."""
    assert play(Scene(Result(reward=1.0)), Engine(answer(6, 7, finish="length"))).truncated


def test_a_refused_completion_names_the_rollout():
    """Case n17 in an episode: three ids with two logprobs end it with the rollout's number."""
    with pytest.raises(ValueError, match="Rollout 7"):
        play(Scene(Result()), Engine(Answer([6, 7, 1], [-0.1, -0.2], [0, 0, 0])))


@pytest.mark.parametrize("words, room", [(24, 0), (25, -1), (22, 2)])
def test_a_prompt_without_room_is_never_sent(words, room):
    """Case b07, limit 32: n words make 8 + n ids. At 32 and 33 nothing is asked and the rollout is truncated; at 30 max_tokens is 2."""
    env, engine = Scene(Result(reward=1.0)), Engine(answer(8, 1))
    trajectory = play(env, engine, {"prompt": "hello" * words}, context=32)
    assert [asked["max_tokens"] for asked in engine.asked] == ([room] if room > 0 else [])
    assert ids_and_mask(trajectory)[1] == [0] * (8 + words) + ([1, 1] if room > 0 else [])
    assert (trajectory.truncated, trajectory.reward, env.closed) == ((False, 1.0, 1) if room > 0 else (True, None, 1))


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_an_observation_that_leaves_no_room_ends_the_episode_with_its_turns_kept(spare):
    """Case b07: 9 + 3 ids used, the feedback needs 10. In 21 or 22 no answer can follow (truncated, reward kept); in 23 one token can."""
    engine = Engine(answer(6, 7, 1), answer(8, finish="length"))
    trajectory = play(Scene(Result(0.5, "hello", terminated=False), Result(0.25)), engine, context=22 + spare)
    ids, mask = HELLO + [6, 7, 1], [0] * 9 + [1] * 3
    if spare > 0:
        ids, mask = ids + FEEDBACK + [8], mask + [0] * 10 + [1]
        assert engine.asked[1]["max_tokens"] == 1
    assert ids_and_mask(trajectory) == (ids, mask)
    assert len(engine.asked) == (2 if spare > 0 else 1)
    assert (trajectory.truncated, trajectory.reward) == (True, 0.75 if spare > 0 else 0.5)


@pytest.mark.parametrize("ids", [[1], []])
def test_the_shortest_answers_keep_the_arrays_in_step(ids):
    """Case b07: [1] alone trains one token, an empty answer none; the action is "" for both."""
    env = Scene(Result(1.0))
    assert ids_and_mask(play(env, Engine(answer(*ids)))) == (HELLO + ids, [0] * 9 + [1] * len(ids))
    assert env.actions == [""]


@pytest.mark.parametrize("context, run_limit, asked", [(1000, None, [991, 3, 967]), (1000, 50, [50, 3, 50]), (35, 50, [26, 3, 2])])
def test_the_limit_of_an_answer_is_the_smallest_that_applies(context, run_limit, asked):
    """Room is context - 9, then - 21, then - 33 ids. A step's max_tokens (3) and stop hold for the next answer only."""
    engine = Engine(answer(8, 1), answer(8, 1), answer(8, 1))
    short = Result(observation="hello", terminated=False, max_tokens=3, stop=["x"])
    play(Scene(short, GO_ON, Result()), engine, context=context, max_new_tokens=run_limit)
    assert [a["max_tokens"] for a in engine.asked] == asked
    assert [a["stop"] for a in engine.asked] == [[], ["x"], []]
    assert [a["turn"] for a in engine.asked] == [0, 1, 2]


def test_max_turns_ends_an_episode_after_an_answer():
    """max_turns 2 and an Env that never ends: two answers, no feedback after the second, truncated."""
    engine = Engine(answer(8, 1), answer(8, 1), answer(8, 1))
    trajectory = play(Scene(GO_ON, GO_ON, GO_ON, max_turns=2), engine)
    assert ids_and_mask(trajectory) == (HELLO + [8, 1] + FEEDBACK + [8, 1], [0] * 9 + [1] * 2 + [0] * 10 + [1] * 2)
    assert trajectory.truncated and len(engine.asked) == 2


def test_a_step_can_cut_the_episode_short():
    """terminated False and truncated True: one answer, marked."""
    trajectory = play(Scene(Result(terminated=False, truncated=True)), Engine(answer(8, 1)))
    assert trajectory.truncated and len(trajectory) == 9 + 2


@pytest.mark.parametrize("rewards, total", [
    ([0.5, -2, True], -0.5), ([1, None, 1], None), ([1, 1, math.nan], None), ([None, 0, 0], None), ([0.0], 0.0)])
def test_rewards_add_up_and_one_unscored_turn_leaves_the_rollout_unscored(rewards, total):
    """0.5 - 2 + 1 = -0.5. None or NaN in any turn is not 0: the sum does not exist. info is the last turn's."""
    results = [Result(r, "hello", terminated=k == len(rewards) - 1, info={"turn": k}) for k, r in enumerate(rewards)]
    trajectory = play(Scene(*results), Engine(*[answer(8, 1)] * len(rewards)))
    assert trajectory.reward == total
    assert trajectory.info == {"turn": len(rewards) - 1}
    assert (trajectory.rollout, trajectory.group) == (7, 3)


@pytest.mark.parametrize("reward, value", [
    (None, None), (math.nan, None), (np.float32("nan"), None), (np.float32(0.5), 0.5), (np.int64(2), 2.0), (False, 0.0)])
def test_a_reward_is_a_number_or_unscored(reward, value):
    """Case n05: None and NaN are unscored; a NumPy number is a number."""
    assert checked_reward(reward, rollout=1) == value and type(checked_reward(reward, rollout=1)) is type(value)


@pytest.mark.parametrize("env, words", [
    (Scene(None), "Scene.step"),
    (Scene((1.0, "hello")), "Scene.step"),
    (Scene(Result(reward="1.0")), "Rollout 7.*reward"),
    (Scene(Result(reward=[1.0])), "Rollout 7.*reward"),
    (Scene(Result(observation=None, terminated=False)), "observation"),
    (Scene(Result(observation=3, terminated=False)), "observation"),
    (Scene(first=[None]), "reset|observation"),
    (Scene(Result(), first=[("hello", {})]), "reset|observation"),            # as Gymnasium returns it
])
def test_a_wrong_type_from_the_agent_is_named(env, words):
    """The message says which return value was wrong; the episode is closed."""
    with pytest.raises((TypeError, ValueError), match=words):
        play(env, Engine(answer(8, 1), answer(8, 1)))
    assert env.closed == 1


def test_an_env_without_a_step_says_so():
    class Forgetful(Env):
        pass
    with pytest.raises(NotImplementedError, match="Forgetful.*step"):
        play(Forgetful(), Engine(answer(8, 1)))


@pytest.mark.parametrize("env, engine, error", [
    (Scene(Result()), Engine(answer(8, 1)), None),
    (Scene(first=OSError("reset")), Engine(), OSError),
    (Scene(OSError("step")), Engine(answer(8, 1)), OSError),
    (Scene(GO_ON, OSError("step")), Engine(answer(8, 1), answer(8, 1)), OSError),
    (Scene(GO_ON), Engine(answer(8, 1), OSError("generate")), OSError),
    (Scene(Result()), Engine(Answer([8, 1], [None, None], [0, 0])), ValueError),
])
def test_close_is_called_once_on_every_way_out(env, engine, error):
    """Whoever raises, the error passes through and close has run once."""
    if error is None:
        play(env, engine)
    else:
        with pytest.raises(error):
            play(env, engine)
    assert env.closed == 1


def test_close_is_called_when_the_episode_is_cancelled():
    """Cancelled while it waits for the engine: CancelledError passes through, close has run once."""
    env = Scene(Result())

    async def cancel_while_waiting():
        asked = asyncio.Event()

        async def generate(token_ids, max_tokens, stop, turn, images=()):
            asked.set()
            await asyncio.Event().wait()
        task = asyncio.create_task(run_episode(env, {"prompt": "hello"}, TOKENIZER, generate, Budget(100)))
        await asked.wait()
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel_while_waiting())
    assert env.closed == 1


def test_the_env_sees_its_prompt_and_the_template_its_tools():
    """`self.prompt` is the dict of the prompt; its tools reach the first prompt as the template writes them."""
    tools = [{"type": "function", "function": {"name": "look"}}]
    env, prompt = Scene(Result()), {"prompt": "hello", "label": 46, "tools": tools}
    trajectory = play(env, Engine(answer(8, 1)), prompt)
    assert env.prompt is prompt
    assert TOKENIZER.decode(trajectory.token_ids[:-2]) == f"<|im_start|>system\n{json.dumps(tools)}<|im_end|>\n" + TOKENIZER.decode(HELLO)


# ---------------------------------------------------------------------------------------------------- the user's module
AGENT = """
from agent import Env, Result

class AgentRunner(Env):
    async def step(self, action):
        return Result(reward=float(action == self.prompt["label"]))
"""


CHAT_AGENT = """
from agent import ChatAgent, Result

class AgentRunner(ChatAgent):
    async def run(self, ctx):
        return Result(reward=1.0)
"""


def test_a_ten_line_agent_loads_and_plays(tmp_path):
    """The label is "hello", the answer decodes to "hello": reward 1."""
    (tmp_path / "echo.py").write_text(AGENT)
    module = load_agent(str(tmp_path / "echo.py"))
    assert play(module.AgentRunner(), Engine(answer(6, 7, 1)), {"prompt": "hello", "label": "hello"}).reward == 1.0


def test_a_chat_agent_loads_too(tmp_path):
    (tmp_path / "chat.py").write_text(CHAT_AGENT)
    assert load_agent(str(tmp_path / "chat.py")).AgentRunner.__name__ == "AgentRunner"


@pytest.mark.parametrize("file, source, words", [
    ("missing.py", None, "no such file"),
    ("notes.txt", AGENT, r"\.py"),
    ("empty.py", "from agent import Env", "AgentRunner"),
    ("sync.py", AGENT.replace("async def", "def"), "step.*async def"),
    ("other.py", "class AgentRunner:\n    async def step(self, action): ...", "Env"),
    ("number.py", "AgentRunner = 3", "Env"),
    ("blocking.py", CHAT_AGENT.replace("async def", "def"), "run.*async def"),
])
def test_an_agent_module_that_cannot_work_is_refused_when_it_loads(tmp_path, file, source, words):
    """ValueError, with the path and what to change, before any engine starts."""
    if source is not None:
        (tmp_path / file).write_text(source)
    with pytest.raises(ValueError, match=words) as error:
        load_agent(str(tmp_path / file))
    assert file in str(error.value)
