"""The report on a step: one HTML page, which needs no network."""
