"""What goes over the wire: names, envelopes, control messages, reports and the stored plan."""
