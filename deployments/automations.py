"""Install Prefect automations that notify operators.

Run `automations.py --notify slack-webhook/oncall`. The value of `--notify` is the `type/name` of a
notification block on the Prefect server. The command `prefect block ls` lists the blocks.

Operators are notified in these cases:

- A refresh deployment with an active schedule does not complete for 26 hours.
- A new model is not promoted.
- Too many new runs are outside their predicted intervals (drift).
- Launches have spent or reserved 80 % of the monthly dollar cap.
"""

import sys
from datetime import timedelta
from typing import Annotated, Any

import typer
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import StateType
from prefect.events import AutomationCore, EventTrigger, Posture, ResourceSpecification
from prefect.events.actions import ChangeFlowRunState, SendNotification
from prefect.exceptions import ObjectNotFound

from tasks.reporting.progress import DRIFTED, MONEY_SHORT, PROMOTION_REFUSED

OVERDUE = timedelta(hours=26)
SUBJECTS = {
    PROMOTION_REFUSED: "Srift: a new model was not promoted",
    DRIFTED: "Srift: the model in use drifted",
    MONEY_SHORT: "Srift: most of the month's dollars are spent",
}
_ANY_RUN = ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*"})
_HEARTBEAT = "prefect.flow-run.heartbeat"
_ENDED = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}


def without_heartbeat() -> AutomationCore:
    """Return an automation that marks a flow run as crashed after three missed heartbeats."""
    # Prefect's documentation recommends this automation.
    return AutomationCore(
        name="srift: crash runs without a heartbeat",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            after={_HEARTBEAT},
            expect={_HEARTBEAT, *_ENDED},
            match=_ANY_RUN,
            for_each={"prefect.resource.id"},
            within=timedelta(seconds=90),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message="its process is gone")],
    )


def overdue(block: Any, deployment: str) -> AutomationCore:
    """Return an automation that notifies operators if `deployment` does not complete for 26 hours.

    block: id of the Prefect notification block that sends the notification.
    """
    body = f"{deployment} did not complete within {OVERDUE}; run `srift status` for details."
    return AutomationCore(
        name=f"srift: {deployment} did not complete",
        trigger=EventTrigger(
            posture=Posture.Proactive,
            expect={"prefect.flow-run.Completed"},
            match=_ANY_RUN,
            match_related=ResourceSpecification(
                {"prefect.resource.role": "deployment", "prefect.resource.name": deployment}
            ),
            within=OVERDUE,
        ),
        actions=[
            SendNotification(block_document_id=block, subject="Srift: no fresh table", body=body)
        ],
    )


def notify_on_event(block: Any, event: str, subject: str) -> AutomationCore:
    """Return an automation that sends a notification when a flow emits `event`.

    block: id of the Prefect notification block that sends the notification.
    event: name of the Prefect event.
    subject: subject line of the notification.
    """
    return AutomationCore(
        name=f"srift: {event.removeprefix('srift.')}",
        trigger=EventTrigger(
            posture=Posture.Reactive,
            expect={event},
            match=ResourceSpecification({"prefect.resource.id": "srift.*"}),
        ),
        actions=[
            SendNotification(
                block_document_id=block, subject=subject, body="{{ event.payload.message }}"
            )
        ],
    )


def put(client: SyncPrefectClient, automation: AutomationCore) -> None:
    """Create the automation, or update the existing automation with the same name."""
    if known := client.read_automations_by_name(automation.name):
        client.update_automation(known[0].id, automation)
    else:
        client.create_automation(automation)


def install(client: SyncPrefectClient, notify: str) -> list[str]:
    """Install the automations that notify operators, and return the automations' names.

    Three automations notify of a refused promotion, of drift, and of a cap that is nearly spent or
    cannot be checked. For each refresh deployment with an active schedule, another automation
    notifies of overdue refreshes.

    notify: the notification block as `type/name`, such as `slack-webhook/oncall`.
    Raises ObjectNotFound if the block does not exist.
    """
    kind, _, name = notify.partition("/")
    block = client.read_block_document_by_name(name=name, block_type_slug=kind).id
    wanted = [notify_on_event(block, event, subject) for event, subject in SUBJECTS.items()]
    for deployment in client.read_deployments():
        scheduled = any(schedule.active for schedule in deployment.schedules)
        if scheduled and deployment.entrypoint == "flows.refresh.refresh":
            wanted.append(overdue(block, deployment.name))
    for automation in wanted:
        put(client, automation)
    return [deployment.name for deployment in wanted]


def main(notify: Annotated[str, typer.Option(help="`type/name` of a notification block.")]) -> None:
    """Install the automations on the Prefect server at PREFECT_API_URL."""
    with get_client(sync_client=True) as client:
        try:
            print("\n".join(install(client, notify)))
        except ObjectNotFound:
            sys.exit(f"found no notification block {notify!r}: see `prefect block ls`")


if __name__ == "__main__":
    typer.run(main)
