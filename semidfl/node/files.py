"""How many files and connections a process may have open."""

import contextlib

__all__ = ["allow_many_files"]


def allow_many_files() -> None:
    """As many as the system lets this account have: many start with 1024, which a large federation may need itself."""
    try:
        import resource
    except ImportError:  # not on Windows, which has no such limit
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS names a limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
