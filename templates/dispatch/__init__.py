"""Rows go to their experts."""
