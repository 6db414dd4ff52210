"""Embedding tables on hosts that look up, beside hosts that compute, against either kind alone.

A `fast` host has FAST cores, a `wide` one WIDE; both have the same link. The recommender, with tables of ROWS rows,
runs at one global batch on each kind alone, on one host and on as many as two cores have room for, in `ddp` and
`tables`; and on one of each, in `ddp` with a batch by speed, and in `tables` with nearly all samples on the fast one,
so that the wide one has the tables.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from models.campaign.campaign import Launch
from models.domain.workload import TABLES, Mode
from tasks.workspace.workspace import Workspace
from tests.benchmarks.input_wait import cluster_of
from tests.benchmarks.trial import Unseen, launch_of

FAST, WIDE, GBPS = 0.8, 0.3, 1.0
ROWS, BATCH, LEAST = 30_000, 192, 8
NAME = "wide_recommender"
SETTINGS = "".join(
    f"[local.instance_types.{name}]\ncores = {cores}\nmemory_gib = 3.0\nbandwidth_gbps = {GBPS}\n"
    "usd_per_hour = 0.05\nspot_usd_per_hour = 0.02\nspot_interruptions_per_hour = 0.1\n\n"
    for name, cores in (("fast", FAST), ("wide", WIDE))
) + (
    f'[workloads.{NAME}]\nentrypoint = "recommender.py:build"\nsamples = 100000\nglobal_batch = {BATCH}\n'
    f'strategies = ["ddp", "{TABLES}"]\narguments = {{ rows = {ROWS} }}\ngoals = [{{ goal = "cheapest" }}]\n\n'
)
_BY_SPEED = round(BATCH * FAST / (FAST + WIDE))
SETUPS: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    "1xfast": [("ddp", (BATCH,))],
    "2xfast": [(one, (BATCH // 2,) * 2) for one in ("ddp", TABLES)],
    "1xwide": [("ddp", (BATCH,))],
    "3xwide": [(one, (BATCH // 3,) * 3) for one in ("ddp", TABLES)],
    "1xfast+1xwide": [("ddp", (_BY_SPEED, BATCH - _BY_SPEED)), (TABLES, (BATCH - LEAST, LEAST))],
}


def launches(here: Workspace, runs: pd.DataFrame) -> list[Launch]:
    """A launch a cluster, of what was not measured yet."""
    own = runs[runs["workload"] == NAME] if len(runs) else runs
    known = set(zip(own["cluster"], own["strategy"], strict=True)) if len(own) else set()
    found = []
    for text, setups in SETUPS.items():
        cluster = cluster_of(here, text)
        items = [
            Unseen(
                workload=NAME,
                mode=Mode(strategy=strategy),
                nodes=tuple(range(len(batches))),
                batches=batches,
            )
            for strategy, batches in setups
            if (cluster.name, strategy) not in known
        ]
        found += (
            [launch_of(cluster, items, "to judge two kinds of hosts in one training")]
            if items
            else []
        )
    return [replace(one, est_s=2 * one.est_s) for one in found]


def steps_of(runs: pd.DataFrame) -> pd.DataFrame:
    """A row a setup: seconds a step, and `kinds` of host in it, in order of seconds."""
    own = runs[runs["workload"] == NAME]
    columns = ["cluster", "strategy", "batch_per_device", "step_s", "step_spread"]
    return (
        own[columns]
        .assign(kinds=own["cluster"].str.count(r"\+") + 1)
        .sort_values("step_s", ignore_index=True)
    )
