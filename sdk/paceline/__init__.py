"""Paceline: inference for agents that must answer in time."""
