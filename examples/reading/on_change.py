"""Print a line whenever a recommendation changes, from the events of Prefect's server.

Needs only prefect, and runs until Ctrl-C. Set PREFECT_API_URL, and for the server of `make up` also
PREFECT_API_AUTH_STRING.
"""

import asyncio

from prefect.events.clients import get_events_subscriber
from prefect.events.filters import EventFilter, EventNameFilter

CHANGED = EventFilter(event=EventNameFilter(name=["srift.recommendation.changed"]))


async def follow() -> None:
    """Print each change when its event arrives."""
    async with get_events_subscriber(filter=CHANGED) as events:
        print("following", flush=True)
        async for event in events:
            print(f"{event.occurred:%Y-%m-%d %H:%M}  {event.payload['said']}", flush=True)


asyncio.run(follow())
