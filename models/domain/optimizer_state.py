"""Estimate the size of a checkpoint, which has the weights and the states of the optimizer."""

_PER_GRADIENT = 3.0  # the weights and the two moments of Adam


def checkpoint_bytes(gradient_bytes: float | None, measured: float | None = None) -> float:
    """Return the size of a checkpoint in bytes.

    The result is the `measured` size if it is known, else an estimate from `gradient_bytes`. It is
    0 if neither is known.
    """
    for known, factor in ((measured, 1.0), (gradient_bytes, _PER_GRADIENT)):
        if known is not None and known > 0:
            return factor * known
    return 0.0
