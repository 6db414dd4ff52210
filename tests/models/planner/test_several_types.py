"""A workload known here and there: what one type, one batch, one wire or one run tells of the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest

from models.domain.numeric import Z_90
from models.step_time.model import StepTimeModel, TrainingData, fit
from tests.models.domain.test_rows import model_of, row
from tests.models.synthetic import World


def seconds(
    model: StepTimeModel, cluster: str, batch: int, layout: str = "1", workload: str = "w"
) -> pd.Series[float]:
    """The prediction of one setup."""
    asked = {
        "workload": workload,
        "cluster": cluster,
        "batch_per_device": str(batch),
        "layout": layout,
    }
    return model.predict(pd.DataFrame([asked])).iloc[0]


def lines(
    name: str, fixed_s: float, sample_s: float, batches: tuple[int, ...]
) -> list[dict[str, object]]:
    """One device alone."""
    return [
        row("w", f"1x{name}", one, fixed_s + sample_s * one, layout="1", sync_s=0.0)
        for one in batches
    ]


@pytest.mark.parametrize("optimizer_s", [0.0, 0.1])
def test_a_profile_says_how_other_types_bend(optimizer_s: float) -> None:
    batches = (1, 4, 16, 64)
    profile = pd.DataFrame(
        {
            "workload": "w",
            "instance_type": "a",
            "provider": "ec2",
            "batch": batches,
            "optimizer_s": optimizer_s,
        }
    )
    profile["forward_s"] = [(0.1 + 0.01 * one - optimizer_s) / 3 for one in batches]
    profile["backward_s"] = 2 * profile["forward_s"]
    data = TrainingData(
        runs=pd.DataFrame([row("w", "1xb", 64, 0.37, layout="1", sync_s=0.0, provider="ec2")]),
        **dict.fromkeys(("buckets", "probes", "workloads", "instance_types"), pd.DataFrame()),
        profiles=profile,
    )
    assert seconds(fit(data, seed=0), "1xb", 1)["step_s"] == pytest.approx(0.055, rel=0.2)


@pytest.mark.parametrize("batch", [1, 64])
def test_a_type_seen_at_one_batch_bends_as_the_others_do(batch: int) -> None:
    asked = 65 - batch
    known = lines("a", 0.1, 0.01, (1, 2, 4, 8, 16, 32, 64))
    model = model_of([*known, *lines("b", 0.05, 0.005, (batch,))])
    found = seconds(model, "1xb", asked)
    assert found["step_s"] == pytest.approx(0.05 + 0.005 * asked, rel=0.25)
    alone = seconds(model_of(lines("b", 0.05, 0.005, (batch,))), "1xb", asked)
    assert abs(np.log(alone["step_s"] / (0.05 + 0.005 * asked))) > 0.25  # nobody could know


def test_a_step_that_is_mostly_waiting_tells_little_of_compute() -> None:
    known = lines("a", 0.004, 0.001, (1, 4, 16))
    waiting = row("w", "8xb", 4, 1.0, layout="+".join("1" * 8), sync_s=0.9)
    found = seconds(model_of([*known, waiting]), "1xb", 4)
    assert (
        found["step_high_s"] / found["step_low_s"] > 5
    )  # the 0.1 s that it leaves are perhaps waiting, too


def test_no_device_takes_longer_alone_than_in_a_step_of_a_larger_batch() -> None:
    slow = row("w", "8xa", 4, 0.5, layout="+".join("1" * 8))
    quick = row("w", "2xb", 8, 0.1, layout="1+1")
    same = row("w", "2xa", 4, 0.09, layout="1+1")
    alike = pd.DataFrame([{"name": name, "devices": 1, "cores": 4} for name in ("a", "b")])
    for other, least in ((quick, 15), (same, 5)):
        for rows in ([slow, other], [other, slow]):
            found = seconds(model_of(rows, alike), "1xa", 4)
            assert found["step_s"] < 0.13
            assert found["step_high_s"] / found["step_low_s"] > least, (
                "a guess, wilder where nothing tells of the type"
            )
    assert (
        seconds(model_of([slow, quick]), "1xa", 4)["step_s"] > 0.2
    )  # b may be far quicker, for all that is known


def test_one_row_that_is_far_too_quick_bounds_no_other() -> None:
    rows = [
        row("w", "4xa", batch, 0.02 * batch, layout="1+1+1+1") for batch in (1, 2, 4, 8, 16, 32, 64)
    ]
    odd = row("w", "4xa", 128, 0.005, layout="1+1+1+1")
    for batch in (4, 64):
        found, wanted = (
            seconds(model_of(one), "1xa", batch)["step_s"] for one in ([*rows, odd], rows)
        )
        assert found == pytest.approx(wanted, rel=0.4)


def test_two_runs_that_contradict_each_other_tell_less_than_the_single_runs_around_them() -> None:
    rows = [
        row(
            "w",
            f"{count}xa",
            batch,
            0.02 + 0.01 * batch + 0.02 * (count > 1),
            layout="+".join("1" * count),
        )
        for count in (1, 2, 4, 8)
        for batch in (4, 8, 16, 32)
    ]
    odd = [row("w", "3xa", 8, step, layout="1+1+1") for step in (0.10, 0.30)]
    with_them, without = (
        seconds(model_of(one), "3xa", 8, "1+1+1") for one in ([*rows, *odd], rows)
    )
    assert with_them["step_s"] == pytest.approx(without["step_s"], rel=0.005)


def test_what_is_known_inside_a_machine_says_little_of_the_wires_between_machines() -> None:
    types = pd.DataFrame(
        [
            {"name": name, "devices": 4, "cores": 8, "bandwidth_gbps": 10.0, "digest": name}
            for name in ("a", "b")
        ]
    )
    rows = []
    for workload, size, compute in (("w", 4e8, 0.02), ("v", 2e8, 0.04), ("u", 1e8, 0.03)):
        for name, batch in ((one, batch) for one in ("a", "b") for batch in (4, 8, 16)):
            for layout in ("1", "2", "4") if name == "b" else ("1", "2", "4", "1+1", "2+2", "4+4"):
                used = [int(one) for one in layout.split("+")]
                waited = size * ((len(used) - 1) * 1e-9 + (max(used) - 1) * 3e-11)
                step = compute * batch / 4 + waited
                cluster = f"{len(used)}x{name}"
                rows.append(
                    row(
                        workload,
                        cluster,
                        batch,
                        step,
                        layout=layout,
                        sync_s=waited,
                        gradient_bytes=size,
                    )
                )
    model = model_of(rows, types)
    width = {
        name: np.log(
            seconds(model, f"2x{name}", 8, "4+4").pipe(lambda p: p["step_high_s"] / p["step_low_s"])
        )
        for name in ("a", "b")
    }
    assert width["b"] > 10 * width["a"]  # 8 where one effect stands for both wires


def test_what_joins_the_devices_of_a_machine_is_another_on_every_type() -> None:
    types = pd.DataFrame(
        [{"name": name, "devices": 4, "cores": 8, "bandwidth_gbps": 10.0} for name in ("a", "b")]
    )
    seconds_a_byte = {"a": 5e-12, "b": 1.5e-10}

    def rows_of(
        workload: str, size: float, compute_s: float, layouts: tuple[str, ...]
    ) -> list[dict[str, object]]:
        rows = []
        for name, batch, layout in product(("a", "b"), (4, 8, 16), layouts):
            used = int(layout)
            waited = 2 * (used - 1) / used * size * seconds_a_byte[name]
            step = compute_s * batch / 4 + waited
            facts = {"layout": layout, "sync_s": waited, "gradient_bytes": size}
            rows.append(row(workload, f"1x{name}", batch, step, **facts))
        return rows

    known = [*rows_of("v", 8e8, 0.02, ("1", "2", "4")), *rows_of("u", 4e8, 0.01, ("1", "2", "4"))]
    model = model_of([*known, *rows_of("w", 6e8, 0.03, ("1",))], types)
    for asked in rows_of("w", 6e8, 0.03, ("4",)):
        found = seconds(model, str(asked["cluster"]), int(str(asked["batch_per_device"])), "4")
        assert found["step_s"] == pytest.approx(asked["step_s"], rel=0.25)


def between_machines(names: Iterable[str], b_slower: float = 4.0) -> list[dict[str, object]]:
    """Two workloads on clusters of a and of b, whose links are said to be equal and are not."""
    rows = []
    for (workload, size), name, count, batch in product(
        (("v", 8e8), ("u", 4e8)), names, (1, 2, 4), (4, 8, 16)
    ):
        waited = 2 * (count - 1) / count * size * {"a": 1e-9, "b": b_slower * 1e-9}[name]
        facts = {"layout": "+".join("1" * count), "sync_s": waited, "gradient_bytes": size}
        rows.append(row(workload, f"{count}x{name}", batch, 0.01 * batch + waited, **facts))
    return rows


LINKS = pd.DataFrame(
    [{"name": name, "devices": 1, "cores": 8, "bandwidth_gbps": 10.0} for name in "abc"]
)


def test_a_new_workload_is_answered_with_which_type_gives_less_of_its_nominal_rate() -> None:
    alone = [
        row("w", f"1x{name}", batch, 0.02 * batch, layout="1", sync_s=0.0, gradient_bytes=6e8)
        for name, batch in product("abc", (4, 8, 16))
    ]
    model = model_of([*between_machines("ab"), *alone], LINKS)
    slow, quick = (seconds(model, f"2x{name}", 8, "1+1")["step_s"] for name in "ba")
    assert slow == pytest.approx(0.16 + 2.4, rel=0.15) and quick == pytest.approx(
        0.16 + 0.6, rel=0.15
    )
    unknown = seconds(model, "2xc", 8, "1+1")
    assert unknown["step_low_s"] < 0.16 + 0.6 and unknown["step_high_s"] > 0.16 + 2.4


@pytest.mark.parametrize("gbps", [10.0, 12.0])
def test_a_mixed_cluster_goes_by_the_link_that_was_found_slow_in_any_order(gbps: float) -> None:
    types = LINKS.assign(bandwidth_gbps=[10.0, gbps, 10.0])
    model = model_of(between_machines("ab"), types)
    both = [seconds(model, cluster, 8, "1+1", "v")["step_s"] for cluster in ("1xa+1xb", "1xb+1xa")]
    assert both[0] == pytest.approx(both[1], rel=1e-3)
    assert both[0] == pytest.approx(seconds(model, "2xb", 8, "1+1", "v")["step_s"], rel=0.15)


def test_every_doubling_beyond_the_largest_measured_cluster_is_doubted() -> None:
    rows = []
    for count, batch in ((count, batch) for count in (1, 2, 4) for batch in (4, 8, 16)):
        waited = 0.05 * (count - 1) / count
        rows.append(
            row(
                "w",
                f"{count}xa",
                batch,
                0.005 * batch + waited,
                layout="+".join("1" * count),
                sync_s=waited,
            )
        )
    model = model_of(rows)
    found = [seconds(model, f"{count}xa", 8, "+".join("1" * count)) for count in (4, 8, 16, 32)]
    widths = [float(np.log(one["step_high_s"] / one["step_low_s"])) for one in found]
    assert widths == sorted(widths) and widths[1] > 2 * Z_90 * 0.1 and widths[2] > 2 * Z_90 * 0.2


def test_three_runs_tell_more_than_one_where_every_run_is_as_noisy() -> None:
    data = World(3).data(60)
    at = data.runs.index[data.runs["cluster"] == "2xs.large"][0]
    asked = data.runs.loc[[at]].drop(columns="step_s")
    others = data.runs.drop(index=at)
    noise = np.exp(0.12 * np.random.default_rng(0).standard_normal((3, len(others))))
    others = pd.concat([others.assign(step_s=others["step_s"] * one) for one in noise])
    expected = float(fit(replace(data, runs=others), seed=0).predict(asked)["step_s"].iloc[0])

    def saved(*factors: float) -> float:
        again = [
            data.runs.loc[[at]].assign(step_s=expected * one, run_id=f"again-{one}")
            for one in factors
        ]
        model = fit(replace(data, runs=pd.concat([others, *again])), seed=0)
        return float(model.predict(asked)["step_s"].iloc[0]) / expected

    assert saved(1.0, 1.1, 1.2) > saved(1.1) + 0.005


def test_a_link_unlike_those_measured_or_of_unknown_rate_is_doubted() -> None:
    kinds = {
        "a": 10.0,
        "b": 20.0,
        "near": 15.0,
        "quick": 160.0,
        "quicker": 640.0,
        "slow": 1.0,
        "unknown": None,
    }
    types = pd.DataFrame(
        [{"name": name, "devices": 1, "cores": 8, "bandwidth_gbps": kinds[name]} for name in kinds]
    )
    alone = [
        row("v", f"1x{name}", 8, 0.08, layout="1", sync_s=0.0, gradient_bytes=8e8) for name in kinds
    ]
    model = model_of([*between_machines("ab", b_slower=0.5), *alone], types)

    def width(name: str, count: int = 4) -> float:
        found = seconds(model, f"{count}x{name}", 8, "+".join("1" * count), "v")
        return float(np.log(found["step_high_s"] / found["step_low_s"]))

    assert min(width(name) for name in ("near", "quick", "quicker", "slow", "unknown")) > 3 * max(
        width("a"), width("b")
    )
    alike = [width(name, 1) for name in kinds]  # nothing goes over a link
    assert max(alike) < 0.1
