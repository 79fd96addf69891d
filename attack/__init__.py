"""An attack on ourselves: damaged files, kills, hostile places: `python -m attack --list`.

It may import the package and is imported by nothing but its own tests.
"""
