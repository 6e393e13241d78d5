"""reasoning-gym's chain_sum with 2 terms of 1 digit, for a real language model.

There are only 200 such problems ("4 + 3 =", "2 - 9 ="): 60 are held out for evals, by a seed of its own, 140 train.
Reward: 1 for the exact number and nothing else, 0.1 for any bare number, 0 otherwise (an answer cut short by the
token limit is no bare number unless all of it is digits).
"""

import random
import re

from agent import Env, Result

SYSTEM, HELD_OUT, SPLIT_SEED = "Reply with only the final number.", 60, 20260729


def prompts(split: str) -> list[dict]:
    import reasoning_gym

    problems = {row["question"]: row["answer"] for row in reasoning_gym.create_dataset("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1, size=4000, seed=1)}
    questions = sorted(problems)
    random.Random(SPLIT_SEED).shuffle(questions)
    chosen = questions[:HELD_OUT] if split == "eval" else questions[HELD_OUT:]
    return [{"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": q}], "label": problems[q]} for q in chosen]


class AgentRunner(Env):
    max_turns = 1

    async def step(self, action: str) -> Result:
        correct, bare = action == self.prompt["label"], re.fullmatch(r"-?\d+", action) is not None
        return Result(reward=1.0 if correct else 0.1 if bare else 0.0, info={"correct": float(correct), "bare_number": float(bare)})
