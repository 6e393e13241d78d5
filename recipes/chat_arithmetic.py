"""The task of calculator.py as an agent that owns its loop, on the stock OpenAI client; chat_anthropic.py is its twin.

    python train.py --agent recipes/chat_arithmetic.py --model recipes/caller --tool-parser hermes --context-length 128 --max-new-tokens 32
"""

import json

from openai import AsyncOpenAI

from agent import ChatAgent, ChatContext, Result
from recipes.calculator import prompts, use  # noqa: F401  (train.py reads prompts here)

CLIENT = AsyncOpenAI(base_url="-", api_key="-")   # making one takes 40 ms, so rollouts share its connections


class AgentRunner(ChatAgent):
    async def run(self, ctx: ChatContext) -> Result:
        messages = list(ctx.messages)
        client = CLIENT.with_options(base_url=ctx.base_url, api_key=ctx.api_key)
        for turn in range(3):
            reply = (await client.chat.completions.create(model=ctx.model, messages=messages, tools=ctx.tools)).choices[0].message
            if not reply.tool_calls:
                return Result(reward=float(reply.content == ctx.label))
            messages.append(reply)
            for call in reply.tool_calls:
                result = use(call.function.name, json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        return Result(reward=0.0, truncated=True)
