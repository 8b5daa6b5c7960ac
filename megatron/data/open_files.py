"""The limit of open files: a rank keeps several for every corpus of a blend."""

import resource

from megatron.errors import ConfigError

FILES_OF_CORPUS = 3
"""``.bin``, and the mappings of ``.bin`` and ``.idx``: Python keeps a file descriptor for each mapping."""
FILES_OF_ORDER = 5
"""The mapped arrays of a sample order, at most."""
_OTHERS = 1024  # files of the run that are not of corpora: sockets, checkpoints, libraries


def allow_open_files(num_corpora: int, files_of_each: int) -> None:
    """Let this process open the files of ``num_corpora``, in place of the 1,024 that many systems allow at first.

    Raises :class:`ConfigError` if the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_corpora * files_of_each
    wanted = needed + _OTHERS
    if _covers(soft, wanted):
        return
    limit = wanted if _covers(hard, wanted) else hard
    if limit <= needed:
        raise ConfigError(
            f"{num_corpora} corpora need {wanted} open files in each process, but the hard limit is {hard}: raise it "
            "(ulimit -Hn), or merge corpora with tools/merge_datasets.py."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _covers(limit: int, count: int) -> bool:
    return limit == resource.RLIM_INFINITY or limit >= count
