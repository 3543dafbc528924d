"""Installs plans: who may lead (lease), how a leader begins (takeover), and the phases of each change (installer)."""
