"""The shared vocabulary of edge brokers: interests, their log, and the frames between broker and end user."""
