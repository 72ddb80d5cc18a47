"""The error that the trainer reports in one line, without a traceback."""

import errno

# What a write reports when the disk, the quota or the file size limit is used up.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class TrainError(Exception):
    """Something the user can put right: the text names it, what came, and what is accepted."""
