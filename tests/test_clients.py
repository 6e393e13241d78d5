"""Real agent frameworks, unmodified, at a session's URL: multi-turn tool episodes on a real engine, token for token.

The policy is recipes/caller: it samples every answer, the calls among them; only smolagents, whose prompts it was never
warmed up for, gets scripted answers. The frameworks are those of tests/clients.txt; where one is not installed its test is skipped.
"""

import asyncio
import re

import numpy as np
import pytest

from agent import Budget
from chat_server import ChatServer
from recipes.calculator import calculate

from conftest import CALLER
from test_chat_server import runs

QUESTION, TEMPERATURE = "37 times 48", 0.5


# ---------------------------------------------------------------------------------------------------- the clients
def framework(name: str):
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install -r tests/clients.txt")


async def openai_agents(session, calculator, api: str = "responses", stream: bool = False) -> str:
    agents = framework("agents")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.key) as client:
        model = {"responses": agents.OpenAIResponsesModel, "chat": agents.OpenAIChatCompletionsModel}[api](model="policy", openai_client=client)
        agent = agents.Agent(name="reckoner", model=model, tools=[agents.function_tool(calculator)])
        if not stream:
            return (await agents.Runner.run(agent, QUESTION)).final_output
        run = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in run.stream_events():
            pass
        return run.final_output


async def pydantic_ai(session, calculator, stream: bool = False) -> str:
    framework("pydantic_ai")
    from anthropic import AsyncAnthropic
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    async with AsyncAnthropic(base_url=session.session_url, api_key=session.key) as client:
        agent = Agent(AnthropicModel("policy", provider=AnthropicProvider(anthropic_client=client)), tools=[calculator])
        if not stream:
            return (await agent.run(QUESTION)).output
        async with agent.run_stream(QUESTION) as run:
            return await run.get_output()


async def langchain(session, calculator) -> str:
    framework("langchain_openai")
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    agent = create_agent(ChatOpenAI(model="policy", base_url=session.base_url, api_key=session.key), [calculator])
    return (await agent.ainvoke({"messages": [{"role": "user", "content": QUESTION}]}))["messages"][-1].content


async def smolagents(session, calculator) -> str:
    """As it comes, but for tool_choice: "required" is refused, since nothing forces a policy in training to call."""
    framework("smolagents")
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel("policy", api_base=session.base_url, api_key=session.key, tool_choice="auto")
    agent = ToolCallingAgent(tools=[tool(calculator)], model=model, max_steps=3, verbosity_level=0)
    return await asyncio.to_thread(agent.run, QUESTION)


# ---------------------------------------------------------------------------------------------------- what is claimed of each
def episode(caller, loop, client, script: tuple[str, ...] = (), **options):
    """A client's episode in a session of its own -> (what it returned, what its tool was asked, the engine's log, the segments).

    The first answers are those of the script (with logprobs of -1); all others the engine samples.
    """
    from transformers import AutoTokenizer

    from generator import Completion, Sampling

    engine, log, asked, tokenizer = caller[1].engines[0], [], [], AutoTokenizer.from_pretrained(CALLER)
    server = ChatServer(tokenizer, "policy", tool_parser="hermes")

    async def generate(token_ids, max_tokens, stop, turn):
        if turn < len(script):
            ids = np.asarray([*tokenizer.encode(script[turn]), tokenizer.eos_token_id], np.int32)
            completion = Completion(ids, np.full(len(ids), -1, np.float32), np.zeros(len(ids), np.int32), "stop")
        else:
            [completion] = await engine.generate.remote([(f"{server.url}-{turn}", token_ids, max_tokens, stop)], [Sampling(TEMPERATURE, 1 + turn)])
        log.append(tuple(x.tolist() for x in (token_ids, completion.token_ids, completion.logprobs, completion.policy_versions)))
        return completion

    def calculator(expression: str) -> str:
        """The value of an expression.

        Args:
            expression: such as 37*48
        """
        asked.append(expression)
        return calculate(expression)

    async def run():
        await server.start()
        session = server.open(generate, Budget(4096, 64), TEMPERATURE)
        try:
            returned = await client(session, calculator, **options)
        finally:
            segments = server.close(session)
            await server.stop()
        return returned, segments

    returned, segments = loop.run_until_complete(run())
    return returned, asked, log, segments


def assert_trained_as_sampled(log: list[tuple], segments: list) -> None:
    """Each sampled stretch, with the ids before it, is what the engine was given and gave, each once."""
    assert sorted(run for segment in segments for run in runs(segment)) == sorted(log)


def assert_the_model_gives_these_logprobs(segments: list) -> None:
    """transformers, reading the segments' ids, gives the logprobs that were captured, to 1e-4 nats."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(CALLER, dtype=torch.float32)
    for segment in segments:
        ids, mask = torch.from_numpy(segment.token_ids).long(), segment.response_mask
        with torch.no_grad():
            logprobs = (model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]     # [T-1]
        np.testing.assert_allclose(segment.behaviour_logprobs[mask], logprobs.numpy()[mask[1:]], atol=1e-4)


def said(log: list[tuple]) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(CALLER)
    return [tokenizer.decode(ids).removesuffix("<|im_end|>") for _, ids, _, _ in log]


@pytest.mark.parametrize("client, options", [
    (openai_agents, {"api": "responses"}), (openai_agents, {"api": "responses", "stream": True}), (openai_agents, {"api": "chat"}),
    (openai_agents, {"api": "chat", "stream": True}), (pydantic_ai, {}), (pydantic_ai, {"stream": True}), (langchain, {})],
    ids=lambda x: x.__name__ if callable(x) else " ".join(str(v) for v in x.values()))
def test_a_frameworks_tool_loop_is_one_segment(client, options, caller, loop):
    """Two answers: a call, whose expression the tool was given as it was sampled, and the text that the framework returns."""
    returned, asked, log, segments = episode(caller, loop, client, **options)
    call, text = said(log)
    assert asked == re.findall(r'"expression": "(.*?)"', call) and len(asked) == 1
    assert returned == text and len(segments) == 1
    assert_trained_as_sampled(log, segments)
    assert_the_model_gives_these_logprobs(segments)


def test_a_framework_that_rewrites_its_history_leaves_a_segment_for_each_request(caller, loop):
    """smolagents sends calls back as text ("Calling tools: ..."): no answer is extended, and every token is trained once all the same."""
    script = tuple(f'<tool_call>\n{{"name": "{name}", "arguments": {{"{key}": "{value}"}}}}\n</tool_call>'
                   for name, key, value in (("calculator", "expression", "37*48"), ("calculator", "expression", "1776-1"), ("final_answer", "answer", "1775")))
    returned, asked, log, segments = episode(caller, loop, smolagents, script)
    assert (returned, asked) == ("1775", ["37*48", "1776-1"])
    assert [segment.token_ids.tolist() for segment in segments] == [given + gave for given, gave, _, _ in log] and len(segments) == 3
    assert_trained_as_sampled(log, segments)
