"""Splitting, alignment and schedules by hand; FSDP2 ranks, checkpoints and exports for real."""

import json
import math
import time
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import trainer
from agent import Trajectory
from estimators import collate, dr_grpo, supervised_batch
from losses import AGGREGATIONS, LossConfig
from trainer import (
    Learner, Rank, Replay, Shape, TokenScores, Trainer, TrainerConfig, fetch, forward, forward_values, kept_bytes, learning_rate, plan_microbatches, rank_memory, recorded_experts, replay_handles, replaying, take_rows)

from conftest import TINY

Bare = Rank.__ray_metadata__.modified_class    # the class behind the Ray actor, for what one process can show


def rollouts(lengths: list[int], seed: int = 0) -> list[list[Trajectory]]:
    """Random rollouts, 4 a prompt; behaviour logprobs are noise around log(1/20)."""
    draw = np.random.default_rng(seed)
    out = []
    for i, n in enumerate(lengths):
        t = Trajectory(rollout=i, group=i // 4, reward=float(draw.integers(2)))
        t.extend(draw.integers(60, 90, 6))
        t.extend(draw.integers(60, 90, n), logprobs=draw.normal(-3, 0.3, n), policy_versions=[0] * n)
        out.append([t])
    return out


def batch_of(lengths, minibatches: int = 1, seed: int = 0):
    batch = collate(rollouts(lengths, seed), AGGREGATIONS["token-mean"], 0.8, minibatches)
    batch.advantages = dr_grpo(batch, None)
    return batch


# ---------------------------------------------------------------------------------------------------- by hand
@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=4, max_size=40), ranks=st.integers(1, 4), budget=st.integers(40, 400))
def test_every_row_is_in_one_microbatch_within_the_budget_and_all_ranks_have_as_many(lengths, ranks, budget):
    batch = batch_of(lengths)
    plan = plan_microbatches(batch, torch.arange(len(lengths)), ranks, budget)
    assert sorted(r for mine in plan for rows in mine for r in rows) == list(range(len(lengths)))
    assert len({len(mine) for mine in plan}) == 1
    for rows in (rows for mine in plan for rows in mine):
        assert len(rows) * max((int(batch.lengths[r]) for r in rows), default=0) <= max(budget, 36) or len(rows) == 1


def test_segments_of_a_rollout_stay_in_one_microbatch():
    segments = [[t[0] for t in rollouts([20, 20, 20])]]
    for t in segments[0]:
        t.rollout, t.group = 0, 0
    batch = collate(segments + [[t] for (t,) in rollouts([20] * 5)[1:]], AGGREGATIONS["token-mean"])
    plan = plan_microbatches(batch, torch.arange(len(batch.lengths)), 2, 60)
    assert any({0, 1, 2} <= set(rows) for mine in plan for rows in mine)


def test_an_idle_microbatch_has_no_weight_and_rows_are_cut_to_their_longest():
    batch = batch_of([3, 9, 5, 7])
    idle = take_rows(batch, [])
    assert idle.loss_weight.sum() == 0 and not idle.response_mask.any() and len(idle.token_ids) == 1
    small = take_rows(batch, [0, 2])
    assert small.token_ids.shape == (2, 11) and torch.equal(small.token_ids, batch.token_ids[[0, 2], :11])
    assert torch.equal(small.rollout_rewards, batch.rollout_rewards)          # per-rollout fields stay whole


class Fixed(torch.nn.Module):
    """A model of three tokens that always answers with the given logits [b, t, 3]."""

    def __init__(self, logits):
        super().__init__()
        self.answer = logits

    def forward(self, input_ids, use_cache, logits_to_keep=slice(None)):
        return types.SimpleNamespace(logits=self.answer[:, logits_to_keep])


def three_tokens(temperature: float):
    """Token 1 given, tokens 2 and 0 sampled."""
    rows = Trajectory(rollout=0, group=0, reward=0.0)
    rows.extend([1])
    rows.extend([2, 0], [-1.0, -1.0], [0, 0])
    return collate([[rows]], AGGREGATIONS["token-mean"], temperature)


def test_n16_logprobs_are_those_of_the_tempered_softmax_one_column_before():
    """Logits [2, 1, 0] at temperature 0.5 for token 0: log_softmax([4, 2, 0])[0] = -0.142932, not the raw -0.407606."""
    model = Fixed(torch.tensor([[[0.0, 0.0, 0.0], [2.0, 1.0, 0.0], [9.0, 9.0, 0.0]]]))   # columns 0 and 1 predict tokens 1 and 2
    logprobs, entropy = forward(model, three_tokens(0.5), torch.device("cpu"), entropy=True)
    torch.testing.assert_close(logprobs, torch.tensor([[0.0, -math.log(3), -0.142932]]), atol=1e-6, rtol=0)
    p = torch.softmax(torch.tensor([4.0, 2.0, 0.0]), -1)
    torch.testing.assert_close(entropy, torch.tensor([[0.0, math.log(3), -(p * p.log()).sum()]]), atol=1e-6, rtol=0)


def test_values_come_from_the_state_before_their_token():
    """The critic says 5, 7, 9 at columns 0, 1, 2; V of tokens 1 and 2 is 5 and 7, whatever the temperature."""
    values = forward_values(Fixed(torch.tensor([[[5.0], [7.0], [9.0]]])), three_tokens(0.5), torch.device("cpu"))
    assert values.tolist() == [[0.0, 5.0, 7.0]]


def test_learning_rate_warms_up_and_decays_to_zero():
    cfg = TrainerConfig(warmup_steps=4, decay="linear")
    assert [learning_rate(cfg, 12, s) for s in (0, 1, 3, 4, 8, 12)] == [0.25, 0.5, 1.0, 1.0, 0.5, 0.0]
    cosine = TrainerConfig(warmup_steps=0, decay="cosine")
    assert [round(learning_rate(cosine, 8, s), 6) for s in (0, 4, 8)] == [1.0, 0.5, 0.0]
    assert learning_rate(TrainerConfig(warmup_steps=2, decay="constant"), 12, 11) == 1.0


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(1, 40), words=st.integers(2, 30), temperature=st.floats(0.1, 2.0), entropy=st.booleans(), unsaid=st.booleans(), never=st.booleans(), at_once=st.integers(1, 700), seed=st.integers(0, 1000))
def test_logprobs_entropies_and_their_gradients_are_those_of_a_float64_softmax_whatever_the_pieces(tokens, words, temperature, entropy, unsaid, never, at_once, seed):
    """Oracle: autograd through log_softmax in float64. bfloat16 logits get a bfloat16 gradient, of the same numbers. A logit of -inf (`never`) is a chance of 0, whose p log p is 0."""
    draw = torch.Generator().manual_seed(seed)
    logits, targets = (4 * torch.randn(tokens, words, generator=draw)).bfloat16(), torch.randint(words, (tokens,), generator=draw)
    logits[:, 0] = -math.inf if never else 0.0             # of some targets too
    weight, of_entropy = torch.randn(2, tokens, generator=draw)
    word = words - 1 if unsaid else None
    exact = logits.double().requires_grad_()
    lowered = exact / temperature + F.one_hot(torch.tensor(words - 1), words) * (-100.0 / temperature) * unsaid
    log_p = lowered.log_softmax(-1)
    wanted, h = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p.clamp(min=-1e9)).sum(-1)
    ((wanted * weight).sum() + (h * of_entropy).sum() * entropy).backward()
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        mine = logits.to(dtype).requires_grad_()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "FLOAT_LOGITS", at_once)
            seen, seen_h = TokenScores.apply(mine, targets, temperature, entropy, word, None)
            ((seen * weight).sum() + (seen_h * of_entropy).sum() if entropy else (seen * weight).sum()).backward()
        torch.testing.assert_close(seen.double(), wanted.detach(), atol=2e-4, rtol=1e-5)
        assert entropy == (seen_h is not None) and mine.grad.dtype == dtype
        if entropy:
            torch.testing.assert_close(seen_h.double(), h.detach(), atol=2e-4, rtol=1e-5)
        torch.testing.assert_close(mine.grad.double(), exact.grad, atol=tolerance * (1 / temperature), rtol=tolerance)


def test_the_memory_of_a_rank_by_hand():
    """2^30 parameters: 16 GB, a critic as much again, a reference 4. 1,024 tokens x 2^20 logits x 6 bytes: 6 GB, and 1 of float32 pieces. 1,024 tokens x 32
    layers x (16 + 10 + 8) bytes for each of 2^15 units (hidden, queries and keys, MLP): 34 GB, recomputed 2. And 3 GB. Four ranks that split
    matrices and columns in two: states a quarter; logits a quarter; activations (16 + 18 / 2) / 2; gathered (6 x 2^28 + 8 x 2^27) / 2. Offloaded:
    no states, gathered 6 x 2^28 + 8 x 2^27. Two ranks with half of a layer's 2^28 expert parameters each gather 1 GB more than a dense model's, and a token
    keeps, for the MLP's 8 GB, 4 a hidden unit in each of 2 experts, also 8 GB, and 8 for each of an expert's 2^25 / (3 x 2^15) units, three times: 0.25 GB."""
    text = dict(vocab_size=2**20, num_hidden_layers=32, hidden_size=2**15, num_attention_heads=24, num_key_value_heads=8, head_dim=2**10, intermediate_size=2**15, num_experts_per_tok=2)
    config = types.SimpleNamespace(get_text_config=lambda: types.SimpleNamespace(**text))
    dense, cfg = Shape(parameters=2**30, layer=2**27, layer_experts=0, tables=2**28, num_experts=0), TrainerConfig(tokens_per_microbatch=1024)
    mixture = replace(dense, layer_experts=2**28, num_experts=8)

    def memory(shape=dense, ref=0, critic=0, **flags) -> tuple:
        return tuple(rank_memory(shape, config, replace(cfg, **flags), ref, critic).values())

    assert memory() == (16, 7 + 34, 3)
    assert memory(ref=2**30, critic=2**30, activation_checkpointing=True) == (36, 7 + 2, 3)
    assert memory(trainers=4, tp_size=2, cp_size=2) == (4, 6 / 4 + 1 + 12.5 + 1.25, 3)
    assert memory(trainers=4, dp_replicate_size=2) == (8, 7 + 34 + 2.5, 3)
    assert memory(offload_optimizer=True) == (0, 7 + 34 + 2.5, 3)
    assert memory(mixture, trainers=2, ep_size=2) == (8, 7 + 34.25 + 2.5 + 1, 3)


@pytest.mark.parametrize("more", [{}, {"hidden_size": 512}, {"num_attention_heads": 8, "intermediate_size": 2048, "moe_intermediate_size": 512}])
@pytest.mark.parametrize("mixture", [False, True])
def test_a_layer_keeps_the_bytes_that_the_memory_of_a_rank_counts(mixture, more):
    """Storages that autograd saves in a forward of transformers' class in bfloat16, weights aside, by 3 layers less those by 1: at most the formula, and it at most 15 % more (a shared expert, which this mixture has not)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    def saved(layers: int) -> tuple[int, object]:
        sizes = dict(vocab_size=64, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=128, num_hidden_layers=layers, dtype=torch.bfloat16)
        sizes |= dict(moe_intermediate_size=256, num_experts=8, num_experts_per_tok=4, decoder_sparse_step=1, mlp_only_layers=[]) if mixture else {"intermediate_size": 768}
        config = (Qwen3MoeConfig if mixture else Qwen3Config)(**sizes | more)
        model, kept = (Qwen3MoeForCausalLM if mixture else Qwen3ForCausalLM)(config).to(torch.bfloat16), {}
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.update({t.untyped_storage().data_ptr(): t.untyped_storage()}) or t, lambda t: t):
            model(input_ids=torch.zeros(2, 128, dtype=torch.long), use_cache=False)
        return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in weights), config

    counted, config = (saved(3)[0] - saved(1)[0]) / 2 / 256, saved(1)[1]
    assert 0.995 * counted <= kept_bytes(config, Shape.of(config), tp=1) <= 1.15 * counted


def test_the_shape_of_a_model_is_read_from_its_config_alone():
    """DeepSeek-V3 as its config class has it: 671 billion parameters, 256 experts of 3 x 7,168 x 2,048 a layer, tables of 129,280 x 7,168; and the embedded policy, whose tables are one."""
    from transformers import AutoConfig, DeepseekV3Config

    big, small = Shape.of(DeepseekV3Config()), Shape.of(AutoConfig.from_pretrained(TINY))
    assert round(big.parameters / 1e9) == 671 and (big.num_experts, big.layer_experts, big.tables) == (256, 256 * 3 * 7168 * 2048, 2 * 129280 * 7168)
    assert (small.num_experts, small.layer_experts, small.tables) == (0, 0, 262 * 128) and small.parameters == small.tables + 4 * small.layer + 128


# ---------------------------------------------------------------------------------------------------- routing replay
@pytest.fixture
def mixture(monkeypatch):
    """mixture(checkpointed) -> AutoModel's Qwen3-MoE in float32: a dense layer 0, layers 1 and 2 of 8 experts, 2 a token. Its constructor asks for a GPU, and its forward does not."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM
    from nemo_automodel.components.moe.parallelizer import apply_ac
    from transformers import Qwen3MoeConfig

    def make(checkpointed: bool = False):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
            vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=2,
            moe_intermediate_size=16, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[0], tie_word_embeddings=False, dtype=torch.float32), backend=BackendConfig())
        model.initialize_weights(torch.device("cpu"), torch.float32)
        with torch.no_grad():
            for p in (p for p in model.model.layers.parameters() if p.dim() > 1):
                p.mul_(5)                                                              # else a layer adds next to nothing
        if checkpointed:
            apply_ac(model)
        return model.eval()

    with torch.compiler.set_stance("force_eager"):                                 # to compile its activation would take longer than all else
        yield make


def gates(model) -> dict[int, torch.nn.Module]:
    return {int(name.split(".")[2]): m for name, m in model.named_modules() if hasattr(m, "router_replay")}


def taken(model, run) -> dict[int, torch.Tensor]:
    """Experts that each layer takes, [n, 2], in the forward that `run` makes."""
    seen, hooks = {}, []
    for layer, gate in gates(model).items():
        hooks.append(gate.register_forward_hook(lambda m, i, out, layer=layer: seen.update({layer: out[1]})))
    run()
    for hook in hooks:
        hook.remove()
    return seen


def other_choice(batch, seed: int = 0):
    """The batch with two random experts for each token of a row but its last, layer by layer; those of dense layer 0 are zeros, as vLLM has them."""
    draw, records = np.random.default_rng(seed), []
    for n in batch.lengths.tolist():
        experts = np.stack([draw.permutation(8)[:2] for _ in range(3 * (n - 1))]).reshape(n - 1, 3, 2).astype(np.int8)
        experts[:, 0] = 0
        records.append(experts)
    return replace(batch, routed_experts=records)


def mixing_rank(model, **flags):
    """A Rank of this process around `model`, not sharded, with its handles on."""
    rank = Bare(0, 1, "", TrainerConfig(warmup_steps=0, decay="constant", max_grad_norm=1e9, **flags), LossConfig(), "cpu", "float32", 10, 0)
    rank.model, rank.replays, rank.ref, rank.critic, rank.vision = model, replay_handles(model), None, None, None
    rank.policy = Learner(model, SimpleNamespace(device_mesh=None, moe_mesh=None), 1e-3, rank.cfg, 10)
    return rank


def test_n20_recorded_experts_become_rows_of_the_models_own_token_order():
    """Case n20 in a batch with a row of 11 tokens without a record: [2, 11, 1, 2]; -1 for the last token, the padding and the other row."""
    case, rows = json.loads((Path(__file__).parent / "cases.json").read_text()), [Trajectory(rollout=i, group=0, reward=0.0) for i in range(2)]
    case, = (c for c in case if c["id"].startswith("n20"))
    rows[0].extend(range(8))
    rows[0].extend([3], [-1.0], [0], np.array(case["given"]["turn2"]["rows"])[:, None])
    rows[1].extend(range(10))
    rows[1].extend([3], [-1.0], [0])
    batch = collate([[row] for row in rows], AGGREGATIONS["token-mean"])
    wide = recorded_experts(batch)
    assert wide.shape == (2, 11, 1, 2) and wide[0, :9, 0].tolist() == case["expect"]["rows_by_position"]
    assert (wide[0, 9:] == -1).all() and (wide[1] == -1).all()
    small = take_rows(batch, [0])
    assert torch.equal(recorded_experts(small), wide[:1, :9]) and recorded_experts(take_rows(batch, [1])) is None and take_rows(batch, []).routed_experts is None


def test_a_gate_takes_recorded_experts_and_keeps_its_own_where_there_are_none():
    """Tokens of the same two experts in another order, of none, of one other expert in two: differing 0 + 1/2 of 2 tokens."""
    handle = Replay()
    chosen = torch.tensor([[1, 3], [4, 5], [0, 7]])
    assert handle.apply(chosen) is chosen
    handle.recorded = torch.tensor([[3, 1], [-1, -1], [0, 2]])
    assert handle.apply(chosen).tolist() == [[3, 1], [4, 5], [0, 2]]
    assert (handle.tokens, handle.differing) == (2, 0.5)
    with pytest.raises(ValueError, match="--routing-replay off"):
        handle.apply(chosen[:2])


def test_replaying_a_models_own_choice_changes_nothing(mixture):
    """Logprobs to the last bit, no choice differs; 3 rows of 9, 15 and 11 tokens: 32 of 35 have a record."""
    batch, model = batch_of([3, 9, 5]), mixture()
    rank = mixing_rank(model)
    own, plain = {}, []
    own = taken(model, lambda: plain.append(rank.per_token(batch, [[0, 1, 2]], "logprobs")[0]))
    experts = torch.stack([torch.zeros_like(own[1]), own[1], own[2]], 1).view(3, 15, 3, 2)
    batch = replace(batch, routed_experts=[experts[i, : n - 1].numpy() for i, n in enumerate(batch.lengths.tolist())])
    assert torch.equal(rank.per_token(batch, [[0, 1, 2]], "logprobs")[0], plain[0])
    batch.old_logprobs = batch.behaviour_logprobs = plain[0]
    metrics, _ = rank.update(batch, [[[0, 1, 2], []]], "ppo")
    assert metrics["route_differs_frac"] == (0, 64) and metrics["route_recorded_frac"] == (64, 70)     # of two layers


def test_recorded_experts_are_taken_at_their_positions_and_nowhere_else(mixture):
    """Of layers 1 and 2; padding and each row's last token keep the live choice, which after layer 1 is that of a forward with other experts."""
    batch, model = batch_of([3, 9, 5]), mixture()
    rank, batch = mixing_rank(model), other_choice(batch_of([3, 9, 5]))
    live = taken(model, lambda: rank.per_token(replace(batch, routed_experts=None), [[0, 1, 2]], "logprobs"))
    seen = taken(model, lambda: rank.per_token(batch, [[0, 1, 2]], "logprobs"))
    known = recorded_experts(batch).flatten(0, 1)                                  # [45, 3, 2]
    for layer in (1, 2):
        mask = known[:, layer] >= 0
        assert torch.equal(seen[layer][mask], known[:, layer][mask].long()) and int(mask[:, 0].sum()) == 32
        assert not torch.equal(seen[layer][mask], live[layer][mask])
    assert torch.equal(seen[1][known[:, 1, 0] < 0], live[1][known[:, 1, 0] < 0])
    assert all(h.recorded is None for h in rank.replays.values())                  # closed again


def test_a_replayed_layer_is_the_mixture_of_the_recorded_experts_and_gradient_reaches_its_gate(mixture):
    """Layer 2 by hand: p = softmax(gate x), y = sum over recorded e of p_e / (p_a + p_b) * down_e(silu(gate_e x) * up_e x); output and gradients to 1e-6."""
    model = mixture()
    rank, batch = mixing_rank(model), other_choice(batch_of([3, 9]))
    block, seen = model.model.layers["2"].mlp, {}
    block.register_forward_hook(lambda m, i, out: seen.update(x=i[0].detach(), y=out))
    with replaying(rank.replays, batch, torch.device("cpu")):
        forward(model, batch, torch.device("cpu"))
        experts = recorded_experts(batch)[:, :, 2].flatten(0, 1).long()            # [30, 2]
        rows, x = experts[:, 0] >= 0, seen["x"].flatten(0, 1)                      # [30], [30, 32]
        seen["y"].flatten(0, 1)[rows].square().sum().backward()                    # without the tokens that the gate chose for
    names = [name for name, _ in model.named_parameters() if name.startswith("model.layers.2.mlp.")]
    held = {hf: tensor.detach() for name in names for hf, tensor in model.state_dict_adapter.convert_single_tensor_to_hf(name, model.get_parameter(name))}
    weight = {hf.removeprefix("model.layers.2.mlp."): t.clone().requires_grad_() for hf, t in held.items()}
    p = (x @ weight["gate.weight"].T).softmax(-1)                                  # [30, 8]
    p = p.gather(1, experts.clamp(min=0))
    p = p / p.sum(-1, keepdim=True)
    outs = torch.stack([(F.silu(x @ weight[f"experts.{e}.gate_proj.weight"].T) * (x @ weight[f"experts.{e}.up_proj.weight"].T)) @ weight[f"experts.{e}.down_proj.weight"].T for e in range(8)], 1)
    y = (p[..., None] * outs[torch.arange(30)[:, None], experts.clamp(min=0)]).sum(1)
    torch.testing.assert_close(seen["y"].flatten(0, 1)[rows], y[rows], atol=1e-6, rtol=1e-5)
    y[rows].square().sum().backward()
    torch.testing.assert_close(block.gate.weight.grad, weight["gate.weight"].grad, atol=1e-6, rtol=1e-4)
    assert weight["gate.weight"].grad.norm() > 1e-2


def test_gradients_of_a_replayed_update_are_the_same_with_activations_recomputed(mixture):
    """First moments of AdamW, 0.1 x gradient, of AutoModel's own checkpointing against none; and they are not those without replay."""
    moments = []
    for checkpointed, replay in ((False, True), (True, True), (False, False)):
        rank, batch = mixing_rank(mixture(checkpointed)), other_choice(batch_of([3, 9, 5, 7]))
        batch = batch if replay else replace(batch, routed_experts=None)
        batch.old_logprobs = batch.behaviour_logprobs
        rank.update(batch, [[[0, 1], [2, 3]]], "ppo")
        moments.append({name.replace("_checkpoint_wrapped_module.", ""): m for name, m in rank.moments().items()})
    assert moments[0].keys() == moments[1].keys() and relative(moments[1], moments[0]) < 1e-6 and relative(moments[2], moments[0]) > 0.1


def test_neither_the_reference_nor_the_critic_replays(mixture):
    """The same batch with and without recorded experts: their numbers are equal, the policy's are not."""
    model = mixture()
    rank, batch = mixing_rank(model), other_choice(batch_of([3, 9]))
    rank.ref = mixture()
    bare, everything = replace(batch, routed_experts=None), [[0, 1]]
    assert torch.equal(*[rank.per_token(b, everything, "ref_logprobs")[0] for b in (batch, bare)])
    assert torch.equal(rank.per_token(bare, everything, "logprobs")[0], rank.per_token(bare, everything, "ref_logprobs")[0])
    assert not torch.allclose(*[rank.per_token(b, everything, "logprobs")[0] for b in (batch, bare)], atol=1e-4)


def test_a_model_without_gates_or_with_more_layers_than_were_told_is_refused(mixture):
    with pytest.raises(ValueError, match="Fixed has none of AutoModel's gates.*--routing-replay off"):
        replay_handles(Fixed(torch.zeros(1, 1, 3)))
    rank, batch = mixing_rank(mixture()), other_choice(batch_of([3]))
    batch.routed_experts = [record[:, :2] for record in batch.routed_experts]
    with pytest.raises(ValueError, match="2 layers.*gate in layer 2"):
        rank.per_token(batch, [[0]], "logprobs")


def test_a_checkpoint_holds_what_references_stand_for_and_a_lost_record_is_none(cluster, loop, tmp_path):
    """A pool with a reference of a worker that lives and one of a worker that has died: after loading, a reference to the same array, and one to None."""
    import ray

    @ray.remote(num_cpus=0)
    class Worker:
        def put(self):
            return [ray.put(np.arange(12, dtype=np.int8).reshape(3, 2, 2))]

    workers = [Worker.remote() for _ in range(2)]
    kept, lost = [ray.get(w.put.remote())[0] for w in workers]
    ray.kill(workers[1])
    time.sleep(3)                                                                  # until the news is out the object is still there, and one read in between may stay: so no polling
    trainer = Trainer("", TrainerConfig(), LossConfig(), "cpu", "float32", 10, 0, [])
    loop.run_until_complete(trainer.save(tmp_path / "000001", {}, {"complete": [kept, lost]}))
    _, pool = loop.run_until_complete(trainer.load(tmp_path / "000001"))
    assert fetch(lost) is None and fetch(pool["complete"][1]) is None
    assert all(isinstance(ref, ray.ObjectRef) for ref in pool["complete"]) and (fetch(pool["complete"][0]) == np.arange(12).reshape(3, 2, 2)).all()
    ray.kill(workers[0])
    time.sleep(3)                                                                  # as above
    assert fetch(pool["complete"][0]) is not None                                  # its own copy


# ---------------------------------------------------------------------------------------------------- ranks
def trainer_of(loop, cfg: TrainerConfig, loss: LossConfig = LossConfig(), model=TINY, dtype: str = "float32", **more) -> Trainer:
    trainer = Trainer(str(model), cfg, loss, "cpu", dtype, steps=10, seed=0, options=[dict(num_cpus=0, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})] * cfg.trainers, **more)
    loop.run_until_complete(trainer.start())
    return trainer


def end(trainer: Trainer) -> None:
    import ray

    for rank in trainer.ranks:
        ray.kill(rank)


def one_update(loop, cfg: TrainerConfig) -> tuple[dict, dict, dict]:
    """(parameters, first moments = 0.1 x clipped gradient, metrics) after one update of a fixed batch, entropy bonus included."""
    trainer = trainer_of(loop, cfg, LossConfig(entropy_coef=0.1))
    batch = sums(16)
    batch.old_logprobs = loop.run_until_complete(trainer.logprobs(batch))
    batch.behaviour_logprobs = batch.old_logprobs
    metrics = loop.run_until_complete(trainer.update(batch, "ppo"))
    parameters, moments = loop.run_until_complete(trainer._all("parameters"))[0], loop.run_until_complete(trainer._all("moments"))[0]
    end(trainer)
    return parameters, moments, metrics


def sums(count: int):
    """A batch of `count` sums answered right, of various lengths, with advantages of one sign: their sum must not cancel, or rounding is all that is left to compare."""
    from transformers import AutoTokenizer

    from agent import render_prompt
    from recipes.arithmetic import prompts

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    rows = prompts("train")[:: 8000 // count][:count]
    pairs = [(render_prompt(tokenizer, p["messages"]), tokenizer.encode(p["label"]) + [258]) for p in rows]
    batch = supervised_batch(pairs, AGGREGATIONS["token-mean"])
    batch.advantages = batch.spread(torch.linspace(0.2, 1, count))
    return batch


def relative(a: dict, b: dict) -> float:
    return max(((a[name].double() - b[name].double()).norm() / b[name].double().norm().clamp(min=1e-30)).item() for name in b)


SIZES = {"two ranks": dict(trainers=2), "four micro-batches": dict(tokens_per_microbatch=130), "tensor parallel": dict(trainers=2, tp_size=2),
         "tensor and data parallel": dict(trainers=4, tp_size=2), "copies of shards": dict(trainers=4, dp_replicate_size=2), "offload": dict(offload_optimizer=True)}


def test_every_size_gives_one_gradient_and_one_update(cluster, loop):
    """Per tensor, relative L2: gradient (AdamW's first moment after one step) and parameters to 1e-6."""
    base = TrainerConfig(learning_rate=1e-4, warmup_steps=0)
    parameters, gradient, metrics = one_update(loop, base)
    for cfg in (replace(base, **size) for size in SIZES.values()):       # 16 rows of up to 30 tokens: 4 micro-batches
        others, moments, other = one_update(loop, cfg)
        assert relative(moments, gradient) <= 1e-5 and relative(others, parameters) <= 1e-6
        assert other == pytest.approx(metrics, rel=1e-5, abs=1e-6)


def test_parameters_are_sharded_float32_and_compute_runs_in_the_runs_dtype_at_one_rank():
    """fully_shard at world size 1: DTensor masters in float32, bfloat16 logits, float32 gradients."""
    from torch.distributed.tensor import DTensor

    rank = Bare(0, 1, str(TINY), TrainerConfig(), LossConfig(), "cpu", "bfloat16", 10, 0)
    address, port = "127.0.0.1", 29613
    rank.start(address, port, False, False)
    try:
        assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in rank.model.parameters())
        logits = rank.model(input_ids=torch.tensor([[60, 61, 62]]), use_cache=False).logits
        assert logits.dtype == torch.bfloat16
        logits.float().logsumexp(-1).sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in rank.model.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_logprobs_equal_transformers_log_softmax(stack, loop):
    from transformers import AutoModelForCausalLM

    _, parts = stack
    batch = batch_of([5, 9, 3, 12])
    model = AutoModelForCausalLM.from_pretrained(TINY)
    model.load_state_dict(loop.run_until_complete(parts.trainer._all("parameters"))[0], strict=False)
    model.tie_weights()
    logprobs = loop.run_until_complete(parts.trainer.logprobs(batch))
    for row in range(4):
        n = int(batch.lengths[row])
        ids = batch.token_ids[row, :n].long()
        expected = (model(ids[None]).logits[0, :-1] / 0.8).log_softmax(-1).gather(1, ids[1:, None])[5:, 0]
        torch.testing.assert_close(logprobs[row, 6:n], expected.detach(), atol=1e-5, rtol=0)
    assert not logprobs[~batch.response_mask].any()


def test_epochs_times_minibatches_above_one_make_the_clip_act(cluster, loop):
    """2 epochs x 2 minibatches at a large learning rate: from the second step on policy_ratio leaves 1 and tokens are clipped; one step a batch clips none."""
    for cfg, clipped in ((TrainerConfig(epochs=2, minibatches=2, learning_rate=3e-3, warmup_steps=0, decay="constant"), True), (TrainerConfig(learning_rate=3e-3, warmup_steps=0, decay="constant"), False)):
        trainer = trainer_of(loop, cfg)
        batch = batch_of([5, 9, 3, 12, 7, 7, 2, 10], cfg.minibatches)
        batch.old_logprobs = loop.run_until_complete(trainer.logprobs(batch))
        metrics = loop.run_until_complete(trainer.update(batch, "ppo"))
        end(trainer)
        assert (metrics["clip_frac"] > 0.01, metrics["policy_kl"] > 1e-5) == (clipped, clipped)


def test_the_forward_of_a_single_optimizer_step_tells_old_logprobs(cluster, loop):
    """Two ranks, several micro-batches, one of them idle: what `update` puts into the batch is what `logprobs` says, and every metric is as if it had been given. Two steps want it given."""
    trainer = trainer_of(loop, TrainerConfig(trainers=2, learning_rate=0.0, tokens_per_microbatch=12), LossConfig(entropy_coef=0.1))
    batch = batch_of([5, 9, 3, 12, 7, 7, 2, 10, 4])
    batch.behaviour_logprobs = batch.behaviour_logprobs * 0.9
    before = loop.run_until_complete(trainer.logprobs(batch))
    assert [] in plan_microbatches(batch, torch.arange(9), 2, 12)[1]
    told = loop.run_until_complete(trainer.update(batch, "ppo"))
    torch.testing.assert_close(batch.old_logprobs, before, atol=0, rtol=0)
    given = loop.run_until_complete(trainer.update(batch, "ppo"))
    with pytest.raises(ValueError, match="2 optimizer steps a batch need old_logprobs"):
        loop.run_until_complete(trainer.update(replace(batch, old_logprobs=None, minibatch=torch.arange(9) % 2), "ppo"))
    end(trainer)
    assert told == pytest.approx(given, rel=1e-6) and told["policy_kl"] == 0 and told["mismatch_kl"] > 0


def test_the_kl_to_the_reference_starts_at_zero_and_grows(cluster, loop):
    trainer = trainer_of(loop, TrainerConfig(learning_rate=3e-3, warmup_steps=0), LossConfig(kl_coef=0.1), ref=True)
    batch = batch_of([5, 9, 3, 12])

    async def step():
        batch.old_logprobs, batch.ref_logprobs = await trainer.logprobs(batch), await trainer.ref_logprobs(batch)
        return await trainer.update(batch, "ppo")

    first, second = loop.run_until_complete(step()), loop.run_until_complete(step())
    end(trainer)
    assert first["ref_kl"] == pytest.approx(0, abs=1e-9) and second["ref_kl"] > 1e-4


def test_the_critic_learns_its_returns_and_leaves_the_policy_alone(cluster, loop):
    """Returns 2 on every token: from |V| << 1 to an error below a tenth of the first; its own learning rate; two ranks see what one sees."""
    cfg = TrainerConfig(learning_rate=0.0, critic_learning_rate=3e-3, warmup_steps=0, decay="constant")
    first_values = []
    for trainers in (1, 2):
        trainer = trainer_of(loop, replace(cfg, trainers=trainers), LossConfig(value_clip=5.0), critic=True)
        batch = batch_of([5, 9, 3, 12])
        batch.values = loop.run_until_complete(trainer.values(batch))
        first_values.append(batch.values)
        assert batch.values[batch.response_mask].abs().max() < 2 and not batch.values[~batch.response_mask].any()
        changed = replace(batch, token_ids=batch.token_ids.clone())
        changed.token_ids[:, 7] = 99
        values = loop.run_until_complete(trainer.values(changed))
        assert torch.equal(values[:, :8], batch.values[:, :8]) and not torch.equal(values[:, 8], batch.values[:, 8])   # V_t does not know token t
        if trainers == 2:
            end(trainer)
            continue
        batch.returns = 2.0 * batch.response_mask
        before = loop.run_until_complete(trainer._all("parameters"))[0]
        seen = [loop.run_until_complete(trainer.update(batch, "value")) for _ in range(30)]
        after = loop.run_until_complete(trainer._all("parameters"))[0]
        assert seen[-1]["value_error"] < 0.1 * seen[0]["value_error"] and seen[0]["critic_learning_rate"] == 3e-3 and seen[0]["critic_grad_norm"] > 0
        assert seen[0]["critic_loss"] == pytest.approx(seen[0]["value_error"] / 2, rel=1e-5)          # token-mean of (V - R)^2 / 2, nothing clipped yet
        assert all(torch.equal(before[name], after[name]) for name in before)
        end(trainer)
    torch.testing.assert_close(*first_values, atol=1e-5, rtol=0)


def test_a_checkpoint_resumes_exactly_and_an_unfinished_one_is_not_there(cluster, loop, tmp_path):
    """Two updates of policy and critic, save, a third; a new trainer loads and does the third: the same parameters, values, rates and extra."""
    cfg = TrainerConfig(learning_rate=1e-3, warmup_steps=8, decay="constant")
    first = trainer_of(loop, cfg, critic=True)
    batches = [supervised_batch([(list(range(60, 66)), [70 + i, 71, 258])], AGGREGATIONS["token-mean"]) for i in range(3)]
    for b in batches:
        b.values, b.returns = torch.zeros(b.response_mask.shape), 1.0 * b.response_mask
    for b in batches[:2]:
        loop.run_until_complete(first.update(b, "sft"))
        loop.run_until_complete(first.update(b, "value"))
    loop.run_until_complete(first.save(tmp_path / "000002", {"version": 2}, {"next": 7}))
    expected = loop.run_until_complete(first.update(batches[2], "sft")) | loop.run_until_complete(first.update(batches[2], "value"))
    values = loop.run_until_complete(first.values(batches[2]))
    wanted = loop.run_until_complete(first._all("parameters"))[0]
    end(first)
    assert [p.name for p in tmp_path.iterdir()] == ["000002"]
    second = trainer_of(loop, cfg, critic=True)
    assert loop.run_until_complete(second.load(tmp_path / "000002")) == ({"version": 2}, {"next": 7})
    metrics = loop.run_until_complete(second.update(batches[2], "sft")) | loop.run_until_complete(second.update(batches[2], "value"))
    got = loop.run_until_complete(second._all("parameters"))[0]
    assert torch.equal(loop.run_until_complete(second.values(batches[2])), values) and metrics == expected
    end(second)
    assert metrics["learning_rate"] == expected["learning_rate"] == pytest.approx(3 / 8 * 1e-3)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_an_export_is_loaded_by_transformers_with_the_trainers_weights(stack, loop, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, parts = stack
    loop.run_until_complete(parts.trainer.export(tmp_path / "hf"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    wanted = loop.run_until_complete(parts.trainer._all("parameters"))[0]
    got = dict(model.named_parameters())
    assert set(got) == set(wanted) and all(torch.equal(got[n].detach(), wanted[n]) for n in wanted)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template


@pytest.mark.parametrize("size", ["tensor parallel", "offload"])
def test_a_checkpoint_and_an_export_of_any_size_are_those_of_one_rank(cluster, loop, tmp_path, size):
    """A size updates, saves and exports; one rank loads, has the same parameters, and the same again after one more update."""
    from safetensors.torch import load_file

    cfg = TrainerConfig(learning_rate=1e-3, warmup_steps=0, decay="constant")
    two = trainer_of(loop, replace(cfg, **SIZES[size]))
    loop.run_until_complete(two.update(sums(8), "sft"))
    loop.run_until_complete(two.save(tmp_path / "000001", {}, {}))
    loop.run_until_complete(two.export(tmp_path / "hf"))
    loop.run_until_complete(two.update(sums(8), "sft"))
    later = loop.run_until_complete(two._all("parameters"))[0]
    end(two)
    one = trainer_of(loop, cfg)
    loop.run_until_complete(one.load(tmp_path / "000001"))
    loaded, exported = loop.run_until_complete(one._all("parameters"))[0], load_file(tmp_path / "hf" / "model.safetensors")
    assert set(exported) == set(loaded) and all(torch.equal(exported[name], loaded[name]) for name in loaded)
    loop.run_until_complete(one.update(sums(8), "sft"))
    assert relative(loop.run_until_complete(one._all("parameters"))[0], later) <= 1e-5
    end(one)


@pytest.mark.parametrize("flags, words", [
    (dict(trainers=3, tp_size=2), "no multiple of --tp-size 2"), (dict(trainers=2, ep_size=4), "not of --ep-size 4"), (dict(trainers=2, dp_replicate_size=2), "at least 2 of them"),
    (dict(trainers=4, tp_size=2, ep_size=2), "plain data parallelism"), (dict(cp_size=0), "--cp-size 0"), (dict(trainers=0), "--trainers 0"), (dict(minibatches=0), "--minibatches 0"), (dict(tokens_per_microbatch=0), "--tokens-per-microbatch 0")])
def test_flags_that_cannot_work_are_refused_by_name(flags, words):
    with pytest.raises(ValueError, match=words):
        TrainerConfig(**flags)
