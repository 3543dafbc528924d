"""The agent process of one server: hosts its dispatcher and its LLA."""
