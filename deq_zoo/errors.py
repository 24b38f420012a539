"""Errors that the command line prints as one paragraph, without a traceback."""


class ZooError(Exception):
    """An error that the user can correct; the message says what is wrong and what to do."""


class DataError(ZooError):
    """Data that is missing, damaged or of another kind than expected."""


class CheckpointError(ZooError):
    """A checkpoint that cannot be read, or does not fit the model."""


class MissingPackage(ZooError):
    """An optional package that is not installed."""
