"""The edge broker: serves end users over WebSocket and server-sent events."""
