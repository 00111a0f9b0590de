"""Re-export of Sequential under MAX's path."""

from .layer import Sequential as Sequential
