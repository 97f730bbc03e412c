"""The one process per host and user that others talk to. Runs no user code, unpickles nothing, never imports torch."""
