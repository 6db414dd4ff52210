"""End whatever outlived its deadline or its controller, and bring home what it had measured."""

from __future__ import annotations

from datetime import UTC, datetime

from prefect import flow

from tasks.installation import open_installation
from tasks.reaping import end_and_collect
from tasks.report import reporter


@flow(name="reap", log_prints=True)
def reap(provider: str = "local") -> list[str]:
    """Returns a sentence for each thing ended; none means that nothing was left running."""
    sentences = end_and_collect(open_installation(provider), datetime.now(UTC))
    for sentence in sentences:
        reporter().say(sentence)
    return sentences
