"""Makes recipes/caller, a 0.8M-parameter policy that can call tools: the bytes and the Llama of make_tiny.py, ChatML with tools in hermes format.

    python recipes/make_caller.py [--out recipes/caller]      200 steps; 9 minutes on one core that was not idle

A supervised warm-up on both turns of the calculator task, looked at every 20 steps and ended when greedy decoding gets
more than half of the held-out problems right: the format is there, and reinforcement has the digits to learn.
"""

import asyncio
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from agent import Trajectory, render_delta, render_prompt  # noqa: E402
from estimators import collate  # noqa: E402
from losses import LossConfig, token_mean  # noqa: E402
from recipes.calculator import TOOLS, calculate, problems  # noqa: E402
from recipes.make_tiny import make_model, make_tokenizer  # noqa: E402
from train import quiet, start_ray  # noqa: E402
from trainer import Trainer, TrainerConfig  # noqa: E402

MARKUP = ["<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"', '": "', '"}}', "calculator", "expression"]   # one token each, as frequent text is in larger vocabularies
# Of a tool only its name and its parameters are shown: at one token a byte whole schemas would be most of a prompt.
CHATML = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ '\\n' if message.content or not loop.first }}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@dataclass(frozen=True)
class Config:
    """Rebuild the tool-calling policy."""

    out: str = "recipes/caller"        # where to write it
    batch: int = 64                    # problems a step
    learning_rate: float = 2e-3        # constant after a warm-up of 20 steps
    target: float = 0.5                # share of held-out episodes right by greedy decoding that ends it
    steps: int = 600                   # supervised steps at most
    seed: int = 0                      # weights and order of the problems


def episode(tokenizer, index: int, question: str, expression: str) -> Trajectory:
    """A right episode, its call and its answer as the response."""
    call = {"name": "calculator", "arguments": {"expression": expression}}
    called = tokenizer.encode(f"<tool_call>\n{json.dumps(call)}\n</tool_call>") + [tokenizer.eos_token_id]
    told = render_delta(tokenizer, [{"role": "tool", "content": calculate(expression)}], called, TOOLS)
    trajectory = Trajectory(rollout=index, group=index, reward=0.0)
    for observed, said in ((render_prompt(tokenizer, [{"role": "user", "content": question}], TOOLS), called), (told, tokenizer.encode(calculate(expression)) + [tokenizer.eos_token_id])):
        trajectory.extend(observed)
        trajectory.extend(said, logprobs=[0.0] * len(said), policy_versions=[-1] * len(said))      # nobody sampled them
    return trajectory


def pass_rate(path: str, episodes: list[Trajectory]) -> float:
    """Share of episodes that greedy decoding gets right: the argmax is the response's token at every place, by transformers."""
    from transformers import AutoModelForCausalLM

    width = max(len(e) for e in episodes)
    ids = torch.stack([torch.from_numpy(np.pad(e.token_ids, (0, width - len(e)))).long() for e in episodes])            # [B, T]
    said = torch.stack([torch.from_numpy(np.pad(e.response_mask, (0, width - len(e)))) for e in episodes])              # [B, T]
    with torch.no_grad():
        best = AutoModelForCausalLM.from_pretrained(path)(ids).logits.argmax(-1)[:, :-1]                                # [B, T-1]
    return ((best == ids[:, 1:]) | ~said[:, 1:]).all(-1).float().mean().item()


async def main(cfg: Config) -> None:
    from transformers import AutoTokenizer

    quiet()
    out, work = Path(cfg.out).resolve(), Path(f"{cfg.out}.unfinished").resolve()
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(MARKUP)
    tokenizer.chat_template = CHATML
    make_model(tokenizer, hidden=128, layers=4, seed=cfg.seed, positions=8192).save_pretrained(work)
    tokenizer.save_pretrained(work)
    tokenizer = AutoTokenizer.from_pretrained(work)
    train, held_out = problems("train"), [episode(tokenizer, i, *problem) for i, problem in enumerate(problems("eval"))]
    start_ray(None)
    order = torch.Generator().manual_seed(cfg.seed)
    training = TrainerConfig(learning_rate=cfg.learning_rate, warmup_steps=20, decay="constant")
    trainer = Trainer(str(work), training, LossConfig(), "cpu", "float32", cfg.steps, cfg.seed,
                      [dict(num_cpus=0, runtime_env={"env_vars": {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}})])
    print(f"{await trainer.start():,} parameters, {len(train)} problems, {len(held_out)} held out")
    for step in range(1, cfg.steps + 1):
        chosen = torch.randperm(len(train), generator=order)[: cfg.batch].tolist()
        metrics = await trainer.update(collate([[episode(tokenizer, i, *train[i])] for i in chosen], token_mean), "sft")
        if step % 20 == 0:
            await trainer.export(work)
            rate = pass_rate(str(work), held_out)
            print(f"step {step}: loss {metrics['loss']:.4f}, greedy pass rate {rate:.3f}", flush=True)
            if rate >= cfg.target:
                break
    else:
        sys.exit(f"The policy did not reach {cfg.target} in {cfg.steps} steps. Try another --seed or more --steps.")
    ray.shutdown()
    shutil.rmtree(out, ignore_errors=True)
    work.rename(out)


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(Config)))
