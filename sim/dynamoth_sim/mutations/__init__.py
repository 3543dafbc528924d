"""For each scenario, the production code with its remedy switched off."""
