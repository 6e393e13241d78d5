"""The default task: sums a + b of numbers below 100, one question, one answer.

Problems are split once, by a seed of their own, as *unordered* pairs: a held-out sum is never trained, in neither order.
"""

import random

from agent import Env, Result

NUMBERS, HELD_OUT, SPLIT_SEED = 100, 1000, 20260729


def problems(split: str) -> list[tuple[int, int]]:
    """All (a, b) of a split: 1,000 held-out pairs for "eval"; the other pairs in both orders for "train"."""
    pairs = [(a, b) for a in range(NUMBERS) for b in range(a, NUMBERS)]
    random.Random(SPLIT_SEED).shuffle(pairs)
    if split == "eval":
        return pairs[:HELD_OUT]
    return sorted({p for a, b in pairs[HELD_OUT:] for p in ((a, b), (b, a))})


def prompts(split: str) -> list[dict]:
    return [{"messages": [{"role": "user", "content": f"{a}+{b}"}], "label": str(a + b)} for a, b in problems(split)]


class AgentRunner(Env):
    max_turns = 1

    async def step(self, action: str) -> Result:
        return Result(reward=float(action == self.prompt["label"]))
