"""Watch drift, slow runs, past recommendations and dollars, and report the status."""
