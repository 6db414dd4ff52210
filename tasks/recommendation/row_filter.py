"""Filter the rows of the published table by the values that a user names."""

from collections.abc import Sequence

from models.domain.suggestions import nearest_names

from ..reporting.progress import Row
from ..workspace.settings import SettingsError


def rows_with(rows: Sequence[Row], **conditions: str | None) -> Sequence[Row]:
    """Return the published rows with the wanted value in each column.

    conditions: {column: value}. None accepts every value.

    Raises SettingsError if no row has all wanted values.
    """
    for column, value in conditions.items():
        if value is not None:
            values = {row[column] for row in rows}
            if value not in values:
                near = nearest_names(value, values)
                raise SettingsError(f"no published row has {column} {value!r}; {near}")
            rows = [row for row in rows if row[column] == value]
    return rows
