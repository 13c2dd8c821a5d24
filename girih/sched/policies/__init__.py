"""Scheduling policies: one file each, with a function `order`."""
