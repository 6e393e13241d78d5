"""Real agent frameworks, unmodified, at a session's URL: multi-turn tool episodes on a real engine, token for token.

The policy is recipes/caller: it samples every answer, the calls among them. Agents that come with prompts and tools of
their own, which it was never warmed up for, get scripted answers instead of an engine's: their tests say so. The frameworks
are those of tests/clients.txt; a test whose client is not installed is skipped, and says what to install.
"""

import asyncio
import json
import os
import re
import shutil

import numpy as np
import pytest

from agent import Budget
from chat_server import ChatServer
from recipes.calculator import calculate

from conftest import CALLER
from test_chat_server import runs

QUESTION, TEMPERATURE = "37 times 48", 0.5


# ---------------------------------------------------------------------------------------------------- the clients
def framework(name: str, install: str = "-r tests/clients.txt"):
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install {install}")


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


async def mini_swe_agent(session, calculator) -> str:
    framework("minisweagent", "mini-swe-agent==2.4.6")
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    model = LitellmModel(model_name="openai/policy", cost_tracking="ignore_errors", model_kwargs={"api_base": session.base_url, "api_key": session.key})
    agent = DefaultAgent(model, LocalEnvironment(), system_template="Use bash.", instance_template="{{task}}", step_limit=5)
    return (await asyncio.to_thread(agent.run, QUESTION))["exit_status"]


async def claude_code(session, calculator, home) -> str:
    program = shutil.which("claude") or pytest.skip("claude is not installed: npm install -g @anthropic-ai/claude-code@2.1.332")
    settings = {"PATH": os.environ["PATH"], "HOME": str(home), "ANTHROPIC_BASE_URL": session.session_url, "ANTHROPIC_API_KEY": session.key,
                "DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1", "DISABLE_ERROR_REPORTING": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
    process = await asyncio.create_subprocess_exec(program, "-p", QUESTION, "--model", "policy", "--allowedTools", "Bash", cwd=home, env=settings,
                                                   stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return output.decode().strip()


# ---------------------------------------------------------------------------------------------------- an episode, and what is claimed of it
def episode(loop, client, caller=None, script: tuple[str, ...] = (), **options):
    """A client's episode in a session of its own -> (what it returned, what its tool was asked, what was sampled for which prompt, the segments).

    Answers come from the engine of `caller`; without one they are the script's, with logprobs of -1.
    """
    from transformers import AutoTokenizer

    from generator import Completion, Sampling

    log, asked, tokenizer = [], [], AutoTokenizer.from_pretrained(CALLER)
    server = ChatServer(tokenizer, "policy", tool_parser="hermes")

    async def generate(token_ids, max_tokens, stop, turn, images=()):
        if caller:
            [completion] = await caller[1].engines[0].generate.remote([(f"{server.url}-{turn}", token_ids, max_tokens, stop)], [Sampling(TEMPERATURE, 1 + turn)])
        else:
            ids = np.asarray([*tokenizer.encode(script[turn]), tokenizer.eos_token_id], np.int32)
            completion = Completion(ids, np.full(len(ids), -1, np.float32), np.zeros(len(ids), np.int32), "stop")
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
        session = server.open(generate, Budget(4096 if caller else 10**6, 64), TEMPERATURE)
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
    returned, asked, log, segments = episode(loop, client, caller, **options)
    call, text = said(log)
    assert asked == re.findall(r'"expression": "(.*?)"', call) and len(asked) == 1
    assert returned == text and len(segments) == 1
    assert_trained_as_sampled(log, segments)
    assert_the_model_gives_these_logprobs(segments)


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_framework_that_rewrites_its_history_leaves_a_segment_for_each_request(loop):
    """smolagents, scripted answers: it sends calls back as text ("Calling tools: ..."), so no answer is extended; every token is trained once."""
    script = (call("calculator", expression="37*48"), call("calculator", expression="1776-1"), call("final_answer", answer="1775"))
    returned, asked, log, segments = episode(loop, smolagents, script=script)
    assert (returned, asked) == ("1775", ["37*48", "1776-1"])
    assert [segment.token_ids.tolist() for segment in segments] == [given + gave for given, gave, _, _ in log] and len(segments) == 3
    assert_trained_as_sampled(log, segments)


def test_mini_swe_agent_is_one_segment(loop, monkeypatch):
    """Scripted answers: two commands that its shell runs, and the one that submits."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    script = (call("bash", command="expr 37 '*' 48"), call("bash", command="expr 6 '*' 7"), call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"))
    returned, _, log, segments = episode(loop, mini_swe_agent, script=script)
    assert returned == "Submitted" and len(log) == 3 and len(segments) == 1
    assert_trained_as_sampled(log, segments)


def test_claude_code_is_one_segment(loop, tmp_path):
    """Scripted answers to `claude -p`: a command, whose output 1776 is in the second prompt, and the text that it prints."""
    returned, _, log, segments = episode(loop, claude_code, script=(call("Bash", command="expr 37 '*' 48", description="multiply"), "It is so."), home=tmp_path)
    assert returned.endswith("It is so.") and len(log) == 2 and len(segments) == 1
    assert said([(None, log[1][0][len(log[0][0]) + len(log[0][1]):], None, None)])[0].count("1776") == 1
    assert_trained_as_sampled(log, segments)
