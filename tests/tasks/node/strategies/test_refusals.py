"""What strategies refuse, by the strategy, layer or setting that the error names."""

from functools import partial

import pytest
import torch
from torch import nn

from tasks.node.record import Item
from tasks.node.strategies.refusals import (
    STRATEGIES,
    refuse,
    refuse_model,
    refuse_optimizer,
)
from tasks.node.workloads.transformer_lm import LanguageModel

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def run(name, machines=(1, 1), **changes):
    given = {"kind": "train", "nodes": range(len(machines)), "devices": machines}
    return Item(run_id="", strategy=name, **given, **changes)


def pair(features=4):
    return nn.Sequential(nn.Linear(4, features), nn.ReLU(), nn.Linear(features, 4))


def tied():
    model = nn.Sequential(nn.Embedding(4, 4), *pair())
    model[1].weight = model[3].weight = model[0].weight
    return model


def hooked():
    model = pair()
    model[2].register_forward_hook(lambda *_: None)
    return model


def table(**options):
    return nn.Sequential(nn.Embedding(3, 3, **options))


class Unhooked(torch.optim.Optimizer):
    """Calls no hooks, as wrappers of optimizers do not."""

    def __init__(self):
        pass

    def step(self, closure=None):
        """Nothing."""


def clipping():
    optimizer = torch.optim.SGD(pair().parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


class Bounded(torch.optim.SGD):
    """May look across weights."""


def stepping():
    optimizer = torch.optim.SGD(pair().parameters())
    optimizer.step = lambda: None
    return optimizer


def masked():
    model = table()
    model[0].weight.register_hook(torch.relu)
    return model


@pytest.mark.parametrize(
    ("name", "machines"),
    [
        *(("tensor-1d", (1,)), ("tensor-2d", (4, 2)), ("tensor-2.5d", (2, 2)), ("tables", (1,))),
        *(("adasum", (1,)), ("adasum-delta", (4, 2))),
        *(("ddp-mstopk", (2, 1)), ("ddp-mstopk", (4,)), ("ps-4", (1, 1)), ("ps-1", (4,))),
    ],
)
def test_machines_that_do_not_fit_are_refused(name, machines):
    with pytest.raises(ValueError, match=f"{name} .*use ddp"):
        refuse(run(name, machines), CPU)


def test_each_strategy_can_be_named():
    for name in STRATEGIES:
        refuse(run(name, (1,) * 16), CPU)
    with pytest.raises(ValueError, match="ddp, ddp-fp16"):
        refuse(run("dpp"), CPU)


@pytest.mark.parametrize(
    ("act", "named"),
    [
        (partial(refuse, run("tensor-1d", switches="compile"), CPU), "compile"),
        (partial(refuse, run("fsdp", switches="offload"), CPU), "offload"),
        (partial(refuse, run("ddp", switches="offload"), CUDA), "offload"),
        (partial(refuse, run("fsdp", switches="offloaded"), CUDA), "offloaded"),
        (partial(refuse, run("zero1", precision="fp16"), CPU), "zero1"),
        (partial(refuse, run("adasum-delta", batches=[6, 2]), CPU), "adasum-delta"),
        (partial(refuse, run("tensor-1d", batches=[6, 2]), CPU), "tensor-1d"),
        (partial(refuse_model, "tensor-1d", nn.Linear(4, 4), (2,)), "to divide"),
        (partial(refuse_model, "tensor-1d", hooked(), (2,)), "to divide"),
        (partial(refuse_model, "tensor-1d", tied(), (2,)), "to divide"),
        (partial(refuse_model, "tensor-2d", pair(features=5), (4,)), " 0 "),
        (partial(refuse_model, "tensor-1d", LanguageModel(16, 3, 16, 1), (8,)), "self_attn"),
        (partial(refuse_model, "tables", pair(), (2,)), "nn.Embedding"),
        (partial(refuse_model, "tables", table(sparse=True), (2,)), " 0 "),
        (partial(refuse_model, "tables", table(max_norm=1.0), (2,)), " 0 "),
        (partial(refuse_model, "tables", tied(), (2,)), " 0 "),
        (partial(refuse_optimizer, "adasum-delta", Unhooked()), "Unhooked"),
        (partial(refuse_optimizer, "tensor-1d", torch.optim.LBFGS(pair().parameters())), "LBFGS"),
        (partial(refuse_optimizer, "tables", clipping()), "tables"),
        (partial(refuse_optimizer, "tables", Bounded(pair().parameters())), "Bounded"),
        (partial(refuse_optimizer, "zero1", Bounded(pair().parameters())), "Bounded"),
        (partial(refuse_optimizer, "zero1", stepping()), "zero1"),
        *(
            (partial(refuse_model, name, masked(), (2,)), " 0.weight")
            for name in ("fsdp", "tables")
        ),
    ],
)
def test_what_a_strategy_would_train_as_something_else_is_refused(act, named):
    with pytest.raises(ValueError, match=named):
        act()


def test_what_a_strategy_can_train_is_not_refused():
    refuse(run("zero2", switches="offload"), CUDA)
    refuse(run("ps-1", precision="fp16", batches=[6, 2]), CPU)
    refuse_optimizer("fsdp", clipping())
    scheduled = torch.optim.AdamW(pair().parameters())
    torch.optim.lr_scheduler.StepLR(scheduled, 2)
    refuse_optimizer("zero1", scheduled)
    refuse_model("tensor-1d", nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5)), (2,))
