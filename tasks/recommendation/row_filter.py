"""Filter the rows of the published table by the values that a user names."""

from collections.abc import Sequence

from models.domain.suggestions import nearest_names

from ..reporting.progress import Row
from ..workspace.settings import SettingsError


def rows_with(rows: Sequence[Row], **wanted: str | None) -> Sequence[Row]:
    """Return the published rows with the wanted value in each column.

    wanted: {column: value}. None accepts every value.

    Raises SettingsError if no row has all wanted values.
    """
    for column, value in wanted.items():
        if value is not None:
            known = {row[column] for row in rows}
            if value not in known:
                near = nearest_names(value, known)
                raise SettingsError(f"no published row has {column} {value!r}; {near}")
            rows = [row for row in rows if row[column] == value]
    return rows
