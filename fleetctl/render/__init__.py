"""Texts, tables and pages for people. The daemon sends facts; their wording is here."""
