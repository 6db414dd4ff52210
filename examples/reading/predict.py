"""Predict step times with the model in use (alias champion), without Srift or torch.

python predict.py SRIFT_HOME WORKLOAD CLUSTER [CLUSTER ...]
Needs mlflow and the requirements that are logged with the model.
"""

import sys

import mlflow
import pandas as pd

home, workload, *clusters = sys.argv[1:]
mlflow.set_tracking_uri(f"sqlite:///{home}/mlflow.db")
model = mlflow.pyfunc.load_model("models:/srift-step-time-local@champion")
asked = pd.DataFrame(
    [{"workload": workload, "cluster": one, "batch_per_device": 8} for one in clusters]
)
answer = model.predict(asked)
for cluster, row in zip(clusters, answer.to_dict("records"), strict=True):
    low, high = row["step_low_s"], row["step_high_s"]
    print(
        f"{cluster}: {row['step_s']:.3g} s a step ({low:.3g}-{high:.3g}),"
        f" limited by {row['bottleneck']}"
    )
