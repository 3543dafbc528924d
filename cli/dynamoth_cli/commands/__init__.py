"""One module for each command of `dynamoth`."""
