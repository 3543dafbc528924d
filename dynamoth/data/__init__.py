"""The vocabulary of the data cluster, pure: datasets, records, standing queries, and who is interested in them."""
