"""Answer questions with the model in use, suggest measurements, and publish the table."""
