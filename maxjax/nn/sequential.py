"""MAX's path of Sequential."""

from .layer import Sequential as Sequential
