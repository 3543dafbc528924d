"""An emergency notification application on Dynamoth's data cluster and edge brokers: see README.md."""
