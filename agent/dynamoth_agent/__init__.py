"""The agent of one server: hosts its dispatcher and its local load analyzer (LLA)."""
