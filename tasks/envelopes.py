"""Where a run was measured, as its envelope tells it: of the machines asked for, and again of those really got."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from models.cloud import Cluster, Offer

from .node.record import Item

Envelope = Mapping[str, Any]


def whereabouts(members: Sequence[Offer]) -> dict[str, Any]:
    """Market, zone, region and dollars an hour of the machines that take part; several markets are joined by '+'."""
    return {
        "market": "+".join(sorted({member.market for member in members})),
        "zone": members[0].zone,
        "region": members[0].region,
        "usd_per_hour": Cluster(members=tuple(members)).usd_per_hour,
    }


def as_got(envelopes: Mapping[str, Envelope], items: Iterable[Item], got: Cluster) -> dict[str, Envelope]:
    """`envelopes` with those of `items` as they are on the cluster that was got: it may be elsewhere, and dearer."""
    found = {item.run_id: whereabouts([got.members[node] for node in item.nodes]) for item in items}
    return {run_id: {**envelope, **found.get(run_id, {})} for run_id, envelope in envelopes.items()}
