"""Pool and prompts by hand, Batcher with a scripted engine, Engine and AgentWorker on real vLLM and Ray."""

import asyncio
import functools
import json
import pickle
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.logprobs import FlatLogprobs

from agent import Env, Result, Trajectory
from generator import Batcher, GeneratorConfig, Group, Pool, PromptStream, Sampling, read_completion, read_prompts, rollout_seed, together
from losses import AGGREGATIONS
from recipes.arithmetic import prompts

from conftest import TINY


# ---------------------------------------------------------------------------------------------------- helpers
def usable(n: int, count: int) -> Group:
    group = Group(n, {})
    for k in range(count):
        t = Trajectory(rollout=n * 10 + k, group=n, reward=1.0)
        t.extend([1, 2])
        t.extend([3], logprobs=[-1.0], policy_versions=[0])
        group.rollouts.append([t])
    return group


class Script:
    """run_group whose groups finish when told to, with the number of usable rollouts asked for."""

    def __init__(self, usable_rollouts: dict[int, int] | None = None):
        self.usable, self.started, self.gates = usable_rollouts or {}, [], {}

    async def __call__(self, n: int, prompt: dict) -> Group:
        self.started.append(n)
        self.gates[n] = asyncio.Event()
        await self.gates[n].wait()
        group = usable(n, self.usable.get(n, 2))
        group.dropped = Counter(unscored=2 - len(group.rollouts))
        return group

    async def finish(self, *numbers: int) -> None:
        for n in numbers:
            self.gates[n].set()
        for _ in range(8):                                 # let every task that can go on do so
            await asyncio.sleep(0)


def pool_of(run_group, per_step: int, **options) -> Pool:
    return Pool(PromptStream([{"prompt": str(i)} for i in range(50)], seed=0), run_group, per_step, **{"min_rollouts": 2, **options})


async def begin(script: Script, pool: Pool, count: int) -> asyncio.Task:
    """take(count), under way."""
    taking = asyncio.ensure_future(pool.take(count))
    await script.finish()
    return taking


def numbers(groups: list[Group]) -> list[int]:
    return [g.index for g in groups]


def scenario(test):
    """An async test; what is left in flight ends with its event loop."""
    return functools.wraps(test)(lambda *args, **kwargs: asyncio.run(test(*args, **kwargs)))


# ---------------------------------------------------------------------------------------------------- pool
@scenario
async def test_take_returns_groups_in_order_of_start_although_younger_ones_are_complete():
    script = Script()
    pool = pool_of(script, 2, max_staleness=1)
    taking = await begin(script, pool, 2)
    await script.finish(3, 2, 1)                           # all but the head of the line
    await asyncio.sleep(0.05)
    assert not taking.done() and "prompt group 0" in pool.waiting_for() and "3 of 4" in pool.waiting_for()
    await script.finish(0)
    assert numbers(await taking) == [0, 1]
    assert 0.05 <= pool.head_seconds < 5                   # the wait for the head is counted, from when a younger one was complete


@scenario
async def test_in_order_of_finish_take_waits_for_nobody_who_is_late():
    script = Script()
    pool = pool_of(script, 2, max_staleness=1, order="finished")
    taking = await begin(script, pool, 2)
    await script.finish(3)
    await script.finish(1)
    assert numbers(await taking) == [3, 1] and pool.head_seconds == 0


@scenario
async def test_in_order_of_finish_what_grows_too_old_is_dropped_counted_and_issued_again():
    """P = 1, k = 1: group 0 starts at version 0 and would be trained at 2, so release(2) drops it; its prompt comes next."""
    script = Script()
    pool = pool_of(script, 1, max_staleness=1, order="finished")
    for version, ready in ((1, 1), (2, 2)):
        taking = await begin(script, pool, 1)
        await script.finish(ready)
        assert numbers(await taking) == [ready]
        pool.release(1, version)
        await asyncio.sleep(0)
    assert (pool.dropped_groups, pool.dropped) == (1, Counter(stale_groups=1))
    assert script.started == [0, 1, 2, 0, 3]


@scenario
async def test_waiting_for_a_head_that_ends_first_is_no_time_lost_at_the_head_of_the_line():
    script = Script()
    pool = pool_of(script, 2)
    taking = await begin(script, pool, 1)
    await asyncio.sleep(0.05)
    await script.finish(0)
    await taking
    assert pool.head_seconds == 0


@scenario
async def test_no_group_starts_before_release_frees_its_slot():
    """4 slots, 2 taken: still 4 unreleased groups, so nothing starts until the loop has trained and published them; nor beyond what is wanted."""
    script = Script()
    pool = pool_of(script, 2, max_staleness=1, wanted=5)
    taking = await begin(script, pool, 2)
    await script.finish(0, 1)
    await taking
    assert script.started == [0, 1, 2, 3]
    pool.release(2, 1)
    await asyncio.sleep(0)
    assert script.started == [0, 1, 2, 3, 4]               # two were taken, so three of five are still wanted


@scenario
async def test_groups_that_are_all_there_are_taken_before_those_just_released_are_sent_out():
    """Step 1 takes 0 and 1 and releases them; 2 and 3 are complete, so step 2 has them before the event loop starts 4 and 5. With 3 unusable it must wait."""
    for lost, ready in ({}, True), ({3: 1}, False):
        script = Script(lost)
        pool = pool_of(script, 2, max_staleness=1)
        taking = await begin(script, pool, 2)
        assert not pool.ready(1)
        await script.finish(0, 1, 2, 3)
        await taking
        pool.release(2, 1)
        assert pool.ready(2) == ready and pool.ready(1)
        with pytest.raises(StopIteration) as done:         # the coroutine's end: nothing was awaited
            pool.take(2 if ready else 1).send(None)
        assert numbers(done.value.value) == ([2, 3] if ready else [2]) and script.started == [0, 1, 2, 3]


@scenario
async def test_drained_waits_for_what_is_in_flight_and_leaves_it_to_be_taken():
    """0 is taken, 1 and 2 are in flight; 3 waits for an engine that died, so nobody waits for it."""
    script = Script()
    pool = pool_of(script, 1, max_staleness=3)
    taking = await begin(script, pool, 1)
    await script.finish(0)
    await taking
    draining = asyncio.ensure_future(pool.drained({3}))
    await script.finish(2)
    assert not draining.done()
    await script.finish(1)
    assert draining.done() and numbers(await pool.take(2)) == [1, 2] and script.started == [0, 1, 2, 3]


@scenario
async def test_a_dropped_group_is_counted_and_its_replacement_goes_to_the_back():
    """Group 0 keeps one rollout of two, fewer than min_rollouts: 1 and 2 are taken, 2 being its replacement."""
    script = Script({0: 1})
    pool = pool_of(script, 2)
    taking = await begin(script, pool, 2)
    await script.finish(0, 1)
    await script.finish(2)
    assert numbers(await taking) == [1, 2]
    assert (pool.dropped_groups, pool.dropped) == (1, Counter(unscored=1))


@scenario
async def test_the_dynamic_filter_keeps_what_is_strictly_inside_its_band():
    """Rewards 0 and 0, 1 and 1, 0 and 1: only the third teaches anything; the others are counted, and known to the pass rate."""
    rewards = {0: (0.0, 0.0), 1: (1.0, 1.0), 2: (0.0, 1.0), 3: (1.0, 0.0)}

    async def run_group(n, prompt):
        return Group(n, prompt, rollouts=[[Trajectory(0, n, reward=r)] for r in rewards[n % 4]])

    pool = pool_of(run_group, 2, band=(0.0, 1.0))
    assert numbers(await pool.take(2)) == [2, 3]
    assert pool.dropped == Counter(filtered=4) and numbers(pool.considered) == [0, 1, 2, 3]


@pytest.mark.parametrize("lost, words", [
    (Group(0, {}, dropped=Counter(error_ValueError=2), errors=["rollout 0 of prompt 0: ValueError: boom"]), r"5 prompt groups in a row.*error_ValueError': 10.*boom"),
    (Group(0, {}, rollouts=[[Trajectory(0, 0, reward=1.0)]] * 2), r"5 prompt groups in a row.*filtered': 10.*--dynamic-filter"),
])
@scenario
async def test_a_starved_pool_stops_with_counts_and_the_way_out(lost, words):
    """b14: every group fails, or is uniform; after give_up_after of them in a row the run ends with a message instead of waiting for ever."""
    async def run_group(n, prompt):
        return lost

    with pytest.raises(ValueError, match=words):
        await pool_of(run_group, 2, give_up_after=5, band=(0.0, 1.0)).take(2)


@scenario
async def test_losses_in_between_do_not_add_up_to_giving_up():
    async def every_other(n, prompt):
        return usable(n, 2 if n % 2 else 0)

    assert numbers(await pool_of(every_other, 8, give_up_after=2).take(4)) == [1, 3, 5, 7]


@settings(max_examples=100, deadline=None)
@given(per_step=st.integers(1, 4), lag=st.integers(0, 2), order=st.sampled_from(["start", "finished"]), killed=st.integers(0, 5),
       delays=st.lists(st.integers(0, 12), min_size=40, max_size=40), lost=st.sets(st.integers(0, 30), max_size=8))
@scenario
async def test_staleness_is_bounded_and_every_prompt_is_trained_once_or_dropped_for_a_reason(per_step, lag, order, killed, delays, lost):
    """Whatever the durations and losses, in either order, and across a kill and resume before step `killed`, whose checkpoint
    is the state after the step before: no group starts more than `lag` versions before it is trained, none is trained
    twice, and every number up to the last is trained, lost (counted), in flight, or in line again."""
    version, started_at = 0, {}

    async def run_group(n, prompt):
        started_at[n] = version
        for _ in range(delays[n % 40]):
            await asyncio.sleep(0)
        return usable(n, 0 if n in lost else 2)

    def make() -> Pool:
        return pool_of(run_group, per_step, max_staleness=lag, order=order, version=version)

    pool, trained = make(), []
    for step in range(6):
        if step == killed:
            state = pickle.loads(pickle.dumps(pool.state()))
            pool.cancel()
            pool = make()
            pool.load_state(state)
        groups = await pool.take(per_step)
        assert all(0 <= version - started_at[n] <= lag for n in numbers(groups))
        trained += numbers(groups)
        version += 1
        pool.release(per_step, version)
    assert len(trained) == len(set(trained)) and not set(trained) & lost
    under_way = {f.index for f in pool.running} | set(pool.pending)
    assert set(range(pool.next)) == set(trained) | (set(range(pool.next)) & lost) | under_way
    assert not under_way & set(trained)
    assert pool.dropped_groups == len((set(range(pool.next)) & lost) - under_way) + pool.dropped["stale_groups"]
    pool.cancel()


@scenario
async def test_a_resumed_pool_keeps_what_was_complete_and_issues_the_rest_first():
    """b20: 0 and 1 trained, 2 complete and 3 in flight when saved: the resumed pool has 2, starts 3 again, then 4, and skips nothing."""
    first = Script()
    pool = pool_of(first, 2, max_staleness=1)
    taking = await begin(first, pool, 2)
    await first.finish(0, 1, 2)
    await taking
    state = pickle.loads(pickle.dumps(pool.state()))
    pool.cancel()
    script = Script()
    resumed = pool_of(script, 2, max_staleness=1, version=1)
    resumed.load_state(state)
    taking = await begin(script, resumed, 2)
    assert script.started == [3, 4, 5]
    await script.finish(3)
    assert numbers(await taking) == [2, 3]


@scenario
async def test_a_resumed_pool_drops_what_was_complete_and_has_grown_too_old():
    """In order of finish a checkpoint may hold a straggler that the release behind it drops: so does the resumed run, and issues its prompt again."""
    first = Script()
    pool = pool_of(first, 1, max_staleness=1, order="finished")
    for version, ready in ((1, 1), (2, 2)):
        taking = await begin(first, pool, 1)
        await first.finish(ready)
        await taking
        if version == 1:
            pool.release(1, version)
    await first.finish(0)
    state = pool.state()
    pool.cancel()
    script = Script()
    resumed = pool_of(script, 1, max_staleness=1, order="finished", version=2)
    resumed.load_state(state)
    resumed.release(0, 2)
    taking = await begin(script, resumed, 1)
    await script.finish(*script.started[:1])
    assert len(await taking) == 1 and resumed.dropped["stale_groups"] == 1 and sorted(script.started) == [0, 3]


def test_what_runs_together_ends_together():
    """One of three fails: the error comes when the others have ended, and nothing of them goes on."""
    ended = []

    async def one(n: int):
        try:
            await asyncio.sleep(0.02 if n == 0 else 60)
            raise OSError("gone")
        finally:
            ended.append(n)

    with pytest.raises(OSError, match="gone"):
        asyncio.run(together([one(0), one(1), one(2)]))
    assert sorted(ended) == [0, 1, 2]


def test_n04_a_group_short_of_a_rollout_still_counts_each_rollout_once():
    """Four rollouts in 1, 4, 1 and 2 segments: mean reward 0.5 (not 0.375 over rows), advantages +-0.866025 on each row of a rollout."""
    from estimators import collate, grpo

    rewards, rows = [1.0, 0.0, 0.0, 1.0], [1, 4, 1, 2]
    rollouts = []
    for i, (reward, n) in enumerate(zip(rewards, rows)):
        segments = []
        for _ in range(n):
            t = Trajectory(rollout=i, group=0, reward=reward)
            t.extend([5, 6])
            t.extend([7], logprobs=[-0.5], policy_versions=[0])
            segments.append(t)
        rollouts.append(segments)
    batch = collate(rollouts, AGGREGATIONS["token-mean"])
    assert (len(batch.rollout_rewards), len(batch.lengths), batch.rollout_rewards.mean().item()) == (4, 8, 0.5)
    assert grpo(batch, None)[:, 2].tolist() == pytest.approx([0.866025] + [-0.866025] * 5 + [0.866025] * 2, abs=1e-5)


# ---------------------------------------------------------------------------------------------------- prompts
def test_every_epoch_visits_every_prompt_once_in_an_order_of_its_own():
    stream = PromptStream([{"prompt": i} for i in range(20)], seed=3)
    epochs = [[stream[e * 20 + i]["prompt"] for i in range(20)] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(20)) and epochs[0] != epochs[1]
    assert stream.epoch(19) == 0 and stream.epoch(20) == 1
    assert [PromptStream(stream.prompts, 4)[i]["prompt"] for i in range(20)] != epochs[0]


def test_prompts_come_from_a_jsonl_file_split_by_its_field_or_by_a_fixed_draw(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"q{i}", "label": i}) + "\n" for i in range(30)))
    cfg = GeneratorConfig(prompts=str(file))
    train, held_out = read_prompts(cfg, "train"), read_prompts(cfg, "eval")
    assert len(train) == 27 and len(held_out) == 3 and sorted(r["label"] for r in train + held_out) == list(range(30))
    assert [r["label"] for r in held_out] != [27, 28, 29] and read_prompts(cfg, "eval") == held_out       # drawn, and the same each time
    file.write_text("".join(json.dumps({"prompt": "q", "split": s}) + "\n" for s in ("train", "eval", "train")))
    assert len(read_prompts(cfg, "train")) == 2 and len(read_prompts(cfg, "eval")) == 1


def test_prompts_come_from_a_data_set_that_the_datasets_package_loads(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": [{"role": "user", "content": f"q{i}"}], "label": str(i)}) + "\n" for i in range(20)))
    cfg = GeneratorConfig(prompts=str(tmp_path))
    rows = read_prompts(cfg, "eval") + read_prompts(cfg, "train")
    assert len(rows) == 20 and all(r["messages"] == [{"role": "user", "content": f"q{r['label']}"}] for r in rows)


def test_a_line_that_is_not_json_is_named(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "x"}\n{"prompt": \n')
    with pytest.raises(ValueError, match="p.jsonl, line 2 is not JSON"):
        read_prompts(GeneratorConfig(prompts=str(file)), "train")


def test_a_prompt_row_without_text_is_named(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"split": "train", "label": 3}\n{"split": "eval", "prompt": "x"}\n')
    with pytest.raises(ValueError, match="Prompt 0 of the train split has neither"):
        read_prompts(GeneratorConfig(prompts=str(file)), "train")


def test_the_arithmetic_split_shares_no_sum_in_either_order():
    from recipes.arithmetic import problems

    held_out, train = {frozenset(p) for p in problems("eval")}, {frozenset(p) for p in problems("train")}
    assert len(held_out) == 1000 and len(train) == 4050 and not held_out & train


@pytest.mark.parametrize("given, words", [
    ("{", "no JSON"), ("[1]", "want a JSON object"), ('{"speculative_confg": {}}', "Close to it: speculative_config"), ('{"max_model_len": 9}', "it is --context-length"),
    ('{"logprobs_mode": "raw_logprobs"}', "after the temperature"), ('{"quantization": "fp8"}', "another policy"), ('{"stream_interval": 8}', "label of the next version"),
    ('{"speculative_config": {"method": "eagle", "model": "x"}}', "dummy or old weights"), ('{"spec_method": "mtp"}', "dummy or old weights"),
    ('{"speculative_config": {"method": "ngram", "rejection_sample_method": "synthetic"}}', "would not sample")])
def test_engine_arguments_that_do_not_exist_or_break_what_training_counts_on_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        GeneratorConfig(engine_args=given)


def test_other_engine_arguments_pass_verbatim():
    given = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "kv_cache_dtype": "fp8", "enable_expert_parallel": True, "enable_prefix_caching": False}
    cfg = GeneratorConfig(engine_args=json.dumps(given))
    assert cfg.engine_arguments == given and cfg.quantised_cache and not GeneratorConfig().quantised_cache


@pytest.mark.parametrize("flags, words", [
    (dict(temperature=0.0), "--temperature 0.0"), (dict(group_size=0), "--group-size 0"), (dict(max_new_tokens=0), "--max-new-tokens 0"),
    (dict(max_num_batched_tokens=64), "--max-num-batched-tokens 64"), (dict(max_staleness=-1), "--max-staleness -1"),
    (dict(max_staleness=0, partial_rollout=True), "--partial-rollout with --max-staleness 0"), (dict(give_up_rounds=0), "--give-up-rounds 0"),
])
def test_flags_that_cannot_work_are_refused_by_name(flags, words):
    with pytest.raises(ValueError, match=words):
        GeneratorConfig(**flags)


# ---------------------------------------------------------------------------------------------------- completions
def told(*token_ids: int) -> FlatLogprobs:
    """-0.1, -0.2, ... of these tokens."""
    return FlatLogprobs(token_ids=list(token_ids), logprobs=[-(i + 1) / 10 for i in range(len(token_ids))])


@pytest.mark.parametrize("known", [[], [11, 12], [11, 99, 13]])
def test_n17_a_reply_without_a_logprob_for_each_sampled_token_is_refused_and_named(known):
    with pytest.raises(ValueError, match="train-7-0"):
        read_completion([11, 12, 13], told(*known), [0, 0, 0], "stop", None, "train-7-0")


def test_an_aborted_request_is_no_answer():
    """b16: "abort" is not the end of an answer."""
    with pytest.raises(ValueError, match="'abort' after 1 tokens"):
        read_completion([11], told(11), [0], "abort", None, "train-7-0")


def test_b16_a_complete_reply_keeps_ids_logprobs_and_the_version_of_each_token():
    """Three tokens of version 3, two of version 4."""
    completion = read_completion([11, 12, 13, 14, 15], told(*range(11, 16)), [3, 3, 3, 4, 4], "length", None, "x")
    assert completion.token_ids.tolist() == [11, 12, 13, 14, 15] and completion.policy_versions.tolist() == [3, 3, 3, 4, 4]
    np.testing.assert_allclose(completion.logprobs, [-0.1, -0.2, -0.3, -0.4, -0.5], rtol=1e-6)


def test_experts_of_all_tokens_but_the_last_come_in_the_smallest_signed_type():
    """4 prompt tokens and 2 sampled: 5 rows. vLLM's uint8 would make a -1 of the trainer expert 255."""
    def read(experts):
        return read_completion([11, 12], told(11, 12), [0, 0], "stop", None, "train-7-0", experts, prompt=4)
    few, many = np.full((5, 3, 2), 127, np.uint8), np.full((5, 3, 2), 128, np.uint8)
    assert read(few).routed_experts.dtype == np.int8 and read(many).routed_experts.dtype == np.int16
    assert (read(few).routed_experts == few).all() and (read(many).routed_experts == many).all() and read(None).routed_experts is None
    with pytest.raises(ValueError, match="experts of 4 tokens .train-7-0., which has 4 . 2"):
        read(few[1:])


class ScriptedEngine:
    """Counts Ray-like calls and answers each request with its name."""

    def __init__(self):
        self.calls, self.generate = [], SimpleNamespace(remote=self.answer)

    async def answer(self, requests, sampling):
        self.calls.append(len(requests))
        await asyncio.sleep(0)
        if any(r[0] == "bad" for r in requests):
            raise RuntimeError("engine refused")
        return [r[0] for r in requests]


def test_requests_of_one_pass_travel_in_one_call_and_a_late_one_holds_nobody_up():
    async def scenario():
        engine = ScriptedEngine()
        batcher = Batcher(engine, together=True)

        async def late():
            await asyncio.sleep(0.01)
            return await batcher.generate(("c",), Sampling())

        assert await asyncio.gather(*[batcher.generate((name,), Sampling()) for name in ("a", "b")], late()) == ["a", "b", "c"]
        assert engine.calls == [2, 1]
        alone = Batcher(engine, together=False)
        await asyncio.gather(*[alone.generate((name,), Sampling()) for name in ("a", "b")])
        assert engine.calls == [2, 1, 1, 1]

    asyncio.run(scenario())


def test_an_engine_error_reaches_every_rollout_of_the_call():
    async def scenario():
        batcher = Batcher(ScriptedEngine(), together=True)
        results = await asyncio.gather(*[batcher.generate((name,), Sampling()) for name in ("a", "bad")], return_exceptions=True)
        assert [str(r) for r in results] == ["engine refused"] * 2

    asyncio.run(scenario())


def test_seeds_depend_on_run_rollout_and_turn_and_on_nothing_else():
    keys = [(0, 1, 2, 3), (1, 1, 2, 3), (0, 2, 2, 3), (0, 1, 3, 3), (0, 1, 2, 4)]
    assert len({rollout_seed(*key) for key in keys}) == 5 and [rollout_seed(*k) for k in keys] == [rollout_seed(*k) for k in keys]


# ---------------------------------------------------------------------------------------------------- the real engine
def sums(count: int) -> list[list[int]]:
    """Ids of the first prompts of the default task."""
    from transformers import AutoTokenizer

    from agent import render_prompt
    from recipes.arithmetic import prompts

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    return [render_prompt(tokenizer, p["messages"]) for p in prompts("train")[4000: 4000 + count]]


def ask(loop, engine, requests, temperature=0.7, seed=None) -> list:
    return loop.run_until_complete(asyncio.ensure_future(gathered(engine, requests, temperature, seed), loop=loop))


async def gathered(engine, requests, temperature, seed):
    sampling = [Sampling(temperature, None if seed is None else seed + i) for i in range(len(requests))]
    return await engine.generate.remote([(f"t-{np.random.randint(1 << 60)}", np.array(ids, np.int32), n, stop) for ids, n, stop in requests], sampling)


def trainer_logprobs(loop, cfg, parts, prompt, completion) -> torch.Tensor:
    """The trainer's logprobs of a completion, by the path that training takes."""
    from estimators import collate

    trajectory = Trajectory(0, 0, reward=0.0)
    trajectory.extend(prompt)
    trajectory.extend(completion.token_ids, completion.logprobs, completion.policy_versions)
    batch = collate([[trajectory]], AGGREGATIONS["token-mean"], cfg.generator.temperature)
    return loop.run_until_complete(parts.trainer.logprobs(batch))[0, len(prompt):]


def test_b13_and_n16_the_models_files_change_no_sampling_field_and_both_sides_divide_by_the_temperature(stack, loop):
    """generation_config.json says top_k 1, top_p 0.1, temperature 0.1, a penalty and 1 new token; the run samples at 0.7.

    The engine's logprobs equal the trainer's log_softmax(logits / 0.7), which any of those fields would move, and the
    answers differ from each other, which top_k 1 would not allow.
    """
    cfg, parts = stack
    prompt = sums(1)[0]
    answers = ask(loop, parts.engines[0], [(prompt, 12, [])] * 16)
    gaps = [np.abs(trainer_logprobs(loop, cfg, parts, prompt, a).numpy() - a.logprobs).max() for a in answers]
    assert max(gaps) <= 1e-4
    assert len({tuple(a.token_ids) for a in answers}) > 1 and max(len(a.token_ids) for a in answers) > 1


def test_seeded_requests_give_the_same_tokens_alone_and_in_any_company(stack, loop):
    _, parts = stack
    questions = sums(20)
    together = ask(loop, parts.engines[0], [(q, 10, []) for q in questions], seed=5)
    assert len({tuple(a.token_ids) for a in together}) > 5
    for i in (0, 7, 19):
        alone = ask(loop, parts.engines[0], [(questions[i], 10, [])], seed=5 + i)[0]
        assert alone.token_ids.tolist() == together[i].token_ids.tolist()
        np.testing.assert_allclose(alone.logprobs, together[i].logprobs, atol=1e-5)


def test_finish_reasons_and_limits_are_the_engines_own(stack, loop):
    _, parts = stack
    cut, greedy = (ask(loop, parts.engines[0], [(sums(1)[0], n, [])], temperature=0.0)[0] for n in (1, 40))
    assert (len(cut.token_ids), cut.finish_reason) == (1, "length")
    assert (greedy.finish_reason, greedy.token_ids[-1]) == ("stop", 258)       # 258 is <|im_end|>: it stays in the ids
    assert greedy.token_ids[0] == cut.token_ids[0]


@pytest.mark.parametrize("behind", [0, 3])
def test_tokens_sent_before_a_pause_keep_their_version_however_far_the_client_is_behind(behind):
    """300 requests, two in every three of which have tokens; a client that takes the engine's steps in pieces, as AsyncLLM does, and is `behind` steps behind
    when the publish ends: each token that the engine sent before is of version 0, each after it of version 1. While a parameter is missing nothing resumes."""
    from generator import Engine

    async def scenario() -> list[Counter]:
        states = {f"internal {i}": SimpleNamespace(external_req_id=f"r{i}", tokens=[]) for i in range(300)}
        for state in states.values():
            state.detokenizer = SimpleNamespace(num_output_tokens=lambda state=state: len(state.tokens))
        queue, steps, going, missing, resumed = asyncio.Queue(), behind + 4, asyncio.Event(), [], []

        async def handler() -> None:
            while True:
                step = await queue.get()
                await going.wait()
                for i, state in enumerate(states.values()):
                    state.tokens += [step] if i % 3 else []
                    if i % 128 == 127:
                        await asyncio.sleep(0)

        engine = Engine.__ray_metadata__.modified_class("", GeneratorConfig(max_num_seqs=300), "float32", "gloo", False)
        engine.version, engine.loop = 0, asyncio.get_running_loop()
        engine.llm = SimpleNamespace(engine_core=SimpleNamespace(outputs_queue=queue), output_processor=SimpleNamespace(request_states=states), resume_generation=lambda: asyncio.sleep(0, resumed.append(1)),
                                     collective_rpc=lambda method, kwargs: asyncio.sleep(0, [[], list(missing)]))      # of two workers
        handling = asyncio.ensure_future(handler())
        for step in range(steps):
            queue.put_nowait(step)
            if step >= behind:
                going.set()
                await asyncio.sleep(0)
        for last, names in ((False, []), (True, ["head.weight"])):            # part of the weights, and all of them but one
            missing[:] = names
            await engine.receive({}, last)
            if last:
                assert await engine.resume(1) == ["head.weight"]
            else:
                with pytest.raises(AssertionError, match="before the last weights"):
                    await engine.resume(1)
            assert engine.version == 0 and not engine.edges and not resumed
        missing.clear()
        await engine.receive({}, True)
        assert await engine.resume(1) == [] and resumed
        handling.cancel()
        assert engine.version == 1
        return [engine.edges[f"r{i}"] for i in range(300)]

    assert asyncio.run(scenario()) == [[(behind + 4 if i % 3 else 0, 0)] for i in range(300)]


def test_an_engine_refuses_to_sample_before_version_0(cluster, hostile_model):
    """Dummy weights must never be sampled; no vLLM is started for this."""
    import ray

    from generator import Engine

    engine = Engine.options(num_cpus=0).remote(hostile_model, GeneratorConfig(), "float32", "gloo", True)
    with pytest.raises(RuntimeError, match="publish a version"):
        ray.get(engine.generate.remote([("x", np.array([1], np.int32), 1, [])], [Sampling()]))


def test_a_rollouts_experts_leave_the_worker_as_a_reference(cluster, monkeypatch):
    """Two turns of an Env; what comes back holds a reference to [T - 1, 1, 2], and the reference's rows are the engine's. Where the object store takes no more, the rollout is dropped."""
    import ray

    from generator import AgentWorker, Completion

    async def remote(requests, sampling):
        (_, ids, *_), = requests
        experts = np.array([[[p, len(ids)]] for p in range(len(ids) + 1)], np.int8)
        return [Completion(np.array([70, 258], np.int32), np.array([-1.0, -1.0], np.float32), np.zeros(2, np.int32), "stop", None, experts)]

    class TwoTurns(Env):
        async def step(self, action):
            self.turn = self.__dict__.get("turn", 0) + 1
            return Result(reward=1.0, terminated=self.turn == 2, observation="again")

    worker = AgentWorker.__ray_metadata__.modified_class(str(TINY), GeneratorConfig(max_new_tokens=None))
    worker.agent = TwoTurns
    group, = asyncio.run(worker.run_groups([(0, {"prompt": "1+1"})], SimpleNamespace(generate=SimpleNamespace(remote=remote)), 1, 1.0, None, "routes"))
    (segment,), = group.rollouts
    assert isinstance(segment.routed_experts, ray.ObjectRef)
    experts, first = ray.get(segment.routed_experts)[:, 0], int(segment.response_mask.argmax())
    assert experts[:, 0].tolist() == list(range(len(segment) - 1))
    assert (experts[: first + 1, 1] == first).all() and (experts[first + 1:, 1] > first).all()

    def full(record):
        raise ray.exceptions.ObjectStoreFullError("full")

    monkeypatch.setattr(ray, "put", full)
    group, = asyncio.run(worker.run_groups([(0, {"prompt": "1+1"})], SimpleNamespace(generate=SimpleNamespace(remote=remote)), 2, 1.0, None, "full"))
    assert not group.rollouts and group.dropped == {"error_ObjectStoreFullError": 2} and "rollout 0 of prompt 0: ObjectStoreFullError" in group.errors[0]


AGENT = '''
from agent import Env, Result

class AgentRunner(Env):
    async def step(self, action):
        kind = self.prompt["kind"]
        if kind == "raises": raise KeyError("broken tool")
        if kind == "unscored": return Result(reward=None)
        if kind == "nan": return Result(reward=float("nan"))
        if kind == "text": return Result(reward="1.0")
        if kind == "hangs":
            import asyncio
            await asyncio.sleep(600)
        if kind == "turns":
            self.n = self.__dict__.get("n", 0) + 1
            return Result(reward=0.5, terminated=self.n == 2, observation="again")
        return Result(reward=1.0, info={"length": len(action)})
'''


def test_b14_every_kind_of_failing_rollout_is_dropped_counted_and_named_and_the_others_stay(stack, loop, tmp_path):
    """An agent that raises, hangs, gives no reward, NaN or a string; a prompt that fills the context; and two that work."""
    import ray
    from dataclasses import replace

    from generator import AgentWorker

    cfg, parts = stack
    file = tmp_path / "unruly.py"
    file.write_text(AGENT)
    gen = replace(cfg.generator, agent=str(file), rollout_timeout=6.0)
    worker = AgentWorker.options(num_cpus=0).remote(cfg.model, gen)
    kinds = ["fine", "raises", "hangs", "unscored", "nan", "text", "turns", "long"]
    prompts = [(i, {"prompt": "1+1" if kind != "long" else "x" * 500, "kind": kind}) for i, kind in enumerate(kinds)]
    groups = dict(zip(kinds, ray.get(worker.run_groups.remote(prompts, parts.engines[0], 2, 1.0, 0, "unruly"))))
    assert {k: dict(g.dropped) for k, g in groups.items()} == {
        "fine": {}, "raises": {"error_KeyError": 2}, "hangs": {"timeout": 2}, "unscored": {"unscored": 2}, "nan": {"unscored": 2},
        "text": {"error_TypeError": 2}, "turns": {}, "long": {"prompt_too_long": 2}}
    assert "rollout 2 of prompt 1: KeyError: 'broken tool'" in groups["raises"].errors
    assert [s[0].reward for s in groups["fine"].rollouts + groups["turns"].rollouts] == [1.0] * 4
    two = groups["turns"].rollouts[0][0]
    assert np.diff(two.response_mask.astype(int)).tolist().count(1) == 2       # two answers, one segment
    assert len(set(two.policy_versions[two.response_mask])) == 1 and two.policy_versions[two.response_mask][0] >= 0
    ray.kill(worker)


def test_b15_256_rollouts_at_once_are_all_answered(stack, loop):
    """Each group in a call of its own, all under way before the first answer: none is lost to a limit on connections or calls."""
    cfg, parts = stack
    calls = [parts.run_groups([(n, p)], 0, 8, 1.0, 0, "b15") for n, p in enumerate(prompts("train")[:32])]

    async def all_at_once():
        return await asyncio.gather(*calls)

    groups = [g for part in loop.run_until_complete(all_at_once()) for g in part]
    assert sum(len(g.rollouts) for g in groups) == 256 and not any(g.dropped for g in groups)
    assert len({segments[0].rollout for g in groups for segments in g.rollouts}) == 256
