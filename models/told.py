"""What the regret ledger and the judgements of drift say, in numbers and words. Judges nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

_HOW = {
    "slower": "runs slower than predicted",
    "faster": "runs faster than predicted",
    "either way": "runs unlike what was predicted, some slower and some faster,",
    "none": "runs as predicted",
}


def ledger_summary(ledger: pd.DataFrame) -> dict[str, float | int | None]:
    """Of the mart regret_ledger: choices measured and compared, failures, mean and worst regret, part in interval."""
    compared = ledger[ledger["verdict"] == "compared"]["regret"].astype(float)
    return {
        "measured": len(ledger),
        "compared": len(compared),
        "failures": int((ledger["verdict"] == "missed_constraint").sum()),
        "mean_regret": float(compared.mean()) if len(compared) else None,
        "worst_regret": float(compared.max()) if len(compared) else None,
        "within_interval": float(ledger["within_interval"].astype(float).mean()) if len(ledger) else None,
    }


def drift_sentence(row: Mapping[str, Any]) -> str:
    """A row of the mart `drift` in words: where, how many, how far, since when, and what happens about it."""
    whole = row["scope"] == "provider"
    where = "everything" if whole else f"{row['instance_type']} in {row['zone'] or 'an unknown zone'}"
    how = _HOW[str(row["direction"])]
    since = f" since {row['since']:%Y-%m-%d %H:%M} UTC" if pd.notna(row["since"]) else ""
    by = f"by {float(row['median_ratio']) - 1:+.0%} in the median of {row['runs']} recent runs"
    again = "measures again what was known well" if whole else "measures it again first"
    return f"drift: {where} {how}{since}, {by}, {row['outside']} outside their intervals; the next campaign {again}"
