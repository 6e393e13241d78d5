"""What the recipes claim: splits without overlap, rewards as described, embedded policies that are small and half right, agents that learn to call a tool."""

import asyncio
import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from conftest import CALLER, ROOT, TINY


def reward(module, label: str, action: str) -> float:
    env = module.AgentRunner()
    env.prompt = {"label": label}
    return asyncio.run(env.step(action)).reward


def test_chain_sum_holds_60_of_its_200_problems_out_and_every_label_is_right():
    from recipes import chain_sum

    train, held_out = chain_sum.prompts("train"), chain_sum.prompts("eval")
    asked = [[p["messages"][1]["content"] for p in split] for split in (train, held_out)]
    assert (len(train), len(held_out)) == (140, 60) and not set(asked[0]) & set(asked[1])
    for p in train + held_out:
        a, sign, b = re.search(r"(\d) ([+-]) (\d) =", p["messages"][1]["content"]).groups()
        assert int(p["label"]) == int(a) + int(b) * (1 if sign == "+" else -1)


@pytest.mark.parametrize("action, expected", [("7", 1.0), ("-7", 0.1), ("12", 0.1), ("It is 7", 0.0), ("7.", 0.0), (" 7", 0.0), ("7\n", 0.0), ("", 0.0)])
def test_chain_sum_rewards_the_exact_number_and_a_little_any_bare_number(action, expected):
    from recipes import chain_sum

    assert reward(chain_sum, "7", action) == expected


@pytest.mark.parametrize("action, expected", [("57", 1.0), ("057", 0.0), ("57 ", 0.0), ("58", 0.0), ("", 0.0)])
def test_arithmetic_rewards_the_exact_sum_only(action, expected):
    from recipes import arithmetic

    assert reward(arithmetic, "57", action) == expected


def test_the_embedded_policy_is_small_and_right_on_half_of_the_held_out_sums():
    """At most 3.5 MB in Hugging Face layout, about 0.8M parameters, greedy accuracy between 0.50 and 0.65 by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from agent import render_prompt
    from recipes.arithmetic import prompts
    from recipes.make_tiny import greedy_accuracy

    assert sum(f.stat().st_size for f in TINY.iterdir()) <= 3.5e6
    assert 0.75e6 <= sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(TINY).parameters()) <= 0.9e6
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    pairs = [(render_prompt(tokenizer, p["messages"]), tokenizer.encode(p["label"]) + [tokenizer.eos_token_id]) for p in prompts("eval")]
    assert 0.50 <= greedy_accuracy(str(TINY), pairs) <= 0.65


def test_the_pools_two_orders_trade_the_wait_for_stragglers_against_a_bias_in_length():
    """30 steps of 8 groups, 2 % of which take 8 times as long. In order of start everything started is trained; in order of finish nothing waits for a straggler."""
    from recipes.bench_pool import Config, compare

    start, finished = (asyncio.run(compare(Config(steps=30, training=0.02), order)) for order in ("start", "finished"))
    assert start["length"] == pytest.approx(1.0) and start["trained"] == start["started"] > 0 and start["stale_groups"] == 0 < start["head_seconds"]
    assert finished["head_seconds"] == 0 and finished["length"] < 1 and finished["stale_groups"] > 0


def test_calculator_holds_200_problems_out_and_every_label_is_right():
    """30,000 questions; Python's own arithmetic on the question's words gives the label."""
    from recipes import calculator

    train, held_out = calculator.prompts("train"), calculator.prompts("eval")
    asked = [[p["messages"][0]["content"] for p in split] for split in (train, held_out)]
    assert (len(set(asked[0])), len(set(asked[1]))) == (29_800, 200) and not set(asked[0]) & set(asked[1])
    for p in train[:1000] + held_out:
        a, word, b = p["messages"][0]["content"].split()
        assert int(p["label"]) == {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}[word](int(a), int(b))


@pytest.mark.parametrize("expression, value", [("37*48", "1776"), (" 3 - 48 ", "-45"), ("007+1", "8"), ("9**9", "error"), ("1+2+3", "error"), ("__import__('os')", "error"), ("", "error")])
def test_the_calculator_knows_two_numbers_and_a_sign_and_nothing_else(expression, value):
    from recipes.calculator import calculate

    assert calculate(expression) == value


def test_the_calling_policy_is_small_and_leaves_something_to_learn():
    """At most 4 MB, about 0.8M parameters, greedy pass rate between 0.7 and 0.9 by transformers (it was made with 0.80)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from recipes.calculator import problems
    from recipes.make_caller import episode, pass_rate

    assert sum(f.stat().st_size for f in CALLER.iterdir()) <= 4e6
    assert 0.75e6 <= sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(CALLER).parameters()) <= 0.9e6
    tokenizer = AutoTokenizer.from_pretrained(CALLER)
    assert 0.7 <= pass_rate(str(CALLER), [episode(tokenizer, i, *problem) for i, problem in enumerate(problems("eval"))]) <= 0.9


def test_the_same_tool_use_task_trains_the_same_tokens_as_env_and_over_both_wires(caller, loop):
    """4 prompts x 2 rollouts, the same seeds: ids, masks, versions, rewards are equal and logprobs to 1e-5 (they were batched
    differently), whether we read the calls (calculator.py) or vLLM's parser does for an OpenAI or an Anthropic client."""
    import ray

    from generator import AgentWorker
    from recipes.calculator import prompts

    cfg, parts = caller
    chosen, sides = list(enumerate(prompts("eval")[:4])), []
    for name in ("calculator", "chat_arithmetic", "chat_anthropic"):
        worker = AgentWorker.options(num_cpus=0).remote(cfg.model, replace(cfg.generator, agent=str(ROOT / f"recipes/{name}.py")))
        groups = ray.get(worker.run_groups.remote(chosen, parts.engines[0], 2, 0.7, 11, name))
        assert not any(group.errors for group in groups), groups[0].errors
        sides.append([segments for group in groups for segments in group.rollouts])
        ray.kill(worker)
    assert [len(side) for side in sides] == [8, 8, 8] and all(len(segments) == 1 for side in sides for segments in side)
    for [env], *chats in zip(*sides):
        for [chat] in chats:
            for name in ("token_ids", "response_mask", "policy_versions"):
                np.testing.assert_array_equal(getattr(chat, name), getattr(env, name))
            assert (chat.reward, chat.rollout, chat.group, chat.truncated) == (env.reward, env.rollout, env.group, env.truncated)
            np.testing.assert_allclose(chat.behaviour_logprobs, env.behaviour_logprobs, atol=1e-5)
    answers = [int((np.diff(env.response_mask.astype(int)) == 1).sum()) for [env] in sides[0]]
    assert max(answers) >= 2 and {env.reward for [env] in sides[0]} == {0.0, 1.0}, answers


@pytest.mark.long
@pytest.mark.parametrize("name", ["chat_arithmetic", "chat_anthropic"])
def test_a_chat_agent_learns_to_call_its_tool(name, tmp_path):
    """24 steps of the recipe's own command, smaller batches: the mean reward of the last 6 is at least 0.1 above that of the first 6."""
    flags = ["--agent", f"recipes/{name}.py", "--model", "recipes/caller", "--tool-parser", "hermes", "--context-length", "128", "--max-new-tokens", "32",
             "--prompts-per-step", "16", "--steps", "24", "--eval-every", "0", "--eval-samples", "0", "--eval-prompts", "1", "--name", "learns"]
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), *flags], cwd=tmp_path, capture_output=True, text=True, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs/learns/metrics.jsonl").read_text().splitlines()]
    rewards = [row["reward"] for row in rows if "reward" in row]
    assert len(rewards) == 24 and np.mean(rewards[-6:]) - np.mean(rewards[:6]) >= 0.1, rewards


def timed(step: int, generate: float, update: float) -> dict:
    """A row of a training step, as far as the pictures read it."""
    return {"step": step, "reward": 0.5, "staleness_max": 0, "response_tokens": 1, "ess_frac": 1.0, "clip_frac": 0.0, "mismatch_cut_frac": 0.0,
            "generate_seconds": generate, "update_seconds": update, "rest_seconds": 1.0, "step_seconds": generate + update + 1}


def test_bars_of_time_stack_the_phases_and_are_means_of_neighbours_where_there_are_many():
    """Step n: n s to generate, 2 of update, 1 of rest. 5 steps, at most 3 bars: steps 1 and 2, 3 and 4, and 5 alone; as many bars as steps up to 5."""
    from recipes.plot import plt, time_bars

    rows = [timed(n, n, 2.0) for n in range(1, 6)]
    for most, left, width, generate in ((3, [0.5, 2.5, 4.5], [2, 2, 1], [1.5, 3.5, 5]), (5, [0.5, 1.5, 2.5, 3.5, 4.5], [1] * 5, [1, 2, 3, 4, 5])):
        figure, axes = plt.subplots()
        time_bars(axes, rows, [0, 4], most)
        bars = {c.get_label(): [(b.get_x(), b.get_width(), b.get_y(), b.get_height()) for b in c] for c in axes.containers}
        assert bars == {"generate": [(x, w, 0, g) for x, w, g in zip(left, width, generate)], "update": [(x, w, g, 2) for x, w, g in zip(left, width, generate)],
                        "rest": [(x, w, g + 2, 1) for x, w, g in zip(left, width, generate)]}
        assert [line.get_xdata()[0] for line in axes.lines] == [0.5, 4.5] and axes.get_xlim() == (0.5, 5.5)
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["rest", "update", "generate", "eval"] and axes.get_ylim()[1] == pytest.approx(1.05 * 8)
        plt.close(figure)


def test_a_bar_of_many_times_the_median_does_not_flatten_the_others():
    """Steps of 4, 4 and 100 s: the axis ends at 16."""
    from recipes.plot import plt, time_bars

    figure, axes = plt.subplots()
    time_bars(axes, [timed(1, 1, 2), timed(2, 1, 2), timed(3, 97, 2)], [])
    assert axes.get_ylim() == (0, 16)
    plt.close(figure)


def test_the_table_of_time_has_median_mean_and_shares_that_sum_to_100():
    """Steps of 1 + 2 + 1, 2 + 2 + 1 and 9 + 2 + 1 s: 21 in all, 12 of them to generate, 6 of update, 3 of rest."""
    from recipes.plot import time_table

    rows = [timed(3, 1, 2), timed(4, 2, 2), timed(5, 9, 2) | {"info/tool_seconds": 7.0}]          # the agent's own: no phase
    heading, _, names, *lines = time_table(rows, "mine").splitlines()
    assert heading.startswith("mine: 3 steps, 3 to 5;") and names.split() == ["phase", "median", "s", "mean", "s", "share", "%"]
    assert [line.split() for line in lines] == [["generate", "2.000", "4.000", "57.1"], ["update", "2.000", "2.000", "28.6"], ["rest", "1.000", "1.000", "14.3"], ["step", "5.000", "7.000", "100.0"]]


def test_the_pictures_of_a_run_whose_first_rows_are_of_an_older_version_time_the_others(tmp_path):
    """From the command line, as a user draws them: two rows with other phases, then two of ours and a line cut short."""
    old = [{name: value for name, value in timed(step, 1, 2).items() if not name.endswith("_seconds")} | {"train_seconds": 5.0, "step_seconds": 6.0} for step in (1, 2)]
    (tmp_path / "config.json").write_text(json.dumps({"estimator": "grpo", "model": "recipes/tiny", "seed": 0, "generator": {"max_staleness": 1}}))
    for rows, files in ((old, ["reward.png", "staleness.png"]), (old + [timed(3, 1, 2), timed(4, 2, 2)], ["reward.png", "staleness.png", "time.png", "time.txt"])):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 5')
        done = subprocess.run([sys.executable, str(ROOT / "recipes/plot.py"), str(tmp_path)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and sorted(p.name for p in tmp_path.glob("*.[pt][nx][gt]")) == files, done.stderr
    assert (tmp_path / "time.txt").read_text().startswith(f"{tmp_path.name}: 2 steps, 3 to 4;")


@pytest.mark.long
def test_the_gpu_benchmark_runs_whole_at_toy_sizes():
    """Every part prints its table and leaves its figures: three agents, two sets of lengths, a publish idle and busy, both kinds of steps, whose phases add up."""
    run = subprocess.run([sys.executable, "recipes/bench_gpu.py", "--tiny", "--measured", "1", "--warm", "1", "--", "--device", "cpu"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    report = json.loads((ROOT / "runs/bench_gpu-dense.json").read_text())
    assert [len(report[part]) for part in ("generation", "training", "publish", "steps")] == [3, 2, 2, 2]
    assert all(0 < row["ratio"] < 100 for part in ("generation", "training", "steps") for row in report[part])
    assert all(row["tokens"] > 100 for row in report["generation"])
    for row in report["publish"]:
        assert row["total"] == pytest.approx(row["pause"] + row["send"] + row["resume"], rel=0.5) and row["send"] > 0
