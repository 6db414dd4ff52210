"""What one type, batch, link or run shows about others."""

from itertools import product

import numpy as np
import pandas as pd

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
