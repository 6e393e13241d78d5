"""What the recipes claim: splits without overlap, rewards as described, an embedded policy that is small and half right."""

import asyncio
import re

import pytest

from conftest import TINY


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
