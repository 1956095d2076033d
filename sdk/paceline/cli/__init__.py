"""The command line: ``paceline demo``, ``paceline plan``, ``paceline bench``, ``paceline info``."""
