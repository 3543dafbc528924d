"""The data cluster: datasets and standing queries on Spark."""
