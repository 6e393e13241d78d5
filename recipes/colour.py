"""Two questions about a picture of two colours, as an Env with images; a second picture comes with the second question.

    python recipes/make_vision.py --out models/vision
    python train.py --model models/vision --agent recipes/colour.py --context-length 256
"""

import random

from PIL import Image

from agent import Env, Result

COLOURS = {"r": (220, 30, 30), "g": (30, 200, 30), "b": (30, 30, 220), "y": (230, 220, 40)}


def picture(left: str, right: str) -> Image.Image:
    image = Image.new("RGB", (64, 40), COLOURS[left])
    image.paste(COLOURS[right], (32, 0, 64, 40))
    return image


def ask(question: str, left: str, right: str) -> list[dict]:
    return [{"role": "user", "content": [{"type": "text", "text": question}, {"type": "image", "image": picture(left, right)}]}]


class AgentRunner(Env):
    max_turns = 2

    async def reset(self, prompt: dict) -> list[dict]:
        self.turn = 0
        return ask(prompt["prompt"], *prompt["label"])

    async def step(self, action: str) -> Result:
        left, right = self.prompt["label"]
        self.turn += 1
        if self.turn == 1:                               # a letter for the left colour; then the picture the other way round
            return Result(reward=0.5 * action.startswith(left), terminated=False, observation=ask("and now?", right, left))
        return Result(reward=0.5 * action.startswith(right))


def prompts(split: str) -> list[dict]:
    draw = random.Random(split)
    return [{"prompt": "left?", "label": draw.choice("rgby") + draw.choice("rgby")} for _ in range(64)]
