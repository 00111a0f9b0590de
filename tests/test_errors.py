"""The error classes, and the built-in exceptions that each inherits from, on which callers rely."""

import logging
import pickle

import pytest

from maxjax import errors

# Class → the built-in exceptions that it can be caught as.
ALSO: dict[str, tuple[type, ...]] = {
    "CheckpointError": (),
    "CheckpointMissingError": (FileNotFoundError, OSError),
    "CheckpointAccessError": (PermissionError, OSError),
    "CheckpointTruncatedError": (ValueError,),
    "CheckpointFormatError": (ValueError,),
    "CheckpointCorruptError": (),
    "CheckpointUnsafeError": (),
    "CheckpointLimitError": (),
    "CheckpointMismatchError": (ValueError,),
    "CheckpointChangedError": (),
    "CheckpointIncompleteError": (),
    "CheckpointSaveError": (OSError,),
    "CheckpointBusyError": (),
    "OutOfMemoryError": (MemoryError,),
    "PeerLostError": (RuntimeError,),
    "UnsupportedModelError": (NotImplementedError, RuntimeError),
    "UserInputError": (ValueError,),
}
PYTHONS = {ValueError, OSError, FileNotFoundError, PermissionError, MemoryError, RuntimeError,
           NotImplementedError, KeyError, TypeError}  # fmt: skip


def test_no_class_is_left_out():
    there = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, Exception)}
    assert ALSO.keys() <= there


@pytest.mark.parametrize("name", ALSO)
def test_what_it_may_be_caught_as(name):
    found = {kind for kind in PYTHONS if issubclass(getattr(errors, name), kind)}
    assert found == set(ALSO[name])
    assert issubclass(getattr(errors, name), errors.CheckpointError) == name.startswith(
        "Checkpoint"
    )


# A right-to-left override, a control of ISO 6429 in one character, an escape sequence, a surrogate.
MARKS = "\u202e\x9b31m\x1b[2J\u2066\ud800"


@pytest.mark.parametrize("name", ALSO)
def test_a_message_cannot_steer_a_terminal(name):
    error = getattr(errors, name)(f"no {MARKS}\nsecond")
    for one in (error, pickle.loads(pickle.dumps(error))):
        said = str(one)
        assert said.replace("\n", "").isprintable() and "\\x1b[2J" in said
        assert isinstance(one, getattr(errors, name))


def test_a_log_cannot_steer_a_terminal(caplog):
    logging.getLogger("maxjax").warning("%s: %s", MARKS, 3)
    assert caplog.messages == ["\\u202e\\x9b31m\\x1b[2J\\u2066\\ud800: 3"]
