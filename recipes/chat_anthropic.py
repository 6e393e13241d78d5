"""chat_arithmetic.py on the stock Anthropic client: the same task, tokens and rewards over the other wire.

    python train.py --agent recipes/chat_anthropic.py --model recipes/caller --tool-parser hermes --context-length 128 --max-new-tokens 32
"""

from anthropic import AsyncAnthropic

from agent import ChatAgent, ChatContext, Result
from recipes.calculator import prompts, use  # noqa: F401  (train.py reads prompts here)

CLIENT = AsyncAnthropic(base_url="-", api_key="-")   # making one takes 40 ms, so rollouts share its connections


class AgentRunner(ChatAgent):
    async def run(self, ctx: ChatContext) -> Result:
        messages = list(ctx.messages)
        functions = [tool["function"] for tool in ctx.tools]
        tools = [{"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in functions]
        client = CLIENT.with_options(base_url=ctx.session_url, api_key=ctx.api_key)
        for turn in range(3):
            reply = await client.messages.create(model=ctx.model, max_tokens=256, messages=messages, tools=tools)
            calls = [block for block in reply.content if block.type == "tool_use"]
            if not calls:
                return Result(reward=float("".join(block.text for block in reply.content) == ctx.label))
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": use(call.name, call.input)} for call in calls]
            messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
        return Result(reward=0.0, truncated=True)
