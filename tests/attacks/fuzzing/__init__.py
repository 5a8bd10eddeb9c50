"""Broken and hostile files by the thousand: a case's number determines what is changed of a sound file, and the case runs.

`python tests/attacks/fuzz.py` runs ranges of cases in processes of their own, so that the end of one is a result too.
"""
