"""Makes recipes/tiny, the quick start's policy: a 0.8M-parameter Llama over bytes with a ChatML template.

    python recipes/make_tiny.py [--out recipes/tiny]      one to two minutes on 2 cores

Random weights, then a short supervised warm-up on the training sums through trainer.py's own update, ended when
the policy is right at least 56 times in 100: it speaks the format and has much left to learn by reinforcement.
"""

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import ray
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from agent import render_prompt  # noqa: E402
from estimators import supervised_batch  # noqa: E402
from losses import LossConfig, token_mean  # noqa: E402
from recipes.arithmetic import prompts  # noqa: E402
from train import quiet, start_ray  # noqa: E402
from trainer import Trainer, TrainerConfig  # noqa: E402

CHATML = ("{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


@dataclass(frozen=True)
class Config:
    """Rebuild the embedded policy."""

    out: str = "recipes/tiny"          # where to write it
    hidden: int = 128                  # width, a multiple of 32
    layers: int = 4                    # depth
    batch: int = 128                   # sums a step
    rates: tuple[float, float] = (3e-3, 3e-4)     # learning rate of the two phases: find how addition works, then settle
    targets: tuple[float, float] = (0.30, 0.56)   # greedy accuracy on held-out sums that ends each
    steps: int = 600                   # supervised steps of a phase at most
    seed: int = 0                      # weights and order of the sums


def make_tokenizer():
    """One token a byte, three control tokens, and three role names. "assistant" stays nine bytes: places to compute in."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    raw.add_tokens(["system", "user", "tool"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=["<|im_start|>"])
    tokenizer.chat_template = CHATML
    return tokenizer


def make_model(tokenizer, hidden: int, layers: int, seed: int, positions: int = 1024):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, num_key_value_heads=hidden // 32, head_dim=32, max_position_embeddings=positions, rope_theta=10000.0, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, dtype=torch.float32))


def greedy_accuracy(path: str, pairs: list[tuple[list[int], list[int]]]) -> float:
    """Share of (prompt, answer) pairs whose answer ids are the argmax at every place, by transformers."""
    from transformers import AutoModelForCausalLM

    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.tensor([prompt + answer + [0] * (width - len(prompt) - len(answer)) for prompt, answer in pairs])
    with torch.no_grad():
        best = AutoModelForCausalLM.from_pretrained(path)(ids).logits.argmax(-1).tolist()
    return sum(row[len(p) - 1: len(p) + len(a) - 1] == a for row, (p, a) in zip(best, pairs)) / len(pairs)


async def main(cfg: Config) -> None:
    from transformers import AutoTokenizer

    quiet()
    tokenizer = make_tokenizer()
    make_model(tokenizer, cfg.hidden, cfg.layers, cfg.seed).save_pretrained(cfg.out)
    tokenizer.save_pretrained(cfg.out)
    tokenizer = AutoTokenizer.from_pretrained(cfg.out)
    train, held_out = ([(render_prompt(tokenizer, p["messages"]), tokenizer.encode(p["label"]) + [tokenizer.eos_token_id]) for p in prompts(split)] for split in ("train", "eval"))
    start_ray(None)
    order = torch.Generator().manual_seed(cfg.seed)
    options = [dict(num_cpus=0, runtime_env={"env_vars": {"OMP_NUM_THREADS": str(os.cpu_count())}})]
    for rate, target in zip(cfg.rates, cfg.targets):
        training = TrainerConfig(learning_rate=rate, warmup_steps=20, decay="constant")
        trainer = Trainer(str(Path(cfg.out).resolve()), training, LossConfig(), "cpu", "float32", cfg.steps, cfg.seed, options)
        print(f"{await trainer.start():,} parameters, {len(train)} training sums, {len(held_out)} held out; learning rate {rate} until {target}")
        for step in range(1, cfg.steps + 1):
            chosen = torch.randint(len(train), (cfg.batch,), generator=order).tolist()
            metrics = await trainer.update(supervised_batch([train[i] for i in chosen], token_mean), "sft")
            if step % 10 == 0:
                await trainer.export(Path(cfg.out).resolve())
                accuracy = greedy_accuracy(cfg.out, held_out)
                print(f"step {step}: loss {metrics['loss']:.4f}, greedy accuracy {accuracy:.3f}", flush=True)
                if accuracy >= target:
                    break
        else:
            sys.exit(f"The policy did not reach {target} in {cfg.steps} steps. Try another --seed or more --steps.")
    ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(Config)))
