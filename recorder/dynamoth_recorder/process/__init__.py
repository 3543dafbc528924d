"""The process of a recorder: files, metrics and signals."""
