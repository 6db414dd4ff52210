"""Act when another cluster becomes the first choice: follow the events of PREFECT_API_URL.

It needs prefect alone, and runs until Ctrl-C. A server of `make up` needs PREFECT_API_AUTH_STRING.
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
