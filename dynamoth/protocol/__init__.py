"""The wire format: envelopes, control messages, reports and the stored plan."""
