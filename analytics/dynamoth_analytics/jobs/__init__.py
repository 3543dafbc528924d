"""The jobs of a report: functions from data frames to data frames, one module per subject, and what runs them."""
