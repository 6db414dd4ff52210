"""What start-up, checkpoints and interruptions a job meets on a cluster: the learned models, asked for its machines.

A cluster may mix markets: only its spot machines are interrupted, all of them must start, and what is replaced is a
spot machine, whose type is as likely as its share of the interruptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from .checkpoints import CheckpointModel
from .cloud import Cluster
from .hazard import HazardModel
from .startup import StartupModel

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """One number a job: what `spot.job_time` takes beside the work and the price."""

    hazard_per_hour: Floats
    doubt: Floats
    bunching: Floats
    startup_s: Floats
    startup_log_sd: Floats
    checkpoint_s: Floats
    checkpoint_log_sd: Floats
    replacement_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What our own launches, checkpoints and interruptions have taught, each beside its prior."""

    startup: StartupModel
    checkpoint: CheckpointModel
    hazard: HazardModel

    def conditions(
        self, cluster: Cluster, work_hours: float, state_bytes: float, start_hour: float | None = None
    ) -> Conditions:
        """What a job of `work_hours` meets on `cluster`, started at `start_hour` of the day (UTC; None: at any).

        Reading a checkpoint back is taken to last as long as writing it. Raises ValueError for an unknown market.
        """
        launch = self.startup.gang((offer.instance_type.name, offer.market) for offer in cluster.members)
        spot = [(offer.instance_type.name, offer.zone) for offer in cluster.members if offer.market == "spot"]
        gang = self.hazard.gang(spot, hours=work_hours, start_hour=start_hour)
        write_s = float(self.checkpoint.seconds(state_bytes / 1e6))
        again_s = [self.startup.gang([(kind, "spot")]).mean_s for kind, _ in spot]
        shares = [self.hazard.machine(*pool, hours=work_hours, start_hour=start_hour).per_hour for pool in spot]
        numbers = {
            "hazard_per_hour": gang.per_hour,
            "doubt": gang.doubt,
            "bunching": gang.bunching,
            "startup_s": launch.mean_s,
            "startup_log_sd": launch.log_sd,
            "checkpoint_s": write_s,
            "checkpoint_log_sd": float(self.checkpoint.log_sd(state_bytes / 1e6)),
            "replacement_s": write_s + (float(np.average(again_s, weights=shares)) if spot else 0.0),
        }
        return Conditions(**{name: np.array([number]) for name, number in numbers.items()})


def joined_conditions(jobs: Sequence[Conditions]) -> Conditions:
    """Conditions of several jobs as one, in order; empty for none."""
    empty = np.zeros(0)
    return Conditions(
        **{one.name: np.concatenate([getattr(job, one.name) for job in jobs] or [empty]) for one in fields(Conditions)}
    )
