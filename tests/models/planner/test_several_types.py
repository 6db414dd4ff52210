"""What one type, batch, link or run shows about others."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import numpy as np
import pandas as pd
import pytest

from models.domain.numeric import Z_90
from models.step_time.model import StepTimeModel
from tests.models.domain.test_rows import model_of, row


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
