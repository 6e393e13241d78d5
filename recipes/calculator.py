"""A tool-use task: "37 times 48" is asked, a calculator tool can be called, the answer is the bare number.

Products of two numbers below 100 are out of reach of a small policy's arithmetic, so it must call. Here as an Env,
which reads the calls itself; chat_arithmetic.py and chat_anthropic.py are the same task through an SDK.
Problems are split once, by a seed of their own: a held-out one is never trained.

    python train.py --agent recipes/calculator.py --model recipes/caller --context-length 128 --max-new-tokens 32
"""

import json
import random
import re

from agent import Env, Result

SIGNS = {"plus": "+", "minus": "-", "times": "*"}
NUMBERS, HELD_OUT, SPLIT_SEED = 100, 200, 20260729
TOOLS = [{"type": "function", "function": {
    "name": "calculator", "description": "The value of an expression of two numbers.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string", "description": "such as 37*48"}}, "required": ["expression"]}}}]


def problems(split: str) -> list[tuple[str, str]]:
    """All (question, expression) of a split: 200 held-out ones for "eval", the other 29,800 for "train"."""
    rows = [(f"{a} {word} {b}", f"{a}{sign}{b}") for word, sign in SIGNS.items() for a in range(NUMBERS) for b in range(NUMBERS)]
    random.Random(SPLIT_SEED).shuffle(rows)
    return rows[:HELD_OUT] if split == "eval" else rows[HELD_OUT:]


def prompts(split: str) -> list[dict]:
    return [{"messages": [{"role": "user", "content": question}], "tools": TOOLS, "label": calculate(expression)} for question, expression in problems(split)]


def calculate(expression: str) -> str:
    """The tool: the value of an expression of two whole numbers, or "error"."""
    read = re.fullmatch(r"\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*", expression)
    if read is None:
        return "error"
    a, sign, b = int(read[1]), read[2], int(read[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[sign])


def use(name: str, arguments: dict) -> str:
    """The text that answers a call of any tool with any arguments."""
    return calculate(str(arguments.get("expression"))) if name == "calculator" else "error"


class AgentRunner(Env):
    max_turns = 3

    async def step(self, action: str) -> Result:
        call = re.fullmatch(r"<tool_call>\s*(\{.*\})\s*</tool_call>", action, re.DOTALL)
        try:
            call = json.loads(call[1]) if call else None
        except ValueError:
            call = None
        if call is None or not isinstance(call.get("arguments"), dict):
            return Result(reward=float(action == self.prompt["label"]))
        return Result(terminated=False, observation=[{"role": "tool", "content": use(call.get("name"), call["arguments"])}])
