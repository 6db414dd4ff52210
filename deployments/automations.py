"""Prefect automations that tell somebody: `python deployments/automations.py --notify slack-webhook/oncall`.

    a nightly refresh that did not complete for 26 hours         a promotion refused
    drift: the model in force is off on new runs                 80 % of a month's dollars spent or held

`--notify` names a notification block of the Prefect server (`prefect block ls`), as `type/name`. Run again, it puts
each automation right instead of adding another. The last three follow the events that the flows send:
`tasks/reporting/progress.py` names them.
"""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from typing import Any

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events import (
    AutomationCore,
    EventTrigger,
    Posture,
    ResourceSpecification,
    SendNotification,
)
from prefect.exceptions import ObjectNotFound

from tasks.reporting.progress import DRIFTED, MONEY_SHORT, PROMOTION_REFUSED

OVERDUE, OVERDUE_NAME = timedelta(hours=26), "srift: {} did not complete"
SAID = {
    PROMOTION_REFUSED: "Srift: a new model was not put in force",
    DRIFTED: "Srift: the model in force drifted",
    MONEY_SHORT: "Srift: most of the month's dollars are spent",
}


def refreshes(client: SyncPrefectClient) -> dict[str, bool]:
    """Names of the server's deployments of a refresh, and whether each runs by a schedule."""
    found = client.read_deployments()
    ours = [one for one in found if one.entrypoint == "flows.refresh.refresh"]
    return {
        one.name: not one.paused and any(clock.active for clock in one.schedules) for one in ours
    }


def automations(block: Any, deployments: list[str]) -> list[AutomationCore]:
    """Each with a notification through `block`, a block document's id."""

    def tell(subject: str, body: str) -> list[Any]:
        return [SendNotification(block_document_id=block, subject=subject, body=body)]

    overdue = [
        AutomationCore(
            name=OVERDUE_NAME.format(name),
            description="A refresh that fails, waits for ever or is never started: the table grows old.",
            trigger=EventTrigger(
                posture=Posture.Proactive,
                expect={"prefect.flow-run.Completed"},
                match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"}),
                match_related=ResourceSpecification(
                    {"prefect.resource.role": "deployment", "prefect.resource.name": name}
                ),
                threshold=1,
                within=OVERDUE,
            ),
            actions=tell(
                "Srift: no fresh table",
                f"{name} did not complete within {OVERDUE.total_seconds() / 3600:.0f} hours. `srift status` says what"
                " is running and what is stale; the flow run's log says where it ended.",
            ),
        )
        for name in deployments
    ]
    told = [
        AutomationCore(
            name=f"srift: {event.removeprefix('srift.')}",
            trigger=EventTrigger(
                posture=Posture.Reactive,
                expect={event},
                match=ResourceSpecification({"prefect.resource.id": "srift.*"}),
                threshold=1,
                within=timedelta(0),
            ),
            actions=tell(subject, "{{ event.payload.said }}"),
        )
        for event, subject in SAID.items()
    ]
    return overdue + told


def install(client: SyncPrefectClient, notify: str, deployments: dict[str, bool]) -> list[str]:
    """Create each automation, or update that of its name, and delete those of refreshes that run by no schedule any
    more; returns the names. Raises ValueError for an unknown block.
    """
    kind, _, name = notify.partition("/")
    try:
        block = client.read_block_document_by_name(name=name, block_type_slug=kind)
    except ObjectNotFound as error:
        raise ValueError(
            f"no block {notify!r}: `prefect block ls` lists those that there are"
        ) from error
    wanted = automations(block.id, [name for name, active in deployments.items() if active])
    for one in wanted:
        if known := client.read_automations_by_name(one.name):
            client.update_automation(known[0].id, one)
        else:
            client.create_automation(one)
    for name in (name for name, active in deployments.items() if not active):
        for old in client.read_automations_by_name(OVERDUE_NAME.format(name)):
            client.delete_automation(old.id)
    return [one.name for one in wanted]


def main() -> None:
    """Install them on the server that PREFECT_API_URL names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--notify", required=True, metavar="TYPE/NAME", help="a notification block")
    given = parser.parse_args()
    with get_client(sync_client=True) as client:
        try:
            scheduled = refreshes(client)
            names = install(client, given.notify, scheduled)
        except ValueError as error:
            sys.exit(str(error))
    print("\n".join(names))
    for name in (name for name, active in scheduled.items() if not active):
        print(
            f"{name} is paused: no alarm that it did not complete. Once it is resumed, install again"
        )


if __name__ == "__main__":
    main()
