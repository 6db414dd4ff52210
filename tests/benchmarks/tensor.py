"""Tensor parallelism between hosts: exactness, bytes, and where one grid overtakes another.

One host a rank trains square linear layers with ReLU between them (root). Links are slow enough
that the bytes decide.
"""

import copy
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

from models.domain.workload import STRATEGIES, TENSOR_1D, TENSOR_2D, TENSOR_25D
from tasks.node.record import Item
from tasks.node.strategies import apply_strategy
from tests.benchmarks.claims import Claim, Write, report, show
from tests.benchmarks.ranks import bytes_on, join, on_hosts
from tests.formulas import sent_elements

DDP = STRATEGIES[0]
_HEADERS = 14 + 20 + 32  # bytes of a packet: Ethernet, IPv4, TCP with timestamps
_WARMUP, _STEPS = 1, 6
# Grids of which the first sends less for few rows and the second for many; ranks, features.
CROSSINGS = (
    (TENSOR_1D, TENSOR_2D, 4, 256),
    (TENSOR_1D, TENSOR_2D, 4, 512),
    (TENSOR_1D, TENSOR_25D, 16, 256),
    (TENSOR_2D, TENSOR_25D, 16, 256),
)
_AROUND = (0.5, 0.75, 1.35, 2.0)  # times the rows of the crossing
# Of 256 features; others in proportion to their weights. Slower links favour small messages: they
# pass the first 64 KB after a pause at once and drop packets that wait for 50 ms.
GBPS = {4: 0.05, 16: 0.02}
_FAST = 0.5  # Gbit/s, where nothing is timed
GRIDS = ((4, TENSOR_2D), (8, TENSOR_25D), (16, TENSOR_2D))  # [2, 2, 1], [2, 2, 2], [4, 4, 1]
DOMINATED = (256, 384)  # features and rows, where activations weigh more than weights
NAME = "tests.benchmarks.tensor"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training of `layers` square layers of `width` features with `rows` samples a rank."""

    strategy: str
    width: int
    rows: int
    layers: int = 4
    exact: bool = False  # compare with the whole model instead of timing

    def item(self, ranks: int) -> Item:
        """The run of this training with a device on each machine."""
        nodes, batches = [*range(ranks)], [self.rows] * ranks
        return Item(run_id="", kind="train", strategy=self.strategy, nodes=nodes, batches=batches)

    def sent_bytes(self, ranks: int, rows: float) -> float:
        """Bytes of one rank in a step, by the formula."""
        sizes = [(float(self.width), float(self.width))] * self.layers
        if self.strategy == DDP:
            return 4 * 2 * (ranks - 1) / ranks * self.layers * self.width**2
        return 4 * sent_elements(
            self.strategy, ranks, sizes, ranks * rows, needs_input_gradient=False
        )


def crossing_rows(base: str, other: str, ranks: int, width: int) -> float:
    """Rows of a rank at which both grids send as much: bytes are linear in rows."""
    lines = []
    for name in (base, other):
        case = Case(strategy=name, width=width, rows=0)
        fixed = case.sent_bytes(ranks, 0.0)
        lines.append((fixed, case.sent_bytes(ranks, 1.0) - fixed))
    (fixed, slope), (other_fixed, other_slope) = lines
    return (other_fixed - fixed) / (slope - other_slope)


def crossed_at(x: Sequence[float], y: Sequence[float]) -> float:
    """Where `y` goes through 0, interpolated in log `x`; NaN where it does not."""
    for (low, before), (high, after) in pairwise(sorted(zip(x, y, strict=True))):
        if before < 0 <= after or before > 0 >= after:
            fraction = before / (before - after)
            return math.exp(math.log(low) + fraction * math.log(high / low))
    return math.nan


def measured(ranks: int, cases: Sequence[Case], *, gbps: float) -> pd.DataFrame:
    """A row a case: step_s, sent and formula bytes of a rank; or `off`, if exact."""
    answers = on_hosts(NAME, {"cases": [asdict(case) for case in cases]}, [gbps] * ranks)
    rows = []
    for at, case in enumerate(cases):
        by_rank = [answer[at] for answer in answers]
        row: dict[str, Any] = asdict(case) | {"ranks": ranks}
        if case.exact:
            row["off"] = max(result["off"] for result in by_rank)
        else:
            row["step_s"] = median(by_rank[0]["seconds"])
            row["sent"] = sum(result["sent"] for result in by_rank) / ranks
            row["formula"] = case.sent_bytes(ranks, case.rows)
        rows.append(row)
    return pd.DataFrame(rows)


def crossing(base: str, other: str, ranks: int, width: int) -> tuple[float, float]:
    """Rows of a rank from which `other` is faster: measured, and by the formula."""
    predicted = crossing_rows(base, other, ranks, width)
    rows = [round(factor * predicted) for factor in _AROUND]
    cases = [
        Case(strategy=name, width=width, rows=count) for count in rows for name in (base, other)
    ]
    table = measured(ranks, cases, gbps=GBPS[ranks] * (width / 256) ** 2)
    seconds = table.pivot(index="rows", columns="strategy", values="step_s")
    logs = [math.log(row[base] / row[other]) for _, row in seconds.iterrows()]
    return crossed_at(list(seconds.index), logs), predicted


def serve(task: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A rank's answers, case by case."""
    group = join(task)
    for case in (Case(**case) for case in task["cases"]):
        yield _compared(case, group) if case.exact else _timed(case, group)
    dist.barrier()


def _model(case: Case) -> nn.Module:
    torch.manual_seed(1)
    parts: list[nn.Module] = []
    for _ in range(case.layers):
        parts += [nn.Linear(case.width, case.width), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def _inputs(case: Case, rank: int) -> Tensor:
    return torch.randn(case.rows, case.width, generator=torch.Generator().manual_seed(100 + rank))


def _timed(case: Case, group: dist.ProcessGroup) -> dict[str, Any]:
    ranks, model = dist.get_world_size(group), _model(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    module = apply_strategy(case.item(ranks), model, optimizer, group)
    inputs = _inputs(case, dist.get_rank(group))
    seconds, before = [], (0, 0)
    for step in range(_WARMUP + _STEPS):
        if step == _WARMUP:
            dist.barrier(group=group)
            before = bytes_on("eth0")
        started = time.perf_counter()
        optimizer.zero_grad()
        module(inputs).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    dist.barrier(group=group)
    sent, packets = (now - then for now, then in zip(bytes_on("eth0"), before, strict=True))
    return {"seconds": seconds[_WARMUP:], "sent": (sent - _HEADERS * packets) / _STEPS}


def _compared(case: Case, group: dist.ProcessGroup) -> dict[str, Any]:
    """The largest difference from the whole model's weights after three steps, relative."""
    ranks, rank, model = dist.get_world_size(group), dist.get_rank(group), _model(case)
    whole = copy.deepcopy(model)
    paths: dict[torch.Tensor, str] = {tensor: path for path, tensor in model.named_parameters()}
    expected = dict(whole.named_parameters())
    optimizer, reference = (
        torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9) for network in (model, whole)
    )
    module: Any = apply_strategy(case.item(ranks), model, optimizer, group)
    cuts = {block: (paths[weight], cut) for weight, (block, cut) in module.blocks.of.items()}
    every = torch.cat([_inputs(case, rank) for rank in range(ranks)])
    for _ in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        module(_inputs(case, rank)).square().mean().backward()
        whole(every).square().mean().backward()
        optimizer.step()
        reference.step()
    off = 0.0
    for held in optimizer.param_groups[0]["params"]:
        path, cut = cuts.get(held, (paths.get(held, ""), lambda values: values))
        weight = expected[path].detach()
        off = max(off, float((held.detach() - cut(weight)).abs().max() / weight.abs().max()))
    return {"off": off}


def main(write: Write = False) -> None:
    """Print exactness, bytes, crossings, and steps where activations dominate."""
    exact, sent = [], []
    for ranks, name in GRIDS:
        case = Case(strategy=name, width=64, rows=8, exact=True)
        exact.append(measured(ranks, [case], gbps=_FAST))
        sent.append(measured(ranks, [Case(strategy=name, width=512, rows=64)], gbps=_FAST))
    off = float(pd.concat(exact)["off"].max())
    claims = [Claim("tensor grids train as the whole model", "1e-5", f"{off:.1e}", off <= 1e-5)]
    table = pd.concat(sent)
    show("bytes that a rank sends in a step", table)
    away = float((table["sent"] / table["formula"] - 1).abs().max())
    claims.append(Claim("bytes of tensor grids by the formula", "2 %", f"{away:.2%}", away <= 0.02))
    for base, other, ranks, width in CROSSINGS:
        at, predicted = crossing(base, other, ranks, width)
        away = at / predicted - 1
        claim = f"crossing {base}, {other}, {ranks} ranks, width {width}"
        result = f"{at:.0f}, predicted {predicted:.0f}"
        claims.append(Claim(claim, "20 % off", result, abs(away) <= 0.2))
    width, rows = DOMINATED
    cases = [Case(strategy=name, width=width, rows=rows) for name in (TENSOR_2D, TENSOR_25D, DDP)]
    table = measured(16, cases, gbps=GBPS[16])
    show("steps where activations weigh more than weights", table)
    seconds = table.set_index("strategy")["step_s"]
    times = float(seconds[TENSOR_2D] / seconds[TENSOR_25D])
    claim = "tensor-2.5d over tensor-2d, large activations"
    claims.append(Claim(claim, "1.45 times", f"{times:.2f} times", times >= 1.45))
    report("tensor", claims, write=write)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        Path(sys.argv[3]).write_text(json.dumps(list(serve(json.loads(sys.argv[2])))))
    else:
        typer.run(main)
