"""Act when another cluster becomes the first choice: follows the events of the server that PREFECT_API_URL names.

It needs prefect alone, and goes on until Ctrl-C. A server that `make up` serves takes PREFECT_API_AUTH_STRING too.
"""

import asyncio

from prefect.events.clients import get_events_subscriber
from prefect.events.filters import EventFilter, EventNameFilter

CHANGED = EventFilter(event=EventNameFilter(name=["srift.recommendation.changed"]))


async def follow() -> None:
    """Print each change, as it comes."""
    async with get_events_subscriber(filter=CHANGED) as events:
        print("following", flush=True)
        async for event in events:
            print(f"{event.occurred:%Y-%m-%d %H:%M}  {event.payload['said']}", flush=True)


asyncio.run(follow())
