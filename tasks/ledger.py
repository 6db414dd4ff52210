"""Keeps the regret ledger: hands promises and what was measured since to `models.judging`, and stores its judgement."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

import pandas as pd

from models.told import ledger_summary
from warehouse import append, reads

from .installation import Installation
from .step import Step


@Step
def judge_promises(here: Installation, frames: Mapping[str, pd.DataFrame], refresh_id: str, now: datetime) -> int:
    """Judge every promise by the runs measured since; returns how many judgements are new. Again adds nothing."""
    from models.judging import ledger

    from .circumstances import circumstances

    promises = reads.mart(here.warehouse, "promises", provider=here.provider.name)
    types = frames["instance_types"]
    devices = dict(zip(types["name"], types["devices"].fillna(1).astype(int), strict=True)) if len(types) else {}
    judged = ledger.judge(promises, frames["runs"], frames["workloads"], devices, circumstances(here))
    with here.warehouse.transact() as connection:
        return append.append_ledger(connection, judged, refresh_id=refresh_id, judged_at=now)


def ledger_sentence(published: pd.DataFrame) -> str:
    """What became of the choices, of the published regret_ledger of one provider; empty where none was measured."""
    told = ledger_summary(published)
    if not told["measured"]:
        return ""
    choices = f"{told['measured']} published choice{'s' if told['measured'] != 1 else ''} measured since"
    inside = f"{told['within_interval']:.0%} within the promised interval"
    if told["mean_regret"] is None:
        regret = "no rival of one that held was measured"
    else:
        regret = f"mean regret {told['mean_regret']:.1%} over {told['compared']} compared with rivals"
    return f"ledger: {choices}, {inside}; {regret}; {told['failures']} missed their constraint"
