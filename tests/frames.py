"""Training data of a few frames, for tests and benchmarks."""

import pandas as pd

from models.step_time.dataset import TrainingData


def data_of(**frames: pd.DataFrame) -> TrainingData:
    """Return data of these frames; the others are empty."""
    return TrainingData(**dict.fromkeys(TrainingData.__annotations__, pd.DataFrame()) | frames)
