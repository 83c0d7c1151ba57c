"""Developers' commands: what writes committed files, what tries the wheel."""
