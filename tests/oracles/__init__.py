"""Reference implementations the tests compare with, and the scripts that record goldens."""
