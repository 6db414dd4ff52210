"""The step-time model as JSON and back, exactly: Python writes floats so that they read back bit for bit."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np

from ..domain.setup_table import SetupArrays
from .machine_specs import Machine
from .memory import MemoryModel
from .model import StepTimeModel
from .physics.compute import ComputeModel, Curve
from .physics.ddp_timeline import Buckets, CollectiveModel, StepParameters
from .physics.device_speed import Speeds
from .physics.flops_prior import from_dict as read_guess
from .physics.physics import Physics
from .residual.kernel import FAMILIES, GIVEN
from .residual.training_state import Measured

_FORMAT = "srift-step-time-7"


class OtherFormat(ValueError):
    """Text that another version of the project wrote, or that is no model at all."""


def dump(model: StepTimeModel) -> str:
    """The model as text."""
    physics, measured = model.physics, model.measured
    compute, setups = physics.compute, measured.setups
    body = {
        "format": _FORMAT,
        "provider": model.provider,
        "machines": {name: asdict(one) for name, one in physics.machines.items()},
        "curves": [[*pair, asdict(one)] for pair, one in compute.curves.items()],
        "speeds": [compute.speeds.devices, compute.speeds.mean.tolist(), compute.speeds.covariance.tolist()],
        "guess": None if compute.guess is None else compute.guess.to_dict(),
        "memory": [[*pair, *line] for pair, line in model.memory.lines.items()],
        "memory_facts": model.memory.facts,
        "memory_ran": model.memory.ran,
        "collectives": physics.collectives.to_dict(),
        "buckets": {name: asdict(one) for name, one in physics.buckets.items()},
        "profiled": sorted(physics.profiled),
        "parameters": physics.parameters.to_dict(),
        "closed": physics.closed.tolist(),
        "own": {name: one.tolist() for name, one in physics.own.items()},
        "by_type": {name: one.tolist() for name, one in physics.by_type.items()},
        "most_devices": physics.most_devices if np.isfinite(physics.most_devices) else None,
        "links_gbps": physics.links_gbps if np.isfinite(physics.links_gbps[1]) else None,
        "measured": {
            "workloads": list(setups.workloads),
            "types": setups.types,
            "batch": setups.batch.tolist(),
            "layout": setups.layout.tolist(),
            "accumulation": setups.accumulation.tolist(),
            "step_s": measured.step_s.tolist(),
            "share": measured.share.tolist(),
            "variances": measured.variances,
            "scale": measured.scale,
            "noisiness": measured.noisiness,
            "shared_scale": measured.shared_scale,
        },
        "trained_on": model.trained_on,
        "workload_digests": model.workload_digests,
        "type_digests": model.type_digests,
    }
    return json.dumps(body, allow_nan=False)


def load(text: str) -> StepTimeModel:
    """The model in `text`. Raises OtherFormat on text that is no such model, or one of other families of effects."""
    body: dict[str, Any] = json.loads(text)
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise OtherFormat(f"not a step-time model of the format {_FORMAT}")
    # read by name: a family of another name or missing would be another regression, or none
    if set(body["measured"]["variances"]) != {*FAMILIES, *GIVEN}:
        raise OtherFormat("a step-time model whose families of effects are not those of today")
    machines = {name: Machine(**one) for name, one in body["machines"].items()}
    return StepTimeModel(
        provider=body["provider"],
        physics=Physics(
            compute=ComputeModel(
                curves={(workload, name): _curve(one) for workload, name, one in body["curves"]},
                machines=machines,
                speeds=_speeds(*body["speeds"]),
                guess=read_guess(body["guess"]) if body.get("guess") else None,
            ),
            collectives=CollectiveModel(**body["collectives"]),
            buckets={
                name: Buckets(size_bytes=tuple(one["size_bytes"]), ready=tuple(one["ready"]))
                for name, one in body["buckets"].items()
            },
            machines=machines,
            profiled=frozenset(body["profiled"]),
            parameters=StepParameters(**body["parameters"]),
            closed=np.array(body["closed"], dtype=float),
            own={name: np.array(one, dtype=float) for name, one in body["own"].items()},
            by_type={name: np.array(one, dtype=float) for name, one in body["by_type"].items()},
            most_devices=np.inf if body["most_devices"] is None else body["most_devices"],
            links_gbps=(0.0, np.inf) if body["links_gbps"] is None else tuple(body["links_gbps"]),
        ),
        measured=_measured(body["measured"]),
        memory=MemoryModel(
            lines={(workload, name): (first, second) for workload, name, first, second in body["memory"]},
            facts={name: (first, second) for name, (first, second) in body.get("memory_facts", {}).items()},
            ran={name: tuple((a, b) for a, b in own) for name, own in body.get("memory_ran", {}).items()},
        ),
        trained_on=tuple(body["trained_on"]),
        # one that does not tell what definitions it met has met none of today's
        workload_digests=body.get("workload_digests", {}),
        type_digests=body.get("type_digests", {}),
    )


def _speeds(devices: list[str], mean: list[float], covariance: list[list[float]]) -> Speeds:
    return Speeds(devices=tuple(devices), mean=np.array(mean), covariance=np.array(covariance))


def _curve(body: dict[str, Any]) -> Curve:
    return Curve(
        batches=tuple(body["batches"]),
        forward_s=tuple(body["forward_s"]),
        backward_s=tuple(body["backward_s"]),
        optimizer_s=body["optimizer_s"],
        origin=body["origin"],
        input_part=body.get("input_part", 0.0),
        off=body["off"],
    )


def _measured(body: dict[str, Any]) -> Measured:
    width = max((len(one) for one in body["types"]), default=1)
    return Measured(
        setups=SetupArrays.of(
            body["workloads"],
            body["types"],
            batch=np.array(body["batch"], dtype=float).reshape(-1, width),
            layout=np.array(body["layout"], dtype=float).reshape(-1, width),
            accumulation=np.array(body["accumulation"], dtype=float),
        ),
        step_s=np.array(body["step_s"], dtype=float),
        share=np.array(body["share"], dtype=float),
        variances=body["variances"],
        scale=body["scale"],
        noisiness=body["noisiness"],
        shared_scale=body["shared_scale"],
    )
