"""Every strategy on eight ranks of this machine: checks that each rank makes, in one order."""

import copy
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from math import ceil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tasks.node.entrypoint import LoadedWorkload
from tasks.node.equivalence import compare
from tasks.node.record import Item
from tasks.node.repetition import NotMeasured
from tasks.node.strategies import apply_strategy
from tasks.node.strategies.adasum import ADASUM, combine
from tasks.node.strategies.compression import COMPRESSED, SparseExchange
from tasks.node.strategies.grid import TENSOR
from tasks.node.strategies.refusals import STRATEGIES
from tasks.node.strategies.replicas import no_sync
from tasks.node.strategies.tables import Lookup
from tasks.node.torchvision_operators import declare_what_did_not_load
from tasks.node.workloads.transformer_lm import LanguageModel
from tests.formulas import adasum_bytes, sparse_bytes
from tests.ports import free_port

pytestmark = [pytest.mark.local, pytest.mark.enable_socket]

ROOT = Path(__file__).parents[2]
RANKS, WORLD = 4, 8
STEPS, BATCH = 3, 4
SIZES = (1, 700, 3, 120_000, 64, 1)  # of Adasum's parameters
ROUNDS, VALUES, DENSITY = 6, 5003, 0.05  # of MSTopK


class Mixed(nn.Module):
    """Tables, linear runs among layers that stay whole, a frozen weight and a free parameter."""

    def __init__(self):
        super().__init__()
        self.words, self.bag = nn.Embedding(50, 16, padding_idx=0), nn.EmbeddingBag(40, 16)
        self.run = nn.Sequential(
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.Sequential(nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 48, bias=False), nn.Tanh()),
            nn.Linear(48, 16),
            nn.Unflatten(1, (1, 16)),
            nn.Flatten(),
            nn.Linear(16, 32),
            nn.ReLU(inplace=True),
            nn.Linear(32, 16),
        )
        self.run[2][1].bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.factor = 1.0

    def forward(self, inputs):
        hidden = self.words(inputs[:, :3] % 50).sum(dim=1) + self.bag(inputs[:, 2:]).mul_(
            1
        )  # in place
        return self.run(hidden).mean(dim=1) * self.scale * self.factor


class Encoders(nn.Module):
    """Masked layers with samples first and second, norms before and after, a frozen one in eval."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, activation="gelu")
        self.words = nn.Embedding(50, 16)
        self.layers = nn.TransformerEncoder(
            layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=False
        )
        frozen = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.5, batch_first=True)
        self.frozen = nn.TransformerEncoder(frozen, 1).eval().requires_grad_(False)
        self.other = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0)
        self.language = LanguageModel(50, 5, 16, 1)
        self.factor = 1.0

    def forward(self, inputs):
        words = self.words(inputs)
        padding = (inputs > 40).index_fill(1, torch.tensor([0]), False)
        text = (words + self.frozen(words, src_key_padding_mask=padding)).transpose(0, 1)
        mask = torch.ones(5, 5).triu(1).bool()
        hidden = self.layers(text, mask=mask, src_key_padding_mask=padding)
        hidden = self.other(hidden, src_mask=torch.zeros(5, 5, dtype=text.dtype))
        found = hidden.mean(dim=(0, 2)) + self.language(inputs).mean(dim=(1, 2))
        return found * self.factor


class Tower(nn.Sequential):
    """Inherits forward, and has a method of its own, as torchvision's MLPBlock may."""

    def embed(self, hidden):
        return hidden + self(hidden)


class HuggingFace(nn.Module):
    """GPT-2, BERT called twice, whose mask some ranks lack, Llama with grouped heads, a tower."""

    def __init__(self):
        from transformers import AutoConfig, AutoModel

        super().__init__()
        self.factor, self.models = 1.0, nn.ModuleList()
        for name in ("gpt2", "bert", "llama"):
            config = AutoConfig.for_model(
                name,
                vocab_size=50,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2 if name == "bert" else 1,
                num_attention_heads=8,
                num_key_value_heads=4,
                max_position_embeddings=8,
            )
            self.models.append(AutoModel.from_config(config))
        self.tower = Tower(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.models[1].pooler = None
        self.models[1].gradient_checkpointing_enable()
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.1)
        drop_out(self, 0.0)
        drop_out(self.models[1].encoder.layer[0].eval().requires_grad_(False), 0.5)

    def forward(self, inputs):
        gpt2, bert, llama = self.models
        masked = bert(inputs, attention_mask=inputs > 0)
        found = [gpt2(inputs), masked, bert(inputs), llama(inputs)]
        hidden = self.tower.embed(sum(each[0] for each in found))
        return hidden[:, :, 0].mean(dim=1) * self.factor


def drop_out(model, probability=0.2):
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, probability)
    return {}


def batch_of(rank, step, samples=BATCH):
    """Indices (samples, 5)."""
    random = torch.Generator().manual_seed(100 * rank + step)
    return torch.randint(40, (samples, 5), generator=random)


def loss_of(module, inputs):
    return ((module(inputs) - inputs.double().mean(dim=1) / 20) ** 2).mean()


def adagrad(model, *, clips):
    """Has states before the first step, and may clip in a hook."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [{"params": weights[:2], "lr": 0.02}, {"params": weights[2:]}]
    optimizer = torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=1.0)

    def clip(*_):
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    if clips:
        optimizer.register_step_pre_hook(clip)
    return optimizer


def weights_of(optimizer):
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def numbers_of_states(optimizer):
    inner = getattr(optimizer.step, "__self__", optimizer)
    states = getattr(inner, "optim", inner).state.values()
    return sum(local(value).numel() for state in states for value in state.values() if value.dim())


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flat(weights):
    """What this rank holds of them."""
    return torch.cat([local(weight).detach().flatten() for weight in weights])


def is_on_all_ranks(values, group):
    """Whether all ranks have the same bits."""
    every = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, values, group=group)
    return all(torch.equal(values, theirs) for theirs in every)


def wrapped(name, model, optimizer, group, samples=(BATCH,) * WORLD):
    machines = (2, 2) if name == "ddp-mstopk" else (1,) * dist.get_world_size(group)
    places = range(len(machines))
    given = {"nodes": places, "devices": machines, "batches": samples[: len(machines)]}
    item = Item(run_id="", kind="train", strategy=name, **given)
    return apply_strategy(item, model, optimizer, group)


def trains_as_single_process(group, name, kind=Mixed, samples=(BATCH,) * WORLD):
    """Unless it is lossy; with its share of weights and states. A NaN on a rank reaches all."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(rank)  # ranks begin with the first's weights
    model = kind().double()
    whole = copy.deepcopy(model)
    for weight in whole.parameters():
        dist.broadcast(weight.data, group=group, group_src=0)
    clips = name not in ("tables", *TENSOR)
    optimizer, reference = adagrad(model, clips=clips), adagrad(whole, clips=clips)
    begun = flat(weights_of(reference))
    pairs = list(zip(weights_of(optimizer), weights_of(reference), strict=True))
    module = wrapped(name, model, optimizer, group, samples)

    def step(number):
        optimizer.zero_grad()
        reference.zero_grad()
        for micro in range(2):
            every = [batch_of(other, 2 * number + micro, samples[other]) for other in range(ranks)]
            (loss_of(whole, torch.cat(every)) / 2).backward()
            with nullcontext() if micro else no_sync(module):
                scale = ranks * samples[rank] / sum(samples[:ranks]) / 2
                (loss_of(module, every[rank]) * scale).backward()
        optimizer.step()
        reference.step()

    for number in range(STEPS):
        step(number)
    held, target = weights_of(optimizer), flat(weights_of(reference))
    parameters = flat(held)
    if name in COMPRESSED:
        assert is_on_all_ranks(parameters, group) and not torch.equal(parameters, target)
        assert (parameters - target).norm() < 0.8 * (begun - target).norm()
    elif name not in ADASUM:
        cuts = module.blocks.of if name in TENSOR else {}
        for mine, (old, expected) in zip(held, pairs, strict=True):
            if not mine.numel():  # this table is on another rank
                continue
            value = mine.full_tensor() if isinstance(mine, DTensor) else mine
            expected = cuts[old][1](expected) if old in cuts else expected
            assert (value - expected).abs().max() < 1e-10 * expected.abs().max()
    states, most_states = numbers_of_states(optimizer), numbers_of_states(reference)
    total = torch.tensor([len(parameters), states])
    dist.all_reduce(total, group=group)
    if name in ("zero1", *TENSOR):
        with pytest.raises(RuntimeError):
            (optimizer if name == "zero1" else module).state_dict()
    if name in ("zero1", "fsdp", "zero2"):
        assert states < 0.6 * most_states and total[1] == most_states
        assert name == "zero1" or total[0] == len(target)
    if name in TENSOR:
        assert len(parameters) < 0.65 * len(target) and total[0] == ranks * len(parameters)
    if name == "tables":  # on the ranks with fewest samples, the largest first
        assert sorted(each.owner for each in module.modules() if isinstance(each, Lookup)) == (
            [0, 1] if len(set(samples)) == 1 else [0, 0]
        )
    model.factor = torch.nan if rank == 1 else 1.0
    step(STEPS)
    assert name in TENSOR or not flat(held).isfinite().all()


def trains_in_bf16(group, name):
    """With autocast, and as ddp does."""
    losses = []
    for trained in ("ddp", name):
        torch.manual_seed(1)
        model = Encoders()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        module = wrapped(trained, model, optimizer, group)
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(module, batch_of(dist.get_rank(group), step))
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def is_refused(group, name, change):
    """On all ranks, in the first two steps, if `change` makes a batch from the model and a batch."""
    model = Mixed()
    module = wrapped(name, model, torch.optim.SGD(model.parameters(), lr=0.1), group)
    with pytest.raises(ValueError, match=r"tables|divided layers"):
        for step in range(2):
            loss_of(module, change(model, batch_of(0, step))).backward()


def weighted(model, inputs):
    model.bag.register_forward_pre_hook(lambda _, given: (given[0], None, given[0] / 1))
    return inputs


def longer(model, inputs):
    return changing(model, inputs) if dist.get_rank() == 3 else inputs[:4]


def changing(model, inputs):
    model.calls = getattr(model, "calls", 0) + 1
    return inputs[: 5 - model.calls]


def steps_are_adasum(group, name):
    """A step of two micro-steps, against the definition."""
    torch.manual_seed(0)
    model = Mixed().double()
    copies = [copy.deepcopy(model) for _ in range(RANKS)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(flat(model.parameters())))
    module = wrapped(name, model, optimizer, group)
    for rank, trained in enumerate([*copies, module]):
        data_rank = rank if rank < RANKS else dist.get_rank(group)
        with no_sync(trained):
            loss_of(trained, batch_of(data_rank, 0)).backward()
        loss_of(trained, batch_of(data_rank, 1)).backward()
    models = (copy.deepcopy(model), model, *copies)
    optimizer.step()
    assert is_on_all_ranks(seen[0], group)  # by a hook of the user
    for begun, mine, *theirs in zip(*(each.parameters() for each in models), strict=True):
        if mine.requires_grad:
            expected = adasum([each.grad.flatten().numpy() for each in theirs])
            change = ((begun - mine) / 0.1).detach().flatten().numpy()
            assert abs(change - expected).max() < 1e-10


def adasum(vectors):
    """The definition, for one parameter of 2^m ranks."""
    if len(vectors) == 1:
        return vectors[0]
    half = len(vectors) // 2
    a, b = adasum(vectors[:half]), adasum(vectors[half:])
    product, first, second = a @ b, a @ a, b @ b
    return (1 - product / (2 * first or 1)) * a + (1 - product / (2 * second or 1)) * b


def vector(rank):
    """What a rank has for Adasum: parameters of several scales, some zero on most ranks."""
    random = torch.Generator().manual_seed(rank)
    parts = [10.0**place * torch.randn(size, generator=random) for place, size in enumerate(SIZES)]
    return torch.cat([chunk * (rank == 1 or place > 2) for place, chunk in enumerate(parts)])


def sent_bytes(act):
    """Bytes that this rank sends to each other."""
    sent, plain = Counter(), dist.batch_isend_irecv

    def send(operations):
        for each in operations:
            sent[each.group_peer] += each.tensor.nbytes * (each.op is dist.isend)
        return plain(operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", send)
        act()
    return sent


def combines_by_adasum(group, world):
    """To rounding, and sends the bytes of the formula."""
    values = vector(dist.get_rank())
    sent = sent_bytes(lambda: combine(values, SIZES, group))
    assert is_on_all_ranks(values, group)
    formula = adasum_bytes(4.0 * sum(SIZES), len(SIZES), world)
    assert sent.total() == pytest.approx(formula, abs=8 * world)
    given = [vector(rank).double().split(list(SIZES)) for rank in range(world)]
    for local, *theirs in zip(values.double().split(list(SIZES)), *given, strict=True):
        expected = adasum([each.numpy() for each in theirs])
        assert abs(local.numpy() - expected).max() <= 1e-6 * abs(expected).max()


def gradient(rank, turn):
    return torch.randn(VALUES, generator=torch.Generator().manual_seed(100 * rank + turn))


def sends_the_largest_entries_and_keeps_the_rest(group, machines):
    """MSTopK against NumPy, and bytes inside a machine and between machines."""
    devices, local_rank = machines[0], dist.get_rank(group)
    share = ceil(VALUES / devices)
    residual = np.zeros((len(machines), devices, share))
    state, sent = SparseExchange(group, machines, density=DENSITY), Counter()
    for turn in range(ROUNDS):
        sums = []
        send = lambda: sums.append(state.exchange_largest(0, gradient(local_rank, turn)))  # noqa: B023, E731
        sent += sent_bytes(send)
        total = np.zeros((devices, share))
        for machine, left in enumerate(residual):
            ranks = range(machine * devices, (machine + 1) * devices)
            summed = sum(gradient(rank, turn).double().numpy() for rank in ranks)
            left += np.pad(summed, (0, share * devices - VALUES)).reshape(devices, share)
            for place in range(devices):
                picked = np.argsort(-abs(left[place]))[: ceil(DENSITY * share)]
                total[place, picked] += left[place, picked]
                left[place, picked] = 0
        np.testing.assert_allclose(sums[0].numpy(), total.reshape(-1)[:VALUES], atol=1e-5)
        assert is_on_all_ranks(sums[0], group)
    kept = residual.reshape(-1, share)[local_rank]
    np.testing.assert_allclose(state.residuals[0].numpy(), kept, atol=1e-5)
    inside = sum(count for rank, count in sent.items() if rank // devices == local_rank // devices)
    formula = ROUNDS * sparse_bytes(4 * VALUES, len(machines), devices, DENSITY)
    assert sent.total() - inside == pytest.approx(formula, rel=0.02)
    assert inside == pytest.approx(ROUNDS * 2 * (devices - 1) / devices * 4 * VALUES, rel=0.02)


def misses_a_rank_within_the_timeout(*groups):
    modules = []
    for name, group in zip(("ps-1", "tensor-1d", "adasum"), groups, strict=True):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        modules.append(wrapped(name, model, torch.optim.SGD(model.parameters()), group))
    for module in modules if dist.get_rank() == 0 else ():
        with pytest.raises(RuntimeError):
            module(torch.ones(2, 4)).sum().backward()


def is_compared_with_ddp(group, name, kind, change=lambda _: {}, error=NotMeasured):
    """The losses are those of ddp, unless `change` makes another loss or optimizer of the model."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)

    def make_batch(size):
        inputs = batch_of(rank, 0, size)
        return inputs, inputs.float().mean(dim=1)

    def build(*, shared):
        torch.manual_seed(1)
        model = kind()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        made = {"loss": nn.functional.mse_loss, "optimizer": optimizer} | change(model)
        return LoadedWorkload(model=model, make_batch=make_batch, **made)

    given = {"nodes": range(ranks), "batches": [BATCH] * ranks, "strategy": name}
    with nullcontext() if error is None else pytest.raises(error, match="step"):
        compare(Item(run_id="", kind="train", **given), build, group)


def decaying(model):
    """Its loss reads the parameters."""
    squares = lambda: sum((weight**2).sum() for weight in model.parameters())  # noqa: E731
    return {"loss": lambda *batch: nn.functional.mse_loss(*batch) + 1e-3 * squares()}


def clipping(model):
    """A hook clips a list of parameters that was made before."""
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=0.1)
    clip = nn.utils.clip_grad_norm_
    optimizer.register_step_pre_hook(lambda *_: model.__setattr__("norm", clip(weights, 0.05)))
    return {"optimizer": optimizer}


def clipping_by_numbers(model):
    """A hook clips by a norm that it computes as a number."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @optimizer.register_step_pre_hook
    def clip(*_):
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        norm = sum(grad.norm().item() ** 2 for grad in grads) ** 0.5
        for grad in grads:
            grad.mul_(0.05 / norm)

    return {"optimizer": optimizer}


class ClippingAcross(torch.optim.SGD):
    def step(self, closure=None):
        nn.utils.clip_grad_norm_(weights_of(self), 0.05)
        super().step(closure)


def clipping_across(model):
    """The optimizer's own step looks across parameters."""
    return {"optimizer": ClippingAcross(model.parameters(), lr=0.1)}


CHECKS = [
    (RANKS, is_compared_with_ddp, ("zero2", Mixed, clipping_across, None)),
    *(
        (RANKS, is_compared_with_ddp, ("tensor-1d", kind, drop_out, None))
        for kind in (Encoders, HuggingFace)
    ),
    (RANKS, trains_in_bf16, ("tables",)),
    (RANKS, is_compared_with_ddp, ("fsdp", Mixed, clipping_by_numbers, None)),
    *((RANKS, is_compared_with_ddp, (name, Mixed, decaying)) for name in ("tables", "tensor-2d")),
    (RANKS, is_compared_with_ddp, ("fsdp", Mixed, clipping, RuntimeError)),
    (WORLD, trains_as_single_process, ("tensor-2.5d",)),
    (WORLD, combines_by_adasum, (WORLD,)),
    *((RANKS, trains_as_single_process, (name,)) for name in STRATEGIES if name != "tensor-2.5d"),
    *(
        (RANKS, trains_as_single_process, (f"tensor-{cut}d", kind))
        for cut in (1, 2)
        for kind in (Encoders, HuggingFace)
    ),
    (RANKS, trains_as_single_process, ("tables", Mixed, (2, 4, 6, 4))),
    *((RANKS, is_refused, ("tables", how)) for how in (weighted, changing)),
    (RANKS, is_refused, ("tensor-1d", longer)),
    *((RANKS, steps_are_adasum, (name,)) for name in ADASUM),
    (RANKS, sends_the_largest_entries_and_keeps_the_rest, ((2, 2),)),
    (RANKS, sends_the_largest_entries_and_keeps_the_rest, ((1, 1, 1, 1),)),
    (2, misses_a_rank_within_the_timeout, ()),
]


def serve(rank, port, answer):
    """Make the checks of one rank, and write those that fail."""
    torch.set_num_threads(1)
    address, patience = f"tcp://127.0.0.1:{port}", timedelta(seconds=300)
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=WORLD, timeout=patience
    )
    pairs = [dist.new_group([0, 1], timeout=timedelta(seconds=2)) for _ in range(3)]
    four = dist.new_group(range(RANKS), timeout=patience)
    groups = {WORLD: [dist.group.WORLD], RANKS: [four], 2: pairs}
    failed = {}
    for place, (world, check, arguments) in enumerate(CHECKS):
        try:
            if rank < world:
                check(*groups[world], *arguments)
        except BaseException:
            failed[place] = traceback.format_exc()
    answer.with_name(str(rank)).write_text(json.dumps(failed))
    dist.barrier()


def main(port, answer):
    """All ranks, forked, so that libraries are loaded once, and the compiler of strategies."""
    import torch._dynamo  # noqa: F401

    declare_what_did_not_load()
    HuggingFace()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=serve, args=(rank, port, answer)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """Of each rank, by the place of the check."""
    answer = tmp_path_factory.mktemp("ranks") / "of-rank"
    subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "tests.local.test_strategies",
            str(free_port()),
            answer,
        ],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        timeout=500,
    )
    return [json.loads(answer.with_name(str(rank)).read_text()) for rank in range(WORLD)]


NAMES = [
    "-".join(str(getattr(argument, "__name__", argument)) for argument in (check, *given))
    for _, check, given in CHECKS
]


@pytest.mark.parametrize("place", range(len(CHECKS)), ids=NAMES)
def test_each_rank(failures, place):
    failed = [of_rank[str(place)] for of_rank in failures if str(place) in of_rank]
    assert not failed, failed[0]


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
