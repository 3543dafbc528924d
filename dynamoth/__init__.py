"""The shared vocabulary of Dynamoth: pure data and functions, with no I/O."""
