"""Scripts that provoke one fault each."""
