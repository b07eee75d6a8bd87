"""`python -m noisegate`."""

from noisegate.cli import main

main()
