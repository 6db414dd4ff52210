"""The step-time model as JSON and back, exactly: Python writes floats so that they read back bit for bit."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from .communication import CollectiveModel
from .compute import ComputeModel, Curve
from .correction import Correction, Features
from .machines import Machine
from .overlap import Buckets, StepParameters

if TYPE_CHECKING:
    from .step_time import StepTimeModel

_FORMAT = "srift-step-time-1"


def dump(model: StepTimeModel) -> str:
    """The model as text."""
    compute, correction = model.compute, model.correction
    features = correction.features
    body = {
        "format": _FORMAT,
        "provider": model.provider,
        "machines": {name: asdict(one) for name, one in model.machines.items()},
        "curves": [[*pair, asdict(one)] for pair, one in compute.curves.items()],
        "delta": compute.delta,
        "memory": [[*pair, *line] for pair, line in compute.memory.items()],
        "collectives": model.collectives.to_dict(),
        "buckets": {name: asdict(one) for name, one in model.buckets.items()},
        "parameters": model.parameters.to_dict(),
        "correction": {
            "workload": features.workload,
            "slowest_type": features.slowest_type,
            "composition": features.composition,
            "exposed": features.exposed.tolist(),
            "doubt": features.doubt.tolist(),
            "octaves": features.octaves.tolist(),
            "near": features.near.tolist(),
            "near_width": features.near.shape[1],
            "target": correction.target.tolist(),
            "noise": correction.noise.tolist(),
            "variances": correction.variances.tolist(),
            "scale": correction.scale,
        },
        "trained_on": model.trained_on,
        "workload_digests": model.workload_digests,
        "type_digests": model.type_digests,
    }
    return json.dumps(body, allow_nan=False)


def load(text: str) -> StepTimeModel:
    """The model in `text`. Raises ValueError on text that is not such a model."""
    from .step_time import StepTimeModel

    body: dict[str, Any] = json.loads(text)
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise ValueError(f"not a step-time model of the format {_FORMAT}")
    machines = {name: Machine(**one) for name, one in body["machines"].items()}
    return StepTimeModel(
        provider=body["provider"],
        compute=ComputeModel(
            curves={(workload, name): _curve(one) for workload, name, one in body["curves"]},
            delta=body["delta"],
            machines=machines,
            memory={(workload, name): (first, second) for workload, name, first, second in body["memory"]},
        ),
        collectives=CollectiveModel(**body["collectives"]),
        buckets={
            name: Buckets(size_bytes=tuple(one["size_bytes"]), ready=tuple(one["ready"]))
            for name, one in body["buckets"].items()
        },
        machines=machines,
        parameters=StepParameters(**body["parameters"]),
        correction=_correction(body["correction"]),
        trained_on=tuple(body["trained_on"]),
        # an artifact from before these were stored has met no definition of today
        workload_digests=body.get("workload_digests", {}),
        type_digests=body.get("type_digests", {}),
    )


def _curve(body: dict[str, Any]) -> Curve:
    return Curve(
        batches=tuple(body["batches"]),
        forward_s=tuple(body["forward_s"]),
        backward_s=tuple(body["backward_s"]),
        optimizer_s=body["optimizer_s"],
        origin=body["origin"],
    )


def _correction(body: dict[str, Any]) -> Correction:
    return Correction(
        features=Features(
            workload=tuple(body["workload"]),
            slowest_type=tuple(body["slowest_type"]),
            composition=tuple(body["composition"]),
            exposed=np.array(body["exposed"], dtype=float),
            doubt=np.array(body["doubt"], dtype=float),
            octaves=np.array(body["octaves"], dtype=float),
            near=np.array(body["near"], dtype=float).reshape(-1, body["near_width"]),
        ),
        target=np.array(body["target"], dtype=float),
        noise=np.array(body["noise"], dtype=float),
        variances=np.array(body["variances"], dtype=float),
        scale=body["scale"],
    )
