"""What one type, batch, link or run shows about others."""

from itertools import product

import numpy as np
import pandas as pd
import pytest

from models.domain.numeric import Z_90
from models.step_time.model import TrainingData, fit

NONE = pd.DataFrame()


def model_of(rows, types=NONE):
    empty = dict.fromkeys(("profiles", "buckets", "probes", "workloads"), NONE)
    runs = pd.DataFrame(rows).assign(provider="ec2")
    return fit(TrainingData(runs=runs, instance_types=types, **empty), seed=0)


def row(workload, cluster, batch, step_s, **facts):
    setup = {"workload": workload, "cluster": cluster, "batch_per_device": str(batch)}
    return setup | {"step_s": step_s} | facts


def seconds(model, cluster, batch, layout="1", workload="w"):
    """The prediction of one setup."""
    return model.predict(pd.DataFrame([row(workload, cluster, batch, 0.0, layout=layout)])).iloc[0]


def log_width(found):
    return float(np.log(found["step_high_s"] / found["step_low_s"]))


def between_machines(names, b_slower=4.0):
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


def test_a_new_workload_is_answered_with_which_type_gives_less_of_its_nominal_rate():
    alone = [
        row("w", f"1x{name}", batch, 0.02 * batch, layout="1", sync_s=0.0, gradient_bytes=6e8)
        for name, batch in product("abc", (4, 8, 16))
    ]
    model = model_of([*between_machines("ab"), *alone], LINKS)
    slow, quick = (seconds(model, f"2x{name}", 8, "1+1")["step_s"] for name in "ba")
    assert [slow, quick] == pytest.approx([0.16 + 2.4, 0.16 + 0.6], rel=0.15)
    unknown = seconds(model, "2xc", 8, "1+1")
    assert unknown["step_low_s"] < 0.16 + 0.6 and unknown["step_high_s"] > 0.16 + 2.4


def test_every_doubling_beyond_the_largest_measured_cluster_is_doubted():
    rows = []
    for count, batch in product((1, 2, 4), (4, 8, 16)):
        waited = 0.05 * (count - 1) / count
        facts = {"layout": "+".join("1" * count), "sync_s": waited}
        rows.append(row("w", f"{count}xa", batch, 0.005 * batch + waited, **facts))
    model = model_of(rows)
    widths = [
        log_width(seconds(model, f"{count}xa", 8, "+".join("1" * count)))
        for count in (4, 8, 16, 32)
    ]
    assert widths == sorted(widths) and widths[1] > 2 * Z_90 * 0.1 and widths[2] > 2 * Z_90 * 0.2
