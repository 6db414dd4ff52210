"""Tensor parallelism between hosts: bytes that really pass their links, seconds of steps, and how exact they are.

`python -m tests.benchmarks.strategies --parts tensor` starts a host a rank, each a network namespace with a link of its
own, and trains square linear layers with ReLU between them in each strategy: the same weights and samples. Hosts share
this machine's cores; links are slow enough that what is sent decides.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.domain.workload import STRATEGIES, TENSOR_1D, TENSOR_2D, TENSOR_25D
from models.step_time.tensor import Layer, dense_elements, sent_elements
from tasks.node.strategies import strategy
from tasks.node.strategies.tensor import Divided
from tasks.node.workloads import transformer_lm
from tasks.providers.local import network
from tests.benchmarks.ranks import ROOT

DDP = STRATEGIES[0]
BYTES_OF_VALUE = 4.0
_PORT = 29_400
_HEADERS = 14 + 20 + 32  # bytes of a packet: Ethernet, IPv4, TCP with timestamps
_WARMUP, _STEPS = 1, 6
_WAIT = timedelta(seconds=120)
_CPU = torch.device("cpu")
_LANGUAGE = "language"  # of `model`: the built-in language model, small


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training of `layers` square layers of `width` features, `rows` samples a rank; or a comparison of `model`."""

    strategy: str
    width: int
    rows: int
    layers: int = 4
    exact: bool = False  # compare with the whole model instead of timing
    model: str = ""

    @property
    def sizes(self) -> list[Layer]:
        """Inputs and outputs of each layer."""
        return [(float(self.width), float(self.width))] * self.layers

    def sent_bytes(self, ranks: int, rows: float | None = None) -> float:
        """By the formula, of one rank in a step."""
        every = ranks * (self.rows if rows is None else rows)
        if self.strategy == DDP:
            return BYTES_OF_VALUE * dense_elements(self.sizes, ranks)
        return BYTES_OF_VALUE * sent_elements(
            self.strategy, ranks, self.sizes, every, needs_input_gradient=False
        )


# Grids of which the formula has one send less for few rows, the other for many.
CROSSINGS: dict[int, tuple[tuple[str, str], ...]] = {
    4: ((TENSOR_1D, TENSOR_2D),),
    16: ((TENSOR_1D, TENSOR_25D), (TENSOR_2D, TENSOR_25D)),
}
WIDTHS = {
    4: (256, 512),
    16: (256,),
}  # of 16 ranks on two cores larger ones compute for as long as they send
# Of 256 features; of others as their weights, so that what is sent takes about as long. A link lets the first 64 KB
# after a pause through at once, and drops what would wait for 50 ms: slower links favour small messages.
GBPS = {4: 0.05, 8: 0.05, 16: 0.02}
_USUAL_WIDTH = 256
_FAST = 0.5  # Gbit/s where nothing is timed
BYTES_OF = ((4, TENSOR_2D), (8, TENSOR_25D), (16, TENSOR_2D))  # [2, 2, 1], [2, 2, 2], [4, 4, 1]
_AROUND = (0.5, 0.75, 1.35, 2.0)  # times the rows of the crossing
DOMINATED = (256, 384)  # width, and rows of a rank whose activations weigh more than weights do


def crossing_rows(one: str, other: str, ranks: int, width: int) -> float:
    """Rows of a rank at which both send as much, by the formula: each is a line in rows."""
    lines = []
    for name in (one, other):
        case = Case(strategy=name, width=width, rows=0)
        fixed = case.sent_bytes(ranks, 0.0)
        lines.append((fixed, case.sent_bytes(ranks, 1.0) - fixed))
    (a, by_a), (b, by_b) = lines
    return (b - a) / (by_a - by_b)


def crossed_at(rows: Sequence[float], logs: Sequence[float]) -> float:
    """Where logs of a ratio go through 0, between the two nearest rows; NaN where they do not."""
    points = sorted(zip(rows, logs, strict=True))
    for (low, before), (high, after) in pairwise(points):
        if before < 0 <= after or before > 0 >= after:
            part = before / (before - after)
            return math.exp(math.log(low) + part * (math.log(high) - math.log(low)))
    return math.nan


def measured(ranks: int, cases: Sequence[Case], *, gbps: float = 0.0) -> pd.DataFrame:
    """A row a case: seconds of a step with their spread, bytes that a rank sent and the formula's; or `off`.

    Raises RuntimeError with a rank's last words where one fails.
    """
    rate = gbps or GBPS[ranks] * (cases[0].width / _USUAL_WIDTH) ** 2
    with TemporaryDirectory() as folder:
        task = Path(folder, "task")
        task.write_text(json.dumps([asdict(one) for one in cases]))
        commands = [
            [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "tests.benchmarks.tensor",
                str(rank),
                str(ranks),
                folder,
            ]
            for rank in range(ranks)
        ]
        with _hosts(commands, rate, Path(folder)) as hosts:
            while any(one.process.poll() is None for one in hosts) and not any(
                one.process.poll() for one in hosts
            ):
                time.sleep(0.1)
            failed = any(one.process.poll() for one in hosts)
        if failed:
            said = [path.read_text().strip()[-400:] for path in Path(folder).glob("log-*")]
            raise RuntimeError(f"ranks failed: {max(said, key=len)}")
        every = [json.loads(Path(folder, f"answer-{rank}").read_text()) for rank in range(ranks)]
    rows = []
    for at, case in enumerate(cases):
        own = [one[at] for one in every]
        row: dict[str, Any] = {
            "strategy": case.strategy,
            "ranks": ranks,
            "width": case.width,
            "rows": case.rows,
        }
        if case.exact:
            row |= {"model": case.model or "layers", "off": max(one["off"] for one in own)}
        else:
            steps = own[0]["seconds"]
            low, _, high = quantiles(steps, n=4)
            row |= {"gbps": rate, "step_s": median(steps), "spread": (high - low) / median(steps)}
            row |= {
                "sent": sum(one["sent"] for one in own) / ranks,
                "formula": case.sent_bytes(ranks),
            }
        rows.append(row)
    return pd.DataFrame(rows)


def exactness() -> pd.DataFrame:
    """How far weights are from those of the whole model after three steps, by grid and model."""
    found = []
    for ranks, name in ((4, TENSOR_1D), *BYTES_OF):
        models = ("", _LANGUAGE)
        cases = [Case(strategy=name, width=64, rows=8, exact=True, model=one) for one in models]
        found.append(measured(ranks, cases, gbps=_FAST))
    return pd.concat(found, ignore_index=True)


def link_bytes() -> pd.DataFrame:
    """Bytes of steps of the grids that are claimed."""
    found = [
        measured(ranks, [Case(strategy=name, width=512, rows=64)], gbps=_FAST)
        for ranks, name in BYTES_OF
    ]
    table = pd.concat(found, ignore_index=True)
    return table.assign(off=table["sent"] / table["formula"] - 1)


def crossings() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Steps about each crossing; and a row a crossing: rows of a rank measured, and by the formula."""
    steps, found = [], []
    for ranks, width in ((ranks, width) for ranks, widths in WIDTHS.items() for width in widths):
        pairs = CROSSINGS[ranks]
        middles = {pair: crossing_rows(*pair, ranks, width) for pair in pairs}
        asked = {
            pair: [round(part * middle) for part in _AROUND] for pair, middle in middles.items()
        }
        wanted = [
            Case(strategy=name, width=width, rows=many)
            for pair in pairs
            for many in asked[pair]
            for name in pair
        ]
        table = measured(ranks, list(dict.fromkeys(wanted)))
        steps.append(table)
        for pair in pairs:
            rows = asked[pair]
            one, other = (
                table[table["strategy"] == name].set_index("rows").loc[rows] for name in pair
            )
            logs = [math.log(one["step_s"][many] / other["step_s"][many]) for many in rows]
            slope = abs(logs[-1] - logs[0]) / math.log(rows[-1] / rows[0])
            row: dict[str, Any] = {"ranks": ranks, "width": width, "one": pair[0], "other": pair[1]}
            row |= {"predicted": middles[pair], "measured": crossed_at(rows, logs)}
            noise = math.hypot(one["spread"].median(), other["spread"].median()) / math.sqrt(_STEPS)
            found.append(row | {"noise": noise / slope if slope else math.nan})
    crossed = pd.DataFrame(found)
    return pd.concat(steps, ignore_index=True), crossed.assign(
        off=crossed["measured"] / crossed["predicted"] - 1
    )


def dominated() -> pd.DataFrame:
    """Steps of 16 ranks whose activations weigh more than weights, and in plain data parallelism."""
    width, rows = DOMINATED
    names = (TENSOR_2D, TENSOR_25D, DDP)
    return measured(16, [Case(strategy=name, width=width, rows=rows) for name in names])


@contextmanager
def _hosts(
    commands: Sequence[Sequence[str]], gbps: float, folder: Path
) -> Iterator[list[network.Host]]:
    """A host a command, joined by links of so many Gbit/s; none is left afterwards. Raises OSError without them."""
    isolation = network.detect()
    if not isolation.namespaces:
        raise OSError(f"no hosts can be made here: {isolation.why_not}")
    environment = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "LANG": "C",
    }
    switch = network.start_switch(isolation, environment, folder / "switch")
    hosts: list[network.Host] = []
    try:
        plans = [
            network.HostPlan(
                mark="srift-bench-tensor",
                address=f"10.78.0.{at + 1}",
                bandwidth_gbps=gbps,
                command=command,
                log=folder / f"log-{at}",
            )
            for at, command in enumerate(commands)
        ]
        hosts += [network.start_host(isolation, switch, plan, environment) for plan in plans]
        for one in hosts:
            network.find_inner(one)
        network.join(isolation, switch, list(zip(hosts, plans, strict=True)))
        for one in hosts:
            one.go()
        yield hosts
    finally:
        for process in (*(one.process for one in hosts), switch):
            process.kill()
            process.wait()


def serve(rank: int, ranks: int, folder: Path) -> Iterator[dict[str, Any]]:
    """A rank's answers, case by case."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://10.78.0.1:{_PORT}", rank=rank, world_size=ranks, timeout=_WAIT
    )
    group = dist.group.WORLD
    assert group is not None
    for case in (Case(**one) for one in json.loads((folder / "task").read_text())):
        yield _compared(case, group) if case.exact else _timed(case, group)
    dist.barrier()


def _model(case: Case) -> nn.Module:
    torch.manual_seed(1)
    if case.model == _LANGUAGE:
        return _Logits(transformer_lm.LanguageModel(case.width, 8, case.width, 2))
    parts: list[nn.Module] = []
    for before, after in case.sizes:
        parts += [nn.Linear(int(before), int(after)), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


class _Logits(nn.Module):
    """A language model of the numbers that others are given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.model((inputs[:, :8].abs() * 20).long() % inputs.shape[1])
        return found


def _inputs(case: Case, rank: int) -> Tensor:
    return torch.randn(case.rows, case.width, generator=torch.Generator().manual_seed(100 + rank))


def _timed(case: Case, group: dist.ProcessGroup) -> dict[str, Any]:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    model = _model(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    module = strategy(case.strategy, machines=(1,) * ranks)(model, optimizer, group, _CPU)
    inputs = _inputs(case, rank)

    def step() -> None:
        optimizer.zero_grad()
        module(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(_WARMUP):
        step()
    dist.barrier(group=group)
    seconds = []
    before = _on_link()
    for _ in range(_STEPS):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    dist.barrier(group=group)
    return {"seconds": seconds, "sent": (_on_link() - before) / _STEPS}


def _compared(case: Case, group: dist.ProcessGroup) -> dict[str, Any]:
    """The largest difference of a weight from the whole model's after three steps, over the largest of its tensor."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    model = _model(case)
    whole = copy.deepcopy(model)
    paths: dict[torch.Tensor, str] = {one: path for path, one in model.named_parameters()}
    expected = dict(whole.named_parameters())
    optimizer, reference = (
        torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, whole)
    )
    module = strategy(case.strategy, machines=(1,) * ranks)(model, optimizer, group, _CPU)
    assert isinstance(module, Divided)
    cuts = {block: (paths[one], cut) for one, (block, cut) in module.blocks.of.items()}
    for _ in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        module(_inputs(case, rank)).square().mean().backward()
        every = torch.cat([_inputs(case, one) for one in range(ranks)])
        whole(every).square().mean().backward()
        optimizer.step()
        reference.step()
    off = 0.0
    for held in optimizer.param_groups[0]["params"]:
        path, cut = cuts.get(held, (paths.get(held, ""), lambda values: values))
        one = expected[path].detach()
        off = max(off, float((held.detach() - cut(one)).abs().max() / one.abs().max()))
    return {"off": off}


def _on_link() -> int:
    """Bytes that this host sent, less its packets' headers."""
    line = next(
        one
        for one in Path("/proc/net/dev").read_text().splitlines()
        if one.strip().startswith("eth0:")
    )
    sent, packets = line.split(":")[1].split()[8:10]
    return int(sent) - _HEADERS * int(packets)


if __name__ == "__main__":
    number, answers = int(sys.argv[1]), Path(sys.argv[3])
    (answers / f"answer-{number}").write_text(
        json.dumps(list(serve(number, int(sys.argv[2]), answers)))
    )
