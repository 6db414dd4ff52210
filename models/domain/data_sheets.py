"""Read the data sheets of GPUs."""

import re
from functools import cache
from pathlib import Path

import pandas as pd


@cache
def data_sheets() -> pd.DataFrame:
    """Return the table gpu_data_sheets.csv, with the name of the device as index.

    The peak rates are without sparsity. The column `checked` has the URL of a page that confirms
    the row, or NaN.
    """
    return pd.read_csv(Path(__file__).with_name("gpu_data_sheets.csv")).set_index("device")


@cache
def sheets_of(device: str) -> pd.DataFrame:
    """Return the data sheets of a device, with one row per memory size.

    The case of letters in `device` does not matter.
    """
    table = data_sheets()
    return table[table.index.str.fullmatch(re.escape(device.lower()) + "( [0-9]+gb)?")]
