"""Tests, in the folders of the package."""
