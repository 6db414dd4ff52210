"""Which rows are held out to judge the step-time model, fixed by name before the first fit.

A *cell* is a workload on a GPU kind. Eight of twelve cells are for choosing between models, four
for the final score; so are fourteen and seven of the GPU kinds of the one-machine table. Rows of a
final cell may be known in any group; predictions of them are scored by `--final` alone.
"""

import zlib
from collections.abc import Iterator

import numpy as np
import pandas as pd

from models.domain.numeric import BoolArray, FloatArray
from tests.benchmarks.scores import Group

SEED, DRAWS, RANDOM_ROWS, PILOTS = 20261123, 10, 12, 3
NEIGHBOUR_DRAWS, NEIGHBOUR_SHARE = 3, 0.2
# The machines that the measurements are from, by kind.
T4, RTX, V100 = "g4dn.12xlarge", "onprem.8x2080ti", "nd40rs.v2"
BERT, NEUMF, RESNET18, RESNET50 = (
    "bert-base-squad",
    "neumf-movielens",
    "resnet18-cifar10",
    "resnet50-imagenet",
)
# One cell of each workload, every kind among them, and seven of the 21 GPU kinds: drawn once by
# `default_rng(SEED)`, cells first, and listed by name.
FINAL_CELLS = frozenset({(BERT, V100), (NEUMF, T4), (RESNET18, RTX), (RESNET50, T4)})
CHOOSING_CELLS = (
    frozenset(
        (workload, kind)
        for workload in (BERT, NEUMF, RESNET18, RESNET50)
        for kind in (T4, RTX, V100)
    )
    - FINAL_CELLS
)
# GPU kinds of the one-machine table, all their forms and memories together.
FINAL_GPUS = frozenset({"2070", "4090", "A40", "A6000", "GH200", "QuadroRTX8000", "TitanRTX"})
CHOOSING_GPUS = frozenset(
    {
        "1080Ti",
        "2080",
        "2080Super",
        "2080Ti",
        "3070",
        "3090",
        "A4000",
        "A4500",
        "A5000",
        "A5500",
        "H100",
    }
    | {"QuadroRTX5000", "QuadroRTX6000", "V100"}
)
# Devices of the largest cluster known, and of those asked for.
SIZES = ((4, 16), (8, 16))

(
    NEIGHBOURS,
    ALONE,
    BATCH_PILOTS,
    CHOSEN_PILOTS,
    TWELVE,
    KIND,
    KIND_PILOTS,
    LARGER,
    EVERYWHERE,
    NEW_GPU,
    SINGLE_KNOWN_GPU,
    NETWORK,
    OUTERMOST,
    MORE_GPUS,
    GENERATION,
    RANDOM,
) = (
    "between neighbours",
    "workload on kind: one-device rows",
    "workload on kind: three pilots at one batch",
    "workload on kind: three pilots of its own choosing",
    "workload on kind: twelve random rows",
    "kind over several machines: one-device rows",
    "kind: and three pilots of one workload",
    "larger clusters",
    "workload everywhere: one-device rows",
    "one device of a kind never measured, network known on others",
    "one device of a kind never measured, network known on one",
    "transformer from facts, others are smaller and larger",
    "smallest and largest transformer from facts",
    "transformers on more than 8 GPUs",
    "transformers on a GPU generation never measured",
    "random rows of transformers",
)
TARGETS: dict[str, tuple[float, float]] = {
    NEIGHBOURS: (5.2, 3.2),
    ALONE: (13, 11),
    BATCH_PILOTS: (9, 7.5),
    CHOSEN_PILOTS: (7, 5.5),
    TWELVE: (7, 5.5),
    KIND: (22, 18),
    KIND_PILOTS: (15, 11),
    LARGER: (8, 6),
    NEW_GPU: (13, 9),
    SINGLE_KNOWN_GPU: (20, 14),
    NETWORK: (4, 4),
    OUTERMOST: (9, 9),
    MORE_GPUS: (4.5, 4.5),
    GENERATION: (13, 13),
    RANDOM: (3.5, 3.5),
}


def described(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs with kind (instance type), machines, ranks, batch, full and even layouts."""
    layout = [[int(counts) for counts in str(text).split("+")] for text in runs["layout"]]
    kind = runs["cluster"].str.split("x", n=1).str[1].str.split("+").str[0]
    devices = kind.map({T4: 4, RTX: 8, V100: 8}).to_numpy()
    return runs.assign(
        kind=kind,
        machines=[len(counts) for counts in layout],
        ranks=[sum(counts) for counts in layout],
        full=[min(counts) == most for counts, most in zip(layout, devices, strict=True)],
        even=[len(set(counts)) == 1 for counts in layout],
        batch=runs["batch_per_device"].astype(float),
    )


def groups(runs: pd.DataFrame, *, final: bool = False, draws: int = DRAWS) -> Iterator[Group]:
    """Yield every group over `runs`, as `described`, of the first `draws` draws.

    A held-out row is never known, nor is any other run of its setup.
    """
    cells = FINAL_CELLS if final else CHOOSING_CELLS
    workload, kind = runs["workload"].to_numpy(str), runs["kind"].to_numpy(str)
    ranks, machines = runs["ranks"].to_numpy(), runs["machines"].to_numpy()
    alone = ranks == 1
    judged = np.array([pair in cells for pair in zip(workload, kind, strict=True)])
    setup = pd.factorize(
        runs["workload"] + runs["cluster"] + runs["layout"] + runs["batch"].astype(str)
    )[0]

    def group(
        table: str, name: str, known: BoolArray, held_out: BoolArray, draw: int = 0, choose: int = 0
    ) -> Group:
        seen = np.isin(setup, setup[known & ~held_out])
        return Group(
            table=table,
            name=name,
            draw=draw,
            known=known & ~held_out,
            held_out=held_out & ~seen,
            choose=choose,
        )

    for draw in range(min(draws, NEIGHBOUR_DRAWS)):
        taken = np.random.default_rng([SEED, draw]).random(setup.max() + 1)[setup] < NEIGHBOUR_SHARE
        yield group(NEIGHBOURS, "all", ~taken, taken & judged, draw)
    for name, device_kind in sorted(cells):
        mine = (workload == name) & (kind == device_kind)
        label, held_out = f"{name} on {device_kind}", mine & ~alone
        yield group(ALONE, label, ~held_out, held_out)
        yield group(CHOSEN_PILOTS, label, ~held_out, held_out, choose=PILOTS)
        for draw, pilots in enumerate(_pilots(runs, mine, label)[:draws]):
            yield group(BATCH_PILOTS, label, ~held_out | pilots, held_out & ~pilots, draw)
        for draw in range(draws):
            random = np.random.default_rng([SEED, draw, zlib.crc32(label.encode())])
            picked = np.zeros(len(runs), dtype=bool)
            picked[random.choice(np.flatnonzero(mine), RANDOM_ROWS, replace=False)] = True
            yield group(TWELVE, label, ~mine | picked, mine & ~picked, draw)
    for name in sorted({name for name, _ in cells}):
        of_group = (workload == name) & ~alone
        yield group(EVERYWHERE, name, ~of_group, of_group & judged)
    for device_kind in sorted({pair[1] for pair in cells}):
        of_group = (kind == device_kind) & ~alone
        yield group(KIND, device_kind, ~of_group, of_group & judged)
        for name in sorted({workload for workload, kind in CHOOSING_CELLS | FINAL_CELLS}):
            for draw, pilots in enumerate(
                _pilots(runs, of_group & (workload == name), f"{device_kind} by {name}")[
                    : min(draws, 3)
                ]
            ):
                yield group(
                    KIND_PILOTS, device_kind, ~of_group | pilots, of_group & judged & ~pilots, draw
                )
    for most, size in SIZES:
        for device_kind in sorted({pair[1] for pair in cells}):
            of_group = kind == device_kind
            held_out = of_group & judged & (ranks == size) & (machines > 1)
            yield group(LARGER, device_kind, ~of_group | (ranks <= most), held_out, most)


def gpu_groups(table: pd.DataFrame, *, final: bool = False, draws: int = DRAWS) -> Iterator[Group]:
    """Yield a group for each GPU kind of the one-machine table, all its forms left out.

    Then the same with each network known on one other kind only, drawn at random.
    """
    gpu, network = table["gpu"].to_numpy(str), table["network"].to_numpy(str)
    for gpu_kind in sorted(FINAL_GPUS if final else CHOOSING_GPUS):
        held_out = gpu == gpu_kind
        yield Group(table=NEW_GPU, name=gpu_kind, draw=0, known=~held_out, held_out=held_out)
        for name in sorted(set(network[held_out])):
            others = sorted(set(gpu[~held_out & (network == name)]))
            random = np.random.default_rng([SEED, zlib.crc32(f"{gpu_kind} {name}".encode())])
            for draw, only in enumerate(random.permutation(others)[: min(draws, 3)]):
                known = ~held_out & ((network != name) | (gpu == only))
                yield Group(
                    table=SINGLE_KNOWN_GPU,
                    name=gpu_kind,
                    draw=draw,
                    known=known,
                    held_out=held_out & (network == name),
                )


def transformer_groups(runs: pd.DataFrame) -> Iterator[Group]:
    """Yield groups of networks, of GPU generations, of numbers of GPUs, and of random rows."""

    def group(table: str, name: str, held_out: BoolArray, draw: int = 0) -> Group:
        return Group(table=table, name=name, draw=draw, known=~held_out, held_out=held_out)

    network, generation = runs["network"].to_numpy(str), runs["device"].str[:4].to_numpy(str)
    sizes = list(runs.groupby("network")["parameters"].min().sort_values().index)
    for name in sizes:
        yield group(NETWORK if name in sizes[1:-1] else OUTERMOST, name, network == name)
    yield group(MORE_GPUS, "all", runs["devices"].to_numpy() > 8)
    for name in sorted(set(generation)):
        yield group(GENERATION, name, generation == name)
    for draw in range(NEIGHBOUR_DRAWS):
        taken = np.random.default_rng([SEED, draw]).random(len(runs)) < NEIGHBOUR_SHARE
        yield group(RANDOM, "all", taken, draw)


def _pilots(runs: pd.DataFrame, candidates: BoolArray, label: str) -> list[BoolArray]:
    """Masks of three pilots at each batch that has all three, in random order.

    One full machine, one device on each of two, two full machines.
    """
    full, machines, ranks = (runs[name].to_numpy() for name in ("full", "machines", "ranks"))
    kinds = [
        candidates & full & (machines == 1),
        candidates & (machines == 2) & (ranks == 2),
        candidates & full & (machines == 2),
    ]
    batch: FloatArray = runs["batch"].to_numpy(float)
    shared = sorted(set(batch[kinds[0]]) & set(batch[kinds[1]]) & set(batch[kinds[2]]))
    order = np.random.default_rng([SEED, zlib.crc32(label.encode())]).permutation(len(shared))
    return [(kinds[0] | kinds[1] | kinds[2]) & (batch == shared[at]) for at in order]
