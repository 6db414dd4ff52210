"""Embedding tables on one rank each: steps as in ddp, what is refused with its reason, on processes of this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tasks.node.strategies import no_sync, strategy
from tasks.node.strategies.tables import Elsewhere, _Seat, refuse_model
from tests.local.ranks import answers_of

pytestmark = [pytest.mark.local, pytest.mark.enable_socket]

WORLD, STEPS, RATE = 3, 5, 0.1
SAMPLES = {"equal": (4, 4, 4), "unequal": (2, 4, 6)}
CPU = torch.device("cpu")


class Words(nn.Module):
    """A table of rows, two of sums, one that is frozen, a scaled layer with dropout, and a step counter beside them."""

    def __init__(self, *, computed: bool = False, twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.kind = (
            nn.Embedding(50, 6, padding_idx=0),
            nn.EmbeddingBag(9, 6, mode="sum"),
        )
        self.deep = nn.Sequential(nn.EmbeddingBag(30, 4, mode="mean"))
        self.fixed = nn.Embedding(7, 3).requires_grad_(False)
        self.head = nn.Sequential(nn.Linear(19, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.computed, self.twice, self.wrong = computed, twice, False

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        words = inputs["words"] + 0 if self.computed else inputs["words"]
        many = [
            self.words(words).mean(dim=1),
            self.kind(inputs["others"][:, 0]),
            self.deep(inputs["others"][:, 1, :2]),
        ]
        if self.twice:
            many[0] = many[0] + self.words(words).sum(dim=1)
        found: Tensor = self.head(
            torch.cat(
                [
                    *many,
                    self.fixed(input=inputs["words"][:, 0] % 7 if self.computed else inputs["one"]),
                ],
                1,
            )
        )
        return found.squeeze(1) * (torch.nan if self.wrong else 1.0)


def batch(rank: int, turn: int, samples: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(100 * rank + turn)
    others = torch.randint(9, (samples, 2, 3), generator=random)
    words = torch.randint(50, (samples, 5), generator=random)
    return {"words": words, "others": others, "one": words[:, 2] % 7}


def trained(name: str, sizes: tuple[int, ...], **odd: Any) -> dict[str, Any]:
    """Weights after some steps of two micro-steps each, those of tables by who has them."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    model = Words(**odd)
    if rank:
        with torch.no_grad():
            model.words.weight.add_(1.0)  # all begin with the first rank's
    optimizer = torch.optim.Adagrad(
        [one for one in model.parameters() if one.requires_grad], lr=RATE
    )
    everything = {**dict(model.named_parameters())}
    module = strategy(name, machines=(1,) * WORLD)(model, optimizer, group, CPU)
    scale = WORLD * sizes[rank] / sum(sizes) / 2
    for step in range(STEPS):
        optimizer.zero_grad()
        first, second = (batch(rank, 2 * step + one, sizes[rank]) for one in range(2))
        with no_sync(module):
            (module(first).square().mean() * scale).backward()
        (module(second).square().mean() * scale).backward()
        optimizer.step()
    held = sum(one.numel() for group in optimizer.param_groups for one in group["params"])
    owners = module.settled.owners if isinstance(module, Elsewhere) and module.settled else []
    whole = {path: one.detach() for path, one in everything.items() if one.numel()}
    return {"weights": whole, "owners": owners, "held": held, "states": len(optimizer.state)}


def reason(wrong: Any) -> str:
    try:
        wrong()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def uneven() -> None:
    group = dist.group.WORLD
    assert group is not None
    model = Words()
    module = strategy("tables", machines=(1,) * WORLD)(
        model, torch.optim.SGD(model.parameters()), group, CPU
    )
    given = batch(dist.get_rank(), 0, 4)
    module(given | {"words": given["words"][:, : 4 + (dist.get_rank() == 1)]})


def hooked() -> None:
    group = dist.group.WORLD
    assert group is not None
    model = Words()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.register_step_post_hook(lambda *_: None)
    strategy("tables", machines=(1,) * WORLD)(model, optimizer, group, CPU)


def changing() -> None:
    group = dist.group.WORLD
    assert group is not None
    model = Words()
    module = strategy("tables", machines=(1,) * WORLD)(
        model, torch.optim.SGD(model.parameters()), group, CPU
    )
    for samples in (4, 3):
        module(batch(dist.get_rank(), 0, samples))


def main(rank: int, port: int, answer: Path) -> None:
    """One rank: all cases in one order."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD
    )
    dist.new_group(
        [0, 1]
    )  # as of a launch that serves fewer machines too: ranks are in different numbers of groups
    found: dict[str, Any] = {}
    for label, sizes in SAMPLES.items():
        for name in ("ddp", "tables"):
            found[f"{name} {label}"] = trained(name, sizes)
    for odd in ("computed", "twice"):
        found[odd] = reason(lambda odd=odd: trained("tables", SAMPLES["equal"], **{odd: rank == 1}))  # type: ignore[misc]
    found |= {"changing": reason(changing), "uneven": reason(uneven), "hooked": reason(hooked)}
    torch.save(found, answer)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    return answers_of("test_tables", WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("label", SAMPLES)
def test_a_step_is_that_of_plain_data_parallelism_and_each_table_lies_on_one_rank(
    ranks: list[dict[str, Any]], label: str
) -> None:
    plain = ranks[0][f"ddp {label}"]["weights"]
    owners = ranks[0][f"tables {label}"]["owners"]
    assert set(owners) == ({0, 1, 2} if label == "equal" else {0}), (
        "the smallest batch has all tables"
    )
    seen: dict[str, int] = {}
    for one in ranks:
        for path, weight in one[f"tables {label}"]["weights"].items():
            torch.testing.assert_close(weight, plain[path], rtol=1e-5, atol=1e-6, msg=path)
            seen[path] = seen.get(path, 0) + 1
    tables = {"words.weight", "kind.weight", "deep.0.weight", "fixed.weight"}
    assert {path: many for path, many in seen.items() if path in tables} == dict.fromkeys(tables, 1)
    assert {many for path, many in seen.items() if path not in tables} == {WORLD}
    trained = sum(plain[path].numel() for path in plain if path != "fixed.weight")
    dense = sum(plain[path].numel() for path in plain if path not in tables)
    assert sum(one[f"tables {label}"]["held"] for one in ranks) == trained + (WORLD - 1) * dense


def test_what_cannot_be_looked_up_beforehand_is_refused_by_all_with_the_table_s_name(
    ranks: list[dict[str, Any]],
) -> None:
    for one in ranks:
        assert one["computed"].startswith(
            "ValueError: tables: words is given what the model computes"
        )
        assert one["twice"].startswith("ValueError: tables: words is asked 2 times in a step")
        assert one["changing"].startswith(
            "ValueError: tables: words is given a part of (3, 5) numbers, and of (4, 5)"
        )
        assert one["uneven"].startswith(
            "ValueError: tables: words is given indices of (4, 4) on rank 0, of (4, 5) on"
        )
        assert one["hooked"].startswith("ValueError: tables: a hook of the optimizer's steps")


def test_offsets_are_refused_with_the_table_s_name_however_they_are_given() -> None:
    seat = _Seat("bags", 4, True)
    for given in ({"offsets": torch.zeros(1)}, {"per_sample_weights": torch.ones(2, 3)}):
        with pytest.raises(
            ValueError, match="tables: bags is given offsets or weights beside indices; take ddp"
        ):
            seat(torch.ones(2, 3, dtype=torch.long), **given)
    with pytest.raises(ValueError, match="asked twice"):
        seat(torch.ones(2, 3, dtype=torch.long), None, per_sample_weights=None)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Linear(3, 3), "no nn.Embedding"),
        (nn.Sequential(nn.Embedding(3, 3, sparse=True)), "0 has sparse gradients"),
        (nn.Sequential(nn.Embedding(3, 3, max_norm=1.0)), "max_norm"),
        (nn.Sequential(nn.Embedding(3, 3, scale_grad_by_freq=True)), "scale_grad_by_freq"),
    ],
)
def test_models_without_tables_that_may_move_are_refused(model: nn.Module, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        refuse_model("tables", model)
    tied = nn.Sequential(nn.Embedding(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="0 is in two places"):
        refuse_model("tables", tied)


def test_switches_and_one_device_are_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="tables with checkpointing"):
        strategy("tables", "checkpointing")
    with pytest.raises(ValueError, match="on 1 device"):
        strategy("tables", machines=(1,))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
