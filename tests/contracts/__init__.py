"""Contracts: tables of what maxjax has of a kind, and the tests that every row of a table passes."""
