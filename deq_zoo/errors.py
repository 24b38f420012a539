"""Errors that a person at a terminal should read as one paragraph, not as a traceback."""


class ZooError(Exception):
    """Something the user can put right; the message says what, and how."""


class DataError(ZooError):
    """Data that is missing, or not what it should be."""


class CheckpointError(ZooError):
    """A checkpoint that cannot be read, or does not fit."""


class MissingPackage(ZooError):
    """An optional package that is not installed."""
