"""Decisions, pure: predictor, calibration, choice of mode. No torch, no I/O; the clock is passed in."""
