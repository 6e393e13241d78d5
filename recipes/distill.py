"""On-policy distillation: a smaller policy learns from the embedded one, without any reward.

    python recipes/distill.py [-- flags for train.py]

1. The student: recipes/make_tiny.py with fewer and narrower layers, warmed up until it speaks the format, into models/student (once).
2. train.py --estimator on_policy_distill: the student answers, and the teacher's logprob of each token it sampled, minus
   its own, is that token's advantage. `ref_kl` in metrics.jsonl is the reverse KL to the teacher in nats a token.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
STUDENT = ["--hidden", "96", "--layers", "3", "--targets", "0.1", "0.2"]
TRAIN = ["--estimator", "on_policy_distill", "--loss", "reinforce", "--learning-rate", "1e-3"]


@dataclass(frozen=True)
class Config:
    """Make a student and distill the teacher into it."""

    teacher: str = "recipes/tiny"      # directory in Hugging Face layout, e.g. runs/<name>/hf of a trained run
    student: str = "models/student"    # where the student is kept; made when missing
    train: tyro.conf.Positional[tuple[str, ...]] = ()   # further flags for train.py, after --


def main(cfg: Config) -> None:
    student = ROOT / cfg.student
    if not (student / "config.json").exists():
        unfinished = student.with_name(student.name + ".unfinished")
        subprocess.run([sys.executable, str(ROOT / "recipes/make_tiny.py"), "--out", str(unfinished), *STUDENT], check=True)
        unfinished.rename(student)
    sys.exit(subprocess.run([sys.executable, str(ROOT / "train.py"), "--model", str(student), "--ref", cfg.teacher, *TRAIN, *cfg.train]).returncode)


if __name__ == "__main__":
    main(tyro.cli(Config))
