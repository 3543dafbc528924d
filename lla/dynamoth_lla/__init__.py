"""The local load analyzer: measurement at one server."""
