"""The hooks of maxjax, at MAX's path."""

from .print_hook import PrintHook as PrintHook
