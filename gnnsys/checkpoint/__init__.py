"""What a job is, saved and restored: dense states, trained tables, loader positions and generators of every rank."""

from gnnsys.checkpoint.folder_lock import FolderLock
from gnnsys.checkpoint.resuming import resume
from gnnsys.checkpoint.saver import STAGES, Saver

__all__ = ["STAGES", "FolderLock", "Saver", "resume"]
