"""Backends: one interface, several ways to run a plan."""
