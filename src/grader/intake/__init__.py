"""Submissions on their way in: files, folders, ZIPs of learning platforms, rosters."""

from grader.intake.archives import read_archive
from grader.intake.file_names import Owner, Roster, RosterInvalid, owner_of, read_roster
from grader.intake.files import read_files, read_uploads
from grader.intake.import_files import TakenIn, take_in
from grader.intake.incoming import FileRefused, Incoming, IntakeLimits

__all__ = [
    "FileRefused",
    "Incoming",
    "IntakeLimits",
    "Owner",
    "Roster",
    "RosterInvalid",
    "TakenIn",
    "owner_of",
    "read_archive",
    "read_files",
    "read_roster",
    "read_uploads",
    "take_in",
]
