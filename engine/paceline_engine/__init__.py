"""The engine: it runs plans. It knows nothing of SLOs.

The vocabulary (mode, plan, request, chunk, timeline, snapshot, errors) is importable
without torch; what computes is imported by the worker alone.
"""
