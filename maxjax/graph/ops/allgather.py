"""``allgather``, under MAX's path."""

from .collectives import allgather as allgather
